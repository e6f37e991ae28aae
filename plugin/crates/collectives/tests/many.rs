//! Many ranks as threads of one process, alone in it: how many threads they need is counted.

use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use evenkeel_collectives::{Call, Group, MemoryStore, Op, Tcp, TransportKind};

const RANKS: usize = 64;

#[test]
fn sixty_four_ranks_share_one_thread_for_each_core_at_most() {
    let store = MemoryStore::new();
    let transport = TransportKind::Tcp(Tcp::on("lo").unwrap());
    let counted = Barrier::new(RANKS);
    thread::scope(|scope| {
        for rank in 0..RANKS {
            let (store, transport, counted) = (&store, &transport, &counted);
            scope.spawn(move || {
                let patience = Duration::from_secs(60);
                let group = Group::join(store, rank, RANKS, transport, patience).unwrap();
                let mut data = [rank as f32];
                group.allreduce_of(&mut data, Op::Sum, &Call::default()).unwrap();
                assert_eq!(data[0], (RANKS * (RANKS - 1) / 2) as f32);
                counted.wait();
                if rank == 0 {
                    let (moving, all) = threads();
                    let cores = thread::available_parallelism().unwrap().get();
                    assert!((1..=cores).contains(&moving), "{moving} threads that move bytes");
                    // The test's own two, the ranks, those that move bytes, and the one that says who is alive.
                    assert!(all <= 2 + RANKS + moving + 1, "{all} threads");
                }
                counted.wait();
            });
        }
    });
}

/// This process's threads that wait for the network, and all.
fn threads() -> (usize, usize) {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    // One that ends meanwhile has no name.
    let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).ok();
    let names: Vec<String> = tasks.filter_map(name).collect();
    (names.iter().filter(|name| name.starts_with("evenkeel-io")).count(), names.len())
}
