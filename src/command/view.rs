//! What the reports are made of: a look at each lock, then one look at who has their guards.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::lease::{Stamp, Verdict, judge};
use crate::record::{Record, SlotName};
use crate::report::document::{
    Alive, ContestReport, Ended, FateWord, FileReport, GuardReport, GuardState, Holder, Lock, PathText, Process,
    Quarantined, State,
};
use crate::report::inspect::{argument, break_line};
use crate::store::look::{self, Contest};
use crate::store::permission;
use crate::store::reclaim::{Fate, Quarantine};
use crate::store::{Epoch, Fault, Known, Place, Seen};
use crate::sys::clock::wall;
use crate::sys::file::{File, Identity, Stat};
use crate::sys::guard::{Guarded, Running, Target, who_has};
use crate::sys::{describe, process, user};
use crate::text::duration;

use super::paths::beside;

/// Files kept open so that their inodes are not used again while the guards are looked for. More than
/// these are not worth running out of descriptors.
const MOST_OPEN: usize = 200;

/// Gathers looks at locks into one report.
#[derive(Default)]
pub(super) struct View {
    users: HashMap<u32, Option<String>>,
    hold: Vec<File>,
    targets: Vec<Target>,
    locks: Vec<(Lock, Pending)>,
}

/// What waits for the look at the guards: places in `targets`.
#[derive(Default)]
struct Pending {
    lock: Option<usize>,
    is_local: bool,
    contest: Option<Contest>,
    quarantine: Vec<Option<usize>>,
}

impl View {
    /// Looks at the lock at `place`, named `path` in the report.
    pub(super) fn add(&mut self, path: &OsStr, place: &Place) -> Result<(), Fault> {
        let now = wall();
        let seen = place.observe()?;
        let (mut lock, mut pending) =
            (Lock::free(path), Pending { is_local: place.file_system.local, ..Pending::default() });
        match seen {
            Seen::Free => {}
            Seen::Foreign(stat, what) => {
                lock.state = State::Foreign;
                lock.foreign = Some(what.to_string());
                lock.file = Some(self.file(&stat));
            }
            Seen::Epoch(epoch) => self.epoch(&mut lock, &mut pending, place, epoch, now),
        }
        let listed = look::each_quarantine(place, now, |found| {
            let target = found.file_identity().map(|identity| self.target(place, identity));
            let mut told = self.quarantined(path, found);
            if matches!(found.fate, Fate::Reclaimable | Fate::Young { .. }) {
                told.may_not_remove = permission::may_not_remove(place, found);
            }
            lock.quarantine.push(told);
            pending.quarantine.push(target);
        });
        lock.quarantine_error = listed.err().map(|errno| describe(errno).into());
        self.locks.push((lock, pending));
        Ok(())
    }

    /// Adds a lock of which all is known already.
    pub(super) fn add_lock(&mut self, lock: Lock) {
        self.locks.push((lock, Pending::default()));
    }

    fn epoch(&mut self, lock: &mut Lock, pending: &mut Pending, place: &Place, epoch: Epoch, now: Stamp) {
        lock.file = Some(self.file(&epoch.stat));
        lock.renewed_at_ms = Some(epoch.mtime().ms());
        lock.may_not_break = permission::may_not_end(place, &epoch);
        lock.state = if epoch.known == Known::Blank { State::Blank } else { State::Held };
        pending.lock = Some(self.target(place, epoch.identity()));
        if epoch.known == Known::Unreadable {
            lock.unreadable = true;
        } else {
            lock.ttl_ms = Some(epoch.ttl_ms());
            let ahead_ms = epoch.mtime().since_ms(now);
            lock.ahead_ms = u64::try_from(ahead_ms).ok().filter(|ms| *ms > 0);
            match judge(epoch.mtime(), now, epoch.ttl_ms()) {
                Verdict::Stale { overdue_ms } => lock.overdue_ms = Some(overdue_ms),
                Verdict::Fresh { remaining_ms } => lock.expires_in_ms = Some(remaining_ms),
            }
            lock.stale = lock.overdue_ms.is_some();
            pending.contest = look::contest(place, &epoch, now).ok().flatten();
        }
        if let Some(record) = epoch.record() {
            lock.held_since_ms = Some(i64::try_from(record.claimed_at_ms).unwrap_or(i64::MAX));
            lock.holder = Some(self.holder(record));
        }
        if self.hold.len() < MOST_OPEN {
            self.hold.extend(epoch.file);
        }
    }

    fn target(&mut self, place: &Place, identity: Identity) -> usize {
        self.targets.push(target(place, identity));
        self.targets.len() - 1
    }

    /// Asks for the guards, and finishes the report with what they say.
    pub(super) fn finish(mut self) -> Vec<Lock> {
        let guards = who_has(&self.targets);
        let locks = std::mem::take(&mut self.locks);
        locks.into_iter().map(|(lock, pending)| self.finished(lock, &pending, &guards)).collect()
    }

    fn finished(&mut self, mut lock: Lock, pending: &Pending, guards: &[Guarded]) -> Lock {
        for (found, target) in lock.quarantine.iter_mut().zip(&pending.quarantine) {
            if let Some(target) = target {
                apply_guard(found, &guards[*target]);
            }
        }
        if let Some(target) = pending.lock {
            let guard = self.guard(&guards[target]);
            // Whoever ends an epoch on a local file system keeps its guard until it is done: a claim
            // beside a free guard is a dead process's, and is passed over at once.
            let contest = pending.contest.as_ref().filter(|_| guard.state != GuardState::Free || !pending.is_local);
            if !lock.unreadable {
                lock.state = State::of_epoch(lock.state == State::Blank, lock.stale, guard.state, contest.is_some());
            }
            lock.contest = contest.map(|contest| ContestReport {
                by: contest.claim.as_ref().map(|claim| Ended::of(claim, self.user(claim.uid))),
                age_ms: contest.age_ms,
                passed_over_in_ms: contest.passed_over_in_ms,
            });
            lock.guard = Some(guard);
        }
        lock.next = next(&lock);
        lock
    }

    fn guard(&mut self, guarded: &Guarded) -> GuardReport {
        let (state, processes, perhaps_more, taken_by_pid) = match guarded {
            Guarded::Free => (GuardState::Free, &[][..], false, None),
            Guarded::Unknown => (GuardState::Unknown, &[][..], false, None),
            Guarded::Held { processes, perhaps_more, taken_by_pid } => {
                (GuardState::Held, &processes[..], *perhaps_more, *taken_by_pid)
            }
        };
        let processes = processes.iter().map(|running| self.process(running)).collect();
        GuardReport { state, processes, perhaps_more, taken_by_pid }
    }

    fn process(&mut self, running: &Running) -> Process {
        Process {
            pid: running.pid,
            command: running.command.clone(),
            state: running.state,
            uid: running.uid,
            user: running.uid.and_then(|uid| self.user(uid)),
            running_since_ms: running.started_at_ms,
            cpu_ms: running.cpu_ms,
        }
    }

    pub(super) fn user(&mut self, uid: u32) -> Option<String> {
        self.users.entry(uid).or_insert_with(|| user::name(uid)).clone()
    }

    fn file(&mut self, stat: &Stat) -> FileReport {
        FileReport {
            uid: stat.uid,
            user: self.user(stat.uid),
            mode: format!("{:04o}", stat.mode),
            size_bytes: stat.size_bytes,
        }
    }

    pub(super) fn holder(&mut self, record: &Record) -> Holder {
        let mut holder = Holder::of(record, self.user(record.uid));
        let me = process::Who::am_i();
        let running = Running::started_at(record.pid, record.pid_started);
        (holder.alive, holder.process) = match running {
            _ if record.boot_id.is_empty() => (None, None),
            _ if record.boot_id != me.boot_id && record.host != me.host => (Some(Alive::OtherHost), None),
            _ if record.boot_id != me.boot_id => (Some(Alive::EarlierBoot), None),
            // A container is told by its name: the numbers of its processes mean nothing out here.
            None if record.host != me.host => (Some(Alive::OtherHost), None),
            None => (Some(Alive::NotHere), None),
            Some(running) if matches!(running.state, 'Z' | 'X') => (Some(Alive::Zombie), None),
            Some(running) => (Some(Alive::RunsHere), Some(self.process(&running))),
        };
        holder
    }

    /// A quarantine as a report tells it, its guard left out.
    pub(super) fn quarantined(&mut self, lock: &OsStr, found: &Quarantine) -> Quarantined {
        let ended = found.claims.last().map(|claim| Ended::of(claim, self.user(claim.uid)));
        let owner = found.record.as_ref().map(|record| Holder::of(record, self.user(record.uid)));
        let is_ours = !matches!(found.fate, Fate::NotOurs(_));
        let mut quarantined = Quarantined {
            name: PathText::new(beside(lock, &found.name)),
            fate: FateWord::Reclaimable,
            why: String::new(),
            may_not_remove: None,
            reclaimable_in_ms: None,
            age_ms: Some(found.age_ms),
            safe_age_ms: is_ours.then_some(found.safe_age_ms),
            ended,
            owner,
            held_since_ms: found.record.as_ref().and_then(|record| i64::try_from(record.claimed_at_ms).ok()),
        };
        (quarantined.fate, quarantined.why) = match &found.fate {
            Fate::Reclaimable => (FateWord::Reclaimable, "reclaimable".into()),
            Fate::Young { in_ms } => {
                quarantined.reclaimable_in_ms = Some(*in_ms);
                (FateWord::Young, format!("reclaimable in {}", duration(*in_ms)))
            }
            Fate::Live => (FateWord::Live, "its epoch may still be at the lock path".into()),
            Fate::Guarded => (FateWord::Guarded, GUARDED.into()),
            Fate::NotOurs(why) => (FateWord::NotOurs, why.clone()),
        };
        if found.slot.is_none() && matches!(found.fate, Fate::Reclaimable | Fate::Young { .. }) {
            quarantined.why.push_str(", its removal is under way or was cut short");
        }
        quarantined
    }
}

const GUARDED: &str = "a process still has the guard of the file in it";

/// What to type, where that is right: an unforced break of what is stale (or has a time stamp that says
/// nothing) and may be ended by us, and a reclaim where there is something to reclaim that we may remove. A forced
/// break is never proposed.
fn next(lock: &Lock) -> Vec<String> {
    let mut next = Vec::new();
    let path = &lock.name.raw;
    let is_guarded = lock.guard.as_ref().is_some_and(|guard| guard.state == GuardState::Held);
    let is_due = lock.stale || lock.ahead_ms.is_some();
    let may = lock.may_not_break.is_none() && !is_guarded && !lock.unreadable;
    if is_due && may && matches!(lock.state, State::Stale | State::Blank | State::Held) {
        next.push(break_line(path, lock.holder.as_ref().map(|holder| holder.nonce.as_str())));
    }
    next.extend(reclaim_line(lock));
    next
}

/// All of a lock's quarantines at once, or one by one those that are not others' business.
fn reclaim_line(lock: &Lock) -> Option<String> {
    /// More of them make no line that anybody reads; the next look names the next ones.
    const MOST: usize = 8;
    let due = || lock.quarantine.iter().filter(|found| found.fate == FateWord::Reclaimable);
    let ours: Vec<&Quarantined> = due().filter(|found| found.may_not_remove.is_none()).collect();
    let paths: Vec<String> = if ours.len() == due().count() {
        ours.first().map(|_| argument(&lock.name.raw)).into_iter().collect()
    } else {
        // What was moved aside to be deleted cannot be asked for by its name.
        let is_slot = |path: &[u8]| SlotName::split(file_name(OsStr::from_bytes(path))).is_some();
        let named = ours.iter().map(|found| &found.name.raw).filter(|path| is_slot(path));
        named.take(MOST).map(|path| argument(path)).collect()
    };
    (!paths.is_empty()).then(|| format!("withlock reclaim {}", paths.join(" ")))
}

fn file_name(path: &OsStr) -> &OsStr {
    Path::new(path).file_name().unwrap_or(path)
}

/// What a look without a lock says of a quarantine's guard.
pub(super) fn apply_guard(told: &mut Quarantined, guard: &Guarded) {
    if told.fate != FateWord::Reclaimable {
        return;
    }
    match guard {
        Guarded::Free => {}
        Guarded::Held { .. } => {
            told.fate = FateWord::Guarded;
            told.why = GUARDED.into();
        }
        Guarded::Unknown => told.why.push_str(", unless a process that is not seen from here has its guard"),
    }
}

/// The guard of one file.
pub(super) fn guard_of(place: &Place, identity: Identity) -> Guarded {
    who_has(&[target(place, identity)]).pop().unwrap_or(Guarded::Unknown)
}

fn target(place: &Place, identity: Identity) -> Target {
    let file_system = &place.file_system;
    Target { identity, local: file_system.local, plain_device: file_system.plain_device }
}

/// One lock, by itself.
pub(super) fn of(path: &OsStr, place: &Place) -> Result<Lock, Fault> {
    let mut view = View::default();
    view.add(path, place)?;
    Ok(view.finish().pop().unwrap_or_else(|| Lock::free(path)))
}
