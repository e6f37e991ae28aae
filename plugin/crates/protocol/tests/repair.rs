//! The repair of a sender's flows over simulated paths and dials, in virtual time.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use evenkeel_protocol::{
    DialFailure, FlowReport, PathInfo, Repair, RepairEvent, RepairFailure, RepairSettings,
    Situation,
};
use evenkeel_testkit::TestRng;

const FLOWS: usize = 4;
const MAX_FLOWS: usize = 64;
const RECOVERY: Duration = Duration::from_secs(20);
/// The longest time between two dials while flows are missing, with the check that starts the later one: a dial without an
/// answer, and the delay after it.
const PATIENCE: Duration = Duration::from_secs(8);

/// What becomes of dials.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Network {
    /// Most get through.
    Works,
    /// None is answered.
    Silent,
    /// Nobody listens.
    Refuses,
}

struct Flow {
    report: FlowReport,
    /// Its path is dead: probes are not answered.
    is_dead: bool,
    is_retiring: bool,
}

struct Simulation {
    rng: TestRng,
    now: Duration,
    repair: Repair,
    network: Network,
    flows: Vec<Flow>,
    /// Dials under way, and when they end.
    dials: Vec<(u32, Duration)>,
    dialed: BTreeSet<u32>,
    last_dial: Duration,
    extra: usize,
    is_busy: bool,
    todo: VecDeque<RepairEvent>,
    failure: Option<RepairFailure>,
}

impl Simulation {
    fn new(seed: u64) -> Self {
        let mut rng = TestRng::new(seed);
        let settings = RepairSettings {
            flows: FLOWS,
            max_flows: MAX_FLOWS,
            addresses: 1 + rng.index(2),
            peer_timeout: Duration::from_secs(5),
            recovery_timeout: RECOVERY,
            tries_paths: !rng.one_in(3),
            pings: rng.one_in(2),
        };
        let mut simulation = Self {
            now: Duration::from_millis(rng.below(1000)),
            repair: Repair::new(settings, FLOWS as u32),
            network: Network::Works,
            flows: Vec::new(),
            dials: Vec::new(),
            dialed: (0..FLOWS as u32).collect(),
            last_dial: Duration::ZERO,
            extra: 0,
            is_busy: true,
            todo: VecDeque::new(),
            failure: None,
            rng,
        };
        for number in 0..FLOWS as u32 {
            simulation.repair.handle_flow(number, 0);
            simulation.add(number);
        }
        simulation
    }

    fn add(&mut self, number: u32) {
        let report = FlowReport { number, ..FlowReport::default() };
        self.flows.push(Flow { report, is_dead: false, is_retiring: false });
        assert!(self.flows.len() <= MAX_FLOWS, "too many flows");
    }

    fn position(&self, number: u32) -> Option<usize> {
        self.flows.iter().position(|flow| flow.report.number == number)
    }

    /// A flow has failed.
    fn end(&mut self, index: usize) {
        let flow = self.flows.remove(index);
        let mut path = flow.report.path;
        path.acked = flow.report.bytes;
        let repeats = self.rng.one_in(3);
        let path = Some(&path).filter(|_| !self.rng.one_in(4));
        self.repair.handle_ended(self.now, flow.report.number, path, "the test", repeats);
        self.take_events();
    }

    /// Several threads do what follows from a step, so its parts may be done later and between others.
    fn take_events(&mut self) {
        while let Some(event) = self.repair.poll_event() {
            assert!(self.failure.is_none(), "{event:?} after the end");
            match event {
                RepairEvent::Failed(failure) => self.failure = Some(failure),
                event => self.todo.push_back(event),
            }
        }
    }

    fn run(&mut self, event: RepairEvent) {
        match event {
            RepairEvent::Dial(dial) => {
                assert!(self.dialed.insert(dial.number), "each flow has its own number");
                self.last_dial = self.now;
                if self.rng.one_in(20) {
                    self.dial_failed(dial.number, DialFailure::NotStarted);
                } else if self.repair.is_dialing(dial.number) {
                    let most = dial.timeout.as_millis() as u64;
                    let answer = match self.network {
                        Network::Works if !self.rng.one_in(10) => self.rng.below(most),
                        Network::Refuses => self.rng.below(10),
                        Network::Works | Network::Silent => most,
                    };
                    self.dials.push((dial.number, self.now + Duration::from_millis(answer)));
                }
            }
            RepairEvent::CancelDial(number) => self.dials.retain(|(dial, _)| *dial != number),
            RepairEvent::End(number, _) => {
                if let Some(index) = self.position(number) {
                    self.end(index);
                }
            }
            RepairEvent::Retire { number, .. } => {
                if let Some(index) = self.position(number) {
                    self.flows[index].is_retiring = true;
                }
            }
            RepairEvent::Close(number) => {
                if let Some(index) = self.position(number)
                    && self.flows[index].report.is_drained
                {
                    assert!(self.flows[index].is_retiring, "it was not told before");
                    self.flows.remove(index);
                    self.repair.handle_closed(number);
                }
            }
            RepairEvent::WantFlows(count) => {
                let granted = count.min(2);
                self.extra += granted;
                self.repair.handle_extra_flows(granted);
            }
            RepairEvent::Ping | RepairEvent::SegmentsLimited(_) => {}
            RepairEvent::Failed(_) => unreachable!("it is not put there"),
        }
        self.take_events();
    }

    fn dial_failed(&mut self, number: u32, failure: DialFailure) {
        self.repair.handle_dial_failed(self.now, number, failure, "the test");
        self.take_events();
    }

    /// Dials have their outcomes by now.
    fn end_dials(&mut self) {
        while let Some(index) = self.dials.iter().position(|(_, at)| *at <= self.now) {
            let (number, _) = self.dials.swap_remove(index);
            match self.network {
                Network::Works if !self.rng.one_in(10) => {
                    if self.repair.handle_accepted(self.now, number, 0).is_some() {
                        self.add(number);
                    }
                    self.take_events();
                }
                Network::Refuses => self.dial_failed(number, DialFailure::Refused),
                Network::Works | Network::Silent => {
                    self.dial_failed(number, DialFailure::Unanswered);
                }
            }
        }
    }

    /// A check, of flows that have carried something meanwhile.
    fn check(&mut self) {
        let is_cut = self.network != Network::Works;
        let mut reports = vec![];
        for flow in &mut self.flows {
            let report = &mut flow.report;
            report.is_drained = !self.is_busy || flow.is_retiring && self.rng.one_in(2);
            report.is_worn |= self.is_busy && self.rng.one_in(300);
            if flow.is_dead || is_cut {
                report.path.unanswered = report.path.unanswered.saturating_add(1);
                report.path.silent += Duration::from_millis(125);
                report.path.asked = Duration::from_millis(self.rng.below(200));
            } else {
                report.path = PathInfo { busy: self.now, ..PathInfo::default() };
                report.bytes += self.rng.below(8 << 20);
            }
            reports.push(*report);
        }
        let situation = Situation {
            is_busy: self.is_busy,
            has_stopped: self.is_busy && is_cut,
            must_retransmit: self.is_busy && self.rng.one_in(5),
            is_limited_by_paths: true,
        };
        self.repair.handle_timeout(self.now, &situation, &reports);
        self.take_events();
    }

    /// Anything happens in the next milliseconds.
    fn step(&mut self, has_faults: bool) {
        self.now += Duration::from_millis(self.rng.below(40));
        self.end_dials();
        if self.repair.next_timeout().is_some_and(|next| next <= self.now) {
            self.check();
        }
        if has_faults && !self.flows.is_empty() && self.rng.one_in(60) {
            let index = self.rng.index(self.flows.len());
            match self.rng.one_in(2) {
                true => self.end(index),
                false => self.flows[index].is_dead = true,
            }
        }
        for _ in 0..self.rng.index(4) {
            if let Some(event) = self.todo.pop_front() {
                self.run(event);
            }
        }
    }

    fn run_for(&mut self, time: Duration, has_faults: bool) {
        let end = self.now + time;
        while self.now < end && self.failure.is_none() {
            self.step(has_faults);
            let is_missing = self.flows.len() < FLOWS && self.network != Network::Refuses;
            if is_missing && self.dials.is_empty() && self.todo.is_empty() {
                assert!(self.now < self.last_dial + PATIENCE, "nobody dials");
            }
        }
    }
}

/// As long as dials get through, a connection loses none of its flows for good, keeps no more than it should, and comes to rest.
#[test]
fn connection_has_all_its_flows_when_the_faults_are_over() {
    for seed in 0..400 {
        let mut simulation = Simulation::new(seed);
        simulation.run_for(Duration::from_secs(20), true);
        simulation.run_for(Duration::from_secs(20), false);
        assert_eq!(simulation.failure, None, "seed {seed}");
        simulation.is_busy = false;
        // Dead paths are not looked for while nothing is sent.
        simulation.flows.iter_mut().for_each(|flow| flow.is_dead = false);
        simulation.run_for(Duration::from_secs(20), false);
        let wanted = FLOWS + simulation.extra;
        let open = simulation.flows.iter().filter(|flow| !flow.is_retiring).count();
        assert!(open >= wanted, "seed {seed}: {open} flows of {wanted}");
        assert!(open <= MAX_FLOWS && simulation.dials.is_empty(), "seed {seed}");
    }
}

/// Dials get no answer, or are refused, for as long as it takes.
#[test]
fn connection_without_flows_fails_once_and_in_time() {
    for seed in 0..400 {
        let mut simulation = Simulation::new(seed);
        simulation.run_for(Duration::from_secs(3), true);
        let is_refused = seed % 2 == 0;
        simulation.network = if is_refused { Network::Refuses } else { Network::Silent };
        while !simulation.flows.is_empty() && simulation.failure.is_none() {
            simulation.end(0);
        }
        // Flows of dials that were accepted meanwhile end by their silence, and nothing passes them.
        let begin = simulation.now;
        simulation.run_for(2 * RECOVERY, false);
        let time = simulation.now - begin;
        let failure = simulation.failure.clone();
        match is_refused {
            true => {
                assert!(
                    matches!(failure, Some(RepairFailure::Refused { .. })),
                    "{seed}: {failure:?}"
                );
                assert!(time < Duration::from_secs(12), "seed {seed}: {time:?}");
            }
            false => {
                let is_lost = matches!(failure, Some(RepairFailure::FlowsLost { .. }));
                assert!(is_lost && time < RECOVERY + Duration::from_secs(1), "{seed}: {failure:?}");
            }
        }
        simulation.now += RECOVERY;
        simulation.end_dials();
        simulation.check();
        assert_eq!(simulation.repair.next_timeout(), None);
    }
}
