//! Faults that others had: Ctrl-C, Ctrl-Z and fg, and a closed window; with a real pseudo-terminal and
//! real shells.

use std::fs;
use std::time::Duration;

use nix::sys::signal::Signal;

use crate::harness::{Gate, Sandbox, Shell, Terminal, calls, eventually, inode, mtime, process, with_record};

const CTRL_C: &str = "\x03";
const CTRL_D: &str = "\x04";
const CTRL_Z: &str = "\x1a";
const CTRL_BACKSLASH: &str = "\x1c";
const KILLS: &str = "trace=kill,tkill,tgkill,pidfd_send_signal";

/// A command that notes each of these signals and goes on until it is told to end.
fn counting(names: &str, gate: &Gate) -> String {
    let traps: String = names.split(' ').map(|name| format!("trap 'echo {name} >>got' {name}; ")).collect();
    format!("{traps}{}; until {}; do :; done", gate.enter(), gate.wait())
}

fn got(sandbox: &Sandbox) -> Vec<String> {
    fs::read_to_string(sandbox.path("got")).unwrap_or_default().lines().map(str::to_owned).collect()
}

#[track_caller]
fn wait_until_got(sandbox: &Sandbox, names: &[&str]) {
    eventually("the command got the signals", || {
        let got = got(sandbox);
        if got == names { Ok(()) } else { Err(got) }
    });
}

#[track_caller]
fn wait_for_state(pid: i32, state: char) {
    eventually(&format!("{pid} is in state {state}"), || match process(pid) {
        Some(process) if process.state == state => Ok(()),
        other => Err(other),
    });
}

#[test]
fn c32_keys_of_the_terminal_reach_the_command_once_and_the_wrapper_outlives_it() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let log = sandbox.io_path("strace");
    let run = sandbox.shipped().lock().sh(counting("INT QUIT WINCH", &gate)).traced(&log, &["-e", KILLS]);
    let (mut terminal, running) = Terminal::start(run);
    gate.wait_inside();
    terminal.types(CTRL_C);
    wait_until_got(&sandbox, &["INT"]);
    terminal.types(CTRL_BACKSLASH);
    wait_until_got(&sandbox, &["INT", "QUIT"]);
    terminal.types(CTRL_C);
    wait_until_got(&sandbox, &["INT", "QUIT", "INT"]);
    let resized = sandbox.program("stty").args(["-F", &format!("/proc/{}/fd/0", running.pid()), "rows", "33"]).run();
    resized.exited(0);
    wait_until_got(&sandbox, &["INT", "QUIT", "INT", "WINCH"]);
    assert!(sandbox.lock().exists());
    gate.open();
    running.wait().exited(0);
    assert_eq!(got(&sandbox).len(), 4);
    assert!(calls(&log).is_empty(), "nothing was sent again: {:?}", calls(&log));
    assert_eq!(sandbox.names(), ["got"]);
}

#[test]
fn c32_a_command_that_ctrl_c_ends_gives_130_and_the_lock_is_free() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let (mut terminal, running) = Terminal::start(sandbox.withlock().lock().sh(gate.script()));
    gate.wait_inside();
    terminal.types(CTRL_C);
    running.wait().exited(130);
    assert!(sandbox.names().is_empty());
    sandbox.wait_until_nothing_runs();
}

#[test]
fn c32_ctrl_c_ends_a_wrapper_that_waits_for_the_lock() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().lock().sh(gate.script()).start();
    gate.wait_inside();
    let (mut terminal, waiter) = Terminal::start(sandbox.withlock().lock().args(["--", "true"]));
    waiter.wait_asleep_in_flock();
    terminal.types(CTRL_C);
    let finished = waiter.wait();
    assert!(finished.signal() == Some(2) || finished.code() == Some(130), "{finished}");
    assert_eq!(sandbox.names(), ["a.lock"]);
    gate.open();
    holder.wait().exited(0);
}

fn stops_and_goes_on(sandbox: &Sandbox, mut shell: Shell) {
    let mut gate = sandbox.gate();
    fs::write(sandbox.path("job.sh"), gate.script()).expect("a script");
    shell.types_line("\"$WL\" --ttl 1s \"$L\" -- sh job.sh");
    let command = gate.wait_inside();
    let wrapper = shell.job();
    let held = (inode(&sandbox.lock()), with_record(&sandbox.lock()));
    for _ in 0..2 {
        shell.terminal.types(CTRL_Z);
        // The prompt comes back: the shell was told that the job has stopped.
        shell.prompts();
        wait_for_state(wrapper, 'T');
        wait_for_state(command, 'T');
        eventually("the lease has run out", || match mtime(&sandbox.lock()).elapsed() {
            Ok(age) if age > Duration::from_millis(1_100) => Ok(()),
            age => Err(age),
        });
        sandbox.withlock().arg("-n").lock().args(["--", "true"]).run().exited(75);
        let stopped_at = mtime(&sandbox.lock());
        shell.types_line("fg");
        eventually("it renews as soon as it goes on", || {
            let now = mtime(&sandbox.lock());
            if now > stopped_at { Ok(()) } else { Err(now) }
        });
        assert_eq!((inode(&sandbox.lock()), with_record(&sandbox.lock())), held);
    }
    gate.open();
    shell.prompts();
    shell.types_line("echo status=$?");
    shell.terminal.expect("status=0");
    assert!(!sandbox.lock().exists());
    shell.leave();
}

#[test]
fn c32_ctrl_z_stops_command_and_wrapper_the_prompt_comes_back_and_fg_goes_on_in_bash() {
    let sandbox = Sandbox::new();
    let shell = Shell::bash(&sandbox);
    stops_and_goes_on(&sandbox, shell);
}

#[test]
fn c32_ctrl_z_stops_command_and_wrapper_the_prompt_comes_back_and_fg_goes_on_in_dash() {
    let sandbox = Sandbox::new();
    let shell = Shell::dash(&sandbox);
    stops_and_goes_on(&sandbox, shell);
}

#[test]
fn ctrl_z_stops_a_wrapper_that_waits_for_the_lock_and_fg_lets_it_wait_on() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().lock().sh(gate.script()).start();
    gate.wait_inside();
    let mut shell = Shell::bash(&sandbox);
    shell.types_line("\"$WL\" -q \"$L\" -- sh -c 'echo got $((40 + 2))'");
    let waiter = shell.job();
    eventually("it is asleep", || crate::harness::asleep_in_flock(waiter));
    shell.terminal.types(CTRL_Z);
    shell.prompts();
    wait_for_state(waiter, 'T');
    shell.types_line("fg");
    eventually("it is asleep again", || crate::harness::asleep_in_flock(waiter));
    gate.open();
    holder.wait().exited(0);
    shell.terminal.expect("got 42");
    shell.prompts();
    shell.leave();
}

#[test]
fn a_background_job_that_reads_the_terminal_is_stopped_and_reads_it_in_the_foreground() {
    let sandbox = Sandbox::new();
    let mut shell = Shell::bash(&sandbox);
    shell.types_line("\"$WL\" \"$L\" -- cat &");
    shell.prompts();
    let wrapper = shell.job();
    wait_for_state(wrapper, 'T');
    shell.types_line("fg");
    // The command echoed by `fg`, then what the terminal echoes, then what `cat` writes.
    shell.terminal.expect("cat");
    eventually("it goes on", || match process(wrapper) {
        Some(process) if process.state != 'T' => Ok(()),
        other => Err(other),
    });
    shell.types_line("to the cat");
    shell.terminal.expect("to the cat");
    shell.terminal.expect("to the cat");
    shell.terminal.types(CTRL_D);
    shell.prompts();
    assert!(!sandbox.lock().exists());
    shell.leave();
}

#[test]
fn a_stopped_job_that_is_continued_in_the_background_ends_there_and_releases() {
    let sandbox = Sandbox::new();
    let mut shell = Shell::bash(&sandbox);
    let mut gate = sandbox.gate();
    fs::write(sandbox.path("job.sh"), gate.script()).expect("a script");
    shell.types_line("\"$WL\" \"$L\" -- sh job.sh");
    gate.wait_inside();
    shell.terminal.types(CTRL_Z);
    shell.prompts();
    shell.types_line("bg");
    shell.prompts();
    gate.open();
    eventually("it has released", || if sandbox.lock().exists() { Err(sandbox.names()) } else { Ok(()) });
    shell.leave();
}

#[test]
fn ctrl_z_where_no_shell_could_continue_it_does_not_hang() {
    // The wrapper leads its session: its group is orphaned, and the kernel does not stop it.
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let (mut terminal, running) = Terminal::start(sandbox.withlock().lock().sh(gate.script()));
    gate.wait_inside();
    terminal.types(CTRL_Z);
    terminal.expect("^Z");
    terminal.types(CTRL_C);
    running.wait().exited(130);
    assert!(sandbox.names().is_empty());
}

#[test]
fn a_hang_up_reaches_the_session_leader_and_is_passed_on_to_the_command_once() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let (mut terminal, running) = Terminal::start(sandbox.withlock().lock().sh(counting("HUP", &gate)));
    gate.wait_inside();
    terminal.hang_up();
    wait_until_got(&sandbox, &["HUP"]);
    assert!(sandbox.lock().exists(), "held while the command runs");
    gate.open();
    running.wait().exited(0);
    assert_eq!(got(&sandbox), ["HUP"]);
    assert_eq!(sandbox.names(), ["got"]);
}

#[test]
fn a_closed_window_ends_the_command_and_releases_the_lock() {
    // The wrapper as the leader itself, then below a shell that leads.
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let (mut terminal, running) = Terminal::start(sandbox.withlock().lock().sh(gate.script()));
    gate.wait_inside();
    terminal.hang_up();
    running.wait().exited(129);
    assert!(sandbox.names().is_empty());

    let mut shell = Shell::bash(&sandbox);
    fs::write(sandbox.path("job.sh"), gate.script()).expect("a script");
    shell.types_line("\"$WL\" \"$L\" -- sh job.sh");
    gate.wait_inside();
    shell.terminal.hang_up();
    shell.running.wait();
    sandbox.wait_until_nothing_runs();
    assert_eq!(sandbox.names(), ["job.sh"]);
}

#[test]
fn a_long_wait_on_a_terminal_shows_who_holds_the_lock() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().args(["--label", "nightly"]).lock().sh(gate.script()).start();
    gate.wait_inside();
    let (mut terminal, waiter) = Terminal::start(sandbox.withlock().lock().args(["--", "true"]));
    terminal.expect("withlock: ");
    terminal.expect(&format!("pid {}", holder.pid()));
    gate.open();
    holder.wait().exited(0);
    waiter.wait().exited(0);
    assert!(!terminal.shown().contains("\n\n"), "{:?}", terminal.shown());
}

#[test]
fn a_long_wait_on_a_narrow_terminal_is_one_row_that_is_drawn_anew() {
    const COLUMNS: u16 = 40;
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().lock().sh(gate.script()).start();
    gate.wait_inside();
    // Its width is that of standard error: standard output is elsewhere.
    let waiter = sandbox.withlock().args(["a.lock", "--", "true"]);
    let elsewhere = waiter.through(["/bin/sh", "-c", "exec \"$0\" \"$@\" >/dev/null"]);
    let (mut terminal, waiter) = Terminal::with_columns(COLUMNS, elsewhere);
    for _ in 0..3 {
        terminal.expect("\r\x1b[Kwithlock: a.lock: waiting for ");
    }
    gate.open();
    holder.wait().exited(0);
    waiter.wait().exited(0);
    let shown = terminal.shown();
    let drawn: Vec<&str> = shown.split("\r\x1b[K").collect();
    let (rows, ends) = (&drawn[1..drawn.len() - 1], [drawn[0], drawn[drawn.len() - 1]]);
    assert!(rows.len() >= 3 && ends == ["", ""], "{shown:?}");
    for row in rows {
        assert_eq!(row.chars().count(), usize::from(COLUMNS) - 1, "{row:?}");
    }
}

#[test]
fn a_signal_that_the_terminal_did_not_send_is_passed_on_there_too() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let (_terminal, running) = Terminal::start(sandbox.withlock().lock().sh(counting("INT TERM", &gate)));
    gate.wait_inside();
    running.send(Signal::SIGINT);
    wait_until_got(&sandbox, &["INT"]);
    running.send(Signal::SIGTERM);
    wait_until_got(&sandbox, &["INT", "TERM"]);
    gate.open();
    running.wait().exited(0);
}
