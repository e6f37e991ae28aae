use crate::process::{Running, bench, run};

/// Runs with a variable set, which must fail with a line that contains `text`.
fn refused(arguments: &[&str], variable: (&str, &str), code: i32, text: &str) {
    let mut command = bench(arguments);
    command.env(variable.0, variable.1);
    let ended = Running::start(command).end();
    assert_eq!(ended.status.code(), Some(code), "{arguments:?}: {ended:?}");
    assert!(ended.err.contains(text), "{arguments:?}: {ended:?}");
}

#[test]
fn flag_errors_are_explained() {
    let none = ("EVENKEEL_TEST", "");
    let plugin = |name| ("NCCL_NET_PLUGIN", name);
    refused(
        &["allreduce", "--spawn", "1"],
        plugin("/no/such.so"),
        1,
        "no plugin loaded: /no/such.so",
    );
    refused(&["allreduce", "--spawn", "1"], plugin("nosuch"), 1, "libnccl-net-nosuch.so");
    refused(&["allreduce", "--spawn", "1"], plugin("libc.so.6"), 1, "no ncclNet table");
    refused(&["allreduce", "--spawn", "1", "--device", "99"], none, 1, "--device 99");
    refused(&["allreduce", "--spawn", "0"], none, 1, "--spawn 0");
    refused(&["allreduce", "--spawn", "1", "--api", "5"], none, 2, "6..=12");
    refused(&["allreduce", "--spawn", "1", "-b", "12Q"], none, 2, "64K");
    refused(&["allreduce", "--spawn", "1", "-b", "2K", "-e", "1K"], none, 1, "begins at 2048");
    refused(&["allreduce"], none, 1, "set WORLD_SIZE");
    refused(&["allreduce", "--rank", "2", "--world-size", "2"], none, 1, "rank 2 is not below");
    refused(&["allreduce", "--spawn", "2"], ("NCCL_SOCKET_IFNAME", "=nosuch0"), 1, "nosuch0");
    refused(&["net", "--spawn", "3"], none, 1, "two ranks");
    refused(&["net", "--depth", "9"], none, 2, "1..=8");
    refused(&["settings", "--check"], ("EVENKEEL_FLOWS", "many"), 1, "1 to 64");
}

#[test]
fn help_shows_examples() {
    for command in [&["--help"][..], &["allreduce", "--help"], &["net", "--help"]] {
        let ended = run(command);
        assert!(ended.status.success() && ended.out.contains("Examples:"), "{ended:?}");
    }
}
