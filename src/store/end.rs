//! Ending an epoch through its slot: evict, break, a late release. **Ending never grants.**
//!
//! The numbers in the comments are the steps of the protocol ("End through the slot" in the crate's
//! documentation).

use std::ffi::OsStr;

use crate::lease::{self, Stamp, Verdict, claim_deadline_ms, reclaim_age_ms};
use crate::record::{Claim, SlotName, Why, trash_name};
use crate::sys::clock::{boot_ms, wall_ms};
use crate::sys::file::{Dir, File, Kind, Stat, Try};
use crate::sys::hook::{Step, left_out};
use crate::sys::process::{self, Who};
use crate::sys::{Errno, describe, random, sleep};
use crate::text::Shown;

use super::claim::{Claims, OurClaim, QUARANTINED, Sealed, seal};
use super::place::{Epoch, Place, Seen, is_refusal};
use super::{Fault, Known};

/// What makes it right to end the epoch, checked once more after the claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Basis {
    /// It is older than its ttl.
    Age,
    /// The observer has seen it unchanged for one ttl of its own boot clock.
    Unchanged,
    /// The kernel dropped the guard that its holder's record says was inherited: all of them are dead.
    DeadHolder,
    /// Its owner, or an operator who insists.
    Any,
}

/// What is to be ended, and by what right.
#[derive(Debug)]
pub struct Ending<'a> {
    /// The epoch that was judged: no other is ended.
    pub judged: &'a Epoch,
    /// By what right.
    pub basis: Basis,
    /// For the claim's record.
    pub why: Why,
    /// Goes on without the guard if another process has it.
    pub force: bool,
    /// The operator's words.
    pub reason: Option<String>,
    /// The holder's own descriptor, and whether it has the guard: for a late release.
    pub mine: Option<(&'a File, bool)>,
    /// How long to try for the guard before a veto counts, in milliseconds.
    pub patience_ms: u64,
}

/// How long an ender tries for the guard the first time, in milliseconds: a waiter that was just given
/// it lets go within microseconds.
pub(super) const VETO_PATIENCE_MS: u64 = 100;

/// What became of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// Ended; the record lies in the slot (or, without space for that, is the slot).
    Done(SlotName),
    /// Ended under the guard alone, since its slot's name was unusable; the record lies here.
    DoneAside(std::ffi::OsString),
    /// Somebody else ended or replaced it, or the look was too old: observe again.
    Gone,
    /// A process vouches for it by its guard: not stale, whatever its age.
    Vetoed,
    /// Another ender is at work.
    Claimed,
    /// By the file system's own clock it is not stale yet.
    NotStale {
        /// Until it will be.
        remaining_ms: u64,
    },
    /// We may not; nothing was made.
    MayNot(String),
}

/// Ends the epoch that was judged, and no other.
pub fn end(place: &Place, ending: &Ending<'_>) -> Result<End, Fault> {
    let opened;
    let (file, have_guard) = match ending.mine {
        Some(mine) => mine,
        None => {
            // (1) Whoever may not rename the lock stops here and makes nothing.
            if let Some(why_not) = may_not_rename(place, &ending.judged.stat) {
                return Ok(End::MayNot(why_not));
            }
            opened = match open_judged(place, ending.judged)? {
                Ok(file) => file,
                Err(end) => return Ok(end),
            };
            match take_guard(place, &opened, ending.patience_ms)? {
                // Another tool's lock file, which was empty before we came: some tools lock it by the other kind.
                Try::Given if !ending.force && ending.judged.known == Known::Blank && opened.is_record_locked() => {
                    return Ok(End::Vetoed);
                }
                Try::Given => (&opened, true),
                // That its guard is free is all that speaks for its being dead.
                _ if ending.basis == Basis::DeadHolder => return Ok(End::Vetoed),
                Try::Unsupported => (&opened, false),
                Try::Busy if ending.force || left_out(Step::Veto) => (&opened, false),
                Try::Busy => return Ok(End::Vetoed),
            }
        }
    };
    // The deadline counts from a look taken with the guard in hand: everything before may have stalled.
    let attempt =
        Attempt { place, ending, file, decides_alone: have_guard && place.file_system.local, looked_ms: boot_ms() };
    if !attempt.is_still_there()? {
        return Ok(End::Gone);
    }
    attempt.through_the_slot()
}

/// A directory with the sticky bit lets only the owners of file or directory rename in it.
pub(super) fn may_not_rename(place: &Place, lock: &Stat) -> Option<String> {
    let dir = place.dir.stat().ok()?;
    let (parent, me) = (Shown::os(place.parent()), process::effective_uid());
    is_kept_by_sticky_bit(&dir, lock)
        .then(|| format!("it belongs to uid {} in a sticky directory ({parent}), we are uid {me}", lock.uid))
}

/// Whether that is so for us.
pub(super) fn is_kept_by_sticky_bit(dir: &Stat, file: &Stat) -> bool {
    const STICKY: u32 = 0o1000;
    let me = process::effective_uid();
    dir.mode & STICKY != 0 && me != 0 && me != file.uid && me != dir.uid
}

/// Opens the lock and reads from this very descriptor that it is what was judged.
fn open_judged(place: &Place, judged: &Epoch) -> Result<Result<File, End>, Fault> {
    let file = match place.dir.open_file(&place.name) {
        Ok(file) => file,
        Err(Errno::ENOENT | Errno::ELOOP | Errno::ENXIO | Errno::ESTALE) => return Ok(Err(End::Gone)),
        Err(Errno::EACCES | Errno::EPERM) => return Ok(Err(End::MayNot("we may not read it".into()))),
        Err(errno) => return Err(place.fault("open it", errno)),
    };
    match Epoch::read(file).map_err(|errno| place.fault("read it", errno))? {
        Some(Seen::Epoch(now)) if now.is(judged) => Ok(now.file.ok_or(End::Gone)),
        _ => Ok(Err(End::Gone)),
    }
}

/// Tries for the guard, more than once: a waiter may have it for an instant.
pub(super) fn take_guard(place: &Place, file: &File, patience_ms: u64) -> Result<Try, Fault> {
    let until_ms = boot_ms() + patience_ms;
    loop {
        match file.try_guard().map_err(|errno| place.fault("lock it with flock", errno))? {
            Try::Busy if boot_ms() < until_ms => sleep::pause(5),
            found => return Ok(found),
        }
    }
}

struct Attempt<'a> {
    place: &'a Place,
    ending: &'a Ending<'a>,
    file: &'a File,
    /// We have the guard, on a file system whose guard every contender sees.
    decides_alone: bool,
    looked_ms: u64,
}

impl Attempt<'_> {
    fn through_the_slot(&self) -> Result<End, Fault> {
        let (dir, judged) = (&self.place.dir, self.ending.judged);
        let slot_name = judged.slot_name();
        let name = slot_name.file_name(&self.place.name);
        // (2) The slot has the permissions of the directory, so that all who may act there may act here.
        let mode = dir.stat().map_or(0o755, |stat| stat.mode);
        let is_new = match dir.make_dir(&name, mode) {
            Ok(()) => true,
            Err(Errno::EEXIST) => false,
            Err(errno @ (Errno::ENOSPC | Errno::EDQUOT | Errno::EMLINK)) => {
                return self.without_space(slot_name, &name, errno);
            }
            Err(errno @ (Errno::EACCES | Errno::EPERM | Errno::EROFS)) => {
                return Ok(End::MayNot(format!("cannot make {}: {}", Shown::os(&name), describe(errno))));
            }
            Err(errno) => return Err(self.place.change_fault("make its quarantine", errno)),
        };
        let slot = match self.enter(&name) {
            Ok(slot) => slot,
            Err(outcome) => {
                // Another's may look like ours and be empty as well.
                if is_new {
                    let _ = dir.remove_dir(&name);
                }
                return outcome;
            }
        };
        let outcome = self.in_the_slot(&slot, slot_name, &name);
        if !matches!(outcome, Ok(End::Done(_))) {
            // Nothing of ours stays behind; a slot in which somebody else is at work is not empty.
            let _ = dir.remove_dir(&name);
        }
        match outcome {
            Err(Fault::Io { errno: errno @ (Errno::ENOSPC | Errno::EDQUOT), .. }) => {
                self.without_space(slot_name, &name, errno)
            }
            outcome => outcome,
        }
    }

    /// (3) From here on only this descriptor: whatever stands at the name later is not our slot.
    fn enter(&self, name: &OsStr) -> Result<Dir, Result<End, Fault>> {
        let slot = self.place.dir.open_dir(name).map_err(|errno| match errno {
            Errno::ENOENT => Ok(End::Gone),
            Errno::ENOTDIR | Errno::ELOOP | Errno::EACCES => self.without_slot(name),
            errno => Err(self.place.change_fault("open its quarantine", errno)),
        })?;
        // Where locks are shared a slot is not reclaimed under whoever acts in it, however long it stalls.
        if self.place.file_system.local && !left_out(Step::Enter) {
            match slot.enter() {
                // Somebody removes it, or a stranger has locked it: not for us to look again at once.
                Ok(Try::Busy) => return Err(Ok(End::Claimed)),
                Ok(_) => {}
                // Who gives back what it made itself is not kept from that by a flock that is refused: it may be
                // why it gives back. The slot is far too young to be reclaimed.
                Err(_) if self.ending.mine.is_some() => {}
                Err(errno) => return Err(Err(self.place.fault("enter its quarantine", errno))),
            }
        }
        Ok(slot)
    }

    fn in_the_slot(&self, slot: &Dir, slot_name: SlotName, name: &OsStr) -> Result<End, Fault> {
        let claims = match Claims::read(slot) {
            Ok(claims) => claims,
            Err(errno) if is_refusal(errno) => return self.without_slot(name),
            Err(errno) => return Err(self.place.fault("read its quarantine", errno)),
        };
        if claims.ended {
            // An epoch is moved here once. If it is at the lock path as well, somebody put it back.
            return if self.is_still_there()? { self.without_slot(name) } else { Ok(End::Gone) };
        }
        let Some(number) = claims.highest.map_or(Some(0), |highest| highest.checked_add(1)) else {
            return self.without_slot(name);
        };
        if claims.highest.is_some() && !self.may_pass_over(slot, &claims)? {
            return Ok(End::Claimed);
        }
        if self.is_too_late() {
            return Ok(End::Gone);
        }
        // (4) The claim: exclusive creation decides who ends this epoch.
        let claim = match OurClaim::make(slot, number, &self.words()) {
            Ok(Some(claim)) => claim,
            Ok(None) => return Ok(End::Gone),
            // Made by somebody with other permissions, who died in it: it is as good as a stranger's.
            Err(errno) if is_refusal(errno) => return self.without_slot(name),
            Err(errno) => return Err(self.place.fault("claim its quarantine", errno)),
        };
        if let Err(errno) = self.seal_older_slots(slot_name) {
            claim.withdraw();
            return match errno {
                Errno::EACCES | Errno::EPERM => {
                    Ok(End::MayNot(format!("cannot seal its older quarantine: {}", describe(errno))))
                }
                errno => Err(self.place.fault("seal its older quarantine", errno)),
            };
        }
        // (5) Once more, now that every renewal either sees our claim or was seen by us.
        let verified = if left_out(Step::Verify) { Ok(None) } else { self.refused(&claim) };
        match verified {
            Ok(None) => {}
            refused => {
                claim.withdraw();
                return refused.map(|end| end.unwrap_or(End::Gone));
            }
        }
        // (6) It can hit no other epoch: nobody else can end this one any more; if the slot died under
        // us this fails, if somebody was faster the place is taken.
        match self.move_into(slot) {
            Ok(()) => Ok(End::Done(slot_name)),
            Err(errno) => {
                claim.withdraw();
                match errno {
                    Errno::ENOENT | Errno::EEXIST | Errno::EISDIR | Errno::ETIMEDOUT => Ok(End::Gone),
                    Errno::EACCES | Errno::EPERM | Errno::EROFS => {
                        Ok(End::MayNot(format!("cannot move it away: {}", describe(errno))))
                    }
                    errno => Err(self.place.fault("move it into quarantine", errno)),
                }
            }
        }
    }

    /// As long as it was blank the epoch had another slot, and somebody may be in it. One that is blank
    /// still, but was stamped anew since, had another as well.
    fn seal_older_slots(&self, mine: SlotName) -> crate::sys::file::Outcome<()> {
        if left_out(Step::Seal) {
            return Ok(());
        }
        let judged = self.ending.judged;
        let is_blank = judged.known == Known::Blank;
        let mut older = Vec::new();
        self.place.dir.list(|name| {
            if let Some(slot) = SlotName::parse(&self.place.name, name)
                && slot.nonce.is_of_blank(judged.identity().ino)
                && slot != mine
                && (!is_blank || slot.nonce.as_str() < mine.nonce.as_str())
            {
                older.push(name.to_owned());
            }
        })?;
        for name in older {
            if seal(&self.place.dir, &name)? == Sealed::Unusable && !self.decides_alone {
                return Err(Errno::EACCES);
            }
        }
        Ok(())
    }

    fn move_into(&self, slot: &Dir) -> crate::sys::file::Outcome<()> {
        let (dir, name, target) = (&self.place.dir, &self.place.name, OsStr::new(QUARANTINED));
        if self.is_too_late() {
            return Err(Errno::ETIMEDOUT);
        }
        match dir.rename_noreplace(name, slot, target) {
            // Some FUSE and NFS file systems know no flags. Then the claim and the time bound decide.
            Err(Errno::EINVAL | Errno::ENOSYS | Errno::EOPNOTSUPP) if !self.is_too_late() => {
                dir.rename(name, slot, target)
            }
            moved => moved,
        }
    }

    /// Whether the highest claim may be passed over: at once by whoever holds the guard of a local file
    /// system, since no other ender can be alive; by others when its owner must be dead.
    fn may_pass_over(&self, slot: &Dir, claims: &Claims) -> Result<bool, Fault> {
        if self.decides_alone {
            return Ok(true);
        }
        let failed = |errno| self.place.fault("judge a claim in its quarantine", errno);
        let Some(made) = claims.newest_stamp(slot).map_err(failed)? else { return Ok(false) };
        let private = trash_name(&self.place.name, &random::nonce());
        let now = self.place.dir.file_system_time(&private).map_err(failed)?;
        let age_ms = now.since_ms(made);
        Ok(u64::try_from(age_ms).is_ok_and(|age_ms| age_ms > reclaim_age_ms(self.ending.judged.ttl_ms())))
    }

    /// Why the epoch must not be ended after all: another is there, or it has been renewed.
    fn refused(&self, claim: &OurClaim<'_>) -> Result<Option<End>, Fault> {
        let failed = |errno| self.place.fault("verify it", errno);
        let Some(now) = self.place.dir.lstat(&self.place.name).map_err(failed)? else { return Ok(Some(End::Gone)) };
        if now.identity != self.ending.judged.identity() || !self.has_judged_content()? {
            return Ok(Some(End::Gone));
        }
        if self.ending.judged.known == Known::Blank && now.mtime != self.ending.judged.mtime() {
            // Its slot is named by its stamp: with another stamp another slot decides.
            return Ok(Some(End::Gone));
        }
        let stamp = claim.stamp().map_err(failed)?;
        Ok(self.still_due(now.mtime, stamp))
    }

    fn still_due(&self, mtime: Stamp, now: Stamp) -> Option<End> {
        let judged = self.ending.judged;
        match self.ending.basis {
            Basis::Any => None,
            Basis::Unchanged | Basis::DeadHolder => (mtime != judged.mtime()).then_some(End::Gone),
            // Two stamps of one file system: no clock of any host is asked.
            Basis::Age => match lease::judge(mtime, now, judged.ttl_ms()) {
                Verdict::Stale { .. } => None,
                Verdict::Fresh { remaining_ms } => Some(End::NotStale { remaining_ms }),
            },
        }
    }

    /// The nonce, read from the descriptor that was judged (of a blank lock: that it is one still).
    fn has_judged_content(&self) -> Result<bool, Fault> {
        let content = match self.file.content(crate::record::MAX_READ_BYTES) {
            Ok(content) => content,
            // Removed, as a file server says it.
            Err(Errno::ESTALE) => return Ok(false),
            Err(errno) => return Err(self.place.fault("read it", errno)),
        };
        let size_bytes = content.len() as u64;
        Ok(match (crate::record::classify(&content, size_bytes), &self.ending.judged.known) {
            (crate::record::Content::Record(now), Known::Record(judged)) => now.nonce == judged.nonce,
            (crate::record::Content::Blank, Known::Blank) => true,
            _ => false,
        })
    }

    fn is_still_there(&self) -> Result<bool, Fault> {
        let found = self.place.dir.lstat(&self.place.name).map_err(|errno| self.place.fault("look at it", errno))?;
        Ok(found.is_some_and(|stat| stat.kind == Kind::Regular && stat.identity == self.ending.judged.identity()))
    }

    fn is_too_late(&self) -> bool {
        boot_ms().saturating_sub(self.looked_ms) >= claim_deadline_ms(self.ending.judged.ttl_ms())
    }

    fn words(&self) -> Claim {
        let who = Who::am_i();
        Claim {
            why: self.ending.why,
            at_ms: wall_ms(),
            host: who.host,
            pid: who.pid,
            uid: who.uid,
            ttl_ms: self.ending.judged.ttl_ms(),
            reason: self.ending.reason.clone(),
        }
    }

    /// No inode or space for a slot: under the guard the file itself becomes the quarantine.
    fn without_space(&self, slot_name: SlotName, name: &OsStr, errno: Errno) -> Result<End, Fault> {
        if !self.decides_alone {
            return Err(self.place.fault("make its quarantine", errno));
        }
        if let Some(refused) = self.refused_under_guard()? {
            return Ok(refused);
        }
        match self.place.dir.rename_noreplace(&self.place.name, &self.place.dir, name) {
            Ok(()) => Ok(End::Done(slot_name)),
            Err(Errno::ENOENT | Errno::EEXIST) => Ok(End::Gone),
            Err(errno) => Err(self.place.fault("move it into quarantine", errno)),
        }
    }

    /// The slot's name is unusable: a stranger's directory in a shared place, a file, or an epoch that was
    /// put back by hand. The guard of a local file system decides alone.
    fn without_slot(&self, name: &OsStr) -> Result<End, Fault> {
        if !self.is_still_there()? {
            return Ok(End::Gone);
        }
        // Not by force either: without slot or guard nothing decides between two who would move it, and the
        // slower would move a successor.
        if !self.decides_alone {
            return Ok(End::MayNot(format!("the name of its quarantine, {}, is occupied", Shown::os(name))));
        }
        if let Some(refused) = self.refused_under_guard()? {
            return Ok(refused);
        }
        let aside = trash_name(&self.place.name, &random::nonce());
        match self.place.dir.rename_noreplace(&self.place.name, &self.place.dir, &aside) {
            Ok(()) => Ok(End::DoneAside(aside)),
            Err(Errno::ENOENT | Errno::EEXIST) => Ok(End::Gone),
            Err(errno @ (Errno::EACCES | Errno::EPERM | Errno::EROFS)) => {
                Ok(End::MayNot(format!("cannot move it away: {}", describe(errno))))
            }
            Err(errno) => Err(self.place.fault("move it away", errno)),
        }
    }

    fn refused_under_guard(&self) -> Result<Option<End>, Fault> {
        let failed = |errno| self.place.fault("verify it", errno);
        let Some(now) = self.place.dir.lstat(&self.place.name).map_err(failed)? else { return Ok(Some(End::Gone)) };
        if now.identity != self.ending.judged.identity() || !self.has_judged_content()? {
            return Ok(Some(End::Gone));
        }
        let stamp = if self.ending.basis == Basis::Age {
            // Without space no file can be made to ask the file system's clock; on a local file system,
            // and only there do we come here, that is this host's clock.
            crate::sys::clock::wall()
        } else {
            now.mtime
        };
        Ok(self.still_due(now.mtime, stamp))
    }
}
