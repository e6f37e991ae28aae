//! Receives a point-to-point message, from one rank or from the first of several that sends.

use std::sync::Arc;
use std::time::Duration;

use crate::error::Result;
use crate::links::link::Key;
use crate::links::matching::ReceiveRequest;
use crate::links::mesh::Mesh;
use crate::memory::Target;
use crate::wait::{Poll, Wait};

/// A posted receive. Dropping it takes the memory back.
struct ReceiveGuard<'a> {
    mesh: &'a Mesh,
    from: usize,
    request: Arc<ReceiveRequest>,
}

impl ReceiveGuard<'_> {
    /// Takes the memory back. Returns whether a link had to be closed for it.
    fn reclaim(&self) -> bool {
        self.request.done().is_none() && self.mesh.abandon_receive(self.from, &self.request)
    }
}

impl Drop for ReceiveGuard<'_> {
    fn drop(&mut self) {
        self.reclaim();
    }
}

/// The message to receive.
pub(crate) struct MessageReceive<'a> {
    pub(crate) mesh: &'a Mesh,
    /// The ranks that may send it, in the order in which they are asked.
    pub(crate) from: &'a [usize],
    pub(crate) key: Key,
    pub(crate) timeout: Duration,
}

impl MessageReceive<'_> {
    /// Receives the message. Returns the sender, as an index of `from`, and the number of bytes.
    pub(crate) fn receive(&self, into: &mut [u8]) -> Result<(usize, usize)> {
        let Self { mesh, key, timeout, from } = *self;
        let new = if from.len() == 1 { Wait::new } else { Wait::for_any };
        let mut wait = new(mesh, "receive", key.tag, timeout)?;
        // SAFETY: the receive takes the memory back when it is dropped, which is before the borrow ends; it is not forgotten.
        let into = unsafe { Target::lend(into) };
        let (index, receive) = match *from {
            [from] => (0, ReceiveGuard { mesh, from, request: mesh.receive(from, key, into) }),
            _ => self.find(&mut wait, into)?,
        };
        let sender = from[index];
        let result = wait.until(
            &mut (),
            |()| (vec![sender], mesh.carried_from(sender, &receive.request)),
            |()| {
                if let Some(bytes) = receive.request.done() {
                    return Ok(Poll::Done(bytes));
                }
                let moved = mesh.progress(sender, &receive.request)?;
                Ok(match receive.request.done() {
                    Some(bytes) => Poll::Done(bytes),
                    None if moved => Poll::Progress,
                    None => Poll::Idle,
                })
            },
        );
        let broken = receive.reclaim();
        let bytes = result.map_err(|error| {
            if broken { mesh.end_group_on_partial_transfer(error) } else { error }
        })?;
        Ok((index, bytes))
    }

    /// Posts the receive at the first rank that sends the message. Ranks that have left or exited are skipped as long as others
    /// may send.
    fn find(&self, wait: &mut Wait<'_>, into: Target) -> Result<(usize, ReceiveGuard<'_>)> {
        let Self { mesh, key, from, timeout } = *self;
        let mut candidates = vec![true; from.len()];
        let awaited = |candidates: &Vec<bool>| {
            let ranks = from.iter().zip(candidates).filter(|(_, is_candidate)| **is_candidate);
            (ranks.map(|(rank, _)| *rank).collect(), 0)
        };
        wait.until(&mut candidates, awaited, |candidates| {
            let mut error = None;
            for (index, rank) in from.iter().enumerate() {
                if !candidates[index] {
                    continue;
                }
                match mesh.receive_arrived(*rank, key, into) {
                    Ok(Some(request)) => {
                        let receive = ReceiveGuard { mesh, from: *rank, request };
                        return Ok(Poll::Done((index, receive)));
                    }
                    Ok(None) => {}
                    Err(other) => error = Some((index, other)),
                }
            }
            let Some((index, error)) = error else { return Ok(Poll::Idle) };
            candidates[index] = error.mismatch || !mesh.is_gone(error.rank, timeout / 5);
            if candidates[index] || !candidates.contains(&true) {
                Err(error)
            } else {
                Ok(Poll::Idle)
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::rendezvous::bootstrap_mesh;
    use crate::links::link::{Kind, Submitted};
    use crate::memory::Source;
    use crate::test_support::TEST_TIMEOUT;
    use crate::{MemoryStore, TransportKind};
    use std::thread;
    use std::time::Instant;

    const TIMEOUT: Duration = Duration::from_secs(2);
    /// More than a link through shared memory holds: the rest is sent when the sender makes progress.
    const BYTES: usize = 5 << 18;

    #[test]
    fn slow_message_with_progress_outlasts_the_timeout() {
        let key = Key { kind: Kind::Message, group: 7, tag: 0, sequence: 0, part: 0, operation: 0 };
        let store = MemoryStore::new();
        let join = |rank| {
            bootstrap_mesh(&store, rank, 2, &TransportKind::SharedMemory, TEST_TIMEOUT).unwrap()
        };
        thread::scope(|scope| {
            scope.spawn(|| {
                let (mesh, bytes) = (join(1), vec![3; BYTES]);
                // SAFETY: the bytes outlive the mesh's use of them: it is done with them at the end of the loop.
                let given = mesh.send(0, key, unsafe { Source::lend(&bytes) }).unwrap();
                let Some(Submitted::Pending(number)) = given else { panic!("{given:?}") };
                while mesh.completed(0).unwrap() < number {
                    // Not a wait for a state: this makes the sender slow.
                    thread::sleep(TIMEOUT * 2 / 5);
                }
            });
            let (mesh, mut buffer) = (join(0), vec![0; BYTES]);
            let wanted = MessageReceive { mesh: &mesh, from: &[1], key, timeout: TIMEOUT };
            let begun = Instant::now();
            assert_eq!(wanted.receive(&mut buffer).unwrap(), (0, BYTES));
            assert!(buffer.iter().all(|byte| *byte == 3) && begun.elapsed() > TIMEOUT);
        });
    }
}
