//! Serves metrics over HTTP on a thread of its own. It implements only what a scrape needs: a
//! library would add a pool of threads to the training process.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::sys;

/// Time limit of one scrape.
const SCRAPE_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of scrapes at a time. When more arrive, the oldest is dropped after its minimum
/// time.
const MAX_SCRAPES: usize = 16;
const MIN_SCRAPE_TIME: Duration = Duration::from_millis(200);
/// Maximum length of a request.
const MAX_REQUEST_BYTES: usize = 8 << 10;

/// Answers scrapes and probes over HTTP as long as it lives.
pub struct Exporter {
    stop: Arc<OwnedFd>,
    address: SocketAddr,
    thread: Option<JoinHandle<()>>,
}

/// The pages to serve.
pub trait Pages: Send + Sync {
    /// The page at this path, if there is one.
    fn page(&self, path: &str) -> Option<Page>;
}

/// A response.
pub struct Page {
    /// HTTP status with its reason: `200 OK`.
    pub status: &'static str,
    /// The media type.
    pub kind: &'static str,
    /// The text.
    pub body: String,
}

impl Page {
    /// Metrics in the OpenMetrics text format.
    pub fn open_metrics(body: String) -> Self {
        let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
        Self { status: "200 OK", kind, body }
    }
}

impl Exporter {
    /// Listens at the first address that is free.
    ///
    /// # Errors
    /// When none is, or when no thread can be started.
    pub fn start(addresses: &[SocketAddr], pages: Arc<dyn Pages>) -> io::Result<Self> {
        let listener = TcpListener::bind(addresses)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let stopped = Arc::clone(&stop);
        let thread =
            std::thread::Builder::new().name("evenkeel-metrics".to_owned()).spawn(move || {
                sys::block_signals();
                serve(&listener, &stopped, &*pages);
            })?;
        Ok(Self { stop, address, thread: Some(thread) })
    }

    /// The address that it listens at.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        // Fails only after 2^64 writes.
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            // It does not panic, and there would be no result to use.
            let _ = thread.join();
        }
    }
}

fn serve(listener: &TcpListener, stop: &OwnedFd, pages: &dyn Pages) {
    let mut scrapes: VecDeque<Scrape> = VecDeque::new();
    loop {
        let now = Instant::now();
        scrapes.retain(|scrape| now < scrape.deadline);
        let oldest = scrapes.front().map(|scrape| scrape.since + MIN_SCRAPE_TIME);
        let has_room = scrapes.len() < MAX_SCRAPES || oldest.is_some_and(|at| now >= at);
        let next = scrapes.iter().map(|scrape| scrape.deadline).min();
        let next = if has_room { next } else { oldest.min(next) };
        let timeout = next.map(|at| {
            // Not before, so that it is over when the wait ends.
            let left = at.saturating_duration_since(now) + Duration::from_millis(1);
            Timespec { tv_sec: left.as_secs() as _, tv_nsec: left.subsec_nanos().into() }
        });
        let accepting = if has_room { PollFlags::IN } else { PollFlags::empty() };
        let mut waited = vec![PollFd::new(stop, PollFlags::IN), PollFd::new(listener, accepting)];
        waited.extend(scrapes.iter().map(|scrape| PollFd::new(&scrape.stream, scrape.awaited())));
        match poll(&mut waited, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(_) => return,
        }
        let ready: Vec<bool> = waited.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(waited);
        if ready[0] {
            return;
        }
        let mut moved = ready[2..].iter();
        // The client notices failures.
        scrapes.retain_mut(|scrape| match moved.next() {
            Some(true) => scrape.step(pages).is_ok_and(|done| !done),
            _ => true,
        });
        if ready[1]
            && let Ok((stream, _)) = listener.accept()
            && stream.set_nonblocking(true).is_ok()
        {
            if scrapes.len() >= MAX_SCRAPES {
                scrapes.pop_front();
            }
            scrapes.push_back(Scrape::new(stream, Instant::now()));
        }
    }
}

/// A connection: its request is being read, or its answer written.
struct Scrape {
    stream: TcpStream,
    since: Instant,
    deadline: Instant,
    request: Vec<u8>,
    /// Once the request is complete, and how much of it is written.
    answer: Option<(Vec<u8>, usize)>,
}

impl Scrape {
    fn new(stream: TcpStream, now: Instant) -> Self {
        let deadline = now + SCRAPE_TIMEOUT;
        Self { stream, since: now, deadline, request: Vec::new(), answer: None }
    }

    fn awaited(&self) -> PollFlags {
        if self.answer.is_some() { PollFlags::OUT } else { PollFlags::IN }
    }

    /// Continues as far as the socket allows. True when the connection is to be closed.
    fn step(&mut self, pages: &dyn Pages) -> io::Result<bool> {
        let mut buffer = [0; 1024];
        loop {
            let moved = match &mut self.answer {
                None => self.stream.read(&mut buffer),
                Some((text, written)) => self.stream.write(&text[*written..]),
            };
            let moved = match moved {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                moved => moved?,
            };
            if let Some((text, written)) = &mut self.answer {
                *written += moved;
                if moved == 0 || *written == text.len() {
                    return Ok(true);
                }
                continue;
            }
            self.request.extend_from_slice(&buffer[..moved]);
            if self.request.windows(4).any(|window| window == b"\r\n\r\n") {
                self.answer = Some((answer(&self.request, pages), 0));
            } else if moved == 0 || self.request.len() > MAX_REQUEST_BYTES {
                return Ok(true);
            }
        }
    }
}

/// The answer to a complete request.
fn answer(request: &[u8], pages: &dyn Pages) -> Vec<u8> {
    let page = path_of(request).and_then(|path| pages.page(path)).unwrap_or_else(|| Page {
        status: "404 Not Found",
        kind: "text/plain",
        body: "the metrics are at /metrics\n".to_owned(),
    });
    let Page { status, kind, body } = page;
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    (head + &body).into_bytes()
}

/// The path that a GET asks for.
fn path_of(request: &[u8]) -> Option<&str> {
    let rest = request.strip_prefix(b"GET ")?;
    let end = rest.iter().position(|byte| *byte == b' ')?;
    std::str::from_utf8(&rest[..end]).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use evenkeel_testkit::TestRng;
    use std::net::Shutdown;

    /// Metrics without a value.
    struct NoMetrics;

    impl Pages for NoMetrics {
        fn page(&self, path: &str) -> Option<Page> {
            (path == "/metrics").then(|| Page::open_metrics("# EOF\n".to_owned()))
        }
    }

    fn start(addresses: &[SocketAddr]) -> io::Result<(Exporter, SocketAddr)> {
        let exporter = Exporter::start(addresses, Arc::new(NoMetrics))?;
        let address = exporter.address();
        Ok((exporter, address))
    }

    fn ask(address: SocketAddr, request: impl AsRef<[u8]>) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        let mut text = String::new();
        // A truncated request may end with a reset, at any of these steps.
        let _ = stream.write_all(request.as_ref());
        let _ = stream.shutdown(Shutdown::Write);
        let _ = stream.read_to_string(&mut text);
        text
    }

    #[test]
    fn exporter_answers_scrapes_and_rejects_other_paths() {
        let any = ["127.0.0.1:0".parse().unwrap()];
        let (exporter, address) = start(&any).unwrap();
        let scraped = ask(address, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(scraped.starts_with("HTTP/1.1 200 OK\r\n"), "{scraped}");
        assert!(scraped.ends_with("\r\n\r\n# EOF\n"), "{scraped}");
        assert!(ask(address, "GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404"));
        assert_eq!(ask(address, "x".repeat(10_000)), "", "too long");
        drop(exporter);
        assert!(TcpStream::connect(address).is_err(), "it is closed");
    }

    #[test]
    fn exporter_answers_or_drops_any_request() {
        let any = ["127.0.0.1:0".parse().unwrap()];
        let (_exporter, address) = start(&any).unwrap();
        let mut rng = TestRng::new(6);
        let mut scrapes = 0;
        for _ in 0..500 {
            let mut request = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n".to_vec();
            (0..rng.below(4)).for_each(|_| rng.mutate(&mut request));
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

    /// A page that is larger than socket buffers.
    struct Large;

    impl Pages for Large {
        fn page(&self, _path: &str) -> Option<Page> {
            Some(Page { status: "200 OK", kind: "text/plain", body: "x".repeat(64 << 20) })
        }
    }

    #[test]
    fn exporter_cuts_off_slow_readers() {
        let any = ["127.0.0.1:0".parse().unwrap()];
        let exporter = Exporter::start(&any, Arc::new(Large)).unwrap();
        let mut slow = TcpStream::connect(exporter.address()).unwrap();
        slow.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let (mut buffer, mut all) = (vec![0; 64 << 10], 0);
        // It reads all the time, and never blocks for long.
        while let Ok(count @ 1..) = slow.read(&mut buffer) {
            all += count;
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(all < 64 << 20, "it was waited for until it had all");
    }

    /// More clients say nothing than are served at a time.
    #[test]
    fn exporter_answers_while_other_clients_are_silent() {
        let any = ["127.0.0.1:0".parse().unwrap()];
        let (_exporter, address) = start(&any).unwrap();
        let silent = || TcpStream::connect(address).unwrap();
        let few: Vec<TcpStream> = (0..MAX_SCRAPES - 1).map(|_| silent()).collect();
        let answered = ask(address, "GET /metrics HTTP/1.1\r\n\r\n");
        assert!(answered.starts_with("HTTP/1.1 200 OK\r\n"), "{answered}");
        for client in &few {
            client.set_nonblocking(true).unwrap();
            let state = (&*client).read(&mut [0]).map_err(|error| error.kind());
            assert_eq!(state, Err(io::ErrorKind::WouldBlock), "it was waited for");
        }
        let _more: Vec<TcpStream> = (0..3 * MAX_SCRAPES).map(|_| silent()).collect();
        let answered = ask(address, "GET /metrics HTTP/1.1\r\n\r\n");
        assert!(answered.starts_with("HTTP/1.1 200 OK\r\n"), "{answered}");
    }

    #[test]
    fn exporter_takes_the_next_free_address() {
        let any = ["127.0.0.1:0".parse().unwrap()];
        let (_first, address) = start(&any).unwrap();
        let (_second, other) = start(&[address, any[0]]).unwrap();
        assert_ne!(address, other);
        assert!(start(&[address]).is_err());
    }
}
