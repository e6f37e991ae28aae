//! A device's ports and their addresses (GIDs), which the kernel lists under `/sys`.

use std::fmt;
use std::fs;
use std::net::{IpAddr, Ipv6Addr};
use std::path::PathBuf;

/// The present attributes of a port.
#[derive(Clone, Debug)]
pub struct Port {
    /// Whether it is up.
    pub active: bool,
    /// Whether its link layer is Ethernet (RoCE) rather than InfiniBand.
    pub ethernet: bool,
    /// Local identifier (LID), on InfiniBand.
    pub lid: u16,
    /// Code of the maximum packet size (MTU): 1 is 256 bytes, each step doubles it.
    pub mtu: u8,
    /// Mb/s; 0 if unknown.
    pub speed: u32,
    /// Number of entries of its table of partition keys.
    pub pkeys: u16,
    /// Whether packets need a global route header even within the subnet.
    pub grh_required: bool,
}

/// Mb/s of a port, from the codes of its link width and link speed (InfiniBand specification,
/// PortInfo).
pub(crate) fn speed(width: u8, speed: u8) -> u32 {
    let width = match width {
        1 => 1,
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => 0,
    };
    let speed = match speed {
        1 => 2_500,
        2 => 5_000,
        4 | 8 => 10_000,
        16 => 14_000,
        32 => 25_000,
        64 => 50_000,
        128 => 100_000,
        _ => 0,
    };
    width * speed
}

/// Mb/s of a port as the kernel lists it, such as `800 Gb/sec (4X XDR)`. Needed for speeds whose
/// code does not fit a byte.
pub(crate) fn listed_speed(device: &str, port: u8) -> u32 {
    let path = PathBuf::from(format!("/sys/class/infiniband/{device}/ports/{port}/rate"));
    parse_speed(&fs::read_to_string(path).unwrap_or_default())
}

fn parse_speed(text: &str) -> u32 {
    let mut words = text.split_ascii_whitespace();
    let number = words.next().and_then(|number| number.parse::<f64>().ok());
    match (number, words.next()) {
        (Some(gigabits), Some("Gb/sec")) => (gigabits * 1e3) as u32,
        _ => 0,
    }
}

/// The address of a port.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// The IP address that it is derived from, on Ethernet.
    pub fn ip(&self) -> IpAddr {
        Ipv6Addr::from(self.0).to_canonical()
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ipv6Addr::from(self.0).fmt(f)
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gid({self})")
    }
}

/// The format of packets with a GID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GidKind {
    /// InfiniBand, or RoCE v1, which cannot be routed.
    Native,
    /// RoCE v2: UDP over IP.
    RoceV2,
}

/// The GIDs of a port that are set: index, kind and address.
pub fn gids(device: &str, port: u8) -> Vec<(u8, GidKind, Gid)> {
    let folder = PathBuf::from(format!("/sys/class/infiniband/{device}/ports/{port}"));
    let read = |kind: &str, index: u8| {
        fs::read_to_string(folder.join(kind).join(index.to_string())).unwrap_or_default()
    };
    (0..=u8::MAX)
        .filter_map(|index| {
            // GIDs of other network namespaces cannot be read.
            let address: Ipv6Addr = read("gids", index).trim().parse().ok()?;
            let roce = read("gid_attrs/types", index).contains("RoCE v2");
            let kind = if roce { GidKind::RoceV2 } else { GidKind::Native };
            (!address.is_unspecified()).then_some((index, kind, Gid(address.octets())))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn port_speed_is_width_times_lane_speed() {
        assert_eq!(speed(2, 32), 100_000);
        assert_eq!(speed(2, 128), 400_000);
        assert_eq!(speed(1, 1), 2_500);
        assert_eq!(speed(3, 32), 0);
        assert_eq!(parse_speed("800 Gb/sec (4X XDR)\n"), 800_000);
        assert_eq!(parse_speed("2.5 Gb/sec (1X SDR)\n"), 2_500);
        assert_eq!(parse_speed(""), 0);
    }

    #[test]
    fn gid_of_ipv4_address_is_mapped() {
        let gid = Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 77, 0, 1]);
        assert_eq!(gid.ip(), "10.77.0.1".parse::<IpAddr>().unwrap());
        assert_eq!(gid.to_string(), "::ffff:10.77.0.1");
    }

    #[test]
    fn missing_device_has_no_gids() {
        assert!(gids("no such device", 1).is_empty());
    }
}
