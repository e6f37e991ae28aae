//! The judgement: a pure function of what all processes have seen in the same time.

use std::collections::{BTreeMap, HashMap};

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
    /// The receiver had bytes and no buffer for them, or the sender knows of none.
    pub unposted: f64,
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

    /// Seconds for which bytes are under way, for each gigabyte. Also bytes that nobody has asked for yet: they take as long.
    fn pace(&self) -> Option<f64> {
        (self.rate > 0.0).then(|| self.wire().max(self.unacknowledged) / self.rate * 1e9)
    }
}

/// Finds what the waits of a job come from.
pub fn judge(job: &Job) -> Verdict {
    let mut verdict =
        Verdict { ranks: job.members.len() as u32, window_s: job.window, ..Verdict::default() };
    let waits = Waits::new(job);
    let lost = waits.lost();
    let mut suspects = late(job, &waits);
    let late: Vec<usize> = suspects.iter().map(|(at, _)| *at).collect();
    let mut suspects: Vec<Suspect> = suspects.drain(..).map(|(_, suspect)| suspect).collect();
    suspects.extend(slow(job, &waits, &late));
    suspects.sort_by(|a, b| b.share.total_cmp(&a.share));
    // What the worst one causes makes others look slow too: a second one has to be as clear.
    let worst = suspects.first().map_or(0.0, |suspect| suspect.share);
    suspects.retain(|suspect| suspect.share >= worst / 3.0 && suspect.confidence >= 0.5);
    suspects.truncate(2);
    let known = job.members.iter().filter(|member| member.silent_for.is_none()).count();
    let is_known = known as f64 >= MIN_KNOWN * job.members.len() as f64 && job.members.len() >= 2;
    if lost < MIN_SHARE {
        verdict.text = format!("ranks wait for {:.0} % of the time", 100.0 * lost);
    } else if !is_known {
        verdict.outcome = Outcome::Unknown;
        verdict.text = format!(
            "ranks wait for {:.0} % of the time; {known} of {} ranks say what for, which is too few to name anybody",
            100.0 * lost,
            job.members.len()
        );
    } else if let Some(first) = suspects.first() {
        verdict.outcome = Outcome::Suspect;
        verdict.text = sentence(first, job.members.len());
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
    /// By the member that waits: the members that it waits for, and for which share of the time.
    edges: Vec<HashMap<usize, f64>>,
    /// The longest wait of each member, for a peer or the wire.
    longest: Vec<f64>,
    /// Whether anything is known of the member.
    known: Vec<bool>,
}

impl Waits {
    fn new(job: &Job) -> Self {
        let mut edges = vec![HashMap::new(); job.members.len()];
        let mut longest = vec![0.0_f64; job.members.len()];
        for link in &job.links {
            let (Some(from), Some(to)) = (link.from, link.to) else { continue };
            let mut edge = |waits: usize, waited_for: usize, share: f64| {
                let known: &mut f64 = edges[waits].entry(waited_for).or_insert(0.0);
                *known = known.max(share);
                longest[waits] = longest[waits].max(share);
            };
            edge(to, from, link.waits_for_sender());
            edge(from, to, link.waits_for_receiver());
            longest[to] = longest[to].max(link.wire());
            longest[from] = longest[from].max(link.wire());
        }
        let known = job.members.iter().map(|member| member.silent_for.is_none()).collect();
        Self { edges, longest, known }
    }

    /// The share of its time that a rank loses, of those that wait longest: half of the ranks lose more.
    fn lost(&self) -> f64 {
        let known = self.longest.iter().zip(&self.known).filter(|(_, known)| **known);
        median(known.map(|(longest, _)| *longest))
    }

    /// The longest wait of anybody for this member.
    fn wait_for(&self, member: usize) -> f64 {
        let to_it = self.edges.iter().filter_map(|edges| edges.get(&member));
        to_it.copied().fold(0.0, f64::max)
    }

    /// Number of members that wait for these, directly or through others.
    fn waiting_for(&self, these: &[usize]) -> u32 {
        let mut reached: Vec<bool> = vec![false; self.edges.len()];
        let mut next: Vec<usize> = these.to_vec();
        these.iter().for_each(|at| reached[*at] = true);
        while let Some(at) = next.pop() {
            for (waits, edges) in self.edges.iter().enumerate() {
                let share = edges.get(&at).copied().unwrap_or(0.0);
                if share >= MIN_SHARE / 2.0 && !reached[waits] {
                    reached[waits] = true;
                    next.push(waits);
                }
            }
        }
        (reached.iter().filter(|reached| **reached).count() - these.len()) as u32
    }

    /// Number of members that these connections hold up: those at their ends, and who waits for them.
    fn held_by(&self, job: &Job, connections: &[usize]) -> u32 {
        let links = connections.iter().map(|number| &job.links[*number]);
        let mut ends: Vec<usize> =
            links.flat_map(|link| link.from.into_iter().chain(link.to)).collect();
        ends.sort_unstable();
        ends.dedup();
        self.waiting_for(&ends) + ends.len() as u32
    }
}

/// Processes that others wait for and that wait for nobody themselves, with their indices.
fn late(job: &Job, waits: &Waits) -> Vec<(usize, Suspect)> {
    let members = &job.members;
    let uncalled =
        |member: &Member| if member.silent_for.is_some() { 1.0 } else { member.uncalled };
    let mut found = Vec::new();
    for (at, member) in members.iter().enumerate() {
        let others = || members.iter().enumerate().filter(move |(other, _)| *other != at);
        let usual = median(others().map(|(_, other)| other.uncalled));
        let starved = member.starved - median(others().map(|(_, other)| other.starved));
        // A stage of a pipeline may always compute longer than others: late is who has become late, or is stuck.
        let excess = uncalled(member) - usual;
        let before = member.usual_excess.unwrap_or(excess).max(0.0);
        let mut lateness = excess - before;
        let is_stuck =
            member.uncalled_for >= STUCK && waits.longest.iter().any(|share| *share > 0.5);
        if is_stuck {
            lateness = lateness.max(excess);
        }
        let links =
            || job.links.iter().filter(move |link| link.from == Some(at) || link.to == Some(at));
        let mut evidence = format!(
            "did not call for {:.0} % of the time, others for {:.0} %",
            100.0 * uncalled(member),
            100.0 * usual
        );
        if let Some(silent) = member.silent_for {
            if links().any(|link| link.is_unanswered) {
                continue; // its host does not answer either: the network
            }
            if links().any(|link| link.moves) {
                continue; // it works: only what it says gets lost
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
            lateness = lateness.max(starved.min(waits.longest.iter().copied().fold(0.0, f64::max)));
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
        let next = others().map(|(_, other)| other.uncalled - usual).fold(0.0, f64::max);
        let margin =
            ((share - next.min(share)) / share).max(if starved >= MIN_STARVED { 0.6 } else { 0.0 });
        let place = place(&member.process, "");
        found.push((
            at,
            Suspect {
                class: Class::Late,
                place,
                direction: None,
                peer: None,
                may_pass: false,
                share,
                for_s: member.uncalled_for.max(member.silent_for.unwrap_or(0.0)),
                waiting: waits.waiting_for(&[at]),
                confidence: 0.5 + 0.5 * margin * (share / (share + 0.05)),
                evidence,
            },
        ));
    }
    found
}

/// The end of a connection: a card of a host, in one direction.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct End {
    host: String,
    device: String,
    sends: bool,
}

/// The index of a connection, and those of the members at its ends.
type Between = (usize, usize, usize);

/// The connections of one end.
#[derive(Default)]
struct Group {
    links: Vec<usize>,
    slow: Vec<usize>,
}

/// Cards and paths on which bytes are under way longer than on others. Processes that are late explain the waits for them.
fn slow(job: &Job, waits: &Waits, late: &[usize]) -> Vec<Suspect> {
    let links: Vec<(usize, &Link, usize, usize)> = job
        .links
        .iter()
        .enumerate()
        .filter_map(|(number, link)| Some((number, link, link.from?, link.to?)))
        .collect();
    let pace = median(links.iter().filter_map(|(_, link, ..)| link.pace()));
    let trip = median(links.iter().map(|(_, link, ..)| link.round_trip).filter(|trip| *trip > 0.0));
    let carrying = links.iter().filter(|(_, link, ..)| link.rate > 0.0);
    let loss = median(carrying.map(|(_, link, ..)| link.loss()));
    let is_slower = |link: &Link, times: f64| link.pace().is_none_or(|its| its > times * pace);
    let is_lossy = |link: &Link| {
        link.retransmits * job.window >= MIN_RETRANSMITS
            && link.loss() >= LOSSY.0.max(LOSSY.1 * loss)
            && is_slower(link, LOSSY_PACE)
    };
    let is_long = |link: &Link| {
        let long_trip =
            link.round_trip > LONG_TRIP.0 * trip && link.round_trip > trip + LONG_TRIP.1;
        is_slower(link, SLOW) || long_trip && is_slower(link, LONG_TRIP_PACE) || link.is_unanswered
    };
    let is_slow = |link: &Link, from: usize, to: usize| {
        // A process that gets no CPU does not read either.
        if late.contains(&from) || late.contains(&to) {
            return false;
        }
        link.wire() >= MIN_SHARE && (is_long(link) || is_lossy(link)) || link.is_unanswered
    };
    let mut ends: BTreeMap<End, Group> = BTreeMap::new();
    let mut all_slow = Vec::new();
    for (number, link, from, to) in &links {
        let slow = is_slow(link, *from, *to);
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
        }
    }
    let is_card = |group: &Group| group.slow.len() as f64 >= MOST * group.links.len() as f64;
    // Peers: with only one, its card could as well be the slow one.
    let peers = |end: &End| {
        let mut hosts: Vec<&str> = links
            .iter()
            .filter(|(number, ..)| ends[end].links.contains(number))
            .map(|(_, _, from, to)| {
                let other = if end.sends { *to } else { *from };
                job.members[other].process.host.as_str()
            })
            .collect();
        hosts.sort_unstable();
        hosts.dedup();
        hosts.len()
    };
    let mut cards: Vec<(End, f64)> = ends
        .iter()
        .filter(|(_, group)| !group.slow.is_empty() && is_card(group))
        .map(|(end, _)| (end.clone(), peers(end) as f64))
        .collect();
    // The card that explains most comes first.
    cards.sort_by(|a, b| {
        (ends[&b.0].slow.len(), b.1 as u64).cmp(&(ends[&a.0].slow.len(), a.1 as u64))
    });
    let mut explained: Vec<usize> = Vec::new();
    let mut found: Vec<(Option<End>, Suspect)> = Vec::new();
    let describe = |numbers: &[usize]| {
        let chosen: Vec<&Link> = numbers.iter().map(|number| &job.links[*number]).collect();
        let worst = chosen.iter().map(|link| link.wire()).fold(0.0, f64::max);
        let paces: Vec<f64> = chosen.iter().filter_map(|link| link.pace()).collect();
        let ratio = if pace > 0.0 { median(paces.into_iter()) / pace } else { 0.0 };
        let lossy = chosen.iter().filter(|link| is_lossy(link)).count() * 2 > chosen.len();
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
            ends[end].slow.iter().copied().filter(|number| !explained.contains(number)).collect();
        if slow.is_empty() || slow.len() * 2 < ends[end].slow.len() || *peers < 2.0 {
            continue;
        }
        explained.extend(&slow);
        let (share, margin, evidence) = describe(&slow);
        let Some(member) = member_at(job, &slow, end) else { continue };
        found.push((
            Some(end.clone()),
            Suspect {
                class: Class::Link,
                place: place(&job.members[member].process, &end.device),
                direction: Some(if end.sends { Direction::Send } else { Direction::Receive }),
                peer: None,
                may_pass: slow.iter().all(|at| !is_long(&job.links[*at])),
                share,
                for_s: 0.0,
                // The others: that a host waits for its own card, the place says.
                waiting: waits.held_by(job, &slow) - 1,
                confidence: 0.5 + 0.5 * margin,
                evidence,
            },
        ));
    }
    // Both directions of one card are one fault.
    let mut merged: Vec<Suspect> = Vec::new();
    for (_, suspect) in found {
        match merged.iter_mut().find(|other| {
            other.place.host == suspect.place.host && other.place.device == suspect.place.device
        }) {
            Some(other) => {
                other.direction = Some(Direction::Both);
                other.share = other.share.max(suspect.share);
                other.waiting = other.waiting.max(suspect.waiting);
            }
            None => merged.push(suspect),
        }
    }
    // What no card explains is between two hosts.
    let mut paths: BTreeMap<(String, String), Vec<Between>> = BTreeMap::new();
    for (number, _, from, to) in &all_slow {
        if !explained.contains(number) {
            let host = |at: usize| job.members[at].process.host.clone();
            paths.entry((host(*from), host(*to))).or_default().push((*number, *from, *to));
        }
    }
    for slow in paths.values() {
        let numbers: Vec<usize> = slow.iter().map(|(number, ..)| *number).collect();
        let (share, margin, evidence) = describe(&numbers);
        let Some((number, from, to)) = slow.first().copied() else { continue };
        let link = &job.links[number];
        let is_among = |end: &End| ends[end].links.len() > ends[end].slow.len();
        let is_among_others = ends_of(job, link, from, to).iter().all(is_among);
        let may_pass = is_among_others || numbers.iter().all(|at| !is_long(&job.links[*at]));
        merged.push(Suspect {
            class: Class::Path,
            place: place(&job.members[from].process, &link.from_device),
            direction: None,
            peer: Some(place(&job.members[to].process, &link.to_device)),
            may_pass,
            share,
            for_s: 0.0,
            waiting: waits.held_by(job, &numbers),
            confidence: 0.5 + 0.5 * margin,
            evidence,
        });
    }
    merged
}

fn ends_of(job: &Job, link: &Link, from: usize, to: usize) -> [End; 2] {
    let end = |at: usize, device: &str, sends| End {
        host: job.members[at].process.host.clone(),
        device: device.to_owned(),
        sends,
    };
    [end(from, &link.from_device, true), end(to, &link.to_device, false)]
}

/// The process at this end of the first of these connections.
fn member_at(job: &Job, links: &[usize], end: &End) -> Option<usize> {
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
