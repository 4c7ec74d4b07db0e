//! Beside `etcdctl lock`, on the same cluster, in the same run: what the lock costs, how soon the next one
//! gets it, and what becomes of the command when the lease is lost.
//!
//! Needs etcd and etcdctl.

use std::time::{Duration, Instant};

use crate::harness::{Cluster, Proxy, Run, Sandbox, eventually};

/// Measurements of each, alternating.
const TIMES: usize = 15;

/// The two programs: each runs bash under the lock.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Peer {
    Ours,
    Etcdctl,
}

impl Peer {
    fn start_of<'s>(self, sandbox: &'s Sandbox, endpoint: &str, key: &str) -> Run<'s> {
        match self {
            Peer::Ours => sandbox.withlock().args(["-q", "--ttl", "10s", &format!("etcd://{endpoint}/{key}"), "--"]),
            Peer::Etcdctl => sandbox.program("etcdctl").env("ETCDCTL_API", "3").args([
                "--endpoints",
                &format!("http://{endpoint}"),
                "lock",
                "--ttl",
                "10",
                "--",
                key,
            ]),
        }
    }
}

fn median(mut times_s: Vec<f64>) -> f64 {
    times_s.sort_by(f64::total_cmp);
    times_s[times_s.len() / 2]
}

#[test]
fn a_whole_run_and_a_change_of_hands_are_measured_side_by_side() {
    let (cluster, sandbox) = (Cluster::start(3), Sandbox::in_memory());
    let endpoint = cluster.endpoint(0);
    let (mut whole, mut hand_off) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    for at in 0..TIMES {
        for (peer, index) in [(Peer::Ours, 0), (Peer::Etcdctl, 1)] {
            // A key of its own for each: etcdctl sometimes waits for ever for a predecessor that has gone.
            let key = format!("whole{at}-{index}");
            let finished = peer.start_of(&sandbox, endpoint, &key).arg("true").run();
            finished.exited(0);
            whole[index].push(finished.took.as_secs_f64());

            let key = format!("hands{at}-{index}");
            let mut gate = sandbox.gate();
            let bash = |text: String| peer.start_of(&sandbox, endpoint, &key).args(["bash", "-c"]).arg(text).start();
            let first = bash(format!("{}; echo $EPOCHREALTIME", gate.script()));
            gate.wait_inside();
            let second = bash("echo $EPOCHREALTIME".into());
            wait_until_it_waits(&cluster, &second, peer, &key);
            gate.open();
            let time = |finished: crate::harness::Finished| finished.out().trim().parse::<f64>().expect("a time");
            let ended = time(first.wait());
            hand_off[index].push(time(second.wait()) - ended);
        }
    }
    let [our_whole, their_whole] = whole.map(median);
    let [our_hand_off, their_hand_off] = hand_off.map(median);
    println!("a whole run: {:.1} ms, etcdctl {:.1} ms", our_whole * 1e3, their_whole * 1e3);
    println!("from hand to hand: {:.1} ms, etcdctl {:.1} ms", our_hand_off * 1e3, their_hand_off * 1e3);
    // Figures to be read; a test build on a busy machine proves no more than that nothing waits for a clock:
    // the shortest pause on any path of ours is 50 ms.
    assert!(our_whole < 2.0 * their_whole + 0.05, "{our_whole}, etcdctl {their_whole}");
    assert!(our_hand_off < 2.0 * their_hand_off + 0.05, "{our_hand_off}, etcdctl {their_hand_off}");
}

/// Waits until `waiter` has seen that the lock is taken. `etcdctl` queues a key of its own; ours takes a
/// lease and a watch, of which the server shows the lease; the watch follows at once.
fn wait_until_it_waits(cluster: &Cluster, waiter: &crate::harness::Running, peer: Peer, key: &str) {
    let what = format!("{} waits", waiter.pid());
    eventually(&what, || match peer {
        Peer::Etcdctl if cluster.keys(key).len() < 2 => Err(()),
        Peer::Ours if cluster.leases() < 2 => Err(()),
        _ => Ok(()),
    });
    let settle = Instant::now();
    while settle.elapsed() < Duration::from_millis(50) {
        std::thread::yield_now();
    }
}

#[test]
fn a_lost_lease_ends_our_command_and_leaves_that_of_etcdctl_beside_the_next() {
    let (cluster, sandbox) = (Cluster::start(1), Sandbox::in_memory());
    for (peer, overlaps) in [(Peer::Ours, false), (Peer::Etcdctl, true)] {
        let key = if overlaps { "theirs" } else { "ours" };
        let proxy = Proxy::to(cluster.endpoint(0));
        let mut gate = sandbox.gate();
        let text = format!("exec 9>{key}.flock; flock 9; {}", gate.script());
        let first = peer.start_of(&sandbox, &proxy.address(), key).args(["bash", "-c", &text]).start();
        gate.wait_inside();
        let text = format!("flock -n {key}.flock true && echo alone || echo overlap");
        let second = peer.start_of(&sandbox, cluster.endpoint(0), key).args(["bash", "-c", &text]).start();
        proxy.cut();
        let second = second.wait();
        assert_eq!(second.out().trim(), if overlaps { "overlap" } else { "alone" });
        if peer == Peer::Ours {
            first.wait().exited(76);
        }
    }
}
