//! Test only: helpers for tests of connections.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::{
    Connecting, Handle, Listener, MemoryTypes, Nonce, NullLog, NullNotify, RecvConnection,
    SendConnection, Settings, Transport,
};

/// Long enough for an emulated machine. Reached only if something is broken.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Polls until there is a result.
pub(crate) fn until<T>(mut poll: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if let Some(found) = poll() {
            return found;
        }
        assert!(Instant::now() < deadline, "nothing happens");
        thread::yield_now();
    }
}

/// Default settings over the loopback interface.
pub(crate) fn loopback() -> Settings {
    let lo = |name: &str| (name == "NCCL_SOCKET_IFNAME").then(|| "lo".to_owned());
    Settings::from_lookup(lo).unwrap()
}

/// A transport over the loopback interface, without a log.
pub(crate) fn transport() -> Transport {
    Transport::new(loopback(), Arc::new(NullLog)).unwrap()
}

/// Both ends of a connection from one transport to a listener of another.
pub(crate) fn connected(
    from: &Transport,
    listener: &Listener,
    handle: &Handle,
) -> (SendConnection, RecvConnection) {
    meet(&from.connect(0, handle, "", MemoryTypes::HOST).unwrap(), listener)
}

/// Both ends of a connection that is being opened.
pub(crate) fn meet(call: &Connecting, listener: &Listener) -> (SendConnection, RecvConnection) {
    let (mut send, mut recv) = (None, None);
    until(|| {
        send = send.take().or_else(|| call.poll().unwrap());
        recv = recv.take().or_else(|| listener.poll_accept().unwrap());
        (send.is_some() && recv.is_some()).then_some(())
    });
    (send.unwrap(), recv.unwrap())
}

/// Both ends of a connection over the loopback interface.
pub(crate) fn pair() -> (SendConnection, RecvConnection) {
    let transport = transport();
    let (any, nonce) = ("127.0.0.1:0".parse().unwrap(), Nonce([7; 16]));
    let listener = transport.listen_at(any, nonce, "", Arc::new(NullNotify)).unwrap();
    let address = listener.address();
    let handle = Handle { addresses: vec![address.ip()], port: address.port(), nonce };
    connected(&transport, &listener, &handle)
}
