//! `--skip-if`: is COMMAND still needed, now that the lock is had? And `--on-busy run`: COMMAND without it.

use nix::sys::signal::Signal;

use crate::harness::{Sandbox, eventually, record};

#[test]
fn the_condition_is_asked_under_the_lock_and_told_what_the_command_is_told() {
    let sandbox = Sandbox::new();
    let tell = "echo $WITHLOCK_MODE $WITHLOCK_LOCK $WITHLOCK_NONCE $WITHLOCK_HELD";
    let finished = sandbox
        .withlock()
        .args(["--skip-if", &format!("{tell}; cat \"$L\" >seen; \"$WL\" -n \"$L\" -- true; echo $?; false")])
        .lock()
        .sh(tell)
        .run();
    finished.exited(0).one_line(&["held by an ancestor"]);
    let out = finished.out();
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!((lines.len(), lines[0], lines[1]), (3, lines[2], "78"), "{out}");
    assert!(lines[0].starts_with("locked /"), "{out}");
    let seen = record(&sandbox.path("seen")).expect("a record");
    assert_eq!(lines[0].split(' ').nth(2), Some(seen.nonce.as_str()));
}

#[test]
fn a_lock_that_is_lost_while_the_condition_is_asked_keeps_the_command_from_running() {
    for on_lost in ["terminate", "warn"] {
        let sandbox = Sandbox::new();
        let mut gate = sandbox.gate();
        let condition = format!("{}; exit 1", gate.script());
        let run = sandbox.withlock().args(["--on-lost", on_lost, "--skip-if", &condition]).lock();
        let run = run.args(["--", "touch", "ran"]).start();
        gate.wait_inside();
        std::fs::remove_file(sandbox.lock()).expect("removed");
        run.wait_for_stderr("the lock was lost");
        gate.open();
        run.wait().exited(76);
        assert_eq!(sandbox.names(), [""; 0], "{on_lost}");
    }
}

#[test]
fn a_lock_that_is_lost_just_before_the_condition_fails_keeps_the_command_from_running_too() {
    // No look of the wrapper's falls in between: those come once a second.
    for (on_lost, condition, found, left) in [
        ("terminate", "rm \"$L\"; exit 1", "the lock file is gone", &[""; 0][..]),
        ("warn", "rm \"$L\"; exit 1", "the lock file is gone", &[]),
        ("terminate", "cp \"$L\" other; mv other \"$L\"; exit 1", "another lock file is there", &["a.lock"]),
    ] {
        let sandbox = Sandbox::new();
        let log = sandbox.io_path("log");
        let run = sandbox.withlock().args(["--on-lost", on_lost, "--skip-if", condition, "--log-json"]).arg(&log);
        let finished = run.lock().args(["--", "touch", "ran"]).run();
        finished.exited(76).one_line(&[&format!("a.lock: the lock was lost: {found}")]);
        assert_eq!(sandbox.names(), left, "{on_lost} {condition}");
        let log = std::fs::read_to_string(log).expect("a log");
        assert_eq!(log.matches("\"event\":\"lost\"").count(), 1, "{log}");
    }
    // One of several: those that are left go back.
    for lost in ["a", "b"] {
        let sandbox = Sandbox::new();
        let condition = format!("rm {lost}; exit 1");
        let finished = sandbox.withlock().args(["--skip-if", &condition, "--also", "b", "a", "touch", "ran"]).run();
        finished.exited(76).one_line(&["a: the lock was lost: "]);
        assert_eq!(sandbox.names(), [""; 0], "{lost}");
    }
}

#[test]
fn who_does_not_get_the_lock_does_not_ask() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().lock().sh(gate.script()).start();
    gate.wait_inside();
    for (on_busy, code, out) in [("fail", 75, ""), ("skip", 0, ""), ("run", 0, "ran\n")] {
        let run = sandbox.withlock().args(["-n", "--on-busy", on_busy, "--skip-if", "touch asked"]).lock();
        let finished = run.args(["--", "echo", "ran"]).run();
        finished.exited(code).one_line(&["held by"]);
        assert_eq!(finished.out(), out, "{on_busy}");
    }
    gate.open();
    holder.wait().exited(0);
    assert_eq!(sandbox.names(), [""; 0]);
}

#[test]
fn without_the_lock_the_command_is_told_so_and_nothing_else_than_that() {
    let sandbox = Sandbox::new();
    std::fs::create_dir(sandbox.path("numbers")).expect("a directory");
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().lock().sh(gate.script()).start();
    gate.wait_inside();
    let before = std::fs::read(sandbox.lock()).expect("a record");
    let tell = "echo $WITHLOCK_MODE $WITHLOCK_LOCK ${WITHLOCK_NONCE-none} ${WITHLOCK_FENCE-none} ${WITHLOCK_HELD-none}; exit 3";
    let run = sandbox.withlock().args(["-w", "100ms", "--on-busy", "run", "--fence", "numbers"]).lock().sh(tell);
    let finished = run.env("WITHLOCK_NONCE", "outer").env("WITHLOCK_FENCE", "1").env("WITHLOCK_HELD", "outer").run();
    finished.exited(3).one_line(&["running without the lock", "still held after "]);
    assert_eq!(finished.out(), format!("degraded {} none none outer\n", sandbox.lock().display()));
    assert_eq!(std::fs::read(sandbox.lock()).expect("a record"), before, "the holder's lock is untouched");
    assert!(std::fs::read_dir(sandbox.path("numbers")).expect("numbers").next().is_none(), "no token was used up");
    gate.open();
    holder.wait().exited(0);
}

#[test]
fn signals_and_max_hold_reach_a_command_without_the_lock_as_well() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().lock().sh(gate.script()).start();
    gate.wait_inside();
    let held_up = sandbox.withlock().args(["-n", "--on-busy", "run", "--max-hold", "100ms"]).lock();
    held_up.args(["--", "sleep", "600"]).run().exited(124);
    let mut other = sandbox.gate();
    let run = sandbox.withlock().args(["-n", "--on-busy", "run"]).lock().sh(other.script()).start();
    other.wait_inside();
    run.send(Signal::SIGTERM);
    run.wait().exited(143);
    gate.open();
    holder.wait().exited(0);
    eventually("the holder alone released", || if sandbox.lock().exists() { Err(()) } else { Ok(()) });
}

#[test]
fn a_condition_that_fails_with_whatever_status_says_that_the_command_is_needed() {
    let sandbox = Sandbox::new();
    for condition in ["exit 1", "exit 76", "exit 124", "exit 137", "exit 255"] {
        let run = sandbox
            .withlock()
            .args(["--max-hold", "1h", "--skip-if", condition])
            .lock()
            .args(["--", "echo", "ran"])
            .run();
        assert_eq!(run.exited(0).silent().out(), "ran\n", "{condition}");
    }
    // One that a signal ends says nothing.
    let run = sandbox.withlock().args(["--skip-if", "kill -KILL $$"]).lock().args(["--", "echo", "ran"]).run();
    assert_eq!(run.exited(137).out(), "");
}

#[test]
fn an_empty_condition_is_a_mistake_and_nothing_is_made_or_run() {
    let sandbox = Sandbox::new();
    for condition in ["", " ", "\t\n"] {
        let finished = sandbox.withlock().args(["--skip-if", condition]).lock().args(["--", "touch", "ran"]).run();
        assert_eq!(finished.exited(64).err(), "withlock: --skip-if: the condition is empty\n", "{condition:?}");
        assert_eq!(sandbox.names(), [""; 0], "{condition:?}");
    }
}
