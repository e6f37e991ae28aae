//! The network interfaces of this host.

use std::ffi::CStr;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ptr;

use super::link_facts::{LinkFacts, Reach};

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
    pub(crate) reach: Reach,
}

/// An address of a network interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct InterfaceAddress {
    pub(crate) name: String,
    pub(crate) ip: IpAddr,
    /// Bits of the address that all of its subnet have.
    pub(crate) prefix: u8,
    /// Interface index, which scopes link-local addresses.
    pub(crate) index: u32,
    pub(crate) link: LinkState,
    pub(crate) loopback: bool,
    pub(crate) reach: Reach,
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
    let facts = LinkFacts::read();
    let mut next = list;
    while !next.is_null() {
        // SAFETY: `next` is an element of the list, which is not released before the loop ends.
        let element = unsafe { &*next };
        // SAFETY: every element has a name that ends in a zero byte and lives as long as the list.
        let name = unsafe { CStr::from_ptr(element.ifa_name) };
        let name = name.to_string_lossy().into_owned();
        let flags = element.ifa_flags as libc::c_int;
        let (link, loopback) = (LinkState::of(flags), flags & libc::IFF_LOOPBACK != 0);
        // SAFETY: the name of the element is a string that ends in a zero byte.
        let index = unsafe { libc::if_nametoindex(element.ifa_name) };
        // Each interface has an element of its own, and one more for each address.
        let known = interfaces.all.iter().find(|known| known.name == name);
        let reach = match known {
            Some(known) => known.reach,
            None => {
                let reach = facts.reach(&name, index, flags);
                interfaces.all.push(InterfaceInfo { name: name.clone(), link, loopback, reach });
                reach
            }
        };
        // SAFETY: the address of an element is null or a sockaddr as long as its family says.
        if let Some(ip) = unsafe { ip_of(element.ifa_addr) } {
            // SAFETY: the netmask of an element is null or a sockaddr as long as its family says.
            let prefix = unsafe { ip_of(element.ifa_netmask) }.map_or_else(|| bits(ip), ones);
            let address = InterfaceAddress { name, ip, prefix, index, link, loopback, reach };
            interfaces.addresses.push(address);
        }
        next = element.ifa_next;
    }
    // SAFETY: `list` came from getifaddrs, and nothing borrowed from it is left.
    unsafe { libc::freeifaddrs(list) };
    Ok(interfaces)
}

/// Number of bits of an address.
fn bits(ip: IpAddr) -> u8 {
    if ip.is_ipv4() { 32 } else { 128 }
}

/// Number of bits that are set in a netmask.
fn ones(mask: IpAddr) -> u8 {
    let count = match mask {
        IpAddr::V4(mask) => mask.to_bits().count_ones(),
        IpAddr::V6(mask) => mask.to_bits().count_ones(),
    };
    // At most 128.
    count as u8
}

/// Whether two addresses have this many bits in common, from the first one on.
pub(crate) fn in_one_subnet(one: IpAddr, other: IpAddr, prefix: u8) -> bool {
    let differ = match (one, other) {
        (IpAddr::V4(one), IpAddr::V4(other)) => (one.to_bits() ^ other.to_bits()).leading_zeros(),
        (IpAddr::V6(one), IpAddr::V6(other)) => (one.to_bits() ^ other.to_bits()).leading_zeros(),
        _ => return false,
    };
    differ >= prefix.into()
}

/// Whether the kernel drops IPv4 packets that come by an interface which is not its own route to
/// their source: strict filtering by the reverse path. The greater one of the two settings counts.
pub(crate) fn drops_by_route(interface: &str) -> bool {
    let setting = |of: &str| {
        let text = fs::read_to_string(format!("/proc/sys/net/ipv4/conf/{of}/rp_filter")).ok()?;
        text.trim().parse::<u8>().ok()
    };
    ["all", interface].into_iter().filter_map(setting).max() == Some(1)
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
    fn subnets_are_told_by_their_prefix() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        assert!(in_one_subnet(ip("10.9.0.1"), ip("10.9.0.200"), 24));
        assert!(!in_one_subnet(ip("10.9.0.1"), ip("10.9.1.1"), 24));
        assert!(in_one_subnet(ip("10.9.0.1"), ip("10.9.0.1"), 32));
        assert!(in_one_subnet(ip("2001:db8::1"), ip("2001:db8::2"), 64));
        assert!(!in_one_subnet(ip("10.9.0.1"), ip("::1"), 0));
    }

    #[test]
    fn interfaces_include_loopback() {
        let Interfaces { all, addresses } = interfaces().unwrap();
        assert!(all.iter().any(|interface| interface.loopback));
        let lo = addresses.iter().find(|address| address.loopback).unwrap();
        assert!(lo.ip.is_loopback() && lo.index > 0, "{lo:?}");
        assert!(lo.ip.is_ipv6() || lo.prefix == 8, "{lo:?}");
    }
}
