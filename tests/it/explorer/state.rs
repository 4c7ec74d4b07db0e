//! The state of the world as a number.
//!
//! An actor is deterministic: what it does next follows from what its calls have returned so far (its
//! randomness is counted, its clocks move only by the schedule's events). So the state of the world is:
//! every actor's history, what lies on the disk, the clocks, what the schedule may still do, and what the
//! monitor remembers. Two schedules that lead to the same state have the same futures, and one of them is
//! enough. In histories and on the disk an inode is named by its maker and the maker's count, so that two
//! steps that do not concern each other lead to the same state in either order: this is what a
//! partial-order reduction would cut away, and it cannot cut too much, because nothing is assumed about
//! which steps commute. The number has 64 bits; that two of a million states share one has a chance of
//! less than 1 in 10 million.

use std::ffi::OsStr;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use withlock::record::SlotName;

use super::world::{ActorState, Life, Shared, World};

/// The first bytes of every made-up nonce: no inode begins so.
pub(super) const NONCE_MARK: [u8; 2] = [0x5e, 0xed];

/// A file name with the inode in it, if it is a blank lock's slot, replaced by its canonical number.
pub(super) fn canonical_name(world: &World, name: &OsStr) -> u64 {
    let mut hasher = DefaultHasher::new();
    match SlotName::split(name) {
        Some((lock, slot)) if !slot.nonce.as_str().starts_with("5eed") => {
            let inode = u64::from_str_radix(&slot.nonce.as_str()[..16], 16).unwrap_or(0);
            (lock, slot.claimed_at_ms, world.known_number(inode), &slot.nonce.as_str()[16..]).hash(&mut hasher);
        }
        _ => name.as_bytes().hash(&mut hasher),
    }
    hasher.finish()
}

fn directory_key(world: &World, path: &Path) -> u64 {
    let mut entries = Vec::new();
    for entry in fs::read_dir(path).into_iter().flatten().flatten() {
        let path = entry.path();
        let Ok(stat) = fs::symlink_metadata(&path) else { continue };
        let inside = if stat.is_dir() { directory_key(world, &path) } else { stat.size() };
        let number = world.known_number(stat.ino());
        entries.push((canonical_name(world, &entry.file_name()), number, stat.mode(), stat.mtime(), inside));
    }
    entries.sort_unstable();
    let mut hasher = DefaultHasher::new();
    entries.hash(&mut hasher);
    hasher.finish()
}

/// The state as somebody finds it who comes when all are done, but perhaps one that stalls: what lies on
/// the disk, and what the one will do when it wakes. What the others have seen is past.
pub(super) fn end_key(shared: &Shared, world: &World, stalled: Option<usize>) -> u64 {
    let mut hasher = DefaultHasher::new();
    directory_key(world, &shared.dir).hash(&mut hasher);
    (stalled, stalled.map(|actor| (world.actors[actor].history, world.actors[actor].held.is_some()))).hash(&mut hasher);
    (shared.clock.wall_ms(), shared.clock.now().boot_ms).hash(&mut hasher);
    hasher.finish()
}

/// The state of the world. What lies on the disk is read, not derived: only the rest is bookkeeping.
pub(super) fn key(shared: &Shared, world: &mut World) -> u64 {
    let on_disk = match world.fs_key {
        Some(known) => known,
        None => directory_key(world, &shared.dir),
    };
    world.fs_key = Some(on_disk);
    let mut hasher = DefaultHasher::new();
    on_disk.hash(&mut hasher);
    for actor in &world.actors {
        (actor.life, actor.history, actor.at_boundary, actor.stalled_ms).hash(&mut hasher);
    }
    let is_of_consequence = |inode: u64| {
        let is_held =
            |actor: &ActorState| actor.life == Life::Alive && [actor.held, actor.newborn].contains(&Some(inode));
        world.at_path == Some(inode) || world.actors.iter().any(is_held)
    };
    for epoch in world.epochs.iter().filter(|epoch| is_of_consequence(epoch.inode)) {
        (world.known_number(epoch.inode), epoch.stamped_ms, epoch.confirmed, epoch.ended_by).hash(&mut hasher);
    }
    (shared.clock.wall_ms(), shared.clock.now().boot_ms).hash(&mut hasher);
    world.search.budget().hash(&mut hasher);
    if world.search.is_bounded() {
        world.current.hash(&mut hasher);
    }
    hasher.finish()
}
