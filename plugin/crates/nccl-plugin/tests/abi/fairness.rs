//! Fairness: a flow carries as much of the messages as its path allows.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::flow_failures::exchange;
use crate::harness::{Net, run_in_child_process};
use crate::proxy::{Direction, Proxy, Tap};

/// Capacity of all other flows in relation to that of the slow flow.
const CAPACITY_RATIO: u64 = 8;
/// After this time without a byte on other flows the slow one continues: messages complete even if shares are equal.
const MAX_IDLE: Duration = Duration::from_millis(20);

/// Bytes towards the listener.
#[derive(Default)]
struct Carried {
    slow: AtomicU64,
    others: AtomicU64,
}

impl Carried {
    /// Delays the slow flow until the others have carried [`CAPACITY_RATIO`] times as much. The machine's speed does not matter.
    fn throttle(&self, bytes: u64) {
        let slow = self.slow.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let mut last = (self.others.load(Ordering::Relaxed), Instant::now());
        while last.0 < CAPACITY_RATIO * slow && last.1.elapsed() < MAX_IDLE {
            thread::sleep(Duration::from_micros(100));
            let others = self.others.load(Ordering::Relaxed);
            if others != last.0 {
                last = (others, Instant::now());
            }
        }
    }
}

#[test]
fn slow_flow_carries_less_of_the_messages() {
    run_in_child_process("fairness::child_slow_flow", &[("EVENKEEL_FLOWS", "2")]);
}

#[test]
#[ignore = "part of another test"]
fn child_slow_flow() {
    let net = Net::init(12, 0xfa1).unwrap();
    let carried = Arc::new(Carried::default());
    let of_proxy = Arc::clone(&carried);
    let (pair, _proxy) = Proxy::pair(&net, move |connection, direction| -> Tap {
        let carried = Arc::clone(&of_proxy);
        match (direction, connection) {
            (Direction::FromListener, _) => Box::new(|_| {}),
            (Direction::ToListener, 0) => {
                Box::new(move |bytes| carried.throttle(bytes.len() as u64))
            }
            (Direction::ToListener, _) => Box::new(move |bytes| {
                carried.others.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            }),
        }
    });
    exchange(&net, pair, &[1 << 20; 32], 8, |_| {});
    net.close_send(pair.0);
    net.close_recv(pair.1);
    let (slow, others) =
        (carried.slow.load(Ordering::Relaxed), carried.others.load(Ordering::Relaxed));
    // Equal shares would give a ratio of 1.
    assert!(
        others > CAPACITY_RATIO / 2 * slow,
        "the slow flow carried {slow} bytes, others {others}"
    );
}
