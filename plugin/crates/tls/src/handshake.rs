//! The handshake of a session, as bytes in and out.

use std::io;

use rustls::pki_types::ServerName;
use rustls::{
    AlertDescription, CertificateError, ClientConnection, Connection, Error as TlsError,
    ServerConnection,
};

use crate::identity::JobIdentity;
use crate::record::{HEADER_BYTES, Opener, Sealer, TrafficKeys};

/// Maximum number of bytes that a handshake takes from the peer, which is not authenticated yet. It
/// needs some 500.
pub const MAX_HANDSHAKE_BYTES: usize = 4096;

/// Why there is no session.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    /// The peer has another job key, or none.
    #[error("the peer does not have the job key")]
    OtherKey,
    /// The peer has found that this side has another job key.
    #[error("the peer has another job key")]
    RefusedKey,
    /// The peer's bytes are no valid handshake: it speaks something else, or they were changed on
    /// their way.
    #[error("TLS: {0}")]
    Invalid(String),
}

impl From<TlsError> for HandshakeError {
    fn from(error: TlsError) -> Self {
        match error {
            TlsError::InvalidCertificate(CertificateError::UnknownIssuer) => Self::OtherKey,
            TlsError::AlertReceived(AlertDescription::UnknownCA) => Self::RefusedKey,
            error => Self::Invalid(error.to_string()),
        }
    }
}

/// A handshake that is under way. The caller sends [`Handshake::to_send`], and gives it what has
/// arrived, record by record.
pub struct Handshake {
    session: Connection,
    /// The record that is arriving.
    record: Vec<u8>,
    /// Bytes received so far.
    received: usize,
}

impl Handshake {
    /// The part of the side that has opened the connection.
    ///
    /// # Errors
    /// When the TLS library has no random numbers.
    pub fn connector(identity: &JobIdentity) -> Result<Self, HandshakeError> {
        // Peers are known by their key. The name is not sent.
        let name = ServerName::IpAddress(std::net::Ipv4Addr::UNSPECIFIED.into());
        let client = ClientConnection::new(identity.connector().clone(), name)?;
        Ok(Self::new(client.into()))
    }

    /// The part of the side that has accepted the connection.
    ///
    /// # Errors
    /// As [`Handshake::connector`].
    pub fn listener(identity: &JobIdentity) -> Result<Self, HandshakeError> {
        Ok(Self::new(ServerConnection::new(identity.listener().clone())?.into()))
    }

    fn new(session: Connection) -> Self {
        Self { session, record: Vec::new(), received: 0 }
    }

    /// Bytes for the peer: after the start, after [`Handshake::receive`], and also after an error
    /// of it (an alert, which tells the peer). They fit into a new socket.
    pub fn to_send(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        while self.session.wants_write() {
            // A vector takes everything.
            if self.session.write_tls(&mut bytes).is_err() {
                break;
            }
        }
        bytes
    }

    /// The number of bytes to read from the peer next, at most. No byte behind the handshake is
    /// among them. 0: no more.
    pub fn wanted(&self) -> usize {
        if !self.session.is_handshaking() {
            return 0;
        }
        self.record_length() - self.record.len()
    }

    /// Length of the record that is arriving, or of its header.
    fn record_length(&self) -> usize {
        match self.record.get(3..HEADER_BYTES) {
            Some(length) => HEADER_BYTES + usize::from(u16::from_be_bytes([length[0], length[1]])),
            None => HEADER_BYTES,
        }
    }

    /// Takes bytes from the peer, no more than [`Handshake::wanted`].
    ///
    /// # Errors
    /// When there will be no session.
    pub fn receive(&mut self, bytes: &[u8]) -> Result<(), HandshakeError> {
        self.received += bytes.len();
        self.record.extend_from_slice(bytes);
        if self.received.max(self.record_length()) > MAX_HANDSHAKE_BYTES {
            return Err(HandshakeError::Invalid("the handshake is too long".to_owned()));
        }
        if self.record.len() < HEADER_BYTES || self.record.len() < self.record_length() {
            return Ok(());
        }
        let mut record = &self.record[..];
        while !record.is_empty() {
            let read = self.session.read_tls(&mut record);
            // A slice does not fail, so this is the session's buffer, which is longer than a
            // record.
            let failed = |error: io::Error| HandshakeError::Invalid(error.to_string());
            if read.map_err(failed)? == 0 {
                return Err(HandshakeError::Invalid("the peer ended the session".to_owned()));
            }
            self.session.process_new_packets()?;
        }
        self.record.clear();
        Ok(())
    }

    /// Whether both sides have proved that they have the job key. The last bytes of
    /// [`Handshake::to_send`] may not have been taken yet.
    pub fn is_complete(&self) -> bool {
        !self.session.is_handshaking() && !self.session.wants_write()
    }

    /// The keys of the session.
    ///
    /// # Errors
    /// When the handshake is not complete.
    pub fn into_session(self) -> Result<Session, HandshakeError> {
        let secrets = self.session.dangerous_extract_secrets()?;
        let unknown = || HandshakeError::Invalid("an unknown cipher".to_owned());
        let [send, receive] = [secrets.tx, secrets.rx].map(TrafficKeys::new);
        Ok(Session { send: send.ok_or_else(unknown)?, receive: receive.ok_or_else(unknown)? })
    }
}

/// The keys of a session, as one side of it uses them.
pub struct Session {
    /// For what this side sends.
    pub send: TrafficKeys,
    /// For what the peer sends.
    pub receive: TrafficKeys,
}

impl Session {
    /// Both directions, for records that are made here.
    ///
    /// # Errors
    /// When the keys are no keys of their cipher.
    pub fn records(&self) -> Result<(Sealer, Opener), HandshakeError> {
        let ends = Sealer::new(&self.send).zip(Opener::new(&self.receive));
        ends.ok_or_else(|| HandshakeError::Invalid("keys of a wrong length".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::OVERHEAD;
    use evenkeel_protocol::JobKey;
    use proptest::prelude::*;

    fn identity(digit: &str) -> JobIdentity {
        JobIdentity::of(&JobKey::parse(&digit.repeat(64)).unwrap()).unwrap()
    }

    /// Passes bytes on as a socket does: as many as are wanted. `change` gets each record that
    /// passes, with its number.
    fn pass(
        bytes: Vec<u8>,
        to: &mut Handshake,
        change: &mut impl FnMut(&mut Vec<u8>),
    ) -> Result<Vec<u8>, HandshakeError> {
        let mut bytes = bytes;
        change(&mut bytes);
        let mut rest = &bytes[..];
        while !rest.is_empty() && to.wanted() > 0 {
            let (next, left) = rest.split_at(to.wanted().min(rest.len()));
            to.receive(next)?;
            rest = left;
        }
        Ok(rest.to_vec())
    }

    type Ends = [Result<(Sealer, Opener), HandshakeError>; 2];

    /// The outcome at the connector and at the listener.
    fn shake(near: &JobIdentity, far: &JobIdentity, mut change: impl FnMut(&mut Vec<u8>)) -> Ends {
        let mut connector = Handshake::connector(near).unwrap();
        let mut listener = Handshake::listener(far).unwrap();
        let unfinished = || HandshakeError::Invalid("unfinished".to_owned());
        for _ in 0..3 {
            let at_listener = pass(connector.to_send(), &mut listener, &mut change);
            let at_connector = pass(listener.to_send(), &mut connector, &mut change);
            if let Err(error) = at_listener {
                return [at_connector.map_or_else(Err, |_| Err(unfinished())), Err(error)];
            }
            if let Err(error) = at_connector {
                // The alert.
                let told = pass(connector.to_send(), &mut listener, &mut change);
                return [Err(error), told.map_or_else(Err, |_| Err(unfinished()))];
            }
        }
        [connector, listener].map(|end| match end.is_complete() {
            true => end.into_session().and_then(|session| session.records()),
            false => Err(unfinished()),
        })
    }

    #[test]
    fn handshake_between_holders_of_the_key_makes_a_session() {
        let [near, far] = shake(&identity("1"), &identity("1"), |_| {});
        let ((mut near_sealer, mut near_opener), (mut far_sealer, mut far_opener)) =
            (near.unwrap(), far.unwrap());
        for (sealer, opener) in
            [(&mut near_sealer, &mut far_opener), (&mut far_sealer, &mut near_opener)]
        {
            let mut record = vec![3; 100 + OVERHEAD];
            sealer.seal(&mut record).unwrap();
            assert_eq!(opener.open(&mut record), Ok(100));
            assert_eq!(record[HEADER_BYTES..][..100], [3; 100]);
        }
    }

    /// The other end is rustls's own.
    #[test]
    fn session_has_the_records_of_tls() {
        use std::io::{Read, Write};
        let identity = identity("1");
        let mut near = Handshake::connector(&identity).unwrap();
        let mut far = Handshake::listener(&identity).unwrap();
        while !near.is_complete() || !far.is_complete() {
            pass(near.to_send(), &mut far, &mut |_| {}).unwrap();
            pass(far.to_send(), &mut near, &mut |_| {}).unwrap();
        }
        let mut theirs = far.session;
        let (mut sealer, mut opener) = near.into_session().unwrap().records().unwrap();
        for text in [&b"first"[..], b"the second"] {
            let mut record = vec![0; text.len() + OVERHEAD];
            record[HEADER_BYTES..][..text.len()].copy_from_slice(text);
            sealer.seal(&mut record).unwrap();
            theirs.read_tls(&mut &record[..]).unwrap();
            theirs.process_new_packets().unwrap();
            let mut received = vec![0; text.len()];
            theirs.reader().read_exact(&mut received).unwrap();
            assert_eq!(received, text);
            theirs.writer().write_all(text).unwrap();
            let mut record = Vec::new();
            theirs.write_tls(&mut record).unwrap();
            assert_eq!(opener.open(&mut record), Ok(text.len()));
            assert_eq!(record[HEADER_BYTES..][..text.len()], *text);
        }
    }

    #[test]
    fn handshake_with_another_key_is_refused_by_name_on_both_sides() {
        let [near, far] = shake(&identity("1"), &identity("2"), |_| {});
        assert_eq!(near.err(), Some(HandshakeError::OtherKey));
        assert_eq!(far.err(), Some(HandshakeError::RefusedKey));
    }

    #[test]
    fn handshake_secrets_are_new_each_time() {
        let identity = identity("1");
        let sealed = || {
            let [near, _] = shake(&identity, &identity, |_| {});
            let mut record = vec![3; 100 + OVERHEAD];
            near.unwrap().0.seal(&mut record).unwrap();
            record
        };
        assert_ne!(sealed(), sealed());
    }

    #[test]
    fn handshake_is_bounded() {
        let mut listener = Handshake::listener(&identity("1")).unwrap();
        assert_eq!(listener.wanted(), HEADER_BYTES);
        let error = listener.receive(&[22, 3, 1, 0x40, 0]).unwrap_err();
        assert_eq!(error, HandshakeError::Invalid("the handshake is too long".to_owned()));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn handshake_with_any_flipped_bit_makes_no_session_at_both_ends(
            flight in 0..3usize, at: prop::sample::Index, bit in 0..8,
        ) {
            let identity = identity("1");
            let mut number = 0;
            let ends = shake(&identity, &identity, |bytes| {
                if number == flight && !bytes.is_empty() {
                    let at = at.index(bytes.len());
                    bytes[at] ^= 1u8 << bit;
                }
                number += 1;
            });
            // The connector may be done before its last flight is changed. A session with itself
            // carries nothing.
            let both = ends.iter().all(Result::is_ok);
            // A few bits mean nothing: the version of the first record.
            if both {
                let [near, far] = ends;
                let mut record = vec![3; 10 + OVERHEAD];
                near.unwrap().0.seal(&mut record).unwrap();
                prop_assert_eq!(far.unwrap().1.open(&mut record), Ok(10));
            }
        }

        #[test]
        fn handshake_of_any_bytes_makes_no_session_and_no_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..600), begin in 0..3, of_connector: bool,
        ) {
            let identity = identity("1");
            let mut bytes = bytes;
            if begin > 0 && bytes.len() > HEADER_BYTES + 4 {
                let length = (bytes.len() - HEADER_BYTES) as u16;
                bytes[..3].copy_from_slice(&[22, 3, 3]);
                bytes[3..5].copy_from_slice(&length.to_be_bytes());
                if begin == 2 {
                    let message = length - 4;
                    bytes[5] = if of_connector { 2 } else { 1 };
                    bytes[6] = 0;
                    bytes[7..9].copy_from_slice(&message.to_be_bytes());
                }
            }
            let mut end = match of_connector {
                true => Handshake::connector(&identity),
                false => Handshake::listener(&identity),
            }.unwrap();
            end.to_send();
            let mut rest = &bytes[..];
            while !rest.is_empty() && end.wanted() > 0 {
                let (next, left) = rest.split_at(end.wanted().min(rest.len()));
                if end.receive(next).is_err() {
                    break;
                }
                end.to_send();
                rest = left;
            }
            prop_assert!(!end.is_complete());
        }
    }
}
