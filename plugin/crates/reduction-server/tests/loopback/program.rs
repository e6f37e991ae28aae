//! The program as another process: what it prints and serves, and how it exits.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use evenkeel_reduction::{Client, ClientError};
use evenkeel_reduction_kernels::{DataType, Op};
use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::harness::{
    TIMEOUT, all_reduce, data, join, join_within, members, members_with, transport,
};

/// A running server, killed when dropped.
struct Program {
    child: Child,
    address: String,
    metrics: String,
    errors: BufReader<std::process::ChildStderr>,
}

fn start(more: &[&str]) -> Program {
    start_with(more, &[])
}

fn start_with(more: &[&str], environment: &[(&str, &str)]) -> Program {
    let one_thread = if more.contains(&"--threads") { &[][..] } else { &["--threads", "1"] };
    start_bare(&[one_thread, more].concat(), environment)
}

fn start_bare(more: &[&str], environment: &[(&str, &str)]) -> Program {
    let mut child = Command::new(env!("CARGO_BIN_EXE_evenkeel-reduction-server"))
        .args(["serve", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"])
        .args(more)
        .env("NCCL_SOCKET_IFNAME", "lo")
        .envs(environment.iter().copied())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut errors = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    let mut last = 1;
    while !line.starts_with("listening at ") {
        assert!(last > 0, "it exited: {line}");
        line.clear();
        last = errors.read_line(&mut line).unwrap();
    }
    let mut words = line.split([' ', ',']).filter(|word| !word.is_empty());
    let address = words.nth(2).unwrap().to_owned();
    let url = words.nth(1).unwrap();
    let metrics = url.trim_start_matches("http://").trim_end_matches("/metrics").to_owned();
    Program { child, address, metrics, errors }
}

impl Program {
    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id().cast_signed()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    fn get(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(&self.metrics).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    }

    /// Waits until it exits. Returns its status.
    fn wait(&mut self) -> std::process::ExitStatus {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < deadline, "it does not exit");
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // It may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Number of threads of a process with this name, once all but the first have names of their own,
/// which each sets after it began.
fn threads(of: &Child, name: &str) -> usize {
    let deadline = Instant::now() + TIMEOUT;
    let folder = format!("/proc/{}", of.id());
    let first = fs::read_to_string(format!("{folder}/comm")).unwrap();
    loop {
        let tasks = fs::read_dir(format!("{folder}/task")).unwrap();
        let names: Vec<_> = tasks
            .filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok())
            .collect();
        if names.iter().filter(|other| **other == first).count() == 1 {
            return names.iter().filter(|other| other.starts_with(name)).count();
        }
        assert!(Instant::now() < deadline, "threads without a name: {names:?}");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn threads_default_to_the_cpus_of_the_process() {
    let program = start(&["--threads", "3"]);
    assert_eq!(threads(&program.child, "evenkeel-sum"), 3);
    // Without the flag: one for each CPU that the process may use.
    let all = sched_getaffinity(None).unwrap();
    let mut one = CpuSet::new();
    one.set((0..CpuSet::MAX_CPU).find(|cpu| all.is_set(*cpu)).unwrap());
    let started = thread::spawn(move || {
        // The affinity of this thread only, which its child inherits.
        sched_setaffinity(None, &one).unwrap();
        start_bare(&[], &[])
    });
    let program = started.join().unwrap();
    assert_eq!(threads(&program.child, "evenkeel-sum"), 1);
}

#[test]
fn metrics_are_counted_and_sigterm_drains() {
    let mut program = start(&["--memory", "64MiB"]);
    let transport = transport(&[]);
    let client = join(&transport, &[program.address.clone()], &members(1, "team-a/llama")[0]);
    let own = data(1, DataType::Float32, 300_000);
    assert_eq!(all_reduce(&client, &own, DataType::Float32, Op::Sum).unwrap(), own);
    let metrics = program.get("/metrics");
    for line in [
        "evenkeel_reduction_received_bytes_total{job=\"team-a/llama\"} 300000",
        "evenkeel_reduction_sent_bytes_total{job=\"team-a/llama\"} 300000",
        "evenkeel_reduction_communicators{job=\"team-a/llama\"} 1",
        "evenkeel_reduction_memory_limit_bytes 67108864",
        "# EOF",
    ] {
        assert!(metrics.contains(line), "no {line} in {metrics}");
    }
    assert!(program.get("/healthz").contains("200 OK"));
    assert!(program.get("/readyz").contains("200 OK"));
    program.signal(Signal::TERM);
    let mut line = String::new();
    while !line.contains("shutting down") {
        line.clear();
        assert!(program.errors.read_line(&mut line).unwrap() > 0);
    }
    let ready = program.get("/readyz");
    assert!(ready.contains("503") && ready.contains("1 communicators"), "{ready}");
    assert_eq!(all_reduce(&client, &own, DataType::Float32, Op::Sum).unwrap(), own);
    drop(client);
    assert!(program.wait().success());
}

/// The communicator of a rank that has left is the one that the others join.
#[test]
fn rank_that_leaves_before_another_joins_is_named() {
    let program = start(&[]);
    let servers = [program.address.clone()];
    let transport = transport(&[]);
    let members = members(2, "short");
    drop(join(&transport, &servers, &members[1]));
    let gauge = "evenkeel_reduction_ranks{job=\"short\"}";
    let begin = Instant::now();
    let metrics = loop {
        let metrics = program.get("/metrics");
        if !metrics.contains(&format!("{gauge} 1")) {
            break metrics;
        }
        assert!(begin.elapsed() < TIMEOUT, "the rank does not leave");
    };
    assert!(metrics.contains("evenkeel_reduction_communicators{job=\"short\"} 1"), "{metrics}");
    let client = join(&transport, &servers, &members[0]);
    let sum = all_reduce(&client, &data(1, DataType::Float32, 300_000), DataType::Float32, Op::Sum);
    let error = sum.unwrap_err().to_string();
    assert!(error.contains("rank 1") && error.contains("left"), "{error}");
}

#[test]
fn drain_timeout_ends_the_server() {
    let mut program = start(&["--drain-timeout", "1s"]);
    let client = join(&transport(&[]), &[program.address.clone()], &members(1, "stays")[0]);
    program.signal(Signal::TERM);
    assert!(program.wait().success());
    drop(client);
}

#[test]
fn stopped_server_is_named_soon_after_the_timeout() {
    let program = start(&[]);
    let transport = transport(&[]);
    let names = [program.address.clone()];
    let timeout = Duration::from_secs(2);
    let client = join_within(&transport, &names, &members(1, "still")[0], timeout).unwrap();
    program.signal(Signal::STOP);
    let begin = Instant::now();
    let own = data(1, DataType::Float32, 100_000);
    let error = all_reduce(&client, &own, DataType::Float32, Op::Sum).unwrap_err().to_string();
    assert!(error.contains(&names[0]) && error.contains("no response for 2 s"), "{error}");
    // The error is due at the timeout. The maximum allows for a loaded machine.
    let elapsed = begin.elapsed();
    assert!(elapsed >= timeout && elapsed < 5 * timeout, "named after {elapsed:?}");
}

/// Two leaves with a rank each, and their root. The leaves' timeout is two seconds.
fn tree() -> (Program, [Program; 2], Vec<Client>) {
    tree_with(&[])
}

/// As [`tree`], with these variables for servers and clients.
fn tree_with(environment: &[(&str, &str)]) -> (Program, [Program; 2], Vec<Client>) {
    let root = start_with(&[], environment);
    let of_leaf = [environment, &[("EVENKEEL_REDUCTION_TIMEOUT", "2")]].concat();
    let leaf = || start_with(&["--upstream", &root.address], &of_leaf);
    let leaves = [leaf(), leaf()];
    let lists = leaves.each_ref().map(|leaf| [leaf.address.clone()]);
    let members = members_with(&[&lists[0], &lists[1]], "team-a/llama");
    let transport = transport(environment);
    let clients = (0..2).map(|rank| join(&transport, &lists[rank], &members[rank])).collect();
    (root, leaves, clients)
}

fn reduce_all(clients: &[Client]) -> Vec<Result<Vec<u8>, ClientError>> {
    let reduce =
        |client| all_reduce(client, &data(1, DataType::Int32, 300_000), DataType::Int32, Op::Max);
    thread::scope(|scope| {
        let all: Vec<_> =
            clients.iter().map(|client| scope.spawn(move || reduce(client))).collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    })
}

#[test]
fn metrics_of_a_leaf_count_upstream_bytes() {
    let (mut root, mut leaves, clients) = tree();
    for sum in reduce_all(&clients) {
        assert_eq!(sum.unwrap(), data(1, DataType::Int32, 300_000));
    }
    let metrics = leaves[0].get("/metrics");
    for line in [
        "evenkeel_reduction_upstream_sent_bytes_total{job=\"team-a/llama\"} 300000",
        "evenkeel_reduction_upstream_received_bytes_total{job=\"team-a/llama\"} 300000",
        "evenkeel_reduction_upstream_seconds_count{job=\"team-a/llama\"} 2",
    ] {
        assert!(metrics.contains(line), "no {line} in {metrics}");
    }
    for server in [&root, &leaves[0]] {
        server.signal(Signal::TERM);
    }
    for sum in reduce_all(&clients) {
        assert_eq!(sum.unwrap(), data(1, DataType::Int32, 300_000));
    }
    drop(clients);
    assert!(leaves[0].wait().success() && root.wait().success());
}

#[test]
fn encrypted_tree_sums_and_says_so() {
    let key = "5".repeat(64);
    let environment = [("EVENKEEL_JOB_KEY", key.as_str()), ("EVENKEEL_ENCRYPTION", "required")];
    let (root, mut leaves, clients) = tree_with(&environment);
    for sum in reduce_all(&clients) {
        assert_eq!(sum.unwrap(), data(1, DataType::Int32, 300_000));
    }
    for server in [&root, &leaves[0]] {
        let metrics = server.get("/metrics");
        assert!(metrics.contains("evenkeel_reduction_encryption_required 1"), "{metrics}");
    }
    // A leaf without encryption cannot reach its root.
    let clear = start_with(&["--upstream", &root.address], &environment[..1]);
    let lists = [[clear.address.clone()], [leaves[1].address.clone()]];
    let member = &members_with(&[&lists[0], &lists[1]], "team-a/clear")[0];
    let error = join_within(&transport(&environment[..1]), &lists[0], member, TIMEOUT);
    let error = error.err().unwrap().to_string();
    assert!(error.contains("EVENKEEL_ENCRYPTION"), "{error}");
    leaves[0].signal(Signal::TERM);
    drop(clients);
    assert!(leaves[0].wait().success());
}

#[test]
fn killed_leaf_is_named_at_the_other_leaf() {
    let (_root, mut leaves, clients) = tree();
    leaves[0].signal(Signal::KILL);
    leaves[0].wait();
    let error = reduce_all(&clients)[1].as_ref().unwrap_err().to_string();
    assert!(error.contains("leaf 0 at 127.0.0.1") && error.contains("was lost"), "{error}");
}

#[test]
fn stopped_root_is_named_at_all_leaves() {
    let (root, leaves, clients) = tree();
    root.signal(Signal::STOP);
    for (leaf, result) in leaves.iter().zip(reduce_all(&clients)) {
        let error = result.unwrap_err().to_string();
        let chain =
            format!("{}: upstream reduction server {}: no response", leaf.address, root.address);
        assert!(error.contains(&chain) && error.contains("for 2 s"), "{error}");
    }
}

#[test]
fn late_rank_is_not_taken_for_a_lost_server() {
    let program = start(&[]);
    let transport = transport(&[]);
    let names = [program.address.clone()];
    let timeout = Duration::from_secs(3);
    let clients: Vec<_> = members(2, "late")
        .iter()
        .map(|member| join_within(&transport, &names, member, timeout).unwrap())
        .collect();
    let own = data(1, DataType::Int32, 100_000);
    thread::scope(|scope| {
        let early = scope.spawn(|| all_reduce(&clients[0], &own, DataType::Int32, Op::Max));
        // Longer than the timeout: the server's liveness must be probed.
        thread::sleep(2 * timeout);
        assert_eq!(all_reduce(&clients[1], &own, DataType::Int32, Op::Max).unwrap(), own);
        assert_eq!(early.join().unwrap().unwrap(), own);
    });
}

#[test]
fn invalid_option_error_names_valid_values() {
    let run = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_evenkeel-reduction-server"))
            .args(arguments)
            .env("NCCL_SOCKET_IFNAME", "lo")
            .output()
            .unwrap();
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(run(&["serve", "--memory", "lots"]).contains("512MiB"));
    assert!(run(&["serve", "--memory", "1KiB"]).contains("too little"));
    assert!(run(&["serve", "--listen", "192.0.2.1:1"]).contains("192.0.2.1"));
    assert!(run(&["serve", "--drain-timeout", "soon"]).contains("30s"));
    assert!(run(&["serve", "--upstream", "root"]).contains("host:port"));
}
