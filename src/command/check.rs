//! `withlock check`: do I still hold it? For use right before a commit, so it asks no more than it must.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use crate::cli::Check;
use crate::exit::Exit;
use crate::lease::{Verdict, judge};
use crate::options::{self, Usage, is_among};
use crate::record::{Guard, Nonce};
use crate::store::look::contest;
use crate::store::permission::whose;
use crate::store::{self, Fault, Known, Place, Seen, Service};
use crate::sys::clock::wall;
use crate::sys::guard::Guarded;
use crate::sys::output::complain;
use crate::sys::process::variable;
use crate::sys::signal::OnEntry;
use crate::text::{Shown, duration};

use super::attended;
use super::view::guard_of;

/// Says by its exit code whether the lock is held under this nonce.
pub(super) fn check(asked: &Check, on_entry: &OnEntry) -> anyhow::Result<u8> {
    let set = |name| variable(name).filter(|value| !value.is_empty());
    let Some(lock) = asked.lock.clone().or_else(|| set("WITHLOCK_LOCK")) else {
        return Err(Usage("no LOCK given, and WITHLOCK_LOCK is not set".into()).into());
    };
    let given = match (options::nonce(asked.nonce.as_deref())?, set("WITHLOCK_NONCE")) {
        (Some(nonce), _) => Some(nonce),
        (None, Some(text)) => Some(from_environment(text.as_bytes())?),
        (None, None) if variable("WITHLOCK_MODE").is_some_and(|mode| mode == "degraded") => None,
        (None, None) => return Err(Usage("no --nonce given, and WITHLOCK_NONCE is not set".into()).into()),
    };
    // A lock that is named may be any of those that this process is run under.
    let is_any = asked.nonce.is_none() && asked.lock.is_some();
    let held = variable("WITHLOCK_HELD").filter(|_| is_any).unwrap_or_default();
    // Run without its own lock, it may still be run under others.
    let without = given.is_none().then_some(RUN_WITHOUT);
    let access = options::access(&asked.service);
    options::check_lock(&lock, &access)?;
    let service = store::service(&lock, &access, on_entry)?;
    let why_not = match (without, service) {
        (Some(without), _) if held.is_empty() => Some(without.into()),
        (_, Some(service)) => of_service(service.as_ref(), given, &held)?,
        (_, None) => match Place::open(&lock, false).and_then(|place| {
            let _attendant = attended(&lock, !place.file_system.local, 0);
            why_not(&place, given.as_ref(), &held)
        }) {
            // A directory that is gone took the lock with it.
            Err(Fault::CannotTake { why, .. }) => Some(without.map_or(why, Into::into)),
            found => found?,
        },
    };
    let Some(why) = why_not else { return Ok(0) };
    complain(&format!("{}: not held: {why}", Shown::os(&lock)));
    Ok(Exit::Lost.code())
}

fn from_environment(text: &[u8]) -> Result<Nonce, Usage> {
    Nonce::parse(text).ok_or_else(|| Usage("WITHLOCK_NONCE: not 32 lower-case hex digits".into()))
}

/// What a lock is to a command that was run without one.
const RUN_WITHOUT: &str = "this command was run without the lock";

/// The same of a lock at a service, which is asked about one nonce at a time.
fn of_service(service: &dyn Service, nonce: Option<Nonce>, others: &OsStr) -> Result<Option<String>, Fault> {
    let mut why_not = nonce.is_none().then(|| RUN_WITHOUT.to_owned());
    let others = others.as_bytes().split(|b| *b == b' ').filter_map(Nonce::parse);
    for nonce in nonce.into_iter().chain(others) {
        match service.check(&nonce)? {
            None => return Ok(None),
            Some(found) => why_not = why_not.or(Some(found)),
        }
    }
    Ok(why_not)
}

/// Why the lock is not surely held under this nonce, or one of the others.
fn why_not(place: &Place, nonce: Option<&Nonce>, others: &OsStr) -> Result<Option<String>, Fault> {
    let epoch = match place.observe()? {
        Seen::Epoch(epoch) => epoch,
        _ if nonce.is_none() => return Ok(Some(RUN_WITHOUT.into())),
        Seen::Free => return Ok(Some("the lock file is gone".into())),
        Seen::Foreign(_, what) => return Ok(Some(format!("{what} is there instead"))),
    };
    let record = match (epoch.record(), &epoch.known) {
        (Some(record), _) if nonce == Some(&record.nonce) || is_among(others, &record.nonce) => record,
        _ if nonce.is_none() => return Ok(Some(RUN_WITHOUT.into())),
        (Some(record), _) => return Ok(Some(format!("another holds it now (nonce {})", record.nonce))),
        (None, Known::Unreadable) => {
            let why = format!("cannot tell whether it is held: we may not read it ({})", whose(&epoch.stat));
            return Err(Fault::NotPermitted { path: place.shown().to_vec(), why });
        }
        (None, _) => return Ok(Some("the file there has no record".into())),
    };
    let now = wall();
    let contest = contest(place, &epoch, now).map_err(|errno| place.fault("read its quarantine", errno))?;
    let overdue_ms = match judge(epoch.mtime(), now, epoch.ttl_ms()) {
        Verdict::Stale { overdue_ms } => Some(overdue_ms),
        Verdict::Fresh { .. } => None,
    };
    if contest.is_none() && overdue_ms.is_none() {
        return Ok(None);
    }
    let is_local = place.file_system.local;
    let guard = guard_of(place, epoch.identity());
    // Whoever ends an epoch on a local file system keeps its guard: beside a free one a claim is dead.
    if contest.is_some() && !(is_local && guard == Guarded::Free) {
        return Ok(Some("another process is ending it".into()));
    }
    // Behind a guard nobody ends it, whatever its age. Without one anybody may, at any moment.
    let is_guarded = match guard {
        Guarded::Held { .. } => true,
        Guarded::Free => false,
        Guarded::Unknown => is_local && record.guard != Guard::None,
    };
    Ok(overdue_ms
        .filter(|_| !is_guarded)
        .map(|ms| format!("its lease ran out {} ago, so that anybody may end it", duration(ms))))
}
