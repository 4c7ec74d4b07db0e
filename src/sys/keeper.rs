//! A process that stays behind to watch another one.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::path::Path;
use std::time::Duration;

use nix::Result;
use nix::errno::Errno;
use nix::fcntl::{FdFlag, OFlag, open};
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use nix::sys::stat::Mode;
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use nix::unistd::{ForkResult, chdir, fork, setsid};

use super::file::File;
use super::process::{Pidfd, Stat};

/// A process that is watched until it ends. Its descriptor names this one process: an exec does not
/// change it, and another that is given the same pid later is another.
#[derive(Debug)]
pub struct Watched {
    /// Its pid.
    pub pid: i32,
    /// What /proc said of it.
    pub stat: Stat,
    process: Pidfd,
}

/// Why a process cannot be watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotWatched {
    /// The system says so. ESRCH: there is none, or it has ended already.
    Refused(Errno),
    /// It is there, but where /proc is not mounted, or hides it, nothing tells since when.
    Unseen,
}

impl Watched {
    /// The process that has this pid now.
    pub fn open(pid: i32) -> std::result::Result<Self, NotWatched> {
        let process = Pidfd::open(pid).map_err(NotWatched::Refused)?;
        // In this order: if the process has not ended after its start time was read, that was its own.
        let stat = Stat::of(pid);
        if has_ended(&process) {
            return Err(NotWatched::Refused(Errno::ESRCH));
        }
        Ok(Watched { pid, stat: stat.ok_or(NotWatched::Unseen)?, process })
    }

    /// Whether it has ended, all its threads included.
    pub fn has_ended(&self) -> bool {
        has_ended(&self.process)
    }
}

fn has_ended(process: &Pidfd) -> bool {
    let mut process = [PollFd::new(process.fd().as_fd(), PollFlags::POLLIN)];
    matches!(poll(&mut process, PollTimeout::ZERO), Ok(ready) if ready > 0)
}

/// Which side of a fork we are on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The caller's: it goes on and exits, and nobody has to wait for the other.
    Caller,
    /// The keeper's.
    Keeper,
}

/// Splits a keeper off: a child in a session of its own, without terminal, working directory or any
/// descriptor of the caller's, so that it holds nothing up but what it keeps.
pub fn split_off() -> Result<Side> {
    // Had before the fork: from there on nothing may fail.
    let null = open("/dev/null", OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty())?;
    // SAFETY: the lookout, if there was a wait, makes its system calls itself. Threads that wait for a lock
    // service may have locked something: the child leaves all of it alone (`Held::after_fork`), but for the
    // allocator, which the C library makes good in the child. So the child may go on like any process.
    if let ForkResult::Parent { .. } = unsafe { fork() }? {
        return Ok(Side::Caller);
    }
    let _ = setsid();
    let _ = chdir("/");
    for fd in inherited_descriptors() {
        // SAFETY: what came through an exec is not close-on-exec, and what this program opens is: this
        // one is the caller's, and nothing here owns it.
        unsafe { libc::close(fd) };
    }
    for standard in 0..=2 {
        // SAFETY: dup2 takes two numbers; nothing in this program owns the descriptors 0 to 2.
        unsafe { libc::dup2(null.as_raw_fd(), standard) };
    }
    Ok(Side::Keeper)
}

/// The descriptors that came through the exec: those that are not closed by the next one.
fn inherited_descriptors() -> Vec<RawFd> {
    const WITHOUT_PROC: RawFd = 1024;
    let listed = std::fs::read_dir("/proc/self/fd")
        .map(|entries| entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect());
    let open: Vec<RawFd> = listed.unwrap_or_else(|_| (0..WITHOUT_PROC).collect());
    let is_inherited = |fd: &RawFd| {
        // SAFETY: F_GETFD only asks, and says EBADF for a number that is not open.
        let flags = unsafe { libc::fcntl(*fd, libc::F_GETFD) };
        flags >= 0 && !FdFlag::from_bits_truncate(flags).contains(FdFlag::FD_CLOEXEC)
    };
    open.into_iter().filter(is_inherited).collect()
}

/// Tells at once when a file is renamed or removed, by whatever process of this host. Not for those who
/// wait for a lock: closing it costs a grace period of the kernel's, up to 20 ms.
#[derive(Debug)]
pub struct Alarm(Inotify);

impl Alarm {
    /// For the file itself, wherever it is.
    pub fn on(file: &File) -> Result<Self> {
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
        let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
        // Removal shows as a change of attributes while a descriptor keeps the file. So do our own
        // renewals: they cost a look each.
        let changes = AddWatchFlags::IN_MOVE_SELF | AddWatchFlags::IN_ATTRIB | AddWatchFlags::IN_DELETE_SELF;
        inotify.add_watch(Path::new(&path), changes)?;
        Ok(Alarm(inotify))
    }

    fn forget(&self) {
        while self.0.read_events().is_ok_and(|events| !events.is_empty()) {}
    }
}

/// What ended a keeper's wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Woken {
    /// The watched process has ended.
    ProcessEnded,
    /// The file was touched, moved or removed; or the time has come.
    Look,
}

/// A keeper's sleep.
#[derive(Debug)]
pub struct Vigil<'a> {
    process: &'a Watched,
    alarm: Option<Alarm>,
    timer: TimerFd,
}

impl<'a> Vigil<'a> {
    /// Over a process, and over a file where this host can tell.
    pub fn new(process: &'a Watched, alarm: Option<Alarm>) -> Result<Self> {
        let flags = TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK;
        // On the boot clock: it also fires at once when a suspended host resumes.
        Ok(Vigil { process, alarm, timer: TimerFd::new(ClockId::CLOCK_BOOTTIME, flags)? })
    }

    /// Sleeps until something happens or `also` is readable, at most until `until_boot_ms`.
    pub fn sleep(&self, also: Option<BorrowedFd<'_>>, until_boot_ms: u64) -> Woken {
        let at = TimeSpec::from_duration(Duration::from_millis(until_boot_ms.max(1)));
        let set = self.timer.set(Expiration::OneShot(at), TimerSetTimeFlags::TFD_TIMER_ABSTIME);
        let readable = |fd| PollFd::new(fd, PollFlags::POLLIN);
        let mut wait = vec![readable(self.process.process.fd().as_fd()), readable(self.timer.as_fd())];
        wait.extend(also.map(readable));
        wait.extend(self.alarm.as_ref().map(|alarm| readable(alarm.0.as_fd())));
        // Never without an end, should the timer not have been set.
        let _ = poll(&mut wait, PollTimeout::from(if set.is_ok() { 60_000_u16 } else { 500 }));
        if let Some(alarm) = &self.alarm {
            alarm.forget();
        }
        if self.process.has_ended() { Woken::ProcessEnded } else { Woken::Look }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_lives_is_watched_and_one_that_does_not_exist_is_not_found() {
        let me = i32::try_from(std::process::id()).unwrap();
        let watched = Watched::open(me).unwrap();
        assert!(!watched.has_ended());
        assert_eq!(watched.stat.started, Stat::of(me).unwrap().started);
        assert_eq!(Watched::open(i32::MAX).map(|watched| watched.pid), Err(NotWatched::Refused(Errno::ESRCH)));
    }

    #[test]
    fn a_process_that_has_ended_is_not_watched_though_nobody_has_reaped_it() {
        let mut child = std::process::Command::new("true").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let watched = Pidfd::open(pid).unwrap();
        let mut ended = [PollFd::new(watched.fd().as_fd(), PollFlags::POLLIN)];
        assert_eq!(poll(&mut ended, PollTimeout::from(40_000_u16)), Ok(1));
        assert_eq!(Watched::open(pid).map(|watched| watched.pid), Err(NotWatched::Refused(Errno::ESRCH)));
        child.wait().unwrap();
    }
}
