//! Initialization, finalization and unloading, and leaks. Each test has a process of its own, since threads and the
//! environment belong to the process.

use std::net::UdpSocket;
use std::{env, fs};

use evenkeel_nccl_abi::INVALID_USAGE;
use evenkeel_protocol::PROTOCOL_VERSION;
use evenkeel_testkit::TestRng;

use crate::harness::{Net, in_rdma_lab, log_lines, pattern, run_in_child_process, until};
use crate::raw_peer;

/// The plugin's threads in this process.
fn plugin_threads() -> usize {
    fs::read_dir("/proc/self/task")
        .unwrap()
        .filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok())
        .filter(|name| name.starts_with("evenkeel"))
        .count()
}

/// A new thread takes a moment to name itself.
fn threads_appear() {
    until("threads", || (plugin_threads() > 0).then_some(())).expect("threads");
}

/// A thread that has been joined takes a moment to leave /proc.
fn threads_disappear() {
    until("no threads", || (plugin_threads() == 0).then_some(())).expect("no threads");
}

fn exchange(net: &Net) {
    let (send, recv) = net.pair();
    threads_appear();
    let data = pattern(1, 300_000);
    let mut buffer = vec![0; data.len()];
    // SAFETY: the buffers live until the requests are finished.
    let (out, back) = unsafe {
        let back = net.irecv(recv, buffer.as_mut_ptr(), buffer.len()).unwrap().unwrap();
        (net.isend(send, data.as_ptr(), data.len()).unwrap().unwrap(), back)
    };
    assert_eq!(net.finish(back), Ok(data.len()));
    assert_eq!(net.finish(out), Ok(data.len()));
    assert!(buffer == data);
    net.close_send(send);
    net.close_recv(recv);
}

#[test]
fn library_can_be_unloaded_and_reloaded() {
    run_in_child_process("lifecycle::child_unload", &[]);
}

#[test]
#[ignore = "part of another test"]
fn child_unload() {
    for version in [12, 8, 11, 6] {
        let mut net = Net::init(version, 1).unwrap();
        assert_eq!(plugin_threads(), 0, "no thread before the first listen or connect");
        exchange(&net);
        threads_disappear();
        net.finalize();
        net.library.close().unwrap();
    }
}

#[test]
fn finalize_releases_open_objects() {
    run_in_child_process("lifecycle::child_finalize", &[]);
}

#[test]
#[ignore = "part of another test"]
fn child_finalize() {
    let mut net = Net::init(12, 2).unwrap();
    let (_abandoned, mut handle) = net.listen();
    let (listener, mut other) = net.listen();
    // An attempt that is not polled again, unless it is done at once.
    if let Some(comm) = net.poll_connect(&mut handle).unwrap() {
        net.close_send(comm);
    }
    threads_appear();
    net.finalize();
    threads_disappear();
    // Closing late is still safe.
    net.close_listen(listener);
    let mut net = Net::init(12, 3).unwrap();
    assert!(until("an error", || net.poll_connect(&mut other).err()).is_some());
    net.finalize();
}

#[test]
fn communicators_are_independent() {
    run_in_child_process("lifecycle::child_communicators", &[]);
}

#[test]
#[ignore = "part of another test"]
fn child_communicators() {
    let mut first = Net::init(12, 4).unwrap();
    let (send, recv) = first.pair();
    let mut second = Net::init(12, 5).unwrap();
    exchange(&second);
    second.finalize();
    assert!(plugin_threads() > 0, "the first one is still connected");
    first.close_send(send);
    first.close_recv(recv);
    threads_disappear();
    first.finalize();
}

#[test]
fn finalized_context_serves_communicators_that_share_it() {
    run_in_child_process("lifecycle::child_shared", &[]);
}

/// NCCL 2.28.3 finalizes a communicator, and goes on to listen and connect in its context for those that were split from it.
#[test]
#[ignore = "part of another test"]
fn child_shared() {
    let mut parent = Net::init(11, 14).unwrap();
    let mut child = Net::init(11, 15).unwrap();
    let (listener, mut handle) = parent.listen();
    let (_abandoned, _) = parent.listen();
    let shared = parent.context;
    parent.finalize();
    parent.context = shared;
    let (send, recv) = parent.connect_to(listener, &mut handle);
    parent.close_send(send);
    parent.close_recv(recv);
    parent.close_listen(listener);
    exchange(&parent);
    // With the last context nothing is left.
    assert!(plugin_threads() > 0, "a listener is open");
    child.finalize();
    threads_disappear();
}

#[test]
fn invalid_setting_is_refused_with_the_valid_range() {
    run_in_child_process("lifecycle::child_bad_setting", &[("EVENKEEL_FLOWS", "many")]);
}

#[test]
#[ignore = "part of another test"]
fn child_bad_setting() {
    assert_eq!(Net::init(12, 6).err(), Some(INVALID_USAGE));
    let lines = log_lines("EVENKEEL_FLOWS");
    assert_eq!(lines.len(), 1);
    assert_eq!(lines[0].level, 2);
    assert!(lines[0].text.contains("many") && lines[0].text.contains("1 to 64"), "{lines:?}");
}

#[test]
fn status_file_shows_that_the_plugin_is_used() {
    let folder = env::temp_dir().join(format!("evenkeel-status-{}", std::process::id()));
    fs::create_dir(&folder).unwrap();
    run_in_child_process(
        "lifecycle::child_status",
        &[("EVENKEEL_STATUS_DIR", folder.to_str().unwrap())],
    );
    let files: Vec<_> = fs::read_dir(&folder).unwrap().map(|file| file.unwrap().path()).collect();
    let text = fs::read_to_string(&files[0]).unwrap();
    fs::remove_dir_all(&folder).unwrap();
    let name = files[0].file_name().unwrap().to_str().unwrap();
    assert!(files.len() == 1 && name.starts_with("plugin."), "{files:?}");
    assert!(text.contains("version ") && text.contains("devices: lo"), "{text}");
    // A missing folder is only a warning.
    run_in_child_process("lifecycle::child_status", &[("EVENKEEL_STATUS_DIR", "/no/such/folder")]);
}

#[test]
#[ignore = "part of another test"]
fn child_status() {
    let mut net = Net::init(12, 7).unwrap();
    exchange(&net);
    net.finalize();
    let there = env::var("EVENKEEL_STATUS_DIR").is_ok_and(|folder| fs::exists(folder).unwrap());
    assert_eq!(log_lines("EVENKEEL_STATUS_DIR").is_empty(), there);
}

#[test]
fn report_says_whether_the_plugin_is_used() {
    let controller = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = controller.local_addr().unwrap().to_string();
    let loaded = format!(
        "Loaded\nversion {}, protocol {PROTOCOL_VERSION}, encryption off, devices: ",
        env!("CARGO_PKG_VERSION")
    );
    for (test, setting, outcome) in [
        ("lifecycle::child_report", ("EVENKEEL_FLOWS", "2"), loaded.as_str()),
        ("lifecycle::child_bad_setting", ("EVENKEEL_FLOWS", "many"), "Failed\nEVENKEEL_FLOWS="),
    ] {
        let report = [("EVENKEEL_REPORT", address.as_str()), ("EVENKEEL_POD_UID", "one-pod")];
        run_in_child_process(test, &[report[0], report[1], setting]);
        let mut buffer = [0; 1024];
        let (length, _) = controller.recv_from(&mut buffer).unwrap();
        let text = String::from_utf8_lossy(&buffer[..length]);
        assert!(text.starts_with(&format!("evenkeel-report 1\none-pod\n{outcome}")), "{text}");
    }
    // Neither an invalid address nor one where nobody listens changes anything.
    for address in ["nobody:1", "127.0.0.1:1"] {
        run_in_child_process(
            "lifecycle::child_report",
            &[("EVENKEEL_REPORT", address), ("EVENKEEL_POD_UID", "one-pod")],
        );
    }
}

#[test]
#[ignore = "part of another test"]
fn child_report() {
    let mut net = Net::init(12, 7).unwrap();
    exchange(&net);
    net.finalize();
}

#[test]
fn one_flow_or_many_workers() {
    run_in_child_process("lifecycle::child_unload", &[("EVENKEEL_FLOWS", "1")]);
    run_in_child_process(
        "lifecycle::child_unload",
        &[("EVENKEEL_FLOWS", "64"), ("EVENKEEL_WORKERS", "4"), ("EVENKEEL_CHUNK_BYTES", "4096")],
    );
}

#[test]
fn ipv6_works_or_is_reported_missing() {
    run_in_child_process("lifecycle::child_ipv6", &[("NCCL_SOCKET_FAMILY", "AF_INET6")]);
}

#[test]
#[ignore = "part of another test"]
fn child_ipv6() {
    let addresses = fs::read_to_string("/proc/net/if_inet6").unwrap_or_default();
    if addresses.lines().any(|line| line.ends_with(" lo")) {
        exchange(&Net::init(12, 8).unwrap());
        assert!(!log_lines("connection closed peer=[::1]:").is_empty());
    } else {
        assert_eq!(Net::init(12, 8).err(), Some(INVALID_USAGE));
        assert!(!log_lines("no usable network interface").is_empty());
    }
}

#[test]
fn closed_connections_leak_nothing() {
    run_in_child_process("lifecycle::child_closed", &[]);
}

#[test]
#[ignore = "part of another test"]
fn child_closed() {
    let mut net = Net::init(12, 9).unwrap();
    // An open connection keeps the threads, so that those of each round are not counted as new.
    let kept = net.pair();
    // One-time allocations happen in the first rounds.
    (0..50).for_each(|_| exchange(&net));
    let (fds, threads, memory) = settled();
    // The lab's processor is emulated, and queue pairs are large.
    let connections = if in_rdma_lab() { 200 } else { 950 };
    (0..connections).for_each(|_| exchange(&net));
    let (fds_after, threads_after, memory_after) = settled();
    assert!(fds_after <= fds, "{fds} descriptors became {fds_after}");
    assert!(threads_after <= threads, "{threads} threads became {threads_after}");
    // A leak of a connection's state would be some kilobytes each time.
    assert!(memory_after < memory + 2048, "{memory} KiB became {memory_after}");
    net.close_send(kept.0);
    net.close_recv(kept.1);
    threads_disappear();
    net.finalize();
}

/// Descriptors, threads and resident memory in KiB, once closed connections are gone.
fn settled() -> (usize, usize, u64) {
    let now = || {
        let count = |folder: &str| fs::read_dir(folder).unwrap().count();
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        let memory = line.trim().trim_end_matches(" kB").parse().unwrap();
        (count("/proc/self/fd"), count("/proc/self/task"), memory)
    };
    // A closed connection may still have bytes to deliver: wait until nothing changes.
    let mut last = now();
    let mut calm = 0;
    until("rest", || {
        std::thread::sleep(std::time::Duration::from_millis(20));
        let next = now();
        calm = if (next.0, next.1) == (last.0, last.1) { calm + 1 } else { 0 };
        last = next;
        (calm >= 20).then_some(())
    });
    last
}

#[test]
fn idle_threads_do_not_spin() {
    run_in_child_process("lifecycle::child_idle", &[]);
}

#[test]
#[ignore = "part of another test"]
fn child_idle() {
    let net = Net::init(12, 7).unwrap();
    let (send, recv) = net.pair();
    let mut buffer = vec![0u8; 1 << 20];
    // A request in flight on an otherwise idle connection.
    // SAFETY: the buffer lives until the comm is closed.
    unsafe { net.irecv(recv, buffer.as_mut_ptr(), buffer.len()) }.unwrap().unwrap();
    let before = plugin_ticks();
    std::thread::sleep(std::time::Duration::from_secs(1));
    let used = plugin_ticks() - before;
    assert!(used <= 5, "{used} of 100 ticks in a second");
    net.close_send(send);
    net.close_recv(recv);
}

/// CPU time that the plugin's threads have used, in hundredths of a second.
fn plugin_ticks() -> u64 {
    fs::read_dir("/proc/self/task")
        .unwrap()
        .filter_map(|task| fs::read_to_string(task.ok()?.path().join("stat")).ok())
        .filter(|stat| stat.contains("(evenkeel"))
        .map(|stat| {
            let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split(' ').collect();
            fields[12].parse::<u64>().unwrap() + fields[13].parse::<u64>().unwrap()
        })
        .sum()
}

#[test]
fn aborted_connects_are_released() {
    let environment = [("EVENKEEL_CONNECT_TIMEOUT", "1"), ("EVENKEEL_FLOWS", "2")];
    run_in_child_process("lifecycle::child_aborted", &environment);
}

/// Tables before v11 have no `finalize`. When NCCL aborts a communicator that connects, it only stops to poll.
#[test]
#[ignore = "part of another test"]
fn child_aborted() {
    let net = Net::init(8, 10).unwrap();
    let sockets = || {
        let links = fs::read_dir("/proc/self/fd").unwrap();
        let links = links.filter_map(|fd| fs::read_link(fd.ok()?.path()).ok());
        links.filter(|link| link.to_string_lossy().starts_with("socket:")).count()
    };
    let before = sockets();
    {
        // A peer that does not answer, one that welcomes a flow, and one that welcomes all, so that its attempt succeeds.
        let mut rng = TestRng::new(1);
        let [(_silent, first), (mut half, second), (mut whole, third)] =
            [(); 3].map(|()| raw_peer::Receiver::listen(&mut rng));
        let mut handles = [first, second, third];
        for handle in &mut handles {
            assert_eq!(net.poll_connect(handle), Ok(None));
        }
        threads_appear();
        until("a flow", || half.accept_one().then_some(())).expect("a flow");
        until("welcomes", || {
            half.read();
            whole.step();
            (half.welcomed() == 1 && whole.welcomed() == 2).then_some(())
        })
        .expect("welcomes");
        // Nothing keeps the transport any more: its threads end, and a live peer sees the end.
        threads_disappear();
        whole.drain();
        for handle in &mut handles {
            assert!(net.poll_connect(handle).is_err(), "an attempt that was cancelled");
        }
    }
    assert_eq!(sockets(), before, "sockets");
    // The next communicator connects as usual.
    exchange(&Net::init(8, 11).unwrap());
    threads_disappear();
}
