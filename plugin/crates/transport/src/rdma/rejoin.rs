//! Later lifelines of connections, as their listener sees them.

use std::mem::MaybeUninit;
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

use socket2::Socket;

use super::recv::Receiver;
use crate::connection::base::not_now;
use crate::device::Device;
use crate::runtime::reactor::{Readiness, Registration, Source, Workers};
use crate::sync::lock;
use crate::sys;

/// A lifeline that was welcomed, and that is its connection's as soon as the peer says something there: it calls by several
/// ways at a time, and may go on by another one, or by the one it had.
pub(crate) struct Candidate {
    receiver: Weak<Receiver>,
    number: u32,
    /// Whose port it came to.
    device: Device,
    deadline: Instant,
    registration: Registration,
    /// None once that is decided.
    socket: Mutex<Option<Socket>>,
}

impl Candidate {
    /// Waits for the first word on the lifeline of this number. Nothing is left of it after the deadline.
    pub(crate) fn watch(
        workers: &Workers,
        receiver: &Arc<Receiver>,
        device: Device,
        (number, socket): (u32, Socket),
        deadline: Instant,
    ) -> Arc<Self> {
        let candidate = Arc::new(Self {
            receiver: Arc::downgrade(receiver),
            number,
            device,
            deadline,
            registration: workers.registration(),
            socket: Mutex::new(None),
        });
        // The lock keeps the worker from the socket until it is in place.
        let mut place = lock(&candidate.socket);
        // If it cannot be watched, its end tells the peer.
        if candidate.registration.watch(&socket, Arc::<Self>::clone(&candidate)).is_ok() {
            *place = Some(socket);
        }
        drop(place);
        candidate
    }

    /// Ends the watch; its socket, if it is still there.
    fn take_socket(&self) -> Option<Socket> {
        let socket = lock(&self.socket).take()?;
        self.registration.end(&socket);
        Some(socket)
    }
}

impl Source for Candidate {
    fn ready(&self, _readiness: Readiness) {
        let peeked = {
            let socket = lock(&self.socket);
            let Some(socket) = &*socket else { return };
            sys::uninterrupted(|| socket.peek(&mut [MaybeUninit::uninit()]))
        };
        let chosen = match peeked {
            Err(error) if not_now(&error) => return,
            Err(_) | Ok(0) => false,
            Ok(_) => true,
        };
        if let Some(socket) = self.take_socket()
            && chosen
            && let Some(receiver) = self.receiver.upgrade()
        {
            receiver.rejoin(self.number, &self.device, socket);
        }
    }

    fn tick(&self, now: Instant) {
        if now >= self.deadline {
            self.take_socket();
        }
    }

    fn abandoned(&self, _why: &str) {
        self.take_socket();
    }
}
