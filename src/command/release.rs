//! `withlock release`.

use crate::cli::Release;
use crate::options::{self, is_among};
use crate::record::Nonce;
use crate::store::handed::{self, Handed};
use crate::sys::process::variable;
use crate::sys::signal::OnEntry;

use super::by_nonce::Target;

/// Releases a lock that was taken with `acquire`; the exit code.
pub(super) fn release(given: Release, on_entry: &OnEntry) -> anyhow::Result<u8> {
    let target = Target::new(given.lock, given.nonce.as_deref())?;
    let is_run_under = is_run_under(&target.nonce);
    let done = match target.service(&options::access(&given.service), on_entry)? {
        Some(service) if is_run_under => {
            service.check(&target.nonce)?.map_or_else(Handed::left_to_command, Handed::NotHeld)
        }
        Some(service) => service.release(&target.nonce)?,
        None => target.at_place(|place| {
            if is_run_under {
                handed::leave_to_command(&place, target.nonce)
            } else {
                handed::release(&place, target.nonce)
            }
        })?,
    };
    Ok(target.report(&done, "not released"))
}

/// Whether this process is run under the lock with this nonce, by whoever keeps it for its command and gives it
/// back in the end. Its record does not tell that from one that a script has taken, where the command has not
/// inherited a guard.
fn is_run_under(nonce: &Nonce) -> bool {
    let is_in = |name| variable(name).is_some_and(|nonces| is_among(&nonces, nonce));
    is_in("WITHLOCK_HELD") && !is_in("WITHLOCK_ACQUIRED")
}
