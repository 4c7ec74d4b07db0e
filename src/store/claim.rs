//! The inside of a slot: the claims of those who would end its epoch, and the ended epoch's file.

use std::ffi::{OsStr, OsString};

use crate::lease::Stamp;
use crate::record::{Claim, claim_name, claim_number};
use crate::sys::Errno;
use crate::sys::file::{Dir, File, Kind, Outcome};
use crate::sys::hook::Step;

/// The name of the dead owner's file in a slot.
pub(super) const QUARANTINED: &str = "lock";

/// What a slot holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Claims {
    /// The highest claim.
    pub(super) highest: Option<u64>,
    /// The epoch was ended: its file lies here.
    pub(super) ended: bool,
}

impl Claims {
    /// Reads a slot by its descriptor.
    pub(super) fn read(slot: &Dir) -> Outcome<Self> {
        let mut claims = Claims::default();
        slot.list(|name| match claim_number(name) {
            Some(number) => claims.highest = claims.highest.max(Some(number)),
            None => claims.ended |= name == QUARANTINED,
        })?;
        Ok(claims)
    }

    /// When the highest claim was made; `None` if there is none, or it has just been withdrawn.
    pub(super) fn newest_stamp(&self, slot: &Dir) -> Outcome<Option<Stamp>> {
        let Some(number) = self.highest else { return Ok(None) };
        Ok(slot.lstat(OsStr::new(&claim_name(number)))?.map(|stat| stat.mtime))
    }
}

/// What became of an attempt to seal a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sealed {
    /// Nobody can end an epoch there any more, and nobody has.
    Yes,
    /// An epoch was ended there.
    Ended,
    /// We cannot act there.
    Unusable,
}

/// Makes sure that nobody ends an epoch in the slot `name` of `dir` any more: its one place is taken by a
/// directory, which no rename of a file replaces.
///
/// A lock whose maker stalls is blank, and those who end it do so in a slot that is named by inode and time
/// stamp. Once the record is written the nonce names the slot. Were both open, two enders could each win
/// one of them, and the slower would take a successor. Whoever is beyond the last look at the blank lock has
/// a claim there from before the record was written; so it is enough to seal what is there to be seen after.
pub(super) fn seal(dir: &Dir, name: &OsStr) -> Outcome<Sealed> {
    let slot = match dir.open_dir(name) {
        Ok(slot) => slot,
        // Nobody is in it, or what stands there is nothing that could be entered.
        Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP) => return Ok(Sealed::Yes),
        Err(Errno::EACCES | Errno::EPERM) => return Ok(Sealed::Unusable),
        Err(errno) => return Err(errno),
    };
    let place = OsStr::new(QUARANTINED);
    match slot.make_dir(place, 0o700) {
        Ok(()) | Err(Errno::ENOENT) => Ok(Sealed::Yes),
        Err(Errno::EEXIST) => Ok(match slot.lstat(place)? {
            Some(found) if found.kind == Kind::Regular => Sealed::Ended,
            _ => Sealed::Yes,
        }),
        Err(Errno::EACCES | Errno::EPERM) => Ok(Sealed::Unusable),
        Err(errno) => Err(errno),
    }
}

/// A claim that is ours: from here on nobody else ends the epoch, unless they may pass it over.
#[derive(Debug)]
pub(super) struct OurClaim<'slot> {
    slot: &'slot Dir,
    name: OsString,
    file: File,
}

impl<'slot> OurClaim<'slot> {
    /// Claims the slot: exclusive creation decides who ends the epoch. `None`: somebody else was faster,
    /// or the slot is gone.
    pub(super) fn make(slot: &'slot Dir, number: u64, words: &Claim) -> Outcome<Option<Self>> {
        let name = OsString::from(claim_name(number));
        let file = match slot.create_exclusive(&name, 0o644, Step::Claim) {
            Ok(file) => file,
            Err(Errno::EEXIST | Errno::ENOENT) => return Ok(None),
            Err(errno) => return Err(errno),
        };
        // Who, when and why: for people. What decides is that the file exists, so a disk without space
        // for its content stops nobody.
        let _ = file.stat().and_then(|stat| file.let_owner_in(stat.mode));
        let _ = file.write_once(&[serde_json::to_vec(words).unwrap_or_default(), b"\n".to_vec()].concat());
        Ok(Some(OurClaim { slot, name, file }))
    }

    /// When it was made, by the clock of the file system that stamps the lock as well.
    pub(super) fn stamp(&self) -> Outcome<Stamp> {
        self.file.stat().map(|stat| stat.mtime)
    }

    /// Takes the claim back.
    pub(super) fn withdraw(self) {
        let _ = self.slot.unlink(&self.name);
    }
}
