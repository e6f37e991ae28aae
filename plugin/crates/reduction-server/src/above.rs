//! A communicator's way to the servers above this one: what its ranks' parts add up to goes there as one rank's part would,
//! and comes back reduced over all leaves.
//!
//! Sums and products of narrow floats travel in float32, so that they are rounded once and not at each level.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use evenkeel_reduction_kernels::{narrow, reduce_in_place, reduce_wide, wide};
use evenkeel_transport::{Block, Notify, Receiving, RecvConnection, SendConnection, Sending};

use crate::session::{MAX_OPEN, say};
use evenkeel_reduction::client::{Dialer, JoinedServer, Liveness};
use evenkeel_reduction::protocol::{HEADER_BYTES, MESSAGE_BYTES, Packet, Piece};

/// How long to wait for a server's word once it takes nothing any more: the word may be on its way.
const LAST_WORD: Duration = Duration::from_secs(1);

/// How often a piece's largest form is larger than the piece: fp8 in float32.
const WIDEST: u64 = 4;

/// Bytes for the sums of a piece that are on their way up, and for what comes back.
pub(crate) fn climbing_bytes(chunk: u64) -> u64 {
    2 * WIDEST * chunk
}

/// The servers above, for one communicator.
pub(crate) struct Above {
    /// In the order that all leaves know them in: pieces take turns.
    lines: Vec<Line>,
    /// Number of the piece that goes up next: all leaves send theirs in the same order.
    next: u64,
    /// Sums of later ones.
    waiting: BTreeMap<u64, Climb>,
}

/// A piece on its way up.
pub(crate) struct Climb {
    /// As its ranks know it.
    piece: Piece,
    /// By cut: the sum, and memory for what it becomes.
    cuts: Vec<(Block, Block)>,
}

/// A piece that has come back.
pub(crate) struct Landed {
    pub(crate) number: u64,
    /// Reduced over all leaves; see [`Landed::settle`].
    results: Vec<Block>,
    /// Memory that is not needed any more.
    pub(crate) spare: Vec<Block>,
}

/// The connections with one server above.
struct Line {
    dialer: Dialer,
    up: SendConnection,
    down: RecvConnection,
    /// Most pieces on their way.
    window: usize,
    queue: VecDeque<Cut>,
    flying: VecDeque<Flying>,
    /// Of the piece whose cuts are coming back.
    landed: Vec<Block>,
    spare: Vec<Block>,
    liveness: Liveness,
    /// It takes nothing any more, since when and why.
    deaf: Option<(Instant, String)>,
}

/// As much of a piece as a server takes at once.
struct Cut {
    number: u64,
    /// As the server above knows it.
    piece: Piece,
    /// Whether it ends its piece.
    last: bool,
    sum: Block,
    result: Block,
}

/// A cut on its way.
struct Flying {
    number: u64,
    piece: Piece,
    last: bool,
    sum: Arc<Block>,
    head_out: Sending,
    body_out: Option<Sending>,
    /// None once it has come.
    head_in: Option<Receiving>,
    body_in: Option<Receiving>,
    /// What has come, or room for it where that is small.
    result: Option<Block>,
}

/// Bytes that a piece has on its way up.
pub(crate) fn climbing_length(piece: &Piece) -> u64 {
    cuts(piece, usize::MAX).iter().map(|cut| u64::from(cut.length)).sum()
}

/// The pieces that one goes up in, where a server takes so many bytes at once.
fn cuts(piece: &Piece, chunk: usize) -> Vec<Piece> {
    let kind = wide(piece.kind, piece.op).unwrap_or(piece.kind);
    let factor = kind.bytes() / piece.kind.bytes();
    let length = piece.length as usize * factor;
    let cut = |at: usize| Piece {
        offset: piece.offset * factor as u64 + at as u64,
        total: piece.total * factor as u64,
        length: (length - at).min(chunk) as u32,
        kind,
        ..*piece
    };
    (0..length).step_by(chunk).map(cut).collect()
}

impl Climb {
    /// Reduces a leaf's own parts, in their order, to what goes up in cuts of at most `chunk` bytes. Of the parts' memory,
    /// what is not needed for that stays.
    ///
    /// # Errors
    /// A defect of this program.
    pub(crate) fn add_up(
        piece: Piece,
        chunk: usize,
        parts: &mut Vec<Block>,
        spare: &mut Vec<Block>,
    ) -> Result<Self, String> {
        let defect = |error| format!("defect: {error}");
        let mut block = || spare.pop().unwrap_or_else(|| Block::new(chunk));
        let length = piece.length as usize;
        let Piece { kind, op, .. } = piece;
        let mut all = vec![];
        if wide(kind, op).is_none() {
            let mut sum = parts.remove(0);
            let others: Vec<&[u8]> = parts.iter().map(|part| &part.bytes()[..length]).collect();
            reduce_in_place(kind, op, &mut sum.bytes_mut()[..length], &others).map_err(defect)?;
            all.push((sum, block()));
            return Ok(Self { piece, cuts: all });
        }
        let mut at = 0;
        for cut in cuts(&piece, chunk) {
            let mut sum = block();
            let bytes = cut.length as usize;
            let narrow = bytes / cut.kind.bytes() * kind.bytes();
            let own: Vec<&[u8]> = parts.iter().map(|part| &part.bytes()[at..at + narrow]).collect();
            reduce_wide(kind, op, &own, &mut sum.bytes_mut()[..bytes]).map_err(defect)?;
            at += narrow;
            all.push((sum, block()));
        }
        Ok(Self { piece, cuts: all })
    }
}

impl Landed {
    /// The piece's result in one block, of `chunk` bytes at least.
    ///
    /// # Errors
    /// A defect of this program.
    pub(crate) fn settle(&mut self, piece: &Piece, chunk: usize) -> Result<Block, String> {
        let defect = || "defect: a piece came back in other cuts than it went".to_owned();
        if wide(piece.kind, piece.op).is_none() {
            return self.results.pop().ok_or_else(defect);
        }
        let mut result = self.spare.pop().unwrap_or_else(|| Block::new(chunk));
        let mut at = 0;
        for (cut, block) in cuts(piece, chunk).iter().zip(&self.results) {
            let bytes = cut.length as usize;
            let narrowed = bytes / cut.kind.bytes() * piece.kind.bytes();
            let into = result.bytes_mut().get_mut(at..at + narrowed).ok_or_else(defect)?;
            narrow(piece.kind, &block.bytes()[..bytes], into)
                .map_err(|error| format!("defect: {error}"))?;
            at += narrowed;
        }
        self.spare.append(&mut self.results);
        Ok(result)
    }
}

impl Above {
    /// Over these connections.
    pub(crate) fn new(joined: Vec<JoinedServer>) -> Self {
        Self {
            lines: joined.into_iter().map(Line::new).collect(),
            next: 0,
            waiting: BTreeMap::new(),
        }
    }

    /// ControlMessage of each line's connections goes here.
    pub(crate) fn notify(&self, notified: impl Fn(usize) -> Arc<dyn Notify>) {
        for (index, line) in self.lines.iter().enumerate() {
            line.up.notify(notified(index));
            line.down.notify(notified(index));
        }
    }

    /// Takes the sum of the piece of this number.
    pub(crate) fn send(&mut self, number: u64, climb: Climb, chunk: usize) {
        self.waiting.insert(number, climb);
        while let Some(Climb { piece, cuts: blocks }) = self.waiting.remove(&self.next) {
            let number = self.next;
            let lines = self.lines.len() as u64;
            let line = &mut self.lines[(number % lines) as usize];
            let count = blocks.len();
            for (index, (cut, (sum, result))) in
                cuts(&piece, chunk).into_iter().zip(blocks).enumerate()
            {
                line.queue.push_back(Cut {
                    number,
                    piece: cut,
                    last: index + 1 == count,
                    sum,
                    result,
                });
            }
            self.next += 1;
        }
    }

    /// Moves what can be moved; gives what has come back.
    ///
    /// # Errors
    /// When a server above is lost or says that it cannot go on, which names it.
    pub(crate) fn progress(&mut self, now: Instant) -> Result<Vec<Landed>, String> {
        let mut landed = vec![];
        for line in &mut self.lines {
            line.progress(now, &mut landed).map_err(|error| format!("upstream {error}"))?;
        }
        Ok(landed)
    }

    /// Tells the servers above why the communicator cannot go on.
    pub(crate) fn tell(&self, why: &str) {
        for line in &self.lines {
            // Who cannot be told notices by itself.
            say(&line.up, &Packet::Failed(why.to_owned()));
        }
    }
}

impl Drop for Above {
    fn drop(&mut self) {
        for line in &self.lines {
            if line.flying.is_empty() && line.queue.is_empty() {
                say(&line.up, &Packet::Leave);
            }
        }
    }
}

impl Line {
    fn new(joined: JoinedServer) -> Self {
        let JoinedServer { dialer, up, down, window, .. } = joined;
        Self {
            dialer,
            up,
            down,
            // What a communicator is granted is for so many.
            window: window.min(MAX_OPEN),
            queue: VecDeque::new(),
            flying: VecDeque::new(),
            landed: Vec::new(),
            spare: Vec::new(),
            liveness: Liveness::new(),
            deaf: None,
        }
    }

    fn progress(
        &mut self,
        now: Instant,
        landed: &mut Vec<Landed>,
    ) -> Result<(), evenkeel_reduction::ClientError> {
        if self.flying.is_empty() {
            self.liveness.responded(now);
        }
        self.begin(now);
        while let Some(flying) = self.flying.front_mut() {
            let was_waiting = flying.head_in.is_some();
            // What it had to say is said: why it takes nothing any more is older news.
            flying.receive().map_err(|why| self.dialer.error(&why))?;
            if was_waiting && flying.head_in.is_none() {
                self.liveness.responded(now);
            }
            match flying.is_sent() {
                Ok(true) if flying.is_received() => {}
                Ok(_) => break,
                Err(why) => {
                    self.deaf.get_or_insert((now, why));
                    break;
                }
            }
            let Some(flying) = self.flying.pop_front() else { break };
            self.landed.extend(flying.result);
            self.spare.extend(Arc::into_inner(flying.sum));
            if flying.last {
                landed.push(Landed {
                    number: flying.number,
                    results: std::mem::take(&mut self.landed),
                    spare: std::mem::take(&mut self.spare),
                });
            }
            self.begin(now);
        }
        match &self.deaf {
            Some((since, why)) if now.saturating_duration_since(*since) >= LAST_WORD => {
                Err(self.dialer.error(why))
            }
            _ => self.liveness.check(&self.dialer, now),
        }
    }

    /// Begins cuts as long as there is room.
    fn begin(&mut self, now: Instant) {
        while self.deaf.is_none()
            && self.flying.len() < self.window
            && let Some(cut) = self.queue.pop_front()
        {
            match self.launch(cut) {
                Ok(flying) => self.flying.push_back(flying),
                Err(why) => {
                    self.deaf.get_or_insert((now, why));
                }
            }
        }
    }

    fn launch(&self, cut: Cut) -> Result<Flying, String> {
        let Cut { number, piece, last, sum, result } = cut;
        let text = |error: evenkeel_transport::Error| error.to_string();
        let length = piece.length as usize;
        let head_in = self.down.recv_block(Block::new(MESSAGE_BYTES), MESSAGE_BYTES);
        let head_in = head_in.map_err(text)?.map_err(|_| too_many())?;
        let (mut body_in, mut small) = (None, None);
        if piece.is_inline() {
            small = Some(result);
        } else {
            let receiving = self.down.recv_block(result, length).map_err(text)?;
            body_in = Some(receiving.map_err(|_| too_many())?);
        }
        let mut head = Block::new(MESSAGE_BYTES);
        Packet::Part(piece).encode(head.bytes_mut());
        if piece.is_inline() {
            let payload = HEADER_BYTES..HEADER_BYTES + length;
            head.bytes_mut()[payload].copy_from_slice(&sum.bytes()[..length]);
        }
        let sending = self.up.send_block(&Arc::new(head), piece.message_bytes()).map_err(text)?;
        let head_out = sending.ok_or_else(too_many)?;
        let sum = Arc::new(sum);
        let mut body_out = None;
        if !piece.is_inline() {
            let sending = self.up.send_block(&sum, length).map_err(text)?;
            body_out = Some(sending.ok_or_else(too_many)?);
        }
        let head_in = Some(head_in);
        Ok(Flying { number, piece, last, sum, head_out, body_out, head_in, body_in, result: small })
    }
}

fn too_many() -> String {
    "defect: more messages are on their way than were agreed".to_owned()
}

impl Flying {
    /// Takes what has come of the result.
    fn receive(&mut self) -> Result<(), String> {
        if let Some(head) = &mut self.head_in {
            let Some((block, length)) = head.poll(false).map_err(|error| error.to_string())? else {
                return Ok(());
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
            if let Some(small) = &mut self.result {
                let payload = &bytes[HEADER_BYTES..];
                small.bytes_mut()[..payload.len()].copy_from_slice(payload);
            }
        }
        if let Some(body) = &mut self.body_in
            && let Some((block, length)) = body.poll(false).map_err(|error| error.to_string())?
        {
            if length != self.piece.length as usize {
                return Err(format!("a result of {length} bytes where {:?} was due", self.piece));
            }
            self.body_in = None;
            self.result = Some(block);
        }
        Ok(())
    }

    fn is_received(&self) -> bool {
        self.head_in.is_none() && self.body_in.is_none()
    }

    /// Whether its memory is not needed any more for sending.
    fn is_sent(&mut self) -> Result<bool, String> {
        let head = self.head_out.poll(false).map_err(|error| error.to_string())?;
        let body = match &mut self.body_out {
            None => true,
            Some(body) => body.poll(false).map_err(|error| error.to_string())?,
        };
        Ok(head && body)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use evenkeel_reduction_kernels::{DataType, Op, reference};

    fn piece(kind: DataType, op: Op, length: usize) -> Piece {
        let (total, offset) = (1 << 20, 128);
        Piece { sequence: 3, offset, total, length: length as u32, kind, op }
    }

    #[test]
    fn narrow_sums_go_up_in_float32_and_nothing_else_changes() {
        let up = cuts(&piece(DataType::Float16, Op::Sum, 1000), 1024);
        let got: Vec<_> = up.iter().map(|cut| (cut.offset, cut.length, cut.total)).collect();
        assert_eq!(got, [(256, 1024, 2 << 20), (1280, 976, 2 << 20)]);
        assert!(up.iter().all(|cut| cut.kind == DataType::Float32));
        for (kind, op) in [(DataType::Float32, Op::Sum), (DataType::Float16, Op::Max)] {
            let piece = piece(kind, op, 1000);
            assert_eq!(cuts(&piece, 1024), [piece]);
        }
    }

    /// What two leaves send up, brought together as a server does, is what one server with all parts would have got where
    /// the order of adding does not matter, and its memory all comes back.
    #[test]
    fn leaves_together_are_one_server() {
        const CHUNK: usize = 1024;
        for kind in DataType::ALL {
            for op in [Op::Sum, Op::Max] {
                let length = CHUNK - 24;
                let piece = piece(kind, op, length);
                // Numbers that all formats add without rounding.
                let part = |rank: usize| -> Vec<u8> {
                    let bits = |i: usize| (i * (rank + 1) % 5) as u8;
                    let zeros = vec![0; kind.bytes()];
                    (0..length / kind.bytes())
                        .flat_map(|i| {
                            let mut element = zeros.clone();
                            // A small number in integers; the top of a float: 0, or a power of two.
                            element[kind.bytes() - 1] =
                                [0x00, 0x38, 0x38, 0x30, 0x00][bits(i) as usize];
                            element
                        })
                        .collect()
                };
                let block = |bytes: &[u8]| {
                    let mut block = Block::new(CHUNK);
                    block.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
                    block
                };
                let all: Vec<_> = (0..4).map(part).collect();
                let leaf = |ranks: [usize; 2]| {
                    let mut parts = ranks.map(|rank| block(&all[rank])).into();
                    let mut spare = vec![];
                    Climb::add_up(piece, CHUNK, &mut parts, &mut spare).unwrap()
                };
                let (left, right) = (leaf([0, 1]), leaf([2, 3]));
                let mut landed = Landed { number: 0, results: vec![], spare: vec![] };
                for ((cut, (mut sum, _)), (other, _)) in
                    cuts(&piece, CHUNK).iter().zip(left.cuts).zip(right.cuts)
                {
                    let bytes = cut.length as usize;
                    let others = [&other.bytes()[..bytes]];
                    reduce_in_place(cut.kind, op, &mut sum.bytes_mut()[..bytes], &others).unwrap();
                    landed.results.push(sum);
                }
                let got = landed.settle(&piece, CHUNK).unwrap();
                let sources: Vec<&[u8]> = all.iter().map(Vec::as_slice).collect();
                let mut want = vec![0; length];
                reference::reduce(kind, op, &sources, &mut want).unwrap();
                assert!(got.bytes()[..length] == want, "{op:?} of {kind:?}");
            }
        }
    }
}
