//! The commands, a page each. `anyhow` is at home here: an error becomes a line and an exit code.

mod acquire;
mod break_;
mod by_nonce;
mod check;
mod inspect;
mod keep;
mod log;
mod obtain;
mod paths;
mod reclaim;
mod release;
mod renew;
mod reserve;
mod run;
mod service;
mod view;

use std::ffi::{OsStr, OsString};

use clap::Parser;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::cli::{Cli, Sub, SubCli};
use crate::exit::Exit;
use crate::options::{Plan, Usage, check_command, check_first_word, declined, is_subcommand};
use crate::plain;
use crate::store::{self, Fault};
use crate::sys::attendant::{Attendant, Orders};
use crate::sys::clock::boot_ms;
use crate::sys::output::complain;
use crate::sys::signal::{OnEntry, block_all};
use crate::sys::{Errno, describe, handover, process, terminal};
use crate::text::Shown;

use log::NoLog;
use run::Begun;

/// The program, from its command line to its exit code.
pub fn main(words: &[OsString]) -> u8 {
    if let Some(begun) = handover::take().and_then(|left| left.downcast::<Begun>().ok()) {
        return begun.finish();
    }
    process::occupy_standard_descriptors();
    dispatch(words).unwrap_or_else(|error| {
        complain(&format!("{error:#}").replace('\n', " "));
        exit_of(&error).code()
    })
}

/// What can be done before the C library has been started: the common case, a lock that is taken, perhaps
/// after a wait, and a command that ends soon. `None`: [`main`] is to go on, from the beginning or from what
/// was left to it.
pub fn early(words: &[OsString]) -> Option<u8> {
    let words = words.get(1..)?;
    check_first_word(words).ok()?;
    let plan = plain::plan(words)?;
    process::occupy_standard_descriptors();
    let place = store::find(&plan.lock, plan.lease.parents).ok()?;
    let on_entry = block_all().ok()?;
    let Some(begun) = run::begin(plan, place, on_entry) else {
        on_entry.restore().ok()?;
        return None;
    };
    match begun.finish_early() {
        Ok(code) => Some(code),
        Err(unfinished) => {
            handover::leave(unfinished);
            None
        }
    }
}

/// Blocks signals: before a lock file exists, so that there is no moment in which one leaks it.
fn block() -> Result<OnEntry, System> {
    block_all().map_err(|errno| System::new("block signals", errno))
}

fn dispatch(words: &[OsString]) -> anyhow::Result<u8> {
    let arguments = words;
    let words = words.get(1..).unwrap_or_default();
    check_first_word(words)?;
    if let Some(plan) = plain::plan(words) {
        return run::run(plan);
    }
    if words.first().is_some_and(|word| is_subcommand(word)) {
        return match SubCli::try_parse_from(arguments) {
            Ok(SubCli { subcommand }) => subordinate(subcommand, &block()?),
            Err(error) => usage_error(&error),
        };
    }
    match Cli::try_parse_from(arguments) {
        Ok(Cli { mut run }) => {
            check_command(words, &mut run.argv)?;
            run::run(Plan::new(run)?)
        }
        Err(error) => usage_error(&error),
    }
}

fn subordinate(subcommand: Sub, on_entry: &OnEntry) -> anyhow::Result<u8> {
    match subcommand {
        Sub::Acquire(given) => acquire::acquire(given, on_entry),
        Sub::Renew(given) => renew::renew(given, on_entry),
        Sub::Release(given) => release::release(given, on_entry),
        Sub::Reserve(given) => reserve::reserve(given, on_entry),
        Sub::Inspect(asked) => inspect::inspect(&asked, on_entry),
        Sub::Break(asked) => break_::break_lock(&asked, on_entry),
        Sub::Reclaim(asked) => reclaim::reclaim(&asked, on_entry),
        Sub::Check(asked) => check::check(&asked, on_entry),
    }
}

/// clap's errors in our one-line form; help and version go to standard output.
fn usage_error(error: &clap::Error) -> anyhow::Result<u8> {
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        write(error.render().to_string().as_bytes())?;
        return Ok(0);
    }
    if let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg)
        && let Some(declined) = declined(option)
    {
        return Err(declined.into());
    }
    let text = error.render().to_string();
    let first = text.split("\n\n").next().unwrap_or_default();
    let line = first.trim_start_matches("error: ").split_whitespace().collect::<Vec<_>>().join(" ");
    Err(Usage(format!("{line}; try: withlock --help")).into())
}

/// A fault of a command that takes no lock: where taking one could never succeed, that is not the news.
#[derive(Debug)]
struct Plainly(Fault);

impl std::fmt::Display for Plainly {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.0 {
            Fault::CannotTake { path, why } => write!(out, "{}: {why}", Shown(path)),
            fault => write!(out, "{fault}"),
        }
    }
}

impl std::error::Error for Plainly {}

/// How long a command that only asks waits for one answer of a file system, in milliseconds.
const ANSWER_PATIENCE_MS: u64 = 5_000;

/// Ends a command whose file system does not answer any more, but not before `not_before_ms` from now. A
/// local one always answers.
fn attended(path: &OsStr, may_hang: bool, not_before_ms: u64) -> Option<Attendant> {
    let orders = || Orders {
        patience_ms: ANSWER_PATIENCE_MS,
        not_before_boot_ms: boot_ms().saturating_add(not_before_ms),
        word: None,
        last_word: format!("{}: its file system does not answer", Shown::os(path)),
        exit: Exit::Io.code(),
        mask: None,
    };
    may_hang.then(orders).and_then(Attendant::start)
}

/// Writes what was asked for to standard output.
fn write(bytes: &[u8]) -> Result<(), Fault> {
    let path = b"standard output".to_vec();
    terminal::show(bytes).map_err(|errno| Fault::Io { path, doing: "write", errno })
}

/// The system refused something other than the lock.
#[derive(Debug)]
pub(crate) struct System {
    doing: &'static str,
    errno: Errno,
}

impl System {
    fn new(doing: &'static str, errno: Errno) -> Self {
        System { doing, errno }
    }
}

impl std::fmt::Display for System {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "cannot {}: {}", self.doing, describe(self.errno))
    }
}

impl std::error::Error for System {}

fn exit_of(error: &anyhow::Error) -> Exit {
    if let Some(fault) = error.downcast_ref::<Fault>() {
        fault.exit()
    } else if let Some(Plainly(fault)) = error.downcast_ref::<Plainly>() {
        fault.exit()
    } else if let Some(no_log) = error.downcast_ref::<NoLog>() {
        no_log.exit()
    } else if error.is::<Usage>() {
        Exit::Usage
    } else {
        Exit::System
    }
}
