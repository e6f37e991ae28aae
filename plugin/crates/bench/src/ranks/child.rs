//! Processes that start each other. A process ends with the one that started it, is killed when
//! that one drops it, and no wait for it is without an end.

use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, ExitStatus};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Signal, getppid, set_parent_process_death_signal};

use crate::error::Result;

/// How often a wait looks whether the process has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Maximum number of lines that have been read and not yet taken.
const MAX_LINES: usize = 1024;

/// This program's file.
///
/// # Errors
/// When the system does not say.
pub(crate) fn this_program() -> Result<PathBuf> {
    std::env::current_exe().map_err(|error| format!("this program's path: {error}"))
}

/// Ends this process when its parent ends, which must be this one.
///
/// # Errors
/// When it has ended already.
pub(crate) fn end_with(parent: i32) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|error| format!("cannot tie this process to its parent: {error}"))?;
    match getppid().is_some_and(|now| now.as_raw_nonzero().get() == parent) {
        true => Ok(()),
        false => Err("the process that started this one is gone".to_owned()),
    }
}

/// A started process.
pub(crate) struct Started(pub(crate) Child);

impl Started {
    /// Its status, if it has ended.
    pub(crate) fn status(&mut self) -> Result<Option<ExitStatus>> {
        self.0.try_wait().map_err(|error| format!("waiting for a process: {error}"))
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// When it still runs after the timeout.
    pub(crate) fn wait(&mut self, timeout: Duration) -> Result<ExitStatus> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(status) = self.status()? {
                return Ok(status);
            }
            if Instant::now() >= deadline {
                return Err(format!("it still runs after {timeout:?}"));
            }
            thread::sleep(POLL_INTERVAL);
        }
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        // One that has ended already is no error.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The lines that come through a pipe. The channel ends with it.
pub(crate) fn lines(pipe: Option<impl Read + Send + 'static>) -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::sync_channel(MAX_LINES);
    thread::spawn(move || {
        let lines = pipe.into_iter().flat_map(|pipe| BufReader::new(pipe).lines());
        // The receiver is gone where nobody waits for them any more.
        lines.map_while(std::io::Result::ok).all(|line| sender.send(line).is_ok())
    });
    receiver
}

/// All that comes through a pipe, read meanwhile.
pub(crate) struct Text(mpsc::Receiver<String>);

impl Text {
    /// Begins to read.
    pub(crate) fn of(pipe: Option<impl Read + Send + 'static>) -> Self {
        let (sender, text) = mpsc::sync_channel(1);
        thread::spawn(move || {
            let mut text = String::new();
            // What has come until the pipe broke is still of use.
            let _ = pipe.map(|mut pipe| pipe.read_to_string(&mut text));
            // The receiver is gone where nobody waits for it any more.
            let _ = sender.send(text);
        });
        Self(text)
    }

    /// The text, once nobody holds the other end.
    ///
    /// # Errors
    /// When somebody still does after the timeout.
    pub(crate) fn finish(&self, timeout: Duration) -> Result<String> {
        let held = |_| format!("a process that it has started holds its output after {timeout:?}");
        self.0.recv_timeout(timeout).map_err(held)
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    const SHORT: Duration = Duration::from_millis(100);
    const LONG: Duration = Duration::from_secs(60);

    fn shell(line: &str) -> (Started, Text) {
        let mut command = Command::new("sh");
        let mut child = command.args(["-c", line]).stdout(Stdio::piped()).spawn().unwrap();
        let text = Text::of(child.stdout.take());
        (Started(child), text)
    }

    #[test]
    fn wait_for_a_process_ends_with_it_or_the_timeout() {
        let (mut ends, text) = shell("echo so far; exit 3");
        assert_eq!(ends.wait(LONG).unwrap().code(), Some(3));
        assert_eq!(text.finish(LONG).unwrap(), "so far\n");
        let (mut stays, text) = shell("exec sleep 600");
        assert!(stays.wait(SHORT).unwrap_err().contains("still runs"));
        drop(stays);
        assert_eq!(text.finish(LONG).unwrap(), "");
    }

    #[test]
    fn wait_for_output_ends_although_another_process_holds_it() {
        let (mut ends, text) = shell("sleep 5 & exit 0");
        assert!(ends.wait(LONG).unwrap().success());
        assert!(text.finish(SHORT).unwrap_err().contains("holds its output"));
    }
}
