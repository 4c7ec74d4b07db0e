//! Waiting without a lock: asleep on a guard or on a clock, while signals act as they did on entry.

use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::Result;
use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, SigmaskHow, Signal, sigaction, sigprocmask};
use nix::sys::time::TimeSpec;

use super::clock::boot_ms;
use super::file::{Dir, File};
use super::hook;
use super::lookout::{self, Lookout, Watch};
use super::signal::{self, Fatal, OnEntry};

/// Whether SIGALRM was ignored or blocked on entry: then one that another process sends ends nothing.
static ALARM_WAS_IGNORED: AtomicBool = AtomicBool::new(false);

/// How a sleep on a guard ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slept {
    /// The guard is ours: its holder gave it up, or died.
    Given,
    /// The lookout called: the lock changed, or the time ran out.
    Called,
    /// This file system cannot be slept on.
    Unsupported,
}

/// Puts a waiter to sleep. Signals have their effect on entry meanwhile: one that ends a process ends
/// this one at once, with nothing in its hands.
#[derive(Debug)]
pub struct Sleeper {
    mask: SigSet,
    lookout: Option<Lookout>,
    alarm_before: Option<SigAction>,
    alarm_was_blocked: bool,
    first_process: Vec<(Signal, SigAction)>,
}

extern "C" fn on_alarm(number: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel hands a handler installed with SA_SIGINFO a valid siginfo, which for a signal
    // sent by tgkill names the sender.
    let (by_thread, sender, own_pid) = unsafe { ((*info).si_code == libc::SI_TKILL, (*info).si_pid(), libc::getpid()) };
    let is_called = lookout::hear();
    let from_lookout = if by_thread { sender == own_pid } else { is_called && sender == 0 };
    if from_lookout || ALARM_WAS_IGNORED.load(Ordering::Relaxed) {
        return;
    }
    // SAFETY: signal and raise are async-signal-safe. The alarm was meant for the process as it was on
    // entry: it ends it when this handler returns.
    unsafe {
        libc::signal(number, libc::SIG_DFL);
        libc::raise(number);
    }
}

extern "C" fn on_end_of_first_process(number: libc::c_int) {
    // SAFETY: _exit is async-signal-safe; a waiter has nothing to clean up.
    unsafe { libc::_exit(128 + number) }
}

impl Sleeper {
    /// Prepares to sleep under the mask that signals had on entry.
    pub fn new(on_entry: &OnEntry) -> Self {
        let mut first_process = Vec::new();
        if std::process::id() == 1 {
            // The kernel discards signals with a default action that are sent to process 1.
            for signal in
                [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM, Signal::SIGUSR1, Signal::SIGUSR2]
            {
                if !signal::is_ignored(signal as i32) {
                    let exit =
                        SigAction::new(SigHandler::Handler(on_end_of_first_process), SaFlags::empty(), SigSet::empty());
                    // SAFETY: the handler only calls _exit.
                    if let Ok(before) = unsafe { sigaction(signal, &exit) } {
                        first_process.push((signal, before));
                    }
                }
            }
        }
        Sleeper {
            mask: on_entry.while_waiting(),
            lookout: None,
            alarm_before: None,
            alarm_was_blocked: on_entry.mask().contains(Signal::SIGALRM),
            first_process,
        }
    }

    /// Sleeps for `for_ms`.
    pub fn sleep(&self, for_ms: u64) {
        if hook::is_scheduled() {
            let _ = hook::before("sleep", OsStr::new(""));
            return;
        }
        let until_ms = boot_ms().saturating_add(for_ms);
        loop {
            let left_ms = until_ms.saturating_sub(boot_ms());
            if left_ms == 0 {
                return;
            }
            let timeout = TimeSpec::from_duration(Duration::from_millis(left_ms));
            let _ = nix::poll::ppoll(&mut [], Some(timeout), Some(self.mask));
        }
    }

    /// Sleeps for as long as another takes to write a record.
    pub fn doze(&self) {
        if hook::is_scheduled() {
            let _ = hook::before("sleep", OsStr::new(""));
            return;
        }
        let _ = nix::poll::ppoll(&mut [], Some(TimeSpec::from_duration(Duration::from_micros(100))), Some(self.mask));
    }

    /// Sleeps until `descriptor` is readable, at most for `for_ms`; whether it is.
    pub fn sleep_until_readable(&self, descriptor: BorrowedFd<'_>, for_ms: u64) -> bool {
        let until_ms = boot_ms().saturating_add(for_ms);
        loop {
            let timeout = TimeSpec::from_duration(Duration::from_millis(until_ms.saturating_sub(boot_ms())));
            let mut readable = [PollFd::new(descriptor, PollFlags::POLLIN)];
            match nix::poll::ppoll(&mut readable, Some(timeout), Some(self.mask)) {
                Ok(0) => return false,
                Ok(_) => return true,
                Err(_) if boot_ms() >= until_ms => return false,
                Err(_) => {}
            }
        }
    }

    /// Sleeps until `descriptor` is readable, at most for `for_ms`, while those signals act that do not end this
    /// process. `true`: one has arrived that will, once it is let through.
    pub fn sleep_unless(&self, fatal: &Fatal, descriptor: BorrowedFd<'_>, for_ms: u64) -> bool {
        let until_ms = boot_ms().saturating_add(for_ms);
        let mut mask = self.mask;
        mask.extend(&fatal.set());
        loop {
            let timeout = TimeSpec::from_duration(Duration::from_millis(until_ms.saturating_sub(boot_ms())));
            let readable = |descriptor| PollFd::new(descriptor, PollFlags::POLLIN);
            let mut both = [readable(fatal.as_fd()), readable(descriptor)];
            match nix::poll::ppoll(&mut both, Some(timeout), Some(mask)) {
                Ok(_) => return both[0].any().unwrap_or(false),
                Err(_) if boot_ms() >= until_ms => return false,
                Err(_) => {}
            }
        }
    }

    /// Lets signals act that have arrived while they were blocked.
    pub fn let_signals_act(&self) {
        let mut blocked = SigSet::empty();
        if sigprocmask(SigmaskHow::SIG_SETMASK, Some(&self.mask), Some(&mut blocked)).is_ok() {
            let _ = sigprocmask(SigmaskHow::SIG_SETMASK, Some(&blocked), None);
        }
    }

    /// Sleeps on `file`'s guard until the kernel gives it, in the order of arrival and at no cost in
    /// between, or until the lookout calls. Also says whether the word of the watch was said.
    pub fn sleep_on_guard(&mut self, file: &File, dir: &Dir, watch: Watch) -> Result<(Slept, bool)> {
        let mask = self.mask;
        self.receive_calls()?;
        let lookout = match self.lookout.take() {
            Some(mut lookout) => {
                lookout.watch(watch);
                self.lookout.insert(lookout)
            }
            None => match Lookout::post(dir.number(), watch) {
                Ok(lookout) => self.lookout.insert(lookout),
                // Without a thread to spare there is still the clock.
                Err(_) => return Ok((Slept::Unsupported, false)),
            },
        };
        let mut blocked = SigSet::empty();
        sigprocmask(SigmaskHow::SIG_SETMASK, Some(&mask), Some(&mut blocked))?;
        let slept = loop {
            match file.wait_for_guard() {
                Ok(()) => break Slept::Given,
                Err(Errno::EINTR) if lookout.has_called() => break Slept::Called,
                Err(Errno::EINTR) => {}
                // No guard here, or none any more: the file may have been removed by another host. Whoever
                // waits needs no guard, and what is broken shows at the next look.
                Err(_) => break Slept::Unsupported,
            }
        };
        sigprocmask(SigmaskHow::SIG_SETMASK, Some(&blocked), None)?;
        let word_was_said = lookout.relieve();
        Ok((slept, word_was_said))
    }

    /// Gives the alarm back that calls the sleeper: the next one to sleep may be another.
    pub fn give_back(&mut self) {
        if let Some(before) = self.alarm_before.take() {
            // A last call may be pending, and must not reach whoever reads signals next: setting the
            // disposition to ignore discards it.
            let ignore = SigAction::new(SigHandler::SigIgn, SaFlags::empty(), SigSet::empty());
            // SAFETY: neither action is a function of ours that could be left dangling.
            let _ = unsafe { sigaction(Signal::SIGALRM, &ignore) };
            // SAFETY: as above.
            let _ = unsafe { sigaction(Signal::SIGALRM, &before) };
        }
    }

    fn receive_calls(&mut self) -> Result<()> {
        if self.alarm_before.is_none() {
            lookout::hear();
            ALARM_WAS_IGNORED.store(signal::is_ignored(libc::SIGALRM) || self.alarm_was_blocked, Ordering::Relaxed);
            // Without SA_RESTART: the call is to interrupt the wait.
            let action = SigAction::new(SigHandler::SigAction(on_alarm), SaFlags::SA_SIGINFO, SigSet::empty());
            // SAFETY: the handler calls only async-signal-safe functions and touches one atomic.
            self.alarm_before = Some(unsafe { sigaction(Signal::SIGALRM, &action) }?);
        }
        Ok(())
    }
}

impl Drop for Sleeper {
    /// Gives the dispositions back, before COMMAND inherits them.
    fn drop(&mut self) {
        for (signal, before) in self.first_process.drain(..) {
            // SAFETY: an action that was installed before is valid.
            let _ = unsafe { sigaction(signal, &before) };
        }
        self.give_back();
    }
}

/// A short pause in the middle of an operation, signals blocked.
pub fn pause(for_ms: u64) {
    if hook::is_scheduled() {
        hook::pause(for_ms);
    } else {
        std::thread::sleep(Duration::from_millis(for_ms));
    }
}

/// Lets whoever was just woken have the processor first: what the waker has left to do can wait.
pub fn step_back() {
    std::thread::yield_now();
}

/// The shortest sleep there is, some 50 microseconds.
pub fn nod() {
    std::thread::sleep(Duration::from_nanos(1));
}
