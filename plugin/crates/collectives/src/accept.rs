//! Accepting connections, also when the process has no descriptors left.

use std::io::ErrorKind as IoErrorKind;
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

/// How long to leave a listener alone after the process ran out of sockets.
pub(crate) const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// Accepts all pending connections and makes them nonblocking. Returns whether the process ran out of sockets. The listener then
/// stays readable, so the caller must not poll it for [`ACCEPT_RETRY_DELAY`].
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
