//! What `renew` and `release` have in common: a lock and a nonce, given or found in the environment.

use std::ffi::OsString;

use crate::exit::Exit;
use crate::options::{self, Access, Usage};
use crate::record::Nonce;
use crate::store::handed::Handed;
use crate::store::{self, Fault, Place, Service};
use crate::sys::output::complain;
use crate::sys::process::variable;
use crate::sys::signal::OnEntry;
use crate::text::Shown;

use super::{Plainly, attended};

/// Which lock, and which epoch of it.
pub(super) struct Target {
    pub(super) lock: OsString,
    pub(super) nonce: Nonce,
}

impl Target {
    /// As given, or as the environment says.
    pub(super) fn new(lock: Option<OsString>, nonce: Option<&str>) -> Result<Self, Usage> {
        let missing = |what, name| Usage(format!("{what} is missing, and {name} is not set; try: withlock --help"));
        let lock = lock
            .or_else(|| variable("WITHLOCK_LOCK").filter(|lock| !lock.is_empty()))
            .ok_or_else(|| missing("LOCK", "WITHLOCK_LOCK"))?;
        let nonce = match options::nonce(nonce)? {
            Some(nonce) => nonce,
            None => {
                let text = variable("WITHLOCK_NONCE").filter(|text| !text.is_empty());
                let text = text.ok_or_else(|| missing("--nonce", "WITHLOCK_NONCE"))?;
                let wrong = || Usage(format!("WITHLOCK_NONCE={}: not 32 lower-case hex digits", Shown::os(&text)));
                Nonce::parse(text.as_encoded_bytes()).ok_or_else(wrong)?
            }
        };
        Ok(Target { lock, nonce })
    }

    /// The service that keeps it, unless it is a file.
    pub(super) fn service(&self, access: &Access, on_entry: &OnEntry) -> anyhow::Result<Option<Box<dyn Service>>> {
        options::check_lock(&self.lock, access)?;
        Ok(store::service(&self.lock, access, on_entry)?)
    }

    /// Does it to a lock file. A directory that is gone took the lock with it.
    pub(super) fn at_place(&self, act: impl FnOnce(Place) -> Result<Handed, Fault>) -> anyhow::Result<Handed> {
        let place = match Place::open(&self.lock, false) {
            Err(Fault::CannotTake { why, .. }) => return Ok(Handed::NotHeld(why)),
            place => place?,
        };
        let _attendant = attended(&self.lock, !place.file_system.local, 0);
        Ok(act(place).map_err(Plainly)?)
    }

    /// The exit code for what became of it, and a line for what did not go well.
    pub(super) fn report(&self, done: &Handed, not_done: &str) -> u8 {
        let (exit, why) = match done {
            Handed::Done => return 0,
            Handed::NotHeld(found) => (Exit::Lost, format!("not held with nonce {}: {found}", self.nonce)),
            Handed::NotNow(why) => (Exit::Held, format!("{not_done}: {why}")),
            Handed::MayNot(why) => (Exit::NotPermitted, format!("{not_done}: {why}")),
        };
        complain(&format!("{}: {why}", Shown::os(&self.lock)));
        exit.code()
    }
}
