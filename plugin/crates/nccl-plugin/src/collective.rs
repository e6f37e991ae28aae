//! What all versions of the CollNet table share, in Rust's terms: a rank's way to the reduction servers.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use evenkeel_nccl_abi::{HANDLE_SIZE, MAX_REQUESTS};
use evenkeel_reduction::{Client, Member, SERVER_LIST_DIGEST_BYTES, Ticket, TreePosition, mark};
use evenkeel_reduction_kernels::{DataType, Op};
use evenkeel_transport::{Log, MrCache, RecvBuffer, SendBuffer, Transport};

use crate::failure::Failure;
use crate::logger::LOG;
use crate::plugin::{self, lock};

/// Bytes of the handle that tell the communicator from others.
const GROUP: std::ops::Range<usize> = 0..16;
/// Bytes of the handle that tell the rank's servers from others'.
const MARK: std::ops::Range<usize> = 16..16 + SERVER_LIST_DIGEST_BYTES;

/// What `init` makes: nothing, where no servers are given.
pub(crate) struct Collectives {
    /// NCCL's number for the communicator; 0 where it does not say.
    communicator: u64,
    transport: Arc<Transport>,
}

impl Collectives {
    pub(crate) fn new(communicator: u64) -> Result<Self, Failure> {
        Ok(Self { communicator, transport: plugin::transport_for_collectives()? })
    }

    /// What a rank tells the others: a name for the communicator, of which rank 0's is used, and which servers it has.
    pub(crate) fn listen(
        &self,
        device: usize,
        handle: &mut [u8; HANDLE_SIZE],
    ) -> Result<ListenColl, Failure> {
        if device >= self.transport.devices().len() {
            return Err(Failure::argument(format!("no device {device}")));
        }
        let group = Member::new_group()
            .map_err(|error| Failure::system(format!("no random bytes: {error}")))?;
        handle.fill(0);
        handle[GROUP].copy_from_slice(&group);
        let settings = self.transport.settings();
        let mark = mark(settings.reduction_servers(), settings.reduction_split());
        handle[MARK].copy_from_slice(&mark);
        let transport = Arc::clone(&self.transport);
        Ok(ListenColl { device, communicator: self.communicator, transport })
    }
}

/// How many devices reduce: all, if there are servers.
pub(crate) fn device_count() -> Result<usize, Failure> {
    let transport = plugin::transport_for_collectives()?;
    let off = transport.settings().reduction_servers().is_empty();
    Ok(if off { 0 } else { transport.devices().len() })
}

/// Whether the servers do this to elements of this type.
pub(crate) fn is_supported(kind: i32, op: i32) -> bool {
    kind_of(kind).is_ok() && op_of(op).is_ok()
}

fn kind_of(code: i32) -> Result<DataType, Failure> {
    let kind = u8::try_from(code).ok().and_then(DataType::from_code);
    kind.ok_or_else(|| Failure::argument(format!("no data type {code}")))
}

fn op_of(code: i32) -> Result<Op, Failure> {
    let op = u8::try_from(code).ok().and_then(Op::from_code);
    op.ok_or_else(|| Failure::argument(format!("no reduction {code}")))
}

/// NCCL's listen comm.
pub(crate) struct ListenColl {
    device: usize,
    communicator: u64,
    transport: Arc<Transport>,
}

impl ListenColl {
    /// Joins the communicator of the ranks that have these handles. Blocks.
    pub(crate) fn connect(
        &self,
        handles: &[&[u8; HANDLE_SIZE]],
        rank: usize,
    ) -> Result<CollComm, Failure> {
        let ranks = handles.len();
        let settings = self.transport.settings();
        let servers = settings.reduction_servers();
        let mut group = [0; 16];
        group.copy_from_slice(&handles[0][GROUP]);
        let marks: Vec<[u8; SERVER_LIST_DIGEST_BYTES]> = handles
            .iter()
            .map(|handle| {
                let mut mark = [0; SERVER_LIST_DIGEST_BYTES];
                mark.copy_from_slice(&handle[MARK]);
                mark
            })
            .collect();
        let without = |error| Failure::from(error).with("; NCCL goes on without reduction servers");
        let seat = TreePosition::find(rank, &marks).map_err(without)?;
        let number = |value: usize| {
            u32::try_from(value).map_err(|_| Failure::argument(format!("{value} ranks")))
        };
        let member = Member {
            group,
            communicator: self.communicator,
            rank: number(rank)?,
            ranks: number(ranks)?,
            seat,
            is_leaf: false,
            job: settings.job().to_owned(),
        };
        let timeout = settings.reduction_timeout();
        let client = Client::join(&self.transport, self.device, servers, &member, timeout)
            .map_err(without)?;
        LOG.info(&format!(
            "evenkeel: rank {rank} of {ranks} joined {} reduction servers: {} comm={:#x}",
            servers.len(),
            servers.join(", "),
            self.communicator
        ));
        let client = Arc::new(client);
        let slots = (0..MAX_REQUESTS)
            .map(|_| CollSlot { client: Arc::clone(&client), running: Mutex::default() })
            .collect();
        let registrar = self.transport.registrar(self.device)?;
        Ok(CollComm { registrar, slots, next: AtomicUsize::new(0) })
    }
}

/// NCCL's collective comm.
#[repr(C)]
pub(crate) struct CollComm {
    /// First, as in all comms.
    registrar: MrCache,
    /// What NCCL's request pointers point to.
    slots: Vec<CollSlot>,
    /// Where to look for a free slot first.
    next: AtomicUsize,
}

/// A place for one request.
pub(crate) struct CollSlot {
    client: Arc<Client>,
    /// The operation and its bytes.
    running: Mutex<Option<(Ticket, usize)>>,
}

impl CollComm {
    /// Begins an all-reduce; `None` when as many requests as possible are outstanding.
    pub(crate) fn all_reduce(
        &self,
        from: SendBuffer,
        to: RecvBuffer,
        kind: i32,
        op: i32,
    ) -> Result<Option<&CollSlot>, Failure> {
        let (kind, op) = (kind_of(kind)?, op_of(op)?);
        let first = self.next.load(Ordering::Relaxed);
        for index in (0..self.slots.len()).map(|step| (first + step) % self.slots.len()) {
            let slot = &self.slots[index];
            let mut running = lock(&slot.running);
            if running.is_none() {
                let ticket = slot.client.all_reduce(from, to, kind, op)?;
                *running = ticket.map(|ticket| (ticket, to.length()));
                self.next.store(index + 1, Ordering::Relaxed);
                return Ok(running.is_some().then_some(slot));
            }
        }
        Ok(None)
    }
}

impl CollSlot {
    /// The operation's bytes once it is done, which frees the slot.
    pub(crate) fn test(&self) -> Result<Option<usize>, Failure> {
        let mut running = lock(&self.running);
        let (ticket, bytes) =
            running.as_ref().ok_or_else(|| Failure::contract("test of a finished request"))?;
        let done = self.client.test(ticket)?.then_some(*bytes);
        if done.is_some() {
            *running = None;
        }
        Ok(done)
    }
}

/// Bytes of so many elements of a type.
pub(crate) fn bytes_of(count: usize, kind: i32) -> Result<usize, Failure> {
    count
        .checked_mul(kind_of(kind)?.bytes())
        .filter(|bytes| *bytes <= plugin::MAX_BYTES)
        .ok_or_else(|| Failure::argument(format!("{count} elements at once")))
}
