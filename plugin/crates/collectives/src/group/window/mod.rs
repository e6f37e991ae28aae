//! Windows: memory of each rank that the others access by one-sided `put` and `get`.
//!
//! A window has its own links, so that its messages do not mix with those of operations, and a thread that serves requests of
//! other ranks. A request has an offset and a length. The bytes follow, straight into the memory or out of it.

mod server;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use evenkeel_transport::sync::lock;

use crate::algorithms::executor::{Job, execute};
use crate::algorithms::plan::{Action, Plan, Transfer};
use crate::algorithms::reduction::Reduction;
use crate::error::{Error, Result};
use crate::group::receive::MessageReceive;
use crate::links::matching::MAX_MESSAGE_BYTES;

use server::{DATA_TAG, GET, PUT, REQUEST_TAG, RESPONSE_TAG, WindowState};

use super::{Call, Group};

/// Memory that all ranks of a group can access.
///
/// Every rank must keep its window while any rank uses it, so call a barrier before dropping it. A window fails with its group.
pub struct Window {
    state: Arc<WindowState>,
    members: Vec<usize>,
    rank: usize,
    lengths: Vec<usize>,
    timeout: Duration,
    /// One request at a time to each rank.
    requests: Vec<Mutex<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Group {
    /// Opens a window to `bytes` bytes of this rank, initially 0. The number may differ between ranks. All ranks call it.
    ///
    /// # Errors
    /// As any operation.
    pub fn window(&self, bytes: usize, call: &Call) -> Result<Window> {
        let endpoint = self.mesh.open_endpoint()?;
        let address = endpoint.address();
        let own = [bytes as u64, address.len() as u64].map(u64::to_le_bytes);
        let mut sizes = vec![0; 16 * self.size()];
        sizes[16 * self.rank()..][..16].copy_from_slice(own.as_flattened());
        self.allgather(&mut sizes, call)?;
        let (sizes, _) = sizes.as_chunks::<8>();
        let sizes: Vec<usize> =
            sizes.iter().map(|size| u64::from_le_bytes(*size) as usize).collect();
        let (sizes, _) = sizes.as_chunks::<2>();
        let of_addresses: Vec<usize> = sizes.iter().map(|[_, address]| *address).collect();
        let mut all = vec![0; of_addresses.iter().sum()];
        let before: usize = of_addresses[..self.rank()].iter().sum();
        all[before..before + address.len()].copy_from_slice(&address);
        self.allgatherv(&mut all, &of_addresses, call)?;
        let mut addresses = vec![vec![]; self.mesh.probe_addresses().len()];
        let mut rest = &all[..];
        for (member, length) in self.members.iter().zip(&of_addresses) {
            let (address, more) = rest.split_at(*length);
            addresses[*member] = address.to_vec();
            rest = more;
        }
        let state = Arc::new(WindowState {
            mesh: self.mesh.with_endpoint(endpoint, addresses),
            group: self.id,
            memory: Mutex::new(vec![0; bytes]),
            wanted: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
        });
        let others: Vec<usize> =
            self.members.iter().copied().filter(|member| *member != self.mesh.own_rank()).collect();
        let serving = Arc::clone(&state);
        let thread = thread::Builder::new()
            .name("evenkeel-window".to_owned())
            .spawn(move || serving.serve(&others))
            .map_err(|error| Error::system("cannot start the thread of a window", error))?;
        Ok(Window {
            state,
            members: self.members.clone(),
            rank: self.rank(),
            lengths: sizes.iter().map(|[bytes, _]| *bytes).collect(),
            timeout: self.timeout(),
            requests: self.members.iter().map(|_| Mutex::default()).collect(),
            thread: Some(thread),
        })
    }
}

impl Window {
    /// Number of bytes that a rank has in the window.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::ErrorKind::Argument) when there is no such rank.
    pub fn length(&self, rank: usize) -> Result<usize> {
        self.state.mesh.check_rank(rank, self.members.len())?;
        Ok(self.lengths[rank])
    }

    /// Calls a function with this rank's own memory, which no other rank reads or writes meanwhile.
    pub fn with<T>(&self, access: impl FnOnce(&mut [u8]) -> T) -> T {
        self.state.wanted.fetch_add(1, Ordering::SeqCst);
        let mut memory = lock(&self.state.memory);
        self.state.wanted.fetch_sub(1, Ordering::SeqCst);
        access(&mut memory)
    }

    /// Writes bytes into a rank's memory at offset `at`. Returns when they have been written.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::ErrorKind::Argument) when they are not inside the window. Otherwise as a message to that rank
    /// and one from it.
    pub fn put(&self, rank: usize, at: usize, bytes: &[u8]) -> Result<()> {
        let Some(_request_lock) = self.lock_requests(rank, at, bytes.len())? else {
            self.with(|memory| memory[at..at + bytes.len()].copy_from_slice(bytes));
            return Ok(());
        };
        self.request(rank, PUT, at, bytes.len())?;
        self.send(rank, DATA_TAG, bytes)?;
        self.receive(rank, &mut [0])
    }

    /// Reads bytes from a rank's memory at offset `at`, as many as the buffer holds.
    ///
    /// # Errors
    /// As [`Window::put`].
    pub fn get(&self, rank: usize, at: usize, buffer: &mut [u8]) -> Result<()> {
        let Some(_request_lock) = self.lock_requests(rank, at, buffer.len())? else {
            self.with(|memory| buffer.copy_from_slice(&memory[at..at + buffer.len()]));
            return Ok(());
        };
        self.request(rank, GET, at, buffer.len())?;
        self.receive(rank, buffer)
    }

    /// Checks the range and locks requests to a rank; `None` if it is this rank.
    fn lock_requests(
        &self,
        rank: usize,
        at: usize,
        length: usize,
    ) -> Result<Option<MutexGuard<'_, ()>>> {
        let has = self.length(rank)?;
        if length > MAX_MESSAGE_BYTES || at > has || length > has - at {
            return Err(Error::argument(format!(
                "{length} bytes from {at} on: rank {rank} has {has} in the window, and {MAX_MESSAGE_BYTES} can go at a time"
            )));
        }
        Ok((rank != self.rank).then(|| lock(&self.requests[rank])))
    }

    fn request(&self, rank: usize, what: u8, at: usize, length: usize) -> Result<()> {
        let mut request = vec![what];
        request.extend_from_slice(&(at as u64).to_le_bytes());
        request.extend_from_slice(&(length as u64).to_le_bytes());
        self.send(rank, REQUEST_TAG, &request)
    }

    fn send(&self, rank: usize, tag: u32, bytes: &[u8]) -> Result<()> {
        let job = Job {
            mesh: &self.state.mesh,
            members: &self.members,
            rank: self.rank,
            key: self.state.key(tag),
            what: "window",
            timeout: self.timeout,
            reduction: &Reduction::none(),
            piece: MAX_MESSAGE_BYTES,
        };
        let transfer = Transfer { peer: rank, action: Action::SendInput, range: 0..bytes.len() };
        let sent = execute(&job, &Plan::single(transfer), bytes, &mut []);
        sent.map_err(|error| self.renumbered(error))
    }

    fn receive(&self, rank: usize, buffer: &mut [u8]) -> Result<()> {
        let WindowState { mesh, .. } = &*self.state;
        let (from, key) = ([self.members[rank]], self.state.key(RESPONSE_TAG));
        let receive = MessageReceive { mesh, from: &from, key, timeout: self.timeout };
        receive.receive(buffer).map(drop).map_err(|error| self.renumbered(error))
    }

    fn renumbered(&self, error: Error) -> Error {
        error.renumbered(|rank| self.members.iter().position(|member| *member == rank))
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        if self.state.mesh.liveness().is_forked() {
            // The thread is the parent's, and so are the links.
            std::mem::forget((self.thread.take(), Arc::clone(&self.state)));
            return;
        }
        self.state.closed.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // A panic there has been reported by its own message.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;
    use crate::test_support::{run_ranks, transports};

    /// Below and above the sizes at which links begin to lend memory.
    const BYTES: [usize; 3] = [8, 5000, 700_000];

    #[test]
    fn window_get_returns_what_was_put() {
        for transport in transports() {
            run_ranks(3, &transport, |group| {
                let (rank, call) = (group.rank(), Call::default());
                let bytes = BYTES[2] * 3;
                let window = group.window(bytes, &call).unwrap();
                for bytes in BYTES {
                    // Each rank writes its part into every rank's memory, its own included.
                    for other in 0..3 {
                        window.put(other, rank * bytes, &vec![rank as u8 + 1; bytes]).unwrap();
                    }
                    group.barrier(&call).unwrap();
                    window.with(|memory| {
                        let right = |(at, byte): (usize, &u8)| *byte == (at / bytes) as u8 + 1;
                        assert!(memory[..3 * bytes].iter().enumerate().all(right));
                    });
                    let mut got = vec![0; bytes];
                    for other in 0..3 {
                        window.get(other, 2 * bytes, &mut got).unwrap();
                        assert!(got.iter().all(|byte| *byte == 3));
                    }
                    group.barrier(&call).unwrap();
                }
            });
        }
    }

    #[test]
    fn window_refuses_ranges_outside() {
        for transport in transports() {
            run_ranks(2, &transport, |group| {
                let call = Call::default();
                let window = group.window(10 * group.rank(), &call).unwrap();
                assert_eq!((window.length(0).unwrap(), window.length(1).unwrap()), (0, 10));
                let wrong = [
                    window.put(1, 8, &[0; 3]),
                    window.put(0, 0, &[0]),
                    window.get(1, usize::MAX, &mut [0]),
                    window.put(2, 0, &[]),
                ];
                for result in wrong {
                    let error = result.unwrap_err();
                    assert!(
                        error.kind() == ErrorKind::Argument && error.is_group_usable(),
                        "{error}"
                    );
                }
                if group.rank() == 0 {
                    window.put(1, 7, &[1, 2, 3]).unwrap();
                }
                group.barrier(&call).unwrap();
                if group.rank() == 1 {
                    assert_eq!(window.with(|memory| memory[6..].to_vec()), [0, 1, 2, 3]);
                }
                group.barrier(&call).unwrap();
            });
        }
    }

    /// A get sees all of a put or nothing of it.
    #[test]
    fn window_puts_are_atomic() {
        for transport in transports() {
            run_ranks(3, &transport, |group| {
                let (bytes, call) = (100_000, Call::default());
                let sub = group.sub_group(&[2, 0, 1]).unwrap().unwrap();
                let window = sub.window(bytes, &call).unwrap();
                for round in 0..20u8 {
                    window.put(0, 0, &vec![3 * round + sub.rank() as u8; bytes]).unwrap();
                    let mut got = vec![0; bytes];
                    window.get(0, 0, &mut got).unwrap();
                    assert!(got.iter().all(|byte| *byte == got[0]));
                }
                group.barrier(&call).unwrap();
            });
        }
    }
}
