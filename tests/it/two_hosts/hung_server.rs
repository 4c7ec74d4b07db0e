//! A host whose file server hangs: every call on the shared directory waits there, while the other host
//! goes on. A holder must have ended its command before the other host gets in, and nobody waits for ever.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::harness::{Gate, Running, Snapshot, eventually, process, record};

use super::host::Server;
use super::scene::{On, Scene, TWO_INSIDE, undisturbed};

/// What a wrapper says when it gives up.
const GIVES_UP: &str = "was not renewed; ending the command";

/// A holder on host A, in the gate. `before` is shell text for the command to begin with.
fn holder(
    scene: &Scene,
    gate: &mut Gate,
    shipped: bool,
    steps: &str,
    options: &[&str],
    before: &str,
) -> (Running, i32) {
    let inside = format!("{before}{}; {}", scene.alone(), gate.script());
    let lock = scene.lock(On::A);
    let running = scene.hosts.a.run(|| {
        let program = if shipped { scene.sandbox.shipped() } else { scene.sandbox.withlock().leave_out(steps) };
        program.own_group().args(options).arg(lock).sh(inside).start()
    });
    let command = gate.wait_inside();
    (running, command)
}

/// Somebody who waits on host B, and is inside for an instant. There it looks whether `command` is gone.
fn next_on_b(scene: &Scene, command: i32) -> Running {
    let inside = format!("{}; ! kill -0 {command} 2>/dev/null", scene.alone());
    let lock = scene.lock(On::B);
    scene.start(On::B, |withlock| withlock.args(["-w", "30s"]).arg(lock).sh(inside))
}

/// Makes a test in all these ways at the same time: most of it is waiting.
fn at_once<T: Send, const N: usize>(ways: [T; N], test: impl Fn(T) + Sync) {
    let test = &test;
    std::thread::scope(|scope| {
        for way in ways {
            scope.spawn(move || test(way));
        }
    });
}

/// Whether a process has ended, or is about to be reaped.
fn has_ended(pid: i32) -> bool {
    process(pid).is_none_or(|process| process.state == 'Z')
}

#[test]
fn a_holder_whose_server_hangs_ends_its_command_before_another_host_gets_in() {
    // The server takes no call any more; or it has taken the renewal and never answers, and the command does
    // not listen to TERM. By the program as it is shipped, which starts in its own way.
    at_once([("", true), ("trap '' TERM; ", false)], |(before, stops)| {
        undisturbed(|| {
            let mut scene = Scene::new(Server::default());
            let mut gate = scene.sandbox.gate();
            let (held, command) = holder(&scene, &mut gate, true, "", &["--ttl", "3s"], before);
            let next = next_on_b(&scene, command);
            if stops {
                scene.hosts.a.stop();
            } else {
                scene.host(On::A).hold_next("setattr", "a.lock");
                scene.host(On::A).wait_until_held();
            }
            eventually("the command has ended", || if has_ended(command) { Ok(()) } else { Err(process(command)) });
            let ended = Instant::now();
            let next = next.wait();
            next.exited(0);
            assert!(next.ended > ended, "the command ended {:?} after the next was inside", ended - next.ended);
            // The wrapper does not wait for its server either.
            held.wait_for_stderr("expires within 3s");
            assert!(ended.elapsed() < Duration::from_millis(3_500), "{:?}", ended.elapsed());
            if !stops {
                // A call that the server has begun to answer keeps even a process that has ended.
                scene.host(On::A).open_gate();
            }
            let held = held.wait();
            held.exited(76).says(&[GIVES_UP, "cannot be released: its file system does not answer"]);
        });
    });
}

#[test]
fn a_holder_of_several_locks_whose_server_hangs_ends_its_command_as_well() {
    undisturbed(|| {
        let scene = Scene::new(Server::default());
        let mut gate = scene.sandbox.gate();
        let other = scene.lock(On::A).with_file_name("other.lock").display().to_string();
        let (held, command) = holder(&scene, &mut gate, true, "", &["--ttl", "3s", "--also", &other], "");
        let next = next_on_b(&scene, command);
        scene.hosts.a.stop();
        eventually("the command has ended", || if has_ended(command) { Ok(()) } else { Err(process(command)) });
        let ended = Instant::now();
        let next = next.wait();
        next.exited(0);
        assert!(next.ended > ended, "the command ended {:?} after the next was inside", ended - next.ended);
        held.wait()
            .exited(76)
            .says(&[GIVES_UP, "all of its locks: cannot be released: its file system does not answer"]);
    });
}

#[test]
fn a_holder_that_renews_for_itself_hangs_with_its_server_and_two_are_inside() {
    // The negative control of the test above.
    undisturbed(|| {
        let scene = Scene::new(Server::default());
        let mut gate = scene.sandbox.gate();
        let (held, command) = holder(&scene, &mut gate, false, "errand", &["--ttl", "3s"], "");
        let next = next_on_b(&scene, command);
        scene.hosts.a.stop();
        next.wait().exited(TWO_INSIDE);
        assert!(!has_ended(command));
        scene.hosts.a.go_on();
        held.wait().exited(76);
    });
}

#[test]
fn a_release_that_was_given_up_and_lands_late_leaves_the_successors_lock_alone() {
    undisturbed(|| {
        let mut scene = Scene::new(Server::default());
        let mut gates = [scene.sandbox.gate(), scene.sandbox.gate()];
        let (late, _) = holder(&scene, &mut gates[0], true, "", &["--ttl", "1s"], "");
        scene.host(On::A).hold_next("rename2", "a.lock");
        gates[0].open();
        scene.host(On::A).wait_until_held();
        let (lock, inside) = (scene.lock(On::B), gates[1].script());
        let options = ["-w", "30s", "--ttl", "60s"];
        let successor = scene.start(On::B, |withlock| withlock.args(options).arg(lock).sh(inside));
        gates[1].wait_inside();
        late.wait_for_stderr("cannot be released");
        let epoch = scene.epoch();
        scene.host(On::A).open_gate();
        late.wait().exited(74);
        assert_eq!(scene.epoch(), epoch);
        gates[1].open();
        successor.wait().exited(0).silent();
    });
}

#[test]
fn a_holder_whose_server_comes_back_in_time_goes_on() {
    undisturbed(|| {
        let scene = Scene::new(Server::default());
        let mut gate = scene.sandbox.gate();
        let (held, _) = holder(&scene, &mut gate, true, "", &["--ttl", "3s"], "");
        let renewed = || crate::harness::mtime(&scene.truth());
        for _ in 0..2 {
            scene.hosts.a.stop();
            // The second renewal is due by then, and hangs.
            std::thread::sleep(Duration::from_millis(1_300));
            let before = renewed();
            scene.hosts.a.go_on();
            eventually("a renewal", || if renewed() > before { Ok(()) } else { Err(before) });
        }
        gate.open();
        held.wait().exited(0).silent();
        assert_eq!(record(&scene.truth()), None);
    });
}

#[test]
fn a_command_goes_on_without_its_server_if_it_is_only_to_be_warned() {
    undisturbed(|| {
        let scene = Scene::new(Server::default());
        let mut gate = scene.sandbox.gate();
        let options = ["--ttl", "2s", "--on-lost", "warn"];
        let (held, command) = holder(&scene, &mut gate, true, "", &options, "");
        scene.hosts.a.stop();
        held.wait_for_stderr("was not renewed; the command goes on");
        assert!(!has_ended(command));
        let lock = scene.lock(On::B);
        scene.start(On::B, |withlock| withlock.args(["-w", "30s"]).arg(lock).args(["--", "true"])).wait().exited(0);
        scene.hosts.a.go_on();
        held.wait_for_stderr("the lock was lost: the lock file is gone; the command goes on");
        gate.open();
        held.wait().exited(76);
    });
}

#[test]
fn signals_and_the_longest_hold_reach_the_command_of_a_holder_whose_server_hangs() {
    // How the command ends, and how its wrapper, which cannot release.
    let cases = [
        (&["--ttl", "60s"][..], "trap 'exit 0' TERM; ", Some(Signal::SIGTERM), 74),
        (&["--ttl", "60s"][..], "trap 'exit 7' TERM; ", Some(Signal::SIGTERM), 7),
        (&["--ttl", "60s", "--max-hold", "1500ms"][..], "", None, 124),
    ];
    at_once(cases, |(options, before, signal, code)| {
        undisturbed(|| {
            let scene = Scene::new(Server::default());
            let mut gate = scene.sandbox.gate();
            let (held, command) = holder(&scene, &mut gate, true, "", options, before);
            scene.hosts.a.stop();
            if let Some(signal) = signal {
                held.send(signal);
            }
            eventually("the command has ended", || if has_ended(command) { Ok(()) } else { Err(process(command)) });
            let ended = Instant::now();
            let held = held.wait();
            held.exited(code)
                .says(&["cannot be released: its file system does not answer; the lock stays and expires within 1m"]);
            assert!(held.ended - ended < Duration::from_millis(3_500), "{:?}", held.ended - ended);
        });
    });
}

/// What somebody says who waits for the lock and finds it held.
const WAITING: &str = "waiting, held by";

/// Somebody who waits on host A.
fn waiter_on_a(scene: &Scene, options: &[&str]) -> Running {
    let lock = scene.lock(On::A);
    scene.hosts.a.run(|| scene.sandbox.shipped().args(options).arg(lock).args(["--", "true"]).start())
}

const HANGS: &str = "waiting: its file system does not answer";
const GAVE_UP: &str = "its file system does not answer, gave up";

#[test]
fn who_waits_on_a_server_that_hangs_ends_when_patience_or_a_signal_says_so() {
    at_once([On::A, On::B], |holder_on| {
        undisturbed(|| {
            let scene = Scene::new(Server::default());
            let mut gate = scene.sandbox.gate();
            let (lock, inside) = (scene.lock(holder_on), gate.script());
            let held = scene.start(holder_on, |withlock| withlock.args(["--ttl", "60s"]).arg(lock).sh(inside));
            gate.wait_inside();
            let limited = waiter_on_a(&scene, &["-w", "3s"]);
            let patient = waiter_on_a(&scene, &[]);
            [&limited, &patient].iter().for_each(|waiter| waiter.wait_for_stderr(WAITING));
            let before = Snapshot::of(&scene.truth());
            scene.hosts.a.stop();

            let limited = limited.wait();
            limited.exited(74).says(&[GAVE_UP]);
            assert!(limited.took >= Duration::from_secs(3), "{:?}", limited.took);
            assert!(limited.took < Duration::from_millis(4_500), "{:?}", limited.took);

            if holder_on == On::B {
                // It polls, so that it is in a call.
                patient.wait_for_stderr(HANGS);
            }
            let sent = Instant::now();
            patient.send(Signal::SIGTERM);
            let patient = patient.wait();
            assert_eq!(patient.signal(), Some(15), "{patient}");
            assert!(patient.ended - sent < Duration::from_millis(100), "{:?}", patient.ended - sent);
            assert_eq!(Snapshot::of(&scene.truth()), before, "the holder's file is untouched");
            scene.hosts.a.go_on();
            gate.open();
            held.wait().exited(0);
        });
    });
}

#[test]
fn who_waits_without_a_limit_gets_in_when_the_server_comes_back() {
    undisturbed(|| {
        let scene = Scene::new(Server::default());
        let mut gate = scene.sandbox.gate();
        let (lock, inside) = (scene.lock(On::B), gate.script());
        let held = scene.start(On::B, |withlock| withlock.args(["--ttl", "60s"]).arg(lock).sh(inside));
        gate.wait_inside();
        let patient = waiter_on_a(&scene, &[]);
        patient.wait_for_stderr(WAITING);
        scene.hosts.a.stop();
        patient.wait_for_stderr(HANGS);
        gate.open();
        held.wait().exited(0);
        scene.hosts.a.go_on();
        let patient = patient.wait();
        patient.exited(0);
        assert_eq!(patient.err().matches(HANGS).count(), 1, "{patient}");
    });
}

#[test]
fn signals_end_whoever_finds_the_server_hanging_and_questions_end_by_themselves() {
    undisturbed(|| {
        let scene = Scene::new(Server::default());
        let lock = scene.lock(On::A);
        let dir = lock.parent().expect("a directory").to_owned();
        scene.hosts.a.stop();
        let start = |words: &[&str], path: &std::path::Path, rest: &[&str]| {
            scene.hosts.a.run(|| scene.sandbox.shipped().args(words).arg(path).args(rest).start())
        };
        let contender = start(&[], &lock, &["--", "true"]);
        let questions = [
            (start(&["inspect"], &lock, &[]), 74),
            (start(&["inspect", "--json"], &dir, &[]), 74),
            (start(&["reclaim"], &dir, &[]), 74),
        ];
        eventually("it asks for the file system's kind", || asks(contender.pid()));
        let sent = Instant::now();
        contender.send(Signal::SIGTERM);
        let contender = contender.wait();
        assert_eq!(contender.signal(), Some(15), "{contender}");
        assert!(contender.ended - sent < Duration::from_millis(100), "{:?}", contender.ended - sent);
        for (question, code) in questions {
            let question = question.wait();
            question.exited(code).one_line(&["its file system does not answer"]);
            assert!(question.took < Duration::from_secs(8), "{:?}", question.took);
        }
        scene.hosts.a.go_on();
    });
}

/// Whether a process waits in a call on its file system.
fn asks(pid: i32) -> Result<(), String> {
    let wait = std::fs::read_to_string(format!("/proc/{pid}/wchan")).unwrap_or_default();
    if wait.contains("request_wait_answer") { Ok(()) } else { Err(wait) }
}

#[test]
fn what_a_server_that_begins_to_hang_is_asked_ends_without_an_answer() {
    // One call of each is held at the server.
    let cases =
        [(&["break", "--force"][..], "a.lock", "lookup", "a.lock"), (&["reserve"], "numbers", "create", "lock")];
    at_once(cases, |(words, path, operation, name)| {
        undisturbed(|| {
            let mut scene = Scene::new(Server::default());
            let mut gate = scene.sandbox.gate();
            let (lock, inside) = (scene.lock(On::B), gate.script());
            let held = scene.start(On::B, |withlock| withlock.args(["--ttl", "60s"]).arg(lock).sh(inside));
            gate.wait_inside();
            std::fs::create_dir(scene.hosts.backing().join("numbers")).expect("a directory");
            let path = scene.hosts.a.path(path);
            scene.host(On::A).hold_next(operation, name);
            let asking = scene.hosts.a.run(|| scene.sandbox.shipped().args(words).arg(path).start());
            scene.host(On::A).wait_until_held();
            asking.wait_for_stderr("its file system does not answer");
            // A call that the server has begun to answer keeps even a process that has ended.
            scene.host(On::A).open_gate();
            asking.wait().exited(74).one_line(&["its file system does not answer"]);
            gate.open();
            held.wait().exited(0);
        });
    });
}
