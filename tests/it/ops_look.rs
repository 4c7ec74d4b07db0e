//! `inspect` disturbs nothing, answers whatever happens meanwhile, and shows anything harmlessly.
//!
//! Needs root, strace, setpriv, unshare and bash.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use serde_json::Value;

use crate::cases_end::plant_slot;
use crate::cases_path::{nasty_names, on_read_only};
use crate::harness::{Run, Running, Sandbox, Terminal, calls, plant, plant_bytes, planted, tree};
use crate::ops_inspect::text;

const HOUR_MS: u64 = 3_600_000;

#[test]
fn it_takes_no_lock_writes_nothing_and_opens_nothing_for_writing() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().args(["--ttl", "1h"]).lock().sh(gate.script()).start();
    gate.wait_inside();
    plant(&sandbox.path("stale.lock"), &planted(1_000), 60_000);
    plant_bytes(&sandbox.path("blank.lock"), b"", 120_000);
    plant_slot(&sandbox.lock(), 1_000, HOUR_MS);
    let before = tree(&sandbox.work());
    let log = sandbox.io_path("strace");
    for args in
        [vec!["inspect", "."], vec!["inspect", "--json", "."], vec!["inspect", "-q", "stale.lock", "blank.lock"]]
    {
        sandbox.withlock().args(args).traced(&log, &[]).run().silent();
        for call in calls(&log) {
            let is_forbidden = [
                "flock",
                "mkdir",
                "mkdirat",
                "unlink",
                "unlinkat",
                "rename",
                "renameat",
                "renameat2",
                "utimensat",
                "rmdir",
                "ftruncate",
                "link",
                "linkat",
                "symlink",
                "fchmod",
                "chmod",
            ]
            .contains(&call.name.as_str());
            let opens_to_write = call.name.starts_with("open")
                && ["O_WRONLY", "O_RDWR", "O_CREAT", "O_TMPFILE"].iter().any(|flag| call.line.contains(flag))
                && !call.line.contains("/dev/null");
            let locks = call.name == "fcntl" && call.line.contains("SETLK");
            assert!(!is_forbidden && !opens_to_write && !locks, "{call:?}");
        }
    }
    assert_eq!(tree(&sandbox.work()), before);
    gate.open();
    holder.wait().exited(0);
}

#[test]
fn c07_it_works_on_a_read_only_file_system_and_without_permission_to_read() {
    let sandbox = Sandbox::new();
    let dir = sandbox.path("ro");
    fs::create_dir(&dir).expect("a directory");
    let lock = dir.join("a.lock");
    plant(&lock, &planted(1_000), 60_000);
    plant_slot(&lock, 1_000, HOUR_MS);
    let finished = on_read_only(sandbox.withlock().args(["inspect", "--json"]).arg(&lock), &dir).run();
    finished.exited(0).silent();
    let document: Value = serde_json::from_slice(&finished.stdout).expect("a document");
    let found = &document["locks"][0];
    assert_eq!((&found["state"], found["quarantine"].as_array().map(Vec::len)), (&"stale".into(), Some(1)));
    assert!(found["may_not_break"].as_str().is_some_and(|why| why.contains("Read-only")), "{found}");
    assert!(!found["next"].to_string().contains("break"), "it cannot be broken here: {found}");

    sandbox.chmod(&lock, 0o600);
    let finished =
        sandbox.program(sandbox.public_binary()).args(["inspect", "--json"]).arg(&lock).run_by_nobody().run();
    finished.exited(0).silent();
    let document: Value = serde_json::from_slice(&finished.stdout).expect("a document");
    let found = &document["locks"][0];
    assert_eq!((&found["state"], &found["unreadable"]), (&"held".into(), &true.into()));
    assert_eq!((&found["file"]["user"], &found["file"]["mode"]), (&"root".into(), &"0600".into()));
    assert!(found["renewed_at_ms"].is_i64() && found.get("holder").is_none(), "{found}");
    assert!(found["next"].as_array().is_some_and(|next| !next.iter().any(|n| n.to_string().contains("break"))));
}

#[test]
fn c15_c50_names_and_records_of_any_bytes_are_shown_harmlessly_and_can_be_read_back() {
    let sandbox = Sandbox::new();
    for name in nasty_names() {
        let lock = sandbox.path(&name);
        let mut evil = planted(1_000);
        evil.command = "\x1b[2J\u{202e}evil".into();
        evil.host = "a\nb".into();
        evil.label = Some("\r\x07\u{9b}31m".into());
        plant(&lock, &evil, 60_000);
        let finished = sandbox.withlock().args(["inspect", "--json"]).arg(&lock).run();
        let document: Value = serde_json::from_slice(&finished.stdout).expect("a document");
        let found = &document["locks"][0];
        let bytes = match found["path_bytes"].as_str() {
            Some(hex) => {
                (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hex")).collect()
            }
            None => found["path"].as_str().expect("a path").as_bytes().to_vec(),
        };
        assert_eq!(bytes, lock.as_os_str().as_bytes(), "byte for byte");
        assert_eq!(found["holder"]["label"], "\r\x07\u{9b}31m");

        let text = text(&sandbox, &lock);
        assert!(!text.chars().any(|c| (c.is_control() && c != '\n') || c == '\u{202e}'), "{text:?}");
        assert_eq!(text.matches("\n").count(), text.lines().count());
        // The next step, pasted into a shell, breaks exactly this lock.
        let next = found["next"][0].as_str().expect("a next step").replacen("withlock", "\"$WL\"", 1);
        sandbox.program("bash").arg("-c").arg(&next).run().exited(0).silent();
        assert!(!lock.exists(), "{next}");
        fs::read_dir(sandbox.work()).expect("list").for_each(|entry| {
            let _ = fs::remove_dir_all(entry.expect("an entry").path());
        });
    }
    assert!(!sandbox.path("ran").exists());
}

#[test]
fn c50_arguments_of_the_command_are_neither_recorded_nor_shown() {
    let sandbox = Sandbox::new();
    let mut gate = sandbox.gate();
    let body = format!("{}; : --token=s3cr3t", gate.script());
    let holder = sandbox.withlock().lock().args(["--", "/bin/sh", "-c", &body, "s3cr3t"]).start();
    gate.wait_inside();
    for args in [vec!["inspect"], vec!["inspect", "--json"]] {
        let finished = sandbox.withlock().args(args).lock().run();
        assert!(finished.out().contains("sh") && !finished.out().contains("s3cr3t"), "{finished}");
    }
    gate.open();
    holder.wait().exited(0);
}

#[test]
fn it_is_coloured_on_a_terminal_only_and_not_where_no_color_is_set() {
    let sandbox = Sandbox::new();
    plant(&sandbox.lock(), &planted(1_000), 60_000);
    let shown = |run: Run<'_>| {
        let (mut terminal, running) = Terminal::start(run.arg("inspect").lock());
        running.wait().exited(0);
        terminal.expect("nonce");
        terminal.shown()
    };
    assert!(shown(sandbox.withlock()).contains("\x1b[1;31mstale"));
    assert!(!shown(sandbox.withlock().env("NO_COLOR", "1")).contains('\x1b'));
    assert!(shown(sandbox.withlock().env("NO_COLOR", "")).contains('\x1b'), "set to nothing says nothing");
    assert!(!shown(sandbox.withlock().env("TERM", "dumb")).contains('\x1b'));
    assert!(!text(&sandbox, &sandbox.lock()).contains('\x1b'));
}

#[test]
fn watching_redraws_on_a_terminal_until_it_is_interrupted_and_is_refused_elsewhere() {
    let sandbox = Sandbox::new();
    plant(&sandbox.lock(), &planted(1_000), 60_000);
    let (mut terminal, running) = Terminal::start(sandbox.withlock().args(["inspect", "--watch"]).lock());
    terminal.expect("stale");
    fs::remove_file(sandbox.lock()).expect("rm");
    terminal.expect("free");
    plant(&sandbox.lock(), &planted(HOUR_MS), 0);
    terminal.expect("held");
    terminal.types("\x03");
    assert_eq!(running.wait().signal(), Some(2));
    sandbox.withlock().args(["inspect", "--watch"]).lock().run().exited(64).one_line(&["--watch", "terminal"]);
}

#[test]
fn output_that_nobody_takes_is_an_error_and_no_panic() {
    let sandbox = Sandbox::new();
    plant(&sandbox.lock(), &planted(1_000), 60_000);
    for args in [vec!["inspect"], vec!["inspect", "--json"], vec!["reclaim"], vec!["break", "--dry-run"]] {
        let full = fs::OpenOptions::new().write(true).open("/dev/full").expect("/dev/full");
        let finished = sandbox.withlock().args(&args).lock().stdout(full).run();
        finished.exited(74).one_line(&["standard output", "No space left on device"]);
    }
}

#[test]
fn a_standard_output_that_is_closed_is_an_error_and_not_an_empty_answer() {
    let sandbox = Sandbox::new();
    plant(&sandbox.lock(), &planted(1_000), 60_000);
    let lost = "withlock: standard output: cannot write: Bad file number\n";
    let asked = ["inspect", "inspect --json", "reclaim", "break --dry-run", "--help", "inspect --help", "--version"];
    for words in asked {
        let lock = if words.ends_with("--help") || words == "--version" { "" } else { "\"$L\"" };
        let finished = sandbox.sh(format!("\"$WL\" {words} {lock} >&-")).run();
        assert_eq!(finished.exited(74).err(), lost, "{words}");
        // Whoever wants no more than the exit code asks for it.
        sandbox.sh(format!("\"$WL\" {words} {lock} >/dev/null")).run().exited(0).silent();
    }
    sandbox.sh("\"$WL\" inspect -q b.lock >&-").run().exited(0).silent();
    assert_eq!(sandbox.names(), ["a.lock"]);
    // What was done is done, and said.
    let broken = sandbox.sh("\"$WL\" break \"$L\" >&-").run();
    let done = format!("withlock: {}: ended\n{lost}", sandbox.lock().display());
    assert_eq!(broken.exited(74).err(), done);
    assert!(!sandbox.lock().exists());
}

#[test]
fn it_is_always_a_valid_document_while_locks_come_and_go() {
    let sandbox = Sandbox::in_memory();
    let churn = "while :; do \"$WL\" -n \"$L\" -- true 2>/dev/null; sleep 0.01; done";
    let evict = "while [ ! -e stop ]; do \"$WL\" -n --ttl 1s b.lock -- true 2>/dev/null; \
                 touch -d '-1 hour' old; ln old b.lock 2>/dev/null; \"$WL\" break b.lock >/dev/null 2>&1; \
                 touch -d '-1 hour' b.lock.stale* 2>/dev/null; \"$WL\" reclaim b.lock >/dev/null 2>&1; sleep 0.01; done";
    plant(&sandbox.path("old"), &planted(1_000), 60_000);
    let _churners: Vec<Running> = [churn, evict].map(|body| sandbox.sh(body).start()).into();
    // One shell polls: a harness thread for each would be slower than the tool.
    let body = "i=0; while [ $i -lt 1000 ]; do i=$((i+1)); \"$SHIPPED\" inspect --json . || exit; \
                \"$SHIPPED\" inspect --json a.lock b.lock || exit; done";
    let poll = sandbox.sh(body).env("SHIPPED", crate::harness::shipped()).start();
    let finished = poll.wait_within(Duration::from_secs(600)).unwrap_or_else(|_| panic!("it did not end"));
    finished.exited(0).silent();
    let mut states = std::collections::BTreeMap::new();
    let mut count = 0;
    for line in finished.stdout.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
        let document: Value = serde_json::from_slice(line).expect("a document");
        assert_eq!((&document["withlock_report"], &document["errors"]), (&1.into(), &Value::Array(Vec::new())));
        for lock in document["locks"].as_array().expect("locks") {
            *states.entry(lock["state"].as_str().expect("a state").to_owned()).or_insert(0) += 1;
        }
        count += 1;
    }
    assert_eq!(count, 2_000);
    // It has seen more than one state, or there was no churn.
    assert!(states.contains_key("free") && states.contains_key("held") && states.len() >= 3, "{states:?}");
    println!("states seen: {states:?}");
    fs::write(sandbox.path("stop"), "").expect("stop");
}
