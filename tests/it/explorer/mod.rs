//! The schedule explorer: the real store code on a real directory, one system call at a time.
//!
//! Two or three actors acquire, renew, release, break and reclaim, each a thread with its own descriptors.
//! A hook before every system call of the protocol stops it until the scheduler gives it its turn, so that a
//! schedule is a word of choices: who makes the next call, who dies, when time passes. A search runs the
//! schedules, each from the beginning in a fresh directory: those with few disturbances (an actor that is
//! interrupted in the middle of an operation, a death, a passing of time) before those with more. States
//! that are known are not explored again; `state` says why that loses nothing.
//!
//! `monitor` watches the promises, and at the end of every schedule somebody comes who must be able to
//! acquire and keep the lock, also if one of the actors stalls for ever or wakes up after that.
//!
//! - `WITHLOCK_SOAK=SECONDS` explores for so long, instead of a fixed number of schedules.
//! - `WITHLOCK_SCHEDULE=SCENARIO:WORD` runs one schedule and prints it, as a failure says.
//!
//! Two hosts that share a directory and not its locks are actors whose guards are kept apart by the hook;
//! what is promised then is promised within a bound on stalls, and the scheduler keeps it.

mod actor;
mod controls;
mod engine;
mod given;
mod monitor;
mod perform;
mod scenario;
mod scenarios;
mod search;
mod state;
mod turn;
mod world;

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use engine::{Limit, Report, explore, replay, tell};
use scenario::Scenario;
use search::parse;

/// The least number of schedules that a run must come to.
const LEAST: u64 = 100_000;
/// Scenarios that are explored at a time.
const AT_A_TIME: usize = 2;

fn from_environment() -> Option<(Scenario, Vec<search::Choice>)> {
    let asked = std::env::var("WITHLOCK_SCHEDULE").ok()?;
    let (name, word) = asked.split_once(':').expect("WITHLOCK_SCHEDULE=SCENARIO:WORD");
    let scenario = scenarios::all().into_iter().find(|scenario| scenario.name == name).expect("a scenario's name");
    Some((scenario, parse(word).expect("a schedule's word")))
}

#[test]
fn no_schedule_breaks_a_promise_of_the_protocol() {
    if let Some((scenario, schedule)) = from_environment() {
        let report = replay(&scenario, &schedule);
        println!("{}\n{:?}", report.trace.join("\n"), report.found.as_ref().map(|found| &found.what));
        assert_eq!(report.found, None);
        return;
    }
    let scenarios = scenarios::all();
    let soak_s: Option<u64> = std::env::var("WITHLOCK_SOAK").ok().map(|text| text.parse().expect("seconds"));
    let limit = soak_s.map_or(Limit::Schedules, |soak_s| {
        let share_ms = soak_s * 1_000 * AT_A_TIME as u64 / scenarios.len() as u64;
        Limit::Time(Duration::from_millis(share_ms))
    });
    let next = AtomicUsize::new(0);
    let reports: Mutex<Vec<(&Scenario, Report)>> = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(|| {
                while let Some(scenario) = scenarios.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let report = explore(scenario, limit);
                    reports.lock().expect("reports").push((scenario, report));
                }
            });
        }
    });
    let reports = reports.into_inner().expect("reports");
    let mut schedules = 0;
    let mut broken = Vec::new();
    for (scenario, report) in &reports {
        let counts = report.counts;
        println!(
            "{:24} {:6} schedules, {:6} states, {:5} ends, longest {:3}, {:?}, {:.1} s",
            scenario.name,
            counts.schedules,
            counts.states,
            counts.ends,
            counts.longest,
            report.exhausted,
            report.time.as_secs_f64()
        );
        schedules += counts.schedules;
        broken.extend(report.found.as_ref().map(|found| tell(scenario, found)));
    }
    println!("{schedules} schedules of {} scenarios", reports.len());
    assert!(broken.is_empty(), "{} broken:\n{}", broken.len(), broken.join("\n\n"));
    assert!(schedules >= LEAST, "only {schedules} schedules");
}
