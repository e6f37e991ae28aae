//! Plain sockets in place of a plugin: one or several TCP connections for each connection, or MPTCP
//! ones. They are moved by [`PlainConnection::test`] alone, without threads. This is the least that
//! any plugin has to do.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use clap::Args;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use socket2::{Domain, Protocol, Socket, Type};

use crate::cli::options::local_listener;
use crate::error::Result;
use crate::output::record::Network;
use crate::plugin_host::Region;
use crate::ranks::bootstrap::World;
use crate::ranks::wait::Wait;

/// Each socket sends the length of a message, and then its part of it.
const LENGTH_BYTES: usize = 8;
/// As many as NCCL has for a connection.
const MAX_REQUESTS: usize = 32;

/// Which sockets.
#[derive(Args, Clone, Debug)]
pub(crate) struct PlainOptions {
    /// In place of a plugin: this many plain sockets for each connection, which share each message
    /// equally
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=64), value_name = "N")]
    pub(crate) plain_sockets: Option<u32>,
    /// These are MPTCP sockets
    #[arg(long, requires = "plain_sockets")]
    pub(crate) mptcp: bool,
    /// Where rank 0 listens with them [default: loopback]
    #[arg(long, requires = "plain_sockets", value_name = "ADDRESS")]
    pub(crate) listen: Option<IpAddr>,
}

impl PlainOptions {
    /// What they are, for tables.
    fn name(&self) -> String {
        let kind = if self.mptcp { "MPTCP" } else { "TCP" };
        format!("{} plain {kind} sockets for each connection", self.plain_sockets.unwrap_or(0))
    }

    /// In place of what a plugin says of itself.
    pub(crate) fn network(&self) -> Network {
        let none = String::new;
        Network {
            name: self.name(),
            version: 0,
            library: none(),
            sha256: none(),
            device: none(),
            speed_mbps: 0,
            devices: 1,
            transport: None,
        }
    }

    fn socket(&self, address: IpAddr) -> io::Result<Socket> {
        let domain = if address.is_ipv4() { Domain::IPV4 } else { Domain::IPV6 };
        let protocol = if self.mptcp { Protocol::MPTCP } else { Protocol::TCP };
        Socket::new(domain, Type::STREAM, Some(protocol))
    }

    /// Opens `count` connections from rank 1 to rank 0, on which rank `receiver` receives messages.
    ///
    /// # Errors
    /// Says which call failed.
    pub(crate) fn connect(
        &self,
        world: &mut World,
        count: usize,
        receiver: usize,
    ) -> Result<Vec<PlainConnection>> {
        let sends = world.rank() != receiver;
        let each = self.plain_sockets.unwrap_or(1) as usize;
        let limit = getrlimit(Resource::Nofile);
        // As plugins do. Without it, or beyond the hard limit, the calls below say what is missing.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
        let failed = |what: &str, error: io::Error| format!("plain sockets: {what}: {error}");
        let flows = if world.rank() == 0 {
            let ip = self.listen.map_or_else(|| Ok(local_listener()?.1.ip()), Ok::<_, String>)?;
            let listener = self.listener(ip).map_err(|error| failed("listen", error))?;
            let local = listener.local_addr().map_err(|error| failed("listen", error))?;
            world.all_gather(&local.as_socket())?;
            let mut flows: Vec<Option<TcpStream>> = (0..count * each).map(|_| None).collect();
            let mut wait = Wait::new();
            for _ in 0..flows.len() {
                let mut stream = loop {
                    match listener.accept() {
                        Ok((socket, _)) => break TcpStream::from(socket),
                        Err(error) if error.kind() == ErrorKind::WouldBlock => {
                            wait.idle(world, || "accepting plain sockets".to_owned())?;
                        }
                        Err(error) => return Err(failed("accept", error)),
                    }
                };
                let index = number(&mut stream, world.timeout())
                    .map_err(|error| failed("the first bytes", error))?;
                match flows.get_mut(index) {
                    Some(place @ None) => *place = Some(stream),
                    _ => return Err(format!("plain sockets: number {index} is unexpected")),
                }
            }
            flows.into_iter().flatten().collect::<Vec<_>>()
        } else {
            let address = world.all_gather(&None::<SocketAddr>)?.swap_remove(0);
            let address = address.ok_or("plain sockets: rank 0 has no address")?;
            let mut flows = vec![];
            for index in 0..count * each {
                let stream = self.dial(address, index, world.timeout());
                flows.push(stream.map_err(|error| failed("connect", error))?);
            }
            flows
        };
        let mut flows = flows.into_iter();
        (0..count)
            .map(|_| PlainConnection::new(flows.by_ref().take(each).collect(), sends))
            .collect::<io::Result<_>>()
            .map_err(|error| failed("configure", error))
    }

    fn listener(&self, ip: IpAddr) -> io::Result<Socket> {
        let listener = self.socket(ip)?;
        listener.bind(&SocketAddr::new(ip, 0).into())?;
        listener.listen(4096)?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    }

    fn dial(&self, address: SocketAddr, index: usize, timeout: Duration) -> io::Result<TcpStream> {
        let socket = self.socket(address.ip())?;
        socket.connect_timeout(&address.into(), timeout)?;
        let mut stream = TcpStream::from(socket);
        stream.write_all(&(index as u64).to_le_bytes())?;
        Ok(stream)
    }
}

/// Which socket this is: the dialer says it first, as they may be accepted in another order.
fn number(stream: &mut TcpStream, timeout: Duration) -> io::Result<usize> {
    let mut bytes = [0; LENGTH_BYTES];
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes) as usize)
}

/// One direction of messages.
pub(crate) struct PlainConnection(Rc<RefCell<Flows>>);

struct Flows {
    sends: bool,
    all: Vec<Flow>,
    /// Messages in flight; the front is the oldest.
    messages: VecDeque<Message>,
    /// Number of the front.
    first: u64,
}

struct Message {
    region: Region,
    /// Its place in the region.
    part: Range<usize>,
    /// What is sent, or will be known to have been received.
    length: usize,
    /// Sockets that have not moved their share.
    left: usize,
}

struct Flow {
    socket: TcpStream,
    /// Number of the message that it moves.
    message: u64,
    header: [u8; LENGTH_BYTES],
    /// Bytes of header and share that are moved.
    moved: usize,
}

/// A message in flight.
pub(crate) struct PlainRequest {
    flows: Rc<RefCell<Flows>>,
    message: u64,
}

impl PlainConnection {
    fn new(sockets: Vec<TcpStream>, sends: bool) -> io::Result<Self> {
        for socket in &sockets {
            socket.set_nonblocking(true)?;
            socket.set_nodelay(true)?;
        }
        let all = sockets.into_iter().map(Flow::new).collect();
        let flows = Flows { sends, all, messages: VecDeque::new(), first: 0 };
        Ok(Self(Rc::new(RefCell::new(flows))))
    }

    /// Whether this is the side that sends.
    pub(crate) fn sends(&self) -> bool {
        self.0.borrow().sends
    }

    /// Begins to move a message from or to this part of the region; nothing if there are too many.
    pub(crate) fn post(&self, region: &Region, part: Range<usize>) -> Option<PlainRequest> {
        let mut flows = self.0.borrow_mut();
        if flows.messages.len() >= MAX_REQUESTS {
            return None;
        }
        let length = if flows.sends { part.len() } else { 0 };
        let message = flows.first + flows.messages.len() as u64;
        let left = flows.all.len();
        flows.messages.push_back(Message { region: region.clone(), part, length, left });
        Some(PlainRequest { flows: Rc::clone(&self.0), message })
    }
}

impl PlainRequest {
    /// Moves what can be moved. The length of the message, once it is done. Only the oldest one can
    /// be tested.
    ///
    /// # Errors
    /// Says which call failed.
    pub(crate) fn test(&mut self) -> Result<Option<usize>> {
        let Flows { sends, all, messages, first } = &mut *self.flows.borrow_mut();
        if self.message != *first {
            return Err("plain sockets: only the oldest request can be tested".to_owned());
        }
        let count = all.len();
        for (index, flow) in all.iter_mut().enumerate() {
            while let Some(message) = messages.get_mut((flow.message - *first) as usize) {
                let moved = match sends {
                    true => flow.send(message, (index, count)),
                    false => flow.receive(message, (index, count)),
                };
                match moved? {
                    Moved::Nothing => break,
                    Moved::Something => {}
                    Moved::All => {
                        message.left -= 1;
                        (flow.message, flow.moved) = (flow.message + 1, 0);
                    }
                }
            }
        }
        let done = messages.front().filter(|message| message.left == 0);
        let length = done.map(|message| message.length);
        if length.is_some() {
            messages.pop_front();
            *first += 1;
        }
        Ok(length)
    }
}

enum Moved {
    Nothing,
    Something,
    All,
}

impl Flow {
    fn new(socket: TcpStream) -> Self {
        Self { socket, message: 0, header: [0; LENGTH_BYTES], moved: 0 }
    }

    fn send(&mut self, message: &Message, of: (usize, usize)) -> Result<Moved> {
        let share = share(&message.part, message.length, of);
        let all = LENGTH_BYTES + share.len();
        let header = (message.length as u64).to_le_bytes();
        let rest = share.start + self.moved.saturating_sub(LENGTH_BYTES)..share.end;
        let header = &header[self.moved.min(LENGTH_BYTES)..];
        let sent = message.region.read(rest, |bytes| {
            self.socket.write_vectored(&[IoSlice::new(header), IoSlice::new(bytes)])
        })?;
        self.after(sent, all)
    }

    fn receive(&mut self, message: &mut Message, of: (usize, usize)) -> Result<Moved> {
        if self.moved < LENGTH_BYTES {
            let received = self.socket.read(&mut self.header[self.moved..]);
            let moved = self.after(received, usize::MAX)?;
            if self.moved < LENGTH_BYTES {
                return Ok(moved);
            }
            message.length = u64::from_le_bytes(self.header) as usize;
            if message.length > message.part.len() {
                return Err(format!(
                    "plain sockets: a message of {} bytes for a buffer of {}",
                    message.length,
                    message.part.len()
                ));
            }
            if share(&message.part, message.length, of).is_empty() {
                return Ok(Moved::All);
            }
        }
        let share = share(&message.part, message.length, of);
        let all = LENGTH_BYTES + share.len();
        let rest = share.start + self.moved - LENGTH_BYTES..share.end;
        let received = message
            .region
            .write(rest, |bytes| self.socket.read_vectored(&mut [IoSliceMut::new(bytes)]))?;
        self.after(received, all)
    }

    fn after(&mut self, moved: io::Result<usize>, all: usize) -> Result<Moved> {
        match moved {
            Ok(0) => Err("plain sockets: the peer closed its side".to_owned()),
            Ok(bytes) => {
                self.moved += bytes;
                Ok(if self.moved == all { Moved::All } else { Moved::Something })
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(Moved::Nothing),
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(Moved::Something),
            Err(error) => Err(format!("plain sockets: {error}")),
        }
    }
}

/// The share of a message that one of several sockets moves.
fn share(part: &Range<usize>, length: usize, (index, count): (usize, usize)) -> Range<usize> {
    let each = length.div_ceil(count);
    let at = |index: usize| part.start + (index * each).min(length);
    at(index)..at(index + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_sockets_share_a_message() {
        for length in [0, 1, 15, 16, 17, 100] {
            let shares: Vec<_> =
                (0..16).map(|index| share(&(50..200), length, (index, 16))).collect();
            assert_eq!((shares[0].start, shares[15].end), (50, 50 + length));
            assert!(shares.windows(2).all(|pair| pair[0].end == pair[1].start), "{shares:?}");
        }
    }
}
