//! The number of threads that many ranks of one process need. The test is alone in its process.

use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use evenkeel_collectives::{Call, Group, MemoryStore, Op, Tcp, TransportKind};

const RANKS: usize = 64;

#[test]
fn ranks_of_a_process_share_the_io_threads() {
    let store = MemoryStore::new();
    let transport = TransportKind::Tcp(Tcp::on("lo").unwrap());
    let counted = Barrier::new(RANKS);
    thread::scope(|scope| {
        for rank in 0..RANKS {
            let (store, transport, counted) = (&store, &transport, &counted);
            scope.spawn(move || {
                let timeout = Duration::from_secs(60);
                let group = Group::join(store, rank, RANKS, transport, timeout).unwrap();
                let mut data = [rank as f32];
                group.allreduce_of(&mut data, Op::Sum, &Call::default()).unwrap();
                assert_eq!(data[0], (RANKS * (RANKS - 1) / 2) as f32);
                counted.wait();
                if rank == 0 {
                    let (io_threads, all) = threads();
                    let cores = thread::available_parallelism().unwrap().get();
                    assert!((1..=cores).contains(&io_threads), "{io_threads} I/O threads");
                    // The test's own two, the ranks, the I/O threads, and the liveness responder.
                    assert!(all <= 2 + RANKS + io_threads + 1, "{all} threads");
                }
                counted.wait();
            });
        }
    });
}

/// Number of I/O threads of this process, and of all its threads.
fn threads() -> (usize, usize) {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    // A thread that exits meanwhile has no name.
    let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).ok();
    let names: Vec<String> = tasks.filter_map(name).collect();
    (names.iter().filter(|name| name.starts_with("evenkeel-io")).count(), names.len())
}
