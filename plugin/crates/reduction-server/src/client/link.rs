//! A client's connections with one server, and the pieces on their way there and back.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use evenkeel_transport::{
    Block, Receiving, RecvBuffer, RecvConnection, Request, SendBuffer, SendConnection, Sending,
};

use super::window::Window;
use super::{Caller, ClientError, Joined, Pulse};
use crate::packet::{HEADER_BYTES, MESSAGE_BYTES, Packet, Piece};
use crate::timeline::Timeline;

/// How long to wait for the server's word once it takes nothing any more: the word may be on its way.
const LAST_WORD: Duration = Duration::from_secs(1);

/// A rank at one server.
pub(super) struct Link {
    caller: Caller,
    up: SendConnection,
    down: RecvConnection,
    /// Largest piece, in bytes.
    chunk: usize,
    /// Most pieces that the server takes.
    most: usize,
    window: Window,
    ranges: VecDeque<Range>,
    flying: VecDeque<Flying>,
    /// Memory for messages.
    spare: Vec<Block>,
    pulse: Pulse,
    /// It takes nothing any more, since when and why.
    deaf: Option<(Instant, String)>,
    /// Why this rank cannot go on, on its way.
    last_word: Option<Sending>,
    /// Where to note pieces' moments, if anywhere.
    timeline: Option<Arc<Timeline>>,
}

/// What is left of an operation's range.
pub(super) struct Range {
    /// But for offset and length.
    pub(super) piece: Piece,
    /// Where the next piece begins, in the operation's vector.
    pub(super) at: usize,
    pub(super) end: usize,
    /// The whole vector.
    pub(super) from: SendBuffer,
    /// The whole vector.
    pub(super) to: RecvBuffer,
}

/// A piece on its way.
struct Flying {
    piece: Piece,
    /// Whether it ends its range.
    last: bool,
    to: RecvBuffer,
    /// None where the server takes nothing any more.
    head_out: Option<Sending>,
    /// The message that is sent; others may not have it before that is done.
    message: Arc<Block>,
    body_out: Option<Request>,
    begun: Instant,
    /// When it was first seen to be sent.
    sent: Option<Instant>,
    /// None once it has come.
    head_in: Option<Receiving>,
    body_in: Option<Request>,
}

impl Link {
    /// Moments of all pieces are noted in the timeline, if there is one.
    pub(super) fn new(joined: Joined, timeline: Option<Arc<Timeline>>) -> Self {
        let Joined { caller, up, down, chunk, window } = joined;
        Self {
            caller,
            up,
            down,
            chunk,
            most: window,
            window: Window::new(window),
            ranges: VecDeque::new(),
            flying: VecDeque::new(),
            spare: Vec::new(),
            pulse: Pulse::new(),
            deaf: None,
            last_word: None,
            timeline,
        }
    }

    /// Takes a range to reduce.
    pub(super) fn push(&mut self, range: Range) {
        self.ranges.push_back(range);
    }

    /// Moves what can be moved; calls `done` with the operation of each range that is done.
    ///
    /// # Errors
    /// When the server is lost or says that it cannot go on.
    pub(super) fn progress(
        &mut self,
        now: Instant,
        mut done: impl FnMut(u64),
    ) -> Result<(), ClientError> {
        if self.flying.is_empty() {
            self.pulse.heard(now);
        }
        self.begin(now);
        if self.timeline.is_some() {
            // One behind the first may be sent long before anybody asks.
            self.flying.iter_mut().for_each(Flying::note_sent);
        }
        while let Some(flying) = self.flying.front_mut() {
            let was_waiting = flying.head_in.is_some();
            match flying.receive() {
                Ok(Some(block)) => self.spare.push(block),
                Ok(None) => {}
                Err(why) => {
                    // What it had to say is said: why it takes nothing any more is older news.
                    return Err(self.caller.error(&why));
                }
            }
            if was_waiting && flying.head_in.is_none() {
                self.pulse.heard(now);
            }
            match flying.is_sent() {
                Ok(true) if flying.is_received() => {}
                Ok(_) => break,
                Err(why) => {
                    self.deaf.get_or_insert((now, why));
                    break;
                }
            }
            let count = self.flying.len();
            let Some(mut flying) = self.flying.pop_front() else { break };
            let back = Instant::now();
            self.window.back(back - flying.begun, count);
            if let Some(timeline) = &self.timeline {
                flying.note_sent();
                let sent = flying.sent.unwrap_or(back);
                timeline.journey(&flying.piece, flying.begun, sent, back);
            }
            if let Some(message) = Arc::into_inner(flying.message) {
                self.spare.push(message);
            }
            self.spare.truncate(2 * self.most);
            if flying.last {
                done(flying.piece.sequence);
            }
            self.begin(now);
        }
        match &self.deaf {
            Some((since, why)) if now.saturating_duration_since(*since) >= LAST_WORD => {
                Err(self.caller.error(why))
            }
            _ => self.pulse.check(&self.caller, now),
        }
    }

    /// Tells the server why this rank cannot go on, once what is on its way has been sent.
    pub(super) fn tell(&mut self, why: &ClientError) {
        self.last_word = self.say(&Packet::Failed(why.to_string()));
    }

    /// Whether the server has been told, or cannot be.
    pub(super) fn is_told(&mut self) -> bool {
        self.last_word.as_mut().is_none_or(|word| word.poll(false).unwrap_or(true))
    }

    /// Sends a message without payload. A server that cannot be told notices by itself.
    fn say(&self, packet: &Packet) -> Option<Sending> {
        let mut block = Block::new(MESSAGE_BYTES);
        let length = packet.encode(block.bytes_mut());
        self.up.send_block(&Arc::new(block), length).ok().flatten()
    }

    /// Begins pieces as long as there is room.
    fn begin(&mut self, now: Instant) {
        while self.deaf.is_none()
            && self.flying.len() < self.window.size()
            && let Some(range) = self.ranges.front_mut()
        {
            let length = (range.end - range.at).min(self.chunk);
            let piece = Piece { offset: range.at as u64, length: length as u32, ..range.piece };
            let (from, to) = (range.from.part(range.at, length), range.to.part(range.at, length));
            range.at += length;
            let last = range.at == range.end;
            if last {
                self.ranges.pop_front();
            }
            match self.launch(piece, last, from, to, now) {
                Ok(flying) => self.flying.push_back(flying),
                Err(why) => {
                    self.deaf.get_or_insert((now, why));
                }
            }
        }
    }

    fn launch(
        &mut self,
        piece: Piece,
        last: bool,
        from: SendBuffer,
        to: RecvBuffer,
        now: Instant,
    ) -> Result<Flying, String> {
        let text = |error: evenkeel_transport::Error| error.to_string();
        let head_in = self.block();
        let head_in = self.down.recv_block(head_in, MESSAGE_BYTES).map_err(text)?;
        let head_in = Some(head_in.map_err(|_| too_many())?);
        let mut body_in = None;
        if !piece.is_inline() {
            body_in = Some(self.down.recv(to).map_err(text)?.ok_or_else(too_many)?);
        }
        let mut message = self.block();
        Packet::Part(piece).encode(message.bytes_mut());
        if piece.is_inline() {
            from.copy_to(&mut message.bytes_mut()[HEADER_BYTES..HEADER_BYTES + from.length()]);
        }
        let message = Arc::new(message);
        let mut flying = Flying {
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
        if let Err(why) = flying.send(&self.up, from) {
            self.deaf.get_or_insert((now, why));
        }
        Ok(flying)
    }

    fn block(&mut self) -> Block {
        self.spare.pop().unwrap_or_else(|| Block::new(MESSAGE_BYTES))
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if self.flying.is_empty() {
            drop(self.say(&Packet::Leave));
        }
        if let Some(timeline) = &self.timeline {
            timeline.flush();
        }
    }
}

fn too_many() -> String {
    "defect: more messages are on their way than were agreed".to_owned()
}

impl Flying {
    fn send(&mut self, up: &SendConnection, from: SendBuffer) -> Result<(), String> {
        let text = |error: evenkeel_transport::Error| error.to_string();
        let head = up.send_block(&self.message, self.piece.message_bytes()).map_err(text)?;
        self.head_out = Some(head.ok_or_else(too_many)?);
        if !self.piece.is_inline() {
            self.body_out = Some(up.send(from).map_err(text)?.ok_or_else(too_many)?);
        }
        Ok(())
    }

    /// Takes what has come of the result; the message's memory if that was the message.
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
                    return Err(format!("it answers {other:?} where {:?} was due", self.piece));
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
                return Err(format!("a result of {length} bytes where {:?} was due", self.piece));
            }
            self.body_in = None;
        }
        Ok(message)
    }

    /// Notes when it was sent, if it was.
    fn note_sent(&mut self) {
        // A failure is told to who asks for more than that.
        if self.sent.is_none() && self.is_sent().unwrap_or(false) {
            self.sent = Some(Instant::now());
        }
    }

    fn is_received(&self) -> bool {
        self.head_in.is_none() && self.body_in.is_none()
    }

    /// Whether its memory is not needed any more for sending.
    fn is_sent(&mut self) -> Result<bool, String> {
        let Some(head) = &mut self.head_out else { return Ok(false) };
        let head = head.poll(false).map_err(|error| error.to_string())?;
        let body = match &self.body_out {
            None => true,
            Some(body) => body.look().map_err(|error| error.to_string())?.is_some(),
        };
        Ok(head && body)
    }
}
