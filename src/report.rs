//! What is said to people about a lock, and to programs.

pub mod document;
pub mod inspect;
pub mod log;
pub mod page;
pub mod reclaim;

use crate::lease::BLANK_TTL_MS;
use crate::record::{Guard, Record};
use crate::text::{Shown, duration, shell_word, time};

use log::EvictedWhy;

/// What is known of a lock that another holds, for a line.
#[derive(Clone, Debug)]
pub struct BusyLock<'a> {
    /// The path as the user gave it.
    pub path: &'a [u8],
    /// The holder's record, where it can be read.
    pub record: Option<&'a Record>,
    /// The holder's user name, where it is known.
    pub user: Option<String>,
    /// When it was last renewed, in milliseconds since 1970.
    pub renewed_at_ms: Option<i64>,
    /// How long until it turns stale.
    pub expires_in_ms: Option<u64>,
    /// Anything unusual.
    pub note: Option<&'a str>,
    /// Now, in milliseconds since 1970.
    pub now_ms: i64,
}

impl BusyLock<'_> {
    /// One line: path, holder, since when, until when, and what to type next. `how` says in what way it
    /// was busy: "held", "still held after 5s".
    pub fn line(&self, how: &str) -> String {
        let mut line = format!("{}: {how} by ", Shown(self.path));
        match self.record {
            Some(record) => {
                line.push_str(&holder(record, self.user.as_deref()));
                let claimed_at_ms = i64::try_from(record.claimed_at_ms).unwrap_or(i64::MAX);
                line.push_str(&format!(" since {}", moment(claimed_at_ms, self.now_ms)));
            }
            None => {
                line.push_str("an unknown process");
                if let Some(at_ms) = self.renewed_at_ms {
                    line.push_str(&format!(" since {}", moment(at_ms, self.now_ms)));
                }
            }
        }
        if let Some(in_ms) = self.expires_in_ms {
            let renewed = self.record.is_none_or(|record| record.guard != Guard::None);
            let unless = if renewed { " unless renewed" } else { "" };
            line.push_str(&format!(", expires in {}{unless}", duration(in_ms)));
        }
        if let Some(note) = self.note {
            line.push_str(&format!(" ({note})"));
        }
        line.push_str(&format!("; next: withlock inspect {}", shell_word(self.path)));
        line
    }
}

/// What is known of a lock that was ended on the way, for a line.
#[derive(Clone, Debug)]
pub struct EvictedLock<'a> {
    /// The path as the user gave it.
    pub path: &'a [u8],
    /// Its record, if it had one.
    pub record: Option<&'a Record>,
    /// Its holder's user name, where it is known.
    pub user: Option<String>,
    /// By what right it was ended.
    pub why: EvictedWhy,
    /// Where its record lies now.
    pub lies_at: &'a [u8],
}

impl EvictedLock<'_> {
    /// One line: path, whose it was, why it was ended, where its record lies now.
    pub fn line(&self) -> String {
        let ttl = duration(self.record.map_or(BLANK_TTL_MS, Record::judged_ttl_ms));
        let (what, why) = match self.why {
            EvictedWhy::Stale => ("stale", format!("not renewed within its ttl, {ttl}")),
            EvictedWhy::Unchanged => ("stale", format!("unchanged for its ttl, {ttl}, by our own clock")),
            EvictedWhy::Dead => ("dead", "nobody lives who had its guard".into()),
        };
        let whose = match self.record {
            Some(record) => format!("of {}", holder(record, self.user.as_deref())),
            None => "without a record".into(),
        };
        let (path, lies_at) = (Shown(self.path), Shown(self.lies_at));
        format!("{path}: ended the {what} lock {whose}: {why}; its record lies in {lies_at}")
    }
}

/// `pid 4711 on web1 (user deploy, backup.sh)`. The number is shown, never believed.
pub fn holder(record: &Record, user: Option<&str>) -> String {
    let user = user.map_or_else(|| format!("uid {}", record.uid), |name| format!("user {}", Shown::os(name)));
    let label = record.label.as_deref().map_or_else(String::new, |label| format!(", label {}", Shown::os(label)));
    format!("pid {} on {} ({user}, {}{label})", record.pid, Shown::os(&record.host), Shown::os(&record.command))
}

/// `2026-03-01T02:03:04Z (2m 5s ago)`.
pub fn moment(at_ms: i64, now_ms: i64) -> String {
    let relative = match u64::try_from(now_ms.saturating_sub(at_ms)) {
        Ok(ago_ms) => format!("{} ago", duration(ago_ms)),
        Err(_) => format!("{} in the future", duration(at_ms.saturating_sub(now_ms).unsigned_abs())),
    };
    format!("{} ({relative})", time(at_ms))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Nonce, VERSION};

    fn record() -> Record {
        Record {
            version: VERSION,
            nonce: Nonce::from_bytes([1; 16]),
            claimed_at_ms: 1_700_000_000_000,
            ttl_ms: 60_000,
            host: "web1".into(),
            boot_id: String::new(),
            pid: 4711,
            pid_started: 1,
            uid: 1000,
            command: "evil\x1b[2J".into(),
            guard: Guard::Inherited,
            dev: 1,
            label: None,
            fence: None,
        }
    }

    #[test]
    fn a_busy_line_names_path_holder_since_expiry_and_the_next_step_and_escapes_what_is_foreign() {
        let record = record();
        let busy = BusyLock {
            path: b"/a b.lock",
            record: Some(&record),
            user: Some("deploy".into()),
            renewed_at_ms: Some(1_700_000_100_000),
            expires_in_ms: Some(48_000),
            note: None,
            now_ms: 1_700_000_125_000,
        };
        assert_eq!(
            busy.line("held"),
            "/a b.lock: held by pid 4711 on web1 (user deploy, evil\\x1b[2J) since 2023-11-14T22:13:20Z (2m 5s ago), \
             expires in 48s unless renewed; next: withlock inspect '/a b.lock'"
        );
    }

    #[test]
    fn a_busy_line_says_what_is_not_known() {
        let busy = BusyLock {
            path: b"L",
            record: None,
            user: None,
            renewed_at_ms: Some(2_000),
            expires_in_ms: None,
            note: Some("we may not read it, so it counts as held"),
            now_ms: 1_000,
        };
        assert_eq!(
            busy.line("still held after 5s"),
            "L: still held after 5s by an unknown process since 1970-01-01T00:00:02Z (1s in the future) \
             (we may not read it, so it counts as held); next: withlock inspect L"
        );
    }
}
