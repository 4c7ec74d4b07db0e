//! The surroundings of a hold: directories that move, masks, small file systems, few descriptors.
//!
//! Needs root for mounts, each in a mount namespace of its own.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use crate::harness::{Run, Sandbox, plant, planted, record, slots, tree};

#[test]
fn a_lock_whose_directory_is_renamed_meanwhile_is_released_where_it_went_and_nowhere_else() {
    let sandbox = Sandbox::new();
    fs::create_dir(sandbox.path("dir")).expect("a directory");
    let stranger = planted(3_600_000);
    plant(&sandbox.path("stranger"), &stranger, 0);
    let body = "mv dir moved; mkdir dir; mv stranger dir/a.lock";
    sandbox.withlock().arg("dir/a.lock").sh(body).run().exited(0).silent();
    assert!(tree(&sandbox.path("moved")).is_empty(), "{:?}", tree(&sandbox.path("moved")));
    assert_eq!(record(&sandbox.path("dir/a.lock")).map(|found| found.nonce), Some(stranger.nonce));
}

#[test]
fn a_symlink_above_the_lock_that_is_turned_elsewhere_meanwhile_misleads_nobody() {
    let sandbox = Sandbox::new();
    for dir in ["one", "two"] {
        fs::create_dir(sandbox.path(dir)).expect("a directory");
    }
    symlink("one", sandbox.path("link")).expect("a link");
    let stranger = planted(3_600_000);
    plant(&sandbox.path("two/a.lock"), &stranger, 0);
    // Long enough for a renewal and a look in between.
    let body = "ln -sfn two link; sleep 1.3";
    sandbox.withlock().args(["--ttl", "1s"]).arg("link/a.lock").sh(body).run().exited(0).silent();
    assert!(tree(&sandbox.path("one")).is_empty());
    assert_eq!(record(&sandbox.path("two/a.lock")).map(|found| found.nonce), Some(stranger.nonce));
}

#[test]
fn the_lock_files_mode_is_0644_less_the_umask_but_never_its_owners_or_exactly_what_was_asked_for() {
    let sandbox = Sandbox::new();
    for (umask, option, mode) in [
        ("000", "", 0o644),
        ("022", "", 0o644),
        ("077", "", 0o600),
        ("0777", "", 0o600),
        ("0477", "", 0o600),
        ("0222", "", 0o644),
        ("077", "--mode 640", 0o640),
        ("000", "--mode 666", 0o666),
    ] {
        let text = format!("umask {umask}; \"$WL\" {option} \"$L\" -- stat -c %a \"$L\"");
        let finished = sandbox.sh(text).run();
        finished.exited(0).silent();
        assert_eq!(finished.out().trim(), format!("{mode:o}"), "umask {umask}, {option}");
    }
}

#[test]
fn whatever_the_umask_who_took_a_lock_can_renew_release_and_break_it_and_reserve_again() {
    let sandbox = Sandbox::new();
    let binary = sandbox.public_binary();
    sandbox.chmod(sandbox.work(), 0o777);
    let by_nobody = |text: &str| {
        let front = ["sh", "-c", "umask 0777; WL=$0; eval \"$1\""];
        sandbox.program(front[0]).args(&front[1..]).arg(&binary).arg(text).run_by_nobody().run()
    };
    by_nobody("nonce=$($WL acquire a.lock) && $WL renew --nonce $nonce a.lock && $WL release --nonce $nonce a.lock")
        .exited(0)
        .silent();
    by_nobody("$WL acquire a.lock >nonce; chmod 600 nonce; $WL break --force a.lock >/dev/null 2>&1").exited(0);
    by_nobody("$WL a.lock -- $WL reserve . && $WL reserve .").exited(0).silent();
}

#[test]
fn a_slot_can_be_used_by_all_who_may_write_in_the_directory_whatever_the_umask() {
    let sandbox = Sandbox::new();
    let dir = sandbox.path("shared");
    fs::create_dir(&dir).expect("a directory");
    sandbox.chmod(&dir, 0o777);
    plant(&dir.join("a.lock"), &planted(1_000), 60_000);
    sandbox.sh("umask 077; \"$WL\" -n shared/a.lock -- true").run().exited(0).silent();
    let slots = slots(&dir.join("a.lock"));
    assert_eq!(fs::metadata(&slots[0].path).expect("a slot").mode() & 0o777, 0o777);
}

/// On a tmpfs of its own with these mount options, prepared by `prepare`; the working directory is in it.
fn on_tmpfs<'s>(run: Run<'s>, dir: &Path, options: &str, prepare: &str) -> Run<'s> {
    let script = format!("mount -t tmpfs -o {options} none \"$0\" && cd \"$0\" && {prepare} && exec \"$@\"");
    let front = ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", &script].map(OsStr::new);
    run.through(front.into_iter().chain([dir.as_os_str()]).collect::<Vec<_>>())
}

/// Fills the file system to the last byte.
const FILL: &str = "{ cat /dev/zero >fill 2>/dev/null || true; }";

#[test]
fn without_space_for_the_record_it_is_an_error_that_leaves_nothing_behind() {
    let sandbox = Sandbox::new();
    let run = sandbox.sh("\"$WL\" a.lock -- touch ran; echo $?; ls");
    let finished = on_tmpfs(run, &sandbox.work(), "size=64k", FILL).run();
    finished.exited(0);
    assert_eq!(finished.out(), "74\nfill\n", "{finished}");
    finished.one_line(&["a.lock", "No space left"]);
}

#[test]
fn without_an_inode_for_the_lock_it_is_an_error_at_once() {
    let sandbox = Sandbox::new();
    let run = sandbox.sh("\"$WL\" -w 1h a.lock -- true; echo $?; ls");
    let finished = on_tmpfs(run, &sandbox.work(), "nr_inodes=2", "touch one").run();
    assert_eq!(finished.out(), "74\none\n", "{finished}");
    finished.one_line(&["a.lock", "No space left"]);
}

#[test]
fn a_stale_lock_can_be_evicted_without_an_inode_or_space_for_its_slot() {
    let sandbox = Sandbox::new();
    let dead = planted(1_000);
    plant(&sandbox.path("planted"), &dead, 60_000);
    let dir = sandbox.path("small");
    fs::create_dir(&dir).expect("a directory");
    // One inode is left, enough for the new lock only; or none, so that only the eviction succeeds.
    let prepare = "cp -p ../planted a.lock && touch one";
    for (what, options, code) in [("one inode", "nr_inodes=4,size=1m", 0), ("none", "nr_inodes=3,size=1m", 74)] {
        let text = "\"$WL\" -w 5s a.lock -- ls; echo $?; ls -d a.lock.stale-*; cat a.lock.stale-*";
        let finished = on_tmpfs(sandbox.sh(text), &dir, options, prepare).run();
        let out = finished.out();
        assert!(out.lines().any(|line| line == code.to_string()), "{what}: {finished}");
        assert_eq!(out.contains("one\n"), code == 0, "{what}: {finished}");
        assert!(out.contains(dead.nonce.as_str()), "{what}: the record is kept: {finished}");
    }
}

#[test]
fn with_few_descriptors_it_works_or_says_why_not_and_never_leaks_the_lock() {
    let sandbox = Sandbox::new();
    let mut worked = 0;
    for limit in 3..40 {
        let text = format!("ulimit -n {limit}; exec \"$WL\" \"$L\" -- true");
        let finished = sandbox.sh(text).run();
        match finished.code() {
            Some(0) => worked += 1,
            Some(71 | 74 | 126) => assert!(!finished.stderr.is_empty(), "{limit}: {finished}"),
            _ => panic!("{limit}: {finished}"),
        }
        assert!(sandbox.names().is_empty(), "{limit}: {:?}: {finished}", sandbox.names());
    }
    assert!(worked >= 32, "only {worked}");
}

#[test]
fn where_no_high_number_is_left_the_command_inherits_the_guard_under_a_low_one() {
    let sandbox = Sandbox::new();
    let print = "for fd in /proc/$$/fd/*; do readlink $fd; done";
    for limits in ["ulimit -n 10", "ulimit -n 61; exec 60</dev/null"] {
        let text = format!("{limits}; exec \"$WL\" \"$L\" -- bash -c '{print}'");
        let finished = sandbox.program("bash").args(["-c", &text]).run();
        finished.exited(0).silent();
        let lock = sandbox.lock().display().to_string();
        assert_eq!(finished.out().lines().filter(|target| *target == lock).count(), 1, "{limits}: {finished}");
    }
}

#[test]
fn an_ignored_sigchld_on_entry_loses_no_status() {
    let sandbox = Sandbox::new();
    for code in [0, 5] {
        let run = sandbox.withlock().lock().sh(format!("exit {code}"));
        run.through(["env", "--ignore-signal=CHLD"]).run().exited(code).silent();
    }
}

#[test]
fn a_child_that_the_wrapper_already_had_is_not_taken_for_the_command() {
    let sandbox = Sandbox::new();
    // A shell with a background child becomes the wrapper; the child ends first, with a status of its own.
    let mut gate = sandbox.gate();
    let text = format!("sh -c 'exit 9' & exec \"$WL\" \"$L\" -- sh -c '{}; exit 4'", gate.script());
    let running = sandbox.sh(text).start();
    gate.wait_inside();
    gate.open();
    running.wait().exited(4).silent();
    // And one that outlives the loss is not killed with the command.
    let text = format!(
        "sh -c '{}' & exec \"$WL\" --kill-after 200ms \"$L\" -- sh -c 'rm \"$L\"; exec sleep 1000'",
        gate.script()
    );
    let running = sandbox.sh(text).start();
    let bystander = gate.wait_inside();
    running.wait().exited(76);
    assert!(crate::harness::process(bystander).is_some_and(|process| process.state != 'Z'));
    gate.open();
}

#[test]
fn skip_if_asks_under_the_lock_whether_the_command_is_still_needed() {
    let sandbox = Sandbox::new();
    let start = |_| {
        let run = sandbox.withlock().args(["-q", "--skip-if", "test -e done"]).lock();
        run.sh("echo ran >>log; touch done").start()
    };
    let copies: Vec<_> = (0..12).map(start).collect();
    for copy in copies {
        copy.wait().exited(0);
    }
    assert_eq!(fs::read_to_string(sandbox.path("log")).expect("a log"), "ran\n");
    assert_eq!(sandbox.names(), ["done", "log"]);
    // A condition that fails, or cannot be run, means that the command is needed.
    for condition in ["exit 3", "no-such-command"] {
        let finished = sandbox.withlock().args(["--skip-if", condition]).lock().sh("echo needed").run();
        assert_eq!(finished.exited(0).out(), "needed\n", "{condition}");
    }
}

#[test]
fn whatever_the_environment_holds_a_start_that_fails_ends_with_its_word() {
    let sandbox = Sandbox::new();
    let name = "n".repeat(196);
    for program in [sandbox.shipped(), sandbox.withlock()] {
        // The C library looks at names that begin like its question by a function that it chooses at its start.
        let run = program.env("RUNLEVEL", "3").env("RUST_BACKTRACE", "1").arg(&name).args(["--", "true"]).run();
        run.exited(73).one_line(&["its name has 196 bytes"]);
    }
}

#[test]
fn a_command_is_ended_where_proc_does_not_show_it() {
    let sandbox = Sandbox::new();
    let hold = ["--max-hold", "300ms", "--kill-after", "300ms"];
    let text = r#"umount -l /proc && exec "$@""#;
    let unseen = sandbox.program("unshare").args(["-m", "sh", "-c", text, "sh"]).arg(env!("CARGO_BIN_EXE_withlock"));
    unseen.args(hold).lock().args(["--", "sleep", "600"]).run().exited(124);
    // A /proc of another pid namespace is none.
    let foreign = sandbox.program("unshare").args(["-pf"]).arg(env!("CARGO_BIN_EXE_withlock"));
    foreign.args(hold).lock().args(["--", "sleep", "600"]).run().exited(124);
}

#[test]
fn a_release_that_fails_leaves_a_lock_that_expires_though_a_background_child_has_its_guard() {
    let sandbox = Sandbox::new();
    let dir = sandbox.path("theirs");
    fs::create_dir(&dir).expect("a directory");
    std::os::unix::fs::chown(&dir, Some(65_534), Some(65_534)).expect("a user's directory");
    let text = "sleep 600 >/dev/null 2>&1 & echo $!; chmod 555 theirs";
    let run = sandbox.withlock().run_by_nobody().args(["--ttl", "1s", "theirs/a.lock"]).sh(text).run();
    run.exited(77).one_line(&["the lock stays and expires within 1s"]);
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).expect("writable again");
    sandbox.withlock().args(["-w", "10s", "theirs/a.lock", "--", "true"]).run().exited(0);
    let child = run.out().trim().parse().expect("a pid");
    assert!(crate::harness::process(child).is_some(), "else the test shows nothing");
    crate::harness::send(child, nix::sys::signal::Signal::SIGKILL);
}

#[test]
fn a_limit_on_the_size_of_files_is_an_error_with_a_line_and_acts_on_the_command_as_ever() {
    let sandbox = Sandbox::new();
    let under = |limit: u32, words: &str| {
        let text = format!("(ulimit -f {limit}; {words}; echo \"exit $?\") 2>&1 | cat");
        let finished = sandbox.sh(text).env("SHIPPED", crate::harness::shipped()).run();
        finished.exited(0);
        finished.out()
    };
    let line = "withlock: a.lock: cannot write its record: File too large\nexit 74\n";
    for program in ["$WL", "$SHIPPED"] {
        for words in
            ["a.lock -- true", "-w 1s --ttl 5s a.lock -- true", "acquire a.lock", "-v --log-json 2 a.lock -- true"]
        {
            let said = under(0, &format!("\"{program}\" {words}"));
            let plain: String = said.lines().filter(|l| !l.starts_with('{')).map(|l| l.to_owned() + "\n").collect();
            assert_eq!(plain, line, "{program} {words}");
            assert!(sandbox.names().is_empty(), "{words}: {:?}", sandbox.names());
        }
        // With room for a record it is COMMAND that meets the limit: the signal is as it was.
        let writes = "dd if=/dev/zero of=big bs=4096 count=2 2>/dev/null";
        let said = under(1, &format!("\"{program}\" a.lock -- {writes}"));
        assert!(said.ends_with("exit 153\n"), "{program}: {said}");
        std::fs::remove_file(sandbox.path("big")).expect("its file");
        // A line of the wrapper's own that does not fit is no signal to COMMAND.
        let text = format!("head -c 1024 /dev/zero >full; \"{program}\" -v a.lock -- sh -c 'exit 5' 2>>full");
        assert!(under(2, &text).ends_with("exit 5\n"), "{program}");
        std::fs::remove_file(sandbox.path("full")).expect("its file");
    }
}

#[test]
fn where_flock_is_refused_that_is_said_at_once_and_nobody_waits_for_its_own_file() {
    let sandbox = Sandbox::new();
    let log = sandbox.io_path("strace");
    for (error, code, word) in [("EACCES", 77, "no permission to lock it"), ("EIO", 74, "cannot lock it")] {
        let inject = format!("inject=flock:error={error}");
        let run = sandbox.shipped().args(["-w", "1h"]).lock().args(["--", "touch", "ran"]);
        run.traced(&log, &["-e", "trace=flock", "-e", &inject]).run().exited(code).one_line(&["a.lock: ", word]);
        assert!(!sandbox.lock().exists() && !sandbox.path("ran").exists(), "{error}: {:?}", sandbox.names());
    }
}

#[test]
fn where_a_sandbox_refuses_getrandom_the_same_numbers_come_from_their_file() {
    let sandbox = Sandbox::new();
    let log = sandbox.io_path("strace");
    for error in ["ENOSYS", "EPERM"] {
        let inject = format!("inject=getrandom:error={error}");
        let run = sandbox.shipped().lock().sh("echo $WITHLOCK_NONCE");
        let finished = run.traced(&log, &["-e", "trace=getrandom", "-e", &inject]).run();
        finished.exited(0).silent();
        let nonce = finished.out();
        assert!(nonce.trim().len() == 32 && nonce.trim().bytes().any(|digit| digit != b'0'), "{error}: {nonce:?}");
        assert!(sandbox.names().is_empty(), "{error}: {:?}", sandbox.names());
    }
}
