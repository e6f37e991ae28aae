//! Ranks that are killed at random moments of an all-reduce: the others go on without them, and take a new process in.
//!
//! `EVENKEEL_TEST_KILLS` sets the number of kills for each transport, and the time that survivors need is printed.

#![expect(clippy::unwrap_used, reason = "a test fails by it")]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use evenkeel_collectives::{
    Call, ErrorKind, Group, Op, Reconfigure, TcpStoreServer, TransportKind, store,
};
use evenkeel_testkit::TestRng;

const SIZE: usize = 8;
const ELEMENTS: usize = 100_000;
const KILLS: usize = 25;
/// The timeout of operations, and of the test for every wait. It is reached only when something is broken.
const TIMEOUT: Duration = Duration::from_secs(60);

/// What a process of a rank does: it reports each result, until it is killed.
///
/// Lines: `sum GENERATION STEP DIGEST`, `lost RANKS`, `on DIGEST` after the first all-reduce without the lost rank, `whole RANK`.
#[test]
#[ignore = "part of another test"]
fn rank_process() {
    let variable = |name: &str| std::env::var(name).unwrap();
    let transport = TransportKind::from_name(&variable("TEST_TRANSPORT")).unwrap();
    let store = store::open(&variable("TEST_STORE"), TIMEOUT).unwrap();
    let mut group = match variable("TEST_RANK").parse() {
        Ok(rank) => Group::join(&*store, rank, SIZE, &transport, TIMEOUT).unwrap(),
        Err(_) => Group::join_as_newcomer(&*store, &transport, TIMEOUT).unwrap(),
    };
    let mut generation = 0u32;
    loop {
        let mut number = generation.to_le_bytes();
        group.broadcast(&mut number, 0, &Call::default()).unwrap();
        generation = u32::from_le_bytes(number) + 1;
        println!("\nwhole {}", group.rank());
        let error = (0..u32::MAX).find_map(|step| {
            match sum(&group, generation, step) {
                Ok(digest) => println!("sum {generation} {step} {digest:x}"),
                Err(error) => return Some(error),
            }
            None
        });
        let error = error.unwrap();
        assert!(error.kind() == ErrorKind::Lost, "{error}");
        println!("lost {:?}", error.ranks());
        let survivors = group.reconfigure(&*store, &Reconfigure::default()).unwrap();
        let digest = sum(&survivors, generation, 0).unwrap();
        println!("on {} {digest:x}", survivors.size());
        group = survivors.reconfigure(&*store, &Reconfigure::default().min_size(SIZE)).unwrap();
    }
}

/// Sums numbers whose bits depend on the order of additions. Returns a digest of the result.
fn sum(group: &Group, generation: u32, step: u32) -> Result<u64, evenkeel_collectives::Error> {
    let seed = generation.wrapping_mul(31).wrapping_add(step) as f32 + 0.1;
    let of = |index: usize| (index as f32 + seed) / (group.rank() as f32 + 3.7);
    let mut values: Vec<f32> = (0..ELEMENTS).map(of).collect();
    group.allreduce_of(&mut values, Op::Sum, &Call::default())?;
    let add = |digest: u64, value: &f32| {
        (digest ^ u64::from(value.to_bits())).wrapping_mul(0x100_0000_01b3)
    };
    Ok(values.iter().fold(0xcbf2_9ce4_8422_2325, add))
}

/// A process of a rank, which ends with this process at the latest.
struct Rank {
    child: Child,
    lines: Receiver<String>,
    rank: usize,
    /// The last results, with their generations and steps.
    sums: Vec<(String, String)>,
}

impl Rank {
    fn start(rank: &str, transport: &str, store: &str) -> Self {
        let mut child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL"])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "rank_process", "--ignored", "--nocapture"])
            .env("TEST_RANK", rank)
            .env("TEST_TRANSPORT", transport)
            .env("TEST_STORE", store)
            .stdout(Stdio::piped())
            .spawn()
            .expect("setpriv is needed: apt-get install util-linux");
        let output = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        Self { child, lines, rank: usize::MAX, sums: vec![] }
    }

    /// Waits for a line with this word, and returns the rest of it. Notes all results before it.
    fn await_line(&mut self, word: &str) -> String {
        loop {
            let line = self.lines.recv_timeout(TIMEOUT * 2);
            let line = line.unwrap_or_else(|_| panic!("rank {} hangs before {word:?}", self.rank));
            if let Some(rest) = line.strip_prefix("sum ") {
                let (at, digest) = rest.rsplit_once(' ').unwrap();
                self.sums.push((at.to_owned(), digest.to_owned()));
            } else if let Some(rest) = line.strip_prefix(word) {
                return rest.trim().to_owned();
            }
        }
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn kill_ranks_over(transport: &str, kills: usize) {
    let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let store = format!("tcp://{}", server.address());
    let start = |rank: &str| Rank::start(rank, transport, &store);
    let mut ranks: Vec<Rank> = (0..SIZE).map(|rank| start(&rank.to_string())).collect();
    let mut rng = TestRng::new(21);
    let mut times = vec![];
    for _ in 0..kills {
        for rank in &mut ranks {
            rank.rank = rank.await_line("whole").parse().unwrap();
            rank.sums.clear();
        }
        // Not a wait for a state: this chooses the moment.
        thread::sleep(Duration::from_micros(rng.next_u64() % 50_000));
        let mut victim = ranks.swap_remove(rng.below(SIZE as u64) as usize);
        let begun = Instant::now();
        victim.child.kill().unwrap();
        for rank in &mut ranks {
            assert_eq!(rank.await_line("lost"), format!("[{}]", victim.rank));
        }
        let sums: Vec<_> = ranks.iter_mut().map(|rank| rank.await_line("on")).collect();
        times.push(begun.elapsed());
        assert!(sums.iter().all(|sum| *sum == sums[0] && sum.starts_with("7 ")), "{sums:?}");
        for (at, digest) in ranks.iter().flat_map(|rank| &rank.sums) {
            let mut same = ranks.iter().flat_map(|rank| &rank.sums);
            assert!(same.all(|(other, sum)| other != at || sum == digest), "bits differ at {at}");
        }
        ranks.push(start("newcomer"));
    }
    times.sort_unstable();
    let at = |part: usize| times[(times.len() * part / 100).min(times.len() - 1)];
    println!(
        "{transport}: {kills} kills, until all survivors have the next sum: p50 {:?}, p99 {:?}, longest {:?}",
        at(50),
        at(99),
        at(100)
    );
}

#[test]
fn survivors_of_killed_ranks_go_on_over_shared_memory() {
    kill_ranks_over("shm", kills());
}

#[test]
fn survivors_of_killed_ranks_go_on_over_tcp() {
    kill_ranks_over("tcp:lo", kills());
}

fn kills() -> usize {
    let set = std::env::var("EVENKEEL_TEST_KILLS").ok();
    set.map_or(KILLS, |kills| kills.parse().unwrap())
}
