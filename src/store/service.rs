//! A lock service as operators and scripts meet it: a look at what is there, and acts on one epoch of it,
//! each for whoever knows its nonce or has looked.

use std::ffi::OsString;

use crate::record::{Claim, Foreign, Nonce, Record};

use super::Fault;
use super::handed::Handed;

/// A service that keeps locks for many hosts.
pub trait Service {
    /// Looks at the lock that was named, or at all of them below the prefix that was.
    fn look(&self) -> Result<Vec<Look>, Fault>;

    /// Ends the epoch that was looked at, and no other. Its record goes into a quarantine, for as long as
    /// that of a lock file would have to stay, or with `keep` for good.
    fn end(&self, name: &OsString, judged: &Found, claim: &Claim, keep: bool) -> Result<Ended, Fault>;

    /// Removes a quarantine; `false`: it is gone already.
    fn remove(&self, kept: &Kept) -> Result<bool, Fault>;

    /// What is there instead of the lock with this nonce, if so.
    fn check(&self, nonce: &Nonce) -> Result<Option<String>, Fault>;

    /// Renews the lock, if it is held with this nonce.
    fn renew(&self, nonce: &Nonce) -> Result<Handed, Fault>;

    /// Gives the lock back, if it is held with this nonce, and not for a command that still runs.
    fn release(&self, nonce: &Nonce) -> Result<Handed, Fault>;
}

/// What a look showed of one lock.
#[derive(Clone, Debug)]
pub struct Look {
    /// Its whole name.
    pub name: OsString,
    /// Who holds it.
    pub found: Option<Found>,
    /// Something else stands there; what.
    pub foreign: Option<Foreign>,
    /// Records of epochs that were ended.
    pub quarantine: Vec<Kept>,
}

/// An epoch.
#[derive(Clone, Debug)]
pub struct Found {
    /// Its record, with its fencing token.
    pub record: Record,
    /// When its lease was last renewed, in milliseconds since 1970, to the second.
    pub renewed_at_ms: Option<i64>,
    /// How long its lease still lasts; `None` if nothing will end it but an operator.
    pub expires_in_ms: Option<u64>,
    /// What tells it from every other epoch of this name.
    pub create_revision: i64,
    /// The lease under which it lives; 0: none.
    pub lease: i64,
}

/// A quarantine.
#[derive(Clone, Debug)]
pub struct Kept {
    /// Its whole name.
    pub name: OsString,
    /// The ended epoch's record.
    pub record: Option<Record>,
    /// Who ended it, when and why.
    pub claim: Option<Claim>,
    /// Until the service removes it by itself; `None`: never.
    pub goes_in_ms: Option<u64>,
    /// Its key.
    pub key: Vec<u8>,
    /// What tells it from another under the same key.
    pub mod_revision: i64,
}

/// How an end went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The record lies here now.
    Done(OsString),
    /// The epoch that was looked at has ended meanwhile.
    Gone,
}
