//! A task farm: rank 0 hands out trequests on request. It uses point-to-point messages with a tag for each kind, and `recv_any`.
//!
//! ```sh
//! cargo run -p evenkeel-collectives --example task_farm
//! ```

use std::thread;
use std::time::Duration;

use evenkeel_collectives::{Call, Group, MemoryStore, Result, TransportKind};

const WORKERS: usize = 3;
const TASKS: u64 = 20;

fn main() -> Result<()> {
    let store = MemoryStore::new();
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..=WORKERS)
            .map(|rank| {
                let store = &store;
                scope.spawn(move || {
                    let timeout = Duration::from_secs(30);
                    let group = Group::join(
                        store,
                        rank,
                        WORKERS + 1,
                        &TransportKind::SharedMemory,
                        timeout,
                    )?;
                    if rank == 0 { hand_out(&group) } else { work(&group) }
                })
            })
            .collect();
        ranks.into_iter().try_for_each(|rank| rank.join().unwrap_or(Ok(())))
    })
}

/// Sums the squares of all trequests' numbers, which the workers compute.
fn hand_out(group: &Group) -> Result<()> {
    let (requests, trequests) = (Call::default().tag(1), Call::default().tag(2));
    let (mut sum, mut finished) = (0, 0);
    let mut next = 1..=TASKS;
    while finished < WORKERS {
        let mut result = [0; 8];
        let (worker, _) = group.recv_any(&mut result, &requests)?;
        sum += u64::from_le_bytes(result);
        let task = next.next();
        finished += usize::from(task.is_none());
        group.send(worker, &task.unwrap_or(0).to_le_bytes(), &trequests)?;
    }
    println!("the squares of 1 to {TASKS} make {sum}");
    group.barrier(&Call::default())
}

fn work(group: &Group) -> Result<()> {
    let (requests, trequests) = (Call::default().tag(1), Call::default().tag(2));
    let mut result = 0u64;
    loop {
        group.send(0, &result.to_le_bytes(), &requests)?;
        let mut task = [0; 8];
        group.recv(0, &mut task, &trequests)?;
        match u64::from_le_bytes(task) {
            0 => break,
            number => result = number * number,
        }
    }
    group.barrier(&Call::default())
}
