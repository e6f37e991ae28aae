//! The traffic class of a communicator's packets.

use std::env;
use std::ffi::c_int;
use std::process::Command;

use evenkeel_nccl_abi::{CommConfig, TRAFFIC_CLASS_UNDEFINED};

use crate::harness::{Net, pattern};

/// Counts RDMA packets with this DSCP from either host, until it is dropped.
struct PacketCounter(u8);

impl PacketCounter {
    fn new(dscp: u8) -> Self {
        nft(&format!("add table ip traffic{dscp}"));
        nft(&format!("add chain ip traffic{dscp} out {{ type filter hook output priority 0; }}"));
        for port in [1, 2] {
            nft(&format!("add counter ip traffic{dscp} port{port}"));
            nft(&format!(
                "add rule ip traffic{dscp} out udp dport 4791 ip saddr 10.77.0.{port} ip dscp {dscp} counter name port{port}"
            ));
        }
        Self(dscp)
    }

    fn packets(&self) -> [u64; 2] {
        [1, 2].map(|port| {
            let text = nft(&format!("list counter ip traffic{} port{port}", self.0));
            let mut words = text.split_ascii_whitespace().skip_while(|word| *word != "packets");
            words.nth(1).and_then(|count| count.parse().ok()).unwrap()
        })
    }
}

impl Drop for PacketCounter {
    fn drop(&mut self) {
        nft(&format!("delete table ip traffic{}", self.0));
    }
}

fn nft(what: &str) -> String {
    let output = Command::new("nft").arg(what).output().unwrap();
    assert!(output.status.success(), "{what}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Sends a message from the second port to the first one, in a communicator of this class.
fn send(version: u32, traffic_class: c_int) {
    let mut net = Net::init_with(version, 0x7c, Some(CommConfig { traffic_class })).unwrap();
    net.from = 1;
    let (send, recv) = net.pair();
    let (message, mut buffer) = (pattern(1, 100_000), vec![0; 100_000]);
    // SAFETY: both stay until the requests are reported.
    unsafe {
        let receiving = net.irecv(recv, buffer.as_mut_ptr(), buffer.len()).unwrap().unwrap();
        let sending = net.isend(send, message.as_ptr(), message.len()).unwrap().unwrap();
        net.finish(receiving).unwrap();
        net.finish(sending).unwrap();
    }
    assert!(buffer == message);
    net.close_send(send);
    net.close_recv(recv);
    net.finalize();
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn marks_packets_in_both_directions() {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["traffic_class::child", "--exact", "--ignored", "--nocapture"]);
    assert!(command.env("NCCL_IB_HCA", "=rxe0,rxe1").status().unwrap().success());
}

/// Messages go between two ports, since those within one port are never sent as packets.
#[test]
#[ignore = "part of another test"]
fn child() {
    let (marked, plain) = (PacketCounter::new(26), PacketCounter::new(0));
    for version in [10, 11, 12] {
        let before = [marked.packets(), plain.packets()];
        send(version, 26 << 2);
        let after = [marked.packets(), plain.packets()];
        assert!(after[0][0] > before[0][0] && after[0][1] > before[0][1], "v{version}: {after:?}");
        assert_eq!(after[1], before[1], "v{version}: no unmarked packets");
    }
    let before = [marked.packets(), plain.packets()];
    // Before version 10 there is no configuration. Invalid classes are ignored.
    for (version, class) in [(9, 26 << 2), (12, TRAFFIC_CLASS_UNDEFINED), (12, 256)] {
        send(version, class);
    }
    let after = [marked.packets(), plain.packets()];
    assert_eq!(after[0], before[0]);
    assert!(after[1][0] > before[1][0] && after[1][1] > before[1][1]);
}
