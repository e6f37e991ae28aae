//! The state of a communicator, and all that is done under its lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use evenkeel_reduction::Member;
use evenkeel_reduction::protocol::{MESSAGE_BYTES, Packet, Piece};
use evenkeel_transport::{Block, Notify, RecvConnection, SendConnection};

use super::piece_window::{PieceWindow, Place};
use super::rank_connection::{Header, Part, RankConnection};
use super::reduction::PieceReduction;
use super::slots::{Slot, SlotPool};
use crate::context::Context;
use crate::limits::MAX_OPEN_PIECES;
use crate::metrics::JobMetrics;
use crate::timeline::PieceTimes;
use crate::upstream::{Upstream, UpstreamResult, upstream_bytes};

/// Maximum size of all parts of a piece that the thread which received the last one reduces itself:
/// waking another thread takes longer.
const INLINE_REDUCTION_BYTES: usize = 64 << 10;

/// The state of a communicator.
pub(super) struct State {
    context: Arc<Context>,
    member: Member,
    piece_bytes: usize,
    metrics: JobMetrics,
    /// By rank, then by upstream server: whether its connections have news.
    ready: Arc<[AtomicBool]>,
    window: PieceWindow<Slot>,
    /// `None` where all ranks are at this server.
    upstream: Option<Upstream>,
    /// By rank; `None` before it joins and after it has left.
    ranks: Vec<Option<RankConnection>>,
    /// By rank.
    joined: Vec<bool>,
    slots: SlotPool,
    created: Instant,
    /// Why and when the communicator failed.
    failed: Option<(String, Instant)>,
    /// After a failure: whether all upstream servers that live have read why.
    reported: bool,
    /// When the last rank left, while others have yet to join.
    deserted: Option<Instant>,
}

/// What became of a part that waits for a slot.
enum Placed {
    /// It still waits, or none does.
    No,
    /// It belongs to a piece that was open.
    Joined,
    /// It has opened a piece, which other ranks' parts can join.
    Opened,
}

impl State {
    /// A communicator that no rank has joined.
    pub(super) fn new(
        context: Arc<Context>,
        member: Member,
        piece_bytes: u64,
        metrics: JobMetrics,
        ready: Arc<[AtomicBool]>,
        upstream: Option<Upstream>,
    ) -> Self {
        let count = member.position.count;
        let ranks = count as usize;
        let mut window = PieceWindow::new(ranks, MAX_OPEN_PIECES);
        (0..count).for_each(|index| window.set_name(index as usize, member.name_of(index)));
        let upstream_servers = upstream.as_ref().map_or(0, Upstream::servers);
        let budget = Arc::clone(&context.budget);
        Self {
            slots: SlotPool::new(budget, piece_bytes, count, upstream_servers),
            context,
            member,
            piece_bytes: piece_bytes as usize,
            metrics,
            ready,
            window,
            upstream,
            ranks: (0..ranks).map(|_| None).collect(),
            joined: vec![false; ranks],
            created: Instant::now(),
            failed: None,
            reported: false,
            deserted: None,
        }
    }

    /// Sets what each upstream server's connections notify.
    pub(super) fn notify_upstream(&self, notify: impl Fn(usize) -> Arc<dyn Notify>) {
        if let Some(upstream) = &self.upstream {
            upstream.notify(notify);
        }
    }

    /// Why a rank cannot join, if it cannot.
    pub(super) fn refusal(&self, member: &Member) -> Option<String> {
        let (name, own) = (member.name(), &self.member);
        let leaf = |member: &Member| {
            let position = member.position;
            (position.leaf, position.leaves, position.count, member.is_leaf)
        };
        if member.ranks != own.ranks {
            let (ranks, others) = (member.ranks, own.ranks);
            Some(format!("{name} has {ranks} ranks in its communicator, others have {others}"))
        } else if leaf(member) != leaf(own) {
            Some(format!("{name} has this server in another list of servers than others"))
        } else if let Some((why, _)) = &self.failed {
            Some(why.clone())
        } else if self.joined[member.position.index as usize] {
            Some(format!("{name} has joined already"))
        } else {
            None
        }
    }

    /// Adds a rank, over connections that notify the communicator.
    pub(super) fn join(
        &mut self,
        member: &Member,
        up: RecvConnection,
        down: SendConnection,
    ) -> Result<(), (String, SendConnection)> {
        let rank = member.position.index as usize;
        let head = match up.recv_block(Block::new(MESSAGE_BYTES), MESSAGE_BYTES) {
            Ok(Ok(head)) => head,
            Ok(Err(_)) => return Err(("a new connection takes no message".to_owned(), down)),
            Err(error) => return Err((error.to_string(), down)),
        };
        self.joined[rank] = true;
        self.deserted = None;
        self.window.set_name(rank, member.name());
        self.metrics.ranks.inc();
        self.ranks[rank] = Some(RankConnection::new(up, down, head));
        Ok(())
    }

    /// Handles all connections with news, and reduces small complete pieces. Adds large ones to
    /// `large`.
    pub(super) fn process(&mut self, large: &mut Vec<u64>) {
        let mut complete = Vec::new();
        loop {
            self.poll_ready(&mut complete);
            if complete.is_empty() {
                return;
            }
            for number in complete.drain(..) {
                let piece = self.window.piece(number);
                let length = piece.map_or(0, |piece| piece.length as usize);
                if length * self.ranks.len() > INLINE_REDUCTION_BYTES {
                    large.push(number);
                } else if let Some(mut reduction) = self.take_reduction(number) {
                    reduction.run(self.piece_bytes);
                    // Sending the result may free slots at once.
                    self.finish_reduction(number, reduction);
                }
            }
        }
    }

    fn poll_ready(&mut self, complete: &mut Vec<u64>) {
        let ready = Arc::clone(&self.ready);
        let (ranks, upstream) = ready.split_at(self.joined.len());
        if upstream.iter().any(|ready| ready.swap(false, Ordering::SeqCst)) {
            self.poll_upstream();
        }
        let mut again = false;
        for (rank, ready) in ranks.iter().enumerate() {
            if ready.swap(false, Ordering::SeqCst) {
                again |= self.poll_rank(rank, complete);
            }
        }
        // Other ranks' parts may wait for a slot that was freed, or for a piece that was opened.
        while std::mem::take(&mut again) {
            for rank in 0..self.ranks.len() {
                let connection = self.ranks[rank].as_ref();
                if connection.is_some_and(|connection| connection.waiting().is_some()) {
                    again |= self.poll_rank(rank, complete);
                }
            }
        }
    }

    /// Does all that can be done for a rank. Returns true if other ranks may be able to continue.
    fn poll_rank(&mut self, rank: usize, complete: &mut Vec<u64>) -> bool {
        if self.failed.is_some() {
            self.await_leave(rank);
            return false;
        }
        match self.progress_rank(rank, complete) {
            Ok(others) => others,
            Err(why) => {
                let why = format!("{} {why}", self.window.name(rank));
                self.fail(&why);
                false
            }
        }
    }

    /// The steps of [`State::poll_rank`], repeated as long as a header was received or a part was
    /// placed.
    fn progress_rank(&mut self, rank: usize, complete: &mut Vec<u64>) -> Result<bool, String> {
        let mut others = false;
        loop {
            others |= self.finish_results(rank)?;
            self.receive_parts(rank, complete)?;
            let Some(connection) = &mut self.ranks[rank] else { return Ok(others) };
            let mut progress = match connection.poll_header(self.piece_bytes)? {
                Header::None => false,
                Header::Part => true,
                Header::Leave => return self.leave(rank).map(|()| true),
            };
            match self.place_part(rank, complete)? {
                Placed::No => {}
                Placed::Joined => progress = true,
                Placed::Opened => (progress, others) = (true, true),
            }
            if !progress {
                return Ok(others);
            }
        }
    }

    /// Frees the slots of pieces whose last result is sent. Returns true if there are any.
    fn finish_results(&mut self, rank: usize) -> Result<bool, String> {
        let mut freed = false;
        while let Some(connection) = &mut self.ranks[rank]
            && let Some(number) = connection.poll_result()?
        {
            let piece = self.window.piece(number).copied();
            if let Some(slot) = self.window.result_sent(number) {
                self.record_sent(&slot.times, piece);
                self.slots.release(slot);
                freed = true;
            }
        }
        Ok(freed)
    }

    fn record_sent(&self, times: &PieceTimes, piece: Option<Piece>) {
        let Some(piece) = piece else { return };
        let now = Instant::now();
        let sending = now.saturating_duration_since(times.result);
        self.metrics.send.observe(sending.as_secs_f64());
        if let Some(timeline) = &self.context.timeline {
            times.record(timeline, &piece, now);
        }
    }

    /// Takes the parts that have arrived from a rank.
    fn receive_parts(&mut self, rank: usize, complete: &mut Vec<u64>) -> Result<(), String> {
        while let Some(connection) = &mut self.ranks[rank]
            && let Some(part) = connection.poll_part()?
        {
            self.take_part(rank, part, complete)?;
        }
        Ok(())
    }

    /// Finds a slot for the part that a rank waits with, and receives it there.
    fn place_part(&mut self, rank: usize, complete: &mut Vec<u64>) -> Result<Placed, String> {
        let connection = self.ranks[rank].as_ref();
        let Some(piece) = connection.and_then(RankConnection::waiting) else {
            return Ok(Placed::No);
        };
        let place = self.window.place(rank, &piece).map_err(|violation| violation.0)?;
        let (number, placed) = match place {
            Place::Full => return Ok(Placed::No),
            Place::Open(number) => (number, Placed::Joined),
            Place::New => match self.slots.take() {
                None => return Ok(Placed::No),
                Some(slot) => (self.window.open(piece, slot), Placed::Opened),
            },
        };
        self.window.part_begun(rank);
        let slot = self.window.slot_mut(number);
        let block = slot.and_then(|slot| slot.parts[rank].take());
        let block = block.unwrap_or_else(|| Block::new(self.piece_bytes));
        let Some(connection) = &mut self.ranks[rank] else { return Ok(Placed::No) };
        if let Some(part) = connection.receive_part(number, block)? {
            self.take_part(rank, part, complete)?;
        }
        Ok(placed)
    }

    /// Stores a part that has arrived.
    fn take_part(
        &mut self,
        rank: usize,
        part: Part,
        complete: &mut Vec<u64>,
    ) -> Result<(), String> {
        let Part { number, block, length } = part;
        let due = self.window.piece(number).map_or(0, |piece| piece.length);
        if length != due as usize {
            return Err(format!("sent {length} bytes of a part of {due}"));
        }
        self.metrics.received.inc_by(length as u64);
        let Some(slot) = self.window.slot_mut(number) else { return Ok(()) };
        slot.parts[rank] = Some(block);
        slot.times.complete = Instant::now();
        if self.window.part_arrived(number) {
            complete.push(number);
        }
        Ok(())
    }

    /// Does all that can be done with the upstream servers.
    fn poll_upstream(&mut self) {
        if self.failed.is_some() {
            self.reported = self.upstream.as_mut().is_none_or(Upstream::poll_answers);
            return;
        }
        let Some(upstream) = &mut self.upstream else { return };
        let received = match upstream.progress(Instant::now()) {
            Ok(results) if results.is_empty() => return,
            Ok(results) => results.into_iter().try_for_each(|result| self.take_result(result)),
            Err(why) => Err(why),
        };
        if let Err(why) = received.and_then(|()| self.send_results()) {
            self.fail(&why);
        }
    }

    /// Stores a result that an upstream server has returned.
    fn take_result(&mut self, mut upstream: UpstreamResult) -> Result<(), String> {
        // All ranks may have left.
        let number = upstream.number;
        let Some(piece) = self.window.piece(number).copied() else { return Ok(()) };
        let result = upstream.take_result(&piece, self.piece_bytes)?;
        let Some(slot) = self.window.slot_mut(number) else { return Ok(()) };
        slot.spare.append(&mut upstream.spare);
        slot.set_result(piece, result);
        slot.times.result = Instant::now();
        self.metrics.upstream.observe((slot.times.result - slot.times.reduced).as_secs_f64());
        self.metrics.upstream_received.inc_by(upstream_bytes(&piece));
        self.window.reduced(number);
        Ok(())
    }

    /// Takes the parts of a piece to reduce them, if all have arrived.
    pub(super) fn take_reduction(&mut self, number: u64) -> Option<PieceReduction> {
        PieceReduction::take(&mut self.window, number, self.upstream.is_some())
    }

    /// Stores a reduced piece, and sends its result to the ranks or its sum upstream.
    pub(super) fn finish_reduction(&mut self, number: u64, reduction: PieceReduction) {
        let PieceReduction { piece, mut parts, spare, is_partial, partial_sum, failure, .. } =
            reduction;
        let (reducing, reduced) = (reduction.reducing, reduction.reduced);
        if let Some(failure) = failure {
            self.fail(&failure);
        }
        self.metrics.pieces.inc();
        self.metrics.reduce.observe((reduced - reducing).as_secs_f64());
        let Some(slot) = self.window.slot_mut(number) else { return };
        let PieceTimes { opened, complete, .. } = slot.times;
        self.metrics.receive.observe(complete.saturating_duration_since(opened).as_secs_f64());
        slot.times = PieceTimes { opened, complete, reducing, reduced, result: reduced };
        slot.spare = spare;
        if is_partial {
            slot.return_parts(parts);
            if let (Some(upstream), Some(sum)) = (&mut self.upstream, partial_sum) {
                self.metrics.upstream_sent.inc_by(upstream_bytes(&piece));
                upstream.send(number, sum, self.piece_bytes);
                self.poll_upstream();
            }
            return;
        }
        let result = parts.remove(0);
        slot.return_parts(parts);
        slot.set_result(piece, result);
        self.window.reduced(number);
        if self.failed.is_some() {
            return;
        }
        if let Err(why) = self.send_results() {
            self.fail(&why);
        }
    }

    /// Sends each rank the results that are due to it.
    fn send_results(&mut self) -> Result<(), String> {
        for rank in 0..self.ranks.len() {
            while let Some((number, piece)) = self.window.next_result(rank) {
                let Some(connection) = &mut self.ranks[rank] else { break };
                let Some(slot) = self.window.slot(number) else { break };
                if let Err(why) = connection.send_result(number, &piece, slot) {
                    return Err(format!("{} {why}", self.window.name(rank)));
                }
                self.metrics.sent.inc_by(piece.length.into());
                self.window.result_begun(rank);
                // A small result is sent at once, without a notification.
                self.ready[rank].store(true, Ordering::SeqCst);
            }
        }
        Ok(())
    }

    /// A rank leaves without an error.
    fn leave(&mut self, rank: usize) -> Result<(), String> {
        let Some(connection) = self.ranks[rank].take() else { return Ok(()) };
        self.metrics.ranks.dec();
        for number in connection.unsent_results() {
            if let Some(slot) = self.window.result_sent(number) {
                self.slots.release(slot);
            }
        }
        drop(connection);
        let slots = self.window.leave(rank).map_err(|violation| violation.0)?;
        slots.into_iter().for_each(|slot| self.slots.release(slot));
        if self.ranks.iter().all(Option::is_none) {
            self.deserted = Some(Instant::now());
        }
        Ok(())
    }

    /// After a failure: closes the connections of a rank once it has left.
    fn await_leave(&mut self, rank: usize) {
        let Some(connection) = self.ranks.get_mut(rank) else { return };
        if connection.as_mut().is_some_and(RankConnection::has_left) {
            self.metrics.ranks.dec();
            *connection = None;
        }
    }

    /// The communicator fails. Reports the reason to all ranks and upstream servers.
    fn fail(&mut self, why: &str) {
        if self.failed.is_some() {
            return;
        }
        let Member { comm_id, job, .. } = &self.member;
        self.context.log.warn(&format!("communicator {comm_id:#x} of job {job:?}: {why}"));
        self.metrics.failures.inc();
        self.report_upstream(why);
        self.ranks.iter().flatten().for_each(|connection| connection.report_failure(why));
    }

    /// The communicator fails. Reports the reason to all upstream servers.
    fn report_upstream(&mut self, why: &str) {
        self.failed = Some((why.to_owned(), Instant::now()));
        if let Some(upstream) = &mut self.upstream {
            upstream.report_failure(why);
        }
        self.poll_upstream();
    }

    /// Reports to the upstream servers that this one ends, if ranks are left.
    pub(super) fn report_end(&mut self) {
        if self.failed.is_none() && self.ranks.iter().any(Option::is_some) {
            self.report_upstream("the server ended");
        }
    }

    /// Whether the upstream servers need no connections any more: they have read why the
    /// communicator failed, or it has not.
    pub(super) fn is_reported(&mut self) -> bool {
        if self.failed.is_some() {
            self.poll_upstream();
        }
        self.failed.is_none() || self.reported
    }

    /// Whether no rank has ever joined.
    pub(super) fn is_unused(&self) -> bool {
        !self.joined.contains(&true)
    }

    /// Whether all ranks have joined and left. A rank may leave before the last one joins: that one
    /// belongs to the same communicator, and must not find it gone. After a failure, the upstream
    /// servers must have read why.
    pub(super) fn is_over(&self) -> bool {
        let all_left = self.ranks.iter().all(Option::is_none);
        let is_done = match self.failed {
            Some(_) => self.reported,
            None => !self.joined.contains(&false),
        };
        all_left && is_done
    }

    /// When the communicator failed, or was left by all who had joined.
    pub(super) fn ended_at(&self) -> Option<Instant> {
        self.failed.as_ref().map(|(_, at)| *at).or(self.deserted)
    }

    /// Returns memory beyond the fair share.
    pub(super) fn trim(&mut self) {
        self.slots.trim();
    }

    /// Detects what sends no notification: upstream servers that do not respond, and ranks that do
    /// not join.
    pub(super) fn check_timeouts(&mut self, now: Instant) {
        self.poll_upstream();
        let timeout = 2 * self.context.timeout;
        let late = now.saturating_duration_since(self.created) >= timeout;
        if let Some(missing) = self.joined.iter().position(|joined| late && !joined) {
            let why = format!(
                "{} has not joined within {} s; {} of {} have: do all have the same servers?",
                self.window.name(missing),
                timeout.as_secs(),
                self.joined.iter().filter(|joined| **joined).count(),
                self.joined.len()
            );
            self.fail(&why);
        }
    }

    /// Takes all connections out, to be closed without the lock.
    pub(super) fn take_connections(&mut self) -> (Vec<Option<RankConnection>>, Option<Upstream>) {
        let left = self.ranks.iter().flatten().count();
        self.metrics.ranks.dec_by(left as i64);
        self.failed.get_or_insert_with(|| ("the server ended".to_owned(), Instant::now()));
        (std::mem::take(&mut self.ranks), self.upstream.take())
    }

    /// Sends a rank what it needs to know of the communicator. False if that is not possible.
    pub(super) fn send_joined(&self, down: &SendConnection) -> bool {
        let (piece_bytes, window) = (self.piece_bytes as u32, MAX_OPEN_PIECES as u32);
        Packet::Joined { piece_bytes, window }.send(down).is_some()
    }
}
