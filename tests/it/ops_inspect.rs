//! `inspect`: every state, in words, in JSON and as an exit code, and what it proposes.
//!
//! Needs root, setpriv, unshare and flock(1).

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::{Duration, SystemTime};

use nix::sys::signal::Signal;
use serde_json::Value;
use withlock::record::{Guard, Record, SlotName};

use crate::cases_end::plant_slot;
use crate::cases_path::blanks;
use crate::harness::{
    Running, Sandbox, age, blank_ages_ms, eventually, inode, plant, plant_bytes, planted, process, send, set_mtime,
    tree,
};

const HOUR_MS: u64 = 3_600_000;

/// What `inspect --json` says of one lock.
#[track_caller]
pub(crate) fn inspected(sandbox: &Sandbox, path: &Path) -> Value {
    let finished = sandbox.withlock().args(["inspect", "--json"]).arg(path).run();
    finished.exited(0).silent();
    let document: Value = serde_json::from_slice(&finished.stdout).expect("a document");
    assert_eq!((&document["withlock_report"], &document["kind"]), (&Value::from(1), &Value::from("inspect")));
    assert_eq!(document["locks"].as_array().map(Vec::len), Some(1), "{document}");
    document["locks"][0].clone()
}

/// The text about one lock, which is not a terminal's.
#[track_caller]
pub(crate) fn text(sandbox: &Sandbox, path: &Path) -> String {
    let finished = sandbox.withlock().arg("inspect").arg(path).run();
    finished.exited(0).silent();
    assert!(!finished.stdout.contains(&0x1b), "no escape codes but on a terminal: {}", finished.out());
    finished.out()
}

/// In all three ways it is the same state.
#[track_caller]
fn is(sandbox: &Sandbox, path: &Path, state: &str, headline: &str, code: u8) -> Value {
    let found = inspected(sandbox, path);
    assert_eq!(found["state"], state, "{found}");
    let text = text(sandbox, path);
    let first = text.lines().next().unwrap_or_default();
    assert!(first.contains(&format!(": {headline}")), "{headline:?} is not in {first:?}");
    sandbox.withlock().args(["inspect", "--quiet"]).arg(path).run().exited(code).silent().says(&[]);
    found
}

/// A holder that was stopped and whose lease has run out; its command sleeps in the gate.
pub(crate) fn stopped_holder(sandbox: &Sandbox) -> Running {
    let holder = sandbox.withlock().args(["--ttl", "1s"]).lock().args(["--", "sleep", "1000"]).start();
    eventually("the command runs", || {
        let names: Vec<String> = crate::harness::children(holder.pid()).into_iter().map(|child| child.name).collect();
        if names == ["sleep"] { Ok(()) } else { Err(names) }
    });
    holder.send(Signal::SIGSTOP);
    eventually("it is stopped", || {
        let state = process(holder.pid()).map(|process| process.state);
        if state == Some('T') { Ok(()) } else { Err(state) }
    });
    // No renewal is to come any more: an old time stamp stays.
    age(&sandbox.lock(), 60_000);
    holder
}

#[test]
fn a_free_path_is_free_and_so_is_one_in_an_empty_directory() {
    let sandbox = Sandbox::new();
    is(&sandbox, &sandbox.lock(), "free", "free", 0);
    let finished = sandbox.withlock().args(["inspect", "."]).run();
    finished.exited(0).silent();
    assert_eq!(finished.out(), "no lock\n");
    sandbox.withlock().args(["inspect", "-q", "."]).run().exited(0).silent();
}

#[test]
fn a_held_lock_shows_its_holder_and_the_processes_that_have_its_guard() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let run = sandbox.withlock().args(["--ttl", "1h", "--label", "nightly"]).lock().sh(gate.script());
    let holder = run.start();
    let command = gate.wait_inside();
    // On a busy machine the wrapper may be about to go to sleep still.
    let found = eventually("its processes are asleep", || {
        let found = is(&sandbox, &sandbox.lock(), "held", "held, expires in ", 75);
        let guards = found["guard"]["processes"].as_array().expect("processes");
        if guards.iter().all(|process| process["state"] == "S") { Ok(found) } else { Err(found) }
    });
    let record = crate::harness::record(&sandbox.lock()).expect("a record");
    assert_eq!(found["holder"]["nonce"], record.nonce.as_str());
    assert_eq!(found["holder"]["pid"], holder.pid());
    assert_eq!((&found["holder"]["alive"], &found["holder"]["user"]), (&"runs-here".into(), &"root".into()));
    assert_eq!((&found["holder"]["command"], &found["holder"]["label"]), (&"sh".into(), &"nightly".into()));
    assert_eq!((&found["stale"], &found["ttl_ms"]), (&false.into(), &HOUR_MS.into()));
    assert_eq!(found["next"], Value::from(Vec::<String>::new()), "there is nothing to do");
    assert_eq!(found["guard"]["state"], "held");
    let guards = found["guard"]["processes"].as_array().expect("processes");
    let pids: Vec<i64> = guards.iter().filter_map(|process| process["pid"].as_i64()).collect();
    assert_eq!(pids.len(), 2, "{guards:?}");
    assert!(pids.contains(&i64::from(holder.pid())) && pids.contains(&i64::from(command)), "{guards:?}");
    for process in guards {
        assert_eq!((&process["state"], &process["user"]), (&"S".into(), &"root".into()), "{process}");
        let since = process["running_since_ms"].as_i64().expect("a time");
        assert!((found["held_since_ms"].as_i64().expect("a time") - since).abs() < 60_000, "{process}");
        assert!(process["cpu_ms"].as_u64().is_some_and(|ms| ms < 60_000), "{process}");
    }
    let text = text(&sandbox, &sandbox.lock());
    for part in ["holder  ", "runs here, S (sleeping)", "root (0)", "nightly", "held since", "last renewed", "ttl 1h"] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    gate.open();
    holder.wait().exited(0);
}

#[test]
fn a_stale_lock_that_nobody_vouches_for_is_stale_and_the_line_to_type_breaks_it() {
    let sandbox = Sandbox::new();
    let dead = planted(1_000);
    plant(&sandbox.lock(), &dead, 601_000);
    let found = is(&sandbox, &sandbox.lock(), "stale", "stale, overdue by 10m", 79);
    assert_eq!((&found["stale"], &found["guard"]["state"]), (&true.into(), &"free".into()));
    assert!(found["overdue_ms"].as_u64().is_some_and(|ms| (600_000..700_000).contains(&ms)), "{found}");
    assert_eq!(found["holder"]["alive"], "not-here");
    let next = found["next"][0].as_str().expect("a next step").to_owned();
    assert_eq!(next, format!("withlock break --nonce {} {}", dead.nonce, sandbox.lock().display()));
    assert!(text(&sandbox, &sandbox.lock()).contains(&format!("next          {next}\n")));
    sandbox.sh(next.replacen("withlock", "\"$WL\"", 1)).run().exited(0).silent();
    assert!(!sandbox.lock().exists());
}

#[test]
fn a_stale_lock_with_a_stopped_holder_is_guarded_names_it_and_proposes_nothing() {
    let sandbox = Sandbox::new();
    let holder = stopped_holder(&sandbox);
    let found = is(&sandbox, &sandbox.lock(), "stale-but-guarded", "stale but guarded, overdue by ", 75);
    let states: Vec<(i64, String)> = found["guard"]["processes"]
        .as_array()
        .expect("processes")
        .iter()
        .map(|process| (process["pid"].as_i64().unwrap_or(0), process["state"].as_str().unwrap_or("").to_owned()))
        .collect();
    assert!(states.contains(&(i64::from(holder.pid()), "T".into())), "{states:?}");
    assert!(states.iter().any(|(pid, state)| *pid != i64::from(holder.pid()) && state == "S"), "{states:?}");
    assert_eq!(found["next"].as_array().map(Vec::len), Some(0), "{found}");
    let text = text(&sandbox, &sandbox.lock());
    assert!(text.contains("T stopped") && !text.contains("withlock break"), "{text}");
    send(holder.pid(), Signal::SIGCONT);
    send(holder.pid(), Signal::SIGTERM);
    holder.wait();
}

#[test]
fn c39_a_command_that_outlived_its_killed_wrapper_is_named() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().args(["--ttl", "1s"]).lock().sh(gate.script()).start();
    let command = gate.wait_inside();
    holder.send(Signal::SIGKILL);
    holder.wait();
    age(&sandbox.lock(), 60_000);
    let found = is(&sandbox, &sandbox.lock(), "stale-but-guarded", "stale but guarded", 75);
    assert_eq!(found["holder"]["alive"], "not-here");
    assert_eq!(found["guard"]["processes"][0]["pid"], command);
    assert_eq!(found["guard"]["processes"].as_array().map(Vec::len), Some(1));
    gate.open();
    sandbox.wait_until_nothing_runs();
    is(&sandbox, &sandbox.lock(), "stale", "stale", 79);
}

#[test]
fn who_has_the_guard_is_unknown_from_another_pid_namespace_and_hidden_from_another_user() {
    let sandbox = Sandbox::new();
    let holder = stopped_holder(&sandbox);
    let inside = sandbox.withlock().args(["inspect", "--json"]).lock();
    let inside = inside.through(["unshare", "--pid", "--fork", "--mount-proc"]).run();
    inside.exited(0).silent();
    let document: Value = serde_json::from_slice(&inside.stdout).expect("a document");
    let lock = &document["locks"][0];
    assert_eq!((&lock["state"], &lock["guard"]["state"]), (&"stale".into(), &"unknown".into()), "{lock}");
    let words = sandbox.withlock().arg("inspect").lock().through(["unshare", "--pid", "--fork", "--mount-proc"]).run();
    assert!(words.out().contains("guard unknown"), "{}", words.out());

    let nobody = sandbox.program(sandbox.public_binary()).args(["inspect", "--json"]).lock().run_by_nobody().run();
    nobody.exited(0).silent();
    let document: Value = serde_json::from_slice(&nobody.stdout).expect("a document");
    let guard = &document["locks"][0]["guard"];
    // That it is held stands in the table that everybody may read; by whom now does not.
    assert_eq!((&guard["state"], guard["processes"].as_array().map(Vec::len)), (&"held".into(), Some(0)), "{guard}");
    assert_eq!((&guard["taken_by_pid"], &guard["perhaps_more"]), (&holder.pid().into(), &true.into()));
    send(holder.pid(), Signal::SIGKILL);
}

#[test]
fn a_lock_that_somebody_is_ending_is_contested_and_a_dead_enders_claim_is_not() {
    let sandbox = Sandbox::new();
    let dead = planted(HOUR_MS);
    plant(&sandbox.lock(), &dead, 0);
    let slot = sandbox.path(SlotName::of(&dead).file_name(OsStr::new("a.lock")));
    fs::create_dir(&slot).expect("a slot");
    let claim = r#"{"why":"break","at_ms":1,"host":"web9","pid":4711,"uid":0,"ttl_ms":3600000}"#;
    fs::write(slot.join("claim-0"), claim).expect("a claim");
    // An ender keeps the guard to the end: here it is gone.
    is(&sandbox, &sandbox.lock(), "held", "held", 75);
    let mut gate = sandbox.gate();
    let ender = sandbox.program("flock").lock().args(["-c", &gate.script()]).start();
    gate.wait_inside();
    let found = is(&sandbox, &sandbox.lock(), "contested", "contested: pid 4711 on web9 is ending it", 75);
    assert_eq!(found["contest"]["by"]["why"], "break");
    assert_eq!(found["next"].as_array().map(Vec::len), Some(0));
    assert_eq!(found["quarantine"][0]["fate"], "live");
    gate.open();
    ender.wait().exited(0);
}

#[test]
fn c03_a_blank_lock_is_held_while_young_and_stale_by_its_age_and_json_still_answers() {
    for (what, content) in blanks() {
        let sandbox = Sandbox::new();
        let (_, old_ms) = blank_ages_ms();
        plant_bytes(&sandbox.lock(), &content, 1_000);
        let young = is(&sandbox, &sandbox.lock(), "blank", "blank, held, expires in ", 75);
        assert_eq!((&young["stale"], &young["ttl_ms"]), (&false.into(), &60_000.into()), "{what}");
        assert_eq!(young["next"].as_array().map(Vec::len), Some(0), "{what}");
        age(&sandbox.lock(), old_ms);
        let old = is(&sandbox, &sandbox.lock(), "blank", "blank, stale, overdue by ", 79);
        assert_eq!(old["next"][0], format!("withlock break {}", sandbox.lock().display()), "{what}");
    }
}

#[test]
fn c11_c12_what_is_no_lock_is_foreign_and_said_to_be_what_it_is() {
    let sandbox = Sandbox::new();
    fs::write(sandbox.path("script"), "#!/bin/sh\n").expect("a file");
    fs::write(sandbox.path("target"), "").expect("a file");
    symlink("target", sandbox.path("link")).expect("a link");
    symlink("nowhere", sandbox.path("dangling")).expect("a link");
    symlink("itself", sandbox.path("itself")).expect("a link");
    symlink(".", sandbox.path("to-directory")).expect("a link");
    nix::unistd::mkfifo(&sandbox.path("fifo"), nix::sys::stat::Mode::S_IRWXU).expect("a FIFO");
    fs::write(sandbox.path("newer"), planted(1_000).encode().replacen(b":1,", b":2,")).expect("a file");
    let before = tree(&sandbox.work());
    for (name, what) in [
        ("script", "a regular file that is no lock"),
        ("link", "a symbolic link"),
        ("dangling", "a symbolic link"),
        ("itself", "a symbolic link"),
        ("to-directory", "a symbolic link"),
        ("fifo", "a FIFO"),
        ("newer", "a lock of a newer withlock"),
    ] {
        let found = is(&sandbox, &sandbox.path(name), "foreign", &format!("foreign: {what}"), 73);
        assert!(found["next"].as_array().is_some_and(Vec::is_empty), "{found}");
    }
    assert_eq!(tree(&sandbox.work()), before);
}

trait Replacen {
    fn replacen(&self, from: &[u8], to: &[u8]) -> Vec<u8>;
}

impl Replacen for Vec<u8> {
    fn replacen(&self, from: &[u8], to: &[u8]) -> Vec<u8> {
        let at = self.windows(from.len()).position(|window| window == from).expect("there");
        [&self[..at], to, &self[at + from.len()..]].concat()
    }
}

#[test]
fn c44_held_since_and_last_renewed_are_told_apart() {
    let sandbox = Sandbox::new();
    let mut hung = planted(60_000);
    (hung.ttl_ms, hung.claimed_at_ms) = (HOUR_MS, hung.claimed_at_ms - 3 * HOUR_MS - HOUR_MS / 2);
    plant(&sandbox.lock(), &hung, 600_000);
    let found = inspected(&sandbox, &sandbox.lock());
    let (since, renewed) = (found["held_since_ms"].as_u64(), found["renewed_at_ms"].as_u64());
    assert_eq!(since, Some(hung.claimed_at_ms));
    assert!(renewed.zip(since).is_some_and(|(renewed, since)| renewed - since > 2 * HOUR_MS), "{found}");
    let text = text(&sandbox, &sandbox.lock());
    assert!(text.contains("held since    3h 3") && text.contains("last renewed  1"), "{text}");
}

#[test]
fn c18_a_time_stamp_in_the_future_is_said_to_be_one_and_a_break_is_proposed() {
    let sandbox = Sandbox::new();
    plant(&sandbox.lock(), &planted(1_000), 0);
    set_mtime(&sandbox.lock(), SystemTime::now() + Duration::from_secs(365 * 86_400));
    let found = is(&sandbox, &sandbox.lock(), "held", "held, its time stamp lies 364d 23h in the future", 75);
    assert!(found["ahead_ms"].as_u64().is_some_and(|ms| ms > 364 * 86_400_000), "{found}");
    assert!(found["next"][0].as_str().is_some_and(|next| next.contains("break --nonce")), "{found}");
    // The farthest stamps that a file can carry, both ways.
    for seconds in [i64::from(i32::MIN), 0, (1 << 34) - 1] {
        let shift = Duration::from_secs(seconds.unsigned_abs());
        let epoch = SystemTime::UNIX_EPOCH;
        set_mtime(&sandbox.lock(), if seconds < 0 { epoch - shift } else { epoch + shift });
        inspected(&sandbox, &sandbox.lock());
        text(&sandbox, &sandbox.lock());
    }
}

#[test]
fn c01_the_pid_is_shown_with_whether_that_very_process_runs_here_and_is_never_believed() {
    let sandbox = Sandbox::new();
    let me = std::process::id();
    let stat = fs::read_to_string("/proc/self/stat").expect("stat");
    let started = stat.rsplit(") ").next().and_then(|rest| rest.split(' ').nth(19)?.parse().ok()).expect("a start");
    let written = |change: &dyn Fn(&mut Record)| {
        let mut record = planted(1_000);
        (record.pid, record.pid_started) = (me, started);
        change(&mut record);
        record
    };
    for (what, record, alive) in [
        ("this very process", written(&|_| {}), "runs-here"),
        ("its pid with another start", written(&|r| r.pid_started += 1), "not-here"),
        ("pid 1 of a container", written(&|r| (r.pid, r.pid_started) = (1, 12)), "not-here"),
        ("another boot of this host", written(&|r| r.boot_id = "another".into()), "earlier-boot"),
        ("another host", written(&|r| (r.boot_id, r.host) = ("b".into(), "web2".into())), "other-host"),
    ] {
        // Old: stale, whoever runs. Young: held, whoever does not.
        plant(&sandbox.lock(), &record, 60_000);
        let found = inspected(&sandbox, &sandbox.lock());
        assert_eq!((&found["state"], &found["holder"]["alive"]), (&"stale".into(), &alive.into()), "{what}");
        plant(&sandbox.lock(), &Record { ttl_ms: HOUR_MS, ..record }, 60_000);
        let found = inspected(&sandbox, &sandbox.lock());
        assert_eq!((&found["state"], &found["holder"]["alive"]), (&"held".into(), &alive.into()), "{what}");
    }
}

#[test]
fn each_quarantine_is_told_with_its_age_its_end_and_when_it_can_be_reclaimed() {
    let sandbox = Sandbox::new();
    let young = plant_slot(&sandbox.lock(), HOUR_MS, 33_000);
    let old = plant_slot(&sandbox.lock(), 1_000, 3 * HOUR_MS);
    symlink("nowhere", sandbox.path(format!("a.lock.stale-1-{}", "ab".repeat(16)))).expect("a link");
    let found = inspected(&sandbox, &sandbox.lock());
    let of = |path: &Path| {
        let quarantine = found["quarantine"].as_array().expect("quarantine");
        quarantine.iter().find(|one| one["path"].as_str().map(Path::new) == Some(path)).expect("listed").clone()
    };
    let (young, old) = (of(&young), of(&old));
    assert_eq!((&young["fate"], &young["ended"]["why"]), (&"young".into(), &"stale".into()));
    let left = young["reclaimable_in_ms"].as_u64().expect("a time");
    // The hour and the margin, less what its planted age has used; a file's stamp may be a tick behind the clock that
    // said how old to make it, so the upper bound is only rough: it tells the age from the whole hour.
    assert!((3_400_000..3_600_000).contains(&left), "{left}");
    assert_eq!((&old["fate"], &old["owner"]["command"]), (&"reclaimable".into(), &"dead-job".into()));
    assert_eq!(found["quarantine"].as_array().map(Vec::len), Some(3));
    assert_eq!(found["next"][0], format!("withlock reclaim {}", sandbox.lock().display()));
    let text = text(&sandbox, &sandbox.lock());
    for part in ["3 ended epochs", "reclaimable in 5", "3h", "dead-job pid 4194303", "it is a symbolic link"] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
}

#[test]
fn a_directory_shows_every_lock_and_quarantine_in_it_the_worst_first_and_does_not_guess() {
    let sandbox = Sandbox::new();
    plant(&sandbox.path("held.lock"), &planted(HOUR_MS), 0);
    plant(&sandbox.path("stale.lock"), &planted(1_000), 60_000);
    plant_bytes(&sandbox.path("broken.lock"), &planted(1_000).encode()[..60], 0);
    plant_slot(&sandbox.path("gone.lock"), 1_000, HOUR_MS);
    fs::write(sandbox.path("empty"), "").expect("a file");
    fs::write(sandbox.path("other.txt"), "text").expect("a file");
    fs::create_dir(sandbox.path("sub")).expect("a directory");
    plant(&sandbox.path("sub/deeper.lock"), &planted(1_000), 60_000);
    let finished = sandbox.withlock().args(["inspect", "--json"]).arg(sandbox.work()).run();
    finished.exited(0).silent();
    let document: Value = serde_json::from_slice(&finished.stdout).expect("a document");
    let mut states: Vec<(String, String)> = document["locks"]
        .as_array()
        .expect("locks")
        .iter()
        .map(|lock| {
            let path = lock["path"].as_str().expect("a path");
            let name = path.rsplit('/').next().expect("a name");
            (name.to_owned(), lock["state"].as_str().expect("a state").to_owned())
        })
        .collect();
    states.sort();
    let expected = [("broken.lock", "blank"), ("gone.lock", "free"), ("held.lock", "held"), ("stale.lock", "stale")];
    assert_eq!(states, expected.map(|(name, state)| (name.to_owned(), state.to_owned())));
    assert_eq!(document["unclear"].as_array().map(Vec::len), Some(1));
    assert!(document["unclear"][0]["path"].as_str().is_some_and(|path| path.ends_with("/empty")));
    let text = sandbox.withlock().arg("inspect").arg(sandbox.work()).run().out();
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with("STATE") && lines[1].starts_with("stale "), "{text}");
    sandbox.withlock().args(["inspect", "-q"]).arg(sandbox.work()).run().exited(79);
}

#[test]
fn a_path_that_cannot_be_looked_at_is_an_error_and_the_others_are_still_shown() {
    let sandbox = Sandbox::new();
    plant(&sandbox.lock(), &planted(HOUR_MS), 0);
    let missing = sandbox.path("missing/b.lock");
    let finished = sandbox.withlock().args(["inspect", "--json"]).arg(&missing).lock().run();
    finished.exited(73).one_line(&["missing/b.lock", "no such directory"]);
    let document: Value = serde_json::from_slice(&finished.stdout).expect("a document");
    assert_eq!((&document["locks"][0]["state"], &document["errors"][0]["exit"]), (&"held".into(), &73.into()));
    sandbox.withlock().arg("inspect").run().exited(64).one_line(&["PATH"]);
}

#[test]
fn a_lock_without_a_guard_is_said_to_have_none() {
    let sandbox = Sandbox::new();
    let record = planted(HOUR_MS);
    assert_eq!(record.guard, Guard::None);
    plant(&sandbox.lock(), &record, 0);
    assert!(inode(&sandbox.lock()).is_some());
    let text = text(&sandbox, &sandbox.lock());
    assert!(text.contains("none: its holder has no guard") && !text.contains("unless renewed"), "{text}");
}
