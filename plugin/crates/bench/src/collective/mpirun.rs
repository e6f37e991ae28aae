//! What mpirun tells the processes that it starts.

use std::env::{var, var_os};

use evenkeel_collectives::Launch;

use crate::error::Result;

/// This process's rank and the number of ranks. Variables of other launchers do not count.
///
/// # Errors
/// When mpirun has not started this process.
pub(super) fn launch() -> Result<Launch> {
    if !["OMPI_COMM_WORLD_RANK", "PMI_RANK"].iter().any(|name| var_os(name).is_some()) {
        return Err("--mpi: mpirun has not started this process: neither OMPI_COMM_WORLD_RANK nor PMI_RANK is set".to_owned());
    }
    let of_mpirun = |name: &str| name.starts_with("OMPI_") || name.starts_with("PMI_");
    let launch = Launch::from_lookup(|name| var(name).ok().filter(|_| of_mpirun(name)));
    launch.map_err(|error| format!("--mpi: {error}"))
}

/// Whether Open MPI's mpirun has started this process.
pub(super) fn is_parent() -> bool {
    var_os("OMPI_UNIVERSE_SIZE").is_some()
}

/// The address of the store in which the ranks meet where none is named: in mpirun's folder for this run, which it removes.
///
/// # Errors
/// When there are ranks on other hosts, or mpirun names no folder.
pub(super) fn session_store() -> Result<String> {
    let ranks = var("OMPI_COMM_WORLD_SIZE").ok();
    let share_a_host = ranks.is_some() && ranks == var("OMPI_COMM_WORLD_LOCAL_SIZE").ok();
    match var("PMIX_SERVER_TMPDIR").ok().filter(|_| share_a_host) {
        Some(folder) => Ok(format!("file:{folder}/evenkeel")),
        None => Err("where the ranks meet is not known: give --store, --redis-host or --shared-path, or set MASTER_ADDR and MASTER_PORT; only ranks that Open MPI's mpirun has started on one host need none of them".to_owned()),
    }
}
