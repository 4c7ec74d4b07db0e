//! strace(1): kill or delay a program at one of its system calls, and count them.

use std::path::Path;

use super::run::Run;

/// One system call of a trace: its name, the whole line, and which one of its name it was, from 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) name: String,
    pub(crate) line: String,
    pub(crate) nth: usize,
}

impl Run<'_> {
    /// Under strace, with these options; the trace goes to `log`. The program keeps the pid that
    /// [`super::Running::pid`] tells, and its own parent: the tracer stands aside, in a session of its own (`-DDD`).
    ///
    /// strace has itself killed by an alarm when that takes it more than three seconds, which happens on a busy
    /// machine: so the alarm is blocked.
    pub(crate) fn traced(self, log: &Path, options: &[&str]) -> Self {
        self.traced_through(&["env", "--block-signal=ALRM"], log, options)
    }

    /// The same, with no signal blocked.
    pub(crate) fn traced_with_all_signals(self, log: &Path, options: &[&str]) -> Self {
        self.traced_through(&[], log, options)
    }

    fn traced_through(self, before: &[&str], log: &Path, options: &[&str]) -> Self {
        let strace = ["strace", "-DDD", "-qq", "-s", "256", "-o"];
        let front = before.iter().copied().chain(strace).map(std::ffi::OsStr::new);
        let options = options.iter().map(std::ffi::OsStr::new);
        self.through(front.chain([log.as_os_str()]).chain(options).collect::<Vec<_>>())
    }

    /// Delays each of these calls (comma-separated) by so many milliseconds before it is made.
    pub(crate) fn delayed(self, log: &Path, calls: &str, delay_ms: u32) -> Self {
        let inject = format!("inject={calls}:delay_enter={delay_ms}000");
        self.traced(log, &["-e", &format!("trace={calls}"), "-e", &inject])
    }
}

/// The calls in a trace written without `-f`.
pub(crate) fn calls(log: &Path) -> Vec<Call> {
    let text = String::from_utf8_lossy(&std::fs::read(log).unwrap_or_default()).into_owned();
    let mut counts = std::collections::HashMap::new();
    text.lines()
        .filter_map(|line| {
            let name = line.split_once('(')?.0;
            let plain = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
            (plain && !name.is_empty()).then(|| {
                let nth = counts.entry(name.to_owned()).and_modify(|count| *count += 1).or_insert(1);
                Call { name: name.to_owned(), line: line.to_owned(), nth: *nth }
            })
        })
        .collect()
}
