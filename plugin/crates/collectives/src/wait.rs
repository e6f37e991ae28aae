//! Waiting for other ranks: for a short while by asking again and again, then asleep, and with an eye on who is still alive.

use std::thread;
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind, Result, format_duration, list_ranks};
use crate::links::mesh::{Mesh, PeerError};
use crate::liveness::{
    GroupFailure, Operation, PeerStatus, ProbeReport, probe_transitively, report_failure,
};

/// How long to stay awake. Who asks often is who moves the bytes, and what comes right after it has fallen asleep waits until the
/// transport's thread looks after it, a millisecond later: were this shorter, ranks that wait for each other would take turns at that.
const SPIN_TIME: Duration = Duration::from_millis(2);
/// The longest sleep. What others tell is polled after it.
const MAX_SLEEP: Duration = Duration::from_millis(20);
/// While there is no link yet, nobody wakes us.
const MAX_SLEEP_CONNECTING: Duration = Duration::from_micros(500);
/// How long others may take to hear of a failure.
const FAILURE_REPORT_TIMEOUT: Duration = Duration::from_millis(500);
/// How long what a rank told before it ended may take to be heard.
const FAILURE_WAIT: Duration = Duration::from_millis(200);
/// How a rank is lost that has left while it was needed.
const LEFT: &str = "it has left the group";

/// What a look at an operation finds.
pub(crate) enum Poll<T> {
    /// It is done, with this result.
    Done(T),
    /// Something has moved.
    Progress,
    Idle,
}

/// One operation's wait.
pub(crate) struct Wait<'a> {
    mesh: &'a Mesh,
    operation: Operation<'a>,
    what: &'static str,
    tag: u32,
    timeout: Duration,
    /// When the first look in vain was.
    since: Option<Instant>,
    /// What was carried when that was last looked at, and since when it is that much.
    carried: Option<(u64, Instant)>,
    /// How often others have been probes.
    probes: u32,
    report: ProbeReport,
}

impl<'a> Wait<'a> {
    /// # Errors
    /// The failure of the group.
    pub(crate) fn new(
        mesh: &'a Mesh,
        what: &'static str,
        tag: u32,
        timeout: Duration,
    ) -> Result<Self> {
        if let Some(failure) = mesh.liveness().failure() {
            return Err(failure.error());
        }
        let operation = mesh.liveness().operation();
        let report = ProbeReport::default();
        let (since, carried, probes) = (None, None, 0);
        Ok(Self { mesh, operation, what, tag, timeout, since, carried, probes, report })
    }

    /// Looks until it is done. `waits` says which ranks it waits for, and how many bytes their links have carried: a message that takes
    /// longer than the timeout moves as well.
    ///
    /// # Errors
    /// When a look finds error, the group has failed, a rank that is waited for is lost, or nothing has moved for the whole
    /// timeout.
    pub(crate) fn until<S, T>(
        &mut self,
        state: &mut S,
        waits: impl Fn(&S) -> (Vec<usize>, u64),
        mut poll: impl FnMut(&mut S) -> std::result::Result<Poll<T>, PeerError>,
    ) -> Result<T> {
        loop {
            let mut polled = poll(state);
            if matches!(polled, Ok(Poll::Idle)) {
                let waited = self.idle(state, &waits, &mut |state| {
                    polled = poll(state);
                    !matches!(polled, Ok(Poll::Idle))
                });
                if matches!(polled, Ok(Poll::Idle)) {
                    waited?;
                    continue;
                }
            }
            match polled {
                Err(error) => return Err(self.error(error)),
                Ok(Poll::Done(done)) => return Ok(done),
                Ok(_) => {
                    (self.since, self.carried, self.probes) = (None, None, 0);
                }
            }
        }
    }

    /// Nothing moved. Waits a little; `look` ends a sleep.
    fn idle<S>(
        &mut self,
        state: &mut S,
        waits: impl Fn(&S) -> (Vec<usize>, u64),
        poll: &mut dyn FnMut(&mut S) -> bool,
    ) -> Result<()> {
        let now = Instant::now();
        let since = *self.since.get_or_insert(now);
        if now - since < SPIN_TIME {
            thread::yield_now();
            return Ok(());
        }
        let (ranks, carried) = waits(state);
        let still = match self.carried {
            Some((before, still)) if before == carried => still,
            Some(_) => {
                self.probes = 0;
                now
            }
            None => since,
        };
        self.carried = Some((carried, still));
        let idle = now - still;
        if let Some(failure) = self.mesh.liveness().failure() {
            return Err(failure.error());
        }
        // Early, so that whoever asks on knows; and again when there is just time to tell the others.
        let probe_at = [self.timeout * 2 / 5, self.timeout * 7 / 10];
        if self.probes < 2 && idle >= probe_at[self.probes as usize] {
            self.probes += 1;
            self.probe(ranks.clone())?;
        }
        if idle >= self.timeout {
            return Err(self.timed_out(&ranks));
        }
        let mut sleep = MAX_SLEEP.min(self.timeout / 10);
        if ranks.iter().any(|rank| self.mesh.is_connecting(*rank)) {
            sleep = sleep.min(MAX_SLEEP_CONNECTING);
        }
        self.operation.waits_for(ranks);
        self.mesh.sleep(sleep, &mut || poll(state));
        Ok(())
    }

    fn probe(&mut self, ranks: Vec<usize>) -> Result<()> {
        let Self { mesh, .. } = self;
        self.operation.waits_for(ranks.clone());
        let time = (self.timeout / 5).min(Duration::from_secs(5));
        self.report = probe_transitively(mesh.probe_addresses(), mesh.own_rank(), ranks, time);
        if let Some(failure) = self.report.failure.take() {
            return Err(mesh.liveness().fail(failure).error());
        }
        // What a rank sent before it left has time until the second look.
        if self.probes > 1 {
            let left = std::mem::take(&mut self.report.left);
            self.report.lost.extend(left.into_iter().map(|rank| (rank, LEFT)));
        }
        // Somebody else may have been quicker.
        if let Some(failure) = mesh.liveness().failure() {
            return Err(failure.error());
        }
        if self.report.lost.is_empty() { Ok(()) } else { Err(self.lost()) }
    }

    /// What ends the group here ends it everywhere.
    fn end_group(&self, failure: GroupFailure) -> Error {
        let Self { mesh, .. } = self;
        let failure = mesh.liveness().fail(failure);
        report_failure(
            mesh.probe_addresses(),
            mesh.own_rank(),
            &failure,
            FAILURE_REPORT_TIMEOUT.min(self.timeout / 5),
        );
        failure.error()
    }

    fn lost(&self) -> Error {
        let each: Vec<_> = self
            .report
            .lost
            .iter()
            .map(|(rank, how)| format!("{} is lost: {how}", self.mesh.describe(*rank)))
            .collect();
        let ranks = self.report.lost.iter().map(|(rank, _)| *rank).collect();
        let text = format!("{}: {}", self.what, each.join("; "));
        self.end_group(GroupFailure { kind: ErrorKind::Lost, ranks, text })
    }

    /// A link broke: finds out whose fault it is.
    pub(crate) fn error(&mut self, error: PeerError) -> Error {
        let Self { mesh, what, tag, .. } = self;
        let PeerError { rank, what: why, mismatch } = error;
        let whose = mesh.describe(rank);
        if let Some(failure) = mesh.liveness().failure() {
            return failure.error();
        }
        if mismatch {
            let text = format!("{what} (tag {tag}) with {whose}: {why}");
            return self.end_group(GroupFailure {
                kind: ErrorKind::Mismatch,
                ranks: vec![rank],
                text,
            });
        }
        let time = (self.timeout / 5).min(Duration::from_secs(2));
        match mesh.probe_addresses()[rank].probe(time) {
            PeerStatus::Failed(failure) => mesh.liveness().fail(failure).error(),
            PeerStatus::Alive { .. } => {
                let text = format!("{what}: the connection with {whose} broke: {why}");
                self.end_group(GroupFailure { kind: ErrorKind::Lost, ranks: vec![rank], text })
            }
            answer @ (PeerStatus::Lost(_) | PeerStatus::Left) => {
                let how = if let PeerStatus::Lost(how) = answer { how } else { LEFT };
                // It may have ended because of somebody else, and said so: that comes through the thread that answers.
                let deadline = Instant::now() + FAILURE_WAIT.min(self.timeout / 5);
                while Instant::now() < deadline {
                    if let Some(failure) = mesh.liveness().failure() {
                        return failure.error();
                    }
                    thread::sleep(Duration::from_millis(5));
                }
                self.report.lost = vec![(rank, how)];
                self.lost()
            }
        }
    }

    fn timed_out(&self, ranks: &[usize]) -> Error {
        let Self { mesh, what, tag, timeout, report, .. } = self;
        let (ranks_to_name, why) = if report.idle.is_empty() {
            (ranks.to_vec(), String::new())
        } else {
            let which = list_ranks(&report.idle);
            let why = format!("; {which} in no operation of this group: has it been called there?");
            (
                report.idle.clone(),
                why.replacen(
                    " in no",
                    if report.idle.len() == 1 { " is in no" } else { " are in no" },
                    1,
                ),
            )
        };
        let waited: Vec<_> = ranks.iter().map(|rank| mesh.describe(*rank)).collect();
        let text = format!(
            "{what} (tag {tag}): nothing moved for {}, waiting for {}{why}",
            format_duration(*timeout),
            waited.join(", ")
        );
        Error::new(ErrorKind::Timeout, text).with_ranks(ranks_to_name)
    }
}
