//! `withlock renew`.

use crate::cli::Renew;
use crate::store::handed;

use super::by_nonce::Target;

/// Renews a lock that was taken with `acquire`; the exit code.
pub(super) fn renew(given: Renew) -> anyhow::Result<u8> {
    let target = Target::new(given.lock, given.nonce.as_deref())?;
    let done = handed::renew(target.place()?, target.nonce)?;
    Ok(target.report(&done, "not renewed"))
}
