//! Messages from one rank to another, outside of collective operations.

use std::sync::Arc;
use std::time::Duration;

use crate::error::Result;
use crate::links::link::Key;
use crate::links::mesh::{Mesh, ReceiveRequest};
use crate::memory::Target;
use crate::wait::{Poll, Wait};

/// A receive on its transport. Dropping it takes the memory back.
struct ReceiveGuard<'a> {
    mesh: &'a Mesh,
    from: usize,
    request: Arc<ReceiveRequest>,
}

impl ReceiveGuard<'_> {
    /// Whether a link had to be ended for it.
    fn reclaim(&self) -> bool {
        self.request.done().is_none() && self.mesh.abandon_receive(self.from, &self.request)
    }
}

impl Drop for ReceiveGuard<'_> {
    fn drop(&mut self) {
        self.reclaim();
    }
}

/// Which message is waited for.
pub(crate) struct MessageReceive<'a> {
    pub(crate) mesh: &'a Mesh,
    /// From one of these.
    pub(crate) from: &'a [usize],
    pub(crate) key: Key,
    pub(crate) timeout: Duration,
}

impl MessageReceive<'_> {
    /// Receives it. From whom, as a place among those named, and how many bytes.
    pub(crate) fn receive(&self, into: &mut [u8]) -> Result<(usize, usize)> {
        let Self { mesh, key, timeout, from } = *self;
        let mut wait = Wait::new(mesh, "receive", key.tag, timeout)?;
        let place = match from {
            [_] => 0,
            _ => self.find(&mut wait)?,
        };
        let whom = from[place];
        // SAFETY: the receive takes the memory back when it is dropped, which is before the borrow ends; it is not forgotten.
        let into = unsafe { Target::lend(into) };
        let receive = ReceiveGuard { mesh, from: whom, request: mesh.receive(whom, key, into) };
        let result = wait.until(
            &mut (),
            |()| (vec![whom], mesh.carried_from(whom, &receive.request)),
            |()| {
                if let Some(bytes) = receive.request.done() {
                    return Ok(Poll::Done(bytes));
                }
                let moved = mesh.progress(whom, &receive.request)?;
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
        Ok((place, bytes))
    }

    /// Who sends it first. Ranks that have left do not matter as long as others may send.
    fn find(&self, wait: &mut Wait<'_>) -> Result<usize> {
        let Self { mesh, key, from, timeout } = *self;
        let mut there = vec![true; from.len()];
        let waits = |there: &Vec<bool>| {
            let ranks = from.iter().zip(there).filter(|(_, there)| **there);
            (ranks.map(|(rank, _)| *rank).collect(), 0)
        };
        wait.until(&mut there, waits, |there| {
            let mut error = None;
            for (place, rank) in from.iter().enumerate() {
                if !there[place] {
                    continue;
                }
                match mesh.probe(*rank, key) {
                    Ok(true) => return Ok(Poll::Done(place)),
                    Ok(false) => {}
                    Err(other) => error = Some((place, other)),
                }
            }
            let Some((place, error)) = error else { return Ok(Poll::Idle) };
            there[place] = error.mismatch || !mesh.has_left(error.rank, timeout / 5);
            if there[place] || !there.contains(&true) { Err(error) } else { Ok(Poll::Idle) }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::rendezvous::bootstrap_mesh;
    use crate::links::link::{Kind, Submitted};
    use crate::memory::Source;
    use crate::testing::TEST_TIMEOUT;
    use crate::{MemoryStore, TransportKind};
    use std::thread;
    use std::time::Instant;

    const TIMEOUT: Duration = Duration::from_secs(2);
    /// More than a link through shared memory holds: the rest goes when its sender looks after it.
    const BYTES: usize = 5 << 18;

    #[test]
    fn a_message_that_takes_longer_than_the_timeout_but_moves_arrives() {
        let key = Key { kind: Kind::Message, group: 7, tag: 0, sequence: 0, part: 0 };
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
                    // Not to wait for anything: this is how slow it is.
                    thread::sleep(TIMEOUT * 2 / 5);
                }
            });
            let (mesh, mut room) = (join(0), vec![0; BYTES]);
            let wanted = MessageReceive { mesh: &mesh, from: &[1], key, timeout: TIMEOUT };
            let begun = Instant::now();
            assert_eq!(wanted.receive(&mut room).unwrap(), (0, BYTES));
            assert!(room.iter().all(|byte| *byte == 3) && begun.elapsed() > TIMEOUT);
        });
    }
}
