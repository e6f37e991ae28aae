//! Where log lines go.

/// Receives finished lines, without a newline. Called from any thread; must not call back.
pub trait Log: Send + Sync {
    /// Something failed and somebody should act. One line per failure.
    fn warn(&self, line: &str);
    /// Worth knowing when looking.
    fn info(&self, line: &str);
}

/// A log that drops every line.
#[derive(Clone, Copy, Debug, Default)]
pub struct NullLog;

impl Log for NullLog {
    fn warn(&self, _line: &str) {}
    fn info(&self, _line: &str) {}
}
