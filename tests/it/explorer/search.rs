//! Depth-first search over schedules, each run from the beginning with a prefix of choices.

use std::collections::{HashMap, HashSet};

use super::scenario::{Budget, Scenario};

/// What happens next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Choice {
    /// This actor makes its next call.
    Step(u8),
    /// This actor dies before its next call; its descriptors are closed.
    Die(u8),
    /// Everything turns old that is not renewed.
    Age,
    /// Every quarantine turns reclaimable.
    Reclaimable,
    /// The wall clock is set back by an hour.
    SetBack,
    /// The last live actor stalls for ever.
    Stall,
}

impl Choice {
    fn letter(self) -> char {
        match self {
            Choice::Step(actor) => char::from(b'0' + actor),
            Choice::Die(actor) => char::from(b'A' + actor),
            Choice::Age => 'a',
            Choice::Reclaimable => 'r',
            Choice::SetBack => 'b',
            Choice::Stall => 's',
        }
    }

    fn of(letter: char) -> Option<Self> {
        let byte = u8::try_from(letter).ok()?;
        Some(match byte {
            b'0'..=b'9' => Choice::Step(byte - b'0'),
            b'A'..=b'I' => Choice::Die(byte - b'A'),
            b'a' => Choice::Age,
            b'r' => Choice::Reclaimable,
            b'b' => Choice::SetBack,
            b's' => Choice::Stall,
            _ => return None,
        })
    }
}

/// A schedule as a word, one letter for each choice.
pub(super) fn word(choices: &[Choice]) -> String {
    choices.iter().map(|choice| choice.letter()).collect()
}

/// A schedule from its word.
pub(super) fn parse(word: &str) -> Option<Vec<Choice>> {
    word.chars().map(Choice::of).collect()
}

#[derive(Clone, Debug)]
struct Node {
    choices: Vec<Choice>,
    taken: usize,
}

/// What was found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    /// Schedules that were run, no two alike.
    pub(super) schedules: u64,
    /// Of these, run to an end of all actors (the others met a state that was known).
    pub(super) complete: u64,
    /// Distinct states.
    pub(super) states: u64,
    /// Distinct ends, each with a visitor who must be able to acquire.
    pub(super) ends: u64,
    /// Steps made in them.
    pub(super) steps: u64,
    /// The longest schedule.
    pub(super) longest: usize,
}

/// The search: where it stands, what it knows, and what the schedule at hand may still do.
#[derive(Debug, Default)]
pub(super) struct Search {
    path: Vec<Node>,
    pos: usize,
    known: HashMap<u64, u8>,
    known_ends: HashSet<u64>,
    left: Budget,
    disturbances: u8,
    bound: Option<u8>,
    is_replay: bool,
    was_cut: bool,
    /// Only schedules with so many disturbances count: those with fewer have been run before.
    level: Option<u8>,
    pub(super) counts: Counts,
}

impl Search {
    /// A search that runs this one schedule.
    pub(super) fn replay(choices: &[Choice]) -> Self {
        let path = choices.iter().map(|choice| Node { choices: vec![*choice], taken: 0 }).collect();
        Search { path, is_replay: true, ..Search::default() }
    }

    pub(super) fn restart(&mut self, scenario: &Scenario) {
        self.pos = 0;
        self.left = scenario.budget;
        self.disturbances = 0;
        self.bound = self.level.or(scenario.bound);
    }

    /// Starts over with so many disturbances in a schedule, and forgets nothing but the way.
    pub(super) fn deepen(&mut self, level: u8) {
        self.level = Some(level);
        self.path.clear();
        self.known.clear();
    }

    pub(super) fn budget(&self) -> Budget {
        self.left
    }

    pub(super) fn is_bounded(&self) -> bool {
        self.bound.is_some()
    }

    /// Whether a disturbance was ruled out by the bound: then a higher one would find more.
    pub(super) fn is_cut(&mut self) -> bool {
        std::mem::take(&mut self.was_cut)
    }

    pub(super) fn may_disturb(&mut self) -> bool {
        let may = self.bound.is_none_or(|bound| self.disturbances < bound);
        self.was_cut |= !may;
        may
    }

    /// The next choice of the prefix, if this is still inside it.
    pub(super) fn recorded(&mut self) -> Option<Choice> {
        let node = self.path.get(self.pos)?;
        self.pos += 1;
        Some(node.choices[node.taken])
    }

    /// Whether a replay has come to its end.
    pub(super) fn is_replayed(&self) -> bool {
        self.is_replay && self.pos >= self.path.len()
    }

    /// Whether the state is new here: never seen, or never with so few disturbances made.
    pub(super) fn is_new(&mut self, key: u64) -> bool {
        match self.known.get_mut(&key) {
            Some(fewest) if *fewest <= self.disturbances => false,
            Some(fewest) => {
                *fewest = self.disturbances;
                true
            }
            None => {
                self.known.insert(key, self.disturbances);
                true
            }
        }
    }

    /// Whether an end like this has not been seen yet.
    pub(super) fn is_new_end(&mut self, key: u64) -> bool {
        self.known_ends.insert(key)
    }

    /// Takes the first of these, and comes back for the others.
    pub(super) fn choose(&mut self, choices: Vec<Choice>) -> Choice {
        let first = choices[0];
        self.path.push(Node { choices, taken: 0 });
        self.pos += 1;
        first
    }

    pub(super) fn spend(&mut self, choice: Choice, is_disturbance: bool) {
        let is_event = !matches!(choice, Choice::Step(_) | Choice::Stall);
        self.disturbances = self.disturbances.saturating_add(u8::from(is_disturbance || is_event));
        match choice {
            Choice::Die(_) => self.left.deaths -= 1,
            Choice::Age => self.left.ages -= 1,
            Choice::Reclaimable => self.left.reclaims -= 1,
            Choice::SetBack => self.left.set_backs -= 1,
            Choice::Step(_) | Choice::Stall => {}
        }
    }

    /// The schedule that was just run.
    pub(super) fn schedule(&self) -> Vec<Choice> {
        self.path[..self.pos].iter().map(|node| node.choices[node.taken]).collect()
    }

    /// Notes the schedule that was run, and turns to the next; `false`: there is none.
    pub(super) fn next(&mut self, is_complete: bool) -> bool {
        if self.level.is_none_or(|level| level == self.disturbances) {
            self.counts.schedules += 1;
            self.counts.complete += u64::from(is_complete);
        }
        self.counts.states = self.counts.states.max(self.known.len() as u64);
        self.counts.ends = self.known_ends.len() as u64;
        self.counts.steps += self.pos as u64;
        self.counts.longest = self.counts.longest.max(self.pos);
        while let Some(last) = self.path.last_mut() {
            last.taken += 1;
            if last.taken < last.choices.len() {
                return true;
            }
            self.path.pop();
        }
        false
    }
}
