//! An actor's operations, performed on the real store, as the commands would.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::rc::Rc;

use withlock::lease::{Verdict, judge};
use withlock::record::{self, Content, Guard, SlotName, Why};
use withlock::store::{
    Attempt, Basis, End, Ending, Fault, FileStore, Held, NotReleased, Offer, Seen, Store, end, reclaim,
};
use withlock::sys::clock::wall;
use withlock::sys::hook::{self, Call, Hook};
use withlock::sys::signal::OnEntry;

use super::actor::{ActorHook, Died, finished};
use super::given::given_nonce;
use super::scenario::{Actor, Op};
use super::world::{LOCK, TTL_MS};

/// Attempts in one acquire.
const ATTEMPTS: u32 = 2;

/// What a contender with this guard asks for.
pub(super) fn offer(guard: Guard, evict_dead: bool) -> Offer {
    Offer {
        ttl_ms: TTL_MS,
        guard,
        command: "explored".into(),
        label: None,
        mode: None,
        fence: None,
        runs_command: false,
        evict_dead,
    }
}

/// Runs one actor from its first operation to its end, whatever that is.
pub(super) fn run(hook: &Rc<ActorHook>, on_entry: &OnEntry) {
    let actor = hook.scenario.actors[hook.index].clone();
    hook::leave_out(&hook.scenario.leave_out);
    hook::install(Rc::clone(hook) as Rc<dyn Hook>);
    let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| perform_all(hook, &actor, on_entry)));
    hook::clear();
    let panicked = ran.err().filter(|payload| !payload.is::<Died>()).map(|payload| {
        let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
        text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
    });
    finished(hook, panicked);
}

fn perform_all(hook: &ActorHook, actor: &Actor, on_entry: &OnEntry) {
    let mut store = match FileStore::open(hook.shared.dir.join(LOCK).as_os_str(), false, on_entry) {
        Ok(store) => store,
        Err(fault) => return failed(hook, &fault),
    };
    let mut held: Option<Box<dyn Held>> = None;
    for op in &actor.ops {
        if op.needs_lock() && held.is_none() {
            continue;
        }
        hook.begins(*op);
        match op {
            Op::Nothing => {}
            Op::Acquire => held = acquire(hook, &mut store, &offer(actor.guard, actor.evict_dead)),
            Op::Renew => {
                if let Some(held) = &mut held {
                    renew(hook, held.as_mut());
                }
            }
            Op::Release => {
                if let Some(held) = held.take() {
                    release(hook, held);
                }
            }
            Op::Break { force } => {
                let basis = if *force { Basis::Any } else { Basis::Age };
                end_what_is_there(hook, &store, basis, Why::Break, *force, false);
            }
            Op::ReleaseByNonce => end_what_is_there(hook, &store, Basis::Any, Why::LateRelease, false, true),
            Op::Reclaim => reclaim::remove_aged(store.place()),
            Op::OccupySlot => stranger(hook, true),
            Op::VacateSlot => stranger(hook, false),
        }
    }
}

fn failed(hook: &ActorHook, fault: &Fault) {
    let mut world = hook.shared.lock();
    world.note(|| format!("actor {}: {fault}", hook.index));
    if !hook.scenario.has_faults() {
        world.violated(format!("error: actor {} was told: {fault}", hook.index));
    }
}

fn acquire(hook: &ActorHook, store: &mut FileStore, offer: &Offer) -> Option<Box<dyn Held>> {
    for attempt in 1..=ATTEMPTS {
        let busy = match store.attempt(offer) {
            Ok(Attempt::Granted(held)) => {
                let mut world = hook.shared.lock();
                world.granted(hook.index, offer.guard != Guard::None, hook.shared.clock.wall_ms());
                world.note(|| format!("actor {} HOLDS", hook.index));
                return Some(held);
            }
            Ok(Attempt::Busy(found)) => found,
            Err(fault) => {
                failed(hook, &fault);
                return None;
            }
        };
        if attempt < ATTEMPTS
            && let Err(fault) = store.wait(&busy, 1, None)
        {
            failed(hook, &fault);
            return None;
        }
    }
    None
}

fn renew(hook: &ActorHook, held: &mut dyn Held) {
    let renewal = held.renew();
    let mut world = hook.shared.lock();
    if renewal == withlock::machine::Renewal::Confirmed {
        world.confirmed(hook.index, hook.shared.clock.wall_ms());
    }
    world.note(|| format!("actor {}: renewal {renewal:?}", hook.index));
}

fn release(hook: &ActorHook, held: Box<dyn Held>) {
    let outcome = held.release(&mut || {});
    let mut world = hook.shared.lock();
    world.note(|| format!("actor {}: release {outcome:?}", hook.index));
    let said_lost = matches!(outcome, Err(NotReleased::Lost(_)));
    world.released(hook.index, outcome.is_ok(), said_lost);
}

fn end_what_is_there(hook: &ActorHook, store: &FileStore, basis: Basis, why: Why, force: bool, only_given: bool) {
    let place = store.place();
    let epoch = match place.observe() {
        Ok(Seen::Epoch(epoch)) if !only_given || epoch.nonce() == Some(given_nonce()) => epoch,
        Ok(_) => return,
        Err(fault) => return failed(hook, &fault),
    };
    let is_stale = matches!(judge(epoch.mtime(), wall(), epoch.ttl_ms()), Verdict::Stale { .. });
    if basis == Basis::Age && !is_stale {
        return;
    }
    let ending = Ending { judged: &epoch, basis, why, force, reason: None, mine: None, patience_ms: 100 };
    match end(place, &ending) {
        Ok(found) => hook.shared.lock().note(|| format!("actor {}: end {found:?}", hook.index)),
        Err(fault) => failed(hook, &fault),
    }
}

/// Ends by force what is at the path: for who comes at the end, where something may be in the way.
pub(super) fn break_by_force(store: &FileStore) -> Result<End, Fault> {
    let Seen::Epoch(epoch) = store.place().observe()? else { return Ok(End::Gone) };
    let ending = Ending {
        judged: &epoch,
        basis: Basis::Any,
        why: Why::Break,
        force: true,
        reason: None,
        mine: None,
        patience_ms: 0,
    };
    end(store.place(), &ending)
}

/// A stranger's act, in one step.
fn stranger(hook: &ActorHook, occupies: bool) {
    let call = if occupies { "a stranger occupies the slot" } else { "a stranger vacates the slots" };
    if hook.before(&Call { call, name: OsStr::new(""), fd: -1 }).is_err() {
        return;
    }
    let dir = &hook.shared.dir;
    let mut world = hook.shared.lock();
    world.fs_key = None;
    let mut did = false;
    if occupies {
        let content = std::fs::read(dir.join(LOCK)).unwrap_or_default();
        if let Content::Record(record) = record::classify(&content, content.len() as u64) {
            let path = dir.join(SlotName::of(&record).file_name(OsStr::new(LOCK)));
            did = std::fs::create_dir(&path).is_ok() && std::fs::write(path.join("stranger"), b"").is_ok();
        }
    } else {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            let is_slot = entry.file_name().as_bytes().starts_with(b"L.stale-");
            if is_slot && std::fs::remove_file(entry.path().join("stranger")).is_ok() {
                did |= std::fs::remove_dir(entry.path()).is_ok();
            }
        }
    }
    world.remember(hook.index, (call, did));
    world.note(|| format!("actor {}: {call} -> {did}", hook.index));
}
