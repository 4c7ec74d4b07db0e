//! The beginning of a scenario, laid out on the disk.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use withlock::lease::Stamp;
use withlock::record::{Guard, Nonce, Record, SlotName, VERSION};
use withlock::sys::process::boot_id;

use super::scenario::{Given, Occupant, Scenario};
use super::state::NONCE_MARK;
use super::world::{LOCK, Shared, World};

/// The nonce of the epoch that is there at the beginning.
pub(super) fn given_nonce() -> Nonce {
    let mut bytes = [0xff; 16];
    bytes[..2].copy_from_slice(&NONCE_MARK);
    Nonce::from_bytes(bytes)
}

fn record(dir: &Path, at_ms: i64, has_host: bool) -> Record {
    Record {
        version: VERSION,
        nonce: given_nonce(),
        claimed_at_ms: at_ms.unsigned_abs(),
        ttl_ms: super::world::TTL_MS,
        host: "gone".into(),
        boot_id: if has_host { "gone".into() } else { boot_id() },
        pid: 1,
        pid_started: 1,
        uid: 0,
        command: "gone".into(),
        guard: Guard::Inherited,
        dev: fs::metadata(dir).map_or(0, |stat| stat.dev()),
        label: None,
        fence: None,
    }
}

fn stamp(path: &Path, at_ms: i64) {
    let time = SystemTime::UNIX_EPOCH + Duration::from_millis(at_ms.unsigned_abs());
    File::open(path).and_then(|file| file.set_modified(time)).expect("setting a time stamp");
}

/// Empties the directory.
pub(super) fn clear(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if fs::remove_file(&path).is_err() {
            fs::remove_dir_all(&path).expect("clearing a directory of a schedule");
        }
    }
}

/// Lays out what the scenario begins with.
pub(super) fn lay_out(shared: &Shared, world: &mut World, scenario: &Scenario) {
    let now_ms = shared.clock.wall_ms();
    let lock = shared.dir.join(LOCK);
    let has_host = !scenario.is_one_host();
    let inode = |path: &Path| fs::symlink_metadata(path).map_or(0, |stat| stat.ino());
    let mut slot: Option<PathBuf> = None;
    for given in &scenario.given {
        match *given {
            Given::Epoch { age_ms } | Given::Blank { age_ms } => {
                let at_ms = now_ms - age_ms.cast_signed();
                let record = record(&shared.dir, at_ms, has_host);
                let is_blank = matches!(given, Given::Blank { .. });
                fs::write(&lock, if is_blank { Vec::new() } else { record.encode() }).expect("writing a lock");
                stamp(&lock, at_ms);
                world.given(inode(&lock));
                world.given_epoch(inode(&lock), at_ms);
                let name = if is_blank {
                    SlotName::of_blank(inode(&lock), Stamp::from_ms(at_ms))
                } else {
                    SlotName::of(&record)
                };
                slot = Some(shared.dir.join(name.file_name(OsStr::new(LOCK))));
            }
            Given::Slot { claims } => {
                let slot = slot.clone().expect("an epoch before its slot");
                fs::create_dir(&slot).expect("making a slot");
                for claim in 0..claims {
                    let path = slot.join(format!("claim-{claim}"));
                    fs::write(&path, b"").expect("making a claim");
                    stamp(&path, now_ms);
                    world.given(inode(&path));
                }
                stamp(&slot, now_ms);
                world.given(inode(&slot));
            }
            Given::Stranger(occupant) => {
                let slot = slot.clone().expect("an epoch before its slot");
                match occupant {
                    Occupant::File => fs::write(&slot, b"a stranger's").expect("making a file"),
                    Occupant::Symlink => symlink("/nowhere/at/all", &slot).expect("making a link"),
                    Occupant::Directory | Occupant::LastClaim | Occupant::Ended => {
                        fs::create_dir(&slot).expect("making a directory");
                        let inside = match occupant {
                            Occupant::LastClaim => "claim-18446744073709551615",
                            Occupant::Ended => "lock",
                            _ => "stranger",
                        };
                        fs::write(slot.join(inside), b"").expect("making a file");
                        stamp(&slot.join(inside), now_ms);
                        world.given(inode(&slot.join(inside)));
                    }
                }
                if occupant != Occupant::Symlink {
                    stamp(&slot, now_ms);
                }
                world.given(inode(&slot));
            }
        }
    }
}
