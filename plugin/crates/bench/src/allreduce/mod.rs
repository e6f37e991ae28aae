//! `evenkeel-bench allreduce`: a ring all-reduce between ranks through a plugin, every element checked.

mod latency;
pub(crate) mod ring;

use std::process::ExitCode;
use std::time::Instant;

use clap::Args;

use crate::cli::options::{NetworkOptions, RankOptions, RunOptions};
use crate::cli::size::{Size, sweep};
use crate::compute::ComputeOptions;
use crate::error::Result;
use crate::output::report::{Measured, Network, Printer, RankLine, Row};
use crate::plugin_host::{Region, log};
use crate::ranks::bootstrap::World;
use crate::ranks::spawn;
use crate::ranks::wait::Driver;
use ring::{Buffers, Ring};

/// What to measure. The flags are nccl-tests'.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  Both ranks on this machine, 64 KiB to 64 MiB:
    evenkeel-bench allreduce --spawn 2 --plugin ./libnccl-net-evenkeel.so -b 64K -e 64M -f 4
  As a container of a PyTorchJob, which sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT:
    evenkeel-bench allreduce
  As a container of an Indexed Job (its index is the rank), or under mpirun -x MASTER_ADDR -x MASTER_PORT:
    WORLD_SIZE=2 MASTER_ADDR=job-0.service MASTER_PORT=29500 evenkeel-bench allreduce
  Two machines by hand:
    evenkeel-bench allreduce --rank 0 --world-size 2 --master-addr 10.0.0.1 --master-port 29500
    evenkeel-bench allreduce --rank 1 --world-size 2 --master-addr 10.0.0.1 --master-port 29500

Exit status: 0 when all went well, 1 when an element is wrong, a rank is lost or something else failed, 2 for bad flags.")]
pub(crate) struct Options {
    /// Smallest buffer, bytes; K, M and G are powers of 1024
    #[arg(short = 'b', long = "minbytes", default_value = "64K", value_name = "SIZE")]
    begin: Size,
    /// Largest buffer
    #[arg(short = 'e', long = "maxbytes", default_value = "64M", value_name = "SIZE")]
    end: Size,
    /// Each size is this many times the one before
    #[arg(short = 'f', long = "stepfactor", default_value_t = 4, value_name = "N")]
    factor: u64,
    /// Run all sizes this many times; 0: until stopped
    #[arg(short = 'N', long = "run_cycles", default_value_t = 1, value_name = "N")]
    cycles: u32,
    /// Print one JSON object instead of the table
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    run: RunOptions,
    #[command(flatten)]
    compute: ComputeOptions,
    #[command(flatten)]
    ranks: RankOptions,
    #[command(flatten)]
    network: NetworkOptions,
}

/// Runs one rank, or starts them all.
///
/// # Errors
/// One line: what went wrong, and which rank is the cause where that is known.
pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    options.network.settle()?;
    let sizes = sweep(options.begin, options.end, options.factor)?;
    if options.json && options.cycles == 0 {
        return Err("--json prints at the end, which --run_cycles 0 does not have".to_owned());
    }
    if let Some(ranks) = options.ranks.spawn {
        return spawn::spawn(ranks);
    }
    let config = options.ranks.rank_config()?;
    let mut world = World::join(config)?;
    let measured = measure(options, &sizes, &mut world);
    world.finish(measured)
}

/// Gives the number of wrong elements on all ranks.
fn measure(options: &Options, sizes: &[u64], world: &mut World) -> Result<u64> {
    let (plugin, network) = options.network.open()?;
    let mut printer = start_printer(options, world, &network)?;
    let mut ring = Ring::connect(&plugin, options.network.device, Driver::Sleep, world)?;
    let most = sizes.iter().max().map_or(0, |size| *size as usize);
    let (own, result) = (Region::new(most)?, Region::new(most)?);
    ring.register(&own)?;
    ring.register(&result)?;
    let mut wrong = 0;
    let mut cycle = 0;
    while options.cycles == 0 || cycle < options.cycles {
        for size in sizes {
            let count = *size as usize / options.run.kind.bytes();
            let mut run = Run { options, world, ring: &mut ring, count, round: u64::from(cycle) };
            let apart = run.time(&Buffers { own: &own, result: &result, in_place: false })?;
            let in_place = run.time(&Buffers { own: &result, result: &result, in_place: true })?;
            wrong += apart.wrong.unwrap_or(0) + in_place.wrong.unwrap_or(0);
            if let Some(printer) = &mut printer {
                let size = (count * options.run.kind.bytes()) as u64;
                let row = Row { size, count: count as u64, out_of_place: apart, in_place };
                printer.row(row).map_err(output)?;
            }
        }
        cycle = cycle.wrapping_add(1);
    }
    let latency = latency::measure(&ring, world)?;
    // No rank closes its connections before all are done.
    let transports = world.all_gather(&log::transport())?;
    if let Some(printer) = printer {
        printer.finish(ring.sent(), transports, latency).map_err(output)?;
    }
    Ok(wrong)
}

fn output(error: std::io::Error) -> String {
    format!("cannot write the results: {error}")
}

fn start_printer(
    options: &Options,
    world: &mut World,
    network: &Network,
) -> Result<Option<Printer>> {
    let networks: Vec<Network> = world.all_gather(network)?;
    if world.rank() != 0 {
        return Ok(None);
    }
    let ranks = world.ranks().iter().zip(networks).enumerate().map(|(rank, (member, network))| {
        RankLine { rank, host: member.host.clone(), address: member.address.clone(), network }
    });
    Printer::start(ranks.collect(), options.run.kind, options.run.op, options.json)
        .map(Some)
        .map_err(output)
}

/// The operations of one size.
struct Run<'a> {
    options: &'a Options,
    world: &'a mut World,
    ring: &'a mut Ring,
    count: usize,
    round: u64,
}

impl Run<'_> {
    fn time(&mut self, buffers: &Buffers<'_>) -> Result<Measured> {
        for _ in 0..self.options.run.warmup {
            self.once(buffers)?;
        }
        self.world.barrier()?;
        let start = Instant::now();
        for _ in 0..self.options.run.iterations {
            self.once(buffers)?;
        }
        let seconds = start.elapsed().as_secs_f64() / f64::from(self.options.run.iterations);
        let mut wrong = None;
        for round in 0..u64::from(self.options.run.check) {
            let seen = self.verify(buffers, self.round.wrapping_mul(31).wrapping_add(round))?;
            wrong = Some(wrong.unwrap_or(0) + seen);
        }
        let all = self.world.all_gather(&(seconds, wrong))?;
        let mean = all.iter().map(|(seconds, _)| seconds).sum::<f64>() / all.len() as f64;
        let wrong = wrong.map(|_| all.iter().filter_map(|(_, wrong)| *wrong).sum());
        let bytes = (self.count * self.options.run.kind.bytes()) as u64;
        Ok(Measured::new(mean, bytes, all.len(), wrong))
    }

    fn once(&mut self, buffers: &Buffers<'_>) -> Result<()> {
        self.options.compute.compute()?;
        self.ring.all_reduce(
            self.world,
            buffers,
            self.count,
            self.options.run.kind,
            self.options.run.op,
        )
    }

    /// Reduces data that is known, and counts what is wrong here.
    fn verify(&mut self, buffers: &Buffers<'_>, round: u64) -> Result<u64> {
        let (kind, op) = (self.options.run.kind, self.options.run.op);
        let all = 0..self.count * kind.bytes();
        let (rank, ranks) = (self.world.rank(), self.world.ranks().len());
        if !buffers.in_place {
            buffers.result.write(all.clone(), |bytes| bytes.fill(0xa5))?;
        }
        buffers.own.write(all.clone(), |bytes| kind.fill(bytes, rank, round))?;
        self.once(buffers)?;
        buffers.result.read(all, |bytes| kind.wrong(op, bytes, ranks, round))
    }
}
