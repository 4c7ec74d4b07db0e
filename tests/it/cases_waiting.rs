//! Faults that others had: waiting.

use std::fs;
use std::time::{Duration, Instant};

use withlock::record::Guard;

use crate::harness::{
    Running, Sandbox, Snapshot, calls, cpu_time, eventually, plant, plant_bytes, planted, record, shipped, with_record,
};

const WAITERS: usize = 100;

#[test]
fn c45_a_hundred_waiters_use_next_to_no_cpu_and_all_get_in() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = sandbox.shipped().lock().sh(gate.script()).start();
    gate.wait_inside();
    let start = |_| sandbox.shipped().lock().sh("echo in >>log").start();
    let waiters: Vec<Running> = (0..WAITERS).map(start).collect();
    waiters.iter().for_each(Running::wait_asleep_in_flock);
    // What they use while they wait, long enough to see every backstop several times.
    let (begun, before) = (Instant::now(), total_cpu(&waiters));
    std::thread::sleep(Duration::from_secs(4));
    let (elapsed, used) = (begun.elapsed(), total_cpu(&waiters) - before);
    let share = used.as_secs_f64() / elapsed.as_secs_f64() / WAITERS as f64;
    println!("each of {WAITERS} waiters used {:.4} % of a CPU", share * 100.0);
    assert!(share < 0.01, "{:.2} % each", share * 100.0);
    gate.open();
    holder.wait().exited(0).silent();
    for waiter in waiters {
        waiter.wait().exited(0);
    }
    assert_eq!(fs::read_to_string(sandbox.path("log")).expect("a log").lines().count(), WAITERS);
    assert_eq!(sandbox.names(), ["log"]);
}

fn total_cpu(waiters: &[Running]) -> Duration {
    waiters.iter().filter_map(|waiter| cpu_time(waiter.pid())).sum()
}

#[test]
fn c45_waiters_without_a_shared_guard_use_next_to_no_cpu_either() {
    let sandbox = Sandbox::new();
    // Its guard is none: there is nothing to sleep on, and somebody must look.
    plant(&sandbox.lock(), &planted(3_600_000), 0);
    let waiters: Vec<Running> = (0..20).map(|_| sandbox.shipped().lock().args(["--", "true"]).start()).collect();
    eventually("all of them wait", || {
        let sleeping = |waiter: &Running| crate::harness::process(waiter.pid()).is_some_and(|found| found.state == 'S');
        if waiters.iter().all(sleeping) { Ok(()) } else { Err(()) }
    });
    let (begun, before) = (Instant::now(), total_cpu(&waiters));
    std::thread::sleep(Duration::from_secs(3));
    let share = (total_cpu(&waiters) - before).as_secs_f64() / begun.elapsed().as_secs_f64() / 20.0;
    assert!(share < 0.01, "{:.2} % each", share * 100.0);
    fs::remove_file(sandbox.lock()).expect("the planted lock");
    for waiter in waiters {
        waiter.wait().exited(0);
    }
}

#[test]
fn a_release_wakes_a_waiter_through_the_guard_not_through_a_poll() {
    shipped();
    let mut fastest = Duration::MAX;
    for _ in 0..7 {
        let sandbox = Sandbox::new();
        let mut gate = sandbox.gate();
        let holder = sandbox.shipped().lock().sh(gate.script()).start();
        gate.wait_inside();
        let waiter = sandbox.shipped().lock().args(["--", "true"]).start();
        waiter.wait_asleep_in_flock();
        gate.open();
        let released = holder.wait().ended;
        let woken = waiter.wait();
        woken.exited(0);
        fastest = fastest.min(woken.ended.saturating_duration_since(released));
    }
    // Its own command included; a poll of any pace would show in the fastest of seven.
    assert!(fastest < Duration::from_millis(30), "{fastest:?}");
}

#[test]
fn a_waiter_makes_only_a_few_system_calls_a_second_and_no_inotify() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().lock().sh(gate.script()).start();
    gate.wait_inside();
    let log = sandbox.io_path("strace");
    let waiter = sandbox.shipped().args(["-w", "3s"]).lock().args(["--", "true"]).traced(&log, &["-f"]).run();
    waiter.exited(75);
    let all = calls(&log);
    assert!(all.len() < 250, "{} calls", all.len());
    assert!(!fs::read_to_string(&log).expect("a trace").contains("inotify"));
    gate.open();
    holder.wait().exited(0);
}

#[test]
fn a_wait_ends_when_it_was_told_to_and_says_so() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().lock().sh(gate.script()).start();
    gate.wait_inside();
    let members = [
        ("0", 0),
        ("0s", 0),
        ("100ms", 100),
        ("0.3", 300),
        ("1s", 1_000),
        ("1.2", 1_200),
        ("0m1s", 1_000),
        ("2500ms", 2_500),
    ];
    for (wait, least_ms) in members {
        let finished = sandbox.withlock().args(["-w", wait]).lock().args(["--", "true"]).run();
        finished.exited(75).says(&["a.lock", &format!("pid {}", holder.pid()), "withlock inspect"]);
        // One line; a wait of more than a second has said before what it waits for, once.
        let lines = if least_ms > 1_000 { 2 } else { 1 };
        assert!(finished.err().lines().count() <= lines, "-w {wait}: {}", finished.err());
        let took_ms = u64::try_from(finished.took.as_millis()).expect("a time");
        assert!((least_ms..least_ms + 2_000).contains(&took_ms), "-w {wait}: {took_ms} ms");
    }
    gate.open();
    holder.wait().exited(0);
}

#[test]
fn on_busy_skip_is_exit_0_with_one_line_after_the_wait_and_without_it() {
    let sandbox = Sandbox::new();
    plant(&sandbox.lock(), &planted(3_600_000), 0);
    let before = Snapshot::of(&sandbox.lock());
    for wait in [["-w", "0"], ["-w", "300ms"]] {
        let run = sandbox.withlock().args(wait).args(["--on-busy", "skip"]).lock().args(["--", "touch", "ran"]);
        run.run().exited(0).one_line(&["a.lock"]);
        let quiet = sandbox.withlock().arg("-q").args(wait).args(["--on-busy", "skip"]).lock().args(["--", "true"]);
        quiet.run().exited(0).silent();
    }
    assert_eq!(sandbox.names(), ["a.lock"]);
    assert_eq!(Snapshot::of(&sandbox.lock()), before);
}

#[test]
fn a_waiter_gets_in_as_soon_as_the_lease_of_a_dead_holder_runs_out() {
    let sandbox = Sandbox::new();
    for guard in [Guard::None, Guard::Inherited, Guard::Wrapper] {
        let mut dead = planted(2_000);
        dead.guard = guard;
        plant(&sandbox.lock(), &dead, 0);
        let begun = Instant::now();
        let finished = sandbox.withlock().lock().args(["--", "true"]).run();
        finished.exited(0);
        let took = finished.ended - begun;
        let in_time = Duration::from_millis(1_900)..Duration::from_millis(3_000);
        assert!(in_time.contains(&took), "{guard:?}: {took:?}");
    }
}

#[test]
fn a_waiter_that_is_given_the_guard_of_a_young_lock_does_not_keep_it() {
    // The record says that there is a guard, but its holder is gone: the guard is free, the lock is not.
    let sandbox = Sandbox::new();
    let mut young = planted(3_600_000);
    young.guard = Guard::Inherited;
    plant(&sandbox.lock(), &young, 0);
    let waiter = sandbox.withlock().args(["-w", "1h"]).lock().args(["--", "true"]).start();
    eventually("it sleeps", || match crate::harness::process(waiter.pid()) {
        Some(process) if process.state == 'S' => Ok(()),
        other => Err(other),
    });
    eventually("the guard is free again", || {
        let tried = sandbox.program("flock").arg("-n").lock().arg("true").run();
        if tried.code() == Some(0) { Ok(()) } else { Err(tried.code()) }
    });
    let before = Snapshot::of(&sandbox.lock());
    crate::harness::never_during("the guard is taken for long", Duration::from_millis(1_500), || {
        let tried = sandbox.program("flock").args(["-w", "1"]).lock().arg("true").run();
        if tried.code() == Some(0) { Ok(()) } else { Err(tried.code()) }
    });
    assert_eq!(Snapshot::of(&sandbox.lock()), before);
    drop(waiter);
}

#[test]
fn a_waiter_does_not_turn_a_newborn_locks_maker_away() {
    // The maker is held up between its create and its guard; waiters come meanwhile.
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let maker = sandbox.shipped().lock().sh(gate.script()).delayed(&sandbox.io_path("strace"), "flock", 1_500).start();
    eventually("the newborn lock is there", || fs::metadata(sandbox.lock()).map(drop));
    let start = |_| sandbox.withlock().lock().args(["--", "sh", "-c", "echo in >>log"]).start();
    let waiters: Vec<Running> = (0..5).map(start).collect();
    gate.wait_inside();
    assert_eq!(with_record(&sandbox.lock()).pid, u32::try_from(maker.pid()).expect("a pid"));
    assert!(!sandbox.path("log").exists(), "the first to create is the first inside");
    gate.open();
    maker.wait().exited(0);
    for waiter in waiters {
        waiter.wait().exited(0);
    }
}

#[test]
fn a_waiter_gets_in_after_a_blank_lock_has_come_of_age() {
    let sandbox = Sandbox::new();
    plant_bytes(&sandbox.lock(), b"", 58_500);
    let finished = sandbox.withlock().args(["-w", "30s"]).lock().args(["--", "true"]).run();
    finished.exited(0);
    assert!((1_000..4_500).contains(&finished.took.as_millis()), "{:?}", finished.took);
}

#[test]
fn a_waiter_notices_within_a_second_or_so_that_the_lock_was_removed() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().args(["--on-lost", "warn"]).lock().sh(gate.script()).start();
    gate.wait_inside();
    let waiter = sandbox.withlock().lock().args(["--", "true"]).start();
    waiter.wait_asleep_in_flock();
    let removed = Instant::now();
    fs::remove_file(sandbox.lock()).expect("the lock");
    let finished = waiter.wait();
    finished.exited(0);
    assert!(finished.ended - removed < Duration::from_secs(4), "{:?}", finished.ended - removed);
    assert!(record(&sandbox.lock()).is_none());
    gate.open();
    holder.wait().exited(76);
}
