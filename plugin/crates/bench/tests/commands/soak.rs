//! `evenkeel-bench soak`, for a short time. Needs root, as the rest of the tests on real networks do.

use crate::process::{Running, bench, plugin};

/// A soak of some connections. The plugin is the one that Cargo built, unless `more` names another.
fn soak(duration: &str, more: &[&str]) -> Running {
    let plugin = plugin();
    let plugin = plugin.to_string_lossy();
    let few =
        ["soak", "--connections", "24", "--processes", "3", "--seed", "7", "--duration", duration];
    Running::start(bench(&[&few[..], &["--plugin", &plugin], more].concat()))
}

#[test]
fn soak_under_faults_loses_nothing_and_leaves_nothing() {
    let ended = soak("24s", &[]).end();
    assert!(ended.status.success(), "{ended:?}");
    assert!(ended.out.contains("Nothing was lost, nothing is left"), "{ended:?}");
    let row = |name: &str| -> u64 {
        let line = ended.out.lines().find(|line| line.trim_start().starts_with(name));
        let line = line.unwrap_or_else(|| panic!("no {name}: {ended:?}"));
        line.split_whitespace().next_back().unwrap().parse().unwrap()
    };
    assert!(
        row("messages, every byte right") > 0 && row("checks of what is held") >= 2,
        "{ended:?}"
    );
}
