//! The negative controls: each step of the protocol is left out once, and the explorer must find what then
//! goes wrong. A promise that is never broken without the step would not show what the step is for, or the
//! explorer could not see it.

use withlock::sys::hook::{STEPS, Step};

use super::engine::{Limit, explore, replay};
use super::scenario::Scenario;
use super::scenarios::all;
use super::search::{parse, word};

/// A step, the scenario in which it is missed, and the promise that is broken then.
const CONTROLS: &[(Step, &str, &str)] = &[
    (Step::Exclusive, "acquire-2", "exclusion"),
    (Step::Guard, "renew-evict", "guard"),
    (Step::Veto, "renew-evict", "guard"),
    (Step::Verify, "renew-evict-hosts", "renewal"),
    (Step::SlotCheck, "renew-evict-hosts", "renewal"),
    (Step::GrantCheck, "acquire-2-hosts", "renewal"),
    (Step::ReleaseBySlot, "acquire-2-hosts", "another epoch"),
    (Step::Claim, "plain-rename-hosts", "another epoch"),
    (Step::Noreplace, "force-release", "another epoch"),
    (Step::ReclaimGuard, "force-reclaim", "another epoch"),
    (Step::ReclaimLive, "half-made-reclaim-hosts", "audit"),
    (Step::ReclaimAge, "acquire-2-hosts", "another epoch"),
    (Step::Identity, "late-release-hosts", "another epoch"),
    (Step::Descriptor, "renew-force", "renewal"),
    (Step::Newborn, "acquire-2", "newborn"),
    (Step::Seal, "force-release", "another epoch"),
    (Step::Enter, "force-removal", "another epoch"),
    (Step::ReleaseGuard, "no-guard-reclaim", "exclusion"),
];

/// Steps without a control here. Numbers are reserved elsewhere, and their arbiter has its control there; so
/// has what a contender in etcd takes back, so have the errands of a holder whose file server hangs, and so has the
/// process that is to become COMMAND.
const WITHOUT_CONTROL: &[Step] = &[Step::Mark, Step::TakeBack, Step::Errand, Step::Recall];

/// Schedules in which a missing step must have shown.
const WITHIN: u64 = 200_000;

fn named(name: &str) -> Scenario {
    all().into_iter().find(|scenario| scenario.name == name).expect("a scenario of that name")
}

#[test]
fn every_step_of_the_protocol_is_missed_when_it_is_left_out() {
    let mut unmissed = Vec::new();
    for (step, name, promise) in CONTROLS {
        let step_name = STEPS.iter().find(|(known, _)| known == step).map_or("", |(_, name)| name);
        let scenario = named(name).without(*step).at_most(WITHIN);
        let report = explore(&scenario, Limit::Schedules);
        let Some(found) = report.found else {
            println!("NOT FOUND {step_name} {name} {:?} {:?} {:?}", report.counts, report.exhausted, report.time);
            unmissed.push(step_name);
            continue;
        };
        let schedule = word(&found.schedule);
        println!(
            "without {step_name:16} {:6} schedules of {name}, {:.1} s: {}",
            report.counts.schedules,
            report.time.as_secs_f64(),
            found.what
        );
        assert!(
            found.what.starts_with(promise),
            "without {step_name}, {promise} was to be broken, not: {}",
            found.what
        );
        // The schedule is enough to see it again.
        let again = replay(&scenario, &parse(&schedule).expect("a schedule's word"));
        assert_eq!(again.found.map(|again| again.what), Some(found.what), "{schedule}");
        assert!(!again.trace.is_empty());
    }
    assert_eq!(unmissed, Vec::<&str>::new(), "left out, and nothing went wrong");
}

#[test]
fn every_step_has_a_negative_control() {
    for (step, name) in STEPS {
        let has_control = CONTROLS.iter().any(|(known, _, _)| known == step);
        assert_ne!(has_control, WITHOUT_CONTROL.contains(step), "{name}: a control, or the reason why not");
    }
}
