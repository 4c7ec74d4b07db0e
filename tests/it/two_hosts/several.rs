//! Several locks at once, where no comparison of names and numbers shows that two of them are one.

use std::os::unix::fs::MetadataExt;

use super::host::Server;
use super::scene::{On, Scene};

#[test]
fn a_lock_in_a_directory_that_is_mounted_twice_is_one_hold() {
    let scene = Scene::new(Server::default());
    let (a, b) = (scene.lock(On::A), scene.lock(On::B));
    let device = |lock: &std::path::Path| lock.parent().expect("a directory").metadata().expect("metadata").dev();
    assert_ne!(device(&a), device(&b), "else the test shows nothing");
    for (first, second) in [(&a, &b), (&b, &a)] {
        let text = "echo $WITHLOCK_HELD | wc -w; echo $WITHLOCK_LOCK";
        let run = scene.start(On::A, |run| run.args(["-w", "10s"]).arg("--also").arg(second).arg(first).sh(text));
        let finished = run.wait();
        assert_eq!(finished.exited(0).silent().out(), format!("1\n{}\n", first.display()), "{finished}");
    }
    assert!(!scene.truth().exists());
}
