//! The program as it is shipped: a release build without the test switches.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// The release binary, built once per test run. `WITHLOCK_SHIPPED` names one that was built already.
pub(crate) fn shipped() -> &'static Path {
    static SHIPPED: OnceLock<PathBuf> = OnceLock::new();
    SHIPPED.get_or_init(|| match std::env::var_os("WITHLOCK_SHIPPED") {
        Some(given) => PathBuf::from(given),
        None => build(),
    })
}

fn build() -> PathBuf {
    // Beside the test build, so that `cargo clean` and a foreign target directory are honoured; cargo's
    // own lock makes concurrent test processes wait for one build.
    let target = Path::new(env!("CARGO_BIN_EXE_withlock")).ancestors().nth(2).expect("the target directory");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let built = Command::new(cargo)
        .args(["build", "--quiet", "--release", "--bin", "withlock", "--target-dir"])
        .arg(target)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .stdin(Stdio::null())
        .output()
        .expect("cargo can be run");
    assert!(built.status.success(), "the release build failed: {}", String::from_utf8_lossy(&built.stderr));
    target.join("release").join("withlock")
}
