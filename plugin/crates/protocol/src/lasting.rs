//! What outlives a lifeline's TCP connection: the words that are said again on the next one, since the peer has not heard
//! them.

use std::collections::VecDeque;

use crate::lifeline::ControlMessage;

/// Words heard before the peer is told so. It keeps no more than a few more.
const STEP: u64 = 8;

/// The words of one side that hold whatever the lifeline is ([`ControlMessage::is_lasting`]), and how many of the peer's it has heard.
#[derive(Debug, Default)]
pub struct Lasting {
    /// Those that the peer may not have heard, encoded, oldest first.
    said: VecDeque<Vec<u8>>,
    /// How many were said before those.
    confirmed: u64,
    heard: u64,
    /// So many have been heard, as the peer was told.
    told: u64,
}

impl Lasting {
    /// One is said. It is to be sent as well, unless the lifeline is new and the peer has not told what it has heard.
    pub fn say(&mut self, encoded: Vec<u8>) {
        self.said.push_back(encoded);
    }

    /// One of the peer's was heard; what it is to be told of that, if anything.
    pub fn hear(&mut self) -> Option<ControlMessage> {
        self.heard += 1;
        (self.heard - self.told >= STEP).then(|| self.tell())
    }

    /// What the peer is told on a new lifeline.
    pub fn tell(&mut self) -> ControlMessage {
        self.told = self.heard;
        ControlMessage::Heard(self.heard)
    }

    /// The peer has heard so many; whether that can be.
    pub fn confirm(&mut self, words: u64) -> bool {
        let Some(more) = words.checked_sub(self.confirmed) else { return false };
        if more > self.said.len() as u64 {
            return false;
        }
        self.said.drain(..more as usize);
        self.confirmed = words;
        true
    }

    /// What the peer may not have heard, encoded, oldest first.
    pub fn unconfirmed(&self) -> impl Iterator<Item = &[u8]> {
        self.said.iter().map(Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_peer_cannot_have_heard_what_was_not_said_or_less_than_before() {
        let mut lasting = Lasting::default();
        assert!(lasting.confirm(0));
        assert!(!lasting.confirm(1));
        (0..3).for_each(|number| lasting.say(vec![number]));
        assert!(lasting.confirm(2));
        assert!(!lasting.confirm(1));
        assert!(!lasting.confirm(4));
        assert_eq!(lasting.unconfirmed().collect::<Vec<_>>(), [[2]]);
    }

    proptest! {
        /// One side says numbers; lifelines end at any place, with what was sent on them and not read.
        #[test]
        fn each_word_is_heard_once_and_in_order(
            mut steps in proptest::collection::vec((0u8..4, 0usize..20), 1..60),
        ) {
            let (mut speaker, mut listener) = (Lasting::default(), Lasting::default());
            let (mut next, mut heard) = (0, Vec::new());
            let (mut there, mut back) = (VecDeque::new(), VecDeque::new());
            // Whether the speaker knows what was heard before the lifeline began.
            let mut resumed = true;
            // In the end all comes.
            steps.extend([(2, 99), (1, 99), (2, 99)]);
            for (step, count) in steps {
                match step {
                    0 => {
                        speaker.say(vec![next]);
                        if resumed {
                            there.push_back(next);
                        }
                        next += 1;
                    }
                    1 => for number in there.drain(..count.min(there.len())) {
                        heard.push(number);
                        back.extend(listener.hear());
                    },
                    2 => for word in back.drain(..count.min(back.len())) {
                        let ControlMessage::Heard(words) = word else { panic!("{word:?}") };
                        prop_assert!(speaker.confirm(words));
                        if !std::mem::replace(&mut resumed, true) {
                            there.extend(speaker.unconfirmed().map(|word| word[0]));
                        }
                    },
                    _ => {
                        there.clear();
                        back.clear();
                        back.push_back(listener.tell());
                        resumed = false;
                    }
                }
            }
            prop_assert!(heard.iter().copied().eq(0..next), "{next} words, heard {heard:?}");
            prop_assert!((speaker.unconfirmed().count() as u64) < STEP);
        }
    }
}
