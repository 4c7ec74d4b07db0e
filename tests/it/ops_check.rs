//! `check`: do I still hold it?
//!
//! Needs flock(1).

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::symlink;

use nix::sys::signal::Signal;
use withlock::record::{Guard, Record, SlotName};

use crate::harness::{Sandbox, age, plant, plant_bytes, planted, record};
use crate::ops_inspect::stopped_holder;

const HOUR_MS: u64 = 3_600_000;

#[test]
fn a_command_asks_by_its_environment_alone_and_hears_nothing_while_it_holds_the_lock() {
    let sandbox = Sandbox::new();
    let finished = sandbox.withlock().lock().sh("\"$WL\" check && cd / && \"$WL\" check; echo $?").run();
    finished.exited(0).silent();
    assert_eq!(finished.out(), "0\n");
}

#[test]
fn whatever_else_is_at_the_path_is_76_with_one_line_that_says_what() {
    let sandbox = Sandbox::new();
    let mine = planted(HOUR_MS);
    let check = |what: &str, code: u8, words: &[&str]| {
        let finished = sandbox.withlock().args(["check", "--nonce", mine.nonce.as_str()]).lock().run();
        assert_eq!(finished.out(), "", "{what}");
        finished.exited(code);
        if code == 0 {
            finished.silent()
        } else {
            finished.one_line(&[&["a.lock: not held: "], words].concat())
        };
    };
    check("free", 76, &["the lock file is gone"]);
    plant(&sandbox.lock(), &mine, 0);
    check("mine", 0, &[]);
    plant(&sandbox.lock(), &planted(HOUR_MS), 0);
    check("another's", 76, &["another holds it now"]);
    plant_bytes(&sandbox.lock(), b"", 0);
    check("blank", 76, &["has no record"]);
    plant_bytes(&sandbox.lock(), b"text", 0);
    check("foreign", 76, &["a regular file that is no lock is there"]);
    fs::remove_file(sandbox.lock()).expect("rm");
    symlink("x", sandbox.lock()).expect("a link");
    check("a link", 76, &["a symbolic link is there"]);
    let missing = sandbox.withlock().args(["check", "--nonce", mine.nonce.as_str(), "missing/a.lock"]).run();
    missing.exited(76).one_line(&["not held", "no such directory"]);
}

#[test]
fn of_a_lock_that_we_may_not_read_it_is_not_said_that_it_is_not_held() {
    let sandbox = Sandbox::new();
    let mine = planted(HOUR_MS);
    plant(&sandbox.lock(), &mine, 0);
    sandbox.chmod(sandbox.lock(), 0o600);
    let check = || sandbox.program(sandbox.public_binary()).args(["check", "--nonce", mine.nonce.as_str(), "a.lock"]);
    check().run().exited(0).silent();
    let finished = check().run_by_nobody().run();
    let line = "withlock: a.lock: cannot tell whether it is held: we may not read it (it belongs to root, mode 0600; we \
                are uid 65534)\n";
    assert_eq!((finished.exited(77).err(), finished.out()), (line.into(), String::new()));
}

#[test]
fn while_another_process_is_ending_the_lock_it_is_not_surely_held() {
    let sandbox = Sandbox::new();
    let mine = planted(HOUR_MS);
    plant(&sandbox.lock(), &mine, 0);
    let slot = sandbox.path(SlotName::of(&mine).file_name(OsStr::new("a.lock")));
    fs::create_dir(&slot).expect("a slot");
    let check = || sandbox.withlock().args(["check", "--nonce", mine.nonce.as_str()]).lock().run();
    check().exited(0);
    fs::write(slot.join("claim-0"), "").expect("a claim");
    let mut gate = sandbox.gate();
    let ender = sandbox.program("flock").lock().args(["-c", &gate.script()]).start();
    gate.wait_inside();
    check().exited(76).one_line(&["another process is ending it"]);
    gate.open();
    ender.wait().exited(0);
}

#[test]
fn a_lease_that_ran_out_is_held_behind_a_guard_and_not_without_one() {
    let sandbox = Sandbox::new();
    let holder = stopped_holder(&sandbox);
    let held = record(&sandbox.lock()).expect("a record");
    let check = |nonce: &Record| sandbox.withlock().args(["check", "--nonce", nonce.nonce.as_str()]).lock().run();
    check(&held).exited(0).silent();
    // The command first: afterwards it is nobody's child.
    for process in crate::harness::children(holder.pid()) {
        crate::harness::send(process.pid, Signal::SIGKILL);
    }
    holder.send(Signal::SIGKILL);
    holder.wait();
    sandbox.wait_until_nothing_runs();
    age(&sandbox.lock(), 60_000);
    check(&held).exited(76).one_line(&["its lease ran out "]);
    for guard in [Guard::None, Guard::Wrapper, Guard::Inherited] {
        let mut mine = planted(1_000);
        mine.guard = guard;
        plant(&sandbox.lock(), &mine, 60_000);
        check(&mine).exited(76).one_line(&["its lease ran out"]);
    }
}

#[test]
fn a_command_that_runs_without_the_lock_is_told_so_and_missing_words_are_usage_errors() {
    let sandbox = Sandbox::new();
    plant(&sandbox.lock(), &planted(HOUR_MS), 0);
    let degraded = sandbox.withlock().args(["-n", "--on-busy", "run"]).lock().sh("\"$WL\" check").run();
    degraded.exited(76).says(&["run without the lock"]);
    sandbox.withlock().arg("check").run().exited(64).one_line(&["WITHLOCK_LOCK"]);
    sandbox.withlock().arg("check").lock().run().exited(64).one_line(&["WITHLOCK_NONCE"]);
    sandbox.withlock().args(["check", "--nonce", "x"]).lock().run().exited(64).one_line(&["--nonce"]);
    let bad = sandbox.withlock().arg("check").lock().env("WITHLOCK_NONCE", "bad").run();
    bad.exited(64).one_line(&["WITHLOCK_NONCE"]);
}

#[test]
fn a_command_that_runs_without_its_lock_still_holds_those_further_out_and_can_ask_by_name() {
    let sandbox = Sandbox::new();
    plant(&sandbox.path("inner"), &planted(HOUR_MS), 0);
    let text = "\"$WL\" -n --on-busy run inner -- sh -c '\"$WL\" check outer; echo $?; \"$WL\" check inner; echo $?; \
                \"$WL\" check; echo $?; \"$WL\" check free; echo $?; rm outer; \"$WL\" check outer; echo $?'";
    let finished = sandbox.withlock().args(["--on-lost", "warn", "outer"]).sh(text).run();
    assert_eq!(finished.exited(76).out(), "0\n76\n76\n76\n76\n", "{finished}");
    let not_held = "not held: this command was run without the lock\n";
    assert_eq!(finished.err().matches(not_held).count(), 4, "{finished}");
    assert!(finished.err().contains("withlock: inner: not held: "), "{finished}");
}

#[test]
fn a_variable_that_is_set_and_empty_is_not_set() {
    let sandbox = Sandbox::new();
    plant(&sandbox.lock(), &planted(HOUR_MS), 0);
    let no_nonce = sandbox.withlock().arg("check").lock().env("WITHLOCK_NONCE", "").run();
    no_nonce.exited(64).one_line(&["no --nonce given, and WITHLOCK_NONCE is not set"]);
    let no_lock = sandbox.withlock().arg("check").env("WITHLOCK_LOCK", "").env("WITHLOCK_NONCE", "0".repeat(32)).run();
    no_lock.exited(64).one_line(&["no LOCK given, and WITHLOCK_LOCK is not set"]);
    let degraded = sandbox.withlock().arg("check").lock().env("WITHLOCK_NONCE", "").env("WITHLOCK_MODE", "degraded");
    degraded.run().exited(76).one_line(&["this command was run without the lock"]);
}
