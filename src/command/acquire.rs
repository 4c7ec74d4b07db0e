//! `withlock acquire`.

use std::ffi::{OsStr, OsString};

use crate::cli::Acquire;
use crate::exit::Exit;
use crate::options::{self, Access, Lease, Usage};
use crate::record::Guard;
use crate::store::{self, Attempt, Busy, Evicted, Fault, Held, Offer, Store};
use crate::sys::keeper::{NotWatched, Side, Watched, split_off};
use crate::sys::lookout::Word;
use crate::sys::output::{answer, complain};
use crate::sys::signal::OnEntry;
use crate::sys::{Errno, describe, output, process};
use crate::text::{Shown, duration};

use super::System;
use super::keep::keep;
use super::log::Log;
use super::obtain::{Obtained, busy_line, obtain, say_caveat};

/// Takes the lock for a script; the exit code.
pub(super) fn acquire(given: Acquire, on_entry: &OnEntry) -> anyhow::Result<u8> {
    let patience = options::patience(&given.waiting)?;
    let conflict_exit = options::conflict_exit(&given.waiting)?;
    let lease = options::lease(given.terms)?;
    let access = options::access(&given.service);
    options::check_lease(&given.lock, &lease, &access)?;
    let pid = given.for_pid.as_deref().map(pid).transpose()?;
    if let Err(errno) = output::expect_open() {
        complain(&format!("the lock was not taken: standard output: {}", describe(errno)));
        return Ok(Exit::Io.code());
    }
    // From here on its pid may be given to another: what is watched is this one.
    let watched = pid.map(Watched::open).transpose().map_err(|why_not| match why_not {
        NotWatched::Refused(errno) => System::new("watch the process", errno),
        NotWatched::Unseen => System::new("find the process in /proc", Errno::ENOENT),
    })?;
    let place = store::find(&given.lock, lease.parents)?;
    let mut store = store::open(&given.lock, place, &access, on_entry)?;
    let (owner_pid, owner) = match &watched {
        Some(watched) => (watched.pid, Some(watched.stat.clone())),
        None => process::parent().map_or((0, None), |(pid, stat)| (pid, Some(stat))),
    };
    let mut command = "withlock".to_owned();
    if let Some(owner) = owner {
        // We are gone in a moment: people should look at the script.
        store.on_behalf_of(u32::try_from(owner_pid).unwrap_or(0), owner.started);
        command = process::base_name(OsStr::new(&*String::from_utf8_lossy(&owner.command)));
    }
    let path = store.absolute_name()?;
    let guard = if watched.is_some() { Guard::Wrapper } else { Guard::None };
    let offer = offer(&lease, guard, command);
    say_caveat(store.as_ref(), &given.lock, given.talk);
    let mut store = WhileWanted { store, watched: watched.as_ref() };
    let obtained = obtain(&mut store, &offer, patience, &given.lock, given.talk, on_entry, &Log::OFF)?;
    drop(store);
    let held = match obtained {
        Obtained::Lock(held) => held,
        Obtained::Ancestor(_, busy) => {
            let line = busy_line(&busy, &given.lock, "held by an ancestor of this process:");
            complain(&line.replacen(": by ", ": ", 1));
            return Ok(Exit::Nested.code());
        }
        Obtained::Busy(busy, waited) => {
            complain(&busy_line(&busy, &given.lock, &waited.how()));
            return Ok(conflict_exit.unwrap_or(Exit::Held.code()));
        }
    };
    if given.talk.verbose {
        complain(&format!("{}: locked, nonce {}", Shown::os(&given.lock), held.nonce()));
    }
    let text = if given.export { export(&path, &*held, &access) } else { format!("{}\n", held.nonce()).into_bytes() };
    if let Err(errno) = answer(&text) {
        complain(&format!("{}: the nonce could not be printed: {}", Shown::os(&given.lock), describe(errno)));
        return Ok(give_back(held, &given.lock, Exit::Io));
    }
    let Some(watched) = watched else { return Ok(0) };
    match split_off() {
        Ok(Side::Caller) => Ok(0),
        Ok(Side::Keeper) => {
            keep(held, &watched);
            Ok(0)
        }
        Err(errno) => {
            complain(&format!("cannot start the keeper: {}", describe(errno)));
            Ok(give_back(held, &given.lock, Exit::System))
        }
    }
}

fn pid(text: &str) -> Result<i32, Usage> {
    let plain = text.bytes().all(|b| b.is_ascii_digit());
    text.parse::<i32>()
        .ok()
        .filter(|pid| plain && *pid > 0)
        .ok_or_else(|| Usage(format!("--for-pid {}: not the number of a process", Shown::os(text))))
}

fn offer(lease: &Lease, guard: Guard, command: String) -> Offer {
    Offer {
        ttl_ms: lease.ttl_ms,
        guard,
        command,
        label: lease.label.clone(),
        mode: lease.mode,
        fence: lease.fence.clone(),
        runs_command: false,
        evict_dead: lease.evict_dead,
    }
}

/// Nobody will use the lock: back with it, and why.
fn give_back(held: Box<dyn Held>, lock: &OsStr, exit: Exit) -> u8 {
    let ttl_ms = held.ttl_ms();
    if held.release(&mut || {}).is_err() {
        let ttl = duration(ttl_ms);
        complain(&format!("{}: not released either; the lock expires within {ttl}", Shown::os(lock)));
    }
    exit.code()
}

/// Lines that a POSIX shell evaluates, the variables that COMMAND is given, and one more.
fn export(lock: &OsString, held: &dyn Held, access: &Access) -> Vec<u8> {
    let with_this = |name| {
        let mut nonces = process::variable(name).unwrap_or_default();
        if !nonces.is_empty() {
            nonces.push(" ");
        }
        nonces.push(held.nonce().as_str());
        nonces
    };
    let fence = held.fence().map(|number| number.to_string());
    let mut lines = Vec::new();
    let mut line = |name: &str, value: &[u8]| {
        // In single quotes every byte but the quote itself stands for itself, in every shell.
        let quoted = value.split(|b| *b == b'\'').collect::<Vec<_>>().join(&b"'\\''"[..]);
        lines.extend([b"export ", name.as_bytes(), b"='", &quoted, b"';\n"].concat());
    };
    line("WITHLOCK_LOCK", lock.as_encoded_bytes());
    line("WITHLOCK_NONCE", held.nonce().as_str().as_bytes());
    line("WITHLOCK_MODE", b"locked");
    line("WITHLOCK_HELD", with_this("WITHLOCK_HELD").as_encoded_bytes());
    // So that `release` tells it from those that commands are run under.
    line("WITHLOCK_ACQUIRED", with_this("WITHLOCK_ACQUIRED").as_encoded_bytes());
    for (name, file) in access.variables() {
        if let Some(file) = file.and_then(|file| process::absolute(file)) {
            line(name, file.as_encoded_bytes());
        }
    }
    match fence {
        Some(number) => line("WITHLOCK_FENCE", number.as_bytes()),
        None => lines.extend(b"unset WITHLOCK_FENCE;\n"),
    }
    lines
}

/// Tries for the lock only while the process that it is for lives.
struct WhileWanted<'a> {
    store: Box<dyn Store>,
    watched: Option<&'a Watched>,
}

impl Store for WhileWanted<'_> {
    fn attempt(&mut self, offer: &Offer) -> Result<Attempt, Fault> {
        if self.watched.is_some_and(Watched::has_ended) {
            let errno = Errno::ESRCH;
            return Err(Fault::System {
                path: Vec::new(),
                doing: "go on: the process that the lock is for has ended",
                errno,
            });
        }
        self.store.attempt(offer)
    }

    fn wait(&mut self, busy: &Busy, for_ms: u64, word: Option<Word>) -> Result<bool, Fault> {
        // Not often: whoever wakes from a guard wakes all who wait behind him.
        const LOOK_EVERY_MS: u64 = 5_000;
        let for_ms = if self.watched.is_some() { for_ms.min(LOOK_EVERY_MS) } else { for_ms };
        self.store.wait(busy, for_ms, word)
    }

    fn pause(&mut self, for_ms: u64) {
        self.store.pause(for_ms);
    }

    fn may_hang(&self) -> bool {
        self.store.may_hang()
    }

    fn on_behalf_of(&mut self, pid: u32, pid_started: u64) {
        self.store.on_behalf_of(pid, pid_started);
    }

    fn absolute_name(&self) -> Result<OsString, Fault> {
        self.store.absolute_name()
    }

    fn evicted(&mut self) -> Vec<Evicted> {
        self.store.evicted()
    }
}
