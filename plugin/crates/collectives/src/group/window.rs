//! Memory of each rank that the others read and write without its doing: one-sided `put` and `get`.
//!
//! A window has links of its own, so that nothing of it comes between the messages of operations, and a thread that serves what
//! others ask for. A request says where and how much; the bytes follow, straight into the memory or out of it.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use evenkeel_transport::sync::lock;

use crate::algorithms::executor::{Job, execute};
use crate::algorithms::plan::{Action, Plan, Transfer};
use crate::codec::Reader;
use crate::error::{Error, Result};
use crate::group::receive::MessageReceive;
use crate::links::link::{Key, Kind, Submitted};
use crate::links::mesh::{MAX_BYTES, Mesh, PeerError, ReceiveRequest};
use crate::memory::{Source, Target};

use super::{Call, Group};

/// What is asked for, from where on, how much.
const REQUEST_BYTES: usize = 1 + 8 + 8;
const PUT: u8 = 1;
const GET: u8 = 2;
/// What a message is, as its tag: a request, bytes that are put, an answer.
const REQUEST_TAG: u32 = 0;
const DATA_TAG: u32 = 1;
const RESPONSE_TAG: u32 = 2;
/// How long the thread stays awake after it has had something to do.
const SPIN_TIME: Duration = Duration::from_millis(2);
/// How long it sleeps at most.
const MAX_SLEEP: Duration = Duration::from_millis(20);

/// Memory that all ranks of a group can reach.
///
/// Every rank keeps its window until no rank uses it any more: call a barrier before dropping it. A window ends with its group.
pub struct Window {
    state: Arc<WindowState>,
    members: Vec<usize>,
    rank: usize,
    lengths: Vec<usize>,
    timeout: Duration,
    /// One request at a time to each rank.
    requests: Vec<Mutex<()>>,
    thread: Option<JoinHandle<()>>,
}

struct WindowState {
    mesh: Mesh,
    group: u64,
    memory: Mutex<Vec<u8>>,
    /// Callers of this process who want the memory: it is theirs next.
    wanted: AtomicUsize,
    closed: AtomicBool,
}

impl Group {
    /// Opens a window to so many bytes of this rank, all 0 at first; the number can be another on each rank. All ranks call it.
    ///
    /// # Errors
    /// As any operation.
    pub fn window(&self, bytes: usize, call: &Call) -> Result<Window> {
        let endpoint = self.mesh.open()?;
        let address = endpoint.address();
        let own = [bytes as u64, address.len() as u64].map(u64::to_le_bytes);
        let mut sizes = vec![0; 16 * self.size()];
        sizes[16 * self.rank()..][..16].copy_from_slice(own.as_flattened());
        self.allgather(&mut sizes, call)?;
        let (sizes, _) = sizes.as_chunks::<8>();
        let sizes: Vec<usize> =
            sizes.iter().map(|size| u64::from_le_bytes(*size) as usize).collect();
        let (sizes, _) = sizes.as_chunks::<2>();
        let of_addresses: Vec<usize> = sizes.iter().map(|[_, address]| *address).collect();
        let mut all = vec![0; of_addresses.iter().sum()];
        let before: usize = of_addresses[..self.rank()].iter().sum();
        all[before..before + address.len()].copy_from_slice(&address);
        self.allgatherv(&mut all, &of_addresses, call)?;
        let mut addresses = vec![vec![]; self.mesh.probe_addresses().len()];
        let mut rest = &all[..];
        for (member, length) in self.members.iter().zip(&of_addresses) {
            let (address, more) = rest.split_at(*length);
            addresses[*member] = address.to_vec();
            rest = more;
        }
        let state = Arc::new(WindowState {
            mesh: self.mesh.with_endpoint(endpoint, addresses),
            group: self.id,
            memory: Mutex::new(vec![0; bytes]),
            wanted: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
        });
        let others: Vec<usize> =
            self.members.iter().copied().filter(|member| *member != self.mesh.own_rank()).collect();
        let serving = Arc::clone(&state);
        let thread = thread::Builder::new()
            .name("evenkeel-window".to_owned())
            .spawn(move || serving.serve(&others))
            .map_err(|error| Error::system("a window's thread", error))?;
        Ok(Window {
            state,
            members: self.members.clone(),
            rank: self.rank(),
            lengths: sizes.iter().map(|[bytes, _]| *bytes).collect(),
            timeout: self.timeout(),
            requests: self.members.iter().map(|_| Mutex::default()).collect(),
            thread: Some(thread),
        })
    }
}

impl Window {
    /// Bytes that a rank has in the window.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::ErrorKind::Argument) when there is no such rank.
    pub fn length(&self, rank: usize) -> Result<usize> {
        self.state.mesh.check_other(rank, self.members.len())?;
        Ok(self.lengths[rank])
    }

    /// This rank's own memory, while nobody else reads or writes it.
    pub fn with<T>(&self, use_it: impl FnOnce(&mut [u8]) -> T) -> T {
        self.state.wanted.fetch_add(1, Ordering::SeqCst);
        let mut memory = lock(&self.state.memory);
        self.state.wanted.fetch_sub(1, Ordering::SeqCst);
        use_it(&mut memory)
    }

    /// Writes bytes into a rank's memory, from `at` on; returns when they are there.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::ErrorKind::Argument) when they are not inside; otherwise as a message to that rank and one
    /// from it.
    pub fn put(&self, rank: usize, at: usize, bytes: &[u8]) -> Result<()> {
        let Some(_asking) = self.begin(rank, at, bytes.len())? else {
            self.with(|memory| memory[at..at + bytes.len()].copy_from_slice(bytes));
            return Ok(());
        };
        self.request(rank, PUT, at, bytes.len())?;
        self.send(rank, DATA_TAG, bytes)?;
        self.receive(rank, &mut [0])
    }

    /// Reads bytes of a rank's memory, from `at` on, as many as there is room for.
    ///
    /// # Errors
    /// As [`Window::put`].
    pub fn get(&self, rank: usize, at: usize, room: &mut [u8]) -> Result<()> {
        let Some(_asking) = self.begin(rank, at, room.len())? else {
            self.with(|memory| room.copy_from_slice(&memory[at..at + room.len()]));
            return Ok(());
        };
        self.request(rank, GET, at, room.len())?;
        self.receive(rank, room)
    }

    /// The right to ask a rank; `None` if it is this one.
    fn begin(&self, rank: usize, at: usize, length: usize) -> Result<Option<MutexGuard<'_, ()>>> {
        let has = self.length(rank)?;
        if length > MAX_BYTES || at > has || length > has - at {
            return Err(Error::argument(format!(
                "{length} bytes from {at} on: rank {rank} has {has} in the window, and {MAX_BYTES} can go at a time"
            )));
        }
        Ok((rank != self.rank).then(|| lock(&self.requests[rank])))
    }

    fn request(&self, rank: usize, what: u8, at: usize, length: usize) -> Result<()> {
        let mut request = vec![what];
        request.extend_from_slice(&(at as u64).to_le_bytes());
        request.extend_from_slice(&(length as u64).to_le_bytes());
        self.send(rank, REQUEST_TAG, &request)
    }

    fn send(&self, rank: usize, tag: u32, bytes: &[u8]) -> Result<()> {
        let job = Job {
            mesh: &self.state.mesh,
            members: &self.members,
            key: self.state.key(tag),
            what: "window",
            timeout: self.timeout,
            element: 1,
            piece: MAX_BYTES,
            combine: &|_, _| {},
        };
        let whole = Transfer { peer: rank, action: Action::SendInput, range: 0..bytes.len() };
        let sent = execute(&job, &Plan::single(whole), bytes, &mut []);
        sent.map_err(|error| self.renumbered(error))
    }

    fn receive(&self, rank: usize, room: &mut [u8]) -> Result<()> {
        let WindowState { mesh, .. } = &*self.state;
        let (from, key) = ([self.members[rank]], self.state.key(RESPONSE_TAG));
        let wanted = MessageReceive { mesh, from: &from, key, timeout: self.timeout };
        wanted.receive(room).map(drop).map_err(|error| self.renumbered(error))
    }

    fn renumbered(&self, error: Error) -> Error {
        error.renumbered(|rank| self.members.iter().position(|member| *member == rank))
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        self.state.closed.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // A panic there has been reported by its own message.
            let _ = thread.join();
        }
    }
}

/// The memory, while any link has a part of it.
struct LockedMemory<'a> {
    whole: Target,
    _memory: MutexGuard<'a, Vec<u8>>,
}

/// What the thread does for one rank.
struct Service {
    rank: usize,
    state: ServiceState,
    /// Where requests arrive. Not touched while one is awaited.
    request: Vec<u8>,
}

enum ServiceState {
    /// Nothing is asked for.
    Idle,
    ReceivingRequest(Arc<ReceiveRequest>),
    /// Asked for; somebody else may have the memory.
    Requested(u8, Range<usize>),
    /// Bytes are coming into the memory.
    ReceivingData(Arc<ReceiveRequest>, Range<usize>),
    /// They are there; the rank is to be told.
    DataReceived,
    /// The link needs the memory until it has completed so many loans.
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
    fn key(&self, tag: u32) -> Key {
        Key { kind: Kind::Message, group: self.group, tag, sequence: 0, part: 0 }
    }

    /// Serves until the window is closed. Ranks with which there is trouble are served no more: whoever needs them hears of it.
    fn serve(&self, others: &[usize]) {
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
        // Before the memory goes.
        for service in &services {
            self.reclaim(service);
        }
    }

    /// Does for all ranks what can be done. Whether anything could.
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
            match self.serve_one(service, &parts, memory) {
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

    /// The next state of a service, if it can get there.
    fn serve_one<'a>(
        &'a self,
        service: &mut Service,
        in_use: &[Range<usize>],
        memory: &mut Option<LockedMemory<'a>>,
    ) -> std::result::Result<Option<ServiceState>, PeerError> {
        let Service { rank, state, request } = service;
        let mesh = &self.mesh;
        Ok(match state {
            ServiceState::Idle => {
                // SAFETY: the bytes of a vector stay where they are when it moves; they are not touched until the request is there
                // or taken back.
                let room = unsafe { Target::lend(request) };
                Some(ServiceState::ReceivingRequest(mesh.receive(
                    *rank,
                    self.key(REQUEST_TAG),
                    room,
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
                let lent = whole.part(part.start, part.len());
                if *what == PUT {
                    let request = mesh.receive(*rank, self.key(DATA_TAG), lent);
                    Some(ServiceState::ReceivingData(request, part.clone()))
                } else {
                    let given = mesh.send(*rank, self.key(RESPONSE_TAG), lent.source())?;
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
                let there = unsafe { Source::lend(&[1]) };
                mesh.send(*rank, self.key(RESPONSE_TAG), there)?.map(|_| ServiceState::Idle)
            }
            ServiceState::SendingData(number, _) => {
                (mesh.completed(*rank)? >= *number).then_some(ServiceState::Idle)
            }
        })
    }

    /// The memory, unless somebody has it.
    fn try_lock_memory(&self) -> Option<LockedMemory<'_>> {
        let mut memory = self.memory.try_lock().ok()?;
        // SAFETY: the memory stays where it is and locked until no service has a part of it, or all are taken back; no two have
        // the same bytes.
        let whole = unsafe { Target::lend(&mut memory) };
        Some(LockedMemory { whole, _memory: memory })
    }

    fn parse_request(
        &self,
        rank: usize,
        request: &[u8],
    ) -> std::result::Result<ServiceState, PeerError> {
        let mut reader = Reader::new(request);
        let read = (|| Some((reader.byte()?, reader.long()?, reader.long()?)))();
        let known = read.filter(|(what, ..)| [PUT, GET].contains(what));
        let part = known.and_then(|(what, at, length)| {
            let (at, length) = (usize::try_from(at).ok()?, usize::try_from(length).ok()?);
            Some(ServiceState::Requested(what, at..at.checked_add(length)?))
        });
        part.ok_or_else(|| PeerError {
            rank,
            what: "it asks for something that this rank does not know".to_owned(),
            mismatch: true,
        })
    }

    /// Takes all memory back that links have for a rank.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;
    use crate::testing::{run_ranks, transports};

    /// Below and above the sizes at which links begin to lend memory.
    const BYTES: [usize; 3] = [8, 5000, 700_000];

    #[test]
    fn what_is_put_can_be_got_by_all() {
        for transport in transports() {
            run_ranks(3, &transport, |group| {
                let (rank, call) = (group.rank(), Call::default());
                let room = BYTES[2] * 3;
                let window = group.window(room, &call).unwrap();
                for bytes in BYTES {
                    // Each writes its part into everybody's memory, its own included.
                    for other in 0..3 {
                        window.put(other, rank * bytes, &vec![rank as u8 + 1; bytes]).unwrap();
                    }
                    group.barrier(&call).unwrap();
                    window.with(|memory| {
                        let right = |(at, byte): (usize, &u8)| *byte == (at / bytes) as u8 + 1;
                        assert!(memory[..3 * bytes].iter().enumerate().all(right));
                    });
                    let mut got = vec![0; bytes];
                    for other in 0..3 {
                        window.get(other, 2 * bytes, &mut got).unwrap();
                        assert!(got.iter().all(|byte| *byte == 3));
                    }
                    group.barrier(&call).unwrap();
                }
            });
        }
    }

    #[test]
    fn what_is_not_inside_is_refused_and_does_no_harm() {
        for transport in transports() {
            run_ranks(2, &transport, |group| {
                let call = Call::default();
                let window = group.window(10 * group.rank(), &call).unwrap();
                assert_eq!((window.length(0).unwrap(), window.length(1).unwrap()), (0, 10));
                let wrong = [
                    window.put(1, 8, &[0; 3]),
                    window.put(0, 0, &[0]),
                    window.get(1, usize::MAX, &mut [0]),
                    window.put(2, 0, &[]),
                ];
                for result in wrong {
                    let error = result.unwrap_err();
                    assert!(
                        error.kind() == ErrorKind::Argument && error.is_group_usable(),
                        "{error}"
                    );
                }
                if group.rank() == 0 {
                    window.put(1, 7, &[1, 2, 3]).unwrap();
                }
                group.barrier(&call).unwrap();
                if group.rank() == 1 {
                    assert_eq!(window.with(|memory| memory[6..].to_vec()), [0, 1, 2, 3]);
                }
                group.barrier(&call).unwrap();
            });
        }
    }

    /// Whoever reads sees all of a put or nothing of it.
    #[test]
    fn puts_to_the_same_place_do_not_mix() {
        for transport in transports() {
            run_ranks(3, &transport, |group| {
                let (bytes, call) = (100_000, Call::default());
                let sub = group.sub_group(&[2, 0, 1]).unwrap().unwrap();
                let window = sub.window(bytes, &call).unwrap();
                for round in 0..20u8 {
                    window.put(0, 0, &vec![3 * round + sub.rank() as u8; bytes]).unwrap();
                    let mut got = vec![0; bytes];
                    window.get(0, 0, &mut got).unwrap();
                    assert!(got.iter().all(|byte| *byte == got[0]));
                }
                group.barrier(&call).unwrap();
            });
        }
    }
}
