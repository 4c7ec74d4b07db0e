//! Faults that others had: signals, and the end of a command with all that it started.

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::harness::{Moments, Sandbox, calls, children, eventually, process, record, send, status_field, with_record};

/// Real-time signals queue: one that came twice is seen twice. nix has no name for them.
fn send_real_time(pid: i32, above_the_least: i32) {
    let number = 34 + above_the_least;
    let sent = std::process::Command::new("/bin/sh").args(["-c", &format!("kill -{number} {pid}")]).status();
    assert!(sent.expect("a shell").success());
}

/// A command that writes a line for each signal that it gets and ends when it is told to.
fn counting(names: &str) -> String {
    let mut text = String::new();
    for name in names.split(' ') {
        text.push_str(&format!("trap 'echo {name} >>got' {name}; "));
    }
    text
}

/// Waits for the gate again and again, since a trapped signal interrupts the read.
fn until_told(gate: &crate::harness::Gate) -> String {
    format!("{}; until {}; do :; done", gate.enter(), gate.wait())
}

fn got(sandbox: &Sandbox) -> Vec<String> {
    fs::read_to_string(sandbox.path("got")).unwrap_or_default().lines().map(str::to_owned).collect()
}

#[test]
fn c30_a_signal_to_the_wrapper_reaches_the_child_exactly_once_and_the_lock_stays_until_it_has_ended() {
    let members = [
        (Signal::SIGTERM, "TERM"),
        (Signal::SIGHUP, "HUP"),
        (Signal::SIGINT, "INT"),
        (Signal::SIGQUIT, "QUIT"),
        (Signal::SIGUSR1, "USR1"),
        (Signal::SIGUSR2, "USR2"),
        (Signal::SIGALRM, "ALRM"),
        (Signal::SIGWINCH, "WINCH"),
        (Signal::SIGPIPE, "PIPE"),
        (Signal::SIGCONT, "CONT"),
    ];
    let names = members.map(|(_, name)| name).join(" ");
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    // An `exec` of strace would change who gets what: the number of signals sent is counted beside it.
    let log = sandbox.io_path("strace");
    let run = sandbox.shipped().lock().sh(counting(&names) + &until_told(&gate));
    let running = run.traced_with_all_signals(&log, &["-e", "trace=kill,tkill,tgkill,pidfd_send_signal"]).start();
    gate.wait_inside();
    let nonce = with_record(&sandbox.lock()).nonce;
    for (count, (signal, name)) in members.iter().enumerate() {
        running.send(*signal);
        eventually("the child got it", || {
            let got = got(&sandbox);
            if got.last().is_some_and(|last| last == name) && got.len() == count + 1 { Ok(()) } else { Err(got) }
        });
        assert_eq!(record(&sandbox.lock()).map(|record| record.nonce), Some(nonce), "{name}");
    }
    gate.open();
    running.wait().exited(0);
    assert_eq!(got(&sandbox).join(" "), names, "each exactly once");
    assert_eq!(calls(&log).len(), members.len(), "{:?}", calls(&log));
    assert!(sandbox.names() == ["got"], "{:?}", sandbox.names());
}

#[test]
fn c30_queued_real_time_signals_all_reach_the_child_none_twice() {
    // bash knows traps for real-time signals; the child is python-free on purpose.
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let body = format!("trap 'echo R >>got' 37; {}", until_told(&gate));
    let running = sandbox.withlock().lock().args(["--", "bash", "-c", &body]).start();
    gate.wait_inside();
    for count in 1..=5 {
        send_real_time(running.pid(), 3);
        eventually("the child got it", || {
            let got = got(&sandbox);
            if got.len() == count { Ok(()) } else { Err(got) }
        });
    }
    gate.open();
    running.wait().exited(0);
    assert_eq!(got(&sandbox).len(), 5);
}

#[test]
fn c30_in_300_random_moments_a_signal_leaks_no_lock_and_leaves_no_orphan() {
    let mut moments = Moments::new("random signals");
    let signals = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGUSR1];
    let mut seen = BTreeSet::new();
    let sandbox = Sandbox::in_memory();
    for at in 0..300 {
        let signal = signals[at % signals.len()];
        let running = sandbox.withlock().lock().args(["--", "sleep", "1000"]).start();
        let moment = moments.within(Duration::from_millis(10));
        // This is the random moment itself, not a wait for anything.
        std::thread::sleep(moment);
        running.send(signal);
        let finished = running.wait();
        let number = signal as i32;
        let by_signal = finished.signal() == Some(number) || finished.code() == Some(128 + number);
        assert!(by_signal, "{signal} after {moment:?}: {finished}");
        assert!(sandbox.names().is_empty(), "{signal} after {moment:?}: {:?}", sandbox.names());
        assert!(sandbox.processes().is_empty(), "{signal} after {moment:?}: {:?}", sandbox.processes());
        seen.insert(finished.code().is_some());
    }
    // The power of the test: some came before the command ran, some after.
    println!("ended by a status of its own: {seen:?}");
}

#[test]
fn c30_a_signal_between_the_grant_and_the_spawn_leaks_no_lock() {
    // Held for a while before it forks, and before it writes its record: then the signal comes.
    for call in ["clone,clone3,vfork,fork", "write", "flock", "fstat,newfstatat"] {
        let sandbox = Sandbox::new();
        let log = sandbox.io_path("strace");
        let run = sandbox.shipped().lock().args(["--", "sleep", "1000"]).delayed(&log, call, 300);
        let running = run.start();
        eventually("the lock file is there", || fs::metadata(sandbox.lock()).map(drop));
        running.send(Signal::SIGTERM);
        let finished = running.wait();
        assert!(finished.code() == Some(143) || finished.signal() == Some(15), "{call}: {finished}");
        assert!(sandbox.names().is_empty(), "{call}: {:?}", sandbox.names());
        sandbox.wait_until_nothing_runs();
    }
}

#[test]
fn c30_the_commands_end_is_not_missed_while_another_signal_is_being_read() {
    // Without a lock of its own the wrapper has no other reason to wake than the signal it must not lose.
    let sandbox = Sandbox::new();
    crate::harness::plant(&sandbox.lock(), &crate::harness::planted(3_600_000), 0);
    let mut gate = sandbox.gate();
    let run = sandbox.shipped().args(["-n", "--on-busy", "run"]).lock().sh(format!("trap '' USR1; {}", gate.script()));
    let running = run.delayed(&sandbox.io_path("strace"), "read", 500).start();
    let command = gate.wait_inside();
    // Asleep first: what it read before its sleep is done with.
    let wait_for_state = |pid: i32, state: char| {
        eventually("the state", || match process(pid) {
            Some(process) if process.state == state => Ok(()),
            other => Err(other),
        });
    };
    wait_for_state(running.pid(), 'S');
    running.send(Signal::SIGUSR1);
    wait_for_state(running.pid(), 't');
    gate.open();
    wait_for_state(command, 'Z');
    running.wait().exited(0);
}

#[test]
fn c30_a_signal_while_it_waits_ends_the_wrapper_at_once_and_the_holder_is_untouched() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().args(["--ttl", "1h"]).lock().sh(gate.script()).start();
    gate.wait_inside();
    let before = crate::harness::Snapshot::of(&sandbox.lock());
    for (signal, code) in [(Signal::SIGTERM, 143), (Signal::SIGINT, 130), (Signal::SIGHUP, 129), (Signal::SIGQUIT, 131)]
    {
        let mut fastest = Duration::MAX;
        for _ in 0..5 {
            let waiter = sandbox.withlock().args(["-w", "1h"]).lock().args(["--", "touch", "ran"]).start();
            waiter.wait_asleep_in_flock();
            let sent = Instant::now();
            waiter.send(signal);
            let finished = waiter.wait();
            let by_signal = finished.signal() == Some(code - 128) || finished.code() == Some(code);
            assert!(by_signal, "{finished}");
            fastest = fastest.min(finished.ended - sent);
        }
        assert!(fastest < Duration::from_millis(100), "{signal}: {fastest:?}");
    }
    assert_eq!(crate::harness::Snapshot::of(&sandbox.lock()), before);
    assert_eq!(sandbox.names(), ["a.lock"]);
    gate.open();
    holder.wait().exited(0);
}

/// A tree of processes: one that ignores TERM, one in a session of its own, one whose parent has died.
/// Each says through the gate that it is there; there are four.
fn tree_of_processes(gate: &crate::harness::Gate) -> String {
    let (enter, member) = (gate.enter(), "exec sleep 1000");
    format!(
        "sh -c '{enter}; {member}' & \
         sh -c 'trap \"\" TERM; {enter}; while :; do sleep 1000; done' & \
         setsid sh -c '{enter}; {member}' & \
         (sh -c '{enter}; {member}' & ) ; \
         wait"
    )
}

#[test]
fn c31_after_a_loss_the_command_is_ended_with_all_its_descendants() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let run = sandbox.withlock().args(["--kill-after", "300ms"]).lock().sh(tree_of_processes(&gate));
    let running = run.start();
    for _ in 0..4 {
        gate.wait_inside();
    }
    fs::remove_file(sandbox.lock()).expect("the lock is there");
    let finished = running.wait();
    finished.exited(76).says(&["a.lock", "lost"]);
    let left = sandbox.processes();
    assert!(left.is_empty(), "still there when the wrapper ends: {left:?}");
}

#[test]
fn c44_max_hold_ends_the_whole_tree_also_what_ignores_term() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let options = ["--max-hold", "1s", "--kill-after", "300ms"];
    let running = sandbox.withlock().args(options).lock().sh(tree_of_processes(&gate)).start();
    let begun = Instant::now();
    for _ in 0..4 {
        gate.wait_inside();
    }
    let finished = running.wait();
    finished.exited(124).says(&["a.lock"]);
    assert!(finished.ended - begun >= Duration::from_millis(800), "{finished}");
    assert!(sandbox.processes().is_empty(), "{:?}", sandbox.processes());
    assert!(sandbox.names().is_empty(), "released: {:?}", sandbox.names());
}

/// The lines about signals of /proc/self/status, as a program shows them. Signals 32 and 33 are left
/// out: they are the C library's own, and its posix_spawn ignores them in every child.
fn signal_lines(status: &str) -> Vec<(String, u64)> {
    const LIBRARYS_OWN: u64 = 1 << 31 | 1 << 32;
    let parse = |line: &str| {
        let (name, mask) = line.split_once(":\t")?;
        let mask = u64::from_str_radix(mask, 16).ok()?;
        (name.starts_with("Sig") && name != "SigQ").then(|| (name.to_owned(), mask & !LIBRARYS_OWN))
    };
    status.lines().filter_map(parse).collect()
}

#[test]
fn c34_ignored_and_blocked_signals_are_the_same_with_and_without_the_wrapper() {
    let sandbox = Sandbox::new();
    let settings: [&[&str]; 6] = [
        &[],
        &["--ignore-signal=HUP"],
        &["--ignore-signal=CHLD"],
        &["--ignore-signal=HUP,INT,QUIT,TERM,USR1,PIPE,TSTP,TTIN,TTOU,ALRM,WINCH"],
        &["--block-signal=USR2,TERM,ALRM"],
        &["--ignore-signal=USR1,ALRM", "--block-signal=HUP,USR1,INT,PIPE"],
    ];
    for options in settings {
        let seen = |through: bool| {
            let run = if through { sandbox.shipped().lock().arg("--").arg("cat") } else { sandbox.program("cat") };
            let finished = run.arg("/proc/self/status").through(["env"].iter().chain(options)).run();
            finished.exited(0).silent();
            signal_lines(&finished.out())
        };
        assert_eq!(seen(true), seen(false), "{options:?}");
        assert_eq!(seen(true).len(), 4);
    }
}

#[test]
fn c34_with_sigchld_ignored_the_commands_status_is_still_reported() {
    let sandbox = Sandbox::new();
    let through = ["env", "--ignore-signal=CHLD"];
    sandbox.shipped().lock().sh("exit 7").through(through).run().exited(7).silent();
    sandbox.shipped().args(["--skip-if", "exit 1"]).lock().sh("exit 7").through(through).run().exited(7).silent();
}

#[test]
fn c34_the_masks_are_the_same_after_a_wait_too() {
    // The wait for the lock has a handler and a mask of its own; neither may reach the command.
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().lock().sh(gate.script()).start();
    gate.wait_inside();
    let waiter = sandbox
        .withlock()
        .args(["-w", "1h"])
        .lock()
        .args(["--", "cat", "/proc/self/status"])
        .through(["env", "--ignore-signal=HUP,ALRM", "--block-signal=USR2"])
        .start();
    waiter.wait_asleep_in_flock();
    gate.open();
    holder.wait().exited(0);
    let after_wait = waiter.wait();
    let direct = sandbox
        .program("cat")
        .arg("/proc/self/status")
        .through(["env", "--ignore-signal=HUP,ALRM", "--block-signal=USR2"])
        .run();
    assert_eq!(signal_lines(&after_wait.out()), signal_lines(&direct.out()));
}

#[test]
fn a_waiter_whose_users_queue_of_signals_is_full_gives_up_with_its_own_code_and_line() {
    // Then the kernel does not say who has sent a signal, not even the one that wakes the waiter.
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = sandbox.shipped().lock().sh(gate.script()).start();
    gate.wait_inside();
    let waiter =
        sandbox.shipped().args(["-w", "0.2"]).lock().args(["--", "true"]).through(["prlimit", "--sigpending=0"]);
    waiter.run().exited(75).one_line(&["still held after"]);
    let waiter = sandbox.shipped().lock().args(["--", "true"]).through(["prlimit", "--sigpending=0"]).start();
    waiter.wait_asleep_in_flock();
    // A stranger's alarm still ends it, named or not.
    waiter.send(Signal::SIGALRM);
    assert_eq!(waiter.wait().signal(), Some(14));
    gate.open();
    holder.wait().exited(0);
}

#[test]
fn c34_a_signal_that_was_ignored_on_entry_does_not_end_a_waiter() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().lock().sh(gate.script()).start();
    gate.wait_inside();
    let ignoring = ["env", "--ignore-signal=HUP,TERM,ALRM"];
    let waiter = sandbox.withlock().lock().args(["--", "true"]).through(ignoring).start();
    waiter.wait_asleep_in_flock();
    for signal in [Signal::SIGHUP, Signal::SIGTERM, Signal::SIGALRM] {
        waiter.send(signal);
    }
    gate.open();
    holder.wait().exited(0);
    waiter.wait().exited(0);
    // One that was not ignored does end it, the alarm that it uses for itself as well.
    let holder = sandbox.withlock().lock().sh(gate.script()).start();
    gate.wait_inside();
    for signal in [Signal::SIGALRM, Signal::SIGUSR1, Signal::SIGPIPE] {
        let waiter = sandbox.withlock().lock().args(["--", "true"]).start();
        waiter.wait_asleep_in_flock();
        waiter.send(signal);
        if signal == Signal::SIGPIPE {
            // A line that nobody reads must not end the wait, so this one waits with it.
            gate.open();
            waiter.wait();
        } else {
            assert_eq!(waiter.wait().signal(), Some(signal as i32));
        }
    }
    holder.wait().exited(0);
}

/// `unshare` gives the wrapper a pid namespace in which it is process 1. Needs root.
const AS_FIRST: [&str; 5] = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"];

/// The pid, seen from here, of the wrapper that is process 1 of the namespace below `unshare`.
fn first_process(unshare_pid: i32) -> i32 {
    eventually("process 1 runs", || {
        let found = children(unshare_pid);
        match found.as_slice() {
            [first] if first.name == "withlock" => Ok(first.pid),
            _ => Err(found),
        }
    })
}

#[test]
fn c40_as_process_1_it_acts_on_term_and_reports_the_commands_status() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let running = sandbox.withlock().lock().sh(gate.script()).through(AS_FIRST).start();
    gate.wait_inside();
    let first = first_process(running.pid());
    assert_eq!(
        status_field(first, "NSpid").and_then(|pids| pids.split('\t').nth(1).map(str::to_owned)),
        Some("1".into())
    );
    send(first, Signal::SIGTERM);
    running.wait().exited(143);
    assert!(sandbox.names().is_empty(), "{:?}", sandbox.names());
    sandbox.wait_until_nothing_runs();
}

#[test]
fn c40_as_process_1_it_acts_on_term_while_it_waits_for_the_lock() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().lock().sh(gate.script()).start();
    gate.wait_inside();
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let waiter = sandbox.withlock().args(["-w", "1h"]).lock().args(["--", "true"]).through(AS_FIRST).start();
        let first = first_process(waiter.pid());
        eventually("it is asleep", || crate::harness::asleep_in_flock(first));
        send(first, signal);
        waiter.wait().exited(128 + signal as u8);
    }
    assert_eq!(sandbox.names(), ["a.lock"]);
    gate.open();
    holder.wait().exited(0);
}

#[test]
fn c40_as_process_1_it_reaps_orphans_and_never_takes_their_status_for_the_commands() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    // Twenty orphans that end with 9 while the command runs; the command itself ends with 7.
    let body = format!(
        "for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do (sh -c 'exit 9' &); done; {}; exit 7",
        gate.script()
    );
    let running = sandbox.withlock().lock().sh(body).through(AS_FIRST).start();
    gate.wait_inside();
    let first = first_process(running.pid());
    eventually("every orphan is reaped", || {
        let left: Vec<_> = children(first).into_iter().filter(|process| process.state == 'Z').collect();
        let live = children(first).len();
        if left.is_empty() && live == 1 { Ok(()) } else { Err((left, live)) }
    });
    gate.open();
    running.wait().exited(7);
}

#[test]
fn ctrl_c_before_there_is_a_command_ends_the_run_and_gives_the_lock_back() {
    let sandbox = Sandbox::new();
    let log = sandbox.io_path("strace");
    let run = sandbox.withlock().delayed(&log, "rt_sigpending", 2_000).lock().args(["--", "echo", "ran"]).start();
    crate::harness::eventually("the lock is taken", || {
        crate::harness::record(&sandbox.lock()).map(drop).ok_or("there is no record")
    });
    run.send(Signal::SIGINT);
    assert_eq!(run.wait().exited(130).silent().out(), "");
    assert!(!sandbox.lock().exists());
}

#[test]
fn c44_max_hold_ends_the_whole_tree_also_where_a_sandbox_knows_no_pidfd() {
    let sandbox = Sandbox::new();
    let log = sandbox.io_path("strace");
    for (calls, error) in [("pidfd_open", "ENOSYS"), ("pidfd_open", "EPERM"), ("pidfd_send_signal", "EPERM")] {
        let inject = format!("inject={calls}:error={error}");
        let run = sandbox.withlock().args(["--max-hold", "200ms", "--kill-after", "100ms"]).lock();
        let run = run.sh("trap '' TERM; sleep 1000 & sleep 1000; :");
        let finished = run.traced(&log, &["-e", &format!("trace={calls}"), "-e", &inject]).run();
        finished.exited(124).one_line(&["a.lock: the command has run for 200ms, its --max-hold: ending it"]);
        sandbox.wait_until_nothing_runs();
        assert!(sandbox.names().is_empty(), "{calls} {error}: {:?}", sandbox.names());
    }
}

#[test]
fn a_broken_pipe_does_not_end_the_wait_and_is_for_the_command() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().lock().sh(gate.script()).start();
    gate.wait_inside();
    let waiter = sandbox.withlock().lock().args(["--", "sleep", "1000"]).start();
    waiter.wait_asleep_in_flock();
    waiter.send(Signal::SIGPIPE);
    waiter.wait_asleep_in_flock();
    gate.open();
    holder.wait().exited(0).silent();
    waiter.wait().exited(141).silent();
    assert_eq!(sandbox.names(), [""; 0]);
}
