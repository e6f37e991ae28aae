//! Plans: what one rank sends and receives in a collective operation, and what it does with the received data.
//!
//! A plan is a pure function of the algorithm, the number of ranks, the rank and the counts. The plans of all ranks together make
//! the operation. A plan is a list of steps. Step k of a rank matches step k of the ranks that it names there. Ranges count
//! elements of the *work* buffer, which holds a rank's contribution at first and its result in the end. Transfers marked so use
//! the *input* instead, which is only read. If two transfers of a step touch the same range, they happen in the order of the list.
//! The executor may do everything else concurrently, and in pieces.

use std::ops::Range;

/// What a transfer does with its range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// A range of the work buffer is sent.
    Send,
    /// A range of the input is sent.
    SendInput,
    /// The received data replaces the range of the work buffer.
    Store,
    /// The received data is combined with the range of the work buffer.
    Combine,
    /// The received data is kept until that of all other ranks has arrived. Then all of it is combined with the range of the work
    /// buffer in the order of the ranks, in which this rank has its own place. Such transfers from all other ranks, with the same
    /// range, follow each other in a step, in the order of the ranks.
    CombineInOrder,
}

impl Action {
    pub(crate) fn is_send(self) -> bool {
        matches!(self, Self::Send | Self::SendInput)
    }

    /// Whether the data is received into a buffer of its own.
    pub(crate) fn is_combine(self) -> bool {
        matches!(self, Self::Combine | Self::CombineInOrder)
    }
}

/// A transfer of one range to or from one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Transfer {
    pub(crate) peer: usize,
    pub(crate) action: Action,
    pub(crate) range: Range<usize>,
}

/// The plan of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    steps: Vec<Vec<Transfer>>,
    /// How many steps are in progress at a time, beyond two.
    ahead: usize,
    /// Maximum number of sends in progress at a time, if there is one.
    max_sends: Option<usize>,
}

impl Plan {
    pub(crate) fn steps(&self) -> &[Vec<Transfer>] {
        &self.steps
    }

    /// The number of transfers that are in progress at a time, so that those of a few steps overlap.
    pub(crate) fn concurrency(&self) -> usize {
        let largest = self.steps.iter().map(Vec::len).max().unwrap_or(0);
        (2 + self.ahead) * largest
    }

    /// Whether one more send may begin at a rank. `first` is the step of its first unfinished transfer, `sends` the number of its sends
    /// in progress, and `step` the step of the next one.
    ///
    /// Where the number of sends is limited, they must not wait for each other. Let m be the lowest step that some rank has not
    /// finished. No rank is before it, so all have posted the receives of the steps up to m + ahead + 1: they cover
    /// [`Plan::concurrency`] transfers, which are as many steps or more. (A receive of a result may wait for the rank's contribution to
    /// the same range, but the result is not sent before that has arrived.) A rank that has yet to send something of step m may have
    /// begun sends of these steps only, so all of them end. Then those of step m take their places, as they come first in its list.
    pub(crate) fn may_send(&self, first: usize, step: usize, sends: usize) -> bool {
        self.max_sends.is_none_or(|most| sends < most && step <= first + self.ahead + 1)
    }

    /// A plan of one transfer, which may be empty.
    pub(crate) fn single(transfer: Transfer) -> Self {
        Self { steps: vec![vec![transfer]], ..Self::default() }
    }

    /// A plan that sends a message from the input. It is cut into parts of `max_part` bytes. A shorter part is the last one: it is
    /// empty if need be, so that the receiver finds the end.
    pub(crate) fn message(peer: usize, length: usize, max_part: usize) -> Self {
        let transfer = |range| vec![Transfer { peer, action: Action::SendInput, range }];
        let mut steps = vec![transfer(0..length)];
        if length > 0 && length.is_multiple_of(max_part) {
            steps.push(transfer(length..length));
        }
        Self { steps, ..Self::default() }
    }

    /// Adds a step. Empty transfers are left out, on both sides alike.
    fn step(&mut self, transfers: impl IntoIterator<Item = Transfer>) {
        let transfers = transfers.into_iter().filter(|transfer| !transfer.range.is_empty());
        self.steps.push(transfers.collect());
    }

    /// Adds steps without transfers.
    fn idle(&mut self, steps: usize) {
        self.steps.extend((0..steps).map(|_| vec![]));
    }

    /// Appends another plan.
    fn then(&mut self, other: Self) {
        self.steps.extend(other.steps);
    }

    /// The same plan between other ranks, with ranges shifted by `by`.
    fn shifted(mut self, peer: impl Fn(usize) -> usize, by: usize) -> Self {
        for transfer in self.steps.iter_mut().flatten() {
            transfer.peer = peer(transfer.peer);
            transfer.range = transfer.range.start + by..transfer.range.end + by;
        }
        self
    }
}

fn send(peer: usize, range: &Range<usize>) -> Transfer {
    Transfer { peer, action: Action::Send, range: range.clone() }
}

fn store(peer: usize, range: &Range<usize>) -> Transfer {
    Transfer { peer, action: Action::Store, range: range.clone() }
}

fn combine(peer: usize, range: &Range<usize>) -> Transfer {
    Transfer { peer, action: Action::Combine, range: range.clone() }
}

fn combine_in_order(peer: usize, range: &Range<usize>) -> Transfer {
    Transfer { peer, action: Action::CombineInOrder, range: range.clone() }
}

/// A rank and the number of ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Position {
    pub(crate) rank: usize,
    pub(crate) size: usize,
}

impl Position {
    fn after(self, by: usize) -> usize {
        (self.rank + by) % self.size
    }

    fn before(self, by: usize) -> usize {
        (self.rank + self.size - by % self.size) % self.size
    }
}

/// A range cut into `count` parts of equal length, or one longer.
pub(crate) fn parts(range: &Range<usize>, count: usize) -> Vec<Range<usize>> {
    (0..count).map(|which| part(range, count, which)).collect()
}

/// One of these parts.
fn part(range: &Range<usize>, count: usize, which: usize) -> Range<usize> {
    let (each, more) = (range.len() / count, range.len() % count);
    let begin = |part: usize| range.start + part * each + part.min(more);
    begin(which)..begin(which + 1)
}

/// Consecutive ranges of these lengths.
pub(crate) fn consecutive(lengths: &[usize]) -> Vec<Range<usize>> {
    let mut end = 0;
    lengths
        .iter()
        .map(|length| {
            let start = end;
            end += length;
            start..end
        })
        .collect()
}

/// All-reduce around a ring: a reduce-scatter, then an all-gather. Fewest bytes, most steps.
pub(crate) fn allreduce_ring(at: Position, count: usize) -> Plan {
    let parts = parts(&(0..count), at.size);
    let mut plan = reduce_scatter_ring(at, &parts);
    plan.then(allgather_ring(at, &parts));
    plan
}

/// Reduce-scatter around a ring. Afterwards rank i has part i combined.
pub(crate) fn reduce_scatter_ring(at: Position, parts: &[Range<usize>]) -> Plan {
    let mut plan = Plan::default();
    for step in 1..at.size {
        let (next, last) = (at.after(1), at.before(1));
        plan.step([
            send(next, &parts[at.before(step)]),
            combine(last, &parts[at.before(step + 1)]),
        ]);
    }
    plan
}

/// All-gather around a ring. Rank i has part i; afterwards all ranks have all parts.
pub(crate) fn allgather_ring(at: Position, parts: &[Range<usize>]) -> Plan {
    let mut plan = Plan::default();
    for step in 0..at.size - 1 {
        let (next, last) = (at.after(1), at.before(1));
        plan.step([send(next, &parts[at.before(step)]), store(last, &parts[at.before(step + 1)])]);
    }
    plan
}

/// Reduce-scatter in which each rank sends its contribution to each part directly to the part's rank.
pub(crate) fn reduce_scatter_direct(at: Position, parts: &[Range<usize>]) -> Plan {
    let mut plan = Plan::default();
    for step in 1..at.size {
        let (to, from) = (at.after(step), at.before(step));
        plan.step([send(to, &parts[to]), combine(from, &parts[at.rank])]);
    }
    plan
}

/// All-gather in which each rank sends its part directly to each other rank.
pub(crate) fn allgather_direct(at: Position, parts: &[Range<usize>]) -> Plan {
    let mut plan = Plan::default();
    for step in 1..at.size {
        let (to, from) = (at.after(step), at.before(step));
        plan.step([send(to, &parts[at.rank]), store(from, &parts[from])]);
    }
    plan
}

/// How many rounds of a direct all-reduce are in progress beyond the first one. Ranks are never at the same place, and a packet that is
/// lost delays what depends on it: meanwhile the other links carry the next rounds.
const ROUNDS_AHEAD: usize = 3;

/// How many sends a rank has in progress in a direct all-reduce. With more, their bursts overflow the queue of its own link, and TCP
/// finds some of the losses only after a timeout. With fewer, the link idles while receivers are busy with other ranks.
const MAX_SENDS: usize = 7;

/// All-reduce in which each rank owns a share: a direct reduce-scatter, then a direct all-gather. It goes in rounds, in which every
/// share is done to the same degree, so that all links are busy in proportion to what they have to carry. A round has at most
/// `piece` elements of a share. A round's results are sent while contributions to the next ones arrive.
pub(crate) fn allreduce_direct(at: Position, shares: &[Range<usize>], piece: usize) -> Plan {
    let longest = shares.iter().map(Range::len).max().unwrap_or(0);
    let rounds = longest.div_ceil(piece.max(1)).max(1);
    // Each rank starts with the next one, so that they do not all start with the same one.
    let after = || (1..at.size).map(|by| at.after(by));
    let before = || (1..at.size).map(|by| at.before(by));
    let others = || (0..at.size).filter(|rank| *rank != at.rank);
    let mut plan = Plan { ahead: 2 * ROUNDS_AHEAD, max_sends: Some(MAX_SENDS), ..Plan::default() };
    for round in 0..rounds {
        let piece = |rank: usize| part(&shares[rank], rounds, round);
        let own = piece(at.rank);
        let contributions = others().map(|from| combine_in_order(from, &own));
        plan.step(after().map(|to| send(to, &piece(to))).chain(contributions));
        let results = before().map(|from| store(from, &piece(from)));
        plan.step(after().map(|to| send(to, &own)).chain(results));
    }
    plan
}

/// Folds the ranks to a power of two. The ranks beyond it send their contributions to other ranks, idle, and get the result in the
/// end.
fn fold_to_power_of_two(
    at: Position,
    count: usize,
    inner: impl FnOnce(usize) -> Plan,
    steps: usize,
) -> Plan {
    let power = 1 << at.size.ilog2();
    let beyond = at.size - power;
    let all = 0..count;
    let mut plan = Plan::default();
    let partner = if at.rank >= power { at.rank - power } else { at.rank + power };
    if beyond > 0 {
        match at.rank {
            rank if rank >= power => plan.step([send(partner, &all)]),
            rank if rank < beyond => plan.step([combine(partner, &all)]),
            _ => plan.idle(1),
        }
    }
    if at.rank < power {
        plan.then(inner(power))
    } else {
        plan.idle(steps)
    }
    if beyond > 0 {
        match at.rank {
            rank if rank >= power => plan.step([store(partner, &all)]),
            rank if rank < beyond => plan.step([send(partner, &all)]),
            _ => plan.idle(1),
        }
    }
    plan
}

/// All-reduce in which each rank exchanges the whole buffer with one other rank in each step. Fewest steps, most bytes.
pub(crate) fn allreduce_recursive_doubling(at: Position, count: usize) -> Plan {
    let steps = at.size.ilog2() as usize;
    let inner = |_| {
        let mut plan = Plan::default();
        for step in 0..steps {
            let peer = at.rank ^ (1 << step);
            plan.step([send(peer, &(0..count)), combine(peer, &(0..count))]);
        }
        plan
    };
    fold_to_power_of_two(at, count, inner, steps)
}

/// All-reduce by recursive halving with reduction, then recursive doubling. Fewest bytes, few steps.
pub(crate) fn allreduce_halving_doubling(at: Position, count: usize) -> Plan {
    let steps = 2 * at.size.ilog2() as usize;
    let inner = |power: usize| {
        let (mut plan, mut kept, mut given) = (Plan::default(), 0..count, vec![]);
        let mut distance = power / 2;
        while distance > 0 {
            let peer = at.rank ^ distance;
            let middle = kept.start + kept.len() / 2;
            let (low, high) = (kept.start..middle, middle..kept.end);
            let (keep, give) = if at.rank < peer { (low, high) } else { (high, low) };
            plan.step([send(peer, &give), combine(peer, &keep)]);
            kept = keep;
            given.push((peer, give));
            distance /= 2;
        }
        while let Some((peer, range)) = given.pop() {
            plan.step([send(peer, &kept), store(peer, &range)]);
            kept = kept.start.min(range.start)..kept.end.max(range.end);
        }
        plan
    };
    fold_to_power_of_two(at, count, inner, steps)
}

/// All-reduce in which `base` ranks exchange parts in each step. With base 2 this is halving and doubling for any number of ranks
/// that has only small factors. A larger base has fewer steps with more messages each.
pub(crate) fn allreduce_bcube(at: Position, count: usize, base: usize) -> Plan {
    let (mut plan, mut kept, mut levels) = (Plan::default(), 0..count, vec![]);
    let mut stride = 1;
    for factor in factors(at.size, base) {
        let digit = at.rank / stride % factor;
        let peer = |other: usize| at.rank - digit * stride + other * stride;
        let parts = parts(&kept, factor);
        // Each rank starts with another peer, so that they do not all start with the same one.
        let others = (1..factor).map(|by| (digit + by) % factor);
        let from = (1..factor).map(|by| (digit + factor - by) % factor);
        plan.step(
            others
                .map(|other| send(peer(other), &parts[other]))
                .chain(from.map(|other| combine(peer(other), &parts[digit]))),
        );
        kept = parts[digit].clone();
        levels.push((digit, factor, stride, parts));
        stride *= factor;
    }
    while let Some((digit, factor, stride, parts)) = levels.pop() {
        let peer = |other: usize| at.rank - digit * stride + other * stride;
        let others = (1..factor).map(|by| (digit + by) % factor);
        let from = (1..factor).map(|by| (digit + factor - by) % factor);
        plan.step(
            others
                .map(|other| send(peer(other), &parts[digit]))
                .chain(from.map(|other| store(peer(other), &parts[other]))),
        );
    }
    plan
}

/// Factors whose product is `size`, at most `base` each. A larger prime factor stays as it is.
pub(crate) fn factors(mut size: usize, base: usize) -> Vec<usize> {
    let mut factors = vec![];
    while size > 1 {
        let fits = (2..=base).rev().find(|factor| size.is_multiple_of(*factor));
        let factor =
            fits.or_else(|| (2..=size).find(|factor| size.is_multiple_of(*factor))).unwrap_or(size);
        factors.push(factor);
        size /= factor;
    }
    factors
}

/// Hierarchical all-reduce, which sends as little as possible between hosts. The ranks of each host reduce a part at each leader;
/// every host has as many leaders as the smallest host has ranks. Leaders with the same part combine it between hosts, by the
/// plan that `between` gives for them. Then each leader sends its part to the other ranks of its host. `hosts` has the ranks of
/// each host.
pub(crate) fn allreduce_hierarchical(
    at: Position,
    count: usize,
    hosts: &[Vec<usize>],
    between: impl FnOnce(Position, usize) -> Plan,
) -> Plan {
    let leaders = hosts.iter().map(Vec::len).min().unwrap_or(1).max(1);
    let parts = parts(&(0..count), leaders);
    let here = |host: &Vec<usize>| host.iter().position(|rank| *rank == at.rank);
    let found = hosts.iter().enumerate().find_map(|(host, ranks)| Some((host, here(ranks)?)));
    let (host, own) = found.unwrap_or((0, 0));
    let local = &hosts[host];
    let mine = parts.get(own).cloned();
    // Each rank starts with the next one, so that they do not all start with the same one.
    let others = (1..local.len()).map(|by| (own + by) % local.len());
    let leading = others.clone().filter(|other| *other < leaders);
    let to_or_from = |transfer: fn(usize, &Range<usize>) -> Transfer, other: usize, part: usize| {
        transfer(local[other], &parts[part])
    };
    let mut plan = Plan::default();
    let contributions = leading.clone().map(|other| to_or_from(send, other, other));
    let combines =
        others.clone().filter(|_| own < leaders).map(|other| to_or_from(combine, other, own));
    plan.step(contributions.chain(combines));
    let place = Position { rank: host, size: hosts.len() };
    match mine {
        None => plan.idle(between(place, 0).steps.len()),
        Some(part) => {
            let inner = between(place, part.len());
            plan.then(inner.shifted(|host| hosts[host][own], part.start));
        }
    }
    let sends = others.filter(|_| own < leaders).map(|other| to_or_from(send, other, own));
    let receives = leading.map(|other| to_or_from(store, other, other));
    plan.step(sends.chain(receives));
    plan
}

/// All-gather in which pairs exchange everything they have in each step. Rank i has part i. For powers of two.
pub(crate) fn allgather_recursive_doubling(at: Position, parts: &[Range<usize>]) -> Plan {
    let mut plan = Plan::default();
    let mut width = 1;
    while width < at.size {
        let peer = at.rank ^ width;
        let block = |rank: usize| {
            let first = rank / width * width;
            parts[first].start..parts[first + width - 1].end
        };
        plan.step([send(peer, &block(at.rank)), store(peer, &block(peer))]);
        width *= 2;
    }
    plan
}

/// A rank's number relative to the root, which is 0.
fn relative_rank(at: Position, root: usize) -> usize {
    (at.rank + at.size - root) % at.size
}

/// Broadcast along a binomial tree: each rank that has the data sends it to one other rank in each step.
pub(crate) fn broadcast_tree(at: Position, count: usize, root: usize) -> Plan {
    let (own, all) = (relative_rank(at, root), 0..count);
    let rank = |number: usize| (number + root) % at.size;
    let mut plan = Plan::default();
    let mut reached = 1;
    while reached < at.size {
        if own < reached && own + reached < at.size {
            plan.step([send(rank(own + reached), &all)]);
        } else if own >= reached && own < 2 * reached {
            plan.step([store(rank(own - reached), &all)]);
        } else {
            plan.idle(1);
        }
        reached *= 2;
    }
    plan
}

/// Broadcast along a chain: each rank forwards the data to the next one, piece by piece. As fast as one link for any number of ranks.
pub(crate) fn broadcast_chain(at: Position, count: usize, root: usize) -> Plan {
    let (own, all) = (relative_rank(at, root), 0..count);
    let mut plan = Plan::default();
    let receives = (own > 0).then(|| store(at.before(1), &all));
    let sends = (own + 1 < at.size).then(|| send(at.after(1), &all));
    plan.step(receives.into_iter().chain(sends));
    plan
}

/// The reverse of [`broadcast_tree`].
pub(crate) fn reduce_tree(at: Position, count: usize, root: usize) -> Plan {
    let (own, all) = (relative_rank(at, root), 0..count);
    let rank = |number: usize| (number + root) % at.size;
    let mut plan = Plan::default();
    let mut width = at.size.next_power_of_two() / 2;
    while width > 0 {
        if own < width && own + width < at.size {
            plan.step([combine(rank(own + width), &all)]);
        } else if own >= width && own < 2 * width {
            plan.step([send(rank(own - width), &all)]);
        } else {
            plan.idle(1);
        }
        width /= 2;
    }
    plan
}

/// The reverse of [`broadcast_chain`].
pub(crate) fn reduce_chain(at: Position, count: usize, root: usize) -> Plan {
    let (own, all) = (relative_rank(at, root), 0..count);
    let mut plan = Plan::default();
    let receives = (own + 1 < at.size).then(|| combine(at.after(1), &all));
    let sends = (own > 0).then(|| send(at.before(1), &all));
    plan.step(receives.into_iter().chain(sends));
    plan
}

/// Gather: the parts of all ranks to the root.
pub(crate) fn gather(at: Position, parts: &[Range<usize>], root: usize) -> Plan {
    let mut plan = Plan::default();
    if at.rank == root {
        let others = (1..at.size).map(|by| at.after(by));
        plan.step(others.map(|rank| store(rank, &parts[rank])));
    } else {
        let whole = 0..parts[at.rank].len();
        plan.step([Transfer { peer: root, action: Action::SendInput, range: whole }]);
    }
    plan
}

/// Scatter: the parts of all ranks from the root.
pub(crate) fn scatter(at: Position, parts: &[Range<usize>], root: usize) -> Plan {
    let mut plan = Plan::default();
    if at.rank == root {
        let others = (1..at.size).map(|by| at.after(by));
        plan.step(others.map(|rank| Transfer {
            peer: rank,
            action: Action::SendInput,
            range: parts[rank].clone(),
        }));
    } else {
        plan.step([store(root, &(0..parts[at.rank].len()))]);
    }
    plan
}

/// All-to-all: range i of the input goes to rank i; what rank i sends goes into range i of the work buffer.
pub(crate) fn alltoall(at: Position, from: &[Range<usize>], into: &[Range<usize>]) -> Plan {
    let mut plan = Plan::default();
    for step in 1..at.size {
        let (to, whose) = (at.after(step), at.before(step));
        plan.step([
            Transfer { peer: to, action: Action::SendInput, range: from[to].clone() },
            store(whose, &into[whose]),
        ]);
    }
    plan
}

/// Barrier: no rank finishes before all have started. It works on one element without meaning.
pub(crate) fn barrier(at: Position) -> Plan {
    let mut plan = Plan::default();
    let mut distance = 1;
    while distance < at.size {
        // The next step sends what this step combined, so no rank can run ahead.
        plan.step([send(at.after(distance), &(0..1)), combine(at.before(distance), &(0..1))]);
        distance *= 2;
    }
    plan
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithms::shares::shares;
    use evenkeel_testkit::TestRng;
    use std::collections::{HashMap, VecDeque};

    /// Executes the plans of all ranks, which sum numbers. With `rendezvous` a send waits until its receiver is ready, otherwise it
    /// never waits: the extremes of a transport. Data to combine may arrive before its turn, as in the executor.
    fn simulate(plans: &[Plan], inputs: &[Vec<u64>], work: &mut [Vec<u64>], rendezvous: bool) {
        let mut simulation = Simulation::new(plans, inputs, work, rendezvous);
        let all: Vec<usize> = (0..plans.len()).collect();
        simulation.run(&all);
        simulation.check();
    }

    /// As [`simulate`] with `rendezvous`, but some ranks run until they wait for the others, then some others do, and so on.
    fn simulate_unevenly(
        plans: &[Plan],
        inputs: &[Vec<u64>],
        work: &mut [Vec<u64>],
        rng: &mut TestRng,
    ) {
        let mut simulation = Simulation::new(plans, inputs, work, true);
        let mut ranks: Vec<usize> = (0..plans.len()).collect();
        loop {
            (1..ranks.len()).rev().for_each(|last| ranks.swap(last, rng.index(last + 1)));
            let some = 1 + rng.index(ranks.len());
            simulation.run(&ranks[..some]);
            if some == ranks.len() {
                break;
            }
        }
        simulation.check();
    }

    /// One transfer of a rank.
    struct Simulated<'a> {
        step: usize,
        /// The number of the message, from its sender to its receiver.
        part: usize,
        transfer: &'a Transfer,
        state: State,
    }

    enum State {
        Waiting,
        /// The message is on the wire.
        Sending,
        Arrived(Vec<u64>),
        Done,
    }

    /// Messages on the way from one rank to another, with their numbers.
    type Wire = VecDeque<(usize, Vec<u64>)>;

    struct Simulation<'a> {
        plans: &'a [Plan],
        inputs: &'a [Vec<u64>],
        work: &'a mut [Vec<u64>],
        rendezvous: bool,
        lists: Vec<Vec<Simulated<'a>>>,
        wires: HashMap<(usize, usize), Wire>,
    }

    impl<'a> Simulation<'a> {
        fn new(
            plans: &'a [Plan],
            inputs: &'a [Vec<u64>],
            work: &'a mut [Vec<u64>],
            rendezvous: bool,
        ) -> Self {
            let list = |plan: &'a Plan| {
                let mut parts: HashMap<(usize, bool), usize> = HashMap::new();
                let steps = plan.steps().iter().enumerate();
                let all = steps.flat_map(|(step, all)| all.iter().map(move |one| (step, one)));
                let one = |(step, transfer): (usize, &'a Transfer)| {
                    let next = parts.entry((transfer.peer, transfer.action.is_send())).or_default();
                    *next += 1;
                    Simulated { step, part: *next, transfer, state: State::Waiting }
                };
                all.map(one).collect()
            };
            let lists = plans.iter().map(list).collect();
            Self { plans, inputs, work, rendezvous, lists, wires: HashMap::new() }
        }

        /// Runs these ranks until they all wait for others or are done.
        fn run(&mut self, ranks: &[usize]) {
            while ranks.iter().filter(|rank| self.advance(**rank)).count() > 0 {}
        }

        fn check(&self) {
            for (rank, list) in self.lists.iter().enumerate() {
                let stuck = list.iter().find(|one| !matches!(one.state, State::Done));
                let stuck = stuck.map(|one| (one.step, one.transfer));
                assert!(stuck.is_none(), "rank {rank} is stuck at {stuck:?}");
            }
            assert!(self.wires.values().all(VecDeque::is_empty), "a message was not received");
        }

        /// The unfinished transfers in progress, and whether each is blocked by an earlier one. They are of one step only, unless the
        /// plan limits sends: then it counts how many steps are in progress.
        fn current(&self, rank: usize) -> Vec<(usize, bool)> {
            let (list, plan) = (&self.lists[rank], &self.plans[rank]);
            let open = |at: &usize| !matches!(list[*at].state, State::Done);
            let collide = |a: &Transfer, b: &Transfer| {
                a.range.start < b.range.end
                    && b.range.start < a.range.end
                    && a.action != Action::SendInput
                    && b.action != Action::SendInput
                    && (a.action, b.action) != (Action::Send, Action::Send)
            };
            let Some(first) = (0..list.len()).find(open) else { return vec![] };
            let is_current = |at: &usize| match plan.max_sends {
                None => list[*at].step == list[first].step,
                Some(_) => *at < first + plan.concurrency(),
            };
            (first..list.len())
                .take_while(is_current)
                .filter(open)
                .map(|at| {
                    let mut before = (first..at).filter(open);
                    let transfer = list[at].transfer;
                    (at, before.any(|earlier| collide(list[earlier].transfer, transfer)))
                })
                .collect()
        }

        /// Moves each transfer of a rank once, if it can move. Returns whether one did.
        fn advance(&mut self, rank: usize) -> bool {
            let current = self.current(rank);
            let mut moved = false;
            for (at, blocked) in &current {
                let Simulated { transfer, part, step, .. } = self.lists[rank][*at];
                let next = match &self.lists[rank][*at].state {
                    State::Waiting if transfer.action.is_send() => {
                        let is_sending = |one: &&Simulated<'_>| matches!(one.state, State::Sending);
                        let sends = self.lists[rank].iter().filter(is_sending).count();
                        let first = self.lists[rank][current[0].0].step;
                        if *blocked || !self.plans[rank].may_send(first, step, sends) {
                            continue;
                        }
                        let from = match transfer.action {
                            Action::Send => &self.work[rank],
                            _ => &self.inputs[rank],
                        };
                        let message = (part, from[transfer.range.clone()].to_vec());
                        self.wires.entry((rank, transfer.peer)).or_default().push_back(message);
                        if self.rendezvous { State::Sending } else { State::Done }
                    }
                    State::Sending => {
                        let wire = &self.wires[&(rank, transfer.peer)];
                        if wire.iter().any(|(number, _)| *number == part) {
                            continue;
                        }
                        State::Done
                    }
                    State::Waiting if transfer.action.is_combine() || !blocked => {
                        let wire = self.wires.entry((transfer.peer, rank)).or_default();
                        let found = wire.iter().position(|(number, _)| *number == part);
                        // Without the memory for it, the first message holds up those behind it.
                        let is_held = |place: &usize| self.rendezvous && *place > 0;
                        let Some(place) = found.filter(|place| !is_held(place)) else { continue };
                        let Some((_, message)) = wire.remove(place) else { continue };
                        assert_eq!(
                            message.len(),
                            transfer.range.len(),
                            "lengths of send and receive"
                        );
                        if transfer.action == Action::Store {
                            self.work[rank][transfer.range.clone()].copy_from_slice(&message);
                            State::Done
                        } else {
                            State::Arrived(message)
                        }
                    }
                    State::Arrived(message) if !blocked => {
                        let into = &mut self.work[rank][transfer.range.clone()];
                        for (into, value) in into.iter_mut().zip(message) {
                            *into = into.wrapping_add(*value);
                        }
                        State::Done
                    }
                    _ => continue,
                };
                self.lists[rank][*at].state = next;
                moved = true;
            }
            moved
        }
    }

    fn numbers(size: usize, count: usize) -> Vec<Vec<u64>> {
        let mut rng = TestRng::new((size * 1000 + count) as u64);
        (0..size).map(|_| (0..count).map(|_| rng.next_u64()).collect()).collect()
    }

    fn sums(inputs: &[Vec<u64>], count: usize) -> Vec<u64> {
        let add = |at: usize| inputs.iter().fold(0u64, |sum, input| sum.wrapping_add(input[at]));
        (0..count).map(add).collect()
    }

    const SIZES: std::ops::RangeInclusive<usize> = 1..=33;
    const COUNTS: [usize; 7] = [0, 1, 2, 5, 32, 67, 1000];

    fn each(mut test: impl FnMut(usize, usize, bool)) {
        for size in SIZES {
            for count in COUNTS {
                for rendezvous in [false, true] {
                    test(size, count, rendezvous);
                }
            }
        }
    }

    fn all(size: usize, plan: impl Fn(Position) -> Plan) -> Vec<Plan> {
        let plans: Vec<_> = (0..size).map(|rank| plan(Position { rank, size })).collect();
        let steps = plans.first().map_or(0, |plan| plan.steps().len());
        assert!(plans.iter().all(|plan| plan.steps().len() == steps), "number of steps");
        plans
    }

    fn is_allreduce(plan: impl Fn(Position, usize) -> Plan) {
        each(|size, count, rendezvous| {
            let inputs = numbers(size, count);
            let mut work = inputs.clone();
            simulate(&all(size, |at| plan(at, count)), &inputs, &mut work, rendezvous);
            let want = sums(&inputs, count);
            assert!(work.iter().all(|result| *result == want), "{size} ranks, {count} elements");
        });
    }

    #[test]
    fn every_allreduce_plan_sums() {
        is_allreduce(allreduce_ring);
        is_allreduce(allreduce_recursive_doubling);
        is_allreduce(allreduce_halving_doubling);
        for base in [2, 3, 4, 8] {
            is_allreduce(|at, count| allreduce_bcube(at, count, base));
        }
        for rounds in [1, 3] {
            is_allreduce(|at, count| {
                allreduce_direct(at, &uneven(at.size, count), count.div_ceil(rounds))
            });
        }
    }

    /// Ranks are spread over hosts of any sizes, in any order.
    #[test]
    fn hierarchical_allreduce_plan_sums_and_crosses_hosts_once() {
        for inner in [allreduce_ring, allreduce_recursive_doubling] {
            each(|size, count, rendezvous| {
                let mut rng = TestRng::new((size + count) as u64);
                let mut hosts = vec![vec![]; 1 + rng.index(size)];
                for rank in 0..size {
                    let host = if rank < hosts.len() { rank } else { rng.index(hosts.len()) };
                    hosts[host].push(rank);
                }
                let inputs = numbers(size, count);
                let mut work = inputs.clone();
                let plans = all(size, |at| allreduce_hierarchical(at, count, &hosts, inner));
                simulate(&plans, &inputs, &mut work, rendezvous);
                let want = sums(&inputs, count);
                assert!(work.iter().all(|result| *result == want), "{hosts:?}, {count} elements");
            });
        }
        let hosts = [vec![0, 1, 2, 3], vec![4, 5, 6, 7]];
        let crossing: usize = (0..4)
            .map(|rank| {
                allreduce_hierarchical(Position { rank, size: 8 }, 4800, &hosts, allreduce_ring)
            })
            .flat_map(|plan| plan.steps)
            .flatten()
            .filter(|transfer| transfer.action.is_send() && transfer.peer >= 4)
            .map(|transfer| transfer.range.len())
            .sum();
        assert_eq!(crossing, 4800, "half of the buffer twice");
    }

    #[test]
    fn allreduce_plans_send_the_minimum_of_bytes() {
        let bytes = |plan: &Plan| -> usize {
            let sends = plan.steps().iter().flatten().filter(|one| one.action.is_send());
            sends.map(|one| one.range.len()).sum()
        };
        for size in [2, 4, 8, 16] {
            let at = Position { rank: 0, size };
            let minimum = 2 * 4800 * (size - 1) / size;
            assert_eq!(bytes(&allreduce_ring(at, 4800)), minimum);
            assert_eq!(bytes(&allreduce_halving_doubling(at, 4800)), minimum);
            assert_eq!(bytes(&allreduce_bcube(at, 4800, 4)), minimum);
        }
    }

    #[test]
    fn direct_allreduce_loads_a_link_by_its_share() {
        let shares = consecutive(&[100, 0, 400, 500]);
        for (rank, share) in shares.iter().enumerate() {
            let plan = allreduce_direct(Position { rank, size: 4 }, &shares, 60);
            for sends in [true, false] {
                let all = plan.steps().iter().flatten();
                let all = all.filter(|one| one.action.is_send() == sends);
                let elements: usize = all.map(|one| one.range.len()).sum();
                assert_eq!(elements, 1000 + 2 * share.len(), "{rank}");
            }
            // Nine rounds of the longest share, each with a tenth of this one at most.
            assert_eq!(plan.steps().len(), 2 * 9);
            let longest = plan.steps().iter().flatten().map(|one| one.range.len()).max();
            assert_eq!(longest, Some(56));
        }
    }

    /// With any number of ranks and sends, and links of any rates, ranks run ahead of each other as far as they can.
    #[test]
    fn limited_sends_of_a_direct_allreduce_never_wait_for_each_other() {
        for seed in 0..300 {
            let mut rng = TestRng::new(seed);
            let (size, count) = (1 + rng.index(12), rng.index(300));
            let spread = [1, 3, 1000][rng.index(3)];
            let rates: Vec<u64> = (0..size).map(|_| 1 + rng.index(spread) as u64).collect();
            let piece = 1 + rng.index(40);
            let max_sends = Some(1 + rng.index(MAX_SENDS));
            println!("links {rates:?}, {count} elements in pieces of {piece}, {max_sends:?} sends");
            let plans = all(size, |at| Plan {
                max_sends,
                ..allreduce_direct(at, &shares(&rates, count), piece)
            });
            let inputs = numbers(size, count);
            let mut work = inputs.clone();
            simulate_unevenly(&plans, &inputs, &mut work, &mut rng);
            let want = sums(&inputs, count);
            assert!(work.iter().all(|result| *result == want), "{rates:?}, {count} elements");
        }
    }

    type PartsPlan = fn(Position, &[Range<usize>]) -> Plan;

    fn uneven(size: usize, count: usize) -> Vec<Range<usize>> {
        let mut rng = TestRng::new(size as u64);
        let mut left = count;
        let lengths: Vec<usize> = (0..size)
            .map(|rank| {
                let length = if rank + 1 == size { left } else { rng.index(left + 1) };
                left -= length;
                length
            })
            .collect();
        consecutive(&lengths)
    }

    #[test]
    fn reduce_scatter_plans_give_each_rank_its_part() {
        let plans: [PartsPlan; 2] = [reduce_scatter_ring, reduce_scatter_direct];
        each(|size, count, rendezvous| {
            for plan in plans {
                let (inputs, parts) = (numbers(size, count), uneven(size, count));
                let mut work = inputs.clone();
                simulate(&all(size, |at| plan(at, &parts)), &inputs, &mut work, rendezvous);
                let want = sums(&inputs, count);
                for (rank, part) in parts.iter().enumerate() {
                    assert_eq!(work[rank][part.clone()], want[part.clone()], "{rank} of {size}");
                }
            }
        });
    }

    #[test]
    fn allgather_plans_give_all_parts_to_all() {
        let plans: [PartsPlan; 3] =
            [allgather_ring, allgather_direct, allgather_recursive_doubling];
        each(|size, count, rendezvous| {
            for (which, plan) in plans.iter().enumerate() {
                if which == 2 && !size.is_power_of_two() {
                    continue;
                }
                let (inputs, parts) = (numbers(size, count), uneven(size, count));
                let mut work = vec![vec![0; count]; size];
                for (rank, part) in parts.iter().enumerate() {
                    work[rank][part.clone()].copy_from_slice(&inputs[rank][part.clone()]);
                }
                let want: Vec<u64> = parts
                    .iter()
                    .enumerate()
                    .flat_map(|(r, p)| inputs[r][p.clone()].to_vec())
                    .collect();
                simulate(&all(size, |at| plan(at, &parts)), &inputs, &mut work, rendezvous);
                assert!(work.iter().all(|result| *result == want), "{which}: {size}, {count}");
            }
        });
    }

    #[test]
    fn broadcast_and_reduce_plans_work_for_any_root() {
        each(|size, count, rendezvous| {
            for root in [0, size / 2, size - 1] {
                let inputs = numbers(size, count);
                for plan in [broadcast_tree, broadcast_chain] {
                    let mut work = inputs.clone();
                    simulate(
                        &all(size, |at| plan(at, count, root)),
                        &inputs,
                        &mut work,
                        rendezvous,
                    );
                    assert!(work.iter().all(|result| *result == inputs[root]));
                }
                for plan in [reduce_tree, reduce_chain] {
                    let mut work = inputs.clone();
                    simulate(
                        &all(size, |at| plan(at, count, root)),
                        &inputs,
                        &mut work,
                        rendezvous,
                    );
                    assert_eq!(work[root], sums(&inputs, count), "{root} of {size}");
                }
            }
        });
    }

    #[test]
    fn gather_and_scatter_plans_work_for_any_root() {
        each(|size, count, rendezvous| {
            let root = size / 3;
            let (whole, parts) = (numbers(1, count).remove(0), uneven(size, count));
            let pieces: Vec<Vec<u64>> =
                parts.iter().map(|part| whole[part.clone()].to_vec()).collect();
            let mut work = vec![vec![0; count]; size];
            work[root][parts[root].clone()].copy_from_slice(&pieces[root]);
            simulate(&all(size, |at| gather(at, &parts, root)), &pieces, &mut work, rendezvous);
            assert_eq!(work[root], whole);
            let mut work: Vec<Vec<u64>> = parts.iter().map(|part| vec![0; part.len()]).collect();
            work[root].clone_from(&pieces[root]);
            let inputs = vec![whole; size];
            simulate(&all(size, |at| scatter(at, &parts, root)), &inputs, &mut work, rendezvous);
            assert_eq!(work, pieces);
        });
    }

    #[test]
    fn alltoall_plan_delivers_every_part() {
        for size in SIZES {
            // Rank a sends (a + 2b) mod 4 numbers to rank b.
            let length = |from: usize, to: usize| (from + 2 * to) % 4;
            let value = |from: usize, to: usize, i: usize| (from * 10_000 + to * 10 + i) as u64;
            let sent =
                |rank| consecutive(&(0..size).map(|to| length(rank, to)).collect::<Vec<_>>());
            let received =
                |rank| consecutive(&(0..size).map(|from| length(from, rank)).collect::<Vec<_>>());
            let inputs: Vec<Vec<u64>> = (0..size)
                .map(|from| {
                    let to = |to| (0..length(from, to)).map(move |i| value(from, to, i));
                    (0..size).flat_map(to).collect()
                })
                .collect();
            let mut work: Vec<Vec<u64>> = (0..size)
                .map(|rank| {
                    let mut output = vec![0; received(rank).last().map_or(0, |range| range.end)];
                    let own = inputs[rank][sent(rank)[rank].clone()].to_vec();
                    output[received(rank)[rank].clone()].copy_from_slice(&own);
                    output
                })
                .collect();
            let plans = all(size, |at| alltoall(at, &sent(at.rank), &received(at.rank)));
            simulate(&plans, &inputs, &mut work, size % 2 == 0);
            for (to, result) in work.iter().enumerate() {
                let from = |from| (0..length(from, to)).map(move |i| value(from, to, i));
                assert_eq!(*result, (0..size).flat_map(from).collect::<Vec<_>>(), "{to} of {size}");
            }
        }
    }

    /// The last message that a rank gets depends on the start of every other rank.
    #[test]
    fn barrier_plan_depends_on_every_rank() {
        for size in SIZES {
            let plans = all(size, barrier);
            // The ranks that each rank depends on: itself, then those that its senders depend on.
            let mut depends_on: Vec<u64> = (0..size).map(|rank| 1 << rank).collect();
            for step in 0..plans[0].steps().len() {
                let before = depends_on.clone();
                for (rank, plan) in plans.iter().enumerate() {
                    for transfer in plan.steps()[step].iter().filter(|one| !one.action.is_send()) {
                        depends_on[rank] |= before[transfer.peer];
                    }
                }
            }
            assert!(depends_on.iter().all(|ranks| *ranks == (1 << size) - 1), "{size} ranks");
            simulate(&plans, &vec![vec![]; size], &mut vec![vec![0]; size], true);
        }
    }

    #[test]
    fn bcube_factors_multiply_to_the_size() {
        for size in SIZES {
            for base in [2, 4, 8] {
                assert_eq!(factors(size, base).iter().product::<usize>(), size);
            }
        }
        assert_eq!((factors(32, 4), factors(21, 4)), (vec![4, 4, 2], vec![3, 7]));
    }

    #[test]
    fn parts_are_even_and_complete() {
        assert_eq!(parts(&(10..20), 3), [10..14, 14..17, 17..20]);
        assert_eq!(parts(&(0..1), 3), [0..1, 1..1, 1..1]);
    }
}
