//! Queue pairs: reliable connections.

use std::ffi::c_int;
use std::ptr;
use std::sync::Arc;

use crate::ffi;
use crate::port::Gid;
use crate::{CompletionQueue, Error, MemoryRegion};

/// A queue pair (QP): one end of a reliable connection. After it is dropped, the device reads and
/// writes nothing for it.
pub struct QueuePair {
    completions: Arc<CompletionQueue>,
    raw: *mut ffi::Qp,
    /// Maximum number of bytes of an inline write.
    max_inline: usize,
}

// SAFETY: the library may be called from any thread and locks what it changes.
unsafe impl Send for QueuePair {}
// SAFETY: as above.
unsafe impl Sync for QueuePair {}

/// The attributes that connect a queue pair with a peer's.
#[derive(Clone, Copy, Debug)]
pub struct ConnectAttributes {
    /// Number of the peer's queue pair.
    pub dest_qp_number: u32,
    /// Packet sequence number (PSN) of the peer's first packet.
    pub rq_psn: u32,
    /// PSN of the first packet that is sent.
    pub sq_psn: u32,
    /// Address of the peer's port.
    pub dgid: Gid,
    /// Local identifier of the peer's port, on InfiniBand.
    pub dlid: u16,
    /// The own port, counted from 1.
    pub port: u8,
    /// Whether packets carry GIDs, as they do on Ethernet.
    pub is_global: bool,
    /// Index of the own GID.
    pub sgid_index: u8,
    /// Code of the packet size: the smaller of the two ports' [`crate::Port::mtu`].
    pub path_mtu: u8,
    /// Traffic class of the packets' IP header.
    pub traffic_class: u8,
    /// Service level.
    pub service_level: u8,
    /// Code of the acknowledgement timeout: 4.096 us times two to the power of this. The queue pair
    /// fails after seven timeouts.
    pub timeout: u8,
}

/// An RDMA write with immediate data.
pub struct WriteRequest<'a> {
    /// The id of its completion.
    pub id: u64,
    /// The bytes to write.
    pub source: WriteSource<'a>,
    /// Their address in the peer's memory.
    pub remote_address: u64,
    /// The key of the peer's memory region.
    pub remote_key: u32,
    /// The immediate data, which the peer's completion has.
    pub immediate: u32,
}

/// The bytes of a write.
pub enum WriteSource<'a> {
    /// No bytes.
    Empty,
    /// Bytes that are copied when the write is posted; at most [`QueuePair::max_inline`].
    Inline(&'a [u8]),
    /// Address and number of bytes in a region. The write fails if the region is dropped before its
    /// completion.
    Region(&'a MemoryRegion, u64, u32),
}

impl QueuePair {
    /// A queue pair that is not connected yet, with room for this many sends (of any kind) and
    /// receives at a time. The partition key is the one at this index of the port's table.
    ///
    /// # Errors
    /// When the device has no room for another one.
    pub fn new(
        completions: &Arc<CompletionQueue>,
        (sends, receives): (u32, u32),
        max_inline: u32,
        port: u8,
        pkey_index: u16,
    ) -> Result<Self, Error> {
        let context = &completions.context;
        let name = context.name();
        let mut attributes = ffi::QpInitAttr {
            qp_context: ptr::null_mut(),
            send_cq: completions.raw,
            recv_cq: completions.raw,
            srq: ptr::null_mut(),
            cap: ffi::QpCap {
                max_send_wr: sends,
                max_recv_wr: receives,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: max_inline,
            },
            qp_type: ffi::QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: the domain and the queue are of the same open device; the attributes may be read
        // and written.
        let raw = unsafe { (context.functions.create_qp)(context.domain, &mut attributes) };
        if raw.is_null() {
            return Err(Error::last(format!(
                "{name}: no queue pair of {sends} and {receives} entries"
            )));
        }
        let max_inline = attributes.cap.max_inline_data as usize;
        let pair = Self { completions: Arc::clone(completions), raw, max_inline };
        let mut attributes = ffi::QpAttr {
            qp_state: ffi::QPS_INIT,
            port_num: port,
            pkey_index,
            qp_access_flags: ffi::ACCESS_REMOTE_WRITE | ffi::ACCESS_REMOTE_READ,
            ..ffi::QpAttr::default()
        };
        pair.modify(&mut attributes, ffi::mask::INIT, "initialize")?;
        Ok(pair)
    }

    /// Its number.
    pub fn number(&self) -> u32 {
        // SAFETY: the queue pair is valid.
        unsafe { (*self.raw).qp_num }
    }

    /// Maximum number of bytes of [`WriteSource::Inline`].
    pub fn max_inline(&self) -> usize {
        self.max_inline
    }

    /// Connects it: it then receives and can send.
    ///
    /// # Errors
    /// When the device has no route to the address, or the queue pair is not new.
    pub fn connect(&self, peer: &ConnectAttributes) -> Result<(), Error> {
        let [high, low] = [&peer.dgid.0[..8], &peer.dgid.0[8..]].map(|half| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(half);
            u64::from_ne_bytes(bytes)
        });
        let route = ffi::AhAttr {
            dgid: [high, low],
            sgid_index: peer.sgid_index,
            hop_limit: u8::MAX,
            traffic_class: peer.traffic_class,
            dlid: peer.dlid,
            sl: peer.service_level,
            is_global: peer.is_global.into(),
            port_num: peer.port,
            ..ffi::AhAttr::default()
        };
        let mut attributes = ffi::QpAttr {
            qp_state: ffi::QPS_RTR,
            path_mtu: peer.path_mtu.into(),
            dest_qp_num: peer.dest_qp_number,
            rq_psn: peer.rq_psn & 0xff_ffff,
            max_dest_rd_atomic: 1,
            // The shortest delay that a peer is asked for when no receive is posted.
            min_rnr_timer: 1,
            ah_attr: route,
            ..ffi::QpAttr::default()
        };
        let what = format!("connect to queue pair {} at {}", peer.dest_qp_number, peer.dgid);
        self.modify(&mut attributes, ffi::mask::RTR, &what)?;
        let mut attributes = ffi::QpAttr {
            qp_state: ffi::QPS_RTS,
            timeout: peer.timeout,
            // One below the maximum, which soft-RoCE takes as unlimited.
            retry_cnt: 6,
            // Unlimited: a peer that is slow to post receives is no error.
            rnr_retry: 7,
            sq_psn: peer.sq_psn & 0xff_ffff,
            max_rd_atomic: 1,
            ..ffi::QpAttr::default()
        };
        self.modify(&mut attributes, ffi::mask::RTS, &what)
    }

    /// Moves it to the error state: it does no more work in either direction. Each work request
    /// that is not complete completes as flushed.
    ///
    /// # Errors
    /// When the device is gone.
    pub fn fail(&self) -> Result<(), Error> {
        let mut attributes = ffi::QpAttr { qp_state: ffi::QPS_ERR, ..ffi::QpAttr::default() };
        self.modify(&mut attributes, ffi::mask::STATE, "give up")
    }

    fn modify(&self, attributes: &mut ffi::QpAttr, mask: c_int, what: &str) -> Result<(), Error> {
        // SAFETY: the queue pair is valid and the attributes that the mask names are set.
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

    /// Posts a write to the peer's memory.
    ///
    /// # Errors
    /// When there is no room, or the device is gone. A queue pair that has failed accepts work,
    /// which completes as flushed.
    ///
    /// # Panics
    /// When the bytes are not in their region, or are too many for an inline write.
    pub fn post_write(&self, write: &WriteRequest<'_>) -> Result<(), Error> {
        let mut flags = ffi::SEND_SIGNALED;
        let mut part = ffi::Sge { addr: 0, length: 0, lkey: 0 };
        let mut parts = 1;
        match write.source {
            WriteSource::Empty => parts = 0,
            WriteSource::Inline(bytes) => {
                assert!(bytes.len() <= self.max_inline);
                flags |= ffi::SEND_INLINE;
                part.addr = bytes.as_ptr().expose_provenance() as u64;
                part.length = bytes.len() as u32;
            }
            WriteSource::Region(region, start, length) => {
                assert!(region.range().covers(start, length as usize));
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
            remote_addr: write.remote_address,
            rkey: write.remote_key,
            rest: [0; 9],
        };
        self.post(&mut request)
    }

    /// Posts a read of the peer's memory into a region. All that the peer's device had written
    /// there before is then visible.
    ///
    /// # Errors
    /// As [`QueuePair::post_write`].
    ///
    /// # Panics
    /// When the bytes are not in the region.
    pub fn post_read(
        &self,
        id: u64,
        into: (&MemoryRegion, u64, u32),
        from: u64,
        key: u32,
    ) -> Result<(), Error> {
        let (region, start, length) = into;
        assert!(region.range().covers(start, length as usize));
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
        // SAFETY: the queue pair is valid. The request and its list are on the caller's stack and
        // read during the call only. The memory that they name is in a region, or is copied during
        // the call. As in `CompletionQueue::poll`, the table of operations has this one.
        let code = unsafe {
            match (*(*self.raw).context).ops.post_send {
                Some(post) => post(self.raw, request, &mut bad),
                None => libc::EOPNOTSUPP,
            }
        };
        if code == 0 { Ok(()) } else { Err(self.cannot_post(code)) }
    }

    /// Posts a receive, which the next write of the peer with immediate data completes.
    ///
    /// # Errors
    /// As [`QueuePair::post_write`].
    pub fn post_recv(&self, id: u64) -> Result<(), Error> {
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
        // SAFETY: it was created once and is destroyed once.
        unsafe { (self.completions.context.functions.destroy_qp)(self.raw) };
    }
}
