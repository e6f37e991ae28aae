//! Elects the process of a job that collects the views: the lowest rank that is alive.
//!
//! Processes know only the neighbours that they have connections with. Each tells its neighbours of
//! the best candidate that it knows. A candidate counts its own heartbeats. A process drops a
//! candidate whose heartbeats stop.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::Duration;

/// Encoded length of a [`Candidate`], in bytes.
pub const CANDIDATE_BYTES: usize = 4 + 8 + 16 + 2 + 8;

/// A candidate is dropped after this time without a new heartbeat.
pub const MAX_SILENCE: Duration = Duration::from_secs(5);
/// A process that has not beaten for this long was itself stopped, so the others' silence proves
/// nothing.
const PAUSE: Duration = Duration::from_secs(3);
/// How long a dropped candidate cannot be elected again.
const PENALTY: Duration = Duration::from_secs(30);
const MAX_PENALTIES: usize = 16;

/// A process that can collect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Its rank; `u32::MAX` without one.
    pub rank: u32,
    /// The identifier of the process.
    pub id: u64,
    /// Where it receives views.
    pub address: SocketAddr,
    /// Grows while it is alive.
    pub beat: u64,
}

impl Candidate {
    fn order(&self) -> (u32, u64) {
        (self.rank, self.id)
    }

    /// The bytes to send.
    pub fn encode(&self) -> [u8; CANDIDATE_BYTES] {
        let mut out = [0; CANDIDATE_BYTES];
        out[..4].copy_from_slice(&self.rank.to_le_bytes());
        out[4..12].copy_from_slice(&self.id.to_le_bytes());
        let ip = match self.address.ip() {
            IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            IpAddr::V6(v6) => v6,
        };
        out[12..28].copy_from_slice(&ip.octets());
        out[28..30].copy_from_slice(&self.address.port().to_le_bytes());
        out[30..].copy_from_slice(&self.beat.to_le_bytes());
        out
    }

    /// Reads what [`Candidate::encode`] wrote.
    pub fn decode(bytes: &[u8; CANDIDATE_BYTES]) -> Self {
        let mut octets = [0; 16];
        octets.copy_from_slice(&bytes[12..28]);
        let number = |from: usize, to: usize| {
            bytes[from..to].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
        };
        let address = (Ipv6Addr::from(octets).to_canonical(), number(28, 30) as u16).into();
        Self { rank: number(0, 4) as u32, id: number(4, 12), address, beat: number(30, 38) }
    }
}

/// One process's part in the election.
#[derive(Debug)]
pub struct Election {
    me: Candidate,
    best: Candidate,
    /// When the best candidate's last new heartbeat came.
    seen: Duration,
    /// When this process last beat.
    beaten: Duration,
    /// Identifiers of dropped candidates, and when each was dropped.
    penalties: Vec<(u64, Duration)>,
}

impl Election {
    /// Starts with this process as the only candidate. All times count from the same arbitrary
    /// moment.
    pub fn new(me: Candidate, now: Duration) -> Self {
        Self { me, best: me, seen: now, beaten: now, penalties: Vec::new() }
    }

    /// The best candidate known.
    pub fn collector(&self) -> Candidate {
        self.best
    }

    /// This process as a candidate.
    pub fn me(&self) -> Candidate {
        self.me
    }

    /// Whether this process is the collector.
    pub fn is_collector(&self) -> bool {
        self.best.id == self.me.id
    }

    /// Handles a neighbour's best candidate. Returns whether it is news to pass on to the other
    /// neighbours.
    pub fn heard(&mut self, candidate: Candidate, now: Duration) -> bool {
        if candidate.id == self.me.id || self.is_penalized(candidate.id, now) {
            return false;
        }
        let same = candidate.id == self.best.id;
        let news = if same {
            candidate.beat > self.best.beat
        } else {
            candidate.order() < self.best.order()
        };
        if news {
            (self.best, self.seen) = (candidate, now);
        }
        news
    }

    /// Notes that this process answered a view: it is alive and collects, so its heartbeats need
    /// not come through neighbours.
    pub fn answered(&mut self, id: u64, now: Duration) {
        if id == self.best.id {
            self.seen = now;
        }
    }

    /// Whether this process was dropped as a candidate less than [`PENALTY`] ago.
    pub fn has_deposed(&self, id: u64, now: Duration) -> bool {
        self.is_penalized(id, now)
    }

    fn is_penalized(&self, id: u64, now: Duration) -> bool {
        self.penalties.iter().any(|(other, since)| *other == id && now < *since + PENALTY)
    }

    /// Beats, and drops a silent candidate. To be called once a second. Returns the candidate to
    /// announce to the neighbours if it is this process or has just changed.
    pub fn beat(&mut self, now: Duration) -> Option<Candidate> {
        self.me.beat += 1;
        if now >= self.beaten + PAUSE {
            self.seen = now;
        }
        self.beaten = now;
        if self.is_collector() {
            self.best = self.me;
            self.seen = now;
            return Some(self.me);
        }
        if now < self.seen + MAX_SILENCE {
            return None;
        }
        self.penalties.retain(|(_, since)| now < *since + PENALTY);
        self.penalties.truncate(MAX_PENALTIES - 1);
        self.penalties.push((self.best.id, now));
        (self.best, self.seen) = (self.me, now);
        Some(self.me)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn candidate(rank: u32) -> Candidate {
        let address = ([10, 0, 0, rank as u8], 1000).into();
        Candidate { rank, id: 100 - u64::from(rank), address, beat: 0 }
    }

    /// A ring of processes. Stopped ones neither beat nor pass anything on.
    struct Ring {
        all: Vec<Election>,
        stopped: Vec<bool>,
        now: Duration,
        messages: usize,
    }

    impl Ring {
        fn new(ranks: &[u32]) -> Self {
            let all = ranks.iter().map(|rank| Election::new(candidate(*rank), Duration::ZERO));
            let all: Vec<_> = all.collect();
            Self { stopped: vec![false; all.len()], all, now: Duration::ZERO, messages: 0 }
        }

        fn tell(&mut self, from: usize, news: Candidate) {
            let count = self.all.len();
            let mut queue = vec![(from, news)];
            while let Some((from, news)) = queue.pop() {
                for to in [(from + 1) % count, (from + count - 1) % count] {
                    self.messages += 1;
                    if !self.stopped[to] && self.all[to].heard(news, self.now) {
                        queue.push((to, news));
                    }
                }
            }
        }

        fn seconds(&mut self, count: u32) {
            for _ in 0..count {
                self.now += SECOND;
                for at in 0..self.all.len() {
                    if !self.stopped[at]
                        && let Some(news) = self.all[at].beat(self.now)
                    {
                        self.tell(at, news);
                    }
                }
            }
        }

        fn collectors(&self) -> Vec<u32> {
            let live = self.all.iter().zip(&self.stopped).filter(|(_, stopped)| !**stopped);
            live.map(|(election, _)| election.collector().rank).collect()
        }
    }

    #[test]
    fn election_agrees_on_the_lowest_rank_of_a_ring() {
        let mut ring = Ring::new(&[4, 2, 7, 0, 9, 3]);
        ring.seconds(2);
        assert_eq!(ring.collectors(), [0; 6]);
        let before = ring.messages;
        ring.seconds(1);
        assert!(ring.messages - before <= 12, "each tells its two neighbours once");
    }

    #[test]
    fn election_replaces_a_collector_that_stops_and_takes_it_back_later() {
        let mut ring = Ring::new(&[4, 2, 7, 0, 9, 3]);
        ring.seconds(2);
        ring.stopped[3] = true;
        // Not before it is silent for long, and then everybody follows the next one at once.
        ring.seconds(4);
        assert_eq!(ring.collectors(), [0; 5]);
        ring.seconds(4);
        assert_eq!(ring.collectors(), [2; 5]);
        ring.stopped[3] = false;
        ring.seconds(3);
        assert_eq!(ring.collectors()[..3], [2; 3], "it has to stay a while");
        ring.seconds(40);
        assert_eq!(ring.collectors(), [0; 6]);
    }

    #[test]
    fn election_stays_for_who_was_stopped_itself() {
        let mut ring = Ring::new(&[4, 2, 7, 0, 9, 3]);
        ring.seconds(2);
        ring.stopped[2] = true;
        ring.seconds(20);
        ring.stopped[2] = false;
        ring.seconds(1);
        assert_eq!(ring.collectors(), [0; 6]);
    }

    #[test]
    fn election_stays_for_who_gets_answers_and_no_beats() {
        let mut election = Election::new(candidate(5), Duration::ZERO);
        assert!(election.heard(candidate(0), Duration::ZERO));
        let mut seconds = (1..).map(Duration::from_secs);
        for now in seconds.by_ref().take(20) {
            election.beat(now);
            election.answered(candidate(0).id, now);
            election.answered(candidate(1).id, now);
        }
        assert_eq!(election.collector().rank, 0);
        seconds.take(6).for_each(|now| _ = election.beat(now));
        assert!(election.is_collector(), "without answers too it is gone");
    }

    #[test]
    fn election_candidate_is_read_as_it_was_written() {
        let v6 = Candidate { address: "[fd00::1]:9".parse().expect("an address"), ..candidate(1) };
        for candidate in [candidate(3), v6, Candidate { beat: u64::MAX, ..v6 }] {
            assert_eq!(Candidate::decode(&candidate.encode()), candidate);
        }
    }
}
