//! A look at a lock that changes nothing: no lock is taken, no byte written, and it works on a read-only
//! file system and without permission to read the lock.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};

use crate::lease::{Stamp, reclaim_age_ms};
use crate::record::{
    Claim, MAX_BLANK_BYTES, MAX_READ_BYTES, SIGNATURE, SlotName, claim_name, claim_number, is_quarantine_like,
    split_trash,
};
use crate::sys::Errno;
use crate::sys::file::{Dir, Kind, Outcome};

use super::claim::Claims;
use super::place::{Epoch, Place};
use super::reclaim::{self, Quarantine, Survey};

/// Somebody has entered the slot of a living epoch and has a claim there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Contest {
    /// Who, when and why, where that can be read.
    pub claim: Option<Claim>,
    /// How long ago, by the clock that was given.
    pub age_ms: i64,
    /// From when on the claim may be passed over by everybody: its owner must be dead.
    pub passed_over_in_ms: u64,
}

/// The newest claim in the slot of `epoch`, unless its owner must be dead.
pub fn contest(place: &Place, epoch: &Epoch, now: Stamp) -> Outcome<Option<Contest>> {
    if epoch.known == super::Known::Unreadable {
        return Ok(None);
    }
    let slot = match place.dir.open_dir(&epoch.slot_name().file_name(&place.name)) {
        Ok(slot) => slot,
        Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP | Errno::EACCES) => return Ok(None),
        Err(errno) => return Err(errno),
    };
    let claims = Claims::read(&slot)?;
    let (Some(number), false) = (claims.highest, claims.ended) else { return Ok(None) };
    let Some(made) = claims.newest_stamp(&slot)? else { return Ok(None) };
    let age_ms = now.since_ms(made);
    let dead_at_ms = i128::from(reclaim_age_ms(epoch.ttl_ms()));
    let left_ms = dead_at_ms - i128::from(age_ms);
    if left_ms < 0 {
        return Ok(None);
    }
    let content = slot.open_file(OsStr::new(&claim_name(number))).and_then(|file| file.content(MAX_READ_BYTES));
    let claim = content.ok().and_then(|content| serde_json::from_slice(&content).ok());
    Ok(Some(Contest { claim, age_ms, passed_over_in_ms: u64::try_from(left_ms).unwrap_or(u64::MAX) }))
}

/// Tells `each` the quarantines of the lock at `place`, judged without taking a guard: a fate of
/// [`reclaim::Fate::Reclaimable`] says nothing of it. One after the other: each keeps a descriptor.
pub fn each_quarantine(place: &Place, now: Stamp, mut each: impl FnMut(&Quarantine)) -> Outcome<()> {
    let names = reclaim::names(place)?;
    let survey = Survey::only_to_look(place, now);
    for name in names {
        survey.examine(name)?.iter().for_each(&mut each);
    }
    Ok(())
}

/// What a directory holds.
#[derive(Debug, Default)]
pub struct Listing {
    /// Names of locks, and of locks that are gone but have quarantines.
    pub locks: BTreeSet<OsString>,
    /// Names of quarantines.
    pub quarantined: Vec<OsString>,
    /// Names that look like a quarantine's and are none.
    pub similar: Vec<OsString>,
    /// Names of files that may be locks whose maker died, and why that cannot be told: an empty file is
    /// an empty file, and many a program keeps some.
    pub unclear: Vec<(OsString, String)>,
}

/// Lists the locks in a directory; with `only_quarantined` only by their quarantines, without a look at
/// any file.
pub fn list(dir: &Dir, only_quarantined: bool) -> Outcome<Listing> {
    let mut listing = Listing::default();
    let mut others = Vec::new();
    dir.list(|name| {
        if let Some(lock) = SlotName::split(name).map(|(lock, _)| lock).or_else(|| split_trash(name)) {
            listing.locks.insert(lock.to_owned());
            listing.quarantined.push(name.to_owned());
        } else if is_quarantine_like(name) {
            listing.similar.push(name.to_owned());
        } else if !only_quarantined {
            others.push(name.to_owned());
        }
    })?;
    others.sort();
    listing.quarantined.sort();
    listing.similar.sort();
    for name in others {
        // What vanishes while we look is no lock any more.
        let Ok(Some(stat)) = dir.lstat(&name) else { continue };
        if stat.size_bytes == 0 && claim_number(&name).is_some() {
            // The marker of a reserved number: there may be a hundred thousand of them.
            continue;
        }
        if stat.kind != Kind::Regular || stat.size_bytes > MAX_READ_BYTES as u64 {
            continue;
        }
        let beginning = dir.open_file(&name).and_then(|file| file.content(SIGNATURE.len()));
        match beginning {
            Ok(bytes) if bytes == SIGNATURE => {
                listing.locks.insert(name);
            }
            Ok(bytes) if stat.size_bytes <= MAX_BLANK_BYTES as u64 && !listing.locks.contains(&name) => {
                let why = match bytes.iter().find(|b| **b != 0) {
                    None if bytes.is_empty() => "it is empty",
                    None => "it holds only NUL bytes",
                    Some(_) if SIGNATURE.starts_with(&bytes) => "it is cut short",
                    Some(_) => continue,
                };
                listing.unclear.push((name, why.into()));
            }
            Err(Errno::EACCES | Errno::EPERM) if !listing.locks.contains(&name) => {
                listing.unclear.push((name, "we may not read it".into()));
            }
            Ok(_) | Err(_) => {}
        }
    }
    Ok(listing)
}
