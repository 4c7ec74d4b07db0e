//! `withlock etcd://… -- COMMAND`: what it does at the service, and what it says when that is not there.
//!
//! Needs etcd and etcdctl.

use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::harness::{Cluster, Moments, Proxy, Sandbox, eventually, never_during};

/// No command: one that ends at once.
const TRUE: [&str; 2] = ["--", "true"];

#[test]
fn the_key_lives_under_a_lease_while_the_command_runs_and_both_are_gone_afterwards() {
    let (cluster, sandbox) = (Cluster::start(1), Sandbox::new());
    let mut gate = sandbox.gate();
    let lock = cluster.lock("jobs/a b");
    let holder = sandbox.withlock().args(["--label", "night", &lock]).sh(gate.script()).start();
    gate.wait_inside();
    assert_eq!((cluster.keys("jobs/"), cluster.leases()), (vec!["jobs/a b".to_owned()], 1));
    let record: serde_json::Value =
        serde_json::from_slice(&cluster.ctl(&["get", "--print-value-only", "jobs/a b"]).stdout).expect("a record");
    assert_eq!(
        (&record["withlock"], &record["pid"], &record["ttl_ms"], &record["guard"], &record["label"]),
        (&1.into(), &holder.pid().into(), &60_000.into(), &"lease".into(), &"night".into())
    );
    gate.open();
    holder.wait().exited(0).silent();
    assert_eq!((cluster.keys(""), cluster.leases()), (Vec::new(), 0));
}

#[test]
fn the_command_is_told_its_lock_and_a_fencing_token_that_only_grows() {
    let (cluster, sandbox) = (Cluster::start(1), Sandbox::new());
    let lock = cluster.lock("a");
    let mut last = 0;
    for _ in 0..3 {
        let told = "echo \"$WITHLOCK_LOCK $WITHLOCK_MODE $WITHLOCK_FENCE\"; test \"$WITHLOCK_HELD\" = $WITHLOCK_NONCE";
        let finished = sandbox.withlock().arg(&lock).sh(told).run();
        finished.exited(0).silent();
        let out = finished.out();
        let fence =
            out.trim().strip_prefix(&format!("{lock} locked ")).expect("lock and mode").parse().expect("a number");
        assert!(last < fence, "{last} < {fence}");
        last = fence;
    }
}

#[test]
fn a_held_lock_is_75_at_once_or_after_the_wait_and_nothing_of_the_contender_is_left() {
    let (cluster, sandbox) = (Cluster::start(1), Sandbox::new());
    let mut gate = sandbox.gate();
    let lock = cluster.lock("a");
    let holder = sandbox.withlock().arg(&lock).sh(gate.script()).start();
    gate.wait_inside();
    let pid = holder.pid();
    sandbox.withlock().arg("-n").arg(&lock).args(TRUE).run().exited(75).one_line(&[
        &format!("{lock}: held by pid {pid} on "),
        "expires in ",
        " unless renewed",
        "; next: withlock inspect ",
    ]);
    let waited = sandbox.withlock().args(["-q", "-w", "300ms", &lock, "--", "true"]).run();
    waited.exited(75).one_line(&[": still held after "]);
    assert!(waited.took >= Duration::from_millis(300), "{:?}", waited.took);
    assert_eq!(cluster.leases(), 1, "only the holder's");
    gate.open();
    holder.wait().exited(0);
}

#[test]
fn a_waiter_is_woken_by_the_release_and_by_the_end_of_a_dead_holders_lease() {
    let (cluster, sandbox) = (Cluster::start(1), Sandbox::new());
    let mut gate = sandbox.gate();
    let lock = cluster.lock("a");
    let hold = || sandbox.withlock().args(["--ttl", "2s", &lock]).sh(gate.script());
    let holder = hold().start();
    let mut inside = sandbox.gate();
    gate.wait_inside();
    let waiter = sandbox.withlock().args(["-q", &lock]).sh(inside.script()).start();
    never_during("two inside", Duration::from_millis(300), || match waiter.stderr_so_far() {
        said if said.is_empty() => Ok(()),
        said => Err(said),
    });
    gate.open();
    holder.wait().exited(0);
    inside.wait_inside();
    inside.open();
    waiter.wait().exited(0).silent();

    // A wrapper that dies leaves its key; the lease ends it, and the server says so.
    let holder = sandbox.withlock().args(["--ttl", "2s", &lock]).sh("exec sleep 1000").start();
    eventually("the lock is held", || if cluster.keys("a").is_empty() { Err(()) } else { Ok(()) });
    let waiter = sandbox.withlock().args(["-q", &lock]).args(TRUE).start();
    let died = Instant::now();
    holder.send(Signal::SIGKILL);
    holder.wait();
    let finished = waiter.wait();
    finished.exited(0);
    assert!(finished.ended - died < Duration::from_secs(5), "{:?}", finished.ended - died);
}

#[test]
fn a_lock_is_kept_over_many_leases() {
    let (cluster, sandbox) = (Cluster::start(1), Sandbox::new());
    let lock = cluster.lock("a");
    // Three leases' time, with a witness who tries all along.
    let holder = sandbox.withlock().args(["--ttl", "2s", &lock, "--", "sleep", "6"]).start();
    eventually("the lock is held", || if cluster.keys("a").is_empty() { Err(()) } else { Ok(()) });
    let witness = sandbox.withlock().args(["-q", "-w", "30s", &lock]).args(TRUE).run();
    let holder = holder.wait();
    holder.exited(0).silent();
    witness.exited(0);
    assert!(witness.ended > holder.ended - Duration::from_millis(100), "the witness got in before the end");
}

#[test]
fn a_key_that_is_deleted_or_overwritten_while_it_is_held_is_a_loss_within_two_seconds() {
    let (cluster, sandbox) = (Cluster::start(1), Sandbox::new());
    for (key, act, says) in [
        ("gone", &["del", "gone"][..], "the lock was lost: its key is gone; ending the command"),
        ("other", &["put", "other", "x"][..], "the lock was lost: its record was overwritten; ending the command"),
    ] {
        let mut gate = sandbox.gate();
        let lock = cluster.lock(key);
        let holder = sandbox.withlock().arg(&lock).sh(gate.script()).start();
        gate.wait_inside();
        cluster.ctl(act);
        let acted = Instant::now();
        let finished = holder.wait();
        finished.exited(76).one_line(&[&format!("{lock}: {says}")]);
        assert!(finished.ended - acted < Duration::from_secs(2), "{:?}", finished.ended - acted);
    }
}

#[test]
fn a_revoked_lease_is_a_loss_and_the_command_may_go_on_if_asked() {
    let (cluster, sandbox) = (Cluster::start(1), Sandbox::new());
    let mut gate = sandbox.gate();
    let lock = cluster.lock("a");
    let holder = sandbox.withlock().args(["--on-lost", "warn", &lock]).sh(gate.script()).start();
    gate.wait_inside();
    let lease = cluster.ctl(&["lease", "list"]).out().lines().nth(1).expect("a lease").to_owned();
    cluster.ctl(&["lease", "revoke", &lease]);
    holder.wait_for_stderr("the lock was lost: its key is gone; the command goes on");
    gate.open();
    holder.wait().exited(76);
}

#[test]
fn what_is_no_lock_is_refused_and_left_alone() {
    let (cluster, sandbox) = (Cluster::start(1), Sandbox::new());
    cluster.ctl(&["put", "config", "{\"a\":1}"]);
    sandbox
        .withlock()
        .arg(cluster.lock("config"))
        .args(TRUE)
        .run()
        .exited(73)
        .one_line(&["/config: cannot be locked: not a withlock lock"]);
    assert_eq!(cluster.ctl(&["get", "--print-value-only", "config"]).out(), "{\"a\":1}\n");
    cluster.ctl(&["put", "newer", "{\"withlock\":2}"]);
    let lock = cluster.lock("newer");
    let newer = "a lock of a newer withlock (record version 2; this one reads 1)";
    let refused = sandbox.withlock().arg(&lock).args(TRUE).run();
    assert_eq!(refused.exited(73).err(), format!("withlock: {lock}: cannot be locked: {newer}\n"));
    let nonce = "0123456789abcdef0123456789abcdef";
    let lost = sandbox.withlock().args(["renew", "--nonce", nonce, &lock]).run();
    let line = format!("withlock: {lock}: not held with nonce {nonce}: {newer} is there instead\n");
    assert_eq!(lost.exited(76).err(), line);
    assert_eq!(cluster.leases(), 0);
}

#[test]
fn options_without_meaning_are_refused_before_anything_is_asked() {
    let sandbox = Sandbox::new();
    for options in [&["--close"][..], &["--evict-dead"], &["--mode", "600"], &["-p"], &["--fence", "x"]] {
        sandbox.withlock().args(options).arg("etcd://127.0.0.1:1/a").args(TRUE).run().exited(64).one_line(&["--"]);
    }
    for lock in ["etcd://127.0.0.1:1", "etcd://127.0.0.1:1/", "etcd://u:p@127.0.0.1/a", "etcd:///a"] {
        sandbox.withlock().arg(lock).args(TRUE).run().exited(64);
    }
    sandbox.withlock().args(["--etcd-cacert", "x"]).lock().args(TRUE).run().exited(64).one_line(&["belong to a LOCK"]);
    assert!(sandbox.names().is_empty());
}

#[test]
fn an_ancestors_lock_is_told_from_anothers_or_re_entered() {
    let (cluster, sandbox) = (Cluster::start(1), Sandbox::new());
    let lock = cluster.lock("a");
    let nested = format!("\"$WL\" {lock} -- true; echo $?; \"$WL\" --reentrant {lock} -- true; echo $?");
    let finished = sandbox.withlock().arg(&lock).sh(nested).run();
    finished.exited(0).one_line(&["held by an ancestor of this process"]);
    assert_eq!(finished.out(), "78\n0\n");
}

#[test]
fn unreachable_is_69_at_once_with_one_line_that_names_every_endpoint() {
    let sandbox = Sandbox::new();
    let refused = "127.0.0.1:1";
    let finished = sandbox.withlock().arg(format!("etcd://{refused},127.0.0.1:2/a")).args(TRUE).run();
    finished.exited(69).one_line(&[
        "etcd://127.0.0.1:1,127.0.0.1:2/a: cannot be reached: 127.0.0.1:1: Connection refused; 127.0.0.1:2: Connection refused",
    ]);
    assert!(finished.took < Duration::from_secs(2), "{:?}", finished.took);
    let waited = sandbox.withlock().args(["-q", "-w", "1s"]).arg(format!("etcd://{refused}/a")).args(TRUE).run();
    waited.exited(69).one_line(&["127.0.0.1:1: Connection refused"]);
    assert!(waited.took >= Duration::from_secs(1), "{:?}", waited.took);
    // Somebody listens, and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let endpoint = silent.local_addr().expect("an address").to_string();
    let finished = sandbox.withlock().args(["-n", &format!("etcd://{endpoint}/a")]).args(TRUE).run();
    finished.exited(69).one_line(&[&format!("{endpoint}: no answer within 3s")]);
}

#[test]
fn the_next_endpoint_is_asked_where_the_first_refuses_or_says_nothing() {
    let (cluster, sandbox) = (Cluster::start(1), Sandbox::new());
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let dead = silent.local_addr().expect("an address").to_string();
    for first in ["127.0.0.1:1", &dead] {
        let lock = format!("etcd://{first},{}/a", cluster.endpoint(0));
        sandbox.withlock().arg(&lock).args(TRUE).run().exited(0).silent();
    }
    assert_eq!((cluster.keys(""), cluster.leases()), (Vec::new(), 0));
}

#[test]
fn a_cluster_without_a_majority_is_69_and_one_member_less_is_not_noticed() {
    let (mut cluster, sandbox) = (Cluster::start(3), Sandbox::new());
    let lock = cluster.lock("a");
    let leader = cluster.leader();
    cluster.kill(leader);
    // While the others elect a leader nobody can be asked: a short wait bears it.
    sandbox.withlock().args(["-q", "-w", "20s", &lock]).args(TRUE).run().exited(0).silent();
    let other = (leader + 1) % 3;
    cluster.kill(other);
    let finished = sandbox.withlock().args(["-n", &lock]).args(TRUE).run();
    finished.exited(69).one_line(&["cannot be reached", cluster.endpoint(leader), cluster.endpoint(other)]);
    cluster.restart(other);
    cluster.wait_healthy(other);
    sandbox.withlock().args(["-q", "-w", "20s", &lock]).args(TRUE).run().exited(0).silent();
}

#[test]
fn a_success_whose_release_cannot_be_said_is_74_and_a_failure_stays() {
    let (cluster, sandbox) = (Cluster::start(1), Sandbox::new());
    for (status, code) in [(0, 74), (3, 3)] {
        let proxy = Proxy::to(cluster.endpoint(0));
        let mut gate = sandbox.gate();
        let lock = format!("etcd://{}/k{status}", proxy.address());
        let holder = sandbox.withlock().arg(&lock).sh(format!("{}; exit {status}", gate.script())).start();
        gate.wait_inside();
        proxy.cut();
        gate.open();
        holder.wait().exited(code).one_line(&[
            ": cannot be released: ",
            "no answer within",
            "the lock stays and expires within 1m",
        ]);
    }
}

#[test]
fn a_signal_in_a_wait_ends_it_within_100_ms_and_leaves_nothing() {
    let (cluster, sandbox) = (Cluster::start(1), Sandbox::new());
    let mut gate = sandbox.gate();
    let lock = cluster.lock("a");
    let holder = sandbox.withlock().arg(&lock).sh(gate.script()).start();
    gate.wait_inside();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        let waiter = sandbox.withlock().arg(&lock).args(TRUE).start();
        waiter.wait_for_stderr("waiting, held");
        let sent = Instant::now();
        waiter.send(signal);
        let finished = waiter.wait();
        assert_eq!(finished.signal(), Some(signal as i32));
        assert!(finished.ended - sent < Duration::from_millis(100), "{signal}: {:?}", finished.ended - sent);
    }
    gate.open();
    holder.wait().exited(0);
}

#[test]
fn a_signal_while_nobody_answers_ends_it_within_150_ms() {
    let sandbox = Sandbox::new();
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let lock = format!("etcd://{}/a", silent.local_addr().expect("an address"));
    let contender = sandbox.withlock().arg(&lock).args(TRUE).start();
    // It has asked: there is a connection.
    let _connection = silent.accept().expect("a connection");
    let sent = Instant::now();
    contender.send(Signal::SIGTERM);
    let finished = contender.wait();
    assert_eq!(finished.status.signal(), Some(15));
    assert!(finished.ended - sent < Duration::from_millis(150), "{:?}", finished.ended - sent);
}

/// Signals at random moments; the keys that are left, and how many runs were ended before COMMAND, and not.
fn interrupt(cluster: &Cluster, sandbox: &Sandbox, count: usize, left_out: &str) -> (Vec<String>, usize, usize) {
    let mut moments = Moments::new("signals");
    let (mut killed, mut ran) = (0, 0);
    for at in 0..count {
        let lock = cluster.lock(&format!("leak-{at}"));
        let holder = sandbox.withlock().leave_out(left_out).arg(&lock).args(["--", "sleep", "0.005"]).start();
        // This is the random moment itself, not a wait for anything.
        std::thread::sleep(moments.within(Duration::from_millis(25)));
        holder.send(Signal::SIGTERM);
        match holder.wait().status {
            status if status.signal() == Some(15) => killed += 1,
            _ => ran += 1,
        }
    }
    sandbox.wait_until_nothing_runs();
    (cluster.keys("leak-"), killed, ran)
}

#[test]
fn a_signal_at_any_of_200_random_moments_leaks_no_lock_and_leaves_no_orphan() {
    let (cluster, sandbox) = (Cluster::start(1), Sandbox::new());
    let (mut all_killed, mut all_ran) = (0, 0);
    // The power of the test: both kinds of moments are met.
    while all_killed < 20 || all_ran < 20 {
        let (left, killed, ran) = interrupt(&cluster, &sandbox, 200, "");
        assert_eq!(left, Vec::<String>::new());
        (all_killed, all_ran) = (all_killed + killed, all_ran + ran);
    }
}

#[test]
fn without_the_taking_back_a_signal_leaks_the_lock() {
    let (cluster, sandbox) = (Cluster::start(1), Sandbox::new());
    let leaked = (0..10).any(|_| !interrupt(&cluster, &sandbox, 100, "take-back").0.is_empty());
    assert!(leaked, "no lock leaked: the test above has no power");
}

/// Waiters that are ended at random moments around the release that they wait for; the keys that are left, and how
/// many were ended before COMMAND, and not.
fn interrupt_waiters(cluster: &Cluster, sandbox: &Sandbox, left_out: &str) -> (Vec<String>, usize, usize) {
    let mut moments = Moments::new("signals to waiters");
    let waiting = |at: usize| {
        let lock = cluster.lock(&format!("turn-{at}"));
        let nonce = sandbox.withlock().args(["acquire", &lock]).run().exited(0).out().trim_end().to_owned();
        let waiter = sandbox.withlock().leave_out(left_out).arg(&lock).args(["--", "sleep", "0.005"]).start();
        (lock, nonce, waiter)
    };
    let all: Vec<_> = (0..40).map(waiting).collect();
    all.iter().for_each(|(_, _, waiter)| waiter.wait_for_stderr("waiting, held"));
    let (mut killed, mut ran) = (0, 0);
    for (lock, nonce, waiter) in all {
        let release = sandbox.withlock().args(["release", "--nonce", &nonce, &lock]).start();
        // This is the random moment itself, not a wait for anything.
        std::thread::sleep(moments.within(Duration::from_millis(25)));
        waiter.send(Signal::SIGTERM);
        match waiter.wait().status {
            status if status.signal() == Some(15) => killed += 1,
            _ => ran += 1,
        }
        release.wait().exited(0);
    }
    sandbox.wait_until_nothing_runs();
    (cluster.keys("turn-"), killed, ran)
}

#[test]
fn a_waiter_ended_at_any_moment_around_its_turn_leaks_no_lock() {
    let (cluster, sandbox) = (Cluster::start(1), Sandbox::new());
    let (mut killed, mut ran) = (0, 0);
    // The power of the test: both kinds of moments are met.
    while killed < 10 || ran < 10 {
        let (left, killed_now, ran_now) = interrupt_waiters(&cluster, &sandbox, "");
        assert_eq!(left, Vec::<String>::new());
        (killed, ran) = (killed + killed_now, ran + ran_now);
    }
}

#[test]
fn without_the_taking_back_a_waiter_that_is_ended_leaks_the_lock() {
    let (cluster, sandbox) = (Cluster::start(1), Sandbox::new());
    let leaked = (0..10).any(|_| !interrupt_waiters(&cluster, &sandbox, "take-back").0.is_empty());
    assert!(leaked, "no lock leaked: the test above has no power");
}

#[test]
fn the_supervisor_hands_signals_on_while_a_renewal_gets_no_answer() {
    let (cluster, sandbox) = (Cluster::start(1), Sandbox::new());
    let proxy = Proxy::to(cluster.endpoint(0));
    let mut said = sandbox.fifo();
    let lock = format!("etcd://{}/a", proxy.address());
    let text = format!(
        "trap 'echo usr1 >{0}' USR1; trap 'exit 5' TERM; echo up >{0}; while :; do sleep 0.05; done",
        said.shown()
    );
    let holder = sandbox.withlock().args(["--ttl", "6s", &lock]).sh(text).start();
    said.line();
    proxy.cut();
    // A renewal is due after 2 s, and then waits for an answer that does not come.
    std::thread::sleep(Duration::from_millis(2_300));
    let sent = Instant::now();
    holder.send(Signal::SIGUSR1);
    assert_eq!(said.line().trim(), "usr1");
    assert!(sent.elapsed() < Duration::from_millis(400), "{:?}", sent.elapsed());
    proxy.mend();
    holder.send(Signal::SIGTERM);
    holder.wait().exited(5);
}
