//! Resolves the servers' names, in a thread of its own: a name server may take long to answer.

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use evenkeel_transport::sync::lock;

/// How long to wait before all names are looked up again.
const PAUSE: Duration = Duration::from_millis(200);

/// The addresses of all servers. Dropping it ends the thread.
pub(super) struct Resolver {
    known: Arc<Mutex<Vec<Lookup>>>,
    stop: Arc<AtomicBool>,
}

/// The last answer for a name; `None` before the first.
pub(super) type Lookup = Option<Result<Vec<SocketAddr>, String>>;

impl Resolver {
    /// Begins to resolve these names, `host:port` each.
    pub(super) fn start(servers: &[String]) -> Self {
        let literal: Vec<Lookup> = servers
            .iter()
            .map(|server| server.parse::<SocketAddr>().ok().map(|address| Ok(vec![address])))
            .collect();
        let unknown: Vec<(usize, String)> = servers
            .iter()
            .cloned()
            .enumerate()
            .filter(|(index, _)| literal[*index].is_none())
            .collect();
        let resolver = Self { known: Arc::new(Mutex::new(literal)), stop: Arc::default() };
        if unknown.is_empty() {
            return resolver;
        }
        let (known, stop) = (Arc::clone(&resolver.known), Arc::clone(&resolver.stop));
        let work = move || {
            // Repeatedly: the name of a server that has not started does not exist yet, and its
            // address may change.
            while !stop.load(Ordering::Relaxed) {
                for (index, server) in &unknown {
                    let answer = server.to_socket_addrs().map(Iterator::collect);
                    let answer = answer.map_err(|error| format!("name lookup: {error}"));
                    lock(&known)[*index] = Some(answer);
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                }
                thread::sleep(PAUSE);
            }
        };
        let started = thread::Builder::new().name("evenkeel-lookup".to_owned()).spawn(work);
        if let Err(error) = started {
            let why = format!("cannot start a thread: {error}");
            lock(&resolver.known)
                .iter_mut()
                .filter(|answer| answer.is_none())
                .for_each(|answer| *answer = Some(Err(why.clone())));
        }
        resolver
    }

    /// The addresses of the server with this index.
    pub(super) fn lookup(&self, index: usize) -> Lookup {
        lock(&self.known)[index].clone()
    }
}

impl Drop for Resolver {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}
