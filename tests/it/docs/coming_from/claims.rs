//! What shows the sentences of the table that are not measured of every row alike.

use std::time::Duration;

use super::facts::{Scene, ago};
use super::rows::Row;
use crate::harness::{Sandbox, record, set_mtime};

/// A background child that outlives COMMAND: the next one, at once, with and without `-o`.
pub(super) fn background_child(_: &Row) {
    for (tool, first, next, expected) in [
        ("flock", "flock LOCK COMMAND", "flock -n LOCK COMMAND", 1),
        ("flock", "flock -o LOCK COMMAND", "flock -n LOCK COMMAND", 0),
        ("withlock", "withlock LOCK -- COMMAND", "withlock -n LOCK -- COMMAND", 0),
    ] {
        let scene = Scene::new(tool);
        let mut gate = scene.sandbox.gate();
        scene.side(first, &format!("({}) >/dev/null 2>&1 &", gate.script())).run().exited(0);
        gate.wait_inside();
        scene.side(next, "exit 0").run().exited(expected);
        gate.open();
        scene.sandbox.wait_until_nothing_runs();
    }
}

pub(super) fn shell(row: &Row) {
    let scene = Scene::new("flock");
    let other = scene.sandbox.path("other");
    std::fs::write(&other, "#!/bin/sh\necho another shell\n").expect("a script");
    scene.sandbox.chmod(&other, 0o755);
    let says = |text: &str| scene.side(text, "echo sh").env("SHELL", &other).run().out();
    assert_eq!(says(row.theirs), "another shell\n");
    std::fs::remove_file(scene.sandbox.path("LOCK")).expect("flock leaves it");
    assert_eq!(says(row.ours), "sh\n");
}

pub(super) fn only_locks(row: &Row) {
    let scene = Scene::new("flock");
    std::fs::create_dir(scene.sandbox.path("DIRECTORY")).expect("a directory");
    scene.side(row.theirs, "exit 7").run().exited(7);
    scene.side(row.ours, "exit 7").run().exited(7);
    std::fs::write(scene.sandbox.path("script"), "#!/bin/sh\nexit 7\n").expect("a script");
    std::fs::write(scene.sandbox.path("data"), "a line\n").expect("data");
    for name in ["DIRECTORY", "script", "data"] {
        scene.side(&format!("flock {name} COMMAND"), "exit 7").run().exited(7);
        let refused = scene.side(&format!("withlock {name} -- COMMAND"), "touch ran").run();
        refused.exited(73);
        assert!(!scene.sandbox.path("ran").exists(), "{name}");
    }
}

/// A child that the region leaves behind has a copy of the descriptor; the shell ends without a release.
pub(super) fn region(row: &Row) {
    for (tool, text, next, expected) in [
        ("flock", row.theirs.split("; flock -u").next(), "flock -n LOCK COMMAND", 1),
        ("withlock", row.ours.split("; withlock release").next(), "withlock -w 30 LOCK -- COMMAND", 0),
    ] {
        let scene = Scene::new(tool);
        let mut gate = scene.sandbox.gate();
        let role = format!("({}) >/dev/null 2>&1 &", gate.script());
        scene.side(text.expect("a text"), &role).run().exited(0);
        gate.wait_inside();
        scene.side(next, "exit 0").run().exited(expected);
        gate.open();
        scene.sandbox.wait_until_nothing_runs();
    }
}

/// The line at the top of a script.
pub(super) fn whole_script(row: &Row) {
    for (line, busy, with_variable) in [(row.theirs, 1, 0), (row.ours, 75, 75)] {
        let scene = Scene::new("withlock");
        let script = scene.sandbox.path("script");
        std::fs::write(&script, format!("#!/bin/sh\n{line}\nCOMMAND\n")).expect("a script");
        scene.sandbox.chmod(&script, 0o755);
        scene.side("./script", "exit 7").run().exited(7);
        let mut gate = scene.sandbox.gate();
        let first = scene.side("./script", &gate.script()).start();
        gate.wait_inside();
        scene.side("./script", "touch ran").run().exited(busy);
        assert!(!scene.sandbox.path("ran").exists(), "{line}");
        let left_over = scene.side("./script", "touch ran").env("LOCKED", "1").env("WITHLOCK_MODE", "locked");
        left_over.env("WITHLOCK_NONCE", "0123456789abcdef0123456789abcdef").run().exited(with_variable);
        assert_eq!(scene.sandbox.path("ran").exists(), with_variable == 0, "{line}");
        gate.open();
        first.wait().exited(0);
    }
}

pub(super) fn dotlockfile_stale(_: &Row) {
    let sandbox = Sandbox::new();
    let try_once = |content: &str, minutes: u64| {
        std::fs::write(sandbox.lock(), content).expect("a lock");
        set_mtime(&sandbox.lock(), ago(Duration::from_secs(60 * minutes)));
        // It needs one try to remove a stale lock, and another to take it.
        sandbox.program("dotlockfile").args(["-l", "-p", "-r", "2", "-i", "1"]).lock().run().code()
    };
    // Process 1 lives and never took this lock.
    assert_ne!(try_once("1\n", 600), Some(0), "valid for ever");
    assert_ne!(try_once("", 4), Some(0), "valid for five minutes");
    assert_eq!(try_once("", 6), Some(0), "stale after them");
    // Without -p there is no number in it.
    std::fs::remove_file(sandbox.lock()).expect("its lock");
    sandbox.program("dotlockfile").arg("-l").lock().run().exited(0);
    let content = std::fs::read_to_string(sandbox.lock()).expect("its lock");
    assert!(matches!(content.trim(), "" | "0"), "{content:?}");
}

pub(super) fn release_of_anybody(_: &Row) {
    let sandbox = Sandbox::new();
    sandbox.program("dotlockfile").arg("-l").lock().run().exited(0);
    sandbox.program("dotlockfile").arg("-u").lock().run().exited(0);
    assert!(!sandbox.lock().exists());
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().lock().sh(gate.script()).start();
    gate.wait_inside();
    let other = "0123456789abcdef0123456789abcdef";
    sandbox.withlock().args(["release", "--nonce", other]).lock().run().exited(76);
    assert!(record(&sandbox.lock()).is_some());
    gate.open();
    holder.wait().exited(0);
}

pub(super) fn lockfile_robs(row: &Row) {
    for (text, next, robbed) in [
        // -s 0: without the pause that follows.
        (row.theirs, "lockfile -1 -r 3 -l 3600 -s 0 LOCK && COMMAND", true),
        (row.ours, "withlock -n LOCK -- COMMAND", false),
    ] {
        let scene = Scene::new("withlock");
        let mut gate = scene.sandbox.gate();
        let holder = scene.side(text, &gate.script()).start();
        gate.wait_inside();
        set_mtime(&scene.sandbox.path("LOCK"), ago(Duration::from_secs(7_200)));
        let second = scene.side(next, "touch ran").run();
        assert_eq!(
            (second.code() == Some(0), scene.sandbox.path("ran").exists()),
            (robbed, robbed),
            "{next}: {second}"
        );
        gate.open();
        holder.wait().exited(0);
    }
}

pub(super) fn missing_directory(row: &Row) {
    let scene = Scene::new("setlock");
    let run = |text: &str| scene.side(&text.replace("LOCK", "missing/LOCK"), "touch ran").run();
    run(row.theirs).exited(0);
    run(row.ours).exited(73);
    assert!(!scene.sandbox.path("ran").exists());
}

/// Nothing is said of how it behaves.
pub(super) fn not_here(row: &Row) {
    assert_eq!(row.tool, "consul");
}
