//! Connections over real verbs, within one process: from the first RDMA port of this host to the last one.

use std::net::IpAddr;
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::{Arc, Mutex};

use crate::connection::tag_matching_tests::{self, Room};
use crate::memory::block::Block;
use crate::memory::protected::ProtectedMemory;
use crate::runtime::notify::NullNotify;
use crate::sync::lock;
use crate::test_support::{connected, meet, until};
use crate::{
    Device, ErrorKind, Handle, Listener, Log, MemoryTypes, Nonce, Receiving, RecvConnection,
    SendConnection, Sending, Settings, TaggedBuffer, Transport,
};

/// That of memory which is registered by its address.
pub(super) const PEER: MemoryTypes = MemoryTypes { peer_memory: true, dma_buffers: false };

#[derive(Default)]
pub(super) struct Lines(pub(super) Mutex<Vec<String>>);

impl Log for Lines {
    fn warn(&self, line: &str) {
        lock(&self.0).push(line.to_owned());
    }

    fn info(&self, line: &str) {
        self.warn(line);
    }
}

pub(super) fn transport_with(settings: &[(&str, &str)]) -> (Transport, Arc<Lines>) {
    let lookup = |name: &str| {
        let given = settings.iter().find(|(other, _)| *other == name);
        given.map(|(_, value)| (*value).to_owned())
    };
    let log = Arc::new(Lines::default());
    let shared: Arc<Lines> = Arc::clone(&log);
    (Transport::new(Settings::from_lookup(lookup).unwrap(), shared).unwrap(), log)
}

fn transport() -> Transport {
    transport_with(&[("EVENKEEL_TRANSPORT", "rdma")]).0
}

/// Listens at the address of a transport's last device, as a server does that waits for ever.
fn listen(transport: &Transport) -> (Listener, Handle) {
    let ip = transport.devices().last().unwrap().addresses()[0];
    let nonce = Nonce([7; 16]);
    let listener = transport.listen_at((ip, 0).into(), nonce, "", Arc::new(NullNotify)).unwrap();
    let handle = Handle { addresses: vec![ip], port: listener.address().port(), nonce };
    (listener, handle)
}

fn pair(from: &Transport, to: &Transport) -> (SendConnection, RecvConnection) {
    let (listener, handle) = listen(to);
    connected(from, &listener, &handle)
}

/// A message that tells itself and its bytes from others.
pub(super) fn message(number: usize, length: usize) -> Block {
    let mut block = Block::new(length);
    let bytes = block.bytes_mut().iter_mut().enumerate();
    bytes.for_each(|(at, byte)| *byte = (at * 7 + at / 251 + number * 31) as u8);
    block
}

/// Moves messages of these lengths, several at a time; `during` is called before each is waited for.
pub(super) fn exchange(
    (send, recv): (&SendConnection, &RecvConnection),
    lengths: &[usize],
    mut during: impl FnMut(usize),
) {
    let mut flying: std::collections::VecDeque<(usize, Receiving, Sending)> = Default::default();
    let mut finish = |flying: &mut std::collections::VecDeque<(usize, Receiving, Sending)>| {
        let Some((number, mut receiving, mut sending)) = flying.pop_front() else { return };
        during(number);
        let (block, length) = until(|| receiving.poll(true).unwrap());
        assert_eq!(length, lengths[number]);
        assert!(block.bytes()[..length] == *message(number, length).bytes(), "message {number}");
        until(|| sending.poll(true).unwrap().then_some(()));
    };
    for (number, length) in lengths.iter().enumerate() {
        let room = length + number % 3 * 1000;
        let receiving = recv.recv_block(Block::new(room), room).unwrap().ok().unwrap();
        let sending = send.send_block(&Arc::new(message(number, *length)), *length);
        flying.push_back((number, receiving, sending.unwrap().unwrap()));
        if flying.len() == 8 {
            finish(&mut flying);
        }
    }
    while !flying.is_empty() {
        finish(&mut flying);
    }
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn messages_of_all_sizes_arrive_whole_and_in_order() {
    let transport = transport();
    let (send, recv) = pair(&transport, &transport);
    let mut lengths = vec![0, 1, 8, 127, 255, 256, 257, 4095, 4096, 4097, 65_536, 524_288, 524_289];
    lengths.extend([3 << 20, 0, 5, 1 << 20, 4096, 100_000, (1 << 20) + 1]);
    exchange((&send, &recv), &lengths, |_| {});
    // The ring of small messages many times round.
    exchange((&send, &recv), &[64; 1000], |_| {});
    assert!(send.sender.base().counters.bytes() > 6 << 20);
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn small_messages_may_be_sent_before_anybody_wants_them() {
    let transport = transport();
    let (send, recv) = pair(&transport, &transport);
    let sendings: Vec<Sending> = (0..20)
        .map(|number| send.send_block(&Arc::new(message(number, 50)), 50).unwrap().unwrap())
        .collect();
    for mut sending in sendings {
        until(|| sending.poll(true).unwrap().then_some(()));
    }
    // What was reported as sent is delivered, though the sender is gone.
    drop(send);
    for number in 0..20 {
        let mut receiving = recv.recv_block(Block::new(50), 50).unwrap().ok().unwrap();
        let (block, _) = until(|| receiving.poll(true).unwrap());
        assert!(block.bytes() == message(number, 50).bytes(), "message {number}");
    }
}

fn broken_in_the_middle(break_one: impl Fn(&SendConnection, &RecvConnection, usize), lanes: &str) {
    let (transport, _) =
        transport_with(&[("EVENKEEL_TRANSPORT", "rdma"), ("EVENKEEL_QUEUE_PAIRS", lanes)]);
    let (send, recv) = pair(&transport, &transport);
    let mut lengths = vec![1 << 20; 24];
    lengths.extend([100, 3 << 20, 0, 70_000]);
    let count: usize = lanes.parse().unwrap();
    exchange((&send, &recv), &lengths, |number| {
        if number % 6 == 3 {
            break_one(&send, &recv, number / 6 % count);
        }
    });
    assert!(send.sender.base().counters.lost.get() >= 3, "{}", send.sender.base().counters);
    assert!(send.sender.base().counters.replaced.get() >= 1, "{}", send.sender.base().counters);
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn a_queue_pair_that_fails_at_the_sender_costs_no_byte() {
    broken_in_the_middle(|send, _, lane| send.sender.break_path(lane), "2");
    broken_in_the_middle(|send, _, lane| send.sender.break_path(lane), "1");
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn a_queue_pair_that_fails_at_the_receiver_costs_no_byte() {
    broken_in_the_middle(|_, recv, lane| recv.receiver.break_path(lane), "2");
    broken_in_the_middle(|_, recv, lane| recv.receiver.break_path(lane), "1");
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn memory_that_is_registered_needs_no_call_of_the_device() {
    let transport = transport();
    let (send, recv) = pair(&transport, &transport);
    let last = transport.devices().len() - 1;
    let adapter = Arc::clone(transport.devices()[last].rdma().unwrap());
    let memory = &adapter.regions;
    let mut block = Block::new(1 << 20);
    let registrar = transport.mr_cache(last).unwrap();
    let held = registrar.register(block.lend_mut(1 << 20)).unwrap().unwrap();
    let before = memory.registered.get();
    let use_ten_times = |mut block: Block| {
        for _ in 0..10 {
            let mut receiving = recv.recv_block(block, 1 << 20).unwrap().ok().unwrap();
            let mut sending = send.send_block(&Arc::new(message(1, 8)), 8).unwrap().unwrap();
            block = until(|| receiving.poll(true).unwrap()).0;
            until(|| sending.poll(true).unwrap().then_some(()));
        }
    };
    use_ten_times(block);
    assert_eq!(memory.registered.get(), before);
    assert!(memory.reused.get() >= 10);
    drop(held);
    use_ten_times(Block::new(1 << 20));
    assert_eq!(memory.registered.get(), before + 1, "once, for as long as there is the block");
    use_ten_times(Block::new(1 << 20));
    assert_eq!(memory.registered.get(), before + 2, "a registration ends with its block");
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn a_message_that_does_not_fit_is_an_error_on_both_sides() {
    let transport = transport();
    for (length, room) in [(100_000, 50_000), (100, 50), (5000, 100)] {
        let (send, recv) = pair(&transport, &transport);
        let mut receiving = recv.recv_block(Block::new(room), room).unwrap().ok().unwrap();
        let block = Arc::new(message(0, length));
        let mut sending = send.send_block(&block, length).unwrap().unwrap();
        let error = until(|| receiving.poll(true).err());
        assert!(error.to_string().contains(&format!("{length} bytes")), "{error}");
        until(|| match sending.poll(true) {
            // A small message is gone before anybody knows.
            Ok(done) => done.then_some(()),
            Err(_) => Some(()),
        });
    }
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn a_peer_that_closes_is_told_of() {
    let transport = transport();
    let (send, recv) = pair(&transport, &transport);
    let mut receiving = recv.recv_block(Block::new(10), 10).unwrap().ok().unwrap();
    drop(send);
    let error = until(|| receiving.poll(false).err());
    assert!(error.to_string().contains("the peer closed the connection"), "{error}");
    let (send, recv) = pair(&transport, &transport);
    let mut sending = send.send_block(&Arc::new(message(0, 1 << 20)), 1 << 20).unwrap().unwrap();
    drop(recv);
    let error = until(|| sending.poll(false).err());
    let device = transport.devices()[0].name().to_owned();
    assert!(error.to_string().contains(&device), "{error}");
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn who_listens_at_all_addresses_uses_the_port_of_the_one_that_was_called() {
    let transport = transport();
    let deaf = || Arc::new(NullNotify);
    let listener = transport.listen_at(([0; 8], 0).into(), Nonce([7; 16]), "", deaf()).unwrap();
    let port = listener.address().port();
    for (index, device) in transport.devices().iter().enumerate() {
        let handle = Handle { addresses: device.addresses(), port, nonce: Nonce([7; 16]) };
        let call = transport.connect(0, &handle, "", MemoryTypes::HOST).unwrap();
        let send = until(|| call.poll().unwrap());
        let recv = until(|| listener.poll_accept().unwrap());
        assert_eq!(transport.device_of(&recv), index);
        exchange((&send, &recv), &[100, 100_000], |_| {});
    }
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn small_messages_are_done_at_once_and_arrive_though_the_sender_has_left() {
    let transport = transport();
    let (send, recv) = pair(&transport, &transport);
    for number in 0..5 {
        let mut sending = send.send_block(&Arc::new(message(number, 4096)), 4096).unwrap().unwrap();
        assert!(sending.poll(false).unwrap(), "message {number}");
    }
    // The last of them have yet to arrive.
    drop(send);
    for number in 0..5 {
        let mut receiving = recv.recv_block(Block::new(4096), 4096).unwrap().ok().unwrap();
        let (block, _) = until(|| receiving.poll(true).unwrap());
        assert!(block.bytes() == message(number, 4096).bytes(), "message {number}");
    }
    let error = until(|| recv.recv_block(Block::new(10), 10).err());
    assert!(error.to_string().contains("the peer closed the connection"), "{error}");
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn peers_of_which_one_has_no_rdma_use_tcp_or_say_why_not() {
    // The same addresses, by TCP.
    let (any, _) = transport_with(&[("EVENKEEL_TRANSPORT", "tcp")]);
    let tcp = |at: &dyn Fn(&[Device]) -> IpAddr| {
        let address = at(transport().devices());
        let is = |device: &&Device| device.addresses()[0] == address;
        let name = any.devices().iter().find(is).unwrap().name();
        transport_with(&[("EVENKEEL_TRANSPORT", "tcp"), ("NCCL_SOCKET_IFNAME", name)]).0
    };
    let first = || tcp(&|devices| devices[0].addresses()[0]);
    let last = || tcp(&|devices| devices.last().unwrap().addresses()[0]);
    let auto = || transport_with(&[("EVENKEEL_TRANSPORT", "auto")]).0;
    for (from, to, lanes) in [(auto(), last(), 0), (first(), auto(), 0), (auto(), auto(), 2)] {
        let (send, recv) = pair(&from, &to);
        exchange((&send, &recv), &[0, 100, 1 << 20], |_| {});
        assert_eq!(send.sender.queue_pairs(), lanes);
    }
    for (from, to) in [(transport(), last()), (first(), transport())] {
        let (_listener, handle) = listen(&to);
        let call = from.connect(0, &handle, "", MemoryTypes::HOST).unwrap();
        let error = until(|| call.poll().err());
        assert!(error.to_string().contains("EVENKEEL_TRANSPORT"), "{error}");
    }
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn peers_with_different_job_keys_do_not_meet() {
    let with = |key: &str| {
        let key = key.repeat(32);
        transport_with(&[("EVENKEEL_TRANSPORT", "rdma"), ("EVENKEEL_JOB_KEY", &key)]).0
    };
    let (send, recv) = pair(&with("c0"), &with("c0"));
    exchange((&send, &recv), &[100, 100_000], |_| {});
    let (_listener, handle) = listen(&with("c1"));
    let call = with("c0").connect(0, &handle, "", MemoryTypes::HOST).unwrap();
    let error = until(|| call.poll().err());
    assert!(error.to_string().contains("job key"), "{error}");
}

/// For all others in the machine, too: it has one of its own.
#[test]
#[ignore = "runs in the RDMA lab"]
fn a_port_that_is_gone_is_named_after_the_time_set() {
    let times = [("EVENKEEL_PEER_TIMEOUT", "1"), ("EVENKEEL_RECOVERY_TIMEOUT", "2")];
    let settings = [&[("EVENKEEL_TRANSPORT", "rdma")][..], &times].concat();
    let (transport, log) = transport_with(&settings);
    let (send, recv) = pair(&transport, &transport);
    exchange((&send, &recv), &[1 << 20], |_| {});
    let link = |state| {
        let status = Command::new("ip").args(["link", "set", "eth1", state]).status().unwrap();
        assert!(status.success());
    };
    link("down");
    let mut receiving = recv.recv_block(Block::new(4 << 20), 4 << 20).unwrap().ok().unwrap();
    let mut sending = send.send_block(&Arc::new(message(0, 4 << 20)), 4 << 20).unwrap().unwrap();
    let received = until(|| receiving.poll(true).err()).to_string();
    let sent = until(|| sending.poll(true).err()).to_string();
    link("up");
    let said = lock(&log.0).join("\n");
    for (error, own, peer) in [(sent, "rxe0:1", "10.77.0.2"), (received, "rxe1:1", "10.77.0.1")] {
        let gid = format!("the peer's ::ffff:{peer}");
        assert!(error.contains(&gid) && error.contains(own), "{error}\n{said}");
    }
    assert!(said.contains("RDMA port rxe1:1 is down"), "{said}");
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn groups_wait_for_all_of_their_messages() {
    let transport = transport();
    tag_matching_tests::a_group_waits_for_all_of_its_messages(pair(&transport, &transport));
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn early_messages_stand_in_nobodys_way() {
    let transport = transport();
    tag_matching_tests::messages_that_nobody_waits_for_stand_in_nobodys_way(|| {
        pair(&transport, &transport)
    });
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn too_long_messages_fail_their_group() {
    let transport = transport();
    tag_matching_tests::a_message_that_is_too_long_fails_its_group(|| pair(&transport, &transport));
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn any_groups_get_the_messages_of_their_tags() {
    let transport = transport();
    for seed in 0..6 {
        let pair = pair(&transport, &transport);
        tag_matching_tests::random_groups::<Block>(pair, seed, 1 + seed % 5 * 2, |_, _, _| {});
    }
}

/// Now and then breaks a queue pair of either side.
fn break_lanes(send: &SendConnection, recv: &RecvConnection, done: usize) {
    match done % 12 {
        3 => send.sender.break_path(done / 12 % 2),
        9 => recv.receiver.break_path(done / 12 % 2),
        _ => {}
    }
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn queue_pairs_that_fail_cost_no_message_of_any_tag() {
    let transport = transport();
    for seed in 0..2 {
        let pair = pair(&transport, &transport);
        tag_matching_tests::random_groups::<Block>(pair, 100 + seed, 3, break_lanes);
    }
}

/// Both ends of a connection for messages in memory of such a reach, at either side.
fn pair_for(
    transport: &Transport,
    from: MemoryTypes,
    to: MemoryTypes,
) -> (SendConnection, RecvConnection) {
    let listener = transport.listen(transport.devices().len() - 1, "", to).unwrap();
    let call = transport.connect(0, listener.handle(), "", from).unwrap();
    meet(&call, &listener)
}

/// Sends a message, makes it visible and compares its bytes and those behind it. Memory is lent as long as anybody but a
/// device may touch it.
pub(super) fn carry<From: Room, To: Room>(
    (send, recv): (&SendConnection, &RecvConnection),
    length: usize,
) {
    let mut from = From::new(length);
    from.bytes_mut().copy_from_slice(message(length, length).bytes());
    let mut to = To::new(length + 100);
    let posted = [TaggedBuffer { buffer: to.give_mut(&recv.mr_cache(), length + 100), tag: 3 }];
    let receiving = recv.recv_group(&posted).unwrap().unwrap();
    let given = from.give(&send.mr_cache(), length);
    let sending = until(|| send.send_tagged(given, 3).unwrap());
    assert_eq!(until(|| receiving.test().unwrap()), length as u64);
    until(|| sending.test().unwrap());
    if length > 0 {
        match recv.flush(posted[0].buffer.part(0, length)) {
            Ok(flush) => assert_eq!(until(|| flush.test().unwrap()), 0),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Argument, "{error}"),
        }
    }
    to.take_back();
    assert!(to.bytes()[..length] == *message(length, length).bytes(), "{length} bytes");
    assert!(to.bytes()[length..].iter().all(|byte| *byte == 0), "behind {length} bytes");
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn no_byte_is_touched_by_the_processor_where_it_cannot_reach() {
    let transport = transport();
    let lengths = [0, 1, 8, 256, 257, 4095, 4096, 4097, 70_000, 1 << 20, (8 << 20) + 1];
    let (send, recv) = pair_for(&transport, PEER, PEER);
    lengths
        .iter()
        .for_each(|length| carry::<ProtectedMemory, ProtectedMemory>((&send, &recv), *length));
    // One side says so for both.
    let (send, recv) = pair_for(&transport, MemoryTypes::HOST, PEER);
    lengths.iter().for_each(|length| carry::<Block, ProtectedMemory>((&send, &recv), *length));
    let (send, recv) = pair_for(&transport, PEER, MemoryTypes::HOST);
    lengths.iter().for_each(|length| carry::<ProtectedMemory, Block>((&send, &recv), *length));
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn any_groups_get_the_messages_of_their_tags_where_no_processor_reaches() {
    let transport = transport();
    for seed in 0..2 {
        let pair = pair_for(&transport, PEER, PEER);
        tag_matching_tests::random_groups::<ProtectedMemory>(
            pair,
            200 + seed,
            1 + seed * 2,
            |_, _, _| {},
        );
    }
    let pair = pair_for(&transport, PEER, PEER);
    tag_matching_tests::random_groups::<ProtectedMemory>(pair, 300, 3, break_lanes);
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn flushes_are_bounded_and_for_what_is_not_the_hosts_memory() {
    let transport = transport();
    let (_send, recv) = pair_for(&transport, PEER, PEER);
    let mut memory = ProtectedMemory::new(5000);
    let lent = memory.give_mut(&recv.mr_cache(), 5000);
    let mut flushes = Vec::new();
    for length in (1..5000).step_by(500) {
        flushes.push(recv.flush(lent.part(0, length)).unwrap());
    }
    // Nobody looks at those before the last one.
    until(|| flushes.last().unwrap().test().unwrap());
    flushes.iter().for_each(|flush| assert_eq!(flush.test().unwrap(), Some(0)));
    assert_eq!(recv.flush(lent.part(0, 0)).err().unwrap().kind(), ErrorKind::Argument);
    let (_send, recv) = pair_for(&transport, PEER, MemoryTypes::HOST);
    let error = recv.flush(lent).err().unwrap().to_string();
    assert!(error.contains("host memory"), "{error}");
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn memory_is_registered_as_far_as_a_connection_reaches_and_the_kernel_can() {
    let transport = transport();
    // Soft-RoCE takes no DMA buffers, and nobody lends it a GPU's memory.
    assert!(transport.devices().iter().all(|device| device.memory_types().is_host_only()));
    let none = std::fs::File::open("/dev/zero").unwrap();
    let register = |reach| {
        let (send, _recv) = pair_for(&transport, reach, MemoryTypes::HOST);
        let registered = send.mr_cache().register_dma_buffer(none.as_fd(), 0, 0, 4096);
        registered.err().unwrap()
    };
    let error = register(PEER);
    assert_eq!(error.kind(), ErrorKind::Argument);
    assert!(error.to_string().contains("peer memory, not a DMA buffer"), "{error}");
    let error = register(MemoryTypes { peer_memory: false, dma_buffers: true });
    assert_eq!(error.kind(), ErrorKind::System);
    let line = error.to_string();
    assert!(line.contains("rxe0") && line.contains("4096") && !line.contains('\n'), "{line}");
    let (send, _recv) = pair_for(&transport, MemoryTypes::HOST, MemoryTypes::HOST);
    let mut block = Block::new(8);
    let error = send.mr_cache().register_peer_memory(block.lend_mut(8)).err().unwrap();
    assert!(error.to_string().contains("rxe0:1 takes host memory, not"), "{error}");
}
