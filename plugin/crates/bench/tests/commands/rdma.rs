//! The commands over RDMA, in the RDMA lab, whose two ports are joined by a link. There is no other network to fall back to:
//! a peer that cannot use RDMA is refused.

use std::process::Command;

use serde_json::Value;

use crate::process::{Ended, Running, bench, ranks_with, run};

fn by_rdma(command: &mut Command, port: &str) {
    let port = format!("={port}");
    command.env_remove("NCCL_SOCKET_IFNAME");
    command.env("EVENKEEL_TRANSPORT", "rdma").env("NCCL_IB_HCA", port);
}

/// Runs two ranks, one at each port; gives what rank 0 printed.
fn between_ports(arguments: &[&str]) -> Value {
    let ports = ["rxe1", "rxe0"];
    let running = ranks_with(2, arguments, |rank, command| by_rdma(command, ports[rank]));
    let ended: Vec<Ended> = running.into_iter().map(Running::end).collect();
    assert!(ended.iter().all(|ended| ended.status.success()), "{ended:?}");
    serde_json::from_str(&ended[0].out).unwrap()
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn messages_go_from_port_to_port_and_each_byte_is_right() {
    let report = between_ports(&[
        "net",
        "-b",
        "1",
        "-e",
        "256K",
        "-f",
        "64",
        "-n",
        "8",
        "--connections",
        "2",
        "--check-all",
        "--json",
    ]);
    assert_eq!(report["network"]["transport"], "rdma", "{report}");
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 4, "{report}");
    assert!(rows.iter().all(|row| row["wrong"] == 0), "{report}");
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn ranks_say_that_rdma_carried_their_sum() {
    let report = between_ports(&[
        "allreduce",
        "-b",
        "4",
        "-e",
        "1M",
        "-f",
        "512",
        "-n",
        "1",
        "-w",
        "0",
        "--json",
    ]);
    for rank in 0..2 {
        assert_eq!(report["ranks"][rank]["network"]["transport"], "rdma", "{report}");
    }
    assert_eq!((&report["wrong"], report["rows"].as_array().unwrap().len()), (&0.into(), 3));
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn collectives_take_it() {
    let mut command = bench(&[
        "collective",
        "--spawn",
        "2",
        "--transport",
        "rdma",
        "--elements",
        "100,300000",
        "--iteration-count",
        "3",
        "--warmup-iters",
        "1",
        "--json",
        "allreduce",
    ]);
    command.env_remove("NCCL_SOCKET_IFNAME");
    let ended = Running::start(command).end();
    assert!(ended.status.success(), "{ended:?}");
    let report: Value = serde_json::from_str(&ended.out).unwrap();
    assert_eq!((&report["transport"], &report["verified"]), (&"rdma".into(), &true.into()));
    assert!(report["errors"].as_array().unwrap().is_empty(), "{report}");
    assert_eq!(report["rows"].as_array().unwrap().len(), 2, "{report}");
}

#[test]
fn where_there_is_no_rdma_that_is_said() {
    let device = ["collective", "--spawn", "2", "--transport", "rdma", "--tcp-device", "lo"];
    let ended = run(&device);
    assert!(!ended.status.success() && ended.err.contains("NCCL_IB_HCA"), "{ended:?}");
    let mut command = bench(&["allreduce", "--spawn", "2", "-b", "4", "-e", "4"]);
    by_rdma(&mut command, "none0");
    let ended = Running::start(command).end();
    assert!(!ended.status.success() && ended.err.contains("EVENKEEL_TRANSPORT"), "{ended:?}");
}
