//! "Hosts": mounts of one directory through the passthrough file system, each served by a process of its
//! own, which can be stopped or killed like a host that hangs or loses power.
//!
//! The mounts are made in a mount namespace that only this test's thread and its children are in: when
//! the last of them is gone, however it ended, the kernel unmounts everything. Needs root and /dev/fuse.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, kill};
use nix::sys::stat::{Mode, umask};
use nix::unistd::{Pid, sethostname};
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use crate::harness::eventually;

use super::gate::{Gate, Held};
use super::passthrough::Passthrough;
use super::server_clock::{ServerClock, ns_of};

/// In this variable a host's process finds its [`Setup`].
const SETUP_VARIABLE: &str = "WITHLOCK_TEST_HOST";
/// Longer than any answer takes on a loaded machine: a test that gets none fails instead of hanging.
const PATIENCE: Duration = Duration::from_secs(30);
/// A held call occupies one thread of the server; the others go on.
const THREADS: usize = 4;

/// What kind of file server the hosts share.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Server {
    /// Whether it knows RENAME_NOREPLACE.
    pub(crate) can_refuse_to_replace: bool,
    /// Whether its time stamps have no fraction.
    pub(crate) whole_seconds: bool,
    /// By how much its clock is ahead of ours.
    pub(crate) clock_offset_ms: i64,
}

impl Default for Server {
    fn default() -> Self {
        Server { can_refuse_to_replace: true, whole_seconds: false, clock_offset_ms: 0 }
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Setup {
    server: Server,
    backing: PathBuf,
    mountpoint: PathBuf,
    control: PathBuf,
}

/// One line each, to a host's process.
#[derive(Debug, Serialize, Deserialize)]
enum Order {
    Arm { operation: String, name: String },
    OpenGate,
    StepClock { from_ns: i64, offset_ns: i64 },
}

/// One line each, from it.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Word {
    Mounted,
    Done,
    Reached(String),
}

/// Two hosts that share a directory, and not their locks.
pub(crate) struct TwoHosts {
    /// The first host.
    pub(crate) a: Host,
    /// The second host.
    pub(crate) b: Host,
    backing: TempDir,
}

impl TwoHosts {
    /// A directory on the temporary directory's file system, mounted twice.
    pub(crate) fn new(server: Server) -> Self {
        unshare(CloneFlags::CLONE_NEWNS).expect("a mount namespace of our own (needs root)");
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>).unwrap();
        let backing = TempDir::with_prefix("withlock-backing-").unwrap();
        let (a, b) = (Host::mount("host-a", server, backing.path()), Host::mount("host-b", server, backing.path()));
        TwoHosts { a, b, backing }
    }

    /// The directory as the server itself has it, with the kernel's locks seen by all.
    pub(crate) fn backing(&self) -> &Path {
        self.backing.path()
    }

    /// Steps the server's clock, for both hosts at the same instant.
    pub(crate) fn step_clock(&mut self, offset: i64) {
        // Far enough ahead that both know of it before it happens.
        let from = SystemTime::now() + Duration::from_millis(200);
        let from_ns = i64::try_from(ns_of(from)).unwrap();
        for host in [&mut self.a, &mut self.b] {
            host.order(&Order::StepClock { from_ns, offset_ns: offset * 1_000_000 });
        }
        // File systems stamp by a clock that is a few milliseconds behind.
        while SystemTime::now() <= from + Duration::from_millis(50) {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// One mount, and the process that serves it.
pub(crate) struct Host {
    name: &'static str,
    directory: TempDir,
    process: Child,
    control: BufReader<UnixStream>,
}

impl Host {
    fn mount(name: &'static str, server: Server, backing: &Path) -> Self {
        let directory = TempDir::with_prefix("withlock-host-").unwrap();
        let mountpoint = directory.path().join("mnt");
        let control = directory.path().join("control");
        std::fs::create_dir(&mountpoint).unwrap();
        let listener = UnixListener::bind(&control).unwrap();
        let setup = Setup { server, backing: backing.to_owned(), mountpoint, control };
        let process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture", "--test-threads=1", SERVING_TEST])
            .env(SETUP_VARIABLE, serde_json::to_string(&setup).unwrap())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        std::fs::write(directory.path().join("boot_id"), format!("{name}-booted-only-once-by-this-test\n")).unwrap();
        let mut host = Host { name, directory, process, control: BufReader::new(stream) };
        assert_eq!(host.hear(), Word::Mounted);
        host
    }

    /// Does `work` in a thread that is on this host: it and what it starts see the host's name and boot
    /// id, by which the program tells hosts apart.
    pub(crate) fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let worker = scope.spawn(|| {
                unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWUTS).unwrap();
                sethostname(self.name).unwrap();
                let boot_id = self.directory.path().join("boot_id");
                let bind = MsFlags::MS_BIND;
                mount(Some(&boot_id), "/proc/sys/kernel/random/boot_id", None::<&str>, bind, None::<&str>).unwrap();
                work()
            });
            worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// A path in the shared directory, as this host sees it.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join("mnt").join(name)
    }

    /// Holds the next `operation` on `name` that a process of this host asks for, until
    /// [`Host::open_gate`]. One that is held already goes on, to be held there.
    pub(crate) fn hold_next(&mut self, operation: &str, name: &str) {
        self.order(&Order::Arm { operation: operation.into(), name: name.into() });
    }

    /// Waits until the held operation has been asked for.
    pub(crate) fn wait_until_held(&mut self) {
        let word = self.hear();
        assert!(matches!(word, Word::Reached(_)), "{word:?}");
    }

    /// Lets the held operation go on.
    pub(crate) fn open_gate(&mut self) {
        self.order(&Order::OpenGate);
    }

    /// The host loses its power.
    pub(crate) fn kill(&mut self) {
        kill(self.pid(), Signal::SIGKILL).unwrap();
        self.process.wait().unwrap();
    }

    /// The host hangs: every access to the shared directory waits. None that its server has begun to answer:
    /// the kernel would keep even a process that has ended until that is done.
    pub(crate) fn stop(&self) {
        eventually("the server is stopped between two requests", || {
            kill(self.pid(), Signal::SIGSTOP).unwrap();
            wait_until_stopped(self.pid());
            let waiting = self.waiting_for_an_answer();
            if waiting.is_empty() {
                return Ok(());
            }
            kill(self.pid(), Signal::SIGCONT).unwrap();
            Err(waiting)
        });
    }

    /// Processes that were started with a path below the mount, and are in a call on it.
    fn waiting_for_an_answer(&self) -> Vec<String> {
        let mount = self.directory.path().as_os_str().as_encoded_bytes();
        let mut waiting = Vec::new();
        for process in std::fs::read_dir("/proc").unwrap().flatten() {
            let command = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
            if !command.windows(mount.len()).any(|window| window == mount) {
                continue;
            }
            for task in std::fs::read_dir(process.path().join("task")).into_iter().flatten().flatten() {
                let at = std::fs::read_to_string(task.path().join("wchan")).unwrap_or_default();
                if at.contains("request_wait_answer") {
                    waiting.push(format!("{}", task.path().display()));
                }
            }
        }
        waiting
    }

    /// It goes on.
    pub(crate) fn go_on(&self) {
        kill(self.pid(), Signal::SIGCONT).unwrap();
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.process.id()).unwrap())
    }

    fn order(&mut self, order: &Order) {
        say(self.control.get_ref(), order).unwrap();
        assert_eq!(self.hear(), Word::Done);
    }

    fn hear(&mut self) -> Word {
        let mut line = String::new();
        self.control.read_line(&mut line).expect("an answer from the host's process");
        serde_json::from_str(&line).unwrap_or_else(|_| panic!("the host's process said {line:?}"))
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = umount2(&self.path(""), MntFlags::MNT_DETACH);
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Waits until all threads of a process that was sent SIGSTOP have stopped, or ended: kill(2) does not.
pub(crate) fn wait_until_stopped(pid: Pid) {
    let state = |task: std::fs::DirEntry| {
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next())
    };
    eventually("all threads have stopped", || {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).map_err(|error| error.to_string())?;
        let states: Vec<_> = tasks.filter_map(|task| state(task.ok()?)).collect();
        if states.iter().all(|state| matches!(state, 'T' | 'Z')) { Ok(()) } else { Err(format!("{states:?}")) }
    });
}

fn say(mut stream: &UnixStream, what: &impl Serialize) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(what)?;
    line.push(b'\n');
    stream.write_all(&line)
}

/// Serves one mount, until the test that wanted it is gone.
fn serve(setup: &Setup) {
    // The death of the test's thread, whatever it dies of, is the death of its hosts.
    nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).unwrap();
    umask(Mode::empty());
    let control = UnixStream::connect(&setup.control).unwrap();
    let voice = Arc::new(Mutex::new(control.try_clone().unwrap()));
    let clock = Arc::new(RwLock::new(ServerClock::new(setup.server.whole_seconds, setup.server.clock_offset_ms)));
    let gate = Arc::new(Gate::default());
    let answer = {
        let voice = Arc::clone(&voice);
        move |word: &Word| say(&voice.lock().unwrap_or_else(PoisonError::into_inner), word).unwrap()
    };
    let reached = {
        let answer = answer.clone();
        Box::new(move |operation: &str| answer(&Word::Reached(operation.into())))
    };

    let root = File::open(&setup.backing).unwrap();
    let passthrough =
        Passthrough::new(&root, setup.server.can_refuse_to_replace, Arc::clone(&clock), Arc::clone(&gate), reached);
    let mut options = fuser::Config::default();
    options.mount_options =
        vec![fuser::MountOption::FSName("two-hosts".into()), fuser::MountOption::DefaultPermissions];
    options.acl = fuser::SessionACL::All;
    options.n_threads = Some(THREADS);
    let _session = fuser::spawn_mount(passthrough.unwrap(), &setup.mountpoint, &options).expect("a FUSE mount");
    answer(&Word::Mounted);

    for line in BufReader::new(control).lines() {
        match serde_json::from_str(&line.unwrap()).unwrap() {
            Order::Arm { operation, name } => gate.arm(Held { operation, name }),
            Order::OpenGate => gate.open(),
            Order::StepClock { from_ns, offset_ns } => {
                let mut clock = clock.write().unwrap_or_else(PoisonError::into_inner);
                clock.step(i128::from(from_ns), i128::from(offset_ns));
            }
        }
        answer(&Word::Done);
    }
}

/// The name of the test below, which is also what a host's process runs.
const SERVING_TEST: &str = "two_hosts::host::a_host_is_served_by_a_process_of_its_own_and_leaves_nothing_mounted";

#[test]
fn a_host_is_served_by_a_process_of_its_own_and_leaves_nothing_mounted() {
    if let Ok(setup) = std::env::var(SETUP_VARIABLE) {
        return serve(&serde_json::from_str(&setup).unwrap());
    }
    let mounts = || std::fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
    let hosts = TwoHosts::new(Server::default());
    let kept = [hosts.a.path(""), hosts.b.path("")].map(|path| path.to_str().unwrap().trim_end_matches('/').to_owned());
    std::fs::write(hosts.a.path("seen"), "by both").unwrap();
    assert_eq!(std::fs::read_to_string(hosts.b.path("seen")).unwrap(), "by both");
    assert_eq!(std::fs::read_to_string(hosts.backing().join("seen")).unwrap(), "by both");
    assert!(kept.iter().all(|path| mounts().contains(path)));

    // Each has a name and a boot of its own.
    let identity = || {
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
        (nix::unistd::gethostname().unwrap(), boot_id)
    };
    let (ours, on_a, on_b) = (identity(), hosts.a.run(identity), hosts.b.run(identity));
    assert!(on_a.0 == "host-a" && on_b.0 == "host-b" && on_a.1 != on_b.1 && on_a.1 != ours.1);
    assert_eq!(identity(), ours);

    drop(hosts);
    assert!(!kept.iter().any(|path| mounts().contains(path)));
    assert!(!kept.iter().any(|path| Path::new(path).exists()));
}
