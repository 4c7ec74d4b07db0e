//! What a path on the command line of `inspect` and `reclaim` stands for.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use crate::record::SlotName;
use crate::report::document::{PathText, Problem};
use crate::store::look::{Listing, list};
use crate::store::{Fault, Place, Seen};
use crate::sys::file::{Dir, Kind};

use super::Plainly;

/// What a path stands for.
pub(super) enum Asked {
    /// The lock at this path.
    Lock(OsString),
    /// The lock at this path, by one of its quarantines.
    Quarantine(OsString),
    /// All that is in the directory there.
    Directory,
}

impl Asked {
    /// A directory is listed. A symbolic link is not followed, unless a slash says that a directory is
    /// meant.
    pub(super) fn of(path: &OsStr) -> Self {
        let name = path.as_bytes().rsplit(|b| *b == b'/').next().unwrap_or_default();
        if !path.is_empty() && matches!(name, b"" | b"." | b"..") {
            return Asked::Directory;
        }
        let lock = || Asked::Lock(path.to_owned());
        let Ok(place) = Place::open(path, false) else { return lock() };
        let Ok(Some(stat)) = place.dir.lstat(&place.name) else { return lock() };
        match (stat.kind, SlotName::split(&place.name)) {
            (Kind::Directory, None) => Asked::Directory,
            (Kind::Directory, Some((lock, _))) => Asked::Quarantine(beside(path, lock)),
            // Without space for a directory the dead owner's file is its own quarantine.
            (Kind::Regular, Some((lock, slot))) => match place.observe() {
                Ok(Seen::Epoch(epoch)) if epoch.slot_name() == slot => Asked::Quarantine(beside(path, lock)),
                _ => Asked::Lock(path.to_owned()),
            },
            _ => lock(),
        }
    }
}

/// The names in a directory.
pub(super) fn listing(path: &OsStr, only_quarantined: bool) -> Result<Listing, Fault> {
    // Only its errors are wanted: they are those of a lock in that directory, which nobody named.
    let inside = Place::open(&beside(&with_slash(path), OsStr::new("x")), false);
    let listed = inside.and_then(|place| {
        let listed = Dir::open(path).and_then(|dir| list(&dir, only_quarantined));
        listed.map_err(|errno| place.change_fault("list it", errno))
    });
    listed.map_err(|fault| fault.of(path.as_bytes()))
}

/// The path of a neighbour of what is at `path`.
pub(super) fn beside(path: &OsStr, name: &OsStr) -> OsString {
    let bytes = path.as_bytes();
    let parent = bytes.iter().rposition(|b| *b == b'/').map_or(&[][..], |slash| &bytes[..=slash]);
    OsStr::from_bytes(&[parent, name.as_bytes()].concat()).to_owned()
}

/// A directory's path so that a name can follow it.
pub(super) fn with_slash(path: &OsStr) -> OsString {
    let slash = if path.as_bytes().ends_with(b"/") { "" } else { "/" };
    [path, OsStr::new(slash)].into_iter().collect()
}

/// A fault, for a document.
pub(super) fn problem(path: &OsStr, fault: Fault) -> Problem {
    let exit = fault.exit().code();
    Problem { name: PathText::new(path), error: Plainly(fault).to_string(), exit }
}
