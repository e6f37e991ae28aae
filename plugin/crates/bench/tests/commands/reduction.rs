//! `evenkeel-bench reduction`, with servers and ranks on this machine.

use std::path::Path;

use crate::process::run;

#[test]
fn ranks_reduce_through_servers_that_end_with_the_run() {
    let program = Path::new(env!("CARGO_BIN_EXE_evenkeel-bench"));
    let server = program.with_file_name("evenkeel-reduction-server");
    assert!(server.exists(), "no {}: cargo build -p evenkeel-reduction-server", server.display());
    let arguments =
        ["reduction", "--ranks", "2", "--servers", "2", "--size", "1M", "-n", "2", "-w", "1"];
    let ended = run(&[&arguments[..], &["--chunksize", "300K", "--server-threads", "1"]].concat());
    assert!(ended.status.success(), "{ended:?}");
    for text in [" 0 wrong", "e2e", "req", "# 2 servers", "recv", "reduce", "send"] {
        assert!(ended.out.contains(text), "no {text} in {ended:?}");
    }
}

#[test]
fn a_plugin_without_servers_is_told_from_one_with() {
    let ended = run(&["reduction", "--ranks", "2", "--size", "1M"]);
    assert!(!ended.status.success());
    assert!(ended.err.contains("are reduction servers given?"), "{ended:?}");
}
