//! Real work: sixteen copies of a shell script that refreshes a token which may be used only once.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use crate::harness::{Run, Sandbox, eventually};

/// How many copies start at once.
const COPIES: usize = 16;
/// How long an access token is good.
const LIFE_S: u64 = 1;

/// A token endpoint as real providers run it: each refresh token is good once; when one comes a second
/// time, somebody has stolen it as far as the provider can know, and the whole family is revoked.
struct Endpoint {
    address: SocketAddr,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

struct Shared {
    books: Mutex<Books>,
    arrived: Condvar,
    closing: AtomicBool,
    /// The answer to a refresh is held back until two with the same token have come, at most so long.
    hold: Duration,
    /// How long a new access token is good, in seconds.
    life_s: u64,
}

#[derive(Default)]
struct Books {
    /// The one refresh token that is good now.
    current: String,
    used: HashSet<String>,
    requests_with: HashMap<String, usize>,
    issued: Vec<String>,
    expires_at_s: u64,
    refreshes: usize,
    /// Refreshes of an access token that was still good.
    needless: usize,
    revocations: usize,
    revoked: bool,
}

fn unix_seconds() -> u64 {
    SystemTime::UNIX_EPOCH.elapsed().expect("after 1970").as_secs()
}

impl Endpoint {
    fn start(hold: Duration) -> Endpoint {
        Self::with_life(LIFE_S, hold)
    }

    fn with_life(life_s: u64, hold: Duration) -> Endpoint {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let books = Books { current: "refresh-0".into(), expires_at_s: unix_seconds(), ..Books::default() };
        let shared = Arc::new(Shared {
            books: Mutex::new(books),
            arrived: Condvar::new(),
            closing: AtomicBool::new(false),
            hold,
            life_s,
        });
        let for_thread = Arc::clone(&shared);
        let acceptor = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if for_thread.closing.load(Ordering::SeqCst) {
                    return;
                }
                let for_connection = Arc::clone(&for_thread);
                std::thread::spawn(move || stream.map(|stream| for_connection.serve(stream)));
            }
        });
        Endpoint { address, shared, acceptor: Some(acceptor) }
    }

    fn url(&self) -> String {
        format!("http://{}/token", self.address)
    }

    fn books(&self) -> std::sync::MutexGuard<'_, Books> {
        self.shared.books.lock().expect("the books")
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
        let _ = self.acceptor.take().map(JoinHandle::join);
    }
}

impl Shared {
    /// One HTTP/1.1 request and its answer.
    fn serve(&self, stream: TcpStream) -> Option<()> {
        let mut reader = BufReader::new(stream.try_clone().ok()?);
        let (mut line, mut length) = (String::new(), 0);
        while reader.read_line(&mut line).ok()? > 0 && line != "\r\n" {
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().ok()?;
            }
            line.clear();
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).ok()?;
        let body = String::from_utf8(body).ok()?;
        let token = body.split('&').find_map(|pair| pair.strip_prefix("refresh_token="))?;
        let (status, answer) = self.refresh(token);
        let head = format!("HTTP/1.1 {status}\r\nContent-Type: application/json\r\nConnection: close\r\n");
        write!(&stream, "{head}Content-Length: {}\r\n\r\n{answer}", answer.len()).ok()
    }

    fn refresh(&self, token: &str) -> (&'static str, String) {
        const REFUSED: &str = "400 Bad Request";
        let invalid = || (REFUSED, r#"{"error": "invalid_grant"}"#.to_owned());
        let mut books = self.books.lock().expect("the books");
        *books.requests_with.entry(token.to_owned()).or_default() += 1;
        self.arrived.notify_all();
        if books.revoked {
            return invalid();
        }
        if books.used.contains(token) {
            books.revoked = true;
            books.revocations += 1;
            return invalid();
        }
        if books.current != token {
            return invalid();
        }
        if unix_seconds() < books.expires_at_s {
            books.needless += 1;
        }
        books.used.insert(token.to_owned());
        books.refreshes += 1;
        let (access, refresh) = (format!("access-{}", books.refreshes), format!("refresh-{}", books.refreshes));
        books.current.clone_from(&refresh);
        books.issued.push(access.clone());
        books.expires_at_s = unix_seconds() + self.life_s;
        // What a slow network does: the credentials on disk are still the old ones while others read them.
        let until = Instant::now() + self.hold;
        while books.requests_with[token] < 2 {
            let Some(left) = until.checked_duration_since(Instant::now()) else { break };
            books = self.arrived.wait_timeout(books, left).expect("the books").0;
        }
        let life_s = self.life_s;
        let answer = format!(r#"{{"access_token": "{access}", "refresh_token": "{refresh}", "expires_in": {life_s}}}"#);
        ("200 OK", answer)
    }
}

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/token-refresh.sh");

/// Credentials that are due for a refresh.
fn login(sandbox: &Sandbox) {
    let due =
        format!(r#"{{"access_token": "access-0", "refresh_token": "refresh-0", "expires_at": {}}}"#, unix_seconds());
    std::fs::write(sandbox.path("credentials"), due + "\n").expect("credentials");
}

fn expiry_on_disk(sandbox: &Sandbox) -> u64 {
    let credentials: serde_json::Value =
        serde_json::from_slice(&std::fs::read(sandbox.path("credentials")).expect("credentials")).expect("JSON");
    credentials["expires_at"].as_u64().expect("a time")
}

/// With the program in it: the script asks `withlock check`.
fn path() -> String {
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_withlock"));
    format!("{}:/usr/local/bin:/usr/bin:/bin", program.parent().expect("a directory").display())
}

fn script<'s>(run: Run<'s>, endpoint: &Endpoint) -> Run<'s> {
    run.args(["/bin/sh", SCRIPT, "credentials"]).arg(endpoint.url()).env("PATH", path())
}

/// Sixteen copies at once, round after round, as soon as the token has expired.
fn refresh_under(lock: &OsStr, sandbox: &Sandbox, rounds: usize) {
    let endpoint = Endpoint::start(Duration::from_millis(100));
    login(sandbox);
    for round in 1..=rounds {
        eventually("the access token has expired", || {
            // By the endpoint's books and by the credentials on disk, which were written a little later.
            let expires_at_s = endpoint.books().expires_at_s.max(expiry_on_disk(sandbox));
            if unix_seconds() >= expires_at_s { Ok(()) } else { Err(expires_at_s) }
        });
        let before = endpoint.books().refreshes;
        let copies: Vec<_> = (0..COPIES)
            .map(|_| script(sandbox.withlock().args(["-q", "-w", "35s"]).arg(lock).arg("--"), &endpoint).start())
            .collect();
        for copy in copies {
            let finished = copy.wait();
            finished.exited(0).silent();
            let (token, books) = (finished.out(), endpoint.books());
            let number = books.issued.iter().position(|access| *access == token.trim());
            assert!(number.is_some_and(|number| number >= before), "round {round}: an old token: {token:?}");
        }
        let books = endpoint.books();
        assert_eq!(books.revocations, 0, "round {round}");
        assert_eq!(books.needless, 0, "round {round}: refreshed before it had expired");
        // One, unless this machine is so slow that the new token expired while the copies still ran.
        assert!(books.refreshes > before, "round {round}: nobody refreshed");
        assert!(books.requests_with.values().all(|requests| *requests == 1), "{:?}", books.requests_with);
    }
    assert_eq!(sandbox.names(), ["credentials"], "nothing is left beside the credentials");
}

#[test]
fn sixteen_copies_refresh_a_one_time_token_once_per_expiry_and_are_never_revoked() {
    let sandbox = Sandbox::new();
    refresh_under(sandbox.lock().as_os_str(), &sandbox, 6);
}

#[cfg(feature = "etcd")]
#[test]
fn by_a_lock_in_etcd_sixteen_copies_refresh_once_per_expiry_as_well() {
    let (cluster, sandbox) = (crate::harness::Cluster::start(3), Sandbox::new());
    refresh_under(OsStr::new(&cluster.lock("token")), &sandbox, 4);
    assert_eq!((cluster.keys(""), cluster.leases()), (Vec::new(), 0));
}

#[test]
fn without_the_lock_the_same_script_is_revoked() {
    let sandbox = Sandbox::new();
    let endpoint = Endpoint::start(Duration::from_secs(20));
    login(&sandbox);
    let copies: Vec<_> = (0..COPIES).map(|_| script(sandbox.program("env"), &endpoint).start()).collect();
    let failed = copies.into_iter().map(|copy| copy.wait().code()).filter(|code| *code != Some(0)).count();
    assert_eq!(endpoint.books().revocations, 1);
    assert!(failed > 0, "every copy thinks that all is well");
    // For good: whatever stands in the credentials now, it cannot be refreshed any more.
    let (shared, current) = (Arc::clone(&endpoint.shared), endpoint.books().current.clone());
    assert!(shared.refresh(&current).1.contains("invalid_grant"));
}

#[test]
fn with_the_exclusive_create_left_out_the_same_script_is_revoked() {
    let sandbox = Sandbox::new();
    let endpoint = Endpoint::start(Duration::from_secs(20));
    login(&sandbox);
    let copies: Vec<_> = (0..COPIES)
        .map(|_| sandbox.withlock().leave_out("exclusive,guard").args(["--on-lost", "warn"]).lock().arg("--"))
        .map(|run| script(run, &endpoint).start())
        .collect();
    for copy in copies {
        copy.wait();
    }
    assert_eq!(endpoint.books().revocations, 1);
}

#[test]
fn a_copy_that_lost_the_lock_while_it_waited_for_the_provider_does_not_commit() {
    let sandbox = Sandbox::new();
    let endpoint = Endpoint::start(Duration::from_secs(3));
    login(&sandbox);
    // It is only warned, so that nothing but its own question keeps it from writing.
    let run = sandbox.withlock().args(["--on-lost", "warn"]).lock().arg("--");
    let copy = script(run, &endpoint).start();
    eventually("it has asked the provider", || {
        let asked = endpoint.books().requests_with.len();
        if asked == 1 { Ok(()) } else { Err(asked) }
    });
    sandbox.withlock().args(["break", "--force", "--reason", "test"]).lock().run().exited(0);
    let theirs = r#"{"access_token": "theirs", "refresh_token": "theirs", "expires_at": 4000000000}"#;
    std::fs::write(sandbox.path("credentials"), theirs).expect("credentials");
    let finished = copy.wait();
    finished.exited(76);
    assert_eq!(finished.out(), "");
    assert_eq!(std::fs::read_to_string(sandbox.path("credentials")).expect("credentials"), theirs);
}

#[test]
fn those_that_time_out_do_not_run_the_script_at_all() {
    let sandbox = Sandbox::new();
    let endpoint = Endpoint::start(Duration::from_millis(100));
    login(&sandbox);
    let mut gate = sandbox.gate();
    let holder = sandbox.withlock().lock().sh(gate.script()).start();
    gate.wait_inside();
    let before = std::fs::read(sandbox.path("credentials")).expect("credentials");
    let copies: Vec<_> =
        (0..8).map(|_| script(sandbox.withlock().args(["-w", "300ms"]).lock().arg("--"), &endpoint).start()).collect();
    for copy in copies {
        let finished = copy.wait();
        finished.exited(75);
        assert_eq!(finished.out(), "");
    }
    assert!(endpoint.books().requests_with.is_empty());
    assert_eq!(std::fs::read(sandbox.path("credentials")).expect("credentials"), before);
    gate.open();
    holder.wait().exited(0);
}

/// One who asks, under the lock, whether the refresh is still needed; each command that runs is counted.
fn asks_first<'s>(sandbox: &'s Sandbox, endpoint: &Endpoint) -> Run<'s> {
    let if_good = concat!("/bin/sh ", env!("CARGO_MANIFEST_DIR"), "/tests/data/token-if-good.sh credentials");
    let run = sandbox.withlock().args(["-q", "-w", "35s", "--skip-if", if_good]).env("PATH", path()).lock();
    run.sh(format!("echo $$ >>ran; exec /bin/sh {SCRIPT} credentials {}", endpoint.url()))
}

#[test]
fn c48_eight_refreshers_that_ask_first_whether_it_is_needed_run_one_refresh_between_them() {
    let sandbox = Sandbox::new();
    let endpoint = Endpoint::with_life(3600, Duration::from_millis(100));
    login(&sandbox);
    let copies: Vec<_> = (0..8).map(|_| asks_first(&sandbox, &endpoint).start()).collect();
    for copy in copies {
        let finished = copy.wait();
        finished.exited(0).silent();
        let (token, books) = (finished.out(), endpoint.books());
        assert!(books.issued.iter().any(|access| *access == token.trim()), "a token that is good: {token:?}");
    }
    let books = endpoint.books();
    assert_eq!((books.revocations, books.needless), (0, 0));
    assert!(books.requests_with.values().all(|requests| *requests == 1), "{:?}", books.requests_with);
    let ran = std::fs::read_to_string(sandbox.path("ran")).expect("somebody ran").lines().count();
    assert_eq!((ran, books.refreshes), (1, 1), "the first refreshes, the others find nothing left to do");
    assert_eq!(sandbox.names(), ["credentials", "ran"]);
}
