//! A terminal: programs on its slave side, the test as the person at the keyboard.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::pty::{Winsize, openpty};

use super::events::{DEADLINE, readable_within};
use super::run::{Run, Running};

/// A pseudo-terminal with a program as the leader of its session.
pub(crate) struct Terminal {
    master: Option<File>,
    shown: Vec<u8>,
    looked_up_to: usize,
}

impl Terminal {
    /// Starts `run` as the leader of a new session whose controlling terminal is a new one.
    #[track_caller]
    pub(crate) fn start(run: Run<'_>) -> (Terminal, Running) {
        Terminal::of_size(None, run)
    }

    /// The same on a terminal that has so many columns.
    #[track_caller]
    pub(crate) fn with_columns(columns: u16, run: Run<'_>) -> (Terminal, Running) {
        Terminal::of_size(Some(Winsize { ws_row: 24, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }), run)
    }

    #[track_caller]
    fn of_size(size: Option<Winsize>, run: Run<'_>) -> (Terminal, Running) {
        let pty = openpty(&size, None).expect("a pseudo-terminal");
        // Close-on-exec: a program that kept the master open would never be hung up on.
        fcntl(&pty.master, FcntlArg::F_SETFD(nix::fcntl::FdFlag::FD_CLOEXEC)).expect("close-on-exec");
        fcntl(&pty.master, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).expect("non-blocking");
        fcntl(&pty.slave, FcntlArg::F_SETFD(nix::fcntl::FdFlag::FD_CLOEXEC)).expect("close-on-exec");
        let copy = |fd: &OwnedFd| fd.try_clone().expect("a descriptor");
        let running = run
            .through(["setsid", "--ctty", "--wait"])
            .stdin(copy(&pty.slave))
            .stdout(copy(&pty.slave))
            .stderr(copy(&pty.slave))
            .start();
        (Terminal { master: Some(File::from(pty.master)), shown: Vec::new(), looked_up_to: 0 }, running)
    }

    /// Types this.
    pub(crate) fn types(&mut self, keys: &str) {
        self.master.as_mut().expect("not hung up").write_all(keys.as_bytes()).expect("the terminal takes keys");
    }

    /// Waits until `text` is shown, after what was waited for before.
    #[track_caller]
    pub(crate) fn expect(&mut self, text: &str) {
        let until = Instant::now() + DEADLINE;
        loop {
            let fresh = String::from_utf8_lossy(&self.shown[self.looked_up_to..]).into_owned();
            if let Some(at) = self.shown[self.looked_up_to..].windows(text.len()).position(|w| w == text.as_bytes()) {
                self.looked_up_to += at + text.len();
                return;
            }
            assert!(Instant::now() < until, "the terminal did not show {text:?} but {fresh:?}");
            self.read(Duration::from_millis(100));
        }
    }

    /// Waits until as much is shown after what was waited for before, and this must be it.
    #[track_caller]
    pub(crate) fn expect_next(&mut self, text: &str) {
        let until = Instant::now() + DEADLINE;
        while self.shown.len() - self.looked_up_to < text.len() {
            assert!(Instant::now() < until, "the terminal did not show {text:?}");
            self.read(Duration::from_millis(100));
        }
        let next = &self.shown[self.looked_up_to..][..text.len()];
        assert_eq!(String::from_utf8_lossy(next), text);
        self.looked_up_to += text.len();
    }

    /// Reads what comes in `patience`.
    pub(crate) fn read(&mut self, patience: Duration) {
        let Some(master) = &mut self.master else { return };
        readable_within(&*master, patience);
        let mut chunk = [0; 4096];
        match master.read(&mut chunk) {
            Ok(length) => self.shown.extend_from_slice(&chunk[..length]),
            // EIO: nobody has the other side open now; somebody may open it again.
            Err(error) if error.kind() == ErrorKind::WouldBlock || error.raw_os_error() == Some(nix::libc::EIO) => {}
            Err(error) => panic!("the terminal: {error}"),
        }
    }

    /// All that was ever shown.
    pub(crate) fn shown(&mut self) -> String {
        self.read(Duration::from_millis(1));
        String::from_utf8_lossy(&self.shown).into_owned()
    }

    /// Hangs up, as a closed window does.
    pub(crate) fn hang_up(&mut self) {
        self.master = None;
    }
}
