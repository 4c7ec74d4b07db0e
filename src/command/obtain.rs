//! Taking a lock, with patience.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use crate::cli::Talk;
use crate::exit::Exit;
use crate::options::{Patience, is_among};
use crate::record::Nonce;
use crate::report::log::{Event, EvictedWhy};
use crate::report::page::cut;
use crate::report::{BusyLock, EvictedLock};
use crate::store::{Attempt, Basis, Busy, Evicted, Fault, Held, Offer, Store};
use crate::sys::attendant::{Attendant, Mask, Orders};
use crate::sys::clock::{boot_ms, wall_ms};
use crate::sys::lookout::Word;
use crate::sys::signal::OnEntry;
use crate::sys::{output, process, terminal, user};
use crate::text::{Shown, duration};

use super::log::{Log, other};

/// A wait that lasts longer than this is spoken of, in milliseconds.
const SPEAK_AFTER_MS: u64 = 1_000;

/// How long a file system may take for one answer when patience has ended, in milliseconds: whoever gives
/// up in the middle of a grant leaves a lock behind.
const HANG_PATIENCE_MS: u64 = 1_000;
/// The same for whoever has no patience at all.
const HANG_PATIENCE_AT_ONCE_MS: u64 = 5_000;

/// How it ended.
pub(super) enum Obtained {
    /// With the lock.
    Lock(Box<dyn Held>),
    /// Without.
    Busy(Box<Busy>, Waited),
    /// An ancestor of this process holds it.
    Ancestor(Nonce, Box<Busy>),
}

/// For how long a contender has waited.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waited {
    /// In milliseconds.
    pub(super) ms: u64,
}

impl Waited {
    /// "held", or for how long it was held in vain.
    pub(super) fn how(self) -> String {
        if self.ms == 0 { "held".into() } else { format!("still held after {}", duration(self.ms)) }
    }
}

/// `-v`: what should be known about the place of the lock.
pub(super) fn say_caveat(store: &dyn Store, lock: &OsString, talk: Talk) {
    if talk.verbose
        && let Some((named, caveat)) = store.caveat()
    {
        output::complain(&format!("{}: {caveat}", Shown::os(named.as_ref().unwrap_or(lock))));
    }
}

/// Tries, waits, tries again, until the lock is granted or patience ends.
pub(super) fn obtain(
    store: &mut dyn Store,
    offer: &Offer,
    patience: Patience,
    lock: &OsString,
    talk: Talk,
    on_entry: &OnEntry,
    log: &Log,
) -> Result<Obtained, Fault> {
    let quiet = talk.quiet;
    let enclosing = process::variable("WITHLOCK_HELD").unwrap_or_default();
    let began_ms = boot_ms();
    let mut notice = Notice { quiet, is_terminal: None, said: false };
    let mut outage = Outage { was_reached: false, said: false };
    let mut is_waiting = false;
    let attendant =
        store.may_hang().then(|| Attendant::start(orders(patience, began_ms, lock, quiet, on_entry))).flatten();
    loop {
        if let Some(attendant) = &attendant {
            attendant.asking();
        }
        let attempt = store.attempt(offer);
        let evicted = store.evicted();
        if talk.verbose && !evicted.is_empty() {
            notice.clear();
            evicted.iter().for_each(|evicted| output::complain(&evicted_line(evicted, lock)));
        }
        log.evicted(evicted);
        let busy = match attempt {
            Ok(Attempt::Granted(held)) => {
                notice.clear();
                log.acquired(held.as_ref(), began_ms);
                return Ok(Obtained::Lock(held));
            }
            Ok(Attempt::Busy(busy)) => busy,
            Err(fault) => {
                let waited_ms = boot_ms().saturating_sub(began_ms);
                let left_ms = outage.left_ms(&fault, patience, waited_ms);
                if left_ms == 0 {
                    notice.clear();
                    return Err(fault);
                }
                if !quiet && waited_ms >= SPEAK_AFTER_MS {
                    outage.say(&fault);
                }
                store.pause(left_ms);
                continue;
            }
        };
        outage = Outage { was_reached: true, said: false };
        // The variable alone proves nothing: it counts only while the file still carries that nonce.
        if let Some(record) = &busy.record
            && is_among(&enclosing, &record.nonce)
        {
            return Ok(Obtained::Ancestor(record.nonce, busy));
        }
        let waited_ms = boot_ms().saturating_sub(began_ms);
        let left_ms = match patience {
            Patience::Forever => u64::MAX,
            Patience::AtMost(most_ms) if waited_ms >= most_ms => {
                notice.clear();
                return Ok(Obtained::Busy(busy, Waited { ms: if most_ms == 0 { 0 } else { waited_ms } }));
            }
            Patience::AtMost(most_ms) => most_ms - waited_ms,
        };
        if !std::mem::replace(&mut is_waiting, true) {
            log.tell_of(busy.lock.as_deref(), None, || Event::Waiting(other(&busy)));
        }
        let next_ms = notice.show(&busy, lock, waited_ms);
        // No word of a wait that is over by then: its end has a line of its own.
        let ends_boot_ms = match patience {
            Patience::Forever => u64::MAX,
            Patience::AtMost(most_ms) => began_ms.saturating_add(most_ms),
        };
        let word = notice.word(&busy, lock, began_ms).filter(|word| word.at_boot_ms < ends_boot_ms);
        let for_ms = left_ms.min(next_ms);
        if let Some(attendant) = &attendant {
            attendant.sleeping(for_ms);
        }
        notice.said |= store.wait(&busy, for_ms, word)?;
    }
}

/// What to do when the lock's file system hangs: a limited patience ends all the same, and without a limit
/// its return is waited for. Signals act, with nothing in our hands but perhaps a newborn lock.
fn orders(patience: Patience, began_ms: u64, lock: &OsStr, quiet: bool, on_entry: &OnEntry) -> Orders {
    let (patience_ms, not_before_boot_ms) = match patience {
        Patience::Forever => (HANG_PATIENCE_MS, u64::MAX),
        Patience::AtMost(0) => (HANG_PATIENCE_AT_ONCE_MS, began_ms),
        Patience::AtMost(most_ms) => (HANG_PATIENCE_MS, began_ms.saturating_add(most_ms)),
    };
    let path = Shown::os(lock);
    Orders {
        patience_ms,
        not_before_boot_ms,
        word: (!quiet).then(|| format!("{path}: waiting: its file system does not answer")),
        last_word: format!("{path}: its file system does not answer, gave up"),
        exit: Exit::Io.code(),
        mask: Some(Mask::while_waiting(on_entry)),
    }
}

/// Nobody answers who could say whether the lock is free.
struct Outage {
    was_reached: bool,
    said: bool,
}

impl Outage {
    /// For how long it is borne: to the end of a limited patience. Without a limit one that begins during
    /// the wait is, and one that is there from the beginning is not: it may be a mistake.
    fn left_ms(&self, fault: &Fault, patience: Patience, waited_ms: u64) -> u64 {
        match patience {
            _ if !fault.may_pass() => 0,
            Patience::Forever => u64::from(self.was_reached) * u64::MAX,
            Patience::AtMost(most_ms) => most_ms.saturating_sub(waited_ms),
        }
    }

    fn say(&mut self, fault: &Fault) {
        if !std::mem::replace(&mut self.said, true) {
            output::complain(&format!("waiting: {fault}"));
        }
    }
}

/// The line that says what a wait is for: one that is kept up to date on a terminal, one only elsewhere.
struct Notice {
    quiet: bool,
    is_terminal: Option<bool>,
    said: bool,
}

impl Notice {
    /// On a terminal: shows or renews the line if it is due. How long until it is again.
    fn show(&mut self, busy: &Busy, lock: &OsString, waited_ms: u64) -> u64 {
        if self.quiet || !*self.is_terminal.get_or_insert_with(output::is_terminal) {
            return u64::MAX;
        }
        if waited_ms < SPEAK_AFTER_MS {
            return SPEAK_AFTER_MS - waited_ms;
        }
        let line =
            format!("withlock: {}", busy_line(busy, lock, &format!("waiting for {}, held", duration(waited_ms))));
        // In the last column some terminals already go on to the next row.
        let columns = terminal::columns_of_errors().map_or(usize::MAX, |columns| columns.saturating_sub(1));
        output::raw(format!("\r\x1b[K{}", cut(&line, columns)).as_bytes());
        self.said = true;
        SPEAK_AFTER_MS
    }

    /// Elsewhere: the one line, to be said while we sleep. Nobody is woken for it.
    fn word(&self, busy: &Busy, lock: &OsString, began_ms: u64) -> Option<Word> {
        if self.quiet || self.said || self.is_terminal != Some(false) {
            return None;
        }
        let line = format!("withlock: {}\n", busy_line(busy, lock, "waiting, held")).into_bytes();
        Some(Word { at_boot_ms: began_ms + SPEAK_AFTER_MS, line })
    }

    /// Takes the line on the terminal away again.
    fn clear(&mut self) {
        if self.said && self.is_terminal == Some(true) {
            output::raw(b"\r\x1b[K");
        }
    }
}

/// The one line about a lock that was ended on the way.
fn evicted_line(evicted: &Evicted, lock: &OsString) -> String {
    let record = evicted.record.as_ref();
    EvictedLock {
        path: evicted.lock.as_ref().unwrap_or(lock).as_bytes(),
        record,
        user: record.and_then(|record| user::local_name(record.uid)),
        why: match evicted.basis {
            Basis::Unchanged => EvictedWhy::Unchanged,
            Basis::DeadHolder => EvictedWhy::Dead,
            Basis::Age | Basis::Any => EvictedWhy::Stale,
        },
        lies_at: evicted.lies_at.as_bytes(),
    }
    .line()
}

/// The one line about a lock that another holds.
pub(super) fn busy_line(busy: &Busy, lock: &OsString, how: &str) -> String {
    BusyLock {
        path: busy.lock.as_ref().unwrap_or(lock).as_bytes(),
        record: busy.record.as_ref(),
        user: busy.record.as_ref().and_then(|record| user::local_name(record.uid)),
        renewed_at_ms: busy.renewed_at_ms,
        expires_in_ms: busy.expires_in_ms,
        note: busy.note.as_deref(),
        now_ms: i64::try_from(wall_ms()).unwrap_or(i64::MAX),
    }
    .line(how)
}
