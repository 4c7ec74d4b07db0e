//! Two hosts and one lock, and the program on either of them.

use std::path::PathBuf;

use nix::sys::signal::Signal;
use nix::unistd::Pid;

use crate::harness::{Run, Running, Sandbox, descendants, eventually, mtime, send_to_group, with_record};

use super::host::{Host, Server, TwoHosts, wait_until_stopped};

/// Exit code of a command that found another one inside.
pub(crate) const TWO_INSIDE: u8 = 99;

/// On which host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum On {
    A,
    B,
}

/// Two hosts, a lock in the directory that they share, and what is started on them.
pub(crate) struct Scene {
    /// What is started; ended with the scene. Before the hosts, so that nothing uses their mounts when
    /// these go.
    pub(crate) sandbox: Sandbox,
    /// The hosts.
    pub(crate) hosts: TwoHosts,
}

impl Scene {
    pub(crate) fn new(server: Server) -> Self {
        let scene = Scene { sandbox: Sandbox::new(), hosts: TwoHosts::new(server) };
        std::fs::write(scene.sandbox.path("inside"), "").expect("a file");
        scene
    }

    pub(crate) fn host(&mut self, on: On) -> &mut Host {
        match on {
            On::A => &mut self.hosts.a,
            On::B => &mut self.hosts.b,
        }
    }

    /// The lock as a host sees it.
    pub(crate) fn lock(&self, on: On) -> PathBuf {
        match on {
            On::A => self.hosts.a.path("a.lock"),
            On::B => self.hosts.b.path("a.lock"),
        }
    }

    /// The lock as the server has it: looking at it there disturbs nobody.
    pub(crate) fn truth(&self) -> PathBuf {
        self.hosts.backing().join("a.lock")
    }

    /// Starts the program (a test build) on a host, the leader of its own process group.
    pub(crate) fn start<'s>(&'s self, on: On, arguments: impl FnOnce(Run<'s>) -> Run<'s> + Send) -> Running {
        let host = if on == On::A { &self.hosts.a } else { &self.hosts.b };
        host.run(|| arguments(self.sandbox.withlock().own_group()).start())
    }

    /// Shell text: whoever runs it is inside from here to its end. Another one who is inside is noticed
    /// by a flock(2) on a file that is not shared through the hosts, so that all processes here see it,
    /// and that the kernel drops with its owner.
    pub(crate) fn alone(&self) -> String {
        format!("exec 8<{}; flock -n 8 || exit {TWO_INSIDE}", self.sandbox.path("inside").display())
    }

    /// The name of the place where the present epoch can be ended.
    pub(crate) fn slot_name(&self) -> String {
        let record = with_record(&self.truth());
        let name = withlock::record::SlotName::of(&record).file_name("a.lock".as_ref());
        name.into_string().expect("plain text")
    }

    /// Makes a holder renew, and waits until it is seen.
    pub(crate) fn wait_for_renewal(&self, holder: &Running) {
        let before = mtime(&self.truth());
        holder.send(Signal::SIGCONT);
        eventually("a renewal", || {
            let now = mtime(&self.truth());
            if now > before { Ok(()) } else { Err(now) }
        });
    }

    /// The lock, with all that a change would show but the time of its renewal.
    pub(crate) fn epoch(&self) -> (Option<u64>, String) {
        let truth = self.truth();
        (crate::harness::inode(&truth), with_record(&truth).nonce.to_string())
    }
}

/// Stops a wrapper and its command.
pub(crate) fn stop(running: &Running) {
    send_to_group(running.pid(), Signal::SIGSTOP);
    for pid in descendants(running.pid()).iter().map(|process| process.pid).chain([running.pid()]) {
        wait_until_stopped(Pid::from_raw(pid));
    }
}

/// Lets them go on.
pub(crate) fn go_on(running: &Running) {
    send_to_group(running.pid(), Signal::SIGCONT);
}
