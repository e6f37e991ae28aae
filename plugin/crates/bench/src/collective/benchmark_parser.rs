//! Reads the name of a benchmark. Gloo's CUDA benchmarks are known by name, and refused with what they need.

use std::ffi::OsStr;

use clap::builder::{EnumValueParser, PossibleValue, TypedValueParser};
use clap::error::ErrorKind;
use clap::{Arg, Command, ValueEnum};

use super::exercise::Benchmark;

/// How the names of Gloo's CUDA benchmarks begin.
const CUDA: &str = "cuda_";
/// What measures GPUs instead.
pub(super) const INSTEAD: &str = "use nccl-tests with Evenkeel's plugin for NCCL";

#[derive(Clone)]
pub(super) struct BenchmarkParser;

impl TypedValueParser for BenchmarkParser {
    type Value = Benchmark;

    fn parse_ref(
        &self,
        command: &Command,
        argument: Option<&Arg>,
        value: &OsStr,
    ) -> Result<Benchmark, clap::Error> {
        match value.to_str() {
            Some(name) if name.starts_with(CUDA) => Err(clap::Error::raw(
                ErrorKind::ValueValidation,
                format!(
                    "{name} needs buffers in the memory of a GPU, and evenkeel-bench has none there: {INSTEAD}\n"
                ),
            )),
            _ => EnumValueParser::<Benchmark>::new().parse_ref(command, argument, value),
        }
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let known = Benchmark::value_variants().iter().filter_map(Benchmark::to_possible_value);
        Some(Box::new(known))
    }
}
