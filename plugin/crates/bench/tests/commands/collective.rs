//! `evenkeel-bench collective`: real processes, all stores and transports, results checked, a rank
//! lost.

use std::process::{Command, Stdio};
use std::time::Instant;

use crate::process::{Ended, Folder, Running, bench, end_all, ranks, run};

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
        "allreduce_direct",
        "allreduce_hierarchical",
        "allreduce_local",
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
    ] {
        collective(&format!("--spawn 3 --transport shm {benchmark}")).has_rows(2);
    }
    collective("--spawn 2 sendrecv_roundtrip --threads 2").has_rows(2);
    for (transport, stress) in
        [("tcp", "sendrecv_stress"), ("tcp", "isendirecv_stress"), ("shm", "isendirecv_stress")]
    {
        let how = format!("--transport {transport} --messages 7 --threads 2");
        let ended = collective(&format!("--spawn 2 {how} {stress}")).has_rows(2);
        assert!(ended.out.starts_with(&format!("# {stress} of float32, 2 ranks")), "{ended:?}");
    }
    let ended = collective("--spawn 4 --base 4 --nanos --show-all-errors allreduce_bcube");
    assert!(ended.has_rows(2).out.contains("p50 (ns)"));
    collective("--spawn 4 --link-rates 9,9,1,8 allreduce_direct").has_rows(2);
    let json = collective("--spawn 3 --inputs 3 --json allreduce_local").passed().report();
    assert_eq!(json["benchmark"], "allreduce_local");
    let ended = collective("--spawn 3 --transport auto --halfprecision --inputs 2").has_rows(2);
    assert!(ended.out.contains("of float16, 3 ranks, auto lo"), "{ended:?}");
    let json = collective("--spawn 2 --inputs 3 --json").passed().report();
    assert_eq!((&json["transport"], &json["verified"]), (&"tcp".into(), &true.into()));
    assert_eq!(json["rows"][1]["elements"], 50_001);
    let json = collective("--spawn 9 --in-process --json").passed().report();
    assert_eq!((&json["ranks"], json["rows"].as_array().unwrap().len()), (&9.into(), 2));
    let cores = std::thread::available_parallelism().unwrap().get() as u64;
    assert!((1..=cores).contains(&json["io_threads"].as_u64().unwrap()), "{json}");
}

/// As in sandboxes such as gVisor. Needs root.
#[test]
fn ranks_run_where_hosts_cannot_be_told_apart() {
    let without_boot_id = |line: &str| {
        let few = "--spawn 2 --elements 7,50001 --iteration-count 3 --warmup-iters 1";
        let inner = bench(&format!("collective {few} {line}"));
        let mut command = Command::new("unshare");
        let hidden = "mount -t tmpfs tmpfs /proc/sys/kernel/random && exec \"$@\"";
        command.args(["--mount", "sh", "-c", hidden, "sh"]).arg(inner.get_program());
        command.args(inner.get_args());
        command.envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Running::start(command).end()
    };
    let ended = without_boot_id("--transport auto").has_rows(2);
    let warned = ended.err.matches("TCP carries all, also between ranks of one host").count();
    assert_eq!(warned, 2, "once for each process: {ended:?}");
    let ended = without_boot_id("--transport tcp").has_rows(2);
    assert_eq!(ended.err, "");
    // The ranks of a process share it all the same.
    without_boot_id("--transport auto --in-process").has_rows(2);
    without_boot_id("--transport shm").failed("/proc/sys/kernel/random/boot_id");
}

/// With the files that Gloo's benchmark takes, made here.
#[test]
fn collective_tls_with_certificates() {
    let folder = Folder::new("tls");
    let file = |name: &str, text: String| {
        let path = folder.file(name);
        std::fs::write(&path, text).unwrap();
        path
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
    let drawing = folder.file("drawing.svg");
    let files = format!("--cert {certificate} --pkey {key} --ca-file {authority}");
    let ended =
        collective(&format!("--spawn 3 --transport tls {files} --plot {drawing}")).has_rows(2);
    assert!(ended.out.contains("3 ranks, tls lo"), "{ended:?}");
    assert!(std::fs::read_to_string(drawing).unwrap().contains("allreduce, 3 ranks over tls"));
}

/// What Gloo's README and its benchmark's help have.
#[test]
fn collective_takes_gloo_command_lines() {
    let help = run("collective --help").passed();
    for text in [
        "isendirecv_stress",
        "-s, --size",
        "-h, --redis-host",
        "-x, --prefix",
        "--shared-path",
        "--iteration-time",
    ] {
        assert!(help.out.contains(text), "{text}: {help:?}");
    }
    let whole = "collective --spawn 2 --transport shm --iteration-count 1 --warmup-iters 1";
    run(&format!("{whole} --elements -1 --busy-poll=false --verify")).has_rows(21);
    for low_latency in
        ["--sync=true --busy-poll=true", "--sync=1 --busy-poll Yes", "--sync T --busy-poll=0"]
    {
        let verify = "--spawn 2 --no-verify --verify --json allreduce_ring";
        let json = collective(&format!("{low_latency} {verify}")).passed().report();
        assert_eq!(json["verified"], true, "{json}");
    }
    let json = collective("--spawn 2 --sync=false --verify --no-verify --json").passed().report();
    assert_eq!(json["verified"], false, "{json}");
}

#[test]
fn collective_pairwise_exchange_divides_bytes_between_destinations() {
    let few = "--iteration-count 2 --warmup-iters 1 pairwise_exchange";
    let ended = collective(&format!("--spawn 4 --destinations 2 --elements 1001 --json {few}"));
    let json = ended.passed().report();
    assert_eq!((&json["element"], &json["rows"][0]["bytes"]), (&"uint8".into(), &1001.into()));
    assert_eq!(json["errors"], serde_json::json!([]), "{json}");
    // The sweep begins where each destination has a byte.
    let sweep = "--spawn 8 --in-process --destinations 3 --elements -1";
    collective(&format!("{sweep} {few}")).has_rows(19);
}

#[test]
fn collective_cuda_benchmarks_say_what_they_need() {
    for name in [
        "cuda_allreduce_bcube",
        "cuda_allreduce_halving_doubling",
        "cuda_allreduce_halving_doubling_pipelined",
        "cuda_allreduce_ring_chunked",
        "cuda_broadcast_one_to_all",
    ] {
        let ended = collective(&format!("--spawn 2 {name}"));
        let says = format!("error: {name} needs buffers in the memory of a GPU");
        assert!(!ended.status.success() && ended.err.starts_with(&says), "{ended:?}");
        assert_eq!(ended.err.trim_end().lines().count(), 1, "{ended:?}");
    }
}

/// The test sets mpirun's variables. It runs no mpirun.
#[test]
fn collective_mpi_takes_ranks_from_mpirun() {
    let folder = Folder::new("mpirun");
    let line = "collective --mpi --elements 10 --iteration-count 3 --timeout 30";
    let by_mpirun = |rank: usize, command: &mut Command| {
        command
            .env("RANK", "7")
            .env_remove("WORLD_SIZE")
            .env_remove("MASTER_ADDR")
            .env("OMPI_COMM_WORLD_RANK", rank.to_string())
            .env("OMPI_COMM_WORLD_SIZE", "3")
            .env("OMPI_COMM_WORLD_LOCAL_SIZE", "3")
            .env("PMIX_SERVER_TMPDIR", folder.file("session"));
    };
    let ended: Vec<Ended> =
        end_all(ranks(3, line, by_mpirun)).into_iter().map(|ended| ended.passed()).collect();
    assert_eq!(ended[0].rows().len(), 1, "{ended:?}");
    assert!(ended[0].out.contains("3 ranks, tcp lo"), "{ended:?}");
    // Ranks of several hosts share no folder of mpirun's.
    let across = |rank: usize, command: &mut Command| {
        by_mpirun(rank, command);
        command.env("OMPI_COMM_WORLD_LOCAL_SIZE", "2");
    };
    end_all(ranks(1, line, across))[0].failed("--shared-path");
    collective("--mpi").failed("mpirun has not started");
}

#[test]
fn collective_rendezvous_by_folder_or_rank_0() {
    let folder = Folder::new("meet");
    for place in [format!("--shared-path {}", folder.file("store")), String::new()] {
        let line = format!("collective --elements 10 --iteration-count 3 {place}");
        for (rank, ended) in end_all(ranks(3, &line, |_, _| {})).into_iter().enumerate() {
            let rows = ended.passed().rows().len();
            assert_eq!(rows, usize::from(rank == 0));
        }
    }
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
        .stdout(Stdio::null())
        .spawn()
        .expect("setpriv and redis-server are needed: apt-get install util-linux redis-server");
    let deadline = Instant::now() + std::time::Duration::from_secs(30);
    while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(server.try_wait().unwrap().is_none() && Instant::now() < deadline, "redis-server");
        std::thread::yield_now();
    }
    let redis = format!("--redis-host 127.0.0.1 --redis-port {port}");
    let few = "collective --spawn 3 --elements 10 --iteration-count 3 --prefix run";
    let spawned = run(&format!("{few} {redis}"));
    // As Gloo's README starts each rank.
    let each = "collective --size 2 --prefix other --transport tcp";
    let long = "--elements 100 --iteration-time 50ms";
    let started = ranks(2, &format!("{each} {redis} {long}"), |rank, command| {
        command.args(["--rank", &rank.to_string(), "allreduce_ring_chunked"]);
        for name in ["RANK", "WORLD_SIZE", "MASTER_ADDR"] {
            command.env_remove(name);
        }
    });
    let started = end_all(started);
    server.kill().unwrap();
    server.wait().unwrap();
    spawned.has_rows(1);
    assert!(started.iter().all(|ended| ended.status.success()), "{started:?}");
    assert_eq!(started[0].rows().len(), 1, "{started:?}");
}

#[test]
fn collective_flag_errors_are_one_line() {
    let tls = "--spawn 2 --transport tls";
    let bad_certificate = format!("{tls} --cert c --pkey k --ca-path /");
    for (line, says) in [
        ("--elements 1", "WORLD_SIZE"),
        ("--size 2 --rank 2 --shared-path /tmp", "rank 2 is not below"),
        ("--spawn 2 --tcp-device none0", "none0"),
        ("--spawn 3 sendrecv_roundtrip", "2 ranks"),
        ("--spawn 2 pairwise_exchange --destinations 2", "--destinations 2"),
        ("--spawn 3 pairwise_exchange", "2 ranks or a multiple, there are 3"),
        ("--spawn 2 pairwise_exchange --elements 0", "at least one byte"),
        ("--spawn 3 isendirecv_stress", "2 ranks"),
        ("--spawn 2 --busy-poll=true", "--sync=true"),
        ("--spawn 2 --sync=perhaps", "--sync"),
        ("--spawn 2 --gpudirect", "CUDA"),
        ("--spawn 2 --tcp-device lo,none0", "none0"),
        ("--spawn 2 --ib-device mlx5_0", "--transport ibverbs"),
        ("--spawn 2 --transport ibverbs --ib-port 1", "--ib-device"),
        ("--spawn 2 --transport ibverbs --ib-device mlx5_0:2", "mlx5_0:2"),
        (tls, "--cert, --pkey and --ca-file"),
        (&bad_certificate, "TLS: c:"),
        ("--spawn 2 --inputs 2 broadcast", "--inputs 2"),
        ("--spawn 2 --link-rates 1,2,3 allreduce_direct", "--link-rates has 3 rates for 2 ranks"),
        ("--spawn 2 --link-rates 1,0", "--link-rates"),
        ("--size 1 --rank 0 --link-rates 1,2 --store file:/tmp", "--link-rates has 2 rates"),
        ("--in-process", "--spawn"),
        ("--size 1 --rank 0 --store http://h", "is not a store"),
        ("--size 1 --rank 0 --redis-host 127.0.0.1 -p 1", "127.0.0.1:1"),
    ] {
        collective(line).failed(says);
    }
}

/// Killed: its process is gone. Stopped: it is there and does nothing. All others name it, in less
/// than the timeout.
#[test]
fn collective_lost_rank_is_named_by_every_other() {
    for transport in ["tcp", "shm"] {
        for (signal, says) in
            [("KILL", "its process has exited"), ("STOP", "its process does not respond")]
        {
            let few = "--elements 1000,1000,1000 --timeout 8 --iteration-time 60s --no-verify";
            let line = format!("collective --transport {transport} {few} allreduce_ring");
            let mut all = ranks(4, &line, |_, _| {});
            all[0].line(|line| line.starts_with('#'));
            let victim = all.remove(2);
            let sent = Command::new("kill")
                .args([&format!("-{signal}"), &victim.id().to_string()])
                .status();
            assert!(sent.unwrap().success());
            let begun = Instant::now();
            for ended in end_all(all) {
                ended.failed("rank 2 (");
                ended.failed(says);
            }
            assert!(begun.elapsed().as_secs() < 12, "{transport} {signal}: {:?}", begun.elapsed());
            drop::<Running>(victim);
        }
    }
}

fn collective(line: &str) -> Ended {
    let few = "--elements 7,50001 --iteration-count 3 --warmup-iters 1";
    let few = if line.contains("--elements") { "" } else { few };
    run(&format!("collective {few} {line}"))
}

impl Ended {
    /// Asserts that its table has so many rows, and that no result was wrong.
    fn has_rows(self, count: usize) -> Self {
        let ended = self.passed();
        assert!(ended.rows().len() == count && !ended.err.contains("VERIFY"), "{ended:?}");
        ended
    }
}
