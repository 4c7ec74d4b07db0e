//! Fencing tokens: they only grow, and a writer that has seen a larger one refuses the smaller.

use std::path::Path;

use nix::sys::signal::Signal;

use crate::harness::{
    Finished, Gate, Run, Running, Sandbox, descendants, eventually, plant, plant_bytes, planted, record, send, slots,
};
use crate::reserve_numbers::numbers;

const FENCED_WRITE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/fenced-write.sh");

/// The program under its own name, for scripts that call it.
pub(crate) fn with_program_in_path<'s>(sandbox: &'s Sandbox, run: Run<'s>) -> Run<'s> {
    sandbox.public_binary();
    let dir = sandbox.public_binary();
    let dir = dir.parent().expect("a directory").display().to_string();
    run.env("PATH", format!("{dir}:/usr/local/bin:/usr/bin:/bin"))
}

/// Takes the lock with a fence and prints what the command is told.
fn token(sandbox: &Sandbox) -> u64 {
    let finished = sandbox.withlock().args(["-q", "--fence", "numbers"]).lock().sh("echo \"$WITHLOCK_FENCE\"").run();
    finished.exited(0).silent();
    finished.out().trim_end().parse().expect("a number")
}

#[test]
fn a_token_grows_from_hold_to_hold_and_stands_in_the_record() {
    let sandbox = Sandbox::new();
    numbers(&sandbox);
    assert_eq!([token(&sandbox), token(&sandbox), token(&sandbox)], [1, 2, 3]);
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().args(["--fence", "numbers"]).lock().sh(gate.script()).start();
    gate.wait_inside();
    assert_eq!(record(&sandbox.lock()).expect("a record").fence, Some(4));
    gate.open();
    holder.wait().exited(0);
    assert_eq!(sandbox.names(), ["numbers"]);
}

#[test]
fn without_a_fence_the_command_is_told_no_token_of_somebody_elses() {
    let sandbox = Sandbox::new();
    let run = sandbox.withlock().lock().sh("echo \"${WITHLOCK_FENCE-none}\"").env("WITHLOCK_FENCE", "7");
    assert_eq!(run.run().exited(0).out(), "none\n");
}

#[test]
fn a_token_is_larger_than_every_number_handed_out_before_it() {
    let sandbox = Sandbox::new();
    let dir = numbers(&sandbox);
    std::fs::write(dir.join("floor"), "41\n").expect("a floor");
    std::fs::write(dir.join("claim-42"), "").expect("a marker");
    assert_eq!(token(&sandbox), 43);
    let reserved = sandbox.withlock().args(["reserve", "numbers"]).run();
    assert_eq!(reserved.out(), "44\n");
    assert_eq!(token(&sandbox), 45);
}

/// Eight loops take the lock in turn, and each hold writes its token below the last one's; meanwhile
/// others reserve numbers in the same directory, so that some tokens are had without its lock.
fn tokens_in_order_of_holds(hold: &str) -> Vec<u64> {
    let sandbox = Sandbox::in_memory();
    numbers(&sandbox);
    let text = format!("i=0; while [ $i -lt 10 ]; do i=$((i+1)); {hold} || exit; done");
    let holders: Vec<Running> = (0..8).map(|_| sandbox.sh(&text).start()).collect();
    let reserving = "while [ ! -e stop ]; do \"$WL\" reserve --wait 0 numbers >/dev/null 2>&1 || exit; done";
    let others: Vec<Running> = (0..2).map(|_| sandbox.sh(reserving).start()).collect();
    for finished in holders.into_iter().map(Running::wait) {
        finished.exited(0).silent();
    }
    std::fs::write(sandbox.path("stop"), "").expect("a file");
    for finished in others.into_iter().map(Running::wait) {
        finished.exited(0);
    }
    let order = std::fs::read_to_string(sandbox.path("order")).expect("tokens");
    order.lines().map(|line| line.parse().expect("a token")).collect()
}

#[test]
fn tokens_grow_in_the_order_of_the_holds_whoever_else_takes_numbers() {
    let hold = "\"$WL\" -q --fence numbers \"$L\" -- /bin/sh -c 'echo $WITHLOCK_FENCE >>order'";
    let tokens = tokens_in_order_of_holds(hold);
    assert_eq!(tokens.len(), 80);
    assert!(tokens.is_sorted_by(|earlier, later| earlier < later), "{tokens:?}");
}

#[test]
fn numbers_that_are_reserved_before_the_lock_is_had_are_not_in_the_order_of_the_holds() {
    let hold = "n=$(\"$WL\" reserve numbers 2>/dev/null) && \"$WL\" -q \"$L\" -- /bin/sh -c \"echo $n >>order\"";
    let numbers = tokens_in_order_of_holds(hold);
    assert_eq!(numbers.len(), 80);
    assert!(!numbers.is_sorted(), "in order by luck: the test has no power");
}

#[test]
fn a_signal_while_the_token_is_waited_for_does_not_leak_the_lock() {
    let sandbox = Sandbox::new();
    numbers(&sandbox);
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().arg("numbers/lock").sh(gate.script()).start();
    gate.wait_inside();
    // The wait is short: on a busy machine the signal may come too late for it, and is sent again.
    let was_in_time = (0..100).any(|_| {
        let waiting = sandbox.withlock().args(["--fence", "numbers"]).lock().args(["--", "sleep", "600"]).start();
        eventually("it has created its lock", || if sandbox.lock().exists() { Ok(()) } else { Err(()) });
        waiting.send(Signal::SIGTERM);
        let was_in_time = record(&sandbox.lock()).is_none();
        // It is handed to the command, once there is one.
        waiting.wait().exited(128 + 15).silent();
        assert_eq!(sandbox.names(), ["numbers"]);
        was_in_time
    });
    assert!(was_in_time, "no signal came while the token was waited for");
    gate.open();
    holder.wait().exited(0);
}

#[test]
fn a_token_grows_also_while_another_has_the_lock_of_the_numbers() {
    let sandbox = Sandbox::new();
    let dir = numbers(&sandbox);
    assert_eq!(token(&sandbox), 1);
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().arg("numbers/lock").sh(gate.script()).start();
    gate.wait_inside();
    assert_eq!([token(&sandbox), token(&sandbox)], [2, 3]);
    assert_eq!(std::fs::read_to_string(dir.join("floor")).expect("a floor"), "1\n", "not ours to write");
    gate.open();
    holder.wait().exited(0);
    assert_eq!(token(&sandbox), 4);
}

#[test]
fn the_lock_of_the_numbers_can_itself_be_fenced() {
    let sandbox = Sandbox::new();
    numbers(&sandbox);
    for expected in ["1\n", "2\n"] {
        let run = sandbox.withlock().args(["--fence", "./numbers/", "numbers/lock"]).sh("echo $WITHLOCK_FENCE");
        let finished = run.run();
        finished.exited(0).silent();
        assert_eq!(finished.out(), expected);
    }
}

#[test]
fn a_fence_that_cannot_work_is_found_before_the_lock_is_taken_and_leaves_nothing() {
    let sandbox = Sandbox::new();
    let dir = numbers(&sandbox);
    plant(&sandbox.path("held.lock"), &planted(60_000), 0);
    for lock in ["a.lock", "held.lock"] {
        let finished = sandbox.withlock().args(["--fence", "missing", lock, "--", "touch", "ran"]).run();
        finished.exited(73).one_line(&["no such directory: missing"]);
    }
    // The numbers have run out: the grant is taken back.
    std::fs::write(dir.join("floor"), "18446744073709551615\n").expect("a floor");
    let finished = sandbox.withlock().args(["--fence", "numbers", "a.lock", "--", "touch", "ran"]).run();
    finished.exited(73).one_line(&["no number is left"]);
    assert_eq!(sandbox.names(), ["held.lock", "numbers"]);
}

#[test]
fn a_dead_holders_epoch_and_its_successors_have_tokens_in_that_order() {
    let sandbox = Sandbox::new();
    numbers(&sandbox);
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().args(["--fence", "numbers", "--ttl", "1s"]).lock().sh(gate.script()).start();
    let command = gate.wait_inside();
    holder.send(Signal::SIGKILL);
    send(command, Signal::SIGKILL);
    holder.wait();
    assert_eq!(token(&sandbox), 2);
    assert_eq!(slots(&sandbox.lock()).len(), 1);
    // A maker that died before it wrote its record had a number as well, or none: either way it is past.
    plant_bytes(&sandbox.lock(), b"", 61_000);
    std::fs::write(sandbox.path("numbers/claim-3"), "").expect("a marker");
    assert_eq!(token(&sandbox), 4);
}

/// A holder whose guard others do not see, as on another host; it hands its token to `fenced-write.sh`
/// when it is let on.
fn fenced_writer<'s>(sandbox: &'s Sandbox, front: &str, content: &str) -> Run<'s> {
    let text = format!("{front}; echo {content} | sh {FENCED_WRITE} report");
    let run = sandbox.withlock().args(["--fence", "numbers", "--ttl", "1s", "--on-lost", "warn"]);
    with_program_in_path(sandbox, run.leave_out("guard").lock().sh(text))
}

fn content(path: impl AsRef<Path>) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

/// Suspends a holder and all that it runs until another has taken its lock and written, then lets it write.
fn write_late(sandbox: &Sandbox, mut gate: Gate, late: Run<'_>) -> Finished {
    let late = late.start();
    let command = gate.wait_inside();
    // As a suspended host: first the wrapper, so that it cannot stop with its command.
    late.send(Signal::SIGSTOP);
    for process in descendants(late.pid()) {
        send(process.pid, Signal::SIGSTOP);
    }
    let successor = fenced_writer(sandbox, ":", "from-the-successor").run();
    successor.exited(0);
    assert_eq!(
        (content(sandbox.path("report")), content(sandbox.path("report.token"))),
        two("from-the-successor", "2")
    );
    assert!(crate::harness::process(command).is_some_and(|process| process.state == 'T'), "still suspended");
    for process in descendants(late.pid()) {
        send(process.pid, Signal::SIGCONT);
    }
    late.send(Signal::SIGCONT);
    gate.open();
    late.wait()
}

fn two(report: &str, token: &str) -> (String, String) {
    (format!("{report}\n"), format!("{token}\n"))
}

#[test]
fn a_holder_suspended_past_its_ttl_on_another_host_is_robbed_and_its_late_write_is_refused() {
    let sandbox = Sandbox::new();
    numbers(&sandbox);
    let gate = sandbox.gate();
    let late = fenced_writer(&sandbox, &gate.script(), "too-late");
    let finished = write_late(&sandbox, gate, late);
    // The command's own failure passes through; the loss was learnt on waking.
    finished.exited(1);
    let err = finished.err();
    assert!(err.contains("refused: token 1, but 2 has written already\n"), "{err}");
    assert!(err.contains("the lock was lost"), "{err}");
    assert_eq!(
        (content(sandbox.path("report")), content(sandbox.path("report.token"))),
        two("from-the-successor", "2")
    );
    eventually("no crumbs", || {
        let names = sandbox.names();
        if names.iter().any(|name| name.starts_with("report.") && name != "report.token") { Err(names) } else { Ok(()) }
    });
}

#[test]
fn c48_a_paused_holder_that_asks_before_it_commits_does_not_commit() {
    let sandbox = Sandbox::new();
    numbers(&sandbox);
    let gate = sandbox.gate();
    let asks = sandbox.withlock().args(["--fence", "numbers", "--ttl", "1s", "--on-lost", "warn"]).leave_out("guard");
    let asks = asks.lock().sh(format!("{}; \"$WL\" check || exit 5; echo too-late >report", gate.script()));
    let finished = write_late(&sandbox, gate, asks);
    finished.exited(5);
    assert!(finished.err().contains("not held: "), "{finished}");
    assert_eq!(content(sandbox.path("report")), "from-the-successor\n");
}

#[test]
fn inspect_shows_the_token_and_does_not_take_numbers_for_locks() {
    let sandbox = Sandbox::new();
    numbers(&sandbox);
    for _ in 0..3 {
        token(&sandbox);
    }
    let text = "\"$WL\" inspect \"$L\"; \"$WL\" inspect --json \"$L\"; \"$WL\" inspect numbers";
    let finished = sandbox.withlock().args(["--fence", "numbers"]).lock().sh(text).run();
    finished.exited(0).silent();
    let out = finished.out();
    let fields = out.lines().find_map(|line| line.trim_start().strip_prefix("fence ")).map(str::trim);
    assert_eq!(fields, Some("4"), "{out}");
    let json = out.lines().find(|line| line.starts_with('{')).expect("a document");
    let json: serde_json::Value = serde_json::from_str(json).expect("JSON");
    assert_eq!(json["locks"][0]["holder"]["fence"], 4);
    assert!(!out.contains("claim-"), "{out}");
}

#[test]
fn a_writer_that_does_not_look_at_the_token_overwrites_its_successor() {
    let sandbox = Sandbox::new();
    numbers(&sandbox);
    let gate = sandbox.gate();
    let careless = sandbox.withlock().args(["--fence", "numbers", "--ttl", "1s", "--on-lost", "warn"]);
    let careless = careless.leave_out("guard").lock().sh(format!("{}; echo too-late >report", gate.script()));
    // The command ended well and the lock was lost: 76, but too late for the report.
    write_late(&sandbox, gate, careless).exited(76);
    assert_eq!(content(sandbox.path("report")), "too-late\n");
}

#[test]
fn below_an_ancestor_that_has_the_lock_the_token_is_that_locks_and_no_other() {
    for (a_fenced, b_fenced, token) in
        [(true, true, "6"), (true, false, "6"), (false, true, "none"), (false, false, "none")]
    {
        let sandbox = Sandbox::new();
        for (dir, claim) in [("fa", "claim-5"), ("fb", "claim-99")] {
            std::fs::create_dir(sandbox.path(dir)).expect("a directory");
            std::fs::write(sandbox.path(dir).join(claim), "").expect("a marker");
        }
        let fence = |is_fenced: bool, dir: &str| if is_fenced { format!("--fence {dir}") } else { String::new() };
        let text = format!(
            "\"$WL\" {} b -- sh -c '\"$WL\" --reentrant OPTIONS a -- sh -c \"echo \\$WITHLOCK_NONCE \\${{WITHLOCK_FENCE-none}}\"'; echo $WITHLOCK_NONCE {token}",
            fence(b_fenced, "fb")
        );
        for options in ["", "--also c"] {
            let run = if a_fenced { sandbox.withlock().args(["--fence", "fa"]) } else { sandbox.withlock() };
            let finished = run.arg("a").sh(text.replace("OPTIONS", options)).env("WITHLOCK_FENCE", "3").run();
            let out = finished.exited(0).silent().out();
            let (told, own) = out.trim_end().split_once('\n').expect("two lines");
            // The second time it has the next number.
            let own = if options.is_empty() { own.to_owned() } else { own.replace(" 6", " 7") };
            assert_eq!(told, own, "{a_fenced} {b_fenced} {options}");
        }
    }
}
