//! An actor: a thread with its own descriptors that performs its operations on the real store, and whose
//! every system call is a step of the schedule.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::fd::RawFd;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, PoisonError};

use withlock::lease::Stamp;
use withlock::sys::Errno;
use withlock::sys::file::{Stat, Try};
use withlock::sys::hook::{Call, Hook, Now, Seen};

use super::scenario::{Op, Scenario, is_private};
use super::state::{NONCE_MARK, canonical_name};
use super::world::{LOCK, Life, Order, Shared, World};

/// By how much a pause inside an operation moves an actor's clock: past every patience, so that what is
/// tried again is tried once more.
const PAUSE_MS: u64 = 3_000;

/// What unwinds through an actor that dies.
pub(super) struct Died;

/// The hook of one actor during one schedule.
pub(super) struct ActorHook {
    pub(super) index: usize,
    pub(super) shared: Arc<Shared>,
    pub(super) scenario: Arc<Scenario>,
    host: Option<&'static str>,
    paused_ms: Cell<u64>,
    randoms: Cell<u8>,
    files: RefCell<HashMap<RawFd, Opened>>,
    dying: Cell<bool>,
    /// Runs on without a scheduler.
    free: Cell<bool>,
    /// The first call comes with the turn that started the actor.
    has_turn: Cell<bool>,
}

#[derive(Clone, Copy, Debug)]
struct Opened {
    inode: u64,
    number: u32,
    is_claim: bool,
}

impl ActorHook {
    pub(super) fn new(
        index: usize,
        shared: &Arc<Shared>,
        scenario: &Arc<Scenario>,
        host: Option<&'static str>,
    ) -> Self {
        ActorHook {
            index,
            shared: Arc::clone(shared),
            scenario: Arc::clone(scenario),
            host,
            paused_ms: Cell::new(0),
            randoms: Cell::new(0),
            files: RefCell::new(HashMap::new()),
            dying: Cell::new(false),
            free: Cell::new(false),
            has_turn: Cell::new(true),
        }
    }

    /// One that no scheduler leads.
    pub(super) fn free(self) -> Self {
        self.free.set(true);
        self
    }

    pub(super) fn is_dying(&self) -> bool {
        self.dying.get()
    }

    /// An operation begins.
    pub(super) fn begins(&self, op: Op) {
        let mut world = self.shared.lock();
        let actor = &mut world.actors[self.index];
        actor.op = op;
        actor.newborn = None;
        actor.at_boundary = true;
    }

    /// Waits for this actor's next turn.
    fn wait_for_turn(&self, is_wait: bool) {
        if self.free.get() || self.dying.get() || self.has_turn.replace(false) {
            return;
        }
        let mut world = self.shared.lock();
        world.actors[self.index].yields = is_wait;
        world.advance(&self.shared, &self.scenario);
        while world.actors[self.index].order == Order::Wait {
            world = self.shared.wake[self.index].wait(world).unwrap_or_else(PoisonError::into_inner);
        }
        let order = std::mem::replace(&mut world.actors[self.index].order, Order::Wait);
        drop(world);
        match order {
            Order::Die => {
                self.dying.set(true);
                std::panic::resume_unwind(Box::new(Died));
            }
            Order::Free => self.free.set(true),
            Order::Wait | Order::Go => {}
        }
    }

    fn opened(&self, fd: RawFd) -> Option<Opened> {
        self.files.borrow().get(&fd).copied()
    }

    fn observe(&self, world: &mut World, call: &Call<'_>, outcome: Result<Seen<'_>, Errno>) {
        let me = self.index;
        let now_ms = self.shared.clock.wall_ms();
        let about = self.opened(call.fd);
        let at_lock = call.name == LOCK;
        if let Ok(Seen::Opened(fd, Some(stat))) = outcome {
            let number = world.number(stat.identity.ino, me);
            let is_claim = call.name.to_string_lossy().starts_with("claim-");
            self.files.borrow_mut().insert(fd, Opened { inode: stat.identity.ino, number, is_claim });
        }
        if outcome.is_ok() {
            match call.call {
                "create" if at_lock => {
                    if let Ok(Seen::Opened(_, Some(stat))) = outcome {
                        world.created(me, stat.identity.ino, now_ms);
                    }
                }
                "openat" if at_lock => {
                    if let Ok(Seen::Opened(_, Some(stat))) = outcome {
                        world.actors[me].judged = Some(stat.identity.ino);
                    }
                }
                "mkdir" => {
                    if let Ok(stat) = std::fs::symlink_metadata(self.shared.dir.join(call.name)) {
                        world.number(stat.ino(), me);
                    }
                }
                "rename" | "renameat2" | "unlink" if at_lock => world.taken(me, now_ms, &self.scenario),
                "futimens" => world.touched(me, about.map_or(0, |file| file.inode), now_ms),
                "utimensat" => {
                    let inode = world.at_path.unwrap_or(0);
                    world.touched(me, inode, now_ms);
                }
                "write" => {
                    if let Some(epoch) = about.and_then(|file| world.epoch(file.inode)) {
                        epoch.stamped_ms = now_ms;
                    }
                }
                _ => {}
            }
        }
        if let (Ok(Seen::Guard(Try::Given)), Some(file)) = (outcome, about) {
            world.guards.insert((self.host, file.inode), (me, call.fd));
        }
        if call.call == "unflock" {
            self.lets_go(world, call.fd);
        }
        if matches!(call.call, "create" | "write" | "mkdir" | "rmdir" | "unlink" | "rename" | "renameat2")
            || matches!(call.call, "futimens" | "utimensat")
        {
            world.fs_key = None;
        }
        let clock = (now_ms, self.now().map(|now| now.boot_ms));
        let name = canonical_name(world, call.name);
        let what = digest(world, outcome);
        world.remember(me, (call.call, name, about.map(|file| file.number), what, clock));
        world.note(|| line(me, call, about, outcome));
    }

    fn lets_go(&self, world: &mut World, fd: RawFd) -> bool {
        let before = world.guards.len();
        world.guards.retain(|_, owner| *owner != (self.index, fd));
        world.guards.len() < before
    }
}

impl Hook for ActorHook {
    fn before(&self, call: &Call<'_>) -> Result<(), Errno> {
        let is_claim = self.opened(call.fd).is_some_and(|file| file.is_claim);
        let of_a_claim = is_claim && matches!(call.call, "write" | "fstat" | "pread");
        if !is_private(call) && !of_a_claim {
            let is_wait = matches!(call.call, "wait" | "sleep");
            self.wait_for_turn(is_wait);
            if is_wait {
                // No call of the kernel's, so nobody will say how it ended; but it was a step.
                let clock = self.shared.clock.wall_ms();
                self.shared.lock().remember(self.index, (call.call, clock));
            }
        }
        let Some(fault) = self.scenario.faults.iter().find(|fault| fault.hits(call)) else { return Ok(()) };
        if self.index >= self.scenario.actors.len() && fault.errno == Errno::ENOSPC {
            // Who comes at the end finds space again.
            return Ok(());
        }
        let mut world = self.shared.lock();
        self.observe(&mut world, call, Err(fault.errno));
        Err(fault.errno)
    }

    fn after(&self, call: &Call<'_>, outcome: Result<Seen<'_>, Errno>) {
        if !self.dying.get() {
            let mut world = self.shared.lock();
            self.observe(&mut world, call, outcome);
        }
    }

    fn closing(&self, fd: RawFd) {
        let has_guard = self.shared.lock().guards.values().any(|owner| *owner == (self.index, fd));
        if has_guard {
            if !self.dying.get() {
                // To be seen by others is what makes it a step.
                self.wait_for_turn(false);
            }
            let mut world = self.shared.lock();
            self.lets_go(&mut world, fd);
            let number = self.opened(fd).map(|file| file.number);
            if !self.dying.get() {
                let clock = self.shared.clock.wall_ms();
                world.remember(self.index, ("close", number, clock));
                world.note(|| format!("actor {}: close (its guard goes)", self.index));
            }
        }
        self.files.borrow_mut().remove(&fd);
    }

    fn now(&self) -> Option<Now> {
        let now = self.shared.clock.now();
        Some(Now { boot_ms: now.boot_ms + self.paused_ms.get(), ..now })
    }

    fn pause(&self, _for_ms: u64) {
        self.paused_ms.set(self.paused_ms.get() + PAUSE_MS);
    }

    fn random(&self) -> Option<[u8; 16]> {
        self.randoms.set(self.randoms.get() + 1);
        let mut bytes = [0; 16];
        bytes[..2].copy_from_slice(&NONCE_MARK);
        bytes[2] = u8::try_from(self.index).unwrap_or(u8::MAX);
        bytes[3] = self.randoms.get();
        Some(bytes)
    }

    fn host(&self) -> Option<&'static str> {
        self.host
    }

    fn flock(&self, fd: RawFd, lock: bool) -> Option<bool> {
        // One host: the kernel's own locks.
        let host = Some(self.host?);
        let inode = self.opened(fd)?.inode;
        let world = self.shared.lock();
        Some(!lock || world.guards.get(&(host, inode)).is_none_or(|owner| *owner == (self.index, fd)))
    }
}

fn digest(world: &World, outcome: Result<Seen<'_>, Errno>) -> u64 {
    let mut hasher = DefaultHasher::new();
    match outcome {
        Err(errno) => (0, errno as i32).hash(&mut hasher),
        Ok(Seen::Done) => 1.hash(&mut hasher),
        Ok(Seen::Opened(_, stat)) => (2, stat.map(|stat| world.known_number(stat.identity.ino))).hash(&mut hasher),
        Ok(Seen::Stat(stat)) => (3, stat.map(|stat| digest_of_stat(world, stat))).hash(&mut hasher),
        Ok(Seen::Content(content)) => (4, content).hash(&mut hasher),
        Ok(Seen::Names(names)) => {
            let mut names: Vec<u64> = names.iter().map(|name| canonical_name(world, name)).collect();
            names.sort_unstable();
            (5, names).hash(&mut hasher);
        }
        Ok(Seen::Guard(answer)) => (6, answer as u8).hash(&mut hasher),
        Ok(Seen::Stamp(stamp)) => (7, stamp.ns()).hash(&mut hasher),
    }
    hasher.finish()
}

fn digest_of_stat(world: &World, stat: &Stat) -> (u32, u32, u64, Stamp) {
    // A directory's size is the file system's own affair.
    let size_bytes = if stat.kind == withlock::sys::file::Kind::Directory { 0 } else { stat.size_bytes };
    (world.known_number(stat.identity.ino), stat.mode, size_bytes, stat.mtime)
}

fn line(actor: usize, call: &Call<'_>, about: Option<Opened>, outcome: Result<Seen<'_>, Errno>) -> String {
    let of = |inode: u64| format!("inode {inode}");
    let said = match outcome {
        Err(errno) => format!("{errno:?}"),
        Ok(Seen::Done) => "done".into(),
        Ok(Seen::Opened(_, stat)) => stat.map_or("opened".into(), |stat| of(stat.identity.ino)),
        Ok(Seen::Stat(None)) => "nothing there".into(),
        Ok(Seen::Stat(Some(stat))) => format!("{}, stamped {}", of(stat.identity.ino), stat.mtime.ms()),
        Ok(Seen::Content(content)) => format!("{} bytes", content.len()),
        Ok(Seen::Names(names)) => format!("{names:?}"),
        Ok(Seen::Guard(answer)) => format!("{answer:?}"),
        Ok(Seen::Stamp(stamp)) => format!("{}", stamp.ms()),
    };
    let name = if call.name == OsStr::new("") {
        about.map_or(String::new(), |file| of(file.inode))
    } else {
        call.name.to_string_lossy().into_owned()
    };
    format!("actor {actor}: {} {name} -> {said}", call.call)
}

/// The actor's thread has come to the end of its operations, or died.
pub(super) fn finished(hook: &ActorHook, panicked: Option<String>) {
    let mut world = hook.shared.lock();
    let died = hook.is_dying();
    let actor = &mut world.actors[hook.index];
    actor.life = if died { Life::Dead } else { Life::Finished };
    // What it has seen is of no more consequence.
    (actor.history, actor.at_boundary, actor.stalled_ms) = (0, true, 0);
    (actor.judged, actor.newborn) = (None, None);
    if let Some(message) = panicked {
        world.violated(format!("actor {} panicked: {message}", hook.index));
    }
    if world.aborting {
        hook.shared.leader.notify_one();
    } else {
        world.advance(&hook.shared, &hook.scenario);
    }
}
