//! What etcd's JSON gateway takes and gives: 64-bit numbers as strings, bytes in base64, fields left out
//! where they are zero.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};

/// A 64-bit number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Int(pub(super) i64);

impl<'de> Deserialize<'de> for Int {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Either {
            Text(String),
            Number(i64),
        }
        match Either::deserialize(deserializer)? {
            Either::Number(number) => Ok(Int(number)),
            Either::Text(text) => text.parse().map(Int).map_err(serde::de::Error::custom),
        }
    }
}

/// Keys and values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Bytes(pub(super) Vec<u8>);

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        STANDARD.decode(text).map(Bytes).map_err(serde::de::Error::custom)
    }
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Header {
    pub(super) revision: Int,
}

/// One key as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct KeyValue {
    pub(super) key: Bytes,
    pub(super) value: Bytes,
    pub(super) create_revision: Int,
    pub(super) mod_revision: Int,
    pub(super) lease: Int,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Range {
    pub(super) header: Header,
    pub(super) kvs: Vec<KeyValue>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Txn {
    pub(super) header: Header,
    pub(super) succeeded: bool,
    pub(super) responses: Vec<TxnPart>,
}

impl Txn {
    /// The key that a read in the transaction found.
    pub(super) fn found(self) -> Option<KeyValue> {
        self.responses.into_iter().find_map(|part| part.response_range)?.kvs.into_iter().next()
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct TxnPart {
    pub(super) response_range: Option<Range>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct LeaseGrant {
    #[serde(rename = "ID")]
    pub(super) id: Int,
    #[serde(rename = "TTL")]
    pub(super) ttl_seconds: Int,
}

/// One message of a stream.
#[derive(Debug, Deserialize)]
#[serde(default)]
pub(super) struct Streamed<T> {
    pub(super) result: Option<T>,
    pub(super) error: Option<Error>,
}

impl<T> Default for Streamed<T> {
    fn default() -> Self {
        Streamed { result: None, error: None }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct KeepAlive {
    #[serde(rename = "TTL")]
    pub(super) ttl_seconds: Int,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct TimeToLive {
    #[serde(rename = "TTL")]
    pub(super) ttl_seconds: Int,
    #[serde(rename = "grantedTTL")]
    pub(super) granted_seconds: Int,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Watched {
    pub(super) canceled: bool,
    pub(super) events: Vec<Event>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Event {
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) kv: KeyValue,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Authenticated {
    pub(super) token: String,
}

/// An error, by the number that gRPC gives it.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Error {
    #[serde(alias = "grpc_code")]
    pub(super) code: u32,
    pub(super) message: String,
}

/// Numbers of gRPC's errors.
pub(super) mod code {
    pub(crate) const INVALID_ARGUMENT: u32 = 3;
    pub(crate) const DEADLINE_EXCEEDED: u32 = 4;
    pub(crate) const NOT_FOUND: u32 = 5;
    pub(crate) const PERMISSION_DENIED: u32 = 7;
    pub(crate) const RESOURCE_EXHAUSTED: u32 = 8;
    pub(crate) const UNAVAILABLE: u32 = 14;
    pub(crate) const UNAUTHENTICATED: u32 = 16;
}

fn text(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

/// "This key was created at that revision"; 0: it does not exist.
pub(super) fn created_at(key: &[u8], revision: i64) -> Value {
    json!({"key": text(key), "target": "CREATE", "result": "EQUAL", "create_revision": revision.to_string()})
}

/// "This key was last changed at that revision."
pub(super) fn changed_at(key: &[u8], revision: i64) -> Value {
    json!({"key": text(key), "target": "MOD", "result": "EQUAL", "mod_revision": revision.to_string()})
}

pub(super) fn put(key: &[u8], value: &[u8], lease: i64) -> Value {
    json!({"request_put": {"key": text(key), "value": text(value), "lease": lease.to_string()}})
}

pub(super) fn delete(key: &[u8]) -> Value {
    json!({"request_delete_range": {"key": text(key)}})
}

pub(super) fn read(key: &[u8]) -> Value {
    json!({"request_range": {"key": text(key)}})
}

pub(super) fn txn(compare: &[Value], success: &[Value], failure: &[Value]) -> Value {
    json!({"compare": compare, "success": success, "failure": failure})
}

pub(super) fn range(key: &[u8]) -> Value {
    json!({"key": text(key)})
}

/// The keys from `first` on that begin with `prefix`; at most `limit`.
pub(super) fn range_from(first: &[u8], prefix: &[u8], limit: u32) -> Value {
    json!({"key": text(first), "range_end": text(&end_of_prefix(prefix)), "limit": limit.to_string()})
}

/// The first key behind all that begin with `prefix`; a zero byte stands for the end of all.
fn end_of_prefix(prefix: &[u8]) -> Vec<u8> {
    let kept = prefix.iter().rposition(|b| *b != 0xff).map_or(0, |last| last + 1);
    let mut end = prefix[..kept].to_vec();
    match end.last_mut() {
        Some(last) => *last += 1,
        None => end = vec![0],
    }
    end
}

pub(super) fn lease_grant(id: i64, ttl_seconds: u64) -> Value {
    json!({"ID": id.to_string(), "TTL": ttl_seconds.to_string()})
}

pub(super) fn lease(id: i64) -> Value {
    json!({"ID": id.to_string()})
}

pub(super) fn watch(key: &[u8], from_revision: i64) -> Value {
    json!({"create_request": {"key": text(key), "start_revision": from_revision.to_string()}})
}

pub(super) fn authenticate(user: &str, password: &str) -> Value {
    json!({"name": user, "password": password})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_as_text_and_zero_is_left_out() {
        let kv: KeyValue =
            serde_json::from_str(r#"{"key":"Zm9v","create_revision":"9223372036854775807","lease":7}"#).unwrap();
        assert_eq!((kv.key.0.as_slice(), kv.create_revision, kv.lease), (b"foo".as_slice(), Int(i64::MAX), Int(7)));
        assert_eq!((kv.value, kv.mod_revision), (Bytes(Vec::new()), Int(0)));
        assert!(serde_json::from_str::<KeyValue>(r#"{"lease":"x"}"#).is_err());
        assert!(serde_json::from_str::<KeyValue>(r#"{"key":"%"}"#).is_err());
    }

    #[test]
    fn the_end_of_a_prefix_is_the_first_key_behind_it() {
        assert_eq!(end_of_prefix(b"a/"), b"a0");
        assert_eq!(end_of_prefix(b"a\xff\xff"), b"b");
        assert_eq!(end_of_prefix(b"\xff"), b"\0");
        assert_eq!(end_of_prefix(b""), b"\0");
    }

    #[test]
    fn errors_are_read_in_each_shape_that_the_gateway_has() {
        let plain: Error = serde_json::from_str(r#"{"code":5,"message":"m"}"#).unwrap();
        assert_eq!((plain.code, plain.message.as_str()), (5, "m"));
        let streamed: Streamed<KeepAlive> =
            serde_json::from_str(r#"{"error":{"grpc_code":14,"http_code":503,"message":"no leader"}}"#).unwrap();
        assert_eq!(streamed.error.unwrap().code, 14);
    }
}
