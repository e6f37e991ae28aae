//! A TCP proxy between the library's sender and its listener, through which a test corrupts or delays bytes.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use evenkeel_protocol::HANDLE_BYTES;

use crate::harness::{Net, Opaque};

/// Limit of what a connection may hold in the proxy, so that a delay reaches the sender.
const RECEIVE_BUFFER: usize = 256 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    ToListener,
    FromListener,
}

/// Called with the bytes of one direction of a connection before they are forwarded.
pub(crate) type Tap = Box<dyn FnMut(&mut [u8]) + Send>;

/// Forwards TCP connections to a listener until it is dropped.
pub(crate) struct Proxy {
    address: SocketAddr,
    stopped: Arc<AtomicBool>,
    accepting: Option<JoinHandle<()>>,
}

impl Proxy {
    /// `tap` makes the taps of each connection, by the connection's number.
    fn start(listener: SocketAddr, tap: impl Fn(usize, Direction) -> Tap + Send + 'static) -> Self {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        socket2::SockRef::from(&socket).set_recv_buffer_size(RECEIVE_BUFFER).unwrap();
        let address = socket.local_addr().unwrap();
        let stopped = Arc::new(AtomicBool::new(false));
        let is_stopped = Arc::clone(&stopped);
        let accepting = thread::spawn(move || {
            for (connection, near) in socket.incoming().enumerate() {
                if is_stopped.load(Ordering::Acquire) {
                    return;
                }
                let near = Arc::new(near.unwrap());
                // The listener may be closed.
                let Ok(far) = TcpStream::connect(listener).map(Arc::new) else { continue };
                forward(&near, &far, tap(connection, Direction::ToListener));
                forward(&far, &near, tap(connection, Direction::FromListener));
            }
        });
        Self { address, stopped, accepting: Some(accepting) }
    }

    /// Connects the library to itself through a proxy: the sending and the receiving comm.
    pub(crate) fn pair(
        net: &Net,
        tap: impl Fn(usize, Direction) -> Tap + Send + 'static,
    ) -> ((Opaque, Opaque), Self) {
        let (listener, mut handle) = net.listen();
        let proxy = Self::start(handle.address(), tap);
        let mut bytes = [0; HANDLE_BYTES];
        bytes.copy_from_slice(&handle.0[..HANDLE_BYTES]);
        let mut proxied = evenkeel_protocol::Handle::decode(&bytes).unwrap();
        proxied.port = proxy.address.port();
        handle.0[..HANDLE_BYTES].copy_from_slice(&proxied.encode());
        let pair = net.connect_to(listener, &mut handle);
        net.close_listen(listener);
        (pair, proxy)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::Release);
        // Wakes the accepting thread; the others end with their connections.
        let _ = TcpStream::connect(self.address);
        if let Some(accepting) = self.accepting.take() {
            let _ = accepting.join();
        }
    }
}

/// Forwards one direction of a connection in a thread of its own, until either end is closed.
fn forward(from: &Arc<TcpStream>, to: &Arc<TcpStream>, mut tap: Tap) {
    let (from, to) = (Arc::clone(from), Arc::clone(to));
    thread::spawn(move || {
        let mut buffer = [0; 1 << 14];
        while let Ok(read @ 1..) = (&*from).read(&mut buffer) {
            tap(&mut buffer[..read]);
            if (&*to).write_all(&buffer[..read]).is_err() {
                break;
            }
        }
        let _ = from.shutdown(Shutdown::Both);
        let _ = to.shutdown(Shutdown::Both);
    });
}
