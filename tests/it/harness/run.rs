//! Programs started in a sandbox, and how they ended.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;

use super::events::DEADLINE;
use super::sandbox::{MARK, Sandbox};
use super::{eventually, process};

/// What is to be started. Standard input is empty unless told otherwise; both outputs go into files, so
/// that nobody waits for a background process that kept one open.
pub(crate) struct Run<'s> {
    sandbox: &'s Sandbox,
    argv: Vec<OsString>,
    stdin: Stdio,
    stdout: Option<Stdio>,
    stderr: Option<Stdio>,
    environment: Vec<(OsString, OsString)>,
    own_group: bool,
}

impl<'s> Run<'s> {
    pub(crate) fn new(sandbox: &'s Sandbox, program: impl AsRef<OsStr>) -> Self {
        Run {
            sandbox,
            argv: vec![program.as_ref().to_owned()],
            stdin: Stdio::null(),
            stdout: None,
            stderr: None,
            environment: Vec::new(),
            own_group: false,
        }
    }

    pub(crate) fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.argv.push(arg.as_ref().to_owned());
        self
    }

    pub(crate) fn args<A: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.argv.extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    /// The sandbox's usual lock as the next argument.
    pub(crate) fn lock(self) -> Self {
        let lock = self.sandbox.lock();
        self.arg(lock)
    }

    /// `-- sh -c TEXT` as the last arguments.
    pub(crate) fn sh(self, text: impl AsRef<OsStr>) -> Self {
        self.args(["--", "/bin/sh", "-c"]).arg(text)
    }

    pub(crate) fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.environment.push((name.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// Leaves these steps of the protocol out (test builds only): for negative controls.
    pub(crate) fn leave_out(self, steps: &str) -> Self {
        self.env("WITHLOCK_LEAVE_OUT", steps)
    }

    /// Starts what there is so far through another program: `setpriv`, `unshare`, `strace`…
    pub(crate) fn through<A: AsRef<OsStr>>(mut self, front: impl IntoIterator<Item = A>) -> Self {
        self.argv.splice(0..0, front.into_iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    /// Run by the user `nobody`.
    pub(crate) fn run_by_nobody(self) -> Self {
        self.through(["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"])
    }

    pub(crate) fn stdin(mut self, stdin: impl Into<Stdio>) -> Self {
        self.stdin = stdin.into();
        self
    }

    /// These bytes as standard input.
    pub(crate) fn input(self, bytes: &[u8]) -> Self {
        let path = self.sandbox.io_path("in");
        fs::write(&path, bytes).expect("input");
        self.stdin(File::open(path).expect("input"))
    }

    pub(crate) fn stdout(mut self, stdout: impl Into<Stdio>) -> Self {
        self.stdout = Some(stdout.into());
        self
    }

    pub(crate) fn stderr(mut self, stderr: impl Into<Stdio>) -> Self {
        self.stderr = Some(stderr.into());
        self
    }

    /// As the leader of a process group of its own.
    pub(crate) fn own_group(mut self) -> Self {
        self.own_group = true;
        self
    }

    /// Starts it.
    #[track_caller]
    pub(crate) fn start(self) -> Running {
        let shown = self.argv.iter().map(|arg| arg.to_string_lossy()).collect::<Vec<_>>().join(" ");
        let mut command = Command::new(&self.argv[0]);
        command.args(&self.argv[1..]).current_dir(self.sandbox.work()).stdin(self.stdin);
        // The same for everybody who runs the tests, and nothing of cargo's: its library path, for one,
        // makes every start of a program many times as long.
        command.env_clear().env(MARK, self.sandbox.mark()).env("LC_ALL", "C").env("HOME", "/");
        command.env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        command.env("WL", env!("CARGO_BIN_EXE_withlock")).env("L", self.sandbox.lock()).envs(self.environment);
        if self.own_group {
            command.process_group(0);
        }
        let (out, err) = (self.sandbox.io_path("out"), self.sandbox.io_path("err"));
        let sink = |given: Option<Stdio>, path: &Path| match given {
            Some(stdio) => stdio,
            None => File::create(path).expect("an output").into(),
        };
        command.stdout(sink(self.stdout, &out)).stderr(sink(self.stderr, &err));
        let begun = Instant::now();
        let child = command.spawn().unwrap_or_else(|error| panic!("{shown}: {error}"));
        let pid = i32::try_from(child.id()).expect("a pid");
        let (tell, ended) = channel();
        std::thread::spawn(move || {
            // Not reaped here: its pid stays its own until the test has seen the end.
            let _ = waitid(Id::Pid(Pid::from_raw(pid)), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT);
            let _ = tell.send(Instant::now());
        });
        Running { child: Some(child), pid, ended, out, err, shown, begun }
    }

    /// Starts it and waits for its end.
    #[track_caller]
    pub(crate) fn run(self) -> Finished {
        self.start().wait()
    }
}

/// Something that was started. Dropped while it runs, it is killed.
pub(crate) struct Running {
    child: Option<Child>,
    pid: i32,
    ended: Receiver<Instant>,
    out: PathBuf,
    err: PathBuf,
    shown: String,
    begun: Instant,
}

impl Running {
    pub(crate) fn pid(&self) -> i32 {
        self.pid
    }

    #[track_caller]
    pub(crate) fn send(&self, signal: Signal) {
        process::send(self.pid, signal);
    }

    /// Waits for its end.
    #[track_caller]
    pub(crate) fn wait(self) -> Finished {
        match self.wait_within(DEADLINE) {
            Ok(finished) => finished,
            Err(running) => panic!(
                "still running after {DEADLINE:?}: {}\nstderr: {}\nprocess: {:?}\nchildren: {:?}",
                running.shown,
                running.stderr_so_far(),
                process::process(running.pid),
                process::descendants(running.pid),
            ),
        }
    }

    /// Waits at most so long; gives it back if it still runs then.
    pub(crate) fn wait_within(mut self, patience: Duration) -> Result<Finished, Box<Running>> {
        let ended = match self.ended.recv_timeout(patience) {
            Ok(ended) => ended,
            Err(RecvTimeoutError::Timeout) => return Err(Box::new(self)),
            Err(RecvTimeoutError::Disconnected) => panic!("nobody waits for {}", self.shown),
        };
        let cpu = process::final_cpu_time(self.pid);
        let status = self.child.take().expect("waited for once").wait().expect("a status");
        let read = |path: &Path| fs::read(path).unwrap_or_default();
        Ok(Finished {
            status,
            stdout: read(&self.out),
            stderr: read(&self.err),
            took: ended.duration_since(self.begun),
            ended,
            cpu,
            shown: std::mem::take(&mut self.shown),
        })
    }

    /// What it has written to standard error up to now.
    pub(crate) fn stderr_so_far(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.err).unwrap_or_default()).into_owned()
    }

    /// Waits until its standard error contains `text`.
    #[track_caller]
    pub(crate) fn wait_for_stderr(&self, text: &str) {
        eventually(&format!("{:?} on stderr of {}", text, self.shown), || {
            let seen = self.stderr_so_far();
            if seen.contains(text) { Ok(()) } else { Err(seen) }
        });
    }

    /// Waits until one of its threads sleeps in flock(2).
    #[track_caller]
    pub(crate) fn wait_asleep_in_flock(&self) {
        eventually("asleep in flock(2)", || process::asleep_in_flock(self.pid));
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Something that has ended.
pub(crate) struct Finished {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
    /// From its start to its end.
    pub(crate) took: Duration,
    /// When it ended.
    pub(crate) ended: Instant,
    /// The CPU time of the process itself.
    pub(crate) cpu: Duration,
    shown: String,
}

impl Finished {
    pub(crate) fn out(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    pub(crate) fn err(&self) -> String {
        String::from_utf8_lossy(&self.stderr).into_owned()
    }

    pub(crate) fn code(&self) -> Option<i32> {
        self.status.code()
    }

    pub(crate) fn signal(&self) -> Option<i32> {
        self.status.signal()
    }

    /// Exited with exactly this code.
    #[track_caller]
    pub(crate) fn exited(&self, code: u8) -> &Self {
        assert_eq!(self.status.code(), Some(i32::from(code)), "{}\n{self}", self.shown);
        self
    }

    /// Nothing on standard error.
    #[track_caller]
    pub(crate) fn silent(&self) -> &Self {
        assert_eq!(self.err(), "", "{}", self.shown);
        self
    }

    /// Exactly one line on standard error, ours, with all these parts.
    #[track_caller]
    pub(crate) fn one_line(&self, parts: &[&str]) -> &Self {
        let err = self.err();
        assert_eq!(err.matches('\n').count(), 1, "one line: {err:?}\n{}", self.shown);
        self.says(parts)
    }

    /// All lines on standard error are ours, and all these parts are there.
    #[track_caller]
    pub(crate) fn says(&self, parts: &[&str]) -> &Self {
        let err = self.err();
        assert!(err.lines().all(|line| line.starts_with("withlock: ")), "{err:?}\n{}", self.shown);
        for part in parts {
            assert!(err.contains(part), "{part:?} is missing in {err:?}\n{}", self.shown);
        }
        self
    }
}

impl std::fmt::Display for Finished {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{} after {:?}\nstdout: {}\nstderr: {}", self.status, self.took, self.out(), self.err())
    }
}
