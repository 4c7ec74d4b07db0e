//! `--log-json`: where the events of a run go.

use std::cell::{Cell, RefCell};
use std::ffi::{OsStr, OsString};
use std::fmt::{Display, Formatter};
use std::path::Path;

use crate::cli::OnBusy;
use crate::exit::Exit;
use crate::options::{LogTo, Plan};
use crate::record::{Nonce, Record};
use crate::report::document::{Holder, PathText};
use crate::report::log::{About, At, Event, EvictedWhy, OnBusyWord, Other, Run, line};
use crate::store::{Basis, Busy, Evicted, Held, refused_by};
use crate::sys::clock::{boot_ms, wall_ms};
use crate::sys::output::complain;
use crate::sys::process::Who;
use crate::sys::{self, Errno, describe, path as paths, user};
use crate::text::Shown;

/// The log of a run. Off, it costs nothing.
#[derive(Debug)]
pub(super) struct Log(Option<On>);

#[derive(Debug)]
struct On {
    file: sys::log::Log,
    name: OsString,
    run: RefCell<Run>,
    has_failed: Cell<bool>,
    failure: RefCell<Option<String>>,
}

/// The log cannot be opened.
#[derive(Debug)]
pub(super) struct NoLog {
    name: OsString,
    errno: Errno,
}

impl NoLog {
    /// The exit code: what it would be for a lock at such a place.
    pub(super) fn exit(&self) -> Exit {
        match self.errno {
            Errno::EACCES | Errno::EPERM => Exit::NotPermitted,
            Errno::ENOENT | Errno::ENOTDIR | Errno::EISDIR | Errno::ELOOP | Errno::ENAMETOOLONG | Errno::EROFS => {
                Exit::CannotTake
            }
            Errno::EBUSY => Exit::Usage,
            _ => Exit::Io,
        }
    }
}

/// All that are to be locked.
fn locks(plan: &Plan) -> impl Iterator<Item = &OsString> {
    std::iter::once(&plan.lock).chain(&plan.also)
}

impl Display for NoLog {
    fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        let why = match self.errno {
            Errno::ENXIO => "a FIFO that nobody reads, or a socket",
            Errno::EBADF => "not open for writing",
            Errno::EBUSY => "it is the lock",
            errno @ (Errno::EACCES | Errno::EPERM) => &refused_by(&self.name, errno),
            errno => describe(errno),
        };
        write!(out, "{}: cannot be opened for --log-json: {why}", Shown::os(&self.name))
    }
}

impl std::error::Error for NoLog {}

impl Log {
    /// None.
    pub(super) const OFF: Log = Log(None);

    /// Opens the log that is asked for: before anything else is, so that a descriptor's number is still
    /// what it was on entry, and before anything is created.
    pub(super) fn open(plan: &Plan) -> Result<Self, NoLog> {
        let Some(to) = &plan.log else { return Ok(Log(None)) };
        let (name, opened) = match to {
            LogTo::File(path) if locks(plan).any(|lock| paths::is_same_place(path, lock)) => {
                return Err(NoLog { name: path.clone(), errno: Errno::EBUSY });
            }
            LogTo::File(path) => (path.clone(), sys::log::Log::open(path)),
            LogTo::Descriptor(number) => (format!("descriptor {number}").into(), sys::log::Log::inherited(*number)),
        };
        let file = match opened {
            Ok(file) => file,
            Err(errno) => return Err(NoLog { name, errno }),
        };
        let Who { host, pid, .. } = Who::am_i();
        let run = Run { host, pid, lock: absolute(&plan.lock), label: plan.lease.label.clone(), nonce: None };
        Ok(Log(Some(On {
            file,
            name,
            run: RefCell::new(run),
            has_failed: Cell::new(false),
            failure: RefCell::default(),
        })))
    }

    /// An event of LOCK. It is made only if there is a log.
    pub(super) fn tell(&self, event: impl FnOnce() -> Event) {
        self.tell_of(None, None, event);
    }

    /// An event of one of several locks, `None`: LOCK.
    pub(super) fn tell_of(&self, lock: Option<&OsStr>, nonce: Option<Nonce>, event: impl FnOnce() -> Event) {
        let Some(on) = &self.0 else { return };
        let named = lock.map(|lock| absolute(lock).raw);
        let about = named.as_ref().map(|raw| About { lock: std::os::unix::ffi::OsStrExt::from_bytes(raw), nonce });
        let at = At { wall_ms: wall_ms(), boot_ms: boot_ms() };
        let text = line(&on.run.borrow(), at, about, &event());
        if let Err(errno) = on.file.append(&text)
            && !on.has_failed.replace(true)
        {
            let name = Shown::os(&on.name);
            complain(&format!("{name}: the log cannot be written: {}; going on", describe(errno)));
        }
    }

    /// Locks are ours, for which we have tried since `began_ms` by the boot clock.
    pub(super) fn acquired(&self, held: &dyn Held, began_ms: u64) {
        let Some(on) = &self.0 else { return };
        let waited_ms = boot_ms().saturating_sub(began_ms);
        on.run.borrow_mut().nonce = Some(held.nonce());
        for (lock, nonce) in held.locks() {
            let fence = if lock.is_none() { held.fence() } else { None };
            self.tell_of(lock, Some(nonce), || Event::Acquired { waited_ms, ttl_ms: held.ttl_ms(), fence });
        }
    }

    /// Why COMMAND was not started, for the last line.
    pub(super) fn failed(&self, why: String) {
        if let Some(on) = &self.0 {
            on.failure.replace(Some(why));
        }
    }

    /// That again.
    pub(super) fn failure(&self) -> Option<String> {
        self.0.as_ref().and_then(|on| on.failure.borrow().clone())
    }

    /// Stale locks were ended on the way.
    pub(super) fn evicted(&self, evicted: Vec<Evicted>) {
        for Evicted { lock, record, basis, lies_at } in evicted {
            self.tell_of(lock.as_deref(), None, || Event::Evicted {
                why: match basis {
                    Basis::Unchanged => EvictedWhy::Unchanged,
                    Basis::DeadHolder => EvictedWhy::Dead,
                    Basis::Age | Basis::Any => EvictedWhy::Stale,
                },
                holder: record.as_ref().map(holder),
                quarantine: absolute(&lies_at),
            });
        }
    }

    /// The wait ended without the lock.
    pub(super) fn busy(&self, busy: &Busy, waited_ms: u64, on_busy: OnBusy) {
        self.tell_of(busy.lock.as_deref(), None, || Event::Busy {
            waited_ms,
            other: other(busy),
            on_busy: match on_busy {
                OnBusy::Fail => OnBusyWord::Fail,
                OnBusy::Skip => OnBusyWord::Skip,
                OnBusy::Run => OnBusyWord::Run,
            },
        });
    }
}

/// What the log says of another's lock.
pub(super) fn other(busy: &Busy) -> Other {
    Other {
        holder: busy.record.as_ref().map(holder),
        held_since_ms: busy.record.as_ref().and_then(|record| i64::try_from(record.claimed_at_ms).ok()),
        renewed_at_ms: busy.renewed_at_ms,
        expires_in_ms: busy.expires_in_ms,
        note: busy.note.clone(),
    }
}

fn holder(record: &Record) -> Box<Holder> {
    Box::new(Holder::of(record, user::local_name(record.uid)))
}

/// As seen from any working directory, if that can be told.
fn absolute(path: &OsStr) -> PathText {
    if crate::address::is_address(path) {
        return PathText::new(path);
    }
    PathText::new(paths::absolute(Path::new(path)).unwrap_or_else(|_| path.to_owned()))
}
