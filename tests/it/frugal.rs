//! What an uncontended hold costs, and that the shipped program has nothing of the tests in it.

use std::collections::BTreeSet;
use std::path::Path;

use withlock::sys::hook::STEPS;

use crate::harness::{Call, Sandbox, calls, shipped};

#[test]
fn an_uncontended_hold_makes_at_most_40_file_and_descriptor_calls() {
    let sandbox = Sandbox::new();
    let traced = |args: &[&str]| {
        let log = sandbox.io_path("strace");
        sandbox.shipped().args(args).traced(&log, &["-e", "trace=%file,%desc"]).run().exited(0);
        calls(&log)
    };
    let start_up = traced(&["--version"]).len();
    let hold = traced(&["a.lock", "--", "true"]);
    let names: Vec<&str> = hold.iter().map(|call| &*call.name).collect();
    println!("{} calls, {start_up} of them to start up: {names:?}", hold.len());
    assert!(hold.len() <= start_up + 40, "{} beyond {start_up}: {names:?}", hold.len() - start_up);
}

#[test]
fn the_common_options_make_the_same_system_calls_as_none() {
    let sandbox = Sandbox::new();
    let names = |args: &[&str]| {
        let log = sandbox.io_path("strace");
        sandbox.shipped().args(args).traced(&log, &[]).run().exited(0);
        // How far the process for the command has come when it is wanted is chance: it is asleep, and woken, or not yet.
        calls(&log).into_iter().map(|call| call.name).filter(|name| name != "futex").collect::<Vec<_>>()
    };
    let bare = names(&["a.lock", "--", "true"]);
    for options in [&["-n"][..], &["-w", "5"], &["--ttl", "90s", "--evict-dead"], &["--on-busy=skip", "-q"]] {
        assert_eq!(names(&[options, &["a.lock", "--", "true"]].concat()), bare, "{options:?}");
    }
    // The known-bad case: what is left to the parser starts in another way.
    assert_ne!(names(&["-nq", "a.lock", "--", "true"]), bare);
}

/// What a waiter does that gets in and lets go again, with `behind` others who wait with it, and one who comes once
/// it is in. The trace, whose guard it waited for, and where in the trace it lets go of which.
fn passed_on(behind: usize) -> (Vec<Call>, Option<String>, Vec<usize>) {
    let sandbox = Sandbox::new();
    let (mut first_gate, mut second_gate) = (sandbox.gate(), sandbox.gate());
    let first = sandbox.shipped().lock().sh(first_gate.script()).start();
    first_gate.wait_inside();
    let log = sandbox.io_path("strace");
    let second = sandbox.shipped().traced(&log, &[]).lock().sh(second_gate.script()).start();
    second.wait_asleep_in_flock();
    let wait = || {
        let waiter = sandbox.shipped().lock().args(["--", "true"]).start();
        waiter.wait_asleep_in_flock();
        waiter
    };
    let mut others: Vec<_> = (0..behind).map(|_| wait()).collect();
    first_gate.open();
    second_gate.wait_inside();
    others.push(wait());
    second_gate.open();
    for run in [first, second].into_iter().chain(others) {
        run.wait().exited(0);
    }
    let calls = calls(&log);
    let waited = calls.iter().rposition(|call| call.line.contains("LOCK_EX)") && call.line.ends_with("= 0"));
    let waited = descriptor(&calls[waited.expect("it waited")]);
    let unlocks = (0..calls.len()).filter(|index| calls[*index].line.contains("LOCK_UN")).collect();
    (calls, waited, unlocks)
}

fn descriptor(call: &Call) -> Option<String> {
    call.line.split(['(', ',']).nth(1).map(str::to_owned)
}

/// Where the release is, and where the command is reaped.
fn released_and_reaped(calls: &[Call]) -> (usize, usize) {
    let at = |found: &dyn Fn(&Call) -> bool| calls.iter().rposition(found).unwrap_or_else(|| panic!("{calls:#?}"));
    (at(&|call| call.name.starts_with("rename")), at(&|call| call.name == "wait4" && !call.line.contains("= 0")))
}

#[test]
fn the_lock_is_free_before_the_command_is_reaped_and_the_one_waiter_is_woken_at_once() {
    let (calls, waited, unlocks) = passed_on(0);
    let (released, reaped) = released_and_reaped(&calls);
    // Nobody sleeps on the guard that it has waited for itself.
    let [unlock] = unlocks[..] else { panic!("{calls:#?}") };
    assert!(released < unlock && unlock < reaped, "{calls:#?}");
    assert_ne!(descriptor(&calls[unlock]), waited, "{calls:#?}");
}

#[test]
fn whoever_waits_longest_is_let_in_before_those_who_came_later_are_woken() {
    let (calls, waited, unlocks) = passed_on(1);
    let (released, reaped) = released_and_reaped(&calls);
    let [first_unlock, last_unlock] = unlocks[..] else { panic!("{calls:#?}") };
    assert!(released < first_unlock && first_unlock < reaped && reaped < last_unlock, "{calls:#?}");
    // Those who came before this epoch sleep on the guard of the one before.
    assert_eq!(descriptor(&calls[first_unlock]), waited, "{calls:#?}");
    assert_ne!(descriptor(&calls[last_unlock]), waited, "{calls:#?}");
    // Until one of them has the lock again, or for so many looks.
    let looks: Vec<&Call> = calls[reaped..last_unlock].iter().filter(|call| call.line.contains("a.lock\"")).collect();
    let is_taken = |call: &&Call| call.line.contains("S_IFREG");
    assert!(looks.last().is_some_and(is_taken) || looks.len() == 10, "{calls:#?}");
    assert!(looks.iter().rev().skip(1).all(|call| !is_taken(call)), "{calls:#?}");
}

/// The variables that only a test build reads.
const VARIABLES: [&str; 2] = ["WITHLOCK_LEAVE_OUT", "WITHLOCK_WALL_CLOCK"];

/// What only the switches put into a program: their variables, and those of their names that are no words.
fn traces_of_switches(program: &std::path::Path) -> BTreeSet<&'static str> {
    let content = std::fs::read(program).expect("the program");
    let names = STEPS.iter().map(|(_, name)| *name).filter(|name| name.contains('-'));
    let is_in = |name: &&str| content.windows(name.len()).any(|window| window == name.as_bytes());
    names.chain(VARIABLES).filter(is_in).collect()
}

/// Whether a contender gets in beside a holder, if both are told to leave these steps out.
fn lets_two_in(program: &std::path::Path) -> bool {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let all = STEPS.iter().map(|(_, name)| *name).collect::<Vec<_>>().join(",");
    let holder = sandbox.program(program).leave_out(&all).args(["--on-lost", "warn"]).lock().sh(gate.script()).start();
    gate.wait_inside();
    let contender = sandbox.program(program).leave_out(&all).arg("-n").lock().args(["--", "true"]).run();
    gate.open();
    holder.wait();
    assert!(matches!(contender.code(), Some(0 | 75)), "{contender}");
    contender.code() == Some(0)
}

#[test]
fn the_shipped_program_has_no_trace_of_the_switches_and_ignores_them() {
    assert_eq!(traces_of_switches(shipped()), BTreeSet::new());
    assert!(!lets_two_in(shipped()));
    // The known-bad case: the test build has all of them, and obeys.
    let test_build = std::path::Path::new(env!("CARGO_BIN_EXE_withlock"));
    assert_eq!(
        traces_of_switches(test_build).len(),
        VARIABLES.len() + STEPS.iter().filter(|(_, name)| name.contains('-')).count()
    );
    assert!(lets_two_in(test_build));
}

/// Names of the functions that call something which the C library selects at its start, from an unstripped
/// program: calls of that kind go through addresses that are set only then.
fn callers_of_selected_functions(program: &std::path::Path) -> BTreeSet<String> {
    let tool = |name: &str, args: &[&str]| {
        let output = std::process::Command::new(name).args(args).arg(program).output().expect("binutils");
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    // Where the selected addresses are kept.
    let cells: BTreeSet<String> = tool("readelf", &["-rW"])
        .lines()
        .filter(|line| line.contains("R_X86_64_IRELATIV"))
        .filter_map(|line| Some(line.split_whitespace().next()?.trim_start_matches('0').to_owned()))
        .collect();
    assert!(!cells.is_empty(), "a static program of this C library has such functions");
    let (mut stubs, mut callers) = (BTreeSet::new(), BTreeSet::new());
    let listing = tool("objdump", &["-d", "--no-show-raw-insn", "-C"]);
    let instruction = |line: &str| -> Option<(String, String)> {
        let (address, text) = line.trim_start().split_once(":\t")?;
        Some((address.to_owned(), text.to_owned()))
    };
    for line in listing.lines() {
        let Some((address, text)) = instruction(line) else { continue };
        let cell = text.split_once("# ").map(|(_, rest)| rest.split_whitespace().next().unwrap_or("").to_owned());
        if text.contains("jmp") && cell.is_some_and(|cell| cells.contains(&cell)) {
            let at = u64::from_str_radix(&address, 16).expect("an address");
            // A stub may begin with a landing pad of four bytes.
            stubs.extend([format!("{at:x}"), format!("{:x}", at - 4)]);
        }
    }
    let mut function = String::new();
    for line in listing.lines() {
        if let Some(name) = line.strip_suffix(">:").and_then(|line| line.split_once(" <")) {
            function = name.1.to_owned();
        } else if let Some((_, text)) = instruction(line)
            && let Some(target) = text.strip_prefix("call").or_else(|| text.strip_prefix("jmp"))
            && target.split_whitespace().next().is_some_and(|target| stubs.contains(target))
        {
            callers.insert(function.clone());
        }
    }
    callers
}

#[test]
fn nothing_of_ours_calls_what_the_c_library_selects_at_its_start() {
    // The test build: nothing is stripped from it, and what is not inlined there calls no less.
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_withlock"));
    let symbols = std::process::Command::new("readelf").arg("-sW").arg(program).output().expect("binutils").stdout;
    if !String::from_utf8_lossy(&symbols).contains("withlock_start") {
        println!("this build has no early start: another C library, or another machine");
        return;
    }
    let callers = callers_of_selected_functions(program);
    // The known-good case: the C library's own functions do, so the search finds such calls.
    assert!(callers.contains("getenv"), "{callers:?}");
    let ours: Vec<_> = callers.iter().filter(|name| name.contains("::") || name.starts_with('<')).collect();
    assert!(ours.is_empty(), "{ours:?}");
}

#[test]
fn while_a_tree_is_being_ended_the_other_processes_of_the_host_are_not_looked_at_again_and_again() {
    // On a busy machine a traced run may come to few looks, and then shows nothing.
    let runs = (0..5).map(|_| looks_at_a_tree_that_is_being_ended());
    let (looks, whole) = runs.into_iter().find(|(looks, _)| *looks >= 10).expect("a run with ten looks");
    println!("{looks} looks, {whole} of them at all processes");
    // For TERM and for CONT, and to be sure at the end.
    assert!((3..=6).contains(&whole), "all processes were looked at {whole} times");
}

/// How often the tree of a command that has to be ended was looked at, and how often every process of the host.
fn looks_at_a_tree_that_is_being_ended() -> (usize, usize) {
    let sandbox = Sandbox::new();
    let log = sandbox.io_path("strace");
    // Orphans of threads and of processes that have ended: all that is left is ours.
    let body =
        "trap '' TERM; (trap '' TERM; (sleep 1000; sleep 1000) & sleep 1000; sleep 1000) & sleep 1000; sleep 1000";
    let run = sandbox.withlock().args(["--max-hold", "200ms", "--kill-after", "1500ms"]).lock().sh(body);
    let finished = run.traced(&log, &["-e", "trace=openat"]).run();
    finished.exited(124);
    // The tracer may end a moment later.
    sandbox.wait_until_nothing_runs();
    let opened = |name: &str| calls(&log).iter().filter(|call| call.line.contains(name)).count();
    (opened(&format!("\"/proc/{}/task\"", running_pid(&log))), opened("\"/proc/1/stat\""))
}

/// Whose trace it is: the process whose own tasks were looked at first.
fn running_pid(log: &Path) -> i32 {
    let pid = |line: &str| line.split_once("\"/proc/")?.1.split_once("/task\"")?.0.parse().ok();
    calls(log).iter().find_map(|call| pid(&call.line)).expect("a look at its own tasks")
}
