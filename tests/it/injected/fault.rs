//! What can happen at a system call, and what may come of it.

use crate::harness::Call;

/// What happens at one system call of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// SIGKILL, before the call is made.
    Kill,
    /// SIGSTOP, right after the call: nothing is done until the lease is over, and SIGCONT comes.
    Stop,
    /// The call is not made and fails with this error.
    Error(&'static str),
}

impl Fault {
    /// For `-e inject=`.
    pub(super) fn injection(self, call: &Call) -> String {
        let Call { name, nth, .. } = call;
        match self {
            Fault::Kill => format!("inject={name}:signal=KILL:when={nth}"),
            Fault::Stop => format!("inject={name}:signal=STOP:when={nth}"),
            Fault::Error(errno) => format!("inject={name}:error={errno}:when={nth}"),
        }
    }

    /// Whether nothing may come of it: what an interruption broke off is done again, a file system without
    /// locks is one where there are no guards, and a file that another host has removed while it was read is
    /// looked at anew.
    pub(super) fn is_harmless(self, call: &Call) -> bool {
        match self {
            Fault::Error("EINTR" | "ENOLCK") => true,
            Fault::Error("ESTALE") => call.name == "pread64" && call.line.contains("{\\\"withlock"),
            _ => false,
        }
    }

    /// The exit code that says what happened, where it could not be borne.
    pub(super) fn exit_code(self) -> Option<i32> {
        match self {
            Fault::Error("EACCES") => Some(77),
            Fault::Error("EMFILE" | "EAGAIN") => Some(71),
            Fault::Error("EIO" | "ENOSPC" | "EDQUOT" | "ESTALE") => Some(74),
            _ => None,
        }
    }
}

/// The errors that a call can end with, on some file system. A closing is none of them: where it is said to
/// have failed the descriptor is gone all the same, and that cannot be injected.
pub(super) fn errors_of(call: &Call) -> &'static [&'static str] {
    let says = |word| call.line.contains(word);
    match &*call.name {
        "openat" if says("O_PATH") => &["EIO", "EACCES", "ESTALE", "EINTR", "EMFILE"],
        "openat" if says("O_CREAT") || says("O_TMPFILE") => {
            &["EIO", "ENOSPC", "EDQUOT", "EACCES", "ESTALE", "EINTR", "EMFILE"]
        }
        "openat" => &["EIO", "EACCES", "ESTALE", "EINTR", "EMFILE"],
        "flock" => &["EIO", "ESTALE", "EINTR", "ENOLCK"],
        // Of an open file: that needs no permission, and no signal interrupts it.
        "newfstatat" | "statx" if says("AT_EMPTY_PATH") => &["EIO", "ESTALE"],
        "newfstatat" | "statx" | "faccessat2" => &["EIO", "EACCES", "ESTALE", "EINTR"],
        "mkdirat" | "renameat" | "renameat2" | "unlinkat" | "utimensat" => {
            &["EIO", "ENOSPC", "EDQUOT", "EACCES", "ESTALE", "EINTR"]
        }
        "write" if says("write(1,") || says("write(2,") => &["EIO", "ENOSPC", "EINTR"],
        "write" | "fsync" => &["EIO", "ENOSPC", "EDQUOT", "ESTALE", "EINTR"],
        "pread64" | "fstatfs" | "statfs" => &["EIO", "ESTALE", "EINTR"],
        "getdents64" => &["EIO", "ESTALE"],
        "read" if says("O_NONBLOCK") || says("\\0\\0") || says("EAGAIN") => &["EINTR"],
        "read" => &["EIO", "EINTR"],
        "signalfd4" | "inotify_init1" | "pidfd_open" | "epoll_create1" => &["EMFILE"],
        "fcntl" if says("F_DUPFD") => &["EMFILE"],
        "clone" | "clone3" | "vfork" | "fork" => &["EAGAIN"],
        "wait4" | "waitid" | "poll" | "ppoll" | "clock_nanosleep" => &["EINTR"],
        _ => &[],
    }
}
