//! Randomness from the operating system.

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
    SysRng.try_fill_bytes(&mut bytes).expect("getrandom does not fail on a running Linux");
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
