//! Events of the chunks of messages, for profilers.
//!
//! A caller marks the buffers of messages that an observer wants to know of. The mark goes with
//! every part of the buffer, so nothing else of a connection knows of it, and a message without a
//! mark costs a comparison for each chunk.

use std::num::NonZeroUsize;
use std::os::fd::RawFd;
use std::sync::OnceLock;

/// What the observer knows a message by. Never used after the message's request was reported, or
/// its connection was closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageMark(NonZeroUsize);

impl MessageMark {
    /// A mark with this number; none for 0.
    pub fn new(number: usize) -> Option<Self> {
        NonZeroUsize::new(number).map(Self)
    }

    /// Its number.
    pub fn number(self) -> usize {
        self.0.get()
    }
}

/// A part of a message that goes one way at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkDescription {
    /// Through a TCP flow.
    Tcp {
        /// The flow's socket.
        socket: RawFd,
        /// Whether it is sent, not received.
        is_sent: bool,
        /// Number of bytes.
        bytes: usize,
    },
    /// Through an RDMA queue pair, as a write to the peer's memory.
    Rdma {
        /// The work request.
        work_request: u64,
        /// The queue pair's number at its device.
        queue_pair: u32,
        /// Number of bytes.
        bytes: usize,
    },
}

/// Told of chunks. Its functions are called by any thread, on the path of data: they return at
/// once.
pub trait ChunkObserver: Sync {
    /// A chunk of a message begins. Returns what [`ChunkObserver::end`] gets; 0 if it need not be
    /// called.
    fn begin(&self, message: MessageMark, chunk: &ChunkDescription) -> usize;
    /// The chunk has been sent or received, or will not be.
    fn end(&self, event: usize);
}

static OBSERVER: OnceLock<&'static dyn ChunkObserver> = OnceLock::new();

/// Sets the process's observer of chunks. The first one stays.
pub fn observe(observer: &'static dyn ChunkObserver) {
    let _ = OBSERVER.set(observer);
}

/// A chunk that has begun. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct ChunkEvent(NonZeroUsize);

impl ChunkEvent {
    /// The event of a chunk of a message with this mark, if it has one and the observer wants to
    /// know of it.
    #[inline]
    pub(crate) fn begin(
        mark: Option<MessageMark>,
        describe: impl FnOnce() -> ChunkDescription,
    ) -> Option<Self> {
        let event = OBSERVER.get()?.begin(mark?, &describe());
        NonZeroUsize::new(event).map(Self)
    }
}

impl Drop for ChunkEvent {
    fn drop(&mut self) {
        if let Some(observer) = OBSERVER.get() {
            observer.end(self.0.get());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunk_event_of_an_unmarked_message_describes_nothing() {
        let event = ChunkEvent::begin(None, || panic!("it is not marked"));
        assert!(event.is_none());
        assert_eq!(size_of::<Option<ChunkEvent>>(), size_of::<usize>());
    }
}
