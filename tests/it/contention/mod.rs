//! Mutual exclusion itself: a counter that is read and written back without any care loses no update under
//! the lock, on every local file system that Linux is installed on, whoever is killed meanwhile; and it
//! loses some as soon as exclusive creation is left out.
//!
//! `WITHLOCK_SOAK=SECONDS` makes each run as long as that. Needs root, to mount the file systems, and
//! `mkfs` for each; one that the kernel does not have is said to be skipped.

mod crowd;
mod mounts;

use std::path::Path;
use std::time::Duration;

use crate::harness::shipped;

use crowd::{Crowd, Tally};
use mounts::{Kind, on_a_mounted};

/// So many at once.
const PROCESSES: usize = 64;
/// How long they are left alone, to see how fast it is, and how long some are killed.
const CALM: Duration = Duration::from_millis(1_200);
const TORMENT: Duration = Duration::from_millis(1_800);

fn torment_for() -> Duration {
    let asked = std::env::var("WITHLOCK_SOAK").ok().and_then(|seconds| seconds.parse().ok());
    asked.map_or(TORMENT, Duration::from_secs)
}

/// Sixty-four processes on a mounted file system: no update is lost, and nothing but quarantines is left.
fn assert_that_no_update_is_lost(kind: Kind) {
    shipped();
    on_a_mounted(kind, |sandbox| {
        let crowd = Crowd::start(sandbox, PROCESSES, shipped(), "");
        let calm = crowd.watch_for(CALM);
        crate::harness::eventually("the lock changes hands", || match crowd.tally().holds {
            holds if holds >= 100 => Ok(()),
            holds => Err(holds),
        });
        let before = crowd.tally();
        let kills = crowd.torment_for(torment_for());
        crowd.end();
        let Tally { holds, lost } = crowd.tally();
        let evicted = crowd.evictions();
        println!(
            "{}: {calm:.0} holds a second, then {} more with {kills} kills and {evicted} evictions",
            kind.name(),
            holds - before.holds
        );
        assert_eq!(lost, 0, "updates were lost");
        // The power of the test: the lock changed hands often, holders died with it, and were evicted.
        assert!(holds > before.holds, "{} and {holds} holds", before.holds);
        assert!(kills >= 5 && evicted >= 1, "{kills} kills, {evicted} evictions");
        crowd.assert_that_nothing_else_is_left();
    });
}

#[test]
fn a_counter_loses_no_update_on_ext4() {
    assert_that_no_update_is_lost(Kind::Ext4);
}

#[test]
fn a_counter_loses_no_update_on_xfs() {
    assert_that_no_update_is_lost(Kind::Xfs);
}

#[test]
fn a_counter_loses_no_update_on_btrfs() {
    assert_that_no_update_is_lost(Kind::Btrfs);
}

#[test]
fn a_counter_loses_no_update_on_tmpfs() {
    assert_that_no_update_is_lost(Kind::Tmpfs);
}

#[test]
fn a_counter_loses_no_update_on_overlayfs() {
    assert_that_no_update_is_lost(Kind::Overlay);
}

#[test]
fn the_same_counter_loses_updates_when_the_create_is_not_exclusive() {
    // The negative control: it ends with the first lost update, mostly at once.
    on_a_mounted(Kind::Tmpfs, |sandbox| {
        let program = Path::new(env!("CARGO_BIN_EXE_withlock"));
        let crowd = Crowd::start(sandbox, PROCESSES, program, "exclusive,guard");
        crate::harness::eventually("an update is lost", || match crowd.tally() {
            Tally { lost, .. } if lost > 0 => Ok(()),
            Tally { holds, .. } => Err(holds),
        });
        crowd.end();
    });
}
