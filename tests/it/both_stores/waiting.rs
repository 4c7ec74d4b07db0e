//! Whoever does not get the lock at once; and `--skip-if`, which asks once it is had.

use std::fs;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::Behaviour;
use crate::harness::{Running, never_during, send_to_group};

const TRUE: [&str; 2] = ["--", "true"];

pub(super) const BEHAVIOURS: &[Behaviour] = &[
    ("a held lock is 75, or what was asked for, and the command does not run", |stage| {
        let (mut gate, holder) = stage.hold(&[]);
        let line = format!("held by pid {} on ", holder.pid());
        for (options, code) in [(&["-n"][..], 75), (&["-w", "0"], 75), (&["-n", "-E", "9"], 9), (&["-w", "200ms"], 75)]
        {
            let finished = stage.run(options).sh("echo ran").run();
            finished.exited(code).one_line(&["held ", "; next: withlock inspect "]);
            assert_eq!(finished.out(), "", "{options:?}");
        }
        for code in [0, 1, 42, 255] {
            stage.run(&["-n", &format!("--conflict-exit-code={code}")]).args(TRUE).run().exited(code);
        }
        stage.run(&["-n"]).sh("echo ran").run().one_line(&[&line]);
        gate.open();
        holder.wait().exited(0);
    }),
    ("a wait ends when it was told to and says so", |stage| {
        let held = stage.acquire();
        for (wait, least_ms) in [("0s", 0), ("100ms", 100), ("0.3", 300), ("1.2", 1_200)] {
            let finished = stage.run(&["-w", wait]).args(TRUE).run();
            finished.exited(75).says(&["held ", "; next: withlock inspect "]);
            // One line; a wait of more than a second has said before what it waits for, once.
            let lines = if least_ms > 1_000 { 2 } else { 1 };
            assert_eq!(finished.err().lines().count(), lines, "-w {wait}: {finished}");
            let took_ms = finished.took.as_millis();
            assert!((least_ms..least_ms + 2_000).contains(&took_ms), "-w {wait}: {took_ms} ms");
        }
        stage.of(&["release", "--nonce", &held]).run().exited(0);
    }),
    ("a job that is busy is skipped with exit 0 and one line, or none", |stage| {
        let held = stage.acquire();
        for wait in [["-w", "0"], ["-w", "300ms"]] {
            let skip = [wait[0], wait[1], "--on-busy", "skip"];
            stage.run(&skip).sh("touch ran").run().exited(0).one_line(&["skipped: "]);
            stage.run(&["-q", wait[0], wait[1], "--on-busy", "skip"]).sh("touch ran").run().exited(0).silent();
        }
        assert!(!stage.sandbox.path("ran").exists());
        stage.of(&["check", "--nonce", &held]).run().exited(0);
    }),
    ("without the lock the command is told so and nothing else than that", |stage| {
        let held = stage.acquire();
        let tell = "echo $WITHLOCK_MODE ${WITHLOCK_NONCE-none} ${WITHLOCK_FENCE-none} ${WITHLOCK_HELD-none}; exit 3";
        let run = stage.run(&["-w", "100ms", "--on-busy", "run"]).sh(tell);
        let run = run.env("WITHLOCK_NONCE", "outer").env("WITHLOCK_FENCE", "1").env("WITHLOCK_HELD", "outer");
        let finished = run.run();
        finished.exited(3).one_line(&["running without the lock: ", "still held after 1"]);
        assert_eq!(finished.out(), "degraded none none outer\n");
        stage.of(&["check", "--nonce", &held]).run().exited(0).silent();
    }),
    ("signals, --max-hold and check reach a command without the lock as well", |stage| {
        let held = stage.acquire();
        let degraded = ["-n", "--on-busy", "run"];
        stage.run(&["-n", "--on-busy", "run", "--max-hold", "100ms"]).args(["--", "sleep", "600"]).run().exited(124);
        stage.run(&degraded).sh("\"$WL\" check").run().exited(76).says(&["run without the lock"]);
        let mut gate = stage.sandbox.gate();
        let running = stage.run(&degraded).sh(gate.script()).start();
        gate.wait_inside();
        running.send(Signal::SIGTERM);
        running.wait().exited(143);
        stage.of(&["check", "--nonce", &held]).run().exited(0).silent();
    }),
    ("nothing is read from or printed to what belongs to the command while it waits, nor when it fails", |stage| {
        let (mut gate, holder) = stage.hold(&[]);
        let waiter = stage.run(&["-v", "-w", "1h"]).args(["--", "cat"]).input(b"mine").start();
        waiter.wait_for_stderr("waiting, held");
        for options in [&["-v", "-n"][..], &["-n", "--on-busy", "skip"], &["-w", "10ms"], &["--ttl", "x"]] {
            let failed = stage.run(options).args(["--", "cat"]).input(b"mine").run();
            assert_eq!(failed.out(), "", "{options:?}");
        }
        gate.open();
        holder.wait().exited(0);
        assert_eq!(waiter.wait().exited(0).out(), "mine");
    }),
    ("whoever waits gets in when the holder releases, and not before", |stage| {
        let (mut first, holder) = stage.hold(&[]);
        let mut second = stage.sandbox.gate();
        let waiter = stage.run(&["-q"]).sh(second.script()).start();
        assert!(!second.somebody_within(Duration::from_millis(500)));
        first.open();
        holder.wait().exited(0).silent();
        second.wait_inside();
        second.open();
        waiter.wait().exited(0).silent();
        stage.nothing_is_left();
    }),
    ("whoever waits gets in one after the other, however many they are", |stage| {
        let (mut gate, holder) = stage.hold(&[]);
        let text = "mkdir inside || exit 9; rmdir inside";
        let waiters: Vec<Running> = (0..12).map(|_| stage.run(&[]).sh(text).start()).collect();
        waiters.iter().for_each(|waiter| waiter.wait_for_stderr("waiting, held"));
        gate.open();
        holder.wait().exited(0);
        for waiter in waiters {
            waiter.wait().exited(0).one_line(&["waiting, held"]);
        }
        stage.nothing_is_left();
    }),
    ("whoever waits gets in after the ttl of a holder that died with its command", |stage| {
        let mut gate = stage.sandbox.gate();
        let holder = stage.run(&["--ttl", "2s"]).sh(gate.script()).own_group().start();
        gate.wait_inside();
        send_to_group(holder.pid(), Signal::SIGKILL);
        let died = Instant::now();
        holder.wait();
        let next = stage.run(&["-q", "-w", "35s"]).args(TRUE).run();
        next.exited(0).silent();
        assert!(next.ended - died < Duration::from_secs(6), "{:?}", next.ended - died);
    }),
    ("a signal while it waits ends the wrapper at once, and the holder is untouched", |stage| {
        let held = stage.acquire();
        for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGALRM, Signal::SIGUSR1] {
            let waiter = stage.run(&["-w", "1h"]).sh("touch ran").start();
            waiter.wait_for_stderr("waiting, held");
            let sent = Instant::now();
            waiter.send(signal);
            let finished = waiter.wait();
            assert_eq!(finished.signal(), Some(signal as i32), "{finished}");
            assert!(finished.ended - sent < Duration::from_secs(1), "{signal}: {:?}", finished.ended - sent);
        }
        stage.of(&["check", "--nonce", &held]).run().exited(0).silent();
        assert!(!stage.sandbox.path("ran").exists());
    }),
    ("a signal that was ignored on entry does not end a waiter", |stage| {
        let (mut gate, holder) = stage.hold(&[]);
        let waiter = stage.run(&[]).args(TRUE).through(["env", "--ignore-signal=HUP,TERM,ALRM"]).start();
        waiter.wait_for_stderr("waiting, held");
        for signal in [Signal::SIGHUP, Signal::SIGTERM, Signal::SIGALRM] {
            waiter.send(signal);
        }
        gate.open();
        holder.wait().exited(0);
        waiter.wait().exited(0);
    }),
    ("a waiter that is stopped and continued waits on", |stage| {
        let (mut gate, holder) = stage.hold(&[]);
        let waiter = stage.run(&["--ttl", "3s"]).args(TRUE).start();
        waiter.wait_for_stderr("waiting, held");
        waiter.send(Signal::SIGSTOP);
        // Longer than whatever it had while it waited: it is as good as new when it goes on.
        std::thread::sleep(Duration::from_millis(4_500));
        gate.open();
        holder.wait().exited(0);
        stage.run(&["-n"]).args(TRUE).run().exited(0);
        waiter.send(Signal::SIGCONT);
        waiter.wait().exited(0);
        stage.nothing_is_left();
    }),
    ("a lock is renewed for as long as the command runs", |stage| {
        let (mut gate, holder) = stage.hold(&["--ttl", "2s"]);
        never_during("another gets in", Duration::from_secs(5), || {
            let code = stage.run(&["-n"]).args(TRUE).run().code();
            if code == Some(75) { Ok(()) } else { Err(code) }
        });
        gate.open();
        holder.wait().exited(0).silent();
    }),
    ("an unprotected counter loses no update", |stage| {
        fs::write(stage.sandbox.path("counter"), "0\n").expect("a counter");
        let increment = "read n <counter; i=0; while [ $i -lt 50 ]; do i=$((i+1)); done; echo $((n+1)) >counter";
        let body = format!(
            "i=0; while [ $i -lt 6 ]; do i=$((i+1)); \"$WL\" -q \"$LOCK\" -- /bin/sh -c '{increment}' || exit; done"
        );
        let start = |_| stage.sh(&body).start();
        for finished in (0..8).map(start).collect::<Vec<Running>>().into_iter().map(Running::wait) {
            finished.exited(0);
        }
        assert_eq!(fs::read_to_string(stage.sandbox.path("counter")).expect("a counter"), "48\n");
    }),
    ("what makes no sense is 64, and nothing runs", |stage| {
        for options in [
            &["-E", "600"][..],
            &["-E", "-1"],
            &["-E", "x"],
            &["-w", "-1"],
            &["-w", "soon"],
            &["-w", "1e999"],
            &["-w", ""],
            &["-n", "-w", "1"],
            &["--ttl", "0"],
            &["--ttl", "999ms"],
            &["--max-hold", "x"],
            &["--kill-after", "1 fortnight"],
            &["--on-busy", "panic"],
            &["--on-lost", "cry"],
            &["--no-such-option"],
        ] {
            stage.run(options).sh("touch ran").run().exited(64).one_line(&[]);
        }
        for words in [&[][..], &["--"], &["-c", "true", "--", "true"]] {
            stage.run(&[]).args(words).run().exited(64);
        }
        assert!(!stage.sandbox.path("ran").exists());
        stage.nothing_is_left();
    }),
    ("a condition that holds under the lock spares the command", |stage| {
        let spared = stage.run(&["--skip-if", "echo asked"]).sh("touch ran").run();
        assert_eq!(spared.exited(0).silent().out(), "asked\n");
        assert!(!stage.sandbox.path("ran").exists());
        stage.nothing_is_left();
    }),
    ("a condition that fails in whatever way lets the command run with its own status", |stage| {
        for condition in ["false", "exit 77", "exit 124", "no-such-program 2>/dev/null", "exit 128"] {
            stage.run(&["--skip-if", condition]).sh("exit 9").run().exited(9).silent();
            stage.nothing_is_left();
        }
    }),
    ("the condition is asked under the lock and told what the command is told", |stage| {
        let tell = "echo $WITHLOCK_MODE $WITHLOCK_NONCE $WITHLOCK_HELD";
        let condition = format!("{tell}; \"$WL\" check; echo $?; \"$WL\" -n \"$LOCK\" -- true; echo $?; cat; false");
        let finished = stage.run(&["--skip-if", &condition]).sh(format!("{tell}; cat")).input(b"for the command").run();
        finished.exited(0).one_line(&["held by an ancestor"]);
        let out = finished.out();
        let lines: Vec<&str> = out.lines().collect();
        assert_eq!(lines[1..], ["0", "78", lines[0], "for the command"], "{out}");
    }),
    ("a signal that ends the condition was meant for the command as well", |stage| {
        let mut gate = stage.sandbox.gate();
        let run = stage.run(&["--skip-if", &gate.script()]).sh("touch ran").start();
        gate.wait_inside();
        run.send(Signal::SIGTERM);
        run.wait().exited(143);
        assert!(!stage.sandbox.path("ran").exists());
        stage.nothing_is_left();
    }),
    ("a lock that is lost while the condition is asked keeps the command from running", |stage| {
        for on_lost in ["terminate", "warn"] {
            let mut gate = stage.sandbox.gate();
            let condition = format!("{}; exit 1", gate.script());
            let run = stage.run(&["--on-lost", on_lost, "--skip-if", &condition]).sh("touch ran").start();
            gate.wait_inside();
            stage.of(&["break", "--force"]).run().exited(0);
            run.wait_for_stderr("the lock was lost");
            gate.open();
            run.wait().exited(76);
            assert!(!stage.sandbox.path("ran").exists());
        }
    }),
    ("a lock that is lost just before the condition fails keeps the command from running too", |stage| {
        let condition = "\"$WL\" break --force \"$LOCK\" >broken; exit 1";
        let finished = stage.run(&["--skip-if", condition]).sh("touch ran").run();
        finished.exited(76).says(&["the lock was lost: "]);
        assert!(!stage.sandbox.path("ran").exists());
    }),
    ("a condition that hangs is ended by --max-hold", |stage| {
        let finished = stage.run(&["--max-hold", "200ms", "--skip-if", "sleep 600"]).sh("touch ran").run();
        finished.exited(124).one_line(&["--max-hold"]);
        assert!(!stage.sandbox.path("ran").exists());
        stage.nothing_is_left();
    }),
    ("who does not get the lock does not ask", |stage| {
        stage.acquire();
        for (on_busy, code, out) in [("fail", 75, ""), ("skip", 0, ""), ("run", 0, "ran\n")] {
            let finished = stage.run(&["-n", "--on-busy", on_busy, "--skip-if", "touch asked"]).sh("echo ran").run();
            finished.exited(code).one_line(&["held by"]);
            assert_eq!(finished.out(), out, "{on_busy}");
        }
        assert!(!stage.sandbox.path("asked").exists());
    }),
    ("below an ancestor that has the lock the condition is asked too", |stage| {
        for (condition, out) in [("true", ""), ("false", "ran\n")] {
            let text = format!("\"$WL\" --reentrant --skip-if {condition} \"$LOCK\" -- echo ran");
            assert_eq!(stage.run(&[]).sh(text).run().exited(0).silent().out(), out);
        }
    }),
];
