//! A store server in a process that has run out of descriptors. The test is alone in its process.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Duration;

use evenkeel_collectives::{Store, TcpStore, TcpStoreServer};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const TIME: Duration = Duration::from_secs(20);
/// How long the server is observed.
const OBSERVED: Duration = Duration::from_secs(1);

#[test]
fn store_server_accepts_again_after_running_out_of_descriptors() {
    let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let address = server.address().to_string();
    let connected = TcpStore::connect(&address, TIME).unwrap();
    connected.set("a", b"1").unwrap();
    let thread = server_thread().unwrap();
    let limit = Rlimit { current: Some(64), ..getrlimit(Resource::Nofile) };
    setrlimit(Resource::Nofile, limit).unwrap();
    let mut all: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    // The client below takes the last descriptor.
    all.pop();
    let mut client = TcpStream::connect(server.address()).unwrap();
    client.set_read_timeout(Some(OBSERVED)).unwrap();
    let before = processor_time(&thread).unwrap();
    assert_eq!(client.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
    let used = processor_time(&thread).unwrap() - before;
    assert!(used < OBSERVED / 2, "the server used {used:?} of {OBSERVED:?}");
    assert_eq!(connected.get("a").unwrap().as_deref(), Some(&b"1"[..]));
    drop(all);
    assert_eq!(TcpStore::connect(&address, TIME).unwrap().get("a").unwrap().unwrap(), b"1");
}

/// The kernel's statistics of the server's thread.
fn server_thread() -> Option<File> {
    let tasks = std::fs::read_dir("/proc/self/task").ok()?.flatten().map(|task| task.path());
    let name = |task: &PathBuf| std::fs::read_to_string(task.join("comm")).unwrap_or_default();
    let task = tasks.into_iter().find(|task| name(task).trim() == "evenkeel-store")?;
    File::open(task.join("schedstat")).ok()
}

/// The processor time that it has used.
fn processor_time(thread: &File) -> Option<Duration> {
    let mut text = [0; 128];
    let length = thread.read_at(&mut text, 0).ok()?;
    let text = std::str::from_utf8(&text[..length]).ok()?;
    text.split(' ').next()?.parse().ok().map(Duration::from_nanos)
}
