//! A gate before an operation of the file server: the next call that matches waits there until it is let
//! pass, like a request that hangs in the network while everybody else's go through. With it a test puts
//! a process to sleep between two system calls of its choice without a guess at the timing.
//!
//! As on any network file system, the kernel keeps the directory locked for its own host while a change
//! of a name in it is under way: other calls of the same host on that directory wait too.

use std::ffi::{OsStr, OsString};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// No call is held for longer: a process waiting in one cannot even be killed, and the test that forgot it,
/// because it failed, must come to its end.
const AT_MOST: Duration = Duration::from_secs(30);

/// Which call is to be held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    /// The operation, in the words of the FUSE protocol: `create`, `setattr`, `rename`, `rename2` (a rename
    /// with flags)…
    pub(crate) operation: String,
    /// The name of the file that it acts on, as it is when it arrives; for a rename, the old one.
    pub(crate) name: String,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Open,
    Armed(Held),
    /// The call with this number waits.
    Reached(u64),
}

/// Holds at most one call.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    state: Mutex<State>,
    calls: AtomicU64,
    changed: Condvar,
}

impl Gate {
    /// Holds the next call that matches. One that is held goes on: it cannot come past the next gate
    /// before that is closed.
    pub(crate) fn arm(&self, held: Held) {
        self.set(State::Armed(held));
    }

    /// Lets the held call pass, or disarms the gate.
    pub(crate) fn open(&self) {
        self.set(State::Open);
    }

    /// Every operation passes here first. `reached` is told of a call that is held, before it sleeps.
    pub(crate) fn pass(&self, operation: &str, name: impl FnOnce() -> OsString, reached: impl FnOnce()) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match &*state {
            State::Armed(held) if held.operation == operation && OsStr::new(&held.name) == name() => {}
            _ => return,
        }
        let number = self.calls.fetch_add(1, Ordering::Relaxed);
        *state = State::Reached(number);
        reached();
        let is_closed = |state: &mut State| matches!(*state, State::Reached(at) if at == number);
        drop(self.changed.wait_timeout_while(state, AT_MOST, is_closed));
    }

    fn set(&self, state: State) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = state;
        self.changed.notify_all();
    }
}
