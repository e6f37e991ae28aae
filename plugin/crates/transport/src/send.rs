//! The sending side of a connection.

use std::io::{self, Read};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use evenkeel_wire::{ChunkHeader, HEADER_BYTES, MAX_MESSAGE_BYTES, Scheduler};
use socket2::Socket;

use crate::Context;
use crate::base::{Base, Direction, InFlight, TURN_BYTES, bits, not_now};
use crate::engine::{Engine, Readiness, Source, Workers};
use crate::error::{Error, ErrorKind};
use crate::request::{MAX_REQUESTS, Operation, Owner, Request};
use crate::sys::{self, SendBuffer, lock};

/// Sends messages to one peer, which receives them in the order of the calls.
///
/// Dropping it closes it, at once and whatever is in flight; no buffer is touched afterwards.
pub struct SendConnection {
    sender: Arc<Sender>,
    _engine: Arc<Engine>,
}

impl SendConnection {
    pub(crate) fn new(sender: Arc<Sender>, engine: Arc<Engine>) -> Self {
        Self { sender, _engine: engine }
    }

    /// Begins to send a message; 0 bytes are a message too. `None` when [`MAX_REQUESTS`] are
    /// outstanding: try again later. Never blocks.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] above [`MAX_MESSAGE_BYTES`]; else the connection's failure.
    pub fn send(&self, buffer: SendBuffer) -> Result<Option<Request>, Error> {
        Sender::send(&self.sender, buffer)
    }
}

impl Drop for SendConnection {
    fn drop(&mut self) {
        self.sender.come_to_rest();
        self.sender.base.close();
    }
}

/// Locks are taken in this order: a flow's `writing`, then `queue`.
pub(crate) struct Sender {
    base: Base,
    /// One per flow. Held while the flow's socket is written to.
    writing: Vec<Mutex<Writing>>,
    queue: Mutex<Queue>,
}

struct Queue {
    scheduler: Scheduler<Outgoing>,
    /// Flows (as bits) that can take bytes and found nothing to send. Whoever queues a message
    /// takes some bits out and sees to it that those flows look again.
    idle: u64,
}

#[derive(Clone)]
struct Outgoing {
    buffer: SendBuffer,
    operation: Arc<Operation>,
}

#[derive(Default)]
struct Writing {
    /// Nothing may be written any more.
    closed: bool,
    chunk: Option<PartlyWritten>,
}

struct PartlyWritten {
    header: ChunkHeader,
    encoded: [u8; HEADER_BYTES],
    payload: SendBuffer,
    /// Bytes written of header and payload together.
    written: usize,
}

impl Sender {
    /// Makes a connection of flows that have been welcomed.
    pub(crate) fn open(
        context: Context,
        workers: &Workers,
        peer: SocketAddr,
        sockets: Vec<Socket>,
    ) -> io::Result<Arc<Self>> {
        let count = sockets.len();
        let sender = Arc::new(Self {
            base: Base::new(context, workers, Direction::Send, peer, sockets),
            writing: (0..count).map(|_| Mutex::default()).collect(),
            queue: Mutex::new(Queue {
                scheduler: Scheduler::default(),
                idle: u64::MAX >> (64 - count),
            }),
        });
        for (index, flow) in sender.base.flows.iter().enumerate() {
            let source = SendFlow { sender: Arc::clone(&sender), index };
            if let Err(error) = flow.registration.watch(&flow.socket, Arc::new(source)) {
                sender.base.close();
                return Err(error);
            }
        }
        Ok(sender)
    }

    fn send(this: &Arc<Self>, buffer: SendBuffer) -> Result<Option<Request>, Error> {
        let length = buffer.length() as u64;
        if length > MAX_MESSAGE_BYTES {
            return Err(Error::argument(format!(
                "message of {length} bytes: at most {MAX_MESSAGE_BYTES} can be sent"
            )));
        }
        if let Some(error) = this.failure() {
            return Err(error);
        }
        let settings = &this.base.context.settings;
        let operation = Operation::new();
        let inline = length <= settings.inline_bytes;
        let woken = {
            let mut queue = lock(&this.queue);
            if queue.scheduler.outstanding() >= MAX_REQUESTS {
                return Ok(None);
            }
            queue.scheduler.push(length, Outgoing { buffer, operation: Arc::clone(&operation) });
            let wanted = if inline { 1 } else { length.div_ceil(settings.chunk_bytes) };
            let woken = lowest_bits(queue.idle, wanted);
            queue.idle &= !woken;
            woken
        };
        for index in bits(woken) {
            if inline {
                this.write(index, settings.inline_bytes);
            } else {
                this.base.flows[index].kick();
            }
        }
        Ok(Some(Request::new(operation, Arc::clone(this) as Arc<dyn Owner>)))
    }

    /// Writes to a flow until it takes no more, nothing is left, or more than `limit` bytes are
    /// written; in the last case its worker goes on.
    fn write(&self, index: usize, limit: u64) {
        let flow = &self.base.flows[index];
        let mut writing = lock(&self.writing[index]);
        let mut moved = 0;
        while !writing.closed && !self.base.failed() {
            let Some(chunk) = &mut writing.chunk else {
                writing.chunk = self.next_chunk(index);
                if writing.chunk.is_none() {
                    return;
                }
                continue;
            };
            if moved > limit {
                flow.kick();
                return;
            }
            let length = chunk.payload.length();
            let header = &chunk.encoded[chunk.written.min(HEADER_BYTES)..];
            let offset = chunk.written.saturating_sub(HEADER_BYTES);
            let payload = chunk.payload.part(offset, length - offset);
            match sys::send_with_header(&flow.socket, header, payload) {
                Ok(sent) => {
                    chunk.written += sent;
                    moved += sent as u64;
                    if chunk.written == HEADER_BYTES + length {
                        let header = chunk.header;
                        writing.chunk = None;
                        flow.count(header.length);
                        if let Some(message) = lock(&self.queue).scheduler.written(&header) {
                            message.operation.complete(header.total);
                        }
                    }
                }
                Err(error) if not_now(&error) => return,
                Err(error) => {
                    drop(writing);
                    self.fail(ErrorKind::Remote, &error.to_string());
                    return;
                }
            }
        }
    }

    fn next_chunk(&self, index: usize) -> Option<PartlyWritten> {
        let mut queue = lock(&self.queue);
        let Some(chunk) = queue.scheduler.next_chunk(self.base.context.settings.chunk_bytes) else {
            queue.idle |= 1 << index;
            return None;
        };
        queue.idle &= !(1 << index);
        let header = chunk.header;
        let payload = chunk.payload.buffer.part(header.offset as usize, header.length as usize);
        Some(PartlyWritten { header, encoded: header.encode(), payload, written: 0 })
    }

    /// Looks at what the peer says on a flow. It has nothing to say but that it is gone.
    fn listen(&self, index: usize) {
        let mut byte = [0];
        let mut socket = &self.base.flows[index].socket;
        match sys::uninterrupted(|| socket.read(&mut byte)) {
            Ok(0) => self.fail(ErrorKind::Remote, "the peer closed the connection"),
            Ok(_) => self.fail(ErrorKind::Remote, "protocol error: the receiver sent bytes"),
            Err(error) if not_now(&error) => {}
            Err(error) => self.fail(ErrorKind::Remote, &error.to_string()),
        }
    }

    fn fail(&self, kind: ErrorKind, what: &str) {
        self.base.fail(kind, what, &self.in_flight());
    }

    fn in_flight(&self) -> InFlight {
        let queue = lock(&self.queue);
        InFlight {
            requests: queue.scheduler.outstanding(),
            bytes: queue.scheduler.unwritten_bytes(),
        }
    }

    /// Returns when no buffer is being read and none will be again. Waits at most for system calls
    /// that do not block.
    fn come_to_rest(&self) {
        for writing in &self.writing {
            let mut writing = lock(writing);
            writing.closed = true;
            writing.chunk = None;
        }
    }
}

impl Owner for Sender {
    fn failure(&self) -> Option<Error> {
        let error = self.base.failure()?;
        self.come_to_rest();
        Some(error)
    }
}

/// One flow, as its worker sees it.
struct SendFlow {
    sender: Arc<Sender>,
    index: usize,
}

impl Source for SendFlow {
    fn ready(&self, readiness: Readiness) {
        if readiness.readable || readiness.error {
            self.sender.listen(self.index);
        }
        if readiness.writable {
            self.sender.write(self.index, TURN_BYTES);
        }
    }

    fn tick(&self, _now: Instant) {
        let sender = &self.sender;
        if sender.base.failed() || sender.in_flight().requests == 0 {
            return;
        }
        let patience = sender.base.context.settings.peer_timeout;
        if let Ok(Some(silence)) = sys::silence(&sender.base.flows[self.index].socket)
            && silence >= patience
        {
            let what = format!("the peer's host has not answered for {} s", silence.as_secs());
            sender.fail(ErrorKind::Remote, &what);
        }
    }

    fn abandoned(&self, why: &str) {
        self.sender.fail(ErrorKind::Internal, why);
    }
}

/// The `count` lowest bits set in `bits`.
fn lowest_bits(bits: u64, count: u64) -> u64 {
    let mut rest = bits;
    for _ in 0..count.min(64) {
        rest &= rest.wrapping_sub(1);
    }
    bits & !rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lowest_bits_are_taken() {
        assert_eq!(lowest_bits(0b1011_0100, 2), 0b1_0100);
        assert_eq!(lowest_bits(0b11, 9), 0b11);
        assert_eq!(lowest_bits(0, 1), 0);
        assert_eq!(lowest_bits(u64::MAX, 64), u64::MAX);
        assert_eq!(bits(0b1_0100).collect::<Vec<_>>(), [2, 4]);
    }
}
