//! What `inspect` and `reclaim` report: one schema, versioned. `--json` writes it as it is, the text for
//! people is made from it.
//!
//! A document is an object that begins with `"withlock_report":1` and a `"kind"`. Times are milliseconds
//! since 1970 (`…_at_ms`, `…_since_ms`), lengths of time milliseconds (`…_ms`). A field that does not
//! apply, or is not known, is left out. A path that is not UTF-8 is given twice: `path` with replacement
//! characters, for people, and `path_bytes`, each byte as two hexadecimal digits, for programs. Within a
//! version fields are only added.

use std::ffi::OsStr;
use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;

use serde::Serialize;

use crate::record::{self, Claim, Record, Why};

/// The version of the schema.
pub const VERSION: u32 = 1;

/// What `inspect` found.
#[derive(Clone, Debug, Serialize)]
pub struct Inspection {
    /// The schema's version.
    pub withlock_report: u32,
    /// `inspect`.
    pub kind: &'static str,
    /// When it was looked.
    pub at_ms: i64,
    /// Every lock that was asked for, or found in a directory that was.
    pub locks: Vec<Lock>,
    /// Files in such a directory of which it cannot be told whether they are locks.
    pub unclear: Vec<Unclear>,
    /// Paths about which nothing could be found out.
    pub errors: Vec<Problem>,
}

/// What `reclaim` did.
#[derive(Clone, Debug, Serialize)]
pub struct Reclamation {
    /// The schema's version.
    pub withlock_report: u32,
    /// `reclaim`.
    pub kind: &'static str,
    /// When it was looked.
    pub at_ms: i64,
    /// Nothing was removed, only told.
    pub dry_run: bool,
    /// Every quarantine, and what else has such a name.
    pub quarantine: Vec<Quarantined>,
    /// Paths that could not be dealt with.
    pub errors: Vec<Problem>,
}

/// A path, reversibly.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PathText {
    /// The path; with replacement characters where it is not UTF-8.
    pub path: String,
    /// Its bytes in hexadecimal, where it is not UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path_bytes: Option<String>,
    /// Its bytes.
    #[serde(skip)]
    pub raw: Vec<u8>,
}

impl PathText {
    /// Of a path.
    pub fn new(path: impl AsRef<OsStr>) -> Self {
        let raw = path.as_ref().as_bytes();
        let hex = || {
            raw.iter().fold(String::with_capacity(raw.len() * 2), |mut hex, byte| {
                let _ = write!(hex, "{byte:02x}");
                hex
            })
        };
        PathText {
            path: String::from_utf8_lossy(raw).into_owned(),
            path_bytes: std::str::from_utf8(raw).is_err().then(hex),
            raw: raw.to_vec(),
        }
    }
}

/// In what state a lock is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// Older than its ttl, and nobody vouches for it: the next contender ends it.
    Stale,
    /// Older than its ttl, but a process has its guard: nobody ends it.
    StaleButGuarded,
    /// Another process is ending it.
    Contested,
    /// No record, or a broken one; held while young, stale by its age like any other.
    Blank,
    /// Within its ttl, or not to be read.
    Held,
    /// Something else stands there. Never touched.
    Foreign,
    /// Nothing stands there.
    Free,
}

/// Who has the guard, as far as it can be seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum GuardState {
    /// No process.
    Free,
    /// At least one process.
    Held,
    /// The processes of other users or other pid namespaces cannot be seen from here.
    Unknown,
}

impl State {
    /// The state of an epoch, from what is known of it.
    pub fn of_epoch(is_blank: bool, is_stale: bool, guard: GuardState, is_contested: bool) -> Self {
        match (is_contested, is_blank, is_stale, guard) {
            (true, ..) => State::Contested,
            (_, true, ..) => State::Blank,
            (_, _, true, GuardState::Held) => State::StaleButGuarded,
            (_, _, true, _) => State::Stale,
            _ => State::Held,
        }
    }

    /// In words.
    pub fn words(self) -> &'static str {
        match self {
            State::Stale => "stale",
            State::StaleButGuarded => "stale but guarded",
            State::Contested => "contested",
            State::Blank => "blank",
            State::Held => "held",
            State::Foreign => "foreign",
            State::Free => "free",
        }
    }
}

/// One lock path and all that is known of it.
#[derive(Clone, Debug, Serialize)]
pub struct Lock {
    /// The path as it was given, or found.
    #[serde(flatten)]
    pub name: PathText,
    /// In what state it is.
    pub state: State,
    /// Older than its ttl, by its time stamp and this host's clock.
    pub stale: bool,
    /// What it is instead of a lock.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub foreign: Option<String>,
    /// We may not read it: what is told is what lstat knows.
    #[serde(skip_serializing_if = "is_false")]
    pub unreadable: bool,
    /// Who holds it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub holder: Option<Holder>,
    /// When the holder took it, by the holder's clock.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held_since_ms: Option<i64>,
    /// Its time stamp.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub renewed_at_ms: Option<i64>,
    /// The ttl that it is judged by.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttl_ms: Option<u64>,
    /// Until it turns stale unless it is renewed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_in_ms: Option<u64>,
    /// For how long it has been stale.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overdue_ms: Option<u64>,
    /// How far its time stamp lies in the future. It never turns stale by age, but by being watched
    /// unchanged for one ttl.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ahead_ms: Option<u64>,
    /// Who has its guard.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guard: Option<GuardReport>,
    /// Who is ending it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub contest: Option<ContestReport>,
    /// The file's owner and permissions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<FileReport>,
    /// Why we could not end it, even if it is stale.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub may_not_break: Option<String>,
    /// What to type next, where that is known to be right; each for a shell.
    pub next: Vec<String>,
    /// Its quarantines, oldest first.
    pub quarantine: Vec<Quarantined>,
    /// Why they could not be listed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quarantine_error: Option<String>,
}

impl Lock {
    /// A path at which nothing stands.
    pub fn free(path: impl AsRef<OsStr>) -> Self {
        Lock {
            name: PathText::new(path),
            state: State::Free,
            stale: false,
            foreign: None,
            unreadable: false,
            holder: None,
            held_since_ms: None,
            renewed_at_ms: None,
            ttl_ms: None,
            expires_in_ms: None,
            overdue_ms: None,
            ahead_ms: None,
            guard: None,
            contest: None,
            file: None,
            may_not_break: None,
            next: Vec::new(),
            quarantine: Vec::new(),
            quarantine_error: None,
        }
    }
}

#[allow(clippy::trivially_copy_pass_by_ref)] // The signature that serde asks for.
fn is_false(value: &bool) -> bool {
    !value
}

/// What can be seen of the process that took a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Alive {
    /// A process with that pid and that start time runs here.
    RunsHere,
    /// It has ended; its parent has not asked for its status yet.
    Zombie,
    /// No process here has that pid and that start time. (One in another pid namespace may.)
    NotHere,
    /// It was written on another host.
    OtherHost,
    /// It was written before this host's last start.
    EarlierBoot,
}

/// A holder, as its record tells. Shown to people, never used to judge.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Holder {
    /// The epoch's identity.
    pub nonce: String,
    /// The host's name.
    pub host: String,
    /// The wrapper's pid.
    pub pid: u32,
    /// Its start time in clock ticks since boot.
    pub pid_started: u64,
    /// Whether that process runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alive: Option<Alive>,
    /// That process, if it runs here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub process: Option<Process>,
    /// Its effective user.
    pub uid: u32,
    /// That user's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The command's base name.
    pub command: String,
    /// What the operator called it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// Its fencing token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fence: Option<u64>,
    /// Who was given the guard.
    pub guard: record::Guard,
}

impl Holder {
    /// What the record tells.
    pub fn of(record: &Record, user: Option<String>) -> Self {
        Holder {
            nonce: record.nonce.to_string(),
            host: record.host.clone(),
            pid: record.pid,
            pid_started: record.pid_started,
            alive: None,
            process: None,
            uid: record.uid,
            user,
            command: record.command.clone(),
            label: record.label.clone(),
            fence: record.fence,
            guard: record.guard,
        }
    }
}

/// A running process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Process {
    /// Its pid, as seen from here.
    pub pid: i32,
    /// The command's name, at most 15 bytes; no arguments.
    pub command: String,
    /// R running, S sleeping, D waiting for a device, T stopped, Z ended.
    pub state: char,
    /// Its effective user.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// That user's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Since when it has run.
    pub running_since_ms: i64,
    /// The CPU time it has used.
    pub cpu_ms: u64,
}

/// Who has a lock's guard.
#[derive(Clone, Debug, Serialize)]
pub struct GuardReport {
    /// Whether somebody has it.
    pub state: GuardState,
    /// The processes that have it, as far as they can be seen.
    pub processes: Vec<Process>,
    /// There may be more that cannot be seen from here.
    #[serde(skip_serializing_if = "is_false")]
    pub perhaps_more: bool,
    /// The process that took it, which may have left it to others since.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub taken_by_pid: Option<i32>,
}

/// Who is ending a lock.
#[derive(Clone, Debug, Serialize)]
pub struct ContestReport {
    /// Who, and why.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub by: Option<Ended>,
    /// How long ago it began.
    pub age_ms: i64,
    /// After which time anybody may pass it over, should it never finish.
    pub passed_over_in_ms: u64,
}

/// Who ended an epoch, when and why.
#[derive(Clone, Debug, Serialize)]
pub struct Ended {
    /// Why: `stale`, `break`, `late-release`.
    pub why: Why,
    /// When, by the ender's clock.
    pub at_ms: u64,
    /// Its host.
    pub host: String,
    /// Its pid.
    pub pid: u32,
    /// Its effective user.
    pub uid: u32,
    /// That user's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// An operator's own words.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

impl Ended {
    /// What a claim tells.
    pub fn of(claim: &Claim, user: Option<String>) -> Self {
        Ended {
            why: claim.why,
            at_ms: claim.at_ms,
            host: claim.host.clone(),
            pid: claim.pid,
            uid: claim.uid,
            user,
            reason: claim.reason.clone(),
        }
    }
}

/// A lock file's owner and permissions.
#[derive(Clone, Debug, Serialize)]
pub struct FileReport {
    /// Its owner.
    pub uid: u32,
    /// The owner's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Its permissions, in octal.
    pub mode: String,
    /// Its size.
    pub size_bytes: u64,
}

/// What will become of a quarantine, or what has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum FateWord {
    /// It may be removed.
    Reclaimable,
    /// It is too young.
    Young,
    /// Its epoch is at the lock path: it is being ended, or whoever did so died.
    Live,
    /// A process still has the guard of the file in it.
    Guarded,
    /// It only looks like a quarantine.
    NotOurs,
    /// It is another lock's.
    AnotherLock,
    /// It was removed.
    Removed,
    /// It would have been removed.
    WouldRemove,
    /// Another process removed it meanwhile.
    Gone,
}

/// A quarantine, or what has such a name.
#[derive(Clone, Debug, Serialize)]
pub struct Quarantined {
    /// Where it is.
    #[serde(flatten)]
    pub name: PathText,
    /// What becomes of it.
    pub fate: FateWord,
    /// Why, in words.
    pub why: String,
    /// Why we could not remove it, even if it is old enough.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub may_not_remove: Option<String>,
    /// Until it may be removed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reclaimable_in_ms: Option<u64>,
    /// How long ago the epoch was ended, by the quarantine's own time stamp.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub age_ms: Option<i64>,
    /// The age from which on it may be removed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub safe_age_ms: Option<u64>,
    /// Who ended the epoch, when and why.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended: Option<Ended>,
    /// Whose epoch it was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner: Option<Holder>,
    /// When that owner had taken it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held_since_ms: Option<i64>,
}

/// A file of which it cannot be told whether it is a lock.
#[derive(Clone, Debug, Serialize)]
pub struct Unclear {
    /// Where it is.
    #[serde(flatten)]
    pub name: PathText,
    /// Why.
    pub why: String,
}

/// A path that could not be dealt with.
#[derive(Clone, Debug, Serialize)]
pub struct Problem {
    /// The path.
    #[serde(flatten)]
    pub name: PathText,
    /// The line that was said about it.
    pub error: String,
    /// The exit code that it leads to.
    pub exit: u8,
}

/// Writes a document on one line.
pub fn line(document: &impl Serialize) -> Vec<u8> {
    let mut line = serde_json::to_vec(document).unwrap_or_default();
    line.push(b'\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_is_not_utf_8_can_be_read_back_byte_for_byte() {
        let name = PathText::new(OsStr::from_bytes(b"a\xff\n"));
        let json: serde_json::Value = serde_json::from_slice(&line(&name)).unwrap();
        assert_eq!((json["path"].as_str(), json["path_bytes"].as_str()), (Some("a\u{fffd}\n"), Some("61ff0a")));
        let json: serde_json::Value = serde_json::from_slice(&line(&PathText::new("na\u{ef}ve\n"))).unwrap();
        assert_eq!(json, serde_json::json!({"path": "na\u{ef}ve\n"}));
    }

    #[test]
    fn the_guard_and_an_ender_at_work_decide_how_a_stale_lock_is_called_and_age_alone_makes_it_stale() {
        use GuardState::{Free, Held, Unknown};
        for (blank, stale, guard, contested, state) in [
            (false, false, Free, false, State::Held),
            (false, false, Held, false, State::Held),
            (false, false, Unknown, false, State::Held),
            (false, true, Free, false, State::Stale),
            (false, true, Unknown, false, State::Stale),
            (false, true, Held, false, State::StaleButGuarded),
            (false, true, Held, true, State::Contested),
            (false, false, Free, true, State::Contested),
            (true, true, Held, false, State::Blank),
            (true, false, Free, false, State::Blank),
        ] {
            assert_eq!(State::of_epoch(blank, stale, guard, contested), state);
        }
    }
}
