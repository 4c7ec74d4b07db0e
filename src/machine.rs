//! What a supervisor does about what happens: (state, event) → actions. Pure; the loop only performs.

use crate::cli::OnLost;
use crate::exit::{Exit, of_signal};
use crate::lease::{give_up_after_ms, last_grace_ms, last_part_ms, renew_every_ms, retry_every_ms};
use crate::report::log::{EndingWhy, Event as Told};

/// How often a holder looks whether the lock is still its own, besides renewing, in milliseconds.
pub const LOOK_EVERY_MS: u64 = 1_000;
/// How often a tree that must end is looked at again, in milliseconds.
const REAP_EVERY_MS: u64 = 50;

/// What became of a child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It exited with this status.
    Exited(u8),
    /// A signal ended it.
    Killed(i32),
    /// A signal stopped it.
    Stopped {
        /// Which one.
        signal: i32,
        /// It has a process group of its own, and that has the terminal.
        has_terminal: bool,
    },
    /// It goes on.
    Continued,
}

impl Change {
    /// The exit code that tells of it, if it is an end.
    pub fn exit_code(self) -> Option<u8> {
        match self {
            Change::Exited(status) => Some(status),
            Change::Killed(signal) => Some(of_signal(signal)),
            Change::Stopped { .. } | Change::Continued => None,
        }
    }
}

/// A signal that has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Its number.
    pub signal: i32,
    /// Sent by the kernel (the terminal) to the whole process group, and COMMAND is in it.
    pub by_kernel: bool,
    /// Sent by this process itself: a SIGPIPE or SIGXFSZ of its own making.
    pub by_self: bool,
}

/// What a renewal said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Renewal {
    /// Nobody can evict us on the strength of an older time stamp.
    Confirmed,
    /// Somebody has entered the slot: look again soon.
    Contested,
    /// The lock is not ours any more; what was found instead.
    Lost(String),
    /// Neither: an error that may pass.
    Failed(String),
    /// Begun, and its answer comes later: the store has to ask somebody else.
    Pending,
}

/// Signal numbers, as Linux gives them on most machines (`sys` checks at compile time).
pub mod number {
    /// Hang-up.
    pub const HUP: i32 = 1;
    /// Ctrl-C.
    pub const INT: i32 = 2;
    /// Ctrl-\.
    pub const QUIT: i32 = 3;
    /// Cannot be caught.
    pub const KILL: i32 = 9;
    /// A pipe without a reader.
    pub const PIPE: i32 = 13;
    /// Please end.
    pub const TERM: i32 = 15;
    /// A child changed its state.
    pub const CHLD: i32 = 17;
    /// Go on.
    pub const CONT: i32 = 18;
    /// Stops whatever it is sent to.
    pub const STOP: i32 = 19;
    /// Ctrl-Z.
    pub const TSTP: i32 = 20;
    /// Read from the background.
    pub const TTIN: i32 = 21;
    /// Write from the background.
    pub const TTOU: i32 = 22;
    /// A file has grown to the limit.
    pub const XFSZ: i32 = 25;
    /// The window has another size.
    pub const WINCH: i32 = 28;
}

/// What was decided before COMMAND was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// The lease, in milliseconds; `None` where there is nothing to keep: degraded, or an ancestor's.
    pub ttl_ms: Option<u64>,
    /// Renew at all.
    pub renew: bool,
    /// These are several locks: when one of them is lost, the others are kept.
    pub several: bool,
    /// Contenders are possible that do not see our guard.
    pub may_be_unseen: bool,
    /// The longest that COMMAND may run, in milliseconds.
    pub max_hold_ms: Option<u64>,
    /// Grace between TERM and KILL, in milliseconds.
    pub kill_after_ms: u64,
    /// What happens to COMMAND when the lock is lost.
    pub on_lost: OnLost,
    /// We lead our session: a hang-up of the terminal reached nobody else.
    pub leads_session: bool,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// COMMAND itself changed its state.
    Command(Change),
    /// A signal arrived.
    Signal(Received),
    /// Time has passed; nothing else happened.
    Tick,
    /// What a renewal said.
    Renewed(Renewal),
    /// What a look said: `Some` if the lock is not ours any more.
    Looked(Option<String>),
    /// How many of COMMAND's tree are still there, of which we may not signal some.
    TreeLeft(usize),
}

/// What is to be done about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Renew; its result is the next event.
    Renew,
    /// Look; its result is the next event.
    Look,
    /// Send COMMAND this signal.
    Forward(i32),
    /// Send this signal to COMMAND and all its descendants, then report how many are left.
    SignalTree(i32),
    /// Stop ourselves by this signal's default action.
    StopSelf(i32),
    /// Say a line.
    Say(String),
    /// Tell the log, if there is one.
    Tell(Told),
    /// It is over: release, and exit with this.
    Finish,
}

/// Why we end COMMAND ourselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    Lost,
    MaxHold,
}

/// The supervisor's state.
#[derive(Clone, Debug)]
pub struct Machine {
    terms: Terms,
    /// Boot clock at the beginning of the grant.
    started_ms: u64,
    last_confirmed_ms: u64,
    renewal_begun_ms: u64,
    /// That renewal's answer is still to come.
    renewing: bool,
    next_renewal_ms: u64,
    next_look_ms: u64,
    stopped: bool,
    /// By something that did not stop us as well.
    stopped_alone: bool,
    lost: bool,
    warned: bool,
    status: Option<u8>,
    was_killed: bool,
    ending: Option<(Ending, u64)>,
    killing: bool,
    next_reap_ms: u64,
}

/// How it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The exit code, as far as the machine knows it.
    pub code: u8,
    /// The lock was lost: there is nothing to release.
    pub lost: bool,
    /// COMMAND was ended by a signal, or by us: its code says nothing of its own.
    pub cut_short: bool,
}

impl Machine {
    /// COMMAND has been started under a lease that counts from `granted_boot_ms`.
    pub fn new(terms: Terms, granted_boot_ms: u64, now_ms: u64) -> Self {
        Machine {
            terms,
            started_ms: now_ms,
            last_confirmed_ms: granted_boot_ms,
            renewal_begun_ms: granted_boot_ms,
            renewing: false,
            next_renewal_ms: granted_boot_ms.saturating_add(terms.ttl_ms.map_or(u64::MAX, renew_every_ms)),
            next_look_ms: now_ms + LOOK_EVERY_MS,
            stopped: false,
            stopped_alone: false,
            lost: false,
            warned: false,
            status: None,
            was_killed: false,
            ending: None,
            killing: false,
            next_reap_ms: u64::MAX,
        }
    }

    /// When the next [`Event::Tick`] is due, by the boot clock.
    pub fn next_due_ms(&self) -> u64 {
        let look_ms = if self.keeps_lease() { self.next_look_ms } else { u64::MAX };
        self.next_deadline_ms().min(look_ms)
    }

    /// The same, but for a mere look: a host that was suspended until after this must act as soon as it resumes.
    pub fn next_deadline_ms(&self) -> u64 {
        let mut due_ms = u64::MAX;
        let mut at = |when_ms: u64| due_ms = due_ms.min(when_ms);
        if self.keeps_lease() {
            if self.terms.renew && !self.renewing {
                at(self.next_renewal_ms);
            }
            if let Some(give_up_ms) = self.give_up_ms() {
                at(give_up_ms);
            }
        }
        match self.ending {
            Some((_, kill_ms)) => {
                at(self.next_reap_ms);
                if !self.killing {
                    at(kill_ms);
                }
            }
            None => {
                if let Some(hold_ms) = self.terms.max_hold_ms {
                    at(self.started_ms.saturating_add(hold_ms));
                }
            }
        }
        due_ms
    }

    /// Whether COMMAND itself has ended; of its tree something may be left.
    pub fn has_ended(&self) -> bool {
        self.status.is_some()
    }

    /// How it ended, once COMMAND has.
    pub fn outcome(&self) -> Option<Outcome> {
        let own = self.status?;
        let code = match self.ending {
            Some((Ending::Lost, _)) => Exit::Lost.code(),
            Some((Ending::MaxHold, _)) => Exit::MaxHold.code(),
            // Only warned: COMMAND's own failure passes through, its success must not hide the loss.
            None if self.lost && own == 0 => Exit::Lost.code(),
            None => own,
        };
        Some(Outcome { code, lost: self.lost, cut_short: self.was_killed || self.ending.is_some() })
    }

    /// Decides.
    pub fn step(&mut self, event: Event, now_ms: u64) -> Vec<Action> {
        match event {
            Event::Command(change) => self.command(change, now_ms),
            Event::Signal(received) => self.signal(received, now_ms),
            Event::Tick => self.tick(now_ms),
            Event::Renewed(renewal) => self.renewed(renewal, now_ms),
            Event::Looked(None) => Vec::new(),
            Event::Looked(Some(found)) => self.lose(&found, now_ms),
            Event::TreeLeft(0) if self.status.is_some() => vec![Action::Finish],
            Event::TreeLeft(_) => {
                self.next_reap_ms = now_ms + REAP_EVERY_MS;
                Vec::new()
            }
        }
    }

    fn command(&mut self, change: Change, now_ms: u64) -> Vec<Action> {
        match change {
            Change::Exited(status) => self.ended(status, Some(status), None, now_ms),
            Change::Killed(signal) => self.ended(of_signal(signal), None, Some(signal), now_ms),
            Change::Stopped { signal, has_terminal } => {
                self.stopped = true;
                let with_us = match signal {
                    _ if self.ending.is_some() => None,
                    // Stopped by the terminal's job control: so are we, and the prompt comes back.
                    number::TSTP | number::TTIN | number::TTOU => Some(signal),
                    // So it does for a shell that suspends itself: the keys reach nobody else.
                    number::STOP if has_terminal => Some(number::TSTP),
                    // By anything else it was stopped alone, and its lock is kept for it.
                    _ => None,
                };
                self.stopped_alone = with_us.is_none();
                with_us.map(Action::StopSelf).into_iter().collect()
            }
            Change::Continued => {
                (self.stopped, self.stopped_alone) = (false, false);
                Vec::new()
            }
        }
    }

    fn ended(&mut self, code: u8, status: Option<u8>, signal: Option<i32>, now_ms: u64) -> Vec<Action> {
        (self.status, self.was_killed) = (Some(code), signal.is_some());
        let told = Told::Ended { status, signal, ran_ms: now_ms.saturating_sub(self.started_ms) };
        let next = match self.ending {
            None => Action::Finish,
            // It is over when all of its tree is.
            Some(_) => Action::SignalTree(0),
        };
        vec![Action::Tell(told), next]
    }

    fn signal(&mut self, received: Received, now_ms: u64) -> Vec<Action> {
        match received.signal {
            number::CHLD => Vec::new(),
            // A line of ours that nobody reads, or that its file has no room for.
            number::PIPE | number::XFSZ if received.by_self => Vec::new(),
            number::CONT => {
                let mut actions = Vec::new();
                if self.keeps_lease() && self.terms.renew && !self.renewing {
                    actions.push(self.begin_renewal(now_ms));
                }
                // A program may want to know that it goes on also where it never stood still.
                if !self.has_ended() && (self.stopped || !received.by_kernel) {
                    (self.stopped, self.stopped_alone) = (false, false);
                    actions.push(Action::Forward(number::CONT));
                }
                actions
            }
            // Stopped it is, but not we: who types this wants the prompt back.
            number::TSTP if received.by_kernel && self.stopped_alone && self.ending.is_none() => {
                self.stopped_alone = false;
                vec![Action::StopSelf(number::TSTP)]
            }
            // The terminal has sent these to the whole group already.
            number::INT | number::QUIT | number::TSTP | number::TTIN | number::TTOU | number::WINCH
                if received.by_kernel =>
            {
                Vec::new()
            }
            // A hang-up of the terminal reaches the session's leader, and nobody else if that is us.
            number::HUP if received.by_kernel && !self.terms.leads_session => Vec::new(),
            // Its number may be another's by now.
            _ if self.has_ended() => Vec::new(),
            signal => vec![Action::Forward(signal)],
        }
    }

    fn tick(&mut self, now_ms: u64) -> Vec<Action> {
        if let Some((_, kill_ms)) = self.ending {
            let mut actions = Vec::new();
            if now_ms >= kill_ms || self.killing {
                self.killing = true;
                actions.push(Action::SignalTree(number::KILL));
            } else if now_ms >= self.next_reap_ms {
                actions.push(Action::SignalTree(0));
            }
            self.next_reap_ms = now_ms + REAP_EVERY_MS;
            actions.append(&mut self.keep_lease(now_ms));
            return actions;
        }
        if self.terms.max_hold_ms.is_some_and(|hold_ms| now_ms >= self.started_ms.saturating_add(hold_ms)) {
            let hold_ms = self.terms.max_hold_ms.unwrap_or(0);
            let line = format!("the command has run for {}, its --max-hold: ending it", crate::text::duration(hold_ms));
            return self.end_command(EndingWhy::MaxHold, self.terms.kill_after_ms, line, now_ms);
        }
        if let Some(give_up_ms) = self.give_up_ms()
            && now_ms >= give_up_ms
        {
            // Who wakes from a suspend renews first: as likely as not nobody else came meanwhile.
            if self.terms.renew && !self.renewing && self.renewal_begun_ms < give_up_ms {
                return vec![self.begin_renewal(now_ms)];
            }
            return self.give_up(now_ms);
        }
        self.keep_lease(now_ms)
    }

    fn keep_lease(&mut self, now_ms: u64) -> Vec<Action> {
        if !self.keeps_lease() {
            return Vec::new();
        }
        if self.terms.renew && !self.renewing && now_ms >= self.next_renewal_ms {
            return vec![self.begin_renewal(now_ms)];
        }
        if now_ms >= self.next_look_ms {
            self.next_look_ms = now_ms + LOOK_EVERY_MS;
            return vec![Action::Look];
        }
        Vec::new()
    }

    fn begin_renewal(&mut self, now_ms: u64) -> Action {
        self.renewing = true;
        self.renewal_begun_ms = now_ms;
        Action::Renew
    }

    fn renewed(&mut self, renewal: Renewal, now_ms: u64) -> Vec<Action> {
        let Some(ttl_ms) = self.terms.ttl_ms else { return Vec::new() };
        if renewal != Renewal::Pending {
            self.renewing = false;
            self.next_look_ms = now_ms + LOOK_EVERY_MS;
        }
        match renewal {
            Renewal::Pending => Vec::new(),
            Renewal::Confirmed => {
                let after_ms = now_ms.saturating_sub(self.last_confirmed_ms);
                // It took effect at some time after the renewal was begun: we may have stalled since, or
                // have waited for whoever had to be asked.
                self.last_confirmed_ms = self.renewal_begun_ms;
                self.next_renewal_ms = now_ms.saturating_add(renew_every_ms(ttl_ms));
                // Twice its time, or tried before: the load, a suspend, or trouble.
                let is_late = std::mem::take(&mut self.warned) || after_ms >= 2 * renew_every_ms(ttl_ms);
                if is_late { vec![Action::Tell(Told::RenewedLate { after_ms })] } else { Vec::new() }
            }
            Renewal::Contested => {
                self.retry(ttl_ms, now_ms, Told::Contested, "another process wants to end the lock".into())
            }
            Renewal::Failed(why) => {
                let line = format!("the lock could not be renewed: {why}");
                self.retry(ttl_ms, now_ms, Told::RenewalFailed { why }, line)
            }
            Renewal::Lost(found) => self.lose(&found, now_ms),
        }
    }

    /// Soon, not a whole period later; and said once, not at every try.
    fn retry(&mut self, ttl_ms: u64, now_ms: u64, told: Told, why: String) -> Vec<Action> {
        self.next_renewal_ms = now_ms + retry_every_ms(ttl_ms);
        if std::mem::replace(&mut self.warned, true) {
            Vec::new()
        } else {
            vec![Action::Tell(told), Action::Say(format!("{why}; trying again"))]
        }
    }

    /// The lock is not ours any more. Only what was found says so, never elapsed time or a failed look.
    fn lose(&mut self, found: &str, now_ms: u64) -> Vec<Action> {
        if std::mem::replace(&mut self.lost, true) && !self.terms.several {
            return Vec::new();
        }
        let mut actions = vec![Action::Tell(Told::Lost { found: found.to_owned() })];
        let line = format!("the lock was lost: {found}");
        match self.terms.on_lost {
            OnLost::Warn => actions.push(Action::Say(format!("{line}; the command goes on"))),
            OnLost::Terminate if self.ending.is_some() => {
                self.ending = self.ending.map(|(_, kill_ms)| (Ending::Lost, kill_ms));
                actions.push(Action::Say(line));
            }
            OnLost::Terminate => {
                let line = format!("{line}; ending the command");
                actions.extend(self.end_command(EndingWhy::Lost, self.terms.kill_after_ms, line, now_ms));
            }
        }
        actions
    }

    /// Not lost, but others may get in soon: COMMAND must have ended before they do.
    fn give_up(&mut self, now_ms: u64) -> Vec<Action> {
        let ttl_ms = self.terms.ttl_ms.unwrap_or(0);
        let left_ms = self.last_confirmed_ms.saturating_add(ttl_ms).saturating_sub(now_ms);
        let line = format!("the lock expires in {} and was not renewed", crate::text::duration(left_ms));
        // Said and acted upon once.
        self.terms.may_be_unseen = false;
        match self.terms.on_lost {
            OnLost::Warn => vec![Action::Say(format!("{line}; the command goes on"))],
            OnLost::Terminate => {
                let grace_ms = last_grace_ms(ttl_ms, self.terms.kill_after_ms, left_ms);
                self.end_command(EndingWhy::Expiring, grace_ms, format!("{line}; ending the command"), now_ms)
            }
        }
    }

    fn end_command(&mut self, why: EndingWhy, grace_ms: u64, line: String, now_ms: u64) -> Vec<Action> {
        let ending = if why == EndingWhy::MaxHold { Ending::MaxHold } else { Ending::Lost };
        self.ending = Some((ending, now_ms.saturating_add(grace_ms)));
        self.next_reap_ms = now_ms + REAP_EVERY_MS;
        // CONT as well: a stopped process does not see a TERM.
        let signals = [Action::SignalTree(number::TERM), Action::SignalTree(number::CONT)];
        [Action::Say(line), Action::Tell(Told::Ending { why })].into_iter().chain(signals).collect()
    }

    fn keeps_lease(&self) -> bool {
        self.terms.ttl_ms.is_some() && (!self.lost || self.terms.several)
    }

    /// When to give up without a confirmed renewal; only where contenders may not see our guard. Behind
    /// a guard that everybody sees nobody can evict us, and hours of work are not killed for a failed
    /// touch.
    fn give_up_ms(&self) -> Option<u64> {
        let ttl_ms = self.terms.ttl_ms?;
        let due_ms = self.last_confirmed_ms.saturating_add(give_up_after_ms(ttl_ms, self.terms.kill_after_ms));
        // A renewal that was begun only now, on waking, is given a part of that for its answer.
        let answer_ms = last_part_ms(ttl_ms, self.terms.kill_after_ms) / 8;
        let woke = self.renewing && self.renewal_begun_ms >= due_ms;
        (self.terms.may_be_unseen && self.keeps_lease() && self.ending.is_none())
            .then(|| if woke { self.renewal_begun_ms.saturating_add(answer_ms) } else { due_ms })
    }
}

#[cfg(test)]
mod tests;
