//! Runs `evenkeel-bench`, never for longer than a test may take.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use evenkeel_testkit::plugin_library;
use serde_json::Value;

/// Reached only when something is broken.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The plugin that Cargo built.
pub(crate) fn plugin() -> PathBuf {
    let program = Path::new(env!("CARGO_BIN_EXE_evenkeel-bench"));
    plugin_library(program).unwrap_or_else(|error| panic!("{error}"))
}

/// `evenkeel-bench` with the words of a line as arguments, on loopback, with nothing of this
/// process's own run in its environment.
pub(crate) fn bench(line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_evenkeel-bench"));
    for name in ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NCCL_DEBUG"] {
        command.env_remove(name);
    }
    command
        .args(line.split_whitespace())
        .env("NCCL_NET_PLUGIN", plugin())
        .env("NCCL_SOCKET_IFNAME", "lo")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// A folder of its own, gone with this.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("evenkeel-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }

    pub(crate) fn file(&self, name: &str) -> String {
        self.0.join(name).to_string_lossy().into_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// What a process that has ended left.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Ended {
    /// The same, of a process that has succeeded.
    pub(crate) fn passed(self) -> Self {
        assert!(self.status.success(), "{self:?}");
        self
    }

    /// Asserts that it has failed with a line that contains this.
    pub(crate) fn failed(&self, says: &str) {
        assert!(!self.status.success() && self.err.contains(says), "no {says:?}: {self:?}");
    }

    /// The JSON that it printed.
    pub(crate) fn report(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The rows of its table.
    pub(crate) fn rows(&self) -> Vec<&str> {
        self.out.lines().filter(|line| is_row(line)).collect()
    }
}

/// A running process; it is killed when this is dropped.
pub(crate) struct Running {
    child: Child,
    out: mpsc::Receiver<String>,
    err: Option<thread::JoinHandle<String>>,
    seen: String,
}

impl Running {
    pub(crate) fn start(mut command: Command) -> Self {
        let mut child = command.spawn().unwrap();
        let (lines, out) = mpsc::channel();
        let stdout = child.stdout.take().unwrap();
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if lines.send(line).is_err() {
                    break;
                }
            }
        });
        let mut stderr = child.stderr.take().unwrap();
        let err = thread::spawn(move || {
            let mut text = String::new();
            let _ = stderr.read_to_string(&mut text);
            text
        });
        Self { child, out, err: Some(err), seen: String::new() }
    }

    /// Waits for a line of standard output that `wanted` likes.
    pub(crate) fn line(&mut self, wanted: impl Fn(&str) -> bool) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = self.out.recv_timeout(left).unwrap_or_else(|error| {
                let ended = error == mpsc::RecvTimeoutError::Disconnected;
                let err = self.err.take().filter(|_| ended).map(|err| err.join().unwrap());
                panic!("{error}, after:\n{}{}", self.seen, err.unwrap_or_default());
            });
            self.seen.push_str(&line);
            self.seen.push('\n');
            if wanted(&line) {
                return line;
            }
        }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
    }

    /// Waits until nobody holds its standard output any more, and it has ended.
    pub(crate) fn end(mut self) -> Ended {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.out.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    self.seen.push_str(&line);
                    self.seen.push('\n');
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    panic!("still running after:\n{}", self.seen)
                }
            }
        }
        let status = self.child.wait().unwrap();
        let err = self.err.take().unwrap().join().unwrap();
        Ended { status, out: std::mem::take(&mut self.seen), err }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs a command line to its end.
pub(crate) fn run(line: &str) -> Ended {
    Running::start(bench(line)).end()
}

/// The JSON of a command line that must succeed.
pub(crate) fn report(line: &str) -> Value {
    run(&format!("{line} --json")).passed().report()
}

/// Starts each rank as a process of its own, as pods do. `set` may change the command of each rank.
pub(crate) fn ranks(count: usize, line: &str, set: impl Fn(usize, &mut Command)) -> Vec<Running> {
    // Taken for a moment and given back: the kernel does not hand it out again soon.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    (0..count)
        .map(|rank| {
            let mut command = bench(line);
            command
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", count.to_string())
                .env("MASTER_ADDR", "127.0.0.1")
                .env("MASTER_PORT", port.to_string());
            set(rank, &mut command);
            Running::start(command)
        })
        .collect()
}

/// What the ranks left, once all have ended.
pub(crate) fn end_all(ranks: Vec<Running>) -> Vec<Ended> {
    ranks.into_iter().map(Running::end).collect()
}

/// Whether a line of the table is a row.
pub(crate) fn is_row(line: &str) -> bool {
    line.trim_start().starts_with(|c: char| c.is_ascii_digit())
}
