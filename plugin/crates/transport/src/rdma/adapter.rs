//! The RDMA ports of this host: how they are found, and how queue pairs use them.

use std::fmt;
use std::fs;
use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use evenkeel_protocol::{PacketMarking, PortInfo, QueuePairInfo};
use evenkeel_verbs::{
    CompletionQueue, ConnectAttributes, Context, Gid, GidKind, MemoryRegion, Port, gids,
};

use crate::rdma::events::{DeviceEvents, EventHandler, EventWatch};
use crate::rdma::memlock;
use crate::rdma::memory_types::{self, MemoryTypes};
use crate::rdma::region_cache::RegionCache;
use crate::runtime::reactor::Workers;
use crate::settings::{Family, Settings, TransportMode};
use crate::sys::InterfaceAddress;
use crate::telemetry::log::Log;

/// Maximum number of ports that are looked for on a device.
const MAX_PORTS: u8 = 8;

/// An open RDMA port.
pub(crate) struct Adapter {
    pub(crate) context: Arc<Context>,
    pub(crate) regions: RegionCache,
    name: String,
    number: u8,
    port: Port,
    gid_index: u8,
    gid: Gid,
    /// From the settings.
    traffic_class: Option<u8>,
    /// From the settings.
    service_level: Option<u8>,
    /// From the settings.
    pkey_index: u16,
    /// Code of the acknowledgement timeout.
    timeout: u8,
    /// What the device supports.
    supported_memory: MemoryTypes,
    /// What of it is offered.
    memory_types: MemoryTypes,
    /// Shared by all ports of the device.
    events: Arc<DeviceEvents>,
}

impl fmt::Debug for Adapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Adapter({} {})", self.name, self.gid)
    }
}

/// An open port, and the IP address at which peers reach it for control connections.
pub(crate) struct DiscoveredPort {
    pub(crate) adapter: Arc<Adapter>,
    pub(crate) ip: IpAddr,
    /// Index of the interface that has the address.
    pub(crate) index: u32,
}

/// What the search for usable ports depends on.
pub(crate) struct PortDiscovery<'a> {
    pub(crate) settings: &'a Settings,
    /// The addresses of this host's network interfaces.
    pub(crate) addresses: &'a [InterfaceAddress],
    /// The address for control connections of InfiniBand ports, which have no IP address
    /// themselves.
    pub(crate) fallback: Option<&'a InterfaceAddress>,
    /// Why messages are in host memory only, if they have to be.
    pub(crate) host_memory_only: Option<&'a str>,
    pub(crate) log: &'a Arc<dyn Log>,
}

impl PortDiscovery<'_> {
    /// Opens the usable ports, in a stable order. Without any, says why each was not usable.
    pub(crate) fn open_ports(&self) -> Result<Vec<DiscoveredPort>, String> {
        let mut names = evenkeel_verbs::devices().map_err(|error| error.to_string())?;
        names.sort();
        if names.is_empty() {
            return Err("this host has no RDMA device".to_owned());
        }
        if let Err(error) = evenkeel_verbs::fork_protection() {
            self.log.warn(&format!(
                "evenkeel: {error}: before Linux 5.12, a fork may garble what RDMA carries; set RDMAV_FORK_SAFE=1"
            ));
        }
        // Where RDMA is required, the failing registration reports the cause.
        if self.settings.transport_mode == TransportMode::Auto {
            memlock::check()?;
        }
        let (mut found, mut unused) = (Vec::new(), Vec::new());
        for name in &names {
            let context = match Context::open(name) {
                Ok(context) => context,
                Err(error) => {
                    unused.push(error.to_string());
                    continue;
                }
            };
            let events = Arc::new(DeviceEvents::new(&context, self.log));
            for number in 1..=MAX_PORTS {
                let Ok(port) = context.port(number) else { break };
                if !self.settings.wants_rdma(name, number) {
                    unused.push(format!("{name}:{number} is not in NCCL_IB_HCA"));
                    continue;
                }
                match self.open_port(&events, number, port) {
                    Ok(adapter) => found.push(adapter),
                    Err(why) => unused.push(format!("{name}:{number} {why}")),
                }
            }
        }
        if found.is_empty() {
            return Err(format!("no usable RDMA port: {}", unused.join("; ")));
        }
        self.log_memory_types(&found);
        Ok(found)
    }

    fn open_port(
        &self,
        events: &Arc<DeviceEvents>,
        number: u8,
        port: Port,
    ) -> Result<DiscoveredPort, String> {
        let (context, settings) = (&events.context, self.settings);
        if !port.active {
            return Err("is down".to_owned());
        }
        // Not every device reports its table.
        if settings.pkey_index > 0 && settings.pkey_index >= port.pkeys {
            return Err(format!(
                "has {} partition keys, and so none at {} (NCCL_IB_PKEY)",
                port.pkeys, settings.pkey_index
            ));
        }
        let all = gids(context.name(), number);
        let (gid_index, gid, address) = if port.ethernet {
            choose_gid(&all, settings, self.addresses)?
        } else {
            let (index, gid) = infiniband_gid(&all, settings.gid_index);
            (index, gid, self.fallback.ok_or("needs a network interface with an IP address")?)
        };
        let name = format!("{}:{number}", context.name());
        let supported_memory = MemoryTypes::supported_by(context);
        let offered = supported_memory.offered(settings.transport_mode, self.host_memory_only);
        let adapter = Adapter {
            context: Arc::clone(context),
            regions: RegionCache::new(context),
            name,
            number,
            port,
            gid_index,
            gid,
            traffic_class: settings.traffic_class,
            service_level: settings.service_level,
            pkey_index: settings.pkey_index,
            timeout: ack_timeout_code(settings.peer_timeout),
            supported_memory,
            memory_types: offered.unwrap_or(MemoryTypes::HOST),
            events: Arc::clone(events),
        };
        Ok(DiscoveredPort { adapter: Arc::new(adapter), ip: address.ip, index: address.index })
    }

    /// Logs whether messages may be in GPU memory, where a device supports that.
    fn log_memory_types(&self, ports: &[DiscoveredPort]) {
        let adapters = || ports.iter().map(|port| &*port.adapter);
        if self.settings.transport_mode == TransportMode::Auto && self.host_memory_only.is_none() {
            let supported = adapters().map(|adapter| (adapter.name(), adapter.supported_memory));
            if let Some(line) = memory_types::warn_of_auto(supported) {
                self.log.warn(&line);
            }
            return;
        }
        for adapter in adapters().filter(|adapter| !adapter.supported_memory.is_host_only()) {
            let (name, supported) = (adapter.name(), adapter.supported_memory);
            let names = supported.names();
            let line = match supported.offered(self.settings.transport_mode, self.host_memory_only)
            {
                Ok(_) => format!("evenkeel: {name}: messages may be in GPU memory: {names}"),
                Err(why) => format!("evenkeel: {name}: GPU memory ({names}) is not used: {why}"),
            };
            self.log.info(&line);
        }
    }
}

/// The GID to use: RoCE v2, of an address that this host has. IPv4 goes before IPv6, global
/// addresses before link-local ones.
fn choose_gid<'a>(
    gids: &[(u8, GidKind, Gid)],
    settings: &Settings,
    addresses: &'a [InterfaceAddress],
) -> Result<(u8, Gid, &'a InterfaceAddress), String> {
    let own_address = |gid: &Gid| addresses.iter().find(|address| address.ip == gid.ip());
    if let Some(wanted) = settings.gid_index {
        let (_, _, gid) = gids
            .iter()
            .find(|(index, ..)| *index == wanted)
            .ok_or_else(|| format!("has no GID {wanted} (NCCL_IB_GID_INDEX)"))?;
        let address = own_address(gid).ok_or_else(|| {
            format!("has GID {gid} at {wanted}, which is no address of this host")
        })?;
        return Ok((wanted, *gid, address));
    }
    let fits = |gid: &Gid| match settings.family {
        Family::Any => true,
        Family::V4 => gid.ip().is_ipv4(),
        Family::V6 => gid.ip().is_ipv6(),
    };
    let rank = |gid: &Gid| match gid.ip() {
        IpAddr::V4(_) => 0,
        IpAddr::V6(ip) if !ip.is_unicast_link_local() => 1,
        IpAddr::V6(_) => 2,
    };
    gids.iter()
        .filter(|(_, kind, gid)| *kind == GidKind::RoceV2 && fits(gid))
        .filter_map(|(index, _, gid)| Some((*index, *gid, own_address(gid)?)))
        .min_by_key(|(_, gid, _)| rank(gid))
        .ok_or_else(|| {
            format!("has no RoCE v2 GID of an address of this host (it has {} GIDs)", gids.len())
        })
}

/// The GID to use on InfiniBand: the one at the index that is set, else one that can be routed (see
/// [`address_vector`]), which subnet managers put at index 1, else the first one.
fn infiniband_gid(gids: &[(u8, GidKind, Gid)], set: Option<u8>) -> (u8, Gid) {
    let at = |index| gids.iter().find(|(other, ..)| *other == index).map(|(.., gid)| *gid);
    let routable = || at(1).filter(|gid| forwardable_lid(gid) != 0).map(|_| 1);
    let index = set.or_else(routable).unwrap_or(0);
    (index, at(index).unwrap_or(Gid([0; 16])))
}

/// The LID (FLID) under which routers between InfiniBand subnets know a port; 0 if it has none. It
/// is a part of the GID's subnet prefix: 10 bits fixed, 22 bits 0, 16 bits FLID, 16 bits subnet.
fn forwardable_lid(gid: &Gid) -> u16 {
    u16::from_be_bytes([gid.0[4], gid.0[5]])
}

/// Where packets to a peer's port go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AddressVector {
    /// Whether packets have a global route header (GRH) with GIDs, by which routers forward them.
    is_global: bool,
    /// LID of the destination, on InfiniBand.
    dlid: u16,
}

/// The address of a peer's port: its LID within a subnet, and its GID in another one, as in NCCL's
/// own RDMA transport.
fn address_vector(own: &Port, own_gid: Gid, peer: &PortInfo) -> AddressVector {
    let peer_gid = Gid(peer.gid);
    let subnet = |gid: Gid| {
        let [a, b, c, d, _, _, e, f, ..] = gid.0;
        [a, b, c, d, e, f]
    };
    // Without a GID there are no routers.
    let known = [own_gid, peer_gid].iter().all(|gid| gid.0 != [0; 16]);
    let routed = !own.ethernet && known && subnet(own_gid) != subnet(peer_gid);
    let dlid = match forwardable_lid(&peer_gid) {
        // A subnet manager may also have given routers the peer's own LID.
        0 => peer.lid,
        flid if routed => flid,
        _ => peer.lid,
    };
    AddressVector { is_global: own.ethernet || own.grh_required || routed, dlid }
}

/// The code of the acknowledgement timeout, after which a packet is sent again.
///
/// A queue pair fails after seven timeouts. That should happen several times within the peer
/// timeout: another queue pair replaces it at little cost. The timeout should not be longer than
/// needed, since one lost packet may cost all of it.
fn ack_timeout_code(peer_timeout: Duration) -> u8 {
    let once = peer_timeout.as_nanos() as u64 / 8 / 8 / 4096;
    (once.max(1).ilog2() as u8).clamp(8, 31)
}

/// How packets are marked. The settings go before the communicator's class, which is a traffic
/// class on Ethernet and a service level on InfiniBand.
fn packet_marking(
    (set_class, set_level): (Option<u8>, Option<u8>),
    class: Option<u8>,
    ethernet: bool,
) -> PacketMarking {
    let by_class = class.filter(|_| ethernet);
    let by_level = class.filter(|class| !ethernet && *class <= PacketMarking::MAX_SERVICE_LEVEL);
    PacketMarking {
        traffic_class: set_class.or(by_class).unwrap_or_default(),
        service_level: set_level.or(by_level).unwrap_or_default(),
    }
}

impl Adapter {
    /// Name of device and port, such as `mlx5_0:1`.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Its address.
    pub(crate) fn gid(&self) -> Gid {
        self.gid
    }

    /// The port's number, counted from 1.
    pub(crate) fn number(&self) -> u8 {
        self.number
    }

    /// Index of the partition key of its queue pairs.
    pub(crate) fn pkey_index(&self) -> u16 {
        self.pkey_index
    }

    /// Mb/s, if the device reports it.
    pub(crate) fn speed(&self) -> Option<u32> {
        (self.port.speed > 0).then_some(self.port.speed)
    }

    /// Path of the PCI device under /sys; `None` for software devices.
    pub(crate) fn pci_path(&self) -> Option<String> {
        let device = format!("/sys/class/infiniband/{}/device", self.context.name());
        Some(fs::canonicalize(device).ok()?.to_string_lossy().into_owned())
    }

    /// GUID of the card, which all its ports share; `None` where the kernel does not report it.
    pub(crate) fn guid(&self) -> Option<u64> {
        let path = format!("/sys/class/infiniband/{}/sys_image_guid", self.context.name());
        let text = fs::read_to_string(path).ok()?;
        u64::from_str_radix(&text.trim().replace(':', ""), 16).ok().filter(|guid| *guid > 0)
    }

    /// Whether it is RoCE, and not InfiniBand.
    pub(crate) fn is_ethernet(&self) -> bool {
        self.port.ethernet
    }

    /// The memory in which messages may be.
    pub(crate) fn memory_types(&self) -> MemoryTypes {
        self.memory_types
    }

    /// What a peer needs in order to connect to this port and to write to `memory`.
    pub(crate) fn port_info(
        &self,
        memory: &MemoryRegion,
        eager: bool,
        marking: PacketMarking,
    ) -> PortInfo {
        PortInfo {
            gid: self.gid.0,
            lid: self.port.lid,
            mtu: self.port.mtu,
            eager,
            key: memory.remote_key(),
            address: memory.start(),
            marking,
        }
    }

    /// How packets are marked, for a communicator of this traffic class if it has one.
    pub(crate) fn marking(&self, class: Option<u8>) -> PacketMarking {
        packet_marking((self.traffic_class, self.service_level), class, self.port.ethernet)
    }

    /// The attributes that connect a queue pair here, whose first packet has the number `sq_psn`,
    /// with one at that port.
    pub(crate) fn connect_attributes(
        &self,
        port: &PortInfo,
        pair: QueuePairInfo,
        sq_psn: u32,
        marking: PacketMarking,
    ) -> ConnectAttributes {
        let AddressVector { is_global, dlid } = address_vector(&self.port, self.gid, port);
        ConnectAttributes {
            dest_qp_number: pair.number,
            rq_psn: pair.sequence,
            dgid: Gid(port.gid),
            dlid,
            sq_psn,
            port: self.number,
            is_global,
            sgid_index: self.gid_index,
            path_mtu: self.port.mtu.min(port.mtu),
            traffic_class: marking.traffic_class,
            service_level: marking.service_level,
            timeout: self.timeout,
        }
    }

    /// Calls the endpoint when the device has reported something, while the endpoint holds the
    /// result.
    pub(super) fn watch_events(
        &self,
        workers: &Arc<Workers>,
        endpoint: Weak<dyn EventHandler>,
    ) -> io::Result<Arc<EventWatch>> {
        self.events.watch(workers, endpoint)
    }

    /// Whether the device has reported that this queue pair failed; true for all once the device is
    /// lost.
    pub(crate) fn queue_pair_failed(&self, pair: u32) -> bool {
        self.events.queue_pair_failed(pair)
    }

    /// Whether the device has reported that a completion queue failed, since this was last asked.
    pub(crate) fn completion_queue_failed(&self, queue: &CompletionQueue) -> bool {
        self.events.completion_queue_failed(queue.id())
    }

    /// Whether the device has reported that the port is down.
    pub(crate) fn is_down(&self) -> bool {
        self.events.is_down(self.number)
    }
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
            link: crate::sys::LinkState::Running,
            loopback: false,
            reach: crate::sys::Reach::Network,
        }
    }

    fn gid(ip: &str) -> Gid {
        let octets = match ip.parse().unwrap() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
            IpAddr::V6(ip) => ip.octets(),
        };
        Gid(octets)
    }

    fn settings(name: &str, value: &str) -> Settings {
        Settings::from_lookup(|asked| (asked == name).then(|| value.to_owned())).unwrap()
    }

    #[test]
    fn settings_override_the_communicators_traffic_class() {
        let marking = |traffic_class, service_level| PacketMarking { traffic_class, service_level };
        assert_eq!(packet_marking((None, None), None, true), marking(0, 0));
        assert_eq!(packet_marking((None, None), Some(104), true), marking(104, 0));
        assert_eq!(packet_marking((Some(32), None), Some(104), true), marking(32, 0));
        assert_eq!(packet_marking((None, Some(3)), Some(104), true), marking(104, 3));
        assert_eq!(packet_marking((None, None), Some(5), false), marking(0, 5));
        assert_eq!(packet_marking((None, Some(3)), Some(5), false), marking(0, 3));
        assert_eq!(
            packet_marking((None, None), Some(16), false),
            marking(0, 0),
            "there is no such level"
        );
        let set = settings("NCCL_IB_TC", "106");
        assert_eq!((set.traffic_class, set.service_level), (Some(106), None));
        assert_eq!(settings("NCCL_IB_TC", "-1").traffic_class, None);
    }

    #[test]
    fn gid_is_chosen_by_host_address() {
        let addresses = [
            address("eth0", "10.0.0.5"),
            address("eth0", "fe80::5"),
            address("eth0", "2001:db8::5"),
        ];
        let v2 = GidKind::RoceV2;
        let gids = [
            (0, GidKind::Native, gid("fe80::5")),
            (1, v2, gid("fe80::5")),
            (2, v2, gid("2001:db8::5")),
            (3, GidKind::Native, gid("10.0.0.5")),
            (4, v2, gid("10.0.0.5")),
            (5, v2, gid("10.0.0.6")),
        ];
        let index = |settings: &Settings| {
            choose_gid(&gids, settings, &addresses).map(|(index, gid, address)| {
                assert_eq!(gid.ip(), address.ip);
                index
            })
        };
        assert_eq!(index(&settings("", "")), Ok(4));
        assert_eq!(index(&settings("NCCL_SOCKET_FAMILY", "AF_INET6")), Ok(2));
        assert_eq!(index(&settings("NCCL_IB_GID_INDEX", "1")), Ok(1));
        let error = index(&settings("NCCL_IB_GID_INDEX", "5")).unwrap_err();
        assert!(error.contains("10.0.0.6"), "{error}");
        let error = index(&settings("NCCL_IB_GID_INDEX", "9")).unwrap_err();
        assert!(error.contains("NCCL_IB_GID_INDEX"), "{error}");
        assert!(choose_gid(&gids[5..], &settings("", ""), &addresses).is_err());
    }

    fn infiniband_port(grh_required: bool) -> Port {
        let (active, ethernet) = (true, false);
        Port { active, ethernet, lid: 7, mtu: 5, speed: 400_000, pkeys: 128, grh_required }
    }

    fn peer_at(gid_text: &str, lid: u16) -> PortInfo {
        let marking = PacketMarking { traffic_class: 0, service_level: 0 };
        let gid = gid(gid_text).0;
        PortInfo { gid, lid, mtu: 5, eager: true, key: 0, address: 0, marking }
    }

    #[test]
    fn infiniband_peer_in_another_subnet_has_a_global_address() {
        let vector = |own: &Port, from: &str, to: &str| {
            let AddressVector { is_global, dlid } = address_vector(own, gid(from), &peer_at(to, 9));
            (is_global, dlid)
        };
        let port = infiniband_port(false);
        assert_eq!(vector(&port, "fe80::1", "fe80::2"), (false, 9));
        assert_eq!(vector(&port, "fec0:0:0:1::1", "fec0:0:0:1::2"), (false, 9));
        assert_eq!(vector(&port, "fec0:0:0:1::1", "fec0:0:0:2::2"), (true, 9));
        assert_eq!(vector(&port, "fe80::1", "fec0:0:0:2::2"), (true, 9));
        // With a LID for routers, which is no part of the subnet's number.
        assert_eq!(vector(&port, "fec0:0:c001:1::1", "fec0:0:c002:2::2"), (true, 0xc002));
        assert_eq!(vector(&port, "fec0:0:c001:1::1", "fec0:0:c002:1::2"), (false, 9));
        // A port without a GID, and one that needs the header in any case.
        assert_eq!(vector(&port, "::", "fec0:0:0:2::2"), (false, 9));
        assert_eq!(vector(&infiniband_port(true), "fe80::1", "fe80::2"), (true, 9));
        // Ethernet has no LIDs.
        let ethernet = Port { ethernet: true, lid: 0, ..port };
        let peer = peer_at("2001:db8:1:2:3::4", 0);
        let vector = address_vector(&ethernet, gid("10.0.0.5"), &peer);
        assert_eq!(vector, AddressVector { is_global: true, dlid: 0 });
    }

    #[test]
    fn infiniband_gid_that_routers_know_goes_first() {
        let all =
            |second| [(0, GidKind::Native, gid("fe80::1")), (1, GidKind::Native, gid(second))];
        let (plain, routable) = (all("fec0:0:0:1::1"), all("fec0:0:c001:1::1"));
        assert_eq!(infiniband_gid(&plain, None).0, 0);
        assert_eq!(infiniband_gid(&routable, None), (1, gid("fec0:0:c001:1::1")));
        assert_eq!(infiniband_gid(&routable, Some(0)), (0, gid("fe80::1")));
        assert_eq!(infiniband_gid(&plain, Some(7)), (7, Gid([0; 16])));
        assert_eq!(infiniband_gid(&[], None), (0, Gid([0; 16])));
    }

    #[test]
    fn queue_pair_timeout_is_a_fraction_of_peer_timeout() {
        for seconds in [1, 15, 3600] {
            let peer_timeout = Duration::from_secs(seconds);
            let code = ack_timeout_code(peer_timeout);
            let seven = Duration::from_nanos(7 * (4096 << code));
            assert!(seven <= peer_timeout / 8 && seven * 24 > peer_timeout, "{seconds}: {code}");
        }
    }
}
