//! What all actors of one schedule share: the turn, the clocks, and the monitor that knows more than any
//! of them and says when the protocol's promise is broken.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use withlock::lease::{Stamp, reclaim_age_ms};
use withlock::sys::hook::Now;

use super::scenario::{Op, Scenario};
use super::search::Search;

/// The lock's name.
pub(super) const LOCK: &str = "L";
/// The ttl of every lock here, and of a blank one as well.
pub(super) const TTL_MS: u64 = 60_000;
/// A passing of time that turns every epoch old that is not renewed, and no quarantine reclaimable.
pub(super) const AGE_MS: u64 = TTL_MS + 1_000;
/// The age from which on a quarantine may go.
pub(super) const RECLAIM_AGE_MS: u64 = reclaim_age_ms(TTL_MS);
/// A passing of time that turns every quarantine reclaimable.
pub(super) const RECLAIM_MS: u64 = RECLAIM_AGE_MS + 1_000;

/// Not a whole second: that would be taken for a file system that knows no others.
const WALL_AT_START_MS: i64 = 2_000_000_000_500;
const BOOT_AT_START_MS: u64 = 1_000_000_000;

/// The clocks of the world: they stand still but for the schedule's own events.
#[derive(Debug)]
pub(super) struct Clock {
    wall_ms: AtomicI64,
    boot_ms: AtomicU64,
}

impl Clock {
    pub(super) fn now(&self) -> Now {
        Now { boot_ms: self.boot_ms.load(Ordering::Relaxed), wall: Stamp::from_ms(self.wall_ms()) }
    }

    pub(super) fn wall_ms(&self) -> i64 {
        self.wall_ms.load(Ordering::Relaxed)
    }

    pub(super) fn pass(&self, ms: i64, moves_boot: bool) {
        self.wall_ms.fetch_add(ms, Ordering::Relaxed);
        if moves_boot {
            self.boot_ms.fetch_add(u64::try_from(ms).unwrap_or(0), Ordering::Relaxed);
        }
    }

    fn reset(&self) {
        self.wall_ms.store(WALL_AT_START_MS, Ordering::Relaxed);
        self.boot_ms.store(BOOT_AT_START_MS, Ordering::Relaxed);
    }
}

/// Shared by the actors' threads and the one that leads them.
pub(super) struct Shared {
    pub(super) world: Mutex<World>,
    pub(super) wake: Vec<Condvar>,
    pub(super) leader: Condvar,
    pub(super) clock: Clock,
    pub(super) dir: PathBuf,
}

impl Shared {
    pub(super) fn new(scenario: &Scenario, dir: PathBuf, search: Search) -> Self {
        let actors = scenario.actors.len();
        Shared {
            world: Mutex::new(World::new(actors, search)),
            wake: (0..actors).map(|_| Condvar::new()).collect(),
            leader: Condvar::new(),
            clock: Clock { wall_ms: AtomicI64::new(0), boot_ms: AtomicU64::new(0) },
            dir,
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Back to the beginning, for the next schedule.
    pub(super) fn reset(&self, world: &mut World, scenario: &Scenario) {
        self.clock.reset();
        world.reset(scenario);
    }
}

/// What an actor's thread is to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Wait,
    Go,
    /// Its descriptors are closed and it is gone.
    Die,
    /// On without a scheduler.
    Free,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Life {
    NotStarted,
    Alive,
    Finished,
    Dead,
}

/// One actor, as the scheduler and the monitor see it.
#[derive(Clone, Debug)]
pub(super) struct ActorState {
    pub(super) life: Life,
    pub(super) order: Order,
    pub(super) op: Op,
    /// The next call is the first of its operation.
    pub(super) at_boundary: bool,
    /// It has given up its turn: it waits for a lock.
    pub(super) yields: bool,
    /// All it has ever seen: what it does next is a function of this alone.
    pub(super) history: u64,
    pub(super) steps: u32,
    pub(super) stalled_ms: u64,
    /// The file at the lock path that it last opened or made.
    pub(super) judged: Option<u64>,
    /// The epoch it made in the attempt it is in.
    pub(super) newborn: Option<u64>,
    /// The epoch it holds, from the grant to the end of its release.
    pub(super) held: Option<u64>,
    made: u32,
}

/// One existence of the lock file.
#[derive(Clone, Debug, Hash)]
pub(super) struct EpochState {
    pub(super) inode: u64,
    pub(super) maker: usize,
    pub(super) has_guard: bool,
    pub(super) stamped_ms: i64,
    pub(super) born_ms: i64,
    /// Confirmed by a grant or a renewal, and not old since.
    pub(super) confirmed: bool,
    pub(super) ended_by: Option<usize>,
    pub(super) is_forced: bool,
    pub(super) ended_ms: i64,
}

pub(super) struct World {
    pub(super) actors: Vec<ActorState>,
    pub(super) epochs: Vec<EpochState>,
    pub(super) at_path: Option<u64>,
    /// Who has the guard of which inode, by which descriptor; by host where hosts share no locks.
    pub(super) guards: HashMap<(Option<&'static str>, u64), (usize, RawFd)>,
    pub(super) inodes: HashMap<u64, u32>,
    pub(super) violation: Option<String>,
    pub(super) ended: Option<End>,
    pub(super) aborting: bool,
    pub(super) quit: bool,
    /// Whose turn it is.
    pub(super) turn: Option<usize>,
    /// Who made the last step.
    pub(super) current: usize,
    pub(super) trace: Option<Vec<String>>,
    pub(super) search: Search,
    pub(super) fs_key: Option<u64>,
    pub(super) forces: bool,
    pub(super) has_newborn_rule: bool,
}

/// How a schedule ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// Nobody is left.
    Done,
    /// The state is known: all that can follow has been seen.
    Known,
    /// All others are done and this one stalls for ever.
    Stalled(usize),
    /// A promise is broken.
    Violation,
    /// A replay did not find what was recorded.
    Diverged,
}

/// Canonical numbers of inodes that were there at the beginning.
const GIVEN: u32 = 1_000_000;

impl World {
    fn new(actors: usize, search: Search) -> Self {
        let actor = ActorState {
            life: Life::NotStarted,
            order: Order::Wait,
            op: Op::Nothing,
            at_boundary: true,
            yields: false,
            history: 0,
            steps: 0,
            stalled_ms: 0,
            judged: None,
            newborn: None,
            held: None,
            made: 0,
        };
        World {
            // One more for the prober that comes at the end.
            actors: vec![actor; actors + 1],
            epochs: Vec::new(),
            at_path: None,
            guards: HashMap::new(),
            inodes: HashMap::new(),
            violation: None,
            ended: None,
            aborting: false,
            quit: false,
            turn: None,
            current: 0,
            trace: None,
            search,
            fs_key: None,
            forces: false,
            has_newborn_rule: true,
        }
    }

    fn reset(&mut self, scenario: &Scenario) {
        let search = std::mem::take(&mut self.search);
        let trace = self.trace.take();
        *self = World::new(self.actors.len() - 1, search);
        self.trace = trace.map(|_| Vec::new());
        self.forces = scenario.actors.iter().any(|actor| actor.ops.contains(&Op::Break { force: true }));
        self.search.restart(scenario);
    }

    /// An inode that exists before any actor acts.
    pub(super) fn given(&mut self, inode: u64) {
        let number = GIVEN + u32::try_from(self.inodes.len()).unwrap_or(0);
        self.inodes.insert(inode, number);
    }

    /// An epoch that exists before any actor acts; its maker is gone.
    pub(super) fn given_epoch(&mut self, inode: u64, stamped_ms: i64) {
        self.at_path = Some(inode);
        self.epochs.push(EpochState {
            inode,
            maker: usize::MAX,
            has_guard: false,
            stamped_ms,
            born_ms: stamped_ms,
            confirmed: false,
            ended_by: None,
            is_forced: false,
            ended_ms: 0,
        });
    }

    /// The same inode has the same number in all schedules that lead to the same state, in whatever order
    /// the actors made theirs: it is called after its maker.
    pub(super) fn number(&mut self, inode: u64, maker: usize) -> u32 {
        if let Some(number) = self.inodes.get(&inode) {
            return *number;
        }
        let actor = &mut self.actors[maker];
        actor.made += 1;
        let number = u32::try_from(maker).unwrap_or(0) * 1_000 + actor.made;
        self.inodes.insert(inode, number);
        number
    }

    pub(super) fn known_number(&self, inode: u64) -> u32 {
        self.inodes.get(&inode).copied().unwrap_or(0)
    }

    pub(super) fn remember(&mut self, actor: usize, what: impl Hash) {
        let mut hasher = DefaultHasher::new();
        (self.actors[actor].history, what).hash(&mut hasher);
        self.actors[actor].history = hasher.finish();
    }

    pub(super) fn epoch(&mut self, inode: u64) -> Option<&mut EpochState> {
        self.epochs.iter_mut().rev().find(|epoch| epoch.inode == inode)
    }

    pub(super) fn violated(&mut self, what: String) {
        self.violation.get_or_insert(what);
    }

    pub(super) fn is_alive(&self, actor: usize) -> bool {
        matches!(self.actors[actor].life, Life::Alive | Life::NotStarted)
    }

    pub(super) fn note(&mut self, line: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            trace.push(line());
        }
    }
}
