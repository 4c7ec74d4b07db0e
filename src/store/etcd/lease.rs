//! A lease in etcd: the key that is put under it goes when it runs out.

use crate::lease::renew_every_ms;
use crate::sys::clock::boot_ms;
use crate::sys::random;

use super::client::{Client, Failure, PATIENCE_MS};
use super::wire::{self, code};

/// A lease that is ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lease {
    pub(super) id: i64,
    /// What the server granted: whole seconds, and at least its own least.
    pub(super) ttl_ms: u64,
    /// When the request was *sent* that was last confirmed: the server counts from some later moment.
    pub(super) confirmed_boot_ms: u64,
}

/// A number for a lease that nobody else has: chosen by us, so that a lease whose grant was not answered
/// can still be given back.
pub(super) fn fresh_id() -> i64 {
    random::positive()
}

/// How long one endpoint is given when a lease must not run out meanwhile: two may fail before the third
/// part of the ttl has passed.
pub(super) fn patience_ms(ttl_ms: u64) -> u64 {
    (renew_every_ms(ttl_ms) / 3).clamp(200, PATIENCE_MS)
}

impl Lease {
    /// Asks for a lease of at least `ttl_ms`.
    pub(super) fn grant(client: &Client, id: i64, ttl_ms: u64) -> Result<Self, Failure> {
        let question = wire::lease_grant(id, ttl_ms.div_ceil(1000).max(1));
        let answer = client.ask::<wire::LeaseGrant>("lease/grant", &question, PATIENCE_MS)?;
        let granted_ms = u64::try_from(answer.value.ttl_seconds.0).unwrap_or(0) * 1000;
        Ok(Lease { id: answer.value.id.0, ttl_ms: granted_ms, confirmed_boot_ms: answer.sent_boot_ms })
    }

    /// Begins its time anew; `None` if it has run out, or was revoked.
    pub(super) fn keep_alive(mut self, client: &Client, patience_ms: u64) -> Result<Option<Self>, Failure> {
        let asked =
            client.ask::<wire::Streamed<wire::KeepAlive>>("lease/keepalive", &wire::lease(self.id), patience_ms);
        let answer = match asked {
            Ok(answer) => answer,
            Err(Failure::Refused { code: code::NOT_FOUND, .. }) => return Ok(None),
            Err(failure) => return Err(failure),
        };
        let seconds = answer.value.result.map_or(0, |result| result.ttl_seconds.0);
        if seconds <= 0 {
            return Ok(None);
        }
        self.confirmed_boot_ms = answer.sent_boot_ms;
        Ok(Some(self))
    }

    /// Gives it back; the keys under it go. One that has gone already is as good.
    pub(super) fn revoke(id: i64, client: &Client, patience_ms: u64) -> Result<(), Failure> {
        match client.ask::<serde_json::Value>("lease/revoke", &wire::lease(id), patience_ms) {
            Ok(_) | Err(Failure::Refused { code: code::NOT_FOUND, .. }) => Ok(()),
            Err(failure) => Err(failure),
        }
    }

    /// Whether so much of it has passed that it must be renewed before anything is built on it.
    pub(super) fn is_old(&self) -> bool {
        boot_ms().saturating_sub(self.confirmed_boot_ms) >= renew_every_ms(self.ttl_ms)
    }
}
