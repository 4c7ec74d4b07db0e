//! Attributes that keep everybody, root as well, from moving or removing a file (chattr(1)).

use std::ffi::{CString, OsStr};
use std::os::unix::ffi::OsStrExt;

use nix::libc;

use super::file::Dir;

/// How a file is fixed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fixed {
    /// It may not be changed, renamed or removed.
    Immutable,
    /// It may only grow; of a directory no name may be taken away.
    AppendOnly,
}

/// Whether what stands at `name` is fixed, a link not followed; `.` is the directory itself. `None` also where
/// that cannot be told.
pub fn fixed(dir: &Dir, name: &OsStr) -> Option<Fixed> {
    let name = CString::new(name.as_bytes()).ok()?;
    let mut found = std::mem::MaybeUninit::<libc::statx>::zeroed();
    // Not by its name in the C library: the standard library refers to that weakly, and in a static program nothing
    // would then stand behind it.
    // SAFETY: the name is a C string and `found` has room for what the kernel writes; both outlive the call.
    let asked = unsafe {
        libc::syscall(libc::SYS_statx, dir.number(), name.as_ptr(), libc::AT_SYMLINK_NOFOLLOW, 0, found.as_mut_ptr())
    };
    // SAFETY: all zeros are a valid value, and the kernel has written over them.
    let attributes = unsafe { found.assume_init() }.stx_attributes;
    let has = |attribute: libc::c_int| u64::try_from(attribute).is_ok_and(|bit| attributes & bit != 0);
    match asked {
        0 if has(libc::STATX_ATTR_IMMUTABLE) => Some(Fixed::Immutable),
        0 if has(libc::STATX_ATTR_APPEND) => Some(Fixed::AppendOnly),
        _ => None,
    }
}
