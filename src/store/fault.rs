//! What can go wrong with a lock, with the path it went wrong at and the exit code it leads to.

use std::fmt::{self, Display, Formatter};

use crate::exit::Exit;
use crate::sys::{Errno, describe};
use crate::text::Shown;

/// An error of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The lock can never be taken at this path.
    CannotTake {
        /// The path as the user gave it.
        path: Vec<u8>,
        /// Why not.
        why: String,
    },
    /// We may not.
    NotPermitted {
        /// The path as the user gave it.
        path: Vec<u8>,
        /// What is not permitted, and to whom.
        why: String,
    },
    /// Input or output error, or no space.
    Io {
        /// The path as the user gave it.
        path: Vec<u8>,
        /// What was being done.
        doing: &'static str,
        /// What the system said.
        errno: Errno,
    },
    /// A first number was named for a directory that has numbers already.
    HasNumbers {
        /// The directory as the user gave it.
        path: Vec<u8>,
    },
    /// The directory has handed out its last number.
    NoNumber {
        /// The directory as the user gave it.
        path: Vec<u8>,
    },
    /// The service that keeps the lock cannot be reached.
    Unreachable {
        /// The lock, or the file that was to tell how to reach it, as the user gave it.
        path: Vec<u8>,
        /// Which server, and what was wrong with it.
        why: String,
        /// Trying again does not help.
        standing: bool,
    },
    /// The service or the file server that keeps the lock did not do what it was asked, for other reasons
    /// than permission.
    Service {
        /// The lock as the user gave it.
        path: Vec<u8>,
        /// What it was asked, which server, and what that said.
        why: String,
    },
    /// The system refused something other than the lock.
    System {
        /// The path as the user gave it; empty where it is about none.
        path: Vec<u8>,
        /// What was being done.
        doing: &'static str,
        /// What the system said.
        errno: Errno,
    },
}

impl Fault {
    /// Whether trying again may help: nothing is wrong with the request, only nobody answers.
    pub fn may_pass(&self) -> bool {
        matches!(self, Fault::Unreachable { standing: false, .. })
    }

    /// The same, said of what the user named.
    pub fn of(mut self, named: &[u8]) -> Self {
        match &mut self {
            Fault::CannotTake { path, .. }
            | Fault::NotPermitted { path, .. }
            | Fault::Io { path, .. }
            | Fault::HasNumbers { path }
            | Fault::NoNumber { path }
            | Fault::Unreachable { path, .. }
            | Fault::Service { path, .. }
            | Fault::System { path, .. } => *path = named.to_vec(),
        }
        self
    }

    /// The exit code that it leads to.
    pub fn exit(&self) -> Exit {
        match self {
            Fault::CannotTake { .. } | Fault::NoNumber { .. } => Exit::CannotTake,
            Fault::HasNumbers { .. } => Exit::Usage,
            Fault::NotPermitted { .. } => Exit::NotPermitted,
            Fault::Io { .. } | Fault::Service { .. } => Exit::Io,
            Fault::Unreachable { .. } => Exit::Unreachable,
            Fault::System { .. } => Exit::System,
        }
    }
}

impl Display for Fault {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Fault::CannotTake { path, why } => write!(out, "{}: cannot be locked: {why}", Shown(path)),
            Fault::NotPermitted { path, why } | Fault::Service { path, why } => write!(out, "{}: {why}", Shown(path)),
            Fault::Io { path, doing, errno } => write!(out, "{}: cannot {doing}: {}", Shown(path), describe(*errno)),
            Fault::HasNumbers { path } => {
                write!(out, "{}: it has numbers already, --start is for an empty directory", Shown(path))
            }
            Fault::NoNumber { path } => {
                write!(out, "{}: no number is left, {} was reached", Shown(path), u64::MAX)
            }
            Fault::Unreachable { path, why, .. } => write!(out, "{}: cannot be reached: {why}", Shown(path)),
            Fault::System { path, doing, errno } => {
                if !path.is_empty() {
                    write!(out, "{}: ", Shown(path))?;
                }
                write!(out, "cannot {doing}: {}", describe(*errno))
            }
        }
    }
}

impl std::error::Error for Fault {}
