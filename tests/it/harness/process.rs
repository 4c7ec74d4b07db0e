//! Processes as /proc shows them.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;

use super::sandbox::MARK;

/// One process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    pub(crate) parent: i32,
    pub(crate) name: String,
    /// R, S, D, T, Z…
    pub(crate) state: char,
    /// User and system time, in clock ticks.
    ticks: u64,
}

/// What /proc says of `pid`, if it exists.
pub(crate) fn process(pid: i32) -> Option<Process> {
    let text = fs::read(format!("/proc/{pid}/stat")).ok()?;
    let text = String::from_utf8_lossy(&text);
    // The name may contain anything, also parentheses: the last one ends it.
    let (head, tail) = text.rsplit_once(") ")?;
    let name = head.split_once('(')?.1.to_owned();
    let fields: Vec<&str> = tail.split_whitespace().collect();
    let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
    Some(Process {
        pid,
        parent: fields.get(1)?.parse().ok()?,
        name,
        state: fields.first()?.chars().next()?,
        ticks: number(11)? + number(12)?,
    })
}

fn all() -> Vec<Process> {
    let pids = fs::read_dir("/proc").expect("/proc").filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter_map(process).collect()
}

/// The direct children of `pid`.
pub(crate) fn children(pid: i32) -> Vec<Process> {
    all().into_iter().filter(|process| process.parent == pid).collect()
}

/// All descendants of `pid`.
pub(crate) fn descendants(pid: i32) -> Vec<Process> {
    let mut by_parent: BTreeMap<i32, Vec<Process>> = BTreeMap::new();
    for process in all() {
        by_parent.entry(process.parent).or_default().push(process);
    }
    let mut found = Vec::new();
    let mut next = vec![pid];
    while let Some(parent) = next.pop() {
        for process in by_parent.remove(&parent).unwrap_or_default() {
            next.push(process.pid);
            found.push(process);
        }
    }
    found
}

/// Living processes with this mark in the environment that they were started with.
pub(crate) fn marked(mark: &str) -> Vec<Process> {
    let wanted = format!("{MARK}={mark}");
    let has_mark = |process: &Process| {
        let environment = fs::read(format!("/proc/{}/environ", process.pid)).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|entry| entry == wanted.as_bytes())
    };
    all().into_iter().filter(|process| process.state != 'Z').filter(has_mark).collect()
}

/// Kills everything with this mark, however often it forks meanwhile.
pub(crate) fn kill_marked(mark: &str) {
    for _ in 0..2_000 {
        let left = marked(mark);
        if left.is_empty() {
            return;
        }
        for process in left {
            let _ = kill(Pid::from_raw(process.pid), Signal::SIGKILL);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    eprintln!("could not be killed: {:?}", marked(mark));
}

/// Whether one of the threads of `pid` sleeps in flock(2).
pub(crate) fn asleep_in_flock(pid: i32) -> Result<(), String> {
    asleep_in(pid, &[nix::libc::SYS_flock])
}

/// Whether one of the threads of `pid` sleeps in one of these system calls.
pub(crate) fn asleep_in(pid: i32, calls: &[i64]) -> Result<(), String> {
    let wanted: Vec<String> = calls.iter().map(ToString::to_string).collect();
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).map_err(|error| error.to_string())?;
    let mut seen = Vec::new();
    for task in tasks.filter_map(Result::ok) {
        let call = fs::read_to_string(task.path().join("syscall")).unwrap_or_default();
        if call.split(' ').next().is_some_and(|number| wanted.iter().any(|wanted| wanted == number)) {
            return Ok(());
        }
        seen.push(call.trim().to_owned());
    }
    Err(format!("system calls of {pid}: {seen:?}"))
}

/// The CPU time that all threads of `pid` have used, to the nanosecond.
pub(crate) fn cpu_time(pid: i32) -> Option<Duration> {
    let mut total_ns = 0;
    for task in fs::read_dir(format!("/proc/{pid}/task")).ok()?.filter_map(Result::ok) {
        let text = fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
        total_ns += text.split(' ').next().and_then(|field| field.parse::<u64>().ok()).unwrap_or(0);
    }
    Some(Duration::from_nanos(total_ns))
}

/// The CPU time of a process that ended and was not yet reaped, to the clock tick.
pub(crate) fn final_cpu_time(pid: i32) -> Duration {
    // Linux shows ticks of 10 ms to user space on every architecture in use.
    Duration::from_millis(process(pid).map_or(0, |process| process.ticks) * 10)
}

/// A line of /proc/PID/status, without its name.
pub(crate) fn status_field(pid: i32, name: &str) -> Option<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    text.lines().find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(':')?.trim().to_owned()))
}

/// Sends a signal to one process.
#[track_caller]
pub(crate) fn send(pid: i32, signal: Signal) {
    kill(Pid::from_raw(pid), signal).unwrap_or_else(|error| panic!("{signal} to {pid}: {error}"));
}

/// Sends a signal to a process group.
#[track_caller]
pub(crate) fn send_to_group(group: i32, signal: Signal) {
    killpg(Pid::from_raw(group), signal).unwrap_or_else(|error| panic!("{signal} to group {group}: {error}"));
}
