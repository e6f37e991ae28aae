//! Who may take part in a session: the processes with the job's key.

use std::fmt;
use std::sync::Arc;

use evenkeel_protocol::JobKey;
use ring::signature::{Ed25519KeyPair, KeyPair};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{AlwaysResolvesClientRawPublicKeys, Resumption};
use rustls::crypto::ring::cipher_suite::{
    TLS13_AES_128_GCM_SHA256, TLS13_CHACHA20_POLY1305_SHA256,
};
use rustls::crypto::ring::{default_provider, kx_group, sign};
use rustls::crypto::{CryptoProvider, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{
    CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime,
};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{AlwaysResolvesServerRawPublicKeys, NoServerSessionStorage};
use rustls::sign::CertifiedKey;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error as TlsError,
    PeerIncompatible, ServerConfig, SignatureScheme,
};

/// What comes before the 32 bytes of an Ed25519 public key in its SubjectPublicKeyInfo (RFC 8410,
/// section 4).
const PUBLIC_KEY_PREFIX: [u8; 12] =
    [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];
/// What comes before the 32 bytes of an Ed25519 private key in PKCS #8 (RFC 8410, section 7).
const PRIVATE_KEY_PREFIX: [u8; 16] = [
    0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20,
];

/// The identity that all processes of a job share, one for each role in the handshake. Both follow
/// from the job key.
#[derive(Clone)]
pub struct JobIdentity {
    connector: Arc<ClientConfig>,
    listener: Arc<ServerConfig>,
}

// Secrets stay out of logs.
impl fmt::Debug for JobIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JobIdentity(..)")
    }
}

impl JobIdentity {
    /// The identity of the processes that have this key.
    ///
    /// # Errors
    /// When the TLS library does not accept what is derived from the key.
    pub fn of(key: &JobKey) -> Result<Self, TlsError> {
        let provider = Arc::new(provider(has_aes()));
        let (connector, connector_key) = key_pair(key, "evenkeel tls connector")?;
        let (listener, listener_key) = key_pair(key, "evenkeel tls listener")?;
        let peer = |public_key| Arc::new(JobMember { public_key, provider: Arc::clone(&provider) });
        let versions = [&rustls::version::TLS13];
        let mut client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&versions)?
            .dangerous()
            .with_custom_certificate_verifier(peer(listener_key))
            .with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(connector)));
        client.enable_sni = false;
        client.resumption = Resumption::disabled();
        client.enable_secret_extraction = true;
        let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&versions)?
            .with_client_cert_verifier(peer(connector_key))
            .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(listener)));
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        server.enable_secret_extraction = true;
        // One end without AES instructions is the slower one, so it decides.
        server.ignore_client_order = !has_aes();
        Ok(Self { connector: Arc::new(client), listener: Arc::new(server) })
    }

    /// For connections that this process opens.
    pub fn connector(&self) -> &Arc<ClientConfig> {
        &self.connector
    }

    /// For connections that this process accepts.
    pub fn listener(&self) -> &Arc<ServerConfig> {
        &self.listener
    }
}

/// The algorithms of all sessions. AES-GCM is faster where the processor has instructions for it,
/// and slow elsewhere.
fn provider(has_aes: bool) -> CryptoProvider {
    let mut cipher_suites = vec![TLS13_AES_128_GCM_SHA256, TLS13_CHACHA20_POLY1305_SHA256];
    if !has_aes {
        cipher_suites.reverse();
    }
    CryptoProvider { cipher_suites, kx_groups: vec![kx_group::X25519], ..default_provider() }
}

/// Whether the processor has instructions for AES and for GCM's multiplication.
fn has_aes() -> bool {
    #[cfg(target_arch = "x86_64")]
    let has_aes = is_x86_feature_detected!("aes") && is_x86_feature_detected!("pclmulqdq");
    #[cfg(target_arch = "aarch64")]
    let has_aes = std::arch::is_aarch64_feature_detected!("aes")
        && std::arch::is_aarch64_feature_detected!("pmull");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let has_aes = false;
    has_aes
}

/// The key pair of a role, and its public key as peers expect it.
fn key_pair(key: &JobKey, role: &str) -> Result<(Arc<CertifiedKey>, Vec<u8>), TlsError> {
    let seed = key.derive(role);
    let unusable = |_| TlsError::General("a derived key is not valid".to_owned());
    let pair = Ed25519KeyPair::from_seed_unchecked(&seed).map_err(unusable)?;
    let public_key = [&PUBLIC_KEY_PREFIX[..], pair.public_key().as_ref()].concat();
    let private_key = [&PRIVATE_KEY_PREFIX[..], &seed].concat();
    let signer = sign::any_eddsa_type(&PrivatePkcs8KeyDer::from(private_key))?;
    let certificate = vec![CertificateDer::from(public_key.clone())];
    Ok((Arc::new(CertifiedKey::new(certificate, signer)), public_key))
}

/// Accepts the one public key that follows from the job key.
#[derive(Debug)]
struct JobMember {
    public_key: Vec<u8>,
    provider: Arc<CryptoProvider>,
}

impl JobMember {
    fn check(&self, presented: &CertificateDer<'_>) -> Result<(), TlsError> {
        // A public key is no secret, so the comparison may take a time that depends on it.
        if presented.as_ref() == self.public_key {
            Ok(())
        } else {
            Err(TlsError::InvalidCertificate(CertificateError::UnknownIssuer))
        }
    }

    fn verify(
        &self,
        message: &[u8],
        presented: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        let key = SubjectPublicKeyInfoDer::from(presented.as_ref());
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature_with_raw_key(message, &key, signature, algorithms)
    }
}

impl ServerCertVerifier for JobMember {
    fn verify_server_cert(
        &self,
        presented: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, TlsError> {
        self.check(presented).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        Err(PeerIncompatible::Tls12NotOffered.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        presented: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        self.verify(message, presented, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

impl ClientCertVerifier for JobMember {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        presented: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, TlsError> {
        self.check(presented).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        Err(PeerIncompatible::Tls12NotOffered.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        presented: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        self.verify(message, presented, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cipher_without_aes_instructions_is_chacha20() {
        let first = |has_aes| provider(has_aes).cipher_suites[0].suite();
        assert_eq!(first(true), TLS13_AES_128_GCM_SHA256.suite());
        assert_eq!(first(false), TLS13_CHACHA20_POLY1305_SHA256.suite());
    }

    #[test]
    fn identity_follows_from_the_job_key_and_the_role() {
        let key = |digit: &str| JobKey::parse(&digit.repeat(64)).unwrap();
        let public = |key: &JobKey, role: &str| key_pair(key, role).unwrap().1;
        assert_eq!(public(&key("1"), "a"), public(&key("1"), "a"));
        assert_ne!(public(&key("1"), "a"), public(&key("1"), "b"));
        assert_ne!(public(&key("1"), "a"), public(&key("2"), "a"));
        assert_eq!(format!("{:?}", JobIdentity::of(&key("1")).unwrap()), "JobIdentity(..)");
    }
}
