//! The grant: from the exclusive creation to a lock that counts.
//!
//! The numbers in the comments are the steps of the protocol ("Grant").

use std::sync::Arc;

use crate::lease::{MIN_TTL_MS, renew_every_ms};
use crate::machine::Renewal;
use crate::record::{Guard, Record, SlotName, VERSION, Why};
use crate::sys::clock::{boot_ms, wall_ms};
use crate::sys::file::{File, Outcome, Try};
use crate::sys::hook::{Step, is_scheduled, left_out};
use crate::sys::recruit::Recruit;
use crate::sys::{Errno, random, sleep};

use super::claim::Sealed;
use super::end::{Basis, Ending, VETO_PATIENCE_MS, end, take_guard};
use super::file::FileStore;
use super::held::{FileHeld, Mine};
use super::place::{Epoch, Known, Place};
use super::reserve::Numbers;
use super::{Fault, NotReleased, Offer};

/// How long a contested newborn is given to be left alone, in milliseconds, before it is given back.
const NEWBORN_PATIENCE_MS: u64 = 2_000;

/// What a try at the exclusive creation came to.
pub(super) enum Grant {
    Held(Box<FileHeld>),
    Exists,
    /// Ours for a moment, and taken from us before it counted: start over.
    Again,
}

impl FileStore {
    /// Tries to create the lock file, and all that makes it a lock.
    pub(super) fn grant(&mut self, offer: &Offer) -> Result<Grant, Fault> {
        if let Some(dir) = &offer.fence
            && !self.may_fence
        {
            // What can never work is found before anything is created, and before a wait.
            Numbers::open(dir, &self.on_entry)?;
            self.may_fence = true;
        }
        let place = Arc::clone(&self.place);
        // (1) The arbiter. Nothing else ever confers the lock.
        let granted_boot_ms = boot_ms();
        let claimed_at_ms = wall_ms();
        let file = match place.dir.create_exclusive(&place.name, offer.mode.unwrap_or(0o644), Step::Exclusive) {
            Ok(file) => file,
            Err(Errno::EEXIST | Errno::ELOOP) => return Ok(Grant::Exists),
            Err(errno) => return Err(place.change_fault("create it", errno)),
        };
        // (2) The guard. Busy: we stalled, and somebody ends this epoch already.
        let guarded = if offer.guard == Guard::None || left_out(Step::Guard) {
            Try::Unsupported
        } else {
            take_guard(&place, &file, VETO_PATIENCE_MS).or_else(|fault| self.withdraw(&place, &file, fault))?
        };
        // (3) What we made; its stamp names the slot under which a blank lock can be ended.
        let stat = match file.stat() {
            Ok(stat) => stat,
            Err(errno) => return self.withdraw(&place, &file, place.fault("examine it", errno)),
        };
        if guarded == Try::Busy {
            let judged = Epoch { stat, known: Known::Blank, file: None };
            let ending = Ending { force: true, ..own_ending(&judged, &file) };
            let _ = end(&place, &ending);
            return Ok(Grant::Again);
        }
        let guarded = guarded == Try::Given;
        let record = Record {
            version: VERSION,
            nonce: random::nonce(),
            claimed_at_ms,
            ttl_ms: offer.ttl_ms.max(MIN_TTL_MS),
            host: self.who.host.clone(),
            boot_id: self.who.boot_id.clone(),
            pid: self.who.pid,
            pid_started: self.who.pid_started,
            uid: self.who.uid,
            command: offer.command.clone(),
            guard: if guarded { offer.guard } else { Guard::None },
            dev: stat.identity.dev,
            label: offer.label.clone(),
            fence: None,
        };
        let mut held = Box::new(FileHeld {
            slot: SlotName::of(&record),
            blank_slot: SlotName::of_blank(stat.identity.ino, stat.mtime),
            place: Arc::clone(&place),
            file,
            stat,
            record,
            written: Vec::new(),
            guarded,
            inherited: None,
            kept_guards: Vec::new(),
            granted_boot_ms,
            recruit: None,
        });
        let completed = held.hand_down_guard().and_then(|()| {
            if offer.runs_command && place.file_system.local && !is_scheduled() {
                // It gets copies of all that COMMAND is to have, and the signal dispositions of before the wait.
                self.sleeper.give_back();
                held.recruit = Recruit::make();
            }
            held.record.fence = self.reserve_fence(offer)?;
            held.complete(offer)
        });
        if let Err(fault) = completed {
            held.give_up();
            return Err(fault);
        }
        // (4) Still at the path, nobody in either slot, and no time lost; else renew first.
        match held.counts()? {
            true => {
                self.kept_guards.extend(self.just_given.take().map(|(_, file)| file));
                held.kept_guards.append(&mut self.kept_guards);
                Ok(Grant::Held(held))
            }
            false => Ok(Grant::Again),
        }
    }

    /// The fencing token, reserved while this epoch is already ours and nobody knows it yet: so that a
    /// later epoch always has a larger one.
    fn reserve_fence(&self, offer: &Offer) -> Result<Option<u64>, Fault> {
        let Some(dir) = &offer.fence else { return Ok(None) };
        let mut numbers = Numbers::open(dir, &self.on_entry)?;
        if numbers.is_locked_by(&self.place)? {
            return numbers.next_under_lock().map(Some);
        }
        // Not for long: our own lease runs already, and others wait for us. The token grows without that
        // lock as well; all that is missed is to note how far the numbers are.
        const PATIENCE_MS: u64 = 200;
        let patience_ms = PATIENCE_MS.min(renew_every_ms(offer.ttl_ms) / 2);
        numbers.next_meanwhile(patience_ms).map(|reserved| Some(reserved.number))
    }

    /// After an error with a file that has no record yet.
    fn withdraw<T>(&self, place: &Arc<Place>, file: &File, fault: Fault) -> Result<T, Fault> {
        if let Ok(stat) = file.stat() {
            let judged = Epoch { stat, known: Known::Blank, file: None };
            let _ = end(place, &own_ending(&judged, file));
        }
        Err(fault)
    }
}

fn own_ending<'a>(judged: &'a Epoch, file: &'a File) -> Ending<'a> {
    Ending {
        judged,
        basis: Basis::Any,
        why: Why::LateRelease,
        force: false,
        reason: None,
        mine: Some((file, false)),
        patience_ms: 0,
    }
}

impl FileHeld {
    /// The guard's second descriptor, if COMMAND is to inherit one.
    fn hand_down_guard(&mut self) -> Result<(), Fault> {
        if self.guarded && self.record.guard == Guard::Inherited {
            let descriptor = self.file.inheritable();
            self.inherited =
                Some(descriptor.map_err(|errno| self.place.fault("duplicate its guard's descriptor", errno))?);
        }
        Ok(())
    }

    /// The rest of step (3): what the record says, and the record itself, in one write.
    fn complete(&mut self, offer: &Offer) -> Result<(), Fault> {
        match offer.mode {
            Some(mode) => self.file.set_mode(mode).map_err(|errno| self.place.fault("set its mode", errno))?,
            // Where nobody may set it, it is not for us to say who may read it.
            None => drop(self.file.let_owner_in(self.stat.mode)),
        }
        let written = self.record.encode();
        self.file.write_once(&written).map_err(|errno| self.place.fault("write its record", errno))?;
        self.written = written;
        if !self.place.file_system.local {
            self.file.sync().map_err(|errno| self.place.fault("write its record", errno))?;
        }
        Ok(())
    }

    /// Step (4): whether the grant counts.
    fn counts(&mut self) -> Result<bool, Fault> {
        let until_ms = boot_ms() + NEWBORN_PATIENCE_MS;
        let mut late = self.is_late_since(self.granted_boot_ms);
        loop {
            let began_boot_ms = boot_ms();
            let now = if left_out(Step::GrantCheck) { Ok(Renewal::Confirmed) } else { self.last_look(late) };
            match now {
                // Looked at, and then stalled: by now it may have been judged stale.
                Ok(Renewal::Confirmed) if !late && self.is_late_since(self.granted_boot_ms) => late = true,
                Ok(Renewal::Confirmed) => {
                    if late {
                        // The lease counts from the renewal that was confirmed.
                        self.granted_boot_ms = began_boot_ms;
                    }
                    return Ok(true);
                }
                Ok(Renewal::Lost(_)) => return Ok(false),
                Ok(Renewal::Contested) if boot_ms() < until_ms => {
                    sleep::pause(5);
                    late = true;
                }
                Ok(Renewal::Contested) => {
                    self.give_up();
                    return Ok(false);
                }
                Ok(Renewal::Failed(_) | Renewal::Pending) => late = true,
                Err(errno) => {
                    self.give_up();
                    return Err(self.place.fault("verify it", errno));
                }
            }
        }
    }

    /// A look, or where that comes late a renewal. Without a guard of its own the epoch may be ended under the
    /// guard alone, where there is no space for a slot in which that would be seen; so it is taken for the look,
    /// where others see it.
    fn last_look(&self, late: bool) -> Outcome<Renewal> {
        let takes_guard = !self.guarded && self.place.file_system.local && !left_out(Step::ReleaseGuard);
        if takes_guard && self.file.try_guard()? == Try::Busy {
            return Ok(Renewal::Contested);
        }
        let found = if late { self.try_renew() } else { self.is_at_path_and_alone() };
        if takes_guard {
            let _ = self.file.unguard();
        }
        found
    }

    fn is_at_path_and_alone(&self) -> Outcome<Renewal> {
        match self.place.dir.lstat(&self.place.name)? {
            Some(found) if found.identity == self.stat.identity => self.slots(),
            _ => Ok(Renewal::Lost(String::new())),
        }
    }

    /// Gives back what was never used; what cannot be given back expires.
    fn give_up(&self) {
        let blank = !matches!(self.is_mine(), Ok(Mine::Yes));
        let (slot, known) = if blank {
            // A part of the record may have been written: the stamp of now names the slot in which
            // others would end it.
            let mtime = self.file.stat().map_or(self.stat.mtime, |stat| stat.mtime);
            (SlotName::of_blank(self.stat.identity.ino, mtime), Known::Blank)
        } else {
            (self.slot, Known::Record(Box::new(self.record.clone())))
        };
        // Who judged this lock while it was blank has claimed it under the blank lock's name, and its rename
        // may be under way. Ended under another name, the epoch would leave that rename to hit a successor.
        if slot != self.blank_slot && !matches!(self.close_blank_slot(), Ok(Sealed::Yes)) {
            return;
        }
        let given_back: Result<_, NotReleased> = self.release_to(&slot, known, &mut || {});
        drop(given_back);
    }
}
