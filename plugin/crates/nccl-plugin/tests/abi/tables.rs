//! The tables' properties and names, and calls with invalid arguments.

use std::ffi::{CStr, c_int};
use std::fs;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::ptr;

use evenkeel_nccl_abi::{
    INTERNAL_ERROR, INVALID_ARGUMENT, MAX_NET_SIZE, NcclResult, NetV6, NetV7, NetV8, NetV9, NetV11,
    NetV12, PTR_CUDA, PTR_HOST, PropertiesV12, SUCCESS,
};

use crate::harness::{Net, Opaque, VERSIONS, in_rdma_lab};

#[test]
fn invalid_arguments_are_errors_not_crashes() {
    let net = Net::init(12, 0x103).unwrap();
    let (send, recv) = net.pair();
    let table = net.table::<NetV12>();
    let (mut done, null) = (0, ptr::null_mut());
    let mut request = ptr::null_mut();
    let mut size = 1;
    let mut byte = 0u8;
    let mut data = ptr::from_mut(&mut byte).cast();
    // SAFETY: the arguments that are not null are valid; null is what is tried.
    unsafe {
        let test = table.test.unwrap();
        assert_eq!(test(null, &mut done, ptr::null_mut()), INVALID_ARGUMENT);
        let listen = table.listen.unwrap();
        assert_eq!(listen(null, 0, null, &mut request), INVALID_ARGUMENT);
        let isend = table.isend.unwrap();
        assert_eq!(isend(null, data, 1, 0, null, null, &mut request), INVALID_ARGUMENT);
        assert_eq!(isend(send.0, null, 1, 0, null, null, &mut request), INVALID_ARGUMENT);
        let too_long = (1 << 30) + 1;
        assert_eq!(isend(send.0, data, too_long, 0, null, null, &mut request), INVALID_ARGUMENT);
        let irecv = table.irecv.unwrap();
        let (mut tag, mut mh, mut ph) = (0, null, null);
        assert_eq!(
            irecv(recv.0, 9, &mut data, &mut size, &mut tag, &mut mh, &mut ph, &mut request),
            INTERNAL_ERROR
        );
        assert_eq!(
            irecv(recv.0, 1, &mut data, &mut size, ptr::null_mut(), &mut mh, &mut ph, &mut request),
            INVALID_ARGUMENT
        );
        let iflush = table.iflush.unwrap();
        let mut int = 1;
        assert_eq!(iflush(recv.0, 1, &mut data, &mut int, &mut mh, &mut request), INVALID_ARGUMENT);
        assert_eq!(iflush(recv.0, 9, &mut data, &mut int, &mut mh, &mut request), INTERNAL_ERROR);
        int = 0;
        assert_eq!(iflush(recv.0, 1, &mut data, &mut int, &mut mh, &mut request), SUCCESS);
        assert!(request.is_null(), "nothing was received");
        let reg_mr = table.reg_mr.unwrap();
        assert_eq!(reg_mr(send.0, data, 1, PTR_HOST, &mut mh), SUCCESS);
        assert_eq!((table.dereg_mr.unwrap())(send.0, mh), SUCCESS);
        assert_eq!(reg_mr(send.0, data, 1, PTR_CUDA, &mut mh), INVALID_ARGUMENT);
        assert_eq!(reg_mr(send.0, data, 1, 3, &mut mh), INTERNAL_ERROR);
        let reg_mr_dma_buf = table.reg_mr_dma_buf.unwrap();
        let none = fs::File::open("/dev/zero").unwrap();
        for descriptor in [-1, none.as_raw_fd()] {
            let code = reg_mr_dma_buf(recv.0, data, 1, PTR_CUDA, 0, descriptor, &mut mh);
            assert_eq!((code, mh), (INVALID_ARGUMENT, null));
        }
        let mut properties = MaybeUninit::<PropertiesV12>::uninit();
        let get_properties = table.get_properties.unwrap();
        assert_eq!(get_properties(-1, properties.as_mut_ptr()), INVALID_ARGUMENT);
        assert_eq!(get_properties(9999, properties.as_mut_ptr()), INVALID_ARGUMENT);
    }
    // The connection still works.
    // SAFETY: the byte lives until the requests are finished.
    let (out, back) = unsafe {
        (net.isend(send, ptr::null(), 0).unwrap().unwrap(), net.irecv(recv, &mut byte, 1))
    };
    assert_eq!(net.finish(back.unwrap().unwrap()), Ok(0));
    assert_eq!(net.finish(out), Ok(0));
    net.close_send(send);
    net.close_recv(recv);
}

/// Checks the fields that a version's properties have.
macro_rules! check_properties {
    ($net:expr, $table:ty, $($field:ident == $value:expr),* $(,)?) => {{
        let mut properties = MaybeUninit::uninit();
        let get = $net.table::<$table>().get_properties.unwrap();
        // SAFETY: a place for the properties is passed, and they are used only if written.
        let properties = unsafe {
            assert_eq!(get(0, properties.as_mut_ptr()), SUCCESS);
            properties.assume_init()
        };
        // SAFETY: the name ends in a zero byte.
        let name = unsafe { CStr::from_ptr(properties.name) };
        assert_eq!(name, if in_rdma_lab() { c"rxe0:1" } else { c"lo" });
        assert_eq!(properties.port, i32::from(in_rdma_lab()));
        assert!(properties.pci_path.is_null());
        // That of a card, where there is one; else the device's number.
        assert_eq!(properties.guid != 0, in_rdma_lab());
        assert!(properties.speed > 0);
        assert_eq!(properties.ptr_support, PTR_HOST);
        assert!(properties.max_comms > 1000);
        $(assert_eq!(properties.$field, $value, stringify!($field));)*
        properties
    }};
}

#[test]
fn properties_of_every_version() {
    let net = |version| Net::init(version, 0x104).unwrap();
    let in_range = |bytes| assert!(bytes > 0 && bytes <= MAX_NET_SIZE);
    let global = i32::from(in_rdma_lab());
    check_properties!(net(6), NetV6,);
    check_properties!(net(7), NetV7, net_device_type == 0, net_device_version == 0);
    check_properties!(net(8), NetV8, reg_is_global == global, net_device_type == 0);
    let v9 = check_properties!(net(9), NetV9, reg_is_global == global, force_flush == 0);
    assert_eq!((v9.v_props.count, v9.v_props.devices[0]), (1, 0));
    in_range(v9.max_p2p_bytes);
    in_range(v9.max_coll_bytes);
    let v11 = check_properties!(net(11), NetV11, max_multi_request_size == 1);
    in_range(v11.max_p2p_bytes);
    let v12 = check_properties!(
        net(12),
        NetV12,
        max_multi_request_size == 1,
        // Set in the environment.
        rail_id == 3,
        plane_id == -1,
    );
    assert_eq!((v12.v_props.count, v12.v_props.devices[0]), (1, 0));
    in_range(v12.max_p2p_bytes);
    in_range(v12.max_coll_bytes);
}

#[test]
fn every_table_is_named() {
    for version in VERSIONS {
        let net = Net::init(version, 0x105).unwrap();
        assert_eq!(net.name(), c"Evenkeel");
    }
}

#[test]
fn negative_sizes_are_refused() {
    let net = Net::init(8, 0).unwrap();
    let (send, recv): (Opaque, Opaque) = net.pair();
    let mut request = ptr::null_mut();
    let isend = net.table::<NetV8>().isend.unwrap();
    let size: c_int = -1;
    // SAFETY: the call must not touch the data.
    let result: NcclResult = unsafe {
        isend(send.0, ptr::dangling_mut::<u8>().cast(), size, 0, ptr::null_mut(), &mut request)
    };
    assert_eq!(result, INVALID_ARGUMENT);
    net.close_send(send);
    net.close_recv(recv);
}
