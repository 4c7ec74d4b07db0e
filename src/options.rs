//! What was typed means this. Nothing is created or run before all of it has been understood.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use crate::address::{Address, is_address};
use crate::cli::{OnBusy, OnLost, Run, Service, Talk, Terms, Waiting};
use crate::lease::{DEFAULT_KILL_AFTER_MS, DEFAULT_TTL_MS, MIN_TTL_MS};
use crate::record::{MAX_LABEL_BYTES, Nonce, encoded_bytes};
use crate::text::Shown;

/// A usage error, in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage(pub String);

impl std::fmt::Display for Usage {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

fn usage<T>(text: impl Into<String>) -> Result<T, Usage> {
    Err(Usage(text.into()))
}

/// How long to wait for the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// For ever.
    Forever,
    /// At most so long, in milliseconds; 0: try once.
    AtMost(u64),
}

/// What a new lock is like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    /// The lease, in milliseconds.
    pub ttl_ms: u64,
    /// Where to reserve a fencing token.
    pub fence: Option<OsString>,
    /// End a dead holder's epoch at once.
    pub evict_dead: bool,
    /// Make the missing parent directories.
    pub parents: bool,
    /// Exact permissions.
    pub mode: Option<u32>,
    /// A word for people.
    pub label: Option<String>,
}

/// How to reach a lock service: files, all of them optional.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// Whom to trust.
    pub cacert: Option<OsString>,
    /// Who we are.
    pub cert: Option<OsString>,
    /// The key to that.
    pub key: Option<OsString>,
    /// User and password.
    pub credentials: Option<OsString>,
}

impl Access {
    /// The environment variables that carry these names to commands that run under the lock.
    pub fn variables(&self) -> [(&'static str, Option<&OsString>); 4] {
        [
            ("WITHLOCK_ETCD_CACERT", self.cacert.as_ref()),
            ("WITHLOCK_ETCD_CERT", self.cert.as_ref()),
            ("WITHLOCK_ETCD_KEY", self.key.as_ref()),
            ("WITHLOCK_ETCD_CREDENTIALS", self.credentials.as_ref()),
        ]
    }
}

/// `withlock LOCK COMMAND`, understood.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The lock.
    pub lock: OsString,
    /// What else is to be held with it.
    pub also: Vec<OsString>,
    /// What to run; never empty.
    pub argv: Vec<OsString>,
    /// How long to wait.
    pub patience: Patience,
    /// What then.
    pub on_busy: OnBusy,
    /// The exit code instead of 75.
    pub conflict_exit: Option<u8>,
    /// What the lock is like.
    pub lease: Lease,
    /// How to reach it.
    pub access: Access,
    /// Renew, and keep a guard.
    pub renew: bool,
    /// The longest that COMMAND may run, in milliseconds.
    pub max_hold_ms: Option<u64>,
    /// Grace between TERM and KILL, in milliseconds.
    pub kill_after_ms: u64,
    /// What happens to COMMAND when the lock is lost.
    pub on_lost: OnLost,
    /// A condition under which COMMAND is not needed.
    pub skip_if: Option<OsString>,
    /// COMMAND does not inherit the guard.
    pub close: bool,
    /// A lock held by an ancestor counts as taken.
    pub reentrant: bool,
    /// Where to log to.
    pub log: Option<LogTo>,
    /// How talkative to be.
    pub talk: Talk,
}

/// Where the log goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogTo {
    /// A file, to be appended to.
    File(OsString),
    /// A descriptor that is open on entry.
    Descriptor(i32),
}

impl Plan {
    /// Understands what was typed.
    pub fn new(run: Run) -> Result<Self, Usage> {
        let argv = match (run.shell_text, run.argv) {
            (Some(text), _) => vec!["/bin/sh".into(), "-c".into(), text],
            (None, argv) if argv.is_empty() => return usage("no command given; try: withlock --help"),
            (None, argv) => argv,
        };
        if argv[0].is_empty() {
            return usage("the command is empty");
        }
        if is_subcommand(&run.lock) {
            // Only behind options: as the first word it would have been the subcommand.
            let word = Shown::os(&run.lock);
            return usage(format!("options come after the subcommand {word}; a lock of that name is written ./{word}"));
        }
        if run.skip_if.as_ref().is_some_and(|condition| condition.as_bytes().trim_ascii().is_empty()) {
            // It would always succeed, and the command would never be run.
            return usage("--skip-if: the condition is empty");
        }
        let access = access(&run.service);
        let lease = lease(run.terms)?;
        check_lease(&run.lock, &lease, &access)?;
        if is_address(&run.lock) {
            without_meaning(&[(run.close, "--close")])?;
        }
        if !run.also.is_empty() && (is_address(&run.lock) || run.also.iter().any(|also| is_address(also))) {
            return usage("--also: lock files only; with a lock in etcd: withlock LOCK -- withlock LOCK2 -- COMMAND");
        }
        let log = run.log_json.map(log_to).transpose()?;
        if matches!(&log, Some(LogTo::File(file)) if *file == run.lock || run.also.contains(file)) {
            return usage("--log-json: the log is the lock");
        }
        Ok(Plan {
            lock: run.lock,
            also: run.also,
            argv,
            patience: patience(&run.waiting)?,
            on_busy: run.on_busy.unwrap_or_default(),
            conflict_exit: conflict_exit(&run.waiting)?,
            lease,
            access,
            renew: !run.no_renew,
            max_hold_ms: optional(run.max_hold.as_deref(), "--max-hold")?,
            kill_after_ms: optional(run.kill_after.as_deref(), "--kill-after")?.unwrap_or(DEFAULT_KILL_AFTER_MS),
            on_lost: run.on_lost.unwrap_or_default(),
            skip_if: run.skip_if,
            close: run.close,
            reentrant: run.reentrant,
            log,
            talk: run.talk,
        })
    }
}

/// `--log-json`. What consists of digits is a descriptor; a file of such a name is written `./3`.
fn log_to(word: OsString) -> Result<LogTo, Usage> {
    match word.as_bytes() {
        b"" => usage("--log-json: no file is named"),
        b"-" => usage("--log-json -: standard output is 1, standard error 2, a file of that name ./-"),
        bytes if bytes.iter().all(u8::is_ascii_digit) => match word.to_str().and_then(|digits| digits.parse().ok()) {
            Some(number) => Ok(LogTo::Descriptor(number)),
            None => usage(format!("--log-json {}: not the number of a descriptor", Shown::os(&word))),
        },
        _ => Ok(LogTo::File(word)),
    }
}

/// `--etcd-…`.
pub fn access(service: &Service) -> Access {
    Access {
        cacert: service.etcd_cacert.clone(),
        cert: service.etcd_cert.clone(),
        key: service.etcd_key.clone(),
        credentials: service.etcd_credentials.clone(),
    }
}

/// Whether the name of one lock makes sense, with what was said about reaching it.
pub fn check_lock(lock: &OsStr, access: &Access) -> Result<(), Usage> {
    if is_address(lock) {
        Address::parse_lock(lock).map(drop).map_err(Usage)
    } else if *access == Access::default() {
        Ok(())
    } else {
        usage("--etcd-cacert, --etcd-cert, --etcd-key and --etcd-credentials belong to a LOCK etcd://...")
    }
}

/// The same for paths, of which some may stand for many locks.
pub fn check_paths(paths: &[OsString], access: &Access) -> Result<(), Usage> {
    let mut addresses = paths.iter().filter(|path| is_address(path)).peekable();
    if addresses.peek().is_none() {
        return paths.iter().try_for_each(|path| check_lock(path, access));
    }
    addresses.try_for_each(|path| Address::parse(path).map(drop).map_err(Usage))
}

/// Whether a new lock can be like that at this place.
pub fn check_lease(lock: &OsStr, lease: &Lease, access: &Access) -> Result<(), Usage> {
    check_lock(lock, access)?;
    if !is_address(lock) {
        return Ok(());
    }
    if lease.fence.is_some() {
        return usage("--fence: in etcd every lock has its fencing token (WITHLOCK_FENCE), without a directory");
    }
    without_meaning(&[
        (lease.evict_dead, "--evict-dead"),
        (lease.parents, "--parents"),
        (lease.mode.is_some(), "--mode"),
    ])
}

fn without_meaning(given: &[(bool, &str)]) -> Result<(), Usage> {
    match given.iter().find(|(given, _)| *given) {
        Some((_, option)) => usage(format!("{option} has no meaning for a lock in etcd")),
        None => Ok(()),
    }
}

/// `-n` and `-w`.
pub fn patience(waiting: &Waiting) -> Result<Patience, Usage> {
    match &waiting.wait {
        _ if waiting.no_wait => Ok(Patience::AtMost(0)),
        Some(text) => duration_ms(text, "--wait").map(Patience::AtMost),
        None => Ok(Patience::Forever),
    }
}

/// `-E`.
pub fn conflict_exit(waiting: &Waiting) -> Result<Option<u8>, Usage> {
    let Some(text) = &waiting.conflict_exit_code else { return Ok(None) };
    let plain = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    match text.parse::<u8>() {
        Ok(code) if plain => Ok(Some(code)),
        _ => usage(format!("--conflict-exit-code {}: not a number from 0 to 255", Shown::os(text))),
    }
}

/// What a new lock is like.
pub fn lease(terms: Terms) -> Result<Lease, Usage> {
    let ttl_ms = optional(terms.ttl.as_deref(), "--ttl")?.unwrap_or(DEFAULT_TTL_MS);
    if ttl_ms < MIN_TTL_MS {
        return usage("--ttl: at least 1s");
    }
    let label = terms.label.map(|label| match label.into_string() {
        Ok(label) if encoded_bytes(&label) <= MAX_LABEL_BYTES => Ok(label),
        Ok(_) => usage(format!(
            "--label: at most {MAX_LABEL_BYTES} bytes; a control character counts for 6, a quote or a backslash for 2"
        )),
        Err(_) => usage("--label: not UTF-8"),
    });
    Ok(Lease {
        ttl_ms,
        fence: terms.fence,
        evict_dead: terms.evict_dead,
        parents: terms.parents,
        mode: terms.mode.as_deref().map(mode).transpose()?,
        label: label.transpose()?,
    })
}

fn mode(text: &str) -> Result<u32, Usage> {
    let octal = (1..=4).contains(&text.len()) && text.bytes().all(|b| matches!(b, b'0'..=b'7'));
    match u32::from_str_radix(text, 8) {
        Ok(mode) if octal && mode <= 0o777 && mode & 0o600 == 0o600 => Ok(mode),
        Ok(mode) if octal && mode <= 0o777 => {
            usage(format!("--mode {text}: the owner must be able to read and write it"))
        }
        _ => usage(format!("--mode {}: not an octal number up to 777", Shown::os(text))),
    }
}

/// `--nonce`, or what the environment says.
pub fn nonce(given: Option<&str>) -> Result<Option<Nonce>, Usage> {
    let Some(text) = given else { return Ok(None) };
    match Nonce::parse(text.as_bytes()) {
        Some(nonce) => Ok(Some(nonce)),
        None => usage(format!("--nonce {}: not 32 lower-case hex digits", Shown::os(text))),
    }
}

/// An optional length of time, in milliseconds.
pub fn optional(text: Option<&str>, option: &str) -> Result<Option<u64>, Usage> {
    text.map(|text| duration_ms(text, option)).transpose()
}

/// A length of time: `1.5` (seconds), `90s`, `500ms`, `1m30s`, `2h`, `1d`. In milliseconds, rounded up.
pub fn duration_ms(text: &str, option: &str) -> Result<u64, Usage> {
    let wrong =
        || Usage(format!("{option} {}: not a length of time (examples: 1.5 90s 500ms 1m30s 2h)", Shown::os(text)));
    let too_long = || Usage(format!("{option} {}: too long", Shown::os(text)));
    let mut rest = text;
    let mut total_ns: u128 = 0;
    if rest.is_empty() {
        return Err(wrong());
    }
    while !rest.is_empty() {
        let number_bytes = rest.bytes().take_while(|b| b.is_ascii_digit() || *b == b'.').count();
        let (number, tail) = rest.split_at(number_bytes);
        let unit_bytes = tail.bytes().take_while(u8::is_ascii_alphabetic).count();
        let (unit, tail) = tail.split_at(unit_bytes);
        let unit_ns: u128 = match unit {
            "ms" => 1_000_000,
            "s" => 1_000_000_000,
            "m" => 60_000_000_000,
            "h" => 3_600_000_000_000,
            "d" => 86_400_000_000_000,
            // A bare number is seconds, and the only part.
            "" if rest.len() == text.len() && tail.is_empty() => 1_000_000_000,
            _ => return Err(wrong()),
        };
        let part_ns = decimal(number, unit_ns).ok_or_else(wrong)?.ok_or_else(too_long)?;
        total_ns = total_ns.checked_add(part_ns).ok_or_else(too_long)?;
        rest = tail;
    }
    // A hundred years: beyond that it is a mistake, and sums of clock readings must not overflow.
    const LONGEST_MS: u128 = 100 * 366 * 86_400_000;
    let ms = total_ns.div_ceil(1_000_000);
    if ms > LONGEST_MS {
        return Err(too_long());
    }
    u64::try_from(ms).map_err(|_| too_long())
}

/// `number` × `unit_ns`; the outer `None` if it is no decimal, the inner if it is too large.
fn decimal(number: &str, unit_ns: u128) -> Option<Option<u128>> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = |part: &str| part.bytes().all(|b| b.is_ascii_digit());
    if (whole.is_empty() && fraction.is_empty()) || !digits(whole) || !digits(fraction) {
        return None;
    }
    let whole_ns =
        if whole.is_empty() { Some(0) } else { whole.parse::<u128>().ok().and_then(|w| w.checked_mul(unit_ns)) };
    let fraction = fraction.get(..fraction.len().min(12)).unwrap_or_default();
    let fraction_ns = if fraction.is_empty() {
        0
    } else {
        let scale = 10u128.pow(u32::try_from(fraction.len()).ok()?);
        (fraction.parse::<u128>().ok()? * unit_ns).div_ceil(scale)
    };
    Some(whole_ns.and_then(|whole_ns| whole_ns.checked_add(fraction_ns)))
}

/// Options of other tools that there is no equal of here: the spelling, and what to do instead.
const DECLINED: &[(&[&str], &str)] = &[
    (
        &["-s", "--shared"],
        "a lock has one holder; for many readers beside one writer there is flock -s (withlock(1), SEVERAL LOCKS)",
    ),
    (&["--slots"], "a lock has one holder; for N at a time take one of N locks (withlock(1), SEVERAL LOCKS)"),
    (&["-x", "--exclusive"], "a lock is always exclusive: leave the option out"),
];

/// What to say about an option that is not known, if people know it from elsewhere.
pub fn declined(option: &str) -> Option<Usage> {
    let word = option.split('=').next().unwrap_or_default();
    let found = DECLINED.iter().find(|(spellings, _)| spellings.contains(&word));
    found.map(|(_, hint)| Usage(format!("{word}: {hint}")))
}

/// The words that the program takes for subcommands.
pub const SUBCOMMANDS: &[&str] = &["inspect", "break", "reclaim", "check", "acquire", "renew", "release", "reserve"];

/// Whether a word is one of them.
pub fn is_subcommand(word: &OsStr) -> bool {
    SUBCOMMANDS.iter().any(|known| *known == word)
}

/// Mistakes must not run things. Looks at the raw words: a subcommand word followed by `--`, or after
/// options of a run, or a bare first word one edit away from a subcommand, is a usage error.
pub fn check_first_word(arguments: &[OsString]) -> Result<(), Usage> {
    let Some(first) = arguments.first() else { return Ok(()) };
    let word = first.as_bytes();
    if word.starts_with(b"-") || word.contains(&b'/') {
        return Ok(());
    }
    let next = arguments.get(1).map(|next| next.as_bytes());
    if let Some(known) = SUBCOMMANDS.iter().find(|known| known.as_bytes() == word) {
        if next == Some(b"--") {
            return usage(format!(
                "'{known}' is a subcommand; a lock of that name is written ./{known} (withlock ./{known} -- COMMAND)"
            ));
        }
    } else if next != Some(b"--")
        && let Some(close) = SUBCOMMANDS.iter().find(|known| is_one_edit_away(known.as_bytes(), word))
    {
        let shown = Shown(word);
        return usage(format!(
            "'{shown}' looks like the subcommand '{close}'; if it is a lock, write ./{shown} or: withlock {shown} -- COMMAND"
        ));
    }
    Ok(())
}

/// Mistakes must not run things, nor take a lock: a COMMAND that looks like an option has `--` right before
/// it. COMMAND and its arguments, `argv`, are the last of the raw words. Where `--` stood before LOCK one
/// more may follow it.
pub fn check_command(arguments: &[OsString], argv: &mut Vec<OsString>) -> Result<(), Usage> {
    let before = arguments.len().checked_sub(argv.len() + 1).and_then(|at| arguments.get(at));
    let is_behind_dashes = before.is_some_and(|before| before == "--");
    let Some(word) = argv.first().filter(|word| word.as_bytes().starts_with(b"-") && !is_behind_dashes) else {
        return Ok(());
    };
    if word == "--" {
        argv.remove(0);
        return Ok(());
    }
    match word.to_str().and_then(declined) {
        Some(hint) => Err(hint),
        None => {
            let shown = Shown::os(word);
            usage(format!("'{shown}' is no option; if it is the command, write: withlock LOCK -- {shown}"))
        }
    }
}

/// Whether one insertion, deletion, replacement or swap of neighbours turns one word into the other.
fn is_one_edit_away(a: &[u8], b: &[u8]) -> bool {
    let (short, long) = if a.len() <= b.len() { (a, b) } else { (b, a) };
    let same = short.iter().zip(long).take_while(|(x, y)| x == y).count();
    let (short_rest, long_rest) = (&short[same..], &long[same..]);
    match long.len() - short.len() {
        0 if short_rest.is_empty() => false,
        0 => {
            short_rest[1..] == long_rest[1..]
                || (short_rest.len() >= 2
                    && short_rest[0] == long_rest[1]
                    && short_rest[1] == long_rest[0]
                    && short_rest[2..] == long_rest[2..])
        }
        1 => short_rest == &long_rest[1..],
        _ => false,
    }
}

/// Whether a nonce is among those of `WITHLOCK_HELD`.
pub fn is_among(held: &OsStr, nonce: &Nonce) -> bool {
    held.as_bytes().split(|b| *b == b' ').any(|word| word == nonce.as_str().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_of_time_are_read_as_people_write_them() {
        for (text, ms) in [
            ("1.5", 1_500),
            ("90s", 90_000),
            ("500ms", 500),
            ("1m30s", 90_000),
            ("2h", 7_200_000),
            ("1d", 86_400_000),
            ("0", 0),
            (".5s", 500),
            ("5.", 5_000),
            ("0.0001s", 1),
            ("1h0.5m", 3_630_000),
        ] {
            assert_eq!(duration_ms(text, "--ttl"), Ok(ms), "{text}");
        }
    }

    #[test]
    fn nonsense_negative_and_overflowing_lengths_of_time_are_refused() {
        for text in
            ["", "s", "-1", "-1s", "1 s", "1x", "1m30", "1..5", ".", "1e9", "+1", "inf", "nan", "٣s", "1µs", "1s "]
        {
            assert!(duration_ms(text, "--ttl").is_err_and(|e| e.0.contains("not a length of time")), "{text}");
        }
        for text in ["99999999999999999999999999999999999999999s", "340282366920938463463374607431768211455h", "40000d"]
        {
            assert!(duration_ms(text, "--ttl").is_err_and(|e| e.0.contains("too long")), "{text}");
        }
    }

    #[test]
    fn an_exit_code_out_of_range_is_refused() {
        let code = |text: &str| conflict_exit(&Waiting { conflict_exit_code: Some(text.into()), ..Waiting::default() });
        assert_eq!(code("0"), Ok(Some(0)));
        assert_eq!(code("255"), Ok(Some(255)));
        for text in ["256", "600", "-1", "", "+1", "1.0", "x"] {
            assert!(code(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_mode_that_would_lock_its_owner_out_is_refused() {
        assert_eq!((mode("600"), mode("0664")), (Ok(0o600), Ok(0o664)));
        for text in ["", "000", "400", "1777", "8", "0x1", "+600", "00600"] {
            assert!(mode(text).is_err(), "{text}");
        }
    }

    #[test]
    fn mistakes_do_not_run_things() {
        let check = |words: &[&str]| {
            let words: Vec<OsString> = words.iter().map(OsString::from).collect();
            check_first_word(&words)
        };
        for wrong in [
            &["inspect", "--", "x"][..],
            &["inspct", "x"],
            &["braek", "x"],
            &["rlease", "x"],
            &["brekа"[..4].as_ref(), "x"],
        ] {
            assert!(check(wrong).is_err(), "{wrong:?}");
        }
        for right in
            [&["inspect", "x"][..], &["./inspect", "--", "x"], &["inspct", "--", "x"], &["job.lock", "x"], &["-n"], &[]]
        {
            assert_eq!(check(right), Ok(()), "{right:?}");
        }
    }

    #[test]
    fn what_consists_of_digits_is_a_descriptor() {
        let to = |word: &str| log_to(word.into());
        assert_eq!((to("3"), to("03")), (Ok(LogTo::Descriptor(3)), Ok(LogTo::Descriptor(3))));
        assert_eq!((to("./3"), to("3a")), (Ok(LogTo::File("./3".into())), Ok(LogTo::File("3a".into()))));
        for word in ["", "-", "99999999999"] {
            assert!(to(word).is_err(), "{word}");
        }
    }

    #[test]
    fn one_edit_is_one_edit() {
        for (a, b, near) in [
            ("break", "braek", true),
            ("break", "beak", true),
            ("break", "breaks", true),
            ("break", "creak", true),
            ("break", "break", false),
            ("break", "brook", false),
            ("check", "lock", false),
        ] {
            assert_eq!(is_one_edit_away(a.as_bytes(), b.as_bytes()), near, "{a} {b}");
        }
    }
}
