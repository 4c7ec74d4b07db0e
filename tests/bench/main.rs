//! How fast, beside the others: `cargo bench`.
//!
//! Measures the shipped program and the lock tools that are installed (Debian: util-linux, daemontools,
//! runit, moreutils, liblockfile-bin) in one interleaved run. Compare the ratios of one run, not times
//! across runs: machines are noisy. Takes two to three minutes; `cargo bench -- overhead handoff` measures
//! only that.

mod run;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use run::{Contest, Job, Tool, cpu_time, monotonic_ns, quantile, stamp_and_exit, wait_for_line};

fn main() {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    if let [mode, path] = &words[..]
        && mode == "stamp"
    {
        stamp_and_exit(Path::new(path));
    }
    let dir = tempfile::tempdir().expect("a directory");
    let tools = Tool::all(dir.path());
    println!("withlock {} beside {}", env!("CARGO_PKG_VERSION"), names(&tools));
    let absent = Tool::absent();
    if !absent.is_empty() {
        println!("absent here: {}", absent.join(", "));
    }
    let wanted = |name: &str| words.is_empty() || words.iter().any(|word| word == name);
    type Scenario = fn(&[Tool], &Path);
    let scenarios: [(&str, Scenario); 4] =
        [("overhead", overhead), ("handoff", handoff), ("contention", contention), ("waiters", waiters)];
    for (name, measure) in scenarios {
        if wanted(name) {
            measure(&tools, dir.path());
        }
    }
}

fn names(tools: &[Tool]) -> String {
    tools.iter().map(|tool| tool.name).collect::<Vec<_>>().join(", ")
}

/// A table row: name, median, p95, ratio of the median to flock's, all in `unit`.
fn table(title: &str, unit: &str, samples: &BTreeMap<usize, Vec<f64>>, tools: &[Tool]) {
    println!("\n{title}\n{:<14}{:>12}{:>12}{:>10}", "", format!("median {unit}"), "p95", "x flock");
    let median_of = |name: &str| {
        let index = tools.iter().position(|tool| tool.name == name)?;
        samples.get(&index).map(|values| quantile(values, 0.5))
    };
    let flock = median_of("flock");
    for (index, tool) in tools.iter().enumerate() {
        let Some(values) = samples.get(&index).filter(|values| !values.is_empty()) else { continue };
        let median = quantile(values, 0.5);
        let ratio = flock.map_or_else(String::new, |flock| format!("{:.2}", median / flock));
        println!("{:<14}{median:>12.1}{:>12.1}{ratio:>10}", tool.name, quantile(values, 0.95));
    }
}

/// `TOOL LOCK true`, nobody else there.
fn overhead(tools: &[Tool], dir: &Path) {
    const ROUNDS: usize = 400;
    let mut samples: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
    for round in 0..ROUNDS {
        // Each round in another order, so that no tool always runs behind the same one.
        for step in 0..tools.len() {
            let index = (step + round) % tools.len();
            let lock = dir.join(format!("overhead-{index}"));
            let begun_ns = monotonic_ns();
            let status = Job::start(&tools[index], &lock, &["true".into()]).wait();
            let took_us = ns_to_us(monotonic_ns() - begun_ns);
            assert!(status.success(), "{}: {status}", tools[index].name);
            samples.entry(index).or_default().push(took_us);
        }
    }
    table("uncontended: TOOL LOCK true, wall", "us", &samples, tools);
}

/// From the end of the holder's command to the start of the waiter's.
fn handoff(tools: &[Tool], dir: &Path) {
    const ROUNDS: usize = 60;
    let me = std::env::current_exe().expect("our own path");
    let mut samples: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
    for round in 0..ROUNDS {
        for (index, tool) in tools.iter().enumerate().filter(|(_, tool)| !tool.polls) {
            let file = |what: &str| dir.join(format!("handoff-{index}-{round}-{what}"));
            let stamp = |path: &Path| vec![me.clone().into_os_string(), "stamp".into(), path.into()];
            let lock = dir.join(format!("handoff-{index}"));
            // Both print the time at their start, then at the end of their input.
            let (first, second) = (file("first"), file("second"));
            let mut holder = Job::start_with_input(tool, &lock, &stamp(&first));
            wait_for_line(&first, 1);
            let mut waiter = Job::start_with_input(tool, &lock, &stamp(&second));
            waiter.settle();
            holder.close_input();
            let started_ns = wait_for_line(&second, 1);
            let ended_ns = wait_for_line(&first, 2);
            waiter.close_input();
            holder.wait();
            waiter.wait();
            samples.entry(index).or_default().push(ns_to_us(started_ns.saturating_sub(ended_ns)));
        }
    }
    table(
        "hand-off: the holder's command ends -> the waiter's runs (with the start of the command that notes it)",
        "us",
        &samples,
        tools,
    );
}

/// N contenders, each running short sections one after the other.
fn contention(tools: &[Tool], dir: &Path) {
    const ROUNDS: usize = 3;
    for contenders in [2usize, 8, 32, 128] {
        let sections = (256 / contenders).max(4);
        let mut samples: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
        for _ in 0..ROUNDS {
            for (index, tool) in tools.iter().enumerate().filter(|(_, tool)| !tool.polls) {
                let contest = Contest { tool, lock: dir.join(format!("contention-{index}")), contenders, sections };
                samples.entry(index).or_default().push(contest.us_per_section());
            }
        }
        table(&format!("contention: {contenders} contenders, wall per section"), "us", &samples, tools);
    }
}

/// 100 waiters for three seconds: what they cost.
fn waiters(tools: &[Tool], dir: &Path) {
    const WAITERS: usize = 100;
    let mut samples: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
    for (index, tool) in tools.iter().enumerate() {
        let lock: PathBuf = dir.join(format!("waiters-{index}"));
        let mut holder = Job::start_with_input(tool, &lock, &["cat".into()]);
        holder.settle();
        let jobs: Vec<Job> = (0..WAITERS).map(|_| Job::start(tool, &lock, &["true".into()])).collect();
        std::thread::sleep(Duration::from_secs(2));
        let total = || jobs.iter().map(|job| cpu_time(job.pid())).sum::<Duration>();
        let before = total();
        std::thread::sleep(Duration::from_secs(3));
        samples.entry(index).or_default().push(total().saturating_sub(before).as_secs_f64() * 1e3);
        for job in jobs {
            job.kill();
        }
        holder.close_input();
        holder.wait();
    }
    table(&format!("waiting: {WAITERS} waiters for 3 s, CPU of all"), "ms", &samples, tools);
}

fn ns_to_us(ns: u64) -> f64 {
    Duration::from_nanos(ns).as_secs_f64() * 1e6
}
