//! `withlock reserve`.

use std::ffi::OsStr;
use std::path::Path;

use crate::cli::Reserve;
use crate::exit::Exit;
use crate::options::{self, Usage};
use crate::record::canonical_number;
use crate::store::reserve::{DEFAULT_RESERVE_WAIT_MS, Numbers, Without};
use crate::sys::output::{answer, complain};
use crate::sys::signal::OnEntry;
use crate::sys::{describe, output};
use crate::text::Shown;

use super::attended;
use super::obtain::busy_line;

/// Prints a number that nobody else is given; the exit code.
pub(super) fn reserve(given: Reserve, on_entry: &OnEntry) -> anyhow::Result<u8> {
    let wait_ms = options::optional(given.wait.as_deref(), "--wait")?.unwrap_or(DEFAULT_RESERVE_WAIT_MS);
    let start = given.start.as_deref().map(start).transpose()?;
    if let Err(errno) = output::expect_open() {
        complain(&format!("no number was reserved: standard output: {}", describe(errno)));
        return Ok(Exit::Io.code());
    }
    let mut numbers = Numbers::open(&given.dir, on_entry)?;
    let attendant = attended(&given.dir, numbers.may_hang(), wait_ms);
    let reserved = numbers.next(wait_ms, start)?;
    drop(attendant);
    match &reserved.without_lock {
        None => {}
        Some(Without::Busy(busy)) => {
            let lock = Path::new(&given.dir).join("lock").into_os_string();
            complain(&busy_line(busy, &lock, "reserved without the lock, held"));
        }
        Some(Without::Fault(fault)) => complain(&format!("{fault}; reserved without the lock")),
    }
    let number = reserved.number;
    if let Err(errno) = answer(format!("{number}\n").as_bytes()) {
        // It stays reserved: whether anybody has read it is not known.
        let dir = Shown::os(<OsStr>::new(&given.dir));
        complain(&format!("{dir}: number {number} is reserved but could not be printed: {}", describe(errno)));
        return Ok(Exit::Io.code());
    }
    Ok(0)
}

fn start(text: &str) -> Result<u64, Usage> {
    canonical_number(text.as_bytes())
        .ok_or_else(|| Usage(format!("--start {}: not a number from 0 to {}", Shown::os(text), u64::MAX)))
}
