//! Waiting without a lock: asleep on a guard or on a clock, while signals act as they did on entry.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::Result;
use nix::errno::Errno;
use nix::libc;
use nix::sys::signal::{SaFlags, SigAction, SigEvent, SigHandler, SigSet, SigevNotify, SigmaskHow, Signal};
use nix::sys::signal::{sigaction, sigprocmask};
use nix::sys::time::TimeSpec;
use nix::sys::timer::{Expiration, Timer, TimerSetTimeFlags};
use nix::time::ClockId;

use super::clock::boot_ms;
use super::file::File;
use super::signal::{self, OnEntry};

/// After its first expiry the alarm repeats at this pace, in milliseconds: one that fires between the
/// unblocking of signals and the call it should interrupt would otherwise be lost.
const ALARM_REPEATS_EVERY_MS: u64 = 20;

/// Whether SIGALRM was ignored on entry: then one that another process sends still is.
static ALARM_WAS_IGNORED: AtomicBool = AtomicBool::new(false);

/// How a sleep on a guard ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slept {
    /// The guard is ours: its holder gave it up, or died.
    Given,
    /// The time ran out.
    TimedOut,
    /// This file system cannot be slept on.
    Unsupported,
}

/// Puts a waiter to sleep. Signals have their effect on entry meanwhile: one that ends a process ends
/// this one at once, with nothing in its hands.
#[derive(Debug)]
pub struct Sleeper {
    mask: SigSet,
    alarm: Option<Alarm>,
    first_process: Vec<(Signal, SigAction)>,
}

#[derive(Debug)]
struct Alarm {
    timer: Timer,
    before: SigAction,
}

extern "C" fn on_alarm(number: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel hands a handler installed with SA_SIGINFO a valid siginfo.
    let by_timer = unsafe { (*info).si_code } == libc::SI_TIMER;
    if by_timer || ALARM_WAS_IGNORED.load(Ordering::Relaxed) {
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
        Sleeper { mask: on_entry.while_waiting(), alarm: None, first_process }
    }

    /// Sleeps for `for_ms`.
    pub fn sleep(&self, for_ms: u64) {
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

    /// Sleeps on `file`'s guard for at most `for_ms`. The kernel wakes exactly when its turn has come,
    /// in the order of arrival, at no cost in between.
    pub fn sleep_on_guard(&mut self, file: &File, for_ms: u64) -> Result<Slept> {
        let until_ms = boot_ms().saturating_add(for_ms.max(1));
        let mask = self.mask;
        let alarm = self.alarm()?;
        alarm.set(for_ms.max(1))?;
        let mut blocked = SigSet::empty();
        sigprocmask(SigmaskHow::SIG_SETMASK, Some(&mask), Some(&mut blocked))?;
        let slept = loop {
            match file.wait_for_guard() {
                Ok(()) => break Ok(Slept::Given),
                Err(Errno::EINTR) if boot_ms() < until_ms => {}
                Err(Errno::EINTR) => break Ok(Slept::TimedOut),
                Err(Errno::ENOSYS | Errno::EOPNOTSUPP | Errno::EINVAL | Errno::ENOLCK | Errno::EBADF) => {
                    break Ok(Slept::Unsupported);
                }
                Err(errno) => break Err(errno),
            }
        };
        sigprocmask(SigmaskHow::SIG_SETMASK, Some(&blocked), None)?;
        alarm.disarm()?;
        slept
    }

    fn alarm(&mut self) -> Result<&mut Alarm> {
        if self.alarm.is_none() {
            let event = SigEvent::new(SigevNotify::SigevSignal { signal: Signal::SIGALRM, si_value: 0 });
            let timer = Timer::new(ClockId::CLOCK_BOOTTIME, event)?;
            ALARM_WAS_IGNORED.store(signal::is_ignored(libc::SIGALRM), Ordering::Relaxed);
            // Without SA_RESTART: the alarm is to interrupt the wait.
            let action = SigAction::new(SigHandler::SigAction(on_alarm), SaFlags::SA_SIGINFO, SigSet::empty());
            // SAFETY: the handler calls only async-signal-safe functions and touches one atomic.
            let before = unsafe { sigaction(Signal::SIGALRM, &action) }?;
            self.alarm = Some(Alarm { timer, before });
        }
        self.alarm.as_mut().ok_or(Errno::EINVAL)
    }
}

impl Alarm {
    fn set(&mut self, in_ms: u64) -> Result<()> {
        let first = TimeSpec::from_duration(Duration::from_millis(in_ms));
        let then = TimeSpec::from_duration(Duration::from_millis(ALARM_REPEATS_EVERY_MS));
        self.timer.set(Expiration::IntervalDelayed(first, then), TimerSetTimeFlags::empty())
    }

    fn disarm(&mut self) -> Result<()> {
        let never = TimeSpec::from_duration(Duration::ZERO);
        self.timer.set(Expiration::OneShot(never), TimerSetTimeFlags::empty())
    }
}

impl Drop for Sleeper {
    /// Gives the dispositions back, before COMMAND inherits them.
    fn drop(&mut self) {
        for (signal, before) in self.first_process.drain(..) {
            // SAFETY: an action that was installed before is valid.
            let _ = unsafe { sigaction(signal, &before) };
        }
        if let Some(mut alarm) = self.alarm.take() {
            // A last alarm may be pending, and must not reach whoever reads signals next: setting the
            // disposition to ignore discards it.
            let _ = alarm.disarm();
            let ignore = SigAction::new(SigHandler::SigIgn, SaFlags::empty(), SigSet::empty());
            // SAFETY: neither action is a function of ours that could be left dangling.
            let _ = unsafe { sigaction(Signal::SIGALRM, &ignore) };
            // SAFETY: as above.
            let _ = unsafe { sigaction(Signal::SIGALRM, &alarm.before) };
        }
    }
}

/// A short pause in the middle of an operation, signals blocked.
pub fn pause(for_ms: u64) {
    if !super::hook::is_scheduled() {
        std::thread::sleep(Duration::from_millis(for_ms));
    }
}
