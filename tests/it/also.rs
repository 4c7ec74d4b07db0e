//! Several locks at once (`--also`): all of them or none, and nothing is held while something is waited for.

use std::fs;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::harness::{
    Call, Run, Running, Sandbox, calls, eventually, mtime, never_during, plant, planted, record, send_to_group,
    shipped, slots,
};

/// `withlock --also SECOND … FIRST`.
fn both<'s>(run: Run<'s>, first: &str, second: &str) -> Run<'s> {
    run.args(["--also", second, first])
}

/// Reads a counter, dawdles where a rival would come between, writes it back.
const INCREMENT: &str = "read n <counter; i=0; while [ $i -lt 50 ]; do i=$((i+1)); done; echo $((n+1)) >counter";

/// Loops of `rounds` increments each, one for each pair of locks; what the counter says in the end.
fn count(sandbox: &Sandbox, pairs: &[[&str; 2]], rounds: usize, leave_out: Option<&str>) -> usize {
    fs::write(sandbox.path("counter"), "0\n").expect("a counter");
    fs::write(sandbox.path("increment"), INCREMENT).expect("a script");
    let program = if leave_out.is_some() { env!("CARGO_BIN_EXE_withlock").as_ref() } else { shipped().as_os_str() };
    let start = |[first, second]: &[&str; 2]| {
        let hold = format!("\"$PROGRAM\" -q --on-lost warn --also {second} {first} -- sh increment || exit");
        let body = format!("i=0; while [ $i -lt {rounds} ]; do i=$((i+1)); {hold}; done");
        sandbox.sh(body).env("PROGRAM", program).leave_out(leave_out.unwrap_or_default()).start()
    };
    let loops: Vec<Running> = pairs.iter().map(start).collect();
    for finished in loops.into_iter().map(Running::wait) {
        assert!(leave_out.is_some() || finished.code() == Some(0), "{finished}");
    }
    fs::read_to_string(sandbox.path("counter")).expect("a counter").trim().parse().unwrap_or(0)
}

/// Any two of these pairs have a lock in common, named in another order, and spelt in another way.
const CROSSED: [[&str; 2]; 6] =
    [["a", "b"], ["b", "./a"], ["b", "c"], ["c", "alias/b"], ["../work/c", "a"], ["a", "alias/../work/c"]];

fn with_another_name() -> Sandbox {
    let sandbox = Sandbox::new();
    std::os::unix::fs::symlink(".", sandbox.path("alias")).expect("a link");
    sandbox
}

#[test]
fn whatever_the_order_in_which_they_are_named_nobody_deadlocks_and_no_update_is_lost() {
    let sandbox = with_another_name();
    assert_eq!(count(&sandbox, &CROSSED, 20, None), 120);
    assert_eq!(sandbox.names(), ["alias", "counter", "increment"]);
}

#[test]
fn the_same_pairs_lose_updates_when_the_create_is_not_exclusive() {
    // The negative control of the test above, for the counter.
    let counted = count(&with_another_name(), &CROSSED, 20, Some("exclusive,guard"));
    assert!(counted < 120, "no update was lost: the test has no power");
}

#[test]
fn nested_holds_in_crossed_orders_deadlock_where_those_of_several_at_once_do_not() {
    let sandbox = Sandbox::new();
    // Each is inside its first lock and then wants the other's: the negative control.
    let (mut one, mut other) = (sandbox.gate(), sandbox.gate());
    let nested = |first: &str, second: &str, gate: &crate::harness::Gate| {
        let inner = format!("{}; exec \"$WL\" -w 500ms {second} -- true", gate.script());
        sandbox.withlock().arg(first).sh(inner).start()
    };
    let (ab, ba) = (nested("a", "b", &one), nested("b", "a", &other));
    one.wait_inside();
    other.wait_inside();
    one.open();
    other.open();
    let codes = [ab.wait().code(), ba.wait().code()];
    assert!(codes.contains(&Some(75)), "neither got stuck: {codes:?}");
    // The same two, held up in the same place by somebody who has the second lock of each in turn.
    for (busy, first, second) in [("b", "a", "b"), ("a", "b", "a"), ("a", "a", "b"), ("b", "b", "a")] {
        let mut gate = sandbox.gate();
        let holder = sandbox.withlock().arg(busy).sh(gate.script()).start();
        gate.wait_inside();
        let waiting = both(sandbox.withlock(), first, second).args(["--", "true"]).start();
        let crossed = both(sandbox.withlock(), second, first).args(["--", "true"]).start();
        waiting.wait_asleep_in_flock();
        crossed.wait_asleep_in_flock();
        gate.open();
        holder.wait().exited(0).silent();
        waiting.wait().exited(0).silent();
        crossed.wait().exited(0).silent();
    }
    assert_eq!(sandbox.names(), [""; 0]);
}

#[test]
fn while_one_is_waited_for_the_others_are_free_and_a_signal_leaves_nothing_behind() {
    let sandbox = Sandbox::new();
    for [first, second] in [["a", "b"], ["b", "a"]] {
        let mut gate = sandbox.gate();
        let holder = sandbox.withlock().arg("b").sh(gate.script()).start();
        gate.wait_inside();
        let waiter = both(sandbox.withlock(), first, second).args(["--", "true"]).start();
        waiter.wait_asleep_in_flock();
        assert_eq!(sandbox.names(), ["b"]);
        sandbox.withlock().args(["-n", "a", "true"]).run().exited(0).silent();
        waiter.send(Signal::SIGTERM);
        assert_eq!(waiter.wait().signal(), Some(Signal::SIGTERM as i32));
        assert_eq!(sandbox.names(), ["b"]);
        gate.open();
        holder.wait().exited(0).silent();
    }
}

#[test]
fn a_waiter_is_woken_by_the_release_of_the_one_that_it_waits_for() {
    shipped();
    let mut fastest = Duration::MAX;
    for _ in 0..5 {
        let sandbox = Sandbox::new();
        let mut gate = sandbox.gate();
        let holder = sandbox.shipped().arg("b").sh(gate.script()).start();
        gate.wait_inside();
        let waiter = both(sandbox.shipped(), "a", "b").args(["--", "true"]).start();
        waiter.wait_asleep_in_flock();
        gate.open();
        let released = holder.wait().ended;
        fastest = fastest.min(waiter.wait().ended.saturating_duration_since(released));
    }
    // A poll of any pace would show in the fastest of five.
    assert!(fastest < Duration::from_millis(50), "{fastest:?}");
}

#[test]
fn the_command_has_all_of_them_and_is_told_of_the_first() {
    let sandbox = Sandbox::new();
    fs::create_dir(sandbox.path("numbers")).expect("a directory");
    let text = "ls; echo $WITHLOCK_LOCK $WITHLOCK_NONCE $WITHLOCK_FENCE; echo $WITHLOCK_HELD; \
                $WL check && $WL check b && $WL check ./c; echo $?; $WL check --nonce $WITHLOCK_NONCE b; echo $?";
    let run = sandbox.withlock().args(["--fence", "numbers", "--also", "b", "--also", "c", "a"]).sh(text).run();
    let told = run.exited(0).out();
    let lines: Vec<&str> = told.lines().collect();
    let [a, b, c, _numbers, first, held, checked, other] = lines.as_slice() else { panic!("{told}") };
    assert_eq!([*a, *b, *c, *checked, *other], ["a", "b", "c", "0", "76"]);
    let words: Vec<&str> = first.split(' ').collect();
    assert_eq!([words[0], words[2]], [&*sandbox.path("a").to_string_lossy(), "1"]);
    let nonces: Vec<&str> = held.split(' ').collect();
    assert!(nonces.len() == 3 && nonces.contains(&words[1]), "{told}");
    assert!(run.err().contains("b: not held: another holds it now"), "{run}");
    // One token, and it is LOCK's.
    assert!(sandbox.path("numbers/claim-1").exists() && !sandbox.path("numbers/claim-2").exists());
    assert_eq!(sandbox.names(), ["numbers"]);
}

#[test]
fn a_token_is_not_used_up_by_those_who_find_another_lock_busy() {
    let sandbox = Sandbox::new();
    fs::create_dir(sandbox.path("numbers")).expect("a directory");
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().arg("b").sh(gate.script()).start();
    gate.wait_inside();
    for [first, second] in [["a", "b"], ["c", "b"]] {
        let run = both(sandbox.withlock().args(["-n", "--fence", "numbers"]), first, second).args(["--", "true"]).run();
        run.exited(75);
    }
    gate.open();
    holder.wait().exited(0);
    let finished = both(sandbox.withlock().args(["--fence", "numbers"]), "a", "b").sh("echo $WITHLOCK_FENCE").run();
    assert_eq!(finished.exited(0).out(), "1\n");
}

#[test]
fn the_same_lock_twice_is_one_hold_however_it_is_spelt() {
    let sandbox = with_another_name();
    let absolute = sandbox.path("a").display().to_string();
    let run = sandbox.withlock().args(["-n", "-v", "--also", "./a", "--also", "alias/a", "--also", &absolute, "a"]);
    let finished = run.sh("echo $WITHLOCK_HELD | wc -w").run();
    assert_eq!(finished.exited(0).one_line(&["a: locked, nonce "]).out().trim(), "1");
    assert_eq!(sandbox.names(), ["alias"]);
}

#[test]
fn the_line_names_the_one_that_is_busy_and_none_of_the_others_is_left_behind() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().arg("b").sh(gate.script()).start();
    gate.wait_inside();
    let busy = format!("b: held by pid {} on ", holder.pid());
    let still = format!(" by pid {} on ", holder.pid());
    for [first, second] in [["a", "b"], ["b", "a"]] {
        let run = |options: &[&str]| both(sandbox.withlock().args(options), first, second).sh("echo ran; ls").run();
        let next = "; next: withlock inspect b";
        assert_eq!(run(&["-n"]).exited(75).one_line(&[&busy, next]).out(), "");
        assert_eq!(run(&["-n", "-E", "9"]).exited(9).out(), "");
        let waited = run(&["-w", "300ms"]);
        waited.exited(75).one_line(&["b: still held after ", &still, next]);
        run(&["-n", "--on-busy", "skip"]).exited(0).one_line(&["skipped: b: held by pid "]);
        // Without the lock is without any of them.
        let degraded = run(&["-n", "--on-busy", "run"]);
        assert_eq!(degraded.exited(0).one_line(&["running without the lock: b: held"]).out(), "ran\nb\n");
    }
    gate.open();
    holder.wait().exited(0);
}

#[test]
fn what_can_never_be_taken_is_found_before_anything_is_created_or_waited_for() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().arg("a").sh(gate.script()).start();
    gate.wait_inside();
    fs::write(sandbox.path("script"), "#!/bin/sh\n").expect("a file");
    for (second, code, part) in [
        ("script", 73, "script: cannot be locked: not a withlock lock"),
        ("nodir/b", 73, "nodir/b: cannot be locked: no such directory: nodir"),
        ("", 73, "cannot be locked: the path is empty"),
        ("etcd://x/b", 64, "--also: lock files only"),
    ] {
        for arguments in [["--also", second, "a", "true"], ["--also", "a", second, "true"]] {
            if arguments[2] != "etcd://x/b" || cfg!(feature = "etcd") {
                let finished = sandbox.withlock().args(arguments).run();
                finished.exited(code).one_line(&[part]);
                assert!(finished.took < Duration::from_secs(5));
            }
        }
    }
    let fence = sandbox.withlock().args(["--fence", "nodir", "--also", "b", "c", "true"]).run();
    fence.exited(73).one_line(&["nodir"]);
    assert_eq!(sandbox.names(), ["a", "script"]);
    gate.open();
    holder.wait().exited(0);
}

#[test]
fn losing_one_of_them_ends_the_command_and_gives_the_others_back() {
    let sandbox = Sandbox::new();
    for (lost, said) in
        [("b", "a: the lock was lost: b: the lock file is gone"), ("a", "a: the lock was lost: the lock file is gone")]
    {
        let mut gate = sandbox.gate();
        let run = sandbox.withlock().args(["--also", "b", "--also", "c", "a"]).sh(gate.script()).start();
        gate.wait_inside();
        fs::remove_file(sandbox.path(lost)).expect("a lock");
        let finished = run.wait();
        finished.exited(76).one_line(&[said, "; ending the command"]);
        assert_eq!(sandbox.names(), [""; 0], "{lost}");
    }
}

#[test]
fn a_command_that_goes_on_after_a_loss_keeps_those_that_are_left() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let options = ["--ttl", "1s", "--on-lost", "warn", "--also", "b", "--also", "c", "a"];
    let run = sandbox.withlock().args(options).sh(gate.script()).start();
    gate.wait_inside();
    fs::remove_file(sandbox.path("b")).expect("a lock");
    run.wait_for_stderr("b: the lock file is gone; the command goes on");
    let before = mtime(&sandbox.path("a"));
    eventually("the others are renewed", || if mtime(&sandbox.path("a")) > before { Ok(()) } else { Err(before) });
    fs::remove_file(sandbox.path("c")).expect("a lock");
    run.wait_for_stderr("c: the lock file is gone; the command goes on");
    gate.open();
    let finished = run.wait();
    finished.exited(76);
    assert_eq!(finished.err().lines().count(), 2, "each loss is told once: {finished}");
    assert_eq!(sandbox.names(), [""; 0]);
}

#[test]
fn all_of_them_are_renewed_and_released_in_the_reverse_order() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let run = sandbox.withlock().args(["--ttl", "1s", "--log-json", "log", "--also", "b", "a"]).sh(gate.script());
    let run = run.start();
    gate.wait_inside();
    let mtimes = || ["a", "b"].map(|name| mtime(&sandbox.path(name)));
    let before = mtimes();
    eventually("both are renewed", || {
        let now = mtimes();
        if now[0] > before[0] && now[1] > before[1] { Ok(()) } else { Err(now) }
    });
    gate.open();
    run.wait().exited(0).silent();
    let log = fs::read_to_string(sandbox.path("log")).expect("a log");
    let of = |event: &str| -> Vec<String> {
        let lines = log.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).expect("JSON"));
        lines.filter(|line| line["event"] == event).map(|line| line["path"].to_string()).collect()
    };
    let (mut acquired, released) = (of("acquired"), of("released"));
    acquired.reverse();
    assert_eq!((acquired.len(), &acquired), (2, &released));
}

#[test]
fn a_lock_of_an_ancestor_is_refused_or_counts_and_the_rest_is_taken() {
    let sandbox = Sandbox::new();
    for (first, second) in [("a", "b"), ("b", "a")] {
        let inner =
            |options: &str| format!("$WL {options} --also {second} {first} -- sh -c 'ls; echo $WITHLOCK_HELD | wc -w'");
        let refused = sandbox.withlock().arg("a").sh(inner("")).run();
        refused.exited(78).one_line(&["a: held by an ancestor of this process: pid "]);
        assert_eq!(refused.out(), "");
        let entered = sandbox.withlock().arg("a").sh(inner("--reentrant")).run();
        assert_eq!(entered.exited(0).out(), "a\nb\n2\n", "{entered}");
        let told = sandbox.withlock().arg("a").sh(format!(
            "echo $WITHLOCK_NONCE; $WL --reentrant --also {second} {first} -- sh -c 'echo $WITHLOCK_NONCE'; ls"
        ));
        let told = told.run().exited(0).out();
        let lines: Vec<&str> = told.lines().collect();
        // LOCK's nonce is the ancestor's where LOCK is; and the ancestor's lock stays its own.
        assert_eq!((lines[0] == lines[1], lines[2]), (first == "a", "a"), "{told}");
    }
    let all = sandbox.withlock().args(["--also", "b", "a"]).sh("$WL --reentrant --also a b -- ls").run();
    assert_eq!(all.exited(0).silent().out(), "a\nb\n");
    assert_eq!(sandbox.names(), [""; 0]);
}

#[test]
fn a_lock_of_an_ancestor_is_told_at_once_although_another_of_them_is_busy() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let stranger = sandbox.withlock().arg("b").sh(gate.script()).start();
    gate.wait_inside();
    for (ancestors, busy) in [("a", "b"), ("c", "b")] {
        for options in ["", "-n", "-w 600", "-n --on-busy skip", "-n --on-busy run"] {
            for (first, second) in [(ancestors, busy), (busy, ancestors)] {
                let text = format!("$WL {options} --also {second} {first} -- touch ran");
                let finished = sandbox.withlock().arg(ancestors).sh(text).run();
                finished.exited(78).one_line(&[&format!("{ancestors}: held by an ancestor of this process: pid ")]);
                assert_eq!(sandbox.names(), ["b"]);
            }
        }
        // Where it counts as taken the other is what is waited for.
        let text = format!("$WL -n --reentrant --also {busy} {ancestors} -- touch ran");
        sandbox.withlock().arg(ancestors).sh(text).run().exited(75).one_line(&["b: held by pid "]);
    }
    gate.open();
    stranger.wait().exited(0);
}

#[test]
fn one_wait_is_for_all_of_them() {
    let sandbox = Sandbox::new();
    let (mut first, mut second) = (sandbox.gate(), sandbox.gate());
    let a = sandbox.withlock().arg("a").sh(first.script()).start();
    let b = sandbox.withlock().arg("b").sh(second.script()).start();
    first.wait_inside();
    second.wait_inside();
    let begun = Instant::now();
    let waiter = both(sandbox.withlock().args(["-w", "1500ms"]), "a", "b").args(["--", "true"]).start();
    waiter.wait_asleep_in_flock();
    // It gets on to the second, and its time goes on.
    first.open();
    a.wait().exited(0);
    waiter.wait_for_stderr("waiting, held");
    let finished = waiter.wait();
    finished.exited(75).says(&["b: still held after "]);
    assert!(finished.ended - begun < Duration::from_secs(10));
    assert_eq!(sandbox.names(), ["b"]);
    second.open();
    b.wait().exited(0);
}

#[test]
fn stale_ones_are_evicted_on_the_way() {
    let sandbox = Sandbox::new();
    for name in ["a", "b"] {
        plant(&sandbox.path(name), &planted(1_000), 60_000);
    }
    both(sandbox.withlock().arg("-n"), "a", "b").args(["--", "true"]).run().exited(0).silent();
    assert_eq!(["a", "b"].map(|name| slots(&sandbox.path(name)).len()), [1, 1]);
}

#[test]
fn killed_outright_they_keep_others_out_while_the_command_lives_and_are_stale_after_it() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let run = both(sandbox.withlock().args(["--ttl", "1s"]), "a", "b").own_group();
    let run = run.sh(format!("{}; sleep 1000", gate.enter())).start();
    gate.wait_inside();
    run.send(Signal::SIGKILL);
    let group = run.pid();
    run.wait();
    never_during("a lock is free while the command lives", Duration::from_millis(1_800), || {
        let tried = ["a", "b"].map(|name| sandbox.withlock().args(["-n", name, "true"]).run().code());
        if tried == [Some(75), Some(75)] { Ok(()) } else { Err(tried) }
    });
    send_to_group(group, Signal::SIGKILL);
    let next = both(sandbox.withlock().args(["-w", "20s", "--ttl", "1s"]), "b", "a").args(["--", "true"]).run();
    next.exited(0);
    assert!(next.took < Duration::from_secs(10), "{next}");
}

/// The file-system calls of a whole hold of two, start-up left out.
fn calls_of_a_hold() -> Vec<Call> {
    let sandbox = Sandbox::new();
    let log = sandbox.io_path("strace");
    hold(&sandbox).traced(&log, &["-e", "trace=%file,%desc"]).run().exited(0);
    let all = calls(&log);
    let base = sandbox.work().display().to_string();
    let first = all.iter().position(|call| call.line.contains(&base)).expect("the directory is opened");
    all[first..].to_vec()
}

fn hold(sandbox: &Sandbox) -> Run<'_> {
    let (a, b) = (sandbox.path("a"), sandbox.path("b"));
    sandbox.shipped().args(["--ttl", "1s", "--also"]).arg(b).arg(a).args(["--", "true"])
}

#[test]
fn killed_at_any_of_its_calls_it_leaves_nothing_that_does_not_go_stale() {
    shipped();
    let all = calls_of_a_hold();
    // Of the calls one in two: neighbours come in pairs, and there are two locks.
    let cases: Vec<Call> = all.into_iter().step_by(2).collect();
    let (count, died) = (cases.len(), std::sync::Mutex::new(0_usize));
    let cases = std::sync::Mutex::new(cases.into_iter());
    let next = || cases.lock().expect("cases").next();
    std::thread::scope(|scope| {
        for _ in 0..12 {
            scope.spawn(|| {
                while let Some(call) = next() {
                    let sandbox = Sandbox::new();
                    let inject = format!("inject={}:signal=KILL:when={}", call.name, call.nth);
                    let options = ["-e", &format!("trace={}", call.name), "-e", &inject];
                    let finished = hold(&sandbox).traced(&sandbox.io_path("strace"), &options).run();
                    *died.lock().expect("a count") += usize::from(finished.signal() == Some(9));
                    for name in ["a", "b"] {
                        let lock = sandbox.path(name);
                        if lock.exists() && record(&lock).is_none() {
                            // A blank lock's minute, of which a second is left.
                            crate::harness::age(&lock, 59_000);
                        }
                    }
                    let next = both(sandbox.shipped().args(["-w", "20s"]), "b", "a").args(["--", "true"]).run();
                    next.exited(0);
                    let left = |name: &str| sandbox.path(name).exists();
                    assert!(!left("a") && !left("b"), "{call:?}: {:?}", sandbox.names());
                }
            });
        }
    });
    let died = died.into_inner().expect("a count");
    assert!(died > count / 2, "only {died} of {count} died");
}

#[test]
fn as_process_1_a_waiter_for_several_gives_the_command_its_signal_dispositions_back() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().arg("b").sh(gate.script()).start();
    gate.wait_inside();
    let front = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"];
    let signals = "grep -E '^Sig(Ign|Cgt)' /proc/self/status";
    let waiter = both(sandbox.withlock().args(["-q"]), "a", "b").sh(signals).through(front).start();
    eventually("it waits", || {
        let inner = crate::harness::descendants(waiter.pid()).into_iter().next().ok_or(String::new())?;
        crate::harness::asleep_in_flock(inner.pid)
    });
    gate.open();
    holder.wait().exited(0);
    let within = waiter.wait();
    let plain = sandbox.sh(signals).through(front).run();
    assert_eq!(within.exited(0).out(), plain.out());
    assert_eq!(sandbox.names(), [""; 0]);
}

#[test]
fn of_a_file_system_that_is_not_local_the_warning_names_the_lock_that_is_there() {
    let sandbox = Sandbox::new();
    fs::create_dir(sandbox.path("mnt")).expect("a directory");
    let script = "mount -t ramfs none mnt && exec \"$@\"";
    let front = ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", script, "sh"];
    let warning =
        "not a local file system: other hosts do not see the guard; mount it without look-up and attribute caches";
    for (arguments, name) in [
        (&["-v", "--also", "mnt/b", "a", "true"][..], "mnt/b"),
        (&["-v", "--also", "a", "mnt/b", "true"], "mnt/b"),
        (&["-v", "mnt/b", "true"], "mnt/b"),
        (&["acquire", "-v", "mnt/b"], "mnt/b"),
    ] {
        let finished = sandbox.withlock().args(arguments).through(front).run();
        let said = finished.exited(0).err();
        let warnings: Vec<&str> = said.lines().filter(|line| line.contains("not a local file system")).collect();
        assert_eq!(warnings, [format!("withlock: {name}: {warning}")], "{arguments:?}");
    }
    for arguments in [&["-v", "--also", "b", "a", "true"][..], &["acquire", "-v", "a"]] {
        let finished = sandbox.withlock().args(arguments).through(front).run();
        assert!(!finished.exited(0).err().contains("not a local"), "{arguments:?}");
    }
}
