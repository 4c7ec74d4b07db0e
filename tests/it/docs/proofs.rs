//! tests/README.md: what it says of tests, the tests say of themselves.

use std::collections::BTreeSet;

use super::rules::sources;
use super::shipped_text;

/// The names of all integration tests, with their modules.
fn tests() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for (path, text) in sources("tests/it/") {
        let module = path.trim_start_matches("tests/it/").trim_end_matches(".rs").trim_end_matches("/mod");
        let module = module.replace('/', "::");
        let mut lines = text.lines().map(str::trim);
        while lines.any(|line| line == "#[test]") {
            // Other attributes may stand between.
            let function = lines.find_map(|line| line.strip_prefix("fn "));
            let name = function.and_then(|rest| rest.split_once('(')).map(|(name, _)| name);
            names.extend(name.map(|name| format!("{module}::{name}")));
        }
    }
    names
}

/// What stands between backquotes and reads like a module or a test: in words and with colons.
fn mentioned(text: &str) -> BTreeSet<String> {
    let quoted = text.split('`').skip(1).step_by(2);
    let is_name = |text: &str| text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "_:".contains(c));
    quoted.filter(|text| text.contains('_') && is_name(text) || text.contains("::")).map(str::to_owned).collect()
}

/// Names that no test and no module of tests has.
fn unknown(text: &str) -> Vec<String> {
    let tests = tests();
    let is_known = |name: &String| tests.iter().any(|test| test == name || test.starts_with(&format!("{name}::")));
    mentioned(text).into_iter().filter(|name| !is_known(name)).collect()
}

#[test]
fn every_test_that_the_page_on_tests_names_exists() {
    let text = shipped_text("tests/README.md");
    let named = mentioned(&text).len();
    assert!(named > 60, "only {named} names");
    assert_eq!(unknown(&text), Vec::<String>::new());
    let worse = format!("{text}\n- `contention::no_update_is_ever_lost`\n- `no_such_module`\n");
    assert_eq!(unknown(&worse), ["contention::no_update_is_ever_lost", "no_such_module"], "the known-bad case");
}

/// The numbers that the page tells, where they stand in the tests.
#[test]
fn the_numbers_on_the_page_are_those_of_the_tests() {
    let page = shipped_text("tests/README.md").split_whitespace().collect::<Vec<_>>().join(" ");
    for (said, file, stands) in [
        ("at least 100,000 schedules", "tests/it/explorer/mod.rs", "const LEAST: u64 = 100_000;"),
        ("in at most 200,000", "tests/it/explorer/controls.rs", "const WITHIN: u64 = 200_000;"),
        ("64 processes", "tests/it/contention/mod.rs", "const PROCESSES: usize = 64;"),
        (
            "every second system call on the lock's files and every eighth other",
            "tests/it/injected/mod.rs",
            "sample(each(clean, Fault::Kill), 8, 2)",
        ),
        ("at least 2,000 updates and 10 s", "tests/it/two_hosts/contention.rs", "asked.unwrap_or(10)), 2_000, 3)"),
        ("150 stale epochs", "tests/it/ops_race.rs", "unwrap_or(150)"),
        ("500 rounds", "tests/it/reserve_arbiter.rs", "const ROUNDS: usize = 500;"),
        ("of 4,000 random cases each", "tests/it/hostile.rs", "config(4_000)"),
        ("at least 3,000 exchanges", "tests/it/swapped.rs", "exchanges > 3_000"),
        ("12 kills", "tests/it/scripts_contention.rs", "const KILLS: usize = 12;"),
    ] {
        assert!(page.contains(said), "{said:?} is not on the page");
        assert!(shipped_text(file).contains(stands), "{said:?}: {file} does not say {stands:?}");
    }
    let steps = shipped_text("tests/it/explorer/controls.rs").matches("    (Step::").count();
    assert!(page.contains(&format!("for each of {steps} steps")), "{steps} steps");
}
