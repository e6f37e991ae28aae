//! The plugin's metrics endpoint, scraped while ranks run.

use std::io::{Read, Write};
use std::net::TcpStream;

use crate::process::{Running, bench, is_row};

pub(crate) fn scrape(port: u16) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    Some(text)
}

/// The values of all series of a metric.
pub(crate) fn values(text: &str, name: &str) -> Vec<f64> {
    text.lines()
        .filter(|line| line.starts_with(&format!("{name}{{")))
        .map(|line| line.rsplit_once(' ').unwrap().1.parse().unwrap())
        .collect()
}

#[test]
fn metrics_are_served_by_every_rank() {
    let mut command = bench("allreduce --spawn 2 -b 1M -e 1M -n 2 -N 0");
    command.env("EVENKEEL_METRICS", "127.0.0.1:29880-29889").env("EVENKEEL_FLOWS", "3");
    // While another path is tried, there are more flows.
    command.env("EVENKEEL_REPATH", "off");
    let mut running = Running::start(command);
    running.line(is_row);
    let scraped: Vec<_> = (29880..29890).filter_map(|port| Some((port, scrape(port)?))).collect();
    assert_eq!(scraped.len(), 2, "{scraped:?}");
    for (_, text) in &scraped {
        let moved = values(text, "evenkeel_message_bytes_total");
        assert!(moved.len() == 2 && moved.iter().all(|bytes| *bytes >= 1e6), "{text}");
        assert_eq!(values(text, "evenkeel_flow_bytes_total").len(), 6, "{text}");
        assert!(text.contains("direction=\"send\",peer=\"127.0.0.1:"), "{text}");
        assert!(
            values(text, "evenkeel_flow_round_trip_seconds").iter().all(|rtt| *rtt > 0.0),
            "{text}"
        );
    }
    running.line(is_row);
    running.line(is_row);
    let (port, before) = &scraped[0];
    let sum = |text: &str| values(text, "evenkeel_message_bytes_total").iter().sum::<f64>();
    assert!(sum(&scrape(*port).unwrap()) > sum(before), "they stand still");
}

#[test]
fn metrics_address_in_use_is_a_warning() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let mut command = bench("allreduce --spawn 2 -b 1K -e 1K");
    command.env("EVENKEEL_METRICS", address.to_string());
    let ended = Running::start(command).end().passed();
    assert!(ended.err.contains("no metrics"), "{ended:?}");
}
