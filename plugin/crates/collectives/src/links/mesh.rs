//! The mesh: this rank's links to all other ranks of a group.
//!
//! Links are made when they are first needed, one for each direction.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use evenkeel_transport::sync::lock;

use crate::error::{Error, Result};
use crate::links::link::{Endpoint, Header, Incoming, Key, Kind, LinkError, Outgoing, Submitted};
use crate::links::matching::{ABANDONED, MessageMatcher, ReceiveError, ReceiveRequest};
use crate::links::transport_kind::TransportKind;
use crate::liveness::{GroupFailure, Liveness, PeerStatus, ProbeAddress};
use crate::memory::{Source, Target};

/// Maximum number of unauthenticated links, which have not sent their hello yet.
const MAX_UNAUTHENTICATED: usize = 4096;
/// How long a rank that leaves waits until the others have what it sent.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// How often it checks.
const CLOSE_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Maximum number of buffers that are kept for the next operation.
const MAX_SPARE_BUFFERS: usize = 32;

/// Number of operations of a tag whose digests are remembered, to compare them with messages that arrive afterwards.
const MAX_RECENT: usize = 8;

/// The rank info: what a rank publishes about itself in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RankInfo {
    pub(crate) probe_address: ProbeAddress,
    /// The address of its endpoint.
    pub(crate) address: Vec<u8>,
    /// Host and process, for messages.
    pub(crate) name: String,
    /// A number that is the same on all ranks of one host, and different on other hosts.
    pub(crate) host_id: u64,
}

/// Why nothing more can be sent to a rank or received from it.
#[derive(Clone, Debug)]
pub(crate) struct PeerError {
    pub(crate) rank: usize,
    pub(crate) what: LinkError,
    /// The rank does something else than this one expects.
    pub(crate) mismatch: bool,
}

impl PeerError {
    fn of(rank: usize, ReceiveError { what, mismatch }: ReceiveError) -> Self {
        Self { rank, what, mismatch }
    }

    /// A message has another length than expected.
    pub(crate) fn counts(rank: usize, has: usize, expected: usize) -> Self {
        Self::of(rank, ReceiveError::counts(has, expected))
    }
}

/// The links of one rank to all ranks of a group.
pub(crate) struct Mesh {
    own_rank: usize,
    transport: TransportKind,
    endpoint: Box<dyn Endpoint>,
    liveness: Arc<Liveness>,
    members: Vec<RankInfo>,
    probe_addresses: Vec<ProbeAddress>,
    peers: Vec<Peer>,
    /// Links that have not sent their hello yet.
    unauthenticated: Mutex<Vec<Box<dyn Incoming>>>,
    /// The operations of each group and tag.
    histories: Mutex<HashMap<(u64, u32), History>>,
    spare_buffers: Mutex<Vec<Vec<u8>>>,
}

/// The operations of a group and tag.
#[derive(Default)]
struct History {
    /// The number of the oldest one in progress.
    oldest: u32,
    /// The numbers and digests of the last ones, each at its number's place.
    recent: [(u32, u16); MAX_RECENT],
}

#[derive(Default)]
struct Peer {
    outgoing: Mutex<Sending>,
    incoming: Mutex<MessageMatcher>,
}

#[derive(Default)]
struct Sending {
    link: Option<Box<dyn Outgoing>>,
    hello_sent: bool,
    broken: Option<LinkError>,
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
            histories: Mutex::default(),
            spare_buffers: Mutex::default(),
        }
    }

    pub(crate) fn own_rank(&self) -> usize {
        self.own_rank
    }

    /// Whether all links are TCP without TLS.
    pub(crate) fn is_plain_tcp(&self) -> bool {
        matches!(self.transport, TransportKind::Tcp(_))
    }

    pub(crate) fn transport(&self) -> &TransportKind {
        &self.transport
    }

    pub(crate) fn liveness(&self) -> &Liveness {
        &self.liveness
    }

    pub(crate) fn probe_addresses(&self) -> &[ProbeAddress] {
        &self.probe_addresses
    }

    /// Groups ranks by host. Ranks are given as indexes of the list, hosts in the order of their first ranks.
    pub(crate) fn group_by_host(&self, ranks: &[usize]) -> Vec<Vec<usize>> {
        let mut hosts: Vec<Vec<usize>> = vec![];
        let mut found: HashMap<u64, usize> = HashMap::new();
        for (place, rank) in ranks.iter().enumerate() {
            let host = *found.entry(self.members[*rank].host_id).or_insert(hosts.len());
            match hosts.get_mut(host) {
                Some(places) => places.push(place),
                None => hosts.push(vec![place]),
            }
        }
        hosts
    }

    /// Opens another endpoint of the same transport, for separate links.
    ///
    /// # Errors
    /// Those of the system.
    pub(crate) fn open_endpoint(&self) -> Result<Box<dyn Endpoint>> {
        self.transport.open()
    }

    /// A mesh of separate links to the same ranks at other addresses. It shares this mesh's failures. Only ranks that have an address
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

    /// A rank for messages: its number, host and process.
    pub(crate) fn describe(&self, rank: usize) -> String {
        match self.members.get(rank) {
            Some(member) => format!("rank {rank} ({})", member.name),
            None => format!("rank {rank}"),
        }
    }

    /// The error of an operation that was abandoned in the middle of a message. The group cannot be used after it.
    pub(crate) fn end_group_on_partial_transfer(&self, error: Error) -> Error {
        if !error.is_group_usable() {
            return error;
        }
        let (kind, ranks) = (error.kind(), error.ranks().to_vec());
        self.liveness.fail(GroupFailure { kind, ranks, text: error.to_string() }).error()
    }

    /// Sends a message. `None` when the link cannot take one now.
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
                operation: 0,
            };
            sending.hello_sent = link.send(&Header { key, length: 0 }, Source::EMPTY)?.is_some();
            if !sending.hello_sent {
                return Ok(None);
            }
        }
        link.send(&Header { key, length: payload.length() as u64 }, payload)
    }

    /// Number of payloads that the link to a rank has completed.
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

    /// Number of bytes that the link to a rank has carried.
    pub(crate) fn carried_to(&self, to: usize) -> u64 {
        lock(&self.peers[to].outgoing).link.as_ref().map_or(0, |link| link.carried())
    }

    /// Number of bytes that the link from a rank has carried, if the message of this receive has begun to arrive.
    pub(crate) fn carried_from(&self, from: usize, request: &Arc<ReceiveRequest>) -> u64 {
        let receiving = lock(&self.peers[from].incoming);
        let link = receiving.link.as_ref().filter(|_| receiving.is_arriving(request));
        link.map_or(0, |link| link.carried())
    }

    /// Takes the memory of a payload back. If the link still needs it, the link is closed. Returns whether that was so.
    pub(crate) fn abandon_send(&self, to: usize, number: u64) -> bool {
        if self.completed(to).is_ok_and(|completed| completed >= number) {
            return false;
        }
        let mut sending = lock(&self.peers[to].outgoing);
        sending.link = None;
        sending.broken.get_or_insert_with(|| ABANDONED.to_owned());
        true
    }

    /// Posts a receive.
    pub(crate) fn receive(&self, from: usize, key: Key, into: Target) -> Arc<ReceiveRequest> {
        lock(&self.peers[from].incoming).post(key, into)
    }

    /// Makes progress on the link from a rank, for this receive. Returns whether anything moved.
    ///
    /// # Errors
    /// When the receive is not done and never will be. Another thread may have read both its bytes and the link's end.
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

    /// Why a message of a rank does not arrive that may have been sent, if this rank's own doing is the cause.
    pub(crate) fn obstruction(&self, from: usize) -> Option<String> {
        let what = lock(&self.peers[from].incoming).obstruction()?;
        Some(format!("{}: {what}", self.describe(from)))
    }

    /// Posts a receive if its message has arrived, or has begun to, and no other receive was posted for it.
    pub(crate) fn receive_arrived(
        &self,
        from: usize,
        key: Key,
        into: Target,
    ) -> std::result::Result<Option<Arc<ReceiveRequest>>, PeerError> {
        self.poll_incoming(from, Some((key, into))).map(|(_, posted)| posted)
    }

    /// Makes progress on the link from a rank. Returns whether anything moved, and the receive of `probe` if it was posted.
    fn poll_incoming(
        &self,
        from: usize,
        probe: Option<(Key, Target)>,
    ) -> std::result::Result<(bool, Option<Arc<ReceiveRequest>>), PeerError> {
        let peer = &self.peers[from];
        if lock(&peer.incoming).is_missing()
            && let Err(error) = self.accept()
        {
            return Err(PeerError { rank: from, what: error.to_string(), mismatch: false });
        }
        let mut receiving = lock(&peer.incoming);
        let mut moved = false;
        match receiving.progress(probe.map(|(key, _)| key), |key| self.is_stale(key), &mut moved) {
            // Under the same lock, so that no other thread's receive gets the message.
            Ok(found) => {
                Ok((moved, probe.filter(|_| found).map(|(key, into)| receiving.post(key, into))))
            }
            Err(error) => {
                // A mismatch is reported first: a rank that finds its link closed would say that this one is lost.
                if !error.mismatch {
                    receiving.link = None;
                }
                let error = receiving.broken.insert(error).clone();
                // The caller may need only what arrived before the end of the link.
                if moved && !error.mismatch {
                    return Ok((moved, None));
                }
                Err(PeerError::of(from, error))
            }
        }
    }

    /// Probes whether a rank has left the group, or its process has exited.
    pub(crate) fn is_gone(&self, rank: usize, time: Duration) -> bool {
        let status = self.probe_addresses[rank].probe(time);
        status == PeerStatus::Left || status.has_exited()
    }

    /// Whether a link with a rank is being made, which wakes no sleeping thread.
    pub(crate) fn is_connecting(&self, rank: usize) -> bool {
        let sending = lock(&self.peers[rank].outgoing);
        let connecting = sending.link.is_some() && !sending.hello_sent;
        drop(sending);
        connecting || lock(&self.peers[rank].incoming).is_missing()
    }

    /// Takes a receive back. If its message has begun to arrive, the link is closed. Returns whether that was so.
    pub(crate) fn abandon_receive(&self, from: usize, request: &Arc<ReceiveRequest>) -> bool {
        lock(&self.peers[from].incoming).abandon(request)
    }

    /// This operation begins, and those of its group and tag before it are over. Messages that still arrive for them are discarded.
    pub(crate) fn begin_operation(&self, key: &Key) {
        let mut histories = lock(&self.histories);
        let history = histories.entry((key.group, key.tag)).or_default();
        history.oldest = key.sequence;
        history.recent[key.sequence as usize % MAX_RECENT] = (key.sequence, key.operation);
    }

    /// Forgets a group that is dropped after all its operations succeeded: nothing more can arrive for it.
    pub(crate) fn forget_group(&self, group: u64) {
        lock(&self.histories).retain(|(of, _), _| *of != group);
    }

    /// Number of groups and tags that are remembered.
    #[cfg(test)]
    pub(crate) fn remembered(&self) -> usize {
        lock(&self.histories).len()
    }

    /// Whether a message is for an operation that is over.
    ///
    /// # Errors
    /// When this rank has called another one.
    fn is_stale(&self, key: &Key) -> std::result::Result<bool, ReceiveError> {
        let histories = lock(&self.histories);
        let history = histories.get(&(key.group, key.tag)).filter(|_| key.kind == Kind::Collective);
        // Sequence numbers wrap around.
        let is_over = |history: &&History| (key.sequence.wrapping_sub(history.oldest) as i32) < 0;
        let Some(history) = history.filter(is_over) else { return Ok(false) };
        let (sequence, operation) = history.recent[key.sequence as usize % MAX_RECENT];
        if sequence == key.sequence && ![0, key.operation].contains(&operation) {
            return Err(ReceiveError::operations());
        }
        Ok(true)
    }

    /// Accepts links.
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
                // It failed before its hello.
                Err(_) => drop(unauthenticated.swap_remove(at)),
                Ok(Some(header)) => self.admit(unauthenticated.swap_remove(at), &header),
            }
        }
        Ok(())
    }

    /// Assigns a link to the rank in its hello.
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

    /// Sleeps until `is_ready` returns true, or for the time at most.
    pub(crate) fn sleep(&self, time: Duration, is_ready: &mut dyn FnMut() -> bool) {
        self.endpoint.sleep(time, is_ready);
    }

    /// A buffer of at least this many bytes, with undefined contents.
    pub(crate) fn take_buffer(&self, bytes: usize) -> Vec<u8> {
        let mut buffer = lock(&self.spare_buffers).pop().unwrap_or_default();
        if buffer.len() < bytes {
            buffer = vec![0; bytes];
        }
        buffer
    }

    /// Returns a buffer.
    pub(crate) fn return_buffer(&self, buffer: Vec<u8>) {
        let mut spare_buffers = lock(&self.spare_buffers);
        if spare_buffers.len() < MAX_SPARE_BUFFERS {
            spare_buffers.push(buffer);
        }
    }

    /// An error unless there is such a rank.
    pub(crate) fn check_rank(&self, rank: usize, size: usize) -> Result<()> {
        if rank >= size {
            return Err(Error::argument(format!("there is no rank {rank} in a group of {size}")));
        }
        Ok(())
    }
}

impl Drop for Mesh {
    /// Waits until the other ranks have what they were sent, since the process may exit right after this.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryStore;
    use crate::bootstrap::rendezvous::bootstrap_mesh;
    use crate::error::ErrorKind;
    use crate::group::receive::MessageReceive;
    use crate::links::matching::tests::Link;
    use crate::test_support::{TEST_TIMEOUT, transports};
    use std::thread;

    const fn key(part: u32) -> Key {
        Key { kind: Kind::Message, group: 7, tag: 0, sequence: 0, part, operation: 0 }
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

    /// A rank that sends far ahead of the receives holds up everything else that it sends.
    #[test]
    fn unexpected_messages_that_fill_a_link_are_named() {
        let (store, over) = (MemoryStore::new(), std::sync::Barrier::new(2));
        let join = |rank| {
            bootstrap_mesh(&store, rank, 2, &TransportKind::SharedMemory, TEST_TIMEOUT).unwrap()
        };
        thread::scope(|scope| {
            scope.spawn(|| {
                let _mesh = join(1);
                over.wait();
            });
            let mesh = join(0);
            let link = Link::default();
            let ahead = Header { key: Key { tag: 5, ..key(0) }, length: 100 << 20 };
            let awaited = Header { key: key(0), length: 0 };
            lock(&link.headers).extend([ahead, ahead, ahead, awaited]);
            lock(&mesh.peers[1].incoming).link = Some(Box::new(link));
            let timeout = Duration::from_secs(1);
            let wanted = MessageReceive { mesh: &mesh, from: &[1], key: key(0), timeout };
            let outcome = wanted.receive(&mut []);
            // Before the assertions, so that one that fails leaves no rank at the barrier.
            over.wait();
            let error = outcome.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
            let text = error.to_string();
            let parts = ["rank 1", "209715200 bytes in 2 messages", "tag 5"];
            assert!(parts.iter().all(|part| text.contains(part)), "{text}");
        });
    }

    #[test]
    fn completed_receive_ignores_the_links_end() {
        for transport in transports() {
            let store = MemoryStore::new();
            thread::scope(|scope| {
                scope.spawn(|| send_and_leave(&store, &transport));
                let mesh = bootstrap_mesh(&store, 0, 2, &transport, TEST_TIMEOUT).unwrap();
                let (mut first, mut second) = ([0; 4], [0; 4]);
                // SAFETY: both outlive the mesh's link, which has ended below, and are not touched before.
                let spare_buffers =
                    unsafe { [Target::lend(&mut first), Target::lend(&mut second)] };
                let [arrived, missing] =
                    [0, 1].map(|part| mesh.receive(1, key(part), spare_buffers[part as usize]));
                // Another thread of the group polls for a message that does not arrive, until the link has ended.
                let deadline = Instant::now() + TEST_TIMEOUT;
                while mesh.progress(1, &missing).is_ok() {
                    assert!(Instant::now() < deadline, "the link does not end");
                    mesh.sleep(CLOSE_POLL_INTERVAL, &mut || false);
                }
                assert!(mesh.progress(1, &arrived).is_ok());
                assert_eq!((arrived.done(), missing.done(), &first), (Some(4), None, b"last"));
                mesh.abandon_receive(1, &missing);
            });
        }
    }
}
