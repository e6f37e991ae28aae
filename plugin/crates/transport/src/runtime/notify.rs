//! Notifies callers that do not poll.

/// Notified when a request may be done, or a connection may have failed or arrived. Called from any
/// thread, also within a call of the connection and with its locks held. It must neither block nor
/// call back.
pub trait Notify: Send + Sync {
    /// Called when something may have changed.
    fn notify(&self);
}

/// Ignores every notification.
#[derive(Clone, Copy, Debug, Default)]
pub struct NullNotify;

impl Notify for NullNotify {
    fn notify(&self) {}
}
