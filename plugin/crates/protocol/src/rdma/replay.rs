//! What outlives a lifeline's TCP connection: the words that are said again on the next one, since the peer has not heard
//! them.

use std::collections::VecDeque;

use super::control::ControlMessage;

/// Words heard before the peer is told so. It keeps no more than a few more.
const STEP: u64 = 8;

/// The words of one side that hold whatever the lifeline is ([`ControlMessage::is_replayed`]), and how many of the peer's it has heard.
#[derive(Debug, Default)]
pub struct ReplayBuffer {
    /// Those that the peer may not have heard, encoded, oldest first.
    unacked: VecDeque<Vec<u8>>,
    /// How many were said before those.
    acked_count: u64,
    received_count: u64,
    /// So many have been heard, as the peer was told.
    acknowledged_count: u64,
}

impl ReplayBuffer {
    /// One is said. It is to be sent as well, unless the lifeline is new and the peer has not told what it has heard.
    pub fn push(&mut self, encoded: Vec<u8>) {
        self.unacked.push_back(encoded);
    }

    /// One of the peer's was heard; what it is to be told of that, if anything.
    pub fn received(&mut self) -> Option<ControlMessage> {
        self.received_count += 1;
        (self.received_count - self.acknowledged_count >= STEP).then(|| self.ack())
    }

    /// What the peer is told on a new lifeline.
    pub fn ack(&mut self) -> ControlMessage {
        self.acknowledged_count = self.received_count;
        ControlMessage::Ack(self.received_count)
    }

    /// The peer has heard so many; whether that can be.
    pub fn acked(&mut self, words: u64) -> bool {
        let Some(more) = words.checked_sub(self.acked_count) else { return false };
        if more > self.unacked.len() as u64 {
            return false;
        }
        self.unacked.drain(..more as usize);
        self.acked_count = words;
        true
    }

    /// What the peer may not have heard, encoded, oldest first.
    pub fn unacked(&self) -> impl Iterator<Item = &[u8]> {
        self.unacked.iter().map(Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_peer_cannot_have_heard_what_was_not_said_or_less_than_before() {
        let mut replay = ReplayBuffer::default();
        assert!(replay.acked(0));
        assert!(!replay.acked(1));
        (0..3).for_each(|number| replay.push(vec![number]));
        assert!(replay.acked(2));
        assert!(!replay.acked(1));
        assert!(!replay.acked(4));
        assert_eq!(replay.unacked().collect::<Vec<_>>(), [[2]]);
    }

    proptest! {
        /// One side says numbers; lifelines end at any place, with what was sent on them and not read.
        #[test]
        fn each_word_is_heard_once_and_in_order(
            mut steps in proptest::collection::vec((0u8..4, 0usize..20), 1..60),
        ) {
            let (mut sender, mut receiver) = (ReplayBuffer::default(), ReplayBuffer::default());
            let (mut next, mut heard) = (0, Vec::new());
            let (mut there, mut back) = (VecDeque::new(), VecDeque::new());
            // Whether the speaker knows what was heard before the lifeline began.
            let mut resumed = true;
            // In the end all comes.
            steps.extend([(2, 99), (1, 99), (2, 99)]);
            for (step, count) in steps {
                match step {
                    0 => {
                        sender.push(vec![next]);
                        if resumed {
                            there.push_back(next);
                        }
                        next += 1;
                    }
                    1 => for number in there.drain(..count.min(there.len())) {
                        heard.push(number);
                        back.extend(receiver.received());
                    },
                    2 => for word in back.drain(..count.min(back.len())) {
                        let ControlMessage::Ack(words) = word else { panic!("{word:?}") };
                        prop_assert!(sender.acked(words));
                        if !std::mem::replace(&mut resumed, true) {
                            there.extend(sender.unacked().map(|word| word[0]));
                        }
                    },
                    _ => {
                        there.clear();
                        back.clear();
                        back.push_back(receiver.ack());
                        resumed = false;
                    }
                }
            }
            prop_assert!(heard.iter().copied().eq(0..next), "{next} words, heard {heard:?}");
            prop_assert!((sender.unacked().count() as u64) < STEP);
        }
    }
}
