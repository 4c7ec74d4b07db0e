//! What the tests stand on: a sandbox that leaves nothing behind, programs started in it, events instead
//! of sleeps, files as the protocol knows them, strace and terminals.
//!
//! The tests need root, `strace`, `curl`, `bash` and the tools of util-linux; a missing one fails the test
//! that needs it, loudly.

#[cfg(feature = "etcd")]
mod etcd;
mod events;
mod files;
mod lanes;
mod process;
mod pty;
mod run;
mod sandbox;
mod shell;
mod shipped;
mod strace;

#[cfg(feature = "etcd")]
pub(crate) use etcd::{Cluster, Proxy};
pub(crate) use events::{Fifo, Gate, Moments, eventually, never_during};
pub(crate) use files::{
    Snapshot, age, blank_ages_ms, claims_in, inode, mtime, plant, plant_bytes, planted, record, set_mtime, slots, tree,
    with_record,
};
pub(crate) use lanes::{in_lanes, slack};
pub(crate) use process::{
    Process, asleep_in, asleep_in_flock, children, cpu_time, descendants, process, send, send_to_group, status_field,
};
pub(crate) use pty::Terminal;
pub(crate) use run::{Finished, Run, Running};
pub(crate) use sandbox::{MARK, Sandbox};
pub(crate) use shell::Shell;
pub(crate) use shipped::shipped;
pub(crate) use strace::{Call, calls};
