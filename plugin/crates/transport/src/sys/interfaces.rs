//! The network interfaces of this host.

use std::ffi::CStr;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ptr;

/// The network interfaces of this host, in the kernel's order.
#[derive(Default)]
pub(crate) struct Interfaces {
    /// All, also those without an address.
    pub(crate) all: Vec<InterfaceInfo>,
    pub(crate) addresses: Vec<InterfaceAddress>,
}

/// A network interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct InterfaceInfo {
    pub(crate) name: String,
    pub(crate) link: LinkState,
    pub(crate) loopback: bool,
}

/// An address of a network interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct InterfaceAddress {
    pub(crate) name: String,
    pub(crate) ip: IpAddr,
    /// Interface index, which scopes link-local addresses.
    pub(crate) index: u32,
    pub(crate) link: LinkState,
    pub(crate) loopback: bool,
}

/// Whether an interface can carry anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LinkState {
    Running,
    /// It is up, and nothing is at its other end.
    NoCarrier,
    Down,
}

impl LinkState {
    fn of(flags: libc::c_int) -> Self {
        match (flags & libc::IFF_UP != 0, flags & libc::IFF_RUNNING != 0) {
            (false, _) => Self::Down,
            (true, false) => Self::NoCarrier,
            (true, true) => Self::Running,
        }
    }
}

/// All interfaces and their IP addresses.
pub(crate) fn interfaces() -> io::Result<Interfaces> {
    let mut list: *mut libc::ifaddrs = ptr::null_mut();
    // SAFETY: getifaddrs stores the head of a list that freeifaddrs releases below.
    if unsafe { libc::getifaddrs(&mut list) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut interfaces = Interfaces::default();
    let mut next = list;
    while !next.is_null() {
        // SAFETY: `next` is an element of the list, which is not released before the loop ends.
        let element = unsafe { &*next };
        // SAFETY: every element has a name that ends in a zero byte and lives as long as the list.
        let name = unsafe { CStr::from_ptr(element.ifa_name) };
        let name = name.to_string_lossy().into_owned();
        let flags = element.ifa_flags as libc::c_int;
        let (link, loopback) = (LinkState::of(flags), flags & libc::IFF_LOOPBACK != 0);
        // Each interface has an element of its own, and one more for each address.
        if interfaces.all.iter().all(|known| known.name != name) {
            interfaces.all.push(InterfaceInfo { name: name.clone(), link, loopback });
        }
        // SAFETY: the address of an element is null or a sockaddr as long as its family says.
        if let Some(ip) = unsafe { ip_of(element.ifa_addr) } {
            // SAFETY: the name of the element is a string that ends in a zero byte.
            let index = unsafe { libc::if_nametoindex(element.ifa_name) };
            interfaces.addresses.push(InterfaceAddress { name, ip, index, link, loopback });
        }
        next = element.ifa_next;
    }
    // SAFETY: `list` came from getifaddrs, and nothing borrowed from it is left.
    unsafe { libc::freeifaddrs(list) };
    Ok(interfaces)
}

/// # Safety
/// `address` must be null or point to a socket address as long as its family says.
unsafe fn ip_of(address: *const libc::sockaddr) -> Option<IpAddr> {
    if address.is_null() {
        return None;
    }
    // SAFETY: not null, and the family is the first field of every socket address.
    match libc::c_int::from(unsafe { (*address).sa_family }) {
        libc::AF_INET => {
            // SAFETY: an address of this family is a sockaddr_in.
            let v4 = unsafe { ptr::read_unaligned(address.cast::<libc::sockaddr_in>()) };
            Some(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: an address of this family is a sockaddr_in6.
            let v6 = unsafe { ptr::read_unaligned(address.cast::<libc::sockaddr_in6>()) };
            Some(Ipv6Addr::from(v6.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interfaces_include_loopback() {
        let Interfaces { all, addresses } = interfaces().unwrap();
        assert!(all.iter().any(|interface| interface.loopback));
        let lo = addresses.iter().find(|address| address.loopback).unwrap();
        assert!(lo.ip.is_loopback() && lo.index > 0, "{lo:?}");
    }
}
