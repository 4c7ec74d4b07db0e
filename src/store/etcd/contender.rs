//! Taking a lock in etcd, and waiting for it.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::address::Address;
use crate::lease::renew_every_ms;
use crate::options::Access;
use crate::record::{Guard, Record, VERSION};
use crate::store::{Attempt, Busy, Fault, Offer, Store};
use crate::sys::clock::{boot_ms, wall_ms};
use crate::sys::hook::{Step, left_out};
use crate::sys::lookout::Word;
use crate::sys::output;
use crate::sys::process::Who;
use crate::sys::signal::{Fatal, OnEntry};
use crate::sys::sleep::Sleeper;
use crate::sys::{Errno, describe, random};

use super::access;
use super::client::{Client, Failure, PATIENCE_MS};
use super::ears::{Ears, Heard, Task};
use super::held::EtcdHeld;
use super::key::{Created, Epoch, Place, Rest, rest};
use super::lease::{Lease, fresh_id};
use super::wire::{self, KeyValue, code};

/// The longest a waiter relies on its watch, in milliseconds: a connection may have died in silence.
const BACKSTOP_MS: u64 = 10_000;
/// How long after a failure of all endpoints they are asked again, at the longest.
const RETRY_MS: u64 = 1_000;
/// How long what an interrupted attempt may have left behind is tidied up, in milliseconds.
const TIDY_MS: u64 = 80;
/// Leases that ran out within one attempt before it gives up for now.
const TURNS: u32 = 3;

/// Takes and waits for the lock at one key.
pub(crate) struct EtcdStore {
    place: Place,
    who: Who,
    sleeper: Sleeper,
    fatal: Fatal,
    ears: Option<Ears>,
    /// The record that is offered, always the same one: should a request that was given up have been
    /// carried out after all, the next attempt finds its own.
    record: Option<Record>,
    /// Our lease. It is kept while we wait, so that a lock that becomes free is one request away.
    lease: Option<Lease>,
    /// The holder that was seen last, with what was learnt about its lease, and the revision as of which.
    seen: Option<(Epoch, Rest, u64)>,
    seen_revision: i64,
    failures: u32,
}

impl EtcdStore {
    /// A contender for the lock at this address.
    pub(crate) fn open(lock: &OsStr, access: &Access, on_entry: &OnEntry) -> Result<Self, Fault> {
        let system = |errno| Fault::System { path: Vec::new(), doing: "open a signal descriptor", errno };
        Ok(EtcdStore {
            place: place(lock, access)?,
            who: Who::am_i(),
            sleeper: Sleeper::new(on_entry),
            fatal: Fatal::open(on_entry).map_err(system)?,
            ears: Some(Ears::new().map_err(system)?),
            record: None,
            lease: None,
            seen: None,
            seen_revision: 0,
            failures: 0,
        })
    }

    fn fresh_record(&self, offer: &Offer) -> Record {
        Record {
            version: VERSION,
            nonce: random::nonce(),
            claimed_at_ms: wall_ms(),
            ttl_ms: offer.ttl_ms,
            host: self.who.host.clone(),
            boot_id: self.who.boot_id.clone(),
            pid: self.who.pid,
            pid_started: self.who.pid_started,
            uid: self.who.uid,
            command: offer.command.clone(),
            guard: if offer.guard == Guard::Inherited { Guard::Lease } else { offer.guard },
            dev: 0,
            label: offer.label.clone(),
            fence: None,
        }
    }

    /// Asks in a thread, so that a signal which will end us is seen meanwhile: what the unfinished attempt
    /// may leave behind is taken back before the signal acts.
    fn create(&mut self, record: Record, ttl_ms: u64) -> Result<Created, Failure> {
        let progress = Arc::new(Progress::from(self.lease.take()));
        let claim = Claim { place: self.place.clone(), record, ttl_ms, progress: Arc::clone(&progress) };
        let task = Task::start(move || claim.create()).map_err(no_thread)?;
        loop {
            if let Some(created) = task.result() {
                let created = created.unwrap_or_else(|errno| Err(no_thread(errno)));
                if created.is_err() {
                    // Should the key have been created after all, it lives under this one.
                    self.lease = progress.lease();
                }
                return created;
            }
            if !self.fatal.or_readable(task.descriptor(), 60_000) {
                continue;
            }
            if left_out(Step::TakeBack) {
                self.sleeper.let_signals_act();
            }
            progress.abandoned.store(true, Ordering::SeqCst);
            let (client, id) = (self.place.client.clone(), progress.id.load(Ordering::SeqCst));
            if let Ok(tidying) = Task::start(move || Lease::revoke(id, &client, TIDY_MS)) {
                tidying.wait(TIDY_MS);
            }
            self.sleeper.let_signals_act();
            // Still here: it was let through to nobody's harm.
            return Err(Failure::Unreachable { why: "interrupted".into(), standing: false });
        }
    }

    fn busy(&mut self, found: &KeyValue, revision: i64) -> Result<Attempt, Fault> {
        let epoch = self.place.read(found)?;
        self.seen_revision = revision;
        let now_ms = boot_ms();
        let is_known = self.seen.as_ref().is_some_and(|(seen, _, at_ms)| {
            seen.mod_revision == epoch.mod_revision && now_ms.saturating_sub(*at_ms) < 1_000
        });
        if !is_known {
            // For people; what it says decides nothing.
            let (client, lease) = (self.place.client.clone(), epoch.lease);
            let rest = self.ask(move || rest(&client, lease, PATIENCE_MS)).unwrap_or(Rest::Over);
            self.seen = Some((epoch.clone(), rest, boot_ms()));
        }
        let rest = self.seen.as_ref().map_or(Rest::Over, |(_, rest, _)| *rest);
        let (expires_in_ms, renewed_at_ms, note) = match rest {
            Rest::Of { remaining_ms, since_renewed_ms } => {
                let renewed_at_ms = wall_ms().saturating_sub(since_renewed_ms);
                (Some(remaining_ms), i64::try_from(renewed_at_ms).ok(), None)
            }
            Rest::Endless => (None, None, Some("its key has no lease: it ends only if it is broken".to_owned())),
            Rest::Over => (None, None, None),
        };
        let to_renewal_ms = self.lease.map_or(BACKSTOP_MS, |lease| {
            (lease.confirmed_boot_ms + renew_every_ms(lease.ttl_ms)).saturating_sub(boot_ms())
        });
        Ok(Attempt::Busy(Box::new(Busy {
            lock: None,
            record: Some(epoch.record),
            renewed_at_ms,
            expires_in_ms,
            note,
            look_again_ms: to_renewal_ms.clamp(1, BACKSTOP_MS),
        })))
    }

    /// Asks while signals act as they did on entry: there is nothing to tidy up.
    fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce() -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        ask(&self.sleeper, question)
    }
}

/// Asks in a thread and waits for it, while signals act as they did on entry.
pub(super) fn ask<T: Send + 'static>(
    sleeper: &Sleeper,
    question: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let task = Task::start(question).map_err(no_thread)?;
    loop {
        sleeper.sleep_until_readable(task.descriptor(), 60_000);
        if let Some(result) = task.result() {
            return result.unwrap_or_else(|errno| Err(no_thread(errno)));
        }
    }
}

/// The key of one lock, and the way to it.
pub(super) fn place(lock: &OsStr, access: &Access) -> Result<Place, Fault> {
    let shown = lock.as_bytes().to_vec();
    let address = Address::parse(lock).map_err(|why| Fault::CannotTake { path: shown.clone(), why })?;
    let access = access::completed(access);
    let tls = if address.tls { Some(access::tls(&access).map_err(|trouble| trouble.of(&shown))?) } else { None };
    let credentials = access::credentials(&access).map_err(|trouble| trouble.of(&shown))?;
    Ok(Place { client: Client::new(&address, tls, credentials), key: address.key, lock: shown })
}

fn no_thread(errno: Errno) -> Failure {
    Failure::Refused { code: 0, why: format!("cannot start a thread: {}", describe(errno)) }
}

/// One attempt to create the key.
struct Claim {
    place: Place,
    record: Record,
    ttl_ms: u64,
    progress: Arc<Progress>,
}

/// What an attempt has come to, for whoever must take it back or go on with it.
struct Progress {
    /// The number of the lease under which the key is created.
    id: AtomicI64,
    lease: Mutex<Option<Lease>>,
    /// Nothing more is to be begun.
    abandoned: AtomicBool,
}

impl Progress {
    fn from(lease: Option<Lease>) -> Self {
        let id = lease.map_or_else(fresh_id, |lease| lease.id);
        Progress { id: AtomicI64::new(id), lease: Mutex::new(lease), abandoned: AtomicBool::new(false) }
    }

    fn lease(&self) -> Option<Lease> {
        *self.lease.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_lease(&self, lease: Option<Lease>) {
        *self.lease.lock().unwrap_or_else(PoisonError::into_inner) = lease;
        if lease.is_none() {
            // Another number for the next.
            self.id.store(fresh_id(), Ordering::SeqCst);
        }
    }
}

impl Claim {
    fn create(mut self) -> Result<Created, Failure> {
        for _ in 0..TURNS {
            let Some(lease) = self.lease()? else { continue };
            if self.progress.abandoned.load(Ordering::SeqCst) {
                break;
            }
            self.record.ttl_ms = lease.ttl_ms;
            let txn = match self.transact(&lease) {
                // The lease has run out in between.
                Err(Failure::Refused { code: code::NOT_FOUND, .. }) => {
                    self.progress.set_lease(None);
                    continue;
                }
                other => other?,
            };
            let revision = txn.header.revision.0;
            if txn.succeeded {
                // No time lost, else renew first: what is not confirmed does not count.
                match self.lease()? {
                    Some(lease) => return Ok(Created::Ours { create_revision: revision, lease }),
                    None => continue,
                }
            }
            let Some(found) = txn.found() else { continue };
            if found.lease.0 == lease.id && self.is_ours(&found) {
                // An earlier request that got no answer was carried out.
                match self.lease()? {
                    Some(lease) => return Ok(Created::Ours { create_revision: found.create_revision.0, lease }),
                    None => continue,
                }
            }
            return Ok(Created::Taken { found, revision, lease });
        }
        Err(Failure::Unreachable { why: "its leases run out before they can be used".into(), standing: false })
    }

    /// A lease with time left; `None` if the one that we had has run out.
    fn lease(&self) -> Result<Option<Lease>, Failure> {
        let client = &self.place.client;
        let lease = match self.progress.lease() {
            Some(lease) if !lease.is_old() => return Ok(Some(lease)),
            Some(lease) => lease.keep_alive(client, PATIENCE_MS)?,
            None => Some(Lease::grant(client, self.progress.id.load(Ordering::SeqCst), self.ttl_ms)?),
        };
        self.progress.set_lease(lease);
        Ok(lease)
    }

    /// The arbiter: the key is created by whoever finds that it does not exist. Nothing else ever confers
    /// the lock.
    fn transact(&self, lease: &Lease) -> Result<wire::Txn, Failure> {
        let key = &self.place.key;
        let free = [wire::created_at(key, 0)];
        let question = wire::txn(
            if left_out(Step::Exclusive) { &[] } else { &free },
            &[wire::put(key, &self.record.encode(), lease.id)],
            &[wire::read(key)],
        );
        self.place.client.ask("kv/txn", &question, PATIENCE_MS).map(|answer| answer.value)
    }

    fn is_ours(&self, found: &KeyValue) -> bool {
        self.place.read(found).is_ok_and(|epoch| epoch.record.nonce == self.record.nonce)
    }
}

impl Store for EtcdStore {
    fn attempt(&mut self, offer: &Offer) -> Result<Attempt, Fault> {
        let mut record = self.record.take().unwrap_or_else(|| self.fresh_record(offer));
        record.claimed_at_ms = wall_ms();
        self.record = Some(record.clone());
        match self.create(record.clone(), offer.ttl_ms) {
            Ok(Created::Ours { create_revision, lease }) => {
                self.failures = 0;
                self.record = None;
                record.ttl_ms = lease.ttl_ms;
                record.fence = u64::try_from(create_revision).ok();
                let ears = match self.ears.take() {
                    Some(ears) => ears,
                    None => {
                        Ears::new().map_err(|errno| Fault::System { path: Vec::new(), doing: "open a pipe", errno })?
                    }
                };
                let held = EtcdHeld::new(self.place.clone(), record, create_revision, lease, ears);
                Ok(Attempt::Granted(Box::new(held)))
            }
            Ok(Created::Taken { found, revision, lease }) => {
                self.failures = 0;
                self.lease = Some(lease);
                self.busy(&found, revision)
            }
            Err(failure) => {
                self.failures += 1;
                // Whoever is asked next may know nothing of what was watched so far.
                self.seen = None;
                Err(self.place.fault(failure))
            }
        }
    }

    fn wait(&mut self, busy: &Busy, for_ms: u64, word: Option<Word>) -> Result<bool, Fault> {
        let Some(ears) = &mut self.ears else { return Ok(false) };
        let until_ms = boot_ms().saturating_add(for_ms.min(busy.look_again_ms));
        let mut word = word;
        let mut said = false;
        loop {
            while let Some(heard) = ears.take() {
                match heard {
                    Heard::Deleted { revision } if revision > self.seen_revision => return Ok(said),
                    Heard::WatchEnded => {
                        // Its server is gone, or cut off: the next attempt finds one that is not.
                        self.sleeper.sleep(random::jittered_ms(100).min(for_ms));
                        return Ok(said);
                    }
                    _ => {}
                }
            }
            if !ears.is_watching(&self.place.client) {
                ears.watch(&self.place.client, &self.place.key, self.seen_revision + 1);
            }
            let now_ms = boot_ms();
            if let Some(due) = word.take_if(|word| now_ms >= word.at_boot_ms) {
                output::raw(&due.line);
                said = true;
            }
            if now_ms >= until_ms {
                return Ok(said);
            }
            let next_ms = word.as_ref().map_or(until_ms, |word| word.at_boot_ms.min(until_ms));
            self.sleeper.sleep_until_readable(ears.descriptor(), next_ms - now_ms);
        }
    }

    fn pause(&mut self, for_ms: u64) {
        let longest_ms = RETRY_MS.min(50 << self.failures.min(5));
        self.sleeper.sleep(random::jittered_ms(longest_ms).min(for_ms).max(1));
    }

    fn on_behalf_of(&mut self, pid: u32, pid_started: u64) {
        (self.who.pid, self.who.pid_started) = (pid, pid_started);
    }

    fn absolute_name(&self) -> Result<OsString, Fault> {
        Ok(OsString::from_vec(self.place.lock.clone()))
    }
}

impl Drop for EtcdStore {
    /// A lease that served no lock is given back; one that cannot be runs out by itself.
    fn drop(&mut self) {
        if let Some(lease) = self.lease.take() {
            let client = self.place.client.clone();
            if let Ok(task) = Task::start(move || Lease::revoke(lease.id, &client, 500)) {
                self.sleeper.sleep_until_readable(task.descriptor(), 500);
            }
        }
    }
}
