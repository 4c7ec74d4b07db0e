//! Poll → event → machine → perform. Decides nothing.

use std::collections::HashSet;
use std::ffi::OsStr;

use crate::machine::{Action, Change, Event, Machine, Outcome, number};
use crate::report::log::Event as Told;
use crate::store::{Held, News};
use crate::sys::clock::boot_ms;
use crate::sys::job::{self, Foreground};
use crate::sys::output::complain;
use crate::sys::process::{self, Children, Zombie, descendants, next_change};
use crate::sys::signal::{Signals, stop_self};
use crate::sys::timer::Waiter;
use crate::text::Shown;

/// Watches over COMMAND until it, or, where it must be ended, all of its tree, has ended.
///
/// `held` is the lock that is kept for it, if any. It is not released here. `lock` is its name as the
/// user gave it, for messages. `tell` is given the events for the log. COMMAND may be left to be reaped.
pub fn supervise(
    command_pid: i32,
    machine: Machine,
    signals: &Signals,
    lock: &OsStr,
    held: Option<&mut Box<dyn Held>>,
    tell: &dyn Fn(Told),
) -> Outcome {
    let mut supervisor = Supervisor {
        command_pid,
        started: None,
        machine,
        lock,
        held,
        tell,
        named: HashSet::new(),
        foreground: None,
        finished: None,
    };
    let mut waiter = Waiter::new();
    let mut has_signal = true;
    loop {
        if has_signal && let Some(outcome) = supervisor.take_in(signals) {
            return outcome;
        }
        while let Some(news) = supervisor.held.as_mut().and_then(|held| held.news()) {
            supervisor.handle(match news {
                News::Renewed(renewal) => Event::Renewed(renewal),
                News::Lost(found) => Event::Looked(Some(found)),
            });
        }
        if boot_ms() >= supervisor.machine.next_due_ms() {
            supervisor.handle(Event::Tick);
        }
        if let Some(outcome) = supervisor.finished {
            return outcome;
        }
        let (due_ms, deadline_ms) = (supervisor.machine.next_due_ms(), supervisor.machine.next_deadline_ms());
        let news = supervisor.held.as_ref().and_then(|held| held.news_descriptor());
        has_signal = waiter.wait(signals, news, due_ms, deadline_ms).unwrap_or_else(|_| {
            // Without a descriptor to spare there is still the pace of the looks.
            crate::sys::sleep::pause(100);
            true
        });
    }
}

/// How long a command may run before [`supervise`] must watch over it, in milliseconds.
const BRIEFLY_MS: u16 = 20;

/// Waits for COMMAND's end for a moment, in which there is nothing to renew, to hand on or to say; its
/// exit code. `None`: something else happened, or nothing yet. COMMAND is left to be reaped.
pub fn supervise_briefly(command_pid: i32, signals: &Signals) -> Option<u8> {
    Waiter::wait_briefly(signals, BRIEFLY_MS);
    process::ended(command_pid).and_then(Change::exit_code)
}

struct Supervisor<'a> {
    command_pid: i32,
    /// COMMAND's start time, asked for once it matters: it tells its tree from children that this
    /// process had before.
    started: Option<u64>,
    machine: Machine,
    lock: &'a OsStr,
    held: Option<&'a mut Box<dyn Held>>,
    tell: &'a dyn Fn(Told),
    /// Processes that we may not signal, and have said so.
    named: HashSet<i32>,
    /// COMMAND's own process group, if that had the terminal when it was stopped.
    foreground: Option<Foreground>,
    finished: Option<Outcome>,
}

impl Supervisor<'_> {
    /// Signals, and what they tell of children.
    fn take_in(&mut self, signals: &Signals) -> Option<Outcome> {
        // The common end first, and no more than it: others wait for the lock. Once reaped, its number is no
        // longer its own.
        if !self.machine.has_ended()
            && let Some(change) = process::ended(self.command_pid)
        {
            self.handle(Event::Command(change));
            if self.finished.is_some() {
                return self.finished;
            }
            drop(Zombie(self.command_pid));
        }
        // Signals before children: a SIGCHLD that is read after the last look at the children would be
        // the only word of a child that ended in between.
        while let Ok(Some(mut received)) = signals.next() {
            received.by_kernel = received.by_kernel && job::is_in_our_group(self.command_pid);
            // Whether COMMAND was stopped before that makes a difference.
            if received.signal == number::TSTP
                && let Some(outcome) = self.look_at_children()
            {
                return Some(outcome);
            }
            self.handle(Event::Signal(received));
        }
        self.look_at_children()
    }

    /// Takes notice of all that became of our children; the outcome, if that is the end.
    fn look_at_children(&mut self) -> Option<Outcome> {
        while let Some((pid, change)) = next_change() {
            // Any other was an orphan of COMMAND's, which we are the subreaper of: reaped, and no more.
            if pid == self.command_pid {
                self.handle(Event::Command(change));
            }
            if self.finished.is_some() {
                break;
            }
        }
        self.finished
    }

    fn handle(&mut self, event: Event) {
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            for action in self.machine.step(event, boot_ms()) {
                self.perform(action, &mut events);
            }
        }
    }

    fn perform(&mut self, action: Action, events: &mut Vec<Event>) {
        match action {
            Action::Renew => events.extend(self.held.as_mut().map(|held| Event::Renewed(held.renew()))),
            Action::Look => events.extend(self.held.as_mut().map(|held| Event::Looked(held.look()))),
            Action::Forward(signal) => {
                let _ = process::send(self.command_pid, signal);
            }
            Action::SignalTree(signal) => events.push(Event::TreeLeft(self.signal_tree(signal))),
            Action::StopSelf(signal) => self.stop(signal),
            Action::Say(line) => complain(&format!("{}: {line}", Shown::os(self.lock))),
            Action::Tell(event) => (self.tell)(event),
            Action::Finish => self.finished = self.machine.outcome(),
        }
    }

    /// Until somebody continues us.
    fn stop(&mut self, signal: i32) {
        self.foreground = match Foreground::of(self.command_pid) {
            // It has given the terminal back to us.
            None if job::has_terminal() => None,
            // In the background it still expects that `fg` gives it the terminal.
            found => found.or(self.foreground),
        };
        stop_self(signal);
        // Before COMMAND is continued: it would be stopped at once for using the terminal.
        if let Some(foreground) = self.foreground {
            foreground.restore();
        }
    }

    /// Signals COMMAND and all its descendants; how many are left that we may signal. What is done again and again until
    /// nothing is left is done cheaply, and believed only when it was done once with care.
    fn signal_tree(&mut self, signal: i32) -> usize {
        let is_repeated = matches!(signal, 0 | number::KILL);
        match if is_repeated { self.signal_those(signal, Children::Listed) } else { 0 } {
            0 => self.signal_those(signal, Children::All),
            left => left,
        }
    }

    fn signal_those(&mut self, signal: i32, children: Children) -> usize {
        let pid = self.command_pid;
        let started = *self.started.get_or_insert_with(|| process::Stat::of(pid).map_or(0, |stat| stat.started));
        let tree = descendants(pid, started, children);
        let mut left = 0;
        // COMMAND itself is our child, whatever /proc shows of it.
        if !self.machine.has_ended() && tree.iter().all(|descendant| descendant.pid != pid) {
            left += usize::from(process::send(pid, signal).is_ok());
        }
        for descendant in tree {
            match descendant.send(signal) {
                Ok(()) => left += 1,
                Err(crate::sys::Errno::EPERM) => {
                    if self.named.insert(descendant.pid) {
                        let command = Shown::os(&descendant.command);
                        complain(&format!("no permission to end process {} ({command})", descendant.pid));
                    }
                }
                Err(_) => {}
            }
        }
        left
    }
}
