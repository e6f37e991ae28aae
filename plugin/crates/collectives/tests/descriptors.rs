//! A process without descriptors, alone in it.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Duration;

use evenkeel_collectives::{Store, TcpStore, TcpStoreServer};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const TIME: Duration = Duration::from_secs(20);
/// How long the server is watched.
const WATCHED: Duration = Duration::from_secs(1);

#[test]
fn a_store_that_cannot_take_a_connection_rests_and_takes_it_later() {
    let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let address = server.address().to_string();
    let known = TcpStore::connect(&address, TIME).unwrap();
    known.set("a", b"1").unwrap();
    let thread = server_thread().unwrap();
    let few = Rlimit { current: Some(64), ..getrlimit(Resource::Nofile) };
    setrlimit(Resource::Nofile, few).unwrap();
    let mut all: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    // The stranger has the last one.
    all.pop();
    let mut stranger = TcpStream::connect(server.address()).unwrap();
    stranger.set_read_timeout(Some(WATCHED)).unwrap();
    let before = busy(&thread).unwrap();
    assert_eq!(stranger.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
    let used = busy(&thread).unwrap() - before;
    assert!(used < WATCHED / 2, "the server used {used:?} of {WATCHED:?}");
    assert_eq!(known.get("a").unwrap().as_deref(), Some(&b"1"[..]));
    drop(all);
    assert_eq!(TcpStore::connect(&address, TIME).unwrap().get("a").unwrap().unwrap(), b"1");
}

/// What the kernel says of the server's thread.
fn server_thread() -> Option<File> {
    let tasks = std::fs::read_dir("/proc/self/task").ok()?.flatten().map(|task| task.path());
    let name = |task: &PathBuf| std::fs::read_to_string(task.join("comm")).unwrap_or_default();
    let task = tasks.into_iter().find(|task| name(task).trim() == "evenkeel-store")?;
    File::open(task.join("schedstat")).ok()
}

/// How long it has used a processor.
fn busy(thread: &File) -> Option<Duration> {
    let mut said = [0; 128];
    let length = thread.read_at(&mut said, 0).ok()?;
    let said = std::str::from_utf8(&said[..length]).ok()?;
    said.split(' ').next()?.parse().ok().map(Duration::from_nanos)
}
