//! Chooses the network interfaces that carry messages over TCP.

use std::fmt;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind};
use crate::settings::name_filter::NameFilter;
use crate::settings::{Family, Settings};
use crate::sys::{
    self, InterfaceAddress, InterfaceInfo, Interfaces, LinkChanges, LinkState, Reach,
};
use crate::telemetry::log::Log;

/// Maximum number of interfaces that a log line names. A node may have hundreds, one for each of
/// its pods.
const MAX_NAMED: usize = 16;
/// How long an interface without a carrier is waited for. Switch ports and virtual cables need
/// seconds to come up.
const CARRIER_TIMEOUT: Duration = Duration::from_secs(5);

/// This host's interfaces. Waits for a carrier where it is needed, at most [`CARRIER_TIMEOUT`].
///
/// # Errors
/// [`ErrorKind::System`] when they cannot be listed.
pub(crate) fn settled_interfaces(settings: &Settings, log: &dyn Log) -> Result<Interfaces, Error> {
    let failed = |error| Error::system("cannot list network interfaces", &error);
    let interfaces = sys::interfaces().map_err(failed)?;
    if awaited(&interfaces, settings).is_empty() {
        return Ok(interfaces);
    }
    // A sandbox may not tell. Then what is there has to do.
    let Ok(changes) = LinkChanges::listen() else { return Ok(interfaces) };
    let deadline = Instant::now() + CARRIER_TIMEOUT;
    let mut has_said = false;
    loop {
        // Listed again: it may have changed before the kernel began to tell.
        let interfaces = sys::interfaces().map_err(failed)?;
        let awaited = awaited(&interfaces, settings);
        if awaited.is_empty() {
            return Ok(interfaces);
        }
        if !std::mem::replace(&mut has_said, true) {
            log.info(&format!("evenkeel: waiting for a carrier: {}", awaited.join(", ")));
        }
        if !changes.wait(deadline) {
            return Ok(interfaces);
        }
    }
}

/// The interfaces without a carrier that are worth waiting for. The user named them, or no
/// interface with a carrier leads out.
fn awaited<'a>(interfaces: &'a Interfaces, settings: &Settings) -> Vec<&'a str> {
    let names = &settings.interfaces;
    let filter = NameFilter::parse(names);
    let chosen = choose(&interfaces.addresses, names, settings.family);
    let is_cut_off = !chosen.iter().any(|address| leads_out(address));
    let is_awaited = |address: &&InterfaceAddress| {
        let is_selected = names.is_empty() || filter.matches(&address.name);
        address.link == LinkState::NoCarrier
            && has_family(address, settings.family)
            && is_selected
            && (filter.names_whole(&address.name) || is_cut_off && leads_out(address))
    };
    let mut found: Vec<&str> =
        interfaces.addresses.iter().filter(is_awaited).map(|it| it.name.as_str()).collect();
    found.dedup();
    found
}

/// Chooses one address of each interface to use. The settings limit the choice.
///
/// # Errors
/// [`ErrorKind::Config`] when there is none, with the reason for each interface that is left out.
pub(crate) fn select<'a>(
    interfaces: &'a Interfaces,
    settings: &Settings,
    log: &dyn Log,
) -> Result<Vec<&'a InterfaceAddress>, Error> {
    let names = settings.interfaces.as_str();
    let chosen = choose(&interfaces.addresses, names, settings.family);
    let left_out = left_out(interfaces, settings, &chosen);
    let is_cut_off = !chosen.iter().any(|address| leads_out(address));
    // What has no carrier after the wait is broken. Loopback in its place would fail later, on
    // another host.
    let has_broken = !awaited(interfaces, settings).is_empty();
    if chosen.is_empty() || names.is_empty() && is_cut_off && has_broken {
        let asked = match names {
            "" => String::new(),
            names => format!(" with NCCL_SOCKET_IFNAME={names}"),
        };
        let instead = match chosen.is_empty() {
            true => "",
            false => "; where all ranks are on this host, set NCCL_SOCKET_IFNAME=lo",
        };
        let reasons = list(&left_out, MAX_NAMED);
        let what = format!("no usable network interface{asked}: {reasons}{instead}");
        return Err(Error::new(ErrorKind::Config, what));
    }
    if names.is_empty() && is_cut_off {
        let used: Vec<&str> = chosen.iter().map(|address| address.name.as_str()).collect();
        let (used, reasons) = (used.join(", "), list(&left_out, MAX_NAMED));
        log.warn(&format!(
            "evenkeel: no interface leads out of this host, and ranks on other hosts cannot be reached over {used}: {reasons}"
        ));
        return Ok(chosen);
    }
    // What the user has excluded, and what has no address, is as it should be.
    let told: Vec<_> = left_out.into_iter().filter(|(_, why)| why.is_told()).collect();
    if !told.is_empty() {
        let line = format!("evenkeel: network interfaces left out: {}", list(&told, MAX_NAMED));
        let filter = NameFilter::parse(names);
        match told.iter().any(|(name, _)| filter.names_whole(name)) {
            true => log.warn(&line),
            false => log.info(&line),
        }
    }
    Ok(chosen)
}

/// One address per interface. The user's names choose the interfaces, whatever these are. Else, and
/// of those that names exclude, the first of these kinds that there is: interfaces that lead out of
/// the host; the host's own address on the loopback interface, where routers lead to it; interfaces
/// without neighbours, which may hold such an address too; those that lead out and have link-local
/// addresses only; all but loopback; without names, loopback.
pub(crate) fn choose<'a>(
    addresses: &'a [InterfaceAddress],
    names: &str,
    family: Family,
) -> Vec<&'a InterfaceAddress> {
    let filter = NameFilter::parse(names);
    let pick = |keep: &dyn Fn(&InterfaceAddress) -> bool| {
        let mut picked: Vec<&InterfaceAddress> = Vec::new();
        for address in addresses {
            let is_selected = names.is_empty() || filter.matches(&address.name);
            let is_usable = address.link == LinkState::Running && has_family(address, family);
            if !is_selected || !is_usable || !keep(address) {
                continue;
            }
            match picked.iter_mut().find(|other| other.name == address.name) {
                Some(other) if rank(address) < rank(other) => *other = address,
                Some(_) => {}
                None => picked.push(address),
            }
        }
        picked
    };
    if !names.is_empty() && !filter.exclude {
        return pick(&|_| true);
    }
    let is_card = |address: &InterfaceAddress, reach| !address.loopback && address.reach == reach;
    // The system gives every interface a link-local address. An interface with nothing else may
    // have no peers behind it.
    let preferences: [&dyn Fn(&InterfaceAddress) -> bool; 6] = [
        &|address| is_card(address, Reach::Network) && !is_link_local(address),
        &|address| address.loopback && leads_out(address),
        &|address| is_card(address, Reach::NoNeighbour) && !is_link_local(address),
        &|address| is_card(address, Reach::Network),
        &|address| !address.loopback,
        // A filter that excludes names does not include loopback.
        &|_| names.is_empty(),
    ];
    preferences.into_iter().map(pick).find(|picked| !picked.is_empty()).unwrap_or_default()
}

/// Whether peers on other hosts may be reached from an address, or reach it.
fn leads_out(address: &InterfaceAddress) -> bool {
    match address.loopback {
        // Routers lead to a host's own address wherever it is, but not to those that every host
        // has.
        true => match address.ip {
            IpAddr::V4(ip) => !ip.is_loopback() && !ip.is_link_local(),
            IpAddr::V6(ip) => !ip.is_loopback() && !ip.is_unicast_link_local(),
        },
        false => address.reach == Reach::Network,
    }
}

fn is_link_local(address: &InterfaceAddress) -> bool {
    matches!(address.ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

fn has_family(address: &InterfaceAddress, family: Family) -> bool {
    match family {
        Family::Any => true,
        Family::V4 => address.ip.is_ipv4(),
        Family::V6 => address.ip.is_ipv6(),
    }
}

/// Lower is better: addresses that peers can reach before those of this host alone, IPv4, then
/// global IPv6, then link-local.
fn rank(address: &InterfaceAddress) -> (bool, u8) {
    let by_family = match address.ip {
        IpAddr::V4(_) => 0,
        IpAddr::V6(_) if !is_link_local(address) => 1,
        IpAddr::V6(_) => 2,
    };
    (address.loopback && !leads_out(address), by_family)
}

/// Why an interface is not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LeftOut {
    Filter,
    Loopback,
    Down,
    NoCarrier,
    NoAddress,
    Family(Family),
    /// Others lead to peers rather than this one.
    Reach(Reach),
}

impl LeftOut {
    /// Whether somebody may miss the interface: its link does not work, or it has been judged to
    /// lead nowhere.
    fn is_told(self) -> bool {
        match self {
            Self::Down | Self::NoCarrier => true,
            // A node has one for each of its pods.
            Self::Reach(reach) => !matches!(reach, Reach::Network | Reach::BridgePort),
            Self::Filter | Self::Loopback | Self::NoAddress | Self::Family(_) => false,
        }
    }
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Filter => "excluded by NCCL_SOCKET_IFNAME",
            Self::Loopback => "loopback",
            Self::Down => "down",
            Self::NoCarrier => "no carrier",
            Self::NoAddress | Self::Family(Family::Any) => "no IP address",
            Self::Family(Family::V4) => "no IPv4 address",
            Self::Family(Family::V6) => "no IPv6 address",
            Self::Reach(Reach::Network) => "link-local addresses only",
            Self::Reach(Reach::HostBridge) => "a bridge inside this host",
            Self::Reach(Reach::BridgePort) => "a port of a bridge",
            Self::Reach(Reach::Overlay) => "an overlay on other interfaces",
            Self::Reach(Reach::NoNeighbour) => "a dummy, a VRF or a tunnel",
        })
    }
}

/// The interfaces that the settings or their own state keep from being used, and why.
fn left_out<'a>(
    interfaces: &'a Interfaces,
    settings: &Settings,
    chosen: &[&InterfaceAddress],
) -> Vec<(&'a str, LeftOut)> {
    let filter = NameFilter::parse(&settings.interfaces);
    let why = |interface: &InterfaceInfo| {
        let own = || interfaces.addresses.iter().filter(|address| address.name == interface.name);
        if chosen.iter().any(|used| used.name == interface.name) {
            return None;
        }
        if !settings.interfaces.is_empty() && !filter.matches(&interface.name) {
            return Some(LeftOut::Filter);
        }
        Some(match interface.link {
            _ if interface.loopback => LeftOut::Loopback,
            LinkState::Down => LeftOut::Down,
            LinkState::NoCarrier => LeftOut::NoCarrier,
            LinkState::Running if own().next().is_none() => LeftOut::NoAddress,
            LinkState::Running if !own().any(|address| has_family(address, settings.family)) => {
                LeftOut::Family(settings.family)
            }
            LinkState::Running => LeftOut::Reach(interface.reach),
        })
    };
    let all = interfaces.all.iter();
    all.filter_map(|interface| Some((interface.name.as_str(), why(interface)?))).collect()
}

/// The interfaces and why they are left out, at most this number of them.
fn list(left_out: &[(&str, LeftOut)], most: usize) -> String {
    let mut named: Vec<String> =
        left_out.iter().take(most).map(|(name, why)| format!("{name} ({why})")).collect();
    match left_out.len().saturating_sub(most) {
        0 if named.is_empty() => named.push("this host has none".to_owned()),
        0 => {}
        more => named.push(format!("and {more} more")),
    }
    named.join(", ")
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::sync::lock;

    fn address(name: &str, ip: &str) -> InterfaceAddress {
        InterfaceAddress {
            name: name.to_owned(),
            ip: ip.parse().unwrap(),
            prefix: 24,
            index: 3,
            link: LinkState::Running,
            loopback: name == "lo",
            reach: match name {
                name if name.starts_with("br") => Reach::HostBridge,
                name if name.starts_with("vx") => Reach::Overlay,
                name if name.starts_with("dummy") => Reach::NoNeighbour,
                _ => Reach::Network,
            },
        }
    }

    fn cut(address: InterfaceAddress) -> InterfaceAddress {
        InterfaceAddress { link: LinkState::NoCarrier, ..address }
    }

    fn host() -> Vec<InterfaceAddress> {
        vec![
            address("lo", "127.0.0.1"),
            address("eth0", "10.0.0.5"),
            address("eth1", "10.0.1.5"),
            address("eth10", "10.0.10.5"),
            address("br0", "172.17.0.1"),
            InterfaceAddress { link: LinkState::Down, ..address("eth2", "10.0.2.5") },
            address("lo", "::1"),
            address("eth0", "fe80::5"),
            address("eth0", "2001:db8::5"),
            address("wlan0", "fe80::7"),
        ]
    }

    fn of(host: &[InterfaceAddress], interfaces: &str, family: Family) -> Vec<String> {
        choose(host, interfaces, family)
            .into_iter()
            .map(|address| format!("{} {}", address.name, address.ip))
            .collect()
    }

    fn names(interfaces: &str, family: Family) -> Vec<String> {
        of(&host(), interfaces, family)
    }

    #[test]
    fn default_is_all_real_interfaces() {
        assert_eq!(names("", Family::Any), ["eth0 10.0.0.5", "eth1 10.0.1.5", "eth10 10.0.10.5"]);
    }

    #[test]
    fn address_family_setting_is_honoured() {
        assert_eq!(names("", Family::V6), ["eth0 2001:db8::5"]);
        assert_eq!(names("wlan0", Family::V6), ["wlan0 fe80::7"]);
        assert_eq!(names("wlan0", Family::V4), [""; 0]);
    }

    #[test]
    fn interface_names_are_prefixes_exact_or_excluded() {
        assert_eq!(names("eth1", Family::V4), ["eth1 10.0.1.5", "eth10 10.0.10.5"]);
        assert_eq!(names("=eth1", Family::V4), ["eth1 10.0.1.5"]);
        assert_eq!(names("=eth1:1,lo", Family::V4), ["lo 127.0.0.1", "eth1 10.0.1.5"]);
        assert_eq!(names("^eth1", Family::V4), ["eth0 10.0.0.5"]);
        assert_eq!(names("^eth", Family::V4), ["br0 172.17.0.1"]);
        assert_eq!(names("^=eth1,eth0", Family::V4), ["eth10 10.0.10.5"]);
        assert_eq!(names("^eth,br,wlan", Family::Any), [""; 0], "not loopback");
        assert_eq!(names("ib", Family::Any), [""; 0]);
    }

    #[test]
    fn interfaces_that_lead_nowhere_and_loopback_come_last() {
        let lo = address("lo", "127.0.0.1");
        let (bridge, overlay) = (address("br0", "172.17.0.1"), address("vx0", "10.244.1.0"));
        let (dummy, wlan) = (address("dummy0", "10.7.0.1"), address("wlan0", "fe80::7"));
        let only = |host: &[&InterfaceAddress]| {
            let host: Vec<_> = host.iter().copied().cloned().collect();
            of(&host, "", Family::Any)
        };
        assert_eq!(only(&[&lo, &bridge, &overlay, &wlan]), ["wlan0 fe80::7"]);
        assert_eq!(only(&[&lo, &bridge, &dummy, &wlan]), ["dummy0 10.7.0.1"]);
        assert_eq!(only(&[&lo, &bridge, &overlay]), ["br0 172.17.0.1", "vx0 10.244.1.0"]);
        assert_eq!(only(&[&lo]), ["lo 127.0.0.1"]);
        // A user may name any of them.
        assert_eq!(of(&[lo, overlay, wlan], "vx0", Family::Any), ["vx0 10.244.1.0"]);
    }

    #[test]
    fn host_address_on_loopback_goes_before_link_local_ones() {
        let mut host = vec![
            address("lo", "127.0.0.1"),
            address("lo", "10.200.0.1"),
            address("lo", "::1"),
            address("lo", "2001:db8::1"),
            address("lan0", "fe80::5"),
            address("dummy0", "10.7.0.1"),
        ];
        assert_eq!(of(&host, "", Family::Any), ["lo 10.200.0.1"]);
        assert_eq!(of(&host, "", Family::V6), ["lo 2001:db8::1"]);
        assert_eq!(of(&host, "lo", Family::Any), ["lo 10.200.0.1"]);
        assert_eq!(of(&host, "^docker", Family::Any), ["lo 10.200.0.1"]);
        assert_eq!(of(&host, "^lo,dummy", Family::Any), ["lan0 fe80::5"]);
        host.push(address("eth0", "10.0.0.5"));
        assert_eq!(of(&host, "", Family::Any), ["eth0 10.0.0.5"]);
    }

    /// A log that keeps its lines.
    #[derive(Default)]
    struct Lines(Mutex<String>);

    impl Log for Lines {
        fn warn(&self, line: &str) {
            lock(&self.0).push_str(&format!("warn: {line}\n"));
        }
        fn info(&self, line: &str) {
            lock(&self.0).push_str(&format!("info: {line}\n"));
        }
    }

    fn settings(set: &[(&str, &str)]) -> Settings {
        let lookup = |name: &str| {
            let found = set.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        Settings::from_lookup(lookup).unwrap()
    }

    /// A host with these addresses, and no interface without one.
    fn with(addresses: Vec<InterfaceAddress>) -> Interfaces {
        let mut all: Vec<InterfaceInfo> = Vec::new();
        for InterfaceAddress { name, link, loopback, reach, .. } in &addresses {
            if all.iter().all(|known| known.name != *name) {
                let (name, link, loopback, reach) = (name.clone(), *link, *loopback, *reach);
                all.push(InterfaceInfo { name, link, loopback, reach });
            }
        }
        Interfaces { all, addresses }
    }

    #[test]
    fn carrier_is_awaited_where_it_is_needed() {
        let awaited = |names: &str, host: Vec<InterfaceAddress>| {
            awaited(&with(host), &settings(&[("NCCL_SOCKET_IFNAME", names)])).join(",")
        };
        let lo = || address("lo", "127.0.0.1");
        let (eth0, eth1) = (|| address("eth0", "10.0.0.5"), || address("eth1", "10.0.1.5"));
        let bridge = || address("br0", "172.17.0.1");
        assert_eq!(awaited("", vec![lo(), bridge(), cut(eth0()), cut(eth1())]), "eth0,eth1");
        assert_eq!(awaited("", vec![lo(), eth0(), cut(eth1())]), "", "another leads out");
        assert_eq!(awaited("eth", vec![lo(), eth0(), cut(eth1())]), "", "a prefix names none");
        assert_eq!(awaited("eth", vec![lo(), cut(eth0())]), "eth0");
        assert_eq!(awaited("eth1,eth0", vec![lo(), eth0(), cut(eth1())]), "eth1", "it is named");
        assert_eq!(awaited("^eth0", vec![lo(), eth1(), cut(eth0())]), "");
        assert_eq!(awaited("", vec![lo(), cut(bridge())]), "", "a bridge waits for containers");
        assert_eq!(awaited("lo", vec![lo(), cut(eth0())]), "");
    }

    #[test]
    fn loopback_does_not_stand_in_for_an_interface_without_a_carrier() {
        let host = with(vec![address("lo", "127.0.0.1"), cut(address("eth0", "10.0.0.5"))]);
        let log = Lines::default();
        let error = select(&host, &settings(&[]), &log).unwrap_err().to_string();
        let [card, way_out] = ["eth0 (no carrier)", "NCCL_SOCKET_IFNAME=lo"];
        assert!(error.contains(card) && error.contains(way_out), "{error}");
        let lo = settings(&[("NCCL_SOCKET_IFNAME", "lo")]);
        assert_eq!(select(&host, &lo, &log).unwrap()[0].name, "lo");
        assert_eq!(*lock(&log.0), "");
        let alone = with(vec![address("lo", "127.0.0.1")]);
        assert_eq!(select(&alone, &settings(&[]), &log).unwrap()[0].name, "lo");
        let said = lock(&log.0);
        assert!(said.starts_with("warn:") && said.contains("over lo"), "{said}");
    }

    #[test]
    fn named_interface_without_a_carrier_is_warned_of() {
        let host = with(vec![address("eth0", "10.0.0.5"), cut(address("eth1", "10.0.1.5"))]);
        for (names, level) in [("eth0,eth1", "warn"), ("eth", "info"), ("", "info")] {
            let log = Lines::default();
            let chosen = select(&host, &settings(&[("NCCL_SOCKET_IFNAME", names)]), &log);
            assert_eq!(chosen.unwrap().len(), 1);
            let said = lock(&log.0);
            assert!(said.starts_with(level) && said.contains("eth1 (no carrier)"), "{said}");
        }
    }

    /// What is said of a host's interfaces that are left out.
    fn interfaces_left_out(set: &[(&str, &str)]) -> String {
        let info = |name: &str, link, reach| InterfaceInfo {
            name: name.to_owned(),
            link,
            loopback: name == "lo",
            reach,
        };
        let interfaces = Interfaces {
            all: vec![
                info("lo", LinkState::Running, Reach::Network),
                info("eth0", LinkState::Running, Reach::Network),
                info("eth1", LinkState::NoCarrier, Reach::Network),
                info("eth2", LinkState::Down, Reach::Network),
                info("eth3", LinkState::Running, Reach::Network),
                info("br0", LinkState::Running, Reach::HostBridge),
            ],
            addresses: vec![
                address("lo", "127.0.0.1"),
                address("eth0", "10.0.0.5"),
                cut(address("eth1", "10.0.1.5")),
                address("br0", "172.18.0.1"),
            ],
        };
        let settings = settings(set);
        let chosen = choose(&interfaces.addresses, &settings.interfaces, settings.family);
        list(&left_out(&interfaces, &settings, &chosen), MAX_NAMED)
    }

    #[test]
    fn interfaces_left_out_are_named_with_the_reason() {
        assert_eq!(
            interfaces_left_out(&[("NCCL_SOCKET_IFNAME", "")]),
            "lo (loopback), eth1 (no carrier), eth2 (down), eth3 (no IP address), \
             br0 (a bridge inside this host)"
        );
        assert_eq!(
            interfaces_left_out(&[("NCCL_SOCKET_IFNAME", "=eth1,eth2,br0")]),
            "lo (excluded by NCCL_SOCKET_IFNAME), eth0 (excluded by NCCL_SOCKET_IFNAME), \
             eth1 (no carrier), eth2 (down), eth3 (excluded by NCCL_SOCKET_IFNAME)"
        );
        assert_eq!(
            interfaces_left_out(&[
                ("NCCL_SOCKET_IFNAME", "^eth1"),
                ("NCCL_SOCKET_FAMILY", "AF_INET6")
            ]),
            "lo (loopback), eth0 (no IPv6 address), eth1 (excluded by NCCL_SOCKET_IFNAME), \
             eth2 (down), eth3 (no IP address), br0 (no IPv6 address)"
        );
    }

    #[test]
    fn interfaces_left_out_are_a_bounded_list() {
        let many: Vec<String> = (0..40).map(|number| format!("veth{number}")).collect();
        let many: Vec<_> = many.iter().map(|name| (name.as_str(), LeftOut::Down)).collect();
        let text = list(&many, MAX_NAMED);
        assert!(text.contains("veth15 (down)") && text.ends_with(", and 24 more"), "{text}");
        assert_eq!(list(&[], MAX_NAMED), "this host has none");
    }
}
