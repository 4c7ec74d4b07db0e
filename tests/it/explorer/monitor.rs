//! The promises of the protocol, watched from outside: by what the system calls did to the lock path, not
//! by what the code says of itself.

use super::scenario::{Op, Scenario};
use super::world::{EpochState, Life, RECLAIM_AGE_MS, TTL_MS, World};

impl World {
    /// `actor` created the lock file.
    pub(super) fn created(&mut self, actor: usize, inode: u64, now_ms: i64) {
        if self.at_path.is_some() {
            self.violated(format!("exclusion: actor {actor} made a lock where there was one"));
        }
        self.at_path = Some(inode);
        let state = &mut self.actors[actor];
        (state.judged, state.newborn) = (Some(inode), Some(inode));
        self.epochs.push(EpochState {
            inode,
            maker: actor,
            has_guard: false,
            stamped_ms: now_ms,
            born_ms: now_ms,
            confirmed: false,
            ended_by: None,
            is_forced: false,
            ended_ms: 0,
        });
    }

    /// `actor` took the file at the lock path off it.
    pub(super) fn taken(&mut self, actor: usize, now_ms: i64, scenario: &Scenario) {
        let Some(inode) = self.at_path.take() else {
            return self.violated(format!("actor {actor} took a file off the lock path that nobody had made"));
        };
        let (op, judged) = (self.actors[actor].op, self.actors[actor].judged);
        let target = if op == Op::Release { self.actors[actor].held } else { judged };
        let index = self.epochs.iter().position(|epoch| epoch.inode == inode).unwrap_or(usize::MAX);
        if target != Some(inode) {
            self.violated(format!("another epoch: actor {actor} meant one epoch and took epoch {index} off the path"));
        }
        let is_newborn = self.actors[actor].newborn == Some(inode);
        let has_newborn_rule =
            self.has_newborn_rule && !self.forces && !scenario.has_faults() && !scenario.has_strangers();
        let Some(epoch) = self.epochs.iter_mut().rev().find(|epoch| epoch.inode == inode) else { return };
        epoch.ended_by = Some(actor);
        epoch.is_forced = op == Op::Break { force: true };
        epoch.ended_ms = now_ms;
        let (maker, confirmed, has_guard, born_ms) = (epoch.maker, epoch.confirmed, epoch.has_guard, epoch.born_ms);
        // `--evict-dead` needs no age where the holder is dead.
        let is_dead = maker == usize::MAX || self.actors[maker].life == Life::Dead;
        let evicts_dead = scenario.actors.get(actor).is_some_and(|actor| actor.evict_dead) && is_dead;
        let by_right = maker == actor || evicts_dead || matches!(op, Op::Break { force: true } | Op::ReleaseByNonce);
        if !by_right && confirmed {
            self.violated(format!("renewal: epoch {index}, confirmed and not old since, was ended by actor {actor}"));
        }
        if !by_right
            && has_guard
            && maker != usize::MAX
            && self.actors[maker].life == Life::Alive
            && self.actors[maker].held == Some(inode)
            && scenario.is_one_host()
        {
            self.violated(format!("guard: actor {maker} lives and holds epoch {index}, which actor {actor} ended"));
        }
        if has_newborn_rule && is_newborn && op == Op::Acquire && now_ms - born_ms < TTL_MS.cast_signed() {
            self.violated(format!("newborn: actor {actor} had to give up epoch {index}, young as it was"));
        }
    }

    /// `actor` set the time stamp of an inode, meaning to renew what it holds.
    pub(super) fn touched(&mut self, actor: usize, inode: u64, now_ms: i64) {
        let own = self.actors[actor].held.or(self.actors[actor].newborn);
        if own != Some(inode) {
            self.violated(format!("renewal: actor {actor} renewed an epoch that is another's"));
        }
        if let Some(epoch) = self.epoch(inode) {
            epoch.stamped_ms = now_ms;
        }
    }

    /// `actor` was told that the lock is its own.
    pub(super) fn granted(&mut self, actor: usize, has_guard: bool, now_ms: i64) {
        let Some(inode) = self.actors[actor].newborn.take() else {
            return self.violated(format!("actor {actor} was granted a lock that it has not made"));
        };
        self.actors[actor].held = Some(inode);
        if self.epoch(inode).is_some_and(|epoch| epoch.is_forced) {
            // Accepted: who is broken by force learns it a moment later.
            return;
        }
        for other in 0..self.actors.len() {
            let Some(theirs) = self.actors[other].held else { continue };
            let ended = self.epoch(theirs).is_none_or(|epoch| epoch.ended_by.is_some());
            if other != actor && self.actors[other].life == Life::Alive && (!ended || theirs == inode) {
                self.violated(format!("exclusion: actors {other} and {actor} hold at the same time"));
            }
        }
        if let Some(epoch) = self.epoch(inode) {
            epoch.has_guard = has_guard;
        }
        self.confirmed(actor, now_ms);
    }

    /// `actor` was told that its lease is good.
    pub(super) fn confirmed(&mut self, actor: usize, now_ms: i64) {
        let Some(inode) = self.actors[actor].held else { return };
        if let Some(epoch) = self.epoch(inode) {
            if epoch.is_forced {
                // Accepted: who is broken by force learns it a moment later.
            } else if epoch.ended_by.is_some() {
                self.violated(format!("renewal: actor {actor} was told that it holds an epoch that has ended"));
            } else if now_ms - epoch.stamped_ms <= TTL_MS.cast_signed() {
                epoch.confirmed = true;
            }
        }
    }

    /// `actor`'s release is over. It said yes: then it was this actor that ended the epoch. It said lost:
    /// then the epoch is not at the path.
    pub(super) fn released(&mut self, actor: usize, said_yes: bool, said_lost: bool) {
        let Some(inode) = self.actors[actor].held.take() else { return };
        let at_path = self.at_path == Some(inode);
        let ended_by = self.epoch(inode).and_then(|epoch| epoch.ended_by);
        if said_yes && ended_by != Some(actor) {
            self.violated(format!("release: actor {actor} said that it gave the lock back, and did not"));
        }
        if said_lost && at_path {
            self.violated(format!("release: actor {actor} said that the lock was lost, and it is there"));
        }
    }

    /// Whoever looks for it within the reclaim age finds the record of an epoch that another than its maker
    /// ended.
    pub(super) fn audit(&mut self, quarantined: &[u64], now_ms: i64) {
        let lost = |epoch: &EpochState| {
            epoch.ended_by.is_some_and(|by| by != epoch.maker)
                && now_ms - epoch.ended_ms <= RECLAIM_AGE_MS.cast_signed()
                && !quarantined.contains(&epoch.inode)
        };
        if let Some(index) = self.epochs.iter().position(lost) {
            self.violated(format!("audit: the quarantine of epoch {index} is gone before its time"));
        }
    }

    /// Time passed: what is older than its ttl is not confirmed any more.
    pub(super) fn time_passed(&mut self, now_ms: i64, by_ms: u64) {
        for epoch in &mut self.epochs {
            if now_ms - epoch.stamped_ms > TTL_MS.cast_signed() {
                epoch.confirmed = false;
            }
        }
        for actor in &mut self.actors {
            actor.stalled_ms += by_ms;
        }
    }
}
