//! The destination of log lines.

use std::io::Write;

/// Receives complete lines, without a newline. Called from any thread; must not call back.
pub trait Log: Send + Sync {
    /// A failure that needs attention. One line per failure.
    fn warn(&self, line: &str);
    /// Information for diagnosis.
    fn info(&self, line: &str);
    /// What somebody has asked to be told, by a setting. It is shown even where warnings are not.
    fn tell(&self, line: &str) {
        self.warn(line);
    }
}

/// A log that drops every line.
#[derive(Clone, Copy, Debug, Default)]
pub struct NullLog;

impl Log for NullLog {
    fn warn(&self, _line: &str) {}
    fn info(&self, _line: &str) {}
}

/// A log whose warnings go to standard error, for programs without a log of their own.
#[derive(Clone, Copy, Debug, Default)]
pub struct StderrLog;

impl Log for StderrLog {
    fn warn(&self, line: &str) {
        // In one piece, and nobody reads it where standard error is closed.
        let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
    }
    fn info(&self, _line: &str) {}
}
