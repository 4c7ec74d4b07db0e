//! What is written about the program and the program itself, held equal; and the rules of the repository.
//!
//! The manual needs `mandoc` and `man`, the completions `bash`, `zsh` and `fish` with the package
//! `bash-completion`.

mod ci;
mod coming_from;
mod completions;
mod examples;
mod json;
mod manual;
mod proofs;
mod readme;
mod release;
mod rules;
mod services;
mod several;
mod surface;
mod tokens;

use std::path::PathBuf;

/// A file of the repository.
#[track_caller]
fn shipped_text(name: &str) -> String {
    std::fs::read_to_string(repository().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The top of the repository.
fn repository() -> PathBuf {
    env!("CARGO_MANIFEST_DIR").into()
}
