//! Lines for people, on standard error.

use std::os::fd::BorrowedFd;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// How long a line waits for a reader that does not read, in milliseconds.
const PATIENCE_MS: u16 = 200;

fn standard_error() -> BorrowedFd<'static> {
    // SAFETY: descriptors 0 to 2 are open from the first statement of `main` to its last
    // (`process::occupy_standard_descriptors`), and nothing in this program closes them.
    unsafe { BorrowedFd::borrow_raw(2) }
}

/// Writes `withlock: TEXT` and a line feed to standard error, in one write.
///
/// What cannot be written is dropped: neither a full disk nor a reader that is gone or asleep may keep a
/// holder from renewing and releasing. SIGPIPE is blocked at this point.
pub fn complain(text: &str) {
    raw(format!("withlock: {text}\n").as_bytes());
}

/// Writes bytes to standard error as they are, or drops them.
pub fn raw(bytes: &[u8]) {
    let mut ready = [PollFd::new(standard_error(), PollFlags::POLLOUT)];
    if poll(&mut ready, PollTimeout::from(PATIENCE_MS)) == Ok(0) {
        return;
    }
    let _ = nix::unistd::write(standard_error(), bytes);
}

/// Whether standard error is a terminal.
pub fn is_terminal() -> bool {
    std::io::IsTerminal::is_terminal(&standard_error())
}
