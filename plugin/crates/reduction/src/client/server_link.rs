//! A client's connections with one server, and the pieces in flight there.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use evenkeel_transport::{
    Block, Error, PendingRecv, PendingSend, RecvBuffer, RecvConnection, Request, SendBuffer,
    SendConnection,
};

use super::dialer::Dialer;
use super::join::JoinedServer;
use super::liveness::Liveness;
use super::window::Window;
use crate::error::ClientError;
use crate::protocol::{HEADER_BYTES, MESSAGE_BYTES, Packet, Piece};
use crate::timeline::Timeline;

/// How long to wait for the server's error after sending has failed: the error may be in flight.
const ERROR_GRACE: Duration = Duration::from_secs(1);

/// A rank at one server.
pub(super) struct ServerLink {
    dialer: Dialer,
    up: SendConnection,
    down: RecvConnection,
    /// Maximum size of a piece, in bytes.
    piece_bytes: usize,
    /// Maximum number of pieces that the server takes.
    max_window: usize,
    window: Window,
    ranges: VecDeque<Range>,
    in_flight: VecDeque<InFlight>,
    /// Memory for messages.
    spare: Vec<Block>,
    liveness: Liveness,
    /// When and why sending failed first. Nothing is sent any more.
    closed: Option<(Instant, String)>,
    /// The report of this rank's failure, while it is sent.
    failure_report: Option<PendingSend>,
    /// Records the times of pieces.
    timeline: Option<Arc<Timeline>>,
}

/// The rest of an operation's range, of which no piece has been sent.
pub(super) struct Range {
    /// Its offset and length are set for each piece.
    pub(super) piece: Piece,
    /// Where the next piece begins, in the operation's vector.
    pub(super) at: usize,
    pub(super) end: usize,
    /// The whole vector.
    pub(super) from: SendBuffer,
    /// The whole vector.
    pub(super) to: RecvBuffer,
}

/// A piece that was sent, and whose result has not arrived.
struct InFlight {
    piece: Piece,
    /// Whether it is the last piece of its range.
    last: bool,
    to: RecvBuffer,
    /// `None` where sending failed.
    head_out: Option<PendingSend>,
    /// The message with the header: its memory is reused once it is sent.
    message: Arc<Block>,
    body_out: Option<Request>,
    begun: Instant,
    /// When it was first found to be sent.
    sent: Option<Instant>,
    /// `None` once it has arrived.
    head_in: Option<PendingRecv>,
    body_in: Option<Request>,
}

impl ServerLink {
    /// The times of all pieces are recorded in the timeline, if there is one.
    pub(super) fn new(server: JoinedServer, timeline: Option<Arc<Timeline>>) -> Self {
        let JoinedServer { dialer, up, down, piece_bytes, window } = server;
        Self {
            dialer,
            up,
            down,
            piece_bytes,
            max_window: window,
            window: Window::new(window),
            ranges: VecDeque::new(),
            in_flight: VecDeque::new(),
            spare: Vec::new(),
            liveness: Liveness::new(),
            closed: None,
            failure_report: None,
            timeline,
        }
    }

    /// Queues a range to reduce.
    pub(super) fn push(&mut self, range: Range) {
        self.ranges.push_back(range);
    }

    /// Sends and receives what is possible now. Calls `done` with the operation of each range that
    /// is complete.
    ///
    /// # Errors
    /// When the server is lost or reports a failure.
    pub(super) fn progress(
        &mut self,
        now: Instant,
        mut done: impl FnMut(u64),
    ) -> Result<(), ClientError> {
        if self.in_flight.is_empty() {
            self.liveness.responded(now);
        }
        self.send_pieces(now);
        if self.timeline.is_some() {
            // A piece behind the first may be sent long before its result is waited for.
            self.in_flight.iter_mut().for_each(InFlight::record_sent);
        }
        while let Some(first) = self.in_flight.front_mut() {
            let was_waiting = first.head_in.is_some();
            // An error that the server reports takes precedence over one of sending.
            let message = first.receive().map_err(|why| self.dialer.error(&why))?;
            self.spare.extend(message);
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
            let count = self.in_flight.len();
            let Some(completed) = self.in_flight.pop_front() else { break };
            if let Some(operation) = self.complete(completed, count) {
                done(operation);
            }
            self.send_pieces(now);
        }
        match &self.closed {
            Some((since, why)) if now.saturating_duration_since(*since) >= ERROR_GRACE => {
                Err(self.dialer.error(why))
            }
            _ => self.liveness.check(&self.dialer, now),
        }
    }

    /// Accounts for a piece that is sent and whose result has arrived, when `count` pieces were in
    /// flight. Returns the operation if it was the last piece of its range.
    fn complete(&mut self, mut completed: InFlight, count: usize) -> Option<u64> {
        let now = Instant::now();
        self.window.completed(now - completed.begun, count);
        if let Some(timeline) = &self.timeline {
            completed.record_sent();
            let sent = completed.sent.unwrap_or(now);
            let steps = [("send", [completed.begun, sent]), ("recv", [sent, now])];
            timeline.record(&completed.piece, &steps);
        }
        if let Some(message) = Arc::into_inner(completed.message) {
            self.spare.push(message);
        }
        self.spare.truncate(2 * self.max_window);
        completed.last.then_some(completed.piece.sequence)
    }

    /// Reports this rank's failure to the server, after what was sent before.
    pub(super) fn report_failure(&mut self, why: &ClientError) {
        // A server that cannot be reached detects the failure by itself.
        self.failure_report = Packet::Failed(why.to_string()).send_last(&self.up);
    }

    /// Whether the report is sent, or cannot be.
    pub(super) fn is_reported(&mut self) -> bool {
        self.failure_report.as_mut().is_none_or(|report| report.poll(false).unwrap_or(true))
    }

    /// Sends pieces as long as the window has room.
    fn send_pieces(&mut self, now: Instant) {
        while self.closed.is_none()
            && self.in_flight.len() < self.window.size()
            && let Some(range) = self.ranges.front_mut()
        {
            let length = (range.end - range.at).min(self.piece_bytes);
            let piece = Piece { offset: range.at as u64, length: length as u32, ..range.piece };
            let (from, to) = (range.from.part(range.at, length), range.to.part(range.at, length));
            range.at += length;
            let last = range.at == range.end;
            if last {
                self.ranges.pop_front();
            }
            match self.send_piece(piece, last, from, to, now) {
                Ok(sent) => self.in_flight.push_back(sent),
                Err(why) => {
                    self.closed.get_or_insert((now, why));
                }
            }
        }
    }

    /// Posts the receives for a piece's result, then sends the piece.
    fn send_piece(
        &mut self,
        piece: Piece,
        last: bool,
        from: SendBuffer,
        to: RecvBuffer,
        now: Instant,
    ) -> Result<InFlight, String> {
        let text = |error: Error| error.to_string();
        let head_in = self.block();
        let head_in = self.down.recv_block(head_in, MESSAGE_BYTES).map_err(text)?;
        let head_in = Some(head_in.map_err(|_| too_many_messages())?);
        let mut body_in = None;
        if !piece.is_inline() {
            body_in = Some(self.down.recv(to).map_err(text)?.ok_or_else(too_many_messages)?);
        }
        let mut message = self.block();
        Packet::Part(piece).encode(message.bytes_mut());
        if piece.is_inline() {
            from.copy_to(&mut message.bytes_mut()[HEADER_BYTES..HEADER_BYTES + from.length()]);
        }
        let message = Arc::new(message);
        let mut in_flight = InFlight {
            piece,
            last,
            to,
            head_out: None,
            message,
            body_out: None,
            begun: Instant::now(),
            sent: None,
            head_in,
            body_in,
        };
        if let Err(why) = in_flight.send(&self.up, from) {
            self.closed.get_or_insert((now, why));
        }
        Ok(in_flight)
    }

    fn block(&mut self) -> Block {
        self.spare.pop().unwrap_or_else(|| Block::new(MESSAGE_BYTES))
    }
}

impl Drop for ServerLink {
    fn drop(&mut self) {
        if self.in_flight.is_empty() {
            drop(Packet::Leave.send_last(&self.up));
        }
        if let Some(timeline) = &self.timeline {
            timeline.flush();
        }
    }
}

fn too_many_messages() -> String {
    "defect: more messages in flight than the connection allows".to_owned()
}

impl InFlight {
    fn send(&mut self, up: &SendConnection, from: SendBuffer) -> Result<(), String> {
        let text = |error: Error| error.to_string();
        let head = up.send_block(&self.message, self.piece.message_bytes()).map_err(text)?;
        self.head_out = Some(head.ok_or_else(too_many_messages)?);
        if !self.piece.is_inline() {
            self.body_out = Some(up.send(from).map_err(text)?.ok_or_else(too_many_messages)?);
        }
        Ok(())
    }

    /// Receives what has arrived of the result. Returns the memory of its header's message.
    fn receive(&mut self) -> Result<Option<Block>, String> {
        let mut message = None;
        if let Some(head) = &mut self.head_in {
            let Some((block, length)) = head.poll(true).map_err(|error| error.to_string())? else {
                return Ok(None);
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
            if self.piece.is_inline() {
                self.to.copy_from(&bytes[HEADER_BYTES..]);
            }
            message = Some(block);
        }
        if let Some(body) = &self.body_in
            && let Some(length) = body.test().map_err(|error| error.to_string())?
        {
            if length != u64::from(self.piece.length) {
                return Err(format!("expected the result of {:?}, got {length} bytes", self.piece));
            }
            self.body_in = None;
        }
        Ok(message)
    }

    /// Records when the piece was sent, if it was.
    fn record_sent(&mut self) {
        // A failure is reported by the next call that needs to know.
        if self.sent.is_none() && self.is_sent().unwrap_or(false) {
            self.sent = Some(Instant::now());
        }
    }

    fn is_received(&self) -> bool {
        self.head_in.is_none() && self.body_in.is_none()
    }

    /// Whether sending is done with the piece's memory.
    fn is_sent(&mut self) -> Result<bool, String> {
        let Some(head) = &mut self.head_out else { return Ok(false) };
        let head = head.poll(false).map_err(|error| error.to_string())?;
        let body = match &self.body_out {
            None => true,
            Some(body) => body.peek().map_err(|error| error.to_string())?.is_some(),
        };
        Ok(head && body)
    }
}
