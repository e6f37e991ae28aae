//! Connections that NCCL may share between GPUs, which depends on its version.

use std::mem::MaybeUninit;
use std::path::Path;
use std::process::Command;

use evenkeel_nccl_abi::{Logger, NetV9, NetV10, NetV12, SUCCESS};
use libloading::Library;

use crate::harness::{Net, log_lines, run_in_child_process};

/// What the plugin sees of an NCCL: the logger that it passes, and `ncclGetVersion` beside it.
fn nccl(code: u32) -> Library {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    std::fs::create_dir_all(folder).unwrap();
    let source = folder.join(format!("nccl-{code}.c"));
    let text = format!(
        "void logger(int l, unsigned long s, const char *f, int n, const char *t, ...) {{ (void)l, (void)s, (void)f, (void)n, (void)t; }}\n\
         int ncclGetVersion(int *version) {{ *version = {code}; return 0; }}\n"
    );
    std::fs::write(&source, text).unwrap();
    let library = folder.join(format!("libnccl-{code}.so"));
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source);
    assert!(compiler.status().unwrap().success());
    // SAFETY: it runs no code when it is loaded.
    unsafe { Library::new(&library) }.unwrap()
}

/// The `maxRecvs` that NCCL of a version is told. 0: one without `ncclGetVersion`, such as one that is part of the program.
macro_rules! max_recvs {
    ($version:literal, $table:ty, $code:expr, ($($profiler:expr)?)) => {{
        let net = Net::init($version, 0).unwrap();
        let library = ($code > 0).then(|| nccl($code));
        // SAFETY: the library has this function.
        let symbol = library.as_ref().map(|library| unsafe { library.get::<Logger>(b"logger\0") });
        if let Some(logger) = symbol {
            let init = net.table::<$table>().init.unwrap();
            // SAFETY: the arguments are those of NCCL's header of the version.
            assert_eq!(unsafe { init(Some(*logger.unwrap()), $($profiler)?) }, SUCCESS);
        }
        let mut properties = MaybeUninit::uninit();
        // SAFETY: a place for the properties is passed, and they are used only if written.
        unsafe {
            let get_properties = net.table::<$table>().get_properties.unwrap();
            assert_eq!(get_properties(0, properties.as_mut_ptr()), SUCCESS);
            properties.assume_init().max_recvs
        }
    }};
}

/// With PXN, NCCL before 2.27 may keep different connections at the two ends.
#[test]
fn nccl_before_2_27_shares_no_connections() {
    run_in_child_process("shared_comms::max_recvs_by_version", &[]);
}

/// The version is the process's, so this test has a process of its own.
#[test]
#[ignore = "part of another test"]
fn max_recvs_by_version() {
    assert_eq!(max_recvs!(9, NetV9, 22105, ()), 1);
    assert_eq!(max_recvs!(10, NetV10, 22605, (None)), 1);
    assert_eq!(max_recvs!(10, NetV10, 22703, (None)), 8);
    assert_eq!(max_recvs!(10, NetV10, 0, (None)), 1, "it cannot be told");
    assert!(!log_lines("NCCL of unknown version opens a connection for each GPU").is_empty());
    let net = Net::init(12, 0).unwrap();
    let mut properties = MaybeUninit::uninit();
    // SAFETY: as above.
    let properties = unsafe {
        let get_properties = net.table::<NetV12>().get_properties.unwrap();
        assert_eq!(get_properties(0, properties.as_mut_ptr()), SUCCESS);
        properties.assume_init()
    };
    assert_eq!(properties.max_recvs, 8);
}
