//! Trees: leaves that reduce their own ranks' vectors, and upstream servers that reduce the sums of
//! the leaves.

use std::thread;
use std::time::{Duration, Instant};

use evenkeel_reduction::Client;
use evenkeel_reduction_kernels::{DataType, Op, partial_type, reduce_partial, round_partial};
use evenkeel_reduction_server::{Server, ServerOptions};

use crate::harness::{
    TIMEOUT, agreed, all_reduce, begin, data, expected, join, join_within, leaf_with, members_with,
    names, options, server, server_at, server_with, transport,
};

/// Sizes around payload in the header's message, pieces at the leaf, and fragments upstream.
const SIZES: [usize; 5] = [8, 8192, 100_000, 262_152, 600_000];
/// The leaf of each rank.
const LEAF_OF: [usize; 5] = [0, 1, 0, 0, 1];
const KIND: DataType = DataType::Float32;

/// The result of a tree, bit by bit: it is rounded to a narrow type only at the end.
fn expected_of_tree(kind: DataType, op: Op, all: &[Vec<u8>]) -> Vec<u8> {
    let leaves: Vec<Vec<Vec<u8>>> = (0..2)
        .map(|leaf| (0..all.len()).filter(move |rank| LEAF_OF[*rank] == leaf))
        .map(|ranks| ranks.map(|rank| all[rank].clone()).collect())
        .collect();
    let Some(wide) = partial_type(kind, op) else {
        return expected(kind, op, &[0, 1].map(|leaf| expected(kind, op, &leaves[leaf])));
    };
    let widened: Vec<Vec<u8>> = leaves
        .iter()
        .map(|parts| {
            let sources: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
            let mut sum = vec![0; parts[0].len() / kind.bytes() * wide.bytes()];
            reduce_partial(kind, op, &sources, &mut sum).unwrap();
            sum
        })
        .collect();
    let mut rounded = vec![0; all[0].len()];
    round_partial(kind, &expected(wide, op, &widened), &mut rounded).unwrap();
    rounded
}

/// All ranks reduce vectors of all types and ops. Returns the results, which are the same at all
/// ranks.
fn results(leaves: &[Vec<Server>; 2]) -> Vec<Vec<u8>> {
    let lists = leaves.each_ref().map(|servers| names(servers));
    let members = members_with(&LEAF_OF.map(|leaf| &lists[leaf][..]), "tree");
    let threads: Vec<_> = members
        .into_iter()
        .map(|member| {
            let list = lists[LEAF_OF[member.rank as usize]].clone();
            thread::spawn(move || {
                let client = join(&transport(&[]), &list, &member);
                let mut results = vec![];
                for (round, kind) in DataType::ALL.into_iter().cycle().take(24).enumerate() {
                    let op = Op::ALL[(round + round / 12) % 4];
                    let size = SIZES[round % SIZES.len()];
                    let of = |rank: usize| data((rank * 100 + round) as u64, kind, size);
                    let result = all_reduce(&client, &of(member.rank as usize), kind, op).unwrap();
                    // The other ranks' results are compared with this one's.
                    if member.rank == 0 {
                        let all: Vec<_> = (0..LEAF_OF.len()).map(of).collect();
                        let want = expected_of_tree(kind, op, &all);
                        assert!(result == want, "{size} bytes of {kind:?} {op:?}");
                    }
                    results.push(result);
                }
                results
            })
        })
        .collect();
    agreed(threads)
}

#[test]
fn tree_sums_have_the_same_bits_in_all_configs() {
    let mut seen = vec![];
    // One server each; then two at each leaf, with two upstream servers that take small pieces.
    for (servers, roots, threads, memory) in [(1, 1, 1, 256 << 20), (2, 2, 3, 6 << 20)] {
        let roots: Vec<_> = (0..roots).map(|_| server_with(memory, threads, &[])).collect();
        let leaf = || (0..servers).map(|_| leaf_with(&names(&roots), threads, &[])).collect();
        let leaves: [Vec<_>; 2] = [leaf(), leaf()];
        seen.push(results(&leaves));
        let deadline = Instant::now() + TIMEOUT;
        for server in roots.iter().chain(leaves.iter().flatten()) {
            while server.communicators() > 0 || server.memory().0 > 0 {
                assert!(
                    Instant::now() < deadline,
                    "a server keeps a communicator that all ranks have left"
                );
                thread::yield_now();
            }
        }
    }
    seen.dedup();
    assert_eq!(seen.len(), 1);
}

/// Two leaves with a rank each, and their root.
struct Tree {
    root: Option<Server>,
    leaves: Vec<Server>,
    clients: Vec<Client>,
}

fn tree() -> Tree {
    let root = server();
    let leaves: Vec<_> = (0..2).map(|_| leaf_with(&names(&[&root]), 1, &[])).collect();
    let lists: Vec<_> = leaves.iter().map(|leaf| names(&[leaf])).collect();
    let members = members_with(&[&lists[0], &lists[1]], "two");
    let transport = transport(&[]);
    let clients = (0..2).map(|rank| join(&transport, &lists[rank], &members[rank])).collect();
    Tree { root: Some(root), leaves, clients }
}

/// The errors of both ranks; the second rank waits for its result when `lose` is called.
fn errors_after(tree: &mut Tree, lose: impl FnOnce(&mut Tree)) -> [String; 2] {
    let clients = std::mem::take(&mut tree.clients);
    let waiting = begin(&clients[1], &data(1, KIND, 1 << 20), KIND, Op::Sum).unwrap();
    lose(tree);
    let own = data(2, KIND, 1 << 20);
    let (first, second) = (all_reduce(&clients[0], &own, KIND, Op::Sum), waiting.finish());
    [first, second].map(|result| result.unwrap_err().to_string())
}

#[test]
fn lost_root_is_named_at_all_leaves() {
    let mut tree = tree();
    let root = tree.root.as_ref().unwrap().address().to_string();
    let leaves = names(&tree.leaves);
    let errors = errors_after(&mut tree, |tree| tree.root = None);
    for (error, leaf) in errors.iter().zip(leaves) {
        let chain = format!("reduction server {leaf}: upstream reduction server {root}: ");
        assert!(error.starts_with(&chain), "{error}");
    }
}

#[test]
fn lost_leaf_is_named_at_the_other_leaf() {
    let mut tree = tree();
    let lost = tree.leaves[0].address().to_string();
    let errors = errors_after(&mut tree, |tree| drop(tree.leaves.remove(0)));
    assert!(errors[0].contains(&format!("reduction server {lost}")), "{}", errors[0]);
    assert!(errors[1].contains("leaf 0 at 127.0.0.1"), "{}", errors[1]);
    assert!(errors[1].contains("reports: the server ended"), "{}", errors[1]);
}

/// The rank sends its vector, and is lost before there is a result.
fn drop_with_parts_under_way(rank: Client) {
    drop(begin(&rank, &data(1, KIND, 1 << 20), KIND, Op::Sum).unwrap());
}

fn error_of(rank: &Client) -> String {
    all_reduce(rank, &data(2, KIND, 1 << 20), KIND, Op::Sum).unwrap_err().to_string()
}

#[test]
fn lost_rank_is_named_at_the_other_leaf() {
    let mut tree = tree();
    drop_with_parts_under_way(tree.clients.remove(0));
    let error = error_of(&tree.clients[0]);
    assert!(error.contains("leaf 0 at 127.0.0.1"), "{error}");
    assert!(error.contains("reports: rank 0 at 127.0.0.1"), "{error}");
}

#[test]
fn leaf_that_ends_with_parts_under_way_is_named_at_the_other_leaf() {
    let mut tree = tree();
    let sent = begin(&tree.clients[0], &data(1, KIND, 1 << 20), KIND, Op::Sum).unwrap();
    drop(tree.leaves.remove(0));
    let error = error_of(&tree.clients[1]);
    assert!(error.contains("leaf 0 at 127.0.0.1"), "{error}");
    assert!(error.contains("reports: the server ended"), "{error}");
    drop(sent);
}

#[test]
fn leaf_that_never_joins_is_named() {
    let root = server_with(64 << 20, 1, &[("EVENKEEL_REDUCTION_TIMEOUT", "1")]);
    let leaf = leaf_with(&names(&[&root]), 1, &[]);
    let (here, elsewhere) = (names(&[&leaf]), ["127.0.0.1:1".to_owned()]);
    let members = members_with(&[&here, &elsewhere], "alone");
    let client = join(&transport(&[]), &here, &members[0]);
    let error = all_reduce(&client, &data(1, KIND, 1000), KIND, Op::Sum).unwrap_err().to_string();
    assert!(error.contains("leaf 1 has not joined within 2 s; 1 of 2 have"), "{error}");
}

#[test]
fn invalid_tree_is_refused_with_the_reason() {
    let transport = transport(&[]);
    let refused = |server: &Server| {
        let list = names(&[server]);
        let other = ["127.0.0.1:1".to_owned()];
        let members = members_with(&[&list, &other], "refused");
        let error = join_within(&transport, &list, &members[0], TIMEOUT).err().unwrap();
        assert_eq!(server.communicators(), 0);
        error.to_string()
    };
    let error = refused(&server());
    assert!(
        error.contains("2 lists of reduction servers") && error.contains("--upstream"),
        "{error}"
    );
    // Its own upstream.
    let free = server();
    let listen = free.address();
    drop(free);
    let upstream = vec![listen.to_string()];
    let error = refused(&server_at(&ServerOptions { listen, upstream, ..options(64 << 20, 1) }));
    assert!(error.contains("a tree has two levels"), "{error}");
    let begin = Instant::now();
    let error = refused(&leaf_with(&["127.0.0.1:1".to_owned()], 1, &[]));
    assert!(error.contains("upstream not reached") && error.contains("127.0.0.1:1"), "{error}");
    assert!(begin.elapsed() < Duration::from_secs(20));
    // Where all ranks have the same list, the upstream servers are not used.
    let leaf = leaf_with(&["127.0.0.1:1".to_owned()], 1, &[]);
    let list = names(&[&leaf]);
    let client = join(&transport, &list, &members_with(&[&list], "one list")[0]);
    let own = data(1, KIND, 1000);
    assert_eq!(all_reduce(&client, &own, KIND, Op::Sum).unwrap(), own);
}
