//! Asking etcd: the endpoints in turn, with user and password, over TLS where the address says so.
//!
//! A request that got no answer may still have been carried out. Whatever is asked here must therefore be
//! safe to ask twice, and the answer says whether it may have been.

use std::io::{BufRead, ErrorKind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use ureq::Agent;
use ureq::tls::TlsConfig;

use crate::address::Address;
use crate::sys::clock::boot_ms;
use crate::sys::{Errno, describe};
use crate::text::duration;

use super::access::Credentials;
use super::wire::{self, code};

/// How long one endpoint is given to answer where nothing is urgent, in milliseconds.
pub(super) const PATIENCE_MS: u64 = 3_000;
/// How long a watch is silent before it is asked for anew, in milliseconds: its server may be gone.
const SILENCE_MS: u64 = 60_000;
/// No answer is longer: what is read of a server that is no etcd.
const MAX_ANSWER_BYTES: u64 = 64 * 1024 * 1024;

/// How etcd is asked. Clones share their connections.
#[derive(Clone, Debug)]
pub(super) struct Client(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    agent: Agent,
    /// A connection that is lent to a watch is not there for what the watch will lead to.
    watching_agent: Agent,
    setup: Setup,
    endpoints: Vec<String>,
    /// The endpoint that answered last.
    current: AtomicUsize,
    token: Mutex<Option<String>>,
}

/// How a service is to be asked.
#[derive(Clone, Debug)]
struct Setup {
    tls: Option<TlsConfig>,
    scheme: &'static str,
    credentials: Option<Credentials>,
}

/// An answer.
#[derive(Debug)]
pub(super) struct Answer<T> {
    pub(super) value: T,
    /// When the request that was answered was sent, by the boot clock: whatever counts from its arrival
    /// counts from here at the earliest.
    pub(super) sent_boot_ms: u64,
    /// An earlier request of the same content got no answer and may have been carried out.
    pub(super) repeated: bool,
}

/// No answer, or not the one that was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// No endpoint could be asked.
    Unreachable {
        /// Each endpoint, with what was wrong.
        why: String,
        /// Asking again will not help: what is wrong is how we ask.
        standing: bool,
    },
    /// We may not.
    Denied(String),
    /// etcd understood and refused.
    Refused {
        /// gRPC's number for it.
        code: u32,
        /// By whom, and why.
        why: String,
    },
}

/// What one endpoint said.
enum Said<T> {
    Yes(T),
    /// Ask the next one.
    Nothing {
        why: String,
        standing: bool,
        may_be_done: bool,
        /// The connection broke.
        broken: bool,
    },
    No(wire::Error),
}

impl Client {
    pub(super) fn new(address: &Address, tls: Option<TlsConfig>, credentials: Option<Credentials>) -> Self {
        Self::of(Setup { tls, scheme: if address.tls { "https" } else { "http" }, credentials }, &address.endpoints)
    }

    /// A client that shares nothing with this one.
    pub(super) fn anew(&self) -> Self {
        Self::of(self.0.setup.clone(), &self.0.endpoints)
    }

    fn of(setup: Setup, endpoints: &[String]) -> Self {
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            // The environment's proxies are for the world outside.
            .proxy(None)
            .no_delay(true)
            .max_idle_age(Duration::from_secs(600))
            .user_agent("")
            .accept_encoding("");
        if let Some(tls) = &setup.tls {
            config = config.tls_config(tls.clone());
        }
        let config = config.build();
        Client(Arc::new(Shared {
            agent: config.clone().into(),
            watching_agent: config.into(),
            setup,
            endpoints: endpoints.to_vec(),
            current: AtomicUsize::new(0),
            token: Mutex::new(None),
        }))
    }

    /// Asks the endpoints in turn until one answers, each for at most `patience_ms`.
    pub(super) fn ask<T: DeserializeOwned>(
        &self,
        path: &str,
        question: &Value,
        patience_ms: u64,
    ) -> Result<Answer<T>, Failure> {
        let count = self.0.endpoints.len();
        let first = self.0.current.load(Ordering::Relaxed);
        let (mut complaints, mut all_standing, mut repeated) = (Vec::new(), true, false);
        for index in (first..first + count).map(|index| index % count) {
            let endpoint = &self.0.endpoints[index];
            let mut sent_boot_ms = boot_ms();
            let mut said = self.ask_one(endpoint, path, question, patience_ms);
            if matches!(said, Said::Nothing { broken: true, .. }) {
                // An old connection that the server has closed meanwhile says nothing about the server.
                repeated = true;
                sent_boot_ms = boot_ms();
                said = self.ask_one(endpoint, path, question, patience_ms);
            }
            if let Said::No(error) = &said
                && error.code == code::UNAUTHENTICATED
            {
                // Tokens run out; and servers that were restarted have forgotten them.
                self.forget_token();
                sent_boot_ms = boot_ms();
                said = self.ask_one(endpoint, path, question, patience_ms);
            }
            match said {
                Said::Yes(value) => {
                    self.0.current.store(index, Ordering::Relaxed);
                    return Ok(Answer { value, sent_boot_ms, repeated });
                }
                Said::Nothing { why, standing, may_be_done, .. } => {
                    complaints.push(format!("{endpoint}: {why}"));
                    all_standing &= standing;
                    repeated |= may_be_done;
                }
                Said::No(error) => return Err(refusal(endpoint, error)),
            }
        }
        Err(Failure::Unreachable { why: complaints.join("; "), standing: all_standing })
    }

    fn ask_one<T: DeserializeOwned>(&self, endpoint: &str, path: &str, question: &Value, patience_ms: u64) -> Said<T> {
        let token = match self.token(endpoint, patience_ms) {
            Ok(token) => token,
            Err(said) => return said,
        };
        self.post(endpoint, path, question, token.as_deref(), patience_ms)
    }

    fn post<T: DeserializeOwned>(
        &self,
        endpoint: &str,
        path: &str,
        question: &Value,
        token: Option<&str>,
        patience_ms: u64,
    ) -> Said<T> {
        let mut request = self.0.agent.post(format!("{}://{endpoint}/v3/{path}", self.0.setup.scheme));
        if let Some(token) = token {
            request = request.header("Authorization", token);
        }
        // Step by step rather than as a whole: with a limit on the whole a name is looked up in a thread of
        // its own, also where it is a number.
        let patience = Some(Duration::from_millis(patience_ms));
        let request = request
            .config()
            .timeout_connect(patience)
            .timeout_send_request(patience)
            .timeout_send_body(patience)
            .timeout_recv_response(patience)
            .timeout_recv_body(patience)
            .build();
        let answer = request.send(question.to_string().as_bytes());
        let (status, content) = match answer.and_then(|mut answer| {
            let content = answer.body_mut().with_config().limit(MAX_ANSWER_BYTES).read_to_vec()?;
            Ok((answer.status().as_u16(), content))
        }) {
            Ok(read) => read,
            Err(error) => return nothing(&error, patience_ms),
        };
        match error_in(&content) {
            Some(error) if may_pass(&error) => {
                Said::Nothing { why: error.message, standing: false, may_be_done: true, broken: false }
            }
            Some(error) => Said::No(error),
            None => match serde_json::from_slice(&content) {
                Ok(value) if status == 200 => Said::Yes(value),
                _ => Said::Nothing {
                    why: format!("it does not answer like etcd (HTTP status {status})"),
                    standing: true,
                    may_be_done: false,
                    broken: false,
                },
            },
        }
    }

    fn token<T>(&self, endpoint: &str, patience_ms: u64) -> Result<Option<String>, Said<T>> {
        let Some(credentials) = &self.0.setup.credentials else { return Ok(None) };
        let mut token = self.0.token.lock().unwrap_or_else(PoisonError::into_inner);
        if token.is_none() {
            let question = wire::authenticate(&credentials.user, &credentials.password);
            match self.post::<wire::Authenticated>(endpoint, "auth/authenticate", &question, None, patience_ms) {
                Said::Yes(answer) => *token = Some(answer.token),
                // A server that asks nobody for a password needs none.
                Said::No(error) if error.message.contains("authentication is not enabled") => return Ok(None),
                Said::No(error) => return Err(Said::No(error)),
                Said::Nothing { why, standing, .. } => {
                    return Err(Said::Nothing { why, standing, may_be_done: false, broken: false });
                }
            }
        }
        Ok(token.clone())
    }

    fn forget_token(&self) {
        *self.0.token.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// How many endpoints there are.
    pub(super) fn endpoint_count(&self) -> u64 {
        self.0.endpoints.len().max(1) as u64
    }

    /// Which endpoint answered last.
    pub(super) fn current(&self) -> usize {
        self.0.current.load(Ordering::Relaxed)
    }

    /// Hands each change of `key` from `from_revision` on to `tell`, until that says no or the stream ends.
    pub(super) fn watch(&self, key: &[u8], from_revision: i64, mut tell: impl FnMut(wire::Event) -> bool) {
        let endpoint = &self.0.endpoints[self.0.current.load(Ordering::Relaxed)];
        let Ok(token) = self.token::<()>(endpoint, PATIENCE_MS) else { return };
        let mut request = self
            .0
            .watching_agent
            .post(format!("{}://{endpoint}/v3/watch", self.0.setup.scheme))
            // A member that is cut off from the others ends the stream rather than stay silent.
            .header("Grpc-Metadata-hasleader", "true");
        if let Some(token) = &token {
            request = request.header("Authorization", token);
        }
        let request = request
            .config()
            .timeout_connect(Some(Duration::from_millis(PATIENCE_MS)))
            .timeout_per_read(Some(Duration::from_millis(SILENCE_MS)))
            .build();
        let Ok(answer) = request.send(wire::watch(key, from_revision).to_string().as_bytes()) else { return };
        // One message a line.
        for line in std::io::BufReader::new(answer.into_body().into_reader()).split(b'\n') {
            let Ok(Ok(message)) = line.map(|line| serde_json::from_slice::<wire::Streamed<wire::Watched>>(&line))
            else {
                return;
            };
            let Some(watched) = message.result else { return };
            for event in watched.events {
                if !tell(event) {
                    return;
                }
            }
            if watched.canceled {
                return;
            }
        }
    }
}

fn nothing<T>(error: &ureq::Error, patience_ms: u64) -> Said<T> {
    let (why, standing, may_be_done) = match error {
        ureq::Error::Timeout(_) => (format!("no answer within {}", duration(patience_ms)), false, true),
        ureq::Error::HostNotFound => ("host not found".into(), false, false),
        ureq::Error::Rustls(error) => (format!("TLS: {error}"), true, false),
        ureq::Error::Tls(error) => (format!("TLS: {error}"), true, false),
        ureq::Error::Pem(error) => (format!("TLS: {error}"), true, false),
        ureq::Error::Io(error) => match error.raw_os_error().map(Errno::from_raw) {
            Some(errno) => (describe(errno).to_owned(), false, errno != Errno::ECONNREFUSED),
            None if error.kind() == ErrorKind::InvalidData => (format!("TLS: {error}"), true, false),
            None => (error.to_string(), false, true),
        },
        error => (error.to_string(), false, true),
    };
    let broken = matches!(error, ureq::Error::Io(error) if matches!(
        error.kind(),
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::UnexpectedEof | ErrorKind::ConnectionAborted
    ));
    Said::Nothing { why, standing, may_be_done, broken }
}

/// An error in an answer, in whichever of its shapes.
fn error_in(content: &[u8]) -> Option<wire::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Shape {
        Streamed { error: wire::Error },
        Plain(wire::Error),
    }
    match serde_json::from_slice(content).ok()? {
        Shape::Streamed { error } | Shape::Plain(error) => (error.code != 0).then_some(error),
    }
}

/// Errors of a server that has no majority just now, or too much to do: the next one may do better.
fn may_pass(error: &wire::Error) -> bool {
    match error.code {
        code::UNAVAILABLE | code::DEADLINE_EXCEEDED => true,
        code::RESOURCE_EXHAUSTED => !error.message.contains("space"),
        _ => false,
    }
}

fn refusal(endpoint: &str, error: wire::Error) -> Failure {
    let about_user = error.message.contains("user name is empty") || error.message.contains("authentication failed");
    let why = format!("{endpoint}: {}", error.message);
    match error.code {
        code::PERMISSION_DENIED | code::UNAUTHENTICATED => Failure::Denied(why),
        code::INVALID_ARGUMENT if about_user => Failure::Denied(why),
        code => Failure::Refused { code, why },
    }
}
