//! The handshake's messages: handle, hello and welcome, and the reasons for refusal.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

use crate::codec::{array, mapped, u16_at};
use crate::limits::{MAX_ADDRESSES, MAX_FLOWS, MAX_QUEUE_PAIRS};

/// Version of everything in this crate. Peers of different versions refuse each other.
pub const PROTOCOL_VERSION: u16 = 8;
/// Encoded length of a [`Handle`], in bytes. NCCL carries 128.
pub const HANDLE_BYTES: usize = 32 + 16 * MAX_ADDRESSES;
/// Encoded length of a [`Hello`], in bytes.
pub const HELLO_BYTES: usize = 64;
/// Encoded length of a [`Welcome`], in bytes.
pub const WELCOME_BYTES: usize = 32;

const HANDLE_MAGIC: [u8; 8] = *b"EVKL-HND";
const HELLO_MAGIC: [u8; 8] = *b"EVKL-HEL";
const WELCOME_MAGIC: [u8; 8] = *b"EVKL-WEL";
/// Authentication method without a job key: none.
const AUTH_NONE: u16 = 0;
/// Authentication method with a job key: both prove that they have the same [`crate::JobKey`].
const AUTH_JOB_KEY: u16 = 1;

/// Sixteen random bytes chosen by a listener. A peer that knows them was given the listener's
/// handle.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Nonce(pub [u8; 16]);

// The nonce lets a connection pass as a peer's: it stays out of logs.
impl fmt::Debug for Nonce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Nonce(..)")
    }
}

/// Sixteen random bytes chosen by a connector, which identify a connection's flows.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ConnectionId(pub [u8; 16]);

impl fmt::Display for ConnectionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..4].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for ConnectionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ConnectionId({self})")
    }
}

/// Why bytes are not the expected message of the handshake.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    /// Another protocol.
    #[error("not an Evenkeel {0}")]
    NotEvenkeel(&'static str),
    /// Evenkeel, but another version of it.
    #[error("the peer has Evenkeel protocol version {0}, this side has version {PROTOCOL_VERSION}")]
    Version(u16),
    /// One side has a job key and the other has none.
    #[error("the peer {}", if *theirs == AUTH_NONE { "has no job key, this side has one" } else { "has a job key, this side has none" })]
    Authentication {
        /// The peer's method.
        theirs: u16,
    },
    /// One side has checksums on and the other has not.
    #[error("the peer has EVENKEEL_CHECKSUM={}, this side has not", if *theirs { "on" } else { "off" })]
    Checksum {
        /// Whether the peer has them on.
        theirs: bool,
    },
    /// One side requires encryption and the other has none.
    #[error("the peer has EVENKEEL_ENCRYPTION={}", if *theirs { "required, this side has off" } else { "off, this side has required" })]
    Encryption {
        /// Whether the peer requires it.
        theirs: bool,
    },
    /// The hello was meant for another listener.
    #[error("the hello is for another listener (a stale or foreign peer)")]
    WrongListener,
    /// A field is outside its range.
    #[error("{field} is {value}, must be {accepted}")]
    OutOfRange {
        /// Name of the field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// The valid values.
        accepted: String,
    },
    /// A field that must be zero is not.
    #[error("{0} with unused fields that are not zero")]
    Unused(&'static str),
    /// The listener refused this flow.
    #[error("the listener refused the flow: {0}")]
    Refused(Refusal),
}

/// What a listener publishes: its addresses, and the nonce that its peers must present.
///
/// Layout: magic 8, version u16, number of addresses u8, zero u8, port u16, zero u16, nonce 16
/// bytes, then four times 16 bytes: an IPv6 address, or an IPv4 address mapped to one, or zeros.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Handle {
    /// Addresses of all the listener's interfaces, 1 to [`MAX_ADDRESSES`]. IPv6 scope ids are not
    /// carried, because they mean nothing on another host.
    pub addresses: Vec<IpAddr>,
    /// The port, the same at all addresses.
    pub port: u16,
    /// The nonce that a peer must present.
    pub nonce: Nonce,
}

impl Handle {
    /// The bytes that the peer must be given out of band. Addresses beyond [`MAX_ADDRESSES`] are
    /// left out.
    pub fn encode(&self) -> [u8; HANDLE_BYTES] {
        let mut out = [0; HANDLE_BYTES];
        out[0..8].copy_from_slice(&HANDLE_MAGIC);
        out[8..10].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
        out[10] = self.addresses.len().min(MAX_ADDRESSES) as u8;
        out[12..14].copy_from_slice(&self.port.to_le_bytes());
        out[16..32].copy_from_slice(&self.nonce.0);
        for (place, address) in out[32..].chunks_exact_mut(16).zip(&self.addresses) {
            place.copy_from_slice(&mapped(*address).octets());
        }
        out
    }

    /// Reads what [`Handle::encode`] wrote.
    ///
    /// # Errors
    /// [`HandshakeError`] when the bytes are not a handle of this version.
    pub fn decode(bytes: &[u8; HANDLE_BYTES]) -> Result<Self, HandshakeError> {
        if bytes[0..8] != HANDLE_MAGIC {
            return Err(HandshakeError::NotEvenkeel("handle"));
        }
        check_version(bytes)?;
        let count = usize::from(bytes[10]);
        if !(1..=MAX_ADDRESSES).contains(&count) {
            return Err(HandshakeError::OutOfRange {
                field: "number of addresses",
                value: count as u64,
                accepted: format!("1 to {MAX_ADDRESSES}"),
            });
        }
        let address = |at| Ipv6Addr::from(array::<16>(bytes, 32 + 16 * at)).to_canonical();
        let addresses = (0..count).map(address).collect();
        let handle = Self { addresses, port: u16_at(bytes, 12), nonce: Nonce(array(bytes, 16)) };
        if handle.encode() == *bytes { Ok(handle) } else { Err(HandshakeError::Unused("a handle")) }
    }
}

/// First bytes of every flow, from the connector.
///
/// Layout: magic 8, version u16, authentication u16, flows u16, checksums u8 (0 or 1), RDMA u8 (0
/// or 1), nonce 16 bytes, connection 16 bytes, flow u32, random 12 bytes (zeros without a job key).
/// Authentication is 0 without a job key; with one it is 1, and proofs follow the hello before the
/// welcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The listener's nonce, from its handle.
    pub nonce: Nonce,
    /// Which connection the flow belongs to.
    pub connection: ConnectionId,
    /// Number of this flow in the connection. Those below `flows` make up the connection; flows
    /// that are added later take numbers that no flow had before.
    pub flow: u32,
    /// Number of flows that make up the connection, 1 to [`MAX_FLOWS`].
    pub flows: u16,
    /// Whether frames are sealed and payloads checked.
    pub checksum: bool,
    /// Whether this is no flow but the control connection of a connection over RDMA. The first one
    /// is numbered 0; its replacements have numbers that none had before. The number of flows is
    /// then that of the connection's queue pairs, 1 to [`crate::MAX_QUEUE_PAIRS`].
    pub rdma: bool,
    /// With a job key: fresh random bytes, which limit the listener's proof to this flow.
    pub random: Option<[u8; 12]>,
}

impl Hello {
    /// The bytes to send first on the flow.
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut out = [0; HELLO_BYTES];
        out[0..8].copy_from_slice(&HELLO_MAGIC);
        out[8..10].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
        let authentication = if self.random.is_some() { AUTH_JOB_KEY } else { AUTH_NONE };
        out[10..12].copy_from_slice(&authentication.to_le_bytes());
        out[12..14].copy_from_slice(&self.flows.to_le_bytes());
        out[14] = self.checksum.into();
        out[15] = self.rdma.into();
        out[16..32].copy_from_slice(&self.nonce.0);
        out[32..48].copy_from_slice(&self.connection.0);
        out[48..52].copy_from_slice(&self.flow.to_le_bytes());
        out[52..64].copy_from_slice(&self.random.unwrap_or_default());
        out
    }

    /// Whether the bytes received so far can still become a hello. Lets a listener drop an
    /// unauthenticated connection at its first wrong byte.
    pub fn may_begin_with(received: &[u8]) -> bool {
        received.iter().zip(HELLO_MAGIC).all(|(got, want)| *got == want)
    }

    /// The nonce of the listener that a hello is for.
    ///
    /// # Errors
    /// [`HandshakeError`] when the bytes are not a hello of this version.
    pub fn listener(bytes: &[u8; HELLO_BYTES]) -> Result<Nonce, HandshakeError> {
        if !Self::may_begin_with(bytes) {
            return Err(HandshakeError::NotEvenkeel("peer"));
        }
        check_version(bytes)?;
        Ok(Nonce(array(bytes, 16)))
    }

    /// Reads a hello for the listener with this nonce. `has_key` and `checksum`: whether the
    /// listener has a job key, and whether it has checksums on.
    ///
    /// # Errors
    /// [`HandshakeError`] when the sender is not a peer of that listener.
    pub fn decode(
        bytes: &[u8; HELLO_BYTES],
        listener: Nonce,
        has_key: bool,
        checksum: bool,
    ) -> Result<Self, HandshakeError> {
        let nonce = Self::listener(bytes)?;
        if nonce != listener {
            return Err(HandshakeError::WrongListener);
        }
        let theirs = u16_at(bytes, 10);
        if theirs != if has_key { AUTH_JOB_KEY } else { AUTH_NONE } {
            return Err(HandshakeError::Authentication { theirs });
        }
        let theirs = bytes[14] != 0;
        if theirs != checksum {
            return Err(HandshakeError::Checksum { theirs });
        }
        let (flow, flows) = (u32::from_le_bytes(array(bytes, 48)), u16_at(bytes, 12));
        let rdma = bytes[15] != 0;
        let max = if rdma { MAX_QUEUE_PAIRS } else { MAX_FLOWS };
        if flows == 0 || usize::from(flows) > max {
            return Err(HandshakeError::OutOfRange {
                field: "number of flows",
                value: flows.into(),
                accepted: format!("1 to {max}"),
            });
        }
        let random = has_key.then(|| array(bytes, 52));
        let connection = ConnectionId(array(bytes, 32));
        let hello = Self { nonce, connection, flow, flows, checksum, rdma, random };
        if hello.encode() == *bytes { Ok(hello) } else { Err(HandshakeError::Unused("a hello")) }
    }
}

/// Why a listener refuses a flow of one of its peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Refusal {
    /// The two sides run different protocol versions.
    Version = 1,
    /// The two sides don't agree on authentication.
    Authentication = 2,
    /// The flow contradicts the other flows of its connection.
    Inconsistent = 3,
    /// The listener has as many unfinished connections as it allows.
    Busy = 4,
    /// The connection that the flow was to join is closed.
    Gone = 5,
    /// One side has checksums on and the other has not.
    Checksum = 6,
    /// The listener has no RDMA, or must not use it.
    NoRdma = 7,
    /// The listener requires RDMA.
    RdmaOnly = 8,
    /// No listener of this process has the nonce.
    WrongListener = 9,
    /// One side requires encryption and the other has none.
    Encryption = 10,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Version => "different protocol versions",
            Self::Authentication => "the two sides do not have the same job key",
            Self::Inconsistent => "flow contradicts the others of its connection",
            Self::Busy => "too many unfinished connections",
            Self::Gone => "the connection is closed",
            Self::Checksum => "EVENKEEL_CHECKSUM is not the same on both sides",
            Self::NoRdma => "it has no RDMA (EVENKEEL_TRANSPORT=tcp, or no RDMA device)",
            Self::RdmaOnly => "it takes RDMA only (EVENKEEL_TRANSPORT=rdma)",
            Self::Encryption => "EVENKEEL_ENCRYPTION is not the same on both sides",
            Self::WrongListener => "its process has no such listener: it is closed, or another process has its port now",
        })
    }
}

/// The listener's answer to a hello: accepted, or why not.
///
/// Layout: magic 8, version u16, status u16 (0 accepted, else a [`Refusal`]), zero u32,
/// connection 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// The connection named in the hello.
    pub connection: ConnectionId,
    /// `Ok` when the flow was taken.
    pub verdict: Result<(), Refusal>,
}

impl Welcome {
    /// The bytes to answer with.
    pub fn encode(&self) -> [u8; WELCOME_BYTES] {
        let mut out = [0; WELCOME_BYTES];
        out[0..8].copy_from_slice(&WELCOME_MAGIC);
        out[8..10].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
        let status = self.verdict.err().map_or(0, |refusal| refusal as u16);
        out[10..12].copy_from_slice(&status.to_le_bytes());
        out[16..32].copy_from_slice(&self.connection.0);
        out
    }

    /// Whether bytes, which may be none, can be the first of an answer.
    pub fn may_begin_with(received: &[u8]) -> bool {
        received.iter().zip(WELCOME_MAGIC).all(|(got, want)| *got == want)
    }

    /// Why the other side refuses, or is no listener of this version; `None` if it accepts,
    /// whatever the connection.
    pub fn refusal(bytes: &[u8; WELCOME_BYTES]) -> Option<HandshakeError> {
        Self::check(bytes, ConnectionId(array(bytes, 16))).err()
    }

    /// Reads the answer to a hello for `connection`.
    ///
    /// # Errors
    /// [`HandshakeError`] when the other side is not an Evenkeel listener that took the flow.
    pub fn check(
        bytes: &[u8; WELCOME_BYTES],
        connection: ConnectionId,
    ) -> Result<(), HandshakeError> {
        if bytes[0..8] != WELCOME_MAGIC {
            return Err(HandshakeError::NotEvenkeel("listener"));
        }
        check_version(bytes)?;
        if bytes[12..16] != [0; 4] {
            return Err(HandshakeError::Unused("a welcome"));
        }
        match u16_at(bytes, 10) {
            0 if array::<16>(bytes, 16) == connection.0 => Ok(()),
            0 => Err(HandshakeError::Refused(Refusal::Inconsistent)),
            1 => Err(HandshakeError::Refused(Refusal::Version)),
            2 => Err(HandshakeError::Refused(Refusal::Authentication)),
            3 => Err(HandshakeError::Refused(Refusal::Inconsistent)),
            4 => Err(HandshakeError::Refused(Refusal::Busy)),
            5 => Err(HandshakeError::Refused(Refusal::Gone)),
            6 => Err(HandshakeError::Refused(Refusal::Checksum)),
            7 => Err(HandshakeError::Refused(Refusal::NoRdma)),
            8 => Err(HandshakeError::Refused(Refusal::RdmaOnly)),
            9 => Err(HandshakeError::Refused(Refusal::WrongListener)),
            10 => Err(HandshakeError::Refused(Refusal::Encryption)),
            other => Err(HandshakeError::OutOfRange {
                field: "welcome status",
                value: other.into(),
                accepted: "0 to 10".into(),
            }),
        }
    }
}

pub(super) fn check_version(bytes: &[u8]) -> Result<(), HandshakeError> {
    match u16_at(bytes, 8) {
        PROTOCOL_VERSION => Ok(()),
        other => Err(HandshakeError::Version(other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NONCE: Nonce = Nonce([7; 16]);
    const ID: ConnectionId = ConnectionId([9; 16]);

    fn hello() -> Hello {
        Hello {
            nonce: NONCE,
            connection: ID,
            flow: 3,
            flows: 4,
            checksum: false,
            rdma: false,
            random: None,
        }
    }

    #[test]
    fn handle_keeps_both_address_families() {
        let addresses = ["10.1.2.3", "2001:db8::1", "0.0.0.0", "::1"].map(|ip| ip.parse().unwrap());
        for count in 1..=addresses.len() {
            let addresses = addresses[..count].to_vec();
            let handle = Handle { addresses, port: 65_535, nonce: NONCE };
            assert_eq!(Handle::decode(&handle.encode()), Ok(handle));
        }
    }

    #[test]
    fn handle_of_another_kind_is_refused() {
        assert!(matches!(Handle::decode(&[0; HANDLE_BYTES]), Err(HandshakeError::NotEvenkeel(_))));
        let handle = Handle { addresses: vec![[10, 1, 2, 3].into()], port: 4567, nonce: NONCE };
        for count in [0, 5] {
            let mut bytes = handle.encode();
            bytes[10] = count;
            assert!(matches!(Handle::decode(&bytes), Err(HandshakeError::OutOfRange { .. })));
        }
    }

    #[test]
    fn hello_is_accepted_from_the_right_peer_only() {
        let bytes = hello().encode();
        assert_eq!(Hello::decode(&bytes, NONCE, false, false), Ok(hello()));
        assert_eq!(
            Hello::decode(&bytes, Nonce([8; 16]), false, false),
            Err(HandshakeError::WrongListener)
        );
        let changed = |at: usize, value: u8| {
            let mut changed = bytes;
            changed[at] = value;
            Hello::decode(&changed, NONCE, false, false).unwrap_err()
        };
        assert_eq!(changed(0, b'G'), HandshakeError::NotEvenkeel("peer"));
        assert_eq!(changed(8, 1), HandshakeError::Version(1));
        assert_eq!(changed(10, 1), HandshakeError::Authentication { theirs: 1 });
        let keyed = Hello { random: Some([5; 12]), ..hello() };
        assert_eq!(Hello::decode(&keyed.encode(), NONCE, true, false), Ok(keyed));
        let refused = HandshakeError::Authentication { theirs: 0 };
        assert_eq!(Hello::decode(&bytes, NONCE, true, false), Err(refused));
        assert!(matches!(changed(12, 0), HandshakeError::OutOfRange { .. }));
        assert!(matches!(changed(12, 65), HandshakeError::OutOfRange { .. }));
    }

    #[test]
    fn unused_fields_must_be_zero() {
        let changed = |at: usize| {
            let mut changed = hello().encode();
            changed[at] = 1;
            Hello::decode(&changed, NONCE, false, false)
        };
        assert_eq!(changed(14), Err(HandshakeError::Checksum { theirs: true }));
        assert_eq!(changed(63), Err(HandshakeError::Unused("a hello")));
        let checked = Hello { checksum: true, ..hello() };
        assert_eq!(Hello::decode(&checked.encode(), NONCE, false, true), Ok(checked));
        for flow in [0, 9] {
            let control = Hello { rdma: true, flow, ..hello() };
            assert_eq!(Hello::decode(&control.encode(), NONCE, false, false), Ok(control));
        }
        let refused = HandshakeError::Checksum { theirs: false };
        assert_eq!(Hello::decode(&hello().encode(), NONCE, false, true), Err(refused));
        assert_eq!(changed(63), Err(HandshakeError::Unused("a hello")), "random without a key");
        let handle = Handle { addresses: vec![[10, 1, 2, 3].into()], port: 4567, nonce: NONCE };
        for at in [11, 14, HANDLE_BYTES - 1] {
            let mut changed = handle.encode();
            changed[at] = 1;
            assert_eq!(Handle::decode(&changed), Err(HandshakeError::Unused("a handle")));
        }
        let mut changed = Welcome { connection: ID, verdict: Ok(()) }.encode();
        changed[12] = 1;
        assert_eq!(Welcome::check(&changed, ID), Err(HandshakeError::Unused("a welcome")));
    }

    #[test]
    fn hello_prefix_is_checked_early() {
        assert!(Hello::may_begin_with(b""));
        assert!(Hello::may_begin_with(&hello().encode()[..5]));
        assert!(!Hello::may_begin_with(b"GET / HTTP/1.1"));
    }

    #[test]
    fn welcome_carries_the_refusal() {
        let ok = Welcome { connection: ID, verdict: Ok(()) };
        assert_eq!(Welcome::check(&ok.encode(), ID), Ok(()));
        for refusal in [
            Refusal::Version,
            Refusal::Authentication,
            Refusal::Inconsistent,
            Refusal::Busy,
            Refusal::Gone,
            Refusal::Checksum,
            Refusal::NoRdma,
            Refusal::RdmaOnly,
            Refusal::WrongListener,
            Refusal::Encryption,
        ] {
            let bytes = Welcome { connection: ID, verdict: Err(refusal) }.encode();
            assert_eq!(Welcome::check(&bytes, ID), Err(HandshakeError::Refused(refusal)));
        }
        assert!(Welcome::check(&ok.encode(), ConnectionId([1; 16])).is_err());
    }

    #[test]
    fn nonce_stays_out_of_logs() {
        assert!(!format!("{:?}", hello()).contains('7'));
    }

    proptest! {
        #[test]
        fn hello_and_handle_refuse_any_bytes_without_panic(
            bytes in proptest::collection::vec(any::<u8>(), 64), keep_magic: bool,
        ) {
            let mut raw = [0; 64];
            raw.copy_from_slice(&bytes);
            if keep_magic {
                raw[0..10].copy_from_slice(&hello().encode()[0..10]);
            }
            prop_assert!(Hello::decode(&raw, NONCE, false, false).is_err());
            prop_assert!(Hello::decode(&raw, NONCE, true, false).is_err());
            let mut handle = [0; HANDLE_BYTES];
            handle[..64].copy_from_slice(&raw);
            prop_assert!(Handle::decode(&handle).is_err());
        }
    }
}
