//! `evenkeel-bench collective`: real processes, all stores and transports, results checked, a rank lost.

use std::process::Command;
use std::time::Instant;

use crate::process::{Ended, Running, bench, is_row, ranks_with, run};

/// Everything that can be measured, as rows of a table with nothing wrong.
#[test]
fn collective_benchmarks_are_verified() {
    for benchmark in [
        "allreduce",
        "allreduce_ring",
        "new_allreduce_ring",
        "allreduce_ring_chunked",
        "allreduce_halving_doubling",
        "allreduce_recursive_doubling",
        "allreduce_bcube",
        "allreduce_hierarchical",
        "broadcast_one_to_all",
        "reduce",
        "reduce_scatter",
        "allgather_ring",
        "allgather_v",
        "alltoall",
        "alltoall_v",
        "gather",
        "scatter",
        "barrier_all_to_all",
        "pairwise_exchange",
    ] {
        let ended = collective(&["--spawn", "3", "--transport", "shm", benchmark]);
        assert_eq!(rows(&ended), 2, "{benchmark}: {ended:?}");
    }
    let ended = collective(&["--spawn", "2", "sendrecv_roundtrip", "--threads", "2"]);
    assert_eq!(rows(&ended), 2, "{ended:?}");
    let ended = collective(&[
        "--spawn",
        "2",
        "sendrecv_stress",
        "--messages",
        "7",
        "--sync=true",
        "--busy-poll",
    ]);
    assert_eq!(rows(&ended), 2, "{ended:?}");
    let ended =
        collective(&["--spawn", "3", "--transport", "auto", "--halfprecision", "--inputs", "2"]);
    assert!(rows(&ended) == 2 && ended.out.contains("of float16, 3 ranks, auto lo"), "{ended:?}");
    let ended = collective(&["--spawn", "2", "--inputs", "3", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&ended.out).unwrap();
    assert_eq!((&json["transport"], &json["verified"]), (&"tcp".into(), &true.into()));
    assert_eq!(json["rows"][1]["elements"], 50_001);
    let ended = collective(&["--spawn", "9", "--in-process", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&ended.out).unwrap();
    assert_eq!((&json["ranks"], json["rows"].as_array().unwrap().len()), (&9.into(), 2));
    let cores = std::thread::available_parallelism().unwrap().get() as u64;
    assert!((1..=cores).contains(&json["io_threads"].as_u64().unwrap()), "{ended:?}");
}

/// With the files that Gloo's benchmark takes, made here.
#[test]
fn collective_tls_with_certificates() {
    let folder = std::env::temp_dir().join(format!("evenkeel-tls-{}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    let file = |name: &str, text: String| {
        let path = folder.join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::new(vec![]).unwrap();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let authority = file("ca.pem", params.self_signed(&key).unwrap().pem());
    let issuer = rcgen::Issuer::new(params, key);
    let key = rcgen::KeyPair::generate().unwrap();
    let params = rcgen::CertificateParams::new(vec!["rank".to_owned()]).unwrap();
    let certificate = file("rank.pem", params.signed_by(&key, &issuer).unwrap().pem());
    let key = file("rank.key", key.serialize_pem());
    let drawing = folder.join("drawing.svg");
    let tls = ["--spawn", "3", "--transport", "tls", "--cert", &certificate, "--pkey", &key];
    let plot = ["--ca-file", &authority, "--plot", drawing.to_str().unwrap()];
    let ended = collective(&[&tls[..], &plot].concat());
    assert!(rows(&ended) == 2 && ended.out.contains("3 ranks, tls lo"), "{ended:?}");
    assert!(std::fs::read_to_string(drawing).unwrap().contains("allreduce, 3 ranks over tls"));
    std::fs::remove_dir_all(folder).unwrap();
}

/// The command line of Gloo's README, and the benchmark of Gloo's that has no counterpart here.
#[test]
fn collective_takes_gloo_command_lines() {
    let help = run(&["collective", "--help"]);
    assert!(help.status.success() && !help.out.contains("isendirecv"), "{help:?}");
    let whole = ["collective", "--spawn", "2", "--transport", "shm", "--iteration-count", "1"];
    let sweep = ["--warmup-iters", "1", "--elements", "-1", "--busy-poll=false"];
    let ended = run(&[&whole[..], &sweep].concat());
    assert_eq!(rows(&ended), 21, "{ended:?}");
    let ended = collective(&["--spawn", "2", "isendirecv_stress"]);
    assert!(!ended.status.success() && ended.err.contains("isendirecv_stress"), "{ended:?}");
}

#[test]
fn collective_rendezvous_by_folder_or_rank_0() {
    let folder = std::env::temp_dir().join(format!("evenkeel-meet-{}", std::process::id()));
    let path = folder.to_str().unwrap();
    for place in [&["--shared-path", path][..], &[]] {
        let arguments =
            [&["collective", "--elements", "10", "--iteration-count", "3"][..], place].concat();
        let mut all = ranks_with(3, &arguments, |_, _| {});
        let others = all.split_off(1);
        assert_eq!(rows(&all.remove(0).end()), 1);
        for other in others {
            let ended = other.end();
            assert!(ended.status.success() && ended.out.is_empty(), "{ended:?}");
        }
    }
    std::fs::remove_dir_all(folder).unwrap();
}

/// With a real Redis server, which ends with this test.
#[test]
fn collective_rendezvous_by_redis() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let mut server = Command::new("setpriv")
        .args(["--pdeathsig", "KILL", "redis-server", "--bind", "127.0.0.1", "--save", ""])
        .args(["--port", &port.to_string()])
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("setpriv and redis-server are needed: apt-get install util-linux redis-server");
    let deadline = Instant::now() + std::time::Duration::from_secs(30);
    while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(server.try_wait().unwrap().is_none() && Instant::now() < deadline, "redis-server");
        std::thread::yield_now();
    }
    let port = port.to_string();
    let arguments = ["collective", "--elements", "10", "--iteration-count", "3"];
    let store = ["--redis-host", "127.0.0.1", "--redis-port", &port, "--prefix", "run"];
    let ended = run(&[&arguments[..], &store, &["--spawn", "3"]].concat());
    server.kill().unwrap();
    server.wait().unwrap();
    assert_eq!(rows(&ended), 1, "{ended:?}");
}

#[test]
fn collective_flag_errors_are_one_line() {
    for (arguments, says) in [
        (&["--elements", "1"][..], "WORLD_SIZE"),
        (&["--size", "2", "--rank", "2", "--shared-path", "/tmp"], "rank 2 is not below"),
        (&["--spawn", "2", "--tcp-device", "none0"], "none0"),
        (&["--spawn", "3", "sendrecv_roundtrip"], "2 ranks"),
        (&["--spawn", "2", "pairwise_exchange", "--destinations", "2"], "--destinations 2"),
        (&["--spawn", "2", "--transport", "tls"], "--cert, --pkey and --ca-file"),
        (
            &["--spawn", "2", "--transport", "tls", "--cert", "c", "--pkey", "k", "--ca-path", "/"],
            "TLS: c:",
        ),
        (&["--spawn", "2", "--inputs", "2", "broadcast"], "--inputs 2"),
        (&["--in-process"], "--spawn"),
        (&["--size", "1", "--rank", "0", "--store", "http://h"], "is not a store"),
        (&["--size", "1", "--rank", "0", "--redis-host", "127.0.0.1", "-p", "1"], "127.0.0.1:1"),
    ] {
        let ended = collective(arguments);
        assert!(!ended.status.success() && ended.err.contains(says), "{arguments:?}: {ended:?}");
    }
}

/// Killed: its process is gone. Stopped: it is there and does nothing. All others name it, in less than the timeout.
#[test]
fn collective_lost_rank_is_named_by_every_other() {
    for transport in ["tcp", "shm"] {
        for (signal, says) in
            [("KILL", "its process has exited"), ("STOP", "its process does not respond")]
        {
            let arguments = [
                "collective",
                "--transport",
                transport,
                "--elements",
                "1000,1000,1000",
                "--timeout",
                "8",
                "--iteration-time",
                "60s",
                "--no-verify",
                "allreduce_ring",
            ];
            let mut all = ranks_with(4, &arguments, |_, _| {});
            all[0].line(|line| line.starts_with('#'));
            let victim = all.remove(2);
            let sent = Command::new("kill")
                .args([&format!("-{signal}"), &victim.id().to_string()])
                .status();
            assert!(sent.unwrap().success());
            let begun = Instant::now();
            for (rank, other) in all.into_iter().enumerate() {
                let ended = other.end();
                assert!(!ended.status.success());
                let named = ended.err.contains("rank 2 (") && ended.err.contains(says);
                assert!(named, "{transport} {signal}: rank {rank} says {}", ended.err);
            }
            assert!(begun.elapsed().as_secs() < 12, "{transport} {signal}: {:?}", begun.elapsed());
            drop::<Running>(victim);
        }
    }
}

fn collective(arguments: &[&str]) -> Ended {
    let few = ["--elements", "7,50001", "--iteration-count", "3", "--warmup-iters", "1"];
    let few = if arguments.contains(&"--elements") { &[][..] } else { &few };
    run(&[&["collective"][..], few, arguments].concat())
}

/// Rows of a table, of a run in which nothing was wrong.
fn rows(ended: &Ended) -> usize {
    assert!(ended.status.success() && !ended.err.contains("VERIFY"), "{ended:?}");
    ended.out.lines().filter(|line| is_row(line)).count()
}

#[test]
fn collective_help_has_gloo_flags() {
    let ended = Running::start(bench(&["collective", "--help"])).end();
    for flag in
        ["-s, --size", "-h, --redis-host", "-x, --prefix", "--shared-path", "--iteration-time"]
    {
        assert!(ended.out.contains(flag), "{flag}: {}", ended.out);
    }
}
