//! What is released under which version, and what is in the packages.

use super::{repository, shipped_text};

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The newest version of the changelog, and its date: `## [0.1.0] - 2026-11-30`.
fn newest(changelog: &str) -> (String, String) {
    let heading = changelog.lines().find_map(|line| line.strip_prefix("## [")).expect("a version");
    let (version, date) = heading.split_once("] - ").unwrap_or_else(|| panic!("no date: {heading}"));
    (version.into(), date.into())
}

/// The newest version of the Debian changelog, and its date as the other has it.
fn newest_of_debian(changelog: &str) -> (String, String) {
    let version = changelog.split_once('(').and_then(|(_, rest)| rest.split_once(')')).expect("a version").0;
    // ` -- NAME <ADDRESS>  Mon, 30 Nov 2026 12:00:00 +0000`
    let date = changelog.lines().find(|line| line.starts_with(" -- ")).and_then(|line| line.split_once(">  "));
    let words: Vec<&str> = date.expect("a date").1.split(' ').collect();
    let months = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let month = 1 + months.iter().position(|month| *month == words[2]).expect("a month");
    (version.into(), format!("{}-{month:02}-{:0>2}", words[3], words[1]))
}

#[test]
fn both_changelogs_begin_with_the_version_of_the_crate_and_the_same_date() {
    let (ours, debian) = (shipped_text("CHANGELOG.md"), shipped_text("man/debian/changelog"));
    assert_eq!(newest(&ours).0, VERSION);
    assert_eq!(newest(&ours), newest_of_debian(&debian));
    assert_ne!(newest(&ours), newest_of_debian(&debian.replacen("30 Nov", "29 Nov", 1)), "the known-bad case");
}

/// The text of the licence without the way it is broken into lines.
fn words(text: &str) -> String {
    text.split_whitespace().filter(|word| *word != ".").collect::<Vec<_>>().join(" ")
}

#[test]
fn the_debian_copyright_has_the_licence_as_it_is() {
    let licence = shipped_text("LICENSE-MIT");
    let (_, permission) = licence.split_once("Permission is").expect("the permission");
    let copyright = words(&shipped_text("man/debian/copyright"));
    assert!(copyright.contains(&words(&format!("Permission is{permission}"))));
    assert!(!copyright.contains(&words(&format!("Permission was{permission}"))), "the known-bad case");
}

/// The files that the package is made from: source, destination.
fn assets(manifest: &str) -> Vec<(String, String)> {
    let lines = manifest.lines().skip_while(|line| *line != "assets = [").skip(1).take_while(|line| *line != "]");
    let words = |line: &str| line.split('"').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>();
    lines.map(|line| (words(line)[0].clone(), words(line)[1].clone())).collect()
}

#[test]
fn the_debian_package_has_every_page_and_every_completion() {
    let assets = assets(&shipped_text("Cargo.toml"));
    let has = |name: &str| assets.iter().any(|(source, _)| source == name);
    for dir in ["man", "completions"] {
        for entry in std::fs::read_dir(repository().join(dir)).expect("a directory").map(|entry| entry.expect("one")) {
            if entry.file_type().expect("a type").is_file() {
                let name = format!("{dir}/{}", entry.file_name().to_string_lossy());
                assert!(has(&name), "{name} is not in the package");
            }
        }
    }
    assert!(has("target/release/withlock") && !has("man/withlock.7"));
}

#[test]
fn the_published_crate_names_what_its_page_is_made_with() {
    let manifest = shipped_text("Cargo.toml");
    let (_, docs) = manifest.split_once("[package.metadata.docs.rs]\n").expect("its part");
    let part: Vec<&str> = docs.lines().take_while(|line| !line.is_empty()).collect();
    assert!(part.contains(&"features = [\"etcd\"]"), "{part:?}");
    for key in ["description", "license", "readme", "keywords", "categories", "rust-version"] {
        assert!(manifest.lines().any(|line| line.starts_with(&format!("{key} = "))), "{key}");
    }
}
