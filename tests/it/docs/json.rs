//! The JSON documents: every field and every word of them is in withlock(5), and no other.

use std::collections::BTreeSet;

use serde_json::Value;
use withlock::record::{Guard, Why};
use withlock::report::document::{
    Alive, ContestReport, Ended, FateWord, FileReport, GuardReport, GuardState, Holder, Inspection, Lock, PathText,
    Problem, Process, Quarantined, Reclamation, State, Unclear, VERSION,
};

use withlock::report::log::{self, About, At, EndingWhy, Event, EvictedWhy, OnBusyWord, Other, Run};

use super::manual::section;
use super::shipped_text;

fn path() -> PathText {
    PathText { path: "p".into(), path_bytes: Some("70".into()), raw: Vec::new() }
}

fn process() -> Process {
    let user = Some("root".to_owned());
    Process { pid: 1, command: "c".into(), state: 'S', uid: Some(0), user, running_since_ms: 1, cpu_ms: 1 }
}

fn ended() -> Ended {
    let text = || Some("t".to_owned());
    Ended { why: Why::Break, at_ms: 1, host: "h".into(), pid: 1, uid: 0, user: text(), reason: text() }
}

fn holder() -> Holder {
    Holder {
        nonce: "n".into(),
        host: "h".into(),
        pid: 1,
        pid_started: 1,
        alive: Some(Alive::RunsHere),
        process: Some(process()),
        uid: 0,
        user: Some("root".into()),
        command: "c".into(),
        label: Some("l".into()),
        fence: Some(1),
        guard: Guard::Inherited,
    }
}

fn quarantined() -> Quarantined {
    Quarantined {
        name: path(),
        fate: FateWord::Young,
        why: "w".into(),
        may_not_remove: Some("m".into()),
        reclaimable_in_ms: Some(1),
        age_ms: Some(1),
        safe_age_ms: Some(1),
        ended: Some(ended()),
        owner: Some(holder()),
        held_since_ms: Some(1),
    }
}

/// Documents in which nothing is left out.
fn whole_documents() -> [Value; 2] {
    let lock = Lock {
        name: path(),
        state: State::Held,
        stale: false,
        foreign: Some("f".into()),
        unreadable: true,
        holder: Some(holder()),
        held_since_ms: Some(1),
        renewed_at_ms: Some(1),
        ttl_ms: Some(1),
        expires_in_ms: Some(1),
        overdue_ms: Some(1),
        ahead_ms: Some(1),
        guard: Some(GuardReport {
            state: GuardState::Held,
            processes: vec![process()],
            perhaps_more: true,
            taken_by_pid: Some(1),
        }),
        contest: Some(ContestReport { by: Some(ended()), age_ms: 1, passed_over_in_ms: 1 }),
        file: Some(FileReport { uid: 0, user: Some("root".into()), mode: "644".into(), size_bytes: 1 }),
        may_not_break: Some("w".into()),
        next: vec!["n".into()],
        quarantine: vec![quarantined()],
        quarantine_error: Some("e".into()),
    };
    let problem = || Problem { name: path(), error: "e".into(), exit: 74 };
    let inspection = Inspection {
        withlock_report: VERSION,
        kind: "inspect",
        at_ms: 1,
        locks: vec![lock],
        unclear: vec![Unclear { name: path(), why: "w".into() }],
        errors: vec![problem()],
    };
    let reclamation = Reclamation {
        withlock_report: VERSION,
        kind: "reclaim",
        at_ms: 1,
        dry_run: true,
        quarantine: vec![quarantined()],
        errors: vec![problem()],
    };
    [serde_json::to_value(inspection), serde_json::to_value(reclamation)].map(|json| json.expect("JSON"))
}

fn collect_keys(value: &Value, into: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                into.insert(name.clone());
                collect_keys(value, into);
            }
        }
        Value::Array(items) => items.iter().for_each(|item| collect_keys(item, into)),
        _ => {}
    }
}

/// The names behind a macro in a section: `.Cm a , b ,`, `.It Cm a`.
fn named(page: &str, title: &str, name: &str) -> BTreeSet<String> {
    let lines = section(page, title);
    let behind =
        lines.iter().filter_map(|line| line.trim_start_matches(".It ").trim_start_matches('.').strip_prefix(name));
    let words = behind.flat_map(|rest| rest.split(' ')).filter(|word| !word.is_empty() && !",;.:".contains(word));
    words.map(str::to_owned).collect()
}

#[test]
fn every_field_of_the_json_documents_is_in_the_manual_and_no_other() {
    let mut fields = BTreeSet::new();
    whole_documents().iter().for_each(|document| collect_keys(document, &mut fields));
    let page = shipped_text("man/withlock.5");
    assert_eq!(named(&page, "JSON DOCUMENTS", "Cm "), fields);
    let without = page.replacen(".It Cm ahead_ms\n", "", 1);
    assert_ne!(named(&without, "JSON DOCUMENTS", "Cm "), fields, "the known-bad case");
}

fn words(values: &[impl serde::Serialize]) -> Vec<String> {
    let word = |value| serde_json::to_value(value).expect("JSON").as_str().expect("a word").to_owned();
    values.iter().map(word).collect()
}

#[test]
fn every_word_that_a_field_may_have_is_in_the_manual_and_no_other() {
    let mut known: BTreeSet<String> = ["inspect", "reclaim", "R", "S", "D", "T", "Z"].map(str::to_owned).into();
    known.extend(words(&[
        State::Stale,
        State::StaleButGuarded,
        State::Contested,
        State::Blank,
        State::Held,
        State::Foreign,
        State::Free,
    ]));
    known.extend(words(&[GuardState::Free, GuardState::Held, GuardState::Unknown]));
    known.extend(words(&[Alive::RunsHere, Alive::Zombie, Alive::NotHere, Alive::OtherHost, Alive::EarlierBoot]));
    known.extend(words(&[
        FateWord::Reclaimable,
        FateWord::Young,
        FateWord::Live,
        FateWord::Guarded,
        FateWord::NotOurs,
        FateWord::AnotherLock,
        FateWord::Removed,
        FateWord::WouldRemove,
        FateWord::Gone,
    ]));
    assert_eq!(named(&shipped_text("man/withlock.5"), "JSON DOCUMENTS", "Ql "), known);
}

/// An event of each kind, in which nothing is left out. The match makes sure that none is forgotten.
fn whole_events() -> Vec<Event> {
    let other = || Other {
        holder: Some(Box::new(holder())),
        held_since_ms: Some(1),
        renewed_at_ms: Some(1),
        expires_in_ms: Some(1),
        note: Some("n".into()),
    };
    let all = vec![
        Event::Waiting(other()),
        Event::Evicted { why: EvictedWhy::Stale, holder: Some(Box::new(holder())), quarantine: path() },
        Event::Acquired { waited_ms: 1, ttl_ms: 1, fence: Some(1) },
        Event::Busy { waited_ms: 1, other: other(), on_busy: OnBusyWord::Fail },
        Event::Nested(other()),
        Event::Reentered,
        Event::Started { command: "c".into(), command_pid: 1 },
        Event::NotNeeded,
        Event::Contested,
        Event::RenewalFailed { why: "w".into() },
        Event::RenewedLate { after_ms: 1 },
        Event::Lost { found: "f".into() },
        Event::Ending { why: EndingWhy::Lost },
        Event::Ended { status: Some(1), signal: Some(1), ran_ms: 1 },
        Event::Released { held_ms: 1 },
        Event::NotReleased { why: "w".into() },
        Event::Exit { code: 1, error: Some("e".into()) },
    ];
    let kinds: BTreeSet<u8> = all
        .iter()
        .map(|event| match event {
            Event::Waiting(_) => 0,
            Event::Evicted { .. } => 1,
            Event::Acquired { .. } => 2,
            Event::Busy { .. } => 3,
            Event::Nested(_) => 4,
            Event::Reentered => 5,
            Event::Started { .. } => 6,
            Event::Contested => 7,
            Event::RenewalFailed { .. } => 8,
            Event::RenewedLate { .. } => 9,
            Event::Lost { .. } => 10,
            Event::Ending { .. } => 11,
            Event::Ended { .. } => 12,
            Event::Released { .. } => 13,
            Event::NotReleased { .. } => 14,
            Event::Exit { .. } => 15,
            Event::NotNeeded => 16,
        })
        .collect();
    assert_eq!(kinds.len(), all.len());
    all
}

/// The line of each of them.
fn whole_lines() -> Vec<Value> {
    let run = Run { host: "h".into(), pid: 1, lock: path(), label: Some("l".into()), nonce: None };
    let about = About {
        lock: std::os::unix::ffi::OsStrExt::from_bytes(b"\xff"),
        nonce: Some(withlock::record::Nonce::from_bytes([1; 16])),
    };
    let at = At { wall_ms: 1, boot_ms: 1 };
    let line = |event: &Event| serde_json::from_slice(&log::line(&run, at, Some(about), event)).expect("JSON");
    whole_events().iter().map(line).collect()
}

#[test]
fn every_event_of_the_log_is_in_the_manual_with_its_fields_and_no_other() {
    let lines = whole_lines();
    let page = shipped_text("man/withlock.5");
    let fields: BTreeSet<String> =
        lines.iter().flat_map(|line| line.as_object().expect("an object").keys().cloned()).collect();
    let told = |page: &str| -> BTreeSet<String> {
        let mut told = named(page, "LOG", "Cm ");
        assert!(told.remove("inspect"), "the subcommand");
        told
    };
    assert_eq!(told(&page), fields);
    assert_ne!(told(&page.replacen(".Cm on_busy\n", "", 1)), fields, "the known-bad case");
    let mut known: BTreeSet<String> = lines.iter().map(|line| line["event"].as_str().expect("a word").into()).collect();
    known.extend(words(&[EvictedWhy::Stale, EvictedWhy::Unchanged, EvictedWhy::Dead]));
    known.extend(words(&[EndingWhy::Lost, EndingWhy::Expiring, EndingWhy::MaxHold]));
    known.extend(words(&[OnBusyWord::Fail, OnBusyWord::Skip, OnBusyWord::Run]));
    assert_eq!(named(&page, "LOG", "Ql "), known);
    assert_ne!(named(&page.replacen(".It Ql contested\n", "", 1), "LOG", "Ql "), known, "the known-bad case");
}
