//! The bytes of a TCP connection, of which payload is known by its place only.

use std::collections::VecDeque;

use evenkeel_protocol::FRAME_BYTES;

/// Consecutive bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bytes {
    /// A part of a frame's header.
    Header {
        /// The whole header.
        header: [u8; FRAME_BYTES],
        /// The first byte of the part.
        start: u8,
    },
    /// A part of a message.
    Payload {
        /// Its number.
        message: u64,
        /// The first byte, counted from the message's first.
        start: u64,
        /// One past the last byte.
        end: u64,
    },
}

/// What was written and is not read yet.
#[derive(Debug, Default)]
pub(crate) struct Stream(VecDeque<Bytes>);

impl Bytes {
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::Header { start, .. } => FRAME_BYTES as u64 - u64::from(*start),
            Self::Payload { start, end, .. } => end - start,
        }
    }
}

impl Stream {
    /// Adds bytes at the end.
    pub(crate) fn push(&mut self, bytes: Bytes) {
        // A message that is written bit by bit stays one part.
        if let (
            Some(Bytes::Payload { message, end, .. }),
            Bytes::Payload { message: other, start, end: to },
        ) = (self.0.back_mut(), bytes)
            && *message == other
            && *end == start
        {
            *end = to;
        } else if bytes.len() > 0 {
            self.0.push_back(bytes);
        }
    }

    /// Reads bytes of a header. `None` if the next bytes are not of a header.
    pub(crate) fn read_header(&mut self, into: &mut [u8]) -> Option<()> {
        let mut at = 0;
        while at < into.len() {
            let Bytes::Header { header, start } = self.0.front_mut()? else { return None };
            let count = (FRAME_BYTES - usize::from(*start)).min(into.len() - at);
            let from = usize::from(*start);
            into[at..at + count].copy_from_slice(&header[from..from + count]);
            at += count;
            *start += count as u8;
            if usize::from(*start) == FRAME_BYTES {
                self.0.pop_front();
            }
        }
        Some(())
    }

    /// Reads at most `most` bytes of one message. Returns the message's number, the first byte and
    /// the one past the last.
    pub(crate) fn read_payload(&mut self, most: u64) -> Option<(u64, u64, u64)> {
        let Bytes::Payload { message, start, end } = self.0.front_mut()? else { return None };
        let read = (*message, *start, (*end).min(*start + most));
        *start = read.2;
        if *start == *end {
            self.0.pop_front();
        }
        Some(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stream_returns_what_was_written() {
        let mut stream = Stream::default();
        let header: [u8; FRAME_BYTES] = std::array::from_fn(|index| index as u8);
        stream.push(Bytes::Header { header, start: 0 });
        stream.push(Bytes::Payload { message: 3, start: 100, end: 150 });
        stream.push(Bytes::Payload { message: 3, start: 150, end: 200 });
        let mut read = [0; FRAME_BYTES];
        assert_eq!(stream.read_payload(1), None);
        assert!(stream.read_header(&mut read[..20]).is_some());
        assert!(stream.read_header(&mut read[20..]).is_some());
        assert_eq!(read, header);
        assert_eq!(stream.read_header(&mut read), None);
        assert_eq!(stream.read_payload(70), Some((3, 100, 170)));
        assert_eq!(stream.read_payload(70), Some((3, 170, 200)));
        assert_eq!(stream.read_payload(70), None);
    }
}
