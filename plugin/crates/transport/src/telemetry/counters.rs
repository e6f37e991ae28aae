//! Counters of connections and flows, read by any thread at any time.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// A number that only grows.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, amount: u64) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Counters of one connection with all its flows.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Bytes of complete messages.
    bytes: Counter,
    chunks: Counter,
    /// Bytes of the chunks moved.
    carried: Counter,
    /// Bytes that were sent again because a flow died; on the receiving side, those received again.
    pub(crate) repeated: Counter,
    /// Flows that died.
    pub(crate) lost: Counter,
    /// Flows opened in place of dead ones.
    pub(crate) replaced: Counter,
    /// Number of times that a new path replaced a slow one.
    pub(crate) repathed: Counter,
    /// Number of times that the connection recovered after it had lost all flows.
    pub(crate) recovered: Counter,
    /// Flows that were closed because they stalled while others moved.
    pub(crate) stalled: Counter,
    /// Chunks and frames that did not match their checksum.
    pub(crate) corrupt: Counter,
}

impl Counters {
    /// Counts a complete message.
    pub(crate) fn message(&self, bytes: u64) {
        self.bytes.add(bytes);
    }

    /// Bytes of complete messages.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.get()
    }

    /// Bytes of the chunks moved, with retransmissions.
    pub(crate) fn carried(&self) -> u64 {
        self.carried.get()
    }

    /// Chunks moved.
    pub(crate) fn chunks(&self) -> u64 {
        self.chunks.get()
    }
}

impl fmt::Display for Counters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "chunks={} repeated={}B lost={} replaced={} repathed={} recovered={} stalled={} corrupt={}",
            self.chunks.get(),
            self.repeated.get(),
            self.lost.get(),
            self.replaced.get(),
            self.repathed.get(),
            self.recovered.get(),
            self.stalled.get(),
            self.corrupt.get(),
        )
    }
}

/// Counters of one flow.
#[derive(Debug, Default)]
pub(crate) struct FlowCounters {
    bytes: Counter,
}

impl FlowCounters {
    /// Counts a chunk for the flow and its connection.
    pub(crate) fn chunk(&self, connection: &Counters, bytes: u64) {
        self.chunks(connection, 1, bytes);
    }

    /// Counts chunks with this many bytes together.
    pub(crate) fn chunks(&self, connection: &Counters, chunks: usize, bytes: u64) {
        self.bytes.add(bytes);
        connection.carried.add(bytes);
        connection.chunks.add(chunks as u64);
    }

    /// Payload bytes moved.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.get()
    }
}
