//! Taking connections as they come, also when there are no descriptors left for them.

use std::io::ErrorKind as IoErrorKind;
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

/// How long to let a listener be whose connections cannot be taken.
pub(crate) const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// Takes the connections that are waiting, none of which blocks. Whether the system gives no more sockets: the listener then stays
/// readable, and who waits for it must rest.
pub(crate) fn accept_all(listener: &TcpListener, mut take: impl FnMut(TcpStream)) -> bool {
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                if stream.set_nonblocking(true).is_ok() {
                    take(stream);
                }
            }
            Err(error) => match error.kind() {
                IoErrorKind::WouldBlock => return false,
                IoErrorKind::Interrupted | IoErrorKind::ConnectionAborted => {}
                _ => return true,
            },
        }
    }
}
