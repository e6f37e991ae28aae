//! Accepting connections, also when the process has no descriptors left.

use std::io::{self, ErrorKind as IoErrorKind};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use evenkeel_transport::keep_from_children;

/// Connections that the kernel holds until they are accepted: all ranks of a job may connect at once. The kernel lowers it to
/// `net.core.somaxconn`. When there are more, a client waits a second and longer for its next attempt.
const BACKLOG: i32 = 1 << 16;
/// How long to leave a listener alone after the process ran out of sockets.
pub(crate) const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// Makes a listener nonblocking, and lets the kernel hold as many connections for it as it can. Forked children do not have it:
/// who connects to a process that has ended is refused.
///
/// # Errors
/// Those of the system.
pub(crate) fn prepare_listener(listener: &TcpListener) -> io::Result<()> {
    keep_from_children(listener);
    // Of a socket that listens already, this changes only the limit.
    rustix::net::listen(listener, BACKLOG)?;
    listener.set_nonblocking(true)
}

/// Accepts all pending connections and makes them nonblocking. Forked children do not have them. Returns whether the process ran out
/// of sockets. The listener then stays readable, so the caller must not poll it for [`ACCEPT_RETRY_DELAY`].
pub(crate) fn accept_all(listener: &TcpListener, mut take: impl FnMut(TcpStream)) -> bool {
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                keep_from_children(&stream);
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
