//! Mutual exclusion in etcd while everything dies: contenders of two hosts that share no directory but
//! the one with the counter, which knows nothing of locks.
//!
//! Needs etcd and etcdctl.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::{Cluster, Moments, Run, Running, Sandbox};

/// Contenders on both hosts together.
const CONTENDERS: usize = 32;

/// Reads the counter, dawdles where a rival would come between, replaces it, and only then books what it
/// wrote. What is killed in between has changed the counter and booked nothing.
const INCREMENT: &str = r#"
read n <"$SHARED/counter"
i=0; while [ $i -lt 50 ]; do i=$((i+1)); done
echo $((n+1)) >"$SHARED/counter.$$" && mv "$SHARED/counter.$$" "$SHARED/counter" &&
echo "$((n+1)) $WITHLOCK_FENCE" >>"$SHARED/book"
"#;

/// A contender that increments until it was let through `rounds` times, whatever happens to it.
fn contender<'s>(host: &'s Sandbox, shared: &Sandbox, lock: &str, rounds: usize, left_out: &str) -> Run<'s> {
    let body = format!(
        "i=0; while [ $i -lt {rounds} ]; do \
         if \"$WL\" -q -w 30s --ttl 2s --on-lost warn {lock} -- /bin/sh -c '{INCREMENT}'; then i=$((i+1)); fi; done"
    );
    host.sh(&body).env("SHARED", shared.work()).env("WITHLOCK_LEAVE_OUT", left_out)
}

/// What was booked: numbers with their fencing tokens, in the order of the booking.
fn book(shared: &Sandbox) -> Vec<(u64, u64)> {
    let text = std::fs::read_to_string(shared.path("book")).expect("a book");
    let entry = |line: &str| {
        let (number, fence) = line.split_once(' ')?;
        Some((number.parse().ok()?, fence.parse().ok()?))
    };
    text.lines().map(|line| entry(line).unwrap_or_else(|| panic!("an entry: {line:?}"))).collect()
}

fn counter(shared: &Sandbox) -> u64 {
    let text = std::fs::read_to_string(shared.path("counter")).expect("a counter");
    text.trim().parse().expect("a number")
}

fn start(hosts: &[Sandbox; 2], shared: &Sandbox, lock: &str, rounds: usize, left_out: &str) -> Vec<Running> {
    std::fs::write(shared.path("counter"), "0\n").expect("a counter");
    let host = |at: usize| contender(&hosts[at % 2], shared, lock, rounds, left_out).start();
    (0..CONTENDERS).map(host).collect()
}

#[test]
fn thirty_two_contenders_on_two_hosts_lose_no_update_while_holders_wrappers_and_members_die() {
    let (mut cluster, shared) = (Cluster::start(3), Sandbox::in_memory());
    let hosts = [Sandbox::in_memory(), Sandbox::in_memory()];
    let lock = cluster.lock("counter");
    let running = start(&hosts, &shared, &lock, 6, "");
    let over = AtomicBool::new(false);
    let mut killed = 0;
    std::thread::scope(|scope| {
        let over = &over;
        scope.spawn(move || {
            for running in running {
                match running.wait_within(Duration::from_secs(110)) {
                    Ok(finished) => assert_eq!(finished.code(), Some(0), "{finished}"),
                    Err(running) => {
                        over.store(true, Ordering::SeqCst);
                        panic!("a contender starves: {}", running.stderr_so_far());
                    }
                }
            }
            over.store(true, Ordering::SeqCst);
        });
        let mut moments = Moments::new("deaths");
        let begun = Instant::now();
        let mut calamities = 0;
        // A pause between calamities: nobody gets anywhere without a majority.
        while !over.load(Ordering::SeqCst) {
            std::thread::sleep(moments.within(Duration::from_millis(400)));
            killed += kill_somebody(&hosts, &mut moments);
            calamities += 1;
            if calamities % 8 != 0 || begun.elapsed() > Duration::from_secs(20) {
                continue;
            }
            let leader = cluster.leader();
            let victim = if moments.number().is_multiple_of(2) { leader } else { (leader + 1) % 3 };
            match moments.number() % 2 {
                0 => {
                    cluster.kill(victim);
                    std::thread::sleep(moments.within(Duration::from_millis(500)));
                    cluster.restart(victim);
                }
                _ => {
                    cluster.signal(victim, Signal::SIGSTOP);
                    std::thread::sleep(moments.within(Duration::from_millis(3_000)));
                    cluster.signal(victim, Signal::SIGCONT);
                }
            }
            cluster.wait_healthy(victim);
        }
        println!("{calamities} calamities in {:?}, {killed} processes killed", begun.elapsed());
    });
    let (book, counter) = (book(&shared), counter(&shared));
    let numbers: BTreeSet<u64> = book.iter().map(|(number, _)| *number).collect();
    assert_eq!(numbers.len(), book.len(), "a number was written twice: an update was lost: {book:?}");
    assert!(book.len() >= CONTENDERS * 6, "{} booked", book.len());
    assert!(numbers.last() <= Some(&counter), "{counter}");
    let unbooked = counter - u64::try_from(book.len()).expect("a length");
    assert!(unbooked <= killed, "{unbooked} were not booked, and only {killed} killed");
    assert!(book.is_sorted_by(|a, b| a.1 < b.1), "fencing tokens grow: {book:?}");
    assert!(killed > 0, "nobody was killed: the test has no power");
}

/// Kills a wrapper or a command, of whatever is running; how many.
fn kill_somebody(hosts: &[Sandbox; 2], moments: &mut Moments) -> u64 {
    let pick = |from: &[i32], moments: &mut Moments| {
        let count = u64::try_from(from.len()).expect("a length");
        (count > 0).then(|| from[usize::try_from(moments.number() % count).expect("an index")])
    };
    let host = &hosts[usize::from(moments.number().is_multiple_of(2))];
    let processes = host.processes();
    let wrappers: Vec<i32> = processes.iter().filter(|found| found.name == "withlock").map(|found| found.pid).collect();
    let of_wrapper = |found: &&crate::harness::Process| wrappers.contains(&found.parent);
    let commands: Vec<i32> = processes.iter().filter(of_wrapper).map(|found| found.pid).collect();
    let victims = if moments.number().is_multiple_of(2) { &wrappers } else { &commands };
    let Some(victim) = pick(victims, moments) else { return 0 };
    u64::from(kill(Pid::from_raw(victim), Signal::SIGKILL).is_ok())
}

#[test]
fn the_same_counter_loses_updates_when_the_creation_is_not_exclusive() {
    let (cluster, shared) = (Cluster::start(1), Sandbox::in_memory());
    let hosts = [Sandbox::in_memory(), Sandbox::in_memory()];
    for running in start(&hosts, &shared, &cluster.lock("counter"), 3, "exclusive") {
        running.wait();
    }
    let book = book(&shared);
    let numbers: BTreeSet<u64> = book.iter().map(|(number, _)| *number).collect();
    assert!(numbers.len() < book.len(), "no update was lost: the test has no power");
}
