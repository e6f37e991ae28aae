//! `evenkeel-bench allreduce`: a ring all-reduce between ranks through a plugin, every element
//! checked.

mod latency;
pub(crate) mod ring;
mod table;

use std::process::ExitCode;
use std::time::Instant;

use clap::Args;

use crate::cli::options::{NetworkOptions, RankOptions, RunOptions};
use crate::cli::size::{Size, sweep};
use crate::compute::ComputeOptions;
use crate::error::Result;
use crate::output::record::{Network, Output, OutputOptions};
use crate::plugin_host::{Region, log};
use crate::ranks::bootstrap::{RankInfo, World};
use crate::ranks::wait::Driver;
use crate::workload::{self, Workload};
use ring::{Buffers, Ring};
use table::{Measured, RankLine, Report, Row};

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
    #[command(flatten)]
    output: OutputOptions,
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
/// As [`workload::run`], or which option makes no sense.
pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    options.network.settle()?;
    options.sizes()?;
    if options.output.json && options.cycles == 0 {
        return Err("--json prints at the end, which --run_cycles 0 does not have".to_owned());
    }
    workload::run(options, &options.ranks)
}

impl Options {
    fn sizes(&self) -> Result<Vec<u64>> {
        sweep(self.begin, self.end, self.factor)
    }
}

impl Workload for Options {
    const NAME: &'static str = "allreduce";
    type Ranks = World;

    fn output(&self) -> &OutputOptions {
        &self.output
    }

    fn measure(&self, world: &mut World, output: &Output) -> Result<u64> {
        let (sizes, RunOptions { kind, op, .. }) = (self.sizes()?, self.run);
        let (plugin, network) = self.network.open()?;
        let ranks = ranks(world, &network)?;
        output.text(&table::heading(&ranks))?;
        let mut ring = Ring::connect(&plugin, self.network.device, Driver::Sleep, world)?;
        let most = sizes.iter().max().map_or(0, |size| *size as usize);
        let (own, result) = (Region::new(most)?, Region::new(most)?);
        ring.register(&own)?;
        ring.register(&result)?;
        let mut rows = vec![];
        let (mut halves, mut busbw, mut wrong) = (0, 0.0, 0);
        let mut cycle = 0;
        while self.cycles == 0 || cycle < self.cycles {
            for size in &sizes {
                let count = *size as usize / kind.bytes();
                let round = u64::from(cycle);
                let mut run = Run { options: self, world, ring: &mut ring, count, round };
                let apart = run.time(&Buffers { own: &own, result: &result, in_place: false })?;
                let in_place =
                    run.time(&Buffers { own: &result, result: &result, in_place: true })?;
                let size = (count * kind.bytes()) as u64;
                let row = Row { size, count: count as u64, out_of_place: apart, in_place };
                for half in row.halves() {
                    halves += 1;
                    busbw += half.busbw;
                    wrong += half.wrong.unwrap_or(0);
                }
                output.text(&row.line(kind, op))?;
                // A run without an end keeps none.
                if self.output.json {
                    rows.push(row);
                }
            }
            cycle = cycle.wrapping_add(1);
        }
        let latency = latency::measure(&ring, world)?;
        let transports = world.all_gather(&log::transport())?;
        let with_transport = |(rank, transport): (RankLine, _)| RankLine {
            network: Network { transport, ..rank.network },
            ..rank
        };
        let report = Report {
            kind: kind.name(),
            redop: op.name(),
            ranks: ranks.into_iter().zip(transports).map(with_transport).collect(),
            rows,
            sent_bytes: ring.sent(),
            latency_us: latency.map(|seconds| seconds * 1e6),
            wrong,
            average_busbw: busbw / f64::from(halves.max(1)),
        };
        output.text(&report.summary())?;
        output.finish(world, &report)?;
        Ok(wrong)
    }
}

/// What carries each rank's data.
fn ranks(world: &mut World, network: &Network) -> Result<Vec<RankLine>> {
    let networks: Vec<Network> = world.all_gather(network)?;
    let line = |(rank, (member, network)): (usize, (&RankInfo, Network))| RankLine {
        rank,
        host: member.host.clone(),
        address: member.address.clone(),
        network,
    };
    Ok(world.ranks().iter().zip(networks).enumerate().map(line).collect())
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
        let mut times = vec![];
        let start = Instant::now();
        for _ in 0..self.options.run.iterations {
            let begin = Instant::now();
            self.once(buffers)?;
            if self.options.output.has_samples() {
                times.push(begin.elapsed().as_secs_f64());
            }
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
        let samples_us = self.options.output.samples_us(&times);
        Ok(Measured { samples_us, ..Measured::new(mean, bytes, all.len(), wrong) })
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
