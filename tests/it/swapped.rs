//! Entries that a stranger exchanges under whoever reads them: the lock, its quarantine, what lies in that,
//! the lock and the floor of a directory of numbers; for a FIFO, links, a directory, a device, a socket, a
//! file of a tebibyte, another lock, or nothing. Before each system call of each operation once, in this
//! process; then by another process as fast as it can, under the program itself, with little memory.
//!
//! Needs root, for a device; and prlimit and perl.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};

use withlock::lease::Stamp;
use withlock::record::{Guard, Record, SlotName, Why};
use withlock::store::reserve::Numbers;
use withlock::store::{Attempt, Basis, Ending, FileStore, Offer, Seen, Store, end, look, reclaim};
use withlock::sys::hook::{self, Call, Hook};
use withlock::sys::signal::{OnEntry, block_all};

use crate::harness::{Moments, Sandbox, age, plant, planted, tree};

/// Long past every age that matters.
const OLD_MS: u64 = 600_000;
const TTL_MS: u64 = 60_000;

/// What a stranger puts in the place of an entry.
type Make = fn(&Path, &Path);

const KINDS: &[(&str, Make)] = &[
    ("nothing", |_, _| {}),
    ("a live lock", |at, _| plant(at, &planted(TTL_MS), 0)),
    ("a stale lock", |at, _| plant(at, &planted(TTL_MS), OLD_MS)),
    ("an empty file", |at, _| {
        fs::write(at, "").expect("a file");
        age(at, OLD_MS);
    }),
    ("a file", |at, _| fs::write(at, "#!/bin/sh\n").expect("a file")),
    ("a FIFO", |at, _| nix::unistd::mkfifo(at, Mode::from_bits_truncate(0o644)).expect("a FIFO")),
    ("a socket", |at, _| drop(UnixListener::bind(at).expect("a socket"))),
    ("an endless device", |at, _| {
        mknod(at, SFlag::S_IFCHR, Mode::from_bits_truncate(0o644), makedev(1, 5)).expect("a device, as root");
    }),
    ("a link to nothing", |at, _| symlink("/nowhere/at/all", at).expect("a link")),
    ("a link to itself", |at, _| symlink(at, at).expect("a link")),
    ("a link to a stale lock", |at, theirs| symlink(theirs.join("lock"), at).expect("a link")),
    ("a link to a directory", |at, theirs| symlink(theirs, at).expect("a link")),
    ("a directory", |at, _| {
        fs::create_dir(at).expect("a directory");
        fs::write(at.join("kept"), "kept").expect("a file");
    }),
    ("a tebibyte that begins like a lock", |at, _| {
        let file = File::create(at).expect("a file");
        file.write_all_at(&planted(TTL_MS).encode(), 0).expect("its beginning");
        file.set_len(1 << 40).expect("a sparse file");
        age(at, OLD_MS);
    }),
];

/// What a stranger owns elsewhere: links lead there.
fn lay_out_theirs(theirs: &Path) {
    fs::create_dir(theirs).expect("a directory");
    plant(&theirs.join("lock"), &planted(TTL_MS), OLD_MS);
    for name in ["claim-0", "claim-7", "floor", "data"] {
        fs::write(theirs.join(name), "7\n").expect("a file");
        age(&theirs.join(name), OLD_MS);
    }
}

/// Exchanges an entry before one of the system calls.
struct Swapper {
    before_call: u32,
    calls: Cell<u32>,
    swap: RefCell<Option<Box<dyn FnOnce()>>>,
}

impl Hook for Swapper {
    fn before(&self, _call: &Call<'_>) -> Result<(), Errno> {
        self.calls.set(self.calls.get() + 1);
        if self.calls.get() == self.before_call
            && let Some(swap) = self.swap.borrow_mut().take()
        {
            swap();
        }
        Ok(())
    }

    /// Patience costs no time here.
    fn pause(&self, for_ms: u64) {
        hook::advance_boot_clock(for_ms);
    }
}

fn offer() -> Offer {
    Offer {
        ttl_ms: TTL_MS,
        guard: Guard::Inherited,
        command: "swapped".into(),
        label: None,
        mode: None,
        fence: None,
        runs_command: false,
        evict_dead: false,
    }
}

/// One operation: how its directory looks at first, what may be exchanged, and what is done.
struct Operation {
    name: &'static str,
    lay_out: fn(&Path) -> Vec<PathBuf>,
    perform: fn(&Path, &OnEntry) -> Result<(), String>,
}

fn stale_lock(dir: &Path) -> Record {
    let record = planted(TTL_MS);
    plant(&dir.join("L"), &record, OLD_MS);
    record
}

fn slot_of(dir: &Path, record: &Record) -> PathBuf {
    dir.join(SlotName::of(record).file_name(OsStr::new("L")))
}

/// A quarantine that may go.
fn aged_quarantine(dir: &Path) -> Vec<PathBuf> {
    let record = planted(TTL_MS);
    let slot = slot_of(dir, &record);
    fs::create_dir(&slot).expect("a slot");
    plant(&slot.join("lock"), &record, OLD_MS);
    fs::write(slot.join("claim-0"), "{}").expect("a claim");
    age(&slot, OLD_MS);
    vec![slot.clone(), slot.join("lock"), slot.join("claim-0")]
}

fn store(dir: &Path, on_entry: &OnEntry) -> Result<FileStore, String> {
    FileStore::open(dir.join("L").as_os_str(), false, on_entry).map_err(|fault| fault.to_string())
}

const OPERATIONS: &[Operation] = &[
    Operation {
        name: "acquire, renew and release",
        lay_out: |dir| vec![dir.join("L")],
        perform: |dir, on_entry| match store(dir, on_entry)?.attempt(&offer()) {
            Ok(Attempt::Granted(mut held)) => {
                let _ = (held.renew(), held.look());
                held.release(&mut || {}).map(drop).map_err(|not| format!("{not:?}"))
            }
            other => other.map(drop).map_err(|fault| fault.to_string()),
        },
    },
    Operation {
        name: "evict",
        lay_out: |dir| {
            let slot = slot_of(dir, &stale_lock(dir));
            vec![dir.join("L"), slot.clone(), slot.join("lock"), slot.join("claim-0")]
        },
        perform: |dir, on_entry| store(dir, on_entry)?.attempt(&offer()).map(drop).map_err(|fault| fault.to_string()),
    },
    Operation {
        name: "break by force",
        lay_out: |dir| {
            let slot = slot_of(dir, &stale_lock(dir));
            vec![dir.join("L"), slot]
        },
        perform: |dir, on_entry| {
            let store = store(dir, on_entry)?;
            let Seen::Epoch(epoch) = store.place().observe().map_err(|fault| fault.to_string())? else {
                return Ok(());
            };
            let ending = Ending {
                judged: &epoch,
                basis: Basis::Any,
                why: Why::Break,
                force: true,
                reason: None,
                mine: None,
                patience_ms: 0,
            };
            end(store.place(), &ending).map(drop).map_err(|fault| fault.to_string())
        },
    },
    Operation {
        name: "inspect",
        lay_out: |dir| {
            stale_lock(dir);
            let mut targets = aged_quarantine(dir);
            targets.push(dir.join("L"));
            targets
        },
        perform: |dir, on_entry| {
            let store = store(dir, on_entry)?;
            let seen = store.place().observe().map_err(|fault| fault.to_string())?;
            let now = Stamp::from_ms(i64::try_from(OLD_MS).unwrap_or(0));
            if let Seen::Epoch(epoch) = &seen {
                look::contest(store.place(), epoch, now).map_err(|errno| errno.to_string())?;
            }
            look::each_quarantine(store.place(), now, |_| {}).map_err(|errno| errno.to_string())?;
            look::list(&store.place().dir, false).map(drop).map_err(|errno| errno.to_string())
        },
    },
    Operation {
        name: "reclaim",
        lay_out: aged_quarantine,
        perform: |dir, on_entry| {
            reclaim::remove_aged(store(dir, on_entry)?.place());
            Ok(())
        },
    },
    Operation {
        name: "reserve",
        lay_out: |dir| {
            fs::write(dir.join("floor"), "6\n").expect("a floor");
            ["lock", "floor", "claim-7"].map(|name| dir.join(name)).to_vec()
        },
        perform: |dir, on_entry| {
            let mut numbers = Numbers::open(dir.as_os_str(), on_entry).map_err(|fault| fault.to_string())?;
            numbers.next(0, None).map(drop).map_err(|fault| fault.to_string())
        },
    },
];

fn has_inode(dir: &Path, inode: u64) -> bool {
    fs::read_dir(dir).into_iter().flatten().flatten().any(|entry| {
        let Ok(stat) = entry.path().symlink_metadata() else { return false };
        stat.ino() == inode || stat.is_dir() && has_inode(&entry.path(), inode)
    })
}

fn clear(dir: &Path) {
    for entry in fs::read_dir(dir).expect("the directory").flatten() {
        let path = entry.path();
        let is_dir = entry.file_type().is_ok_and(|kind| kind.is_dir());
        let removed = if is_dir { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        removed.expect("an empty directory");
    }
}

/// What a system call says of something that should not have been read.
const UNHELPFUL: [&str; 3] = ["Illegal seek", "Is a directory", "Invalid argument"];

/// The directories of one test.
struct Scene {
    dir: PathBuf,
    theirs: PathBuf,
    away: PathBuf,
}

impl Scene {
    /// Performs the operation; before the call of this number its target is exchanged. Says whether the
    /// operation made so many calls, and what it said.
    fn exchange(
        &self,
        operation: &Operation,
        target: usize,
        (kind, make): (&str, Make),
        before_call: u32,
        on_entry: &OnEntry,
    ) -> (bool, Result<(), String>) {
        clear(&self.dir);
        clear(&self.away);
        let target = (operation.lay_out)(&self.dir).swap_remove(target);
        let inode = Rc::new(Cell::new(None));
        let swap = {
            let (target, theirs, away) = (target.clone(), self.theirs.clone(), self.away.join("was"));
            let inode = Rc::clone(&inode);
            move || {
                let _ = fs::rename(&target, &away);
                if target.parent().is_some_and(Path::is_dir) {
                    make(&target, &theirs);
                    inode.set(target.symlink_metadata().ok().map(|stat| stat.ino()));
                }
            }
        };
        let swapper = Rc::new(Swapper { before_call, calls: Cell::new(0), swap: RefCell::new(Some(Box::new(swap))) });
        hook::install(Rc::clone(&swapper) as Rc<dyn Hook>);
        let outcome = (operation.perform)(&self.dir, on_entry);
        hook::clear();
        if let Some(inode) = inode.get().filter(|_| self.is_kept(&target, kind)) {
            assert!(
                has_inode(&self.dir, inode),
                "{}: {kind} at {} since call {before_call} is gone",
                operation.name,
                target.display()
            );
        }
        (swapper.calls.get() >= before_call, outcome)
    }

    /// Whether somebody's own file must be found again, wherever it was moved: not one whose name is the
    /// protocol's own, inside of a quarantine; nor the floor, a hint that is written anew; nor an old and empty
    /// file with a quarantine's name, which is what a crash leaves.
    fn is_kept(&self, target: &Path, kind: &str) -> bool {
        let is_lock = target.extension().is_none_or(|extension| !extension.to_string_lossy().starts_with("stale-"));
        target.parent() == Some(&self.dir) && !target.ends_with("floor") && (is_lock || kind != "an empty file")
    }
}

#[test]
fn an_entry_exchanged_before_any_system_call_is_neither_lost_nor_followed_and_stops_nobody() {
    let sandbox = Sandbox::in_memory();
    let scene = Scene { dir: sandbox.work(), theirs: sandbox.path("../theirs"), away: sandbox.path("../away") };
    lay_out_theirs(&scene.theirs);
    let untouched = tree(&scene.theirs);
    fs::create_dir(&scene.away).expect("a directory");
    let exchange_all = || {
        let on_entry = block_all().expect("blocking signals");
        let mut all = 0;
        for operation in OPERATIONS {
            let (mut runs, mut told) = (0, BTreeMap::<String, u32>::new());
            clear(&scene.dir);
            for target in 0..(operation.lay_out)(&scene.dir).len() {
                for kind in KINDS {
                    for before_call in 1.. {
                        assert!(before_call < 1_000, "{}: no end", operation.name);
                        let (was_made, outcome) = scene.exchange(operation, target, *kind, before_call, &on_entry);
                        runs += 1;
                        if let Err(said) = outcome {
                            // What stands there is said, not how reading it failed.
                            assert!(!UNHELPFUL.iter().any(|text| said.contains(text)), "{}: {said}", operation.name);
                            *told.entry(said.rsplit(": ").next().unwrap_or("").into()).or_default() += 1;
                        }
                        if !was_made {
                            break;
                        }
                    }
                }
            }
            println!("{}: {runs} runs; errors: {told:?}", operation.name);
            all += runs;
        }
        all
    };
    // A thread of its own: what it blocks, and the clock that it moves, are its own.
    let exchanges: u32 = std::thread::scope(|scope| scope.spawn(exchange_all).join().expect("no panic"));
    assert_eq!(tree(&scene.theirs), untouched, "what links led to");
    println!("{exchanges} exchanges");
    assert!(exchanges > 3_000, "only {exchanges}");
}

/// Foreign files at the lock's name and at its quarantines' names, exchanged for what is there.
struct Stranger<'a> {
    dir: &'a Path,
    pool: &'a Path,
    theirs: &'a Path,
    moments: Moments,
    exchanges: u32,
}

impl Stranger<'_> {
    fn any(&mut self, below: usize) -> usize {
        usize::try_from(self.moments.number() % below as u64).expect("a small number")
    }

    fn act(&mut self) {
        let kind = self.any(KINDS.len());
        let mine = self.pool.join(kind.to_string());
        if LOCKS.contains(&KINDS[kind].0) && mine.symlink_metadata().is_err() {
            // The program ends those, rightly.
            KINDS[kind].1(&mine, self.theirs);
        }
        let lock = self.dir.join("L");
        let entries = fs::read_dir(self.dir).expect("the directory").flatten().map(|entry| entry.path());
        let others: Vec<PathBuf> = entries.filter(|path| *path != lock).collect();
        let names = [vec![lock], others].concat();
        // The lock itself every other time.
        let name = if self.any(2) == 0 { 0 } else { self.any(names.len()) };
        // An empty file with the name of a quarantine is one.
        if name == 0 || !LOCKS.contains(&KINDS[kind].0) {
            self.exchanges += u32::from(exchange(&mine, &names[name]));
        }
        if self.any(50) == 0 {
            aged_quarantine(self.dir);
        }
    }
}

/// Kinds that are locks, or what is left of some.
const LOCKS: [&str; 3] = ["a live lock", "a stale lock", "an empty file"];

/// Exchanges two entries in one step, or moves the only one of them; whether it did.
fn exchange(a: &Path, b: &Path) -> bool {
    let rename = |from: &Path, to: &Path, how| renameat2(AT_FDCWD, from, AT_FDCWD, to, how);
    match rename(a, b, RenameFlags::RENAME_EXCHANGE) {
        Err(Errno::ENOENT) => {
            [(a, b), (b, a)].into_iter().any(|(from, to)| rename(from, to, RenameFlags::RENAME_NOREPLACE).is_ok())
        }
        exchanged => exchanged.is_ok(),
    }
}

/// Address space of a program here: a small part of what it would need to read one of these files whole.
const LIMIT: &str = "--as=67108864";
const RUNS: usize = 120;

#[test]
fn the_program_lives_with_entries_that_change_all_the_time_and_with_little_memory() {
    let sandbox = Sandbox::in_memory();
    let (dir, theirs, pool) = (sandbox.work(), sandbox.path("../theirs"), sandbox.path("../pool"));
    lay_out_theirs(&theirs);
    let untouched = tree(&theirs);
    fs::create_dir(&pool).expect("a directory");
    let mut precious = Vec::new();
    for (number, (kind, make)) in KINDS.iter().enumerate() {
        let path = pool.join(number.to_string());
        make(&path, &theirs);
        if let Ok(stat) = path.symlink_metadata()
            && !LOCKS.contains(kind)
        {
            precious.push((kind, stat.ino()));
        }
    }
    // The known-bad case: whoever reads what is there whole does not live.
    let largest = pool.join((KINDS.len() - 1).to_string());
    let slurp = "open(my $f, '<', shift) or die; local $/; my $all = <$f>; exit 0";
    let read = sandbox.program("perl").args(["-e", slurp]).arg(&largest).through(["prlimit", LIMIT, "--"]).run();
    assert_ne!(read.code(), Some(0), "the limit is none: {read}");

    let lines: &[&[&str]] = &[
        &["inspect", "L"],
        &["inspect", "--json", "L", "."],
        &["check", "--nonce", "00000000000000000000000000000000", "L"],
        &["-n", "L", "--", "true"],
        &["-w", "0.05", "--on-lost", "warn", "L", "--", "true"],
        &["break", "L"],
        &["break", "--force", "L"],
        &["reclaim", "L"],
        &["-n", "--ttl", "1s", "L", "--", "sleep", "0.01"],
    ];
    let stop = AtomicBool::new(false);
    let next = AtomicU32::new(0);
    let (exchanges, codes) = std::thread::scope(|scope| {
        let stranger = scope.spawn(|| {
            let moments = Moments::new("exchanges");
            let mut stranger = Stranger { dir: &dir, pool: &pool, theirs: &theirs, moments, exchanges: 0 };
            while !stop.load(Ordering::Relaxed) {
                stranger.act();
            }
            stranger.exchanges
        });
        let users: Vec<_> = (0..3)
            .map(|_| {
                scope.spawn(|| {
                    let mut codes = BTreeMap::new();
                    while let Some(line) = Some(next.fetch_add(1, Ordering::Relaxed) as usize).filter(|n| *n < 3 * RUNS)
                    {
                        let line = lines[line % lines.len()];
                        let finished = sandbox.withlock().args(line).through(["prlimit", LIMIT, "--"]).run();
                        finished.says(&[]);
                        let code = finished.code().unwrap_or_else(|| panic!("{line:?}: {finished}"));
                        assert!([0, 73, 74, 75, 76, 77, 79].contains(&code), "{line:?}: {finished}");
                        *codes.entry(code).or_insert(0) += 1;
                    }
                    codes
                })
            })
            .collect();
        let mut codes = BTreeMap::new();
        let all: Vec<_> = users.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        stop.store(true, Ordering::Relaxed);
        for (code, times) in all.into_iter().flat_map(|user| user.expect("a user's runs")) {
            *codes.entry(code).or_insert(0) += times;
        }
        (stranger.join().expect("the stranger"), codes)
    });
    println!("{exchanges} exchanges, exit codes {codes:?}");
    assert!(exchanges > 1_000 && [0, 73].iter().all(|code| codes.contains_key(code)), "{exchanges}, {codes:?}");
    assert_eq!(tree(&theirs), untouched, "what links led to");
    for (kind, inode) in precious {
        assert!(has_inode(&dir, inode) || has_inode(&pool, inode), "{kind} is gone");
    }
    // Nothing of it lasts.
    clear(&dir);
    sandbox.withlock().args(["-n", "L", "--", "true"]).run().exited(0).silent();
}
