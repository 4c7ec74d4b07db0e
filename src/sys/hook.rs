//! The tests' hold on the protocol: a hook around every system call, and switches that leave one step
//! out. Only in builds with the `switches` feature; otherwise everything here is empty.

/// A step of the protocol that a negative control can leave out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Step {
    /// Exclusive creation of the lock file: the arbiter of the grant.
    Exclusive,
    /// The holder's flock on the new file.
    Guard,
    /// The ender's flock, and its veto.
    Veto,
    /// Verification after the claim: still this epoch, still stale.
    Verify,
    /// A holder's look at its slot when it renews.
    SlotCheck,
    /// The look at both slots before a grant counts.
    GrantCheck,
    /// Release by rename to the slot (left out: by unlink).
    ReleaseBySlot,
    /// Exclusive creation of the claim file in a slot.
    Claim,
    /// RENAME_NOREPLACE on the ender's rename.
    Noreplace,
    /// A reclaimer's look at the guard of the quarantined file.
    ReclaimGuard,
    /// A reclaimer's look whether the epoch at the lock path is the slot's.
    ReclaimLive,
    /// The reclaim age (left out: every slot is old enough).
    ReclaimAge,
    /// Identity and nonce before a release or a renewal.
    Identity,
    /// Renewal through the descriptor made at the grant (left out: by path).
    Descriptor,
    /// A waiter does not take the guard of a newborn lock.
    Newborn,
    /// The seal on the slot that the epoch had as a blank lock.
    Seal,
    /// The shared lock on a slot that an ender has entered.
    Enter,
    /// The guard that a holder without one takes for its last look before the grant and for its release.
    ReleaseGuard,
    /// Exclusive creation of a reserved number's marker.
    Mark,
    /// An attempt at a lock service that a signal interrupts takes back what it may leave behind.
    TakeBack,
    /// Renewals that may hang are errands of a thread, so that the supervisor does not hang with them.
    Errand,
    /// The kernel takes the order back that a process waits for that is to become COMMAND, when the wrapper dies.
    Recall,
}

/// All steps, with the names used in `WITHLOCK_LEAVE_OUT`.
pub const STEPS: &[(Step, &str)] = &[
    (Step::Exclusive, "exclusive"),
    (Step::Guard, "guard"),
    (Step::Veto, "veto"),
    (Step::Verify, "verify"),
    (Step::SlotCheck, "slot-check"),
    (Step::GrantCheck, "grant-check"),
    (Step::ReleaseBySlot, "release-by-slot"),
    (Step::Claim, "claim"),
    (Step::Noreplace, "noreplace"),
    (Step::ReclaimGuard, "reclaim-guard"),
    (Step::ReclaimLive, "reclaim-live"),
    (Step::ReclaimAge, "reclaim-age"),
    (Step::Identity, "identity"),
    (Step::Descriptor, "descriptor"),
    (Step::Newborn, "newborn"),
    (Step::Seal, "seal"),
    (Step::Enter, "enter"),
    (Step::ReleaseGuard, "release-guard"),
    (Step::Mark, "mark"),
    (Step::TakeBack, "take-back"),
    (Step::Errand, "errand"),
    (Step::Recall, "recall"),
];

#[cfg(not(feature = "switches"))]
mod off {
    use std::ffi::OsStr;
    use std::os::fd::RawFd;

    use nix::Result;

    use super::Step;
    use crate::lease::Stamp;

    #[inline(always)]
    pub(crate) fn before(_call: &'static str, _name: &OsStr) -> Result<()> {
        Ok(())
    }

    /// Anything: nobody looks at outcomes here.
    pub(crate) trait Observed {}

    impl<T> Observed for T {}

    #[inline(always)]
    pub(crate) fn around<T>(
        _call: &'static str,
        _fd: RawFd,
        _name: &OsStr,
        perform: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        perform()
    }

    #[inline(always)]
    pub(crate) fn left_out(_step: Step) -> bool {
        false
    }

    #[inline(always)]
    pub(crate) fn boot_offset_ms() -> u64 {
        0
    }

    #[inline(always)]
    pub(crate) fn wall_offset_seconds() -> i64 {
        0
    }

    #[inline(always)]
    pub(crate) fn now() -> Option<super::Now> {
        None
    }

    #[inline(always)]
    pub(crate) fn stamped(_fd: RawFd) {}

    #[inline(always)]
    pub(crate) fn stamped_at(_fd: RawFd, _name: &OsStr) {}

    #[inline(always)]
    pub(crate) fn file_system_time() -> Option<Stamp> {
        None
    }

    #[inline(always)]
    pub(crate) fn random() -> Option<[u8; 16]> {
        None
    }

    #[inline(always)]
    pub(crate) fn host() -> Option<&'static str> {
        None
    }

    #[inline(always)]
    pub(crate) fn flock(_fd: RawFd, _lock: bool) -> Option<bool> {
        None
    }

    #[inline(always)]
    pub(crate) fn pause(_for_ms: u64) {}

    #[inline(always)]
    pub(crate) fn is_scheduled() -> bool {
        false
    }
}

#[cfg(feature = "switches")]
mod on {
    use std::cell::{Cell, RefCell};
    use std::ffi::{OsStr, OsString};
    use std::mem::ManuallyDrop;
    use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
    use std::rc::Rc;
    use std::sync::OnceLock;

    use nix::Result;
    use nix::errno::Errno;
    use nix::libc;
    use nix::sys::stat::{UtimensatFlags, fstat, futimens, utimensat};
    use nix::sys::time::TimeSpec;

    use super::{Now, STEPS, Step};
    use crate::lease::Stamp;
    use crate::sys::file::{Stat, Try, is_local};

    /// A system call of the protocol.
    #[derive(Clone, Copy, Debug)]
    pub struct Call<'a> {
        /// Its name.
        pub call: &'static str,
        /// The file name it is about; empty where the descriptor says it all.
        pub name: &'a OsStr,
        /// The directory in which the name is looked up, or the file; -1 where there is none.
        pub fd: RawFd,
    }

    /// What a system call came to, as its caller sees it.
    #[derive(Clone, Copy, Debug)]
    pub enum Seen<'a> {
        /// That it succeeded.
        Done,
        /// A descriptor, and what it leads to.
        Opened(RawFd, Option<Stat>),
        /// Attributes; `None`: nothing is there.
        Stat(Option<&'a Stat>),
        /// Content.
        Content(&'a [u8]),
        /// The names in a directory.
        Names(&'a [OsString]),
        /// The answer to a flock.
        Guard(Try),
        /// A time stamp.
        Stamp(Stamp),
    }

    /// What a test does around the system calls of one thread.
    pub trait Hook {
        /// Before a call. May wait, fail the call, or unwind: the thread "dies".
        fn before(&self, call: &Call<'_>) -> Result<()>;
        /// After a call that was performed.
        fn after(&self, _call: &Call<'_>, _outcome: std::result::Result<Seen<'_>, Errno>) {}
        /// A descriptor of a file is about to be closed, its guard with it.
        fn closing(&self, _fd: RawFd) {}
        /// The clocks of this thread, and of the file system as this thread's calls stamp it.
        fn now(&self) -> Option<Now> {
            None
        }
        /// The thread would sleep in the middle of an operation.
        fn pause(&self, _for_ms: u64) {}
        /// Random bytes.
        fn random(&self) -> Option<[u8; 16]> {
            None
        }
        /// The host this thread runs on, of several that share a file system but not its locks.
        fn host(&self) -> Option<&'static str> {
            None
        }
        /// The answer to a flock or unlock in the place of the kernel: whether it is granted.
        fn flock(&self, _fd: RawFd, _lock: bool) -> Option<bool> {
            None
        }
    }

    /// A hook that is one closure.
    struct Before<F>(RefCell<F>);

    impl<F: FnMut(&'static str, &OsStr) -> Result<()>> Hook for Before<F> {
        fn before(&self, call: &Call<'_>) -> Result<()> {
            // A hook may itself look at files.
            self.0.try_borrow_mut().map_or(Ok(()), |mut hook| hook(call.call, call.name))
        }
    }

    thread_local! {
        // Without a destructor: registering one needs the C library's start.
        static HOOK: ManuallyDrop<RefCell<Option<Rc<dyn Hook>>>> = const { ManuallyDrop::new(RefCell::new(None)) };
        static LEFT_OUT: Cell<u32> = const { Cell::new(0) };
        static BOOT_OFFSET_MS: Cell<u64> = const { Cell::new(0) };
    }

    /// Sets this thread's hook: called before every system call of the protocol, with the call's name
    /// and the file name it is about. It may wait, fail the call, or unwind (the thread "dies").
    pub fn set(hook: impl FnMut(&'static str, &OsStr) -> Result<()> + 'static) {
        install(Rc::new(Before(RefCell::new(hook))));
    }

    /// Sets this thread's hook, one with more to say than [`set`]'s.
    pub fn install(hook: Rc<dyn Hook>) {
        HOOK.with(|cell| *cell.borrow_mut() = Some(hook));
    }

    /// Takes this thread's hook away.
    pub fn clear() {
        HOOK.with(|cell| *cell.borrow_mut() = None);
    }

    /// Leaves steps out, in this thread only.
    pub fn leave_out(steps: &[Step]) {
        LEFT_OUT.with(|cell| cell.set(steps.iter().fold(0, |bits, step| bits | bit(*step))));
    }

    /// Moves this thread's boot clock forward.
    pub fn advance_boot_clock(by_ms: u64) {
        BOOT_OFFSET_MS.with(|cell| cell.set(cell.get() + by_ms));
    }

    /// At the start of a thread: gives it descriptors, a umask and a working directory of its own.
    pub fn stand_alone() -> Result<()> {
        // Without those that other threads have open now: here they would stay open when those close them.
        const FIRST: libc::c_uint = 3;
        // SAFETY: this thread gets a table of its own in which nothing but the standard descriptors is
        // open; the other threads keep theirs. It must own no descriptor yet, as at its start.
        let closed = unsafe {
            libc::syscall(libc::SYS_close_range, FIRST, libc::c_uint::MAX, libc::CLOSE_RANGE_UNSHARE as libc::c_uint)
        };
        Errno::result(closed)?;
        // SAFETY: from here on this thread has its own umask and working directory; no memory is concerned.
        Errno::result(unsafe { libc::unshare(libc::CLONE_FS) }).map(drop)
    }

    const fn bit(step: Step) -> u32 {
        1 << step as u8
    }

    fn from_environment() -> u32 {
        static BITS: OnceLock<u32> = OnceLock::new();
        *BITS.get_or_init(|| {
            let named = crate::sys::process::variable("WITHLOCK_LEAVE_OUT").unwrap_or_default();
            let named = named.to_string_lossy();
            let bit_of = |name: &str| STEPS.iter().find(|(_, known)| *known == name).map_or(0, |(step, _)| bit(*step));
            named.split(',').fold(0, |bits, name| bits | bit_of(name))
        })
    }

    fn hook() -> Option<Rc<dyn Hook>> {
        HOOK.with(|cell| cell.borrow().clone())
    }

    pub(crate) fn before(call: &'static str, name: &OsStr) -> Result<()> {
        hook().map_or(Ok(()), |hook| hook.before(&Call { call, name, fd: -1 }))
    }

    /// What an outcome looks like from outside.
    pub(crate) trait Observed {
        fn seen(&self) -> Seen<'_>;
    }

    impl Observed for () {
        fn seen(&self) -> Seen<'_> {
            Seen::Done
        }
    }

    impl Observed for Stat {
        fn seen(&self) -> Seen<'_> {
            Seen::Stat(Some(self))
        }
    }

    impl Observed for Option<Stat> {
        fn seen(&self) -> Seen<'_> {
            Seen::Stat(self.as_ref())
        }
    }

    impl Observed for Vec<u8> {
        fn seen(&self) -> Seen<'_> {
            Seen::Content(self)
        }
    }

    impl Observed for Vec<OsString> {
        fn seen(&self) -> Seen<'_> {
            Seen::Names(self)
        }
    }

    impl Observed for Try {
        fn seen(&self) -> Seen<'_> {
            Seen::Guard(*self)
        }
    }

    impl Observed for Stamp {
        fn seen(&self) -> Seen<'_> {
            Seen::Stamp(*self)
        }
    }

    impl Observed for crate::sys::file::File {
        fn seen(&self) -> Seen<'_> {
            opened(self.as_fd())
        }
    }

    impl Observed for crate::sys::file::Dir {
        fn seen(&self) -> Seen<'_> {
            opened(self.as_fd())
        }
    }

    fn opened(fd: BorrowedFd<'_>) -> Seen<'_> {
        Seen::Opened(fd.as_raw_fd(), fstat(fd).ok().map(Stat::from))
    }

    pub(crate) fn around<T: Observed>(
        call: &'static str,
        fd: RawFd,
        name: &OsStr,
        perform: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let Some(hook) = hook() else { return perform() };
        let call = Call { call, name, fd };
        hook.before(&call)?;
        let outcome = perform();
        hook.after(&call, outcome.as_ref().map(Observed::seen).map_err(|errno| *errno));
        outcome
    }

    /// Whether this step is left out.
    pub fn left_out(step: Step) -> bool {
        (LEFT_OUT.with(Cell::get) | from_environment()) & bit(step) != 0
    }

    pub(crate) fn boot_offset_ms() -> u64 {
        BOOT_OFFSET_MS.with(Cell::get)
    }

    /// The real program under a wall clock that steps: by so much it is off now, if the file that this
    /// variable names says so.
    pub(crate) fn wall_offset_seconds() -> i64 {
        static CLOCK: OnceLock<Option<OsString>> = OnceLock::new();
        let clock = CLOCK.get_or_init(|| crate::sys::process::variable("WITHLOCK_WALL_CLOCK"));
        let text = clock.as_ref().and_then(|path| std::fs::read_to_string(path).ok());
        text.and_then(|text| text.trim().parse().ok()).unwrap_or(0)
    }

    pub(crate) fn now() -> Option<Now> {
        hook().and_then(|hook| hook.now())
    }

    /// What to set the time stamp of a file to that the kernel has just stamped, if not to the kernel's time:
    /// a local file system stamps by the wall clock of this host, others by their server's.
    fn restamp(fd: BorrowedFd<'_>) -> Option<TimeSpec> {
        if let Some(now) = now() {
            return Some(spec(now.wall));
        }
        let is_off = wall_offset_seconds() != 0;
        (is_off && is_local(fd)).then(|| spec(crate::sys::clock::wall()))
    }

    pub(crate) fn file_system_time() -> Option<Stamp> {
        now().map(|now| now.wall)
    }

    fn spec(stamp: Stamp) -> TimeSpec {
        let part = |ns: i128| i64::try_from(ns).unwrap_or(i64::MAX);
        TimeSpec::new(part(stamp.ns().div_euclid(1_000_000_000)), part(stamp.ns().rem_euclid(1_000_000_000)))
    }

    /// The kernel has stamped an open file or directory: by the clock of the test, if that has one.
    pub(crate) fn stamped(fd: RawFd) {
        // SAFETY: the caller's descriptor is open throughout.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let Some(time) = restamp(fd) else { return };
        // A descriptor that is only a place to look names up in cannot be stamped, and need not be.
        let _ = futimens(fd, &time, &time);
    }

    /// The kernel has stamped what stands at a name.
    pub(crate) fn stamped_at(fd: RawFd, name: &OsStr) {
        // SAFETY: the caller's descriptor is open throughout.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let Some(time) = restamp(fd) else { return };
        let _ = utimensat(fd, name, &time, &time, UtimensatFlags::NoFollowSymlink);
    }

    pub(crate) fn random() -> Option<[u8; 16]> {
        hook().and_then(|hook| hook.random())
    }

    pub(crate) fn host() -> Option<&'static str> {
        hook().and_then(|hook| hook.host())
    }

    pub(crate) fn flock(fd: RawFd, lock: bool) -> Option<bool> {
        hook().and_then(|hook| hook.flock(fd, lock))
    }

    pub(crate) fn pause(for_ms: u64) {
        if let Some(hook) = hook() {
            hook.pause(for_ms);
        }
    }

    pub(crate) fn closing(fd: RawFd) {
        if let Some(hook) = hook() {
            hook.closing(fd);
        }
    }

    pub(crate) fn is_scheduled() -> bool {
        hook().is_some()
    }
}

/// Clock readings that a test makes up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Now {
    /// The boot clock.
    pub boot_ms: u64,
    /// The wall clock of the host and of the file system.
    pub wall: crate::lease::Stamp,
}

#[cfg(not(feature = "switches"))]
pub(crate) use off::{
    Observed, around, before, boot_offset_ms, file_system_time, flock, host, is_scheduled, left_out, now, pause,
    random, stamped, stamped_at, wall_offset_seconds,
};
#[cfg(feature = "switches")]
pub use on::{Call, Hook, Seen, advance_boot_clock, clear, install, leave_out, left_out, set, stand_alone};
#[cfg(feature = "switches")]
pub(crate) use on::{
    Observed, around, before, boot_offset_ms, closing, file_system_time, flock, host, is_scheduled, now, pause, random,
    stamped, stamped_at, wall_offset_seconds,
};
