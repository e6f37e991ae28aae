//! `evenkeel-bench soak`, for a short time. Needs root, as the rest of the tests on real networks
//! do.

use crate::process::{plugin, run};

#[test]
fn soak_under_faults_loses_nothing_and_leaves_nothing() {
    let few = "soak --connections 24 --processes 3 --seed 7 --duration 24s --plugin";
    let ended = run(&format!("{few} {}", plugin().display())).passed();
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
