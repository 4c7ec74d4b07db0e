//! What a lock does, wherever it lives: one table of behaviours, run for a lock file and, where the tests are
//! built with etcd, for a key there. Nothing in a behaviour says which of them it is.
//!
//! With the cargo feature `etcd` it needs etcd and etcdctl.

use std::ffi::{OsStr, OsString};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::harness::{Run, Running, Sandbox, eventually, never_during, send_to_group};

/// A sandbox and a lock somewhere.
struct Stage {
    sandbox: Sandbox,
    lock: OsString,
}

impl Stage {
    /// `withlock OPTIONS LOCK`.
    fn run(&self, options: &[&str]) -> Run<'_> {
        self.sandbox.withlock().args(options).arg(&self.lock)
    }

    /// `withlock SUBCOMMAND OPTIONS LOCK`.
    fn of(&self, words: &[&str]) -> Run<'_> {
        self.run(words)
    }

    fn is_free(&self) -> bool {
        self.of(&["inspect", "-q"]).run().code() == Some(0)
    }

    fn wait_until_free(&self) {
        eventually("the lock is free", || if self.is_free() { Ok(()) } else { Err(()) });
    }

    fn nonce(&self) -> String {
        let told = self.of(&["inspect", "--json"]).run();
        let told: serde_json::Value = serde_json::from_slice(&told.exited(0).stdout).expect("JSON");
        told["locks"][0]["holder"]["nonce"].as_str().expect("a holder").to_owned()
    }
}

type Behaviour = (&'static str, fn(&Stage));

const BEHAVIOURS: &[Behaviour] = &[
    ("the command's own status passes through, and nothing is left", |stage| {
        for (text, code) in [("exit 0", 0), ("exit 3", 3), ("exit 255", 255), ("kill -9 $$", 137), ("kill -15 $$", 143)]
        {
            stage.run(&[]).sh(text).run().exited(code).silent();
            assert!(stage.is_free(), "{text}");
        }
    }),
    ("a command that is not found is 127, one that cannot be run 126, and nothing is left", |stage| {
        stage.run(&[]).args(["--", "no-such-command"]).run().exited(127).one_line(&["command not found"]);
        stage.run(&[]).args(["--", "/dev/null"]).run().exited(126).one_line(&["Permission denied"]);
        assert!(stage.is_free());
    }),
    ("standard input and output belong to the command", |stage| {
        let finished = stage.run(&["-v"]).args(["--", "cat"]).input(b"one\ntwo").run();
        assert_eq!(finished.exited(0).stdout, b"one\ntwo");
    }),
    ("the command is told its lock, its nonce and its mode", |stage| {
        let told = "test \"$WITHLOCK_HELD\" = $WITHLOCK_NONCE && echo \"$WITHLOCK_MODE $WITHLOCK_LOCK\"";
        let finished = stage.run(&[]).sh(told).run();
        let expected = [OsStr::new("locked "), &stage.lock, OsStr::new("\n")];
        let expected: Vec<u8> = expected.iter().flat_map(|part| part.as_encoded_bytes().to_vec()).collect();
        assert_eq!(finished.exited(0).stdout, expected);
    }),
    ("a held lock is 75, or what was asked for, and the command does not run", |stage| {
        let mut gate = stage.sandbox.gate();
        let holder = stage.run(&[]).sh(gate.script()).start();
        gate.wait_inside();
        let line = format!("held by pid {} on ", holder.pid());
        for (options, code) in [(&["-n"][..], 75), (&["-w", "0"], 75), (&["-n", "-E", "9"], 9), (&["-w", "200ms"], 75)]
        {
            let finished = stage.run(options).sh("echo ran").run();
            finished.exited(code).one_line(&["held ", "; next: withlock inspect "]);
            assert_eq!(finished.out(), "", "{options:?}");
        }
        stage.run(&["-n"]).sh("echo ran").run().one_line(&[&line]);
        let skipped = stage.run(&["-n", "--on-busy", "skip"]).sh("echo ran").run();
        assert_eq!(skipped.exited(0).one_line(&["skipped: "]).out(), "");
        let degraded = stage.run(&["-n", "--on-busy", "run"]).sh("echo $WITHLOCK_MODE").run();
        assert_eq!(degraded.exited(0).one_line(&["running without the lock: "]).out(), "degraded\n");
        gate.open();
        holder.wait().exited(0);
    }),
    ("whoever waits gets in when the holder releases, and not before", |stage| {
        let (mut first, mut second) = (stage.sandbox.gate(), stage.sandbox.gate());
        let holder = stage.run(&[]).sh(first.script()).start();
        first.wait_inside();
        let waiter = stage.run(&["-q"]).sh(second.script()).start();
        assert!(!second.somebody_within(Duration::from_millis(500)));
        first.open();
        holder.wait().exited(0).silent();
        second.wait_inside();
        second.open();
        waiter.wait().exited(0).silent();
    }),
    ("whoever waits gets in after the ttl of a holder that died with its command", |stage| {
        let mut gate = stage.sandbox.gate();
        let holder = stage.run(&["--ttl", "2s"]).sh(gate.script()).own_group().start();
        gate.wait_inside();
        send_to_group(holder.pid(), Signal::SIGKILL);
        let died = Instant::now();
        holder.wait();
        let next = stage.run(&["-q", "-w", "35s"]).args(["--", "true"]).run();
        next.exited(0).silent();
        assert!(next.ended - died < Duration::from_secs(6), "{:?}", next.ended - died);
    }),
    ("a signal to the wrapper reaches the command once, and the lock stays until that has ended", |stage| {
        let mut said = stage.sandbox.fifo();
        let mut gate = stage.sandbox.gate();
        let text = format!(
            "trap 'echo term >{0}' TERM; echo up >{0}; while ! {1}; do sleep 0.05; done",
            said.shown(),
            gate.wait()
        );
        let holder = stage.run(&[]).sh(text).start();
        assert_eq!(said.line().trim(), "up");
        holder.send(Signal::SIGTERM);
        assert_eq!(said.line().trim(), "term");
        stage.run(&["-n"]).args(["--", "true"]).run().exited(75);
        gate.open();
        holder.wait().exited(0).silent();
        assert_eq!(said.line_within(Duration::ZERO), None, "once");
        assert!(stage.is_free());
    }),
    ("the lock is released when the direct child ends, whoever lives on", |stage| {
        let mut gate = stage.sandbox.gate();
        let text = format!("({}) & exit 4", gate.script());
        stage.run(&[]).sh(text).run().exited(4).silent();
        gate.wait_inside();
        stage.run(&["-n"]).args(["--", "true"]).run().exited(0).silent();
        gate.open();
    }),
    ("a command that runs for too long is ended with all its descendants", |stage| {
        let text = "trap '' TERM; (trap '' TERM; exec sleep 1000) & sleep 1000";
        let ended = stage.run(&["--max-hold", "300ms", "--kill-after", "200ms"]).sh(text).run();
        ended.exited(124).one_line(&["--max-hold"]);
        stage.sandbox.wait_until_nothing_runs();
        assert!(stage.is_free());
    }),
    ("a condition that holds under the lock spares the command", |stage| {
        let spared = stage.run(&["--skip-if", "true"]).sh("echo ran").run();
        assert_eq!(spared.exited(0).out(), "");
        let needed = stage.run(&["--skip-if", "false"]).sh("echo ran").run();
        assert_eq!(needed.exited(0).out(), "ran\n");
        assert!(stage.is_free());
    }),
    ("an ancestor's lock is 78 at once, or re-entered", |stage| {
        let text =
            "\"$WL\" \"$WITHLOCK_LOCK\" -- true; echo $?; \"$WL\" --reentrant \"$WITHLOCK_LOCK\" -- true; echo $?";
        let finished = stage.run(&[]).sh(text).run();
        assert_eq!(finished.exited(0).one_line(&["held by an ancestor"]).out(), "78\n0\n");
    }),
    ("a command can ask whether it still holds its lock, and a forced break ends it within two seconds", |stage| {
        let mut gate = stage.sandbox.gate();
        let holder = stage.run(&[]).sh(format!("\"$WL\" check || exit 9; {}", gate.script())).start();
        gate.wait_inside();
        let nonce = stage.nonce();
        stage.of(&["check", "--nonce", &nonce]).run().exited(0).silent();
        stage.of(&["break"]).run().exited(75).one_line(&["not broken"]);
        let broken = Instant::now();
        stage.of(&["break", "--force", "--nonce", &nonce]).run().exited(0).silent();
        let finished = holder.wait();
        finished.exited(76).one_line(&["the lock was lost: "]);
        assert!(finished.ended - broken < Duration::from_secs(2), "{:?}", finished.ended - broken);
        stage.of(&["check", "--nonce", &nonce]).run().exited(76).one_line(&["not held: "]);
        assert!(stage.is_free());
    }),
    ("a loss that is only warned of shows in the exit code of a success", |stage| {
        let mut gate = stage.sandbox.gate();
        let holder = stage.run(&["--on-lost", "warn"]).sh(gate.script()).start();
        gate.wait_inside();
        stage.of(&["break", "--force"]).run().exited(0);
        holder.wait_for_stderr("; the command goes on");
        gate.open();
        holder.wait().exited(76);
    }),
    ("a lock is renewed for as long as the command runs", |stage| {
        let mut gate = stage.sandbox.gate();
        let holder = stage.run(&["--ttl", "2s"]).sh(gate.script()).start();
        gate.wait_inside();
        never_during("another gets in", Duration::from_secs(5), || {
            let code = stage.run(&["-n"]).args(["--", "true"]).run().code();
            if code == Some(75) { Ok(()) } else { Err(code) }
        });
        gate.open();
        holder.wait().exited(0).silent();
    }),
    ("a script acquires, renews and releases by nonce, and only by that", |stage| {
        let nonce = stage.of(&["acquire", "--ttl", "5s"]).run().exited(0).silent().out().trim().to_owned();
        stage.run(&["-n"]).args(["--", "true"]).run().exited(75);
        let other = "00000000000000000000000000000000";
        for subcommand in ["renew", "release"] {
            stage.of(&[subcommand, "--nonce", other]).run().exited(76).one_line(&[&format!("nonce {nonce}")]);
        }
        stage.of(&["renew", "--nonce", &nonce]).run().exited(0).silent();
        stage.of(&["release", "--nonce", &nonce]).run().exited(0).silent();
        stage.of(&["renew", "--nonce", &nonce]).run().exited(76);
        assert!(stage.is_free());
    }),
    ("a keeper keeps the lock while a process lives", |stage| {
        let watched = stage.sandbox.program("sleep").arg("1000").start();
        stage.of(&["acquire", "--ttl", "2s", "--for-pid", &watched.pid().to_string()]).run().exited(0).silent();
        never_during("it is free", Duration::from_secs(3), || if stage.is_free() { Err(()) } else { Ok(()) });
        watched.send(Signal::SIGKILL);
        watched.wait();
        stage.wait_until_free();
    }),
    ("what makes no sense is 64, and nothing runs", |stage| {
        for options in [&["--ttl", "0"][..], &["-w", "-1"], &["-E", "256"], &["--max-hold", "x"]] {
            let wrong = stage.run(options).sh("echo ran").run();
            assert_eq!(wrong.exited(64).out(), "", "{options:?}");
        }
        assert!(stage.is_free());
    }),
    ("an unprotected counter loses no update", |stage| {
        std::fs::write(stage.sandbox.path("counter"), "0\n").expect("a counter");
        let increment = "read n <counter; i=0; while [ $i -lt 50 ]; do i=$((i+1)); done; echo $((n+1)) >counter";
        let body = format!(
            "i=0; while [ $i -lt 6 ]; do i=$((i+1)); \"$WL\" -q \"$LOCK\" -- /bin/sh -c '{increment}' || exit; done"
        );
        let start = |_| stage.sandbox.sh(&body).env("LOCK", &stage.lock).start();
        for finished in (0..8).map(start).collect::<Vec<Running>>().into_iter().map(Running::wait) {
            finished.exited(0);
        }
        assert_eq!(std::fs::read_to_string(stage.sandbox.path("counter")).expect("a counter"), "48\n");
    }),
    ("what happens is told to a log in the same words", |stage| {
        let mut gate = stage.sandbox.gate();
        let holder = stage.run(&[]).sh(gate.script()).start();
        let pid = holder.pid();
        gate.wait_inside();
        let finished = stage.run(&["-w", "200ms", "--log-json", "log"]).args(["--", "true"]).run();
        finished.exited(75);
        gate.open();
        holder.wait().exited(0);
        let nonce = stage.run(&["--log-json", "log"]).sh("echo $WITHLOCK_NONCE").run();
        let log = std::fs::read_to_string(stage.sandbox.path("log")).expect("a log");
        let lines: Vec<serde_json::Value> =
            log.lines().map(|line| serde_json::from_str(line).expect("a line")).collect();
        let events: Vec<&str> = lines.iter().map(|line| line["event"].as_str().expect("an event")).collect();
        assert_eq!(events, ["waiting", "busy", "exit", "acquired", "started", "ended", "released", "exit"]);
        assert_eq!((&lines[0]["holder"]["pid"], lines[0].get("nonce")), (&pid.into(), None));
        assert!(lines.iter().all(|line| line["path"] == *stage.lock.to_str().expect("text")), "{log}");
        assert!(lines[3..].iter().all(|line| line["nonce"] == nonce.out().trim()), "{log}");
    }),
];

/// Runs the whole table, some behaviours at a time; each in a sandbox and at a lock of its own.
fn all(place: &(dyn Fn(&Sandbox, usize) -> OsString + Sync)) {
    let next = Mutex::new(BEHAVIOURS.iter().enumerate());
    let failed = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                loop {
                    let Some((at, (name, behaviour))) = next.lock().expect("the table").next() else { return };
                    let run = || {
                        let sandbox = Sandbox::in_memory();
                        let lock = place(&sandbox, at);
                        behaviour(&Stage { sandbox, lock });
                    };
                    if std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_err() {
                        failed.lock().expect("the failures").push(*name);
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().expect("the failures");
    assert!(failed.is_empty(), "{failed:#?}");
}

#[test]
fn a_lock_in_a_file_does_what_a_lock_does() {
    all(&|sandbox, _| sandbox.lock().into_os_string());
}

#[cfg(feature = "etcd")]
#[test]
fn a_lock_in_etcd_does_what_a_lock_does() {
    let cluster = crate::harness::Cluster::start(1);
    let endpoint = cluster.endpoint(0).to_owned();
    all(&|_, at| format!("etcd://{endpoint}/jobs/{at}.lock").into());
}
