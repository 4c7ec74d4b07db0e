//! Processes: this one, its children, and everything that descends from them. A process is a pid *and*
//! its start time; a pid alone is used again.

use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, OsStr, OsString, c_char, c_int};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::Path;
use std::sync::atomic::{AtomicU8, Ordering};

use nix::Result;
use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::Mode;

use crate::machine::Change;
use crate::record::MAX_COMMAND_BYTES;

/// Which of the descriptors 0 to 2 were closed on entry, a bit each.
static CLOSED_ON_ENTRY: AtomicU8 = AtomicU8::new(0);

/// Whether this one of the descriptors 0 to 2 was closed on entry: what is there now only keeps its
/// number occupied.
pub fn was_closed_on_entry(descriptor: u8) -> bool {
    CLOSED_ON_ENTRY.load(Ordering::Relaxed) & (1 << descriptor) != 0
}

/// Makes sure that descriptors 0 to 2 are open, so that no file of ours is taken for one of them. What
/// was closed on entry stays closed for COMMAND: the stand-ins are closed on exec.
pub fn occupy_standard_descriptors() {
    // SAFETY: the descriptors are only asked about; poll says POLLNVAL for one that is not open.
    let ask = |fd| unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
    let mut standard = [0, 1, 2].map(|fd| PollFd::new(ask(fd), PollFlags::empty()));
    if poll(&mut standard, PollTimeout::ZERO) == Ok(0) {
        return;
    }
    for (descriptor, found) in standard.iter().enumerate() {
        if found.revents().is_some_and(|events| events.contains(PollFlags::POLLNVAL)) {
            CLOSED_ON_ENTRY.fetch_or(1 << descriptor, Ordering::Relaxed);
            let null = open("/dev/null", OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty())
                .or_else(|_| open("/", OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty()));
            // The lowest free number, which is the one that was found closed; kept for ever.
            if let Ok(fd) = null {
                std::mem::forget(fd);
            }
        }
    }
}

/// Who this process is, as a record says it.
#[derive(Clone, Debug)]
pub struct Who {
    /// The host's name.
    pub host: String,
    /// The running boot.
    pub boot_id: String,
    /// Our pid.
    pub pid: u32,
    /// Our start time in clock ticks since boot.
    pub pid_started: u64,
    /// Our effective user.
    pub uid: u32,
}

impl Who {
    /// Asks the system.
    pub fn am_i() -> Self {
        if let Some(host) = super::hook::host() {
            let host = host.to_owned();
            return Who { boot_id: host.clone(), host, pid: 1, pid_started: 1, uid: effective_uid() };
        }
        Who {
            host: nix::unistd::gethostname().unwrap_or_default().to_string_lossy().into_owned(),
            boot_id: boot_id(),
            pid: std::process::id(),
            pid_started: small_file("/proc/self/stat")
                .and_then(|stat| Stat::parse(&stat))
                .map_or(0, |stat| stat.started),
            uid: effective_uid(),
        }
    }
}

/// The identity of the running boot; empty where /proc does not tell.
pub fn boot_id() -> String {
    let text = small_file("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    String::from_utf8_lossy(&text).trim_end().to_owned()
}

/// Our effective user.
pub fn effective_uid() -> u32 {
    nix::unistd::geteuid().as_raw()
}

/// The beginning of a small file, in three system calls.
fn small_file(path: impl AsRef<Path>) -> Option<Vec<u8>> {
    let file = open(path.as_ref(), OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty()).ok()?;
    let mut content = vec![0; 1024];
    let read = nix::unistd::read(&file, &mut content).ok()?;
    content.truncate(read);
    Some(content)
}

/// What /proc/PID/stat tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stat {
    /// State letter: R, S, D, T, Z and so on.
    pub state: char,
    /// The parent.
    pub parent: i32,
    /// Start time in clock ticks since boot.
    pub started: u64,
    /// User and system CPU time in clock ticks.
    pub cpu_ticks: u64,
    /// The command's name, at most 15 bytes.
    pub command: Vec<u8>,
}

impl Stat {
    /// Parses the file's content. The command's name may itself have spaces and parentheses.
    pub fn parse(content: &[u8]) -> Option<Self> {
        let open = content.iter().position(|b| *b == b'(')?;
        let close = content.iter().rposition(|b| *b == b')')?;
        let rest = std::str::from_utf8(content.get(close + 1..)?).ok()?;
        let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        let number = |index: usize| fields.get(index)?.parse::<u64>().ok();
        Some(Stat {
            state: fields.first()?.chars().next()?,
            parent: fields.get(1)?.parse().ok()?,
            started: number(19)?,
            cpu_ticks: number(11)?.saturating_add(number(12)?),
            command: content.get(open + 1..close)?.to_vec(),
        })
    }

    /// Of a process that exists.
    pub fn of(pid: i32) -> Option<Self> {
        small_file(format!("/proc/{pid}/stat")).and_then(|content| Stat::parse(&content))
    }
}

/// The next change of any child, if there is one; an ended child is reaped by this.
pub fn next_change() -> Option<(i32, Change)> {
    loop {
        let mut status = 0;
        // SAFETY: waitpid writes one int. nix's own wrapper knows no real-time signals and would lose
        // the status of a child that one of them ended.
        let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG | libc::WUNTRACED | libc::WCONTINUED) };
        let change = match Errno::result(pid) {
            Err(Errno::EINTR) => continue,
            Err(_) | Ok(0) => return None,
            Ok(_) if libc::WIFEXITED(status) => {
                Change::Exited(u8::try_from(libc::WEXITSTATUS(status)).unwrap_or(u8::MAX))
            }
            Ok(_) if libc::WIFSIGNALED(status) => Change::Killed(libc::WTERMSIG(status)),
            Ok(_) if libc::WIFSTOPPED(status) => Change::Stopped {
                signal: libc::WSTOPSIG(status),
                has_terminal: super::job::Foreground::of(pid).is_some(),
            },
            Ok(_) => Change::Continued,
        };
        return Some((pid, change));
    }
}

/// How a child has ended, if it has. It stays to be reaped ([`Zombie`]): the kernel takes its time over that,
/// in which nobody else need wait for the lock.
pub fn ended(pid: i32) -> Option<Change> {
    // SAFETY: an all-zero siginfo is a valid value for the kernel to overwrite; zero is no child's pid.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let id = libc::id_t::try_from(pid).ok()?;
    // SAFETY: waitid writes one siginfo.
    let asked = unsafe { libc::waitid(libc::P_PID, id, &raw mut info, libc::WEXITED | libc::WNOHANG | libc::WNOWAIT) };
    // SAFETY: waitid fills in the fields of a child's end, or leaves the zeros.
    let (found, status) = unsafe { (info.si_pid(), info.si_status()) };
    match (asked, info.si_code) {
        (0, libc::CLD_EXITED) if found == pid => Some(Change::Exited(u8::try_from(status & 0xff).unwrap_or(u8::MAX))),
        (0, _) if found == pid => Some(Change::Killed(status)),
        _ => None,
    }
}

/// A child that has ended; it is reaped when this is dropped.
#[must_use]
#[derive(Debug)]
pub struct Zombie(pub i32);

impl Drop for Zombie {
    fn drop(&mut self) {
        // SAFETY: waitpid writes nothing here.
        unsafe { libc::waitpid(self.0, std::ptr::null_mut(), libc::WNOHANG) };
    }
}

/// Makes orphans among our descendants our children, so that all of a command's tree can be ended.
pub fn become_subreaper() -> Result<()> {
    nix::sys::prctl::set_child_subreaper(true)
}

/// Whether we lead our session: then a hang-up of the terminal reaches us alone.
pub fn is_session_leader() -> bool {
    nix::unistd::getsid(None).is_ok_and(|session| session == nix::unistd::getpid())
}

/// Sends a signal to a child that we have not reaped.
pub fn send(pid: i32, signal: i32) -> Result<()> {
    // SAFETY: kill takes two numbers.
    Errno::result(unsafe { libc::kill(pid, signal) }).map(drop)
}

/// A process that descends from us.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Descendant {
    /// Its pid.
    pub pid: i32,
    started: u64,
    /// Its name, for messages.
    pub command: String,
}

/// All that descends from the child `command_pid`, with itself: everything below this process (it is the
/// subreaper), but for children that it had already when it became `withlock`.
///
/// A look at `Children::Listed` costs as much as there are descendants, not processes on the host; the kernel may leave
/// out of it what was moved meanwhile, so that only one at `Children::All` tells that nothing is left.
pub fn descendants(command_pid: i32, command_started: u64, children: Children) -> Vec<Descendant> {
    let me = i32::try_from(std::process::id()).unwrap_or(0);
    // Of another pid namespace its numbers would mean other processes here.
    if std::fs::read_link("/proc/self").ok().and_then(|name| name.to_str()?.parse().ok()) != Some(me) {
        return Vec::new();
    }
    let is_listed = children == Children::Listed && Path::new(&format!("/proc/{me}/task/{me}/children")).exists();
    let mut all = if is_listed { HashMap::new() } else { by_parent() };
    let mut children_of = |pid| if is_listed { listed_children(pid) } else { all.remove(&pid).unwrap_or_default() };
    let mut todo = children_of(me);
    // Start times are counted in hundredths of a second: within one of them the lower pid is the older.
    todo.retain(|(pid, stat)| (stat.started, *pid) >= (command_started, command_pid));
    let (mut found, mut seen) = (Vec::new(), HashSet::new());
    while let Some((pid, stat)) = todo.pop() {
        if seen.insert(pid) {
            todo.extend(children_of(pid));
            if stat.state != 'Z' {
                let command = String::from_utf8_lossy(&stat.command).into_owned();
                found.push(Descendant { pid, started: stat.started, command });
            }
        }
    }
    found
}

/// How children are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Children {
    /// By the kernel's lists of them, where it has such.
    Listed,
    /// By a look at every process there is.
    All,
}

/// Every process, by its parent.
fn by_parent() -> HashMap<i32, Vec<(i32, Stat)>> {
    let mut children: HashMap<i32, Vec<(i32, Stat)>> = HashMap::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let pid = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok());
        if let Some((pid, stat)) = pid.and_then(|pid| Some((pid, Stat::of(pid)?))) {
            children.entry(stat.parent).or_default().push((pid, stat));
        }
    }
    children
}

/// The children of all threads of a process, those that it was given as orphans with them.
fn listed_children(pid: i32) -> Vec<(i32, Stat)> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let lists = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    let pids: Vec<i32> =
        lists.flat_map(|list| list.split(' ').filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>()).collect();
    pids.into_iter().filter_map(|pid| Some((pid, Stat::of(pid)?))).collect()
}

impl Descendant {
    /// Sends a signal to exactly this process: not to another that was given its pid meanwhile.
    pub fn send(&self, signal: i32) -> Result<()> {
        let process = Pidfd::open(self.pid);
        if Stat::of(self.pid).is_none_or(|stat| stat.started != self.started) {
            return Err(Errno::ESRCH);
        }
        match process.and_then(|process| process.send(signal)) {
            // An old kernel or a sandbox that has no such descriptors: by its number, which was its own just now.
            Err(Errno::ENOSYS | Errno::EPERM) => send(self.pid, signal),
            sent => sent,
        }
    }
}

/// A process by descriptor.
#[derive(Debug)]
pub struct Pidfd(OwnedFd);

impl Pidfd {
    /// Opens the process that has this pid now.
    pub fn open(pid: i32) -> Result<Self> {
        // SAFETY: pidfd_open takes two numbers and returns a new descriptor.
        let fd = Errno::result(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })?;
        let fd = i32::try_from(fd).map_err(|_| Errno::EBADF)?;
        // SAFETY: the kernel just made it for us.
        Ok(Pidfd(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Sends a signal.
    pub fn send(&self, signal: i32) -> Result<()> {
        let no_info = std::ptr::null::<libc::siginfo_t>();
        // SAFETY: a null siginfo makes the kernel fill it in as kill does.
        let sent = unsafe { libc::syscall(libc::SYS_pidfd_send_signal, self.0.as_raw_fd(), signal, no_info, 0) };
        Errno::result(sent).map(drop)
    }

    /// Its descriptor is readable when the process has ended.
    pub fn fd(&self) -> &OwnedFd {
        &self.0
    }
}

/// The words of the command line, as C hands them to `main`.
///
/// # Safety
///
/// `arguments` points to at least `count` C strings that live as long as the process.
pub unsafe fn words(count: c_int, arguments: *const *const c_char) -> Vec<OsString> {
    let count = usize::try_from(count).unwrap_or(0);
    // SAFETY: the caller's promise.
    let word = |index| unsafe { CStr::from_ptr(*arguments.add(index)) };
    (0..count).map(|index| OsString::from_vec(word(index).to_bytes().to_vec())).collect()
}

// SAFETY: this is how the C library declares it (environ(7)).
unsafe extern "C" {
    static environ: *const *const c_char;
}

/// This process's environment as it is, entries without `=` and doubled ones included.
pub fn environment() -> Vec<&'static CStr> {
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

/// The process that started this one, as far as it still lives.
pub fn parent() -> Option<(i32, Stat)> {
    let pid = nix::unistd::getppid().as_raw();
    Some((pid, Stat::of(pid)?))
}

/// Whether this environment variable is set, and to what. Not by way of the C library, which may not
/// have been started.
pub fn variable(name: &str) -> Option<OsString> {
    environment().into_iter().find_map(|entry| {
        let value = entry.to_bytes().strip_prefix(name.as_bytes())?.strip_prefix(b"=")?;
        Some(OsString::from_vec(value.to_vec()))
    })
}

/// A file's name as seen from any working directory.
pub fn absolute(file: &OsStr) -> Option<std::ffi::OsString> {
    std::path::absolute(file).ok().map(Into::into)
}

/// The base name of a command, for people; what is longer than a file's name can be is cut.
pub fn base_name(argv0: &OsStr) -> String {
    let mut name = Path::new(argv0).file_name().unwrap_or(argv0).to_string_lossy().into_owned();
    name.truncate((0..=MAX_COMMAND_BYTES).rev().find(|end| name.is_char_boundary(*end)).unwrap_or(0));
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_name_with_parentheses_and_spaces_does_not_shift_the_fields() {
        let content = b"42 (a) b (c)) S 7 42 42 0 -1 4194304 1 2 3 4 50 60 0 0 20 0 1 0 999 1 1";
        let stat = Stat::parse(content).unwrap();
        assert_eq!((stat.state, stat.parent, stat.started, stat.cpu_ticks), ('S', 7, 999, 110));
        assert_eq!(stat.command, b"a) b (c)");
    }

    #[test]
    fn our_own_start_time_is_known() {
        let me = Who::am_i();
        assert_eq!(Stat::of(i32::try_from(me.pid).unwrap()).unwrap().started, me.pid_started);
        assert!(me.pid_started > 0 && !me.boot_id.is_empty());
    }
}
