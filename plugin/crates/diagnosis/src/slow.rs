//! Slow cards and paths: bytes take longer there than elsewhere.

use std::collections::{BTreeMap, BTreeSet};

use crate::found::{Found, MIN_SHARE, place};
use crate::job::{Job, Link};
use crate::median::median;
use crate::verdict::{Class, Direction, Suspect};

/// A connection is slow if its bytes take this many times as long as the others'.
const SLOW: f64 = 1.6;
/// A card is also slow if its median connection is [`DELAYED`] times as slow as usual, most of its
/// connections are at least [`SLIGHTLY_SLOW`], and it has at least [`MIN_PEERS`] peers. A delay
/// costs less on connections that carry more at a time, so few of them may be slow by themselves.
const DELAYED: f64 = 1.3;
const SLIGHTLY_SLOW: f64 = 1.15;
const MIN_PEERS: usize = 3;
/// Maximum ratio of such a card's slowest connection to its median one: a delay slows all of them
/// alike.
const MAX_SPREAD: f64 = 1.8;
/// A round trip is long if it exceeds the others' by this factor and by this many seconds.
const LONG_TRIP: (f64, f64) = (3.0, 0.001);
/// A long round trip counts only if bytes also take this many times as long: a sender's own queue
/// lengthens round trips too.
const LONG_TRIP_PACE: f64 = 1.2;
/// A connection is lossy above this share of its packets and above this many times the job's
/// median.
const LOSSY: (f64, f64) = (0.003, 4.0);
/// An unanswered flow counts only if its connection's bytes take this many times as long.
const UNANSWERED_PACE: f64 = 1.2;
/// Losses count only if bytes take this many times as long: TCP fills queues, and a full queue
/// drops packets.
const LOSSY_PACE: f64 = 1.05;
/// Fewer retransmitted segments in the window count as chance.
const MIN_RETRANSMITS: f64 = 8.0;
/// Minimum share of a card's connections that must be slow for the card to be slow.
const MOST: f64 = 0.7;
/// A card is crowded if it carries more than this many times the median card's bytes. TCP shares
/// such a card unevenly.
const CROWDED: f64 = 2.5;
/// Cards below this share of the busiest card's bytes are left out of that median.
const MIN_CARRIED: f64 = 0.1;
/// A connection of a crowded card is slow only above this factor: the last connection of a gather
/// must find its rate again.
const CROWDED_SLOW: f64 = 4.0;

/// The end of a connection: a card of a host, in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct End<'a> {
    host: &'a str,
    device: &'a str,
    sends: bool,
}

/// The index of a connection, and those of the members at its ends.
type Between = (usize, usize, usize);

/// A connection whose ends are both known: its index, itself, and the indices of its sender and its
/// receiver.
type Known<'a> = (usize, &'a Link, usize, usize);

/// The connections of one end.
#[derive(Default)]
struct Group {
    links: Vec<usize>,
    slow: Vec<usize>,
    /// Superset of `slow`: connections that are at least a little slower than usual.
    slower: Vec<usize>,
}

/// How long a connection's bytes take.
#[derive(Clone, Copy, Default)]
struct Pace {
    /// Time per byte if the connection were alone on its cards, so that a card which many send to
    /// at once does not look slow. `None` if it carries nothing.
    of_a_byte: Option<f64>,
    /// Whether its sender's card is crowded, and its receiver's.
    crowded: [bool; 2],
}

impl Pace {
    /// Whether it exceeds the usual time by this factor.
    fn is_longer(self, times: f64, usual: f64) -> bool {
        self.of_a_byte.is_none_or(|its| its > times * usual)
    }
}

/// The pace of each connection.
fn paces(job: &Job) -> Vec<Pace> {
    let mut cards: BTreeMap<End<'_>, Vec<usize>> = BTreeMap::new();
    for (number, link) in job.links.iter().enumerate() {
        if let (Some(from), Some(to)) = (link.from, link.to) {
            let ends = ends_of(job, link, from, to);
            ends.into_iter().for_each(|end| cards.entry(end).or_default().push(number));
        }
    }
    let carried =
        |numbers: &[usize]| -> f64 { numbers.iter().map(|number| job.links[*number].rate).sum() };
    let most = cards.values().map(|numbers| carried(numbers)).fold(0.0, f64::max);
    let usual = median(
        cards.values().map(|numbers| carried(numbers)).filter(|rate| *rate > MIN_CARRIED * most),
    );
    let under_way = |number: usize| job.links[number].under_way();
    // Number of connections that share its busier card, each counted up to half of this
    // connection's busy time.
    let mut sharing = vec![1.0_f64; job.links.len()];
    // Bytes per second that its crowded card carries while this connection has bytes under way.
    let mut beside = vec![0.0_f64; job.links.len()];
    let mut crowded = vec![[false; 2]; job.links.len()];
    for (end, mut numbers) in cards {
        let is_crowded = carried(&numbers) > CROWDED * usual;
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
        // All bytes of connections that are busy for less time, and the overlapping part of the
        // others' bytes.
        let per_share = |number: usize| match under_way(number) {
            share if share > 0.0 => job.links[number].rate / share,
            _ => 0.0,
        };
        let (mut bytes, mut longer) = (0.0, numbers.iter().map(|number| per_share(*number)).sum());
        for number in numbers.iter().filter(|_| is_crowded) {
            bytes += job.links[*number].rate;
            longer -= per_share(*number);
            beside[*number] =
                beside[*number].max(bytes + under_way(*number) * f64::max(longer, 0.0));
            crowded[*number][usize::from(!end.sends)] = true;
        }
    }
    let pace = |(number, link): (usize, &Link)| {
        let alone = if beside[number] > 0.0 { beside[number] } else { link.rate * sharing[number] };
        Pace {
            of_a_byte: (link.rate > 0.0).then(|| link.under_way() / alone),
            crowded: crowded[number],
        }
    };
    job.links.iter().enumerate().map(pace).collect()
}

/// Which connections may be slow because TCP shares a crowded card unevenly. A card whose
/// connections to several hosts are mostly slow has no such excuse: uneven sharing would not hit it
/// at all of them.
fn shared_unevenly(job: &Job, links: &[Known<'_>], paces: &[Pace], usual: f64) -> Vec<bool> {
    let mut uneven: Vec<bool> = paces.iter().map(|pace| pace.crowded != [false; 2]).collect();
    // For each card that is not crowded: its connections to crowded cards, and the hosts of those
    // cards.
    let mut cards: BTreeMap<End<'_>, (Vec<usize>, BTreeSet<&str>)> = BTreeMap::new();
    for (number, link, from, to) in links.iter().filter(|(number, ..)| uneven[*number]) {
        let ends = ends_of(job, link, *from, *to);
        for (end, other, is_crowded) in [
            (ends[0], ends[1], paces[*number].crowded[0]),
            (ends[1], ends[0], paces[*number].crowded[1]),
        ] {
            if !is_crowded {
                let (numbers, hosts) = cards.entry(end).or_default();
                numbers.push(*number);
                hosts.insert(other.host);
            }
        }
    }
    for (numbers, hosts) in cards.into_values() {
        let slow = numbers.iter().filter(|number| paces[**number].is_longer(SLOW, usual)).count();
        if hosts.len() >= 2 && slow as f64 >= MOST * numbers.len() as f64 {
            numbers.into_iter().for_each(|number| uneven[number] = false);
        }
    }
    uneven
}

/// Finds cards and paths where bytes take longer than elsewhere. Waits for late processes are not
/// counted.
pub(crate) fn slow(job: &Job, is_late: &[bool]) -> Vec<Found> {
    let links: Vec<Known<'_>> = job
        .links
        .iter()
        .enumerate()
        .filter_map(|(number, link)| Some((number, link, link.from?, link.to?)))
        .collect();
    let paces = paces(job);
    let pace = median(links.iter().filter_map(|(number, ..)| paces[*number].of_a_byte));
    let trip = median(links.iter().map(|(_, link, ..)| link.round_trip).filter(|trip| *trip > 0.0));
    let carrying = links.iter().filter(|(_, link, ..)| link.rate > 0.0);
    let loss = median(carrying.map(|(_, link, ..)| link.loss()));
    let is_slower = |number: usize, times: f64| paces[number].is_longer(times, pace);
    let uneven = shared_unevenly(job, &links, &paces, pace);
    let limit = |number: usize, times: f64| if uneven[number] { CROWDED_SLOW } else { times };
    let is_lossy = |number: usize| {
        let link = &job.links[number];
        link.retransmits * job.window >= MIN_RETRANSMITS
            && link.loss() >= LOSSY.0.max(LOSSY.1 * loss)
            && is_slower(number, LOSSY_PACE)
    };
    // One dead flow does no harm while the other flows carry everything.
    let is_dead = |number: usize| {
        job.links[number].is_unanswered && is_slower(number, limit(number, UNANSWERED_PACE))
    };
    let is_long = |number: usize| {
        let link = &job.links[number];
        let long_trip =
            link.round_trip > LONG_TRIP.0 * trip && link.round_trip > trip + LONG_TRIP.1;
        is_slower(number, limit(number, SLOW))
            || long_trip && is_slower(number, LONG_TRIP_PACE)
            || is_dead(number)
    };
    let is_slow = |number: usize, from: usize, to: usize| {
        let link = &job.links[number];
        // A late process may lack CPU, and then it does not read either.
        if is_late[from] || is_late[to] {
            return false;
        }
        link.wire() >= MIN_SHARE && (is_long(number) || is_lossy(number)) || is_dead(number)
    };
    let mut ends: BTreeMap<End<'_>, Group> = BTreeMap::new();
    let mut all_slow = Vec::new();
    for (number, link, from, to) in &links {
        let slow = is_slow(*number, *from, *to);
        if slow {
            all_slow.push((*number, *link, *from, *to));
        }
        // An idle connection proves nothing about its card.
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
            if slow
                || !is_late
                    && link.under_way() >= MIN_SHARE
                    && is_slower(*number, limit(*number, SLIGHTLY_SLOW))
            {
                group.slower.push(*number);
            }
        }
    }
    let are_most =
        |part: &[usize], group: &Group| part.len() as f64 >= MOST * group.links.len() as f64;
    // With a single peer, the peer's card could just as well be the slow one.
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
        .filter(|(_, group)| !group.slow.is_empty() && are_most(&group.slow, group))
        .map(|(end, _)| (*end, peers(end)))
        .collect();
    // Only the worst card: its delays make others look slow.
    let delayed = ends
        .iter()
        .filter(|(_, group)| cards.is_empty() && are_most(&group.slower, group))
        .filter_map(|(end, group)| {
            let back = ends.get(&End { sends: !end.sends, ..*end });
            let both = group.links.iter().chain(back.iter().flat_map(|back| &back.links));
            let its = median(group.links.iter().filter_map(|number| paces[*number].of_a_byte));
            let longest = both.filter_map(|number| paces[*number].of_a_byte).fold(0.0, f64::max);
            // Not if one path is much slower than the rest and merely holds them up a little.
            (its >= DELAYED * pace && longest <= MAX_SPREAD * its).then_some((its, end))
        })
        .filter(|(_, end)| peers(end) >= MIN_PEERS)
        // Not if a connection of another card is slow: it would hold up these as well.
        .filter(|(_, end)| {
            all_slow.iter().all(|(_, link, from, to)| {
                let is_its = |other: &End<'_>| (other.host, other.device) == (end.host, end.device);
                ends_of(job, link, *from, *to).iter().any(is_its)
            })
        })
        .max_by(|(one, _), (other, _)| one.total_cmp(other));
    let delayed = delayed.map(|(_, end)| *end);
    cards.extend(delayed.map(|end| (end, peers(&end))));
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
        let its = median(numbers.iter().filter_map(|number| paces[*number].of_a_byte));
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
        let its = if delayed == Some(*end) { &ends[end].slower } else { &ends[end].slow };
        let slow: Vec<usize> = its.iter().copied().filter(|number| !explained[*number]).collect();
        if slow.is_empty() || slow.len() * 2 < its.len() || *peers < 2 {
            continue;
        }
        slow.iter().for_each(|number| explained[*number] = true);
        if delayed == Some(*end) {
            // A delay shows in both directions.
            let back = End { sends: !end.sends, ..*end };
            let back = ends.get(&back).map(|group| group.slow.as_slice()).unwrap_or_default();
            back.iter().for_each(|number| explained[*number] = true);
        }
        let (share, margin, evidence) = describe(&slow);
        let Some(member) = member_at(job, &slow, end) else { continue };
        let suspect = Suspect {
            class: Class::Link,
            place: place(&job.members[member].process, end.device),
            direction: Some(if end.sends { Direction::Send } else { Direction::Receive }),
            peer: None,
            or_card: false,
            may_pass: slow.iter().all(|number| !is_long(*number)),
            share,
            for_s: 0.0,
            waiting: 0,
            confidence: 0.5 + 0.5 * margin,
            evidence,
        };
        // The suspect's own host also waits; the place already names it.
        let mut holds = vec![member];
        holds.extend(ends_held(&slow).into_iter().filter(|at| *at != member));
        // Merge the two directions of a card into one suspect.
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
    // Slow connections that no card explains lie between two hosts.
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
        let others_carry = |end: &End<'_>| {
            ends[end]
                .links
                .iter()
                .any(|other| !numbers.contains(other) && job.links[*other].rate > 0.0)
        };
        let is_among_others = ends_of(job, link, from, to).iter().all(is_among);
        let may_pass = is_among_others || numbers.iter().all(|number| !is_long(*number));
        let suspect = Suspect {
            class: Class::Path,
            place: place(&job.members[from].process, &link.from_device),
            direction: None,
            peer: Some(place(&job.members[to].process, &link.to_device)),
            or_card: !ends_of(job, link, from, to).iter().all(others_carry),
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

/// The member at this end of the first of these connections.
fn member_at(job: &Job, links: &[usize], end: &End<'_>) -> Option<usize> {
    let link = &job.links[*links.first()?];
    if end.sends { link.from } else { link.to }
}
