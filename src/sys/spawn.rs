//! Starting COMMAND.

use std::ffi::{CStr, CString, OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use nix::Result;
use nix::errno::Errno;
use nix::spawn::{PosixSpawnAttr, PosixSpawnFileActions, PosixSpawnFlags, posix_spawn, posix_spawnp};

use super::signal::OnEntry;

/// A command line and its environment, byte for byte.
#[derive(Debug)]
pub struct Program {
    argv: Vec<CString>,
    environment: Vec<CString>,
}

unsafe extern "C" {
    static environ: *const *const std::ffi::c_char;
}

/// This process's environment as it is, entries without `=` and doubled ones included.
fn environment() -> Vec<&'static CStr> {
    let mut entries = Vec::new();
    // SAFETY: environ points to a null-terminated array of C strings that lives as long as the process;
    // nothing in this program changes the environment.
    unsafe {
        let mut next = environ;
        while !next.is_null() && !(*next).is_null() {
            entries.push(CStr::from_ptr(*next));
            next = next.add(1);
        }
    }
    entries
}

impl Program {
    /// A command with this process's environment, in which `set` is set and `unset` is not.
    pub fn new(argv: &[OsString], set: &[(&str, OsString)], unset: &[&str]) -> Result<Self> {
        let c_string = |bytes: Vec<u8>| CString::new(bytes).map_err(|_| Errno::EINVAL);
        let argv = argv.iter().map(|word| c_string(word.clone().into_vec())).collect::<Result<Vec<_>>>()?;
        let replaced = |entry: &[u8]| {
            let names = set.iter().map(|(name, _)| *name).chain(unset.iter().copied());
            names.into_iter().any(|name| entry.strip_prefix(name.as_bytes()).is_some_and(|rest| rest.starts_with(b"=")))
        };
        let mut environment: Vec<CString> =
            environment().into_iter().filter(|entry| !replaced(entry.to_bytes())).map(CStr::to_owned).collect();
        for (name, value) in set {
            environment.push(c_string([name.as_bytes(), b"=", value.as_bytes()].concat())?);
        }
        Ok(Program { argv, environment })
    }

    /// Starts it with the signal mask that we were started with; its pid. ENOENT: not found.
    pub fn spawn(&self, on_entry: &OnEntry) -> Result<i32> {
        let mut attributes = PosixSpawnAttr::init()?;
        attributes.set_flags(PosixSpawnFlags::POSIX_SPAWN_SETSIGMASK)?;
        attributes.set_sigmask(on_entry.mask())?;
        let actions = PosixSpawnFileActions::init()?;
        let name = self.argv.first().ok_or(Errno::ENOENT)?;
        match posix_spawnp(name, &actions, &attributes, &self.argv, &self.environment) {
            Err(Errno::ENOEXEC) => {
                // A script without `#!`: run it as a shell would.
                let path = find(name.to_bytes()).ok_or(Errno::ENOENT)?;
                let mut argv = vec![c"sh".to_owned(), path];
                argv.extend(self.argv.iter().skip(1).cloned());
                posix_spawn(c"/bin/sh", &actions, &attributes, &argv, &self.environment)
            }
            spawned => spawned,
        }
        .map(nix::unistd::Pid::as_raw)
    }
}

/// Where a command name leads through PATH.
fn find(name: &[u8]) -> Option<CString> {
    if name.contains(&b'/') {
        return CString::new(name).ok();
    }
    let path = std::env::var_os("PATH").unwrap_or_else(|| OsString::from("/bin:/usr/bin"));
    path.as_bytes().split(|b| *b == b':').find_map(|dir| {
        let dir = if dir.is_empty() { b".".as_slice() } else { dir };
        let whole = [dir, b"/", name].concat();
        let usable = nix::unistd::access(OsStr::from_bytes(&whole), nix::unistd::AccessFlags::X_OK).is_ok();
        usable.then(|| CString::new(whole).ok()).flatten()
    })
}
