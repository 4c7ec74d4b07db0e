//! Two hosts that share a directory, and not the kernel's locks: two mounts of one directory through a
//! FUSE passthrough file system. Everything here needs root and /dev/fuse.

mod beyond_the_bound;
mod clocks;
mod contention;
mod fencing;
mod gate;
mod host;
mod hung_server;
mod late_calls;
mod passthrough;
mod scene;
mod self_test;
mod server_clock;
mod several;
