//! Paths that are no locks' own: their directories, settings, where they lead to.

use std::ffi::{OsStr, OsString};

use nix::Result;
use nix::errno::Errno;
use nix::sys::stat::{Mode, umask};

/// Makes the missing directories of `path`, each with 0777 less the umask, but such that its owner can make names
/// in it: the lock is to be made there.
pub fn make_dirs(path: &std::path::Path) -> std::io::Result<()> {
    let mine = umask(Mode::empty());
    umask(mine - (Mode::S_IWUSR | Mode::S_IXUSR));
    let made = std::fs::create_dir_all(path);
    umask(mine);
    made
}

/// The absolute form of a path, without resolving anything in it.
pub fn absolute(path: &std::path::Path) -> Result<OsString> {
    if path.is_absolute() {
        return Ok(path.as_os_str().to_owned());
    }
    // Longer than a path may be, the C library calls out of range.
    let too_long = |errno| if errno == Errno::ERANGE { Errno::ENAMETOOLONG } else { errno };
    let mut whole = nix::unistd::getcwd().map_err(too_long)?;
    whole.push(path);
    Ok(whole.into_os_string())
}

/// A whole file, by any path: a setting, no lock.
pub fn whole(path: &OsStr) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|error| error.raw_os_error().map_or(Errno::EIO, Errno::from_raw))
}

/// Whether two paths lead to one file, or would if they were made: so far as can be seen.
pub fn is_same_place(path: &OsStr, other: &OsStr) -> bool {
    use std::os::unix::fs::MetadataExt;
    use std::path::Path;
    let identity = |metadata: std::io::Result<std::fs::Metadata>| metadata.ok().map(|found| (found.dev(), found.ino()));
    let place = |path: &Path| {
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        Some((identity(parent.metadata())?, path.file_name()?.to_owned()))
    };
    let (path, other) = (Path::new(path), Path::new(other));
    // The log may be reached through a link, the lock never is.
    let target =
        std::fs::read_link(path).ok().map(|target| path.parent().map_or(target.clone(), |dir| dir.join(target)));
    let would_be = place(other);
    let same_file = identity(path.metadata()).is_some_and(|found| Some(found) == identity(other.symlink_metadata()));
    same_file
        || [Some(path), target.as_deref()]
            .into_iter()
            .flatten()
            .any(|path| would_be.is_some() && place(path) == would_be)
}
