//! File systems of their own for a test, in images and in memory.
//!
//! They are mounted in a mount namespace that only this test's thread and its children are in: when the
//! last of them is gone, however it ended, the kernel unmounts them and detaches their loop devices. Needs
//! root, losetup(8) by way of mount(8), and mkfs(8) for each kind.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use tempfile::TempDir;

use crate::harness::{Sandbox, eventually};

/// Enough for any of them; the images have holes.
const IMAGE_BYTES: u64 = 320 << 20;

/// A kind of file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Ext4,
    Xfs,
    Btrfs,
    Tmpfs,
    /// Its layers are in memory.
    Overlay,
}

impl Kind {
    /// As the kernel calls it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Kind::Ext4 => "ext4",
            Kind::Xfs => "xfs",
            Kind::Btrfs => "btrfs",
            Kind::Tmpfs => "tmpfs",
            Kind::Overlay => "overlay",
        }
    }

    /// Whether the kernel has it, or can load it.
    fn exists(self) -> bool {
        let known = || fs::read_to_string("/proc/filesystems").unwrap_or_default();
        let listed = || known().lines().any(|line| line.split_whitespace().last() == Some(self.name()));
        listed() || (Command::new("modprobe").arg("-q").arg(self.name()).status().is_ok() && listed())
    }
}

/// Runs `test` with a sandbox on a fresh file system of this kind.
pub(super) fn on_a_mounted(kind: Kind, test: impl FnOnce(&Sandbox) + Send) {
    if !kind.exists() {
        println!("SKIPPED: this kernel has no {}", kind.name());
        return;
    }
    // The namespace is that of a thread, and ends with it.
    std::thread::scope(|scope| {
        let tested = scope.spawn(|| {
            unshare(CloneFlags::CLONE_NEWNS).expect("a mount namespace of our own (needs root)");
            mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
                .expect("mounts of our own");
            let dir = TempDir::with_prefix("withlock-mount-").expect("a directory");
            let top = dir.path().join("mounted");
            fs::create_dir(&top).expect("a directory");
            let device = mount_at(kind, dir.path(), &top);
            let sandbox = Sandbox::on(&top);
            test(&sandbox);
            drop(sandbox);
            umount2(&top, MntFlags::empty()).expect("nothing is in use any more");
            if kind == Kind::Overlay {
                umount2(&dir.path().join("layers"), MntFlags::empty()).expect("the layers are of no use any more");
            }
            if let Some(device) = device {
                eventually("the loop device is free", || {
                    let backing = fs::read_to_string(device.join("loop/backing_file")).unwrap_or_default();
                    if backing.starts_with(&*dir.path().to_string_lossy()) { Err(backing) } else { Ok(()) }
                });
            }
        });
        if let Err(panic) = tested.join() {
            std::panic::resume_unwind(panic);
        }
    });
}

/// Mounts; the loop device's directory in /sys, if there is one.
fn mount_at(kind: Kind, dir: &Path, top: &Path) -> Option<std::path::PathBuf> {
    let in_memory = |at: &Path| {
        mount(Some("tmpfs"), at, Some("tmpfs"), MsFlags::empty(), None::<&str>).expect("a tmpfs");
    };
    match kind {
        Kind::Tmpfs => in_memory(top),
        Kind::Overlay => {
            let layers = dir.join("layers");
            fs::create_dir(&layers).expect("a directory");
            in_memory(&layers);
            for layer in ["lower", "upper", "aside"] {
                fs::create_dir(layers.join(layer)).expect("a layer");
            }
            let at = layers.display();
            let options = format!("lowerdir={at}/lower,upperdir={at}/upper,workdir={at}/aside");
            mount(Some("overlay"), top, Some("overlay"), MsFlags::empty(), Some(&*options)).expect("an overlay");
        }
        Kind::Ext4 | Kind::Xfs | Kind::Btrfs => {
            let image = dir.join("image");
            File::create(&image).and_then(|file| file.set_len(IMAGE_BYTES)).expect("an image");
            succeed(Command::new(format!("mkfs.{}", kind.name())).arg("-q").arg(&image));
            succeed(Command::new("mount").args(["-o", "loop", "-t", kind.name()]).arg(&image).arg(top));
            let found = Command::new("findmnt").args(["-n", "-o", "SOURCE"]).arg(top).output().expect("findmnt(8)");
            let device = String::from_utf8_lossy(&found.stdout).trim().replace("/dev/", "");
            return Some(Path::new("/sys/block").join(device));
        }
    }
    None
}

#[track_caller]
fn succeed(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}
