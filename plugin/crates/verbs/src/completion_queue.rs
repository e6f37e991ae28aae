//! Completion queues, which report the outcome of the work that was posted to queue pairs.

use std::ffi::{CStr, c_int};
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr;
use std::sync::Arc;

use crate::context::set_nonblocking;
use crate::ffi;
use crate::{Context, Error};

/// A completion queue (CQ), with a completion channel to wait for its next completion.
pub struct CompletionQueue {
    pub(crate) context: Arc<Context>,
    pub(crate) raw: *mut ffi::Cq,
    channel: *mut ffi::Channel,
}

// SAFETY: the library may be called from any thread and locks what it changes.
unsafe impl Send for CompletionQueue {}
// SAFETY: as above.
unsafe impl Sync for CompletionQueue {}

/// The completion of a work request.
#[derive(Clone, Debug)]
pub struct WorkCompletion {
    /// The id of the work request.
    pub id: u64,
    /// Its outcome.
    pub status: CompletionStatus,
}

/// The outcome of a work request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CompletionStatus {
    /// A write has reached the peer's memory, or a read is complete.
    Done,
    /// A receive: a write of the peer, with immediate data, is complete.
    Received {
        /// Number of bytes written.
        bytes: u32,
        /// The immediate data.
        immediate: u32,
    },
    /// The work request has failed, and the queue pair with it.
    Failed(String),
    /// The queue pair had failed before it did the work.
    Flushed,
}

/// Maximum number of completions that are polled at a time.
const BATCH: usize = 16;

impl CompletionQueue {
    /// A queue with room for this many completions.
    ///
    /// # Errors
    /// When the device has no room for another one.
    pub fn new(context: &Arc<Context>, depth: u32) -> Result<Self, Error> {
        let name = context.name();
        let functions = context.functions;
        // SAFETY: the context is open.
        let channel = unsafe { (functions.create_comp_channel)(context.raw) };
        if channel.is_null() {
            return Err(Error::last(format!("{name}: no completion channel")));
        }
        // From here on, dropping the queue destroys the channel.
        let mut queue = Self { context: Arc::clone(context), raw: ptr::null_mut(), channel };
        // SAFETY: the channel was made above.
        set_nonblocking(unsafe { (*channel).fd })
            .map_err(|error| Error::Call { what: format!("{name}: completion channel"), error })?;
        let depth = c_int::try_from(depth).unwrap_or(c_int::MAX);
        let vector = context.next_completion_vector();
        // SAFETY: the context is open and the channel was made on it.
        queue.raw =
            unsafe { (functions.create_cq)(context.raw, depth, ptr::null_mut(), channel, vector) };
        if queue.raw.is_null() {
            return Err(Error::last(format!("{name}: no completion queue of {depth} entries")));
        }
        Ok(queue)
    }

    /// Distinguishes it from the other completion queues of its device.
    pub fn id(&self) -> usize {
        self.raw.addr()
    }

    /// Polls some completions; none if there are none. Never blocks.
    ///
    /// # Errors
    /// When the queue has overrun or the device is gone.
    pub fn poll(&self, completions: &mut Vec<WorkCompletion>) -> Result<(), Error> {
        let mut polled = [ffi::Wc::default(); BATCH];
        // SAFETY: the queue is valid. Its context has the device's table of operations, in which
        // every provider sets this one.
        let count = unsafe {
            match (*(*self.raw).context).ops.poll_cq {
                Some(poll) => poll(self.raw, BATCH as c_int, polled.as_mut_ptr()),
                None => -libc::EOPNOTSUPP,
            }
        };
        let count = usize::try_from(count).map_err(|_| {
            let what = format!("completion queue of {}", self.context.name());
            Error::code(what, if count == -1 { libc::EIO } else { -count })
        })?;
        completions.extend(polled.iter().take(count).map(|entry| self.read(entry)));
        Ok(())
    }

    fn read(&self, entry: &ffi::Wc) -> WorkCompletion {
        // The bit of receives in the opcode. An entry that failed has no valid opcode.
        const RECV: u32 = 1 << 7;
        let status = match entry.status {
            0 if entry.opcode & RECV != 0 => CompletionStatus::Received {
                bytes: entry.byte_len,
                immediate: u32::from_be(entry.imm_data),
            },
            0 => CompletionStatus::Done,
            ffi::WC_WR_FLUSH_ERR => CompletionStatus::Flushed,
            code => {
                // SAFETY: the library returns a constant string for every number.
                let text = unsafe { CStr::from_ptr((self.context.functions.wc_status_str)(code)) };
                let vendor = entry.vendor_err;
                CompletionStatus::Failed(format!(
                    "{} (status {code}, vendor's code {vendor})",
                    text.to_string_lossy()
                ))
            }
        };
        WorkCompletion { id: entry.wr_id, status }
    }

    /// Arms the queue: the next completion makes its descriptor readable. Earlier ones do not, so
    /// poll once more.
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

    /// Acknowledges the events that made the descriptor readable, and returns whether there were
    /// any.
    pub fn disarm(&self) -> bool {
        let (mut queue, mut of) = (ptr::null_mut(), ptr::null_mut());
        let functions = self.context.functions;
        let mut any = false;
        // SAFETY: the channel is valid and does not block; each event is acknowledged once.
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
        // SAFETY: the channel, and so its descriptor, stays open as long as this lives.
        unsafe { BorrowedFd::borrow_raw((*self.channel).fd) }
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        let functions = self.context.functions;
        // SAFETY: queue pairs hold a reference to this, so none uses it. Its events are
        // acknowledged. Each is destroyed once.
        unsafe {
            if !self.raw.is_null() {
                (functions.destroy_cq)(self.raw);
            }
            (functions.destroy_comp_channel)(self.channel);
        }
    }
}
