//! Job control where COMMAND has left our process group: shells do, and timeout(1), and what runs its
//! children in the foreground itself.

use std::os::fd::OwnedFd;

use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, getpgid, getpgrp, tcgetpgrp, tcsetpgrp};

/// The process group of a child, if it is another than ours.
fn own_group(pid: i32) -> Option<Pid> {
    getpgid(Some(Pid::from_raw(pid))).ok().filter(|group| *group != getpgrp())
}

/// Whether what reaches our process group reaches this child as well.
pub fn is_in_our_group(pid: i32) -> bool {
    own_group(pid).is_none()
}

/// The terminal that controls this session.
fn terminal() -> Option<OwnedFd> {
    open("/dev/tty", OFlag::O_RDONLY | OFlag::O_NOCTTY | OFlag::O_CLOEXEC, Mode::empty()).ok()
}

/// Whether the terminal is our process group's.
pub fn has_terminal() -> bool {
    terminal().is_some_and(|terminal| tcgetpgrp(terminal) == Ok(getpgrp()))
}

/// A child's process group, not ours, that has the terminal.
#[derive(Clone, Copy, Debug)]
pub struct Foreground(Pid);

impl Foreground {
    /// The group of this child, if it is such a one.
    pub fn of(pid: i32) -> Option<Self> {
        let group = own_group(pid)?;
        (tcgetpgrp(terminal()?) == Ok(group)).then_some(Foreground(group))
    }

    /// Gives the terminal to it, if it was given to us: `fg` knows of our group only. Else it is somebody
    /// else's: of whoever continued us in the background.
    pub fn restore(self) {
        if let Some(terminal) = terminal()
            && tcgetpgrp(&terminal) == Ok(getpgrp())
        {
            // We are in the foreground, and SIGTTOU is blocked: this cannot stop us.
            let _ = tcsetpgrp(&terminal, self.0);
        }
    }
}
