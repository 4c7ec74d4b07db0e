//! What the shipped program may cost, in counts that do not depend on the machine's load: system calls,
//! page faults, instructions. Needs strace, time(1) and valgrind. A step that grows one of them beyond its margin
//! fails here; times are for `cargo bench`.

use std::ffi::OsStr;

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
    let started = calls.iter().rposition(|call| call.name == "clone").expect("the command was started");
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
    let log = sandbox.io_path("callgrind");
    let finished = sandbox
        .program("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null", "--trace-children=no"])
        .arg(format!("--log-file={}", log.display()))
        .arg(shipped())
        .lock()
        .args(["--", "true"])
        .run();
    assert_eq!(finished.code(), Some(0), "{}", finished.err());
    let report = std::fs::read_to_string(&log).expect("valgrind's report");
    let collected = report.lines().find_map(|line| line.split_once("Collected :")).expect("a count").1;
    assert_about(
        "instructions of an uncontended run",
        collected.trim().parse().expect("a number"),
        UNCONTENDED_INSTRUCTIONS,
    );
}

const UNCONTENDED_CALLS: u64 = 58;
const HAND_OFF_CALLS: u64 = 21;
const UNCONTENDED_FAULTS: u64 = 37;
const UNCONTENDED_INSTRUCTIONS: u64 = 75_000;
