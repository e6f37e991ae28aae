//! Servers, ranks and their data.

use std::borrow::Borrow;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use evenkeel_reduction::{Client, ClientError, Member, ServerListDigest, Ticket, TreePosition};
use evenkeel_reduction_kernels::{DataType, Op, reference};
use evenkeel_reduction_server::{PIECE_BYTES, Server, ServerOptions};
use evenkeel_testkit::TestRng;
use evenkeel_transport::{NullLog, RecvBuffer, SendBuffer, Settings, Transport};

/// Long enough for a loaded machine; reached only when something is broken.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);
pub(crate) const KEY: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

/// Settings for loopback, overridden by these.
pub(crate) fn settings(more: &[(&str, &str)]) -> Settings {
    let base = [("NCCL_SOCKET_IFNAME", "lo"), ("EVENKEEL_WORKERS", "1"), ("EVENKEEL_FLOWS", "2")];
    Settings::from_lookup(|name| {
        let all = more.iter().chain(&base);
        all.into_iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
    })
    .unwrap()
}

/// Settings of a client, overridden by these.
pub(crate) fn reduction_settings(more: &[(&str, &str)]) -> evenkeel_reduction::Settings {
    let value = |name: &str| {
        let found = more.iter().find(|(known, _)| *known == name);
        found.map(|(_, value)| (*value).to_owned())
    };
    evenkeel_reduction::Settings::from_lookup(value).unwrap()
}

pub(crate) fn transport(more: &[(&str, &str)]) -> Arc<Transport> {
    Arc::new(Transport::new(settings(more), Arc::new(NullLog)).unwrap())
}

pub(crate) fn options(memory: u64, threads: usize) -> ServerOptions {
    ServerOptions {
        listen: "127.0.0.1:0".parse().unwrap(),
        metrics: None,
        upstream: vec![],
        memory,
        timeout: reduction_settings(&[]).timeout,
        threads,
        piece: PIECE_BYTES,
        timeline: None,
    }
}

pub(crate) fn server_with(memory: u64, threads: usize, more: &[(&str, &str)]) -> Server {
    let timeout = reduction_settings(more).timeout;
    let options = ServerOptions { timeout, ..options(memory, threads) };
    Server::start(settings(more), &options, Arc::new(NullLog)).unwrap()
}

/// A leaf with these upstream servers.
pub(crate) fn leaf_with(upstream: &[String], threads: usize, more: &[(&str, &str)]) -> Server {
    let options = ServerOptions { upstream: upstream.to_vec(), ..options(256 << 20, threads) };
    Server::start(settings(more), &options, Arc::new(NullLog)).unwrap()
}

pub(crate) fn server_at(options: &ServerOptions) -> Server {
    Server::start(settings(&[]), options, Arc::new(NullLog)).unwrap()
}

pub(crate) fn server() -> Server {
    server_with(256 << 20, 2, &[])
}

pub(crate) fn names<S: Borrow<Server>>(servers: &[S]) -> Vec<String> {
    servers.iter().map(|server| server.borrow().address().to_string()).collect()
}

/// The members of a communicator of its own.
pub(crate) fn members(ranks: u32, job: &str) -> Vec<Member> {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let comm_id = NEXT.fetch_add(1, Ordering::Relaxed);
    let unique_id = Member::new_unique_id().unwrap();
    let member = |rank| {
        let (position, job) = (TreePosition::without_tree(rank, ranks), job.to_owned());
        Member { unique_id, comm_id, rank, ranks, position, is_leaf: false, job }
    };
    (0..ranks).map(member).collect()
}

/// The members of a communicator, each with its list of servers.
pub(crate) fn members_with(lists: &[&[String]], job: &str) -> Vec<Member> {
    let digests: Vec<_> = lists.iter().map(|list| ServerListDigest::new(list, 64)).collect();
    let mut members = members(lists.len() as u32, job);
    for (rank, member) in members.iter_mut().enumerate() {
        member.position = TreePosition::find(rank, &digests).unwrap();
    }
    members
}

pub(crate) fn join_within(
    transport: &Arc<Transport>,
    servers: &[String],
    member: &Member,
    timeout: Duration,
) -> Result<Client, ClientError> {
    let settings = reduction_settings(&[]);
    let settings = evenkeel_reduction::Settings { servers: servers.to_vec(), timeout, ..settings };
    Client::join(transport, 0, member, &settings)
}

pub(crate) fn join(transport: &Arc<Transport>, servers: &[String], member: &Member) -> Client {
    join_within(transport, servers, member, TIMEOUT).unwrap()
}

/// Joins with these settings.
pub(crate) fn join_with(
    transport: &Arc<Transport>,
    servers: &[String],
    member: &Member,
    more: &[(&str, &str)],
) -> Client {
    let settings = reduction_settings(more);
    let servers = servers.to_vec();
    let settings = evenkeel_reduction::Settings { servers, timeout: TIMEOUT, ..settings };
    Client::join(transport, 0, member, &settings).unwrap()
}

/// An all-reduce with its memory.
pub(crate) struct Running<'a> {
    client: &'a Client,
    _data: Vec<u8>,
    result: Vec<u8>,
    ticket: Option<Ticket>,
}

/// Begins an all-reduce.
pub(crate) fn begin<'a>(
    client: &'a Client,
    data: &[u8],
    kind: DataType,
    op: Op,
) -> Result<Running<'a>, ClientError> {
    let data = data.to_vec();
    let mut result = vec![0xee; data.len()];
    // SAFETY: both live until `finish` has seen the operation's end; dropping `Running` before that
    // leaks them (below).
    let (from, to) = unsafe {
        (
            SendBuffer::new(data.as_ptr(), data.len()),
            RecvBuffer::new(result.as_mut_ptr(), result.len()),
        )
    };
    let ticket = client.all_reduce(from, to, kind, op)?;
    Ok(Running { client, _data: data, result, ticket: Some(ticket.expect("room")) })
}

impl Running<'_> {
    /// Waits for the result.
    pub(crate) fn finish(mut self) -> Result<Vec<u8>, ClientError> {
        let deadline = Instant::now() + TIMEOUT;
        let mut polls = 0;
        loop {
            let done = self.client.test(self.ticket.as_ref().unwrap());
            if done.is_err() {
                self.ticket = None;
            }
            if done? {
                self.ticket = None;
                return Ok(std::mem::take(&mut self.result));
            }
            assert!(Instant::now() < deadline, "no result within {TIMEOUT:?}");
            // Many threads that only yield would take the processors from the servers' threads.
            polls += 1;
            if polls < 100 {
                thread::yield_now()
            } else {
                thread::sleep(Duration::from_micros(200))
            }
        }
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if self.ticket.is_some() {
            // The client may still use them.
            std::mem::forget(std::mem::take(&mut self.result));
            std::mem::forget(std::mem::take(&mut self._data));
        }
    }
}

pub(crate) fn all_reduce(
    client: &Client,
    data: &[u8],
    kind: DataType,
    op: Op,
) -> Result<Vec<u8>, ClientError> {
    begin(client, data, kind, op)?.finish()
}

/// Numbers of moderate size in every type.
pub(crate) fn data(seed: u64, kind: DataType, bytes: usize) -> Vec<u8> {
    let mut rng = TestRng::new(seed);
    let mut data = Vec::with_capacity(bytes);
    while data.len() < bytes {
        let number = rng.below(2000) as f64 / 7.0 - 140.0;
        match kind {
            DataType::Float32 => data.extend((number as f32).to_ne_bytes()),
            DataType::Float64 => data.extend(number.to_ne_bytes()),
            // Any bits but those of the largest exponents.
            DataType::Float16 | DataType::Bfloat16 => data.extend([rng.next_u64() as u8, 0x3f]),
            _ => data.extend((rng.next_u64() as u32).to_ne_bytes()),
        }
    }
    data.truncate(bytes);
    data
}

/// What the sum of all ranks' data must be, bit by bit.
pub(crate) fn expected(kind: DataType, op: Op, all: &[Vec<u8>]) -> Vec<u8> {
    let sources: Vec<&[u8]> = all.iter().map(Vec::as_slice).collect();
    let mut into = vec![0; all[0].len()];
    reference::reduce(kind, op, &sources, &mut into).unwrap();
    into
}

/// A server's address.
pub(crate) fn address(server: &Server) -> SocketAddr {
    server.address()
}

/// The results of all ranks' threads, which must be the same.
pub(crate) fn agreed(threads: Vec<JoinHandle<Vec<Vec<u8>>>>) -> Vec<Vec<u8>> {
    let mut all: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    all.dedup();
    assert_eq!(all.len(), 1, "ranks have different results");
    all.remove(0)
}
