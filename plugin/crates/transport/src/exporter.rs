//! Serves the metrics over HTTP, from a thread of its own. No more of HTTP than a scrape needs: a library would bring a
//! pool of threads into the training process.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use crate::log::Log;
use crate::metrics::Metrics;
use crate::sys;

/// How long one scrape may take: the next one waits.
const PATIENCE: Duration = Duration::from_secs(2);
/// Longest request.
const MOST_BYTES: usize = 8 << 10;

/// The endpoint, as long as it lives.
pub(crate) struct Exporter {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Exporter {
    /// Listens at the first of the addresses that is free. Training goes on without metrics when there is none: the log
    /// says so.
    pub(crate) fn start(
        addresses: &[SocketAddr],
        metrics: Arc<Metrics>,
        log: &dyn Log,
    ) -> Option<Self> {
        match Self::try_start(addresses, metrics) {
            Ok((exporter, address)) => {
                log.info(&format!("evenkeel: metrics at http://{address}/metrics"));
                Some(exporter)
            }
            Err(error) => {
                log.warn(&format!("evenkeel: no metrics: EVENKEEL_METRICS: {error}"));
                None
            }
        }
    }

    fn try_start(
        addresses: &[SocketAddr],
        metrics: Arc<Metrics>,
    ) -> io::Result<(Self, SocketAddr)> {
        let listener = TcpListener::bind(addresses)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let stopped = Arc::clone(&stop);
        let thread =
            std::thread::Builder::new().name("evenkeel-metrics".to_owned()).spawn(move || {
                sys::block_signals();
                serve(&listener, &stopped, &metrics);
            })?;
        Ok((Self { stop, thread: Some(thread) }, address))
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        // Fails only after 2^64 writes.
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            // It does not panic, and if it did there would be nothing to hand on.
            let _ = thread.join();
        }
    }
}

fn serve(listener: &TcpListener, stop: &OwnedFd, metrics: &Metrics) {
    loop {
        let mut waited = [PollFd::new(listener, PollFlags::IN), PollFd::new(stop, PollFlags::IN)];
        match poll(&mut waited, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(_) => return,
        }
        if !waited[1].revents().is_empty() {
            return;
        }
        if let Ok((stream, _)) = listener.accept() {
            // Who scrapes notices; nobody else has to.
            let _ = answer(stream, metrics);
        }
    }
}

fn answer(mut stream: TcpStream, metrics: &Metrics) -> io::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    let left = || deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    stream.set_nonblocking(false)?;
    let mut request = Vec::new();
    let mut buffer = [0; 1024];
    while !request.windows(4).any(|window| window == b"\r\n\r\n") {
        stream.set_read_timeout(Some(left()))?;
        let received = stream.read(&mut buffer)?;
        request.extend_from_slice(&buffer[..received]);
        if received == 0 || request.len() > MOST_BYTES || Instant::now() >= deadline {
            return Ok(());
        }
    }
    let (status, kind, body) = if request.starts_with(b"GET /metrics ") {
        let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
        ("200 OK", kind, metrics.render())
    } else {
        ("404 Not Found", "text/plain", "the metrics are at /metrics\n".to_owned())
    };
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    stream.set_write_timeout(Some(left()))?;
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use evenkeel_chance::Chance;
    use std::net::Shutdown;

    fn ask(address: SocketAddr, request: impl AsRef<[u8]>) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        let mut text = String::new();
        // A request that is cut off may end with a reset, at any of these steps.
        let _ = stream.write_all(request.as_ref());
        let _ = stream.shutdown(Shutdown::Write);
        let _ = stream.read_to_string(&mut text);
        text
    }

    #[test]
    fn scrapes_are_answered_and_others_told_where() {
        let any = ["127.0.0.1:0".parse().unwrap()];
        let (exporter, address) = Exporter::try_start(&any, Arc::default()).unwrap();
        let scraped = ask(address, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(scraped.starts_with("HTTP/1.1 200 OK\r\n"), "{scraped}");
        assert!(scraped.ends_with("\r\n\r\n# EOF\n"), "{scraped}");
        assert!(ask(address, "GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404"));
        assert_eq!(ask(address, "x".repeat(10_000)), "", "too long");
        drop(exporter);
        assert!(TcpStream::connect(address).is_err(), "it is closed");
    }

    #[test]
    fn any_request_is_answered_or_dropped() {
        let any = ["127.0.0.1:0".parse().unwrap()];
        let (_exporter, address) = Exporter::try_start(&any, Arc::default()).unwrap();
        let mut chance = Chance::new(6);
        let mut scrapes = 0;
        for _ in 0..500 {
            let mut request = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n".to_vec();
            (0..chance.below(4)).for_each(|_| chance.mutate(&mut request));
            let text = ask(address, &request);
            let whole = request.windows(4).any(|window| window == b"\r\n\r\n");
            let scrape = request.starts_with(b"GET /metrics ");
            let expected = match (whole, scrape) {
                (false, _) => "",
                (true, true) => "HTTP/1.1 200 OK\r\n",
                (true, false) => "HTTP/1.1 404 Not Found\r\n",
            };
            let as_expected = text.starts_with(expected) && text.is_empty() == expected.is_empty();
            assert!(as_expected, "{:?} gave {text:?}", request.escape_ascii().to_string());
            scrapes += usize::from(whole && scrape);
        }
        assert!(scrapes > 50, "{scrapes}");
    }

    #[test]
    fn the_next_free_address_is_taken() {
        let any = ["127.0.0.1:0".parse().unwrap()];
        let (_first, address) = Exporter::try_start(&any, Arc::default()).unwrap();
        let (_second, other) = Exporter::try_start(&[address, any[0]], Arc::default()).unwrap();
        assert_ne!(address, other);
        assert!(Exporter::try_start(&[address], Arc::default()).is_err());
    }
}
