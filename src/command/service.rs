//! Operators at a lock service: the words of `inspect`, `break`, `reclaim` and `check`, for locks that are
//! not files.

use std::ffi::OsString;

use crate::cli::Break;
use crate::exit::Exit;
use crate::lease::reclaim_age_ms;
use crate::record::{Claim, Nonce, Record, Why};
use crate::report::document::{
    Ended as EndedReport, FateWord, Holder, Lock, PathText, Quarantined, Reclamation, State,
};
use crate::report::holder;
use crate::report::inspect::{argument, headline};
use crate::report::reclaim::history;
use crate::store::service::{Ended, Found, Kept, Look};
use crate::store::{Fault, Service};
use crate::sys::clock::wall_ms;
use crate::sys::output::complain;
use crate::sys::process::Who;
use crate::sys::signal::OnEntry;
use crate::sys::user;
use crate::text::{Shown, duration};

use super::paths::problem;
use super::view::View;
use super::write;

impl View {
    /// Adds what a service tells of a lock.
    pub(super) fn add_look(&mut self, look: Look) {
        let mut lock = Lock::free(&look.name);
        if let Some(what) = look.foreign {
            lock.state = State::Foreign;
            lock.foreign = Some(what.to_string());
        }
        if let Some(found) = look.found {
            lock.state = State::Held;
            lock.held_since_ms = i64::try_from(found.record.claimed_at_ms).ok();
            lock.renewed_at_ms = found.renewed_at_ms;
            lock.ttl_ms = Some(found.record.judged_ttl_ms());
            lock.expires_in_ms = found.expires_in_ms;
            lock.holder = Some(self.holder(&found.record));
        }
        lock.quarantine = look.quarantine.iter().map(|kept| self.kept(kept)).collect();
        self.add_lock(lock);
    }

    /// A quarantine at a service, as a report tells it.
    fn kept(&mut self, kept: &Kept) -> Quarantined {
        let now_ms = i64::try_from(wall_ms()).unwrap_or(i64::MAX);
        let safe_age_ms = kept.record.as_ref().map(|record| reclaim_age_ms(record.judged_ttl_ms()));
        let ended_at_ms = kept.claim.as_ref().and_then(|claim| i64::try_from(claim.at_ms).ok());
        let age_ms = ended_at_ms.map(|at_ms| now_ms.saturating_sub(at_ms));
        let (fate, why, reclaimable_in_ms) = match (kept.goes_in_ms, age_ms, safe_age_ms) {
            (Some(in_ms), ..) => (FateWord::Young, format!("removed by the service in {}", duration(in_ms)), None),
            (None, Some(age_ms), Some(safe_ms)) if i128::from(age_ms) <= i128::from(safe_ms) => {
                let in_ms = u64::try_from(i128::from(safe_ms) - i128::from(age_ms) + 1).unwrap_or(u64::MAX);
                (FateWord::Young, format!("reclaimable in {}", duration(in_ms)), Some(in_ms))
            }
            (None, Some(_), Some(_)) => (FateWord::Reclaimable, "reclaimable".into(), None),
            (None, ..) => (FateWord::NotOurs, "it does not hold a record and how that ended".into(), None),
        };
        Quarantined {
            may_not_remove: None,
            name: PathText::new(&kept.name),
            fate,
            why,
            reclaimable_in_ms,
            age_ms,
            safe_age_ms,
            ended: kept.claim.as_ref().map(|claim| EndedReport::of(claim, self.user(claim.uid))),
            owner: kept.record.as_ref().map(|record| Holder::of(record, self.user(record.uid))),
            held_since_ms: kept.record.as_ref().and_then(|record| i64::try_from(record.claimed_at_ms).ok()),
        }
    }
}

/// The one lock that was named.
fn look(service: &dyn Service) -> Result<Look, Fault> {
    let mut looks = service.look()?;
    Ok(looks.pop().unwrap_or(Look { name: OsString::new(), found: None, foreign: None, quarantine: Vec::new() }))
}

/// `withlock break` there.
pub(super) struct Breaking<'a> {
    pub(super) service: &'a dyn Service,
    pub(super) asked: &'a Break,
    pub(super) nonce: Option<Nonce>,
    pub(super) reason: Option<String>,
    pub(super) on_entry: &'a OnEntry,
}

impl Breaking<'_> {
    /// Ends the lock's epoch; the exit code.
    pub(super) fn run(&self) -> anyhow::Result<u8> {
        let seen = look(self.service)?;
        let path = Shown::os(&self.asked.lock);
        if let Some(what) = seen.foreign {
            let why = what.refusal();
            return Err(Fault::CannotTake { path: self.asked.lock.as_encoded_bytes().to_vec(), why }.into());
        }
        let Some(found) = &seen.found else {
            return self.say(&format!("{path}: free, there is nothing to break"));
        };
        if let Some(nonce) = self.nonce.filter(|nonce| *nonce != found.record.nonce) {
            return self.refuse(&format!("the epoch {nonce} has ended"));
        }
        // A lease that runs is a promise that is kept. Without one nothing else will end the lock.
        if found.expires_in_ms.is_some() && !self.asked.force {
            return self.refuse("");
        }
        if self.asked.dry_run {
            let line = headline(&told(seen.clone()));
            let story = self.story(&found.record, None);
            return self.say(&format!(
                "{path}: {line}; would be ended; its holder would notice at once and end its command\n{story}"
            ));
        }
        match self.service.end(&seen.name, found, &self.claim(found), self.asked.keep)? {
            Ended::Done(lies_at) => {
                let line = format!("{path}: ended");
                // It is ended all the same, and an exit code other than 0 must not say that it is not.
                self.say(&format!("{line}\n{}", self.story(&found.record, Some(&lies_at))))
                    .inspect_err(|_| complain(&line))
            }
            Ended::Gone => self.refuse("the epoch that was looked at has ended"),
        }
    }

    fn claim(&self, found: &Found) -> Claim {
        let Who { host, pid, uid, .. } = Who::am_i();
        let ttl_ms = found.record.judged_ttl_ms();
        Claim { why: Why::Break, at_ms: wall_ms(), host, pid, uid, ttl_ms, reason: self.reason.clone() }
    }

    fn story(&self, record: &Record, lies_at: Option<&OsString>) -> String {
        let holder = holder(record, user::local_name(record.uid).as_deref());
        let lies_at = lies_at.map(|at| format!("\n  record  {}", Shown::os(at))).unwrap_or_default();
        format!("  holder  {holder}\n  nonce   {}{lies_at}", record.nonce)
    }

    fn say(&self, line: &str) -> anyhow::Result<u8> {
        // What had to be done is done: a reader that sleeps or has gone may end us.
        let _ = self.on_entry.restore();
        write(format!("{line}\n").as_bytes())?;
        Ok(0)
    }

    /// Not broken: the state in the words of `inspect`, and why else.
    fn refuse(&self, why: &str) -> anyhow::Result<u8> {
        let seen = look(self.service)?;
        let path = Shown::os(&self.asked.lock);
        let Some(found) = &seen.found else {
            return self.say(&format!("{path}: free, another process ended it meanwhile"));
        };
        let by = holder(&found.record, user::local_name(found.record.uid).as_deref());
        let why = if why.is_empty() { String::new() } else { format!(" ({why})") };
        let next = argument(self.asked.lock.as_encoded_bytes());
        let line = headline(&told(seen.clone()));
        complain(&format!("{path}: {line}, by {by}; not broken{why}; next: withlock inspect {next}"));
        Ok(Exit::Held.code())
    }
}

fn told(look: Look) -> Lock {
    let mut view = View::default();
    let name = look.name.clone();
    view.add_look(look);
    view.finish().pop().unwrap_or_else(|| Lock::free(&name))
}

/// `withlock reclaim` there: those that were kept for good, once they are old enough. The others the
/// service removes by itself.
pub(super) fn reclaim(
    service: &dyn Service,
    older_than_ms: Option<u64>,
    view: &mut View,
    report: &mut Reclamation,
) -> Result<(), Fault> {
    for kept in service.look()?.iter().flat_map(|look| &look.quarantine) {
        let mut told = view.kept(kept);
        let is_wanted = older_than_ms.is_none_or(|ms| told.age_ms.is_some_and(|age| i128::from(age) >= i128::from(ms)));
        if told.fate == FateWord::Reclaimable && !is_wanted {
            (told.fate, told.why) = (FateWord::Young, "younger than was asked for".into());
        } else if told.fate == FateWord::Reclaimable {
            let removed = if report.dry_run { Ok(true) } else { service.remove(kept) };
            (told.fate, told.why) = match removed {
                Ok(true) if report.dry_run => (FateWord::WouldRemove, history(&told)),
                Ok(true) => (FateWord::Removed, history(&told)),
                Ok(false) => (FateWord::Gone, "another process removed it meanwhile".into()),
                Err(fault) => {
                    let why = fault.to_string();
                    report.errors.push(problem(&kept.name, fault));
                    (FateWord::NotOurs, why)
                }
            };
        }
        report.quarantine.push(told);
    }
    Ok(())
}
