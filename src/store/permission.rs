//! Who may do what, as far as can be seen without trying: for people, who are not to be sent to do what cannot be
//! done. What counts is what the system says to whoever tries.

use std::ffi::OsStr;

use crate::sys::file::{Dir, Stat};
use crate::sys::fixed::{Fixed, fixed};
use crate::sys::{Errno, describe, process};
use crate::text::Shown;

use super::Known;
use super::claim::QUARANTINED;
use super::end::{is_kept_by_sticky_bit, may_not_rename};
use super::place::{Epoch, Place, is_refusal, owner};
use super::reclaim::Quarantine;

const ROOT_UID: u32 = 0;

/// Why we could not end this epoch even if it were stale, and who could.
pub fn may_not_end(place: &Place, epoch: &Epoch) -> Option<String> {
    if epoch.known == Known::Unreadable {
        return Some(format!("we may not read it; {} may", any_of(&[epoch.stat.uid])));
    }
    may_not_rename(place, &epoch.stat)
        .map(|why| with_owners(why, place, &epoch.stat))
        .or_else(|| may_not_change(place))
        .or_else(|| is_fixed(&place.dir, &place.name))
}

/// Why we could not remove this quarantine even if it is old enough, and who could.
pub fn may_not_remove(place: &Place, found: &Quarantine) -> Option<String> {
    may_not_rename(place, found.stat())
        .map(|why| with_owners(why, place, found.stat()))
        .or_else(|| may_not_change(place))
        .or_else(|| is_fixed(&place.dir, &found.name))
        .or_else(|| found.inside().and_then(|inside| may_not_empty(inside, found.stat())))
}

/// Why no name in the lock's directory can be made or taken away by us.
fn may_not_change(place: &Place) -> Option<String> {
    if let Some(why) = is_directory_fixed(place) {
        return Some(why);
    }
    let parent = Shown::os(place.parent());
    // Any other error says nothing of permission.
    let errno = place.dir.may_write().err().filter(|errno| is_refusal(*errno))?;
    let why = format!("directory {parent} may not be changed: {}", describe(errno));
    Some(match (errno, place.dir.stat()) {
        (Errno::EROFS, _) => format!("{why}; nobody may while it is mounted read-only"),
        (_, Ok(stat)) => format!("{why} ({}); root or who may write there may", whose(&stat)),
        (_, Err(_)) => why,
    })
}

/// Why the inside of another's slot stays as it is.
fn may_not_empty(inside: &Dir, slot: &Stat) -> Option<String> {
    match inside.may_write() {
        Err(errno) if is_refusal(errno) => {
            let who = any_of(&[slot.uid]);
            Some(format!("what is in it may not be removed: {} ({}); {who} may", describe(errno), whose(slot)))
        }
        _ => is_fixed(inside, OsStr::new(QUARANTINED)),
    }
}

/// Why nobody, not even root, could take the lock off its path.
pub(super) fn is_kept(place: &Place) -> Option<String> {
    is_directory_fixed(place).or_else(|| is_fixed(&place.dir, &place.name))
}

fn is_directory_fixed(place: &Place) -> Option<String> {
    let why = is_fixed(&place.dir, OsStr::new("."))?;
    Some(format!("directory {}: {why}", Shown::os(place.parent())))
}

fn is_fixed(dir: &Dir, name: &OsStr) -> Option<String> {
    let (word, letter) = match fixed(dir, name)? {
        Fixed::Immutable => ("immutable", 'i'),
        Fixed::AppendOnly => ("append-only", 'a'),
    };
    Some(format!("it is {word}; nobody may before root has changed that (chattr -{letter})"))
}

/// Whose it is and who we are, for the brackets after what we may not.
pub fn whose(stat: &Stat) -> String {
    format!("it belongs to {}, mode {:04o}; we are uid {}", owner(stat.uid), stat.mode, process::effective_uid())
}

/// Whom the sticky bit lets.
fn with_owners(why: String, place: &Place, file: &Stat) -> String {
    let dir = place.dir.stat().ok().filter(|dir| is_kept_by_sticky_bit(dir, file));
    let owners: Vec<u32> = dir.iter().map(|dir| dir.uid).chain([file.uid]).collect();
    format!("{why}; {} may", any_of(&owners))
}

/// These users and root, each once: `deploy or root`.
fn any_of(uids: &[u32]) -> String {
    let mut others: Vec<u32> = uids.iter().copied().filter(|uid| *uid != ROOT_UID).collect();
    others.sort_unstable();
    others.dedup();
    let mut text: String = others.iter().map(|uid| owner(*uid)).collect::<Vec<_>>().join(", ");
    if !text.is_empty() {
        text.push_str(" or ");
    }
    text + "root"
}
