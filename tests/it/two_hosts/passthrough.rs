//! A FUSE file system that passes a directory through, by inode: a file handle and an inode number keep
//! acting on their file after its name was given to another. Each mount of it is like a host that mounts
//! a network file system, with nothing cached (time-outs of zero, direct I/O) and with flock(2) known to
//! that host alone, since the file system does not implement it and the kernel then keeps it per mount.
//!
//! Not supported, as on many such file systems: O_TMPFILE, hard links, extended attributes.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{DirEntryExt, FileExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, LockOwner,
    OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen,
    ReplyStatfs, ReplyWrite, Request, TimeOrNow, WriteFlags,
};
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, open, openat, readlinkat, renameat2};
use nix::sys::stat::{FchmodatFlags, FileStat, Mode, SFlag, UtimensatFlags, fchmodat, fstat, mkdirat, utimensat};
use nix::sys::statvfs::fstatvfs;
use nix::sys::time::TimeSpec;
use nix::unistd::{Gid, Uid, UnlinkatFlags, fchownat, truncate, unlinkat};

use super::gate::Gate;
use super::server_clock::{ServerClock, ns_of, time_of};

/// Nothing that the kernel was told may be used twice.
const AT_ONCE: Duration = Duration::ZERO;
const GENERATION: Generation = Generation(0);

/// A file that the kernel knows. The descriptor (O_PATH) keeps the inode from being reused, which makes
/// its number an identity for as long as the kernel may use it.
struct Node {
    file: Arc<OwnedFd>,
    lookups: u64,
}

type Entry = (u64, FileType, OsString);

/// The file system of one mount.
pub(crate) struct Passthrough {
    clock: Arc<RwLock<ServerClock>>,
    gate: Arc<Gate>,
    /// Called, with the operation's name, when a call reached the armed gate.
    reached: Box<dyn Fn(&str) + Send + Sync>,
    can_refuse_to_replace: bool,
    nodes: Mutex<HashMap<u64, Node>>,
    files: Mutex<HashMap<u64, Arc<File>>>,
    directories: Mutex<HashMap<u64, Vec<Entry>>>,
    next_handle: AtomicU64,
}

impl Passthrough {
    /// Passes `root` through. Without `can_refuse_to_replace`, RENAME_NOREPLACE is an invalid argument.
    pub(crate) fn new(
        root: &File,
        can_refuse_to_replace: bool,
        clock: Arc<RwLock<ServerClock>>,
        gate: Arc<Gate>,
        reached: Box<dyn Fn(&str) + Send + Sync>,
    ) -> io::Result<Self> {
        let file = Arc::new(open(&by_descriptor(root), OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?);
        let nodes = HashMap::from([(INodeNo::ROOT.0, Node { file, lookups: u64::MAX / 2 })]);
        Ok(Passthrough {
            clock,
            gate,
            reached,
            can_refuse_to_replace,
            nodes: Mutex::new(nodes),
            files: Mutex::default(),
            directories: Mutex::default(),
            next_handle: AtomicU64::new(1),
        })
    }

    fn wait_at_gate(&self, operation: &str, name: &OsStr) {
        self.gate.pass(operation, || name.to_owned(), || (self.reached)(operation));
    }

    /// The same for an operation that is about an inode: its name is where it is now.
    fn wait_at_gate_with(&self, operation: &str, inode: INodeNo) {
        let path = |file: Arc<OwnedFd>| std::fs::read_link(by_descriptor(&file)).ok();
        let name = || {
            let path = self.node(inode).ok().and_then(path);
            path.and_then(|path| path.file_name().map(OsStr::to_owned)).unwrap_or_default()
        };
        self.gate.pass(operation, name, || (self.reached)(operation));
    }

    fn node(&self, inode: INodeNo) -> Result<Arc<OwnedFd>, Errno> {
        lock(&self.nodes).get(&inode.0).map(|node| Arc::clone(&node.file)).ok_or(Errno::ESTALE)
    }

    fn file(&self, handle: FileHandle) -> Result<Arc<File>, Errno> {
        lock(&self.files).get(&handle.0).map(Arc::clone).ok_or(Errno::EBADF)
    }

    fn new_handle<T>(&self, table: &Mutex<HashMap<u64, T>>, opened: T) -> FileHandle {
        let handle = self.next_handle.fetch_add(1, Ordering::Relaxed);
        lock(table).insert(handle, opened);
        FileHandle(handle)
    }

    /// Tells the kernel of a file: its inode counts as known until the kernel forgets it.
    fn remember(&self, file: OwnedFd) -> Result<FileAttr, Errno> {
        let attributes = self.attributes(&file)?;
        let mut nodes = lock(&self.nodes);
        let node = nodes.entry(attributes.ino.0).or_insert_with(|| Node { file: Arc::new(file), lookups: 0 });
        node.lookups += 1;
        Ok(attributes)
    }

    fn find(&self, parent: INodeNo, name: &OsStr) -> Result<FileAttr, Errno> {
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        self.remember(openat(self.node(parent)?, name, flags, Mode::empty()).map_err(refused)?)
    }

    fn attributes(&self, file: impl AsFd) -> Result<FileAttr, Errno> {
        let stat = fstat(file).map_err(refused)?;
        let clock = self.clock.read().unwrap_or_else(PoisonError::into_inner);
        let shown =
            |seconds: i64, ns: i64| time_of(clock.shown_ns(i128::from(seconds) * 1_000_000_000 + i128::from(ns)));
        Ok(FileAttr {
            ino: INodeNo(stat.st_ino),
            size: unsigned(stat.st_size),
            blocks: unsigned(stat.st_blocks),
            atime: shown(stat.st_atime, stat.st_atime_nsec),
            mtime: shown(stat.st_mtime, stat.st_mtime_nsec),
            ctime: shown(stat.st_ctime, stat.st_ctime_nsec),
            crtime: shown(stat.st_ctime, stat.st_ctime_nsec),
            kind: kind_of(&stat),
            perm: u16::try_from(stat.st_mode & 0o7777).unwrap_or(0),
            nlink: u32::try_from(stat.st_nlink).unwrap_or(u32::MAX),
            uid: stat.st_uid,
            gid: stat.st_gid,
            rdev: u32::try_from(stat.st_rdev).unwrap_or(0),
            blksize: 4096,
            flags: 0,
        })
    }

    /// What a client asked a time stamp to be, in the backing file system's own terms.
    fn stamp(&self, asked: Option<TimeOrNow>) -> Result<TimeSpec, Errno> {
        match asked {
            None => Ok(TimeSpec::UTIME_OMIT),
            Some(TimeOrNow::Now) => Ok(TimeSpec::UTIME_NOW),
            Some(TimeOrNow::SpecificTime(time)) => {
                let clock = self.clock.read().unwrap_or_else(PoisonError::into_inner);
                let true_ns = clock.true_ns(ns_of(time)).ok_or(Errno::EINVAL)?;
                let seconds = i64::try_from(true_ns.div_euclid(1_000_000_000)).map_err(|_| Errno::EINVAL)?;
                let ns = i64::try_from(true_ns.rem_euclid(1_000_000_000)).map_err(|_| Errno::EINVAL)?;
                Ok(TimeSpec::new(seconds, ns))
            }
        }
    }

    fn create_file(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        flags: i32,
    ) -> Result<(FileAttr, FileHandle), Errno> {
        let flags = backing_flags(flags) | OFlag::O_CREAT | OFlag::O_NOFOLLOW;
        let opened = openat(self.node(parent)?, name, flags, mode_of(mode)).map_err(refused)?;
        give_to_caller(&opened, request)?;
        let known = open(&by_descriptor(&opened), OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty()).map_err(refused)?;
        Ok((self.remember(known)?, self.new_handle(&self.files, Arc::new(File::from(opened)))))
    }

    fn make_directory(&self, request: &Request, parent: INodeNo, name: &OsStr, mode: u32) -> Result<FileAttr, Errno> {
        mkdirat(self.node(parent)?, name, mode_of(mode)).map_err(refused)?;
        let made = self.find(parent, name)?;
        give_to_caller(&*self.node(made.ino)?, request)?;
        Ok(made)
    }

    fn rename_file(&self, old: (INodeNo, &OsStr), new: (INodeNo, &OsStr), flags: RenameFlags) -> Result<(), Errno> {
        if flags.contains(RenameFlags::RENAME_NOREPLACE) && !self.can_refuse_to_replace {
            return Err(Errno::EINVAL);
        }
        let flags = nix::fcntl::RenameFlags::from_bits(flags.bits()).ok_or(Errno::EINVAL)?;
        renameat2(self.node(old.0)?, old.1, self.node(new.0)?, new.1, flags).map_err(refused)
    }

    fn list(&self, directory: INodeNo) -> Result<Vec<Entry>, Errno> {
        let node = self.node(directory)?;
        let inode = fstat(&node).map_err(refused)?.st_ino;
        let mut entries = vec![(inode, FileType::Directory, ".".into()), (inode, FileType::Directory, "..".into())];
        for entry in std::fs::read_dir(by_descriptor(&node)).map_err(Errno::from)? {
            let entry = entry.map_err(Errno::from)?;
            let kind = entry.file_type().ok().and_then(FileType::from_std).unwrap_or(FileType::RegularFile);
            entries.push((entry.ino(), kind, entry.file_name()));
        }
        Ok(entries)
    }
}

impl Filesystem for Passthrough {
    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        self.wait_at_gate("lookup", name);
        match self.find(parent, name) {
            Ok(attributes) => reply.entry(&AT_ONCE, &attributes, GENERATION),
            Err(errno) => reply.error(errno),
        }
    }

    fn forget(&self, _request: &Request, inode: INodeNo, lookups: u64) {
        let mut nodes = lock(&self.nodes);
        if let Some(node) = nodes.get_mut(&inode.0) {
            node.lookups = node.lookups.saturating_sub(lookups);
            if node.lookups == 0 {
                nodes.remove(&inode.0);
            }
        }
    }

    fn getattr(&self, _request: &Request, inode: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        self.wait_at_gate_with("getattr", inode);
        match self.node(inode).and_then(|file| self.attributes(file)) {
            Ok(attributes) => reply.attr(&AT_ONCE, &attributes),
            Err(errno) => reply.error(errno),
        }
    }

    fn setattr(
        &self,
        _request: &Request,
        inode: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<std::time::SystemTime>,
        _handle: Option<FileHandle>,
        _crtime: Option<std::time::SystemTime>,
        _chgtime: Option<std::time::SystemTime>,
        _bkuptime: Option<std::time::SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        self.wait_at_gate_with("setattr", inode);
        let change = || -> Result<FileAttr, Errno> {
            let file = self.node(inode)?;
            let path = by_descriptor(&file);
            if let Some(mode) = mode {
                fchmodat(AT_FDCWD, &path, mode_of(mode), FchmodatFlags::FollowSymlink).map_err(refused)?;
            }
            if uid.is_some() || gid.is_some() {
                let (uid, gid) = (uid.map(Uid::from_raw), gid.map(Gid::from_raw));
                fchownat(AT_FDCWD, &path, uid, gid, AtFlags::empty()).map_err(refused)?;
            }
            if let Some(size) = size {
                truncate(&path, i64::try_from(size).map_err(|_| Errno::EFBIG)?).map_err(refused)?;
            }
            if atime.is_some() || mtime.is_some() {
                let (atime, mtime) = (self.stamp(atime)?, self.stamp(mtime)?);
                utimensat(AT_FDCWD, &path, &atime, &mtime, UtimensatFlags::FollowSymlink).map_err(refused)?;
            }
            self.attributes(file)
        };
        match change() {
            Ok(attributes) => reply.attr(&AT_ONCE, &attributes),
            Err(errno) => reply.error(errno),
        }
    }

    fn readlink(&self, _request: &Request, inode: INodeNo, reply: ReplyData) {
        match self.node(inode).and_then(|link| readlinkat(link, "").map_err(refused)) {
            Ok(target) => reply.data(target.as_encoded_bytes()),
            Err(errno) => reply.error(errno),
        }
    }

    fn mkdir(&self, request: &Request, parent: INodeNo, name: &OsStr, mode: u32, _umask: u32, reply: ReplyEntry) {
        self.wait_at_gate("mkdir", name);
        match self.make_directory(request, parent, name, mode) {
            Ok(attributes) => reply.entry(&AT_ONCE, &attributes, GENERATION),
            Err(errno) => reply.error(errno),
        }
    }

    fn unlink(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.wait_at_gate("unlink", name);
        done(reply, self.node(parent).and_then(|dir| unlinkat(dir, name, UnlinkatFlags::NoRemoveDir).map_err(refused)));
    }

    fn rmdir(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.wait_at_gate("rmdir", name);
        done(reply, self.node(parent).and_then(|dir| unlinkat(dir, name, UnlinkatFlags::RemoveDir).map_err(refused)));
    }

    fn rename(
        &self,
        _request: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        self.wait_at_gate(if flags.is_empty() { "rename" } else { "rename2" }, name);
        done(reply, self.rename_file((parent, name), (new_parent, new_name), flags));
    }

    fn open(&self, _request: &Request, inode: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        self.wait_at_gate_with("open", inode);
        let opened = self
            .node(inode)
            .and_then(|file| open(&by_descriptor(&file), backing_flags(flags.0), Mode::empty()).map_err(refused));
        match opened {
            Ok(file) => {
                reply.opened(self.new_handle(&self.files, Arc::new(File::from(file))), FopenFlags::FOPEN_DIRECT_IO);
            }
            Err(errno) => reply.error(errno),
        }
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        self.wait_at_gate("create", name);
        match self.create_file(request, parent, name, mode, flags) {
            Ok((attributes, handle)) => {
                reply.created(&AT_ONCE, &attributes, GENERATION, handle, FopenFlags::FOPEN_DIRECT_IO);
            }
            Err(errno) => reply.error(errno),
        }
    }

    fn read(
        &self,
        _request: &Request,
        inode: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.wait_at_gate_with("read", inode);
        let mut bytes = vec![0; usize::try_from(size).unwrap_or(0)];
        match self.file(handle).and_then(|file| file.read_at(&mut bytes, offset).map_err(Errno::from)) {
            Ok(count) => reply.data(&bytes[..count]),
            Err(errno) => reply.error(errno),
        }
    }

    fn write(
        &self,
        _request: &Request,
        inode: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        self.wait_at_gate_with("write", inode);
        // A descriptor opened with O_APPEND appends whatever the offset, so that two hosts' appends do
        // not overwrite each other.
        match self.file(handle).and_then(|file| file.write_at(data, offset).map_err(Errno::from)) {
            Ok(count) => reply.written(u32::try_from(count).unwrap_or(0)),
            Err(errno) => reply.error(errno),
        }
    }

    fn release(
        &self,
        _request: &Request,
        _inode: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        lock(&self.files).remove(&handle.0);
        reply.ok();
    }

    fn fsync(&self, _request: &Request, inode: INodeNo, handle: FileHandle, data_only: bool, reply: ReplyEmpty) {
        self.wait_at_gate_with("fsync", inode);
        let sync = |file: Arc<File>| if data_only { file.sync_data() } else { file.sync_all() };
        done(reply, self.file(handle).and_then(|file| sync(file).map_err(Errno::from)));
    }

    fn opendir(&self, _request: &Request, _inode: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        reply.opened(self.new_handle(&self.directories, Vec::new()), FopenFlags::empty());
    }

    fn readdir(&self, _request: &Request, inode: INodeNo, handle: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        // The listing is taken anew whenever it is read from its beginning, and then kept: offsets mean
        // the same for as long as they are used.
        if offset == 0 {
            match self.list(inode) {
                Ok(entries) => lock(&self.directories).insert(handle.0, entries),
                Err(errno) => return reply.error(errno),
            };
        }
        let directories = lock(&self.directories);
        let entries = directories.get(&handle.0).map_or(&[][..], Vec::as_slice);
        let rest = (1..).zip(entries).skip(usize::try_from(offset).unwrap_or(usize::MAX));
        for (next_offset, (inode, kind, name)) in rest {
            if reply.add(INodeNo(*inode), next_offset, *kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn releasedir(
        &self,
        _request: &Request,
        _inode: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        reply: ReplyEmpty,
    ) {
        lock(&self.directories).remove(&handle.0);
        reply.ok();
    }

    fn fsyncdir(&self, _request: &Request, inode: INodeNo, _handle: FileHandle, _data_only: bool, reply: ReplyEmpty) {
        let sync = |dir| File::open(by_descriptor(&dir)).and_then(|dir| dir.sync_all()).map_err(Errno::from);
        done(reply, self.node(inode).and_then(sync));
    }

    fn statfs(&self, _request: &Request, inode: INodeNo, reply: ReplyStatfs) {
        match self.node(inode).and_then(|file| fstatvfs(&*file).map_err(refused)) {
            Ok(about) => reply.statfs(
                about.blocks(),
                about.blocks_free(),
                about.blocks_available(),
                about.files(),
                about.files_free(),
                u32::try_from(about.block_size()).unwrap_or(4096),
                u32::try_from(about.name_max()).unwrap_or(255),
                u32::try_from(about.fragment_size()).unwrap_or(4096),
            ),
            Err(errno) => reply.error(errno),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn done(reply: ReplyEmpty, result: Result<(), Errno>) {
    match result {
        Ok(()) => reply.ok(),
        Err(errno) => reply.error(errno),
    }
}

fn refused(errno: nix::errno::Errno) -> Errno {
    Errno::from(io::Error::from(errno))
}

/// A path that leads to the very file behind the descriptor, whatever became of its name.
fn by_descriptor(file: &impl AsRawFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// What a client's open flags mean for the backing file: who may replace, follow or cache is decided
/// elsewhere, and O_APPEND and the access mode stay.
fn backing_flags(flags: i32) -> OFlag {
    let dropped = OFlag::O_CREAT | OFlag::O_NOFOLLOW | OFlag::O_DIRECT | OFlag::O_NOCTTY;
    (OFlag::from_bits_truncate(flags) - dropped) | OFlag::O_CLOEXEC
}

/// The file system runs as root: what others create through it is theirs all the same.
fn give_to_caller(file: &impl AsRawFd, request: &Request) -> Result<(), Errno> {
    if request.uid() == 0 && request.gid() == 0 {
        return Ok(());
    }
    let (uid, gid) = (Uid::from_raw(request.uid()), Gid::from_raw(request.gid()));
    fchownat(AT_FDCWD, &by_descriptor(file), Some(uid), Some(gid), AtFlags::empty()).map_err(refused)
}

fn mode_of(mode: u32) -> Mode {
    Mode::from_bits_truncate(mode & 0o7777)
}

fn unsigned(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}

fn kind_of(stat: &FileStat) -> FileType {
    match SFlag::from_bits_truncate(stat.st_mode & SFlag::S_IFMT.bits()) {
        SFlag::S_IFDIR => FileType::Directory,
        SFlag::S_IFLNK => FileType::Symlink,
        SFlag::S_IFIFO => FileType::NamedPipe,
        SFlag::S_IFSOCK => FileType::Socket,
        SFlag::S_IFCHR => FileType::CharDevice,
        SFlag::S_IFBLK => FileType::BlockDevice,
        _ => FileType::RegularFile,
    }
}
