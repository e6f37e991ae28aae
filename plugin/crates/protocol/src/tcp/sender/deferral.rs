//! Defers small messages to their caller's next poll.

use std::time::Duration;

/// A time, counted from any moment that stays the same.
type Time = Duration;

/// How long a message waits at most for its caller's next poll.
const MAX_DEFERRAL: Duration = Duration::from_millis(1);

/// Where messages come one by one, one in this many is deferred.
const TRIAL_PERIOD: u32 = 64;

/// Small messages of a caller that polls often wait for its next poll, so that one system call
/// writes all that it has sent until then. Where a caller sends one message a poll, waiting gains
/// nothing. Then most are written at once, and one is deferred now and then to see whether that has
/// changed.
///
/// One flow, by its slot, is to write what waits.
#[derive(Debug, Default)]
pub struct Deferral {
    /// The flow that is to write, and by when.
    waiting: Option<(usize, Time)>,
    /// Counts down to the message that is deferred, which has number 1. Zero while each may be: the
    /// last was not alone.
    next_trial: u32,
}

impl Deferral {
    /// Whether a message waits. Another one that is added is written with it.
    pub fn is_pending(&self) -> bool {
        self.waiting.is_some()
    }

    /// A small message was added while none waits, and the flow in this slot can write it. Returns
    /// whether it waits. Otherwise it is to be written now.
    pub fn handle_message(&mut self, slot: usize, now: impl FnOnce() -> Time) -> bool {
        if self.next_trial > 1 {
            self.next_trial -= 1;
            return false;
        }
        self.next_trial = 0;
        self.waiting = Some((slot, now() + MAX_DEFERRAL));
        true
    }

    /// The flow in this slot has taken this many small messages for one system call. What waits for
    /// it waits no longer.
    pub fn handle_taken(&mut self, slot: usize, messages: usize) {
        self.handle_ended(slot);
        if messages == 1 && self.next_trial == 0 {
            self.next_trial = TRIAL_PERIOD;
        }
    }

    /// The caller polls. Returns the slot of the flow that is to write now.
    pub fn handle_poll(&mut self) -> Option<usize> {
        self.waiting.take().map(|(slot, _)| slot)
    }

    /// It is this time. Returns the slot of the flow that is to write now, since the caller has not
    /// polled.
    pub fn handle_timeout(&mut self, now: Time) -> Option<usize> {
        self.waiting.take_if(|(_, until)| now >= *until).map(|(slot, _)| slot)
    }

    /// The flow in this slot has ended. Others take its messages.
    pub fn handle_ended(&mut self, slot: usize) {
        self.waiting.take_if(|(waiting, _)| *waiting == slot);
    }

    /// When [`Deferral::handle_timeout`] is due.
    pub fn next_timeout(&self) -> Option<Time> {
        self.waiting.map(|(_, until)| until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOT: usize = 3;

    fn micros(count: u64) -> Time {
        Duration::from_micros(count)
    }

    #[test]
    fn deferral_ends_with_the_next_poll() {
        let mut deferral = Deferral::default();
        assert!(!deferral.is_pending() && deferral.handle_poll().is_none());
        assert!(deferral.handle_message(SLOT, || micros(5)) && deferral.is_pending());
        assert_eq!(deferral.handle_poll(), Some(SLOT));
        assert_eq!((deferral.handle_poll(), deferral.next_timeout()), (None, None));
    }

    #[test]
    fn deferral_ends_after_a_millisecond_without_a_poll() {
        let mut deferral = Deferral::default();
        assert_eq!(deferral.handle_timeout(micros(0)), None);
        deferral.handle_message(SLOT, || micros(5));
        assert_eq!(deferral.next_timeout(), Some(micros(1005)));
        assert_eq!(deferral.handle_timeout(micros(1004)), None);
        assert_eq!(deferral.handle_timeout(micros(1005)), Some(SLOT));
        assert!(!deferral.is_pending() && deferral.next_timeout().is_none());
        // A timer of an earlier deferral does not end a later one.
        deferral.handle_message(SLOT, || micros(2000));
        assert_eq!(deferral.handle_timeout(micros(2500)), None);
        assert!(deferral.is_pending());
    }

    #[test]
    fn deferral_ends_with_its_flow() {
        let mut deferral = Deferral::default();
        deferral.handle_message(SLOT, || micros(0));
        deferral.handle_ended(SLOT + 1);
        assert!(deferral.is_pending());
        deferral.handle_ended(SLOT);
        assert!(!deferral.is_pending() && deferral.handle_poll().is_none());
    }

    /// There is room in its socket, say.
    #[test]
    fn deferral_ends_when_its_flow_writes_for_another_reason() {
        let mut deferral = Deferral::default();
        deferral.handle_message(SLOT, || micros(0));
        deferral.handle_taken(SLOT + 1, 2);
        assert!(deferral.is_pending(), "its own flow must still be called");
        deferral.handle_taken(SLOT, 2);
        assert!(!deferral.is_pending());
    }

    /// Sends this many messages, with a poll after each `batch`. Returns how many were deferred or
    /// added to deferred ones.
    fn deferred(messages: u32, batch: usize) -> u32 {
        let mut deferral = Deferral::default();
        let (mut waiting, mut count) = (0, 0);
        for message in 0..messages {
            let waits = deferral.is_pending() || deferral.handle_message(SLOT, || micros(0));
            match waits {
                true => (waiting, count) = (waiting + 1, count + 1),
                false => deferral.handle_taken(SLOT, 1),
            }
            if (message as usize + 1).is_multiple_of(batch) && deferral.handle_poll().is_some() {
                deferral.handle_taken(SLOT, waiting);
                waiting = 0;
            }
        }
        count
    }

    #[test]
    fn deferral_is_tried_now_and_then_where_messages_come_one_by_one() {
        assert_eq!(deferred(10 * TRIAL_PERIOD, 1), 10);
        assert_eq!(deferred(1000, 2), 1000, "each poll writes two");
        assert_eq!(deferred(1000, 8), 1000);
    }
}
