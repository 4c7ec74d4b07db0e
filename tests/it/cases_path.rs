//! Faults that others had: what is found at the path. The numbers are those of the list of cases.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::harness::{
    Run, Sandbox, Snapshot, age, blank_ages_ms, inode, plant, plant_bytes, planted, record, set_mtime, slots, tree,
};

/// At once: far less than any wait that was asked for, far more than a loaded machine needs.
const AT_ONCE: Duration = Duration::from_secs(10);
/// A wait that shows that an error did not wait.
const LONG_WAIT: [&str; 2] = ["-w", "1h"];

/// What a maker that died early, or a power cut, can leave.
pub(crate) fn blanks() -> Vec<(&'static str, Vec<u8>)> {
    let line = planted(1_000).encode();
    let mut cut_then_nul = line[..40].to_vec();
    cut_then_nul.resize(line.len(), 0);
    vec![
        ("empty", Vec::new()),
        ("one NUL", vec![0]),
        ("a block of NUL", vec![0; 4096]),
        ("the first byte of a record", line[..1].to_vec()),
        ("the signature", line[..12].to_vec()),
        ("half a record", line[..line.len() / 2].to_vec()),
        ("all but the last brace", line[..line.len() - 2].to_vec()),
        ("half a record, then NUL", cut_then_nul),
    ]
}

#[test]
fn c01_the_pid_in_an_old_lock_is_never_believed() {
    let me = std::process::id();
    let started = fs::read_to_string("/proc/self/stat").expect("stat");
    let started = started.rsplit(") ").next().and_then(|rest| rest.split(' ').nth(19)?.parse().ok()).expect("a start");
    for (pid, pid_started) in [(1, 0), (1, 1), (me, started), (me, 0), (4_194_303, 7)] {
        let sandbox = Sandbox::new();
        let mut old = planted(1_000);
        (old.pid, old.pid_started) = (pid, pid_started);
        plant(&sandbox.lock(), &old, 1_500);
        sandbox.withlock().arg("-n").lock().args(["--", "true"]).run().exited(0).silent();
        assert_eq!(slots(&sandbox.lock())[0].name.nonce, old.nonce);

        // The other way round: a dead pid in a young lock is not a reason to take it.
        let mut young = old.clone();
        young.ttl_ms = 3_600_000;
        plant(&sandbox.lock(), &young, 1_500);
        let busy = sandbox.withlock().arg("-n").lock().args(["--", "true"]).run();
        busy.exited(75).one_line(&[&format!("pid {pid}"), "a.lock", "dead-job"]);
        assert_eq!(record(&sandbox.lock()).map(|found| found.nonce), Some(young.nonce));
    }
}

#[test]
fn c03_an_old_empty_half_or_zeroed_lock_is_broken_by_its_age_like_any_other() {
    for (what, content) in blanks() {
        let sandbox = Sandbox::new();
        plant_bytes(&sandbox.lock(), &content, blank_ages_ms().1);
        let finished = sandbox.withlock().arg("-n").lock().args(["--", "true"]).run();
        assert_eq!(finished.code(), Some(0), "{what}: {finished}");
        let slots = slots(&sandbox.lock());
        assert_eq!(slots.len(), 1, "{what}");
        assert_eq!(slots[0].lock.as_deref(), Some(content.as_slice()), "{what} is kept");
        assert_eq!(sandbox.names().len(), 1, "{what}");
    }
}

#[test]
fn c04_a_young_unreadable_lock_is_held_whoever_looks() {
    for (what, content) in blanks() {
        for age_ms in [0, 1_500, blank_ages_ms().0] {
            let sandbox = Sandbox::new();
            plant_bytes(&sandbox.lock(), &content, age_ms);
            let before = Snapshot::of(&sandbox.lock());
            // A contender's own ttl is about its own lease only.
            let finished = sandbox.withlock().args(["-n", "--ttl", "1s"]).lock().args(["--", "true"]).run();
            assert_eq!(finished.code(), Some(75), "{what}, {age_ms} ms old: {finished}");
            assert_eq!(Snapshot::of(&sandbox.lock()), before, "{what}, {age_ms} ms old");
            assert_eq!(sandbox.names(), ["a.lock"], "{what}, {age_ms} ms old");
        }
    }
}

/// Through a read-only mount of `dir`, in a mount namespace of its own. Needs root.
pub(crate) fn on_read_only<'s>(run: Run<'s>, dir: &Path) -> Run<'s> {
    let script = r#"mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@""#;
    let front = ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", script].map(OsStr::new);
    run.through(front.into_iter().chain([dir.as_os_str()]).collect::<Vec<_>>())
}

#[test]
fn c07_a_read_only_file_system_is_said_at_once_not_after_the_wait() {
    let sandbox = Sandbox::new();
    let dir = sandbox.path("ro");
    fs::create_dir(&dir).expect("a directory");
    let lock = dir.join("a.lock");
    let contend = || on_read_only(sandbox.withlock().args(LONG_WAIT).arg(&lock).args(["--", "true"]), &dir).run();
    let refused = |what: &str| {
        let before = tree(&sandbox.work());
        let finished = contend();
        assert_eq!(finished.code(), Some(73), "{what}: {finished}");
        finished.one_line(&["ro", "read-only"]);
        assert!(finished.took < AT_ONCE, "{what}: {:?}", finished.took);
        assert_eq!(tree(&sandbox.work()), before, "{what}");
    };
    refused("nothing there");
    plant(&lock, &planted(1_000), 60_000);
    refused("a stale lock");
    plant(&lock, &planted(3_600_000), 0);
    refused("a held lock");
    plant_bytes(&lock, b"", blank_ages_ms().1);
    refused("an old blank lock");
}

#[test]
fn c08_no_permission_is_said_at_once_with_directory_owner_mode_and_our_uid() {
    let members: [(&str, u32, Option<u64>); 4] = [
        ("not writable", 0o755, None),
        ("not writable, a stale lock", 0o755, Some(60_000)),
        ("not searchable", 0o700, None),
        ("not searchable, a stale lock", 0o700, Some(60_000)),
    ];
    for (what, mode, age_ms) in members {
        let sandbox = Sandbox::new();
        let dir = sandbox.path("private");
        fs::create_dir(&dir).expect("a directory");
        if let Some(age_ms) = age_ms {
            plant(&dir.join("a.lock"), &planted(1_000), age_ms);
        }
        sandbox.chmod(&dir, mode);
        let before = tree(&sandbox.work());
        let run = sandbox.program(sandbox.public_binary()).args(LONG_WAIT).arg(dir.join("a.lock")).args(["--", "true"]);
        let finished = run.run_by_nobody().run();
        assert_eq!(finished.code(), Some(77), "{what}: {finished}");
        finished.one_line(&["private", "root", &format!("{mode:o}"), "65534"]);
        assert!(finished.took < AT_ONCE && finished.cpu < Duration::from_secs(1), "{what}: {finished}");
        assert_eq!(tree(&sandbox.work()), before, "{what}");
    }
}

#[test]
fn c10_a_path_that_can_never_be_a_lock_is_refused_at_once_and_nothing_is_created() {
    let sandbox = Sandbox::new();
    fs::write(sandbox.path("file"), "data").expect("a file");
    fs::create_dir(sandbox.path("dir")).expect("a directory");
    let dangling = sandbox.path("dangling");
    symlink(sandbox.path("nowhere"), &dangling).expect("a link");
    let before = tree(&sandbox.work());
    let paths = [
        "missing/a.lock",
        "missing/deep/er/a.lock",
        "file/a.lock",
        "dangling/a.lock",
        "",
        "dir/",
        "new/",
        "./",
        ".",
        "..",
        "/",
        "dir/.",
        "dir/..",
    ];
    for path in paths {
        let finished = sandbox.withlock().args(LONG_WAIT).arg(path).args(["--", "touch", "ran"]).run();
        assert_eq!(finished.code(), Some(73), "{path:?}: {finished}");
        finished.one_line(&[]);
        assert!(finished.took < AT_ONCE, "{path:?}");
        assert_eq!(tree(&sandbox.work()), before, "{path:?}");
    }
}

#[test]
fn c10_missing_parents_are_made_only_when_asked_for() {
    let sandbox = Sandbox::new();
    sandbox.withlock().arg("-p").arg("x/y/a.lock").args(["--", "ls", "x/y"]).run().exited(0).silent();
    assert_eq!(
        tree(&sandbox.work()).keys().cloned().collect::<Vec<PathBuf>>(),
        [sandbox.path("x"), sandbox.path("x/y")]
    );
    fs::write(sandbox.path("file"), "data").expect("a file");
    sandbox.withlock().arg("-p").arg("file/a.lock").args(["--", "true"]).run().exited(73).one_line(&["file"]);
}

#[test]
fn c10_the_parents_that_are_made_can_be_entered_by_their_owner_whatever_the_umask() {
    let sandbox = Sandbox::new();
    sandbox.chmod(sandbox.work(), 0o777);
    for (umask, modes) in [("0777", "300\n300\n600\n"), ("0377", "700\n700\n600\n"), ("027", "750\n750\n640\n")] {
        let text = format!("umask {umask}; \"$0\" -p x/y/a.lock -- stat -c %a x x/y x/y/a.lock; echo $?; umask");
        let text = format!("{text}; chmod 700 x x/y; rmdir x/y x");
        let finished = sandbox.program("sh").args(["-c", &text]).arg(sandbox.public_binary()).run_by_nobody().run();
        finished.exited(0).silent();
        assert_eq!(finished.out(), format!("{modes}0\n{umask:0>4}\n"), "umask {umask}");
    }
}

#[test]
fn c10_a_directory_that_is_there_but_takes_no_lock_is_not_said_to_be_missing() {
    let sandbox = Sandbox::new();
    let finished = sandbox.withlock().args(["-n", "/proc/withlock-test.lock", "--", "true"]).run();
    let line = "withlock: /proc/withlock-test.lock: cannot be locked: cannot create it: No such file or directory\n";
    assert_eq!(finished.exited(73).err(), line);
    // One that has been removed under a waiter is.
    fs::create_dir(sandbox.path("dir")).expect("a directory");
    plant(&sandbox.path("dir/a.lock"), &planted(3_600_000), 0);
    let waiter = sandbox.withlock().arg("dir/a.lock").args(["--", "true"]).start();
    waiter.wait_for_stderr("waiting");
    fs::remove_dir_all(sandbox.path("dir")).expect("rm");
    let finished = waiter.wait();
    finished.exited(73).says(&["dir/a.lock: cannot be locked: no such directory: dir\n"]);
}

#[test]
fn c10_a_directory_removed_while_held_is_reported_and_not_made_again() {
    // `exec sleep`: the command goes on, so that it is the loss that ends it.
    for (body, what) in [("rm -r dir; exec sleep 1000", "the command goes on"), ("rm -r dir", "the command ends")] {
        let sandbox = Sandbox::new();
        fs::create_dir(sandbox.path("dir")).expect("a directory");
        let finished = sandbox.withlock().args(["--ttl", "3s"]).arg("dir/a.lock").sh(body).run();
        assert_eq!(finished.code(), Some(76), "{what}: {finished}");
        finished.says(&["dir/a.lock"]);
        assert!(sandbox.names().is_empty(), "{what}: {:?}", sandbox.names());
        sandbox.wait_until_nothing_runs();
    }
}

#[test]
fn c11_a_script_data_or_a_project_directory_at_the_path_is_never_touched() {
    let sandbox = Sandbox::new();
    let foreign: [(&str, &[u8]); 7] = [
        ("script", b"#!/bin/sh\necho hello\n"),
        ("credentials", b"{\"access_token\": \"x\", \"refresh_token\": \"y\"}\n"),
        ("pidfile", b"12345\n"),
        ("newline", b"\n"),
        ("zeros", &[0; 4097]),
        ("nearly", b" {\"withlock\":1,"),
        ("newer", b"{\"withlock\":2,\"nonce\":\"x\"}\n"),
    ];
    for (name, content) in foreign {
        plant_bytes(&sandbox.path(name), content, 86_400_000);
    }
    fs::create_dir(sandbox.path("project")).expect("a directory");
    plant_bytes(&sandbox.path("project/work"), b"precious", 86_400_000);
    set_mtime(&sandbox.path("project"), std::time::SystemTime::now() - Duration::from_secs(86_400));
    let socket = std::os::unix::net::UnixListener::bind(sandbox.path("socket")).expect("a socket");
    nix::unistd::mkfifo(&sandbox.path("fifo"), nix::sys::stat::Mode::S_IRWXU).expect("a FIFO");
    let before = tree(&sandbox.work());
    for name in before.keys().filter(|path| path.parent() == Some(&sandbox.work())) {
        let finished = sandbox.withlock().args(LONG_WAIT).arg(name).args(["--", "touch", "ran"]).run();
        assert_eq!(finished.code(), Some(73), "{name:?}: {finished}");
        finished.one_line(&[&*name.to_string_lossy()]);
        assert!(finished.took < AT_ONCE, "{name:?}");
        assert_eq!(tree(&sandbox.work()), before, "{name:?}");
    }
    drop(socket);
    // A device is as foreign as the rest.
    sandbox.withlock().args(LONG_WAIT).args(["/dev/null", "--", "true"]).run().exited(73).one_line(&["/dev/null"]);
}

#[test]
fn c11_an_old_empty_file_that_somebody_holds_with_flock_is_not_broken() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    plant_bytes(&sandbox.lock(), b"", 0);
    let other = sandbox.program("flock").lock().args(["/bin/sh", "-c", &gate.script()]).start();
    gate.wait_inside();
    age(&sandbox.lock(), 86_400_000);
    let before = Snapshot::of(&sandbox.lock());
    for wait in [vec!["-n"], vec!["-w", "1s"]] {
        let finished = sandbox.withlock().args(&wait).lock().args(["--", "true"]).run();
        assert_eq!(finished.code(), Some(75), "{finished}");
        assert_eq!(Snapshot::of(&sandbox.lock()), before);
        assert_eq!(sandbox.names(), ["a.lock"]);
    }
    // The negative control: an ender that does not ask for the guard breaks it.
    sandbox.withlock().leave_out("veto").arg("-n").lock().args(["--", "true"]).run().exited(0);
    gate.open();
    other.wait();
}

#[test]
fn c12_a_symlink_at_the_path_is_refused_and_neither_it_nor_its_target_is_touched() {
    let sandbox = Sandbox::new();
    plant(&sandbox.path("old-lock"), &planted(1_000), 86_400_000);
    plant_bytes(&sandbox.path("old-file"), b"", 86_400_000);
    fs::create_dir(sandbox.path("dir")).expect("a directory");
    let links = [
        ("to-lock", "old-lock"),
        ("to-file", "old-file"),
        ("to-dir", "dir"),
        ("dangling", "nowhere"),
        ("itself", "itself"),
        ("to-link", "to-lock"),
    ];
    for (link, target) in links {
        symlink(target, sandbox.path(link)).expect("a link");
        set_mtime(&sandbox.path(link), std::time::SystemTime::now() - Duration::from_secs(86_400));
    }
    let before = tree(&sandbox.work());
    for (link, _) in links {
        let finished = sandbox.withlock().args(LONG_WAIT).arg(link).args(["--", "touch", "ran"]).run();
        assert_eq!(finished.code(), Some(73), "{link}: {finished}");
        finished.one_line(&[link, "symbolic link"]);
        assert!(finished.took < AT_ONCE, "{link}");
        assert_eq!(tree(&sandbox.work()), before, "{link}");
    }
}

#[test]
fn c12_a_symlink_above_the_lock_is_the_users_own_and_is_followed() {
    let sandbox = Sandbox::new();
    fs::create_dir(sandbox.path("real")).expect("a directory");
    symlink("real", sandbox.path("link")).expect("a link");
    let finished = sandbox.withlock().arg("link/a.lock").args(["--", "ls", "real"]).run();
    finished.exited(0).silent();
    assert_eq!(finished.out(), "a.lock\n");
}

#[test]
fn c14_every_name_that_can_be_locked_can_also_be_broken() {
    let sandbox = Sandbox::new();
    let (mut longest_taken, mut shortest_refused) = (0, usize::MAX);
    for length in (1..=4).chain(180..=255) {
        let lock = sandbox.path("n".repeat(length));
        plant(&lock, &planted(1_000), 60_000);
        let broken = sandbox.withlock().arg("-n").arg(&lock).args(["--", "true"]).run();
        match broken.code() {
            Some(0) => longest_taken = longest_taken.max(length),
            Some(73) => {
                broken.one_line(&["at most"]);
                shortest_refused = shortest_refused.min(length);
            }
            _ => panic!("{length}: {broken}"),
        }
        let _ = fs::remove_file(&lock);
        let taken = sandbox.withlock().arg("-n").arg(&lock).args(["--", "true"]).run();
        assert_eq!(taken.code(), broken.code(), "a name of {length} bytes is taken just when it can be broken");
    }
    assert_eq!(longest_taken + 1, shortest_refused);
    assert!((190..=210).contains(&longest_taken), "{longest_taken}");
    let too_long = sandbox.withlock().arg("n".repeat(255)).args(["--", "true"]).run();
    too_long.one_line(&[&longest_taken.to_string()]);
    // Names are bytes: with letters of two bytes the limit is the same.
    let letters = "é".repeat(longest_taken / 2 + 1);
    sandbox.withlock().arg(letters).args(["--", "true"]).run().exited(73);
    assert!(sandbox.names().iter().all(|name| name.contains(".stale-")), "{:?}", sandbox.names());
}

/// Every byte that a file name may have.
pub(crate) fn nasty_names() -> Vec<OsString> {
    let all: Vec<u8> = (1..=255).filter(|byte| *byte != b'/').collect();
    let mut names: Vec<OsString> = all.chunks(128).map(|half| OsString::from_vec(half.to_vec())).collect();
    names.extend(
        ["a b", "a\nb", "\"'`$(touch ran)", "\x1b[31mred\x1b]0;title\x07", "-n", "--", "*"].map(OsString::from),
    );
    names.push(OsString::from_vec(b"\xff\xfe\xc3(".to_vec()));
    names
}

#[test]
fn c15_names_of_any_bytes_work_and_drive_no_terminal() {
    let sandbox = Sandbox::new();
    for name in nasty_names() {
        let lock = sandbox.path(&name);
        let finished = sandbox.withlock().arg(&lock).sh("printf %s \"$WITHLOCK_LOCK\"; cat \"$WITHLOCK_LOCK\"").run();
        finished.exited(0).silent();
        let (path, line) = finished.stdout.split_at(lock.as_os_str().len());
        assert_eq!(path, lock.as_os_str().as_bytes(), "byte for byte");
        serde_json::from_slice::<serde_json::Value>(line).expect("a record");

        plant(&lock, &planted(3_600_000), 0);
        let busy = sandbox.withlock().arg("-n").arg(&lock).args(["--", "true"]).run();
        busy.exited(75);
        let raw = busy.stderr.iter().filter(|byte| **byte < 0x20 && **byte != b'\n' || **byte == 0x7f).count();
        assert_eq!((raw, busy.err().lines().count()), (0, 1), "{:?}", busy.err());
        assert!(std::str::from_utf8(&busy.stderr).is_ok(), "{:?}", busy.err());
        let inode_before = inode(&lock);
        age(&lock, 7_200_000);
        sandbox.withlock().arg("-n").arg(&lock).args(["--", "true"]).run().exited(0);
        assert_ne!(inode(&lock), inode_before);
    }
    assert!(!sandbox.path("ran").exists());
}

#[test]
fn c15_arguments_and_environment_reach_the_command_byte_for_byte() {
    let sandbox = Sandbox::new();
    let args = nasty_names();
    let finished = sandbox.withlock().lock().args(["--", "printf", "%s\\0"]).args(&args).run();
    finished.exited(0).silent();
    let expected: Vec<u8> = args.iter().flat_map(|arg| [arg.as_bytes(), b"\0"].concat()).collect();
    assert_eq!(finished.stdout, expected);
    let value = OsStr::from_bytes(b"\xff\n\x1b\xc3(");
    let seen = sandbox.withlock().lock().args(["--", "env", "-0"]).env("NASTY", value).run();
    let entry = [b"NASTY=", value.as_bytes()].concat();
    assert!(seen.stdout.split(|byte| *byte == 0).any(|found| found == entry));
}

#[test]
fn c15_a_record_is_valid_whatever_the_command_and_the_label_are_called() {
    let sandbox = Sandbox::new();
    for name in nasty_names() {
        let command = sandbox.path("bin").join(&name);
        fs::create_dir_all(sandbox.path("bin")).expect("a directory");
        symlink("/bin/cat", &command).expect("a link");
        let label = OsStr::new("a \"label\"\n\x1b[31m");
        let finished =
            sandbox.withlock().arg("--label").arg(label).lock().arg("--").arg(&command).arg(sandbox.lock()).run();
        finished.exited(0).silent();
        let found: serde_json::Value = serde_json::from_slice(&finished.stdout).expect("a record");
        assert_eq!(found["label"], "a \"label\"\n\x1b[31m");
        if let Some(text) = name.to_str() {
            assert_eq!(found["command"], text);
        }
        fs::remove_file(&command).expect("the link goes");
    }
}

#[test]
fn a_working_directory_that_was_removed_has_no_place_for_a_lock() {
    let sandbox = Sandbox::new();
    let removed = sandbox.sh("mkdir gone && cd gone && rmdir ../gone && exec \"$WL\" a.lock -- true").run();
    let line = "withlock: a.lock: cannot be locked: the working directory was removed\n";
    assert_eq!(removed.exited(73).err(), line);
    let acquired = sandbox.sh("mkdir gone && cd gone && rmdir ../gone && exec \"$WL\" acquire a.lock").run();
    assert_eq!((acquired.exited(73).err(), acquired.out()), (line.into(), String::new()));
    assert_eq!(sandbox.names(), [""; 0]);
}

#[test]
fn a_lock_of_a_newer_version_is_said_to_be_one_and_is_never_touched() {
    let sandbox = Sandbox::new();
    plant_bytes(&sandbox.lock(), b"{\"withlock\":2,\"nonce\":\"x\"}\n", 3_600_000);
    let before = tree(&sandbox.work());
    let newer = "a lock of a newer withlock (record version 2; this one reads 1)";
    let locked = format!("withlock: a.lock: cannot be locked: {newer}\n");
    let plainly = format!("withlock: a.lock: {newer}\n");
    for (arguments, line) in [
        (&["a.lock", "--", "true"][..], &locked),
        (&["--also", "a.lock", "b.lock", "--", "true"], &locked),
        (&["acquire", "a.lock"], &locked),
        (&["break", "a.lock"], &plainly),
        (&["break", "--force", "a.lock"], &plainly),
    ] {
        assert_eq!(&sandbox.withlock().args(arguments).run().exited(73).err(), line, "{arguments:?}");
    }
    let shown = sandbox.withlock().args(["inspect", "a.lock"]).run();
    let text = shown.exited(0).silent().out();
    assert!(text.contains(&format!("foreign: {newer}")) && !text.contains("not a withlock lock"), "{text}");
    assert_eq!(tree(&sandbox.work()), before);
}
