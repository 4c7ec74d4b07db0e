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
mod role;
mod trial;

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::harness::{Call, in_lanes, shipped};

use fault::{Fault, errors_of};
use role::{ROLES, role};
use trial::{Circumstances, Clean, attempt, clean_run};

fn is_soak() -> bool {
    std::env::var_os("WITHLOCK_SOAK").is_some()
}

/// Whether a call is a step of the protocol.
fn is_step(call: &Call) -> bool {
    let is_named = ["a.lock", "\"lock\"", "claim-", "floor"].iter().any(|name| call.line.contains(name));
    let on_a_file = ["flock", "pread64", "utimensat", "getdents64", "mkdirat"].contains(&&*call.name);
    is_named || on_a_file || (call.name == "write" && call.line.contains("{\\\""))
}

/// Lets each of `faults` happen, and tells how often that went wrong and how.
fn try_all(name: &str, circumstances: Circumstances, faults: impl Fn(&Clean) -> Vec<(Call, Fault)>) -> Vec<String> {
    shipped();
    let role = role(name);
    let clean = clean_run(role, circumstances);
    let todo = faults(&clean);
    let (count, reached) = (todo.len(), AtomicUsize::new(0));
    let wrong = Mutex::new(Vec::new());
    let numbered: Vec<_> = todo.into_iter().enumerate().collect();
    in_lanes(numbered, |(at, (call, fault))| {
        let came = attempt(role, &clean, &call, fault, circumstances, at % 2 == 0);
        reached.fetch_add(usize::from(came.reached), Ordering::Relaxed);
        if !came.violations.is_empty() {
            let what = format!("{name}, {fault:?} at #{} {}:\n  {}", call.nth, call.line, came.violations.join("\n  "));
            wrong.lock().expect("a list").push(what);
        }
    });
    let reached = reached.into_inner();
    println!("{name}: {} calls, {count} faults, {reached} of them happened", clean.calls.len());
    // The number of calls of one name varies from run to run where something is waited for.
    assert!(reached * 10 >= count * 9, "only {reached} of {count} faults happened");
    wrong.into_inner().expect("a list")
}

fn kills(clean: &Clean) -> Vec<(Call, Fault)> {
    clean.calls.iter().filter(|call| call.name != "exit_group").map(|call| (call.clone(), Fault::Kill)).collect()
}

fn errors(clean: &Clean) -> Vec<(Call, Fault)> {
    let with_errors = clean.calls.iter().enumerate();
    let all =
        with_errors.flat_map(|(at, call)| errors_of(call).iter().enumerate().map(move |(n, e)| (at, call, n, *e)));
    // Two errors for each call, others for the next call of its name.
    let sampled = all.filter(|(_, call, n, _)| is_soak() || (n + call.nth) % errors_of(call).len() < 2);
    sampled.map(|(_, call, _, errno)| (call.clone(), Fault::Error(errno))).collect()
}

fn stops(clean: &Clean) -> Vec<(Call, Fault)> {
    clean.calls.iter().filter(|call| is_step(call)).map(|call| (call.clone(), Fault::Stop)).collect()
}

#[track_caller]
fn assert_nothing_went_wrong(wrong: &[String]) {
    assert!(wrong.is_empty(), "{} went wrong:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn whoever_is_killed_at_a_system_call_locks_nobody_out() {
    let wrong: Vec<String> =
        ROLES.iter().flat_map(|role| try_all(role.name, Circumstances::default(), kills)).collect();
    assert_nothing_went_wrong(&wrong);
}

#[test]
fn whoever_is_stopped_for_longer_than_its_lease_is_never_inside_with_a_rival() {
    let wrong: Vec<String> =
        ROLES.iter().flat_map(|role| try_all(role.name, Circumstances::default(), stops)).collect();
    assert_nothing_went_wrong(&wrong);
}

#[test]
fn whoever_meets_an_error_at_a_system_call_bears_it_or_ends_with_a_word() {
    let wrong: Vec<String> =
        ROLES.iter().flat_map(|role| try_all(role.name, Circumstances::default(), errors)).collect();
    assert_nothing_went_wrong(&wrong);
}
