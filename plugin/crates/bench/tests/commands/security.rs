//! The plugin's job key and port range, between processes that set them differently.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::process::{Ended, Running, bench, end_all, ranks, run};

const ONCE: &str = "allreduce -b 64K -e 64K -n 2 --timeout 20";

/// Runs two ranks with these keys; an empty one is none.
fn with_keys(keys: [&str; 2]) -> Vec<Ended> {
    let ranks = ranks(2, ONCE, |rank, command| {
        command.env("EVENKEEL_JOB_KEY", keys[rank]).env("EVENKEEL_CONNECT_TIMEOUT", "5");
    });
    end_all(ranks)
}

#[test]
fn job_key_same_key_connects() {
    let key = "1f".repeat(32);
    for ended in with_keys([&key, &key]) {
        ended.passed();
    }
}

#[test]
fn job_key_wrong_or_missing_key_is_refused() {
    let (key, other) = ("1f".repeat(32), "2e".repeat(32));
    let (key, other) = (key.as_str(), other.as_str());
    for keys in [[key, other], [key, ""], ["", key]] {
        let ended = with_keys(keys);
        assert!(ended.iter().all(|ended| ended.status.code() == Some(1)), "{keys:?}: {ended:?}");
        assert!(ended.iter().any(|ended| ended.err.contains("job key")), "{keys:?}: {ended:?}");
        let shown = |ended: &Ended| [key, other].iter().any(|key| ended.err.contains(*key));
        assert!(!ended.iter().any(shown), "a key is in the log: {ended:?}");
    }
}

#[test]
fn job_key_from_a_file() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    fs::create_dir_all(folder).unwrap();
    let file = folder.join("job-key");
    fs::write(&file, format!("{}\n", "1F".repeat(32))).unwrap();
    let ranks = ranks(2, ONCE, |rank, command| {
        match rank {
            0 => command.env("EVENKEEL_JOB_KEY_FILE", &file),
            _ => command.env("EVENKEEL_JOB_KEY", "1f".repeat(32)),
        };
    });
    for ended in end_all(ranks) {
        ended.passed();
    }
}

/// Runs two ranks with one key file and these values of `EVENKEEL_ENCRYPTION`.
fn with_encryption(file: &Path, values: [&str; 2]) -> Vec<Ended> {
    let ranks = ranks(2, ONCE, |rank, command| {
        command.env("EVENKEEL_JOB_KEY_FILE", file).env("EVENKEEL_ENCRYPTION", values[rank]);
        command.env("EVENKEEL_CONNECT_TIMEOUT", "5").env("NCCL_DEBUG", "INFO");
    });
    end_all(ranks)
}

#[test]
fn encryption_of_both_sides_or_of_none_connects() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    fs::create_dir_all(folder).unwrap();
    let file = folder.join("encryption-key");
    let key = "1f".repeat(32);
    fs::write(&file, &key).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
    for (values, status) in [
        (["required", "required"], "encryption required (TLS 1.3)"),
        (["off", ""], "encryption off"),
        (["required", "off"], "EVENKEEL_ENCRYPTION"),
        (["off", "required"], "EVENKEEL_ENCRYPTION"),
    ] {
        let ended = with_encryption(&file, values);
        let connects = status.starts_with("encryption");
        for ended in &ended {
            assert_eq!(ended.status.success(), connects, "{values:?}: {ended:?}");
            assert!(!ended.err.contains(&key), "the key is in the log: {ended:?}");
            assert!(ended.err.contains("can be read by every user"), "{ended:?}");
        }
        let says = |ended: &Ended| ended.err.contains(status);
        match connects {
            true => assert!(ended.iter().all(says), "{values:?}: {ended:?}"),
            false => assert!(ended.iter().any(says), "{values:?}: {ended:?}"),
        }
    }
}

#[test]
fn port_range_too_small_is_named() {
    let with_ports = |ports: &str| {
        end_all(ranks(2, ONCE, |_, command| {
            command.env("EVENKEEL_PORTS", ports);
        }))
    };
    for ended in with_ports("29873-29874") {
        ended.passed();
    }
    // Two ranks on this machine need a port each.
    let ended = with_ports("29875");
    assert!(
        ended.iter().any(|ended| ended.err.contains("EVENKEEL_PORTS=29875-29875")),
        "{ended:?}"
    );
}

#[test]
fn job_key_is_not_printed_with_the_settings() {
    let ended = run("settings");
    assert!(ended.out.contains("EVENKEEL_JOB_KEY"), "{ended:?}");
    let mut command = bench("settings");
    command.env("EVENKEEL_JOB_KEY", "1f".repeat(32));
    let ended = Running::start(command).end();
    assert!(!ended.out.contains("1f1f"), "{ended:?}");
}
