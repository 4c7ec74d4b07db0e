//! `withlock release`.

use crate::cli::Release;
use crate::options;
use crate::store::handed;
use crate::sys::signal::OnEntry;

use super::by_nonce::Target;

/// Releases a lock that was taken with `acquire`; the exit code.
pub(super) fn release(given: Release, on_entry: &OnEntry) -> anyhow::Result<u8> {
    let target = Target::new(given.lock, given.nonce.as_deref())?;
    let done = match target.service(&options::access(&given.service), on_entry)? {
        Some(service) => service.release(&target.nonce)?,
        None => target.at_place(|place| handed::release(&place, target.nonce))?,
    };
    Ok(target.report(&done, "not released"))
}
