//! The text of `reclaim`, and of the quarantines in `inspect`.

use crate::record::Why;
use crate::text::{Shown, duration};

use super::document::{Ended, FateWord, Quarantined, Reclamation};
use super::inspect::{ago, user};
use super::page::aligned;

/// One row for each quarantine: when it was ended, by whom and why, whose it was, what becomes of it.
pub(super) fn quarantine_rows(quarantine: &[Quarantined], now_ms: i64) -> Vec<Vec<String>> {
    let mut rows = vec![["ENDED", "WHY", "BY", "WAS", "REMOVAL", "NAME"].map(String::from).to_vec()];
    rows.extend(quarantine.iter().map(|found| {
        let when = found.age_ms.map_or_else(|| "-".into(), |age_ms| ago(now_ms, now_ms.saturating_sub(age_ms)));
        let (why, by) = found.ended.as_ref().map_or_else(
            || ("-".into(), "-".into()),
            |ended| (why(ended), format!("pid {} on {}", ended.pid, Shown::os(&ended.host))),
        );
        let was = found.owner.as_ref().map_or_else(
            || "-".into(),
            |owner| format!("{} pid {} on {}", Shown::os(&owner.command), owner.pid, Shown::os(&owner.host)),
        );
        vec![when, why, by, was, fate(found), base_name(&found.name.raw)]
    }));
    rows
}

fn why(ended: &Ended) -> String {
    let word = match ended.why {
        Why::Stale => "stale",
        Why::Break => "break",
        Why::LateRelease => "late-release",
    };
    match &ended.reason {
        Some(reason) => format!("{word}: {}", Shown::os(reason)),
        None => word.into(),
    }
}

fn fate(found: &Quarantined) -> String {
    match found.fate {
        FateWord::Reclaimable if found.may_not_remove.is_some() => "reclaimable, not by us".into(),
        FateWord::Reclaimable => found.why.clone(),
        FateWord::Young => format!("reclaimable in {}", duration(found.reclaimable_in_ms.unwrap_or(0))),
        _ => format!("kept: {}", found.why),
    }
}

/// Why some of those that may go stay where we are concerned, each reason once.
pub(super) fn not_by_us(quarantine: &[Quarantined]) -> Vec<String> {
    let due = quarantine.iter().filter(|found| found.fate == FateWord::Reclaimable);
    let mut reasons: Vec<String> = due.filter_map(|found| found.may_not_remove.clone()).collect();
    reasons.sort();
    reasons.dedup();
    reasons
}

fn base_name(path: &[u8]) -> String {
    let from = path.iter().rposition(|b| *b == b'/').map_or(0, |slash| slash + 1);
    Shown(&path[from..]).to_string()
}

/// So many quarantines of other locks are named one by one; more are only counted.
const MOST_OTHERS: usize = 3;

/// What `reclaim` did, a line for each quarantine and one for all.
pub fn page(reclamation: &Reclamation) -> String {
    let is_other = |found: &&Quarantined| found.fate == FateWord::AnotherLock;
    let others = reclamation.quarantine.iter().filter(is_other).count();
    let mut rows = Vec::new();
    let (mut removed, mut kept) = (0, 0);
    for found in reclamation.quarantine.iter().filter(|found| others <= MOST_OTHERS || !is_other(found)) {
        let word = match found.fate {
            FateWord::Removed => "removed",
            FateWord::WouldRemove => "would remove",
            FateWord::Gone => "gone",
            _ => "kept",
        };
        match found.fate {
            FateWord::Removed | FateWord::WouldRemove => removed += 1,
            FateWord::Gone => {}
            _ => kept += 1,
        }
        rows.push(vec![word.into(), Shown(&found.name.raw).to_string(), found.why.clone()]);
    }
    let mut text: String = aligned(&rows).into_iter().map(|line| line + "\n").collect();
    if others > MOST_OTHERS {
        kept += others;
        text.push_str(&format!("kept {others} quarantines of other locks\n"));
    }
    text.push_str(&match (removed, kept, reclamation.dry_run) {
        // Where it could not be looked, nobody knows.
        (0, 0, _) if !reclamation.errors.is_empty() => String::new(),
        (0, 0, _) => "no quarantine\n".into(),
        (removed, kept, true) => format!("{removed} would be removed, {kept} kept\n"),
        (removed, kept, false) => format!("{removed} removed, {kept} kept\n"),
    });
    text
}

/// Why a quarantine that is removed is there: `stale, ended 3h ago by pid 5 on web1 (root)`.
pub fn history(found: &Quarantined) -> String {
    let ended_ago = || found.age_ms.map_or_else(String::new, |age_ms| format!("ended {}", ago(age_ms, 0)));
    match &found.ended {
        Some(ended) => {
            let by = user(ended.user.as_deref(), Some(ended.uid));
            format!("{}, {} by pid {} on {}, {by}", why(ended), ended_ago(), ended.pid, Shown::os(&ended.host))
        }
        None if found.owner.is_some() => format!("a release that was cut short, {}", ended_ago()),
        None => ended_ago(),
    }
}
