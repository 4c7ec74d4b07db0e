//! What the manual and the README show of several locks, of N at a time and of the log, run as it stands.

use super::examples::Stage;
use crate::harness::{Running, eventually};

#[test]
fn a_job_with_two_locks_keeps_those_out_that_want_one_of_them() {
    let stage = Stage::new();
    let mut gate = stage.sandbox.gate();
    stage.stub("backup", &gate.script());
    let examples = stage.examples("db.lock");
    assert_eq!(examples.len(), 3, "twice in the manual, once in the README");
    for example in examples {
        let job = stage.shell(&example).start();
        gate.wait_inside();
        for lock in ["db.lock", "files.lock"] {
            stage.sandbox.withlock().args(["-n", lock, "true"]).run().exited(75).one_line(&[lock]);
        }
        gate.open();
        job.wait().exited(0).silent();
    }
    assert_eq!(stage.sandbox.names(), ["bin"]);
}

#[test]
fn of_five_that_want_one_of_three_locks_three_are_inside_and_the_others_follow() {
    let stage = Stage::new();
    let mut gate = stage.sandbox.gate();
    stage.stub("render", &gate.script());
    let script = stage.script("job", &stage.example("render.$n"));
    let jobs: Vec<Running> = (0..5).map(|_| stage.with_path(stage.sandbox.program(&script)).start()).collect();
    for _ in 0..3 {
        gate.wait_inside();
    }
    assert!(!gate.somebody_within(std::time::Duration::from_millis(1_200)), "three at a time");
    for _ in 0..2 {
        gate.open();
        gate.wait_inside();
    }
    (0..3).for_each(|_| gate.open());
    for job in jobs {
        job.wait().exited(0).silent();
    }
    eventually("the keepers have given them back", || {
        let names = stage.sandbox.names();
        if names == ["bin", "job"] { Ok(()) } else { Err(names) }
    });
    // What is wrong is said, and not tried for ever.
    let elsewhere = stage.script("elsewhere", &stage.example("render.$n").replace("/render", "/no/such/render"));
    let wrong = stage.with_path(stage.sandbox.program(elsewhere)).run();
    wrong.exited(1).one_line(&["no such directory"]);
}

#[test]
fn a_run_with_a_log_leaves_its_lines_there() {
    let stage = Stage::new();
    stage.stub("nightly", "exit 0");
    let examples = stage.examples("--log-json");
    assert_eq!(examples.len(), 2, "in the manual and in the README");
    for example in &examples {
        stage.shell(example).run().exited(0).silent();
    }
    let log = std::fs::read_to_string(stage.sandbox.path("locks.log")).expect("a log");
    assert_eq!(log.lines().filter(|line| line.contains("\"event\":\"acquired\"")).count(), examples.len());
}

#[test]
fn an_option_that_there_is_no_equal_of_says_what_to_do_instead() {
    let stage = Stage::new();
    for (arguments, hint) in [
        (&["-s"][..], "-s: a lock has one holder; for many readers beside one writer there is flock -s"),
        (&["-n", "--shared"], "--shared: a lock has one holder; "),
        (&["--slots", "3"], "--slots: a lock has one holder; for N at a time take one of N locks"),
        (&["--slots=3"], "--slots: a lock has one holder; "),
        (&["-x"], "-x: a lock is always exclusive: leave the option out"),
    ] {
        stage.sandbox.withlock().args(arguments).lock().args(["--", "true"]).run().exited(64).one_line(&[hint]);
    }
    stage.sandbox.withlock().args(["acquire", "-s"]).lock().run().exited(64).one_line(&["flock -s"]);
    assert_eq!(stage.sandbox.names(), ["bin"]);
}
