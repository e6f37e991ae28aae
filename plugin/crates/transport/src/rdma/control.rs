//! The control connection: a TCP connection on which the two ends agree on queue pairs. Its end
//! shows that the peer is gone.

use std::io;
use std::net::Shutdown;
use std::time::Duration;

use evenkeel_protocol::{ControlMessage, ReplayBuffer};
use socket2::Socket;

use crate::connection::base::would_block;
use crate::stream::Stream;

/// Maximum number of bytes that wait to be sent or acknowledged. Each message is an answer, or one
/// of a few in a connection's life.
const MAX_PENDING: usize = 64 << 10;

pub(super) struct ControlConnection {
    stream: Stream,
    received: Vec<u8>,
    unsent: Vec<u8>,
    replay: ReplayBuffer,
    /// The sockets before this one. They stay open until the peer acknowledges what it has
    /// received, since it may still choose one of them.
    previous: Vec<Stream>,
    /// Set when nothing more will be received.
    end: Option<End>,
}

struct End {
    path_failure: Option<PathFailure>,
    why: String,
}

/// Why a control connection may have ended although the peer is alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PathFailure {
    /// Nothing gets through between the two addresses.
    Unreachable,
    /// The peer's host does not know the connection. The peer is gone, or it has given up the path
    /// before this end did.
    Reset,
}

impl ControlConnection {
    /// The path is considered dead after `timeout` without an acknowledgement by TCP.
    pub(super) fn new(stream: Stream, timeout: Duration) -> Self {
        set_timeout(&stream.socket, timeout);
        Self {
            stream,
            received: Vec::new(),
            unsent: Vec::new(),
            replay: ReplayBuffer::default(),
            previous: Vec::new(),
            end: None,
        }
    }

    pub(super) fn socket(&self) -> &Socket {
        &self.stream.socket
    }

    /// Continues on another TCP connection.
    pub(super) fn replace_stream(&mut self, stream: Stream, timeout: Duration) {
        set_timeout(&stream.socket, timeout);
        // The peer sees the end of the old socket after it has received from this one.
        self.previous.push(std::mem::replace(&mut self.stream, stream));
        self.received.clear();
        self.unsent.clear();
        self.end = None;
        let ack = self.replay.ack();
        self.send(&ack);
    }

    /// Sends a message, now or when the socket has room.
    pub(super) fn send(&mut self, message: &ControlMessage) {
        let encoded = message.encode();
        if !message.is_replayed() {
            self.unsent.extend(encoded);
        } else {
            if self.previous.is_empty() {
                self.unsent.extend(&encoded);
            }
            self.replay.push(encoded);
        }
        self.flush();
    }

    /// Sends what was left. Whether the peer is gone is noticed by receiving.
    pub(super) fn flush(&mut self) {
        while !self.unsent.is_empty() || !self.stream.send.is_flushed() {
            let written = match self.unsent.is_empty() {
                true => self.stream.send.flush(&self.stream.socket).map(|()| 0),
                false => self.stream.write(&self.unsent),
            };
            match written {
                Ok(sent) => drop(self.unsent.drain(..sent)),
                Err(error) => {
                    // The kernel reports it once: the next receive would see an orderly end.
                    if let Some(failure) = path_failure(error.kind()) {
                        self.end(Some(failure), format!("the peer is lost: {error}"));
                    }
                    break;
                }
            }
        }
        let unacked: usize = self.replay.unacked().map(<[u8]>::len).sum();
        if self.unsent.len() + unacked > MAX_PENDING {
            self.end(None, "the peer does not read the control connection".to_owned());
        }
    }

    /// The next message; `None` when there is none now, or none any more.
    pub(super) fn receive(&mut self) -> Option<ControlMessage> {
        loop {
            match ControlMessage::decode(&self.received) {
                Ok(Some((message, used))) => {
                    self.received.drain(..used);
                    if let Some(message) = self.acknowledge(message) {
                        return Some(message);
                    }
                    continue;
                }
                Ok(None) => {}
                Err(error) => {
                    self.received.clear();
                    self.end(None, format!("protocol error: {error}"));
                }
            }
            if self.end.is_some() {
                return None;
            }
            let mut bytes = [0; 1024];
            match self.stream.read(&mut bytes) {
                // The peer may not have chosen this socket.
                Ok(0) if !self.previous.is_empty() => {
                    self.end(Some(PathFailure::Reset), "the peer closed the connection".to_owned());
                }
                Ok(0) => self.end(None, "the peer closed the connection".to_owned()),
                Ok(count) => self.received.extend(&bytes[..count]),
                Err(error) if would_block(&error) => return None,
                Err(error) => {
                    self.end(path_failure(error.kind()), format!("the peer is lost: {error}"));
                }
            }
        }
    }

    /// Handles an acknowledgement, and acknowledges any other message, which it returns.
    fn acknowledge(&mut self, message: ControlMessage) -> Option<ControlMessage> {
        if let ControlMessage::Ack(count) = message {
            if !self.replay.acked(count) {
                let why = format!("protocol error: the peer acknowledges {count} control messages");
                self.end(None, why);
            } else if !std::mem::take(&mut self.previous).is_empty() {
                self.replay.unacked().for_each(|message| self.unsent.extend(message));
                self.flush();
            }
            return None;
        }
        if message.is_replayed()
            && let Some(ack) = self.replay.received()
        {
            self.send(&ack);
        }
        Some(message)
    }

    fn end(&mut self, path_failure: Option<PathFailure>, why: String) {
        self.end.get_or_insert(End { path_failure, why });
    }

    /// Why nothing more will be received.
    pub(super) fn ended(&self) -> Option<&str> {
        self.end.as_ref().map(|end| end.why.as_str())
    }

    /// How the path has failed, if it ended for such a reason.
    pub(super) fn path_failure(&self) -> Option<PathFailure> {
        self.end.as_ref()?.path_failure
    }

    pub(super) fn shutdown(&self) {
        for stream in self.previous.iter().chain([&self.stream]) {
            // Fails only if the peer has closed the connection already.
            let _ = stream.socket.shutdown(Shutdown::Both);
        }
    }
}

/// Keepalive probes are not sent while data is unacknowledged, so that case needs a timeout of its
/// own.
fn set_timeout(socket: &Socket, timeout: Duration) {
    // Does not fail on a connected socket.
    let _ = socket.set_tcp_user_timeout(Some(timeout));
}

fn path_failure(kind: io::ErrorKind) -> Option<PathFailure> {
    match kind {
        io::ErrorKind::TimedOut
        | io::ErrorKind::HostUnreachable
        | io::ErrorKind::NetworkUnreachable
        | io::ErrorKind::NetworkDown => Some(PathFailure::Unreachable),
        // Somebody has written to it, or changed its bytes: it is as good as reset.
        io::ErrorKind::ConnectionReset | io::ErrorKind::InvalidData => Some(PathFailure::Reset),
        _ => None,
    }
}
