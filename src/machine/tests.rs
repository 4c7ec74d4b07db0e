//! The machine, without a process or a clock.

use super::*;

fn machine(change: impl FnOnce(&mut Terms)) -> Machine {
    let mut terms = Terms {
        ttl_ms: Some(60_000),
        renew: true,
        several: false,
        may_be_unseen: false,
        max_hold_ms: None,
        kill_after_ms: 10_000,
        on_lost: OnLost::Terminate,
        leads_session: false,
    };
    change(&mut terms);
    Machine::new(terms, 0, 0)
}

/// What is done about an event; what the log is told left out.
fn deeds(machine: &mut Machine, event: Event, now_ms: u64) -> Vec<Action> {
    machine.step(event, now_ms).into_iter().filter(|action| !matches!(action, Action::Tell(_))).collect()
}

fn told(machine: &mut Machine, event: Event, now_ms: u64) -> Vec<Told> {
    let told = |action| if let Action::Tell(told) = action { Some(told) } else { None };
    machine.step(event, now_ms).into_iter().filter_map(told).collect()
}

/// The exit code, and whether the lock was lost.
fn ending(machine: &Machine) -> Option<(u8, bool)> {
    machine.outcome().map(|outcome| (outcome.code, outcome.lost))
}

fn signal(signal: i32, by_kernel: bool) -> Event {
    Event::Signal(Received { signal, by_kernel, by_self: false })
}

fn stopped(signal: i32, has_terminal: bool) -> Event {
    Event::Command(Change::Stopped { signal, has_terminal })
}

#[test]
fn the_commands_own_status_passes_through() {
    for (change, code) in [(Change::Exited(0), 0), (Change::Exited(255), 255), (Change::Killed(9), 137)] {
        let mut machine = machine(|_| {});
        assert_eq!(deeds(&mut machine, Event::Command(change), 5), [Action::Finish]);
        assert_eq!(ending(&machine), Some((code, false)));
    }
}

#[test]
fn an_end_by_a_signal_or_by_us_is_told_from_an_exit_with_the_same_code() {
    let cut_short = |change: Change| {
        let mut machine = machine(|_| {});
        machine.step(Event::Command(change), 5);
        machine.outcome().map(|outcome| outcome.cut_short)
    };
    assert_eq!(cut_short(Change::Exited(137)), Some(false));
    assert_eq!(cut_short(Change::Exited(124)), Some(false));
    assert_eq!(cut_short(Change::Killed(9)), Some(true));
    let mut held_long = machine(|terms| terms.max_hold_ms = Some(5_000));
    held_long.step(Event::Tick, 5_000);
    held_long.step(Event::Command(Change::Exited(0)), 5_001);
    assert_eq!(held_long.outcome().map(|outcome| outcome.cut_short), Some(true));
}

#[test]
fn a_signal_sent_to_us_alone_is_handed_on_and_one_from_the_terminal_is_not() {
    let mut machine = machine(|_| {});
    for number in [number::TERM, number::HUP, number::INT, number::QUIT, 10, 12, 34, 64] {
        assert_eq!(deeds(&mut machine, signal(number, false), 1), [Action::Forward(number)]);
    }
    for number in [number::INT, number::QUIT, number::TSTP, number::WINCH, number::HUP] {
        assert_eq!(deeds(&mut machine, signal(number, true), 1), []);
    }
    let broken_pipe = Received { signal: number::PIPE, by_kernel: false, by_self: true };
    assert_eq!(deeds(&mut machine, Event::Signal(broken_pipe), 1), []);
}

#[test]
fn a_hang_up_of_the_terminal_is_handed_on_by_the_sessions_leader() {
    let mut machine = machine(|terms| terms.leads_session = true);
    assert_eq!(deeds(&mut machine, signal(number::HUP, true), 1), [Action::Forward(number::HUP)]);
}

#[test]
fn a_command_stopped_from_the_terminal_stops_us_and_continuing_renews_first() {
    let mut machine = machine(|_| {});
    assert_eq!(deeds(&mut machine, stopped(number::TSTP, false), 1), [Action::StopSelf(number::TSTP)]);
    assert_eq!(deeds(&mut machine, signal(number::TSTP, true), 2), [], "of this very stop");
    assert_eq!(deeds(&mut machine, signal(number::CONT, false), 9), [Action::Renew, Action::Forward(number::CONT)]);
}

#[test]
fn a_command_stopped_alone_keeps_its_lock_until_the_terminal_or_its_own_shell_stops_all() {
    let mut machine = machine(|_| {});
    assert_eq!(deeds(&mut machine, stopped(number::STOP, false), 1), [], "it was meant for it alone");
    assert_eq!(deeds(&mut machine, signal(number::TSTP, true), 2), [Action::StopSelf(number::TSTP)]);
    assert_eq!(deeds(&mut machine, signal(number::CONT, false), 9), [Action::Renew, Action::Forward(number::CONT)]);
    assert_eq!(deeds(&mut machine, signal(number::TSTP, true), 10), [], "it stops first");
    assert_eq!(deeds(&mut machine, stopped(number::STOP, true), 11), [Action::StopSelf(number::TSTP)]);
}

#[test]
fn renewal_comes_every_third_and_soon_again_after_a_failure() {
    let mut machine = machine(|_| {});
    assert_eq!(machine.next_due_ms(), LOOK_EVERY_MS);
    assert_eq!(deeds(&mut machine, Event::Tick, 1_000), [Action::Look]);
    assert_eq!(deeds(&mut machine, Event::Tick, 20_000), [Action::Renew]);
    let said = deeds(&mut machine, Event::Renewed(Renewal::Failed("No space left".into())), 20_000);
    assert_eq!(said, [Action::Say("the lock could not be renewed: No space left; trying again".into())]);
    assert_eq!(machine.next_due_ms(), 21_000);
    assert_eq!(deeds(&mut machine, Event::Renewed(Renewal::Contested), 21_000), [], "said once");
    assert_eq!(deeds(&mut machine, Event::Renewed(Renewal::Confirmed), 22_000), []);
    assert_eq!(deeds(&mut machine, Event::Tick, 42_000), [Action::Renew]);
}

#[test]
fn whoever_wakes_too_late_waits_for_the_answer_of_its_renewal_a_moment_only() {
    let mut machine = machine(|terms| terms.may_be_unseen = true);
    assert_eq!(deeds(&mut machine, Event::Tick, 3_600_000), [Action::Renew]);
    assert_eq!(deeds(&mut machine, Event::Renewed(Renewal::Pending), 3_600_000), []);
    assert_eq!(deeds(&mut machine, Event::Tick, 3_601_249), [Action::Look]);
    assert!(matches!(deeds(&mut machine, Event::Tick, 3_601_250)[..], [Action::Say(_), ..]));
    assert!(deeds(&mut machine, Event::Tick, 3_601_251).contains(&Action::SignalTree(number::KILL)));
}

#[test]
fn a_renewal_whose_answer_comes_later_counts_from_when_it_was_begun() {
    let mut machine = machine(|terms| terms.may_be_unseen = true);
    deeds(&mut machine, Event::Looked(None), 19_500);
    assert_eq!(deeds(&mut machine, Event::Tick, 20_000), [Action::Renew]);
    assert_eq!(deeds(&mut machine, Event::Renewed(Renewal::Pending), 20_000), []);
    assert_eq!(deeds(&mut machine, Event::Tick, 21_000), [Action::Look], "one renewal at a time");
    assert_eq!(deeds(&mut machine, signal(number::CONT, true), 21_001), [], "that one is on its way");
    assert_eq!(deeds(&mut machine, Event::Renewed(Renewal::Confirmed), 24_000), []);
    assert_eq!(deeds(&mut machine, Event::Tick, 44_000), [Action::Renew]);
    assert_eq!(deeds(&mut machine, Event::Renewed(Renewal::Pending), 44_000), []);
    let actions = deeds(&mut machine, Event::Tick, 70_000);
    assert_eq!(actions[0], Action::Say("the lock expires in 10s and was not renewed; ending the command".into()));
}

#[test]
fn behind_a_guard_that_all_see_a_failed_renewal_ends_nothing() {
    let mut machine = machine(|_| {});
    deeds(&mut machine, Event::Renewed(Renewal::Failed("x".into())), 20_000);
    assert_eq!(deeds(&mut machine, Event::Tick, 3_600_000), [Action::Renew]);
}

#[test]
fn where_others_may_not_see_the_guard_the_command_ends_before_the_lease_does() {
    let mut machine = machine(|terms| terms.may_be_unseen = true);
    deeds(&mut machine, Event::Renewed(Renewal::Failed("x".into())), 20_000);
    assert_eq!(deeds(&mut machine, Event::Tick, 49_999), [Action::Renew]);
    deeds(&mut machine, Event::Renewed(Renewal::Failed("x".into())), 49_999);
    assert_eq!(deeds(&mut machine, Event::Tick, 50_000), [Action::Renew], "a last time");
    deeds(&mut machine, Event::Renewed(Renewal::Failed("x".into())), 50_000);
    let actions = deeds(&mut machine, Event::Tick, 50_000);
    assert_eq!(
        actions,
        [
            Action::Say("the lock expires in 10s and was not renewed; ending the command".into()),
            Action::SignalTree(number::TERM),
            Action::SignalTree(number::CONT)
        ]
    );
    assert!(!deeds(&mut machine, Event::Tick, 57_499).contains(&Action::SignalTree(number::KILL)));
    assert!(
        deeds(&mut machine, Event::Tick, 57_500).contains(&Action::SignalTree(number::KILL)),
        "well before its end"
    );
    deeds(&mut machine, Event::Command(Change::Killed(number::KILL)), 57_501);
    assert_eq!(deeds(&mut machine, Event::TreeLeft(0), 57_502), [Action::Finish]);
    assert_eq!(ending(&machine), Some((76, false)));
}

#[test]
fn a_command_that_is_to_be_killed_at_once_is_so_before_its_lease_is_over_and_not_when() {
    let mut machine = machine(|terms| {
        (terms.ttl_ms, terms.renew, terms.may_be_unseen) = (Some(1_000), false, true);
        terms.kill_after_ms = 0;
    });
    assert_eq!(deeds(&mut machine, Event::Tick, 899), []);
    assert_eq!(machine.next_due_ms(), 900);
    assert_eq!(
        deeds(&mut machine, Event::Tick, 900),
        [
            Action::Say("the lock expires in 100ms and was not renewed; ending the command".into()),
            Action::SignalTree(number::TERM),
            Action::SignalTree(number::CONT)
        ]
    );
    assert_eq!(machine.next_due_ms(), 900, "without any grace");
    assert_eq!(deeds(&mut machine, Event::Tick, 900), [Action::SignalTree(number::KILL)]);
}

#[test]
fn whoever_wakes_after_the_lease_was_over_renews_first_and_goes_on_if_that_is_confirmed() {
    let mut machine = machine(|terms| terms.may_be_unseen = true);
    assert_eq!(deeds(&mut machine, Event::Tick, 3_600_000), [Action::Renew]);
    assert_eq!(deeds(&mut machine, Event::Renewed(Renewal::Confirmed), 3_600_005), []);
    assert_eq!(deeds(&mut machine, Event::Tick, 3_600_006), [], "nothing is due");
}

#[test]
fn a_lease_counts_from_before_its_renewal_was_begun() {
    let mut machine = machine(|terms| terms.may_be_unseen = true);
    assert_eq!(deeds(&mut machine, Event::Tick, 20_000), [Action::Renew]);
    // The renewal, or we after it, stalled for 30 s: the stamp may be as old as that.
    deeds(&mut machine, Event::Renewed(Renewal::Confirmed), 50_000);
    assert_eq!(deeds(&mut machine, Event::Tick, 69_999), [Action::Look]);
    assert_eq!(deeds(&mut machine, Event::Tick, 70_000), [Action::Renew]);
    deeds(&mut machine, Event::Renewed(Renewal::Failed("x".into())), 70_000);
    assert!(matches!(deeds(&mut machine, Event::Tick, 70_001)[..], [Action::Say(_), ..]));
}

#[test]
fn a_lost_lock_ends_the_whole_tree_and_exits_76() {
    let mut machine = machine(|_| {});
    let actions = deeds(&mut machine, Event::Looked(Some("the lock file is gone".into())), 5_000);
    assert_eq!(actions[0], Action::Say("the lock was lost: the lock file is gone; ending the command".into()));
    assert_eq!(deeds(&mut machine, Event::Command(Change::Exited(0)), 5_010), [Action::SignalTree(0)]);
    assert_eq!(deeds(&mut machine, Event::TreeLeft(1), 5_011), [], "a descendant lives on");
    assert!(deeds(&mut machine, Event::Tick, 15_000).contains(&Action::SignalTree(number::KILL)));
    assert_eq!(deeds(&mut machine, Event::TreeLeft(0), 15_050), [Action::Finish]);
    assert_eq!(ending(&machine), Some((76, true)));
}

#[test]
fn a_loss_that_is_only_warned_of_shows_in_the_exit_code_of_a_success() {
    for (status, code) in [(0, 76), (3, 3)] {
        let mut machine = machine(|terms| terms.on_lost = OnLost::Warn);
        let said = deeds(&mut machine, Event::Renewed(Renewal::Lost("another lock file is there".into())), 20_000);
        assert_eq!(said, [Action::Say("the lock was lost: another lock file is there; the command goes on".into())]);
        assert_eq!(machine.next_due_ms(), u64::MAX);
        deeds(&mut machine, Event::Command(Change::Exited(status)), 30_000);
        assert_eq!(ending(&machine), Some((code, true)));
    }
}

#[test]
fn max_hold_ends_the_tree_and_kills_what_ignores_it_while_the_lease_is_kept() {
    let mut machine = machine(|terms| terms.max_hold_ms = Some(5_000));
    deeds(&mut machine, Event::Looked(None), 4_000);
    let actions = deeds(&mut machine, Event::Tick, 5_000);
    assert_eq!(actions[1..], [Action::SignalTree(number::TERM), Action::SignalTree(number::CONT)]);
    assert!(deeds(&mut machine, Event::Tick, 15_000).contains(&Action::SignalTree(number::KILL)));
    assert!(deeds(&mut machine, Event::Tick, 20_000).contains(&Action::Renew));
    deeds(&mut machine, Event::Command(Change::Killed(number::KILL)), 20_001);
    deeds(&mut machine, Event::TreeLeft(0), 20_002);
    assert_eq!(ending(&machine), Some((124, false)));
}

#[test]
fn without_a_lease_nothing_is_renewed_and_nothing_can_be_lost() {
    let mut machine = machine(|terms| terms.ttl_ms = None);
    assert_eq!(machine.next_due_ms(), u64::MAX);
    assert_eq!(deeds(&mut machine, Event::Tick, 1_000_000), []);
    assert_eq!(deeds(&mut machine, signal(number::CONT, false), 1_000_000), [Action::Forward(number::CONT)]);
}

#[test]
fn the_log_is_told_of_trouble_once_and_of_how_late_the_next_renewal_was() {
    let mut machine = machine(|_| {});
    machine.step(Event::Tick, 20_000);
    let failed = || Event::Renewed(Renewal::Failed("x".into()));
    assert_eq!(told(&mut machine, failed(), 20_000), [Told::RenewalFailed { why: "x".into() }]);
    machine.step(Event::Tick, 21_000);
    assert_eq!(told(&mut machine, failed(), 21_000), []);
    machine.step(Event::Tick, 22_000);
    let confirmed = || Event::Renewed(Renewal::Confirmed);
    assert_eq!(told(&mut machine, confirmed(), 22_001), [Told::RenewedLate { after_ms: 22_001 }]);
    machine.step(Event::Tick, 42_001);
    assert_eq!(told(&mut machine, confirmed(), 42_001), [], "in time");
    machine.step(Event::Tick, 82_001);
    assert_eq!(told(&mut machine, confirmed(), 82_001), [Told::RenewedLate { after_ms: 40_000 }]);
}

#[test]
fn the_log_is_told_how_the_command_ended_and_why_it_had_to() {
    let mut machine = machine(|terms| terms.max_hold_ms = Some(5_000));
    assert_eq!(told(&mut machine, Event::Tick, 5_000), [Told::Ending { why: EndingWhy::MaxHold }]);
    let ended = Told::Ended { status: None, signal: Some(15), ran_ms: 5_010 };
    assert_eq!(told(&mut machine, Event::Command(Change::Killed(15)), 5_010), [ended]);
}

#[test]
fn of_several_locks_those_that_are_left_are_kept_and_each_loss_is_told() {
    let lost = |name: &str| Event::Looked(Some(format!("{name}: the lock file is gone")));
    let mut machine = machine(|terms| (terms.several, terms.on_lost) = (true, OnLost::Warn));
    assert_eq!(told(&mut machine, lost("b"), 5_000), [Told::Lost { found: "b: the lock file is gone".into() }]);
    assert_eq!(deeds(&mut machine, Event::Tick, 20_000), [Action::Renew]);
    machine.step(Event::Renewed(Renewal::Confirmed), 20_000);
    let said = deeds(&mut machine, lost("c"), 21_000);
    assert_eq!(said, [Action::Say("the lock was lost: c: the lock file is gone; the command goes on".into())]);
    machine.step(Event::Command(Change::Exited(0)), 22_000);
    assert_eq!(ending(&machine), Some((76, true)));
}
