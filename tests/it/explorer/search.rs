//! Depth-first search over schedules, each run from the beginning with a prefix of choices.

use std::collections::{HashMap, HashSet};

use super::scenario::{Budget, Scenario};

/// What happens next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Choice {
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
pub fn word(choices: &[Choice]) -> String {
    choices.iter().map(|choice| choice.letter()).collect()
}

/// A schedule from its word.
pub fn parse(word: &str) -> Option<Vec<Choice>> {
    word.chars().map(Choice::of).collect()
}

#[derive(Clone, Debug)]
struct Node {
    choices: Vec<Choice>,
    taken: usize,
}

/// What was found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Schedules that were run, no two alike.
    pub schedules: u64,
    /// Of these, run to an end of all actors (the others met a state that was known).
    pub complete: u64,
    /// Distinct states.
    pub states: u64,
    /// Distinct ends, each with a visitor who must be able to acquire.
    pub ends: u64,
    /// Steps made in them.
    pub steps: u64,
    /// The longest schedule.
    pub longest: usize,
}

/// The search: where it stands, what it knows, and what the schedule at hand may still do.
#[derive(Debug, Default)]
pub struct Search {
    path: Vec<Node>,
    pos: usize,
    known: HashMap<u64, u8>,
    known_ends: HashSet<u64>,
    left: Budget,
    preemptions: u8,
    bound: Option<u8>,
    is_replay: bool,
    pub counts: Counts,
}

impl Search {
    /// A search that runs this one schedule.
    pub fn replay(choices: &[Choice]) -> Self {
        let path = choices.iter().map(|choice| Node { choices: vec![*choice], taken: 0 }).collect();
        Search { path, is_replay: true, ..Search::default() }
    }

    pub fn restart(&mut self, scenario: &Scenario) {
        self.pos = 0;
        self.left = scenario.budget;
        self.preemptions = 0;
        self.bound = scenario.bound;
    }

    pub fn budget(&self) -> Budget {
        self.left
    }

    pub fn is_bounded(&self) -> bool {
        self.bound.is_some()
    }

    pub fn may_preempt(&self) -> bool {
        self.bound.is_none_or(|bound| self.preemptions < bound)
    }

    /// The next choice of the prefix, if this is still inside it.
    pub fn recorded(&mut self) -> Option<Choice> {
        let node = self.path.get(self.pos)?;
        self.pos += 1;
        Some(node.choices[node.taken])
    }

    /// Whether a replay has come to its end.
    pub fn is_replayed(&self) -> bool {
        self.is_replay && self.pos >= self.path.len()
    }

    /// Whether the state is new here: never seen, or never with so few preemptions made.
    pub fn is_new(&mut self, key: u64) -> bool {
        match self.known.get_mut(&key) {
            Some(fewest) if *fewest <= self.preemptions => false,
            Some(fewest) => {
                *fewest = self.preemptions;
                true
            }
            None => {
                self.known.insert(key, self.preemptions);
                true
            }
        }
    }

    /// Whether an end like this has not been seen yet.
    pub fn is_new_end(&mut self, key: u64) -> bool {
        self.known_ends.insert(key)
    }

    /// Takes the first of these, and comes back for the others.
    pub fn choose(&mut self, choices: Vec<Choice>) -> Choice {
        let first = choices[0];
        self.path.push(Node { choices, taken: 0 });
        self.pos += 1;
        first
    }

    pub fn spend(&mut self, choice: Choice, is_preemption: bool) {
        self.preemptions += u8::from(is_preemption);
        match choice {
            Choice::Die(_) => self.left.deaths -= 1,
            Choice::Age => self.left.ages -= 1,
            Choice::Reclaimable => self.left.reclaims -= 1,
            Choice::SetBack => self.left.set_backs -= 1,
            Choice::Step(_) | Choice::Stall => {}
        }
    }

    /// The schedule that was just run.
    pub fn schedule(&self) -> Vec<Choice> {
        self.path[..self.pos].iter().map(|node| node.choices[node.taken]).collect()
    }

    /// Notes the schedule that was run, and turns to the next; `false`: there is none.
    pub fn next(&mut self, is_complete: bool) -> bool {
        self.counts.schedules += 1;
        self.counts.complete += u64::from(is_complete);
        self.counts.states = self.known.len() as u64;
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
