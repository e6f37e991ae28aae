//! Decides who writes a message that a caller sends.

/// When a caller wants its message to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteMode {
    /// Now.
    AtOnce,
    /// At the caller's next poll, with others that it sends until then.
    Batched,
    /// With the next message, which the caller sends now.
    Ahead,
}

/// What an owner sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteLimits {
    /// Maximum bytes of a message that its caller writes although there are I/O threads.
    pub caller_bytes: u64,
    /// Bytes that a caller in the place of the I/O threads writes to a flow at a time.
    pub quantum: u64,
    /// Each flow has a part of each message.
    pub is_static: bool,
}

/// Who writes a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writer {
    /// The caller.
    Caller {
        /// Maximum bytes that it writes to a flow. The flow's I/O thread, or a poll, continues.
        bytes: u64,
        /// Maximum number of flows that it writes to.
        flows: usize,
    },
    /// The caller, on one flow, now or at its next poll. See [`Deferral`](crate::Deferral).
    Deferred {
        /// Maximum bytes that it writes.
        bytes: u64,
    },
    /// The I/O threads of at most so many idle flows. Each wakes another flow for what it leaves.
    Threads(usize),
    /// Whoever writes the next message.
    Later,
}

/// Who writes a message of this many bytes. A small message is written by its caller: to wake a
/// thread would take longer. A long one would keep the caller from its other connections, unless it
/// does the work of the I/O threads anyway (`callers_lead`).
pub fn writer(length: u64, mode: WriteMode, limits: &WriteLimits, callers_lead: bool) -> Writer {
    let WriteLimits { caller_bytes, quantum, is_static } = *limits;
    if mode == WriteMode::Ahead {
        return Writer::Later;
    }
    if is_static {
        return Writer::Threads(usize::MAX);
    }
    match (length <= caller_bytes, callers_lead) {
        (true, true) if mode == WriteMode::Batched => Writer::Deferred { bytes: caller_bytes },
        (true, _) => Writer::Caller { bytes: caller_bytes, flows: 1 },
        (false, true) => Writer::Caller { bytes: quantum, flows: usize::MAX },
        (false, false) => Writer::Threads(1),
    }
}

#[cfg(test)]
mod tests {
    use super::WriteMode::{Ahead, AtOnce, Batched};
    use super::*;

    #[test]
    fn writer_of_a_message_follows_from_its_length_and_from_who_polls() {
        let pull = WriteLimits { caller_bytes: 100, quantum: 1000, is_static: false };
        let fixed = WriteLimits { is_static: true, ..pull };
        let (small, deferred) =
            (Writer::Caller { bytes: 100, flows: 1 }, Writer::Deferred { bytes: 100 });
        let long = Writer::Caller { bytes: 1000, flows: usize::MAX };
        let all = Writer::Threads(usize::MAX);
        // What the message is, and who writes it: while I/O threads do their work, and while
        // callers do.
        for (length, mode, limits, by_threads, by_callers) in [
            (0, AtOnce, pull, small, small),
            (100, AtOnce, pull, small, small),
            (0, Batched, pull, small, deferred),
            (100, Batched, pull, small, deferred),
            (101, AtOnce, pull, Writer::Threads(1), long),
            (101, Batched, pull, Writer::Threads(1), long),
            (u64::MAX, Batched, pull, Writer::Threads(1), long),
            (100, Ahead, pull, Writer::Later, Writer::Later),
            (101, Ahead, pull, Writer::Later, Writer::Later),
            (0, AtOnce, fixed, all, all),
            (100, Batched, fixed, all, all),
            (101, AtOnce, fixed, all, all),
            (100, Ahead, fixed, Writer::Later, Writer::Later),
        ] {
            let found =
                [false, true].map(|callers_lead| writer(length, mode, &limits, callers_lead));
            assert_eq!(found, [by_threads, by_callers], "{length} bytes, {mode:?}, {limits:?}");
        }
    }
}
