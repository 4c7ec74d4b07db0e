//! Sleeping on a word of memory until another thread, or the kernel, changes it. Made without the C library, whose errno
//! is another's.

use std::sync::atomic::AtomicU32;

use nix::libc;

use super::raw::call;

/// Who may wake a sleeper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum By {
    /// This process's own threads.
    Threads,
    /// The kernel as well, for another process in the same memory.
    Kernel,
}

impl By {
    fn operation(self, operation: libc::c_int) -> usize {
        let private = if self == By::Threads { libc::FUTEX_PRIVATE_FLAG } else { 0 };
        usize::try_from(operation | private).unwrap_or(0)
    }
}

/// Wakes one who sleeps on `word`.
pub(super) fn wake(word: &AtomicU32, by: By) {
    // SAFETY: a futex call that wakes reads no memory.
    unsafe { call(libc::SYS_futex, [address(word), by.operation(libc::FUTEX_WAKE), 1, 0, 0, 0]) };
}

/// Sleeps while `word` is `value`, at most so long; may return early.
pub(super) fn wait(word: &AtomicU32, value: u32, by: By, for_ms: Option<u64>) {
    let value = usize::try_from(value).unwrap_or(0);
    let timeout = for_ms
        .map(|ms| [i64::try_from(ms / 1000).unwrap_or(i64::MAX), i64::try_from(ms % 1000).unwrap_or(0) * 1_000_000]);
    let timeout = timeout.as_ref().map_or(0, address);
    // SAFETY: the word and the time-out live as long as the call.
    unsafe { call(libc::SYS_futex, [address(word), by.operation(libc::FUTEX_WAIT), value, timeout, 0, 0]) };
}

/// Where a value lies, for a system call.
pub(super) fn address<T>(value: &T) -> usize {
    std::ptr::from_ref(value).expose_provenance()
}
