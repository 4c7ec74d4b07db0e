//! Randomness from the operating system.

use nix::libc;
use rand::TryRng;
use rand::rngs::SysRng;

use crate::record::Nonce;

/// 16 bytes of the operating system's CSPRNG as a nonce: that no two epochs share a slot rests on it.
///
/// # Panics
///
/// Never on Linux: getrandom cannot fail once the kernel has started.
pub fn nonce() -> Nonce {
    let mut bytes = [0; 16];
    // By the system call itself: the generic way looks for the C library's function at run time, and
    // this runs before the C library has been started.
    // SAFETY: the kernel writes at most as many bytes as `bytes` has.
    let filled = unsafe { libc::syscall(libc::SYS_getrandom, bytes.as_mut_ptr(), bytes.len(), 0) };
    assert_eq!(filled, 16, "getrandom fills 16 bytes on a running Linux");
    Nonce::from_bytes(bytes)
}

/// A length of time between half of `ms` and `ms`, so that those who wait do not march in step.
pub fn jittered_ms(ms: u64) -> u64 {
    let mut bytes = [0; 8];
    let half_ms = ms / 2;
    if SysRng.try_fill_bytes(&mut bytes).is_err() {
        return ms;
    }
    half_ms + u64::from_ne_bytes(bytes) % (ms - half_ms + 1)
}
