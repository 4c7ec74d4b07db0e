//! Several locks as one: all of them, or none.
//!
//! **Nothing is held while something is waited for.** Whoever finds one of them busy gives back what it has
//! and sleeps on that one with empty hands. So it cannot deadlock with anybody: not with others who name the
//! same locks in another order, not with those who nest them, not with hosts that number their devices
//! differently (which an order to be kept while waiting would have to rest on). And a signal that ends a
//! waiter finds nothing to give back. The order in which they are tried, by directory and name, is the same
//! for all who want the same ones: it only keeps them out of each other's way.
//!
//! The price: all must be free at one moment. Who needs a lock that hardly ever is holds it first and takes
//! the others inside, in an order that all agree on.

use std::ffi::{OsStr, OsString};
use std::os::fd::RawFd;

use crate::lease::renew_every_ms;
use crate::machine::Renewal;
use crate::options::is_among;
use crate::record::Nonce;
use crate::sys::clock::boot_ms;
use crate::sys::lookout::Word;
use crate::sys::random;
use crate::sys::signal::OnEntry;
use crate::text::Shown;

use super::distant::DistantHeld;
use super::{Attempt, Busy, Evicted, Fault, FileStore, Held, NotReleased, Offer, Part, Store};

/// The longest pause after setbacks, in milliseconds.
const LONGEST_PAUSE_MS: u64 = 64;
/// Grants of all that each took too long to count; then they count as busy for now.
const TURNS: u32 = 3;
/// LOCK's place among the locks: it was named first.
const LOCK: usize = 0;

/// Takes and waits for several lock files at once.
#[derive(Debug)]
pub struct Several {
    /// In the order in which they were named, LOCK first.
    locks: Vec<One>,
    /// Places in `locks`, in the order in which they are tried.
    order: Vec<usize>,
    /// Nonces of locks that ancestors of this process hold.
    enclosing: OsString,
    /// These count as taken.
    reentrant: bool,
    /// The one that was found busy: it is waited for, and tried first.
    busy: Option<usize>,
    /// How often something was given back again, and how long to pause for the last time that it was.
    setbacks: u32,
    pause_ms: u64,
    was_examined: bool,
}

#[derive(Debug)]
struct One {
    name: OsString,
    store: FileStore,
    /// Another name of one of the others.
    is_alias: bool,
}

/// What an attempt to take all of them came to.
enum Taken {
    All(All),
    Busy(Box<Busy>),
    /// Two of them turned out to be one.
    Again,
}

impl Several {
    /// A contender for `lock` and all of `also`. Those whose nonce is among `enclosing` are held by ancestors of
    /// this process, and count as taken if it is `reentrant`.
    pub fn open(
        lock: &OsStr,
        also: &[OsString],
        parents: bool,
        enclosing: OsString,
        reentrant: bool,
        on_entry: &OnEntry,
    ) -> Result<Self, Fault> {
        let mut locks: Vec<One> = Vec::new();
        let mut keys = Vec::new();
        for name in std::iter::once(lock).chain(also.iter().map(OsString::as_os_str)) {
            let store = FileStore::open(name, parents, on_entry)?;
            let key = store.place().key()?;
            // The same file, however it is spelt, is one lock.
            if !keys.contains(&key) {
                keys.push(key);
                locks.push(One { name: name.to_owned(), store, is_alias: false });
            }
        }
        let mut order: Vec<usize> = (0..locks.len()).collect();
        order.sort_by(|a, b| keys[*a].cmp(&keys[*b]));
        Ok(Several { locks, order, enclosing, reentrant, busy: None, setbacks: 0, pause_ms: 0, was_examined: false })
    }

    /// The order for one attempt: first the one that was waited for, as long as those who waited behind it
    /// still sleep. A fencing token is reserved last: once all the others are had, so that setbacks use none up.
    fn turn(&self, offer: &Offer) -> Vec<usize> {
        let mut turn: Vec<usize> = self.busy.into_iter().collect();
        turn.extend(self.order.iter().filter(|at| Some(**at) != self.busy));
        if offer.fence.is_some() {
            turn.sort_by_key(|at| *at == LOCK);
        }
        turn.retain(|at| !self.locks[*at].is_alias);
        turn
    }

    fn take_all(&mut self, offer: &Offer) -> Result<Taken, Fault> {
        let mut all = All::default();
        let mut with_ancestor: Option<Box<Busy>> = None;
        for at in self.turn(offer) {
            let fence = if at == LOCK { offer.fence.clone() } else { None };
            let mut busy = match self.locks[at].store.attempt(&Offer { fence, runs_command: false, ..offer.clone() }) {
                Ok(Attempt::Granted(held)) => {
                    all.pieces.push(Piece { at, name: self.name(at), held, is_lost: false });
                    continue;
                }
                Ok(Attempt::Busy(busy)) => busy,
                Err(fault) => {
                    // That is the news. What cannot be given back expires.
                    let _ = all.give_back();
                    return Err(fault);
                }
            };
            busy.lock = self.name(at);
            let nonce = busy.record.as_ref().map(|record| record.nonce);
            if let Some(ours) = all.pieces.iter().find(|piece| Some(piece.held.nonce()) == nonce) {
                // Two names that no comparison shows to be one: a directory that is mounted twice, a file
                // system that does not tell capitals from small letters. The later one goes.
                self.locks[ours.at.max(at)].is_alias = true;
                all.give_back()?;
                return Ok(Taken::Again);
            }
            if self.reentrant && nonce.is_some_and(|nonce| is_among(&self.enclosing, &nonce)) {
                if at == LOCK {
                    all.enclosing = busy.record.as_ref().map(|record| (record.nonce, record.fence));
                }
                if at == LOCK || with_ancestor.is_none() {
                    with_ancestor = Some(busy);
                }
                continue;
            }
            if !all.pieces.is_empty() {
                // Two that wait for each other's locks may take and give back in step: chance parts them.
                self.pause_ms = LONGEST_PAUSE_MS.min((1 << self.setbacks.min(16)) - 1);
                self.setbacks += 1;
            }
            all.give_back()?;
            for other in (0..self.locks.len()).filter(|other| *other != at) {
                self.locks[other].store.stand_aside();
            }
            self.busy = Some(at);
            return Ok(Taken::Busy(busy));
        }
        Ok(match with_ancestor {
            Some(busy) if all.pieces.is_empty() => Taken::Busy(busy),
            _ => Taken::All(all),
        })
    }

    /// The lock, if an ancestor of this process holds it and that does not count.
    fn of_ancestor(&self, at: usize, mut busy: Box<Busy>) -> Option<Box<Busy>> {
        let nonce = busy.record.as_ref()?.nonce;
        busy.lock = self.name(at);
        (!self.reentrant && is_among(&self.enclosing, &nonce)).then_some(busy)
    }

    /// What a lock is called in reports: LOCK goes without saying.
    fn name(&self, at: usize) -> Option<OsString> {
        (at != LOCK).then(|| self.locks[at].name.clone())
    }
}

impl Store for Several {
    fn attempt(&mut self, offer: &Offer) -> Result<Attempt, Fault> {
        if !self.was_examined {
            // What can never be taken is found before anything is created, and before a wait for another.
            let mut of_ancestor = None;
            for at in 0..self.locks.len() {
                let fence = offer.fence.as_deref().filter(|_| at == LOCK);
                let busy = self.locks[at].store.examine(fence)?;
                // To wait for another first would be in vain.
                of_ancestor = of_ancestor.or_else(|| self.of_ancestor(at, busy?));
            }
            self.was_examined = true;
            if let Some(busy) = of_ancestor {
                return Ok(Attempt::Busy(busy));
            }
        }
        let mut turns = 0;
        loop {
            let mut all = match self.take_all(offer)? {
                Taken::All(all) => all,
                Taken::Busy(busy) => return Ok(Attempt::Busy(busy)),
                Taken::Again => continue,
            };
            // Each counted when it was granted. Do all of them still, now that the last one is?
            if all.counts() {
                return Ok(Attempt::Granted(Box::new(all)));
            }
            all.give_back()?;
            turns += 1;
            if turns == TURNS {
                let note = Some("it took longer than a third of the ttl to take all of them".to_owned());
                return Ok(Attempt::Busy(Box::new(Busy { note, look_again_ms: 100, ..Busy::unknown() })));
            }
        }
    }

    fn wait(&mut self, busy: &Busy, for_ms: u64, word: Option<Word>) -> Result<bool, Fault> {
        let Some(one) = self.busy.and_then(|at| self.locks.get_mut(at)) else {
            // It is not a lock that was busy, but we.
            self.locks[LOCK].store.pause(for_ms.min(busy.look_again_ms));
            return Ok(false);
        };
        let pause_ms = random::jittered_ms(std::mem::take(&mut self.pause_ms)).min(for_ms);
        if pause_ms > 0 {
            one.store.pause(pause_ms);
        }
        let word_was_said = one.store.wait(busy, for_ms - pause_ms, word)?;
        // Another may be the next to be slept on.
        one.store.wake();
        Ok(word_was_said)
    }

    fn on_behalf_of(&mut self, pid: u32, pid_started: u64) {
        self.locks.iter_mut().for_each(|one| one.store.on_behalf_of(pid, pid_started));
    }

    fn absolute_name(&self) -> Result<OsString, Fault> {
        self.locks[LOCK].store.absolute_name()
    }

    fn caveat(&self) -> Option<(Option<OsString>, &'static str)> {
        let mut caveats = self.locks.iter().enumerate().map(|(at, one)| (at, one.store.caveat()));
        caveats.find_map(|(at, caveat)| caveat.map(|(_, words)| (self.name(at), words)))
    }

    fn evicted(&mut self) -> Vec<Evicted> {
        let of_one = |(at, one): (usize, &mut One)| {
            let name = (at != LOCK).then(|| one.name.clone());
            one.store.evicted().into_iter().map(move |evicted| Evicted { lock: name.clone(), ..evicted })
        };
        self.locks.iter_mut().enumerate().flat_map(of_one).collect()
    }
}

impl Drop for Several {
    /// As process 1 each has saved the signal dispositions that it found: they are given back in reverse.
    fn drop(&mut self) {
        while self.locks.pop().is_some() {}
    }
}

/// All of them, ours.
#[derive(Debug, Default)]
struct All {
    /// In the order in which they were granted.
    pieces: Vec<Piece>,
    /// Nonce and fencing token of LOCK, where an ancestor of this process holds it.
    enclosing: Option<(Nonce, Option<u64>)>,
}

#[derive(Debug)]
struct Piece {
    at: usize,
    /// `None`: LOCK.
    name: Option<OsString>,
    held: Box<dyn Held>,
    is_lost: bool,
}

impl Piece {
    /// What was found instead of it, with its name.
    fn lose(&mut self, found: &str) -> String {
        self.is_lost = true;
        self.name.as_ref().map_or_else(|| found.to_owned(), |name| format!("{}: {found}", Shown::os(name)))
    }
}

impl All {
    /// Whether all of them hold at this moment.
    fn counts(&mut self) -> bool {
        let is_late = boot_ms().saturating_sub(self.granted_boot_ms()) >= renew_every_ms(self.ttl_ms());
        !is_late || self.renew() == Renewal::Confirmed
    }

    /// Gives back what was never used.
    fn give_back(&mut self) -> Result<(), Fault> {
        let pieces = std::mem::take(&mut self.pieces);
        let released = pieces.into_iter().rev().map(|piece| piece.held.release(&mut || {}));
        // All of them, before the first failure is told.
        let failures: Vec<NotReleased> = released.filter_map(Result::err).collect();
        failures.into_iter().try_for_each(|failure| match failure {
            NotReleased::Lost(_) => Ok(()),
            NotReleased::Failed(fault) => Err(fault),
        })
    }

    fn first(&self) -> &dyn Held {
        self.pieces.iter().min_by_key(|piece| piece.at).expect("there is one").held.as_ref()
    }

    fn left(&mut self) -> impl Iterator<Item = &mut Piece> {
        self.pieces.iter_mut().filter(|piece| !piece.is_lost)
    }
}

impl Held for All {
    fn nonce(&self) -> Nonce {
        self.enclosing.map_or_else(|| self.first().nonce(), |(nonce, _)| nonce)
    }

    fn fence(&self) -> Option<u64> {
        if let Some((_, fence)) = self.enclosing {
            return fence;
        }
        self.pieces.iter().find(|piece| piece.at == LOCK).and_then(|piece| piece.held.fence())
    }

    fn granted_boot_ms(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.held.granted_boot_ms()).min().unwrap_or(0)
    }

    fn ttl_ms(&self) -> u64 {
        self.first().ttl_ms()
    }

    fn inherited_guard(&self) -> Option<RawFd> {
        self.first().inherited_guard()
    }

    fn may_be_unseen(&self) -> bool {
        self.pieces.iter().any(|piece| piece.held.may_be_unseen())
    }

    /// Confirmed if all of them are. A loss is told once, and then those that are left are kept.
    fn renew(&mut self) -> Renewal {
        let (mut lost, mut worst) = (Vec::new(), Renewal::Confirmed);
        for piece in self.left() {
            match piece.held.renew() {
                Renewal::Confirmed => {}
                Renewal::Lost(found) => lost.push(piece.lose(&found)),
                Renewal::Failed(why) => worst = Renewal::Failed(why),
                other if worst == Renewal::Confirmed => worst = other,
                _ => {}
            }
        }
        if lost.is_empty() { worst } else { Renewal::Lost(lost.join("; ")) }
    }

    fn look(&mut self) -> Option<String> {
        let lost: Vec<String> =
            self.left().filter_map(|piece| piece.held.look().map(|found| piece.lose(&found))).collect();
        (!lost.is_empty()).then(|| lost.join("; "))
    }

    fn keep_nobody_waiting(self: Box<Self>) -> Box<dyn Held> {
        if self.may_hang() { Box::new(DistantHeld::new(self, b"all of its locks".to_vec())) } else { self }
    }

    fn may_hang(&self) -> bool {
        self.pieces.iter().any(|piece| piece.held.may_hang())
    }

    fn locks(&self) -> Vec<(Option<&OsStr>, Nonce)> {
        self.pieces.iter().map(|piece| (piece.name.as_deref(), piece.held.nonce())).collect()
    }

    fn apart(self: Box<Self>) -> Vec<Part> {
        let left = self.pieces.into_iter().rev().filter(|piece| !piece.is_lost);
        left.map(|piece| Part { lock: piece.name, held: piece.held }).collect()
    }

    fn release(mut self: Box<Self>, _meanwhile: &mut dyn FnMut()) -> Result<Option<String>, NotReleased> {
        self.give_back().map(|()| None).map_err(NotReleased::Failed)
    }
}
