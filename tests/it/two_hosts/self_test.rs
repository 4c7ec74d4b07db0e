//! The passthrough itself: it must be what the tests of the lock take it for.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Arc, Barrier};
use std::time::{Duration, SystemTime};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, Flock, FlockArg, OFlag, RenameFlags, open, renameat2};
use nix::sys::stat::{Mode, futimens};
use nix::sys::time::TimeSpec;

use super::host::{Server, TwoHosts};

fn create_new(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().read(true).write(true).create_new(true).open(path)
}

fn try_flock(path: &Path) -> Result<Flock<File>, Errno> {
    Flock::lock(File::open(path).unwrap(), FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| errno)
}

fn rename_without_replacing(old: &Path, new: &Path) -> nix::Result<()> {
    renameat2(AT_FDCWD, old, AT_FDCWD, new, RenameFlags::RENAME_NOREPLACE)
}

/// Device aside, what two hosts must agree on.
fn shared(path: &Path) -> (u64, u64, u32, i64, i64) {
    let seen = fs::symlink_metadata(path).unwrap();
    (seen.ino(), seen.size(), seen.mode(), seen.mtime(), seen.mtime_nsec())
}

#[test]
fn a_flock_on_one_host_is_unknown_to_the_other_and_known_on_its_own() {
    let hosts = TwoHosts::new(Server::default());
    fs::write(hosts.a.path("file"), "").unwrap();
    let held = try_flock(&hosts.a.path("file")).expect("free on a");
    assert_eq!(try_flock(&hosts.a.path("file")).err(), Some(Errno::EWOULDBLOCK));
    let held_too = try_flock(&hosts.b.path("file")).expect("free on b, whatever a has");
    assert_eq!(try_flock(&hosts.b.path("file")).err(), Some(Errno::EWOULDBLOCK));
    drop((held, held_too));
    try_flock(&hosts.a.path("file")).expect("free again");
}

#[test]
fn an_open_file_keeps_its_inode_after_its_name_was_given_to_another() {
    let hosts = TwoHosts::new(Server::default());
    let old = create_new(&hosts.a.path("file")).unwrap();
    old.write_all_at(b"old", 0).unwrap();
    let old_inode = old.metadata().unwrap().ino();
    fs::write(hosts.b.path("other"), "new").unwrap();
    fs::rename(hosts.b.path("other"), hosts.b.path("file")).unwrap();
    let new = shared(&hosts.a.path("file"));
    assert_ne!(new.0, old_inode);

    // Everything that goes through the descriptor acts on the file that has no name any more.
    futimens(&old, &TimeSpec::UTIME_OMIT, &TimeSpec::new(1_000_000, 5)).unwrap();
    old.write_all_at(b"OLD, longer", 0).unwrap();
    let mut bytes = [0; 32];
    let count = old.read_at(&mut bytes, 0).unwrap();
    assert_eq!(&bytes[..count], b"OLD, longer");
    futimens(&old, &TimeSpec::UTIME_OMIT, &TimeSpec::new(1_000_000, 5)).unwrap();
    let seen = old.metadata().unwrap();
    assert_eq!(
        (seen.ino(), seen.nlink(), seen.size(), seen.mtime(), seen.mtime_nsec()),
        (old_inode, 0, 11, 1_000_000, 5)
    );

    // And nothing of it touches the successor, seen from wherever.
    for path in [hosts.a.path("file"), hosts.b.path("file"), hosts.backing().join("file")] {
        assert_eq!(shared(&path), new);
        assert_eq!(fs::read(&path).unwrap(), b"new");
    }
}

#[test]
fn an_open_directory_keeps_its_inode_after_its_name_was_given_to_another() {
    let hosts = TwoHosts::new(Server::default());
    fs::create_dir(hosts.a.path("slot")).unwrap();
    let old = open(&hosts.a.path("slot"), OFlag::O_PATH | OFlag::O_DIRECTORY, Mode::empty()).unwrap();
    fs::rename(hosts.b.path("slot"), hosts.b.path("aside")).unwrap();
    fs::create_dir(hosts.b.path("slot")).unwrap();
    let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL;
    nix::fcntl::openat(&old, "claim-0", flags, Mode::S_IRUSR).unwrap();
    assert!(hosts.b.path("aside/claim-0").exists());
    assert!(!hosts.b.path("slot/claim-0").exists());

    fs::remove_file(hosts.b.path("aside/claim-0")).unwrap();
    fs::remove_dir(hosts.b.path("aside")).unwrap();
    assert_eq!(nix::fcntl::openat(&old, "claim-1", flags, Mode::S_IRUSR).err(), Some(Errno::ENOENT));
}

#[test]
fn of_two_hosts_that_create_a_name_exactly_one_wins_in_a_thousand_rounds() {
    const ROUNDS: usize = 1_000;
    let hosts = TwoHosts::new(Server::default());
    let together = Arc::new(Barrier::new(2));
    let contend = |directory: std::path::PathBuf| {
        let together = Arc::clone(&together);
        std::thread::spawn(move || {
            let attempt = |round: usize| {
                together.wait();
                match create_new(&directory.join(format!("claim-{round}"))) {
                    Ok(_) => true,
                    Err(error) if error.kind() == ErrorKind::AlreadyExists => false,
                    Err(error) => panic!("{error}"),
                }
            };
            (0..ROUNDS).map(attempt).collect::<Vec<_>>()
        })
    };
    let (on_a, on_b) = (contend(hosts.a.path("")), contend(hosts.b.path("")));
    let (on_a, on_b) = (on_a.join().unwrap(), on_b.join().unwrap());
    assert!(on_a.iter().zip(&on_b).all(|(a, b)| a != b), "two winners, or none");
    // Unless each wins sometimes they did not contend, and the test has shown nothing.
    assert!(on_a.contains(&true) && on_b.contains(&true));
}

#[test]
fn a_rename_that_must_not_replace_does_not() {
    let hosts = TwoHosts::new(Server::default());
    fs::write(hosts.a.path("old"), "old").unwrap();
    fs::create_dir(hosts.b.path("slot")).unwrap();
    rename_without_replacing(&hosts.a.path("old"), &hosts.a.path("slot/lock")).unwrap();
    assert_eq!(fs::read(hosts.b.path("slot/lock")).unwrap(), b"old");

    fs::write(hosts.b.path("old"), "next").unwrap();
    let refused = rename_without_replacing(&hosts.a.path("old"), &hosts.a.path("slot/lock"));
    assert_eq!(refused, Err(Errno::EEXIST));
    assert_eq!(fs::read(hosts.a.path("old")).unwrap(), b"next");
    assert_eq!(fs::read(hosts.a.path("slot/lock")).unwrap(), b"old");
}

#[test]
fn a_server_that_cannot_refuse_to_replace_says_that_the_argument_is_invalid() {
    let hosts = TwoHosts::new(Server { can_refuse_to_replace: false, ..Server::default() });
    fs::write(hosts.a.path("old"), "").unwrap();
    assert_eq!(rename_without_replacing(&hosts.a.path("old"), &hosts.a.path("new")), Err(Errno::EINVAL));
    fs::rename(hosts.a.path("old"), hosts.a.path("new")).unwrap();
    assert!(hosts.b.path("new").exists() && !hosts.b.path("old").exists());
}

#[test]
fn both_hosts_see_every_change_at_once_and_the_same_inodes_on_different_devices() {
    let hosts = TwoHosts::new(Server::default());
    let file = create_new(&hosts.a.path("file")).unwrap();
    for round in 0..200 {
        match round % 4 {
            0 => file.write_all_at(&[b'x'; 7], round).unwrap(),
            1 => futimens(&file, &TimeSpec::UTIME_OMIT, &TimeSpec::UTIME_NOW).unwrap(),
            2 => file.set_len(round / 2).unwrap(),
            _ => fs::write(hosts.b.path("file"), format!("{round}")).unwrap(),
        }
        let truth = shared(&hosts.backing().join("file"));
        assert_eq!((shared(&hosts.a.path("file")), shared(&hosts.b.path("file"))), (truth, truth), "round {round}");
        assert_eq!(file.metadata().unwrap().size(), truth.1);
    }
    let device = |path: &Path| fs::metadata(path).unwrap().dev();
    assert_ne!(device(&hosts.a.path("file")), device(&hosts.b.path("file")));

    fs::remove_file(hosts.b.path("file")).unwrap();
    assert_eq!(fs::metadata(hosts.a.path("file")).unwrap_err().kind(), ErrorKind::NotFound);
    fs::create_dir(hosts.a.path("file")).unwrap();
    assert!(fs::metadata(hosts.b.path("file")).unwrap().is_dir());
    let listed = |path: &Path| fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>();
    assert_eq!((listed(&hosts.a.path("")), listed(&hosts.b.path(""))), (vec!["file".into()], vec!["file".into()]));
    fs::remove_dir(hosts.a.path("file")).unwrap();
    assert_eq!(listed(&hosts.b.path("")).len(), 0);
}

#[test]
fn appends_of_two_hosts_do_not_overwrite_each_other() {
    let hosts = TwoHosts::new(Server::default());
    let append = |path: &Path| OpenOptions::new().append(true).create(true).open(path).unwrap();
    let (mut on_a, mut on_b) = (append(&hosts.a.path("log")), append(&hosts.b.path("log")));
    for _ in 0..100 {
        on_a.write_all(b"a").unwrap();
        on_b.write_all(b"b").unwrap();
    }
    assert_eq!(fs::read(hosts.a.path("log")).unwrap(), b"ab".repeat(100));
}

#[test]
fn a_large_directory_is_listed_whole_once_and_anew_after_a_change() {
    let hosts = TwoHosts::new(Server::default());
    let mut made: Vec<_> = (0..1_000).map(|n| format!("a-rather-long-name-of-a-file-{n:04}")).collect();
    made.iter().for_each(|name| drop(create_new(&hosts.a.path(name)).unwrap()));
    let listed = || {
        let mut names: Vec<_> = fs::read_dir(hosts.b.path(""))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    };
    assert_eq!(listed(), made);
    fs::remove_file(hosts.a.path(&made.remove(500))).unwrap();
    assert_eq!(listed(), made);
}

#[test]
fn an_unnamed_temporary_file_is_not_supported() {
    let hosts = TwoHosts::new(Server::default());
    let attempt = OpenOptions::new().write(true).custom_flags(OFlag::O_TMPFILE.bits()).open(hosts.a.path(""));
    assert_eq!(attempt.unwrap_err().raw_os_error(), Some(Errno::EOPNOTSUPP as i32));
}

#[test]
fn a_server_of_whole_seconds_shows_no_fractions_anywhere() {
    let hosts = TwoHosts::new(Server { whole_seconds: true, ..Server::default() });
    let file = create_new(&hosts.a.path("file")).unwrap();
    for touch in [TimeSpec::UTIME_NOW, TimeSpec::new(1_000_000, 999_999_999)] {
        futimens(&file, &TimeSpec::UTIME_OMIT, &touch).unwrap();
        let truth = fs::metadata(hosts.backing().join("file")).unwrap().mtime();
        assert_eq!(file.metadata().map(|seen| (seen.mtime(), seen.mtime_nsec())).unwrap(), (truth, 0));
        assert_eq!(
            fs::metadata(hosts.b.path("file")).map(|seen| (seen.mtime(), seen.mtime_nsec())).unwrap(),
            (truth, 0)
        );
    }
}

#[test]
fn a_servers_clock_that_is_off_or_steps_shows_in_new_stamps_alone() {
    const HOUR: Duration = Duration::from_secs(3_600);
    let mut hosts = TwoHosts::new(Server { clock_offset_ms: 3_600_000, ..Server::default() });
    let modified = |path: &Path| fs::metadata(path).unwrap().modified().unwrap();
    let before = SystemTime::now() - Duration::from_secs(1);
    fs::write(hosts.a.path("ahead"), "").unwrap();
    let ahead = modified(&hosts.b.path("ahead"));
    assert!(ahead >= before + HOUR && ahead <= SystemTime::now() + HOUR);

    hosts.step_clock(-3_600_000);
    fs::write(hosts.b.path("behind"), "").unwrap();
    let behind = modified(&hosts.a.path("behind"));
    assert!(behind >= before - HOUR && behind <= SystemTime::now() - HOUR);
    assert_eq!(modified(&hosts.a.path("ahead")), ahead, "what was stamped before keeps its stamp");

    // A stamp that is asked for is the stamp that is seen, on either side of the step.
    for asked in [ahead - Duration::from_secs(5), behind + Duration::from_millis(5), before - 3 * HOUR] {
        OpenOptions::new().write(true).open(hosts.a.path("behind")).unwrap().set_modified(asked).unwrap();
        assert_eq!(modified(&hosts.b.path("behind")), asked);
    }
}

#[test]
fn a_held_call_waits_while_the_other_host_goes_on_and_lands_late() {
    let mut hosts = TwoHosts::new(Server::default());
    fs::write(hosts.a.path("old"), "first").unwrap();
    hosts.a.hold_next("rename", "old");
    let (old, new) = (hosts.a.path("old"), hosts.a.path("new"));
    let late = std::thread::spawn(move || fs::rename(old, new));
    hosts.a.wait_until_held();

    // For the other host all goes on, and the name can change its file.
    fs::write(hosts.b.path("successor"), "second").unwrap();
    fs::rename(hosts.b.path("successor"), hosts.b.path("old")).unwrap();
    assert!(!late.is_finished());
    hosts.a.open_gate();
    late.join().unwrap().unwrap();
    assert_eq!(
        fs::read(hosts.b.path("new")).unwrap(),
        b"second",
        "a rename acts on the name, as it stands when it lands"
    );
}

#[test]
fn a_host_that_hangs_goes_on_where_it_was_and_one_that_dies_fails() {
    let mut hosts = TwoHosts::new(Server::default());
    fs::write(hosts.a.path("file"), "").unwrap();
    hosts.a.stop();
    let path = hosts.a.path("file");
    let (started, on_start) = std::sync::mpsc::channel();
    let late = std::thread::spawn(move || {
        started.send(()).unwrap();
        fs::write(path, "late").map(|()| SystemTime::now())
    });
    on_start.recv().unwrap();
    fs::write(hosts.b.path("file"), "early").unwrap();
    let woken = SystemTime::now();
    hosts.a.go_on();
    assert!(late.join().unwrap().unwrap() >= woken);
    assert_eq!(fs::read(hosts.b.path("file")).unwrap(), b"late");

    hosts.a.kill();
    assert_eq!(fs::metadata(hosts.a.path("file")).unwrap_err().raw_os_error(), Some(Errno::ENOTCONN as i32));
    assert_eq!(fs::read(hosts.b.path("file")).unwrap(), b"late");
}
