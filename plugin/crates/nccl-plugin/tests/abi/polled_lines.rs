//! Receivers that poll the posted buffers, as GPUs do with NCCL's protocols LL and LL128. They do not wait for `test`, but
//! take each line of a message as soon as its flag is right.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use evenkeel_testkit::TestRng;

use crate::checksum::corrupting_pair;
use crate::harness::{Net, Opaque, TIMEOUT, in_rdma_lab, log_lines, run_in_child_process};

/// Number of messages in flight.
const SLOTS: usize = 8;
/// Words of 8 bytes in a line of LL128.
const LINE_WORDS: usize = 16;

/// Where the flags of a message are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Protocol {
    /// Lines of 16 bytes, as `ncclLLFifoLine`: data, flag, data, flag, of 4 bytes each.
    Ll,
    /// Lines of 128 bytes, with a flag in the last 8.
    Ll128,
}

impl Protocol {
    /// Words of 8 bytes in a line.
    fn line(self) -> usize {
        if self == Self::Ll { 2 } else { LINE_WORDS }
    }

    /// The word of a message at this place. Flags are the message's number, and never zero.
    fn word(self, message: u64, at: usize) -> u64 {
        let data = (message << 32 | at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        match self {
            Self::Ll => message << 32 | data >> 32,
            Self::Ll128 if at % LINE_WORDS == LINE_WORDS - 1 => message,
            Self::Ll128 => data,
        }
    }

    /// Whether a line, as it is read now, has the flags of a message.
    fn is_there(self, line: &[u64], message: u64) -> bool {
        match self {
            Self::Ll => line.iter().all(|word| word >> 32 == message),
            Self::Ll128 => line.last() == Some(&message),
        }
    }
}

#[derive(Default)]
#[repr(C, align(128))]
struct Line([AtomicU64; LINE_WORDS]);

/// A posted buffer, which keeps the lines of earlier messages, as those of NCCL do.
struct Slot(Vec<Line>);

impl Slot {
    fn new(bytes: usize) -> Self {
        Self((0..bytes.div_ceil(size_of::<Line>())).map(|_| Line::default()).collect())
    }

    fn start(&self) -> *mut u8 {
        self.0.as_ptr().cast_mut().cast()
    }

    /// Takes a message of this many words line by line. Returns the first line that had its flags but other data than were
    /// sent.
    fn take(&self, protocol: Protocol, message: u64, words: usize) -> Result<(), String> {
        let deadline = Instant::now() + TIMEOUT;
        let all: Vec<&AtomicU64> = self.0.iter().flat_map(|line| &line.0).take(words).collect();
        for (index, places) in all.chunks(protocol.line()).enumerate() {
            let mut line = [0; LINE_WORDS];
            let line = &mut line[..places.len()];
            loop {
                // The flags first: NCCL reads a line again once it has seen its flag.
                let seen = places.last().is_some_and(|last| {
                    let flag = if protocol == Protocol::Ll { 32 } else { 0 };
                    last.load(Ordering::Acquire) >> flag == message
                });
                for (word, place) in line.iter_mut().zip(places) {
                    *word = place.load(Ordering::Relaxed);
                }
                if seen && protocol.is_there(line, message) {
                    break;
                }
                if Instant::now() > deadline {
                    return Err(format!("line {index} of message {message} did not arrive"));
                }
                thread::yield_now();
            }
            for (at, word) in (index * protocol.line()..).zip(line) {
                let sent = protocol.word(message, at);
                if *word != sent {
                    return Err(format!(
                        "{protocol:?}: word {at} of message {message}: {word:#x} instead of {sent:#x}"
                    ));
                }
            }
        }
        Ok(())
    }
}

/// Sends messages to a receiver that takes them by polling. It is asked for no request before it has all lines.
fn exchange(
    net: &Net,
    (send, recv): (Opaque, Opaque),
    protocol: Protocol,
    first: u64,
    lines: &[usize],
) {
    let slots: Vec<Slot> = lines.iter().map(|lines| Slot::new(lines * size_of::<Line>())).collect();
    for round in 0..4 {
        let numbered =
            || (first + round * lines.len() as u64..).zip(lines.iter().map(|n| n * LINE_WORDS));
        let messages: Vec<Vec<u64>> = numbered()
            .map(|(message, words)| (0..words).map(|at| protocol.word(message, at)).collect())
            .collect();
        let mut requests = Vec::new();
        for (slot, message) in slots.iter().zip(&messages) {
            let bytes = size_of_val(&message[..]);
            // SAFETY: the memory lives until the requests are finished. That of the receiver is atomic.
            let (received, sent) = unsafe {
                (
                    net.irecv(recv, slot.start(), bytes),
                    net.isend(send, message.as_ptr().cast(), bytes),
                )
            };
            requests.push((received.unwrap().unwrap(), sent.unwrap().unwrap(), bytes));
        }
        for (slot, (message, words)) in slots.iter().zip(numbered()) {
            assert_eq!(slot.take(protocol, message, words), Ok(()));
        }
        for (received, sent, bytes) in requests {
            assert_eq!((net.finish(received), net.finish(sent)), (Ok(bytes), Ok(bytes)));
        }
    }
}

/// Numbers of lines, of several messages.
///
/// Over RDMA, the device writes messages of more than 4 KiB, and not the plugin. Soft-RoCE uses the kernel's copy, which may go
/// backwards, and so store a line's end, LL128's flag, before its beginning.
fn sizes(rng: &mut TestRng, protocol: Protocol) -> Vec<usize> {
    let is_capped = in_rdma_lab() && protocol == Protocol::Ll128;
    let all = &[1, 2, 12, 15, 32, 33, 300, 1500];
    (0..SLOTS).map(|_| *rng.choose(if is_capped { &all[..5] } else { all })).collect()
}

#[test]
fn polled_lines_are_right_when_their_flags_are() {
    let net = Net::init(12, 0x11).unwrap();
    let pair = net.pair();
    let mut opened = log_lines(if in_rdma_lab() { " transport=rdma " } else { " transport=tcp " });
    opened.retain(|line| line.text.ends_with(" comm=0x11"));
    assert_eq!(opened.len(), 2, "{:?}", log_lines("comm=0x11"));
    let mut rng = TestRng::new(1);
    let mut first = 1;
    for round in 0..40 {
        let protocol = [Protocol::Ll, Protocol::Ll128][round % 2];
        exchange(&net, pair, protocol, first, &sizes(&mut rng, protocol));
        first += 4 * SLOTS as u64;
    }
    net.close_send(pair.0);
    net.close_recv(pair.1);
}

#[test]
fn polled_lines_are_right_with_checksums() {
    let checksum = [("EVENKEEL_CHECKSUM", "1")];
    run_in_child_process("polled_lines::child_corrupted", &checksum);
}

/// A changed bit is behind a right flag, or is in the flag. The receiver must see neither.
#[test]
#[ignore = "part of another test"]
fn child_corrupted() {
    let net = Net::init(12, 0x12).unwrap();
    let (pair, _proxy, flipped) = corrupting_pair(&net);
    let mut rng = TestRng::new(2);
    let mut first = 1;
    // Which connection carries how many bytes is random.
    for round in 0..100 {
        let protocol = [Protocol::Ll, Protocol::Ll128][round % 2];
        exchange(&net, pair, protocol, first, &sizes(&mut rng, protocol));
        first += 4 * SLOTS as u64;
        if flipped[0].load(Ordering::Relaxed) > 5 {
            break;
        }
    }
    assert!(flipped[0].load(Ordering::Relaxed) > 2, "{flipped:?}");
    net.close_send(pair.0);
    net.close_recv(pair.1);
}
