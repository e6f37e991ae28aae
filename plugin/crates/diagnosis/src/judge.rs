//! The judgement: a pure function of what all processes have seen in the same time.

use std::collections::BTreeMap;

use crate::verdict::{Class, Direction, Outcome, Place, Suspect, Verdict};
use crate::view::Process;

/// Waits below this share of the time are nobody's fault.
const MIN_SHARE: f64 = 0.10;
/// A process is late that has not called for this much more of the time than the others, and than it used to.
const MIN_LATENESS: f64 = 0.08;
/// A process that has not called for so long is stuck, whatever it used to do, in seconds.
const STUCK: f64 = 5.0;
/// A process whose threads get the CPU so much later than the others', as a share of the time.
const MIN_STARVED: f64 = 0.20;
/// A connection is slow if its bytes are under way so many times longer than the others'.
const SLOW: f64 = 1.6;
/// The others of a card with slow connections count as slow from so many times on: a delay is less to those that carry more at a time.
const SLOWER: f64 = 1.25;
/// A round trip is long if it is so many times the others', and this much longer, in seconds.
const LONG_TRIP: (f64, f64) = (3.0, 0.001);
/// A long round trip is nobody's fault if its bytes are not under way so many times longer: a queue of one's own does that.
const LONG_TRIP_PACE: f64 = 1.2;
/// A connection loses packets if it is this share of them, and so many times what is usual in the job.
const LOSSY: (f64, f64) = (0.003, 4.0);
/// Losses are nobody's fault if bytes are not under way so many times longer: a full queue drops some, and TCP fills it.
const LOSSY_PACE: f64 = 1.05;
/// Fewer retransmitted segments than that in the window are chance.
const MIN_RETRANSMITS: f64 = 8.0;
/// Bytes of a segment, about.
const SEGMENT: f64 = 1448.0;
/// The share of a card's connections that must be slow for the card to be.
const MOST: f64 = 0.7;
/// Number of slow connections of a card with which the others count that are only slower.
const MIN_SLOW: usize = 2;
/// Maximum number of suspects that are named.
const MAX_SUSPECTS: usize = 2;
/// The share of processes that must be known to name anybody.
const MIN_KNOWN: f64 = 0.5;

/// What is known of a job in some time.
#[derive(Clone, Debug, Default)]
pub struct Job {
    /// The time, in seconds.
    pub window: f64,
    /// The processes.
    pub members: Vec<Member>,
    /// The connections between them.
    pub links: Vec<Link>,
}

/// What is known of a process. Shares are of the time for which it has sent views.
#[derive(Clone, Debug, Default)]
pub struct Member {
    /// Who it is.
    pub process: Process,
    /// The share in which no connection had a request.
    pub uncalled: f64,
    /// How much more that usually is in this job than the middle of all, if that is known.
    pub usual_excess: Option<f64>,
    /// How long it has not called now, in seconds.
    pub uncalled_for: f64,
    /// How much later than it asked for its own thread ran, as a share.
    pub starved: f64,
    /// How long nothing has come from it, in seconds, if that is longer than it should be.
    pub silent_for: Option<f64>,
    /// It has moved bytes since: only what it says gets lost.
    pub is_unheard: bool,
}

impl Job {
    /// Which members are the job's ranks: those that have a number, if any has. Others serve them, as reduction servers do, which
    /// are ready for whatever comes and never call.
    pub(crate) fn ranks(&self) -> Vec<bool> {
        let has_number = |member: &Member| member.process.rank.is_some();
        let some_have = self.members.iter().any(has_number);
        self.members.iter().map(|member| has_number(member) || !some_have).collect()
    }
}

/// A connection, with what both ends have seen. Shares are of the time.
#[derive(Clone, Debug, Default)]
pub struct Link {
    /// Index of the sending member; `None`: it has not sent a view of this connection.
    pub from: Option<usize>,
    /// Index of the receiving member.
    pub to: Option<usize>,
    /// The sender's device.
    pub from_device: String,
    /// The receiver's device.
    pub to_device: String,
    /// The sender had requests that were not done.
    pub pending: f64,
    /// The receiver had buffers posted.
    pub wanted: f64,
    /// The receiver had bytes and no buffer for them. Where it does not say: as `refused`.
    pub unposted: f64,
    /// The sender had messages and knew of no buffer for them.
    pub refused: f64,
    /// Bytes were not acknowledged, and the receiver's window was not what they waited for; 0: not measured.
    pub unacknowledged: f64,
    /// How long the present requests of either end are outstanding, in seconds.
    pub outstanding_for: f64,
    /// Bytes moved, a second.
    pub rate: f64,
    /// The longest smoothed round trip, in seconds; 0: not measured.
    pub round_trip: f64,
    /// Segments retransmitted, a second.
    pub retransmits: f64,
    /// Whether its last segments are not answered at all.
    pub is_unanswered: bool,
    /// Whether an end has moved bytes lately.
    pub moves: bool,
}

impl Link {
    /// The share in which bytes were under way.
    pub(crate) fn wire(&self) -> f64 {
        let wire = (self.pending - self.unposted).max(0.0);
        // Bytes that nobody has asked for yet are not late.
        if self.to.is_some() { wire.min(self.wanted) } else { wire }
    }

    /// The share in which the receiver waited for the sender's caller.
    pub(crate) fn waits_for_sender(&self) -> f64 {
        if self.from.is_some() { (self.wanted - self.wire()).max(0.0) } else { self.wanted }
    }

    /// The share in which the sender waited for the receiver's caller.
    pub(crate) fn waits_for_receiver(&self) -> f64 {
        self.unposted.min(self.pending.max(self.unposted))
    }

    /// The share of its segments that are sent again.
    fn loss(&self) -> f64 {
        let segments = self.rate / SEGMENT;
        if segments > 0.0 { self.retransmits / (segments + self.retransmits) } else { 0.0 }
    }

    /// The share in which bytes were under way, also such that nobody had asked for yet: they take as long.
    fn under_way(&self) -> f64 {
        self.wire().max(self.unacknowledged)
    }
}

/// A suspect, and the members that it holds up first.
struct Found {
    suspect: Suspect,
    holds: Vec<usize>,
    /// Whether `holds` begins with the member that it is about, which is not said to wait for itself.
    is_member: bool,
}

/// Finds what the waits of a job come from. The time grows with the members and their connections, and not faster.
pub fn judge(job: &Job) -> Verdict {
    let ranks = job.ranks();
    let count = ranks.iter().filter(|is_rank| **is_rank).count();
    let mut verdict = Verdict { ranks: count as u32, window_s: job.window, ..Verdict::default() };
    let waits = Waits::new(job, ranks);
    let lost = waits.lost();
    let late = late(job, &waits);
    let is_late = {
        let mut is_late = vec![false; job.members.len()];
        late.iter().for_each(|found| is_late[found.holds[0]] = true);
        is_late
    };
    let mut found = late;
    found.extend(slow(job, &is_late));
    found.sort_by(|a, b| b.suspect.share.total_cmp(&a.suspect.share));
    // What the worst one causes makes others look slow too: a second one has to be as clear.
    let worst = found.first().map_or(0.0, |found| found.suspect.share);
    found.retain(|Found { suspect, .. }| suspect.share >= worst / 3.0 && suspect.confidence >= 0.5);
    found.truncate(MAX_SUSPECTS);
    let suspects: Vec<Suspect> = found
        .into_iter()
        .map(|found| {
            let is_itself = found.is_member && waits.ranks[found.holds[0]];
            let waiting = waits.held_by(&found.holds) - u32::from(is_itself);
            Suspect { waiting, ..found.suspect }
        })
        .collect();
    let of_ranks = job.members.iter().zip(&waits.ranks).filter(|(_, is_rank)| **is_rank);
    let known = of_ranks.filter(|(member, _)| member.silent_for.is_none()).count();
    let is_known = known as f64 >= MIN_KNOWN * count as f64 && count >= 2;
    if lost < MIN_SHARE {
        verdict.text = format!("ranks wait for {:.0} % of the time", 100.0 * lost);
    } else if !is_known {
        verdict.outcome = Outcome::Unknown;
        verdict.text = format!(
            "ranks wait for {:.0} % of the time; {known} of {count} ranks say what for, which is too few to name anybody",
            100.0 * lost
        );
    } else if let Some(first) = suspects.first() {
        verdict.outcome = Outcome::Suspect;
        verdict.text = sentence(first, count);
        verdict.suspects = suspects;
    } else {
        verdict.outcome = Outcome::Nobody;
        verdict.text = format!(
            "ranks wait for {:.0} % of the time, and nobody more than the others: all are equally slow",
            100.0 * lost
        );
    }
    verdict
}

/// As in `7 of 8 ranks wait for rank 5 on n3, which has not called for 41 s`.
pub(crate) fn sentence(suspect: &Suspect, ranks: usize) -> String {
    let Suspect { class, waiting, evidence, share, .. } = suspect;
    match class {
        Class::Late => {
            format!("{waiting} of {ranks} ranks wait for {}, which {evidence}", suspect.words())
        }
        Class::Link | Class::Path => format!(
            "{waiting} of {ranks} ranks wait for {:.0} % of the time for {}: {evidence}",
            100.0 * share,
            suspect.words()
        ),
    }
}

/// Who waits for whom.
struct Waits {
    /// By the member that is waited for: who waits, and for which share of the time.
    waiters: Vec<Vec<(usize, f64)>>,
    /// The longest wait of each member, for a peer or the wire.
    longest: Vec<f64>,
    /// Whether the member is a rank, and whether anything is known of it.
    ranks: Vec<bool>,
    known: Vec<bool>,
}

impl Waits {
    fn new(job: &Job, ranks: Vec<bool>) -> Self {
        let mut waiters = vec![Vec::new(); job.members.len()];
        let mut longest = vec![0.0_f64; job.members.len()];
        for link in &job.links {
            let (Some(from), Some(to)) = (link.from, link.to) else { continue };
            let mut edge = |waits: usize, waited_for: usize, share: f64| {
                waiters[waited_for].push((waits, share));
                longest[waits] = longest[waits].max(share);
            };
            edge(to, from, link.waits_for_sender());
            edge(from, to, link.waits_for_receiver());
            longest[to] = longest[to].max(link.wire());
            longest[from] = longest[from].max(link.wire());
        }
        let known = job.members.iter().map(|member| member.silent_for.is_none()).collect();
        Self { waiters, longest, ranks, known }
    }

    /// The share of its time that a rank loses, of those that wait longest: half of the ranks lose more.
    fn lost(&self) -> f64 {
        let is_known = |at: &usize| self.ranks[*at] && self.known[*at];
        median((0..self.longest.len()).filter(is_known).map(|at| self.longest[at]))
    }

    /// The longest wait of a rank.
    fn longest_of_ranks(&self) -> f64 {
        let ranks = self.longest.iter().zip(&self.ranks).filter(|(_, is_rank)| **is_rank);
        ranks.map(|(longest, _)| *longest).fold(0.0, f64::max)
    }

    /// The longest wait of anybody for this member.
    fn wait_for(&self, member: usize) -> f64 {
        self.waiters[member].iter().map(|(_, share)| *share).fold(0.0, f64::max)
    }

    /// Number of ranks among these members, and of those that wait for them, directly or through others.
    fn held_by(&self, these: &[usize]) -> u32 {
        let mut reached: Vec<bool> = vec![false; self.waiters.len()];
        let mut next: Vec<usize> = these.to_vec();
        these.iter().for_each(|at| reached[*at] = true);
        while let Some(at) = next.pop() {
            for (waits, share) in &self.waiters[at] {
                if *share >= MIN_SHARE / 2.0 && !reached[*waits] {
                    reached[*waits] = true;
                    next.push(*waits);
                }
            }
        }
        reached.iter().zip(&self.ranks).filter(|(reached, is_rank)| **reached && **is_rank).count()
            as u32
    }
}

/// Numbers in order, of which one at a time can be left out.
struct Sorted(Vec<f64>);

impl Sorted {
    fn new(numbers: impl Iterator<Item = f64>) -> Self {
        let mut numbers: Vec<f64> = numbers.collect();
        numbers.sort_by(f64::total_cmp);
        Self(numbers)
    }

    /// The middle one of the others; 0 if there is none.
    fn median_without(&self, number: f64) -> f64 {
        let left_out = self.0.partition_point(|other| other.total_cmp(&number).is_lt());
        let count = self.0.len().saturating_sub(1);
        let other = |at: usize| self.0[at + usize::from(at >= left_out)];
        match count {
            0 => 0.0,
            count if count % 2 == 1 => other(count / 2),
            _ => (other(count / 2 - 1) + other(count / 2)) / 2.0,
        }
    }

    /// The largest one of the others; 0 if there is none.
    fn max_without(&self, number: f64) -> f64 {
        match self.0[..] {
            [.., second, last] => {
                if last.total_cmp(&number).is_eq() {
                    second
                } else {
                    last
                }
            }
            _ => 0.0,
        }
    }
}

/// Processes that others wait for and that wait for nobody themselves. Each holds up itself first.
fn late(job: &Job, waits: &Waits) -> Vec<Found> {
    let members = &job.members;
    let uncalled =
        |member: &Member| if member.silent_for.is_some() { 1.0 } else { member.uncalled };
    let ranks = || members.iter().zip(&waits.ranks).filter(|(_, is_rank)| **is_rank);
    let all_uncalled = Sorted::new(ranks().map(|(member, _)| member.uncalled));
    let all_starved = Sorted::new(ranks().map(|(member, _)| member.starved));
    let longest_wait = waits.longest_of_ranks();
    let mut links_of: Vec<Vec<&Link>> = vec![Vec::new(); members.len()];
    for link in &job.links {
        link.from.into_iter().chain(link.to).for_each(|at| links_of[at].push(link));
    }
    let mut found = Vec::new();
    for (at, member) in members.iter().enumerate().filter(|(at, _)| waits.ranks[*at]) {
        let usual = all_uncalled.median_without(member.uncalled);
        let starved = member.starved - all_starved.median_without(member.starved);
        // A stage of a pipeline may always compute longer than others: late is who has become late, or is stuck.
        let excess = uncalled(member) - usual;
        let before = member.usual_excess.unwrap_or(excess).max(0.0);
        let mut lateness = excess - before;
        let is_stuck = member.uncalled_for >= STUCK && longest_wait > 0.5;
        if is_stuck {
            lateness = lateness.max(excess);
        }
        let links = || links_of[at].iter();
        let mut evidence = format!(
            "did not call for {:.0} % of the time, others for {:.0} %",
            100.0 * uncalled(member),
            100.0 * usual
        );
        if let Some(silent) = member.silent_for {
            if links().any(|link| link.is_unanswered) {
                continue; // its host does not answer either: the network
            }
            if member.is_unheard || links().any(|link| link.moves) {
                continue;
            }
            let longest = links().map(|link| link.outstanding_for).fold(0.0, f64::max);
            if longest < 1.0 {
                continue; // nobody waits for it: it may have ended
            }
            lateness = (longest / job.window).min(1.0);
            evidence = format!(
                "does not answer for {silent:.0} s, while its host does: stopped, or out of CPU"
            );
        } else if starved >= MIN_STARVED {
            lateness = lateness.max(starved.min(longest_wait));
            evidence = format!(
                "gets the CPU late: its threads wait {:.0} % of the time, those of others {:.0} %",
                100.0 * member.starved,
                100.0 * (member.starved - starved)
            );
        } else if member.uncalled_for >= 1.0 {
            evidence = format!("has not called for {:.0} s", member.uncalled_for);
        }
        let share = if member.silent_for.is_some() || starved >= MIN_STARVED {
            lateness
        } else {
            lateness.min(waits.wait_for(at))
        };
        if share < MIN_LATENESS {
            continue;
        }
        let next = (all_uncalled.max_without(member.uncalled) - usual).max(0.0);
        let margin =
            ((share - next.min(share)) / share).max(if starved >= MIN_STARVED { 0.6 } else { 0.0 });
        let is_stopped = is_stuck || member.silent_for.is_some() || starved >= MIN_STARVED;
        let suspect = Suspect {
            class: Class::Late,
            place: place(&member.process, ""),
            direction: None,
            peer: None,
            may_pass: !is_stopped,
            share,
            for_s: member.uncalled_for.max(member.silent_for.unwrap_or(0.0)),
            waiting: 0,
            confidence: 0.5 + 0.5 * margin * (share / (share + 0.05)),
            evidence,
        };
        let is_used = |link: &&&Link| link.pending.max(link.wanted) >= MIN_SHARE / 2.0;
        let peers = links().filter(is_used).flat_map(|link| link.from.into_iter().chain(link.to));
        let mut holds = vec![at];
        holds.extend(peers.filter(|peer| *peer != at));
        found.push(Found { suspect, holds, is_member: true });
    }
    found
}

/// The end of a connection: a card of a host, in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct End<'a> {
    host: &'a str,
    device: &'a str,
    sends: bool,
}

/// The index of a connection, and those of the members at its ends.
type Between = (usize, usize, usize);

/// The connections of one end.
#[derive(Default)]
struct Group {
    links: Vec<usize>,
    slow: Vec<usize>,
    /// Those, and others that are slower than usual.
    slower: Vec<usize>,
}

/// Of each connection, how long a byte is under way, were it alone on its cards; `None`: it carries nothing. A card that many send
/// to at once is not slow because of that.
fn paces(job: &Job) -> Vec<Option<f64>> {
    let mut cards: BTreeMap<End<'_>, Vec<usize>> = BTreeMap::new();
    for (number, link) in job.links.iter().enumerate() {
        if let (Some(from), Some(to)) = (link.from, link.to) {
            let ends = ends_of(job, link, from, to);
            ends.into_iter().for_each(|end| cards.entry(end).or_default().push(number));
        }
    }
    // The number of connections that share the busier one of its cards with it, as far as they are busy for half as long.
    let mut sharing = vec![1.0_f64; job.links.len()];
    for mut numbers in cards.into_values() {
        let under_way = |number: usize| job.links[number].under_way();
        numbers.sort_by(|a, b| under_way(*a).total_cmp(&under_way(*b)));
        let (mut less, mut sum_of_less) = (0, 0.0);
        for number in &numbers {
            let half = under_way(*number) / 2.0;
            while under_way(numbers[less]) < half {
                sum_of_less += under_way(numbers[less]);
                less += 1;
            }
            if half > 0.0 {
                let busy = (numbers.len() - less) as f64 + sum_of_less / half;
                sharing[*number] = sharing[*number].max(busy);
            }
        }
    }
    let pace = |(link, sharing): (&Link, f64)| {
        (link.rate > 0.0).then(|| link.under_way() / (link.rate * sharing))
    };
    job.links.iter().zip(sharing).map(pace).collect()
}

/// Cards and paths on which bytes are under way longer than on others. Processes that are late explain the waits for them.
fn slow(job: &Job, is_late: &[bool]) -> Vec<Found> {
    let links: Vec<(usize, &Link, usize, usize)> = job
        .links
        .iter()
        .enumerate()
        .filter_map(|(number, link)| Some((number, link, link.from?, link.to?)))
        .collect();
    let paces = paces(job);
    let pace = median(links.iter().filter_map(|(number, ..)| paces[*number]));
    let trip = median(links.iter().map(|(_, link, ..)| link.round_trip).filter(|trip| *trip > 0.0));
    let carrying = links.iter().filter(|(_, link, ..)| link.rate > 0.0);
    let loss = median(carrying.map(|(_, link, ..)| link.loss()));
    let is_slower = |number: usize, times: f64| paces[number].is_none_or(|its| its > times * pace);
    let is_lossy = |number: usize| {
        let link = &job.links[number];
        link.retransmits * job.window >= MIN_RETRANSMITS
            && link.loss() >= LOSSY.0.max(LOSSY.1 * loss)
            && is_slower(number, LOSSY_PACE)
    };
    let is_long = |number: usize| {
        let link = &job.links[number];
        let long_trip =
            link.round_trip > LONG_TRIP.0 * trip && link.round_trip > trip + LONG_TRIP.1;
        is_slower(number, SLOW)
            || long_trip && is_slower(number, LONG_TRIP_PACE)
            || link.is_unanswered
    };
    let is_slow = |number: usize, from: usize, to: usize| {
        let link = &job.links[number];
        // A process that gets no CPU does not read either.
        if is_late[from] || is_late[to] {
            return false;
        }
        link.wire() >= MIN_SHARE && (is_long(number) || is_lossy(number)) || link.is_unanswered
    };
    let mut ends: BTreeMap<End<'_>, Group> = BTreeMap::new();
    let mut all_slow = Vec::new();
    for (number, link, from, to) in &links {
        let slow = is_slow(*number, *from, *to);
        if slow {
            all_slow.push((*number, *link, *from, *to));
        }
        // One that carries nothing says nothing about its card.
        if !slow && link.rate <= 0.0 && link.pending <= 0.0 {
            continue;
        }
        for end in ends_of(job, link, *from, *to) {
            let group = ends.entry(end).or_default();
            group.links.push(*number);
            if slow {
                group.slow.push(*number);
            }
            let is_late = is_late[*from] || is_late[*to];
            if slow || !is_late && link.wire() >= MIN_SHARE && is_slower(*number, SLOWER) {
                group.slower.push(*number);
            }
        }
    }
    let is_card = |group: &Group| {
        let most = MOST * group.links.len() as f64;
        group.slow.len() as f64 >= most
            || group.slow.len() >= MIN_SLOW && group.slower.len() as f64 >= most
    };
    // Peers: with only one, its card could as well be the slow one.
    let peers = |end: &End<'_>| {
        let other = |number: &usize| {
            let link = &job.links[*number];
            let other = if end.sends { link.to } else { link.from };
            other.map(|other| job.members[other].process.host.as_str())
        };
        let mut hosts: Vec<&str> = ends[end].links.iter().filter_map(other).collect();
        hosts.sort_unstable();
        hosts.dedup();
        hosts.len()
    };
    let mut cards: Vec<(End<'_>, usize)> = ends
        .iter()
        .filter(|(_, group)| !group.slow.is_empty() && is_card(group))
        .map(|(end, _)| (*end, peers(end)))
        .collect();
    // The card that explains most comes first.
    cards.sort_by_key(|(end, peers)| std::cmp::Reverse((ends[end].slow.len(), *peers)));
    let mut explained = vec![false; job.links.len()];
    let mut found: Vec<Found> = Vec::new();
    let ends_held = |numbers: &[usize]| {
        let links = numbers.iter().map(|number| &job.links[*number]);
        links.flat_map(|link| link.from.into_iter().chain(link.to)).collect::<Vec<usize>>()
    };
    let describe = |numbers: &[usize]| {
        let chosen: Vec<&Link> = numbers.iter().map(|number| &job.links[*number]).collect();
        let worst = chosen.iter().map(|link| link.wire()).fold(0.0, f64::max);
        let its = median(numbers.iter().filter_map(|number| paces[*number]));
        let ratio = if pace > 0.0 { its / pace } else { 0.0 };
        let lossy = numbers.iter().filter(|number| is_lossy(**number)).count() * 2 > numbers.len();
        let retransmits: f64 = chosen.iter().map(|link| link.retransmits).sum();
        let longest = chosen.iter().map(|link| link.round_trip).fold(0.0, f64::max);
        let unanswered = chosen.iter().filter(|link| link.is_unanswered).count();
        let mut evidence = match ratio {
            ratio if ratio > 1.0 => format!("a byte takes {ratio:.1} times as long as elsewhere"),
            _ => format!("bytes are under way {:.0} % of the time", 100.0 * worst),
        };
        if unanswered > 0 {
            evidence =
                format!("nothing is answered on {unanswered} of {} connections", chosen.len());
        }
        if lossy {
            let lost = median(chosen.iter().map(|link| link.loss()));
            evidence += &format!(
                ", {:.1} % of the packets are lost, elsewhere {:.1} %",
                100.0 * lost,
                100.0 * loss
            );
        } else if retransmits >= 1.0 {
            evidence += &format!(", {retransmits:.0} retransmits/s");
        }
        if longest > 0.0 {
            evidence += &format!(", round trip {:.1} ms ({:.1} ms)", longest * 1e3, trip * 1e3);
        }
        let share = if unanswered > 0 { worst.max(0.5) } else { worst };
        let margin = match () {
            () if unanswered > 0 => 1.0,
            () if lossy => (1.0 - 1.0 / ratio.max(1.2)).max(0.5),
            () => 1.0 - 1.0 / ratio.max(1.2),
        };
        (share, margin, evidence)
    };
    for (end, peers) in &cards {
        let slow: Vec<usize> =
            ends[end].slower.iter().copied().filter(|number| !explained[*number]).collect();
        if slow.is_empty() || slow.len() * 2 < ends[end].slower.len() || *peers < 2 {
            continue;
        }
        slow.iter().for_each(|number| explained[*number] = true);
        let (share, margin, evidence) = describe(&slow);
        let Some(member) = member_at(job, &slow, end) else { continue };
        let suspect = Suspect {
            class: Class::Link,
            place: place(&job.members[member].process, end.device),
            direction: Some(if end.sends { Direction::Send } else { Direction::Receive }),
            peer: None,
            may_pass: slow.iter().all(|number| !is_long(*number)),
            share,
            for_s: 0.0,
            waiting: 0,
            confidence: 0.5 + 0.5 * margin,
            evidence,
        };
        // That a host waits for its own card, the place says.
        let mut holds = vec![member];
        holds.extend(ends_held(&slow).into_iter().filter(|at| *at != member));
        // Both directions of one card are one fault.
        let place = (&suspect.place.host, &suspect.place.device);
        let other = found
            .iter_mut()
            .find(|other| (&other.suspect.place.host, &other.suspect.place.device) == place);
        match other {
            Some(other) => {
                other.suspect.direction = Some(Direction::Both);
                other.suspect.share = other.suspect.share.max(suspect.share);
                other.holds.extend(holds);
            }
            None => found.push(Found { suspect, holds, is_member: true }),
        }
    }
    // What no card explains is between two hosts.
    let mut paths: BTreeMap<(&str, &str), Vec<Between>> = BTreeMap::new();
    for (number, _, from, to) in &all_slow {
        if !explained[*number] {
            let host = |at: usize| job.members[at].process.host.as_str();
            paths.entry((host(*from), host(*to))).or_default().push((*number, *from, *to));
        }
    }
    for slow in paths.values() {
        let numbers: Vec<usize> = slow.iter().map(|(number, ..)| *number).collect();
        let (share, margin, evidence) = describe(&numbers);
        let Some((number, from, to)) = slow.first().copied() else { continue };
        let link = &job.links[number];
        let is_among = |end: &End<'_>| ends[end].links.len() > ends[end].slow.len();
        let is_among_others = ends_of(job, link, from, to).iter().all(is_among);
        let may_pass = is_among_others || numbers.iter().all(|number| !is_long(*number));
        let suspect = Suspect {
            class: Class::Path,
            place: place(&job.members[from].process, &link.from_device),
            direction: None,
            peer: Some(place(&job.members[to].process, &link.to_device)),
            may_pass,
            share,
            for_s: 0.0,
            waiting: 0,
            confidence: 0.5 + 0.5 * margin,
            evidence,
        };
        found.push(Found { suspect, holds: ends_held(&numbers), is_member: false });
    }
    found
}

fn ends_of<'a>(job: &'a Job, link: &'a Link, from: usize, to: usize) -> [End<'a>; 2] {
    let host = |at: usize| job.members[at].process.host.as_str();
    [
        End { host: host(from), device: &link.from_device, sends: true },
        End { host: host(to), device: &link.to_device, sends: false },
    ]
}

/// The process at this end of the first of these connections.
fn member_at(job: &Job, links: &[usize], end: &End<'_>) -> Option<usize> {
    let link = &job.links[*links.first()?];
    if end.sends { link.from } else { link.to }
}

fn place(process: &Process, device: &str) -> Place {
    Place {
        rank: process.rank,
        host: process.host.clone(),
        pod: process.pod.clone(),
        device: device.to_owned(),
    }
}

/// The middle value; 0 if there is none.
pub(crate) fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => 0.0,
        length if length % 2 == 1 => values[middle],
        _ => (values[middle - 1] + values[middle]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An all-to-all of four hosts, whose connections lose what `retransmits` says, a second. Where they lose more than one,
    /// bytes take 1.1 times as long.
    fn job(retransmits: impl Fn(usize, usize) -> f64) -> Job {
        let members = (0..4).map(|rank| Member {
            process: Process { rank: Some(rank), host: format!("n{rank}"), ..Process::default() },
            ..Member::default()
        });
        let pairs = (0..4_usize).flat_map(|from| (0..4).map(move |to| (from, to)));
        let links = pairs.filter(|(from, to)| from != to).map(|(from, to)| Link {
            from: Some(from),
            to: Some(to),
            from_device: "eth0".to_owned(),
            to_device: "eth0".to_owned(),
            pending: 0.6,
            wanted: 0.6,
            rate: if retransmits(from, to) > 1.0 { 1.8e6 } else { 2e6 },
            round_trip: 0.005,
            retransmits: retransmits(from, to),
            ..Link::default()
        });
        Job { window: 8.0, members: members.collect(), links: links.collect() }
    }

    #[test]
    fn card_that_loses_packets_is_named() {
        let sends = judge(&job(|from, _| if from == 2 { 12.6 } else { 0.1 }));
        assert_eq!(sends.suspects.len(), 1, "{}", sends.text);
        let suspect = &sends.suspects[0];
        assert_eq!((suspect.class, suspect.place.host.as_str()), (Class::Link, "n2"));
        assert_eq!(suspect.direction, Some(Direction::Send));
        assert!(sends.text.contains("1.0 % of the packets are lost"), "{}", sends.text);
        let receives = judge(&job(|_, to| if to == 1 { 12.6 } else { 0.1 }));
        let suspect = &receives.suspects[0];
        assert_eq!((suspect.class, suspect.place.host.as_str()), (Class::Link, "n1"));
        assert_eq!(suspect.direction, Some(Direction::Receive));
        assert!(suspect.may_pass, "losses alone may pass");
        assert!(receives.text.starts_with("3 of 4 ranks wait"), "{}", receives.text);
    }

    #[test]
    fn losses_everywhere_and_by_chance_name_nobody() {
        for retransmits in [14.0, 0.5] {
            let verdict =
                judge(&job(|from, _| if from == 2 { retransmits * 1.5 } else { retransmits }));
            assert!(verdict.suspects.is_empty(), "{}", verdict.text);
        }
        assert!(judge(&job(|from, _| if from == 2 { 0.9 } else { 0.0 })).suspects.is_empty());
    }

    /// As in a broadcast, where the first one fills its queue.
    #[test]
    fn losses_and_round_trips_that_cost_nothing_name_nobody() {
        let change = |change: &dyn Fn(&mut Link)| {
            let mut job = job(|_, _| 0.1);
            job.links.iter_mut().filter(|link| link.from == Some(2)).for_each(change);
            judge(&job)
        };
        for (slower, named) in [(1.0, false), (1.1, false), (1.3, true)] {
            let verdict = change(&|link: &mut Link| {
                link.round_trip = 0.050;
                link.rate /= slower;
            });
            assert_eq!(!verdict.suspects.is_empty(), named, "{slower}: {}", verdict.text);
        }
        for (slower, named) in [(1.0, false), (1.1, true)] {
            let verdict = change(&|link: &mut Link| {
                link.retransmits = 14.0;
                link.rate /= slower;
            });
            assert_eq!(!verdict.suspects.is_empty(), named, "{slower}: {}", verdict.text);
        }
    }

    /// A broadcast along a chain of eight hosts whose cards are equally fast: the first ones are ahead, and their bytes lie with
    /// receivers that have not asked for them yet. The shares are as measured in one, but for what each `change` of a link makes.
    fn chain(change: impl Fn(usize, &mut Link)) -> Job {
        let members = (0..8).map(|rank| Member {
            process: Process { rank: Some(rank), host: format!("n{rank}"), ..Process::default() },
            ..Member::default()
        });
        let links = [0.57, 0.37, 0.48, 0.58, 0.95, 0.22, 0.0].into_iter().enumerate();
        let links = links.map(|(from, unposted)| {
            let mut link = Link {
                from: Some(from),
                to: Some(from + 1),
                from_device: "eth0".to_owned(),
                to_device: "eth0".to_owned(),
                pending: if from == 6 { 0.88 } else { 0.95 },
                wanted: 1.0 - unposted,
                unposted,
                unacknowledged: 0.88,
                rate: 4.35e6,
                round_trip: 0.008,
                ..Link::default()
            };
            change(from, &mut link);
            link
        });
        // All are connected with all.
        let pairs = (0..8).flat_map(|from| (0..8).map(move |to| (from, to)));
        let idle = pairs.filter(|(from, to)| from != to && *to != from + 1).map(|(from, to)| {
            Link { from: Some(from), to: Some(to), wanted: 1.0, ..Link::default() }
        });
        Job { window: 8.0, members: members.collect(), links: links.chain(idle).collect() }
    }

    #[test]
    fn chain_whose_receivers_are_behind_names_nobody() {
        let verdict = judge(&chain(|_, _| ()));
        assert!(verdict.suspects.is_empty(), "{}", verdict.text);
        let losses = |from: usize, link: &mut Link| {
            link.retransmits = [17.9, 11.7, 18.1, 8.4, 15.3, 9.1, 0.0][from];
            link.unacknowledged *= if from % 2 == 1 { 1.1 } else { 1.0 };
        };
        let verdict = judge(&chain(losses));
        assert!(verdict.suspects.is_empty(), "{}", verdict.text);
    }

    #[test]
    fn slow_path_of_a_chain_is_named() {
        for slow in 0..7 {
            // All carry what the slow one does. Behind it nobody has anything to send; before it, all bytes lie with receivers.
            let verdict = judge(&chain(|from, link| {
                (link.rate, link.unacknowledged) = (1.1e6, 0.22);
                (link.pending, link.wanted, link.unposted) = match from {
                    from if from < slow => (0.99, 0.05, 0.95),
                    from if from > slow => (0.22, 1.0, 0.0),
                    _ => (0.98, 1.0, 0.0),
                };
                if from == slow {
                    link.unacknowledged = 0.98;
                }
            }));
            let suspect = &verdict.suspects[0];
            assert_eq!(suspect.class, Class::Path, "{}", verdict.text);
            assert_eq!(suspect.place.host, format!("n{slow}"), "{}", verdict.text);
            // Those before it for their receivers, and those behind it for their senders.
            assert_eq!(suspect.waiting, 8, "{}", verdict.text);
        }
    }

    #[test]
    fn middle_of_the_others_is_that_of_numbers_without_one() {
        for numbers in [&[3.0][..], &[1.0, 2.0], &[5.0, 1.0, 3.0], &[2.0, 2.0, 7.0, 1.0]] {
            let sorted = Sorted::new(numbers.iter().copied());
            for (at, number) in numbers.iter().enumerate() {
                let others = || {
                    let others = numbers.iter().enumerate().filter(move |(other, _)| *other != at);
                    others.map(|(_, number)| *number)
                };
                assert_eq!(sorted.median_without(*number), median(others()), "{numbers:?} {at}");
                assert_eq!(
                    sorted.max_without(*number),
                    others().fold(0.0, f64::max),
                    "{numbers:?}"
                );
            }
        }
    }

    /// Two ranks, and reduction servers, which always have a buffer posted for whatever comes.
    #[test]
    fn servers_that_are_always_ready_wait_for_nobody_who_computes() {
        let job = |uncalled: [f64; 2], uncalled_for: [f64; 2], waits: [f64; 2]| {
            let process = |rank: Option<u32>, at: usize| Process {
                rank,
                host: format!("n{at}"),
                ..Process::default()
            };
            let ranks = (0..2).map(|at| Member {
                process: process(Some(at as u32), at),
                uncalled: uncalled[at],
                usual_excess: Some(0.0),
                uncalled_for: uncalled_for[at],
                ..Member::default()
            });
            let servers =
                (2..5).map(|at| Member { process: process(None, at), ..Member::default() });
            let pairs = (0..2_usize).flat_map(|rank| (2..5).map(move |server| (rank, server)));
            let links = pairs.flat_map(|(rank, server)| {
                let link = |from, to| Link {
                    from: Some(from),
                    to: Some(to),
                    rate: 1e6,
                    ..Link::default()
                };
                [
                    Link { wanted: 1.0, ..link(rank, server) },
                    Link { wanted: waits[rank], ..link(server, rank) },
                ]
            });
            judge(&Job {
                window: 8.0,
                members: ranks.chain(servers).collect(),
                links: links.collect(),
            })
        };
        let both_compute = job([1.0, 1.0], [6.0, 6.0], [0.0, 0.0]);
        assert!(both_compute.suspects.is_empty(), "{}", both_compute.text);
        let one_is_late = job([0.1, 0.6], [0.0, 1.0], [0.6, 0.1]);
        assert_eq!(one_is_late.suspects[0].place.rank, Some(1), "{}", one_is_late.text);
        assert!(
            one_is_late.text.starts_with("1 of 2 ranks wait for rank 1"),
            "{}",
            one_is_late.text
        );
    }

    /// A ring of many hosts with some neighbours more, of which each tenth path is slow and each tenth rank is late.
    fn large(ranks: usize) -> Job {
        let members = (0..ranks).map(|rank| Member {
            process: Process {
                rank: Some(rank as u32),
                host: format!("n{rank}"),
                ..Process::default()
            },
            uncalled: if rank % 10 == 5 { 0.5 } else { 0.1 },
            usual_excess: Some(0.0),
            ..Member::default()
        });
        let pairs =
            (0..ranks).flat_map(|from| (1..12).map(move |step| (from, (from + step) % ranks)));
        let links = pairs.map(|(from, to)| Link {
            from: Some(from),
            to: Some(to),
            from_device: "eth0".to_owned(),
            to_device: "eth0".to_owned(),
            pending: 0.6,
            wanted: 0.9,
            rate: if from % 10 == 1 && to == from + 1 { 1e6 } else { 4e6 },
            ..Link::default()
        });
        Job { window: 8.0, members: members.collect(), links: links.collect() }
    }

    #[test]
    fn time_of_a_judgement_grows_with_the_job_and_not_with_its_square() {
        let time = |ranks: usize| {
            let job = large(ranks);
            let once = || {
                let begin = std::time::Instant::now();
                assert_eq!(judge(&job).suspects.len(), MAX_SUSPECTS);
                begin.elapsed().as_secs_f64()
            };
            (0..3).map(|_| once()).fold(f64::INFINITY, f64::min)
        };
        let ratio = time(8000) / time(1000);
        println!("8 times the ranks take {ratio:.1} times as long");
        assert!(ratio < 24.0, "{ratio:.1}");
    }

    #[test]
    fn card_whose_connections_are_slow_to_different_degrees_is_named() {
        let slower = |times: [f64; 3]| {
            let mut job = job(|_, _| 0.1);
            let links = job.links.iter_mut().filter(|link| link.from == Some(2));
            links.zip(times).for_each(|(link, times)| link.rate /= times);
            judge(&job)
        };
        let card = slower([1.3, 2.1, 1.7]);
        assert_eq!(card.suspects[0].class, Class::Link, "{}", card.text);
        assert_eq!(card.suspects[0].place.host, "n2", "{}", card.text);
        let path = slower([1.0, 2.1, 1.0]);
        assert_eq!(path.suspects[0].class, Class::Path, "{}", path.text);
        let nobody = slower([1.3, 1.4, 1.3]);
        assert!(nobody.suspects.is_empty(), "{}", nobody.text);
    }

    /// A ring of eight, beside which seven send to one for a second, as for a checkpoint: they share its card.
    #[test]
    fn gather_beside_a_ring_names_nobody() {
        let mut job = chain(|_, link| {
            (link.pending, link.wanted, link.unposted, link.unacknowledged) = (0.6, 0.6, 0.0, 0.6);
            link.rate = 3e6;
        });
        job.links.retain(|link| link.rate > 0.0);
        let like = job.links[0].clone();
        job.links.push(Link { from: Some(7), to: Some(0), ..like.clone() });
        job.links.extend((1..8).map(|from| Link {
            from: Some(from),
            to: Some(0),
            pending: 0.125,
            wanted: 0.125,
            unacknowledged: 0.125,
            rate: 5e6 * 0.125 / 7.0,
            ..like.clone()
        }));
        let verdict = judge(&job);
        assert!(verdict.suspects.is_empty(), "{}", verdict.text);
        // If its card is slow, all that it receives takes four times as long.
        for link in job.links.iter_mut().filter(|link| link.to == Some(0)) {
            let longer = (4.0 * link.wanted).min(0.96);
            link.rate *= longer / (4.0 * link.wanted);
            (link.pending, link.wanted, link.unacknowledged) = (longer, longer, longer);
        }
        let verdict = judge(&job);
        assert_eq!(verdict.suspects[0].place.host, "n0", "{}", verdict.text);
    }

    #[test]
    fn path_that_may_pass_is_told_from_one_that_does_not() {
        let one_loses = |from, to| if (from, to) == (0, 3) { 14.0 } else { 0.1 };
        let ring = |mut job: Job| {
            job.links.retain(|link| link.to == link.from.map(|from| (from + 3) % 4));
            job
        };
        let slow = |mut job: Job| {
            let path = |link: &&mut Link| (link.from, link.to) == (Some(0), Some(3));
            job.links.iter_mut().find(path).expect("a link").rate /= 4.0;
            job
        };
        for (job, may_pass) in [
            (job(one_loses), true),
            (slow(job(|_, _| 0.1)), true), // its ends have others
            (ring(job(one_loses)), true),  // it only loses packets
            (ring(slow(job(|_, _| 0.1))), false),
        ] {
            let verdict = judge(&job);
            assert_eq!(verdict.suspects[0].class, Class::Path, "{}", verdict.text);
            assert_eq!(verdict.suspects[0].may_pass, may_pass, "{}", verdict.text);
        }
    }
}
