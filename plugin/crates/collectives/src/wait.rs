//! Waiting for other ranks: for a short while by asking again and again, then asleep, and with an eye on who is still alive.

use std::thread;
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind, Result, list, span};
use crate::mesh::{Mesh, Trouble};
use crate::pulse::{Answer, Failure, Findings, Operation, ask_around, tell_all};

/// How long to stay awake. Who asks often is who moves the bytes, and what comes right after it has fallen asleep waits until the
/// transport's thread looks after it, a millisecond later: were this shorter, ranks that wait for each other would take turns at that.
const AWAKE: Duration = Duration::from_millis(2);
/// The longest sleep. What others tell is seen after it.
const LONGEST_SLEEP: Duration = Duration::from_millis(20);
/// While there is no link yet, nobody wakes us.
const UNLINKED_SLEEP: Duration = Duration::from_micros(500);
/// How long others may take to hear of a failure.
const TELLING: Duration = Duration::from_millis(500);
/// How long what a rank told before it ended may take to be heard.
const HEARING: Duration = Duration::from_millis(200);
/// How a rank is lost that has left while it was needed.
const LEFT: &str = "it has left the group";

/// What a look at an operation finds.
pub(crate) enum Look<T> {
    /// It is done, with this result.
    Done(T),
    /// Something has moved.
    Moved,
    Nothing,
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
    /// How often others have been asked.
    asked: u32,
    findings: Findings,
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
        if let Some(failure) = mesh.pulse().failure() {
            return Err(failure.error());
        }
        let operation = mesh.pulse().operation();
        let findings = Findings::default();
        let (since, carried, asked) = (None, None, 0);
        Ok(Self { mesh, operation, what, tag, timeout, since, carried, asked, findings })
    }

    /// Looks until it is done. `waits` says which ranks it waits for, and how many bytes their links have carried: a message that takes
    /// longer than the timeout moves as well.
    ///
    /// # Errors
    /// When a look finds trouble, the group has failed, a rank that is waited for is lost, or nothing has moved for the whole
    /// timeout.
    pub(crate) fn until<S, T>(
        &mut self,
        state: &mut S,
        waits: impl Fn(&S) -> (Vec<usize>, u64),
        mut look: impl FnMut(&mut S) -> std::result::Result<Look<T>, Trouble>,
    ) -> Result<T> {
        loop {
            let mut seen = look(state);
            if matches!(seen, Ok(Look::Nothing)) {
                let waited = self.idle(state, &waits, &mut |state| {
                    seen = look(state);
                    !matches!(seen, Ok(Look::Nothing))
                });
                if matches!(seen, Ok(Look::Nothing)) {
                    waited?;
                    continue;
                }
            }
            match seen {
                Err(trouble) => return Err(self.trouble(trouble)),
                Ok(Look::Done(done)) => return Ok(done),
                Ok(_) => {
                    (self.since, self.carried, self.asked) = (None, None, 0);
                }
            }
        }
    }

    /// Nothing moved. Waits a little; `look` ends a sleep.
    fn idle<S>(
        &mut self,
        state: &mut S,
        waits: impl Fn(&S) -> (Vec<usize>, u64),
        look: &mut dyn FnMut(&mut S) -> bool,
    ) -> Result<()> {
        let now = Instant::now();
        let since = *self.since.get_or_insert(now);
        if now - since < AWAKE {
            thread::yield_now();
            return Ok(());
        }
        let (ranks, carried) = waits(state);
        let still = match self.carried {
            Some((before, still)) if before == carried => still,
            Some(_) => {
                self.asked = 0;
                now
            }
            None => since,
        };
        self.carried = Some((carried, still));
        let idle = now - still;
        if let Some(failure) = self.mesh.pulse().failure() {
            return Err(failure.error());
        }
        // Early, so that whoever asks on knows; and again when there is just time to tell the others.
        let ask_at = [self.timeout * 2 / 5, self.timeout * 7 / 10];
        if self.asked < 2 && idle >= ask_at[self.asked as usize] {
            self.asked += 1;
            self.ask(ranks.clone())?;
        }
        if idle >= self.timeout {
            return Err(self.timed_out(&ranks));
        }
        let mut sleep = LONGEST_SLEEP.min(self.timeout / 10);
        if ranks.iter().any(|rank| self.mesh.is_unlinked(*rank)) {
            sleep = sleep.min(UNLINKED_SLEEP);
        }
        self.operation.waits_for(ranks);
        self.mesh.sleep(sleep, &mut || look(state));
        Ok(())
    }

    fn ask(&mut self, ranks: Vec<usize>) -> Result<()> {
        let Self { mesh, .. } = self;
        self.operation.waits_for(ranks.clone());
        let time = (self.timeout / 5).min(Duration::from_secs(5));
        self.findings = ask_around(mesh.contacts(), mesh.own(), ranks, time);
        if let Some(failure) = self.findings.told.take() {
            return Err(mesh.pulse().fail(failure).error());
        }
        // What a rank sent before it left has time until the second look.
        if self.asked > 1 {
            let left = std::mem::take(&mut self.findings.left);
            self.findings.lost.extend(left.into_iter().map(|rank| (rank, LEFT)));
        }
        // Somebody else may have been quicker.
        if let Some(failure) = mesh.pulse().failure() {
            return Err(failure.error());
        }
        if self.findings.lost.is_empty() { Ok(()) } else { Err(self.lost()) }
    }

    /// What ends the group here ends it everywhere.
    fn ends(&self, failure: Failure) -> Error {
        let Self { mesh, .. } = self;
        let failure = mesh.pulse().fail(failure);
        tell_all(mesh.contacts(), mesh.own(), &failure, TELLING.min(self.timeout / 5));
        failure.error()
    }

    fn lost(&self) -> Error {
        let each: Vec<_> = self
            .findings
            .lost
            .iter()
            .map(|(rank, how)| format!("{} is lost: {how}", self.mesh.describe(*rank)))
            .collect();
        let ranks = self.findings.lost.iter().map(|(rank, _)| *rank).collect();
        let text = format!("{}: {}", self.what, each.join("; "));
        self.ends(Failure { kind: ErrorKind::Lost, ranks, text })
    }

    /// A link broke: finds out whose fault it is.
    pub(crate) fn trouble(&mut self, trouble: Trouble) -> Error {
        let Self { mesh, what, tag, .. } = self;
        let Trouble { rank, what: why, mismatch } = trouble;
        let whose = mesh.describe(rank);
        if let Some(failure) = mesh.pulse().failure() {
            return failure.error();
        }
        if mismatch {
            let text = format!("{what} (tag {tag}) with {whose}: {why}");
            return self.ends(Failure { kind: ErrorKind::Mismatch, ranks: vec![rank], text });
        }
        let time = (self.timeout / 5).min(Duration::from_secs(2));
        match mesh.contacts()[rank].ask(time) {
            Answer::Failed(failure) => mesh.pulse().fail(failure).error(),
            Answer::Alive { .. } => {
                let text = format!("{what}: the connection with {whose} broke: {why}");
                self.ends(Failure { kind: ErrorKind::Lost, ranks: vec![rank], text })
            }
            answer @ (Answer::Lost(_) | Answer::Left) => {
                let how = if let Answer::Lost(how) = answer { how } else { LEFT };
                // It may have ended because of somebody else, and said so: that comes through the thread that answers.
                let heard_by = Instant::now() + HEARING.min(self.timeout / 5);
                while Instant::now() < heard_by {
                    if let Some(failure) = mesh.pulse().failure() {
                        return failure.error();
                    }
                    thread::sleep(Duration::from_millis(5));
                }
                self.findings.lost = vec![(rank, how)];
                self.lost()
            }
        }
    }

    fn timed_out(&self, ranks: &[usize]) -> Error {
        let Self { mesh, what, tag, timeout, findings, .. } = self;
        let (to_blame, why) = if findings.idle.is_empty() {
            (ranks.to_vec(), String::new())
        } else {
            let which = list(&findings.idle);
            let why = format!("; {which} in no operation of this group: has it been called there?");
            (
                findings.idle.clone(),
                why.replacen(
                    " in no",
                    if findings.idle.len() == 1 { " is in no" } else { " are in no" },
                    1,
                ),
            )
        };
        let waited: Vec<_> = ranks.iter().map(|rank| mesh.describe(*rank)).collect();
        let text = format!(
            "{what} (tag {tag}): nothing moved for {}, waiting for {}{why}",
            span(*timeout),
            waited.join(", ")
        );
        Error::new(ErrorKind::Timeout, text).of(to_blame)
    }
}
