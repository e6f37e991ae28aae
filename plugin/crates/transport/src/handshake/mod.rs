//! How connections are opened: from both sides.

pub(crate) mod acceptor;
pub(crate) mod connect;
pub(crate) mod dial;
mod encryption;
pub(crate) mod listen;
pub(crate) mod listening_socket;
mod unauthenticated;
