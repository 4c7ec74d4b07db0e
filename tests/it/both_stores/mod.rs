//! What a lock does, wherever it lives: one table of behaviours, run for a lock file and, where the tests are
//! built with etcd, for a key there. Nothing in a behaviour says which of them it is.
//!
//! With the cargo feature `etcd` it needs etcd and etcdctl.

use std::ffi::{OsStr, OsString};
use std::sync::Mutex;

use serde_json::Value;

use crate::harness::{Gate, Run, Running, Sandbox, eventually};

mod command;
mod scripts;
mod waiting;

/// A sandbox and a lock somewhere.
struct Stage {
    sandbox: Sandbox,
    lock: OsString,
}

impl Stage {
    /// `withlock OPTIONS LOCK`. Below it the lock is also in `$LOCK`.
    fn run(&self, options: &[&str]) -> Run<'_> {
        self.sandbox.withlock().env("LOCK", &self.lock).args(options).arg(&self.lock)
    }

    /// `withlock SUBCOMMAND OPTIONS LOCK`.
    fn of(&self, words: &[&str]) -> Run<'_> {
        self.run(words)
    }

    /// Any other program; the lock is in `$LOCK`.
    fn program(&self, program: &str) -> Run<'_> {
        self.sandbox.program(program).env("LOCK", &self.lock)
    }

    /// `sh -c TEXT`; the lock is in `$LOCK`.
    fn sh(&self, text: impl AsRef<OsStr>) -> Run<'_> {
        self.sandbox.sh(text).env("LOCK", &self.lock)
    }

    /// A holder, and the gate in which its command waits.
    fn hold(&self, options: &[&str]) -> (Gate, Running) {
        let mut gate = self.sandbox.gate();
        let holder = self.run(options).sh(gate.script()).start();
        gate.wait_inside();
        (gate, holder)
    }

    /// Takes the lock for an hour, for no process; its nonce.
    fn acquire(&self) -> String {
        self.of(&["acquire", "--ttl", "1h"]).run().exited(0).silent().out().trim_end().to_owned()
    }

    fn is_free(&self) -> bool {
        self.of(&["inspect", "-q"]).run().code() == Some(0)
    }

    fn wait_until_free(&self) {
        eventually("the lock is free", || if self.is_free() { Ok(()) } else { Err(()) });
    }

    /// What `inspect --json` tells of the lock.
    fn told(&self) -> Value {
        let told = self.of(&["inspect", "--json"]).run();
        let mut told: Value = serde_json::from_slice(&told.exited(0).silent().stdout).expect("JSON");
        told["locks"][0].take()
    }

    /// The holder's nonce in what `inspect --json` has printed.
    fn nonce_in(told: &[u8]) -> String {
        let told: Value = serde_json::from_slice(told).expect("JSON");
        told["locks"][0]["holder"]["nonce"].as_str().expect("a holder").to_owned()
    }

    fn nonce(&self) -> String {
        Self::nonce_in(&self.of(&["inspect", "--json"]).run().exited(0).stdout)
    }

    /// Free, and no quarantine.
    #[track_caller]
    fn nothing_is_left(&self) {
        let told = self.told();
        assert_eq!((&told["state"], &told["quarantine"]), (&"free".into(), &Value::Array(Vec::new())), "{told}");
    }
}

type Behaviour = (&'static str, fn(&Stage));

const TABLES: [&[Behaviour]; 4] = [command::BEHAVIOURS, waiting::BEHAVIOURS, scripts::BEHAVIOURS, OTHERS];

const OTHERS: &[Behaviour] = &[("what happens is told to a log in the same words", |stage| {
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
    let lines: Vec<serde_json::Value> = log.lines().map(|line| serde_json::from_str(line).expect("a line")).collect();
    let events: Vec<&str> = lines.iter().map(|line| line["event"].as_str().expect("an event")).collect();
    assert_eq!(events, ["waiting", "busy", "exit", "acquired", "started", "ended", "released", "exit"]);
    assert_eq!((&lines[0]["holder"]["pid"], lines[0].get("nonce")), (&pid.into(), None));
    assert!(lines.iter().all(|line| line["path"] == *stage.lock.to_str().expect("text")), "{log}");
    assert!(lines[3..].iter().all(|line| line["nonce"] == nonce.out().trim()), "{log}");
})];

/// Runs the whole table, some behaviours at a time; each in a sandbox and at a lock of its own.
fn all(place: &(dyn Fn(&Sandbox, usize) -> OsString + Sync)) {
    let next = Mutex::new(TABLES.concat().into_iter().enumerate());
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
                        failed.lock().expect("the failures").push(name);
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
