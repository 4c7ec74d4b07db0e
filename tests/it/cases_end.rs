//! Faults that others had: renew, break and release, and the litter they left.
//!
//! Needs strace, chattr, and root.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;

use crate::harness::{
    Gate, Running, Sandbox, Snapshot, age, calls, eventually, inode, mtime, plant, plant_bytes, planted, record,
    set_mtime, slots, tree, with_record,
};

/// The calls by which a name can be taken off a path.
const TAKE_OFF: &str = "rename,renameat,renameat2,unlink,unlinkat,rmdir";

/// A holder without renewal and guard, so that its lease runs out while it lives, delayed by three
/// seconds before each call in `delayed`; its command ends at once.
fn delayed_holder(sandbox: &Sandbox, shipped: bool, leave_out: &str, delayed: &str) -> Running {
    let run = if shipped { sandbox.shipped() } else { sandbox.withlock().leave_out(leave_out) };
    let run = run.args(["--no-renew", "--ttl", "1s"]).lock().args(["--", "true"]);
    let running = run.delayed(&sandbox.io_path("strace"), delayed, 3_000).start();
    with_record(&sandbox.lock());
    running
}

/// Takes the lock as soon as it can, and stays in the gate.
fn successor(sandbox: &Sandbox, gate: &mut Gate) -> Running {
    let running = sandbox.withlock().args(["-q", "-w", "30s", "--ttl", "1h"]).lock().sh(gate.script()).start();
    gate.wait_inside();
    running
}

#[test]
fn c23_a_release_under_way_keeps_others_out_until_it_is_done() {
    // Without a guard during its hold, it takes one for the release: whoever would evict it waits.
    let sandbox = Sandbox::new();
    let late = delayed_holder(&sandbox, true, "", TAKE_OFF);
    let mut gate = sandbox.gate();
    let next = successor(&sandbox, &mut gate);
    let before = Snapshot::of(&sandbox.lock());
    let late = late.wait();
    late.exited(0).silent();
    assert!(late.took >= Duration::from_secs(3), "it was delayed: {:?}", late.took);
    assert_eq!(Snapshot::of(&sandbox.lock()), before);
    gate.open();
    next.wait().exited(0).silent();
}

#[test]
fn c23_a_holder_delayed_before_its_release_leaves_its_successors_lock_alone() {
    // As on a host whose guards the successor does not see.
    let sandbox = Sandbox::new();
    let late = delayed_holder(&sandbox, false, "release-guard", TAKE_OFF);
    let mut gate = sandbox.gate();
    let next = successor(&sandbox, &mut gate);
    let before = Snapshot::of(&sandbox.lock());
    let late = late.wait();
    late.exited(76);
    assert!(late.took >= Duration::from_secs(3), "it was delayed: {:?}", late.took);
    assert_eq!(Snapshot::of(&sandbox.lock()), before);
    gate.open();
    next.wait().exited(0).silent();
}

#[test]
fn c23_a_holder_that_releases_by_unlink_removes_its_successors_lock() {
    // The negative control of the test above.
    let sandbox = Sandbox::new();
    let late = delayed_holder(&sandbox, false, "release-by-slot,release-guard", TAKE_OFF);
    let mut gate = sandbox.gate();
    let next = successor(&sandbox, &mut gate);
    let before = inode(&sandbox.lock());
    late.wait();
    assert_ne!(inode(&sandbox.lock()), before, "the successor's lock is gone");
    gate.open();
    assert_eq!(next.wait().code(), Some(76));
}

/// A holder that no contender sees a guard of, delayed by three seconds before each renewal: a suspended
/// holder on another host, in short.
fn late_renewal(leave_out: &str) -> (Sandbox, Option<u64>, Snapshot, Snapshot) {
    let sandbox = Sandbox::new();
    let mut command = sandbox.gate();
    let run = sandbox.withlock().leave_out(leave_out).args(["--ttl", "1s"]).lock().sh(command.script());
    let late = run.delayed(&sandbox.io_path("strace"), "utimensat", 3_000).start();
    command.wait_inside();
    let mut gate = sandbox.gate();
    let next = successor(&sandbox, &mut gate);
    // A stamp of its own, which a renewal by somebody else would overwrite.
    age(&sandbox.lock(), 1_234_000);
    let (held, before) = (inode(&sandbox.lock()), Snapshot::of(&sandbox.lock()));
    late.wait().exited(76);
    let after = Snapshot::of(&sandbox.lock());
    gate.open();
    next.wait();
    (sandbox, held, before, after)
}

#[test]
fn c23_a_holder_delayed_before_a_renewal_does_not_refresh_its_successors_lock() {
    let (_sandbox, _, before, after) = late_renewal("guard");
    assert_eq!(after, before);
}

#[test]
fn c23_a_holder_that_renews_by_path_refreshes_its_successors_lock() {
    // The negative control of the test above.
    let (_sandbox, held, before, after) = late_renewal("guard,descriptor");
    assert!(held.is_some());
    assert_ne!(after, before);
}

/// A maker that is held up between its create and its guard for so long that its newborn lock is evicted
/// as an old blank one; says whether its command ran beside the evictor's.
fn stalled_maker_runs_beside_its_evictor(shipped: bool, leave_out: &str) -> bool {
    let sandbox = Sandbox::new();
    let run = if shipped { sandbox.shipped() } else { sandbox.withlock().leave_out(leave_out) };
    let run = run.args(["-q", "--on-lost", "warn"]).lock().args(["--", "touch", "maker-ran"]);
    let options = ["-e", "trace=flock", "-e", "inject=flock:delay_enter=3000000:when=1"];
    let maker = run.traced(&sandbox.io_path("strace"), &options).start();
    eventually("the newborn lock is there", || fs::metadata(sandbox.lock()).map(drop));
    age(&sandbox.lock(), crate::harness::blank_ages_ms().1);
    let mut gate = sandbox.gate();
    let evictor = successor(&sandbox, &mut gate);
    // The maker either runs its command now, or goes to sleep on the evictor's guard. (While strace holds
    // it up it is not asleep but stopped.)
    let ran = eventually("the maker has seen what happened", || {
        let ran = sandbox.path("maker-ran").exists();
        let sleeps = crate::harness::process(maker.pid()).is_some_and(|process| process.state == 'S');
        let waits = sleeps && crate::harness::asleep_in_flock(maker.pid()).is_ok();
        if ran || waits { Ok(ran) } else { Err(()) }
    });
    gate.open();
    evictor.wait();
    maker.wait();
    assert!(sandbox.path("maker-ran").exists(), "it gets in afterwards");
    ran
}

#[test]
fn c23_a_maker_that_stalled_until_its_newborn_lock_was_evicted_starts_over() {
    assert!(!stalled_maker_runs_beside_its_evictor(true, ""));
}

#[test]
fn c23_a_maker_that_does_not_look_again_runs_beside_its_evictor() {
    // The negative control of the test above.
    assert!(stalled_maker_runs_beside_its_evictor(false, "grant-check"));
}

/// Two evictors of one stale lock, each held up at the worst place; says whether both were inside at
/// once. The witness is a directory: it can be made only once.
fn two_delayed_breakers(shipped: bool, leave_out: &str, inject: &str) -> bool {
    let sandbox = Sandbox::new();
    plant(&sandbox.lock(), &planted(10_000), 60_000);
    let body = "mkdir inside || touch overlap; sleep 1; rmdir inside; :";
    let start = || {
        let run = if shipped { sandbox.shipped() } else { sandbox.withlock().leave_out(leave_out) };
        let run = run.args(["-w", "30s", "--on-lost", "warn"]).lock().sh(body);
        run.traced(&sandbox.io_path("strace"), &["-e", "trace=renameat2,getdents64", "-e", inject]).start()
    };
    let first = start();
    // The second comes when the first has begun, so that it acts a little later at every step.
    eventually("the first has made the slot", || {
        let slots = slots(&sandbox.lock());
        if slots.is_empty() { Err(sandbox.names()) } else { Ok(()) }
    });
    let second = start();
    let ends = [first.wait(), second.wait()];
    if leave_out.is_empty() {
        for end in &ends {
            end.exited(0);
        }
        assert!(!sandbox.lock().exists());
    }
    sandbox.path("overlap").exists()
}

/// Held up right before the rename.
const BEFORE_RENAME: &str = "inject=renameat2:delay_enter=3000000";
/// Held up after the look into the slot, so that both find it empty.
const AFTER_LOOK: &str = "inject=getdents64:delay_exit=1000000";

#[test]
fn c24_two_breakers_of_one_stale_lock_never_overlap_wherever_both_are_delayed() {
    crate::harness::shipped();
    std::thread::scope(|scope| {
        for inject in [BEFORE_RENAME, AFTER_LOOK] {
            scope.spawn(move || assert!(!two_delayed_breakers(true, "", inject), "{inject}"));
        }
    });
}

#[test]
fn c24_two_breakers_without_veto_claim_and_verification_overlap() {
    // The negative control of the test above.
    assert!(two_delayed_breakers(false, "veto,claim,verify,noreplace", AFTER_LOOK));
}

#[test]
fn c26_a_held_lock_that_is_removed_or_replaced_is_noticed_reported_and_not_made_again() {
    let sandbox = Sandbox::new();
    let other = planted(3_600_000);
    plant(&sandbox.path("other"), &other, 0);
    fs::write(sandbox.path("text"), "not a lock\n").expect("a file");
    let members = [
        ("removed", "rm $L"),
        ("moved away", "mv $L elsewhere"),
        ("replaced by another lock", "mv other $L"),
        ("replaced by a text", "mv text $L"),
        ("replaced by a directory", "rm $L; mkdir $L"),
        ("replaced by a copy of itself", "cp $L copy; mv copy $L"),
    ];
    for (what, act) in members {
        let _ = fs::remove_file(sandbox.lock());
        // The command goes on: the wrapper must notice by itself, and end it.
        let body = format!("{act}; echo done >acted; exec sleep 1000");
        let running = sandbox.withlock().args(["--ttl", "1h"]).lock().sh(body).start();
        eventually("the command has acted", || fs::read(sandbox.path("acted")).map(drop));
        let acted = std::time::Instant::now();
        let after = fs::symlink_metadata(sandbox.lock()).ok().map(|_| Snapshot::of(&sandbox.lock()));
        let finished = running.wait();
        assert_eq!(finished.code(), Some(76), "{what}: {finished}");
        finished.says(&["a.lock", "lost"]);
        // Looked for once a second; the rest is a loaded machine's.
        let noticed = finished.ended - acted;
        assert!(noticed < Duration::from_secs(8), "{what}: noticed only after {noticed:?}");
        let now = fs::symlink_metadata(sandbox.lock()).ok().map(|_| Snapshot::of(&sandbox.lock()));
        assert_eq!(now, after, "{what}: what is there was left alone");
        sandbox.wait_until_nothing_runs();
        fs::remove_file(sandbox.path("acted")).expect("acted");
        let _ = fs::remove_dir(sandbox.lock());
    }
}

#[test]
fn c26_a_lock_removed_just_before_the_command_ends_is_reported_too() {
    let sandbox = Sandbox::new();
    let finished = sandbox.withlock().lock().sh("rm $L").run();
    finished.exited(76).one_line(&["a.lock", "lost"]);
    assert!(sandbox.names().is_empty());
    // The command's own failure is not hidden behind it.
    let failed = sandbox.withlock().lock().sh("rm $L; exit 3").run();
    assert!(matches!(failed.code(), Some(3 | 76)), "{failed}");
    failed.says(&["a.lock", "lost"]);
}

#[test]
fn c26_a_lock_whose_content_is_gone_is_lost() {
    let sandbox = Sandbox::new();
    let finished = sandbox.withlock().args(["--ttl", "1s"]).lock().sh(": >$L; exec sleep 1000").run();
    finished.exited(76).says(&["a.lock", "lost"]);
}

#[test]
fn a_slot_that_root_left_half_made_in_a_users_directory_does_not_lock_that_user_out() {
    const NOBODY: Option<u32> = Some(65_534);
    let sandbox = Sandbox::new();
    let (lock, dead) = (sandbox.lock(), planted(1_000));
    plant(&lock, &dead, 60_000);
    for path in [&sandbox.work(), &lock] {
        std::os::unix::fs::chown(path, NOBODY, NOBODY).expect("chown");
    }
    // As a `break` by root that died after its claim: nobody else may make a claim there.
    let slot = sandbox.path(withlock::record::SlotName::of(&dead).file_name("a.lock".as_ref()));
    fs::create_dir(&slot).expect("a slot");
    sandbox.chmod(&slot, 0o755);
    plant_bytes(&slot.join("claim-0"), b"{}", 60_000);
    let program = sandbox.public_binary();
    let run = |args: &[&str]| sandbox.program(&program).args(args).lock();
    run(&["-w", "10s"]).args(["--", "true"]).run_by_nobody().run().exited(0).silent();
    assert!(!lock.exists());
    // What root left is root's to remove.
    age(&slot, 3_600_000);
    sandbox.shipped().arg("reclaim").lock().run().exited(0);
    assert!(!slot.exists(), "{:?}", sandbox.names());
}

/// A slot as an evictor leaves it, with a record and a claim, all of it `age_ms` old.
pub(crate) fn plant_slot(lock: &Path, ttl_ms: u64, age_ms: u64) -> std::path::PathBuf {
    let mut dead = planted(ttl_ms);
    dead.claimed_at_ms -= age_ms;
    let name = withlock::record::SlotName::of(&dead).file_name(lock.file_name().expect("a name"));
    let slot = lock.parent().expect("a parent").join(name);
    fs::create_dir(&slot).expect("a slot");
    plant(&slot.join("lock"), &dead, age_ms);
    let claim = format!(r#"{{"why":"stale","at_ms":1,"host":"h","pid":1,"uid":0,"ttl_ms":{ttl_ms}}}"#);
    plant_bytes(&slot.join("claim-0"), claim.as_bytes(), age_ms);
    age(&slot, age_ms);
    slot
}

#[test]
fn c27_the_quarantines_of_a_crash_loop_are_bounded() {
    let sandbox = Sandbox::in_memory();
    for _ in 0..200 {
        plant_slot(&sandbox.lock(), 1_000, 3_600_000);
    }
    // Each turn of the loop: a dead holder, whose successor evicts it.
    for _ in 0..20 {
        plant(&sandbox.lock(), &planted(1_000), 60_000);
        sandbox.withlock().arg("-n").lock().args(["--", "true"]).run().exited(0);
    }
    let left = slots(&sandbox.lock());
    assert!(left.len() <= 20, "{} quarantines are left", left.len());
    assert!(!left.is_empty(), "the young ones stay");
}

#[test]
fn c27_reclaiming_removes_only_what_is_exactly_its_own_and_old_enough() {
    let sandbox = Sandbox::new();
    let (lock, hour_ms) = (sandbox.lock(), 3_600_000);
    let nonce = "ab".repeat(16);
    let mut kept: Vec<std::path::PathBuf> = Vec::new();
    // Whatever a careless pattern would match.
    fs::create_dir(sandbox.path("precious")).expect("a directory");
    plant_bytes(&sandbox.path("precious/data"), b"data", hour_ms);
    symlink("precious", sandbox.path(format!("a.lock.stale-1-{nonce}"))).expect("a link");
    let with_directory = plant_slot(&lock, 1_000, hour_ms);
    fs::create_dir(with_directory.join("deeper")).expect("a directory");
    let with_stranger = plant_slot(&lock, 1_000, hour_ms);
    plant_bytes(&with_stranger.join("notes.txt"), b"mine", hour_ms);
    let with_link = plant_slot(&lock, 1_000, hour_ms);
    fs::remove_file(with_link.join("claim-0")).expect("the claim");
    symlink("../precious/data", with_link.join("claim-0")).expect("a link");
    // Each of them is old enough by its own time stamp.
    for slot in [&with_directory, &with_stranger, &with_link] {
        age(slot, hour_ms);
    }
    let young = plant_slot(&lock, 1_000, 3_000);
    // Old by the time in its name, which is older by the owner's lifetime, but ended just now.
    let long_lived = plant_slot(&lock, 1_000, hour_ms);
    age(&long_lived, 1_000);
    let others = plant_slot(&sandbox.path("b.lock"), 1_000, hour_ms);
    for name in ["a.lock.stale-01-", "a.lock.stale--", "a.lock.stalest-1-", "xa.lock.stale-1-"] {
        let similar = sandbox.path(format!("{name}{nonce}"));
        fs::create_dir(&similar).expect("a directory");
        set_mtime(&similar, std::time::SystemTime::now() - Duration::from_secs(3_600));
        kept.push(similar);
    }
    kept.extend([with_directory, with_stranger, with_link, young, long_lived, others]);
    let before = tree(&sandbox.work());
    let ordinary = plant_slot(&lock, 1_000, hour_ms);

    plant(&lock, &planted(1_000), 60_000);
    sandbox.withlock().arg("-n").lock().args(["--", "true"]).run().exited(0);

    assert!(!ordinary.exists(), "an ordinary old quarantine goes");
    let after = tree(&sandbox.work());
    for (path, snapshot) in before {
        assert_eq!(after.get(&path), Some(&snapshot), "{path:?}");
    }
    assert!(kept.iter().all(|path| path.exists()));
}

/// Evicts a stale lock beside an old slot that `change` has been at; says whether that slot is still there
/// after the reclaim that follows.
fn survives_a_reclaim(leave_out: &str, age_ms: u64, change: impl FnOnce(&Sandbox, &Path)) -> bool {
    let sandbox = Sandbox::new();
    let slot = plant_slot(&sandbox.lock(), 1_000, age_ms);
    change(&sandbox, &slot);
    plant(&sandbox.lock(), &planted(1_000), 60_000);
    sandbox.withlock().leave_out(leave_out).arg("-n").lock().args(["--", "true"]).run().exited(0);
    slot.exists()
}

#[test]
fn c27_a_quarantine_stays_while_a_rival_of_its_era_could_still_act() {
    assert!(survives_a_reclaim("", 3_000, |_, _| {}));
    // Twice the ttl is not enough: the claim deadline and the margin come on top.
    assert!(survives_a_reclaim("", 5_500, |_, _| {}));
    assert!(!survives_a_reclaim("", 60_000, |_, _| {}));
    assert!(!survives_a_reclaim("reclaim-age", 3_000, |_, _| {}), "the negative control");
}

#[test]
fn c27_a_quarantine_stays_while_its_maker_lives() {
    // The maker has the guard of the quarantined file, and may be about to release.
    let with_guard = |sandbox: &Sandbox, slot: &Path| {
        let mut gate = sandbox.gate();
        let lock = slot.join("lock");
        let maker = sandbox.program("flock").arg(&lock).args(["/bin/sh", "-c", &gate.script()]).start();
        gate.wait_inside();
        age(slot, 3_600_000);
        // It lives as long as the sandbox.
        std::mem::forget((maker, gate));
    };
    assert!(survives_a_reclaim("", 3_600_000, with_guard));
    assert!(!survives_a_reclaim("reclaim-guard", 3_600_000, with_guard), "the negative control");
}

#[test]
fn c27_a_slot_in_which_an_ender_died_is_used_by_the_next() {
    let sandbox = Sandbox::new();
    let slot = plant_slot(&sandbox.lock(), 1_000, 3_600_000);
    fs::rename(slot.join("lock"), sandbox.lock()).expect("the epoch is at the path still");
    sandbox.withlock().arg("-n").lock().args(["--", "true"]).run().exited(0).silent();
    assert_eq!(slots(&sandbox.lock()).len(), 1);
    assert!(slot.join("lock").exists(), "it was evicted through its own slot");
    let claims: Vec<u64> = crate::harness::claims_in(&slot).into_keys().collect();
    assert_eq!(claims, [0, 1], "the dead ender's claim was passed over");
}

#[test]
fn the_dead_owners_record_is_still_there_right_after_the_eviction() {
    let sandbox = Sandbox::new();
    let dead = planted(1_000);
    plant(&sandbox.lock(), &dead, 60_000);
    let planted_at = mtime(&sandbox.lock());
    sandbox.withlock().arg("-n").lock().args(["--", "true"]).run().exited(0);
    let slots = slots(&sandbox.lock());
    assert_eq!(slots.len(), 1);
    let kept = record(&slots[0].path.join("lock")).expect("the record");
    assert_eq!((kept.nonce, kept.ttl_ms, kept.command.as_str()), (dead.nonce, 1_000, "dead-job"));
    assert_eq!(mtime(&slots[0].path.join("lock")), planted_at, "its time stamp is kept");
    let claims = crate::harness::claims_in(&slots[0].path);
    assert_eq!(claims.len(), 1);
    assert_eq!(claims[&0]["why"], "stale");
}

/// A file that cannot be changed until this is dropped.
pub(crate) struct Immutable(pub(crate) std::path::PathBuf);

impl Drop for Immutable {
    fn drop(&mut self) {
        let _ = std::process::Command::new("chattr").arg("-ia").arg(&self.0).status();
    }
}

#[test]
fn c29_a_release_that_fails_is_not_hidden_behind_exit_0_and_does_not_hide_a_failure() {
    for (status, expected) in [(0, vec![74, 77]), (3, vec![3])] {
        let sandbox = Sandbox::new();
        let _undo = Immutable(sandbox.lock());
        let body = format!("chattr +i \"$L\" || exit 99; exit {status}");
        let finished = sandbox.withlock().args(["--ttl", "1h"]).lock().sh(body).run();
        assert!(expected.contains(&finished.code().expect("a code")), "{finished}");
        finished.says(&["a.lock", "expire"]);
        assert!(sandbox.lock().exists());
        assert!(finished.took < Duration::from_secs(20), "it gives up: {:?}", finished.took);
    }
}

#[test]
fn c29_a_directory_made_read_only_meanwhile_is_said_with_the_time_of_expiry() {
    let sandbox = Sandbox::new();
    let dir = sandbox.path("mine");
    fs::create_dir(&dir).expect("a directory");
    std::os::unix::fs::chown(&dir, Some(65_534), Some(65_534)).expect("chown");
    for (status, expected) in [(0, vec![74, 77]), (3, vec![3])] {
        let body = format!("chmod 555 mine; exit {status}");
        let run = sandbox.program(sandbox.public_binary()).arg("mine/a.lock").sh(body);
        let finished = run.run_by_nobody().run();
        assert!(expected.contains(&finished.code().expect("a code")), "{finished}");
        finished.says(&["mine/a.lock", "expire"]);
        sandbox.chmod(&dir, 0o755);
        fs::remove_file(dir.join("a.lock")).expect("the lock is still there");
        assert!(tree(&dir).is_empty(), "{:?}", tree(&dir).keys());
    }
}

#[test]
fn c29_whatever_the_system_says_to_the_release_is_told_and_shows_in_the_exit_code() {
    crate::harness::shipped();
    let check = |errno: &str, code: u8, text: &str| {
        let sandbox = Sandbox::new();
        let inject = format!("inject=rename,renameat,renameat2:error={errno}");
        let run = sandbox.shipped().args(["--ttl", "1h"]).lock().args(["--", "true"]);
        let options = ["-e", "trace=rename,renameat,renameat2", "-e", &inject];
        let finished = run.traced(&sandbox.io_path("strace"), &options).run();
        finished.exited(code).one_line(&["a.lock", text, "expire"]);
        assert!(sandbox.lock().exists());
    };
    std::thread::scope(|scope| {
        for (errno, code, text) in [
            ("EROFS", 74, "read-only"),
            ("EIO", 74, "I/O error"),
            ("ENOSPC", 74, "No space left"),
            ("ESTALE", 74, "Stale"),
            ("EACCES", 77, "ermission denied"),
            ("EPERM", 77, "not permitted"),
        ] {
            scope.spawn(move || check(errno, code, text));
        }
    });
}

#[test]
fn c09_a_stale_lock_of_another_user_in_a_sticky_directory_is_a_bounded_wait_and_leaves_nothing() {
    let sandbox = Sandbox::new();
    let dir = sandbox.path("shared");
    fs::create_dir(&dir).expect("a directory");
    sandbox.chmod(&dir, 0o1777);
    let lock = dir.join("a.lock");
    plant(&lock, &planted(1_000), 60_000);
    let before = tree(&dir);
    for (wait, at_least, at_most) in [("0", 0, 5), ("2s", 0, 8)] {
        let log = sandbox.io_path("strace");
        let run = sandbox.program(sandbox.public_binary()).args(["-w", wait]).arg(&lock).args(["--", "true"]);
        let finished = run.run_by_nobody().traced(&log, &["-e", "trace=%file"]).run();
        assert!(matches!(finished.code(), Some(75 | 77)), "{finished}");
        finished.says(&["a.lock", "65534"]);
        assert!(finished.err().lines().count() <= 2, "{finished}");
        let seconds = finished.took.as_secs();
        assert!((at_least..=at_most).contains(&seconds), "{finished}");
        assert_eq!(tree(&dir), before);
        let calls = calls(&log);
        assert!(!calls.iter().any(|call| call.name.starts_with("mkdir")), "it makes nothing: {calls:?}");
        assert!(calls.len() < 300, "{} calls: a busy loop", calls.len());
    }
}

#[test]
fn a_lock_that_is_held_is_held_by_exactly_one_file_with_a_whole_record() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let running = sandbox.withlock().args(["--label", "nightly", "--mode", "600"]).lock().sh(gate.script()).start();
    gate.wait_inside();
    let held = with_record(&sandbox.lock());
    assert_eq!(sandbox.names(), ["a.lock"]);
    assert_eq!(held.pid, u32::try_from(running.pid()).expect("a pid"));
    assert_eq!((held.command.as_str(), held.label.as_deref(), held.ttl_ms), ("sh", Some("nightly"), 60_000));
    let mode = std::os::unix::fs::MetadataExt::mode(&fs::metadata(sandbox.lock()).expect("the lock"));
    assert_eq!(mode & 0o7777, 0o600);
    gate.open();
    running.wait().exited(0).silent();
    assert!(sandbox.names().is_empty());
}
