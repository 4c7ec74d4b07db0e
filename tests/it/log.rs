//! The log for machines (`--log-json`).

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::{Duration, SystemTime};

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::harness::{
    Moments, Run, Running, Sandbox, calls, eventually, plant, planted, send_to_group, shipped, slots,
};

/// The lines of a log; each must be one JSON object of this version.
#[track_caller]
fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).expect("a log");
    assert!(text.is_empty() || text.ends_with('\n'), "{text:?}");
    let line = |line: &str| -> Value { serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line:?}")) };
    let lines: Vec<Value> = text.lines().map(line).collect();
    assert!(lines.iter().all(|line| line["withlock_log"] == 1), "{text}");
    lines
}

fn events(lines: &[Value]) -> Vec<&str> {
    lines.iter().map(|line| line["event"].as_str().expect("an event")).collect()
}

#[track_caller]
fn of<'l>(lines: &'l [Value], event: &str) -> &'l Value {
    lines.iter().find(|line| line["event"] == event).unwrap_or_else(|| panic!("no {event} in {lines:?}"))
}

/// `withlock --log-json log`.
fn logged(sandbox: &Sandbox) -> Run<'_> {
    sandbox.withlock().args(["--log-json", "log"])
}

fn log(sandbox: &Sandbox) -> Vec<Value> {
    lines(&sandbox.path("log"))
}

#[test]
fn a_run_is_told_from_its_grant_to_its_exit() {
    let sandbox = Sandbox::new();
    let before = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("a time").as_millis();
    let run = logged(&sandbox).args(["--label", "night\nly", "--ttl", "9s"]).lock().sh("echo $WITHLOCK_NONCE; exit 3");
    let running = run.start();
    let pid = running.pid();
    let finished = running.wait();
    let lines = log(&sandbox);
    assert_eq!(events(&lines), ["acquired", "started", "ended", "released", "exit"]);
    for line in &lines {
        assert_eq!(line["path"], sandbox.lock().to_str().expect("text"), "absolute: {line}");
        assert_eq!(line["nonce"], finished.out().trim(), "{line}");
        assert_eq!((&line["pid"], &line["label"]), (&pid.into(), &"night\nly".into()));
        assert!(u128::from(line["at_ms"].as_u64().expect("a time")) >= before, "{line}");
        assert!(line["boot_ms"].is_u64() && line["host"].is_string() && line.get("path_bytes").is_none(), "{line}");
    }
    let acquired = of(&lines, "acquired");
    assert!(acquired["waited_ms"].is_u64() && acquired["ttl_ms"] == 9_000, "{acquired}");
    assert_eq!(of(&lines, "started")["command"], "sh");
    assert_eq!(of(&lines, "ended")["status"], 3);
    assert!(of(&lines, "released")["held_ms"].as_u64() >= of(&lines, "ended")["ran_ms"].as_u64());
    assert_eq!(of(&lines, "exit")["code"], 3);
    finished.exited(3).silent();
}

#[test]
fn a_wait_is_told_with_whom_it_is_for_and_how_long_it_was() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().args(["--label", "first"]).lock().sh(gate.script()).start();
    gate.wait_inside();
    let waiter = logged(&sandbox).lock().args(["--", "true"]).start();
    waiter.wait_asleep_in_flock();
    let waiting = log(&sandbox);
    assert_eq!(events(&waiting), ["waiting"]);
    let by = &waiting[0]["holder"];
    assert_eq!((&by["pid"], &by["label"], &by["command"]), (&holder.pid().into(), &"first".into(), &"sh".into()));
    assert!(waiting[0]["held_since_ms"].is_u64() && waiting[0]["expires_in_ms"].is_u64());
    std::thread::sleep(Duration::from_millis(50));
    gate.open();
    holder.wait().exited(0);
    waiter.wait().exited(0).silent();
    let all = log(&sandbox);
    assert_eq!(events(&all)[1..], ["acquired", "started", "ended", "released", "exit"]);
    assert!(all[1]["waited_ms"].as_u64() >= Some(50), "{}", all[1]);
}

#[test]
fn a_run_that_goes_without_the_lock_says_so_and_why() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().lock().sh(gate.script()).start();
    gate.wait_inside();
    for (options, word, code, expected) in [
        (&["-n"][..], "fail", 75, &["busy", "exit"][..]),
        (&["-n", "--on-busy", "skip"], "skip", 0, &["busy", "exit"]),
        (&["-w", "60ms", "--on-busy", "run"], "run", 0, &["waiting", "busy", "started", "ended", "exit"]),
    ] {
        logged(&sandbox).args(options).lock().args(["--", "true"]).run().exited(code);
        let lines = log(&sandbox);
        assert_eq!(events(&lines), expected);
        let busy = of(&lines, "busy");
        assert_eq!((&busy["on_busy"], &busy["holder"]["pid"]), (&word.into(), &holder.pid().into()), "{busy}");
        assert_eq!((busy.get("nonce"), &of(&lines, "exit")["code"]), (None, &code.into()));
        fs::remove_file(sandbox.path("log")).expect("a log");
    }
    gate.open();
    holder.wait().exited(0);
}

#[test]
fn what_is_evicted_is_told_with_where_it_lies() {
    let sandbox = Sandbox::new();
    let mut dead = planted(1_000);
    dead.command = "late".into();
    plant(&sandbox.lock(), &dead, 60_000);
    logged(&sandbox).arg("-n").lock().args(["--", "true"]).run().exited(0);
    let lines = log(&sandbox);
    assert_eq!(events(&lines)[..2], ["evicted", "acquired"]);
    let evicted = &lines[0];
    assert_eq!((&evicted["why"], &evicted["holder"]["command"]), (&"stale".into(), &"late".into()));
    let lies_at = evicted["quarantine"]["path"].as_str().expect("a path");
    assert_eq!(Path::new(lies_at), slots(&sandbox.lock())[0].path);
}

#[test]
fn a_loss_and_what_follows_from_it_are_told() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let run = logged(&sandbox).lock().sh(gate.script()).start();
    gate.wait_inside();
    fs::remove_file(sandbox.lock()).expect("the lock");
    run.wait().exited(76);
    let lines = log(&sandbox);
    assert_eq!(events(&lines), ["acquired", "started", "lost", "ending", "ended", "exit"]);
    assert_eq!(of(&lines, "lost")["found"], "the lock file is gone");
    assert_eq!((&of(&lines, "ending")["why"], &of(&lines, "ended")["signal"]), (&"lost".into(), &15.into()));
    assert_eq!(of(&lines, "exit")["code"], 76);
}

#[test]
fn max_hold_a_condition_a_failed_start_and_a_late_renewal_are_told() {
    let sandbox = Sandbox::new();
    let told = |run: Run<'_>, code: u8| {
        let finished = run.run();
        finished.exited(code);
        let lines = log(&sandbox);
        fs::remove_file(sandbox.path("log")).expect("a log");
        lines
    };
    let held = told(logged(&sandbox).args(["--max-hold", "100ms"]).lock().args(["--", "sleep", "99"]), 124);
    assert_eq!(of(&held, "ending")["why"], "max-hold");
    let needless = told(logged(&sandbox).args(["--skip-if", "true"]).lock().args(["--", "false"]), 0);
    assert_eq!(events(&needless), ["acquired", "started", "ended", "not-needed", "released", "exit"]);
    let missing = told(logged(&sandbox).lock().args(["--", "no-such-command"]), 127);
    assert_eq!(events(&missing), ["acquired", "released", "exit"]);
    assert_eq!(of(&missing, "exit")["error"], "cannot run no-such-command: command not found");
    fs::create_dir(sandbox.path("dir")).expect("a directory");
    let not_executable = told(logged(&sandbox).lock().args(["--", "./dir"]), 126);
    assert_eq!(of(&not_executable, "exit")["error"], "cannot run ./dir: Permission denied");
    let failed = told(logged(&sandbox).lock().args(["--", "sh", "-c", "exit 127"]), 127);
    assert_eq!(of(&failed, "exit").get("error"), None, "that is the command's own business");
    let nested = told(sandbox.withlock().lock().sh("$WL --log-json log $L -- true"), 78);
    assert_eq!(events(&nested), ["nested", "exit"]);
    let within = told(sandbox.withlock().lock().sh("$WL --log-json log --reentrant $L -- true"), 0);
    assert_eq!(events(&within), ["reentered", "started", "ended", "exit"]);
    // Stopped for longer than two thirds of its ttl, it renews first when it goes on.
    let mut gate = sandbox.gate();
    let run = logged(&sandbox).args(["--ttl", "1s"]).lock().sh(gate.script()).start();
    gate.wait_inside();
    run.send(Signal::SIGSTOP);
    std::thread::sleep(Duration::from_millis(900));
    run.send(Signal::SIGCONT);
    let late = eventually("the renewal is told", || {
        let lines = log(&sandbox);
        lines.iter().find(|line| line["event"] == "renewed-late").cloned().ok_or(lines)
    });
    assert!(late["after_ms"].as_u64() >= Some(800), "{late}");
    gate.open();
    run.wait().exited(0);
}

#[test]
fn a_fault_before_the_grant_is_told_and_ends_the_log() {
    let sandbox = Sandbox::new();
    logged(&sandbox).args(["no/such/a.lock", "true"]).run().exited(73);
    let lines = log(&sandbox);
    assert_eq!((events(&lines), &lines[0]["code"]), (vec!["exit"], &73.into()));
    assert_eq!(lines[0]["error"], "no/such/a.lock: cannot be locked: no such directory: no/such");
}

#[test]
fn a_log_that_cannot_be_opened_is_one_error_before_anything_is_created() {
    let sandbox = Sandbox::new();
    fs::create_dir(sandbox.path("shut")).expect("a directory");
    sandbox.chmod(sandbox.path("shut"), 0o555);
    sandbox.chmod(sandbox.work(), 0o777);
    crate::harness::Fifo::make(sandbox.path("fifo"));
    sandbox.chmod(sandbox.path("fifo"), 0o666);
    let before = sandbox.names();
    for (to, code, part) in [
        ("nodir/log", 73, "nodir/log: cannot be opened for --log-json: No such file or directory"),
        (".", 73, ".: cannot be opened for --log-json: Is a directory"),
        ("fifo/log", 73, "fifo/log: cannot be opened for --log-json: Not a directory"),
        ("fifo", 74, "fifo: cannot be opened for --log-json: a FIFO that nobody reads, or a socket"),
        (
            "shut/log",
            77,
            "shut/log: cannot be opened for --log-json: Permission denied (directory shut belongs to root, mode 0555; ",
        ),
        ("7", 74, "descriptor 7: cannot be opened for --log-json: not open for writing"),
        ("0", 74, "descriptor 0: cannot be opened for --log-json: not open for writing"),
        ("99999999999", 64, "--log-json 99999999999: not the number of a descriptor"),
        ("-", 64, "--log-json -: standard output is 1"),
        ("", 64, "--log-json: no file is named"),
        ("a.lock", 64, "--log-json: the log is the lock"),
    ] {
        let run =
            sandbox.program(sandbox.public_binary()).args(["-p", "--log-json", to, "a.lock", "--", "echo", "ran"]);
        let finished = run.run_by_nobody().run();
        assert_eq!(finished.exited(code).one_line(&[part]).out(), "", "{to}");
        assert_eq!(sandbox.names(), before, "{to}");
    }
}

#[test]
fn a_number_is_a_descriptor_and_a_file_of_that_name_has_a_slash() {
    let sandbox = Sandbox::new();
    let to_descriptor = sandbox.sh("exec \"$WL\" --log-json 3 \"$L\" -- echo out 3>>log").run();
    assert_eq!(to_descriptor.exited(0).silent().out(), "out\n");
    assert_eq!(log(&sandbox).len(), 5);
    let to_output = sandbox.withlock().args(["--log-json", "1"]).lock().args(["--", "true"]).run();
    assert_eq!(to_output.exited(0).silent().out().lines().count(), 5);
    let closed = sandbox.sh("exec \"$WL\" --log-json 2 \"$L\" -- true 2>&-").run();
    closed.exited(74);
    let to_file = sandbox.withlock().args(["--log-json", "./3"]).lock().args(["--", "true"]).run();
    assert_eq!((to_file.exited(0).silent().out(), lines(&sandbox.path("3")).len()), (String::new(), 5));
    assert_eq!(sandbox.names(), ["3", "log"]);
}

#[test]
fn the_command_does_not_inherit_the_log_and_what_is_there_is_appended_to() {
    let sandbox = Sandbox::new();
    fs::write(sandbox.path("log"), "{\"withlock_log\":1,\"event\":\"from before\"}\n").expect("a log");
    let descriptors = "ls -l /proc/self/fd | grep -c log$";
    let finished = logged(&sandbox).lock().sh(descriptors).run();
    assert_eq!(finished.exited(1).out(), "0\n");
    assert_eq!(events(&log(&sandbox)), ["from before", "acquired", "started", "ended", "released", "exit"]);
}

#[test]
fn a_log_that_cannot_be_written_is_one_warning_and_harms_nothing() {
    let sandbox = Sandbox::new();
    let warning = |to: &str, why: &str| format!("{to}: the log cannot be written: {why}; going on");
    let full = sandbox.withlock().args(["--log-json", "/dev/full"]).lock().args(["--", "sh", "-c", "exit 5"]).run();
    full.exited(5).one_line(&[&warning("/dev/full", "No space left on device")]);
    // A pipe whose reader has gone.
    let text = "mkfifo p; exec 4<>p 3>p 4<&-; rm p; \"$WL\" --log-json 3 \"$L\" -- sh -c 'exit 5'; echo $? >&2";
    let closed = sandbox.sh(text).run();
    assert_eq!(closed.err(), format!("withlock: {}\n5\n", warning("descriptor 3", "Broken pipe")));
    // A reader that sleeps, behind a pipe that is full: no line is waited for but the first, and that not long.
    let fifo = sandbox.fifo();
    let stuffed = format!("dd if=/dev/zero bs=4096 count=16 of={0} status=none", fifo.shown());
    sandbox.sh(stuffed).run().exited(0);
    let stuck = sandbox.withlock().arg("--log-json").arg(fifo.shown()).lock().args(["--", "true"]).run();
    stuck.exited(0).one_line(&["the log cannot be written: "]);
    assert!(stuck.took < Duration::from_secs(10), "{stuck}");
    assert_eq!(sandbox.names(), [""; 0]);
}

/// What a run asks of the kernel to open this log, call by call, without what is the same in all of them.
fn opens(sandbox: &Sandbox, log: &Path, inject: &[&str]) -> Vec<String> {
    let trace = sandbox.io_path("strace");
    let shown = log.to_str().expect("text");
    let options = [&["-e", "trace=openat"], inject].concat();
    let run = sandbox.withlock().arg("--log-json").arg(log).lock().args(["--", "true"]);
    run.traced(&trace, &options).run().exited(0).silent();
    assert_eq!(events(&lines(log)).last(), Some(&"exit"));
    let kind = |line: &str| match (line.contains("O_CREAT"), line.contains("O_EXCL")) {
        (false, _) => "open",
        (true, true) => "make",
        (true, false) => "either",
    };
    let calls = calls(&trace).into_iter().filter(|call| call.name == "openat" && call.line.contains(shown));
    calls.map(|call| kind(&call.line).to_owned()).collect()
}

#[test]
fn a_log_that_is_there_is_opened_without_the_offer_to_make_it_which_the_kernel_may_refuse() {
    let sandbox = Sandbox::new();
    let (new, link) = (sandbox.path("new"), sandbox.path("link"));
    assert_eq!(opens(&sandbox, &new, &[]), ["open", "make"]);
    assert_eq!(opens(&sandbox, &new, &[]), ["open"]);
    // Another makes it after it was looked for.
    let unseen = ["-P", new.to_str().expect("text"), "-e", "inject=openat:error=ENOENT:when=1"];
    assert_eq!(opens(&sandbox, &new, &unseen), ["open", "make", "open"]);
    // What the kernel refuses is an open with the offer: this shows that one would be seen here.
    symlink("target", &link).expect("a link");
    assert_eq!(opens(&sandbox, &link, &[]), ["open", "make", "open", "make", "open", "make", "either"]);
    assert_eq!(events(&lines(&sandbox.path("target"))).last(), Some(&"exit"));
    assert_eq!(opens(&sandbox, &link, &[]), ["open"]);
}

#[test]
fn a_limit_on_the_size_of_files_ends_neither_a_waiter_nor_the_command() {
    let sandbox = Sandbox::new();
    fs::write(sandbox.path("log"), "{\"withlock_log\":1,\"event\":\"long before\"}\n".repeat(100)).expect("a log");
    let size = fs::metadata(sandbox.path("log")).expect("a log").len();
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().lock().sh(gate.script()).start();
    gate.wait_inside();
    // Room for the lock, none for a line.
    let front = ["prlimit", "--fsize=4000", "--"];
    let waiter = logged(&sandbox).lock().args(["--", "sh", "-c", "sleep 0.1; exit 6"]).through(front).start();
    waiter.wait_for_stderr("log: the log cannot be written: File too large; going on");
    gate.open();
    holder.wait().exited(0);
    waiter.wait().exited(6).one_line(&["File too large"]);
    assert_eq!(fs::metadata(sandbox.path("log")).expect("a log").len(), size);
}

#[test]
fn a_path_that_is_not_utf8_can_be_read_back() {
    let sandbox = Sandbox::new();
    let lock = sandbox.path(std::ffi::OsStr::from_bytes(b"\xff\n\x1b[2J.lock"));
    logged(&sandbox).arg(&lock).args(["--", "true"]).run().exited(0);
    for line in log(&sandbox) {
        let bytes: String = lock.as_os_str().as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(line["path_bytes"], bytes, "{line}");
    }
    let text = fs::read(sandbox.path("log")).expect("a log");
    assert!(text.iter().all(|byte| *byte == b'\n' || !byte.is_ascii_control()));
}

#[test]
fn a_file_that_many_share_while_they_are_killed_has_nothing_but_whole_lines() {
    shipped();
    let sandbox = Sandbox::new();
    let mut moments = Moments::new("deaths of those who log");
    let start = |lock: &str, command: &str| -> Running {
        let run = sandbox.shipped().args(["--log-json", "log", "--ttl", "1s", "-w", "20s", lock]);
        run.args(["--", "sh", "-c", command]).own_group().start()
    };
    let (mut killed, rounds, survivors) = (0, 12, 4);
    for round in 0..rounds {
        let living: Vec<Running> = (0..survivors).map(|_| start("living.lock", ":")).collect();
        for victim in 0..4 {
            let dying = start(&format!("dying-{round}-{victim}.lock"), if victim < 2 { "sleep 1000" } else { ":; :" });
            std::thread::sleep(moments.within(Duration::from_millis(8)));
            send_to_group(dying.pid(), Signal::SIGKILL);
            killed += usize::from(dying.wait().signal() == Some(9));
        }
        for run in living {
            run.wait().exited(0);
        }
    }
    assert!(killed >= 2 * rounds, "only {killed} died");
    // Who ends in order has told all of it, in order, under one pid.
    let mut runs: BTreeMap<u64, Vec<String>> = BTreeMap::new();
    for line in log(&sandbox) {
        runs.entry(line["pid"].as_u64().expect("a pid"))
            .or_default()
            .push(line["event"].as_str().expect("text").into());
    }
    let whole = runs.values().filter(|events| events.last().is_some_and(|event| event == "exit"));
    let tail = ["acquired", "started", "ended", "released", "exit"];
    let count = whole.clone().count();
    assert!(count >= rounds * survivors, "{count}");
    assert!(whole.clone().all(|events| events[events.len() - 5..] == tail), "{runs:?}");
}

#[test]
fn without_a_log_a_run_makes_no_system_call_for_it() {
    // What it costs with one, so that the count without one (a test of its own) means something.
    let sandbox = Sandbox::new();
    let count = |options: &[&str]| {
        let trace = sandbox.io_path("strace");
        sandbox.shipped().traced(&trace, &[]).args(options).lock().args(["--", "true"]).run().exited(0);
        crate::harness::calls(&trace).len()
    };
    let (plain, labelled, logged) =
        (count(&[]), count(&["--label", "x"]), count(&["--label", "x", "--log-json", "log"]));
    println!("{plain} calls, {labelled} with another option, {logged} with a log");
    assert!(logged > labelled + 10, "five lines, a poll and a write each");
    let traced = |options: &[&str]| {
        let trace = sandbox.io_path("strace");
        sandbox
            .shipped()
            .traced(&trace, &["-e", "trace=write,fcntl,openat,poll"])
            .args(options)
            .lock()
            .args(["--", "true"])
            .run();
        crate::harness::calls(&trace).into_iter().filter(|call| call.line.contains("log")).count()
    };
    assert_eq!((traced(&["--label", "x"]), traced(&["--log-json", "log"]) > 0), (0, true));
    drop(File::open(sandbox.path("log")).expect("a log"));
}

#[test]
fn a_log_that_is_the_lock_by_another_name_is_a_mistake_and_nothing_is_made() {
    let sandbox = Sandbox::new();
    std::os::unix::fs::symlink("a.lock", sandbox.path("link")).expect("a link");
    let whole = sandbox.lock().display().to_string();
    for log in ["./a.lock", &whole, "link", "../work/a.lock"] {
        let run = sandbox.withlock().args(["--log-json", log, "a.lock", "--", "true"]).run();
        run.exited(64).one_line(&["it is the lock"]);
        assert!(!sandbox.lock().exists(), "{log}");
    }
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().arg("a.lock").sh(gate.script()).start();
    gate.wait_inside();
    sandbox.withlock().args(["--log-json", "./a.lock", "-n", "a.lock", "--", "true"]).run().exited(64);
    gate.open();
    holder.wait().exited(0).silent();
}
