//! What the machine does about what happens, event by event.

use super::*;

fn machine(change: impl FnOnce(&mut Terms)) -> Machine {
    let mut terms = Terms {
        ttl_ms: Some(60_000),
        renew: true,
        may_be_unseen: false,
        max_hold_ms: None,
        kill_after_ms: 10_000,
        on_lost: OnLost::Terminate,
        leads_session: false,
    };
    change(&mut terms);
    Machine::new(terms, 0, 0)
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
        assert_eq!(machine.step(Event::Command(change), 5), [Action::Finish]);
        assert_eq!(machine.outcome(), Some(Outcome { code, lost: false }));
    }
}

#[test]
fn a_signal_sent_to_us_alone_is_handed_on_and_one_from_the_terminal_is_not() {
    let mut machine = machine(|_| {});
    for number in [number::TERM, number::HUP, number::INT, number::QUIT, 10, 12, 34, 64] {
        assert_eq!(machine.step(signal(number, false), 1), [Action::Forward(number)]);
    }
    for number in [number::INT, number::QUIT, number::TSTP, number::WINCH, number::HUP] {
        assert_eq!(machine.step(signal(number, true), 1), []);
    }
    let broken_pipe = Received { signal: number::PIPE, by_kernel: false, by_self: true };
    assert_eq!(machine.step(Event::Signal(broken_pipe), 1), []);
}

#[test]
fn a_hang_up_of_the_terminal_is_handed_on_by_the_sessions_leader() {
    let mut machine = machine(|terms| terms.leads_session = true);
    assert_eq!(machine.step(signal(number::HUP, true), 1), [Action::Forward(number::HUP)]);
}

#[test]
fn a_command_stopped_from_the_terminal_stops_us_and_continuing_renews_first() {
    let mut machine = machine(|_| {});
    assert_eq!(machine.step(stopped(number::TSTP, false), 1), [Action::StopSelf(number::TSTP)]);
    assert_eq!(machine.step(signal(number::TSTP, true), 2), [], "of this very stop");
    assert_eq!(machine.step(signal(number::CONT, false), 9), [Action::Renew, Action::Forward(number::CONT)]);
}

#[test]
fn a_command_stopped_alone_keeps_its_lock_until_the_terminal_or_its_own_shell_stops_all() {
    let mut machine = machine(|_| {});
    assert_eq!(machine.step(stopped(number::STOP, false), 1), [], "it was meant for it alone");
    assert_eq!(machine.step(signal(number::TSTP, true), 2), [Action::StopSelf(number::TSTP)]);
    assert_eq!(machine.step(signal(number::CONT, false), 9), [Action::Renew, Action::Forward(number::CONT)]);
    assert_eq!(machine.step(signal(number::TSTP, true), 10), [], "it stops first");
    assert_eq!(machine.step(stopped(number::STOP, true), 11), [Action::StopSelf(number::TSTP)]);
}

#[test]
fn renewal_comes_every_third_and_soon_again_after_a_failure() {
    let mut machine = machine(|_| {});
    assert_eq!(machine.next_due_ms(), LOOK_EVERY_MS);
    assert_eq!(machine.step(Event::Tick, 1_000), [Action::Look]);
    assert_eq!(machine.step(Event::Tick, 20_000), [Action::Renew]);
    let said = machine.step(Event::Renewed(Renewal::Failed("No space left".into())), 20_000);
    assert_eq!(said, [Action::Say("the lock could not be renewed: No space left; trying again".into())]);
    assert_eq!(machine.next_due_ms(), 21_000);
    assert_eq!(machine.step(Event::Renewed(Renewal::Contested), 21_000), [], "said once");
    assert_eq!(machine.step(Event::Renewed(Renewal::Confirmed), 22_000), []);
    assert_eq!(machine.step(Event::Tick, 42_000), [Action::Renew]);
}

#[test]
fn whoever_wakes_too_late_waits_for_the_answer_of_its_renewal_a_moment_only() {
    let mut machine = machine(|terms| terms.may_be_unseen = true);
    assert_eq!(machine.step(Event::Tick, 3_600_000), [Action::Renew]);
    assert_eq!(machine.step(Event::Renewed(Renewal::Pending), 3_600_000), []);
    assert_eq!(machine.step(Event::Tick, 3_601_249), [Action::Look]);
    assert!(matches!(machine.step(Event::Tick, 3_601_250)[..], [Action::Say(_), ..]));
    assert!(machine.step(Event::Tick, 3_601_251).contains(&Action::SignalTree(number::KILL)));
}

#[test]
fn a_renewal_whose_answer_comes_later_counts_from_when_it_was_begun() {
    let mut machine = machine(|terms| terms.may_be_unseen = true);
    machine.step(Event::Looked(None), 19_500);
    assert_eq!(machine.step(Event::Tick, 20_000), [Action::Renew]);
    assert_eq!(machine.step(Event::Renewed(Renewal::Pending), 20_000), []);
    assert_eq!(machine.step(Event::Tick, 21_000), [Action::Look], "one renewal at a time");
    assert_eq!(machine.step(signal(number::CONT, false), 21_001), [], "that one is on its way");
    assert_eq!(machine.step(Event::Renewed(Renewal::Confirmed), 24_000), []);
    assert_eq!(machine.step(Event::Tick, 44_000), [Action::Renew]);
    assert_eq!(machine.step(Event::Renewed(Renewal::Pending), 44_000), []);
    let actions = machine.step(Event::Tick, 70_000);
    assert_eq!(actions[0], Action::Say("the lock expires in 10s and was not renewed; ending the command".into()));
}

#[test]
fn behind_a_guard_that_all_see_a_failed_renewal_ends_nothing() {
    let mut machine = machine(|_| {});
    machine.step(Event::Renewed(Renewal::Failed("x".into())), 20_000);
    assert_eq!(machine.step(Event::Tick, 3_600_000), [Action::Renew]);
}

#[test]
fn where_others_may_not_see_the_guard_the_command_ends_before_the_lease_does() {
    let mut machine = machine(|terms| terms.may_be_unseen = true);
    machine.step(Event::Renewed(Renewal::Failed("x".into())), 20_000);
    assert_eq!(machine.step(Event::Tick, 49_999), [Action::Renew]);
    machine.step(Event::Renewed(Renewal::Failed("x".into())), 49_999);
    assert_eq!(machine.step(Event::Tick, 50_000), [Action::Renew], "a last time");
    machine.step(Event::Renewed(Renewal::Failed("x".into())), 50_000);
    let actions = machine.step(Event::Tick, 50_000);
    assert_eq!(
        actions,
        [
            Action::Say("the lock expires in 10s and was not renewed; ending the command".into()),
            Action::SignalTree(number::TERM),
            Action::SignalTree(number::CONT)
        ]
    );
    assert!(!machine.step(Event::Tick, 57_499).contains(&Action::SignalTree(number::KILL)));
    assert!(machine.step(Event::Tick, 57_500).contains(&Action::SignalTree(number::KILL)), "well before its end");
    machine.step(Event::Command(Change::Killed(number::KILL)), 57_501);
    assert_eq!(machine.step(Event::TreeLeft(0), 57_502), [Action::Finish]);
    assert_eq!(machine.outcome(), Some(Outcome { code: 76, lost: false }));
}

#[test]
fn whoever_wakes_after_the_lease_was_over_renews_first_and_goes_on_if_that_is_confirmed() {
    let mut machine = machine(|terms| terms.may_be_unseen = true);
    assert_eq!(machine.step(Event::Tick, 3_600_000), [Action::Renew]);
    assert_eq!(machine.step(Event::Renewed(Renewal::Confirmed), 3_600_005), []);
    assert_eq!(machine.step(Event::Tick, 3_600_006), [], "nothing is due");
}

#[test]
fn a_lease_counts_from_before_its_renewal_was_begun() {
    let mut machine = machine(|terms| terms.may_be_unseen = true);
    assert_eq!(machine.step(Event::Tick, 20_000), [Action::Renew]);
    // The renewal, or we after it, stalled for 30 s: the stamp may be as old as that.
    machine.step(Event::Renewed(Renewal::Confirmed), 50_000);
    assert_eq!(machine.step(Event::Tick, 69_999), [Action::Look]);
    assert_eq!(machine.step(Event::Tick, 70_000), [Action::Renew]);
    machine.step(Event::Renewed(Renewal::Failed("x".into())), 70_000);
    assert!(matches!(machine.step(Event::Tick, 70_001)[..], [Action::Say(_), ..]));
}

#[test]
fn a_lost_lock_ends_the_whole_tree_and_exits_76() {
    let mut machine = machine(|_| {});
    let actions = machine.step(Event::Looked(Some("the lock file is gone".into())), 5_000);
    assert_eq!(actions[0], Action::Say("the lock was lost: the lock file is gone; ending the command".into()));
    assert_eq!(machine.step(Event::Command(Change::Exited(0)), 5_010), [Action::SignalTree(0)]);
    assert_eq!(machine.step(Event::TreeLeft(1), 5_011), [], "a descendant lives on");
    assert!(machine.step(Event::Tick, 15_000).contains(&Action::SignalTree(number::KILL)));
    assert_eq!(machine.step(Event::TreeLeft(0), 15_050), [Action::Finish]);
    assert_eq!(machine.outcome(), Some(Outcome { code: 76, lost: true }));
}

#[test]
fn a_loss_that_is_only_warned_of_shows_in_the_exit_code_of_a_success() {
    for (status, code) in [(0, 76), (3, 3)] {
        let mut machine = machine(|terms| terms.on_lost = OnLost::Warn);
        let said = machine.step(Event::Renewed(Renewal::Lost("another lock file is there".into())), 20_000);
        assert_eq!(said, [Action::Say("the lock was lost: another lock file is there; the command goes on".into())]);
        assert_eq!(machine.next_due_ms(), u64::MAX);
        machine.step(Event::Command(Change::Exited(status)), 30_000);
        assert_eq!(machine.outcome(), Some(Outcome { code, lost: true }));
    }
}

#[test]
fn max_hold_ends_the_tree_and_kills_what_ignores_it_while_the_lease_is_kept() {
    let mut machine = machine(|terms| terms.max_hold_ms = Some(5_000));
    machine.step(Event::Looked(None), 4_000);
    let actions = machine.step(Event::Tick, 5_000);
    assert_eq!(actions[1..], [Action::SignalTree(number::TERM), Action::SignalTree(number::CONT)]);
    assert!(machine.step(Event::Tick, 15_000).contains(&Action::SignalTree(number::KILL)));
    assert!(machine.step(Event::Tick, 20_000).contains(&Action::Renew));
    machine.step(Event::Command(Change::Killed(number::KILL)), 20_001);
    machine.step(Event::TreeLeft(0), 20_002);
    assert_eq!(machine.outcome(), Some(Outcome { code: 124, lost: false }));
}

#[test]
fn without_a_lease_nothing_is_renewed_and_nothing_can_be_lost() {
    let mut machine = machine(|terms| terms.ttl_ms = None);
    assert_eq!(machine.next_due_ms(), u64::MAX);
    assert_eq!(machine.step(Event::Tick, 1_000_000), []);
    assert_eq!(machine.step(signal(number::CONT, false), 1_000_000), []);
}
