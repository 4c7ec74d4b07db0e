//! One fault at one system call of one role, in a sandbox of its own, and all that must be true afterwards.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::harness::{
    Call, Finished, Gate, Run, Running, Sandbox, Snapshot, age, asleep_in, blank_ages_ms, calls, eventually, mtime,
    process, record, slack, slots, tree,
};

use super::fault::Fault;
use super::role::{INSIDE, INSIDE_FOR_LONG, Kind, Role, TTL_MS, plant_neighbours};

/// One ttl and a second: whoever waits for the dead gets in by then.
const PATIENCE: Duration = Duration::from_millis(TTL_MS + 1_000);
/// The lease of a lock without a record.
const BLANK_TTL: Duration = Duration::from_secs(60);
/// The claim of a dead ender keeps others out for so long where nobody sees anybody's guard.
const RECLAIM_AGE: Duration = Duration::from_millis(TTL_MS + 5_000);
/// How long a stop lasts: longer than a lease.
const STOP: Duration = Duration::from_millis(TTL_MS + 300);

/// Under which circumstances all runs of a trial take place.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Circumstances {
    /// Steps of the protocol that the test build leaves out, for negative controls.
    pub(super) leave_out: Option<&'static str>,
    /// The file system has no locks.
    pub(super) no_guards: bool,
}

/// A role at work in a sandbox.
struct Scene<'r> {
    sandbox: Sandbox,
    role: &'r Role,
    circumstances: Circumstances,
    neighbours: BTreeMap<PathBuf, Snapshot>,
    /// All that was there when it came.
    before: BTreeMap<PathBuf, Snapshot>,
}

/// What a run without faults does.
pub(super) struct Clean {
    pub(super) calls: Vec<Call>,
    /// How many lines it says on standard error.
    lines: usize,
}

/// What a trial came to.
pub(super) struct Came {
    /// Whether the fault happened at all.
    pub(super) reached: bool,
    /// What should not be.
    pub(super) violations: Vec<String>,
}

impl<'r> Scene<'r> {
    fn new(role: &'r Role, circumstances: Circumstances, in_memory: bool) -> Self {
        let sandbox = if in_memory { Sandbox::in_memory() } else { Sandbox::new() };
        plant_neighbours(&sandbox);
        let neighbours = tree(&sandbox.work());
        std::fs::create_dir(sandbox.path("witness")).expect("a directory");
        std::fs::write(sandbox.path("witness/counter"), "0\n").expect("a counter");
        (role.prepare)(&sandbox);
        let before = tree(&sandbox.work());
        Scene { sandbox, role, circumstances, neighbours, before }
    }

    fn withlock(&self) -> Run<'_> {
        match self.circumstances.leave_out {
            Some(steps) => self.sandbox.withlock().leave_out(steps),
            None => self.sandbox.shipped(),
        }
    }

    /// Somebody else, under the same circumstances.
    fn other(&self, run: Run<'_>) -> Running {
        if self.circumstances.no_guards {
            let log = self.sandbox.io_path("strace");
            run.traced(&log, &["-e", "trace=flock", "-e", NO_GUARDS]).start()
        } else {
            run.start()
        }
    }

    fn rival(&self, inside: &str) -> Running {
        self.other(self.withlock().args(["-q", "--ttl", "1s", "-w", "30s"]).lock().sh(inside))
    }

    /// Runs the role under strace with these options, up to where `until` says so at the latest if it is
    /// to be stopped; else to its end.
    fn play(&self, options: &[&str], log: &std::path::Path) -> (Running, Option<(Running, Gate)>) {
        let mut holder = None;
        if self.role.waits {
            let mut gate = self.sandbox.gate();
            let held = self.withlock().args(["--ttl", "1s"]).lock().sh(gate.script());
            let held = self.other(held);
            gate.wait_inside();
            holder = Some((held, gate));
        }
        let run = (self.role.arguments)(self.withlock());
        (run.traced(log, options).start(), holder)
    }
}

const NO_GUARDS: &str = "inject=flock:error=ENOLCK";

/// Waits until a waiter sleeps, or is stopped or dead already, and lets the holder that it waits for go.
fn let_go(waiter: &Running, log: &std::path::Path, holder: Option<(Running, Gate)>) -> Option<Running> {
    let (held, mut gate) = holder?;
    eventually("the waiter sleeps", || {
        if has_ended(waiter) || is_stopped(log) { Ok(()) } else { asleep_in(waiter.pid(), SLEEPS) }
    });
    gate.open();
    Some(held)
}

/// On the guard, or by the clock.
const SLEEPS: &[i64] = &[nix::libc::SYS_flock, nix::libc::SYS_ppoll];

fn has_ended(running: &Running) -> bool {
    process(running.pid()).is_none_or(|process| process.state == 'Z')
}

fn trace(log: &std::path::Path) -> String {
    String::from_utf8_lossy(&std::fs::read(log).unwrap_or_default()).into_owned()
}

fn is_stopped(log: &std::path::Path) -> bool {
    trace(log).contains("stopped by SIGSTOP")
}

/// The system calls of a run without faults, from its first look at the directory of the lock.
pub(super) fn clean_run(role: &Role, circumstances: Circumstances) -> Clean {
    let scene = Scene::new(role, circumstances, false);
    let log = scene.sandbox.io_path("strace");
    let mut options = vec!["-e", "trace=all"];
    if circumstances.no_guards {
        options.extend(["-e", NO_GUARDS]);
    }
    let (running, holder) = scene.play(&options, &log);
    let held = let_go(&running, &log, holder);
    let finished = running.wait();
    finished.exited(0);
    drop(held.map(Running::wait));
    eventually("the trace is complete", || {
        let text = trace(&log);
        if text.contains("exit_group(") { Ok(()) } else { Err(text.len()) }
    });
    let all = calls(&log);
    let first = all.iter().position(|call| call.line.contains("O_PATH"));
    let first = first.unwrap_or_else(|| panic!("{}: the directory of the lock is opened", role.name));
    Clean { calls: all[first..].to_vec(), lines: finished.err().lines().count() }
}

/// Lets `fault` happen at `call` of `role`.
pub(super) fn attempt(
    role: &Role,
    clean: &Clean,
    call: &Call,
    fault: Fault,
    circumstances: Circumstances,
    in_memory: bool,
) -> Came {
    let scene = Scene::new(role, circumstances, in_memory);
    let log = scene.sandbox.io_path("strace");
    let (injection, mut traced) = (fault.injection(call), format!("trace={}", call.name));
    if circumstances.no_guards {
        traced.push_str(",flock");
    }
    let mut options = vec!["-e", &traced, "-e", &injection];
    if circumstances.no_guards {
        options.extend(["-e", NO_GUARDS]);
    }
    if fault == Fault::Stop {
        scene.leave_a_second();
    }
    let (running, holder) = scene.play(&options, &log);
    let mut wrong = Wrong::default();
    let held = let_go(&running, &log, holder);
    let (finished, reached) = match fault {
        Fault::Stop => scene.stopped(running, &log, &mut wrong),
        Fault::Kill => {
            let finished = running.wait();
            let died = finished.signal() == Some(Signal::SIGKILL as i32);
            (finished, died)
        }
        Fault::Error(_) => {
            let finished = running.wait();
            let reached = trace(&log).contains("(INJECTED)");
            (finished, reached)
        }
    };
    if let Fault::Error(_) = fault
        && reached
    {
        scene.judge_the_end(&finished, clean, call, fault, &mut wrong);
    } else if let Fault::Kill = fault {
        wrong.unless(finished.stderr.is_empty() || clean.lines > 0, || "something was said".into());
    }
    drop(held.map(Running::wait));
    let has_touched = role.kind == Kind::Looker && fault != Fault::Stop && tree(&scene.sandbox.work()) != scene.before;
    wrong.unless(!has_touched, || "what should only be looked at was changed".into());
    scene.judge_what_comes_next(&finished, &mut wrong);
    scene.judge_what_is_left(&finished, call, fault, &mut wrong);
    if !wrong.0.is_empty() {
        wrong.say(format!("it ended so: {finished}"));
    }
    Came { reached, violations: wrong.0 }
}

/// What should not be, in words.
#[derive(Default)]
struct Wrong(Vec<String>);

impl Wrong {
    fn say(&mut self, what: impl Into<String>) {
        self.0.push(what.into());
    }

    fn unless(&mut self, right: bool, what: impl FnOnce() -> String) {
        if !right {
            self.say(what());
        }
    }
}

impl Scene<'_> {
    /// The role is stopped for longer than its lease, and two rivals come meanwhile.
    fn stopped(&self, running: Running, log: &std::path::Path, wrong: &mut Wrong) -> (Finished, bool) {
        let stopped = eventually("it is stopped, or has ended", || match (is_stopped(log), has_ended(&running)) {
            (true, _) => Ok(true),
            (false, true) => Ok(false),
            other => Err(other),
        });
        // One of them is inside long enough to be still there when the stop is over.
        let rivals = [INSIDE_FOR_LONG, INSIDE].map(|inside| self.rival(inside));
        if stopped {
            let begun = Instant::now();
            // The fault itself takes that long.
            std::thread::sleep(STOP.saturating_sub(begun.elapsed()));
            let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(running.pid()), Signal::SIGCONT);
        }
        for rival in rivals.map(Running::wait) {
            // Nobody is ended, nobody is turned away.
            wrong.unless(rival.code() == Some(0) || self.circumstances.leave_out.is_some(), || {
                format!("a rival: {rival}")
            });
        }
        let finished = running.wait();
        let right = finished.code().is_some_and(|code| self.role.when_overtaken.contains(&code));
        wrong.unless(right || self.circumstances.leave_out.is_some(), || format!("stopped: {finished}"));
        (finished, stopped)
    }

    /// After an error: the right exit code, and a line that names the path.
    fn judge_the_end(&self, finished: &Finished, clean: &Clean, call: &Call, fault: Fault, wrong: &mut Wrong) {
        let err = finished.err();
        wrong.unless(err.lines().all(|line| line.starts_with("withlock: ")), || "a line that is not ours".into());
        let Some(code) = finished.code() else { return wrong.say("ended by a signal") };
        // A renewal that failed is spoken of, and tried again.
        if fault.is_harmless(call) && !(fault == Fault::Error("ESTALE") && self.role.name.starts_with("renewer")) {
            wrong.unless(code == 0, || "it was not survived".into());
            wrong.unless(err.lines().count() == clean.lines, || "something was said".into());
            return;
        }
        let witness = std::fs::read_to_string(self.sandbox.path("witness/log")).unwrap_or_default();
        if code == 0 {
            let has_run = self.role.kind != Kind::Taker || !witness.is_empty();
            return wrong.unless(has_run, || "success, and the command has not run".into());
        }
        let expected = fault.exit_code();
        // What is no file of the lock's directory is the system's; and what we may not read is not ours.
        let is_unread = code == 76 && self.role.name == "checker" && fault == Fault::Error("EACCES");
        let right = Some(code) == expected || (code == 71 && !is_about_the_lock(call)) || is_unread;
        wrong.unless(right, || format!("exit code {code}, not {expected:?}"));
        wrong.unless((1..=clean.lines + 1).contains(&err.lines().count()), || "not one line more".into());
        let names: &[&str] =
            if is_an_answer(call) { &["a.lock", "nums", "standard output"] } else { &["a.lock", "nums"] };
        let is_named = names.iter().any(|name| err.contains(name));
        wrong.unless(is_named || !is_about_the_lock(call), || "the path is not named".into());
        let ours = record(&self.sandbox.lock()).is_some_and(|record| record.command != "dead-job");
        let takes = matches!(self.role.kind, Kind::Taker | Kind::Acquirer);
        // Others hold it in the role of the waiter only.
        wrong.unless(!takes || self.role.waits || !ours, || "failed, and the lock is still there".into());
    }

    /// Of a lease that is longer than that, here a blank lock's or the default.
    fn leave_a_second(&self) {
        let lock = self.sandbox.lock();
        match record(&lock) {
            Some(left) if left.ttl_ms > TTL_MS => age(&lock, left.ttl_ms - TTL_MS),
            None if lock.exists() && mtime(&lock).elapsed().is_ok_and(|age| age < BLANK_TTL - PATIENCE) => {
                age(&lock, blank_ages_ms().0 + 9_000);
            }
            _ => {}
        }
    }

    /// Whoever comes next gets in, in time.
    fn judge_what_comes_next(&self, finished: &Finished, wrong: &mut Wrong) {
        self.leave_a_second();
        let begun = Instant::now();
        let next = self.rival(INSIDE).wait();
        let took = next.ended - begun;
        wrong.unless(next.code() == Some(0), || format!("the next: {next}"));
        let patience = if self.circumstances.no_guards { RECLAIM_AGE + PATIENCE } else { PATIENCE };
        wrong.unless(took < patience + slack(&self.sandbox, took, patience), || format!("the next waited {took:?}"));
        if self.role.kind == Kind::Reserver {
            self.judge_numbers(finished, wrong);
        }
        self.judge_the_witness(wrong);
    }

    /// Nobody was inside with anybody else: no update of the counter is lost, and whoever came went before
    /// the next came.
    fn judge_the_witness(&self, wrong: &mut Wrong) {
        // A command may outlive its killed wrapper, and nobody outlives a trial.
        let read = |name: &str| std::fs::read_to_string(self.sandbox.path("witness").join(name)).unwrap_or_default();
        self.sandbox.wait_until_nothing_runs();
        let log = read("log");
        let lines: Vec<&str> = log.lines().collect();
        let alternates = lines.chunks(2).all(|pair| pair == ["in", "out"]);
        wrong.unless(alternates, || format!("two were inside: {lines:?}"));
        let counted = read("counter").trim().parse().unwrap_or(0);
        wrong.unless(counted == lines.len() / 2, || format!("{counted} counted, of {}", lines.len() / 2));
    }

    fn judge_numbers(&self, finished: &Finished, wrong: &mut Wrong) {
        let nums = self.sandbox.path("nums");
        let marker = |name: &str| name.strip_prefix("claim-").and_then(|number| number.parse::<u64>().ok());
        let taken = |sandbox: &Sandbox| -> BTreeSet<u64> {
            let entries = std::fs::read_dir(sandbox.path("nums")).expect("the numbers").filter_map(Result::ok);
            entries.filter_map(|entry| marker(&entry.file_name().to_string_lossy())).collect()
        };
        let before = taken(&self.sandbox);
        let handed_out: Option<u64> = finished.out().trim().parse().ok();
        wrong.unless(finished.code() != Some(0) || handed_out.is_some_and(|number| before.contains(&number)), || {
            format!("a number without a marker: {handed_out:?} of {before:?}")
        });
        let begun = Instant::now();
        let next = self.withlock().args(["reserve", "nums"]).run();
        let number: Option<u64> = next.out().trim().parse().ok();
        wrong.unless(next.code() == Some(0) && number > before.last().copied(), || {
            format!("the next number after {before:?}: {next}")
        });
        let took = begun.elapsed();
        // By default it waits two seconds for the lock, and goes on without it.
        let patience = PATIENCE + Duration::from_secs(1);
        wrong.unless(took < patience + slack(&self.sandbox, took, patience), || format!("its next took {took:?}"));
        let floor = std::fs::read_to_string(nums.join("floor")).ok();
        let floor = floor.and_then(|text| text.trim().parse::<u64>().ok());
        wrong.unless(floor <= number, || format!("a floor above all numbers: {floor:?}"));
    }

    /// What others own is as it was; of ours only what is documented is left, and `reclaim` removes that.
    fn judge_what_is_left(&self, finished: &Finished, call: &Call, fault: Fault, wrong: &mut Wrong) {
        let (sandbox, lock) = (&self.sandbox, self.sandbox.lock());
        let died = finished.code().is_none();
        let own = |name: &str| ["witness", "nums", "other.lock"].contains(&name);
        let theirs = |name: &String| !own(name) && !self.neighbours.contains_key(&sandbox.path(name));
        for slot in slots(&lock).iter().filter(|slot| !self.neighbours.contains_key(&slot.path)) {
            // An end that was broken off leaves its claim; an end that failed takes it back.
            let is_its_cleaning = call.name == "unlinkat";
            wrong.unless(slot.lock.is_some() || died || is_its_cleaning || fault == Fault::Stop, || {
                format!("an unfinished slot: {}", slot.path.display())
            });
        }
        // All that is left is a quarantine, old one day, and goes then.
        for path in tree(&sandbox.work()).into_keys().filter(|path| !self.neighbours.contains_key(path)) {
            if path.strip_prefix(sandbox.work()).is_ok_and(|path| path.to_string_lossy().starts_with("a.lock")) {
                age(&path, 3_600_000);
            }
        }
        let tidied = sandbox.shipped().arg("reclaim").lock().run();
        wrong.unless(tidied.code() == Some(0), || format!("reclaim: {tidied}"));
        let left: Vec<String> = sandbox.names().into_iter().filter(theirs).collect();
        wrong.unless(left.is_empty(), || format!("left: {left:?}"));
        let now = tree(&sandbox.work());
        for (path, before) in &self.neighbours {
            wrong.unless(now.get(path) == Some(before), || format!("another's was touched: {}", path.display()));
        }
    }
}

fn is_an_answer(call: &Call) -> bool {
    call.line.starts_with("write(1,")
}

/// Whether a call is made on the lock, its directory, or what lies in it: by descriptor, or by a name.
fn is_about_the_lock(call: &Call) -> bool {
    !(call.line.contains("/proc/")
        || call.line.contains("/etc/")
        || ["read", "clone", "signalfd4"].contains(&&*call.name))
}
