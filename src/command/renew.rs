//! `withlock renew`.

use crate::cli::Renew;
use crate::options;
use crate::store::handed;
use crate::sys::signal::OnEntry;

use super::by_nonce::Target;

/// Renews a lock that was taken with `acquire`; the exit code.
pub(super) fn renew(given: Renew, on_entry: &OnEntry) -> anyhow::Result<u8> {
    let target = Target::new(given.lock, given.nonce.as_deref())?;
    let done = match target.service(&options::access(&given.service), on_entry)? {
        Some(service) => service.renew(&target.nonce)?,
        None => target.at_place(|place| handed::renew(place, target.nonce))?,
    };
    Ok(target.report(&done, "not renewed"))
}
