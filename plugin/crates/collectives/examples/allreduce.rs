//! An all-reduce between processes: start it several times, as any launcher does.
//!
//! ```sh
//! for rank in 0 1 2; do
//!   RANK=$rank WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 \
//!     cargo run -p evenkeel-collectives --example allreduce &
//! done; wait
//! ```

use std::time::Duration;

use evenkeel_collectives::{Call, Error, Launch, Op, Result, Tcp, TransportKind};

const TEST_TIMEOUT: Duration = Duration::from_secs(30);

fn main() -> Result<()> {
    // Rank 0 serves the store in which all meet, where the launcher says.
    let launch = Launch::from_env()?;
    let group = launch.join("allreduce", &TransportKind::Tcp(Tcp::from_env()?), TEST_TIMEOUT)?;

    let mut gradients = vec![group.rank() as f32; 1 << 20];
    if let Err(error) = group.allreduce_of(&mut gradients, Op::Sum, &Call::default()) {
        return Err(explain(error));
    }
    println!("rank {} of {}: {}", group.rank(), group.size(), gradients[0]);
    Ok(())
}

/// Whom to look at, and whether it is worth trying again.
fn explain(error: Error) -> Error {
    eprintln!(
        "ranks {:?} are to blame; the group can be used on: {}",
        error.ranks(),
        error.is_group_usable()
    );
    error
}
