//! The lock in a file: the grant, and waiting for it.
//!
//! The numbers in the comments are the steps of the protocol ("Grant").

use std::ffi::{CString, OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use crate::lease::{MIN_TTL_MS, Verdict, Watch, judge_watched, renew_every_ms};
use crate::machine::Renewal;
use crate::record::{Guard, Nonce, Record, SlotName, VERSION, Why};
use crate::sys::clock::{boot_ms, wall, wall_ms};
use crate::sys::file::{File, Identity, Try};
use crate::sys::hook::{Step, before, is_scheduled, left_out};
use crate::sys::lookout::{self, Word};
use crate::sys::process::Who;
use crate::sys::signal::OnEntry;
use crate::sys::sleep::{Sleeper, Slept};
use crate::sys::{Errno, output, random, sleep};
use crate::text::duration;

use super::claim::Sealed;
use super::end::{Basis, End, Ending, VETO_PATIENCE_MS, end, take_guard};
use super::held::{FileHeld, Mine};
use super::place::{Epoch, Known, Place, Seen};
use super::reserve::Numbers;
use super::{Attempt, Busy, Evicted, Fault, NotReleased, Offer, Store, reclaim};

/// The longest a waiter sleeps without a look, in milliseconds: the backstop for what no guard tells (a
/// forced break, another host).
const BACKSTOP_MS: u64 = 1_000;
/// When to look again at a lock that is stale but guarded, in milliseconds: its guard tells before that.
const VETOED_AGAIN_MS: u64 = 60_000;
/// How long a contested newborn is given to be left alone, in milliseconds, before it is given back.
const NEWBORN_PATIENCE_MS: u64 = 2_000;
/// How often a lock without a record is looked at in quick succession: its maker is about to write it.
const NEWBORN_LOOKS: u32 = 5;
/// Observations in one attempt that each find the lock changed; then it counts as busy for now.
const TURNS: u32 = 100;

/// Takes and waits for the lock file at one path.
#[derive(Debug)]
pub struct FileStore {
    place: Arc<Place>,
    c_name: CString,
    who: Who,
    on_entry: OnEntry,
    sleeper: Sleeper,
    watch: Watch<(Identity, Option<Nonce>)>,
    /// The epoch last seen at the path, to sleep on.
    seen: Option<Epoch>,
    /// The epoch whose guard we were given while it was still at the path. Its processes are dead; it is
    /// waited out by the clock, and its guard is left alone, or two waiters would wake each other.
    given: Option<Identity>,
    /// The guard that we were just given, and of which file: whether its epoch has ended the next look tells.
    just_given: Option<(Identity, File)>,
    /// Guards of epochs that have ended.
    kept_guards: Vec<File>,
    vetoed: Option<Identity>,
    polls: u32,
    may_write: bool,
    may_fence: bool,
    has_evicted: bool,
    evicted: Vec<Evicted>,
}

enum Grant {
    Held(Box<FileHeld>),
    Exists,
    /// Ours for a moment, and taken from us before it counted: start over.
    Again,
}

impl FileStore {
    /// A contender for the lock at `path`.
    pub fn open(path: &OsStr, parents: bool, on_entry: &OnEntry) -> Result<Self, Fault> {
        FileStore::at(Place::open(path, parents)?, on_entry)
    }

    /// A contender for the lock at this place.
    pub fn at(place: Place, on_entry: &OnEntry) -> Result<Self, Fault> {
        place.check_name_length()?;
        let c_name = CString::new(place.name.as_bytes()).map_err(|_| place.cannot("its name holds a NUL byte"))?;
        Ok(FileStore {
            c_name,
            place: Arc::new(place),
            who: Who::am_i(),
            on_entry: *on_entry,
            sleeper: Sleeper::new(on_entry),
            watch: Watch::default(),
            seen: None,
            given: None,
            just_given: None,
            kept_guards: Vec::new(),
            vetoed: None,
            polls: 0,
            may_write: false,
            may_fence: false,
            has_evicted: false,
            evicted: Vec::new(),
        })
    }

    /// Where the lock is.
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// Finds out whether the lock could ever be taken here, with a number from `fence`, and creates nothing.
    pub(super) fn examine(&mut self, fence: Option<&OsStr>) -> Result<(), Fault> {
        if let Some(dir) = fence {
            Numbers::open(dir, &self.on_entry)?;
        }
        self.place.dir.may_write().map_err(|errno| self.place.change_fault("create it", errno))?;
        self.may_write = true;
        match self.place.observe()? {
            Seen::Foreign(_, what) => Err(self.place.cannot(format!("not a withlock lock: {what}"))),
            Seen::Free | Seen::Epoch(_) => Ok(()),
        }
    }

    /// It is not this lock that is waited for now: whoever sleeps behind us need not.
    pub(super) fn stand_aside(&mut self) {
        self.kept_guards.clear();
    }

    /// Gives back what sleeping on the guard needed of this process.
    pub(super) fn wake(&mut self) {
        self.sleeper.give_back();
    }

    fn grant(&mut self, offer: &Offer) -> Result<Grant, Fault> {
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
            place,
            file,
            stat,
            record,
            guarded,
            inherited: None,
            kept_guards: Vec::new(),
            granted_boot_ms,
        });
        let completed = self.reserve_fence(offer).and_then(|fence| {
            held.record.fence = fence;
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

    /// What a contender makes of the epoch at the path: stale or not, and then whether it could be ended.
    fn contend(&mut self, epoch: Epoch, offer: &Offer) -> Result<Turn, Fault> {
        if epoch.known == Known::Unreadable {
            return Ok(self.busy(epoch, None, BACKSTOP_MS, Some("we may not read it, so it counts as held".into())));
        }
        let identity = epoch.identity();
        if self.seen.as_ref().is_none_or(|seen| seen.identity() != identity) {
            self.polls = 0;
        }
        let unchanged_ms = self.watch.note((identity, epoch.nonce()), epoch.mtime(), boot_ms());
        let verdict = judge_watched(epoch.mtime(), wall(), epoch.ttl_ms(), unchanged_ms);
        let basis = match verdict {
            Verdict::Stale { .. } if unchanged_ms > epoch.ttl_ms() => Basis::Unchanged,
            Verdict::Stale { .. } => Basis::Age,
            Verdict::Fresh { .. } if offer.evict_dead && self.may_be_dead(&epoch) => Basis::DeadHolder,
            Verdict::Fresh { remaining_ms } => {
                let note = from_the_future(&epoch);
                return Ok(self.busy(epoch, Some(remaining_ms), remaining_ms, note));
            }
        };
        let patience_ms = match basis {
            // A holder that lives has its guard, and is the rule.
            Basis::DeadHolder if self.given != Some(identity) => 0,
            _ if self.vetoed == Some(identity) => 0,
            _ => VETO_PATIENCE_MS,
        };
        let ending =
            Ending { judged: &epoch, basis, why: Why::Stale, force: false, reason: None, mine: None, patience_ms };
        match end(&self.place, &ending)? {
            ended @ (End::Done(_) | End::DoneAside(_)) => {
                let lies_at = match ended {
                    End::DoneAside(aside) => aside,
                    End::Done(slot) => slot.file_name(&self.place.name),
                    _ => OsString::new(),
                };
                let lies_at = self.place.beside(&lies_at).into_os_string();
                self.evicted.push(Evicted { lock: None, record: epoch.record().cloned(), basis, lies_at });
                self.has_evicted = true;
                Ok(Turn::Again)
            }
            End::Gone => Ok(Turn::Again),
            End::Vetoed if basis == Basis::DeadHolder => {
                let remaining_ms = if let Verdict::Fresh { remaining_ms } = verdict { remaining_ms } else { 0 };
                Ok(self.busy(epoch, Some(remaining_ms), remaining_ms, None))
            }
            End::Vetoed => {
                self.vetoed = Some(identity);
                let note = "stale, but a process still has its guard".to_owned();
                Ok(self.busy(epoch, None, VETOED_AGAIN_MS, Some(note)))
            }
            End::Claimed => Ok(self.busy(epoch, None, 10, Some("another process is ending it".into()))),
            End::NotStale { remaining_ms } => Ok(self.busy(epoch, Some(remaining_ms), remaining_ms, None)),
            End::MayNot(why) => {
                Ok(self.busy(epoch, None, BACKSTOP_MS, Some(format!("stale, but it cannot be ended: {why}"))))
            }
        }
    }

    /// Whether a free guard would mean that all who had it are dead (`--evict-dead`, asked for by name):
    /// the record says that it is inherited, and was written under this boot and for this device, on a
    /// local file system. Whether it is free the ender finds out, by taking it.
    fn may_be_dead(&self, epoch: &Epoch) -> bool {
        epoch.record().is_some_and(|record| {
            self.place.file_system.local
                && record.guard == Guard::Inherited
                && !record.boot_id.is_empty()
                && record.boot_id == self.who.boot_id
                && record.dev == epoch.identity().dev
        })
    }

    fn busy(&mut self, epoch: Epoch, expires_in_ms: Option<u64>, look_again_ms: u64, note: Option<String>) -> Turn {
        let busy = Busy {
            lock: None,
            record: epoch.record().cloned(),
            renewed_at_ms: Some(epoch.mtime().ms()),
            expires_in_ms,
            note: note
                .or_else(|| (epoch.known == Known::Blank).then(|| "its record is not written yet, or broken".into())),
            look_again_ms,
        };
        self.seen = Some(epoch);
        Turn::Busy(Box::new(busy))
    }

    /// Whether sleeping on the guard of `epoch` tells when it ends.
    ///
    /// Never before the record is written: a waiter that took a newborn file's guard would turn its maker
    /// away. And only where the record was written under this boot: on another host the guard is not seen.
    fn has_useful_guard(&self, epoch: &Epoch) -> bool {
        if left_out(Step::Newborn) && epoch.known == Known::Blank {
            return true;
        }
        self.given != Some(epoch.identity())
            && epoch.record().is_some_and(|record| record.guard != Guard::None && record.boot_id == self.who.boot_id)
    }

    /// What the guard is worth that we were just given, now that we know whether its epoch is still `at_path`.
    fn settle_guard(&mut self, at_path: Option<Identity>) -> Result<(), Fault> {
        let Some((identity, file)) = self.just_given.take() else { return Ok(()) };
        if at_path == Some(identity) {
            // Its processes are dead, but its time has not come. We let go at once, so that it can be
            // ended, and wait by the clock.
            self.given = Some(identity);
            self.vetoed = None;
            file.unguard().map_err(|errno| self.place.fault("look at it", errno))
        } else {
            // The epoch has ended. Those who sleep behind us sleep on, until we are done.
            self.kept_guards.push(file);
            Ok(())
        }
    }
}

/// Words about a time stamp that no age can be told from.
fn from_the_future(epoch: &Epoch) -> Option<String> {
    // Less may be the difference between the clocks of two hosts.
    const NOTABLE_MS: u64 = 1_000;
    let ahead_ms = u64::try_from(epoch.mtime().since_ms(wall())).ok().filter(|ahead_ms| *ahead_ms > NOTABLE_MS)?;
    let (ahead, ttl) = (duration(ahead_ms), duration(epoch.ttl_ms()));
    Some(format!(
        "its time stamp is {ahead} in the future: only who waits longer than its ttl, {ttl}, can find it stale"
    ))
}

enum Turn {
    Again,
    Busy(Box<Busy>),
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
    /// The rest of step (3): what the record says, and the record itself, in one write.
    fn complete(&mut self, offer: &Offer) -> Result<(), Fault> {
        if let Some(mode) = offer.mode {
            self.file.set_mode(mode).map_err(|errno| self.place.fault("set its mode", errno))?;
        }
        if self.guarded && self.record.guard == Guard::Inherited {
            let descriptor = self.file.inheritable();
            self.inherited =
                Some(descriptor.map_err(|errno| self.place.fault("duplicate its guard's descriptor", errno))?);
        }
        self.file.write_once(&self.record.encode()).map_err(|errno| self.place.fault("write its record", errno))?;
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
    fn last_look(&self, late: bool) -> crate::sys::file::Outcome<Renewal> {
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

    fn is_at_path_and_alone(&self) -> crate::sys::file::Outcome<Renewal> {
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

impl Store for FileStore {
    fn attempt(&mut self, offer: &Offer) -> Result<Attempt, Fault> {
        for _ in 0..TURNS {
            match self.grant(offer)? {
                Grant::Held(held) => {
                    if self.has_evicted {
                        // A crash loop must not fill the directory with quarantines.
                        reclaim::remove_aged(&self.place);
                    }
                    return Ok(Attempt::Granted(held));
                }
                Grant::Again => continue,
                Grant::Exists => {}
            }
            if !self.may_write {
                // A lock that exists hides that nobody could take it here: ask before waiting for it.
                self.place.dir.may_write().map_err(|errno| self.place.change_fault("create it", errno))?;
                self.may_write = true;
            }
            let seen = self.place.observe()?;
            self.settle_guard(match &seen {
                Seen::Epoch(epoch) => Some(epoch.identity()),
                Seen::Free | Seen::Foreign(..) => None,
            })?;
            match seen {
                Seen::Free => self.watch.forget(),
                Seen::Foreign(_, what) => return Err(self.place.cannot(format!("not a withlock lock: {what}"))),
                Seen::Epoch(epoch) => {
                    if let Turn::Busy(busy) = self.contend(epoch, offer)? {
                        return Ok(Attempt::Busy(busy));
                    }
                }
            }
        }
        let note = Some("it changed hands whenever it was looked at".to_owned());
        Ok(Attempt::Busy(Box::new(Busy { note, ..Busy::unknown() })))
    }

    fn wait(&mut self, busy: &Busy, for_ms: u64, word: Option<Word>) -> Result<bool, Fault> {
        let failed = |errno| Fault::System { path: self.place.shown().to_vec(), doing: "wait for its guard", errno };
        let due_ms = for_ms.min(busy.look_again_ms).max(1);
        let Some(Epoch { stat, known, file: Some(file) }) = self.seen.take() else {
            return Ok(self.sleep_by_the_clock(due_ms, word));
        };
        let epoch = Epoch { stat, known, file: None };
        let identity = epoch.identity();
        if !self.has_useful_guard(&epoch) {
            if self.given == Some(identity) {
                // Dead, and waited out by the clock alone: there is nothing to poll for.
                self.polls = u32::MAX;
            }
            let is_newborn = epoch.known == Known::Blank && self.polls < NEWBORN_LOOKS;
            self.seen = Some(Epoch { file: Some(file), ..epoch });
            if is_newborn {
                self.polls += 1;
                self.sleeper.doze();
                return Ok(false);
            }
            return Ok(self.sleep_by_the_clock(due_ms, word));
        }
        if is_scheduled() {
            // One step of a scheduled actor: others decide when it comes to its next.
            before("wait", &self.place.name).map_err(failed)?;
            if file.try_guard().map_err(failed)? == Try::Given {
                self.just_given = Some((identity, file));
            }
            return Ok(false);
        }
        let now_ms = boot_ms();
        let watch = lookout::Watch {
            name: self.c_name.clone(),
            inode: identity.ino,
            mtime_ns: epoch.mtime().ns(),
            stale_boot_ms: now_ms.saturating_add(busy.look_again_ms),
            until_boot_ms: now_ms.saturating_add(for_ms),
            word,
        };
        let (slept, word_was_said) = self.sleeper.sleep_on_guard(&file, &self.place.dir, watch).map_err(failed)?;
        match slept {
            Slept::Given => self.just_given = Some((identity, file)),
            Slept::Called => {}
            Slept::Unsupported => self.given = Some(identity),
        }
        Ok(word_was_said)
    }

    fn pause(&mut self, for_ms: u64) {
        self.sleeper.sleep(for_ms);
    }

    fn evicted(&mut self) -> Vec<Evicted> {
        std::mem::take(&mut self.evicted)
    }

    fn on_behalf_of(&mut self, pid: u32, pid_started: u64) {
        (self.who.pid, self.who.pid_started) = (pid, pid_started);
    }

    fn absolute_name(&self) -> Result<OsString, Fault> {
        self.place.absolute()
    }

    fn may_hang(&self) -> bool {
        !self.place.file_system.local && !is_scheduled()
    }

    fn caveat(&self) -> Option<String> {
        (!self.place.file_system.local).then(|| {
            "not a local file system: other hosts do not see the guard; mount it without look-up and attribute caches"
                .into()
        })
    }
}

impl FileStore {
    fn poll_interval_ms(&mut self) -> u64 {
        self.polls = self.polls.saturating_add(1);
        random::jittered_ms(BACKSTOP_MS.min(1 << self.polls.min(10)))
    }

    /// Polls at a pace that starts at milliseconds and grows to a second.
    fn sleep_by_the_clock(&mut self, due_ms: u64, word: Option<Word>) -> bool {
        let pace_ms = self.poll_interval_ms();
        self.sleeper.sleep(pace_ms.min(due_ms));
        let due = word.filter(|word| boot_ms() >= word.at_boot_ms);
        if let Some(word) = &due {
            output::raw(&word.line);
        }
        due.is_some()
    }
}
