//! Many ranks, several to a process, find each other in one store and make one all-reduce. What a rank needs for that must not grow
//! with their number, or only as its logarithm.
//!
//! `EVENKEEL_TEST_RANKS` sets the number of ranks. What they needed is printed.

#![expect(clippy::unwrap_used, reason = "a test fails by it")]

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use evenkeel_collectives::{
    Call, Group, Op, Result, Store, TcpStore, TcpStoreServer, TransportKind,
};

const RANKS: usize = 256;
/// Ranks of a process. Each event of one wakes all that sleep.
const RANKS_A_PROCESS: usize = 16;
/// The stack of a rank's thread, so that a thousand fit.
const STACK_BYTES: usize = 512 << 10;
/// The timeout of operations. It is reached only when something is broken.
const TIMEOUT: Duration = Duration::from_secs(120);
/// How often rank 0 may ask the store in a second while it waits for the others.
const MAX_REQUESTS_A_SECOND: usize = 60;

/// A store that counts the requests of one rank.
struct Counted {
    store: TcpStore,
    requests: AtomicUsize,
}

impl Counted {
    fn count(&self) -> &TcpStore {
        self.requests.fetch_add(1, Ordering::Relaxed);
        &self.store
    }
}

impl Store for Counted {
    fn set(&self, name: &str, value: &[u8]) -> Result<()> {
        self.count().set(name, value)
    }
    fn get(&self, name: &str) -> Result<Option<Vec<u8>>> {
        self.count().get(name)
    }
    fn get_many(&self, names: &[String]) -> Result<Vec<Option<Vec<u8>>>> {
        self.count().get_many(names)
    }
    fn await_change(
        &self,
        name: &str,
        known: Option<&[u8]>,
        timeout: Duration,
    ) -> Result<Option<Vec<u8>>> {
        self.count().await_change(name, known, timeout)
    }
    fn add(&self, name: &str, amount: i64) -> Result<i64> {
        self.count().add(name, amount)
    }
    fn set_once(&self, name: &str, value: &[u8]) -> Result<Vec<u8>> {
        self.count().set_once(name, value)
    }
    fn delete(&self, name: &str) -> Result<()> {
        self.count().delete(name)
    }
}

/// What a rank did until it had the sum.
struct Met {
    store_requests: usize,
    joined: Duration,
    reduced: Duration,
}

/// Joins, and makes one all-reduce. Gives the group too, whose links stay.
fn meet(store: &str, rank: usize, size: usize, transport: &TransportKind) -> Result<(Group, Met)> {
    let begun = Instant::now();
    let store = Counted { store: TcpStore::connect(store, TIMEOUT)?, requests: 0.into() };
    let group = Group::join(&store, rank, size, transport, TIMEOUT)?;
    let joined = begun.elapsed();
    let mut data = [rank, 1].map(|number| number as i64);
    group.allreduce_of(&mut data, Op::Sum, &Call::default())?;
    assert_eq!(data, [size * (size - 1) / 2, size].map(|number| number as i64));
    let reduced = begun.elapsed() - joined;
    Ok((group, Met { store_requests: store.requests.into_inner(), joined, reduced }))
}

/// What a process of several ranks does: it reports what they needed, and ends when its input does.
#[test]
#[ignore = "part of another test"]
fn ranks_process() {
    let variable = |name: &str| std::env::var(name).unwrap();
    let number = |name: &str| variable(name).parse::<usize>().unwrap();
    let (first, ranks, size) = (number("TEST_FIRST"), number("TEST_RANKS"), number("TEST_SIZE"));
    let (store, transport) = (variable("TEST_STORE"), variable("TEST_TRANSPORT"));
    let transport = TransportKind::from_name(&transport).unwrap();
    let (have_met, may_leave) = (Barrier::new(ranks + 1), Barrier::new(ranks + 1));
    let (descriptors, threads, resident) = (descriptors(), threads(), resident_kib());
    let run = |rank| {
        let (group, met) = meet(&store, rank, size, &transport).unwrap_or_else(|error| {
            // The others would wait for it.
            println!("\nerror of rank {rank}: {error}");
            std::process::exit(1)
        });
        have_met.wait();
        may_leave.wait();
        drop(group);
        met
    };
    thread::scope(|scope| {
        let run = &run;
        let start = |rank| {
            let builder = thread::Builder::new().stack_size(STACK_BYTES);
            builder.spawn_scoped(scope, move || run(rank)).unwrap()
        };
        let all: Vec<_> = (first..first + ranks).map(start).collect();
        have_met.wait();
        let descriptors = self::descriptors() - descriptors;
        let threads = self::threads() - threads - ranks;
        let resident = resident_kib() - resident;
        println!("\nmet");
        std::io::stdin().read_to_end(&mut vec![]).unwrap();
        may_leave.wait();
        let met: Vec<Met> = all.into_iter().map(|rank| rank.join().unwrap()).collect();
        let most = |of: fn(&Met) -> usize| met.iter().map(of).max().unwrap();
        // Of process 0, rank 0 is apart.
        let requests: Vec<_> = met.iter().map(|met| met.store_requests).collect();
        let others = requests[usize::from(first == 0)..].iter().max().unwrap();
        println!(
            "\nneed {} {others} {descriptors} {threads} {resident} {} {}",
            requests[0],
            most(|met| met.joined.as_millis() as usize),
            most(|met| met.reduced.as_millis() as usize),
        );
    });
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

fn resident_kib() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// A process of several ranks, which ends with this process at the latest.
struct Process {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Process {
    fn start(first: usize, ranks: usize, size: usize, transport: &str, store: &str) -> Self {
        let mut child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL"])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "ranks_process", "--ignored", "--nocapture"])
            .envs([("TEST_STORE", store), ("TEST_TRANSPORT", transport)])
            .env("TEST_FIRST", first.to_string())
            .env("TEST_RANKS", ranks.to_string())
            .env("TEST_SIZE", size.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("setpriv is needed: apt-get install util-linux");
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, input, output }
    }

    /// Waits for a line that begins with this word, and returns the numbers after it.
    fn await_line(&mut self, word: &str) -> Vec<usize> {
        let lines = self.output.by_ref().lines().map_while(|line| line.ok());
        let mut before = vec![];
        for line in lines {
            if let Some(rest) = line.strip_prefix(word) {
                return rest.split_whitespace().map(|number| number.parse().unwrap()).collect();
            }
            before.push(line);
        }
        panic!("a process ended before {word:?}: {before:?}")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn meet_over(transport: &str, size: usize) {
    let begun = Instant::now();
    let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let store = server.address().to_string();
    let each = RANKS_A_PROCESS.min(size);
    let start = |first| Process::start(first, each.min(size - first), size, transport, &store);
    let mut processes: Vec<Process> = (0..size).step_by(each).map(start).collect();
    processes.iter_mut().for_each(|process| drop(process.await_line("met")));
    // All ranks have met, so these may leave.
    processes.iter_mut().for_each(|process| process.input = None);
    let needs: Vec<_> = processes.iter_mut().map(|process| process.await_line("need")).collect();
    let most = |of: usize| needs.iter().map(|need| need[of]).max().unwrap();
    let (first_requests, requests) = (needs[0][0], most(1));
    let (descriptors, threads, resident) = (most(2) / each, most(3), most(4) / each);
    println!(
        "{size} ranks over {transport}: all joined in {} ms, all reduced in {} ms; store requests: {requests}, rank 0 {first_requests}; \
         descriptors of a rank {descriptors}, memory {resident} KiB; further threads of a process {threads}; all {:?}",
        most(5),
        most(6),
        begun.elapsed()
    );
    assert_eq!(requests, 4);
    let seconds = most(5) / 1000 + 1;
    assert!(first_requests <= 10 + MAX_REQUESTS_A_SECOND * seconds, "{first_requests}");
    // A link in each direction with each rank that a step of the barrier or the all-reduce goes to.
    let steps = size.ilog2() as usize + 1;
    assert!(descriptors <= 4 * steps + 4, "{descriptors} descriptors");
    let cores = thread::available_parallelism().unwrap().get();
    assert!(threads <= cores + 2, "{threads} threads");
}

#[test]
fn rendezvous_needs_little_of_each_of_many_ranks() {
    let size = std::env::var("EVENKEEL_TEST_RANKS").map_or(RANKS, |ranks| ranks.parse().unwrap());
    for transport in ["tcp:lo", "shm"] {
        meet_over(transport, size);
    }
}
