//! Operators are told to type only what they may do, and else who could; and what may not be done changes nothing.
//!
//! Needs root, setpriv, unshare and chattr.

use std::fs;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::cases_end::{Immutable, plant_slot};
use crate::cases_path::on_read_only;
use crate::harness::{Run, Sandbox, age, in_lanes, plant, planted, tree};

const HOUR_MS: u64 = 3_600_000;
const NOBODY: u32 = 65_534;

fn give_to_nobody(path: &Path) {
    chown(path, Some(NOBODY), Some(NOBODY)).expect("chown");
}

/// A slot with all that is in it.
fn slot_of_nobody(lock: &Path) -> PathBuf {
    let slot = plant_slot(lock, 1_000, HOUR_MS);
    for path in [&slot, &slot.join("lock"), &slot.join("claim-0")] {
        give_to_nobody(path);
    }
    age(&slot, HOUR_MS);
    slot
}

/// A directory with a stale lock and an old quarantine, all of them root's.
fn scene(sandbox: &Sandbox, mode: u32) -> (PathBuf, PathBuf, PathBuf) {
    let dir = sandbox.path("d");
    fs::create_dir(&dir).expect("a directory");
    let lock = dir.join("a.lock");
    plant(&lock, &planted(1_000), 60_000);
    let slot = plant_slot(&lock, 1_000, HOUR_MS);
    sandbox.chmod(&dir, mode);
    (dir, lock, slot)
}

fn by_nobody<'s>(sandbox: &'s Sandbox, args: &[&str]) -> Run<'s> {
    sandbox.program(sandbox.public_binary()).args(args).run_by_nobody()
}

/// What `inspect` offers to type next, why not a break, and why not the removal of each quarantine; and its text.
#[track_caller]
fn offered<'s>(json: Run<'s>, text: Run<'s>) -> (Vec<String>, Option<String>, Vec<Option<String>>, String) {
    let finished = json.run();
    finished.exited(0).silent();
    let document: Value = serde_json::from_slice(&finished.stdout).expect("a document");
    let lock = &document["locks"][0];
    let word = |value: &Value| value.as_str().map(str::to_owned);
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let finished = text.run();
    finished.exited(0).silent();
    (
        list(&lock["next"]).iter().filter_map(word).collect(),
        word(&lock["may_not_break"]),
        list(&lock["quarantine"]).iter().map(|found| word(&found["may_not_remove"])).collect(),
        finished.out(),
    )
}

#[track_caller]
fn offered_to_nobody(sandbox: &Sandbox) -> (Vec<String>, Option<String>, Vec<Option<String>>, String) {
    offered(by_nobody(sandbox, &["inspect", "--json", "d/a.lock"]), by_nobody(sandbox, &["inspect", "d/a.lock"]))
}

#[test]
fn in_a_sticky_directory_only_the_removal_of_ones_own_quarantines_is_offered_and_it_succeeds() {
    let sandbox = Sandbox::new();
    let (dir, _, roots) = scene(&sandbox, 0o1777);
    let own = slot_of_nobody(&dir.join("a.lock"));
    let own_name = format!("d/{}", own.file_name().expect("a name").display());
    let roots_name = format!("d/{}", roots.file_name().expect("a name").display());
    let (next, may_not_break, may_not_remove, text) = offered_to_nobody(&sandbox);
    assert_eq!(next, [format!("withlock reclaim {own_name}")]);
    let why = "it belongs to uid 0 in a sticky directory (d), we are uid 65534; root may";
    assert_eq!(may_not_break.as_deref(), Some(why));
    assert_eq!(may_not_remove.iter().flatten().collect::<Vec<_>>(), [why]);
    assert!(text.contains(&format!("  We may not end it: {why}.\n")), "{text}");
    assert!(text.contains("reclaimable, not by us") && text.contains(&format!("    not by us: {why}\n")), "{text}");
    let before = tree(&dir);
    let dry = by_nobody(&sandbox, &["reclaim", "--dry-run", "d/a.lock"]).run();
    dry.exited(77);
    assert_eq!(dry.err(), format!("withlock: {roots_name}: cannot be removed: {why}\n"));
    assert!(dry.out().contains(&format!("kept          {roots_name}  {why}\n")), "{}", dry.out());
    assert!(dry.out().ends_with("1 would be removed, 1 kept\n"), "{}", dry.out());
    assert_eq!(tree(&dir), before);
    by_nobody(&sandbox, &["reclaim", &own_name]).run().exited(0).silent();
    assert!(!own.exists() && roots.exists());
    assert_eq!(offered_to_nobody(&sandbox).0, Vec::<String>::new());
}

#[test]
fn in_a_directory_that_may_not_be_changed_nothing_is_offered() {
    let sandbox = Sandbox::new();
    let (dir, _, slot) = scene(&sandbox, 0o755);
    let (next, may_not_break, may_not_remove, text) = offered_to_nobody(&sandbox);
    assert_eq!(next, Vec::<String>::new());
    let why = "directory d may not be changed: Permission denied (it belongs to root, mode 0755; we are uid 65534); \
               root or who may write there may";
    assert_eq!((may_not_break.as_deref(), may_not_remove), (Some(why), vec![Some(why.to_owned())]));
    assert!(text.contains(&format!("  We may not end it: {why}.\n    ")) || text.contains(why), "{text}");
    let before = tree(&dir);
    for args in [&["reclaim", "--dry-run", "d/a.lock"][..], &["reclaim", "d/a.lock"]] {
        let run = by_nobody(&sandbox, args).run();
        run.exited(77);
        let line = "withlock: d/a.lock: no permission to reclaim its quarantines: Permission denied (directory d belongs \
                    to root, mode 0755; we are uid 65534)\n";
        assert_eq!(run.err(), line);
    }
    assert!(tree(&dir) == before && slot.exists());
}

#[test]
fn anothers_quarantine_whose_inside_may_not_be_changed_is_not_offered_and_keeps_its_name() {
    let sandbox = Sandbox::new();
    let (dir, lock, slot) = scene(&sandbox, 0o755);
    give_to_nobody(&dir);
    let slot_name = format!("d/{}", slot.file_name().expect("a name").display());
    let (next, may_not_break, may_not_remove, _) = offered_to_nobody(&sandbox);
    assert!(next.len() == 1 && next[0].starts_with("withlock break --nonce "), "{next:?}");
    let why = "what is in it may not be removed: Permission denied (it belongs to root, mode 0755; we are uid 65534); \
               root may";
    assert_eq!((may_not_break, may_not_remove), (None, vec![Some(why.to_owned())]));
    let before = tree(&dir);
    for args in [&["reclaim", "--dry-run", "d/a.lock"][..], &["reclaim", "d/a.lock"]] {
        let run = by_nobody(&sandbox, args).run();
        run.exited(77);
        assert_eq!(run.err(), format!("withlock: {slot_name}: cannot be removed: {why}\n"));
        assert_eq!(tree(&dir), before, "it is not even moved aside");
    }
    // What is offered succeeds, also its own look at old quarantines.
    let words: Vec<&str> = next[0].split(' ').skip(1).collect();
    by_nobody(&sandbox, &words).run().exited(0).silent();
    by_nobody(&sandbox, &["-n", "d/a.lock", "--", "true"]).run().exited(0).silent();
    assert!(!lock.exists() && slot.exists());
}

#[test]
fn c07_on_a_read_only_file_system_nothing_is_offered() {
    let sandbox = Sandbox::new();
    let (dir, lock, _) = scene(&sandbox, 0o755);
    let run = |args: &[&str]| on_read_only(sandbox.withlock().args(args).arg(&lock), &dir);
    let (next, may_not_break, may_not_remove, _) = offered(run(&["inspect", "--json"]), run(&["inspect"]));
    assert_eq!(next, Vec::<String>::new());
    let shown = dir.display();
    let why = format!(
        "directory {shown} may not be changed: Read-only file system; nobody may while it is mounted read-only"
    );
    assert_eq!((may_not_break, may_not_remove), (Some(why.clone()), vec![Some(why)]));
    let dry = run(&["reclaim", "--dry-run"]).run();
    dry.exited(73);
    assert_eq!(dry.err(), format!("withlock: {}: the file system is read-only\n", lock.display()));
}

#[test]
fn what_chattr_has_fixed_is_not_offered_to_root_either() {
    let why = |letter| {
        format!(
            "it is {}; nobody may before root has changed that (chattr -{letter})",
            match letter {
                'i' => "immutable",
                _ => "append-only",
            }
        )
    };
    for letter in ['i', 'a'] {
        let sandbox = Sandbox::new();
        let (dir, lock, slot) = scene(&sandbox, 0o755);
        let (_undo_lock, _undo_slot) = (Immutable(lock.clone()), Immutable(slot.clone()));
        for path in [&lock, &slot] {
            let fixed = sandbox.program("chattr").arg(format!("+{letter}")).arg(path).run();
            fixed.exited(0);
        }
        let look = |args: &[&str]| sandbox.withlock().args(args).arg(&lock);
        let (next, may_not_break, may_not_remove, text) = offered(look(&["inspect", "--json"]), look(&["inspect"]));
        assert_eq!(next, Vec::<String>::new(), "{letter}");
        assert_eq!((may_not_break, may_not_remove), (Some(why(letter)), vec![Some(why(letter))]));
        assert!(text.contains(&format!("  We may not end it: {}.\n", why(letter))), "{text}");
        let before = tree(&dir);
        for args in [&["break", "--dry-run"][..], &["break"]] {
            let run = look(args).run();
            run.exited(77);
            assert_eq!(run.err(), format!("withlock: {}: cannot be broken: {}\n", lock.display(), why(letter)));
        }
        for args in [&["reclaim", "--dry-run"][..], &["reclaim"]] {
            let run = look(args).run();
            run.exited(77);
            assert_eq!(run.err(), format!("withlock: {}: cannot be removed: {}\n", slot.display(), why(letter)));
        }
        assert_eq!(tree(&dir), before);
    }
}

#[test]
fn a_release_that_chattr_keeps_from_its_work_names_that_and_not_owner_and_mode() {
    let scene = |fixed: &str, letter: char| {
        let sandbox = Sandbox::new();
        fs::create_dir(sandbox.path("d")).expect("a directory");
        let undo = Immutable(sandbox.path(fixed));
        (sandbox, undo, format!("chattr +{letter} {fixed}"))
    };
    let fixed = |whose: &str, word: &str, letter: char| {
        format!("{whose}it is {word}; nobody may before root has changed that (chattr -{letter})")
    };
    let cases = vec![
        ("d/a.lock", 'i', fixed("", "immutable", 'i')),
        ("d/a.lock", 'a', fixed("", "append-only", 'a')),
        ("d", 'i', fixed("directory d: ", "immutable", 'i')),
        ("d", 'a', fixed("directory d: ", "append-only", 'a')),
    ];
    // A release that fails is tried for seconds.
    in_lanes(cases.len(), cases, |(target, letter, why)| {
        let (sandbox, _undo, chattr) = scene(target, letter);
        let run = sandbox.withlock().args(["--ttl", "1h", "d/a.lock"]).sh(&chattr).run();
        let line =
            format!("withlock: d/a.lock: no permission to release it: {why}; the lock stays and expires within 1h\n");
        assert_eq!(run.exited(77).err(), line);

        let (sandbox, _undo, chattr) = scene(target, letter);
        let text = format!("nonce=$(\"$WL\" acquire d/a.lock) && {chattr} && \"$WL\" release --nonce $nonce d/a.lock");
        let run = sandbox.sh(text).run();
        assert_eq!(run.exited(77).err(), format!("withlock: d/a.lock: not released: {why}\n"));
    });
    // The same directory that is another's is still said to be that.
    let sandbox = Sandbox::new();
    fs::create_dir(sandbox.path("d")).expect("a directory");
    let run = by_nobody(&sandbox, &["-n", "d/a.lock", "--", "true"]).run();
    let line = "withlock: d/a.lock: no permission to create it: Permission denied (directory d belongs to root, mode 0755; \
                we are uid 65534)\n";
    assert_eq!(run.exited(77).err(), line);
}

#[test]
fn where_it_may_not_be_looked_reclaim_says_so_and_not_that_nothing_is_there() {
    let sandbox = Sandbox::new();
    let (dir, _, slot) = scene(&sandbox, 0o700);
    let whose = "(directory d belongs to root, mode 0700; we are uid 65534)";
    let inside = "(directory d belongs to root, mode 0744; we are uid 65534)";
    let listed = format!("no permission to list its directory: Permission denied {whose}");
    let itself = format!("no permission to list it: Permission denied {whose}");
    let looked = format!("no permission to look at it: Permission denied {inside}");
    let slot = format!("d/{}", slot.file_name().expect("a name").display());
    for (mode, path, line) in [
        (0o700, "d", &itself),
        (0o711, "d/a.lock", &listed.replace("0700", "0711")),
        // Its names can be read, and no more: each may be a directory full of quarantines.
        (0o744, "d/a.lock", &looked),
        (0o744, &slot, &looked),
    ] {
        sandbox.chmod(&dir, mode);
        let run = by_nobody(&sandbox, &["reclaim", path]).run();
        run.exited(77);
        assert_eq!((run.err(), run.out().as_str()), (format!("withlock: {path}: {line}\n"), ""), "{mode:o} {path}");
    }
}

#[test]
fn a_directory_that_cannot_be_listed_is_named_as_it_was_and_nothing_that_would_be_in_it() {
    let sandbox = Sandbox::new();
    scene(&sandbox, 0o700);
    let refused =
        "no permission to list it: Permission denied (directory d belongs to root, mode 0700; we are uid 65534)";
    for (path, code, line) in [
        ("none/", 73, "no such directory: none"),
        (
            "d/a.lock/",
            77,
            "no permission to use directory d/a.lock: Permission denied (directory d belongs to root, mode 0700; we are uid 65534)",
        ),
        ("d", 77, refused),
        ("d/", 77, refused),
    ] {
        for command in ["inspect", "reclaim"] {
            let line = format!("{path}: {line}");
            let run = by_nobody(&sandbox, &[command, path]).run();
            assert_eq!(
                (run.exited(code).err(), run.out()),
                (format!("withlock: {line}\n"), String::new()),
                "{command}"
            );
            let run = by_nobody(&sandbox, &[command, "--json", path]).run();
            let document: serde_json::Value = serde_json::from_slice(&run.exited(code).stdout).expect("a document");
            let problem = &document["errors"][0];
            assert_eq!((&problem["path"], &problem["error"]), (&path.into(), &line.into()), "{command}");
        }
    }
}

#[test]
fn whoever_may_not_go_on_to_a_directory_is_told_which_one_on_the_way_refused() {
    let sandbox = Sandbox::new();
    scene(&sandbox, 0o700);
    std::fs::create_dir_all(sandbox.path("open/log")).expect("directories");
    for (path, mode) in [("open", 0o755), ("open/log", 0o755)] {
        sandbox.chmod(sandbox.path(path), mode);
    }
    std::fs::write(sandbox.path("open/file"), "").expect("a file");
    std::os::unix::fs::symlink("../d/sub", sandbox.path("open/link")).expect("a link");
    let before = tree(&sandbox.work());
    let shut = "(directory d belongs to root, mode 0700; we are uid 65534)";
    let open = "(directory open belongs to root, mode 0755; we are uid 65534)";
    let no_log = |path: &str| format!("{path}: cannot be opened for --log-json: Permission denied");
    let fence = ["--fence", "d/sub", "a.lock", "true"];
    for (arguments, line) in [
        (&["d/sub/a", "true"][..], format!("d/sub/a: no permission to use directory d/sub: Permission denied {shut}")),
        (&["d/x/y/a", "true"], format!("d/x/y/a: no permission to use directory d/x/y: Permission denied {shut}")),
        (
            &["-p", "open/x/a", "true"],
            format!("open/x/a: no permission to make directory open/x: Permission denied {open}"),
        ),
        (
            &["-p", "open/x/y/a", "true"],
            format!("open/x/y/a: no permission to make directory open/x/y: Permission denied {open}"),
        ),
        // What is beyond a link is not looked for.
        (
            &["open/link/a", "true"],
            "open/link/a: no permission to use directory open/link: Permission denied (we are uid 65534)".into(),
        ),
        (&["reserve", "d/sub"], format!("d/sub: no permission to use directory d/sub: Permission denied {shut}")),
        (&fence, format!("d/sub: no permission to use directory d/sub: Permission denied {shut}")),
        (&["--log-json", "d/log", "a.lock", "true"], format!("{} {shut}", no_log("d/log"))),
        (&["--log-json", "open/new", "a.lock", "true"], format!("{} {open}", no_log("open/new"))),
        (
            &["--log-json", "open/file", "a.lock", "true"],
            format!("{} (it belongs to root, mode 0644; we are uid 65534)", no_log("open/file")),
        ),
    ] {
        let run = by_nobody(&sandbox, arguments).run();
        assert_eq!(run.exited(77).err(), format!("withlock: {line}\n"), "{arguments:?}");
    }
    assert_eq!(tree(&sandbox.work()), before);
}
