//! Several network cards as one device, in a network namespace of the test's own. Needs root, as the rest of the tests on
//! real networks do.

use std::process::{Command, Stdio};
use std::thread;
use std::time::Instant;

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
