//! A LOCK that names a key in etcd rather than a path: `etcd://HOST:PORT[,HOST:PORT…]/KEY`. Pure.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use crate::text::Shown;

/// The port where none is given.
const DEFAULT_PORT: u16 = 2379;
/// The longest key, in bytes: what is derived from it stays far below what a server accepts.
const MAX_KEY_BYTES: usize = 4096;

/// Where a lock in etcd is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// Over TLS.
    pub tls: bool,
    /// The servers, `host:port`, in the order in which they are tried.
    pub endpoints: Vec<String>,
    /// The key, byte for byte as typed after the slash; empty or ending in `/` for a prefix.
    pub key: Vec<u8>,
}

/// Whether a LOCK is an address rather than a path, well-formed or not.
pub fn is_address(lock: &OsStr) -> bool {
    let bytes = lock.as_bytes();
    bytes.starts_with(b"etcd://") || bytes.starts_with(b"etcds://")
}

impl Address {
    /// Reads a LOCK for which [`is_address`] holds; the error says what is wrong with it.
    pub fn parse(lock: &OsStr) -> Result<Self, String> {
        let wrong = |what: &str| Err(format!("{}: {what} (etcd://HOST:PORT[,HOST:PORT...]/KEY)", Shown::os(lock)));
        let bytes = lock.as_bytes();
        let (tls, rest) = match (bytes.strip_prefix(b"etcds://"), bytes.strip_prefix(b"etcd://")) {
            (Some(rest), _) => (true, rest),
            (None, Some(rest)) => (false, rest),
            (None, None) => return wrong("not an address"),
        };
        let Some(slash) = rest.iter().position(|b| *b == b'/') else { return wrong("no key") };
        let (hosts, key) = (&rest[..slash], &rest[slash + 1..]);
        if hosts.contains(&b'@') {
            // What stands on a command line can be read by everybody on the host.
            return Err(
                "user and password do not belong into LOCK: set WITHLOCK_ETCD_USER and WITHLOCK_ETCD_PASSWORD, \
                        or use --etcd-credentials FILE"
                    .into(),
            );
        }
        if key.len() > MAX_KEY_BYTES {
            return wrong(&format!("the key is longer than {MAX_KEY_BYTES} bytes"));
        }
        let endpoints: Option<Vec<String>> = hosts.split(|b| *b == b',').map(endpoint).collect();
        match endpoints {
            Some(endpoints) => Ok(Address { tls, endpoints, key: key.to_vec() }),
            None => wrong("not a list of hosts"),
        }
    }

    /// The same, but its key must name one lock.
    pub fn parse_lock(lock: &OsStr) -> Result<Self, String> {
        let address = Self::parse(lock)?;
        if address.names_many() {
            let what = if address.key.is_empty() { "no key" } else { "the key of a lock does not end in /" };
            return Err(format!("{}: {what} (etcd://HOST:PORT[,HOST:PORT...]/KEY)", Shown::os(lock)));
        }
        Ok(address)
    }

    /// Whether the key is a prefix: every lock below it.
    pub fn names_many(&self) -> bool {
        self.key.last().is_none_or(|last| *last == b'/')
    }

    /// The address as typed up to the key, for naming another key of the same service.
    pub fn of_key(&self, key: &[u8]) -> Vec<u8> {
        let scheme = if self.tls { "etcds" } else { "etcd" };
        [format!("{scheme}://{}/", self.endpoints.join(",")).as_bytes(), key].concat()
    }
}

/// `host`, `host:port`, `[v6]` or `[v6]:port`, completed with the port.
fn endpoint(text: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(text).ok()?;
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']')?;
            let is_v6 = host.parse::<std::net::Ipv6Addr>().is_ok();
            let port = if rest.is_empty() { None } else { Some(rest.strip_prefix(':')?) };
            (is_v6.then(|| format!("[{host}]"))?, port)
        }
        None => {
            let (host, port) = text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port)));
            let is_name = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_');
            ((!host.is_empty() && host.bytes().all(is_name)).then(|| host.to_owned())?, port)
        }
    };
    let port = match port {
        None => DEFAULT_PORT,
        Some(digits) if digits.bytes().all(|b| b.is_ascii_digit()) => digits.parse().ok().filter(|port| *port > 0)?,
        Some(_) => return None,
    };
    Some(format!("{host}:{port}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Address, String> {
        Address::parse_lock(OsStr::new(text))
    }

    #[test]
    fn hosts_get_a_port_and_keys_are_taken_byte_for_byte() {
        let address = parse("etcd://a,b.example:23,[::1],[fe80::1]:9/locks/a b%20").unwrap();
        assert_eq!(address.endpoints, ["a:2379", "b.example:23", "[::1]:2379", "[fe80::1]:9"]);
        assert_eq!((address.tls, address.key.as_slice()), (false, b"locks/a b%20".as_slice()));
        let odd = Address::parse(OsStr::from_bytes(b"etcds://h/\xff//x")).unwrap();
        assert_eq!((odd.tls, odd.key.as_slice()), (true, b"\xff//x".as_slice()));
        assert_eq!(odd.of_key(b"k"), b"etcds://h:2379/k");
    }

    #[test]
    fn what_is_not_an_address_is_refused_in_words() {
        for text in [
            "etcd://",
            "etcd://h",
            "etcd:///k",
            "etcd://h/",
            "etcd://h/dir/",
            "etcd://h,/k",
            "etcd://h:/k",
            "etcd://h:0/k",
            "etcd://h:65536/k",
            "etcd://h:+1/k",
            "etcd://h:1:2/k",
            "etcd://::1/k",
            "etcd://[::1/k",
            "etcd://[x]/k",
            "etcd://[::1]9/k",
            "etcd://h\u{e9}/k",
        ] {
            assert!(parse(text).is_err_and(|why| why.contains("(etcd://HOST:PORT")), "{text}");
        }
        assert!(parse("etcd://user:word@h/k").is_err_and(|why| !why.contains("word@")));
        assert!(parse(&format!("etcd://h/{}", "k".repeat(MAX_KEY_BYTES + 1))).is_err());
    }

    #[test]
    fn a_path_that_only_looks_similar_is_a_path() {
        for (text, address) in [("etcd://x", true), ("etcds://", true), ("./etcd://x/y", false), ("etcd:/x", false)] {
            assert_eq!(is_address(OsStr::new(text)), address, "{text}");
        }
    }

    #[test]
    fn a_prefix_ends_in_a_slash_or_is_empty() {
        for (text, many) in [("etcd://h/", true), ("etcd://h/a/", true), ("etcd://h/a", false)] {
            assert_eq!(Address::parse(OsStr::new(text)).unwrap().names_many(), many, "{text}");
        }
    }
}
