//! Other ways to send messages by several sockets, for comparison.
//!
//! They are modelled by how they share out messages, and nothing else of them: NCCL's sockets cut a
//! message into one part for each of so many sockets, in turn, but none below 64 KiB. Fast Socket's
//! (google/nccl-fastsocket) take the next 128 KiB whenever a socket has room. A message is done
//! when it is written, as its copy is in the sockets' buffers. The receiver always has buffers.

use std::collections::{BTreeMap, VecDeque};

use crate::ends::Ends;
use crate::kernel::{FlowKey, Kernel, Notice};
use crate::stream::Bytes;
use crate::tcp::TcpSettings;

/// How messages are shared out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sharing {
    /// In equal parts.
    Equal,
    /// To whoever has room.
    Pull,
}

const MIN_PART: u64 = 64 << 10;
const PULL_BYTES: u64 = 128 << 10;

/// A part of a message.
#[derive(Clone, Copy, Debug)]
struct Part {
    message: u64,
    start: u64,
    end: u64,
}

/// A connection by sockets.
#[derive(Debug)]
pub(crate) struct SocketsConnection {
    sharing: Sharing,
    sockets: Vec<Socket>,
    next_socket: usize,
    /// Parts that no socket has.
    shared: VecDeque<Part>,
    /// Bytes of messages that are not written, and that are not received.
    unwritten: BTreeMap<u64, u64>,
    unread: BTreeMap<u64, (u64, u64)>,
}

#[derive(Debug)]
struct Socket {
    key: FlowKey,
    parts: VecDeque<Part>,
}

impl SocketsConnection {
    /// A connection by so many sockets.
    pub(crate) fn open(
        kernel: &mut Kernel,
        owner: usize,
        hosts: [usize; 2],
        tcp: TcpSettings,
        count: usize,
        sharing: Sharing,
    ) -> Self {
        let open = |_| Socket { key: kernel.open(owner, hosts, tcp), parts: VecDeque::new() };
        Self {
            sharing,
            sockets: (0..count).map(open).collect(),
            next_socket: 0,
            shared: VecDeque::new(),
            unwritten: BTreeMap::new(),
            unread: BTreeMap::new(),
        }
    }

    /// Sends the next message.
    pub(crate) fn send(&mut self, kernel: &mut Kernel, bytes: u64, ends: &mut Ends) {
        let message = ends.pushed;
        self.unwritten.insert(message, bytes);
        self.unread.insert(message, (bytes, bytes));
        let count = self.sockets.len();
        let length = match self.sharing {
            Sharing::Equal => bytes.div_ceil(count as u64).max(MIN_PART),
            Sharing::Pull => PULL_BYTES,
        };
        let starts = (0..bytes).step_by(length as usize);
        for part in starts.map(|start| Part { message, start, end: bytes.min(start + length) }) {
            match self.sharing {
                Sharing::Equal => self.sockets[self.next_socket].parts.push_back(part),
                Sharing::Pull => self.shared.push_back(part),
            }
            self.next_socket = (self.next_socket + 1) % count;
        }
        (0..count).for_each(|socket| self.write(kernel, socket, ends));
    }

    /// Something happened that concerns this connection.
    pub(crate) fn handle(&mut self, kernel: &mut Kernel, notice: Notice, ends: &mut Ends) {
        match notice {
            Notice::Writable(key) => {
                if let Some(socket) = self.sockets.iter().position(|socket| socket.key == key) {
                    self.write(kernel, socket, ends);
                }
            }
            Notice::Readable(key) => self.read(kernel, key, ends),
            Notice::Connected(_) | Notice::Reply(..) | Notice::Timer(_) => {}
        }
    }

    /// Closes all sockets.
    pub(crate) fn close(&mut self, kernel: &mut Kernel) {
        self.sockets.iter().for_each(|socket| kernel.close(socket.key));
    }

    fn write(&mut self, kernel: &mut Kernel, index: usize, ends: &mut Ends) {
        let socket = &mut self.sockets[index];
        loop {
            let room = kernel.room(socket.key);
            if socket.parts.is_empty() && room > 0 {
                socket.parts.extend(self.shared.pop_front());
            }
            let Some(part) = socket.parts.front_mut() else { break };
            if room == 0 {
                kernel.set_full(socket.key);
                break;
            }
            let end = part.end.min(part.start + room);
            let Part { message, start, .. } = *part;
            kernel.write(socket.key, Bytes::Payload { message, start, end });
            part.start = end;
            if part.start == part.end {
                socket.parts.pop_front();
            }
            if let Some(left) = self.unwritten.get_mut(&message) {
                *left -= end - start;
                if *left == 0 {
                    self.unwritten.remove(&message);
                    ends.sent += 1;
                }
            }
        }
        kernel.send(socket.key);
    }

    fn read(&mut self, kernel: &mut Kernel, key: FlowKey, ends: &mut Ends) {
        let mut available = kernel.available(key);
        while available > 0 {
            let unread = &mut self.unread;
            let count = kernel.read(key, |stream| {
                let Some((message, start, end)) = stream.read_payload(available) else { return 0 };
                ends.place(message, start, end);
                if let Some((left, total)) = unread.get_mut(&message) {
                    *left -= end - start;
                    if *left == 0 {
                        ends.complete(message, *total);
                        unread.remove(&message);
                    }
                }
                end - start
            });
            if count == 0 {
                return ends.fail("a stream has fewer bytes than were received".to_owned());
            }
            available -= count;
        }
    }
}
