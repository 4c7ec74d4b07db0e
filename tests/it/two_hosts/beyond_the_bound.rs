//! What is not claimed. A holder that is stopped for longer than its lease loses it to another host, while
//! its command still exists: it learns so when it goes on. And a call that hangs for longer than the reclaim
//! age can hit a successor.

use std::ffi::OsString;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::harness::{Gate, Running, eventually, mtime, send_to_group, slots};

use super::host::Server;
use super::scene::{On, Scene, go_on, stop, undisturbed};

/// A holder on A that is stopped inside, with its command, until somebody on B is inside. Both run `early`,
/// wait at their gate, and run `late`.
pub(super) fn overtaken(
    scene: &Scene,
    gates: &mut [Gate; 2],
    options: impl Fn(On) -> Vec<OsString>,
    [early, late]: [&str; 2],
) -> [Running; 2] {
    let start = |on: On, gate: &Gate| {
        let text = format!("{early}; {}; {late}", gate.script());
        let (lock, options) = (scene.lock(on), options(on));
        scene.start(on, |withlock| withlock.args(["--ttl", "1s", "-w", "30s"]).args(options).arg(lock).sh(text))
    };
    let overtaken = start(On::A, &gates[0]);
    gates[0].wait_inside();
    stop(&overtaken);
    let successor = start(On::B, &gates[1]);
    gates[1].wait_inside();
    [overtaken, successor]
}

#[test]
fn a_holder_stopped_beyond_its_lease_is_told_so_when_it_goes_on() {
    undisturbed(|| {
        let scene = Scene::new(Server::default());
        let mut gates = [scene.sandbox.gate(), scene.sandbox.gate()];
        let [overtaken, successor] = overtaken(&scene, &mut gates, |_| Vec::new(), [":", ":"]);
        let epoch = scene.epoch();
        go_on(&overtaken);
        let woken = Instant::now();
        let overtaken = overtaken.wait();
        overtaken.exited(76).says(&["lost"]);
        // Its first act is a renewal; its command, which only reads, ends at the first signal.
        assert!(overtaken.ended - woken < Duration::from_secs(1), "{:?}", overtaken.ended - woken);
        assert_eq!(scene.epoch(), epoch, "the successor's lock is as it was");
        gates[1].open();
        successor.wait().exited(0);
    });
}

#[test]
fn a_release_that_hangs_until_its_quarantine_was_reclaimed_moves_a_successors_lock() {
    undisturbed(|| {
        let mut scene = Scene::new(Server::default());
        let mut gates = [scene.sandbox.gate(), scene.sandbox.gate()];
        let start = |scene: &Scene, on: On, gate: &Gate| {
            let lock = scene.lock(on);
            scene.start(on, |withlock| withlock.args(["--ttl", "1s", "-w", "30s"]).arg(lock).sh(gate.script()))
        };
        let late = start(&scene, On::A, &gates[0]);
        gates[0].wait_inside();
        scene.host(On::A).hold_next("rename2", "a.lock");
        gates[0].open();
        scene.host(On::A).wait_until_held();

        // Its epoch is ended, and so is the next one, whose holder dies: whoever ends that one reclaims what
        // has become old enough.
        let dead = start(&scene, On::B, &gates[1]);
        gates[1].wait_inside();
        let ended = slots(&scene.truth());
        assert_eq!(ended.len(), 1);
        eventually("the quarantine may be reclaimed", || {
            let age = mtime(&ended[0].path).elapsed().expect("in the past");
            if age > Duration::from_millis(1_000 + 5_000) { Ok(()) } else { Err(age) }
        });
        send_to_group(dead.pid(), Signal::SIGKILL);
        let successor = start(&scene, On::B, &gates[1]);
        gates[1].wait_inside();
        assert!(!ended[0].path.exists(), "reclaimed");

        scene.host(On::A).open_gate();
        // It was given up after a few seconds, and landed all the same.
        late.wait().exited(74);
        let landed = Instant::now();
        // Within a second, the backstop of a holder, it is told.
        let successor = successor.wait();
        successor.exited(76).says(&["was lost"]);
        assert!(successor.ended < landed + Duration::from_millis(1_500), "{:?}", successor.ended - landed);
    });
}
