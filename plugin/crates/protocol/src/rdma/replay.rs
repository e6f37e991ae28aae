//! Control messages that survive a change of the control connection: those that the peer may not
//! have received are sent again on the next one.

use std::collections::VecDeque;

use super::control::ControlMessage;

/// Messages received before they are acknowledged. The peer keeps not many more.
const ACK_INTERVAL: u64 = 8;

/// The messages of one side that are valid on any control connection
/// ([`ControlMessage::is_replayed`]), and the number of such messages received from the peer.
#[derive(Debug, Default)]
pub struct ReplayBuffer {
    /// Messages that the peer may not have received, encoded, oldest first.
    unacked: VecDeque<Vec<u8>>,
    /// Number of messages before those.
    acked_count: u64,
    received_count: u64,
    /// Number of messages received, as last acknowledged to the peer.
    acknowledged_count: u64,
}

impl ReplayBuffer {
    /// Adds a message. It must be sent as well, unless the control connection is new and the peer
    /// has not yet acknowledged what it has received.
    pub fn push(&mut self, encoded: Vec<u8>) {
        self.unacked.push_back(encoded);
    }

    /// Counts a message from the peer. Returns an acknowledgement to send, if one is due.
    pub fn received(&mut self) -> Option<ControlMessage> {
        self.received_count += 1;
        (self.received_count - self.acknowledged_count >= ACK_INTERVAL).then(|| self.ack())
    }

    /// The acknowledgement to send first on a new control connection.
    pub fn ack(&mut self) -> ControlMessage {
        self.acknowledged_count = self.received_count;
        ControlMessage::Ack(self.received_count)
    }

    /// The peer has received this many messages. Returns false if that is impossible.
    pub fn acked(&mut self, count: u64) -> bool {
        let Some(more) = count.checked_sub(self.acked_count) else { return false };
        if more > self.unacked.len() as u64 {
            return false;
        }
        self.unacked.drain(..more as usize);
        self.acked_count = count;
        true
    }

    /// The messages that the peer may not have received, encoded, oldest first.
    pub fn unacked(&self) -> impl Iterator<Item = &[u8]> {
        self.unacked.iter().map(Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn replay_refuses_impossible_acknowledgements() {
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
        /// One side sends numbers. Control connections end at any point, and lose what was sent on
        /// them and not read.
        #[test]
        fn replay_delivers_each_message_once_and_in_order(
            mut steps in proptest::collection::vec((0u8..4, 0usize..20), 1..60),
        ) {
            let (mut sender, mut receiver) = (ReplayBuffer::default(), ReplayBuffer::default());
            let (mut next, mut received) = (0, Vec::new());
            let (mut there, mut back) = (VecDeque::new(), VecDeque::new());
            // Whether the acknowledgement for earlier control connections has been received.
            let mut resumed = true;
            // In the end all messages arrive.
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
                        received.push(number);
                        back.extend(receiver.received());
                    },
                    2 => for message in back.drain(..count.min(back.len())) {
                        let ControlMessage::Ack(count) = message else { panic!("{message:?}") };
                        prop_assert!(sender.acked(count));
                        if !std::mem::replace(&mut resumed, true) {
                            there.extend(sender.unacked().map(|message| message[0]));
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
            prop_assert!(received.iter().copied().eq(0..next), "{next} sent, received {received:?}");
            prop_assert!((sender.unacked().count() as u64) < ACK_INTERVAL);
        }
    }
}
