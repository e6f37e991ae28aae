//! All ranks of a group as one of them sees them: its links, and which message belongs to whom.
//!
//! Links are made when they are first needed, one for each direction. Messages of a link come in order; receives are matched to
//! them by their keys. A message that nobody has asked for stays where it is until somebody waits for a later one of the same
//! link; then it is put unexpected, in memory of our own_rank, up to a limit.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use evenkeel_transport::sync::lock;

use crate::error::{Error, Result};
use crate::links::link::{Endpoint, Header, Incoming, Key, Kind, LinkError, Outgoing, Submitted};
use crate::links::transport_kind::TransportKind;
use crate::liveness::{GroupFailure, Liveness, PeerStatus, ProbeAddress};
use crate::memory::{Source, Target};

/// The longest message, in bytes.
pub(crate) const MAX_BYTES: usize = 1 << 30;
/// Bytes of one link that may be put unexpected; a single message may be longer.
const MAX_UNEXPECTED: usize = 256 << 20;
/// Messages of one link that may be put unexpected.
const MAX_UNEXPECTED_MESSAGES: usize = 65_536;
/// Links whose ranks are not known yet.
const MAX_UNAUTHENTICATED: usize = 4096;
/// How long a rank that leaves waits until the others have what it sent.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// How often it looks.
const CLOSE_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Rooms that are kept for the next operation.
const MAX_SPARE_BUFFERS: usize = 32;
/// Why a link was ended whose other side did nothing wrong.
const ABANDONED: &str = "an operation was given up half-transport";

/// A rank, as the others know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RankInfo {
    pub(crate) probe_address: ProbeAddress,
    /// Its transport's address.
    pub(crate) address: Vec<u8>,
    /// Host and process, for people.
    pub(crate) name: String,
    /// The same for ranks of one host, and for no others.
    pub(crate) host_id: u64,
}

/// Why nothing can be sent to a rank or received from it.
#[derive(Clone, Debug)]
pub(crate) struct PeerError {
    pub(crate) rank: usize,
    pub(crate) what: LinkError,
    /// The rank does something else than this one expects.
    pub(crate) mismatch: bool,
}

impl PeerError {
    /// A message has not as many bytes as it should.
    pub(crate) fn counts(rank: usize, has: usize, claimed_by: usize) -> Self {
        ReceiveError::counts(has, claimed_by).with(rank)
    }
}

/// What is wrong with a link.
#[derive(Clone, Debug)]
struct ReceiveError {
    what: LinkError,
    /// As [`PeerError::mismatch`].
    mismatch: bool,
}

impl ReceiveError {
    fn counts(has: usize, room: usize) -> Self {
        let what = format!(
            "it sent {has} bytes where {room} were expected: do all ranks use the same counts?"
        );
        Self { what, mismatch: true }
    }

    fn with(self, rank: usize) -> PeerError {
        PeerError { rank, what: self.what, mismatch: self.mismatch }
    }
}

impl From<LinkError> for ReceiveError {
    fn from(what: LinkError) -> Self {
        Self { what, mismatch: false }
    }
}

pub(crate) struct Mesh {
    own_rank: usize,
    transport: TransportKind,
    endpoint: Box<dyn Endpoint>,
    liveness: Arc<Liveness>,
    members: Vec<RankInfo>,
    probe_addresses: Vec<ProbeAddress>,
    peers: Vec<Peer>,
    unauthenticated: Mutex<Vec<Box<dyn Incoming>>>,
    /// For each group and tag, the sequence of the operation that is the oldest to be expected.
    oldest_sequences: Mutex<HashMap<(u64, u32), u32>>,
    spare_buffers: Mutex<Vec<Vec<u8>>>,
}

#[derive(Default)]
struct Peer {
    outgoing: Mutex<Sending>,
    incoming: Mutex<Receiving>,
}

#[derive(Default)]
struct Sending {
    link: Option<Box<dyn Outgoing>>,
    hello_sent: bool,
    broken: Option<LinkError>,
}

#[derive(Default)]
struct Receiving {
    link: Option<Box<dyn Incoming>>,
    broken: Option<ReceiveError>,
    /// What is asked for and has not begun to come.
    posted: Vec<PostedReceive>,
    /// What is arriving, in the order of its numbers.
    arriving: VecDeque<ArrivingMessage>,
    /// What came unasked, in order.
    unexpected: VecDeque<UnexpectedMessage>,
    unexpected_bytes: usize,
}

struct PostedReceive {
    key: Key,
    into: Target,
    request: Arc<ReceiveRequest>,
}

struct ArrivingMessage {
    number: u64,
    length: usize,
    to: Destination,
}

enum Destination {
    Posted(Arc<ReceiveRequest>),
    /// The message aside with this key that is not whole yet; there is one at most.
    Unexpected,
    /// Nobody wants it.
    Discard {
        _room: Vec<u8>,
    },
}

struct UnexpectedMessage {
    key: Key,
    bytes: Vec<u8>,
    complete: bool,
    /// Whoever asked for it before it was complete.
    claimed_by: Option<(Target, Arc<ReceiveRequest>)>,
}

/// Whether a receive is done.
#[derive(Debug)]
pub(crate) struct ReceiveRequest(AtomicU64);

impl ReceiveRequest {
    const PENDING: u64 = u64::MAX;

    fn complete(&self, bytes: usize) {
        self.0.store(bytes as u64, Ordering::Release);
    }

    /// The number of bytes once all are there.
    pub(crate) fn done(&self) -> Option<usize> {
        match self.0.load(Ordering::Acquire) {
            Self::PENDING => None,
            bytes => Some(bytes as usize),
        }
    }
}

impl Mesh {
    pub(crate) fn new(
        own_rank: usize,
        transport: TransportKind,
        endpoint: Box<dyn Endpoint>,
        liveness: Arc<Liveness>,
        members: Vec<RankInfo>,
    ) -> Self {
        Self {
            own_rank,
            transport,
            endpoint,
            liveness,
            probe_addresses: members.iter().map(|member| member.probe_address.clone()).collect(),
            peers: members.iter().map(|_| Peer::default()).collect(),
            members,
            unauthenticated: Mutex::default(),
            oldest_sequences: Mutex::default(),
            spare_buffers: Mutex::default(),
        }
    }

    pub(crate) fn own_rank(&self) -> usize {
        self.own_rank
    }

    /// Whether all links are TCP's, and not encrypted.
    pub(crate) fn is_plain_tcp(&self) -> bool {
        matches!(self.transport, TransportKind::Tcp(_))
    }

    pub(crate) fn liveness(&self) -> &Liveness {
        &self.liveness
    }

    pub(crate) fn probe_addresses(&self) -> &[ProbeAddress] {
        &self.probe_addresses
    }

    /// These ranks by hosts, as places in the list: the hosts in the order of their first ranks.
    pub(crate) fn hosts(&self, ranks: &[usize]) -> Vec<Vec<usize>> {
        let mut hosts: Vec<(u64, Vec<usize>)> = vec![];
        for (place, rank) in ranks.iter().enumerate() {
            let host_id = self.members[*rank].host_id;
            match hosts.iter_mut().find(|(other, _)| *other == host_id) {
                Some((_, places)) => places.push(place),
                None => hosts.push((host_id, vec![place])),
            }
        }
        hosts.into_iter().map(|(_, places)| places).collect()
    }

    /// Opens another transport of the same kind, for links of their own_rank.
    ///
    /// # Errors
    /// Those of the system.
    pub(crate) fn open(&self) -> Result<Box<dyn Endpoint>> {
        self.transport.open()
    }

    /// The same ranks at other addresses of theirs: links of their own_rank, and the same failures. Only those that have an address
    /// can be reached.
    pub(crate) fn with_endpoint(
        &self,
        endpoint: Box<dyn Endpoint>,
        addresses: Vec<Vec<u8>>,
    ) -> Self {
        let members = self.members.iter().cloned().zip(addresses);
        let members = members.map(|(member, address)| RankInfo { address, ..member }).collect();
        Self::new(
            self.own_rank,
            self.transport.clone(),
            endpoint,
            Arc::clone(&self.liveness),
            members,
        )
    }

    /// A rank, for people.
    pub(crate) fn describe(&self, rank: usize) -> String {
        match self.members.get(rank) {
            Some(member) => format!("rank {rank} ({})", member.name),
            None => format!("rank {rank}"),
        }
    }

    /// The error of an operation that left something half-transport: nobody can go on after it.
    pub(crate) fn end_group_on_partial_transfer(&self, error: Error) -> Error {
        if !error.is_group_usable() {
            return error;
        }
        let (kind, ranks) = (error.kind(), error.ranks().to_vec());
        self.liveness.fail(GroupFailure { kind, ranks, text: error.to_string() }).error()
    }

    /// Sends a message; `None` when it cannot be taken now.
    pub(crate) fn send(
        &self,
        to: usize,
        key: Key,
        payload: Source,
    ) -> std::result::Result<Option<Submitted>, PeerError> {
        let mut sending = lock(&self.peers[to].outgoing);
        let given = self.send_on(&mut sending, to, key, payload);
        given.map_err(|what| {
            sending.link = None;
            PeerError { rank: to, what: sending.broken.insert(what).clone(), mismatch: false }
        })
    }

    fn send_on(
        &self,
        sending: &mut Sending,
        to: usize,
        key: Key,
        payload: Source,
    ) -> std::result::Result<Option<Submitted>, LinkError> {
        if let Some(what) = &sending.broken {
            return Err(what.clone());
        }
        let RankInfo { address, probe_address, .. } = &self.members[to];
        if sending.link.is_none() {
            sending.link = self.endpoint.connect(address).map_err(|error| error.to_string())?;
        }
        let Some(link) = &mut sending.link else { return Ok(None) };
        if !sending.hello_sent {
            let key = Key {
                kind: Kind::Hello,
                group: probe_address.id,
                tag: self.own_rank as u32,
                sequence: 0,
                part: 0,
            };
            sending.hello_sent = link.send(&Header { key, length: 0 }, Source::EMPTY)?.is_some();
            if !sending.hello_sent {
                return Ok(None);
            }
        }
        link.send(&Header { key, length: payload.length() as u64 }, payload)
    }

    /// How many loans the link to a rank has completed.
    pub(crate) fn completed(&self, to: usize) -> std::result::Result<u64, PeerError> {
        let mut sending = lock(&self.peers[to].outgoing);
        let completed = match &sending.broken {
            Some(what) => Err(what.clone()),
            None => sending.link.as_mut().map_or(Ok(0), |link| link.completed()),
        };
        completed.map_err(|what| {
            sending.link = None;
            PeerError { rank: to, what: sending.broken.insert(what).clone(), mismatch: false }
        })
    }

    /// Bytes that the link to a rank has carried.
    pub(crate) fn carried_to(&self, to: usize) -> u64 {
        lock(&self.peers[to].outgoing).link.as_ref().map_or(0, |link| link.carried())
    }

    /// Bytes that the link from a rank has carried, if this receive has begun.
    pub(crate) fn carried_from(&self, from: usize, request: &Arc<ReceiveRequest>) -> u64 {
        let receiving = lock(&self.peers[from].incoming);
        let arriving = receiving.has_begun(request) || receiving.unexpected_for(request).is_some();
        let link = receiving.link.as_ref().filter(|_| arriving);
        link.map_or(0, |link| link.carried())
    }

    /// Whether a link still needs what was lent to it; if so it is ended.
    pub(crate) fn abandon_send(&self, to: usize, number: u64) -> bool {
        if self.completed(to).is_ok_and(|completed| completed >= number) {
            return false;
        }
        let mut sending = lock(&self.peers[to].outgoing);
        sending.link = None;
        sending.broken.get_or_insert_with(|| ABANDONED.to_owned());
        true
    }

    /// Asks for a message.
    pub(crate) fn receive(&self, from: usize, key: Key, into: Target) -> Arc<ReceiveRequest> {
        let request = Arc::new(ReceiveRequest(AtomicU64::new(ReceiveRequest::PENDING)));
        let mut receiving = lock(&self.peers[from].incoming);
        let posted = PostedReceive { key, into, request: Arc::clone(&request) };
        receiving.post(posted);
        request
    }

    /// Moves on what can move from a rank, for this receive. Whether anything did.
    ///
    /// # Errors
    /// When it is not done and never will be: another thread may have found both its bytes and the link's end behind them.
    pub(crate) fn progress(
        &self,
        from: usize,
        request: &ReceiveRequest,
    ) -> std::result::Result<bool, PeerError> {
        match self.poll_incoming(from, None) {
            Err(_) if request.done().is_some() => Ok(true),
            polled => polled.map(|(moved, _)| moved),
        }
    }

    /// Whether a message with this key is there, or arriving.
    pub(crate) fn probe(&self, from: usize, key: Key) -> std::result::Result<bool, PeerError> {
        self.poll_incoming(from, Some(key)).map(|(_, found)| found)
    }

    fn poll_incoming(
        &self,
        from: usize,
        probe: Option<Key>,
    ) -> std::result::Result<(bool, bool), PeerError> {
        let peer = &self.peers[from];
        if lock(&peer.incoming).is_missing()
            && let Err(error) = self.accept()
        {
            return Err(PeerError { rank: from, what: error.to_string(), mismatch: false });
        }
        let mut receiving = lock(&peer.incoming);
        let mut moved = false;
        match receiving.progress(probe, |key| self.is_stale(key), &mut moved) {
            Ok(found) => Ok((moved, found)),
            Err(fault) => {
                receiving.link = None;
                let fault = receiving.broken.insert(fault).clone();
                // What came before the end may be all that anybody wants.
                if moved && !fault.mismatch {
                    return Ok((moved, false));
                }
                Err(fault.with(from))
            }
        }
    }

    /// Whether a rank says that it has left, within the time.
    pub(crate) fn has_left(&self, rank: usize, time: Duration) -> bool {
        self.probe_addresses[rank].probe(time) == PeerStatus::Left
    }

    /// Whether a link with a rank is being made: nobody says when it is.
    pub(crate) fn is_connecting(&self, rank: usize) -> bool {
        let sending = lock(&self.peers[rank].outgoing);
        let connecting = sending.link.is_some() && !sending.hello_sent;
        drop(sending);
        connecting || lock(&self.peers[rank].incoming).is_missing()
    }

    /// Takes a receive back. If it has begun, its link is ended; whether that was so.
    pub(crate) fn abandon_receive(&self, from: usize, request: &Arc<ReceiveRequest>) -> bool {
        let mut receiving = lock(&self.peers[from].incoming);
        receiving.posted.retain(|posted| !Arc::ptr_eq(&posted.request, request));
        if let Some(at) = receiving.unexpected_for(request) {
            receiving.unexpected[at].claimed_by = None;
        }
        let begun = receiving.has_begun(request);
        if begun {
            // Before anything else: it has the caller's memory.
            receiving.link = None;
            receiving.arriving.clear();
            receiving.broken.get_or_insert_with(|| ABANDONED.to_owned().into());
        }
        begun
    }

    /// Operations of this group and tag before this one are over: what still comes for them is dropped.
    pub(crate) fn set_oldest_sequence(&self, group: u64, tag: u32, sequence: u32) {
        lock(&self.oldest_sequences).insert((group, tag), sequence);
    }

    /// A group whose operations all succeeded is no more: nothing can come for it.
    pub(crate) fn forget(&self, group: u64) {
        lock(&self.oldest_sequences).retain(|(of, _), _| *of != group);
    }

    /// How many groups and tags are remembered.
    #[cfg(test)]
    pub(crate) fn oldest_sequences(&self) -> usize {
        lock(&self.oldest_sequences).len()
    }

    fn is_stale(&self, key: &Key) -> bool {
        let floor = lock(&self.oldest_sequences).get(&(key.group, key.tag)).copied();
        // Sequences go round.
        key.kind == Kind::Collective
            && floor.is_some_and(|floor| (key.sequence.wrapping_sub(floor) as i32) < 0)
    }

    /// Lets in who wants to be.
    fn accept(&self) -> Result<()> {
        let mut unauthenticated = lock(&self.unauthenticated);
        while unauthenticated.len() < MAX_UNAUTHENTICATED
            && let Some(link) = self.endpoint.accept()?
        {
            unauthenticated.push(link);
        }
        let mut at = 0;
        while at < unauthenticated.len() {
            match unauthenticated[at].next_header() {
                Ok(None) => at += 1,
                // Who breaks off before it has said who it is, is nobody.
                Err(_) => drop(unauthenticated.swap_remove(at)),
                Ok(Some(header)) => self.admit(unauthenticated.swap_remove(at), &header),
            }
        }
        Ok(())
    }

    fn admit(&self, mut link: Box<dyn Incoming>, header: &Header) {
        let Key { kind, group, tag, .. } = header.key;
        let expected = kind == Kind::Hello && group == self.liveness.id() && header.length == 0;
        let Some(peer) = self.peers.get(tag as usize).filter(|_| expected) else { return };
        if link.receive_payload(Target::EMPTY).is_ok() {
            let mut receiving = lock(&peer.incoming);
            if receiving.is_missing() {
                receiving.link = Some(link);
            }
        }
    }

    /// Sleeps until `look` finds something, or for the time at most.
    pub(crate) fn sleep(&self, time: Duration, look: &mut dyn FnMut() -> bool) {
        self.endpoint.sleep(time, look);
    }

    /// Room for so many bytes at least; what is in it is anybody's guess.
    pub(crate) fn take_buffer(&self, bytes: usize) -> Vec<u8> {
        let mut room = lock(&self.spare_buffers).pop().unwrap_or_default();
        if room.len() < bytes {
            room = vec![0; bytes];
        }
        room
    }

    /// Gives room back.
    pub(crate) fn return_buffer(&self, room: Vec<u8>) {
        let mut spare_buffers = lock(&self.spare_buffers);
        if spare_buffers.len() < MAX_SPARE_BUFFERS {
            spare_buffers.push(room);
        }
    }

    /// An error unless this is another rank.
    pub(crate) fn check_other(&self, rank: usize, size: usize) -> Result<()> {
        if rank >= size {
            return Err(Error::argument(format!("there is no rank {rank} in a group of {size}")));
        }
        Ok(())
    }
}

impl Drop for Mesh {
    /// Leaves the others with all that they were sent: right after this the process may end.
    fn drop(&mut self) {
        if self.liveness.failure().is_some() {
            return;
        }
        // First, so that ranks that leave at the same time do not wait for each other.
        for peer in &self.peers {
            lock(&peer.incoming).link = None;
        }
        let deadline = Instant::now() + CLOSE_TIMEOUT;
        let mut links: Vec<_> =
            self.peers.iter().filter_map(|peer| lock(&peer.outgoing).link.take()).collect();
        loop {
            links.retain_mut(|link| !link.close());
            if links.is_empty() || Instant::now() >= deadline {
                return;
            }
            self.endpoint.sleep(CLOSE_POLL_INTERVAL, &mut || false);
        }
    }
}

impl Receiving {
    fn is_missing(&self) -> bool {
        self.link.is_none() && self.broken.is_none()
    }

    /// Whether the link has the memory of a receive.
    fn has_begun(&self, request: &Arc<ReceiveRequest>) -> bool {
        self.arriving.iter().any(
            |arriving| matches!(&arriving.to, Destination::Posted(whose) if Arc::ptr_eq(whose, request)),
        )
    }

    /// The message aside that a receive waits for until it is complete.
    fn unexpected_for(&self, request: &Arc<ReceiveRequest>) -> Option<usize> {
        let waits = |unexpected: &UnexpectedMessage| {
            unexpected
                .claimed_by
                .as_ref()
                .is_some_and(|(_, claimed_by)| Arc::ptr_eq(claimed_by, request))
        };
        self.unexpected.iter().position(waits)
    }

    fn post(&mut self, posted: PostedReceive) {
        let there = |unexpected: &UnexpectedMessage| {
            unexpected.key == posted.key && unexpected.claimed_by.is_none()
        };
        let Some(at) = self.unexpected.iter().position(there) else {
            self.posted.push(posted);
            return;
        };
        if !self.unexpected[at].complete {
            self.unexpected[at].claimed_by = Some((posted.into, posted.request));
        } else if self.unexpected[at].bytes.len() <= posted.into.length()
            && let Some(unexpected) = self.unexpected.remove(at)
        {
            self.unexpected_bytes -= unexpected.bytes.len();
            posted.into.write(&unexpected.bytes);
            posted.request.complete(unexpected.bytes.len());
        } else {
            let fault = ReceiveError::counts(self.unexpected[at].bytes.len(), posted.into.length());
            self.broken.get_or_insert(fault);
            self.posted.push(posted);
        }
    }

    /// Moves on what can move, and notes whether anything did. Whether what was looked for is there.
    fn progress(
        &mut self,
        probe: Option<Key>,
        is_stale: impl Fn(&Key) -> bool,
        moved: &mut bool,
    ) -> std::result::Result<bool, ReceiveError> {
        if let Some(key) = probe
            && self
                .unexpected
                .iter()
                .any(|unexpected| unexpected.key == key && unexpected.claimed_by.is_none())
        {
            return Ok(true);
        }
        if let Some(fault) = &self.broken {
            return Err(fault.clone());
        }
        loop {
            self.settle(moved)?;
            let may_buffer = probe.is_some() || !self.posted.is_empty();
            let Some(link) = &mut self.link else { return Ok(false) };
            let header = match link.next_header() {
                Ok(Some(header)) => header,
                Ok(None) => {
                    // What was coming may have become whole with this look.
                    self.settle(moved)?;
                    return Ok(false);
                }
                Err(what) => {
                    // Between the two looks the last bytes may have come, and the end after them.
                    self.settle(moved)?;
                    return Err(what.into());
                }
            };
            if probe == Some(header.key) {
                return Ok(true);
            }
            let length = usize::try_from(header.length).unwrap_or(usize::MAX);
            if length > MAX_BYTES || header.key.kind == Kind::Hello {
                return Err("it speaks something else".to_owned().into());
            }
            let matching = self.posted.iter().position(|posted| posted.key == header.key);
            let (into, to) = if let Some(at) = matching {
                if length > self.posted[at].into.length() {
                    return Err(ReceiveError::counts(length, self.posted[at].into.length()));
                }
                let posted = self.posted.swap_remove(at);
                (posted.into.part(0, length), Destination::Posted(posted.request))
            } else if is_stale(&header.key) {
                let mut room = vec![0; length];
                // SAFETY: the room is kept with the loan, or until the link is dropped.
                (unsafe { Target::lend(&mut room) }, Destination::Discard { _room: room })
            } else if may_buffer
                && has_unexpected_room(&self.unexpected, self.unexpected_bytes, length)
            {
                let mut bytes = vec![0; length];
                // SAFETY: the bytes stay unexpected, unread, until they are whole or the link is dropped.
                let into = unsafe { Target::lend(&mut bytes) };
                self.unexpected_bytes += length;
                self.unexpected.push_back(UnexpectedMessage {
                    key: header.key,
                    bytes,
                    complete: false,
                    claimed_by: None,
                });
                (into, Destination::Unexpected)
            } else {
                return Ok(false);
            };
            *moved = true;
            let given = link.receive_payload(into)?;
            let number = match given {
                Submitted::Done => 0,
                Submitted::Pending(number) => number,
            };
            let arriving = ArrivingMessage { number, length, to };
            if given == Submitted::Done {
                self.arrived(arriving)?;
            } else {
                self.arriving.push_back(arriving);
            }
        }
    }

    /// Completes what is complete.
    fn settle(&mut self, moved: &mut bool) -> std::result::Result<(), ReceiveError> {
        let Some(link) = self.link.as_mut().filter(|_| !self.arriving.is_empty()) else {
            return Ok(());
        };
        let completed = link.completed()?;
        while let Some(arriving) = self.arriving.pop_front_if(|next| next.number <= completed) {
            *moved = true;
            self.arrived(arriving)?;
        }
        Ok(())
    }

    fn arrived(&mut self, arriving: ArrivingMessage) -> std::result::Result<(), ReceiveError> {
        match arriving.to {
            Destination::Posted(request) => request.complete(arriving.length),
            Destination::Discard { .. } => {}
            Destination::Unexpected => {
                let Some(at) = self.unexpected.iter().position(|unexpected| !unexpected.complete)
                else {
                    return Ok(());
                };
                self.unexpected[at].complete = true;
                if let Some((into, request)) = self.unexpected[at].claimed_by.take()
                    && let Some(unexpected) = self.unexpected.remove(at)
                {
                    self.unexpected_bytes -= unexpected.bytes.len();
                    if unexpected.bytes.len() > into.length() {
                        return Err(ReceiveError::counts(unexpected.bytes.len(), into.length()));
                    }
                    into.write(&unexpected.bytes);
                    request.complete(unexpected.bytes.len());
                }
            }
        }
        Ok(())
    }
}

fn has_unexpected_room(
    unexpected: &VecDeque<UnexpectedMessage>,
    bytes: usize,
    length: usize,
) -> bool {
    // One at a time is not complete: those behind it wait in the link.
    unexpected.iter().all(|unexpected| unexpected.complete)
        && unexpected.len() < MAX_UNEXPECTED_MESSAGES
        && (unexpected.is_empty() || bytes + length <= MAX_UNEXPECTED)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryStore;
    use crate::bootstrap::rendezvous::bootstrap_mesh;
    use crate::testing::{TEST_TIMEOUT, transports};
    use std::thread;

    const fn key(part: u32) -> Key {
        Key { kind: Kind::Message, group: 7, tag: 0, sequence: 0, part }
    }

    /// Sends a message to rank 0 and leaves.
    fn send_and_leave(store: &MemoryStore, transport: &TransportKind) {
        let mesh = bootstrap_mesh(store, 1, 2, transport, TEST_TIMEOUT).unwrap();
        let deadline = Instant::now() + TEST_TIMEOUT;
        // SAFETY: the bytes are static.
        let bytes = unsafe { Source::lend(b"last") };
        let given = loop {
            assert!(Instant::now() < deadline, "no link");
            match mesh.send(0, key(0), bytes).unwrap() {
                None => mesh.sleep(CLOSE_POLL_INTERVAL, &mut || false),
                Some(given) => break given,
            }
        };
        while let Submitted::Pending(number) = given
            && mesh.completed(0).unwrap() < number
        {
            assert!(Instant::now() < deadline, "not sent");
            mesh.sleep(CLOSE_POLL_INTERVAL, &mut || false);
        }
    }

    #[test]
    fn who_has_its_message_is_not_told_of_the_links_end() {
        for transport in transports() {
            let store = MemoryStore::new();
            thread::scope(|scope| {
                scope.spawn(|| send_and_leave(&store, &transport));
                let mesh = bootstrap_mesh(&store, 0, 2, &transport, TEST_TIMEOUT).unwrap();
                let (mut first, mut second) = ([0; 4], [0; 4]);
                // SAFETY: both outlive the mesh's link, which has ended below, and are not touched before.
                let spare_buffers =
                    unsafe { [Target::lend(&mut first), Target::lend(&mut second)] };
                let [came, missing] =
                    [0, 1].map(|part| mesh.receive(1, key(part), spare_buffers[part as usize]));
                // Another thread of the group asks, for a message that does not come, until the link has ended.
                let deadline = Instant::now() + TEST_TIMEOUT;
                while mesh.progress(1, &missing).is_ok() {
                    assert!(Instant::now() < deadline, "the link has no end");
                    mesh.sleep(CLOSE_POLL_INTERVAL, &mut || false);
                }
                assert!(mesh.progress(1, &came).is_ok());
                assert_eq!((came.done(), missing.done(), &first), (Some(4), None, b"last"));
                mesh.abandon_receive(1, &missing);
            });
        }
    }
}
