//! Directories and files: one thin method for each system call of the protocol.
//!
//! Every name is looked up under a directory descriptor that was opened once, so that a directory that
//! is renamed, or a symlink above it that is turned elsewhere, cannot move an operation to another place.

use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;

use nix::Result;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, FcntlArg, OFlag, RenameFlags, fcntl, openat, renameat, renameat2};
use nix::libc;
use nix::sys::stat::{FileStat, Mode, UtimensatFlags, fchmod, fstat, fstatat, futimens, mkdirat, umask, utimensat};
use nix::sys::statfs::{fstatfs, statfs};
use nix::sys::statvfs::FsFlags;
use nix::sys::time::TimeSpec;
use nix::sys::uio::pread;
use nix::unistd::{AccessFlags, UnlinkatFlags, faccessat, unlinkat, write};

use crate::lease::Stamp;

use super::attendant;
use super::hook::{self, Step, around, before, left_out};
use super::signal::taking_back;

/// What a system call comes to.
pub type Outcome<T> = nix::Result<T>;

/// Which file it is: device and inode. An inode is not used again while a descriptor keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    /// The device, as this host numbers it.
    pub dev: u64,
    /// The inode.
    pub ino: u64,
}

/// What kind of thing stands at a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A regular file.
    Regular,
    /// A directory.
    Directory,
    /// A symbolic link, whatever it points to.
    Symlink,
    /// A FIFO.
    Fifo,
    /// A socket.
    Socket,
    /// A character or block device.
    Device,
}

impl Kind {
    /// With its article, for messages.
    pub fn describe(self) -> &'static str {
        match self {
            Kind::Regular => "a regular file",
            Kind::Directory => "a directory",
            Kind::Symlink => "a symbolic link",
            Kind::Fifo => "a FIFO",
            Kind::Socket => "a socket",
            Kind::Device => "a device",
        }
    }
}

/// What lstat and fstat tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// Which file.
    pub identity: Identity,
    /// What kind.
    pub kind: Kind,
    /// Permission bits, with setuid, setgid and sticky.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Last modification.
    pub mtime: Stamp,
}

impl From<FileStat> for Stat {
    fn from(stat: FileStat) -> Self {
        let kind = match stat.st_mode & libc::S_IFMT {
            libc::S_IFREG => Kind::Regular,
            libc::S_IFDIR => Kind::Directory,
            libc::S_IFLNK => Kind::Symlink,
            libc::S_IFIFO => Kind::Fifo,
            libc::S_IFSOCK => Kind::Socket,
            _ => Kind::Device,
        };
        Stat {
            identity: Identity { dev: stat.st_dev, ino: stat.st_ino },
            kind,
            mode: stat.st_mode & 0o7777,
            uid: stat.st_uid,
            size_bytes: u64::try_from(stat.st_size).unwrap_or(0),
            mtime: Stamp::new(stat.st_mtime, stat.st_mtime_nsec),
        }
    }
}

/// What is known of a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileSystem {
    /// Whether it is one of those that only this host writes and whose flock every process here sees.
    pub local: bool,
    /// Whether the kernel's table of locks names its files by the device number that lstat tells.
    pub plain_device: bool,
    /// Whether it is mounted read-only.
    pub read_only: bool,
    /// The longest name, in bytes.
    pub name_max_bytes: usize,
}

/// Magic numbers of local file systems, as statfs(2) reports them.
const LOCAL_MAGIC: &[u32] = &[
    0x0000_ef53, // ext2, ext3, ext4
    0x5846_5342, // xfs
    0x9123_683e, // btrfs
    0x0102_1994, // tmpfs
    0x794c_7630, // overlayfs
    0xf2f5_2010, // f2fs
    0x2fc1_2fc1, // zfs
];

/// Those of them whose files all have the device number of the file system itself. Subvolumes (btrfs)
/// and layers (overlayfs) have numbers of their own.
const PLAIN_DEVICE_MAGIC: &[u32] = &[0x0000_ef53, 0x5846_5342, 0x0102_1994, 0xf2f5_2010, 0x2fc1_2fc1];

impl FileSystem {
    fn of(found: nix::sys::statfs::Statfs) -> Self {
        // The magic number is 32 bits wide, whatever the width and sign of the C type.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let magic = found.filesystem_type().0 as u32;
        FileSystem {
            local: LOCAL_MAGIC.contains(&magic) && hook::host().is_none(),
            plain_device: PLAIN_DEVICE_MAGIC.contains(&magic),
            read_only: found.flags().contains(FsFlags::ST_RDONLY),
            name_max_bytes: usize::try_from(found.maximum_name_length()).unwrap_or(255).clamp(1, 255),
        }
    }

    /// The file system that holds `path`.
    pub fn at(path: &std::path::Path) -> Result<Self> {
        statfs(path).map(Self::of)
    }
}

/// What an attempt at a flock said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Try {
    /// It is ours.
    Given,
    /// Another open description has it.
    Busy,
    /// This file system has no flock, or not for a descriptor opened like ours.
    Unsupported,
}

/// A directory, by descriptor.
#[derive(Debug)]
pub struct Dir(OwnedFd);

const FOR_EACH_OPEN: OFlag = OFlag::O_CLOEXEC.union(OFlag::O_NOFOLLOW).union(OFlag::O_NOCTTY);

fn again<T>(mut call: impl FnMut() -> Result<T>) -> Result<T> {
    loop {
        let result = call();
        attendant::answered();
        match result {
            Err(Errno::EINTR) => {}
            result => return result,
        }
    }
}

impl Dir {
    /// Opens a directory as a place to look names up in. Symbolic links are followed: the path is the
    /// user's own.
    pub fn open(path: &OsStr) -> Result<Self> {
        before("open", path)?;
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        again(|| nix::fcntl::open(path, flags, Mode::empty())).map(Dir)
    }

    /// Opens a directory in this one, to be listed; never through a symbolic link.
    pub fn open_dir(&self, name: &OsStr) -> Result<Self> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | FOR_EACH_OPEN;
        self.call("opendir", name, || again(|| openat(&self.0, name, flags, Mode::empty())).map(Dir))
    }

    /// **The arbiter.** Creates `name` exclusively, for reading and writing: exactly one of any number
    /// of callers succeeds, on every path and on every host that shares the directory.
    ///
    /// It grants the epoch (the lock file), it decides who ends one (a claim in the slot), it hands out
    /// reserved numbers. Whoever reads on will think that the guard, or the age, or a look beforehand
    /// prevents collisions: they do not, and may be wrong at any time. This call is what does.
    pub fn create_exclusive(&self, name: &OsStr, mode: u32, arbiter: Step) -> Result<File> {
        let exclusive = if left_out(arbiter) { OFlag::O_TRUNC } else { OFlag::O_EXCL };
        let flags = OFlag::O_RDWR | OFlag::O_CREAT | exclusive | FOR_EACH_OPEN;
        self.call("create", name, || {
            let file = again(|| openat(&self.0, name, flags, Mode::from_bits_truncate(mode))).map(File)?;
            hook::stamped(file.0.as_raw_fd());
            hook::stamped(self.number());
            Ok(file)
        })
    }

    /// Creates a file whose name decides nothing: it will be renamed. EEXIST if there is one.
    pub fn create_scratch(&self, name: &OsStr) -> Result<File> {
        before("create-scratch", name)?;
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | FOR_EACH_OPEN;
        let file = again(|| openat(&self.0, name, flags, Mode::from_bits_truncate(0o644))).map(File)?;
        let _ = file.let_owner_in(file.stat()?.mode);
        Ok(file)
    }

    /// Forces the names in this directory to the storage.
    pub fn sync_names(&self) -> Result<()> {
        before("fsync", OsStr::new("."))?;
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let listed = again(|| openat(&self.0, ".", flags, Mode::empty()))?;
        match again(|| nix::unistd::fsync(&listed)) {
            // Some file systems cannot do that for a directory; then there is nothing to wait for.
            Err(Errno::EINVAL | Errno::ENOSYS | Errno::EOPNOTSUPP) => Ok(()),
            synced => synced,
        }
    }

    /// Opens a file for reading: never through a link, never waiting for a FIFO's other end.
    pub fn open_file(&self, name: &OsStr) -> Result<File> {
        let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK | FOR_EACH_OPEN;
        self.call("openat", name, || again(|| openat(&self.0, name, flags, Mode::empty())).map(File))
    }

    /// Opens a file for writing, as renewing needs it on file systems that ask for it.
    pub fn open_file_to_write(&self, name: &OsStr) -> Result<File> {
        let flags = OFlag::O_RDWR | OFlag::O_NONBLOCK | FOR_EACH_OPEN;
        self.call("openat", name, || again(|| openat(&self.0, name, flags, Mode::empty())).map(File))
    }

    /// What stands at `name`, links not followed; `None` if nothing does.
    pub fn lstat(&self, name: &OsStr) -> Result<Option<Stat>> {
        self.call("lstat", name, || match again(|| fstatat(&self.0, name, AtFlags::AT_SYMLINK_NOFOLLOW)) {
            Ok(stat) => Ok(Some(stat.into())),
            Err(Errno::ENOENT) => Ok(None),
            Err(errno) => Err(errno),
        })
    }

    /// Its descriptor's number, for the lookout.
    pub fn number(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// The directory's own attributes.
    pub fn stat(&self) -> Result<Stat> {
        again(|| fstat(&self.0)).map(Stat::from)
    }

    /// Whether it has been removed: it has no link left, or cannot be asked any more.
    pub fn is_removed(&self) -> bool {
        !matches!(again(|| fstat(&self.0)), Ok(stat) if stat.st_nlink > 0)
    }

    /// Whether names may be made and removed here: EACCES, EPERM or EROFS if not.
    pub fn may_write(&self) -> Result<()> {
        again(|| faccessat(&self.0, ".", AccessFlags::W_OK | AccessFlags::X_OK, AtFlags::AT_EACCESS))
    }

    /// The file system that holds this directory.
    pub fn file_system(&self) -> Result<FileSystem> {
        again(|| fstatfs(&self.0)).map(FileSystem::of)
    }

    /// Makes a directory with exactly these permissions, whatever the umask.
    pub fn make_dir(&self, name: &OsStr, mode: u32) -> Result<()> {
        self.call("mkdir", name, || {
            // Others who may write in the lock's directory must be able to act in the slot, and chmod
            // afterwards would leave a moment, and perhaps for ever a directory, in which they cannot.
            let mine = umask(Mode::empty());
            let made = again(|| mkdirat(&self.0, name, Mode::from_bits_truncate(mode & 0o777)));
            umask(mine);
            made.inspect(|()| hook::stamped_at(self.number(), name))
        })
    }

    /// Removes an empty directory.
    pub fn remove_dir(&self, name: &OsStr) -> Result<()> {
        self.call("rmdir", name, || again(|| unlinkat(&self.0, name, UnlinkatFlags::RemoveDir)))
    }

    /// Removes a name that is not a directory's.
    pub fn unlink(&self, name: &OsStr) -> Result<()> {
        self.call("unlink", name, || {
            again(|| unlinkat(&self.0, name, UnlinkatFlags::NoRemoveDir)).inspect(|()| hook::stamped(self.number()))
        })
    }

    /// Renames; a file at the new name is replaced, a directory there is not.
    pub fn rename(&self, name: &OsStr, to: &Dir, new_name: &OsStr) -> Result<()> {
        self.call("rename", name, || {
            again(|| renameat(&self.0, name, &to.0, new_name)).inspect(|()| hook::stamped(to.number()))
        })
    }

    /// Renames, unless something stands at the new name.
    pub fn rename_noreplace(&self, name: &OsStr, to: &Dir, new_name: &OsStr) -> Result<()> {
        if left_out(Step::Noreplace) {
            return self.rename(name, to, new_name);
        }
        self.call("renameat2", name, || {
            again(|| renameat2(&self.0, name, &to.0, new_name, RenameFlags::RENAME_NOREPLACE))
                .inspect(|()| hook::stamped(to.number()))
        })
    }

    /// Sets a name's time stamp to now, by path. Only a negative control does so: by path a holder would
    /// refresh its successor.
    pub fn touch_by_path(&self, name: &OsStr) -> Result<()> {
        let now = &TimeSpec::UTIME_NOW;
        self.call("utimensat", name, || {
            again(|| utimensat(&self.0, name, now, now, UtimensatFlags::NoFollowSymlink))
                .inspect(|()| hook::stamped_at(self.number(), name))
        })
    }

    /// Calls `each` with every name in the directory, but `.` and `..`.
    pub fn list(&self, mut each: impl FnMut(&OsStr)) -> Result<()> {
        self.call("readdir", OsStr::new("."), || {
            let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
            let mut entries = nix::dir::Dir::from_fd(again(|| openat(&self.0, ".", flags, Mode::empty()))?)?;
            let mut names = Vec::new();
            for entry in entries.iter() {
                let entry = entry?;
                let name = entry.file_name().to_bytes();
                if name != b"." && name != b".." {
                    if hook::is_scheduled() {
                        names.push(OsStr::from_bytes(name).to_owned());
                    }
                    each(OsStr::from_bytes(name));
                }
            }
            Ok(names)
        })
        .map(drop)
    }

    /// Notes that somebody acts in this directory: until this descriptor is closed nobody can have it
    /// for themselves.
    pub fn enter(&self) -> Result<Try> {
        self.call("enter", OsStr::new(""), || tried(again(|| flock(&self.0, libc::LOCK_SH | libc::LOCK_NB))))
    }

    /// Has this directory for ourselves, unless somebody acts in it.
    pub fn close_off(&self) -> Result<Try> {
        self.call("close-off", OsStr::new(""), || tried(again(|| flock(&self.0, libc::LOCK_EX | libc::LOCK_NB))))
    }

    fn call<T: hook::Observed>(
        &self,
        call: &'static str,
        name: &OsStr,
        perform: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        around(call, self.number(), name, perform)
    }

    /// What the clock of this directory's file system says: the stamp of a file made just now. Without a
    /// name where the file system can do that, else under a private name that is removed at once.
    pub fn file_system_time(&self, private_name: &OsStr) -> Result<Stamp> {
        self.call("tmpfile", private_name, || self.stamp_of_new_file(private_name))
    }

    fn stamp_of_new_file(&self, private_name: &OsStr) -> Result<Stamp> {
        if let Some(made_up) = hook::file_system_time() {
            return Ok(made_up);
        }
        let owner_only = Mode::S_IRUSR | Mode::S_IWUSR;
        let unnamed = OFlag::O_TMPFILE | OFlag::O_WRONLY | OFlag::O_CLOEXEC;
        if let Ok(file) = again(|| openat(&self.0, ".", unnamed, owner_only)) {
            hook::stamped(file.as_raw_fd());
            return Ok(Stat::from(fstat(&file)?).mtime);
        }
        let named = OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_WRONLY | FOR_EACH_OPEN;
        let file = again(|| openat(&self.0, private_name, named, owner_only))?;
        hook::stamped(file.as_raw_fd());
        let stamp = fstat(&file).map(|stat| Stat::from(stat).mtime);
        let _ = unlinkat(&self.0, private_name, UnlinkatFlags::NoRemoveDir);
        stamp
    }
}

/// An open regular file.
#[derive(Debug)]
pub struct File(OwnedFd);

impl File {
    /// What fstat tells.
    pub fn stat(&self) -> Result<Stat> {
        self.call("fstat", || again(|| fstat(&self.0)).map(Stat::from))
    }

    /// The content from the start, at most `limit_bytes` of it.
    pub fn content(&self, limit_bytes: usize) -> Result<Vec<u8>> {
        self.call("pread", || self.read_from_start(limit_bytes))
    }

    fn read_from_start(&self, limit_bytes: usize) -> Result<Vec<u8>> {
        let mut content = Vec::new();
        let mut chunk = [0; 2048];
        while content.len() < limit_bytes {
            let offset = libc::off_t::try_from(content.len()).map_err(|_| Errno::EOVERFLOW)?;
            let wanted = chunk.len().min(limit_bytes - content.len());
            let read = again(|| pread(&self.0, &mut chunk[..wanted], offset))?;
            content.extend_from_slice(&chunk[..read]);
            // A record is far shorter than one chunk: a short read is its end.
            if read < wanted {
                break;
            }
        }
        Ok(content)
    }

    /// Writes all of `bytes` in one write; a short write is ENOSPC.
    pub fn write_once(&self, bytes: &[u8]) -> Result<()> {
        self.call("write", || {
            let written = taking_back(|| again(|| write(&self.0, bytes)))?;
            hook::stamped(self.0.as_raw_fd());
            if written == bytes.len() { Ok(()) } else { Err(Errno::ENOSPC) }
        })
    }

    /// Forces content and attributes to the storage.
    pub fn sync(&self) -> Result<()> {
        self.call("fsync", || again(|| nix::unistd::fsync(&self.0)))
    }

    /// Where a umask has kept its owner from reading and writing what it has just made with `mode`: lets it. What can
    /// be taken must be breakable, by whoever took it first of all.
    pub fn let_owner_in(&self, mode: u32) -> Result<()> {
        const OWNERS: u32 = 0o600;
        if mode & OWNERS == OWNERS { Ok(()) } else { self.set_mode(mode & 0o777 | OWNERS) }
    }

    /// Sets the permissions to exactly `mode`.
    pub fn set_mode(&self, mode: u32) -> Result<()> {
        again(|| fchmod(&self.0, Mode::from_bits_truncate(mode)))
    }

    /// Sets the time stamp to the file system's now: the one way a lease is renewed.
    pub fn touch(&self) -> Result<()> {
        self.call("futimens", || {
            again(|| futimens(&self.0, &TimeSpec::UTIME_NOW, &TimeSpec::UTIME_NOW))
                .inspect(|()| hook::stamped(self.0.as_raw_fd()))
        })
    }

    fn call<T: hook::Observed>(&self, call: &'static str, perform: impl FnOnce() -> Result<T>) -> Result<T> {
        around(call, self.0.as_raw_fd(), OsStr::new(""), perform)
    }

    fn flock(&self, operation: libc::c_int) -> Result<()> {
        if let Some(given) = hook::flock(self.0.as_raw_fd(), operation != libc::LOCK_UN) {
            return if given { Ok(()) } else { Err(Errno::EWOULDBLOCK) };
        }
        flock(&self.0, operation)
    }

    /// Tries once for the guard.
    pub fn try_guard(&self) -> Result<Try> {
        self.call("flock", || tried(again(|| self.flock(libc::LOCK_EX | libc::LOCK_NB))))
    }

    /// Whether another process has a lock of the kind of fcntl(2) on any part of it. Only asked, never taken: what
    /// one has of that kind is lost with any descriptor of the file that one closes.
    pub fn is_record_locked(&self) -> bool {
        let mut lock = whole_file(libc::F_WRLCK);
        fcntl(&self.0, FcntlArg::F_GETLK(&mut lock)).is_ok() && lock.l_type != whole_file(libc::F_UNLCK).l_type
    }

    /// Notes on the file that somebody sleeps on its guard, until this description is closed. It decides nothing:
    /// it tells who lets go of several guards which of them somebody waits for.
    pub fn note_sleeper(&self) {
        let _ = fcntl(&self.0, FcntlArg::F_OFD_SETLK(&whole_file(libc::F_RDLCK)));
    }

    /// Whether anybody but us has noted that they sleep on its guard.
    pub fn has_sleepers(&self) -> bool {
        let mut lock = whole_file(libc::F_WRLCK);
        fcntl(&self.0, FcntlArg::F_OFD_GETLK(&mut lock)).is_ok() && lock.l_type != whole_file(libc::F_UNLCK).l_type
    }

    /// Waits for the guard, for ever; EINTR when a signal handler ran.
    pub(super) fn wait_for_guard(&self) -> Result<()> {
        self.flock(libc::LOCK_EX)
    }

    /// Gives the guard up for everybody who shares this open description.
    pub fn unguard(&self) -> Result<()> {
        self.call("unflock", || again(|| self.flock(libc::LOCK_UN)))
    }

    /// A second descriptor for the same open description, numbered out of the way of scripts (which use
    /// 3 to 9, and whose shells use 10 and what is free above, or 255) and kept across exec. Below 64: a larger
    /// number would make COMMAND's table of descriptors, and that of each process it makes, eight times larger.
    /// Where a low limit leaves none of these any number will do: better than no run.
    pub fn inheritable(&self) -> Result<OwnedFd> {
        const WISHES: [RawFd; 3] = [60, 10, 3];
        for wish in WISHES {
            match fcntl(&self.0, FcntlArg::F_DUPFD(wish)) {
                // SAFETY: fcntl just returned this descriptor as a new one; nobody else owns it.
                Ok(fd) => return Ok(unsafe { std::os::fd::FromRawFd::from_raw_fd(fd) }),
                // The limit on descriptors lies lower than the wish, or all up to it are in use.
                Err(Errno::EINVAL | Errno::EMFILE) => {}
                Err(errno) => return Err(errno),
            }
        }
        Err(Errno::EMFILE)
    }
}

/// A guard goes with the last descriptor that has it: for a test that is a step like any other.
#[cfg(feature = "switches")]
impl Drop for File {
    fn drop(&mut self) {
        hook::closing(self.0.as_raw_fd());
    }
}

impl AsFd for Dir {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A lock of the kind of fcntl(2), from the first byte to the last.
fn whole_file(kind: libc::c_int) -> libc::flock {
    libc::flock {
        l_type: libc::c_short::try_from(kind).unwrap_or_default(),
        l_whence: libc::c_short::try_from(libc::SEEK_SET).unwrap_or_default(),
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    }
}

fn flock(fd: &OwnedFd, operation: libc::c_int) -> Result<()> {
    // SAFETY: flock takes a descriptor and a number and touches no memory of ours. nix's own safe wrapper
    // unlocks the description when it is dropped, but a guard is shared with COMMAND and must outlive us.
    Errno::result(unsafe { libc::flock(fd.as_raw_fd(), operation) }).map(drop)
}

fn tried(locked: Result<()>) -> Result<Try> {
    match locked {
        Ok(()) => Ok(Try::Given),
        Err(Errno::EWOULDBLOCK) => Ok(Try::Busy),
        // NFS without a lock daemon says ENOLCK, NFS for a descriptor that cannot write says EBADF.
        Err(Errno::ENOSYS | Errno::EOPNOTSUPP | Errno::EINVAL | Errno::ENOLCK | Errno::EBADF) => Ok(Try::Unsupported),
        Err(errno) => Err(errno),
    }
}

/// Whether the file system of an open file is a local one, for the tests' clock.
#[cfg(feature = "switches")]
pub(super) fn is_local(fd: BorrowedFd<'_>) -> bool {
    fstatfs(fd).is_ok_and(|found| FileSystem::of(found).local)
}
