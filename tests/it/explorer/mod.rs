//! The schedule explorer.

mod actor;
mod engine;
mod given;
mod monitor;
mod perform;
mod scenario;
mod scenarios;
mod search;
mod state;
mod turn;
mod world;

use engine::{explore, tell};

#[test]
fn tmp_measure() {
    let only = std::env::var("ONLY").unwrap_or_default();
    let secs = std::env::var("SECS").map_or(20, |s| s.parse().unwrap());
    for s in scenarios::all() {
        if !s.name.contains(&only) {
            continue;
        }
        let r = explore(&s, Some(std::time::Duration::from_secs(secs)));
        println!(
            "{:40} sched {:7} states {:7} ends {:5} longest {:3} {} {:.1}s",
            s.name,
            r.counts.schedules,
            r.counts.states,
            r.counts.ends,
            r.counts.longest,
            if r.exhausted { "ALL" } else { "cut" },
            r.time.as_secs_f64()
        );
        if let Some(f) = &r.found {
            println!("FOUND {}", tell(&s, f));
        }
    }
}
