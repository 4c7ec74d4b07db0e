//! Running the tools, and noting the time.

use std::ffi::OsString;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::Pid;

/// A lock tool, called as TOOL [OPTIONS] LOCK COMMAND.
pub(crate) struct Tool {
    pub(crate) name: &'static str,
    program: PathBuf,
    options: &'static [&'static str],
    /// It looks about once a second instead of waiting: not measured where that would only show the pace.
    pub(crate) polls: bool,
}

/// Peers, with the options that make them wait for the lock.
const PEERS: &[(&str, &[&str], bool)] = &[
    ("flock", &[], false),
    ("setlock", &[], false),
    ("chpst", &["-l"], false),
    ("lckdo", &["-w"], false),
    ("dotlockfile", &["-l", "-p", "-P", "-r", "-1", "-i", "1"], true),
];

impl Tool {
    /// The shipped program, and all peers that are installed. `dir` is where it is built, unless it was.
    pub(crate) fn all(dir: &Path) -> Vec<Tool> {
        let program = std::env::var_os("WITHLOCK_SHIPPED").map_or_else(|| build(dir), PathBuf::from);
        let mut tools = vec![Tool { name: "withlock", program, options: &[], polls: false }];
        tools.extend(PEERS.iter().filter_map(|(name, options, polls)| {
            let program = find(name)?;
            Some(Tool { name, program, options, polls: *polls })
        }));
        tools
    }

    /// The same, but ours takes the lock of a dead holder at once, as the others do anyway.
    pub(crate) fn that_evicts_the_dead(&self) -> Tool {
        let options = if self.name == "withlock" { &["--evict-dead"] } else { self.options };
        Tool { name: self.name, program: self.program.clone(), options, polls: self.polls }
    }

    /// Runs the program with these words and nothing else.
    pub(crate) fn run_alone(&self, words: &[OsString]) {
        let status = Command::new(&self.program).args(words).stdout(Stdio::null()).status().expect("the program");
        assert!(status.success(), "{words:?}: {status}");
    }

    /// Peers that are not installed.
    pub(crate) fn absent() -> Vec<&'static str> {
        PEERS.iter().map(|(name, ..)| *name).filter(|name| find(name).is_none()).collect()
    }
}

fn find(name: &str) -> Option<PathBuf> {
    std::env::split_paths(&std::env::var_os("PATH")?).map(|dir| dir.join(name)).find(|path| path.is_file())
}

/// The program as it is shipped: this bench is built with the tests' switches.
fn build(_dir: &Path) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo).args(["build", "--quiet", "--release"]).current_dir(root).status().expect("cargo");
    assert!(status.success(), "the release build failed");
    root.join("target/release/withlock")
}

/// A running tool.
pub(crate) struct Job(Child);

impl Job {
    pub(crate) fn start(tool: &Tool, lock: &Path, command: &[OsString]) -> Job {
        Self::spawn(tool, lock, command, Stdio::null())
    }

    /// Its command gets an input that is open until [`Job::close_input`].
    pub(crate) fn start_with_input(tool: &Tool, lock: &Path, command: &[OsString]) -> Job {
        Self::spawn(tool, lock, command, Stdio::piped())
    }

    fn spawn(tool: &Tool, lock: &Path, command: &[OsString], input: Stdio) -> Job {
        let child = Command::new(&tool.program)
            .args(tool.options)
            .arg(lock)
            .args(command)
            .stdin(input)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        Job(child.unwrap_or_else(|error| panic!("{}: {error}", tool.name)))
    }

    pub(crate) fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Waits until it sleeps: it waits for the lock, or for its command.
    pub(crate) fn settle(&self) {
        let begun = Instant::now();
        let mut asleep = 0;
        while asleep < 5 && begun.elapsed() < Duration::from_secs(5) {
            let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid())).unwrap_or_default();
            let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
            asleep = if state == Some('S') { asleep + 1 } else { 0 };
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    pub(crate) fn close_input(&mut self) {
        drop(self.0.stdin.take());
    }

    pub(crate) fn wait(mut self) -> ExitStatus {
        self.0.wait().expect("its status")
    }

    /// Kills it and, if that is a process of its own, its command, at once.
    pub(crate) fn kill_with_command(self) {
        let pid = self.pid();
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        let command = children.split_whitespace().filter_map(|child| child.parse().ok()).map(Pid::from_raw);
        for process in command.chain(i32::try_from(pid).map(Pid::from_raw)) {
            let _ = kill(process, Signal::SIGKILL);
        }
        self.wait();
    }

    pub(crate) fn kill(mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Contenders that run `true` under one lock, again and again.
pub(crate) struct Contest<'a> {
    pub(crate) tool: &'a Tool,
    pub(crate) lock: PathBuf,
    pub(crate) contenders: usize,
    pub(crate) sections: usize,
}

impl Contest<'_> {
    /// Microseconds per section, and the slowest contender's time by the fastest's.
    pub(crate) fn run(&self) -> (f64, f64) {
        let begun = Instant::now();
        let times: Vec<f64> = std::thread::scope(|scope| {
            let contender = || {
                for _ in 0..self.sections {
                    let status = Job::start(self.tool, &self.lock, &["true".into()]).wait();
                    assert!(status.success(), "{}: {status}", self.tool.name);
                }
                begun.elapsed().as_secs_f64()
            };
            let threads: Vec<_> = (0..self.contenders).map(|_| scope.spawn(contender)).collect();
            threads.into_iter().map(|thread| thread.join().expect("a contender")).collect()
        });
        let (fastest, slowest) = (quantile(&times, 0.0), quantile(&times, 1.0));
        let sections = u32::try_from(self.contenders * self.sections).expect("few");
        (begun.elapsed().as_secs_f64() * 1e6 / f64::from(sections), slowest / fastest)
    }
}

pub(crate) fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("the clock");
    u64::try_from(now.tv_sec()).expect("positive") * 1_000_000_000 + u64::try_from(now.tv_nsec()).expect("positive")
}

/// The measured command: notes the time of its start and, when its input ends, that of its end.
pub(crate) fn stamp_and_exit(path: &Path) -> ! {
    let started_ns = monotonic_ns();
    let mut file = fs::OpenOptions::new().create(true).append(true).open(path).expect("the notes");
    writeln!(file, "{started_ns}").expect("a note");
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    let _ = writeln!(file, "{}", monotonic_ns());
    std::process::exit(0)
}

/// The time in line `number` of the notes, once it is there.
pub(crate) fn wait_for_line(path: &Path, number: usize) -> u64 {
    let begun = Instant::now();
    loop {
        let notes = fs::read_to_string(path).unwrap_or_default();
        let mut whole = notes.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        if let Some(line) = whole.nth(number - 1) {
            return line.trim().parse().expect("a time");
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "{}: line {number} did not come", path.display());
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// User and system time of a process so far.
pub(crate) fn cpu_time(pid: u32) -> Duration {
    let tasks = fs::read_to_string(format!("/proc/{pid}/schedstat")).unwrap_or_default();
    let main_ns = tasks.split_whitespace().next().and_then(|ns| ns.parse().ok()).unwrap_or(0);
    let others = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let other_ns: u64 = others
        .filter(|task| task.file_name().to_string_lossy() != pid.to_string())
        .filter_map(|task| {
            fs::read_to_string(task.path().join("schedstat")).ok()?.split_whitespace().next()?.parse::<u64>().ok()
        })
        .sum();
    Duration::from_nanos(main_ns + other_ns)
}

pub(crate) fn quantile(values: &[f64], at: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let index = ((sorted.len() as f64) * at) as usize;
    sorted[index.min(sorted.len() - 1)]
}
