//! What stands in a lock file, and how its slot is named. Encode, decode, classify: bytes in, words out.

use std::ffi::{OsStr, OsString};
use std::fmt::{self, Display, Formatter};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::lease::Stamp;

/// The record version this program writes, and the highest that it reads.
pub const VERSION: u32 = 1;
/// No record is longer: a reader reads no more of any file.
pub const MAX_READ_BYTES: usize = 64 * 1024;
/// A lock without a readable record is taken for one only up to this size.
pub const MAX_BLANK_BYTES: usize = 4096;
/// The longest label, in bytes as the record has it: whole or cut short, a record stays below what a truncated one
/// may measure.
pub const MAX_LABEL_BYTES: usize = 1024;
/// The longest name of a command that is kept, in bytes: no file has a longer one.
pub const MAX_COMMAND_BYTES: usize = 255;
/// Every record begins so: it is what tells a lock from a file that somebody pointed us at by mistake.
pub const SIGNATURE: &[u8] = b"{\"withlock\":";

const SLOT_INFIX: &[u8] = b".stale-";
const TRASH_INFIX: &[u8] = b".reclaim-";
/// What a slot's name adds to the lock's: the infix, at most 20 digits, a hyphen, 32 hex digits.
pub const SLOT_SUFFIX_BYTES: usize = SLOT_INFIX.len() + 20 + 1 + 32;

/// An epoch's identity: 32 lower-case hex digits, 16 bytes from the operating system's CSPRNG.
///
/// Never a counter, pid or time: that no two epochs share a slot name rests on it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Nonce([u8; 32]);

impl Nonce {
    /// From 16 random bytes.
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        const HEX: &[u8; 16] = b"0123456789abcdef";
        let mut digits = [0; 32];
        for (pair, byte) in digits.chunks_exact_mut(2).zip(bytes) {
            pair[0] = HEX[usize::from(byte >> 4)];
            pair[1] = HEX[usize::from(byte & 15)];
        }
        Nonce(digits)
    }

    /// From exactly 32 lower-case hex digits.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let digits: [u8; 32] = text.try_into().ok()?;
        digits.iter().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')).then_some(Nonce(digits))
    }

    /// The stand-in for the nonce of a blank lock, made of what every observer of it sees alike: inode
    /// and time stamp. Not of the device, which differs between hosts.
    pub fn of_blank(inode: u64, mtime: Stamp) -> Self {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&inode.to_be_bytes());
        bytes[8..].copy_from_slice(&mtime.ns().to_be_bytes()[8..]);
        Nonce::from_bytes(bytes)
    }

    /// Whether this is the stand-in for a blank lock with this inode, whatever its time stamp.
    pub fn is_of_blank(&self, inode: u64) -> bool {
        self.0[..16] == Nonce::from_bytes([inode.to_be_bytes(), [0; 8]].concat().try_into().unwrap_or_default()).0[..16]
    }

    /// The digits.
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).unwrap_or_default()
    }
}

impl Display for Nonce {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        out.write_str(self.as_str())
    }
}

impl fmt::Debug for Nonce {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        out.write_str(self.as_str())
    }
}

impl Serialize for Nonce {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl<'de> Deserialize<'de> for Nonce {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Nonce::parse(text.as_bytes()).ok_or_else(|| serde::de::Error::custom("not 32 lower-case hex digits"))
    }
}

/// Who has the kernel's guard on the lock file, as the holder wrote it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Guard {
    /// The holder and COMMAND, and whatever COMMAND leaves it to.
    Inherited,
    /// The holder alone (`--close`, or a keeper).
    Wrapper,
    /// No process: the wrapper of a running command keeps its lease at a lock service, which ends the lock
    /// when that runs out.
    Lease,
    /// Nobody: the file system has no locks, or the lock is not renewed by a process.
    None,
}

/// The record: one line of JSON, written once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Version and signature; stays the first field.
    #[serde(rename = "withlock")]
    pub version: u32,
    /// The epoch's identity.
    pub nonce: Nonce,
    /// When the holder began to take it, by its own wall clock.
    pub claimed_at_ms: u64,
    /// The holder's promise: older than this without a renewal, and I am dead.
    pub ttl_ms: u64,
    /// For people only; never used to judge, like all that follows up to `command`.
    pub host: String,
    /// The boot during which it was written.
    pub boot_id: String,
    /// The wrapper's pid, in its own pid namespace.
    pub pid: u32,
    /// The wrapper's start time in clock ticks since boot: with the pid it names one process.
    pub pid_started: u64,
    /// The wrapper's effective user.
    pub uid: u32,
    /// Base name of `argv[0]` only: arguments carry secrets.
    pub command: String,
    /// Who has the guard.
    pub guard: Guard,
    /// The file's device, as the holder's host numbers it.
    pub dev: u64,
    /// What the operator called it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// The fencing token that was reserved with the grant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fence: Option<u64>,
}

impl Record {
    /// The line to be written, with its line feed.
    pub fn encode(&self) -> Vec<u8> {
        let mut line = serde_json::to_vec(self).unwrap_or_default();
        line.push(b'\n');
        line
    }

    /// The ttl to judge by: no promise is shorter than the least that can be asked for, whatever the
    /// record says.
    pub fn judged_ttl_ms(&self) -> u64 {
        self.ttl_ms.max(crate::lease::MIN_TTL_MS)
    }
}

/// How many bytes a text takes in a record: a control character takes six.
pub fn encoded_bytes(text: &str) -> usize {
    serde_json::to_string(text).map_or(usize::MAX, |quoted| quoted.len() - 2)
}

/// What the content of a regular file says about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// A record.
    Record(Box<Record>),
    /// A lock whose maker died between create and write, or a power cut: empty, only NUL bytes, or the
    /// beginning of a record.
    Blank,
    /// A record of a version that this program does not know.
    Newer(u32),
    /// Not a lock at all.
    Foreign,
}

/// What stands where a lock should, if it is none that this program can read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Foreign {
    /// No lock at all; what it is.
    NoLock(String),
    /// A lock, of this version.
    Newer(u32),
}

impl std::fmt::Display for Foreign {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Foreign::NoLock(what) => out.write_str(what),
            Foreign::Newer(version) => {
                write!(out, "a lock of a newer withlock (record version {version}; this one reads {VERSION})")
            }
        }
    }
}

impl Foreign {
    /// Why nothing can be done with it.
    pub fn refusal(&self) -> String {
        match self {
            Foreign::NoLock(what) => format!("not a withlock lock: {what}"),
            Foreign::Newer(_) => self.to_string(),
        }
    }
}

/// Classifies a file by its first bytes (up to [`MAX_READ_BYTES`]) and its whole size.
pub fn classify(bytes: &[u8], size_bytes: u64) -> Content {
    if let Some(version) = bytes.strip_prefix(SIGNATURE).and_then(leading_number)
        && version > u64::from(VERSION)
    {
        return Content::Newer(u32::try_from(version).unwrap_or(u32::MAX));
    }
    let complete = u64::try_from(bytes.len()) == Ok(size_bytes);
    if complete
        && bytes.starts_with(SIGNATURE)
        && let Ok(record) = serde_json::from_slice::<Record>(bytes)
        && record.version == VERSION
    {
        return Content::Record(Box::new(record));
    }
    let small = size_bytes <= MAX_BLANK_BYTES as u64;
    let zeroed = bytes.iter().all(|b| *b == 0);
    let beginning = bytes.starts_with(SIGNATURE) || SIGNATURE.starts_with(trim_nul(bytes));
    if small && (zeroed || beginning) { Content::Blank } else { Content::Foreign }
}

fn trim_nul(bytes: &[u8]) -> &[u8] {
    let end = bytes.iter().rposition(|b| *b != 0).map_or(0, |last| last + 1);
    &bytes[..end]
}

/// The number at the start, only if something other than a digit follows it: a cut number says nothing.
fn leading_number(bytes: &[u8]) -> Option<u64> {
    let digits = bytes.iter().take_while(|b| b.is_ascii_digit()).count();
    if digits == 0 || digits == bytes.len() {
        return None;
    }
    Some(std::str::from_utf8(&bytes[..digits]).ok()?.parse().unwrap_or(u64::MAX))
}

/// The name of the one place where an epoch can be ended by anybody but its punctual holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotName {
    /// When the epoch began, by its holder's clock (for a blank lock, its time stamp).
    pub claimed_at_ms: u64,
    /// The epoch's nonce, or its stand-in.
    pub nonce: Nonce,
}

impl SlotName {
    /// The slot of an epoch that has a record.
    pub fn of(record: &Record) -> Self {
        SlotName { claimed_at_ms: record.claimed_at_ms, nonce: record.nonce }
    }

    /// The slot of a blank lock.
    pub fn of_blank(inode: u64, mtime: Stamp) -> Self {
        SlotName { claimed_at_ms: u64::try_from(mtime.ms()).unwrap_or(0), nonce: Nonce::of_blank(inode, mtime) }
    }

    /// The slot's file name beside the lock named `lock`.
    pub fn file_name(&self, lock: &OsStr) -> OsString {
        let mut name = lock.as_bytes().to_vec();
        name.extend_from_slice(SLOT_INFIX);
        name.extend_from_slice(self.claimed_at_ms.to_string().as_bytes());
        name.push(b'-');
        name.extend_from_slice(&self.nonce.0);
        OsString::from_vec(name)
    }

    /// Reads a name back, if it is exactly what [`SlotName::file_name`] makes for `lock`.
    pub fn parse(lock: &OsStr, name: &OsStr) -> Option<Self> {
        let (found, slot) = Self::split(name)?;
        (found == lock).then_some(slot)
    }

    /// Splits any slot's name into its lock's name and the slot.
    pub fn split(name: &OsStr) -> Option<(&OsStr, Self)> {
        let bytes = name.as_bytes();
        let (rest, nonce) = bytes.split_at_checked(bytes.len().checked_sub(32)?)?;
        let nonce = Nonce::parse(nonce)?;
        let rest = rest.strip_suffix(b"-")?;
        let digits = rest.iter().rev().take_while(|b| b.is_ascii_digit()).count();
        let (rest, number) = rest.split_at(rest.len() - digits);
        let claimed_at_ms = canonical_number(number)?;
        let lock = rest.strip_suffix(SLOT_INFIX)?;
        (!lock.is_empty()).then_some((OsStr::from_bytes(lock), SlotName { claimed_at_ms, nonce }))
    }
}

/// The private name that a slot is moved to before it is deleted.
pub fn trash_name(lock: &OsStr, nonce: &Nonce) -> OsString {
    let mut name = lock.as_bytes().to_vec();
    name.extend_from_slice(TRASH_INFIX);
    name.extend_from_slice(&nonce.0);
    OsString::from_vec(name)
}

/// The lock's name in a private name made by [`trash_name`].
pub fn split_trash(name: &OsStr) -> Option<&OsStr> {
    let bytes = name.as_bytes();
    let (rest, nonce) = bytes.split_at_checked(bytes.len().checked_sub(32)?)?;
    Nonce::parse(nonce)?;
    let lock = rest.strip_suffix(TRASH_INFIX)?;
    (!lock.is_empty()).then_some(OsStr::from_bytes(lock))
}

/// Whether a name looks like a quarantine's to a careless eye. Most that do are; see [`SlotName::split`]
/// and [`split_trash`].
pub fn is_quarantine_like(name: &OsStr) -> bool {
    [SLOT_INFIX, TRASH_INFIX].iter().any(|infix| name.as_bytes().windows(infix.len()).any(|w| w == *infix))
}

/// A decimal number as this program writes it: no sign, no leading zero, at most 2^64-1.
pub fn canonical_number(digits: &[u8]) -> Option<u64> {
    let plain = digits == b"0" || (!digits.is_empty() && digits[0] != b'0' && digits.iter().all(u8::is_ascii_digit));
    if !plain {
        return None;
    }
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// The name of a claim file, in a slot and in a directory of reserved numbers.
pub fn claim_name(number: u64) -> String {
    format!("claim-{number}")
}

/// The number in a claim's name, if it is one.
pub fn claim_number(name: &OsStr) -> Option<u64> {
    canonical_number(name.as_bytes().strip_prefix(b"claim-")?)
}

/// Why an epoch was ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Why {
    /// It was older than its ttl.
    Stale,
    /// An operator broke it.
    Break,
    /// Its own holder, or whoever had its nonce, found another already in the slot's place.
    LateRelease,
}

/// What an ender writes into its claim: who ended the epoch, when and why. An audit trail; nothing reads
/// it to decide.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// Why the epoch was ended.
    pub why: Why,
    /// When, by the ender's wall clock.
    pub at_ms: u64,
    /// The ender's host.
    pub host: String,
    /// The ender's pid.
    pub pid: u32,
    /// The ender's effective user.
    pub uid: u32,
    /// The ttl that was judged, for whoever finds the slot without its record.
    pub ttl_ms: u64,
    /// The operator's own words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Record {
        Record {
            version: VERSION,
            nonce: Nonce::from_bytes([0xab; 16]),
            claimed_at_ms: 1_700_000_000_123,
            ttl_ms: 60_000,
            host: "web1".into(),
            boot_id: "b".into(),
            pid: 4711,
            pid_started: 99,
            uid: 1000,
            command: "backup.sh".into(),
            guard: Guard::Inherited,
            dev: 2049,
            label: None,
            fence: None,
        }
    }

    fn classified(bytes: &[u8]) -> Content {
        classify(bytes, bytes.len() as u64)
    }

    #[test]
    fn a_record_is_one_line_that_begins_with_its_signature_and_reads_back() {
        let line = sample().encode();
        assert!(line.starts_with(b"{\"withlock\":1,\"nonce\":\"abab"));
        assert_eq!(line.iter().filter(|b| **b == b'\n').count(), 1);
        assert_eq!(classified(&line), Content::Record(Box::new(sample())));
    }

    #[test]
    fn every_beginning_of_a_record_is_a_blank_lock() {
        let line = sample().encode();
        for cut in 0..line.len() - 1 {
            let mut padded = line[..cut].to_vec();
            if cut < line.len() - 2 {
                assert_eq!(classified(&padded), Content::Blank, "cut at {cut}");
                padded.resize(line.len(), 0);
                assert_eq!(classified(&padded), Content::Blank, "cut at {cut}, then NUL");
            }
        }
    }

    #[test]
    fn what_does_not_begin_like_a_record_is_foreign() {
        for bytes in
            [b"#!/bin/sh\n".as_slice(), b"\n", b"{\"access_token\":1}", b"\0\0x", b"12345\n", b" {\"withlock\":1"]
        {
            assert_eq!(classified(bytes), Content::Foreign, "{}", crate::text::Shown(bytes));
        }
        assert_eq!(classified(&[0; MAX_BLANK_BYTES]), Content::Blank);
        assert_eq!(classified(&[0; MAX_BLANK_BYTES + 1]), Content::Foreign);
        assert_eq!(classify(&[0; 10], 1 << 30), Content::Foreign);
    }

    #[test]
    fn unknown_fields_are_accepted_and_a_higher_version_is_refused() {
        let mut text = String::from_utf8(sample().encode()).unwrap();
        text.insert_str(text.len() - 2, ",\"later\":[1,{}]");
        assert!(matches!(classified(text.as_bytes()), Content::Record(_)));
        let newer = text.replacen(":1,", ":2,", 1);
        assert_eq!(classified(newer.as_bytes()), Content::Newer(2));
        assert_eq!(classified(b"{\"withlock\":99999999999999999999999,"), Content::Newer(u32::MAX));
    }

    #[test]
    fn a_broken_record_is_a_blank_lock_so_that_it_can_be_broken() {
        let text = String::from_utf8(sample().encode()).unwrap();
        for (from, to) in [("abab", "ABab"), ("60000", "-1"), ("\"inherited\"", "\"x\""), ("}", "}}"), (":1,", ":0,")] {
            assert_eq!(classified(text.replacen(from, to, 1).as_bytes()), Content::Blank, "{from} -> {to}");
        }
    }

    #[test]
    fn a_slot_name_reads_back_for_its_own_lock_only() {
        let slot = SlotName::of(&sample());
        let name = slot.file_name(OsStr::new("a.lock"));
        assert_eq!(name, OsString::from(format!("a.lock.stale-1700000000123-{}", "ab".repeat(16))));
        assert_eq!(SlotName::parse(OsStr::new("a.lock"), &name), Some(slot));
        assert_eq!(SlotName::parse(OsStr::new("a.loc"), &name), None);
        let long = SlotName { claimed_at_ms: u64::MAX, ..slot };
        assert_eq!(long.file_name(OsStr::new("")).len(), SLOT_SUFFIX_BYTES);
        assert_eq!(SlotName::parse(OsStr::new("x"), &long.file_name(OsStr::new("x"))), Some(long));
    }

    #[test]
    fn names_that_only_look_similar_are_not_slots() {
        let nonce = "ab".repeat(16);
        for name in [
            format!("L.stale-01-{nonce}"),
            format!("L.stale--{nonce}"),
            format!("L.stale-1-{}", nonce.to_uppercase()),
            format!("L.stale-1-{nonce}0"),
            format!("L.stale-18446744073709551616-{nonce}"),
            format!(".stale-1-{nonce}"),
            format!("L.stale-1{nonce}"),
        ] {
            assert_eq!(SlotName::split(OsStr::new(&name)), None, "{name}");
        }
    }

    #[test]
    fn blank_locks_of_different_time_or_inode_never_share_a_slot() {
        let (a, b) = (Stamp::new(5, 1), Stamp::new(5, 2));
        assert_ne!(SlotName::of_blank(7, a), SlotName::of_blank(7, b));
        assert_ne!(SlotName::of_blank(7, a), SlotName::of_blank(8, a));
        assert_eq!(SlotName::of_blank(7, a).claimed_at_ms, 5_000);
        assert_eq!(SlotName::of_blank(7, Stamp::new(-5, 0)).claimed_at_ms, 0);
    }

    #[test]
    fn claim_numbers_are_canonical_decimals_up_to_the_last() {
        assert_eq!(claim_number(OsStr::new("claim-18446744073709551615")), Some(u64::MAX));
        assert_eq!(claim_number(OsStr::new(&claim_name(0))), Some(0));
        for name in ["claim-", "claim-00", "claim-+1", "claim-18446744073709551616", "claim-1x", "xclaim-1"] {
            assert_eq!(claim_number(OsStr::new(name)), None, "{name}");
        }
    }
}
