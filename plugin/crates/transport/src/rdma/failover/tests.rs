//! Connections that go on by another port, between two pairs of ports: rxe0 and rxe1, rxe2 and rxe3. Nothing leads from one
//! pair to the other.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use evenkeel_protocol::{ControlMessage, Hello, WELCOME_BYTES, Welcome};

use crate::connection::tag_matching_tests;
use crate::memory::block::Block;
use crate::memory::protected::ProtectedMemory;
use crate::rdma::tests::{Lines, PEER, carry, exchange, message, transport_with};
use crate::sync::lock;
use crate::test_support::{meet, until};
use crate::{Listener, MemoryTypes, RecvConnection, SendConnection, Transport};

/// Both ends of a connection that begins by the first pair of ports.
struct Ends {
    to: Transport,
    from_log: Arc<Lines>,
    to_log: Arc<Lines>,
    listener: Listener,
    send: SendConnection,
    recv: RecvConnection,
}

impl Ends {
    fn new(settings: &[(&str, &str)]) -> Self {
        Self::for_memory_in(MemoryTypes::HOST, settings)
    }

    fn for_memory_in(reach: MemoryTypes, settings: &[(&str, &str)]) -> Self {
        let with = |ports| {
            let own = [("EVENKEEL_TRANSPORT", "rdma"), ("NCCL_IB_HCA", ports)];
            transport_with(&[&own, settings].concat())
        };
        let ((from, from_log), (to, to_log)) = (with("=rxe0,rxe2"), with("=rxe1,rxe3"));
        let listener = to.listen(0, "", reach).unwrap();
        let call = from.connect(0, listener.handle(), "", reach).unwrap();
        let (send, recv) = meet(&call, &listener);
        Self { to, from_log, to_log, listener, send, recv }
    }

    fn exchange(&self, lengths: &[usize], during: impl FnMut(usize)) {
        exchange((&self.send, &self.recv), lengths, during);
    }

    /// Times that each end has gone on by other ports.
    fn moves(&self) -> [u64; 2] {
        let [send, recv] = [self.send.sender.base(), self.recv.receiver.base()];
        [send.counters.recovered.get(), recv.counters.recovered.get()]
    }
}

fn run(line: &str) {
    let status = Command::new("sh").args(["-c", line]).status().unwrap();
    assert!(status.success(), "{line}: {status}");
}

/// A pair of ports between which nothing gets through, and that nobody is told of. Ends with this.
struct Silenced(usize);

impl Silenced {
    fn new(link: usize) -> Self {
        Self::each(link, "replace", "netem loss 100%");
        Self(link)
    }

    fn each(link: usize, what: &str, how: &str) {
        for port in [2 * link, 2 * link + 1] {
            run(&format!("tc qdisc {what} dev eth{port} root {how}"));
        }
    }
}

impl Drop for Silenced {
    fn drop(&mut self) {
        Self::each(self.0, "del", "");
    }
}

/// Packets that are dropped where they are sent, as by a firewall that says nothing. Ends with this.
struct Dropped;

impl Dropped {
    fn new(which: &str) -> Self {
        run("nft add table ip dropped");
        run("nft add chain ip dropped out '{ type filter hook output priority 0; }'");
        run(&format!("nft add rule ip dropped out {which} drop"));
        Self
    }
}

impl Drop for Dropped {
    fn drop(&mut self) {
        run("nft delete table ip dropped");
    }
}

/// Makes messages of some MiB take longer than it takes to silence the ports that they go by.
fn slow(link: usize) {
    let port = 2 * link;
    run(&format!("tc qdisc replace dev eth{port} root tbf rate 100mbit burst 256kb limit 30mb"));
}

/// Short, for a test that waits for them.
const TIMES: [(&str, &str); 2] =
    [("EVENKEEL_PEER_TIMEOUT", "4"), ("EVENKEEL_RECOVERY_TIMEOUT", "30")];

/// Some are on their way when a path dies, and others wait behind them.
fn lengths() -> Vec<usize> {
    let mut lengths = vec![1 << 20, 100];
    lengths.extend([4 << 20; 8]);
    lengths.extend([100, 3 << 20, 0, 70_000, 4096, 4097]);
    lengths
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn what_is_on_its_way_when_a_path_dies_comes_by_the_other_one() {
    for lanes in ["1", "2"] {
        let ends = Ends::new(&[&TIMES[..], &[("EVENKEEL_QUEUE_PAIRS", lanes)]].concat());
        ends.exchange(&lengths(), |_| {});
        assert_eq!(ends.moves(), [0, 0]);
        let mut silenced = None;
        slow(0);
        ends.exchange(&lengths(), |number| {
            if number == 2 {
                silenced = Some(Silenced::new(0));
            }
        });
        assert_eq!(ends.moves(), [1, 1], "{:?}", lock(&ends.from_log.0));
        let counters = &ends.send.sender.base().counters;
        // Of the long ones: how many parts is up to the moment.
        assert!(counters.repeated.get() > 70_000, "something was on its way");
        let gids = |own, before| format!("goes on by GID ::ffff:{own} instead of ::ffff:{before}");
        for (log, words) in [
            (&ends.from_log, gids("10.77.1.1", "10.77.0.1")),
            (&ends.to_log, gids("10.77.1.2", "10.77.0.2")),
        ] {
            let said = lock(&log.0).join("\n");
            assert!(said.contains(&words), "{words}:\n{said}");
        }
        // And back.
        drop(silenced);
        let mut silenced = None;
        slow(1);
        ends.exchange(&lengths(), |number| {
            if number == 3 {
                silenced = Some(Silenced::new(1));
            }
        });
        assert_eq!(ends.moves(), [2, 2]);
    }
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn a_port_that_goes_down_is_left() {
    let ends = Ends::new(&TIMES);
    ends.exchange(&[1 << 20], |_| {});
    slow(0);
    ends.exchange(&lengths(), |number| {
        if number == 2 {
            run("ip link set eth1 down");
        }
    });
    assert_eq!(ends.moves(), [1, 1]);
    run("tc qdisc del dev eth0 root");
    run("ip link set eth1 up && ip route replace 10.77.0.1/32 dev eth1 src 10.77.0.2 table 77");
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn where_rdma_does_not_get_through_tcp_carries_unless_it_must_not() {
    let _dropped = Dropped::new("udp dport 4791");
    let with = |carrier, ports| {
        transport_with(&[
            ("EVENKEEL_TRANSPORT", carrier),
            ("NCCL_IB_HCA", ports),
            ("EVENKEEL_CONNECT_TIMEOUT", "20"),
            ("EVENKEEL_PEER_TIMEOUT", "4"),
        ])
    };
    let ((from, log), (to, _)) = (with("auto", "=rxe0"), with("auto", "=rxe1"));
    let listener = to.listen(0, "", MemoryTypes::HOST).unwrap();
    let call = from.connect(0, listener.handle(), "", MemoryTypes::HOST).unwrap();
    let (send, recv) = meet(&call, &listener);
    assert_eq!(send.sender.queue_pairs(), 0, "TCP's has none");
    exchange((&send, &recv), &lengths(), |_| {});
    let said = lock(&log.0).join("\n");
    assert!(said.contains("TCP carries the connection to 10.77.0.2"), "{said}");
    let (from, _) = with("rdma", "=rxe0");
    let (to, _) = with("rdma", "=rxe1");
    let listener = to.listen(0, "", MemoryTypes::HOST).unwrap();
    let call = from.connect(0, listener.handle(), "", MemoryTypes::HOST).unwrap();
    let error = until(|| call.poll().err()).to_string();
    assert!(error.contains("10.77.0.2") && error.contains("rxe0:1"), "{error}");
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn a_lifeline_that_is_cut_under_traffic_is_replaced() {
    let ends = Ends::new(&TIMES);
    ends.exchange(&[1 << 20], |_| {});
    let _dropped = Dropped::new("ip protocol tcp ip saddr 10.77.0.0/24");
    // Much comes through while a handshake takes its time there.
    Silenced::each(1, "replace", "netem delay 50ms");
    let begin = Instant::now();
    while ends.moves() != [1, 1] {
        ends.exchange(&[100_000, 64, 1 << 20], |_| {});
        assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", ends.moves());
    }
    Silenced::each(1, "del", "");
    ends.exchange(&lengths(), |_| {});
    assert_eq!(ends.moves(), [1, 1]);
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn a_path_that_is_back_is_gone_on_by_though_it_had_failed() {
    let ends = Ends::new(&TIMES);
    ends.exchange(&[1 << 20], |_| {});
    let (mut first, _second) = (Some(Silenced::new(0)), Silenced::new(1));
    let begin = Instant::now();
    let mut receiving = ends.recv.recv_block(Block::new(4 << 20), 4 << 20).unwrap().ok().unwrap();
    let sent = Arc::new(message(5, 4 << 20));
    let mut sending = ends.send.send_block(&sent, 4 << 20).unwrap().unwrap();
    let (block, length) = until(|| {
        // Longer than all ways take to fail, and not as long as the patience with them.
        if begin.elapsed() > Duration::from_secs(8) {
            first = None;
        }
        receiving.poll(true).unwrap()
    });
    until(|| sending.poll(true).unwrap().then_some(()));
    assert!(length == 4 << 20 && block.bytes() == sent.bytes());
    assert!(begin.elapsed() > Duration::from_secs(8));
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn a_connection_at_rest_finds_another_path_before_it_is_used() {
    let ends = Ends::new(&TIMES);
    ends.exchange(&[100], |_| {});
    let _silenced = Silenced::new(0);
    until(|| (ends.moves() == [1, 1]).then_some(()));
    ends.exchange(&lengths(), |_| {});
    assert_eq!(ends.moves(), [1, 1]);
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn words_that_were_lost_with_a_path_are_said_again() {
    let ends = Ends::new(&TIMES);
    let _silenced = Silenced::new(0);
    // The first of any tag.
    tag_matching_tests::a_group_waits_for_all_of_its_messages((ends.send, ends.recv));
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn messages_of_any_tag_survive_paths_that_come_and_go() {
    for seed in 0..2 {
        let ends = Ends::new(&TIMES);
        let mut silenced = (None, 0);
        let pair = (ends.send, ends.recv);
        let from_log = ends.from_log;
        tag_matching_tests::random_groups::<Block>(pair, 500 + seed, 3, |_, _, done| {
            if done % 40 == 20 {
                silenced.0 = None;
                silenced = (Some(Silenced::new(silenced.1)), 1 - silenced.1);
            }
        });
        let said = lock(&from_log.0).join("\n");
        assert!(said.contains("goes on by GID"), "{said}");
    }
}

/// The ports there do, too, but their packets are dropped.
#[test]
#[ignore = "runs in the RDMA lab"]
fn ways_on_which_only_the_addresses_reach_each_other_are_left_again() {
    let ends = Ends::new(&TIMES);
    ends.exchange(&lengths(), |_| {});
    // From everywhere to everywhere by TCP; by RDMA between the second pair of ports only.
    run("ip rule del from 10.77.0.0/24 to 10.77.1.0/24 unreachable");
    run("ip rule del from 10.77.1.0/24 to 10.77.0.0/24 unreachable");
    let _dropped = Dropped::new("udp dport 4791 ip saddr 10.77.0.0/24");
    ends.exchange(&lengths(), |_| {});
    let [from, to] = ends.moves();
    assert!((1..=4).contains(&from) && to >= 1, "{from} {to}");
    let said = lock(&ends.from_log.0).join("\n");
    let last = said.lines().rfind(|line| line.contains("goes on by")).unwrap();
    assert!(last.contains("::ffff:10.77.1.1 instead of") && last.contains("rxe2:1"), "{said}");
    run("ip rule add pref 17 from 10.77.0.0/24 to 10.77.1.0/24 unreachable");
    run("ip rule add pref 17 from 10.77.1.0/24 to 10.77.0.0/24 unreachable");
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn memory_that_its_owner_has_registered_is_registered_once_with_the_other_port() {
    let ends = Ends::new(&TIMES);
    let mut block = Block::new(1 << 20);
    let registrar = ends.to.mr_cache(0).unwrap();
    let held = registrar.register(block.lend_mut(1 << 20)).unwrap().unwrap();
    let memory = |port: usize| &ends.to.devices()[port].rdma().unwrap().regions;
    let mut ten_times = || {
        for _ in 0..10 {
            let part = block.lend_mut(1 << 19);
            let receiving = ends.recv.recv(part).unwrap().unwrap();
            let message = Arc::new(message(3, 100_000));
            let mut sending = ends.send.send_block(&message, 100_000).unwrap().unwrap();
            assert_eq!(until(|| receiving.test().unwrap()), 100_000);
            until(|| sending.poll(true).unwrap().then_some(()));
            assert!(block.bytes()[..100_000] == *message.bytes());
        }
    };
    ten_times();
    let (first, second) = (memory(0).registered.get(), memory(1).registered.get());
    let _silenced = Silenced::new(0);
    ten_times();
    assert_eq!(ends.moves(), [1, 1]);
    assert_eq!((memory(0).registered.get(), memory(1).registered.get()), (first, second + 1));
    drop(held);
    ten_times();
    assert_eq!(memory(1).registered.get(), second + 11, "for each message: nobody holds it");
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn memory_that_no_processor_reaches_is_registered_with_the_other_port_before() {
    let ends = Ends::for_memory_in(PEER, &TIMES);
    let carry = |lengths: &[usize]| {
        let pair = (&ends.send, &ends.recv);
        lengths.iter().for_each(|length| carry::<ProtectedMemory, ProtectedMemory>(pair, *length));
    };
    carry(&[1, 100_000, 8 << 20]);
    let _silenced = Silenced::new(0);
    carry(&[0, 1, 4096, 100_000, 8 << 20]);
    assert_eq!(ends.moves(), [1, 1]);
    tag_matching_tests::random_groups::<ProtectedMemory>(
        (ends.send, ends.recv),
        700,
        3,
        |_, _, _| {},
    );
}

/// A lifeline that was welcomed and speaks late is none that the peer goes on by.
#[test]
#[ignore = "runs in the RDMA lab"]
fn what_comes_late_on_a_lifeline_that_was_left_is_not_heard() {
    let ends = Ends::new(&[&TIMES[..], &[("EVENKEEL_HANDSHAKE_TIMEOUT", "60")]].concat());
    ends.exchange(&[1 << 20], |_| {});
    let hello = Hello {
        nonce: ends.listener.handle().nonce,
        connection: ends.send.sender.id(),
        flow: 1,
        flows: 2,
        checksum: false,
        rdma: true,
        random: None,
    };
    let mut late = TcpStream::connect(("10.77.1.2", ends.listener.handle().port)).unwrap();
    late.write_all(&hello.encode()).unwrap();
    let mut welcome = [0; WELCOME_BYTES];
    late.read_exact(&mut welcome).unwrap();
    Welcome::check(&welcome, hello.connection).unwrap();
    let _silenced = Silenced::new(0);
    ends.exchange(&lengths(), |_| {});
    assert_eq!(ends.moves(), [1, 1]);
    late.write_all(&ControlMessage::Ack(0).encode()).unwrap();
    // Its end, or a reset, since there is what nobody has read.
    assert!(!matches!(late.read(&mut [0]), Ok(1..)));
    ends.exchange(&lengths(), |_| {});
    assert_eq!(ends.moves(), [1, 1]);
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn where_no_path_is_left_the_error_says_what_was_tried_after_the_time_set() {
    let times = [("EVENKEEL_PEER_TIMEOUT", "2"), ("EVENKEEL_RECOVERY_TIMEOUT", "6")];
    let ends = Ends::new(&times);
    ends.exchange(&[1 << 20], |_| {});
    let _silenced = [Silenced::new(0), Silenced::new(1)];
    let mut receiving = ends.recv.recv_block(Block::new(4 << 20), 4 << 20).unwrap().ok().unwrap();
    let block = Arc::new(Block::new(4 << 20));
    let mut sending = ends.send.send_block(&block, 4 << 20).unwrap().unwrap();
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
fn a_peer_that_is_gone_is_not_looked_for_elsewhere() {
    let ends = Ends::new(&[("EVENKEEL_RECOVERY_TIMEOUT", "3600")]);
    ends.exchange(&[1 << 20], |_| {});
    drop(ends.recv);
    let block = Arc::new(Block::new(4 << 20));
    let error = until(|| match ends.send.send_block(&block, 4 << 20) {
        Ok(Some(mut sending)) => until(|| sending.poll(true).err().map(Some)),
        Ok(None) => None,
        Err(error) => Some(error),
    });
    assert!(error.to_string().contains("closed"), "{error}");
}
