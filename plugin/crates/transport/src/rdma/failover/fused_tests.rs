//! Tests of connections over several ports at once: from rxe0 and rxe2, which are one device, to
//! rxe1 and rxe3. Rxe0 reaches rxe1 only, and rxe2 reaches rxe3 only.

use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::tests::{DeadLink, FailingLink, TIMEOUTS, TestConnection, run};
use crate::connection::tag_matching_tests;
use crate::device::fuse;
use crate::memory::block::Block;
use crate::memory::test_memory::ProtectedMemory;
use crate::rdma::tests::{LogLines, PEER_MEMORY, send_and_check, transport_with};
use crate::sync::lock;
use crate::test_support::until;
use crate::{Device, MemoryTypes, Settings, Transport};

const FROM: &str = "=rxe0,rxe2";
const TO: &str = "=rxe1,rxe3";

/// The ports of one end, and the number of the device that is made of all of them, if they are
/// several.
fn end(ports: &str, settings: &[(&str, &str)]) -> ((Transport, Arc<LogLines>), usize) {
    let own = [("EVENKEEL_TRANSPORT", "rdma"), ("NCCL_IB_HCA", ports)];
    let (transport, log) = transport_with(&[&own, settings].concat());
    let all: Vec<usize> = (0..transport.devices().len()).collect();
    let device = if all.len() > 1 { transport.fuse(&all).unwrap() } else { 0 };
    ((transport, log), device)
}

fn between(
    (from, to): (&str, &str),
    memory_types: MemoryTypes,
    settings: &[(&str, &str)],
) -> TestConnection {
    let ((from, from_device), (to, to_device)) = (end(from, settings), end(to, settings));
    TestConnection::open(from, to, (from_device, to_device), memory_types)
}

fn fused(settings: &[(&str, &str)]) -> TestConnection {
    between((FROM, TO), MemoryTypes::HOST, settings)
}

/// Bytes that the two ports of the sender have sent.
fn sent() -> [u64; 2] {
    [0, 2].map(|port| {
        let path = format!("/sys/class/net/eth{port}/statistics/tx_bytes");
        fs::read_to_string(path).unwrap().trim().parse().unwrap()
    })
}

/// Bytes that each of them sends meanwhile.
fn sent_during(work: impl FnOnce()) -> [u64; 2] {
    let before = sent();
    work();
    let after = sent();
    [0, 1].map(|port| after[port] - before[port])
}

/// Some of these messages are in flight when a port fails, and others wait behind them. The machine
/// is slow.
fn few() -> Vec<usize> {
    vec![1 << 20, 100, 2 << 20, 2 << 20, 2 << 20, 2 << 20, 100, 1 << 20, 0, 70_000, 4096, 4097]
}

fn logged(log: &LogLines) -> String {
    lock(&log.0).join("\n")
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn fused_ports_share_messages_of_all_sizes() {
    let connection = fused(&[]);
    let mut all = vec![0, 1, 8, 255, 256, 257, 4095, 4096, 4097, 65_536, 524_288, 524_289];
    all.extend([3 << 20, 0, 5, 1 << 20, 4096, 100_000, (1 << 20) + 1]);
    connection.exchange(&all, |_| {});
    // Eager messages, many times round the ring.
    connection.exchange(&[64; 500], |_| {});
    let carried = sent_during(|| connection.exchange(&[4 << 20; 4], |_| {}));
    assert!(carried.iter().all(|bytes| *bytes > 3 << 20), "{carried:?} of 16 MiB");
    assert_eq!(connection.failovers(), [0, 0]);
    let log = logged(&connection.from_log);
    assert!(log.contains("device 2: rxe0:1+rxe2:1"), "{log}");
    assert!(!log.contains("does without"), "{log}");
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn joined_ports_are_one_device() {
    let joined = [("EVENKEEL_DEVICES", "joined")];
    let with = |ports| {
        let own = [("EVENKEEL_TRANSPORT", "rdma"), ("NCCL_IB_HCA", ports)];
        transport_with(&[&own, &joined[..]].concat())
    };
    let (from, to) = (with(FROM), with(TO));
    let [device] = from.0.devices() else { panic!("{:?}", from.0.devices()) };
    let ports = transport_with(&[("EVENKEEL_TRANSPORT", "rdma"), ("NCCL_IB_HCA", FROM)]).0;
    let speeds: u32 = ports.devices().iter().map(Device::speed).sum();
    assert_eq!((device.name(), device.speed(), device.port()), ("rxe0:1+rxe2:1", speeds, 1));
    let connection = TestConnection::open(from, to, (0, 0), MemoryTypes::HOST);
    let carried = sent_during(|| connection.exchange(&few(), |_| {}));
    assert!(carried.iter().all(|bytes| *bytes > 2 << 20), "{carried:?}");
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn fused_ports_are_refused_by_name_if_one_is_there_twice() {
    let ((transport, _), made) = end(FROM, &[]);
    assert_eq!(transport.fuse(&[0, 1]).unwrap(), made, "the same again");
    let refused = |members: &[usize]| transport.fuse(members).unwrap_err().to_string();
    let twice = refused(&[1, 1]);
    assert!(twice.contains("rxe2:1, rxe2:1") && twice.contains("twice"), "{twice}");
    assert!(refused(&[0]).contains("two or more"));
}

/// A port that carries a fraction of the other's bytes does not get a half of them.
#[test]
#[ignore = "runs in the RDMA lab"]
fn slow_port_of_fused_ports_takes_few_bytes() {
    // Packets that wait for the slow port are not lost.
    let connection = fused(&[("EVENKEEL_CHUNK_BYTES", "65536"), ("EVENKEEL_PEER_TIMEOUT", "60")]);
    connection.exchange(&[1 << 20], |_| {});
    run("tc qdisc replace dev eth2 root tbf rate 8mbit burst 64kb limit 30mb");
    let [fast, slow] = sent_during(|| connection.exchange(&[2 << 20; 10], |_| {}));
    run("tc qdisc del dev eth2 root");
    assert!(slow > 250_000 && fast > 3 * slow, "{fast} and {slow} bytes");
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn failed_port_of_fused_ports_is_done_without_until_it_works() {
    let short = [("EVENKEEL_PEER_TIMEOUT", "4"), ("EVENKEEL_RECOVERY_TIMEOUT", "10")];
    let connection = fused(&short);
    connection.exchange(&few(), |_| {});
    let failing_link = FailingLink::new(1, 1 << 20);
    let carried = sent_during(|| connection.exchange(&few(), |_| {}));
    let repeated = connection.send.sender.base().counters.repeated.get();
    let log = logged(&connection.from_log);
    assert!(repeated > 0, "nothing was in flight: {carried:?} bytes\n{log}");
    until(|| logged(&connection.from_log).contains("does without port rxe2:1 to").then_some(()));
    let [carrying, failed] = sent_during(|| connection.exchange(&few(), |_| {}));
    assert!(carrying > 9 << 20 && failed < 1 << 20, "{carrying} and {failed} bytes");
    // For longer than a connection without any path is given.
    let (begin, timeout) = (Instant::now(), Duration::from_secs(11));
    while begin.elapsed() < timeout {
        connection.exchange(&[1 << 20, 100], |_| {});
    }
    drop(failing_link);
    until(|| {
        connection.exchange(&[100_000], |_| {});
        logged(&connection.from_log).contains("at rxe2:1 carries messages again").then_some(())
    });
    let carried = sent_during(|| connection.exchange(&few(), |_| {}));
    assert!(carried.iter().all(|bytes| *bytes > 2 << 20), "{carried:?}");
    assert_eq!(connection.failovers(), [0, 0], "{}", logged(&connection.from_log));
}

/// The control connection is over the first port: the connection gets another one, and goes on over
/// the second port.
#[test]
#[ignore = "runs in the RDMA lab"]
fn fused_ports_outlive_the_port_of_their_control_connection() {
    let connection = fused(&TIMEOUTS);
    connection.exchange(&few(), |_| {});
    let failing_link = FailingLink::new(0, 2 << 20);
    connection.exchange(&few(), |_| {});
    until(|| {
        connection.exchange(&[100_000], |_| {});
        (connection.failovers() == [1, 1]).then_some(())
    });
    let log = logged(&connection.from_log);
    assert!(log.contains("connected again at GID ::ffff:10.77.0.1+::ffff:10.77.1.1"), "{log}");
    connection.exchange(&few(), |_| {});
    drop(failing_link);
    until(|| {
        connection.exchange(&[100_000], |_| {});
        logged(&connection.from_log).contains("at rxe0:1 carries messages again").then_some(())
    });
    let carried = sent_during(|| connection.exchange(&few(), |_| {}));
    assert!(carried.iter().all(|bytes| *bytes > 2 << 20), "{carried:?}");
    assert_eq!(connection.failovers(), [1, 1], "{}", logged(&connection.from_log));
}

/// A port that is down when the connection fails over keeps its place, and its peer.
#[test]
#[ignore = "runs in the RDMA lab"]
fn fused_ports_use_a_port_again_that_was_down_in_a_failover() {
    for memory_types in [MemoryTypes::HOST, PEER_MEMORY] {
        let connection = between((FROM, TO), memory_types, &TIMEOUTS);
        let pass = |lengths: &[usize]| match memory_types.is_host_only() {
            true => connection.exchange(lengths, |_| {}),
            false => lengths.iter().for_each(|length| {
                let pair = (&connection.send, &connection.recv);
                send_and_check::<ProtectedMemory, ProtectedMemory>(pair, *length);
            }),
        };
        pass(&few());
        run("ip link set eth1 down");
        until(|| {
            pass(&[100_000]);
            (connection.failovers() == [1, 1]).then_some(())
        });
        run("ip link set eth1 up && ip route replace 10.77.0.1/32 dev eth1 src 10.77.0.2 table 77");
        until(|| {
            let carried = sent_during(|| pass(&few()));
            carried.iter().all(|bytes| *bytes > 2 << 20).then_some(())
        });
        assert_eq!(connection.failovers(), [1, 1], "{}", logged(&connection.from_log));
    }
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn fused_ports_connect_over_the_port_that_works() {
    let _dead_link = DeadLink::new(0);
    let connection = fused(&[&TIMEOUTS[..], &[("EVENKEEL_CONNECT_TIMEOUT", "16")]].concat());
    let [failed, carrying] = sent_during(|| connection.exchange(&few(), |_| {}));
    assert!(carrying > 9 << 20 && failed < 1 << 20, "{carrying} and {failed} bytes");
    assert_eq!(connection.failovers(), [0, 0], "{}", logged(&connection.from_log));
}

/// The peer has one port, which only one of the device's reaches.
#[test]
#[ignore = "runs in the RDMA lab"]
fn fused_ports_reach_a_peer_with_one_port() {
    for (from, to, left) in [
        (FROM, "=rxe1", "rxe2:1 to GID ::ffff:10.77.0.2"),
        ("=rxe0", TO, "rxe0:1 to GID ::ffff:10.77.1.2"),
    ] {
        let connection = between((from, to), MemoryTypes::HOST, &TIMEOUTS);
        connection.exchange(&few(), |_| {});
        until(|| {
            connection.exchange(&[100_000], |_| {});
            let without = format!("does without port {left} until it works again");
            logged(&connection.from_log).contains(&without).then_some(())
        });
        connection.exchange(&few(), |_| {});
        assert_eq!(connection.failovers(), [0, 0], "{}", logged(&connection.from_log));
    }
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn fused_ports_flush_gpu_memory_each() {
    let connection = between((FROM, TO), PEER_MEMORY, &TIMEOUTS);
    let send_and_check = |lengths: &[usize]| {
        let pair = (&connection.send, &connection.recv);
        lengths
            .iter()
            .for_each(|length| send_and_check::<ProtectedMemory, ProtectedMemory>(pair, *length));
    };
    let carried = sent_during(|| send_and_check(&[0, 1, 4096, 100_000, 4 << 20, (4 << 20) + 1]));
    assert!(carried.iter().all(|bytes| *bytes > 1 << 20), "{carried:?}");
    let _dead_link = DeadLink::new(1);
    send_and_check(&[0, 1, 4096, 100_000, 4 << 20, (4 << 20) + 1]);
    assert_eq!(connection.failovers(), [0, 0], "{}", logged(&connection.from_log));
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn fused_ports_match_tags_while_ports_fail() {
    let connection = fused(&TIMEOUTS);
    let mut dead_link = (None, 0);
    let pair = (connection.send, connection.recv);
    tag_matching_tests::check_random_groups::<Block>(pair, 900, 3, |_, _, done| {
        if done % 40 == 20 {
            dead_link.0 = None;
            dead_link = (Some(DeadLink::new(dead_link.1)), 1 - dead_link.1);
        }
    });
}

/// Gives all ports an address of one subnet, in addition to their own. Ends when dropped.
struct OneSubnet;

impl OneSubnet {
    /// The link-local address, the first one, and this one.
    const GID_INDEX: (&str, &str) = ("NCCL_IB_GID_INDEX", "2");

    fn new() -> Self {
        for port in 0..4 {
            let (own, other) = (port + 1, (port ^ 1) + 1);
            run(&format!(
                "ip address add 10.77.9.{own}/24 dev eth{port} &&
                 ip rule add pref 15 from 10.77.9.{own} to 10.77.9.{own} lookup local &&
                 ip route add 10.77.9.{other}/32 dev eth{port} src 10.77.9.{own} table 77 &&
                 ip neighbour replace 10.77.9.{other} lladdr $(cat /sys/class/net/eth{}/address) dev eth{port}",
                port ^ 1
            ));
        }
        Self
    }

    /// Lets what the listeners send by TCP come by the connectors' other port, as with hosts that
    /// answer ARP for all their addresses on every card.
    fn cross_answers() {
        for (port, by) in [(1, 3), (3, 1)] {
            let (own, other) = (port + 1, port);
            run(&format!(
                "ip route add 10.77.9.{other}/32 dev eth{by} src 10.77.9.{own} table 78 &&
                 ip rule add pref 12 iif lo ipproto tcp from 10.77.9.{own} to 10.77.9.{other} lookup 78 &&
                 ip neighbour replace 10.77.9.{other} lladdr $(cat /sys/class/net/eth{}/address) dev eth{by}",
                by - 1
            ));
        }
    }
}

impl Drop for OneSubnet {
    fn drop(&mut self) {
        run(
            "while ip rule del pref 12 2>/dev/null; do :; done; ip route flush table 78 2>/dev/null; true",
        );
        for port in 0..4 {
            let (own, other) = (port + 1, (port ^ 1) + 1);
            run(&format!(
                "ip rule del pref 15 from 10.77.9.{own} to 10.77.9.{own} lookup local &&
                 ip route del 10.77.9.{other}/32 dev eth{port} table 77 &&
                 ip address del 10.77.9.{own}/24 dev eth{port}"
            ));
        }
    }
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn fused_ports_in_one_subnet_share_messages() {
    let _subnet = OneSubnet::new();
    let connection = fused(&[OneSubnet::GID_INDEX]);
    let carried = sent_during(|| connection.exchange(&few(), |_| {}));
    assert!(carried.iter().all(|bytes| *bytes > 2 << 20), "{carried:?}");
    assert_eq!(connection.send.sender.base().peer().ip().to_string(), "10.77.9.2");
}

/// A control connection that is bound to its own card gets none of them.
#[test]
#[ignore = "runs in the RDMA lab"]
fn fused_ports_connect_where_answers_come_by_another_card() {
    let _subnet = OneSubnet::new();
    OneSubnet::cross_answers();
    let settings = [OneSubnet::GID_INDEX, ("EVENKEEL_CONNECT_TIMEOUT", "8")];
    let connection = fused(&settings);
    let carried = sent_during(|| connection.exchange(&few(), |_| {}));
    assert!(carried.iter().all(|bytes| *bytes > 2 << 20), "{carried:?}");
    // A single port leaves it to the route at once.
    let ((from, _), (to, _)) = (end(FROM, &settings), end(TO, &settings));
    let begin = Instant::now();
    TestConnection::open(from, to, (0, 0), MemoryTypes::HOST).exchange(&[100, 1 << 20], |_| {});
    assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn fused_ports_and_network_interfaces_are_refused_together() {
    let ((ports, _), _) = end(FROM, &[]);
    let (interfaces, _) =
        transport_with(&[("EVENKEEL_TRANSPORT", "tcp"), ("NCCL_SOCKET_IFNAME", "eth1")]);
    let mixed = [&ports.devices()[0], &interfaces.devices()[0]];
    let refused = fuse(&mixed).unwrap_err().to_string();
    assert_eq!(
        refused,
        "cannot make one device of rxe0:1, eth1: RDMA ports and network interfaces cannot be one: no protocol is over both"
    );
}

/// A host with so many has used TCP with these settings before.
#[test]
#[ignore = "runs in the RDMA lab"]
fn joined_ports_that_are_too_many_are_left_to_tcp() {
    run(
        "ip link add eth9 type dummy && ip link set eth9 up && ip address add 10.77.5.1/32 dev eth9",
    );
    run("rdma link add rxe9 type rxe netdev eth9");
    until(|| {
        let state = fs::read_to_string("/sys/class/infiniband/rxe9/ports/1/state").unwrap();
        state.contains("ACTIVE").then_some(())
    });
    let with = |mode| {
        let settings = [
            ("EVENKEEL_TRANSPORT", mode),
            ("EVENKEEL_DEVICES", "joined"),
            ("NCCL_SOCKET_IFNAME", "=eth0,eth2"),
        ];
        let lookup = |name: &str| {
            let given = settings.iter().find(|(other, _)| *other == name);
            given.map(|(_, value)| (*value).to_owned())
        };
        let log = Arc::new(LogLines::default());
        let shared: Arc<LogLines> = Arc::clone(&log);
        (Transport::new(Settings::from_lookup(lookup).unwrap(), shared), log)
    };
    let ((auto, log), (must, _)) = (with("auto"), with("rdma"));
    run("rdma link del rxe9 && ip link del eth9");
    let auto = auto.unwrap();
    let [device] = auto.devices() else { panic!("{:?}", auto.devices()) };
    assert_eq!((device.name(), device.port()), ("eth0+eth2", 0));
    let log = logged(&log);
    let why = "at most 4 RDMA ports can be joined";
    assert!(log.contains("TCP carries all: ") && log.contains(why), "{log}");
    let error = must.err().unwrap().to_string();
    assert!(error.contains(why) && error.contains("pick some with NCCL_IB_HCA"), "{error}");
}
