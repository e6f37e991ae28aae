//! Discovers the devices of this host, as NCCL sees them.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::sync::Arc;

use evenkeel_protocol::{Handle, MAX_ADDRESSES};

use crate::error::{Error, ErrorKind};
use crate::rdma::{Adapter, DiscoveredPort, MemoryTypes, PortDiscovery};
use crate::selection;
use crate::settings::{Settings, TransportMode};
use crate::sys::{self, InterfaceAddress, InterfaceInfo, Interfaces, LinkState, Reach};
use crate::telemetry::log::Log;

/// Assumed speed in Mb/s if neither the system nor the user gives one. NCCL assumes the same for
/// its sockets.
const DEFAULT_SPEED: u32 = 10_000;

/// A network device for NCCL: an interface or RDMA port, or several whose flows or queue pairs
/// share the messages.
#[derive(Clone, Debug)]
pub struct Device {
    name: String,
    /// Never empty.
    interfaces: Vec<Interface>,
    speed: u32,
    pci_path: Option<String>,
    /// The RDMA port of each interface. Empty if it has none.
    ports: Vec<Arc<Adapter>>,
}

/// What the peers of an interface have to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Network {
    Tcp,
    Roce,
    InfiniBand,
}

/// A network interface with an address to send from and listen at.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Interface {
    ip: IpAddr,
    index: u32,
    /// If others of this host are in its subnet, and flows are to leave by it all the same.
    shared: Option<SharedSubnet>,
}

/// A subnet that several interfaces of a host are in. The kernel's route to it goes by one of them.
#[derive(Clone, Debug, PartialEq, Eq)]
struct SharedSubnet {
    /// The interface's own name.
    interface: String,
    prefix: u8,
    /// Addresses of this host in the subnet, which no card leads to.
    own: Vec<IpAddr>,
}

impl Device {
    /// Interface name, such as `eth0`; of several, all names, as in `eth0+eth1`; of an RDMA port,
    /// the name of its device and the port's number, such as `mlx5_0:1`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Speed in Mb/s of all interfaces together.
    pub fn speed(&self) -> u32 {
        self.speed
    }

    /// Path of the PCI device under /sys; none for virtual interfaces and for several.
    pub fn pci_path(&self) -> Option<&str> {
        self.pci_path.as_deref()
    }

    /// Its RDMA ports; none if it has network interfaces only.
    pub(crate) fn ports(&self) -> &[Arc<Adapter>] {
        &self.ports
    }

    /// Whether it has RDMA ports and all of them are down, or it has none.
    pub(crate) fn is_down(&self) -> bool {
        self.ports.iter().all(|port| port.is_down())
    }

    /// The network of each of its interfaces.
    fn networks(&self) -> impl Iterator<Item = Network> {
        let of_port = |port: &Arc<Adapter>| match port.is_ethernet() {
            true => Network::Roce,
            false => Network::InfiniBand,
        };
        (0..self.interfaces.len()).map(move |at| self.ports.get(at).map_or(Network::Tcp, of_port))
    }

    /// Its RDMA ports, each a device.
    pub(crate) fn each_port(&self) -> Vec<Self> {
        let ports = self.ports.iter().zip(&self.interfaces);
        ports
            .map(|(port, interface)| Self {
                name: port.name().to_owned(),
                interfaces: vec![interface.clone()],
                speed: port.speed().unwrap_or(DEFAULT_SPEED),
                pci_path: port.pci_path(),
                ports: vec![Arc::clone(port)],
            })
            .collect()
    }

    /// Number of the RDMA port at its device, counted from 1, of the first of several; 0 for a
    /// network interface.
    pub fn port(&self) -> u8 {
        self.ports.first().map_or(0, |adapter| adapter.number())
    }

    /// Number of the card, the same for all its ports, of the first of several; none for a network
    /// interface.
    pub fn guid(&self) -> Option<u64> {
        self.ports.first().and_then(|adapter| adapter.guid())
    }

    /// The memory types that its messages may be in: those that all its ports support.
    pub fn memory_types(&self) -> MemoryTypes {
        let types = self.ports.iter().map(|adapter| adapter.memory_types());
        types.reduce(MemoryTypes::and).unwrap_or(MemoryTypes::HOST)
    }

    /// The addresses at which peers reach it.
    pub fn addresses(&self) -> Vec<IpAddr> {
        self.interfaces.iter().map(|interface| interface.ip).collect()
    }

    /// The address to listen at, with port 0, if peers may connect to these other addresses too.
    pub(crate) fn listening(&self, others: &[IpAddr]) -> SocketAddr {
        match &self.interfaces[..] {
            [interface] if others.is_empty() => interface.scoped(SocketAddr::new(interface.ip, 0)),
            several
                if several.iter().all(|interface| interface.ip.is_ipv4())
                    && others.iter().all(IpAddr::is_ipv4) =>
            {
                (Ipv4Addr::UNSPECIFIED, 0).into()
            }
            _ => (Ipv6Addr::UNSPECIFIED, 0).into(),
        }
    }

    /// The interface that a flow must be bound to, so that it leaves by it: where several are in
    /// the peer's subnet.
    pub(crate) fn bound_interface(&self, flow: u32, peer: &SocketAddr) -> Option<&str> {
        self.interfaces[flow as usize % self.interfaces.len()].bound_for(peer.ip())
    }

    /// Number of different paths to a peer: after so many flows, [`Device::path`] begins again.
    pub(crate) fn path_count(&self, peer: &Handle) -> u32 {
        let (ours, theirs) = (self.interfaces.len() as u32, peer.addresses.len().max(1) as u32);
        // The least common multiple. Both are at most MAX_ADDRESSES.
        (1..=theirs).map(|times| ours * times).find(|all| all % theirs == 0).unwrap_or(ours)
    }

    /// The name of the interface that a flow leaves by.
    pub(crate) fn interface_name(&self, flow: u32) -> &str {
        // An RDMA port has one interface, and several are joined by their names.
        self.name.split('+').nth(flow as usize % self.interfaces.len()).unwrap_or(&self.name)
    }

    /// The addresses that a flow goes from and to. Flows take the interfaces of both sides in turn.
    /// The local address has port 0.
    pub(crate) fn path(&self, flow: u32, peer: &Handle) -> (SocketAddr, SocketAddr) {
        let interface = &self.interfaces[flow as usize % self.interfaces.len()];
        let ours = SocketAddr::new(interface.ip, 0);
        let count = peer.addresses.len().max(1);
        // A handle has at least one address.
        let theirs = peer.addresses.get(flow as usize % count).copied().unwrap_or(interface.ip);
        let theirs = SocketAddr::new(theirs, peer.port);
        (interface.scoped(ours), interface.scoped(theirs))
    }
}

impl Interface {
    /// Its name, if a flow to this address must be bound to it in order to leave by it.
    fn bound_for(&self, peer: IpAddr) -> Option<&str> {
        let shared = self.shared.as_ref()?;
        let is_there =
            sys::in_one_subnet(self.ip, peer, shared.prefix) && !shared.own.contains(&peer);
        is_there.then_some(shared.interface.as_str())
    }

    /// `addr` as this interface reaches it: a link-local address needs the interface.
    fn scoped(&self, addr: SocketAddr) -> SocketAddr {
        match addr {
            SocketAddr::V6(v6) if v6.ip().is_unicast_link_local() => {
                SocketAddrV6::new(*v6.ip(), v6.port(), 0, self.index).into()
            }
            other => other,
        }
    }
}

/// The RDMA ports that a connection of one of these devices can fail over to: those with other
/// addresses, in the order after it, as many as a handshake can name.
pub(crate) fn other_ports<'a>(of: &Device, all: &'a [Device]) -> Vec<&'a Device> {
    if of.ports.is_empty() {
        return Vec::new();
    }
    let (own, mut taken) = (of.addresses(), Vec::new());
    let at = all.iter().position(|device| device.name == of.name).map_or(0, |at| at + 1);
    let is_new = |device: &&Device| {
        let addresses = device.addresses();
        let is_own = addresses.iter().all(|address| own.contains(address));
        let is_new = !device.ports.is_empty() && !is_own && !taken.contains(&addresses);
        taken.push(addresses);
        is_new
    };
    all.iter().cycle().skip(at).take(all.len()).filter(is_new).take(MAX_ADDRESSES).collect()
}

/// The usable devices of this host.
pub(crate) fn discover(
    settings: &Settings,
    host_memory_only: Option<&str>,
    log: &Arc<dyn Log>,
) -> Result<Vec<Device>, Error> {
    let interfaces = selection::settled_interfaces(settings, &**log)?;
    let chosen = selection::choose(&interfaces.addresses, &settings.interfaces, settings.family);
    let (addresses, fallback) = (&interfaces.addresses[..], chosen.first().copied());
    let discovery = PortDiscovery { settings, addresses, fallback, host_memory_only, log };
    if let Some(ports) = rdma_ports(&discovery)? {
        return Ok(ports);
    }
    let chosen = selection::select(&interfaces, settings, &**log)?;
    let describe = |address| describe(address, &interfaces, settings.link_speed, &**log);
    let mut devices: Vec<Device> = chosen.iter().copied().map(describe).collect();
    for (device, address) in devices.iter_mut().zip(&chosen) {
        let (bind, drops) = (settings.bind_to_device, sys::drops_by_route);
        let shared = shared_subnet(address, &chosen, &interfaces.addresses, bind, drops);
        device.interfaces.iter_mut().for_each(|interface| interface.shared.clone_from(&shared));
    }
    if settings.joined { join(devices).map(|device| vec![device]) } else { Ok(devices) }
}

/// The subnet of an interface, if others of those chosen are in it. Flows to the addresses in `own`
/// are not bound. `bind` is the setting, without which flows are bound unless this host, and so
/// perhaps its peers, drops what comes by another interface than its route.
fn shared_subnet(
    of: &InterfaceAddress,
    chosen: &[&InterfaceAddress],
    own: &[InterfaceAddress],
    bind: Option<bool>,
    drops_by_route: impl Fn(&str) -> bool,
) -> Option<SharedSubnet> {
    let is_shared = chosen.iter().any(|other| {
        let prefix = of.prefix.min(other.prefix);
        other.name != of.name && sys::in_one_subnet(of.ip, other.ip, prefix)
    });
    let binds = bind.unwrap_or_else(|| chosen.iter().all(|other| !drops_by_route(&other.name)));
    let own = own.iter().map(|own| own.ip);
    (is_shared && binds).then(|| SharedSubnet {
        interface: of.name.clone(),
        prefix: of.prefix,
        own: own.filter(|ip| sys::in_one_subnet(of.ip, *ip, of.prefix)).collect(),
    })
}

/// Whether the kernel has an RDMA device.
pub(crate) fn host_has_rdma() -> bool {
    fs::read_dir("/sys/class/infiniband").is_ok_and(|mut devices| devices.next().is_some())
}

/// The RDMA ports of this host, each a device, or one device of all; none if TCP carries all
/// messages.
fn rdma_ports(discovery: &PortDiscovery<'_>) -> Result<Option<Vec<Device>>, Error> {
    let settings = discovery.settings;
    let must = settings.transport_mode == TransportMode::Rdma;
    // Settings that only TCP supports.
    let tcp_only = [
        (settings.checksum, "EVENKEEL_CHECKSUM"),
        (settings.is_static(), "EVENKEEL_SCHEDULE=static"),
    ];
    let reason = tcp_only.iter().find(|(set, _)| *set).map(|(_, name)| *name);
    let found = match (settings.transport_mode, reason) {
        (TransportMode::Tcp, _) => return Ok(None),
        (_, Some(reason)) => Err(format!("{reason} is for TCP only")),
        (_, None) => discovery.open_ports(),
    };
    let without_rdma = |why: &str| {
        discovery.log.info(&format!("evenkeel: TCP carries all: {why}"));
        Ok(None)
    };
    let ports: Vec<Device> = match found {
        Ok(found) => {
            let of_port = |port: &DiscoveredPort| {
                let is_there = |address: &&InterfaceAddress| {
                    address.ip == port.ip && address.index == port.index
                };
                discovery.addresses.iter().find(is_there)
            };
            let chosen: Vec<_> = found.iter().filter_map(of_port).collect();
            let describe = |port: DiscoveredPort| {
                let shared = of_port(&port).and_then(|address| {
                    // Control connections are tried in both ways, also to this host.
                    let bind = settings.bind_to_device;
                    shared_subnet(address, &chosen, &[], bind, sys::drops_by_route)
                });
                let DiscoveredPort { adapter, ip, index } = port;
                Device {
                    name: adapter.name().to_owned(),
                    interfaces: vec![Interface { ip, index, shared }],
                    speed: settings.link_speed.or_else(|| adapter.speed()).unwrap_or(DEFAULT_SPEED),
                    pci_path: adapter.pci_path(),
                    ports: vec![adapter],
                }
            };
            found.into_iter().map(describe).collect()
        }
        Err(why) if must => {
            let what = format!("EVENKEEL_TRANSPORT=rdma: {why}");
            return Err(Error::new(ErrorKind::Config, what));
        }
        Err(why) => return without_rdma(&why),
    };
    if !settings.joined {
        return Ok(Some(ports));
    }
    match join(ports) {
        Ok(device) => Ok(Some(vec![device])),
        Err(error) if must => Err(error),
        // The interfaces may be joined instead.
        Err(error) => without_rdma(&error.to_string()),
    }
}

/// One device of several, for a caller that chooses them.
pub(crate) fn fuse(devices: &[&Device]) -> Result<Device, Error> {
    let names = || devices.iter().map(|device| device.name()).collect::<Vec<_>>().join(", ");
    let refuse = |why: &str| {
        let what = format!("cannot make one device of {}: {why}", names());
        Err(Error::new(ErrorKind::Config, what))
    };
    if devices.len() < 2 {
        return refuse("there must be two or more");
    }
    if let Some(why) = different_networks(devices.iter().flat_map(|device| device.networks())) {
        return refuse(why);
    }
    let interfaces: Vec<_> = devices.iter().flat_map(|device| &device.interfaces).collect();
    if interfaces.len() > MAX_ADDRESSES {
        return refuse(&format!("it would have more than {MAX_ADDRESSES} interfaces or ports"));
    }
    // Ports of InfiniBand may share the address of their control connections.
    let is_same = |one: &Device, other: &Device| match (&one.ports[..], &other.ports[..]) {
        ([], []) => one.interfaces == other.interfaces,
        _ => one.name == other.name,
    };
    let others = |at: usize| devices[..at].iter().copied();
    if devices.iter().enumerate().any(|(at, one)| others(at).any(|other| is_same(one, other))) {
        return refuse("one of them is there twice");
    }
    join(devices.iter().copied().cloned().collect())
}

/// Why one device cannot be of all these networks, if so.
fn different_networks(mut networks: impl Iterator<Item = Network>) -> Option<&'static str> {
    let first = networks.next()?;
    match networks.find(|other| *other != first)? {
        Network::Roce | Network::InfiniBand if first != Network::Tcp => {
            Some("InfiniBand and RoCE do not reach each other")
        }
        _ => Some("RDMA ports and network interfaces cannot be one: no protocol is over both"),
    }
}

/// One device of all.
fn join(devices: Vec<Device>) -> Result<Device, Error> {
    let names: Vec<&str> = devices.iter().map(Device::name).collect();
    let of_rdma = devices.iter().any(|device| !device.ports.is_empty());
    let (kind, by) = match of_rdma {
        true => ("RDMA ports", "NCCL_IB_HCA"),
        false => ("interfaces", "NCCL_SOCKET_IFNAME"),
    };
    let refuse = |why: &str| {
        let names = names.join(", ");
        let what =
            format!("EVENKEEL_DEVICES=joined: {why}, there are {names}: pick some with {by}");
        Err(Error::new(ErrorKind::Config, what))
    };
    if devices.len() > MAX_ADDRESSES {
        return refuse(&format!("at most {MAX_ADDRESSES} {kind} can be joined"));
    }
    if let Some(why) = different_networks(devices.iter().flat_map(Device::networks)) {
        return refuse(why);
    }
    let pci_path = match &devices[..] {
        [device] => device.pci_path.clone(),
        _ => None,
    };
    Ok(Device {
        name: names.join("+"),
        speed: devices.iter().map(|device| device.speed).fold(0, u32::saturating_add),
        pci_path,
        ports: devices.iter().flat_map(|device| device.ports.iter().cloned()).collect(),
        interfaces: devices.into_iter().flat_map(|device| device.interfaces).collect(),
    })
}

fn describe(
    address: &InterfaceAddress,
    interfaces: &Interfaces,
    override_speed: Option<u32>,
    log: &dyn Log,
) -> Device {
    let name = &address.name;
    let is_behind_cards = address.loopback && !address.ip.is_loopback();
    let read = || if is_behind_cards { speed_of_cards(interfaces) } else { read_speed(name) };
    let speed = override_speed.or_else(read).unwrap_or_else(|| {
        log.info(&format!(
            "evenkeel: {name}: speed unknown, assuming {DEFAULT_SPEED} Mb/s; set EVENKEEL_LINK_SPEED to the real one"
        ));
        DEFAULT_SPEED
    });
    let pci_path = fs::canonicalize(format!("/sys/class/net/{name}/device"))
        .ok()
        .map(|path| path.to_string_lossy().into_owned());
    let interfaces = vec![Interface { ip: address.ip, index: address.index, shared: None }];
    Device { name: name.clone(), interfaces, speed, pci_path, ports: Vec::new() }
}

/// The speed in Mb/s of all cards together, over which the host's address on the loopback interface
/// is reached.
fn speed_of_cards(interfaces: &Interfaces) -> Option<u32> {
    let is_card = |card: &&InterfaceInfo| {
        !card.loopback && card.link == LinkState::Running && card.reach == Reach::Network
    };
    let speeds = interfaces.all.iter().filter(is_card).filter_map(|card| read_speed(&card.name));
    speeds.reduce(u32::saturating_add)
}

fn read_speed(name: &str) -> Option<u32> {
    let text = fs::read_to_string(format!("/sys/class/net/{name}/speed")).ok()?;
    // The kernel reports -1 if it does not know.
    text.trim().parse().ok().filter(|speed| *speed > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(name: &str, ip: &str) -> InterfaceAddress {
        InterfaceAddress {
            name: name.to_owned(),
            ip: ip.parse().unwrap(),
            prefix: 24,
            index: 3,
            link: LinkState::Running,
            loopback: name == "lo",
            reach: Reach::Network,
        }
    }

    fn device(ip: &str, index: u32) -> Device {
        let interfaces = vec![Interface { ip: ip.parse().unwrap(), index, shared: None }];
        let name = format!("eth{index}");
        Device { name, interfaces, speed: 1000, pci_path: None, ports: Vec::new() }
    }

    fn peer(addresses: &[&str]) -> Handle {
        let addresses = addresses.iter().map(|ip| ip.parse().unwrap()).collect();
        Handle { addresses, port: 80, nonce: evenkeel_protocol::Nonce([0; 16]) }
    }

    #[test]
    fn link_local_peers_are_reached_through_the_device() {
        let device = device("fe80::5", 3);
        let to = |ip| device.path(0, &peer(&[ip])).1;
        assert_eq!(to("fe80::9"), "[fe80::9%3]:80".parse().unwrap());
        assert_eq!(to("2001:db8::9"), "[2001:db8::9]:80".parse().unwrap());
        assert_eq!(device.listening(&[]), "[fe80::5%3]:0".parse().unwrap());
        let elsewhere = "10.0.0.1".parse().unwrap();
        assert_eq!(device.listening(&[elsewhere]), "[::]:0".parse().unwrap());
    }

    #[test]
    fn interfaces_in_one_subnet_are_bound_unless_hosts_drop_by_route() {
        let addresses = [("eth0", "10.0.0.5"), ("eth1", "10.0.0.6"), ("eth2", "10.0.2.5")];
        let addresses = addresses.map(|(name, ip)| address(name, ip));
        let chosen: Vec<_> = addresses.iter().collect();
        let bound = |at: usize, bind, strict: &str| {
            let shared = shared_subnet(chosen[at], &chosen, &[], bind, |name| name == strict);
            shared.map(|shared| shared.interface)
        };
        assert_eq!(bound(1, None, ""), Some("eth1".to_owned()));
        assert_eq!(bound(2, None, ""), None, "alone in its subnet");
        assert_eq!(bound(1, None, "eth0"), None, "rp_filter=1");
        assert_eq!(bound(1, Some(true), "eth0"), Some("eth1".to_owned()));
        assert_eq!(bound(1, Some(false), ""), None);
        let shared = shared_subnet(chosen[1], &chosen, &addresses, None, |_| false);
        let interface = Interface { ip: chosen[1].ip, index: 1, shared };
        assert_eq!(interface.bound_for("10.0.0.77".parse().unwrap()), Some("eth1"));
        // Beyond a router the route decides: the interface may have none.
        assert_eq!(interface.bound_for("10.0.1.77".parse().unwrap()), None);
        assert_eq!(interface.bound_for(chosen[0].ip), None, "this host");
    }

    #[test]
    fn flows_alternate_between_joined_interfaces() {
        let joined = join(vec![device("10.0.0.1", 0), device("10.0.1.1", 1)]).unwrap();
        assert_eq!((joined.name(), joined.speed()), ("eth0+eth1", 2000));
        assert_eq!(joined.listening(&[]), "0.0.0.0:0".parse().unwrap());
        assert_eq!(joined.addresses().len(), 2);
        let paths = |peer: &Handle| -> Vec<_> {
            (0..3)
                .map(|flow| joined.path(flow, peer))
                .map(|(from, to)| (from.ip(), to.ip()))
                .collect()
        };
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let (first, second) = ((ip("10.0.0.1"), ip("10.0.0.2")), (ip("10.0.1.1"), ip("10.0.1.2")));
        assert_eq!(paths(&peer(&["10.0.0.2", "10.0.1.2"])), [first, second, first]);
        assert_eq!(joined.path_count(&peer(&["10.0.0.2", "10.0.1.2"])), 2);
        assert_eq!(joined.path_count(&peer(&["10.0.0.2", "10.0.1.2", "10.0.2.2"])), 6);
        assert_eq!(joined.path_count(&peer(&["10.0.0.2"])), 2);
        assert_eq!((joined.interface_name(2), joined.interface_name(3)), ("eth0", "eth1"));
        let only = (ip("10.0.1.1"), ip("10.0.0.2"));
        assert_eq!(paths(&peer(&["10.0.0.2"])), [first, only, first]);
    }

    #[test]
    fn fused_devices_are_different_and_of_tcp() {
        let (a, b) = (device("10.0.0.1", 0), device("10.0.1.1", 1));
        assert_eq!(fuse(&[&a, &b]).unwrap().addresses().len(), 2);
        let refused = |devices: &[&Device]| fuse(devices).unwrap_err().to_string();
        assert!(refused(&[&a]).contains("two or more"));
        assert!(refused(&[&a, &b, &a]).contains("twice"));
        let others: Vec<_> = (2..6).map(|index| device("10.0.2.1", index)).collect();
        let many: Vec<&Device> = others.iter().chain([&a]).collect();
        assert!(refused(&many).contains("more than 4"));
    }

    #[test]
    fn fused_devices_are_of_one_network() {
        use Network::{InfiniBand, Roce, Tcp};
        let why = |networks: &[Network]| different_networks(networks.iter().copied());
        for one in [Tcp, Roce, InfiniBand] {
            assert_eq!(why(&[one; 3]), None);
        }
        for mixed in [[Roce, Roce, Tcp], [Tcp, InfiniBand, InfiniBand], [Tcp, Tcp, Roce]] {
            assert!(why(&mixed).unwrap().contains("RDMA ports and network interfaces"));
        }
        for mixed in [[Roce, InfiniBand], [InfiniBand, Roce]] {
            assert!(why(&mixed).unwrap().contains("InfiniBand and RoCE"));
        }
    }

    #[test]
    fn number_of_joined_interfaces_is_limited() {
        let many = (0..5).map(|index| device("10.0.0.1", index)).collect();
        let error = join(many).unwrap_err().to_string();
        assert!(error.contains("eth4") && error.contains("at most 4"), "{error}");
    }
}
