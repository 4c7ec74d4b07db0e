//! `withlock LOCK -- COMMAND`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use crate::cli::OnBusy;
use crate::exit::{Exit, of_signal};
use crate::machine::{Machine, Outcome, Renewal, Terms};
use crate::options::Plan;
use crate::record::{Guard, Nonce};
use crate::report::log::Event;
use crate::store::{self, Busy, Fault, Held, News, NotReleased, Offer, Part, Place, Several, Store};
use crate::supervise::{supervise, supervise_briefly};
use crate::sys::clock::boot_ms;
use crate::sys::output::complain;
use crate::sys::process::{self, Zombie};
use crate::sys::signal::{Fatal, OnEntry, Signals};
use crate::sys::spawn::{Program, Variables, missing_interpreter};
use crate::sys::{Errno, describe};
use crate::text::{Shown, duration};

use super::log::{Log, other};
use super::obtain::{Obtained, Waited, busy_line, obtain, say_caveat};
use super::{System, block, exit_of};

/// Runs COMMAND while holding LOCK; the exit code.
pub(super) fn run(plan: Plan) -> anyhow::Result<u8> {
    let log = Log::open(&plan)?;
    let code = run_logged(plan, &log);
    log.tell(|| match &code {
        Ok(code) => Event::Exit { code: *code, error: log.failure() },
        Err(error) => Event::Exit { code: exit_of(error).code(), error: Some(format!("{error:#}")) },
    });
    code
}

fn run_logged(plan: Plan, log: &Log) -> anyhow::Result<u8> {
    let place = store::find(&plan.lock, plan.lease.parents)?;
    let (job, mut store) = Job::prepare(plan, place, block()?, log)?;
    let plan = &job.plan;
    say_caveat(store.as_ref(), &plan.lock, plan.talk);
    let obtained = obtain(store.as_mut(), &offer(plan), plan.patience, &plan.lock, plan.talk, &job.on_entry, log)?;
    // Gives the signal dispositions back that waiting needed.
    drop(store);
    Ok(job.go_on(obtained))
}

/// The beginning of the common case: its lock is taken, or not, and COMMAND is started. `None`: an error, or
/// something to say first, and nothing was done.
pub(super) fn begin(plan: Plan, place: Option<Place>, on_entry: OnEntry) -> Option<Begun> {
    let (job, mut store) = Job::prepare(plan, place, on_entry, &Log::OFF).ok()?;
    let plan = &job.plan;
    // Calls that may hang are made where there can be threads to see to it.
    if store.may_hang() {
        job.on_entry.restore_child_statuses();
        return None;
    }
    let (store_ref, offer) = (store.as_mut(), offer(plan));
    let obtained = obtain(store_ref, &offer, plan.patience, &plan.lock, plan.talk, &job.on_entry, &Log::OFF).ok()?;
    drop(store);
    let Obtained::Lock(mut held) = obtained else { return Some(Begun::Obtained(job, obtained)) };
    let spawned = job.spawn(&job.command, &job.plan.argv, &Mode::of(held.as_ref()), Some(&mut held));
    Some(Begun::Started(job, held, spawned))
}

/// Something that is needed for every lock could not be had. No error of `anyhow` yet: that would ask the
/// environment, through the C library, for what to show of itself, and this may run before that is started.
pub(super) enum Unprepared {
    System(System),
    Store(Fault),
}

impl From<System> for Unprepared {
    fn from(system: System) -> Self {
        Unprepared::System(system)
    }
}

impl From<Fault> for Unprepared {
    fn from(fault: Fault) -> Self {
        Unprepared::Store(fault)
    }
}

impl From<Unprepared> for anyhow::Error {
    fn from(unprepared: Unprepared) -> Self {
        match unprepared {
            Unprepared::System(system) => system.into(),
            Unprepared::Store(fault) => fault.into(),
        }
    }
}

/// What was begun.
pub(super) enum Begun {
    /// COMMAND was started under the lock, or could not be.
    Started(Job<'static>, Box<dyn Held>, Result<Running, NotRun>),
    /// The wait for the lock is over.
    Obtained(Job<'static>, Obtained),
}

impl Begun {
    /// The end of the common case, if it comes soon.
    pub(super) fn finish_early(self) -> Result<u8, Box<Self>> {
        match self {
            Begun::Started(job, held, Ok(running)) if job.plan.max_hold_ms.is_none() => {
                match supervise_briefly(running.pid, &job.signals) {
                    Some(code) => Ok(job.release(held, code, Some(Zombie(running.pid)))),
                    None => Err(Box::new(Begun::Started(job, held, Ok(running)))),
                }
            }
            begun => Err(Box::new(begun)),
        }
    }

    /// Goes on to the end.
    pub(super) fn finish(self) -> u8 {
        match self {
            Begun::Started(job, mut held, spawned) => {
                let ended = spawned.map(|running| running.supervise(&job, Some(&mut held)));
                job.end(held, ended)
            }
            Begun::Obtained(job, obtained) => job.go_on(obtained),
        }
    }
}

/// How long somebody else is waited for who can say whether the lock is still ours, in milliseconds.
const ASK_AT_MOST_MS: u64 = 1_000;

fn offer(plan: &Plan) -> Offer {
    let guard = match (plan.renew, plan.close) {
        (false, _) => Guard::None,
        (true, true) => Guard::Wrapper,
        (true, false) => Guard::Inherited,
    };
    Offer {
        ttl_ms: plan.lease.ttl_ms,
        guard,
        command: process::base_name(&plan.argv[0]),
        label: plan.lease.label.clone(),
        mode: plan.lease.mode,
        fence: plan.lease.fence.clone(),
        runs_command: true,
        evict_dead: plan.lease.evict_dead,
    }
}

/// What COMMAND is told about its lock.
enum Mode {
    Locked {
        nonce: Nonce,
        fence: Option<u64>,
        /// The nonces of the locks that were taken by this process.
        new: Vec<Nonce>,
    },
    Degraded,
}

/// The variables that tell it.
const LOCK: &str = "WITHLOCK_LOCK";
const NONCE: &str = "WITHLOCK_NONCE";
const FENCE: &str = "WITHLOCK_FENCE";
const HELD: &str = "WITHLOCK_HELD";
const MODE: &str = "WITHLOCK_MODE";

impl Mode {
    fn of(held: &dyn Held) -> Self {
        let new = held.locks().into_iter().map(|(_, nonce)| nonce).collect();
        Mode::Locked { nonce: held.nonce(), fence: held.fence(), new }
    }

    fn variables(&self) -> Result<Variables, Errno> {
        let mut told = Variables::default();
        let mut held = process::variable(HELD);
        match self {
            Mode::Locked { nonce, fence, new } => {
                told.set(MODE, OsStr::new("locked"))?;
                told.set(NONCE, OsStr::new(nonce.as_str()))?;
                if let Some(number) = fence {
                    told.set(FENCE, OsStr::new(&number.to_string()))?;
                }
                for nonce in new {
                    let all = held.get_or_insert_default();
                    if !all.is_empty() {
                        all.push(" ");
                    }
                    all.push(nonce.as_str());
                }
            }
            Mode::Degraded => told.set(MODE, OsStr::new("degraded"))?,
        }
        held.map_or(Ok(()), |all| told.set(HELD, &all))?;
        Ok(told)
    }
}

/// Everything that may fail for want of a descriptor is had before the lock is, and whatever can be done before
/// is: once it is ours, others wait for it.
pub(super) struct Job<'a> {
    plan: Plan,
    lock: OsString,
    /// COMMAND, but for what it is told once the lock is taken.
    command: Result<Program, Errno>,
    signals: Signals,
    on_entry: OnEntry,
    leads_session: bool,
    log: &'a Log,
}

impl<'a> Job<'a> {
    fn prepare(
        plan: Plan,
        place: Option<Place>,
        mut on_entry: OnEntry,
        log: &'a Log,
    ) -> Result<(Self, Box<dyn Store>), Unprepared> {
        let signals = Signals::open().map_err(|errno| System::new("open a signal descriptor", errno))?;
        on_entry.receive_child_statuses().map_err(|errno| System::new("reset SIGCHLD", errno))?;
        let store: Box<dyn Store> = if plan.also.is_empty() {
            store::open(&plan.lock, place, &plan.access, &on_entry)?
        } else {
            let enclosing = process::variable(HELD).unwrap_or_default();
            let (parents, reentrant) = (plan.lease.parents, plan.reentrant);
            Box::new(Several::open(&plan.lock, &plan.also, parents, enclosing, reentrant, &on_entry)?)
        };
        let lock = store.absolute_name()?;
        // Without it orphans of COMMAND would escape when all of its tree must end.
        let _ = process::become_subreaper();
        let command = Job::program(&plan, &lock, &plan.argv);
        Ok((Job { plan, command, lock, signals, on_entry, leads_session: process::is_session_leader(), log }, store))
    }

    fn go_on(&self, obtained: Obtained) -> u8 {
        match obtained {
            Obtained::Lock(held) => self.with(held),
            Obtained::Ancestor(nonce, busy) if self.plan.reentrant => {
                self.log.tell(|| Event::Reentered);
                // The token is that lock's, whatever locks lie between it and us.
                let fence = busy.record.as_ref().and_then(|record| record.fence);
                self.without_lease(&Mode::Locked { nonce, fence, new: Vec::new() })
            }
            Obtained::Ancestor(_, busy) => {
                self.log.tell_of(busy.lock.as_deref(), None, || Event::Nested(other(&busy)));
                let line = busy_line(&busy, &self.plan.lock, "held by an ancestor of this process:");
                complain(&line.replacen(": by ", ": ", 1));
                Exit::Nested.code()
            }
            Obtained::Busy(busy, waited) => self.busy(&busy, waited),
        }
    }

    fn with(&self, held: Box<dyn Held>) -> u8 {
        if self.plan.talk.verbose {
            for (lock, nonce) in held.locks() {
                complain(&format!("{}: locked, nonce {nonce}", Shown::os(lock.unwrap_or(&self.plan.lock))));
            }
        }
        let mut held = held.keep_nobody_waiting();
        let ended = self.unless_skipped(&Mode::of(held.as_ref()), Some(&mut held));
        self.end(held, ended)
    }

    /// Runs COMMAND, unless `--skip-if` finds, under the lock, that it is not needed any more.
    fn unless_skipped(&self, mode: &Mode, mut held: Option<&mut Box<dyn Held>>) -> Result<Ended, NotRun> {
        if let Some(condition) = &self.plan.skip_if {
            let argv = ["/bin/sh".into(), "-c".into(), condition.clone()];
            let condition = Job::program(&self.plan, &self.lock, &argv).map(Program::without_input);
            let mut ended = self.supervised(&condition, &argv, mode, held.as_deref_mut())?;
            let outcome = &mut ended.outcome;
            if outcome.lost {
                outcome.code = Exit::Lost.code();
                return Ok(ended);
            }
            // A condition that failed, with whatever status, says that COMMAND is needed. One that was ended by
            // a signal, by --max-hold or for the lock says nothing, and what ended it was meant for all.
            let was_ended = outcome.cut_short;
            if outcome.code == 0 {
                self.log.tell(|| Event::NotNeeded);
            }
            if outcome.code == 0 || was_ended {
                return Ok(ended);
            }
            // The looks while it ran are up to a second old.
            if let Some(found) = held.as_deref_mut().and_then(|held| lost_meanwhile(held.as_mut(), &self.on_entry)) {
                self.log.tell(|| Event::Lost { found: found.clone() });
                let path = Shown::os(&self.plan.lock);
                complain(&format!("{path}: the lock was lost: {found}; the command is not run"));
                (outcome.code, outcome.lost) = (Exit::Lost.code(), true);
                return Ok(ended);
            }
        }
        self.command(mode, held)
    }

    fn command(&self, mode: &Mode, held: Option<&mut Box<dyn Held>>) -> Result<Ended, NotRun> {
        self.supervised(&self.command, &self.plan.argv, mode, held)
    }

    fn without_lease(&self, mode: &Mode) -> u8 {
        let ended = match mode {
            Mode::Locked { .. } => self.unless_skipped(mode, None),
            // The condition is asked under the lock, or not at all.
            Mode::Degraded => self.command(mode, None),
        };
        match ended {
            Ok(ended) => ended.outcome.code,
            Err(not_run) => self.not_run(&not_run),
        }
    }

    fn busy(&self, busy: &Busy, waited: Waited) -> u8 {
        let line = busy_line(busy, &self.plan.lock, &waited.how());
        self.log.busy(busy, waited.ms, self.plan.on_busy);
        match self.plan.on_busy {
            OnBusy::Fail => {
                complain(&line);
                self.plan.conflict_exit.unwrap_or(Exit::Held.code())
            }
            OnBusy::Skip => {
                // No error: a job of cron's may want no mail about it.
                if !self.plan.talk.quiet {
                    complain(&format!("skipped: {line}"));
                }
                0
            }
            OnBusy::Run => {
                // No error either: the command is told, and what was asked for is done.
                if !self.plan.talk.quiet {
                    complain(&format!("running without the lock: {line}"));
                }
                self.without_lease(&Mode::Degraded)
            }
        }
    }

    fn supervised(
        &self,
        program: &Result<Program, Errno>,
        argv: &[OsString],
        mode: &Mode,
        mut held: Option<&mut Box<dyn Held>>,
    ) -> Result<Ended, NotRun> {
        let running = self.spawn(program, argv, mode, held.as_deref_mut())?;
        Ok(running.supervise(self, held))
    }

    fn spawn(
        &self,
        program: &Result<Program, Errno>,
        argv: &[OsString],
        mode: &Mode,
        mut held: Option<&mut Box<dyn Held>>,
    ) -> Result<Running, NotRun> {
        // Goes with whatever ends this before it is needed.
        let recruit = held.as_mut().and_then(|held| held.recruit());
        let held = held.as_deref().map(AsRef::as_ref);
        let not_run = |errno| NotRun { why: Why::Errno(errno), argv0: argv[0].clone() };
        if let Some(signal) = self.on_entry.ended_by_terminal() {
            return Err(NotRun { why: Why::Signal(signal), argv0: argv[0].clone() });
        }
        let program = program.as_ref().map_err(|errno| not_run(*errno))?;
        let told = mode.variables().map_err(not_run)?;
        let terms = Terms {
            ttl_ms: held.map(Held::ttl_ms),
            renew: self.plan.renew,
            several: held.is_some_and(|held| held.locks().len() > 1),
            may_be_unseen: held.is_some_and(Held::may_be_unseen),
            max_hold_ms: self.plan.max_hold_ms,
            kill_after_ms: self.plan.kill_after_ms,
            on_lost: self.plan.on_lost,
            leads_session: self.leads_session,
        };
        let now_ms = boot_ms();
        let granted_ms = held.map_or(now_ms, Held::granted_boot_ms);
        let pid = program.spawn(&told, &self.on_entry, recruit).map_err(not_run)?;
        self.log.tell(|| Event::Started { command: process::base_name(&argv[0]), command_pid: pid });
        Ok(Running { pid, machine: Machine::new(terms, granted_ms, now_ms) })
    }

    fn program(plan: &Plan, lock: &OsStr, argv: &[OsString]) -> Result<Program, Errno> {
        let mut given = Variables::default();
        given.set(LOCK, lock)?;
        // So that `check` in COMMAND reaches the same service in the same way.
        let mut own = vec![LOCK, NONCE, FENCE, HELD, MODE];
        for (name, file) in plan.access.variables() {
            if let Some(file) = file.and_then(|file| process::absolute(file)) {
                given.set(name, &file)?;
                own.push(name);
            }
        }
        Program::new(argv, &own, given)
    }

    fn end(&self, held: Box<dyn Held>, ended: Result<Ended, NotRun>) -> u8 {
        match ended {
            // Of several locks those that are left go back.
            Ok(Ended { outcome: Outcome { code, lost: true, .. }, .. }) if held.locks().len() == 1 => code,
            Ok(Ended { outcome: Outcome { code, .. }, zombie }) => self.release(held, code, Some(zombie)),
            Err(not_run) => {
                let code = self.not_run(&not_run);
                self.release(held, code, None)
            }
        }
    }

    /// COMMAND was not started: says so; the exit code.
    fn not_run(&self, not_run: &NotRun) -> u8 {
        match not_run.words() {
            Ok((exit, line)) => {
                complain(&line);
                self.log.failed(line);
                exit.code()
            }
            Err(signal) => of_signal(signal),
        }
    }

    /// Gives the lock back, or each of them. COMMAND's own failure passes through; its success must not
    /// hide ours. The command is reaped only once the lock is free: that takes the kernel as long as the
    /// release.
    fn release(&self, held: Box<dyn Held>, code: u8, mut zombie: Option<Zombie>) -> u8 {
        if held.locks().len() > 1 {
            // To take them apart may itself take its time.
            drop(zombie.take());
        }
        held.apart().into_iter().fold(code, |code, part| self.release_one(part, code, &mut zombie))
    }

    fn release_one(&self, part: Part, code: u8, zombie: &mut Option<Zombie>) -> u8 {
        let Part { lock, held } = part;
        let own = |ours: Exit| if code == 0 { ours.code() } else { code };
        let path = Shown::os(lock.as_ref().unwrap_or(&self.plan.lock));
        let (ttl, nonce, granted_boot_ms) = (held.ttl_ms(), held.nonce(), held.granted_boot_ms());
        let tell = |event: &dyn Fn() -> Event| self.log.tell_of(lock.as_deref(), Some(nonce), event);
        match held.release(&mut || drop(zombie.take())) {
            Ok(remark) => {
                tell(&|| Event::Released { held_ms: boot_ms().saturating_sub(granted_boot_ms) });
                if let Some(remark) = remark {
                    complain(&format!("{path}: {remark}"));
                }
                code
            }
            Err(NotReleased::Lost(found)) => {
                tell(&|| Event::Lost { found: found.clone() });
                complain(&format!("{path}: the lock was lost while the command ran: {found}"));
                own(Exit::Lost)
            }
            Err(NotReleased::Failed(fault)) => {
                tell(&|| Event::NotReleased { why: fault.to_string() });
                complain(&format!("{fault}; the lock stays and expires within {}", duration(ttl)));
                // What would be "can never be taken" before a grant is an error now: it was taken.
                own(if fault.exit() == Exit::NotPermitted { Exit::NotPermitted } else { Exit::Io })
            }
        }
    }
}

/// What is there instead of the lock, right before COMMAND is started. One that others have to be asked about
/// is renewed as well, since a look there is answered later, and that is waited for, but not for long: where
/// nobody answers, COMMAND is watched over like any other.
fn lost_meanwhile(held: &mut dyn Held, on_entry: &OnEntry) -> Option<String> {
    let found = held.look();
    if found.is_some() || held.news_descriptor().is_none() {
        return found;
    }
    let until_ms = boot_ms() + ASK_AT_MOST_MS;
    let fatal = Fatal::open(on_entry).ok()?;
    let mut answer = Some(held.renew());
    loop {
        match answer {
            Some(Renewal::Lost(found)) => return Some(found),
            Some(Renewal::Pending) | None => {}
            Some(Renewal::Confirmed | Renewal::Contested | Renewal::Failed(_)) => return None,
        }
        let left_ms = until_ms.saturating_sub(boot_ms());
        // A signal that has arrived is for COMMAND.
        if left_ms == 0 || fatal.or_readable(held.news_descriptor()?, left_ms) {
            return None;
        }
        answer = match held.news() {
            Some(News::Lost(found)) => return Some(found),
            Some(News::Renewed(renewal)) => Some(renewal),
            None => None,
        };
    }
}

/// COMMAND, started.
pub(super) struct Running {
    pid: i32,
    machine: Machine,
}

impl Running {
    fn supervise(self, job: &Job<'_>, held: Option<&mut Box<dyn Held>>) -> Ended {
        let tell = |event| job.log.tell(|| event);
        let outcome = supervise(self.pid, self.machine, &job.signals, &job.plan.lock, held, &tell);
        Ended { outcome, zombie: Zombie(self.pid) }
    }
}

/// COMMAND has ended.
struct Ended {
    outcome: Outcome,
    zombie: Zombie,
}

/// COMMAND was not started.
pub(super) struct NotRun {
    why: Why,
    argv0: OsString,
}

enum Why {
    Errno(Errno),
    /// Ctrl-C came before there was a COMMAND to hear it.
    Signal(i32),
}

impl NotRun {
    /// The exit code and why; or the signal that came first.
    fn words(&self) -> Result<(Exit, String), i32> {
        let command = Shown::os(&self.argv0);
        let errno = match self.why {
            Why::Errno(errno) => errno,
            Why::Signal(signal) => return Err(signal),
        };
        let interpreter = (errno == Errno::ENOENT).then(|| missing_interpreter(&self.argv0)).flatten();
        if let Some(interpreter) = interpreter {
            let which = Shown::os(&interpreter).to_string();
            let gap = if which.is_empty() { "" } else { ", " };
            return Ok((Exit::NotFound, format!("cannot run {command}: its interpreter was not found{gap}{which}")));
        }
        let (exit, text) = match errno {
            Errno::ENOENT if !self.argv0.as_bytes().contains(&b'/') => (Exit::NotFound, "command not found"),
            Errno::ENOENT => (Exit::NotFound, describe(Errno::ENOENT)),
            errno @ (Errno::EAGAIN | Errno::ENOMEM | Errno::EMFILE | Errno::ENFILE) => (Exit::System, describe(errno)),
            errno => (Exit::NotExecutable, describe(errno)),
        };
        Ok((exit, format!("cannot run {command}: {text}")))
    }
}
