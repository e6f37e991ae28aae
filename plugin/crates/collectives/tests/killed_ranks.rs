//! Ranks that are killed at random moments of an all-reduce: the others go on without them, and take a new process in.
//!
//! `EVENKEEL_TEST_KILLS` sets the number of kills for each transport, and the time that survivors need is printed.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, Sender};
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
#[ignore = "a process that the other test starts"]
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
    rank: usize,
    /// The last results, with their generations and steps.
    sums: Vec<(String, String)>,
}

impl Rank {
    fn start(
        number: usize,
        rank: &str,
        transport: &str,
        store: &str,
        lines: Sender<(usize, String)>,
    ) -> Self {
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
        thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if lines.send((number, line)).is_err() {
                    return;
                }
            }
        });
        Self { child, rank: usize::MAX, sums: vec![] }
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits for a line with this word from each of these processes, and returns the rest of the lines. Notes all results.
fn await_all(
    lines: &Receiver<(usize, String)>,
    ranks: &mut [Rank],
    word: &str,
    from: &[usize],
) -> Vec<String> {
    let mut found: Vec<Option<String>> = vec![None; from.len()];
    while found.iter().any(Option::is_none) {
        let (number, line) = lines.recv_timeout(TIMEOUT * 2).unwrap_or_else(|_| {
            let missing = from.iter().zip(&found).filter(|(_, found)| found.is_none());
            let missing: Vec<_> = missing.map(|(number, _)| number).collect();
            panic!("processes {missing:?} hang before {word:?}")
        });
        if let Some(rest) = line.strip_prefix("sum ") {
            let (at, digest) = rest.rsplit_once(' ').unwrap();
            ranks[number].sums.push((at.to_owned(), digest.to_owned()));
        }
        if let Some(place) = from.iter().position(|other| *other == number)
            && let Some(rest) = line.strip_prefix(word)
        {
            found[place] = Some(rest.trim().to_owned());
        }
    }
    found.into_iter().flatten().collect()
}

fn kill_ranks_over(transport: &str, kills: usize) {
    let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let store = format!("tcp://{}", server.address());
    let (sender, lines) = mpsc::channel();
    let start =
        |number: usize, rank: &str| Rank::start(number, rank, transport, &store, sender.clone());
    let mut ranks: Vec<Rank> = (0..SIZE).map(|rank| start(rank, &rank.to_string())).collect();
    let all: Vec<usize> = (0..SIZE).collect();
    let mut rng = TestRng::new(21);
    let mut times = vec![];
    for _ in 0..kills {
        let numbers = await_all(&lines, &mut ranks, "whole", &all);
        for (rank, number) in ranks.iter_mut().zip(numbers) {
            (rank.rank, rank.sums) = (number.parse().unwrap(), vec![]);
        }
        // Not a wait for a state: this chooses the moment.
        thread::sleep(Duration::from_micros(rng.next_u64() % 50_000));
        let victim = rng.next_u64() as usize % SIZE;
        let others: Vec<usize> = (0..SIZE).filter(|number| *number != victim).collect();
        let begun = Instant::now();
        ranks[victim].child.kill().unwrap();
        let lost = await_all(&lines, &mut ranks, "lost", &others);
        let killed = format!("[{}]", ranks[victim].rank);
        assert!(lost.iter().all(|lost| *lost == killed), "{lost:?}, killed: {killed}");
        let sums = await_all(&lines, &mut ranks, "on", &others);
        times.push(begun.elapsed());
        assert!(sums.iter().all(|sum| *sum == sums[0] && sum.starts_with("7 ")), "{sums:?}");
        for (at, digest) in ranks.iter().flat_map(|rank| &rank.sums) {
            let mut same = ranks.iter().flat_map(|rank| &rank.sums);
            assert!(same.all(|(other, sum)| other != at || sum == digest), "bits differ at {at}");
        }
        ranks[victim] = start(victim, "newcomer");
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
