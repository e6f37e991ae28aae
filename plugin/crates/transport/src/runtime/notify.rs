//! Notification of a caller that does not poll.

/// Notified when there may be something new: a request is done, a connection has failed or has arrived. Called from any
/// thread, also within a call of the connection and with its locks held. It must not block and not call back.
pub trait Notify: Send + Sync {
    /// There may be something new.
    fn notify(&self);
}

/// Ignores every notification.
#[derive(Clone, Copy, Debug, Default)]
pub struct NullNotify;

impl Notify for NullNotify {
    fn notify(&self) {}
}
