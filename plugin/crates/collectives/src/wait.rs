//! Waits for other ranks: first polls, then sleeps, and probes whether the awaited ranks are alive.

use std::thread;
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind, Result, format_duration, list_ranks};
use crate::links::mesh::{Mesh, PeerError};
use crate::liveness::{
    GroupFailure, Operation, PeerStatus, ProbeReport, end_group, probe_all, probe_transitively,
};

/// How long to poll before the first sleep. The thread that polls moves the bytes. Bytes that arrive just after it falls asleep
/// wait a millisecond for the transport's thread. With a shorter time, ranks that wait for each other would take turns at that.
const SPIN_TIME: Duration = Duration::from_millis(2);
/// The longest sleep. A failure that another rank reports is noticed after it.
const MAX_SLEEP: Duration = Duration::from_millis(20);
/// The shortest sleep while a link is being made. Nothing wakes the sleeper then, so it looks again and again, less often the longer
/// it takes: many ranks on a host must leave time for those that they wait for.
const MIN_SLEEP_CONNECTING: Duration = Duration::from_micros(500);
/// The longest idle time before a rank probes whether an awaited process has exited, whatever the timeout.
const MAX_QUICK_PROBE_DELAY: Duration = Duration::from_millis(250);
/// How long this probe may take.
const MAX_QUICK_PROBE_TIME: Duration = Duration::from_millis(250);
/// How long to try to report a failure to the other ranks.
const FAILURE_REPORT_TIMEOUT: Duration = Duration::from_millis(500);
/// How long a failure that a rank reported before it exited may take to arrive.
const FAILURE_ARRIVAL_TIMEOUT: Duration = Duration::from_millis(200);
/// Why a rank is lost that left while it was needed.
const LEFT: &str = "it has left the group";

/// What polling an operation gives.
pub(crate) enum Poll<T> {
    /// The operation is done, with this result.
    Done(T),
    /// Something moved.
    Progress,
    /// Nothing moved.
    Idle,
}

/// Which of the ranks that an operation waits for it needs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Needs {
    /// Each of them: if one is lost, so is the operation.
    All,
    /// One of them: it goes on as long as one may still come.
    Any,
}

/// The wait of one operation.
pub(crate) struct Wait<'a> {
    mesh: &'a Mesh,
    operation: Operation<'a>,
    /// The operation's name, for messages.
    what: &'static str,
    tag: u32,
    timeout: Duration,
    needs: Needs,
    /// When polling first found nothing.
    idle_since: Option<Instant>,
    /// The bytes carried when last checked, and since when the number has not changed.
    carried: Option<(u64, Instant)>,
    /// Number of times that the awaited ranks have been probed.
    probes: u32,
    report: ProbeReport,
    /// The awaited ranks whose processes have exited while nothing moved.
    exited: Vec<(usize, &'static str)>,
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
        let (idle_since, carried, probes) = (None, None, 0);
        let exited = vec![];
        Ok(Self {
            mesh,
            operation,
            what,
            tag,
            timeout,
            needs: Needs::All,
            idle_since,
            carried,
            probes,
            report,
            exited,
        })
    }

    /// As [`Wait::new`], for an operation that one of the awaited ranks ends.
    ///
    /// # Errors
    /// As [`Wait::new`].
    pub(crate) fn for_any(
        mesh: &'a Mesh,
        what: &'static str,
        tag: u32,
        timeout: Duration,
    ) -> Result<Self> {
        Ok(Self { needs: Needs::Any, ..Self::new(mesh, what, tag, timeout)? })
    }

    /// Polls until the operation is done. `awaited` gives the ranks that it waits for and the bytes that their links have carried,
    /// so that a message that takes longer than the timeout counts as progress.
    ///
    /// # Errors
    /// When polling gives an error, the group has failed, an awaited rank is lost, or nothing moved for the whole timeout.
    pub(crate) fn until<S, T>(
        &mut self,
        state: &mut S,
        awaited: impl Fn(&S) -> (Vec<usize>, u64),
        mut poll: impl FnMut(&mut S) -> std::result::Result<Poll<T>, PeerError>,
    ) -> Result<T> {
        loop {
            let mut polled = poll(state);
            if matches!(polled, Ok(Poll::Idle)) {
                let waited = self.idle(state, &awaited, &mut |state| {
                    polled = poll(state);
                    !matches!(polled, Ok(Poll::Idle))
                });
                if matches!(polled, Ok(Poll::Idle)) {
                    waited?;
                    continue;
                }
            }
            match polled {
                Err(error) => return Err(self.fail_on(error)),
                Ok(Poll::Done(done)) => return Ok(done),
                Ok(_) => {
                    (self.idle_since, self.carried, self.probes) = (None, None, 0);
                    self.exited.clear();
                }
            }
        }
    }

    /// Nothing moved: waits a little. `is_ready` ends a sleep.
    fn idle<S>(
        &mut self,
        state: &mut S,
        awaited: impl Fn(&S) -> (Vec<usize>, u64),
        is_ready: &mut dyn FnMut(&mut S) -> bool,
    ) -> Result<()> {
        let now = Instant::now();
        let idle_since = *self.idle_since.get_or_insert(now);
        if now - idle_since < SPIN_TIME {
            thread::yield_now();
            return Ok(());
        }
        let (ranks, carried) = awaited(state);
        let unchanged_since = match self.carried {
            Some((before, unchanged_since)) if before == carried => unchanged_since,
            Some(_) => {
                self.probes = 0;
                self.exited.clear();
                now
            }
            None => idle_since,
        };
        self.carried = Some((carried, unchanged_since));
        let idle = now - unchanged_since;
        if let Some(failure) = self.mesh.liveness().failure() {
            return Err(failure.error());
        }
        if self.is_lost(&self.exited, &ranks) {
            self.report.lost = std::mem::take(&mut self.exited);
            return Err(self.lost());
        }
        // Of the thorough probes, the first is early, so that ranks that probe this one learn the result. The second leaves time to
        // report it.
        let probe_at = [
            MAX_QUICK_PROBE_DELAY.min(self.timeout / 5),
            self.timeout * 2 / 5,
            self.timeout * 7 / 10,
        ];
        if let Some(at) = probe_at.get(self.probes as usize)
            && idle >= *at
        {
            self.probes += 1;
            if self.probes == 1 {
                self.probe_exits(&ranks);
            } else {
                self.probe(ranks.clone())?;
            }
        }
        if idle >= self.timeout {
            return Err(self.timed_out(&ranks));
        }
        let mut sleep = MAX_SLEEP.min(self.timeout / 10);
        if ranks.iter().any(|rank| self.mesh.is_connecting(*rank)) {
            sleep = sleep.min(MIN_SLEEP_CONNECTING.max(idle / 8));
        }
        self.operation.waits_for(ranks);
        self.mesh.sleep(sleep, &mut || is_ready(state));
        Ok(())
    }

    /// Whether the operation cannot end, as these ranks of those that it waits for are lost.
    fn is_lost(&self, lost: &[(usize, &'static str)], awaited: &[usize]) -> bool {
        let is_lost = |rank: &usize| lost.iter().any(|(lost, _)| lost == rank);
        !lost.is_empty() && (self.needs == Needs::All || awaited.iter().all(is_lost))
    }

    /// Probes whether an awaited process has exited, which links through shared memory do not tell. What it sent before may still
    /// arrive: it is lost if nothing does until the next turn.
    fn probe_exits(&mut self, ranks: &[usize]) {
        let addresses = ranks.iter().map(|rank| &self.mesh.probe_addresses()[*rank]);
        let time = MAX_QUICK_PROBE_TIME.min(self.timeout / 5);
        let statuses = probe_all(&addresses.collect::<Vec<_>>(), time, Instant::now() + time);
        for (rank, status) in ranks.iter().zip(statuses) {
            if let PeerStatus::Lost(how) = status
                && status.has_exited()
            {
                self.exited.push((*rank, how));
            }
        }
    }

    fn probe(&mut self, ranks: Vec<usize>) -> Result<()> {
        let Self { mesh, .. } = self;
        self.operation.waits_for(ranks.clone());
        let time = (self.timeout / 5).min(Duration::from_secs(5));
        let (addresses, own) = (mesh.probe_addresses(), mesh.own_rank());
        self.report = probe_transitively(addresses, own, ranks.clone(), time);
        if let Some(failure) = self.report.failure.take() {
            return Err(mesh.liveness().fail(failure).error());
        }
        // Until the second probe, messages that a rank sent before it left may still arrive.
        if self.probes > 2 {
            let left = std::mem::take(&mut self.report.left);
            self.report.lost.extend(left.into_iter().map(|rank| (rank, LEFT)));
        }
        // Another rank may have reported the failure meanwhile.
        if let Some(failure) = mesh.liveness().failure() {
            return Err(failure.error());
        }
        if self.is_lost(&self.report.lost, &ranks) { Err(self.lost()) } else { Ok(()) }
    }

    /// Ends the group on all ranks.
    fn end_group(&self, failure: GroupFailure, dead: &[usize]) -> Error {
        let Self { mesh, .. } = self;
        let time = FAILURE_REPORT_TIMEOUT.min(self.timeout / 5);
        let (addresses, own) = (mesh.probe_addresses(), mesh.own_rank());
        end_group(mesh.liveness(), addresses, own, failure, dead, time).error()
    }

    /// Ends the group because of lost ranks: those that are known, and others whose processes have exited by now.
    fn lost(&mut self) -> Error {
        let mesh = self.mesh;
        let is_known = |rank| self.report.lost.iter().any(|(lost, _)| *lost == rank);
        let others: Vec<usize> = (0..mesh.probe_addresses().len())
            .filter(|rank| *rank != mesh.own_rank() && !is_known(*rank))
            .collect();
        let addresses: Vec<_> = others.iter().map(|rank| &mesh.probe_addresses()[*rank]).collect();
        let time = FAILURE_REPORT_TIMEOUT.min(self.timeout / 5);
        let statuses = probe_all(&addresses, time, Instant::now() + time);
        for (rank, status) in others.into_iter().zip(statuses) {
            match status {
                PeerStatus::Failed(failure) => {
                    let dead: Vec<_> = self.report.lost.iter().map(|(rank, _)| *rank).collect();
                    return self.end_group(failure, &dead);
                }
                PeerStatus::Lost(how) if status.has_exited() => self.report.lost.push((rank, how)),
                _ => {}
            }
        }
        self.report.lost.sort_unstable();
        let each: Vec<_> = self
            .report
            .lost
            .iter()
            .map(|(rank, how)| format!("{} is lost: {how}", self.mesh.describe(*rank)))
            .collect();
        let ranks: Vec<_> = self.report.lost.iter().map(|(rank, _)| *rank).collect();
        let text = format!("{}: {}", self.what, each.join("; "));
        let failure = GroupFailure { kind: ErrorKind::Lost, ranks: ranks.clone(), text };
        self.end_group(failure, &ranks)
    }

    /// The error of a link that failed, after probing which rank is the cause.
    pub(crate) fn fail_on(&mut self, error: PeerError) -> Error {
        let Self { mesh, what, tag, .. } = self;
        let PeerError { rank, what: why, mismatch } = error;
        let peer = mesh.describe(rank);
        if let Some(failure) = mesh.liveness().failure() {
            return failure.error();
        }
        if mismatch {
            let text = format!("{what} (tag {tag}) with {peer}: {why}");
            let failure = GroupFailure { kind: ErrorKind::Mismatch, ranks: vec![rank], text };
            return self.end_group(failure, &[]);
        }
        let time = (self.timeout / 5).min(Duration::from_secs(2));
        match mesh.probe_addresses()[rank].probe(time) {
            PeerStatus::Failed(failure) => mesh.liveness().fail(failure).error(),
            PeerStatus::Alive { .. } => {
                let text = format!("{what}: the connection with {peer} broke: {why}");
                let failure = GroupFailure { kind: ErrorKind::Lost, ranks: vec![rank], text };
                self.end_group(failure, &[])
            }
            status @ (PeerStatus::Lost(_) | PeerStatus::Left) => {
                let how = if let PeerStatus::Lost(how) = status { how } else { LEFT };
                // It may have exited because of another rank, and reported that. The report arrives at the responder thread.
                let deadline = Instant::now() + FAILURE_ARRIVAL_TIMEOUT.min(self.timeout / 5);
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
        let Self { what, tag, timeout, .. } = self;
        let (named, whom) = self.awaited(ranks);
        let timeout = format_duration(*timeout);
        let text =
            format!("{what} (tag {tag}): timeout after {timeout} in which nothing moved{whom}");
        Error::new(ErrorKind::Timeout, text).with_ranks(named)
    }

    /// The ranks to name in the error of a timeout while these were awaited, and why, as the end of its text.
    fn awaited(&self, ranks: &[usize]) -> (Vec<usize>, String) {
        let Self { mesh, report, .. } = self;
        if ranks.is_empty() {
            return (vec![], String::new());
        }
        let (named, why) = if report.idle.is_empty() {
            (ranks.to_vec(), String::new())
        } else {
            let verb = if report.idle.len() == 1 { "is" } else { "are" };
            let idle = list_ranks(&report.idle);
            let why =
                format!("; {idle} {verb} in no operation of this group: has it been called there?");
            (report.idle.clone(), why)
        };
        let obstructions = ranks.iter().filter_map(|rank| mesh.obstruction(*rank));
        let obstructions: String = obstructions.map(|what| format!("; {what}")).collect();
        let awaited: Vec<_> = ranks.iter().map(|rank| mesh.describe(*rank)).collect();
        (named, format!(", waiting for {}{obstructions}{why}", awaited.join(", ")))
    }
}

/// The error of an operation that was not begun within the timeout, since another one of its tag before it has not ended. Probes the
/// ranks that this one waits for.
pub(crate) fn turn_timed_out(mesh: &Mesh, tag: u32, timeout: Duration) -> Error {
    let probed = || {
        let mut wait = Wait::new(mesh, "the end of an earlier operation", tag, timeout)?;
        let ranks = mesh.liveness().awaited();
        wait.probe(ranks.clone())?;
        Ok(wait.awaited(&ranks))
    };
    let (named, whom) = match probed() {
        Ok(awaited) => awaited,
        Err(failure) => return failure,
    };
    let timeout = format_duration(timeout);
    let text =
        format!("timeout after {timeout}: an earlier operation (tag {tag}) has not ended{whom}");
    Error::new(ErrorKind::Timeout, text).with_ranks(named)
}
