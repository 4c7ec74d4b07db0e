//! The log of a run (`--log-json`): one line of JSON for each event, versioned like the documents of
//! `inspect --json`, with the same words for the same things. Within a version fields and events are only
//! added.

use std::ffi::OsStr;

use serde::Serialize;

use super::document::{Holder, PathText};
use crate::record::Nonce;

/// The version of the schema.
pub const VERSION: u32 = 1;

/// What is the same in all lines of a run.
#[derive(Clone, Debug)]
pub struct Run {
    /// The host's name.
    pub host: String,
    /// The wrapper's pid.
    pub pid: u32,
    /// LOCK, absolute as far as that is known.
    pub lock: PathText,
    /// What the operator called it.
    pub label: Option<String>,
    /// Its nonce, once there is one.
    pub nonce: Option<Nonce>,
}

/// When something happened.
#[derive(Clone, Copy, Debug)]
pub struct At {
    /// By the wall clock, in milliseconds since 1970.
    pub wall_ms: u64,
    /// By the clock that counts from boot and is never set, in milliseconds.
    pub boot_ms: u64,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    /// The lock is another's, and the wait for it begins.
    Waiting(Other),
    /// A stale lock was ended on the way.
    Evicted {
        /// By what right.
        why: EvictedWhy,
        /// Whose it was.
        #[serde(skip_serializing_if = "Option::is_none")]
        holder: Option<Box<Holder>>,
        /// Where its record lies now.
        quarantine: PathText,
    },
    /// The lock is ours.
    Acquired {
        /// How long that took, from the first try.
        waited_ms: u64,
        /// The lease that was granted.
        ttl_ms: u64,
        /// The fencing token.
        #[serde(skip_serializing_if = "Option::is_none")]
        fence: Option<u64>,
    },
    /// The wait ended without it.
    Busy {
        /// How long it was.
        waited_ms: u64,
        /// Whose it is.
        #[serde(flatten)]
        other: Other,
        /// What then.
        on_busy: OnBusyWord,
    },
    /// An ancestor of this process holds the lock, and that ends the run.
    Nested(Other),
    /// An ancestor of this process holds the lock, and that counts.
    Reentered,
    /// A command was started.
    Started {
        /// Its base name; arguments carry secrets.
        command: String,
        /// Its pid.
        command_pid: i32,
    },
    /// The condition of `--skip-if` succeeded: the command is not run.
    NotNeeded,
    /// Another process wants to end the lock.
    Contested,
    /// A renewal failed, and is tried again soon.
    RenewalFailed {
        /// Why.
        why: String,
    },
    /// A renewal was confirmed that was due before.
    RenewedLate {
        /// How long after the one before it.
        after_ms: u64,
    },
    /// The lock is not ours any more.
    Lost {
        /// What was found instead.
        found: String,
    },
    /// The command is being ended by us.
    Ending {
        /// Why.
        why: EndingWhy,
    },
    /// A command ended.
    Ended {
        /// The status that it exited with.
        #[serde(skip_serializing_if = "Option::is_none")]
        status: Option<u8>,
        /// The signal that ended it.
        #[serde(skip_serializing_if = "Option::is_none")]
        signal: Option<i32>,
        /// How long it had run.
        ran_ms: u64,
    },
    /// The lock was given back.
    Released {
        /// How long it was held, from the beginning of the grant.
        held_ms: u64,
    },
    /// It could not be given back.
    NotReleased {
        /// Why not.
        why: String,
    },
    /// The run is over.
    Exit {
        /// Its exit code.
        code: u8,
        /// What went wrong, where that kept the command from being run.
        #[serde(skip_serializing_if = "Option::is_none")]
        error: Option<String>,
    },
}

/// Another's lock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Other {
    /// Who holds it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub holder: Option<Box<Holder>>,
    /// Since when.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held_since_ms: Option<i64>,
    /// When it was last renewed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub renewed_at_ms: Option<i64>,
    /// How long until it turns stale unless it is renewed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_in_ms: Option<u64>,
    /// Anything unusual about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// Why a lock was evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum EvictedWhy {
    /// It was older than its ttl.
    Stale,
    /// Its time stamp said nothing, and it did not change for its ttl.
    Unchanged,
    /// The kernel had dropped its guard (`--evict-dead`).
    Dead,
}

/// Why a command is ended by us.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum EndingWhy {
    /// The lock was lost.
    Lost,
    /// The lock expires, was not renewed, and others may get in.
    Expiring,
    /// It has run for `--max-hold`.
    MaxHold,
}

/// What is done when the wait ends without the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnBusyWord {
    /// Nothing.
    Fail,
    /// Nothing, and that counts as success.
    Skip,
    /// The command is run without the lock.
    Run,
}

#[derive(Serialize)]
struct Line<'a> {
    withlock_log: u32,
    #[serde(flatten)]
    event: &'a Event,
    at_ms: u64,
    boot_ms: u64,
    host: &'a str,
    pid: u32,
    #[serde(flatten)]
    lock: &'a PathText,
    #[serde(skip_serializing_if = "Option::is_none")]
    label: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    nonce: Option<Nonce>,
}

/// One lock of several, where an event is about one of them.
#[derive(Clone, Copy, Debug)]
pub struct About<'a> {
    /// Its path.
    pub lock: &'a OsStr,
    /// Its nonce, where it is ours.
    pub nonce: Option<Nonce>,
}

/// One line, with its line feed.
pub fn line(run: &Run, at: At, about: Option<About<'_>>, event: &Event) -> Vec<u8> {
    let named = about.map(|about| PathText::new(about.lock));
    let line = Line {
        withlock_log: VERSION,
        event,
        at_ms: at.wall_ms,
        boot_ms: at.boot_ms,
        host: &run.host,
        pid: run.pid,
        lock: named.as_ref().unwrap_or(&run.lock),
        label: run.label.as_deref(),
        nonce: about.map_or(run.nonce, |about| about.nonce),
    };
    // Strings and numbers: there is nothing in it that could fail.
    let mut text = serde_json::to_vec(&line).unwrap_or_default();
    text.push(b'\n');
    text
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    const AT: At = At { wall_ms: 1_700_000_000_000, boot_ms: 5_000 };

    fn run(lock: &OsStr) -> Run {
        Run { host: "web1".into(), pid: 7, lock: PathText::new(lock), label: None, nonce: None }
    }

    #[test]
    fn a_line_begins_with_its_version_and_event_and_is_one_line() {
        let ended = Event::Ended { status: Some(3), signal: None, ran_ms: 12 };
        let text = line(&run(OsStr::new("/a.lock")), AT, None, &ended);
        assert_eq!(
            String::from_utf8(text).unwrap(),
            "{\"withlock_log\":1,\"event\":\"ended\",\"status\":3,\"ran_ms\":12,\"at_ms\":1700000000000,\"boot_ms\":5000,\
             \"host\":\"web1\",\"pid\":7,\"path\":\"/a.lock\"}\n"
        );
    }

    #[test]
    fn what_is_not_utf8_can_be_read_back_and_control_characters_do_not_break_the_line() {
        let text = line(&run(OsStr::from_bytes(b"/\xff\n\x1b")), AT, None, &Event::Contested);
        assert_eq!(text.iter().filter(|byte| byte.is_ascii_control()).count(), 1, "the line feed at its end");
        let value: serde_json::Value = serde_json::from_slice(&text).unwrap();
        assert_eq!((&value["event"], &value["path_bytes"]), (&"contested".into(), &"2fff0a1b".into()));
    }
}
