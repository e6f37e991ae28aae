//! The TCP connection on which the peers of a connection agree, and by whose end they notice that the other one is gone.

use std::io::{self, Read};
use std::net::Shutdown;

use evenkeel_wire::Word;
use socket2::Socket;

use crate::base::not_now;
use crate::sys;

/// Most bytes that wait to be said. Each word is an answer, or one of a few in a connection's life.
const MOST_UNSAID: usize = 64 << 10;

pub(super) struct Lifeline {
    socket: Socket,
    heard: Vec<u8>,
    unsaid: Vec<u8>,
    /// Why nothing more is heard.
    ended: Option<String>,
}

impl Lifeline {
    pub(super) fn new(socket: Socket) -> Self {
        Self { socket, heard: Vec::new(), unsaid: Vec::new(), ended: None }
    }

    pub(super) fn socket(&self) -> &Socket {
        &self.socket
    }

    /// Says a word, now or as soon as the socket takes it.
    pub(super) fn say(&mut self, word: &Word) {
        self.unsaid.extend(word.encode());
        self.flush();
    }

    /// Goes on with what is to be said. That the peer is gone is noticed by hearing.
    pub(super) fn flush(&mut self) {
        while !self.unsaid.is_empty() {
            match self.socket.send_with_flags(&self.unsaid, libc::MSG_NOSIGNAL) {
                Ok(said) => drop(self.unsaid.drain(..said)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        if self.unsaid.len() > MOST_UNSAID {
            self.ended.get_or_insert_with(|| "the peer does not listen".to_owned());
        }
    }

    /// The next word; `None` when there is none now, or none any more.
    pub(super) fn hear(&mut self) -> Option<Word> {
        loop {
            match Word::decode(&self.heard) {
                Ok(Some((word, used))) => {
                    self.heard.drain(..used);
                    return Some(word);
                }
                Ok(None) => {}
                Err(error) => {
                    self.heard.clear();
                    self.ended = Some(format!("protocol error: {error}"));
                }
            }
            if self.ended.is_some() {
                return None;
            }
            let mut bytes = [0; 1024];
            match sys::uninterrupted(|| (&self.socket).read(&mut bytes)) {
                Ok(0) => self.ended = Some("the peer closed the connection".to_owned()),
                Ok(count) => self.heard.extend(&bytes[..count]),
                Err(error) if not_now(&error) => return None,
                Err(error) => self.ended = Some(format!("the peer is lost: {error}")),
            }
        }
    }

    /// Why nothing more will be heard.
    pub(super) fn ended(&self) -> Option<&str> {
        self.ended.as_deref()
    }

    pub(super) fn shutdown(&self) {
        // Fails only when the peer was faster.
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}
