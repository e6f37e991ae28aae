//! Messages in owned memory, without unsafe code. The message owns the memory until it is done,
//! then gives it back.

use std::sync::Arc;

use crate::connection::recv::RecvConnection;
use crate::connection::request::Request;
use crate::connection::send::SendConnection;
use crate::error::Error;
use crate::memory::block::Block;

/// A message that is being received into a block. Dropping it abandons the message.
pub struct PendingRecv {
    request: Request,
    /// `None` once it was returned.
    block: Option<Block>,
}

/// A message that is being sent from a block, which may be shared. Dropping it does not cancel the
/// message.
pub struct PendingSend {
    request: Request,
    block: Option<Arc<Block>>,
}

impl RecvConnection {
    /// Posts the first `length` bytes of a block for the next message. Returns the block when the
    /// maximum number of requests is outstanding.
    ///
    /// # Errors
    /// The connection's failure.
    ///
    /// # Panics
    /// When the block is shorter.
    pub fn recv_block(
        &self,
        mut block: Block,
        length: usize,
    ) -> Result<Result<PendingRecv, Block>, Error> {
        if self.receiver.base().needs_registration(length) {
            block.register_with(&self.mr_cache());
        }
        let buffer = block.lend_mut(length);
        Ok(match self.recv(buffer)? {
            Some(request) => Ok(PendingRecv { request, block: Some(block) }),
            None => Err(block),
        })
    }
}

impl SendConnection {
    /// Starts to send the first `length` bytes of a block. `None` when the maximum number of
    /// requests is outstanding.
    ///
    /// # Errors
    /// As [`SendConnection::send`].
    ///
    /// # Panics
    /// When the block is shorter.
    pub fn send_block(
        &self,
        block: &Arc<Block>,
        length: usize,
    ) -> Result<Option<PendingSend>, Error> {
        if self.sender.base().needs_registration(length) {
            block.register_with(&self.mr_cache());
        }
        let request = self.send(block.lend(length))?;
        Ok(request.map(|request| PendingSend { request, block: Some(Arc::clone(block)) }))
    }
}

impl PendingRecv {
    /// The block and the length of the message once it is received. `None` before that, and after
    /// it was returned. Polls with [`Request::test`] if `progress`, else with [`Request::peek`].
    ///
    /// # Errors
    /// The connection's failure.
    pub fn poll(&mut self, progress: bool) -> Result<Option<(Block, usize)>, Error> {
        let length = poll(&self.request, progress)?;
        // The length fits: a message is no longer than its buffer.
        Ok(length.and_then(|length| Some((self.block.take()?, length as usize))))
    }
}

impl Drop for PendingRecv {
    fn drop(&mut self) {
        if let Some(block) = self.block.take() {
            self.request.retain_memory(Box::new(block));
        }
    }
}

impl PendingSend {
    /// Whether the message is sent. Polls with [`Request::test`] if `progress`, else with
    /// [`Request::peek`].
    ///
    /// # Errors
    /// The connection's failure.
    pub fn poll(&mut self, progress: bool) -> Result<bool, Error> {
        let done = poll(&self.request, progress)?.is_some();
        if done {
            self.block = None;
        }
        Ok(done)
    }
}

impl Drop for PendingSend {
    fn drop(&mut self) {
        if let Some(block) = self.block.take() {
            self.request.retain_memory(Box::new(block));
        }
    }
}

fn poll(request: &Request, progress: bool) -> Result<Option<u64>, Error> {
    if progress { request.test() } else { request.peek() }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::{self, Sender};
    use std::time::Duration;

    use super::*;
    use crate::test_support::{loopback, transport, until};
    use crate::{
        Handle, MemoryTypes, Nonce, Notify, NullLog, Settings, Transport, defer_on_worker,
    };

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Notify for Count {
        fn notify(&self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Waits for a number of notifications, without polling the network.
    fn wait_for_notifications(count: &Count, least: usize) {
        until(|| (count.0.load(Ordering::SeqCst) >= least).then_some(()));
    }

    /// Both ends of a connection to a known address, and a counter of the receiver's notifications.
    fn pair(transport: &Transport) -> (SendConnection, RecvConnection, Arc<Count>) {
        let (send, recv) = pair_without_notify(transport);
        let count = Arc::new(Count::default());
        recv.notify(Arc::<Count>::clone(&count));
        (send, recv, count)
    }

    fn pair_without_notify(transport: &Transport) -> (SendConnection, RecvConnection) {
        let (any, nonce) = ("127.0.0.1:0".parse().unwrap(), Nonce([7; 16]));
        let door = Arc::new(Count::default());
        let notified: Arc<Count> = Arc::clone(&door);
        let listener = transport.listen_at(any, nonce, "", notified).unwrap();
        let address = listener.address();
        let handle = Handle { addresses: vec![address.ip()], port: address.port(), nonce };
        let call = transport.try_connect(0, &handle, "", 1).unwrap();
        wait_for_notifications(&door, 1);
        let recv = listener.poll_accept().unwrap().unwrap();
        (until(|| call.poll().unwrap()), recv)
    }

    #[test]
    fn owned_blocks_are_returned_and_completions_notified() {
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
            // The workers move it, without a poll.
            wait_for_notifications(&count, before + 1);
            let (received, bytes) = receiving.poll(false).unwrap().unwrap();
            assert_eq!(bytes, length);
            assert!(received.bytes()[..length].iter().all(|byte| *byte == length as u8));
            assert!(receiving.poll(false).unwrap().is_none(), "it was returned already");
            until(|| sending.poll(true).unwrap().then_some(()));
            assert_eq!(Arc::strong_count(&block), 1);
        }
    }

    #[test]
    fn repath_setting_overrides_the_default_per_connection() {
        for (setting, own, others) in
            [("", false, true), ("auto", false, true), ("on", false, false), ("off", true, true)]
        {
            let settings = Settings::from_lookup(|name| match name {
                "NCCL_SOCKET_IFNAME" => Some("lo".to_owned()),
                "EVENKEEL_REPATH" => Some(setting.to_owned()),
                _ => None,
            });
            let transport = Transport::new(settings.unwrap(), Arc::new(NullLog)).unwrap();
            let (send, _recv) = pair_without_notify(&transport);
            assert_eq!(send.keeps_paths(), others, "{setting:?}");
            let listener = transport.listen(0, "", MemoryTypes::HOST).unwrap();
            let call = transport.connect(0, listener.handle(), "", MemoryTypes::HOST).unwrap();
            let _recv = until(|| listener.poll_accept().unwrap());
            assert_eq!(until(|| call.poll().unwrap()).keeps_paths(), own, "{setting:?}");
        }
    }

    #[test]
    fn send_ahead_keeps_message_order() {
        for (caller_bytes, length) in [(0, 100), (0, 100_000), (u64::MAX, 3 << 20)] {
            let mut settings = loopback();
            settings.set_caller_bytes(caller_bytes);
            let transport = Transport::new(settings, Arc::new(NullLog)).unwrap();
            let (send, recv) = pair_without_notify(&transport);
            let (head, body) = (Arc::new(Block::new(32)), Arc::new(Block::new(length)));
            let receive = |room| {
                let mut receiving = recv.recv_block(Block::new(room), room).unwrap().ok().unwrap();
                until(|| receiving.poll(true).unwrap()).1
            };
            for _ in 0..40 {
                let ahead = send.send_ahead(head.lend(32)).unwrap().unwrap();
                let mut sending = send.send_block(&body, length).unwrap().unwrap();
                assert_eq!((receive(32), receive(length)), (32, length));
                until(|| sending.poll(true).unwrap().then_some(()));
                until(|| ahead.test().unwrap());
            }
        }
    }

    #[test]
    fn lost_peer_is_notified_without_polling() {
        let transport = transport();
        let (send, recv, count) = pair(&transport);
        let mut receiving = recv.recv_block(Block::new(10), 10).unwrap().ok().unwrap();
        drop(send);
        wait_for_notifications(&count, 1);
        assert!(receiving.poll(false).is_err());
    }

    #[test]
    fn abandoned_messages_keep_their_memory() {
        let transport = transport();
        let (send, recv, count) = pair(&transport);
        let receiving = recv.recv_block(Block::new(1 << 20), 1 << 20).unwrap().ok().unwrap();
        drop(receiving);
        let block = Arc::new(Block::new(1 << 20));
        let sending = send.send_block(&block, 1 << 20).unwrap().unwrap();
        drop(sending);
        // The message is still delivered.
        wait_for_notifications(&count, 1);
        drop((send, recv));
        until(|| (Arc::strong_count(&block) == 1).then_some(()));
    }

    /// Without room in the retransmit buffer, the message keeps its memory until the peer has it.
    #[test]
    fn retransmit_buffer_can_be_limited() {
        for (bound, room) in [(1 << 20, true), (999, false)] {
            let mut settings = loopback();
            settings.limit_retransmit_buffer(bound);
            let transport = Transport::new(settings, Arc::new(NullLog)).unwrap();
            let (send, recv, _) = pair(&transport);
            let block = Arc::new(Block::new(1000));
            let mut sending = send.send_block(&block, 1000).unwrap().unwrap();
            // This later one still fits.
            let mut next = send.send_block(&block, 100).unwrap().unwrap();
            until(|| next.poll(true).unwrap().then_some(()));
            assert_eq!(sending.poll(true).unwrap(), room, "{bound} bytes of the retransmit buffer");
            let mut receiving = recv.recv_block(Block::new(1000), 1000).unwrap().ok().unwrap();
            until(|| receiving.poll(true).unwrap());
            until(|| sending.poll(true).unwrap().then_some(()));
        }
    }

    /// Both ends of a connection, used on the thread that moved their bytes.
    struct There {
        both: Mutex<Option<(SendConnection, RecvConnection)>>,
        done: Sender<bool>,
    }

    impl Notify for There {
        fn notify(&self) {
            let (both, done) = (self.both.lock().unwrap().take(), self.done.clone());
            let Some((send, recv)) = both else { return };
            let here = defer_on_worker(move || {
                // No lock is held: the connection can be used and dropped.
                let posted = recv.recv_block(Block::new(8), 8).unwrap().is_ok();
                drop((send, recv));
                done.send(posted).unwrap();
            });
            assert!(here, "a calling thread has moved the bytes");
        }
    }

    #[test]
    fn deferred_work_runs_on_the_notifying_worker() {
        // Too long to be copied, so that closing the connection delivers nothing.
        const LARGE: usize = 100_000;
        assert!(!defer_on_worker(|| unreachable!("this thread is no worker")));
        let transport = transport();
        let (send, recv) = pair_without_notify(&transport);
        let _receiving = recv.recv_block(Block::new(LARGE), LARGE).unwrap().ok().unwrap();
        let (done, is_done) = mpsc::channel();
        let there = Arc::new(There { both: Mutex::default(), done });
        recv.notify(Arc::<There>::clone(&there));
        let mut both = there.both.lock().unwrap();
        let (send, _) = both.insert((send, recv));
        let _sending = send.send_block(&Arc::new(Block::new(LARGE)), LARGE).unwrap().unwrap();
        drop(both);
        assert_eq!(is_done.recv_timeout(Duration::from_secs(20)), Ok(true));
        until(|| (!transport.in_use()).then_some(()));
    }
}
