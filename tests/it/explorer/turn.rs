//! Whose turn it is. The thread that would make the next call decides on behalf of all, and most often
//! goes on itself.

use super::scenario::Scenario;
use super::search::Choice;
use super::state;
use super::world::{AGE_MS, End, Life, Order, RECLAIM_AGE_MS, RECLAIM_MS, Shared, World};

/// How far the wall clock is set back.
pub(super) const SET_BACK_MS: i64 = 3_600_000;

impl World {
    /// Makes choices until one of them gives an actor its turn, or the schedule is over.
    pub(super) fn advance(&mut self, shared: &Shared, scenario: &Scenario) {
        self.turn = None;
        while self.ended.is_none() && self.turn.is_none() {
            if self.violation.is_some() {
                return self.end(shared, End::Violation);
            }
            if !(0..scenario.actors.len()).any(|actor| self.is_alive(actor)) {
                return self.end(shared, End::Done);
            }
            let choice = match self.search.recorded() {
                Some(choice) => choice,
                None if self.search.is_replayed() => return self.end(shared, End::Known),
                None => {
                    let key = state::key(shared, self);
                    if !self.search.is_new(key) {
                        return self.end(shared, End::Known);
                    }
                    let choices = self.choices(scenario);
                    self.search.choose(choices)
                }
            };
            self.perform(choice, shared, scenario);
        }
    }

    fn may_switch_freely(&self) -> bool {
        let actor = &self.actors[self.current];
        !self.is_alive(self.current) || actor.at_boundary || actor.yields
    }

    fn choices(&mut self, scenario: &Scenario) -> Vec<Choice> {
        let live: Vec<usize> = (0..scenario.actors.len()).filter(|actor| self.is_alive(*actor)).collect();
        let budget = self.search.budget();
        let mut choices = Vec::with_capacity(8);
        let step = |actor: usize| Choice::Step(u8::try_from(actor).unwrap_or(u8::MAX));
        // The one whose thread runs comes first: it costs nothing to let it go on.
        if live.contains(&self.current) {
            choices.push(step(self.current));
        }
        let may_disturb = self.search.may_disturb();
        let has_others = live.iter().any(|actor| *actor != self.current);
        if has_others && (self.may_switch_freely() || may_disturb) {
            choices.extend(live.iter().filter(|actor| **actor != self.current).map(|actor| step(*actor)));
        }
        if budget.deaths > 0 && may_disturb {
            let started = live.iter().filter(|actor| self.actors[**actor].life == Life::Alive);
            choices.extend(started.map(|actor| Choice::Die(u8::try_from(*actor).unwrap_or(u8::MAX))));
        }
        if budget.ages > 0 && may_disturb && self.may_pass(AGE_MS, scenario) {
            choices.push(Choice::Age);
        }
        if budget.reclaims > 0 && may_disturb && self.may_pass(RECLAIM_MS, scenario) {
            choices.push(Choice::Reclaimable);
        }
        if budget.set_backs > 0 && may_disturb {
            choices.push(Choice::SetBack);
        }
        if let [last] = live[..]
            && !self.actors[last].at_boundary
        {
            choices.push(Choice::Stall);
        }
        choices
    }

    /// Whether so much time may pass before anybody makes a call.
    fn may_pass(&self, ms: u64, scenario: &Scenario) -> bool {
        if scenario.passes_at_rest && self.is_alive(self.current) && !self.actors[self.current].at_boundary {
            return false;
        }
        let is_stalled = |actor: usize| {
            let state = &self.actors[actor];
            state.life == Life::Alive && !state.at_boundary && state.stalled_ms + ms > RECLAIM_AGE_MS
        };
        !scenario.timed || !(0..scenario.actors.len()).any(is_stalled)
    }

    fn perform(&mut self, choice: Choice, shared: &Shared, scenario: &Scenario) {
        let is_preemption = match choice {
            Choice::Step(actor) => usize::from(actor) != self.current && !self.may_switch_freely(),
            _ => false,
        };
        self.search.spend(choice, is_preemption);
        match choice {
            Choice::Step(actor) => self.hand_to(usize::from(actor), Order::Go, shared),
            Choice::Die(actor) => {
                self.note(|| format!("actor {actor} dies"));
                self.hand_to(usize::from(actor), Order::Die, shared);
            }
            Choice::Age => self.pass(AGE_MS.cast_signed(), "everything turns old", shared, scenario),
            Choice::Reclaimable => {
                self.pass(RECLAIM_MS.cast_signed(), "every quarantine turns reclaimable", shared, scenario);
            }
            Choice::SetBack => self.pass(-SET_BACK_MS, "the wall clock is set back by an hour", shared, scenario),
            Choice::Stall => {
                let last = (0..scenario.actors.len()).find(|actor| self.is_alive(*actor)).unwrap_or(0);
                self.note(|| format!("actor {last} stalls for ever"));
                self.end(shared, End::Stalled(last));
            }
        }
    }

    fn hand_to(&mut self, actor: usize, order: Order, shared: &Shared) {
        let Some(wake) = shared.wake.get(actor).filter(|_| self.is_alive(actor)) else {
            return self.end(shared, End::Diverged);
        };
        if order == Order::Go {
            let state = &mut self.actors[actor];
            (state.at_boundary, state.yields, state.stalled_ms) = (false, false, 0);
            state.steps += 1;
            self.current = actor;
        }
        self.actors[actor].order = order;
        self.turn = Some(actor);
        wake.notify_one();
    }

    fn pass(&mut self, ms: i64, what: &str, shared: &Shared, scenario: &Scenario) {
        self.note(|| format!("time: {what}"));
        shared.clock.pass(ms, scenario.moves_boot && ms > 0);
        self.time_passed(shared.clock.wall_ms(), u64::try_from(ms).unwrap_or(0));
    }

    fn end(&mut self, shared: &Shared, how: End) {
        self.ended = Some(how);
        self.turn = None;
        shared.leader.notify_one();
    }
}
