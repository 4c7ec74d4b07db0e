//! What the shipped program may cost, in counts that do not depend on the machine's load: system calls,
//! page faults, instructions. Needs strace and time(1). A step that grows one of them beyond its margin
//! fails here; times are for `cargo bench`.

use std::ffi::OsStr;

use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;

use crate::harness::{Sandbox, calls, shipped};

/// Fails if `count` has grown by more than a sixth over what it was measured to be, or if it has shrunk so
/// much that the number here no longer guards anything.
fn assert_about(what: &str, count: u64, measured: u64) {
    println!("{what}: {count}, measured {measured}");
    assert!(count <= measured + measured / 6 + 1, "{what}: {count}, more than {measured} and a sixth");
    assert!(count >= measured / 2, "{what}: only {count}; write that down instead of {measured}");
}

#[test]
fn the_system_calls_of_an_uncontended_run_are_counted() {
    let sandbox = Sandbox::new();
    let log = sandbox.io_path("strace");
    sandbox.shipped().traced(&log, &[]).lock().args(["--", "true"]).run().exited(0);
    assert_about("system calls of an uncontended run", calls(&log).len() as u64, UNCONTENDED_CALLS);
}

#[test]
fn the_system_calls_between_a_release_and_the_next_command_are_counted() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = sandbox.shipped().lock().sh(gate.script()).start();
    gate.wait_inside();
    let log = sandbox.io_path("strace");
    let waiter = sandbox.shipped().traced(&log, &[]).lock().args(["--", "true"]).start();
    waiter.wait_asleep_in_flock();
    gate.open();
    holder.wait().exited(0);
    waiter.wait().exited(0);
    let calls = calls(&log);
    let given = calls
        .iter()
        .rposition(|call| call.line.contains("LOCK_EX)") && call.line.ends_with("= 0"))
        .expect("the guard was given");
    // By the order that its process waits for.
    let started = calls.iter().rposition(|call| call.name == "futex").expect("the command was started");
    assert_about("system calls of a hand-off", (started - given) as u64, HAND_OFF_CALLS);
}

#[test]
fn the_page_faults_of_an_uncontended_run_are_counted() {
    let sandbox = Sandbox::new();
    // The least of a few: a fault may be added by chance, never taken away.
    let least = |words: &[&OsStr]| (0..5).map(|_| faults(&sandbox, words)).min().expect("a run");
    let lock = sandbox.lock();
    // How a file came to be decides how much of it one fault brings in: a copy is the same for all.
    let program = sandbox.io_path("program");
    std::fs::copy(shipped(), &program).expect("a copy");
    let bare = least(&["true".as_ref()]);
    let whole = least(&[program.as_os_str(), lock.as_os_str(), "--".as_ref(), "true".as_ref()]);
    assert_about("page faults beyond the command's own", whole.saturating_sub(bare), UNCONTENDED_FAULTS);
}

/// Minor faults of a program and all that it waited for, as time(1) tells them.
fn faults(sandbox: &Sandbox, words: &[&OsStr]) -> u64 {
    let log = sandbox.io_path("time");
    let run = sandbox.program("/usr/bin/time").args(["-f", "%R", "-o"]).arg(&log).args(words).run();
    assert_eq!(run.code(), Some(0), "{}", run.err());
    std::fs::read_to_string(&log).expect("a report").trim().parse().expect("a number")
}

#[test]
fn the_instructions_of_an_uncontended_run_are_counted() {
    let sandbox = Sandbox::new();
    let lock = sandbox.lock();
    let words = [shipped().as_os_str(), lock.as_os_str(), "--".as_ref(), "true".as_ref()];
    assert_about("instructions of an uncontended run", instructions(&sandbox, &words), UNCONTENDED_INSTRUCTIONS);
}

/// The instructions of a program's own process, counted by having it stop after each (ptrace(2)). A repeated one counts
/// as often as it is repeated. No emulator: none that is at hand lets a process be made as this program makes one.
fn instructions(sandbox: &Sandbox, words: &[&OsStr]) -> u64 {
    let mut go = sandbox.fifo();
    let begin = format!("read go <{}; exec \"$@\"", go.shown());
    let running = sandbox.program("sh").args(["-c", &begin, "sh"]).args(words).start();
    let pid = Pid::from_raw(running.pid());
    ptrace::seize(pid, ptrace::Options::PTRACE_O_TRACEEXEC | ptrace::Options::PTRACE_O_EXITKILL).expect("to trace it");
    go.say("go");
    let mut count = 0;
    loop {
        match waitpid(pid, None).expect("what became of it") {
            WaitStatus::PtraceEvent(..) => {}
            WaitStatus::Stopped(_, Signal::SIGTRAP) => count += 1,
            WaitStatus::Exited(_, code) => {
                assert_eq!(code, 0);
                return count;
            }
            other => panic!("{other:?} after {count} instructions"),
        }
        ptrace::step(pid, None).expect("to let it go on");
    }
}

const UNCONTENDED_CALLS: u64 = 64;
const HAND_OFF_CALLS: u64 = 25;
const UNCONTENDED_FAULTS: u64 = 33;
const UNCONTENDED_INSTRUCTIONS: u64 = 65_000;
