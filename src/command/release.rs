//! `withlock release`.

use crate::cli::Release;
use crate::store::handed;

use super::by_nonce::Target;

/// Releases a lock that was taken with `acquire`; the exit code.
pub(super) fn release(given: Release) -> anyhow::Result<u8> {
    let target = Target::new(given.lock, given.nonce.as_deref())?;
    let done = handed::release(&target.place()?, target.nonce)?;
    Ok(target.report(&done, "not released"))
}
