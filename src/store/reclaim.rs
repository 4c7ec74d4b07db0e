//! Quarantines: what they hold, when they may go, and how they go.
//!
//! The name of an ended epoch's slot stays occupied for a while on purpose: a delayed rival that still
//! believes in the old owner renames towards that name and fails on it. Deleting it at once would let
//! that rival move a successor's live lock into the freed name.

use std::ffi::{OsStr, OsString};

use crate::lease::{BLANK_TTL_MS, RECLAIM_MARGIN_MS, Stamp, reclaim_age_ms};
use crate::record::{self, Claim, Content, MAX_READ_BYTES, Record, SlotName, claim_number, split_trash, trash_name};
use crate::sys::file::{Dir, File, Identity, Kind, Outcome, Stat, Try};
use crate::sys::hook::{Step, left_out};
use crate::sys::{Errno, describe, random};
use crate::text::Shown;

use super::claim::QUARANTINED;
use super::permission::may_not_remove;
use super::place::{Place, Seen};

/// Whether a quarantine may go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// No rival of its epoch can still act.
    Reclaimable,
    /// Not yet.
    Young {
        /// Until it may.
        in_ms: u64,
    },
    /// Its epoch is at the lock path: somebody is ending it, or died while doing so.
    Live,
    /// A process still has the guard of the quarantined file, and its maker may be about to release; or one
    /// that would end the epoch is still in the slot.
    Guarded,
    /// It only looks similar: not ours to remove.
    NotOurs(String),
}

/// Something beside a lock whose name is a quarantine's.
#[derive(Debug)]
pub struct Quarantine {
    /// Its name.
    pub name: OsString,
    /// What the name says; `None` for one that was already moved aside to be deleted.
    pub slot: Option<SlotName>,
    /// Whether it may go.
    pub fate: Fate,
    /// How old it is, by its own stamp; negative if that lies in the future.
    pub age_ms: i64,
    /// The age from which on it may go.
    pub safe_age_ms: u64,
    /// The dead owner's record.
    pub record: Option<Record>,
    /// Who ended the epoch, when and why; the newest last.
    pub claims: Vec<Claim>,
    stat: Stat,
    /// The quarantined file; its guard is ours from the look to the removal.
    guard: Option<File>,
    /// The slot; nobody else acts in it from the look to the removal.
    inside: Option<Dir>,
    is_empty: bool,
}

/// Removes what the rule allows of one lock's quarantines. Errors are nobody's business here: what could
/// not be removed is removed next time.
pub fn remove_aged(place: &Place) {
    let Ok(names) = names(place) else { return };
    if names.is_empty() {
        return;
    }
    let Ok(survey) = Survey::to_remove(place) else { return };
    // One after the other: each keeps a descriptor, and a crash loop leaves more of them than there are.
    for name in names {
        if let Ok(Some(found)) = survey.examine(name)
            && found.fate == Fate::Reclaimable
            && may_not_remove(place, &found).is_none()
        {
            let _ = remove(place, &found);
        }
    }
}

/// Removes the oldest of one lock's quarantines that may go, a few at a time: for whoever makes one at
/// every turn, and must not pay for looking at all of them.
pub fn remove_oldest(place: &Place) {
    const AT_ONCE: usize = 16;
    let mut slots: Vec<SlotName> = Vec::new();
    let listed = place.dir.list(|name| slots.extend(SlotName::parse(&place.name, name)));
    if listed.is_err() || slots.is_empty() {
        return;
    }
    slots.sort_unstable_by_key(|slot| slot.claimed_at_ms);
    let Ok(survey) = Survey::to_remove(place) else { return };
    for slot in slots.iter().take(AT_ONCE) {
        match survey.examine(slot.file_name(&place.name)) {
            Ok(Some(found)) if found.fate == Fate::Reclaimable && may_not_remove(place, &found).is_none() => {
                let _ = remove(place, &found);
            }
            // What was taken later was ended later, as a rule.
            Ok(Some(Quarantine { fate: Fate::Young { .. }, .. })) => return,
            _ => {}
        }
    }
}

/// All quarantines of the lock at `place`, and what else has such a name.
pub fn survey(place: &Place) -> Outcome<Vec<Quarantine>> {
    let names = names(place)?;
    if names.is_empty() {
        return Ok(Vec::new());
    }
    let survey = Survey::to_remove(place)?;
    names.into_iter().filter_map(|name| survey.examine(name).transpose()).collect()
}

/// The names beside the lock at `place` that are those of its quarantines, sorted.
pub fn names(place: &Place) -> Outcome<Vec<OsString>> {
    let mut names: Vec<OsString> = Vec::new();
    place.dir.list(|name| {
        if SlotName::parse(&place.name, name).is_some() || split_trash(name) == Some(place.name.as_os_str()) {
            names.push(name.to_owned());
        }
    })?;
    names.sort();
    Ok(names)
}

/// What one lock's quarantines are judged by.
#[derive(Debug)]
pub struct Survey<'a> {
    place: &'a Place,
    now: Stamp,
    at_path: AtPath,
    takes_guards: bool,
}

/// What is at the lock path. Looked at once, after the names were read: an epoch that has ended never
/// comes back.
#[derive(Debug)]
enum AtPath {
    Epoch(SlotName),
    None,
    /// What cannot be looked at may be any slot's epoch.
    Unknown,
}

impl<'a> Survey<'a> {
    /// To remove what is found reclaimable: the guard of each quarantined file is taken and kept until
    /// then.
    pub fn to_remove(place: &'a Place) -> Outcome<Self> {
        // The file system's clock, by the stamp of a file made just now: never of the slot itself, whose
        // stamp is what is judged.
        let now = place.dir.file_system_time(&trash_name(&place.name, &random::nonce()))?;
        Ok(Survey { place, now, at_path: AtPath::look(place), takes_guards: true })
    }

    /// Only to look, at the time `now`: nothing is written or locked, so a fate of
    /// [`Fate::Reclaimable`] says nothing of the guard.
    pub fn only_to_look(place: &'a Place, now: Stamp) -> Self {
        Survey { place, now, at_path: AtPath::look(place), takes_guards: false }
    }

    /// Judges what has this name; `None` if nothing has it any more.
    pub fn examine(&self, name: OsString) -> Outcome<Option<Quarantine>> {
        let Some(stat) = self.place.dir.lstat(&name)? else { return Ok(None) };
        let slot = SlotName::parse(&self.place.name, &name);
        let mut found = Quarantine {
            name,
            slot,
            fate: Fate::Reclaimable,
            age_ms: self.now.since_ms(stat.mtime),
            safe_age_ms: reclaim_age_ms(BLANK_TTL_MS),
            record: None,
            claims: Vec::new(),
            stat,
            guard: None,
            inside: None,
            is_empty: false,
        };
        let looked = match stat.kind {
            Kind::Directory => found.look_inside(self.place),
            Kind::Regular => found.look_at_file(self.place),
            kind => Ok(Some(format!("it is {}", kind.describe()))),
        };
        match looked {
            Ok(None) => found.decide(self)?,
            Ok(Some(why)) => found.fate = Fate::NotOurs(why),
            Err(Errno::ENOENT) => return Ok(None),
            Err(errno) => found.fate = Fate::NotOurs(format!("it cannot be examined: {}", describe(errno))),
        }
        Ok(Some(found))
    }
}

impl AtPath {
    fn look(place: &Place) -> Self {
        match place.observe() {
            Ok(Seen::Free | Seen::Foreign(..)) => AtPath::None,
            Ok(Seen::Epoch(epoch)) if epoch.known == super::Known::Unreadable => AtPath::Unknown,
            Ok(Seen::Epoch(epoch)) => AtPath::Epoch(epoch.slot_name()),
            Err(_) => AtPath::Unknown,
        }
    }

    fn may_be(&self, slot: Option<SlotName>) -> bool {
        match self {
            AtPath::Epoch(live) => slot == Some(*live),
            AtPath::None => false,
            AtPath::Unknown => true,
        }
    }
}

impl Quarantine {
    /// Reads a slot's content; `Some` says what does not belong there.
    fn look_inside(&mut self, place: &Place) -> Outcome<Option<String>> {
        let dir = place.dir.open_dir(&self.name)?;
        if dir.stat()?.identity != self.stat.identity {
            return Err(Errno::ENOENT);
        }
        let mut names = Vec::new();
        dir.list(|name| names.push(name.to_owned()))?;
        names.sort_by_key(|name| claim_number(name));
        self.is_empty = names.is_empty();
        for name in &names {
            let expected = name == QUARANTINED || claim_number(name).is_some();
            let Some(stat) = dir.lstat(name)? else { continue };
            if name == QUARANTINED && stat.kind == Kind::Directory {
                // The seal on the slot of a lock that was blank.
                let mut is_empty = true;
                dir.open_dir(name)?.list(|_| is_empty = false)?;
                if is_empty {
                    continue;
                }
            }
            if !expected || stat.kind != Kind::Regular {
                return Ok(Some(format!("it holds {}, {}", Shown::os(name), stat.kind.describe())));
            }
            let file = dir.open_file(name)?;
            let content = file.content(MAX_READ_BYTES)?;
            if name == QUARANTINED {
                if !self.belongs(&content, &stat) {
                    return Ok(Some("the lock in it is not this epoch's".into()));
                }
                self.take_record(&content);
                self.guard = Some(file);
            } else if let Ok(claim) = serde_json::from_slice::<Claim>(&content) {
                self.claims.push(claim);
            }
        }
        self.inside = Some(dir);
        Ok(None)
    }

    /// Reads a quarantine that is a plain file: left by a crash inside a release, or made for want of
    /// space.
    fn look_at_file(&mut self, place: &Place) -> Outcome<Option<String>> {
        let file = place.dir.open_file(&self.name)?;
        if file.stat()?.identity != self.stat.identity {
            return Err(Errno::ENOENT);
        }
        let content = file.content(MAX_READ_BYTES)?;
        // An empty file is anybody's. Ours was ended while it was blank, and its slot is named by its inode. (Nor does
        // a record's name make it ours: what a power cut has emptied is kept.)
        let is_blank = record::classify(&content, self.stat.size_bytes) == Content::Blank;
        let is_named = self.slot.is_none_or(|slot| !is_blank || slot.nonce.is_of_blank(self.stat.identity.ino));
        if !is_named || !self.belongs(&content, &self.stat) {
            return Ok(Some("it is a file without this epoch's record".into()));
        }
        self.take_record(&content);
        self.guard = Some(file);
        Ok(None)
    }

    /// Whether a file with this content is the one that was moved to this name.
    fn belongs(&self, content: &[u8], stat: &Stat) -> bool {
        match record::classify(content, stat.size_bytes) {
            Content::Record(record) => self.slot.is_none_or(|slot| {
                // The maker of a blank lock may have written its record after it was ended.
                slot == SlotName::of(&record) || slot.nonce.is_of_blank(stat.identity.ino)
            }),
            Content::Blank => true,
            Content::Newer(_) | Content::Foreign => false,
        }
    }

    fn take_record(&mut self, content: &[u8]) {
        if let Content::Record(record) = record::classify(content, content.len() as u64) {
            self.record = Some(*record);
        }
    }

    // The removal of a slot is not one step, and in its last moments a rename into it would succeed. Time
    // alone does not exclude that: an ender that stalled for longer may still be about to issue it.
    fn decide(&mut self, survey: &Survey<'_>) -> Outcome<()> {
        let claimed_ttl_ms = self.claims.iter().map(|claim| claim.ttl_ms).max();
        let ttl_ms = self.record.as_ref().map(Record::judged_ttl_ms).or(claimed_ttl_ms).unwrap_or(BLANK_TTL_MS);
        self.safe_age_ms = reclaim_age_ms(ttl_ms.max(crate::lease::MIN_TTL_MS));
        debug_assert!(self.safe_age_ms >= RECLAIM_MARGIN_MS);
        let left_ms = i128::from(self.safe_age_ms) - i128::from(self.age_ms);
        let is_guarded = || -> Outcome<bool> {
            let guard = self.guard.as_ref().filter(|_| survey.takes_guards);
            Ok(guard.map(File::try_guard).transpose()? == Some(Try::Busy))
        };
        self.fate = if survey.at_path.may_be(self.slot) && !left_out(Step::ReclaimLive) {
            Fate::Live
        } else if is_guarded()? && !left_out(Step::ReclaimGuard) {
            Fate::Guarded
        } else if left_ms >= 0 && !left_out(Step::ReclaimAge) {
            Fate::Young { in_ms: u64::try_from(left_ms + 1).unwrap_or(u64::MAX) }
        } else if survey.takes_guards
            && survey.place.file_system.local
            && self.inside.as_ref().map(Dir::close_off).transpose()? == Some(Try::Busy)
        {
            Fate::Guarded
        } else {
            Fate::Reclaimable
        };
        Ok(())
    }

    /// The quarantined file; its guard is somebody's own business.
    pub fn file_identity(&self) -> Option<Identity> {
        self.guard.as_ref().and_then(|file| file.stat().ok()).map(|stat| stat.identity)
    }

    /// Whether it is a directory, with the dead owner's record inside; otherwise it is that file.
    pub fn is_directory(&self) -> bool {
        self.stat.kind == Kind::Directory
    }

    /// What it is.
    pub(super) fn stat(&self) -> &Stat {
        &self.stat
    }

    /// The slot, if something in it has to be removed first.
    pub(super) fn inside(&self) -> Option<&Dir> {
        self.inside.as_ref().filter(|_| !self.is_empty)
    }

    /// Whether the name leads to what was examined.
    fn is_at(&self, dir: &Dir, name: &OsStr) -> Outcome<bool> {
        Ok(dir.lstat(name)?.is_some_and(|stat| stat.identity == self.stat.identity))
    }
}

/// Removes a quarantine that was found reclaimable: first to a private name, then for good, so that a
/// rival never sees half a slot. `false`: somebody else was faster.
pub fn remove(place: &Place, found: &Quarantine) -> Outcome<bool> {
    let dir = &place.dir;
    let private = if found.slot.is_some() {
        let private = trash_name(&place.name, &random::nonce());
        match dir.rename_noreplace(&found.name, dir, &private) {
            Ok(()) => {}
            Err(Errno::ENOENT) => return Ok(false),
            // No flags on this file system; a fresh random name has nothing to replace.
            Err(Errno::EINVAL | Errno::ENOSYS | Errno::EOPNOTSUPP) => dir.rename(&found.name, dir, &private)?,
            Err(errno) => return Err(errno),
        }
        private
    } else {
        found.name.clone()
    };
    if !found.is_at(dir, &private)? {
        // The name was given to another slot since we looked: put that back.
        if found.slot.is_some() {
            dir.rename_noreplace(&private, dir, &found.name)?;
        }
        return Ok(false);
    }
    // From here on another reclaimer may be at the same private name: whoever takes the last of it away
    // has removed it.
    if found.stat.kind == Kind::Regular {
        return was_mine(dir.unlink(&private));
    }
    let slot = match dir.open_dir(&private) {
        Ok(slot) => slot,
        Err(Errno::ENOENT) => return Ok(false),
        Err(errno) => return Err(errno),
    };
    let mut names = Vec::new();
    slot.list(|name| names.push(name.to_owned()))?;
    for name in names.iter().filter(|name| *name == QUARANTINED || claim_number(name).is_some()) {
        let removed = match slot.unlink(name) {
            Err(Errno::EISDIR) => slot.remove_dir(name),
            unlinked => unlinked,
        };
        was_mine(removed)?;
    }
    was_mine(dir.remove_dir(&private))
}

fn was_mine(removed: Outcome<()>) -> Outcome<bool> {
    match removed {
        Ok(()) => Ok(true),
        Err(Errno::ENOENT) => Ok(false),
        Err(errno) => Err(errno),
    }
}
