//! A holder that is cut off from etcd: its command has ended, with all its descendants, before anybody
//! else gets in. By the clock, and by the kernel: the command and what it left in the background keep a
//! flock on a file of their own, which the next holder's command must find free.
//!
//! Needs etcd and etcdctl.

use std::sync::Mutex;
use std::time::Duration;

use nix::sys::signal::Signal;

use crate::harness::{Cluster, Fifo, Moments, Proxy, Run, Running, Sandbox};

/// Cut off by a proxy that drops everything: lanes at a time, rounds in each.
const LANES: usize = 10;
const ROUNDS: usize = 6;
/// Cut off by a member that is stopped: so many holders each time, so many times.
const HOLDERS: usize = 12;
const STOPS: usize = 5;

/// A place for the stamps and the flock of one round.
struct Round<'s> {
    sandbox: &'s Sandbox,
    name: String,
    inside: Fifo,
}

impl<'s> Round<'s> {
    fn new(sandbox: &'s Sandbox, name: String) -> Self {
        Round { sandbox, name, inside: sandbox.fifo() }
    }

    /// A command that stamps a file all the time, as does a child that it leaves in the background.
    fn hold(&self, options: &[&str], lock: &str, ignores_term: bool) -> Running {
        // A second to die in, in both ways, on a loaded machine too: what ends by TERM has all the grace, a
        // third of the lease; what must be killed half of it.
        let ttl = if ignores_term { "6s" } else { "3s" };
        let trap = if ignores_term { "trap '' TERM;" } else { "" };
        let text = format!(
            "{trap} exec 9>{0}.flock 8<>{0}.pause; flock 9; \
             (while :; do echo $EPOCHREALTIME; read -t 0.02 -u 8; done >>{0}.stamps) & \
             echo inside >{1}; while :; do echo $EPOCHREALTIME; read -t 0.02 -u 8; done >>{0}.stamps",
            self.name,
            self.inside.shown()
        );
        nix::unistd::mkfifo(&self.sandbox.path(format!("{}.pause", self.name)), nix::sys::stat::Mode::S_IRWXU)
            .expect("mkfifo");
        self.bash(self.sandbox.withlock().args(["-q", "--ttl", ttl]).args(options).arg(lock), &text).start()
    }

    /// The next holder: says whether it is alone, and when it came.
    fn follow(&self, lock: &str) -> Running {
        let text = format!(
            "came=$EPOCHREALTIME; if flock -n {0}.flock true; then echo alone $came; else echo overlap $came; fi",
            self.name
        );
        self.bash(self.sandbox.withlock().args(["-q", "-w", "35s", "--ttl", "3s"]).arg(lock), &text).start()
    }

    fn bash(&self, run: Run<'s>, text: &str) -> Run<'s> {
        run.args(["--", "bash", "-c"]).arg(text)
    }

    /// When the first holder's command, or what it left behind, was last seen.
    fn last_stamp(&self) -> f64 {
        let stamps = std::fs::read_to_string(self.sandbox.path(format!("{}.stamps", self.name))).expect("stamps");
        stamps.lines().filter_map(|line| line.parse().ok()).fold(0.0, f64::max)
    }

    /// Judges the round; how long the lock was nobody's, in seconds.
    #[track_caller]
    fn judge(&self, holder: Running, next: Running) -> f64 {
        let next = next.wait();
        next.exited(0).silent();
        let holder = holder.wait();
        holder.exited(76).says(&["the lock expires in ", " and was not renewed; ending the command"]);
        let out = next.out();
        let (verdict, came) = out.trim().split_once(' ').expect("a verdict and a time");
        let last = self.last_stamp();
        assert_eq!(
            verdict, "alone",
            "round {}: it came at {came}, the last stamp of the first is {last}; {holder}",
            self.name
        );
        let gap_s = came.parse::<f64>().expect("a time") - last;
        assert!(gap_s > 0.0, "round {}: {gap_s}", self.name);
        gap_s
    }
}

/// What a number of rounds showed.
#[track_caller]
fn summary(what: &str, gaps_s: &[f64], expected: usize) {
    let least = gaps_s.iter().copied().fold(f64::INFINITY, f64::min);
    println!("{what}: {} rounds, the lock was nobody's for at least {least:.3} s", gaps_s.len());
    assert_eq!(gaps_s.len(), expected);
}

#[test]
fn behind_a_link_that_drops_everything_the_command_has_ended_before_another_gets_in_in_60_rounds() {
    let (cluster, sandbox) = (Cluster::start(1), Sandbox::in_memory());
    let gaps_s = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for lane in 0..LANES {
            let (sandbox, gaps_s, direct) = (&sandbox, &gaps_s, cluster.endpoint(0).to_owned());
            scope.spawn(move || {
                let mut moments = Moments::new("cuts");
                for round in 0..ROUNDS {
                    let mut round = Round::new(sandbox, format!("p{lane}-{round}"));
                    let proxy = Proxy::to(&direct);
                    let own = format!("etcd://{}/{}", proxy.address(), round.name);
                    let holder = round.hold(&[], &own, lane % 3 == 0);
                    round.inside.line();
                    let next = round.follow(&format!("etcd://{direct}/{}", round.name));
                    // This is the random moment itself, not a wait for anything.
                    std::thread::sleep(moments.within(Duration::from_millis(1_800)));
                    proxy.cut();
                    let gap_s = round.judge(holder, next);
                    gaps_s.lock().expect("the gaps").push(gap_s);
                }
            });
        }
    });
    summary("cut by a proxy", &gaps_s.into_inner().expect("the gaps"), LANES * ROUNDS);
}

#[test]
fn beside_a_stopped_member_the_command_has_ended_before_another_gets_in_in_60_rounds() {
    let (cluster, sandbox) = (Cluster::start(3), Sandbox::in_memory());
    let mut moments = Moments::new("stops");
    let mut gaps_s = Vec::new();
    for stop in 0..STOPS {
        let leader = cluster.leader();
        let stopped = if stop % 2 == 0 { leader } else { (leader + 1) % 3 };
        let others = [(stopped + 1) % 3, (stopped + 2) % 3];
        let mut rounds: Vec<_> = (0..HOLDERS).map(|at| Round::new(&sandbox, format!("s{stop}-{at}"))).collect();
        let start =
            |(at, round): (usize, &Round<'_>)| round.hold(&[], &cluster.lock_by(&[stopped], &round.name), at % 2 == 0);
        let holders: Vec<_> = rounds.iter().enumerate().map(start).collect();
        rounds.iter_mut().for_each(|round| drop(round.inside.line()));
        let next: Vec<_> = rounds.iter().map(|round| round.follow(&cluster.lock_by(&others, &round.name))).collect();
        // This is the random moment itself, not a wait for anything.
        std::thread::sleep(moments.within(Duration::from_millis(1_000)));
        cluster.signal(stopped, Signal::SIGSTOP);
        for ((round, holder), next) in rounds.iter().zip(holders).zip(next) {
            gaps_s.push(round.judge(holder, next));
        }
        cluster.signal(stopped, Signal::SIGCONT);
        cluster.wait_healthy(stopped);
    }
    summary("a member stopped", &gaps_s, STOPS * HOLDERS);
}

#[test]
fn a_command_that_is_only_warned_about_overlaps_with_the_next() {
    // The negative control: what is measured above can fail.
    let (cluster, sandbox) = (Cluster::start(1), Sandbox::in_memory());
    let mut round = Round::new(&sandbox, "warned".into());
    let proxy = Proxy::to(cluster.endpoint(0));
    let holder = round.hold(&["--on-lost", "warn"], &format!("etcd://{}/warned", proxy.address()), false);
    round.inside.line();
    let next = round.follow(&cluster.lock("warned"));
    proxy.cut();
    let next = next.wait();
    next.exited(0);
    let (verdict, _) = next.out().trim().split_once(' ').map(|(a, b)| (a.to_owned(), b.to_owned())).expect("a verdict");
    assert_eq!(verdict, "overlap");
    assert!(holder.stderr_so_far().contains("was not renewed; the command goes on"), "{}", holder.stderr_so_far());
}

#[test]
fn an_interruption_shorter_than_the_grace_ends_nothing() {
    let (cluster, sandbox) = (Cluster::start(1), Sandbox::in_memory());
    let proxy = Proxy::to(cluster.endpoint(0));
    let mut gate = sandbox.gate();
    let lock = format!("etcd://{}/a", proxy.address());
    let holder = sandbox.withlock().args(["-q", "--ttl", "6s", &lock]).sh(gate.script()).start();
    gate.wait_inside();
    proxy.cut();
    holder.wait_for_stderr("the lock could not be renewed: ");
    proxy.mend();
    // Longer than the lease would have lasted from the last renewal before the cut.
    std::thread::sleep(Duration::from_secs(6));
    gate.open();
    holder.wait().exited(0).one_line(&["no answer within", "; trying again"]);
}
