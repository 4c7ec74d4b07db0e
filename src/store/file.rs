//! The lock in a file, for a contender: an attempt, and what it makes of the epoch that is at the path.

use std::ffi::{CString, OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use crate::lease::{Verdict, Watch, judge, judge_watched};
use crate::record::{Guard, Nonce, Why};
use crate::sys::clock::{boot_ms, wall};
use crate::sys::file::{File, Identity};
use crate::sys::hook::is_scheduled;
use crate::sys::lookout::Word;
use crate::sys::process::Who;
use crate::sys::signal::OnEntry;
use crate::sys::sleep::Sleeper;
use crate::text::duration;

use super::end::{Basis, End, Ending, VETO_PATIENCE_MS, end};
use super::grant::Grant;
use super::place::{Epoch, Known, Place, Seen};
use super::reserve::Numbers;
use super::wait::BACKSTOP_MS;
use super::{Attempt, Busy, Evicted, Fault, Offer, Store, reclaim};

/// When to look again at a lock that is stale but guarded, in milliseconds: its guard tells before that.
const VETOED_AGAIN_MS: u64 = 60_000;
/// Observations in one attempt that each find the lock changed; then it counts as busy for now.
const TURNS: u32 = 100;

/// Takes and waits for the lock file at one path.
#[derive(Debug)]
pub struct FileStore {
    pub(super) place: Arc<Place>,
    pub(super) c_name: CString,
    pub(super) who: Who,
    pub(super) on_entry: OnEntry,
    pub(super) sleeper: Sleeper,
    pub(super) watch: Watch<(Identity, Option<Nonce>)>,
    /// The epoch last seen at the path, to sleep on.
    pub(super) seen: Option<Epoch>,
    /// The epoch whose guard we were given while it was still at the path. Its processes are dead; it is
    /// waited out by the clock, and its guard is left alone, or two waiters would wake each other.
    pub(super) given: Option<Identity>,
    /// The guard that we were just given, and of which file: whether its epoch has ended the next look tells.
    pub(super) just_given: Option<(Identity, File)>,
    /// Guards of epochs that have ended.
    pub(super) kept_guards: Vec<File>,
    pub(super) vetoed: Option<Identity>,
    pub(super) polls: u32,
    pub(super) may_write: bool,
    pub(super) may_fence: bool,
    pub(super) has_evicted: bool,
    pub(super) evicted: Vec<Evicted>,
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

    /// Finds out whether the lock could ever be taken here, with a number from `fence`, and creates nothing; who
    /// holds it, unless it looks stale.
    pub(super) fn examine(&mut self, fence: Option<&OsStr>) -> Result<Option<Box<Busy>>, Fault> {
        if let Some(dir) = fence {
            Numbers::open(dir, &self.on_entry)?;
        }
        self.place.dir.may_write().map_err(|errno| self.place.change_fault("create it", errno))?;
        self.may_write = true;
        match self.place.observe()? {
            Seen::Foreign(_, what) => Err(self.place.cannot(what.refusal())),
            Seen::Free => Ok(None),
            Seen::Epoch(epoch) => Ok(match judge(epoch.mtime(), wall(), epoch.ttl_ms()) {
                Verdict::Fresh { remaining_ms } => Some(busy(&epoch, Some(remaining_ms), remaining_ms, None)),
                Verdict::Stale { .. } => None,
            }),
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
        let busy = busy(&epoch, expires_in_ms, look_again_ms, note);
        self.seen = Some(epoch);
        Turn::Busy(busy)
    }
}

fn busy(epoch: &Epoch, expires_in_ms: Option<u64>, look_again_ms: u64, note: Option<String>) -> Box<Busy> {
    let unwritten = || (epoch.known == Known::Blank).then(|| "its record is not written yet, or broken".into());
    Box::new(Busy {
        lock: None,
        record: epoch.record().cloned(),
        renewed_at_ms: Some(epoch.mtime().ms()),
        expires_in_ms,
        note: note.or_else(unwritten),
        look_again_ms,
    })
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
                Seen::Foreign(_, what) => return Err(self.place.cannot(what.refusal())),
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
        self.sleep(busy, for_ms, word)
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

    fn caveat(&self) -> Option<(Option<OsString>, &'static str)> {
        let caveat =
            "not a local file system: other hosts do not see the guard; mount it without look-up and attribute caches";
        (!self.place.file_system.local).then_some((None, caveat))
    }
}
