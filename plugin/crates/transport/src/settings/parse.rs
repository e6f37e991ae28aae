//! Parsers of settings.

use std::fs::File;
use std::io::Read;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;

use evenkeel_protocol::JobKey;

use super::table::ranged;

/// A small number, or none: NCCL takes -1 for its own choice.
pub(super) fn ranged_or_none(value: &str, max: u8) -> Option<Option<u8>> {
    match value {
        "" | "-1" => Some(None),
        value => ranged(value, 0, max.into()).map(|number| Some(number as u8)),
    }
}

/// The job key in a file.
pub(super) fn key_in(file: &str) -> Option<JobKey> {
    let mut text = String::new();
    // A key may have white space around it. A file that is longer is not a key.
    File::open(file).ok()?.take(1024).read_to_string(&mut text).ok()?;
    JobKey::parse(&text)
}

/// One port or a range of ports.
pub(super) fn ports(value: &str) -> Option<RangeInclusive<u16>> {
    let (first, last) = value.split_once('-').unwrap_or((value, value));
    let port = |text: &str| Some(ranged(text.trim(), 1, u16::MAX.into())? as u16);
    let range = port(first)?..=port(last)?;
    (!range.is_empty()).then_some(range)
}

/// An address with one port or a range of ports.
pub(super) fn addresses(value: &str) -> Option<Vec<SocketAddr>> {
    let (address, range) = value.rsplit_once(':')?;
    let address: IpAddr = address.trim_start_matches('[').trim_end_matches(']').parse().ok()?;
    Some(ports(range)?.map(|port| SocketAddr::new(address, port)).collect())
}
