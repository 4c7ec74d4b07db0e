//! Two hosts and one lock, and the program on either of them.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use nix::unistd::Pid;

use crate::harness::{Run, Running, Sandbox, descendants, eventually, mtime, send_to_group, with_record};

use super::host::{Host, Server, TwoHosts, wait_until_stopped};

/// Exit code of a command that found another one inside.
pub(crate) const TWO_INSIDE: u8 = 99;

/// On which host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum On {
    A,
    B,
}

/// Two hosts, a lock in the directory that they share, and what is started on them.
pub(crate) struct Scene {
    /// What is started; ended with the scene. Before the hosts, so that nothing uses their mounts when
    /// these go.
    pub(crate) sandbox: Sandbox,
    /// The hosts.
    pub(crate) hosts: TwoHosts,
}

impl Scene {
    pub(crate) fn new(server: Server) -> Self {
        let scene = Scene { sandbox: Sandbox::new(), hosts: TwoHosts::new(server) };
        std::fs::write(scene.sandbox.path("inside"), "").expect("a file");
        scene
    }

    pub(crate) fn host(&mut self, on: On) -> &mut Host {
        match on {
            On::A => &mut self.hosts.a,
            On::B => &mut self.hosts.b,
        }
    }

    /// The lock as a host sees it.
    pub(crate) fn lock(&self, on: On) -> PathBuf {
        match on {
            On::A => self.hosts.a.path("a.lock"),
            On::B => self.hosts.b.path("a.lock"),
        }
    }

    /// The lock as the server has it: looking at it there disturbs nobody.
    pub(crate) fn truth(&self) -> PathBuf {
        self.hosts.backing().join("a.lock")
    }

    /// Starts the program (a test build) on a host, the leader of its own process group.
    pub(crate) fn start<'s>(&'s self, on: On, arguments: impl FnOnce(Run<'s>) -> Run<'s> + Send) -> Running {
        let host = if on == On::A { &self.hosts.a } else { &self.hosts.b };
        host.run(|| arguments(self.sandbox.withlock().own_group()).start())
    }

    /// Shell text: whoever runs it is inside from here to its end. Another one who is inside is noticed
    /// by a flock(2) on a file that is not shared through the hosts, so that all processes here see it,
    /// and that the kernel drops with its owner.
    pub(crate) fn alone(&self) -> String {
        format!("exec 8<{}; flock -n 8 || exit {TWO_INSIDE}", self.sandbox.path("inside").display())
    }

    /// The name of the place where the present epoch can be ended.
    pub(crate) fn slot_name(&self) -> String {
        let record = with_record(&self.truth());
        let name = withlock::record::SlotName::of(&record).file_name("a.lock".as_ref());
        name.into_string().expect("plain text")
    }

    /// Makes a holder renew, and waits until that is done.
    pub(crate) fn wait_for_renewal(&self, holder: &Running) {
        let before = mtime(&self.truth());
        holder.send(Signal::SIGCONT);
        eventually("a renewal", || {
            let now = mtime(&self.truth());
            if now > before { Ok(()) } else { Err(now) }
        });
        eventually("all threads wait for something to do", || is_idle(holder.pid()));
    }

    /// The lock, with all that a change would show but the time of its renewal.
    pub(crate) fn epoch(&self) -> (Option<u64>, String) {
        let truth = self.truth();
        (crate::harness::inode(&truth), with_record(&truth).nonce.to_string())
    }
}

/// Whether all threads of a process are asleep in a call that waits for events.
fn is_idle(pid: i32) -> Result<(), Vec<String>> {
    use nix::libc::{SYS_futex, SYS_poll, SYS_ppoll, SYS_restart_syscall};
    let waits = [SYS_futex, SYS_poll, SYS_ppoll, SYS_restart_syscall].map(|number| number.to_string());
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).map_err(|error| vec![error.to_string()])?;
    let call = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("syscall")).unwrap_or_default();
    let calls: Vec<String> = tasks.filter_map(Result::ok).map(call).collect();
    let is_waiting =
        |call: &String| call.split(' ').next().is_some_and(|number| waits.iter().any(|wait| wait == number));
    if calls.iter().all(is_waiting) { Ok(()) } else { Err(calls) }
}

/// Stops a wrapper and its command.
pub(crate) fn stop(running: &Running) {
    send_to_group(running.pid(), Signal::SIGSTOP);
    for pid in descendants(running.pid()).iter().map(|process| process.pid).chain([running.pid()]) {
        wait_until_stopped(Pid::from_raw(pid));
    }
}

/// Lets them go on.
pub(crate) fn go_on(running: &Running) {
    send_to_group(running.pid(), Signal::SIGCONT);
}

/// Starting a program that does nothing takes milliseconds. Where it takes as long as this, nothing that
/// is to be done in time can be.
const TOO_BUSY: Duration = Duration::from_millis(250);
/// Times that a failed test is made again on a machine that was too busy.
const TRIES: usize = 4;

/// Makes a test. It fails if it fails, but on a machine that was too busy meanwhile: processes are then
/// late by seconds, which shows nothing, and it is made again.
pub(crate) fn undisturbed(test: impl Fn()) {
    for _ in 0..TRIES {
        let busyness = Busyness::default();
        let outcome = std::thread::scope(|scope| {
            scope.spawn(|| busyness.watch());
            let outcome = catch_unwind(AssertUnwindSafe(&test));
            busyness.end();
            outcome
        });
        match outcome {
            Ok(()) => return,
            Err(panic) if busyness.slowest() < TOO_BUSY => resume_unwind(panic),
            Err(_) => println!("to start nothing took {:?}: once more", busyness.slowest()),
        }
    }
    panic!("this machine is too busy for tests of things that must be done in time");
}

/// How busy the machine is: the longest that it took to start a program that does nothing.
#[derive(Default)]
pub(crate) struct Busyness {
    slowest_ms: AtomicU64,
    over: AtomicBool,
}

impl Busyness {
    /// Looks until the end.
    pub(crate) fn watch(&self) {
        while !self.over.load(Ordering::Relaxed) {
            let begun = Instant::now();
            std::process::Command::new("true").status().expect("true(1)");
            let took_ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
            self.slowest_ms.fetch_max(took_ms, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    pub(crate) fn end(&self) {
        self.over.store(true, Ordering::Relaxed);
    }

    pub(crate) fn slowest(&self) -> Duration {
        Duration::from_millis(self.slowest_ms.load(Ordering::Relaxed))
    }
}
