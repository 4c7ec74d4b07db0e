//! A directory for one test, and the end of everything that was started in it.

use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use tempfile::TempDir;

use super::process::{kill_marked, marked};
use super::run::Run;
use super::{Fifo, Gate, Process, eventually};

/// The environment variable by which everything that a sandbox started is known, whatever became of its
/// parents.
pub(crate) const MARK: &str = "SANDBOX_OF_THIS_TEST";

/// A temporary directory. Dropped, it kills all that was started in it and removes the directory, also
/// when the test failed.
pub(crate) struct Sandbox {
    dir: TempDir,
    mark: String,
    counter: AtomicU32,
}

impl Sandbox {
    /// On the file system of the system's temporary directory: a disk, mostly.
    pub(crate) fn new() -> Self {
        Self::under(&std::env::temp_dir())
    }

    /// In memory: tmpfs.
    pub(crate) fn in_memory() -> Self {
        Self::under(Path::new("/dev/shm"))
    }

    /// On the file system that is mounted at `top`.
    pub(crate) fn on(top: &Path) -> Self {
        Self::under(top)
    }

    fn under(parent: &Path) -> Self {
        let dir = tempfile::Builder::new().prefix("withlock-test-").tempdir_in(parent).expect("a temporary directory");
        let mark = format!("sandbox:{}", dir.path().display());
        for part in ["work", "io"] {
            std::fs::create_dir(dir.path().join(part)).expect("a directory");
        }
        let sandbox = Sandbox { dir, mark, counter: AtomicU32::new(0) };
        // Others than root must be able to reach what is in it; its parent keeps the umask's mode.
        sandbox.chmod(sandbox.dir.path(), 0o755);
        sandbox
    }

    /// The directory where locks are; also the working directory of what is started.
    pub(crate) fn work(&self) -> PathBuf {
        self.dir.path().join("work")
    }

    /// A path in [`Sandbox::work`].
    pub(crate) fn path(&self, name: impl AsRef<OsStr>) -> PathBuf {
        self.work().join(name.as_ref())
    }

    /// The lock that most tests use.
    pub(crate) fn lock(&self) -> PathBuf {
        self.path("a.lock")
    }

    /// A fresh path for outputs and FIFOs, beside the directory of the locks.
    pub(crate) fn io_path(&self, kind: &str) -> PathBuf {
        let number = self.counter.fetch_add(1, Ordering::Relaxed);
        self.dir.path().join("io").join(format!("{number}.{kind}"))
    }

    /// The test build of the program, with the switches of `WITHLOCK_LEAVE_OUT`.
    pub(crate) fn withlock(&self) -> Run<'_> {
        Run::new(self, env!("CARGO_BIN_EXE_withlock"))
    }

    /// The program as it is shipped.
    pub(crate) fn shipped(&self) -> Run<'_> {
        Run::new(self, super::shipped())
    }

    /// Any other program.
    pub(crate) fn program(&self, program: impl AsRef<OsStr>) -> Run<'_> {
        Run::new(self, program)
    }

    /// `sh -c TEXT`. The test build of the program is in `$WL`, the usual lock in `$L`.
    pub(crate) fn sh(&self, text: impl AsRef<OsStr>) -> Run<'_> {
        self.program("/bin/sh").arg("-c").arg(text)
    }

    /// A new FIFO.
    pub(crate) fn fifo(&self) -> Fifo {
        Fifo::make(self.io_path("fifo"))
    }

    /// A new gate.
    pub(crate) fn gate(&self) -> Gate {
        Gate::new(self.fifo(), self.fifo())
    }

    /// The names in the directory of the locks, sorted.
    pub(crate) fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.work()).expect("the sandbox can be listed");
        let mut names: Vec<String> =
            entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    /// Changes permissions.
    pub(crate) fn chmod(&self, path: impl AsRef<Path>, mode: u32) {
        std::fs::set_permissions(path.as_ref(), std::fs::Permissions::from_mode(mode)).expect("chmod");
    }

    /// A copy of the test build that everybody may run, wherever the build directory is.
    pub(crate) fn public_binary(&self) -> PathBuf {
        let copy = self.dir.path().join("io").join("withlock");
        if !copy.exists() {
            std::fs::copy(env!("CARGO_BIN_EXE_withlock"), &copy).expect("a copy of the program");
            self.chmod(&copy, 0o755);
        }
        copy
    }

    /// What was started here and still lives, zombies left out.
    pub(crate) fn processes(&self) -> Vec<Process> {
        marked(&self.mark)
    }

    /// Waits until nothing that was started here lives.
    pub(crate) fn wait_until_nothing_runs(&self) {
        eventually("everything started in the sandbox has ended", || {
            let left = self.processes();
            if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) }
        });
    }

    pub(crate) fn mark(&self) -> &str {
        &self.mark
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        kill_marked(&self.mark);
        if std::thread::panicking() {
            eprintln!("the sandbox held: {:?}", std::fs::read_dir(self.work()).map(|_| self.names()));
        }
    }
}
