//! What a launcher set in the environment: this process's rank, the number of ranks, and where they find each other.

use crate::error::{Error, Result};

/// This process's rank and the number of ranks, from the environment that a launcher set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// This process's rank, from 0.
    pub rank: usize,
    /// The number of ranks.
    pub size: usize,
    /// Host and port of rank 0, if the launcher sets them: `MASTER_ADDR` and `MASTER_PORT`. Under torchrun, which serves its own
    /// store at that port, the port after it.
    pub master: Option<(String, u16)>,
    /// The address of the [store](crate::store::open) in which the ranks find each other, if it is set: `EVENKEEL_STORE`.
    pub store: Option<String>,
}

/// The variables for rank and number of ranks: of torchrun and Kubernetes operators, OpenMPI, MPICH and others with PMI, Slurm, and
/// Kubernetes' Indexed Jobs. The index is the last: a launcher may have started several ranks in a pod.
const LAUNCHERS: [(&str, &str); 5] = [
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("JOB_COMPLETION_INDEX", "WORLD_SIZE"),
];

impl Launch {
    /// Reads the environment.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::ErrorKind::Argument) when no launcher has set it, or a value is invalid.
    pub fn from_env() -> Result<Self> {
        Self::from_lookup(|name| std::env::var(name).ok())
    }

    /// Reads variables through a function.
    ///
    /// # Errors
    /// As [`Launch::from_env`].
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let number = |name: &str| -> Result<Option<usize>> {
            let Some(value) = lookup(name).filter(|value| !value.is_empty()) else {
                return Ok(None);
            };
            let wrong = || Error::argument(format!("{name}={value:?} is not a whole number"));
            value.parse().map(Some).map_err(|_| wrong())
        };
        let mut found = None;
        for (rank, size) in LAUNCHERS {
            if let (Some(rank), Some(size)) = (number(rank)?, number(size)?) {
                found = Some((rank, size));
                break;
            }
        }
        let (rank, size) = found.ok_or_else(|| {
            let names = LAUNCHERS.map(|(rank, size)| format!("{rank} and {size}"));
            Error::argument(format!(
                "no launcher has set the rank of this process: set {}",
                names.join(", or ")
            ))
        })?;
        if rank >= size {
            return Err(Error::argument(format!(
                "rank {rank} is not below the number of ranks, {size}"
            )));
        }
        let master = match (lookup("MASTER_ADDR"), number("MASTER_PORT")?) {
            (Some(host), Some(port)) => {
                let next = usize::from(lookup("TORCHELASTIC_RUN_ID").is_some());
                let port = u16::try_from(port.saturating_add(next))
                    .map_err(|_| Error::argument(format!("MASTER_PORT={port} is not a port")))?;
                Some((host, port))
            }
            _ => None,
        };
        let store = lookup("EVENKEEL_STORE").filter(|address| !address.is_empty());
        Ok(Self { rank, size, master, store })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(variables: &[(&str, &str)]) -> Result<Launch> {
        Launch::from_lookup(|name| {
            let found = variables.iter().find(|(other, _)| *other == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    /// The test sets the variables. It runs no launcher.
    #[test]
    fn every_launchers_variables_are_read() {
        for (rank, size) in LAUNCHERS {
            let launch = from(&[(rank, "2"), (size, "4")]).unwrap();
            assert_eq!((launch.rank, launch.size, launch.master), (2, 4, None));
        }
        let operator =
            [("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "5")];
        assert_eq!(from(&operator).unwrap().master, Some(("h".to_owned(), 5)));
        let torchrun = [&operator[..], &[("TORCHELASTIC_RUN_ID", "none")]].concat();
        assert_eq!(from(&torchrun).unwrap().master, Some(("h".to_owned(), 6)));
        let named = [&operator[..], &[("EVENKEEL_STORE", "file:/shared")]].concat();
        assert_eq!(from(&named).unwrap().store.as_deref(), Some("file:/shared"));
    }

    /// torchrun and mpirun may run in the pods of an Indexed Job, whose variable every process has.
    #[test]
    fn launcher_counts_before_the_index_of_a_job() {
        let index = [("JOB_COMPLETION_INDEX", "1"), ("WORLD_SIZE", "9")];
        for (rank, size) in LAUNCHERS.iter().filter(|(rank, _)| *rank != index[0].0) {
            let launch = from(&[(*rank, "5"), (*size, "9"), index[0]]).unwrap();
            assert_eq!((launch.rank, launch.size), (5, 9), "{rank}");
        }
        assert_eq!(from(&index).unwrap().rank, 1);
    }

    #[test]
    fn invalid_launcher_variables_are_named() {
        for (variables, says) in [
            (&[][..], "RANK and WORLD_SIZE"),
            (&[("RANK", "one"), ("WORLD_SIZE", "2")], "RANK=\"one\""),
            (&[("RANK", "2"), ("WORLD_SIZE", "2")], "not below"),
            (
                &[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "99999")],
                "99999 is not a port",
            ),
        ] {
            let variables = [variables, &[("MASTER_ADDR", "h")]].concat();
            let error = from(&variables).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
