//! Ranks that leave, at slightly different times: what ranks and servers warn of then.

use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

use evenkeel_reduction_kernels::{DataType, Op};
use evenkeel_reduction_server::Server;
use evenkeel_testkit::TestRng;
use evenkeel_transport::{Log, Transport};

use crate::harness::{
    TIMEOUT, all_reduce, begin, data, expected, join, members, names, options, settings,
};

const KIND: DataType = DataType::Float32;

/// The warnings of all ranks and servers.
#[derive(Default)]
struct Warnings(Mutex<Vec<String>>);

impl Log for Warnings {
    fn warn(&self, line: &str) {
        self.0.lock().unwrap().push(line.to_owned());
    }
    fn info(&self, _line: &str) {}
}

impl Warnings {
    fn lines(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }
}

fn server(warnings: &Arc<Warnings>) -> Server {
    let log = Arc::<Warnings>::clone(warnings);
    Server::start(settings(&[]), &options(64 << 20, 2), log).unwrap()
}

fn transport(warnings: &Arc<Warnings>) -> Arc<Transport> {
    let log = Arc::<Warnings>::clone(warnings);
    Arc::new(Transport::new(settings(&[]), log).unwrap())
}

/// Waits until the servers have no communicator.
fn all_gone(servers: &[Server]) {
    let begin = Instant::now();
    while servers.iter().any(|server| server.communicators() > 0) {
        assert!(begin.elapsed() < TIMEOUT, "a server keeps a communicator");
        thread::yield_now();
    }
}

/// Each rank leaves as soon as it has its own result, while others still wait for theirs.
#[test]
fn ranks_that_leave_after_their_last_result_cause_no_warning() {
    let warnings = Arc::new(Warnings::default());
    let servers = [server(&warnings), server(&warnings)];
    let names = names(&servers);
    for seed in 0..40 {
        let mut rng = TestRng::new(seed);
        let ranks = 2 + rng.below(3) as u32;
        let sizes: Vec<_> = (0..rng.below(3)).map(|_| 8 << rng.below(18)).collect();
        thread::scope(|scope| {
            for member in members(ranks, "leaving") {
                let (names, warnings, sizes) = (&names, &warnings, &sizes);
                scope.spawn(move || {
                    let transport = transport(warnings);
                    let client = join(&transport, names, &member);
                    for (round, size) in sizes.iter().enumerate() {
                        let part =
                            |rank| data(seed + 100 * u64::from(rank) + round as u64, KIND, *size);
                        let sum = all_reduce(&client, &part(member.rank), KIND, Op::Sum);
                        let parts: Vec<_> = (0..ranks).map(part).collect();
                        let right = sum.unwrap() == expected(KIND, Op::Sum, &parts);
                        assert!(right, "rank {} of {ranks}, seed {seed}", member.rank);
                    }
                });
            }
        });
    }
    all_gone(&servers);
    assert_eq!(warnings.lines(), [""; 0]);
}

/// A communicator that all who had joined have left is kept for a while, and then given up.
#[test]
fn ranks_that_never_come_do_not_keep_a_deserted_communicator() {
    let warnings = Arc::new(Warnings::default());
    let servers = [server(&warnings)];
    let first = &members(2, "deserted")[0];
    drop(join(&transport(&warnings), &names(&servers), first));
    all_gone(&servers);
    assert_eq!(warnings.lines(), [""; 0]);
}

/// A failed communicator has one cause, and one warning for each connection that it cost.
#[test]
fn ranks_that_leave_a_failed_communicator_cause_no_warning_of_nothing() {
    let warnings = Arc::new(Warnings::default());
    let servers = [server(&warnings), server(&warnings)];
    let names = names(&servers);
    let transport = transport(&warnings);
    let mut idle = vec![];
    for (round, member_count) in [2, 3, 4].into_iter().enumerate() {
        let mut clients: Vec<_> = members(member_count, "failed")
            .iter()
            .map(|member| join(&transport, &names, member))
            .collect();
        // It is lost in the middle of an operation.
        let lost = clients.remove(round % 2);
        drop(begin(&lost, &data(1, KIND, 1 << 20), KIND, Op::Sum).unwrap());
        drop(lost);
        // One learns of it, and others leave without.
        let waiting = clients.pop().unwrap();
        all_reduce(&waiting, &data(2, KIND, 1 << 20), KIND, Op::Sum).unwrap_err();
        drop(waiting);
        idle.extend(clients);
    }
    // The servers end before the last ranks leave.
    drop(servers);
    drop(idle);
    let nothing = |line: &&String| line.contains(" 0 requests and 0 bytes in flight");
    let lines = warnings.lines();
    assert_eq!(lines.iter().find(nothing), None, "of all: {lines:#?}");
}
