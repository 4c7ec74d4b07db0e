//! Randomness from the operating system.

use nix::fcntl::{OFlag, open};
use nix::libc;
use nix::sys::stat::Mode;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use crate::record::Nonce;

/// The operating system's CSPRNG.
///
/// By the system call itself: the generic way looks for the C library's function at run time, and this
/// runs before the C library has been started.
fn fill<const BYTES: usize>() -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    // SAFETY: the kernel writes at most as many bytes as `bytes` has.
    let filled = unsafe { libc::syscall(libc::SYS_getrandom, bytes.as_mut_ptr(), BYTES, 0) };
    // It fills up to 256 bytes whole and does not fail once the kernel has started, but a sandbox may refuse
    // it. A nonce that is not random would break the protocol: the same source by its file, or nothing.
    if usize::try_from(filled) != Ok(BYTES) {
        assert_eq!(from_device(&mut bytes), Ok(BYTES), "Linux has random numbers");
    }
    bytes
}

fn from_device(bytes: &mut [u8]) -> nix::Result<usize> {
    let device = open("/dev/urandom", OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty())?;
    nix::unistd::read(device, bytes)
}

/// 16 bytes of the operating system's CSPRNG as a nonce: that no two epochs share a slot rests on it.
pub fn nonce() -> Nonce {
    Nonce::from_bytes(super::hook::random().unwrap_or_else(fill))
}

/// A length of time between half of `ms` and `ms`, so that those who wait do not march in step.
pub fn jittered_ms(ms: u64) -> u64 {
    SmallRng::seed_from_u64(u64::from_ne_bytes(fill())).random_range(ms / 2..=ms)
}

/// A random number above zero.
pub fn positive() -> i64 {
    i64::from_ne_bytes(fill()) & i64::MAX | 1
}
