//! Compiles a program against the header as nccl-tests are compiled, links it with the library, and runs its ranks.

#![allow(clippy::unwrap_used, reason = "a test that cannot continue fails there")]

use std::env;
use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

const FOLDER: &str = env!("CARGO_MANIFEST_DIR");

/// The variables of launchers, which the environment of the tests may have.
const LAUNCHERS: [&str; 12] = [
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "JOB_COMPLETION_INDEX",
    "EVENKEEL_STORE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "SLURM_PROCID",
    "SLURM_NTASKS",
];

/// The library that was built with this test.
fn library() -> PathBuf {
    let test = env::current_exe().unwrap();
    // target/PROFILE/deps/test-HASH: the library lies in deps or above.
    let deps = test.parent().unwrap();
    let places = [deps, deps.parent().unwrap()].map(|place| place.join("libevenkeel_mpi.so"));
    let newest = places
        .into_iter()
        .filter(|place| place.exists())
        .max_by_key(|place| place.metadata().unwrap().modified().unwrap());
    newest.expect("libevenkeel_mpi.so beside the test")
}

/// The programs, in C and in C++, and the folder that is given to nccl-tests as MPI_HOME: laid out as in the image.
static PROGRAMS: LazyLock<[PathBuf; 2]> = LazyLock::new(|| {
    let home = Path::new(env!("CARGO_TARGET_TMPDIR")).join("mpi");
    let lib = home.join("lib");
    fs::create_dir_all(&lib).unwrap();
    link(&library(), &lib.join("libevenkeel-mpi.so"));
    let for_the_linker = lib.join("libmpi.so");
    link(Path::new("libevenkeel-mpi.so"), &for_the_linker);
    let languages = [("cc", "c", "-std=c11"), ("c++", "c++", "-std=c++17")];
    let programs = languages.map(|(compiler, language, standard)| {
        let program = home.join(format!("ranks-{language}"));
        let built = Command::new(compiler)
            .args(["-x", language, standard, "-D_DEFAULT_SOURCE", "-O1"])
            .args(["-Wall", "-Wextra", "-Wpedantic", "-Werror"])
            .arg(format!("-I{FOLDER}/include"))
            .arg(format!("{FOLDER}/tests/ranks.c"))
            .args(["-x", "none"])
            .arg(format!("-L{}", lib.display()))
            .arg(format!("-Wl,-rpath,{}", lib.display()))
            .args(["-lmpi", "-o"])
            .arg(&program)
            .status();
        assert!(built.is_ok_and(|built| built.success()), "{compiler}: apt-get install g++");
        program
    });
    // The programs do not load another library of this name where there is one.
    fs::remove_file(&for_the_linker).unwrap();
    programs
});

/// Makes a symbolic link, also in the place of an earlier run's.
fn link(to: &Path, at: &Path) {
    let _ = fs::remove_file(at);
    symlink(to, at).unwrap();
}

/// One rank, killed at the end.
struct Rank(Option<Child>);

/// How a rank ended.
#[derive(Debug)]
struct Ended {
    status: Option<i32>,
    out: String,
    err: String,
}

impl Rank {
    fn start(program: &Path, what: &str, variables: &[(&str, String)]) -> Self {
        let mut command = Command::new(program);
        for name in LAUNCHERS {
            command.env_remove(name);
        }
        let child = command
            .arg(what)
            .env("NCCL_SOCKET_IFNAME", "lo")
            .env("EVENKEEL_MPI_TIMEOUT", "60")
            .envs(variables.iter().map(|(name, value)| (name, value)))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Self(Some(child))
    }

    fn wait(mut self) -> Ended {
        let ended = self.0.take().unwrap().wait_with_output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Ended { status: ended.status.code(), out: text(ended.stdout), err: text(ended.stderr) }
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The variables of a rank where rank 0 serves the store, as in an Indexed Job or under a launcher.
fn variables(
    rank: &'static str,
    number: usize,
    size: usize,
    port: u16,
) -> Vec<(&'static str, String)> {
    vec![
        (rank, number.to_string()),
        ("WORLD_SIZE", size.to_string()),
        ("MASTER_ADDR", "127.0.0.1".to_owned()),
        ("MASTER_PORT", port.to_string()),
    ]
}

/// Taken for a moment and given back: the kernel does not hand it out again soon.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Runs these ranks of a program of `size`.
fn run(
    program: &Path,
    what: &str,
    size: usize,
    ranks: &[usize],
    more: &[(&'static str, &str)],
) -> Vec<Ended> {
    let port = free_port();
    let started: Vec<_> = ranks
        .iter()
        .map(|rank| {
            let mut variables = variables("RANK", *rank, size, port);
            variables.extend(more.iter().map(|(name, value)| (*name, (*value).to_owned())));
            Rank::start(program, what, &variables)
        })
        .collect();
    started.into_iter().map(Rank::wait).collect()
}

/// Asserts that a rank ended with status 1 and one line, and returns the line.
fn one_line(ended: &Ended) -> &str {
    assert_eq!(ended.status, Some(1), "{ended:?}");
    assert_eq!(ended.err.lines().count(), 1, "{ended:?}");
    ended.err.trim_end()
}

#[test]
fn mpi_functions_give_the_right_results() {
    for program in &*PROGRAMS {
        for size in 1..=4 {
            let ranks: Vec<_> = (0..size).collect();
            let ended = run(program, "everything", size, &ranks, &[]);
            for (rank, ended) in ended.iter().enumerate() {
                let line = format!("rank {rank} of {size}: all as expected\n");
                assert!(ended.status == Some(0) && ended.out == line, "{ended:?}");
                assert_eq!(ended.err, "");
            }
        }
    }
}

/// The variables are those of the pods; the test runs no cluster.
#[test]
fn mpi_ranks_of_an_indexed_job_find_each_other() {
    let port = free_port();
    let start = |rank| {
        let variables = variables("JOB_COMPLETION_INDEX", rank, 2, port);
        Rank::start(&PROGRAMS[0], "everything", &variables)
    };
    // Rank 0, whose pod has the address, comes last.
    let ranks = [start(1), start(0)];
    for (ended, rank) in ranks.map(Rank::wait).iter().zip([1, 0]) {
        let line = format!("rank {rank} of 2: all as expected\n");
        assert!(ended.status == Some(0) && ended.out == line, "{ended:?}");
    }
}

#[test]
fn mpi_rank_alone_needs_no_address() {
    let variables = [("RANK", "0".to_owned()), ("WORLD_SIZE", "1".to_owned())];
    let ended = Rank::start(&PROGRAMS[0], "everything", &variables).wait();
    assert!(ended.status == Some(0), "{ended:?}");
}

#[test]
fn mpi_init_names_the_missing_rank_within_its_timeout() {
    let program = &PROGRAMS[0];
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("mpi-store");
    let _ = fs::remove_dir_all(&folder);
    let file = format!("file:{}", folder.display());
    let timeout = ("EVENKEEL_MPI_TIMEOUT", "2");
    // A store that rank 0 serves is gone when rank 0 has ended, and may be gone before another rank has asked it.
    for (more, who_knows) in [(&[timeout, ("EVENKEEL_STORE", &file)][..], 2), (&[timeout][..], 1)] {
        let begun = Instant::now();
        let ended = run(program, "everything", 3, &[0, 1], more);
        for (rank, ended) in ended.iter().enumerate() {
            let line = one_line(ended);
            let begins = format!("evenkeel-mpi: rank {rank} of 3: MPI_Init: ");
            assert!(line.starts_with(&begins), "{line}");
            assert!(rank >= who_knows || line.contains("2 of 3 did not join"), "{line}");
        }
        assert!(begun.elapsed() < 20 * Duration::from_secs(2), "{:?}", begun.elapsed());
    }
}

#[test]
fn mpi_init_says_that_rank_0_is_missing() {
    let ended = run(&PROGRAMS[0], "everything", 2, &[1], &[("EVENKEEL_MPI_TIMEOUT", "1")]);
    let line = one_line(&ended[0]);
    assert!(line.starts_with("evenkeel-mpi: rank 1 of 2: MPI_Init: "), "{line}");
    assert!(line.ends_with("rank 0 serves it"), "{line}");
}

/// Long before the timeout, as the process is known to be gone.
#[test]
fn mpi_ranks_end_when_one_is_lost() {
    let program = &PROGRAMS[0];
    for what in ["killed", "exits"] {
        let begun = Instant::now();
        let ended = run(program, what, 4, &[0, 1, 2, 3], &[]);
        assert!(begun.elapsed() < Duration::from_secs(60), "{what}: {:?}", begun.elapsed());
        for (rank, ended) in ended[..3].iter().enumerate() {
            let line = one_line(ended);
            let begins = format!("evenkeel-mpi: rank {rank} of 4: MPI_Barrier: ");
            assert!(line.starts_with(&begins) && line.contains("rank 3"), "{what}: {line}");
            assert_eq!(ended.out, "a line that was not flushed\n", "{what}");
        }
    }
}

#[test]
fn mpi_error_of_one_rank_ends_all_with_its_reason() {
    let ended = run(&PROGRAMS[0], "wrong", 3, &[0, 1, 2], &[]);
    let reason = "MPI_Allreduce: MPI_BYTE is no number";
    for (rank, ended) in ended.iter().enumerate() {
        let line = one_line(ended);
        let begins = format!("evenkeel-mpi: rank {rank} of 3: MPI_Allreduce: ");
        assert!(line.starts_with(&begins) && line.contains(reason), "{line}");
        assert!(rank == 0 || line.contains("rank 0"), "{line}");
    }
}

#[test]
fn mpi_calls_outside_init_and_finalize_are_errors() {
    let alone = [("RANK", "0".to_owned()), ("WORLD_SIZE", "1".to_owned())];
    for (what, says) in [
        ("too early", "MPI_Comm_rank: MPI_Init was not called before"),
        ("too late", "MPI_Barrier: MPI_Finalize was called before"),
    ] {
        let ended = Rank::start(&PROGRAMS[0], what, &alone).wait();
        let line = one_line(&ended);
        assert_eq!(line, format!("evenkeel-mpi: rank 0 of 1: {says}"));
    }
}

#[test]
fn mpi_init_names_the_variables_that_are_missing_or_wrong() {
    let alone = ("RANK", "0".to_owned());
    let size = |size: &str| ("WORLD_SIZE", size.to_owned());
    for (variables, says) in [
        (vec![], "JOB_COMPLETION_INDEX and WORLD_SIZE"),
        (vec![alone.clone(), size("two")], "WORLD_SIZE=\"two\""),
        (vec![alone.clone(), size("2")], "MASTER_ADDR and MASTER_PORT"),
        (
            vec![alone.clone(), size("1"), ("EVENKEEL_MPI_TIMEOUT", "soon".to_owned())],
            "EVENKEEL_MPI_TIMEOUT=\"soon\" is not a number of seconds",
        ),
    ] {
        let ended = Rank::start(&PROGRAMS[0], "everything", &variables).wait();
        let line = one_line(&ended);
        assert!(line.contains("MPI_Init: ") && line.contains(says), "{line}");
    }
}
