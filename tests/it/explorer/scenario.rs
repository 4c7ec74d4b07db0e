//! What is explored: who does what, from which beginning, and what else may happen.

use withlock::record::Guard;
use withlock::sys::Errno;
use withlock::sys::hook::{Call, Step};

/// Schedules of one scenario, unless it says otherwise.
const SCHEDULES: u64 = 2_500;

/// One thing that an actor does. What needs a lock is left out by an actor that was not granted one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Op {
    Nothing,
    /// Two attempts with a wait between them.
    Acquire,
    Renew,
    Release,
    /// What an operator does: ends what is at the path, if it is stale; by force whatever it is.
    Break {
        force: bool,
    },
    /// Ends the given epoch by its nonce, as whoever acquired it may from any process.
    ReleaseByNonce,
    /// Removes the quarantines that may go.
    Reclaim,
    /// A stranger makes a directory of its own with the name of the slot of what is at the path.
    OccupySlot,
    /// A stranger removes what it made.
    VacateSlot,
}

impl Op {
    pub(super) fn needs_lock(self) -> bool {
        matches!(self, Op::Renew | Op::Release)
    }
}

#[derive(Clone, Debug)]
pub(super) struct Actor {
    pub(super) ops: Vec<Op>,
    pub(super) guard: Guard,
    pub(super) host: Option<&'static str>,
    pub(super) evict_dead: bool,
}

impl Actor {
    pub(super) fn new(ops: &[Op]) -> Self {
        Actor { ops: ops.to_vec(), guard: Guard::Inherited, host: None, evict_dead: false }
    }

    pub(super) fn without_guard(self) -> Self {
        Actor { guard: Guard::None, ..self }
    }

    pub(super) fn evicts_dead(self) -> Self {
        Actor { evict_dead: true, ..self }
    }
}

/// What is there at the beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Given {
    /// The lock of a holder that is dead, of this age in milliseconds.
    Epoch { age_ms: u64 },
    /// A lock whose maker died before it wrote the record.
    Blank { age_ms: u64 },
    /// The slot of the given epoch, empty, or with the claims of so many enders that died.
    Slot { claims: u64 },
    /// Something of a stranger's with the name of the given epoch's slot.
    Stranger(Occupant),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Occupant {
    Directory,
    File,
    Symlink,
    /// A directory that holds the highest claim there can be.
    LastClaim,
    /// A directory that looks as if the epoch had ended.
    Ended,
}

/// A call that fails whenever it is made.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fault {
    pub(super) call: &'static str,
    pub(super) name_has: &'static str,
    pub(super) errno: Errno,
}

impl Fault {
    pub(super) fn hits(&self, call: &Call<'_>) -> bool {
        call.call == self.call && call.name.to_string_lossy().contains(self.name_has)
    }
}

/// How much may happen besides the actors' own steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Budget {
    /// Actors that die.
    pub(super) deaths: u8,
    /// Times that everything turns old.
    pub(super) ages: u8,
    /// Times that every quarantine turns reclaimable.
    pub(super) reclaims: u8,
    /// Times that the wall clock is set back by an hour.
    pub(super) set_backs: u8,
}

#[derive(Clone, Debug)]
pub(super) struct Scenario {
    pub(super) name: String,
    pub(super) actors: Vec<Actor>,
    pub(super) given: Vec<Given>,
    pub(super) budget: Budget,
    /// Disturbances in one schedule, at most: preemptions, deaths and events of time; `None`: any number.
    pub(super) bound: Option<u8>,
    /// Schedules, at most: the search goes from few disturbances to more and stops there.
    pub(super) at_most: u64,
    /// Nobody stalls longer than the reclaim age between two adjacent calls.
    pub(super) timed: bool,
    /// The boot clocks move with the wall clock: time passes, rather than a clock being set.
    pub(super) moves_boot: bool,
    /// Time passes only between two operations of whoever acts.
    pub(super) passes_at_rest: bool,
    pub(super) faults: Vec<Fault>,
    pub(super) leave_out: Vec<Step>,
    /// What is left behind is not looked at: another promise is to be seen broken.
    pub(super) overlooks_leaks: bool,
}

impl Scenario {
    /// All schedules of `actors` on one host, with at most one death.
    pub(super) fn new(name: &str, actors: Vec<Actor>) -> Self {
        Scenario {
            name: name.into(),
            actors,
            given: Vec::new(),
            budget: Budget { deaths: 1, ..Budget::default() },
            bound: None,
            at_most: SCHEDULES,
            timed: false,
            moves_boot: false,
            passes_at_rest: false,
            faults: Vec::new(),
            leave_out: Vec::new(),
            overlooks_leaks: false,
        }
    }

    pub(super) fn given(self, given: &[Given]) -> Self {
        Scenario { given: given.to_vec(), ..self }
    }

    pub(super) fn deaths(mut self, deaths: u8) -> Self {
        self.budget.deaths = deaths;
        self
    }

    pub(super) fn ages(mut self, ages: u8) -> Self {
        self.budget.ages = ages;
        self
    }

    pub(super) fn reclaims(mut self, reclaims: u8) -> Self {
        self.budget.reclaims = reclaims;
        self
    }

    pub(super) fn set_backs(mut self, set_backs: u8) -> Self {
        self.budget.set_backs = set_backs;
        self
    }

    pub(super) fn at_most(self, schedules: u64) -> Self {
        Scenario { at_most: schedules, ..self }
    }

    pub(super) fn bound(self, disturbances: u8) -> Self {
        Scenario { bound: Some(disturbances), ..self }
    }

    /// Time passes on all clocks, rather than one being set forward.
    pub(super) fn time_passes(self) -> Self {
        Scenario { moves_boot: true, ..self }
    }

    /// Each actor on a host of its own: they share the directory, and not its locks. What is promised then
    /// is promised within a bound on stalls.
    pub(super) fn on_hosts(mut self) -> Self {
        const HOSTS: [&str; 3] = ["a", "b", "c"];
        for (actor, host) in self.actors.iter_mut().zip(HOSTS) {
            actor.host = Some(host);
        }
        Scenario { timed: true, moves_boot: true, ..self }
    }

    /// Fewer moments at which time passes: what takes several disturbances is found sooner.
    pub(super) fn passing_at_rest(self) -> Self {
        Scenario { passes_at_rest: true, ..self }
    }

    pub(super) fn fault(mut self, call: &'static str, name_has: &'static str, errno: Errno) -> Self {
        self.faults.push(Fault { call, name_has, errno });
        self
    }

    pub(super) fn without(self, step: Step) -> Self {
        Scenario { leave_out: vec![step], overlooks_leaks: true, ..self }
    }

    pub(super) fn is_one_host(&self) -> bool {
        self.actors.iter().all(|actor| actor.host.is_none())
    }

    /// Whether the records of ended epochs must be found. Not where the slot's name or space is wanting, nor
    /// where what goes wrong without the reclaim age is to be more than that.
    pub(super) fn is_audited(&self) -> bool {
        !self.has_strangers() && !self.has_faults() && !self.leave_out.contains(&Step::ReclaimAge)
    }

    pub(super) fn has_faults(&self) -> bool {
        !self.faults.is_empty()
    }

    /// Whether something may be left behind that is not ours to remove.
    pub(super) fn has_strangers(&self) -> bool {
        self.given.iter().any(|given| matches!(given, Given::Stranger(_)))
            || self.actors.iter().any(|actor| actor.ops.contains(&Op::OccupySlot))
    }
}

/// Whether a call is no step of its own: nobody else can see it, or be seen by it.
pub(super) fn is_private(call: &Call<'_>) -> bool {
    matches!(call.call, "open" | "fsync")
}
