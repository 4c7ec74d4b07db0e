//! Starting COMMAND.
//!
//! posix_spawn would do, but it asks for and sets the disposition of every signal in the child, 128
//! system calls that are a sixth of the whole run of a short command. What it does for that is not
//! needed here: this program has no signal handlers when it spawns, so there is nothing to reset.

use std::ffi::{CString, OsStr, OsString, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::ptr;

use nix::Result;
use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::libc;
use nix::sys::stat::Mode;
use nix::unistd::{AccessFlags, access};

use super::process::{self, environment};
use super::recruit::Recruit;
use super::signal::OnEntry;

/// A command line and its environment, byte for byte.
#[derive(Debug)]
pub struct Program {
    argv: Vec<CString>,
    /// The files that its name may mean, in order.
    candidates: Vec<CString>,
    /// Entries of our own environment, which outlive the process's every use of them.
    inherited: Vec<*const c_char>,
    given: Variables,
    /// Variables that name the process which they are meant for, and named this one.
    meant_for_us: Vec<&'static str>,
    has_input: bool,
}

/// Environment variables that a program is given.
#[derive(Debug, Default)]
pub struct Variables(Vec<CString>);

impl Variables {
    /// One more. EINVAL: it holds a NUL byte.
    pub fn set(&mut self, name: &str, value: &OsStr) -> Result<()> {
        let entry = [name.as_bytes(), b"=", value.as_bytes()].concat();
        self.0.push(CString::new(entry).map_err(|_| Errno::EINVAL)?);
        Ok(())
    }
}

/// What a service manager hands to the process that it has started, by its pid: sockets (sd_listen_fds(3)) and a
/// watchdog (sd_watchdog_enabled(3)). COMMAND would take neither if they were meant for its wrapper.
const NAMES_A_PROCESS: [&str; 2] = ["LISTEN_PID", "WATCHDOG_PID"];
/// The same once more as the identity of a pidfd, which COMMAND's would not be.
const NAMES_A_PIDFD: &str = "LISTEN_PIDFDID";

impl Program {
    /// A command with this process's environment, but without the variables `own`, and with those `given`.
    pub fn new(argv: &[OsString], own: &[&str], given: Variables) -> Result<Self> {
        let c_string = |word: &OsString| CString::new(word.as_bytes()).map_err(|_| Errno::EINVAL);
        let argv = argv.iter().map(c_string).collect::<Result<Vec<_>>>()?;
        let environment = environment();
        let value = |name: &str| {
            let mut entries = environment.iter().map(|entry| entry.to_bytes());
            entries.find_map(|entry| entry.strip_prefix(name.as_bytes())?.strip_prefix(b"="))
        };
        let is_ours = |value: &[u8]| value == std::process::id().to_string().as_bytes();
        let meant_for_us: Vec<_> =
            NAMES_A_PROCESS.into_iter().filter(|name| value(name).is_some_and(is_ours)).collect();
        let pidfd = (!meant_for_us.is_empty()).then_some(NAMES_A_PIDFD);
        let replaced = |entry: &[u8]| {
            let mut names = own.iter().copied().chain(meant_for_us.iter().copied()).chain(pidfd);
            names.any(|name| entry.strip_prefix(name.as_bytes()).is_some_and(|rest| rest.starts_with(b"=")))
        };
        let inherited =
            environment.iter().filter(|entry| !replaced(entry.to_bytes())).map(|entry| entry.as_ptr()).collect();
        let candidates = argv.first().map_or_else(Vec::new, |name| candidates(name.to_bytes()));
        Ok(Program { argv, candidates, inherited, given, meant_for_us, has_input: true })
    }

    /// The same, but its standard input is empty.
    pub fn without_input(self) -> Self {
        Program { has_input: false, ..self }
    }

    /// Starts it with the variables `told` besides and the signal mask that we were started with, by `recruit` if
    /// there is one; its pid. ENOENT: not found.
    pub fn spawn(&self, told: &Variables, on_entry: &OnEntry, recruit: Option<Recruit>) -> Result<i32> {
        let mut argv: Vec<*const c_char> = self.argv.iter().map(|word| word.as_ptr()).collect();
        argv.push(ptr::null());
        let own = self.given.0.iter().chain(&told.0).map(|entry| entry.as_ptr());
        let mut own_pid: Vec<OwnPid> = self.meant_for_us.iter().copied().map(OwnPid::new).collect();
        let named = own_pid.iter().map(|entry| entry.entry.as_ptr().cast());
        let environment: Vec<*const c_char> =
            self.inherited.iter().copied().chain(own).chain(named).chain([ptr::null()]).collect();
        // For a script without `#!`: sh, the script, its arguments.
        let mut shell_argv = Vec::with_capacity(argv.len() + 1);
        shell_argv.extend([c"sh".as_ptr(), ptr::null()]);
        shell_argv.extend(argv.get(1..).unwrap_or_default());
        let mut start = Start {
            candidates: &self.candidates,
            is_searched: self.argv.first().is_some_and(|name| !is_path(name.to_bytes())),
            argv: &argv,
            shell_argv: &mut shell_argv,
            environment: &environment,
            own_pid: &mut own_pid,
            mask: *on_entry.mask().as_ref(),
            has_input: self.has_input,
            ignores_child: on_entry.ignores_child(),
            error: 0,
        };
        let argument = ptr::from_mut(&mut start).cast();
        let pid = match recruit {
            Some(recruit) => recruit.begin(argument),
            None => vfork(argument)?,
        };
        if start.error == 0 {
            return Ok(pid);
        }
        // SAFETY: waitpid reaps the child that has just ended and writes nothing.
        unsafe { libc::waitpid(pid, ptr::null_mut(), 0) };
        Err(Errno::from_raw(start.error))
    }
}

/// Makes a child and stands still until it has become COMMAND, or ended; its pid.
fn vfork(start: *mut c_void) -> Result<i32> {
    let mut stack = Stack::new();
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    // SAFETY: the child runs `become_command` on its own stack in our memory, and with CLONE_VFORK we
    // stand still until it has called execve or _exit, so that `start`, what it points to and `stack`
    // outlive it. All signals are blocked in both, so no handler runs in the shared memory.
    let pid = unsafe { libc::clone(become_command, stack.top(), flags, start) };
    Errno::result(pid)
}

/// What a child in our memory stands on until it has become COMMAND. Its pages are touched only where used.
#[derive(Debug)]
pub(super) struct Stack(Box<[MaybeUninit<u8>]>);

impl Stack {
    const BYTES: usize = 32 * 1024;

    pub(super) fn new() -> Self {
        Stack(Box::new_uninit_slice(Stack::BYTES))
    }

    /// Where it begins: it grows down from its aligned end.
    pub(super) fn top(&mut self) -> *mut c_void {
        let end = self.0.as_mut_ptr_range().end;
        end.wrapping_byte_sub(end.addr() & 15).cast()
    }
}

/// All that the child needs, made beforehand: in memory shared with its parent it must not allocate.
struct Start<'a> {
    candidates: &'a [CString],
    /// In the directories of PATH: one that is none is passed over.
    is_searched: bool,
    argv: &'a [*const c_char],
    shell_argv: &'a mut [*const c_char],
    environment: &'a [*const c_char],
    own_pid: &'a mut [OwnPid],
    mask: libc::sigset_t,
    has_input: bool,
    ignores_child: bool,
    error: c_int,
}

/// A variable whose value is the pid of the process that has it: `NAME=`, and room for the number.
struct OwnPid {
    entry: [u8; 32],
    number_at: usize,
}

impl OwnPid {
    fn new(name: &'static str) -> Self {
        let mut entry = [0; 32];
        entry[..name.len()].copy_from_slice(name.as_bytes());
        entry[name.len()] = b'=';
        OwnPid { entry, number_at: name.len() + 1 }
    }

    /// In place, and without asking for memory.
    fn fill_in(&mut self, pid: c_int) {
        let mut divisor = 1_000_000_000;
        let mut at = self.number_at;
        while divisor > 0 {
            let digit = pid / divisor % 10;
            if (digit > 0 || at > self.number_at)
                && let (Some(byte), Ok(digit)) = (self.entry.get_mut(at), u8::try_from(digit))
            {
                *byte = b'0' + digit;
                at += 1;
            }
            divisor /= 10;
        }
    }
}

/// The child's part: give SIGCHLD's disposition and the mask back, and become COMMAND, searched for as execvp does.
pub(super) extern "C" fn become_command(argument: *mut c_void) -> c_int {
    // SAFETY: `spawn` passes its `Start`, and does not run until we are gone. From here on only
    // async-signal-safe calls.
    unsafe {
        let start = &mut *argument.cast::<Start<'_>>();
        if !start.has_input {
            // The table of descriptors is our own. One below 3 cannot be free.
            let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
            if null < 0 {
                libc::close(0);
            } else {
                libc::dup2(null, 0);
            }
        }
        if !start.own_pid.is_empty() {
            let pid = libc::getpid();
            start.own_pid.iter_mut().for_each(|entry| entry.fill_in(pid));
        }
        if start.ignores_child {
            libc::signal(libc::SIGCHLD, libc::SIG_IGN);
        }
        libc::sigprocmask(libc::SIG_SETMASK, &raw const start.mask, ptr::null_mut());
        let mut error = libc::ENOENT;
        for candidate in start.candidates {
            libc::execve(candidate.as_ptr(), start.argv.as_ptr(), start.environment.as_ptr());
            match *libc::__errno_location() {
                libc::ENOEXEC => {
                    start.shell_argv[1] = candidate.as_ptr();
                    libc::execve(c"/bin/sh".as_ptr(), start.shell_argv.as_ptr(), start.environment.as_ptr());
                    error = *libc::__errno_location();
                    break;
                }
                // Remembered: a later directory may still have one that can be run.
                libc::EACCES => error = libc::EACCES,
                libc::ENOENT | libc::ENOTDIR | libc::ESTALE | libc::ENODEV | libc::ETIMEDOUT if start.is_searched => {}
                other => {
                    error = other;
                    break;
                }
            }
        }
        start.error = error;
        libc::_exit(127)
    }
}

/// Where a command is there and was said not to be found: what it wants to be run by, as its first line says, or
/// nothing where that is no script's.
pub fn missing_interpreter(name: &OsStr) -> Option<OsString> {
    const READ_BYTES: usize = 256;
    let file =
        candidates(name.as_bytes()).into_iter().find(|candidate| access(&**candidate, AccessFlags::X_OK).is_ok());
    let mut line = vec![0; READ_BYTES];
    let opened = open(&*file?, OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK, Mode::empty());
    let read = opened.and_then(|opened| nix::unistd::read(opened, &mut line)).unwrap_or(0);
    line.truncate(read);
    let line = line.split(|b| *b == b'\n').next().and_then(|line| line.strip_prefix(b"#!")).unwrap_or_default();
    let words = line.trim_ascii_start().split(|b| *b == b' ' || *b == b'\t');
    Some(OsString::from_vec(words.into_iter().next().unwrap_or_default().to_vec()))
}

/// Whether a command's name is that of a file, which is not searched for.
fn is_path(name: &[u8]) -> bool {
    name.contains(&b'/')
}

/// The files that a command's name may mean, in order.
fn candidates(name: &[u8]) -> Vec<CString> {
    let path = process::variable("PATH").map_or_else(|| b"/bin:/usr/bin".to_vec(), OsString::into_vec);
    if is_path(name) {
        return CString::new(name).into_iter().collect();
    }
    path.split(|b| *b == b':')
        .filter_map(|dir| {
            let dir = if dir.is_empty() { b".".as_slice() } else { dir };
            CString::new([dir, b"/", name].concat()).ok()
        })
        .collect()
}
