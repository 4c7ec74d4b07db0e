//! Who we are to etcd, and whom we trust. From files and the environment, never from the command line.

use std::ffi::{OsStr, OsString};
use std::fmt::{self, Debug, Formatter};

use ureq::tls::{Certificate, ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig, parse_pem};

use crate::options::Access;
use crate::store::Fault;
use crate::sys::process::variable;
use crate::sys::{Errno, describe};
use crate::text::Shown;

/// User and password.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Credentials {
    pub(super) user: String,
    pub(super) password: String,
}

impl Debug for Credentials {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        write!(out, "Credentials({})", self.user)
    }
}

/// `access` as typed, completed from the environment.
pub(super) fn completed(access: &Access) -> Access {
    let or_variable =
        |typed: &Option<OsString>, name: &str| typed.clone().or_else(|| variable(name)).filter(|file| !file.is_empty());
    let [cacert, cert, key, credentials] = access.variables().map(|(name, _)| name);
    Access {
        cacert: or_variable(&access.cacert, cacert),
        cert: or_variable(&access.cert, cert),
        key: or_variable(&access.key, key),
        credentials: or_variable(&access.credentials, credentials),
    }
}

/// User and password, if there are any: of the file, or else of the environment.
pub(super) fn credentials(access: &Access) -> Result<Option<Credentials>, Trouble> {
    if let Some(file) = &access.credentials {
        let content = String::from_utf8(read(file)?).map_err(|_| wrong(file, "it is not UTF-8"))?;
        let line = content.strip_suffix('\n').unwrap_or(&content);
        let line = line.strip_suffix('\r').unwrap_or(line);
        return match line.split_once(':') {
            Some((user, password)) if !user.is_empty() && !line.contains('\n') => {
                Ok(Some(Credentials { user: user.into(), password: password.into() }))
            }
            _ => Err(wrong(file, "it is not one line USER:PASSWORD")),
        };
    }
    let text = |name: &str| match variable(name).map(OsString::into_string) {
        None => Ok(None),
        Some(Ok(text)) if text.is_empty() => Ok(None),
        Some(Ok(text)) => Ok(Some(text)),
        Some(Err(_)) => Err(wrong(OsStr::new(name), "it is not UTF-8")),
    };
    match (text("WITHLOCK_ETCD_USER")?, text("WITHLOCK_ETCD_PASSWORD")?) {
        (Some(user), Some(password)) => Ok(Some(Credentials { user, password })),
        (Some(_), None) => Err(wrong(OsStr::new("WITHLOCK_ETCD_USER"), "there is no WITHLOCK_ETCD_PASSWORD with it")),
        (None, _) => Ok(None),
    }
}

/// Whom to trust, and what to show.
pub(super) fn tls(access: &Access) -> Result<TlsConfig, Trouble> {
    let mut config = TlsConfig::builder();
    if let Some(file) = &access.cacert {
        let certificates = certificates(file)?;
        config = config.root_certs(RootCerts::from(certificates));
    }
    match (&access.cert, &access.key) {
        (Some(cert), Some(key)) => {
            let chain = certificates(cert)?;
            let secret = PrivateKey::from_pem(&read(key)?).map_err(|error| wrong(key, &error.to_string()))?;
            config = config.client_cert(Some(ClientCert::new_with_certs(&chain, secret)));
        }
        (None, None) => {}
        (Some(file), None) | (None, Some(file)) => {
            return Err(wrong(file, "a certificate and its key are needed, both or neither"));
        }
    }
    Ok(config.build())
}

fn certificates(file: &OsStr) -> Result<Vec<Certificate<'static>>, Trouble> {
    let content = read(file)?;
    let mut found = Vec::new();
    for item in parse_pem(&content) {
        match item {
            Ok(PemItem::Certificate(certificate)) => found.push(certificate),
            Ok(_) => {}
            Err(error) => return Err(wrong(file, &error.to_string())),
        }
    }
    if found.is_empty() { Err(wrong(file, "there is no certificate in it")) } else { Ok(found) }
}

fn read(file: &OsStr) -> Result<Vec<u8>, Trouble> {
    crate::sys::path::whole(file).map_err(|errno| match errno {
        Errno::EACCES | Errno::EPERM => {
            Trouble::Denied(format!("cannot read {}: {}", Shown::os(file), describe(errno)))
        }
        errno => wrong(file, describe(errno)),
    })
}

fn wrong(file: &OsStr, why: &str) -> Trouble {
    Trouble::Wrong(format!("{}: {why}", Shown::os(file)))
}

/// What is wrong with a file or a variable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Trouble {
    /// We may not read it.
    Denied(String),
    /// Nothing can be asked with what it says.
    Wrong(String),
}

impl Trouble {
    /// As a fault of the lock that was to be reached.
    pub(super) fn of(self, lock: &[u8]) -> Fault {
        match self {
            Trouble::Denied(why) => Fault::NotPermitted { path: lock.to_vec(), why },
            Trouble::Wrong(why) => Fault::Unreachable { path: lock.to_vec(), why, standing: true },
        }
    }
}
