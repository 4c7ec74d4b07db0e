//! A lock in etcd that is ours: renewing it, hearing of its loss, giving it back.

use std::os::fd::{BorrowedFd, RawFd};

use crate::machine::Renewal;
use crate::record::{Nonce, Record};
use crate::store::{Fault, Held, News, NotReleased, Part};
use crate::sys::clock::boot_ms;
use crate::sys::sleep;

use super::client::Failure;
use super::ears::{Ears, Heard};
use super::key::Place;
use super::lease::{Lease, patience_ms};
use super::wire;

/// How long a release that fails is tried again, in milliseconds.
const RELEASE_PATIENCE_MS: u64 = 2_000;
/// How long whoever waits is given to claim the key before its old lease is revoked, in milliseconds: it hears of the
/// deletion and asks for the key within one or two.
const CLAIM_FIRST_MS: u64 = 3;
/// How long the lease of a key that was deleted is given to go as well, in milliseconds.
const REVOKE_PATIENCE_MS: u64 = 500;

/// A key that this process created.
#[derive(Debug)]
pub(super) struct EtcdHeld {
    epoch: Mine,
    lease: Lease,
    granted_boot_ms: u64,
    ears: Ears,
}

/// The epoch that is ours: what a thread needs to know of it.
#[derive(Clone, Debug)]
pub(super) struct Mine {
    pub(super) place: Place,
    pub(super) record: Record,
    pub(super) create_revision: i64,
    pub(super) lease: i64,
}

impl EtcdHeld {
    pub(super) fn new(place: Place, record: Record, create_revision: i64, lease: Lease, ears: Ears) -> Self {
        let epoch = Mine { place, record, create_revision, lease: lease.id };
        EtcdHeld { epoch, lease, granted_boot_ms: lease.confirmed_boot_ms, ears }
    }
}

impl Mine {
    /// Keeps the lease alive, then looks at the key: an operator who breaks the lock takes the key, and
    /// the lease may outlive it.
    pub(super) fn renew_or_fail(&self, lease: Lease) -> Result<Renewal, Failure> {
        let patience_ms = patience_ms(lease.ttl_ms);
        Ok(match lease.keep_alive(&self.place.client, patience_ms)? {
            Some(_) => self.look(patience_ms)?.map_or(Renewal::Confirmed, Renewal::Lost),
            None => Renewal::Lost("its lease has run out or was revoked".into()),
        })
    }

    fn renew(&self, lease: Lease) -> Renewal {
        self.renew_or_fail(lease).unwrap_or_else(|failure| Renewal::Failed(words(failure)))
    }

    /// What is at the key instead of ours.
    pub(super) fn look(&self, patience_ms: u64) -> Result<Option<String>, Failure> {
        let question = wire::range(&self.place.key);
        let answer = self.place.client.ask::<wire::Range>("kv/range", &question, patience_ms)?;
        Ok(match answer.value.kvs.first() {
            None => Some("its key is gone".into()),
            Some(found) if found.create_revision.0 != self.create_revision => Some("another lock is there".into()),
            Some(found) if found.lease.0 != self.lease => Some("its record was overwritten".into()),
            Some(_) => None,
        })
    }

    /// Deletes the key if it is still ours; then the lease has served its purpose. In between the next one claims
    /// the key, so what else has to be done is done first.
    pub(super) fn release(&self, meanwhile: &mut dyn FnMut()) -> Result<(), NotReleased> {
        let key = &self.place.key;
        let question =
            wire::txn(&[wire::created_at(key, self.create_revision)], &[wire::delete(key)], &[wire::read(key)]);
        let until_ms = boot_ms() + RELEASE_PATIENCE_MS;
        let patience_ms = (RELEASE_PATIENCE_MS / self.place.client.endpoint_count()).max(300);
        let mut repeated = false;
        let txn = loop {
            match self.place.client.ask::<wire::Txn>("kv/txn", &question, patience_ms) {
                Ok(answer) => {
                    repeated |= answer.repeated;
                    break answer.value;
                }
                Err(Failure::Unreachable { standing: false, .. }) if boot_ms() < until_ms => {
                    repeated = true;
                    sleep::pause(100);
                }
                Err(failure) => {
                    // Perhaps the release was carried out; that the service cannot be reached is what is
                    // known. It is an error of the release, not a command that was not run.
                    let fault = match self.place.fault(failure) {
                        Fault::Unreachable { path, why, .. } => {
                            Fault::Service { path, why: format!("cannot be released: {why}") }
                        }
                        fault => fault,
                    };
                    return Err(NotReleased::Failed(fault));
                }
            }
        };
        let released = txn.succeeded;
        let found = txn.found();
        meanwhile();
        if released {
            // Both are written to the service's storage, one after the other: the claim first.
            sleep::pause(CLAIM_FIRST_MS);
        }
        let _ = Lease::revoke(self.lease, &self.place.client, REVOKE_PATIENCE_MS);
        match found {
            _ if released => Ok(()),
            // A first request of ours was carried out and its answer got lost.
            _ if repeated => Ok(()),
            None => Err(NotReleased::Lost("its key is gone".into())),
            Some(_) => Err(NotReleased::Lost("another lock is there".into())),
        }
    }
}

/// What went wrong, in words.
pub(super) fn words(failure: Failure) -> String {
    match failure {
        Failure::Unreachable { why, .. } | Failure::Denied(why) | Failure::Refused { why, .. } => why,
    }
}

impl Held for EtcdHeld {
    fn nonce(&self) -> Nonce {
        self.epoch.record.nonce
    }

    fn fence(&self) -> Option<u64> {
        self.epoch.record.fence
    }

    fn granted_boot_ms(&self) -> u64 {
        self.granted_boot_ms
    }

    fn ttl_ms(&self) -> u64 {
        self.lease.ttl_ms
    }

    fn inherited_guard(&self) -> Option<RawFd> {
        None
    }

    /// Always: there is nothing but the lease.
    fn may_be_unseen(&self) -> bool {
        true
    }

    /// It never does.
    fn keep_nobody_waiting(self: Box<Self>) -> Box<dyn Held> {
        self
    }

    fn renew(&mut self) -> Renewal {
        let (mine, lease) = (self.epoch.clone(), self.lease);
        if self.ears.ask(move || Heard::Renewed(mine.renew(lease))) {
            Renewal::Pending
        } else {
            Renewal::Failed("cannot start a thread".into())
        }
    }

    /// Sees to it that there is a watch, which tells of a loss as soon as it happens. Not before the first
    /// look is due: most commands have ended by then.
    fn look(&mut self) -> Option<String> {
        let Mine { place, create_revision, .. } = &self.epoch;
        if !self.ears.is_watching(&place.client) {
            self.ears.watch(&place.client, &place.key, create_revision + 1, |_| {});
        }
        None
    }

    fn news_descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.ears.descriptor())
    }

    fn news(&mut self) -> Option<News> {
        while let Some(heard) = self.ears.take() {
            match heard {
                Heard::Renewed(renewal) => return Some(News::Renewed(renewal)),
                Heard::Deleted { revision } if revision > self.epoch.create_revision => {
                    return Some(News::Lost("its key is gone".into()));
                }
                Heard::Written { revision } if revision > self.epoch.create_revision => {
                    return Some(News::Lost("its record was overwritten".into()));
                }
                // What was before ours; and a watch that has ended is begun anew at the next look.
                Heard::Deleted { .. } | Heard::Written { .. } | Heard::WatchEnded => {}
            }
        }
        None
    }

    /// Its threads are not here, nor whatever they had locked: connections and ears are made anew, and the
    /// old ones are left as they are.
    fn after_fork(&mut self) {
        let client = self.epoch.place.client.anew();
        std::mem::forget(std::mem::replace(&mut self.epoch.place.client, client));
        if let Ok(ears) = Ears::new() {
            std::mem::forget(std::mem::replace(&mut self.ears, ears));
        }
    }

    fn apart(self: Box<Self>) -> Vec<Part> {
        vec![Part { lock: None, held: self }]
    }

    fn release(self: Box<Self>, meanwhile: &mut dyn FnMut()) -> Result<Option<String>, NotReleased> {
        self.epoch.release(meanwhile).map(|()| None)
    }
}
