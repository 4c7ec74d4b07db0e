//! What an uncontended hold costs, and that the shipped program has nothing of the tests in it.

use crate::harness::{Sandbox, calls, shipped};

#[test]
fn an_uncontended_hold_makes_at_most_40_file_and_descriptor_calls() {
    let sandbox = Sandbox::new();
    let traced = |args: &[&str]| {
        let log = sandbox.io_path("strace");
        sandbox.shipped().args(args).traced(&log, &["-e", "trace=%file,%desc"]).run().exited(0);
        calls(&log)
    };
    let start_up = traced(&["--version"]).len();
    let hold = traced(&["a.lock", "--", "true"]);
    let names: Vec<&str> = hold.iter().map(|call| &*call.name).collect();
    println!("{} calls, {start_up} of them to start up: {names:?}", hold.len());
    assert!(hold.len() <= start_up + 40, "{} beyond {start_up}: {names:?}", hold.len() - start_up);
}

#[test]
fn the_shipped_program_has_no_trace_of_the_switches_and_ignores_them() {
    let program = std::fs::read(shipped()).expect("the program");
    for name in [b"WITHLOCK_LEAVE_OUT".as_slice(), b"release-by-slot", b"grant-check"] {
        assert!(!program.windows(name.len()).any(|window| window == name), "{}", String::from_utf8_lossy(name));
    }
    // The known-bad case: the test build has them.
    let test_build = std::fs::read(env!("CARGO_BIN_EXE_withlock")).expect("the test build");
    assert!(test_build.windows(18).any(|window| window == b"WITHLOCK_LEAVE_OUT"));
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let all = "exclusive,guard,veto,verify,claim,noreplace";
    let holder = sandbox.shipped().leave_out(all).lock().sh(gate.script()).start();
    gate.wait_inside();
    sandbox.shipped().leave_out(all).arg("-n").lock().args(["--", "true"]).run().exited(75);
    gate.open();
    holder.wait().exited(0);
}
