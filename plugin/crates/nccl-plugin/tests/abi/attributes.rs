//! What NCCL says of its connections before it opens them.

use std::ptr;

use evenkeel_nccl_abi::{
    Attributes, CommAttributes, INVALID_ARGUMENT, NcclResult, NetV11, NetV12, OP_SEND, SUCCESS,
};

use crate::harness::{Net, in_rdma_lab, run_in_child_process, until};

const OP_RECV: u32 = 1 << 7;

fn attributes(op: u32, peers: i32) -> Attributes {
    let side = CommAttributes {
        max_concurrent_peers: peers,
        min_concurrent_peers: 1,
        max_flows_per_peer: 2,
        min_flows_per_peer: 1,
    };
    Attributes { send: side, recv: side, op, algo: u32::MAX, proto: u32::MAX }
}

fn set(net: &Net, attributes: *mut Attributes) -> NcclResult {
    let context = net.context();
    // SAFETY: the context came from init, and the attributes are valid or null, which is tried.
    unsafe {
        match net.version {
            11 => (net.table::<NetV11>().set_net_attr.unwrap())(context, attributes),
            _ => (net.table::<NetV12>().set_net_attr.unwrap())(context, attributes),
        }
    }
}

/// Number of flows to a listener of this process, which has this port.
fn flows(port: u16) -> usize {
    let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    const ESTABLISHED: &str = "01";
    let to = format!(":{port:04X}");
    let columns = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    columns.filter(|columns| columns[2].ends_with(&to) && columns[3] == ESTABLISHED).count()
}

#[test]
fn attributes_of_many_peers_open_one_flow_to_each() {
    if !in_rdma_lab() {
        run_in_child_process("attributes::child_flows", &[("EVENKEEL_FLOWS", "4")]);
    }
}

#[test]
#[ignore = "part of another test"]
fn child_flows() {
    for version in [11, 12] {
        let mut net = Net::init(version, 0xa7).unwrap();
        let opened = |net: &Net| {
            let (pair, address) = net.pair_at();
            let count = flows(address.port());
            net.close_send(pair.0);
            net.close_recv(pair.1);
            // All listeners of a process have one port.
            until("the end of the flows", || (flows(address.port()) == 0).then_some(())).unwrap();
            count
        };
        assert_eq!(opened(&net), 4);
        assert_eq!(set(&net, &mut attributes(OP_SEND | OP_RECV, 64)), SUCCESS);
        // What an operation says on the way changes nothing.
        assert_eq!(set(&net, &mut attributes(OP_SEND, 2)), SUCCESS);
        assert_eq!(opened(&net), 1, "v{version}");
        assert_eq!(set(&net, &mut attributes(u32::MAX, 4)), SUCCESS);
        assert_eq!(opened(&net), 4);
        assert_eq!(set(&net, ptr::null_mut()), INVALID_ARGUMENT);
        net.finalize();
    }
}
