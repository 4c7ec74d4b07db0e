//! Lock files, slots and time stamps, made and read by the tests themselves.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use nix::fcntl::AT_FDCWD;
use nix::sys::stat::{UtimensatFlags, utimensat};
use nix::sys::time::TimeSpec;
use withlock::record::{Content, Guard, Nonce, Record, SlotName, VERSION, classify};

/// Ages at which a blank lock is surely young, and surely stale, in milliseconds.
pub(crate) const fn blank_ages_ms() -> (u64, u64) {
    (50_000, 61_000)
}

/// A valid record as a holder on this host would write it, without a guard, which a test may change.
pub(crate) fn planted(ttl_ms: u64) -> Record {
    let mut random = [0; 16];
    let mut source = fs::File::open("/dev/urandom").expect("/dev/urandom");
    std::io::Read::read_exact(&mut source, &mut random).expect("random bytes");
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("boot_id");
    Record {
        version: VERSION,
        nonce: Nonce::from_bytes(random),
        claimed_at_ms: unix_ms(SystemTime::now()),
        ttl_ms,
        host: nix::unistd::gethostname().expect("a host name").to_string_lossy().into_owned(),
        boot_id: boot_id.trim().to_owned(),
        pid: 4_194_303,
        pid_started: 1,
        uid: 0,
        command: "dead-job".into(),
        guard: Guard::None,
        dev: 0,
        label: None,
        fence: None,
    }
}

fn unix_ms(time: SystemTime) -> u64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).expect("after 1970");
    u64::try_from(since.as_millis()).expect("before the end of time")
}

/// Writes `record` to `path`, last renewed `age_ms` ago.
pub(crate) fn plant(path: &Path, record: &Record, age_ms: u64) {
    let mut record = record.clone();
    let parent = path.parent().expect("a parent");
    record.dev = fs::metadata(parent).expect("the parent").dev();
    plant_bytes(path, &record.encode(), age_ms);
}

/// Writes `bytes` to `path`, last changed `age_ms` ago.
pub(crate) fn plant_bytes(path: &Path, bytes: &[u8], age_ms: u64) {
    fs::write(path, bytes).expect("a planted file");
    age(path, age_ms);
}

/// Sets the time stamp back: last changed `age_ms` ago.
pub(crate) fn age(path: &Path, age_ms: u64) {
    set_mtime(path, SystemTime::now() - Duration::from_millis(age_ms));
}

/// Sets the time stamp, of a symlink itself too.
pub(crate) fn set_mtime(path: &Path, time: SystemTime) {
    let since = match time.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(after) => TimeSpec::from_duration(after),
        Err(before) => TimeSpec::new(-i64::try_from(before.duration().as_secs()).expect("seconds") - 1, 0),
    };
    utimensat(AT_FDCWD, path, &since, &since, UtimensatFlags::NoFollowSymlink)
        .unwrap_or_else(|error| panic!("utimensat {}: {error}", path.display()));
}

/// The time stamp of a file.
#[track_caller]
pub(crate) fn mtime(path: &Path) -> SystemTime {
    fs::symlink_metadata(path).and_then(|meta| meta.modified()).unwrap_or_else(|error| panic!("{path:?}: {error}"))
}

/// The inode at a path, if there is one.
pub(crate) fn inode(path: &Path) -> Option<u64> {
    fs::symlink_metadata(path).ok().map(|meta| meta.ino())
}

/// The record at a path, if a complete one is there.
pub(crate) fn record(path: &Path) -> Option<Record> {
    let bytes = fs::read(path).ok()?;
    match classify(&bytes, bytes.len() as u64) {
        Content::Record(record) => Some(*record),
        _ => None,
    }
}

/// Waits until a record is at `path`.
#[track_caller]
pub(crate) fn with_record(path: &Path) -> Record {
    super::eventually("a record is there", || record(path).ok_or_else(|| fs::read(path)))
}

/// One slot of a lock.
#[derive(Clone, Debug)]
pub(crate) struct Quarantined {
    pub(crate) path: PathBuf,
    pub(crate) name: SlotName,
    /// The dead owner's file, if the slot has it: `lock` in a directory, or the slot itself.
    pub(crate) lock: Option<Vec<u8>>,
}

/// The slots of `lock`, in the order of their names.
pub(crate) fn slots(lock: &Path) -> Vec<Quarantined> {
    let (dir, base) = (lock.parent().expect("a parent"), lock.file_name().expect("a name"));
    let mut found: Vec<Quarantined> = fs::read_dir(dir)
        .expect("the directory of the lock")
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let name = SlotName::parse(base, path.file_name()?)?;
            let lock = fs::read(path.join("lock")).or_else(|_| fs::read(&path)).ok();
            Some(Quarantined { path, name, lock })
        })
        .collect();
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found
}

/// The claims in a slot, by number.
pub(crate) fn claims_in(slot: &Path) -> BTreeMap<u64, serde_json::Value> {
    let entries = fs::read_dir(slot).expect("a slot directory").filter_map(Result::ok);
    let numbered = entries.filter_map(|entry| {
        let number = withlock::record::claim_number(&entry.file_name())?;
        Some((number, serde_json::from_slice(&fs::read(entry.path()).ok()?).unwrap_or_default()))
    });
    numbered.collect()
}

/// All that a change to a file would show.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Snapshot {
    inode: u64,
    mode: u32,
    owner: (u32, u32),
    modified_ns: i128,
    content: Vec<u8>,
}

impl Snapshot {
    /// Of what is at `path` itself; a symlink is not followed.
    #[track_caller]
    pub(crate) fn of(path: &Path) -> Self {
        let meta = fs::symlink_metadata(path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
        let content = if meta.is_symlink() {
            fs::read_link(path).expect("a link").as_os_str().as_bytes().to_vec()
        } else if meta.is_file() {
            fs::read(path).expect("a file")
        } else {
            Vec::new()
        };
        Snapshot {
            inode: meta.ino(),
            mode: meta.mode(),
            owner: (meta.uid(), meta.gid()),
            modified_ns: i128::from(meta.mtime()) * 1_000_000_000 + i128::from(meta.mtime_nsec()),
            content,
        }
    }
}

/// Everything below `top`, `top` itself left out.
pub(crate) fn tree(top: &Path) -> BTreeMap<PathBuf, Snapshot> {
    let mut found = BTreeMap::new();
    let mut next = vec![top.to_owned()];
    while let Some(dir) = next.pop() {
        for entry in fs::read_dir(&dir).expect("a directory").filter_map(Result::ok) {
            let path = entry.path();
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                next.push(path.clone());
            }
            let snapshot = Snapshot::of(&path);
            found.insert(path, snapshot);
        }
    }
    found
}
