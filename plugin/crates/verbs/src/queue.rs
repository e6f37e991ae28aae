//! Queue pairs (reliable connections) and the queues that tell of what they have done.

use std::ffi::{CStr, c_int};
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr;
use std::sync::Arc;

use crate::context::set_nonblocking;
use crate::ffi;
use crate::port::Gid;
use crate::{Context, Error, MemoryRegion};

/// Tells what queue pairs have done.
pub struct CompletionQueue {
    context: Arc<Context>,
    raw: *mut ffi::Cq,
    channel: *mut ffi::Channel,
}

// SAFETY: the library may be called from any thread and locks what it changes.
unsafe impl Send for CompletionQueue {}
// SAFETY: as above.
unsafe impl Sync for CompletionQueue {}

/// Something that a queue pair has done, or cannot do.
#[derive(Clone, Debug)]
pub struct Completion {
    /// What the work was posted with.
    pub id: u64,
    /// What came of it.
    pub outcome: Outcome,
}

/// What came of work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A write is where it was to go, or a read has come.
    Done,
    /// A peer's write has come: so many bytes, and the number that it carried.
    Written {
        /// Number of bytes.
        bytes: u32,
        /// The number.
        immediate: u32,
    },
    /// Work that was posted has failed, and the queue pair with it.
    Failed(String),
    /// Work was given up because the queue pair had failed.
    Flushed,
}

/// What is taken off a queue at a time.
const BATCH: usize = 16;

impl CompletionQueue {
    /// A queue with room for this many completions.
    ///
    /// # Errors
    /// When the device has no more.
    pub fn new(context: &Arc<Context>, depth: u32) -> Result<Self, Error> {
        let name = context.name();
        let functions = context.functions;
        // SAFETY: the context is open.
        let channel = unsafe { (functions.create_comp_channel)(context.raw) };
        if channel.is_null() {
            return Err(Error::last(format!("{name}: no completion channel")));
        }
        // From here on, dropping it ends the channel.
        let mut queue = Self { context: Arc::clone(context), raw: ptr::null_mut(), channel };
        // SAFETY: the channel was made above.
        set_nonblocking(unsafe { (*channel).fd })
            .map_err(|error| Error::Call { what: format!("{name}: completion channel"), error })?;
        let depth = c_int::try_from(depth).unwrap_or(c_int::MAX);
        // SAFETY: the context is open and the channel was made on it.
        queue.raw =
            unsafe { (functions.create_cq)(context.raw, depth, ptr::null_mut(), channel, 0) };
        if queue.raw.is_null() {
            return Err(Error::last(format!("{name}: no completion queue of {depth} entries")));
        }
        Ok(queue)
    }

    /// What tells it from others of its device.
    pub fn id(&self) -> usize {
        self.raw.addr()
    }

    /// Takes completions off the queue, some at a time; none when there are none. Never blocks.
    ///
    /// # Errors
    /// When the queue is broken: it has run over, or the device is gone.
    pub fn poll(&self, completions: &mut Vec<Completion>) -> Result<(), Error> {
        let mut taken = [ffi::Wc::default(); BATCH];
        // SAFETY: the queue is this one's; the context of a queue has its device's table of operations, in which every
        // provider sets this one.
        let count = unsafe {
            match (*(*self.raw).context).ops.poll_cq {
                Some(poll) => poll(self.raw, BATCH as c_int, taken.as_mut_ptr()),
                None => -libc::EOPNOTSUPP,
            }
        };
        let count = usize::try_from(count).map_err(|_| {
            let what = format!("completion queue of {}", self.context.name());
            Error::code(what, if count == -1 { libc::EIO } else { -count })
        })?;
        completions.extend(taken.iter().take(count).map(|taken| self.read(taken)));
        Ok(())
    }

    fn read(&self, taken: &ffi::Wc) -> Completion {
        // Whether it is of a receive: its other fields are not set where it failed.
        const RECV: u32 = 1 << 7;
        let outcome = match taken.status {
            0 if taken.opcode & RECV != 0 => {
                Outcome::Written { bytes: taken.byte_len, immediate: u32::from_be(taken.imm_data) }
            }
            0 => Outcome::Done,
            ffi::WC_WR_FLUSH_ERR => Outcome::Flushed,
            status => {
                // SAFETY: the library gives a constant string for every number.
                let text =
                    unsafe { CStr::from_ptr((self.context.functions.wc_status_str)(status)) };
                let vendor = taken.vendor_err;
                Outcome::Failed(format!(
                    "{} (status {status}, vendor's code {vendor})",
                    text.to_string_lossy()
                ))
            }
        };
        Completion { id: taken.wr_id, outcome }
    }

    /// From now on, the next completion makes the queue's descriptor readable. What came before does not: poll once more.
    ///
    /// # Errors
    /// When the device is gone.
    pub fn arm(&self) -> Result<(), Error> {
        // SAFETY: as for `poll`.
        let code = unsafe {
            match (*(*self.raw).context).ops.req_notify_cq {
                Some(notify) => notify(self.raw, 0),
                None => libc::EOPNOTSUPP,
            }
        };
        if code == 0 { Ok(()) } else { Err(Error::code("cannot ask for completions", code)) }
    }

    /// Takes what has made the descriptor readable; whether there was something.
    pub fn disarm(&self) -> bool {
        let (mut queue, mut of) = (ptr::null_mut(), ptr::null_mut());
        let functions = self.context.functions;
        let mut any = false;
        // SAFETY: the channel is this one's and does not block; each event is acknowledged once.
        unsafe {
            while (functions.get_cq_event)(self.channel, &mut queue, &mut of) == 0 {
                (functions.ack_cq_events)(queue, 1);
                any = true;
            }
        }
        any
    }
}

impl AsFd for CompletionQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel, and so its descriptor, stays open as long as this.
        unsafe { BorrowedFd::borrow_raw((*self.channel).fd) }
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        let functions = self.context.functions;
        // SAFETY: queue pairs hold a reference to this, so none uses it; its events are acknowledged; each is given back once.
        unsafe {
            if !self.raw.is_null() {
                (functions.destroy_cq)(self.raw);
            }
            (functions.destroy_comp_channel)(self.channel);
        }
    }
}

/// One end of a reliable connection. Dropping it ends it: nothing reads or writes on its behalf afterwards.
pub struct QueuePair {
    completions: Arc<CompletionQueue>,
    raw: *mut ffi::Qp,
    /// Most bytes that a write can carry within its request.
    inline: usize,
}

// SAFETY: the library may be called from any thread and locks what it changes.
unsafe impl Send for QueuePair {}
// SAFETY: as above.
unsafe impl Sync for QueuePair {}

/// What a queue pair needs to know to be connected with another one.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    /// Its queue pair's number.
    pub number: u32,
    /// Number of the first packet that it sends.
    pub sequence: u32,
    /// Its port's address.
    pub gid: Gid,
    /// Its port's local identifier, on InfiniBand.
    pub lid: u16,
    /// Number of the first packet that this end sends.
    pub own_sequence: u32,
    /// This end's port, counted from 1.
    pub port: u8,
    /// Whether packets carry GIDs, as they do on Ethernet.
    pub global: bool,
    /// Index of this end's GID.
    pub gid_index: u8,
    /// Code of the packets' size: the smaller one of the two ports' [`crate::Port::mtu`].
    pub mtu: u8,
    /// Traffic class of the packets' IP header.
    pub traffic_class: u8,
    /// Service level.
    pub service_level: u8,
    /// Code of how long to wait for an acknowledgement: 4.096 us times two to the power of this. It is waited for seven times.
    pub timeout: u8,
}

/// Bytes to write to a peer's memory, and the number that tells it of them.
pub struct Write<'a> {
    /// What the completion is to be told with.
    pub id: u64,
    /// The bytes: inside a region, at an address of this process.
    pub from: Payload<'a>,
    /// Where they go.
    pub to: u64,
    /// The key of the peer's memory there.
    pub key: u32,
    /// What the peer is told.
    pub immediate: u32,
}

/// Where bytes to write are.
pub enum Payload<'a> {
    /// Nowhere: there are none.
    Nothing,
    /// They are copied when the write is posted; at most [`QueuePair::inline`].
    Inline(&'a [u8]),
    /// In a region, which must live until the write has completed, or the write fails: so many bytes from an address.
    MemoryRegion(&'a MemoryRegion, u64, u32),
}

impl QueuePair {
    /// A queue pair that is to be connected, with room for so much work in both directions.
    ///
    /// # Errors
    /// When the device has no more.
    pub fn new(
        completions: &Arc<CompletionQueue>,
        depth: u32,
        inline: u32,
        port: u8,
    ) -> Result<Self, Error> {
        let context = &completions.context;
        let name = context.name();
        let mut attributes = ffi::QpInitAttr {
            qp_context: ptr::null_mut(),
            send_cq: completions.raw,
            recv_cq: completions.raw,
            srq: ptr::null_mut(),
            cap: ffi::QpCap {
                max_send_wr: depth,
                max_recv_wr: depth,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: inline,
            },
            qp_type: ffi::QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: the domain and the queue are of the same open device; the attributes are a place for both directions.
        let raw = unsafe { (context.functions.create_qp)(context.domain, &mut attributes) };
        if raw.is_null() {
            return Err(Error::last(format!("{name}: no queue pair of {depth} entries")));
        }
        let inline = attributes.cap.max_inline_data as usize;
        let pair = Self { completions: Arc::clone(completions), raw, inline };
        let mut attributes = ffi::QpAttr {
            qp_state: ffi::QPS_INIT,
            port_num: port,
            qp_access_flags: ffi::ACCESS_REMOTE_WRITE | ffi::ACCESS_REMOTE_READ,
            ..ffi::QpAttr::default()
        };
        pair.modify(&mut attributes, ffi::mask::INIT, "initialize")?;
        Ok(pair)
    }

    /// Its number.
    pub fn number(&self) -> u32 {
        // SAFETY: the queue pair is this one's.
        unsafe { (*self.raw).qp_num }
    }

    /// Most bytes that a write can carry within its request.
    pub fn inline(&self) -> usize {
        self.inline
    }

    /// Connects it: it takes what the peer sends, and can send.
    ///
    /// # Errors
    /// When the peer cannot be reached by this address, or the queue pair is not new.
    pub fn connect(&self, peer: &Peer) -> Result<(), Error> {
        let [high, low] = [&peer.gid.0[..8], &peer.gid.0[8..]].map(|half| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(half);
            u64::from_ne_bytes(bytes)
        });
        let route = ffi::AhAttr {
            dgid: [high, low],
            sgid_index: peer.gid_index,
            hop_limit: u8::MAX,
            traffic_class: peer.traffic_class,
            dlid: peer.lid,
            sl: peer.service_level,
            is_global: peer.global.into(),
            port_num: peer.port,
            ..ffi::AhAttr::default()
        };
        let mut attributes = ffi::QpAttr {
            qp_state: ffi::QPS_RTR,
            path_mtu: peer.mtu.into(),
            dest_qp_num: peer.number,
            rq_psn: peer.sequence & 0xff_ffff,
            max_dest_rd_atomic: 1,
            // The shortest time that a receiver asks for when it has posted nothing.
            min_rnr_timer: 1,
            ah_attr: route,
            ..ffi::QpAttr::default()
        };
        let what = format!("connect to queue pair {} at {}", peer.number, peer.gid);
        self.modify(&mut attributes, ffi::mask::RTR, &what)?;
        let mut attributes = ffi::QpAttr {
            qp_state: ffi::QPS_RTS,
            timeout: peer.timeout,
            // The most but one: soft-RoCE takes the most for without end.
            retry_cnt: 6,
            // For ever: a peer that is slow to post is no error.
            rnr_retry: 7,
            sq_psn: peer.own_sequence & 0xff_ffff,
            max_rd_atomic: 1,
            ..ffi::QpAttr::default()
        };
        self.modify(&mut attributes, ffi::mask::RTS, &what)
    }

    /// Gives up all work, what the peer sends included. Each piece of work that was posted and is not told of is told of as
    /// flushed.
    ///
    /// # Errors
    /// When the device is gone.
    pub fn fail(&self) -> Result<(), Error> {
        let mut attributes = ffi::QpAttr { qp_state: ffi::QPS_ERR, ..ffi::QpAttr::default() };
        self.modify(&mut attributes, ffi::mask::STATE, "give up")
    }

    fn modify(&self, attributes: &mut ffi::QpAttr, mask: c_int, what: &str) -> Result<(), Error> {
        // SAFETY: the queue pair is this one's and the attributes that the mask names are set.
        let code =
            unsafe { (self.completions.context.functions.modify_qp)(self.raw, attributes, mask) };
        match code {
            0 => Ok(()),
            code => {
                let name = self.completions.context.name();
                Err(Error::code(format!("{name}: queue pair {}: {what}", self.number()), code))
            }
        }
    }

    /// Begins to write to the peer's memory.
    ///
    /// # Errors
    /// When there is no more room, or the device is gone. A queue pair that has failed takes work and tells of it as flushed.
    ///
    /// # Panics
    /// When the bytes are not in their region, or too many to go inline.
    pub fn write(&self, write: &Write<'_>) -> Result<(), Error> {
        let mut flags = ffi::SEND_SIGNALED;
        let mut part = ffi::Sge { addr: 0, length: 0, lkey: 0 };
        let mut parts = 1;
        match write.from {
            Payload::Nothing => parts = 0,
            Payload::Inline(bytes) => {
                assert!(bytes.len() <= self.inline);
                flags |= ffi::SEND_INLINE;
                part.addr = bytes.as_ptr().expose_provenance() as u64;
                part.length = bytes.len() as u32;
            }
            Payload::MemoryRegion(region, start, length) => {
                assert!(region.span().covers(start, length as usize));
                part = ffi::Sge { addr: start, length, lkey: region.local_key() };
            }
        }
        let mut request = ffi::SendWr {
            wr_id: write.id,
            next: ptr::null_mut(),
            sg_list: &mut part,
            num_sge: parts,
            opcode: ffi::WR_RDMA_WRITE_WITH_IMM,
            send_flags: flags,
            imm_data: write.immediate.to_be(),
            remote_addr: write.to,
            rkey: write.key,
            rest: [0; 9],
        };
        self.post(&mut request)
    }

    /// Begins to read bytes of the peer's memory into a region: all that the peer's device had written there before is
    /// then where it can be seen.
    ///
    /// # Errors
    /// As [`QueuePair::write`].
    ///
    /// # Panics
    /// When the bytes are not in the region.
    pub fn read(
        &self,
        id: u64,
        into: (&MemoryRegion, u64, u32),
        from: u64,
        key: u32,
    ) -> Result<(), Error> {
        let (region, start, length) = into;
        assert!(region.span().covers(start, length as usize));
        let mut part = ffi::Sge { addr: start, length, lkey: region.local_key() };
        let mut request = ffi::SendWr {
            wr_id: id,
            next: ptr::null_mut(),
            sg_list: &mut part,
            num_sge: 1,
            opcode: ffi::WR_RDMA_READ,
            send_flags: ffi::SEND_SIGNALED,
            imm_data: 0,
            remote_addr: from,
            rkey: key,
            rest: [0; 9],
        };
        self.post(&mut request)
    }

    fn post(&self, request: &mut ffi::SendWr) -> Result<(), Error> {
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair is this one's; the request and its part are on the caller's stack and read during the call
        // only; the memory that they name is in a region, or is copied during the call. As for `poll` of the queue, the
        // table of operations has this one.
        let code = unsafe {
            match (*(*self.raw).context).ops.post_send {
                Some(post) => post(self.raw, request, &mut bad),
                None => libc::EOPNOTSUPP,
            }
        };
        if code == 0 { Ok(()) } else { Err(self.cannot_post(code)) }
    }

    /// Makes room for one write of the peer to be told of.
    ///
    /// # Errors
    /// As [`QueuePair::write`].
    pub fn expect(&self, id: u64) -> Result<(), Error> {
        let mut request =
            ffi::RecvWr { wr_id: id, next: ptr::null_mut(), sg_list: ptr::null_mut(), num_sge: 0 };
        let mut bad = ptr::null_mut();
        // SAFETY: as for `post`.
        let code = unsafe {
            match (*(*self.raw).context).ops.post_recv {
                Some(post) => post(self.raw, &mut request, &mut bad),
                None => libc::EOPNOTSUPP,
            }
        };
        if code == 0 { Ok(()) } else { Err(self.cannot_post(code)) }
    }

    fn cannot_post(&self, code: c_int) -> Error {
        let name = self.completions.context.name();
        Error::code(format!("{name}: queue pair {}: cannot post", self.number()), code.abs())
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: it was made once and is given back once.
        unsafe { (self.completions.context.functions.destroy_qp)(self.raw) };
    }
}
