//! Results are right, and the same bits whatever the circumstances.

use std::sync::{Arc, Barrier};
use std::time::Duration;
use std::{env, fs, process, thread};

use evenkeel_chance::Chance;
use evenkeel_reduce::{DataType, Op};
use evenkeel_reduction::Server;

use crate::harness::{
    agreed, all_reduce, begin, data, expected, join, members, names, server, server_with, transport,
};

/// Sizes around everything that is a boundary: elements, alignment, what comes with a header, pieces.
const SIZES: [usize; 8] = [8, 128, 1000, 8192, 8200, 100_000, 262_152, 3 << 20];

/// All ranks reduce vectors of all sizes and types; gives the results of rank 0.
fn results(servers: &[Server], ranks: u32, seed: u64) -> Vec<Vec<u8>> {
    let names = names(servers);
    let kinds = [DataType::Float32, DataType::Float16, DataType::Float64, DataType::Int32];
    let threads: Vec<_> = members(ranks, "sums")
        .into_iter()
        .map(|member| {
            let names = names.clone();
            thread::spawn(move || {
                let client = join(&transport(&[]), &names, &member);
                let mut chance = Chance::new(seed + u64::from(member.rank));
                let mut results = vec![];
                for (round, size) in SIZES.into_iter().enumerate() {
                    let kind = kinds[round % kinds.len()];
                    let op = Op::ALL[round / 2 % 4];
                    let of = |rank: u32| data(u64::from(rank) * 100 + round as u64, kind, size);
                    // Ranks come at different times, in another order each time.
                    (0..chance.below(50)).for_each(|_| thread::yield_now());
                    let result = all_reduce(&client, &of(member.rank), kind, op).unwrap();
                    let all: Vec<_> = (0..ranks).map(of).collect();
                    assert!(result == expected(kind, op, &all), "{size} bytes of {kind:?} {op:?}");
                    results.push(result);
                }
                results
            })
        })
        .collect();
    agreed(threads)
}

#[test]
fn results_are_the_same_bits_whatever_the_servers_the_threads_and_the_pieces() {
    let mut seen = vec![];
    // Less memory means smaller pieces.
    for (seed, (servers, threads, memory)) in
        [(1, 1, 256 << 20), (2, 3, 256 << 20), (3, 1, 8 << 20), (1, 4, 4 << 20)]
            .into_iter()
            .enumerate()
    {
        let servers: Vec<_> = (0..servers).map(|_| server_with(memory, threads, &[])).collect();
        seen.push(results(&servers, 3, seed as u64));
    }
    seen.dedup();
    assert_eq!(seen.len(), 1);
}

#[test]
fn one_rank_alone_gets_its_own_back() {
    let servers = [server()];
    let client = join(&transport(&[]), &names(&servers), &members(1, "alone")[0]);
    let own = data(1, DataType::Bfloat16, 300_000);
    assert_eq!(all_reduce(&client, &own, DataType::Bfloat16, Op::Sum).unwrap(), own);
    assert!(all_reduce(&client, &[], DataType::Float32, Op::Sum).unwrap().is_empty());
}

#[test]
fn ranks_and_communicators_may_be_out_of_step() {
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
fn sixty_four_jobs_stay_within_the_memory_given() {
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
    let (_, most) = server.memory();
    assert!(most <= MEMORY && most > MEMORY / 8, "{most} of {MEMORY} bytes");
}

/// Finishes both of two operations, whose clients move only while they are asked.
fn both(running: Vec<crate::harness::Running<'_>>) -> Vec<Vec<u8>> {
    thread::scope(|scope| {
        let threads: Vec<_> =
            running.into_iter().map(|one| scope.spawn(|| one.finish().unwrap())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn a_rank_does_not_run_far_ahead_of_a_slow_one() {
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
                // This is how slow it is.
                thread::sleep(Duration::from_millis(20));
                all_reduce(&client, &one, DataType::Float32, Op::Sum).unwrap();
            }
        })
    };
    let noted = [("EVENKEEL_REDUCTION_TIMELINE", path.to_str().unwrap())];
    let client = join(&transport(&noted), &names, &fast);
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
    let moment = |line: &str, step: &str, which: usize| -> f64 {
        let times = line.split(step).nth(1).and_then(|rest| rest.split([',', ']']).nth(which));
        times.and_then(|time| time.parse().ok()).unwrap_or_else(|| panic!("{line}"))
    };
    let pieces: Vec<_> = lines
        .lines()
        .map(|line| [moment(line, "\"send\":[", 0), moment(line, "\"recv\":[", 1)])
        .collect();
    assert_eq!(pieces.len(), OPERATIONS);
    // Those that were on their way when one of the last came back, itself included.
    let flying =
        |end: f64| pieces.iter().filter(|[begun, back]| *begun < end && *back >= end).count();
    let ahead: Vec<_> = pieces[OPERATIONS - 12..].iter().map(|[_, back]| flying(*back)).collect();
    assert!(flying(pieces[0][1]) > 8, "at first it does");
    assert!(ahead.iter().all(|ahead| *ahead <= 6), "{ahead:?}");
}
