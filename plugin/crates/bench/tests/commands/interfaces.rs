//! Several network cards as one device, in a network namespace of the test's own. Needs root, as
//! the rest of the tests on real networks do.

use std::process::{Command, Stdio};
use std::thread;
use std::time::Instant;

use crate::hosts::{Host, end_ranks, start_ranks};
use crate::process::{PATIENCE, Running, bench, is_row};

/// The commands that make two cards with a subnet each, and then run the program.
const CARDS: &str = "
set -e
for i in 0 1; do
  ip link add e$i type veth peer name p$i
  ip addr add 10.9.$i.1/24 dev e$i
  ip link set p$i up
  ip link set e$i up
done
ip link set lo up
until [ $(ip -o link show up type veth | grep -c LOWER_UP) = 4 ]; do :; done
exec \"$@\"
";

/// The same, of which `e1` has a cable to nothing.
const CARD_WITHOUT_CARRIER: &str = "
set -e
for i in 0 1; do
  ip link add e$i type veth peer name p$i
  ip addr add 10.9.$i.1/24 dev e$i
  ip link set e$i up
done
ip link set p0 up
ip link set lo up
until ip -o link show e0 | grep -q LOWER_UP; do :; done
exec \"$@\"
";

/// One card, whose cable is plugged in once a process waits for that: it listens to the kernel's
/// news of interfaces.
const CARD_WITH_LATE_CARRIER: &str = "
set -e
ip link add e0 type veth peer name p0
ip addr add 10.9.0.1/24 dev e0
ip link set e0 up
ip link set lo up
(
  for try in $(seq 300); do
    ! grep -q ' 00000001 ' /proc/net/netlink || exec ip link set p0 up
    sleep 0.1
  done
) > /dev/null 2>&1 &
exec \"$@\"
";

/// One card, whose cable is not plugged in.
const CARD_THAT_STAYS_DEAD: &str = "
set -e
ip link add e0 type veth peer name p0
ip addr add 10.9.0.1/24 dev e0
ip link set e0 up
ip link set lo up
exec \"$@\"
";

/// What Docker, libvirt and CNIs make: bridges to containers, and an overlay. All hosts have the
/// same addresses there.
const INSIDE_A_HOST: &str = "
for at in 1 2; do
  ip link add br-$at type bridge
  ip link add port$at type veth peer name container$at
  ip link set port$at master br-$at
  for link in br-$at port$at container$at; do ip link set $link up; done
  ip addr add 172.1$at.0.1/16 dev br-$at
done
ip link add flannel.1 type vxlan id 1 dstport 8472 local $1 dev eth0
ip addr add 10.244.1.0/32 dev flannel.1
ip link set flannel.1 up
until [ $(ip -o link show | grep -c '^[0-9]*: br-.*state UP') = 2 ]; do :; done
";

/// Runs `evenkeel-bench` where these commands have made cards.
fn with_cards(cards: &str, interfaces: &str, line: &str) -> Running {
    let inner = bench(line);
    let mut command = Command::new("unshare");
    command
        .args(["--net", "sh", "-c", cards, "sh"])
        .arg(inner.get_program())
        .args(inner.get_args());
    for (name, value) in inner.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.env("NCCL_SOCKET_IFNAME", interfaces).env("EVENKEEL_DEVICES", "joined");
    command.env("NCCL_DEBUG", "INFO");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Running::start(command)
}

#[test]
fn rdma_failing_device_is_left_out() {
    let mut running = with_cards(CARDS, "", "allreduce --spawn 2 -b 1M -e 1M -n 2 -N 0");
    let ranks = running.line(|line| line.contains("Rank  1"));
    assert!(ranks.contains("Evenkeel on e0+e1,"), "{ranks}");
    running.line(is_row);
    let namespace = format!("--net=/proc/{}/ns/net", running.id());
    let down =
        Command::new("nsenter").args([&namespace, "ip", "link", "set", "e1", "down"]).status();
    assert!(down.unwrap().success());
    // Some rows may have been on their way already.
    for _ in 0..20 {
        let row = running.line(is_row);
        let columns: Vec<_> = row.split_whitespace().collect();
        assert_eq!((columns[8], columns[12]), ("0", "0"), "{row}");
    }
}

#[test]
fn interfaces_without_carrier_are_named() {
    let once = "allreduce --spawn 2 -b 1M -e 1M -n 1";
    let ended = with_cards(CARD_WITHOUT_CARRIER, "", once).end().passed();
    assert!(ended.out.contains("Evenkeel on e0,"), "{ended:?}");
    let line = ended.err.lines().find(|line| line.contains("network interfaces left out: "));
    let line = line.unwrap_or_else(|| panic!("not a word about e1: {ended:?}"));
    assert!(line.contains("e1 (no carrier)"), "{line}");
    let ended = with_cards(CARD_WITHOUT_CARRIER, "e1", once).end();
    ended.failed("no usable network interface");
    ended.failed("e0 (excluded by NCCL_SOCKET_IFNAME)");
    ended.failed("e1 (no carrier)");
}

#[test]
fn carrier_that_comes_late_is_awaited() {
    let once = "allreduce --spawn 2 -b 1M -e 1M -n 1";
    for interfaces in ["", "e0"] {
        let ended = with_cards(CARD_WITH_LATE_CARRIER, interfaces, once).end().passed();
        assert!(ended.out.contains("Evenkeel on e0,"), "{ended:?}");
        assert!(ended.err.contains("waiting for a carrier: e0"), "{ended:?}");
    }
    let ended = with_cards(CARD_THAT_STAYS_DEAD, "", once).end();
    ended.failed("no usable network interface");
    ended.failed("e0 (no carrier)");
    with_cards(CARD_THAT_STAYS_DEAD, "lo", once).end().passed();
}

/// Two hosts at one network.
fn two_hosts() -> (Host, Host) {
    let (one, other) = (Host::new(), Host::new());
    one.cable("eth0", &other, "eth0");
    for (host, address) in [(&one, "10.9.0.1"), (&other, "10.9.0.2")] {
        host.run(&format!("ip addr add {address}/24 dev eth0\nset -- {address}\n{INSIDE_A_HOST}"));
    }
    (one, other)
}

#[test]
fn bridges_and_overlays_of_a_host_carry_nothing() {
    let (one, other) = two_hosts();
    let joined = ("EVENKEEL_DEVICES", "joined");
    let line = "allreduce -b 1M -e 1M -n 2";
    for names in ["", "^lo,docker"] {
        let environment = [joined, ("NCCL_SOCKET_IFNAME", names)];
        let ranks = start_ranks([&one, &other], "10.9.0.1", line, &environment);
        let [first, _] = end_ranks(ranks).map(|ended| ended.passed());
        assert!(first.out.contains("Evenkeel on eth0,"), "{first:?}");
        let told = "br-1 (a bridge inside this host)";
        assert!(first.err.contains(told), "{first:?}");
        assert!(first.err.contains("flannel.1 (an overlay on other interfaces)"), "{first:?}");
    }
}

#[test]
fn named_bridge_that_leads_to_no_peer_is_left_with_a_warning() {
    let (one, other) = two_hosts();
    let environment = [("EVENKEEL_DEVICES", "joined"), ("NCCL_SOCKET_IFNAME", "=eth0,br-1")];
    let line = "allreduce -b 1M -e 1M -n 2";
    let ranks = start_ranks([&one, &other], "10.9.0.1", line, &environment);
    for ended in end_ranks(ranks).map(|ended| ended.passed()) {
        assert!(ended.out.is_empty() || ended.out.contains("Evenkeel on eth0+br-1,"), "{ended:?}");
        let warned = ended.err.matches("br-1 does not lead to 172.11.0.1").count();
        assert_eq!(warned, 1, "{ended:?}");
    }
}

/// Hosts whose router leads to an address on their loopback interface. Their cards have link-local
/// addresses only.
#[test]
fn routed_hosts_use_their_address_on_the_loopback_interface() {
    let (one, other, router) = (Host::new(), Host::new(), Host::new());
    router.run("echo 1 > /proc/sys/net/ipv4/ip_forward");
    let hosts = [(&one, "10.200.0.1", "a0"), (&other, "10.200.0.2", "b0")];
    for (host, address, port) in hosts {
        for (end, card) in [(host, "default"), (&router, "default")] {
            end.run(&format!("echo 0 > /proc/sys/net/ipv6/conf/{card}/accept_dad"));
        }
        host.cable("lan0", &router, port);
        host.run(&format!(
            "ip addr add {address}/32 dev lo
             ip addr add fe80::1/64 dev lan0 nodad
             ip route add default src {address} via inet6 fe80::2 dev lan0"
        ));
        router.run(&format!(
            "ip addr add fe80::2/64 dev {port} nodad
             ip route add {address}/32 via inet6 fe80::1 dev {port}"
        ));
    }
    let line = "allreduce -b 1M -e 1M -n 2";
    for names in ["", "lo"] {
        let ranks =
            start_ranks([&one, &other], "10.200.0.1", line, &[("NCCL_SOCKET_IFNAME", names)]);
        let [first, _] = end_ranks(ranks).map(|ended| ended.passed());
        assert!(first.err.contains("connection opened peer=10.200.0.2:"), "{first:?}");
    }
}

/// The bytes that open connections from an address have sent, where a program runs.
fn bytes_sent(running: &Running, address: &str) -> u64 {
    let namespace = format!("--net=/proc/{}/ns/net", running.id());
    let listed = Command::new("nsenter").args([&namespace, "ss", "-tinH", "src", address]).output();
    let words = String::from_utf8(listed.unwrap().stdout).unwrap();
    words
        .split_whitespace()
        .filter_map(|word| word.strip_prefix("bytes_sent:")?.parse::<u64>().ok())
        .sum()
}

#[test]
fn collective_threads_take_turns_at_interfaces() {
    let devices = "collective --spawn 2 --threads 2 --tcp-device e0,e1";
    let long = "--elements 100000 --iteration-time 600s --no-verify";
    let mut running = with_cards(CARDS, "", &format!("{devices} {long}"));
    running.line(|line| line.contains("2 ranks, tcp e0,e1,"));
    let deadline = Instant::now() + PATIENCE;
    // More than joining the group takes.
    while ["10.9.0.1", "10.9.1.1"].iter().any(|card| bytes_sent(&running, card) < 10_000_000) {
        assert!(Instant::now() < deadline, "a card carries nothing");
        thread::yield_now();
    }
}
