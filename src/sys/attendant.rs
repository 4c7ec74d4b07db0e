//! A second thread for a first one that asks a file system on which any call may hang, because another
//! machine has to answer it. A thread in such a call cannot even look at a clock. The attendant sees that
//! no call returns any more, says so, lets signals act meanwhile, and ends the process when patience ends.
//!
//! It sees calls, not operations: a slow server that answers one call after another is no trouble.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use nix::libc;
use nix::sys::signal::{SigSet, SigmaskHow, pthread_sigmask};

use super::clock::boot_ms;
use super::output::complain;
use super::signal::OnEntry;

/// How often a thread that makes calls is looked at, in milliseconds.
const PACE_MS: u64 = 50;
/// Looks that find no further answer before signals act: for that long one that is on its way is waited
/// for, so that nothing is left behind.
const LOOKS_BEFORE_SIGNALS: u64 = 1;
/// Looks that find no further answer before that is spoken of.
const LOOKS_BEFORE_WORD: u64 = 1_000 / PACE_MS;
/// How long past its end a sleep may last before it counts as a call that hangs, in milliseconds.
const OVERSLEEP_MS: u64 = 1_000;

/// Calls that have returned.
static ANSWERS: AtomicU64 = AtomicU64::new(0);

/// A call that might have hung has returned.
pub(super) fn answered() {
    // Without a locked instruction: the calls of one thread are attended to, and a miscount of others harms
    // nobody.
    ANSWERS.store(ANSWERS.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
}

/// What to do about a call that does not return.
#[derive(Clone, Debug)]
pub struct Orders {
    /// How long a call may take, in milliseconds.
    pub patience_ms: u64,
    /// The process is ended for it, but not before this, by the boot clock; `u64::MAX`: never.
    pub not_before_boot_ms: u64,
    /// Said once, after a second, if it is not ended for it by then.
    pub word: Option<String>,
    /// Said at the end.
    pub last_word: String,
    /// The exit code.
    pub exit: u8,
    /// Under this mask signals act while a call hangs; none do without.
    pub mask: Option<Mask>,
}

/// Signals that are blocked.
#[derive(Clone, Copy, Debug)]
pub struct Mask(SigSet);

impl Mask {
    /// Those that are while waiting for a lock.
    pub fn while_waiting(on_entry: &OnEntry) -> Self {
        Mask(on_entry.while_waiting())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The first thread makes calls.
    Asking,
    /// It sleeps, until this by the boot clock.
    Sleeping { until_boot_ms: u64 },
    /// It needs no attendant any more.
    Over,
}

#[derive(Debug)]
struct State {
    phase: Phase,
    /// Counts changes of phase.
    changes: u64,
    signals_act: bool,
    /// The attendant has descriptors of its own.
    is_apart: bool,
}

#[derive(Debug)]
struct Post {
    state: Mutex<State>,
    changed: Condvar,
}

/// The attendant, as the thread that it attends to knows it. Gone when dropped.
#[derive(Debug)]
pub struct Attendant {
    post: Arc<Post>,
    thread: Option<JoinHandle<()>>,
}

impl Attendant {
    /// Attends to this thread, which is about to make calls. `None`: there is no thread to spare, and a
    /// call may hang unattended.
    pub fn start(orders: Orders) -> Option<Self> {
        let state = State { phase: Phase::Asking, changes: 0, signals_act: false, is_apart: false };
        let post = Arc::new(Post { state: Mutex::new(state), changed: Condvar::new() });
        let its = Arc::clone(&post);
        let thread = Builder::new().spawn(move || its.attend(&orders)).ok()?;
        post.wait_until_apart();
        Some(Attendant { post, thread: Some(thread) })
    }

    /// The first thread makes calls again.
    pub fn asking(&self) {
        self.post.enter(Phase::Asking);
    }

    /// It sleeps for `for_ms`, while signals act on it.
    pub fn sleeping(&self, for_ms: u64) {
        self.post.enter(Phase::Sleeping { until_boot_ms: boot_ms().saturating_add(for_ms) });
    }
}

impl Drop for Attendant {
    fn drop(&mut self) {
        self.post.enter(Phase::Over);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Post {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, for_ms: u64) -> MutexGuard<'a, State> {
        let waited = self.changed.wait_timeout(state, Duration::from_millis(for_ms));
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Whoever returns from here is not ended by a signal that the attendant lets through.
    fn enter(&self, phase: Phase) {
        let mut state = self.lock();
        state.phase = phase;
        state.changes += 1;
        self.changed.notify_all();
        while state.signals_act {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn wait_until_apart(&self) {
        let mut state = self.lock();
        while !state.is_apart {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn attend(&self, orders: &Orders) {
        let mut word = orders.word.clone();
        leave_descriptors();
        let mut state = self.lock();
        state.is_apart = true;
        self.changed.notify_all();
        loop {
            let changes = state.changes;
            match state.phase {
                Phase::Over => return,
                Phase::Sleeping { until_boot_ms } => {
                    let left_ms = until_boot_ms.saturating_sub(boot_ms());
                    if left_ms > 0 {
                        state = self.wait(state, left_ms);
                        continue;
                    }
                    // A process that was stopped goes on with both its threads: the other has a chance.
                    state = self.wait(state, OVERSLEEP_MS);
                    if state.changes == changes && orders.not_before_boot_ms <= boot_ms() {
                        orders.end();
                    }
                }
                Phase::Asking => state = self.attend_to_calls(state, orders, &mut word),
            }
        }
    }

    /// Until the phase changes.
    fn attend_to_calls<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        orders: &Orders,
        word: &mut Option<String>,
    ) -> MutexGuard<'a, State> {
        let changes = state.changes;
        let (mut seen, mut looks) = (ANSWERS.load(Ordering::Relaxed), 0_u64);
        loop {
            // Counted in looks, not read from a clock: a process that was stopped has not waited.
            state = self.wait(state, PACE_MS);
            let now = ANSWERS.load(Ordering::Relaxed);
            let hangs = state.changes == changes && now == seen;
            looks = if hangs { looks + 1 } else { 0 };
            seen = now;
            self.let_signals_act(&mut state, looks > LOOKS_BEFORE_SIGNALS, orders.mask);
            if state.changes != changes {
                return state;
            }
            if looks * PACE_MS >= orders.patience_ms && boot_ms() >= orders.not_before_boot_ms {
                orders.end();
            }
            if looks >= LOOKS_BEFORE_WORD
                && let Some(word) = word.take()
            {
                complain(&word);
            }
        }
    }

    /// Signals that were sent to the process act on whichever thread does not block them: on this one.
    fn let_signals_act(&self, state: &mut State, act: bool, mask: Option<Mask>) {
        if let Some(Mask(mask)) = mask
            && state.signals_act != act
        {
            let mask = if act { mask } else { SigSet::all() };
            let _ = pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&mask), None);
            state.signals_act = act;
            self.changed.notify_all();
        }
    }
}

/// Keeps none of the other thread's descriptors but the standard ones. Were the table shared, its growth for
/// the guard's high number would wait for a kernel grace period of some 10 ms.
fn leave_descriptors() {
    const FIRST: libc::c_uint = 3;
    // SAFETY: the closed descriptors are this thread's copies, which nobody uses: the call gives it a table
    // of its own first.
    let closed = unsafe {
        libc::syscall(libc::SYS_close_range, FIRST, libc::c_uint::MAX, libc::CLOSE_RANGE_UNSHARE as libc::c_uint)
    };
    if closed != 0 {
        // SAFETY: only this thread's own table of descriptors is concerned.
        unsafe { libc::unshare(libc::CLONE_FILES) };
    }
}

impl Orders {
    fn end(&self) -> ! {
        complain(&self.last_word);
        // SAFETY: ends the process without running anything of it. The thread in the call could not go on
        // to its end, and nobody is to wait for it.
        unsafe { libc::_exit(i32::from(self.exit)) }
    }
}
