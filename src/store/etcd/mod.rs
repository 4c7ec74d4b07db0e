//! The lock in etcd, an existing consensus store: for hosts that share no file system.
//!
//! The key is the lock. Its creation is the one arbiter, as exclusive creation is for files: a transaction
//! "the create revision is 0 → put the record". Its lease ends it when nobody renews; every other end is a
//! transaction "the create revision is still the one that was seen → delete". The create revision is the
//! fencing token. There is no guard: a holder that cannot renew ends its command before the lease can run
//! out, counted from the moment at which the last confirmed request was sent.

mod access;
mod claim;
mod client;
mod contender;
mod ears;
mod held;
mod key;
mod lease;
mod operate;
mod wire;

pub(crate) use contender::EtcdStore;
pub(crate) use operate::EtcdService;
