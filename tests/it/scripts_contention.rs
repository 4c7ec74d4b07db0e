//! Sixteen shells that lock a region of themselves, and are killed: no update is lost, and nobody is kept
//! out for longer than a dead holder's ttl.

use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::harness::{Moments, Running, Sandbox, eventually, record, send_to_group, shipped};

const SHELLS: usize = 16;
/// How many of them are killed in one test.
const KILLS: usize = 12;

/// A counter without any care of its own: the number of the highest file. It is read, dawdled over where
/// a rival would come between, and written. Built-ins only, so that a shell that is killed leaves nobody
/// behind who still writes; and an update that was lost shows as a second line in a file.
const INCREMENT: &str = "while [ -e count.$((n+1)) ]; do n=$((n+1)); done; \
                         i=0; while [ $i -lt 100 ]; do i=$((i+1)); done; %; \
                         echo $$ >>count.$((n+1))";

/// A shell that goes round until it is told to stop.
fn round_and_round(acquire: &str, before_writing: &str) -> String {
    format!(
        "n=0; while [ ! -e stop ]; do \
         nonce=$(\"$PROGRAM\" acquire -q {acquire} \"$L\") || exit; {}; \
         \"$PROGRAM\" release --nonce $nonce \"$L\" || exit; done",
        INCREMENT.replace('%', before_writing)
    )
}

/// How far the counter is, and how many updates were lost on the way.
fn count(sandbox: &Sandbox) -> (usize, usize) {
    let names = sandbox.names().into_iter().filter(|name| name.starts_with("count."));
    let lines: Vec<usize> =
        names.map(|name| std::fs::read_to_string(sandbox.path(name)).expect("a count").lines().count()).collect();
    (lines.len(), lines.iter().map(|lines| lines.saturating_sub(1)).sum())
}

fn start(sandbox: &Sandbox, text: &str, program: &Path, left_out: &str) -> Running {
    sandbox.sh(text).env("PROGRAM", program).env("WITHLOCK_LEAVE_OUT", left_out).own_group().start()
}

/// Kills shells at random moments, every other time the one that has the lock; and waits each time until
/// the others go on. The longest that took. `whole_groups`: now and then with all that it runs, `acquire`
/// itself included.
fn kill_and_go_on(sandbox: &Sandbox, text: &str, whole_groups: bool) -> Duration {
    let mut moments = Moments::new("shells that are killed");
    let mut shells: Vec<Running> = (0..SHELLS).map(|_| start(sandbox, text, shipped(), "")).collect();
    eventually("the counter moves", || if count(sandbox).0 > 0 { Ok(()) } else { Err(()) });
    let mut longest = Duration::ZERO;
    for kill in 0..KILLS {
        // A random moment is the point here; nothing is expected to have happened by then.
        std::thread::sleep(moments.within(Duration::from_millis(150)));
        let holder = record(&sandbox.lock()).and_then(|record| i32::try_from(record.pid).ok());
        let by_chance = usize::try_from(moments.number() % SHELLS as u64).expect("small");
        let held = shells.iter().position(|shell| Some(shell.pid()) == holder).filter(|_| kill % 2 == 0);
        let victim = shells.swap_remove(held.unwrap_or(by_chance));
        if whole_groups && moments.number().is_multiple_of(2) {
            send_to_group(victim.pid(), Signal::SIGKILL);
        } else {
            victim.send(Signal::SIGKILL);
        }
        let (killed, before) = (Instant::now(), count(sandbox).0);
        assert_eq!(victim.wait().signal(), Some(Signal::SIGKILL as i32));
        // Two: one may have been about to be written.
        eventually("the others go on", || {
            let now = count(sandbox).0;
            if now >= before + 2 { Ok(()) } else { Err((before, now)) }
        });
        longest = longest.max(killed.elapsed());
        shells.push(start(sandbox, text, shipped(), ""));
    }
    std::fs::write(sandbox.path("stop"), "").expect("a file");
    for finished in shells.into_iter().map(Running::wait) {
        finished.exited(0).silent();
    }
    let (counted, lost) = count(sandbox);
    println!("{counted} updates, the longest halt {longest:?}");
    assert_eq!(lost, 0, "updates were lost");
    longest
}

#[test]
fn sixteen_shells_that_renew_for_themselves_and_are_killed_lose_no_update_and_halt_for_no_longer_than_a_ttl() {
    let sandbox = Sandbox::in_memory();
    let text = round_and_round("--ttl 2s", "\"$PROGRAM\" renew --nonce $nonce \"$L\" || exit");
    let longest = kill_and_go_on(&sandbox, &text, true);
    assert!(longest < Duration::from_secs(2) + SLACK, "{longest:?}");
    // What a killed shell left expires as well.
    sandbox.withlock().args(["-q", "-w", "10s"]).lock().args(["--", "true"]).run().exited(0).silent();
}

#[test]
fn sixteen_shells_with_a_keeper_each_that_are_killed_lose_no_update_and_halt_for_a_moment_only() {
    let sandbox = Sandbox::in_memory();
    let text = round_and_round("--for-pid $$ --ttl 1h", ":");
    // Who kills `acquire` as well, between the grant and the keeper, waits for the ttl.
    let longest = kill_and_go_on(&sandbox, &text, false);
    assert!(longest < SLACK, "the ttl is an hour, but nobody waits for it: {longest:?}");
    sandbox.wait_until_nothing_runs();
    assert!(!sandbox.lock().exists(), "no keeper left a lock");
}

/// For a machine with more to do than this.
const SLACK: Duration = Duration::from_secs(4);

#[test]
fn the_same_shells_lose_updates_when_the_create_is_not_exclusive() {
    let sandbox = Sandbox::in_memory();
    let text = round_and_round("--ttl 2s", ":").replace("|| exit", "|| :");
    let program = Path::new(env!("CARGO_BIN_EXE_withlock"));
    let shells: Vec<Running> = (0..SHELLS).map(|_| start(&sandbox, &text, program, "exclusive")).collect();
    eventually("an update is lost", || match count(&sandbox) {
        (_, lost) if lost > 0 => Ok(()),
        counted => Err(counted),
    });
    std::fs::write(sandbox.path("stop"), "").expect("a file");
    for shell in shells {
        shell.wait();
    }
}
