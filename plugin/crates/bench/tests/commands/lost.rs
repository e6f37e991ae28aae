//! Ranks that die: everyone else ends, and says who it was.

use crate::process::{Running, bench, end_all, is_row, ranks};

const FOREVER: &str = "allreduce -b 1M -e 1M -n 2 -N 0";

fn kill_and_expect(count: usize, victim: usize) {
    let mut running = ranks(count, FOREVER, |_, _| {});
    running[0].line(is_row);
    running[victim].kill();
    for (rank, ended) in end_all(running).into_iter().enumerate() {
        assert!(!ended.status.success(), "rank {rank}: {ended:?}");
        if rank != victim {
            assert_eq!(ended.status.code(), Some(1), "rank {rank}: {ended:?}");
            let named =
                ended.err.lines().rfind(|line| line.starts_with("error: ")).unwrap_or_default();
            let culprit = format!("error: rank {victim} (");
            assert!(
                named.starts_with(&culprit) && named.contains("gone"),
                "rank {rank}: {ended:?}"
            );
        }
    }
}

#[test]
fn a_neighbour() {
    kill_and_expect(2, 1);
}

#[test]
fn rank_zero() {
    kill_and_expect(2, 0);
}

#[test]
fn one_of_four() {
    kill_and_expect(4, 2);
}

#[test]
fn the_process_that_started_them_all() {
    let mut parent = Running::start(bench(&format!("{FOREVER} --spawn 2")));
    parent.line(is_row);
    parent.kill();
    // Ends only when no rank holds the standard output any more.
    assert!(!parent.end().status.success());
}
