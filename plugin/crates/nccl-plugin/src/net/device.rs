//! Devices and their properties.

use std::env;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::Mutex;

use evenkeel_nccl_abi::{
    DEVICE_HOST, DEVICE_VERSION_INVALID, NcclResult, PTR_CUDA, PTR_DMABUF, PTR_HOST, PropertiesV6,
    PropertiesV7, PropertiesV8, PropertiesV9, PropertiesV11, PropertiesV12, RAIL_UNDEFINED,
    VDeviceProperties,
};
use evenkeel_transport::sync::lock;
use evenkeel_transport::{MAX_MESSAGE_BYTES, MemoryTypes, Rail};

use super::shared_comms::max_recvs;
use crate::error::{PluginError, guard};
use crate::ffi::{device_index, handle_ref, out_param};
use crate::plugin;

/// Connections are limited by file descriptors only. NCCL's own sockets advertise this number.
const MAX_COMMS: c_int = 65536;
/// `maxP2pBytes` and `maxCollBytes`.
pub(crate) const MAX_BYTES: usize = MAX_MESSAGE_BYTES as usize;

/// Number of devices.
fn device_count() -> Result<usize, PluginError> {
    Ok(plugin::transport()?.device_count())
}

/// A device's properties, from which those of each version are made.
pub(crate) struct DeviceProperties {
    pub(crate) name: &'static CStr,
    pub(crate) pci_path: Option<&'static CStr>,
    /// Identifies the card: the same for all its devices.
    pub(crate) guid: u64,
    /// Mbit/s.
    pub(crate) speed: i32,
    /// Number of the RDMA port, counted from 1; 0 for other devices.
    pub(crate) port: i32,
    /// Types of memory that messages may be in.
    pub(crate) memory_types: MemoryTypes,
    /// The rail and plane that it belongs to, if known.
    pub(crate) rail: Option<Rail>,
    /// Numbers of the host's devices that it is made of.
    pub(crate) members: Vec<usize>,
}

/// The properties of a device.
fn device_properties(index: usize) -> Result<DeviceProperties, PluginError> {
    let transport = plugin::transport()?;
    let device = transport
        .device(index)
        .ok_or_else(|| PluginError::invalid_argument(format!("device {index} does not exist")))?;
    Ok(DeviceProperties {
        name: intern(device.name()),
        pci_path: device.pci_path().map(intern),
        guid: device.guid().unwrap_or(index as u64),
        speed: i32::try_from(device.speed()).unwrap_or(i32::MAX),
        port: device.port().into(),
        memory_types: device.memory_types(),
        rail: transport.rail(index),
        members: transport.members(index),
    })
}

pub(super) unsafe extern "C" fn devices(count: *mut c_int) -> NcclResult {
    guard("devices", || {
        // SAFETY: NCCL passes a valid out-pointer for the number.
        *unsafe { out_param(count, "count") }? =
            c_int::try_from(device_count()?).unwrap_or(c_int::MAX);
        Ok(())
    })
}

/// The properties structure of one version.
pub(crate) trait Properties {
    fn describe(device: &DeviceProperties) -> Self;
}

pub(crate) unsafe extern "C" fn get_properties<P: Properties>(
    device: c_int,
    properties: *mut P,
) -> NcclResult {
    guard("getProperties", || {
        let described = P::describe(&device_properties(device_index(device)?)?);
        if properties.is_null() {
            return Err(PluginError::invalid_argument("properties is null"));
        }
        // SAFETY: not null, and NCCL passes room for the properties of the table's version, which need
        // not be initialized.
        unsafe { properties.write(described) };
        Ok(())
    })
}

fn pci_path(device: &DeviceProperties) -> *const c_char {
    device.pci_path.map_or(ptr::null(), CStr::as_ptr)
}

/// Which types of memory `regMr` and `regMrDmaBuf` take.
fn ptr_support(types: MemoryTypes) -> c_int {
    let optional = [(types.peer_memory, PTR_CUDA), (types.dma_buffers, PTR_DMABUF)];
    optional.iter().filter(|(supported, _)| *supported).fold(PTR_HOST, |bits, (_, bit)| bits | bit)
}

fn rail_id(number: Option<u16>) -> i16 {
    number.and_then(|number| i16::try_from(number).ok()).unwrap_or(RAIL_UNDEFINED)
}

fn v_props<const N: usize>(device: &DeviceProperties) -> VDeviceProperties<N> {
    let mut devices = [0; N];
    let members = device.members.iter().take(N);
    members.zip(&mut devices).for_each(|(member, place)| *place = *member as c_int);
    VDeviceProperties { count: device.members.len().min(N) as c_int, devices }
}

/// Implements [`Properties`] with the fields that all versions have, and those listed.
macro_rules! describe {
    ($version:ident, $device:ident, { $($more:tt)* }) => {
        impl Properties for $version {
            fn describe($device: &DeviceProperties) -> Self {
                Self {
                    name: $device.name.as_ptr(),
                    pci_path: pci_path($device),
                    guid: $device.guid,
                    ptr_support: ptr_support($device.memory_types),
                    speed: $device.speed,
                    port: $device.port,
                    latency: 0.0,
                    max_comms: MAX_COMMS,
                    max_recvs: max_recvs(),
                    $($more)*
                }
            }
        }
    };
}

/// The same with the fields that v7 added: device offload, of which there is none.
macro_rules! describe_v7 {
    ($version:ident, $device:ident, { $($more:tt)* }) => {
        describe!($version, $device, {
            net_device_type: DEVICE_HOST,
            net_device_version: DEVICE_VERSION_INVALID,
            $($more)*
        });
    };
}

/// The same with the field that v8 added.
macro_rules! describe_v8 {
    ($version:ident, $device:ident, { $($more:tt)* }) => {
        describe_v7!($version, $device, {
            // Memory registered with an RDMA port serves all connections over it.
            reg_is_global: ($device.port > 0).into(),
            $($more)*
        });
    };
}

/// The same with the fields that v9 added.
macro_rules! describe_v9 {
    ($version:ident, $device:ident, { $($more:tt)* }) => {
        describe_v8!($version, $device, {
            force_flush: 0,
            v_props: v_props($device),
            max_p2p_bytes: MAX_BYTES,
            max_coll_bytes: MAX_BYTES,
            $($more)*
        });
    };
}

describe!(PropertiesV6, device, {});
describe_v7!(PropertiesV7, device, {});
describe_v8!(PropertiesV8, device, {});
describe_v9!(PropertiesV9, device, {});
describe_v9!(PropertiesV11, device, { max_multi_request_size: 1, });
describe_v9!(PropertiesV12, device, {
    max_multi_request_size: 1,
    rail_id: rail_id(device.rail.map(|rail| rail.number)),
    plane_id: rail_id(device.rail.and_then(|rail| rail.plane)),
});

/// NCCL's variables that ask for devices of several cards. By itself NCCL joins the ports of a card, which may be in networks that
/// do not reach each other.
const FUSION: [&str; 2] = ["NCCL_NET_FORCE_MERGE", "NCCL_NET_MERGE_LEVEL"];

/// Makes one device of several. `N` is the size of the version's array of numbers.
pub(crate) unsafe extern "C" fn make_v_device<const N: usize>(
    device: *mut c_int,
    members: *mut c_void,
) -> NcclResult {
    guard("makeVDevice", || {
        // SAFETY: NCCL passes a valid out-pointer for the number.
        let device = unsafe { out_param(device, "device") }?;
        // SAFETY: NCCL passes the structure of the table's version.
        let members = unsafe { handle_ref::<VDeviceProperties<N>>(members, "props") }?;
        let count = usize::try_from(members.count).ok().filter(|count| *count <= N);
        let count = count.ok_or_else(|| {
            let what = format!("{} devices cannot be one: 2 to {N} can", members.count);
            PluginError::invalid_argument(what)
        })?;
        let members: Vec<usize> = members.devices[..count]
            .iter()
            .map(|member| device_index(*member))
            .collect::<Result<_, _>>()?;
        if FUSION.iter().all(|name| env::var_os(name).is_none()) {
            return Err(PluginError::invalid_usage(format!(
                "cards stay devices of their own unless {} is set",
                FUSION.join(" or ")
            )));
        }
        let made = plugin::transport()?.fuse(&members)?;
        *device = c_int::try_from(made).unwrap_or(c_int::MAX);
        Ok(())
    })
}

/// A C string that lives as long as the process. NCCL keeps names for ever, so they are never
/// freed. Equal names share one string, so that memory does not grow with each `init`.
fn intern(text: &str) -> &'static CStr {
    static NAMES: Mutex<Vec<&'static CStr>> = Mutex::new(Vec::new());
    let mut names = lock(&NAMES);
    if let Some(known) = names.iter().find(|name| name.to_bytes() == text.as_bytes()) {
        return known;
    }
    let name: &'static CStr = Box::leak(CString::new(text).unwrap_or_default().into_boxed_c_str());
    names.push(name);
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intern_shares_equal_names() {
        assert_eq!(intern("eth0").as_ptr(), intern("eth0").as_ptr());
        assert_eq!(intern("eth1"), c"eth1");
    }
}
