//! Signals: blocked before the lock exists, read from a descriptor, handed on.

use std::os::fd::{AsFd, BorrowedFd};

use nix::Result;
use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, SigmaskHow, Signal, sigaction, sigprocmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use crate::machine::Received;

/// What this process was started with and has changed for itself. COMMAND is given it back.
#[derive(Clone, Copy, Debug)]
pub struct OnEntry {
    mask: SigSet,
    ignores_child: bool,
}

/// Blocks every signal that can be blocked. From here on no signal ends the process between two
/// statements; this comes before the lock file exists, so that none can leak it.
pub fn block_all() -> Result<OnEntry> {
    let mut mask = SigSet::empty();
    sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::all()), Some(&mut mask))?;
    Ok(OnEntry { mask, ignores_child: false })
}

impl OnEntry {
    /// Sets the mask to what it was.
    pub fn restore(&self) -> Result<()> {
        sigprocmask(SigmaskHow::SIG_SETMASK, Some(&self.mask), None)
    }

    pub(super) fn mask(&self) -> &SigSet {
        &self.mask
    }

    /// Makes sure that a child's status is never lost: with SIGCHLD ignored the kernel would throw it away.
    pub fn receive_child_statuses(&mut self) -> Result<()> {
        let default = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
        // SAFETY: the default action is no function of ours.
        let before = unsafe { sigaction(Signal::SIGCHLD, &default) }?;
        self.ignores_child |= matches!(before.handler(), SigHandler::SigIgn);
        Ok(())
    }

    /// Undoes [`OnEntry::receive_child_statuses`], for a start that is begun anew.
    pub fn restore_child_statuses(&self) {
        if self.ignores_child {
            let ignore = SigAction::new(SigHandler::SigIgn, SaFlags::empty(), SigSet::empty());
            // SAFETY: to ignore is no function of ours.
            let _ = unsafe { sigaction(Signal::SIGCHLD, &ignore) };
        }
    }

    /// What the terminal has sent since signals were blocked, right before there is a COMMAND that could have
    /// been sent it: a signal that ends the process; one that stops it has done so when this returns.
    pub fn ended_by_terminal(&self) -> Option<i32> {
        let mut pending = std::mem::MaybeUninit::<libc::sigset_t>::zeroed();
        // SAFETY: the kernel writes the set, which was empty before.
        let pending = unsafe {
            libc::sigpending(pending.as_mut_ptr());
            SigSet::from_sigset_t_unchecked(pending.assume_init())
        };
        let acts =
            |signal: &Signal| pending.contains(*signal) && !self.mask.contains(*signal) && !is_ignored(*signal as i32);
        if acts(&Signal::SIGTSTP) {
            stop_self(libc::SIGTSTP);
        }
        [Signal::SIGINT, Signal::SIGQUIT, Signal::SIGHUP].into_iter().find(acts).map(|signal| signal as i32)
    }

    /// SIGCHLD was ignored.
    pub(super) fn ignores_child(&self) -> bool {
        self.ignores_child
    }

    /// The mask under which a waiter sleeps: signals act as they did on entry. Only SIGPIPE stays
    /// blocked, so that a line that nobody reads does not end the wait, and the alarm gets through.
    pub(super) fn while_waiting(&self) -> SigSet {
        let mut mask = self.mask;
        mask.add(Signal::SIGPIPE);
        mask.remove(Signal::SIGALRM);
        mask
    }
}

/// Signals as a descriptor.
#[derive(Debug)]
pub struct Signals(SignalFd);

impl Signals {
    /// All signals, which must be blocked.
    pub fn open() -> Result<Self> {
        SignalFd::with_flags(&SigSet::all(), SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK).map(Signals)
    }

    /// The next one that has arrived and is not ignored.
    pub fn next(&self) -> Result<Option<Received>> {
        while let Some(info) = self.0.read_signal()? {
            let signal = i32::try_from(info.ssi_signo).unwrap_or(0);
            // A signal that is both blocked and ignored still reaches the descriptor. Asked only now:
            // asking for all of them beforehand would cost more than all the rest of the start.
            if !is_ignored(signal) {
                return Ok(Some(Received {
                    signal,
                    by_kernel: info.ssi_code == libc::SI_KERNEL,
                    by_self: info.ssi_pid == std::process::id(),
                }));
            }
        }
        Ok(None)
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Tells that a signal has arrived which will end this process once it is let through: for what must be
/// tidied up before. It stays pending.
#[derive(Debug)]
pub struct Fatal {
    arrived: SignalFd,
    set: SigSet,
}

impl Fatal {
    /// Those that were neither blocked nor ignored on entry, and whose default action ends a process.
    pub fn open(on_entry: &OnEntry) -> Result<Self> {
        let mut fatal = SigSet::all();
        for signal in Signal::iterator() {
            let harmless = matches!(
                signal,
                Signal::SIGCHLD
                    | Signal::SIGCONT
                    | Signal::SIGURG
                    | Signal::SIGWINCH
                    | Signal::SIGTSTP
                    | Signal::SIGTTIN
                    | Signal::SIGTTOU
            );
            if harmless || on_entry.while_waiting().contains(signal) || is_ignored(signal as i32) {
                fatal.remove(signal);
            }
        }
        let arrived = SignalFd::with_flags(&fatal, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
        Ok(Fatal { arrived, set: fatal })
    }

    /// Waits until one has arrived (`true`) or `other` is readable; for at most `for_ms`.
    pub fn or_readable(&self, other: BorrowedFd<'_>, for_ms: u64) -> bool {
        let timeout = PollTimeout::try_from(for_ms.min(60_000)).unwrap_or(PollTimeout::ZERO);
        let mut both = [PollFd::new(self.arrived.as_fd(), PollFlags::POLLIN), PollFd::new(other, PollFlags::POLLIN)];
        poll(&mut both, timeout).is_ok_and(|ready| ready > 0) && both[0].any().unwrap_or(false)
    }

    /// Those that it tells of.
    pub(super) fn set(&self) -> SigSet {
        self.set
    }
}

impl AsFd for Fatal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.arrived.as_fd()
    }
}

/// Whether the disposition of `signal` is to ignore it.
pub fn is_ignored(signal: i32) -> bool {
    // SAFETY: an all-zero sigaction is a valid value for the kernel to overwrite.
    let mut current: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: a null new action only asks; `current` outlives the call.
    let asked = unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut current) };
    asked == 0 && current.sa_sigaction == libc::SIG_IGN
}

/// A write that fails may also send a signal. It is blocked, and must not reach whoever reads or unblocks signals later:
/// not COMMAND, which did not write, and not ourselves, who know already. (Where it is not blocked it has acted.)
pub(super) fn taking_back<T>(mut write: impl FnMut() -> Result<T>) -> Result<T> {
    loop {
        match write() {
            Err(Errno::EINTR) => {}
            Err(errno) => {
                match errno {
                    Errno::EPIPE => take_back(Signal::SIGPIPE),
                    Errno::EFBIG => take_back(Signal::SIGXFSZ),
                    _ => {}
                }
                return Err(errno);
            }
            written => return written,
        }
    }
}

/// Takes a pending signal away.
fn take_back(signal: Signal) {
    let mut only = SigSet::empty();
    only.add(signal);
    let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the set and the time outlive the call, and no information about the signal is asked for.
    unsafe { libc::sigtimedwait(only.as_ref(), std::ptr::null_mut(), &raw const at_once) };
}

/// Stops this process by the default action of a stop signal, unblocked and raised: never by SIGSTOP,
/// which would hang a process group that nobody can continue. Returns when it is continued, or at once
/// where the kernel does not stop orphans.
pub fn stop_self(signal: i32) {
    let Ok(signal) = Signal::try_from(signal) else { return };
    let mut only = SigSet::empty();
    only.add(signal);
    let _ = nix::sys::signal::raise(signal);
    let _ = sigprocmask(SigmaskHow::SIG_UNBLOCK, Some(&only), None);
    let _ = sigprocmask(SigmaskHow::SIG_BLOCK, Some(&only), None);
}

/// The machine's numbers are this platform's.
const _: () = {
    use crate::machine::number;
    assert!(number::HUP == libc::SIGHUP && number::INT == libc::SIGINT && number::QUIT == libc::SIGQUIT);
    assert!(number::KILL == libc::SIGKILL && number::PIPE == libc::SIGPIPE && number::TERM == libc::SIGTERM);
    assert!(number::CHLD == libc::SIGCHLD && number::CONT == libc::SIGCONT && number::TSTP == libc::SIGTSTP);
    assert!(number::TTIN == libc::SIGTTIN && number::TTOU == libc::SIGTTOU && number::WINCH == libc::SIGWINCH);
    assert!(number::STOP == libc::SIGSTOP && number::XFSZ == libc::SIGXFSZ);
};
