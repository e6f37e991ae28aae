//! Collects the views of all processes and judges the last seconds of a job.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

use crate::job::{Job, Link, Member};
use crate::judge::{MAX_SUSPECTS, judge, sentence};
use crate::median::median;
use crate::timeline::{MAX_ROWS, Moment, State, Timeline};
use crate::verdict::{Class, Outcome, Suspect, Verdict};
use crate::view::{ConnectionView, Process, View};

/// The time that a judgement covers.
const WINDOW: Duration = Duration::from_secs(8);
/// A process is silent once it has missed this many views and sent none for [`MIN_SILENCE`].
const MISSED: u32 = 3;
const MIN_SILENCE: Duration = Duration::from_millis(3500);
/// How long the kernel may go on sending what a stopped process has written.
const BUFFERED: Duration = Duration::from_secs(10);
/// A silent process is forgotten after this time, unless others still have connections to it and
/// may wait for it.
const FORGOTTEN: Duration = Duration::from_secs(20);
/// A connection is forgotten when neither end has reported it for this time.
const CONNECTION_FORGOTTEN: Duration = Duration::from_secs(300);
/// Number of consecutive judgements that must name a suspect before the verdict does, and must omit
/// it before the verdict drops it.
const STEADY: u32 = 4;
/// The same for a suspect that may pass. Twice the window, so that neither a chance collision nor a
/// single pause is reported.
const STEADY_IF_IT_MAY_PASS: u32 = 16;
/// Number of consecutive judgements, as long as the window, that may omit a late process before it
/// is dropped. A training step may be longer than the gap.
const PAUSES: u32 = 8;
/// Number of judgements of a working job after which a process's usual lateness is known.
const LEARNING: u32 = 30;
/// Number of judgements that the mean of the usual lateness covers, so that it follows a change
/// within minutes.
const USUAL: u32 = 120;
/// A job counts as working while its median process is without requests for at most this share. It
/// is not while it starts.
const IDLE: f64 = 0.95;
/// Maximum number of processes and of connections. Any beyond that are ignored.
const MAX_PROCESSES: usize = 20_000;
const MAX_CONNECTIONS: usize = 400_000;
/// Number of views kept of a process beyond those that fit into the window at the requested
/// interval.
const MORE_VIEWS: u32 = 2;
/// Up to this many processes send a view once a second. With more, each sends less often.
const PROCESSES_A_SECOND: u64 = 1000;
const MAX_INTERVAL: Duration = Duration::from_secs(10);

/// The views of the last seconds. All times count from the same arbitrary moment.
#[derive(Debug)]
pub struct Collector {
    id: u64,
    processes: HashMap<u64, Known>,
    ends: HashMap<u64, Ends>,
    /// The previous collector, if it has sent no view to this one.
    predecessor: Option<u64>,
    suspicions: Vec<Suspicion>,
    verdict: Verdict,
    timeline: Timeline,
}

/// The processes at both ends of a connection, sender first, and when each reported it last.
#[derive(Debug, Default)]
struct Ends {
    processes: [Option<u64>; 2],
    told: [Duration; 2],
}

impl Ends {
    /// Whether only the other end has reported the connection since then. The other end may wait
    /// for this one.
    fn is_silent(&self, end: usize, since: Duration) -> bool {
        self.told[1 - end] >= since && self.told[end] < since
    }
}

/// How far a process's share without calls usually exceeds the median: a mean over judgements.
#[derive(Clone, Copy, Debug, Default)]
struct Usual {
    excess: f64,
    judgements: u32,
}

impl Usual {
    fn add(&mut self, excess: f64) {
        self.judgements = (self.judgements + 1).min(USUAL);
        self.excess += (excess - self.excess) / f64::from(self.judgements);
    }

    fn known(self) -> Option<f64> {
        (self.judgements >= LEARNING).then_some(self.excess)
    }
}

#[derive(Debug)]
struct Known {
    process: Process,
    /// When its last view came.
    last: Duration,
    sequence: u32,
    /// The views of the window with their times of arrival.
    views: VecDeque<(Duration, View)>,
    usual: Usual,
    /// Whether peers received bytes from it long after its last view, so that only its views get
    /// lost.
    is_unheard: bool,
}

impl Known {
    fn new(process: Process, now: Duration) -> Self {
        let (views, usual) = (VecDeque::new(), Usual::default());
        Self { process, last: now, sequence: 0, views, usual, is_unheard: false }
    }
}

/// A connection while its ends' views are merged.
#[derive(Default)]
struct Gathered {
    link: Link,
    /// Whether a view of the sender included it.
    has_sender: bool,
    /// As the receiver saw it: the share of time in which a message had begun to arrive, and bytes
    /// per second.
    arriving: f64,
    received: f64,
}

impl Gathered {
    /// Without a view of the sender, messages that had begun to arrive count as under way.
    fn link(self) -> Link {
        let Self { mut link, has_sender, arriving, received } = self;
        if !has_sender {
            (link.pending, link.rate) = (arriving, received);
        }
        link
    }
}

#[derive(Debug)]
struct Suspicion {
    suspect: Suspect,
    since: Duration,
    /// Number of judgements that named it, and how many of these found that it does not pass by
    /// itself.
    seen: u32,
    firm: u32,
    /// Number of consecutive judgements that did not name it.
    missed: u32,
    /// Whether the verdict names it.
    is_told: bool,
}

impl Collector {
    /// A collector without views. `id` is this process's.
    pub fn new(id: u64) -> Self {
        Self {
            id,
            processes: HashMap::new(),
            ends: HashMap::new(),
            predecessor: None,
            suspicions: Vec::new(),
            verdict: Verdict { collector: format!("{id:016x}"), ..Verdict::default() },
            timeline: Timeline::default(),
        }
    }

    /// Notes the previous collector, which fell silent: the others may wait for it.
    pub fn succeed(&mut self, process: Process, now: Duration) {
        self.predecessor = Some(process.id);
        self.processes.entry(process.id).or_insert_with(|| Known::new(process, now));
    }

    /// How long each process must wait between two views.
    pub fn interval(&self) -> Duration {
        let seconds = (self.processes.len() as u64).div_ceil(PROCESSES_A_SECOND).max(1);
        Duration::from_secs(seconds).min(MAX_INTERVAL)
    }

    /// Time without a view after which a process counts as silent.
    fn silence(&self) -> Duration {
        MIN_SILENCE.max(MISSED * self.interval())
    }

    /// The time that a judgement covers: at least four views of each process.
    fn window(&self) -> Duration {
        WINDOW.max(4 * self.interval())
    }

    /// Adds a view. One that is older than the process's last is ignored.
    pub fn add(&mut self, view: View, now: Duration) {
        let id = view.process.id;
        if !self.processes.contains_key(&id) && self.processes.len() >= MAX_PROCESSES {
            return;
        }
        let window = self.window();
        let most = (window.as_secs() / self.interval().as_secs() + u64::from(MORE_VIEWS)) as usize;
        let known =
            self.processes.entry(id).or_insert_with(|| Known::new(view.process.clone(), now));
        if !known.views.is_empty() && view.sequence <= known.sequence {
            return;
        }
        if view.connections_open == 0 {
            // It has no connections: it is ending, or has not begun.
            self.processes.remove(&id);
            return;
        }
        (known.sequence, known.last) = (view.sequence, now);
        known.is_unheard = false;
        known.views.push_back((now, view));
        while known.views.len() > most
            || known.views.front().is_some_and(|(at, _)| *at + window < now)
        {
            known.views.pop_front();
        }
        self.note_ends(id, now);
    }

    /// Notes the connections in a process's last view, and that peers which sent it bytes are
    /// alive.
    fn note_ends(&mut self, id: u64, now: Duration) {
        let unheard_since = now.saturating_sub(BUFFERED + self.interval());
        let last = self.processes.get(&id).and_then(|known| known.views.back());
        let mut lives = Vec::new();
        for connection in last.iter().flat_map(|(_, view)| &view.connections) {
            let end = usize::from(!connection.is_sender);
            if self.ends.len() >= MAX_CONNECTIONS && !self.ends.contains_key(&connection.id) {
                continue;
            }
            let ends = self.ends.entry(connection.id).or_default();
            (ends.processes[end], ends.told[end]) = (Some(id), now);
            if connection.kibibytes > 0 && !connection.is_sender {
                lives.extend(ends.processes[1 - end]);
            }
        }
        for other in lives {
            if let Some(other) = self.processes.get_mut(&other).filter(|it| it.last < unheard_since)
            {
                other.is_unheard = true;
            }
        }
    }

    /// Judges the job now. To be called once a second.
    pub fn judge(&mut self, now: Duration) -> &Verdict {
        self.forget(now);
        let (job, ids) = self.job(now);
        let mut found = judge(&job);
        self.timeline.add(moment(&job, now));
        self.learn(&job, &ids);
        self.weigh(&found.suspects, now);
        self.confirm(&mut found);
        found.collector.clone_from(&self.verdict.collector);
        if let Some(known) = self.processes.get(&self.id) {
            found.collector_host.clone_from(&known.process.host);
        }
        found.seq = self.verdict.seq + 1;
        self.timeline.tell(&found);
        self.verdict = found;
        &self.verdict
    }

    /// Keeps only confirmed suspects in a judgement.
    fn confirm(&self, found: &mut Verdict) {
        let told: Vec<Suspect> = self
            .suspicions
            .iter()
            .filter(|suspicion| suspicion.is_told)
            .map(|suspicion| suspicion.suspect.clone())
            .collect();
        if let Some(first) = told.first() {
            // Even if this judgement names nobody, or somebody else for the first time.
            (found.outcome, found.text) = (Outcome::Suspect, sentence(first, found.ranks as usize));
        } else if found.outcome == Outcome::Suspect {
            found.outcome = Outcome::Nobody;
            "ranks wait; it is not certain yet for whom".clone_into(&mut found.text);
        }
        found.suspects = told;
        found.suspects.truncate(MAX_SUSPECTS);
    }

    /// The last verdict.
    pub fn verdict(&self) -> &Verdict {
        &self.verdict
    }

    /// Who waited for what in the last minutes.
    pub fn timeline(&self) -> &Timeline {
        &self.timeline
    }

    /// This collector's process identifier.
    pub fn id(&self) -> u64 {
        self.id
    }

    fn forget(&mut self, now: Duration) {
        let forgotten = self.silence() + FORGOTTEN;
        let silent = self.processes.iter().filter(|(_, known)| now >= known.last + forgotten);
        let mut silent: HashSet<u64> = silent.map(|(id, _)| *id).collect();
        if !silent.is_empty() {
            self.keep_waited_for(&mut silent, now);
            self.processes.retain(|id, _| !silent.contains(id));
        }
        let last = |ends: &Ends| ends.told[0].max(ends.told[1]);
        self.ends.retain(|_, ends| now < last(ends) + CONNECTION_FORGOTTEN);
    }

    /// Removes from `silent` the processes that live ones have connections to, directly or through
    /// silent ones, and may wait for.
    fn keep_waited_for(&self, silent: &mut HashSet<u64>, now: Duration) {
        let since = now.saturating_sub(self.window());
        let mut waited_for = Vec::new();
        let mut neighbours: HashMap<u64, Vec<u64>> = HashMap::new();
        for ends in self.ends.values() {
            if let Some(end) = (0..2).find(|end| ends.is_silent(*end, since)) {
                // The predecessor's connections are unknown. It may be the missing end of this one.
                waited_for.extend(ends.processes[end].or(self.predecessor));
            }
            if let [Some(one), Some(other)] = ends.processes
                && silent.contains(&one)
                && silent.contains(&other)
            {
                neighbours.entry(one).or_default().push(other);
                neighbours.entry(other).or_default().push(one);
            }
        }
        while let Some(id) = waited_for.pop() {
            if silent.remove(&id) {
                waited_for.extend(neighbours.remove(&id).unwrap_or_default());
            }
        }
    }

    /// Merges the views of the last seconds into a job. Also returns the identifiers of its
    /// members.
    fn job(&self, now: Duration) -> (Job, Vec<u64>) {
        let begin = now.saturating_sub(self.window());
        let silence = self.silence();
        // A predecessor that has sent no view yet may send one soon.
        let is_known = |known: &Known| !known.views.is_empty() || now >= known.last + silence;
        let known = self.processes.iter().filter(|(_, known)| is_known(known));
        let mut ids: Vec<u64> = known.map(|(id, _)| *id).collect();
        ids.sort_by_key(|id| (self.processes[id].process.rank.unwrap_or(u32::MAX), *id));
        let at: HashMap<u64, usize> = ids.iter().enumerate().map(|(at, id)| (*id, at)).collect();
        let mut members = Vec::with_capacity(ids.len());
        let mut links: HashMap<u64, Gathered> = HashMap::new();
        for id in &ids {
            let known = &self.processes[id];
            let recent =
                || known.views.iter().filter(|(time, _)| *time >= begin).map(|(_, view)| view);
            let sum =
                |time: &dyn Fn(&View) -> u32| recent().map(|v| f64::from(time(v))).sum::<f64>();
            let covered = sum(&|view| view.window).max(1.0);
            let share = |time: f64| (time / covered).min(1.0);
            let silent = now.saturating_sub(known.last);
            let last = known.views.back().map(|(_, view)| view);
            members.push(Member {
                process: known.process.clone(),
                uncalled: share(sum(&|view| view.uncalled)),
                usual_excess: known.usual.known(),
                uncalled_for: last.map_or(0.0, |view| f64::from(view.uncalled_for) / 1e3),
                // The median, because a pause such as a checkpoint shows in one or two views, and a
                // lack of CPU in most.
                starved: median(recent().map(|view| {
                    (f64::from(view.starved) / f64::from(view.window.max(1))).min(1.0)
                })),
                silent_for: (silent >= silence).then_some(silent.as_secs_f64()),
                is_unheard: known.is_unheard,
            });
            if silent >= silence {
                continue; // what it saw before is over
            }
            for view in recent() {
                for connection in &view.connections {
                    self.add_end(&mut links, view, connection, &share, &at, covered);
                    if view.sequence == known.sequence
                        && connection.kibibytes > 0
                        && let Some(gathered) = links.get_mut(&connection.id)
                    {
                        gathered.link.moves = true;
                    }
                }
            }
        }
        let mut links: HashMap<u64, Link> =
            links.into_iter().map(|(id, gathered)| (id, gathered.link())).collect();
        // The predecessor's connections are unknown. It may be the missing end of connections that
        // stand still.
        let predecessor = self.predecessor.and_then(|id| at.get(&id)).copied();
        if let Some(it) = predecessor.filter(|it| members[*it].silent_for.is_some()) {
            for link in links.values_mut().filter(|link| !link.moves) {
                if link.from.is_none() {
                    link.from = Some(it);
                } else if link.to.is_none() {
                    link.to = Some(it);
                }
            }
        }
        let window = self.window().as_secs_f64();
        for link in
            links.values_mut().filter(|link| link.to.is_none() || link.unacknowledged <= 0.0)
        {
            // Without the receiver's view, or with a device that reports whole messages only, the
            // sender's count of missing buffers stands in.
            link.unposted = link.unposted.max(link.refused);
        }
        let mut links: Vec<(u64, Link)> = links.into_iter().collect();
        links.sort_by_key(|(id, _)| *id);
        (Job { window, members, links: links.into_iter().map(|(_, link)| link).collect() }, ids)
    }

    /// Adds one end's view of a connection.
    fn add_end(
        &self,
        links: &mut HashMap<u64, Gathered>,
        view: &View,
        connection: &ConnectionView,
        share: &dyn Fn(f64) -> f64,
        at: &HashMap<u64, usize>,
        covered: f64,
    ) {
        let share = |time: u32| share(time.into());
        // Connections beyond the maximum have no entry.
        let Some(ends) = self.ends.get(&connection.id) else { return };
        let gathered = links.entry(connection.id).or_insert_with(|| {
            let [from, to] = ends.processes;
            let member = |id: Option<u64>| id.and_then(|id| at.get(&id).copied());
            let link = Link { from: member(from), to: member(to), ..Link::default() };
            Gathered { link, ..Gathered::default() }
        });
        let link = &mut gathered.link;
        let device = view.devices.get(usize::from(connection.device)).cloned().unwrap_or_default();
        let rate = f64::from(connection.kibibytes) * 1024.0 * 1e3 / covered;
        if connection.is_sender {
            link.from_device = device;
            link.pending += share(connection.outstanding);
            link.unacknowledged += share(connection.unacknowledged);
            link.refused += share(connection.peer);
            link.rate += rate;
            gathered.has_sender = true;
        } else {
            link.to_device = device;
            link.wanted += share(connection.outstanding);
            link.unposted += share(connection.unposted);
            gathered.arriving += share(connection.wire);
            gathered.received += rate;
        }
        link.outstanding_for =
            link.outstanding_for.max(f64::from(connection.outstanding_for) / 1e3);
        link.round_trip = link.round_trip.max(f64::from(connection.round_trip) / 1e6);
        link.retransmits += f64::from(connection.retransmits) * 1e3 / covered;
        link.is_unanswered |= connection.is_unanswered;
    }

    /// Updates each process's usual lateness while the job works and the process is not suspected.
    fn learn(&mut self, job: &Job, ids: &[u64]) {
        let ranks = job.members.iter().zip(job.ranks()).filter(|(_, is_rank)| *is_rank);
        let middle = median(ranks.map(|(member, _)| member.uncalled));
        if middle > IDLE || job.links.iter().all(|link| link.rate <= 0.0) {
            return;
        }
        for (id, member) in ids.iter().zip(&job.members) {
            let is_suspected = self.suspicions.iter().any(|suspicion| {
                let place = &suspicion.suspect.place;
                (place.rank, &place.host) == (member.process.rank, &member.process.host)
            });
            if member.silent_for.is_some() || is_suspected {
                continue;
            }
            if let Some(known) = self.processes.get_mut(id) {
                known.usual.add(member.uncalled - middle);
            }
        }
    }

    /// Updates the suspicions: a suspect is reported once enough judgements named it, and dropped
    /// once enough omitted it.
    fn weigh(&mut self, named: &[Suspect], now: Duration) {
        for suspicion in &mut self.suspicions {
            match named.iter().find(|suspect| suspect.is_same(&suspicion.suspect)) {
                Some(suspect) => {
                    suspicion.suspect = suspect.clone();
                    (suspicion.seen, suspicion.missed) = (suspicion.seen + 1, 0);
                    suspicion.firm += u32::from(!suspect.may_pass);
                }
                None => suspicion.missed += 1,
            }
            suspicion.is_told |=
                suspicion.firm >= STEADY || suspicion.seen >= STEADY_IF_IT_MAY_PASS;
            let held = now.saturating_sub(suspicion.since).as_secs_f64();
            suspicion.suspect.for_s = suspicion.suspect.for_s.max(held);
        }
        self.suspicions.retain(|suspicion| suspicion.missed <= suspicion.may_miss());
        for suspect in named {
            if !self.suspicions.iter().any(|known| known.suspect.is_same(suspect)) {
                self.suspicions.push(Suspicion {
                    suspect: suspect.clone(),
                    since: now,
                    seen: 1,
                    firm: u32::from(!suspect.may_pass),
                    missed: 0,
                    is_told: false,
                });
            }
        }
        // Oldest first: sorting by share would reorder them from verdict to verdict and look like
        // news.
        self.suspicions.sort_by_key(|suspicion| suspicion.since);
    }
}

impl Suspicion {
    /// Number of consecutive judgements that may omit it before it is dropped.
    fn may_miss(&self) -> u32 {
        match (self.suspect.class, self.is_told) {
            (Class::Late, _) if self.suspect.may_pass => PAUSES,
            (_, true) => STEADY - 1,
            (_, false) => 0,
        }
    }
}

/// The main state of each of the first members, for the timeline.
fn moment(job: &Job, now: Duration) -> Moment {
    let count = job.members.len().min(MAX_ROWS);
    let (mut wire, mut peer) = (vec![0.0_f64; count], vec![0.0_f64; count]);
    for link in &job.links {
        let mut add = |at: Option<usize>, waits: f64| {
            if let Some(at) = at.filter(|at| *at < count) {
                wire[at] = wire[at].max(link.wire());
                peer[at] = peer[at].max(waits);
            }
        };
        add(link.from, link.waits_for_receiver());
        add(link.to, link.waits_for_sender());
    }
    let states = job.members[..count].iter().zip(wire.into_iter().zip(peer));
    let states = states.map(|(member, (wire, peer))| {
        let state = if member.silent_for.is_some() {
            State::Silent
        } else if member.uncalled >= wire.max(peer) {
            State::Uncalled
        } else if wire >= peer {
            State::Wire
        } else {
            State::Peer
        };
        (member.process.clone(), state)
    });
    Moment { at: now, states: states.collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verdict::Place;

    /// One that does not pass.
    fn suspect(class: Class, host: &str, share: f64) -> Suspect {
        Suspect {
            class,
            place: Place { host: host.to_owned(), ..Place::default() },
            direction: None,
            peer: None,
            or_card: false,
            may_pass: false,
            share,
            for_s: 0.0,
            waiting: 1,
            confidence: 0.9,
            evidence: String::new(),
        }
    }

    /// The share in which a process gets no processor, of which that much is said by its views of a
    /// second each.
    fn starved(milliseconds: [u32; 8]) -> f64 {
        let mut collector = Collector::new(1);
        for (sequence, starved) in (1..).zip(milliseconds) {
            let view = View {
                process: Process { id: 7, ..Process::default() },
                sequence,
                window: 1000,
                starved,
                connections_open: 1,
                ..View::default()
            };
            collector.add(view, Duration::from_secs(sequence.into()));
        }
        let (job, _) = collector.job(Duration::from_secs(8));
        job.members[0].starved
    }

    /// A verdict on a process that has sent one view and no other, while its peer waits for it and
    /// moves bytes for some seconds.
    fn verdict_on_silent(moves_for: u32) -> Verdict {
        verdict_on_silent_after(30, moves_for)
    }

    /// The same, after so many seconds.
    fn verdict_on_silent_after(seconds: u32, moves_for: u32) -> Verdict {
        let mut collector = Collector::new(1);
        let view = |id: u64, sequence: u32, kibibytes: u32| View {
            process: Process { id, rank: Some(id as u32), ..Process::default() },
            sequence,
            window: 1000,
            connections_open: 1,
            connections: vec![ConnectionView {
                id: 9,
                is_sender: id == 0,
                outstanding: 1000,
                outstanding_for: 1000 * sequence,
                kibibytes,
                ..ConnectionView::default()
            }],
            ..View::default()
        };
        collector.add(view(0, 1, 5000), Duration::from_secs(1));
        for sequence in 1..seconds {
            let now = Duration::from_secs(sequence.into());
            collector.add(view(1, sequence, if sequence <= moves_for { 5000 } else { 0 }), now);
            collector.judge(now);
        }
        collector.verdict().clone()
    }

    #[test]
    fn who_moves_bytes_and_is_not_heard_is_not_stopped() {
        let stopped = verdict_on_silent(0);
        assert_eq!(stopped.suspects[0].place.rank, Some(0), "{}", stopped.text);
        // The kernel sends what it had written.
        let stopped = verdict_on_silent(8);
        assert_eq!(stopped.suspects[0].place.rank, Some(0), "{}", stopped.text);
        // The job may stand still afterwards, for another reason.
        for moves_for in [30, 15] {
            let unheard = verdict_on_silent(moves_for);
            assert!(unheard.suspects.is_empty(), "{}", unheard.text);
        }
    }

    /// It is what stops the job, until its peer closes the connection.
    #[test]
    fn who_is_stopped_is_named_for_as_long_as_others_wait() {
        let verdict = verdict_on_silent_after(1000, 0);
        assert_eq!(verdict.suspects[0].place.rank, Some(0), "{}", verdict.text);
        assert!(verdict.text.contains("does not answer for 99"), "{}", verdict.text);
    }

    /// As after a job has shrunk.
    #[test]
    fn who_is_silent_and_has_no_connections_is_forgotten_soon() {
        let mut collector = Collector::new(1);
        let view = |id: u64, sequence: u32, connection: u64| View {
            connections: vec![ConnectionView {
                id: connection,
                is_sender: id.is_multiple_of(2),
                ..Default::default()
            }],
            ..view(id, sequence)
        };
        for sequence in 1..60 {
            let now = Duration::from_secs(sequence.into());
            // Processes 3 to 6 end without a word.
            for id in 1..if sequence < 10 { 7 } else { 3 } {
                collector.add(view(id, sequence, if id < 3 { 1 } else { id / 2 }), now);
            }
            collector.judge(now);
        }
        assert_eq!(collector.verdict().ranks, 2);
    }

    #[test]
    fn verdict_names_two_at_most() {
        let mut collector = Collector::new(1);
        let suspect = |host: &str| Suspect { may_pass: true, ..suspect(Class::Late, host, 0.5) };
        // They take turns.
        for second in 0..60_u64 {
            let names = ["n1", "n2", "n3"];
            let first = second as usize % 3;
            let named = [suspect(names[first]), suspect(names[(first + 1) % 3])];
            collector.weigh(&named, Duration::from_secs(second));
        }
        let mut found = Verdict::default();
        collector.confirm(&mut found);
        assert_eq!(found.suspects.len(), 2);
    }

    /// As in a checkpoint, which looks like a process that is stuck after some seconds.
    #[test]
    fn who_may_pass_and_once_may_not_is_not_named_for_that() {
        let mut collector = Collector::new(1);
        let suspect = |may_pass| Suspect { may_pass, ..suspect(Class::Late, "n1", 0.5) };
        let mut named_after = None;
        for second in 1..12_u64 {
            collector.weigh(&[suspect(second < 6)], Duration::from_secs(second));
            if collector.suspicions[0].is_told {
                named_after.get_or_insert(second);
            }
        }
        assert_eq!(named_after, Some(9));
    }

    /// As in a view that has no room for it.
    #[test]
    fn receiver_tells_what_the_sender_does_not() {
        let mut collector = Collector::new(1);
        let connection = |is_sender| ConnectionView {
            id: 9,
            is_sender,
            outstanding: 1000,
            wire: 800,
            kibibytes: 100,
            ..ConnectionView::default()
        };
        let view = |id: u64, sequence, connections| View { connections, ..view(id, sequence) };
        let at = Duration::from_secs;
        collector.add(view(0, 1, vec![connection(true)]), at(1));
        for sequence in 2..30 {
            collector.add(view(0, sequence, Vec::new()), at(sequence.into()));
            collector.add(view(1, sequence, vec![connection(false)]), at(sequence.into()));
        }
        let (job, _) = collector.job(at(29));
        let link = &job.links[0];
        assert!((link.wire() - 0.8).abs() < 0.01 && link.rate > 0.0, "{link:?}");
        assert_eq!(job.members[link.from.unwrap()].process.id, 0);
    }

    #[test]
    fn suspects_stay_in_the_order_in_which_they_came() {
        let mut collector = Collector::new(1);
        let suspect = |host: &str, share| suspect(Class::Link, host, share);
        for second in 1..20_u64 {
            let now = Duration::from_secs(second);
            let more = if second % 2 == 0 { 0.1 } else { -0.1 };
            let mut named = vec![suspect("n1", 0.5)];
            if second > 5 {
                named.push(suspect("n2", 0.5 + more));
                named.sort_by(|a, b| b.share.total_cmp(&a.share));
            }
            collector.weigh(&named, now);
            let mut found = Verdict { outcome: Outcome::Suspect, ..Verdict::default() };
            collector.confirm(&mut found);
            let hosts: Vec<&str> =
                found.suspects.iter().map(|suspect| suspect.place.host.as_str()).collect();
            let expected: &[&str] = match second {
                0..4 => &[],
                4..9 => &["n1"],
                _ => &["n1", "n2"],
            };
            assert_eq!(hosts, expected, "second {second}");
        }
    }

    /// A verdict of rank 1, which has succeeded rank 0. It exchanges with rank 0 and rank 2.
    fn verdict_of_successor(kibibytes: u32, outstanding: u32) -> Verdict {
        let process = |rank: u32| Process {
            id: rank.into(),
            rank: Some(rank),
            host: format!("n{rank}"),
            ..Process::default()
        };
        let mut collector = Collector::new(1);
        collector.succeed(process(0), Duration::ZERO);
        for sequence in 1..20 {
            let now = Duration::from_secs(sequence.into());
            let end = |id: u64, is_sender| ConnectionView {
                id,
                is_sender,
                // What ranks 1 and 2 have for each other is done.
                outstanding: if id == 12 { 0 } else { outstanding },
                outstanding_for: if id == 12 { 0 } else { outstanding * sequence },
                kibibytes,
                ..ConnectionView::default()
            };
            for (rank, connections) in [
                (1, vec![end(10, true), end(11, false), end(12, true)]),
                (2, vec![end(12, false), end(20, false)]),
            ] {
                let view = View {
                    process: process(rank),
                    sequence,
                    window: 1000,
                    connections_open: 3,
                    connections,
                    ..View::default()
                };
                collector.add(view, now);
            }
            collector.judge(now);
        }
        collector.verdict().clone()
    }

    #[test]
    fn a_collector_that_stops_is_named_by_its_successor() {
        let stopped = verdict_of_successor(0, 1000);
        assert_eq!(stopped.suspects[0].place.host, "n0", "{}", stopped.text);
        assert_eq!(stopped.suspects[0].class, Class::Late);
        assert_eq!(stopped.collector_host, "n1");
        for (verdict, what) in [
            (verdict_of_successor(5000, 1000), "the job goes on"),
            (verdict_of_successor(0, 0), "nobody waits: it has ended"),
        ] {
            assert!(verdict.suspects.is_empty(), "{what}: {}", verdict.text);
        }
    }

    #[test]
    fn one_pause_is_no_lack_of_processors() {
        assert!(starved([0, 0, 0, 950, 950, 0, 0, 0]) < 0.01);
        assert!(starved([0, 0, 0, 300, 300, 300, 300, 300]) > 0.29);
    }

    /// The worst suspect of a moment may be new, and the sentence is on the one that is certain.
    #[test]
    fn the_sentence_is_on_who_is_certain() {
        let suspect = |host: &str, share| suspect(Class::Late, host, share);
        let (old, new) = (suspect("old", 0.3), suspect("new", 0.8));
        let mut collector = Collector::new(1);
        for _ in 0..STEADY {
            collector.weigh(std::slice::from_ref(&old), Duration::ZERO);
        }
        let named = vec![new.clone(), old];
        collector.weigh(&named, Duration::ZERO);
        let mut found = Verdict {
            ranks: 8,
            outcome: Outcome::Suspect,
            text: sentence(&new, 8),
            suspects: named,
            ..Verdict::default()
        };
        collector.confirm(&mut found);
        assert_eq!(found.suspects.len(), 1);
        assert!(found.text.contains("old") && !found.text.contains("new"), "{}", found.text);
    }

    fn view(id: u64, sequence: u32) -> View {
        let process = Process { id, ..Process::default() };
        View { process, sequence, window: 1000, connections_open: 1, ..View::default() }
    }

    #[test]
    fn collector_judges_views_of_any_numbers() {
        let mut collector = Collector::new(1);
        let all = u32::MAX;
        let connection = ConnectionView { outstanding: all, kibibytes: all, ..Default::default() };
        for sequence in 1..4 {
            collector.add(
                View {
                    window: all,
                    uncalled: all,
                    uncalled_for: all,
                    starved: all,
                    connections: vec![connection.clone(); 2],
                    ..view(2, sequence)
                },
                Duration::from_secs(1),
            );
        }
        assert_eq!(collector.judge(Duration::from_secs(1)).ranks, 1);
    }

    #[test]
    fn collector_keeps_few_views_of_a_process_that_sends_many() {
        let mut collector = Collector::new(1);
        for sequence in 1..10_000 {
            collector.add(view(2, sequence), Duration::from_secs(1));
        }
        let known = &collector.processes[&2];
        assert!((8..100).contains(&known.views.len()), "{}", known.views.len());
        assert_eq!(known.views.back().map(|(_, view)| view.sequence), Some(9999), "the last");
    }
}
