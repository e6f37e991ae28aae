//! `evenkeel-bench reduction`, with servers and ranks on this machine.

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::process::{Ended, Folder, Running, bench, end_all, ranks, report, run};

fn built() {
    let program = Path::new(env!("CARGO_BIN_EXE_evenkeel-bench"));
    let server = program.with_file_name("evenkeel-reduction-server");
    assert!(server.exists(), "no {}: cargo build -p evenkeel-reduction-server", server.display());
}

const SMALL: &str = "reduction --ranks 2 --size 1M -n 2 -w 1";
/// Of ranks that are started one by one.
const EACH: &str = "reduction --size 1M --chunksize 300K -n 2 -w 1";

#[test]
fn reduction_steps_are_reported_and_logged() {
    built();
    let folder = Folder::new("log");
    let (log, svg, again) = (folder.file("log"), folder.file("a.svg"), folder.file("b.svg"));
    let kept = format!("--log-dir {log} --plot {svg}");
    let more = "--servers 2 --chunksize 300K --server-threads 1";
    let ended = run(&format!("{SMALL} {more} {kept}")).passed();
    for text in [" 0 wrong", "e2e", "req", "2 servers", "recv", "reduce", "send"] {
        assert!(ended.out.contains(text), "no {text} in {ended:?}");
    }
    let analyzed = run(&format!("reduction --analyze {log} --plot {again} --xlim 0,1000"));
    assert_eq!(analyzed.out, ended.out);
    for file in [svg, again] {
        let drawn = fs::read_to_string(file).unwrap();
        assert!(drawn.contains("server 1") && drawn.contains("rank 1"), "{drawn}");
    }
    let json = report(&format!("reduction --analyze {log}"));
    // Two reductions of four operations each on two ranks.
    assert_eq!(json["clients"]["e2e"]["len"], 16);
    assert!(json["servers"]["reduce"]["len"].as_u64() > Some(0), "{json}");
}

#[test]
fn reduction_drivers_reach_every_rank() {
    built();
    for (how, driver) in
        [("", "sleep"), ("--driver nccl", "nccl"), ("--driver nccl --run-type ring", "nccl")]
    {
        let json = report(&format!("{SMALL} --servers 1 {how}"));
        assert_eq!(
            (&json["clients"]["driver"], &json["clients"]["wrong"]),
            (&driver.into(), &0.into())
        );
    }
}

#[test]
fn reduction_jobs_share_servers() {
    built();
    let json = report(&format!("{SMALL} --servers 1 --jobs 3"));
    let clients = &json["clients"];
    // Two reductions on two ranks of each job.
    assert_eq!((clients["jobs"].as_u64(), clients["e2e"]["len"].as_u64()), (Some(3), Some(12)));
    assert_eq!(clients["wrong"], 0);
    run("reduction --rank 0 --world-size 1 --jobs 2").failed("--jobs start ranks");
}

#[test]
fn reduction_hosts_are_reached_by_rsh() {
    built();
    let folder = Folder::new("hosts");
    let (hosts, shell) = (folder.file("hosts.yaml"), folder.file("rsh"));
    fs::write(&shell, "echo \"$1\" >> \"$0.called\"\nexec sh -c \"$2\"\n").unwrap();
    let file = "
servers:
  - {name: cpu-0, address: 127.0.0.1, port: 0, env: {EVENKEEL_FLOWS: 2}}
clients:
  - {name: gpu-0, address: 127.0.0.1}
  - {name: gpu-1, address: 127.0.0.1}
";
    fs::write(&hosts, file).unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let line = format!("reduction --hosts {hosts} --master-port {port} --size 64K -n 2 -w 0");
    let mut command = bench(&line);
    command.args(["--rsh", &format!("sh {shell}")]);
    let ended = Running::start(command).end().passed();
    assert!(ended.out.contains(" 0 wrong"), "{ended:?}");
    let called = fs::read_to_string(format!("{shell}.called")).unwrap();
    let mut called: Vec<&str> = called.lines().collect();
    called.sort_unstable();
    assert_eq!(called, ["cpu-0", "gpu-0", "gpu-1"]);
}

/// A server at a port that was free a moment ago.
fn serve(more: &[&str]) -> (Running, String) {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let program = Path::new(env!("CARGO_BIN_EXE_evenkeel-bench"));
    let mut command = Command::new(program.with_file_name("evenkeel-reduction-server"));
    command
        .args(["serve", "--threads", "1", "--listen", &address])
        .args(more)
        .env("NCCL_SOCKET_IFNAME", "lo")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    (Running::start(command), address)
}

#[test]
fn reduction_tree_of_servers() {
    built();
    let (_root, root) = serve(&[]);
    let leaves = [serve(&["--upstream", &root]), serve(&["--upstream", &root])];
    let ranks_of_leaves = ranks(3, EACH, |rank, command| {
        command.env("EVENKEEL_REDUCTION_SERVERS", &leaves[rank % 2].1);
    });
    let ended: Vec<Ended> = end_all(ranks_of_leaves).into_iter().map(Ended::passed).collect();
    let said = &ended[0].out;
    assert!(said.contains("3 ranks") && said.contains(" 0 wrong"), "{said}");
    // Below nothing, two lists are a mistake.
    let others = [serve(&[]), serve(&[])];
    for ended in end_all(ranks(2, EACH, |rank, command| {
        command.env("EVENKEEL_REDUCTION_SERVERS", &others[rank].1).env("NCCL_DEBUG", "WARN");
    })) {
        ended.failed("2 lists of reduction servers");
    }
}

#[test]
fn reduction_sweep_prints_the_best_setting() {
    built();
    let settings = "--sweep chunksize=256K,1M --sweep EVENKEEL_FLOWS=1";
    let ended = run(&format!("{SMALL} --servers 1 {settings}")).passed();
    for text in ["chunksize=256K EVENKEEL_FLOWS=1 ", "chunksize=1M EVENKEEL_FLOWS=1 ", "# best: "] {
        assert!(ended.out.contains(text), "no {text} in {ended:?}");
    }
}

#[test]
fn reduction_run_type_ring() {
    let ended = run(&format!("{SMALL} --run-type ring")).passed();
    assert!(ended.out.contains(", ring: 2 ranks") && ended.out.contains(" 0 wrong"), "{ended:?}");
}

#[test]
fn reduction_run_type_plugin() {
    built();
    let (_server, address) = serve(&[]);
    let ranks = ranks(2, &format!("{EACH} --run-type plugin"), |_, command| {
        command.env("EVENKEEL_REDUCTION_SERVERS", &address);
    });
    let ended: Vec<Ended> = end_all(ranks).into_iter().map(Ended::passed).collect();
    let said = &ended[0].out;
    assert!(said.contains("2 ranks reduce") && said.contains(" 0 wrong"), "{said}");
    // A table without devices leads nowhere.
    run(&format!("{SMALL} --run-type plugin")).failed("0 CollNet devices");
}

/// A stand-in that says how it was called, then what NCCL's benchmark would.
const STAND_IN: &str = "#!/bin/sh
echo \"$@ NCCL_COLLNET_ENABLE=$NCCL_COLLNET_ENABLE\" > \"$0.called\"
echo '#  Rank  0 Group  0 Pid 7 on gpu-0 device  0'
echo '#  Rank  1 Group  0 Pid 7 on gpu-0 device  1'
echo '#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong'
echo '     1048576        262144     float     sum      -1    500.0    2.10    2.10      0    400.0    2.62    2.62      0'
";

#[test]
fn reduction_run_type_nccl_gives_the_same_report() {
    let folder = Folder::new("nccl");
    let (program, log) = (folder.file("all_reduce_perf"), folder.file("log"));
    fs::write(&program, STAND_IN).unwrap();
    let mut command = bench(&format!("{SMALL} --run-type nccl --log-dir {log}"));
    command.args(["--nccl-tests", &format!("sh {program} -f 2")]);
    let ended = Running::start(command).end().passed();
    let line = "# NCCL, by nccl-tests: 2 ranks reduce 1048576 bytes of float";
    assert!(
        ended.out.starts_with(line) && ended.out.contains("500.0 us, 2.097 GB/s, 0 wrong"),
        "{ended:?}"
    );
    let called = fs::read_to_string(format!("{program}.called")).unwrap();
    assert!(called.starts_with("-f 2 -b 1048576 -e 1048576 -g 2 -n 2 -w 1 "), "{called}");
    assert!(called.contains("-d float -o sum NCCL_COLLNET_ENABLE=0"), "{called}");
    assert_eq!(run(&format!("reduction --analyze {log}")).out, ended.out);
    let json = report(&format!("reduction --analyze {log}"));
    assert_eq!((&json["clients"]["ranks"], &json["clients"]["e2e"]), (&2.into(), &Value::Null));
}

#[test]
fn reduction_run_type_nccl_errors_are_one_line() {
    let run_by = |nccl_tests: &str| {
        let mut command = bench(&format!("{SMALL} --run-type nccl"));
        command.args(["--nccl-tests", nccl_tests]);
        let ended = Running::start(command).end();
        assert_eq!(ended.err.lines().count(), 1, "{ended:?}");
        ended
    };
    run_by("no_such_perf").failed("no_such_perf: no such program; build NVIDIA's nccl-tests");
    let folder = Folder::new("nccl-fails");
    let program = folder.file("fails");
    fs::write(&program, "echo 'x: Test CUDA failure: no CUDA-capable device'; exit 3").unwrap();
    let ended = run_by(&format!("sh {program}"));
    ended.failed("no CUDA-capable device");
    ended.failed("3");
    fs::write(&program, "echo nothing of use").unwrap();
    run_by(&format!("sh {program}")).failed("no line that is a measurement");
}

#[test]
fn reduction_split_limits_servers_per_operation() {
    built();
    let how = "--servers 3 --chunksize 256K --split 1 --server-threads 1 --piece 1M";
    let json = report(&format!("{SMALL} {how}"));
    // Two reductions of four operations, each whole at one of the servers; the checked one may be
    // counted as well.
    assert_eq!(
        (json["clients"]["wrong"].as_u64(), json["clients"]["send"]["len"].as_u64()),
        (Some(0), Some(16))
    );
}

#[test]
fn reduction_without_servers_is_an_error() {
    run("reduction --ranks 2 --size 1M").failed("are reduction servers given?");
}
