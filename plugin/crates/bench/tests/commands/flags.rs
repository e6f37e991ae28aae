use crate::process::{Running, bench, run};

#[test]
fn flag_errors_are_explained() {
    let none = ("EVENKEEL_TEST", "");
    let plugin = |name| ("NCCL_NET_PLUGIN", name);
    for (line, (name, value), code, says) in [
        ("allreduce --spawn 1", plugin("/no/such.so"), 1, "no plugin loaded: /no/such.so"),
        ("allreduce --spawn 1", plugin("nosuch"), 1, "libnccl-net-nosuch.so"),
        ("allreduce --spawn 1", plugin("libc.so.6"), 1, "no ncclNet table"),
        ("allreduce --spawn 1 --device 99", none, 1, "--device 99"),
        ("allreduce --spawn 0", none, 1, "--spawn 0"),
        ("allreduce --spawn 1 --api 5", none, 2, "6..=12"),
        ("allreduce --spawn 1 -b 12Q", none, 2, "64K"),
        ("allreduce --spawn 1 -b 2K -e 1K", none, 1, "begins at 2048"),
        ("allreduce --spawn 1 -N 0 --json", none, 1, "--run_cycles 0"),
        ("allreduce", none, 1, "set WORLD_SIZE"),
        ("allreduce --rank 2 --world-size 2", none, 1, "rank 2 is not below"),
        ("allreduce --spawn 2", ("NCCL_SOCKET_IFNAME", "=nosuch0"), 1, "nosuch0"),
        ("net --spawn 3", none, 1, "two ranks"),
        ("net --depth 9", none, 2, "1..=8"),
        ("settings --check", ("EVENKEEL_FLOWS", "many"), 1, "1 to 64"),
    ] {
        let mut command = bench(line);
        command.env(name, value);
        let ended = Running::start(command).end();
        assert_eq!(ended.status.code(), Some(code), "{line}: {ended:?}");
        ended.failed(says);
    }
}

#[test]
fn help_shows_examples() {
    for line in ["--help", "allreduce --help", "net --help"] {
        let ended = run(line).passed();
        assert!(ended.out.contains("Examples:"), "{ended:?}");
    }
}
