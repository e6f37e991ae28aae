//! A communicator's upstream servers. The sum of its ranks' parts is sent there as a rank's part
//! is, and comes back reduced over all leaves.

mod join;
mod link;
mod partial_sum;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use evenkeel_reduction::client::JoinedServer;
use evenkeel_transport::Notify;

pub(crate) use join::UpstreamServers;
pub(crate) use partial_sum::{PartialSum, UpstreamResult, upstream_bytes};

use link::UpstreamLink;

/// The upstream servers of one communicator.
pub(crate) struct Upstream {
    /// In the same order at all leaves: pieces go to the servers in turn.
    links: Vec<UpstreamLink>,
    /// Number of the piece that is sent next: all leaves send theirs in the same order.
    next: u64,
    /// Sums of later pieces.
    waiting: BTreeMap<u64, PartialSum>,
}

impl Upstream {
    /// Over these connections.
    pub(crate) fn new(joined: Vec<JoinedServer>) -> Self {
        let links = joined.into_iter().map(UpstreamLink::new).collect();
        Self { links, next: 0, waiting: BTreeMap::new() }
    }

    /// Number of servers.
    pub(crate) fn servers(&self) -> usize {
        self.links.len()
    }

    /// Sets what each server's connections notify.
    pub(crate) fn notify(&self, notify: impl Fn(usize) -> Arc<dyn Notify>) {
        self.links.iter().enumerate().for_each(|(server, link)| link.notify(&notify(server)));
    }

    /// Sends the sum of the piece with this number, after those of all pieces before it.
    pub(crate) fn send(&mut self, number: u64, sum: PartialSum, piece_bytes: usize) {
        self.waiting.insert(number, sum);
        while let Some(sum) = self.waiting.remove(&self.next) {
            let servers = self.links.len() as u64;
            self.links[(self.next % servers) as usize].push(self.next, sum, piece_bytes);
            self.next += 1;
        }
    }

    /// Sends and receives what is possible now. Returns the results that have arrived.
    ///
    /// # Errors
    /// When a server is lost or reports a failure. The error names it.
    pub(crate) fn progress(&mut self, now: Instant) -> Result<Vec<UpstreamResult>, String> {
        let mut results = vec![];
        for link in &mut self.links {
            link.progress(now, &mut results).map_err(|error| format!("upstream {error}"))?;
        }
        Ok(results)
    }

    /// Reports the communicator's failure to all servers.
    pub(crate) fn report_failure(&mut self, why: &str) {
        self.links.iter_mut().for_each(|link| link.report_failure(why));
    }

    /// Receives the servers' answers to the report of a failure. Returns true once each has read
    /// it, or is lost.
    pub(crate) fn poll_answers(&mut self) -> bool {
        // All are asked: each has to receive its answer.
        let mut have_all = true;
        for link in &mut self.links {
            have_all &= link.poll_answer();
        }
        have_all
    }
}
