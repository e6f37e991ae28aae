use crate::process::report;

const FEW: &str = "scale --connections 40 --idle 2";

#[test]
fn scale_idle_connections_hold_flows_only_and_wake_nobody() {
    let report = report(FEW);
    assert_eq!(report["connections"], 40);
    // Four flows have two ends each. All listeners share one socket, which is open before.
    assert_eq!(report["descriptors"], 8.0, "{report}");
    // Timeouts that are checked although nothing is due wake a thread of each rank 8 times a
    // second.
    assert!(report["wakeups_per_s"].as_f64().unwrap() < 8.0, "{report}");
}

#[test]
fn scale_counts_plain_sockets() {
    let report = report(&format!("{FEW} --plain-sockets 2"));
    // The listening socket is closed once all are accepted.
    assert_eq!(report["descriptors"], 4.0, "{report}");
}
