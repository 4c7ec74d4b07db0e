//! The harness itself: that it sees what it should see, and leaves nothing behind.

use std::time::Duration;

use nix::sys::signal::Signal;

use crate::harness::{Sandbox, Terminal, calls, descendants, eventually, process, set_mtime, status_field};

#[test]
fn a_sandbox_ends_all_that_was_started_in_it_and_is_removed() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let body = format!("setsid sh -c 'trap \"\" TERM HUP; {}' & sleep 1000 & exit 0", gate.script());
    sandbox.sh(body).run().exited(0);
    let orphan = gate.wait_inside();
    assert_eq!(sandbox.processes().len(), 2, "{:?}", sandbox.processes());
    let dir = sandbox.work();
    drop(sandbox);
    assert!(!dir.exists());
    assert!(process(orphan).is_none_or(|process| process.state == 'Z'));
}

#[test]
fn the_end_of_a_program_its_outputs_and_its_deadline_are_seen() {
    let sandbox = Sandbox::in_memory();
    let finished = sandbox.sh("echo out; echo err >&2; exit 7").run();
    assert_eq!((finished.code(), finished.out(), finished.err()), (Some(7), "out\n".into(), "err\n".into()));
    let running = sandbox.program("sleep").arg("1000").start();
    let running = running.wait_within(Duration::from_millis(50)).err().expect("it still runs");
    running.send(Signal::SIGKILL);
    assert_eq!(running.wait().signal(), Some(9));
}

#[test]
fn a_process_asleep_in_flock_is_seen_and_one_that_sleeps_elsewhere_is_not() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = sandbox.program("flock").lock().args(["-c", &gate.script()]).start();
    gate.wait_inside();
    let waiter = sandbox.program("flock").lock().arg("true").start();
    waiter.wait_asleep_in_flock();
    assert!(crate::harness::asleep_in_flock(holder.pid()).is_err());
    gate.open();
    holder.wait().exited(0);
    waiter.wait().exited(0);
}

#[test]
fn strace_keeps_the_programs_pid_counts_its_calls_and_kills_it_at_one_of_them() {
    let sandbox = Sandbox::new();
    let log = sandbox.io_path("strace");
    let finished = sandbox.sh("echo $$; : >made").traced(&log, &["-e", "trace=openat"]).run();
    finished.exited(0);
    let all = calls(&log);
    let made = all.iter().find(|call| call.line.contains("\"made\"")).expect("the call");
    let killed = sandbox.path("killed");
    let inject = format!("inject=openat:signal=KILL:when={}", made.nth);
    let running = sandbox.sh("echo $$; : >killed").traced(&log, &["-e", "trace=openat", "-e", &inject]).start();
    let pid = running.pid();
    let finished = running.wait();
    assert_eq!((finished.signal(), finished.out()), (Some(9), format!("{pid}\n")));
    assert!(!killed.exists(), "killed before the call");
    let late = sandbox.sh(": >late").delayed(&log, "openat", 100).run();
    late.exited(0);
    assert!(late.took > Duration::from_millis(100));
}

#[test]
fn a_terminal_has_a_session_a_keyboard_and_an_end() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let (mut terminal, running) = Terminal::start(sandbox.sh(format!("tty; {}", gate.script())));
    gate.wait_inside();
    terminal.expect("/dev/pts/");
    terminal.types("\x03");
    assert_eq!(running.wait().signal(), Some(2));

    let (mut terminal, running) = Terminal::start(sandbox.sh(gate.script()));
    gate.wait_inside();
    terminal.hang_up();
    assert_eq!(running.wait().signal(), Some(1));
}

#[test]
fn proc_is_read_right() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let running = sandbox.sh(format!("(({}); exit 1); exit 2", gate.script())).start();
    gate.wait_inside();
    let below = eventually("all of it is asleep", || {
        let below = descendants(running.pid());
        let asleep = !below.is_empty() && below.iter().all(|process| process.state == 'S');
        if asleep { Ok(below) } else { Err(below) }
    });
    assert_eq!(status_field(running.pid(), "PPid"), Some(std::process::id().to_string()));
    gate.open();
    eventually("it ends", || if process(below[0].pid).is_none() { Ok(()) } else { Err(()) });
    running.wait().exited(2);
}

#[test]
fn time_stamps_before_1970_and_far_ahead_can_be_set() {
    let sandbox = Sandbox::new();
    let file = sandbox.path("file");
    std::fs::write(&file, "").expect("a file");
    for seconds in [-1_000_000_i64, -1, 0, 4_000_000_000] {
        let shift = Duration::from_secs(seconds.unsigned_abs());
        let epoch = std::time::SystemTime::UNIX_EPOCH;
        let time = if seconds < 0 { epoch - shift } else { epoch + shift };
        set_mtime(&file, time);
        let found = crate::harness::mtime(&file);
        let apart = found.duration_since(time).or_else(|_| time.duration_since(found)).expect("near");
        assert!(apart <= Duration::from_secs(1), "{seconds}: {found:?}");
    }
}
