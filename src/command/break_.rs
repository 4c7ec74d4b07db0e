//! `withlock break`: ends the epoch that it looked at, through its slot like any evictor, and no other.

use std::ffi::{OsStr, OsString};

use crate::cli::Break;
use crate::exit::Exit;
use crate::lease::{Stamp, Verdict, Watch, judge, judge_watched};
use crate::options::{self, Usage};
use crate::record::{MAX_LABEL_BYTES, Why, trash_name};
use crate::report::document::{GuardReport, GuardState, Lock, Process, State};
use crate::report::holder;
use crate::report::inspect::{argument, headline};
use crate::store::look::contest;
use crate::store::permission::may_not_end;
use crate::store::{self, Basis, End, Ending, Epoch, Fault, Known, Place, Seen, end};
use crate::sys::attendant::Attendant;
use crate::sys::clock::{boot_ms, wall};
use crate::sys::file::Kind;
use crate::sys::output::complain;
use crate::sys::signal::OnEntry;
use crate::sys::sleep::Sleeper;
use crate::sys::{random, user};
use crate::text::{Shown, duration, time};

use super::paths::beside;
use super::service::Breaking;
use super::{Plainly, attended, view, write};

/// For how long an ender that is at work, or a lock that changes under each look, is tried again, in
/// milliseconds.
const PATIENCE_MS: u64 = 2_000;
/// A forced break waits this long for an ender that is stuck, in milliseconds, and no longer.
const PASS_OVER_PATIENCE_MS: u64 = 30_000;
/// How often a lock with a time stamp in the future is looked at, in milliseconds.
const WATCH_EVERY_MS: u64 = 200;
/// How long to try for the guard before a veto counts, in milliseconds.
const VETO_PATIENCE_MS: u64 = 100;

/// Ends a lock's epoch; the exit code.
pub(super) fn break_lock(asked: &Break, on_entry: &OnEntry) -> anyhow::Result<u8> {
    let nonce = options::nonce(asked.nonce.as_deref())?;
    let reason = asked.reason.as_deref().map(reason).transpose()?;
    let access = options::access(&asked.service);
    options::check_lock(&asked.lock, &access)?;
    if let Some(service) = store::service(&asked.lock, &access, on_entry)? {
        return Breaking { service: service.as_ref(), asked, nonce, reason, on_entry }.run();
    }
    if asked.keep {
        return Err(
            Usage("--keep has no meaning for a lock file: its quarantine stays until it is reclaimed".into()).into()
        );
    }
    let place = Place::open(&asked.lock, false).map_err(Plainly)?;
    let attendant = attended(&asked.lock, !place.file_system.local, 0);
    let job = Job { asked, place: &place, reason, on_entry, attendant };
    let epoch = match place.observe().map_err(Plainly)? {
        Seen::Free => return job.say(0, &format!("{}: free, there is nothing to break", job.path())),
        Seen::Foreign(_, what) => return Err(Plainly(place.cannot(what.refusal())).into()),
        Seen::Epoch(epoch) => epoch,
    };
    // Of one that we may not read nothing is known, not even that.
    if let Some(nonce) = nonce
        && epoch.known != Known::Unreadable
        && epoch.nonce() != Some(nonce)
    {
        return job.refuse(&format!("the epoch {nonce} has ended"));
    }
    place.dir.may_write().map_err(|errno| Plainly(place.change_fault("break it", errno)))?;
    if let Some(why) = may_not_end(&place, &epoch) {
        return Err(
            Fault::NotPermitted { path: place.shown().to_vec(), why: format!("cannot be broken: {why}") }.into()
        );
    }
    job.end(&epoch)
}

/// An operator's words, as a claim can keep them.
fn reason(text: &OsStr) -> Result<String, Usage> {
    match text.to_str() {
        Some(text) if text.len() <= MAX_LABEL_BYTES => Ok(text.to_owned()),
        Some(_) => Err(Usage(format!("--reason: at most {MAX_LABEL_BYTES} bytes"))),
        None => Err(Usage("--reason: not UTF-8".into())),
    }
}

struct Job<'a> {
    asked: &'a Break,
    place: &'a Place,
    reason: Option<String>,
    on_entry: &'a OnEntry,
    attendant: Option<Attendant>,
}

impl Job<'_> {
    fn path(&self) -> Shown<'_> {
        Shown(self.place.shown())
    }

    /// Something went as it should.
    fn say(&self, code: u8, line: &str) -> anyhow::Result<u8> {
        // What had to be done is done: a reader that sleeps or has gone may end us.
        let _ = self.on_entry.restore();
        if let Some(attendant) = &self.attendant {
            attendant.sleeping(u64::MAX);
        }
        write(format!("{line}\n").as_bytes())?;
        Ok(code)
    }

    /// Not broken: the state in the words of `inspect`, and why else.
    fn refuse(&self, why: &str) -> anyhow::Result<u8> {
        let lock = view::of(&self.asked.lock, self.place)?;
        if lock.state == State::Free {
            return self.say(0, &format!("{}: free, another process ended it meanwhile", self.path()));
        }
        let by = match (self.holder(), &lock.holder) {
            (Some(by), Some(_)) => format!(", by {by}"),
            _ => String::new(),
        };
        let guards = guards(&lock);
        let why = if why.is_empty() { String::new() } else { format!(" ({why})") };
        let next = argument(self.place.shown());
        let line = headline(&lock);
        complain(&format!("{}: {line}{by}{guards}; not broken{why}; next: withlock inspect {next}", self.path()));
        Ok(Exit::Held.code())
    }

    fn holder(&self) -> Option<String> {
        match self.place.observe() {
            Ok(Seen::Epoch(epoch)) => epoch.record().map(|r| holder(r, user::local_name(r.uid).as_deref())),
            _ => None,
        }
    }

    /// Ends `judged`. Whatever else is found at the path is another's and is left alone.
    fn end(&self, judged: &Epoch) -> anyhow::Result<u8> {
        let basis = match self.basis(judged)? {
            Ok(basis) => basis,
            Err(code) => return Ok(code),
        };
        if self.asked.dry_run {
            return self.dry_run(judged);
        }
        // Who is at work under it can be seen only as long as it is there.
        let before = self.asked.force.then(|| view::of(&self.asked.lock, self.place).ok()).flatten();
        let consequence = before.map_or(String::new(), |lock| consequence(&lock, "notices", "ends"));
        let sleeper = Sleeper::new(self.on_entry);
        let mut until_ms = boot_ms() + PATIENCE_MS;
        let mut warned = false;
        loop {
            let ending = Ending {
                judged,
                basis,
                why: Why::Break,
                force: self.asked.force,
                reason: self.reason.clone(),
                mine: None,
                patience_ms: VETO_PATIENCE_MS,
            };
            let is_time_left = boot_ms() < until_ms;
            match end(self.place, &ending)? {
                End::Done(slot) => return self.done(judged, &slot.file_name(&self.place.name), &consequence),
                End::DoneAside(name) => return self.done(judged, &name, &consequence),
                End::MayNot(why) => {
                    let why = format!("cannot be broken: {why}");
                    return Err(Fault::NotPermitted { path: self.place.shown().to_vec(), why }.into());
                }
                End::Claimed if self.asked.force && !warned => {
                    warned = true;
                    if let Some(in_ms) = self.passed_over_in_ms(judged).filter(|in_ms| *in_ms < PASS_OVER_PATIENCE_MS) {
                        until_ms = boot_ms() + in_ms + PATIENCE_MS;
                        let (path, wait) = (self.path(), duration(in_ms));
                        complain(&format!("{path}: another process is ending it; passing it over in {wait}"));
                    }
                }
                // Between two attempts nothing is in our hands: a signal may end us.
                End::Gone if is_time_left && self.is_still(judged)? => sleeper.sleep(5),
                End::Claimed if is_time_left => sleeper.sleep(50),
                End::Gone if self.is_still(judged)? => return self.refuse("other processes are at it as well"),
                End::Gone => return self.refuse("the epoch that was looked at has ended"),
                // Who has claimed it is told anyway; one without a claim may be no ender at all.
                End::Claimed if self.passed_over_in_ms(judged).is_some() => return self.refuse(""),
                End::Claimed => return self.refuse("another process is ending it, or has its quarantine locked"),
                End::Vetoed => return self.refuse("a process has its guard"),
                End::NotStale { remaining_ms } => {
                    let left = duration(remaining_ms);
                    return self.refuse(&format!("by the clock of its file system it is not stale for another {left}"));
                }
            }
        }
    }

    /// When the claim of an ender that is at work may be passed over without the guard.
    fn passed_over_in_ms(&self, judged: &Epoch) -> Option<u64> {
        contest(self.place, judged, self.now()).ok()?.map(|contest| contest.passed_over_in_ms)
    }

    fn is_still(&self, judged: &Epoch) -> Result<bool, Fault> {
        Ok(matches!(self.place.observe()?, Seen::Epoch(now) if now.is(judged)))
    }

    /// By what right; or the exit code, if by none.
    fn basis(&self, judged: &Epoch) -> anyhow::Result<Result<Basis, u8>> {
        if self.asked.force {
            return Ok(Ok(Basis::Any));
        }
        let now = self.now();
        match judge(judged.mtime(), now, judged.ttl_ms()) {
            Verdict::Stale { .. } => Ok(Ok(Basis::Age)),
            Verdict::Fresh { .. } if judged.mtime() <= now => Ok(Err(self.refuse("")?)),
            Verdict::Fresh { .. } if self.asked.dry_run => Ok(Ok(Basis::Unchanged)),
            Verdict::Fresh { .. } if self.stays_unchanged(judged)? => Ok(Ok(Basis::Unchanged)),
            Verdict::Fresh { .. } => Ok(Err(self.refuse("it was renewed while it was watched")?)),
        }
    }

    /// The clock that stamps the lock, where that is not this host's.
    fn now(&self) -> Stamp {
        let private = || trash_name(&self.place.name, &random::nonce());
        if self.place.file_system.local || self.asked.dry_run {
            return wall();
        }
        self.place.dir.file_system_time(&private()).unwrap_or_else(|_| wall())
    }

    /// Watches a lock whose time stamp says nothing for one ttl of the boot clock.
    fn stays_unchanged(&self, judged: &Epoch) -> Result<bool, Fault> {
        let ahead = duration(u64::try_from(judged.mtime().since_ms(wall())).unwrap_or(0));
        let ttl = duration(judged.ttl_ms());
        let path = self.path();
        complain(&format!("{path}: its time stamp lies {ahead} in the future; watching it for its ttl, {ttl}"));
        let sleeper = Sleeper::new(self.on_entry);
        let mut watch = Watch::default();
        loop {
            let Seen::Epoch(now) = self.place.observe()? else { return Ok(false) };
            if !now.is(judged) || now.mtime() != judged.mtime() {
                return Ok(false);
            }
            let unchanged_ms = watch.note(now.identity(), now.mtime(), boot_ms());
            match judge_watched(now.mtime(), wall(), now.ttl_ms(), unchanged_ms) {
                Verdict::Stale { .. } => return Ok(true),
                Verdict::Fresh { remaining_ms } => sleeper.sleep(remaining_ms.clamp(1, WATCH_EVERY_MS)),
            }
        }
    }

    /// Whose it was, and where its record lies now, a line each.
    fn story(&self, judged: &Epoch, quarantine: &OsStr) -> String {
        let holder = match judged.record() {
            Some(record) => holder(record, user::local_name(record.uid).as_deref()),
            None => format!("unknown, it has no record; last changed {}", time(judged.mtime().ms())),
        };
        let nonce = judged.nonce().map(|nonce| format!("\n  nonce   {nonce}")).unwrap_or_default();
        format!("  holder  {holder}{nonce}\n  record  {}", Shown::os(quarantine))
    }

    fn done(&self, judged: &Epoch, quarantine: &OsStr, consequence: &str) -> anyhow::Result<u8> {
        let mut lies_at: OsString = beside(&self.asked.lock, quarantine);
        // Without an inode to spare the file itself is the quarantine.
        let found = self.place.dir.lstat(quarantine);
        if matches!(found, Ok(Some(stat)) if stat.kind == Kind::Directory) {
            lies_at.push("/lock");
        } else if self.reason.is_some() {
            complain(&format!("{}: no room for more than the record: the reason is not kept", self.path()));
        }
        let line = format!("{}: ended{consequence}", self.path());
        // It is ended all the same, and an exit code other than 0 must not say that it is not.
        self.say(0, &format!("{line}\n{}", self.story(judged, &lies_at))).inspect_err(|_| complain(&line))
    }

    /// What would be done, by the signs that can be seen without touching anything.
    fn dry_run(&self, judged: &Epoch) -> anyhow::Result<u8> {
        let lock = view::of(&self.asked.lock, self.place)?;
        let guard = lock.guard.as_ref().map_or(GuardState::Unknown, |guard| guard.state);
        if !self.asked.force && (guard == GuardState::Held || lock.state == State::Contested) {
            return self.refuse("");
        }
        let mut record = beside(&self.asked.lock, &judged.slot_name().file_name(&self.place.name));
        record.push("/lock");
        let story = self.story(judged, &record);
        let mut line = format!("{}: {}; would be ended", self.path(), headline(&lock));
        if !self.asked.force && guard == GuardState::Unknown {
            line.push_str("; unless a process that is not seen from here has its guard");
        }
        if !self.asked.force && !lock.stale {
            line.push_str(&format!("; after it was watched unchanged for {}", duration(judged.ttl_ms())));
        }
        if self.asked.force {
            line.push_str(&consequence(&lock, "would notice", "would end"));
        }
        self.say(0, &format!("{line}\n{story}"))
    }
}

/// What a forced break of `lock` means for those who are at work under it.
fn consequence(lock: &Lock, notices: &str, ends: &str) -> String {
    let Some(guard) = lock.guard.as_ref().filter(|guard| guard.state == GuardState::Held) else { return String::new() };
    let holder = lock.holder.as_ref().and_then(|holder| holder.process.as_ref());
    if holder.is_some_and(|holder| !matches!(holder.state, 'T' | 't')) {
        return format!("; its holder {notices} within a second and {ends} its command");
    }
    match named(guard) {
        named if named.is_empty() => "; a process that is not seen from here goes on, and has its guard".into(),
        named => format!("; nobody ends what goes on under it: {named}"),
    }
}

/// The processes that have a guard.
fn named(guard: &GuardReport) -> String {
    let one =
        |process: &Process| format!("pid {} ({}, state {})", process.pid, Shown::os(&process.command), process.state);
    guard.processes.iter().map(one).collect::<Vec<_>>().join(", ")
}

/// Who vouches for it, where that is why it is not broken.
fn guards(lock: &Lock) -> String {
    let Some(guard) = lock.guard.as_ref().filter(|guard| lock.stale && guard.state == GuardState::Held) else {
        return String::new();
    };
    match named(guard) {
        named if named.is_empty() => ", guarded by a process that is not seen from here".into(),
        named => format!(", guarded by {named}"),
    }
}
