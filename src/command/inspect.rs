//! `withlock inspect`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use crate::address::is_address;
use crate::cli::Inspect;
use crate::exit::Exit;
use crate::options::{self, Access, Usage};
use crate::report::document::{self, GuardState, Inspection, Lock, PathText, State, Unclear};
use crate::report::inspect::page;
use crate::report::page::{Paint, cut};
use crate::store::{self, Fault, Place};
use crate::sys::clock::wall;
use crate::sys::output::complain;
use crate::sys::signal::OnEntry;
use crate::sys::sleep::Sleeper;
use crate::sys::terminal;

use super::paths::{Asked, beside, listing, problem, with_slash};
use super::view::View;
use super::{attended, write};

/// How often a watched page is drawn anew, in milliseconds.
const REDRAW_EVERY_MS: u64 = 1_000;

/// Shows locks; the exit code.
pub(super) fn inspect(asked: &Inspect, on_entry: &OnEntry) -> anyhow::Result<u8> {
    // Nothing is held here that a signal could leak.
    let _ = on_entry.restore();
    let access = options::access(&asked.service);
    options::check_paths(&asked.paths, &access)?;
    if asked.watch {
        return watch(asked, &access, on_entry);
    }
    let found = look(&asked.paths, &access, on_entry);
    for problem in &found.errors {
        complain(&problem.error);
    }
    let failed = found.errors.first().map(|problem| problem.exit);
    if asked.quiet {
        return Ok(failed.unwrap_or_else(|| found.locks.iter().map(code).max().unwrap_or(0)));
    }
    if asked.json {
        write(&document::line(&found))?;
    } else {
        let text = page(&found.locks, &found.unclear, found.at_ms, Paint { colour: terminal::wants_colour() });
        let nothing = text.is_empty() && found.errors.is_empty();
        write(if nothing { b"no lock\n" } else { text.as_bytes() })?;
    }
    Ok(failed.unwrap_or(0))
}

/// `--quiet`: the worst of what was found has the highest code.
fn code(lock: &Lock) -> u8 {
    let is_guarded = lock.guard.as_ref().is_some_and(|guard| guard.state == GuardState::Held);
    match lock.state {
        State::Free => 0,
        State::Foreign => Exit::CannotTake.code(),
        State::Stale => Exit::Stale.code(),
        State::Blank if lock.stale && !is_guarded => Exit::Stale.code(),
        State::Held | State::StaleButGuarded | State::Contested | State::Blank => Exit::Held.code(),
    }
}

fn look(paths: &[OsString], access: &Access, on_entry: &OnEntry) -> Inspection {
    let mut view = View::default();
    let mut found = Inspection {
        withlock_report: document::VERSION,
        kind: "inspect",
        at_ms: wall().ms(),
        locks: Vec::new(),
        unclear: Vec::new(),
        errors: Vec::new(),
    };
    let mut in_directories = Vec::new();
    for path in paths {
        // Also before it is known whether that file system is a local one: this is for looking at trouble.
        let _attendant = attended(path, !is_address(path), 0);
        match store::service(path, access, on_entry).and_then(|service| service.map(|s| s.look()).transpose()) {
            Ok(Some(looks)) => {
                looks.into_iter().for_each(|look| view.add_look(look));
                continue;
            }
            Ok(None) => {}
            Err(fault) => {
                found.errors.push(problem(path, fault));
                continue;
            }
        }
        let added = match Asked::of(path) {
            Asked::Lock(lock) | Asked::Quarantine(lock) => {
                Place::open(&lock, false).and_then(|place| view.add(&lock, &place))
            }
            Asked::Directory => directory(path, &mut view, &mut found, &mut in_directories),
        };
        if let Err(fault) = added {
            found.errors.push(problem(path, fault));
        }
    }
    // Who has a guard is found through every open file that has one, wherever it is.
    let _attendant = attended(OsStr::new("an open file"), true, 0);
    found.locks = view.finish();
    // What was listed and has gone since is no lock in that directory.
    found.locks.retain(|lock| {
        lock.state != State::Free || !lock.quarantine.is_empty() || !in_directories.contains(&lock.name.raw)
    });
    found
}

fn directory(
    path: &OsStr,
    view: &mut View,
    found: &mut Inspection,
    in_directories: &mut Vec<Vec<u8>>,
) -> Result<(), Fault> {
    let dir = with_slash(path);
    let listing = listing(path, false)?;
    for name in &listing.locks {
        let path = beside(&dir, name);
        if let Err(fault) = Place::open(&path, false).and_then(|place| view.add(&path, &place)) {
            found.errors.push(problem(&path, fault));
        }
        in_directories.push(path.as_bytes().to_vec());
    }
    for (name, why) in listing.unclear {
        found.unclear.push(Unclear { name: PathText::new(beside(&dir, &name)), why });
    }
    Ok(())
}

/// Draws the page every second, until a signal ends it.
fn watch(asked: &Inspect, access: &Access, on_entry: &OnEntry) -> anyhow::Result<u8> {
    if !terminal::is_terminal() {
        return Err(Usage("--watch needs a terminal; try: withlock inspect".into()).into());
    }
    let sleeper = Sleeper::new(on_entry);
    let paint = Paint { colour: terminal::wants_colour() };
    loop {
        let found = look(&asked.paths, access, on_entry);
        let mut text = page(&found.locks, &found.unclear, found.at_ms, paint);
        for problem in &found.errors {
            text.push_str(&format!("withlock: {}\n", problem.error));
        }
        if text.is_empty() {
            text.push_str("no lock\n");
        }
        write(frame(&text, &crate::text::time(found.at_ms)).as_bytes())?;
        sleeper.sleep(REDRAW_EVERY_MS - wall_ms_past_second());
    }
}

/// How far the wall clock is past its last full second: the page is drawn when a second begins.
fn wall_ms_past_second() -> u64 {
    u64::try_from(wall().ms().rem_euclid(1_000)).unwrap_or(0)
}

/// A page as it is drawn over the last one: from the top, each line cut and cleared to its end, the rest
/// of the screen cleared.
fn frame(text: &str, clock: &str) -> String {
    let (rows, columns) = terminal::size().unwrap_or((24, 80));
    let head = format!("{clock}   every second, Ctrl-C ends");
    let lines: Vec<&str> = text.lines().collect();
    let room = rows.saturating_sub(3);
    let mut frame = String::from("\x1b[H");
    let mut draw = |line: &str| frame.push_str(&format!("{}\x1b[K\r\n", cut(line, columns)));
    draw(&head);
    if lines.len() > room {
        lines[..room].iter().for_each(|line| draw(line));
        draw(&format!("({} more lines)", lines.len() - room));
    } else {
        lines.iter().for_each(|line| draw(line));
    }
    frame.push_str("\x1b[J");
    frame
}
