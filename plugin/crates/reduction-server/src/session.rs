//! One communicator at the server: its ranks' connections, and the memory that their pieces pass through.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

use evenkeel_reduction_kernels::reduce_in_place;
use evenkeel_transport::{
    Block, Notify, Receiving, RecvConnection, SendConnection, Sending, defer_on_worker,
};

use crate::above::{Above, Climb, Landed, climbing_bytes, climbing_length};
use crate::budget::Grant;
use crate::group::{Group, Place};
use crate::lock;
use crate::metrics::JobMetrics;
use crate::pool::Task;
use crate::server::Shared;
use crate::timeline::{Moments, record};
use evenkeel_reduction::client::JoinedServer;
use evenkeel_reduction::protocol::{HEADER_BYTES, MESSAGE_BYTES, Member, Packet, Piece};

/// Most pieces of a communicator that are open: two messages each on a connection that takes 32.
pub(crate) const MAX_OPEN: usize = 12;
/// Largest piece, unless something else is asked for. Smaller ones start the flow of results sooner, larger ones cost less each.
pub const PIECE_BYTES: u64 = 256 << 10;
/// Smallest largest piece. It is larger than what comes with its header.
pub const MIN_PIECE_BYTES: u64 = 16 << 10;
/// So many communicators' parts of one piece each shall fit into memory, if pieces can be made small enough.
const COMMUNICATORS: u64 = 128;
/// Most bytes of a connection's copies of small results and headers that its rank has not acknowledged.
pub(crate) const COPIES_BYTES: usize = 32 << 10;
/// A piece with this many bytes of parts is reduced by whoever finds it complete: to wake another thread takes longer.
const AT_ONCE_BYTES: usize = 64 << 10;

/// Bytes of the largest piece where so many ranks send it, at most `most`: a multiple of 128.
pub(crate) fn chunk_bytes(memory: u64, most: u64, ranks: u32) -> u64 {
    let fair = memory / COMMUNICATORS / u64::from(ranks);
    fair.min(most).max(MIN_PIECE_BYTES) / 128 * 128
}

/// Bytes of a piece's slot, where sums go to so many servers above.
pub(crate) fn slot_bytes(chunk: u64, ranks: u32, above: usize) -> u64 {
    let climbing = if above > 0 { climbing_bytes(chunk) } else { 0 };
    chunk * u64::from(ranks) + climbing + MESSAGE_BYTES as u64
}

/// Bytes that a communicator has for as long as it lives: the ranks' messages and those of the servers above, what is kept
/// for them, and one slot.
pub(crate) fn base_bytes(chunk: u64, ranks: u32, above: usize) -> u64 {
    let lines = u64::from(ranks) * (MESSAGE_BYTES + COPIES_BYTES) as u64;
    // Of each piece there, its header and room for the answer's.
    let above_them = above * (2 * MAX_OPEN * MESSAGE_BYTES + COPIES_BYTES);
    slot_bytes(chunk, ranks, above) + lines + above_them as u64
}

/// A communicator.
pub(crate) struct Session {
    member: Member,
    chunk: usize,
    shared: Arc<Shared>,
    metrics: JobMetrics,
    /// By rank, then by server above: something is new.
    stirred: Vec<AtomicBool>,
    /// Whether a thread looks, or is asked to.
    driven: AtomicBool,
    state: Mutex<State>,
    /// How many servers above it has.
    above: usize,
    born: Instant,
    /// For as long as it lives.
    _base: Grant,
}

struct State {
    group: Group<Slot>,
    /// Where sums go before they go to the ranks, if not all ranks are here.
    above: Option<Above>,
    /// By rank; none before it joins and after it left.
    lines: Vec<Option<Line>>,
    /// By rank.
    joined: Vec<bool>,
    /// Slots that are not in use.
    free: Vec<Slot>,
    /// Slots there are.
    slots: u64,
    /// Why it cannot go on, and since when.
    failed: Option<(String, Instant)>,
}

/// Memory for one piece.
struct Slot {
    /// By rank.
    parts: Vec<Option<Block>>,
    /// For sums on their way up, and what comes back.
    spare: Vec<Block>,
    /// The header of the result, and the result if it is small.
    head: Arc<Block>,
    result: Option<Arc<Block>>,
    moments: Moments,
    /// None where it is the one that the communicator always has.
    grant: Option<Grant>,
}

/// The connections of one rank.
struct Line {
    up: RecvConnection,
    down: SendConnection,
    /// The message with the next header.
    head: Option<Receiving>,
    /// What it was, when there was no slot for its piece.
    waiting: Option<(Piece, Block)>,
    /// Parts that are coming.
    parts: VecDeque<(u64, Receiving)>,
    /// Results that are going.
    results: VecDeque<(u64, Sending, Option<Sending>)>,
}

/// Tells a session that a connection of a rank, or of a server above, has something new.
struct Stir {
    session: Weak<Session>,
    rank: usize,
}

impl Notify for Stir {
    fn notify(&self) {
        if let Some(session) = self.session.upgrade() {
            session.stir(self.rank);
        }
    }
}

impl Session {
    /// A communicator that nobody has joined yet, with these ways up.
    pub(crate) fn new(
        shared: Arc<Shared>,
        member: &Member,
        chunk: u64,
        base: Grant,
        above: Vec<JoinedServer>,
    ) -> Arc<Self> {
        let ranks = member.position.count as usize;
        let metrics = shared.metrics.of(&member.job);
        metrics.communicators.inc();
        let lines = above.len();
        let mut group = Group::new(ranks, MAX_OPEN);
        (0..member.position.count)
            .for_each(|index| group.set_name(index as usize, member.name_of(index)));
        let above = (lines > 0).then(|| Above::new(above));
        let session = Arc::new(Self {
            member: member.clone(),
            chunk: chunk as usize,
            shared,
            metrics,
            stirred: (0..ranks + lines).map(|_| AtomicBool::new(false)).collect(),
            driven: AtomicBool::new(false),
            state: Mutex::new(State {
                group,
                above: None,
                lines: (0..ranks).map(|_| None).collect(),
                joined: vec![false; ranks],
                free: Vec::new(),
                slots: 0,
                failed: None,
            }),
            above: lines,
            born: Instant::now(),
            _base: base,
        });
        if let Some(above) = above {
            let weak = Arc::downgrade(&session);
            above.notify(|line| Arc::new(Stir { session: Weak::clone(&weak), rank: ranks + line }));
            lock(&session.state).above = Some(above);
        }
        session
    }

    /// What its ranks have in common.
    pub(crate) fn member(&self) -> &Member {
        &self.member
    }

    /// Takes a rank in; else says why not and gives the way back to it.
    pub(crate) fn join(
        self: &Arc<Self>,
        member: &Member,
        up: RecvConnection,
        down: SendConnection,
    ) -> Result<(), (String, SendConnection)> {
        let (rank, name) = (member.position.index as usize, member.name());
        let mut state = lock(&self.state);
        let wrong = if member.ranks != self.member.ranks {
            Some(format!(
                "{name} says that there are {} ranks, others say {}",
                member.ranks, self.member.ranks
            ))
        } else if (member.position.leaf, member.position.leaves, member.position.count)
            != (self.member.position.leaf, self.member.position.leaves, self.member.position.count)
            || member.is_leaf != self.member.is_leaf
        {
            Some(format!("{name} has this server in another list of servers than others"))
        } else if let Some((why, _)) = &state.failed {
            Some(why.clone())
        } else if state.joined[rank] {
            Some(format!("{name} is there already"))
        } else {
            None
        };
        if let Some(wrong) = wrong {
            return Err((wrong, down));
        }
        let welcome = Packet::Joined { piece_bytes: self.chunk as u32, window: MAX_OPEN as u32 };
        if !say(&down, &welcome) {
            return Err((format!("{name} cannot be answered"), down));
        }
        let stir: Arc<dyn Notify> = Arc::new(Stir { session: Arc::downgrade(self), rank });
        up.notify(Arc::clone(&stir));
        down.notify(stir);
        let head = match up.recv_block(Block::new(MESSAGE_BYTES), MESSAGE_BYTES) {
            Ok(Ok(head)) => head,
            Ok(Err(_)) => return Err(("a new connection is full".to_owned(), down)),
            Err(error) => return Err((error.to_string(), down)),
        };
        state.joined[rank] = true;
        state.group.set_name(rank, name);
        self.metrics.ranks.inc();
        state.lines[rank] = Some(Line {
            up,
            down,
            head: Some(head),
            waiting: None,
            parts: VecDeque::new(),
            results: VecDeque::new(),
        });
        drop(state);
        self.stir(rank);
        Ok(())
    }

    /// Has a thread look at a rank's connections: this one, if it is one of those that bring the bytes.
    fn stir(self: &Arc<Self>, rank: usize) {
        self.stirred[rank].store(true, Ordering::SeqCst);
        if self.driven.swap(true, Ordering::SeqCst) {
            return;
        }
        let session = Arc::clone(self);
        if !defer_on_worker(move || session.drive_in_passing()) {
            self.shared.pool.push(Task::Drive(Arc::clone(self)));
        }
    }

    /// Looks at all connections that have something new, and reduces what is complete. For who finds `driven` set.
    pub(crate) fn drive(self: Arc<Self>) {
        let mut large = Vec::new();
        let over = {
            let mut state = lock(&self.state);
            self.attend(&mut state, &mut large);
            state.is_over()
        };
        if over {
            self.shared.end(&self);
            return;
        }
        self.rest();
        // One is this thread's own.
        let own = large.pop();
        self.hand_on(large);
        if let Some(number) = own {
            self.reduce(number);
        }
    }

    /// As [`Session::drive`], by a thread that has others' bytes to move: what takes time is left to the pool.
    fn drive_in_passing(self: Arc<Self>) {
        let mut large = Vec::new();
        let to_pool = match self.state.try_lock() {
            Ok(mut state) => {
                self.attend(&mut state, &mut large);
                state.is_over()
            }
            // A thread of the pool has it, and may for a while.
            Err(_) => true,
        };
        if to_pool {
            self.shared.pool.push(Task::Drive(Arc::clone(&self)));
        } else {
            self.rest();
        }
        self.hand_on(large);
    }

    /// Ends a drive; has a thread begin another one if there was word meanwhile.
    fn rest(self: &Arc<Self>) {
        self.driven.store(false, Ordering::SeqCst);
        if let Some(rank) = self.stirred.iter().position(|one| one.load(Ordering::SeqCst)) {
            self.stir(rank);
        }
    }

    /// Has the pool reduce these pieces.
    fn hand_on(self: &Arc<Self>, pieces: Vec<u64>) {
        for number in pieces {
            self.shared.pool.push(Task::Reduce(Arc::clone(self), number));
        }
    }

    /// Does what is to be done at all connections that have something new; gives the pieces that are complete and large.
    fn attend(&self, state: &mut State, large: &mut Vec<u64>) {
        let mut complete = Vec::new();
        loop {
            self.look(state, &mut complete);
            if complete.is_empty() {
                return;
            }
            for number in complete.drain(..) {
                let piece = state.group.piece(number);
                let length = piece.map_or(0, |piece| piece.length as usize);
                if length * state.lines.len() > AT_ONCE_BYTES {
                    large.push(number);
                } else if let Some(mut sum) = Sum::take(state, number) {
                    sum.add_up(self.chunk);
                    // What is sent may give slots back at once.
                    self.finish(state, number, sum);
                }
            }
        }
    }

    fn look(&self, state: &mut State, complete: &mut Vec<u64>) {
        let mut again = false;
        let (ranks, above) = self.stirred.split_at(self.stirred.len() - self.above);
        if above.iter().any(|stirred| stirred.swap(false, Ordering::SeqCst)) {
            self.attend_above(state);
        }
        for (rank, stirred) in ranks.iter().enumerate() {
            if stirred.swap(false, Ordering::SeqCst) {
                again |= self.attend_rank(state, rank, complete);
            }
        }
        // A slot that one gave back, or a piece that one opened, is what others may wait for.
        while std::mem::take(&mut again) {
            for rank in 0..state.lines.len() {
                if state.lines[rank].as_ref().is_some_and(|line| line.waiting.is_some()) {
                    again |= self.attend_rank(state, rank, complete);
                }
            }
        }
    }

    /// Does all that can be done for a rank; true when others may be able to go on.
    fn attend_rank(&self, state: &mut State, rank: usize, complete: &mut Vec<u64>) -> bool {
        if state.failed.is_some() {
            state.see_off(rank, &self.metrics);
            return false;
        }
        match self.serve(state, rank, complete) {
            Ok(others) => others,
            Err(why) => {
                let why = format!("{} {why}", state.group.name(rank));
                self.fail(state, &why);
                false
            }
        }
    }

    /// Does all that can be done with the servers above.
    fn attend_above(&self, state: &mut State) {
        let Some(above) = state.above.as_mut().filter(|_| state.failed.is_none()) else { return };
        let came = match above.progress(Instant::now()) {
            Ok(landed) if landed.is_empty() => return,
            Ok(landed) => landed.into_iter().try_for_each(|landed| self.land(state, landed)),
            Err(why) => Err(why),
        };
        if let Err(why) = came.and_then(|()| self.deliver(state)) {
            self.fail(state, &why);
        }
    }

    /// A piece has come back from above.
    fn land(&self, state: &mut State, mut landed: Landed) -> Result<(), String> {
        // All ranks may have left.
        let Some(piece) = state.group.piece(landed.number).copied() else { return Ok(()) };
        let result = landed.settle(&piece, self.chunk)?;
        let Some(slot) = state.group.slot_mut(landed.number) else { return Ok(()) };
        slot.spare.append(&mut landed.spare);
        slot.fill(piece, result);
        slot.moments.settled = Instant::now();
        self.metrics.climb.observe((slot.moments.settled - slot.moments.reduced).as_secs_f64());
        self.metrics.descended.inc_by(climbing_length(&piece));
        state.group.reduced(landed.number);
        Ok(())
    }

    /// What a rank's connections bring; an error says what the rank did, without its name.
    fn serve(
        &self,
        state: &mut State,
        rank: usize,
        complete: &mut Vec<u64>,
    ) -> Result<bool, String> {
        let mut others = false;
        loop {
            let mut moved = false;
            let State { group, lines, .. } = &mut *state;
            let Some(line) = &mut lines[rank] else { return Ok(others) };
            let lost = |peer, error| format!("at {peer} was lost: {error}");
            let mut freed = Vec::new();
            while let Some((number, head, body)) = line.results.front_mut() {
                let done = |sending: &mut Sending| sending.poll(false);
                let sent = done(head).and_then(|sent| match body {
                    Some(body) => Ok(done(body)? && sent),
                    None => Ok(sent),
                });
                if !sent.map_err(|error| lost(line.down.peer(), error))? {
                    break;
                }
                let piece = group.piece(*number).copied();
                if let Some(slot) = group.sent(*number) {
                    freed.push((slot, piece));
                }
                line.results.pop_front();
            }
            while let Some((number, receiving)) = line.parts.front_mut() {
                let number = *number;
                let part = receiving.poll(false).map_err(|error| lost(line.up.peer(), error))?;
                let Some((block, length)) = part else { break };
                line.parts.pop_front();
                self.take_part(group, rank, number, block, length, complete)?;
            }
            if line.waiting.is_none()
                && let Some(head) = &mut line.head
                && let Some((block, length)) =
                    head.poll(false).map_err(|error| lost(line.up.peer(), error))?
            {
                line.head = None;
                moved = true;
                let message = block.bytes().get(..length).unwrap_or_default();
                match Packet::decode(message).map_err(|error| format!("sends {error}"))? {
                    Packet::Part(piece) if piece.length as usize <= self.chunk => {
                        line.waiting = Some((piece, block));
                    }
                    Packet::Part(piece) => {
                        return Err(format!(
                            "sends {} bytes at once, at most {} are taken",
                            piece.length, self.chunk
                        ));
                    }
                    Packet::Leave if !line.parts.is_empty() => {
                        return Err("left before its parts had come".to_owned());
                    }
                    Packet::Leave => {
                        return self.leave(state, rank).map(|()| true);
                    }
                    Packet::Failed(why) => {
                        return Err(format!("at {} reports: {why}", line.up.peer()));
                    }
                    other => return Err(format!("sends {other:?} instead of a part")),
                }
            }
            for (slot, piece) in freed {
                self.release(state, slot, piece);
                others = true;
            }
            match self.place(state, rank, complete)? {
                Placed::No => {}
                Placed::Joined => moved = true,
                Placed::Opened => (moved, others) = (true, true),
            }
            if !moved {
                return Ok(others);
            }
        }
    }

    /// Finds a place for the piece that a rank waits with.
    fn place(
        &self,
        state: &mut State,
        rank: usize,
        complete: &mut Vec<u64>,
    ) -> Result<Placed, String> {
        let Some(line) = &state.lines[rank] else { return Ok(Placed::No) };
        let Some((piece, _)) = line.waiting else { return Ok(Placed::No) };
        let place = state.group.place(rank, &piece).map_err(|violation| violation.0)?;
        let (number, placed) = match place {
            Place::Full => return Ok(Placed::No),
            Place::Open(number) => (number, Placed::Joined),
            Place::Unopened => match self.slot(state) {
                None => return Ok(Placed::No),
                Some(slot) => (state.group.open(piece, slot), Placed::Opened),
            },
        };
        state.group.begin(rank);
        let State { group, lines, .. } = state;
        let Some(line) = &mut lines[rank] else { return Ok(Placed::No) };
        let Some((piece, message)) = line.waiting.take() else { return Ok(Placed::No) };
        let slot = group.slot_mut(number);
        let block = slot.and_then(|slot| slot.parts[rank].take());
        let mut block = block.unwrap_or_else(|| Block::new(self.chunk));
        let length = piece.length as usize;
        let full = |_| "has more on its way than was agreed".to_owned();
        let lost = |error| format!("at {} was lost: {error}", line.up.peer());
        if piece.is_inline() {
            let payload = &message.bytes()[HEADER_BYTES..HEADER_BYTES + length];
            block.bytes_mut()[..length].copy_from_slice(payload);
        } else {
            let receiving = line.up.recv_block(block, length).map_err(lost)?.map_err(full)?;
            line.parts.push_back((number, receiving));
            // The part has the only block.
            let head = line.up.recv_block(message, MESSAGE_BYTES).map_err(lost)?.map_err(full)?;
            line.head = Some(head);
            return Ok(placed);
        }
        let head = line.up.recv_block(message, MESSAGE_BYTES).map_err(lost)?.map_err(full)?;
        line.head = Some(head);
        self.take_part(group, rank, number, block, length, complete)?;
        Ok(placed)
    }

    /// A part is there.
    fn take_part(
        &self,
        group: &mut Group<Slot>,
        rank: usize,
        number: u64,
        block: Block,
        length: usize,
        complete: &mut Vec<u64>,
    ) -> Result<(), String> {
        let want = group.piece(number).map_or(0, |piece| piece.length);
        if length != want as usize {
            return Err(format!("sent {length} bytes of a part of {want}"));
        }
        self.metrics.received.inc_by(length as u64);
        let Some(slot) = group.slot_mut(number) else { return Ok(()) };
        slot.parts[rank] = Some(block);
        slot.moments.complete = Instant::now();
        if group.arrived(number) {
            complete.push(number);
        }
        Ok(())
    }

    /// Reduces a piece of which all parts are there, and sends what can be sent.
    pub(crate) fn reduce(self: Arc<Self>, number: u64) {
        // All ranks may have left.
        let Some(mut sum) = Sum::take(&mut lock(&self.state), number) else { return };
        sum.add_up(self.chunk);
        // ControlMessage of what is sent here need not wake anybody.
        let driving = !self.driven.swap(true, Ordering::SeqCst);
        let mut large = Vec::new();
        let over = {
            let mut state = lock(&self.state);
            self.finish(&mut state, number, sum);
            // What was sent at once may have given a slot back.
            self.attend(&mut state, &mut large);
            state.is_over()
        };
        if over {
            self.shared.end(&self);
            return;
        }
        if driving {
            self.rest();
        }
        self.hand_on(large);
    }

    fn finish(&self, state: &mut State, number: u64, sum: Sum) {
        let Sum { piece, mut parts, spare, climbs, climb, failure, reducing, reduced } = sum;
        if let Some(failure) = failure {
            self.fail(state, &failure);
        }
        self.metrics.pieces.inc();
        self.metrics.reduce.observe((reduced - reducing).as_secs_f64());
        let Some(slot) = state.group.slot_mut(number) else { return };
        let received = slot.moments.complete.saturating_duration_since(slot.moments.opened);
        self.metrics.receive.observe(received.as_secs_f64());
        let Moments { opened, complete, .. } = slot.moments;
        slot.moments = Moments { opened, complete, reducing, reduced, settled: reduced };
        slot.spare = spare;
        if climbs {
            slot.keep(parts);
            if let (Some(above), Some(climb)) = (&mut state.above, climb) {
                self.metrics.climbed.inc_by(climbing_length(&piece));
                above.send(number, climb, self.chunk);
                self.attend_above(state);
            }
            return;
        }
        let result = parts.remove(0);
        slot.keep(parts);
        slot.fill(piece, result);
        state.group.reduced(number);
        if state.failed.is_some() {
            return;
        }
        if let Err(why) = self.deliver(state) {
            self.fail(state, &why);
        }
    }

    /// Sends all ranks what they can get.
    fn deliver(&self, state: &mut State) -> Result<(), String> {
        for rank in 0..state.lines.len() {
            while let Some((number, piece)) = state.group.next_result(rank) {
                let name = state.group.name(rank);
                let Some(line) = &mut state.lines[rank] else { break };
                let Some(slot) = state.group.slot(number) else { break };
                let lost = |error| format!("{name} at {} was lost: {error}", line.down.peer());
                let full = || format!("{name} does not take results");
                let length = piece.message_bytes();
                let head = line.down.send_block(&slot.head, length).map_err(lost)?;
                let head = head.ok_or_else(full)?;
                let body = match &slot.result {
                    Some(result) if !piece.is_inline() => {
                        let body = line.down.send_block(result, piece.length as usize);
                        Some(body.map_err(lost)?.ok_or_else(full)?)
                    }
                    _ => None,
                };
                self.metrics.sent.inc_by(piece.length.into());
                line.results.push_back((number, head, body));
                state.group.result_begun(rank);
                // Small ones are done at once.
                self.stirred[rank].store(true, Ordering::SeqCst);
            }
        }
        Ok(())
    }

    /// A slot for a new piece, if there is memory.
    fn slot(&self, state: &mut State) -> Option<Slot> {
        let now = Instant::now();
        let moments =
            Moments { opened: now, complete: now, reducing: now, reduced: now, settled: now };
        if let Some(slot) = state.free.pop() {
            return Some(Slot { moments, ..slot });
        }
        let bytes = slot_bytes(self.chunk as u64, self.member.position.count, self.above);
        let budget = &self.shared.budget;
        let grant = if state.slots == 0 {
            None
        } else if (state.slots + 1) * bytes > budget.share() {
            return None;
        } else {
            // New communicators find room without waiting for this one.
            Some(budget.grant(bytes, budget.total() / 4)?)
        };
        state.slots += 1;
        Some(Slot {
            parts: (0..self.member.position.count).map(|_| None).collect(),
            spare: Vec::new(),
            head: Arc::new(Block::new(MESSAGE_BYTES)),
            result: None,
            moments,
            grant,
        })
    }

    /// Takes a slot back whose piece is over.
    fn release(&self, state: &mut State, mut slot: Slot, piece: Option<Piece>) {
        let now = Instant::now();
        if let Some(piece) = piece {
            let sent = now.saturating_duration_since(slot.moments.settled);
            self.metrics.send.observe(sent.as_secs_f64());
            if let Some(timeline) = &self.shared.timeline {
                record(timeline, &piece, &slot.moments, now);
            }
        }
        if let Some(result) = slot.result.take().and_then(Arc::into_inner) {
            match &mut slot.parts[0] {
                // A wide sum leaves all parts where they are.
                Some(_) => slot.spare.push(result),
                place => *place = Some(result),
            }
        }
        state.free.push(slot);
        self.trim(state);
    }

    /// Gives memory back that is more than a fair share and not in use.
    fn trim(&self, state: &mut State) {
        let bytes = slot_bytes(self.chunk as u64, self.member.position.count, self.above);
        while state.slots > 1 && state.slots * bytes > self.shared.budget.share() {
            let granted = state.free.iter().position(|slot| slot.grant.is_some());
            let Some(at) = granted else { return };
            state.free.swap_remove(at);
            state.slots -= 1;
        }
    }

    /// There is one more communicator to share with.
    pub(crate) fn share(&self) {
        self.trim(&mut lock(&self.state));
    }

    /// A rank goes as it should.
    fn leave(&self, state: &mut State, rank: usize) -> Result<(), String> {
        let Some(line) = state.lines[rank].take() else { return Ok(()) };
        self.metrics.ranks.dec();
        for (number, ..) in &line.results {
            if let Some(slot) = state.group.sent(*number) {
                self.release(state, slot, None);
            }
        }
        drop(line);
        let slots = state.group.leave(rank).map_err(|violation| violation.0)?;
        for slot in slots {
            self.release(state, slot, None);
        }
        Ok(())
    }

    /// Tells all ranks that the communicator cannot go on.
    fn fail(&self, state: &mut State, why: &str) {
        if state.failed.is_some() {
            return;
        }
        let Member { comm_id, job, .. } = &self.member;
        self.shared.log.warn(&format!("communicator {comm_id:#x} of job {job:?}: {why}"));
        self.metrics.failures.inc();
        state.failed = Some((why.to_owned(), Instant::now()));
        if let Some(above) = &state.above {
            above.tell(why);
        }
        for line in state.lines.iter().flatten() {
            // Who cannot be told notices by itself.
            say(&line.down, &Packet::Failed(why.to_owned()));
        }
    }

    /// Whether nobody has ever joined it.
    pub(crate) fn is_unused(&self) -> bool {
        !lock(&self.state).joined.contains(&true)
    }

    /// Looks after what brings no word by itself: servers above that stand still, and ranks that do not come.
    pub(crate) fn look_after(self: &Arc<Self>, now: Instant) {
        self.look_up_and_down(now);
        // What was sent may have given slots back.
        if let Some(rank) = self.stirred.iter().position(|one| one.load(Ordering::SeqCst)) {
            self.stir(rank);
        }
    }

    fn look_up_and_down(&self, now: Instant) {
        let mut state = lock(&self.state);
        self.attend_above(&mut state);
        let patience = 2 * self.shared.transport.settings().reduction_timeout();
        let late = now.saturating_duration_since(self.born) >= patience;
        if let Some(missing) = state.joined.iter().position(|joined| late && !joined) {
            let why = format!(
                "{} has not come within {} s; {} of {} have: are all given the same servers?",
                state.group.name(missing),
                patience.as_secs(),
                state.joined.iter().filter(|joined| **joined).count(),
                state.joined.len()
            );
            self.fail(&mut state, &why);
        }
    }

    /// When it failed, if it did.
    pub(crate) fn failed_at(&self) -> Option<Instant> {
        lock(&self.state).failed.as_ref().map(|(_, at)| *at)
    }

    /// Ends all connections.
    pub(crate) fn close(&self) {
        let (lines, above) = {
            let mut state = lock(&self.state);
            let left = state.lines.iter().flatten().count();
            self.metrics.ranks.dec_by(left as i64);
            if let (true, None, Some(above)) = (left > 0, &state.failed, &state.above) {
                above.tell("the server ended");
            }
            state.failed.get_or_insert_with(|| ("the server ended".to_owned(), Instant::now()));
            (std::mem::take(&mut state.lines), state.above.take())
        };
        drop((lines, above));
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.metrics.communicators.dec();
    }
}

/// A piece that is being reduced, outside of its slot.
struct Sum {
    piece: Piece,
    /// By rank. The first one holds the result in the end, where nothing goes up.
    parts: Vec<Block>,
    spare: Vec<Block>,
    /// Whether it goes up, and what does.
    climbs: bool,
    climb: Option<Climb>,
    failure: Option<String>,
    reducing: Instant,
    reduced: Instant,
}

impl Sum {
    /// Takes a piece's parts, if all are there.
    fn take(state: &mut State, number: u64) -> Option<Self> {
        let climbs = state.above.is_some();
        let piece = *state.group.piece(number)?;
        let slot = state.group.slot_mut(number)?;
        let parts = slot.parts.iter_mut().map(Option::take).collect::<Option<Vec<_>>>()?;
        let spare = std::mem::take(&mut slot.spare);
        let now = Instant::now();
        let (climb, failure) = (None, None);
        Some(Self { piece, parts, spare, climbs, climb, failure, reducing: now, reduced: now })
    }

    fn add_up(&mut self, chunk: usize) {
        let Piece { kind, op, length, .. } = self.piece;
        let length = length as usize;
        self.reducing = Instant::now();
        if self.climbs {
            match Climb::add_up(self.piece, chunk, &mut self.parts, &mut self.spare) {
                Ok(climb) => self.climb = Some(climb),
                Err(why) => self.failure = Some(why),
            }
        } else if let Some((first, rest)) = self.parts.split_first_mut() {
            let others: Vec<&[u8]> = rest.iter().map(|part| &part.bytes()[..length]).collect();
            let done = reduce_in_place(kind, op, &mut first.bytes_mut()[..length], &others);
            self.failure = done.err().map(|error| format!("defect: {error}"));
        }
        self.reduced = Instant::now();
    }
}

/// What came of a piece that waits.
enum Placed {
    /// It still waits, or there is none.
    No,
    /// Others had opened it.
    Joined,
    /// Others can join it now.
    Opened,
}

impl State {
    /// Whether nobody is left.
    fn is_over(&self) -> bool {
        let gone = self.lines.iter().all(Option::is_none);
        gone && (self.failed.is_some() || self.joined.contains(&true))
    }

    /// The communicator has failed: the rank is told, and its going is awaited.
    fn see_off(&mut self, rank: usize, metrics: &JobMetrics) {
        let Some(line) = self.lines.get_mut(rank) else { return };
        let Some(Line { head: Some(head), .. }) = line else { return };
        let left = match head.poll(false) {
            Err(_) => true,
            Ok(None) => false,
            Ok(Some((block, length))) => {
                let message = block.bytes().get(..length).unwrap_or_default();
                Packet::decode(message) == Ok(Packet::Leave)
            }
        };
        if left {
            metrics.ranks.dec();
            *line = None;
        }
    }
}

impl Slot {
    /// Takes back the memory of the last ranks' parts.
    fn keep(&mut self, parts: Vec<Block>) {
        let first = self.parts.len() - parts.len();
        for (place, part) in self.parts[first..].iter_mut().zip(parts) {
            *place = Some(part);
        }
    }

    /// The piece is reduced.
    fn fill(&mut self, piece: Piece, result: Block) {
        // It is shared while a rank that has left still has it.
        if Arc::get_mut(&mut self.head).is_none() {
            self.head = Arc::new(Block::new(MESSAGE_BYTES));
        }
        if let Some(head) = Arc::get_mut(&mut self.head) {
            let at = Packet::Result(piece).encode(head.bytes_mut());
            if piece.is_inline() {
                let length = piece.length as usize;
                head.bytes_mut()[at..at + length].copy_from_slice(&result.bytes()[..length]);
            }
        }
        self.result = Some(Arc::new(result));
    }
}

/// Sends a message without payload; false when that is not possible.
pub(crate) fn say(connection: &SendConnection, packet: &Packet) -> bool {
    let mut block = Block::new(MESSAGE_BYTES);
    let length = packet.encode(block.bytes_mut());
    matches!(connection.send_block(&Arc::new(block), length), Ok(Some(_)))
}
