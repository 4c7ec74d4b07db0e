//! `acquire`, `renew` and `release`: the plain mutex with a bounded hold, for scripts that cannot wrap one
//! command.

use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::time::{Duration, SystemTime};

use withlock::record::{Guard, Nonce};
use withlock::store::Place;
use withlock::store::handed::{self, Handed};
use withlock::sys::hook::{self, Step};

use crate::cases_path::on_read_only;
use crate::harness::{
    Finished, Run, Sandbox, age, claims_in, mtime, plant, plant_bytes, planted, record, set_mtime, slots, tree,
};

fn acquire(sandbox: &Sandbox) -> Run<'_> {
    sandbox.withlock().arg("acquire")
}

/// Acquires and expects nothing but the nonce.
#[track_caller]
fn nonce_of(run: Run<'_>) -> String {
    let finished = run.run();
    finished.exited(0).silent();
    let out = finished.out();
    let nonce = out.strip_suffix('\n').expect("a line");
    assert!(Nonce::parse(nonce.as_bytes()).is_some(), "{out:?}");
    nonce.to_owned()
}

fn by_nonce(sandbox: &Sandbox, what: &str, nonce: &str) -> Finished {
    sandbox.withlock().args([what, "--nonce", nonce]).lock().run()
}

const NOBODYS: &str = "0123456789abcdef0123456789abcdef";

#[test]
fn acquire_leaves_a_lock_without_guard_or_process_and_prints_its_nonce_alone() {
    let sandbox = Sandbox::new();
    let nonce = nonce_of(acquire(&sandbox).args(["--ttl", "7s", "--label", "nightly"]).lock());
    let record = record(&sandbox.lock()).expect("a record");
    assert_eq!(record.nonce.as_str(), nonce);
    assert_eq!((record.guard, record.ttl_ms, record.label.as_deref()), (Guard::None, 7_000, Some("nightly")));
    assert!(sandbox.processes().is_empty(), "nothing stays behind");
    let busy = sandbox.withlock().arg("-n").lock().args(["--", "true"]).run();
    busy.exited(75).one_line(&["held by pid", "expires in"]);
    assert!(!busy.err().contains("unless renewed"), "{busy}");
}

#[test]
fn the_record_names_the_script_rather_than_the_program_that_is_gone() {
    let sandbox = Sandbox::new();
    std::fs::write(sandbox.path("deploy.sh"), "#!/bin/sh\nnonce=$(\"$WL\" acquire \"$L\")\necho $$\n")
        .expect("a script");
    sandbox.chmod(sandbox.path("deploy.sh"), 0o755);
    let finished = sandbox.program("./deploy.sh").run();
    finished.exited(0).silent();
    let record = record(&sandbox.lock()).expect("a record");
    assert_eq!((record.command.as_str(), format!("{}\n", record.pid)), ("deploy.sh", finished.out()));
}

#[test]
fn it_is_stale_one_ttl_after_the_last_renewal_and_not_before() {
    let sandbox = Sandbox::new();
    let nonce = nonce_of(acquire(&sandbox).args(["--ttl", "60s"]).lock());
    age(&sandbox.lock(), 59_000);
    acquire(&sandbox).arg("-n").lock().run().exited(75);
    by_nonce(&sandbox, "renew", &nonce).exited(0).silent();
    let since = SystemTime::now().duration_since(mtime(&sandbox.lock())).unwrap_or_default();
    assert!(since < Duration::from_secs(30), "{since:?}");
    age(&sandbox.lock(), 61_000);
    let next = nonce_of(acquire(&sandbox).arg("-n").lock());
    assert_ne!(next, nonce);
    for what in ["renew", "release"] {
        by_nonce(&sandbox, what, &nonce).exited(76).one_line(&[
            "a.lock: not held with nonce",
            "another holds it",
            &next,
        ]);
    }
}

#[test]
fn a_stale_lock_that_nobody_has_ended_yet_can_still_be_renewed() {
    let sandbox = Sandbox::new();
    let nonce = nonce_of(acquire(&sandbox).lock());
    age(&sandbox.lock(), 3_600_000);
    by_nonce(&sandbox, "renew", &nonce).exited(0).silent();
    acquire(&sandbox).arg("-n").lock().run().exited(75);
}

#[test]
fn a_waiter_gets_in_when_the_lease_runs_out() {
    let sandbox = Sandbox::new();
    nonce_of(acquire(&sandbox).args(["--ttl", "1s"]).lock());
    let waiter = acquire(&sandbox).args(["-q", "--wait", "40s"]).lock().run();
    waiter.exited(0).silent();
    assert!(waiter.took > Duration::from_millis(800), "not before: {:?}", waiter.took);
}

#[test]
fn release_ends_the_epoch_through_its_slot_and_says_why_there() {
    let sandbox = Sandbox::new();
    let nonce = nonce_of(acquire(&sandbox).lock());
    let held = std::fs::read(sandbox.lock()).expect("a record");
    by_nonce(&sandbox, "release", &nonce).exited(0).silent();
    assert!(!sandbox.lock().exists());
    let slots = slots(&sandbox.lock());
    assert_eq!(slots.len(), 1);
    assert_eq!((slots[0].name.nonce.as_str(), slots[0].lock.as_ref()), (nonce.as_str(), Some(&held)));
    assert_eq!(claims_in(&slots[0].path)[&0]["why"], "late-release");
    let again = by_nonce(&sandbox, "release", &nonce);
    again.exited(76).one_line(&["a.lock: not held with nonce", &nonce, "nobody holds it"]);
}

#[test]
fn taking_and_giving_in_a_loop_does_not_fill_the_directory() {
    let sandbox = Sandbox::new();
    let mut left = Vec::new();
    for _ in 0..20 {
        let nonce = nonce_of(acquire(&sandbox).args(["--ttl", "1s"]).lock());
        by_nonce(&sandbox, "release", &nonce).exited(0);
        // As if the next came a while later.
        for slot in slots(&sandbox.lock()) {
            age(&slot.path, 3_600_000);
        }
        left.push(slots(&sandbox.lock()).len());
    }
    assert!(left.iter().all(|count| *count <= 2), "{left:?}");
}

#[test]
fn a_wrong_nonce_is_76_and_touches_nothing() {
    let sandbox = Sandbox::new();
    nonce_of(acquire(&sandbox).lock());
    age(&sandbox.lock(), 10_000);
    let (before, stamp) = (tree(&sandbox.work()), mtime(&sandbox.lock()));
    for what in ["renew", "release"] {
        by_nonce(&sandbox, what, NOBODYS).exited(76).one_line(&["not held with nonce", NOBODYS, "another holds it"]);
        assert_eq!((tree(&sandbox.work()), mtime(&sandbox.lock())), (before.clone(), stamp), "{what}");
    }
}

#[test]
fn what_is_no_lock_of_anybodys_is_told_apart_and_never_touched() {
    let sandbox = Sandbox::new();
    for what in ["renew", "release"] {
        by_nonce(&sandbox, what, NOBODYS).exited(76).one_line(&["nobody holds it"]);
        assert_eq!(sandbox.names(), [""; 0], "{what}");
    }
    plant_bytes(&sandbox.lock(), b"", 90_000);
    let before = tree(&sandbox.work());
    for what in ["renew", "release"] {
        by_nonce(&sandbox, what, NOBODYS).exited(76).one_line(&["its record is not written yet, or broken"]);
    }
    assert_eq!(tree(&sandbox.work()), before);
    plant_bytes(&sandbox.lock(), b"#!/bin/sh\nprecious\n", 90_000);
    let before = tree(&sandbox.work());
    for what in ["renew", "release"] {
        by_nonce(&sandbox, what, NOBODYS).exited(76).one_line(&["a regular file that is no lock is there instead"]);
    }
    acquire(&sandbox).arg("-n").lock().run().exited(73).one_line(&["not a withlock lock"]);
    assert_eq!(tree(&sandbox.work()), before);
}

#[test]
fn a_lock_whose_place_is_taken_by_something_else_or_gone_is_lost_to_renew_release_and_check_alike() {
    let sandbox = Sandbox::new();
    std::fs::create_dir(sandbox.path("dir")).expect("a directory");
    std::os::unix::fs::symlink("dir/none", sandbox.path("link")).expect("a link");
    nix::unistd::mkfifo(&sandbox.path("fifo"), nix::sys::stat::Mode::from_bits_truncate(0o600)).expect("a FIFO");
    plant_bytes(&sandbox.path("data"), b"precious\n", 0);
    plant_bytes(&sandbox.path("newer"), b"{\"withlock\":2,\"nonce\":\"x\"}\n", 0);
    let long = "n".repeat(256);
    let before = tree(&sandbox.work());
    for (lock, found) in [
        ("dir", "a directory is there instead"),
        ("link", "a symbolic link is there instead"),
        ("fifo", "a FIFO is there instead"),
        ("data", "a regular file that is no lock is there instead"),
        ("newer", "a lock of a newer withlock (record version 2; this one reads 1) is there instead"),
        ("gone/a.lock", "no such directory: gone"),
        ("data/a.lock", "cannot use directory data: Not a directory"),
        (&long, "cannot look at it: File name too long"),
    ] {
        for (what, words) in [
            ("renew", format!("not held with nonce {NOBODYS}")),
            ("release", format!("not held with nonce {NOBODYS}")),
            ("check", "not held".to_owned()),
        ] {
            let finished = sandbox.withlock().args([what, "--nonce", NOBODYS, lock]).run();
            assert_eq!(finished.exited(76).err(), format!("withlock: {lock}: {words}: {found}\n"), "{what}");
        }
    }
    assert_eq!(tree(&sandbox.work()), before);
}

#[test]
fn a_renewal_that_a_read_only_file_system_refuses_is_not_said_to_be_a_lock_that_cannot_be_taken() {
    let sandbox = Sandbox::new();
    let dir = sandbox.path("ro");
    std::fs::create_dir(&dir).expect("a directory");
    let mine = planted(3_600_000);
    plant(&dir.join("a.lock"), &mine, 0);
    let before = tree(&sandbox.work());
    let run = sandbox.withlock().args(["renew", "--nonce", mine.nonce.as_str(), "ro/a.lock"]);
    let finished = on_read_only(run, &dir).run();
    assert_eq!(finished.exited(73).err(), "withlock: ro/a.lock: the file system is read-only\n");
    assert_eq!(tree(&sandbox.work()), before);
}

#[test]
fn a_lock_that_we_may_not_touch_is_77() {
    let sandbox = Sandbox::new();
    let nonce = nonce_of(acquire(&sandbox).lock());
    let binary = sandbox.public_binary();
    for what in ["renew", "release"] {
        let run = sandbox.program(&binary).args([what, "--nonce", &nonce]).lock().run_by_nobody();
        run.run().exited(77).one_line(&["a.lock"]);
    }
    assert_eq!(sandbox.names(), ["a.lock"], "and nothing is left of the try");
    // A lock of one's own in a directory of others': it can be renewed, but not taken away.
    sandbox.chmod(sandbox.work(), 0o1777);
    let run = sandbox.program(&binary).args(["acquire", "mine.lock"]).run_by_nobody();
    let nonce = nonce_of(run);
    let run = sandbox.program(&binary).args(["renew", "--nonce", &nonce, "mine.lock"]).run_by_nobody();
    run.run().exited(0).silent();
    sandbox.chmod(sandbox.work(), 0o755);
    let run = sandbox.program(&binary).args(["release", "--nonce", &nonce, "mine.lock"]).run_by_nobody();
    run.run().exited(77).one_line(&["not released"]);
    assert!(sandbox.path("mine.lock").exists());
}

#[test]
fn a_lock_that_a_wrapper_keeps_for_its_command_is_released_by_nobody_else() {
    let sandbox = Sandbox::new();
    let run = sandbox.withlock().lock().sh("\"$WL\" release; echo $?; \"$WL\" renew; echo $?; test -e \"$L\"; echo $?");
    let finished = run.run();
    finished.exited(0).one_line(&["not released", "it is released when the command that runs under it ends"]);
    assert_eq!(finished.out(), "75\n0\n0\n");
    assert_eq!(sandbox.names(), [""; 0]);
}

#[test]
fn nor_is_one_that_has_no_guard_which_the_command_inherits() {
    // The shell's status is that of its last command but the trap.
    let text = "\"$WL\" release; echo $?; \"$WL\" -n \"$L\" -- echo second; echo $?; trap '\"$WL\" release' EXIT";
    for options in [&["-o"][..], &["--no-renew"], &["-o", "--also", "b"], &["--no-renew", "--also", "b"]] {
        let sandbox = Sandbox::new();
        let finished = sandbox.withlock().args(options).lock().sh(text).run();
        finished.exited(0);
        assert_eq!(finished.out(), "75\n78\n", "{options:?}: {finished}");
        let refused = "a.lock: not released: it is released when the command that runs under it ends\n";
        assert_eq!(finished.err().matches(refused).count(), 2, "{options:?}: {finished}");
        assert_eq!(sandbox.names(), [""; 0], "{options:?}");
    }
    // Each of several, by its own nonce, and from further down.
    let sandbox = Sandbox::new();
    let text = "for n in $WITHLOCK_HELD; do \"$WL\" c -- \"$WL\" release --nonce $n a; echo $?; done; ls";
    let finished = sandbox.withlock().args(["-o", "--also", "b", "a"]).sh(text).run();
    finished.exited(0);
    let mut codes: Vec<String> = finished.out().lines().map(str::to_owned).collect();
    codes.sort();
    assert_eq!(codes, ["75", "76", "a", "b"], "{finished}");
    // What is not held any more is not held by the command either.
    let finished =
        sandbox.withlock().args(["-o", "--on-lost", "warn"]).lock().sh("rm \"$L\"; \"$WL\" release; echo $?").run();
    assert_eq!(finished.exited(76).out(), "76\n");
}

#[test]
fn what_a_script_has_acquired_it_releases_whatever_it_runs_under_and_whatever_runs_under_it() {
    let acquire = "eval \"$(\"$WL\" acquire --export OPTIONS \"$L\")\"";
    for (through, text) in [
        // Below a wrapper, and then the outer one's is the wrapper's still.
        (
            Some("-o"),
            format!(
                "outer=$WITHLOCK_NONCE; {acquire}; \"$WL\" release; echo $?; \"$WL\" release --nonce $outer outer; [ $? = 75 ]; echo $?"
            ),
        ),
        (
            None,
            format!(
                "{acquire}; \"$WL\" outer -- \"$WL\" release --nonce $WITHLOCK_NONCE \"$L\"; echo $?; \"$WL\" check 2>/dev/null; [ $? = 76 ]; echo $?"
            ),
        ),
        // One below another.
        (
            None,
            format!(
                "{acquire}; first=$WITHLOCK_NONCE; eval \"$(\"$WL\" acquire --export b)\"; \"$WL\" release; echo $?; \"$WL\" release --nonce $first \"$L\"; echo $?"
            ),
        ),
    ] {
        for options in ["", "--for-pid $$"] {
            let sandbox = Sandbox::new();
            let text = text.replace("OPTIONS", options);
            let run = match through {
                Some(option) => sandbox.withlock().args([option, "outer"]).sh(&text),
                None => sandbox.sh(&text),
            };
            let finished = run.run();
            assert_eq!(finished.exited(0).out(), "0\n0\n", "{text}: {finished}");
            assert!(!sandbox.lock().exists(), "{text}");
            sandbox.wait_until_nothing_runs();
        }
    }
}

/// Renews or releases in this process; right before the first call of this name another lock takes the
/// place of the one that was acquired.
fn overtaken<T>(sandbox: &Sandbox, at_call: &'static str, left_out: &[Step], act: impl FnOnce(Place, Nonce) -> T) -> T {
    let nonce = nonce_of(acquire(sandbox).lock());
    let (lock, aside) = (sandbox.lock(), sandbox.path("aside"));
    let mut overtake = Some(move || {
        std::fs::rename(&lock, aside).expect("renamed");
        plant(&lock, &planted(60_000), 0);
        set_mtime(&lock, LONG_AGO);
    });
    let place = Place::open(sandbox.lock().as_os_str(), false).expect("a place");
    hook::leave_out(left_out);
    hook::set(move |call, _| {
        if call == at_call
            && let Some(overtake) = overtake.take()
        {
            overtake();
        }
        Ok(())
    });
    let outcome = act(place, Nonce::parse(nonce.as_bytes()).expect("a nonce"));
    hook::clear();
    hook::leave_out(&[]);
    assert!(sandbox.path("aside").exists(), "it was overtaken");
    outcome
}

const LONG_AGO: SystemTime = SystemTime::UNIX_EPOCH;

#[test]
fn a_renewal_that_was_overtaken_does_not_refresh_its_successor() {
    for at_call in ["openat", "pread", "lstat", "futimens"] {
        let sandbox = Sandbox::new();
        let outcome = overtaken(&sandbox, at_call, &[], handed::renew);
        assert!(matches!(outcome, Ok(Handed::NotHeld(_))), "{at_call}: {outcome:?}");
        assert_eq!(mtime(&sandbox.lock()), LONG_AGO, "{at_call}");
    }
}

#[test]
fn a_renewal_by_path_would_refresh_its_successor() {
    let sandbox = Sandbox::new();
    let outcome = overtaken(&sandbox, "utimensat", &[Step::Descriptor], handed::renew);
    assert!(matches!(outcome, Ok(Handed::NotHeld(_))), "{outcome:?}");
    assert_ne!(mtime(&sandbox.lock()), LONG_AGO);
}

#[test]
fn a_release_that_was_overtaken_does_not_end_its_successor() {
    for at_call in ["openat", "flock", "mkdir", "create"] {
        let sandbox = Sandbox::new();
        let outcome = overtaken(&sandbox, at_call, &[], |place, nonce| handed::release(&place, nonce));
        assert!(matches!(outcome, Ok(Handed::NotHeld(_))), "{at_call}: {outcome:?}");
        assert_eq!(sandbox.names(), ["a.lock", "aside"], "{at_call}: the successor stays, and nothing of the try");
    }
}

#[test]
fn a_release_that_did_not_verify_after_its_claim_would_end_its_successor() {
    let sandbox = Sandbox::new();
    let outcome = overtaken(&sandbox, "create", &[Step::Verify], |place, nonce| handed::release(&place, nonce));
    assert!(matches!(outcome, Ok(Handed::Done)), "{outcome:?}");
    assert!(!sandbox.lock().exists());
}

#[test]
fn a_renewal_that_finds_another_in_its_slot_is_not_confirmed_until_that_one_has_gone() {
    let sandbox = Sandbox::new();
    let nonce = nonce_of(acquire(&sandbox).args(["--ttl", "1s"]).lock());
    let record = record(&sandbox.lock()).expect("a record");
    let slot = sandbox.path(withlock::record::SlotName::of(&record).file_name("a.lock".as_ref()));
    // An empty one is taken away under whoever was about to enter.
    std::fs::create_dir(&slot).expect("a slot");
    by_nonce(&sandbox, "renew", &nonce).exited(0).silent();
    assert!(!slot.exists());
    // One with a young claim: somebody may be about to end the epoch.
    std::fs::create_dir(&slot).expect("a slot");
    std::fs::write(slot.join("claim-0"), "").expect("a claim");
    by_nonce(&sandbox, "renew", &nonce).exited(75).one_line(&["not renewed: another process wants to end it"]);
    // One whose owner must be dead.
    age(&slot.join("claim-0"), 3_600_000);
    by_nonce(&sandbox, "renew", &nonce).exited(0).silent();
}

#[test]
fn lock_and_nonce_come_from_the_environment_where_they_are_not_given() {
    let sandbox = Sandbox::new();
    let text = "eval \"$(\"$WL\" acquire --export a.lock)\"; cd /; \"$WL\" renew && \"$WL\" release; echo $?";
    let finished = sandbox.sh(text).run();
    finished.exited(0).silent();
    assert_eq!(finished.out(), "0\n");
    for (what, variables, missing) in [
        ("renew", &[][..], "LOCK is missing, and WITHLOCK_LOCK is not set"),
        ("release", &[("WITHLOCK_LOCK", "a.lock")], "--nonce is missing, and WITHLOCK_NONCE is not set"),
        ("release", &[("WITHLOCK_LOCK", "")], "LOCK is missing"),
        ("renew", &[("WITHLOCK_LOCK", "a.lock"), ("WITHLOCK_NONCE", "xyz")], "WITHLOCK_NONCE=xyz: not 32"),
    ] {
        let run = variables.iter().fold(sandbox.withlock().arg(what), |run, (name, value)| run.env(name, value));
        run.run().exited(64).one_line(&[missing]);
    }
    by_nonce(&sandbox, "release", "ABC").exited(64).one_line(&["--nonce ABC: not 32 lower-case hex digits"]);
}

#[test]
fn what_export_prints_is_read_back_by_every_shell_byte_for_byte() {
    let sandbox = Sandbox::new();
    std::fs::create_dir(sandbox.path("numbers")).expect("a directory");
    let hostile = std::ffi::OsString::from_vec(b"a'b\"c $(touch ran) `touch ran`\n\\ \xff; touch ran;\n'\n".to_vec());
    let script =
        "eval \"$(\"$WL\" acquire --export --fence numbers -- \"$1\")\" && cd / && env -0 >\"$OUT\" && \"$WL\" release";
    for shell in ["sh", "bash"] {
        let out = sandbox.io_path("env");
        let run = sandbox.program(shell).args(["-c", script, "script"]).arg(&hostile).env("OUT", &out);
        run.env("WITHLOCK_HELD", "outer").run().exited(0).silent();
        let environment = std::fs::read(&out).expect("an environment");
        let value = |name: &str| {
            let wanted = format!("{name}=");
            let entry = environment.split(|byte| *byte == 0).find(|entry| entry.starts_with(wanted.as_bytes()));
            entry.unwrap_or_else(|| panic!("{name} is not set"))[wanted.len()..].to_vec()
        };
        assert_eq!(value("WITHLOCK_LOCK"), sandbox.path(&hostile).as_os_str().as_bytes(), "{shell}");
        assert_eq!(value("WITHLOCK_MODE"), b"locked");
        assert_eq!(value("WITHLOCK_FENCE"), if shell == "sh" { b"1" } else { b"2" });
        assert_eq!(value("WITHLOCK_HELD"), [b"outer ", &value("WITHLOCK_NONCE")[..]].concat());
    }
    assert!(!sandbox.path("ran").exists());
}

#[test]
fn export_without_a_fence_takes_an_enclosing_token_away() {
    let sandbox = Sandbox::new();
    let text = "eval \"$(\"$WL\" acquire --export \"$L\")\"; echo \"${WITHLOCK_FENCE-none}\"";
    let finished = sandbox.sh(text).env("WITHLOCK_FENCE", "5").run();
    finished.exited(0).silent();
    assert_eq!(finished.out(), "none\n");
}

#[test]
fn a_nonce_that_cannot_be_printed_leaves_no_lock_behind() {
    let sandbox = Sandbox::new();
    for options in [&[][..], &["--export"], &["--for-pid", "1"]] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").expect("/dev/full");
        let finished = acquire(&sandbox).args(options).lock().stdout(full).run();
        finished.exited(74).one_line(&["a.lock: the nonce could not be printed: No space left on device"]);
        let closed = sandbox.sh(format!("\"$WL\" acquire {} \"$L\" >&-", options.join(" "))).run();
        closed.exited(74).one_line(&["the lock was not taken: standard output"]);
        assert_eq!(sandbox.names(), [""; 0], "{options:?}");
        sandbox.wait_until_nothing_runs();
    }
}

#[test]
fn who_cannot_have_it_is_told_as_by_the_wrapper() {
    let sandbox = Sandbox::new();
    nonce_of(acquire(&sandbox).lock());
    acquire(&sandbox).arg("-n").lock().run().exited(75).one_line(&["a.lock: held by pid", "next: withlock inspect"]);
    acquire(&sandbox).args(["-n", "-E", "9"]).lock().run().exited(9).one_line(&["held by pid"]);
    let waited = acquire(&sandbox).args(["-q", "-w", "300ms"]).lock().run();
    waited.exited(75).one_line(&["still held after 3"]);
    for (arguments, code) in [
        (&["acquire", "--ttl", "0.5s", "a.lock"][..], 64),
        (&["acquire", "--for-pid", "-1", "a.lock"], 64),
        (&["acquire", "--for-pid", "0", "a.lock"], 64),
        (&["acquire", "--for-pid", "1x", "a.lock"], 64),
        (&["acquire", "--for-pid", "99999999999", "a.lock"], 64),
        (&["acquire"], 64),
        (&["acquire", "a.lock", "true"], 64),
        (&["acquire", "missing/a.lock"], 73),
    ] {
        let finished = sandbox.withlock().args(arguments).run();
        finished.exited(code).one_line(&[]);
        assert_eq!(finished.out(), "", "{arguments:?}");
    }
    assert_eq!(sandbox.names(), ["a.lock"]);
}
