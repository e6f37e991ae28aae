//! What connections and flows have done, counted where it happens and read by anybody at any time.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts up.
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

/// What one connection has done, all its flows together.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Bytes of the messages that are complete.
    bytes: Counter,
    chunks: Counter,
    /// Bytes of the chunks moved.
    carried: Counter,
    /// Bytes that were sent again because a flow died; on the receiving side, those that came
    /// again.
    pub(crate) repeated: Counter,
    /// Flows that died.
    pub(crate) lost: Counter,
    /// Flows opened in place of dead ones.
    pub(crate) replaced: Counter,
    /// Times that a new path took the place of a slow one.
    pub(crate) repathed: Counter,
    /// Times that no flow was left and the connection went on.
    pub(crate) recovered: Counter,
    /// Flows given up because they stood still while others moved.
    pub(crate) stalled: Counter,
    /// Chunks and frames that did not match their checksum.
    pub(crate) corrupt: Counter,
}

impl Counters {
    /// Counts a message that is complete.
    pub(crate) fn message(&self, bytes: u64) {
        self.bytes.add(bytes);
    }

    /// Bytes of the messages that are complete.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.get()
    }

    /// Bytes of the chunks moved, those that were repeated included.
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

/// What one flow has carried.
#[derive(Debug, Default)]
pub(crate) struct FlowCounters {
    bytes: Counter,
}

impl FlowCounters {
    /// Counts a chunk for the flow and its connection.
    pub(crate) fn chunk(&self, connection: &Counters, bytes: u64) {
        self.bytes.add(bytes);
        connection.carried.add(bytes);
        connection.chunks.add(1);
    }

    /// Payload bytes moved.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.get()
    }
}
