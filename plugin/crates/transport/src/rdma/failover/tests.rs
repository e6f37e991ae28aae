//! Tests of failover between two pairs of ports: rxe0 and rxe1, rxe2 and rxe3. There is no route
//! from one pair to the other.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use evenkeel_protocol::{ControlMessage, Hello, WELCOME_BYTES, Welcome};

use crate::connection::tag_matching_tests;
use crate::memory::block::Block;
use crate::memory::test_memory::ProtectedMemory;
use crate::rdma::tests::{
    LogLines, PEER_MEMORY, exchange, message, send_and_check, transport_with,
};
use crate::sync::lock;
use crate::test_support::{meet, until};
use crate::{Listener, MemoryTypes, RecvConnection, SendConnection, Transport};

/// Both ends of a connection that starts on the first pair of ports.
pub(super) struct TestConnection {
    to: Transport,
    pub(super) from_log: Arc<LogLines>,
    to_log: Arc<LogLines>,
    listener: Listener,
    pub(super) send: SendConnection,
    pub(super) recv: RecvConnection,
}

impl TestConnection {
    fn new(settings: &[(&str, &str)]) -> Self {
        Self::with_memory_types(MemoryTypes::HOST, settings)
    }

    fn with_memory_types(memory_types: MemoryTypes, settings: &[(&str, &str)]) -> Self {
        Self::between(("=rxe0,rxe2", "=rxe1,rxe3"), memory_types, settings)
    }

    /// From the first of these ports to the first of those.
    fn between(
        (from, to): (&str, &str),
        memory_types: MemoryTypes,
        settings: &[(&str, &str)],
    ) -> Self {
        let with = |ports| {
            let own = [("EVENKEEL_TRANSPORT", "rdma"), ("NCCL_IB_HCA", ports)];
            transport_with(&[&own, settings].concat())
        };
        Self::open(with(from), with(to), (0, 0), memory_types)
    }

    /// From one of these devices to one of those.
    pub(super) fn open(
        (from, from_log): (Transport, Arc<LogLines>),
        (to, to_log): (Transport, Arc<LogLines>),
        (from_device, to_device): (usize, usize),
        memory_types: MemoryTypes,
    ) -> Self {
        let listener = to.listen(to_device, "", memory_types).unwrap();
        let call = from.connect(from_device, listener.handle(), "", memory_types).unwrap();
        let (send, recv) = meet(&call, &listener);
        Self { to, from_log, to_log, listener, send, recv }
    }

    pub(super) fn exchange(&self, lengths: &[usize], during: impl FnMut(usize)) {
        exchange((&self.send, &self.recv), lengths, during);
    }

    /// Number of failovers of each end.
    pub(super) fn failovers(&self) -> [u64; 2] {
        let [send, recv] = [self.send.sender.base(), self.recv.receiver.base()];
        [send.counters.recovered.get(), recv.counters.recovered.get()]
    }
}

pub(super) fn run(line: &str) {
    let status = Command::new("sh").args(["-c", line]).status().unwrap();
    assert!(status.success(), "{line}: {status}");
}

/// A pair of ports between which all packets are lost, without any notice. Ends when dropped.
pub(super) struct DeadLink(usize);

impl DeadLink {
    pub(super) fn new(link: usize) -> Self {
        Self::each(link, "replace", "netem loss 100%");
        Self(link)
    }

    fn each(link: usize, what: &str, how: &str) {
        for port in [2 * link, 2 * link + 1] {
            run(&format!("tc qdisc {what} dev eth{port} root {how}"));
        }
    }
}

impl Drop for DeadLink {
    fn drop(&mut self) {
        Self::each(self.0, "del", "");
    }
}

/// Drops packets where they are sent, as a firewall does. Ends when dropped.
struct DropRule;

impl DropRule {
    fn new(which: &str) -> Self {
        run("nft add table ip dropped");
        run("nft add chain ip dropped out '{ type filter hook output priority 0; }'");
        run(&format!("nft add rule ip dropped out {which} drop"));
        Self
    }
}

impl Drop for DropRule {
    fn drop(&mut self) {
        run("nft delete table ip dropped");
    }
}

/// A pair of ports that fails as [`DeadLink`] does, after a number of bytes. So whatever a test
/// sends beyond them is in flight when it fails. Ends when dropped.
pub(super) struct FailingLink;

impl FailingLink {
    pub(super) fn new(link: usize, bytes: usize) -> Self {
        run("nft add table ip failing");
        run("nft add chain ip failing in '{ type filter hook prerouting priority 0; }'");
        run(&format!(
            "nft add rule ip failing in ip daddr 10.77.{link}.0/24 quota over {bytes} bytes drop"
        ));
        Self
    }
}

impl Drop for FailingLink {
    fn drop(&mut self) {
        run("nft delete table ip failing");
    }
}

/// Slows a link down, so that messages of some MiB are in flight long enough for the link to fail
/// meanwhile.
fn slow(link: usize) {
    let port = 2 * link;
    run(&format!("tc qdisc replace dev eth{port} root tbf rate 100mbit burst 256kb limit 30mb"));
}

/// Short timeouts, since tests wait for them.
pub(super) const TIMEOUTS: [(&str, &str); 2] =
    [("EVENKEEL_PEER_TIMEOUT", "4"), ("EVENKEEL_RECOVERY_TIMEOUT", "30")];

/// Some of these messages are in flight when a path fails, and others wait behind them.
pub(super) fn lengths() -> Vec<usize> {
    let mut lengths = vec![1 << 20, 100];
    lengths.extend([4 << 20; 8]);
    lengths.extend([100, 3 << 20, 0, 70_000, 4096, 4097]);
    lengths
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn path_failure_under_load_loses_no_byte() {
    for queue_pairs in ["1", "2"] {
        let connection = TestConnection::new(
            &[&TIMEOUTS[..], &[("EVENKEEL_QUEUE_PAIRS", queue_pairs)]].concat(),
        );
        connection.exchange(&lengths(), |_| {});
        assert_eq!(connection.failovers(), [0, 0]);
        let failing_link = FailingLink::new(0, 8 << 20);
        connection.exchange(&lengths(), |_| {});
        assert_eq!(connection.failovers(), [1, 1], "{:?}", lock(&connection.from_log.0));
        let counters = &connection.send.sender.base().counters;
        // Parts of the long messages; their number depends on timing.
        assert!(counters.repeated.get() > 70_000, "something was in flight");
        let gids = |to, from| format!("failed over to GID ::ffff:{to} from ::ffff:{from}");
        for (log, line) in [
            (&connection.from_log, gids("10.77.1.1", "10.77.0.1")),
            (&connection.to_log, gids("10.77.1.2", "10.77.0.2")),
        ] {
            let logged = lock(&log.0).join("\n");
            assert!(logged.contains(&line), "{line}:\n{logged}");
        }
        // And back again.
        drop(failing_link);
        let _failing_link = FailingLink::new(1, 12 << 20);
        connection.exchange(&lengths(), |_| {});
        assert_eq!(connection.failovers(), [2, 2]);
    }
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn port_down_fails_over() {
    let connection = TestConnection::new(&TIMEOUTS);
    connection.exchange(&[1 << 20], |_| {});
    slow(0);
    connection.exchange(&lengths(), |number| {
        if number == 2 {
            run("ip link set eth1 down");
        }
    });
    assert_eq!(connection.failovers(), [1, 1]);
    run("tc qdisc del dev eth0 root");
    run("ip link set eth1 up && ip route replace 10.77.0.1/32 dev eth1 src 10.77.0.2 table 77");
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn tcp_fallback_when_roce_packets_are_dropped() {
    let _drop_rule = DropRule::new("udp dport 4791");
    let with = |mode, ports| {
        transport_with(&[
            ("EVENKEEL_TRANSPORT", mode),
            ("NCCL_IB_HCA", ports),
            ("EVENKEEL_CONNECT_TIMEOUT", "20"),
            ("EVENKEEL_PEER_TIMEOUT", "4"),
        ])
    };
    let ((from, log), (to, _)) = (with("auto", "=rxe0"), with("auto", "=rxe1"));
    let listener = to.listen(0, "", MemoryTypes::HOST).unwrap();
    let call = from.connect(0, listener.handle(), "", MemoryTypes::HOST).unwrap();
    let (send, recv) = meet(&call, &listener);
    assert_eq!(send.sender.queue_pairs(), 0, "TCP has none");
    exchange((&send, &recv), &lengths(), |_| {});
    let logged = lock(&log.0).join("\n");
    assert!(logged.contains("TCP carries the connection to 10.77.0.2"), "{logged}");
    let (from, _) = with("rdma", "=rxe0");
    let (to, _) = with("rdma", "=rxe1");
    let listener = to.listen(0, "", MemoryTypes::HOST).unwrap();
    let call = from.connect(0, listener.handle(), "", MemoryTypes::HOST).unwrap();
    let error = until(|| call.poll().err()).to_string();
    assert!(error.contains("10.77.0.2") && error.contains("rxe0:1"), "{error}");
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn lost_control_connection_is_replaced_under_load() {
    control_connection_is_replaced(&TIMEOUTS);
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn lost_encrypted_control_connection_is_replaced_under_load() {
    let key = "c0".repeat(32);
    let encrypted = [
        ("EVENKEEL_JOB_KEY", key.as_str()),
        ("EVENKEEL_ENCRYPTION", "required"),
        ("EVENKEEL_RDMA_NETWORK", "trusted"),
    ];
    control_connection_is_replaced(&[&TIMEOUTS[..], &encrypted].concat());
}

fn control_connection_is_replaced(settings: &[(&str, &str)]) {
    let connection = TestConnection::new(settings);
    connection.exchange(&[1 << 20], |_| {});
    let _drop_rule = DropRule::new("ip protocol tcp ip saddr 10.77.0.0/24");
    // Many messages arrive while a handshake on the other link is slow.
    DeadLink::each(1, "replace", "netem delay 50ms");
    let begin = Instant::now();
    while connection.failovers() != [1, 1] {
        connection.exchange(&[100_000, 64, 1 << 20], |_| {});
        assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", connection.failovers());
    }
    DeadLink::each(1, "del", "");
    connection.exchange(&lengths(), |_| {});
    assert_eq!(connection.failovers(), [1, 1]);
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn recovered_path_is_used_again() {
    let connection = TestConnection::new(&TIMEOUTS);
    connection.exchange(&[1 << 20], |_| {});
    let (mut first, _second) = (Some(DeadLink::new(0)), DeadLink::new(1));
    let begin = Instant::now();
    let mut receiving =
        connection.recv.recv_block(Block::new(4 << 20), 4 << 20).unwrap().ok().unwrap();
    let sent = Arc::new(message(5, 4 << 20));
    let mut sending = connection.send.send_block(&sent, 4 << 20).unwrap().unwrap();
    let (block, length) = until(|| {
        // Longer than all paths take to fail, and shorter than the recovery timeout.
        if begin.elapsed() > Duration::from_secs(8) {
            first = None;
        }
        receiving.poll(true).unwrap()
    });
    until(|| sending.poll(true).unwrap().then_some(()));
    assert!(length == 4 << 20 && block.bytes() == sent.bytes());
    assert!(begin.elapsed() > Duration::from_secs(8));
}

/// Both ends give up the path's TCP connection meanwhile, and have no other port.
#[test]
#[ignore = "runs in the RDMA lab"]
fn outage_of_the_only_path_is_outlived() {
    let connection = TestConnection::between(("=rxe0", "=rxe1"), MemoryTypes::HOST, &TIMEOUTS);
    let outage = |mut work: Box<dyn FnMut() -> bool + '_>| {
        let (mut dead_link, begin) = (Some(DeadLink::new(0)), Instant::now());
        until(|| {
            // Three times the peer timeout, and shorter than the recovery timeout.
            if begin.elapsed() > Duration::from_secs(12) {
                dead_link = None;
            }
            (work() && dead_link.is_none()).then_some(())
        });
    };
    connection.exchange(&[1 << 20], |_| {});
    let room = Block::new(4 << 20);
    let mut receiving = connection.recv.recv_block(room, 4 << 20).unwrap().ok().unwrap();
    let sent = Arc::new(message(5, 4 << 20));
    let mut sending = connection.send.send_block(&sent, 4 << 20).unwrap();
    let mut received = None;
    outage(Box::new(|| {
        received = received.take().or_else(|| receiving.poll(true).unwrap());
        if sending.as_mut().is_some_and(|sending| sending.poll(true).unwrap()) {
            sending = None;
        }
        received.is_some() && sending.is_none()
    }));
    let (block, length) = received.unwrap();
    assert!(length == 4 << 20 && block.bytes() == sent.bytes());
    connection.exchange(&lengths(), |_| {});
    // Without anything to send.
    outage(Box::new(|| true));
    connection.exchange(&lengths(), |_| {});
    let [from, to] = connection.failovers();
    assert!(from >= 1 && to >= 1, "{from} {to}: {:?}", lock(&connection.from_log.0));
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn idle_connection_fails_over() {
    let connection = TestConnection::new(&TIMEOUTS);
    connection.exchange(&[100], |_| {});
    let _dead_link = DeadLink::new(0);
    until(|| (connection.failovers() == [1, 1]).then_some(()));
    connection.exchange(&lengths(), |_| {});
    assert_eq!(connection.failovers(), [1, 1]);
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn lost_control_messages_are_replayed() {
    let connection = TestConnection::new(&TIMEOUTS);
    let _dead_link = DeadLink::new(0);
    // The control messages for tags are the first ones.
    tag_matching_tests::check_group_waits_for_all_messages((connection.send, connection.recv));
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn tag_matching_survives_repeated_failover() {
    for seed in 0..2 {
        let connection = TestConnection::new(&TIMEOUTS);
        let mut dead_link = (None, 0);
        let pair = (connection.send, connection.recv);
        let from_log = connection.from_log;
        tag_matching_tests::check_random_groups::<Block>(pair, 500 + seed, 3, |_, _, done| {
            if done % 40 == 20 {
                dead_link.0 = None;
                dead_link = (Some(DeadLink::new(dead_link.1)), 1 - dead_link.1);
            }
        });
        let logged = lock(&from_log.0).join("\n");
        assert!(logged.contains("failed over to GID"), "{logged}");
    }
}

/// On some paths only TCP gets through: RoCE packets are dropped.
#[test]
#[ignore = "runs in the RDMA lab"]
fn path_without_rdma_is_left_again() {
    let connection = TestConnection::new(&TIMEOUTS);
    connection.exchange(&lengths(), |_| {});
    // TCP gets through between all ports, RDMA between the second pair only.
    run("ip rule del from 10.77.0.0/24 to 10.77.1.0/24 unreachable");
    run("ip rule del from 10.77.1.0/24 to 10.77.0.0/24 unreachable");
    let _drop_rule = DropRule::new("udp dport 4791 ip saddr 10.77.0.0/24");
    connection.exchange(&lengths(), |_| {});
    let [from, to] = connection.failovers();
    assert!((1..=4).contains(&from) && to >= 1, "{from} {to}");
    let logged = lock(&connection.from_log.0).join("\n");
    let last = logged.lines().rfind(|line| line.contains("failed over to")).unwrap();
    assert!(last.contains("::ffff:10.77.1.1 from") && last.contains("rxe2:1"), "{logged}");
    run("ip rule add pref 17 from 10.77.0.0/24 to 10.77.1.0/24 unreachable");
    run("ip rule add pref 17 from 10.77.1.0/24 to 10.77.0.0/24 unreachable");
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn owned_memory_is_registered_once_with_the_other_port() {
    let connection = TestConnection::new(&TIMEOUTS);
    let mut block = Block::new(1 << 20);
    let mr_cache = connection.to.mr_cache(0).unwrap();
    let held = mr_cache.register(block.lend_mut(1 << 20)).unwrap().unwrap();
    let memory = |port: usize| &connection.to.devices()[port].ports()[0].regions;
    let mut ten_times = || {
        for _ in 0..10 {
            let part = block.lend_mut(1 << 19);
            let receiving = connection.recv.recv(part).unwrap().unwrap();
            let message = Arc::new(message(3, 100_000));
            let mut sending = connection.send.send_block(&message, 100_000).unwrap().unwrap();
            assert_eq!(until(|| receiving.test().unwrap()), 100_000);
            until(|| sending.poll(true).unwrap().then_some(()));
            assert!(block.bytes()[..100_000] == *message.bytes());
        }
    };
    ten_times();
    let (first, second) = (memory(0).registered.get(), memory(1).registered.get());
    let _dead_link = DeadLink::new(0);
    ten_times();
    assert_eq!(connection.failovers(), [1, 1]);
    assert_eq!((memory(0).registered.get(), memory(1).registered.get()), (first, second + 1));
    drop(held);
    ten_times();
    assert_eq!(
        memory(1).registered.get(),
        second + 11,
        "once for each message: the owner's region is gone"
    );
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn gpu_memory_is_registered_with_other_ports_in_advance() {
    let connection = TestConnection::with_memory_types(PEER_MEMORY, &TIMEOUTS);
    let send_and_check = |lengths: &[usize]| {
        let pair = (&connection.send, &connection.recv);
        lengths
            .iter()
            .for_each(|length| send_and_check::<ProtectedMemory, ProtectedMemory>(pair, *length));
    };
    send_and_check(&[1, 100_000, 8 << 20]);
    let _dead_link = DeadLink::new(0);
    send_and_check(&[0, 1, 4096, 100_000, 8 << 20]);
    assert_eq!(connection.failovers(), [1, 1]);
    tag_matching_tests::check_random_groups::<ProtectedMemory>(
        (connection.send, connection.recv),
        700,
        3,
        |_, _, _| {},
    );
}

/// A control connection that was accepted, and on which the first bytes arrive after the sender has
/// chosen another one.
#[test]
#[ignore = "runs in the RDMA lab"]
fn late_control_connection_is_ignored() {
    let connection =
        TestConnection::new(&[&TIMEOUTS[..], &[("EVENKEEL_HANDSHAKE_TIMEOUT", "60")]].concat());
    connection.exchange(&[1 << 20], |_| {});
    let hello = Hello {
        nonce: connection.listener.handle().nonce,
        connection: connection.send.sender.id(),
        flow: 1,
        flows: 2,
        checksum: false,
        rdma: true,
        random: None,
    };
    let mut late = TcpStream::connect(("10.77.1.2", connection.listener.handle().port)).unwrap();
    late.write_all(&hello.encode()).unwrap();
    let mut welcome = [0; WELCOME_BYTES];
    late.read_exact(&mut welcome).unwrap();
    Welcome::check(&welcome, hello.connection).unwrap();
    let _dead_link = DeadLink::new(0);
    connection.exchange(&lengths(), |_| {});
    assert_eq!(connection.failovers(), [1, 1]);
    late.write_all(&ControlMessage::Ack(0).encode()).unwrap();
    // The end, or a reset, since some bytes were not read.
    assert!(!matches!(late.read(&mut [0]), Ok(1..)));
    connection.exchange(&lengths(), |_| {});
    assert_eq!(connection.failovers(), [1, 1]);
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn error_without_any_path_names_both_gids() {
    let times = [("EVENKEEL_PEER_TIMEOUT", "2"), ("EVENKEEL_RECOVERY_TIMEOUT", "6")];
    let connection = TestConnection::new(&times);
    connection.exchange(&[1 << 20], |_| {});
    // The one in use fails last: else the connection might leave it before.
    let _dead_links = [DeadLink::new(1), DeadLink::new(0)];
    let mut receiving =
        connection.recv.recv_block(Block::new(4 << 20), 4 << 20).unwrap().ok().unwrap();
    let block = Arc::new(Block::new(4 << 20));
    let mut sending = connection.send.send_block(&block, 4 << 20).unwrap().unwrap();
    let sent = until(|| sending.poll(true).err()).to_string();
    let received = until(|| receiving.poll(true).err()).to_string();
    for (error, own, peer) in
        [(sent, "10.77.0.1", "10.77.0.2"), (received, "10.77.0.2", "10.77.0.1")]
    {
        let gids = format!("GID ::ffff:{own}, the peer's ::ffff:{peer}");
        assert!(error.contains(&gids) && error.contains("6 s"), "{error}");
    }
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn closed_peer_is_not_dialed_elsewhere() {
    let connection = TestConnection::new(&[("EVENKEEL_RECOVERY_TIMEOUT", "3600")]);
    connection.exchange(&[1 << 20], |_| {});
    drop(connection.recv);
    let block = Arc::new(Block::new(4 << 20));
    let error = until(|| match connection.send.send_block(&block, 4 << 20) {
        Ok(Some(mut sending)) => until(|| sending.poll(true).err().map(Some)),
        Ok(None) => None,
        Err(error) => Some(error),
    });
    assert!(error.to_string().contains("closed"), "{error}");
}
