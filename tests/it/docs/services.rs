//! The examples that something else starts: systemd, a container, cron at night. Taken from the manual as
//! they stand.
//!
//! Needs root, `systemd-analyze` (systemd) and `unshare`.

use std::time::Duration;

use nix::sys::signal::Signal;

use super::examples::Stage;
use crate::harness::{Run, children, eventually, plant, planted, process, send, set_mtime, slots};

/// The value of a key in a unit.
#[track_caller]
fn value<'u>(unit: &'u str, key: &str) -> &'u str {
    let found = unit.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    found.unwrap_or_else(|| panic!("no {key} in {unit}"))
}

/// What systemd says of the units in the sandbox's directory. The programs that they call are found where
/// systemd looks, in a mount namespace of its own.
fn verify(stage: &Stage) -> crate::harness::Finished {
    let script = "mount --bind \"$0\" /usr/local/bin && exec systemd-analyze verify ./mirror.service ./mirror.timer";
    let run = stage.sandbox.program("unshare").args(["--mount", "--propagation", "private", "/bin/sh", "-c", script]);
    run.arg(stage.bin()).run()
}

#[test]
fn systemd_has_nothing_to_say_against_the_units_and_the_service_ends_its_command_when_it_is_stopped() {
    let stage = Stage::new();
    let mut gate = stage.sandbox.gate();
    stage.stub("mirror", &gate.script());
    let (service, timer) = (stage.example("ExecStart="), stage.example("OnCalendar="));
    std::fs::write(stage.sandbox.path("mirror.timer"), &timer).expect("a unit");
    std::fs::write(stage.sandbox.path("mirror.service"), &service).expect("a unit");
    let verified = verify(&stage);
    assert_eq!((verified.code(), verified.out() + &verified.err()), (Some(0), String::new()));
    for (good, bad) in [("KillMode=mixed", "KillMode=some"), ("ExecStart=withlock", "ExecStart=wihtlock")] {
        std::fs::write(stage.sandbox.path("mirror.service"), service.replace(good, bad)).expect("a unit");
        assert_ne!(verify(&stage).err(), "", "the known-bad case {bad}");
    }

    assert_eq!(value(&service, "KillMode"), "mixed");
    let running = stage.shell(&format!("exec {}", value(&service, "ExecStart"))).start();
    let command = gate.wait_inside();
    stage.shell(value(&service, "ExecStart")).run().exited(0).one_line(&["skipped"]);
    // As systemd stops it with this KillMode: the first process alone.
    running.send(Signal::SIGTERM);
    running.wait().exited(143);
    assert!(process(command).is_none(), "COMMAND has ended before");
}

/// The words of ENTRYPOINT.
fn entrypoint(stage: &Stage) -> Vec<String> {
    let dockerfile = stage.example("ENTRYPOINT");
    let line = dockerfile.lines().find_map(|line| line.strip_prefix("ENTRYPOINT ")).expect("an ENTRYPOINT");
    serde_json::from_str(line).expect("the words as JSON")
}

/// A container: pid namespace and mounts of its own.
fn container<'s>(stage: &'s Stage, words: &[String]) -> Run<'s> {
    let run = stage.sandbox.program("unshare").args(["--pid", "--fork", "--kill-child", "--mount-proc"]);
    stage.with_path(run.args(words))
}

#[test]
fn the_entrypoint_of_a_container_is_process_1_that_reaps_acts_on_term_and_keeps_others_out() {
    let stage = Stage::new();
    let mut gate = stage.sandbox.gate();
    let mut parent = stage.sandbox.fifo();
    // An orphan, and who COMMAND's parent is.
    stage.stub(
        "backup",
        &format!("(sh -c 'exit 9' &); ps -o pid=,comm= -p $PPID >{}; {}; exit 7", parent.shown(), gate.script()),
    );
    let words = entrypoint(&stage);
    let first = container(&stage, &words).start();
    assert_eq!(parent.line().split_whitespace().collect::<Vec<_>>(), ["1", "withlock"]);
    gate.wait_inside();
    let [wrapper] = &children(first.pid())[..] else { panic!("one process 1") };
    eventually("the orphan is reaped", || {
        let left = children(wrapper.pid);
        if left.len() == 1 { Ok(()) } else { Err(left) }
    });
    // In a second container, with the same process numbers.
    container(&stage, &words).run().exited(75).one_line(&["backup.lock"]);
    gate.open();
    first.wait().exited(7);

    stage.stub("backup", &gate.script());
    let second = container(&stage, &words).start();
    gate.wait_inside();
    let [wrapper] = &children(second.pid())[..] else { panic!("one process 1") };
    send(wrapper.pid, Signal::SIGTERM);
    second.wait().exited(143);
    assert!(!stage.sandbox.path("backup.lock").exists(), "released");
    stage.sandbox.wait_until_nothing_runs();
}

#[test]
fn the_nightly_line_removes_quarantines_of_more_than_a_week_and_nothing_else() {
    let stage = Stage::new();
    let line = stage.example("reclaim --older-than");
    let line = line.trim().strip_prefix("30 3 * * * ").expect("a crontab line");
    stage.shell(line).run().exited(0).silent();
    let locks = ["old.lock", "young.lock"].map(|name| stage.sandbox.path(name));
    for lock in &locks {
        plant(lock, &planted(60_000), 120_000);
        stage.sandbox.withlock().arg("break").arg(lock).run().exited(0);
    }
    let age = |days: u64| std::time::SystemTime::now() - Duration::from_secs(days * 86_400);
    for (lock, days) in locks.iter().zip([8, 6]) {
        let [slot] = &slots(lock)[..] else { panic!("one quarantine") };
        set_mtime(&slot.path, age(days));
    }
    std::fs::write(stage.sandbox.path("old.lock.stale-backup"), "a file of the user's\n").expect("a file");
    set_mtime(&stage.sandbox.path("old.lock.stale-backup"), age(30));
    let night = stage.shell(line).run();
    night.exited(0).silent();
    assert_eq!(night.out(), "");
    assert_eq!(locks.map(|lock| slots(&lock).len()), [0, 1]);
    assert!(stage.sandbox.path("old.lock.stale-backup").exists());
}
