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

#[test]
fn hosts_that_number_their_directories_differently_and_name_the_locks_in_any_order_do_not_deadlock() {
    let scene = Scene::new(Server::default());
    let loops: Vec<_> = [(On::A, ["y.lock", "a.lock"]), (On::B, ["a.lock", "y.lock"])]
        .into_iter()
        .map(|(on, names)| {
            let [first, second] = names.map(|name| scene.lock(on).with_file_name(name).display().to_string());
            let hold = format!("\"$WL\" -q --also '{second}' '{first}' -- sh -c '{}; sleep 0.01'", scene.alone());
            let text = format!("i=0; while [ $i -lt 6 ]; do i=$((i+1)); {hold} || exit; done");
            scene.start(on, |run| run.arg(format!("{on:?}.lock")).sh(text))
        })
        .collect();
    for finished in loops.into_iter().map(crate::harness::Running::wait) {
        finished.exited(0).silent();
    }
    assert!(!scene.truth().exists());
}
