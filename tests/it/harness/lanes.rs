//! Many sandboxes at a time, for tests that sleep most of the time.

use std::sync::Mutex;
use std::time::Duration;

use super::Sandbox;

/// Runs `job` for each of `items`, so many at a time.
pub(crate) fn in_lanes<T: Send>(lanes: usize, items: Vec<T>, job: impl Fn(T) + Sync) {
    let items = Mutex::new(items.into_iter());
    let next = || items.lock().expect("the items").next();
    std::thread::scope(|scope| {
        for _ in 0..lanes {
            scope.spawn(|| {
                while let Some(item) = next() {
                    job(item);
                }
            });
        }
    });
}

/// What a machine that is busy with other things adds to `took`: a few times what an uncontended hold takes
/// on it just now. Nothing where `took` is less than `patience`, which is asked for; and never so much that
/// waiting for another lease or for the reclaim age would pass.
pub(crate) fn slack(sandbox: &Sandbox, took: Duration, patience: Duration) -> Duration {
    if took < patience {
        return Duration::ZERO;
    }
    let uncontended = || sandbox.shipped().arg("other.lock").args(["--", "true"]).run().took;
    let slowest = (0..5).map(|_| uncontended()).max().unwrap_or_default();
    println!("{took:?}; an uncontended hold takes {slowest:?} just now");
    (slowest * 20).min(Duration::from_secs(3))
}
