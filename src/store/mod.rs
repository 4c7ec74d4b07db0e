//! Where a lock lives. The supervisor, the reports and the commands know only what stands on this page:
//! a store grants, waits and observes; what it grants is renewed, looked at and released.

mod claim;
mod distant;
mod end;
#[cfg(feature = "etcd")]
mod etcd;
mod fault;
pub mod file;
mod grant;
pub mod handed;
mod held;
pub mod look;
pub mod permission;
mod place;
pub mod reclaim;
pub mod reserve;
pub mod service;
mod several;
mod wait;

use std::ffi::{OsStr, OsString};
use std::os::fd::{BorrowedFd, RawFd};

use crate::address::is_address;
use crate::machine::Renewal;
use crate::options::Access;
use crate::record::{Guard, Nonce, Record};
use crate::sys::keeper::Alarm;
use crate::sys::lookout::Word;
use crate::sys::recruit::Recruit;
use crate::sys::signal::OnEntry;

pub use end::{Basis, End, Ending, end};
pub use fault::Fault;
pub use file::FileStore;
pub use held::FileHeld;
pub use place::{Epoch, Known, Place, Seen, refused_by};
pub use service::Service;
pub use several::Several;

/// What a contender asks for.
#[derive(Clone, Debug)]
pub struct Offer {
    /// Its lease, in milliseconds.
    pub ttl_ms: u64,
    /// What kind of guard the record shall promise, where the store has guards.
    pub guard: Guard,
    /// Base name of the command, for people.
    pub command: String,
    /// The operator's word for it.
    pub label: Option<String>,
    /// Exact permissions of the lock file; otherwise 0644 less the umask.
    pub mode: Option<u32>,
    /// Where to reserve a fencing token with the grant.
    pub fence: Option<OsString>,
    /// A command is started as soon as it is ours: the process for it is made meanwhile, where that can be.
    pub runs_command: bool,
    /// End the epoch of a holder whose inherited guard the kernel has dropped, without waiting for the
    /// ttl.
    pub evict_dead: bool,
}

/// What one attempt came to.
#[derive(Debug)]
pub enum Attempt {
    /// Ours.
    Granted(Box<dyn Held>),
    /// Another's.
    Busy(Box<Busy>),
}

/// Why a lock could not be had just now, for people, and when to look again.
#[derive(Clone, Debug)]
pub struct Busy {
    /// Which lock it is, as the user named it; `None`: LOCK.
    pub lock: Option<OsString>,
    /// The holder's record, where it can be read.
    pub record: Option<Record>,
    /// When it was last renewed, in milliseconds since 1970.
    pub renewed_at_ms: Option<i64>,
    /// How long until it turns stale unless it is renewed; `None` once it is.
    pub expires_in_ms: Option<u64>,
    /// Anything unusual about it, in words.
    pub note: Option<String>,
    /// When the verdict may change by time alone.
    pub look_again_ms: u64,
}

impl Busy {
    /// Nothing is known but that it was busy.
    pub(crate) fn unknown() -> Self {
        Busy { lock: None, record: None, renewed_at_ms: None, expires_in_ms: None, note: None, look_again_ms: 1 }
    }
}

/// A stale epoch that a contender has ended on its way.
#[derive(Clone, Debug)]
pub struct Evicted {
    /// Which lock it was, as the user named it; `None`: LOCK.
    pub lock: Option<OsString>,
    /// Its record, if it had one.
    pub record: Option<Record>,
    /// By what right.
    pub basis: Basis,
    /// Where its record lies now.
    pub lies_at: OsString,
}

/// Takes locks and waits for them.
pub trait Store {
    /// Tries once to be granted the lock; ends a stale epoch on the way, but only the exclusive create
    /// grants.
    fn attempt(&mut self, offer: &Offer) -> Result<Attempt, Fault>;

    /// Sleeps until the lock that was found `busy` may have become free, at most `for_ms`. If the sleep
    /// lasts so long, says `word` meanwhile; whether it did.
    fn wait(&mut self, busy: &Busy, for_ms: u64, word: Option<Word>) -> Result<bool, Fault>;

    /// Sleeps a moment, at most `for_ms`, before a service that could not be asked is asked again.
    fn pause(&mut self, _for_ms: u64) {}

    /// The holder that people should look at is another process than this one.
    fn on_behalf_of(&mut self, pid: u32, pid_started: u64);

    /// The lock's name, absolute, as COMMAND is told it.
    fn absolute_name(&self) -> Result<OsString, Fault>;

    /// Whether a call may hang without an end, because another machine has to answer it. Only where the
    /// store itself does not see to it that nobody waits for that.
    fn may_hang(&self) -> bool {
        false
    }

    /// What somebody who wants to be told everything should know about this place; of which lock, as the user
    /// named it (`None`: LOCK).
    fn caveat(&self) -> Option<(Option<OsString>, &'static str)> {
        None
    }

    /// What was ended on the way since it was last asked.
    fn evicted(&mut self) -> Vec<Evicted> {
        Vec::new()
    }
}

/// How a release ended, if not well.
#[derive(Debug)]
pub enum NotReleased {
    /// The lock was not ours any more; what was found instead.
    Lost(String),
    /// It is still ours and could not be given back.
    Failed(Fault),
}

/// What a store tells of a lock when it learns it, rather than when it is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum News {
    /// The answer to a renewal that was pending.
    Renewed(Renewal),
    /// The lock is not ours any more; what was found instead.
    Lost(String),
}

/// A lock that is ours. Dropping it gives nothing back: the lock expires after its ttl, as after a
/// crash. [`Held::release`] consumes it.
#[must_use = "a lock that is not released stays until its ttl has passed"]
pub trait Held: std::fmt::Debug + Send {
    /// The epoch's identity.
    fn nonce(&self) -> Nonce;
    /// The fencing token reserved with the grant.
    fn fence(&self) -> Option<u64>;
    /// When the grant was begun, by the boot clock: the lease counts from here.
    fn granted_boot_ms(&self) -> u64;
    /// The lease that was granted, in milliseconds: what was asked for, or more.
    fn ttl_ms(&self) -> u64;
    /// The process that was made ready to become COMMAND, if any.
    fn recruit(&mut self) -> Option<Recruit> {
        None
    }
    /// The guard's descriptor that COMMAND is to inherit, if any.
    fn inherited_guard(&self) -> Option<RawFd>;
    /// Whether contenders are possible that do not see our guard.
    fn may_be_unseen(&self) -> bool;
    /// The same lock, whose renewals and looks from here on keep nobody waiting: where another machine has
    /// to be asked, which may hang, their answers come later, as news. Nor does its release last for ever.
    fn keep_nobody_waiting(self: Box<Self>) -> Box<dyn Held>;
    /// Renews the lease: [`Renewal::Pending`] where the answer comes later.
    fn renew(&mut self) -> Renewal;
    /// A cheap look whether the lock is still there; `Some` says what was found instead.
    fn look(&mut self) -> Option<String>;
    /// Tells at once when the lock may have been taken away, where this host can.
    fn alarm(&self) -> Option<Alarm> {
        None
    }
    /// Readable while there is news.
    fn news_descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    /// What has been learnt since it was last asked.
    fn news(&mut self) -> Option<News> {
        None
    }
    /// This process is a fork of the one that was granted the lock: whatever that one had running beside
    /// it is not here.
    fn after_fork(&mut self) {}
    /// Whether a call on it may hang, so that it is better made where nobody waits.
    fn may_hang(&self) -> bool {
        false
    }
    /// The locks that this is, each as the user named it (`None`: LOCK) and with its nonce.
    fn locks(&self) -> Vec<(Option<&OsStr>, Nonce)> {
        vec![(None, self.nonce())]
    }
    /// Those that are not lost, one by one, in the order in which they are to be released.
    fn apart(self: Box<Self>) -> Vec<Part>;
    /// Gives the lock back. `Ok` may carry a remark for people. Between the waking of the contender whose
    /// turn it is and that of others, should there be any, it does what can be done `meanwhile`.
    fn release(self: Box<Self>, meanwhile: &mut dyn FnMut()) -> Result<Option<String>, NotReleased>;
}

/// One lock of those that are held together.
#[derive(Debug)]
pub struct Part {
    /// Its name as the user gave it; `None`: LOCK.
    pub lock: Option<OsString>,
    /// The lock itself.
    pub held: Box<dyn Held>,
}

/// Where a LOCK is; `None`: at an address. Comes before signals are blocked, since its file system may hang.
pub fn find(lock: &OsStr, parents: bool) -> Result<Option<Place>, Fault> {
    if is_address(lock) { Ok(None) } else { Place::open(lock, parents).map(Some) }
}

/// The store that a LOCK names, for a contender. `place` is where it was found.
pub fn open(lock: &OsStr, place: Option<Place>, access: &Access, on_entry: &OnEntry) -> Result<Box<dyn Store>, Fault> {
    match place {
        Some(place) => Ok(Box::new(FileStore::at(place, on_entry)?)),
        None => open_service(lock, access, on_entry),
    }
}

#[cfg(feature = "etcd")]
fn open_service(lock: &OsStr, access: &Access, on_entry: &OnEntry) -> Result<Box<dyn Store>, Fault> {
    Ok(Box::new(etcd::EtcdStore::open(lock, access, on_entry)?))
}

#[cfg(not(feature = "etcd"))]
fn open_service(lock: &OsStr, _access: &Access, _on_entry: &OnEntry) -> Result<Box<dyn Store>, Fault> {
    Err(built_without(lock))
}

/// The service that a LOCK or a prefix of locks names, for operators and scripts; `None`: it is a path.
pub fn service(lock: &OsStr, access: &Access, on_entry: &OnEntry) -> Result<Option<Box<dyn Service>>, Fault> {
    if is_address(lock) { operate(lock, access, on_entry).map(Some) } else { Ok(None) }
}

#[cfg(feature = "etcd")]
fn operate(lock: &OsStr, access: &Access, on_entry: &OnEntry) -> Result<Box<dyn Service>, Fault> {
    Ok(Box::new(etcd::EtcdService::open(lock, access, on_entry)?))
}

#[cfg(not(feature = "etcd"))]
fn operate(lock: &OsStr, _access: &Access, _on_entry: &OnEntry) -> Result<Box<dyn Service>, Fault> {
    Err(built_without(lock))
}

#[cfg(not(feature = "etcd"))]
fn built_without(lock: &OsStr) -> Fault {
    let why = "this withlock was built without etcd (cargo feature `etcd`)".into();
    Fault::CannotTake { path: std::os::unix::ffi::OsStrExt::as_bytes(lock).to_vec(), why }
}
