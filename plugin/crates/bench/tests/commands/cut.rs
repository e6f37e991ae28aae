//! A rank behind a cut link, in network namespaces of the test's own. Needs root, as the rest of the tests on real networks do.

use std::process::{Command, Stdio};

use crate::process::{Running, bench};

/// Holds a network namespace until its standard input ends.
const HOLD: [&str; 4] = ["--net", "sh", "-c", "ip link set lo up && echo ready && exec cat"];

/// Waits until both ends of the link are up.
const CARRIER: &str = "until ip -o link show type veth | grep -q 'state UP'; do :; done";

fn start(mut command: Command, stdin: Stdio) -> Running {
    command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped());
    Running::start(command)
}

fn hold() -> (Running, String) {
    let mut command = Command::new("unshare");
    command.args(HOLD);
    let mut running = start(command, Stdio::piped());
    running.line(|line| line == "ready");
    let network = format!("--net=/proc/{}/ns/net", running.id());
    (running, network)
}

fn inside(network: &str, arguments: &[&str]) {
    let status = Command::new("nsenter").arg(network).args(arguments).status().unwrap();
    assert!(status.success(), "{arguments:?}");
}

#[test]
fn cut_link_rank_is_named_by_every_other() {
    let ((near, here), (far, there)) = (hold(), hold());
    let folder = std::env::temp_dir().join(format!("evenkeel-cut-{}", std::process::id()));
    let host = far.id().to_string();
    inside(
        &here,
        &["ip", "link", "add", "near0", "type", "veth", "peer", "name", "far0", "netns", &host],
    );
    inside(&here, &["ip", "addr", "add", "10.9.0.1/24", "dev", "near0"]);
    inside(&there, &["ip", "addr", "add", "10.9.0.2/24", "dev", "far0"]);
    inside(&here, &["ip", "link", "set", "near0", "up"]);
    inside(&there, &["ip", "link", "set", "far0", "up"]);
    for network in [&here, &there] {
        inside(network, &["sh", "-c", CARRIER]);
    }
    let mut ranks: Vec<Running> = (0..4)
        .map(|rank: usize| {
            let (network, device) = if rank == 2 { (&there, "far0") } else { (&here, "near0") };
            let line = format!(
                "collective --size 4 --rank {rank} --timeout 8 --tcp-device {device} \
                 --elements 1000,1000 --no-verify --iteration-time 60s --shared-path {} allreduce_ring",
                folder.display()
            );
            let inner = bench(&line);
            let mut command = Command::new("nsenter");
            command.arg(network).arg(inner.get_program()).args(inner.get_args());
            start(command, Stdio::null())
        })
        .collect();
    ranks[0].line(|line| line.starts_with('#'));
    inside(&there, &["ip", "link", "set", "far0", "down"]);
    let behind = ranks.remove(2);
    for (rank, other) in ranks.into_iter().enumerate() {
        let ended = other.end();
        let named = ended.err.contains("rank 2 (") && ended.err.contains("cannot be reached");
        assert!(!ended.status.success() && named, "rank {rank} says {}", ended.err);
    }
    drop((behind, near, far));
    std::fs::remove_dir_all(folder).unwrap();
}
