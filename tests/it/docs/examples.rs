//! The examples of the manual and the README, taken from the page and run as they stand; only the
//! directories they name are the test's own.

use std::path::PathBuf;

use super::manual::section;
use super::shipped_text;
use crate::harness::{Run, Sandbox, plant, planted, record, with_record};

/// The literal blocks of a part of a manual page.
pub(super) fn literal_blocks(lines: &[&str]) -> Vec<String> {
    let mut blocks = Vec::new();
    let mut open: Option<String> = None;
    for line in lines {
        match (&mut open, *line) {
            (None, begin) if begin.starts_with(".Bd -literal") => open = Some(String::new()),
            (Some(_), ".Ed") => blocks.extend(open.take()),
            (Some(block), line) => {
                assert!(!line.starts_with('.') && !line.contains('\\'), "a macro or an escape in an example: {line}");
                block.push_str(line);
                block.push('\n');
            }
            (None, _) => {}
        }
    }
    blocks
}

/// The blocks of shell text in the README.
fn shell_blocks(text: &str) -> Vec<String> {
    let fenced = text.split("```").skip(1).step_by(2);
    fenced
        .filter_map(|block| block.strip_prefix("sh\n").or(block.strip_prefix("crontab\n")))
        .map(str::to_owned)
        .collect()
}

/// A sandbox with a `withlock` on the path, and the examples of manual and README.
pub(super) struct Stage {
    pub(super) sandbox: Sandbox,
    blocks: Vec<String>,
}

impl Stage {
    pub(super) fn new() -> Self {
        let sandbox = Sandbox::new();
        let page = shipped_text("man/withlock.1");
        let lines: Vec<&str> = page.lines().skip_while(|line| *line != ".Sh EXAMPLES").collect();
        let mut blocks = literal_blocks(&lines);
        blocks.extend(["SEVERAL LOCKS", "LOG"].iter().flat_map(|title| literal_blocks(&section(&page, title))));
        blocks.extend(shell_blocks(&shipped_text("README.md")));
        let stage = Stage { sandbox, blocks };
        std::fs::create_dir(stage.bin()).expect("a directory");
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_withlock"), stage.bin().join("withlock")).expect("a link");
        stage
    }

    pub(super) fn bin(&self) -> PathBuf {
        self.sandbox.path("bin")
    }

    /// A program that the example calls and that is not ours.
    pub(super) fn stub(&self, name: &str, text: &str) {
        let path = self.bin().join(name);
        std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).expect("a script");
        self.sandbox.chmod(path, 0o755);
    }

    /// The examples that contain `part`, in this sandbox's directories.
    #[track_caller]
    pub(super) fn examples(&self, part: &str) -> Vec<String> {
        let here = format!("{}/", self.sandbox.work().display());
        let moved = |block: &String| {
            block.replace("/tmp/", &here).replace("/run/lock/", &here).replace("/run/lock ", &format!("{here} "))
        };
        let found: Vec<String> = self.blocks.iter().filter(|block| block.contains(part)).map(moved).collect();
        assert!(!found.is_empty(), "no example has {part:?}");
        found
    }

    #[track_caller]
    pub(super) fn example(&self, part: &str) -> String {
        self.examples(part).remove(0)
    }

    pub(super) fn with_path<'s>(&self, run: Run<'s>) -> Run<'s> {
        run.env("PATH", format!("{}:/usr/bin:/bin", self.bin().display()))
    }

    /// Runs shell text as it stands.
    pub(super) fn shell(&self, text: &str) -> Run<'_> {
        self.with_path(self.sandbox.sh(text))
    }

    /// An example as a script of its own.
    pub(super) fn script(&self, name: &str, text: &str) -> PathBuf {
        let path = self.sandbox.path(name);
        std::fs::write(&path, text).expect("a script");
        self.sandbox.chmod(&path, 0o755);
        path
    }
}

#[test]
fn the_first_examples_run_their_command() {
    let stage = Stage::new();
    let first = stage.shell(&stage.example("hello.lock -- echo")).run();
    first.exited(0).silent();
    assert_eq!(first.out(), "hello\n");
    let second = stage.shell(&stage.example("-w 10s")).run();
    assert!(second.exited(0).silent().out().ends_with("\nhello\n"));
    for example in stage.examples("hello.lock") {
        let run_line = example.lines().rfind(|line| line.contains("withlock")).expect("a call").to_owned();
        stage.shell(&run_line).run().exited(0).silent();
    }
    assert_eq!(stage.sandbox.names(), ["bin"]);
}

#[test]
fn the_line_for_cron_skips_a_run_whose_predecessor_still_runs() {
    let stage = Stage::new();
    let mut gate = stage.sandbox.gate();
    stage.stub("mirror", &gate.script());
    let lines = |example: String| example.trim().strip_prefix("*/5 * * * * ").map(str::to_owned);
    let (old, new): (Vec<_>, Vec<_>) = stage
        .examples("*/5 * * * * ")
        .into_iter()
        .map(|example| lines(example).expect("a crontab line"))
        .partition(|line| line.starts_with("flock"));
    assert_eq!((old.len(), new.len()), (1, 2), "manual and README, and what it was before");
    let mut held_by = |line: &str, skipped: &dyn Fn(&Stage, &str)| {
        let first = stage.shell(line).start();
        gate.wait_inside();
        skipped(&stage, line);
        gate.open();
        first.wait().exited(0).silent();
    };
    for line in &new {
        held_by(line, &|stage, line| {
            stage.shell(line).run().exited(0).one_line(&["skipped", "mirror.lock", "held by", "pid"]);
            stage.shell(&line.replacen("withlock", "withlock -q", 1)).run().exited(0).silent();
        });
    }
    // What flock did there, and the name that it leaves behind.
    held_by(&old[0], &|stage, line| {
        stage.shell(line).run().exited(1).silent();
    });
    let left = stage.sandbox.path("mirror.lock");
    crate::harness::set_mtime(&left, std::time::SystemTime::now() - std::time::Duration::from_secs(61));
    held_by(&new[0], &|_, _| {});
}

#[test]
fn a_script_that_starts_itself_again_under_its_lock_runs_once_at_a_time() {
    let stage = Stage::new();
    let mut gate = stage.sandbox.gate();
    let text = stage.example("whole.lock").replace("echo \"nobody else is here\"", &gate.script());
    assert!(text.contains(&gate.script()));
    let script = stage.script("job", &text);
    let first = stage.with_path(stage.sandbox.program(&script)).start();
    gate.wait_inside();
    stage.with_path(stage.sandbox.program(&script)).run().exited(75).one_line(&["whole.lock", "held by"]);
    gate.open();
    first.wait().exited(0).silent();
    let alone = stage.script("alone", &stage.example("whole.lock"));
    // Under another lock it takes its own all the same.
    let nested = stage.with_path(stage.sandbox.withlock().lock().arg("--").arg(&alone)).run();
    assert_eq!(nested.exited(0).silent().out(), "nobody else is here\n");
    assert_eq!(stage.sandbox.names(), ["alone", "bin", "job"]);
}

#[test]
fn a_script_that_locks_a_part_of_itself_keeps_others_out_of_it_and_a_killed_one_lets_them_in() {
    let stage = Stage::new();
    let mut gate = stage.sandbox.gate();
    let example = stage.example("part.lock");
    let script = stage.script("job", &example.replace("echo \"nobody else is here\"", &gate.script()));
    let first = stage.with_path(stage.sandbox.program(&script)).start();
    gate.wait_inside();
    let lock = stage.sandbox.path("part.lock");
    stage.sandbox.withlock().arg("-n").arg(&lock).args(["--", "true"]).run().exited(75);
    first.send(nix::sys::signal::Signal::SIGKILL);
    first.wait();
    stage.sandbox.withlock().args(["-w", "30s"]).arg(&lock).args(["--", "true"]).run().exited(0);
    let alone = stage.with_path(stage.sandbox.program(stage.script("alone", &example))).run();
    assert_eq!(alone.exited(0).silent().out(), "nobody else is here\n");
    assert_eq!(record(&lock), None);
}

#[test]
fn a_script_that_renews_by_itself_stops_once_the_lock_is_anothers() {
    let stage = Stage::new();
    let (lock, mut gate) = (stage.sandbox.path("queue.lock"), stage.sandbox.gate());
    std::fs::write(stage.sandbox.path("jobs.txt"), "one\ntwo\n").expect("a file");
    let example = stage.example("queue.lock");
    let whole = stage.shell(&example).run();
    assert_eq!(whole.exited(0).silent().out(), "working on one\nworking on two\n");
    assert_eq!(record(&lock), None, "released");

    let work = "echo \"working on $job\"";
    let script = stage.shell(&example.replace(work, &format!("{work}; {}", gate.script()))).start();
    gate.wait_inside();
    stage.sandbox.withlock().args(["break", "--force"]).arg(&lock).run().exited(0);
    gate.open();
    let stopped = script.wait();
    assert_eq!((stopped.code(), stopped.out().as_str()), (Some(76), "working on one\n"), "{stopped}");

    // Busy: the script ends there.
    let holder = stage.sandbox.withlock().arg(&lock).sh(gate.script()).start();
    gate.wait_inside();
    let busy = stage.shell(&example.replace("-w 1m", "-n")).run();
    assert_eq!(busy.exited(75).out(), "");
    gate.open();
    holder.wait().exited(0);
}

#[test]
fn a_deploy_with_an_older_token_is_refused() {
    let stage = Stage::new();
    stage.script("put", &stage.example("WITHLOCK_FENCE:?"));
    stage.stub("build", "date");
    let writer = stage.example("tokens");
    let release = stage.sandbox.path("release");
    for _ in 0..2 {
        stage.shell(&writer).run().exited(0).silent();
    }
    let seen = std::fs::read_to_string(stage.sandbox.path("release.fence")).expect("tokens");
    let seen: Vec<u64> = seen.lines().map(|line| line.parse().expect("a number")).collect();
    assert!(matches!(seen[..], [first, second] if second > first), "{seen:?}");
    let before = std::fs::read(&release).expect("the release");
    let late = stage.shell("echo late | sh put release").env("WITHLOCK_FENCE", seen[0].to_string()).run();
    late.exited(1);
    assert_eq!(late.err(), format!("refused: token {}, seen {}\n", seen[0], seen[1]));
    assert_eq!(std::fs::read(&release).expect("the release"), before);
    // The holder itself may write more than once; without a token nobody may.
    stage.shell("echo again | sh put release").env("WITHLOCK_FENCE", seen[1].to_string()).run().exited(0).silent();
    assert_eq!(std::fs::read(&release).expect("the release"), b"again\n");
    assert_ne!(stage.shell("echo x | sh put release").run().code(), Some(0));
}

#[test]
fn jobs_get_numbers_of_their_own_with_the_lock_and_without() {
    let stage = Stage::new();
    let example = stage.example("job-$n").replace("-w 5s", "-w 100ms");
    stage.shell(&example).run().exited(0).silent();
    let mut gate = stage.sandbox.gate();
    let holder = stage.sandbox.withlock().arg(stage.sandbox.path("jobs.lock")).sh(gate.script()).start();
    gate.wait_inside();
    for _ in 0..2 {
        stage.shell(&example).run().exited(0).one_line(&["running without the lock"]);
    }
    gate.open();
    holder.wait().exited(0);
    let names = std::fs::read_dir(stage.sandbox.path("jobs")).expect("the directory");
    let names: Vec<String> =
        names.map(|entry| entry.expect("one").file_name().to_string_lossy().into_owned()).collect();
    assert_eq!(names.iter().filter(|name| name.starts_with("job-")).count(), 3, "{names:?}");
}

#[test]
fn a_stuck_lock_is_looked_at_and_ended_and_a_live_one_only_by_its_nonce_and_by_force() {
    let stage = Stage::new();
    let lock = stage.sandbox.path("mirror.lock");
    for example in stage.examples("withlock inspect") {
        let lines: Vec<&str> = example.lines().filter(|line| !line.contains("--force")).collect();
        plant(&lock, &planted(60_000), 120_000);
        let ended = stage.shell(&lines.join("\n")).run();
        ended.exited(0);
        assert!(ended.out().contains("stale"), "{ended}");
        assert_eq!(record(&lock), None, "{ended}");
    }
    let by_force = stage.example("--force");
    let by_force = by_force.lines().find(|line| line.contains("--force")).expect("a line");
    let mut gate = stage.sandbox.gate();
    let holder = stage.sandbox.withlock().arg(&lock).sh(gate.script()).start();
    gate.wait_inside();
    let other = by_force.replace("--nonce N", "--nonce 00000000000000000000000000000000");
    stage.shell(&other).run();
    let nonce = with_record(&lock).nonce;
    stage.shell(&by_force.replace("--nonce N", &format!("--nonce {nonce}"))).run().exited(0);
    holder.wait().exited(76);
}
