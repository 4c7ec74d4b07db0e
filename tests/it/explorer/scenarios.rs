//! The scenarios that must hold.

use withlock::sys::Errno;

use super::scenario::{Actor, Given, Occupant, Op, Scenario};
use super::world::AGE_MS;

fn contender() -> Actor {
    Actor::new(&[Op::Acquire, Op::Release])
}

fn twice() -> Actor {
    Actor::new(&[Op::Acquire, Op::Release, Op::Acquire, Op::Release])
}

fn renewer() -> Actor {
    Actor::new(&[Op::Acquire, Op::Renew, Op::Release])
}

fn operator(force: bool) -> Actor {
    Actor::new(&[Op::Break { force }])
}

fn by_nonce() -> Actor {
    Actor::new(&[Op::ReleaseByNonce])
}

fn reclaimer() -> Actor {
    Actor::new(&[Op::Reclaim])
}

fn stranger() -> Actor {
    Actor::new(&[Op::OccupySlot, Op::VacateSlot])
}

const STALE: Given = Given::Epoch { age_ms: AGE_MS };
const FRESH: Given = Given::Epoch { age_ms: 0 };
const STALE_BLANK: Given = Given::Blank { age_ms: AGE_MS };

/// All of them.
pub(super) fn all() -> Vec<Scenario> {
    [acquiring(), evicting(), renewing(), breaking(), half_made(), releasing(), strange(), scarce()].concat()
}

/// Acquire and release, two and three at a time; a waiter and a newborn lock; the maker that stalls.
fn acquiring() -> Vec<Scenario> {
    let two = || vec![contender(), contender()];
    let three = || vec![contender(), contender(), contender()];
    vec![
        Scenario::new("acquire-2", two()).at_most(u64::MAX),
        Scenario::new("acquire-2-ages", two()).deaths(0).ages(1).bound(9),
        Scenario::new("acquire-2-all", two()).ages(1).reclaims(1).bound(9),
        Scenario::new("acquire-2-clock", two()).deaths(0).ages(1).set_backs(1).bound(9),
        Scenario::new("acquire-2-hosts", two()).ages(1).reclaims(1).on_hosts().bound(9),
        Scenario::new("acquire-2-hosts-all", two()).deaths(0).ages(1).on_hosts().bound(9),
        Scenario::new("plain-rename-hosts", two())
            .deaths(0)
            .ages(1)
            .on_hosts()
            .fault("renameat2", "L", Errno::EINVAL)
            .bound(9),
        Scenario::new("late-release-hosts", vec![contender(), twice()])
            .deaths(0)
            .ages(1)
            .reclaims(1)
            .on_hosts()
            .bound(9),
        Scenario::new("acquire-3", three()).deaths(0).bound(9),
        Scenario::new("acquire-3-ages", three()).deaths(0).ages(1).bound(9),
        Scenario::new("acquire-3-hosts", three()).deaths(0).ages(1).on_hosts().bound(9),
        Scenario::new("no-guard", vec![contender().without_guard(), contender()]).ages(1).reclaims(1).bound(9),
        Scenario::new("no-guard-reclaim", vec![contender().without_guard(), contender()])
            .deaths(0)
            .ages(1)
            .reclaims(1)
            .bound(9),
    ]
}

/// A stale lock and those who want it.
fn evicting() -> Vec<Scenario> {
    let two = || vec![contender(), contender()];
    let three = || vec![contender(), contender(), contender()];
    vec![
        Scenario::new("evict-2", two()).given(&[STALE]).deaths(0).bound(9),
        Scenario::new("evict-2-dies", two()).given(&[STALE]).bound(9),
        Scenario::new("evict-2-reclaim", two()).given(&[STALE]).reclaims(1).bound(9),
        Scenario::new("evict-2-hosts", two()).given(&[STALE]).reclaims(1).on_hosts().bound(9),
        Scenario::new("evict-3", three()).given(&[STALE]).deaths(0).bound(9),
        Scenario::new("evict-reclaim", vec![contender(), contender(), reclaimer()])
            .given(&[STALE])
            .deaths(0)
            .reclaims(1)
            .bound(9),
        Scenario::new("evict-blank", two()).given(&[STALE_BLANK]).bound(9),
        Scenario::new("evict-blank-hosts", two()).given(&[STALE_BLANK]).on_hosts().bound(9),
        Scenario::new("evict-dead", vec![contender().evicts_dead(), contender().evicts_dead()])
            .given(&[FRESH])
            .bound(9),
        Scenario::new("evict-dead-live", vec![contender(), contender().evicts_dead()]).bound(9),
        Scenario::new(
            "evict-replaced",
            vec![contender(), Actor::new(&[Op::Break { force: true }, Op::Acquire, Op::Release])],
        )
        .given(&[STALE])
        .bound(9),
    ]
}

/// A holder that renews, and those who find its lock old.
fn renewing() -> Vec<Scenario> {
    vec![
        Scenario::new("renew-evict", vec![renewer(), contender()]).deaths(0).ages(1).bound(9),
        Scenario::new("renew-evict-time", vec![renewer(), contender()]).deaths(0).ages(1).time_passes().bound(9),
        Scenario::new("renew-evict-hosts", vec![renewer(), contender()]).deaths(0).ages(1).on_hosts().bound(9),
        Scenario::new("renew-break", vec![renewer(), operator(false)]).deaths(0).ages(1).on_hosts().bound(9),
    ]
}

/// An operator who breaks, by force or not.
fn breaking() -> Vec<Scenario> {
    vec![
        Scenario::new("break-release", vec![contender(), operator(false)]).ages(1).bound(9),
        Scenario::new("force-release", vec![contender(), operator(true)]).bound(9),
        Scenario::new("force-release-hosts", vec![contender(), operator(true)]).ages(1).on_hosts().bound(9),
        Scenario::new("force-evict", vec![contender(), operator(true)]).given(&[STALE]).deaths(0).reclaims(1).bound(9),
        Scenario::new(
            "renew-force",
            vec![renewer(), Actor::new(&[Op::Break { force: true }, Op::Acquire, Op::Release])],
        )
        .deaths(0)
        .bound(9),
        Scenario::new("force-force", vec![operator(true), operator(true), contender()])
            .given(&[FRESH])
            .deaths(0)
            .bound(9),
        Scenario::new("force-reclaim", vec![twice(), operator(true), reclaimer()]).deaths(0).reclaims(1).bound(9),
        // An ender stalls in the slot that its rival removes during its next hold.
        Scenario::new(
            "force-removal",
            vec![Actor::new(&[Op::Acquire, Op::Release, Op::Acquire, Op::Reclaim, Op::Release]), operator(true)],
        )
        .deaths(0)
        .reclaims(1)
        .passing_at_rest()
        .bound(9),
    ]
}

/// A slot that somebody left half-made.
fn half_made() -> Vec<Scenario> {
    let two = || vec![contender(), contender()];
    vec![
        Scenario::new("half-made", two()).given(&[STALE, Given::Slot { claims: 0 }]).bound(9),
        Scenario::new("half-made-claimed", two()).given(&[STALE, Given::Slot { claims: 1 }]).bound(9),
        Scenario::new("half-made-reclaim-hosts", vec![contender(), reclaimer()])
            .given(&[STALE, Given::Slot { claims: 1 }])
            .deaths(0)
            .reclaims(1)
            .on_hosts()
            .bound(9),
        Scenario::new("half-made-hosts", two())
            .given(&[STALE, Given::Slot { claims: 2 }])
            .deaths(0)
            .reclaims(1)
            .on_hosts()
            .bound(9),
    ]
}

/// Two that release one acquired lock.
fn releasing() -> Vec<Scenario> {
    vec![
        Scenario::new("release-twice", vec![by_nonce(), by_nonce(), contender()]).given(&[FRESH]).bound(9),
        Scenario::new("release-twice-hosts", vec![by_nonce(), by_nonce(), contender()])
            .given(&[FRESH])
            .on_hosts()
            .bound(9),
        Scenario::new("release-stale", vec![by_nonce(), contender()]).given(&[STALE]).reclaims(1).bound(9),
    ]
}

/// Names and directories that are not ours.
fn strange() -> Vec<Scenario> {
    let two = || vec![contender(), contender()];
    let found = |name: &str, occupant| Scenario::new(name, two()).given(&[STALE, Given::Stranger(occupant)]).bound(9);
    vec![
        found("stranger-directory", Occupant::Directory),
        found("stranger-file", Occupant::File),
        found("stranger-symlink", Occupant::Symlink),
        found("stranger-last-claim", Occupant::LastClaim),
        found("stranger-ended", Occupant::Ended),
        found("stranger-locked", Occupant::Directory).fault("opendir", ".stale-", Errno::EACCES).fault(
            "rmdir",
            ".stale-",
            Errno::EACCES,
        ),
        found("stranger-hosts", Occupant::Directory).on_hosts(),
        Scenario::new("stranger-force", vec![contender(), operator(true), stranger()]).deaths(0).bound(9),
        Scenario::new("stranger-no-guard", vec![contender().without_guard(), contender(), stranger()])
            .deaths(0)
            .ages(1)
            .bound(9),
    ]
}

/// No space.
fn scarce() -> Vec<Scenario> {
    let two = || vec![contender(), contender()];
    vec![
        Scenario::new("no-space-slot", two()).given(&[STALE]).fault("mkdir", ".stale-", Errno::ENOSPC).bound(9),
        Scenario::new("no-space-claim", two()).given(&[STALE]).fault("create", "claim-", Errno::ENOSPC).bound(9),
        Scenario::new("no-space-no-guard", vec![contender().without_guard(), contender()])
            .ages(1)
            .fault("mkdir", ".stale-", Errno::ENOSPC)
            .at_most(14_000)
            .bound(9),
        Scenario::new("no-space-release", vec![contender(), operator(true)])
            .fault("create", "claim-", Errno::ENOSPC)
            .bound(9),
    ]
}
