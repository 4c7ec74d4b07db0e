//! The keeper of `acquire --for-pid`: renews while a process lives, releases when it ends.

use crate::lease::{renew_every_ms, retry_every_ms};
use crate::machine::{LOOK_EVERY_MS, Renewal};
use crate::store::{Held, News};
use crate::sys::clock::boot_ms;
use crate::sys::keeper::{Vigil, Watched, Woken};
use crate::sys::sleep;

/// Returns when the process has ended and the lock is released, or when the lock is gone: a keeper
/// outlives neither.
///
/// Nothing is said: there is nobody to say it to. Signals are blocked, as in every `withlock`, and stay
/// so: the lock must not go before the process does.
pub(super) fn keep(mut held: Box<dyn Held>, process: &Watched) {
    let ttl_ms = held.ttl_ms();
    let vigil = loop {
        match Vigil::new(process, held.alarm()) {
            Ok(vigil) => break vigil,
            // No descriptor is left in the system; there will be.
            Err(_) => sleep::pause(100),
        }
    };
    held.after_fork();
    let mut held = held.keep_nobody_waiting();
    let mut next_renewal_ms = held.granted_boot_ms().saturating_add(renew_every_ms(ttl_ms));
    loop {
        let mut renewals = Vec::new();
        while let Some(news) = held.news() {
            match news {
                News::Renewed(renewal) => renewals.push(renewal),
                News::Lost(_) => return,
            }
        }
        let now_ms = boot_ms();
        if now_ms >= next_renewal_ms {
            // An answer that is still to come is waited for, for a whole period.
            next_renewal_ms = now_ms.saturating_add(renew_every_ms(ttl_ms));
            renewals.push(held.renew());
        } else if held.look().is_some() {
            return;
        }
        for renewal in renewals {
            match renewal {
                Renewal::Pending => {}
                Renewal::Confirmed => next_renewal_ms = now_ms.saturating_add(renew_every_ms(ttl_ms)),
                Renewal::Contested | Renewal::Failed(_) => next_renewal_ms = now_ms + retry_every_ms(ttl_ms),
                Renewal::Lost(_) => return,
            }
        }
        if vigil.sleep(held.news_descriptor(), next_renewal_ms.min(boot_ms() + LOOK_EVERY_MS)) == Woken::ProcessEnded {
            // What cannot be released expires; nothing else is left to try.
            let _ = held.release(&mut || {});
            return;
        }
    }
}
