//! Who has the guard of a file, as /proc shows it. Nothing is locked to find out: a look must not turn
//! away a holder, an ender or a waiter, not even for an instant.

use std::io::Read;
use std::path::Path;

use nix::sys::stat::{major, minor};
use nix::unistd::{SysconfVar, sysconf};

use super::clock::{boot_ms, wall};
use super::file::Identity;
use super::process::Stat;

/// A process, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Running {
    /// Its pid, in our own namespace.
    pub pid: i32,
    /// State letter: R, S, D, T, Z and so on.
    pub state: char,
    /// Its effective user, where it can be seen.
    pub uid: Option<u32>,
    /// The command's name, at most 15 bytes; never its arguments, which carry secrets.
    pub command: String,
    /// When it was started, in milliseconds since 1970.
    pub started_at_ms: i64,
    /// User and system CPU time, in milliseconds.
    pub cpu_ms: u64,
}

impl Running {
    /// The process that has this pid now.
    pub fn of(pid: i32) -> Option<Self> {
        Stat::of(pid).map(|stat| Running::new(pid, stat))
    }

    /// The process that has this pid and was started at exactly this tick since boot: a pid alone is
    /// used again.
    pub fn started_at(pid: u32, started_ticks: u64) -> Option<Self> {
        let pid = i32::try_from(pid).ok()?;
        Stat::of(pid).filter(|stat| stat.started == started_ticks).map(|stat| Running::new(pid, stat))
    }

    fn new(pid: i32, stat: Stat) -> Self {
        let ran_ms = boot_ms().saturating_sub(ticks_ms(stat.started));
        Running {
            pid,
            state: stat.state,
            uid: effective_uid(pid),
            command: String::from_utf8_lossy(&stat.command).into_owned(),
            started_at_ms: wall().ms().saturating_sub(i64::try_from(ran_ms).unwrap_or(i64::MAX)),
            cpu_ms: ticks_ms(stat.cpu_ticks),
        }
    }
}

fn ticks_ms(ticks: u64) -> u64 {
    let per_second = sysconf(SysconfVar::CLK_TCK).ok().flatten().and_then(|n| u64::try_from(n).ok()).unwrap_or(100);
    ticks.saturating_mul(1000) / per_second.max(1)
}

fn effective_uid(pid: i32) -> Option<u32> {
    let status = std::fs::read(format!("/proc/{pid}/status")).ok()?;
    let line = status.split(|b| *b == b'\n').find_map(|line| line.strip_prefix(b"Uid:"))?;
    std::str::from_utf8(line).ok()?.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// A file whose guard is asked for.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Which file.
    pub identity: Identity,
    /// Only this host's processes can have its guard.
    pub local: bool,
    /// The kernel's table of locks names the file by the same device number as lstat does.
    pub plain_device: bool,
}

/// Who has a file's guard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Guarded {
    /// Nobody.
    Free,
    /// Somebody.
    Held {
        /// The processes seen to have it.
        processes: Vec<Running>,
        /// There may be more, of other users or in other namespaces.
        perhaps_more: bool,
        /// The process that took it, which may have left it to others since.
        taken_by_pid: Option<i32>,
    },
    /// It cannot be seen from here.
    Unknown,
}

/// One flock(2) lock, as the kernel writes it in /proc/locks and in /proc/PID/fdinfo.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Flock {
    taken_by_pid: i32,
    device: (u64, u64),
    ino: u64,
}

impl Flock {
    /// Parses `1: FLOCK  ADVISORY  WRITE 748 fe:00:10070419 0 EOF`. Shared locks keep an ender out as
    /// well. One that is still waited for has an arrow, and is none.
    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.split_ascii_whitespace().skip(1);
        if fields.next()? != "FLOCK" {
            return None;
        }
        let mut fields = fields.skip(2);
        let taken_by_pid = fields.next()?.parse().ok()?;
        let mut file = fields.next()?.split(':');
        let major = u64::from_str_radix(file.next()?, 16).ok()?;
        let minor = u64::from_str_radix(file.next()?, 16).ok()?;
        Some(Flock { taken_by_pid, device: (major, minor), ino: file.next()?.parse().ok()? })
    }

    fn is_of(&self, identity: Identity) -> bool {
        self.ino == identity.ino && self.device == (major(identity.dev), minor(identity.dev))
    }
}

/// Who has the guards of these files, in their order.
pub fn who_has(targets: &[Target]) -> Vec<Guarded> {
    if targets.is_empty() {
        return Vec::new();
    }
    let table = Table::read().unwrap_or_default();
    let locks: Vec<Flock> = table.text.lines().filter_map(Flock::parse).collect();
    let sees_all_namespaces = sees_all_namespaces();
    // In the first namespace the table shows every lock of this host, whoever has it.
    let table_is_whole = table.is_whole && sees_all_namespaces;
    let listed = |target: &Target| locks.iter().find(|lock| target.plain_device && lock.is_of(target.identity));
    let told_free = |target: &Target| target.local && target.plain_device && table_is_whole && listed(target).is_none();
    let wanted: Vec<Target> = targets.iter().filter(|target| !told_free(target)).copied().collect();
    let scan = if wanted.is_empty() { Scan::default() } else { Scan::all(&wanted) };
    let sees_all = sees_all_namespaces && !scan.was_refused;
    targets
        .iter()
        .map(|target| {
            let processes = scan.of(target.identity);
            let taken_by_pid = listed(target).map(|lock| lock.taken_by_pid).filter(|pid| *pid > 0);
            if told_free(target) {
                Guarded::Free
            } else if !processes.is_empty() || listed(target).is_some() {
                Guarded::Held { processes, perhaps_more: !sees_all || !target.local, taken_by_pid }
            } else if target.local && sees_all {
                Guarded::Free
            } else {
                // Also where the table names it and no process does: it changed hands between the looks.
                Guarded::Unknown
            }
        })
        .collect()
}

/// What the kernel writes of its locks.
#[derive(Default, Debug, PartialEq, Eq)]
struct Table {
    text: String,
    /// What it does not tell of is not there. The kernel hands it out a page at a time and counts lines in between:
    /// where locks go meanwhile, others are passed over.
    is_whole: bool,
}

impl Table {
    fn read() -> std::io::Result<Self> {
        Table::by(&mut || {
            const MORE_THAN_A_PAGE: usize = 64 * 1024;
            let mut file = std::fs::File::open("/proc/locks")?;
            let (mut text, mut chunk) = (Vec::new(), vec![0; MORE_THAN_A_PAGE]);
            loop {
                let read = file.read(&mut chunk)?;
                if read == 0 {
                    return Ok(String::from_utf8_lossy(&text).into_owned());
                }
                text.extend_from_slice(&chunk[..read]);
            }
        })
    }

    /// From as many looks as it takes: one where it fits a page, else until some in a row say the same.
    fn by(look: &mut dyn FnMut() -> std::io::Result<String>) -> std::io::Result<Self> {
        // Room for another line would have been used, had there been one.
        const SURELY_NOT_CUT_BYTES: usize = 4096 - 256;
        const LOOKS: usize = 12;
        const ALIKE: usize = 4;
        let mut text = look()?;
        let (mut looks, mut alike) = (1, 1);
        while text.len() > SURELY_NOT_CUT_BYTES && alike < ALIKE && looks < LOOKS {
            let again = look()?;
            (looks, alike) = (looks + 1, if again == text { alike + 1 } else { 1 });
            text = again;
        }
        let is_whole = text.len() <= SURELY_NOT_CUT_BYTES || alike == ALIKE;
        Ok(Table { text, is_whole })
    }
}

/// Whether this is the first pid namespace, from which every process of the host is seen. The kernel
/// gives it this fixed number.
fn sees_all_namespaces() -> bool {
    std::fs::read_link("/proc/self/ns/pid").is_ok_and(|name| name == Path::new("pid:[4026531836]"))
}

/// Every descriptor with a flock on one of some files, of all processes that we may look into.
#[derive(Default)]
struct Scan {
    found: Vec<(Identity, Running)>,
    /// The descriptors of some process were kept from us.
    was_refused: bool,
}

impl Scan {
    fn all(targets: &[Target]) -> Self {
        let mut scan = Scan::default();
        for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
            if let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) {
                scan.process(pid, targets);
            }
        }
        scan.found.sort_by_key(|(_, process)| (process.started_at_ms, process.pid));
        scan
    }

    fn process(&mut self, pid: i32, targets: &[Target]) {
        let descriptors = match std::fs::read_dir(format!("/proc/{pid}/fdinfo")) {
            Ok(descriptors) => descriptors,
            Err(error) => {
                // A process that has ended meanwhile has no descriptors.
                self.was_refused |= error.kind() == std::io::ErrorKind::PermissionDenied;
                return;
            }
        };
        for descriptor in descriptors.flatten() {
            // What the kernel writes here it knows by heart. The file itself is not asked: on a server
            // that is gone that would never return.
            let text = match std::fs::read_to_string(descriptor.path()) {
                Ok(text) => text,
                Err(error) => {
                    self.was_refused |= error.kind() == std::io::ErrorKind::PermissionDenied;
                    continue;
                }
            };
            for lock in text.lines().filter_map(|line| Flock::parse(line.strip_prefix("lock:")?)) {
                let is_ours = |target: &&Target| {
                    if target.plain_device {
                        lock.is_of(target.identity)
                    } else {
                        let number = descriptor.file_name();
                        is_open_at(&Path::new("/proc").join(pid.to_string()).join("fd").join(number), target.identity)
                    }
                };
                let Some(target) = targets.iter().find(is_ours) else { continue };
                let known = self.found.iter().any(|(found, by)| *found == target.identity && by.pid == pid);
                if !known {
                    self.found.extend(Running::of(pid).map(|process| (target.identity, process)));
                }
            }
        }
    }

    fn of(&self, identity: Identity) -> Vec<Running> {
        self.found.iter().filter(|(found, _)| *found == identity).map(|(_, process)| process.clone()).collect()
    }
}

fn is_open_at(descriptor: &Path, identity: Identity) -> bool {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(descriptor).is_ok_and(|found| Identity { dev: found.dev(), ino: found.ino() } == identity)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_of_locks_that_is_handed_out_in_pieces_is_whole_only_if_it_stays_the_same() {
        let page = "1: FLOCK  ADVISORY  WRITE 748 fe:00:10070419 0 EOF\n".repeat(100);
        let looks = |texts: &[&str]| {
            let mut texts: Vec<String> = texts.iter().rev().map(|&text| text.to_owned()).collect();
            let mut look =
                || Ok(if texts.len() > 1 { texts.pop() } else { texts.first().cloned() }.unwrap_or_default());
            Table::by(&mut look).expect("a table")
        };
        let (more, less) = (format!("{page}2: last\n"), page.clone());
        // What fits a page is had at once.
        assert_eq!(looks(&["1: one\n", "another"]), Table { text: "1: one\n".into(), is_whole: true });
        // A line that was passed over is there the next time.
        assert_eq!(looks(&[&less, &more]), Table { text: more.clone(), is_whole: true });
        // Whatever is said twice is not believed yet.
        let changing = [&*less, &*less, &*more, &*more].repeat(4);
        assert!(!looks(&changing).is_whole);
    }

    #[test]
    fn a_line_of_the_lock_table_is_read_and_one_that_is_waited_for_is_none() {
        let read = Flock::parse("1: FLOCK  ADVISORY  WRITE 748 fe:0a:10070419 0 EOF");
        assert_eq!(read, Some(Flock { taken_by_pid: 748, device: (0xfe, 0x0a), ino: 10_070_419 }));
        assert!(Flock::parse("2: FLOCK  ADVISORY  READ -1 00:1f:7 0 EOF").is_some_and(|lock| lock.taken_by_pid == -1));
        for other in ["1: -> FLOCK  ADVISORY  WRITE 748 fe:00:1 0 EOF", "3: POSIX  ADVISORY  WRITE 1 fe:00:1 0 9", ""] {
            assert_eq!(Flock::parse(other), None, "{other}");
        }
    }

    #[test]
    fn this_process_is_seen_with_its_start_and_no_other_start() {
        let me = i32::try_from(std::process::id()).unwrap();
        let stat = Stat::of(me).unwrap();
        let seen = Running::started_at(std::process::id(), stat.started).unwrap();
        assert_eq!(seen.uid, Some(super::super::process::effective_uid()));
        assert!((wall().ms() - seen.started_at_ms) < 3_600_000 && wall().ms() >= seen.started_at_ms - 20);
        assert_eq!(Running::started_at(std::process::id(), stat.started + 1), None);
    }
}
