//! What is known of a connection of a soak, and what must hold of it.

use std::time::{Duration, Instant};

use crate::error::Result;

/// An end's report.
#[derive(Clone, Debug)]
pub(super) struct Report {
    pub(super) done: u64,
    /// Whether all its messages were done before it closed.
    pub(super) is_whole: bool,
    pub(super) why: String,
}

/// A connection between two processes.
pub(super) struct Connection {
    pub(super) from: usize,
    pub(super) to: usize,
    /// Whether the sender was told to connect.
    pub(super) connects: bool,
    /// Number of ends that are open.
    pub(super) open: u32,
    pub(super) sender: Option<Report>,
    pub(super) receiver: Option<Report>,
    /// Whether one of its processes was killed.
    pub(super) excused: bool,
    /// Until when it carries messages.
    pub(super) until: Instant,
    pub(super) is_finishing: bool,
    /// Since when it has to be opened or closed.
    pub(super) since: Instant,
    /// The listener's handle, while a process without the job key tries it.
    pub(super) tried: Option<String>,
}

/// How a connection ended.
pub(super) enum Ending {
    /// Everything was received that was sent.
    Whole,
    /// With a killed process.
    Cut,
}

impl Report {
    /// Of an end that reports nothing.
    pub(super) fn absent(why: &str) -> Self {
        Self { done: 0, is_whole: false, why: why.to_owned() }
    }
}

impl Connection {
    /// One that begins now, and carries messages for this time.
    pub(super) fn new(from: usize, to: usize, lifetime: Duration) -> Self {
        let now = Instant::now();
        Self {
            from,
            to,
            connects: false,
            open: 0,
            sender: None,
            receiver: None,
            excused: false,
            until: now + lifetime,
            is_finishing: false,
            since: now,
            tried: None,
        }
    }

    /// One of its processes was killed.
    pub(super) fn excuse(&mut self) {
        if !self.excused {
            (self.excused, self.since) = (true, Instant::now());
        }
    }

    /// What has taken longer than this to happen, if anything has.
    pub(super) fn overdue(&self, patience: Duration) -> Option<&'static str> {
        let is_due = self.open < 2 || self.is_finishing || self.excused;
        (is_due && self.since.elapsed() > patience).then_some(match (self.open, self.excused) {
            (0 | 1, _) => "was not opened",
            (_, true) => "did not fail, although a process was killed,",
            _ => "was not closed",
        })
    }

    /// How it ended, once both ends have reported. The error says what is wrong.
    pub(super) fn ending(&self) -> Result<Option<Ending>> {
        if !self.excused
            && let Some(Report { done, is_whole: false, why }) = &self.sender
        {
            let other = self.receiver.as_ref().map_or("it still receives", |it| &it.why);
            return Err(format!(
                "failed after {done} messages, without cause: {why}; its receiver: {other}"
            ));
        }
        let (Some(sent), Some(received)) = (&self.sender, &self.receiver) else { return Ok(None) };
        if self.excused {
            return Ok(Some(Ending::Cut));
        }
        if sent.done != received.done {
            return Err(format!(
                "lost messages: {} were sent and {} received: {}",
                sent.done, received.done, received.why
            ));
        }
        Ok(Some(Ending::Whole))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A connection whose sender and receiver have reported these numbers of messages.
    fn reported(sent: u64, received: u64) -> Connection {
        let mut connection = Connection::new(0, 1, Duration::ZERO);
        connection.sender = Some(Report { done: sent, is_whole: true, why: String::new() });
        connection.receiver = Some(Report { done: received, ..Report::absent("closed") });
        connection
    }

    #[test]
    fn soak_takes_no_lost_message_and_no_failure_without_a_kill() {
        assert!(matches!(reported(5, 5).ending(), Ok(Some(Ending::Whole))));
        assert!(reported(5, 4).ending().is_err_and(|why| why.contains("lost messages")));
        let mut failed = reported(5, 5);
        failed.sender = Some(Report::absent("reset"));
        assert!(failed.ending().is_err_and(|why| why.contains("without cause: reset")));
        failed.excuse();
        assert!(matches!(failed.ending(), Ok(Some(Ending::Cut))));
        failed.receiver = None;
        assert!(matches!(failed.ending(), Ok(None)), "the other end has to notice it");
    }
}
