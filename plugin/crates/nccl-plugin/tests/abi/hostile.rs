//! Peers that get through the handshake and then say anything: no crash, no hang, no wrong byte, and no byte touched that
//! is not, or not any more, lent for a message.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use evenkeel_nccl_abi::{HANDLE_SIZE, NcclResult};
use evenkeel_protocol::{ChunkHeader, FRAME_BYTES, Frame, HELLO_BYTES, Hello, Nonce, Welcome};
use evenkeel_testkit::TestRng;

use crate::by_hand;
use crate::harness::{Handle, Net, Opaque, until};
use crate::lifecycle::run_alone;

/// Connections at a time: the end of one takes half a second of waiting.
const AT_ONCE: u64 = 32;
const BATCHES: u64 = 6;
/// What memory holds that nobody has written, or that is used for something else.
pub(crate) const UNTOUCHED: u8 = 0xee;
/// Bytes before and after each buffer that must stay as they are.
const GUARD: usize = 256;

/// What the byte of a message at this position is. Never `UNTOUCHED`.
fn content(message: u64, at: u64) -> u8 {
    (message.wrapping_mul(101).wrapping_add(at.wrapping_mul(31)).wrapping_add(at / 251) % 0xee)
        as u8
}

/// Bytes of a message; none is `UNTOUCHED`.
pub(crate) fn contents(message: u64, from: u64, to: u64) -> Vec<u8> {
    (from..to).map(|at| content(message, at)).collect()
}

/// A buffer posted for a message.
struct Posted {
    memory: Vec<u8>,
    request: Opaque,
    /// What came of it, and what the memory was then.
    outcome: Option<(Result<usize, NcclResult>, Vec<u8>)>,
}

impl Posted {
    fn test(&mut self, net: &Net, message: u64) {
        if self.outcome.is_some() {
            return;
        }
        let outcome = match net.test(self.request) {
            Ok(None) => return,
            Ok(Some(size)) => Ok(size),
            Err(error) => Err(error),
        };
        let (guard, rest) = self.memory.split_at(GUARD);
        let (buffer, behind) = rest.split_at(rest.len() - GUARD);
        assert!([guard, behind].concat().iter().all(|byte| *byte == UNTOUCHED), "a stray byte");
        let whole = outcome.unwrap_or(0);
        for (at, byte) in buffer.iter().enumerate() {
            let right = *byte == content(message, at as u64);
            let partly = outcome.is_err() && *byte == UNTOUCHED;
            let behind = outcome.is_ok() && at >= whole;
            assert!(if behind { *byte == UNTOUCHED } else { right || partly }, "wrong byte {at}");
        }
        self.outcome = Some((outcome, self.memory.clone()));
    }
}

/// Length of a message.
fn total(message: u64) -> u64 {
    [1000, 0, 4096, 129, 60_000, 100, 2000, 1][message as usize % 8]
}

/// One thing that a hostile sender does on a flow. Whatever is a chunk brings the right bytes for what it says, so that
/// wrong ones can only come from the receiver. Once in `wild` times it is something that ends the connection.
fn misbehave(rng: &mut TestRng, wild: u64, posted: usize, flow: &mut TcpStream) {
    let message = rng.below(posted as u64 + 1);
    let total = total(message);
    let is_wild = rng.one_in(wild);
    let chunk = |message, offset: u64, end: u64| {
        let length = (end - offset) as u32;
        Frame::Chunk(ChunkHeader { message, offset, length, total, ack_wanted: message % 2 == 0 })
    };
    let frame = match rng.below(12) {
        0 if is_wild => Frame::Close,
        1 if is_wild => Frame::Ack(rng.below(10)),
        2 if is_wild => chunk(rng.next_u64(), 0, total),
        3 if rng.one_in(4) => Frame::FlowDead(rng.below(4) as u32),
        4..=7 => {
            let offset = rng.below(total / 128 + 1) * 128;
            chunk(message, offset.min(total / 128 * 128), total)
        }
        8 | 9 => {
            let blocks = total / 128;
            let from = rng.below(blocks);
            chunk(message, from * 128, ((from + 1 + rng.below(blocks - from)) * 128).min(total))
        }
        _ => chunk(message, 0, total),
    };
    let mut bytes = frame.encode();
    if is_wild {
        rng.corrupt(&mut bytes);
    }
    let mut said = bytes.to_vec();
    let mut over = false;
    match Frame::decode(&bytes) {
        Ok(Frame::Chunk(ChunkHeader { message, offset, length, .. })) if length <= 1 << 16 => {
            said.extend(contents(message, offset, offset + u64::from(length)));
        }
        // Longer than anybody wants to send; or nothing that a peer says.
        Ok(Frame::Chunk(_)) => over = true,
        Ok(_) => {}
        Err(_) => said.extend(rng.bytes(100)),
    }
    if rng.one_in(2 * wild) {
        said.truncate(rng.index(said.len()));
        over = true;
    }
    // The receiver may have ended the flow, or read no more of it; after half a frame no other can come.
    if flow.write_all(&said).is_err() || over {
        let _ = flow.shutdown(Shutdown::Write);
    }
}

#[test]
fn a_receiver_survives_a_sender_that_says_anything() {
    // A sender that lives may leave its flows full of what nobody waits for, and is given up after this time.
    run_alone("hostile::alone_receiver", &[("EVENKEEL_RECOVERY_TIMEOUT", "1")]);
}

#[test]
#[ignore = "part of another test"]
fn alone_receiver() {
    let net = Net::init(12, 0x4051).unwrap();
    let (mut done, mut failed) = (0, 0);
    for batch in 0..BATCHES {
        let mut rounds: Vec<_> = (0..AT_ONCE)
            .map(|index| {
                let mut rng = TestRng::new(batch * AT_ONCE + index);
                let (sender, recv) = by_hand::Sender::connect(&net, 1 + rng.below(3) as u16);
                for flow in &sender.0 {
                    flow.set_nonblocking(true).unwrap();
                }
                let wild = *rng.choose(&[5, 50, 500]);
                (rng, sender, recv, wild, Vec::<Posted>::new())
            })
            .collect();
        for step in 0..60 {
            for (rng, sender, recv, wild, posted) in &mut rounds {
                if posted.len() < 16 && (step == 0 || rng.one_in(3)) {
                    let size = total(posted.len() as u64) as usize;
                    let short = size.saturating_sub(1);
                    let size = if rng.one_in(10 * *wild) { short } else { size + rng.index(200) };
                    let mut memory = vec![UNTOUCHED; size + 2 * GUARD];
                    // SAFETY: the memory lives until the comm is closed.
                    let request = unsafe { net.irecv(*recv, memory[GUARD..].as_mut_ptr(), size) };
                    let Ok(Some(request)) = request else { continue };
                    posted.push(Posted { memory, request, outcome: None });
                }
                let flow = rng.index(sender.0.len());
                misbehave(rng, *wild, posted.len(), &mut sender.0[flow]);
                let index = rng.index(posted.len());
                if let Some(posted) = posted.get_mut(index) {
                    posted.test(&net, index as u64);
                }
            }
        }
        let ended = Instant::now();
        for flow in rounds.iter().flat_map(|(_, sender, ..)| &sender.0) {
            let _ = flow.shutdown(Shutdown::Write);
        }
        for (.., posted) in &mut rounds {
            for (message, posted) in posted.iter_mut().enumerate() {
                until("an outcome", || {
                    posted.test(&net, message as u64);
                    posted.outcome.as_ref().map(|_| ())
                })
                .expect("an outcome");
            }
        }
        let (elapsed, limit) = (ended.elapsed(), Duration::from_secs(10));
        assert!(elapsed < limit, "took {elapsed:?}");
        for (mut rng, mut sender, recv, wild, posted) in rounds {
            for flow in &mut sender.0 {
                misbehave(&mut rng, wild, posted.len(), flow);
            }
            net.close_recv(recv);
            for Posted { memory, outcome, .. } in posted {
                let (outcome, then) = outcome.unwrap();
                assert!(memory == then, "touched after it was reported");
                *(if outcome.is_ok() { &mut done } else { &mut failed }) += 1;
            }
        }
    }
    assert!(done > 100 && failed > 100, "{done} and {failed}");
}

/// A hand-made listener with the flows that it has welcomed.
pub(crate) struct Receiver {
    nonce: Nonce,
    listener: Option<TcpListener>,
    flows: Vec<Flow>,
    /// Bytes of messages that came.
    pub(crate) received: u64,
}

struct Flow {
    stream: TcpStream,
    welcomed: bool,
    bytes: Vec<u8>,
    /// The chunk whose bytes come next, and where they go.
    chunk: Option<(ChunkHeader, u64)>,
    ended: bool,
}

impl Receiver {
    /// Listens where the handle says.
    pub(crate) fn listen(rng: &mut TestRng) -> (Self, Handle) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let nonce = Nonce(rng.array());
        let handle = evenkeel_protocol::Handle {
            addresses: vec![address.ip()],
            port: address.port(),
            nonce,
        };
        let mut bytes = [0; HANDLE_SIZE];
        bytes[..evenkeel_protocol::HANDLE_BYTES].copy_from_slice(&handle.encode());
        let receiver = Self { nonce, listener: Some(listener), flows: Vec::new(), received: 0 };
        (receiver, Handle(bytes))
    }

    /// Waits for the library to connect.
    pub(crate) fn connected(&mut self, net: &Net, handle: &mut Handle) -> Opaque {
        let send = until("a connection", || {
            self.step();
            net.poll_connect(handle).unwrap()
        });
        send.expect("a connection")
    }

    /// Reads until the library has ended every flow.
    pub(crate) fn drain(&mut self) {
        until("the end", || {
            self.step();
            self.flows.iter().all(|flow| flow.ended).then_some(())
        })
        .expect("the end");
    }

    /// Welcomes who comes, and reads what there is.
    fn step(&mut self) {
        while let Some(Ok((stream, _))) = self.listener.as_ref().map(TcpListener::accept) {
            stream.set_nonblocking(true).unwrap();
            let (bytes, chunk) = (Vec::new(), None);
            self.flows.push(Flow { stream, welcomed: false, bytes, chunk, ended: false });
        }
        for flow in &mut self.flows {
            self.received += flow.step(self.nonce);
        }
    }

    fn welcomed(&self) -> usize {
        self.flows.iter().filter(|flow| flow.welcomed).count()
    }
}

impl Flow {
    /// Reads what there is; the bytes of messages must be right. How many they were.
    fn step(&mut self, nonce: Nonce) -> u64 {
        let mut buffer = [0; 1 << 16];
        let mut received = 0;
        while !self.ended {
            match self.stream.read(&mut buffer) {
                Ok(0) => self.ended = true,
                Ok(read) => self.bytes.extend_from_slice(&buffer[..read]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => self.ended = true,
            }
            received += self.take(nonce);
        }
        received
    }

    fn take(&mut self, nonce: Nonce) -> u64 {
        let mut received = 0;
        if !self.welcomed {
            let Some((hello, rest)) = self.bytes.split_first_chunk::<HELLO_BYTES>() else {
                return 0;
            };
            let hello = Hello::decode(hello, nonce, false, false).unwrap();
            self.bytes = rest.to_vec();
            let welcome = Welcome { connection: hello.connection, verdict: Ok(()) };
            let _ = self.stream.write_all(&welcome.encode());
            self.welcomed = true;
        }
        loop {
            if let Some((chunk, at)) = &mut self.chunk {
                let have = self.bytes.len().min((chunk.end() - *at) as usize);
                for (byte, at) in self.bytes.drain(..have).zip(*at..) {
                    assert_eq!(byte, content(chunk.message, at), "of {chunk:?} at {at}");
                }
                *at += have as u64;
                received += have as u64;
                if *at < chunk.end() {
                    return received;
                }
                self.chunk = None;
            }
            let Some((frame, rest)) = self.bytes.split_first_chunk::<FRAME_BYTES>() else {
                return received;
            };
            if let Frame::Chunk(chunk) = Frame::decode(frame).unwrap() {
                self.chunk = Some((chunk, chunk.offset));
            }
            self.bytes = rest.to_vec();
        }
    }

    /// One thing that a hostile receiver does.
    fn misbehave(&mut self, rng: &mut TestRng, sent: usize) {
        let frame = match rng.below(10) {
            0 => Frame::FlowDead(rng.below(12) as u32),
            1 if rng.one_in(4) => Frame::Ack(rng.next_u64()),
            2 if rng.one_in(20) => Frame::Close,
            3 if rng.one_in(20) => {
                let chunk =
                    ChunkHeader { message: 0, offset: 0, length: 0, total: 0, ack_wanted: true };
                Frame::Chunk(chunk)
            }
            _ => Frame::Ack(rng.below(sent as u64 + 1)),
        };
        let mut said = frame.encode().to_vec();
        match rng.below(60) {
            0 => rng.mutate(&mut said),
            1 => said = rng.bytes(100),
            2 => drop(self.stream.shutdown(Shutdown::Both)),
            3 => drop(self.stream.shutdown(Shutdown::Write)),
            _ => {}
        }
        // The sender may have ended the flow.
        let _ = self.stream.write_all(&said);
    }
}

/// A message on its way.
struct Sending {
    memory: Vec<u8>,
    request: Option<Opaque>,
}

impl Sending {
    /// Once it is done or failed, its memory is used for something else.
    fn test(&mut self, net: &Net) -> Option<bool> {
        let outcome = match net.test(self.request?) {
            Ok(None) => return None,
            Ok(Some(size)) => {
                assert_eq!(size, self.memory.len());
                true
            }
            Err(_) => false,
        };
        self.request = None;
        self.memory.fill(UNTOUCHED);
        Some(outcome)
    }
}

#[test]
fn a_sender_survives_a_receiver_that_says_anything() {
    let net = Net::init(12, 0x4052).unwrap();
    let (mut done, mut failed, mut received) = (0, 0, 0);
    let mut count = |outcome| match outcome {
        Some(true) => done += 1,
        Some(false) => failed += 1,
        None => {}
    };
    for batch in 0..BATCHES {
        let mut rounds: Vec<_> = (0..AT_ONCE)
            .map(|index| {
                let mut rng = TestRng::new(batch * AT_ONCE + index);
                let (mut receiver, mut handle) = Receiver::listen(&mut rng);
                let send = receiver.connected(&net, &mut handle);
                (rng, receiver, send, Vec::<Sending>::new())
            })
            .collect();
        for step in 0..100 {
            for (rng, receiver, send, sending) in &mut rounds {
                if sending.len() < 8 && (step == 0 || rng.one_in(5)) {
                    let size = *rng.choose(&[0, 1, 100, 1000, 30_000, 300_000]);
                    let memory = contents(sending.len() as u64, 0, size);
                    // SAFETY: the memory lives until the comm is closed, and stays as it is until the request is done.
                    let request = unsafe { net.isend(*send, memory.as_ptr(), memory.len()) };
                    let Ok(Some(request)) = request else { continue };
                    sending.push(Sending { memory, request: Some(request) });
                }
                receiver.step();
                let index = rng.index(receiver.flows.len());
                let flow = &mut receiver.flows[index];
                if flow.welcomed && rng.one_in(3) {
                    flow.misbehave(rng, sending.len());
                }
                if let Some(one) = sending.len().checked_sub(1) {
                    count(sending[rng.index(one + 1)].test(&net));
                }
            }
        }
        let ended = Instant::now();
        for (_, receiver, ..) in &mut rounds {
            receiver.listener = None;
            for flow in &receiver.flows {
                let _ = flow.stream.shutdown(Shutdown::Write);
            }
        }
        for (_, receiver, _, sending) in &mut rounds {
            until("outcomes", || {
                receiver.step();
                sending.iter_mut().for_each(|one| count(one.test(&net)));
                sending.iter().all(|one| one.request.is_none()).then_some(())
            })
            .expect("outcomes");
        }
        assert!(ended.elapsed() < Duration::from_secs(10), "took {:?}", ended.elapsed());
        for (_, mut receiver, send, mut sending) in rounds {
            net.close_send(send);
            sending.iter_mut().for_each(|one| one.memory.fill(UNTOUCHED));
            receiver.drain();
            assert!(receiver.welcomed() >= 4);
            received += receiver.received;
        }
    }
    assert!(done > 100 && failed > 20, "{done} and {failed}");
    assert!(received > 1_000_000, "{received}");
}
