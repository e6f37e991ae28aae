//! What a receiver has to write to its sender, by one flow.

use std::collections::VecDeque;

use crate::tcp::frame::Frame;

/// Frames for one flow. What acknowledgements say is decided when they are written.
#[derive(Debug)]
pub(super) struct Replies {
    phase: Phase,
    /// Other flows that have ended.
    pub(super) dead_flows: VecDeque<u32>,
    /// The buffer from which tags differ.
    pub(super) tags_differ_from: Option<u64>,
    /// Buffers by number, and their tags.
    pub(super) buffer_tags: VecDeque<(u64, i32)>,
    /// An acknowledgement is to be written, whether the sender has one like it or not.
    pub(super) wants_ack: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The dialer does not know that the flow is accepted. No frame may be written before that.
    Unanswered,
    Open,
    /// After what is left, the last frame follows.
    Closing,
    Closed,
}

/// What to write next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reply {
    Frame(Frame),
    Ack,
    Close,
}

impl Replies {
    /// For a flow whose dialer may know that it is accepted.
    pub(super) fn new(is_answered: bool) -> Self {
        Self {
            phase: if is_answered { Phase::Open } else { Phase::Unanswered },
            dead_flows: VecDeque::new(),
            tags_differ_from: None,
            buffer_tags: VecDeque::new(),
            wants_ack: false,
        }
    }

    /// The dialer knows that the flow is accepted.
    pub(super) fn answered(&mut self) {
        if self.phase == Phase::Unanswered {
            self.phase = Phase::Open;
        }
    }

    /// Nothing more is received. The flow says so, after what has been received.
    pub(super) fn close(&mut self) {
        self.phase = match self.phase {
            Phase::Open | Phase::Closing => Phase::Closing,
            Phase::Unanswered | Phase::Closed => Phase::Closed,
        };
        self.wants_ack = true;
    }

    /// Takes out what to write next. Acknowledgements come after other frames: a sender that has one has the others too.
    /// `is_ack_due`: the sender lacks one.
    pub(super) fn next(&mut self, is_ack_due: bool) -> Option<Reply> {
        if matches!(self.phase, Phase::Unanswered | Phase::Closed) {
            return None;
        }
        if let Some(number) = self.dead_flows.pop_front() {
            return Some(Reply::Frame(Frame::FlowDead(number)));
        }
        if let Some(from) = self.tags_differ_from.take() {
            return Some(Reply::Frame(Frame::TagsDifferFrom(from)));
        }
        if let Some((number, tag)) = self.buffer_tags.pop_front() {
            return Some(Reply::Frame(Frame::BufferTag(number, tag)));
        }
        if std::mem::take(&mut self.wants_ack) || is_ack_due {
            return Some(Reply::Ack);
        }
        let is_last = self.phase == Phase::Closing;
        is_last.then(|| {
            self.phase = Phase::Closed;
            Reply::Close
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(replies: &mut Replies) -> Vec<Reply> {
        std::iter::from_fn(|| replies.next(false)).collect()
    }

    #[test]
    fn replies_end_with_an_acknowledgement_and_the_close() {
        let mut replies = Replies::new(true);
        replies.wants_ack = true;
        replies.buffer_tags.extend([(3, 7), (4, 8)]);
        replies.tags_differ_from = Some(3);
        replies.dead_flows.push_back(5);
        let frames = [
            Frame::FlowDead(5),
            Frame::TagsDifferFrom(3),
            Frame::BufferTag(3, 7),
            Frame::BufferTag(4, 8),
        ];
        let frames = frames.map(Reply::Frame);
        assert_eq!(all(&mut replies), [&frames[..], &[Reply::Ack]].concat());
        assert_eq!((replies.next(true), replies.next(false)), (Some(Reply::Ack), None));
        replies.close();
        assert_eq!(all(&mut replies), [Reply::Ack, Reply::Close]);
        replies.close();
        assert_eq!((all(&mut replies), replies.next(true)), (vec![], None), "it is closed");
    }

    #[test]
    fn replies_wait_until_the_dialer_is_answered() {
        let mut replies = Replies::new(false);
        replies.dead_flows.push_back(5);
        assert_eq!(replies.next(true), None);
        replies.answered();
        assert_eq!(all(&mut replies), [Reply::Frame(Frame::FlowDead(5))]);
        let mut unanswered = Replies::new(false);
        unanswered.close();
        unanswered.answered();
        assert_eq!(all(&mut unanswered), []);
    }
}
