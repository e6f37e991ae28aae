//! Compiles C programs against the header, links them with the library and runs them.

#![allow(clippy::unwrap_used, reason = "a test that cannot continue fails there")]

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

const FOLDER: &str = env!("CARGO_MANIFEST_DIR");

/// The folder in which the library was built.
fn library() -> PathBuf {
    let test = env::current_exe().unwrap();
    // target/PROFILE/deps/test-HASH: the library lies in deps or above.
    let deps = test.parent().unwrap();
    let places = [deps, deps.parent().unwrap()];
    let has_library = |place: &&&Path| place.join("libevenkeel.so").exists();
    let newest = places
        .iter()
        .filter(has_library)
        .max_by_key(|place| place.join("libevenkeel.so").metadata().unwrap().modified().unwrap());
    newest.expect("libevenkeel.so beside the test").to_path_buf()
}

/// Compiles a program and returns its path.
fn compile(source: &str) -> PathBuf {
    let library = library();
    let name = Path::new(source).file_stem().unwrap();
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let built = Command::new("cc")
        .args(["-std=c11", "-D_DEFAULT_SOURCE", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror"])
        .arg(format!("-I{FOLDER}/include"))
        .arg(format!("{FOLDER}/{source}"))
        .arg(format!("-L{}", library.display()))
        .arg(format!("-Wl,-rpath,{}", library.display()))
        .args(["-levenkeel", "-o"])
        .arg(&program)
        .status()
        .unwrap();
    assert!(built.success());
    program
}

/// A temporary folder, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = env::temp_dir().join(format!("evenkeel-c-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Creates an authority and a certificate for all ranks. Returns the variables that name the files.
fn tls_files(folder: &Path) -> [(&'static str, PathBuf); 3] {
    let file = |name: &str, text: String| {
        let path = folder.join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::new(vec![]).unwrap();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let authority = file("ca.pem", params.self_signed(&key).unwrap().pem());
    let issuer = rcgen::Issuer::new(params, key);
    let key = rcgen::KeyPair::generate().unwrap();
    let params = rcgen::CertificateParams::new(vec!["rank".to_owned()]).unwrap();
    let certificate = file("rank.pem", params.signed_by(&key, &issuer).unwrap().pem());
    [
        ("EVENKEEL_TLS_CERT", certificate),
        ("EVENKEEL_TLS_KEY", file("rank.key", key.serialize_pem())),
        ("EVENKEEL_TLS_CA", authority),
    ]
}

#[test]
fn c_program_calls_every_function_on_three_ranks() {
    let program = compile("tests/three_ranks.c");
    for transport in ["tcp:lo", "shm", "tls:lo"] {
        let folder = Folder::new(&transport.replace(':', "-"));
        let certificates = Folder::new(&format!("{}-certificates", transport.replace(':', "-")));
        let ran = Command::new(&program)
            .arg(&folder.0)
            .arg(transport)
            .envs(tls_files(&certificates.0))
            .output()
            .unwrap();
        let (out, err) =
            (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
        assert!(ran.status.success() && out.contains("3 ranks: all as expected"), "{out}{err}");
    }
}

/// The test asks as `kubectl evenkeel why` does: by a file beside those of the flight recorder.
#[test]
fn c_program_answers_a_request_for_its_flight_record() {
    let program = compile("tests/asked.c");
    let (store, folder) = (Folder::new("asked-store"), Folder::new("asked"));
    let start = |rank: &str| {
        let mut command = Command::new(&program);
        command.arg(&store.0).arg(rank).stdin(Stdio::piped());
        command.env("EVENKEEL_FLIGHT_RECORDER", folder.0.join("rank_")).spawn().unwrap()
    };
    let mut ranks = [start("0"), start("1")];
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        std::fs::write(folder.0.join(".evenkeel-request"), "asked").unwrap();
        let record = std::fs::read_to_string(folder.0.join(".evenkeel-record-0.json"));
        let record = record.unwrap_or_default();
        let calls = [r#""operation":"all_reduce","type":"float64""#, r#""state":"started""#];
        let has_other = folder.0.join(".evenkeel-record-1.json").exists();
        if has_other && calls.iter().all(|part| record.contains(part)) {
            break;
        }
        assert!(Instant::now() < deadline, "{record}");
        assert_eq!(ranks[0].try_wait().unwrap(), None, "{record}");
        thread::sleep(Duration::from_millis(100));
    }
    for rank in ranks.iter_mut().rev() {
        drop(rank.stdin.take());
        assert!(rank.wait().unwrap().success());
    }
}

#[test]
fn c_program_refuses_stores_in_a_forked_child() {
    let program = compile("tests/forked_child.c");
    let server = evenkeel_collectives::TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let folder = Folder::new("forked-child");
    let ran = Command::new(&program)
        .arg(format!("tcp://{}", server.address()))
        .arg(format!("file:{}", folder.0.display()))
        .output()
        .unwrap();
    let (out, err) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success() && out == "as expected\n", "{out}{err}");
}

/// The test sets the variables that OpenMPI's mpirun sets. It does not run mpirun itself.
#[test]
fn c_example_runs_with_openmpi_variables() {
    let program = compile("examples/allreduce.c");
    let folder = Folder::new("example");
    let ranks: Vec<_> = (0..3)
        .map(|rank| {
            Command::new(&program)
                .env("OMPI_COMM_WORLD_RANK", rank.to_string())
                .env("OMPI_COMM_WORLD_SIZE", "3")
                .env("EVENKEEL_STORE", format!("file:{}", folder.0.display()))
                .env("NCCL_SOCKET_IFNAME", "lo")
                .stdout(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    for (rank, child) in ranks.into_iter().enumerate() {
        let ran = child.wait_with_output().unwrap();
        let out = String::from_utf8_lossy(&ran.stdout);
        assert!(ran.status.success(), "{out}");
        assert_eq!(out, format!("rank {rank} of 3: 3\n"));
    }
    let alone =
        Command::new(&program).env_remove("RANK").env_remove("WORLD_SIZE").output().unwrap();
    let err = String::from_utf8_lossy(&alone.stderr);
    assert_eq!(alone.status.code(), Some(1));
    assert!(err.contains("RANK and WORLD_SIZE") && err.lines().count() == 1, "{err}");
}
