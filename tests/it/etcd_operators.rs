//! Operators and scripts at locks in etcd.
//!
//! Needs etcd and etcdctl.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::harness::{Cluster, Finished, Run, Sandbox, eventually};

fn json(finished: &Finished) -> serde_json::Value {
    serde_json::from_slice(&finished.stdout).unwrap_or_else(|error| panic!("{error}: {finished}"))
}

fn inspect(sandbox: &Sandbox, lock: &str) -> serde_json::Value {
    let finished = sandbox.withlock().args(["inspect", "--json", lock]).run();
    finished.exited(0).silent();
    json(&finished)
}

fn quiet(sandbox: &Sandbox, lock: &str) -> Option<i32> {
    sandbox.withlock().args(["inspect", "-q", lock]).run().code()
}

#[test]
fn inspect_tells_of_one_lock_and_of_all_below_a_prefix_in_the_schema_of_files() {
    let (cluster, sandbox) = (Cluster::start(1), Sandbox::new());
    let mut gate = sandbox.gate();
    let lock = cluster.lock("jobs/a");
    assert_eq!(inspect(&sandbox, &lock)["locks"][0]["state"], "free");
    assert_eq!(quiet(&sandbox, &lock), Some(0));
    let holder = sandbox.withlock().args(["--label", "night", &lock]).sh(gate.script()).start();
    gate.wait_inside();
    let found = inspect(&sandbox, &lock);
    assert_eq!((&found["withlock_report"], &found["kind"]), (&1.into(), &"inspect".into()));
    let told = &found["locks"][0];
    assert_eq!((&told["path"], &told["state"], &told["stale"]), (&lock.as_str().into(), &"held".into(), &false.into()));
    assert_eq!(
        (&told["holder"]["pid"], &told["holder"]["label"], &told["holder"]["alive"], &told["ttl_ms"]),
        (&holder.pid().into(), &"night".into(), &"runs-here".into(), &60_000.into())
    );
    assert!(told["holder"]["fence"].as_u64() > Some(0) && told["expires_in_ms"].as_u64() > Some(50_000), "{told}");
    assert_eq!(quiet(&sandbox, &lock), Some(75));
    cluster.ctl(&["put", "jobs/setting", "on"]);
    cluster.ctl(&["put", "elsewhere", "on"]);
    for prefix in ["jobs/", ""] {
        let all = inspect(&sandbox, &cluster.lock(prefix));
        let paths: Vec<_> = all["locks"].as_array().expect("locks").iter().map(|lock| lock["path"].clone()).collect();
        assert_eq!(paths, [lock.as_str()], "what is no lock is not listed");
    }
    // Named by itself it is.
    assert_eq!(inspect(&sandbox, &cluster.lock("elsewhere"))["locks"][0]["state"], "foreign");
    assert_eq!(quiet(&sandbox, &cluster.lock("elsewhere")), Some(73));
    let page = sandbox.withlock().args(["inspect", &lock]).run();
    page.exited(0).silent();
    for part in ["held, expires in ", " unless renewed", "label         night", "fence ", "last renewed"] {
        assert!(page.out().contains(part), "{part}: {page}");
    }
    gate.open();
    holder.wait().exited(0);
    let unreachable = sandbox.withlock().args(["inspect", "etcd://127.0.0.1:1/a"]).run();
    unreachable.exited(69).one_line(&["etcd://127.0.0.1:1/a: cannot be reached: 127.0.0.1:1: Connection refused"]);
}

#[test]
fn a_live_lock_is_broken_only_by_force_and_only_the_epoch_that_was_meant() {
    let (cluster, sandbox) = (Cluster::start(1), Sandbox::new());
    let mut gate = sandbox.gate();
    let lock = cluster.lock("a");
    let holder = sandbox.withlock().arg(&lock).sh(gate.script()).start();
    gate.wait_inside();
    let nonce = inspect(&sandbox, &lock)["locks"][0]["holder"]["nonce"].as_str().expect("a nonce").to_owned();
    let other = "00000000000000000000000000000000";
    sandbox.withlock().args(["break", &lock]).run().exited(75).one_line(&["held, expires in ", "; not broken; next: "]);
    sandbox
        .withlock()
        .args(["break", "--force", "--nonce", other, &lock])
        .run()
        .exited(75)
        .one_line(&[&format!("not broken (the epoch {other} has ended)")]);
    let would = sandbox.withlock().args(["break", "--force", "--dry-run", "--nonce", &nonce, &lock]).run();
    assert!(would.exited(0).silent().out().contains("would be ended"));
    assert_eq!(cluster.keys(""), ["a"]);
    let broken = Instant::now();
    let done = sandbox.withlock().args(["break", "--force", "--nonce", &nonce, "--reason", "hangs", &lock]).run();
    done.exited(0).silent();
    let slot = cluster.keys("a.stale-").pop().expect("a quarantine");
    assert!(slot.ends_with(&nonce) && done.out().contains(&format!("/{slot}\n")), "{done}");
    let finished = holder.wait();
    finished.exited(76).one_line(&["the lock was lost: its key is gone; ending the command"]);
    assert!(finished.ended - broken < Duration::from_secs(2), "{:?}", finished.ended - broken);
    // Its record is kept under a lease of the reclaim age: the ttl and five seconds.
    let told = &inspect(&sandbox, &lock)["locks"][0]["quarantine"][0];
    assert_eq!((&told["ended"]["why"], &told["ended"]["reason"]), (&"break".into(), &"hangs".into()));
    assert_eq!((&told["owner"]["nonce"], &told["fate"]), (&nonce.as_str().into(), &"young".into()));
    assert_eq!(cluster.leases(), 1, "only that of the quarantine");
    let lease = cluster.ctl(&["lease", "list"]).out().lines().nth(1).expect("a lease").to_owned();
    assert!(cluster.ctl(&["lease", "timetolive", &lease]).out().contains("granted with TTL(65s)"));
    sandbox.withlock().args(["break", &lock]).run().exited(0).silent();
    sandbox.withlock().args(["-n", &lock, "--", "true"]).run().exited(0).silent();
}

#[test]
fn a_successor_is_never_hit_by_the_break_of_its_predecessor() {
    let (cluster, sandbox) = (Cluster::start(1), Sandbox::new());
    let lock = cluster.lock("a");
    let first = sandbox.withlock().args(["acquire", &lock]).run().exited(0).out().trim().to_owned();
    // A breaker that has looked at the first and acts late: its transaction compares the create revision.
    let looked: serde_json::Value =
        serde_json::from_slice(&cluster.ctl(&["get", "a", "-w", "json"]).stdout).expect("a key");
    let revision = looked["kvs"][0]["create_revision"].as_i64().expect("a revision");
    sandbox.withlock().args(["release", "--nonce", &first, &lock]).run().exited(0).silent();
    let second = sandbox.withlock().args(["acquire", &lock]).run().exited(0).out().trim().to_owned();
    let txn = format!("create(\"a\") = \"{revision}\"\n\ndel a\n\n\n\n");
    let late = cluster.etcdctl(&sandbox, &[0]).arg("txn").input(txn.as_bytes()).run();
    assert!(late.out().contains("FAILURE"), "{late}");
    sandbox.withlock().args(["check", "--nonce", &second, &lock]).run().exited(0).silent();
    for subcommand in ["release", "renew"] {
        let late = sandbox.withlock().args([subcommand, "--nonce", &first, &lock]).run();
        late.exited(76).one_line(&[&format!("not held with nonce {first}: another holds it (nonce {second})")]);
    }
    sandbox.withlock().args(["break", "--force", "--nonce", &first, &lock]).run().exited(75);
    sandbox.withlock().args(["check", "--nonce", &second, &lock]).run().exited(0).silent();
}

#[test]
fn what_was_kept_for_good_is_reclaimed_when_it_is_old_enough_and_no_other_key() {
    let (cluster, sandbox) = (Cluster::start(1), Sandbox::new());
    let lock = cluster.lock("jobs/a");
    for keep in [true, false] {
        sandbox.withlock().args(["acquire", "--ttl", "2s", &lock]).run().exited(0);
        let run = sandbox.withlock().args(["break", "--force", &lock]);
        (if keep { run.arg("--keep") } else { run }).run().exited(0);
    }
    cluster.ctl(&["put", "jobs/a.stale-1-x", "not ours"]);
    cluster.ctl(&["put", "jobs/a.stale-1-00000000000000000000000000000000", "not ours either"]);
    let young = sandbox.withlock().args(["reclaim", "--json", &cluster.lock("jobs/")]).run();
    let fates = |finished: &Finished| -> Vec<String> {
        let told = json(finished);
        let fate = |found: &serde_json::Value| found["fate"].as_str().unwrap_or_default().to_owned();
        let mut fates: Vec<_> = told["quarantine"].as_array().expect("an array").iter().map(fate).collect();
        fates.sort();
        fates
    };
    assert_eq!(fates(&young), ["not-ours", "young", "young"]);
    // The ttl and five seconds, then etcd itself has removed the one with a lease.
    eventually("only the kept one is left", || {
        let left = cluster.keys("jobs/a.stale-");
        if left.len() == 3 { Ok(()) } else { Err(left) }
    });
    let removed = eventually("it is old enough", || {
        let told = sandbox.withlock().args(["reclaim", "--json", &lock]).run();
        if fates(&told).contains(&"removed".to_owned()) { Ok(told) } else { Err(told.out()) }
    });
    assert_eq!(fates(&removed), ["not-ours", "removed"]);
    assert_eq!(cluster.keys("jobs/").len(), 2, "what is not ours stays");
    sandbox.withlock().args(["break", "--keep"]).lock().run().exited(64).one_line(&["--keep has no meaning"]);
}

#[test]
fn a_script_acquires_renews_checks_and_releases_by_nonce() {
    let (cluster, sandbox) = (Cluster::start(1), Sandbox::new());
    let lock = cluster.lock("a");
    let script = format!(
        "set -eu; eval \"$($WL acquire --export --ttl 2s {lock})\"; test \"$WITHLOCK_FENCE\" -gt 0; \
         i=0; while [ $i -lt 8 ]; do sleep 0.5; $WL renew; i=$((i+1)); done; $WL check; \
         if $WL -n {lock} -- true; then exit 9; fi; $WL release; if $WL check; then exit 8; fi; echo done"
    );
    let finished = sandbox.sh(&script).run();
    assert_eq!((finished.code(), finished.out().as_str()), (Some(0), "done\n"), "{finished}");
    assert_eq!((cluster.keys(""), cluster.leases()), (Vec::new(), 0));
    // Nobody renews it: gone one ttl later.
    let nonce = sandbox.withlock().args(["acquire", "--ttl", "2s", &lock]).run().exited(0).out().trim().to_owned();
    sandbox.withlock().args(["-q", &lock, "--", "true"]).run().exited(0);
    sandbox.withlock().args(["release", "--nonce", &nonce, &lock]).run().exited(76).one_line(&["nobody holds it"]);
}

#[test]
fn a_lock_of_a_running_command_is_not_released_by_its_nonce() {
    let (cluster, sandbox) = (Cluster::start(1), Sandbox::new());
    let text = "$WL release; test $? = 75 && $WL check && $WL renew";
    sandbox
        .withlock()
        .arg(cluster.lock("a"))
        .sh(text)
        .run()
        .exited(0)
        .one_line(&["not released: it is released when the command that runs under it ends"]);
}

/// A keeper for a process, which is started here.
fn keep<'s>(sandbox: &'s Sandbox, lock: &str, pid: i32) -> Run<'s> {
    sandbox.withlock().args(["acquire", "--ttl", "2s", "--for-pid", &pid.to_string(), lock])
}

#[test]
fn a_keeper_renews_while_a_process_lives_and_releases_when_it_ends_also_after_a_wait() {
    let (cluster, sandbox) = (Cluster::start(1), Sandbox::new());
    let lock = cluster.lock("a");
    for waits in [false, true] {
        let watched = sandbox.program("sleep").arg("1000").start();
        let mut gate = sandbox.gate();
        if waits {
            // The keeper is split off a process that has threads: one watches the key.
            let holder = sandbox.withlock().arg(&lock).sh(gate.script()).start();
            gate.wait_inside();
            let acquiring = keep(&sandbox, &lock, watched.pid()).start();
            acquiring.wait_for_stderr("waiting, held");
            gate.open();
            holder.wait().exited(0);
            acquiring.wait().exited(0);
        } else {
            keep(&sandbox, &lock, watched.pid()).run().exited(0).silent();
        }
        // Longer than its lease, all the time.
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(5) {
            assert_eq!(quiet(&sandbox, &lock), Some(75), "after {:?}", begun.elapsed());
        }
        watched.send(Signal::SIGKILL);
        eventually("the keeper has released it", || match cluster.keys("a") {
            left if left.is_empty() => Ok(()),
            left => Err(left),
        });
        watched.wait();
    }
    sandbox.wait_until_nothing_runs();
}
