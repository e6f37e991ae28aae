//! The connections of one rank. Errors say what the rank did, without its name.

use std::collections::VecDeque;
use std::net::SocketAddr;

use evenkeel_reduction::protocol::{HEADER_BYTES, MESSAGE_BYTES, Packet, Piece};
use evenkeel_transport::{Block, Error, PendingRecv, PendingSend, RecvConnection, SendConnection};

use super::slots::Slot;

/// The connections of one rank, and the messages in flight.
pub(super) struct RankConnection {
    up: RecvConnection,
    down: SendConnection,
    /// The message with the next header.
    head: Option<PendingRecv>,
    /// The last header and its message, as long as its piece has no slot.
    waiting: Option<(Piece, Block)>,
    /// Parts that are being received, with their pieces' numbers.
    parts: VecDeque<(u64, PendingRecv)>,
    /// Results that are being sent, with their pieces' numbers.
    results: VecDeque<(u64, PendingSend, Option<PendingSend>)>,
}

/// What a rank has sent.
pub(super) enum Header {
    /// Nothing, or a part that still waits for a slot.
    None,
    /// The header of a part.
    Part,
    /// The rank leaves.
    Leave,
}

/// A part that has arrived.
pub(super) struct Part {
    /// Number of its piece.
    pub(super) number: u64,
    pub(super) block: Block,
    /// Size of its payload, in bytes.
    pub(super) length: usize,
}

impl RankConnection {
    /// Over these connections, of which the first receives into `head`.
    pub(super) fn new(up: RecvConnection, down: SendConnection, head: PendingRecv) -> Self {
        Self {
            up,
            down,
            head: Some(head),
            waiting: None,
            parts: VecDeque::new(),
            results: VecDeque::new(),
        }
    }

    /// The number of the next piece whose result is sent to the rank.
    pub(super) fn poll_result(&mut self) -> Result<Option<u64>, String> {
        let Some((number, head, body)) = self.results.front_mut() else { return Ok(None) };
        let is_sent = |sending: &mut PendingSend| sending.poll(false);
        let sent = is_sent(head).and_then(|sent| match body {
            Some(body) => Ok(is_sent(body)? && sent),
            None => Ok(sent),
        });
        if !sent.map_err(|error| lost(self.down.peer(), &error))? {
            return Ok(None);
        }
        let number = *number;
        self.results.pop_front();
        Ok(Some(number))
    }

    /// The next part that has arrived.
    pub(super) fn poll_part(&mut self) -> Result<Option<Part>, String> {
        let Some((number, receiving)) = self.parts.front_mut() else { return Ok(None) };
        let number = *number;
        let part = receiving.poll(false).map_err(|error| lost(self.up.peer(), &error))?;
        let Some((block, length)) = part else { return Ok(None) };
        self.parts.pop_front();
        Ok(Some(Part { number, block, length }))
    }

    /// Receives the next header, unless the last one still waits. `piece_bytes` is the maximum size
    /// of a part.
    pub(super) fn poll_header(&mut self, piece_bytes: usize) -> Result<Header, String> {
        if self.waiting.is_some() {
            return Ok(Header::None);
        }
        let Some(head) = &mut self.head else { return Ok(Header::None) };
        let received = head.poll(false).map_err(|error| lost(self.up.peer(), &error))?;
        let Some((block, length)) = received else { return Ok(Header::None) };
        self.head = None;
        let message = block.bytes().get(..length).unwrap_or_default();
        match Packet::decode(message).map_err(|error| format!("sends {error}"))? {
            Packet::Part(piece) if piece.length as usize <= piece_bytes => {
                self.waiting = Some((piece, block));
                Ok(Header::Part)
            }
            Packet::Part(piece) => {
                Err(format!("sends a part of {} bytes, the maximum is {piece_bytes}", piece.length))
            }
            Packet::Leave if !self.parts.is_empty() => {
                Err("left before its parts had arrived".to_owned())
            }
            Packet::Leave => Ok(Header::Leave),
            Packet::Failed(why) => Err(format!("at {} reports: {why}", self.up.peer())),
            other => Err(format!("sends {other:?} instead of a part")),
        }
    }

    /// The piece of the header that waits for a slot.
    pub(super) fn waiting(&self) -> Option<Piece> {
        self.waiting.as_ref().map(|(piece, _)| *piece)
    }

    /// Receives the part of the waiting header into `block`, and then the next header. Returns the
    /// part if it was in the same message as its header.
    pub(super) fn receive_part(
        &mut self,
        number: u64,
        mut block: Block,
    ) -> Result<Option<Part>, String> {
        let Some((piece, message)) = self.waiting.take() else { return Ok(None) };
        let length = piece.length as usize;
        let mut arrived = None;
        if piece.is_inline() {
            let payload = &message.bytes()[HEADER_BYTES..HEADER_BYTES + length];
            block.bytes_mut()[..length].copy_from_slice(payload);
            arrived = Some(Part { number, block, length });
        } else {
            let receiving = self.post_receive(block, length)?;
            self.parts.push_back((number, receiving));
        }
        self.head = Some(self.post_receive(message, MESSAGE_BYTES)?);
        Ok(arrived)
    }

    fn post_receive(&self, block: Block, length: usize) -> Result<PendingRecv, String> {
        let posted = self.up.recv_block(block, length);
        let posted = posted.map_err(|error| lost(self.up.peer(), &error))?;
        posted.map_err(|_| "has more messages in flight than the connection allows".to_owned())
    }

    /// Sends the result of the piece with this number.
    pub(super) fn send_result(
        &mut self,
        number: u64,
        piece: &Piece,
        slot: &Slot,
    ) -> Result<(), String> {
        let lost = |error| lost(self.down.peer(), &error);
        let full = || "does not take results".to_owned();
        let head = self.down.send_block(&slot.head, piece.message_bytes()).map_err(lost)?;
        let head = head.ok_or_else(full)?;
        let body = match &slot.result {
            Some(result) if !piece.is_inline() => {
                let body = self.down.send_block(result, piece.length as usize);
                Some(body.map_err(lost)?.ok_or_else(full)?)
            }
            _ => None,
        };
        self.results.push_back((number, head, body));
        Ok(())
    }

    /// The numbers of the pieces whose results are being sent.
    pub(super) fn unsent_results(&self) -> impl Iterator<Item = u64> {
        self.results.iter().map(|(number, ..)| *number)
    }

    /// Reports the communicator's failure to the rank.
    pub(super) fn report_failure(&self, why: &str) {
        // A rank that cannot be reached detects the failure by itself.
        drop(Packet::Failed(why.to_owned()).send_last(&self.down));
    }

    /// Whether the rank has left, or was lost, after the communicator has failed.
    pub(super) fn has_left(&mut self) -> bool {
        let Some(head) = &mut self.head else { return false };
        match head.poll(false) {
            Err(_) => true,
            Ok(None) => false,
            Ok(Some((block, length))) => {
                let message = block.bytes().get(..length).unwrap_or_default();
                Packet::decode(message) == Ok(Packet::Leave)
            }
        }
    }
}

fn lost(peer: SocketAddr, error: &Error) -> String {
    format!("at {peer} was lost: {error}")
}
