//! A file server whose clock is not the hosts': stale is judged by two stamps of the server, so that
//! nobody's clock matters, and a stamp that lies in the future is watched instead.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::harness::{Finished, Gate, Running, send_to_group, slots};

use super::host::Server;
use super::scene::{On, Scene, TWO_INSIDE, undisturbed};

const HOUR_MS: i64 = 3_600_000;

fn holder(scene: &Scene, gate: &mut Gate) -> Running {
    let (inside, lock) = (format!("{}; {}", scene.alone(), gate.script()), scene.lock(On::A));
    let running = scene.start(On::A, |withlock| withlock.args(["-w", "30s", "--ttl", "2s"]).arg(lock).sh(inside));
    gate.wait_inside();
    running
}

fn contender(scene: &Scene, patience: &str) -> Running {
    let (inside, lock) = (scene.alone(), scene.lock(On::B));
    scene.start(On::B, |withlock| withlock.args(["-w", patience, "--ttl", "2s"]).arg(lock).sh(inside))
}

/// A holder's host dies: whoever waits on the other gets in within one ttl and a second.
fn assert_that_a_dead_holder_is_recovered(scene: &Scene, gate: &mut Gate) {
    let dead = holder(scene, gate);
    let waiter = contender(scene, "30s");
    waiter.wait_for_stderr("a.lock");
    let killed = Instant::now();
    send_to_group(dead.pid(), Signal::SIGKILL);
    let waiter = waiter.wait();
    waiter.exited(0);
    let waited = waiter.ended - killed;
    assert!(waited <= Duration::from_secs(2 + 1), "{waited:?}");
}

#[test]
fn a_live_lock_is_busy_and_a_dead_one_recovered_whatever_the_servers_clock_says() {
    undisturbed(|| {
        for clock_offset_ms in [-HOUR_MS, HOUR_MS] {
            let scene = Scene::new(Server { clock_offset_ms, ..Server::default() });
            let mut gate = scene.sandbox.gate();
            let held = holder(&scene, &mut gate);
            // Longer than the ttl, so that it must have been renewed to be busy still.
            contender(&scene, "5s").wait().exited(75);
            assert_eq!(slots(&scene.truth()).len(), 0, "a look that was mistaken leaves nothing behind");
            gate.open();
            held.wait().exited(0).silent();
            assert_that_a_dead_holder_is_recovered(&scene, &mut gate);
        }
    });
}

#[test]
fn a_servers_clock_that_steps_back_takes_no_live_lock_and_keeps_no_dead_one() {
    undisturbed(|| {
        let mut scene = Scene::new(Server::default());
        let mut gate = scene.sandbox.gate();
        let held = holder(&scene, &mut gate);
        let waiter = contender(&scene, "5s");
        waiter.wait_for_stderr("a.lock");
        scene.hosts.step_clock(-HOUR_MS);
        waiter.wait().exited(75);
        gate.open();
        held.wait().exited(0).silent();
        assert_that_a_dead_holder_is_recovered(&scene, &mut gate);
    });
}

/// A holder on A, and somebody on B whose own clock has stepped, and who leaves these steps out.
fn beside_a_stepped_clock(step_seconds: i64, steps: &str) -> (Scene, Running, Gate, Finished) {
    let scene = Scene::new(Server::default());
    let mut gate = scene.sandbox.gate();
    let (inside, lock) = (format!("{}; {}", scene.alone(), gate.script()), scene.lock(On::A));
    let options = ["--ttl", "2s", "--on-lost", "warn"];
    let held = scene.start(On::A, |withlock| withlock.args(options).arg(lock).sh(inside));
    gate.wait_inside();
    let clock = scene.sandbox.io_path("clock");
    std::fs::write(&clock, "0").expect("a clock");
    let (inside, lock) = (scene.alone(), scene.lock(On::B));
    let waiter = scene.start(On::B, |withlock| {
        let withlock = withlock.env("WITHLOCK_WALL_CLOCK", &clock).leave_out(steps);
        withlock.args(["-w", "4s", "--ttl", "2s"]).arg(lock).sh(inside)
    });
    waiter.wait_for_stderr("a.lock");
    let next = clock.with_extension("next");
    std::fs::write(&next, step_seconds.to_string()).expect("a clock");
    std::fs::rename(next, &clock).expect("a step");
    let waiter = waiter.wait();
    (scene, held, gate, waiter)
}

#[test]
fn a_contender_whose_own_clock_steps_takes_no_live_lock() {
    undisturbed(|| {
        for step_seconds in [3_600, -3_600] {
            let (scene, held, mut gate, waiter) = beside_a_stepped_clock(step_seconds, "");
            waiter.exited(75);
            assert_eq!(slots(&scene.truth()).len(), 0, "a look that was mistaken leaves nothing behind");
            gate.open();
            held.wait().exited(0);
        }
    });
}

#[test]
fn a_contender_that_does_not_compare_two_stamps_of_the_server_believes_its_own_clock_and_gets_in() {
    undisturbed(|| {
        // The negative control of the test above: nobody compares two stamps of the server.
        let (_scene, held, mut gate, waiter) = beside_a_stepped_clock(3_600, "verify");
        waiter.exited(TWO_INSIDE);
        gate.open();
        held.wait().exited(76).says(&["was lost"]);
    });
}
