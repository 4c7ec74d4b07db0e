//! Threads that wait for etcd, so that nobody else has to: what they hear is kept, and a descriptor tells
//! that there is something to be taken.
//!
//! They start with all signals blocked, like the thread that starts them, and they hold nothing that a
//! sudden end of the process would leave undone.

use std::io::{PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::Builder;
use std::time::Duration;

use crate::machine::Renewal;
use crate::sys::Errno;

use super::client::Client;

/// Something heard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Heard {
    /// The answer to a renewal.
    Renewed(Renewal),
    /// The key was deleted.
    Deleted { revision: i64 },
    /// The key was written.
    Written { revision: i64 },
    /// The watch has ended, and must be begun anew.
    WatchEnded,
}

/// Hears.
#[derive(Debug)]
pub(super) struct Ears {
    sender: Sender<(u64, Heard)>,
    receiver: Receiver<(u64, Heard)>,
    /// One byte for each thing heard that was not yet taken.
    bell: PipeReader,
    rope: Arc<PipeWriter>,
    /// Counts watches: what an earlier one says is old news.
    watch: u64,
    watching: bool,
    watched_endpoint: usize,
}

impl Ears {
    pub(super) fn new() -> Result<Self, Errno> {
        let (bell, rope) = std::io::pipe().map_err(|error| error.raw_os_error().map_or(Errno::EIO, Errno::from_raw))?;
        let (sender, receiver) = channel();
        Ok(Ears { sender, receiver, bell, rope: Arc::new(rope), watch: 0, watching: false, watched_endpoint: 0 })
    }

    /// Readable while there is something to be taken.
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// What was heard next.
    pub(super) fn take(&mut self) -> Option<Heard> {
        while let Ok((watch, heard)) = self.receiver.try_recv() {
            // Written right after it was sent: this waits for a thread to do its next step, no longer.
            let _ = self.bell.read_exact(&mut [0]);
            match heard {
                Heard::Renewed(_) => return Some(heard),
                _ if watch != self.watch => {}
                Heard::WatchEnded => {
                    self.watching = false;
                    return Some(heard);
                }
                Heard::Deleted { .. } | Heard::Written { .. } => return Some(heard),
            }
        }
        None
    }

    /// Whether there is a watch, and at the server that answers.
    pub(super) fn is_watching(&self, client: &Client) -> bool {
        self.watching && self.watched_endpoint == client.current()
    }

    /// Watches `key` for all that happens from `revision` on. What must follow at once when it is deleted,
    /// as of some revision, `first` does before anybody is told.
    pub(super) fn watch(&mut self, client: &Client, key: &[u8], revision: i64, first: impl Fn(i64) + Send + 'static) {
        self.watch += 1;
        self.watched_endpoint = client.current();
        let (client, key, watch) = (client.clone(), key.to_vec(), self.watch);
        let tell = self.teller(watch);
        self.watching = spawn(move || {
            client.watch(&key, revision, |event| {
                let revision = event.kv.mod_revision.0;
                if event.kind == "DELETE" {
                    first(revision);
                    tell(Heard::Deleted { revision })
                } else {
                    tell(Heard::Written { revision })
                }
            });
            tell(Heard::WatchEnded);
        })
        .is_ok();
    }

    /// Does something that takes long, and hears its result.
    pub(super) fn ask(&self, question: impl FnOnce() -> Heard + Send + 'static) -> bool {
        let tell = self.teller(0);
        spawn(move || {
            tell(question());
        })
        .is_ok()
    }

    fn teller(&self, watch: u64) -> impl Fn(Heard) -> bool + Send + 'static {
        let (sender, rope) = (self.sender.clone(), Arc::clone(&self.rope));
        move |heard| sender.send((watch, heard)).is_ok() && (&*rope).write_all(&[0]).is_ok()
    }
}

/// Something that a thread does, whose end a descriptor tells.
#[derive(Debug)]
pub(super) struct Task<T> {
    receiver: Receiver<T>,
    done: PipeReader,
}

impl<T: Send + 'static> Task<T> {
    pub(super) fn start(work: impl FnOnce() -> T + Send + 'static) -> Result<Self, Errno> {
        let (done, end) = std::io::pipe().map_err(|error| error.raw_os_error().map_or(Errno::EIO, Errno::from_raw))?;
        let (sender, receiver) = channel();
        spawn(move || {
            let _ = sender.send(work());
            drop(end);
        })?;
        Ok(Task { receiver, done })
    }

    /// Readable when it is done.
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.done.as_fd()
    }

    /// Its result, once it is done; `Err` if it died without one.
    pub(super) fn result(&self) -> Option<Result<T, Errno>> {
        match self.receiver.try_recv() {
            Ok(result) => Some(Ok(result)),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => Some(Err(Errno::EAGAIN)),
        }
    }

    /// Waits for its end for at most `for_ms`, whatever signals arrive.
    pub(super) fn wait(&self, for_ms: u64) {
        let _ = self.receiver.recv_timeout(Duration::from_millis(for_ms));
    }
}

fn spawn(work: impl FnOnce() + Send + 'static) -> Result<(), Errno> {
    let started = Builder::new().spawn(work);
    started.map(drop).map_err(|error| error.raw_os_error().map_or(Errno::EAGAIN, Errno::from_raw))
}
