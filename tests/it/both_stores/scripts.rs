//! `acquire`, `renew`, `release` and `check`; keepers; and operators: `inspect` and `break`.

use std::fs;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::{Behaviour, Stage};
use crate::harness::{eventually, never_during, process, send};

const NOBODYS: &str = "0123456789abcdef0123456789abcdef";

/// The pid of the keeper that the sandbox has.
fn keeper(stage: &Stage) -> i32 {
    eventually("there is one keeper", || {
        let is_keeper = |pid: i32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.split(|byte| *byte == 0).nth(1) == Some(b"acquire")
        };
        let all: Vec<i32> =
            stage.sandbox.processes().iter().map(|found| found.pid).filter(|pid| is_keeper(*pid)).collect();
        match all[..] {
            [keeper] => Ok(keeper),
            _ => Err(all),
        }
    })
}

fn wait_until_ended(what: &str, pid: i32) -> Duration {
    let begun = Instant::now();
    eventually(what, || match process(pid) {
        Some(found) if found.state != 'Z' => Err(found),
        _ => Ok(()),
    });
    begun.elapsed()
}

pub(super) const BEHAVIOURS: &[Behaviour] = &[
    ("acquire leaves a lock without a process and prints its nonce alone", |stage| {
        let nonce = stage.of(&["acquire", "--ttl", "7s", "--label", "nightly"]).run().exited(0).silent().out();
        let told = stage.told();
        let holder = &told["holder"];
        assert_eq!((&holder["nonce"], &holder["label"]), (&nonce.trim_end().into(), &"nightly".into()));
        assert_eq!((&told["state"], &told["ttl_ms"]), (&"held".into(), &7_000.into()));
        assert!(stage.sandbox.processes().is_empty(), "nothing stays behind");
        let busy = stage.run(&["-n"]).args(["--", "true"]).run();
        busy.exited(75).one_line(&["held by pid", "expires in"]);
        assert!(!busy.err().contains("unless renewed"), "{busy}");
    }),
    ("a script acquires, renews and releases by nonce, and only by that", |stage| {
        let nonce = stage.acquire();
        stage.run(&["-n"]).args(["--", "true"]).run().exited(75);
        for subcommand in ["renew", "release"] {
            let other = stage.of(&[subcommand, "--nonce", NOBODYS]).run();
            other.exited(76).one_line(&["not held with nonce", NOBODYS, "another holds it", &nonce]);
        }
        stage.of(&["renew", "--nonce", &nonce]).run().exited(0).silent();
        stage.of(&["release", "--nonce", &nonce]).run().exited(0).silent();
        for subcommand in ["renew", "release"] {
            stage.of(&[subcommand, "--nonce", &nonce]).run().exited(76).one_line(&["nobody holds it"]);
        }
        assert!(stage.is_free());
    }),
    ("what was acquired and is not renewed is gone one ttl later, and not before", |stage| {
        let nonce = stage.of(&["acquire", "--ttl", "2s"]).run().exited(0).out();
        let next = stage.of(&["acquire", "-q", "--wait", "40s"]).run();
        assert!(next.exited(0).silent().took > Duration::from_millis(1_500), "not before: {:?}", next.took);
        stage.of(&["renew", "--nonce", nonce.trim_end()]).run().exited(76).one_line(&["another holds it"]);
    }),
    ("a lock that a wrapper keeps for its command is released by nobody else", |stage| {
        let text = "\"$WL\" release; echo $?; \"$WL\" renew; echo $?; \"$WL\" check; echo $?";
        for options in [&[][..], &["--no-renew"]] {
            let finished = stage.run(options).sh(text).run();
            finished.exited(0).one_line(&["not released", "it is released when the command that runs under it ends"]);
            assert_eq!(finished.out(), "75\n0\n0\n");
            stage.nothing_is_left();
        }
    }),
    ("a command asks by name for a lock further out than its own, also where it was run without that", |stage| {
        let inner = "\"$WL\" -n --on-busy run inner.lock -- \"$WL\" check \"$LOCK\"; echo $?";
        let text = format!("{inner}; \"$WL\" acquire inner.lock >nonce; {inner}");
        let finished = stage.run(&[]).sh(text).run();
        finished.exited(0).one_line(&["running without the lock: inner.lock: held"]);
        assert_eq!(finished.out(), "0\n0\n");
    }),
    ("lock and nonce come from the environment where they are not given", |stage| {
        let text = "eval \"$(\"$WL\" acquire --export \"$LOCK\")\"; cd /; \"$WL\" renew && \"$WL\" check && \"$WL\" release; \
                    echo \"$? $WITHLOCK_MODE $WITHLOCK_HELD $WITHLOCK_NONCE\"; \"$WL\" check; echo $?";
        let finished = stage.sh(text).env("WITHLOCK_HELD", "outer").run();
        finished.exited(0).one_line(&["not held: "]);
        let out = finished.out();
        let nonce = out.lines().next().and_then(|line| line.rsplit(' ').next()).expect("a nonce").to_owned();
        assert_eq!(out, format!("0 locked outer {nonce} {nonce}\n76\n"));
        stage.of(&["release"]).run().exited(64).one_line(&["--nonce is missing, and WITHLOCK_NONCE is not set"]);
        let bad = stage.of(&["renew"]).env("WITHLOCK_NONCE", "xyz").run();
        bad.exited(64).one_line(&["WITHLOCK_NONCE=xyz: not 32"]);
        stage
            .of(&["release", "--nonce", "ABC"])
            .run()
            .exited(64)
            .one_line(&["--nonce ABC: not 32 lower-case hex digits"]);
    }),
    ("what a script has acquired is refused below it at once", |stage| {
        let text = "eval \"$(\"$WL\" acquire --export \"$LOCK\")\"; \"$WL\" acquire \"$LOCK\"; echo $?; \
                    \"$WL\" \"$LOCK\" -- true; echo $?; \"$WL\" --reentrant \"$LOCK\" -- true; echo $?; \
                    \"$WL\" release; \"$WL\" -n \"$LOCK\" -- true; echo $?";
        let finished = stage.sh(text).run();
        finished.exited(0).says(&["held by an ancestor of this process"]);
        assert_eq!(
            finished.out(),
            "78\n78\n0\n0\n",
            "the last: the variable counts only while the lock has that nonce"
        );
    }),
    ("a nonce that cannot be printed leaves no lock behind", |stage| {
        for options in [&["acquire"][..], &["acquire", "--export"], &["acquire", "--for-pid", "1"]] {
            let full = fs::OpenOptions::new().write(true).open("/dev/full").expect("/dev/full");
            let finished = stage.of(options).stdout(full).run();
            finished.exited(74).one_line(&["the nonce could not be printed: No space left on device"]);
            let closed = stage.sh(format!("\"$WL\" {} \"$LOCK\" >&-", options.join(" "))).run();
            closed.exited(74).one_line(&["the lock was not taken: standard output"]);
            assert!(stage.is_free(), "{options:?}");
            stage.sandbox.wait_until_nothing_runs();
        }
    }),
    ("who cannot acquire it is told as by the wrapper", |stage| {
        stage.acquire();
        stage.of(&["acquire", "-n"]).run().exited(75).one_line(&["held by pid", "next: withlock inspect"]);
        stage.of(&["acquire", "-n", "-E", "9"]).run().exited(9).one_line(&["held by pid"]);
        stage.of(&["acquire", "-q", "-w", "300ms"]).run().exited(75).one_line(&["still held after 3"]);
        for options in
            [&["acquire", "--ttl", "0.5s"][..], &["acquire", "--for-pid", "-1"], &["acquire", "--for-pid", "1x"]]
        {
            assert_eq!(stage.of(options).run().exited(64).one_line(&[]).out(), "", "{options:?}");
        }
    }),
    ("a keeper keeps the lock while a process lives, and no longer", |stage| {
        let watched = stage.program("sleep").arg("1000").start();
        stage.of(&["acquire", "--ttl", "2s", "--for-pid", &watched.pid().to_string()]).run().exited(0).silent();
        never_during("it is free", Duration::from_secs(3), || if stage.is_free() { Err(()) } else { Ok(()) });
        watched.send(Signal::SIGKILL);
        stage.wait_until_free();
        watched.wait();
    }),
    ("a keeper whose lock is broken ends at once though its process lives", |stage| {
        let watched = stage.program("sleep").arg("1000").start();
        let nonce =
            stage.of(&["acquire", "--ttl", "1h", "--for-pid", &watched.pid().to_string()]).run().exited(0).out();
        let keeper = keeper(stage);
        // It looks once a second, and from then on it hears of it.
        stage.of(&["check", "--nonce", nonce.trim_end()]).run().exited(0);
        stage.of(&["break", "--force"]).run().exited(0);
        let took = wait_until_ended("the keeper", keeper);
        assert!(took < Duration::from_secs(2), "{took:?}");
        watched.send(Signal::SIGKILL);
        watched.wait();
    }),
    ("a keeper that is killed leaves a lock that expires", |stage| {
        let watched = stage.program("sleep").arg("1000").start();
        stage.of(&["acquire", "--ttl", "2s", "--for-pid", &watched.pid().to_string()]).run().exited(0).silent();
        send(keeper(stage), Signal::SIGKILL);
        stage.run(&["-q", "-w", "40s"]).args(["--", "true"]).run().exited(0).silent();
    }),
    ("a keeper's lock is released by its nonce, and the keeper does not outlive it", |stage| {
        let watched = stage.program("sleep").arg("1000").start();
        let nonce = stage.of(&["acquire", "--for-pid", &watched.pid().to_string()]).run().exited(0).out();
        let keeper = keeper(stage);
        stage.of(&["release", "--nonce", nonce.trim_end()]).run().exited(0).silent();
        wait_until_ended("the keeper", keeper);
        assert!(stage.is_free());
    }),
    ("a process that has ended is refused before the lock is taken, and one that ends ends the wait", |stage| {
        let gone = stage.of(&["acquire", "--for-pid", "4194305"]).run();
        assert_eq!(gone.exited(71).one_line(&["cannot watch the process: No such process"]).out(), "");
        let held = stage.acquire();
        let doomed = stage.program("sleep").arg("600").start();
        let waiter = stage.of(&["acquire", "--for-pid", &doomed.pid().to_string()]).start();
        waiter.wait_for_stderr("waiting, held");
        doomed.send(Signal::SIGKILL);
        let finished = waiter.wait();
        finished.exited(71).says(&["the process that the lock is for has ended"]);
        assert_eq!(finished.out(), "");
        stage.of(&["check", "--nonce", &held]).run().exited(0);
    }),
    ("a free lock is free, whoever asks", |stage| {
        assert_eq!(stage.told()["state"], "free");
        stage.of(&["inspect", "-q"]).run().exited(0).silent();
        assert!(stage.of(&["inspect"]).run().exited(0).silent().out().contains(": free\n"));
        for options in [&["break"][..], &["break", "--force"], &["break", "--dry-run"], &["break", "--nonce", NOBODYS]]
        {
            let finished = stage.of(options).run();
            assert!(finished.exited(0).silent().out().contains(": free, there is nothing to break"), "{finished}");
        }
        stage.of(&["check", "--nonce", NOBODYS]).run().exited(76).one_line(&["not held: "]);
        stage.nothing_is_left();
    }),
    ("inspect shows the holder and its lease in one schema", |stage| {
        let (mut gate, holder) = stage.hold(&["--ttl", "1h", "--label", "nightly"]);
        let told = stage.told();
        let who = &told["holder"];
        assert_eq!(
            (&who["pid"], &who["alive"], &who["user"]),
            (&holder.pid().into(), &"runs-here".into(), &"root".into())
        );
        assert_eq!((&who["command"], &who["label"]), (&"sh".into(), &"nightly".into()));
        assert_eq!(
            (&told["state"], &told["stale"], &told["ttl_ms"]),
            (&"held".into(), &false.into(), &3_600_000.into())
        );
        assert_eq!((&told["quarantine"], &told["next"]), (&serde_json::json!([]), &serde_json::json!([])));
        let in_ms = told["expires_in_ms"].as_u64().expect("a time");
        assert!((3_500_000..=3_600_000).contains(&in_ms), "{in_ms}");
        for field in ["held_since_ms", "renewed_at_ms"] {
            assert!(told[field].as_i64().is_some_and(|ms| ms > 1_500_000_000_000), "{field}: {told}");
        }
        stage.of(&["inspect", "-q"]).run().exited(75).silent();
        let text = stage.of(&["inspect"]).run().exited(0).silent().out();
        for part in [
            ": held, expires in ",
            "holder  ",
            "runs here",
            "root (0)",
            "nightly",
            "held since",
            "last renewed",
            "ttl 1h",
        ] {
            assert!(text.contains(part), "{part:?} is not in {text}");
        }
        gate.open();
        holder.wait().exited(0);
    }),
    ("arguments of the command are neither recorded nor shown", |stage| {
        let (mut gate, holder) = stage.hold(&[]);
        for options in [&["inspect"][..], &["inspect", "--json"]] {
            let out = stage.of(options).run().exited(0).out();
            assert!(!out.contains("read go"), "{out}");
        }
        gate.open();
        holder.wait().exited(0);
    }),
    ("a live lock is broken by force only, and by its nonce only that epoch", |stage| {
        let mut gate = stage.sandbox.gate();
        let body = format!("\"$WL\" check || exit 9; {}; exec sleep 1000", gate.enter());
        let holder = stage.run(&["--ttl", "1h"]).sh(body).start();
        gate.wait_inside();
        let nonce = stage.nonce();
        for options in [&["break"][..], &["break", "--dry-run"]] {
            let refused = stage.of(options).run();
            let pid = format!("pid {}", holder.pid());
            refused.exited(75).one_line(&[": held, expires in ", &pid, "not broken", "withlock inspect"]);
            assert_eq!(refused.out(), "");
        }
        let other = stage.of(&["break", "--force", "--nonce", NOBODYS]).run();
        other.exited(75).one_line(&[&format!("the epoch {NOBODYS} has ended"), "not broken"]);
        for wrong in ["", "xyz", &"AB".repeat(16), &"a".repeat(31)] {
            stage.of(&["break", "--nonce", wrong]).run().exited(64).one_line(&["--nonce"]);
        }
        let dry = stage.of(&["break", "--force", "--dry-run"]).run();
        assert!(dry.exited(0).silent().out().contains("would be ended"), "{dry}");
        stage.of(&["check", "--nonce", &nonce]).run().exited(0).silent();
        let broken = Instant::now();
        let forced = stage.of(&["break", "--force", "--nonce", &nonce, "--reason", "ticket 17"]).run();
        let out = forced.exited(0).silent().out();
        for part in [": ended", &format!("pid {} on", holder.pid()), "root", &nonce, "record"] {
            assert!(out.contains(part), "{part:?} is not in {out}");
        }
        let lost = holder.wait();
        lost.exited(76).one_line(&["the lock was lost: "]);
        assert!(lost.ended - broken < Duration::from_secs(2), "{:?}", lost.ended - broken);
        stage.of(&["check", "--nonce", &nonce]).run().exited(76).one_line(&["not held: "]);
        let told = stage.told();
        let kept = &told["quarantine"][0];
        assert_eq!((&told["state"], &kept["owner"]["nonce"]), (&"free".into(), &nonce.as_str().into()), "{told}");
        assert_eq!((&kept["ended"]["why"], &kept["ended"]["reason"]), (&"break".into(), &"ticket 17".into()), "{told}");
        assert!(stage.of(&["inspect"]).run().out().contains("break: ticket 17"));
        // What was broken is no hindrance to the next.
        stage.run(&["-n"]).args(["--", "true"]).run().exited(0).silent();
    }),
    ("a reason that a record cannot keep is a usage error before anything is done", |stage| {
        let nonce = stage.acquire();
        let long = "x".repeat(2_000);
        stage.of(&["break", "--force", "--reason", &long]).run().exited(64).one_line(&["--reason"]);
        stage.of(&["check", "--nonce", &nonce]).run().exited(0).silent();
    }),
    ("output that nobody takes is an error of an operator's command", |stage| {
        stage.acquire();
        for options in
            [&["inspect"][..], &["inspect", "--json"], &["break", "--force", "--dry-run"], &["reclaim", "--json"]]
        {
            let full = fs::OpenOptions::new().write(true).open("/dev/full").expect("/dev/full");
            stage.of(options).stdout(full).run().exited(74).one_line(&["standard output", "No space left on device"]);
        }
        let closed = stage.sh("\"$WL\" break --force \"$LOCK\" >&-").run();
        let lines: Vec<String> = closed.exited(74).says(&[]).err().lines().map(str::to_owned).collect();
        assert!(lines[0].ends_with(": ended"), "{closed}");
        assert_eq!(lines[1..], ["withlock: standard output: cannot write: Bad file number"]);
        stage.of(&["inspect", "-q"]).run().exited(0).silent();
    }),
    ("labels and commands of any name are valid in a document and harmless as text", |stage| {
        let label = "a \"label\"\n\x1b[31m";
        let (mut gate, holder) = stage.hold(&["--label", label]);
        assert_eq!(stage.told()["holder"]["label"], label);
        let text = stage.of(&["inspect"]).run();
        assert!(!text.exited(0).stdout.contains(&0x1b), "{text}");
        let busy = stage.run(&["-n"]).args(["--", "true"]).run();
        assert!(!busy.exited(75).one_line(&[]).stderr.contains(&0x1b), "{busy}");
        gate.open();
        holder.wait().exited(0);
    }),
];
