//! All ranks of a group as one of them sees them: its links, and which message belongs to whom.
//!
//! Links are made when they are first needed, one for each direction. Messages of a link come in order; receives are matched to
//! them by their keys. A message that nobody has asked for stays where it is until somebody waits for a later one of the same
//! link; then it is put aside, in memory of our own, up to a limit.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::link::{Broken, Given, Head, Incoming, Key, Kind, Outgoing, Transport};
use crate::lock;
use crate::memory::{Source, Target};
use crate::pulse::{Answer, Contact, Failure, Pulse};
use crate::way::Way;

/// The longest message, in bytes.
pub(crate) const MAX_BYTES: usize = 1 << 30;
/// Bytes of one link that may be put aside; a single message may be longer.
const MAX_UNEXPECTED: usize = 256 << 20;
/// Messages of one link that may be put aside.
const MAX_UNEXPECTED_MESSAGES: usize = 65_536;
/// Links whose ranks are not known yet.
const MAX_UNAUTHENTICATED: usize = 4096;
/// How long a rank that leaves waits until the others have what it sent.
const FAREWELL: Duration = Duration::from_secs(1);
/// How often it looks.
const FAREWELL_LOOK: Duration = Duration::from_millis(1);
/// Rooms that are kept for the next operation.
const MAX_ROOMS: usize = 32;
/// Why a link was ended whose other side did nothing wrong.
const HALF_WAY: &str = "an operation was given up half-way";

/// A rank, as the others know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) contact: Contact,
    /// Its transport's address.
    pub(crate) address: Vec<u8>,
    /// Host and process, for people.
    pub(crate) name: String,
    /// The same for ranks of one host, and for no others.
    pub(crate) machine: u64,
}

/// Why nothing can be sent to a rank or received from it.
#[derive(Clone, Debug)]
pub(crate) struct Trouble {
    pub(crate) rank: usize,
    pub(crate) what: Broken,
    /// The rank does something else than this one expects.
    pub(crate) mismatch: bool,
}

impl Trouble {
    /// A message has not as many bytes as it should.
    pub(crate) fn counts(rank: usize, has: usize, wanted: usize) -> Self {
        Fault::counts(has, wanted).with(rank)
    }
}

/// What is wrong with a link.
#[derive(Clone, Debug)]
struct Fault {
    what: Broken,
    /// As [`Trouble::mismatch`].
    mismatch: bool,
}

impl Fault {
    fn counts(has: usize, room: usize) -> Self {
        let what = format!(
            "it sent {has} bytes where {room} were expected: do all ranks use the same counts?"
        );
        Self { what, mismatch: true }
    }

    fn with(self, rank: usize) -> Trouble {
        Trouble { rank, what: self.what, mismatch: self.mismatch }
    }
}

impl From<Broken> for Fault {
    fn from(what: Broken) -> Self {
        Self { what, mismatch: false }
    }
}

pub(crate) struct Mesh {
    own: usize,
    way: Way,
    transport: Box<dyn Transport>,
    pulse: Arc<Pulse>,
    members: Vec<Member>,
    contacts: Vec<Contact>,
    peers: Vec<Peer>,
    strangers: Mutex<Vec<Box<dyn Incoming>>>,
    /// For each group and tag, the sequence of the operation that is the oldest to be expected.
    floors: Mutex<HashMap<(u64, u32), u32>>,
    rooms: Mutex<Vec<Vec<u8>>>,
}

#[derive(Default)]
struct Peer {
    outgoing: Mutex<Sending>,
    incoming: Mutex<Receiving>,
}

#[derive(Default)]
struct Sending {
    link: Option<Box<dyn Outgoing>>,
    greeted: bool,
    broken: Option<Broken>,
}

#[derive(Default)]
struct Receiving {
    link: Option<Box<dyn Incoming>>,
    broken: Option<Fault>,
    /// What is asked for and has not begun to come.
    posted: Vec<Posted>,
    /// What is coming, in the order of its numbers.
    coming: VecDeque<Coming>,
    /// What came unasked, in order.
    aside: VecDeque<Aside>,
    bytes_aside: usize,
}

struct Posted {
    key: Key,
    into: Target,
    receipt: Arc<Receipt>,
}

struct Coming {
    number: u64,
    length: usize,
    to: Destination,
}

enum Destination {
    Caller(Arc<Receipt>),
    /// The message aside with this key that is not whole yet; there is one at most.
    Aside,
    /// Nobody wants it.
    Nowhere {
        _room: Vec<u8>,
    },
}

struct Aside {
    key: Key,
    bytes: Vec<u8>,
    whole: bool,
    /// Whoever asked for it before it was whole.
    wanted: Option<(Target, Arc<Receipt>)>,
}

/// Whether a receive is done.
#[derive(Debug)]
pub(crate) struct Receipt(AtomicU64);

impl Receipt {
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
        own: usize,
        way: Way,
        transport: Box<dyn Transport>,
        pulse: Arc<Pulse>,
        members: Vec<Member>,
    ) -> Self {
        Self {
            own,
            way,
            transport,
            pulse,
            contacts: members.iter().map(|member| member.contact.clone()).collect(),
            peers: members.iter().map(|_| Peer::default()).collect(),
            members,
            strangers: Mutex::default(),
            floors: Mutex::default(),
            rooms: Mutex::default(),
        }
    }

    pub(crate) fn own(&self) -> usize {
        self.own
    }

    /// Whether all links are TCP's, and not encrypted.
    pub(crate) fn is_by_tcp(&self) -> bool {
        matches!(self.way, Way::Tcp(_))
    }

    pub(crate) fn pulse(&self) -> &Pulse {
        &self.pulse
    }

    pub(crate) fn contacts(&self) -> &[Contact] {
        &self.contacts
    }

    /// These ranks by hosts, as places in the list: the hosts in the order of their first ranks.
    pub(crate) fn hosts(&self, ranks: &[usize]) -> Vec<Vec<usize>> {
        let mut hosts: Vec<(u64, Vec<usize>)> = vec![];
        for (place, rank) in ranks.iter().enumerate() {
            let machine = self.members[*rank].machine;
            match hosts.iter_mut().find(|(other, _)| *other == machine) {
                Some((_, places)) => places.push(place),
                None => hosts.push((machine, vec![place])),
            }
        }
        hosts.into_iter().map(|(_, places)| places).collect()
    }

    /// Opens another transport of the same kind, for links of their own.
    ///
    /// # Errors
    /// Those of the system.
    pub(crate) fn open(&self) -> Result<Box<dyn Transport>> {
        self.way.open()
    }

    /// The same ranks at other addresses of theirs: links of their own, and the same failures. Only those that have an address
    /// can be reached.
    pub(crate) fn beside(&self, transport: Box<dyn Transport>, addresses: Vec<Vec<u8>>) -> Self {
        let members = self.members.iter().cloned().zip(addresses);
        let members = members.map(|(member, address)| Member { address, ..member }).collect();
        Self::new(self.own, self.way.clone(), transport, Arc::clone(&self.pulse), members)
    }

    /// A rank, for people.
    pub(crate) fn describe(&self, rank: usize) -> String {
        match self.members.get(rank) {
            Some(member) => format!("rank {rank} ({})", member.name),
            None => format!("rank {rank}"),
        }
    }

    /// The error of an operation that left something half-way: nobody can go on after it.
    pub(crate) fn half_way(&self, error: Error) -> Error {
        if !error.is_group_usable() {
            return error;
        }
        let (kind, ranks) = (error.kind(), error.ranks().to_vec());
        self.pulse.fail(Failure { kind, ranks, text: error.to_string() }).error()
    }

    /// Sends a message; `None` when it cannot be taken now.
    pub(crate) fn send(
        &self,
        to: usize,
        key: Key,
        payload: Source,
    ) -> std::result::Result<Option<Given>, Trouble> {
        let mut sending = lock(&self.peers[to].outgoing);
        let given = self.send_on(&mut sending, to, key, payload);
        given.map_err(|what| {
            sending.link = None;
            Trouble { rank: to, what: sending.broken.insert(what).clone(), mismatch: false }
        })
    }

    fn send_on(
        &self,
        sending: &mut Sending,
        to: usize,
        key: Key,
        payload: Source,
    ) -> std::result::Result<Option<Given>, Broken> {
        if let Some(what) = &sending.broken {
            return Err(what.clone());
        }
        let Member { address, contact, .. } = &self.members[to];
        if sending.link.is_none() {
            sending.link = self.transport.connect(address).map_err(|error| error.to_string())?;
        }
        let Some(link) = &mut sending.link else { return Ok(None) };
        if !sending.greeted {
            let key = Key {
                kind: Kind::Hello,
                group: contact.id,
                tag: self.own as u32,
                sequence: 0,
                part: 0,
            };
            sending.greeted = link.send(&Head { key, length: 0 }, Source::EMPTY)?.is_some();
            if !sending.greeted {
                return Ok(None);
            }
        }
        link.send(&Head { key, length: payload.length() as u64 }, payload)
    }

    /// How many loans the link to a rank has finished.
    pub(crate) fn finished(&self, to: usize) -> std::result::Result<u64, Trouble> {
        let mut sending = lock(&self.peers[to].outgoing);
        let finished = match &sending.broken {
            Some(what) => Err(what.clone()),
            None => sending.link.as_mut().map_or(Ok(0), |link| link.finished()),
        };
        finished.map_err(|what| {
            sending.link = None;
            Trouble { rank: to, what: sending.broken.insert(what).clone(), mismatch: false }
        })
    }

    /// Bytes that the link to a rank has carried.
    pub(crate) fn carried_to(&self, to: usize) -> u64 {
        lock(&self.peers[to].outgoing).link.as_ref().map_or(0, |link| link.carried())
    }

    /// Bytes that the link from a rank has carried, if this receive has begun.
    pub(crate) fn carried_from(&self, from: usize, receipt: &Arc<Receipt>) -> u64 {
        let receiving = lock(&self.peers[from].incoming);
        let coming = receiving.has_begun(receipt) || receiving.aside_for(receipt).is_some();
        let link = receiving.link.as_ref().filter(|_| coming);
        link.map_or(0, |link| link.carried())
    }

    /// Whether a link still needs what was lent to it; if so it is ended.
    pub(crate) fn abandon_send(&self, to: usize, number: u64) -> bool {
        if self.finished(to).is_ok_and(|finished| finished >= number) {
            return false;
        }
        let mut sending = lock(&self.peers[to].outgoing);
        sending.link = None;
        sending.broken.get_or_insert_with(|| HALF_WAY.to_owned());
        true
    }

    /// Asks for a message.
    pub(crate) fn receive(&self, from: usize, key: Key, into: Target) -> Arc<Receipt> {
        let receipt = Arc::new(Receipt(AtomicU64::new(Receipt::PENDING)));
        let mut receiving = lock(&self.peers[from].incoming);
        let posted = Posted { key, into, receipt: Arc::clone(&receipt) };
        receiving.post(posted);
        receipt
    }

    /// Moves on what can move from a rank, for this receive. Whether anything did.
    ///
    /// # Errors
    /// When it is not done and never will be: another thread may have found both its bytes and the link's end behind them.
    pub(crate) fn progress(
        &self,
        from: usize,
        receipt: &Receipt,
    ) -> std::result::Result<bool, Trouble> {
        match self.attend(from, None) {
            Err(_) if receipt.done().is_some() => Ok(true),
            attended => attended.map(|(moved, _)| moved),
        }
    }

    /// Whether a message with this key is there, or coming.
    pub(crate) fn probe(&self, from: usize, key: Key) -> std::result::Result<bool, Trouble> {
        self.attend(from, Some(key)).map(|(_, found)| found)
    }

    fn attend(
        &self,
        from: usize,
        probe: Option<Key>,
    ) -> std::result::Result<(bool, bool), Trouble> {
        let peer = &self.peers[from];
        if lock(&peer.incoming).is_missing()
            && let Err(error) = self.accept()
        {
            return Err(Trouble { rank: from, what: error.to_string(), mismatch: false });
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
        self.contacts[rank].ask(time) == Answer::Left
    }

    /// Whether a link with a rank is being made: nobody says when it is.
    pub(crate) fn is_unlinked(&self, rank: usize) -> bool {
        let sending = lock(&self.peers[rank].outgoing);
        let connecting = sending.link.is_some() && !sending.greeted;
        drop(sending);
        connecting || lock(&self.peers[rank].incoming).is_missing()
    }

    /// Takes a receive back. If it has begun, its link is ended; whether that was so.
    pub(crate) fn abandon_receive(&self, from: usize, receipt: &Arc<Receipt>) -> bool {
        let mut receiving = lock(&self.peers[from].incoming);
        receiving.posted.retain(|posted| !Arc::ptr_eq(&posted.receipt, receipt));
        if let Some(at) = receiving.aside_for(receipt) {
            receiving.aside[at].wanted = None;
        }
        let begun = receiving.has_begun(receipt);
        if begun {
            // Before anything else: it has the caller's memory.
            receiving.link = None;
            receiving.coming.clear();
            receiving.broken.get_or_insert_with(|| HALF_WAY.to_owned().into());
        }
        begun
    }

    /// Operations of this group and tag before this one are over: what still comes for them is dropped.
    pub(crate) fn raise_floor(&self, group: u64, tag: u32, sequence: u32) {
        lock(&self.floors).insert((group, tag), sequence);
    }

    /// A group whose operations all succeeded is no more: nothing can come for it.
    pub(crate) fn forget(&self, group: u64) {
        lock(&self.floors).retain(|(of, _), _| *of != group);
    }

    /// How many groups and tags are remembered.
    #[cfg(test)]
    pub(crate) fn floors(&self) -> usize {
        lock(&self.floors).len()
    }

    fn is_stale(&self, key: &Key) -> bool {
        let floor = lock(&self.floors).get(&(key.group, key.tag)).copied();
        // Sequences go round.
        key.kind == Kind::Collective
            && floor.is_some_and(|floor| (key.sequence.wrapping_sub(floor) as i32) < 0)
    }

    /// Lets in who wants to be.
    fn accept(&self) -> Result<()> {
        let mut strangers = lock(&self.strangers);
        while strangers.len() < MAX_UNAUTHENTICATED
            && let Some(link) = self.transport.accept()?
        {
            strangers.push(link);
        }
        let mut at = 0;
        while at < strangers.len() {
            match strangers[at].head() {
                Ok(None) => at += 1,
                // Who breaks off before it has said who it is, is nobody.
                Err(_) => drop(strangers.swap_remove(at)),
                Ok(Some(head)) => self.welcome(strangers.swap_remove(at), &head),
            }
        }
        Ok(())
    }

    fn welcome(&self, mut link: Box<dyn Incoming>, head: &Head) {
        let Key { kind, group, tag, .. } = head.key;
        let expected = kind == Kind::Hello && group == self.pulse.id() && head.length == 0;
        let Some(peer) = self.peers.get(tag as usize).filter(|_| expected) else { return };
        if link.take(Target::EMPTY).is_ok() {
            let mut receiving = lock(&peer.incoming);
            if receiving.is_missing() {
                receiving.link = Some(link);
            }
        }
    }

    /// Sleeps until `look` finds something, or for the time at most.
    pub(crate) fn sleep(&self, time: Duration, look: &mut dyn FnMut() -> bool) {
        self.transport.sleep(time, look);
    }

    /// Room for so many bytes at least; what is in it is anybody's guess.
    pub(crate) fn room(&self, bytes: usize) -> Vec<u8> {
        let mut room = lock(&self.rooms).pop().unwrap_or_default();
        if room.len() < bytes {
            room = vec![0; bytes];
        }
        room
    }

    /// Gives room back.
    pub(crate) fn give_back(&self, room: Vec<u8>) {
        let mut rooms = lock(&self.rooms);
        if rooms.len() < MAX_ROOMS {
            rooms.push(room);
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
        if self.pulse.failure().is_some() {
            return;
        }
        // First, so that ranks that leave at the same time do not wait for each other.
        for peer in &self.peers {
            lock(&peer.incoming).link = None;
        }
        let deadline = Instant::now() + FAREWELL;
        let mut links: Vec<_> =
            self.peers.iter().filter_map(|peer| lock(&peer.outgoing).link.take()).collect();
        loop {
            links.retain_mut(|link| !link.leave());
            if links.is_empty() || Instant::now() >= deadline {
                return;
            }
            self.transport.sleep(FAREWELL_LOOK, &mut || false);
        }
    }
}

impl Receiving {
    fn is_missing(&self) -> bool {
        self.link.is_none() && self.broken.is_none()
    }

    /// Whether the link has the memory of a receive.
    fn has_begun(&self, receipt: &Arc<Receipt>) -> bool {
        self.coming.iter().any(
            |coming| matches!(&coming.to, Destination::Caller(whose) if Arc::ptr_eq(whose, receipt)),
        )
    }

    /// The message aside that a receive waits for until it is whole.
    fn aside_for(&self, receipt: &Arc<Receipt>) -> Option<usize> {
        let waits = |aside: &Aside| {
            aside.wanted.as_ref().is_some_and(|(_, wanted)| Arc::ptr_eq(wanted, receipt))
        };
        self.aside.iter().position(waits)
    }

    fn post(&mut self, posted: Posted) {
        let there = |aside: &Aside| aside.key == posted.key && aside.wanted.is_none();
        let Some(at) = self.aside.iter().position(there) else {
            self.posted.push(posted);
            return;
        };
        if !self.aside[at].whole {
            self.aside[at].wanted = Some((posted.into, posted.receipt));
        } else if self.aside[at].bytes.len() <= posted.into.length()
            && let Some(aside) = self.aside.remove(at)
        {
            self.bytes_aside -= aside.bytes.len();
            posted.into.write(&aside.bytes);
            posted.receipt.complete(aside.bytes.len());
        } else {
            let fault = Fault::counts(self.aside[at].bytes.len(), posted.into.length());
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
    ) -> std::result::Result<bool, Fault> {
        if let Some(key) = probe
            && self.aside.iter().any(|aside| aside.key == key && aside.wanted.is_none())
        {
            return Ok(true);
        }
        if let Some(fault) = &self.broken {
            return Err(fault.clone());
        }
        loop {
            self.settle(moved)?;
            let may_put_aside = probe.is_some() || !self.posted.is_empty();
            let Some(link) = &mut self.link else { return Ok(false) };
            let head = match link.head() {
                Ok(Some(head)) => head,
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
            if probe == Some(head.key) {
                return Ok(true);
            }
            let length = usize::try_from(head.length).unwrap_or(usize::MAX);
            if length > MAX_BYTES || head.key.kind == Kind::Hello {
                return Err("it speaks something else".to_owned().into());
            }
            let wanted = self.posted.iter().position(|posted| posted.key == head.key);
            let (into, to) = if let Some(at) = wanted {
                if length > self.posted[at].into.length() {
                    return Err(Fault::counts(length, self.posted[at].into.length()));
                }
                let posted = self.posted.swap_remove(at);
                (posted.into.part(0, length), Destination::Caller(posted.receipt))
            } else if is_stale(&head.key) {
                let mut room = vec![0; length];
                // SAFETY: the room is kept with the loan, or until the link is dropped.
                (unsafe { Target::lend(&mut room) }, Destination::Nowhere { _room: room })
            } else if may_put_aside && has_room_aside(&self.aside, self.bytes_aside, length) {
                let mut bytes = vec![0; length];
                // SAFETY: the bytes stay aside, unread, until they are whole or the link is dropped.
                let into = unsafe { Target::lend(&mut bytes) };
                self.bytes_aside += length;
                self.aside.push_back(Aside { key: head.key, bytes, whole: false, wanted: None });
                (into, Destination::Aside)
            } else {
                return Ok(false);
            };
            *moved = true;
            let given = link.take(into)?;
            let number = match given {
                Given::Done => 0,
                Given::Lent(number) => number,
            };
            let coming = Coming { number, length, to };
            if given == Given::Done {
                self.arrived(coming)?;
            } else {
                self.coming.push_back(coming);
            }
        }
    }

    /// Completes what is whole.
    fn settle(&mut self, moved: &mut bool) -> std::result::Result<(), Fault> {
        let Some(link) = self.link.as_mut().filter(|_| !self.coming.is_empty()) else {
            return Ok(());
        };
        let finished = link.finished()?;
        while let Some(coming) = self.coming.pop_front_if(|next| next.number <= finished) {
            *moved = true;
            self.arrived(coming)?;
        }
        Ok(())
    }

    fn arrived(&mut self, coming: Coming) -> std::result::Result<(), Fault> {
        match coming.to {
            Destination::Caller(receipt) => receipt.complete(coming.length),
            Destination::Nowhere { .. } => {}
            Destination::Aside => {
                let Some(at) = self.aside.iter().position(|aside| !aside.whole) else {
                    return Ok(());
                };
                self.aside[at].whole = true;
                if let Some((into, receipt)) = self.aside[at].wanted.take()
                    && let Some(aside) = self.aside.remove(at)
                {
                    self.bytes_aside -= aside.bytes.len();
                    if aside.bytes.len() > into.length() {
                        return Err(Fault::counts(aside.bytes.len(), into.length()));
                    }
                    into.write(&aside.bytes);
                    receipt.complete(aside.bytes.len());
                }
            }
        }
        Ok(())
    }
}

fn has_room_aside(aside: &VecDeque<Aside>, bytes: usize, length: usize) -> bool {
    // One at a time is not whole: those behind it wait in the link.
    aside.iter().all(|aside| aside.whole)
        && aside.len() < MAX_UNEXPECTED_MESSAGES
        && (aside.is_empty() || bytes + length <= MAX_UNEXPECTED)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryStore;
    use crate::rendezvous::meet;
    use crate::testing::{PATIENCE, ways};
    use std::thread;

    const fn key(part: u32) -> Key {
        Key { kind: Kind::Message, group: 7, tag: 0, sequence: 0, part }
    }

    /// Sends a message to rank 0 and leaves.
    fn send_and_leave(store: &MemoryStore, way: &Way) {
        let mesh = meet(store, 1, 2, way, PATIENCE).unwrap();
        let deadline = Instant::now() + PATIENCE;
        // SAFETY: the bytes are static.
        let bytes = unsafe { Source::lend(b"last") };
        let given = loop {
            assert!(Instant::now() < deadline, "no link");
            match mesh.send(0, key(0), bytes).unwrap() {
                None => mesh.sleep(FAREWELL_LOOK, &mut || false),
                Some(given) => break given,
            }
        };
        while let Given::Lent(number) = given
            && mesh.finished(0).unwrap() < number
        {
            assert!(Instant::now() < deadline, "not sent");
            mesh.sleep(FAREWELL_LOOK, &mut || false);
        }
    }

    #[test]
    fn who_has_its_message_is_not_told_of_the_links_end() {
        for way in ways() {
            let store = MemoryStore::new();
            thread::scope(|scope| {
                scope.spawn(|| send_and_leave(&store, &way));
                let mesh = meet(&store, 0, 2, &way, PATIENCE).unwrap();
                let (mut first, mut second) = ([0; 4], [0; 4]);
                // SAFETY: both outlive the mesh's link, which has ended below, and are not touched before.
                let rooms = unsafe { [Target::lend(&mut first), Target::lend(&mut second)] };
                let [came, missing] =
                    [0, 1].map(|part| mesh.receive(1, key(part), rooms[part as usize]));
                // Another thread of the group asks, for a message that does not come, until the link has ended.
                let deadline = Instant::now() + PATIENCE;
                while mesh.progress(1, &missing).is_ok() {
                    assert!(Instant::now() < deadline, "the link has no end");
                    mesh.sleep(FAREWELL_LOOK, &mut || false);
                }
                assert!(mesh.progress(1, &came).is_ok());
                assert_eq!((came.done(), missing.done(), &first), (Some(4), None, b"last"));
                mesh.abandon_receive(1, &missing);
            });
        }
    }
}
