//! Real work: a job as cron runs it.

use std::time::{Duration, SystemTime};

use nix::sys::signal::Signal;

use crate::harness::{Run, Sandbox, eventually, mtime, process, send_to_group, slots, with_record};

/// As cron starts a job: `/bin/sh -c LINE`, a session of its own without a terminal, and next to nothing
/// in the environment.
fn as_cron<'s>(sandbox: &'s Sandbox, line: &str) -> Run<'s> {
    sandbox
        .program("setsid")
        .args(["/bin/sh", "-c", line])
        .env("HOME", "/")
        .env("LOGNAME", "root")
        .env("SHELL", "/bin/sh")
        .env("PATH", "/usr/bin:/bin")
}

#[test]
fn a_job_that_still_runs_is_skipped_with_exit_0_and_one_line() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let line = format!("$WL -n --on-busy skip $L sh -c '{}'", gate.script());
    let first = as_cron(&sandbox, &line).start();
    gate.wait_inside();

    let second = as_cron(&sandbox, &line).run();
    second.exited(0).one_line(&["a.lock"]);
    assert!(!gate.somebody_within(Duration::ZERO), "the second job ran");

    gate.open();
    first.wait().exited(0);
    assert!(sandbox.names().is_empty(), "{:?}", sandbox.names());
}

#[test]
fn after_the_whole_job_was_killed_the_next_start_after_the_ttl_gets_in_and_the_record_is_kept() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let line = format!("$WL -n --ttl 1s --on-busy skip $L sh -c '{}'", gate.script());
    let first = as_cron(&sandbox, &line).start();
    gate.wait_inside();
    let dead = with_record(&sandbox.lock());
    // `setsid` made the job the leader of its group.
    send_to_group(first.pid(), Signal::SIGKILL);
    assert_eq!(first.wait().signal(), Some(9));
    eventually("all of the job is dead", || match process(i32::try_from(dead.pid).expect("a pid")) {
        Some(alive) if alive.state != 'Z' => Err(alive),
        _ => Ok(()),
    });
    sandbox.wait_until_nothing_runs();

    // A start within the ttl still skips, and leaves the dead job's lock as it is.
    let early = as_cron(&sandbox, &line).run();
    if SystemTime::now() < mtime(&sandbox.lock()) + Duration::from_secs(1) {
        early.exited(0).one_line(&["a.lock"]);
    }
    eventually("the ttl has passed", || {
        let age = mtime(&sandbox.lock()).elapsed().unwrap_or_default();
        if age > Duration::from_millis(1_050) { Ok(()) } else { Err(age) }
    });
    let next = as_cron(&sandbox, &line).start();
    gate.wait_inside();
    assert_ne!(with_record(&sandbox.lock()).nonce, dead.nonce);
    let slots = slots(&sandbox.lock());
    assert_eq!(slots.len(), 1, "{slots:?}");
    assert_eq!(slots[0].name.nonce, dead.nonce);
    assert_eq!(slots[0].lock.as_deref(), Some(dead.encode().as_slice()), "the dead job's record");
    gate.open();
    next.wait().exited(0);
}
