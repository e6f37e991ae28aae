//! Accepting connections, also when the process has no descriptors left.

use std::io::ErrorKind as IoErrorKind;
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

/// Connections that the kernel holds until they are accepted: all ranks of a job may connect at once. The kernel lowers it to
/// `net.core.somaxconn`. When there are more, a client waits a second and longer for its next attempt.
const BACKLOG: i32 = 1 << 16;
/// How long to leave a listener alone after the process ran out of sockets.
pub(crate) const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// Makes a listener nonblocking, and lets the kernel hold as many connections for it as it can.
///
/// # Errors
/// Those of the system.
pub(crate) fn prepare_listener(listener: &TcpListener) -> std::io::Result<()> {
    // Of a socket that listens already, this changes only the limit.
    rustix::net::listen(listener, BACKLOG)?;
    listener.set_nonblocking(true)
}

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
