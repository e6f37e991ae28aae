//! Listening, at the ports that firewalls let through, and accepting connections, also when the process has no descriptors left.

use std::io::{self, ErrorKind as IoErrorKind};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::ops::RangeInclusive;
use std::time::Duration;

use evenkeel_transport::{Settings, keep_from_children};

/// Connections that the kernel holds until they are accepted: all ranks of a job may connect at once. The kernel lowers it to
/// `net.core.somaxconn`. When there are more, a client waits a second and longer for its next attempt.
const BACKLOG: i32 = 1 << 16;
/// How long to leave a listener alone after the process ran out of sockets.
pub(crate) const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// The ports to listen at, by `EVENKEEL_PORTS`; `None`: any.
///
/// # Errors
/// Names the variable that has no valid value.
pub(crate) fn ports() -> io::Result<Option<RangeInclusive<u16>>> {
    // Without it, nothing else in the environment matters here.
    if std::env::var_os("EVENKEEL_PORTS").is_none_or(|value| value.is_empty()) {
        return Ok(None);
    }
    Ok(Settings::from_env().map_err(io::Error::other)?.ports().cloned())
}

/// A listener at the first of these ports that is free, or at any.
///
/// # Errors
/// Those of the system; also when all ports are in use.
pub(crate) fn listen(
    address: IpAddr,
    ports: Option<&RangeInclusive<u16>>,
) -> io::Result<TcpListener> {
    let Some(ports) = ports else { return TcpListener::bind((address, 0)) };
    for port in ports.clone() {
        match TcpListener::bind((address, port)) {
            Err(error) if error.kind() == IoErrorKind::AddrInUse => {}
            outcome => return outcome,
        }
    }
    let (first, last) = (ports.start(), ports.end());
    let what = format!(
        "all ports of EVENKEEL_PORTS={first}-{last} are in use: a process of the collectives needs one, and one more for messages to other hosts"
    );
    Err(io::Error::new(IoErrorKind::AddrInUse, what))
}

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

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn listener_takes_the_first_free_port_of_the_range() {
        let address = IpAddr::from(Ipv4Addr::LOCALHOST);
        // Two ports that follow each other, both free.
        let (first, ports) = loop {
            let taken = listen(address, None).unwrap();
            let port = taken.local_addr().unwrap().port();
            if port < u16::MAX && TcpListener::bind((address, port + 1)).is_ok() {
                break (taken, port..=port + 1);
            }
        };
        let second = listen(address, Some(&ports)).unwrap();
        assert_eq!(second.local_addr().unwrap().port(), *ports.end());
        let error = listen(address, Some(&ports)).unwrap_err().to_string();
        assert!(error.contains(&format!("EVENKEEL_PORTS={}-", ports.start())), "{error}");
        drop(first);
    }
}
