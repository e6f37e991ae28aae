//! Messages in memory of one's own, without unsafe code: the memory goes along with the message and comes back when
//! that is done.

use std::sync::Arc;

use crate::error::Error;
use crate::recv::RecvConnection;
use crate::request::Request;
use crate::send::SendConnection;
use crate::sys::Block;

/// A message that is being received into a block. Dropping it gives the message up.
pub struct Receiving {
    request: Request,
    /// `None` once it has come back.
    block: Option<Block>,
}

/// A message that is being sent from a block, which others may send from too. Dropping it gives nothing up but the word
/// that it is done.
pub struct Sending {
    request: Request,
    block: Option<Arc<Block>>,
}

impl RecvConnection {
    /// Posts a block's first `length` bytes for the next message; the block comes back when as many requests as possible
    /// are outstanding.
    ///
    /// # Errors
    /// The connection's failure.
    ///
    /// # Panics
    /// When the block is not as long.
    pub fn recv_block(
        &self,
        mut block: Block,
        length: usize,
    ) -> Result<Result<Receiving, Block>, Error> {
        let buffer = block.lend_mut(length);
        Ok(match self.recv(buffer)? {
            Some(request) => Ok(Receiving { request, block: Some(block) }),
            None => Err(block),
        })
    }
}

impl SendConnection {
    /// Begins to send a block's first `length` bytes; `None` when as many requests as possible are outstanding.
    ///
    /// # Errors
    /// As [`SendConnection::send`].
    ///
    /// # Panics
    /// When the block is not as long.
    pub fn send_block(&self, block: &Arc<Block>, length: usize) -> Result<Option<Sending>, Error> {
        let request = self.send(block.lend(length))?;
        Ok(request.map(|request| Sending { request, block: Some(Arc::clone(block)) }))
    }
}

impl Receiving {
    /// The block and the message's length once it is there; `None` before, and once it was given. As [`Request::test`]
    /// if `diligent`, else as [`Request::look`].
    ///
    /// # Errors
    /// The connection's failure.
    pub fn poll(&mut self, diligent: bool) -> Result<Option<(Block, usize)>, Error> {
        let length = poll(&self.request, diligent)?;
        // A message is no longer than its buffer, which is in memory.
        Ok(length.and_then(|length| Some((self.block.take()?, length as usize))))
    }
}

impl Drop for Receiving {
    fn drop(&mut self) {
        if let Some(block) = self.block.take() {
            self.request.keep(Box::new(block));
        }
    }
}

impl Sending {
    /// Whether the message is sent. As [`Request::test`] if `diligent`, else as [`Request::look`].
    ///
    /// # Errors
    /// The connection's failure.
    pub fn poll(&mut self, diligent: bool) -> Result<bool, Error> {
        let done = poll(&self.request, diligent)?.is_some();
        if done {
            self.block = None;
        }
        Ok(done)
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        if let Some(block) = self.block.take() {
            self.request.keep(Box::new(block));
        }
    }
}

fn poll(request: &Request, diligent: bool) -> Result<Option<u64>, Error> {
    if diligent { request.test() } else { request.look() }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::{Handle, Log, Nonce, Notify, Settings, Transport};

    struct Silence;

    impl Log for Silence {
        fn warn(&self, _line: &str) {}
        fn info(&self, _line: &str) {}
    }

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Notify for Count {
        fn notify(&self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Waits for a number of words, without a look at the network.
    fn heard(count: &Count, least: usize) {
        until(|| (count.0.load(Ordering::SeqCst) >= least).then_some(()));
    }

    fn until<T>(mut look: impl FnMut() -> Option<T>) -> T {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(found) = look() {
                return found;
            }
            assert!(Instant::now() < deadline, "nothing happens");
            thread::yield_now();
        }
    }

    fn transport() -> Transport {
        let lo = |name: &str| (name == "NCCL_SOCKET_IFNAME").then(|| "lo".to_owned());
        Transport::new(Settings::from_lookup(lo).unwrap(), Arc::new(Silence)).unwrap()
    }

    /// Both ends of a connection to a known address, and who hears of the receiving one.
    fn pair(transport: &Transport) -> (SendConnection, RecvConnection, Arc<Count>) {
        let (any, nonce) = ("127.0.0.1:0".parse().unwrap(), Nonce([7; 16]));
        let door = Arc::new(Count::default());
        let notified: Arc<Count> = Arc::clone(&door);
        let listener = transport.listen_at(any, nonce, "", notified).unwrap();
        let address = listener.address();
        let handle = Handle { addresses: vec![address.ip()], port: address.port(), nonce };
        let call = transport.try_connect(0, &handle, "", 1).unwrap();
        heard(&door, 1);
        let recv = listener.poll_accept().unwrap().unwrap();
        let count = Arc::new(Count::default());
        recv.notify(Arc::<Count>::clone(&count));
        (until(|| call.poll().unwrap()), recv, count)
    }

    #[test]
    fn blocks_travel_and_come_back_and_who_wants_to_know_hears_of_it() {
        let transport = transport();
        let (send, recv, count) = pair(&transport);
        for length in [100, 100_000] {
            let before = count.0.load(Ordering::SeqCst);
            let mut block = Block::new(length);
            block.bytes_mut().fill(length as u8);
            let block = Arc::new(block);
            let mut receiving =
                recv.recv_block(Block::new(length + 9), length + 9).unwrap().ok().unwrap();
            assert!(receiving.poll(false).unwrap().is_none());
            let mut sending = send.send_block(&block, length).unwrap().unwrap();
            // The workers move it: nobody asks.
            heard(&count, before + 1);
            let (came, bytes) = receiving.poll(false).unwrap().unwrap();
            assert_eq!(bytes, length);
            assert!(came.bytes()[..length].iter().all(|byte| *byte == length as u8));
            assert!(receiving.poll(false).unwrap().is_none(), "it was given");
            until(|| sending.poll(true).unwrap().then_some(()));
            assert_eq!(Arc::strong_count(&block), 1);
        }
    }

    #[test]
    fn a_lost_peer_is_told_without_being_asked_for() {
        let transport = transport();
        let (send, recv, count) = pair(&transport);
        let mut receiving = recv.recv_block(Block::new(10), 10).unwrap().ok().unwrap();
        drop(send);
        heard(&count, 1);
        assert!(receiving.poll(false).is_err());
    }

    #[test]
    fn memory_of_messages_that_are_given_up_stays_as_long_as_somebody_may_write_to_it() {
        let transport = transport();
        let (send, recv, count) = pair(&transport);
        let receiving = recv.recv_block(Block::new(1 << 20), 1 << 20).unwrap().ok().unwrap();
        drop(receiving);
        let block = Arc::new(Block::new(1 << 20));
        let sending = send.send_block(&block, 1 << 20).unwrap().unwrap();
        drop(sending);
        // It still goes from memory to memory.
        heard(&count, 1);
        drop((send, recv));
        until(|| (Arc::strong_count(&block) == 1).then_some(()));
    }
}
