//! Lines for people, on standard error; what was asked for, on standard output.

use std::os::fd::BorrowedFd;

use nix::Result;
use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::signal::taking_back;

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

/// The most that a pipe takes at once without waiting for its reader, if it takes anything.
const AT_ONCE_BYTES: usize = libc::PIPE_BUF;

/// Writes bytes to standard error as they are, or drops them.
pub fn raw(bytes: &[u8]) {
    for part in bytes.chunks(AT_ONCE_BYTES) {
        let mut ready = [PollFd::new(standard_error(), PollFlags::POLLOUT)];
        if poll(&mut ready, PollTimeout::from(PATIENCE_MS)) == Ok(0) {
            return;
        }
        let _ = taking_back(|| nix::unistd::write(standard_error(), part));
    }
}

/// How long an answer waits for a reader that does not read, in milliseconds.
const ANSWER_PATIENCE_MS: u16 = 5_000;

/// Whether there is a standard output at all: EBADF if it was closed on entry. Whoever is about to make
/// something that exists only once asks before, not after.
pub fn expect_open() -> Result<()> {
    if super::process::was_closed_on_entry(1) { Err(Errno::EBADF) } else { Ok(()) }
}

/// Writes all of `bytes` to standard output. Signals are blocked at this point, so a reader that does
/// not read is not waited for without an end.
pub fn answer(bytes: &[u8]) -> Result<()> {
    expect_open()?;
    // SAFETY: as for standard error.
    let standard_output = unsafe { BorrowedFd::borrow_raw(1) };
    let mut left = bytes;
    while !left.is_empty() {
        let mut ready = [PollFd::new(standard_output, PollFlags::POLLOUT)];
        match poll(&mut ready, PollTimeout::from(ANSWER_PATIENCE_MS)) {
            Ok(0) => return Err(Errno::ETIMEDOUT),
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno),
        }
        match taking_back(|| nix::unistd::write(standard_output, left)) {
            Ok(written) => left = left.get(written..).unwrap_or_default(),
            Err(Errno::EAGAIN) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// Whether standard error is a terminal.
pub fn is_terminal() -> bool {
    std::io::IsTerminal::is_terminal(&standard_error())
}
