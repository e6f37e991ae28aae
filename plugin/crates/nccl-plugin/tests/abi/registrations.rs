//! Messages in memory that NCCL has registered.

use std::io::{Read, Write};
use std::net::TcpStream;

use evenkeel_nccl_abi::PTR_HOST;

use crate::harness::{Net, VERSIONS, pattern, run_in_child_process};

/// In the lab's own network, where nothing else listens.
const METRICS: &str = "127.0.0.1:9733";

#[test]
#[ignore = "runs in the RDMA lab"]
fn messages_use_the_mr_handle_they_come_with() {
    run_in_child_process("registrations::child", &[("EVENKEEL_METRICS", METRICS)]);
}

/// Number of times that a device's memory regions were searched with success.
fn searches() -> u64 {
    let mut metrics = TcpStream::connect(METRICS).unwrap();
    metrics.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut page = String::new();
    metrics.read_to_string(&mut page).unwrap();
    let lines =
        page.lines().filter(|line| line.starts_with("evenkeel_memory_registrations_reused"));
    let counts = lines.map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap());
    let counts: Vec<u64> = counts.collect();
    assert!(!counts.is_empty(), "{page}");
    counts.iter().sum()
}

#[test]
#[ignore = "part of another test"]
fn child() {
    const SIZE: usize = 50_000;
    for version in VERSIONS {
        let mut net = Net::init(version, 0x3e9).unwrap();
        let (send, recv) = net.pair();
        let (mut message, mut buffer) = (pattern(version as usize, SIZE), vec![0; SIZE]);
        // SAFETY: the memory stays until it is deregistered, and is not used otherwise while a request has it.
        let [sent, received] = unsafe {
            [(send, &mut message), (recv, &mut buffer)].map(|(comm, memory)| {
                net.register(comm, memory.as_mut_ptr(), SIZE, PTR_HOST).unwrap()
            })
        };
        let before = searches();
        for length in [SIZE, SIZE / 2] {
            // SAFETY: as above.
            let (receiving, sending) = unsafe {
                let receiving = net.irecv(recv, buffer.as_mut_ptr(), SIZE).unwrap().unwrap();
                (receiving, net.isend(send, message.as_ptr(), length).unwrap().unwrap())
            };
            assert_eq!(net.finish(receiving), Ok(length));
            net.finish(sending).unwrap();
        }
        assert_eq!(searches(), before, "v{version}: a message searched for its memory");
        net.deregister(send, sent);
        net.deregister(recv, received);
        assert!(buffer == message, "v{version}");
        net.close_send(send);
        net.close_recv(recv);
        net.finalize();
    }
}
