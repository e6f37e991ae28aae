//! Processes of a job over the loopback interface: each transport here is one.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails there")]

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use evenkeel_diagnosis::{ConnectionView, Outcome};

use super::*;
use crate::sync::lock;
use crate::test_support::{connected, transport, until};
use crate::{MemoryTypes, RecvBuffer, Request, SendBuffer, Transport};

/// Keeps all lines.
#[derive(Default)]
struct Lines(Mutex<Vec<String>>);

impl Log for Lines {
    fn warn(&self, line: &str) {
        lock(&self.0).push(line.to_owned());
    }

    fn info(&self, _line: &str) {}
}

/// A folder that is removed when it is dropped. Declared first, it outlives the processes that
/// write to it.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// What the files hold whose names begin so.
    fn read(&self, prefix: &str) -> Vec<String> {
        let files = std::fs::read_dir(&self.0).unwrap().map(|file| file.unwrap());
        let its = files.filter(|file| file.file_name().to_string_lossy().starts_with(prefix));
        its.filter_map(|file| std::fs::read_to_string(file.path()).ok()).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0); // a test that fails says so itself
    }
}

fn process(folder: &Path, log: &Arc<Lines>) -> Transport {
    let settings = Settings::from_lookup(|name| match name {
        "NCCL_SOCKET_IFNAME" => Some("lo".to_owned()),
        "EVENKEEL_STATUS_DIR" => Some(folder.to_str().unwrap().to_owned()),
        "EVENKEEL_WATCH" => Some("on".to_owned()),
        "EVENKEEL_WAIT_LIMIT" => Some("2".to_owned()),
        _ => None,
    });
    Transport::new(settings.unwrap(), Arc::clone(log) as Arc<dyn Log>).unwrap()
}

/// Two processes. One receives and never gets anything, since the other's caller does not send.
#[test]
fn watch_logs_long_waits_and_writes_what_it_finds() {
    let folder = Folder::new("evenkeel-watch");
    let log = Arc::new(Lines::default());
    let (sender, receiver) = (process(&folder.0, &log), process(&folder.0, &log));
    let listener = receiver.listen(0, "", MemoryTypes::HOST).unwrap();
    let (send, recv) = connected(&sender, &listener, listener.handle());
    let _first = recv.recv(RecvBuffer::from_static(vec![0; 8].leak())).unwrap().unwrap();
    until(|| {
        let lines = lock(&log.0);
        lines.iter().any(|line| line.contains("this rank waits for 127.0.0.1")).then_some(())
    });
    let lines = lock(&log.0).join("\n");
    assert!(lines.contains("its program has not called"), "{lines}");
    let svg = until(|| folder.read("timeline.").pop());
    assert!(svg.starts_with("<svg"), "{svg}");
    let _sent = send.send(SendBuffer::from_static(b"12345678")).unwrap().unwrap();
}

/// The processes find each other and one collects: its verdict has both.
#[test]
fn watch_of_two_processes_agrees_on_one_collector() {
    let folder = Folder::new("evenkeel-collect");
    let log = Arc::new(Lines::default());
    let (a, b) = (process(&folder.0, &log), process(&folder.0, &log));
    let listener = b.listen(0, "", MemoryTypes::HOST).unwrap();
    let (_send, recv) = connected(&a, &listener, listener.handle());
    let _first = recv.recv(RecvBuffer::from_static(vec![0; 8].leak())).unwrap().unwrap();
    // Both have a file, although they are in one process here.
    let of_this_process = format!("verdict.{}.", std::process::id());
    let verdicts = until(|| {
        let texts = folder.read(&of_this_process);
        let verdicts = texts.iter().filter_map(|text| Verdict::from_json(text.as_bytes()));
        let verdicts: Vec<Verdict> = verdicts.filter(|verdict| verdict.ranks == 2).collect();
        (verdicts.len() == 2).then_some(verdicts)
    });
    for verdict in verdicts {
        assert_ne!(verdict.outcome, Outcome::Quiet, "{}", verdict.text);
    }
    drop((_send, recv, listener, a, b));
    assert_eq!(folder.read(&of_this_process), Vec::<String>::new(), "whoever ends leaves none");
}

/// What a sender's view says of its connection, of at least a tenth of a second.
fn viewed(
    views: &mut Views,
    sender: &Transport,
    begin: Instant,
    last: &mut Duration,
) -> Option<ConnectionView> {
    let now = begin.elapsed();
    if now < *last + Duration::from_millis(100) {
        return None;
    }
    *last = now;
    let view = views.next(&sender.metrics, now);
    let its = view.connections.into_iter().next()?;
    assert!(its.unacknowledged <= view.window, "{} of {}", its.unacknowledged, view.window);
    Some(its)
}

/// The time without acknowledgement leaves out that in which the receiver's window holds bytes up.
#[test]
fn bytes_that_wait_for_the_receivers_window_do_not_count_as_unacknowledged() {
    const BYTES: usize = 64 << 20;
    let (sender, receiver) = (transport(), transport());
    let listener = receiver.listen(0, "", MemoryTypes::HOST).unwrap();
    let (send, recv) = connected(&sender, &listener, listener.handle());
    let (mut views, begin, mut last) =
        (Views::new(Process::default()), Instant::now(), Duration::ZERO);
    let mut view = || viewed(&mut views, &sender, begin, &mut last);
    let message: &'static [u8] = vec![1; BYTES].leak();
    let sent = send.send(SendBuffer::from_static(message)).unwrap().unwrap();
    until(|| view().filter(|its| its.outstanding >= 90 && its.unacknowledged == 0));
    let into = || RecvBuffer::from_static(vec![0; BYTES].leak());
    let received = recv.recv(into()).unwrap().unwrap();
    until(|| received.test().unwrap());
    until(|| sent.test().unwrap());
    let (mut sent, mut received) = (None, None);
    until(|| {
        // One message after the other.
        if received.as_ref().is_none_or(|request: &Request| request.test().unwrap().is_some()) {
            received = recv.recv(RecvBuffer::from_static(vec![0; 1 << 20].leak())).unwrap();
            sent = send.send(SendBuffer::from_static(&message[..1 << 20])).unwrap();
        }
        sent.as_ref().map(|request: &Request| request.test().unwrap());
        view().filter(|its| its.unacknowledged > 0)
    });
}

/// As the collectives do, which always have a buffer for a header.
#[test]
fn buffer_that_is_kept_posted_is_no_call() {
    let (sender, receiver) = (transport(), transport());
    let listener = receiver.listen(0, "", MemoryTypes::HOST).unwrap();
    let (_send, recv) = connected(&sender, &listener, listener.handle());
    let _posted = recv.recv(RecvBuffer::from_static(vec![0; 8].leak())).unwrap().unwrap();
    let uncalled = || receiver.metrics.calls.uncalled();
    assert!(uncalled().1.is_zero(), "it waits for what it has requested");
    recv.set_awaited(false);
    until(|| (uncalled().1 > Duration::from_millis(20)).then_some(()));
    let its = || receiver.metrics.connections()[0].base().wait_times();
    assert!(its().outstanding_for.is_zero(), "{:?}", its());
    recv.set_awaited(true);
    assert!(uncalled().1.is_zero());
    until(|| (its().outstanding_for > Duration::from_millis(20)).then_some(()));
}
