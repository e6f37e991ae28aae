//! The receiver's half of failover: it accepts the path that the sender has chosen.

use std::mem::MaybeUninit;
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

use crate::connection::base::would_block;
use crate::device::Device;
use crate::rdma::receiver::Receiver;
use crate::runtime::reactor::{Readiness, Registration, Source, Workers};
use crate::stream::Stream;
use crate::sync::lock;
use crate::sys;

/// A control connection that was accepted and may replace its connection's. It does so when the
/// sender writes to it: the sender tries several paths at once, and may choose another one or stay
/// on the present one.
pub(crate) struct FailoverCandidate {
    receiver: Weak<Receiver>,
    number: u32,
    /// The port that it came to.
    device: Device,
    deadline: Instant,
    registration: Registration,
    /// `None` once it was chosen or given up.
    stream: Mutex<Option<Stream>>,
}

impl FailoverCandidate {
    /// Waits for the first bytes on the control connection of this number. It is closed at the
    /// deadline.
    pub(crate) fn watch(
        workers: &Workers,
        receiver: &Arc<Receiver>,
        device: Device,
        (number, stream): (u32, Stream),
        deadline: Instant,
    ) -> Arc<Self> {
        let candidate = Arc::new(Self {
            receiver: Arc::downgrade(receiver),
            number,
            device,
            deadline,
            registration: workers.registration(),
            stream: Mutex::new(None),
        });
        // The lock keeps the worker from the socket until it is in place.
        let mut place = lock(&candidate.stream);
        // If it cannot be watched it is closed, which the peer sees.
        if candidate.registration.watch(&stream, Arc::<Self>::clone(&candidate)).is_ok() {
            *place = Some(stream);
            candidate.registration.request_tick();
        }
        drop(place);
        candidate
    }

    /// Stops watching. Returns the stream if it is still there.
    fn take_stream(&self) -> Option<Stream> {
        let stream = lock(&self.stream).take()?;
        self.registration.end(&stream);
        Some(stream)
    }
}

impl Source for FailoverCandidate {
    fn ready(&self, _readiness: Readiness) {
        let peeked = {
            let stream = lock(&self.stream);
            let Some(stream) = &*stream else { return };
            sys::uninterrupted(|| stream.socket.peek(&mut [MaybeUninit::uninit()]))
        };
        let chosen = match peeked {
            Err(error) if would_block(&error) => return,
            Err(_) | Ok(0) => false,
            Ok(_) => true,
        };
        if let Some(stream) = self.take_stream()
            && chosen
            && let Some(receiver) = self.receiver.upgrade()
        {
            receiver.accept_failover(self.number, &self.device, stream);
        }
    }

    fn tick(&self, now: Instant) -> bool {
        let is_late = now >= self.deadline;
        if is_late {
            self.take_stream();
        }
        !is_late
    }

    fn abandoned(&self, _why: &str) {
        self.take_stream();
    }
}
