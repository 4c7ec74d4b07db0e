//! `withlock LOCK -- COMMAND`.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use crate::cli::{OnBusy, Run};
use crate::exit::Exit;
use crate::machine::{Machine, Outcome, Terms};
use crate::options::Plan;
use crate::record::{Guard, Nonce};
use crate::store::{Busy, FileStore, Held, NotReleased, Offer, Store};
use crate::supervise::supervise;
use crate::sys::clock::boot_ms;
use crate::sys::output::complain;
use crate::sys::process;
use crate::sys::signal::{self, OnEntry, Signals};
use crate::sys::spawn::Program;
use crate::sys::{Errno, describe};
use crate::text::{Shown, duration};

use super::System;
use super::obtain::{Obtained, Waited, busy_line, obtain};

/// Runs COMMAND while holding LOCK; the exit code.
pub(super) fn run(run: Run, on_entry: &OnEntry) -> anyhow::Result<u8> {
    let plan = Plan::new(run)?;
    // Everything that may fail for want of a descriptor is had before the lock is.
    let signals = Signals::open().map_err(|errno| System::new("open a signal descriptor", errno))?;
    signal::receive_child_statuses().map_err(|errno| System::new("reset SIGCHLD", errno))?;
    let mut store = FileStore::open(&plan.lock, plan.lease.parents, on_entry)?;
    if plan.verbose && !store.place().file_system.local {
        complain(&format!(
            "{}: not a local file system: other hosts do not see the guard; mount it without look-up and attribute caches",
            Shown::os(&plan.lock)
        ));
    }
    let lock = store.absolute_name()?;
    let obtained = obtain(&mut store, &offer(&plan), plan.patience, &plan.lock, plan.quiet)?;
    // Gives the signal dispositions back that waiting needed.
    drop(store);
    let job = Job { plan: &plan, lock, signals: &signals, on_entry };
    match obtained {
        Obtained::Lock(held) => job.with(held),
        Obtained::Ancestor(nonce, _) if plan.reentrant => {
            job.without_lease(&Mode::Locked { nonce, fence: None, is_new: false })
        }
        Obtained::Ancestor(_, busy) => {
            let line = busy_line(&busy, &plan.lock, "held by an ancestor of this process:");
            complain(&line.replacen(": by ", ": ", 1));
            Ok(Exit::Nested.code())
        }
        Obtained::Busy(busy, waited) => job.busy(&busy, waited),
    }
}

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
        evict_dead: plan.lease.evict_dead,
    }
}

/// What COMMAND is told about its lock.
enum Mode {
    Locked { nonce: Nonce, fence: Option<u64>, is_new: bool },
    Degraded,
}

struct Job<'a> {
    plan: &'a Plan,
    lock: OsString,
    signals: &'a Signals,
    on_entry: &'a OnEntry,
}

impl Job<'_> {
    fn with(&self, mut held: Box<dyn Held>) -> anyhow::Result<u8> {
        if self.plan.verbose {
            complain(&format!("{}: locked, nonce {}", Shown::os(&self.plan.lock), held.nonce()));
        }
        let mode = Mode::Locked { nonce: held.nonce(), fence: held.fence(), is_new: true };
        let ended = match self.needed(&mode, &mut held) {
            Ok(true) => self.supervised(&self.plan.argv, &mode, Some(&mut held)),
            Ok(false) => Ok(Outcome { code: 0, lost: false }),
            Err(not_run) => Err(not_run),
        };
        let (code, lost) = match ended {
            Ok(outcome) if outcome.lost => return Ok(outcome.code),
            Ok(outcome) => (outcome.code, false),
            Err(not_run) => (self.complain_not_run(&not_run), false),
        };
        debug_assert!(!lost);
        Ok(self.release(held, code))
    }

    /// `--skip-if`: whether COMMAND is still needed, asked under the lock.
    fn needed(&self, mode: &Mode, held: &mut Box<dyn Held>) -> Result<bool, NotRun> {
        let Some(condition) = &self.plan.skip_if else { return Ok(true) };
        let argv = ["/bin/sh".into(), "-c".into(), condition.clone()];
        let outcome = self.supervised(&argv, mode, Some(held))?;
        Ok(outcome != Outcome { code: 0, lost: false })
    }

    fn without_lease(&self, mode: &Mode) -> anyhow::Result<u8> {
        match self.supervised(&self.plan.argv, mode, None) {
            Ok(outcome) => Ok(outcome.code),
            Err(not_run) => Ok(self.complain_not_run(&not_run)),
        }
    }

    fn busy(&self, busy: &Busy, waited: Waited) -> anyhow::Result<u8> {
        let line = busy_line(busy, &self.plan.lock, &waited.how());
        match self.plan.on_busy {
            OnBusy::Fail => {
                complain(&line);
                Ok(self.plan.conflict_exit.unwrap_or(Exit::Held.code()))
            }
            OnBusy::Skip => {
                complain(&format!("skipped: {line}"));
                Ok(0)
            }
            OnBusy::Run => {
                complain(&format!("running without the lock: {line}"));
                self.without_lease(&Mode::Degraded)
            }
        }
    }

    fn supervised(&self, argv: &[OsString], mode: &Mode, held: Option<&mut Box<dyn Held>>) -> Result<Outcome, NotRun> {
        let program = self.program(argv, mode).map_err(|errno| NotRun { errno, argv0: argv[0].clone() })?;
        // Without it orphans of COMMAND would escape when all of its tree must end.
        let _ = process::become_subreaper();
        let leads_session = process::is_session_leader();
        let terms = Terms {
            ttl_ms: held.as_ref().map(|_| self.plan.lease.ttl_ms),
            renew: self.plan.renew,
            may_be_unseen: held.as_ref().is_some_and(|held| held.may_be_unseen()),
            max_hold_ms: self.plan.max_hold_ms,
            kill_after_ms: self.plan.kill_after_ms,
            on_lost: self.plan.on_lost,
            leads_session,
        };
        let now_ms = boot_ms();
        let granted_ms = held.as_ref().map_or(now_ms, |held| held.granted_boot_ms());
        let pid = program.spawn(self.on_entry).map_err(|errno| NotRun { errno, argv0: argv[0].clone() })?;
        Ok(supervise(pid, Machine::new(terms, granted_ms, now_ms), self.signals, &self.plan.lock, held))
    }

    fn program(&self, argv: &[OsString], mode: &Mode) -> Result<Program, Errno> {
        let mut set: Vec<(&str, OsString)> = vec![("WITHLOCK_LOCK", self.lock.clone())];
        let mut unset = Vec::new();
        let name = match mode {
            Mode::Locked { nonce, fence, is_new } => {
                set.push(("WITHLOCK_NONCE", nonce.as_str().into()));
                match fence {
                    Some(number) => set.push(("WITHLOCK_FENCE", number.to_string().into())),
                    None if *is_new => unset.push("WITHLOCK_FENCE"),
                    None => {}
                }
                if *is_new {
                    let mut all = process::variable("WITHLOCK_HELD").unwrap_or_default();
                    if !all.is_empty() {
                        all.push(" ");
                    }
                    all.push(nonce.as_str());
                    set.push(("WITHLOCK_HELD", all));
                }
                "locked"
            }
            Mode::Degraded => {
                unset.extend(["WITHLOCK_NONCE", "WITHLOCK_FENCE"]);
                "degraded"
            }
        };
        set.push(("WITHLOCK_MODE", name.into()));
        Program::new(argv, &set, &unset)
    }

    /// Gives the lock back. COMMAND's own failure passes through; its success must not hide ours.
    fn release(&self, held: Box<dyn Held>, code: u8) -> u8 {
        let own = |ours: Exit| if code == 0 { ours.code() } else { code };
        let path = Shown::os(&self.plan.lock);
        match held.release() {
            Ok(remark) => {
                if let Some(remark) = remark {
                    complain(&format!("{path}: {remark}"));
                }
                code
            }
            Err(NotReleased::Lost(found)) => {
                complain(&format!("{path}: the lock was lost while the command ran: {found}"));
                own(Exit::Lost)
            }
            Err(NotReleased::Failed(fault)) => {
                let ttl = duration(self.plan.lease.ttl_ms);
                complain(&format!("{fault}; the lock stays and expires within {ttl}"));
                own(fault.exit())
            }
        }
    }

    fn complain_not_run(&self, not_run: &NotRun) -> u8 {
        let command = Shown::os(&not_run.argv0);
        let (exit, text) = match not_run.errno {
            Errno::ENOENT if !not_run.argv0.as_bytes().contains(&b'/') => (Exit::NotFound, "command not found"),
            Errno::ENOENT => (Exit::NotFound, describe(Errno::ENOENT)),
            errno @ (Errno::EAGAIN | Errno::ENOMEM | Errno::EMFILE | Errno::ENFILE) => (Exit::System, describe(errno)),
            errno => (Exit::NotExecutable, describe(errno)),
        };
        complain(&format!("cannot run {command}: {text}"));
        exit.code()
    }
}

/// COMMAND was not started.
struct NotRun {
    errno: Errno,
    argv0: OsString,
}
