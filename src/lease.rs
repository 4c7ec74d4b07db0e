//! When is a lock stale, when must it be renewed, when may its quarantine go? Pure: every clock reading
//! is an argument.
//!
//! Age against the ttl *in the record* is the only thing that makes a lock stale. No process is probed,
//! no host or boot is compared; the kernel's guard can veto an end but never cause one.

/// The least ttl that may be asked for, in milliseconds.
pub const MIN_TTL_MS: u64 = 1_000;
/// The ttl of a lock that asks for none, in milliseconds.
pub const DEFAULT_TTL_MS: u64 = 60_000;
/// How long a blank lock is held to be young, whoever looks: its maker's own ttl is not known.
pub const BLANK_TTL_MS: u64 = 60_000;
/// The longest time an ender may take from its look at the lock to the issue of its last rename.
pub const CLAIM_DEADLINE_CAP_MS: u64 = 5_000;
/// What a quarantine must be older than, beyond the ttl and the claim deadline.
///
/// Load-bearing, do not tune to zero: the claim deadline bounds when an ender's last rename is *issued*,
/// not when it *lands*. On a loaded host that system call finishes tens to hundreds of milliseconds
/// after it was begun. Were the slot's name freed in between, that late rename would find the name
/// vacant and could move a successor's live lock.
pub const RECLAIM_MARGIN_MS: u64 = 5_000;
/// What a file system that stamps whole seconds can be off by: both stamps are cut, by up to one second
/// each.
pub const WHOLE_SECOND_ALLOWANCE_MS: u64 = 2_000;
/// Grace between TERM and KILL where none is given.
pub const DEFAULT_KILL_AFTER_MS: u64 = 10_000;
/// What ending COMMAND is given of a lease that was not renewed in any case, if a tenth of it is more.
const LEAST_LAST_PART_MS: u64 = 250;

/// How long an ender may take from its look to its rename. A contract: never longer than the ttl.
pub const fn claim_deadline_ms(ttl_ms: u64) -> u64 {
    let deadline_ms = if ttl_ms < CLAIM_DEADLINE_CAP_MS { ttl_ms } else { CLAIM_DEADLINE_CAP_MS };
    assert!(deadline_ms <= ttl_ms, "claim deadline <= ttl");
    deadline_ms
}

/// The age at which no rival of a quarantined epoch can still act on it.
pub const fn reclaim_age_ms(ttl_ms: u64) -> u64 {
    let deadline_ms = claim_deadline_ms(ttl_ms);
    let longest_ms = if ttl_ms > deadline_ms { ttl_ms } else { deadline_ms };
    longest_ms.saturating_add(RECLAIM_MARGIN_MS)
}

/// A time stamp as a file system writes it, or a clock reading of the same kind. In nanoseconds since
/// 1970, signed: clocks are wrong, and what lies before 1970 must not wrap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stamp {
    ns: i128,
}

impl Stamp {
    /// From whole seconds and the nanoseconds on top of them.
    pub const fn new(seconds: i64, nanoseconds: i64) -> Self {
        Stamp { ns: seconds as i128 * 1_000_000_000 + nanoseconds as i128 }
    }

    /// From milliseconds since 1970.
    pub const fn from_ms(ms: i64) -> Self {
        Stamp { ns: ms as i128 * 1_000_000 }
    }

    /// Milliseconds since 1970, rounded down.
    pub const fn ms(self) -> i64 {
        saturate(self.ns.div_euclid(1_000_000))
    }

    /// Nanoseconds since 1970.
    pub const fn ns(self) -> i128 {
        self.ns
    }

    /// Milliseconds from `earlier` to here: negative if `earlier` is in the future.
    pub const fn since_ms(self, earlier: Stamp) -> i64 {
        saturate((self.ns - earlier.ns).div_euclid(1_000_000))
    }

    const fn is_whole_second(self) -> bool {
        self.ns % 1_000_000_000 == 0
    }
}

#[allow(clippy::cast_possible_truncation)] // Both ends are cut before the cast.
const fn saturate(value: i128) -> i64 {
    if value > i64::MAX as i128 {
        i64::MAX
    } else if value < i64::MIN as i128 {
        i64::MIN
    } else {
        value as i64
    }
}

/// What age against ttl says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Within its lease for `remaining_ms` more: what is left of the ttl. More than the ttl if the time
    /// stamp lies in the future.
    Fresh {
        /// Until it turns stale, if nobody renews it.
        remaining_ms: u64,
    },
    /// Past its lease.
    Stale {
        /// Since when it has been stale.
        overdue_ms: u64,
    },
}

/// Judges a lock last renewed at `mtime`, at the time `now` of the same file system.
pub fn judge(mtime: Stamp, now: Stamp, ttl_ms: u64) -> Verdict {
    let coarse = mtime.is_whole_second() && now.is_whole_second();
    let allowed_ms = ttl_ms.saturating_add(if coarse { WHOLE_SECOND_ALLOWANCE_MS } else { 0 });
    let age_ms = now.since_ms(mtime);
    let left_ms = i128::from(allowed_ms) - i128::from(age_ms);
    let clamp = |ms: i128| u64::try_from(ms).unwrap_or(u64::MAX);
    if left_ms < 0 {
        Verdict::Stale { overdue_ms: clamp(-left_ms) }
    } else {
        // Stale only *beyond* the ttl: a lock exactly as old as its ttl is still its holder's.
        Verdict::Fresh { remaining_ms: clamp(left_ms + 1) }
    }
}

/// What an observer has seen of one epoch, by its own boot clock. For locks whose time stamps tell
/// nothing: a stamp in the future, or a wall clock that went backwards.
///
/// A lock whose identity and time stamp stayed the same for one ttl of the observer's own clock is
/// stale, whatever the wall clock says: its holder has not renewed it for that long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Watch<Identity> {
    seen: Option<(Identity, Stamp, u64)>,
}

impl<Identity> Default for Watch<Identity> {
    fn default() -> Self {
        Watch { seen: None }
    }
}

impl<Identity: PartialEq> Watch<Identity> {
    /// Notes that `identity` carries `mtime` at `now_boot_ms`; says how long it has been seen unchanged.
    pub fn note(&mut self, identity: Identity, mtime: Stamp, now_boot_ms: u64) -> u64 {
        match &self.seen {
            Some((known, stamp, since_ms)) if *known == identity && *stamp == mtime => {
                now_boot_ms.saturating_sub(*since_ms)
            }
            _ => {
                self.seen = Some((identity, mtime, now_boot_ms));
                0
            }
        }
    }

    /// Forgets what was seen: the lock is free, or something else is there.
    pub fn forget(&mut self) {
        self.seen = None;
    }
}

/// Judges by both rules: the age, and the time it was watched unchanged. The kinder to the contender
/// counts, since each alone is enough to make a lock stale.
pub fn judge_watched(mtime: Stamp, now: Stamp, ttl_ms: u64, unchanged_ms: u64) -> Verdict {
    let by_age = judge(mtime, now, ttl_ms);
    match (by_age, unchanged_ms > ttl_ms) {
        (Verdict::Stale { .. }, _) => by_age,
        (Verdict::Fresh { .. }, true) => Verdict::Stale { overdue_ms: unchanged_ms - ttl_ms },
        (Verdict::Fresh { remaining_ms }, false) => {
            Verdict::Fresh { remaining_ms: remaining_ms.min((ttl_ms - unchanged_ms).saturating_add(1)) }
        }
    }
}

/// How often a holder renews.
pub const fn renew_every_ms(ttl_ms: u64) -> u64 {
    ttl_ms / 3
}

/// After a failed or contested renewal: how soon to try again.
pub const fn retry_every_ms(ttl_ms: u64) -> u64 {
    let tenth_ms = renew_every_ms(ttl_ms) / 10;
    if tenth_ms < 50 {
        50
    } else if tenth_ms > 1_000 {
        1_000
    } else {
        tenth_ms
    }
}

/// How long after its last confirmed renewal a holder whose guard may not be seen by others goes on:
/// the ttl less its last part, so that COMMAND has ended before anybody else can get in.
pub const fn give_up_after_ms(ttl_ms: u64, kill_after_ms: u64) -> u64 {
    ttl_ms - last_part_ms(ttl_ms, kill_after_ms)
}

/// The last part of a lease that was not renewed, in which COMMAND is ended: the grace between TERM and
/// KILL, at most a third of the ttl. But even what is killed without any grace takes a while to be gone:
/// at least a tenth of the ttl, or 250 ms where that is less.
pub const fn last_part_ms(ttl_ms: u64, kill_after_ms: u64) -> u64 {
    let (third_ms, tenth_ms) = (ttl_ms / 3, ttl_ms / 10);
    let least_ms = if tenth_ms < LEAST_LAST_PART_MS { tenth_ms } else { LEAST_LAST_PART_MS };
    let grace_ms = if kill_after_ms < third_ms { kill_after_ms } else { third_ms };
    if grace_ms > least_ms { grace_ms } else { least_ms }
}

/// When KILL is sent to what ignored TERM, from when it is `left_ms` to the end of such a lease: never
/// beyond it, and no later than was asked for.
pub const fn last_grace_ms(ttl_ms: u64, kill_after_ms: u64, left_ms: u64) -> u64 {
    let most_ms = left_ms.saturating_sub(kill_margin_ms(last_part_ms(ttl_ms, kill_after_ms)));
    if kill_after_ms < most_ms { kill_after_ms } else { most_ms }
}

/// How long before the end of a lease that was not renewed KILL is sent to what ignored TERM, so that it
/// has done its work when the lease is over: a quarter of the last part, or a second if that has it twice.
/// On a loaded host finding and killing a tree of processes takes hundreds of milliseconds.
const fn kill_margin_ms(last_part_ms: u64) -> u64 {
    let (quarter_ms, half_ms) = (last_part_ms / 4, last_part_ms / 2);
    let least_ms = if half_ms < 1_000 { half_ms } else { 1_000 };
    if quarter_ms > least_ms { quarter_ms } else { least_ms }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Stamp = Stamp::new(1_000_000, 500);

    fn before_ms(ms: i64) -> Stamp {
        Stamp { ns: NOW.ns - i128::from(ms) * 1_000_000 }
    }

    #[test]
    fn a_lock_is_stale_only_beyond_the_ttl_in_its_record() {
        assert_eq!(judge(before_ms(59_999), NOW, 60_000), Verdict::Fresh { remaining_ms: 2 });
        assert_eq!(judge(before_ms(60_000), NOW, 60_000), Verdict::Fresh { remaining_ms: 1 });
        assert_eq!(judge(before_ms(60_001), NOW, 60_000), Verdict::Stale { overdue_ms: 1 });
    }

    #[test]
    fn a_stamp_in_the_future_never_wraps_and_never_makes_stale_by_age() {
        assert_eq!(judge(before_ms(-10_000), NOW, 1_000), Verdict::Fresh { remaining_ms: 11_001 });
        let far = Stamp::new(i64::MAX, 999_999_999);
        let past = Stamp::new(i64::MIN, 0);
        assert_eq!(judge(far, past, u64::MAX), Verdict::Fresh { remaining_ms: u64::MAX });
        assert!(matches!(judge(past, far, 1_000), Verdict::Stale { .. }));
    }

    #[test]
    fn whole_second_stamps_get_two_more_seconds() {
        let whole = Stamp::new(1_000, 0);
        assert!(matches!(judge(Stamp::new(939, 0), whole, 60_000), Verdict::Fresh { .. }));
        assert!(matches!(judge(Stamp::new(937, 0), whole, 60_000), Verdict::Stale { .. }));
        assert!(matches!(judge(Stamp::new(939, 0), Stamp::new(1_000, 1), 60_000), Verdict::Stale { .. }));
    }

    #[test]
    fn what_stayed_unchanged_for_one_ttl_is_stale_whatever_its_stamp_says() {
        let mut watch = Watch::default();
        let future = before_ms(-1_000_000);
        assert_eq!(watch.note("a", future, 5_000), 0);
        assert_eq!(watch.note("a", future, 7_000), 2_000);
        assert!(matches!(judge_watched(future, NOW, 2_000, 2_000), Verdict::Fresh { remaining_ms: 1 }));
        assert_eq!(judge_watched(future, NOW, 2_000, 2_001), Verdict::Stale { overdue_ms: 1 });
    }

    #[test]
    fn a_lock_whose_stamp_or_identity_moves_is_watched_anew() {
        let mut watch = Watch::default();
        watch.note("a", before_ms(0), 1_000);
        assert_eq!(watch.note("a", before_ms(-1), 9_000), 0);
        assert_eq!(watch.note("b", before_ms(-1), 9_500), 0);
        assert_eq!(watch.note("b", before_ms(-1), 9_600), 100);
        assert_eq!(watch.note("b", before_ms(-1), 9_400), 0, "a clock that goes backwards counts for nothing");
    }

    #[test]
    fn the_claim_deadline_never_exceeds_the_ttl_and_the_margin_comes_on_top() {
        for ttl_ms in [MIN_TTL_MS, 4_999, 5_000, 5_001, DEFAULT_TTL_MS, u64::MAX] {
            assert!(claim_deadline_ms(ttl_ms) <= ttl_ms);
            assert!(reclaim_age_ms(ttl_ms) >= ttl_ms.saturating_add(RECLAIM_MARGIN_MS));
            assert!(reclaim_age_ms(ttl_ms) >= claim_deadline_ms(ttl_ms) + RECLAIM_MARGIN_MS);
        }
        const { assert!(RECLAIM_MARGIN_MS >= 5_000) };
    }

    #[test]
    fn a_command_that_is_killed_without_any_grace_is_so_some_time_before_its_lease_is_over() {
        for ttl_ms in [MIN_TTL_MS, 1_001, 2_500, DEFAULT_TTL_MS, 86_400_000] {
            for kill_after_ms in [0, 1, 20, 99, 100, 249, 250, 333, DEFAULT_KILL_AFTER_MS, u64::MAX] {
                let left_ms = ttl_ms - give_up_after_ms(ttl_ms, kill_after_ms);
                let grace_ms = last_grace_ms(ttl_ms, kill_after_ms, left_ms);
                assert!(grace_ms <= kill_after_ms, "{ttl_ms} {kill_after_ms}");
                assert!(left_ms - grace_ms >= 50, "{ttl_ms} {kill_after_ms}: killed {left_ms} - {grace_ms} before");
                assert!(left_ms <= ttl_ms / 3, "{ttl_ms} {kill_after_ms}");
            }
        }
        assert_eq!((give_up_after_ms(1_000, 0), last_grace_ms(1_000, 0, 100)), (900, 0));
        assert_eq!((give_up_after_ms(60_000, 0), last_grace_ms(60_000, 0, 250)), (59_750, 0));
        assert_eq!((give_up_after_ms(1_000, 20), last_grace_ms(1_000, 20, 100)), (900, 20));
    }

    #[test]
    fn giving_up_leaves_the_command_time_to_end() {
        assert_eq!(give_up_after_ms(60_000, 10_000), 50_000);
        assert_eq!(give_up_after_ms(3_000, 10_000), 2_000);
        assert_eq!(last_grace_ms(60_000, 10_000, 10_000), 7_500);
        assert_eq!(last_grace_ms(3_000, 10_000, 1_000), 500);
        assert_eq!(last_grace_ms(60_000, 10_000, 0), 0, "whoever wakes too late");
        assert_eq!([10_000, 2_500, 1_000, 600].map(kill_margin_ms), [2_500, 1_000, 500, 300]);
        assert_eq!(renew_every_ms(60_000), 20_000);
        assert_eq!((retry_every_ms(1_000), retry_every_ms(6_000), retry_every_ms(3_600_000)), (50, 200, 1_000));
    }
}
