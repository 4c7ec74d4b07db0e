//! Waiting for the lock in a file: asleep on its guard, or by the clock.

use crate::record::Guard;
use crate::sys::clock::boot_ms;
use crate::sys::file::{Identity, Try};
use crate::sys::hook::{Step, before, is_scheduled, left_out};
use crate::sys::lookout::{self, Word};
use crate::sys::sleep::Slept;
use crate::sys::{output, random};

use super::file::FileStore;
use super::place::{Epoch, Known};
use super::{Busy, Fault};

/// The longest a waiter sleeps without a look, in milliseconds: the backstop for what no guard tells (a
/// forced break, another host).
pub(super) const BACKSTOP_MS: u64 = 1_000;
/// How often a lock without a record is looked at in quick succession: its maker is about to write it.
const NEWBORN_LOOKS: u32 = 5;

impl FileStore {
    /// Sleeps for at most `for_ms`: on the guard of the epoch that was seen last, where that tells.
    pub(super) fn sleep(&mut self, busy: &Busy, for_ms: u64, word: Option<Word>) -> Result<bool, Fault> {
        let failed = |errno| Fault::System { path: self.place.shown().to_vec(), doing: "wait for its guard", errno };
        let due_ms = for_ms.min(busy.look_again_ms).max(1);
        let Some(Epoch { stat, known, file: Some(file) }) = self.seen.take() else {
            return Ok(self.sleep_by_the_clock(due_ms, word));
        };
        let epoch = Epoch { stat, known, file: None };
        let identity = epoch.identity();
        if !self.has_useful_guard(&epoch) {
            if self.given == Some(identity) {
                // Dead, and waited out by the clock alone: there is nothing to poll for.
                self.polls = u32::MAX;
            }
            let is_newborn = epoch.known == Known::Blank && self.polls < NEWBORN_LOOKS;
            self.seen = Some(Epoch { file: Some(file), ..epoch });
            if is_newborn {
                self.polls += 1;
                self.sleeper.doze();
                return Ok(false);
            }
            return Ok(self.sleep_by_the_clock(due_ms, word));
        }
        if is_scheduled() {
            // One step of a scheduled actor: others decide when it comes to its next.
            before("wait", &self.place.name).map_err(failed)?;
            if file.try_guard().map_err(failed)? == Try::Given {
                self.just_given = Some((identity, file));
            }
            return Ok(false);
        }
        if self.place.file_system.local {
            file.note_sleeper();
        }
        let now_ms = boot_ms();
        let watch = lookout::Watch {
            name: self.c_name.clone(),
            inode: identity.ino,
            mtime_ns: epoch.mtime().ns(),
            stale_boot_ms: now_ms.saturating_add(busy.look_again_ms),
            until_boot_ms: now_ms.saturating_add(for_ms),
            word,
        };
        let (slept, word_was_said) = self.sleeper.sleep_on_guard(&file, &self.place.dir, watch).map_err(failed)?;
        match slept {
            Slept::Given => self.just_given = Some((identity, file)),
            Slept::Called => {}
            Slept::Unsupported => self.given = Some(identity),
        }
        Ok(word_was_said)
    }

    /// Whether sleeping on the guard of `epoch` tells when it ends.
    ///
    /// Never before the record is written: a waiter that took a newborn file's guard would turn its maker
    /// away. And only where the record was written under this boot: on another host the guard is not seen.
    fn has_useful_guard(&self, epoch: &Epoch) -> bool {
        if left_out(Step::Newborn) && epoch.known == Known::Blank {
            return true;
        }
        self.given != Some(epoch.identity())
            && epoch.record().is_some_and(|record| record.guard != Guard::None && record.boot_id == self.who.boot_id)
    }

    /// What the guard is worth that we were just given, now that we know whether its epoch is still `at_path`.
    pub(super) fn settle_guard(&mut self, at_path: Option<Identity>) -> Result<(), Fault> {
        let Some((identity, file)) = self.just_given.take() else { return Ok(()) };
        if at_path == Some(identity) {
            // Its processes are dead, but its time has not come. We let go at once, so that it can be
            // ended, and wait by the clock.
            self.given = Some(identity);
            self.vetoed = None;
            file.unguard().map_err(|errno| self.place.fault("look at it", errno))
        } else {
            // The epoch has ended. Those who sleep behind us sleep on, until we are done.
            self.kept_guards.push(file);
            Ok(())
        }
    }

    fn poll_interval_ms(&mut self) -> u64 {
        self.polls = self.polls.saturating_add(1);
        random::jittered_ms(BACKSTOP_MS.min(1 << self.polls.min(10)))
    }

    /// Polls at a pace that starts at milliseconds and grows to a second.
    fn sleep_by_the_clock(&mut self, due_ms: u64, word: Option<Word>) -> bool {
        let pace_ms = self.poll_interval_ms();
        self.sleeper.sleep(pace_ms.min(due_ms));
        let due = word.filter(|word| boot_ms() >= word.at_boot_ms);
        if let Some(word) = &due {
            output::raw(&word.line);
        }
        due.is_some()
    }
}
