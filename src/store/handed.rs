//! What somebody may do who was handed nothing but a nonce: a script that took its lock with `acquire`.
//!
//! Not the process that made the grant, so it never renames the lock file itself: it renews as a holder
//! does, through a descriptor whose record it has read, and releases through the slot like any ender.

use std::sync::Arc;

use crate::lease::{claim_deadline_ms, retry_every_ms};
use crate::machine::Renewal;
use crate::record::{Guard, Nonce, Why};
use crate::sys::clock::boot_ms;
use crate::sys::{Errno, sleep};

use super::end::{Basis, End, Ending, VETO_PATIENCE_MS, end};
use super::held::FileHeld;
use super::permission::is_kept;
use super::place::{Epoch, Known, Place, Seen};
use super::{Fault, reclaim};

/// What became of a renewal or a release.
#[derive(Debug, PartialEq, Eq)]
pub enum Handed {
    /// Done.
    Done,
    /// The lock is not held with this nonce; what was found instead. Nothing was touched.
    NotHeld(String),
    /// It is, but it could not be done just now; why not.
    NotNow(String),
    /// It is, but we may not; why not.
    MayNot(String),
}

impl Handed {
    /// Not released: whoever runs a command under the lock vouches for that command, and alone gives it back.
    pub fn left_to_command() -> Self {
        Handed::NotNow("it is released when the command that runs under it ends".into())
    }
}

/// Renews the lock, if it is held with `nonce`.
pub fn renew(place: Place, nonce: Nonce) -> Result<Handed, Fault> {
    let place = Arc::new(place);
    let epoch = match find(&place, nonce)? {
        Ok(epoch) => epoch,
        Err(refused) => return Ok(refused),
    };
    let Epoch { stat, known: Known::Record(record), file: Some(read) } = epoch else {
        return Ok(Handed::NotHeld(NO_RECORD.into()));
    };
    let ttl_ms = record.judged_ttl_ms();
    // One's own file can be touched through a descriptor that only reads, a writable one of another
    // user's only through one that writes: to the same inode, or it is another epoch.
    let file = match place.dir.open_file_to_write(&place.name) {
        Ok(file) if file.stat().map_err(|errno| place.fault("examine it", errno))?.identity == stat.identity => file,
        _ => read,
    };
    let held = FileHeld::adopt(Arc::clone(&place), file, stat, *record);
    let until_ms = boot_ms() + claim_deadline_ms(ttl_ms);
    loop {
        match held.try_renew() {
            Ok(Renewal::Confirmed) => return Ok(Handed::Done),
            Ok(Renewal::Lost(found)) => return Ok(Handed::NotHeld(found)),
            // Whoever is in the slot ends it by then, or sees the touch and leaves.
            Ok(Renewal::Contested) if boot_ms() < until_ms => sleep::pause(retry_every_ms(ttl_ms).min(50)),
            Ok(Renewal::Contested) => return Ok(Handed::NotNow("another process wants to end it".into())),
            // A file answers at once.
            Ok(Renewal::Pending) => {}
            Ok(Renewal::Failed(why)) => return Ok(Handed::NotNow(why)),
            Err(errno @ (Errno::EACCES | Errno::EPERM)) => return Err(place.not_permitted("renew it", errno)),
            Err(errno) => return Err(place.change_fault("renew it", errno)),
        }
    }
}

/// Ends the epoch of `nonce` through its slot, whoever made the grant.
pub fn release(place: &Place, nonce: Nonce) -> Result<Handed, Fault> {
    let began_ms = boot_ms();
    loop {
        let epoch = match find(place, nonce)? {
            Ok(epoch) => epoch,
            Err(refused) => return Ok(refused),
        };
        let until_ms = began_ms + claim_deadline_ms(epoch.ttl_ms());
        let guard = epoch.record().map_or(Guard::None, |record| record.guard);
        // A keeper has the guard until it sees that the lock is gone. But where a command has inherited
        // it, the wrapper vouches for that command, and alone gives the lock back.
        let force = guard == Guard::Wrapper;
        let ending = Ending {
            judged: &epoch,
            basis: Basis::Any,
            why: Why::LateRelease,
            force,
            reason: None,
            mine: None,
            patience_ms: if force { 0 } else { VETO_PATIENCE_MS },
        };
        match end(place, &ending)? {
            End::Done(_) | End::DoneAside(_) => {
                // A script that takes and gives in a loop must not fill the directory.
                reclaim::remove_oldest(place);
                return Ok(Handed::Done);
            }
            End::Vetoed if guard == Guard::Inherited => return Ok(Handed::left_to_command()),
            End::Vetoed => return Ok(Handed::NotNow("a process has its guard".into())),
            End::MayNot(why) => return Ok(Handed::MayNot(is_kept(place).unwrap_or(why))),
            End::Gone | End::Claimed | End::NotStale { .. } if boot_ms() < until_ms => sleep::pause(10),
            End::Gone | End::Claimed | End::NotStale { .. } => {
                return Ok(Handed::NotNow("another process is ending it".into()));
            }
        }
    }
}

/// What a release comes to of a lock that somebody runs a command under: it is left alone.
pub fn leave_to_command(place: &Place, nonce: Nonce) -> Result<Handed, Fault> {
    Ok(find(place, nonce)?.err().unwrap_or_else(Handed::left_to_command))
}

const NO_RECORD: &str = "its record is not written yet, or broken";

/// The epoch at the lock path, if it is the one of `nonce`.
fn find(place: &Place, nonce: Nonce) -> Result<Result<Epoch, Handed>, Fault> {
    let seen = match place.observe() {
        // Where no lock can be, this one is not.
        Err(Fault::CannotTake { why, .. }) => return Ok(Err(Handed::NotHeld(why))),
        seen => seen?,
    };
    Ok(match seen {
        Seen::Free => Err(Handed::NotHeld("nobody holds it".into())),
        Seen::Foreign(_, what) => Err(Handed::NotHeld(format!("{what} is there instead"))),
        Seen::Epoch(epoch) => match (&epoch.known, epoch.nonce()) {
            (_, Some(found)) if found == nonce => Ok(epoch),
            (_, Some(found)) => Err(Handed::NotHeld(format!("another holds it (nonce {found})"))),
            (Known::Unreadable, _) => Err(Handed::MayNot("we may not read it".into())),
            (_, None) => Err(Handed::NotHeld(NO_RECORD.into())),
        },
    })
}
