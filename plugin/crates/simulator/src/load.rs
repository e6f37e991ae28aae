//! Connections, and what they carry.

use crate::ends::Ends;
use crate::evenkeel::{EvenkeelConnection, EvenkeelSettings};
use crate::events::Time;
use crate::kernel::{Kernel, Notice};
use crate::sockets::{Sharing, SocketsConnection};
use crate::tcp::TcpSettings;

/// Bytes that both sides of a connection's flow may hold: the maxima of a send and a receive
/// buffer.
const MAX_HELD: u64 = 11 << 20;
/// Flows that a connection may have at a time: what it keeps, a trial, and replacements.
const MAX_FLOWS: usize = 40;

/// Events that are to come: packets, acknowledgements and timers.
const MAX_EVENTS: usize = 200_000;

/// What carries messages.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Contender {
    Evenkeel(EvenkeelSettings),
    /// So many sockets for each connection.
    Sockets(usize, Sharing),
}

#[derive(Debug)]
enum Carrier {
    Evenkeel(Box<EvenkeelConnection>),
    Sockets(SocketsConnection),
}

/// A connection, and what its ends see.
#[derive(Debug)]
pub(crate) struct Connection {
    carrier: Carrier,
    pub(crate) ends: Ends,
}

impl Connection {
    /// Opens a connection between two hosts. Its notices have this owner.
    pub(crate) fn open(
        kernel: &mut Kernel,
        owner: usize,
        hosts: [usize; 2],
        tcp: TcpSettings,
        contender: Contender,
    ) -> Self {
        let carrier = match contender {
            Contender::Evenkeel(settings) => Carrier::Evenkeel(Box::new(EvenkeelConnection::open(
                kernel, owner, hosts, tcp, settings,
            ))),
            Contender::Sockets(count, sharing) => {
                Carrier::Sockets(SocketsConnection::open(kernel, owner, hosts, tcp, count, sharing))
            }
        };
        Self { carrier, ends: Ends::default() }
    }

    pub(crate) fn handle(&mut self, kernel: &mut Kernel, notice: Notice) {
        let ends = &mut self.ends;
        match &mut self.carrier {
            Carrier::Evenkeel(connection) => connection.handle(kernel, notice, ends),
            Carrier::Sockets(connection) => connection.handle(kernel, notice, ends),
        }
    }

    /// Sends messages of `size` bytes until all `below` this number are sent or `depth` of them are
    /// in progress, and posts buffers for as many.
    pub(crate) fn fill(&mut self, kernel: &mut Kernel, size: u64, depth: u64, below: u64) {
        let ends = &mut self.ends;
        if let Carrier::Evenkeel(connection) = &mut self.carrier {
            while ends.posted < ends.received + depth {
                ends.posted += 1;
                connection.post(kernel, size, ends);
            }
        }
        while ends.pushed < below && ends.pushed < ends.sent + depth {
            match &mut self.carrier {
                Carrier::Evenkeel(connection) => connection.send(kernel, size, ends),
                Carrier::Sockets(connection) => connection.send(kernel, size, ends),
            }
            ends.pushed += 1;
        }
    }

    /// Checks what must hold of a connection's memory.
    pub(crate) fn check_memory(&mut self, kernel: &Kernel, depth: u64) {
        let Carrier::Evenkeel(connection) = &self.carrier else { return };
        let (messages, bytes) = connection.held(kernel);
        let flows = connection.flows();
        if messages > depth {
            self.ends.fail(format!("{messages} messages are kept, and {depth} are sent"));
        }
        if kernel.pending() > MAX_EVENTS {
            self.ends.fail(format!("{} events are to come", kernel.pending()));
        }
        if flows > MAX_FLOWS || bytes > MAX_HELD * flows as u64 {
            self.ends.fail(format!("{flows} flows hold {bytes} bytes"));
        }
    }

    /// Closes all flows. Notices of them may still come.
    pub(crate) fn close(&mut self, kernel: &mut Kernel) {
        match &mut self.carrier {
            Carrier::Evenkeel(connection) => connection.close(kernel),
            Carrier::Sockets(connection) => connection.close(kernel),
        }
    }

    /// Most flows at a time, and all that were opened.
    pub(crate) fn flows(&self) -> (usize, usize) {
        match &self.carrier {
            Carrier::Evenkeel(connection) => (connection.most_flows, connection.opened),
            Carrier::Sockets(_) => (0, 0),
        }
    }
}

/// A load of two hosts: messages from the first to the second.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transfer {
    pub(crate) connections: usize,
    pub(crate) size: u64,
    pub(crate) depth: u64,
    /// What the first time carries is not counted.
    pub(crate) warm_up: Time,
    pub(crate) length: Time,
}

/// What a run has measured.
#[derive(Clone, Debug, Default)]
pub(crate) struct Measured {
    /// Bytes per second.
    pub(crate) rate: f64,
    /// Most flows of a connection at a time, and all that were opened.
    pub(crate) flows: (usize, usize),
    /// Events that were handled.
    pub(crate) events: u64,
    /// The longest time in which no message was complete, from the first one on.
    pub(crate) longest_gap: Time,
}

impl Transfer {
    /// Runs it.
    ///
    /// # Errors
    /// What must hold and does not.
    pub(crate) fn run(
        &self,
        kernel: &mut Kernel,
        tcp: TcpSettings,
        contender: Contender,
    ) -> Result<Measured, String> {
        let open = |owner| Connection::open(kernel, owner, [0, 1], tcp, contender);
        let mut all: Vec<_> = (0..self.connections).map(open).collect();
        for connection in &mut all {
            connection.fill(kernel, self.size, self.depth, u64::MAX);
        }
        let mut measured = Measured::default();
        let (mut warm, mut last) = (0, 0);
        for until in [self.warm_up, self.length] {
            warm = std::mem::take(&mut measured.rate) as u64;
            while let Some((owner, notice)) = kernel.next(until) {
                let connection = &mut all[owner];
                let before = connection.ends.bytes;
                connection.handle(kernel, notice);
                connection.fill(kernel, self.size, self.depth, u64::MAX);
                if matches!(notice, Notice::Timer(_)) {
                    connection.check_memory(kernel, self.depth);
                }
                if let Some(failure) = &connection.ends.failure {
                    return Err(format!("at {} ms: {failure}", kernel.now() / 1_000_000));
                }
                if connection.ends.bytes > before {
                    measured.longest_gap = measured.longest_gap.max(kernel.now() - last);
                    last = kernel.now();
                }
            }
            measured.rate = all.iter().map(|connection| connection.ends.bytes as f64).sum();
        }
        measured.longest_gap = measured.longest_gap.max(kernel.now() - last);
        let time = (self.length - self.warm_up) as f64 / 1e9;
        measured.rate = (measured.rate - warm as f64) / time;
        measured.events = kernel.handled();
        measured.flows = all.iter().map(Connection::flows).max().unwrap_or_default();
        Ok(measured)
    }
}
