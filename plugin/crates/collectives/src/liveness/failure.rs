//! The failure that ended a group.

use super::MAX_RANKS;
use crate::codec::{Reader, put, put_list};
use crate::error::{Error, ErrorKind};

/// Maximum number of bytes of a failure's text.
const MAX_TEXT: usize = 1000;

/// The failure that ended a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GroupFailure {
    pub(crate) kind: ErrorKind,
    pub(crate) ranks: Vec<usize>,
    pub(crate) text: String,
}

impl GroupFailure {
    pub(crate) fn error(&self) -> Error {
        Error::new(self.kind, self.text.clone()).with_ranks(self.ranks.clone()).group_unusable()
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = vec![match self.kind {
            ErrorKind::Aborted => 1,
            ErrorKind::Mismatch => 2,
            _ => 0,
        }];
        put_list(&mut out, self.ranks.iter().take(MAX_RANKS));
        let text: String = self.text.chars().take(MAX_TEXT / 4).collect();
        put(&mut out, text.as_bytes());
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader::new(bytes);
        let kind = match reader.byte()? {
            1 => ErrorKind::Aborted,
            2 => ErrorKind::Mismatch,
            _ => ErrorKind::Lost,
        };
        let ranks = reader.list()?;
        Some(Self { kind, ranks, text: String::from_utf8_lossy(reader.bytes()?).into_owned() })
    }
}
