//! The TCP connection on which the peers of a connection agree, and by whose end they notice that the other one is gone.

use std::io::{self, Read};
use std::net::Shutdown;
use std::time::Duration;

use evenkeel_protocol::{ControlMessage, ReplayBuffer};
use socket2::Socket;

use crate::connection::base::would_block;
use crate::sys;

/// Most bytes that wait to be said or heard. Each word is an answer, or one of a few in a connection's life.
const MAX_UNHEARD: usize = 64 << 10;

pub(super) struct ControlConnection {
    socket: Socket,
    heard: Vec<u8>,
    unsaid: Vec<u8>,
    replay: ReplayBuffer,
    /// Of a lifeline whose peer has not told yet what it has heard: those before, of which it may still use one.
    before: Vec<Socket>,
    /// Why nothing more is heard.
    end: Option<End>,
}

struct End {
    cut: Option<PathFailure>,
    why: String,
}

/// What else may be the reason for a lifeline's end, if not the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PathFailure {
    /// Nothing gets through between the two addresses.
    Unreachable,
    /// The peer's host knows nothing of it: the peer is gone, or has found before this side that nothing gets through.
    Reset,
}

impl ControlConnection {
    /// Who hears nothing for the time of `patience` takes the path for dead.
    pub(super) fn new(socket: Socket, patience: Duration) -> Self {
        limit(&socket, patience);
        Self {
            socket,
            heard: Vec::new(),
            unsaid: Vec::new(),
            replay: ReplayBuffer::default(),
            before: Vec::new(),
            end: None,
        }
    }

    pub(super) fn socket(&self) -> &Socket {
        &self.socket
    }

    /// Goes on with another TCP connection.
    pub(super) fn resume(&mut self, socket: Socket, patience: Duration) {
        limit(&socket, patience);
        // The peer hears of the old one's end after it has heard of this one.
        self.before.push(std::mem::replace(&mut self.socket, socket));
        self.heard.clear();
        self.unsaid.clear();
        self.end = None;
        let heard = self.replay.ack();
        self.say(&heard);
    }

    /// Says a word, now or as soon as the socket takes it.
    pub(super) fn say(&mut self, word: &ControlMessage) {
        let encoded = word.encode();
        if !word.is_replayed() {
            self.unsaid.extend(encoded);
        } else {
            if self.before.is_empty() {
                self.unsaid.extend(&encoded);
            }
            self.replay.push(encoded);
        }
        self.flush();
    }

    /// Goes on with what is to be said. That the peer is gone is noticed by hearing.
    pub(super) fn flush(&mut self) {
        while !self.unsaid.is_empty() {
            match self.socket.send_with_flags(&self.unsaid, libc::MSG_NOSIGNAL) {
                Ok(said) => drop(self.unsaid.drain(..said)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    // Said once: who hears next would take the lifeline for one that was closed.
                    if let Some(cut) = cut(error.kind()) {
                        self.end(Some(cut), format!("the peer is lost: {error}"));
                    }
                    break;
                }
            }
        }
        let unheard: usize = self.replay.unacked().map(<[u8]>::len).sum();
        if self.unsaid.len() + unheard > MAX_UNHEARD {
            self.end(None, "the peer does not listen".to_owned());
        }
    }

    /// The next word; `None` when there is none now, or none any more.
    pub(super) fn hear(&mut self) -> Option<ControlMessage> {
        loop {
            match ControlMessage::decode(&self.heard) {
                Ok(Some((word, used))) => {
                    self.heard.drain(..used);
                    if let Some(word) = self.note(word) {
                        return Some(word);
                    }
                    continue;
                }
                Ok(None) => {}
                Err(error) => {
                    self.heard.clear();
                    self.end(None, format!("protocol error: {error}"));
                }
            }
            if self.end.is_some() {
                return None;
            }
            let mut bytes = [0; 1024];
            match sys::uninterrupted(|| (&self.socket).read(&mut bytes)) {
                // The peer may never have taken it for the connection's.
                Ok(0) if !self.before.is_empty() => {
                    self.end(Some(PathFailure::Reset), "the peer closed the connection".to_owned());
                }
                Ok(0) => self.end(None, "the peer closed the connection".to_owned()),
                Ok(count) => self.heard.extend(&bytes[..count]),
                Err(error) if would_block(&error) => return None,
                Err(error) => self.end(cut(error.kind()), format!("the peer is lost: {error}")),
            }
        }
    }

    /// Sees to what is said again and what is not; any other word is for who hears.
    fn note(&mut self, word: ControlMessage) -> Option<ControlMessage> {
        if let ControlMessage::Ack(words) = word {
            if !self.replay.acked(words) {
                let why = format!("protocol error: the peer has heard {words} words");
                self.end(None, why);
            } else if !std::mem::take(&mut self.before).is_empty() {
                self.replay.unacked().for_each(|word| self.unsaid.extend(word));
                self.flush();
            }
            return None;
        }
        if word.is_replayed()
            && let Some(confirmation) = self.replay.received()
        {
            self.say(&confirmation);
        }
        Some(word)
    }

    fn end(&mut self, cut: Option<PathFailure>, why: String) {
        self.end.get_or_insert(End { cut, why });
    }

    /// Why nothing more will be heard.
    pub(super) fn ended(&self) -> Option<&str> {
        self.end.as_ref().map(|end| end.why.as_str())
    }

    /// Whether that may be so although the peer is there.
    pub(super) fn cut(&self) -> Option<PathFailure> {
        self.end.as_ref()?.cut
    }

    pub(super) fn shutdown(&self) {
        for socket in self.before.iter().chain([&self.socket]) {
            // Fails only when the peer was faster.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

/// The kernel asks who says nothing, but not who leaves what was said unanswered: for that it needs a limit of its own.
fn limit(socket: &Socket, patience: Duration) {
    // Fails on no socket that is connected.
    let _ = socket.set_tcp_user_timeout(Some(patience));
}

fn cut(kind: io::ErrorKind) -> Option<PathFailure> {
    match kind {
        io::ErrorKind::TimedOut
        | io::ErrorKind::HostUnreachable
        | io::ErrorKind::NetworkUnreachable
        | io::ErrorKind::NetworkDown => Some(PathFailure::Unreachable),
        io::ErrorKind::ConnectionReset => Some(PathFailure::Reset),
        _ => None,
    }
}
