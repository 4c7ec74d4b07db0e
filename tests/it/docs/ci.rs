//! `.ci/run` runs what the README tells people to run.

use super::{repository, shipped_text};

/// The command under "Working on it": the first line of the first shell block there.
fn test_command(readme: &str) -> &str {
    let part = readme.split_once("## Working on it").expect("the heading").1;
    part.split_once("```sh\n").expect("a block").1.lines().next().expect("a line")
}

#[test]
fn ci_runs_the_readmes_test_command_and_can_be_started() {
    let ci = shipped_text(".ci/run");
    let command = test_command(&shipped_text("README.md")).to_owned();
    assert!(command.starts_with("cargo test"), "{command}");
    let runs = |text: &str| text.lines().any(|line| line.trim() == command);
    assert!(runs(&ci));
    assert!(!runs(&ci.replace(&command, "cargo check")), "the known-bad case");
    let mode = std::os::unix::fs::PermissionsExt::mode(
        &std::fs::metadata(repository().join(".ci/run")).expect(".ci/run").permissions(),
    );
    assert_eq!(mode & 0o111, 0o111, "executable");
}

/// The first command of the README: how the program is installed.
fn install_command(readme: &str) -> &str {
    let part = readme.split_once("## Install and run").expect("the heading").1;
    part.split_once("```sh\n").expect("a block").1.lines().next().expect("a line")
}

#[test]
fn ci_installs_the_program_as_the_readme_says() {
    let package = shipped_text(".ci/package");
    let command = install_command(&shipped_text("README.md")).to_owned();
    assert!(command.starts_with("cargo install"), "{command}");
    let runs = |text: &str| text.lines().any(|line| line.trim().starts_with(&command));
    assert!(runs(&package));
    assert!(!runs(&package.replace(&command, "cargo build")), "the known-bad case");
    assert!(shipped_text(".ci/run").lines().any(|line| line == ".ci/package"));
}

/// The packages that `.ci/run` installs hold every tool that the tests of this directory name.
#[test]
fn ci_installs_what_the_tests_need() {
    let ci = shipped_text(".ci/run");
    let installed: Vec<&str> = ci.split_whitespace().collect();
    for package in [
        "mandoc",
        "man-db",
        "bash-completion",
        "zsh",
        "fish",
        "procmail",
        "liblockfile-bin",
        "daemontools",
        "runit",
        "moreutils",
        "systemd",
        "lintian",
        "strace",
        "curl",
        "xfsprogs",
        "btrfs-progs",
    ] {
        assert!(installed.contains(&package), "{package}");
    }
}
