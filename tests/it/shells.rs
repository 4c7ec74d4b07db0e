//! The keyboard, in the shells that people type into: bash, dash and zsh, interactive and with job control,
//! each on a terminal of its own. What the wrapper changes of a job is what a person would notice.
//!
//! Needs bash, dash, zsh, perl and coreutils' timeout and stty.

use std::fs;
use std::time::Duration;

use nix::sys::signal::Signal;

use crate::harness::{Sandbox, Shell, children, eventually, inode, mtime, process, send, status_field, with_record};

const CTRL_C: &str = "\x03";
const CTRL_Z: &str = "\x1a";
const CTRL_BACKSLASH: &str = "\x1c";

/// Does the same in every shell, each with a directory of its own.
fn in_every_shell(act: impl Fn(&Sandbox, Shell)) {
    for start in Shell::ALL {
        let sandbox = Sandbox::new();
        let shell = start(&sandbox);
        // Shown if the test fails.
        println!("in {}", shell.name());
        act(&sandbox, shell);
    }
}

#[track_caller]
fn wait_for_state(pid: i32, state: char) {
    eventually(&format!("{pid} is in state {state}"), || match process(pid) {
        Some(process) if process.state == state => Ok(()),
        other => Err(other),
    });
}

#[track_caller]
fn wait_until_it_goes_on(pid: i32) {
    eventually(&format!("{pid} goes on"), || match process(pid) {
        Some(process) if process.state != 'T' => Ok(()),
        other => Err(other),
    });
}

/// COMMAND, below the wrapper.
#[track_caller]
fn command_of(wrapper: i32) -> i32 {
    eventually("the command runs", || match children(wrapper).as_slice() {
        [command] if command.name != "withlock" => Ok(command.pid),
        others => Err(others.to_vec()),
    })
}

/// A program that does as editors and shells do: it takes the terminal for a process group of its own.
const TAKES_THE_TERMINAL: &str = r#"
use POSIX;
setpgid(0, 0) or die;
$SIG{TTOU} = "IGNORE";
tcsetpgrp(0, $$) or die;
$SIG{TTOU} = "DEFAULT";
$SIG{WINCH} = sub { print "resized.\n" };
$| = 1;
print "inside.\n";
while (!defined($line = <STDIN>)) { exit 3 unless $!{EINTR} }
chomp $line;
print "got:$line.\n";
"#;

#[test]
fn a_command_in_the_foreground_reads_what_is_typed() {
    in_every_shell(|sandbox, mut shell| {
        shell.types_line("\"$WL\" \"$L\" -- sh -c 'echo asks.; read line; echo got:$line.'");
        shell.terminal.expect("\nasks.");
        shell.types_line("a word");
        shell.terminal.expect("got:a word.");
        shell.prompts_with_status(0);
        assert!(sandbox.names().is_empty());
        shell.leave();
    });
}

#[test]
fn ctrl_c_and_ctrl_backslash_end_command_and_wrapper_and_the_lock_is_free() {
    in_every_shell(|sandbox, mut shell| {
        let mut gate = sandbox.gate();
        fs::write(sandbox.path("job.sh"), gate.script()).expect("a script");
        shell.types_line("ulimit -c 0");
        shell.prompts();
        for (key, status) in [(CTRL_C, 130), (CTRL_BACKSLASH, 131)] {
            shell.types_line("\"$WL\" \"$L\" -- sh job.sh");
            gate.wait_inside();
            shell.terminal.types(key);
            shell.prompts_with_status(status);
            assert_eq!(sandbox.names(), ["job.sh"]);
        }
        shell.leave();
    });
}

#[test]
fn ctrl_c_ends_a_wait_for_the_lock_and_the_holder_stays() {
    in_every_shell(|sandbox, mut shell| {
        let mut gate = sandbox.gate();
        let holder = sandbox.withlock().lock().sh(gate.script()).start();
        gate.wait_inside();
        shell.types_line("\"$WL\" -q \"$L\" -- true");
        let waiter = shell.job();
        eventually("it is asleep", || crate::harness::asleep_in_flock(waiter));
        shell.terminal.types(CTRL_C);
        shell.prompts_with_status(130);
        assert_eq!(sandbox.names(), ["a.lock"]);
        gate.open();
        holder.wait().exited(0);
        shell.leave();
    });
}

#[test]
fn a_job_is_stopped_listed_continued_in_the_background_and_finished_in_the_foreground() {
    in_every_shell(|sandbox, mut shell| {
        let mut gate = sandbox.gate();
        fs::write(sandbox.path("job.sh"), format!("{}; read line; echo got:$line.", gate.script())).expect("a script");
        shell.types_line("\"$WL\" --ttl 1s \"$L\" -- sh job.sh");
        let command = gate.wait_inside();
        let wrapper = shell.job();
        let held = (inode(&sandbox.lock()), with_record(&sandbox.lock()));
        shell.terminal.types(CTRL_Z);
        shell.prompts();
        wait_for_state(wrapper, 'T');
        wait_for_state(command, 'T');
        shell.types_line("jobs");
        shell.terminal.expect(match shell.name() {
            "zsh" => "suspended",
            _ => "Stopped",
        });
        shell.prompts();
        eventually("the lease has run out", || match mtime(&sandbox.lock()).elapsed() {
            Ok(age) if age > Duration::from_millis(1_100) => Ok(()),
            age => Err(age),
        });
        sandbox.withlock().arg("-n").lock().args(["--", "true"]).run().exited(75);
        let stopped_at = mtime(&sandbox.lock());
        shell.types_line("bg");
        shell.prompts();
        wait_until_it_goes_on(wrapper);
        wait_until_it_goes_on(command);
        eventually("it renews as soon as it goes on", || {
            let now = mtime(&sandbox.lock());
            if now > stopped_at { Ok(()) } else { Err(now) }
        });
        // Reads from the terminal, which it may not in the background.
        gate.open();
        wait_for_state(command, 'T');
        wait_for_state(wrapper, 'T');
        shell.types_line("echo still $((40 + 2)) here");
        shell.terminal.expect("still 42 here");
        shell.prompts();
        assert_eq!((inode(&sandbox.lock()), with_record(&sandbox.lock())), held);
        shell.types_line("fg");
        wait_until_it_goes_on(command);
        shell.types_line("the end");
        shell.terminal.expect("got:the end.");
        shell.prompts_with_status(0);
        assert_eq!(sandbox.names(), ["job.sh"]);
        shell.leave();
    });
}

#[test]
fn a_job_started_in_the_background_reads_the_terminal_once_it_is_in_the_foreground() {
    in_every_shell(|sandbox, mut shell| {
        shell.types_line("\"$WL\" \"$L\" -- sh -c 'read line; echo got:$line.' &");
        shell.prompts();
        let wrapper = shell.job();
        wait_for_state(wrapper, 'T');
        let command = command_of(wrapper);
        wait_for_state(command, 'T');
        shell.types_line("echo still $((40 + 2)) here");
        shell.terminal.expect("still 42 here");
        shell.prompts();
        sandbox.withlock().arg("-n").lock().args(["--", "true"]).run().exited(75);
        shell.types_line("fg");
        wait_until_it_goes_on(command);
        shell.types_line("a word");
        shell.terminal.expect("got:a word.");
        shell.prompts_with_status(0);
        assert!(sandbox.names().is_empty());
        shell.leave();
    });
}

#[test]
fn a_closed_window_ends_a_running_job_and_a_stopped_one_and_both_release() {
    for start in Shell::ALL {
        for is_stopped in [false, true] {
            let sandbox = Sandbox::new();
            let mut shell = start(&sandbox);
            println!("{} stopped: {is_stopped}", shell.name());
            let mut gate = sandbox.gate();
            fs::write(sandbox.path("job.sh"), gate.script()).expect("a script");
            shell.types_line("\"$WL\" \"$L\" -- sh job.sh");
            gate.wait_inside();
            let wrapper = shell.job();
            if is_stopped {
                shell.terminal.types(CTRL_Z);
                shell.prompts();
                wait_for_state(wrapper, 'T');
            }
            shell.terminal.hang_up();
            shell.running.wait();
            sandbox.wait_until_nothing_runs();
            assert_eq!(sandbox.names(), ["job.sh"]);
        }
    }
}

#[test]
fn a_reader_that_leaves_a_pipeline_ends_the_writer_before_it_and_the_lock_is_free() {
    in_every_shell(|sandbox, mut shell| {
        shell.types_line("{ \"$WL\" \"$L\" -- cat; echo $? >status; } | head -n 1");
        eventually("it holds", || if sandbox.lock().exists() { Ok(()) } else { Err(sandbox.names()) });
        shell.types_line("one");
        // Echoed by the terminal, then written by head.
        shell.terminal.expect("one");
        shell.terminal.expect("one");
        eventually("head has left", || {
            let found = crate::harness::descendants(shell.running.pid());
            if found.iter().any(|process| process.name == "head" && process.state != 'Z') { Err(found) } else { Ok(()) }
        });
        shell.types_line("two");
        shell.prompts();
        eventually("the writer's status", || match fs::read_to_string(sandbox.path("status")) {
            Ok(text) if text == "141\n" => Ok(()),
            other => Err(other),
        });
        assert_eq!(sandbox.names(), ["status"]);
        shell.leave();
    });
}

#[test]
fn a_window_that_changes_its_size_tells_the_command_once() {
    in_every_shell(|sandbox, mut shell| {
        let mut gate = sandbox.gate();
        let script = format!(
            "trap 'echo WINCH >>got' WINCH; trap 'echo INT >>got' INT; {}; until {}; do :; done",
            gate.enter(),
            gate.wait()
        );
        fs::write(sandbox.path("job.sh"), script).expect("a script");
        shell.types_line("\"$WL\" \"$L\" -- sh job.sh");
        gate.wait_inside();
        let got = |what: &[&str]| {
            eventually("the command got the signals", || {
                let text = fs::read_to_string(sandbox.path("got")).unwrap_or_default();
                if text.lines().eq(what.iter().copied()) { Ok(()) } else { Err(text) }
            });
        };
        let terminal = format!("/proc/{}/fd/0", shell.running.pid());
        sandbox.program("stty").args(["-F", &terminal, "rows", "33"]).run().exited(0);
        got(&["WINCH"]);
        // A second one would have come by the time that another signal has.
        shell.terminal.types(CTRL_C);
        got(&["WINCH", "INT"]);
        gate.open();
        shell.prompts_with_status(0);
        assert!(!sandbox.lock().exists());
        shell.leave();
    });
}

#[test]
fn a_command_that_takes_the_terminal_for_its_own_group_is_given_it_back_when_it_goes_on() {
    in_every_shell(|sandbox, mut shell| {
        fs::write(sandbox.path("job.pl"), TAKES_THE_TERMINAL).expect("a script");
        shell.types_line("\"$WL\" \"$L\" -- perl job.pl");
        shell.terminal.expect("\ninside.");
        let wrapper = shell.job();
        let command = command_of(wrapper);
        let group = status_field(command, "NSpgid").expect("a group");
        assert_eq!(group, command.to_string(), "a group of its own");
        for _ in 0..2 {
            shell.terminal.types(CTRL_Z);
            shell.prompts();
            wait_for_state(wrapper, 'T');
            wait_for_state(command, 'T');
            // In the background it goes on, and is stopped again: the terminal is the shell's.
            eventually("a time stamp that another can be told from", || match mtime(&sandbox.lock()).elapsed() {
                Ok(age) if age > Duration::from_millis(20) => Ok(()),
                age => Err(age),
            });
            let stopped_at = mtime(&sandbox.lock());
            shell.types_line("bg");
            shell.prompts();
            eventually("it goes on, and renews", || {
                let now = mtime(&sandbox.lock());
                if now > stopped_at { Ok(()) } else { Err(now) }
            });
            wait_for_state(wrapper, 'T');
            wait_for_state(command, 'T');
            shell.types_line("fg");
            wait_until_it_goes_on(command);
        }
        let terminal = format!("/proc/{}/fd/0", shell.running.pid());
        sandbox.program("stty").args(["-F", &terminal, "rows", "33"]).run().exited(0);
        shell.terminal.expect("resized.");
        shell.types_line("a word");
        shell.terminal.expect("got:a word.");
        shell.prompts_with_status(0);
        assert_eq!(sandbox.names(), ["job.pl"]);

        // The keys reach its group alone; the wrapper ends with it.
        shell.types_line("\"$WL\" \"$L\" -- perl job.pl");
        shell.terminal.expect("\ninside.");
        shell.terminal.types(CTRL_C);
        shell.prompts_with_status(130);
        assert_eq!(sandbox.names(), ["job.pl"]);
        shell.leave();
    });
}

#[test]
fn a_shell_under_the_lock_can_be_suspended_and_continued() {
    in_every_shell(|sandbox, mut shell| {
        shell.types_line("\"$WL\" \"$L\" -- env PS1='in''ner> ' bash --norc --noprofile -i");
        shell.terminal.expect("inner> ");
        let wrapper = shell.job();
        // An interactive shell ignores what the keys send, once it has come to reading them; the lock stays.
        wait_for_state(command_of(wrapper), 'S');
        shell.terminal.types(CTRL_C);
        shell.terminal.expect("inner> ");
        shell.types_line("suspend");
        shell.prompts();
        wait_for_state(wrapper, 'T');
        assert!(sandbox.lock().exists());
        shell.types_line("fg");
        wait_until_it_goes_on(wrapper);
        shell.types_line("echo inside $((40 + 2)) again");
        shell.terminal.expect("inside 42 again");
        shell.types_line("exit 7");
        shell.prompts_with_status(7);
        assert!(sandbox.names().is_empty());
        shell.leave();
    });
}

#[test]
fn keys_reach_a_command_that_has_left_the_foreground_group() {
    in_every_shell(|sandbox, mut shell| {
        let mut gate = sandbox.gate();
        fs::write(sandbox.path("job.sh"), gate.script()).expect("a script");
        shell.types_line("\"$WL\" \"$L\" -- timeout 600 sh job.sh");
        let below = gate.wait_inside();
        let wrapper = shell.job();
        shell.terminal.types(CTRL_Z);
        shell.prompts();
        wait_for_state(wrapper, 'T');
        shell.types_line("fg");
        wait_until_it_goes_on(wrapper);
        wait_until_it_goes_on(command_of(wrapper));
        shell.terminal.types(CTRL_C);
        shell.prompts_with_status(130);
        eventually("it has ended", || match process(below) {
            None => Ok(()),
            Some(process) if process.state == 'Z' => Ok(()),
            other => Err(other),
        });
        assert_eq!(sandbox.names(), ["job.sh"]);
        shell.leave();
    });
}

#[test]
fn ctrl_z_gives_the_prompt_back_also_where_the_command_was_stopped_by_somebody_else() {
    in_every_shell(|sandbox, mut shell| {
        let mut gate = sandbox.gate();
        fs::write(sandbox.path("job.sh"), gate.script()).expect("a script");
        shell.types_line("\"$WL\" \"$L\" -- sh job.sh");
        let command = gate.wait_inside();
        let wrapper = shell.job();
        send(command, Signal::SIGSTOP);
        wait_for_state(command, 'T');
        shell.terminal.types(CTRL_Z);
        shell.prompts();
        wait_for_state(wrapper, 'T');
        shell.types_line("fg");
        wait_until_it_goes_on(wrapper);
        wait_until_it_goes_on(command);
        gate.open();
        shell.prompts_with_status(0);
        assert_eq!(sandbox.names(), ["job.sh"]);
        shell.leave();
    });
}
