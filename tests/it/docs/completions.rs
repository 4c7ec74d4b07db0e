//! The completions, asked in the real shells: the same options and values as the program, files where a
//! lock is due, and the command's own completion behind it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::surface::{Value, differences, of_program};
use super::{repository, shipped_text};
use crate::harness::{Run, Sandbox, Terminal};

/// Where the package bash-completion is.
const PACKAGE: &str = "/usr/share/bash-completion/bash_completion";

#[derive(Clone, Copy, Debug, PartialEq)]
enum Shell {
    Bash,
    /// Without the package bash-completion.
    BashAlone,
    Zsh,
    Fish,
}

const SHELLS: [Shell; 4] = [Shell::Bash, Shell::BashAlone, Shell::Zsh, Shell::Fish];

impl Shell {
    fn file(self) -> &'static str {
        match self {
            Shell::Bash | Shell::BashAlone => "withlock.bash",
            Shell::Zsh => "_withlock",
            Shell::Fish => "withlock.fish",
        }
    }

    /// What this shell offers for each of `lines`, with the completions in `dir`.
    #[track_caller]
    fn offers(self, sandbox: &Sandbox, dir: &Path, prelude: &str, lines: &[String]) -> Vec<BTreeSet<String>> {
        let data = |name: &str| repository().join("tests/data/completions").join(name);
        let file = dir.join(self.file());
        let run = match self {
            Shell::Bash => sandbox.program("bash").arg("--norc").arg(data("offers.bash")).arg(file).arg(PACKAGE),
            Shell::BashAlone => sandbox.program("bash").arg("--norc").arg(data("offers.bash")).arg(file).arg(""),
            Shell::Zsh => sandbox.program("zsh").arg("-f").arg(data("offers.zsh")).arg(dir),
            Shell::Fish => sandbox.program("fish").arg(data("offers.fish")).arg(file),
        };
        let finished = at_home(sandbox, run.arg(prelude).args(lines)).run();
        finished.exited(0);
        let mut offers = vec![BTreeSet::new(); lines.len()];
        for line in finished.out().lines() {
            let (number, candidate) = line.split_once('\t').unwrap_or_else(|| panic!("{self:?}: {line:?}"));
            offers[number.parse::<usize>().expect("a number")].insert(candidate.to_owned());
        }
        offers
    }

    /// What it offers for one line, with the completions as they are shipped.
    #[track_caller]
    fn offers_for(self, sandbox: &Sandbox, line: &str) -> BTreeSet<String> {
        self.offers(sandbox, &completions(), "", &[line.to_owned()]).remove(0)
    }
}

/// A home of the test's own: shells read and write there.
fn at_home<'s>(sandbox: &Sandbox, run: Run<'s>) -> Run<'s> {
    let home = sandbox.io_path("home");
    std::fs::create_dir(&home).expect("a home");
    run.env("HOME", &home).env("XDG_CONFIG_HOME", &home).env("XDG_DATA_HOME", home).env("TERM", "dumb")
}

fn completions() -> PathBuf {
    repository().join("completions")
}

/// A sandbox with one file and one directory in it.
fn with_a_lock() -> Sandbox {
    let sandbox = Sandbox::new();
    std::fs::write(sandbox.path("only.lock"), "").expect("a file");
    std::fs::create_dir(sandbox.path("only.d")).expect("a directory");
    sandbox
}

fn names<const N: usize>(names: [&str; N]) -> BTreeSet<String> {
    names.map(str::to_owned).into()
}

type Spellings = BTreeMap<String, BTreeMap<String, ()>>;

/// The spellings of all options that a shell offers, for a run and for each subcommand.
fn spellings(shell: Shell, sandbox: &Sandbox, dir: &Path) -> Spellings {
    let places: Vec<String> = of_program().into_keys().collect();
    let lines: Vec<String> = places.iter().map(|place| format!("withlock {place} -").replace("  ", " ")).collect();
    let offers = shell.offers(sandbox, dir, "", &lines);
    let as_map = |offers: BTreeSet<String>| offers.into_iter().map(|option| (option, ())).collect();
    places.into_iter().zip(offers.into_iter().map(as_map)).collect()
}

fn spellings_of_program() -> Spellings {
    let without_values = |options: BTreeMap<String, Value>| options.into_keys().map(|option| (option, ())).collect();
    of_program().into_iter().map(|(place, options)| (place, without_values(options))).collect()
}

#[test]
fn every_shell_offers_every_option_of_the_program_and_no_other() {
    let sandbox = with_a_lock();
    for shell in SHELLS {
        let offered = spellings(shell, &sandbox, &completions());
        assert_eq!(differences(&spellings_of_program(), &offered), [""; 0], "{shell:?}");
    }
}

#[test]
fn an_option_that_a_completion_forgot_or_invented_is_found() {
    let sandbox = with_a_lock();
    for shell in SHELLS {
        let dir = sandbox.io_path("completions");
        std::fs::create_dir(&dir).expect("a directory");
        let text = shipped_text(&format!("completions/{}", shell.file()));
        std::fs::write(dir.join(shell.file()), text.replace("older-than", "younger-than")).expect("a file");
        assert_eq!(
            differences(&spellings_of_program(), &spellings(shell, &sandbox, &dir)),
            ["reclaim --older-than is missing", "reclaim --younger-than is extra"],
            "{shell:?}"
        );
    }
}

#[test]
fn every_shell_knows_which_options_have_a_value_and_what_it_may_be() {
    let sandbox = with_a_lock();
    let mut asked = Vec::new();
    let mut lines = Vec::new();
    for (place, options) in of_program() {
        for (option, value) in options {
            // Nothing comes after these.
            if !["-h", "--help", "-V", "--version"].contains(&option.as_str()) {
                lines.push(format!("withlock {place} {option} ").replace("  ", " "));
                asked.push((place.clone(), value));
            }
        }
    }
    for shell in SHELLS {
        // A few lines at a time: a busy machine takes its time for each.
        let offers = lines.chunks(16).flat_map(|some| shell.offers(&sandbox, &completions(), "", some));
        for (((place, value), line), offered) in asked.iter().zip(&lines).zip(offers) {
            // A value is not the lock, and the lock is not a value.
            let next = if place == "reserve" { "only.d" } else { "only.lock" };
            let is_next_due = offered.iter().any(|offer| offer.trim_end_matches('/') == next);
            match value {
                Value::OneOf(words) => assert_eq!(offered, words.iter().cloned().collect(), "{shell:?}: {line}"),
                Value::Named(_) => {
                    // Where any file may be the value, the lock's is one.
                    let is_file = ["--also ", "--log-json "].iter().any(|option| line.ends_with(option));
                    assert_eq!(is_next_due, is_file, "{shell:?}: {line}: {offered:?}");
                }
                Value::Nothing => assert!(is_next_due, "{shell:?}: {line}: {offered:?}"),
            }
        }
    }
}

#[test]
fn a_value_may_be_written_behind_an_equals_sign() {
    let sandbox = with_a_lock();
    for shell in SHELLS {
        let offered = shell.offers_for(&sandbox, "withlock --on-busy=s");
        let value = |offer: &String| offer.trim_start_matches("--on-busy=").to_owned();
        assert!(offered.iter().map(value).any(|value| value == "skip"), "{shell:?}: {offered:?}");
        assert!(!offered.iter().map(value).any(|value| value == "fail"), "{shell:?}: {offered:?}");
    }
}

#[test]
fn the_first_word_is_a_subcommand_or_a_lock_and_a_later_one_only_a_lock() {
    let sandbox = with_a_lock();
    let subcommands: BTreeSet<String> = withlock::options::SUBCOMMANDS.iter().map(|name| name.to_string()).collect();
    for shell in SHELLS {
        // Where nothing else can come, zsh shows the options.
        let plain = |line: &str| -> BTreeSet<String> {
            let offers = shell.offers_for(&sandbox, line);
            let words = offers.iter().filter(|offer| !offer.starts_with('-'));
            words.map(|word| word.trim_end_matches('/').to_owned()).collect()
        };
        let files = names(["only.d", "only.lock"]);
        assert_eq!(plain("withlock "), subcommands.union(&files).cloned().collect(), "{shell:?}");
        assert_eq!(plain("withlock -n "), files, "{shell:?}");
        assert_eq!(plain("withlock break "), files, "{shell:?}");
        assert_eq!(plain("withlock inspect x "), files, "{shell:?}");
        assert_eq!(plain("withlock check x "), names([]), "{shell:?}");
        assert_eq!(plain("withlock reserve "), names(["only.d"]), "{shell:?}");
        assert_eq!(plain("withlock --fence "), names(["only.d"]), "{shell:?}");
        assert_eq!(plain("withlock x -c y "), names([]), "{shell:?}");
    }
}

#[test]
fn behind_the_lock_comes_a_command_and_then_what_that_command_offers() {
    let sandbox = with_a_lock();
    for (shell, prelude) in [
        (Shell::Bash, "complete -W 'alpha beta' sometool"),
        (Shell::Zsh, "_sometool() { compadd alpha beta }; compdef _sometool sometool"),
        (Shell::Fish, "complete -c sometool -xa 'alpha beta'"),
    ] {
        let lines = [
            "withlock x setpri",
            "withlock x -- setpri",
            "withlock -nw 5 --ttl=9s x -- setpri",
            "withlock x sometool ",
            "withlock -w 5 x -- sometool a",
            "withlock --skip-if setpri",
            "withlock -c setpri",
        ];
        let offers = shell.offers(&sandbox, &completions(), prelude, &lines.map(str::to_owned));
        let [bare, dashed, behind_options, all, some, condition, text] = offers.as_slice() else { panic!() };
        for offered in [bare, dashed, behind_options, condition, text] {
            assert_eq!(*offered, names(["setpriv"]), "{shell:?}");
        }
        assert_eq!(*all, names(["alpha", "beta"]), "{shell:?}");
        assert_eq!(*some, names(["alpha"]), "{shell:?}");
    }
    assert_eq!(Shell::BashAlone.offers_for(&sandbox, "withlock x setpri"), names(["setpriv"]));
    assert_eq!(Shell::BashAlone.offers_for(&sandbox, "withlock x cat only.l"), names(["only.lock"]));
}

#[test]
fn a_process_may_be_chosen_for_a_keeper() {
    let sandbox = with_a_lock();
    for shell in SHELLS {
        let offered = shell.offers_for(&sandbox, "withlock acquire --for-pid ");
        assert!(!offered.is_empty(), "{shell:?}");
        assert!(offered.iter().all(|offer| offer.parse::<u32>().is_ok()), "{shell:?}: {offered:?}");
    }
}

#[test]
fn the_tabulator_key_completes_in_an_interactive_bash() {
    let sandbox = with_a_lock();
    let bash = at_home(&sandbox, sandbox.program("bash").args(["--norc", "--noprofile", "-i"])).env("PS1", "? ");
    let (mut terminal, running) = Terminal::start(bash);
    terminal.types(&format!("source '{}'\n", completions().join("withlock.bash").display()));
    terminal.types("complete -p withlock | sed s/-F/loaded:/\n");
    terminal.expect("complete loaded: _withlock withlock");
    terminal.types("withlock --on-b\ts\tonly.l\tsetpri\t");
    terminal.expect("withlock --on-busy skip only.lock setpriv");
    terminal.types("\u{15}exit\n");
    running.wait();
}
