//! A process that is made while its lock is still being taken, and becomes COMMAND when it is told to.
//!
//! Making a process, and more so its first moment on another processor, takes as long as what is left to do for the
//! lock once its file has been created: so both are done at the same time. The recruit shares our memory, as a child of
//! vfork does, and has copies of our descriptors, the guard's among them. Until it is told something it makes system
//! calls of its own only, since our errno is ours, and does nothing but wait.
//!
//! It never outlives us: the kernel itself takes the order back when this process ends, however that comes. For that the
//! address which the kernel clears at a thread's end (set_tid_address(2)) is the order's, for good: the C library wants
//! its own there for whoever joins the first thread, which nobody does.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use nix::libc;

use super::futex::{self, By, address};
use super::hook::{Step, left_out};
use super::process;
use super::raw::call;
use super::spawn::Stack;

/// There is nothing to become: go. The kernel writes this one when we have died.
const LEAVE: u32 = 0;
/// Wait.
const STAND: u32 = 1;
/// Wait, and the recruit is asleep.
const ASLEEP: u32 = 2;
/// Become what [`START`] says.
const BECOME: u32 = 3;

static ORDER: AtomicU32 = AtomicU32::new(LEAVE);
/// The recruit uses our memory. Cleared by the kernel when it does so no more: it has become COMMAND, or ended.
static IS_THERE: AtomicU32 = AtomicU32::new(0);
static START: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// For how long the order is looked for before the recruit goes to sleep, in rounds of less than a microsecond: a little
/// longer than it takes to write a record, and less than two changes of process.
const ROUNDS: u32 = 100;

/// How often a recruit that was told something is looked after, should the kernel not say what became of it.
const LOOK_EVERY_MS: u64 = 100;

/// A process that stands ready. It goes when this is dropped.
#[derive(Debug)]
pub struct Recruit {
    pid: i32,
    _stack: Stack,
}

impl Recruit {
    /// Makes one, in the process's first thread; all signals must be blocked. `None`: it cannot be had, or there is
    /// one. COMMAND can be started without.
    pub fn make() -> Option<Self> {
        if is_under_valgrind() {
            return None;
        }
        IS_THERE.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).ok()?;
        ORDER.store(STAND, Ordering::Relaxed);
        let mut stack = Stack::new();
        let flags = libc::CLONE_VM | libc::CLONE_CHILD_CLEARTID | libc::SIGCHLD;
        let nothing = ptr::null_mut::<c_void>();
        // SAFETY: the order is a static, so that the kernel may write there when this thread ends. The new process runs
        // `stand_ready` on its own stack, which is freed only once the kernel has
        // said, in another static, that it is not used any more.
        let pid = unsafe {
            if !left_out(Step::Recall) {
                call(libc::SYS_set_tid_address, [address(&ORDER), 0, 0, 0, 0, 0]);
            }
            libc::clone(stand_ready, stack.top(), flags, nothing, nothing, nothing, IS_THERE.as_ptr())
        };
        if pid < 0 {
            IS_THERE.store(0, Ordering::Relaxed);
            return None;
        }
        Some(Recruit { pid, _stack: stack })
    }

    /// Has it call `spawn`'s child part with `start`, and returns its pid when it has become COMMAND or ended. `start`
    /// may not be touched meanwhile.
    pub(super) fn begin(mut self, start: *mut c_void) -> i32 {
        START.store(start, Ordering::Relaxed);
        self.tell(BECOME);
        std::mem::take(&mut self.pid)
    }

    fn tell(&self, order: u32) {
        if ORDER.swap(order, Ordering::Release) == ASLEEP {
            futex::wake(&ORDER, By::Kernel);
        }
        while IS_THERE.load(Ordering::Acquire) != 0 {
            futex::wait(&IS_THERE, 1, By::Kernel, Some(LOOK_EVERY_MS));
            // Kernels before 5.17 say nothing of a process that dumps core.
            if IS_THERE.load(Ordering::Acquire) != 0 && process::ended(self.pid).is_some() {
                IS_THERE.store(0, Ordering::Relaxed);
            }
        }
    }
}

impl Drop for Recruit {
    fn drop(&mut self) {
        if self.pid == 0 {
            return;
        }
        self.tell(LEAVE);
        // SAFETY: waitpid reaps our own child, which ends now, and writes nothing.
        unsafe { libc::waitpid(self.pid, ptr::null_mut(), 0) };
    }
}

/// Valgrind ends whoever makes a process like this one, and can be asked beforehand: by an idle sequence of
/// instructions that it takes for a question (its manual, "The Client Request mechanism").
#[cfg(target_arch = "x86_64")]
fn is_under_valgrind() -> bool {
    const RUNNING_ON_VALGRIND: usize = 0x1001;
    let question = [RUNNING_ON_VALGRIND, 0, 0, 0, 0, 0];
    let answer: usize;
    // SAFETY: a processor rotates rdi once around, exchanges rbx with itself, and leaves the answer as it is. Valgrind
    // reads the question and writes the answer.
    unsafe {
        std::arch::asm!("rol rdi, 3", "rol rdi, 13", "rol rdi, 61", "rol rdi, 51", "xchg rbx, rbx",
            in("rax") question.as_ptr(), inlateout("rdx") 0_usize => answer, options(nostack));
    }
    answer != 0
}

#[cfg(not(target_arch = "x86_64"))]
fn is_under_valgrind() -> bool {
    false
}

/// The recruit. It has no errno of its own until it is told to become COMMAND, when we stand still.
extern "C" fn stand_ready(_: *mut c_void) -> c_int {
    for round in 0..ROUNDS {
        if ORDER.load(Ordering::Acquire) != STAND {
            break;
        }
        for _ in 0..16 {
            std::hint::spin_loop();
        }
        if round % 16 == 15 {
            // Where there is but one processor free, whoever gives the order needs it.
            // SAFETY: it takes nothing.
            unsafe { call(libc::SYS_sched_yield, [0; 6]) };
        }
    }
    let _ = ORDER.compare_exchange(STAND, ASLEEP, Ordering::Relaxed, Ordering::Relaxed);
    while ORDER.load(Ordering::Acquire) == ASLEEP {
        futex::wait(&ORDER, ASLEEP, By::Kernel, None);
    }
    if ORDER.load(Ordering::Acquire) == BECOME {
        super::spawn::become_command(START.load(Ordering::Relaxed))
    } else {
        // SAFETY: ends this process, whose memory is another's, and nothing else.
        unsafe { call(libc::SYS_exit_group, [0; 6]) };
        0
    }
}
