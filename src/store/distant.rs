//! Looking after a lock on a file system that other machines have a part in. Any call on it may hang for
//! as long as one of them does, and a holder must be able to end COMMAND before its lease is over all the
//! same. So renewals, looks and the release are errands of a thread.
//!
//! Nobody waits for a renewal or a look: what they found comes as news. A release is waited for, but not
//! for ever: what it would give back expires.

use std::ffi::{OsStr, OsString};
use std::io::{PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::Builder;
use std::time::Duration;

use crate::machine::Renewal;
use crate::record::Nonce;
use crate::sys::clock::boot_ms;

use super::held::RELEASE_PATIENCE_MS;
use super::{Fault, Held, News, NotReleased, Part};

/// How long a release is waited for, in milliseconds: for its own tries, and for the answer to the last.
const RELEASE_AT_MOST_MS: u64 = RELEASE_PATIENCE_MS + 1_000;

/// Locks that this process was granted, in the hands of a thread.
#[derive(Debug)]
pub(super) struct DistantHeld {
    facts: Facts,
    hands: Hands,
}

/// What is asked of a lock that is in other hands.
#[derive(Debug)]
struct Facts {
    nonce: Nonce,
    fence: Option<u64>,
    granted_boot_ms: u64,
    ttl_ms: u64,
    inherited_guard: Option<RawFd>,
    locks: Vec<(Option<OsString>, Nonce)>,
    path: Vec<u8>,
}

/// Who has it.
#[derive(Debug)]
enum Hands {
    /// Nobody has been sent yet: most commands have ended before there is anything to do.
    Ours(Box<dyn Held>),
    Runner(Runner),
    /// It was given away, and there was no thread to take it.
    Nobody,
}

impl DistantHeld {
    /// `path` is what they are called when they cannot be given back.
    pub(super) fn new(held: Box<dyn Held>, path: Vec<u8>) -> Self {
        let facts = Facts {
            nonce: held.nonce(),
            fence: held.fence(),
            granted_boot_ms: held.granted_boot_ms(),
            ttl_ms: held.ttl_ms(),
            inherited_guard: held.inherited_guard(),
            locks: held.locks().into_iter().map(|(lock, nonce)| (lock.map(OsStr::to_owned), nonce)).collect(),
            path,
        };
        DistantHeld { facts, hands: Hands::Ours(held) }
    }

    /// The thread, from now on.
    fn runner(&mut self) -> Option<&mut Runner> {
        if matches!(self.hands, Hands::Ours(_))
            && let Hands::Ours(held) = std::mem::replace(&mut self.hands, Hands::Nobody)
        {
            match Runner::start(held) {
                Ok(runner) => self.hands = Hands::Runner(runner),
                Err(held) => self.hands = Hands::Ours(held),
            }
        }
        match &mut self.hands {
            Hands::Runner(runner) => Some(runner),
            Hands::Ours(_) | Hands::Nobody => None,
        }
    }
}

impl Held for DistantHeld {
    fn nonce(&self) -> Nonce {
        self.facts.nonce
    }

    fn fence(&self) -> Option<u64> {
        self.facts.fence
    }

    fn granted_boot_ms(&self) -> u64 {
        self.facts.granted_boot_ms
    }

    fn ttl_ms(&self) -> u64 {
        self.facts.ttl_ms
    }

    fn inherited_guard(&self) -> Option<RawFd> {
        self.facts.inherited_guard
    }

    fn may_be_unseen(&self) -> bool {
        true
    }

    fn renew(&mut self) -> Renewal {
        match self.runner().map(|runner| runner.send(Errand::Renew)) {
            Some(true) => Renewal::Pending,
            _ => match &mut self.hands {
                // Without a thread to spare one that may hang is better than none.
                Hands::Ours(held) => held.renew(),
                Hands::Runner(_) | Hands::Nobody => Renewal::Failed("nobody is there to renew it".into()),
            },
        }
    }

    fn look(&mut self) -> Option<String> {
        if let Some(runner) = self.runner()
            && !runner.is_looking
        {
            runner.is_looking = runner.send(Errand::Look);
        }
        None
    }

    fn news_descriptor(&self) -> Option<BorrowedFd<'_>> {
        match &self.hands {
            Hands::Runner(runner) => Some(runner.bell.as_fd()),
            Hands::Ours(_) | Hands::Nobody => None,
        }
    }

    fn news(&mut self) -> Option<News> {
        match &mut self.hands {
            Hands::Runner(runner) => runner.news(),
            Hands::Ours(_) | Hands::Nobody => None,
        }
    }

    fn keep_nobody_waiting(self: Box<Self>) -> Box<dyn Held> {
        self
    }

    fn locks(&self) -> Vec<(Option<&OsStr>, Nonce)> {
        self.facts.locks.iter().map(|(lock, nonce)| (lock.as_deref(), *nonce)).collect()
    }

    fn apart(mut self: Box<Self>) -> Vec<Part> {
        if self.facts.locks.len() == 1 {
            return vec![Part { lock: None, held: self }];
        }
        let together = match std::mem::replace(&mut self.hands, Hands::Nobody) {
            Hands::Ours(held) => Some(held),
            Hands::Runner(runner) => runner.back(),
            Hands::Nobody => None,
        };
        match together {
            // Each is released by a thread of its own: one may answer where another does not.
            Some(held) => held
                .apart()
                .into_iter()
                .map(|Part { lock, held }| Part { lock, held: held.keep_nobody_waiting() })
                .collect(),
            None => vec![Part { lock: None, held: self }],
        }
    }

    fn release(mut self: Box<Self>, meanwhile: &mut dyn FnMut()) -> Result<Option<String>, NotReleased> {
        let released = match self.runner() {
            Some(runner) => runner.release(meanwhile),
            // Without a thread to spare one that may hang is better than none.
            None => match std::mem::replace(&mut self.hands, Hands::Nobody) {
                Hands::Ours(held) => return held.release(meanwhile),
                Hands::Runner(_) | Hands::Nobody => None,
            },
        };
        let path = std::mem::take(&mut self.facts.path);
        let why = "cannot be released: its file system does not answer".to_owned();
        released.unwrap_or(Err(NotReleased::Failed(Fault::Service { path, why })))
    }
}

/// What the thread is asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Errand {
    Renew,
    Look,
    Release,
    /// To give the locks back to whoever sent the thread, and to end.
    Back,
}

/// What it came to.
#[derive(Debug)]
enum Done {
    Renewed(Renewal),
    Looked(Option<String>),
    Released(Result<Option<String>, NotReleased>),
    Back(Box<dyn Held>),
}

/// The other end of the thread. It has all signals blocked, like the thread that starts it. A sudden end
/// of the process leaves nothing undone that a killed holder would not.
#[derive(Debug)]
struct Runner {
    errands: Sender<Errand>,
    done: Receiver<Done>,
    /// One byte for each thing done that was not yet taken.
    bell: PipeReader,
    /// A look is under way: one is enough.
    is_looking: bool,
}

impl Runner {
    /// Starts the thread, or gives the lock back.
    fn start(held: Box<dyn Held>) -> Result<Self, Box<dyn Held>> {
        let Ok((bell, rope)) = std::io::pipe() else { return Err(held) };
        let (errands, to_do) = channel();
        let (tell, done) = channel();
        // Handed over once the thread is there: what a thread that cannot be started was given is lost.
        let (hand, over) = channel::<Box<dyn Held>>();
        let started = Builder::new().spawn(move || {
            if let Ok(held) = over.recv() {
                run_errands(held, &to_do, &tell, rope);
            }
        });
        if started.is_err() {
            return Err(held);
        }
        hand.send(held).map_err(|unsent| unsent.0)?;
        Ok(Runner { errands, done, bell, is_looking: false })
    }

    fn send(&self, errand: Errand) -> bool {
        self.errands.send(errand).is_ok()
    }

    fn news(&mut self) -> Option<News> {
        while let Ok(done) = self.done.try_recv() {
            // Written right after it was sent: this waits for a thread to do its next step, no longer.
            let _ = self.bell.read_exact(&mut [0]);
            match done {
                Done::Renewed(renewal) => return Some(News::Renewed(renewal)),
                Done::Looked(found) => {
                    self.is_looking = false;
                    if let Some(found) = found {
                        return Some(News::Lost(found));
                    }
                }
                Done::Released(_) | Done::Back(_) => {}
            }
        }
        None
    }

    /// The locks, taken back from the thread; `None`: it has not come back in time.
    fn back(&self) -> Option<Box<dyn Held>> {
        let until_ms = boot_ms() + RELEASE_AT_MOST_MS;
        self.errands.send(Errand::Back).ok()?;
        loop {
            let left = Duration::from_millis(until_ms.saturating_sub(boot_ms()));
            if let Done::Back(held) = self.done.recv_timeout(left).ok()? {
                return Some(held);
            }
        }
    }

    /// `None`: it has not come back in time.
    fn release(&self, meanwhile: &mut dyn FnMut()) -> Option<Result<Option<String>, NotReleased>> {
        let until_ms = boot_ms() + RELEASE_AT_MOST_MS;
        self.errands.send(Errand::Release).ok()?;
        meanwhile();
        loop {
            let left = Duration::from_millis(until_ms.saturating_sub(boot_ms()));
            match self.done.recv_timeout(left).ok()? {
                Done::Released(released) => return Some(released),
                // Sent before COMMAND ended. The release finds for itself what is there.
                Done::Renewed(_) | Done::Looked(_) | Done::Back(_) => {}
            }
        }
    }
}

fn run_errands(mut held: Box<dyn Held>, errands: &Receiver<Errand>, tell: &Sender<Done>, mut rope: PipeWriter) {
    while let Ok(errand) = errands.recv() {
        let done = match errand {
            Errand::Renew => Done::Renewed(held.renew()),
            Errand::Look => Done::Looked(held.look()),
            // The last errand of a thread.
            Errand::Release => {
                let _ = tell.send(Done::Released(held.release(&mut || {})));
                return;
            }
            Errand::Back => {
                let _ = tell.send(Done::Back(held));
                return;
            }
        };
        if tell.send(done).is_err() || rope.write_all(&[0]).is_err() {
            return;
        }
    }
}
