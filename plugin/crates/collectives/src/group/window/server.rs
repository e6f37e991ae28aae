//! The thread of a window that serves the requests of other ranks.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use crate::codec::Reader;
use crate::links::link::{Key, Kind, Submitted};
use crate::links::matching::ReceiveRequest;
use crate::links::mesh::{Mesh, PeerError};
use crate::memory::{Source, Target};

/// Length of a request: its kind, the offset and the number of bytes.
const REQUEST_BYTES: usize = 1 + 8 + 8;
pub(super) const PUT: u8 = 1;
pub(super) const GET: u8 = 2;
/// The tags of messages: a request, the bytes of a put, and the response.
pub(super) const REQUEST_TAG: u32 = 0;
pub(super) const DATA_TAG: u32 = 1;
pub(super) const RESPONSE_TAG: u32 = 2;
/// How long the thread polls after its last progress before it sleeps.
const SPIN_TIME: Duration = Duration::from_millis(2);
/// The longest sleep.
const MAX_SLEEP: Duration = Duration::from_millis(20);

/// The state that a window and its thread share.
pub(super) struct WindowState {
    pub(super) mesh: Mesh,
    pub(super) group: u64,
    pub(super) memory: Mutex<Vec<u8>>,
    /// Number of callers of this process that wait for the memory. They have priority over requests.
    pub(super) wanted: AtomicUsize,
    pub(super) closed: AtomicBool,
}

/// The memory, locked while any link has a part of it.
struct LockedMemory<'a> {
    whole: Target,
    _memory: MutexGuard<'a, Vec<u8>>,
}

/// The service for one rank.
struct Service {
    rank: usize,
    state: ServiceState,
    /// The buffer for requests. Not accessed while one is being received.
    request: Vec<u8>,
}

enum ServiceState {
    /// No receive is posted.
    Idle,
    ReceivingRequest(Arc<ReceiveRequest>),
    /// A request has arrived and waits for the memory.
    Requested(u8, Range<usize>),
    /// The bytes of a put are arriving in the memory.
    ReceivingData(Arc<ReceiveRequest>, Range<usize>),
    /// The bytes of a put have arrived. The response is to be sent.
    DataReceived,
    /// The bytes of a get are being sent: the link needs the memory until its number of completed payloads reaches this.
    SendingData(u64, Range<usize>),
}

impl ServiceState {
    /// The part of the memory that is in use.
    fn part(&self) -> Option<&Range<usize>> {
        match self {
            Self::ReceivingData(_, part) | Self::SendingData(_, part) => Some(part),
            _ => None,
        }
    }
}

impl WindowState {
    pub(super) fn key(&self, tag: u32) -> Key {
        Key { kind: Kind::Message, group: self.group, tag, sequence: 0, part: 0, operation: 0 }
    }

    /// Serves until the window is closed. Ranks with errors are no longer served. Operations with them report the errors.
    pub(super) fn serve(&self, others: &[usize]) {
        let mut services: Vec<Service> = others
            .iter()
            .map(|rank| Service {
                rank: *rank,
                state: ServiceState::Idle,
                request: vec![0; REQUEST_BYTES],
            })
            .collect();
        let mut memory: Option<LockedMemory<'_>> = None;
        let mut active = Instant::now();
        while !self.closed.load(Ordering::Acquire) {
            if self.advance(&mut services, &mut memory) {
                active = Instant::now();
            } else if active.elapsed() < SPIN_TIME {
                thread::yield_now();
            } else {
                self.mesh.sleep(MAX_SLEEP, &mut || {
                    self.closed.load(Ordering::Acquire) || self.advance(&mut services, &mut memory)
                });
            }
        }
        // Before the memory is freed.
        for service in &services {
            self.reclaim(service);
        }
    }

    /// Makes progress for all ranks. Returns whether there was any.
    fn advance<'a>(
        &'a self,
        services: &mut Vec<Service>,
        memory: &mut Option<LockedMemory<'a>>,
    ) -> bool {
        let mut moved = false;
        let mut at = 0;
        while at < services.len() {
            let parts: Vec<Range<usize>> =
                services.iter().filter_map(|service| service.state.part().cloned()).collect();
            let service = &mut services[at];
            match self.serve_rank(service, &parts, memory) {
                Ok(None) => at += 1,
                Ok(Some(next)) => {
                    service.state = next;
                    moved = true;
                }
                Err(_) => {
                    self.reclaim(service);
                    services.swap_remove(at);
                }
            }
        }
        if services.iter().all(|service| service.state.part().is_none()) {
            *memory = None;
        }
        moved
    }

    /// The next state of a service, if it can proceed.
    fn serve_rank<'a>(
        &'a self,
        service: &mut Service,
        in_use: &[Range<usize>],
        memory: &mut Option<LockedMemory<'a>>,
    ) -> Result<Option<ServiceState>, PeerError> {
        let Service { rank, state, request } = service;
        let mesh = &self.mesh;
        Ok(match state {
            ServiceState::Idle => {
                // SAFETY: the bytes of a vector stay where they are when it moves; they are not accessed until the request has
                // arrived or the receive is taken back.
                let buffer = unsafe { Target::lend(request) };
                Some(ServiceState::ReceivingRequest(mesh.receive(
                    *rank,
                    self.key(REQUEST_TAG),
                    buffer,
                )))
            }
            ServiceState::ReceivingRequest(receive) => {
                if receive.done().is_none() {
                    mesh.progress(*rank, receive)?;
                }
                match receive.done() {
                    None => None,
                    Some(bytes) => Some(self.parse_request(*rank, &request[..bytes])?),
                }
            }
            ServiceState::Requested(what, part) => {
                let overlaps =
                    |other: &Range<usize>| other.start < part.end && part.start < other.end;
                if in_use.iter().any(overlaps) {
                    return Ok(None);
                }
                if memory.is_none() && self.wanted.load(Ordering::SeqCst) == 0 {
                    *memory = self.try_lock_memory();
                }
                let Some(LockedMemory { whole, .. }) = memory else { return Ok(None) };
                if part.end > whole.length() {
                    return Err(PeerError::counts(*rank, part.end, whole.length()));
                }
                let part_memory = whole.part(part.start, part.len());
                if *what == PUT {
                    let request = mesh.receive(*rank, self.key(DATA_TAG), part_memory);
                    Some(ServiceState::ReceivingData(request, part.clone()))
                } else {
                    let given = mesh.send(*rank, self.key(RESPONSE_TAG), part_memory.source())?;
                    given.map(|given| match given {
                        Submitted::Done => ServiceState::Idle,
                        Submitted::Pending(number) => {
                            ServiceState::SendingData(number, part.clone())
                        }
                    })
                }
            }
            ServiceState::ReceivingData(receive, part) => {
                if receive.done().is_none() {
                    mesh.progress(*rank, receive)?;
                }
                match receive.done() {
                    None => None,
                    Some(bytes) if bytes != part.len() => {
                        return Err(PeerError::counts(*rank, bytes, part.len()));
                    }
                    Some(_) => Some(ServiceState::DataReceived),
                }
            }
            ServiceState::DataReceived => {
                // SAFETY: the byte is static.
                let acknowledgement = unsafe { Source::lend(&[1]) };
                mesh.send(*rank, self.key(RESPONSE_TAG), acknowledgement)?
                    .map(|_| ServiceState::Idle)
            }
            ServiceState::SendingData(number, _) => {
                (mesh.completed(*rank)? >= *number).then_some(ServiceState::Idle)
            }
        })
    }

    /// The memory, unless a caller has it.
    fn try_lock_memory(&self) -> Option<LockedMemory<'_>> {
        let mut memory = self.memory.try_lock().ok()?;
        // SAFETY: the memory stays where it is and locked until no service has a part of it, or all parts are taken back. No
        // two services have the same bytes.
        let whole = unsafe { Target::lend(&mut memory) };
        Some(LockedMemory { whole, _memory: memory })
    }

    fn parse_request(&self, rank: usize, request: &[u8]) -> Result<ServiceState, PeerError> {
        let mut reader = Reader::new(request);
        let read = (|| Some((reader.byte()?, reader.long()?, reader.long()?)))();
        let known = read.filter(|(what, ..)| [PUT, GET].contains(what));
        let part = known.and_then(|(what, at, length)| {
            let (at, length) = (usize::try_from(at).ok()?, usize::try_from(length).ok()?);
            Some(ServiceState::Requested(what, at..at.checked_add(length)?))
        });
        part.ok_or_else(|| PeerError {
            rank,
            what: "its request to the window is invalid".to_owned(),
            mismatch: true,
        })
    }

    /// Takes back the memory that links have for a rank.
    fn reclaim(&self, service: &Service) {
        match &service.state {
            ServiceState::ReceivingRequest(request) | ServiceState::ReceivingData(request, _)
                if request.done().is_none() =>
            {
                self.mesh.abandon_receive(service.rank, request);
            }
            ServiceState::SendingData(number, _) => {
                self.mesh.abandon_send(service.rank, *number);
            }
            _ => {}
        }
    }
}
