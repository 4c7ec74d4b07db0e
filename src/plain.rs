//! The command lines that are typed most often, understood without a parser: building the parser costs more
//! than taking the lock.
//!
//! What is understood here means what it means to the parser, which a test compares; whatever is in the
//! least unusual (an abbreviation, two options in one word, one given twice, a mistake) is left to it.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use crate::address::is_address;
use crate::cli::{OnBusy, OnLost, Run};
use crate::options::{Plan, is_subcommand};

/// `[OPTIONS] LOCK [--] COMMAND [ARG]...` or `[OPTIONS] LOCK -c TEXT`, if it is plain; `words` is without the
/// program's own name.
pub fn plan(words: &[OsString]) -> Option<Plan> {
    let mut run = Run::default();
    let mut given: Vec<&str> = Vec::new();
    let mut words = words;
    loop {
        let (word, rest) = words.split_first()?;
        words = rest;
        if !is_option(word) {
            run.lock = word.clone();
            break;
        }
        let (name, value) = split(word.to_str()?);
        let name = one_name(name);
        if given.contains(&name) {
            return None;
        }
        given.push(name);
        if let Some(flag) = flag(&mut run, name) {
            if value.is_some() {
                return None;
            }
            *flag = true;
            continue;
        }
        let value = match value {
            Some(value) => value,
            None => {
                let (next, rest) = words.split_first()?;
                words = rest;
                next.to_str()?
            }
        };
        if value.is_empty() || value.starts_with('-') {
            return None;
        }
        option(&mut run, name, value)?;
    }
    if is_subcommand(&run.lock) || is_address(&run.lock) || (run.waiting.no_wait && run.waiting.wait.is_some()) {
        return None;
    }
    match words {
        [dashes, argv @ ..] if dashes == "--" => run.argv = argv.to_vec(),
        [option, text] if option == "-c" && !is_option(text) && !text.is_empty() => run.shell_text = Some(text.clone()),
        [command, ..] if !is_option(command) => run.argv = words.to_vec(),
        _ => return None,
    }
    Plan::new(run).ok()
}

fn is_option(word: &OsStr) -> bool {
    word.as_bytes().starts_with(b"-")
}

/// `--name=value` is two things; `-w5` is left to the parser.
fn split(word: &str) -> (&str, Option<&str>) {
    match word.split_once('=') {
        Some((name, value)) if word.starts_with("--") => (name, Some(value)),
        _ => (word, None),
    }
}

/// The long name of what may be written in several ways.
fn one_name(name: &str) -> &str {
    match name {
        "-n" | "--nonblock" | "--nb" => "--no-wait",
        "-w" | "--timeout" => "--wait",
        "-E" => "--conflict-exit-code",
        "-o" => "--close",
        "-q" => "--quiet",
        name => name,
    }
}

fn flag<'a>(run: &'a mut Run, name: &str) -> Option<&'a mut bool> {
    Some(match name {
        "--no-wait" => &mut run.waiting.no_wait,
        "--close" => &mut run.close,
        "--evict-dead" => &mut run.terms.evict_dead,
        "--no-renew" => &mut run.no_renew,
        "--quiet" => &mut run.talk.quiet,
        _ => return None,
    })
}

fn option(run: &mut Run, name: &str, value: &str) -> Option<()> {
    let text = match name {
        "--on-busy" => {
            run.on_busy = Some(match value {
                "fail" => OnBusy::Fail,
                "skip" => OnBusy::Skip,
                "run" => OnBusy::Run,
                _ => return None,
            });
            return Some(());
        }
        "--on-lost" => {
            run.on_lost = Some(match value {
                "terminate" => OnLost::Terminate,
                "warn" => OnLost::Warn,
                _ => return None,
            });
            return Some(());
        }
        "--label" => {
            run.terms.label = Some(value.into());
            return Some(());
        }
        "--wait" => &mut run.waiting.wait,
        "--conflict-exit-code" => &mut run.waiting.conflict_exit_code,
        "--ttl" => &mut run.terms.ttl,
        "--max-hold" => &mut run.max_hold,
        "--kill-after" => &mut run.kill_after,
        _ => return None,
    };
    *text = Some(value.to_owned());
    Some(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use proptest::prelude::*;

    use super::*;
    use crate::cli::Cli;

    fn words(words: &[&str]) -> Vec<OsString> {
        words.iter().map(OsString::from).collect()
    }

    fn parsed(words: &[OsString]) -> Option<Plan> {
        let line = [OsString::from("withlock")].into_iter().chain(words.iter().cloned());
        Cli::try_parse_from(line).ok().and_then(|cli| Plan::new(cli.run).ok())
    }

    #[test]
    fn what_is_typed_most_often_is_plain_and_means_the_same_to_the_parser() {
        let lines: &[&[&str]] = &[
            &["a.lock", "true"],
            &["a.lock", "--", "-x", "--wait"],
            &["a.lock", "sh", "-c", "x"],
            &["a.lock", "-c", "echo hello"],
            &["-n", "a.lock", "true"],
            &["-w", "5", "a.lock", "true"],
            &["--wait=1m30s", "-E", "3", "a.lock", "--", "true"],
            &["--ttl", "90s", "--evict-dead", "a.lock", "true"],
            &["--on-busy", "skip", "--nb", "-q", "a.lock", "true"],
            &["--on-lost=warn", "--max-hold", "2h", "--kill-after", "1", "-o", "a.lock", "true"],
            &["--no-renew", "--label", "nightly", "a.lock", "true"],
        ];
        for line in lines {
            let line = words(line);
            let plain = plan(&line);
            assert!(plain.is_some(), "{line:?} is not plain");
            assert_eq!(plain, parsed(&line), "{line:?}");
        }
    }

    #[test]
    fn the_unusual_is_left_to_the_parser() {
        let lines: &[&[&str]] = &[
            &[],
            &["a.lock"],
            &["-n", "-n", "a.lock", "true"],
            &["-n", "-w", "5", "a.lock", "true"],
            &["-nq", "a.lock", "true"],
            &["-w5", "a.lock", "true"],
            &["--no-wait=1", "a.lock", "true"],
            &["--ttl", "0", "a.lock", "true"],
            &["--wait", "--", "a.lock", "true"],
            &["inspect", "a.lock"],
            &["-q", "inspect", "a.lock"],
            &["etcd://a:1/b", "true"],
            &["a.lock", "-c", "x", "y"],
            &["a.lock", "-n", "true"],
            &["--", "a.lock", "true"],
            &["a.lock", ""],
            &["--skip-if", "true", "a.lock", "true"],
        ];
        for line in lines {
            assert_eq!(plan(&words(line)), None, "{line:?}");
        }
    }

    proptest! {
        #[test]
        fn whatever_is_plain_means_the_same_to_the_parser(line in prop::collection::vec(prop::sample::select(vec![
            "-n", "--no-wait", "--nonblock", "--nb", "-w", "--wait", "--wait=3", "--timeout", "5", "1m", "0", "-1", "x",
            "--ttl", "--ttl=2s", "--evict-dead", "--no-renew", "-o", "--close", "-q", "--quiet", "-v", "-E", "7", "300",
            "--max-hold", "--kill-after=1", "--on-busy", "--on-busy=run", "skip", "--on-lost", "warn", "--label", "-",
            "--label=", "a.lock", "./b", "--", "true", "-c", "echo", "", "inspect", "break", "-p", "--mode", "600",
        ]), 0..9)) {
            let line = words(&line);
            if let Some(plain) = plan(&line) {
                prop_assert_eq!(Some(plain), parsed(&line));
            }
        }
    }
}
