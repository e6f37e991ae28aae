//! Who waits for whom.

use crate::job::Job;
use crate::median::median;

/// Minimum share of the time for a wait to be followed from member to member.
const MIN_WAIT: f64 = 0.05;

/// Who waits for whom.
pub(crate) struct Waits {
    /// For each member: which members wait for it, and for what share of the time.
    waiters: Vec<Vec<(usize, f64)>>,
    /// Each member's longest wait, for a peer or for bytes under way.
    longest: Vec<f64>,
    /// Whether each member is a rank.
    pub(crate) ranks: Vec<bool>,
    /// Whether each member still sends views.
    known: Vec<bool>,
}

impl Waits {
    pub(crate) fn new(job: &Job, ranks: Vec<bool>) -> Self {
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

    /// The median over the ranks of the share of time lost in the longest wait.
    pub(crate) fn lost(&self) -> f64 {
        let is_known = |at: &usize| self.ranks[*at] && self.known[*at];
        median((0..self.longest.len()).filter(is_known).map(|at| self.longest[at]))
    }

    /// The longest wait of any rank.
    pub(crate) fn longest_of_ranks(&self) -> f64 {
        let ranks = self.longest.iter().zip(&self.ranks).filter(|(_, is_rank)| **is_rank);
        ranks.map(|(longest, _)| *longest).fold(0.0, f64::max)
    }

    /// The longest wait for this member.
    pub(crate) fn wait_for(&self, member: usize) -> f64 {
        self.waiters[member].iter().map(|(_, share)| *share).fold(0.0, f64::max)
    }

    /// Number of ranks among these members and the members that wait for them, directly or through
    /// others.
    pub(crate) fn held_by(&self, these: &[usize]) -> u32 {
        let mut reached: Vec<bool> = vec![false; self.waiters.len()];
        let mut next: Vec<usize> = these.to_vec();
        these.iter().for_each(|at| reached[*at] = true);
        while let Some(at) = next.pop() {
            for (waits, share) in &self.waiters[at] {
                if *share >= MIN_WAIT && !reached[*waits] {
                    reached[*waits] = true;
                    next.push(*waits);
                }
            }
        }
        reached.iter().zip(&self.ranks).filter(|(reached, is_rank)| **reached && **is_rank).count()
            as u32
    }
}
