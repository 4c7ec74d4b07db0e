//! A holder may die at any moment: whoever waits gets in within one ttl and a second. Random moments here;
//! the moments between any two system calls are in `injected`.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::harness::{
    Moments, Run, Sandbox, age, blank_ages_ms, in_lanes, record, send_to_group, shipped, slack, slots,
};

const TTL_MS: u64 = 1_000;
/// One ttl and a second.
const PATIENCE: Duration = Duration::from_millis(TTL_MS + 1_000);
/// Sandboxes at a time: they sleep, mostly.
const LANES: usize = 12;

/// A holder of the shipped program whose command ends at once, or only when it is killed.
fn holder<'s>(sandbox: &'s Sandbox, ends: bool) -> Run<'s> {
    let run = sandbox.shipped().args(["--ttl", "1s"]).lock().own_group();
    if ends { run.args(["--", "true"]) } else { run.args(["--", "sleep", "1000"]) }
}

/// After a death: a contender that starts now gets in, in time. Returns how long it took.
fn assert_the_next_gets_in(sandbox: &Sandbox, what: &str) -> Duration {
    let lock = sandbox.lock();
    if lock.exists() && record(&lock).is_none() {
        // A blank lock's ttl is not in a record but a fixed minute, of which a second is left here.
        age(&lock, blank_ages_ms().0 + 9_000);
    }
    let begun = Instant::now();
    let next = sandbox.shipped().args(["--ttl", "1s", "-w", "20s"]).lock().args(["--", "true"]).run();
    let took = next.ended - begun;
    assert_eq!(next.code(), Some(0), "{what}: {next}");
    assert!(took < PATIENCE + slack(sandbox, took, PATIENCE), "{what}: only after {took:?}; {:?}", sandbox.names());
    let left = sandbox.names();
    let slot_count = slots(&lock).len();
    assert!(!lock.exists() && left.len() == slot_count, "{what}: left behind: {left:?}");
    took
}

#[test]
fn a_holder_killed_at_any_of_240_random_moments_lets_the_next_in_within_its_ttl() {
    shipped();
    let mut moments = Moments::new("random deaths");
    // Most of a short command's life: from its start to well after its end.
    let deaths: Vec<_> = (0..240).map(|at| (at, moments.within(Duration::from_millis(12)))).collect();
    let outcomes = Mutex::new(BTreeMap::<&str, usize>::new());
    in_lanes(LANES, deaths, |(at, moment)| {
        let sandbox = if at % 2 == 0 { Sandbox::new() } else { Sandbox::in_memory() };
        let ends = at % 3 != 0;
        let running = holder(&sandbox, ends).start();
        // This is the random moment itself, not a wait for anything.
        std::thread::sleep(moment);
        send_to_group(running.pid(), Signal::SIGKILL);
        let outcome = if running.wait().signal() == Some(9) { "killed" } else { "ended before" };
        let found = match (sandbox.lock().exists(), slots(&sandbox.lock()).len()) {
            (false, 0) => "nothing",
            (true, 0) => "a lock",
            (false, _) => "a slot",
            (true, _) => "both",
        };
        {
            let mut outcomes = outcomes.lock().expect("outcomes");
            *outcomes.entry(outcome).or_default() += 1;
            *outcomes.entry(found).or_default() += 1;
        }
        assert_the_next_gets_in(&sandbox, &format!("killed after {moment:?}, a command that ends: {ends}"));
    });
    let outcomes = outcomes.into_inner().expect("outcomes");
    println!("{outcomes:?}");
    // The power of the test: holders really died, and really with the lock.
    assert!(outcomes.get("killed").is_some_and(|count| *count >= 60), "{outcomes:?}");
    assert!(outcomes.get("a lock").is_some_and(|count| *count >= 30), "{outcomes:?}");
}

#[test]
fn a_waiter_that_was_already_asleep_gets_in_within_the_ttl_of_a_killed_holder() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = sandbox.shipped().args(["--ttl", "1s"]).lock().own_group().sh(gate.script()).start();
    gate.wait_inside();
    let waiter = sandbox.shipped().args(["-w", "30s"]).lock().args(["--", "true"]).start();
    waiter.wait_asleep_in_flock();
    let killed = Instant::now();
    send_to_group(holder.pid(), Signal::SIGKILL);
    holder.wait();
    let finished = waiter.wait();
    finished.exited(0);
    let took = finished.ended - killed;
    assert!(took < PATIENCE + slack(&sandbox, took, PATIENCE), "{took:?}");
}
