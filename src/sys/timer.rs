//! One descriptor to wait on: signals, and a point in time on the boot clock.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use nix::Result;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};

use super::clock::boot_ms;
use super::signal::Signals;

/// Waits for signals or for a point in time.
///
/// The first wait is an ordinary poll with a time-out: most commands end within it. A command that lives
/// longer gets a timer on the boot clock, which also fires at once when a suspended host resumes. It is set for
/// deadlines only: what comes every second is the time-out, and costs no call of its own.
#[derive(Debug)]
pub struct Waiter {
    timer: Option<TimerFd>,
    /// What the timer is set to.
    set_to_boot_ms: u64,
    is_first: bool,
}

impl Waiter {
    /// Nothing is set up yet.
    pub const fn new() -> Self {
        Waiter { timer: None, set_to_boot_ms: 0, is_first: true }
    }

    /// Returns when a signal has arrived, `also` is readable, or `until_boot_ms` is reached; also when the host
    /// resumes after `deadline_boot_ms`, which is no earlier. `false`: no signal has, so that no child has changed
    /// its state either.
    pub fn wait(
        &mut self,
        signals: &Signals,
        also: Option<BorrowedFd<'_>>,
        until_boot_ms: u64,
        deadline_boot_ms: u64,
    ) -> Result<bool> {
        let left_ms = until_boot_ms.saturating_sub(boot_ms());
        if left_ms == 0 {
            return Ok(true);
        }
        let first_only = std::mem::take(&mut self.is_first);
        let timeout = match first_only || until_boot_ms < deadline_boot_ms {
            true => PollTimeout::try_from(left_ms.min(60_000)).unwrap_or(PollTimeout::MAX),
            false => PollTimeout::NONE,
        };
        let timer = if first_only { None } else { Some(self.set(deadline_boot_ms)?.as_fd()) };
        let signal = signals.as_fd();
        let (second, third) = (timer.or(also), timer.and(also));
        let mut all = [Some(signal), second, third]
            .map(|descriptor| PollFd::new(descriptor.unwrap_or(signal), PollFlags::POLLIN));
        let used = 1 + usize::from(second.is_some()) + usize::from(third.is_some());
        match poll(&mut all[..used], timeout) {
            Ok(_) => Ok(all[0].any().unwrap_or(true)),
            Err(Errno::EINTR) => Ok(true),
            Err(errno) => Err(errno),
        }
    }

    /// Returns when a signal has arrived, or after `for_ms`.
    pub fn wait_briefly(signals: &Signals, for_ms: u16) {
        let _ = poll(&mut [PollFd::new(signals.as_fd(), PollFlags::POLLIN)], for_ms);
    }

    fn set(&mut self, until_boot_ms: u64) -> Result<&TimerFd> {
        if self.timer.is_none() {
            let flags = TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK;
            self.timer = Some(TimerFd::new(ClockId::CLOCK_BOOTTIME, flags)?);
        }
        let timer = self.timer.as_ref().ok_or(Errno::EBADF)?;
        if self.set_to_boot_ms != until_boot_ms {
            let at = TimeSpec::from_duration(Duration::from_millis(until_boot_ms.max(1)));
            // Setting it anew also forgets an expiry that was not read.
            timer.set(Expiration::OneShot(at), TimerSetTimeFlags::TFD_TIMER_ABSTIME)?;
            self.set_to_boot_ms = until_boot_ms;
        }
        Ok(timer)
    }
}

impl Default for Waiter {
    fn default() -> Self {
        Waiter::new()
    }
}
