//! Receiving while the caller polls its requests, and while it does not: caller or worker reads the flows.

use std::io::Read;

use evenkeel_protocol::{FRAME_BYTES, Frame};

use crate::harness::{Net, Opaque, pattern};
use crate::raw_peer::{Sender, single_chunk, single_chunk_with_ack};

/// An empty message is only a frame. It may be read together with the end of the previous message, when the quantum of
/// work ends there.
#[test]
fn frame_read_with_the_previous_message_is_handled() {
    let net = Net::init(12, 0xba).unwrap();
    let (mut sender, recv) = Sender::connect(&net, 2);
    let large = pattern(0, 100_000);
    sender.write(0, &[single_chunk(0, &large), single_chunk(1, &[])].concat());
    sender.write(1, &single_chunk(2, b"x"));
    sender.delivered();
    let mut received = vec![0; large.len()];
    let mut buffers = [0u8; 2];
    let pointers = [received.as_mut_ptr(), &raw mut buffers[0], &raw mut buffers[1]];
    let sizes = [received.len(), 1, 1];
    // SAFETY: the buffers outlive the connection.
    let requests: Vec<Opaque> = pointers
        .into_iter()
        .zip(sizes)
        .map(|(pointer, size)| unsafe { net.irecv(recv, pointer, size) }.unwrap().unwrap())
        .collect();
    let lengths: Vec<_> = requests.into_iter().map(|request| net.finish(request)).collect();
    assert_eq!(lengths, [Ok(large.len()), Ok(0), Ok(1)]);
    assert!(received == large);
    assert_eq!(buffers[1], b'x');
    net.close_recv(recv);
}

/// Posts a buffer of one byte, which must live as long as the connection.
fn post(net: &Net, recv: Opaque, byte: &mut u8) -> Opaque {
    // SAFETY: the caller guarantees it.
    unsafe { net.irecv(recv, byte, 1) }.unwrap().unwrap()
}

/// Sends small messages on the first flow and polls so often that the worker leaves the flow to the caller. Returns the
/// number of the next message.
fn make_the_caller_poll(net: &Net, recv: Opaque, sender: &mut Sender, byte: &mut u8) -> u64 {
    const MESSAGES: u64 = 10;
    for message in 0..MESSAGES {
        let request = post(net, recv, byte);
        for _ in 0..100 {
            assert_eq!(net.test(request), Ok(None));
        }
        sender.write(0, &single_chunk(message, b"x"));
        assert_eq!(net.finish(request), Ok(1));
    }
    MESSAGES
}

#[test]
fn messages_arrive_when_the_caller_stops_polling() {
    let net = Net::init(12, 0xbb).unwrap();
    let (mut sender, recv) = Sender::connect(&net, 1);
    let (mut byte, mut bytes) = (0, [0; 3]);
    let next = make_the_caller_poll(&net, recv, &mut sender, &mut byte);
    let requests: Vec<_> = bytes.iter_mut().map(|byte| post(&net, recv, byte)).collect();
    for message in next..next + 3 {
        sender.write(0, &single_chunk_with_ack(message, b"y", true));
        // It is acknowledged without polling.
        let mut frame = [0; FRAME_BYTES];
        while !matches!(Frame::decode(&frame), Ok(Frame::Ack(below, _)) if below == message + 1) {
            sender.0[0].read_exact(&mut frame).unwrap();
        }
    }
    for request in requests {
        assert_eq!(net.test(request), Ok(Some(1)));
    }
    assert_eq!(bytes, *b"yyy");
    net.close_recv(recv);
}

#[test]
fn polling_caller_receives_on_any_flow() {
    let net = Net::init(12, 0xbc).unwrap();
    let (mut sender, recv) = Sender::connect(&net, 2);
    let (mut byte, mut bytes) = (0, [0; 30]);
    let next = make_the_caller_poll(&net, recv, &mut sender, &mut byte);
    for (message, byte) in (next..).zip(&mut bytes) {
        let request = post(&net, recv, byte);
        sender.write(message as usize / 3 % 2, &single_chunk(message, &[message as u8]));
        assert_eq!(net.finish(request), Ok(1));
        assert_eq!(*byte, message as u8);
    }
    let large = pattern(1, 300_000);
    let mut received = vec![0; large.len()];
    // SAFETY: the buffer outlives the connection.
    let request = unsafe { net.irecv(recv, received.as_mut_ptr(), received.len()) };
    sender.write(0, &single_chunk(next + 30, &large));
    assert_eq!(net.finish(request.unwrap().unwrap()), Ok(large.len()));
    assert!(received == large);
    net.close_recv(recv);
}
