//! TLS 1.3 between the processes of a job (RFC 8446), authenticated by the key that they share.
//!
//! rustls does the handshake ([`Handshake`]) with raw public keys (RFC 7250) that both ends derive
//! from the job key ([`JobIdentity`]): who completes it has the key. X25519 makes each session's
//! secrets new, so the key opens no session that was recorded before. Then the session's two
//! directions are a [`Sealer`] and an [`Opener`]. These work in memory that the caller has, without
//! copies or allocations of their own. Or the kernel gets the keys ([`TrafficKeys`]). There are no
//! sockets here.

mod handshake;
mod identity;
mod record;

pub use handshake::{Handshake, HandshakeError, MAX_HANDSHAKE_BYTES, Session};
pub use identity::JobIdentity;
pub use record::{
    Cipher, HEADER_BYTES, KeyUse, MAX_PLAINTEXT, MAX_RECORD, OVERHEAD, Opener, RecordError, Sealer,
    TrafficKeys, record_length,
};
