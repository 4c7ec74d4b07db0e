//! Faults that others had: what the command sees of the wrapper, and what its end means.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::harness::{Sandbox, age, eventually, inode, plant, planted, record, slots, with_record};

#[test]
fn c37_nonsense_is_a_usage_error_before_anything_is_created_or_run() {
    let sandbox = Sandbox::new();
    let options: [&[&str]; 25] = [
        &["-E", "600"],
        &["-E", "256"],
        &["-E", "-1"],
        &["-E", "x"],
        &["-E", ""],
        &["-w", "-1"],
        &["-w", "soon"],
        &["-w", "1e999"],
        &["-w", "99999999999999999999999"],
        &["-w", ""],
        &["-w", "nan"],
        &["-n", "-w", "1"],
        &["--ttl", "0"],
        &["--ttl", "999ms"],
        &["--ttl", "-5"],
        &["--ttl", "-1s"],
        &["--mode", "-600"],
        &["--max-hold", "-x"],
        &["--mode", "999"],
        &["--mode", "77777"],
        &["--max-hold", "x"],
        &["--kill-after", "1 fortnight"],
        &["--on-busy", "panic"],
        &["--on-lost", "cry"],
        &["--no-such-option"],
    ];
    for option in options {
        let finished = sandbox.withlock().args(option).lock().args(["--", "touch", "ran"]).run();
        assert_eq!(finished.code(), Some(64), "{option:?}: {finished}");
        finished.one_line(&[]);
        assert!(sandbox.names().is_empty(), "{option:?}");
    }
    for argv in [
        &[][..],
        &["a.lock"],
        &["a.lock", "--"],
        &["-c", "true"],
        &["a.lock", ""],
        &["a.lock", "-c", "true", "--", "true"],
    ] {
        let finished = sandbox.withlock().args(argv).run();
        assert_eq!(finished.code(), Some(64), "{argv:?}: {finished}");
        assert!(sandbox.names().is_empty(), "{argv:?}");
    }
}

#[test]
fn c37_a_command_that_cannot_be_run_is_127_or_126_and_the_lock_is_released() {
    let sandbox = Sandbox::new();
    fs::write(sandbox.path("plain"), "echo hello\n").expect("a file");
    sandbox.chmod(sandbox.path("plain"), 0o644);
    fs::create_dir(sandbox.path("dir")).expect("a directory");
    fs::write(sandbox.path("bad-interpreter"), "#!/no/such/interpreter\n").expect("a file");
    sandbox.chmod(sandbox.path("bad-interpreter"), 0o755);
    let members =
        [("no-such-command", 127), ("./missing", 127), ("./plain", 126), ("./dir", 126), ("./bad-interpreter", 127)];
    for (command, code) in members {
        let finished = sandbox.withlock().lock().args(["--", command]).run();
        // A missing interpreter is "not found" for the kernel and some shells, "cannot run" for others.
        let codes = if command == "./bad-interpreter" { vec![126, 127] } else { vec![code] };
        assert!(codes.contains(&finished.code().expect("a code")), "{command:?}: {finished}");
        finished.one_line(&[command]);
        assert!(!sandbox.lock().exists() && slots(&sandbox.lock()).is_empty(), "{command:?}");
    }
}

#[test]
fn c38_the_lock_is_released_when_the_direct_child_ends_whoever_lives_on() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    // A background child keeps every descriptor that it was given, the guard's too.
    let mut end = sandbox.gate();
    let body = format!("sh -c '{}' & {}", gate.script(), end.wait());
    let running = sandbox.withlock().lock().sh(body).start();
    let survivor = gate.wait_inside();
    let waiter = sandbox.withlock().args(["-w", "1h"]).lock().args(["--", "true"]).start();
    waiter.wait_asleep_in_flock();
    end.open();
    running.wait().exited(0).silent();
    waiter.wait().exited(0);
    sandbox.withlock().arg("-n").lock().args(["--", "true"]).run().exited(0).silent();
    assert!(crate::harness::process(survivor).is_some_and(|process| process.state != 'Z'), "the child lives on");
    gate.open();
}

#[test]
fn c38_the_callers_own_descriptors_pass_through() {
    let sandbox = Sandbox::new();
    // bash can use descriptors above 9.
    let text = "exec 3>three 7>seven 9<source 42>answer 200>flock-habit; \"$WL\" \"$L\" -- \
                bash -c 'echo 3 >&3; echo 7 >&7; cat <&9; echo 42 >&42; echo 200 >&200'";
    fs::write(sandbox.path("source"), "from nine\n").expect("a file");
    let finished = sandbox.program("bash").args(["-c", text]).run();
    finished.exited(0).silent();
    assert_eq!(finished.out(), "from nine\n");
    for (name, content) in [("three", "3\n"), ("seven", "7\n"), ("answer", "42\n"), ("flock-habit", "200\n")] {
        assert_eq!(fs::read_to_string(sandbox.path(name)).expect("written"), content);
    }
}

/// The descriptors that a command sees, as "number target", the listing's own left out.
fn descriptors(sandbox: &Sandbox, through: &str, redirections: &str) -> Vec<String> {
    let list = "for fd in /proc/self/fd/*; do echo \"${fd##*/} $(readlink $fd)\"; done >list";
    let text = format!("{through} bash -c '{list}' {redirections}");
    sandbox.program("bash").args(["-c", &text]).run().exited(0);
    let text = fs::read_to_string(sandbox.path("list")).expect("a list");
    fs::remove_file(sandbox.path("list")).expect("a list");
    // Without what this listing itself opens, and the sandbox's own file behind standard error.
    let numbers =
        |line: &&str| line.contains('/') && !["/proc/", "/work/list", "/io/"].iter().any(|part| line.contains(part));
    text.lines().filter(numbers).map(str::to_owned).collect()
}

#[test]
fn the_command_has_the_descriptors_it_would_have_without_the_wrapper_and_at_most_the_guard_besides() {
    let sandbox = Sandbox::new();
    let plain = "\"$WL\" \"$L\" --";
    for redirections in ["</dev/null", "<&-", "2>&-", "<&- 2>&-", "5</etc/passwd 11</etc/group", "<&- 3</etc/passwd"] {
        let bare = descriptors(&sandbox, "", redirections);
        let closed = descriptors(&sandbox, "\"$WL\" --close \"$L\" --", redirections);
        assert_eq!(closed, bare, "--close, {redirections}");
        let mut inherited = descriptors(&sandbox, plain, redirections);
        let guard = inherited.iter().position(|line| line.ends_with("a.lock")).expect("the guard is inherited");
        let number: u32 = inherited.remove(guard).split(' ').next().expect("a number").parse().expect("a number");
        assert!(number > 9, "scripts use the low numbers: {number}");
        assert_eq!(inherited, bare, "{redirections}");
    }
}

#[test]
fn c39_when_the_wrapper_is_killed_the_command_keeps_others_out_until_it_ends() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let running = sandbox.withlock().args(["--ttl", "1s"]).lock().sh(gate.script()).start();
    let command = gate.wait_inside();
    let held = with_record(&sandbox.lock());
    running.send(Signal::SIGKILL);
    assert_eq!(running.wait().signal(), Some(9));
    age(&sandbox.lock(), 3_600_000);
    for wait in [["-w", "0"], ["-w", "1500ms"]] {
        sandbox.withlock().args(wait).lock().args(["--", "true"]).run().exited(75);
    }
    assert_eq!(record(&sandbox.lock()).map(|record| record.nonce), Some(held.nonce));
    assert_eq!(sandbox.names(), ["a.lock"], "no try leaves a slot");
    let waiter = sandbox.withlock().args(["-w", "1h"]).lock().args(["--", "true"]).start();
    waiter.wait_asleep_in_flock();
    let ended = Instant::now();
    gate.open();
    let finished = waiter.wait();
    finished.exited(0);
    assert!(finished.ended - ended < Duration::from_secs(2), "woken by the guard: {:?}", finished.ended - ended);
    assert!(crate::harness::process(command).is_none_or(|process| process.state == 'Z'));
    assert_eq!(slots(&sandbox.lock()).len(), 1);
}

#[test]
fn c39_without_an_inherited_guard_a_second_copy_runs_beside_the_orphaned_command() {
    // The negative control: the guard left out of the protocol, or not handed on by --close.
    for (leave_out, option) in [("guard", "--quiet"), ("", "--close")] {
        let sandbox = Sandbox::new();
        let mut gate = sandbox.gate();
        let run = sandbox.withlock().leave_out(leave_out).args([option, "--ttl", "1s"]).lock();
        let running = run.sh(gate.script()).start();
        let command = gate.wait_inside();
        running.send(Signal::SIGKILL);
        running.wait();
        age(&sandbox.lock(), 3_600_000);
        sandbox.withlock().arg("-n").lock().args(["--", "true"]).run().exited(0);
        assert!(crate::harness::process(command).is_some_and(|process| process.state != 'Z'));
    }
}

#[test]
fn c41_nothing_is_read_from_or_printed_to_what_belongs_to_the_command_while_it_waits() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().lock().sh(gate.script()).start();
    gate.wait_inside();
    let waiter = sandbox.withlock().args(["-v", "-w", "1h"]).lock().args(["--", "cat"]).input(b"mine").start();
    waiter.wait_asleep_in_flock();
    gate.open();
    holder.wait().exited(0);
    let finished = waiter.wait();
    assert_eq!(finished.exited(0).out(), "mine");
    // Nor when it fails, whatever the reason.
    plant(&sandbox.lock(), &planted(3_600_000), 0);
    for options in [&["-v", "-n"][..], &["-n", "--on-busy", "skip"], &["-w", "10ms"], &["--ttl", "x"]] {
        let failed = sandbox.withlock().args(options).lock().args(["--", "cat"]).input(b"mine").run();
        assert_eq!(failed.out(), "", "{options:?}");
    }
}

#[test]
fn output_that_cannot_be_written_never_panics_and_never_leaks_the_lock() {
    let sandbox = Sandbox::new();
    for redirection in ["2>/dev/full", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"] {
        let run = |options: &str, code: u8| {
            let text = format!("\"$WL\" {options} \"$L\" -- sh -c 'exit 5' {redirection}");
            sandbox.sh(text).run().exited(code);
            assert!(!sandbox.lock().exists() || code == 75, "{options} {redirection}");
        };
        run("-v", 5);
        plant(&sandbox.lock(), &planted(3_600_000), 0);
        run("-n", 75);
        fs::remove_file(sandbox.lock()).expect("the planted lock");
    }
    // A reader that has gone away.
    let text = "\"$WL\" -v \"$L\" -- sh -c 'exit 5' 2>&1 >/dev/null | exec true";
    sandbox.sh(text).run();
    eventually("the lock is released", || if sandbox.lock().exists() { Err(sandbox.names()) } else { Ok(()) });
}

#[test]
fn c42_a_lock_taken_again_below_itself_is_refused_at_once() {
    let sandbox = Sandbox::new();
    let finished = sandbox.withlock().lock().sh("\"$WL\" -w 1h \"$L\" -- touch ran").run();
    finished.exited(78).one_line(&["a.lock"]);
    assert!(finished.took < Duration::from_secs(10));
    // Deeper, through another lock, by another name for the same path, and from a background child.
    for again in [
        "\"$WL\" b.lock -- \"$WL\" -w 1h \"$L\" -- touch ran",
        "\"$WL\" -w 1h ./a.lock -- touch ran",
        "ln -s . here; \"$WL\" -w 1h here/a.lock -- touch ran",
        "(\"$WL\" -w 1h \"$L\" -- touch ran) & wait $!",
    ] {
        let finished = sandbox.withlock().lock().sh(again).run();
        assert_eq!(finished.code(), Some(78), "{again}: {finished}");
    }
    assert!(!sandbox.path("ran").exists());
    // Another lock is another lock.
    sandbox.withlock().lock().sh("\"$WL\" b.lock -- true").run().exited(0).silent();
}

#[test]
fn the_command_learns_lock_nonce_and_mode_from_its_environment() {
    let sandbox = Sandbox::new();
    let print =
        "cat \"$L\"; echo \"$WITHLOCK_LOCK|$WITHLOCK_NONCE|$WITHLOCK_MODE|$WITHLOCK_HELD|${WITHLOCK_FENCE-unset}\"";
    let finished =
        sandbox.withlock().env("WITHLOCK_MODE", "forged").env("WITHLOCK_NONCE", "forged").arg("a.lock").sh(print).run();
    finished.exited(0).silent();
    let out = finished.out();
    let (line, seen) = out.trim_end().rsplit_once('\n').expect("two lines");
    let nonce = serde_json::from_str::<serde_json::Value>(line).expect("a record")["nonce"].clone();
    let nonce = nonce.as_str().expect("a nonce");
    assert_eq!(seen, format!("{}|{nonce}|locked|{nonce}|unset", sandbox.lock().display()));
    assert!(sandbox.lock().as_os_str().as_bytes().starts_with(b"/"));
}

#[test]
fn on_busy_run_goes_on_without_the_lock_and_says_so_to_the_command() {
    let sandbox = Sandbox::new();
    plant(&sandbox.lock(), &planted(3_600_000), 0);
    let before = inode(&sandbox.lock());
    let print = "echo \"$WITHLOCK_MODE|${WITHLOCK_NONCE-unset}|${WITHLOCK_HELD-unset}\"; exit 4";
    let finished =
        sandbox.withlock().args(["-n", "--on-busy", "run"]).env("WITHLOCK_NONCE", "forged").lock().sh(print).run();
    finished.exited(4);
    assert_eq!(finished.out(), "degraded|unset|unset\n");
    finished.one_line(&["running without the lock: /", "a.lock: held by "]);
    let quiet = sandbox.withlock().args(["-q", "-n", "--on-busy", "run"]).lock().sh(print).run();
    assert_eq!(quiet.exited(4).silent().out(), "degraded|unset|unset\n");
    assert_eq!(inode(&sandbox.lock()), before);
}

#[test]
fn the_command_stays_in_the_wrappers_group_and_session_with_its_directory_and_umask() {
    let sandbox = Sandbox::new();
    let print = "pwd; umask; ulimit -n; cut -d' ' -f5,6,7 /proc/$$/stat";
    let text =
        |through: &str| format!("cd /usr; umask 027; ulimit -n 333; {through} sh -c \"{}\"", print.replace('$', "\\$"));
    let bare = sandbox.sh(text("")).own_group().run();
    let wrapped = sandbox.sh(text("\"$WL\" \"$L\" --")).own_group().run();
    wrapped.exited(0).silent();
    // The process group is each run's own: the leader is the shell that was started.
    let fields = |out: String| {
        let mut lines: Vec<String> = out.lines().map(str::to_owned).collect();
        let last = lines.pop().expect("a line");
        let mut ids = last.split(' ').map(str::to_owned);
        (lines, ids.next(), ids.collect::<Vec<_>>())
    };
    let (bare, wrapped_fields) = (fields(bare.out()), fields(wrapped.out()));
    assert_eq!((bare.0, bare.2), (wrapped_fields.0, wrapped_fields.2));
}

#[test]
fn what_is_missing_of_a_command_that_is_there_is_its_interpreter() {
    let sandbox = Sandbox::new();
    for (name, text) in [("dos", "#!/bin/sh\r\n:\r\n"), ("lost", "#! /no/such/shell -e\n:\n"), ("plain", ":\n")] {
        fs::write(sandbox.path(name), text).expect("a script");
        sandbox.chmod(sandbox.path(name), 0o755);
    }
    let line = |command: &str, why: &str| format!("withlock: cannot run {command}: {why}\n");
    for (command, why) in [
        ("./dos", "its interpreter was not found, /bin/sh\\x0d"),
        ("dos", "its interpreter was not found, /bin/sh\\x0d"),
        ("./lost", "its interpreter was not found, /no/such/shell"),
        ("./none", "No such file or directory"),
        ("none", "command not found"),
    ] {
        let finished = sandbox.sh(format!("PATH=$PATH:.; \"$WL\" \"$L\" -- {command}")).run();
        assert_eq!(finished.exited(127).err(), line(command, why));
    }
    sandbox.withlock().lock().args(["--", "./plain"]).run().exited(0).silent();
}

#[test]
fn what_a_service_manager_hands_to_its_process_by_number_is_the_commands() {
    let sandbox = Sandbox::new();
    let tell = "echo $LISTEN_PID $WATCHDOG_PID ${LISTEN_PIDFDID-none} $LISTEN_FDS $$";
    let run = |pids: &str| {
        let set = format!("export LISTEN_FDS=2 LISTEN_PIDFDID=5 {pids}");
        let finished = sandbox.sh(format!("{set}; exec \"$WL\" \"$L\" -- sh -c '{tell}'")).run();
        finished.exited(0).silent();
        finished.out().split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    let words = run("LISTEN_PID=$$ WATCHDOG_PID=$$");
    let command = &words[4];
    assert_eq!(words, [command, command, "none", "2", command]);
    // What was meant for another is left alone.
    let words = run("LISTEN_PID=1 WATCHDOG_PID=01");
    assert_eq!(words[..4], ["1", "01", "5", "2"]);
}

#[test]
fn a_command_that_looks_like_an_option_has_dashes_right_before_it_or_is_a_mistake() {
    let sandbox = Sandbox::new();
    let no_option =
        |word: &str| format!("withlock: '{word}' is no option; if it is the command, write: withlock LOCK -- {word}\n");
    let exclusive = "withlock: -x: a lock is always exclusive: leave the option out\n".to_owned();
    for (line, said) in [
        (&["a.lock", "--no-wiat", "true"][..], no_option("--no-wiat")),
        (&["-n", "a.lock", "--no-wiat", "true"], no_option("--no-wiat")),
        (&["a.lock", "-z", "true"], no_option("-z")),
        (&["a.lock", "-", "true"], no_option("-")),
        (&["a.lock", "-n", "-z", "true"], no_option("-z")),
        (&["--", "a.lock", "-z", "true"], no_option("-z")),
        (&["a.lock", "-x", "true"], exclusive),
        (&["--", "a.lock", "--"], "withlock: no command given; try: withlock --help\n".into()),
    ] {
        let finished = sandbox.withlock().args(line).run();
        assert_eq!(finished.exited(64).err(), said, "{line:?}");
        assert_eq!(sandbox.names(), [""; 0], "{line:?}");
    }
    for line in [
        &["a.lock", "-n", "true"][..],
        &["--", "a.lock", "true"],
        &["--", "a.lock", "--", "true"],
        &["-n", "--", "a.lock", "--", "true"],
    ] {
        sandbox.withlock().args(line).run().exited(0).silent();
    }
    // Only one more is no part of the command: it is there as it was written.
    let printed = sandbox.withlock().args(["--", "a.lock", "--", "printf", "%s,", "--", "-x", "--"]).run();
    assert_eq!(printed.exited(0).silent().out(), "--,-x,--,");
    for (line, command) in [
        (&["a.lock", "--", "--no-wiat"][..], "--no-wiat"),
        (&["--", "a.lock", "--", "-z"], "-z"),
        (&["a.lock", "--", "--", "true"], "--"),
    ] {
        let finished = sandbox.withlock().args(line).run();
        assert_eq!(
            finished.exited(127).err(),
            format!("withlock: cannot run {command}: command not found\n"),
            "{line:?}"
        );
    }
}

#[test]
fn a_value_that_looks_like_an_option_is_said_to_be_a_wrong_value() {
    let sandbox = Sandbox::new();
    let no_time = |option: &str, value: &str| {
        format!("withlock: {option} {value}: not a length of time (examples: 1.5 90s 500ms 1m30s 2h)\n")
    };
    for (arguments, line) in [
        (&["--ttl", "-1s", "a.lock", "true"][..], no_time("--ttl", "-1s")),
        (&["-w", "-1m", "a.lock", "true"], no_time("--wait", "-1m")),
        (&["--max-hold", "-n", "a.lock", "true"], no_time("--max-hold", "-n")),
        (&["--kill-after=-1s", "a.lock", "true"], no_time("--kill-after", "-1s")),
        (&["--mode", "-600", "a.lock", "true"], "withlock: --mode -600: not an octal number up to 777\n".into()),
        (&["acquire", "--ttl", "-1s", "a.lock"], no_time("--ttl", "-1s")),
        (&["reclaim", "--older-than", "-1d", "."], no_time("--older-than", "-1d")),
    ] {
        let finished = sandbox.withlock().args(arguments).run();
        assert_eq!(finished.exited(64).err(), line, "{arguments:?}");
        assert_eq!(sandbox.names(), [""; 0], "{arguments:?}");
    }
    let quotes = "\"".repeat(600);
    let finished = sandbox.withlock().args(["--label", &quotes, "a.lock", "true"]).run();
    let most = "at most 1024 bytes; a control character counts for 6, a quote or a backslash for 2";
    assert_eq!(finished.exited(64).err(), format!("withlock: --label: {most}\n"));
}

#[test]
fn help_that_cannot_be_written_is_an_error_with_a_line() {
    let sandbox = Sandbox::new();
    for arguments in [&["--help"][..], &["--version"], &["inspect", "--help"]] {
        let full = fs::OpenOptions::new().write(true).open("/dev/full").expect("/dev/full");
        let finished = sandbox.withlock().args(arguments).stdout(full).run();
        let line = "withlock: standard output: cannot write: No space left on device\n";
        assert_eq!(finished.exited(74).err(), line, "{arguments:?}");
        assert!(!sandbox.withlock().args(arguments).run().exited(0).silent().out().is_empty());
    }
}
