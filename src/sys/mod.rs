//! The border to the operating system: the only home of `nix` and of `unsafe`.
//!
//! Every call of the lock protocol passes `hook::before`, so that tests can stop, fail or reorder
//! each of them. In a build without the `switches` feature the hook is an empty inline function.
#![allow(unsafe_code)]

pub mod attendant;
pub mod clock;
pub mod file;
pub mod fixed;
mod futex;
pub mod guard;
pub mod handover;
pub mod hook;
pub mod job;
pub mod keeper;
pub mod log;
pub mod lookout;
pub mod output;
pub mod path;
pub mod process;
pub mod random;
pub mod raw;
pub mod recruit;
pub mod signal;
pub mod sleep;
pub mod spawn;
pub mod terminal;
pub mod timer;
pub mod user;

pub use nix::errno::Errno;

/// The errno's text for people, without the symbol.
pub fn describe(errno: Errno) -> &'static str {
    match errno {
        // nix's own text for this one is an abbreviation.
        Errno::EDQUOT => "Disk quota exceeded",
        // And for this one a piece of advice.
        Errno::EAGAIN => "Resource temporarily unavailable",
        other => other.desc(),
    }
}
