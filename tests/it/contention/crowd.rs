//! Many processes that want one lock, again and again, and die with it.

use std::cell::RefCell;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use withlock::record::split_trash;

use crate::harness::{Moments, Running, Sandbox, record, slots};

/// Reads the counter, dawdles where a rival would come between, writes it back; and notes that it did, which
/// needs no lock. Shell built-ins only, so that a hold is short and the lock changes hands often.
const INCREMENT: &str =
    "read n <counter; i=0; while [ $i -lt 20 ]; do i=$((i+1)); done; echo $((n+1)) >counter; echo x >>ledger";
/// Between two kills.
const PACE: Duration = Duration::from_millis(40);

/// So many deaths at least.
const ENOUGH: usize = 5;
/// The longest that deaths are waited for.
const LONGEST: Duration = Duration::from_secs(20);

/// How it stands.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tally {
    /// Commands that ran to their end.
    pub(super) holds: usize,
    /// Updates of the counter that were lost.
    pub(super) lost: usize,
}

/// The processes.
pub(super) struct Crowd<'s> {
    sandbox: &'s Sandbox,
    is_exclusive: bool,
    shells: RefCell<Vec<Running>>,
}

impl<'s> Crowd<'s> {
    /// Starts loops that take the lock until a file says stop. Every other one evicts the dead at once, the
    /// rest wait for their ttl; two more do what operators do, without a reason.
    pub(super) fn start(sandbox: &'s Sandbox, processes: usize, program: &Path, leave_out: &str) -> Self {
        std::fs::write(sandbox.path("counter"), "0\n").expect("a counter");
        std::fs::write(sandbox.path("ledger"), "").expect("a ledger");
        let shell = |text: &str| {
            let text = format!("while [ ! -e stop ]; do {text}; done");
            sandbox.sh(text).env("PROGRAM", program).env("WITHLOCK_LEAVE_OUT", leave_out).start()
        };
        let take = |option: &str| {
            format!("\"$PROGRAM\" -q --ttl 1s {option} --on-lost warn -w 30s \"$L\" -- /bin/sh -c '{INCREMENT}' || :")
        };
        let mut shells: Vec<Running> =
            (0..processes).map(|at| shell(&take(if at % 2 == 0 { "--evict-dead" } else { "" }))).collect();
        // These are refused, unless the lock is stale.
        shells.push(shell("\"$PROGRAM\" break \"$L\" >/dev/null 2>&1; sleep 0.05"));
        shells.push(shell("\"$PROGRAM\" reclaim \"$L\" >/dev/null; sleep 0.1"));
        Crowd { sandbox, is_exclusive: leave_out.is_empty(), shells: RefCell::new(shells) }
    }

    /// How it stands. The counter is behind the ledger's truth by no more than one that is being noted.
    pub(super) fn tally(&self) -> Tally {
        let read = |name: &str| std::fs::read_to_string(self.sandbox.path(name)).unwrap_or_default();
        // In this order: an update is counted before it is noted.
        let holds = read("ledger").len() / 2;
        let counted = loop {
            // Empty for an instant, while it is written.
            if let Ok(counted) = read("counter").trim().parse::<usize>() {
                break counted;
            }
        };
        Tally { holds, lost: holds.saturating_sub(counted) }
    }

    /// Lets them be for so long; how many holds there were in a second.
    pub(super) fn watch_for(&self, duration: Duration) -> f64 {
        let (begun, before) = (Instant::now(), self.tally().holds);
        std::thread::sleep(duration);
        let holds = u32::try_from(self.tally().holds - before).expect("not so many");
        f64::from(holds) / begun.elapsed().as_secs_f64()
    }

    /// For so long kills holders, and others who are waiting or on their way; how many. Goes on until
    /// enough of them have been killed and evicted, on a machine that is busy with other things.
    pub(super) fn torment_for(&self, duration: Duration) -> usize {
        let mut moments = Moments::new("whom it hits");
        let (begun, mut kills) = (Instant::now(), 0);
        let is_enough = |kills| kills >= ENOUGH && self.evictions() > 0;
        while begun.elapsed() < duration || (!is_enough(kills) && begun.elapsed() < LONGEST) {
            // A part of the torment itself: at a random moment.
            std::thread::sleep(PACE / 2 + moments.within(PACE));
            let wrappers: Vec<i32> = self
                .sandbox
                .processes()
                .into_iter()
                .filter(|process| process.name == "withlock")
                .map(|process| process.pid)
                .collect();
            let holder = record(&self.sandbox.lock()).and_then(|record| i32::try_from(record.pid).ok());
            let by_chance = usize::try_from(moments.number() % 64).expect("small") % wrappers.len().max(1);
            let victim = holder.filter(|pid| kills % 4 != 3 && wrappers.contains(pid));
            // The wrapper alone: its command, which has the guard, goes on to its end.
            if let Some(victim) = victim.or(wrappers.get(by_chance).copied())
                && kill(Pid::from_raw(victim), Signal::SIGKILL).is_ok()
            {
                kills += 1;
            }
        }
        kills
    }

    /// Lets all come to an end.
    pub(super) fn end(&self) {
        std::fs::write(self.sandbox.path("stop"), "").expect("a file");
        for finished in self.shells.take().into_iter().map(Running::wait) {
            assert!(!self.is_exclusive || finished.code() == Some(0), "{finished}");
        }
        self.sandbox.wait_until_nothing_runs();
    }

    /// How many quarantines there are: each is a dead holder's.
    pub(super) fn evictions(&self) -> usize {
        slots(&self.sandbox.lock()).len()
    }

    /// Whoever comes next gets in, and besides quarantines nothing of all this is left.
    pub(super) fn assert_that_nothing_else_is_left(&self) {
        let sandbox = self.sandbox;
        sandbox.shipped().args(["-q", "-w", "30s"]).lock().args(["--", "true"]).run().exited(0).silent();
        // What a reclaimer that was killed has begun to remove is a quarantine still.
        let is_quarantine = |name: &String| {
            slots(&sandbox.lock()).iter().any(|slot| slot.path == sandbox.path(name))
                || split_trash(name.as_ref()).is_some_and(|lock| lock == "a.lock")
        };
        let others = sandbox.names().into_iter().filter(|name| !is_quarantine(name));
        assert_eq!(others.collect::<Vec<_>>(), ["counter", "ledger", "stop"]);
    }
}
