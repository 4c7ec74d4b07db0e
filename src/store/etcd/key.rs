//! A key in etcd and what stands there.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use crate::record::{self, Content, Foreign, Record};
use crate::store::Fault;

use super::client::{Client, Failure};
use super::wire::{self, KeyValue};

/// Where a lock in etcd is, and how it is asked for.
#[derive(Clone, Debug)]
pub(super) struct Place {
    /// The lock as the user gave it.
    pub(super) lock: Vec<u8>,
    pub(super) key: Vec<u8>,
    pub(super) client: Client,
}

/// One existence of the key: from its creation until it is deleted.
#[derive(Clone, Debug)]
pub(super) struct Epoch {
    /// Its record, with the create revision as its fencing token.
    pub(super) record: Record,
    pub(super) create_revision: i64,
    pub(super) mod_revision: i64,
    pub(super) lease: i64,
}

/// How long a key still lives unless its lease is renewed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rest {
    /// The lease's rest, and when it was last renewed before now; to the second.
    Of { remaining_ms: u64, since_renewed_ms: u64 },
    /// It has no lease: nothing will end it but an operator.
    Endless,
    /// Its lease has run out just now.
    Over,
}

impl Place {
    /// A failure as a fault of this lock.
    pub(super) fn fault(&self, failure: Failure) -> Fault {
        let path = self.lock.clone();
        match failure {
            Failure::Unreachable { why, standing } => Fault::Unreachable { path, why, standing },
            Failure::Denied(why) => Fault::NotPermitted { path, why: format!("no permission: {why}") },
            Failure::Refused { why, .. } => Fault::Service { path, why: format!("refused by {why}") },
        }
    }

    /// What a key's value is, or why it is no lock.
    pub(super) fn read(&self, found: &KeyValue) -> Result<Epoch, Fault> {
        classify(found).map_err(|what| Fault::CannotTake { path: self.lock.clone(), why: what.refusal() })
    }

    /// The key of a quarantine of this lock.
    pub(super) fn slot_key(&self, record: &Record) -> Vec<u8> {
        record::SlotName::of(record).file_name(OsStr::from_bytes(&self.key)).as_bytes().to_vec()
    }
}

/// What a key's value is.
pub(super) fn classify(found: &KeyValue) -> Result<Epoch, Foreign> {
    let value = found.value.0.as_slice();
    match record::classify(value, value.len() as u64) {
        Content::Record(mut record) => {
            record.fence = u64::try_from(found.create_revision.0).ok();
            Ok(Epoch {
                record: *record,
                create_revision: found.create_revision.0,
                mod_revision: found.mod_revision.0,
                lease: found.lease.0,
            })
        }
        Content::Newer(version) => Err(Foreign::Newer(version)),
        Content::Blank | Content::Foreign => Err(Foreign::NoLock("a key with another value".into())),
    }
}

/// How long the key under this lease still lives.
pub(super) fn rest(client: &Client, lease: i64, patience_ms: u64) -> Result<Rest, Failure> {
    if lease == 0 {
        return Ok(Rest::Endless);
    }
    let answer = client.ask::<wire::TimeToLive>("lease/timetolive", &wire::lease(lease), patience_ms)?;
    let (Ok(seconds), Ok(granted)) =
        (u64::try_from(answer.value.ttl_seconds.0), u64::try_from(answer.value.granted_seconds.0))
    else {
        return Ok(Rest::Over);
    };
    Ok(Rest::Of { remaining_ms: seconds * 1000, since_renewed_ms: granted.saturating_sub(seconds) * 1000 })
}
