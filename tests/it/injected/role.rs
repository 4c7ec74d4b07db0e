//! Who the faults happen to.

use std::fs;
use std::os::unix::fs::symlink;

use crate::cases_end::plant_slot;
use crate::harness::{Run, Sandbox, blank_ages_ms, plant, plant_bytes, planted};

/// The lease of all that is taken here.
pub(super) const TTL_MS: u64 = 1_000;
const HOUR_MS: u64 = 3_600_000;

/// Inside the lock: reads a counter, dawdles, writes it back, and notes coming and going. Shell built-ins
/// only, so that it is soon over.
pub(super) const INSIDE: &str = "echo in >>witness/log; read n <witness/counter; i=0; while [ $i -lt 100 ]; do i=$((i+1)); done; echo $((n+1)) >witness/counter; echo out >>witness/log";
/// The same for so long that the lease must be renewed.
pub(super) const INSIDE_FOR_LONG: &str = "echo in >>witness/log; read n <witness/counter; sleep 0.75; echo $((n+1)) >witness/counter; echo out >>witness/log";

/// What a role does with the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Takes it, for a command.
    Taker,
    /// Takes it by `acquire`, and leaves it.
    Acquirer,
    /// Does something else with it, or beside it.
    Operator,
    /// Only looks.
    Looker,
    /// Hands out a number, in `nums`.
    Reserver,
}

/// A part that the program plays.
pub(super) struct Role {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    /// What it finds.
    pub(super) prepare: fn(&Sandbox),
    pub(super) arguments: fn(Run<'_>) -> Run<'_>,
    /// Another holds the lock when it comes, and lets go when it waits.
    pub(super) waits: bool,
    /// The exit codes that are right if rivals were at it while it was stopped.
    pub(super) when_overtaken: &'static [i32],
}

const NOTHING: fn(&Sandbox) = |_| {};

/// All of them.
pub(super) const ROLES: &[Role] = &[
    taker("holder", NOTHING, |run| run.args(["--ttl", "1s"]).lock().sh(INSIDE)),
    // The common case has a way of its own from the first instruction on.
    taker("plain holder", NOTHING, |run| run.lock().sh(INSIDE)),
    taker("renewer", NOTHING, |run| run.args(["--ttl", "1s"]).lock().sh(INSIDE_FOR_LONG)),
    taker("fenced holder", numbers, |run| run.args(["--ttl", "1s", "--fence", "nums"]).lock().sh(INSIDE)),
    taker("evictor", stale, |run| run.args(["--ttl", "1s"]).lock().sh(INSIDE)),
    taker("evictor of a blank lock", blank, |run| run.args(["--ttl", "1s"]).lock().sh(INSIDE)),
    Role {
        waits: true,
        ..taker("waiter", NOTHING, |run| run.args(["-q", "--ttl", "1s", "-w", "30s"]).lock().sh(INSIDE))
    },
    operator("breaker", stale, |run| run.arg("break").lock()),
    // By nonce: else it would break whoever it finds, as it should.
    operator("breaker by force", young, |run| run.args(["break", "--force", "--nonce", NONCE]).lock()),
    operator("reclaimer", two_slots, |run| run.arg("reclaim").lock()),
    Role { when_overtaken: &[0, 75, 76], ..operator("renewer by nonce", young, |run| with_nonce("renew", run)) },
    Role { when_overtaken: &[0, 75, 76], ..operator("releaser by nonce", young, |run| with_nonce("release", run)) },
    Role {
        kind: Kind::Acquirer,
        ..operator("acquirer", NOTHING, |run| run.args(["acquire", "--ttl", "1s", "-w", "5s"]).lock())
    },
    Role { kind: Kind::Looker, ..operator("inspector", two_slots, |run| run.arg("inspect").lock()) },
    Role {
        kind: Kind::Looker,
        when_overtaken: &[0, 75, 76],
        ..operator("checker", young, |run| with_nonce("check", run))
    },
    Role { kind: Kind::Reserver, ..operator("first reserver", no_numbers, |run| run.args(["reserve", "nums"])) },
    Role { kind: Kind::Reserver, ..operator("reserver", numbers, |run| run.args(["reserve", "nums"])) },
    Role {
        kind: Kind::Reserver,
        ..operator("reserver without the lock", locked_numbers, |run| run.args(["reserve", "--wait", "0", "nums"]))
    },
];

const fn taker(name: &'static str, prepare: fn(&Sandbox), arguments: fn(Run<'_>) -> Run<'_>) -> Role {
    Role { name, kind: Kind::Taker, prepare, arguments, waits: false, when_overtaken: &[0] }
}

const fn operator(name: &'static str, prepare: fn(&Sandbox), arguments: fn(Run<'_>) -> Run<'_>) -> Role {
    Role { name, kind: Kind::Operator, prepare, arguments, waits: false, when_overtaken: &[0, 75] }
}

/// The role of this name.
pub(super) fn role(name: &str) -> &'static Role {
    ROLES.iter().find(|role| role.name == name).unwrap_or_else(|| panic!("no role {name}"))
}

const NONCE: &str = "0123456789abcdef0123456789abcdef";

fn with_nonce<'s>(subcommand: &str, run: Run<'s>) -> Run<'s> {
    run.args([subcommand, "--nonce", NONCE]).lock()
}

fn stale(sandbox: &Sandbox) {
    plant(&sandbox.lock(), &planted(TTL_MS), TTL_MS + 60_000);
    // What an evictor also does: it reclaims what others have left.
    plant_slot(&sandbox.lock(), TTL_MS, HOUR_MS);
}

fn blank(sandbox: &Sandbox) {
    plant_bytes(&sandbox.lock(), b"", blank_ages_ms().1);
}

fn young(sandbox: &Sandbox) {
    // Long enough for a slow tracer; where a trial needs less it is made to be so old.
    let mut record = planted(5_000);
    record.nonce = withlock::record::Nonce::parse(NONCE.as_bytes()).expect("a nonce");
    plant(&sandbox.lock(), &record, 0);
}

/// A directory, and a file as a crash inside a release leaves it.
fn two_slots(sandbox: &Sandbox) {
    let lock = sandbox.lock();
    plant_slot(&lock, TTL_MS, HOUR_MS);
    let record = planted(TTL_MS);
    let name = withlock::record::SlotName::of(&record).file_name(lock.file_name().expect("a name"));
    plant(&sandbox.path(name), &record, HOUR_MS);
}

fn no_numbers(sandbox: &Sandbox) {
    fs::create_dir(sandbox.path("nums")).expect("a directory");
}

fn numbers(sandbox: &Sandbox) {
    no_numbers(sandbox);
    for marker in ["claim-1", "claim-2", "claim-3"] {
        fs::write(sandbox.path("nums").join(marker), "").expect("a marker");
    }
    fs::write(sandbox.path("nums").join("floor"), "2\n").expect("a floor");
}

fn locked_numbers(sandbox: &Sandbox) {
    numbers(sandbox);
    plant(&sandbox.path("nums").join("lock"), &planted(60_000), 0);
}

/// Other people's things in the same directory, some with names that are almost ours.
pub(super) fn plant_neighbours(sandbox: &Sandbox) {
    fs::create_dir(sandbox.path("theirs")).expect("a directory");
    plant_bytes(&sandbox.path("theirs/data"), b"data", HOUR_MS);
    plant_bytes(&sandbox.path("a.lock.stale-1"), b"", HOUR_MS);
    plant_bytes(&sandbox.path("a.lock.bak"), b"copy", HOUR_MS);
    plant(&sandbox.path("b.lock"), &planted(TTL_MS), HOUR_MS);
    symlink("theirs", sandbox.path("a.lock.stale-1-ffffffffffffffffffffffffffffffff")).expect("a link");
}
