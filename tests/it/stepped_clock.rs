//! The real program under a wall clock that steps by an hour while it holds, waits and evicts.
//!
//! The clock of this machine cannot be set for a test. So test builds add to each reading of it what stands
//! in a file (`WITHLOCK_WALL_CLOCK`), and give what they write on a local file system that time too, as its
//! kernel would. All else is real: processes, calls, files, guards. Nothing of it is in the shipped program.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use nix::sys::signal::Signal;

use crate::harness::{
    Finished, Gate, Run, Running, Sandbox, eventually, inode, plant, planted, process, send_to_group, slots,
    with_record,
};
use crate::ops_break::stopped_at;

const HOUR: i64 = 3_600;
const STEPS: [i64; 2] = [HOUR, -HOUR];

/// What a contender exits with that finds another one inside.
const TWO_INSIDE: u8 = 99;

/// A host whose wall clock steps.
struct Host {
    sandbox: Sandbox,
    clock: PathBuf,
}

impl Host {
    fn new() -> Self {
        let sandbox = Sandbox::new();
        let clock = sandbox.io_path("clock");
        std::fs::write(&clock, "0").expect("a clock");
        std::fs::write(clock.with_file_name("inside"), "").expect("a file");
        Host { sandbox, clock }
    }

    /// From now on the clock is off by so much.
    fn step(&self, seconds: i64) {
        let next = self.clock.with_extension("next");
        std::fs::write(&next, seconds.to_string()).expect("a clock");
        std::fs::rename(&next, &self.clock).expect("a step");
    }

    fn withlock(&self) -> Run<'_> {
        self.sandbox.withlock().env("WITHLOCK_WALL_CLOCK", &self.clock)
    }

    /// Shell text: whoever runs it is inside from here to its end, and notices another who is.
    fn alone(&self) -> String {
        format!("exec 8<{}; flock -n 8 || exit {TWO_INSIDE}", self.clock.with_file_name("inside").display())
    }

    fn holder(&self, ttl: &str, options: &[&str], gate: &mut Gate) -> Running {
        let inside = format!("{}; {}", self.alone(), gate.script());
        let running = self.withlock().own_group().args(["--ttl", ttl]).args(options).lock().sh(inside).start();
        gate.wait_inside();
        with_record(&self.sandbox.lock());
        running
    }

    fn contender(&self, patience: &str, steps: &str) -> Running {
        self.withlock().leave_out(steps).args(["-w", patience]).lock().sh(self.alone()).start()
    }

    fn names(&self) -> Vec<String> {
        self.sandbox.names()
    }
}

/// No line speaks of a time that cannot be: a negative one, or a lease longer than what was asked for.
#[track_caller]
fn assert_plausible(said: &str, ttl: Duration) {
    for word in ["(-", " -1", "18446744", " -0"] {
        assert!(!said.contains(word), "{word:?} in {said:?}");
    }
    for rest in said.split("expires in ").skip(1) {
        let length = rest.split([',', ';', ' ']).next().unwrap_or_default();
        let left_ms = withlock::options::duration_ms(length, "").unwrap_or_else(|_| panic!("{length:?} in {said:?}"));
        assert!(u128::from(left_ms) <= ttl.as_millis(), "{length} of {ttl:?} in {said:?}");
    }
}

fn each_step(test: impl Fn(i64) + Sync) {
    let test = &test;
    std::thread::scope(|scope| {
        for step in STEPS {
            scope.spawn(move || test(step));
        }
    });
}

#[test]
fn the_tests_clock_steps_what_is_read_and_what_is_stamped() {
    // What gives the tests below their power.
    each_step(|step| {
        let host = Host::new();
        host.step(step);
        let mut gate = host.sandbox.gate();
        let held = host.holder("60s", &[], &mut gate);
        let shown = SystemTime::UNIX_EPOCH + Duration::from_millis(with_record(&host.sandbox.lock()).claimed_at_ms);
        for time in [shown, crate::harness::mtime(&host.sandbox.lock())] {
            let off = match time.duration_since(SystemTime::now()) {
                Ok(ahead) => i64::try_from(ahead.as_secs()).expect("some"),
                Err(behind) => -i64::try_from(behind.duration().as_secs()).expect("some"),
            };
            assert!((off - step).abs() < 60, "{off} {step}");
        }
        gate.open();
        held.wait().exited(0).silent();
    });
}

#[test]
fn a_clock_that_steps_takes_no_living_holders_lock_and_shortens_no_wait() {
    each_step(|step| {
        let host = Host::new();
        let mut gate = host.sandbox.gate();
        let held = host.holder("1s", &[], &mut gate);
        let nonce = with_record(&host.sandbox.lock()).nonce;
        let waiter = host.contender("3s", "");
        waiter.wait_asleep_in_flock();
        let busy = |host: &Host| -> Finished {
            let busy = host.withlock().arg("-n").lock().sh(host.alone()).run();
            busy.exited(75).one_line(&["held by"]);
            assert_plausible(&busy.err(), Duration::from_secs(1));
            busy
        };
        // There, and back again: two steps, one of each kind.
        for seconds in [step, 0, step] {
            host.step(seconds);
            let stepped = std::time::Instant::now();
            while stepped.elapsed() < Duration::from_millis(500) {
                busy(&host);
            }
        }
        let shown = host.sandbox.program(env!("CARGO_BIN_EXE_withlock")).env("WITHLOCK_WALL_CLOCK", &host.clock);
        let shown = shown.arg("inspect").lock().run();
        shown.exited(0).silent();
        assert_plausible(&shown.out(), Duration::from_secs(1));
        let waiter = waiter.wait();
        waiter.exited(75);
        assert_plausible(&waiter.err(), Duration::from_secs(1));
        assert!((3_000..4_000).contains(&waiter.took.as_millis()), "{:?}", waiter.took);
        assert_eq!(with_record(&host.sandbox.lock()).nonce, nonce);
        assert_eq!(host.names(), ["a.lock"], "no attempt leaves anything behind");
        gate.open();
        held.wait().exited(0).silent();
        assert!(host.names().is_empty());
    });
}

/// A holder that is stopped for longer than its ttl while the clock steps. What a contender who leaves these
/// steps out then comes to.
fn stopped_meanwhile(host: &Host, step: i64, steps: &str, gate: &mut Gate) -> (Running, Finished) {
    let held = host.holder("1s", &["--on-lost", "warn"], gate);
    send_to_group(held.pid(), Signal::SIGSTOP);
    eventually("it has stopped", || match process(held.pid()) {
        Some(process) if process.state == 'T' => Ok(()),
        other => Err(other),
    });
    host.step(step);
    let contender = host.contender("1500ms", steps).wait();
    (held, contender)
}

#[test]
fn a_holder_that_was_stopped_while_the_clock_stepped_goes_on_with_its_lock() {
    each_step(|step| {
        let host = Host::new();
        let mut gate = host.sandbox.gate();
        let (held, contender) = stopped_meanwhile(&host, step, "", &mut gate);
        contender.exited(75);
        assert_plausible(&contender.err(), Duration::from_secs(1));
        let epoch = (inode(&host.sandbox.lock()), with_record(&host.sandbox.lock()));
        send_to_group(held.pid(), Signal::SIGCONT);
        eventually("it renews by the clock that is", || {
            let finished = host.withlock().args(["inspect", "--quiet"]).lock().run();
            if finished.code() == Some(75) { Ok(()) } else { Err(finished.code()) }
        });
        assert_eq!((inode(&host.sandbox.lock()), with_record(&host.sandbox.lock())), epoch);
        gate.open();
        held.wait().exited(0).silent();
        assert!(host.names().is_empty(), "{:?}", host.names());
    });
}

#[test]
fn without_the_veto_of_the_guard_a_step_of_the_clock_lets_a_second_one_in() {
    // The negative control of the tests above: what keeps the lock is not its age.
    let host = Host::new();
    let mut gate = host.sandbox.gate();
    let (held, contender) = stopped_meanwhile(&host, HOUR, "veto", &mut gate);
    contender.exited(TWO_INSIDE);
    send_to_group(held.pid(), Signal::SIGCONT);
    gate.open();
    held.wait().exited(76).says(&["was lost"]);
}

#[test]
fn a_dead_holders_lock_is_recovered_within_its_ttl_and_a_second_whatever_the_clock_does() {
    each_step(|step| {
        for stepped_first in [true, false] {
            let host = Host::new();
            let mut gate = host.sandbox.gate();
            let dead = host.holder("2s", &[], &mut gate);
            let waiter = host.contender("30s", "");
            waiter.wait_asleep_in_flock();
            if stepped_first {
                host.step(step);
            }
            let killed = std::time::Instant::now();
            send_to_group(dead.pid(), Signal::SIGKILL);
            drop(dead);
            host.step(step);
            let waiter = waiter.wait();
            waiter.exited(0);
            assert_plausible(&waiter.err(), Duration::from_secs(2));
            let waited = waiter.ended - killed;
            assert!(waited <= Duration::from_secs(2 + 1), "{waited:?}, {step}, {stepped_first}");
            assert_eq!(slots(&host.sandbox.lock()).len(), 1);
        }
    });
}

#[test]
fn an_evictor_under_whom_the_clock_steps_evicts_the_dead_and_waits_for_no_one_for_ever() {
    each_step(|step| {
        // It has the guard; it has made the slot. The claim is still to come, and the second judgement.
        for call in ["flock", "mkdirat"] {
            let host = Host::new();
            plant(&host.sandbox.lock(), &planted(1_000), 10_000);
            let evictor = stopped_at(host.withlock().args(["-w", "30s"]).lock().sh(host.alone()), call);
            host.step(step);
            let gone_on = std::time::Instant::now();
            evictor.send(Signal::SIGCONT);
            let evictor = evictor.wait();
            evictor.exited(0);
            assert_plausible(&evictor.err(), Duration::from_secs(1));
            let took = evictor.ended - gone_on;
            assert!(took <= Duration::from_secs(1 + 1), "{call} {step}: {took:?}");
            assert_eq!(slots(&host.sandbox.lock()).len(), 1);
            assert!(!host.sandbox.lock().exists());
        }
    });
}

#[test]
fn the_longest_hold_and_check_do_not_mind_a_clock_that_steps() {
    each_step(|step| {
        let host = Host::new();
        let mut gate = host.sandbox.gate();
        let check = format!("{} check && echo held", env!("CARGO_BIN_EXE_withlock"));
        let inside = format!("{}; {}; {check}; exec sleep 30", gate.enter(), gate.wait());
        let held = host.withlock().args(["--ttl", "1s", "--max-hold", "2s"]).lock().sh(inside).start();
        gate.wait_inside();
        host.step(step);
        gate.open();
        let held = held.wait();
        held.exited(124).one_line(&["its --max-hold"]);
        assert_eq!(held.out(), "held\n");
        assert!((2_000..3_500).contains(&held.took.as_millis()), "{:?}", held.took);
    });
}
