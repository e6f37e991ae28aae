use super::*;

const RECOVERY: Duration = Duration::from_secs(60);
const SETTINGS: RepairSettings = RepairSettings {
    flows: 4,
    max_flows: 128,
    addresses: 2,
    peer_timeout: Duration::from_secs(15),
    recovery_timeout: RECOVERY,
    tries_paths: true,
    pings: false,
};
const BUSY: Situation = Situation {
    is_busy: true,
    has_stopped: false,
    must_retransmit: false,
    is_limited_by_paths: true,
};
const IDLE: Situation = Situation { is_busy: false, is_limited_by_paths: false, ..BUSY };

fn millis(count: u64) -> Duration {
    Duration::from_millis(count)
}

/// A repair of a connection that begins with this number of flows.
fn repair(settings: RepairSettings, flows: u32) -> Repair {
    let mut repair = Repair::new(settings, flows);
    (0..flows).for_each(|number| repair.handle_flow(number, 100));
    repair
}

fn events(repair: &mut Repair) -> Vec<RepairEvent> {
    std::iter::from_fn(|| repair.poll_event()).collect()
}

/// The flows that are to be dialed. Nothing else is to be done.
fn dials(repair: &mut Repair) -> Vec<FlowDial> {
    let dial = |event| match event {
        RepairEvent::Dial(dial) => dial,
        other => panic!("{other:?}"),
    };
    events(repair).into_iter().map(dial).collect()
}

fn numbers(repair: &mut Repair) -> Vec<u32> {
    dials(repair).into_iter().map(|dial| dial.number).collect()
}

/// Flows that move.
fn reports(numbers: impl IntoIterator<Item = u32>) -> Vec<FlowReport> {
    numbers.into_iter().map(|number| FlowReport { number, ..FlowReport::default() }).collect()
}

/// Loses this flow, which had delivered something.
fn lose(repair: &mut Repair, now: Time, number: u32) {
    let path = PathInfo { acked: 1 << 20, ..PathInfo::default() };
    repair.handle_ended(now, number, Some(&path), "a reset", false);
}

#[test]
fn dead_flow_is_replaced() {
    let mut repair = repair(SETTINGS, 4);
    lose(&mut repair, millis(10), 2);
    let dialed = FlowDial { number: 4, binds: true, segment_limit: None, timeout: millis(400) };
    assert_eq!(dials(&mut repair), [dialed]);
    assert!(repair.is_dialing(4) && repair.next_timeout().is_some());
    repair.handle_timeout(millis(135), &BUSY, &reports([0, 1, 3]));
    assert_eq!(events(&mut repair), [], "it is being dialed");
    let accepted = repair.handle_accepted(millis(200), 4, 100);
    assert_eq!(accepted, Some(AcceptedFlow { is_replacement: true, outage: None }));
    assert_eq!(repair.handle_accepted(millis(200), 4, 100), None);
    // Nothing is left to do after a second look.
    for (now, is_left) in [(millis(260), true), (millis(385), false)] {
        repair.handle_timeout(now, &IDLE, &reports([0, 1, 3, 4]));
        assert_eq!((events(&mut repair), repair.next_timeout().is_some()), (vec![], is_left));
    }
}

#[test]
fn sender_without_flows_notes_how_long_it_had_none() {
    let mut repair = repair(SETTINGS, 2);
    lose(&mut repair, millis(1), 0);
    lose(&mut repair, millis(5), 1);
    assert_eq!(numbers(&mut repair), [2, 3, 4, 5]);
    let first = repair.handle_accepted(millis(35), 3, 0).unwrap();
    let outage = Outage { length: millis(30), cause: "a reset".to_owned() };
    assert_eq!(first, AcceptedFlow { is_replacement: true, outage: Some(outage) });
    let second = repair.handle_accepted(millis(40), 2, 0).unwrap();
    assert_eq!(second, AcceptedFlow { is_replacement: true, outage: None });
    assert_eq!(events(&mut repair), [], "two are still missing");
}

/// Each time in a row that all dials fail, the next ones have more time and begin later.
#[test]
fn dials_back_off_while_none_succeeds() {
    let mut repair = repair(RepairSettings { flows: 1, ..SETTINGS }, 1);
    lose(&mut repair, Time::ZERO, 0);
    let mut now = Time::ZERO;
    let mut seen = vec![];
    for _ in 0..9 {
        let FlowDial { number, binds, timeout, .. } = dials(&mut repair)[0];
        now += millis(1);
        repair.handle_dial_failed(now, number, DialFailure::Unanswered, "no answer in time");
        let failed = now;
        while dials_at(&mut repair, now) == 0 {
            now += millis(5);
        }
        seen.push((timeout.as_millis(), binds, (now - failed).as_millis()));
    }
    assert_eq!(
        seen,
        [
            (400, true, 20),
            (800, true, 40),
            (1200, true, 80),
            (1600, false, 160),
            (2000, true, 320),
            (2400, true, 640),
            (2800, true, 1280),
            (3200, false, 2000),
            (3600, true, 2000),
        ]
    );
    // One that succeeds ends it.
    let number = dials(&mut repair)[0].number;
    repair.handle_accepted(now, number, 0).unwrap();
    lose(&mut repair, now, number);
    assert_eq!(dials(&mut repair)[0].timeout, millis(400));
}

/// Number of dials that a check at this time starts. They stay to be taken.
fn dials_at(repair: &mut Repair, now: Time) -> usize {
    repair.handle_timeout(now, &BUSY, &[]);
    repair.events.len()
}

/// The others carry later messages, so none of them can take what a dead flow has not delivered.
#[test]
fn retransmissions_that_no_flow_takes_are_dialed_for_in_parallel() {
    let mut repair = repair(SETTINGS, 4);
    let path = PathInfo { acked: 1 << 20, ..PathInfo::default() };
    repair.handle_ended(millis(10), 0, Some(&path), "a reset", true);
    assert_eq!(numbers(&mut repair), [4]);
    let stuck = Situation { must_retransmit: true, ..BUSY };
    repair.handle_timeout(millis(135), &stuck, &reports([1, 2, 3]));
    assert_eq!(numbers(&mut repair), [5, 6, 7, 8, 9], "six with the first");
    repair.handle_timeout(millis(260), &stuck, &reports([1, 2, 3]));
    assert_eq!(numbers(&mut repair), []);
    // The first that gets through is enough.
    repair.handle_accepted(millis(300), 7, 0).unwrap();
    let cancelled = [4, 5, 6, 8, 9].map(RepairEvent::CancelDial);
    assert_eq!(events(&mut repair), cancelled);
    assert_eq!(repair.handle_accepted(millis(300), 5, 0), None, "it was cancelled");
}

#[test]
fn sender_without_flows_fails_after_the_recovery_timeout() {
    let mut repair = repair(RepairSettings { flows: 1, ..SETTINGS }, 1);
    lose(&mut repair, millis(10), 0);
    events(&mut repair);
    repair.handle_timeout(millis(9) + RECOVERY, &BUSY, &[]);
    assert_eq!(events(&mut repair), []);
    repair.handle_timeout(millis(10) + RECOVERY, &BUSY, &[]);
    let failure = RepairFailure::FlowsLost { cause: "a reset".to_owned(), timeout: RECOVERY };
    assert_eq!(events(&mut repair), [RepairEvent::Failed(failure.clone())]);
    assert_eq!(
        failure.to_string(),
        "all flows are lost (a reset) and none could be opened within 60 s"
    );
    assert_eq!((repair.next_timeout(), repair.is_dialing(1)), (None, false));
    assert_eq!(repair.handle_accepted(RECOVERY * 2, 1, 0), None);
}

/// Both of the peer's addresses refuse for a while.
#[test]
fn refusals_are_final_only_while_there_is_no_flow() {
    for (flows, is_final) in [(1, true), (2, false)] {
        let mut repair = repair(RepairSettings { flows, ..SETTINGS }, flows as u32);
        lose(&mut repair, Time::ZERO, 0);
        let mut failures = vec![];
        for second in 0..6 {
            let now = Duration::from_secs(second * 3);
            repair.handle_timeout(now, &BUSY, &reports(1..flows as u32));
            for event in events(&mut repair) {
                match event {
                    RepairEvent::Dial(FlowDial { number, .. }) => {
                        repair.handle_dial_failed(now, number, DialFailure::Refused, "refused");
                    }
                    RepairEvent::Failed(failure) => failures.push(failure.to_string()),
                    other => panic!("{other:?}"),
                }
            }
        }
        let what = "all flows are lost (a reset) and no other could be opened: refused";
        assert_eq!(failures, vec![what; is_final.into()]);
    }
}

#[test]
fn dial_that_this_host_cannot_start_is_never_final() {
    let mut repair = repair(RepairSettings { flows: 1, ..SETTINGS }, 1);
    lose(&mut repair, Time::ZERO, 0);
    for second in 1..30 {
        for number in numbers(&mut repair) {
            let (now, failure) = (Duration::from_secs(second), DialFailure::NotStarted);
            repair.handle_dial_failed(now, number, failure, "no descriptor");
        }
        repair.handle_timeout(Duration::from_secs(second) + millis(500), &BUSY, &[]);
    }
    // What the listener says is.
    let number = repair.dials.start().number;
    repair.handle_dial_failed(Duration::from_secs(31), number, DialFailure::Final, "gone");
    let failures: Vec<_> = events(&mut repair);
    assert!(matches!(&failures[..], [RepairEvent::Failed(RepairFailure::Refused { .. })]));
}

#[test]
fn flow_is_dead_that_stalls_while_another_is_answered() {
    let path = |unanswered, asked, silent| PathInfo {
        unanswered,
        asked: millis(asked),
        silent: millis(silent),
        usual_round_trip: millis(60),
        ..PathInfo::default()
    };
    let dead = |paths: [PathInfo; 2], is_drained| {
        let mut repair = repair(RepairSettings { flows: 2, tries_paths: false, ..SETTINGS }, 2);
        let mut reports = reports([0, 1]);
        reports.iter_mut().zip(paths).for_each(|(report, path)| report.path = path);
        reports[0].is_drained = is_drained;
        repair.handle_timeout(millis(1), &BUSY, &reports);
        events(&mut repair)
    };
    let answered = path(0, 0, 0);
    let stalled = |number| RepairEvent::End(number, FlowDeath::Stalled);
    assert_eq!(dead([path(3, 10, 10), answered], false), [stalled(0)]);
    assert_eq!(dead([path(1, 120, 200), answered], false), [stalled(0)]);
    assert_eq!(dead([path(1, 119, 200), answered], false), [], "twice the round trip");
    assert_eq!(dead([path(3, 10, 10), answered], true), [], "it has delivered everything");
    assert_eq!(dead([path(3, 10, 10), path(3, 10, 10)], false), [], "none is answered");
    let silent = FlowDeath::Silent { time: Duration::from_secs(15) };
    let long = path(3, 10, 15_000);
    assert_eq!(dead([long, long], false), [0, 1].map(|number| RepairEvent::End(number, silent)));
    assert_eq!(silent.to_string(), "the peer's host has not answered for 15 s");
}

/// A flow that is given up counts as missing before it has ended.
#[test]
fn flow_that_is_given_up_is_replaced_when_it_has_ended() {
    let mut repair = repair(RepairSettings { flows: 2, ..SETTINGS }, 2);
    let mut stalled = reports([0, 1]);
    stalled[1].path.unanswered = 5;
    repair.handle_timeout(millis(1), &BUSY, &stalled);
    assert_eq!(events(&mut repair), [RepairEvent::End(1, FlowDeath::Stalled)]);
    repair.handle_ended(millis(2), 1, None, "it stalled while others moved", false);
    assert_eq!(numbers(&mut repair), [2]);
}

#[test]
fn segments_are_limited_where_flows_open_and_deliver_nothing() {
    let mut repair = repair(RepairSettings { flows: 1, ..SETTINGS }, 1);
    // Its reports of dead flows get through.
    let path = PathInfo { acked: 100 + MAX_REPORTS, unanswered: 2, ..PathInfo::default() };
    let (mut now, mut number) = (Time::ZERO, 0);
    let mut limits = vec![];
    let failure = loop {
        now += Duration::from_secs(7);
        repair.handle_ended(now, number, Some(&path), "stalled", false);
        let mut failure = None;
        for event in events(&mut repair) {
            match event {
                RepairEvent::Dial(dial) => number = dial.number,
                RepairEvent::SegmentsLimited(bytes) => limits.push(bytes),
                RepairEvent::Failed(why) => failure = Some(why),
                other => panic!("{other:?}"),
            }
        }
        if let Some(failure) = failure {
            break failure;
        }
        repair.handle_accepted(now, number, 100).unwrap();
    };
    assert_eq!(limits, [1400, 1220, 536]);
    assert_eq!(failure, RepairFailure::NothingDelivered);
    assert!(now >= RECOVERY);
}

#[test]
fn worn_flows_are_replaced_and_then_retired() {
    let mut repair = repair(RepairSettings { flows: 2, ..SETTINGS }, 2);
    let mut worn = reports([0, 1]);
    worn[0].is_worn = true;
    repair.handle_timeout(millis(1), &BUSY, &worn);
    assert_eq!(numbers(&mut repair), [2]);
    let accepted = repair.handle_accepted(millis(2), 2, 0).unwrap();
    assert!(accepted.is_replacement);
    worn.extend(reports([2]));
    repair.handle_timeout(millis(126), &BUSY, &worn);
    assert_eq!(events(&mut repair), [RepairEvent::Retire { number: 0, is_slow: false }]);
    repair.handle_timeout(millis(251), &BUSY, &worn);
    assert_eq!(events(&mut repair), [], "it still delivers");
    worn[0].is_drained = true;
    repair.handle_timeout(millis(376), &BUSY, &worn);
    assert_eq!(events(&mut repair), [RepairEvent::Close(0)]);
    repair.handle_closed(0);
    for now in [501, 626] {
        repair.handle_timeout(millis(now), &IDLE, &worn[1..]);
    }
    assert_eq!((events(&mut repair), repair.next_timeout()), (vec![], None));
}

/// Flows on other paths carry more: the connection keeps as many as the process grants.
#[test]
fn faster_paths_are_kept_and_slow_flows_are_retired() {
    let mut repair = repair(RepairSettings { flows: 2, ..SETTINGS }, 2);
    let mut flows = reports([0, 1]);
    let mut now = Time::ZERO;
    let (mut granted, mut retired, mut closed) = (0, vec![], 0);
    while closed == 0 {
        now += CHECK_INTERVAL;
        assert!(now < Duration::from_secs(10), "no trial has helped");
        for report in &mut flows {
            // The first two share a slow path.
            report.bytes += if report.number < 2 { 400 << 10 } else { 4 << 20 };
            report.path.busy = now;
            report.is_drained = retired.contains(&(report.number, true));
        }
        repair.handle_timeout(now, &BUSY, &flows);
        for event in events(&mut repair) {
            match event {
                RepairEvent::Dial(dial) => {
                    repair.handle_accepted(now, dial.number, 0).unwrap();
                    flows.extend(reports([dial.number]));
                }
                RepairEvent::WantFlows(count) => {
                    granted += count.min(1);
                    repair.handle_extra_flows(count.min(1));
                }
                RepairEvent::Retire { number, is_slow } => retired.push((number, is_slow)),
                RepairEvent::Close(number) => {
                    flows.retain(|report| report.number != number);
                    repair.handle_closed(number);
                    closed += 1;
                }
                other => panic!("{other:?}"),
            }
        }
    }
    assert_eq!(granted, 1);
    assert_eq!(retired[0], (0, true), "the first of the slowest");
}

#[test]
fn flows_on_which_nothing_moves_are_pinged_less_and_less_often() {
    let mut repair = repair(RepairSettings { pings: true, ..SETTINGS }, 4);
    let stopped = Situation { has_stopped: true, is_limited_by_paths: false, ..BUSY };
    let mut pinged = |from: u64, to: u64| -> Vec<u64> {
        let mut pings = vec![];
        for second in from..to {
            repair.handle_timeout(Duration::from_secs(second), &stopped, &reports(0..4));
            let is_ping = |event: &RepairEvent| *event == RepairEvent::Ping;
            pings.extend(events(&mut repair).iter().filter(|event| is_ping(event)).map(|_| second));
        }
        repair.handle_timeout(Duration::from_secs(to), &BUSY, &reports(0..4));
        pings
    };
    assert_eq!(pinged(0, 300), [1, 3, 7, 15, 31, 63, 127, 191, 255]);
    assert_eq!(pinged(400, 404), [401, 403], "something has moved in between");
}

/// A trial of other paths has not ended when there is nothing to send any more.
#[test]
fn idle_connection_with_more_flows_than_it_keeps_is_not_checked() {
    let mut repair = repair(SETTINGS, 4);
    repair.handle_flow(9, 0);
    for now in [1, 126] {
        repair.handle_timeout(millis(now), &IDLE, &reports([0, 1, 2, 3, 9]));
    }
    assert_eq!((events(&mut repair), repair.next_timeout()), (vec![], None));
}

#[test]
fn repair_that_is_over_asks_for_nothing() {
    let mut repair = repair(SETTINGS, 4);
    lose(&mut repair, Time::ZERO, 0);
    repair.handle_close();
    lose(&mut repair, Time::ZERO, 1);
    repair.handle_timeout(RECOVERY * 2, &BUSY, &reports([2, 3]));
    repair.handle_dial_failed(RECOVERY, 4, DialFailure::Final, "gone");
    assert_eq!(repair.handle_accepted(RECOVERY, 4, 0), None);
    assert_eq!((events(&mut repair), repair.next_timeout()), (vec![], None));
}
