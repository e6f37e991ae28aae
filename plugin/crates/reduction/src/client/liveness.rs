//! Liveness of a server that has sent nothing for long: it may only be waiting for a late rank.

use std::time::{Duration, Instant};

use evenkeel_transport::{Connecting, Retry};

use super::dialer::Dialer;
use crate::error::ClientError;

/// How long to wait after a failed probe before the next.
const PROBE_PAUSE: Duration = Duration::from_millis(500);

/// Checks that one server is alive. The probe is a connection attempt.
pub struct Liveness {
    /// When the server last responded.
    last_response: Instant,
    probe: Probe,
}

enum Probe {
    None,
    /// A connection is being opened: a server that answers is alive.
    Connecting(Connecting),
    /// The last connection failed, when and why.
    Failed(Instant, String),
}

impl Liveness {
    /// For a server that responded just now.
    #[allow(clippy::new_without_default, reason = "it depends on the time")]
    pub fn new() -> Self {
        Self { last_response: Instant::now(), probe: Probe::None }
    }

    /// The server has responded, or no response is due.
    pub fn responded(&mut self, now: Instant) {
        self.last_response = now;
        self.probe = Probe::None;
    }

    /// Probes a server that has not responded for half of the timeout, although a response is due.
    ///
    /// # Errors
    /// When it has not responded for the whole timeout.
    pub fn check(&mut self, dialer: &Dialer, now: Instant) -> Result<(), ClientError> {
        if now.saturating_duration_since(self.last_response) < dialer.timeout / 2 {
            return Ok(());
        }
        let failed = |error: evenkeel_transport::Error| Probe::Failed(now, error.to_string());
        match &self.probe {
            Probe::Connecting(connecting) => match connecting.poll() {
                Ok(None) => {}
                Ok(Some(_)) => self.responded(now),
                // It is alive but busy.
                Err(error) if error.retry() == Retry::Later => self.responded(now),
                Err(error) => self.probe = failed(error.into()),
            },
            Probe::Failed(at, _) if now.saturating_duration_since(*at) < PROBE_PAUSE => {}
            Probe::None | Probe::Failed(..) => {
                self.probe = dialer.dial().map_or_else(failed, Probe::Connecting);
            }
        }
        if now.saturating_duration_since(self.last_response) < dialer.timeout {
            return Ok(());
        }
        let seconds = dialer.timeout.as_secs();
        Err(dialer.error(&match &self.probe {
            Probe::Failed(_, why) => format!("no response for {seconds} s: {why}"),
            _ => format!("no response for {seconds} s"),
        }))
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    use evenkeel_transport::{NullLog, Settings, Transport};

    use super::*;

    /// Another program answers at the server's address.
    #[test]
    fn liveness_probe_pauses_after_a_failure() {
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = other.local_addr().unwrap();
        let probes = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&probes);
        thread::spawn(move || {
            for mut stream in other.incoming().map_while(Result::ok) {
                counted.fetch_add(1, Ordering::SeqCst);
                // The peer may have closed the connection. What it sent is read, so that closing
                // does not reset the connection before the answer is delivered.
                let _ = stream.read_exact(&mut [0; 64]);
                let _ = stream.write_all(&[b'x'; 64]);
                let _ = stream.read(&mut [0; 64]);
            }
        });
        let lo = |name: &str| (name == "NCCL_SOCKET_IFNAME").then(|| "lo".to_owned());
        let settings = Settings::from_lookup(lo).unwrap();
        let dialer = Dialer {
            transport: Arc::new(Transport::new(settings, Arc::new(NullLog)).unwrap()),
            device: 0,
            name: "gone:7470".to_owned(),
            address,
            label: String::new(),
            flows: 1,
            timeout: Duration::from_secs(2),
        };
        let mut liveness = Liveness::new();
        let begin = Instant::now();
        let error = loop {
            if let Err(error) = liveness.check(&dialer, Instant::now()) {
                break error.to_string();
            }
            assert!(begin.elapsed() < Duration::from_secs(20), "the server counts as alive");
            thread::yield_now();
        };
        assert!(error.starts_with("reduction server gone:7470: no response for 2 s"), "{error}");
        // Probes are sent for one second, each half a second after the last failure.
        let probes = probes.load(Ordering::SeqCst);
        assert!((1..=3).contains(&probes), "{probes} probes");
    }
}
