//! The RDMA ports of this host.

use std::fmt;
use std::fs;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use evenkeel_protocol::{PacketMarking, PortInfo, QueuePairInfo};
use evenkeel_verbs::{CompletionQueue, Context, Gid, GidKind, MemoryRegion, Peer, Port, gids};

use crate::rdma::events::Events;
use crate::rdma::memlock;
use crate::rdma::memory_types::MemoryTypes;
use crate::rdma::mr_cache::RegionCache;
use crate::settings::{Carrier, Family, Settings};
use crate::sys::InterfaceAddress;
use crate::telemetry::log::Log;

/// Most ports of a device.
const MAX_PORTS: u8 = 8;

/// An open port.
pub(crate) struct Adapter {
    pub(crate) context: Arc<Context>,
    pub(crate) memory: RegionCache,
    name: String,
    number: u8,
    port: Port,
    gid_index: u8,
    gid: Gid,
    /// What the settings say, if they do.
    traffic_class: Option<u8>,
    service_level: Option<u8>,
    timeout: u8,
    /// The memory in which messages may be.
    reach: MemoryTypes,
    /// Those of the device.
    events: Arc<Events>,
}

impl fmt::Debug for Adapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Adapter({} {})", self.name, self.gid)
    }
}

/// A port and the address at which its host is reached by TCP.
pub(crate) struct DiscoveredPort {
    pub(crate) adapter: Arc<Adapter>,
    pub(crate) ip: IpAddr,
    pub(crate) index: u32,
}

/// The ports that can be used, in a stable order; and, where there is none, why.
pub(crate) fn discover(
    settings: &Settings,
    addresses: &[InterfaceAddress],
    fallback: Option<&InterfaceAddress>,
    log: &Arc<dyn Log>,
) -> Result<Vec<DiscoveredPort>, String> {
    let mut names = evenkeel_verbs::devices().map_err(|error| error.to_string())?;
    names.sort();
    if names.is_empty() {
        return Err("this host has no RDMA device".to_owned());
    }
    // Where RDMA must be, registering says what is wrong.
    if settings.carrier == Carrier::Auto {
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
        let events = Arc::new(Events::of(&context, log));
        for number in 1..=MAX_PORTS {
            let Ok(port) = context.port(number) else { break };
            if !settings.wants_rdma(name, number) {
                unused.push(format!("{name}:{number} is not in NCCL_IB_HCA"));
                continue;
            }
            match open(&events, number, port, settings, addresses, fallback, log) {
                Ok(adapter) => found.push(adapter),
                Err(why) => unused.push(format!("{name}:{number} {why}")),
            }
        }
    }
    if found.is_empty() {
        return Err(format!("no usable RDMA port: {}", unused.join("; ")));
    }
    Ok(found)
}

fn open(
    events: &Arc<Events>,
    number: u8,
    port: Port,
    settings: &Settings,
    addresses: &[InterfaceAddress],
    fallback: Option<&InterfaceAddress>,
    log: &Arc<dyn Log>,
) -> Result<DiscoveredPort, String> {
    let context = &events.context;
    if !port.active {
        return Err("is down".to_owned());
    }
    let all = gids(context.name(), number);
    let (gid_index, gid, address) = if port.ethernet {
        choose(&all, settings, addresses)?
    } else {
        let index = settings.gid_index.unwrap_or(0);
        let gid = all.iter().find(|(at, ..)| *at == index).map_or(Gid([0; 16]), |(.., gid)| *gid);
        (index, gid, fallback.ok_or("needs an IP interface beside it")?)
    };
    let name = format!("{}:{number}", context.name());
    let reach = reach(&name, context, settings, &**log);
    let adapter = Adapter {
        context: Arc::clone(context),
        memory: RegionCache::new(context),
        name,
        number,
        port,
        gid_index,
        gid,
        traffic_class: settings.traffic_class,
        service_level: settings.service_level,
        timeout: timeout_code(settings.peer_timeout),
        reach,
        events: Arc::clone(events),
    };
    Ok(DiscoveredPort { adapter: Arc::new(adapter), ip: address.ip, index: address.index })
}

/// The memory in which messages of a port may be, which the log says if it is more than the host's.
fn reach(name: &str, context: &Arc<Context>, settings: &Settings, log: &dyn Log) -> MemoryTypes {
    let possible = MemoryTypes::of(context);
    if possible.is_host() {
        return possible;
    }
    let names = possible.names();
    let has_servers = !settings.reduction_servers().is_empty();
    match possible.offered(settings.carrier, has_servers) {
        Ok(reach) => {
            log.info(&format!("evenkeel: {name}: messages may be in GPU memory: {names}"));
            reach
        }
        Err(why) => {
            log.info(&format!(
                "evenkeel: {name}: messages are in host memory, {why} GPU memory: {names}"
            ));
            MemoryTypes::HOST
        }
    }
}

/// The GID to use, of an address that this host has: of the second version of RoCE, IPv4 before IPv6, global before
/// link-local.
fn choose<'a>(
    gids: &[(u8, GidKind, Gid)],
    settings: &Settings,
    addresses: &'a [InterfaceAddress],
) -> Result<(u8, Gid, &'a InterfaceAddress), String> {
    let ours = |gid: &Gid| addresses.iter().find(|address| address.ip == gid.ip());
    if let Some(wanted) = settings.gid_index {
        let (_, _, gid) = gids
            .iter()
            .find(|(index, ..)| *index == wanted)
            .ok_or_else(|| format!("has no GID {wanted} (NCCL_IB_GID_INDEX)"))?;
        let address = ours(gid).ok_or_else(|| {
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
        .filter_map(|(index, _, gid)| Some((*index, *gid, ours(gid)?)))
        .min_by_key(|(_, gid, _)| rank(gid))
        .ok_or_else(|| {
            format!("has no RoCE v2 GID of an address of this host (it has {} GIDs)", gids.len())
        })
}

/// The wait for an acknowledgement before a packet is sent again, given the patience with a silent peer. After seven waits
/// the queue pair fails; that costs little, since another one takes its place, so it may well be several times within the
/// patience. A single packet that is lost may cost a whole wait.
fn timeout_code(patience: Duration) -> u8 {
    let once = patience.as_nanos() as u64 / 8 / 8 / 4096;
    (once.max(1).ilog2() as u8).clamp(8, 31)
}

/// What packets are marked with, given what the settings say of class and level, and the communicator's class: Ethernet
/// looks at the one, InfiniBand at the other.
fn mark(
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

    /// Its address, for people.
    pub(crate) fn gid(&self) -> Gid {
        self.gid
    }

    /// The port's number, counted from 1.
    pub(crate) fn number(&self) -> u8 {
        self.number
    }

    /// Mb/s, if the device knows it.
    pub(crate) fn speed(&self) -> Option<u32> {
        (self.port.speed > 0).then_some(self.port.speed)
    }

    /// Path of the PCI device under /sys; none for those in software.
    pub(crate) fn pci_path(&self) -> Option<String> {
        let device = format!("/sys/class/infiniband/{}/device", self.context.name());
        Some(fs::canonicalize(device).ok()?.to_string_lossy().into_owned())
    }

    /// Number of the card, which all its ports share; none where the kernel does not say.
    pub(crate) fn guid(&self) -> Option<u64> {
        let path = format!("/sys/class/infiniband/{}/sys_image_guid", self.context.name());
        let text = fs::read_to_string(path).ok()?;
        u64::from_str_radix(&text.trim().replace(':', ""), 16).ok().filter(|guid| *guid > 0)
    }

    /// The memory in which messages may be.
    pub(crate) fn reach(&self) -> MemoryTypes {
        self.reach
    }

    /// What a peer needs to know of this port, and of the memory that it writes to; whether messages may be copied there.
    pub(crate) fn word(
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

    /// What packets are marked with, for a communicator of this traffic class if it has one.
    pub(crate) fn traffic(&self, class: Option<u8>) -> PacketMarking {
        mark((self.traffic_class, self.service_level), class, self.port.ethernet)
    }

    /// How to connect a queue pair that begins with this packet with one of that port.
    pub(crate) fn peer(
        &self,
        port: &PortInfo,
        pair: QueuePairInfo,
        own_sequence: u32,
        marking: PacketMarking,
    ) -> Peer {
        Peer {
            number: pair.number,
            sequence: pair.sequence,
            gid: Gid(port.gid),
            lid: port.lid,
            own_sequence,
            port: self.number,
            global: self.port.ethernet,
            gid_index: self.gid_index,
            mtu: self.port.mtu.min(port.mtu),
            traffic_class: marking.traffic_class,
            service_level: marking.service_level,
            timeout: self.timeout,
        }
    }

    /// Whether the device has given up this queue pair by itself; true for all when it is lost.
    pub(crate) fn has_failed(&self, pair: u32) -> bool {
        self.events.has_failed(pair)
    }

    /// Whether a completion queue tells nothing any more.
    pub(crate) fn is_mute(&self, queue: &CompletionQueue) -> bool {
        self.events.is_mute(queue.id())
    }

    /// Whether nothing gets through here now, as far as the device says.
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
            index: 3,
            running: true,
            loopback: false,
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
    fn what_the_settings_say_goes_before_the_communicators_class() {
        let marking = |traffic_class, service_level| PacketMarking { traffic_class, service_level };
        assert_eq!(mark((None, None), None, true), marking(0, 0));
        assert_eq!(mark((None, None), Some(104), true), marking(104, 0));
        assert_eq!(mark((Some(32), None), Some(104), true), marking(32, 0));
        assert_eq!(mark((None, Some(3)), Some(104), true), marking(104, 3));
        assert_eq!(mark((None, None), Some(5), false), marking(0, 5));
        assert_eq!(mark((None, Some(3)), Some(5), false), marking(0, 3));
        assert_eq!(mark((None, None), Some(16), false), marking(0, 0), "there is no such level");
        let set = settings("NCCL_IB_TC", "106");
        assert_eq!((set.traffic_class, set.service_level), (Some(106), None));
        assert_eq!(settings("NCCL_IB_TC", "-1").traffic_class, None);
    }

    #[test]
    fn the_gid_is_one_of_an_address_of_this_host() {
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
            choose(&gids, settings, &addresses).map(|(index, gid, address)| {
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
        assert!(choose(&gids[5..], &settings("", ""), &addresses).is_err());
    }

    #[test]
    fn queue_pairs_fail_several_times_within_the_patience() {
        for seconds in [1, 15, 3600] {
            let patience = Duration::from_secs(seconds);
            let code = timeout_code(patience);
            let seven = Duration::from_nanos(7 * (4096 << code));
            assert!(seven <= patience / 8 && seven * 24 > patience, "{seconds}: {code}");
        }
    }
}
