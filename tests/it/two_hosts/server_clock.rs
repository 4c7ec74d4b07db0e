//! The clock of a file server, as its clients see it: the backing file system's stamps, shifted by what
//! the server's clock was off by when each was made, and cut to whole seconds if it keeps no more.
//!
//! The shift is applied when a stamp is shown, never when it is made: a stamp that is corrected after
//! the fact would be seen wrong in between, and a file that is an hour old for a microsecond is stale.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

const NS_PER_SECOND: i128 = 1_000_000_000;

/// From when on the server's clock is off, and by how much.
#[derive(Clone, Copy, Debug)]
struct Step {
    from_ns: i128,
    offset_ns: i128,
}

/// What a server says of the time stamps that its file system made by the true clock.
#[derive(Debug)]
pub(crate) struct ServerClock {
    whole_seconds: bool,
    steps: Vec<Step>,
}

impl ServerClock {
    /// A clock that has been off by `offset_ms` since ever.
    pub(crate) fn new(whole_seconds: bool, offset_ms: i64) -> Self {
        let offset_ns = i128::from(offset_ms) * 1_000_000;
        ServerClock { whole_seconds, steps: vec![Step { from_ns: i128::MIN, offset_ns }] }
    }

    /// From the true time `from_ns` on the clock is off by `offset_ns`. What was stamped before keeps
    /// its stamp.
    pub(crate) fn step(&mut self, from_ns: i128, offset_ns: i128) {
        self.steps.push(Step { from_ns, offset_ns });
    }

    /// The stamp that clients see of a file that was stamped at `true_ns`.
    pub(crate) fn shown_ns(&self, true_ns: i128) -> i128 {
        let step = self.steps.iter().rev().find(|step| step.from_ns <= true_ns);
        let shown_ns = true_ns + step.map_or(0, |step| step.offset_ns);
        if self.whole_seconds { shown_ns.div_euclid(NS_PER_SECOND) * NS_PER_SECOND } else { shown_ns }
    }

    /// What to stamp a file with so that clients see `shown_ns`, which one of them asked for. Nothing,
    /// if the clock stepped over that time: it never was.
    pub(crate) fn true_ns(&self, shown_ns: i128) -> Option<i128> {
        let wanted_ns = if self.whole_seconds { shown_ns.div_euclid(NS_PER_SECOND) * NS_PER_SECOND } else { shown_ns };
        let candidates = self.steps.iter().rev().map(|step| shown_ns - step.offset_ns);
        candidates.into_iter().find(|true_ns| self.shown_ns(*true_ns) == wanted_ns)
    }
}

/// Nanoseconds since 1970, negative before.
pub(crate) fn ns_of(time: SystemTime) -> i128 {
    let ns = |duration: Duration| i128::try_from(duration.as_nanos()).unwrap_or(i128::MAX);
    match time.duration_since(UNIX_EPOCH) {
        Ok(after) => ns(after),
        Err(before) => -ns(before.duration()),
    }
}

/// The time that is `ns` nanoseconds after 1970.
pub(crate) fn time_of(ns: i128) -> SystemTime {
    let distance = Duration::from_nanos(u64::try_from(ns.unsigned_abs()).unwrap_or(u64::MAX));
    if ns < 0 { UNIX_EPOCH - distance } else { UNIX_EPOCH + distance }
}

#[test]
fn a_step_of_the_servers_clock_changes_only_the_stamps_made_after_it() {
    let mut clock = ServerClock::new(false, 0);
    clock.step(1_000, -300);
    assert_eq!((clock.shown_ns(999), clock.shown_ns(1_000), clock.shown_ns(1_001)), (999, 700, 701));
    assert_eq!(clock.true_ns(800), Some(1_100), "the newest time that shows so");
    assert_eq!(clock.true_ns(500), Some(500));

    clock.step(2_000, 300);
    assert_eq!((clock.shown_ns(1_999), clock.shown_ns(2_000)), (1_699, 2_300));
    assert_eq!(clock.true_ns(2_000), None, "the clock stepped over it");
}

#[test]
fn a_server_that_keeps_whole_seconds_rounds_down() {
    let clock = ServerClock::new(true, -1_500);
    assert_eq!(clock.shown_ns(3_400_000_000), 1_000_000_000);
    assert_eq!(clock.shown_ns(1_400_000_000), -1_000_000_000);
    let stamped_ns = clock.true_ns(7_200_000_000).unwrap();
    assert_eq!(clock.shown_ns(stamped_ns), 7_000_000_000);
}

#[test]
fn times_before_1970_survive_the_conversion() {
    for ns in [-1_500_000_001, -1, 0, 1, 1_700_000_000_123_456_789] {
        assert_eq!(ns_of(time_of(ns)), ns);
    }
}
