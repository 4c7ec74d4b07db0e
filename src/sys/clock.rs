//! Clock readings.

use nix::time::{ClockId, clock_gettime};

use crate::lease::Stamp;

use super::hook;

/// CLOCK_BOOTTIME in milliseconds: it counts through a suspend and is never set.
pub fn boot_ms() -> u64 {
    if let Some(now) = hook::now() {
        return now.boot_ms;
    }
    let now = clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(0, |t| {
        u64::try_from(t.tv_sec()).unwrap_or(0) * 1000 + u64::try_from(t.tv_nsec()).unwrap_or(0) / 1_000_000
    });
    now + hook::boot_offset_ms()
}

/// The wall clock of this host.
pub fn wall() -> Stamp {
    if let Some(now) = hook::now() {
        return now.wall;
    }
    clock_gettime(ClockId::CLOCK_REALTIME)
        .map_or(Stamp::new(0, 0), |t| Stamp::new(t.tv_sec() + hook::wall_offset_seconds(), t.tv_nsec()))
}

/// The wall clock in milliseconds since 1970.
pub fn wall_ms() -> u64 {
    u64::try_from(wall().ms()).unwrap_or(0)
}
