//! One scenario, all its schedules: threads that stay, a fresh directory for every schedule, and a visitor
//! at the end of each who must be able to acquire.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use withlock::record::{Content, Guard, SlotName, classify};
use withlock::store::{Attempt, FileStore, Held, Store, reclaim};
use withlock::sys::hook;
use withlock::sys::signal::{OnEntry, block_all};

use super::actor::ActorHook;
use super::given::{clear, lay_out};
use super::perform::{break_by_force, offer, run};
use super::scenario::{Given, Op, Scenario};
use super::search::{Choice, Counts, Search, word};
use super::state::end_key;
use super::turn::SET_BACK_MS;
use super::world::{End, LOCK, Life, Order, RECLAIM_MS, Shared, World};

/// How often an actor's descriptors are counted: after every so many of its runs.
const COUNT_DESCRIPTORS_EVERY: u32 = 64;

/// A broken promise and the schedule that leads to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) what: String,
    pub(super) schedule: Vec<Choice>,
}

#[derive(Clone, Debug)]
pub(super) struct Report {
    pub(super) counts: Counts,
    pub(super) found: Option<Found>,
    /// All schedules have been run, or all with so many disturbances.
    pub(super) exhausted: Exhausted,
    pub(super) time: Duration,
    /// The schedule in words, if that was asked for.
    pub(super) trace: Vec<String>,
}

/// How far a search came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exhausted {
    /// Every schedule.
    All,
    /// Every schedule with so many disturbances, and some with more.
    UpTo(u8),
    /// Not even every schedule without a disturbance.
    Nothing,
}

/// How long to search.
#[derive(Clone, Copy, Debug)]
pub(super) enum Limit {
    /// As many schedules as the scenario says.
    Schedules,
    /// For so long, whatever the scenario says.
    Time(Duration),
    /// One schedule, and tell it.
    One,
}

/// Explores schedules, those with few disturbances first, until a promise is broken or the limit is met.
pub(super) fn explore(scenario: &Scenario, limit: Limit) -> Report {
    Leader::new(scenario, Search::default()).lead(limit)
}

/// Runs one schedule and tells it.
pub(super) fn replay(scenario: &Scenario, schedule: &[Choice]) -> Report {
    Leader::new(scenario, Search::replay(schedule)).lead(Limit::One)
}

struct Leader {
    shared: Arc<Shared>,
    scenario: Arc<Scenario>,
    threads: Vec<JoinHandle<()>>,
}

fn own_directory() -> PathBuf {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let base = if Path::new("/dev/shm").is_dir() { PathBuf::from("/dev/shm") } else { std::env::temp_dir() };
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let dir = base.join(format!("withlock-explorer-{}-{count}", std::process::id()));
    std::fs::create_dir(&dir).expect("making the explorer's directory");
    dir
}

impl Leader {
    fn new(scenario: &Scenario, search: Search) -> Self {
        let scenario = Arc::new(scenario.clone());
        let shared = Arc::new(Shared::new(&scenario, own_directory(), search));
        let threads = (0..scenario.actors.len())
            .map(|index| {
                let (shared, scenario) = (Arc::clone(&shared), Arc::clone(&scenario));
                std::thread::spawn(move || live(&shared, &scenario, index))
            })
            .collect();
        Leader { shared, scenario, threads }
    }

    fn lead(self, limit: Limit) -> Report {
        let began = Instant::now();
        let shared = Arc::clone(&self.shared);
        let scenario = Arc::clone(&self.scenario);
        // In a thread of its own: the visitor changes what belongs to a thread.
        let leader = std::thread::spawn(move || {
            hook::stand_alone().expect("descriptors of one's own");
            let on_entry = block_all().expect("blocking signals");
            lead(&shared, &scenario, &on_entry, limit)
        });
        let (found, exhausted, trace) = leader.join().expect("the leader of the explorer");
        let counts = {
            let mut world = self.shared.lock();
            world.quit = true;
            self.shared.wake.iter().for_each(std::sync::Condvar::notify_all);
            world.search.counts
        };
        for thread in self.threads {
            thread.join().expect("an actor of the explorer");
        }
        std::fs::remove_dir_all(&self.shared.dir).expect("removing the explorer's directory");
        Report { counts, found, exhausted, time: began.elapsed(), trace }
    }
}

/// An actor's thread: one run for each schedule in which it is given a turn.
fn live(shared: &Arc<Shared>, scenario: &Arc<Scenario>, index: usize) {
    hook::stand_alone().expect("descriptors of one's own");
    let on_entry = block_all().expect("blocking signals");
    let descriptors = count_descriptors();
    for round in 1.. {
        let mut world = shared.lock();
        while world.actors[index].order == Order::Wait && !world.quit {
            world = wait(&shared.wake[index], world);
        }
        if world.quit {
            return;
        }
        world.actors[index].order = Order::Wait;
        world.actors[index].life = Life::Alive;
        drop(world);
        let hook = Rc::new(ActorHook::new(index, shared, scenario, scenario.actors[index].host));
        run(&hook, &on_entry);
        if round % COUNT_DESCRIPTORS_EVERY == 0 && count_descriptors() != descriptors {
            shared.lock().violated(format!("leak: actor {index} left descriptors open"));
        }
    }
}

fn count_descriptors() -> usize {
    std::fs::read_dir("/proc/thread-self/fd").map_or(0, Iterator::count)
}

fn wait<'a>(condition: &std::sync::Condvar, world: MutexGuard<'a, World>) -> MutexGuard<'a, World> {
    condition.wait(world).unwrap_or_else(PoisonError::into_inner)
}

type Led = (Option<Found>, Exhausted, Vec<String>);

fn lead(shared: &Arc<Shared>, scenario: &Arc<Scenario>, on_entry: &OnEntry, limit: Limit) -> Led {
    let began = Instant::now();
    let tells = matches!(limit, Limit::One);
    let (mut level, mut exhausted) = (0, Exhausted::Nothing);
    if !tells && scenario.bound.is_some() {
        shared.lock().search.deepen(level);
    }
    loop {
        clear(&shared.dir);
        let mut world = shared.lock();
        world.trace = tells.then(Vec::new);
        shared.reset(&mut world, scenario);
        lay_out(shared, &mut world, scenario);
        world.advance(shared, scenario);
        while world.ended.is_none() {
            world = wait(&shared.leader, world);
        }
        let end = world.ended.unwrap_or(End::Diverged);
        world.aborting = true;
        if matches!(end, End::Done | End::Stalled(_)) && world.violation.is_none() {
            let died = world.search.budget().deaths < scenario.budget.deaths;
            drop(world);
            let found = check_end(shared, scenario, on_entry, end, died);
            world = shared.lock();
            if let Err(what) = found {
                world.violated(what);
            }
        }
        world = stop_all(shared, world);
        if end == End::Diverged {
            world.violated("the replay diverged: the schedule does not fit the scenario".into());
        }
        let trace = world.trace.take().unwrap_or_default();
        if let Some(what) = world.violation.take() {
            let schedule = world.search.schedule();
            world.search.next(true);
            return (Some(Found { what, schedule }), exhausted, trace);
        }
        let has_more = world.search.next(matches!(end, End::Done | End::Stalled(_)));
        if tells {
            return (None, exhausted, trace);
        }
        let is_over = match limit {
            Limit::Schedules => world.search.counts.schedules >= scenario.at_most,
            Limit::Time(most) => began.elapsed() >= most,
            Limit::One => true,
        };
        if !has_more {
            let Some(bound) = scenario.bound.filter(|_| world.search.is_cut()) else {
                return (None, Exhausted::All, trace);
            };
            exhausted = Exhausted::UpTo(level);
            level += 1;
            if level > bound && matches!(limit, Limit::Schedules) {
                return (None, exhausted, trace);
            }
            world.search.deepen(level);
        }
        if is_over {
            return (None, exhausted, trace);
        }
    }
}

/// Ends the runs of those who still wait for a turn.
fn stop_all<'a>(shared: &'a Shared, mut world: MutexGuard<'a, World>) -> MutexGuard<'a, World> {
    for actor in 0..shared.wake.len() {
        if world.actors[actor].life != Life::Alive {
            continue;
        }
        world.actors[actor].order = Order::Die;
        shared.wake[actor].notify_one();
        while world.actors[actor].life == Life::Alive {
            world = wait(&shared.leader, world);
        }
    }
    world
}

/// What must be true when nobody acts any more.
fn check_end(
    shared: &Arc<Shared>,
    scenario: &Arc<Scenario>,
    on_entry: &OnEntry,
    end: End,
    died: bool,
) -> Result<(), String> {
    let is_clean = end == End::Done && !died && !scenario.has_faults() && !scenario.overlooks_leaks;
    check_directory(&shared.dir, scenario, is_clean)?;
    if scenario.is_audited() {
        let mut world = shared.lock();
        world.audit(&quarantined(&shared.dir), shared.clock.wall_ms());
        if let Some(what) = world.violation.take() {
            return Err(what);
        }
    }
    let mut stalled = if let End::Stalled(actor) = end { Some(actor) } else { None };
    let mut world = shared.lock();
    let key = end_key(shared, &world, stalled);
    if !world.search.is_new_end(key) {
        return Ok(());
    }
    drop(world);
    if scenario.timed && stalled.is_some() {
        // Beyond the bound nothing is promised of one that wakes: here it never does.
        let world = stop_all(shared, shared.lock());
        drop(world);
        stalled = None;
    }
    let hook = Rc::new(
        ActorHook::new(scenario.actors.len(), shared, scenario, scenario.actors[0].host.map(|_| "visitor")).free(),
    );
    hook::install(hook.clone());
    let visited = visit(shared, scenario, on_entry, stalled, &hook);
    hook::clear();
    visited
}

/// Somebody comes when all is old: it must be able to acquire, and keep what it acquired whoever wakes up.
fn visit(
    shared: &Arc<Shared>,
    scenario: &Arc<Scenario>,
    on_entry: &OnEntry,
    stalled: Option<usize>,
    hook: &ActorHook,
) -> Result<(), String> {
    hook.begins(Op::Acquire);
    shared.lock().actors[hook.index].life = Life::Alive;
    let told = |fault: withlock::store::Fault| format!("error: the visitor was told: {fault}");
    let mut store = FileStore::open(shared.dir.join(LOCK).as_os_str(), false, on_entry).map_err(told)?;
    let mut held = patiently(shared, &mut store).map_err(told)?;
    if held.is_none() {
        // A process that stopped while it has the guard, or a name that is not ours: the operator insists.
        let is_guarded = stalled.is_some_and(|actor| {
            let world = shared.lock();
            world.at_path.is_some_and(|inode| world.guards.get(&(None, inode)).is_some_and(|owner| owner.0 == actor))
        });
        if !is_guarded && !scenario.has_strangers() {
            return Err("wedge: nobody can ever acquire again".into());
        }
        hook.begins(Op::Break { force: true });
        break_by_force(&store).map_err(told)?;
        hook.begins(Op::Acquire);
        held = patiently(shared, &mut store).map_err(told)?;
    }
    let Some(mut held) = held else {
        return if scenario.has_strangers() { Ok(()) } else { Err("wedge: not even by force".into()) };
    };
    shared.lock().granted(hook.index, true, shared.clock.wall_ms());
    if let Some(actor) = stalled {
        let mut world = shared.lock();
        world.note(|| format!("actor {actor} wakes up"));
        world.actors[actor].order = Order::Free;
        shared.wake[actor].notify_one();
        while world.actors[actor].life == Life::Alive {
            world = wait(&shared.leader, world);
        }
        if let Some(what) = world.violation.take() {
            return Err(what);
        }
    }
    if let Some(found) = held.look() {
        return if woke_to_break(scenario, stalled) {
            Ok(())
        } else {
            Err(format!("another epoch: the visitor's lock is lost: {found}"))
        };
    }
    hook.begins(Op::Release);
    held.release(&mut || {}).map_err(|not| format!("release: the visitor could not give its lock back: {not:?}"))?;
    time_passes(shared);
    if scenario.budget.set_backs > 0 {
        // What was stamped before it was set back lies in the future for as long.
        shared.clock.pass(SET_BACK_MS, true);
    }
    reclaim::remove_aged(store.place());
    let left: Vec<_> = std::fs::read_dir(&shared.dir).into_iter().flatten().flatten().map(|e| e.file_name()).collect();
    let may_be_left = scenario.has_strangers() || scenario.overlooks_leaks;
    if left.is_empty() || may_be_left { Ok(()) } else { Err(format!("leak: {left:?} is left for ever")) }
}

/// One that stalled before it looked at the lock breaks what it finds when it wakes: as asked.
fn woke_to_break(scenario: &Scenario, stalled: Option<usize>) -> bool {
    stalled.is_some_and(|actor| scenario.actors[actor].ops.contains(&Op::Break { force: true }))
}

fn patiently(shared: &Shared, store: &mut FileStore) -> Result<Option<Box<dyn Held>>, withlock::store::Fault> {
    for _ in 0..3 {
        time_passes(shared);
        match store.attempt(&offer(Guard::Inherited, false))? {
            Attempt::Granted(held) => return Ok(Some(held)),
            Attempt::Busy(busy) => store.wait(&busy, 1, None)?,
        };
    }
    Ok(None)
}

fn time_passes(shared: &Shared) {
    shared.clock.pass(RECLAIM_MS.cast_signed(), true);
    shared.lock().time_passed(shared.clock.wall_ms(), RECLAIM_MS);
}

/// The inodes of the records in quarantine.
fn quarantined(dir: &Path) -> Vec<u64> {
    use std::os::unix::fs::MetadataExt;
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let looked = entries.filter(|entry| entry.file_name() != LOCK).map(|entry| {
        let path = entry.path();
        std::fs::metadata(path.join("lock")).or_else(|_| std::fs::metadata(&path))
    });
    looked.flatten().map(|stat| stat.ino()).collect()
}

/// What lies beside the lock: quarantines, each with its own epoch's record in it; nothing half-made if
/// nobody died.
fn check_directory(dir: &Path, scenario: &Scenario, is_clean: bool) -> Result<(), String> {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name();
        if name == LOCK {
            continue;
        }
        let Some(slot) = SlotName::parse(OsStr::new(LOCK), &name) else {
            if is_clean && !scenario.has_strangers() {
                return Err(format!("leak: {} is left behind", name.to_string_lossy()));
            }
            continue;
        };
        let quarantined = entry.path().join("lock");
        let content = std::fs::read(&quarantined);
        let is_given = scenario.given.iter().any(|given| matches!(given, Given::Slot { .. }));
        match content.map(|content| classify(&content, content.len() as u64)) {
            Ok(Content::Record(record)) if SlotName::of(&record) != slot && !is_blank_slot(&slot, &quarantined) => {
                return Err(format!("another epoch: {} holds the record of {}", name.to_string_lossy(), record.nonce));
            }
            Err(_) if quarantined.is_dir() => {}
            Err(_) if is_clean && !is_given && !scenario.has_strangers() => {
                return Err(format!("leak: {} is left behind without a record", name.to_string_lossy()));
            }
            _ => {}
        }
    }
    Ok(())
}

/// A lock that was blank when it was judged may have got its record since: it is the same inode.
fn is_blank_slot(slot: &SlotName, quarantined: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let inode = std::fs::metadata(quarantined).map_or(0, |stat| stat.ino());
    slot.nonce.as_str().starts_with(&format!("{inode:016x}"))
}

/// The broken promise in words, with its schedule and how to see it again.
pub(super) fn tell(scenario: &Scenario, found: &Found) -> String {
    let told = replay(scenario, &found.schedule);
    let replayed = word(&found.schedule);
    format!(
        "{}\n  {}\nagain: WITHLOCK_SCHEDULE='{}:{replayed}' cargo test --test it explorer -- --nocapture",
        found.what,
        told.trace.join("\n  "),
        scenario.name,
    )
}
