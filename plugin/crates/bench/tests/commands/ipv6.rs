//! Ranks that meet over IPv6.

use std::process::{Command, Stdio};

use crate::process::{Running, bench, end_all, ranks};

#[test]
fn ranks_meet_at_an_ipv6_address() {
    for host in ["::1", "[::1]"] {
        for line in ["net -b 1K -e 1K -n 4", "collective --iteration-count 3 --elements 10"] {
            let of_host = |_: usize, command: &mut Command| {
                command.env("MASTER_ADDR", host);
            };
            for ended in end_all(ranks(2, &format!("{line} --timeout 10"), of_host)) {
                ended.passed();
            }
        }
    }
}

/// In a network namespace of its own. Needs root, as the rest of the tests on real networks do.
#[test]
fn ranks_start_on_a_host_with_ipv6_only() {
    let alone = "ip link set lo up && ip addr del 127.0.0.1/8 dev lo && exec \"$@\"";
    for line in [
        "net --plain-sockets 1 -b 1K -e 1K -n 4",
        "allreduce --spawn 2 -b 1K -e 1K -n 2",
        "collective --spawn 2 --iteration-count 3 --elements 10",
        "reduction --ranks 2 --servers 1 --size 64K -n 2",
    ] {
        let inner = bench(&format!("{line} --timeout 20"));
        let mut command = Command::new("unshare");
        command.args(["--net", "sh", "-c", alone, "sh"]).arg(inner.get_program());
        command.args(inner.get_args()).env("NCCL_SOCKET_IFNAME", "lo");
        command.envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Running::start(command).end().passed();
    }
}
