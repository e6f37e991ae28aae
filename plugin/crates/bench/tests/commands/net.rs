use crate::process::{end_all, ranks, report, run};

#[test]
fn every_version_of_the_interface() {
    for api in 6..=12 {
        let ended = run(&format!("net --api {api} -b 1 -e 1M -f 32 -n 20")).passed();
        assert!(ended.out.contains(&format!("Evenkeel (ncclNet v{api})")), "{ended:?}");
        let rows = ended.rows();
        assert!(rows.len() == 5 && rows.iter().all(|row| row.ends_with(" 0")), "{ended:?}");
    }
}

#[test]
fn net_several_connections_with_full_queues() {
    // Messages without content.
    run("net --connections 3 --depth 8 -b 0 -e 0 -n 50").passed();
    let report = report("net --connections 3 --depth 8 -b 300001 -e 300001 -n 50 --check-all");
    assert_eq!((&report["connections"], &report["depth"]), (&3.into(), &8.into()));
    assert_eq!(report["rows"][0]["wrong"], 0);
    assert!(report["rows"][0]["p99_us"].as_f64() >= report["rows"][0]["p50_us"].as_f64());
}

#[test]
fn net_ranks_started_separately() {
    for ended in end_all(ranks(2, "net -b 64K -e 64K -n 4", |_, _| {})) {
        ended.passed();
    }
}

#[test]
fn net_ping_pong() {
    run("net --ping-pong -b 0 -e 0 -n 20").passed();
    let report = report("net --ping-pong -b 8 -e 512K -f 256 -n 50");
    assert_eq!(report["ping_pong"], true);
    assert_eq!(report["rows"].as_array().unwrap().len(), 3);
    assert_eq!(report["rows"][2]["wrong"], 0);
}

/// Plain sockets move a message only while its own request is asked for; 8 MiB do not fit into a
/// socket's buffers.
#[test]
fn net_ping_pong_asks_for_both_requests() {
    let report = report("net --ping-pong --plain-sockets 1 -b 8M -e 8M -n 5 --timeout 20");
    assert_eq!(report["rows"][0]["wrong"], 0);
}

#[test]
fn net_plain_sockets_and_drivers() {
    for how in [
        "--plain-sockets 1 --connections 70",
        "--plain-sockets 16 --driver sleep",
        "--plain-sockets 2 --mptcp --connections 2",
    ] {
        let report = report(&format!("net -b 1 -e 300001 -f 300001 -n 20 --check-all {how}"));
        let rows = report["rows"].as_array().unwrap();
        assert!(rows.len() == 2 && rows.iter().all(|row| row["wrong"] == 0), "{report}");
        assert!(
            rows[1]["send_cpu"].as_f64() > Some(0.0) && rows[1]["receive_cpu"].as_f64() > Some(0.0)
        );
    }
}

#[test]
fn net_both_ways_checks_both_directions() {
    for how in ["--connections 3", "--plain-sockets 2 --connections 2"] {
        let report =
            report(&format!("net --both-ways -b 300001 -e 300001 -n 40 --check-all {how}"));
        let row = &report["rows"][0];
        assert_eq!((&report["both_ways"], &row["wrong"]), (&true.into(), &0.into()));
        // The bandwidth is that of the messages of both directions.
        let (time, bandwidth) =
            (row["time_us"].as_f64().unwrap(), row["bandwidth"].as_f64().unwrap());
        assert!((bandwidth * time - 300.001).abs() < 0.01, "{row}");
        assert!(row["p99_us"].as_f64() >= row["p50_us"].as_f64(), "{row}");
    }
    run("net --both-ways --ping-pong").failed("--both-ways");
}

#[test]
fn net_without_warmup_times_the_first_messages() {
    for how in ["", "--both-ways", "--ping-pong"] {
        let report = report(&format!("net -w 0 -n 4 -b 64K -e 64K {how}"));
        assert_eq!(report["rows"][0]["wrong"], 0);
    }
}
