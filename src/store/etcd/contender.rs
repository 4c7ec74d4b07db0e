//! Taking a lock in etcd, and waiting for it.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::sync::Arc;

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
use super::claim::{Claim, Created, Progress, Standby, Stood};
use super::client::{Client, Failure, PATIENCE_MS};
use super::ears::{Ears, Heard, Task};
use super::held::EtcdHeld;
use super::key::{Epoch, Place, Rest, rest};
use super::lease::Lease;
use super::wire::KeyValue;

/// The longest a waiter relies on its watch, in milliseconds: a connection may have died in silence.
const BACKSTOP_MS: u64 = 10_000;
/// How long after a failure of all endpoints they are asked again, at the longest.
const RETRY_MS: u64 = 1_000;
/// How long what an interrupted attempt may have left behind is tidied up, in milliseconds.
const TIDY_MS: u64 = 80;

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
    /// What is to happen at once when the key goes while we wait.
    standby: Standby,
    /// What came of it, for the next attempt.
    made: Option<Box<(Record, Created)>>,
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
            standby: Standby::default(),
            made: None,
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
            self.take_back(&progress);
            // Still here: it was let through to nobody's harm.
            return Err(Failure::Unreachable { why: "interrupted".into(), standing: false });
        }
    }

    /// A signal has arrived that will end us: what an unfinished attempt may leave behind is taken back before
    /// the signal acts.
    fn take_back(&self, progress: &Progress) {
        if left_out(Step::TakeBack) {
            self.sleeper.let_signals_act();
        }
        let (client, id) = (self.place.client.clone(), progress.abandon());
        if let Ok(tidying) = Task::start(move || Lease::revoke(id, &client, TIDY_MS)) {
            tidying.wait(TIDY_MS);
        }
        self.sleeper.let_signals_act();
    }

    /// The lock as it was granted.
    fn granted(&mut self, mut record: Record, create_revision: i64, lease: Lease) -> Result<Attempt, Fault> {
        self.failures = 0;
        self.record = None;
        // It serves the lock now.
        self.lease = None;
        record.ttl_ms = lease.ttl_ms;
        record.fence = u64::try_from(create_revision).ok();
        let ears = match self.ears.take() {
            Some(ears) => ears,
            None => Ears::new().map_err(|errno| Fault::System { path: Vec::new(), doing: "open a pipe", errno })?,
        };
        let held = EtcdHeld::new(self.place.clone(), record, create_revision, lease, ears);
        Ok(Attempt::Granted(Box::new(held)))
    }

    /// Whether what was to happen when the key goes has begun; if not, it never will.
    fn stand_down(&mut self) -> bool {
        match self.standby.take_back() {
            Stood::Idle => false,
            Stood::UnderWay => true,
            Stood::Made(made) => {
                self.made = made;
                false
            }
        }
    }

    /// Waits for the key to go. Also says whether the word was said.
    ///
    /// Whoever hears that it is gone claims it at once: to hand the news on first would take as long as all the
    /// rest that is ours. So a signal that ends us finds perhaps something to be taken back, as in an attempt.
    fn listen(&mut self, ears: &mut Ears, busy: &Busy, for_ms: u64, mut word: Option<Word>) -> bool {
        let until_ms = boot_ms().saturating_add(for_ms.min(busy.look_again_ms));
        let mut said = false;
        let progress = self.stand_by();
        loop {
            while let Some(heard) = ears.take() {
                match heard {
                    Heard::Deleted { revision } if revision > self.seen_revision && !self.stand_down() => return said,
                    Heard::WatchEnded if !self.stand_down() => {
                        // Its server is gone, or cut off: the next attempt finds one that is not.
                        if self.made.is_none() {
                            self.sleeper.sleep(random::jittered_ms(100).min(for_ms));
                        }
                        return said;
                    }
                    _ => {}
                }
            }
            // Also by a watch that another has replaced meanwhile.
            if self.standby.has_made() {
                self.stand_down();
                return said;
            }
            if !ears.is_watching(&self.place.client) {
                let standby = self.standby.clone();
                ears.watch(&self.place.client, &self.place.key, self.seen_revision + 1, move |at| standby.act(at));
            }
            let now_ms = boot_ms();
            if let Some(due) = word.take_if(|word| now_ms >= word.at_boot_ms) {
                output::raw(&due.line);
                said = true;
            }
            if now_ms >= until_ms && !self.stand_down() {
                return said;
            }
            let next_ms = word.as_ref().map_or(until_ms, |word| word.at_boot_ms.min(until_ms));
            let for_ms = if now_ms >= until_ms { PATIENCE_MS } else { next_ms.saturating_sub(now_ms) };
            if self.sleeper.sleep_unless(&self.fatal, ears.descriptor(), for_ms) {
                if self.stand_down() || self.made.is_some() {
                    self.take_back(&progress);
                    // Still here: it was let through to nobody's harm. What was taken back is not ours.
                    (self.standby, self.made, self.lease) = (Standby::default(), None, None);
                    return said;
                }
                self.sleeper.let_signals_act();
            }
        }
    }

    /// Prepares what is to happen when the key goes.
    fn stand_by(&mut self) -> Arc<Progress> {
        let progress = Arc::new(Progress::from(self.lease));
        self.made = None;
        if let (Some(record), Some(lease)) = (&self.record, self.lease) {
            let claim = Claim {
                place: self.place.clone(),
                record: record.clone(),
                ttl_ms: lease.ttl_ms,
                progress: Arc::clone(&progress),
            };
            self.standby.prepare(claim, self.seen_revision);
        }
        progress
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

impl Store for EtcdStore {
    fn attempt(&mut self, offer: &Offer) -> Result<Attempt, Fault> {
        let (record, created) = match self.made.take().map(|made| *made) {
            // A lease that has grown old meanwhile is confirmed first.
            Some((record, created)) if !created.lease().is_old() => (record, Ok(created)),
            _ => {
                let mut record = self.record.take().unwrap_or_else(|| self.fresh_record(offer));
                record.claimed_at_ms = wall_ms();
                self.record = Some(record.clone());
                (record.clone(), self.create(record, offer.ttl_ms))
            }
        };
        match created {
            Ok(Created::Ours { create_revision, lease }) => self.granted(record, create_revision, lease),
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
        let Some(mut ears) = self.ears.take() else { return Ok(false) };
        let said = self.listen(&mut ears, busy, for_ms, word);
        self.ears = Some(ears);
        Ok(said)
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
