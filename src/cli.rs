//! What can be typed. clap's types only; what it means is decided in `options`.

use std::ffi::OsString;

use clap::{ArgAction, Args, CommandFactory, Parser, Subcommand, ValueEnum};

/// `withlock LOCK COMMAND`: what is typed most often, and parsed without the rest.
#[derive(Debug, Parser)]
#[command(
    name = "withlock",
    version,
    about = "Run COMMAND while holding LOCK; inspect, break and reclaim locks",
    override_usage = "withlock [OPTIONS] LOCK [--] COMMAND [ARG]...\n       withlock [OPTIONS] LOCK -c 'SHELL TEXT'\n       withlock SUBCOMMAND [OPTIONS] ...",
    after_help = "Subcommands (withlock SUBCOMMAND --help): inspect break reclaim check acquire renew release reserve\n\
                  A lock named like a subcommand is written ./inspect. Durations: 1.5 90s 500ms 1m30s 2h.\n\
                  Exit status: COMMAND's own; 75 held by another, 76 lost; all of them in withlock(1).",
    term_width = 100,
    args_override_self = true
)]
pub struct Cli {
    /// What to run, and under which lock.
    #[command(flatten)]
    pub run: Run,
}

/// `withlock SUBCOMMAND`.
#[derive(Debug, Parser)]
#[command(name = "withlock", version, disable_help_subcommand = true, term_width = 100)]
pub struct SubCli {
    /// Which, and with what.
    #[command(subcommand)]
    pub subcommand: Sub,
}

/// The whole command tree, for man page, completions and the tests that hold them equal.
pub fn whole() -> clap::Command {
    SubCli::command().get_subcommands().cloned().fold(Cli::command(), clap::Command::subcommand)
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Sub {
    /// Show who holds a lock, since when, until when, whether it is stale, and what is quarantined
    Inspect(Inspect),
    /// End a stale lock's epoch; with --force also a live one
    Break(Break),
    /// Remove quarantines that are old enough
    Reclaim(Reclaim),
    /// Exit 0 while the lock is still held by this nonce, 76 otherwise
    Check(Check),
    /// Take a lock and exit, its nonce on standard output
    Acquire(Acquire),
    /// Renew a lock taken with acquire
    Renew(Renew),
    /// Release a lock taken with acquire
    Release(Release),
    /// Print the next number of DIR: never twice, never blocking for ever
    Reserve(Reserve),
}

/// How long to wait for a lock, and what then.
#[derive(Debug, Default, Args)]
pub struct Waiting {
    /// Try once, do not wait
    #[arg(short = 'n', long = "no-wait", visible_aliases = ["nonblock", "nb"], conflicts_with = "wait")]
    pub no_wait: bool,
    /// Wait at most D (0: try once; without -n and -w: wait for ever)
    #[arg(short = 'w', long = "wait", visible_alias = "timeout", value_name = "D", allow_hyphen_values = true)]
    pub wait: Option<String>,
    /// Exit with N instead of 75 when the lock is held by another (0-255)
    #[arg(short = 'E', long, value_name = "N", allow_hyphen_values = true)]
    pub conflict_exit_code: Option<String>,
}

/// What a new lock is like.
#[derive(Debug, Default, Args)]
pub struct Terms {
    /// The lease: older than this without a renewal, the lock is stale (default 60s, at least 1s)
    #[arg(long, value_name = "D", allow_hyphen_values = true)]
    pub ttl: Option<String>,
    /// Reserve a number in DIR with the grant, a token that only grows (WITHLOCK_FENCE)
    #[arg(long, value_name = "DIR")]
    pub fence: Option<OsString>,
    /// Do not wait for the ttl where the kernel has dropped the holder's inherited guard; programs that
    /// close descriptors they do not know (sudo, daemons) drop it too
    #[arg(long)]
    pub evict_dead: bool,
    /// Make the missing parent directories of LOCK
    #[arg(short = 'p', long)]
    pub parents: bool,
    /// Permissions of the lock file, in octal (default 0644 less the umask)
    #[arg(long, value_name = "M", allow_hyphen_values = true)]
    pub mode: Option<String>,
    /// A word for people, kept in the record
    #[arg(long, value_name = "T")]
    pub label: Option<OsString>,
}

/// How to reach a lock that lives in etcd.
#[derive(Debug, Default, Args)]
pub struct Service {
    /// Certificates that the etcd servers are to be trusted by (etcds://), PEM
    #[arg(long, value_name = "FILE")]
    pub etcd_cacert: Option<OsString>,
    /// The certificate to show to etcd, PEM
    #[arg(long, value_name = "FILE", requires = "etcd_key")]
    pub etcd_cert: Option<OsString>,
    /// Its key, PEM
    #[arg(long, value_name = "FILE", requires = "etcd_cert")]
    pub etcd_key: Option<OsString>,
    /// USER:PASSWORD for etcd, in a file (or WITHLOCK_ETCD_USER and WITHLOCK_ETCD_PASSWORD)
    #[arg(long, value_name = "FILE")]
    pub etcd_credentials: Option<OsString>,
}

/// How talkative to be.
#[derive(Debug, Default, Args, Clone, Copy, PartialEq, Eq)]
pub struct Talk {
    /// Say nothing but errors
    #[arg(short = 'q', long, conflicts_with = "verbose")]
    pub quiet: bool,
    /// Say what is done
    #[arg(short = 'v', long)]
    pub verbose: bool,
}

/// `withlock LOCK COMMAND`.
#[derive(Debug, Default, Args)]
pub struct Run {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub waiting: Waiting,
    /// Hold LOCK2 as well: all of them or none, in whatever order they are named (repeatable)
    #[arg(long, value_name = "LOCK2", action = ArgAction::Append)]
    pub also: Vec<OsString>,
    /// When the wait ends without the lock: exit 75, exit 0, or run COMMAND without the lock
    #[arg(long, value_name = "WHAT", value_enum)]
    pub on_busy: Option<OnBusy>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub terms: Terms,
    /// Neither renewal nor guard: stale one ttl after it was taken, whoever lives
    #[arg(long)]
    pub no_renew: bool,
    /// End COMMAND after D (exit 124)
    #[arg(long, value_name = "D", allow_hyphen_values = true)]
    pub max_hold: Option<String>,
    /// Grace between TERM and KILL when COMMAND must be ended (default 10s)
    #[arg(long, value_name = "D", allow_hyphen_values = true)]
    pub kill_after: Option<String>,
    /// What happens to COMMAND when the lock is lost (default terminate)
    #[arg(long, value_name = "WHAT", value_enum)]
    pub on_lost: Option<OnLost>,
    /// Run CMD (sh -c) under the lock first; if it succeeds COMMAND is not needed: release, exit 0
    #[arg(long, value_name = "CMD")]
    pub skip_if: Option<OsString>,
    /// COMMAND does not inherit the guard
    #[arg(short = 'o', long)]
    pub close: bool,
    /// Append what happens to FILE, an event a line, in JSON; a number is a descriptor that is open
    #[arg(long, value_name = "FILE")]
    pub log_json: Option<OsString>,
    /// A lock held by an ancestor of this process counts as taken
    #[arg(long)]
    pub reentrant: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub service: Service,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub talk: Talk,
    /// Run TEXT through sh -c
    #[arg(short = 'c', long = "command", value_name = "TEXT", conflicts_with = "argv")]
    pub shell_text: Option<OsString>,
    /// The lock file, or etcd://HOST:PORT[,HOST:PORT...]/KEY
    #[arg(value_name = "LOCK", required = true)]
    pub lock: OsString,
    /// What to run, with its arguments
    #[arg(value_name = "COMMAND", trailing_var_arg = true, allow_hyphen_values = true)]
    pub argv: Vec<OsString>,
}

/// `--on-busy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum OnBusy {
    /// Exit 75.
    #[default]
    Fail,
    /// Exit 0 with one line on standard error.
    Skip,
    /// Run COMMAND without the lock.
    Run,
}

/// `--on-lost`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum OnLost {
    /// End COMMAND and all its descendants.
    #[default]
    Terminate,
    /// Say so and let COMMAND go on.
    Warn,
}

/// `withlock inspect`.
#[derive(Debug, Args)]
pub struct Inspect {
    /// Write JSON, one document
    #[arg(long)]
    pub json: bool,
    /// Redraw every second on a terminal, until interrupted
    #[arg(long, conflicts_with_all = ["json", "quiet"])]
    pub watch: bool,
    /// Print nothing; exit 0 free, 75 held (or guarded, contested, young), 79 stale, 73 no lock
    #[arg(short = 'q', long, conflicts_with = "json")]
    pub quiet: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub service: Service,
    /// Locks, or directories: every lock and quarantine in them
    #[arg(value_name = "PATH", required = true)]
    pub paths: Vec<OsString>,
}

/// `withlock break`.
#[derive(Debug, Args)]
pub struct Break {
    /// End also a live, guarded or young lock; its holder ends its command
    #[arg(long)]
    pub force: bool,
    /// End only the epoch with this nonce
    #[arg(long, value_name = "N")]
    pub nonce: Option<String>,
    /// Why, for the record in the quarantine
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<OsString>,
    /// Keep the ended lock's record for good (etcd; otherwise the service removes it when it is old)
    #[arg(long)]
    pub keep: bool,
    /// Say what would be done, do nothing
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub service: Service,
    /// The lock file
    #[arg(value_name = "LOCK")]
    pub lock: OsString,
}

/// `withlock reclaim`.
#[derive(Debug, Args)]
pub struct Reclaim {
    /// Only what is older than D; not below the safe age
    #[arg(long, value_name = "D", allow_hyphen_values = true)]
    pub older_than: Option<String>,
    /// Say what would be removed, remove nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Write JSON, one document
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub service: Service,
    /// Locks, or directories: every quarantine in them
    #[arg(value_name = "PATH", required = true)]
    pub paths: Vec<OsString>,
}

/// `withlock check`.
#[derive(Debug, Args)]
pub struct Check {
    /// The nonce (default: WITHLOCK_NONCE)
    #[arg(long, value_name = "N")]
    pub nonce: Option<String>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub service: Service,
    /// The lock (default: WITHLOCK_LOCK)
    #[arg(value_name = "LOCK")]
    pub lock: Option<OsString>,
}

/// `withlock acquire`.
#[derive(Debug, Args)]
pub struct Acquire {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub waiting: Waiting,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub terms: Terms,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub talk: Talk,
    /// Leave a keeper that renews while process PID lives and releases when it ends
    #[arg(long, value_name = "PID", allow_hyphen_values = true)]
    pub for_pid: Option<String>,
    /// Print lines for eval instead of the bare nonce
    #[arg(long, action = ArgAction::SetTrue)]
    pub export: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub service: Service,
    /// The lock file
    #[arg(value_name = "LOCK")]
    pub lock: OsString,
}

/// `withlock renew`.
#[derive(Debug, Args)]
pub struct Renew {
    /// The nonce that acquire printed (default: WITHLOCK_NONCE)
    #[arg(long, value_name = "N")]
    pub nonce: Option<String>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub service: Service,
    /// The lock (default: WITHLOCK_LOCK)
    #[arg(value_name = "LOCK")]
    pub lock: Option<OsString>,
}

/// `withlock release`.
#[derive(Debug, Args)]
pub struct Release {
    /// The nonce that acquire printed (default: WITHLOCK_NONCE)
    #[arg(long, value_name = "N")]
    pub nonce: Option<String>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub service: Service,
    /// The lock (default: WITHLOCK_LOCK)
    #[arg(value_name = "LOCK")]
    pub lock: Option<OsString>,
}

/// `withlock reserve`.
#[derive(Debug, Args)]
pub struct Reserve {
    /// Wait at most D for DIR/lock, then go on without it (default 2s)
    #[arg(long, value_name = "D", allow_hyphen_values = true)]
    pub wait: Option<String>,
    /// The first number; only in an empty DIR
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    pub start: Option<String>,
    /// The directory that holds the numbers
    #[arg(value_name = "DIR")]
    pub dir: OsString,
}
