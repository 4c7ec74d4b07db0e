//! A log that many processes may share: each line is one write at the end of the file.

use std::cell::Cell;
use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::Result;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::{Mode, fstat};

use super::process::was_closed_on_entry;
use super::signal::taking_back;

/// How long the first line waits for a reader that does not read, in milliseconds; those after it do not.
const PATIENCE_MS: u16 = 200;

/// How often a log that comes and goes between the look for it and the making of it is tried again.
const OPEN_TRIES: u32 = 3;

/// A log, open for appending.
#[derive(Debug)]
pub struct Log {
    target: Target,
    is_regular: bool,
    /// A line could not be written whole: the next one begins anew.
    is_broken: Cell<bool>,
    /// Nobody read when it was last tried.
    is_stuck: Cell<bool>,
}

#[derive(Debug)]
enum Target {
    Ours(OwnedFd),
    Inherited(BorrowedFd<'static>),
}

impl Log {
    /// Opens a file at its end, and makes it where it is missing. COMMAND does not inherit it.
    pub fn open(path: &OsStr) -> Result<Self> {
        // Without O_NONBLOCK the open of a FIFO would wait for somebody to read.
        let flags = OFlag::O_WRONLY | OFlag::O_APPEND | OFlag::O_CLOEXEC | OFlag::O_NOCTTY | OFlag::O_NONBLOCK;
        let open = |more| nix::fcntl::open(path, flags | more, Mode::from_bits_truncate(0o666));
        // Another user's file in /tmp may be one that is open for all to append to, but where
        // fs.protected_regular is set the kernel refuses whoever asks for it with O_CREAT alone.
        for _ in 0..OPEN_TRIES {
            match open(OFlag::empty()) {
                Err(Errno::ENOENT) => {}
                opened => return Log::to(Target::Ours(opened?)),
            }
            match open(OFlag::O_CREAT | OFlag::O_EXCL) {
                Err(Errno::EEXIST) => {}
                made => return Log::to(Target::Ours(made?)),
            }
        }
        // A symbolic link to a file that is still to be made.
        Log::to(Target::Ours(open(OFlag::O_CREAT)?))
    }

    /// A descriptor that was open on entry; EBADF if it is not open for writing. Nothing else may have been
    /// opened yet, or it could be that.
    pub fn inherited(number: i32) -> Result<Self> {
        if number < 0 || u8::try_from(number).is_ok_and(|number| number < 3 && was_closed_on_entry(number)) {
            return Err(Errno::EBADF);
        }
        // SAFETY: only asked about until it is known to be open; nothing in this program closes a descriptor
        // that it has not opened.
        let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
        let flags = OFlag::from_bits_truncate(fcntl(descriptor, FcntlArg::F_GETFL)?);
        if flags.contains(OFlag::O_PATH) || flags & OFlag::O_ACCMODE == OFlag::O_RDONLY {
            return Err(Errno::EBADF);
        }
        Log::to(Target::Inherited(descriptor))
    }

    fn to(target: Target) -> Result<Self> {
        let log = Log { target, is_regular: false, is_broken: Cell::new(false), is_stuck: Cell::new(false) };
        let is_regular = fstat(log.descriptor())?.st_mode & libc::S_IFMT == libc::S_IFREG;
        Ok(Log { is_regular, ..log })
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        match &self.target {
            Target::Ours(descriptor) => descriptor.as_fd(),
            Target::Inherited(descriptor) => *descriptor,
        }
    }

    /// Appends a line, in one write, without ever waiting for long. All signals are blocked.
    pub fn append(&self, line: &[u8]) -> Result<()> {
        // A pipe takes no more than this in one piece, and could make a longer write wait.
        if !self.is_regular && line.len() >= libc::PIPE_BUF {
            return Err(Errno::EMSGSIZE);
        }
        let patience_ms = if self.is_stuck.get() { 0 } else { PATIENCE_MS };
        let mut ready = [PollFd::new(self.descriptor(), PollFlags::POLLOUT)];
        self.is_stuck.set(poll(&mut ready, PollTimeout::from(patience_ms)) == Ok(0));
        if self.is_stuck.get() {
            return Err(Errno::EAGAIN);
        }
        let whole = if self.is_broken.get() { [b"\n", line].concat() } else { line.to_vec() };
        let written = taking_back(|| nix::unistd::write(self.descriptor(), &whole))?;
        self.is_broken.set(written < whole.len());
        if self.is_broken.get() { Err(Errno::ENOSPC) } else { Ok(()) }
    }
}
