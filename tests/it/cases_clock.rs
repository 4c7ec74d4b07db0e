//! Faults that others had: clocks and leases.

use std::time::{Duration, Instant, SystemTime};

use nix::sys::signal::Signal;
use withlock::record::Guard;

use crate::harness::{
    Running, Sandbox, Snapshot, age, eventually, inode, mtime, never_during, plant, planted, process, record, send,
    set_mtime, slots, with_record,
};

const YEAR: Duration = Duration::from_secs(365 * 86_400);

#[test]
fn c18_a_lock_from_the_future_is_recovered_after_one_ttl_of_being_watched_unchanged() {
    let far = SystemTime::UNIX_EPOCH + Duration::from_secs(4_000_000_000);
    let recovered = |future: SystemTime| {
        let sandbox = Sandbox::new();
        plant(&sandbox.lock(), &planted(2_000), 0);
        set_mtime(&sandbox.lock(), future);
        let finished = sandbox.withlock().args(["-w", "30s"]).lock().args(["--", "true"]).run();
        finished.exited(0);
        // Not before it was watched for its whole ttl; and then soon.
        assert!(finished.took >= Duration::from_secs(2), "{:?}", finished.took);
        assert!(finished.took < Duration::from_secs(4), "{:?}", finished.took);
        assert_eq!(slots(&sandbox.lock()).len(), 1);
    };
    std::thread::scope(|scope| {
        for future in [SystemTime::now() + YEAR, SystemTime::now() + Duration::from_secs(30), far] {
            scope.spawn(move || recovered(future));
        }
    });
}

#[test]
fn c18_a_lock_from_the_future_is_held_for_who_cannot_watch_that_long() {
    let sandbox = Sandbox::new();
    plant(&sandbox.lock(), &planted(1_000), 0);
    set_mtime(&sandbox.lock(), SystemTime::now() + YEAR);
    let before = Snapshot::of(&sandbox.lock());
    let finished = sandbox.withlock().arg("-n").lock().args(["--", "true"]).run();
    finished.exited(75).one_line(&["a.lock", "future"]);
    assert_eq!(Snapshot::of(&sandbox.lock()), before);
}

#[test]
fn c18_a_lock_from_the_future_whose_time_stamp_moves_is_never_taken() {
    let sandbox = Sandbox::new();
    plant(&sandbox.lock(), &planted(1_000), 0);
    set_mtime(&sandbox.lock(), SystemTime::now() + YEAR);
    let nonce = record(&sandbox.lock()).map(|record| record.nonce);
    // A holder on another host whose clock is a year ahead: it renews, and no guard of it is seen here.
    let waiter = sandbox.withlock().args(["-w", "4s"]).lock().args(["--", "true"]).start();
    let mut ahead = YEAR;
    let finished = loop {
        ahead += Duration::from_millis(100);
        set_mtime(&sandbox.lock(), SystemTime::now() + ahead);
        match waiter_ended(&waiter) {
            false => std::thread::sleep(Duration::from_millis(100)),
            true => break waiter.wait(),
        }
    };
    finished.exited(75);
    assert_eq!(record(&sandbox.lock()).map(|record| record.nonce), nonce);
    assert_eq!(sandbox.names(), ["a.lock"]);
}

fn waiter_ended(waiter: &Running) -> bool {
    process(waiter.pid()).is_none_or(|process| process.state == 'Z')
}

#[test]
fn c18_a_time_stamp_from_before_1970_is_only_old() {
    let sandbox = Sandbox::new();
    plant(&sandbox.lock(), &planted(1_000), 0);
    set_mtime(&sandbox.lock(), SystemTime::UNIX_EPOCH - Duration::from_secs(1_000_000));
    sandbox.withlock().arg("-n").lock().args(["--", "true"]).run().exited(0).silent();
    assert_eq!(slots(&sandbox.lock()).len(), 1);
}

/// A holder with a ttl of one second, its command inside.
fn holder(sandbox: &Sandbox, leave_out: &str, inside: &mut crate::harness::Gate) -> Running {
    let running = sandbox.withlock().leave_out(leave_out).args(["--ttl", "1s"]).lock().sh(inside.script()).start();
    inside.wait_inside();
    with_record(&sandbox.lock());
    running
}

/// Waits until the lock has not been renewed for `duration`.
fn wait_until_unrenewed_for(sandbox: &Sandbox, duration: Duration) {
    eventually("the holder has missed its lease", || match mtime(&sandbox.lock()).elapsed() {
        Ok(age) if age > duration => Ok(()),
        age => Err(age),
    });
}

#[test]
fn c19_a_holder_stopped_beyond_its_ttl_keeps_the_lock_renews_first_and_goes_on() {
    // The wrapper alone; or everything, as a suspended laptop stops it.
    for everything in [false, true] {
        let sandbox = Sandbox::new();
        let mut gate = sandbox.gate();
        let running = holder(&sandbox, "", &mut gate);
        let before = (inode(&sandbox.lock()), record(&sandbox.lock()));
        let mut stopped = vec![running.pid()];
        if everything {
            stopped.extend(crate::harness::descendants(running.pid()).iter().map(|process| process.pid));
        }
        for pid in &stopped {
            send(*pid, Signal::SIGSTOP);
        }
        wait_until_unrenewed_for(&sandbox, Duration::from_millis(1_500));
        for wait in [["-w", "0"], ["-w", "1s"]] {
            sandbox.withlock().args(wait).lock().args(["--", "true"]).run().exited(75);
        }
        let asleep = mtime(&sandbox.lock());
        for pid in stopped.iter().rev() {
            send(*pid, Signal::SIGCONT);
        }
        eventually("it renews as soon as it goes on", || {
            let now = mtime(&sandbox.lock());
            if now > asleep { Ok(()) } else { Err(now) }
        });
        assert_eq!((inode(&sandbox.lock()), record(&sandbox.lock())), before, "the same lock");
        gate.open();
        running.wait().exited(0).silent();
        assert!(sandbox.names().is_empty(), "{:?}", sandbox.names());
    }
}

#[test]
fn c19_without_the_guard_the_stopped_holder_is_robbed_and_learns_it_when_it_goes_on() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let running = holder(&sandbox, "guard", &mut gate);
    send(running.pid(), Signal::SIGSTOP);
    wait_until_unrenewed_for(&sandbox, Duration::from_millis(1_100));
    let mut rival_gate = sandbox.gate();
    let rival = sandbox.withlock().arg("-n").lock().sh(rival_gate.script()).start();
    rival_gate.wait_inside();
    let successor = (inode(&sandbox.lock()), mtime(&sandbox.lock()));
    send(running.pid(), Signal::SIGCONT);
    let lost = running.wait();
    lost.exited(76).says(&["a.lock", "lost"]);
    assert_eq!((inode(&sandbox.lock()), mtime(&sandbox.lock())), successor, "the successor's lock is untouched");
    rival_gate.open();
    rival.wait().exited(0);
}

#[test]
fn c19_a_wall_clock_that_jumped_does_not_cost_a_living_holder_its_lock() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let running = sandbox.withlock().args(["--ttl", "1h"]).lock().sh(gate.script()).start();
    gate.wait_inside();
    let nonce = with_record(&sandbox.lock()).nonce;
    // What a clock set forward by a day looks like from here, then one set back by a day.
    for stamp in [SystemTime::now() - Duration::from_secs(86_400), SystemTime::now() + Duration::from_secs(86_400)] {
        set_mtime(&sandbox.lock(), stamp);
        sandbox.withlock().arg("-n").lock().args(["--", "true"]).run().exited(75);
        sandbox.withlock().args(["-w", "300ms"]).lock().args(["--", "true"]).run().exited(75);
        assert_eq!(with_record(&sandbox.lock()).nonce, nonce);
    }
    assert_eq!(sandbox.names(), ["a.lock"], "no slot of an attempt stays");
    gate.open();
    running.wait().exited(0).silent();
}

#[test]
fn c20_the_holders_ttl_counts_not_the_contenders() {
    let sandbox = Sandbox::new();
    let healthy = planted(3_600_000);
    plant(&sandbox.lock(), &healthy, 10_000);
    let before = Snapshot::of(&sandbox.lock());
    for wait in [["-w", "0"], ["-w", "1500ms"]] {
        sandbox.withlock().args(["--ttl", "1s"]).args(wait).lock().args(["--", "true"]).run().exited(75);
        assert_eq!(Snapshot::of(&sandbox.lock()), before, "a contender with a shorter ttl");
    }
    plant(&sandbox.lock(), &planted(5_000), 6_000);
    let finished = sandbox.withlock().args(["--ttl", "1h", "-n"]).lock().args(["--", "true"]).run();
    finished.exited(0);
}

#[test]
fn a_lock_exactly_within_its_ttl_is_held_and_just_beyond_it_is_not() {
    let sandbox = Sandbox::new();
    plant(&sandbox.lock(), &planted(60_000), 55_000);
    sandbox.withlock().arg("-n").lock().args(["--", "true"]).run().exited(75);
    age(&sandbox.lock(), 60_100);
    sandbox.withlock().arg("-n").lock().args(["--", "true"]).run().exited(0);
}

#[test]
fn a_holder_renews_three_times_per_ttl_for_as_long_as_the_command_runs() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let running = holder(&sandbox, "", &mut gate);
    let begun = Instant::now();
    let mut stamps = vec![mtime(&sandbox.lock())];
    never_during("the lock grows older than its ttl", Duration::from_secs(3), || {
        let stamp = mtime(&sandbox.lock());
        if stamps.last() != Some(&stamp) {
            stamps.push(stamp);
        }
        let longest = stamps.windows(2).filter_map(|pair| pair[1].duration_since(pair[0]).ok()).max();
        if longest > Some(Duration::from_secs(1)) { Err(longest) } else { Ok(()) }
    });
    // Every third of a second; a loaded machine may be late now and then.
    assert!((6..=12).contains(&stamps.len()), "{} in {:?}", stamps.len(), begun.elapsed());
    assert_eq!(with_record(&sandbox.lock()).guard, Guard::Inherited);
    gate.open();
    running.wait().exited(0).silent();
}

#[test]
fn no_renew_is_a_bounded_hold_stale_one_ttl_after_it_was_taken_whoever_lives() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let options = ["--no-renew", "--on-lost", "warn", "--ttl", "1s"];
    let running = sandbox.withlock().args(options).lock().sh(gate.script()).start();
    gate.wait_inside();
    let taken = (mtime(&sandbox.lock()), with_record(&sandbox.lock()));
    assert_eq!(taken.1.guard, Guard::None);
    let early = sandbox.withlock().arg("-n").lock().args(["--", "true"]).run();
    if taken.0.elapsed().is_ok_and(|age| age < Duration::from_millis(1_000)) {
        early.exited(75);
    }
    let next = sandbox.withlock().args(["-w", "30s"]).lock().args(["--", "true"]).run();
    next.exited(0);
    assert!(taken.0.elapsed().is_ok_and(|age| age >= Duration::from_secs(1)));
    gate.open();
    assert_eq!(running.wait().code(), Some(76));
}

#[test]
fn no_renew_ends_the_command_before_anybody_else_could_get_in() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let run = sandbox.withlock().args(["--no-renew", "--ttl", "3s", "--kill-after", "10s"]).lock();
    let running = run.sh(format!("trap '' TERM; {}", gate.script())).start();
    let command = gate.wait_inside();
    let next = sandbox.withlock().args(["-w", "30s"]).lock().sh(format!("kill -0 {command}")).run();
    assert_eq!(next.code(), Some(1), "the command is gone before the next is inside: {next}");
    running.wait().exited(76);
}
