//! Ranks and servers that are lost, wrong or do not respond: the error names them.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use evenkeel_reduction::{Client, MAX_RANKS, Member, TreePosition};
use evenkeel_reduction_kernels::{DataType, Op};
use evenkeel_transport::{Nonce, NullNotify};

use crate::harness::{
    KEY, Running, TIMEOUT, all_reduce, begin, data, expected, join, join_within, members, names,
    options, server, server_with, transport,
};

const KIND: DataType = DataType::Float32;

fn vector() -> Vec<u8> {
    data(1, KIND, 1 << 20)
}

/// The error of an operation that fails.
fn error_of(client: &Client) -> String {
    all_reduce(client, &vector(), KIND, Op::Sum).unwrap_err().to_string()
}

#[test]
fn lost_rank_is_named_at_other_ranks() {
    let servers = [server(), server()];
    let transport = transport(&[]);
    let mut clients: Vec<_> = members(3, "lost")
        .iter()
        .map(|member| join(&transport, &names(&servers), member))
        .collect();
    // It is lost in the middle of an operation.
    let lost = clients.remove(1);
    let running = begin(&lost, &vector(), KIND, Op::Sum).unwrap();
    drop(running);
    drop(lost);
    thread::scope(|scope| {
        for client in &clients {
            scope.spawn(|| {
                let error = error_of(client);
                assert!(error.contains("rank 1") && error.contains("127.0.0.1"), "{error}");
                // Later operations fail in the same way.
                assert_eq!(error_of(client), error);
            });
        }
    });
    // The servers still serve other communicators.
    drop(clients);
    let client = join(&transport, &names(&servers), &members(1, "next")[0]);
    assert_eq!(all_reduce(&client, &vector(), KIND, Op::Sum).unwrap(), vector());
}

#[test]
fn rank_that_leaves_early_is_named() {
    let servers = [server()];
    let transport = transport(&[]);
    let mut clients: Vec<_> = members(2, "left")
        .iter()
        .map(|member| join(&transport, &names(&servers), member))
        .collect();
    drop(clients.pop());
    let error = error_of(&clients[0]);
    assert!(error.contains("rank 1") && error.contains("left"), "{error}");
}

#[test]
fn lost_server_is_named_at_all_ranks() {
    let mut servers = vec![server(), server()];
    let names = names(&servers);
    let transport = transport(&[]);
    let members = members(2, "server");
    let clients: Vec<_> = members.iter().map(|member| join(&transport, &names, member)).collect();
    let begun = begin(&clients[0], &vector(), KIND, Op::Sum).unwrap();
    drop(servers.pop());
    let begin = Instant::now();
    // The first rank that detects it reports it to the other through the other server.
    for error in [begun.finish().unwrap_err().to_string(), error_of(&clients[1])] {
        assert!(error.contains(&format!("reduction server {}", names[1])), "{error}");
    }
    assert!(begin.elapsed() < TIMEOUT);
}

#[test]
fn mismatched_operations_are_both_named() {
    let servers = [server()];
    let transport = transport(&[]);
    let clients: Vec<_> = members(2, "differ")
        .iter()
        .map(|member| join(&transport, &names(&servers), member))
        .collect();
    let one = begin(&clients[0], &vector(), KIND, Op::Sum).unwrap();
    // The operation may fail before it is begun.
    let other = begin(&clients[1], &vector(), KIND, Op::Max).and_then(Running::finish);
    for error in [one.finish(), other].map(|result| result.unwrap_err().to_string()) {
        assert!(
            error.contains("Sum") && error.contains("Max") && error.contains("rank"),
            "{error}"
        );
    }
}

#[test]
fn join_without_the_job_key_is_refused() {
    let server = server_with(64 << 20, 1, &[("EVENKEEL_JOB_KEY", KEY)]);
    let names = vec![server.address().to_string()];
    let members = members(1, "key");
    let member = &members[0];
    let other = KEY.replace('0', "9");
    for keys in [vec![], vec![("EVENKEEL_JOB_KEY", other.as_str())]] {
        let error =
            join_within(&transport(&keys), &names, member, TIMEOUT).err().unwrap().to_string();
        assert!(error.contains(&names[0]) && error.contains("job key"), "{error}");
        assert!(!error.contains("within"), "a refused join is retried: {error}");
    }
    assert_eq!(server.communicators(), 0);
    let client = join(&transport(&[("EVENKEEL_JOB_KEY", KEY)]), &names, member);
    assert_eq!(all_reduce(&client, &vector(), KIND, Op::Sum).unwrap(), vector());
}

#[test]
fn encrypted_server_sums_for_peers_with_encryption_only() {
    let key = ("EVENKEEL_JOB_KEY", KEY);
    let encrypted = [key, ("EVENKEEL_ENCRYPTION", "required")];
    let other = KEY.replace('0', "9");
    let members = members(1, "encrypted");
    let member = &members[0];
    for (server, client, says) in [
        (&encrypted[..], &[key][..], "EVENKEEL_ENCRYPTION"),
        (&[key], &encrypted, "EVENKEEL_ENCRYPTION"),
        (&encrypted, &[("EVENKEEL_JOB_KEY", other.as_str()), encrypted[1]], "job key"),
    ] {
        let server = server_with(64 << 20, 1, server);
        let names = vec![server.address().to_string()];
        let error =
            join_within(&transport(client), &names, member, TIMEOUT).err().unwrap().to_string();
        assert!(error.contains(&names[0]) && error.contains(says), "{error}");
        assert!(!error.contains("within"), "a refused join is retried: {error}");
        assert_eq!(server.communicators(), 0);
    }
    let server = server_with(64 << 20, 1, &encrypted);
    let names = vec![server.address().to_string()];
    let client = join(&transport(&encrypted), &names, member);
    assert_eq!(all_reduce(&client, &vector(), KIND, Op::Sum).unwrap(), vector());
}

#[test]
fn refused_join_has_the_reason() {
    let server = server_with(4 << 20, 1, &[]);
    let names = vec![server.address().to_string()];
    let transport = transport(&[]);
    let refused = |member: &Member| {
        join_within(&transport, &names, member, TIMEOUT).err().unwrap().to_string()
    };
    let error = refused(&members(MAX_RANKS, "large")[0]);
    assert!(error.contains("no memory") && error.contains(&names[0]), "{error}");
    let twice = members(2, "twice");
    let _first = join(&transport, &names, &twice[0]);
    assert!(refused(&twice[0]).contains("rank 0 has joined already"));
    let mut more = twice[1].clone();
    (more.ranks, more.position) = (3, TreePosition::without_tree(1, 3));
    assert!(refused(&more).contains("3 ranks in its communicator, others have 2"));
}

#[test]
fn join_waits_for_a_late_server_and_names_a_missing_one() {
    let early = server();
    let names = vec![early.address().to_string()];
    drop(early);
    let transport = transport(&[]);
    let members = members(1, "late");
    let member = &members[0];
    let error = join_within(&transport, &names, member, Duration::from_millis(600));
    let error = error.err().unwrap().to_string();
    assert!(error.contains(&names[0]) && error.contains("refused"), "{error}");
    // With an address, an unreachable server is given up before the timeout.
    let begin = Instant::now();
    let error = join_within(&transport, &names, member, TIMEOUT).err().unwrap().to_string();
    assert!(error.contains(&names[0]) && error.contains("not reached within 3s"), "{error}");
    assert!(begin.elapsed() < TIMEOUT / 2);
    thread::scope(|scope| {
        let joining = scope.spawn(|| join(&transport, &names, member));
        // The server starts after the first attempts have failed, or before: both must work.
        let options = evenkeel_reduction_server::ServerOptions {
            listen: names[0].parse().unwrap(),
            ..options(64 << 20, 1)
        };
        let late = crate::harness::server_at(&options);
        let client = joining.join().unwrap();
        let own = vector();
        let result = all_reduce(&client, &own, KIND, Op::Sum).unwrap();
        assert_eq!(result, expected(KIND, Op::Sum, &[own]));
        drop(client);
        drop(late);
    });
}

/// A server that is loaded, or that many ranks join at once, accepts connections in its kernel
/// before it answers them.
#[test]
fn join_waits_for_a_server_that_listens_and_is_slow_to_answer() {
    let slow = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let names = vec![slow.local_addr().unwrap().to_string()];
    let transport = transport(&[]);
    let error = join_within(&transport, &names, &members(1, "slow")[0], Duration::from_millis(600));
    let error = error.err().unwrap().to_string();
    assert!(error.contains("not joined within 600ms"), "{error}");
    assert!(error.contains(&names[0]) && error.contains("does not answer"), "{error}");
}

/// As behind a firewall that lets ranks connect to servers, but not servers to ranks.
#[test]
fn join_names_a_server_that_cannot_connect_back() {
    let transport = transport(&[]);
    let nonce = Nonce(*b"evenkeel-reduce\x01");
    let any = "127.0.0.1:0".parse().unwrap();
    let silent = transport.listen_at(any, nonce, "", Arc::new(NullNotify)).unwrap();
    let names = vec![silent.address().to_string()];
    let member = &members(1, "silent")[0];
    let error_after = |millis| {
        let error = join_within(&transport, &names, member, Duration::from_millis(millis));
        error.err().unwrap().to_string()
    };
    let mut error = error_after(300);
    // On a loaded machine the connection itself may take longer than that.
    if error.contains("does not answer") {
        error = error_after(10_000);
    }
    assert!(error.contains(&names[0]) && error.contains("does not connect back"), "{error}");
}

#[test]
fn draining_server_serves_only_old_communicators() {
    let server = server();
    let names = vec![server.address().to_string()];
    let transport = transport(&[]);
    let members_of = members(2, "old");
    let first = join(&transport, &names, &members_of[0]);
    server.drain();
    let error = join_within(&transport, &names, &members(1, "new")[0], TIMEOUT);
    assert!(error.err().unwrap().to_string().contains("shutting down"));
    let second = join(&transport, &names, &members_of[1]);
    let clients = [first, second];
    thread::scope(|scope| {
        for client in &clients {
            scope.spawn(|| all_reduce(client, &vector(), KIND, Op::Sum).unwrap());
        }
    });
    assert_eq!(server.communicators(), 1);
    drop(clients);
    let deadline = Instant::now() + TIMEOUT;
    while server.communicators() > 0 || server.memory().0 > 0 {
        assert!(
            Instant::now() < deadline,
            "the server keeps a communicator that all ranks have left"
        );
        thread::yield_now();
    }
}
