//! Jobs without sockets and clocks: rings and all-to-alls of pretend ranks, with faults drawn from
//! seeds. The views are what connections over such links would see.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails there")]

use std::collections::BTreeMap;
use std::time::Duration;

use evenkeel_diagnosis::{
    Class, Collector, ConnectionView, Direction, Outcome, Process, Verdict, View,
    select_connections,
};
use evenkeel_testkit::TestRng;

/// Times are in milliseconds.
type Time = f64;

/// When faults begin.
const FAULT: Time = 42_000.0;
/// When a run ends.
const END: Time = 84_000.0;
/// Bytes a millisecond of an undisturbed card: 1 Gbit/s.
const CARD: f64 = 125_000.0;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Pattern {
    Ring,
    AllToAll,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    /// A card sends slower, by this factor.
    Egress(usize, f64),
    /// A card receives slower.
    Ingress(usize, f64),
    /// A path is slower.
    Path(usize, usize, f64),
    /// A rank computes longer in each step, in milliseconds.
    Late(usize, Time),
    /// A rank pauses for a second, again and again after this time, or once.
    Pauses(usize, Time),
    /// A rank never calls again.
    Stuck(usize),
    /// A process is stopped: nothing comes from it either.
    Stopped(usize),
    /// A process gets little CPU.
    Starved(usize),
    /// Nothing reaches a host any more.
    Unplugged(usize),
}

/// How long ranks compute before each step.
#[derive(Clone, Copy, Debug)]
enum Compute {
    Even,
    /// Another rank is late in each step.
    Stragglers,
    /// Later ranks always compute longer.
    Stages,
    /// The same, after half a minute in which all load and compile.
    StagesThatStartSlowly,
}

/// Sums of intervals by second.
#[derive(Default)]
struct Sums(BTreeMap<u64, f64>);

impl Sums {
    fn add(&mut self, from: Time, to: Time) {
        let mut at = from;
        while at < to {
            let second = (at / 1000.0).floor();
            let end = to.min((second + 1.0) * 1000.0);
            *self.0.entry(second as u64).or_default() += end - at;
            at = end;
        }
    }

    fn of(&self, second: u64) -> u32 {
        self.0.get(&second).copied().unwrap_or(0.0).min(1000.0) as u32
    }
}

/// One connection.
#[derive(Default)]
struct Wire {
    pending: Sums,
    wanted: Sums,
    unposted: Sums,
    /// Bytes on their way.
    unacknowledged: Sums,
    bytes: BTreeMap<u64, f64>,
    pending_since: Option<Time>,
    wanted_since: Option<Time>,
    unposted_since: Option<Time>,
}

struct Simulation {
    ranks: usize,
    pattern: Pattern,
    compute: Compute,
    fault: Fault,
    rng: TestRng,
    wires: BTreeMap<(usize, usize), Wire>,
    uncalled: Vec<Sums>,
    uncalled_since: Vec<Option<Time>>,
    ended: Vec<Time>,
    next_pause: Time,
}

impl Simulation {
    fn new(ranks: usize, pattern: Pattern, compute: Compute, fault: Fault, seed: u64) -> Self {
        let mut wires = BTreeMap::new();
        for from in 0..ranks {
            for to in 0..ranks {
                let neighbours = to == (from + 1) % ranks;
                if from != to && (pattern == Pattern::AllToAll || neighbours) {
                    wires.insert((from, to), Wire::default());
                }
            }
        }
        Self {
            ranks,
            pattern,
            compute,
            fault,
            rng: TestRng::new(seed),
            wires,
            uncalled: (0..ranks).map(|_| Sums::default()).collect(),
            uncalled_since: vec![None; ranks],
            ended: vec![0.0; ranks],
            next_pause: FAULT,
        }
    }

    fn is_on(&self, now: Time) -> bool {
        now >= FAULT
    }

    /// Factors of a card that sends and one that receives, and of the path between them.
    fn factors(&self, from: usize, to: usize, now: Time) -> (f64, f64, f64) {
        match self.fault {
            _ if !self.is_on(now) => (1.0, 1.0, 1.0),
            Fault::Egress(at, factor) if at == from => (factor, 1.0, 1.0),
            Fault::Ingress(at, factor) if at == to => (1.0, factor, 1.0),
            Fault::Path(a, b, factor) if (a, b) == (from, to) => (1.0, 1.0, factor),
            _ => (1.0, 1.0, 1.0),
        }
    }

    fn computes(&mut self, rank: usize, step: u64, now: Time) -> Time {
        let jitter = self.rng.below(10) as f64;
        let straggler = match self.compute {
            Compute::Even => 0.0,
            Compute::Stragglers
                if step % self.ranks as u64 == (rank as u64 * 3) % self.ranks as u64 =>
            {
                60.0
            }
            Compute::Stragglers => 0.0,
            Compute::StagesThatStartSlowly if step == 0 => 35_000.0,
            Compute::Stages | Compute::StagesThatStartSlowly => 8.0 * rank as f64,
        };
        let late = match self.fault {
            Fault::Late(at, more) if at == rank && self.is_on(now) => more,
            Fault::Starved(at) if at == rank && self.is_on(now) => 120.0,
            Fault::Pauses(at, every) if at == rank && now >= self.next_pause => {
                self.next_pause = now + every;
                1000.0
            }
            _ => 0.0,
        };
        40.0 + jitter + straggler + late
    }

    /// Whether this rank takes part no more.
    fn is_frozen(&self, rank: usize, now: Time) -> bool {
        let (Fault::Stuck(at) | Fault::Stopped(at) | Fault::Unplugged(at)) = self.fault else {
            return false;
        };
        at == rank && self.is_on(now)
    }

    fn run(&mut self) {
        let mut step = 0;
        while self.ended.iter().all(|end| *end < END) {
            let ended = self.ended.clone();
            let calls: Vec<Time> = (0..self.ranks)
                .map(|rank| {
                    let call = ended[rank] + self.computes(rank, step, ended[rank]);
                    if self.is_frozen(rank, call) { f64::INFINITY } else { call }
                })
                .collect();
            for rank in 0..self.ranks {
                self.uncalled[rank].add(ended[rank], calls[rank].min(END));
                if calls[rank].is_infinite() {
                    self.uncalled_since[rank] = Some(ended[rank]);
                }
            }
            match self.pattern {
                Pattern::Ring => self.ring(&calls),
                Pattern::AllToAll => self.all_to_all(&calls),
            }
            step += 1;
        }
    }

    /// Rounds of 1 MB from each rank to the next, each after what came in the round before.
    fn ring(&mut self, calls: &[Time]) {
        let (ranks, bytes) = (self.ranks, 1e6);
        let mut ready = calls.to_vec();
        let mut free = calls.to_vec();
        let mut received = calls.to_vec();
        for _ in 0..2 * (ranks - 1) {
            let mut next = ready.clone();
            for from in 0..ranks {
                let to = (from + 1) % ranks;
                let start = ready[from].max(free[from]);
                let (out, into, path) = self.factors(from, to, start);
                let time = bytes / (CARD * out.min(into).min(path)) + 0.1;
                let done = if start.is_infinite() { start } else { (start + time).max(calls[to]) };
                let wire = self.wires.get_mut(&(from, to)).unwrap();
                wire.pending.add(start.min(END), done.min(END));
                wire.unacknowledged.add(start.min(END), (start + time).min(END));
                wire.unposted.add((start + 0.1).min(END), calls[to].min(END).max(start.min(END)));
                if done.is_infinite() {
                    if start.is_finite() {
                        wire.pending_since.get_or_insert(start);
                    }
                    if calls[to].is_infinite() && start.is_finite() {
                        wire.unposted_since.get_or_insert(start);
                    }
                } else {
                    *wire.bytes.entry((done / 1000.0) as u64).or_default() += bytes;
                }
                free[from] = done;
                received[to] = done;
                next[to] = done.max(calls[to]);
            }
            ready = next;
        }
        for rank in 0..ranks {
            let from = (rank + ranks - 1) % ranks;
            let wire = self.wires.get_mut(&(from, rank)).unwrap();
            wire.wanted.add(calls[rank].min(END), received[rank].min(END));
            if received[rank].is_infinite() && calls[rank].is_finite() {
                wire.wanted_since.get_or_insert(calls[rank]);
            }
            self.ended[rank] = received[rank].max(free[rank]).max(calls[rank]);
        }
        let stopped = self.ended.iter().any(|end| end.is_infinite());
        if stopped {
            self.ended.iter_mut().for_each(|end| *end = end.max(END));
        }
    }

    /// Each rank sends to all others at once, and cards are shared.
    fn all_to_all(&mut self, calls: &[Time]) {
        let mut left: BTreeMap<(usize, usize), f64> =
            self.wires.keys().map(|key| (*key, 2e6)).collect();
        let mut done: BTreeMap<(usize, usize), Time> = BTreeMap::new();
        let mut now = calls.iter().copied().fold(f64::INFINITY, f64::min);
        while !left.is_empty() && now < END {
            let active: Vec<(usize, usize)> = left
                .keys()
                .copied()
                .filter(|(from, to)| calls[*from] <= now && calls[*to] <= now)
                .collect();
            let rate = |(from, to): (usize, usize)| {
                let out = active.iter().filter(|(other, _)| *other == from).count() as f64;
                let into = active.iter().filter(|(_, other)| *other == to).count() as f64;
                let (egress, ingress, path) = self.factors(from, to, now);
                (CARD * egress / out).min(CARD * ingress / into).min(CARD * path)
            };
            let rates: Vec<f64> = active.iter().map(|key| rate(*key)).collect();
            let next_call = calls.iter().copied().filter(|call| *call > now).fold(END, f64::min);
            let finish = active.iter().zip(&rates).map(|(key, rate)| now + left[key] / rate);
            let until = finish.fold(next_call, f64::min).max(now + 1e-6);
            for (key, rate) in active.iter().zip(&rates) {
                let moved = (rate * (until - now)).min(left[key]);
                let wire = self.wires.get_mut(key).unwrap();
                *wire.bytes.entry((now / 1000.0) as u64).or_default() += moved;
                wire.unacknowledged.add(now, until.min(END));
                let rest = left[key] - moved;
                if rest < 1.0 {
                    left.remove(key);
                    done.insert(*key, until);
                } else {
                    left.insert(*key, rest);
                }
            }
            now = until;
        }
        for (key, wire) in &mut self.wires {
            let (from, to) = *key;
            let end = done.get(key).copied().unwrap_or(f64::INFINITY);
            wire.pending.add(calls[from].min(END), end.min(END));
            wire.wanted.add(calls[to].min(END), end.min(END));
            wire.unposted.add(calls[from].min(END), calls[to].min(END));
            if end.is_infinite() {
                if calls[from].is_finite() {
                    wire.pending_since.get_or_insert(calls[from]);
                }
                if calls[to].is_finite() {
                    wire.wanted_since.get_or_insert(calls[to]);
                } else if calls[from].is_finite() {
                    wire.unposted_since.get_or_insert(calls[from]);
                }
            }
        }
        for (rank, (ended, call)) in self.ended.iter_mut().zip(calls).enumerate() {
            let mine = self.wires.keys().filter(|(from, to)| *from == rank || *to == rank);
            *ended =
                mine.map(|key| done.get(key).copied().unwrap_or(END)).fold(call.min(END), f64::max);
        }
    }

    fn view(&self, rank: usize, second: u64) -> Option<View> {
        let end = (second + 1) as f64 * 1000.0;
        let frozen = self.is_frozen(rank, end);
        if frozen && matches!(self.fault, Fault::Stopped(_) | Fault::Unplugged(_)) {
            return None;
        }
        let since = |since: Option<Time>| {
            since.filter(|since| *since < end).map_or(0, |since| (end - since) as u32)
        };
        let mut connections = Vec::new();
        for ((from, to), wire) in &self.wires {
            let is_sender = *from == rank;
            if !is_sender && *to != rank {
                continue;
            }
            let (out, into, path) = self.factors(*from, *to, end);
            let queue = if out.min(into).min(path) < 1.0 { 8000 } else { 300 };
            let unplugged = matches!(self.fault, Fault::Unplugged(at) if (at == *to || at == *from) && end > FAULT + 1000.0);
            let of = |sums: &Sums, running: Option<Time>| {
                let more = running.map_or(0.0, |since| (end - since.max(end - 1000.0)).max(0.0));
                sums.of(second).max(more as u32)
            };
            let outstanding_since = if is_sender { wire.pending_since } else { wire.wanted_since };
            let outstanding =
                of(if is_sender { &wire.pending } else { &wire.wanted }, outstanding_since);
            connections.push(ConnectionView {
                id: (*from as u64) << 32 | *to as u64,
                is_sender,
                device: 0,
                outstanding,
                peer: 0,
                wire: if is_sender { outstanding } else { 0 },
                unposted: if is_sender { 0 } else { of(&wire.unposted, wire.unposted_since) },
                unacknowledged: if is_sender { wire.unacknowledged.of(second) } else { 0 },
                outstanding_for: since(outstanding_since),
                kibibytes: (wire.bytes.get(&second).copied().unwrap_or(0.0) / 1024.0) as u32,
                round_trip: if is_sender { queue } else { 0 },
                retransmits: 0,
                is_unanswered: is_sender && unplugged,
            });
        }
        let starved = matches!(self.fault, Fault::Starved(at) if at == rank && self.is_on(end));
        Some(View {
            process: Process {
                id: 1000 + rank as u64,
                rank: Some(rank as u32),
                host: format!("n{rank}"),
                pod: String::new(),
            },
            sequence: second as u32 + 1,
            window: 1000,
            uncalled: self.uncalled[rank].of(second),
            uncalled_for: since(self.uncalled_since[rank]),
            starved: if starved { 450 } else { 20 },
            connections_open: connections.len() as u32,
            devices: vec!["eth0".into()],
            connections,
        })
    }
}

/// The verdicts of a run, one a second.
fn verdicts(simulation: &mut Simulation) -> Vec<Verdict> {
    simulation.run();
    let mut collector = Collector::new(1);
    let mut all = Vec::new();
    let mut turns = vec![0; simulation.ranks];
    for second in 0..(END / 1000.0) as u64 {
        let now = Duration::from_secs(second + 1);
        for (rank, turn) in turns.iter_mut().enumerate() {
            if let Some(mut view) = simulation.view(rank, second) {
                let connections = view.connections.into_iter().map(|view| (view, ())).collect();
                let shown = select_connections(connections, turn);
                view.connections = shown.into_iter().map(|(view, ())| view).collect();
                let bytes = view.encode();
                collector.add(View::decode(&bytes).unwrap(), now);
            }
        }
        let verdict = collector.judge(now).clone();
        if let Some(suspect) = verdict.suspects.first() {
            let words = suspect.words();
            assert!(verdict.text.contains(&words), "{} is no sentence on {words}", verdict.text);
        }
        all.push(verdict);
    }
    all
}

fn is_right(verdict: &Verdict, fault: Fault, pattern: Pattern, ranks: usize) -> bool {
    let Some(suspect) = verdict.suspects.first() else { return false };
    let at = |host: &str, rank: usize| host == format!("n{rank}");
    let is_path = |from: usize, to: usize| {
        let peer = suspect.peer.as_ref().map_or("", |peer| peer.host.as_str());
        suspect.class == Class::Path && at(&suspect.place.host, from) && at(peer, to)
    };
    let is_card = |rank: usize, direction: Direction| {
        suspect.class == Class::Link
            && at(&suspect.place.host, rank)
            && [Some(direction), Some(Direction::Both)].contains(&suspect.direction)
    };
    match fault {
        Fault::None => false,
        // A ring has one path from and to each card: its end cannot be told.
        Fault::Egress(rank, _) if pattern == Pattern::Ring => is_path(rank, (rank + 1) % ranks),
        Fault::Ingress(rank, _) if pattern == Pattern::Ring => {
            is_path((rank + ranks - 1) % ranks, rank)
        }
        Fault::Egress(rank, _) => is_card(rank, Direction::Send),
        Fault::Ingress(rank, _) => is_card(rank, Direction::Receive),
        Fault::Path(from, to, _) => is_path(from, to),
        Fault::Late(rank, _)
        | Fault::Pauses(rank, _)
        | Fault::Stuck(rank)
        | Fault::Stopped(rank)
        | Fault::Starved(rank) => suspect.class == Class::Late && at(&suspect.place.host, rank),
        Fault::Unplugged(rank) => match pattern {
            Pattern::Ring => {
                suspect.class != Class::Late
                    && (at(&suspect.place.host, rank)
                        || suspect.peer.as_ref().is_some_and(|peer| at(&peer.host, rank)))
            }
            Pattern::AllToAll => is_card(rank, Direction::Receive),
        },
    }
}

fn drawn(rng: &mut TestRng, ranks: usize, pattern: Pattern) -> Fault {
    let at = rng.index(ranks);
    let other = if pattern == Pattern::Ring {
        (at + 1) % ranks
    } else {
        (at + 1 + rng.index(ranks - 1)) % ranks
    };
    let factor = *rng.choose(&[0.5, 0.25, 0.1]);
    match rng.below(8) {
        0 => Fault::Egress(at, factor),
        1 => Fault::Ingress(at, factor),
        // A path carries a part of what a card does, so it must be much slower to cost anything.
        2 => Fault::Path(
            at,
            other,
            if pattern == Pattern::Ring { factor } else { factor / ranks as f64 },
        ),
        3 => Fault::Late(at, 60.0 + rng.below(440) as f64),
        4 => Fault::Stuck(at),
        5 => Fault::Stopped(at),
        6 => Fault::Starved(at),
        _ => Fault::Unplugged(at),
    }
}

#[test]
fn simulated_faults_are_named_with_their_place_and_class() {
    let mut rng = TestRng::new(24);
    let mut right = 0;
    let mut wrong = Vec::new();
    let mut seconds = Vec::new();
    for seed in 0..60 {
        let pattern = *rng.choose(&[Pattern::Ring, Pattern::AllToAll]);
        let ranks = 8 + rng.index(5);
        let fault = drawn(&mut rng, ranks, pattern);
        let compute = *rng.choose(&[Compute::Even, Compute::Stragglers, Compute::Stages]);
        let mut simulation = Simulation::new(ranks, pattern, compute, fault, seed);
        let all = verdicts(&mut simulation);
        let (before, after) = all.split_at((FAULT / 1000.0) as usize);
        let quiet = before.iter().all(|verdict| verdict.suspects.is_empty());
        let first = after.iter().position(|verdict| !verdict.suspects.is_empty());
        let named = first.is_some_and(|at| is_right(&after[at], fault, pattern, ranks))
            && is_right(after.last().unwrap(), fault, pattern, ranks);
        if quiet && named {
            right += 1;
            seconds.push(first.unwrap_or_default());
        } else {
            let text = first.map_or_else(|| "nobody".to_owned(), |at| after[at].to_json());
            wrong.push(format!("{seed} {pattern:?} {compute:?} {ranks} {fault:?} quiet={quiet}: {text}; at the end {}", after.last().unwrap().text));
        }
    }
    seconds.sort_unstable();
    let median = seconds[seconds.len() / 2];
    println!(
        "{right} right, {} wrong; median {median} s, longest {:?} s",
        wrong.len(),
        seconds.last()
    );
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), right + wrong.len(), wrong.join("\n"));
    assert!(median <= 10 && *seconds.last().unwrap() <= 30, "{seconds:?}");
}

#[test]
fn simulated_jobs_without_faults_have_no_suspects() {
    for pattern in [Pattern::Ring, Pattern::AllToAll] {
        let stages = [Compute::Stages, Compute::StagesThatStartSlowly];
        for compute in [Compute::Even, Compute::Stragglers].into_iter().chain(stages) {
            for seed in 0..2 {
                let mut simulation = Simulation::new(8, pattern, compute, Fault::None, seed);
                for verdict in verdicts(&mut simulation) {
                    assert!(
                        verdict.suspects.is_empty(),
                        "{pattern:?} {compute:?}: {}",
                        verdict.text
                    );
                    assert_ne!(verdict.outcome, Outcome::Unknown);
                }
            }
        }
    }
}

/// As for a checkpoint, or garbage. If it comes again and again, the job loses to it all the time.
#[test]
fn simulated_pause_is_named_only_if_it_comes_again_and_again() {
    for pattern in [Pattern::Ring, Pattern::AllToAll] {
        for (every, is_named) in [(END, false), (30_000.0, false), (9_000.0, true), (4_000.0, true)]
        {
            let fault = Fault::Pauses(3, every);
            let all = verdicts(&mut Simulation::new(8, pattern, Compute::Even, fault, 1));
            let named: Vec<&Verdict> =
                all.iter().filter(|verdict| !verdict.suspects.is_empty()).collect();
            assert_eq!(!named.is_empty(), is_named, "{pattern:?}, every {every} ms");
            for verdict in named {
                assert!(is_right(verdict, fault, pattern, 8), "{}", verdict.text);
            }
        }
    }
}

#[test]
fn simulated_fault_that_ends_is_named_no_more() {
    // The card recovers when the views of an undisturbed run follow.
    let mut slow = Simulation::new(8, Pattern::AllToAll, Compute::Even, Fault::Egress(3, 0.25), 1);
    let mut well = Simulation::new(8, Pattern::AllToAll, Compute::Even, Fault::None, 1);
    slow.run();
    well.run();
    let mut collector = Collector::new(1);
    let mut named = Vec::new();
    for second in 0..116 {
        let (from, at) = if second < 66 { (&slow, second) } else { (&well, second - 61) };
        for rank in 0..8 {
            let mut view = from.view(rank, at).unwrap();
            view.sequence = second as u32 + 1;
            collector.add(view, Duration::from_secs(second + 1));
        }
        named.push(!collector.judge(Duration::from_secs(second + 1)).suspects.is_empty());
    }
    assert!(named[58..66].iter().all(|named| *named), "{named:?}");
    assert!(named[86..].iter().all(|named| !*named), "{named:?}");
}

/// Each rank has 38 connections, of which a view has room for 24.
#[test]
fn simulated_faults_of_many_connections_are_named() {
    const RANKS: usize = 20;
    for fault in [
        Fault::None,
        Fault::Path(3, 7, 0.25 / RANKS as f64),
        Fault::Ingress(6, 0.5),
        Fault::Stopped(11),
    ] {
        let mut simulation = Simulation::new(RANKS, Pattern::AllToAll, Compute::Even, fault, 1);
        let verdicts = verdicts(&mut simulation);
        let named = verdicts.iter().find(|verdict| !verdict.suspects.is_empty());
        match named {
            None => assert_eq!(fault, Fault::None),
            Some(verdict) => assert!(
                is_right(verdict, fault, Pattern::AllToAll, RANKS),
                "{fault:?}: {}",
                verdict.text
            ),
        }
    }
}

#[test]
fn simulated_job_of_which_few_views_come_is_not_judged() {
    let mut simulation = Simulation::new(8, Pattern::Ring, Compute::Even, Fault::Late(3, 300.0), 1);
    simulation.run();
    let mut collector = Collector::new(1);
    for second in 0..(END / 1000.0) as u64 {
        for rank in 0..8 {
            // Most have never got through after the first seconds.
            if rank < 3 || second < 20 {
                collector
                    .add(simulation.view(rank, second).unwrap(), Duration::from_secs(second + 1));
            }
        }
        let verdict = collector.judge(Duration::from_secs(second + 1));
        assert!(verdict.suspects.is_empty(), "{}", verdict.text);
    }
    assert_eq!(collector.verdict().outcome, Outcome::Unknown, "{}", collector.verdict().text);
}
