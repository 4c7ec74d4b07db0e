//! The second thread of a waiter, which keeps watch while the first sleeps on the guard: whatever happens
//! to one of its calls, the waiter gets in.

use std::path::Path;

use nix::sys::signal::Signal;

use crate::harness::{Sandbox, eventually, in_lanes, shipped};

/// What is injected, once each.
const FAULTS: &[&str] = &[
    "newfstatat:error=EIO",
    "newfstatat:error=ESTALE",
    "newfstatat:error=EACCES",
    "newfstatat:error=EINTR",
    "futex:error=EINTR",
    "futex:error=EAGAIN",
    "ppoll:error=EINTR",
    "write:error=EIO",
    "write:error=EAGAIN",
    // What it cannot see it calls the sleeper for, and the call fails.
    "newfstatat,tgkill:error=EAGAIN",
];

/// The thread beside the first.
fn second_thread(pid: i32) -> Result<i32, Vec<i32>> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().filter_map(Result::ok);
    let mut all: Vec<i32> = tasks.filter_map(|task| task.file_name().to_string_lossy().parse().ok()).collect();
    all.retain(|task| *task != pid);
    all.pop().ok_or(all)
}

/// A waiter falls asleep, `fault` happens to its lookout, and the holder lets go.
fn happens(fault: &str, dies: bool) {
    let sandbox = Sandbox::in_memory();
    let mut gate = sandbox.gate();
    let holder = sandbox.shipped().args(["--ttl", "5s"]).lock().sh(gate.script()).start();
    gate.wait_inside();
    let waiter = sandbox.shipped().args(["-w", "30s"]).lock().args(["--", "true"]).start();
    waiter.wait_asleep_in_flock();
    let thread = eventually("there is a lookout", || second_thread(waiter.pid()));
    let log = sandbox.io_path("strace");
    let injections: Vec<String> = match fault.split_once(':') {
        Some((calls, what)) => calls.split(',').map(|call| format!("inject={call}:{what}:when=1")).collect(),
        None => Vec::new(),
    };
    let strace = sandbox.program("strace").args(["-qq", "-p", &thread.to_string(), "-o"]).arg(&log);
    let strace = injections.iter().fold(strace, |run, injection| run.args(["-e", injection])).start();
    // It looks once a second.
    eventually(fault, || {
        let trace = std::fs::read_to_string(Path::new(&log)).unwrap_or_default();
        let happened = trace.matches("(INJECTED)").count() >= injections.len() || trace.contains("SIGKILL");
        if happened { Ok(()) } else { Err(trace) }
    });
    gate.open();
    let finished = waiter.wait();
    if dies {
        assert_eq!(finished.signal(), Some(Signal::SIGKILL as i32), "{fault}: {finished}");
        sandbox.shipped().args(["-q", "-w", "5s"]).lock().args(["--", "true"]).run().exited(0);
    } else {
        assert_eq!(finished.code(), Some(0), "{fault}: {finished}");
        let err = finished.err();
        assert!(err.lines().count() <= 1 && err.lines().all(|line| line.contains("waiting")), "{fault}: {err}");
    }
    holder.wait().exited(0);
    strace.wait();
    assert_eq!(sandbox.names(), [""; 0], "{fault}");
}

#[test]
fn whatever_happens_to_a_waiters_lookout_the_waiter_gets_in() {
    shipped();
    in_lanes(FAULTS.len(), FAULTS.to_vec(), |fault| happens(fault, false));
}

#[test]
fn a_waiter_that_dies_by_its_lookout_takes_nothing_with_it() {
    shipped();
    happens("newfstatat:signal=KILL", true);
}
