//! What a number costs in a directory that has handed out a hundred thousand.

use crate::harness::{Sandbox, calls};
use crate::reserve_numbers::numbers;

const MARKERS: u64 = 100_000;

/// A directory with markers from 1 on, and the floor at the last.
fn full(sandbox: &Sandbox) -> std::path::PathBuf {
    let dir = numbers(sandbox);
    for number in 1..=MARKERS {
        std::fs::File::create_new(dir.join(format!("claim-{number}"))).expect("a marker");
    }
    std::fs::write(dir.join("floor"), format!("{MARKERS}\n")).expect("a floor");
    dir
}

/// Reserves one under strace; the number, and the names of all system calls.
fn traced(sandbox: &Sandbox, options: &[&str]) -> (String, Vec<String>) {
    let log = sandbox.io_path("trace");
    let run = sandbox.shipped().arg("reserve").args(options).arg("numbers").traced(&log, &[]);
    let finished = run.run();
    finished.exited(0);
    (finished.out(), calls(&log).into_iter().map(|call| call.name).collect())
}

#[test]
fn with_a_floor_that_is_far_behind_nobody_tries_every_number() {
    let sandbox = Sandbox::in_memory();
    let dir = full(&sandbox);
    for floor in ["0", "1", "31072", "99990"] {
        std::fs::write(dir.join("floor"), format!("{floor}\n")).expect("a floor");
        std::fs::write(dir.join("lock"), "in the way\n").expect("a file");
        let (number, calls) = traced(&sandbox, &["--wait", "0"]);
        assert_eq!(number, "100001\n", "floor {floor}");
        assert!(calls.len() < 200, "{} calls: {calls:?}", calls.len());
        std::fs::remove_file(dir.join("claim-100001")).expect("removed");
    }
    // Up to the very last number there is.
    for number in u64::MAX - 99..u64::MAX {
        std::fs::File::create_new(dir.join(format!("claim-{number}"))).expect("a marker");
    }
    std::fs::write(dir.join("floor"), format!("{}\n", u64::MAX - 100)).expect("a floor");
    assert_eq!(traced(&sandbox, &["--wait", "0"]).0, format!("{}\n", u64::MAX));
    sandbox.withlock().args(["reserve", "--wait", "0", "numbers"]).run().exited(73).one_line(&["no number is left"]);
}

#[test]
fn with_a_good_floor_nobody_reads_the_directory() {
    let sandbox = Sandbox::in_memory();
    let dir = full(&sandbox);
    let (number, calls) = traced(&sandbox, &[]);
    assert_eq!(number, "100001\n");
    assert!(!calls.iter().any(|name| name.starts_with("getdents")), "{calls:?}");
    assert!(calls.len() < 120, "{} calls: {calls:?}", calls.len());
    // Nor does who goes without the lock.
    std::fs::write(dir.join("lock"), "in the way\n").expect("a file");
    let (number, calls) = traced(&sandbox, &["--wait", "0"]);
    assert_eq!(number, "100002\n");
    assert!(!calls.iter().any(|name| name.starts_with("getdents")), "{calls:?}");
    std::fs::remove_file(dir.join("lock")).expect("removed");
    // The same look finds a directory being read where there is no floor: it would be seen above.
    std::fs::remove_file(dir.join("floor")).expect("removed");
    let (number, calls) = traced(&sandbox, &[]);
    assert_eq!(number, "100003\n");
    assert!(calls.iter().filter(|name| name.starts_with("getdents")).count() > 10, "{calls:?}");
}
