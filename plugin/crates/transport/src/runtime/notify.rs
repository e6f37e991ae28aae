//! Notification of a caller that does not poll.

/// Hears that there may be something new: a request is done, a connection has failed or has come.
/// Called from any thread, also from within a call of the connection, and with its locks held: it
/// must not block and not call back.
pub trait Notify: Send + Sync {
    /// Ask.
    fn notify(&self);
}

/// Ignores every notification.
#[derive(Clone, Copy, Debug, Default)]
pub struct NullNotify;

impl Notify for NullNotify {
    fn notify(&self) {}
}
