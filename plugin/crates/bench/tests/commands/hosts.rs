//! Hosts in network namespaces of the test's own. Needs root, as the rest of the tests on real
//! networks do.

use std::process::{Command, Stdio};

use crate::process::{Ended, Running, bench};

/// Holds a network namespace until its standard input ends.
const HOLD: [&str; 4] = ["--net", "sh", "-c", "ip link set lo up && echo ready && exec cat"];

/// Runs a program with the sysfs of its network namespace.
const WITH_SYSFS: &str = "mount -t sysfs sysfs /sys && exec \"$@\"";

/// A host with a network of its own.
pub(crate) struct Host {
    holder: Running,
    network: String,
}

fn start(mut command: Command, stdin: Stdio) -> Running {
    command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped());
    Running::start(command)
}

impl Host {
    pub(crate) fn new() -> Self {
        let mut command = Command::new("unshare");
        command.args(HOLD);
        let mut holder = start(command, Stdio::piped());
        holder.line(|line| line == "ready");
        let network = format!("--net=/proc/{}/ns/net", holder.id());
        Self { holder, network }
    }

    /// Runs commands of a shell on it.
    pub(crate) fn run(&self, script: &str) {
        let mut command = Command::new("nsenter");
        let status = command.args([&self.network, "sh", "-ec", script]).status().unwrap();
        assert!(status.success(), "{script}");
    }

    /// Lays a cable to another host, and waits until it carries.
    pub(crate) fn cable(&self, card: &str, other: &Self, other_card: &str) {
        let to = other.holder.id();
        self.run(&format!("ip link add {card} type veth peer name {other_card} netns {to}"));
        let ends = [(self, card), (other, other_card)];
        for (host, card) in ends {
            host.run(&format!("ip link set {card} up"));
        }
        for (host, card) in ends {
            host.run(&format!("until ip -o link show {card} | grep -q 'state UP'; do :; done"));
        }
    }

    /// Starts a program of this package on it.
    pub(crate) fn start(&self, inner: &Command) -> Running {
        let mut command = Command::new("nsenter");
        command.args([&self.network, "unshare", "--mount", "sh", "-c", WITH_SYSFS, "sh"]);
        command.arg(inner.get_program()).args(inner.get_args());
        for (name, value) in inner.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        start(command, Stdio::null())
    }
}

/// Starts one rank on each of two hosts, of which rank 0 has this address.
pub(crate) fn start_ranks(
    hosts: [&Host; 2],
    address: &str,
    line: &str,
    environment: &[(&str, &str)],
) -> [Running; 2] {
    [0, 1].map(|rank| {
        let place =
            format!("--rank {rank} --world-size 2 --master-addr {address} --master-port 29500");
        let mut inner = bench(&format!("{line} {place}"));
        inner.env("NCCL_SOCKET_IFNAME", "").env("NCCL_DEBUG", "INFO");
        inner.envs(environment.iter().copied());
        hosts[rank].start(&inner)
    })
}

/// The ends of both ranks.
pub(crate) fn end_ranks(ranks: [Running; 2]) -> [Ended; 2] {
    ranks.map(Running::end)
}
