//! `reclaim`: removes what is exactly a quarantine and old enough; keeps and explains all that looks like
//! one.
//!
//! Needs root and flock(1).

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use serde_json::Value;
use withlock::record::SlotName;

use crate::cases_end::plant_slot;
use crate::cases_path::nasty_names;
use crate::harness::{Sandbox, Snapshot, age, plant, plant_bytes, planted, slots, tree};

const HOUR_MS: u64 = 3_600_000;

/// What became of each quarantine, by its file name.
#[track_caller]
fn reclaimed(sandbox: &Sandbox, args: &[&str], path: &Path) -> BTreeMap<String, (String, String)> {
    let finished = sandbox.withlock().args(["reclaim", "--json"]).args(args).arg(path).run();
    finished.exited(0).silent();
    let document: Value = serde_json::from_slice(&finished.stdout).expect("a document");
    assert_eq!((&document["withlock_report"], &document["kind"]), (&Value::from(1), &Value::from("reclaim")));
    let text = |value: &Value| value.as_str().expect("text").to_owned();
    let entry = |found: &Value| {
        let path = text(&found["path"]);
        (path.rsplit('/').next().expect("a name").to_owned(), (text(&found["fate"]), text(&found["why"])))
    };
    document["quarantine"].as_array().expect("a list").iter().map(entry).collect()
}

fn name(path: &Path) -> String {
    path.file_name().expect("a name").to_string_lossy().into_owned()
}

/// Every kind of thing that a careless pattern would take for an old quarantine of `a.lock`, with why it
/// stays.
fn similar_things(sandbox: &Sandbox) -> Vec<(PathBuf, &'static str, &'static str)> {
    let lock = sandbox.lock();
    let nonce = "ab".repeat(16);
    let mut all: Vec<(PathBuf, &str, &str)> = Vec::new();
    fs::create_dir(sandbox.path("precious")).expect("a directory");
    plant_bytes(&sandbox.path("precious/data"), b"data", HOUR_MS);
    let link = sandbox.path(format!("a.lock.stale-1-{nonce}"));
    symlink("precious", &link).expect("a link");
    all.push((link, "not-ours", "it is a symbolic link"));
    let with_directory = plant_slot(&lock, 1_000, HOUR_MS);
    fs::create_dir(with_directory.join("deeper")).expect("a directory");
    all.push((with_directory, "not-ours", "it holds deeper, a directory"));
    let with_stranger = plant_slot(&lock, 1_000, HOUR_MS);
    plant_bytes(&with_stranger.join("notes.txt"), b"mine", HOUR_MS);
    all.push((with_stranger, "not-ours", "it holds notes.txt, a regular file"));
    let with_link = plant_slot(&lock, 1_000, HOUR_MS);
    fs::remove_file(with_link.join("claim-0")).expect("the claim");
    symlink("../precious/data", with_link.join("claim-0")).expect("a link");
    all.push((with_link, "not-ours", "it holds claim-0, a symbolic link"));
    let with_others = plant_slot(&lock, 1_000, HOUR_MS);
    plant(&with_others.join("lock"), &planted(1_000), HOUR_MS);
    all.push((with_others, "not-ours", "the lock in it is not this epoch's"));
    let with_text = plant_slot(&lock, 1_000, HOUR_MS);
    plant_bytes(&with_text.join("lock"), b"#!/bin/sh\n", HOUR_MS);
    all.push((with_text, "not-ours", "the lock in it is not this epoch's"));
    let file = sandbox.path(format!("a.lock.stale-2-{nonce}"));
    plant_bytes(&file, b"a file of mine", HOUR_MS);
    all.push((file, "not-ours", "it is a file without this epoch's record"));
    for name in ["a.lock.stale-01-", "a.lock.stale--", "a.lock.stale-+1-", "a.lock.stale-18446744073709551616-"] {
        let wrong = sandbox.path(format!("{name}{nonce}"));
        fs::create_dir(&wrong).expect("a directory");
        all.push((wrong, "not-ours", "its name is not exactly a quarantine's"));
    }
    let short = sandbox.path(format!("a.lock.stale-1-{}", &nonce[..31]));
    fs::create_dir(&short).expect("a directory");
    all.push((short, "not-ours", "its name is not exactly a quarantine's"));
    all.push((plant_slot(&sandbox.path("b.lock"), 1_000, HOUR_MS), "another-lock", "it is another lock's"));
    all.push((plant_slot(&sandbox.path("xa.lock"), 1_000, HOUR_MS), "another-lock", "it is another lock's"));
    all.push((plant_slot(&lock, HOUR_MS, 33_000), "young", "reclaimable in 5"));
    // Old by the time in its name, which is older by the owner's lifetime, but ended just now.
    let long_lived = plant_slot(&lock, HOUR_MS, 2 * HOUR_MS);
    age(&long_lived, 0);
    all.push((long_lived, "young", "reclaimable in "));
    for (path, fate, _) in &all {
        if matches!(*fate, "not-ours" | "another-lock") {
            age(path, HOUR_MS);
        }
    }
    all
}

#[test]
fn c27_it_removes_exactly_what_is_its_own_and_old_enough_and_explains_all_that_stays() {
    let sandbox = Sandbox::new();
    let things = similar_things(&sandbox);
    let before = tree(&sandbox.work());
    let old = [plant_slot(&sandbox.lock(), 1_000, HOUR_MS), plant_slot(&sandbox.lock(), 60_000, 66_000)];
    let dry = reclaimed(&sandbox, &["--dry-run"], &sandbox.lock());
    assert!(old.iter().all(|path| path.exists() && dry[&name(path)].0 == "would-remove"), "{dry:?}");
    let found = reclaimed(&sandbox, &[], &sandbox.lock());
    for path in &old {
        assert!(!path.exists());
        assert_eq!(found[&name(path)].0, "removed");
        assert!(found[&name(path)].1.contains("stale, ended"), "{:?}", found[&name(path)]);
    }
    for (path, fate, why) in &things {
        let (found_fate, found_why) = &found[&name(path)];
        assert_eq!(found_fate, fate, "{path:?}");
        assert!(found_why.contains(why), "{path:?}: {found_why}");
    }
    assert_eq!(found.len(), things.len() + old.len());
    assert_eq!(tree(&sandbox.work()), before, "everything else is as it was");
    let text = sandbox.withlock().arg("reclaim").lock().run();
    text.exited(0).silent();
    assert!(text.out().contains("it is a symbolic link") && text.out().ends_with("0 removed, 16 kept\n"), "{text}");
}

#[test]
fn c27_a_directory_stands_for_all_quarantines_in_it() {
    let sandbox = Sandbox::new();
    let things = similar_things(&sandbox);
    let found = reclaimed(&sandbox, &[], &sandbox.work());
    for (path, fate, _) in &things {
        let expected = if *fate == "another-lock" { "removed" } else { fate };
        assert_eq!(found[&name(path)].0, expected, "{path:?}");
        assert_eq!(fs::symlink_metadata(path).is_err(), expected == "removed", "{path:?}");
    }
    assert!(sandbox.path("precious/data").exists());
    // A link to a directory is not followed, unless a slash says so.
    let elsewhere = sandbox.path("elsewhere");
    symlink(".", &elsewhere).expect("a link");
    let slot = plant_slot(&sandbox.path("c.lock"), 1_000, HOUR_MS);
    sandbox.withlock().args(["reclaim", "elsewhere"]).run().exited(73).one_line(&["symbolic link", "elsewhere/"]);
    assert!(slot.exists());
    sandbox.withlock().args(["reclaim", "elsewhere/"]).run().exited(0).silent();
    assert!(!slot.exists());
}

#[test]
fn one_quarantine_can_be_named_by_itself_also_one_that_is_a_plain_file() {
    let sandbox = Sandbox::new();
    let slots: Vec<PathBuf> = (0..3).map(|_| plant_slot(&sandbox.lock(), 1_000, HOUR_MS)).collect();
    sandbox.withlock().arg("reclaim").arg(&slots[1]).run().exited(0).silent();
    assert_eq!(slots.iter().map(|path| path.exists()).collect::<Vec<_>>(), [true, false, true]);
    let dead = planted(1_000);
    let plain = sandbox.path(SlotName::of(&dead).file_name("a.lock".as_ref()));
    plant(&plain, &dead, HOUR_MS);
    sandbox.withlock().arg("reclaim").arg(&plain).run().exited(0).silent();
    assert!(!plain.exists() && slots[0].exists());
}

#[test]
fn an_age_below_the_safe_one_is_refused_with_the_reason_and_a_higher_one_is_honoured() {
    let sandbox = Sandbox::new();
    let slot = plant_slot(&sandbox.lock(), 60_000, HOUR_MS);
    let before = tree(&sandbox.work());
    for age in ["0", "1s", "5s", "64s", "1m"] {
        let finished = sandbox.withlock().args(["reclaim", "--older-than", age]).lock().run();
        finished.exited(64).one_line(&["--older-than", "below the safe age of", "1m 5s", "may still land"]);
    }
    assert_eq!(tree(&sandbox.work()), before);
    let found = reclaimed(&sandbox, &["--older-than", "2h"], &sandbox.lock());
    assert_eq!(found[&name(&slot)], ("young".into(), "younger than was asked for".into()));
    assert_eq!(reclaimed(&sandbox, &["--older-than", "30m"], &sandbox.lock())[&name(&slot)].0, "removed");
    // With nothing there the least safe age still holds.
    sandbox.withlock().args(["reclaim", "--older-than", "5s"]).lock().run().exited(64).one_line(&["any quarantine"]);
    sandbox.withlock().args(["reclaim", "--older-than", "x"]).lock().run().exited(64);
    let nothing = sandbox.withlock().args(["reclaim", "--older-than", "6s"]).lock().run();
    nothing.exited(0).silent();
    assert_eq!(nothing.out(), "no quarantine\n");
}

#[test]
fn the_slot_of_a_living_epoch_and_one_whose_maker_still_has_the_guard_are_kept() {
    let sandbox = Sandbox::new();
    let live = planted(1_000);
    plant(&sandbox.lock(), &live, 0);
    let slot = sandbox.path(SlotName::of(&live).file_name("a.lock".as_ref()));
    fs::create_dir(&slot).expect("a slot");
    plant_bytes(&slot.join("claim-0"), b"", HOUR_MS);
    age(&slot, HOUR_MS);
    let guarded = plant_slot(&sandbox.lock(), 1_000, HOUR_MS);
    let mut gate = sandbox.gate();
    let maker = sandbox.program("flock").arg(guarded.join("lock")).args(["-c", &gate.script()]).start();
    gate.wait_inside();
    for args in [&["--dry-run"][..], &[]] {
        let found = reclaimed(&sandbox, args, &sandbox.lock());
        assert_eq!(found[&name(&slot)].0, "live");
        assert_eq!(found[&name(&guarded)].0, "guarded");
    }
    assert!(slot.join("claim-0").exists() && guarded.join("lock").exists());
    gate.open();
    maker.wait().exited(0);
    assert_eq!(reclaimed(&sandbox, &[], &sandbox.lock())[&name(&guarded)].0, "removed");
}

#[test]
fn the_steps_that_keep_a_quarantine_are_each_needed() {
    // The negative controls of the tests above.
    for (leave_out, expected) in [("reclaim-age", "young"), ("reclaim-guard", "guarded"), ("reclaim-live", "live")] {
        let sandbox = Sandbox::new();
        let slot = plant_slot(&sandbox.lock(), 60_000, if expected == "young" { 0 } else { HOUR_MS });
        if expected == "live" {
            let record = crate::harness::record(&slot.join("lock")).expect("a record");
            fs::remove_file(slot.join("lock")).expect("rm");
            plant(&sandbox.lock(), &record, 0);
            age(&slot, HOUR_MS);
        }
        let mut gate = sandbox.gate();
        let held = if expected == "guarded" { slot.join("lock") } else { sandbox.path("unrelated") };
        let maker = sandbox.program("flock").arg(held).args(["-c", &gate.script()]).start();
        gate.wait_inside();
        assert_eq!(reclaimed(&sandbox, &[], &sandbox.lock())[&name(&slot)].0, expected);
        let run = sandbox.withlock().leave_out(leave_out).arg("reclaim").lock().run();
        run.exited(0);
        assert!(!slot.exists(), "without {leave_out} it is removed: {run}");
        gate.open();
        maker.wait().exited(0);
    }
}

#[test]
fn many_reclaimers_at_once_remove_each_quarantine_once_and_none_of_them_fails() {
    let sandbox = Sandbox::in_memory();
    let count = 300;
    for _ in 0..count {
        plant_slot(&sandbox.lock(), 1_000, HOUR_MS);
    }
    let start = |_| sandbox.withlock().args(["reclaim", "--json", "."]).start();
    let all: Vec<_> = (0..8).map(start).collect();
    let mut removed = 0;
    for running in all {
        let finished = running.wait();
        finished.exited(0).silent();
        let document: Value = serde_json::from_slice(&finished.stdout).expect("a document");
        let fates = document["quarantine"].as_array().expect("a list").iter();
        let fates: Vec<&str> = fates.filter_map(|found| found["fate"].as_str()).collect();
        // Another reclaimer has the guard while it removes; what it has moved aside and begun to empty is
        // young; what it took is gone.
        assert!(fates.iter().all(|fate| matches!(*fate, "removed" | "gone" | "guarded" | "young")), "{fates:?}");
        removed += fates.iter().filter(|fate| **fate == "removed").count();
    }
    assert_eq!((removed, sandbox.names().len()), (count, 0), "{:?}", sandbox.names());
}

#[test]
fn more_quarantines_than_descriptors_are_no_obstacle() {
    let sandbox = Sandbox::in_memory();
    for _ in 0..150 {
        plant_slot(&sandbox.lock(), 1_000, HOUR_MS);
    }
    let body = "ulimit -n 40; \"$WL\" inspect . | grep -c ' reclaimable  '; \"$WL\" reclaim . | tail -1";
    let finished = sandbox.sh(body).run();
    finished.exited(0).silent();
    assert_eq!(finished.out(), "150\n150 removed, 0 kept\n");
}

#[test]
fn what_may_not_be_removed_is_an_error_with_its_name_and_the_others_are_dealt_with() {
    let sandbox = Sandbox::new();
    let dir = sandbox.path("dir");
    fs::create_dir(&dir).expect("a directory");
    let slot = plant_slot(&dir.join("a.lock"), 1_000, HOUR_MS);
    let run = sandbox.program(sandbox.public_binary()).arg("reclaim").arg(&dir).run_by_nobody().run();
    run.exited(77).says(&["no permission", "we are uid 65534"]);
    assert!(slot.exists());
    let both = sandbox.withlock().args(["reclaim", "missing/b.lock", "dir"]).run();
    both.exited(73).one_line(&["missing/b.lock", "no such directory"]);
    assert!(both.out().contains("1 removed, 0 kept") && !slot.exists(), "{both}");
}

#[test]
fn c15_quarantines_of_locks_with_any_name_are_removed_byte_for_byte() {
    let sandbox = Sandbox::new();
    for lock in nasty_names() {
        let slot = plant_slot(&sandbox.path(&lock), 1_000, HOUR_MS);
        let finished = sandbox.withlock().arg("reclaim").arg(sandbox.path(&lock)).run();
        finished.exited(0).silent();
        assert!(!slot.exists(), "{lock:?}");
        assert!(!finished.out().chars().any(|c| c.is_control() && c != '\n'), "{:?}", finished.out());
        let slot = plant_slot(&sandbox.path(&lock), 1_000, HOUR_MS);
        sandbox.withlock().args(["reclaim", "."]).run().exited(0).silent();
        assert!(!slot.exists(), "{lock:?}");
    }
    assert!(slots(&sandbox.lock()).is_empty() && sandbox.names().is_empty());
}

#[test]
fn an_empty_file_in_a_slots_place_is_removed_only_if_it_is_a_lock_that_was_ended_while_it_was_blank() {
    for content in ["", "\0\0\0", "{\"withlock\":1,\"non"] {
        let sandbox = Sandbox::new();
        let stranger = sandbox.path(format!("a.lock.stale-5-{}", "ab".repeat(16)));
        let other = sandbox.path(format!("a.lock.stale-6-{:016x}{:016x}", 1, 60_000));
        for path in [&stranger, &other] {
            plant_bytes(path, content.as_bytes(), HOUR_MS);
        }
        let own = sandbox.path("own");
        plant_bytes(&own, content.as_bytes(), HOUR_MS);
        let inode = crate::harness::inode(&own).expect("an inode");
        let ended = sandbox.path(format!("a.lock.stale-7-{inode:016x}{:016x}", 7_000_000));
        fs::rename(&own, &ended).expect("its end");
        let before: Vec<_> = [&stranger, &other].map(|path| Snapshot::of(path)).into();
        let found = reclaimed(&sandbox, &[], &sandbox.work());
        assert_eq!(found[&name(&ended)].0, "removed", "{content:?}");
        for (path, before) in [&stranger, &other].into_iter().zip(before) {
            let kept = ("not-ours".to_owned(), "it is a file without this epoch's record".to_owned());
            assert_eq!((&found[&name(path)], Snapshot::of(path)), (&kept, before), "{content:?}");
        }
        // Nor does an evictor remove them on its way.
        plant(&sandbox.lock(), &planted(1_000), 60_000);
        sandbox.withlock().arg("-n").lock().args(["--", "true"]).run().exited(0);
        assert!(stranger.exists() && other.exists() && !ended.exists(), "{content:?}");
    }
}
