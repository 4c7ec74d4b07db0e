//! The rules of the repository, as tests. Each has a known-bad case.

use std::path::{Path, PathBuf};

use super::repository;

/// All files of the repository but what git and cargo keep for themselves: path from its top, content.
fn files() -> Vec<(String, Vec<u8>)> {
    let top = repository();
    let mut found = Vec::new();
    let mut left: Vec<PathBuf> = vec![top.clone()];
    while let Some(dir) = left.pop() {
        for entry in std::fs::read_dir(&dir).expect("a directory").map(|entry| entry.expect("an entry")) {
            let path = entry.path();
            let name = path.strip_prefix(&top).expect("below the top").to_string_lossy().into_owned();
            if entry.file_type().expect("a type").is_dir() {
                if ![".git", "target"].contains(&name.as_str()) {
                    left.push(path);
                }
            } else if name != ".git" {
                found.push((name, std::fs::read(path).expect("a file")));
            }
        }
    }
    found.sort();
    found
}

/// The Rust sources under `dir`: path, text.
pub(super) fn sources(dir: &str) -> Vec<(String, String)> {
    let rust = |name: &str| name.starts_with(dir) && name.ends_with(".rs");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    files().into_iter().filter(|(name, _)| rust(name)).map(|(name, bytes)| (name, text(bytes))).collect()
}

/// The code of a line: without comments, and without what is between quotation marks.
fn code(line: &str) -> String {
    let mut code = String::new();
    for (at, part) in line.split('"').enumerate() {
        if at % 2 == 0 {
            match part.split_once("//") {
                Some((before, _)) => return code + before,
                None => code.push_str(part),
            }
        }
    }
    code
}

/// Whether `word` is a word of `code`.
fn has_word(code: &str, word: &str) -> bool {
    code.split(|c: char| !(c.is_alphanumeric() || c == '_')).any(|found| found == word)
}

const PURE: [&str; 10] = ["address", "cli", "options", "plain", "exit", "record", "lease", "machine", "report", "text"];

/// How far up a module stands: it may use its own level and what is below. Pure modules are at the bottom.
fn level(module: &str) -> usize {
    if PURE.contains(&module) {
        return 0;
    }
    let levels = ["sys", "store", "supervise", "command"];
    1 + levels.iter().position(|level| *level == module).unwrap_or_else(|| panic!("{module}: at which level?"))
}

/// The uses of a higher module in the source of `module`.
fn arrows_upward(module: &str, text: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    for line in text.lines().map(code) {
        // The second climbs from the module, or only from its tests: then what follows is no module of ours.
        for target in line.split("crate::").skip(1).chain(line.split("super::super::").skip(1)) {
            let names = target.trim_start_matches('{').split([',', '}', ';']).take_while(|_| target.starts_with('{'));
            let first = target.split(|c: char| !(c.is_alphanumeric() || c == '_')).next().unwrap_or_default();
            for name in names.map(|name| name.trim().split("::").next().unwrap_or_default()).chain([first]) {
                let is_module = PURE.contains(&name) || ["sys", "store", "supervise", "command"].contains(&name);
                if is_module && level(name) > level(module) {
                    wrong.push(format!("{module} uses {name}: {}", line.trim()));
                }
            }
        }
    }
    wrong
}

fn module_of(path: &str) -> &str {
    let inside = path.strip_prefix("src/").expect("a source");
    inside.split('/').next().expect("a name").trim_end_matches(".rs")
}

#[test]
fn arrows_run_one_way_and_pure_modules_use_pure_modules_only() {
    let mut looked_at = 0;
    for (path, text) in sources("src/") {
        if !["src/lib.rs", "src/main.rs"].contains(&path.as_str()) {
            assert_eq!(arrows_upward(module_of(&path), &text), [""; 0], "{path}");
            looked_at += 1;
        }
    }
    assert!(looked_at > 20, "{looked_at}");
    for (module, bad) in [
        ("lease", "use crate::sys::clock;"),
        ("sys", "    crate::store::file::x()"),
        ("store", "use crate::{record, supervise};"),
        ("report", "use super::super::sys::clock;"),
    ] {
        assert_eq!(arrows_upward(module, bad).len(), 1, "the known-bad case {bad}");
    }
    assert_eq!(arrows_upward("store", "use crate::sys::Errno; // as crate::command does"), [""; 0]);
}

/// Words that only the border to the operating system may use.
fn foreign_words(text: &str) -> Vec<&'static str> {
    let used = |word: &&'static str| text.lines().map(code).any(|line| has_word(&line, word));
    let mut found: Vec<_> = ["nix", "libc", "unsafe"].into_iter().filter(used).collect();
    if text.lines().map(code).any(|line| line.contains("std::fs")) {
        found.push("std::fs");
    }
    found
}

#[test]
fn system_calls_and_unsafe_code_are_at_home_in_sys_only() {
    for (path, text) in sources("src/") {
        if !path.starts_with("src/sys/") {
            assert_eq!(foreign_words(&text), [""; 0], "{path}");
        }
    }
    assert_eq!(foreign_words("use nix::unistd; // unsafe"), ["nix"], "the known-bad case");
    assert_eq!(foreign_words("    unsafe { std::fs::x() }"), ["unsafe", "std::fs"], "the known-bad case");
}

/// The lines with `unsafe` that no comment right above gives a reason for (or, at a function, what its
/// callers owe it).
fn without_reason(text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.lines().collect();
    let is_reasoned = |at: usize| {
        let above = lines[..at].iter().rev().map(|line| line.trim());
        let comments = above.skip_while(|line| line.starts_with("#[")).take_while(|line| line.starts_with("//"));
        comments.into_iter().any(|line| line.contains("SAFETY:") || line.contains("# Safety"))
    };
    let unsafe_lines = (0..lines.len()).filter(|at| has_word(&code(lines[*at]), "unsafe"));
    unsafe_lines.filter(|at| !is_reasoned(*at)).map(|at| lines[at].trim().to_owned()).collect()
}

#[test]
fn every_unsafe_has_its_reason_right_above() {
    for (path, text) in sources("src/").into_iter().chain(sources("tests/")) {
        assert_eq!(without_reason(&text), [""; 0], "{path}");
    }
    let bad = "// SAFETY: x\nunsafe { a() }\nlet b = unsafe { c() };";
    assert_eq!(without_reason(bad), ["let b = unsafe { c() };"], "the known-bad case");
}

#[test]
fn main_is_short_and_no_file_is_too_long_to_read() {
    let lines = |name: &str| super::shipped_text(name).lines().count();
    assert!(lines("src/main.rs") <= 30);
    for (path, text) in sources("src/").into_iter().chain(sources("tests/")) {
        assert!(text.lines().count() <= 650, "{path}: {} lines", text.lines().count());
    }
}

/// What nobody outside can use: notes to self, paths of one machine, hosts of package registries.
fn forbidden(name: &str, text: &str) -> Vec<String> {
    // In pieces, since this file is looked at as well.
    let notes = [["TO", "DO"], ["FIX", "ME"], ["X", "XX:"]];
    let paths = [["/ro", "ot/"], ["/wo", "rk/main"], ["/wo", "rk/shared"], ["/tmp/", "wt-"], ["/ho", "me/"]];
    let hosts = [["crates", ".io"], ["docs", ".rs/"], ["pypi", ".org"], ["deb.", "debian.org"], ["npm", "js.org"]];
    let hosts = hosts.iter().filter(|_| name != "Cargo.lock");
    notes.iter().chain(&paths).chain(hosts).map(|parts| parts.concat()).filter(|word| text.contains(word)).collect()
}

#[test]
fn nothing_speaks_of_unfinished_work_of_one_machine_or_of_a_registry() {
    for (name, bytes) in files() {
        assert_eq!(forbidden(&name, &String::from_utf8_lossy(&bytes)), [""; 0], "{name}");
    }
    let bad = ["// TO", "DO: later, see /ro", "ot/notes"].concat();
    assert_eq!(forbidden("a.rs", &bad).len(), 2, "the known-bad case");
}

/// What does not belong at the top of the repository.
fn misplaced(names: impl Iterator<Item = String>) -> Vec<String> {
    let known = ["Cargo.toml", "Cargo.lock", "src", "tests", "man", "completions", "README.md", "CHANGELOG.md"];
    let is_known = |name: &str| name.starts_with(['.']) || name.starts_with("LICENSE") || known.contains(&name);
    names.filter(|name| !is_known(name) && name != "target").collect()
}

#[test]
fn the_top_of_the_repository_stays_small() {
    let entries = std::fs::read_dir(repository()).expect("the top");
    let names = entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned());
    assert_eq!(misplaced(names), [""; 0]);
    assert_eq!(misplaced(["src", "notes.txt"].map(str::to_owned).into_iter()), ["notes.txt"], "the known-bad case");
}

#[test]
fn the_modules_of_the_map_are_those_that_there_are() {
    let text = super::shipped_text("src/lib.rs");
    let map = text.lines().filter(|line| line.starts_with("//! | ["));
    let listed = map.flat_map(|line| line.split('|').nth(1).unwrap_or_default().split('`').skip(1).step_by(2));
    let mut listed: Vec<String> = listed.map(str::to_owned).chain(["command".to_owned()]).collect();
    listed.sort();
    let modules = text.lines().filter_map(|line| line.trim_start_matches("pub ").strip_prefix("mod "));
    let mut modules: Vec<String> = modules.map(|name| name.trim_end_matches(';').to_owned()).collect();
    modules.sort();
    assert_eq!(listed, modules);
    assert!(modules.iter().all(|module| Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(module).exists()
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(format!("{module}.rs")).exists()));
}
