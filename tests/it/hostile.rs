//! Hostile input: records, names, lengths of time and command lines that nobody would type.
//!
//! Random cases are drawn anew in every run; one that fails is kept in `tests/data/hostile-seeds` and
//! comes first from then on.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;

use withlock::lease::Stamp;
use withlock::options::{check_first_word, duration_ms};
use withlock::record::{
    Content, MAX_BLANK_BYTES, Nonce, Record, SIGNATURE, SlotName, VERSION, canonical_number, claim_name, claim_number,
    classify, split_trash, trash_name,
};
use withlock::text::{Shown, shell_word};

use crate::harness::Sandbox;

const CORPUS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/records");

fn config(cases: u32) -> ProptestConfig {
    let seeds = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/hostile-seeds");
    ProptestConfig {
        cases,
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(seeds))),
        ..ProptestConfig::default()
    }
}

fn corpus(kind: &str) -> Vec<(String, Vec<u8>)> {
    let dir = Path::new(CORPUS).join(kind);
    let entries = std::fs::read_dir(&dir).expect("a corpus").map(|entry| entry.expect("an entry"));
    let mut files: Vec<_> = entries
        .map(|entry| (entry.file_name().into_string().expect("a name"), std::fs::read(entry.path()).expect("a record")))
        .collect();
    files.sort();
    files
}

fn whole(bytes: &[u8]) -> Content {
    classify(bytes, bytes.len() as u64)
}

#[test]
fn every_good_record_is_read_and_means_the_same_when_it_is_written_again() {
    let files = corpus("good");
    assert!(files.len() >= 9);
    for (name, bytes) in files {
        let Content::Record(record) = whole(&bytes) else { panic!("{name}: {:?}", whole(&bytes)) };
        assert_eq!(whole(&record.encode()), Content::Record(record), "{name}");
    }
}

#[test]
fn every_bad_record_is_what_its_name_says() {
    let files = corpus("bad");
    assert!(files.len() >= 30);
    for (name, bytes) in files {
        let found = match whole(&bytes) {
            Content::Record(_) => "record",
            Content::Blank => "blank",
            Content::Newer(_) => "newer",
            Content::Foreign => "foreign",
        };
        assert_eq!(Some(found), name.split('-').next(), "{name}");
    }
}

/// Bytes that begin like a record more often than chance would have it.
fn content() -> impl Strategy<Value = Vec<u8>> {
    let seed = corpus("good").remove(0).1;
    let changed = (any::<prop::sample::Index>(), any::<u8>(), any::<prop::sample::Index>(), any::<bool>()).prop_map(
        move |(place, byte, cut, cuts)| {
            let mut bytes = seed.clone();
            let place = place.index(bytes.len());
            bytes[place] = byte;
            if cuts {
                bytes.truncate(cut.index(bytes.len()));
            }
            bytes
        },
    );
    let signed = prop::collection::vec(any::<u8>(), 0..200).prop_map(|rest| [SIGNATURE, &rest].concat());
    prop_oneof![changed, signed, prop::collection::vec(any::<u8>(), 0..300)]
}

proptest! {
    #![proptest_config(config(4_000))]

    #[test]
    fn whatever_is_in_a_file_it_is_classified_and_a_record_reads_back(bytes in content(), size in any::<u64>()) {
        match whole(&bytes) {
            Content::Record(record) => {
                prop_assert!(bytes.starts_with(SIGNATURE));
                prop_assert_eq!(record.version, VERSION);
                prop_assert_eq!(whole(&record.encode()), Content::Record(record));
            }
            Content::Blank => prop_assert!(bytes.len() <= MAX_BLANK_BYTES),
            Content::Newer(version) => prop_assert!(version > VERSION),
            Content::Foreign => {}
        }
        // A part of a file, read by somebody whom the file grew under, is never taken for a record.
        if size != bytes.len() as u64 {
            prop_assert!(!matches!(classify(&bytes, size), Content::Record(_)));
        }
    }

    #[test]
    fn what_begins_unlike_a_record_is_never_ours(first in 1u8..=255, rest in prop::collection::vec(any::<u8>(), 0..100)) {
        prop_assume!(first != SIGNATURE[0]);
        prop_assert_eq!(whole(&[&[first], rest.as_slice()].concat()), Content::Foreign);
    }

    #[test]
    fn a_name_of_any_bytes_has_a_slot_that_reads_back(
        lock in prop::collection::vec(1u8..=255, 1..60),
        claimed_at_ms in any::<u64>(),
        nonce in any::<[u8; 16]>(),
    ) {
        prop_assume!(!lock.contains(&b'/'));
        let lock = OsStr::from_bytes(&lock);
        let slot = SlotName { claimed_at_ms, nonce: Nonce::from_bytes(nonce) };
        let name = slot.file_name(lock);
        prop_assert_eq!(SlotName::parse(lock, &name), Some(slot));
        prop_assert_eq!(SlotName::split(&name), Some((lock, slot)));
        let trash = trash_name(lock, &slot.nonce);
        prop_assert_eq!(split_trash(&trash), Some(lock));
        prop_assert_eq!(SlotName::split(&trash), None);
    }

    #[test]
    fn a_name_that_is_read_as_a_slot_is_exactly_the_name_that_the_slot_has(
        text in "(L|\\.stale-|[a-z.-]){0,3}(\\.stale-)?[0-9+-]{0,22}-?[0-9a-fA-F]{30,33}",
    ) {
        let name = OsString::from(text);
        if let Some((lock, slot)) = SlotName::split(&name) {
            prop_assert_eq!(slot.file_name(lock), name);
        }
    }

    #[test]
    fn blank_locks_with_different_stamps_have_different_slots(
        inode in any::<u64>(), a in -1_000_000_000i64..4_000_000_000, b in -1_000_000_000i64..4_000_000_000,
    ) {
        let slot = |seconds| SlotName::of_blank(inode, Stamp::new(seconds, 0));
        prop_assert_eq!(a == b, slot(a) == slot(b));
        prop_assert!(slot(a).nonce.is_of_blank(inode));
    }

    #[test]
    fn a_claims_number_is_read_only_as_it_is_written(text in "[0-9+ -]{0,22}", number in any::<u64>()) {
        prop_assert_eq!(claim_number(OsStr::new(&claim_name(number))), Some(number));
        if let Some(number) = canonical_number(text.as_bytes()) {
            prop_assert_eq!(number.to_string(), text);
        }
    }

    #[test]
    fn a_length_of_time_is_a_number_or_an_error_in_one_line(text in "([0-9]{0,30}\\.?[0-9]{0,14}(ms|s|m|h|d|x|)){0,3}|\\PC{0,12}") {
        match duration_ms(&text, "--ttl") {
            Ok(ms) => prop_assert!(ms <= 100 * 366 * 86_400_000),
            Err(error) => prop_assert!(error.0.starts_with("--ttl ") && !error.0.contains('\n')),
        }
    }

    #[test]
    fn whole_numbers_of_units_are_read_exactly(hours in 0u64..1000, minutes in 0u64..1000, seconds in 0u64..1000, ms in 0u64..1000) {
        let text = format!("{hours}h{minutes}m{seconds}s{ms}ms");
        prop_assert_eq!(duration_ms(&text, "-w"), Ok(((hours * 60 + minutes) * 60 + seconds) * 1_000 + ms));
    }

    #[test]
    fn what_is_shown_drives_no_terminal_and_reads_back(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
        let shown = Shown(&bytes).to_string();
        prop_assert!(!shown.chars().any(char::is_control), "{:?}", shown);
        prop_assert_eq!(unshown(&shown), bytes);
    }

    #[test]
    fn check_first_word_never_panics(words in prop::collection::vec(prop::collection::vec(1u8..=255, 0..12), 0..4)) {
        let words: Vec<OsString> = words.into_iter().map(OsString::from_vec).collect();
        let _ = check_first_word(&words);
    }
}

/// What `Shown` made of it, undone.
fn unshown(shown: &str) -> Vec<u8> {
    let (mut bytes, mut rest) = (Vec::new(), shown.as_bytes());
    while let Some((first, tail)) = rest.split_first() {
        rest = match (first, tail) {
            (b'\\', [b'\\', tail @ ..]) => {
                bytes.push(b'\\');
                tail
            }
            (b'\\', [b'x', high, low, tail @ ..]) => {
                let digits = [*high, *low];
                let digits = std::str::from_utf8(&digits).expect("two digits");
                bytes.push(u8::from_str_radix(digits, 16).expect("two hex digits"));
                tail
            }
            _ => {
                bytes.push(*first);
                tail
            }
        };
    }
    bytes
}

proptest! {
    #![proptest_config(config(40))]

    #[test]
    fn a_shell_reads_a_word_back_byte_for_byte(
        words in prop::collection::vec(prop::collection::vec(1u8..=255, 0..40), 1..20),
    ) {
        let script: String = words.iter().map(|word| format!("printf '%s\\0' {}\n", shell_word(word))).collect();
        let read = Command::new("bash").args(["-c", &script]).env("LC_ALL", "C").output().expect("bash");
        let expected: Vec<u8> = words.iter().flat_map(|word| [word.as_slice(), b"\0"].concat()).collect();
        prop_assert_eq!(read.stdout, expected, "{}", script);
    }
}

/// Words that command lines are made of: options, values good and bad, paths, commands, subcommands.
const WORDS: &[&[u8]] = &[
    b"-n",
    b"--no-wait",
    b"--nonblock",
    b"--nb",
    b"-w",
    b"--wait",
    b"--timeout",
    b"-E",
    b"--conflict-exit-code",
    b"--ttl",
    b"--no-renew",
    b"--max-hold",
    b"--kill-after",
    b"--on-lost",
    b"--on-busy",
    b"--fence",
    b"-o",
    b"--close",
    b"--evict-dead",
    b"--reentrant",
    b"-p",
    b"--parents",
    b"--mode",
    b"--label",
    b"-q",
    b"-v",
    b"-c",
    b"--command",
    b"--skip-if",
    b"--",
    b"--help",
    b"--version",
    b"--json",
    b"--force",
    b"--nonce",
    b"--reason",
    b"--dry-run",
    b"--older-than",
    b"--start",
    b"--no-such-option",
    b"-nq",
    b"-w0",
    b"--ttl=1s",
    b"--wait=0",
    b"--on-busy=skip",
    b"inspect",
    b"break",
    b"reclaim",
    b"check",
    b"acquire",
    b"renew",
    b"release",
    b"reserve",
    b"inspct",
    b"reserv",
    b"a.lock",
    b"b.lock",
    b"./a.lock",
    b"script.sh",
    b"folder",
    b"folder/c.lock",
    b"link",
    b"missing/d.lock",
    b"numbers",
    b"",
    b".",
    b"..",
    b"/",
    b"\xff\xfe.lock",
    b"new\nline.lock",
    b"held.lock",
    b"blank.lock",
    b"data.json",
    b"a.lock.stale-1-00000000000000000000000000000000",
    b"etcd://127.0.0.1:1/x",
    b"etcd://",
    b"true",
    b"false",
    b"exit 3",
    b"no-such-command",
    b"/",
    b"0",
    b"1",
    b"1s",
    b"0.1",
    b"-1",
    b"9",
    b"600",
    b"1e9",
    b"99999999999999999999h",
    b"fail",
    b"skip",
    b"run",
    b"terminate",
    b"warn",
    b"0644",
    b"000",
    b"text",
    b"00000000000000000000000000000000",
];

/// What a run may end with: the table, what COMMANDs here say, what `-E` may ask for, and the signal that
/// ends one which waits for a lock.
const CODES: &[i32] = &[0, 1, 2, 3, 9, 64, 69, 71, 73, 74, 75, 76, 77, 78, 79, 124, 126, 127, 143];

/// Command lines that are tried.
const COMMAND_LINES: usize = 10_000;
/// How long one may take: to wait for a lock is right for some of them.
const PATIENCE: Duration = Duration::from_millis(1_500);

/// What must not change, by path: identity, kind and permissions, size, time stamp.
fn precious(dir: &Path) -> BTreeMap<OsString, (u64, u32, u64, i64, i64)> {
    let mut found = BTreeMap::new();
    let mut look = |path: &Path| {
        let stat = std::fs::symlink_metadata(path).expect("what was there at the beginning");
        let mtime = if stat.is_dir() { (0, 0) } else { (stat.mtime(), stat.mtime_nsec()) };
        let size = if stat.is_dir() { 0 } else { stat.size() };
        found.insert(path.as_os_str().to_owned(), (stat.ino(), stat.mode(), size, mtime.0, mtime.1));
    };
    for name in ["script.sh", "data.json", "link", "folder", "folder/kept", "a.lock.stale-of-mine", "numbers/kept"] {
        look(&dir.join(name));
    }
    found
}

fn lay_out(dir: &Path) {
    let write = |name: &str, text: &str| std::fs::write(dir.join(name), text).expect("a file");
    for name in ["folder", "numbers"] {
        std::fs::create_dir(dir.join(name)).expect("a directory");
    }
    write("script.sh", "#!/bin/sh\nexit 0\n");
    write("data.json", "{\"access_token\":\"x\"}");
    write("folder/kept", "kept");
    write("numbers/kept", "kept");
    write("a.lock.stale-of-mine", "kept");
    symlink("data.json", dir.join("link")).expect("a link");
}

/// Whether a file that is new may have been made for one of these words: a lock, its quarantines, or a
/// reserved number.
fn is_ours(name: &OsStr) -> bool {
    let bytes = name.as_bytes();
    let words = WORDS.iter().flat_map(|word| word.split(|byte| *byte == b'/')).filter(|word| !word.is_empty());
    let mut locks = words.chain([b"true".as_slice(), b"lock"]);
    locks.any(|word| {
        bytes
            .strip_prefix(word)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with(b".stale-") || rest.starts_with(b".reclaim-"))
    }) || claim_number(name).is_some()
        || bytes.starts_with(b"floor")
}

/// Removes what is new, after a look at its name.
fn tidy(dir: &Path, kept: &BTreeMap<OsString, (u64, u32, u64, i64, i64)>, argv: &[OsString]) {
    for entry in std::fs::read_dir(dir).expect("the directory").flatten() {
        let path = entry.path();
        let is_kept = kept.contains_key(path.as_os_str()) || entry.file_name() == "numbers";
        if is_kept && path.is_dir() && !path.is_symlink() {
            tidy(&path, kept, argv);
        } else if !is_kept {
            assert!(is_ours(&entry.file_name()), "{} appeared: {argv:?}", path.display());
            let is_dir = entry.file_type().is_ok_and(|kind| kind.is_dir());
            let _ = if is_dir { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
        }
    }
}

/// Small and good enough: what is drawn needs no secrecy, only to be different every time.
struct Draw(u64);

impl Draw {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % bound as u64).unwrap_or(0)
    }
}

#[test]
fn ten_thousand_random_command_lines_touch_nothing_that_is_not_theirs() {
    let sandbox = Sandbox::in_memory();
    let dir = sandbox.work();
    lay_out(&dir);
    let kept = precious(&dir);
    let seed = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("a clock").as_nanos();
    let seed = u64::try_from(seed % u128::from(u64::MAX)).unwrap_or(1) | 1;
    println!("seed {seed}");
    let mut draw = Draw(seed);
    let (mut waited, mut codes) = (0, BTreeMap::new());
    for _ in 0..COMMAND_LINES {
        let argv = command_line(&mut draw);
        let (code, stderr) = run(&sandbox, &argv);
        assert!(!stderr.contains("panicked"), "{argv:?}: {stderr}");
        assert!(CODES.contains(&code), "{argv:?} ended with {code}: {stderr}");
        waited += u32::from(code == 143);
        *codes.entry(code).or_insert(0) += 1;
        assert_eq!(precious(&dir), kept, "{argv:?}");
        tidy(&dir, &kept, &argv);
    }
    println!("{codes:?}");
    assert!(waited < 200, "{waited} waited for ever");
    // A pool of words with which nothing runs would show nothing.
    assert!(codes.get(&0).is_some_and(|runs| *runs > 100) && codes.contains_key(&3) && codes.contains_key(&64));
}

/// Random words, every other time with a lock and a command behind them: else hardly anything would run.
fn command_line(draw: &mut Draw) -> Vec<OsString> {
    let word = |draw: &mut Draw| WORDS[draw.below(WORDS.len())];
    let mut words: Vec<&[u8]> = (0..draw.below(7)).map(|_| word(draw)).collect();
    if draw.below(2) == 0 {
        const LOCKS: [&[u8]; 6] =
            [b"a.lock", b"\xff\xfe.lock", b"new\nline.lock", b"folder/c.lock", b"link", b"data.json"];
        const COMMANDS: [&[&[u8]]; 4] = [&[b"--", b"true"], &[b"--", b"false"], &[b"-c", b"exit 3"], &[b"true", b"-n"]];
        words.truncate(draw.below(3));
        words.extend([b"-n".as_slice(), LOCKS[draw.below(LOCKS.len())]]);
        words.extend(COMMANDS[draw.below(COMMANDS.len())]);
    }
    words.into_iter().map(|word| OsString::from_vec(word.to_vec())).collect()
}

fn run(sandbox: &Sandbox, argv: &[OsString]) -> (i32, String) {
    let stderr = sandbox.path("../io/stderr");
    let mut child = Command::new(env!("CARGO_BIN_EXE_withlock"))
        .args(argv)
        .current_dir(sandbox.work())
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .env(crate::harness::MARK, sandbox.mark())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(&stderr).expect("a file"))
        .spawn()
        .expect("withlock");
    let began = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().expect("its status") {
            break status;
        }
        if began.elapsed() > PATIENCE {
            let pid = nix::unistd::Pid::from_raw(i32::try_from(child.id()).expect("a pid"));
            nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).expect("to end it");
            break child.wait().expect("its status");
        }
        std::thread::sleep(Duration::from_micros(200));
    };
    use std::os::unix::process::ExitStatusExt;
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    (code, String::from_utf8_lossy(&std::fs::read(&stderr).expect("its errors")).into_owned())
}

/// A record with everything in it, for whom the corpus is not enough.
#[test]
fn the_longest_record_is_within_what_a_reader_reads_and_so_is_each_beginning_of_it() {
    let Content::Record(record) = whole(&corpus("good").remove(0).1) else { panic!("a good record") };
    let longest = Record {
        claimed_at_ms: u64::MAX,
        ttl_ms: u64::MAX,
        host: "\u{1}".repeat(64),
        pid: u32::MAX,
        pid_started: u64::MAX,
        uid: u32::MAX,
        command: "\u{1}".repeat(withlock::record::MAX_COMMAND_BYTES),
        dev: u64::MAX,
        label: Some("\u{1}".repeat(withlock::record::MAX_LABEL_BYTES / 6)),
        fence: Some(u64::MAX),
        ..*record
    };
    let line = longest.encode();
    assert!(line.len() <= withlock::record::MAX_BLANK_BYTES, "{}", line.len());
    assert!(matches!(whole(&line), Content::Record(_)));
    for cut in 0..line.len() - 2 {
        assert_eq!(whole(&line[..cut]), Content::Blank, "cut at {cut}");
    }
}

#[test]
fn a_label_or_a_command_that_would_make_a_record_too_long_is_refused_or_cut() {
    let sandbox = Sandbox::new();
    let line =
        "withlock: --label: at most 1024 bytes; a control character counts for 6, a quote or a backslash for 2\n";
    for (unit, most) in [("\u{1}", 170), ("\"", 512), ("x", 1_024), ("\u{e4}", 512)] {
        let run = |count: usize| {
            let label = unit.repeat(count);
            sandbox.withlock().arg("--label").arg(label).lock().args(["--", "cat", "a.lock"]).run()
        };
        let (taken, refused) = (run(most), run(most + 1));
        taken.exited(0).silent();
        assert!(matches!(whole(&taken.stdout), Content::Record(_)), "{unit:?}");
        refused.exited(64);
        assert_eq!(refused.err(), line, "{unit:?}");
    }
    // Longer than any reader reads.
    let name = "x".repeat(100_000);
    let finished = sandbox.withlock().lock().arg("--").arg(&name).run();
    finished.exited(126);
    assert_eq!(finished.err(), format!("withlock: cannot run {name}: File name too long\n"));
    assert!(sandbox.names().is_empty(), "{:?}", sandbox.names());
}
