//! The ranks that this process was started with, and its communicators.

use std::env;
use std::ffi::{OsString, c_int};
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use evenkeel_collectives::{
    Call, ErrorKind, Group, Launch, MemoryStore, TransportKind, timeout_from_seconds,
};

use crate::error::{Error, Result};
use crate::handles::{COMM_NULL, COMM_WORLD, UNDEFINED, unknown};

/// Seconds to wait for the ranks to come, and later for anything to move.
const TIMEOUT: &str = "EVENKEEL_MPI_TIMEOUT";
/// The timeout unless it is set, as that of evenkeel-bench.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(300);
/// The group's name in the store.
const GROUP: &str = "mpi";

enum State {
    NotInitialized,
    /// The groups of the communicators: that of all ranks first, the place of a freed one empty.
    Running(Vec<Option<Arc<Group>>>),
    Finalized,
}

static STATE: Mutex<State> = Mutex::new(State::NotInitialized);

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Joins all ranks.
pub(crate) fn init() -> Result<()> {
    let mut state = state();
    if !matches!(*state, State::NotInitialized) {
        return Err(Error("MPI_Init was called before".to_owned()));
    }
    *state = State::Running(vec![Some(Arc::new(join()?))]);
    Ok(())
}

fn join() -> Result<Group> {
    let (launch, timeout) = (Launch::from_env()?, timeout(env::var_os(TIMEOUT))?);
    if launch.size == 1 {
        // One rank needs neither a network nor a place to meet.
        let (store, transport) = (MemoryStore::new(), TransportKind::SharedMemory);
        return Ok(Group::join(&store, 0, 1, &transport, timeout)?);
    }
    let transport = TransportKind::from_name("tcp")?;
    launch.join(GROUP, &transport, timeout).map_err(|error| match error.kind() {
        ErrorKind::Store if launch.store.is_none() && launch.rank > 0 => {
            Error(format!("{error}; rank 0 serves it"))
        }
        _ => error.into(),
    })
}

fn timeout(value: Option<OsString>) -> Result<Duration> {
    let Some(value) = value.filter(|value| !value.is_empty()) else { return Ok(DEFAULT_TIMEOUT) };
    let value = value.to_string_lossy();
    let seconds = value
        .parse()
        .map_err(|_| Error(format!("{TIMEOUT}={value:?} is not a number of seconds")))?;
    timeout_from_seconds(seconds).map_err(|error| Error(format!("{TIMEOUT}: {error}")))
}

/// The group of a communicator.
pub(crate) fn group(comm: c_int) -> Result<Arc<Group>> {
    match &*state() {
        State::NotInitialized => Err(Error("MPI_Init was not called before".to_owned())),
        State::Finalized => Err(Error("MPI_Finalize was called before".to_owned())),
        State::Running(groups) => {
            let found = index(comm).and_then(|at| groups.get(at)?.clone());
            found.ok_or_else(|| unknown(comm, "communicator"))
        }
    }
}

/// Makes the communicator of the ranks with the same color.
pub(crate) fn split(comm: c_int, color: c_int, key: c_int) -> Result<c_int> {
    let group = group(comm)?;
    if color < 0 && color != UNDEFINED {
        return Err(Error(format!("color {color}: 0 or more, or MPI_UNDEFINED")));
    }
    let mut all = vec![0; 8 * group.size()];
    let own = &mut all[8 * group.rank()..][..8];
    own[..4].copy_from_slice(&color.to_le_bytes());
    own[4..].copy_from_slice(&key.to_le_bytes());
    group.allgather(&mut all, &Call::default())?;
    let members = members(&all, color);
    let made = if color == UNDEFINED { None } else { group.sub_group(&members)? };
    Ok(made.map_or(COMM_NULL, add))
}

/// The ranks with this color, by their keys. `all` has the color and the key of each rank.
fn members(all: &[u8], color: c_int) -> Vec<usize> {
    let (all, _) = all.as_chunks::<8>();
    let mut members: Vec<(c_int, usize)> = vec![];
    for (rank, [a, b, c, d, key @ ..]) in all.iter().enumerate() {
        if c_int::from_le_bytes([*a, *b, *c, *d]) == color {
            members.push((c_int::from_le_bytes(*key), rank));
        }
    }
    members.sort_unstable();
    members.into_iter().map(|(_, rank)| rank).collect()
}

/// Gives a group the first free number.
fn add(group: Group) -> c_int {
    let mut state = state();
    let State::Running(groups) = &mut *state else { return COMM_NULL };
    let free = groups.iter().position(Option::is_none);
    let at = free.unwrap_or_else(|| {
        groups.push(None);
        groups.len() - 1
    });
    groups[at] = Some(Arc::new(group));
    c_int::try_from(at).map_or(COMM_NULL, |at| at + COMM_WORLD)
}

/// Frees a communicator.
pub(crate) fn free(comm: c_int) -> Result<()> {
    if comm == COMM_WORLD {
        return Err(Error("MPI_COMM_WORLD cannot be freed: MPI_Finalize does it".to_owned()));
    }
    let freed = group(comm)?;
    if let (State::Running(groups), Some(at)) = (&mut *state(), index(comm)) {
        groups[at] = None;
    }
    drop(freed);
    Ok(())
}

/// Waits for all ranks, and leaves them.
pub(crate) fn finalize() -> Result<()> {
    group(COMM_WORLD)?.barrier(&Call::default())?;
    let left = mem::replace(&mut *state(), State::Finalized);
    // Not under the lock: it waits until the others have what this rank sent.
    drop(left);
    Ok(())
}

/// Tells all ranks that this one ends, and why.
pub(crate) fn abort(why: &str) {
    if let Ok(world) = group(COMM_WORLD)
        && world.failure().is_none()
    {
        world.abort(why);
    }
}

/// This rank, as the beginning of a line; empty when it is not known.
pub(crate) fn describe() -> String {
    let known = group(COMM_WORLD).map(|world| (world.rank(), world.size())).ok();
    let known = known.or_else(|| Launch::from_env().ok().map(|launch| (launch.rank, launch.size)));
    known.map_or_else(String::new, |(rank, size)| format!("rank {rank} of {size}: "))
}

/// Where a communicator's group is.
fn index(comm: c_int) -> Option<usize> {
    usize::try_from(comm.checked_sub(COMM_WORLD)?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mpi_split_orders_ranks_by_key_and_then_by_rank() {
        let all: Vec<u8> = [(1, 5), (0, 0), (1, -2), (UNDEFINED, 0), (1, 5)]
            .iter()
            .flat_map(|(color, key): &(c_int, c_int)| [color.to_le_bytes(), key.to_le_bytes()])
            .flatten()
            .collect();
        assert_eq!(members(&all, 1), [2, 0, 4]);
        assert_eq!(members(&all, 0), [1]);
        assert!(members(&all, 7).is_empty());
    }

    #[test]
    fn mpi_timeout_is_read_or_refused_by_name() {
        let read = |value: &str| timeout(Some(value.into()));
        assert!(timeout(None).is_ok_and(|time| time == DEFAULT_TIMEOUT));
        assert!(read("").is_ok_and(|time| time == DEFAULT_TIMEOUT));
        assert!(read("2.5").is_ok_and(|time| time == Duration::from_millis(2500)));
        for wrong in ["soon", "0", "-1", "inf"] {
            let error = read(wrong).unwrap_err();
            assert!(error.0.starts_with(TIMEOUT), "{error:?}");
        }
    }
}
