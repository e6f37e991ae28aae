use std::fs;
use std::path::Path;
use std::process::Command;

use crate::process::{Running, bench, end_all, plugin, ranks, report, run};

const SMALL: &str = "-b 4 -e 2M -f 8 -n 2";

#[test]
fn every_version_of_the_interface() {
    for api in 6..=12 {
        let ended = run(&format!("allreduce --spawn 2 --api {api} {SMALL}")).passed();
        assert!(ended.out.contains(&format!("Evenkeel (ncclNet v{api})")), "{ended:?}");
        assert!(ended.out.contains("# Out of bounds values : 0 OK"), "{ended:?}");
        assert_eq!(ended.rows().len(), 7, "{ended:?}");
    }
}

#[test]
fn allreduce_of_few_elements_every_type_and_op() {
    for kind in ["float", "double", "int32"] {
        for op in ["sum", "min", "max"] {
            let ended = run(&format!("allreduce --spawn 3 -d {kind} -o {op} {SMALL}")).passed();
            let rows = ended.rows();
            let columns: Vec<_> = rows[rows.len() - 1].split_whitespace().collect();
            assert_eq!(
                (columns[2], columns[3], columns[8], columns[12]),
                (kind, op, "0", "0"),
                "{columns:?}"
            );
        }
    }
}

#[test]
fn allreduce_of_one_rank() {
    let ended = run("allreduce --spawn 1 -b 1K -e 1K").passed();
    assert!(ended.out.contains("carried 0 bytes"), "{ended:?}");
    assert!(!ended.out.contains("# Latency"), "{ended:?}");
}

#[test]
fn allreduce_prints_the_latency_of_its_ring() {
    for ranks in [2, 3] {
        let ended = run(&format!("allreduce --spawn {ranks} -b 1K -e 1K -n 1")).passed();
        let latency = ended.out.lines().find_map(|line| line.strip_prefix("# Latency: ")).unwrap();
        let (number, unit) = latency.split_once(' ').unwrap();
        assert!(number.parse::<f64>().unwrap() > 0.0, "{latency}");
        assert_eq!(unit, "us from one rank to the next");
    }
}

#[test]
fn allreduce_json_matches_the_table() {
    let report = report("allreduce --spawn 2 -b 1K -e 4K -f 4 -n 2");
    for rank in 0..2 {
        assert_eq!(report["ranks"][rank]["network"]["name"], "Evenkeel");
        assert_eq!(report["ranks"][rank]["network"]["transport"], "tcp");
    }
    assert_eq!(report["rows"][1]["size"], 4096);
    assert_eq!(report["rows"][1]["in_place"]["wrong"], 0);
    assert!(report["ranks"][0]["network"]["devices"].as_u64().unwrap() >= 1);
    assert!(report["latency_us"].as_f64().unwrap() > 0.0);
    // In each operation on two ranks, each sends half of the buffer twice: 2 warm-up, 2 timed and 1
    // checked, both ways.
    assert_eq!(report["sent_bytes"], 5 * 2 * (1024 + 4096));
}

#[test]
fn allreduce_detects_corrupted_bytes() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    fs::create_dir_all(folder).unwrap();
    let library = folder.join("libnccl-net-corrupting.so");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/commands/corrupting.c");
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-Wall", "-Werror", "-o"])
        .arg(&library)
        .arg(source)
        .status()
        .unwrap();
    assert!(built.success());
    let corrupts = |command: &mut Command| {
        command.env("NCCL_NET_PLUGIN", &library).env("REAL_PLUGIN", plugin());
    };
    for (line, says) in [
        ("allreduce --spawn 2 -b 64K -e 64K -n 1", "wrong"),
        ("net -b 64K -e 64K -n 1", "8 messages arrived with wrong content"),
        ("net -b 64K -e 64K -n 3 -w 0", "3 messages"),
        ("net -b 64K -e 64K -n 3 -w 0 --both-ways", "6 messages"),
    ] {
        let mut command = bench(line);
        corrupts(&mut command);
        let ended = Running::start(command).end();
        assert_eq!(ended.status.code(), Some(1), "{ended:?}");
        ended.failed(says);
    }
    // Rank 1 receives only if rank 0 sends too.
    let both_ways = ranks(2, "net -b 64K -e 64K -n 3 -w 0 --both-ways", |rank, command| {
        if rank == 1 {
            corrupts(command);
        }
    });
    for ended in end_all(both_ways) {
        assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    }
}
