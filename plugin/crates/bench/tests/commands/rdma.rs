//! The commands over RDMA, in the RDMA lab, whose two ports are joined by a link. There is no other
//! network to fall back to: a peer that cannot use RDMA is refused.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;
use std::{fs, thread};

use serde_json::Value;

use crate::metrics::{scrape, values};
use crate::process::{Ended, Folder, PATIENCE, Running, bench, end_all, ranks, run};

fn by_rdma(command: &mut Command, port: &str) {
    let port = format!("={port}");
    command.env_remove("NCCL_SOCKET_IFNAME");
    command.env("EVENKEEL_TRANSPORT", "rdma").env("NCCL_IB_HCA", port);
}

/// Runs two ranks, one at each port; gives what rank 0 printed.
fn between_ports(line: &str) -> Value {
    let ports = ["rxe1", "rxe0"];
    let ranks = ranks(2, line, |rank, command| by_rdma(command, ports[rank]));
    let ended: Vec<Ended> = end_all(ranks).into_iter().map(Ended::passed).collect();
    ended[0].report()
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn rdma_messages_are_verified() {
    let report = between_ports("net -b 1 -e 256K -f 64 -n 8 --connections 2 --check-all --json");
    assert_eq!(report["network"]["transport"], "rdma", "{report}");
    let rows = report["rows"].as_array().unwrap();
    assert!(rows.len() == 4 && rows.iter().all(|row| row["wrong"] == 0), "{report}");
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn rdma_allreduce_reports_its_transport() {
    let report = between_ports("allreduce -b 4 -e 1M -f 512 -n 1 -w 0 --json");
    for rank in 0..2 {
        assert_eq!(report["ranks"][rank]["network"]["transport"], "rdma", "{report}");
    }
    assert_eq!((&report["wrong"], report["rows"].as_array().unwrap().len()), (&0.into(), 3));
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn rdma_collectives() {
    let few =
        "collective --spawn 2 --json --elements 100,300000 --iteration-count 3 --warmup-iters 1";
    for how in ["--transport rdma", "--transport ibverbs --ib-device rxe0 --ib-port 1"] {
        let mut command = bench(&format!("{few} {how} allreduce"));
        command.env_remove("NCCL_SOCKET_IFNAME");
        let report = Running::start(command).end().passed().report();
        assert_eq!((&report["transport"], &report["verified"]), (&"rdma".into(), &true.into()));
        assert!(report["errors"].as_array().unwrap().is_empty(), "{report}");
        assert_eq!(report["rows"].as_array().unwrap().len(), 2, "{report}");
    }
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn rdma_reduction_servers_verify_each_element() {
    let folder = Folder::new("rdma-reduction");
    let (hosts, shell) = (folder.file("hosts.yaml"), folder.file("rsh"));
    fs::write(&shell, "exec sh -c \"$2\"\n").unwrap();
    let at = |name: &str, number: u32, port: &str| {
        let env = format!("{{NCCL_IB_HCA: \"={port}\", EVENKEEL_TRANSPORT: rdma}}");
        format!("  - {{name: {name}, address: 10.77.0.{number}, port: 0, env: {env}}}\n")
    };
    let (server, client) = (at("cpu", 2, "rxe1"), at("gpu", 1, "rxe0"));
    fs::write(&hosts, format!("servers:\n{}clients:\n{}", server.repeat(2), client.repeat(3)))
        .unwrap();
    let rsh = format!("sh {shell}");
    // What comes with its header, what does not, and several pieces for each server.
    for (size, chunk) in [("4K", "1K"), ("1028K", "300K")] {
        let how = format!("--size {size} --chunksize {chunk} -n 1 -w 0 --json");
        let mut command = bench(&format!("reduction --hosts {hosts} {how}"));
        command.args(["--rsh", &rsh]).env_remove("NCCL_SOCKET_IFNAME");
        let ended = Running::start(command).end().passed();
        assert!(!ended.err.contains("lost"), "{ended:?}");
        let report = ended.report();
        assert_eq!(report["clients"]["wrong"], 0, "{report}");
        assert!(report["servers"]["send"]["len"].as_u64() > Some(0), "{report}");
    }
}

/// A server at the second port, with metrics.
fn serve(port: u16, metrics: u16) -> Command {
    let program = Path::new(env!("CARGO_BIN_EXE_evenkeel-bench"));
    let mut serve = Command::new(program.with_file_name("evenkeel-reduction-server"));
    serve.args(["serve", "--until-stdin-closes", "--timeline", "-"]);
    serve.args(["--listen", &format!("10.77.0.2:{port}")]);
    serve.args(["--metrics", &format!("127.0.0.1:{metrics}")]);
    serve.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    by_rdma(&mut serve, "rxe1");
    serve
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn rdma_and_tcp_ranks_share_a_reduction_server() {
    let mut command = serve(7471, 9471);
    command.env("EVENKEEL_TRANSPORT", "auto");
    let _server = Running::start(command);
    let line = "reduction --size 1M --chunksize 300K -n 2 -w 1";
    let carriers = ["rdma", "tcp"];
    let ranks = ranks(2, line, |rank, command| {
        by_rdma(command, "rxe0");
        command.env("EVENKEEL_TRANSPORT", carriers[rank]).env("NCCL_SOCKET_IFNAME", "eth0");
        command.env("EVENKEEL_REDUCTION_SERVERS", "10.77.0.2:7471").env("NCCL_DEBUG", "INFO");
    });
    for (ended, carrier) in end_all(ranks).into_iter().map(Ended::passed).zip(carriers) {
        let said = format!("{}{}", ended.out, ended.err);
        let opened: Vec<&str> =
            said.lines().filter(|line| line.contains("connection opened peer=10.77.0.2")).collect();
        let is_right = |line: &&str| line.contains(&format!("transport={carrier}"));
        assert!(!opened.is_empty() && opened.iter().all(is_right), "{carrier}: {said}");
        assert!(carrier != "rdma" || said.contains(" 0 wrong"), "{said}");
    }
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn rdma_killed_reduction_server_is_named() {
    let mut server = Running::start(serve(7470, 9470));
    let ranks = ranks(2, "reduction --size 1M --chunksize 64K -n 1000000", |_, command| {
        by_rdma(command, "rxe0");
        command.env("EVENKEEL_REDUCTION_SERVERS", "10.77.0.2:7470");
    });
    let reduced = || values(&scrape(9470)?, "evenkeel_reduction_pieces_total").into_iter().next();
    let deadline = Instant::now() + PATIENCE;
    while reduced().is_none_or(|pieces| pieces < 20.0) {
        assert!(Instant::now() < deadline, "nothing is reduced");
        thread::yield_now();
    }
    server.kill();
    for ended in end_all(ranks) {
        assert_eq!(ended.status.code(), Some(1), "{ended:?}");
        ended.failed("reduction server 10.77.0.2:7470");
    }
}

#[test]
fn rdma_core_missing_falls_back_to_tcp() {
    let folder = Folder::new("no-rdma-core");
    let library = folder.file("libibverbs.so.1");
    fs::write(&library, "").unwrap();
    let libraries = Path::new(&library).parent().unwrap().to_owned();
    let run_by = |transport: &str| {
        end_all(ranks(2, "net -b 64K -e 64K -n 4 --json", |_, command| {
            command.env("LD_LIBRARY_PATH", &libraries);
            command.env("EVENKEEL_TRANSPORT", transport).env("NCCL_DEBUG", "INFO");
        }))
    };
    for (rank, ended) in run_by("auto").into_iter().map(Ended::passed).enumerate() {
        assert!(
            ended.err.contains("TCP carries all: libibverbs.so.1 cannot be loaded"),
            "{ended:?}"
        );
        if rank == 0 {
            assert_eq!(ended.report()["network"]["transport"], "tcp", "{ended:?}");
        }
    }
    for ended in run_by("rdma") {
        ended.failed("libibverbs.so.1 cannot be loaded");
    }
}

#[test]
fn rdma_required_without_a_device_is_an_error() {
    run("collective --spawn 2 --transport rdma --tcp-device lo").failed("NCCL_IB_HCA");
    let port = "--ib-device none0 --ib-port 1 --ib-index 0";
    run(&format!("collective --spawn 2 --transport ibverbs {port}")).failed("EVENKEEL_TRANSPORT");
    let mut command = bench("reduction --ranks 2 --run-type ring --size 64K --transport rdma");
    command.env("NCCL_IB_HCA", "=none0");
    Running::start(command).end().failed("EVENKEEL_TRANSPORT");
    let mut command = bench("allreduce --spawn 2 -b 4 -e 4");
    by_rdma(&mut command, "none0");
    Running::start(command).end().failed("EVENKEEL_TRANSPORT");
}
