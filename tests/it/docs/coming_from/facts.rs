//! What is measured of each side of a row: it is run by `sh` as it stands, in a directory of its own, where
//! `LOCK` is a name and `COMMAND` and `TEXT` are programs.

use std::fmt;
use std::time::{Duration, SystemTime};

use nix::sys::signal::Signal;

use crate::harness::{Run, Running, Sandbox, descendants, eventually, process, send_to_group, set_mtime};

/// What becomes of a second one while the lock is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Busy {
    /// It ends with this status, and COMMAND is not run.
    Exits(u8),
    /// It sleeps until it is its turn.
    Waits,
}

impl fmt::Display for Busy {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Busy::Exits(code) => write!(out, "{code}"),
            Busy::Waits => write!(out, "waited for"),
        }
    }
}

/// How the next one fares after holder and COMMAND were killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AfterKill {
    /// It gets in.
    Free,
    /// Not until the lock is older than its ttl.
    Stale,
    /// Not in a year.
    Stuck,
}

/// What COMMAND exits with where its status is looked at.
pub(super) const STATUS: u8 = 7;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Facts {
    /// The exit status where COMMAND's is 7.
    pub(super) status: u8,
    pub(super) busy: Busy,
    /// LOCK is there when nobody holds it.
    pub(super) leaves_file: bool,
    /// Measured where a side tries once.
    pub(super) after_kill: Option<AfterKill>,
}

/// A directory in which one tool is tried.
pub(super) struct Scene {
    pub(super) sandbox: Sandbox,
    tool: &'static str,
}

impl Scene {
    pub(super) fn new(tool: &str) -> Self {
        let tools = ["flock", "dotlockfile", "lockfile", "setlock", "chpst", "lckdo", "withlock", "etcdctl"];
        let tool = tools.into_iter().find(|known| *known == tool).expect("a known tool");
        let sandbox = Sandbox::new();
        let bin = sandbox.io_path("bin");
        std::fs::create_dir(&bin).expect("a directory");
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_withlock"), bin.join("withlock")).expect("a link");
        for name in ["COMMAND", "TEXT"] {
            std::fs::write(bin.join(name), "#!/bin/sh\nexec /bin/sh -c \"$ROLE\"\n").expect("a script");
            sandbox.chmod(bin.join(name), 0o755);
        }
        std::fs::rename(bin, sandbox.io_path("bin").with_file_name("bin")).expect("a place");
        Scene { sandbox, tool }
    }

    /// One side of a row; COMMAND does what `role` says.
    pub(super) fn side(&self, text: &str, role: &str) -> Run<'_> {
        let bin = self.sandbox.io_path("bin").with_file_name("bin");
        let path = format!("{}:/usr/bin:/bin", bin.display());
        self.sandbox.sh(text).env("PATH", path).env("ROLE", role).own_group()
    }

    /// Waits until the tool itself, started below `running`, sleeps.
    pub(super) fn wait_asleep(&self, running: &Running) {
        eventually(&format!("{} sleeps", self.tool), || {
            let all: Vec<_> = process(running.pid()).into_iter().chain(descendants(running.pid())).collect();
            let sleeps = all.iter().any(|process| process.name == self.tool && process.state == 'S');
            if sleeps { Ok(()) } else { Err((all, running.stderr_so_far())) }
        });
    }

    /// Runs one side of a row, and kills the tool and COMMAND while it holds the lock.
    pub(super) fn kill_a_holder(&self, text: &str) {
        let mut gate = self.sandbox.gate();
        let killed = self.side(text, &gate.script()).start();
        gate.wait_inside();
        send_to_group(killed.pid(), Signal::SIGKILL);
        killed.wait();
        self.sandbox.wait_until_nothing_runs();
    }

    fn has(&self, name: &str) -> bool {
        self.sandbox.path(name).exists()
    }

    /// Runs one side of a row, and asserts that all is as `facts` says.
    pub(super) fn check(&self, text: &str, facts: Facts) {
        let lock = self.sandbox.path("LOCK");
        self.side(text, "exit 7").run().exited(facts.status);
        assert_eq!(lock.exists(), facts.leaves_file, "{text}: LOCK afterwards");

        let mut gate = self.sandbox.gate();
        let holder = self.side(text, &gate.script()).start();
        gate.wait_inside();
        let second = self.side(text, "touch ran; exit 7").start();
        match facts.busy {
            Busy::Exits(code) => {
                second.wait().exited(code);
                assert!(!self.has("ran"), "{text}: COMMAND was run");
                gate.open();
            }
            Busy::Waits => {
                self.wait_asleep(&second);
                assert!(!self.has("ran"), "{text}: COMMAND was run");
                gate.open();
                second.wait().exited(facts.status);
                assert!(self.has("ran"), "{text}: COMMAND was not run");
            }
        }
        holder.wait().exited(if facts.status == STATUS { 0 } else { facts.status });

        if let Some(expected) = facts.after_kill {
            let Busy::Exits(busy) = facts.busy else { panic!("{text} does not try once") };
            self.kill_a_holder(text);
            let next = || self.side(text, "exit 7").run();
            match expected {
                AfterKill::Free => {
                    next().exited(facts.status);
                }
                AfterKill::Stale => {
                    next().exited(busy);
                    set_mtime(&lock, ago(Duration::from_secs(61)));
                    next().exited(facts.status);
                }
                AfterKill::Stuck => {
                    next().exited(busy);
                    set_mtime(&lock, ago(Duration::from_secs(365 * 86_400)));
                    next().exited(busy);
                }
            }
        }
    }
}

pub(super) fn ago(time: Duration) -> SystemTime {
    SystemTime::now() - time
}

/// One side of a row whose lock is in etcd: whoever comes second waits.
#[cfg(feature = "etcd")]
pub(super) fn check_in_etcd(tool: &str, text: &str, status: u8, cluster: &crate::harness::Cluster) {
    let scene = Scene::new(tool);
    let text = text.replace("HOST", cluster.endpoint(0));
    let side =
        |role: &str| scene.side(&text, role).env("ETCDCTL_API", "3").env("ETCDCTL_ENDPOINTS", cluster.endpoint(0));
    side("exit 7").run().exited(status);
    let mut gate = scene.sandbox.gate();
    let holder = side(&gate.script()).start();
    gate.wait_inside();
    let second = side("touch ran; exit 7").start();
    scene.wait_asleep(&second);
    assert!(!scene.has("ran"), "{text}: COMMAND was run");
    gate.open();
    holder.wait().exited(0);
    second.wait().exited(status);
    assert!(scene.has("ran"), "{text}: COMMAND was not run");
}
