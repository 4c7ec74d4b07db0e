//! Two hosts that share a directory, and not the kernel's locks: two mounts of one directory through a
//! FUSE passthrough file system. Everything here needs root and /dev/fuse.

mod gate;
mod host;
mod passthrough;
mod self_test;
mod server_clock;
