//! What the command sees of its lock, and what its end means.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::{Behaviour, Stage};
use crate::cases_path::nasty_names;
use crate::harness::{Gate, children, eventually, process, send};

/// A command that writes a line for each signal that it gets.
fn counting(names: &str) -> String {
    names.split(' ').map(|name| format!("trap 'echo {name} >>got' {name}; ")).collect()
}

/// Waits for the gate again and again, since a trapped signal interrupts the read.
fn until_told(gate: &Gate) -> String {
    format!("{}; until {}; do :; done", gate.enter(), gate.wait())
}

/// Waits until the command has written these names and no more.
fn wait_until_got(stage: &Stage, names: &[&str]) {
    eventually("the command got it", || {
        let got = fs::read_to_string(stage.sandbox.path("got")).unwrap_or_default();
        if got.lines().eq(names.iter().copied()) { Ok(()) } else { Err(got) }
    });
}

/// A tree of processes: one that ignores TERM, one in a session of its own, one whose parent has died. Each
/// says through the gate that it is there; there are four.
fn tree_of_processes(gate: &Gate) -> String {
    let (enter, member) = (gate.enter(), "exec sleep 1000");
    format!(
        "sh -c '{enter}; {member}' & \
         sh -c 'trap \"\" TERM; {enter}; while :; do sleep 1000; done' & \
         setsid sh -c '{enter}; {member}' & \
         (sh -c '{enter}; {member}' & ) ; \
         wait"
    )
}

pub(super) const BEHAVIOURS: &[Behaviour] = &[
    ("the command's own status passes through, and nothing is left", |stage| {
        for code in [0, 1, 2, 64, 69, 75, 76, 77, 124, 126, 127, 128, 200, 255] {
            stage.run(&[]).sh(format!("exit {code}")).run().exited(code).silent();
        }
        for signal in [1, 2, 3, 6, 8, 9, 11, 13, 14, 15, 31, 34, 50, 64] {
            stage.run(&[]).sh(format!("kill -{signal} $$; exit 99")).run().exited(128 + signal).silent();
            stage.nothing_is_left();
        }
    }),
    ("a command that is not found is 127, one that cannot be run 126, and nothing is left", |stage| {
        fs::write(stage.sandbox.path("plain"), "echo hello\n").expect("a file");
        stage.sandbox.chmod(stage.sandbox.path("plain"), 0o644);
        fs::create_dir(stage.sandbox.path("dir")).expect("a directory");
        for (command, code, why) in [
            ("no-such-command", 127, "command not found"),
            ("./missing", 127, "No such file or directory"),
            ("./plain", 126, "Permission denied"),
            ("./dir", 126, "Permission denied"),
            ("/dev/null", 126, "Permission denied"),
            ("./plain/x", 126, "Not a directory"),
        ] {
            let finished = stage.run(&[]).args(["--", command]).run();
            assert_eq!(finished.exited(code).err(), format!("withlock: cannot run {command}: {why}\n"));
            stage.nothing_is_left();
        }
        // What is no directory is passed over where the command is searched for.
        for (command, code) in [("true", 0), ("no-such-command", 127)] {
            stage.run(&[]).args(["--", command]).env("PATH", "./plain:/usr/bin:/bin:./plain").run().exited(code);
        }
    }),
    ("a script without an interpreter line runs as from a shell", |stage| {
        fs::write(stage.sandbox.path("script"), "echo \"$0|$1|$#\"\nexit 5\n").expect("a file");
        stage.sandbox.chmod(stage.sandbox.path("script"), 0o755);
        let finished = stage.run(&[]).args(["--", "./script", "a b"]).run();
        assert_eq!(finished.exited(5).silent().out(), "./script|a b|1\n");
    }),
    ("a command line reads as flock's users write it", |stage| {
        for run in [
            stage.run(&[]).args(["echo", "-n", "hi"]),
            stage.run(&[]).args(["--", "echo", "-n", "hi"]),
            stage.run(&[]).args(["-c", "printf hi"]),
            stage.run(&["--nonblock"]).args(["--command", "printf hi"]),
            stage.run(&["--nb"]).args(["printf", "hi"]),
            stage.run(&["--timeout", "1.5"]).args(["printf", "hi"]),
            stage.run(&["-w1m30s"]).args(["printf", "%s", "hi"]),
        ] {
            assert_eq!(run.run().exited(0).silent().out(), "hi");
        }
    }),
    ("arguments and environment reach the command byte for byte", |stage| {
        let args = nasty_names();
        let finished = stage.run(&[]).args(["--", "printf", "%s\\0"]).args(&args).env("NASTY", &args[0]).run();
        let expected: Vec<u8> = args.iter().flat_map(|arg| [arg.as_bytes(), b"\0"].concat()).collect();
        assert_eq!(finished.exited(0).silent().stdout, expected);
        let seen = stage.run(&[]).args(["--", "env", "-0"]).env("NASTY", &args[0]).run();
        let entry = [b"NASTY=", args[0].as_bytes()].concat();
        assert!(seen.stdout.split(|byte| *byte == 0).any(|found| found == entry));
    }),
    ("standard input belongs to the command to the last byte", |stage| {
        let data: Vec<u8> = (0..200_000_u32).map(|at| at.to_le_bytes()[at as usize % 4]).collect();
        let finished = stage.run(&["-v"]).args(["--", "cat"]).input(&data).run();
        assert!(finished.exited(0).stdout == data);
        // Two commands, one after the other, share one input: neither wrapper reads ahead.
        let text = "\"$WL\" \"$LOCK\" -- head -c 3; \"$WL\" \"$LOCK\" -- cat";
        assert_eq!(stage.sh(text).input(b"abcdef").run().exited(0).out(), "abcdef");
    }),
    ("the caller's own descriptors pass through", |stage| {
        let text = "exec 3>three 9<source 42>answer; \"$WL\" \"$LOCK\" -- \
                    bash -c 'echo 3 >&3; cat <&9; echo 42 >&42'";
        fs::write(stage.sandbox.path("source"), "from nine\n").expect("a file");
        let finished = stage.program("bash").args(["-c", text]).run();
        assert_eq!(finished.exited(0).silent().out(), "from nine\n");
        for (name, content) in [("three", "3\n"), ("answer", "42\n")] {
            assert_eq!(fs::read_to_string(stage.sandbox.path(name)).expect("written"), content);
        }
    }),
    ("a command substitution does not wait for a silent daemon", |stage| {
        let text = "out=$(\"$WL\" \"$LOCK\" -- sh -c 'sleep 1000 >/dev/null 2>&1 & echo hi'); echo \"[$out]\"";
        assert_eq!(stage.sh(text).run().exited(0).silent().out(), "[hi]\n");
    }),
    ("output that cannot be written never panics and never leaks the lock", |stage| {
        for redirection in ["2>/dev/full", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"] {
            stage.sh(format!("\"$WL\" -v \"$LOCK\" -- sh -c 'exit 5' {redirection}")).run().exited(5);
            assert!(stage.is_free(), "{redirection}");
            let held = stage.acquire();
            stage.sh(format!("\"$WL\" -n \"$LOCK\" -- true {redirection}")).run().exited(75);
            stage.of(&["release", "--nonce", &held]).run().exited(0);
        }
    }),
    ("the command is told its lock, its nonce and its mode, whatever it was told before", |stage| {
        let told = "echo \"$WITHLOCK_MODE $WITHLOCK_NONCE|$WITHLOCK_HELD|$WITHLOCK_LOCK\"; \
                    \"$WL\" inspect --json \"$LOCK\" >seen";
        let forged = [("WITHLOCK_MODE", "forged"), ("WITHLOCK_NONCE", "forged"), ("WITHLOCK_HELD", "outer")];
        let run = forged.iter().fold(stage.run(&[]).sh(told), |run, (name, value)| run.env(name, value));
        let finished = run.run();
        let seen = fs::read(stage.sandbox.path("seen")).expect("seen");
        let nonce = Stage::nonce_in(&seen);
        let told = [b"locked ", nonce.as_bytes(), b"|outer ", nonce.as_bytes(), b"|", stage.lock.as_bytes(), b"\n"];
        assert_eq!(finished.exited(0).silent().stdout, told.concat());
    }),
    ("the command stays in the wrapper's group and session with its directory and umask", |stage| {
        let print = "pwd; umask; ulimit -n; cut -d' ' -f5,6,7 /proc/\\$\\$/stat";
        let seen = |through: &str| {
            let text = format!("cd /usr; umask 027; ulimit -n 333; {through} sh -c \"{print}\"");
            let out = stage.sh(text).own_group().run().exited(0).silent().out();
            let mut lines: Vec<String> = out.lines().map(str::to_owned).collect();
            // The process group is each run's own: the leader is the shell that was started.
            let ids = lines.pop().expect("a line");
            lines.extend(ids.split(' ').skip(1).map(str::to_owned));
            lines
        };
        assert_eq!(seen("\"$WL\" \"$LOCK\" --"), seen(""));
    }),
    ("the lock is released when the direct child ends, whoever lives on", |stage| {
        let mut gate = stage.sandbox.gate();
        stage.run(&[]).sh(format!("sh -c '{}' & exit 4", gate.script())).run().exited(4).silent();
        let survivor = gate.wait_inside();
        stage.run(&["-n"]).args(["--", "true"]).run().exited(0).silent();
        assert!(process(survivor).is_some_and(|process| process.state != 'Z'), "the child lives on");
        gate.open();
    }),
    ("each signal to the wrapper reaches the command once, and the lock stays until that has ended", |stage| {
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
        ];
        let names = members.map(|(_, name)| name);
        let mut gate = stage.sandbox.gate();
        let holder = stage.run(&[]).sh(counting(&names.join(" ")) + &until_told(&gate)).start();
        gate.wait_inside();
        for (at, (signal, _)) in members.iter().enumerate() {
            holder.send(*signal);
            wait_until_got(stage, &names[..=at]);
        }
        stage.run(&["-n"]).args(["--", "true"]).run().exited(75);
        gate.open();
        holder.wait().exited(0).silent();
        wait_until_got(stage, &names);
        stage.nothing_is_left();
    }),
    ("a command that dies of a signal to the wrapper gives its status, and nothing is left", |stage| {
        for (signal, code) in
            [(Signal::SIGTERM, 143), (Signal::SIGINT, 130), (Signal::SIGHUP, 129), (Signal::SIGQUIT, 131)]
        {
            let mut gate = stage.sandbox.gate();
            let holder = stage.run(&[]).sh(gate.script()).start();
            gate.wait_inside();
            holder.send(signal);
            holder.wait().exited(code).silent();
            stage.nothing_is_left();
            stage.sandbox.wait_until_nothing_runs();
        }
    }),
    ("ignored and blocked signals are the same with and without the wrapper", |stage| {
        let settings: [&[&str]; 3] = [
            &[],
            &["--ignore-signal=HUP,INT,QUIT,TERM,USR1,PIPE,TSTP,TTIN,TTOU,ALRM,WINCH"],
            &["--ignore-signal=USR1,ALRM", "--block-signal=HUP,USR1,INT,PIPE"],
        ];
        for options in settings {
            let print = "grep ^Sig[BIC] /proc/self/status";
            let seen = |through: &str| {
                let text = format!("exec env {} {through} {print}", options.join(" "));
                let out = stage.sh(text).run().exited(0).silent().out();
                // Signals 32 and 33 are the C library's own: its posix_spawn ignores them in every child.
                let mask = |line: &str| u64::from_str_radix(line.rsplit('\t').next()?, 16).ok();
                out.lines().filter_map(mask).map(|mask| mask & !(1 << 31 | 1 << 32)).collect::<Vec<_>>()
            };
            assert_eq!(seen("\"$WL\" \"$LOCK\" --"), seen(""), "{options:?}");
        }
    }),
    ("with SIGCHLD ignored on entry the command's status is still reported", |stage| {
        let text = "trap '' CHLD; exec env --ignore-signal=CHLD \"$WL\" \"$LOCK\" -- sh -c 'exit 7'";
        stage.sh(text).run().exited(7).silent();
    }),
    ("nohup stays in force for the wrapper and the command", |stage| {
        let mut gate = stage.sandbox.gate();
        let holder = stage.run(&[]).sh(gate.script()).through(["nohup"]).start();
        let command = gate.wait_inside();
        holder.send(Signal::SIGHUP);
        send(command, Signal::SIGHUP);
        // Signals are delivered in any order, but both are delivered before anything else is read.
        gate.open();
        holder.wait().exited(0);
        stage.nothing_is_left();
    }),
    ("a stop of the command alone does not hang the wrapper", |stage| {
        let mut gate = stage.sandbox.gate();
        let holder = stage.run(&[]).sh(gate.script()).start();
        let command = gate.wait_inside();
        send(command, Signal::SIGSTOP);
        eventually("the command is stopped", || match process(command) {
            Some(process) if process.state == 'T' => Ok(()),
            other => Err(other),
        });
        send(command, Signal::SIGCONT);
        gate.open();
        holder.wait().exited(0).silent();
    }),
    ("a command that runs for too long is ended with all its descendants", |stage| {
        let mut gate = stage.sandbox.gate();
        let options = ["--max-hold", "1s", "--kill-after", "300ms"];
        let holder = stage.run(&options).sh(tree_of_processes(&gate)).start();
        let begun = Instant::now();
        (0..4).for_each(|_| _ = gate.wait_inside());
        let finished = holder.wait();
        finished.exited(124).one_line(&["--max-hold"]);
        assert!(finished.ended - begun >= Duration::from_millis(800), "{finished}");
        assert!(stage.sandbox.processes().is_empty(), "{:?}", stage.sandbox.processes());
        stage.nothing_is_left();
    }),
    ("a command that ends on TERM is not waited for longer, and one in time is left alone", |stage| {
        let finished = stage.run(&["--max-hold", "300ms", "--kill-after", "1h"]).args(["--", "sleep", "1000"]).run();
        finished.exited(124).one_line(&["--max-hold"]);
        stage.run(&["--max-hold", "1h"]).args(["--", "true"]).run().exited(0).silent();
    }),
    ("after a loss the command is ended with all its descendants, a stopped one too", |stage| {
        for stopped in [false, true] {
            let mut gate = stage.sandbox.gate();
            let run = stage.run(&["--kill-after", "300ms"]);
            let holder = run.sh(if stopped { gate.script() } else { tree_of_processes(&gate) }).start();
            (0..if stopped { 1 } else { 4 }).for_each(|_| _ = gate.wait_inside());
            if stopped {
                // SIGSTOP, which no wrapper should take for the terminal's stop.
                children(holder.pid()).iter().for_each(|child| send(child.pid, Signal::SIGSTOP));
            }
            stage.of(&["break", "--force"]).run().exited(0);
            holder.wait().exited(76).says(&["the lock was lost"]);
            let left = stage.sandbox.processes();
            assert!(left.is_empty(), "still there when the wrapper ends: {left:?}");
        }
    }),
    ("a loss that is only warned of shows in the exit code of a success, and not in that of a failure", |stage| {
        for (body, code) in [("exit 0", 76), ("exit 3", 3)] {
            let mut gate = stage.sandbox.gate();
            let holder = stage.run(&["--on-lost", "warn"]).sh(format!("{}; {body}", gate.script())).start();
            let command = gate.wait_inside();
            stage.of(&["break", "--force"]).run().exited(0);
            holder.wait_for_stderr("; the command goes on");
            assert!(process(command).is_some_and(|process| process.state != 'Z'), "the command goes on");
            gate.open();
            holder.wait().exited(code).one_line(&["the lock was lost"]);
        }
    }),
    ("a lock taken again below itself is refused at once", |stage| {
        for again in [
            "\"$WL\" -w 1h \"$LOCK\" -- touch ran",
            "\"$WL\" other.lock -- \"$WL\" -w 1h \"$LOCK\" -- touch ran",
            "(\"$WL\" -w 1h \"$LOCK\" -- touch ran) & wait $!",
        ] {
            let finished = stage.run(&[]).sh(again).run();
            finished.exited(78).one_line(&["held by an ancestor of this process"]);
        }
        assert!(!stage.sandbox.path("ran").exists());
        // Another lock is another lock.
        stage.run(&[]).sh("\"$WL\" other.lock -- true").run().exited(0).silent();
    }),
    ("a lock is re-entered on request and released by the outer holder only", |stage| {
        let body = "\"$WL\" --reentrant -n \"$LOCK\" -- sh -c '\"$WL\" inspect -q \"$LOCK\"; echo $?; exit 7'; \
                    code=$?; \"$WL\" inspect -q \"$LOCK\"; echo $?; exit $code";
        let finished = stage.run(&[]).sh(body).run();
        assert_eq!(finished.exited(7).silent().out(), "75\n75\n", "still held after the inner one ended");
        stage.nothing_is_left();
    }),
    ("the variable is no bypass for a process that outlived the hold", |stage| {
        let (mut gate, mut inner) = (stage.sandbox.gate(), stage.sandbox.gate());
        let mut told = stage.sandbox.fifo();
        // A background process that keeps the environment of a hold that has ended.
        let tries = format!("\"$WL\" --reentrant -n \"$LOCK\" -- touch ran; echo $? >{}", told.shown());
        let survivor = format!("sh -c '{}; {tries}' >/dev/null 2>&1 & exit 0", gate.script());
        stage.run(&[]).sh(survivor).run().exited(0);
        gate.wait_inside();
        let holder = stage.run(&[]).sh(inner.script()).start();
        inner.wait_inside();
        gate.open();
        assert_eq!(told.line().trim(), "75");
        assert!(!stage.sandbox.path("ran").exists());
        inner.open();
        holder.wait().exited(0);
    }),
];
