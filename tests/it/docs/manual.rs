//! The manual pages: sound, and the same as the program.

use std::collections::{BTreeMap, BTreeSet};

use withlock::exit::{Exit, TABLE};
use withlock::record::{Claim, Guard, Nonce, Record, VERSION, Why};

use super::surface::{Options, Value, differences, of_program, positionals, tree};
use super::{repository, shipped_text};
use crate::harness::Sandbox;

const PAGES: [&str; 2] = ["man/withlock.1", "man/withlock.5"];

/// The lines of a section, or of a subsection in it.
pub(super) fn section<'p>(page: &'p str, title: &str) -> Vec<&'p str> {
    part(page.lines(), &format!(".Sh {title}"), ".Sh ")
}

fn part<'p>(lines: impl Iterator<Item = &'p str>, from: &str, until: &str) -> Vec<&'p str> {
    lines.skip_while(|line| *line != from).skip(1).take_while(|line| !line.starts_with(until)).collect()
}

/// The options in lines like `.It Fl w Ar D , Fl -wait Ar D` and `.It Fl -on-busy Cm fail | skip`.
fn options_in(lines: &[&str]) -> BTreeMap<String, Value> {
    let mut found = BTreeMap::new();
    for line in lines.iter().filter_map(|line| line.strip_prefix(".It Fl ")) {
        for spelling in line.split(" , Fl ") {
            let words: Vec<&str> = spelling.split(' ').collect();
            let value = match words[1..] {
                [] => Value::Nothing,
                ["Ar", name] => Value::Named(name.to_owned()),
                ["Cm", ref words @ ..] => {
                    Value::OneOf(words.iter().filter(|word| **word != "|").map(|word| word.to_string()).collect())
                }
                _ => panic!("cannot read {line:?}"),
            };
            found.insert(format!("-{}", words[0]), value);
        }
    }
    found
}

fn options_of_page(page: &str) -> Options {
    let mut options: Options = [(String::new(), options_in(&section(page, "OPTIONS")))].into();
    let subcommands = section(page, "SUBCOMMANDS");
    for name in subcommands.iter().filter_map(|line| line.strip_prefix(".Ss ")) {
        let lines = part(subcommands.iter().copied(), &format!(".Ss {name}"), ".Ss ");
        options.insert(name.to_owned(), options_in(&lines));
    }
    options
}

/// The manual says of `--help` once that every subcommand has it.
fn program_as_the_manual_has_it() -> Options {
    let mut program = of_program();
    for (name, options) in &mut program {
        if !name.is_empty() {
            options.retain(|spelling, _| spelling != "-h" && spelling != "--help");
        }
    }
    program
}

#[test]
fn every_option_of_the_program_is_in_the_manual_with_its_value_and_no_other() {
    let page = shipped_text("man/withlock.1");
    assert_eq!(differences(&program_as_the_manual_has_it(), &options_of_page(&page)), [""; 0]);
    // Known-bad pages.
    let without = page.replacen(".It Fl -max-hold Ar D\n", "", 1);
    assert_eq!(differences(&program_as_the_manual_has_it(), &options_of_page(&without)), ["--max-hold is missing"]);
    let extra = page.replacen(".It Fl -force\n", ".It Fl -force\n.It Fl -gently\n", 1);
    assert_eq!(differences(&program_as_the_manual_has_it(), &options_of_page(&extra)), ["break --gently is extra"]);
    let other = page.replacen("Cm terminate | warn", "Cm terminate", 1);
    assert_eq!(differences(&program_as_the_manual_has_it(), &options_of_page(&other)).len(), 1);
}

/// The forms of the synopsis: subcommand (or none) and all its words.
fn synopsis(page: &str) -> BTreeMap<String, Vec<String>> {
    let lines = section(page, "SYNOPSIS").join(" ");
    let mut forms = BTreeMap::new();
    for form in lines.split(".Nm").skip(1) {
        let words: Vec<String> = form.split_whitespace().map(str::to_owned).collect();
        let subcommand = if words[0] == ".Cm" { words[1].clone() } else { String::new() };
        forms.entry(subcommand).or_insert_with(Vec::new).extend(words);
    }
    forms
}

#[test]
fn the_synopsis_has_every_subcommand_with_its_arguments_and_no_other() {
    let (tree, program) = (tree(), of_program());
    let forms = synopsis(&shipped_text("man/withlock.1"));
    let names: Vec<&String> = forms.keys().collect();
    assert_eq!(names, program.keys().collect::<Vec<_>>());
    for (name, words) in &forms {
        let command = if name.is_empty() { &tree } else { tree.find_subcommand(name).expect("a subcommand") };
        for argument in positionals(command) {
            assert!(words.contains(&argument), "{name}: {argument} is missing in {words:?}");
        }
        for pair in words.windows(2).filter(|pair| pair[0].ends_with("Fl") && pair[1] != "-") {
            let option = format!("-{}", pair[1]);
            assert!(program[name].contains_key(&option), "{name}: {option} is unknown");
        }
    }
}

/// The rows of the exit code table: code, and meaning.
fn exit_codes(page: &str) -> Vec<(String, String)> {
    let lines = section(page, "EXIT STATUS");
    let rows = lines.windows(2).filter_map(|pair| Some((pair[0].strip_prefix(".It ")?, pair[1])));
    rows.map(|(code, meaning)| (code.to_owned(), meaning.to_owned())).collect()
}

/// The table of the program, as documents have it.
pub(super) fn exit_codes_of_program() -> Vec<(String, String)> {
    let code = |exit: Option<Exit>| exit.map_or_else(|| "0-255".to_owned(), |exit| exit.code().to_string());
    TABLE.iter().map(|row| (code(row.exit), row.meaning.to_owned())).collect()
}

#[test]
fn the_exit_codes_in_the_manual_are_those_of_the_program() {
    let page = shipped_text("man/withlock.1");
    assert_eq!(exit_codes(&page), exit_codes_of_program());
    let other = page.replacen(".It 77\nno permission", ".It 77\nno luck", 1);
    assert_ne!(exit_codes(&other), exit_codes_of_program(), "the known-bad case");
}

#[test]
fn the_variables_in_the_manual_are_those_that_a_command_or_a_script_is_given() {
    let sandbox = Sandbox::new();
    std::fs::create_dir(sandbox.path("numbers")).expect("a directory");
    let given = sandbox.withlock().args(["--fence", "numbers"]).lock().args(["--", "env"]).run();
    let exported = sandbox.withlock().args(["acquire", "--export", "--fence", "numbers"]).lock().run();
    let exported = exported.exited(0).out().replace("export ", "");
    let given: BTreeSet<String> = [given.exited(0).out(), exported]
        .iter()
        .flat_map(|told| told.lines())
        .filter_map(|line| line.split_once('='))
        .map(|(name, _)| name.to_owned())
        .filter(|name| name.starts_with("WITHLOCK_"))
        .collect();
    let page = shipped_text("man/withlock.1");
    let told: BTreeSet<String> = section(&page, "ENVIRONMENT")
        .iter()
        .filter_map(|line| line.strip_prefix(".It Ev "))
        .map(str::to_owned)
        .filter(|name| name != "NO_COLOR")
        .collect();
    assert_eq!(given, told);
}

/// The fields that a section lists as `.It Cm name` or `.It Cm one , two`.
fn fields(page: &str, title: &str) -> BTreeSet<String> {
    let listed = section(page, title);
    let names = listed.iter().filter_map(|line| line.strip_prefix(".It Cm "));
    names.flat_map(|names| names.split(" , ")).map(str::to_owned).collect()
}

fn keys(value: &serde_json::Value) -> BTreeSet<String> {
    value.as_object().expect("an object").keys().cloned().collect()
}

#[test]
fn the_fields_of_records_and_claims_in_the_manual_are_those_that_are_written() {
    let page = shipped_text("man/withlock.5");
    let record = Record {
        version: VERSION,
        nonce: Nonce::from_bytes([1; 16]),
        claimed_at_ms: 1,
        ttl_ms: 60_000,
        host: String::new(),
        boot_id: String::new(),
        pid: 1,
        pid_started: 1,
        uid: 0,
        command: String::new(),
        guard: Guard::Inherited,
        dev: 1,
        label: Some("l".into()),
        fence: Some(1),
    };
    assert_eq!(fields(&page, "RECORD"), keys(&serde_json::to_value(record).expect("JSON")));
    let claim = Claim {
        why: Why::Break,
        at_ms: 1,
        host: String::new(),
        pid: 1,
        uid: 0,
        ttl_ms: 1,
        reason: Some(String::new()),
    };
    let claim = serde_json::to_value(claim).expect("JSON");
    assert_eq!(fields(&page, "CLAIM"), keys(&claim));
    let without = page.replacen(".It Cm why\n", "", 1);
    assert_ne!(fields(&without, "CLAIM"), keys(&claim), "the known-bad case");
    for word in [Why::Stale, Why::Break, Why::LateRelease].map(|why| serde_json::to_value(why).expect("JSON")) {
        let word = word.as_str().expect("a word").to_owned();
        assert!(page.contains(&format!(".Ql {word}")), "{word}");
    }
    for guard in ["inherited", "wrapper", "none"] {
        assert!(page.contains(&format!(".Ql {guard}")), "{guard}");
    }
}

#[test]
fn the_examples_of_files_in_the_manual_are_ones_that_the_program_reads() {
    let page = shipped_text("man/withlock.5");
    let blocks = super::examples::literal_blocks(&section(&page, "EXAMPLES"));
    let [record, claim] = blocks.as_slice() else { panic!("two examples, not {blocks:?}") };
    let one_line = |block: &str| block.lines().map(str::trim_start).collect::<String>();
    let record = one_line(record);
    let found = withlock::record::classify(record.as_bytes(), record.len() as u64);
    assert!(matches!(found, withlock::record::Content::Record(_)), "{found:?}");
    serde_json::from_str::<Claim>(&one_line(claim)).expect("a claim");
}

/// What mandoc says of a page: its exit code and its words.
fn lint(page: &str) -> (Option<i32>, String) {
    let sandbox = Sandbox::new();
    let path = sandbox.path("page");
    std::fs::write(&path, page).expect("a page");
    let linted = sandbox.program("mandoc").args(["-T", "lint", "-W", "warning"]).arg(path).run();
    (linted.code(), linted.out() + &linted.err())
}

#[test]
fn mandoc_finds_nothing_wrong_with_the_pages() {
    for name in PAGES {
        assert_eq!(lint(&shipped_text(name)), (Some(0), String::new()), "{name}");
    }
    let (code, said) = lint(&shipped_text(PAGES[0]).replacen(".El\n", "", 1));
    assert!(code != Some(0) && !said.is_empty(), "the known-bad case");
}

#[test]
fn man_shows_the_pages_by_their_path_with_every_section() {
    let sandbox = Sandbox::new();
    for name in PAGES {
        let page = shipped_text(name);
        let shown = sandbox
            .sh(format!("cd '{}' && man -P cat ./{name}", repository().display()))
            .env("LC_ALL", "C.UTF-8")
            .env("MANWIDTH", "80")
            .run();
        shown.exited(0);
        let text = shown.out();
        for title in page.lines().filter_map(|line| line.strip_prefix(".Sh ")) {
            assert!(text.lines().any(|line| line == title), "{name}: {title} is missing in\n{text}");
        }
    }
}
