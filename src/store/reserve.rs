//! Numbers handed out once: `DIR/claim-<n>` is taken by whoever creates it.
//!
//! A caller takes `DIR/lock` if it can within its patience, and goes on without it if it cannot. That is
//! not the rare case: a wait that runs out *means* that a rival is about to claim. So the lock protects
//! nothing here but the floor, a hint that saves looking. What keeps two callers from the same number is
//! [`Dir::create_exclusive`] alone, and the function that calls it does not even know whether its
//! caller has the lock.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use crate::lease::MIN_TTL_MS;
use crate::options::is_among;
use crate::record::{Guard, canonical_number, claim_name, claim_number};
use crate::sys::clock::boot_ms;
use crate::sys::file::{Dir, Outcome};
use crate::sys::hook::Step;
use crate::sys::signal::OnEntry;
use crate::sys::{Errno, process, random, sleep};

use super::{Attempt, Busy, Fault, FileStore, Held, Offer, Place, Store};

/// How long a caller tries for the lock unless told otherwise, in milliseconds.
pub const DEFAULT_RESERVE_WAIT_MS: u64 = 2_000;
/// The first number of a directory that nobody has begun otherwise. Not 0: a reader of fencing tokens
/// that has seen none yet may start there.
const FIRST: u64 = 1;
/// The lock that callers try for.
const LOCK: &str = "lock";
/// The hint: every number up to this one has been handed out, or passed over for good.
const FLOOR: &str = "floor";
/// The floor to come, before it is renamed.
const NEXT_FLOOR: &str = "floor.new";
/// Numbers that are tried one by one before the next free one is looked for: a look leaves the directory
/// to others meanwhile, a try does not.
const STEPS_BEFORE_LEAP: u32 = 2;
/// A floor is at most 20 digits and a line feed.
const MAX_FLOOR_BYTES: usize = 32;

/// A directory that hands out numbers.
#[derive(Debug)]
pub struct Numbers {
    store: FileStore,
}

/// A number that nobody else has, and never will.
#[derive(Debug)]
pub struct Reserved {
    /// The number.
    pub number: u64,
    /// Why it was reserved without the lock, if it was.
    pub without_lock: Option<Without>,
}

/// Why the lock could not be had.
#[derive(Debug)]
pub enum Without {
    /// Another has it, and patience ran out.
    Busy(Box<Busy>),
    /// It cannot be had at all.
    Fault(Fault),
}

impl Numbers {
    /// The numbers of `dir`; what can never work is found here, before anything is created.
    pub fn open(dir: &OsStr, on_entry: &OnEntry) -> Result<Self, Fault> {
        if dir.is_empty() {
            return Err(Fault::CannotTake { path: Vec::new(), why: "the path of the directory is empty".into() });
        }
        let mut lock = OsString::from(dir);
        lock.push("/");
        lock.push(LOCK);
        let store = FileStore::open(&lock, false, on_entry).map_err(|fault| fault.of(dir.as_bytes()))?;
        let place = store.place();
        place.dir.may_write().map_err(|errno| place.change_fault("create a marker", errno))?;
        Ok(Numbers { store })
    }

    /// Whether a call may hang without an end.
    pub fn may_hang(&self) -> bool {
        self.store.may_hang()
    }

    /// Hands out the next number: with the lock if it can be had within `patience_ms`, else without.
    pub fn next(&mut self, patience_ms: u64, start: Option<u64>) -> Result<Reserved, Fault> {
        let lock = self.take_lock(patience_ms, |store, busy, left_ms| store.wait(busy, left_ms, None).map(drop));
        self.hand_out(lock, start)
    }

    /// The same for a caller who has a lock of its own in its hands: no signal ends it while it waits.
    pub(super) fn next_meanwhile(&mut self, patience_ms: u64) -> Result<Reserved, Fault> {
        const PACE_MS: u64 = 4;
        let lock = self.take_lock(patience_ms, |_, _, left_ms| {
            sleep::pause(random::jittered_ms(PACE_MS.min(left_ms)));
            Ok(())
        });
        self.hand_out(lock, None)
    }

    fn hand_out(&self, lock: Result<Box<dyn Held>, Without>, start: Option<u64>) -> Result<Reserved, Fault> {
        let place = self.store.place();
        let reserved = reserve(&place.dir, start).map_err(|refused| refused.at(place));
        let without_lock = match lock {
            Ok(mut held) => {
                // Only the locked path writes the floor: not one whose lock was lost meanwhile.
                if let Ok(number) = reserved
                    && held.look().is_none()
                {
                    let _ = raise_floor(&place.dir, number);
                }
                // What cannot be released expires within a second, and holds nobody up for longer.
                let _ = held.release(&mut || {});
                None
            }
            Err(without) => Some(without),
        };
        let number = reserved?;
        self.make_durable()?;
        Ok(Reserved { number, without_lock })
    }

    /// The same for a caller who is on the locked path already: it has just been granted `DIR/lock`.
    pub(super) fn next_under_lock(&self) -> Result<u64, Fault> {
        let place = self.store.place();
        let number = reserve(&place.dir, None).map_err(|refused| refused.at(place))?;
        let _ = raise_floor(&place.dir, number);
        self.make_durable()?;
        Ok(number)
    }

    /// Whether `place` is this directory's own lock.
    pub(super) fn is_locked_by(&self, place: &Place) -> Result<bool, Fault> {
        let failed = |errno| place.fault("examine its directory", errno);
        Ok(place.name == LOCK
            && place.dir.stat().map_err(failed)?.identity == self.store.place().dir.stat().map_err(failed)?.identity)
    }

    fn take_lock(
        &mut self,
        patience_ms: u64,
        mut wait: impl FnMut(&mut FileStore, &Busy, u64) -> Result<(), Fault>,
    ) -> Result<Box<dyn Held>, Without> {
        let offer = Offer {
            // A caller that died is waited for no longer than the default patience of the next.
            ttl_ms: MIN_TTL_MS,
            guard: Guard::Wrapper,
            command: "withlock".into(),
            label: None,
            mode: None,
            fence: None,
            runs_command: false,
            evict_dead: false,
        };
        let enclosing = process::variable("WITHLOCK_HELD").unwrap_or_default();
        let began_ms = boot_ms();
        loop {
            let busy = match self.store.attempt(&offer).map_err(Without::Fault)? {
                Attempt::Granted(held) => return Ok(held),
                Attempt::Busy(busy) => busy,
            };
            let waited_ms = boot_ms().saturating_sub(began_ms);
            // An ancestor of ours will not release it while we wait.
            let in_vain = busy.record.as_ref().is_some_and(|record| is_among(&enclosing, &record.nonce));
            if in_vain || waited_ms >= patience_ms {
                return Err(Without::Busy(busy));
            }
            wait(&mut self.store, &busy, patience_ms - waited_ms).map_err(Without::Fault)?;
        }
    }

    /// A number counts only once a power cut cannot take its marker back: it would be handed out again.
    fn make_durable(&self) -> Result<(), Fault> {
        let place = self.store.place();
        place.dir.sync_names().map_err(|errno| place.fault("write the marker to the disk", errno))
    }
}

/// Why [`reserve`] reserved nothing.
enum Refused {
    HasNumbers,
    Exhausted,
    System(&'static str, Errno),
}

impl Refused {
    fn at(self, place: &Place) -> Fault {
        let path = place.parent().as_encoded_bytes().to_vec();
        match self {
            Refused::HasNumbers => Fault::HasNumbers { path },
            Refused::Exhausted => Fault::NoNumber { path },
            Refused::System(doing, errno) => place.change_fault(doing, errno),
        }
    }
}

/// **The one function on both paths.** Takes the first free number above what is known to be taken, and
/// says which it was.
///
/// What was read beforehand, the floor or the markers, is a hint and may be old by now. The verdict is
/// EEXIST.
///
/// A call that begins after another has returned gets a larger number than that one: a number is taken
/// only above one that is, so from the floor up to the last all are, nothing is ever given back, and the
/// floor never falls. That is why a fencing token grows even where the lock could not be had.
fn reserve(dir: &Dir, start: Option<u64>) -> Result<u64, Refused> {
    let taken = match floor(dir).map_err(|errno| Refused::System("read the floor", errno))? {
        Some(floor) => Some(floor),
        None => highest_marker(dir).map_err(|errno| Refused::System("list the markers", errno))?,
    };
    let mut candidate = match (taken, start) {
        (Some(_), Some(_)) => return Err(Refused::HasNumbers),
        (Some(taken), None) => taken.checked_add(1),
        (None, start) => Some(start.unwrap_or(FIRST)),
    };
    let mut steps = 0;
    while let Some(number) = candidate {
        match dir.create_exclusive(OsStr::new(&claim_name(number)), 0o644, Step::Mark) {
            Ok(_marker) => return Ok(number),
            Err(Errno::EEXIST) if steps < STEPS_BEFORE_LEAP => {
                steps += 1;
                candidate = number.checked_add(1);
            }
            Err(Errno::EEXIST) => {
                steps = 0;
                candidate = leap(dir, number).map_err(|errno| Refused::System("look for a marker", errno))?;
            }
            Err(errno) => return Err(Refused::System("create the marker", errno)),
        }
    }
    Err(Refused::Exhausted)
}

/// A number above `taken` that is free while the one below it is not, in a few looks: for a floor that is
/// far behind, because nobody has had the lock for long.
fn leap(dir: &Dir, taken: u64) -> Outcome<Option<u64>> {
    let is_taken = |number: u64| dir.lstat(OsStr::new(&claim_name(number))).map(|found| found.is_some());
    let (mut low, mut stride) = (taken, 1_u64);
    let mut high = loop {
        let next = low.saturating_add(stride);
        if next == low {
            return Ok(None);
        }
        if !is_taken(next)? {
            break next;
        }
        (low, stride) = (next, stride.saturating_mul(2));
    };
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if is_taken(middle)? { low = middle } else { high = middle }
    }
    Ok(Some(high))
}

/// The floor, if there is a proper one. One that cannot be read is an error, not a reason to look at the
/// markers instead: whoever can read it would then go on from another point.
fn floor(dir: &Dir) -> Outcome<Option<u64>> {
    let content = dir.open_file(OsStr::new(FLOOR)).and_then(|file| file.content(MAX_FLOOR_BYTES));
    match content {
        Ok(content) => Ok(content.strip_suffix(b"\n").and_then(canonical_number)),
        // Nothing, or something that is no regular file.
        Err(Errno::ENOENT | Errno::ELOOP | Errno::ENXIO | Errno::EISDIR | Errno::ESPIPE) => Ok(None),
        Err(errno) => Err(errno),
    }
}

fn highest_marker(dir: &Dir) -> Outcome<Option<u64>> {
    let mut highest = None;
    dir.list(|name| highest = highest.max(claim_number(name)))?;
    Ok(highest)
}

/// Writes the floor, for the locked path only: by rename, so that a reader sees the old one or the new
/// one, and never lower than it is.
fn raise_floor(dir: &Dir, to: u64) -> Outcome<()> {
    if floor(dir)? >= Some(to) {
        return Ok(());
    }
    let name = OsStr::new(NEXT_FLOOR);
    let file = match dir.create_scratch(name) {
        // Left by a caller that died just here.
        Err(Errno::EEXIST) => {
            dir.unlink(name)?;
            dir.create_scratch(name)?
        }
        made => made?,
    };
    file.write_once(format!("{to}\n").as_bytes())?;
    dir.rename(name, dir, OsStr::new(FLOOR))
}
