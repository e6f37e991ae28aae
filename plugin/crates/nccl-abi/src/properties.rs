//! `ncclNetProperties`: what a plugin reports about one device.

use std::ffi::{c_char, c_int};
use std::mem::offset_of;

/// `ncclNetVDeviceProps`: the physical devices that a device is made of. `N` is 4 up to v11 and 8
/// in v12.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct VDeviceProperties<const N: usize> {
    /// Number of valid entries in `devices`.
    pub count: c_int,
    /// Indices of physical devices.
    pub devices: [c_int; N],
}

macro_rules! properties {
    ($(#[$doc:meta])* $name:ident { $($field:ident),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        #[repr(C)]
        pub struct $name { $(
            #[doc = describe!($field)]
            pub $field: kind!($field, $name),
        )* }
    };
}

macro_rules! describe {
    (name) => {
        "Name for logs and for matching with NCCL's topology; NUL-terminated, lives as long as the plugin."
    };
    (pci_path) => {
        "Path below /sys of the PCI device, or null."
    };
    (guid) => {
        "Identifies the NIC's chip."
    };
    (ptr_support) => {
        "Bits of memory kinds the device can read and write."
    };
    (reg_is_global) => {
        "1 if a registration is not tied to one connection."
    };
    (force_flush) => {
        "1 if every receive into GPU memory needs a flush."
    };
    (speed) => {
        "Mbit/s."
    };
    (port) => {
        "Port number on the NIC."
    };
    (latency) => {
        "Microseconds."
    };
    (max_comms) => {
        "Maximum number of connections."
    };
    (max_recvs) => {
        "Maximum number of receives in one group."
    };
    (net_device_type) => {
        "0: driven by the host."
    };
    (net_device_version) => {
        "0: driven by the host."
    };
    (v_props) => {
        "The physical devices behind this one."
    };
    (max_p2p_bytes) => {
        "Largest single message, bytes."
    };
    (max_coll_bytes) => {
        "Largest single collective operation, bytes."
    };
    (max_multi_request_size) => {
        "Maximum number of requests in one multi-request."
    };
    (rail_id) => {
        "Rail, or -1."
    };
    (plane_id) => {
        "Plane, or -1."
    };
}

macro_rules! kind {
    (name, $_v:ident) => { *const c_char };
    (pci_path, $_v:ident) => { *const c_char };
    (guid, $_v:ident) => { u64 };
    (latency, $_v:ident) => { f32 };
    (v_props, PropertiesV12) => { VDeviceProperties<8> };
    (v_props, $_v:ident) => { VDeviceProperties<4> };
    (max_p2p_bytes, $_v:ident) => { usize };
    (max_coll_bytes, $_v:ident) => { usize };
    (rail_id, $_v:ident) => { i16 };
    (plane_id, $_v:ident) => { i16 };
    ($_other:ident, $_v:ident) => { c_int };
}

properties! {
    /// v6, NCCL 2.13 to 2.18.
    PropertiesV6 { name, pci_path, guid, ptr_support, speed, port, latency, max_comms, max_recvs }
}
properties! {
    /// v7, NCCL 2.19: device offload.
    PropertiesV7 {
        name, pci_path, guid, ptr_support, speed, port, latency, max_comms, max_recvs,
        net_device_type, net_device_version,
    }
}
properties! {
    /// v8, NCCL 2.20 to 2.23: global registrations.
    PropertiesV8 {
        name, pci_path, guid, ptr_support, reg_is_global, speed, port, latency, max_comms,
        max_recvs, net_device_type, net_device_version,
    }
}
properties! {
    /// v9, NCCL 2.24 and 2.25: virtual devices and size limits.
    PropertiesV9 {
        name, pci_path, guid, ptr_support, reg_is_global, force_flush, speed, port, latency,
        max_comms, max_recvs, net_device_type, net_device_version, v_props, max_p2p_bytes,
        max_coll_bytes,
    }
}
/// v10, NCCL 2.26 and 2.27.
pub type PropertiesV10 = PropertiesV9;
properties! {
    /// v11, NCCL 2.28 and 2.29: multi-requests.
    PropertiesV11 {
        name, pci_path, guid, ptr_support, reg_is_global, force_flush, speed, port, latency,
        max_comms, max_recvs, net_device_type, net_device_version, v_props, max_p2p_bytes,
        max_coll_bytes, max_multi_request_size,
    }
}
properties! {
    /// v12, NCCL 2.30 and later: rails and planes.
    PropertiesV12 {
        name, pci_path, guid, ptr_support, reg_is_global, force_flush, speed, port, latency,
        max_comms, max_recvs, net_device_type, net_device_version, v_props, max_p2p_bytes,
        max_coll_bytes, max_multi_request_size, rail_id, plane_id,
    }
}

const _: () = {
    assert!(size_of::<PropertiesV6>() == 48);
    assert!(size_of::<PropertiesV7>() == 56);
    assert!(size_of::<PropertiesV8>() == 64);
    assert!(size_of::<PropertiesV9>() == 104);
    assert!(size_of::<PropertiesV11>() == 112);
    assert!(size_of::<PropertiesV12>() == 128);

    assert!(offset_of!(PropertiesV6, ptr_support) == 24);
    assert!(offset_of!(PropertiesV6, speed) == 28);
    assert!(offset_of!(PropertiesV6, max_recvs) == 44);
    assert!(offset_of!(PropertiesV7, net_device_type) == 48);

    assert!(offset_of!(PropertiesV8, reg_is_global) == 28);
    assert!(offset_of!(PropertiesV8, speed) == 32);
    assert!(offset_of!(PropertiesV8, port) == 36);
    assert!(offset_of!(PropertiesV8, latency) == 40);
    assert!(offset_of!(PropertiesV8, max_comms) == 44);
    assert!(offset_of!(PropertiesV8, max_recvs) == 48);
    assert!(offset_of!(PropertiesV8, net_device_type) == 52);
    assert!(offset_of!(PropertiesV8, net_device_version) == 56);

    assert!(offset_of!(PropertiesV9, v_props) == 64);
    assert!(offset_of!(PropertiesV9, max_p2p_bytes) == 88);
    assert!(offset_of!(PropertiesV9, max_coll_bytes) == 96);
    assert!(offset_of!(PropertiesV11, v_props) == 64);
    assert!(offset_of!(PropertiesV11, max_p2p_bytes) == 88);
    assert!(offset_of!(PropertiesV11, max_coll_bytes) == 96);
    assert!(offset_of!(PropertiesV11, max_multi_request_size) == 104);

    assert!(offset_of!(PropertiesV12, reg_is_global) == 28);
    assert!(offset_of!(PropertiesV12, force_flush) == 32);
    assert!(offset_of!(PropertiesV12, speed) == 36);
    assert!(offset_of!(PropertiesV12, port) == 40);
    assert!(offset_of!(PropertiesV12, latency) == 44);
    assert!(offset_of!(PropertiesV12, max_comms) == 48);
    assert!(offset_of!(PropertiesV12, max_recvs) == 52);
    assert!(offset_of!(PropertiesV12, net_device_type) == 56);
    assert!(offset_of!(PropertiesV12, net_device_version) == 60);
    assert!(offset_of!(PropertiesV12, v_props) == 64);
    assert!(offset_of!(PropertiesV12, max_p2p_bytes) == 104);
    assert!(offset_of!(PropertiesV12, max_coll_bytes) == 112);
    assert!(offset_of!(PropertiesV12, max_multi_request_size) == 120);
    assert!(offset_of!(PropertiesV12, rail_id) == 124);
    assert!(offset_of!(PropertiesV12, plane_id) == 126);
};
