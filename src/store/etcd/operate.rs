//! Locks in etcd for operators and scripts.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use crate::address::Address;
use crate::lease::reclaim_age_ms;
use crate::machine::Renewal;
use crate::options::Access;
use crate::record::{self, Claim, Content, Guard, Nonce, Record, SIGNATURE, SlotName};
use crate::store::handed::Handed;
use crate::store::service::{Ended, Found, Kept, Look, Service};
use crate::store::{Fault, NotReleased};
use crate::sys::clock::wall_ms;
use crate::sys::signal::OnEntry;
use crate::sys::sleep::Sleeper;

use super::client::{Client, Failure, PATIENCE_MS};
use super::contender::{ask, place};
use super::held::Mine;
use super::key::{Epoch, Place, Rest, classify, rest};
use super::lease::{Lease, fresh_id};
use super::wire::{self, KeyValue};

/// So many keys are read at once.
const PAGE: u32 = 500;

/// Locks at one key, or below one prefix.
pub(crate) struct EtcdService {
    address: Address,
    place: Place,
    sleeper: Sleeper,
}

impl EtcdService {
    /// For the key or prefix in `lock`.
    pub(crate) fn open(lock: &OsStr, access: &Access, on_entry: &OnEntry) -> Result<Self, Fault> {
        let cannot = |why| Fault::CannotTake { path: lock.as_bytes().to_vec(), why };
        let address = Address::parse(lock).map_err(cannot)?;
        Ok(EtcdService { address, place: place(lock, access)?, sleeper: Sleeper::new(on_entry) })
    }

    /// Asks while signals act as they did on entry.
    fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&Client) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Fault> {
        let client = self.place.client.clone();
        ask(&self.sleeper, move || question(&client)).map_err(|failure| self.place.fault(failure))
    }

    fn name_of(&self, key: &[u8]) -> OsString {
        OsString::from_vec(self.address.of_key(key))
    }

    /// The epoch at the key, if it is the one with this nonce; what is there instead, if not.
    fn find(&self, nonce: &Nonce) -> Result<Result<Epoch, String>, Fault> {
        let key = self.place.key.clone();
        let range = self.ask(move |client| client.ask::<wire::Range>("kv/range", &wire::range(&key), PATIENCE_MS))?;
        let Some(found) = range.value.kvs.first() else { return Ok(Err("nobody holds it".into())) };
        Ok(match classify(found) {
            Ok(epoch) if epoch.record.nonce == *nonce => Ok(epoch),
            Ok(epoch) => Err(format!("another holds it (nonce {})", epoch.record.nonce)),
            Err(what) => Err(format!("{what} is there instead")),
        })
    }

    fn mine(&self, epoch: Epoch) -> Mine {
        Mine {
            place: self.place.clone(),
            record: epoch.record,
            create_revision: epoch.create_revision,
            lease: epoch.lease,
        }
    }

    /// What a key's value says, for people.
    fn examine(&self, found: &KeyValue) -> Result<Look, Fault> {
        let mut look = Look { name: self.name_of(&found.key.0), found: None, foreign: None, quarantine: Vec::new() };
        match classify(found) {
            Ok(epoch) => look.found = Some(self.found(epoch)?),
            Err(what) => look.foreign = Some(what),
        }
        Ok(look)
    }

    fn found(&self, epoch: Epoch) -> Result<Found, Fault> {
        let lease = epoch.lease;
        let (renewed_at_ms, expires_in_ms) = match self.ask(move |client| rest(client, lease, PATIENCE_MS))? {
            Rest::Of { remaining_ms, since_renewed_ms } => {
                (i64::try_from(wall_ms().saturating_sub(since_renewed_ms)).ok(), Some(remaining_ms))
            }
            Rest::Endless => (None, None),
            Rest::Over => (None, Some(0)),
        };
        let Epoch { record, create_revision, lease, .. } = epoch;
        Ok(Found { record, renewed_at_ms, expires_in_ms, create_revision, lease })
    }

    fn kept(&self, found: &KeyValue) -> Result<Kept, Fault> {
        let (record, claim) = quarantined(&found.value.0);
        let lease = found.lease.0;
        let goes_in_ms = match self.ask(move |client| rest(client, lease, PATIENCE_MS))? {
            Rest::Of { remaining_ms, .. } => Some(remaining_ms),
            Rest::Endless => None,
            Rest::Over => Some(0),
        };
        Ok(Kept {
            name: self.name_of(&found.key.0),
            record,
            claim,
            goes_in_ms,
            key: found.key.0.clone(),
            mod_revision: found.mod_revision.0,
        })
    }

    /// All keys that begin so, page by page.
    fn all(&self, prefix: Vec<u8>) -> Result<Vec<KeyValue>, Fault> {
        self.ask(move |client| {
            // The empty key does not exist: the first of all is a zero byte.
            let mut first = if prefix.is_empty() { vec![0] } else { prefix.clone() };
            let mut all = Vec::new();
            loop {
                let question = wire::range_from(&first, &prefix, PAGE);
                let mut page = client.ask::<wire::Range>("kv/range", &question, PATIENCE_MS)?.value.kvs;
                let is_last = page.len() < PAGE as usize;
                if let Some(last) = page.last() {
                    first = [&last.key.0[..], b"\0"].concat();
                }
                all.append(&mut page);
                if is_last {
                    return Ok(all);
                }
            }
        })
    }
}

/// The lock's key and the epoch in a quarantine's key.
fn split(key: &[u8]) -> Option<&[u8]> {
    SlotName::split(OsStr::from_bytes(key)).map(|(lock, _)| lock.as_bytes())
}

/// A quarantine's value: the record as it was, and a line about its end.
fn quarantined(value: &[u8]) -> (Option<Record>, Option<Claim>) {
    let mut lines = value.split_inclusive(|b| *b == b'\n');
    let record = lines.next().and_then(|line| match record::classify(line, line.len() as u64) {
        Content::Record(record) => Some(*record),
        _ => None,
    });
    (record, lines.next().and_then(|line| serde_json::from_slice(line).ok()))
}

impl Service for EtcdService {
    fn look(&self) -> Result<Vec<Look>, Fault> {
        if !self.address.names_many() {
            let key = self.place.key.clone();
            let range =
                self.ask(move |client| client.ask::<wire::Range>("kv/range", &wire::range(&key), PATIENCE_MS))?;
            let mut look = match range.value.kvs.first() {
                Some(found) => self.examine(found)?,
                None => {
                    Look { name: self.name_of(&self.place.key), found: None, foreign: None, quarantine: Vec::new() }
                }
            };
            for found in self.all([&self.place.key[..], b".stale-"].concat())? {
                if split(&found.key.0) == Some(&self.place.key) {
                    look.quarantine.push(self.kept(&found)?);
                }
            }
            return Ok(vec![look]);
        }
        let mut looks: Vec<Look> = Vec::new();
        for found in self.all(self.place.key.clone())? {
            if let Some(lock) = split(&found.key.0) {
                let name = self.name_of(lock);
                let kept = self.kept(&found)?;
                match looks.iter_mut().find(|look| look.name == name) {
                    Some(look) => look.quarantine.push(kept),
                    None => looks.push(Look { name, found: None, foreign: None, quarantine: vec![kept] }),
                }
            } else if found.value.0.starts_with(SIGNATURE) {
                looks.push(self.examine(&found)?);
            }
        }
        Ok(looks)
    }

    fn end(&self, name: &OsString, judged: &Found, claim: &Claim, keep: bool) -> Result<Ended, Fault> {
        let key = Address::parse(name).map_err(|why| Fault::CannotTake { path: self.place.lock.clone(), why })?.key;
        let (record, create_revision, old_lease) = (judged.record.clone(), judged.create_revision, judged.lease);
        let place = Place { key, ..self.place.clone() };
        let slot_key = place.slot_key(&record);
        let lies_at = self.name_of(&slot_key);
        // The fencing token is not part of the record as it was written: the revision is.
        let line = Record { fence: None, ..record.clone() }.encode();
        let value = [line, serde_json::to_vec(claim).unwrap_or_default(), b"\n".to_vec()].concat();
        let ended = self.ask(move |client| {
            let lease = if keep {
                None
            } else {
                Some(Lease::grant(client, fresh_id(), reclaim_age_ms(record.judged_ttl_ms()))?.id)
            };
            let question = wire::txn(
                &[wire::created_at(&place.key, create_revision)],
                &[wire::delete(&place.key), wire::put(&slot_key, &value, lease.unwrap_or(0))],
                &[wire::read(&slot_key)],
            );
            let answer = client.ask::<wire::Txn>("kv/txn", &question, PATIENCE_MS)?;
            let repeated = answer.repeated;
            // A first request of ours may have been carried out, and its answer lost.
            let done = answer.value.succeeded
                || (repeated && answer.value.found().is_some_and(|found| found.value.0 == value));
            if done {
                // The key is gone, and that ended the epoch. Without its lease the holder's next renewal
                // tells it so as well.
                let _ = Lease::revoke(old_lease, client, PATIENCE_MS);
            } else if let Some(lease) = lease {
                let _ = Lease::revoke(lease, client, PATIENCE_MS);
            }
            Ok(done)
        })?;
        Ok(if ended { Ended::Done(lies_at) } else { Ended::Gone })
    }

    fn remove(&self, kept: &Kept) -> Result<bool, Fault> {
        let question = wire::txn(&[wire::changed_at(&kept.key, kept.mod_revision)], &[wire::delete(&kept.key)], &[]);
        let answer = self.ask(move |client| client.ask::<wire::Txn>("kv/txn", &question, PATIENCE_MS))?;
        Ok(answer.value.succeeded || answer.repeated)
    }

    fn check(&self, nonce: &Nonce) -> Result<Option<String>, Fault> {
        Ok(self.find(nonce)?.err())
    }

    fn renew(&self, nonce: &Nonce) -> Result<Handed, Fault> {
        let epoch = match self.find(nonce)? {
            Ok(epoch) => epoch,
            Err(found) => return Ok(Handed::NotHeld(found)),
        };
        let lease = Lease { id: epoch.lease, ttl_ms: epoch.record.ttl_ms, confirmed_boot_ms: 0 };
        let mine = self.mine(epoch);
        Ok(match self.ask(move |_| mine.renew_or_fail(lease))? {
            Renewal::Lost(found) => Handed::NotHeld(found),
            _ => Handed::Done,
        })
    }

    fn release(&self, nonce: &Nonce) -> Result<Handed, Fault> {
        let epoch = match self.find(nonce)? {
            Ok(epoch) => epoch,
            Err(found) => return Ok(Handed::NotHeld(found)),
        };
        if epoch.record.guard == Guard::Lease {
            return Ok(Handed::left_to_command());
        }
        let mine = self.mine(epoch);
        match self.ask(move |_| Ok(mine.release(&mut || {})))? {
            Ok(()) => Ok(Handed::Done),
            Err(NotReleased::Lost(found)) => Ok(Handed::NotHeld(found)),
            Err(NotReleased::Failed(fault)) => Err(fault),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quarantine_holds_the_record_and_a_line_about_its_end_and_survives_nonsense() {
        assert_eq!(quarantined(b""), (None, None));
        assert_eq!(quarantined(b"{\"withlock\":1}\n{}\n"), (None, None));
        assert_eq!(split(b"jobs/a.stale-17-abababababababababababababababab"), Some(&b"jobs/a"[..]));
        assert_eq!(split(b"jobs/a.stale-17-x"), None);
    }
}
