//! What can be typed, as the parser has it: the measure for manual, completions and README.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;

use clap::CommandFactory;

/// What follows an option.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Value {
    Nothing,
    /// A value of the user's, by this name in usage lines.
    Named(String),
    /// One of these words.
    OneOf(Vec<String>),
}

/// The options of a run (under the empty name) and of each subcommand: every spelling, and its value.
pub(super) type Options = BTreeMap<String, BTreeMap<String, Value>>;

/// The whole command tree, built: with help and version, without clap's own help subcommand.
pub(super) fn tree() -> clap::Command {
    let mut tree = withlock::cli::whole().disable_help_subcommand(true);
    tree.build();
    tree
}

/// All options of the program.
pub(super) fn of_program() -> Options {
    let tree = tree();
    let whole = [(String::new(), options(&tree))];
    whole.into_iter().chain(tree.get_subcommands().map(|sub| (sub.get_name().to_owned(), options(sub)))).collect()
}

fn options(command: &clap::Command) -> BTreeMap<String, Value> {
    let mut found = BTreeMap::new();
    for arg in command.get_arguments().filter(|arg| !arg.is_positional()) {
        let words: Vec<String> = arg.get_possible_values().iter().map(|value| value.get_name().to_owned()).collect();
        let value = match arg.get_value_names() {
            _ if !arg.get_action().takes_values() => Value::Nothing,
            _ if !words.is_empty() => Value::OneOf(words),
            Some([name]) => Value::Named(name.to_string()),
            other => panic!("{}: {other:?}", arg.get_id()),
        };
        let short = arg.get_short_and_visible_aliases().unwrap_or_default();
        let long = arg.get_long_and_visible_aliases().unwrap_or_default();
        let spellings = short.iter().map(|short| format!("-{short}"));
        for spelling in spellings.chain(long.iter().map(|long| format!("--{long}"))) {
            found.insert(spelling, value.clone());
        }
    }
    found
}

/// The names of the positional arguments of a command.
pub(super) fn positionals(command: &clap::Command) -> Vec<String> {
    let names = |arg: &clap::Arg| arg.get_value_names().map(|names| names[0].to_string());
    command.get_positionals().filter_map(names).collect()
}

/// What is on one side only, or differs: empty if both are the same.
pub(super) fn differences<V: PartialEq + Debug>(
    program: &BTreeMap<String, BTreeMap<String, V>>,
    other: &BTreeMap<String, BTreeMap<String, V>>,
) -> Vec<String> {
    let empty = BTreeMap::new();
    let places: BTreeSet<&String> = program.keys().chain(other.keys()).collect();
    let mut found = Vec::new();
    for place in places {
        let (ours, theirs) = (program.get(place).unwrap_or(&empty), other.get(place).unwrap_or(&empty));
        let names: BTreeSet<&String> = ours.keys().chain(theirs.keys()).collect();
        for name in names {
            match (ours.get(name), theirs.get(name)) {
                (Some(_), None) => found.push(format!("{place} {name} is missing").trim().to_owned()),
                (None, Some(_)) => found.push(format!("{place} {name} is extra").trim().to_owned()),
                (ours, theirs) if ours != theirs => {
                    found.push(format!("{place} {name}: {theirs:?}, not {ours:?}").trim().to_owned());
                }
                _ => {}
            }
        }
    }
    found
}

#[test]
fn the_parsers_own_tree_is_sound() {
    withlock::cli::whole().disable_help_subcommand(true).debug_assert();
    withlock::cli::Cli::command().debug_assert();
    withlock::cli::SubCli::command().debug_assert();
    let program = of_program();
    assert_eq!(program[""]["--on-busy"], Value::OneOf(["fail", "skip", "run"].map(String::from).into()));
    assert_eq!(program[""]["-w"], Value::Named("D".into()));
    assert_eq!(program["break"]["--force"], Value::Nothing);
    let subcommands: Vec<&str> = program.keys().map(String::as_str).filter(|name| !name.is_empty()).collect();
    let mut known = withlock::options::SUBCOMMANDS.to_vec();
    known.sort_unstable();
    assert_eq!(subcommands, known, "the parser's subcommands are those that are looked for among the words");
}

#[test]
fn what_is_missing_extra_or_different_is_found() {
    let options = |list: &[(&str, &str)]| {
        BTreeMap::from([("break".to_owned(), list.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect())])
    };
    let (ours, theirs) = (options(&[("-a", "1"), ("-b", "1")]), options(&[("-b", "2"), ("-c", "1")]));
    assert_eq!(differences(&ours, &ours), [""; 0]);
    assert_eq!(
        differences(&ours, &theirs),
        ["break -a is missing", "break -b: Some(\"2\"), not Some(\"1\")", "break -c is extra"]
    );
    assert_eq!(differences(&ours, &BTreeMap::new()), ["break -a is missing", "break -b is missing"]);
}
