//! The fencing token: a holder on one host that was overtaken by another, because it was stopped for longer
//! than its lease, cannot write any more where tokens are compared.

use std::ffi::OsString;
use std::fs;

use super::beyond_the_bound::overtaken;
use super::host::Server;
use super::scene::{On, Scene, go_on, undisturbed};

/// Shell text: defines `store TEXT`, which writes to a resource that several commands share, with the
/// token of the lock that the command holds. A careful resource refuses a token older than one it has seen.
fn resource(scene: &Scene, careful: bool) -> String {
    let path = |name: &str| scene.sandbox.path(name).display().to_string();
    let (lock, log, newest) = (path("resource-lock"), path("log"), path("newest"));
    let is_old = if careful { "[ $WITHLOCK_FENCE -lt $newest ]" } else { "false" };
    format!(
        "store() {{ exec 7>>{lock}; flock 7; newest=0; [ ! -e {newest} ] || read newest <{newest}; \
         if {is_old}; then echo \"$WITHLOCK_FENCE $1 refused\" >>{log}; \
         else echo \"$WITHLOCK_FENCE $1\" >>{log}; echo $WITHLOCK_FENCE >{newest}; fi; exec 7>&-; }}"
    )
}

/// Lets an overtaken holder's command write after its successor's has; what the resource then holds.
fn written(careful: bool) -> String {
    let scene = Scene::new(Server::default());
    let mut gates = [scene.sandbox.gate(), scene.sandbox.gate()];
    let early = format!("{}; store early", resource(&scene, careful));
    fs::create_dir(scene.hosts.backing().join("numbers")).expect("a directory");
    let options = |on: On| -> Vec<OsString> {
        let numbers = scene.lock(on).with_file_name("numbers");
        vec!["--on-lost".into(), "warn".into(), "--fence".into(), numbers.into()]
    };
    let [overtaken, successor] = overtaken(&scene, &mut gates, options, [&early, "store late"]);
    go_on(&overtaken);
    overtaken.wait_for_stderr("lost");
    gates[0].open();
    overtaken.wait();
    gates[1].open();
    successor.wait().exited(0);
    fs::read_to_string(scene.sandbox.path("log")).expect("a log")
}

#[test]
fn a_fencing_token_makes_the_late_write_of_an_overtaken_holder_refusable() {
    undisturbed(|| assert_eq!(written(true), "1 early\n2 early\n1 late refused\n2 late\n"));
}

#[test]
fn a_resource_that_does_not_compare_tokens_takes_the_late_write() {
    // The negative control of the test above.
    undisturbed(|| assert_eq!(written(false), "1 early\n2 early\n1 late\n2 late\n"));
}

/// An overtaken holder's command that asks before it writes; what the resource then holds.
#[test]
fn an_overtaken_command_that_asks_before_it_commits_does_not_write() {
    undisturbed(|| {
        let scene = Scene::new(Server::default());
        let mut gates = [scene.sandbox.gate(), scene.sandbox.gate()];
        let log = scene.sandbox.path("log").display().to_string();
        let late = format!("if $WL check 2>>{log}.said; then echo committed >>{log}; else echo $? >>{log}; fi");
        let options = |_| -> Vec<OsString> { vec!["--on-lost".into(), "warn".into()] };
        let [overtaken, successor] = overtaken(&scene, &mut gates, options, [":", &late]);
        go_on(&overtaken);
        gates[0].open();
        overtaken.wait().exited(76);
        gates[1].open();
        successor.wait().exited(0);
        assert_eq!(fs::read_to_string(&log).expect("a log"), "76\ncommitted\n");
    });
}
