//! A second thread that keeps watch while the first sleeps on a guard.
//!
//! The one who sleeps must not be woken for a mere look: the kernel keeps those who wait for one guard
//! in a chain, and whoever leaves the chain to come back wakes all behind. A hundred waiters that each
//! look once a second would wake each other seven thousand times a second. So the look is taken here,
//! and the sleeper is called, by a signal, only when there is something to do.
//!
//! The thread is made without the C library's knowledge, on one small stack, since an ordinary one costs
//! a waiter a tenth more memory. It therefore makes its system calls itself, and touches nothing but the
//! `Post`.

use std::ffi::{CString, c_void};
use std::mem::MaybeUninit;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use nix::Result;
use nix::errno::Errno;
use nix::libc;

use super::futex::{self, By, address};
use super::raw::call;

/// How often the lock is looked at, in milliseconds: the backstop for what no guard tells.
const LOOK_EVERY_MS: u64 = 1_000;
/// How often a sleeper that does not answer is called again, in milliseconds. The first call can fall
/// between its unblocking of signals and its falling asleep.
const CALL_EVERY_MS: u64 = 20;
const STACK_BYTES: usize = 16 * 1024;

/// Nobody is asleep: the sleeper may change the watch.
const OFF: u32 = 0;
/// The sleeper is asleep. It leaves by [`OFF`]; the lookout takes a look by [`BUSY`].
const ON: u32 = 1;
/// The lookout looks, or calls: it alone may act.
const BUSY: u32 = 2;
/// There is something to do, and the sleeper has not answered yet.
const CALLED: u32 = 3;

/// A sleeper was called, and has not heard it yet. The signal itself may not tell who has sent it: where its user has no
/// room for one more in the queue, the kernel delivers it without.
static IS_CALLED: AtomicBool = AtomicBool::new(false);

/// Whether a call has been made that was not heard. It is now.
pub(super) fn hear() -> bool {
    IS_CALLED.swap(false, Ordering::Relaxed)
}

/// A line to be said if the sleep lasts so long.
#[derive(Clone, Debug)]
pub struct Word {
    /// When, by the boot clock.
    pub at_boot_ms: u64,
    /// What.
    pub line: Vec<u8>,
}

/// What is watched for.
#[derive(Debug)]
pub struct Watch {
    /// The lock's name in the lookout's directory.
    pub name: CString,
    /// The lock file that is slept on.
    pub inode: u64,
    /// Its time stamp, in nanoseconds since 1970.
    pub mtime_ns: i128,
    /// When it turns stale unless renewed, by the boot clock. A later stamp moves it.
    pub stale_boot_ms: u64,
    /// When to call the sleeper whatever is found, by the boot clock.
    pub until_boot_ms: u64,
    /// What to say on the way.
    pub word: Option<Word>,
}

/// Where sleeper and lookout meet.
#[derive(Debug)]
struct Post {
    phase: AtomicU32,
    sleeper: i32,
    dir: RawFd,
    watch: Option<Watch>,
    /// Nobody has come to this watch yet.
    is_new: bool,
}

/// The lookout, as the sleeper knows it. There is one for a lock that is waited for, and it stays to the
/// process's end: the thread sleeps for ever when there is nothing to watch.
#[derive(Debug)]
pub struct Lookout {
    post: *mut Post,
}

impl Lookout {
    /// Makes the thread, on watch. All signals must be blocked: the thread keeps that mask.
    ///
    /// It has descriptors of its own, `dir` and the standard ones. Sharing them would make every later
    /// growth of the table, as for the guard's high number, wait for a kernel grace period of some 10 ms.
    ///
    /// The thread is of the batch kind, which never preempts: the first thing it would do is to keep the
    /// sleeper, who made it, from queueing for the guard.
    pub fn post(dir: RawFd, watch: Watch) -> Result<Self> {
        // Not the C library's gettid: the standard library declares that one as perhaps missing, and a
        // static program then goes without.
        // SAFETY: gettid takes nothing.
        let sleeper = i32::try_from(unsafe { call(libc::SYS_gettid, [0; 6]) }).unwrap_or(0);
        let post =
            Box::into_raw(Box::new(Post { phase: AtomicU32::new(ON), sleeper, dir, watch: Some(watch), is_new: true }));
        let stack = Box::leak(Box::<[u8]>::new_uninit_slice(STACK_BYTES));
        let flags = libc::CLONE_VM | libc::CLONE_FS | libc::CLONE_SIGHAND | libc::CLONE_THREAD | libc::CLONE_SYSVSEM;
        // The thread inherits the kind that its maker has at this moment.
        let is_batch = set_kind(libc::SCHED_OTHER, libc::SCHED_BATCH);
        // SAFETY: `keep_watch` never returns and uses only `post`, which is never freed, and the stack,
        // which is leaked for it; it grows down from its aligned end.
        let made = unsafe {
            let top = stack.as_mut_ptr().add(STACK_BYTES);
            let top = top.sub(top.addr() & 15);
            libc::clone(keep_watch, top.cast(), flags, post.cast())
        };
        if is_batch {
            set_kind(libc::SCHED_BATCH, libc::SCHED_OTHER);
        }
        Errno::result(made).map(|_| Lookout { post })
    }

    /// Goes on watch.
    pub fn watch(&mut self, watch: Watch) {
        // SAFETY: in phase OFF the sleeper alone touches the post.
        let post = unsafe { &mut *self.post };
        debug_assert_eq!(post.phase.load(Ordering::Relaxed), OFF);
        post.watch = Some(watch);
        post.is_new = true;
        post.phase.store(ON, Ordering::Release);
        futex::wake(&post.phase, By::Threads);
    }

    /// Whether there is something to do.
    pub fn has_called(&self) -> bool {
        // SAFETY: the phase is atomic and the post is never freed.
        let phase = unsafe { &(*self.post).phase };
        phase.load(Ordering::Acquire) == CALLED
    }

    /// The sleeper is up: goes off watch. After this no more calls come; whether the word was said.
    pub fn relieve(&mut self) -> bool {
        // SAFETY: the phase is atomic and the post is never freed.
        let phase = unsafe { &(*self.post).phase };
        while phase.compare_exchange(ON, OFF, Ordering::AcqRel, Ordering::Acquire).is_err()
            && phase.compare_exchange(CALLED, OFF, Ordering::AcqRel, Ordering::Acquire).is_err()
        {
            // A look takes microseconds, unless the file system hangs.
            std::thread::yield_now();
        }
        // SAFETY: in phase OFF the sleeper alone touches the post.
        let post = unsafe { &mut *self.post };
        post.watch.take().is_some_and(|watch| watch.word.is_none())
    }
}

/// Changes how this thread is scheduled, if it is `from` now; whether it was.
fn set_kind(from: libc::c_int, to: libc::c_int) -> bool {
    let parameter = libc::sched_param { sched_priority: 0 };
    // SAFETY: the first takes no pointer; the second reads its parameter.
    unsafe { libc::sched_getscheduler(0) == from && libc::sched_setscheduler(0, to, &raw const parameter) == 0 }
}

/// The thread. Not one call into the C library: its errno is the sleeper's.
extern "C" fn keep_watch(argument: *mut c_void) -> libc::c_int {
    let post = argument.cast::<Post>();
    // SAFETY: the phase is atomic and the post is never freed.
    let phase = unsafe { &(*post).phase };
    // SAFETY: the directory's number is never written again.
    let dir = unsafe { usize::try_from((*post).dir).unwrap_or(usize::MAX) };
    close_all_but(dir);
    let mut next_ms = 0;
    loop {
        let now = phase.load(Ordering::Acquire);
        match now {
            OFF => futex::wait(phase, OFF, By::Threads, None),
            ON | CALLED if phase.compare_exchange(now, BUSY, Ordering::AcqRel, Ordering::Acquire).is_ok() => {
                // SAFETY: in phase BUSY the lookout alone touches the post.
                let (watch, is_new, sleeper) = unsafe { (&mut (*post).watch, &mut (*post).is_new, (*post).sleeper) };
                // The sleeper has just looked itself. Should the lock have changed hands since, its guard is
                // most likely kept by another waiter, behind whom it has its place in the chain: to call it
                // away would cost it that.
                let look = !std::mem::take(is_new);
                let due = watch.as_mut().is_none_or(|watch| now == CALLED || watch.is_due(dir, look, &mut next_ms));
                if due {
                    shout(sleeper);
                }
                let (next, rest_ms) = if due { (CALLED, CALL_EVERY_MS) } else { (ON, next_ms) };
                phase.store(next, Ordering::Release);
                futex::wait(phase, next, By::Threads, Some(rest_ms));
            }
            _ => {}
        }
    }
}

/// Closes this thread's copies of all descriptors but the standard ones and `dir`: the sleeper's own
/// closing of a guard must be its end.
fn close_all_but(dir: usize) {
    const LAST: usize = u32::MAX as usize;
    for [first, last] in [[3, dir.saturating_sub(1)], [dir.saturating_add(1).max(3), LAST]] {
        if first <= last {
            // SAFETY: this thread's table is its own.
            unsafe { call(libc::SYS_close_range, [first, last, 0, 0, 0, 0]) };
        }
    }
}

/// Interrupts the sleeper.
fn shout(sleeper: i32) {
    let sleeper = usize::try_from(sleeper).unwrap_or(0);
    let alarm = usize::try_from(libc::SIGALRM).unwrap_or(0);
    IS_CALLED.store(true, Ordering::Relaxed);
    // SAFETY: tgkill takes three numbers; getpid none.
    unsafe {
        let group = call(libc::SYS_getpid, [0; 6]);
        call(libc::SYS_tgkill, [group.unsigned_abs(), sleeper, alarm, 0, 0, 0]);
    }
}

impl Watch {
    /// Whether the sleeper has something to do, after a look if `look`. Otherwise `next_ms` says how long to
    /// rest.
    fn is_due(&mut self, dir: usize, look: bool, next_ms: &mut u64) -> bool {
        let now_ms = now_boot_ms();
        // No word of a wait that is over: its end has a line of its own.
        let is_over = now_ms >= self.until_boot_ms;
        if let Some(word) = self.word.as_ref().filter(|word| now_ms >= word.at_boot_ms && !is_over) {
            say(&word.line);
            // Taken, but not freed: the allocator is the sleeper's.
            std::mem::forget(self.word.take());
        }
        match look.then(|| self.look(dir)) {
            None => {}
            Some(Some((inode, mtime_ns))) if inode == self.inode => {
                let later_ms = (mtime_ns - self.mtime_ns) / 1_000_000;
                self.mtime_ns = mtime_ns;
                self.stale_boot_ms = self.stale_boot_ms.saturating_add_signed(i64::try_from(later_ms).unwrap_or(0));
            }
            // Gone, or another: what no guard told.
            _ => return true,
        }
        let due_ms = self.stale_boot_ms.min(self.until_boot_ms);
        if now_ms >= due_ms {
            return true;
        }
        let word_ms = self.word.as_ref().map_or(u64::MAX, |word| word.at_boot_ms);
        *next_ms = due_ms.min(word_ms).saturating_sub(now_ms).clamp(1, LOOK_EVERY_MS);
        false
    }

    fn look(&self, dir: usize) -> Option<(u64, i128)> {
        let mut stat = MaybeUninit::<libc::stat>::uninit();
        let flags = usize::try_from(libc::AT_SYMLINK_NOFOLLOW).unwrap_or(0);
        let arguments =
            [dir, self.name.as_ptr().expose_provenance(), stat.as_mut_ptr().expose_provenance(), flags, 0, 0];
        // SAFETY: the directory's descriptor is open while the sleeper sleeps; name and buffer outlive
        // the call.
        let done = unsafe { call(libc::SYS_newfstatat, arguments) };
        // SAFETY: zero means that the kernel has filled it in.
        let stat = (done == 0).then(|| unsafe { stat.assume_init() })?;
        Some((stat.st_ino, i128::from(stat.st_mtime) * 1_000_000_000 + i128::from(stat.st_mtime_nsec)))
    }
}

fn now_boot_ms() -> u64 {
    let mut time = MaybeUninit::<[i64; 2]>::zeroed();
    let clock = usize::try_from(libc::CLOCK_BOOTTIME).unwrap_or(0);
    // SAFETY: the kernel writes the two words, which were zero before.
    let [seconds, nanoseconds] = unsafe {
        call(libc::SYS_clock_gettime, [clock, time.as_mut_ptr().expose_provenance(), 0, 0, 0, 0]);
        time.assume_init()
    };
    u64::try_from(seconds).unwrap_or(0) * 1000 + u64::try_from(nanoseconds).unwrap_or(0) / 1_000_000
}

/// Writes to standard error, if it takes it now.
fn say(line: &[u8]) {
    // SAFETY: one pollfd and a zero time-out: only asks. The write reads the line.
    unsafe {
        let mut ready = MaybeUninit::new(libc::pollfd { fd: 2, events: libc::POLLOUT, revents: 0 });
        let zero = [0i64; 2];
        call(libc::SYS_ppoll, [ready.as_mut_ptr().expose_provenance(), 1, address(&zero), 0, 0, 0]);
        if ready.assume_init().revents & libc::POLLOUT != 0 {
            // No more than a pipe takes at once: the sleeper must not wait for whoever reads it.
            let bytes = line.len().min(libc::PIPE_BUF);
            call(libc::SYS_write, [2, line.as_ptr().expose_provenance(), bytes, 0, 0, 0]);
        }
    }
}
