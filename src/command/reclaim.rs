//! `withlock reclaim`: removes what is exactly a quarantine of ours and old enough; keeps and explains
//! everything else that looks like one.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use crate::cli::Reclaim;
use crate::lease::{MIN_TTL_MS, RECLAIM_MARGIN_MS, reclaim_age_ms};
use crate::options::{self, Usage};
use crate::record::{SlotName, split_trash};
use crate::report::document::{self, FateWord, PathText, Quarantined, Reclamation};
use crate::report::reclaim::{history, page};
use crate::store::look::list;
use crate::store::permission::may_not_remove;
use crate::store::reclaim::{Fate, Survey, remove};
use crate::store::{self, Fault, Place};
use crate::sys::clock::wall;
use crate::sys::describe;
use crate::sys::file::Kind;
use crate::sys::guard::Guarded;
use crate::sys::output::complain;
use crate::sys::signal::OnEntry;
use crate::text::{Shown, duration};

use super::paths::{Asked, beside, listing, problem, with_slash};
use super::view::{View, apply_guard, guard_of};
use super::{attended, service, write};

/// Removes quarantines; the exit code.
pub(super) fn reclaim(asked: &Reclaim, on_entry: &OnEntry) -> anyhow::Result<u8> {
    let older_than_ms = options::optional(asked.older_than.as_deref(), "--older-than")?;
    let mut report = Reclamation {
        withlock_report: document::VERSION,
        kind: "reclaim",
        at_ms: wall().ms(),
        dry_run: asked.dry_run,
        quarantine: Vec::new(),
        errors: Vec::new(),
    };
    let access = options::access(&asked.service);
    options::check_paths(&asked.paths, &access)?;
    let (mut todo, mut services) = (Vec::new(), Vec::new());
    for path in &asked.paths {
        match store::service(path, &access, on_entry) {
            Ok(Some(service)) => {
                services.push((path, service));
                continue;
            }
            Ok(None) => {}
            Err(fault) => {
                report.errors.push(problem(path, fault));
                continue;
            }
        }
        let _attendant = attended(path, true, 0);
        match group(path) {
            Ok(group) => todo.push(group),
            Err(fault) => report.errors.push(problem(path, fault)),
        }
    }
    if let Some(older_than_ms) = older_than_ms {
        refuse_too_young(&todo, older_than_ms)?;
    }
    let mut view = View::default();
    for group in todo {
        report.quarantine.extend(group.similar);
        for (lock, names) in group.by_lock {
            let _attendant = attended(&lock, true, 0);
            if let Err(fault) = one_lock(&lock, names, older_than_ms, &mut view, &mut report) {
                report.errors.push(problem(&lock, fault));
            }
        }
    }
    for (path, service) in services {
        if let Err(fault) = service::reclaim(service.as_ref(), older_than_ms, &mut view, &mut report) {
            report.errors.push(problem(path, fault));
        }
    }
    let _ = on_entry.restore();
    for problem in &report.errors {
        complain(&problem.error);
    }
    if asked.json {
        write(&document::line(&report))?
    } else {
        write(page(&report).as_bytes())?
    }
    Ok(report.errors.first().map_or(0, |problem| problem.exit))
}

/// What one path on the command line stands for: names of quarantines, by the path of their lock.
#[derive(Default)]
struct Group {
    by_lock: BTreeMap<OsString, Vec<OsString>>,
    /// What only looks similar, and is kept.
    similar: Vec<Quarantined>,
}

fn group(path: &OsStr) -> Result<Group, Fault> {
    let asked = Asked::of(path);
    let (base, listing) = match &asked {
        Asked::Directory => (with_slash(path), listing(path, true)?),
        Asked::Lock(lock) | Asked::Quarantine(lock) => {
            let place = Place::open(lock, false)?;
            // What may not be looked at may be a directory full of them.
            let found = place.dir.lstat(&place.name).map_err(|errno| place.change_fault("look at it", errno))?;
            if let Some(stat) = found
                && stat.kind == Kind::Symlink
            {
                let why = format!(
                    "it is a symbolic link, which is not followed; a directory is written {}/",
                    place.path.display()
                );
                return Err(place.cannot(why));
            }
            let listed = list(&place.dir, true).map_err(|errno| place.change_fault("list its directory", errno))?;
            (lock.clone(), listed)
        }
    };
    let mut group = Group::default();
    for name in listing.quarantined {
        let Some(lock) = SlotName::split(&name).map(|(lock, _)| lock).or_else(|| split_trash(&name)) else { continue };
        let (lock, at) = (beside(&base, lock), beside(&base, &name));
        match &asked {
            Asked::Lock(wanted) if lock != *wanted => {
                let why = format!("it is another lock's, {}", Shown::os(&lock));
                group.similar.push(similar(at, FateWord::AnotherLock, why));
            }
            Asked::Quarantine(_) if at != path => {}
            _ => group.by_lock.entry(lock).or_default().push(name),
        }
    }
    if !matches!(asked, Asked::Quarantine(_)) {
        let why = "its name is not exactly a quarantine's";
        let similar = |name| similar(beside(&base, name), FateWord::NotOurs, why.into());
        group.similar.extend(listing.similar.iter().map(|name| similar(name.as_os_str())));
    }
    Ok(group)
}

fn similar(path: OsString, fate: FateWord, why: String) -> Quarantined {
    Quarantined {
        name: PathText::new(path),
        fate,
        why,
        may_not_remove: None,
        reclaimable_in_ms: None,
        age_ms: None,
        safe_age_ms: None,
        ended: None,
        owner: None,
        held_since_ms: None,
    }
}

/// An age below which a delayed rival could still act is not to be had.
fn refuse_too_young(groups: &[Group], older_than_ms: u64) -> anyhow::Result<()> {
    let refused = |whose: String, safe_ms: u64| {
        Usage(format!(
            "--older-than {}: below the safe age of {whose}, {} (its ttl, and {} in which a rename that was issued in time may still land); nothing was removed",
            duration(older_than_ms),
            duration(safe_ms),
            duration(RECLAIM_MARGIN_MS)
        ))
    };
    let mut highest = (reclaim_age_ms(MIN_TTL_MS), "any quarantine".to_owned());
    for (lock, names) in groups.iter().flat_map(|group| &group.by_lock) {
        let place = Place::open(lock, false)?;
        let survey = Survey::only_to_look(&place, wall());
        for name in names {
            if let Ok(Some(found)) = survey.examine(name.clone())
                && !matches!(found.fate, Fate::NotOurs(_))
                && found.safe_age_ms > highest.0
            {
                highest = (found.safe_age_ms, Shown::os(&beside(lock, name)).to_string());
            }
        }
    }
    if older_than_ms < highest.0 { Err(refused(highest.1, highest.0).into()) } else { Ok(()) }
}

/// Deals with the quarantines of one lock, one after the other: each keeps a descriptor, and a crash loop
/// leaves more of them than there are.
fn one_lock(
    lock: &OsStr,
    names: Vec<OsString>,
    older_than_ms: Option<u64>,
    view: &mut View,
    report: &mut Reclamation,
) -> Result<(), Fault> {
    let place = Place::open(lock, false)?;
    let failed = |errno| place.change_fault("reclaim its quarantines", errno);
    let survey = if report.dry_run {
        place.dir.may_write().map_err(failed)?;
        Survey::only_to_look(&place, wall())
    } else {
        Survey::to_remove(&place).map_err(failed)?
    };
    for name in names {
        let Some(found) = survey.examine(name).map_err(failed)? else { continue };
        let mut told = view.quarantined(lock, &found);
        if report.dry_run {
            let guard = found.file_identity().map_or(Guarded::Free, |identity| guard_of(&place, identity));
            apply_guard(&mut told, &guard);
        }
        let is_wanted = older_than_ms.is_none_or(|ms| i128::from(found.age_ms) >= i128::from(ms));
        if told.fate == FateWord::Reclaimable && !is_wanted {
            told.why = "younger than was asked for".into();
            told.fate = FateWord::Young;
        } else if told.fate == FateWord::Reclaimable
            && let Some(why) = may_not_remove(&place, &found)
        {
            let path = beside(lock, &found.name);
            let fault =
                Fault::NotPermitted { path: path.as_bytes().to_vec(), why: format!("cannot be removed: {why}") };
            report.errors.push(problem(&path, fault));
            (told.fate, told.why) = (FateWord::NotOurs, why);
        } else if told.fate == FateWord::Reclaimable {
            let removed = if report.dry_run { Ok(true) } else { remove(&place, &found) };
            (told.fate, told.why) = match removed {
                Ok(true) if report.dry_run => (FateWord::WouldRemove, history(&told)),
                Ok(true) => (FateWord::Removed, history(&told)),
                Ok(false) => (FateWord::Gone, "another process removed it meanwhile".into()),
                Err(errno) => {
                    report.errors.push(problem(&beside(lock, &found.name), failed(errno)));
                    (FateWord::NotOurs, describe(errno).into())
                }
            };
        }
        report.quarantine.push(told);
    }
    Ok(())
}
