//! Matches the messages of one link to receives, by their keys.
//!
//! Messages of a link arrive in order. A message that no receive is posted for stays in the link until a receive is posted for a
//! later one. Then it is buffered as an unexpected message, up to a limit.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::links::link::{Incoming, Key, Kind, LinkError, Submitted};
use crate::memory::Target;

/// Maximum length of a message in bytes.
pub(crate) const MAX_MESSAGE_BYTES: usize = 1 << 30;
/// Maximum number of bytes of unexpected messages of one link. A single message may be longer.
const MAX_UNEXPECTED: usize = 256 << 20;
/// Maximum number of unexpected messages of one link.
const MAX_UNEXPECTED_MESSAGES: usize = 65_536;
/// Why a link was closed whose other side did nothing wrong.
pub(super) const ABANDONED: &str = "an operation was abandoned in the middle of a message";

/// Why nothing more can be received from a link.
#[derive(Clone, Debug)]
pub(super) struct ReceiveError {
    pub(super) what: LinkError,
    /// The rank does something else than this one expects.
    pub(super) mismatch: bool,
}

impl ReceiveError {
    /// A message has another length than expected.
    pub(super) fn counts(has: usize, expected: usize) -> Self {
        let what = format!(
            "it sent {has} bytes where {expected} were expected: do all ranks use the same counts?"
        );
        Self { what, mismatch: true }
    }

    /// A message belongs to another operation than this rank called.
    pub(super) fn operations() -> Self {
        let what = "it called another operation, or with another root, reduction or data type: do all ranks call the same operations in \
                    the same order?";
        Self { what: what.to_owned(), mismatch: true }
    }
}

impl From<LinkError> for ReceiveError {
    fn from(what: LinkError) -> Self {
        Self { what, mismatch: false }
    }
}

/// Matches the messages of one link to receives.
#[derive(Default)]
pub(super) struct MessageMatcher {
    pub(super) link: Option<Box<dyn Incoming>>,
    pub(super) broken: Option<ReceiveError>,
    /// Receives whose messages have not begun to arrive.
    posted: Vec<PostedReceive>,
    /// Messages whose payloads are arriving, in order.
    arriving: VecDeque<ArrivingMessage>,
    /// Messages that arrived before a receive was posted, in order.
    unexpected: VecDeque<UnexpectedMessage>,
    unexpected_bytes: usize,
    /// The next message stays in the link, because there are too many unexpected ones.
    is_full: bool,
}

struct PostedReceive {
    key: Key,
    into: Target,
    request: Arc<ReceiveRequest>,
}

struct ArrivingMessage {
    /// The payload is complete when the link has completed this many.
    number: u64,
    length: usize,
    to: Destination,
}

enum Destination {
    /// The memory of a posted receive.
    Posted(Arc<ReceiveRequest>),
    /// The buffer of the unexpected message that is not complete yet. There is at most one.
    Unexpected,
    /// The message belongs to an operation that is over.
    Discard { _buffer: Vec<u8> },
}

struct UnexpectedMessage {
    key: Key,
    bytes: Vec<u8>,
    complete: bool,
    /// The receive that was posted before the message was complete.
    claimed_by: Option<(Target, Arc<ReceiveRequest>)>,
}

/// A receive, pending or done.
#[derive(Debug)]
pub(crate) struct ReceiveRequest(AtomicU64);

impl ReceiveRequest {
    const PENDING: u64 = u64::MAX;

    fn complete(&self, bytes: usize) {
        self.0.store(bytes as u64, Ordering::Release);
    }

    /// The length of the message, once it has arrived completely.
    pub(crate) fn done(&self) -> Option<usize> {
        match self.0.load(Ordering::Acquire) {
            Self::PENDING => None,
            bytes => Some(bytes as usize),
        }
    }
}

impl MessageMatcher {
    /// Whether there is no link yet.
    pub(super) fn is_missing(&self) -> bool {
        self.link.is_none() && self.broken.is_none()
    }

    /// Whether the link has the memory of a receive, because its message has begun to arrive.
    fn has_begun(&self, request: &Arc<ReceiveRequest>) -> bool {
        self.arriving.iter().any(
            |arriving| matches!(&arriving.to, Destination::Posted(posted) if Arc::ptr_eq(posted, request)),
        )
    }

    /// The index of the incomplete unexpected message that a receive waits for.
    fn unexpected_for(&self, request: &Arc<ReceiveRequest>) -> Option<usize> {
        let is_claimed = |unexpected: &UnexpectedMessage| {
            unexpected
                .claimed_by
                .as_ref()
                .is_some_and(|(_, claimed_by)| Arc::ptr_eq(claimed_by, request))
        };
        self.unexpected.iter().position(is_claimed)
    }

    /// Posts a receive. It completes at once if its message has already arrived.
    pub(super) fn post(&mut self, key: Key, into: Target) -> Arc<ReceiveRequest> {
        let request = Arc::new(ReceiveRequest(AtomicU64::new(ReceiveRequest::PENDING)));
        self.match_or_queue(PostedReceive { key, into, request: Arc::clone(&request) });
        self.tell_awaited();
        request
    }

    /// Tells the link whether a receive waits.
    fn tell_awaited(&mut self) {
        if let Some(link) = &mut self.link {
            link.set_awaited(!self.posted.is_empty() || !self.arriving.is_empty());
        }
    }

    /// Takes a receive back. If its message has begun to arrive, the link is closed. Returns whether that was so.
    pub(super) fn abandon(&mut self, request: &Arc<ReceiveRequest>) -> bool {
        self.posted.retain(|posted| !Arc::ptr_eq(&posted.request, request));
        if let Some(at) = self.unexpected_for(request) {
            self.unexpected[at].claimed_by = None;
        }
        let begun = self.has_begun(request);
        if begun {
            // Before anything else: the link has the caller's memory.
            self.link = None;
            self.arriving.clear();
            self.broken.get_or_insert_with(|| ABANDONED.to_owned().into());
        }
        self.tell_awaited();
        begun
    }

    /// Whether the message of a receive has begun to arrive.
    pub(super) fn is_arriving(&self, request: &Arc<ReceiveRequest>) -> bool {
        self.has_begun(request) || self.unexpected_for(request).is_some()
    }

    fn match_or_queue(&mut self, posted: PostedReceive) {
        let matches = |unexpected: &UnexpectedMessage| {
            unexpected.key == posted.key && unexpected.claimed_by.is_none()
        };
        let Some(at) = self.unexpected.iter().position(matches) else {
            let contradicts =
                |unexpected: &UnexpectedMessage| unexpected.key.contradicts(&posted.key);
            if self.unexpected.iter().any(contradicts) {
                self.broken.get_or_insert_with(ReceiveError::operations);
            }
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
            let error = ReceiveError::counts(self.unexpected[at].bytes.len(), posted.into.length());
            self.broken.get_or_insert(error);
            self.posted.push(posted);
        }
    }

    /// Makes progress, and sets `moved` if anything moved. Returns whether the probed message has begun to arrive, and no
    /// receive was posted for it.
    pub(super) fn progress(
        &mut self,
        probe: Option<Key>,
        is_stale: impl Fn(&Key) -> Result<bool, ReceiveError>,
        moved: &mut bool,
    ) -> Result<bool, ReceiveError> {
        let result = self.advance(probe, is_stale, moved);
        self.tell_awaited();
        result
    }

    /// Why a message does not arrive that may have been sent: too many unexpected ones before it.
    pub(super) fn obstruction(&self) -> Option<String> {
        let first = self.unexpected.front().filter(|_| self.is_full)?;
        Some(format!(
            "it sent {} bytes in {} messages for which there are no receives, the first with tag {}, and nothing behind them arrives \
             before they are received",
            self.unexpected_bytes,
            self.unexpected.len(),
            first.key.tag
        ))
    }

    fn advance(
        &mut self,
        probe: Option<Key>,
        is_stale: impl Fn(&Key) -> Result<bool, ReceiveError>,
        moved: &mut bool,
    ) -> Result<bool, ReceiveError> {
        self.is_full = false;
        if let Some(key) = probe
            && self
                .unexpected
                .iter()
                .any(|unexpected| unexpected.key == key && unexpected.claimed_by.is_none())
        {
            return Ok(true);
        }
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        loop {
            self.complete_arrived(moved)?;
            let may_buffer = probe.is_some() || !self.posted.is_empty();
            let Some(link) = &mut self.link else { return Ok(false) };
            let header = match link.next_header() {
                Ok(Some(header)) => header,
                Ok(None) => {
                    // This call may have completed a message that was arriving.
                    self.complete_arrived(moved)?;
                    return Ok(false);
                }
                Err(what) => {
                    // The last bytes may have arrived between the two calls, and the end of the link after them.
                    self.complete_arrived(moved)?;
                    return Err(what.into());
                }
            };
            let matching = self.posted.iter().position(|posted| posted.key == header.key);
            // The message of a posted receive is not another one's.
            if probe == Some(header.key) && matching.is_none() {
                return Ok(true);
            }
            let length = usize::try_from(header.length).unwrap_or(usize::MAX);
            if length > MAX_MESSAGE_BYTES || header.key.kind == Kind::Hello {
                return Err("it uses another protocol".to_owned().into());
            }
            if header.key.kind == Kind::Collective && header.key.operation == 0 {
                return Err("it uses an earlier version of the protocol".to_owned().into());
            }
            let (into, to) = if let Some(at) = matching {
                if length > self.posted[at].into.length() {
                    return Err(ReceiveError::counts(length, self.posted[at].into.length()));
                }
                let posted = self.posted.remove(at); // those behind it keep their order
                (posted.into.part(0, length), Destination::Posted(posted.request))
            } else if self.posted.iter().any(|posted| posted.key.contradicts(&header.key)) {
                return Err(ReceiveError::operations());
            } else if is_stale(&header.key)? {
                let mut buffer = vec![0; length];
                // SAFETY: the buffer is kept until the payload is complete or the link is dropped.
                (unsafe { Target::lend(&mut buffer) }, Destination::Discard { _buffer: buffer })
            } else if may_buffer
                && has_unexpected_room(&self.unexpected, self.unexpected_bytes, length)
            {
                let mut bytes = vec![0; length];
                // SAFETY: the bytes stay in the queue, unread, until they are complete or the link is dropped.
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
                // While one is incomplete, those behind it stay in the link anyway.
                self.is_full =
                    may_buffer && self.unexpected.iter().all(|unexpected| unexpected.complete);
                return Ok(false);
            };
            *moved = true;
            let submitted = link.receive_payload(into)?;
            let number = match submitted {
                Submitted::Done => 0,
                Submitted::Pending(number) => number,
            };
            let arriving = ArrivingMessage { number, length, to };
            if submitted == Submitted::Done {
                self.arrived(arriving)?;
            } else {
                self.arriving.push_back(arriving);
            }
        }
    }

    /// Completes the messages whose payloads have arrived.
    fn complete_arrived(&mut self, moved: &mut bool) -> Result<(), ReceiveError> {
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

    fn arrived(&mut self, arriving: ArrivingMessage) -> Result<(), ReceiveError> {
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
    // Only one message at a time may be incomplete. Those behind it stay in the link.
    unexpected.iter().all(|unexpected| unexpected.complete)
        && unexpected.len() < MAX_UNEXPECTED_MESSAGES
        && (unexpected.is_empty() || bytes + length <= MAX_UNEXPECTED)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on fails there")]
pub(super) mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::links::link::Header;

    /// A link on which messages arrive when the test says so. Their payloads are nothing but zeros.
    #[derive(Default)]
    pub(in crate::links) struct Link {
        pub(in crate::links) headers: Arc<Mutex<VecDeque<Header>>>,
        awaited: Arc<Mutex<Vec<bool>>>,
    }

    impl Incoming for Link {
        fn next_header(&mut self) -> Result<Option<Header>, LinkError> {
            Ok(self.headers.lock().unwrap().front().copied())
        }

        fn receive_payload(&mut self, _into: Target) -> Result<Submitted, LinkError> {
            self.headers.lock().unwrap().pop_front();
            Ok(Submitted::Done)
        }

        fn completed(&mut self) -> Result<u64, LinkError> {
            Ok(0)
        }

        fn carried(&self) -> u64 {
            0
        }

        fn set_awaited(&mut self, is_awaited: bool) {
            self.awaited.lock().unwrap().push(is_awaited);
        }
    }

    const fn key(sequence: u32) -> Key {
        Key { kind: Kind::Message, group: 1, tag: 0, sequence, part: 0, operation: 0 }
    }

    /// Otherwise a receive from any rank would wait for a second message from this rank, while one from another rank lies there.
    #[test]
    fn probe_does_not_find_the_message_of_a_posted_receive() {
        let link = Link::default();
        let headers = Arc::clone(&link.headers);
        let mut matcher = MessageMatcher { link: Some(Box::new(link)), ..Default::default() };
        let probe = |matcher: &mut MessageMatcher| {
            matcher.progress(Some(key(1)), |_| Ok(false), &mut false).unwrap()
        };
        let posted = matcher.post(key(1), Target::EMPTY);
        headers.lock().unwrap().push_back(Header { key: key(1), length: 0 });
        assert!(!probe(&mut matcher) && posted.done() == Some(0));
        headers.lock().unwrap().push_back(Header { key: key(1), length: 0 });
        assert!(probe(&mut matcher), "a second message");
    }

    /// Messages of one tag go to the receives in the order in which these were posted.
    #[test]
    fn receives_of_one_key_complete_in_order() {
        let link = Link::default();
        let headers = Arc::clone(&link.headers);
        let mut matcher = MessageMatcher { link: Some(Box::new(link)), ..Default::default() };
        let requests: Vec<_> = (0..4).map(|_| matcher.post(key(0), Target::EMPTY)).collect();
        for arrived in 1..=requests.len() {
            headers.lock().unwrap().push_back(Header { key: key(0), length: 0 });
            matcher.progress(None, |_| Ok(false), &mut false).unwrap();
            let done: Vec<_> = requests.iter().map(|request| request.done().is_some()).collect();
            let expected: Vec<_> = (0..requests.len()).map(|at| at < arrived).collect();
            assert_eq!(done, expected, "after {arrived} messages");
        }
    }

    #[test]
    fn earlier_version_of_the_protocol_is_refused() {
        let link = Link::default();
        let earlier = Key { kind: Kind::Collective, ..key(0) };
        link.headers.lock().unwrap().push_back(Header { key: earlier, length: 1 });
        let mut matcher = MessageMatcher { link: Some(Box::new(link)), ..Default::default() };
        matcher.post(Key { operation: 7, ..earlier }, Target::EMPTY);
        let error = matcher.progress(None, |_| Ok(false), &mut false).unwrap_err();
        assert!(error.what.contains("earlier version") && !error.mismatch, "{error:?}");
    }

    #[test]
    fn link_is_awaited_while_a_receive_waits() {
        let link = Link::default();
        let (headers, awaited) = (Arc::clone(&link.headers), Arc::clone(&link.awaited));
        let is_awaited = || awaited.lock().unwrap().last().copied().unwrap();
        let mut matcher = MessageMatcher { link: Some(Box::new(link)), ..Default::default() };
        let progress = |matcher: &mut MessageMatcher| {
            matcher.progress(None, |_| Ok(false), &mut false).unwrap();
        };
        progress(&mut matcher);
        assert!(!is_awaited(), "no receive");
        let request = matcher.post(key(1), Target::EMPTY);
        assert!(is_awaited(), "a receive");
        progress(&mut matcher);
        assert!(is_awaited() && request.done().is_none(), "its message has not come");
        headers.lock().unwrap().push_back(Header { key: key(1), length: 0 });
        progress(&mut matcher);
        assert!(!is_awaited() && request.done() == Some(0), "its message has come");
        let request = matcher.post(key(2), Target::EMPTY);
        assert!(is_awaited());
        matcher.abandon(&request);
        assert!(!is_awaited(), "it was taken back");
    }
}
