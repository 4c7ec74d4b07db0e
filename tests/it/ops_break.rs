//! `break`: it ends the epoch that it looked at, through its slot, and nothing else.
//!
//! Needs root, strace, setpriv, unshare, flock(1) and a tmpfs of its own.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use nix::sys::signal::Signal;
use serde_json::Value;
use withlock::record::SlotName;

use crate::cases_path::{blanks, nasty_names, on_read_only};
use crate::harness::{
    Run, Running, Sandbox, Snapshot, age, blank_ages_ms, calls, claims_in, eventually, inode, plant, plant_bytes,
    planted, record, send, set_mtime, slots, tree,
};
use crate::ops_inspect::{inspected, stopped_holder, text};

const HOUR_MS: u64 = 3_600_000;

/// Starts a program that stops, as by SIGSTOP, when it has made its first call of this name.
pub(crate) fn stopped_at(run: Run<'_>, call: &str) -> Running {
    let (trace, inject) = (format!("trace={call}"), format!("inject={call}:signal=STOP:when=1"));
    let running = run.traced(Path::new("/dev/null"), &["-e", &trace, "-e", &inject]).start();
    eventually("it has stopped", || {
        let state = crate::harness::process(running.pid()).map(|process| process.state);
        let name = crate::harness::process(running.pid()).map(|process| process.name);
        // strace itself stops its program for an instant at every call.
        let has_stopped = matches!(state, Some('t' | 'T')) && is_stopped_by_signal(running.pid());
        if has_stopped { Ok(()) } else { Err((state, name)) }
    });
    running
}

/// A process that takes no part any more stays where it is, however often one looks.
fn is_stopped_by_signal(pid: i32) -> bool {
    let at = || fs::read_to_string(format!("/proc/{pid}/syscall")).unwrap_or_default();
    let ran = || crate::harness::cpu_time(pid);
    let before = (at(), ran());
    std::thread::sleep(Duration::from_millis(100));
    before == (at(), ran())
}

#[test]
fn a_stale_lock_is_ended_and_it_is_said_whose_it_was_and_where_its_record_lies() {
    let sandbox = Sandbox::new();
    let dead = planted(1_000);
    plant(&sandbox.lock(), &dead, 60_000);
    let before = Snapshot::of(&sandbox.lock());
    let finished = sandbox.withlock().args(["break", "--reason", "ticket 17"]).lock().run();
    finished.exited(0).silent();
    let slot = &slots(&sandbox.lock())[0];
    let lies_at = slot.path.join("lock");
    let out = finished.out();
    for part in
        ["ended", "pid 4194303 on", "user root", "dead-job", dead.nonce.as_str(), &lies_at.display().to_string()]
    {
        assert!(out.contains(part), "{part:?} is not in {out}");
    }
    assert_eq!(Snapshot::of(&lies_at), before, "the file itself, its time stamp kept");
    let claims = claims_in(&slot.path);
    assert_eq!(claims.len(), 1);
    assert_eq!((&claims[&0]["why"], &claims[&0]["reason"]), (&"break".into(), &"ticket 17".into()));
    assert_eq!(sandbox.names().len(), 1, "nothing else is left");
    assert!(text(&sandbox, &sandbox.lock()).contains("break: ticket 17"));
}

#[test]
fn c49_a_lock_that_is_not_stale_is_refused_in_the_words_of_inspect_and_left_untouched() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().args(["--ttl", "1h"]).lock().sh(gate.script()).start();
    gate.wait_inside();
    let before = tree(&sandbox.work());
    for args in [vec!["break"], vec!["break", "--dry-run"]] {
        let finished = sandbox.withlock().args(args).lock().run();
        let pid = format!("pid {}", holder.pid());
        finished.exited(75).one_line(&["a.lock: held, expires in ", &pid, "not broken", "withlock inspect"]);
        assert_eq!(finished.out(), "");
    }
    assert_eq!(tree(&sandbox.work()), before);
    // The rule is that of inspect, to the word.
    let headline = text(&sandbox, &sandbox.lock()).lines().next().expect("a line").to_owned();
    let state = headline.split(", expires").next().expect("a state").to_owned();
    sandbox.withlock().arg("break").lock().run().exited(75).one_line(&[&state]);
    gate.open();
    holder.wait().exited(0).silent();
}

#[test]
fn a_guarded_lock_is_refused_naming_who_vouches_for_it_and_forced_its_holder_learns_so_at_once() {
    let sandbox = Sandbox::new();
    let holder = stopped_holder(&sandbox);
    let before = tree(&sandbox.work());
    for args in [vec!["break"], vec!["break", "--dry-run"]] {
        let finished = sandbox.withlock().args(args).lock().run();
        let named = format!("pid {} (withlock, state T)", holder.pid());
        finished.exited(75).one_line(&["stale but guarded, overdue by", &named, "(sleep, state S)", "not broken"]);
    }
    assert_eq!(tree(&sandbox.work()), before);
    let forced = sandbox.withlock().args(["break", "--force"]).lock().run();
    forced.exited(0).silent();
    assert!(!sandbox.lock().exists());
    holder.send(Signal::SIGCONT);
    holder.wait().exited(76).says(&["a.lock", "lost"]);
    sandbox.wait_until_nothing_runs();
}

#[test]
fn a_live_lock_is_broken_by_force_and_its_holder_ends_its_command_with_76() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let body = format!("{}; exec sleep 1000", gate.enter());
    let holder = sandbox.withlock().args(["--ttl", "1h"]).lock().sh(body).start();
    gate.wait_inside();
    let held = record(&sandbox.lock()).expect("a record");
    let dry = sandbox.withlock().args(["break", "--force", "--dry-run"]).lock().run();
    dry.exited(0).silent();
    assert!(dry.out().contains("would be ended") && sandbox.lock().exists(), "{}", dry.out());
    sandbox.withlock().args(["break", "--force", "--nonce", held.nonce.as_str()]).lock().run().exited(0).silent();
    let broken = Instant::now();
    let lost = holder.wait();
    lost.exited(76).says(&["a.lock", "lost"]);
    // Looked for once a second. Far sooner than the next renewal, whatever else the machine does.
    assert!(lost.ended - broken < Duration::from_secs(30), "{:?}", lost.ended - broken);
    println!("noticed after {:?}", lost.ended - broken);
    sandbox.wait_until_nothing_runs();
    assert_eq!(slots(&sandbox.lock())[0].name.nonce, held.nonce);
    assert!(!sandbox.lock().exists(), "it is not made again");
}

#[test]
fn c49_with_a_nonce_only_that_epoch_is_ended_never_the_next_holders() {
    let sandbox = Sandbox::new();
    let (old, next) = (planted(1_000), planted(1_000));
    plant(&sandbox.lock(), &next, 60_000);
    let before = tree(&sandbox.work());
    for extra in [vec![], vec!["--force"], vec!["--dry-run"], vec!["--force", "--dry-run"]] {
        let run = sandbox.withlock().args(["break", "--nonce", old.nonce.as_str()]).args(extra).lock().run();
        run.exited(75).one_line(&["stale, overdue", &format!("the epoch {} has ended", old.nonce), "not broken"]);
        assert_eq!(tree(&sandbox.work()), before);
    }
    sandbox.withlock().args(["break", "--nonce", next.nonce.as_str()]).lock().run().exited(0).silent();
    for wrong in ["", "xyz", &"AB".repeat(16), &"a".repeat(31)] {
        sandbox.withlock().args(["break", "--nonce", wrong]).lock().run().exited(64).one_line(&["--nonce"]);
    }
}

#[test]
fn c49_what_became_anothers_between_the_look_and_the_end_is_left_alone_even_by_force() {
    for force in [&[][..], &["--force"]] {
        let sandbox = Sandbox::new();
        plant(&sandbox.lock(), &planted(1_000), 60_000);
        // Stopped when it has looked and has the guard, before it looks again.
        let breaker = stopped_at(sandbox.withlock().arg("break").args(force).lock(), "flock");
        let next = planted(HOUR_MS);
        let fresh = sandbox.path("fresh");
        plant(&fresh, &next, 0);
        fs::rename(&fresh, sandbox.lock()).expect("the next holder's lock");
        let before = Snapshot::of(&sandbox.lock());
        breaker.send(Signal::SIGCONT);
        let finished = breaker.wait();
        finished.exited(75).one_line(&["held, expires in", "the epoch that was looked at has ended", "not broken"]);
        assert_eq!(Snapshot::of(&sandbox.lock()), before);
        assert_eq!(sandbox.names(), ["a.lock"], "nothing is left behind");
    }
}

#[test]
fn where_nobody_holds_the_lock_it_says_so_and_exits_0() {
    let sandbox = Sandbox::new();
    for extra in [vec![], vec!["--force"], vec!["--dry-run"], vec!["--nonce", "0123456789abcdef0123456789abcdef"]] {
        let finished = sandbox.withlock().arg("break").args(extra).lock().run();
        finished.exited(0).silent();
        assert!(finished.out().contains("a.lock: free, there is nothing to break"), "{finished}");
    }
    assert!(sandbox.names().is_empty());
    sandbox.withlock().args(["break", "missing/a.lock"]).run().exited(73).one_line(&["missing", "no such directory"]);
}

#[test]
fn c11_c12_what_is_no_lock_is_never_touched_not_by_force_either() {
    let sandbox = Sandbox::new();
    let old = SystemTime::now() - Duration::from_secs(7 * 86_400);
    fs::write(sandbox.path("script"), "#!/bin/sh\nrm -rf /\n").expect("a file");
    fs::write(sandbox.path("credentials"), "{\"token\": 1}").expect("a file");
    fs::write(sandbox.path("large"), vec![0; 5_000]).expect("a file");
    fs::create_dir(sandbox.path("project")).expect("a directory");
    fs::write(sandbox.path("project/data"), "data").expect("a file");
    plant(&sandbox.path("target"), &planted(1_000), 60_000);
    fs::write(sandbox.path("empty"), "").expect("a file");
    for (link, target) in [
        ("to-lock", "target"),
        ("to-empty", "empty"),
        ("dangling", "nowhere"),
        ("to-directory", "project"),
        ("itself", "itself"),
    ] {
        symlink(target, sandbox.path(link)).expect("a link");
    }
    nix::unistd::mkfifo(&sandbox.path("fifo"), nix::sys::stat::Mode::S_IRWXU).expect("a FIFO");
    let names = [
        "script",
        "credentials",
        "large",
        "project",
        "to-lock",
        "to-empty",
        "dangling",
        "to-directory",
        "itself",
        "fifo",
    ];
    for name in names.into_iter().chain(["target", "empty"]) {
        set_mtime(&sandbox.path(name), old);
    }
    let before = tree(&sandbox.work());
    for name in names {
        for extra in [vec![], vec!["--force"]] {
            let finished = sandbox.withlock().arg("break").args(extra).arg(name).run();
            finished.exited(73).one_line(&[name, "not a withlock lock"]);
        }
        sandbox.withlock().args(["reclaim", name]).run();
    }
    assert_eq!(tree(&sandbox.work()), before);
}

#[test]
fn c11_an_old_empty_file_that_somebody_holds_with_flock_is_not_broken() {
    let sandbox = Sandbox::new();
    plant_bytes(&sandbox.lock(), b"", HOUR_MS);
    let mut gate = sandbox.gate();
    let user = sandbox.program("flock").lock().args(["-c", &gate.script()]).start();
    gate.wait_inside();
    age(&sandbox.lock(), HOUR_MS);
    let before = tree(&sandbox.work());
    let finished = sandbox.withlock().arg("break").lock().run();
    finished.exited(75).one_line(&["blank, stale but guarded", "flock", "not broken"]);
    assert_eq!(tree(&sandbox.work()), before);
    let found = inspected(&sandbox, &sandbox.lock());
    assert_eq!((&found["state"], found["next"].as_array().map(Vec::len)), (&"blank".into(), Some(0)));
    gate.open();
    user.wait().exited(0);
}

#[test]
fn c03_a_blank_lock_is_broken_by_age_and_kept_and_a_young_one_by_force_only() {
    for (what, content) in blanks() {
        let sandbox = Sandbox::new();
        let (_, old_ms) = blank_ages_ms();
        plant_bytes(&sandbox.lock(), &content, 1_000);
        sandbox.withlock().arg("break").lock().run().exited(75).one_line(&["blank, held, expires in", "not broken"]);
        assert_eq!(sandbox.names(), ["a.lock"], "{what}");
        age(&sandbox.lock(), old_ms);
        sandbox.withlock().arg("break").lock().run().exited(0).silent();
        let kept = slots(&sandbox.lock());
        assert_eq!(kept[0].lock.as_deref(), Some(content.as_slice()), "{what} is kept");
        plant_bytes(&sandbox.lock(), &content, 0);
        sandbox.withlock().args(["break", "--force"]).lock().run().exited(0).silent();
        assert_eq!(slots(&sandbox.lock()).len(), 2, "{what}");
    }
}

#[test]
fn c01_age_decides_whatever_process_has_the_recorded_pid() {
    let sandbox = Sandbox::new();
    for pid in [1, std::process::id(), 4_194_303] {
        let mut old = planted(1_000);
        old.pid = pid;
        plant(&sandbox.lock(), &old, 60_000);
        sandbox.withlock().arg("break").lock().run().exited(0).silent();
        let mut young = planted(HOUR_MS);
        young.pid = pid;
        plant(&sandbox.lock(), &young, 60_000);
        sandbox.withlock().arg("break").lock().run().exited(75).one_line(&[&format!("pid {pid} on")]);
    }
}

#[test]
fn c18_a_lock_with_a_time_stamp_in_the_future_is_watched_for_one_ttl_and_then_ended() {
    let sandbox = Sandbox::new();
    plant(&sandbox.lock(), &planted(1_500), 0);
    set_mtime(&sandbox.lock(), SystemTime::now() + Duration::from_secs(365 * 86_400));
    let dry = sandbox.withlock().args(["break", "--dry-run"]).lock().run();
    dry.exited(0).silent();
    assert!(dry.out().contains("after it was watched unchanged for 1.5s"), "{}", dry.out());
    let finished = sandbox.withlock().arg("break").lock().run();
    finished.exited(0).one_line(&["364d 23h in the future", "watching it for its ttl, 1.5s"]);
    assert!(finished.took > Duration::from_millis(1_500), "{:?}", finished.took);
    assert!(!sandbox.lock().exists());
}

#[test]
fn c18_a_lock_that_is_renewed_while_it_is_watched_is_left_alone_and_a_signal_ends_the_watch() {
    let sandbox = Sandbox::new();
    let ahead = SystemTime::now() + Duration::from_secs(365 * 86_400);
    plant(&sandbox.lock(), &planted(HOUR_MS), 0);
    set_mtime(&sandbox.lock(), ahead);
    let breaker = sandbox.withlock().arg("break").lock().start();
    breaker.wait_for_stderr("watching it");
    set_mtime(&sandbox.lock(), ahead + Duration::from_secs(1));
    let before = tree(&sandbox.work());
    breaker.wait().exited(75).says(&["it was renewed while it was watched", "not broken"]);
    let breaker = sandbox.withlock().arg("break").lock().start();
    breaker.wait_for_stderr("watching it");
    breaker.send(Signal::SIGINT);
    assert_eq!(breaker.wait().signal(), Some(2));
    assert_eq!(tree(&sandbox.work()), before);
}

#[test]
fn c09_in_a_sticky_directory_another_users_lock_is_refused_in_clear_words_and_nothing_is_made() {
    let sandbox = Sandbox::new();
    let dir = sandbox.path("shared");
    fs::create_dir(&dir).expect("a directory");
    sandbox.chmod(&dir, 0o1777);
    let lock = dir.join("a.lock");
    plant(&lock, &planted(1_000), 60_000);
    let before = tree(&dir);
    for extra in [vec![], vec!["--force"], vec!["--dry-run"]] {
        let log = sandbox.io_path("strace");
        let run = sandbox.program(sandbox.public_binary()).arg("break").args(extra).arg(&lock);
        let finished = run.run_by_nobody().traced(&log, &["-e", "trace=%file"]).run();
        finished.exited(77).one_line(&["cannot be broken", "belongs to uid 0", "sticky directory", "we are uid 65534"]);
        let calls = calls(&log);
        assert!(!calls.iter().any(|call| call.name.starts_with("mkdir")), "it makes nothing: {calls:?}");
        assert!(calls.len() < 200, "{} calls: a busy loop", calls.len());
    }
    // Its own it may.
    std::os::unix::fs::chown(&lock, Some(65_534), Some(65_534)).expect("chown");
    age(&lock, 60_000);
    assert_ne!(tree(&dir), before);
    sandbox.program(sandbox.public_binary()).arg("break").arg(&lock).run_by_nobody().run().exited(0).silent();
}

#[test]
fn standing_errors_come_at_once_and_name_what_is_in_the_way() {
    let sandbox = Sandbox::new();
    let dir = sandbox.path("dir");
    fs::create_dir(&dir).expect("a directory");
    let lock = dir.join("a.lock");
    plant(&lock, &planted(1_000), 60_000);
    let before = tree(&dir);
    let read_only = on_read_only(sandbox.withlock().arg("break").arg(&lock), &dir).run();
    read_only.exited(73).one_line(&["read-only"]);
    let nobody = || sandbox.program(sandbox.public_binary()).arg("break").arg(&lock).run_by_nobody().run();
    nobody().exited(77).one_line(&["no permission", "belongs to root", "mode 0755", "we are uid 65534"]);
    sandbox.chmod(&dir, 0o777);
    sandbox.chmod(&lock, 0o600);
    nobody().exited(77).one_line(&["cannot be broken", "we may not read it"]);
    sandbox.chmod(&dir, 0o755);
    sandbox.chmod(&lock, 0o644);
    assert_eq!(tree(&dir), before);
}

#[test]
fn without_an_inode_for_a_slot_a_stale_lock_is_freed_under_its_guard_and_its_record_kept() {
    let sandbox = Sandbox::new();
    // A file system with room for its top, the lock, and nothing else.
    let body = r#"mount -t tmpfs -o size=64k,nr_inodes=3 none "$0" && cd "$0" && cp "$1" a.lock && touch -d '-1 hour' a.lock &&
        : >filler; mkdir full 2>/dev/null && exit 99
        "$WL" break a.lock; echo "exit $?"; ls; "$WL" inspect --json a.lock; rm filler; "$WL" reclaim .; ls"#;
    let dir = sandbox.path("small");
    fs::create_dir(&dir).expect("a directory");
    let dead = planted(1_000);
    plant(&sandbox.path("record"), &dead, 0);
    let run = sandbox.sh(body).arg(&dir).arg(sandbox.path("record"));
    let finished = run.through(["unshare", "--mount", "--propagation", "private"]).run();
    finished.exited(0).silent();
    let name = SlotName::of(&dead).file_name(OsStr::new("a.lock")).into_string().expect("a name");
    let out = finished.out();
    let lines: Vec<&str> = out.lines().collect();
    assert!(lines[0].starts_with("a.lock: ended"), "{out}");
    assert!(lines[3].ends_with(&format!("record  {name}")), "the file itself is the quarantine: {out}");
    assert_eq!(&lines[4..7], ["exit 0", &name, "filler"], "{out}");
    let document: Value = serde_json::from_str(lines[7]).expect("a document");
    let quarantine = &document["locks"][0]["quarantine"][0];
    assert_eq!(
        (&quarantine["fate"], &quarantine["owner"]["nonce"]),
        (&"reclaimable".into(), &dead.nonce.as_str().into())
    );
    assert!(lines[8].contains("removed") && lines[9].contains("1 removed, 0 kept") && lines.len() == 10, "{out}");
}

/// A break that has its claim and the guard and is stopped right behind the claim.
fn stuck_ender(sandbox: &Sandbox) -> Running {
    let ender = stopped_at(sandbox.withlock().arg("break").lock(), "write");
    assert!(slots(&sandbox.lock())[0].path.join("claim-0").exists());
    ender
}

#[test]
fn an_ender_at_work_is_not_disturbed_and_the_claim_of_a_dead_one_is_passed_over_at_once() {
    let sandbox = Sandbox::new();
    plant(&sandbox.lock(), &planted(60_000), 300_000);
    let ender = stuck_ender(&sandbox);
    for args in [vec!["break"], vec!["break", "--force"]] {
        let pid = format!("contested: pid {} on", ender.pid());
        sandbox.withlock().args(args).lock().run().exited(75).one_line(&[&pid, "is ending it", "not broken"]);
    }
    assert!(sandbox.lock().exists());
    send(ender.pid(), Signal::SIGKILL);
    ender.wait();
    sandbox.withlock().arg("break").lock().run().exited(0).silent();
    let slots = slots(&sandbox.lock());
    assert_eq!(claims_in(&slots[0].path).keys().copied().collect::<Vec<_>>(), [0, 1]);
    assert!(!sandbox.lock().exists() && slots[0].lock.is_some());
}

#[test]
fn an_ender_that_is_stuck_while_it_has_the_guard_is_passed_over_by_force_after_the_reclaim_age() {
    let sandbox = Sandbox::new();
    plant(&sandbox.lock(), &planted(1_000), 60_000);
    let ender = stuck_ender(&sandbox);
    let forced = sandbox.withlock().args(["break", "--force"]).lock().run();
    forced.exited(0).one_line(&["another process is ending it", "passing it over in"]);
    assert!(!sandbox.lock().exists());
    let next = planted(HOUR_MS);
    plant(&sandbox.lock(), &next, 0);
    // Let go at last, it does not touch the next epoch.
    let before = Snapshot::of(&sandbox.lock());
    send(ender.pid(), Signal::SIGCONT);
    ender.wait().exited(75).one_line(&["held, expires in", "the epoch that was looked at has ended"]);
    assert_eq!(Snapshot::of(&sandbox.lock()), before);
}

#[test]
fn c15_names_of_any_bytes_are_broken_byte_for_byte_and_drive_no_terminal() {
    let sandbox = Sandbox::new();
    for name in nasty_names() {
        let lock = sandbox.path(&name);
        let mut evil = planted(1_000);
        evil.command = "\x1b[2Jevil\n".into();
        plant(&lock, &evil, 60_000);
        let finished = sandbox.withlock().arg("break").arg(&lock).run();
        finished.exited(0).silent();
        assert_eq!(finished.out().lines().count(), 4, "{:?}", finished.out());
        assert!(!finished.out().chars().any(|c| c.is_control() && c != '\n'), "{:?}", finished.out());
        assert!(std::str::from_utf8(&finished.stdout).is_ok());
        assert_eq!((inode(&lock), slots(&lock).len()), (None, 1));
        fs::remove_dir_all(&slots(&lock)[0].path).expect("the slot goes");
    }
}

#[test]
fn a_reason_that_a_record_cannot_keep_is_a_usage_error_before_anything_is_done() {
    use std::os::unix::ffi::OsStrExt;
    let sandbox = Sandbox::new();
    plant(&sandbox.lock(), &planted(1_000), 60_000);
    let before = tree(&sandbox.work());
    let long = "x".repeat(2_000);
    for reason in [OsStr::new(&long), OsStr::from_bytes(b"\xff")] {
        sandbox.withlock().args(["break", "--reason"]).arg(reason).lock().run().exited(64).one_line(&["--reason"]);
    }
    sandbox.withlock().arg("break").run().exited(64).one_line(&["LOCK"]);
    assert_eq!(tree(&sandbox.work()), before);
}

#[test]
fn a_name_that_is_too_long_for_any_file_is_not_said_to_be_a_lock_that_cannot_be_taken() {
    let sandbox = Sandbox::new();
    let name = "n".repeat(256);
    let finished = sandbox.withlock().args(["break", &name]).run();
    assert_eq!(finished.exited(73).err(), format!("withlock: {name}: cannot look at it: File name too long\n"));
}

#[test]
fn a_lock_that_may_not_be_read_is_not_said_to_have_another_nonce() {
    let sandbox = Sandbox::new();
    let record = planted(60_000);
    plant(&sandbox.lock(), &record, 0);
    sandbox.chmod(sandbox.lock(), 0o600);
    sandbox.chmod(sandbox.work(), 0o777);
    let broken = sandbox.program(sandbox.public_binary()).args(["break", "--nonce", record.nonce.as_str()]).lock();
    broken.run_by_nobody().run().exited(77).one_line(&["a.lock: cannot be broken: we may not read it"]);
    assert_eq!(sandbox.names(), ["a.lock"]);
}
