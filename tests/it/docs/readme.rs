//! The README: its tables are the program's, and what it shows exists.

use std::collections::{BTreeMap, BTreeSet};

use super::manual::exit_codes_of_program;
use super::shipped_text;
use super::surface::{of_program, tree};

/// The rows of the Markdown table under this heading row.
fn table(text: &str, heading: &str) -> Vec<(String, String)> {
    let rows = text.lines().skip_while(|line| *line != heading).skip(2).take_while(|line| line.starts_with('|'));
    let cells = |row: &str| {
        let (first, second) = row.trim_matches('|').split_once('|').expect("two cells");
        (first.trim().to_owned(), second.trim().to_owned())
    };
    rows.map(cells).collect()
}

#[test]
fn the_exit_codes_in_the_readme_are_those_of_the_program() {
    let readme = shipped_text("README.md");
    let rows = |text: &str| table(text, "| exit | meaning |");
    assert_eq!(rows(&readme), exit_codes_of_program());
    let without =
        readme.replacen("| 77 | no permission; also: COMMAND succeeded but the lock may not be released |\n", "", 1);
    assert_ne!(rows(&without), exit_codes_of_program(), "the known-bad case");
}

#[test]
fn the_subcommands_in_the_readme_are_those_of_the_program_in_its_own_words() {
    let rows: BTreeMap<String, String> =
        table(&shipped_text("README.md"), "| subcommand | what it does |").into_iter().collect();
    let about = |sub: &clap::Command| sub.get_about().map(ToString::to_string).unwrap_or_default();
    let program = tree().get_subcommands().map(|sub| (format!("`{}`", sub.get_name()), about(sub))).collect();
    assert_eq!(rows, program);
}

/// The options in the lines that call the program: `withlock … --option`.
fn options_shown(text: &str) -> BTreeSet<String> {
    let calls = text.lines().filter(|line| line.contains("withlock") || line.contains("`--"));
    calls
        .filter(|line| !line.contains("cargo"))
        .flat_map(|line| line.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-')))
        .filter(|word| word.len() > 2 && word.starts_with("--"))
        .map(str::to_owned)
        .collect()
}

#[test]
fn every_option_that_the_readme_and_the_changelog_show_exists() {
    let program = of_program();
    let known: BTreeSet<&String> = program.values().flat_map(BTreeMap::keys).collect();
    let unknown = |text: &str| {
        let shown = options_shown(text);
        assert!(shown.len() > 3, "{shown:?}");
        shown.into_iter().filter(|option| !known.contains(option)).collect::<Vec<_>>()
    };
    for name in ["README.md", "CHANGELOG.md"] {
        let text = shipped_text(name);
        assert_eq!(unknown(&text), [""; 0], "{name}");
        assert_eq!(unknown(&format!("{text}\n    withlock --gently LOCK\n")), ["--gently"], "the known-bad case");
    }
}

/// The name that a heading can be linked to by.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || " -".contains(*c));
    kept.collect::<String>().trim().to_lowercase().replace(' ', "-")
}

/// The links of a page that lead into the repository or to a part of itself lead somewhere.
#[test]
fn what_the_readme_links_to_is_there() {
    let readme = shipped_text("README.md");
    let headings: BTreeSet<String> = readme
        .lines()
        .filter_map(|line| line.strip_prefix("## "))
        .map(|heading| format!("#{}", anchor(heading)))
        .collect();
    let targets = readme.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let inside: Vec<&str> = targets.filter(|target| !target.contains("://")).collect();
    assert!(!inside.is_empty());
    for target in inside {
        let is_there = match target.strip_prefix('#') {
            Some(_) => headings.contains(target),
            None => super::repository().join(target).exists(),
        };
        assert!(is_there, "{target}");
    }
}

/// What the README says of the program's size: `one static file of 2.0 MB`.
fn size_in_readme(readme: &str) -> f64 {
    let rest = readme.split_once("one static file of ").expect("the size").1;
    rest.split_once(" MB").expect("in MB").0.parse().expect("a number")
}

#[test]
fn the_size_in_the_readme_is_that_of_the_program_as_it_is_shipped_which_needs_no_other_file() {
    let bytes = std::fs::metadata(crate::harness::shipped()).expect("the program").len();
    let measured = f64::from(u32::try_from(bytes).expect("a small program")) / 1e6;
    let told = size_in_readme(&shipped_text("README.md"));
    assert!((told - measured).abs() <= measured / 10.0, "the README says {told} MB, it is {measured}");
    let sandbox = crate::harness::Sandbox::new();
    let needs = |program: &std::path::Path| {
        let listed = sandbox.program("readelf").args(["--dynamic", "--wide"]).arg(program).run();
        listed.exited(0).out().contains("NEEDED")
    };
    assert!(!needs(crate::harness::shipped()));
    assert!(needs(std::path::Path::new("/usr/bin/env")), "the known-bad case");
}
