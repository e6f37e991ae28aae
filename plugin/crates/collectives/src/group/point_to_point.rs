//! Point-to-point messages between two ranks of a group.

use std::sync::atomic::Ordering;

use crate::algorithms::plan::Plan;
use crate::algorithms::reduction::Reduction;
use crate::error::{Error, Result};
use crate::group::receive::MessageReceive;
use crate::links::link::{Key, Kind};
use crate::links::matching::MAX_MESSAGE_BYTES;
use crate::recorder::{Called, Recorded};

use super::{Call, Group, Sequence};

impl Group {
    /// Sends a message to another rank. Returns when the bytes may be changed; for a large message that is when the other rank has
    /// received it. Messages of a tag arrive in order.
    ///
    /// # Errors
    /// As [`Group::allreduce`]; [`ErrorKind::Argument`](crate::ErrorKind::Argument) for a message to this rank itself.
    pub fn send(&self, to: usize, bytes: &[u8], call: &Call) -> Result<()> {
        self.send_in_parts(to, bytes, call, MAX_MESSAGE_BYTES)
    }

    /// A message of `max_part` bytes or more is sent in parts, and received so.
    fn send_in_parts(&self, to: usize, bytes: &[u8], call: &Call, max_part: usize) -> Result<()> {
        self.check_peer(to)?;
        let plan = Plan::message(to, bytes.len(), max_part);
        self.run(
            Called::of("send", bytes.len(), 0).with(to),
            self.message_key(call),
            &plan,
            max_part,
            bytes,
            &mut [],
            (&Reduction::none(), call),
        )
    }

    /// Receives a message from another rank. Returns its length, which may be less than the buffer's.
    ///
    /// # Errors
    /// As [`Group::allreduce`]. A message that is longer than the buffer ends the group.
    pub fn recv(&self, from: usize, buffer: &mut [u8], call: &Call) -> Result<usize> {
        self.check_peer(from)?;
        let record = self.record_receive(Some(from), buffer.len(), call)?;
        let member = [self.members[from]];
        let received = self.receive(&member, buffer, call, MAX_MESSAGE_BYTES);
        let received = received.map(|(_, bytes)| (from, bytes));
        self.record_received(record, &received);
        received.map(|(_, bytes)| bytes)
    }

    /// Receives a message from the first rank that sends one. Returns that rank and the message's length.
    ///
    /// # Errors
    /// As [`Group::recv`].
    pub fn recv_any(&self, buffer: &mut [u8], call: &Call) -> Result<(usize, usize)> {
        // Those after the last sender come first: nobody who sends without a pause holds up the others.
        let (before, after) = self.members.split_at(self.first_sender.load(Ordering::Relaxed));
        let is_other = |member: &usize| *member != self.mesh.own_rank();
        let others: Vec<usize> = after.iter().chain(before).copied().filter(is_other).collect();
        if others.is_empty() {
            return Err(Error::argument("there is no other rank to receive from"));
        }
        let record = self.record_receive(None, buffer.len(), call)?;
        let received = self.receive(&others, buffer, call, MAX_MESSAGE_BYTES);
        let received = received.map(|(index, bytes)| {
            let rank = self.members.iter().position(|member| *member == others[index]);
            (rank.unwrap_or_default(), bytes)
        });
        self.record_received(record, &received);
        let (rank, bytes) = received?;
        self.first_sender.store(rank + 1, Ordering::Relaxed);
        Ok((rank, bytes))
    }

    /// Records that a receive begins.
    fn record_receive(&self, from: Option<usize>, bytes: usize, call: &Call) -> Result<Recorded> {
        self.check_usable()?;
        let called = Called { peer: from, ..Called::of("recv", 0, bytes) };
        let number = from.and_then(|from| self.record.message_number(from, true));
        let sequence = Sequence::Receives { from, tag: call.tag };
        Ok(self.record.start(sequence, call, called, number))
    }

    /// Records how a receive has ended: the sender and the length of the message, or the error.
    fn record_received(&self, record: Recorded, received: &Result<(usize, usize)>) {
        if let Ok((from, bytes)) = received {
            self.record.received(record, *from, *bytes);
        }
        self.record.end(record, received.as_ref().err());
    }

    fn receive(
        &self,
        from: &[usize],
        buffer: &mut [u8],
        call: &Call,
        max_part: usize,
    ) -> Result<(usize, usize)> {
        self.check_usable()?;
        let timeout = call.timeout.unwrap_or(self.timeout);
        let (mut key, mut sender, mut received) = (self.message_key(call), 0, 0);
        loop {
            let is_first = key.part == 0;
            let from = if is_first { from } else { &from[sender..=sender] };
            let end = buffer.len().min(received + max_part);
            let receive = MessageReceive { mesh: &self.mesh, from, key, timeout };
            let (place, bytes) = receive.receive(&mut buffer[received..end]).map_err(|error| {
                // The rest must not be taken for that of another message.
                let error = match is_first {
                    true => error,
                    false => self.mesh.end_group_on_partial_transfer(error),
                };
                self.renumbered(error)
            })?;
            if is_first {
                sender = place;
            }
            received += bytes;
            if bytes < max_part {
                return Ok((sender, received));
            }
            key.part += 1;
        }
    }

    fn message_key(&self, call: &Call) -> Key {
        Key {
            kind: Kind::Message,
            group: self.id,
            tag: call.tag,
            sequence: 0,
            part: 0,
            operation: 0,
        }
    }

    fn check_peer(&self, rank: usize) -> Result<()> {
        self.mesh.check_rank(rank, self.size())?;
        if rank == self.rank {
            return Err(Error::argument("a rank cannot send messages to itself"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::{TEST_TIMEOUT, run_ranks, transports};
    use crate::{ErrorKind, MemoryStore};
    use std::thread;
    use std::time::Duration;

    #[test]
    fn messages_of_a_tag_arrive_in_order() {
        for transport in transports() {
            run_ranks(3, &transport, |group| {
                let (a, b) = (Call::default().tag(1), Call::default().tag(2));
                if group.rank() == 0 {
                    let mut buffer = vec![0; 200_000];
                    // The second tag first: messages before it are buffered as unexpected.
                    assert_eq!(group.recv(1, &mut buffer, &b).unwrap(), 1);
                    assert_eq!(buffer[0], 77);
                    for expected in [1, 100_000, 3] {
                        let bytes = group.recv(1, &mut buffer, &a).unwrap();
                        assert_eq!((bytes, buffer[0]), (expected, expected as u8));
                    }
                    let mut from: Vec<usize> =
                        (0..2).map(|_| group.recv_any(&mut buffer, &b).unwrap().0).collect();
                    from.sort_unstable();
                    assert_eq!(from, [1, 2]);
                } else {
                    if group.rank() == 1 {
                        group.send(0, &[1], &a).unwrap();
                        group.send(0, &[77], &b).unwrap();
                        group.send(0, &vec![100_000u32 as u8; 100_000], &a).unwrap();
                        group.send(0, &[3; 3], &a).unwrap();
                    }
                    group.send(0, &[0], &b).unwrap();
                }
                group.barrier(&Call::default()).unwrap();
            });
        }
    }

    #[test]
    fn message_of_a_rank_that_left_is_received() {
        for transport in transports() {
            let left = std::sync::Barrier::new(2);
            let store = MemoryStore::new();
            let join = |rank| Group::join(&store, rank, 2, &transport, TEST_TIMEOUT).unwrap();
            let (early, late) = (Call::default().tag(1), Call::default().tag(2));
            thread::scope(|scope| {
                scope.spawn(|| {
                    let group = join(1);
                    group.broadcast(&mut [7], 1, &late).unwrap();
                    group.send(0, &[8], &early).unwrap();
                    group.send(0, &[9], &late).unwrap();
                    drop(group);
                    left.wait();
                });
                let group = join(0);
                let mut buffer = [0];
                // The message of the broadcast is buffered as unexpected.
                group.recv(1, &mut buffer, &early).unwrap();
                left.wait();
                assert_eq!((group.recv(1, &mut buffer, &late).unwrap(), buffer), (1, [9]));
                group.broadcast(&mut buffer, 1, &late).unwrap();
                assert_eq!(buffer, [7]);
            });
        }
    }

    /// A long message is cut. Its parts are short here, since the longest takes a GiB of memory on each side.
    #[test]
    fn message_in_parts_arrives_whole() {
        const PART: usize = 1000;
        for transport in transports() {
            run_ranks(3, &transport, |group| {
                let call = Call::default();
                let bytes = |length: usize| (0..length).map(|i| (i % 251) as u8).collect();
                for length in [0, 999, 1000, 1001, 2000, 4500] {
                    let sent: Vec<u8> = bytes(length);
                    if group.rank() > 0 {
                        group.send_in_parts(0, &sent, &call, PART).unwrap();
                        // The next message of this rank comes after the other rank's.
                        group.barrier(&call).unwrap();
                        continue;
                    }
                    // Into a buffer of the same length, and into a longer one, from any rank.
                    let mut exact = vec![0; length];
                    let received = group.receive(&[1], &mut exact, &call, PART).unwrap();
                    assert!(received == (0, length) && exact == sent, "{received:?}");
                    let mut longer = vec![0; length + 1500];
                    let received = group.receive(&[1, 2], &mut longer, &call, PART).unwrap();
                    assert!(received == (1, length) && longer[..length] == sent, "{received:?}");
                    group.barrier(&call).unwrap();
                }
            });
        }
    }

    #[test]
    fn message_in_parts_of_another_length_is_a_mismatch() {
        for (sent, expected) in [(1500, 1000), (2500, 2200), (2000, 1999)] {
            run_ranks(2, &transports()[0], |group| {
                let call = Call::default();
                let error = if group.rank() == 0 {
                    group.receive(&[1], &mut vec![0; expected], &call, 1000).map(drop)
                } else {
                    // The message may be gone before the other rank finds that it is too long.
                    let sent = group.send_in_parts(0, &vec![1; sent], &call, 1000);
                    sent.and_then(|()| group.barrier(&call))
                };
                let error = error.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
            });
        }
    }

    /// The lower rank has always sent another message, and holds nobody up.
    #[test]
    fn recv_any_takes_turns() {
        for transport in transports() {
            run_ranks(3, &transport, |group| {
                let (call, all) = (Call::default().tag(1), Call::default());
                if group.rank() != 0 {
                    (0..3).for_each(|_| group.send(0, &[7], &call).unwrap());
                }
                // Messages of a link arrive in order: all have arrived after it.
                group.barrier(&all).unwrap();
                if group.rank() == 0 {
                    let sender = |_| group.recv_any(&mut [0], &call).unwrap().0;
                    let senders: Vec<usize> = (0..6).map(sender).collect();
                    assert_eq!(senders, [1, 2, 1, 2, 1, 2]);
                }
                group.barrier(&all).unwrap();
            });
        }
    }

    #[test]
    fn recv_any_skips_ranks_that_left() {
        for transport in transports() {
            let left = std::sync::Barrier::new(2);
            let store = MemoryStore::new();
            let join = |rank| Group::join(&store, rank, 3, &transport, TEST_TIMEOUT).unwrap();
            let call = Call::default();
            thread::scope(|scope| {
                scope.spawn(|| {
                    let group = join(1);
                    group.send(0, &[1], &call).unwrap();
                    drop(group);
                    left.wait();
                });
                scope.spawn(|| {
                    let group = join(2);
                    group.recv(0, &mut [0], &call).unwrap();
                    group.send(0, &[2], &call).unwrap();
                });
                let group = join(0);
                let mut buffer = [0];
                assert_eq!(group.recv_any(&mut buffer, &call).unwrap(), (1, 1));
                left.wait();
                let short = call.clone().timeout(Duration::from_secs(1));
                let error = group.recv_any(&mut buffer, &short).unwrap_err();
                assert!(error.kind() == ErrorKind::Timeout && error.ranks() == [2], "{error}");
                group.send(2, &[0], &call).unwrap();
                assert_eq!(group.recv_any(&mut buffer, &call).unwrap(), (2, 1));
            });
        }
    }
}
