//! Mutual exclusion itself: a counter that is read and written back without any care loses no update
//! under the lock, and loses some as soon as exclusive creation is left out.

use crate::harness::{Run, Sandbox};

/// Reads the counter, dawdles where a rival would come between, writes it back. Shell built-ins only, so
/// that a hold is short and the lock changes hands often.
const INCREMENT: &str = "read n <counter; i=0; while [ $i -lt 50 ]; do i=$((i+1)); done; echo $((n+1)) >counter";

/// Runs `processes` loops of `rounds` increments each at once; returns what the counter says.
fn count<'s>(sandbox: &'s Sandbox, processes: usize, rounds: usize, program: &std::path::Path, steps: &str) -> usize {
    std::fs::write(sandbox.path("counter"), "0\n").expect("a counter");
    let body = format!(
        "i=0; while [ $i -lt {rounds} ]; do i=$((i+1)); \"$PROGRAM\" --on-lost warn -q \"$L\" -- /bin/sh -c '{INCREMENT}' || exit; done"
    );
    let start = |_| -> Run<'s> { sandbox.sh(&body).env("PROGRAM", program).env("WITHLOCK_LEAVE_OUT", steps) };
    let loops: Vec<_> = (0..processes).map(start).map(Run::start).collect();
    for finished in loops.into_iter().map(crate::harness::Running::wait) {
        assert!(!steps.is_empty() || finished.code() == Some(0), "{finished}");
    }
    std::fs::read_to_string(sandbox.path("counter")).expect("a counter").trim().parse().unwrap_or(0)
}

#[test]
fn an_unprotected_counter_loses_no_update_under_the_lock_on_disk_and_in_memory() {
    for sandbox in [Sandbox::new(), Sandbox::in_memory()] {
        assert_eq!(count(&sandbox, 16, 25, crate::harness::shipped(), ""), 400);
        assert_eq!(sandbox.names(), ["counter"]);
    }
}

#[test]
fn the_same_counter_loses_updates_when_the_create_is_not_exclusive() {
    let sandbox = Sandbox::in_memory();
    let counted = count(&sandbox, 16, 10, env!("CARGO_BIN_EXE_withlock").as_ref(), "exclusive,guard");
    assert!(counted < 160, "no update was lost: the test has no power");
}
