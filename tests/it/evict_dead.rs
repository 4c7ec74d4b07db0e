//! `--evict-dead`: where the kernel has dropped the holder's inherited guard, nobody waits for the ttl.
//! And where it must not be believed.

use std::time::Duration;

use nix::sys::signal::Signal;
use withlock::record::{Guard, Record};

use crate::harness::{Sandbox, Snapshot, plant, planted, record, send_to_group, slots};

/// What a dead holder left behind on this host: with an inherited guard that nobody has any more.
fn dead() -> Record {
    Record { guard: Guard::Inherited, ..planted(60_000) }
}

fn at_once(sandbox: &Sandbox) -> u8 {
    let finished = sandbox.withlock().args(["--evict-dead", "-n"]).lock().args(["--", "true"]).run();
    u8::try_from(finished.code().expect("an exit code")).expect("a byte")
}

#[test]
fn a_killed_holders_lock_is_taken_at_once_on_request_and_its_record_is_kept() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().lock().own_group().sh(gate.script()).start();
    gate.wait_inside();
    let dead = record(&sandbox.lock()).expect("a record");
    let waiter = sandbox.withlock().args(["--evict-dead", "-w", "30s"]).lock().args(["--", "true"]).start();
    waiter.wait_asleep_in_flock();
    send_to_group(holder.pid(), Signal::SIGKILL);
    let taken = waiter.wait();
    taken.exited(0);
    assert!(taken.took < Duration::from_secs(30), "{:?}", taken.took);
    let slots = slots(&sandbox.lock());
    assert_eq!(slots.len(), 1);
    assert_eq!(record(&slots[0].path.join("lock")).map(|record| record.nonce), Some(dead.nonce));
    holder.wait();
}

#[test]
fn without_the_request_a_dead_holders_lock_is_held_until_its_ttl_has_passed() {
    let sandbox = Sandbox::new();
    plant(&sandbox.lock(), &dead(), 0);
    sandbox.withlock().arg("-n").lock().args(["--", "true"]).run().exited(75);
    assert_eq!(at_once(&sandbox), 0, "the same lock, on request");
}

#[test]
fn a_free_guard_is_not_believed_where_the_record_does_not_vouch_for_it() {
    type Change = fn(&mut Record);
    let members: [(&str, Change); 5] = [
        ("--close: the wrapper alone had it", |record| record.guard = Guard::Wrapper),
        ("nobody had it", |record| record.guard = Guard::None),
        ("another boot", |record| record.boot_id = "0b0b0b0b-0000-4000-8000-000000000000".into()),
        ("no boot at all", |record| record.boot_id = String::new()),
        ("another device", |record| record.dev += 1),
    ];
    for (what, change) in members {
        let sandbox = Sandbox::new();
        let lock = sandbox.lock();
        plant(&lock, &dead(), 0);
        // Planting fills the device in; it is part of what is changed.
        let mut record = record(&lock).expect("a record");
        change(&mut record);
        std::fs::write(&lock, record.encode()).expect("the record");
        let before = Snapshot::of(&lock);
        assert_eq!(at_once(&sandbox), 75, "{what}");
        assert_eq!(Snapshot::of(&lock), before, "{what}");
        assert!(slots(&lock).is_empty(), "{what}");
    }
}

#[test]
fn whoever_still_has_the_guard_vetoes_it() {
    // A stranger's flock, a daemon that outlived the command and its wrapper, and a living holder.
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    plant(&sandbox.lock(), &dead(), 0);
    let stranger = sandbox.sh(format!("exec 9<a.lock; flock 9; {}", gate.script())).start();
    gate.wait_inside();
    assert_eq!(at_once(&sandbox), 75, "a stranger");
    gate.open();
    stranger.wait().exited(0);
    assert_eq!(at_once(&sandbox), 0, "the stranger is gone");

    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().lock().sh(format!("{} & wait", gate.script())).start();
    gate.wait_inside();
    assert_eq!(at_once(&sandbox), 75, "a living holder");
    holder.send(Signal::SIGKILL);
    holder.wait();
    assert_eq!(at_once(&sandbox), 75, "what its command left running");
    gate.open();
    sandbox.wait_until_nothing_runs();
    assert_eq!(at_once(&sandbox), 0, "all are gone");
}

#[test]
fn verbose_tells_whose_lock_was_ended_on_the_way_why_and_where_its_record_lies() {
    let host = planted(1_000).host;
    let stale = planted(1_000);
    let whose = format!("of pid 4194303 on {host} (user root, dead-job)");
    for (options, record, age_ms, what, why) in [
        (&["-v"][..], stale.clone(), 60_000, "stale", "not renewed within its ttl, 1s"),
        (&["-v", "--evict-dead"], dead(), 0, "dead", "nobody lives who had its guard"),
    ] {
        let sandbox = Sandbox::new();
        plant(&sandbox.lock(), &record, age_ms);
        let finished = sandbox.withlock().args(options).args(["-n", "a.lock", "--", "true"]).run();
        finished.exited(0);
        let said = finished.err();
        let lies_in = slots(&sandbox.lock())[0].path.file_name().expect("a name").display().to_string();
        let line = format!("withlock: a.lock: ended the {what} lock {whose}: {why}; its record lies in {lies_in}");
        let lines: Vec<&str> = said.lines().collect();
        assert_eq!((lines[0], lines.len()), (line.as_str(), 2), "{said}");
        assert!(lines[1].starts_with("withlock: a.lock: locked, nonce "), "{said}");
    }
    // One that was blank, by a script; and without -v not a word.
    for (quiet, expected) in [("-v", 2), ("-q", 0)] {
        let sandbox = Sandbox::new();
        crate::harness::plant_bytes(&sandbox.lock(), b"", 120_000);
        let said = sandbox.withlock().args(["acquire", "-n", quiet, "a.lock"]).run().err();
        assert_eq!(said.lines().count(), expected, "{said}");
        let line =
            "withlock: a.lock: ended the stale lock without a record: not renewed within its ttl, 1m; its record";
        assert_eq!(said.starts_with(line), quiet == "-v", "{said}");
    }
}
