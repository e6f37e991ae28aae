//! Chooses the socket from which to send a datagram.

use std::cmp::Reverse;
use std::net::{IpAddr, SocketAddr};

/// The index of the socket for a destination, chosen by the sockets' own addresses, and the address
/// to send to. `None` if no socket has the destination's address family.
///
/// The nearest socket wins: reverse-path filtering may drop datagrams with another card's source
/// address.
pub(super) fn route(own: &[SocketAddr], to: SocketAddr) -> Option<(usize, SocketAddr)> {
    let ways =
        own.iter().enumerate().filter_map(|(at, own)| Some((at, *own, destination(*own, to)?)));
    let nearest = ways.min_by_key(|(_, own, to)| Reverse(common_bits(own.ip(), to.ip())));
    nearest.map(|(at, _, to)| (at, to))
}

/// The destination in the form that a socket with this address takes.
fn destination(own: SocketAddr, to: SocketAddr) -> Option<SocketAddr> {
    match (own, to) {
        (SocketAddr::V4(_), SocketAddr::V4(_)) => Some(to),
        // A link-local address needs a zone, which only this host knows (RFC 4007).
        (SocketAddr::V6(own), SocketAddr::V6(mut to)) => {
            if to.ip().is_unicast_link_local() && to.scope_id() == 0 {
                to.set_scope_id(own.scope_id());
            }
            Some(to.into())
        }
        // A socket at `[::]` also sends to IPv4 (RFC 3493, section 3.7).
        (SocketAddr::V6(own), SocketAddr::V4(to)) if own.ip().is_unspecified() => {
            Some(SocketAddr::new(to.ip().to_ipv6_mapped().into(), to.port()))
        }
        _ => None,
    }
}

/// Number of leading bits that both addresses share.
fn common_bits(one: IpAddr, other: IpAddr) -> u32 {
    match (one, other) {
        (IpAddr::V4(one), IpAddr::V4(other)) => (one.to_bits() ^ other.to_bits()).leading_zeros(),
        (IpAddr::V6(one), IpAddr::V6(other)) => (one.to_bits() ^ other.to_bits()).leading_zeros(),
        _ => 0,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on fails there")]
mod tests {
    use super::*;

    fn routed(own: &[&str], to: &str) -> Option<(usize, String)> {
        let own: Vec<SocketAddr> = own.iter().map(|own| own.parse().unwrap()).collect();
        let (at, to) = route(&own, to.parse().unwrap())?;
        Some((at, to.to_string()))
    }

    #[test]
    fn watch_datagram_leaves_by_the_card_of_the_destinations_network() {
        let cards = ["10.0.1.5:7000", "10.0.2.5:7000", "[fd00::5]:7000"];
        for (to, by) in [
            ("10.0.1.9:7000", 0),
            ("10.0.2.9:7000", 1),
            ("192.168.0.1:7000", 0),
            ("[fd00::9]:7000", 2),
        ] {
            assert_eq!(routed(&cards, to), Some((by, to.to_owned())));
        }
        assert_eq!(routed(&cards[..2], "[fd00::9]:7000"), None);
    }

    #[test]
    fn watch_datagram_of_a_socket_at_any_address_reaches_ipv4() {
        let mapped = Some((0, "[::ffff:10.0.1.9]:7000".to_owned()));
        assert_eq!(routed(&["[::]:7470"], "10.0.1.9:7000"), mapped);
        assert_eq!(routed(&["[fd00::5]:7470"], "10.0.1.9:7000"), None);
    }

    #[test]
    fn watch_datagram_to_a_link_local_address_has_the_scope_of_its_socket() {
        let to = "[fe80::9%3]:7000".to_owned();
        assert_eq!(routed(&["[fe80::5%3]:7000"], "[fe80::9]:7000"), Some((0, to)));
    }
}
