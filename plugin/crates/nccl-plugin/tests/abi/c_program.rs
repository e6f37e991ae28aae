//! The library called by a C program.

use std::path::Path;
use std::process::Command;

use crate::harness::library_path;

#[test]
fn c_program_carries_messages() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    std::fs::create_dir_all(folder).unwrap();
    let program = folder.join("c_program");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/abi/c_program.c");
    let built = Command::new("cc")
        .args(["-std=c11", "-D_DEFAULT_SOURCE", "-O1", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(&program)
        .args([source, "-ldl"])
        .status()
        .unwrap();
    assert!(built.success());
    let ran = Command::new(&program)
        .arg(library_path())
        .env("NCCL_SOCKET_IFNAME", "lo")
        // Other tests set it. The program expects no rail.
        .env_remove("EVENKEEL_RAILS")
        .output()
        .unwrap();
    let (out, err) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success() && out == "64 messages\n", "{out}{err}");
}
