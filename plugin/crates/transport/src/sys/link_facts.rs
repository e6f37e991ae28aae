//! What the kernel says of an interface beyond its addresses: whether packets can leave the host by
//! it.

use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Maximum bytes that are read of a table of routes.
const MAX_ROUTE_BYTES: u64 = 64 << 10;

/// Where an interface leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// Out of this host, as far as is known.
    Network,
    /// To containers and virtual machines of this host: a bridge without a port that leads out.
    HostBridge,
    /// To its bridge, which receives all that comes to it: it has no use for an address of its own.
    BridgePort,
    /// To other hosts, but in packets that another interface of this host carries: VXLAN or Geneve.
    Overlay,
    /// To no neighbour (`IFF_NOARP`): a dummy, a VRF, an IP tunnel or a VPN. It may still hold the
    /// host's own address.
    NoNeighbour,
}

/// What decides where the interfaces of this network namespace lead.
pub(super) struct LinkFacts {
    sysfs: PathBuf,
    /// Interfaces that a default route leaves by.
    default_routes: BTreeSet<String>,
}

impl LinkFacts {
    pub(super) fn read() -> Self {
        // Of the thread, which may be in a network namespace of its own. The kernel lists default
        // routes first, and a router may have a million others.
        let text = |file: &str| {
            let mut text = Vec::new();
            let opened = fs::File::open(Path::new("/proc/thread-self/net").join(file));
            // Without the file no default route is known.
            let _ = opened.map(|file| file.take(MAX_ROUTE_BYTES).read_to_end(&mut text));
            String::from_utf8_lossy(&text).into_owned()
        };
        Self {
            sysfs: PathBuf::from("/sys/class/net"),
            default_routes: default_routes(&text("route"), &text("ipv6_route")),
        }
    }

    /// Where an interface leads, from its name, index and flags (`SIOCGIFFLAGS`).
    pub(super) fn reach(&self, name: &str, index: u32, flags: libc::c_int) -> Reach {
        let has_no_neighbours = flags & libc::IFF_NOARP != 0;
        if flags & libc::IFF_LOOPBACK != 0 || self.default_routes.contains(name) {
            return Reach::Network;
        }
        let link = self.sysfs.join(name);
        let known = fs::read_to_string(link.join("ifindex")).ok();
        // Without sysfs, or with that of another network namespace, names tell, as they do for
        // NCCL.
        if known.and_then(|text| text.trim().parse().ok()) != Some(index) {
            return match (name.starts_with("docker"), has_no_neighbours) {
                (true, _) => Reach::HostBridge,
                (false, true) => Reach::NoNeighbour,
                (false, false) => Reach::Network,
            };
        }
        if link.join("brport").exists() {
            return Reach::BridgePort;
        }
        if link.join("device").exists() {
            return Reach::Network;
        }
        if link.join("bridge").exists() {
            let ports = fs::read_dir(link.join("brif")).into_iter().flatten().flatten();
            let leads_out = ports.map(|port| self.sysfs.join(port.file_name())).any(|port| {
                // The end of a cable to a container (veth) or to a virtual machine (tap) has none
                // of these.
                port.join("device").exists() || kind(&port).is_some() || has_lower_link(&port)
            });
            return if leads_out { Reach::Network } else { Reach::HostBridge };
        }
        match kind(&link).as_deref() {
            Some("vxlan" | "geneve") => Reach::Overlay,
            // In its modes l3 and l3s it has no neighbours, and leads where the card below leads.
            Some("ipvlan") => Reach::Network,
            _ if has_no_neighbours || link.join("tun_flags").exists() => Reach::NoNeighbour,
            _ => Reach::Network,
        }
    }
}

/// The kind of a virtual interface, where its driver sets one (`DEVTYPE`), such as `bridge`,
/// `vxlan`, `vlan` or `bond`.
fn kind(link: &Path) -> Option<String> {
    let text = fs::read_to_string(link.join("uevent")).ok()?;
    text.lines().find_map(|line| line.strip_prefix("DEVTYPE=")).map(str::to_owned)
}

/// Whether it stands on another interface, as a VLAN, a bond or a macvlan does.
fn has_lower_link(link: &Path) -> bool {
    let entries = fs::read_dir(link).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name()).any(|name| name.to_string_lossy().starts_with("lower_"))
}

/// The interfaces of default routes, from the kernel's tables `route` and `ipv6_route` in
/// /proc/net.
fn default_routes(v4: &str, v6: &str) -> BTreeSet<String> {
    const REJECT: u32 = 0x200;
    let flags = |text: &str| u32::from_str_radix(text, 16).ok().filter(|set| set & REJECT == 0);
    let of_v4 = v4.lines().filter_map(|line| {
        let columns: Vec<_> = line.split_whitespace().collect();
        let [name, "00000000", _, set, _, _, _, "00000000", ..] = columns[..] else { return None };
        flags(set).map(|_| name)
    });
    let of_v6 = v6.lines().filter_map(|line| {
        let columns: Vec<_> = line.split_whitespace().collect();
        let [to, "00", .., set, name] = columns[..] else { return None };
        flags(set).filter(|_| to.bytes().all(|digit| digit == b'0')).map(|_| name)
    });
    of_v4.chain(of_v6).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_routes_are_read_from_the_kernels_tables() {
        let v4 = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n\
                  eth0 00000000 0100090A 0003 0 0 0 00000000 0 0 0\n\
                  eth1 0001090A 00000000 0001 0 0 0 00FFFFFF 0 0 0\n\
                  * 00000000 00000000 0200 0 0 9 00000000 0 0 0\n";
        let zero = "0".repeat(32);
        let v6 = format!(
            "{zero} 00 {zero} 00 fe800000000000000000000000000001 00000400 00000001 00000000 00000003 net1\n\
             {zero} 00 {zero} 00 {zero} ffffffff 00000001 00000000 00200200 lo\n\
             fe80{rest} 40 {zero} 00 {zero} 00000100 00000001 00000000 00000001 eth2\n",
            rest = "0".repeat(28)
        );
        let found = default_routes(v4, &v6);
        assert_eq!(found.into_iter().collect::<Vec<_>>(), ["eth0", "net1"]);
    }

    /// Makes a folder like that of an interface in sysfs.
    fn link(sysfs: &Path, name: &str, index: u32, entries: &[&str], kind: &str) {
        let folder = sysfs.join(name);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("ifindex"), format!("{index}\n")).unwrap();
        let kind = if kind.is_empty() { String::new() } else { format!("DEVTYPE={kind}\n") };
        fs::write(folder.join("uevent"), format!("{kind}INTERFACE={name}\n")).unwrap();
        entries.iter().for_each(|entry| fs::create_dir_all(folder.join(entry)).unwrap());
    }

    #[test]
    fn interfaces_lead_where_the_kernel_says() {
        let sysfs = std::env::temp_dir().join(format!("evenkeel-links-{}", std::process::id()));
        let links: [(&str, &[&str], &str); 18] = [
            ("eth0", &["device", "brport"], ""),
            ("eth1", &["device"], ""),
            ("veth0", &["brport"], ""),
            ("veth1", &[], ""),
            ("tap0", &["tun_flags"], ""),
            ("bond0", &["bonding", "lower_eth0"], "bond"),
            ("eth0.7", &["lower_eth0"], "vlan"),
            ("macvlan0", &["lower_eth0"], ""),
            ("ipvlan0", &["lower_eth0"], "ipvlan"),
            ("docker0", &["bridge", "brif/veth0"], "bridge"),
            ("virbr0", &["bridge", "brif/tap0"], "bridge"),
            ("empty", &["bridge", "brif"], "bridge"),
            ("br-eth", &["bridge", "brif/veth0", "brif/eth0"], "bridge"),
            ("br-vlan", &["bridge", "brif/eth0.7"], "bridge"),
            ("br-default", &["bridge", "brif/veth0"], "bridge"),
            ("flannel.1", &[], "vxlan"),
            ("wg0", &[], "wireguard"),
            ("dummy0", &[], ""),
        ];
        for (index, (name, entries, kind)) in (1..).zip(links) {
            link(&sysfs, name, index, entries, kind);
        }
        let facts = LinkFacts {
            sysfs: sysfs.clone(),
            default_routes: BTreeSet::from(["br-default".to_owned()]),
        };
        let reach = |name: &str, flags| {
            let at = links.iter().position(|(link, ..)| *link == name);
            facts.reach(name, at.map_or(99, |at| at as u32 + 1), flags)
        };
        for name in ["eth1", "veth1", "bond0", "eth0.7", "macvlan0", "br-eth", "br-vlan"] {
            assert_eq!(reach(name, 0), Reach::Network, "{name}");
        }
        for name in ["eth0", "veth0"] {
            assert_eq!(reach(name, 0), Reach::BridgePort, "{name}");
        }
        for name in ["docker0", "virbr0", "empty"] {
            assert_eq!(reach(name, 0), Reach::HostBridge, "{name}");
        }
        assert_eq!(reach("br-default", 0), Reach::Network, "a default route leaves by it");
        assert_eq!(reach("flannel.1", 0), Reach::Overlay);
        assert_eq!(reach("tap0", 0), Reach::NoNeighbour);
        for name in ["wg0", "dummy0"] {
            assert_eq!(reach(name, libc::IFF_NOARP), Reach::NoNeighbour, "{name}");
        }
        assert_eq!(reach("ipvlan0", libc::IFF_NOARP), Reach::Network);
        // Those that sysfs does not have.
        assert_eq!(reach("docker1", 0), Reach::HostBridge);
        assert_eq!(reach("br-other", 0), Reach::Network);
        assert_eq!(facts.reach("empty", 77, 0), Reach::Network, "of another namespace");
        fs::remove_dir_all(sysfs).unwrap();
    }
}
