//! Test support: ranks as threads, a certificate authority, a temporary folder, a Redis server.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};

use crate::{Auto, Group, MemoryStore, Tcp, Tls, TransportKind};

/// The timeout of operations in tests. It is reached only when something is broken.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// Every transport that works on this machine.
pub(crate) fn transports() -> [TransportKind; 4] {
    let tcp = || Tcp::on("lo").unwrap();
    let tls = Authority::new("ranks").tls("rank");
    [
        TransportKind::SharedMemory,
        TransportKind::Tcp(tcp()),
        TransportKind::Tls(tls),
        TransportKind::Auto(Auto::new(tcp())),
    ]
}

/// A certificate authority, in a folder that is removed afterwards.
pub(crate) struct Authority {
    folder: Folder,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    pub(crate) fn new(name: &str) -> Self {
        let folder = Folder::new();
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        std::fs::write(folder.path().join("ca.pem"), params.self_signed(&key).unwrap().pem())
            .unwrap();
        Self { folder, issuer: Issuer::new(params, key) }
    }

    /// The file with the authority's certificate.
    pub(crate) fn file(&self) -> PathBuf {
        self.folder.path().join("ca.pem")
    }

    /// Signs a certificate. Returns the files with the certificate and its key.
    pub(crate) fn sign(&self, name: &str) -> (PathBuf, PathBuf) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let files = ["pem", "key"].map(|kind| self.folder.path().join(format!("{name}.{kind}")));
        std::fs::write(&files[0], certificate.pem()).unwrap();
        std::fs::write(&files[1], key.serialize_pem()).unwrap();
        files.into()
    }

    /// TLS for a rank that trusts the authority and has a certificate from it.
    pub(crate) fn tls(&self, name: &str) -> Tls {
        let (certificate, key) = self.sign(name);
        Tls::new(Tcp::on("lo").unwrap(), &certificate, &key, &self.file()).unwrap()
    }
}

/// Runs ranks as threads until all have finished.
pub(crate) fn run_ranks(size: usize, transport: &TransportKind, rank: impl Fn(&Group) + Sync) {
    run_ranks_with(size, |_| transport.clone(), rank);
}

/// As [`run_ranks`], each with its own transport.
pub(crate) fn run_ranks_with(
    size: usize,
    transport: impl Fn(usize) -> TransportKind + Sync,
    rank: impl Fn(&Group) + Sync,
) {
    run_ranks_of(size, transport, |group| rank(&group));
}

/// As [`run_ranks`], for groups that start requests.
pub(crate) fn run_ranks_shared(
    size: usize,
    transport: &TransportKind,
    rank: impl Fn(&Arc<Group>) + Sync,
) {
    run_ranks_of(size, |_| transport.clone(), |group| rank(&Arc::new(group)));
}

fn run_ranks_of(
    size: usize,
    transport: impl Fn(usize) -> TransportKind + Sync,
    rank: impl Fn(Group) + Sync,
) {
    let store = MemoryStore::new();
    thread::scope(|scope| {
        for number in 0..size {
            let (store, rank, transport) = (&store, &rank, transport(number));
            scope.spawn(move || {
                rank(Group::join(store, number, size, &transport, TEST_TIMEOUT).unwrap())
            });
        }
    });
}

/// A temporary folder, removed with its contents.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        let path = std::env::temp_dir().join(format!(
            "evenkeel-{:016x}",
            u64::from_le_bytes(evenkeel_transport::random().unwrap())
        ));
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A Redis server, which exits with this process at the latest.
pub(crate) struct RedisServer {
    child: Child,
    scheme: &'static str,
    port: u16,
    _folder: Folder,
}

impl RedisServer {
    pub(crate) fn start() -> Self {
        Self::start_with("redis", &[])
    }

    /// With a certificate of this authority.
    pub(crate) fn start_with_tls(authority: &Authority) -> Self {
        let (certificate, key) = authority.sign("127.0.0.1");
        let file = |path: PathBuf| path.to_str().unwrap().to_owned();
        let (certificate, key, authority) = (file(certificate), file(key), file(authority.file()));
        let files = ["--tls-cert-file", &certificate, "--tls-key-file", &key];
        let rest = ["--tls-ca-cert-file", &authority, "--tls-auth-clients", "no"];
        Self::start_with("rediss", &[&files[..], &rest].concat())
    }

    fn start_with(scheme: &'static str, options: &[&str]) -> Self {
        let folder = Folder::new();
        // Taken for a moment and given back: the kernel does not hand it out again soon.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let number = port.to_string();
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "redis-server", "--bind", "127.0.0.1", "--save", ""])
            .args(match scheme {
                "redis" => vec!["--port", &number],
                _ => vec!["--port", "0", "--tls-port", &number],
            })
            .args(options)
            .arg("--dir")
            .arg(folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .expect("setpriv and redis-server are needed: apt-get install util-linux redis-server");
        let mut server = Self { child, scheme, port, _folder: folder };
        let deadline = Instant::now() + TEST_TIMEOUT;
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            let ended = server.child.try_wait().unwrap();
            assert!(ended.is_none() && Instant::now() < deadline, "redis-server: {ended:?}");
            thread::yield_now();
        }
        server
    }

    pub(crate) fn address(&self) -> String {
        format!("{}://127.0.0.1:{}", self.scheme, self.port)
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
