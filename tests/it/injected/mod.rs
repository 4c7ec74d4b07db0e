//! Death, delay and error at every system call of the shipped program.
//!
//! For each role the system calls of a run without faults are recorded first, so that new ones are covered
//! by themselves. Then the role is played again for each of them, with a fault injected there: SIGKILL,
//! SIGSTOP for longer than the lease, or one of the errors that the call can end with. What must be true
//! afterwards is in `trial`: nobody was inside with anybody else, the next one gets in within a ttl and a
//! second, the exit code and the one line are right, nothing of others' was touched, and what is left
//! behind is a quarantine that `reclaim` removes.
//!
//! Of the errors and stops a sample is taken; `WITHLOCK_SOAK=SECONDS` takes them all, however long that is.
//!
//! Needs strace, and root or the right to trace.

mod fault;
mod lookout;
mod role;
mod trial;

use std::collections::BTreeMap;
use std::sync::Mutex;

use crate::harness::{Call, in_lanes, shipped};

use fault::{Fault, errors_of};
use role::{ROLES, Role, role};
use trial::{Circumstances, Clean, attempt, clean_run};

fn is_soak() -> bool {
    std::env::var_os("WITHLOCK_SOAK").is_some()
}

/// Sandboxes at a time: they sleep, mostly.
const LANES: usize = 32;

/// Whether a call is a step of the protocol.
fn is_step(call: &Call) -> bool {
    let is_named = ["a.lock", "\"lock\"", "claim-", "floor"].iter().any(|name| call.line.contains(name));
    let on_a_file = ["flock", "pread64", "utimensat", "getdents64", "mkdirat"].contains(&&*call.name);
    is_named || on_a_file || (call.name == "write" && call.line.contains("withlock"))
}

/// Every `n`th of what is no step of the protocol, and every `m`th of what is; all of it in a soak.
fn sample<T>(all: impl Iterator<Item = (Call, T)>, n: usize, m: usize) -> Vec<(Call, T)> {
    let is_chosen = |at: usize, call: &Call| is_soak() || at.is_multiple_of(if is_step(call) { m } else { n });
    all.enumerate().filter(|(at, (call, _))| is_chosen(*at, call)).map(|(_, case)| case).collect()
}

/// Lets each of `faults` happen to each of `roles`, and tells what went wrong.
fn try_all(
    roles: &[&Role],
    circumstances: Circumstances,
    faults: impl Fn(&Clean) -> Vec<(Call, Fault)>,
) -> Vec<String> {
    shipped();
    let played: Vec<(&Role, Clean)> = roles.iter().map(|role| (*role, clean_run(role, circumstances))).collect();
    let cases = |(role, clean)| faults(clean).into_iter().map(move |(call, fault)| (role, clean, call, fault));
    let todo: Vec<_> = played.iter().map(|(role, clean)| (*role, clean)).flat_map(cases).collect();
    let (happened, wrong) = (Mutex::new(BTreeMap::<&str, [usize; 2]>::new()), Mutex::new(Vec::new()));
    in_lanes(LANES, todo.into_iter().enumerate().collect(), |(at, (role, clean, call, fault))| {
        let came = attempt(role, clean, &call, fault, circumstances, at % 2 == 0);
        {
            let mut happened = happened.lock().expect("the counts");
            let [count, reached] = happened.entry(role.name).or_default();
            (*count, *reached) = (*count + 1, *reached + usize::from(came.reached));
        }
        if !came.violations.is_empty() {
            let (what, Call { nth, line, .. }) = (came.violations.join("\n  "), &call);
            wrong.lock().expect("a list").push(format!("{}, {fault:?} at #{nth} {line}:\n  {what}", role.name));
        }
    });
    for (role, clean) in &played {
        let [count, reached] = happened.lock().expect("the counts").get(role.name).copied().unwrap_or_default();
        println!("{}: {} calls, {count} faults, {reached} of them happened", role.name, clean.calls.len());
        // How many calls of one name there are varies where something is waited for, on a busy machine more.
        assert!(reached * 2 >= count, "{}: only {reached} of {count} faults happened", role.name);
    }
    wrong.into_inner().expect("a list")
}

/// The same for all roles, and nothing may go wrong.
#[track_caller]
fn assert_that_all_bear(faults: impl Fn(&Clean) -> Vec<(Call, Fault)>) {
    let wrong = try_all(&ROLES.iter().collect::<Vec<_>>(), Circumstances::default(), faults);
    assert!(wrong.is_empty(), "{} went wrong:\n{}", wrong.len(), wrong.join("\n"));
}

fn each(clean: &Clean, fault: Fault) -> impl Iterator<Item = (Call, Fault)> {
    clean.calls.iter().filter(|call| call.name != "exit_group").map(move |call| (call.clone(), fault))
}

#[test]
fn whoever_is_killed_at_a_system_call_locks_nobody_out() {
    assert_that_all_bear(|clean| sample(each(clean, Fault::Kill), 8, 2));
}

#[test]
fn whoever_is_stopped_for_longer_than_its_lease_is_never_inside_with_a_rival() {
    assert_that_all_bear(|clean| sample(each(clean, Fault::Stop).filter(|(call, _)| is_step(call)), 1, 5));
}

#[test]
fn whoever_meets_an_error_at_a_system_call_bears_it_or_ends_with_a_word() {
    // One error for each call, and for the next call of that name another.
    let is_chosen = |call: &Call, at: usize| is_soak() || at == call.nth % errors_of(call).len();
    assert_that_all_bear(|clean| {
        let errors = |call: &Call| errors_of(call).iter().enumerate().map(|(at, errno)| (at, Fault::Error(errno)));
        let all = clean.calls.iter().flat_map(|call| errors(call).map(move |(at, fault)| (call.clone(), at, fault)));
        all.filter(|(call, at, _)| is_chosen(call, *at)).map(|(call, _, fault)| (call, fault)).collect()
    });
}

#[test]
fn where_nobody_sees_a_guard_the_dead_lock_nobody_out_for_longer_than_the_reclaim_age() {
    let circumstances = Circumstances { no_guards: true, ..Circumstances::default() };
    // At one call only one thing can be injected.
    let is_killed = |call: &Call| is_step(call) && call.name != "flock";
    let kills = |clean: &Clean| sample(each(clean, Fault::Kill).filter(|(call, _)| is_killed(call)), 1, 2);
    assert_eq!(try_all(&["holder", "evictor", "breaker"].map(role), circumstances, kills), [""; 0]);
}

#[test]
fn whoever_is_stopped_is_inside_with_a_rival_when_a_step_is_left_out() {
    // The negative control of the stops: the same trials find what is wrong.
    let stops = |clean: &Clean| each(clean, Fault::Stop).filter(|(call, _)| is_step(call)).collect();
    for steps in ["exclusive,guard,grant-check", "guard,grant-check"] {
        // Which of the rivals comes first is chance, and so is whether that one is still inside.
        let two_were_inside = (0..5).any(|_| {
            let wrong = try_all(&[role("holder")], Circumstances { leave_out: Some(steps), no_guards: false }, stops);
            wrong.iter().any(|what| what.contains("two were inside"))
        });
        assert!(two_were_inside, "without {steps} nobody was found inside with a rival");
    }
    // And what is found is what was left out: with the guard alone missing the look at the grant suffices.
    let wrong = try_all(&[role("holder")], Circumstances { leave_out: Some("guard"), no_guards: false }, |clean| {
        let before = clean.calls.iter().position(|call| call.name == "clone").expect("the grant counts by then");
        each(clean, Fault::Stop).take(before).filter(|(call, _)| is_step(call)).collect()
    });
    assert_eq!(wrong, [""; 0]);
}
