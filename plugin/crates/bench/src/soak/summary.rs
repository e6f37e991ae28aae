//! What happened in a soak.

use std::collections::BTreeMap;
use std::time::Duration;

use super::process::Process;

/// What happened.
#[derive(Default)]
pub(super) struct Counts {
    pub(super) messages: u64,
    pub(super) bytes: u64,
    pub(super) opened: u64,
    pub(super) closed: u64,
    /// Connections that ended with a killed process.
    pub(super) cut: u64,
    pub(super) kills: u64,
    pub(super) forks: u64,
    pub(super) wrong_keys: u64,
    pub(super) faults: BTreeMap<&'static str, u64>,
    pub(super) checks: u64,
}

impl Counts {
    /// Prints them, and what each process held first and last.
    pub(super) fn print(&self, time: Duration, processes: &[Process], is_whole: bool) {
        let Self { messages, bytes, opened, closed, cut, kills, forks, wrong_keys, faults, checks } =
            self;
        println!("#\n# {:<28} {:>12}", "what", "number");
        let time = time.as_secs();
        let gigabytes = (*bytes as f64 / 1e9).round() as u64;
        let rows = [
            ("seconds", time),
            ("connections opened", *opened),
            ("closed, every message there", *closed),
            ("ended by a kill", *cut),
            ("messages, every byte right", *messages),
            ("GB", gigabytes),
            ("kills", *kills),
            ("forks", *forks),
            ("connects with a wrong key", *wrong_keys),
        ];
        let faults = faults.iter().map(|(name, count)| (*name, *count));
        for (name, count) in
            rows.into_iter().chain(faults).chain([("checks of what is held", *checks)])
        {
            println!("  {name:<28} {count:>12}");
        }
        println!(
            "#\n# {:<8} {:>16} {:>12} {:>18} {:>18}",
            "process", "descriptors", "threads", "KiB", "allocated KiB"
        );
        for (place, process) in processes.iter().enumerate() {
            let Some((then, now)) = process.usage() else { continue };
            let pair = |then: u64, now: u64| format!("{then} -> {now}");
            println!(
                "  {place:<8} {:>16} {:>12} {:>18} {:>18}",
                pair(then.descriptors, now.descriptors),
                pair(then.threads, now.threads),
                pair(then.resident_kib, now.resident_kib),
                pair(then.allocated_kib, now.allocated_kib)
            );
        }
        println!(
            "# {}",
            if is_whole { "Nothing was lost, nothing is left" } else { "It did not hold" }
        );
    }
}
