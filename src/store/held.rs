//! A lock that is ours: renewing it, looking at it, giving it back.
//!
//! The numbers in the comments are the steps of the protocol ("Renew", "Release").

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use crate::lease::renew_every_ms;
use crate::machine::Renewal;
use crate::record::{self, Content, Guard, Nonce, Record, SlotName, Why};
use crate::sys::clock::boot_ms;
use crate::sys::file::{File, Identity, Kind, Outcome, Stat, Try};
use crate::sys::hook::{Step, is_scheduled, left_out};
use crate::sys::keeper::Alarm;
use crate::sys::recruit::Recruit;
use crate::sys::{Errno, describe, sleep};
use crate::text::Shown;

use super::claim::{Claims, Sealed, seal};
use super::distant::DistantHeld;
use super::end::{Basis, End, Ending, end};
use super::place::{Epoch, Known, Place};
use super::{Held, NotReleased, Part};

/// How long a release that fails is tried again, in milliseconds.
pub(super) const RELEASE_PATIENCE_MS: u64 = 2_000;

/// How often a release looks whether the waiter that it woke has taken the lock, before it wakes others.
const LET_IN_LOOKS: u32 = 10;

/// A lock file that this process created.
#[derive(Debug)]
#[must_use = "a lock that is not released stays until its ttl has passed"]
pub struct FileHeld {
    pub(super) place: Arc<Place>,
    /// The descriptor made at the grant; every act on the lock's content goes through it.
    pub(super) file: File,
    pub(super) stat: Stat,
    pub(super) record: Record,
    /// The record as we wrote it, byte for byte; empty if we did not.
    pub(super) written: Vec<u8>,
    /// Where others can end this epoch: under its nonce and, until the record was written, under the
    /// name of a blank lock.
    pub(super) slot: SlotName,
    pub(super) blank_slot: SlotName,
    /// We have the kernel's guard on the file.
    pub(super) guarded: bool,
    /// The guard's second descriptor, which COMMAND inherits.
    pub(super) inherited: Option<OwnedFd>,
    /// Guards of epochs that have ended. Others sleep on them, and wake, one of each, when we let go.
    pub(super) kept_guards: Vec<File>,
    pub(super) granted_boot_ms: u64,
    /// The process that is to become COMMAND. It has copies of our descriptors.
    pub(super) recruit: Option<Recruit>,
}

/// What is at the lock path.
pub(super) enum Mine {
    Yes,
    No(String),
}

/// What is at a slot's name, as its epoch's holder sees it.
enum Entered {
    Nobody,
    Somebody,
    /// The epoch has ended: its file itself is there.
    Ended,
    /// The name is occupied by something that we cannot look into.
    Unusable,
}

impl FileHeld {
    /// The same lock for whoever knows its nonce: not the process that made the grant, so it may renew,
    /// but not release by rename. `file` is where `record` was read from.
    pub(super) fn adopt(place: Arc<Place>, file: File, stat: Stat, record: Record) -> Self {
        let slot = SlotName::of(&record);
        FileHeld {
            place,
            file,
            stat,
            record,
            written: Vec::new(),
            slot,
            // Whoever entered the blank one fails on the record that has been there since.
            blank_slot: slot,
            guarded: false,
            inherited: None,
            kept_guards: Vec::new(),
            granted_boot_ms: boot_ms(),
            recruit: None,
        }
    }

    fn identity(&self) -> Identity {
        self.stat.identity
    }

    /// Step (1) of renew and release: the path still leads to our inode, and it still carries our nonce.
    pub(super) fn is_mine(&self) -> Outcome<Mine> {
        if left_out(Step::Identity) {
            return Ok(Mine::Yes);
        }
        match self.at_path()? {
            Mine::No(found) => return Ok(Mine::No(found)),
            Mine::Yes => {}
        }
        let content = self.file.content(record::MAX_READ_BYTES)?;
        // What it says is only of interest where it is not what we wrote.
        if content == self.written && !content.is_empty() {
            return Ok(Mine::Yes);
        }
        Ok(match record::classify(&content, content.len() as u64) {
            Content::Record(found) if found.nonce == self.record.nonce => Mine::Yes,
            Content::Record(found) => Mine::No(format!("its record was overwritten (nonce {})", found.nonce)),
            _ => Mine::No("its record was overwritten".into()),
        })
    }

    fn at_path(&self) -> Outcome<Mine> {
        Ok(match self.place.dir.lstat(&self.place.name)? {
            None => Mine::No("the lock file is gone".into()),
            Some(found) if found.identity == self.identity() => Mine::Yes,
            Some(found) if found.kind == Kind::Regular => Mine::No("another lock file is there".into()),
            Some(found) => Mine::No(format!("{} is there instead", found.kind.describe())),
        })
    }

    /// Step (4) of renew. An ender judges the age once more after it has entered the slot, so of "touch,
    /// then look at the slot" and "enter the slot, then look at the stamp" at least one sees the other.
    fn entered(&self, slot: &SlotName) -> Outcome<Entered> {
        let name = slot.file_name(&self.place.name);
        let dir = &self.place.dir;
        match dir.lstat(&name)? {
            Some(found) if found.kind == Kind::Directory => {}
            // Moved here since the look at the path, for want of space.
            Some(found) if found.identity == self.identity() => return Ok(Entered::Ended),
            // Something that is no directory cannot be entered.
            _ => return Ok(Entered::Nobody),
        }
        match dir.remove_dir(&name) {
            // Whoever was entering gets ENOENT.
            Ok(()) | Err(Errno::ENOENT) => return Ok(Entered::Nobody),
            Err(Errno::ENOTEMPTY | Errno::EEXIST) => {}
            Err(Errno::EACCES | Errno::EPERM) => return Ok(Entered::Unusable),
            Err(errno) => return Err(errno),
        }
        let opened = match dir.open_dir(&name) {
            Ok(opened) => opened,
            Err(Errno::ENOENT) => return Ok(Entered::Nobody),
            Err(Errno::EACCES | Errno::EPERM) => return Ok(Entered::Unusable),
            Err(errno) => return Err(errno),
        };
        let claims = Claims::read(&opened)?;
        let Some(made) = claims.newest_stamp(&opened)? else { return Ok(Entered::Somebody) };
        // Our own stamp of a moment ago is the file system's clock.
        let age_ms = self.file.stat()?.mtime.since_ms(made);
        let owner_is_dead = u64::try_from(age_ms)
            .is_ok_and(|age_ms| age_ms > crate::lease::reclaim_age_ms(self.record.judged_ttl_ms()));
        Ok(if owner_is_dead { Entered::Nobody } else { Entered::Somebody })
    }

    pub(super) fn try_renew(&self) -> Outcome<Renewal> {
        let began_ms = boot_ms();
        match self.touch_and_look()? {
            // A stall between the touch and the last look may have outlived the lease.
            Renewal::Confirmed if self.is_late_since(began_ms) => {
                Ok(Renewal::Failed("it took longer than a third of the ttl".into()))
            }
            renewal => Ok(renewal),
        }
    }

    /// Whether so much of the lease has passed that what was seen since then proves nothing.
    pub(super) fn is_late_since(&self, boot_at_ms: u64) -> bool {
        boot_ms().saturating_sub(boot_at_ms) >= renew_every_ms(self.record.judged_ttl_ms())
    }

    fn touch_and_look(&self) -> Outcome<Renewal> {
        // (1) Still ours, or lost.
        if let Mine::No(found) = self.is_mine()? {
            return Ok(Renewal::Lost(found));
        }
        // (2) Through the descriptor: by path we would refresh a successor.
        if left_out(Step::Descriptor) {
            self.place.dir.touch_by_path(&self.place.name)?;
        } else {
            self.file.touch()?;
        }
        // (3) Once more, now that it has been touched.
        if let Mine::No(found) = self.at_path()?
            && !left_out(Step::Identity)
        {
            return Ok(Renewal::Lost(found));
        }
        // (4) Nobody is in either slot.
        if left_out(Step::SlotCheck) {
            return Ok(Renewal::Confirmed);
        }
        self.slots()
    }

    /// Looks at both of this epoch's slots.
    pub(super) fn slots(&self) -> Outcome<Renewal> {
        // The blank one first: what is sealed there says what the look at the path was worth.
        match self.close_blank_slot()? {
            Sealed::Yes => {}
            Sealed::Ended => return Ok(Renewal::Lost("it was ended before its record was written".into())),
            Sealed::Unusable if self.guard_decides() => {}
            Sealed::Unusable => return Ok(Renewal::Contested),
        }
        Ok(match self.entered(&self.slot)? {
            Entered::Nobody => Renewal::Confirmed,
            Entered::Ended => Renewal::Lost("it was ended meanwhile".into()),
            // The guard decides alone where every contender sees it.
            Entered::Unusable if self.guard_decides() => Renewal::Confirmed,
            Entered::Somebody | Entered::Unusable => Renewal::Contested,
        })
    }

    /// Sees to it that nobody ends this epoch as the blank lock that it was.
    pub(super) fn close_blank_slot(&self) -> Outcome<Sealed> {
        if self.blank_slot == self.slot {
            // Adopted: its maker has seen to it.
            return Ok(Sealed::Yes);
        }
        let name = self.blank_slot.file_name(&self.place.name);
        match self.place.dir.lstat(&name)? {
            Some(found) if found.kind == Kind::Directory => {}
            Some(found) if found.identity == self.identity() => return Ok(Sealed::Ended),
            _ => return Ok(Sealed::Yes),
        }
        if left_out(Step::Seal) {
            return Ok(Sealed::Yes);
        }
        match self.place.dir.remove_dir(&name) {
            Ok(()) | Err(Errno::ENOENT) => Ok(Sealed::Yes),
            Err(Errno::ENOTEMPTY | Errno::EEXIST) => seal(&self.place.dir, &name),
            Err(Errno::EACCES | Errno::EPERM) => Ok(Sealed::Unusable),
            Err(errno) => Err(errno),
        }
    }

    fn guard_decides(&self) -> bool {
        self.guarded && self.place.file_system.local
    }

    /// Gives the epoch up under `slot`'s name.
    pub(super) fn release_to(
        &self,
        slot: &SlotName,
        known: Known,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Option<String>, NotReleased> {
        let until_ms = boot_ms() + RELEASE_PATIENCE_MS;
        loop {
            // Decided by when the try began: one that stalled says little of what is there now.
            let is_last = boot_ms() >= until_ms;
            match self.try_release(slot, &known) {
                Ok(Released::Yes(remark, woken)) => {
                    meanwhile();
                    self.wake_the_rest(woken);
                    return Ok(remark);
                }
                Ok(Released::NotOurs(found)) => return Err(NotReleased::Lost(found)),
                Ok(Released::NotYet(_)) | Err(_) if !is_last => sleep::pause(50),
                Ok(Released::NotYet(why)) => {
                    self.vouch_no_more();
                    return Err(NotReleased::Failed(super::Fault::NotPermitted {
                        path: self.place.shown().to_vec(),
                        why,
                    }));
                }
                Err(errno) => {
                    self.vouch_no_more();
                    return Err(NotReleased::Failed(self.place.change_fault("release it", errno)));
                }
            }
        }
    }

    /// It stays, and expires: a background child that still has the guard's descriptor must not keep it.
    fn vouch_no_more(&self) {
        for kept in &self.kept_guards {
            let _ = kept.unguard();
        }
        self.wake_own();
    }

    fn try_release(&self, slot: &SlotName, known: &Known) -> Outcome<Released> {
        let (dir, name) = (&self.place.dir, &self.place.name);
        let guarded = self.guarded || self.guards_release()?;
        // (1) Never "compare the nonce, then unlink": between the two the file can become a successor's.
        let mine = if *known == Known::Blank { self.at_path()? } else { self.is_mine()? };
        if let Mine::No(found) = mine {
            return Ok(Released::NotOurs(found));
        }
        let slot_name = slot.file_name(name);
        if left_out(Step::ReleaseBySlot) {
            dir.unlink(name)?;
            return Ok(Released::Yes(None, self.wake_first()));
        }
        // (2) Through the epoch's own name: a delayed rival that still believes in this epoch fails on it.
        // Replaces nothing: a plain file there is our own epoch, ended for want of space, and what we
        // would move is a successor.
        let moved = match dir.rename_noreplace(name, dir, &slot_name) {
            Err(Errno::EINVAL | Errno::ENOSYS | Errno::EOPNOTSUPP) => dir.rename(name, dir, &slot_name),
            moved => moved,
        };
        match moved {
            Ok(()) => {}
            Err(Errno::ENOENT) => return Ok(Released::NotOurs("the lock file is gone".into())),
            Err(Errno::EISDIR | Errno::ENOTEMPTY | Errno::EEXIST | Errno::ENOTDIR) => {
                return self.release_late(known, guarded);
            }
            Err(errno) => return Err(errno),
        }
        // Somebody who asks no lock may have put a file of theirs at the path since (1), or removed ours so that
        // a successor came: that is not ours to remove, and goes back before anybody is told to try.
        let there = dir.lstat(&slot_name);
        if let Ok(Some(found)) = &there
            && found.identity != self.identity()
        {
            let what = found.kind.describe();
            return Ok(Released::NotOurs(match dir.rename_noreplace(&slot_name, dir, name) {
                Ok(()) => format!("{what} was put there instead"),
                Err(_) => {
                    let lies_at = self.place.beside(&slot_name);
                    format!("{what} was put there instead, and now lies at {}", Shown::os(&lies_at))
                }
            }));
        }
        // (3) Explicitly: a background child may still have the descriptor, and waiters sleep on it.
        let woken = self.wake_first();
        // (4) What a crash leaves here is a quarantine like any other. Where it cannot be seen what was moved, it
        // lies there until it is reclaimed: released it is all the same.
        if there.is_ok() {
            let _ = dir.unlink(&slot_name);
        }
        Ok(Released::Yes(None, woken))
    }

    /// Without a guard nothing keeps our slot from being reclaimed while we stall before the rename; so we
    /// take it for the release, where others see it. Whoever has it is about to end this epoch.
    fn guards_release(&self) -> Outcome<bool> {
        if !self.place.file_system.local || left_out(Step::ReleaseGuard) {
            return Ok(false);
        }
        match self.file.try_guard()? {
            Try::Given => Ok(true),
            Try::Busy => match self.at_path()? {
                // Lost, which the caller finds as well.
                Mine::No(_) => Ok(false),
                Mine::Yes => Err(Errno::EBUSY),
            },
            Try::Unsupported => Ok(false),
        }
    }

    /// Somebody has entered our slot: we end our epoch there like any ender, with the descriptor and the
    /// guard that we have.
    fn release_late(&self, known: &Known, guarded: bool) -> Outcome<Released> {
        let judged = Epoch { stat: self.stat, known: known.clone(), file: None };
        let ending = Ending {
            judged: &judged,
            basis: Basis::Any,
            why: Why::LateRelease,
            force: false,
            reason: None,
            mine: Some((&self.file, guarded)),
            patience_ms: 0,
        };
        Ok(match end(&self.place, &ending) {
            Ok(End::Done(_)) => Released::Yes(None, self.wake_first()),
            Ok(End::DoneAside(aside)) => {
                let lies_at = self.place.beside(&aside);
                let remark = format!(
                    "the name of its quarantine is occupied; released under its guard, the record lies at {}",
                    Shown::os(&lies_at)
                );
                Released::Yes(Some(remark), self.wake_first())
            }
            Ok(End::MayNot(why)) => Released::NotYet(why),
            Ok(End::Claimed | End::Gone | End::Vetoed | End::NotStale { .. }) => match self.at_path()? {
                Mine::No(found) => Released::NotOurs(found),
                Mine::Yes => return Err(Errno::EBUSY),
            },
            Err(super::Fault::Io { errno, .. } | super::Fault::System { errno, .. }) => return Err(errno),
            Err(super::Fault::NotPermitted { why, .. }) => Released::NotYet(why),
            Err(fault) => Released::NotYet(fault.to_string()),
        })
    }

    /// Wakes the one whose turn it is. Who sleeps on the guard that we were given first came before all
    /// who found this epoch at the path.
    fn wake_first(&self) -> Woken {
        let (woken, is_slept_on) = match self.kept_guards.iter().find(|kept| self.may_be_slept_on(kept)) {
            Some(kept) => {
                let _ = kept.unguard();
                (Woken::Earlier, true)
            }
            None => {
                self.wake_own();
                (Woken::Own, self.place.file_system.local && self.file.has_sleepers())
            }
        };
        if is_slept_on && !is_scheduled() {
            // Often woken on this very processor: what is left to do here can wait.
            sleep::step_back();
        }
        woken
    }

    /// Wakes those who sleep on this epoch's own guard, once the first has taken the lock or had its chance:
    /// they will find it taken, and queue for it. The other guards go with their descriptors.
    fn wake_the_rest(&self, woken: Woken) {
        if woken == Woken::Earlier {
            self.let_in();
            self.wake_own();
        }
    }

    /// Whether somebody waits for this guard. Elsewhere that is not noted, and in a schedule of the tests, where
    /// others decide who does the next step, nobody sleeps.
    fn may_be_slept_on(&self, kept: &File) -> bool {
        !self.place.file_system.local || is_scheduled() || kept.has_sleepers()
    }

    /// Waits a moment for the one who was woken to take the lock. Who came later sleeps on our own guard, and
    /// would race with it for what it has waited for.
    fn let_in(&self) {
        if !self.place.file_system.local || is_scheduled() {
            return;
        }
        for _ in 0..LET_IN_LOOKS {
            sleep::step_back();
            if !matches!(self.place.dir.lstat(&self.place.name), Ok(None)) {
                return;
            }
            sleep::nod();
        }
    }

    fn wake_own(&self) {
        if self.guarded || self.place.file_system.local {
            let _ = self.file.unguard();
        }
    }
}

/// Who was told of a release.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Woken {
    /// One who sleeps on the guard of an earlier epoch.
    Earlier,
    /// Whoever sleeps on this one's, if anybody.
    Own,
}

enum Released {
    Yes(Option<String>, Woken),
    NotOurs(String),
    NotYet(String),
}

impl Held for FileHeld {
    fn nonce(&self) -> Nonce {
        self.record.nonce
    }

    fn fence(&self) -> Option<u64> {
        self.record.fence
    }

    fn granted_boot_ms(&self) -> u64 {
        self.granted_boot_ms
    }

    fn ttl_ms(&self) -> u64 {
        self.record.ttl_ms
    }

    fn recruit(&mut self) -> Option<Recruit> {
        self.recruit.take()
    }

    fn inherited_guard(&self) -> Option<RawFd> {
        self.inherited.as_ref().map(AsRawFd::as_raw_fd)
    }

    fn may_be_unseen(&self) -> bool {
        self.record.guard == Guard::None || !self.place.file_system.local
    }

    fn renew(&mut self) -> Renewal {
        self.try_renew().unwrap_or_else(|errno| Renewal::Failed(describe(errno).to_owned()))
    }

    fn look(&mut self) -> Option<String> {
        match self.at_path() {
            Ok(Mine::No(found)) => Some(found),
            // A look that fails says nothing: only what was found counts.
            Ok(Mine::Yes) | Err(_) => None,
        }
    }

    fn keep_nobody_waiting(self: Box<Self>) -> Box<dyn Held> {
        if !self.may_hang() {
            return self;
        }
        let path = self.place.shown().to_vec();
        Box::new(DistantHeld::new(self, path))
    }

    fn may_hang(&self) -> bool {
        // Where the tests decide who does the next step, nobody waits.
        !(self.place.file_system.local || is_scheduled() || left_out(Step::Errand))
    }

    fn alarm(&self) -> Option<Alarm> {
        Alarm::on(&self.file).ok()
    }

    fn apart(self: Box<Self>) -> Vec<Part> {
        vec![Part { lock: None, held: self }]
    }

    fn release(self: Box<Self>, meanwhile: &mut dyn FnMut()) -> Result<Option<String>, NotReleased> {
        self.release_to(&self.slot, Known::Record(Box::new(self.record.clone())), meanwhile)
    }
}
