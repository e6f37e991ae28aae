//! Connections whose flows are lost while they are opened.

use std::ops::Range;

use rustix::net::connect_unspec;
use socket2::Socket;

use super::*;
use crate::connection::recv::Inbound;
use crate::handshake::acceptor::AcceptorState;
use crate::handshake::dial::DialState;
use crate::handshake::listen::Listener;
use crate::memory::block::Block;
use crate::test_support::{meet, transport, until};
use crate::{MemoryTypes, RecvConnection, SendConnection};

/// Opens a connection. Every flow's hello has come, and none is answered while the listener's state
/// is locked.
fn open(then: impl FnOnce(Listener, Connecting, &[Arc<Dial>], MutexGuard<'_, AcceptorState>)) {
    // Two processes.
    let (near, far) = (transport(), transport());
    let listener = near.listen(0, "", MemoryTypes::HOST).unwrap();
    let acceptor = Arc::clone(&listener.acceptor);
    let unanswered = lock(&acceptor.state);
    let call = far.connect(0, listener.handle(), "", MemoryTypes::HOST).unwrap();
    let dials = lock(&call.attempt.state).dials.clone();
    for dial in &dials {
        until(|| lock(&dial.state).hello.map(|_| ()));
    }
    then(listener, call, &dials, unanswered);
}

fn socket_of(dial: &DialState) -> Option<&Socket> {
    dial.stream.as_ref().map(|stream| &stream.socket)
}

/// As `ss -K` does, and a host that has lost its memory.
fn reset(socket: Option<&Socket>) {
    connect_unspec(socket.unwrap()).unwrap();
}

/// A message from the sender to the receiver.
fn pass_message(send: &SendConnection, recv: &RecvConnection) {
    let mut message = Block::new(100_000);
    message.bytes_mut().fill(7);
    let message = Arc::new(message);
    let mut received = recv.recv_block(Block::new(100_000), 100_000).unwrap().ok().unwrap();
    let mut sent = send.send_block(&message, 100_000).unwrap().unwrap();
    let (arrived, _) = until(|| received.poll(true).unwrap());
    until(|| sent.poll(true).unwrap().then_some(()));
    assert_eq!(arrived.bytes(), message.bytes());
}

/// Otherwise the listener's owner accepts a connection that nobody has opened, and gives it up
/// before the peer, which dials again, gets through.
#[test]
fn flows_that_end_before_they_are_answered_make_no_connection() {
    open(|listener, call, dials, unanswered| {
        let acceptor = Arc::clone(&listener.acceptor);
        // Nothing is dialed again before all are dropped.
        let attempt = lock(&call.attempt.state);
        dials.iter().for_each(|dial| reset(socket_of(&lock(&dial.state))));
        drop(unanswered);
        until(|| {
            let all_dropped = acceptor.listening.dropped() >= dials.len() as u64;
            (all_dropped || !lock(&acceptor.state).ready.is_empty()).then_some(())
        });
        let state = lock(&acceptor.state);
        assert!(state.ready.is_empty(), "a connection all of whose flows have ended");
        assert!(state.partial.is_empty(), "a part of a connection, without a flow");
        drop(state);
        drop(attempt);
        let (send, recv) = meet(&call, &listener);
        pass_message(&send, &recv);
    });
}

/// The listener has the connection, and the peer, which does not know it yet, loses flows and dials
/// them again.
#[test]
fn connection_whose_peer_loses_flows_before_their_answers_comes_to_be() {
    // Which flows; whether the connection is accepted before; whether the listener is closed then.
    let cases: [(Range<usize>, bool, bool); 6] = [
        (0..4, true, true),
        (0..4, true, false),
        (0..4, false, false),
        (3..4, true, true),
        (0..3, true, true),
        (0..3, false, false),
    ];
    for (lost, is_accepted, is_listener_closed) in cases {
        open(|listener, call, dials, unanswered| {
            let acceptor = Arc::clone(&listener.acceptor);
            // No answer is read.
            let stopped: Vec<_> = dials.iter().map(|dial| lock(&dial.state)).collect();
            drop(unanswered);
            let flows =
                || lock(&acceptor.state).complete.live(&call.attempt.destination.connection);
            let receiver = until(flows);
            let mut recv = is_accepted.then(|| until(|| listener.poll_accept().unwrap()));
            let first = recv.as_ref().map(|recv| recv.recv_block(Block::new(1), 1).unwrap());
            let listener = (!is_listener_closed).then_some(listener);
            stopped[lost.clone()].iter().for_each(|dial| reset(socket_of(dial)));
            let left = dials.len() - lost.len();
            until(|| (Inbound::flows(&*receiver) == left).then_some(()));
            drop(stopped);
            let send = until(|| call.poll().unwrap());
            let recv = recv
                .take()
                .unwrap_or_else(|| until(|| listener.as_ref().unwrap().poll_accept().unwrap()));
            if let Some(first) = first {
                let byte = Arc::new(Block::new(1));
                let mut first = first.ok().unwrap();
                let _sent = send.send_block(&byte, 1).unwrap().unwrap();
                until(|| first.poll(true).unwrap());
            }
            pass_message(&send, &recv);
        });
    }
}

/// The peer knows the connection before its owner has accepted it, and loses all flows at once.
#[test]
fn connection_that_loses_all_flows_before_it_is_accepted_comes_to_be() {
    open(|listener, call, dials, unanswered| {
        let sockets: Vec<_> = dials
            .iter()
            .map(|dial| socket_of(&lock(&dial.state)).unwrap().try_clone().unwrap())
            .collect();
        drop(unanswered);
        let send = until(|| call.poll().unwrap());
        sockets.iter().for_each(|socket| reset(Some(socket)));
        let recv = until(|| listener.poll_accept().unwrap());
        pass_message(&send, &recv);
    });
}

/// As where two hosts have the same address on a bridge, or a host without a network has given its
/// loopback address.
#[test]
fn failure_at_an_address_of_this_host_says_so() {
    let (near, far) = (transport(), transport());
    let listener = near.listen(0, "", MemoryTypes::HOST).unwrap();
    let mut handle = listener.handle().clone();
    drop((listener, near));
    let error = |handle: &Handle| match far.connect(0, handle, "", MemoryTypes::HOST) {
        Ok(call) => until(|| call.poll().err()).to_string(),
        Err(error) => error.to_string(),
    };
    let said = error(&handle);
    let [refused, hint] = ["refused", "127.0.0.1 is an address of this host"];
    assert!(said.contains(refused) && said.contains(hint), "{said}");
    // The loopback interface leads to no other address.
    handle.addresses = vec!["192.0.2.1".parse().unwrap()];
    let said = error(&handle);
    assert!(said.contains("lo reaches this host alone"), "{said}");
}
