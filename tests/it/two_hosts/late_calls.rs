//! Calls that land late: each test holds one system call of one process at the file server, lets the
//! other host go on, and then lets it land. A step of the protocol is shown by what happens when it is
//! left out.

use std::time::{Duration, SystemTime};

use nix::sys::signal::Signal;

use crate::harness::{Gate, Running, age, blank_ages_ms, eventually, inode, mtime, record, send_to_group, slots};

use super::host::Server;
use super::scene::{On, Scene, TWO_INSIDE, go_on, stop, undisturbed};

/// Long enough that it never runs out in a test by itself: there the stamp is set back.
const LONG_TTL: &str = "60s";
const LONG_TTL_MS: u64 = 60_000;

/// Options of a holder that goes on when it has lost the lock, so that whoever comes finds it inside.
const STAYS: [&str; 2] = ["--on-lost", "warn"];

/// A holder on a host, in a gate.
fn holder(scene: &Scene, on: On, ttl: &str, steps: &str, options: &[&str], gate: &mut Gate) -> Running {
    let inside = format!("{}; {}", scene.alone(), gate.script());
    let lock = scene.lock(on);
    let running = scene.start(on, |withlock| {
        withlock.leave_out(steps).args(["-w", "30s", "--ttl", ttl]).args(options).arg(lock).sh(inside)
    });
    gate.wait_inside();
    running
}

/// A contender on a host that is inside for an instant only.
fn contender(scene: &Scene, on: On, patience: &str, steps: &str) -> Running {
    let (inside, lock) = (scene.alone(), scene.lock(on));
    scene.start(on, |withlock| withlock.leave_out(steps).args(["-w", patience, "--ttl", LONG_TTL]).arg(lock).sh(inside))
}

#[test]
fn a_lock_that_is_held_on_one_host_is_busy_on_the_other() {
    undisturbed(|| {
        let scene = Scene::new(Server::default());
        let mut gate = scene.sandbox.gate();
        let held = holder(&scene, On::A, LONG_TTL, "", &[], &mut gate);
        contender(&scene, On::B, "0", "").wait().exited(75).one_line(&["a.lock", "host-a"]);
        gate.open();
        held.wait().exited(0).silent();
        contender(&scene, On::B, "0", "").wait().exited(0).silent();
        assert!(!scene.truth().exists());
    });
}

#[test]
fn without_exclusive_creation_both_hosts_get_in() {
    undisturbed(|| {
        // The negative control of the test above.
        let scene = Scene::new(Server::default());
        let mut gate = scene.sandbox.gate();
        let _held = holder(&scene, On::A, LONG_TTL, "", &[], &mut gate);
        contender(&scene, On::B, "0", "exclusive,guard,grant-check").wait().exited(TWO_INSIDE);
    });
}

/// A holder on A whose lock looked stale to an evictor on B; while the evictor was on its way to the
/// slot, the holder renewed. Returns the two, the holder still inside.
fn renewed_before_the_evictor_entered(scene: &mut Scene, gate: &mut Gate, steps: &str) -> (Running, Running) {
    let held = holder(scene, On::A, LONG_TTL, "", &STAYS, gate);
    age(&scene.truth(), LONG_TTL_MS + 1_000);
    let slot = scene.slot_name();
    scene.host(On::B).hold_next("mkdir", &slot);
    let evictor = contender(scene, On::B, "0", steps);
    scene.host(On::B).wait_until_held();
    scene.wait_for_renewal(&held);
    scene.host(On::B).open_gate();
    (evictor, held)
}

#[test]
fn an_evictor_that_enters_the_slot_after_a_renewal_withdraws() {
    undisturbed(|| {
        let mut scene = Scene::new(Server::default());
        let mut gate = scene.sandbox.gate();
        let (evictor, held) = renewed_before_the_evictor_entered(&mut scene, &mut gate, "");
        evictor.wait().exited(75);
        assert_eq!(slots(&scene.truth()).len(), 0, "nothing of the evictor's stays behind");
        gate.open();
        held.wait().exited(0).silent();
    });
}

#[test]
fn an_evictor_that_does_not_verify_ends_a_renewed_epoch() {
    undisturbed(|| {
        // The negative control of the test above.
        let mut scene = Scene::new(Server::default());
        let mut gate = scene.sandbox.gate();
        let (evictor, held) = renewed_before_the_evictor_entered(&mut scene, &mut gate, "verify");
        evictor.wait().exited(TWO_INSIDE);
        gate.open();
        held.wait().exited(76).says(&["was lost"]);
    });
}

/// An evictor on B verified that the lock of a holder on A, which was stopped, is stale, and its rename
/// hangs; then the holder goes on. Returns the two, the evictor still hanging.
fn renewed_before_the_rename_landed(
    scene: &mut Scene,
    gate: &mut Gate,
    steps: &str,
    options: &[&str],
) -> (Running, Running) {
    let held = holder(scene, On::A, "3s", steps, options, gate);
    stop(&held);
    age(&scene.truth(), 4_000);
    scene.host(On::B).hold_next("rename2", "a.lock");
    let evictor = contender(scene, On::B, "30s", "");
    scene.host(On::B).wait_until_held();
    go_on(&held);
    (evictor, held)
}

#[test]
fn a_holder_that_sees_somebody_in_its_slot_gives_up_before_the_rename_lands() {
    undisturbed(|| {
        let mut scene = Scene::new(Server::default());
        let mut gate = scene.sandbox.gate();
        let (evictor, held) = renewed_before_the_rename_landed(&mut scene, &mut gate, "", &[]);
        held.wait().exited(76);
        scene.host(On::B).open_gate();
        evictor.wait().exited(0);
    });
}

#[test]
fn a_holder_that_does_not_look_at_its_slot_is_still_inside_when_the_rename_lands() {
    undisturbed(|| {
        // The negative control of the test above.
        let mut scene = Scene::new(Server::default());
        let mut gate = scene.sandbox.gate();
        let (evictor, held) = renewed_before_the_rename_landed(&mut scene, &mut gate, "slot-check", &STAYS);
        let gone_on = SystemTime::now();
        eventually("it renews as if nothing were, for longer than its ttl", || {
            let renewed = mtime(&scene.truth());
            if renewed > gone_on + Duration::from_secs(3) { Ok(()) } else { Err(renewed) }
        });
        scene.host(On::B).open_gate();
        evictor.wait().exited(TWO_INSIDE);
        gate.open();
        held.wait().exited(76).says(&["was lost"]);
    });
}

/// A holder on A whose `call` on the lock, its release, hangs until somebody on B has the lock. Returns
/// the late holder, and the successor with its inode. Each leaves out its steps, and the late holder waits for
/// its release however long that takes.
fn released_after_the_successor_came(
    scene: &mut Scene,
    gates: &mut [Gate; 2],
    call: &str,
    steps: [&str; 2],
) -> (Running, Running, Option<u64>) {
    let late = holder(scene, On::A, "1s", &format!("{},errand", steps[0]), &[], &mut gates[0]);
    scene.host(On::A).hold_next(call, "a.lock");
    gates[0].open();
    scene.host(On::A).wait_until_held();
    let successor = holder(scene, On::B, LONG_TTL, steps[1], &STAYS, &mut gates[1]);
    let inode = inode(&scene.truth());
    scene.host(On::A).open_gate();
    (late, successor, inode)
}

#[test]
fn a_release_that_lands_late_leaves_the_successors_lock_alone() {
    undisturbed(|| {
        let mut scene = Scene::new(Server::default());
        let mut gates = [scene.sandbox.gate(), scene.sandbox.gate()];
        let (late, successor, lock) = released_after_the_successor_came(&mut scene, &mut gates, "rename2", ["", ""]);
        let late = late.wait();
        late.exited(76).one_line(&["a.lock"]);
        assert!(!late.err().contains("put there instead"), "it has moved nothing: {late}");
        assert_eq!(inode(&scene.truth()), lock);
        contender(&scene, On::A, "0", "").wait().exited(75);
        gates[1].open();
        // Whose own lock was lost would not end with 0.
        successor.wait().exited(0);
    });
}

#[test]
fn a_late_release_takes_the_successors_lock_by_unlink_or_when_its_quarantine_is_reclaimed_too_early() {
    undisturbed(|| {
        // The negative controls of the test above.
        let mut scene = Scene::new(Server::default());
        let mut gates = [scene.sandbox.gate(), scene.sandbox.gate()];
        let steps = ["release-by-slot", ""];
        let (late, successor, _) = released_after_the_successor_came(&mut scene, &mut gates, "unlink", steps);
        late.wait().exited(0);
        assert_eq!(inode(&scene.truth()), None);
        contender(&scene, On::A, "0", "").wait().exited(TWO_INSIDE);
        gates[1].open();
        successor.wait().exited(76).says(&["was lost"]);

        // It sees what it has moved and moves it back; but for a moment anybody could have got in.
        let mut scene = Scene::new(Server::default());
        let mut gates = [scene.sandbox.gate(), scene.sandbox.gate()];
        let steps = ["", "reclaim-age"];
        let (late, successor, _) = released_after_the_successor_came(&mut scene, &mut gates, "rename2", steps);
        late.wait().exited(76).one_line(&["a regular file was put there instead"]);
        gates[1].open();
        let successor = successor.wait();
        assert!(matches!(successor.code(), Some(0 | 76)), "{successor}");
    });
}

#[test]
fn an_evictors_rename_that_lands_after_its_epoch_was_ended_and_a_successor_came_finds_the_place_taken() {
    undisturbed(|| {
        let mut scene = Scene::new(Server::default());
        let mut gates = [scene.sandbox.gate(), scene.sandbox.gate()];
        let dead = holder(&scene, On::A, "1s", "", &[], &mut gates[0]);
        send_to_group(dead.pid(), Signal::SIGKILL);
        scene.host(On::B).hold_next("rename2", "a.lock");
        let late = contender(&scene, On::B, "30s", "");
        scene.host(On::B).wait_until_held();

        // On the other host the claim is passed over when its owner must be dead, and not before.
        let claimed = SystemTime::now();
        let successor = holder(&scene, On::A, LONG_TTL, "", &[], &mut gates[1]);
        let waited = claimed.elapsed().expect("the clock goes forward");
        assert!(waited >= Duration::from_secs(5), "only the reclaim age tells that an evictor is dead: {waited:?}");
        assert!(waited < Duration::from_secs(8), "a dead evictor blocks for the reclaim age and a second: {waited:?}");

        let lock = inode(&scene.truth());
        scene.host(On::B).open_gate();
        let still_waiting = late.wait_within(Duration::from_millis(1_500));
        assert_eq!(inode(&scene.truth()), lock, "the successor's lock is where it was");
        gates[1].open();
        successor.wait().exited(0);
        still_waiting.err().expect("it goes on waiting").wait().exited(0);
    });
}

#[test]
fn an_evictor_whose_host_died_inside_the_slot_holds_others_up_for_the_reclaim_age_at_most() {
    undisturbed(|| {
        let mut scene = Scene::new(Server::default());
        let mut gate = scene.sandbox.gate();
        let dead = holder(&scene, On::A, "1s", "", &[], &mut gate);
        send_to_group(dead.pid(), Signal::SIGKILL);
        scene.host(On::B).hold_next("rename2", "a.lock");
        let evictor = contender(&scene, On::B, "30s", "");
        scene.host(On::B).wait_until_held();
        let died = SystemTime::now();
        scene.host(On::B).kill();
        drop(evictor);

        contender(&scene, On::A, "30s", "").wait().exited(0);
        let waited = died.elapsed().expect("the clock goes forward");
        assert!(waited < Duration::from_secs(1 + 5 + 1), "{waited:?}");
        let ended = slots(&scene.truth());
        assert_eq!(ended.len(), 1);
        assert!(ended[0].lock.is_some(), "the dead owner's record is kept");
    });
}

/// Two enders of a dead holder's epoch: the one on B found the slot empty and is on its way to claim it;
/// the one on A has claimed it and verified the epoch, and its rename (`call`) hangs. Then the one on B goes
/// on. Returns it, in the gate if it gets inside, and the one on A, still hanging.
fn two_enders(scene: &mut Scene, gate: &mut Gate, steps: &str, call: &str) -> (Running, Running) {
    let dead = holder(scene, On::A, "5s", "", &[], gate);
    send_to_group(dead.pid(), Signal::SIGKILL);
    age(&scene.truth(), 6_000);
    scene.host(On::B).hold_next("create", "claim-0");
    let (inside, lock) = (format!("{}; {}", scene.alone(), gate.script()), scene.lock(On::B));
    let on_b = scene.start(On::B, |withlock| {
        withlock.leave_out(steps).args(["-n", "--ttl", LONG_TTL]).args(STAYS).arg(lock).sh(inside)
    });
    scene.host(On::B).wait_until_held();
    scene.host(On::A).hold_next(call, "a.lock");
    let on_a = contender(scene, On::A, "30s", steps);
    scene.host(On::A).wait_until_held();
    scene.host(On::B).open_gate();
    (on_b, on_a)
}

#[test]
fn of_two_enders_one_has_the_claim_and_the_other_nothing_to_end() {
    undisturbed(|| {
        for can_refuse_to_replace in [true, false] {
            let mut scene = Scene::new(Server { can_refuse_to_replace, ..Server::default() });
            let mut gate = scene.sandbox.gate();
            let call = if can_refuse_to_replace { "rename2" } else { "rename" };
            let (on_b, on_a) = two_enders(&mut scene, &mut gate, "", call);
            on_b.wait().exited(75);
            scene.host(On::A).open_gate();
            on_a.wait().exited(0);
        }
    });
}

#[test]
fn a_rename_that_does_not_replace_is_a_second_line_behind_the_claim() {
    undisturbed(|| {
        let mut scene = Scene::new(Server::default());
        let mut gate = scene.sandbox.gate();
        let (on_b, on_a) = two_enders(&mut scene, &mut gate, "claim", "rename2");
        gate.wait_inside();
        let lock = inode(&scene.truth());
        scene.host(On::A).open_gate();
        gate.open();
        on_b.wait().exited(0);
        on_a.wait().exited(0);
        assert_ne!(inode(&scene.truth()), lock);
    });
}

#[test]
fn without_either_a_late_ender_takes_its_successors_lock() {
    undisturbed(|| {
        // The negative control of the two tests above.
        let without_flags = Server { can_refuse_to_replace: false, ..Server::default() };
        for (server, steps) in [(without_flags, "claim"), (Server::default(), "claim,noreplace")] {
            let mut scene = Scene::new(server);
            let mut gate = scene.sandbox.gate();
            let (on_b, on_a) = two_enders(&mut scene, &mut gate, steps, "rename");
            gate.wait_inside();
            scene.host(On::A).open_gate();
            on_a.wait().exited(TWO_INSIDE);
            gate.open();
            on_b.wait().exited(76).says(&["was lost"]);
        }
    });
}

/// A maker on A stalls between creating its lock and writing the record, for so long that the blank lock
/// turns stale; an ender on B has verified that, and its rename hangs. Then the maker goes on, and gets in.
/// Returns the two, the ender still hanging.
fn stalled_maker(scene: &mut Scene, gate: &mut Gate, steps: &str, rename: &str) -> (Running, Running) {
    // Its first look at what it made: from here on it knows the stamp that names the blank lock's slot.
    scene.host(On::A).hold_next("getattr", "a.lock");
    let (inside, lock) = (format!("{}; {}", scene.alone(), gate.script()), scene.lock(On::A));
    let maker = scene
        .start(On::A, |withlock| withlock.leave_out(steps).args(["--ttl", LONG_TTL]).args(STAYS).arg(lock).sh(inside));
    scene.host(On::A).wait_until_held();
    age(&scene.truth(), blank_ages_ms().1);
    scene.host(On::A).hold_next("write", "a.lock");
    scene.host(On::A).wait_until_held();
    scene.host(On::B).hold_next(rename, "a.lock");
    let ender = contender(scene, On::B, "60s", "");
    scene.host(On::B).wait_until_held();
    scene.host(On::A).open_gate();
    gate.wait_inside();
    (maker, ender)
}

#[test]
fn a_maker_that_stalled_before_its_record_seals_the_slot_of_its_blank_lock() {
    for (can_refuse_to_replace, rename) in [(true, "rename2"), (false, "rename")] {
        undisturbed(|| {
            let mut scene = Scene::new(Server { can_refuse_to_replace, ..Server::default() });
            let mut gate = scene.sandbox.gate();
            let (maker, ender) = stalled_maker(&mut scene, &mut gate, "", rename);
            let epoch = scene.epoch();
            scene.host(On::B).open_gate();
            // It has found its place taken, and waits.
            ender.wait_for_stderr("waiting, held by");
            assert_eq!(scene.epoch(), epoch);
            gate.open();
            maker.wait().exited(0).silent();
            ender.wait().exited(0);
        });
    }
}

#[test]
fn a_maker_that_does_not_is_inside_when_the_rename_lands() {
    // The negative control of the test above: the seal, or the whole look at the slots.
    for steps in ["seal", "grant-check"] {
        undisturbed(|| {
            let mut scene = Scene::new(Server::default());
            let mut gate = scene.sandbox.gate();
            let (maker, ender) = stalled_maker(&mut scene, &mut gate, steps, "rename2");
            scene.host(On::B).open_gate();
            ender.wait().exited(TWO_INSIDE);
            gate.open();
            maker.wait().exited(76).says(&["was lost"]);
        });
    }
}

#[test]
fn a_holder_killed_on_one_host_lets_a_waiter_on_the_other_in_within_its_ttl_and_a_second() {
    undisturbed(|| {
        for server in [Server::default(), Server { can_refuse_to_replace: false, ..Server::default() }] {
            let scene = Scene::new(server);
            let mut gate = scene.sandbox.gate();
            let held = holder(&scene, On::A, "2s", "", &[], &mut gate);
            let waiter = contender(&scene, On::B, "30s", "");
            waiter.wait_for_stderr("a.lock");
            let killed = std::time::Instant::now();
            send_to_group(held.pid(), Signal::SIGKILL);
            let waiter = waiter.wait();
            waiter.exited(0);
            let waited = waiter.ended - killed;
            assert!(waited <= Duration::from_secs(3), "{waited:?}");
            assert_eq!(record(&scene.truth()), None);
        }
    });
}

#[test]
fn a_server_of_whole_seconds_never_makes_a_renewed_lock_look_old() {
    undisturbed(|| {
        let server = Server { whole_seconds: true, ..Server::default() };
        let scene = Scene::new(server);
        let mut gate = scene.sandbox.gate();
        let held = holder(&scene, On::A, "1s", "", &[], &mut gate);
        // Its stamp is up to a second, and its renewal a third, behind: it would look stale at any time.
        contender(&scene, On::B, "4s", "").wait().exited(75);
        gate.open();
        held.wait().exited(0).silent();

        let dead = holder(&scene, On::A, "1s", "", &[], &mut gate);
        let killed = std::time::Instant::now();
        send_to_group(dead.pid(), Signal::SIGKILL);
        let next = contender(&scene, On::B, "30s", "").wait();
        next.exited(0);
        let waited = next.ended - killed;
        assert!(
            waited <= Duration::from_secs(1 + 2 + 1),
            "two seconds more, where stamps have no fraction: {waited:?}"
        );
    });
}
