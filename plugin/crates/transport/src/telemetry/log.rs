//! The destination of log lines.

/// Receives complete lines, without a newline. Called from any thread; must not call back.
pub trait Log: Send + Sync {
    /// A failure that needs attention. One line per failure.
    fn warn(&self, line: &str);
    /// Information for diagnosis.
    fn info(&self, line: &str);
}

/// A log that drops every line.
#[derive(Clone, Copy, Debug, Default)]
pub struct NullLog;

impl Log for NullLog {
    fn warn(&self, _line: &str) {}
    fn info(&self, _line: &str) {}
}
