//! CollNet in Rust's terms: a rank's contexts and comms, and the client of the reduction servers behind them.

use std::sync::Arc;

use evenkeel_nccl_abi::HANDLE_SIZE;
use evenkeel_reduction::{
    Client, Member, SERVER_LIST_DIGEST_BYTES, ServerListDigest, Settings, Ticket, TreePosition,
};
use evenkeel_reduction_kernels::{DataType, Op};
use evenkeel_transport::{Log, MrCache, RecvBuffer, SendBuffer, Transport};

use crate::error::PluginError;
use crate::logger::LOG;
use crate::net::device::MAX_BYTES;
use crate::plugin;
use crate::request_pool::{PooledRequest, RequestPool};

/// Where the handle has the unique id of the communicator.
const UNIQUE_ID: std::ops::Range<usize> = 0..16;
/// Where the handle has the digest of the rank's list of servers.
const SERVER_LIST_DIGEST: std::ops::Range<usize> = 16..16 + SERVER_LIST_DIGEST_BYTES;

/// What `init` makes.
pub(crate) struct CollNetContext {
    /// NCCL's number for the communicator; 0 in versions that do not pass one.
    communicator: u64,
    transport: Arc<Transport>,
    settings: Arc<Settings>,
}

impl CollNetContext {
    pub(crate) fn new(communicator: u64) -> Result<Self, PluginError> {
        let (transport, settings) = plugin::transport_for_collnet()?;
        Ok(Self { communicator, transport, settings })
    }

    /// Makes the handle that a rank sends the others: a unique id of the communicator, of which rank 0's is used, and the
    /// digest of the rank's list of servers.
    pub(crate) fn listen(
        &self,
        device: usize,
        handle: &mut [u8; HANDLE_SIZE],
    ) -> Result<CollNetListenComm, PluginError> {
        if device >= self.transport.device_count() {
            return Err(PluginError::invalid_argument(format!("device {device} does not exist")));
        }
        let unique_id = Member::new_unique_id()
            .map_err(|error| PluginError::system(format!("no random bytes: {error}")))?;
        handle.fill(0);
        handle[UNIQUE_ID].copy_from_slice(&unique_id);
        let digest = ServerListDigest::new(&self.settings.servers, self.settings.split);
        handle[SERVER_LIST_DIGEST].copy_from_slice(&digest.to_bytes());
        let (transport, settings) = (Arc::clone(&self.transport), Arc::clone(&self.settings));
        Ok(CollNetListenComm { device, communicator: self.communicator, transport, settings })
    }
}

/// The number of devices that can reduce: all if there are servers, else none.
pub(crate) fn device_count() -> Result<usize, PluginError> {
    let (transport, settings) = plugin::transport_for_collnet()?;
    Ok(if settings.servers.is_empty() { 0 } else { transport.device_count() })
}

/// Whether the servers support this reduction of this data type.
pub(crate) fn is_supported(kind: i32, op: i32) -> bool {
    data_type(kind).is_ok() && reduction(op).is_ok()
}

fn data_type(code: i32) -> Result<DataType, PluginError> {
    let kind = u8::try_from(code).ok().and_then(DataType::from_code);
    kind.ok_or_else(|| PluginError::invalid_argument(format!("data type {code} is not supported")))
}

fn reduction(code: i32) -> Result<Op, PluginError> {
    let op = u8::try_from(code).ok().and_then(Op::from_code);
    op.ok_or_else(|| PluginError::invalid_argument(format!("reduction {code} is not supported")))
}

/// NCCL's listen comm of CollNet.
pub(crate) struct CollNetListenComm {
    device: usize,
    communicator: u64,
    transport: Arc<Transport>,
    settings: Arc<Settings>,
}

impl CollNetListenComm {
    /// Joins the communicator of the ranks that have these handles. Blocks.
    pub(crate) fn connect(
        &self,
        handles: &[&[u8; HANDLE_SIZE]],
        rank: usize,
    ) -> Result<CollNetComm, PluginError> {
        let ranks = handles.len();
        let servers = &self.settings.servers;
        let mut unique_id = [0; 16];
        unique_id.copy_from_slice(&handles[0][UNIQUE_ID]);
        let digests: Vec<ServerListDigest> = handles
            .iter()
            .map(|handle| {
                let mut digest = [0; SERVER_LIST_DIGEST_BYTES];
                digest.copy_from_slice(&handle[SERVER_LIST_DIGEST]);
                ServerListDigest::from_bytes(digest)
            })
            .collect();
        let fallback =
            |error| PluginError::from(error).with("; NCCL continues without reduction servers");
        let position = TreePosition::find(rank, &digests).map_err(fallback)?;
        let number = |value: usize| {
            u32::try_from(value)
                .map_err(|_| PluginError::invalid_argument(format!("{value} ranks are too many")))
        };
        let member = Member {
            unique_id,
            comm_id: self.communicator,
            rank: number(rank)?,
            ranks: number(ranks)?,
            position,
            is_leaf: false,
            job: self.settings.job.clone(),
        };
        let client = Client::join(&self.transport, self.device, &member, &self.settings)
            .map_err(fallback)?;
        LOG.info(&format!(
            "evenkeel: rank {rank} of {ranks} joined {} reduction servers: {} comm={:#x}",
            servers.len(),
            servers.join(", "),
            self.communicator
        ));
        let mr_cache = self.transport.mr_cache(self.device)?;
        Ok(CollNetComm { mr_cache, client: Arc::new(client), requests: RequestPool::new() })
    }
}

/// Minimum number of times that NCCL tests an operation before it is reported.
///
/// NCCL before 2.20, and RCCL with it, publishes results before it has published where they are. For host memory its
/// `recvProxyProgress` counts a step as flushed when it is received, and sets `tail` to the count of flushed steps, though
/// it has set the offsets of transmitted steps only. A step that is received or posted delays the transmission. So two
/// steps that are done shortly after each other make the kernel read the second at a wrong offset: a wrong sum. NCCL tests
/// the oldest operation of a group of channels once in each pass over its proxies. Between two results it needs one pass to
/// receive, one to transmit, and up to 8 (`NCCL_STEPS`) to post buffers.
const MIN_TESTS: u32 = 10;

/// NCCL's CollNet comm.
#[repr(C)]
pub(crate) struct CollNetComm {
    /// First, because NCCL registers memory with comms of all kinds by one function.
    mr_cache: MrCache,
    client: Arc<Client>,
    requests: RequestPool<AllReduce>,
}

/// An operation in flight.
pub(crate) struct AllReduce {
    client: Arc<Client>,
    ticket: Ticket,
    bytes: usize,
    /// Number of times that NCCL has tested it.
    tests: u32,
}

impl CollNetComm {
    /// Starts an all-reduce. `None` when as many as possible are in flight.
    pub(super) fn all_reduce(
        &self,
        from: SendBuffer,
        to: RecvBuffer,
        kind: i32,
        op: i32,
    ) -> Result<Option<&PooledRequest<AllReduce>>, PluginError> {
        let (kind, op) = (data_type(kind)?, reduction(op)?);
        self.requests.start(|_| {
            let ticket = self.client.all_reduce(from, to, kind, op)?;
            let client = Arc::clone(&self.client);
            Ok(ticket.map(|ticket| AllReduce { client, ticket, bytes: to.length(), tests: 0 }))
        })
    }
}

impl AllReduce {
    /// Whether it is done, and NCCL may know. To be called once for each test of NCCL's; see [`MIN_TESTS`].
    pub(super) fn is_done(&mut self) -> Result<bool, PluginError> {
        self.tests = self.tests.saturating_add(1);
        // The client counts an operation that it has reported as complete, too.
        Ok(self.client.test(&self.ticket)? && self.tests >= MIN_TESTS)
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

/// The size in bytes of this many elements of a data type.
pub(crate) fn bytes_of(count: usize, kind: i32) -> Result<usize, PluginError> {
    count.checked_mul(data_type(kind)?.bytes()).filter(|bytes| *bytes <= MAX_BYTES).ok_or_else(
        || {
            PluginError::invalid_argument(format!(
                "{count} elements are longer than the maximum of {MAX_BYTES} bytes"
            ))
        },
    )
}
