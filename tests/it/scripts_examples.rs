//! The example scripts of the manual, run for real.

use crate::harness::{Fifo, Run, Running, Sandbox, eventually, slots};
use crate::reserve_fence::with_program_in_path;

fn example<'s>(sandbox: &'s Sandbox, name: &str) -> Run<'s> {
    let path = format!("{}/tests/data/{name}", env!("CARGO_MANIFEST_DIR"));
    with_program_in_path(sandbox, sandbox.program(path))
}

#[test]
fn a_script_that_locks_a_region_of_itself_loses_no_count_among_twelve() {
    let sandbox = Sandbox::new();
    let copies: Vec<Running> =
        (0..12).map(|_| example(&sandbox, "region-lock.sh").args(["app.lock", "counter"]).start()).collect();
    let mut counted: Vec<usize> = Vec::new();
    for finished in copies.into_iter().map(Running::wait) {
        let out = finished.exited(0).out();
        counted.push(out.trim_end().strip_prefix("done: ").and_then(|count| count.parse().ok()).expect("a count"));
    }
    counted.sort_unstable();
    assert_eq!(counted, (1..=12).collect::<Vec<usize>>());
    assert_eq!(std::fs::read_to_string(sandbox.path("counter")).expect("a counter"), "12\n");
    sandbox.wait_until_nothing_runs();
    assert_eq!(slots(&sandbox.path("app.lock")).len(), 12, "each ended through its slot");
    assert!(!sandbox.path("app.lock").exists());
}

#[test]
fn a_script_that_locks_itself_as_a_whole_keeps_its_arguments_and_runs_once_at_a_time() {
    let sandbox = Sandbox::new();
    let run = || example(&sandbox, "whole-script.sh").args(["app.lock", "one", "two  words", ""]);
    let finished = run().run();
    finished.exited(0).silent();
    assert_eq!(finished.out(), "alone with 3 arguments: one two  words \n");
    assert_eq!(sandbox.names(), [""; 0], "released");
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().arg("app.lock").sh(gate.script()).start();
    gate.wait_inside();
    run().run().exited(75).one_line(&["held by"]);
    gate.open();
    holder.wait().exited(0);
}

#[test]
fn c42_a_script_that_locks_itself_believes_no_variable_of_a_hold_that_is_over() {
    let sandbox = Sandbox::new();
    // What a background process has that outlived the hold.
    let environment = sandbox.withlock().arg("app.lock").args(["--", "env"]).run().out();
    let left: Vec<(&str, &str)> = environment
        .lines()
        .filter(|line| line.starts_with("WITHLOCK_"))
        .filter_map(|line| line.split_once('='))
        .collect();
    assert!(left.len() >= 4, "{environment}");
    let run = || {
        left.iter()
            .fold(example(&sandbox, "whole-script.sh").arg("app.lock"), |run, (name, value)| run.env(name, value))
    };
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().arg("app.lock").sh(gate.script()).start();
    gate.wait_inside();
    run().run().exited(75).one_line(&["held by"]);
    gate.open();
    holder.wait().exited(0);
    assert_eq!(run().run().exited(0).out(), "alone with 0 arguments: \n");
}

/// `bounded-hold.sh` with its list on a FIFO, so that it does one name at a time.
fn bounded_hold(sandbox: &Sandbox) -> (Running, Fifo) {
    let list = sandbox.fifo();
    for name in ["one", "two"] {
        std::fs::write(sandbox.path(name), "text\n").expect("a file");
    }
    (example(sandbox, "bounded-hold.sh").arg("app.lock").arg(list.shown()).start(), list)
}

fn wait_for(sandbox: &Sandbox, name: &str) {
    eventually(name, || if sandbox.path(name).exists() { Ok(()) } else { Err(sandbox.names()) });
}

#[test]
fn a_script_that_renews_for_itself_stops_when_the_lock_is_lost_and_touches_nothing_more() {
    let sandbox = Sandbox::new();
    let (script, mut list) = bounded_hold(&sandbox);
    list.say("one");
    wait_for(&sandbox, "one.gz");
    std::fs::remove_file(sandbox.path("app.lock")).expect("removed");
    list.say("two");
    let finished = script.wait();
    finished.exited(1).one_line(&["not held with nonce", "nobody holds it"]);
    assert_eq!(sandbox.names(), ["one.gz", "two"]);
}

#[test]
fn a_script_that_renews_for_itself_releases_at_its_end() {
    let sandbox = Sandbox::new();
    for name in ["one", "two"] {
        std::fs::write(sandbox.path(name), "text\n").expect("a file");
    }
    std::fs::write(sandbox.path("list"), "one\ntwo\n").expect("a list");
    example(&sandbox, "bounded-hold.sh").args(["app.lock", "list"]).run().exited(0).silent();
    assert!(!sandbox.path("app.lock").exists());
    assert!(sandbox.path("one.gz").exists() && sandbox.path("two.gz").exists());
}

#[test]
fn invoices_have_a_number_of_their_own_with_the_lock_and_without() {
    let sandbox = Sandbox::new();
    std::fs::create_dir_all(sandbox.path("invoices/numbers")).expect("directories");
    let script = format!("{}/tests/data/invoice.sh", env!("CARGO_MANIFEST_DIR"));
    let invoice = |text: &str, wait: &str| {
        let run = sandbox.withlock().args(["--wait", wait, "--on-busy", "run", "invoices.lock", "--"]);
        with_program_in_path(&sandbox, run).arg(&script).arg("invoices").input(text.as_bytes())
    };
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().arg("invoices.lock").sh(gate.script()).start();
    gate.wait_inside();
    let copies: Vec<(String, Running)> = (0..12)
        .map(|number| format!("invoice {number}"))
        .map(|text| (text.clone(), invoice(&text, "0").start()))
        .collect();
    let mut numbers = Vec::new();
    for (text, copy) in copies {
        let finished = copy.wait();
        finished.exited(0);
        let number: u64 = finished.out().trim_end().parse().expect("a number");
        let filed = std::fs::read_to_string(sandbox.path(format!("invoices/invoice-{number}"))).expect("an invoice");
        assert_eq!(filed, text);
        numbers.push(number);
    }
    numbers.sort_unstable();
    assert_eq!(numbers, (1..=12).collect::<Vec<u64>>());
    assert!(!sandbox.path("invoices/list").exists(), "nobody without the lock touches the list");
    gate.open();
    holder.wait().exited(0);
    invoice("the last", "30s").run().exited(0).silent();
    let list = std::fs::read_to_string(sandbox.path("invoices/list")).expect("a list");
    assert_eq!(list.lines().count(), 13);
}
