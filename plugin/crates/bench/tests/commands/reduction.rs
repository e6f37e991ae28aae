//! `evenkeel-bench reduction`, with servers and ranks on this machine.

use std::fs;
use std::net::TcpListener;
use std::path::Path;

use crate::process::{Folder, run};

fn built() {
    let program = Path::new(env!("CARGO_BIN_EXE_evenkeel-bench"));
    let server = program.with_file_name("evenkeel-reduction-server");
    assert!(server.exists(), "no {}: cargo build -p evenkeel-reduction-server", server.display());
}

const SMALL: [&str; 9] = ["reduction", "--ranks", "2", "--size", "1M", "-n", "2", "-w", "1"];

#[test]
fn a_run_says_how_long_each_step_took_and_its_log_says_it_again() {
    built();
    let folder = Folder::new("log");
    let (log, svg, again) = (folder.file("log"), folder.file("a.svg"), folder.file("b.svg"));
    let more = ["--servers", "2", "--chunksize", "300K", "--server-threads", "1"];
    let kept = ["--log-dir", &log, "--plot", &svg];
    let ended = run(&[&SMALL[..], &more, &kept].concat());
    assert!(ended.status.success(), "{ended:?}");
    for text in [" 0 wrong", "e2e", "req", "2 servers", "recv", "reduce", "send"] {
        assert!(ended.out.contains(text), "no {text} in {ended:?}");
    }
    let analyzed = run(&["reduction", "--analyze", &log, "--plot", &again, "--xlim", "0,1000"]);
    assert_eq!(analyzed.out, ended.out);
    for file in [svg, again] {
        let drawn = fs::read_to_string(file).unwrap();
        assert!(drawn.contains("server 1") && drawn.contains("rank 1"), "{drawn}");
    }
    let json = run(&["reduction", "--analyze", &log, "--json"]);
    let json: serde_json::Value = serde_json::from_str(&json.out).unwrap();
    // Two reductions of four operations each on two ranks.
    assert_eq!(json["clients"]["e2e"]["len"], 16);
    assert!(json["servers"]["reduce"]["len"].as_u64() > Some(0), "{json}");
}

#[test]
fn jobs_share_servers() {
    built();
    let ended = run(&[&SMALL[..], &["--servers", "1", "--jobs", "3", "--json"]].concat());
    assert!(ended.status.success(), "{ended:?}");
    let json: serde_json::Value = serde_json::from_str(&ended.out).unwrap();
    let clients = &json["clients"];
    // Two reductions on two ranks of each job.
    assert_eq!((clients["jobs"].as_u64(), clients["e2e"]["len"].as_u64()), (Some(3), Some(12)));
    assert_eq!(clients["wrong"], 0);
    let ended = run(&["reduction", "--rank", "0", "--world-size", "1", "--jobs", "2"]);
    assert!(ended.err.contains("--jobs start ranks"), "{ended:?}");
}

#[test]
fn hosts_of_a_file_are_reached_by_a_command() {
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
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let rsh = format!("sh {shell}");
    let arguments =
        ["reduction", "--hosts", &hosts, "--rsh", &rsh, "--master-port", &port, "--size", "64K"];
    let ended = run(&[&arguments[..], &["-n", "2", "-w", "0"]].concat());
    assert!(ended.status.success() && ended.out.contains(" 0 wrong"), "{ended:?}");
    let called = fs::read_to_string(format!("{shell}.called")).unwrap();
    let mut called: Vec<&str> = called.lines().collect();
    called.sort_unstable();
    assert_eq!(called, ["cpu-0", "gpu-0", "gpu-1"]);
}

#[test]
fn a_sweep_says_which_setting_was_best() {
    built();
    let more = ["--servers", "1", "--sweep", "chunksize=256K,1M", "--sweep", "EVENKEEL_FLOWS=1"];
    let ended = run(&[&SMALL[..], &more].concat());
    assert!(ended.status.success(), "{ended:?}");
    for text in ["chunksize=256K EVENKEEL_FLOWS=1 ", "chunksize=1M EVENKEEL_FLOWS=1 ", "# best: "] {
        assert!(ended.out.contains(text), "no {text} in {ended:?}");
    }
}

#[test]
fn the_same_vector_goes_round_a_ring() {
    let ended = run(&[&SMALL[..], &["--run-type", "ring"]].concat());
    assert!(ended.status.success(), "{ended:?}");
    assert!(ended.out.contains(", ring: 2 ranks") && ended.out.contains(" 0 wrong"), "{ended:?}");
}

#[test]
fn a_plugin_without_servers_is_told_from_one_with() {
    let ended = run(&["reduction", "--ranks", "2", "--size", "1M"]);
    assert!(!ended.status.success());
    assert!(ended.err.contains("are reduction servers given?"), "{ended:?}");
}
