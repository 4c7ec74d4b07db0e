//! A holder may die at any moment: whoever waits gets in within one ttl and a second.
//!
//! Needs strace (and root, or the right to trace) for the exact moments.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::harness::{
    Call, Moments, Run, Running, Sandbox, age, blank_ages_ms, calls, eventually, plant, planted, process, record,
    send_to_group, shipped, slots,
};

const TTL_MS: u64 = 1_000;
/// One ttl and a second.
const PATIENCE: Duration = Duration::from_millis(TTL_MS + 1_000);
/// Sandboxes at a time: they sleep, mostly.
const LANES: usize = 12;

/// A holder of the shipped program whose command ends at once, or only when it is killed.
fn holder<'s>(sandbox: &'s Sandbox, ends: bool) -> Run<'s> {
    let run = sandbox.shipped().args(["--ttl", "1s"]).lock().own_group();
    if ends { run.args(["--", "true"]) } else { run.args(["--", "sleep", "1000"]) }
}

/// After a death: a contender that starts now gets in, in time. Returns how long it took.
fn assert_the_next_gets_in(sandbox: &Sandbox, what: &str) -> Duration {
    let lock = sandbox.lock();
    if lock.exists() && record(&lock).is_none() {
        // A blank lock's ttl is not in a record but a fixed minute, of which a second is left here.
        age(&lock, blank_ages_ms().0 + 9_000);
    }
    let begun = Instant::now();
    let next = sandbox.shipped().args(["--ttl", "1s", "-w", "20s"]).lock().args(["--", "true"]).run();
    let took = next.ended - begun;
    assert_eq!(next.code(), Some(0), "{what}: {next}");
    assert!(took < PATIENCE + slack(sandbox, took), "{what}: only after {took:?}; {:?}", sandbox.names());
    let left = sandbox.names();
    let slot_count = slots(&lock).len();
    assert!(!lock.exists() && left.len() == slot_count, "{what}: left behind: {left:?}");
    took
}

/// What a machine that is busy with other things adds: a few times what an uncontended hold takes on it
/// just now. Nothing on one that is not.
fn slack(sandbox: &Sandbox, took: Duration) -> Duration {
    if took < PATIENCE {
        return Duration::ZERO;
    }
    let uncontended = || sandbox.shipped().arg("other.lock").args(["--", "true"]).run().took;
    let slowest = (0..5).map(|_| uncontended()).max().unwrap_or_default();
    println!("{took:?}; an uncontended hold takes {slowest:?} just now");
    slowest * 5
}

/// Runs `job` for each of `items`, several at a time.
fn in_lanes<T: Send>(items: Vec<T>, job: impl Fn(T) + Sync) {
    let items = Mutex::new(items.into_iter());
    let next = || items.lock().expect("the items").next();
    std::thread::scope(|scope| {
        for _ in 0..LANES {
            scope.spawn(|| {
                while let Some(item) = next() {
                    job(item);
                }
            });
        }
    });
}

#[test]
fn a_holder_killed_at_any_of_240_random_moments_lets_the_next_in_within_its_ttl() {
    shipped();
    let mut moments = Moments::new("random deaths");
    // Most of a short command's life: from its start to well after its end.
    let deaths: Vec<_> = (0..240).map(|at| (at, moments.within(Duration::from_millis(12)))).collect();
    let outcomes = Mutex::new(BTreeMap::<&str, usize>::new());
    in_lanes(deaths, |(at, moment)| {
        let sandbox = if at % 2 == 0 { Sandbox::new() } else { Sandbox::in_memory() };
        let ends = at % 3 != 0;
        let running = holder(&sandbox, ends).start();
        // This is the random moment itself, not a wait for anything.
        std::thread::sleep(moment);
        send_to_group(running.pid(), Signal::SIGKILL);
        let outcome = if running.wait().signal() == Some(9) { "killed" } else { "ended before" };
        let found = match (sandbox.lock().exists(), slots(&sandbox.lock()).len()) {
            (false, 0) => "nothing",
            (true, 0) => "a lock",
            (false, _) => "a slot",
            (true, _) => "both",
        };
        {
            let mut outcomes = outcomes.lock().expect("outcomes");
            *outcomes.entry(outcome).or_default() += 1;
            *outcomes.entry(found).or_default() += 1;
        }
        assert_the_next_gets_in(&sandbox, &format!("killed after {moment:?}, a command that ends: {ends}"));
    });
    let outcomes = outcomes.into_inner().expect("outcomes");
    println!("{outcomes:?}");
    // The power of the test: holders really died, and really with the lock.
    assert!(outcomes.get("killed").is_some_and(|count| *count >= 60), "{outcomes:?}");
    assert!(outcomes.get("a lock").is_some_and(|count| *count >= 30), "{outcomes:?}");
}

/// What a holder finds when it comes.
#[derive(Clone, Copy, Debug)]
enum Before {
    Nothing,
    /// A dead owner's lock, which it must evict first.
    Stale,
}

fn prepare(sandbox: &Sandbox, before: Before) {
    if let Before::Stale = before {
        plant(&sandbox.lock(), &planted(TTL_MS), TTL_MS + 60_000);
    }
}

const FILE_CALLS: &str = "trace=%file,%desc";

/// The file-system calls of a whole hold, start-up left out.
fn calls_of_a_hold(before: Before) -> Vec<Call> {
    let sandbox = Sandbox::new();
    prepare(&sandbox, before);
    let log = sandbox.io_path("strace");
    holder(&sandbox, true).traced(&log, &["-e", FILE_CALLS]).run().exited(0);
    let all = calls(&log);
    let base = sandbox.work();
    let first = all.iter().position(|call| mentions(call, &base)).expect("the directory of the lock is opened");
    all[first..].to_vec()
}

fn mentions(call: &Call, dir: &Path) -> bool {
    call.line.contains(&*dir.to_string_lossy())
}

fn a_holder_killed_at_each_call(before: Before) {
    shipped();
    let calls = calls_of_a_hold(before);
    println!("{before:?}: {} calls: {:?}", calls.len(), calls.iter().map(|call| &*call.name).collect::<Vec<_>>());
    assert!(calls.iter().any(|call| call.name == "flock"), "a guard is taken");
    assert!(calls.iter().any(|call| call.name.starts_with("rename")), "it is released");
    let died = Mutex::new(0_usize);
    let count = calls.len();
    in_lanes(calls, |call| {
        let sandbox = Sandbox::new();
        prepare(&sandbox, before);
        let log = sandbox.io_path("strace");
        // The signal comes before the call is made: each pair of neighbours shows the moment between.
        let inject = format!("inject={}:signal=KILL:when={}", call.name, call.nth);
        let options = ["-e", &format!("trace={}", call.name), "-e", &inject];
        let running = holder(&sandbox, true).traced(&log, &options).start();
        let finished = running.wait();
        if finished.signal() == Some(9) {
            *died.lock().expect("a count") += 1;
        }
        assert_the_next_gets_in(&sandbox, &format!("{before:?}: killed at {} #{}: {}", call.name, call.nth, call.line));
    });
    let died = died.into_inner().expect("a count");
    // A few calls of one name vary in number from run to run (clean-up of a signalfd, a look at /proc).
    assert!(died + 3 >= count, "only {died} of {count} died");
}

#[test]
fn a_holder_killed_at_each_of_its_file_calls_lets_the_next_in_within_its_ttl() {
    a_holder_killed_at_each_call(Before::Nothing);
}

#[test]
fn an_evictor_killed_at_each_of_its_file_calls_lets_the_next_in_within_its_ttl() {
    a_holder_killed_at_each_call(Before::Stale);
}

#[test]
fn a_holder_whose_file_calls_fail_one_by_one_ends_with_a_word_and_locks_nobody_out() {
    shipped();
    let all = calls_of_a_hold(Before::Nothing);
    // Calls that the kernel never interrupts need not survive it.
    let interrupted = |call: &Call| !matches!(&*call.name, "signalfd4" | "fcntl" | "dup" | "close");
    let cases = all
        .iter()
        .flat_map(|call| ["EIO", "ENOSPC", "EINTR"].map(|errno| (call.clone(), errno)))
        .filter(|(call, errno)| *errno != "EINTR" || interrupted(call))
        .collect();
    in_lanes(cases, |(call, errno)| {
        let sandbox = Sandbox::new();
        let inject = format!("inject={}:error={errno}:when={}", call.name, call.nth);
        let options = ["-e", &format!("trace={}", call.name), "-e", &inject];
        let finished = holder(&sandbox, true).traced(&sandbox.io_path("strace"), &options).run();
        let what = format!("{errno} from {} #{}: {}", call.name, call.nth, call.line);
        match finished.code() {
            Some(0) => {}
            Some(71 | 73 | 74 | 75 | 76 | 77 | 126) if errno != "EINTR" => {
                assert!(!finished.stderr.is_empty(), "{what}: {finished}");
            }
            _ => panic!("{what}: {finished}"),
        }
        assert_the_next_gets_in(&sandbox, &what);
    });
}

/// Reads a counter, dawdles, writes it back, and leaves a trace of whoever was inside at the same time.
const WITNESS: &str = "mkdir inside || touch overlap; i=0; while [ $i -lt 2000 ]; do i=$((i+1)); done; rmdir inside";

/// A holder delayed for more than its ttl before one of its calls, and two rivals that come meanwhile;
/// says whether two of them were inside at once.
fn overlaps(before: Before, call: &Call, leave_out: Option<&str>) -> bool {
    let sandbox = Sandbox::new();
    prepare(&sandbox, before);
    let start = |delayed: bool| {
        let run = match leave_out {
            Some(steps) => sandbox.withlock().leave_out(steps),
            None => sandbox.shipped(),
        };
        let run = run.args(["-q", "--ttl", "1s", "--on-lost", "warn"]).lock().sh(WITNESS);
        if !delayed {
            return run.start();
        }
        let inject = format!("inject={}:delay_enter=1300000:when={}", call.name, call.nth);
        run.traced(&sandbox.io_path("strace"), &["-e", &format!("trace={}", call.name), "-e", &inject]).start()
    };
    let delayed = start(true);
    // As soon as it is held up (or has ended already): strace stops whom it delays.
    eventually("the holder is held up", || match process(delayed.pid()) {
        Some(process) if process.state == 't' || process.state == 'Z' => Ok(()),
        other => Err(other),
    });
    for finished in [start(false), start(false), delayed].map(Running::wait) {
        // Nobody is ended, nobody is turned away; only what left steps out may notice that it was robbed.
        assert!(leave_out.is_some() || finished.code() == Some(0), "{before:?}: {call:?}: {finished}");
    }
    sandbox.path("overlap").exists()
}

#[test]
fn a_holder_delayed_beyond_its_ttl_at_each_of_its_file_calls_is_never_inside_with_a_rival() {
    shipped();
    for before in [Before::Nothing, Before::Stale] {
        in_lanes(calls_of_a_hold(before), |call| assert!(!overlaps(before, &call, None), "{before:?}: {call:?}"));
    }
}

#[test]
fn a_holder_delayed_at_each_of_its_file_calls_is_inside_with_a_rival_when_the_create_is_not_exclusive() {
    // The negative control of the test above.
    let count = Mutex::new(0);
    in_lanes(calls_of_a_hold(Before::Nothing), |call| {
        *count.lock().expect("a count") +=
            usize::from(overlaps(Before::Nothing, &call, Some("exclusive,guard,grant-check")));
    });
    assert!(count.into_inner().expect("a count") > 0);
}

#[test]
fn a_waiter_that_was_already_asleep_gets_in_within_the_ttl_of_a_killed_holder() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = sandbox.shipped().args(["--ttl", "1s"]).lock().own_group().sh(gate.script()).start();
    gate.wait_inside();
    let waiter = sandbox.shipped().args(["-w", "30s"]).lock().args(["--", "true"]).start();
    waiter.wait_asleep_in_flock();
    let killed = Instant::now();
    send_to_group(holder.pid(), Signal::SIGKILL);
    holder.wait();
    let finished = waiter.wait();
    finished.exited(0);
    let took = finished.ended - killed;
    assert!(took < PATIENCE + slack(&sandbox, took), "{took:?}");
}
