//! Holders, evictors, breakers and reclaimers at the same lock at the same time: no epoch ends but the one
//! that was judged, no two are inside, nothing foreign is touched.
//!
//! What these races are worth: the interleavings are those that two cores and some twenty processes come
//! to by themselves, thousands of them, not all. The worst places are held open on purpose in the last two
//! tests, of which one is the other's negative control. Needs strace.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::cases_end::plant_slot;
use crate::harness::{
    Running, Sandbox, Snapshot, age, eventually, inode, plant, plant_bytes, planted, shipped, slots, tree,
};
use crate::ops_break::stopped_at;

/// Reads the counter, dawdles where a rival would come between, writes it back; says that it was inside.
const INCREMENT: &str =
    "read n <counter; i=0; while [ $i -lt 30 ]; do i=$((i+1)); done; echo $((n+1)) >counter; echo $WITHLOCK_NONCE >>$1";

/// Loops until the file `stop` is there; each round's exit code and the nonces of its holds are logged.
fn holder(sandbox: &Sandbox, number: usize, program: &Path, leave_out: &str) -> Running {
    let body = format!(
        "while [ ! -e stop ]; do \"$PROGRAM\" -q -w 60 \"$L\" -- /bin/sh -c '{INCREMENT}' - held.{number}; echo $? >>codes.{number}; done"
    );
    sandbox.sh(body).env("PROGRAM", program).leave_out(leave_out).start()
}

fn words(sandbox: &Sandbox, prefix: &str) -> Vec<String> {
    let names = sandbox.names().into_iter().filter(|name| name.starts_with(prefix));
    names.flat_map(|name| lines(&fs::read_to_string(sandbox.path(name)).expect("a log"))).collect()
}

fn lines(text: &str) -> Vec<String> {
    text.lines().map(str::to_owned).collect()
}

/// The nonces of the epochs that breakers say they have ended.
fn ended(outputs: &[String]) -> Vec<String> {
    let nonces = outputs.iter().flat_map(|output| output.lines().filter_map(|line| line.strip_prefix("  nonce   ")));
    nonces.map(str::to_owned).collect()
}

/// Things beside the lock that nobody may touch, and how they look.
fn bystanders(sandbox: &Sandbox) -> BTreeMap<PathBuf, Snapshot> {
    let hour_ms = 3_600_000;
    fs::create_dir(sandbox.path("beside")).expect("a directory");
    fs::write(sandbox.path("a.lock.old"), "text").expect("a file");
    let foreign = plant_slot(&sandbox.lock(), 1_000, hour_ms);
    plant_bytes(&foreign.join("mine.txt"), b"mine", hour_ms);
    age(&foreign, hour_ms);
    symlink("beside", sandbox.path(format!("a.lock.stale-1-{}", "ab".repeat(16)))).expect("a link");
    plant(&sandbox.path("b.lock"), &planted(hour_ms), 0);
    tree(&sandbox.work())
}

#[track_caller]
fn untouched(sandbox: &Sandbox, before: &BTreeMap<PathBuf, Snapshot>) {
    let after = tree(&sandbox.work());
    for (path, snapshot) in before {
        assert_eq!(after.get(path), Some(snapshot), "{path:?}");
    }
}

/// Twenty processes: six holders, ten breakers, two reclaimers, two that look, and `wanted` stale epochs
/// planted under them. What went wrong, in words.
fn race(wanted: usize, program: &Path, leave_out: &str) -> Vec<String> {
    let sandbox = Sandbox::in_memory();
    let before = bystanders(&sandbox);
    fs::write(sandbox.path("counter"), "0\n").expect("a counter");
    let mut running: Vec<Running> = (0..6).map(|number| holder(&sandbox, number, program, leave_out)).collect();
    let quiet = |name: &str, body: &str| {
        // A pause, or on two cores nobody who has the lock would come to use it.
        let body = format!(
            "n=0; while [ ! -e stop ]; do {body} 2>/dev/null; n=$((n+1)); sleep 0.03; done; echo $n >>rounds.$0"
        );
        sandbox.sh(body).arg(name).env("PROGRAM", program).leave_out(leave_out).start()
    };
    // Three of them are held up after their look into the slot: without that, two cores hardly ever come to the
    // interleavings that matter.
    let late = "strace -qq -o /dev/null -e trace=getdents64 -e";
    let late = format!("{late} inject=getdents64:delay_exit=60000:when=1");
    let mut breakers: Vec<Running> = (0..2).map(|_| quiet("break", "\"$PROGRAM\" break \"$L\"")).collect();
    breakers.extend((0..3).map(|_| quiet("break", &format!("{late} \"$PROGRAM\" break \"$L\""))));
    // Forced, but only at an epoch that was planted stale: at no other, whatever has come to the path.
    breakers.extend(
        (0..5).map(|_| quiet("force", "n=; read n <latest; \"$PROGRAM\" break --force --nonce ${n:-x} \"$L\"")),
    );
    running.extend((0..2).map(|_| quiet("reclaim", "\"$PROGRAM\" reclaim . >/dev/null")));
    running.extend((0..2).map(|_| quiet("inspect", "\"$PROGRAM\" inspect --json . >/dev/null")));

    // A link is made exclusively as well: a dead holder's epoch appears where the path is free.
    let begun = Instant::now();
    let patience =
        Duration::from_secs(120) + Duration::from_millis(200) * u32::try_from(wanted).expect("a small number");
    let mut stale = BTreeSet::new();
    while stale.len() < wanted {
        assert!(begun.elapsed() < patience, "only {} stale epochs were planted", stale.len());
        let dead = planted(1_000);
        let (file, note) = (sandbox.path("dead"), sandbox.path("note"));
        plant(&file, &dead, 60_000);
        // Guarded until rivals have gathered, then let go: they all come at once.
        let guard = fs::File::open(&file).expect("the planted lock");
        let guard = nix::fcntl::Flock::lock(guard, nix::fcntl::FlockArg::LockExclusive).expect("its guard");
        while fs::hard_link(&file, sandbox.lock()).is_err() {
            std::thread::sleep(Duration::from_micros(100));
            assert!(begun.elapsed() < patience, "only {} stale epochs were planted", stale.len());
        }
        fs::remove_file(&file).expect("the other name");
        stale.insert(dead.nonce.to_string());
        fs::write(&note, format!("{}\n", dead.nonce)).expect("a note");
        fs::rename(&note, sandbox.path("latest")).expect("a note");
        std::thread::sleep(Duration::from_millis(40));
        drop(guard);
        eventually("it is ended", || {
            let ino = crate::harness::record(&sandbox.lock()).map(|record| record.nonce);
            if ino == Some(dead.nonce) { Err(ino) } else { Ok(()) }
        });
    }
    fs::write(sandbox.path("stop"), "").expect("stop");
    let outputs: Vec<String> = breakers.into_iter().map(|breaker| breaker.wait().out()).collect();
    running.into_iter().for_each(|one| drop(one.wait()));

    let mut wrong = Vec::new();
    let mut expect = |right: bool, what: &str| wrong.extend((!right).then(|| what.to_owned()));
    let codes = words(&sandbox, "codes.");
    let bad: BTreeSet<&String> = codes.iter().filter(|code| *code != "0").collect();
    expect(bad.is_empty(), &format!("holders ended with {bad:?}: 76 is a lost lock"));
    let counted = fs::read_to_string(sandbox.path("counter")).expect("a counter");
    expect(counted.trim() == codes.len().to_string(), "an update was lost: two were inside");
    let ended = ended(&outputs);
    let distinct: BTreeSet<String> = ended.iter().cloned().collect();
    expect(ended.len() == distinct.len(), "an epoch was ended twice");
    expect(distinct.is_subset(&stale), "a breaker ended an epoch that was not stale");
    let was_stale = |slot: &withlock::record::SlotName| stale.contains(slot.nonce.as_str());
    let left = slots(&sandbox.lock());
    expect(
        left.iter().all(|slot| was_stale(&slot.name) || before.contains_key(&slot.path)),
        "a live epoch lies in a slot",
    );
    expect(!sandbox.lock().exists(), "the lock is left behind");
    expect(!sandbox.names().iter().any(|name| name.contains(".reclaim-")), "a reclaimer left litter");
    untouched(&sandbox, &before);
    let rounds: usize = words(&sandbox, "rounds.").iter().filter_map(|count| count.parse::<usize>().ok()).sum();
    let (holds, stale, ended) = (codes.len(), stale.len(), ended.len());
    println!("{holds} holds, {stale} stale epochs, {ended} of them ended by breakers, {rounds} other rounds");
    wrong
}

#[test]
fn stale_epochs_end_once_each_and_no_live_one_ever_while_twenty_processes_break_reclaim_and_hold() {
    // TEST_ROUNDS asks for more.
    let wanted = std::env::var("TEST_ROUNDS").ok().and_then(|count| count.parse().ok()).unwrap_or(150);
    assert_eq!(race(wanted, shipped(), ""), Vec::<String>::new());
}

#[test]
fn the_same_race_without_guard_veto_claim_and_verification_ends_live_epochs() {
    // The negative control of the test above: were nothing found here, nothing could be found there. It
    // is a race: each batch finds something more often than not, and there are many.
    let program = Path::new(env!("CARGO_BIN_EXE_withlock"));
    let found = (0..12).find_map(|batch| {
        let wrong = race(60, program, "guard,veto,claim,verify,noreplace");
        println!("batch {batch}: {wrong:?}");
        (!wrong.is_empty()).then_some(wrong)
    });
    assert!(found.is_some());
}

#[test]
fn forced_breaks_end_exactly_the_holds_that_report_their_loss() {
    let sandbox = Sandbox::in_memory();
    let before = bystanders(&sandbox);
    // Each hold logs its nonce and waits a little; the wrapper's exit code tells how it ended.
    let body = "while [ ! -e stop ]; do rm -f mine.$0; \"$SHIPPED\" -q -w 60 --kill-after 0 \"$L\" -- \
                /bin/sh -c 'echo $WITHLOCK_NONCE >mine.$0; sleep 0.3' $0; \
                code=$?; [ -e mine.$0 ] && echo $code $(cat mine.$0) >>ends.$0; done";
    let start = |number: usize| sandbox.sh(body).arg(number.to_string()).env("SHIPPED", shipped()).start();
    let holders: Vec<Running> = (0..6).map(start).collect();
    let force = "while [ ! -e stop ]; do \"$SHIPPED\" break --force \"$L\" 2>/dev/null; sleep 0.$0; done";
    let breakers: Vec<Running> =
        ["3", "5", "7", "8"].map(|pause| sandbox.sh(force).arg(pause).env("SHIPPED", shipped()).start()).into();
    let begun = Instant::now();
    loop {
        let ends = words(&sandbox, "ends.");
        let lost = ends.iter().filter(|end| end.starts_with("76 ")).count();
        if lost >= 10 && ends.len() - lost >= 10 {
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(300), "only {lost} of {} holds were broken", ends.len());
        std::thread::sleep(Duration::from_millis(20));
    }
    fs::write(sandbox.path("stop"), "").expect("stop");
    let outputs: Vec<String> = breakers.into_iter().map(|breaker| breaker.wait().out()).collect();
    holders.into_iter().for_each(|holder| drop(holder.wait()));
    let ended = ended(&outputs);
    let broken: BTreeSet<&str> = ended.iter().map(String::as_str).collect();
    assert_eq!(ended.len(), broken.len(), "an epoch ends once");
    let ends = words(&sandbox, "ends.");
    for end in &ends {
        let (code, nonce) = end.split_once(' ').expect("a code and a nonce");
        match code {
            "0" => assert!(!broken.contains(nonce), "{nonce} was broken and did not notice"),
            "76" => assert!(broken.contains(nonce), "{nonce} was lost, but to whom?"),
            _ => panic!("{end}"),
        }
    }
    untouched(&sandbox, &before);
    println!("{} holds, {} broken", ends.len(), broken.len());
}

/// A break of a stale lock is stopped when it has looked into the slot and found it empty; a contender
/// comes, and the break goes on once that one is inside, or waits. Says whether the contender's lock was
/// left alone, and how the break ended.
fn late_break(leave_out: &str) -> (bool, Option<i32>) {
    let sandbox = Sandbox::new();
    plant(&sandbox.lock(), &planted(60_000), 300_000);
    let breaker = stopped_at(sandbox.withlock().leave_out(leave_out).arg("break").lock(), "getdents64");
    assert_eq!(slots(&sandbox.lock()).len(), 1, "the break has made the slot");
    let mut gate = sandbox.gate();
    let run = sandbox.withlock().leave_out(leave_out).args(["-w", "60", "--on-lost", "warn"]).lock();
    let contender = run.sh(gate.script()).start();
    let mut is_inside = false;
    if leave_out.is_empty() {
        assert!(!gate.somebody_within(Duration::from_millis(500)), "the break has the guard");
    } else {
        gate.wait_inside();
        is_inside = true;
    }
    let held = inode(&sandbox.lock());
    breaker.send(Signal::SIGCONT);
    let finished = breaker.wait();
    if !is_inside {
        gate.wait_inside();
    }
    let kept = !is_inside || inode(&sandbox.lock()) == held;
    gate.open();
    let ended = contender.wait();
    (kept && ended.code() == Some(0), finished.code())
}

#[test]
fn a_break_that_is_held_up_at_the_worst_place_does_not_end_the_next_holders_lock() {
    assert_eq!(late_break(""), (true, Some(0)));
}

#[test]
fn a_break_without_veto_claim_and_verification_ends_the_next_holders_lock() {
    // The negative control of the test above.
    assert!(!late_break("veto,claim,verify,noreplace").0);
}
