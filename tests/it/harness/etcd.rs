//! A real etcd: one member or three, on random ports of the loopback, in memory, gone with the test.
//!
//! Needs `etcd` and `etcdctl` (Debian: etcd-server, etcd-client).

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::sys::signal::Signal;

use super::run::{Finished, Run, Running};
use super::{Sandbox, eventually};

/// Members, which can be stopped, killed and started again.
pub(crate) struct Cluster {
    members: Vec<Member>,
    /// Behind the members: they are killed before their directory goes.
    sandbox: Sandbox,
    scheme: &'static str,
    extra: Vec<String>,
}

struct Member {
    name: String,
    client: String,
    peer: String,
    running: Option<Running>,
}

/// Ports that nobody listens on just now.
fn free_ports(count: usize) -> Vec<SocketAddr> {
    let listeners: Vec<_> = (0..count).map(|_| TcpListener::bind("127.0.0.1:0").expect("a port")).collect();
    listeners.iter().map(|listener| listener.local_addr().expect("an address")).collect()
}

impl Cluster {
    /// Starts `count` members and waits until they serve.
    pub(crate) fn start(count: usize) -> Cluster {
        Self::start_with(count, "http", &[])
    }

    /// The same with more of etcd's options.
    pub(crate) fn start_with(count: usize, scheme: &'static str, extra: &[String]) -> Cluster {
        let ports = free_ports(count * 2);
        let member = |at: usize| Member {
            name: format!("m{at}"),
            client: ports[at * 2].to_string(),
            peer: ports[at * 2 + 1].to_string(),
            running: None,
        };
        let members = (0..count).map(member).collect();
        let mut cluster = Cluster { members, sandbox: Sandbox::in_memory(), scheme, extra: extra.to_vec() };
        for at in 0..count {
            cluster.restart(at);
        }
        if scheme == "http" {
            for at in 0..count {
                cluster.wait_healthy(at);
            }
        }
        cluster
    }

    /// Starts a member that does not run.
    pub(crate) fn restart(&mut self, at: usize) {
        let all: Vec<_> = self.members.iter().map(|member| format!("{}=http://{}", member.name, member.peer)).collect();
        let Member { name, client, peer, .. } = &self.members[at];
        let (client, peer) = (format!("{}://{client}", self.scheme), format!("http://{peer}"));
        let running = self
            .sandbox
            .program("etcd")
            .args(["--name", name, "--data-dir", &format!("data-{name}")])
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &all.join(","), "--initial-cluster-state", "new"])
            .args(["--heartbeat-interval", "100", "--election-timeout", "1000", "--log-level", "error"])
            .args(&self.extra)
            .start();
        self.members[at].running = Some(running);
    }

    /// Waits until a member can write, which takes a majority.
    pub(crate) fn wait_healthy(&self, at: usize) {
        eventually("etcd is healthy", || {
            let answer = get(&self.members[at].client, "/health").map_err(|error| error.to_string())?;
            if answer.contains(r#""health":"true""#) { Ok(()) } else { Err(answer) }
        });
    }

    /// The member's address.
    pub(crate) fn endpoint(&self, at: usize) -> &str {
        &self.members[at].client
    }

    /// The addresses of these members.
    pub(crate) fn endpoints(&self, which: &[usize]) -> String {
        which.iter().map(|at| self.endpoint(*at)).collect::<Vec<_>>().join(",")
    }

    /// A LOCK by way of all members.
    pub(crate) fn lock(&self, key: &str) -> String {
        self.lock_by(&(0..self.members.len()).collect::<Vec<_>>(), key)
    }

    /// A LOCK by way of these members, in this order.
    pub(crate) fn lock_by(&self, which: &[usize], key: &str) -> String {
        let scheme = if self.scheme == "http" { "etcd" } else { "etcds" };
        format!("{scheme}://{}/{key}", self.endpoints(which))
    }

    pub(crate) fn signal(&self, at: usize, signal: Signal) {
        self.members[at].running.as_ref().expect("a running member").send(signal);
    }

    pub(crate) fn kill(&mut self, at: usize) {
        let running = self.members[at].running.take().expect("a running member");
        running.send(Signal::SIGKILL);
        running.wait();
    }

    /// `etcdctl` at the members of which `which` says.
    pub(crate) fn etcdctl<'s>(&self, sandbox: &'s Sandbox, which: &[usize]) -> Run<'s> {
        let endpoints: Vec<_> = which.iter().map(|at| format!("{}://{}", self.scheme, self.endpoint(*at))).collect();
        sandbox.program("etcdctl").env("ETCDCTL_API", "3").args(["--endpoints", &endpoints.join(",")])
    }

    /// `etcdctl` at all members, run to its end, which must be good.
    pub(crate) fn ctl(&self, args: &[&str]) -> Finished {
        let all: Vec<_> = (0..self.members.len()).collect();
        let finished = self.etcdctl(&self.sandbox, &all).args(args).run();
        assert_eq!(finished.code(), Some(0), "etcdctl {args:?}: {finished}");
        finished
    }

    /// The member that leads.
    pub(crate) fn leader(&self) -> usize {
        eventually("there is a leader", || {
            let mut seen = Vec::new();
            for at in 0..self.members.len() {
                let finished = self.etcdctl(&self.sandbox, &[at]).args(["endpoint", "status", "-w", "json"]).run();
                let status: serde_json::Value = serde_json::from_slice(&finished.stdout).unwrap_or_default();
                let status = &status[0]["Status"];
                if !status["leader"].is_null() && status["leader"] == status["header"]["member_id"] {
                    return Ok(at);
                }
                seen.push(status.to_string());
            }
            Err(seen)
        })
    }

    /// The keys that begin so, in order.
    pub(crate) fn keys(&self, prefix: &str) -> Vec<String> {
        let finished = self.ctl(&["get", "--prefix", "--keys-only", prefix]);
        finished.out().lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
    }

    /// How many leases there are.
    pub(crate) fn leases(&self) -> usize {
        self.ctl(&["lease", "list"]).out().lines().count() - 1
    }
}

fn get(address: &str, path: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    write!(stream, "GET {path} HTTP/1.0\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// A way to a member that can be cut: from then on nothing gets through, and nobody is told.
pub(crate) struct Proxy {
    address: SocketAddr,
    cut: Arc<AtomicBool>,
    closing: Arc<AtomicBool>,
}

impl Proxy {
    pub(crate) fn to(target: &str) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let (cut, closing) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let proxy = Proxy { address, cut: Arc::clone(&cut), closing: Arc::clone(&closing) };
        let target = target.to_owned();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                if closing.load(Ordering::SeqCst) {
                    return;
                }
                let Ok(onward) = TcpStream::connect(&target) else { continue };
                let back = (onward.try_clone().expect("a socket"), stream.try_clone().expect("a socket"));
                for (from, to) in [(stream, onward), back] {
                    let cut = Arc::clone(&cut);
                    std::thread::spawn(move || forward(from, to, &cut));
                }
            }
        });
        proxy
    }

    /// As part of a LOCK.
    pub(crate) fn address(&self) -> String {
        self.address.to_string()
    }

    /// Drops everything from now on.
    pub(crate) fn cut(&self) {
        self.cut.store(true, Ordering::SeqCst);
    }

    /// Lets new bytes through again; what was dropped stays lost.
    pub(crate) fn mend(&self) {
        self.cut.store(false, Ordering::SeqCst);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.closing.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
    }
}

fn forward(mut from: TcpStream, mut to: TcpStream, cut: &AtomicBool) {
    let mut chunk = [0; 16 * 1024];
    loop {
        match from.read(&mut chunk) {
            // An end is a message too: across a cut it does not get through either.
            Ok(0) | Err(_) => break,
            Ok(_) if cut.load(Ordering::SeqCst) => {}
            Ok(length) => {
                if to.write_all(&chunk[..length]).is_err() {
                    break;
                }
            }
        }
    }
    if !cut.load(Ordering::SeqCst) {
        let _ = to.shutdown(std::net::Shutdown::Both);
    }
}
