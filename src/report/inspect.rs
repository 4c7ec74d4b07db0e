//! The text of `inspect`, for somebody who was woken up by it: what state, who, since when, what next.

use crate::record::Guard;
use crate::text::{Shown, duration, shell_word, time};

use super::document::{Alive, GuardReport, GuardState, Holder, Lock, Process, State, Unclear};
use super::page::{Ink, Paint, aligned};
use super::reclaim::{not_by_us, quarantine_rows};

/// Columns before a value.
const LABEL_WIDTH: usize = 14;

/// The state in words, with until when or since when: what `break` says as well.
pub fn headline(lock: &Lock) -> String {
    let overdue = lock.overdue_ms.map(|ms| format!(", overdue by {}", duration(ms))).unwrap_or_default();
    match lock.state {
        State::Free => "free".into(),
        State::Foreign => format!("foreign: {}", lock.foreign.as_deref().unwrap_or("not a withlock lock")),
        State::Stale if guard_state(lock) == Some(GuardState::Unknown) => format!("stale{overdue}, guard unknown"),
        State::Stale | State::StaleButGuarded => format!("{}{overdue}", lock.state.words()),
        State::Contested => match lock.contest.as_ref().and_then(|contest| contest.by.as_ref()) {
            Some(by) => format!("contested: pid {} on {} is ending it", by.pid, Shown::os(&by.host)),
            None => "contested: another process is ending it".into(),
        },
        State::Blank if lock.stale => match guard_state(lock) {
            Some(GuardState::Held) => format!("blank, stale but guarded{overdue}"),
            Some(GuardState::Unknown) => format!("blank, stale{overdue}, guard unknown"),
            _ => format!("blank, stale{overdue}"),
        },
        State::Blank => format!("blank, held{}", until(lock)),
        State::Held if lock.unreadable => "held: it may not be read, so it counts as held".into(),
        State::Held => format!("held{}", until(lock)),
    }
}

fn until(lock: &Lock) -> String {
    if let Some(ahead_ms) = lock.ahead_ms {
        return format!(", its time stamp lies {} in the future", duration(ahead_ms));
    }
    let renews = lock.holder.as_ref().is_none_or(|holder| holder.guard != Guard::None);
    let unless = if renews { " unless renewed" } else { "" };
    lock.expires_in_ms.map(|ms| format!(", expires in {}{unless}", duration(ms))).unwrap_or_default()
}

fn guard_state(lock: &Lock) -> Option<GuardState> {
    lock.guard.as_ref().map(|guard| guard.state)
}

fn ink(lock: &Lock) -> Ink {
    match lock.state {
        State::Stale => Ink::Red,
        State::Blank if lock.stale && guard_state(lock) != Some(GuardState::Held) => Ink::Red,
        State::StaleButGuarded | State::Contested | State::Blank | State::Foreign => Ink::Yellow,
        State::Held if lock.ahead_ms.is_some() || lock.unreadable => Ink::Yellow,
        State::Held | State::Free => Ink::Green,
    }
}

/// The page about some locks: where there are several an overview first, the worst on top.
pub fn page(locks: &[Lock], unclear: &[Unclear], now_ms: i64, paint: Paint) -> String {
    let mut sorted: Vec<&Lock> = locks.iter().collect();
    sorted.sort_by_key(|lock| lock.state);
    let mut blocks = Vec::new();
    if sorted.len() > 1 {
        blocks.push(overview(&sorted, now_ms, paint));
    }
    blocks.extend(sorted.iter().map(|lock| block(lock, now_ms, paint)));
    if !unclear.is_empty() {
        let mut lines = vec![paint.ink(Ink::Dim, "perhaps locks, named one by one they are inspected:")];
        let row = |file: &Unclear| vec![format!("  {}", Shown(&file.name.raw)), file.why.clone()];
        lines.extend(aligned(&unclear.iter().map(row).collect::<Vec<_>>()));
        blocks.push(lines.join("\n") + "\n");
    }
    blocks.join("\n")
}

fn overview(locks: &[&Lock], now_ms: i64, paint: Paint) -> String {
    let mut rows = vec![["STATE", "HELD FOR", "BY", "LOCK"].map(String::from).to_vec()];
    rows.extend(locks.iter().map(|lock| {
        let by = lock.holder.as_ref().map_or_else(
            || "-".into(),
            |holder| format!("{} pid {} on {}", Shown::os(&holder.command), holder.pid, Shown::os(&holder.host)),
        );
        let held = lock.held_since_ms.map_or_else(|| "-".into(), |since_ms| length(now_ms, since_ms));
        vec![lock.state.words().into(), held, by, Shown(&lock.name.raw).to_string()]
    }));
    let mut text = String::new();
    for (index, line) in aligned(&rows).iter().enumerate() {
        match index.checked_sub(1).and_then(|index| locks.get(index)) {
            // Painted last: a colour would count as columns.
            Some(lock) => {
                let (state, rest) = line.split_at(lock.state.words().len().min(line.len()));
                text.push_str(&paint.ink(ink(lock), state));
                text.push_str(rest);
            }
            None => text.push_str(&paint.ink(Ink::Dim, line)),
        }
        text.push('\n');
    }
    text
}

fn block(lock: &Lock, now_ms: i64, paint: Paint) -> String {
    let path = Shown(&lock.name.raw).to_string();
    let mut block = Block { text: String::new(), now_ms, paint };
    let headline = paint.ink(ink(lock), &headline(lock));
    block.text.push_str(&format!("{}: {headline}\n", paint.ink(Ink::Bold, &path)));
    for note in notes(lock) {
        block.text.push_str(&format!("  {note}\n"));
    }
    if let Some(holder) = &lock.holder {
        block.holder(holder);
    }
    block.times(lock);
    if let Some(guard) = &lock.guard {
        block.guard(guard, lock.holder.as_ref());
    }
    if let Some(holder) = &lock.holder {
        block.line("nonce", &holder.nonce);
    }
    if let (true, Some(file)) = (lock.holder.is_none(), &lock.file) {
        let user = user(file.user.as_deref(), Some(file.uid));
        block.line("file", &format!("owner {user}, mode {}, {} bytes", file.mode, file.size_bytes));
    }
    for next in &lock.next {
        block.line("next", &paint.ink(Ink::Bold, next));
    }
    if let Some(error) = &lock.quarantine_error {
        block.line("quarantine", &format!("cannot be listed: {error}"));
    }
    if !lock.quarantine.is_empty() {
        let count = lock.quarantine.len();
        block.line("quarantine", &format!("{count} ended {}", if count == 1 { "epoch" } else { "epochs" }));
        for row in aligned(&quarantine_rows(&lock.quarantine, now_ms)) {
            block.text.push_str(&format!("    {row}\n"));
        }
        for reason in not_by_us(&lock.quarantine) {
            block.text.push_str(&format!("    not by us: {reason}\n"));
        }
    }
    block.text
}

/// What a state means, where it does not speak for itself.
fn notes(lock: &Lock) -> Vec<String> {
    let ttl = lock.ttl_ms.map(duration).unwrap_or_default();
    let mut notes = Vec::new();
    match lock.state {
        State::StaleButGuarded => notes.push("It was not renewed, but a process still vouches for it: nobody takes it before those with its guard have ended.".into()),
        State::Stale if lock.ahead_ms.is_none() => notes.push("It was not renewed; the next contender ends it.".into()),
        State::Contested => {
            if let Some(contest) = &lock.contest {
                let age = duration(u64::try_from(contest.age_ms).unwrap_or(0));
                let left = duration(contest.passed_over_in_ms);
                notes.push(format!(
                    "Begun {age} ago. Should it be stuck: it is passed over once it has ended, and by force in {left}."
                ));
            }
        }
        State::Blank => notes.push(format!(
            "It has no record, or a broken one: its maker died while writing it, or writes it just now. It is judged by its time stamp, with a ttl of {ttl}."
        )),
        State::Foreign => notes.push("What is there is never touched.".into()),
        State::Held | State::Stale | State::Free => {}
    }
    if lock.ahead_ms.is_some() {
        notes.push(format!(
            "A clock was set back: its age says nothing. Whoever watches it unchanged for its ttl ({ttl}) may end it."
        ));
    }
    if let Some(why) = &lock.may_not_break
        && !lock.unreadable
        && (lock.state != State::Held || lock.ahead_ms.is_some())
    {
        notes.push(format!("We may not end it: {why}."));
    }
    notes
}

struct Block {
    text: String,
    now_ms: i64,
    paint: Paint,
}

impl Block {
    fn line(&mut self, label: &str, value: &str) {
        let label = self.paint.ink(Ink::Dim, &format!("{label:LABEL_WIDTH$}"));
        self.text.push_str(&format!("  {label}{value}\n"));
    }

    fn holder(&mut self, holder: &Holder) {
        let alive = match (holder.alive, &holder.process) {
            (Some(Alive::RunsHere), Some(process)) => {
                format!(": runs here, {} ({})", process.state, state_words(process.state))
            }
            (Some(Alive::Zombie), _) => ": ended, its parent has not noticed yet".into(),
            (Some(Alive::NotHere), _) => ": no such process here, ended or of another pid namespace".into(),
            (Some(Alive::OtherHost), _) => ": another host, not seen from here".into(),
            (Some(Alive::EarlierBoot), _) => ": this host was started anew since".into(),
            _ => String::new(),
        };
        self.line("holder", &format!("pid {} on {}{alive}", holder.pid, Shown::os(&holder.host)));
        self.line("user", &user(holder.user.as_deref(), Some(holder.uid)));
        self.line("command", &Shown::os(&holder.command).to_string());
        if let Some(label) = &holder.label {
            self.line("label", &Shown::os(label).to_string());
        }
        if let Some(fence) = holder.fence {
            self.line("fence", &fence.to_string());
        }
    }

    fn times(&mut self, lock: &Lock) {
        let at = |ms: i64| time(ms);
        let mut rows = Vec::new();
        if let Some(since_ms) = lock.held_since_ms {
            rows.push(("held since", ago(self.now_ms, since_ms), at(since_ms), String::new()));
        }
        if let Some(renewed_ms) = lock.renewed_at_ms {
            let label = if lock.holder.is_some() { "last renewed" } else { "time stamp" };
            rows.push((label, ago(self.now_ms, renewed_ms), at(renewed_ms), String::new()));
        }
        let ttl = lock.ttl_ms.map(|ms| format!("(ttl {})", duration(ms))).unwrap_or_default();
        let by_ms = |ms: u64| i64::try_from(ms).unwrap_or(i64::MAX);
        match (lock.overdue_ms, lock.expires_in_ms, lock.ttl_ms) {
            (Some(ms), _, _) => rows.push((
                "stale since",
                format!("{} ago", duration(ms)),
                at(self.now_ms.saturating_sub(by_ms(ms))),
                ttl,
            )),
            (None, Some(ms), _) if lock.ahead_ms.is_none() => {
                rows.push(("expires", format!("in {}", duration(ms)), at(self.now_ms.saturating_add(by_ms(ms))), ttl));
            }
            (None, _, Some(ms)) => rows.push(("ttl", duration(ms), String::new(), String::new())),
            _ => {}
        }
        let cells: Vec<Vec<String>> = rows.iter().map(|(_, a, b, c)| vec![a.clone(), b.clone(), c.clone()]).collect();
        for ((label, ..), row) in rows.iter().zip(aligned(&cells)) {
            self.line(label, &row);
        }
    }

    fn guard(&mut self, guard: &GuardReport, holder: Option<&Holder>) {
        let taken = guard.taken_by_pid.map(|pid| format!(" (taken by pid {pid})")).unwrap_or_default();
        let words = match (guard.state, guard.processes.len()) {
            (GuardState::Unknown, _) => {
                "guard unknown: the processes of other users or other pid namespaces are not seen from here".into()
            }
            (GuardState::Free, _) if holder.is_some_and(|holder| holder.guard == Guard::None) => {
                "none: its holder has no guard, its age alone counts".into()
            }
            (GuardState::Free, _) => "free: no process vouches for it".into(),
            (GuardState::Held, 0) => format!("held, by whom is not seen from here{taken}"),
            (GuardState::Held, count) => {
                let processes = if count == 1 { "1 process".into() } else { format!("{count} processes") };
                let more = if guard.perhaps_more { ", perhaps more that cannot be seen" } else { "" };
                format!("held by {processes}{more}")
            }
        };
        self.line("guard", &words);
        if !guard.processes.is_empty() {
            let mut rows =
                vec![["PID", "COMMAND", "USER", "STATE", "CPU", "RUNNING SINCE", ""].map(String::from).to_vec()];
            rows.extend(guard.processes.iter().map(|process| process_row(process, self.now_ms)));
            for row in aligned(&rows) {
                self.text.push_str(&format!("    {row}\n"));
            }
        }
    }
}

fn process_row(process: &Process, now_ms: i64) -> Vec<String> {
    vec![
        process.pid.to_string(),
        Shown::os(&process.command).to_string(),
        user(process.user.as_deref(), process.uid),
        format!("{} {}", process.state, state_words(process.state)),
        duration(process.cpu_ms),
        ago(now_ms, process.running_since_ms),
        time(process.running_since_ms),
    ]
}

fn state_words(state: char) -> &'static str {
    match state {
        'R' => "running",
        'S' | 'I' => "sleeping",
        'D' => "waiting for a device",
        'T' => "stopped",
        't' => "stopped by a debugger",
        'Z' | 'X' => "ended",
        _ => "unknown",
    }
}

/// `deploy (1000)`, or the bare number.
pub(super) fn user(name: Option<&str>, uid: Option<u32>) -> String {
    match (name, uid) {
        (Some(name), Some(uid)) => format!("{} ({uid})", Shown::os(name)),
        (None, Some(uid)) => format!("uid {uid}"),
        _ => "unknown".into(),
    }
}

fn length(now_ms: i64, since_ms: i64) -> String {
    u64::try_from(now_ms.saturating_sub(since_ms)).map_or_else(|_| "-".into(), duration)
}

/// `2m 5s ago`; `3s ahead` where clocks disagree.
pub(super) fn ago(now_ms: i64, at_ms: i64) -> String {
    match u64::try_from(now_ms.saturating_sub(at_ms)) {
        Ok(ago_ms) => format!("{} ago", duration(ago_ms)),
        Err(_) => format!("{} ahead", duration(at_ms.saturating_sub(now_ms).unsigned_abs())),
    }
}

/// The line to type that ends exactly this epoch, if it is stale.
pub fn break_line(path: &[u8], nonce: Option<&str>) -> String {
    let only = nonce.map(|nonce| format!(" --nonce {nonce}")).unwrap_or_default();
    format!("withlock break{only} {}", argument(path))
}

/// A path as an argument: never taken for an option.
pub fn argument(path: &[u8]) -> String {
    if path.starts_with(b"-") { shell_word(&[b"./", path].concat()) } else { shell_word(path) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Nonce, Record, VERSION};

    const NOW_MS: i64 = 1_700_000_600_000;

    fn stale_but_guarded() -> Lock {
        let record = Record {
            version: VERSION,
            nonce: Nonce::from_bytes([0xab; 16]),
            claimed_at_ms: 1_700_000_000_000,
            ttl_ms: 60_000,
            host: "web1".into(),
            boot_id: String::new(),
            pid: 4711,
            pid_started: 1,
            uid: 1000,
            command: "backup.sh".into(),
            guard: Guard::Inherited,
            dev: 1,
            label: Some("nightly\x1b[2J".into()),
            fence: Some(17),
        };
        let mut lock = Lock::free("/run/lock/backup.lock");
        lock.state = State::StaleButGuarded;
        lock.stale = true;
        lock.holder = Some(Holder { alive: Some(Alive::NotHere), ..Holder::of(&record, Some("deploy".into())) });
        lock.held_since_ms = Some(1_700_000_000_000);
        lock.renewed_at_ms = Some(1_700_000_500_000);
        lock.ttl_ms = Some(60_000);
        lock.overdue_ms = Some(40_000);
        let process = Process {
            pid: 4712,
            command: "rsync".into(),
            state: 'D',
            uid: Some(1000),
            user: Some("deploy".into()),
            running_since_ms: 1_700_000_001_000,
            cpu_ms: 72_500,
        };
        let (state, processes) = (GuardState::Held, vec![process]);
        lock.guard = Some(GuardReport { state, processes, perhaps_more: false, taken_by_pid: Some(4711) });
        lock
    }

    #[test]
    fn a_page_is_aligned_says_the_state_first_and_escapes_what_is_foreign() {
        let lock = stale_but_guarded();
        let expected = "\
/run/lock/backup.lock: stale but guarded, overdue by 40s
  It was not renewed, but a process still vouches for it: nobody takes it before those with its guard have ended.
  holder        pid 4711 on web1: no such process here, ended or of another pid namespace
  user          deploy (1000)
  command       backup.sh
  label         nightly\\x1b[2J
  fence         17
  held since    10m ago     2023-11-14T22:13:20Z
  last renewed  1m 40s ago  2023-11-14T22:21:40Z
  stale since   40s ago     2023-11-14T22:22:40Z  (ttl 1m)
  guard         held by 1 process
    PID   COMMAND  USER           STATE                   CPU     RUNNING SINCE
    4712  rsync    deploy (1000)  D waiting for a device  1m 12s  9m 59s ago     2023-11-14T22:13:21Z
  nonce         abababababababababababababababab
";
        assert_eq!(page(&[lock], &[], NOW_MS, Paint::PLAIN), expected);
    }

    #[test]
    fn of_several_locks_there_is_an_overview_the_worst_on_top() {
        let page = page(&[Lock::free("b.lock"), stale_but_guarded()], &[], NOW_MS, Paint::PLAIN);
        let lines: Vec<&str> = page.lines().take(3).collect();
        assert_eq!(
            lines,
            [
                "STATE              HELD FOR  BY                          LOCK",
                "stale but guarded  10m       backup.sh pid 4711 on web1  /run/lock/backup.lock",
                "free               -         -                           b.lock",
            ]
        );
    }

    #[test]
    fn a_path_is_never_taken_for_an_option() {
        assert_eq!(break_line(b"-n", None), "withlock break ./-n");
        assert_eq!(break_line(b"/a b", Some("ab")), "withlock break --nonce ab '/a b'");
    }
}
