//! Claiming the key: one attempt, and one that stands by for the moment at which the key goes.

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::record::Record;
use crate::sys::clock::wall_ms;
use crate::sys::hook::{Step, left_out};

use super::client::{Failure, PATIENCE_MS};
use super::key::Place;
use super::lease::{Lease, fresh_id};
use super::wire::{self, KeyValue, code};

/// Leases that ran out within one attempt before it gives up for now.
const TURNS: u32 = 3;

/// One attempt to create the key.
#[derive(Debug)]
pub(super) struct Claim {
    pub(super) place: Place,
    pub(super) record: Record,
    pub(super) ttl_ms: u64,
    pub(super) progress: Arc<Progress>,
}

/// What an attempt has come to, for whoever must take it back or go on with it.
#[derive(Debug)]
pub(super) struct Progress {
    /// The number of the lease under which the key is created.
    id: AtomicI64,
    lease: Mutex<Option<Lease>>,
    /// Nothing more is to be begun.
    abandoned: AtomicBool,
}

impl Progress {
    pub(super) fn from(lease: Option<Lease>) -> Self {
        let id = lease.map_or_else(fresh_id, |lease| lease.id);
        Progress { id: AtomicI64::new(id), lease: Mutex::new(lease), abandoned: AtomicBool::new(false) }
    }

    pub(super) fn lease(&self) -> Option<Lease> {
        *self.lease.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nothing more is to be begun; the number of the lease by which what was begun can be taken back.
    pub(super) fn abandon(&self) -> i64 {
        self.abandoned.store(true, Ordering::SeqCst);
        self.id.load(Ordering::SeqCst)
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
    pub(super) fn create(mut self) -> Result<Created, Failure> {
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

    /// The same where it must be quick: one request, under the lease that we have. `None`: it takes a whole
    /// attempt to know.
    fn create_at_once(&mut self) -> Option<Created> {
        let lease = self.progress.lease().filter(|lease| !lease.is_old())?;
        self.record.claimed_at_ms = wall_ms();
        self.record.ttl_ms = lease.ttl_ms;
        let txn = self.transact(&lease).ok()?;
        let revision = txn.header.revision.0;
        if txn.succeeded {
            return Some(Created::Ours { create_revision: revision, lease });
        }
        let found = txn.found().filter(|found| found.lease.0 != lease.id)?;
        Some(Created::Taken { found, revision, lease })
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

/// What became of an attempt to create the key.
#[derive(Debug)]
pub(super) enum Created {
    /// It is ours. The lease is the one under which it lives.
    Ours { create_revision: i64, lease: Lease },
    /// Another's, as of this revision of the store.
    Taken { found: KeyValue, revision: i64, lease: Lease },
}

impl Created {
    /// Our lease.
    pub(super) fn lease(&self) -> Lease {
        match self {
            Created::Ours { lease, .. } | Created::Taken { lease, .. } => *lease,
        }
    }
}

/// A claim that whoever hears that the key is gone makes at once, in their own thread: at most once, and never
/// beside another attempt of ours.
#[derive(Clone, Debug, Default)]
pub(super) struct Standby(Arc<Mutex<Stage>>);

#[derive(Debug, Default)]
enum Stage {
    #[default]
    Idle,
    /// Waiting for an end of the epoch that was seen as of this revision.
    Ready(Box<Claim>, i64),
    UnderWay,
    /// `None`: it takes a whole attempt to know.
    Made(Option<Box<(Record, Created)>>),
}

/// How far it has come.
pub(super) enum Stood {
    /// Nothing has happened, nor will it.
    Idle,
    /// The service is being asked; the end of the key is told when it has answered.
    UnderWay,
    /// What came of it; `None`: it takes a whole attempt to know.
    Made(Option<Box<(Record, Created)>>),
}

impl Standby {
    fn stage(&self) -> MutexGuard<'_, Stage> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on.
    pub(super) fn prepare(&self, claim: Claim, seen_revision: i64) {
        *self.stage() = Stage::Ready(Box::new(claim), seen_revision);
    }

    /// The key was deleted, as of this revision.
    pub(super) fn act(&self, revision: i64) {
        let mut claim = {
            let mut stage = self.stage();
            match std::mem::replace(&mut *stage, Stage::UnderWay) {
                Stage::Ready(claim, seen_revision) if revision > seen_revision => claim,
                other => {
                    *stage = other;
                    return;
                }
            }
        };
        let created = claim.create_at_once();
        *self.stage() = Stage::Made(created.map(|created| Box::new((claim.record, created))));
    }

    /// Whether something has come of it.
    pub(super) fn has_made(&self) -> bool {
        matches!(*self.stage(), Stage::Made(_))
    }

    /// No longer, unless it is too late for that.
    pub(super) fn take_back(&self) -> Stood {
        let mut stage = self.stage();
        match std::mem::take(&mut *stage) {
            Stage::Idle | Stage::Ready(..) => Stood::Idle,
            Stage::UnderWay => {
                *stage = Stage::UnderWay;
                Stood::UnderWay
            }
            Stage::Made(made) => Stood::Made(made),
        }
    }
}
