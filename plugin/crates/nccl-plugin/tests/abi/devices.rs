//! Devices that NCCL makes of several, and devices in one subnet.

use std::ffi::{CStr, c_int, c_void};
use std::process::Command;
use std::{env, fs, ptr, thread};

use evenkeel_nccl_abi::{
    HANDLE_SIZE, INVALID_ARGUMENT, INVALID_USAGE, NcclResult, NetV9, NetV10, NetV11, NetV12,
    PTR_HOST, PropertiesV9, PropertiesV11, PropertiesV12, SUCCESS, VDeviceProperties,
};
use evenkeel_testkit::TestRng;
use evenkeel_transport::HANDLE_BYTES;

use crate::harness::{Handle, Net, in_rdma_lab, pattern, run_in_child_process, until};
use crate::raw_peer;

/// The number that `makeVDevice` gives, or its error.
fn fuse(net: &Net, members: &[c_int]) -> Result<c_int, NcclResult> {
    let mut made = -1;
    let result = match net.version {
        12 => fuse_with::<8>(net, members, &mut made),
        _ => fuse_with::<4>(net, members, &mut made),
    };
    if result == SUCCESS { Ok(made) } else { Err(result) }
}

fn fuse_with<const N: usize>(net: &Net, members: &[c_int], made: &mut c_int) -> NcclResult {
    let mut devices = [0; N];
    devices[..members.len()].copy_from_slice(members);
    let mut properties = VDeviceProperties { count: members.len() as c_int, devices };
    let place: *mut c_void = ptr::from_mut(&mut properties).cast();
    // SAFETY: both places outlive the call, and the structure is that of the version.
    unsafe {
        match net.version {
            9 => (net.table::<NetV9>().make_v_device.unwrap())(made, place),
            10 => (net.table::<NetV10>().make_v_device.unwrap())(made, place),
            11 => (net.table::<NetV11>().make_v_device.unwrap())(made, place),
            _ => (net.table::<NetV12>().make_v_device.unwrap())(made, place),
        }
    }
}

/// Speed, number of members and the first two of them.
fn described(net: &Net, device: c_int) -> (c_int, c_int, [c_int; 2]) {
    macro_rules! read {
        ($table:ty, $properties:ty) => {{
            // SAFETY: zeroes are valid for all fields: numbers and pointers.
            let mut properties = unsafe { std::mem::zeroed::<$properties>() };
            let get = net.table::<$table>().get_properties.unwrap();
            // SAFETY: the place outlives the call.
            assert_eq!(unsafe { get(device, &mut properties) }, SUCCESS);
            let members = properties.v_props;
            (properties.speed, members.count, [members.devices[0], members.devices[1]])
        }};
    }
    match net.version {
        9 => read!(NetV9, PropertiesV9),
        10 => read!(NetV10, PropertiesV9),
        11 => read!(NetV11, PropertiesV11),
        _ => read!(NetV12, PropertiesV12),
    }
}

/// The commands that make two cards, with these addresses, and then run the program.
fn cards(addresses: [&str; 2]) -> String {
    let [first, second] = addresses;
    format!(
        "
set -e
ip link set lo up
for of in all default; do echo 0 > /proc/sys/net/ipv4/conf/$of/rp_filter; done
card() {{
  ip link add e$1 type veth peer name p$1
  echo 1 > /proc/sys/net/ipv6/conf/e$1/disable_ipv6
  ip addr add $2/24 dev e$1
  ip link set p$1 up
  ip link set e$1 up
}}
card 0 {first}
card 1 {second}
until [ $(ip -o link show up type veth | grep -c 'state UP') = 4 ]; do :; done
exec \"$@\""
    )
}

/// Runs an ignored test in a network namespace of its own, with two cards.
fn run_with_cards(addresses: [&str; 2], test: &str, environment: &[(&str, &str)]) {
    let ended = Command::new("unshare")
        .args(["--net", "--mount", "sh", "-c"])
        .arg(format!("mount -t sysfs sysfs /sys\n{}", cards(addresses)))
        .arg("sh")
        .arg(env::current_exe().unwrap())
        .args([test, "--exact", "--ignored", "--nocapture"])
        .env("NCCL_SOCKET_IFNAME", "e")
        .env("EVENKEEL_LINK_SPEED", "1000")
        .env("EVENKEEL_RAILS", "")
        .envs(environment.iter().copied())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&ended.stdout);
    assert!(ended.status.success() && text.contains("1 passed"), "{ended:?}");
}

#[test]
fn devices_are_fused_by_make_v_device() {
    if !in_rdma_lab() {
        let addresses = ["10.9.0.1", "10.9.1.1"];
        for asked in [("NCCL_NET_FORCE_MERGE", "e0,e1"), ("NCCL_NET_MERGE_LEVEL", "SYS")] {
            run_with_cards(addresses, "devices::child_fuse", &[asked]);
        }
        run_with_cards(addresses, "devices::child_separate", &[]);
    }
}

#[test]
#[ignore = "part of another test"]
fn child_fuse() {
    for version in [9, 10, 11, 12] {
        let mut net = Net::init(version, 0xf5).unwrap();
        assert_eq!(fuse(&net, &[0, 1]), Ok(2), "v{version}");
        assert_eq!(fuse(&net, &[0, 1]), Ok(2), "the same again");
        assert_eq!(net.devices(), 3);
        assert_eq!(described(&net, 2), (2000, 2, [0, 1]));
        assert_eq!(described(&net, 1), (1000, 1, [1, 0]));
        for wrong in [&[0, 7][..], &[-1, 0]] {
            assert_eq!(fuse(&net, wrong), Err(INVALID_ARGUMENT));
        }
        for wrong in [&[0][..], &[0, 0], &[]] {
            assert_eq!(fuse(&net, wrong), Err(INVALID_USAGE), "{wrong:?}");
        }
        // Its flows take both interfaces in turn.
        net.on = 2;
        net.from = 2;
        let (pair, address) = net.pair_at();
        let table = fs::read_to_string("/proc/self/net/tcp").unwrap();
        let to = format!(":{:04X}", address.port());
        for card in ["0100090A", "0101090A"] {
            let is_there = |line: &str| {
                let columns: Vec<_> = line.split_whitespace().collect();
                columns[1].starts_with(card) && columns[2].ends_with(&to)
            };
            assert!(table.lines().any(is_there), "{card}: {table}");
        }
        net.close_send(pair.0);
        net.close_recv(pair.1);
        net.finalize();
    }
}

/// Packets that an RDMA device has sent.
fn packets(device: &str) -> u64 {
    let path = format!("/sys/class/infiniband/{device}/ports/1/hw_counters/sent_pkts");
    fs::read_to_string(path).unwrap().trim().parse().unwrap()
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn rdma_ports_are_fused_by_make_v_device() {
    let both = ("NCCL_IB_HCA", "=rxe0,rxe1");
    for asked in ["NCCL_NET_FORCE_MERGE", "NCCL_NET_MERGE_LEVEL"] {
        run_in_child_process("devices::child_fuse_ports", &[both, (asked, "SYS")]);
    }
    run_in_child_process("devices::child_separate", &[both]);
}

#[test]
#[ignore = "part of another test"]
fn child_fuse_ports() {
    // The other variable asks for the same.
    let versions = match env::var_os("NCCL_NET_FORCE_MERGE") {
        Some(_) => &[9, 10, 11, 12][..],
        None => &[12],
    };
    for version in versions.iter().copied() {
        let mut net = Net::init(version, 0xf7).unwrap();
        assert_eq!(net.devices(), 2);
        assert_eq!(fuse(&net, &[0, 1]), Ok(2), "v{version}");
        assert_eq!(net.devices(), 3);
        let [one, other] = [0, 1].map(|device| described(&net, device).0);
        assert_eq!(described(&net, 2), (one + other, 2, [0, 1]));
        for wrong in [&[0, 7][..], &[-1, 0]] {
            assert_eq!(fuse(&net, wrong), Err(INVALID_ARGUMENT));
        }
        for wrong in [&[0][..], &[1, 1], &[]] {
            assert_eq!(fuse(&net, wrong), Err(INVALID_USAGE), "{wrong:?}");
        }
        if version == 12 {
            // SAFETY: zeroes are valid for all fields: numbers and pointers.
            let mut properties = unsafe { std::mem::zeroed::<PropertiesV12>() };
            let get = net.table::<NetV12>().get_properties.unwrap();
            // SAFETY: the place outlives the call.
            assert_eq!(unsafe { get(2, &mut properties) }, SUCCESS);
            // SAFETY: the plugin's names end in a zero byte and are never freed.
            let name = unsafe { CStr::from_ptr(properties.name) };
            assert_eq!(name, c"rxe0:1+rxe1:1");
            assert_eq!((properties.port, properties.reg_is_global), (1, 1));
            assert_eq!(properties.ptr_support, PTR_HOST);
        }
        net.on = 2;
        net.from = 2;
        let before = ["rxe0", "rxe1"].map(packets);
        let (send, recv) = net.pair();
        // Parts of the long ones have not all gone when the next port has room.
        let sizes = [0, 1, 4096, 4097, 100_000, 524_289, 3 << 20, 8 << 20, 16 << 20];
        for (seed, size) in sizes.into_iter().enumerate() {
            let mut message = pattern(seed, size);
            let mut buffer = vec![0_u8; size + 64];
            let registered = (size > 4096).then(|| {
                // SAFETY: the memory stays until it is deregistered, and is not used otherwise while a request has it.
                unsafe {
                    let sent = net.register(send, message.as_mut_ptr(), size, PTR_HOST);
                    let received = net.register(recv, buffer.as_mut_ptr(), size + 64, PTR_HOST);
                    (sent.unwrap(), received.unwrap())
                }
            });
            // SAFETY: as above.
            let (receiving, sending) = unsafe {
                let receiving = net.irecv(recv, buffer.as_mut_ptr(), size + 64).unwrap().unwrap();
                (receiving, net.isend(send, message.as_ptr(), size).unwrap().unwrap())
            };
            assert_eq!(net.finish(receiving), Ok(size), "v{version}");
            net.finish(sending).unwrap();
            if let Some((sent, received)) = registered {
                net.deregister(send, sent);
                net.deregister(recv, received);
            }
            assert!(buffer[..size] == message[..], "v{version}, {size} bytes");
            assert!(buffer[size..].iter().all(|byte| *byte == 0), "behind {size} bytes");
        }
        for (device, before) in ["rxe0", "rxe1"].into_iter().zip(before) {
            assert!(packets(device) - before > 500, "v{version}: {device} has carried its share");
        }
        net.close_send(send);
        net.close_recv(recv);
        net.finalize();
    }
}

/// NCCL asks for the two ports of a card by itself.
#[test]
#[ignore = "part of another test"]
fn child_separate() {
    let mut net = Net::init(12, 0xf5).unwrap();
    assert_eq!(fuse(&net, &[0, 1]), Err(INVALID_USAGE));
    assert_eq!(net.devices(), 2);
    net.finalize();
}

/// Packets that an interface has sent.
fn sent(interface: &str) -> u64 {
    let path = format!("/sys/class/net/{interface}/statistics/tx_packets");
    fs::read_to_string(path).unwrap().trim().parse().unwrap()
}

#[test]
fn devices_in_one_subnet_send_by_themselves() {
    if !in_rdma_lab() {
        let addresses = ["10.9.0.1", "10.9.0.2"];
        for (setting, by) in [("auto", "e1"), ("on", "e1"), ("off", "e0")] {
            // A dial without an answer would be left to the route after a part of the time.
            let timeout = ("EVENKEEL_CONNECT_TIMEOUT", "600");
            let environment = [("EVENKEEL_BIND_TO_DEVICE", setting), ("SENDS_BY", by), timeout];
            run_with_cards(addresses, "devices::child_subnet", &environment);
        }
    }
}

#[test]
#[ignore = "part of another test"]
fn child_subnet() {
    let mut net = Net::init(12, 0xf6).unwrap();
    let expected = env::var("SENDS_BY").unwrap();
    let other = if expected == "e0" { "e1" } else { "e0" };
    // Nobody is there. The kernel asks for it (ARP) by the interface that packets would leave by.
    let addresses = vec!["10.9.0.77".parse().unwrap()];
    let nobody = evenkeel_transport::Handle {
        addresses,
        port: 80,
        nonce: evenkeel_transport::Nonce([7; 16]),
    };
    let mut handle = Handle([0; HANDLE_SIZE]);
    handle.0[..HANDLE_BYTES].copy_from_slice(&nobody.encode());
    let before = (sent(&expected), sent(other));
    net.from = 1;
    assert!(net.poll_connect(&mut handle).unwrap().is_none());
    until("a packet", || (sent(&expected) > before.0).then_some(())).unwrap();
    assert_eq!(sent(other), before.1);
    net.finalize();
}

#[test]
fn devices_in_one_subnet_connect_where_answers_come_by_another_card() {
    if !in_rdma_lab() {
        run_with_cards(["10.9.0.1", "10.9.0.2"], "devices::child_answers", &[]);
    }
}

/// Gives the other ends of both cards to a host of their own, and listens there. It has one address, and answers by its first
/// card whoever asks.
fn other_host() -> (raw_peer::Receiver, Handle) {
    let script = format!(
        "
for of in all default; do echo 0 > /proc/sys/net/ipv4/conf/$of/rp_filter; done
for card in p0 p1; do
  nsenter --net=/proc/{}/ns/net ip link set $card netns $$
  ip link set $card up
done
ip addr add 10.9.0.3/24 dev p0",
        std::process::id()
    );
    let listen = move || {
        // SAFETY: it takes flags alone. This thread has a network of its own from here on.
        assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0);
        assert!(Command::new("sh").args(["-ec", &script]).status().unwrap().success());
        raw_peer::Receiver::listen_at("10.9.0.3:0", &mut TestRng::new(1))
    };
    let listening = thread::spawn(listen).join().unwrap();
    for card in ["e0", "e1"] {
        let state = || fs::read_to_string(format!("/sys/class/net/{card}/operstate")).unwrap();
        until("a card", || (state().trim() == "up").then_some(())).unwrap();
    }
    listening
}

#[test]
#[ignore = "part of another test"]
fn child_answers() {
    let (mut receiver, mut handle) = other_host();
    let mut net = Net::init(12, 0xf8).unwrap();
    net.from = 1;
    let send = receiver.connected(&net, &mut handle);
    // Those that are opened in place of lost ones go the same way.
    receiver.flows.clear();
    until("another flow", || {
        receiver.step();
        (receiver.welcomed() > 0).then_some(())
    })
    .unwrap();
    net.close_send(send);
    net.finalize();
}

#[test]
fn devices_in_one_subnet_connect_to_each_other() {
    if !in_rdma_lab() {
        run_with_cards(["10.9.0.1", "10.9.0.2"], "devices::child_own_addresses", &[]);
    }
}

/// What leaves by the one card does not come in by the other one: the address is this host's.
#[test]
#[ignore = "part of another test"]
fn child_own_addresses() {
    let mut net = Net::init(12, 0xf9).unwrap();
    net.from = 1;
    let before = sent("e1");
    let (send, recv) = net.pair();
    assert_eq!(sent("e1"), before);
    net.close_send(send);
    net.close_recv(recv);
    net.finalize();
}
