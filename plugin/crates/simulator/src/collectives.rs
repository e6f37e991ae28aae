//! Collectives of many hosts.

use evenkeel_testkit::TestRng;

use crate::events::Time;
use crate::kernel::{Kernel, Notice};
use crate::load::{Connection, Contender};
use crate::tcp::TcpSettings;

/// Which collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pattern {
    /// A ring all-reduce: each host passes on what it has received. The order of the ring has
    /// nothing to do with the network's.
    Ring,
    /// Each host sends a message to each other one, to a few at a time, each time to the next in
    /// the order of the hosts.
    AllToAll,
}

/// A collective.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Collective {
    pub(crate) pattern: Pattern,
    pub(crate) hosts: usize,
    /// Bytes of a message, and messages in progress of each host.
    pub(crate) size: u64,
    pub(crate) depth: u64,
    pub(crate) warm_up: Time,
    pub(crate) length: Time,
}

/// What a collective has measured.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Progress {
    /// Bytes per second that the slowest and the average host have received.
    pub(crate) slowest: f64,
    pub(crate) average: f64,
    pub(crate) events: u64,
}

/// Messages that a host of an all-to-all sends by one connection, one after the other.
const MESSAGES: u64 = 8;

impl Collective {
    /// Runs it.
    ///
    /// # Errors
    /// What must hold and does not.
    pub(crate) fn run(
        &self,
        kernel: &mut Kernel,
        tcp: TcpSettings,
        contender: Contender,
    ) -> Result<Progress, String> {
        match self.pattern {
            Pattern::Ring => self.ring(kernel, tcp, contender),
            Pattern::AllToAll => self.all_to_all(kernel, tcp, contender),
        }
    }

    fn ring(
        &self,
        kernel: &mut Kernel,
        tcp: TcpSettings,
        contender: Contender,
    ) -> Result<Progress, String> {
        let order = shuffled(self.hosts, &mut kernel.rng);
        let next = |place: usize| (place + 1) % self.hosts;
        let open = |place: usize| {
            Connection::open(kernel, place, [order[place], order[next(place)]], tcp, contender)
        };
        let mut all: Vec<_> = (0..self.hosts).map(open).collect();
        for connection in &mut all {
            connection.fill(kernel, self.size, self.depth, self.depth);
        }
        let mut before = vec![0; self.hosts];
        for until in [self.warm_up, self.length] {
            before = all.iter().map(|connection| connection.ends.bytes).collect();
            while let Some((place, notice)) = kernel.next(until) {
                self.step(kernel, &mut all[place], notice)?;
                // What a host has received, it may pass on.
                let below = all[place].ends.received + self.depth;
                all[next(place)].fill(kernel, self.size, self.depth, below);
                let previous = (place + self.hosts - 1) % self.hosts;
                let below = all[previous].ends.received + self.depth;
                all[place].fill(kernel, self.size, self.depth, below);
            }
        }
        let bytes =
            all.iter().zip(before).map(|(connection, before)| connection.ends.bytes - before);
        Ok(self.progress(bytes.collect(), kernel))
    }

    fn all_to_all(
        &self,
        kernel: &mut Kernel,
        tcp: TcpSettings,
        contender: Contender,
    ) -> Result<Progress, String> {
        let depth = self.depth as usize;
        let mut all = Vec::new();
        let mut received = vec![0; self.hosts];
        let mut distances = vec![0; self.hosts];
        // A connection and its hosts; none once it has carried its messages.
        let mut open = |kernel: &mut Kernel,
                        all: &mut Vec<Option<(Connection, usize, usize)>>,
                        from: usize| {
            distances[from] = distances[from] % (self.hosts - 1) + 1;
            let to = (from + distances[from]) % self.hosts;
            let mut connection = Connection::open(kernel, all.len(), [from, to], tcp, contender);
            connection.fill(kernel, self.size, 1, MESSAGES);
            all.push(Some((connection, from, to)));
        };
        for host in 0..self.hosts {
            (0..depth).for_each(|_| open(kernel, &mut all, host));
        }
        let mut before = vec![0; self.hosts];
        for until in [self.warm_up, self.length] {
            before.clone_from(&received);
            while let Some((owner, notice)) = kernel.next(until) {
                let Some((connection, from, to)) = all[owner].as_mut() else { continue };
                let bytes = connection.ends.bytes;
                self.step(kernel, connection, notice)?;
                connection.fill(kernel, self.size, 1, MESSAGES);
                received[*to] += connection.ends.bytes - bytes;
                if connection.ends.sent == MESSAGES && connection.ends.received == MESSAGES {
                    let from = *from;
                    connection.close(kernel);
                    all[owner] = None;
                    open(kernel, &mut all, from);
                }
            }
        }
        let bytes = received.iter().zip(before).map(|(bytes, before)| bytes - before);
        Ok(self.progress(bytes.collect(), kernel))
    }

    fn step(
        &self,
        kernel: &mut Kernel,
        connection: &mut Connection,
        notice: Notice,
    ) -> Result<(), String> {
        connection.handle(kernel, notice);
        match &connection.ends.failure {
            None => Ok(()),
            Some(failure) => Err(format!("at {} ms: {failure}", kernel.now() / 1_000_000)),
        }
    }

    fn progress(&self, bytes: Vec<u64>, kernel: &Kernel) -> Progress {
        let time = (self.length - self.warm_up) as f64 / 1e9;
        let slowest = bytes.iter().min().map_or(0.0, |bytes| *bytes as f64 / time);
        let average = bytes.iter().sum::<u64>() as f64 / time / self.hosts as f64;
        Progress { slowest, average, events: kernel.handled() }
    }
}

/// The numbers below this one, in a random order.
fn shuffled(count: usize, rng: &mut TestRng) -> Vec<usize> {
    let mut order: Vec<_> = (0..count).collect();
    (1..count).for_each(|index| order.swap(index, rng.index(index + 1)));
    order
}
