//! Tests of connections over real verbs, within one process: from the first RDMA port of this host
//! to the last one.

use std::net::IpAddr;
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::connection::tag_matching_tests::{self, MessageMemory};
use crate::connection::unexpected::{self, REFUSALS};
use crate::memory::block::Block;
use crate::memory::test_memory::ProtectedMemory;
use crate::runtime::notify::NullNotify;
use crate::sync::lock;
use crate::test_support::{connected, meet, until};
use crate::{
    Device, ErrorKind, Handle, Listener, Log, MemoryTypes, MrCache, MrHandle, Nonce, PendingRecv,
    PendingSend, RecvBuffer, RecvConnection, SendConnection, Settings, TaggedBuffer, Transport,
};

/// GPU memory that is registered by its address.
pub(super) const PEER_MEMORY: MemoryTypes = MemoryTypes { peer_memory: true, dma_buffers: false };

#[derive(Default)]
pub(super) struct LogLines(pub(super) Mutex<Vec<String>>);

impl Log for LogLines {
    fn warn(&self, line: &str) {
        lock(&self.0).push(line.to_owned());
    }

    fn info(&self, line: &str) {
        self.warn(line);
    }
}

pub(super) fn transport_with(settings: &[(&str, &str)]) -> (Transport, Arc<LogLines>) {
    let lookup = |name: &str| {
        let given = settings.iter().find(|(other, _)| *other == name);
        given.map(|(_, value)| (*value).to_owned())
    };
    let log = Arc::new(LogLines::default());
    let shared: Arc<LogLines> = Arc::clone(&log);
    (Transport::new(Settings::from_lookup(lookup).unwrap(), shared).unwrap(), log)
}

fn transport() -> Transport {
    transport_with(&[("EVENKEEL_TRANSPORT", "rdma")]).0
}

/// Listens at the address of a transport's last device, as a server does.
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

/// A message whose bytes depend on its number and their offset.
pub(super) fn message(number: usize, length: usize) -> Block {
    let mut block = Block::new(length);
    let bytes = block.bytes_mut().iter_mut().enumerate();
    bytes.for_each(|(at, byte)| *byte = (at * 7 + at / 251 + number * 31) as u8);
    block
}

/// Sends messages of these lengths, several at a time. `during` is called before each one is waited
/// for.
pub(super) fn exchange(
    (send, recv): (&SendConnection, &RecvConnection),
    lengths: &[usize],
    mut during: impl FnMut(usize),
) {
    let mut in_flight: std::collections::VecDeque<(usize, PendingRecv, PendingSend)> =
        Default::default();
    let mut finish =
        |in_flight: &mut std::collections::VecDeque<(usize, PendingRecv, PendingSend)>| {
            let Some((number, mut receiving, mut sending)) = in_flight.pop_front() else { return };
            during(number);
            let (block, length) = until(|| receiving.poll(true).unwrap());
            assert_eq!(length, lengths[number]);
            assert!(
                block.bytes()[..length] == *message(number, length).bytes(),
                "message {number}"
            );
            until(|| sending.poll(true).unwrap().then_some(()));
        };
    for (number, length) in lengths.iter().enumerate() {
        let room = length + number % 3 * 1000;
        let receiving = recv.recv_block(Block::new(room), room).unwrap().ok().unwrap();
        let sending = send.send_block(&Arc::new(message(number, *length)), *length);
        in_flight.push_back((number, receiving, sending.unwrap().unwrap()));
        if in_flight.len() == 8 {
            finish(&mut in_flight);
        }
    }
    while !in_flight.is_empty() {
        finish(&mut in_flight);
    }
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn messages_of_all_sizes_arrive_in_order() {
    let transport = transport();
    let (send, recv) = pair(&transport, &transport);
    let mut lengths = vec![0, 1, 8, 127, 255, 256, 257, 4095, 4096, 4097, 65_536, 524_288, 524_289];
    lengths.extend([3 << 20, 0, 5, 1 << 20, 4096, 100_000, (1 << 20) + 1]);
    exchange((&send, &recv), &lengths, |_| {});
    // The eager ring, many times round.
    exchange((&send, &recv), &[64; 1000], |_| {});
    assert!(send.sender.base().counters.bytes() > 6 << 20);
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn eager_messages_wait_in_the_ring() {
    let transport = transport();
    let (send, recv) = pair(&transport, &transport);
    let sendings: Vec<PendingSend> = (0..20)
        .map(|number| send.send_block(&Arc::new(message(number, 50)), 50).unwrap().unwrap())
        .collect();
    for mut sending in sendings {
        until(|| sending.poll(true).unwrap().then_some(()));
    }
    // Messages that were reported as sent are delivered after the sender has closed.
    drop(send);
    for number in 0..20 {
        let mut receiving = recv.recv_block(Block::new(50), 50).unwrap().ok().unwrap();
        let (block, _) = until(|| receiving.poll(true).unwrap());
        assert!(block.bytes() == message(number, 50).bytes(), "message {number}");
    }
}

/// Bytes that are pinned for devices in this process, and bytes of the devices' queues that are
/// mapped into it. A card's queues are in pinned memory of the process; soft-RoCE's are in the
/// kernel's.
fn pinned_bytes() -> [u64; 2] {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let pinned = status.lines().find_map(|line| line.strip_prefix("VmPin:")).unwrap();
    let pinned: u64 = pinned.trim().trim_end_matches(" kB").parse().unwrap();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let queues = maps.lines().filter(|line| line.contains("/dev/infiniband/uverbs"));
    let length = |line: &str| {
        let (start, end) = line.split_once(' ')?.0.split_once('-')?;
        let at = |hex| u64::from_str_radix(hex, 16).ok();
        Some(at(end)? - at(start)?)
    };
    [pinned << 10, queues.map(|line| length(line).unwrap()).sum()]
}

/// Pairs of connections that have carried messages of all kinds, and are idle. What they cost is
/// the whole process's, so tests with them run alone.
fn idle_pairs(count: usize) -> impl Iterator<Item = (SendConnection, RecvConnection)> {
    let transport = transport();
    std::iter::repeat_with(move || {
        let (send, recv) = pair(&transport, &transport);
        exchange((&send, &recv), &[8, 4096, 100_000], |_| {});
        (send, recv)
    })
    .take(count)
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn idle_pairs_pin_little_memory() {
    const COUNT: u64 = 20;
    let mut pairs = idle_pairs(1 + COUNT as usize);
    let _first = pairs.next();
    let before = pinned_bytes();
    let _pairs: Vec<_> = pairs.collect();
    let after = pinned_bytes();
    let [pinned, queues] = [0, 1].map(|at| (after[at] - before[at]) / COUNT);
    println!("each pair: {} KiB pinned, {} KiB of queues", pinned >> 10, queues >> 10);
    // Beside the queues, whose size on a card is computed elsewhere.
    assert!(pinned <= 44 << 10, "{pinned} bytes");
}

/// How often the workers of this process have slept, and the nanoseconds in which they had a
/// processor.
fn sleeps_and_busy_time() -> [u64; 2] {
    let of_task = |task: std::path::PathBuf| {
        let read = |file: &str| std::fs::read_to_string(task.join(file)).unwrap();
        let status = read("status");
        status.contains("evenkeel-io").then(|| {
            let number =
                |text: &str| -> u64 { text.split_whitespace().next().unwrap().parse().unwrap() };
            let sleeps =
                status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
            [number(sleeps.unwrap()), number(&read("schedstat"))]
        })
    };
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let of_workers = tasks.filter_map(|task| of_task(task.unwrap().path()));
    of_workers.fold([0, 0], |sum: [u64; 2], worker| [sum[0] + worker[0], sum[1] + worker[1]])
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn idle_pairs_take_no_processor_time() {
    const COUNT: usize = 200;
    const WINDOW: Duration = Duration::from_secs(4);
    let _pairs: Vec<_> = idle_pairs(COUNT).collect();
    // The last of what they have sent may still be acknowledged.
    let [wakeups, busy] = until(|| {
        let before = sleeps_and_busy_time();
        std::thread::sleep(WINDOW);
        let after = sleeps_and_busy_time();
        let [wakeups, busy] = [0, 1].map(|at| after[at] - before[at]);
        // Half a per cent of a processor, and less than one wake-up for each tick of a timer.
        (Duration::from_nanos(busy) < WINDOW / 200 && wakeups < 8).then_some([wakeups, busy])
    });
    println!("{COUNT} idle pairs in 4 s: {wakeups} wake-ups and {} us of workers", busy / 1000);
}

fn break_queue_pairs_under_load(
    break_one: impl Fn(&SendConnection, &RecvConnection, usize),
    queue_pairs: &str,
) {
    let (transport, _) =
        transport_with(&[("EVENKEEL_TRANSPORT", "rdma"), ("EVENKEEL_QUEUE_PAIRS", queue_pairs)]);
    let (send, recv) = pair(&transport, &transport);
    let mut lengths = vec![1 << 20; 24];
    lengths.extend([100, 3 << 20, 0, 70_000]);
    let count: usize = queue_pairs.parse().unwrap();
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
fn queue_pair_failure_at_the_sender_loses_no_byte() {
    break_queue_pairs_under_load(|send, _, index| send.sender.break_path(index), "2");
    break_queue_pairs_under_load(|send, _, index| send.sender.break_path(index), "1");
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn queue_pair_failure_at_the_receiver_loses_no_byte() {
    break_queue_pairs_under_load(|_, recv, index| recv.receiver.break_path(index), "2");
    break_queue_pairs_under_load(|_, recv, index| recv.receiver.break_path(index), "1");
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn mr_cache_registers_memory_once() {
    let transport = transport();
    let (send, recv) = pair(&transport, &transport);
    let last = transport.devices().len() - 1;
    let adapter = Arc::clone(&transport.devices()[last].ports()[0]);
    let memory = &adapter.regions;
    let mut block = Block::new(1 << 20);
    let mr_cache = transport.mr_cache(last).unwrap();
    let held = mr_cache.register(block.lend_mut(1 << 20)).unwrap().unwrap();
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
    assert_eq!(memory.registered.get(), before + 1, "once for the life of the block");
    use_ten_times(Block::new(1 << 20));
    assert_eq!(memory.registered.get(), before + 2, "a region ends with its block");
}

/// Neither end searches for the memory, nor registers it, with other memory registered beside it.
#[test]
#[ignore = "runs in the RDMA lab"]
fn mr_handle_of_a_message_is_used_without_a_search() {
    const COUNT: usize = 500;
    const LENGTH: usize = 8192;
    let transport = transport();
    let (send, recv) = pair(&transport, &transport);
    let (mut from, mut to) = (message(5, COUNT * LENGTH), Block::new(COUNT * LENGTH));
    let (from, to) = (from.lend_mut(COUNT * LENGTH), to.lend_mut(COUNT * LENGTH));
    let register = |cache: MrCache, memory: RecvBuffer| -> Vec<MrHandle> {
        let part = |at| cache.register(memory.part(at * LENGTH, LENGTH)).unwrap().unwrap();
        (0..COUNT).map(part).collect()
    };
    let (sent, received) = (register(send.mr_cache(), from), register(recv.mr_cache(), to));
    let searches = || {
        let ports = transport.devices().iter().map(|device| &device.ports()[0].regions);
        ports.map(|regions| (regions.reused.get(), regions.registered.get())).collect::<Vec<_>>()
    };
    let before = searches();
    // Tags that differ, so that buffers wait for their turn. A message may be shorter than its
    // memory.
    for (at, tag) in [(0, 1), (1, 2), (COUNT / 2, 1), (COUNT - 1, 3)] {
        let posted = [0, 1000].map(|shorter| TaggedBuffer {
            buffer: to.part(at * LENGTH, LENGTH - shorter),
            tag: tag + shorter as i32,
            registration: Some(&received[at]),
        });
        for posted in posted {
            let message = from.part(at * LENGTH, posted.buffer.length()).as_send();
            let receiving = recv.recv_group(&[posted]).unwrap().unwrap();
            let sending = until(|| send.send_tagged(message, posted.tag, Some(&sent[at])).unwrap());
            assert_eq!(until(|| receiving.test().unwrap()), message.length() as u64);
            until(|| sending.test().unwrap());
            assert_eq!(posted.buffer.checksum(0), message.checksum(0), "message {at}");
        }
    }
    assert_eq!(searches(), before);
    // A handle of other memory is no help, and does no harm.
    let buffer = to.part(0, LENGTH);
    let posted = [TaggedBuffer { buffer, tag: 9, registration: Some(&received[1]) }];
    let receiving = recv.recv_group(&posted).unwrap().unwrap();
    let message = from.part(0, LENGTH).as_send();
    let sending = until(|| send.send_tagged(message, 9, Some(&sent[1])).unwrap());
    until(|| receiving.test().unwrap().zip(sending.test().unwrap()));
    assert_eq!(buffer.checksum(0), message.checksum(0));
    assert_ne!(searches(), before);
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn too_long_message_fails_both_ends() {
    let transport = transport();
    for (length, room) in [(100_000, 50_000), (100, 50), (5000, 100)] {
        let (send, recv) = pair(&transport, &transport);
        let mut receiving = recv.recv_block(Block::new(room), room).unwrap().ok().unwrap();
        let block = Arc::new(message(0, length));
        let mut sending = send.send_block(&block, length).unwrap().unwrap();
        let error = until(|| receiving.poll(true).err());
        assert!(error.to_string().contains(&format!("{length} bytes")), "{error}");
        until(|| match sending.poll(true) {
            // An eager message is sent before the receiver sees its length.
            Ok(done) => done.then_some(()),
            Err(_) => Some(()),
        });
    }
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn closed_peer_fails_requests() {
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
fn wildcard_listener_uses_the_dialed_port() {
    let transport = transport();
    let (any, nonce) = (([0; 8], 0).into(), Nonce([7; 16]));
    let listener = transport.listen_at(any, nonce, "", Arc::new(NullNotify)).unwrap();
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
fn eager_messages_arrive_after_the_sender_closes() {
    let transport = transport();
    let (send, recv) = pair(&transport, &transport);
    for number in 0..4 {
        let mut sending = send.send_block(&Arc::new(message(number, 4096)), 4096).unwrap().unwrap();
        assert!(sending.poll(false).unwrap(), "message {number}");
    }
    // The last of them have yet to arrive.
    drop(send);
    for number in 0..4 {
        let mut receiving = recv.recv_block(Block::new(4096), 4096).unwrap().ok().unwrap();
        let (block, _) = until(|| receiving.poll(true).unwrap());
        assert!(block.bytes() == message(number, 4096).bytes(), "message {number}");
    }
    let error = until(|| recv.recv_block(Block::new(10), 10).err());
    assert!(error.to_string().contains("the peer closed the connection"), "{error}");
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn tcp_fallback_when_one_peer_lacks_rdma() {
    // TCP transports at the same addresses.
    let (any, _) = transport_with(&[("EVENKEEL_TRANSPORT", "tcp")]);
    let tcp = |at: &dyn Fn(&[Device]) -> IpAddr| {
        let address = at(transport().devices());
        let has_address = |device: &&Device| device.addresses()[0] == address;
        let name = any.devices().iter().find(has_address).unwrap().name();
        transport_with(&[("EVENKEEL_TRANSPORT", "tcp"), ("NCCL_SOCKET_IFNAME", name)]).0
    };
    let first = || tcp(&|devices| devices[0].addresses()[0]);
    let last = || tcp(&|devices| devices.last().unwrap().addresses()[0]);
    let auto = || transport_with(&[("EVENKEEL_TRANSPORT", "auto")]).0;
    for (from, to, queue_pairs) in [(auto(), last(), 0), (first(), auto(), 0), (auto(), auto(), 2)]
    {
        let (send, recv) = pair(&from, &to);
        exchange((&send, &recv), &[0, 100, 1 << 20], |_| {});
        assert_eq!(send.sender.queue_pairs(), queue_pairs);
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
fn different_job_keys_are_refused() {
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

#[test]
#[ignore = "runs in the RDMA lab"]
fn encryption_takes_rdma_over_a_trusted_network_only() {
    let with = |key: &str, mode: &str, network: &str| {
        let key = key.repeat(32);
        let settings = [
            ("EVENKEEL_TRANSPORT", mode),
            ("EVENKEEL_JOB_KEY", key.as_str()),
            ("EVENKEEL_ENCRYPTION", "required"),
            ("EVENKEEL_RDMA_NETWORK", network),
        ];
        transport_with(&settings)
    };
    let trusting = || with("c0", "rdma", "trusted").0;
    let (send, recv) = pair(&trusting(), &trusting());
    exchange((&send, &recv), &[100, 100_000, 1 << 20], |_| {});
    let (_listener, handle) = listen(&trusting());
    let other = with("c1", "rdma", "trusted").0;
    let call = other.connect(0, &handle, "", MemoryTypes::HOST).unwrap();
    let error = until(|| call.poll().err());
    assert!(error.to_string().contains("job key"), "{error}");
    let (_, log) = with("c0", "auto", "untrusted");
    assert!(lock(&log.0).iter().any(|line| line.contains("RDMA is not used")));
}

/// Takes the port down for the whole machine, so this test has a machine of its own.
#[test]
#[ignore = "runs in the RDMA lab"]
fn port_down_error_names_both_ports() {
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
    // On a slow machine the connection may have failed before they begin.
    let receiving = recv.recv_block(Block::new(4 << 20), 4 << 20);
    let sending = send.send_block(&Arc::new(message(0, 4 << 20)), 4 << 20);
    let received = match receiving.map(|begun| begun.ok().unwrap()) {
        Ok(mut request) => until(|| request.poll(true).err()),
        Err(error) => error,
    };
    let sent = match sending.map(Option::unwrap) {
        Ok(mut request) => until(|| request.poll(true).err()),
        Err(error) => error,
    };
    link("up");
    // The kernel reports the port by an event of its own, which may come after the connection has
    // failed.
    let logged = until(|| {
        let logged = lock(&log.0).join("\n");
        logged.contains("RDMA port rxe1:1 is down").then_some(logged)
    });
    for (error, own, peer) in [(sent, "rxe0:1", "10.77.0.2"), (received, "rxe1:1", "10.77.0.1")] {
        let error = error.to_string();
        let gid = format!("the peer's ::ffff:{peer}");
        assert!(error.contains(&gid) && error.contains(own), "{error}\n{logged}");
    }
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn grouped_receive_waits_for_all_messages() {
    let transport = transport();
    tag_matching_tests::check_group_waits_for_all_messages(pair(&transport, &transport));
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn unexpected_messages_block_no_others() {
    let transport = transport();
    tag_matching_tests::check_unexpected_messages_do_not_block(|| pair(&transport, &transport));
}

/// The memory is the whole process's, so this test runs alone.
#[test]
#[ignore = "runs in the RDMA lab"]
fn unexpected_messages_wait_for_memory() {
    const LENGTH: usize = 100_000;
    let transport = transport();
    let (send, recv) = pair(&transport, &transport);
    let (mut from, mut to) = (message(1, 4 * LENGTH), Block::new(4 * LENGTH));
    let (from, to) = (from.lend_mut(4 * LENGTH), to.lend_mut(4 * LENGTH));
    let send_part = |at: usize, tag| {
        let part = from.part(at * LENGTH, LENGTH).as_send();
        until(|| send.send_tagged(part, tag, None).unwrap())
    };
    let post_part = |at: usize, tag| {
        let buffer = to.part(at * LENGTH, LENGTH);
        recv.recv_group(&[TaggedBuffer { buffer, tag, registration: None }]).unwrap().unwrap()
    };
    let (used_up, refusals) = (unexpected::use_up(), || REFUSALS.load(Ordering::Relaxed));
    let before = refusals();
    let mut sendings: Vec<_> = (0..3).map(|at| send_part(at, 1)).collect();
    // Its message comes after those, which have no buffers yet.
    let other = post_part(3, 2);
    until(|| (refusals() > before).then_some(()));
    drop(used_up);
    sendings.push(send_part(3, 2));
    let mut receivings = vec![other];
    receivings.extend((0..3).map(|at| post_part(at, 1)));
    for receiving in receivings {
        assert_eq!(until(|| receiving.test().unwrap()), LENGTH as u64);
    }
    for sending in sendings {
        until(|| sending.test().unwrap());
    }
    assert_eq!(to.as_send().checksum(0), from.as_send().checksum(0));
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn too_long_message_fails_its_group() {
    let transport = transport();
    tag_matching_tests::check_too_long_message_fails_its_group(|| pair(&transport, &transport));
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn random_groups_match_tags() {
    let transport = transport();
    for seed in 0..6 {
        let pair = pair(&transport, &transport);
        tag_matching_tests::check_random_groups::<Block>(
            pair,
            seed,
            1 + seed % 5 * 2,
            |_, _, _| {},
        );
    }
}

/// Breaks a queue pair of either end now and then.
fn break_some_queue_pairs(send: &SendConnection, recv: &RecvConnection, done: usize) {
    match done % 12 {
        3 => send.sender.break_path(done / 12 % 2),
        9 => recv.receiver.break_path(done / 12 % 2),
        _ => {}
    }
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn queue_pair_failure_keeps_tag_matching() {
    let transport = transport();
    for seed in 0..2 {
        let pair = pair(&transport, &transport);
        tag_matching_tests::check_random_groups::<Block>(
            pair,
            100 + seed,
            3,
            break_some_queue_pairs,
        );
    }
}

/// Both ends of a connection for messages in memory of these types.
fn pair_for(
    transport: &Transport,
    from: MemoryTypes,
    to: MemoryTypes,
) -> (SendConnection, RecvConnection) {
    let listener = transport.listen(transport.devices().len() - 1, "", to).unwrap();
    let call = transport.connect(0, listener.handle(), "", from).unwrap();
    meet(&call, &listener)
}

/// Sends a message, flushes it, and compares its bytes and those behind it. While the message has
/// the memory, only devices may access it.
pub(super) fn send_and_check<From: MessageMemory, To: MessageMemory>(
    (send, recv): (&SendConnection, &RecvConnection),
    length: usize,
) {
    let mut from = From::new(length);
    from.bytes_mut().copy_from_slice(message(length, length).bytes());
    let mut to = To::new(length + 100);
    let buffer = to.give_mut(&recv.mr_cache(), length + 100);
    let posted = [TaggedBuffer { buffer, tag: 3, registration: None }];
    let receiving = recv.recv_group(&posted).unwrap().unwrap();
    let given = from.give(&send.mr_cache(), length);
    let sending = until(|| send.send_tagged(given, 3, None).unwrap());
    assert_eq!(until(|| receiving.test().unwrap()), length as u64);
    until(|| sending.test().unwrap());
    if length > 0 {
        match recv.flush(posted[0].buffer.part(0, length), None) {
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
fn gpu_memory_is_not_accessed_by_the_processor() {
    let transport = transport();
    let lengths = [0, 1, 8, 256, 257, 4095, 4096, 4097, 70_000, 1 << 20, (8 << 20) + 1];
    let (send, recv) = pair_for(&transport, PEER_MEMORY, PEER_MEMORY);
    lengths.iter().for_each(|length| {
        send_and_check::<ProtectedMemory, ProtectedMemory>((&send, &recv), *length)
    });
    // One end's memory types apply to both.
    let (send, recv) = pair_for(&transport, MemoryTypes::HOST, PEER_MEMORY);
    lengths
        .iter()
        .for_each(|length| send_and_check::<Block, ProtectedMemory>((&send, &recv), *length));
    let (send, recv) = pair_for(&transport, PEER_MEMORY, MemoryTypes::HOST);
    lengths
        .iter()
        .for_each(|length| send_and_check::<ProtectedMemory, Block>((&send, &recv), *length));
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn random_groups_match_tags_in_gpu_memory() {
    let transport = transport();
    for seed in 0..2 {
        let pair = pair_for(&transport, PEER_MEMORY, PEER_MEMORY);
        tag_matching_tests::check_random_groups::<ProtectedMemory>(
            pair,
            200 + seed,
            1 + seed * 2,
            |_, _, _| {},
        );
    }
    let pair = pair_for(&transport, PEER_MEMORY, PEER_MEMORY);
    tag_matching_tests::check_random_groups::<ProtectedMemory>(
        pair,
        300,
        3,
        break_some_queue_pairs,
    );
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn flush_is_bounded_and_for_gpu_memory_only() {
    let transport = transport();
    let (_send, recv) = pair_for(&transport, PEER_MEMORY, PEER_MEMORY);
    let mut memory = ProtectedMemory::new(5000);
    let lent = memory.give_mut(&recv.mr_cache(), 5000);
    let mut flushes = Vec::new();
    for length in (1..5000).step_by(500) {
        flushes.push(recv.flush(lent.part(0, length), None).unwrap());
    }
    // The flushes before the last one are not polled.
    until(|| flushes.last().unwrap().test().unwrap());
    flushes.iter().for_each(|flush| assert_eq!(flush.test().unwrap(), Some(0)));
    assert_eq!(recv.flush(lent.part(0, 0), None).err().unwrap().kind(), ErrorKind::Argument);
    let (_send, recv) = pair_for(&transport, PEER_MEMORY, MemoryTypes::HOST);
    let error = recv.flush(lent, None).err().unwrap().to_string();
    assert!(error.contains("host memory"), "{error}");
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn registration_follows_memory_types() {
    let transport = transport();
    // Soft-RoCE supports no DMA-BUF, and there is no GPU.
    assert!(transport.devices().iter().all(|device| device.memory_types().is_host_only()));
    let none = std::fs::File::open("/dev/zero").unwrap();
    let register = |memory_types| {
        let (send, _recv) = pair_for(&transport, memory_types, MemoryTypes::HOST);
        let registered = send.mr_cache().register_dma_buffer(none.as_fd(), 0, 0, 4096);
        registered.err().unwrap()
    };
    let error = register(PEER_MEMORY);
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
