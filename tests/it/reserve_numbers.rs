//! `withlock reserve`: one number after the other, from the first to the last, whatever is in its way.

use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::time::Duration;

use crate::harness::{Run, Sandbox, age, inode, plant, planted};

/// The last number there is.
const LAST: &str = "18446744073709551615";

/// An empty directory of numbers.
pub(crate) fn numbers(sandbox: &Sandbox) -> PathBuf {
    let dir = sandbox.path("numbers");
    std::fs::create_dir(&dir).expect("a directory");
    dir
}

fn reserve(sandbox: &Sandbox) -> Run<'_> {
    sandbox.withlock().arg("reserve")
}

/// Reserves one and expects nothing but the number.
#[track_caller]
fn next(sandbox: &Sandbox) -> String {
    let finished = reserve(sandbox).arg("numbers").run();
    finished.exited(0).silent();
    let out = finished.out();
    out.strip_suffix('\n').unwrap_or_else(|| panic!("a line: {out:?}")).to_owned()
}

fn names_in(dir: &std::path::Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).expect("the directory of numbers");
    let mut names: Vec<String> =
        entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

fn write(dir: &std::path::Path, name: &str, content: &str) {
    std::fs::write(dir.join(name), content).expect("a file");
}

#[test]
fn numbers_count_up_from_one_and_leave_a_marker_each_and_the_floor() {
    let sandbox = Sandbox::new();
    let dir = numbers(&sandbox);
    assert_eq!([next(&sandbox), next(&sandbox), next(&sandbox)], ["1", "2", "3"]);
    assert_eq!(names_in(&dir), ["claim-1", "claim-2", "claim-3", "floor"]);
    assert_eq!(std::fs::read_to_string(dir.join("floor")).expect("a floor"), "3\n");
}

#[test]
fn a_floor_that_is_missing_or_broken_is_made_up_for_by_the_markers() {
    let sandbox = Sandbox::new();
    let dir = numbers(&sandbox);
    let mut expected = 7;
    write(&dir, "claim-7", "");
    let broken = ["", "\n", "12", "007\n", "-1\n", "+1\n", "1 \n", "18446744073709551616\n", "9\n9\n", "\0\0\0"];
    for content in broken {
        write(&dir, "floor", content);
        expected += 1;
        assert_eq!(next(&sandbox), expected.to_string(), "{content:?}");
        assert_eq!(std::fs::read_to_string(dir.join("floor")).expect("a floor"), format!("{expected}\n"));
    }
    std::fs::remove_file(dir.join("floor")).expect("removed");
    assert_eq!(next(&sandbox), (expected + 1).to_string());
    std::fs::remove_file(dir.join("floor")).expect("removed");
    symlink("/etc/hostname", dir.join("floor")).expect("a link");
    assert_eq!(next(&sandbox), (expected + 2).to_string());
    assert!(!dir.join("floor").is_symlink(), "replaced, not followed");
    std::fs::remove_file(dir.join("floor")).expect("removed");
    std::fs::create_dir(dir.join("floor")).expect("a directory");
    assert_eq!(next(&sandbox), (expected + 3).to_string(), "a floor that cannot be written stops nobody");
}

#[test]
fn a_floor_above_the_markers_is_kept_to_and_one_below_is_walked_up_from() {
    let sandbox = Sandbox::new();
    let dir = numbers(&sandbox);
    write(&dir, "floor", "100\n");
    write(&dir, "claim-3", "");
    assert_eq!(next(&sandbox), "101", "numbers below a floor are never handed out, marker or not");
    for taken in ["claim-102", "claim-103", "claim-104"] {
        write(&dir, taken, "");
    }
    assert_eq!(next(&sandbox), "105");
    assert_eq!(std::fs::read_to_string(dir.join("floor")).expect("a floor"), "105\n");
}

#[test]
fn only_canonical_names_are_numbers_and_whatever_has_one_is_taken() {
    let sandbox = Sandbox::new();
    let dir = numbers(&sandbox);
    for name in ["claim-007", "claim-+9", "claim-", "claim-9x", "xclaim-9", "claim-18446744073709551616", "claim--9"] {
        write(&dir, name, "");
    }
    assert_eq!(next(&sandbox), "1");
    std::fs::create_dir(dir.join("claim-2")).expect("a directory");
    symlink("nowhere", dir.join("claim-3")).expect("a link");
    symlink("/etc/hostname", dir.join("claim-4")).expect("a link");
    assert_eq!(next(&sandbox), "5");
    assert!(!dir.join("nowhere").exists(), "no link was followed");
}

#[test]
fn every_number_up_to_the_last_is_handed_out_and_then_none() {
    let sandbox = Sandbox::new();
    let dir = numbers(&sandbox);
    let first = reserve(&sandbox).args(["--start", "18446744073709551614", "numbers"]).run();
    first.exited(0).silent();
    assert_eq!(first.out(), "18446744073709551614\n");
    assert_eq!(next(&sandbox), LAST);
    for floor in [true, false] {
        let none = reserve(&sandbox).arg("numbers").run();
        none.exited(73);
        assert_eq!(none.err(), format!("withlock: numbers: no number is left, {LAST} was reached\n"), "floor: {floor}");
        assert_eq!(none.out(), "");
        let _ = std::fs::remove_file(dir.join("floor"));
    }
    assert_eq!(names_in(&dir), ["claim-18446744073709551614", "claim-18446744073709551615"]);
}

#[test]
fn a_first_number_can_be_named_only_while_there_is_none() {
    let sandbox = Sandbox::new();
    let dir = numbers(&sandbox);
    for wrong in ["", "-1", "+1", "01", "1.0", "x", "18446744073709551616"] {
        let finished = reserve(&sandbox).args(["--start", wrong, "numbers"]).run();
        finished.exited(64).one_line(&["--start"]);
    }
    assert_eq!(names_in(&dir), [""; 0], "nothing was created");
    let refused = "withlock: numbers: it has numbers already, --start is for an empty directory\n";
    for present in ["claim-5", "floor"] {
        write(&dir, present, "5\n");
        let finished = reserve(&sandbox).args(["--start", "1000", "numbers"]).run();
        finished.exited(64);
        assert_eq!((finished.err(), finished.out()), (refused.to_owned(), String::new()), "{present}");
        assert_eq!(names_in(&dir), [present]);
        std::fs::remove_file(dir.join(present)).expect("removed");
    }
    let zero = reserve(&sandbox).args(["--start", "0", "numbers"]).run();
    zero.exited(0).silent();
    assert_eq!(zero.out(), "0\n");
    assert_eq!(next(&sandbox), "1");
}

#[test]
fn a_number_that_could_not_be_printed_is_an_error_and_never_handed_out_again() {
    let sandbox = Sandbox::new();
    let dir = numbers(&sandbox);
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").expect("/dev/full");
    let finished = reserve(&sandbox).arg("numbers").stdout(full).run();
    finished.exited(74);
    let line = "withlock: numbers: number 1 is reserved but could not be printed: No space left on device\n";
    assert_eq!(finished.err(), line);
    assert_eq!(next(&sandbox), "2");
    // A reader that has gone.
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let finished = reserve(&sandbox).arg("numbers").stdout(writer).run();
    finished.exited(74);
    assert!(finished.err().ends_with("number 3 is reserved but could not be printed: Broken pipe\n"), "{finished}");
    assert_eq!(next(&sandbox), "4");
    // No standard output at all: found before a number is used up.
    let finished = sandbox.sh("\"$WL\" reserve numbers >&-").run();
    finished.exited(74).one_line(&["no number was reserved", "standard output"]);
    assert_eq!(next(&sandbox), "5");
    assert_eq!(names_in(&dir).len(), 6);
}

#[test]
fn a_reader_that_does_not_read_is_not_waited_for_without_an_end() {
    let sandbox = Sandbox::new();
    numbers(&sandbox);
    let fifo = sandbox.fifo();
    // A pipe filled to the last byte, with a reader that sleeps.
    let text = format!("exec 3>{0}; head -c 65536 /dev/zero >&3; exec \"$WL\" reserve numbers >&3", fifo.shown());
    let finished = sandbox.sh(text).run();
    finished.exited(74).one_line(&["number 1 is reserved but could not be printed", "timed out"]);
}

#[test]
fn with_the_lock_held_by_another_it_goes_on_without_after_its_patience_and_leaves_the_floor_alone() {
    let sandbox = Sandbox::new();
    let dir = numbers(&sandbox);
    assert_eq!(next(&sandbox), "1");
    let floor_before = inode(&dir.join("floor"));
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().arg("numbers/lock").sh(gate.script()).start();
    gate.wait_inside();
    let at_once = reserve(&sandbox).args(["--wait", "0", "numbers"]).run();
    at_once.exited(0).one_line(&["numbers/lock: reserved without the lock, held by pid", "next: withlock inspect"]);
    assert_eq!(at_once.out(), "2\n");
    let default = reserve(&sandbox).arg("numbers").run();
    default.exited(0).one_line(&["reserved without the lock"]);
    assert_eq!(default.out(), "3\n");
    assert!(default.took >= Duration::from_millis(1_990), "it waits two seconds: {:?}", default.took);
    assert_eq!(std::fs::read_to_string(dir.join("floor")).expect("a floor"), "1\n");
    assert_eq!(inode(&dir.join("floor")), floor_before, "nobody but the locked path writes the floor");
    gate.open();
    holder.wait().exited(0);
    assert_eq!(next(&sandbox), "4");
    assert_eq!(std::fs::read_to_string(dir.join("floor")).expect("a floor"), "4\n");
    assert_eq!(names_in(&dir), ["claim-1", "claim-2", "claim-3", "claim-4", "floor"]);
}

#[test]
fn below_its_own_lock_it_does_not_wait_at_all() {
    let sandbox = Sandbox::new();
    numbers(&sandbox);
    let finished = sandbox.withlock().arg("numbers/lock").sh("\"$WL\" reserve --wait 30s numbers").run();
    finished.exited(0).one_line(&["reserved without the lock"]);
    assert_eq!(finished.out(), "1\n");
    assert!(finished.took < Duration::from_secs(10), "{:?}", finished.took);
}

#[test]
fn a_caller_that_died_with_the_lock_is_waited_for_no_longer_than_a_second_or_so() {
    let sandbox = Sandbox::new();
    let dir = numbers(&sandbox);
    plant(&dir.join("lock"), &planted(1_000), 0);
    assert_eq!(next(&sandbox), "1", "with the lock, since the floor is written and nothing was said");
    assert!(dir.join("floor").exists());
}

#[test]
fn what_stands_at_the_locks_place_stops_nobody() {
    let sandbox = Sandbox::new();
    let dir = numbers(&sandbox);
    write(&dir, "lock", "somebody's notes\n");
    let finished = reserve(&sandbox).arg("numbers").run();
    finished.exited(0).one_line(&["numbers/lock: cannot be locked: not a withlock lock", "reserved without the lock"]);
    assert_eq!(finished.out(), "1\n");
    assert_eq!(std::fs::read_to_string(dir.join("lock")).expect("untouched"), "somebody's notes\n");
}

#[test]
fn the_crumbs_of_a_caller_that_died_while_it_wrote_the_floor_are_no_hindrance() {
    let sandbox = Sandbox::new();
    let dir = numbers(&sandbox);
    write(&dir, "floor.new", "12345");
    age(&dir.join("floor.new"), 1_000_000);
    assert_eq!([next(&sandbox), next(&sandbox)], ["1", "2"]);
    assert_eq!(names_in(&dir), ["claim-1", "claim-2", "floor"]);
}

#[test]
fn standing_errors_come_at_once_name_the_directory_and_use_up_no_number() {
    let sandbox = Sandbox::new();
    let dir = numbers(&sandbox);
    write(&sandbox.work(), "file", "");
    for (given, part) in
        [("", "empty"), ("missing", "no such directory: missing"), ("file", "Not a directory"), ("file/x", "file/x")]
    {
        let finished = reserve(&sandbox).args(["--wait", "30s", given]).run();
        finished.exited(73).one_line(&[part]);
        assert_eq!(finished.out(), "", "{given}");
    }
    sandbox.chmod(&dir, 0o555);
    let binary = sandbox.public_binary();
    let finished = sandbox.program(&binary).args(["reserve", "--wait", "30s", "numbers"]).run_by_nobody().run();
    finished.exited(77).one_line(&["numbers", "belongs to root", "0555", "we are uid 65534"]);
    assert!(finished.took < Duration::from_secs(10));
    // A floor that others keep from us is no reason to go on from another point.
    sandbox.chmod(&dir, 0o777);
    write(&dir, "floor", "50\n");
    sandbox.chmod(dir.join("floor"), 0o600);
    let finished = sandbox.program(&binary).args(["reserve", "numbers"]).run_by_nobody().run();
    finished.exited(77).one_line(&["read the floor"]);
    assert_eq!(names_in(&dir), ["floor"]);
    assert_eq!(next(&sandbox), "51");
}
