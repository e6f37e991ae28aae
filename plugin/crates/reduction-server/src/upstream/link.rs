//! The connections with one upstream server, and the fragments in flight there.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use evenkeel_reduction::ClientError;
use evenkeel_reduction::client::{Dialer, JoinedServer, Liveness};
use evenkeel_reduction::protocol::{HEADER_BYTES, MESSAGE_BYTES, Packet, Piece};
use evenkeel_transport::{
    Block, Error, Notify, PendingRecv, PendingSend, RecvConnection, SendConnection,
};

use super::partial_sum::{PartialSum, UpstreamResult, fragments};
use crate::limits::MAX_OPEN_PIECES;

/// How long to wait for the server's error after sending has failed: the error may be in flight.
const ERROR_GRACE: Duration = Duration::from_secs(1);

/// The connections with one upstream server.
pub(super) struct UpstreamLink {
    dialer: Dialer,
    up: SendConnection,
    down: RecvConnection,
    /// Maximum number of fragments in flight.
    window: usize,
    queue: VecDeque<Fragment>,
    in_flight: VecDeque<InFlight>,
    /// Results of the first fragments of a piece.
    results: Vec<Block>,
    spare: Vec<Block>,
    liveness: Liveness,
    /// When and why sending failed first. Nothing is sent any more.
    closed: Option<(Instant, String)>,
    /// The answer to the report of a failure, once it is received.
    answer: Option<PendingRecv>,
    /// Whether no answer is due any more: it has come, or the server is lost.
    over: bool,
}

/// As much of a piece as the server takes at once.
struct Fragment {
    /// Of its piece.
    number: u64,
    /// As the server knows it.
    piece: Piece,
    /// Whether it is the last fragment of its piece.
    last: bool,
    sum: Block,
    result: Block,
}

/// A fragment that was sent, and whose result has not arrived.
struct InFlight {
    number: u64,
    piece: Piece,
    last: bool,
    sum: Arc<Block>,
    head_out: PendingSend,
    body_out: Option<PendingSend>,
    /// `None` once it has arrived.
    head_in: Option<PendingRecv>,
    body_in: Option<PendingRecv>,
    /// The result once it has arrived. Before that, memory for a result that arrives in the same
    /// message as its header.
    result: Option<Block>,
}

impl UpstreamLink {
    pub(super) fn new(server: JoinedServer) -> Self {
        let JoinedServer { dialer, up, down, window, .. } = server;
        Self {
            dialer,
            up,
            down,
            // The memory granted to a communicator covers no more.
            window: window.min(MAX_OPEN_PIECES),
            queue: VecDeque::new(),
            in_flight: VecDeque::new(),
            results: Vec::new(),
            spare: Vec::new(),
            liveness: Liveness::new(),
            closed: None,
            answer: None,
            over: false,
        }
    }

    /// Sets what the connections notify.
    pub(super) fn notify(&self, notify: &Arc<dyn Notify>) {
        self.up.notify(Arc::clone(notify));
        self.down.notify(Arc::clone(notify));
    }

    /// Queues the sum of a piece.
    pub(super) fn push(&mut self, number: u64, sum: PartialSum, piece_bytes: usize) {
        let PartialSum { piece, fragments: blocks } = sum;
        let count = blocks.len();
        let pieces = fragments(&piece, piece_bytes);
        for (index, (piece, (sum, result))) in pieces.into_iter().zip(blocks).enumerate() {
            let last = index + 1 == count;
            self.queue.push_back(Fragment { number, piece, last, sum, result });
        }
    }

    /// Sends and receives what is possible now. Adds the results that have arrived to `results`.
    pub(super) fn progress(
        &mut self,
        now: Instant,
        results: &mut Vec<UpstreamResult>,
    ) -> Result<(), ClientError> {
        let progress = self.try_progress(now, results);
        // A server that has failed answers no report.
        self.over |= progress.is_err();
        progress
    }

    fn try_progress(
        &mut self,
        now: Instant,
        results: &mut Vec<UpstreamResult>,
    ) -> Result<(), ClientError> {
        if self.in_flight.is_empty() {
            self.liveness.responded(now);
        }
        self.send_fragments(now);
        while let Some(first) = self.in_flight.front_mut() {
            let was_waiting = first.head_in.is_some();
            // An error that the server reports takes precedence over one of sending.
            first.receive().map_err(|why| self.dialer.error(&why))?;
            if was_waiting && first.head_in.is_none() {
                self.liveness.responded(now);
            }
            match first.is_sent() {
                Ok(true) if first.is_received() => {}
                Ok(_) => break,
                Err(why) => {
                    self.closed.get_or_insert((now, why));
                    break;
                }
            }
            let Some(completed) = self.in_flight.pop_front() else { break };
            self.results.extend(completed.result);
            self.spare.extend(Arc::into_inner(completed.sum));
            if completed.last {
                results.push(UpstreamResult {
                    number: completed.number,
                    fragments: std::mem::take(&mut self.results),
                    spare: std::mem::take(&mut self.spare),
                });
            }
            self.send_fragments(now);
        }
        match &self.closed {
            Some((since, why)) if now.saturating_duration_since(*since) >= ERROR_GRACE => {
                Err(self.dialer.error(why))
            }
            _ => self.liveness.check(&self.dialer, now),
        }
    }

    /// Reports the communicator's failure to the server.
    pub(super) fn report_failure(&mut self, why: &str) {
        // A server that cannot be reached detects the failure by itself.
        self.over |= Packet::Failed(why.to_owned()).send_last(&self.up).is_none();
    }

    /// Receives the server's answer to the report of a failure: its own report. The server finds
    /// the leaf lost if the connections close before it has read the report, so they stay open
    /// until it has. Returns true once it has, or is lost.
    pub(super) fn poll_answer(&mut self) -> bool {
        if !self.over {
            self.over = self.receive_answer().unwrap_or(true);
        }
        self.over
    }

    /// An error means that no answer comes any more, or that it came in place of a result.
    fn receive_answer(&mut self) -> Result<bool, String> {
        while let Some(first) = self.in_flight.front_mut() {
            first.receive()?;
            if !first.is_received() || !first.is_sent()? {
                return Ok(false);
            }
            self.in_flight.pop_front();
        }
        let answer = match &mut self.answer {
            Some(answer) => answer,
            None => self.answer.insert(self.receive_head()?),
        };
        Ok(answer.poll(false).map_err(text)?.is_some())
    }

    /// Posts the receive for a message that begins with a header.
    fn receive_head(&self) -> Result<PendingRecv, String> {
        let head = self.down.recv_block(Block::new(MESSAGE_BYTES), MESSAGE_BYTES);
        head.map_err(text)?.map_err(|_| too_many_messages())
    }

    /// Sends fragments as long as the window has room.
    fn send_fragments(&mut self, now: Instant) {
        while self.closed.is_none()
            && self.in_flight.len() < self.window
            && let Some(fragment) = self.queue.pop_front()
        {
            match self.send_fragment(fragment) {
                Ok(sent) => self.in_flight.push_back(sent),
                Err(why) => {
                    self.closed.get_or_insert((now, why));
                }
            }
        }
    }

    /// Posts the receives for a fragment's result, then sends the fragment.
    fn send_fragment(&self, fragment: Fragment) -> Result<InFlight, String> {
        let Fragment { number, piece, last, sum, result } = fragment;
        let length = piece.length as usize;
        let head_in = self.receive_head()?;
        let (mut body_in, mut inline_result) = (None, None);
        if piece.is_inline() {
            inline_result = Some(result);
        } else {
            let receiving = self.down.recv_block(result, length).map_err(text)?;
            body_in = Some(receiving.map_err(|_| too_many_messages())?);
        }
        let mut head = Block::new(MESSAGE_BYTES);
        Packet::Part(piece).encode(head.bytes_mut());
        if piece.is_inline() {
            let payload = HEADER_BYTES..HEADER_BYTES + length;
            head.bytes_mut()[payload].copy_from_slice(&sum.bytes()[..length]);
        }
        let sending = self.up.send_block(&Arc::new(head), piece.message_bytes()).map_err(text)?;
        let head_out = sending.ok_or_else(too_many_messages)?;
        let sum = Arc::new(sum);
        let mut body_out = None;
        if !piece.is_inline() {
            let sending = self.up.send_block(&sum, length).map_err(text)?;
            body_out = Some(sending.ok_or_else(too_many_messages)?);
        }
        let (head_in, result) = (Some(head_in), inline_result);
        Ok(InFlight { number, piece, last, sum, head_out, body_out, head_in, body_in, result })
    }
}

impl Drop for UpstreamLink {
    fn drop(&mut self) {
        if self.in_flight.is_empty() && self.queue.is_empty() {
            drop(Packet::Leave.send_last(&self.up));
        }
    }
}

fn text(error: Error) -> String {
    error.to_string()
}

fn too_many_messages() -> String {
    "defect: more messages in flight than the connection allows".to_owned()
}

impl InFlight {
    /// Receives what has arrived of the result.
    fn receive(&mut self) -> Result<(), String> {
        if let Some(head) = &mut self.head_in {
            let Some((block, length)) = head.poll(false).map_err(text)? else {
                return Ok(());
            };
            self.head_in = None;
            let bytes = block.bytes().get(..length).unwrap_or_default();
            match Packet::decode(bytes).map_err(|error| error.to_string())? {
                Packet::Result(piece) if piece == self.piece => {}
                Packet::Failed(why) => return Err(why),
                other => {
                    return Err(format!("expected the result of {:?}, got {other:?}", self.piece));
                }
            }
            if let Some(result) = &mut self.result {
                let payload = &bytes[HEADER_BYTES..];
                result.bytes_mut()[..payload.len()].copy_from_slice(payload);
            }
        }
        if let Some(body) = &mut self.body_in
            && let Some((block, length)) = body.poll(false).map_err(|error| error.to_string())?
        {
            if length != self.piece.length as usize {
                return Err(format!("expected the result of {:?}, got {length} bytes", self.piece));
            }
            self.body_in = None;
            self.result = Some(block);
        }
        Ok(())
    }

    fn is_received(&self) -> bool {
        self.head_in.is_none() && self.body_in.is_none()
    }

    /// Whether sending is done with the fragment's memory.
    fn is_sent(&mut self) -> Result<bool, String> {
        let head = self.head_out.poll(false).map_err(|error| error.to_string())?;
        let body = match &mut self.body_out {
            None => true,
            Some(body) => body.poll(false).map_err(|error| error.to_string())?,
        };
        Ok(head && body)
    }
}
