//! The examples that fetch a token once for many, run as they stand.
//!
//! Needs `curl`; with the feature `etcd` also `etcd` and `etcdctl`.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use super::examples::Stage;

/// Answers every request with a token, and counts them.
struct Provider {
    address: SocketAddr,
    asked: Arc<AtomicUsize>,
}

impl Provider {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        // Ends with the tests' process; it has nothing to leave behind.
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let _ = answer(&stream, count.fetch_add(1, Ordering::SeqCst) + 1);
            }
        });
        Provider { address, asked }
    }

    fn url(&self) -> String {
        format!("http://{}/token", self.address)
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }
}

fn answer(mut stream: &TcpStream, number: usize) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    while reader.read_line(&mut line)? > 0 && line != "\r\n" {
        line.clear();
    }
    let token = format!("token-{number}\n");
    write!(stream, "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{token}", token.len())
}

/// Makes the token in the sandbox's directory an hour old.
fn age_token(stage: &Stage) {
    let hour_ago = SystemTime::now() - Duration::from_secs(3_600);
    crate::harness::set_mtime(&stage.sandbox.path("token"), hour_ago);
}

#[test]
fn of_many_that_want_a_fresh_token_one_fetches_it() {
    let stage = Stage::new();
    stage.stub("fetch-token", "echo fetched >>fetched; echo a-token");
    for example in stage.examples("fetch-token") {
        let _ = std::fs::remove_file(stage.sandbox.path("token"));
        let _ = std::fs::remove_file(stage.sandbox.path("fetched"));
        let copies: Vec<_> = (0..8).map(|_| stage.shell(&example).start()).collect();
        for copy in copies {
            // On a busy machine a wait is long enough to be spoken of.
            copy.wait().exited(0);
        }
        let read = |name: &str| std::fs::read_to_string(stage.sandbox.path(name)).expect("a file");
        assert_eq!((read("token"), read("fetched")), ("a-token\n".into(), "fetched\n".into()));
        // An old one is fetched again; the file that was put in place says when.
        age_token(&stage);
        stage.shell(&example).run().exited(0).silent();
        assert_eq!(read("fetched"), "fetched\nfetched\n");
    }
}

#[test]
fn of_many_that_want_a_token_by_curl_one_asks_for_it() {
    let (stage, provider) = (Stage::new(), Provider::start());
    let [example] = &stage.examples("mv token.new token'\n")[..1] else { unreachable!() };
    assert!(example.contains("curl"), "{example}");
    let copy = || stage.shell(example).env("TOKEN_URL", provider.url());
    let copies: Vec<_> = (0..8).map(|_| copy().start()).collect();
    for copy in copies {
        copy.wait().exited(0);
    }
    let token = || std::fs::read_to_string(stage.sandbox.path("token")).expect("the token");
    assert_eq!((provider.asked(), token()), (1, "token-1\n".into()));
    age_token(&stage);
    copy().run().exited(0).silent();
    assert_eq!((provider.asked(), token()), (2, "token-2\n".into()));
    // A provider that cannot be reached: the old token stays, and the failure is curl's own.
    age_token(&stage);
    let failed = stage.shell(example).env("TOKEN_URL", "http://127.0.0.1:1/token").run();
    failed.exited(7);
    assert_eq!(token(), "token-2\n");
}

#[cfg(feature = "etcd")]
#[test]
fn etcd_example_of_many_that_want_a_token_by_curl_one_asks_for_it() {
    let (stage, provider) = (Stage::new(), Provider::start());
    let cluster = crate::harness::Cluster::start(1);
    let example = stage.example("etcdctl lease grant");
    let shell = |text: &str| {
        let run = stage.shell(text).env("ETCD", cluster.endpoint(0)).env("TOKEN_URL", provider.url());
        run.env("ETCDCTL_API", "3").env("ETCDCTL_ENDPOINTS", cluster.endpoint(0))
    };
    let copies: Vec<_> = (0..8).map(|_| shell(&example).start()).collect();
    for copy in copies {
        copy.wait().exited(0);
    }
    let token = || shell("etcdctl get --print-value-only token").run().out().trim().to_owned();
    assert_eq!((provider.asked(), token()), (1, "token-1".into()));
    // It is there as long as it is good; then it is asked for again.
    let lease = shell("etcdctl lease list").run().out();
    let lease = lease.lines().nth(1).expect("a lease").to_owned();
    shell(&format!("etcdctl lease revoke {lease}")).run().exited(0);
    assert_eq!(token(), "");
    shell(&example).run().exited(0);
    assert_eq!((provider.asked(), token()), (2, "token-2".into()));
}
