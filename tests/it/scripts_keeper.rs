//! `acquire --for-pid`: a keeper that lives exactly as long as the process it is for, and the lock.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use withlock::record::Guard;

use crate::harness::{
    Process, Run, Running, Sandbox, eventually, mtime, never_during, process, record, send, slots, status_field,
    with_record,
};

/// A script that acquires for itself, says its own pid through the gate, and waits to be let on.
fn script<'s>(sandbox: &'s Sandbox, options: &str, then: &str) -> Run<'s> {
    sandbox.sh(format!("nonce=$(\"$WL\" acquire --for-pid $$ {options} \"$L\") || exit; {then}"))
}

/// The keeper of the sandbox: the one process that was started as `acquire`.
#[track_caller]
fn keeper(sandbox: &Sandbox) -> Process {
    eventually("there is one keeper", || {
        let all = keepers(sandbox);
        // It has moved out once its working directory is the root.
        let has_moved_out = |keeper: &Process| link(keeper.pid, "cwd") == Path::new("/");
        match &all[..] {
            [keeper] if has_moved_out(keeper) => Ok(keeper.clone()),
            _ => Err(all),
        }
    })
}

fn keepers(sandbox: &Sandbox) -> Vec<Process> {
    let is_keeper = |process: &Process| {
        let line = std::fs::read(format!("/proc/{}/cmdline", process.pid)).unwrap_or_default();
        line.split(|byte| *byte == 0).nth(1) == Some(b"acquire")
    };
    sandbox.processes().into_iter().filter(is_keeper).collect()
}

fn link(pid: i32, name: &str) -> PathBuf {
    std::fs::read_link(format!("/proc/{pid}/{name}")).unwrap_or_default()
}

/// Waits until the process has ended; how long that took.
fn wait_until_ended(what: &str, pid: i32) -> Duration {
    let begun = Instant::now();
    eventually(what, || match process(pid) {
        Some(found) if found.state != 'Z' => Err(found),
        _ => Ok(()),
    });
    begun.elapsed()
}

/// Waits until the process is gone, also from the table of processes: no zombie. Process 1, to which an
/// orphan falls, takes its time over that.
fn wait_until_gone(what: &str, pid: i32) {
    eventually(what, || process(pid).map_or(Ok(()), Err));
}

#[test]
fn a_script_that_ends_releases_its_region_by_its_keeper_and_leaves_nothing() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = script(&sandbox, "", &gate.script()).start();
    let pid = gate.wait_inside();
    let keeper = keeper(&sandbox);
    let found = record(&sandbox.lock()).expect("a record");
    assert_eq!((found.guard, found.command.as_str()), (Guard::Wrapper, "sh"));
    assert_eq!(i32::try_from(found.pid), Ok(pid), "people are shown the script");
    sandbox.withlock().arg("-n").lock().args(["--", "true"]).run().exited(75).one_line(&["unless renewed"]);
    gate.open();
    holder.wait().exited(0).silent();
    wait_until_gone("the keeper has ended", keeper.pid);
    assert_eq!(sandbox.names(), [""; 0], "released like by any holder: no slot");
}

#[test]
fn a_keeper_dies_with_its_process_within_a_second_however_that_ends() {
    for signal in [Signal::SIGKILL, Signal::SIGTERM, Signal::SIGSEGV] {
        let sandbox = Sandbox::new();
        let mut gate = sandbox.gate();
        let holder = script(&sandbox, "--ttl 1h", &gate.script()).start();
        let pid = gate.wait_inside();
        let keeper = keeper(&sandbox);
        let waiter = sandbox.withlock().args(["-q"]).lock().args(["--", "true"]).start();
        waiter.wait_asleep_in_flock();
        let killed = Instant::now();
        send(pid, signal);
        // Whoever waits is woken by the release itself, and the lease of an hour is nobody's business.
        let woken = waiter.wait();
        woken.exited(0).silent();
        assert!(
            woken.ended.duration_since(killed) < Duration::from_secs(1),
            "{:?}",
            woken.ended.duration_since(killed)
        );
        wait_until_ended("the keeper has ended", keeper.pid);
        assert!(killed.elapsed() < Duration::from_secs(1), "{:?}", killed.elapsed());
        wait_until_gone("the keeper is reaped", keeper.pid);
        assert_eq!(holder.wait().signal(), Some(signal as i32));
    }
}

#[test]
fn a_keeper_renews_for_as_long_as_its_process_lives() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = script(&sandbox, "--ttl 1s", &gate.script()).start();
    gate.wait_inside();
    keeper(&sandbox);
    let mut stamps = std::collections::BTreeSet::new();
    eventually("it was renewed ten times", || {
        stamps.insert(mtime(&sandbox.lock()));
        if stamps.len() > 10 { Ok(()) } else { Err(stamps.len()) }
    });
    sandbox.withlock().args(["-n"]).lock().args(["--", "true"]).run().exited(75);
    gate.open();
    holder.wait().exited(0);
    sandbox.wait_until_nothing_runs();
    assert_eq!(sandbox.names(), [""; 0]);
}

#[test]
fn a_keeper_survives_an_exec_of_its_process() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let then = format!("exec env sh -c '{}'", gate.script());
    let holder = script(&sandbox, "--ttl 1s", &then).start();
    let pid = gate.wait_inside();
    assert_eq!(pid, holder.pid(), "the same process, another program");
    let keeper = keeper(&sandbox);
    let nonce = record(&sandbox.lock()).expect("a record").nonce;
    never_during("the lock stays", Duration::from_millis(2_500), || match record(&sandbox.lock()) {
        Some(found) if found.nonce == nonce => Ok(()),
        other => Err(other.map(|record| record.nonce)),
    });
    assert!(process(keeper.pid).is_some());
    gate.open();
    holder.wait().exited(0);
    wait_until_gone("the keeper has ended", keeper.pid);
}

#[test]
fn a_keeper_holds_nothing_of_its_callers() {
    let sandbox = Sandbox::new();
    let (mut gate, out, extra) = (sandbox.gate(), sandbox.fifo(), sandbox.io_path("extra"));
    // With a descriptor of the script's own, inside another lock whose guard it inherits, on a terminal.
    let text = format!(
        "exec 7>{}; nonce=$(\"$WL\" acquire --for-pid $$ \"$L\"); echo $nonce >{}; {}",
        extra.display(),
        out.shown(),
        gate.script()
    );
    let outer = sandbox.program("script").args(["-qec"]).arg(format!("\"$WL\" outer.lock -- sh -c '{text}'"));
    let outer = outer.arg("/dev/null").start();
    gate.wait_inside();
    let mut out = out;
    assert_eq!(out.line().len(), 32, "the command substitution has returned");
    let keeper = keeper(&sandbox);
    let descriptors = std::fs::read_dir(format!("/proc/{}/fd", keeper.pid)).expect("descriptors");
    let mut standard = Vec::new();
    for entry in descriptors {
        let name = entry.expect("an entry").file_name().to_string_lossy().into_owned();
        let target = link(keeper.pid, &format!("fd/{name}"));
        let shown = target.display().to_string();
        match name.parse::<i32>().expect("a number") {
            0..=2 => standard.push(shown),
            _ => {
                // The last is where the nonce came from.
                let files = [sandbox.lock(), sandbox.work(), PathBuf::from("/dev/urandom")];
                let own = files.contains(&target) || shown.starts_with("anon_inode:");
                assert!(own, "descriptor {name} is {shown}");
            }
        }
    }
    assert_eq!(standard, ["/dev/null"; 3]);
    assert_eq!(link(keeper.pid, "cwd"), Path::new("/"));
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", keeper.pid)).expect("stat");
    let fields: Vec<&str> = stat.rsplit_once(')').expect("a name").1.split_whitespace().collect();
    let (group, session, terminal) = (fields[2], fields[3], fields[4]);
    let own = keeper.pid.to_string();
    assert_eq!((group, session, terminal), (own.as_str(), own.as_str(), "0"), "a session of its own, no terminal");
    gate.open();
    outer.wait();
    sandbox.wait_until_nothing_runs();
    assert_eq!(sandbox.names(), [""; 0]);
}

#[test]
fn signals_do_not_part_a_keeper_from_its_process() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = script(&sandbox, "", &gate.script()).start();
    gate.wait_inside();
    let keeper = keeper(&sandbox);
    for signal in [Signal::SIGTERM, Signal::SIGHUP, Signal::SIGINT, Signal::SIGPIPE, Signal::SIGTSTP, Signal::SIGUSR1] {
        send(keeper.pid, signal);
    }
    never_during("it stays", Duration::from_millis(300), || {
        let state = process(keeper.pid).map(|keeper| keeper.state);
        if matches!(state, Some('S' | 'R')) { Ok(()) } else { Err(state) }
    });
    gate.open();
    holder.wait().exited(0);
    wait_until_gone("the keeper has ended", keeper.pid);
}

#[test]
fn a_script_can_release_before_it_ends_and_the_keeper_does_not_outlive_the_lock() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = script(
        &sandbox,
        "",
        &format!("{}; \"$WL\" release --nonce $nonce \"$L\"; echo $?; {}", gate.script(), gate.script()),
    )
    .start();
    gate.wait_inside();
    let keeper = keeper(&sandbox);
    let waiter = sandbox.withlock().args(["-q"]).lock().args(["--", "true"]).start();
    waiter.wait_asleep_in_flock();
    let released = Instant::now();
    gate.open();
    gate.wait_inside();
    waiter.wait().exited(0).silent();
    wait_until_ended("the keeper has ended", keeper.pid);
    assert!(released.elapsed() < Duration::from_secs(1), "{:?}", released.elapsed());
    assert_eq!(slots(&sandbox.lock()).len(), 1, "ended through the slot");
    gate.open();
    let finished = holder.wait();
    finished.exited(0).silent();
    assert_eq!(finished.out(), "0\n");
}

#[test]
fn a_keeper_whose_lock_is_broken_or_removed_ends_at_once_though_its_process_lives() {
    for how in ["rm \"$L\"", "mv \"$L\" elsewhere", "mv \"$L\" elsewhere; echo x >\"$L\""] {
        let sandbox = Sandbox::new();
        let mut gate = sandbox.gate();
        let holder = script(&sandbox, "--ttl 1h", &gate.script()).start();
        gate.wait_inside();
        let keeper = keeper(&sandbox);
        sandbox.sh(how).run().exited(0);
        let took = wait_until_ended(how, keeper.pid);
        assert!(took < Duration::from_millis(500), "at once, not at its next look: {how}: {took:?}");
        gate.open();
        holder.wait().exited(0);
    }
}

#[test]
fn a_keeper_that_was_suspended_with_its_process_keeps_the_lock() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = script(&sandbox, "--ttl 1s", &gate.script()).start();
    let (pid, keeper) = (gate.wait_inside(), keeper(&sandbox));
    for pid in [pid, keeper.pid] {
        send(pid, Signal::SIGSTOP);
    }
    let nonce = with_record(&sandbox.lock()).nonce;
    // Far beyond its ttl: the guard vouches for it.
    let refused = sandbox.withlock().args(["-q", "-w", "2500ms"]).lock().args(["--", "true"]).run();
    refused.exited(75).one_line(&["stale, but a process still has its guard"]);
    for pid in [keeper.pid, pid] {
        send(pid, Signal::SIGCONT);
    }
    let stale = mtime(&sandbox.lock());
    eventually("it is renewed", || if mtime(&sandbox.lock()) > stale { Ok(()) } else { Err(stale) });
    assert_eq!(with_record(&sandbox.lock()).nonce, nonce);
    gate.open();
    holder.wait().exited(0);
    sandbox.wait_until_nothing_runs();
}

#[test]
fn no_zombie_is_left_where_the_caller_is_the_subreaper_and_never_looks() {
    // The keeper is handed to the nearest subreaper when `acquire` exits: an enclosing withlock, which
    // reaps what it is handed.
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let text = format!("sh -c 'nonce=$(\"$WL\" acquire --for-pid $$ \"$L\"); {}'; {}", gate.enter(), gate.script());
    let outer = sandbox.withlock().arg("outer.lock").sh(text).start();
    gate.wait_inside();
    gate.wait_inside();
    eventually("no child of the wrapper's is left but its command", || {
        let children = crate::harness::children(outer.pid());
        if children.len() == 1 && children[0].state != 'Z' { Ok(()) } else { Err(children) }
    });
    gate.open();
    outer.wait().exited(0);
}

#[test]
fn a_process_that_does_not_exist_or_has_ended_is_refused_before_the_lock_is_taken() {
    let sandbox = Sandbox::new();
    let zombie = sandbox.sh("exit 0").start();
    eventually("it has ended and is not reaped", || match process(zombie.pid()) {
        Some(found) if found.state == 'Z' => Ok(()),
        other => Err(other),
    });
    for pid in [zombie.pid(), 4_194_304 + 1] {
        let finished = sandbox.withlock().args(["acquire", "--for-pid", &pid.to_string()]).lock().run();
        finished.exited(71).one_line(&["cannot watch the process: No such process"]);
        assert_eq!(finished.out(), "");
    }
    assert_eq!(sandbox.names(), [""; 0]);
    zombie.wait();
}

#[test]
fn a_process_that_proc_does_not_show_is_not_said_to_be_missing() {
    let sandbox = Sandbox::new();
    let text = r#"umount -l /proc && "$0" acquire --for-pid $$ a.lock; exit"#;
    let finished = sandbox.program("unshare").args(["-m", "sh", "-c", text]).arg(env!("CARGO_BIN_EXE_withlock")).run();
    finished.exited(71);
    assert_eq!(finished.err(), "withlock: cannot find the process in /proc: No such file or directory\n");
    assert_eq!((finished.out(), sandbox.names()), (String::new(), Vec::new()));
}

#[test]
fn a_process_that_ends_while_its_lock_is_waited_for_ends_the_wait() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().lock().sh(gate.script()).start();
    gate.wait_inside();
    let doomed = sandbox.sh("exec sleep 600").start();
    let waiter = sandbox.withlock().args(["acquire", "-q", "--for-pid", &doomed.pid().to_string()]).lock().start();
    waiter.wait_asleep_in_flock();
    doomed.send(Signal::SIGKILL);
    let finished = waiter.wait();
    finished.exited(71).one_line(&["the process that the lock is for has ended"]);
    assert_eq!(finished.out(), "");
    gate.open();
    holder.wait().exited(0);
    assert_eq!(sandbox.names(), [""; 0]);
}

/// Starts processes in a pid namespace of their own, in which pids can be made to come again.
fn in_a_pid_namespace(sandbox: &Sandbox, text: &str) -> Running {
    sandbox.program("unshare").args(["--pid", "--fork", "--mount-proc", "sh", "-c"]).arg(text).start()
}

#[test]
fn a_pid_that_is_used_again_does_not_fool_the_keeper() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    // The next process is given the number after `ns_last_pid`.
    let text = format!(
        "again() {{ echo $(($1-1)) >/proc/sys/kernel/ns_last_pid; }}; \
         again 500; sleep 600 & first=$!; \
         again 600; \"$WL\" acquire --for-pid $first \"$L\" >/dev/null || exit; \
         kill -STOP $(pgrep -f 'acquire --for-pid'); \
         kill -9 $first; wait $first; \
         again 500; sleep 600 & second=$!; \
         echo \"$first $second\"; {}; \
         kill -CONT $(pgrep -f 'acquire --for-pid'); {}; kill -9 $second",
        gate.script(),
        gate.script()
    );
    let namespace = in_a_pid_namespace(&sandbox, &text);
    gate.wait_inside();
    // A process with the watched number lives; the keeper was stopped while it was given that number.
    let keeper = keepers(&sandbox);
    assert_eq!(keeper.len(), 1, "{keeper:?}");
    assert!(sandbox.lock().exists());
    gate.open();
    gate.wait_inside();
    wait_until_ended("the keeper has seen through it", keeper[0].pid);
    assert!(!sandbox.lock().exists(), "released");
    gate.open();
    let finished = namespace.wait();
    finished.exited(0);
    assert_eq!(finished.out(), "500 500\n", "the number did come again");
}

#[test]
fn two_threads_of_a_process_are_one_process() {
    // A lock for a number that is a thread's, not a process's, would end at the wrong time.
    let sandbox = Sandbox::new();
    let thread = std::thread::spawn(|| (nix::unistd::gettid().as_raw(), std::thread::park()).0);
    let tid = eventually("the thread is there", || {
        let tasks = std::fs::read_dir("/proc/self/task").expect("tasks");
        let own = i32::try_from(std::process::id()).expect("a pid");
        let numbers = tasks.filter_map(|task| task.ok()?.file_name().to_str()?.parse::<i32>().ok());
        numbers.filter(|tid| *tid != own).max().ok_or(())
    });
    let finished = sandbox.withlock().args(["acquire", "--for-pid", &tid.to_string()]).lock().run();
    finished.exited(71).one_line(&["cannot watch the process"]);
    assert_eq!(sandbox.names(), [""; 0]);
    thread.thread().unpark();
    thread.join().expect("a thread");
}

#[test]
fn a_keeper_costs_next_to_nothing() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = script(&sandbox, "--ttl 1s", &gate.script()).start();
    gate.wait_inside();
    let keeper = keeper(&sandbox);
    let before = crate::harness::cpu_time(keeper.pid).expect("it runs");
    never_during("it keeps", Duration::from_secs(3), || process(keeper.pid).map(drop).ok_or("gone"));
    let used = crate::harness::cpu_time(keeper.pid).expect("it runs") - before;
    assert!(used < Duration::from_millis(30), "1 % of one processor: {used:?}");
    let resident = status_field(keeper.pid, "VmRSS").expect("a size");
    println!("{used:?} in three seconds, {resident}");
    gate.open();
    holder.wait().exited(0);
}

#[test]
fn the_lock_of_a_keeper_belongs_to_who_acquired_it() {
    let sandbox = Sandbox::new();
    sandbox.chmod(sandbox.work(), 0o777);
    let binary = sandbox.public_binary();
    let text = "nonce=$(\"$0\" acquire --for-pid $$ --mode 600 mine.lock) || exit; stat -c '%u %a' mine.lock";
    let finished = sandbox.program("sh").args(["-c", text]).arg(&binary).run_by_nobody().run();
    finished.exited(0).silent();
    assert_eq!(finished.out(), "65534 600\n");
    sandbox.wait_until_nothing_runs();
    assert!(!sandbox.path("mine.lock").exists());
}
