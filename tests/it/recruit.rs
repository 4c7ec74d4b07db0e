//! The process that is to become the command is made while its lock is still being taken. It must not outlive a
//! wrapper that dies in between, nor bring anything along but what the command is to have. Needs strace.

use std::path::Path;

use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::Signal;

use crate::harness::{Finished, Run, Sandbox, children, eventually, never_during, process, send};

/// The one child of a wrapper that writes its record: not the command yet.
fn recruit_of(wrapper: i32, lock: &Path) -> i32 {
    // The tracer's first process, which ends, may be another child.
    let living = || children(wrapper).into_iter().filter(|child| child.state != 'Z').collect::<Vec<_>>();
    eventually("the process that is to become the command", || match (lock.exists(), &living()[..]) {
        (true, [only]) => Ok(only.pid),
        (_, others) => Err(others.len()),
    })
}

/// A wrapper that is stopped once its record is written, and killed; then its recruit's pid.
fn killed_before_its_record<'s>(sandbox: &'s Sandbox, prepare: impl FnOnce(Run<'s>) -> Run<'s>) -> i32 {
    let run = prepare(sandbox.withlock().lock().args(["--", "touch", "ran"]));
    let stop = ["-e", "trace=write", "-e", "inject=write:signal=SIGSTOP:when=1"];
    let wrapper = run.traced(&sandbox.io_path("strace"), &stop).start();
    let recruit = recruit_of(wrapper.pid(), &sandbox.lock());
    // The recruit is asleep by now or not: it must hear in both.
    wrapper.send(Signal::SIGKILL);
    assert_eq!(wrapper.wait().signal(), Some(9));
    recruit
}

fn guard_is_free(sandbox: &Sandbox) -> bool {
    let file = std::fs::File::open(sandbox.lock()).expect("the lock file");
    Flock::lock(file, FlockArg::LockExclusiveNonblock).is_ok()
}

fn is_there(pid: i32) -> bool {
    process(pid).is_some_and(|process| process.state != 'Z')
}

#[test]
fn a_wrapper_killed_before_its_command_began_leaves_no_process_and_no_guard() {
    let sandbox = Sandbox::new();
    let recruit = killed_before_its_record(&sandbox, |run| run);
    eventually("the recruit is gone", || if is_there(recruit) { Err(recruit) } else { Ok(()) });
    assert!(guard_is_free(&sandbox));
    assert!(!sandbox.path("ran").exists());
    sandbox.wait_until_nothing_runs();
}

#[test]
fn without_the_recall_it_stays_for_ever_and_keeps_the_guard() {
    let sandbox = Sandbox::new();
    let recruit = killed_before_its_record(&sandbox, |run| run.leave_out("recall"));
    never_during("it goes", std::time::Duration::from_millis(300), || if is_there(recruit) { Ok(()) } else { Err(()) });
    assert!(!guard_is_free(&sandbox));
    send(recruit, Signal::SIGKILL);
    sandbox.wait_until_nothing_runs();
}

#[test]
fn a_grant_that_fails_after_it_was_made_leaves_no_process_and_no_lock() {
    let sandbox = Sandbox::new();
    let log = sandbox.io_path("strace");
    let inject = ["-e", "trace=write", "-e", "inject=write:error=ENOSPC"];
    let finished = sandbox.withlock().lock().args(["--", "touch", "ran"]).traced(&log, &inject).run();
    // Every write fails: that of the line about it as well.
    finished.exited(74);
    assert_eq!(sandbox.names(), [""; 0]);
    sandbox.wait_until_nothing_runs();
}

#[test]
fn a_command_that_had_to_wait_has_the_same_descriptors_as_one_that_had_not() {
    let sandbox = Sandbox::new();
    let listing = ["--", "sh", "-c", "ls /proc/$$/fd"];
    let at_once = sandbox.shipped().lock().args(listing).run();
    let mut gate = sandbox.gate();
    let holder = sandbox.shipped().lock().sh(gate.script()).start();
    gate.wait_inside();
    let waiter = sandbox.shipped().lock().args(listing).start();
    waiter.wait_asleep_in_flock();
    gate.open();
    holder.wait().exited(0);
    let waited = waiter.wait();
    let numbers =
        |finished: &Finished| finished.exited(0).out().split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(numbers(&waited), numbers(&at_once));
    assert!(numbers(&waited).contains(&"60".to_owned()), "the guard's");
}
