//! An all-reduce between processes. Start it once per rank, as a launcher does.
//!
//! ```sh
//! for rank in 0 1 2; do
//!   RANK=$rank WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 \
//!     cargo run -p evenkeel-collectives --example allreduce &
//! done; wait
//! ```

use std::time::Duration;

use evenkeel_collectives::{Call, Error, Launch, Op, Result, Tcp, TransportKind};

const TIMEOUT: Duration = Duration::from_secs(30);

fn main() -> Result<()> {
    // Rank 0 serves the store for the bootstrap, at the address that the launcher sets.
    let launch = Launch::from_env()?;
    let group = launch.join("allreduce", &TransportKind::Tcp(Tcp::from_env()?), TIMEOUT)?;

    let mut gradients = vec![group.rank() as f32; 1 << 20];
    if let Err(error) = group.allreduce_of(&mut gradients, Op::Sum, &Call::default()) {
        return Err(explain(error));
    }
    println!("rank {} of {}: {}", group.rank(), group.size(), gradients[0]);
    Ok(())
}

/// Prints which ranks caused the error, and whether the group still works.
fn explain(error: Error) -> Error {
    eprintln!("caused by ranks {:?}; group usable: {}", error.ranks(), error.is_group_usable());
    error
}
