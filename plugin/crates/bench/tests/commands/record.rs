//! What `--json` prints besides the figures of a workload.

use crate::process::report;

#[test]
fn record_has_the_machine_the_arguments_and_the_processes() {
    for (line, processes) in [
        ("allreduce --spawn 2 -b 1K -e 1K -n 3", 2),
        ("net -b 1K -e 1K -n 3", 2),
        ("scale --connections 4 --idle 1", 2),
        ("collective --spawn 2 --elements 10 --iteration-count 3", 2),
        ("collective --spawn 3 --in-process --elements 10 --iteration-count 3", 1),
        ("reduction --ranks 2 --run-type ring --size 64K -n 3", 2),
    ] {
        let record = report(line);
        assert_eq!(record["evenkeel_bench"], env!("CARGO_PKG_VERSION"), "{record}");
        let command = line.split(' ').next().unwrap();
        assert_eq!((&record["workload"], &record["args"][0]), (&command.into(), &command.into()));
        let args = record["args"].as_array().unwrap();
        assert!(args.last().unwrap() == "--json", "{record}");
        assert!(record["machine"]["processors"].as_u64() > Some(0), "{record}");
        let all = record["processes"].as_array().unwrap();
        assert_eq!(all.len(), processes, "{record}");
        for (rank, process) in all.iter().enumerate() {
            assert_eq!(process["rank"], rank, "{record}");
            let counters = &process["counters"];
            assert!(counters["cpu_s"].as_f64() > Some(0.0), "{record}");
            assert!(counters["resident_kib"].as_u64() > Some(0), "{record}");
        }
    }
}

#[test]
fn record_has_as_many_samples_as_asked_for() {
    for (line, row) in [
        ("allreduce --spawn 2 -b 1K -e 1K -n 9", "/rows/0/out_of_place"),
        ("net -b 1K -e 1K -n 9", "/rows/0"),
        ("net --ping-pong -b 1K -e 1K -n 9", "/rows/0"),
        ("collective --spawn 2 --elements 10 --iteration-count 9", "/rows/0"),
        ("reduction --ranks 2 --run-type ring --size 64K -n 9", ""),
    ] {
        let samples = |record: serde_json::Value| {
            record.pointer(&format!("{row}/samples_us")).map(|all| all.as_array().unwrap().len())
        };
        assert_eq!(samples(report(&format!("{line} --samples 3"))), Some(3), "{line}");
        assert_eq!(samples(report(line)), None, "{line}");
    }
}
