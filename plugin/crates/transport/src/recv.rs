//! The receiving side of a connection.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use evenkeel_wire::{
    ChunkHeader, Claim, HEADER_BYTES, MAX_MESSAGE_BYTES, Reassembly, ReassemblyError,
};
use socket2::Socket;

use crate::Context;
use crate::base::{Base, Direction, InFlight, TURN_BYTES, not_now};
use crate::engine::{Engine, Readiness, Source, Workers};
use crate::error::{Error, ErrorKind};
use crate::request::{MAX_REQUESTS, Operation, Owner, Request};
use crate::sys::{self, RecvBuffer, lock};

/// Receives messages from one peer, in the order in which it sends them.
///
/// Dropping it closes it, at once and whatever is in flight; no buffer is touched afterwards.
pub struct RecvConnection {
    receiver: Arc<Receiver>,
    _engine: Arc<Engine>,
}

impl RecvConnection {
    pub(crate) fn new(receiver: Arc<Receiver>, engine: Arc<Engine>) -> Self {
        Self { receiver, _engine: engine }
    }

    /// Posts a buffer for the next message. `None` when [`MAX_REQUESTS`] are outstanding: try again
    /// later. Never blocks.
    ///
    /// # Errors
    /// The connection's failure.
    pub fn recv(&self, buffer: RecvBuffer) -> Result<Option<Request>, Error> {
        Receiver::recv(&self.receiver, buffer)
    }
}

impl Drop for RecvConnection {
    fn drop(&mut self) {
        self.receiver.come_to_rest();
        self.receiver.base.close();
    }
}

/// Locks are taken in this order: a flow's `reading`, then `queue`.
pub(crate) struct Receiver {
    base: Base,
    /// One per flow. Held while the flow's socket is read.
    reading: Vec<Mutex<Reading>>,
    queue: Mutex<Queue>,
}

struct Queue {
    reassembly: Reassembly<Posted>,
    /// What each flow can still bring.
    flows: Vec<Outlook>,
}

/// What a flow can still bring for the buffers that are posted.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Outlook {
    /// Anything.
    Open,
    /// Nothing before a buffer for this message is posted: its next chunk belongs there.
    WaitsFor(u64),
    /// Nothing: the peer has closed it.
    Ended,
}

#[derive(Clone)]
struct Posted {
    buffer: RecvBuffer,
    operation: Arc<Operation>,
}

struct Reading {
    /// Nothing may be read any more.
    closed: bool,
    stage: Stage,
    header: [u8; HEADER_BYTES],
}

enum Stage {
    /// `have` bytes of the next header are read.
    Header { have: usize },
    /// The header is read; its message may or may not have a buffer.
    Claim(ChunkHeader),
    /// `have` bytes of the payload are in place.
    Payload { chunk: ChunkHeader, buffer: RecvBuffer, have: usize },
    /// The peer has closed the flow.
    Ended,
}

impl Receiver {
    /// Makes a connection of flows that have been welcomed.
    pub(crate) fn open(
        context: Context,
        workers: &Workers,
        peer: SocketAddr,
        sockets: Vec<Socket>,
    ) -> io::Result<Arc<Self>> {
        let count = sockets.len();
        let reading = || Reading {
            closed: false,
            stage: Stage::Header { have: 0 },
            header: [0; HEADER_BYTES],
        };
        let receiver = Arc::new(Self {
            base: Base::new(context, workers, Direction::Recv, peer, sockets),
            reading: (0..count).map(|_| Mutex::new(reading())).collect(),
            queue: Mutex::new(Queue {
                reassembly: Reassembly::default(),
                flows: vec![Outlook::Open; count],
            }),
        });
        for (index, flow) in receiver.base.flows.iter().enumerate() {
            let source = RecvFlow { receiver: Arc::clone(&receiver), index };
            if let Err(error) = flow.registration.watch(&flow.socket, Arc::new(source)) {
                receiver.base.close();
                return Err(error);
            }
        }
        Ok(receiver)
    }

    fn recv(this: &Arc<Self>, buffer: RecvBuffer) -> Result<Option<Request>, Error> {
        if let Some(error) = this.failure() {
            return Err(error);
        }
        let operation = Operation::new();
        let mut woken = 0u64;
        let stuck = {
            let mut queue = lock(&this.queue);
            if queue.reassembly.outstanding() >= MAX_REQUESTS {
                return Ok(None);
            }
            let capacity = (buffer.length() as u64).min(MAX_MESSAGE_BYTES);
            let posted = Posted { buffer, operation: Arc::clone(&operation) };
            let message = queue.reassembly.post(capacity, posted);
            for (index, outlook) in queue.flows.iter_mut().enumerate() {
                if *outlook == Outlook::WaitsFor(message) {
                    *outlook = Outlook::Open;
                    woken |= 1 << index;
                }
            }
            queue.is_stuck()
        };
        if stuck {
            this.fail_stuck();
        }
        let inline = this.base.context.settings.inline_bytes;
        for index in crate::base::bits(woken) {
            this.read(index, inline);
        }
        Ok(Some(Request::new(operation, Arc::clone(this) as Arc<dyn Owner>)))
    }

    /// Reads from a flow until it has no more, its next chunk has no buffer, or more than `limit`
    /// bytes are read; in the last case its worker goes on.
    fn read(&self, index: usize, limit: u64) {
        let flow = &self.base.flows[index];
        let mut guard = lock(&self.reading[index]);
        let mut moved = 0;
        let failed = loop {
            let reading = &mut *guard;
            if reading.closed || self.base.failed() {
                return;
            }
            if moved > limit {
                flow.kick();
                return;
            }
            match &mut reading.stage {
                Stage::Ended => return,
                Stage::Header { have: HEADER_BYTES } => {
                    match ChunkHeader::decode(&reading.header) {
                        Ok(chunk) => reading.stage = Stage::Claim(chunk),
                        Err(error) => {
                            break (ErrorKind::Remote, format!("protocol error: {error}"));
                        }
                    }
                }
                Stage::Header { have } => {
                    let nowhere = RecvBuffer::from_static(&mut []);
                    let rest = &mut reading.header[*have..];
                    match sys::recv_with_header(&flow.socket, nowhere, rest) {
                        Ok(0) if *have == 0 => {
                            reading.stage = Stage::Ended;
                            drop(guard);
                            self.set_outlook(index, Outlook::Ended);
                            return;
                        }
                        Ok(0) => break (ErrorKind::Remote, closed_inside("a header")),
                        Ok(received) => {
                            *have += received;
                            moved += received as u64;
                        }
                        Err(error) if not_now(&error) => return,
                        Err(error) => break (ErrorKind::Remote, error.to_string()),
                    }
                }
                Stage::Claim(chunk) => {
                    let chunk = *chunk;
                    match self.claim(index, &chunk) {
                        Ok(Some(posted)) if chunk.length == 0 => {
                            drop(posted);
                            self.arrived(index, &chunk);
                            reading.stage = Stage::Header { have: 0 };
                        }
                        Ok(Some(posted)) => {
                            let buffer =
                                posted.buffer.part(chunk.offset as usize, chunk.length as usize);
                            reading.stage = Stage::Payload { chunk, buffer, have: 0 };
                        }
                        Ok(None) => {
                            drop(guard);
                            if lock(&self.queue).is_stuck() {
                                self.fail_stuck();
                            }
                            return;
                        }
                        Err(error @ ReassemblyError::TooLong { .. }) => {
                            break (ErrorKind::Truncated, error.to_string());
                        }
                        Err(error) => {
                            break (ErrorKind::Remote, format!("protocol error: {error}"));
                        }
                    }
                }
                Stage::Payload { chunk, buffer, have } => {
                    let missing = buffer.length() - *have;
                    let rest = buffer.part(*have, missing);
                    // With the payload's end comes the next header, often in the same call.
                    match sys::recv_with_header(&flow.socket, rest, &mut reading.header) {
                        Ok(0) => break (ErrorKind::Remote, closed_inside("a message")),
                        Ok(received) => {
                            moved += received as u64;
                            if received < missing {
                                *have += received;
                            } else {
                                self.arrived(index, chunk);
                                reading.stage = Stage::Header { have: received - missing };
                            }
                        }
                        Err(error) if not_now(&error) => return,
                        Err(error) => break (ErrorKind::Remote, error.to_string()),
                    }
                }
            }
        };
        drop(guard);
        self.fail(failed.0, &failed.1);
    }

    /// The buffer for a chunk; `None`, and the flow waits, when none is posted yet.
    fn claim(&self, index: usize, chunk: &ChunkHeader) -> Result<Option<Posted>, ReassemblyError> {
        let mut queue = lock(&self.queue);
        match queue.reassembly.claim(chunk)? {
            Claim::Deliver(posted) => Ok(Some(posted)),
            Claim::NotPosted => {
                queue.flows[index] = Outlook::WaitsFor(chunk.message);
                Ok(None)
            }
        }
    }

    fn arrived(&self, index: usize, chunk: &ChunkHeader) {
        self.base.flows[index].count(chunk.length);
        if let Some(message) = lock(&self.queue).reassembly.arrived(chunk) {
            message.payload.operation.complete(message.total);
        }
    }

    fn set_outlook(&self, index: usize, outlook: Outlook) {
        let stuck = {
            let mut queue = lock(&self.queue);
            queue.flows[index] = outlook;
            queue.is_stuck()
        };
        if stuck {
            self.fail_stuck();
        }
    }

    fn fail_stuck(&self) {
        self.fail(ErrorKind::Remote, "the peer closed the connection");
    }

    fn fail(&self, kind: ErrorKind, what: &str) {
        self.base.fail(kind, what, &self.in_flight());
    }

    fn in_flight(&self) -> InFlight {
        let queue = lock(&self.queue);
        InFlight {
            requests: queue.reassembly.outstanding(),
            bytes: queue.reassembly.missing_bytes(),
        }
    }

    /// Returns when no buffer is being written and none will be again. Waits at most for system
    /// calls that do not block.
    fn come_to_rest(&self) {
        for reading in &self.reading {
            let mut reading = lock(reading);
            reading.closed = true;
            reading.stage = Stage::Ended;
        }
    }
}

impl Queue {
    /// Whether posted buffers can never be filled: the sender hands out all of a message before
    /// the next, so a flow that waits for a later message brings nothing for an earlier one.
    fn is_stuck(&self) -> bool {
        self.reassembly.outstanding() > 0 && !self.flows.contains(&Outlook::Open)
    }
}

impl Owner for Receiver {
    fn failure(&self) -> Option<Error> {
        let error = self.base.failure()?;
        self.come_to_rest();
        Some(error)
    }
}

fn closed_inside(what: &str) -> String {
    format!("the peer closed the connection in the middle of {what}")
}

/// One flow, as its worker sees it.
struct RecvFlow {
    receiver: Arc<Receiver>,
    index: usize,
}

impl Source for RecvFlow {
    fn ready(&self, readiness: Readiness) {
        if readiness.error
            && let Ok(Some(error)) = self.receiver.base.flows[self.index].socket.take_error()
        {
            // A flow that waits for a buffer is not read, so it would not be noticed there.
            self.receiver.fail(ErrorKind::Remote, &error.to_string());
            return;
        }
        if readiness.readable {
            self.receiver.read(self.index, TURN_BYTES);
        }
    }

    // Keepalive finds a dead host: a receiver has nothing unanswered on the wire.
    fn tick(&self, _now: Instant) {}

    fn abandoned(&self, why: &str) {
        self.receiver.fail(ErrorKind::Internal, why);
    }
}
