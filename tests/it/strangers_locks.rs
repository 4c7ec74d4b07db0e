//! A stranger who locks our files with flock(1): the lock itself, its quarantine, the record in that, the lock
//! of a directory of numbers. What waits for it waits quietly, and goes on when it lets go.
//!
//! Needs flock(1).

use std::fs;
use std::path::Path;
use std::time::Duration;

use withlock::record::SlotName;

use crate::harness::{Gate, Running, Sandbox, age, inode, plant, plant_bytes, planted, record};

const OLD_MS: u64 = 600_000;

/// Somebody who has this file locked until the gate is opened.
fn stranger(sandbox: &Sandbox, how: &str, file: &Path) -> (Running, Gate) {
    let mut gate = sandbox.gate();
    let running = sandbox.program("flock").arg(how).arg(file).args(["-c", &gate.script()]).start();
    gate.wait_inside();
    (running, gate)
}

#[test]
fn a_locked_lock_is_vouched_for_until_it_is_let_go_and_an_operator_may_insist() {
    for how in ["--exclusive", "--shared"] {
        let sandbox = Sandbox::new();
        plant(&sandbox.lock(), &planted(1_000), OLD_MS);
        let before = inode(&sandbox.lock());
        let (running, mut gate) = stranger(&sandbox, how, &sandbox.lock());
        let busy = sandbox.withlock().arg("-n").lock().args(["--", "true"]).run();
        busy.exited(75).one_line(&["a process still has its guard"]);
        sandbox.withlock().arg("break").lock().run().exited(75).one_line(&["not broken", "guard"]);
        assert_eq!(inode(&sandbox.lock()), before);
        assert_eq!(sandbox.names(), ["a.lock"], "nothing is left of the tries");
        gate.open();
        running.wait().exited(0);
        sandbox.withlock().arg("-n").lock().args(["--", "true"]).run().exited(0).silent();

        plant(&sandbox.lock(), &planted(1_000), OLD_MS);
        let (running, mut gate) = stranger(&sandbox, how, &sandbox.lock());
        sandbox.withlock().args(["break", "--force"]).lock().run().exited(0);
        sandbox.withlock().arg("-n").lock().args(["--", "true"]).run().exited(0).silent();
        gate.open();
        running.wait().exited(0);
    }
}

#[test]
fn a_locked_quarantine_is_not_entered_waiting_for_it_costs_nothing_and_it_is_entered_afterwards() {
    let sandbox = Sandbox::new();
    let owner = planted(1_000);
    plant(&sandbox.lock(), &owner, OLD_MS);
    let before = inode(&sandbox.lock());
    let slot = sandbox.path(SlotName::of(&owner).file_name("a.lock".as_ref()));
    fs::create_dir(&slot).expect("a slot");
    let (running, mut gate) = stranger(&sandbox, "--exclusive", &slot);
    let at_once = sandbox.withlock().arg("-n").lock().args(["--", "true"]).run();
    at_once.exited(75).one_line(&["another process is ending it"]);
    for force in [&[][..], &["--force"]] {
        let refused = sandbox.withlock().arg("break").args(force).lock().run();
        refused.exited(75).one_line(&["not broken", "another process is ending it"]);
    }
    assert_eq!(inode(&sandbox.lock()), before);
    let patient = sandbox.withlock().args(["-w", "1.5s"]).lock().args(["--", "true"]).run();
    patient.exited(75);
    assert!(patient.cpu < Duration::from_millis(200), "{patient} used {:?}", patient.cpu);
    let waiter = sandbox.withlock().lock().args(["--", "true"]).start();
    waiter.wait_for_stderr("another process is ending it");
    gate.open();
    running.wait().exited(0);
    waiter.wait().exited(0);
    let ended = record(&slot.join("lock")).map(|record| record.nonce);
    assert_eq!(ended, Some(owner.nonce), "in its own quarantine");
}

#[test]
fn a_locked_record_in_quarantine_keeps_it_and_stops_no_contender() {
    let sandbox = Sandbox::new();
    let owner = planted(1_000);
    let slot = sandbox.path(SlotName::of(&owner).file_name("a.lock".as_ref()));
    fs::create_dir(&slot).expect("a slot");
    plant(&slot.join("lock"), &owner, OLD_MS);
    age(&slot, OLD_MS);
    for file in [slot.join("lock"), slot.clone()] {
        let (running, mut gate) = stranger(&sandbox, "--exclusive", &file);
        sandbox.withlock().arg("-n").lock().args(["--", "true"]).run().exited(0).silent();
        sandbox.withlock().arg("reclaim").lock().run().exited(0);
        assert!(slot.join("lock").exists());
        gate.open();
        running.wait().exited(0);
    }
    sandbox.withlock().arg("reclaim").lock().run().exited(0);
    assert!(!slot.exists());
}

#[test]
fn a_locked_lock_of_a_directory_of_numbers_stops_no_number() {
    let sandbox = Sandbox::new();
    fs::create_dir(sandbox.path("numbers")).expect("a directory");
    let lock = sandbox.path("numbers/lock");
    let (running, mut gate) = stranger(&sandbox, "--exclusive", &lock);
    let numbers: Vec<String> = (0..3)
        .map(|_| {
            let reserved = sandbox.withlock().args(["reserve", "--wait", "0.05", "numbers"]).run();
            reserved.exited(0).one_line(&["numbers/lock: reserved without the lock"]);
            reserved.out().trim().to_owned()
        })
        .collect();
    assert_eq!(numbers, ["1", "2", "3"]);
    assert_eq!(fs::read(&lock).expect("their file"), b"", "as it was");
    gate.open();
    running.wait().exited(0);
}

#[test]
fn an_empty_file_that_another_tool_has_locked_by_fcntl_is_not_taken_over() {
    let sandbox = Sandbox::new();
    plant_bytes(&sandbox.lock(), b"", 3_600_000);
    let mut gate = sandbox.gate();
    let other = sandbox.program("lckdo").lock().args(["sh", "-c", &gate.script()]).start();
    gate.wait_inside();
    sandbox
        .withlock()
        .arg("-n")
        .lock()
        .args(["--", "true"])
        .run()
        .exited(75)
        .one_line(&["a process still has its guard"]);
    gate.open();
    other.wait().exited(0);
    sandbox.withlock().arg("-n").lock().args(["--", "true"]).run().exited(0);
}
