//! How fast, beside the others: `cargo bench`.
//!
//! Measures the shipped program and the lock tools that are installed (Debian: util-linux, daemontools,
//! runit, moreutils, liblockfile-bin) in one interleaved run. Compare the ratios of one run, not times
//! across runs: machines are noisy. Takes some four minutes; `cargo bench -- overhead handoff` measures
//! only that. The locks are in a directory of their own where TMPDIR says.

mod run;

use std::fs;
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
    let scenarios: [(&str, Scenario); 7] = [
        ("overhead", overhead),
        ("handoff", handoff),
        ("contention", contention),
        ("waiters", waiters),
        ("killed", killed),
        ("crowded", crowded),
        ("reserve", reserve),
    ];
    for (name, measure) in scenarios {
        if wanted(name) {
            measure(&tools, dir.path());
        }
    }
}

fn names(tools: &[Tool]) -> String {
    tools.iter().map(|tool| tool.name).collect::<Vec<_>>().join(", ")
}

/// One line of a table: what was measured, and what came out, a number for each round.
struct Row {
    name: String,
    samples: Vec<f64>,
}

fn rows<'a>(names: impl IntoIterator<Item = &'a str>) -> Vec<Row> {
    names.into_iter().map(|name| Row { name: name.to_owned(), samples: Vec::new() }).collect()
}

fn tool_rows(tools: &[Tool]) -> Vec<Row> {
    rows(tools.iter().map(|tool| tool.name))
}

/// Prints for each row the median, the middle half, the 95th percentile, and how the median compares with `base`'s.
fn table(title: &str, unit: &str, rows: &[Row], base: &str) {
    println!(
        "\n{title}\n{:<22}{:>12}{:>18}{:>12}  {:>12}",
        "",
        format!("median {unit}"),
        "quartiles",
        "p95",
        format!("  x {base}")
    );
    let base = rows.iter().find(|row| row.name == base && !row.samples.is_empty());
    let base = base.map(|row| quantile(&row.samples, 0.5)).filter(|base| *base > 0.0);
    for Row { name, samples } in rows.iter().filter(|row| !row.samples.is_empty()) {
        let at = |share| quantile(samples, share);
        let ratio = base.map_or_else(String::new, |base| format!("{:.2}", at(0.5) / base));
        let quartiles = format!("{:.1}..{:.1}", at(0.25), at(0.75));
        println!("{name:<22}{:>12.1}{quartiles:>18}{:>12.1}  {ratio:>12}", at(0.5), at(0.95));
    }
}

/// `TOOL LOCK true`, nobody else there.
fn overhead(tools: &[Tool], dir: &Path) {
    const ROUNDS: usize = 400;
    let mut rows = tool_rows(tools);
    for round in 0..ROUNDS {
        // Each round in another order, so that no tool always runs behind the same one.
        for step in 0..tools.len() {
            let index = (step + round) % tools.len();
            let lock = dir.join(format!("overhead-{index}"));
            let begun_ns = monotonic_ns();
            let status = Job::start(&tools[index], &lock, &["true".into()]).wait();
            let took_us = ns_to_us(monotonic_ns() - begun_ns);
            assert!(status.success(), "{}: {status}", tools[index].name);
            rows[index].samples.push(took_us);
        }
    }
    table("uncontended: TOOL LOCK true, wall", "us", &rows, "flock");
}

/// From the end of the holder's command to the start of the waiter's.
fn handoff(tools: &[Tool], dir: &Path) {
    let title =
        "hand-off: the holder's command ends -> the waiter's runs (with the start of the command that notes it)";
    handoffs(tools, dir, title, 60, Duration::ZERO);
    handoffs(tools, dir, "the same, after the waiter has waited for 3 s", 5, Duration::from_secs(3));
}

fn handoffs(tools: &[Tool], dir: &Path, title: &str, rounds: usize, wait: Duration) {
    let mut rows = tool_rows(tools);
    for round in 0..rounds {
        for (index, tool) in tools.iter().enumerate().filter(|(_, tool)| !tool.polls) {
            let file = |what: &str| dir.join(format!("handoff-{index}-{round}-{}-{what}", wait.as_secs()));
            let lock = dir.join(format!("handoff-{index}"));
            // Both print the time at their start, then at the end of their input.
            let (first, second) = (file("first"), file("second"));
            let mut holder = Job::start_with_input(tool, &lock, &stamp(&first));
            wait_for_line(&first, 1);
            let mut waiter = Job::start_with_input(tool, &lock, &stamp(&second));
            waiter.settle();
            std::thread::sleep(wait);
            holder.close_input();
            let started_ns = wait_for_line(&second, 1);
            let ended_ns = wait_for_line(&first, 2);
            waiter.close_input();
            holder.wait();
            waiter.wait();
            rows[index].samples.push(ns_to_us(started_ns.saturating_sub(ended_ns)));
        }
    }
    table(title, "us", &rows, "flock");
}

/// The command that notes its times in `path`.
fn stamp(path: &Path) -> Vec<std::ffi::OsString> {
    let me = std::env::current_exe().expect("our own path");
    vec![me.into_os_string(), "stamp".into(), path.into()]
}

/// N contenders, each running short sections one after the other.
fn contention(tools: &[Tool], dir: &Path) {
    const ROUNDS: usize = 5;
    for contenders in [2usize, 8, 32, 128] {
        let sections = (256 / contenders).max(4);
        let (mut paces, mut fairness) = (tool_rows(tools), tool_rows(tools));
        for _ in 0..ROUNDS {
            for (index, tool) in tools.iter().enumerate().filter(|(_, tool)| !tool.polls) {
                let contest = Contest { tool, lock: dir.join(format!("contention-{index}")), contenders, sections };
                let (us_per_section, slowest_by_fastest) = contest.run();
                paces[index].samples.push(us_per_section);
                fairness[index].samples.push(slowest_by_fastest);
            }
        }
        table(&format!("contention: {contenders} contenders, wall per section"), "us", &paces, "flock");
        table("the slowest contender's time by the fastest's", "", &fairness, "flock");
    }
}

/// 100 waiters for three seconds: what they cost.
fn waiters(tools: &[Tool], dir: &Path) {
    const WAITERS: usize = 100;
    let mut rows = tool_rows(tools);
    for (index, tool) in tools.iter().enumerate() {
        let lock: PathBuf = dir.join(format!("waiters-{index}"));
        let mut holder = Job::start_with_input(tool, &lock, &["cat".into()]);
        holder.settle();
        let jobs: Vec<Job> = (0..WAITERS).map(|_| Job::start(tool, &lock, &["true".into()])).collect();
        std::thread::sleep(Duration::from_secs(2));
        let total = || jobs.iter().map(|job| cpu_time(job.pid())).sum::<Duration>();
        let before = total();
        std::thread::sleep(Duration::from_secs(3));
        rows[index].samples.push(total().saturating_sub(before).as_secs_f64() * 1e3);
        for job in jobs {
            job.kill();
        }
        holder.close_input();
        holder.wait();
    }
    table(&format!("waiting: {WAITERS} waiters for 3 s, CPU of all"), "ms", &rows, "flock");
}

/// The holder and its command are killed: how soon the next one is in. A tool whose lock stays behind is
/// not measured.
fn killed(tools: &[Tool], dir: &Path) {
    const ROUNDS: usize = 20;
    let tools: Vec<Tool> = tools.iter().filter(|tool| !tool.polls).map(Tool::that_evicts_the_dead).collect();
    let mut rows = tool_rows(&tools);
    for round in 0..ROUNDS {
        for (index, tool) in tools.iter().enumerate() {
            let file = |what: &str| dir.join(format!("killed-{index}-{round}-{what}"));
            let lock = dir.join(format!("killed-{index}"));
            let (first, second) = (file("first"), file("second"));
            let holder = Job::start_with_input(tool, &lock, &stamp(&first));
            wait_for_line(&first, 1);
            let mut waiter = Job::start_with_input(tool, &lock, &stamp(&second));
            waiter.settle();
            let killed_ns = monotonic_ns();
            holder.kill_with_command();
            let started_ns = wait_for_line(&second, 1);
            waiter.close_input();
            waiter.wait();
            rows[index].samples.push(ns_to_us(started_ns.saturating_sub(killed_ns)));
        }
    }
    table("the whole holder killed -> the waiter's command runs (withlock with --evict-dead)", "us", &rows, "flock");
}

/// What a directory full of other files costs, and a lock with a long history.
fn crowded(tools: &[Tool], dir: &Path) {
    const ROUNDS: usize = 300;
    let [alone, crowd, history] = ["alone", "crowd", "history"].map(|name| dir.join(name));
    for place in [&alone, &crowd, &history] {
        fs::create_dir(place).expect("a directory");
    }
    for number in 0..100_000 {
        fs::write(crowd.join(format!("file-{number}")), "").expect("a file");
    }
    for number in 0..1_000 {
        let slot = history.join(format!("lock.stale-{}-{number:032x}", 1_700_000_000_000u64 + number));
        fs::create_dir(slot).expect("a quarantine");
    }
    let mut rows = rows(["alone", "100,000 other files", "1,000 quarantines"]);
    for _ in 0..ROUNDS {
        for (index, place) in [&alone, &crowd, &history].into_iter().enumerate() {
            let begun_ns = monotonic_ns();
            let status = Job::start(&tools[0], &place.join("lock"), &["true".into()]).wait();
            assert!(status.success(), "{status}");
            rows[index].samples.push(ns_to_us(monotonic_ns() - begun_ns));
        }
    }
    table("uncontended withlock in a full directory", "us", &rows, "alone");
}

/// A reserved number, with few and with many markers there already.
fn reserve(tools: &[Tool], dir: &Path) {
    const ROUNDS: usize = 200;
    let mut rows = rows(["10 markers", "100,000 markers"]);
    let places = [("few", 10u32), ("many", 100_000)].map(|(name, markers)| {
        let place = dir.join(name);
        fs::create_dir(&place).expect("a directory");
        for number in 1..=markers {
            fs::write(place.join(format!("claim-{number}")), "").expect("a marker");
        }
        // The first one reads all of them, once, and notes how far they go.
        tools[0].run_alone(&["reserve".into(), place.clone().into()]);
        place
    });
    for _ in 0..ROUNDS {
        for (row, place) in rows.iter_mut().zip(&places) {
            let begun_ns = monotonic_ns();
            tools[0].run_alone(&["reserve".into(), place.into()]);
            row.samples.push(ns_to_us(monotonic_ns() - begun_ns));
        }
    }
    table("withlock reserve, with the hint how far the numbers are", "us", &rows, "10 markers");
}

fn ns_to_us(ns: u64) -> f64 {
    Duration::from_nanos(ns).as_secs_f64() * 1e6
}
