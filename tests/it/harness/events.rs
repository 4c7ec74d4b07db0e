//! Events: what a test waits for, always with a deadline and never by a blind sleep.

use std::fmt::Debug;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::Mode;

/// How long anything may take that should happen at once. Far beyond what a loaded machine needs: it
/// only ends tests that hang.
pub(crate) const DEADLINE: Duration = Duration::from_secs(40);

/// Looks until `look` succeeds and returns what it found; what it last saw is told when the deadline
/// passes.
#[track_caller]
pub(crate) fn eventually<T, E: Debug>(what: &str, mut look: impl FnMut() -> Result<T, E>) -> T {
    let begun = Instant::now();
    loop {
        match look() {
            Ok(found) => return found,
            Err(seen) if begun.elapsed() > DEADLINE => {
                panic!("not within {DEADLINE:?}: {what}; last seen: {seen:?}")
            }
            // The pause between two looks at a condition that no descriptor can signal.
            Err(_) => std::thread::sleep(Duration::from_millis(2)),
        }
    }
}

/// Looks for the whole of `duration`: what must not happen does not.
#[track_caller]
pub(crate) fn never_during<E: Debug>(what: &str, duration: Duration, mut look: impl FnMut() -> Result<(), E>) {
    let begun = Instant::now();
    while begun.elapsed() < duration {
        if let Err(seen) = look() {
            panic!("after {:?}: {what}; seen: {seen:?}", begun.elapsed());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A FIFO that the test keeps open for reading and writing, so that nobody blocks in opening it.
pub(crate) struct Fifo {
    path: PathBuf,
    file: File,
    unread: Vec<u8>,
}

impl Fifo {
    pub(crate) fn make(path: PathBuf) -> Self {
        nix::unistd::mkfifo(&path, Mode::from_bits_truncate(0o666)).expect("mkfifo");
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(nix::libc::O_NONBLOCK)
            .open(&path)
            .expect("a FIFO can be opened");
        Fifo { path, file, unread: Vec::new() }
    }

    /// The path as text, for scripts.
    pub(crate) fn shown(&self) -> String {
        self.path.display().to_string()
    }

    /// Waits for the next line.
    #[track_caller]
    pub(crate) fn line(&mut self) -> String {
        self.line_within(DEADLINE).unwrap_or_else(|| panic!("no line came through {} in {DEADLINE:?}", self.shown()))
    }

    /// The next line, if one comes in time.
    pub(crate) fn line_within(&mut self, patience: Duration) -> Option<String> {
        let until = Instant::now() + patience;
        loop {
            if let Some(end) = self.unread.iter().position(|byte| *byte == b'\n') {
                let rest = self.unread.split_off(end + 1);
                let line = std::mem::replace(&mut self.unread, rest);
                return Some(String::from_utf8_lossy(&line[..end]).into_owned());
            }
            let left = until.checked_duration_since(Instant::now())?;
            readable_within(&self.file, left);
            let mut chunk = [0; 4096];
            match self.file.read(&mut chunk) {
                Ok(length) => self.unread.extend_from_slice(&chunk[..length]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => panic!("{}: {error}", self.shown()),
            }
        }
    }

    /// Writes a line.
    pub(crate) fn say(&mut self, line: &str) {
        self.file.write_all(format!("{line}\n").as_bytes()).expect("a FIFO takes a line");
    }
}

/// Waits until `file` can be read, at most so long; says whether it can.
pub(crate) fn readable_within(file: impl AsFd, patience: Duration) -> bool {
    let timeout = PollTimeout::try_from(patience.as_millis().max(1)).unwrap_or(PollTimeout::MAX);
    let mut fds = [PollFd::new(file.as_fd(), PollFlags::POLLIN)];
    matches!(poll(&mut fds, timeout), Ok(ready) if ready > 0)
}

/// A gate inside the lock: whoever comes says so and waits until the test lets it go on.
pub(crate) struct Gate {
    inside: Fifo,
    go: Fifo,
}

impl Gate {
    pub(crate) fn new(inside: Fifo, go: Fifo) -> Self {
        Gate { inside, go }
    }

    /// Shell text: says "inside" with the shell's pid, then waits to be let on.
    pub(crate) fn script(&self) -> String {
        format!("{}; {}", self.enter(), self.wait())
    }

    /// Shell text: says "inside" only.
    pub(crate) fn enter(&self) -> String {
        format!("echo $$ >{}", self.inside.shown())
    }

    /// Shell text: waits to be let on only.
    pub(crate) fn wait(&self) -> String {
        format!("read go <{}", self.go.shown())
    }

    /// Waits until somebody is inside; their pid.
    #[track_caller]
    pub(crate) fn wait_inside(&mut self) -> i32 {
        self.inside.line().trim().parse().expect("a pid")
    }

    /// Whether somebody comes inside within `patience`.
    pub(crate) fn somebody_within(&mut self, patience: Duration) -> bool {
        self.inside.line_within(patience).is_some()
    }

    /// Lets one on.
    pub(crate) fn open(&mut self) {
        self.go.say("go");
    }
}

/// Random moments, the same again for the same seed. The seed is printed; `TEST_SEED` sets it.
pub(crate) struct Moments {
    state: u64,
}

impl Moments {
    pub(crate) fn new(what: &str) -> Self {
        let given = std::env::var("TEST_SEED").ok().and_then(|text| text.parse().ok());
        let clock = std::time::UNIX_EPOCH.elapsed().map_or(1, |since| u64::from(since.subsec_nanos()));
        let state = given.unwrap_or(clock ^ u64::from(std::process::id()) << 32);
        println!("{what}: TEST_SEED={state}");
        Moments { state }
    }

    /// The next number (SplitMix64).
    pub(crate) fn number(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A moment within `span`.
    pub(crate) fn within(&mut self, span: Duration) -> Duration {
        let span_ns = u64::try_from(span.as_nanos()).expect("a short span").max(1);
        Duration::from_nanos(self.number() % span_ns)
    }
}
