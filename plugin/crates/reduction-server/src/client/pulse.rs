//! Whether a server that has said nothing for long still lives: those it waits for may only be late.

use std::time::{Duration, Instant};

use evenkeel_transport::{Answer, Connecting};

use super::ClientError;
use super::way_in::Caller;

/// How long to wait before a server is asked again that let nothing hear of itself.
const PAUSE: Duration = Duration::from_millis(500);

/// Watches over one server.
pub(crate) struct Pulse {
    /// When it last showed a sign of life.
    heard: Instant,
    asked: Asked,
}

enum Asked {
    Nothing,
    /// It is being called: whoever answers lives.
    Calling(Connecting),
    /// It could not be called, since when and why.
    InVain(Instant, String),
}

impl Pulse {
    /// Of a server that was heard just now.
    pub(crate) fn new() -> Self {
        Self { heard: Instant::now(), asked: Asked::Nothing }
    }

    /// It has shown a sign of life, or nobody waits for one.
    pub(crate) fn heard(&mut self, now: Instant) {
        self.heard = now;
        self.asked = Asked::Nothing;
    }

    /// Asks a server that has long been silent, which something waits for.
    ///
    /// # Errors
    /// When it has been silent for as long as it may be.
    pub(crate) fn check(&mut self, caller: &Caller, now: Instant) -> Result<(), ClientError> {
        if now.saturating_duration_since(self.heard) < caller.timeout / 2 {
            return Ok(());
        }
        let vain = |error: evenkeel_transport::Error| Asked::InVain(now, error.to_string());
        match &self.asked {
            Asked::Calling(call) => match call.poll() {
                Ok(None) => {}
                Ok(Some(_)) => self.heard(now),
                // It lives, and has no time or no room.
                Err(error) if error.answer() == Answer::Later => self.heard(now),
                Err(error) => self.asked = vain(error),
            },
            Asked::InVain(since, _) if now.saturating_duration_since(*since) < PAUSE => {}
            Asked::Nothing | Asked::InVain(..) => {
                self.asked = caller.call().map_or_else(vain, Asked::Calling);
            }
        }
        if now.saturating_duration_since(self.heard) < caller.timeout {
            return Ok(());
        }
        let seconds = caller.timeout.as_secs();
        Err(caller.error(&match &self.asked {
            Asked::InVain(_, why) => format!("no sign of life for {seconds} s: {why}"),
            _ => format!("no sign of life for {seconds} s"),
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

    use evenkeel_transport::{Log, Settings, Transport};

    use super::*;

    struct Silence;

    impl Log for Silence {
        fn warn(&self, _line: &str) {}
        fn info(&self, _line: &str) {}
    }

    /// Something else answers where the server was: it is asked now and then, not as often as anybody looks.
    #[test]
    fn who_refuses_is_asked_again_after_a_pause() {
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = other.local_addr().unwrap();
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&calls);
        thread::spawn(move || {
            for mut stream in other.incoming().map_while(Result::ok) {
                counted.fetch_add(1, Ordering::SeqCst);
                // Who called may be gone. What it said is read, so that the answer is not lost with it.
                let _ = stream.read_exact(&mut [0; 64]);
                let _ = stream.write_all(&[b'x'; 64]);
                let _ = stream.read(&mut [0; 64]);
            }
        });
        let lo = |name: &str| (name == "NCCL_SOCKET_IFNAME").then(|| "lo".to_owned());
        let settings = Settings::from_lookup(lo).unwrap();
        let caller = Caller {
            transport: Arc::new(Transport::new(settings, Arc::new(Silence)).unwrap()),
            device: 0,
            name: "gone:7470".to_owned(),
            address,
            label: String::new(),
            flows: 1,
            timeout: Duration::from_secs(2),
        };
        let mut pulse = Pulse::new();
        let begin = Instant::now();
        let error = loop {
            if let Err(error) = pulse.check(&caller, Instant::now()) {
                break error.to_string();
            }
            assert!(begin.elapsed() < Duration::from_secs(20), "it is taken to live");
            thread::yield_now();
        };
        assert!(
            error.starts_with("reduction server gone:7470: no sign of life for 2 s"),
            "{error}"
        );
        // It is asked for one second, each time half a second after the last answer.
        let calls = calls.load(Ordering::SeqCst);
        assert!((1..=3).contains(&calls), "{calls} calls");
    }
}
