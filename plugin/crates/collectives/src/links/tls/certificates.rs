//! Authentication: both sides must present a certificate that the group's authority has signed. Names in certificates do not
//! matter: the store tells which address belongs to which rank.

use std::path::Path;
use std::sync::Arc;

use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{
    ClientConfig, DigitallySignedStruct, Error as TlsError, PeerIncompatible, RootCertStore,
    ServerConfig, SignatureScheme,
};

use crate::error::{Error, Result};

/// The TLS configuration for both directions: this rank's certificate and the authority that it trusts.
#[derive(Clone)]
pub(super) struct Certificates {
    pub(super) client: Arc<ClientConfig>,
    pub(super) server: Arc<ServerConfig>,
}

impl Certificates {
    /// Reads PEM files. `authority` may be a folder of them.
    pub(super) fn read(certificate: &Path, key: &Path, authority: &Path) -> Result<Self> {
        let chain = chain(certificate)?;
        let own = PrivateKeyDer::from_pem_file(key).map_err(|error| unreadable(key, &error))?;
        let roots = Arc::new(roots(authority)?);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let unusable = |error: TlsError| {
            let (certificate, key) = (certificate.display(), key.display());
            Error::argument(format!(
                "TLS: the certificate {certificate} with the key {key}: {error}"
            ))
        };
        let versions = [&rustls::version::TLS13];
        let signed =
            Arc::new(Signed { roots: Arc::clone(&roots), provider: Arc::clone(&provider) });
        let mut client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&versions)
            .map_err(unusable)?
            .dangerous()
            .with_custom_certificate_verifier(signed)
            .with_client_auth_cert(chain.clone(), own.clone_key())
            .map_err(unusable)?;
        client.enable_sni = false;
        client.resumption = Resumption::disabled();
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider))
            .build()
            .map_err(|error| Error::argument(format!("TLS: {}: {error}", authority.display())))?;
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&versions)
            .map_err(unusable)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, own)
            .map_err(unusable)?;
        // The other side reads no session tickets. Unread bytes at close would reset the connection and lose what was sent.
        server.send_tls13_tickets = 0;
        Ok(Self { client: Arc::new(client), server: Arc::new(server) })
    }
}

fn unreadable(path: &Path, error: &dyn std::fmt::Display) -> Error {
    Error::argument(format!("TLS: {}: {error}: a PEM file is needed", path.display()))
}

/// The certificates in a file, at least one.
fn chain(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let all = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect::<std::result::Result<Vec<_>, _>>);
    let all = all.map_err(|error| unreadable(path, &error))?;
    if all.is_empty() { Err(unreadable(path, &"no certificate in it")) } else { Ok(all) }
}

fn roots(authority: &Path) -> Result<RootCertStore> {
    let files = if authority.is_dir() {
        let entries = authority.read_dir().and_then(Iterator::collect::<std::io::Result<Vec<_>>>);
        let entries = entries.map_err(|error| unreadable(authority, &error))?;
        entries.iter().map(std::fs::DirEntry::path).filter(|path| path.is_file()).collect()
    } else {
        vec![authority.to_owned()]
    };
    let mut roots = RootCertStore::empty();
    for file in &files {
        for certificate in chain(file)? {
            roots.add(certificate).map_err(|error| unreadable(file, &error))?;
        }
    }
    if roots.is_empty() { Err(unreadable(authority, &"no certificate in it")) } else { Ok(roots) }
}

/// Accepts every certificate that the authority has signed, whatever its name.
#[derive(Debug)]
struct Signed {
    roots: Arc<RootCertStore>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Signed {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> std::result::Result<ServerCertVerified, TlsError> {
        let certificate = ParsedCertificate::try_from(end_entity)?;
        let algorithms = self.provider.signature_verification_algorithms.all;
        rustls::client::verify_server_cert_signed_by_trust_anchor(
            &certificate,
            &self.roots,
            intermediates,
            now,
            algorithms,
        )?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, TlsError> {
        Err(PeerIncompatible::Tls12NotOffered.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, TlsError> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
