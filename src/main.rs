//! Arguments in, exit code out.
#![no_main]

#[path = "sys/entry.rs"]
mod entry;
