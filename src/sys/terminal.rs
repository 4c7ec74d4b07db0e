//! Standard output: what a command was asked for, on a terminal or not.

use std::io::{IsTerminal, Write};

use nix::Result;
use nix::errno::Errno;
use nix::libc;

use super::output::expect_open;

/// Writes all of it; EBADF if standard output was closed on entry. Signals should be as on entry, so that a reader
/// that sleeps can be interrupted.
pub fn show(bytes: &[u8]) -> Result<()> {
    // What stands in for it takes everything.
    expect_open()?;
    // Unbuffered pieces would show a page being drawn; std's own buffer is flushed here.
    let mut out = std::io::stdout().lock();
    let written = out.write_all(bytes).and_then(|()| out.flush());
    written.map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO)))
}

/// Whether standard output is a terminal.
pub fn is_terminal() -> bool {
    std::io::stdout().is_terminal()
}

/// Whether a terminal is to be coloured: `NO_COLOR` set to anything says no, a dumb terminal cannot.
pub fn wants_colour() -> bool {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    is_terminal() && set("NO_COLOR").is_none() && set("TERM").is_none_or(|term| term != "dumb")
}

/// The rows and columns of the terminal that standard output is.
pub fn size() -> Option<(usize, usize)> {
    size_of(libc::STDOUT_FILENO)
}

/// The columns of the terminal that standard error is: a line there is one row, if it is to be drawn over.
pub fn columns_of_errors() -> Option<usize> {
    size_of(libc::STDERR_FILENO).map(|(_, columns)| columns)
}

fn size_of(descriptor: libc::c_int) -> Option<(usize, usize)> {
    // SAFETY: an all-zero winsize is a valid value for the kernel to overwrite.
    let mut size: libc::winsize = unsafe { std::mem::zeroed() };
    // SAFETY: the request fills in one winsize, which outlives the call.
    let asked = unsafe { libc::ioctl(descriptor, libc::TIOCGWINSZ, &raw mut size) };
    (asked == 0 && size.ws_row > 0 && size.ws_col > 0).then(|| (usize::from(size.ws_row), usize::from(size.ws_col)))
}
