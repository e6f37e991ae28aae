//! One rank of a run.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::process::ExitCode;
use std::thread;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use evenkeel_nccl_abi::HANDLE_SIZE;
use serde::{Deserialize, Serialize};

use super::timeline_log::{Journey, Line, Logs, Operation, Run, Span, Task};
use super::{Options, RunType};
use crate::allreduce::ring::{Buffers, Ring};
use crate::counters::cpu_seconds;
use crate::error::Result;
use crate::output;
use crate::output::record::{Output, OutputOptions, Process};
use crate::plugin_host::collnet::{Coll, Collectives, Elements, Registered};
use crate::plugin_host::{Plugin, Region};
use crate::ranks::bootstrap::World;
use crate::workload::{self, Workload};

/// Maximum number of operations that are reported to rank 0, over all ranks.
const MAX_SHARED: usize = 40_000;

/// Takes part in a run, and says what came of it: to who watches, or else on rank 0.
///
/// # Errors
/// One line: what went wrong, and which rank is the cause where that is known.
pub(super) fn run(options: &Options) -> Result<ExitCode> {
    if options.watched && options.ranks.spawned_by.is_none() {
        // The watching process is gone when the other end is closed.
        thread::spawn(|| {
            let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
            std::process::exit(1);
        });
    }
    workload::run(options, &options.ranks)
}

impl Workload for Options {
    const NAME: &'static str = "reduction";
    type Ranks = World;

    fn output(&self) -> &OutputOptions {
        &self.output
    }

    /// The report is printed by who watches all ranks, or else by rank 0.
    fn measure(&self, world: &mut World, _: &Output) -> Result<u64> {
        measure(self, world)
    }
}

/// Seconds since 1970 of moments.
struct Clock(Instant, f64);

impl Clock {
    fn start() -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self(Instant::now(), now.as_secs_f64())
    }

    fn at(&self, moment: Instant) -> f64 {
        self.1 + moment.saturating_duration_since(self.0).as_secs_f64()
    }
}

/// Gives the number of wrong elements on all ranks.
fn measure(options: &Options, world: &mut World) -> Result<u64> {
    let (plugin, network) = options.network.open()?;
    let element = options.run.kind.bytes();
    let down = |bytes: u64| bytes as usize / element * element;
    let bytes = down(options.size.0);
    let chunk = match (options.run_type, options.chunksize) {
        (RunType::Ring, _) | (_, None) => bytes,
        (_, Some(chunk)) => down(chunk.0),
    };
    let (own, result) = (Region::new(bytes)?, Region::new(bytes)?);
    let clock = Clock::start();
    let mut rank = Rank { options, own: &own, result: &result, chunk, clock, operations: vec![] };
    let (seconds, cpu, wrong) = match options.run_type {
        RunType::Ring => {
            let mut ring = Ring::connect(&plugin, options.network.device, options.driver, world)?;
            ring.register(&own)?;
            ring.register(&result)?;
            rank.all(world, &mut Way::Ring(&mut ring))?
        }
        _ => {
            let coll = connect(options, &plugin, world)?;
            let (from, to) = (coll.register(&own)?, coll.register(&result)?);
            rank.all(world, &mut Way::Collective { coll: &coll, from: &from, to: &to })?
        }
    };
    let task = Task {
        network: match options.run_type {
            RunType::Ring => format!("{}, ring", network.name),
            _ => network.name,
        },
        ranks: world.ranks().len(),
        size: bytes as u64,
        chunksize: chunk as u64,
        kind: options.run.kind.name(),
        redop: options.run.op.name(),
        driver: Some(options.driver),
    };
    let process = Some(Process::now(world.rank())?);
    let ranks = task.ranks;
    let run = Run { task, rank: world.rank(), seconds, cpu: Some(cpu), process, wrong };
    // Of very many, some do.
    let step =
        if options.watched { 1 } else { (rank.operations.len() * ranks).div_ceil(MAX_SHARED) };
    let operations = rank.operations.iter().step_by(step.max(1));
    let mut log: Vec<Line> = operations.copied().map(Line::Operation).collect();
    log.extend(pieces(&rank.operations)?.into_iter().map(Line::Piece));
    log.push(Line::Run(run));
    let mut text = String::new();
    for line in &log {
        text += &serde_json::to_string(line).map_err(|error| format!("the log: {error}"))?;
        text.push('\n');
    }
    let kept = if options.watched { String::new() } else { text.clone() };
    let all: Vec<Mine> = world.all_gather(&Mine { wrong, log: kept })?;
    let wrong = all.iter().map(|mine| mine.wrong).sum();
    if options.watched {
        output::write(&text)?;
    } else if world.rank() == 0 {
        let logs = all.into_iter().map(|mine| mine.log).collect();
        super::report(options, &Logs::new(logs, vec![])?)?;
    }
    Ok(wrong)
}

/// What the ranks exchange at the end.
#[derive(Serialize, Deserialize)]
struct Mine {
    wrong: u64,
    /// Empty where somebody else collects them.
    log: String,
}

/// Makes a communicator of all ranks.
fn connect(options: &Options, plugin: &Plugin, world: &mut World) -> Result<Coll> {
    let collectives = Collectives::open(plugin, options.network.device)?;
    let (kind, op) = (options.run.kind, options.run.op);
    if !collectives.supports(kind.code(), op.code())? {
        let name = plugin.name();
        return Err(format!("{name} does not reduce {} by {}", kind.name(), op.name()));
    }
    let listener = collectives.listen(options.network.device)?;
    let handles = world.all_gather(&listener.handle().to_vec())?;
    let handles: Option<Vec<[u8; HANDLE_SIZE]>> =
        handles.into_iter().map(|handle| handle.try_into().ok()).collect();
    let handles = handles.ok_or_else(|| "a rank shared no handle".to_owned())?;
    listener.connect(handles, world.rank())
}

/// What the plugin noted of the pieces of these operations; nothing where it was not asked.
fn pieces(operations: &[Operation]) -> Result<Vec<Journey>> {
    let Ok(file) = std::env::var("EVENKEEL_REDUCTION_TIMELINE") else { return Ok(vec![]) };
    let file = format!("{file}.{}", std::process::id());
    // A plugin that is not ours, or a ring, leaves none.
    let Ok(text) = fs::read_to_string(&file) else { return Ok(vec![]) };
    let _ = fs::remove_file(&file);
    let (Some(first), Some(last)) = (operations.first(), operations.last()) else {
        return Ok(vec![]);
    };
    let timed: Span = [first.e2e[0], last.e2e[1]];
    let mut pieces = vec![];
    for line in text.lines() {
        let piece: Journey =
            serde_json::from_str(line).map_err(|error| format!("{file}: {error}"))?;
        if piece.send[0] >= timed[0] && piece.recv[1] <= timed[1] {
            pieces.push(piece);
        }
    }
    Ok(pieces)
}

/// What reduces.
enum Way<'a> {
    Ring(&'a mut Ring),
    Collective { coll: &'a Coll, from: &'a Registered, to: &'a Registered },
}

/// This rank, ready.
struct Rank<'a> {
    options: &'a Options,
    own: &'a Region,
    result: &'a Region,
    /// Bytes of an operation.
    chunk: usize,
    clock: Clock,
    operations: Vec<Operation>,
}

impl Rank<'_> {
    /// All reductions; gives the mean time and the processor time of those that are timed, and the
    /// number of wrong elements.
    fn all(&mut self, world: &mut World, way: &mut Way<'_>) -> Result<(f64, f64, u64)> {
        let run = &self.options.run;
        for _ in 0..run.warmup {
            self.once(world, way)?;
        }
        self.operations.clear();
        world.barrier()?;
        let (start, used) = (Instant::now(), cpu_seconds());
        for _ in 0..run.iterations {
            self.once(world, way)?;
        }
        let seconds = start.elapsed().as_secs_f64() / f64::from(run.iterations);
        let cpu = (cpu_seconds() - used) / f64::from(run.iterations);
        let timed = std::mem::take(&mut self.operations);
        let mut wrong = 0;
        let whole = 0..self.own.bytes();
        for round in 0..u64::from(run.check) {
            self.result.write(whole.clone(), |bytes| bytes.fill(0xa5))?;
            self.own.write(whole.clone(), |bytes| run.kind.fill(bytes, world.rank(), round))?;
            self.once(world, way)?;
            let ranks = world.ranks().len();
            wrong += self
                .result
                .read(whole.clone(), |bytes| run.kind.wrong(run.op, bytes, ranks, round))?;
        }
        self.operations = timed;
        // No rank closes its connections before all are done.
        world.barrier()?;
        Ok((seconds, cpu, wrong))
    }

    /// Reduces the vector once.
    fn once(&mut self, world: &mut World, way: &mut Way<'_>) -> Result<()> {
        let (kind, op) = (self.options.run.kind, self.options.run.op);
        match way {
            Way::Ring(ring) => {
                let begin = Instant::now();
                let buffers = Buffers { own: self.own, result: self.result, in_place: false };
                ring.all_reduce(world, &buffers, self.own.bytes() / kind.bytes(), kind, op)?;
                self.note(begin, begin);
                Ok(())
            }
            Way::Collective { coll, from, to } => self.collective(world, coll, from, to),
        }
    }

    fn note(&mut self, begin: Instant, begun: Instant) {
        let (begin, begun, end) =
            (self.clock.at(begin), self.clock.at(begun), self.clock.at(Instant::now()));
        self.operations.push(Operation { e2e: [begin, end], req: [begin, begun] });
    }

    /// Several operations at a time; the oldest one is asked, as NCCL does.
    fn collective(
        &mut self,
        world: &mut World,
        coll: &Coll,
        from: &Registered,
        to: &Registered,
    ) -> Result<()> {
        let (kind, op) = (self.options.run.kind, self.options.run.op);
        let mut running = VecDeque::new();
        let (mut at, bytes) = (0, self.own.bytes());
        let mut wait = self.options.driver.wait();
        while at < bytes || !running.is_empty() {
            let mut moved = false;
            while at < bytes && running.len() < usize::from(self.options.depth) {
                let part = at..(at + self.chunk).min(bytes);
                let count = part.len() / kind.bytes();
                let elements = Elements { count, kind: kind.code(), op: op.code() };
                let begin = Instant::now();
                let request = coll.all_reduce(from, to, part.clone(), elements)?;
                let Some(request) = request else { break };
                running.push_back((request, begin, Instant::now()));
                at = part.end;
                moved = true;
            }
            if let Some((request, begin, begun)) = running.front_mut()
                && request.test()?
            {
                let (begin, begun) = (*begin, *begun);
                running.pop_front();
                self.note(begin, begun);
                moved = true;
            }
            if moved {
                wait.progress();
            } else {
                wait.idle(world, || format!("all-reducing byte {at} of {bytes}"))?;
            }
        }
        Ok(())
    }
}
