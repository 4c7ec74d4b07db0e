//! What the README says of other tools, shown with those tools.
//!
//! Needs `flock` (util-linux), `dotlockfile` (liblockfile-bin) and `lockfile` (procmail).

use std::time::{Duration, SystemTime};

use crate::harness::{Sandbox, set_mtime};

fn minutes_ago(minutes: u64) -> SystemTime {
    SystemTime::now() - Duration::from_secs(60 * minutes)
}

#[test]
fn flock_exits_1_when_busy_as_the_command_itself_may() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = sandbox.program("flock").lock().args(["-c", &gate.script()]).start();
    gate.wait_inside();
    sandbox.program("flock").arg("-n").lock().args(["-c", "exit 0"]).run().exited(1).silent();
    gate.open();
    holder.wait().exited(0);
    sandbox.program("flock").arg("-n").lock().args(["-c", "exit 1"]).run().exited(1).silent();
}

#[test]
fn a_background_child_keeps_the_lock_of_flock_and_not_ours() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let body = format!("({}) >/dev/null 2>&1 &", gate.script());
    sandbox.program("flock").lock().args(["-c", &body]).run().exited(0);
    gate.wait_inside();
    sandbox.program("flock").arg("-n").lock().args(["-c", "true"]).run().exited(1);
    gate.open();
    sandbox.wait_until_nothing_runs();

    std::fs::remove_file(sandbox.lock()).expect("flock leaves its file");
    sandbox.withlock().lock().sh(&body).run().exited(0);
    gate.wait_inside();
    sandbox.withlock().arg("-n").lock().args(["--", "true"]).run().exited(0).silent();
    gate.open();
}

#[test]
fn dotlockfile_believes_any_process_that_has_the_number_and_else_a_fixed_time() {
    let sandbox = Sandbox::new();
    let try_once = |content: &str, minutes: u64| {
        std::fs::write(sandbox.lock(), content).expect("a lock");
        set_mtime(&sandbox.lock(), minutes_ago(minutes));
        // It needs one try to remove a stale lock, and another to take it.
        sandbox.program("dotlockfile").args(["-l", "-p", "-r", "2", "-i", "1"]).lock().run().code()
    };
    // Process 1 lives and never took this lock.
    assert_ne!(try_once("1\n", 600), Some(0), "valid for ever");
    assert_ne!(try_once("", 4), Some(0), "valid for five minutes");
    assert_eq!(try_once("", 6), Some(0), "stale after them");
}

#[test]
fn lockfile_removes_a_lock_of_the_given_age_whoever_holds_it() {
    let sandbox = Sandbox::new();
    let lock = sandbox.lock();
    sandbox.program("lockfile").lock().run().exited(0);
    assert!(std::fs::read(&lock).expect("the lock").len() <= 1, "nothing about the holder");
    set_mtime(&lock, minutes_ago(10));
    // -s 0: without the pause that protects the next lock.
    sandbox.program("lockfile").args(["-1", "-r", "3", "-l", "60", "-s", "0"]).arg(&lock).run().exited(0);
    let mut gate = sandbox.gate();
    std::fs::remove_file(&lock).expect("its lock");
    let holder = sandbox.withlock().lock().sh(gate.script()).start();
    gate.wait_inside();
    // Ours, of the same age, in the hands of one who lives: nobody gets in.
    set_mtime(&lock, minutes_ago(10));
    sandbox.withlock().arg("-n").lock().args(["--", "true"]).run().exited(75);
    gate.open();
    holder.wait().exited(0);
}
