//! All communicators of a server: which ranks are admitted, and when a communicator ends.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::Instant;

use evenkeel_reduction::Member;
use evenkeel_reduction::client::JoinedServer;
use evenkeel_transport::sync::lock;
use evenkeel_transport::{RecvConnection, SendConnection};

use crate::communicator::{self, Communicator};
use crate::context::Context;
use crate::key::CommunicatorKey;
use crate::limits::{
    END_REPORT_POLL, END_REPORT_TIMEOUT, ENDED_RETENTION, communicator_bytes, piece_bytes,
};
use crate::upstream::UpstreamServers;

/// Why new communicators are refused after SIGTERM.
const DRAINING: &str = "the server is shutting down";

/// All communicators of a server.
pub(crate) struct CommunicatorRegistry {
    context: Arc<Context>,
    upstream: UpstreamServers,
    /// Maximum size of a piece, in bytes.
    max_piece_bytes: u64,
    communicators: Mutex<HashMap<CommunicatorKey, Arc<Communicator>>>,
    /// Number of communicators.
    count: Arc<AtomicI64>,
    /// Whether new communicators are refused.
    draining: Arc<AtomicBool>,
    own: Weak<Self>,
}

impl CommunicatorRegistry {
    /// Without communicators.
    pub(crate) fn new(
        context: Arc<Context>,
        upstream: UpstreamServers,
        max_piece_bytes: u64,
    ) -> Arc<Self> {
        Arc::new_cyclic(|own| Self {
            context,
            upstream,
            max_piece_bytes,
            communicators: Mutex::default(),
            count: Arc::default(),
            draining: Arc::default(),
            own: Weak::clone(own),
        })
    }

    /// What all communicators share.
    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Number of communicators, as the metrics' pages show it.
    pub(crate) fn count(&self) -> &Arc<AtomicI64> {
        &self.count
    }

    /// Whether new communicators are refused.
    pub(crate) fn draining(&self) -> &Arc<AtomicBool> {
        &self.draining
    }

    /// Number of communicators.
    pub(crate) fn communicators(&self) -> usize {
        lock(&self.communicators).len()
    }

    /// The upstream connections that a rank's communicator needs before the rank, which connected
    /// over this device, can be admitted. Empty where the communicator has them or needs none,
    /// `None` before they are open.
    ///
    /// # Errors
    /// Why there are none.
    pub(crate) fn join_upstream(
        &self,
        member: &Member,
        device: usize,
    ) -> Result<Option<Vec<JoinedServer>>, String> {
        if member.is_leaf && !self.upstream.is_empty() {
            return Err("this server has an upstream itself: a tree has two levels".to_owned());
        }
        let key = CommunicatorKey::of(member);
        if member.position.leaves == 1 || lock(&self.communicators).contains_key(&key) {
            return Ok(Some(vec![]));
        }
        if self.upstream.is_empty() {
            return Err(format!(
                "the ranks have {} lists of reduction servers and this server has no upstream: one list for all, or --upstream",
                member.position.leaves
            ));
        }
        if self.is_draining() {
            return Err(DRAINING.to_owned());
        }
        self.upstream.join(member, device)
    }

    /// Adds a rank to its communicator, which is created with these upstream connections if it does
    /// not exist. On an error, returns the reason and the connection to the rank.
    pub(crate) fn admit(
        &self,
        member: &Member,
        upstream: Vec<JoinedServer>,
        up: RecvConnection,
        down: SendConnection,
    ) -> Result<(), (String, SendConnection)> {
        let communicator = match self.find_or_create(member, upstream) {
            Ok(communicator) => communicator,
            Err(why) => return Err((why, down)),
        };
        let joined = communicator.join(member, up, down);
        // Only one thread admits ranks, so none other is about to join it.
        if joined.is_err() && communicator.is_unused() {
            self.end(&communicator);
        }
        joined
    }

    fn find_or_create(
        &self,
        member: &Member,
        upstream: Vec<JoinedServer>,
    ) -> Result<Arc<Communicator>, String> {
        let ranks = member.position.count;
        let others: Vec<Arc<Communicator>> = {
            let mut communicators = lock(&self.communicators);
            if let Some(communicator) = communicators.get(&CommunicatorKey::of(member)) {
                return Ok(Arc::clone(communicator));
            }
            if self.is_draining() {
                return Err(DRAINING.to_owned());
            }
            if member.position.leaves > 1 && upstream.is_empty() {
                return Err("the communicator is over".to_owned());
            }
            let created = self.create(member, upstream);
            if let Some(communicator) = &created {
                communicators.insert(CommunicatorKey::of(member), Arc::clone(communicator));
                self.count.fetch_add(1, Ordering::AcqRel);
            }
            let others = communicators.values().cloned().collect::<Vec<_>>();
            if let Some(communicator) = created {
                drop(communicators);
                others.iter().for_each(|other| other.trim());
                return Ok(communicator);
            }
            others
        };
        // There may be room at the next attempt.
        others.iter().for_each(|other| other.trim());
        let (granted, _) = self.context.budget.granted();
        Err(format!(
            "no memory for a communicator of {ranks} ranks: {granted} of {} bytes are in use",
            self.context.budget.total()
        ))
    }

    /// Creates a communicator, if there is memory.
    fn create(&self, member: &Member, upstream: Vec<JoinedServer>) -> Option<Arc<Communicator>> {
        let (ranks, budget) = (member.position.count, &self.context.budget);
        // The upstream servers set the size of pieces, since it must be the same at all leaves.
        let given = upstream.iter().map(|server| server.piece_bytes as u64).min();
        let own = || piece_bytes(budget.total(), self.max_piece_bytes, ranks);
        let piece_bytes = given.unwrap_or_else(own);
        let bytes = communicator_bytes(piece_bytes, ranks, upstream.len());
        budget.add_communicator();
        let Some(memory) = budget.grant(bytes, 0) else {
            budget.remove_communicator();
            return None;
        };
        let (context, owner) = (Arc::clone(&self.context), Weak::clone(&self.own));
        Some(Communicator::new(context, owner, member, piece_bytes, memory, upstream))
    }

    fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// Ends a communicator: closes its connections and returns its memory.
    fn end(&self, communicator: &Arc<Communicator>) {
        let key = CommunicatorKey::of(communicator.member());
        let removed = {
            let mut communicators = lock(&self.communicators);
            match communicators.get(&key) {
                Some(same) if Arc::ptr_eq(same, communicator) => communicators.remove(&key),
                _ => None,
            }
        };
        if removed.is_some() {
            self.context.budget.remove_communicator();
            self.count.fetch_sub(1, Ordering::AcqRel);
            communicator.close();
            if let Some(timeline) = &self.context.timeline {
                timeline.flush();
            }
        }
    }

    /// Ends communicators some time after they failed or were deserted, and checks the timeouts of
    /// the others.
    pub(crate) fn maintain(&self, now: Instant) {
        self.upstream.expire(now);
        for communicator in self.all() {
            let expired = |at| now.saturating_duration_since(at) >= ENDED_RETENTION;
            if communicator.ended_at().is_some_and(expired) {
                self.end(&communicator);
            } else {
                communicator.check_timeouts(now);
            }
        }
    }

    /// Ends all communicators. The upstream servers have some time to read that.
    pub(crate) fn end_all(&self) {
        let all = self.all();
        all.iter().for_each(|communicator| communicator.report_end());
        let deadline = Instant::now() + END_REPORT_TIMEOUT;
        while !all.iter().all(|communicator| communicator.is_reported())
            && Instant::now() < deadline
        {
            thread::sleep(END_REPORT_POLL);
        }
        all.iter().for_each(|communicator| self.end(communicator));
    }

    fn all(&self) -> Vec<Arc<Communicator>> {
        lock(&self.communicators).values().cloned().collect()
    }
}

impl communicator::Owner for CommunicatorRegistry {
    fn remove(&self, communicator: &Arc<Communicator>) {
        self.end(communicator);
    }
}
