//! Results are right, and have the same bits in all configurations.

use std::sync::{Arc, Barrier};
use std::time::Duration;
use std::{env, fs, process, thread};

use evenkeel_reduction_kernels::{DataType, Op};
use evenkeel_reduction_server::ServerOptions;
use evenkeel_testkit::TestRng;

use crate::harness::{
    agreed, all_reduce, begin, data, expected, join, join_with, members, names, options, server,
    server_at, server_with, transport,
};

/// Sizes around all boundaries: elements, alignment, payload in the header's message, pieces.
const SIZES: [usize; 8] = [8, 128, 1000, 8192, 8200, 100_000, 262_152, 3 << 20];

/// Sums, which depend on the order of the ranks, and reductions that do not.
const REDUCTIONS: [(DataType, Op); 6] = [
    (DataType::Float32, Op::Sum),
    (DataType::Float64, Op::Sum),
    (DataType::Float16, Op::Sum),
    (DataType::Bfloat16, Op::Sum),
    (DataType::Float32, Op::Min),
    (DataType::Int32, Op::Max),
];

/// Data whose sum depends on the order of additions: float32 cannot hold the sum of a large and a
/// small number, and large numbers often cancel out.
fn sensitive(seed: u64, kind: DataType, bytes: usize) -> Vec<u8> {
    let [large, small] = match kind {
        DataType::Float16 => [0x7800u16, 0x0004],
        DataType::Bfloat16 => [0x4a00, 0x3300],
        _ => return data(seed, kind, bytes),
    };
    let mut rng = TestRng::new(seed);
    let mut half = || {
        let size = if rng.below(2) == 0 { large } else { small };
        let (sign, mantissa) = (rng.below(2) as u16, rng.below(4) as u16);
        (sign << 15 | size | mantissa).to_ne_bytes()
    };
    (0..bytes / 2).flat_map(|_| half()).collect()
}

/// What may differ from job to job without an effect on results.
#[derive(Clone, Copy)]
struct Config {
    servers: usize,
    /// Of each server.
    threads: usize,
    /// With less memory, pieces are smaller.
    memory: u64,
    /// Maximum number of servers that an operation is split over.
    split: &'static str,
    /// Maximum size of an operation; a longer vector is reduced by several.
    operation: usize,
}

/// All ranks reduce vectors of all sizes with all reductions. Returns the results.
fn results(of: Config, ranks: u32) -> Vec<Vec<u8>> {
    let servers: Vec<_> =
        (0..of.servers).map(|_| server_with(of.memory, of.threads, &[])).collect();
    let names = names(&servers);
    let threads: Vec<_> = members(ranks, "sums")
        .into_iter()
        .map(|member| {
            let names = names.clone();
            thread::spawn(move || {
                let split = [("EVENKEEL_REDUCTION_SPLIT", of.split)];
                let client = join_with(&transport(&[]), &names, &member, &split);
                let mut rng = TestRng::new(of.servers as u64 + u64::from(member.rank));
                let mut results = vec![];
                for (round, size) in SIZES.into_iter().enumerate() {
                    for (kind, op) in REDUCTIONS {
                        let data =
                            |rank| sensitive(u64::from(rank) * 100 + round as u64, kind, size);
                        // Ranks begin at different times, in another order each time.
                        (0..rng.below(50)).for_each(|_| thread::yield_now());
                        let parts = data(member.rank);
                        let parts = parts.chunks(of.operation);
                        let result: Vec<u8> = parts
                            .flat_map(|part| all_reduce(&client, part, kind, op).unwrap())
                            .collect();
                        // All ranks' are compared below.
                        if member.rank == 0 {
                            let all: Vec<_> = (0..ranks).map(data).collect();
                            assert!(result == expected(kind, op, &all), "{size} B {kind:?} {op:?}");
                        }
                        results.push(result);
                    }
                }
                results
            })
        })
        .collect();
    agreed(threads)
}

#[test]
fn sums_have_the_same_bits_in_all_configs() {
    let default =
        Config { servers: 1, threads: 1, memory: 256 << 20, split: "64", operation: usize::MAX };
    let mut seen: Vec<_> = [
        default,
        Config { servers: 2, threads: 3, ..default },
        Config { servers: 3, memory: 8 << 20, split: "2", ..default },
        Config { threads: 4, memory: 4 << 20, operation: 64 << 10, ..default },
    ]
    .into_iter()
    .map(|of| results(of, 3))
    .collect();
    seen.dedup();
    assert_eq!(seen.len(), 1);
}

/// Otherwise the test above would prove nothing.
#[test]
fn sums_depend_on_the_order_of_ranks() {
    for (kind, op) in REDUCTIONS {
        let [a, b, c] = [0, 100, 200].map(|seed| sensitive(seed, kind, 100_000));
        let sum = expected(kind, op, &[a.clone(), b.clone(), c.clone()]);
        let matters = [[&c, &b, &a], [&b, &c, &a]]
            .map(|order| expected(kind, op, &order.map(Vec::clone)) != sum);
        let exact = matches!(op, Op::Min | Op::Max);
        assert_eq!(matters, [!exact; 2], "{kind:?} {op:?}");
    }
}

#[test]
fn sum_of_one_rank_is_its_own_vector() {
    let servers = [server()];
    let client = join(&transport(&[]), &names(&servers), &members(1, "alone")[0]);
    let own = data(1, DataType::Bfloat16, 300_000);
    assert_eq!(all_reduce(&client, &own, DataType::Bfloat16, Op::Sum).unwrap(), own);
    assert!(all_reduce(&client, &[], DataType::Float32, Op::Sum).unwrap().is_empty());
}

#[test]
fn sums_are_right_when_ranks_are_out_of_step() {
    const ROUNDS: u64 = 20;
    let servers = [server(), server()];
    let transport = transport(&[]);
    let join_all = |job| {
        let members = members(2, job);
        members.iter().map(|member| join(&transport, &names(&servers), member)).collect::<Vec<_>>()
    };
    let (one, two) = (join_all("one"), join_all("two"));
    let (kind, op) = (DataType::Float32, Op::Sum);
    let of = |rank: u64, round: u64| data(rank * 1000 + round, kind, 40_000 * (round as usize + 1));
    let check = |round: u64, result: Vec<u8>| {
        assert_eq!(result, expected(kind, op, &[of(0, round), of(1, round)]));
    };
    thread::scope(|scope| {
        // Rank 0 begins everything at once, in both communicators.
        for clients in [&one, &two] {
            scope.spawn(|| {
                let all: Vec<_> = (0..ROUNDS)
                    .map(|round| begin(&clients[0], &of(0, round), kind, op).unwrap())
                    .collect();
                for (round, running) in (0..).zip(all) {
                    check(round, running.finish().unwrap());
                }
            });
        }
        // Rank 1 does one after the other, and the second communicator first.
        for clients in [&two, &one] {
            for round in 0..ROUNDS {
                check(round, all_reduce(&clients[1], &of(1, round), kind, op).unwrap());
            }
        }
    });
}

#[test]
fn memory_stays_within_its_limit_with_64_jobs() {
    const MEMORY: u64 = 16 << 20;
    let server = Arc::new(server_with(MEMORY, 2, &[]));
    let servers = vec![server.address().to_string()];
    // One flow each: the number of sockets is not what is tested.
    let transport = transport(&[("EVENKEEL_FLOWS", "1")]);
    let barrier = Arc::new(Barrier::new(64));
    let jobs: Vec<_> = (0..64u64)
        .map(|job| {
            let (servers, transport) = (servers.clone(), Arc::clone(&transport));
            let barrier = Arc::clone(&barrier);
            thread::spawn(move || {
                let members = members(2, &format!("job-{job}"));
                let clients: Vec<_> =
                    members.iter().map(|member| join(&transport, &servers, member)).collect();
                barrier.wait();
                let (kind, op) = (DataType::Float32, Op::Sum);
                for round in 0..2 {
                    let of = |rank| data(job * 10 + round * 2 + rank, kind, 400_000);
                    let running: Vec<_> = clients
                        .iter()
                        .zip([of(0), of(1)])
                        .map(|(client, data)| begin(client, &data, kind, op).unwrap())
                        .collect();
                    for result in both(running) {
                        assert_eq!(result, expected(kind, op, &[of(0), of(1)]));
                    }
                }
            })
        })
        .collect();
    for job in jobs {
        job.join().unwrap();
    }
    let (_, peak) = server.memory();
    assert!(peak <= MEMORY && peak > MEMORY / 8, "{peak} of {MEMORY} bytes");
}

/// Finishes two operations at the same time: each client makes progress only while it is polled.
fn both(running: Vec<crate::harness::Running<'_>>) -> Vec<Vec<u8>> {
    thread::scope(|scope| {
        let threads: Vec<_> =
            running.into_iter().map(|one| scope.spawn(|| one.finish().unwrap())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn window_of_a_rank_shrinks_beside_a_slow_one() {
    const OPERATIONS: usize = 32;
    let server = server();
    let path = env::temp_dir().join("ahead-of-a-slow-rank");
    let names = names(&[&server]);
    let one = 1f32.to_ne_bytes();
    let [fast, slow] = members(2, "ahead").try_into().unwrap();
    let other = {
        let names = names.clone();
        thread::spawn(move || {
            let client = join(&transport(&[]), &names, &slow);
            for _ in 0..OPERATIONS {
                thread::sleep(Duration::from_millis(20));
                all_reduce(&client, &one, DataType::Float32, Op::Sum).unwrap();
            }
        })
    };
    let recorded = [("EVENKEEL_REDUCTION_TIMELINE", path.to_str().unwrap())];
    let client = join_with(&transport(&[]), &names, &fast, &recorded);
    let begun: Vec<_> = (0..OPERATIONS)
        .map(|_| begin(&client, &one, DataType::Float32, Op::Sum).unwrap())
        .collect();
    for operation in begun {
        assert_eq!(operation.finish().unwrap(), 2f32.to_ne_bytes());
    }
    other.join().unwrap();
    drop(client);
    let path = path.with_added_extension(process::id().to_string());
    let lines = fs::read_to_string(&path).unwrap();
    fs::remove_file(&path).unwrap();
    let pieces: Vec<_> =
        lines.lines().map(|line| [span(line, "send")[0], span(line, "recv")[1]]).collect();
    assert_eq!(pieces.len(), OPERATIONS);
    // Number of pieces in flight when one completed, itself included.
    let in_flight =
        |end: f64| pieces.iter().filter(|[begun, back]| *begun < end && *back >= end).count();
    let ahead: Vec<_> =
        pieces[OPERATIONS - 12..].iter().map(|[_, back]| in_flight(*back)).collect();
    assert!(in_flight(pieces[0][1]) > 8, "the window is not used");
    assert!(ahead.iter().all(|ahead| *ahead <= 6), "{ahead:?}");
}

#[test]
fn pieces_are_received_while_others_are_reduced_and_sent() {
    let path = env::temp_dir().join(format!("timeline.{}", process::id()));
    let server =
        server_at(&ServerOptions { timeline: Some(path.clone()), ..options(256 << 20, 1) });
    let names = names(&[&server]);
    let ranks: Vec<_> = members(2, "timeline")
        .into_iter()
        .map(|member| {
            let names = names.clone();
            thread::spawn(move || {
                let client = join(&transport(&[]), &names, &member);
                let own = data(member.rank.into(), DataType::Float32, 16 << 20);
                all_reduce(&client, &own, DataType::Float32, Op::Sum).unwrap();
            })
        })
        .collect();
    ranks.into_iter().for_each(|rank| rank.join().unwrap());
    drop(server);
    let lines = fs::read_to_string(&path).unwrap();
    fs::remove_file(&path).unwrap();
    let pieces: Vec<_> = lines.lines().collect();
    assert!(pieces.len() > 16, "{}", pieces.len());
    for step in ["reduce", "send"] {
        let overlap = pieces.iter().any(|piece| {
            let [begin, end] = span(piece, step);
            let others = pieces.iter().filter(|other| *other != piece);
            others.map(|other| span(other, "recv")).any(|recv| recv[0] < begin && end < recv[1])
        });
        assert!(overlap, "nothing is received during {step}");
    }
}

/// When a step of a piece began and ended, in seconds, from a timeline's line.
fn span(line: &str, step: &str) -> [f64; 2] {
    let times = line.split(&format!("\"{step}\":[")).nth(1).and_then(|rest| rest.split(']').next());
    let times = times.and_then(|times| times.split_once(','));
    let [begin, end] = times.map(|(begin, end)| [begin.parse(), end.parse()]).expect(line);
    [begin.expect(line), end.expect(line)]
}
