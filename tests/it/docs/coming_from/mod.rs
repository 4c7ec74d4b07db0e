//! "Coming from": what people type for other lock tools, what they type here, and what differs. One table,
//! [`rows::ROWS`]; README and manual show it word for word, and both sides of each row are run as they stand.
//!
//! Needs `flock` (util-linux), `dotlockfile` (liblockfile-bin), `lockfile` (procmail), `setlock`
//! (daemontools), `chpst` (runit), `lckdo` (moreutils); with the feature `etcd` also `etcdctl`.
//! Consul is no package of Debian: its rows are marked as not run, and say nothing of how it behaves.

mod claims;
mod facts;
mod rows;

use facts::Scene;
use rows::{ROWS, Row, Run};

use super::shipped_text;

/// What holds for the rows of whole families of tools, above the table.
const ABOVE: &str = "When a holder was killed together with its COMMAND, the locks of flock, setlock, chpst and lckdo are free \
at once; those of withlock as well with --evict-dead, else when they are one ttl old, 60 seconds unless given; that \
of dotlockfile after five minutes, that of lockfile never. The first four leave LOCK behind, an empty file. withlock \
takes such a file over once it is a minute old, but not while one of them has it locked. The -s of flock and lckdo \
is not here: a lock has one holder.";

impl Row {
    /// What differs, in words: what was measured first, then what is shown by itself.
    fn differs(&self) -> String {
        let mut sentences: Vec<String> = Vec::new();
        let passed_on = || "COMMAND's status is passed on.".to_owned();
        match self.run {
            Run::Both { theirs, ours } => {
                if theirs.busy != ours.busy {
                    sentences.push(format!("Busy is {}, not {}.", ours.busy, theirs.busy));
                }
                if theirs.status != ours.status {
                    sentences.push(passed_on());
                }
            }
            Run::InEtcd { status } if status != facts::STATUS => sentences.push(passed_on()),
            _ => {}
        }
        sentences.extend(self.claims.iter().map(|claim| claim.says.to_owned()));
        if sentences.is_empty() {
            return "Nothing else.".into();
        }
        sentences.join(" ")
    }
}

/// The table as the README has it.
fn for_readme() -> String {
    let cell = |text: &str| format!("`{}`", text.replace('|', "\\|"));
    let rows = ROWS.iter().map(|row| format!("| {} | {} | {} |\n", cell(row.theirs), cell(row.ours), row.differs()));
    "| you type | here | what differs |\n|---|---|---|\n".to_owned() + &rows.collect::<String>()
}

/// The table as the manual has it.
fn for_manual() -> String {
    let literal = |text: &str| format!("\"{}\"", text.replace('"', "\"\""));
    let mut text = ".Bl -tag -width Ds\n".to_owned();
    for row in ROWS {
        let (theirs, ours) = (literal(row.theirs), literal(row.ours));
        text += &format!(".It Li {theirs}\n.Li {ours}\n.Pp\n{}", folded(&row.differs()));
    }
    text + ".El\n"
}

/// Text in lines of at most 80 characters, each sentence on a new one.
fn folded(text: &str) -> String {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let last = lines.last_mut().expect("a line");
        if last.is_empty() {
            *last = word.to_owned();
        } else if last.len() + 1 + word.len() <= 80 && !last.ends_with('.') {
            *last = format!("{last} {word}");
        } else {
            lines.push(word.to_owned());
        }
    }
    lines.join("\n") + "\n"
}

#[test]
fn readme_and_manual_show_the_table_that_is_run() {
    let (readme, page) = (shipped_text("README.md"), shipped_text("man/withlock.1"));
    let plain = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ").replace('`', "");
    for (name, text, table) in [("README.md", readme, for_readme()), ("man/withlock.1", page, for_manual())] {
        assert!(text.contains(&table), "{name} should have this table:\n{table}");
        assert!(plain(&text).contains(ABOVE), "{name} should say above the table:\n{}", folded(ABOVE));
    }
}

#[test]
fn what_is_said_above_the_table_is_so() {
    use facts::{Scene, ago};
    let minutes_old = |scene: &Scene, minutes: u64| {
        let age = std::time::Duration::from_secs(60 * minutes + 1);
        crate::harness::set_mtime(&scene.sandbox.path("LOCK"), ago(age));
    };
    // The rest of the first sentence is in the facts of the rows that try once.
    let scene = Scene::new("withlock");
    scene.kill_a_holder("withlock LOCK -- COMMAND");
    scene.side("withlock -n LOCK -- COMMAND", "exit 7").run().exited(75);
    scene.side("withlock -n --evict-dead LOCK -- COMMAND", "exit 7").run().exited(7);
    let scene = Scene::new("dotlockfile");
    scene.kill_a_holder("dotlockfile -P LOCK COMMAND");
    let next = || scene.side("dotlockfile -P -r 2 -i 1 LOCK COMMAND", "exit 7").run();
    minutes_old(&scene, 4);
    next().exited(4);
    minutes_old(&scene, 5);
    next().exited(7);
    // An empty file that flock has left, and one that it has locked.
    let scene = Scene::new("flock");
    scene.side("flock LOCK COMMAND", "exit 7").run().exited(7);
    let ours = || scene.side("withlock -n LOCK -- COMMAND", "exit 7").run();
    ours().exited(75);
    let mut gate = scene.sandbox.gate();
    let holder = scene.side("flock LOCK COMMAND", &gate.script()).start();
    gate.wait_inside();
    minutes_old(&scene, 1);
    ours().exited(75);
    gate.open();
    holder.wait().exited(0);
    ours().exited(7);
    // Two at once, there; no such option here.
    for (tool, shared) in [("flock", "flock -s LOCK COMMAND"), ("lckdo", "lckdo -s LOCK COMMAND")] {
        let scene = Scene::new(tool);
        let mut gate = scene.sandbox.gate();
        let holder = scene.side(shared, &gate.script()).start();
        gate.wait_inside();
        scene.side(shared, "exit 7").run().exited(7);
        gate.open();
        holder.wait().exited(0);
    }
    Scene::new("withlock").side("withlock -s LOCK -- COMMAND", "exit 7").run().exited(64);
}

/// Runs both sides of the rows of one tool.
fn both_sides_of(tool: &str) {
    let rows: Vec<&Row> = ROWS.iter().filter(|row| row.tool == tool).collect();
    assert!(!rows.is_empty(), "{tool}");
    for row in rows {
        if let Run::Both { theirs, ours } = row.run {
            Scene::new(tool).check(row.theirs, theirs);
            Scene::new("withlock").check(row.ours, ours);
        }
        for claim in row.claims {
            (claim.shown)(row);
        }
    }
}

#[test]
fn the_rows_of_flock_behave_as_they_say() {
    both_sides_of("flock");
}

#[test]
fn the_rows_of_dotlockfile_behave_as_they_say() {
    both_sides_of("dotlockfile");
}

#[test]
fn the_rows_of_lockfile_behave_as_they_say() {
    both_sides_of("lockfile");
}

#[test]
fn the_rows_of_setlock_behave_as_they_say() {
    both_sides_of("setlock");
}

#[test]
fn the_rows_of_chpst_behave_as_they_say() {
    both_sides_of("chpst");
}

#[test]
fn the_rows_of_lckdo_behave_as_they_say() {
    both_sides_of("lckdo");
}

#[test]
fn no_tool_of_the_table_is_left_out_and_a_row_that_is_not_run_says_so() {
    let known = ["flock", "dotlockfile", "lockfile", "setlock", "chpst", "lckdo"];
    for row in ROWS {
        match row.run {
            Run::Both { .. } => assert!(known.contains(&row.tool), "{}", row.tool),
            Run::ByClaims => assert!(known.contains(&row.tool) && !row.claims.is_empty(), "{}", row.theirs),
            Run::InEtcd { .. } => assert!(row.tool == "etcdctl", "{}", row.tool),
            Run::NotHere => assert!(row.tool == "consul" && row.differs().contains("Not run"), "{}", row.theirs),
        }
        assert!(row.theirs.contains(row.tool), "{}", row.theirs);
    }
}

/// A fact that does not hold is found: otherwise all of the above could be true of anything.
#[test]
fn a_row_that_says_something_else_is_found() {
    use facts::{AfterKill, Busy, Facts};
    let holds = |facts: Facts| {
        let check = || Scene::new("flock").check("flock -n LOCK COMMAND", facts);
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(check)).is_ok()
    };
    let right = Facts { status: 7, busy: Busy::Exits(1), leaves_file: true, after_kill: Some(AfterKill::Free) };
    assert!(holds(right));
    assert!(!holds(Facts { status: 0, ..right }));
    assert!(!holds(Facts { busy: Busy::Exits(75), ..right }));
    assert!(!holds(Facts { leaves_file: false, ..right }));
    assert!(!holds(Facts { after_kill: Some(AfterKill::Stuck), ..right }));
}

/// `etcdctl lock` and ours, on one cluster.
#[cfg(feature = "etcd")]
#[test]
fn etcd_rows_of_etcdctl_behave_as_they_say() {
    let cluster = crate::harness::Cluster::start(1);
    for row in ROWS {
        if let Run::InEtcd { status } = row.run {
            facts::check_in_etcd("etcdctl", row.theirs, status, &cluster);
            facts::check_in_etcd("withlock", row.ours, facts::STATUS, &cluster);
        }
    }
}
