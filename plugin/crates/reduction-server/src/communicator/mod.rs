//! One communicator at the server: which thread handles its connections, and when.
//!
//! A notification of a connection sets the flag of its rank, and makes one thread handle all
//! connections with a flag: the transport's thread that brought the bytes if the lock is free, else
//! one of the pool. Large pieces are reduced by the pool.

mod piece_window;
mod rank_connection;
mod reduction;
mod slots;
mod state;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

use evenkeel_reduction::Member;
use evenkeel_reduction::client::JoinedServer;
use evenkeel_transport::sync::lock;
use evenkeel_transport::{Notify, RecvConnection, SendConnection, defer_on_worker};

use crate::context::Context;
use crate::memory_budget::MemoryGrant;
use crate::metrics::JobMetrics;
use crate::upstream::Upstream;
use state::State;

/// Owns a communicator, and removes it once it is over.
pub(crate) trait Owner: Send + Sync {
    /// All ranks have joined and left.
    fn remove(&self, communicator: &Arc<Communicator>);
}

/// A communicator.
pub(crate) struct Communicator {
    member: Member,
    piece_bytes: usize,
    context: Arc<Context>,
    owner: Weak<dyn Owner>,
    metrics: JobMetrics,
    /// By rank, then by upstream server: whether its connections have news.
    ready: Arc<[AtomicBool]>,
    /// Whether a thread handles the connections, or is about to.
    driven: AtomicBool,
    state: Mutex<State>,
    /// For as long as the communicator exists.
    _memory: MemoryGrant,
}

/// Notifies a communicator of news at the connections of a rank or of an upstream server.
struct Wake {
    communicator: Weak<Communicator>,
    /// Index of its flag.
    index: usize,
}

impl Notify for Wake {
    fn notify(&self) {
        if let Some(communicator) = self.communicator.upgrade() {
            communicator.wake(self.index);
        }
    }
}

impl Communicator {
    /// A communicator that no rank has joined, with the upstream servers that it has joined itself.
    pub(crate) fn new(
        context: Arc<Context>,
        owner: Weak<dyn Owner>,
        member: &Member,
        piece_bytes: u64,
        memory: MemoryGrant,
        upstream: Vec<JoinedServer>,
    ) -> Arc<Self> {
        let ranks = member.position.count as usize;
        let metrics = context.metrics.for_job(&member.job);
        metrics.communicators.inc();
        let ready = (0..ranks + upstream.len()).map(|_| AtomicBool::new(false)).collect();
        let ready: Arc<[AtomicBool]> = ready;
        let upstream = (!upstream.is_empty()).then(|| Upstream::new(upstream));
        let state = State::new(
            Arc::clone(&context),
            member.clone(),
            piece_bytes,
            metrics.clone(),
            Arc::clone(&ready),
            upstream,
        );
        let communicator = Arc::new(Self {
            member: member.clone(),
            piece_bytes: piece_bytes as usize,
            context,
            owner,
            metrics,
            ready,
            driven: AtomicBool::new(false),
            state: Mutex::new(state),
            _memory: memory,
        });
        let weak = Arc::downgrade(&communicator);
        lock(&communicator.state).notify_upstream(|server| {
            Arc::new(Wake { communicator: Weak::clone(&weak), index: ranks + server })
        });
        communicator
    }

    /// What its ranks have in common.
    pub(crate) fn member(&self) -> &Member {
        &self.member
    }

    /// Adds a rank. On an error, returns the reason and the connection to the rank.
    pub(crate) fn join(
        self: &Arc<Self>,
        member: &Member,
        up: RecvConnection,
        down: SendConnection,
    ) -> Result<(), (String, SendConnection)> {
        let rank = member.position.index as usize;
        let mut state = lock(&self.state);
        if let Some(why) = state.refusal(member) {
            return Err((why, down));
        }
        if !state.send_joined(&down) {
            return Err((format!("{} cannot be answered", member.name()), down));
        }
        let wake: Arc<dyn Notify> =
            Arc::new(Wake { communicator: Arc::downgrade(self), index: rank });
        up.notify(Arc::clone(&wake));
        down.notify(wake);
        state.join(member, up, down)?;
        drop(state);
        self.wake(rank);
        Ok(())
    }

    /// Has a thread handle a rank's connections: the calling one, if it is one of the transport's.
    fn wake(self: &Arc<Self>, index: usize) {
        self.ready[index].store(true, Ordering::SeqCst);
        if self.driven.swap(true, Ordering::SeqCst) {
            return;
        }
        let communicator = Arc::clone(self);
        if !defer_on_worker(move || communicator.drive_on_transport()) {
            self.drive_on_pool();
        }
    }

    fn drive_on_pool(self: &Arc<Self>) {
        let communicator = Arc::clone(self);
        self.context.pool.push(move || communicator.drive());
    }

    /// Handles all connections with news, and reduces complete pieces. The caller has set `driven`.
    fn drive(self: Arc<Self>) {
        let mut large = Vec::new();
        let over = {
            let mut state = lock(&self.state);
            state.process(&mut large);
            state.is_over()
        };
        if over {
            self.remove();
            return;
        }
        self.finish_drive();
        // This thread reduces one of them itself.
        let own = large.pop();
        self.reduce_on_pool(large);
        if let Some(number) = own {
            self.reduce(number);
        }
    }

    /// As [`Communicator::drive`], on a thread of the transport, which has other connections' bytes
    /// to move: what takes long is left to the pool.
    fn drive_on_transport(self: Arc<Self>) {
        let mut large = Vec::new();
        let to_pool = match self.state.try_lock() {
            Ok(mut state) => {
                state.process(&mut large);
                state.is_over()
            }
            // A thread of the pool holds the lock, perhaps for long.
            Err(_) => true,
        };
        if to_pool {
            self.drive_on_pool();
        } else {
            self.finish_drive();
        }
        self.reduce_on_pool(large);
    }

    /// Clears `driven`, and begins again if there was a notification meanwhile.
    fn finish_drive(self: &Arc<Self>) {
        self.driven.store(false, Ordering::SeqCst);
        self.wake_if_ready();
    }

    fn wake_if_ready(self: &Arc<Self>) {
        let is_ready = |ready: &AtomicBool| ready.load(Ordering::SeqCst);
        if let Some(index) = self.ready.iter().position(is_ready) {
            self.wake(index);
        }
    }

    /// Has the pool reduce these pieces.
    fn reduce_on_pool(self: &Arc<Self>, pieces: Vec<u64>) {
        for number in pieces {
            let communicator = Arc::clone(self);
            self.context.pool.push(move || communicator.reduce(number));
        }
    }

    /// Reduces a complete piece, and sends the results that are due.
    fn reduce(self: Arc<Self>, number: u64) {
        // All ranks may have left.
        let Some(mut reduction) = lock(&self.state).take_reduction(number) else { return };
        reduction.run(self.piece_bytes);
        // While this thread drives, notifications of what it sends wake no other thread.
        let driving = !self.driven.swap(true, Ordering::SeqCst);
        let mut large = Vec::new();
        let over = {
            let mut state = lock(&self.state);
            state.finish_reduction(number, reduction);
            // Results that were sent at once may have freed slots.
            state.process(&mut large);
            state.is_over()
        };
        if over {
            self.remove();
            return;
        }
        if driving {
            self.finish_drive();
        }
        self.reduce_on_pool(large);
    }

    fn remove(self: &Arc<Self>) {
        if let Some(owner) = self.owner.upgrade() {
            owner.remove(self);
        }
    }

    /// Whether no rank has ever joined.
    pub(crate) fn is_unused(&self) -> bool {
        lock(&self.state).is_unused()
    }

    /// Detects what sends no notification, such as ranks that do not join.
    pub(crate) fn check_timeouts(self: &Arc<Self>, now: Instant) {
        lock(&self.state).check_timeouts(now);
        // What was sent may have freed slots.
        self.wake_if_ready();
    }

    /// Returns memory beyond the fair share: there is one more communicator.
    pub(crate) fn trim(&self) {
        lock(&self.state).trim();
    }

    /// When it failed, or was left by all who had joined.
    pub(crate) fn ended_at(&self) -> Option<Instant> {
        lock(&self.state).ended_at()
    }

    /// Reports to the upstream servers that this server ends.
    pub(crate) fn report_end(&self) {
        lock(&self.state).report_end();
    }

    /// Whether the upstream servers have read why it failed, if it has.
    pub(crate) fn is_reported(&self) -> bool {
        lock(&self.state).is_reported()
    }

    /// Closes all connections.
    pub(crate) fn close(&self) {
        let connections = lock(&self.state).take_connections();
        drop(connections);
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        self.metrics.communicators.dec();
    }
}
