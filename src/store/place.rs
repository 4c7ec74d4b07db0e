//! A lock path and what stands there.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::lease::{self, BLANK_TTL_MS, Stamp};
use crate::record::{self, Content, Foreign, MAX_READ_BYTES, Nonce, Record, SLOT_SUFFIX_BYTES, SlotName};
use crate::sys::file::{Dir, File, FileSystem, Identity, Kind, Stat};
use crate::sys::path::{absolute, make_dirs};
use crate::sys::{Errno, describe, process, user};
use crate::text::Shown;

use super::Fault;
use super::permission::is_kept;

/// A lock path: its directory, by descriptor, and its name in it.
///
/// The directory is opened once. Everything that is done to this lock is done under that descriptor, so
/// that it happens in the same place even if the directory is renamed, or a symbolic link above it is
/// turned elsewhere, meanwhile.
#[derive(Debug)]
pub struct Place {
    /// The directory.
    pub dir: Dir,
    /// The lock's name in it.
    pub name: OsString,
    /// The path as the user gave it, for messages.
    pub path: PathBuf,
    /// The file system that holds it.
    pub file_system: FileSystem,
}

impl Place {
    /// Opens the directory of `path`; with `parents` makes it first where it is missing.
    pub fn open(path: &OsStr, parents: bool) -> Result<Self, Fault> {
        let cannot = |why: String| Fault::CannotTake { path: path.as_bytes().to_vec(), why };
        let bytes = path.as_bytes();
        let (parent, name) = match bytes.iter().rposition(|b| *b == b'/') {
            Some(0) => (OsStr::new("/"), OsStr::from_bytes(&bytes[1..])),
            Some(slash) => (OsStr::from_bytes(&bytes[..slash]), OsStr::from_bytes(&bytes[slash + 1..])),
            None => (OsStr::new("."), path),
        };
        match name.as_bytes() {
            b"" if bytes.is_empty() => return Err(cannot("the path is empty".into())),
            b"" => return Err(cannot("the path ends in a slash, a lock is a file".into())),
            b"." | b".." => return Err(cannot("the path names a directory, a lock is a file".into())),
            _ => {}
        }
        if parents {
            make_dirs(Path::new(parent)).map_err(|error| {
                let errno = Errno::from_raw(error.raw_os_error().unwrap_or(0));
                directory_fault(path, parent, "make", errno)
            })?;
        }
        let dir = Dir::open(parent).map_err(|errno| directory_fault(path, parent, "use", errno))?;
        let file_system = dir.file_system().map_err(|errno| Fault::Io {
            path: bytes.to_vec(),
            doing: "examine its directory",
            errno,
        })?;
        let place = Place { dir, name: name.to_owned(), path: path.into(), file_system };
        Ok(place)
    }

    /// What tells this lock from others on this host, however their paths are spelt: device and inode of
    /// the directory, and the name in it.
    pub fn key(&self) -> Result<(u64, u64, OsString), Fault> {
        let Identity { dev, ino } =
            self.dir.stat().map_err(|errno| self.fault("examine its directory", errno))?.identity;
        Ok((dev, ino, self.name.clone()))
    }

    /// Refuses a name whose slot name would not fit: what can be taken must be breakable.
    pub fn check_name_length(&self) -> Result<(), Fault> {
        let most = self.file_system.name_max_bytes.saturating_sub(SLOT_SUFFIX_BYTES);
        if self.name.len() <= most {
            return Ok(());
        }
        Err(self.cannot(format!(
            "its name has {} bytes, at most {most} leave room for the name of its quarantine",
            self.name.len()
        )))
    }

    /// A fault of kind "can never be taken" at this path.
    pub fn cannot(&self, why: impl Into<String>) -> Fault {
        Fault::CannotTake { path: self.shown().to_vec(), why: why.into() }
    }

    /// What an error while working at this path means for the user: an input or output error, unless
    /// permission or resources are missing.
    pub fn fault(&self, doing: &'static str, errno: Errno) -> Fault {
        match errno {
            Errno::EACCES | Errno::EPERM => self.not_permitted(doing, errno),
            Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM => {
                Fault::System { path: self.shown().to_vec(), doing, errno }
            }
            _ => Fault::Io { path: self.shown().to_vec(), doing, errno },
        }
    }

    /// The path's bytes, for messages.
    pub fn shown(&self) -> &[u8] {
        self.path.as_os_str().as_bytes()
    }

    /// The directory part of the path, for messages.
    pub fn parent(&self) -> &OsStr {
        match self.path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.as_os_str(),
            _ => OsStr::new("."),
        }
    }

    /// The path of a neighbour of the lock, for messages.
    pub fn beside(&self, name: &OsStr) -> PathBuf {
        self.path.with_file_name(name)
    }

    /// The absolute path.
    pub fn absolute(&self) -> Result<OsString, Fault> {
        absolute(&self.path).map_err(|errno| match errno {
            Errno::ENOENT => self.cannot("the working directory was removed"),
            _ => Fault::System { path: self.shown().to_vec(), doing: "find the working directory", errno },
        })
    }

    /// What an error while changing this directory means for the user.
    pub fn change_fault(&self, doing: &'static str, errno: Errno) -> Fault {
        match errno {
            Errno::EROFS => self.cannot("the file system is read-only"),
            Errno::ENOENT if self.dir.is_removed() => {
                self.cannot(format!("no such directory: {}", Shown::os(self.parent())))
            }
            // It is there, but takes no such name: /proc.
            Errno::ENOENT
            | Errno::ENAMETOOLONG
            | Errno::EINVAL
            | Errno::EILSEQ
            | Errno::EISDIR
            | Errno::ELOOP
            | Errno::ENOTDIR => self.cannot(format!("cannot {doing}: {}", describe(errno))),
            _ => self.fault(doing, errno),
        }
    }

    /// "No permission", with owner and mode of the directory and our own uid; or with what keeps root out as well.
    pub fn not_permitted(&self, doing: &str, errno: Errno) -> Fault {
        if errno == Errno::EPERM
            && let Some(why) = is_kept(self)
        {
            let why = format!("no permission to {doing}: {why}");
            return Fault::NotPermitted { path: self.shown().to_vec(), why };
        }
        let dir = match self.dir.stat() {
            Ok(stat) => belongs_to(self.parent(), &stat),
            Err(_) => format!("directory {}", Shown::os(self.parent())),
        };
        let why =
            format!("no permission to {doing}: {} ({dir}; we are uid {})", describe(errno), process::effective_uid());
        Fault::NotPermitted { path: self.shown().to_vec(), why }
    }

    /// Looks at the lock path: nothing, an epoch, or something that is not ours to touch.
    pub fn observe(&self) -> Result<Seen, Fault> {
        let failed = |errno| self.change_fault("look at it", errno);
        for _ in 0..OBSERVE_TRIES {
            let Some(stat) = self.dir.lstat(&self.name).map_err(failed)? else { return Ok(Seen::Free) };
            if stat.kind != Kind::Regular {
                return Ok(Seen::Foreign(stat, Foreign::NoLock(stat.kind.describe().into())));
            }
            let file = match self.dir.open_file(&self.name) {
                Ok(file) => file,
                Err(Errno::EACCES | Errno::EPERM) => {
                    return Ok(Seen::Epoch(Epoch { stat, known: Known::Unreadable, file: None }));
                }
                // It was replaced or removed since the lstat.
                Err(Errno::ENOENT | Errno::ELOOP | Errno::ENXIO | Errno::ESTALE) => continue,
                Err(errno) => return Err(failed(errno)),
            };
            if let Some(seen) = Epoch::read(file).map_err(failed)? {
                return Ok(seen);
            }
        }
        Err(failed(Errno::EAGAIN))
    }
}

/// A lock path that changes under each of this many looks is an error, not a loop.
const OBSERVE_TRIES: u32 = 1000;

/// Whether an error says that we may not, rather than that something is broken.
pub(super) fn is_refusal(errno: Errno) -> bool {
    matches!(errno, Errno::EACCES | Errno::EPERM | Errno::EROFS)
}

/// A user, by name where it is known without asking far.
pub(super) fn owner(uid: u32) -> String {
    user::local_name(uid).unwrap_or_else(|| format!("uid {uid}"))
}

fn belongs_to(dir: &OsStr, stat: &Stat) -> String {
    format!("directory {} belongs to {}, mode {:04o}", Shown::os(dir), owner(stat.uid), stat.mode)
}

/// An errno's text about a path that we may not use or make, with owner and mode of what on the way there
/// refused, and our own uid.
pub fn refused_by(path: &OsStr, errno: Errno) -> String {
    let by = refusing(Path::new(path)).map(|by| format!("{by}; ")).unwrap_or_default();
    format!("{} ({by}we are uid {})", describe(errno), process::effective_uid())
}

/// The last directory on the way that can still be examined, unless what it was searched for is there.
fn refusing(path: &Path) -> Option<String> {
    let mut beyond: Option<&OsStr> = None;
    for ancestor in path.ancestors() {
        let ancestor = if ancestor.as_os_str().is_empty() { OsStr::new(".") } else { ancestor.as_os_str() };
        if let Ok(dir) = Dir::open(ancestor) {
            return match beyond.map(|name| dir.lstat(name)) {
                // It is elsewhere.
                Some(Ok(Some(Stat { kind: Kind::Symlink, .. }))) => None,
                Some(Ok(Some(stat))) if stat.kind != Kind::Directory => {
                    Some(format!("it belongs to {}, mode {:04o}", owner(stat.uid), stat.mode))
                }
                _ => dir.stat().ok().map(|stat| belongs_to(ancestor, &stat)),
            };
        }
        beyond = Path::new(ancestor).file_name();
    }
    None
}

fn directory_fault(path: &OsStr, parent: &OsStr, doing: &'static str, errno: Errno) -> Fault {
    let bytes = path.as_bytes().to_vec();
    let shown = Shown::os(parent);
    match errno {
        Errno::ENOENT => Fault::CannotTake { path: bytes, why: format!("no such directory: {shown}") },
        Errno::EACCES | Errno::EPERM => Fault::NotPermitted {
            path: bytes,
            why: format!("no permission to {doing} directory {shown}: {}", refused_by(parent, errno)),
        },
        Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM => {
            Fault::System { path: bytes, doing: "open its directory", errno }
        }
        Errno::EIO | Errno::ESTALE | Errno::ENOSPC | Errno::EDQUOT => {
            Fault::Io { path: bytes, doing: "open its directory", errno }
        }
        _ => Fault::CannotTake { path: bytes, why: format!("cannot {doing} directory {shown}: {}", describe(errno)) },
    }
}

/// What stands at a lock path.
#[derive(Debug)]
pub enum Seen {
    /// Nothing.
    Free,
    /// A lock.
    Epoch(Epoch),
    /// Something else. Never touched.
    Foreign(Stat, Foreign),
}

/// What is known of an epoch from its file's content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Known {
    /// Its record.
    Record(Box<Record>),
    /// Its maker died before the record was written, or has not yet written it.
    Blank,
    /// We may not read it: it counts as held and is never ended by us.
    Unreadable,
}

/// One existence of a lock file.
#[derive(Debug)]
pub struct Epoch {
    /// Its file, when it was read.
    pub stat: Stat,
    /// Its content.
    pub known: Known,
    /// The file itself; keeps its inode from being used again.
    pub file: Option<File>,
}

impl Epoch {
    /// Reads an open file; `None` if it changed while it was read, or was removed: of that a file server
    /// says that the handle is stale.
    pub fn read(file: File) -> crate::sys::file::Outcome<Option<Seen>> {
        let content = file.content(MAX_READ_BYTES);
        let stat = match file.stat() {
            Ok(stat) => stat,
            Err(Errno::ESTALE) => return Ok(None),
            Err(errno) => return Err(errno),
        };
        // Before what became of reading it: nobody promised that this can be read.
        if stat.kind != Kind::Regular {
            return Ok(Some(Seen::Foreign(stat, Foreign::NoLock(stat.kind.describe().into()))));
        }
        let content = match content {
            Ok(content) => content,
            Err(Errno::ESTALE) => return Ok(None),
            Err(errno) => return Err(errno),
        };
        // Content first, stamp second: a record written in between shows as a size that does not fit.
        if stat.size_bytes <= MAX_READ_BYTES as u64 && content.len() as u64 != stat.size_bytes {
            return Ok(None);
        }
        Ok(Some(match record::classify(&content, stat.size_bytes) {
            Content::Record(record) => Seen::Epoch(Epoch { stat, known: Known::Record(record), file: Some(file) }),
            Content::Blank => Seen::Epoch(Epoch { stat, known: Known::Blank, file: Some(file) }),
            Content::Newer(version) => Seen::Foreign(stat, Foreign::Newer(version)),
            Content::Foreign => Seen::Foreign(stat, Foreign::NoLock("a regular file that is no lock".into())),
        }))
    }

    /// Which file it is.
    pub fn identity(&self) -> Identity {
        self.stat.identity
    }

    /// When it was last renewed.
    pub fn mtime(&self) -> Stamp {
        self.stat.mtime
    }

    /// Its record, if it can be read.
    pub fn record(&self) -> Option<&Record> {
        match &self.known {
            Known::Record(record) => Some(record),
            Known::Blank | Known::Unreadable => None,
        }
    }

    /// Its nonce, if it has one.
    pub fn nonce(&self) -> Option<Nonce> {
        self.record().map(|record| record.nonce)
    }

    /// The ttl to judge it by: its own, or the fixed one of blank locks.
    pub fn ttl_ms(&self) -> u64 {
        self.record().map_or(BLANK_TTL_MS, Record::judged_ttl_ms)
    }

    /// The one place where it can be ended.
    pub fn slot_name(&self) -> SlotName {
        self.record().map_or_else(|| SlotName::of_blank(self.stat.identity.ino, self.stat.mtime), SlotName::of)
    }

    /// How long its quarantine must be kept.
    pub fn reclaim_age_ms(&self) -> u64 {
        lease::reclaim_age_ms(self.ttl_ms())
    }

    /// Whether `other` is a later look at the same epoch.
    pub fn is(&self, other: &Epoch) -> bool {
        self.identity() == other.identity()
            && match (&self.known, &other.known) {
                (Known::Record(mine), Known::Record(other)) => mine.nonce == other.nonce,
                // The slot of a blank lock is named by its stamp: with another stamp it is another slot.
                (Known::Blank, Known::Blank) => self.mtime() == other.mtime(),
                _ => false,
            }
    }
}
