//! The error type of this crate.

use std::time::Duration;

/// The class of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The arguments of the call are invalid. Nothing was done.
    Argument,
    /// Nothing moved for the whole timeout, although every process that was probed is alive.
    Timeout,
    /// A rank's process has exited, does not respond or cannot be reached.
    Lost,
    /// A rank aborted the group.
    Aborted,
    /// A local system call failed.
    System,
    /// The store cannot be used.
    Store,
    /// The ranks called different operations, or passed different counts.
    Mismatch,
}

/// What went wrong, in one line, and which ranks caused it.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    kind: ErrorKind,
    message: String,
    ranks: Vec<usize>,
    usable: bool,
}

/// The result of a call of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// The class of the error.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The ranks that caused it, as far as that is known, in the numbers of the group that was used.
    pub fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// Whether the group is still usable. A group that is not returns the error that ended it from every later call.
    pub fn is_group_usable(&self) -> bool {
        self.usable
    }

    /// The error of a store that is implemented outside this crate.
    pub fn of_store(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Store, message)
    }

    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), ranks: vec![], usable: true }
    }

    pub(crate) fn argument(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Argument, message)
    }

    pub(crate) fn system(what: impl std::fmt::Display, error: impl std::fmt::Display) -> Self {
        Self::new(ErrorKind::System, format!("{what}: {error}"))
    }

    /// The same error, caused by these ranks.
    pub(crate) fn with_ranks(self, ranks: impl Into<Vec<usize>>) -> Self {
        Self { ranks: ranks.into(), ..self }
    }

    /// The same error, after which the group cannot be used.
    pub(crate) fn group_unusable(self) -> Self {
        Self { usable: false, ..self }
    }

    /// The same error with the ranks numbered as in another group.
    pub(crate) fn renumbered(mut self, number: impl Fn(usize) -> Option<usize>) -> Self {
        self.ranks = self.ranks.iter().filter_map(|rank| number(*rank)).collect();
        self
    }
}

/// Ranks for a message: `rank 3`, or `ranks 1, 2 and 5`.
pub(crate) fn list_ranks(ranks: &[usize]) -> String {
    match ranks {
        [] => "no rank".to_owned(),
        [one] => format!("rank {one}"),
        [others @ .., last] => {
            let others: Vec<_> = others.iter().map(usize::to_string).collect();
            format!("ranks {} and {last}", others.join(", "))
        }
    }
}

/// A duration for a message.
pub(crate) fn format_duration(time: Duration) -> String {
    if time < Duration::from_secs(1) {
        format!("{} ms", time.as_millis())
    } else {
        format!("{} s", (time.as_secs_f64() * 10.0).round() / 10.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_and_durations_are_formatted() {
        assert_eq!(list_ranks(&[3]), "rank 3");
        assert_eq!(list_ranks(&[1, 2, 5]), "ranks 1, 2 and 5");
        assert_eq!(format_duration(Duration::from_millis(250)), "250 ms");
        assert_eq!(format_duration(Duration::from_millis(2500)), "2.5 s");
        assert_eq!(format_duration(Duration::from_secs(30)), "30 s");
    }
}
