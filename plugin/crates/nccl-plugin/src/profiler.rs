//! Chunks as events of NCCL's profiler, through the callback that NCCL passes to `init` from v10 on. Without a profiler, NCCL's
//! callback returns at once.

use std::ffi::{c_int, c_void};
use std::mem;
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use evenkeel_nccl_abi::{
    EVENT_OF_IB_V1, EVENT_OF_SOCKET_V1, EVENT_START, EVENT_STOP, IbChunkV1, IbEventV1,
    ProfilerCallback, SUCCESS, SocketChunkV1, SocketEventV1,
};
use evenkeel_transport::chunk_events::{ChunkDescription, ChunkObserver, MessageMark, observe};

/// `IBV_WR_RDMA_WRITE_WITH_IMM`.
const RDMA_WRITE_WITH_IMMEDIATE: c_int = 1;

/// Maximum number of events of a message. NCCL's example of a profiler has room for as many (`MAX_EVENTS_PER_REQ`) and does not
/// check it. NCCL's own networks have no more.
const MAX_EVENTS: usize = 8;

/// The callback that NCCL passed last, or null.
static CALLBACK: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// Replaces the callback by the one that an `init` was given.
pub(crate) fn set(callback: Option<ProfilerCallback>) {
    static OBSERVE: Once = Once::new();
    let address = callback.map_or(ptr::null_mut(), |callback| callback as *mut c_void);
    CALLBACK.store(address, Ordering::Release);
    if callback.is_some() {
        OBSERVE.call_once(|| observe(&Profiler));
    }
}

/// A message in flight: its place in a comm, which others take later. Its address is the message's mark.
#[derive(Default)]
pub(crate) struct ProfiledMessage {
    /// NCCL's handle.
    handle: AtomicPtr<c_void>,
    /// Chunks that have begun.
    chunks: AtomicUsize,
}

impl ProfiledMessage {
    /// The mark of a message for which NCCL passed this handle, if it is not null and there is a callback.
    ///
    /// # Safety
    /// No message before has this place any more. The place stays until the message's request is reported, or its connection
    /// is closed.
    pub(crate) unsafe fn mark(&self, handle: *mut c_void) -> Option<MessageMark> {
        if handle.is_null() || CALLBACK.load(Ordering::Relaxed).is_null() {
            return None;
        }
        // The lock of the connection's queue makes both visible to the threads that move the message.
        self.handle.store(handle, Ordering::Relaxed);
        self.chunks.store(0, Ordering::Relaxed);
        MessageMark::new(ptr::from_ref(self).expose_provenance())
    }
}

struct Profiler;

/// Calls NCCL's callback, if there is one.
fn call(
    event: &mut *mut c_void,
    kind: c_int,
    message: *mut c_void,
    description: (i64, *mut c_void),
) -> bool {
    let callback = CALLBACK.load(Ordering::Acquire);
    if callback.is_null() {
        return false;
    }
    // SAFETY: `set` stored a callback of this type, and it is not null. NCCL's library stays loaded while it has connections
    // here.
    let callback = unsafe { mem::transmute::<*mut c_void, ProfilerCallback>(callback) };
    // SAFETY: the event's place and the description outlive the call. The message's handle is NCCL's own, and its request was
    // not reported, as the observer's contract says.
    unsafe { callback(event, kind, message, description.0, description.1) == SUCCESS }
}

impl ChunkObserver for Profiler {
    fn begin(&self, message: MessageMark, chunk: &ChunkDescription) -> usize {
        let message: *const ProfiledMessage = ptr::with_exposed_provenance(message.number());
        // SAFETY: `ProfiledMessage::mark` made the mark of a place that stays as long as the message is in flight by its contract,
        // and no mark is used after that. The place is only changed through atomics.
        let message = unsafe { &*message };
        if message.chunks.fetch_add(1, Ordering::Relaxed) >= MAX_EVENTS {
            return 0;
        }
        let message = message.handle.load(Ordering::Relaxed);
        let mut event = ptr::null_mut();
        let started = match *chunk {
            ChunkDescription::Tcp { socket, is_sent, bytes } => {
                let operation = c_int::from(!is_sent);
                let chunk = SocketChunkV1 { socket, operation, length: bytes };
                let mut described = SocketEventV1 { kind: 1, chunk };
                let place = ptr::from_mut(&mut described).cast();
                call(&mut event, EVENT_START, message, (EVENT_OF_SOCKET_V1, place))
            }
            ChunkDescription::Rdma { work_request, queue_pair, bytes } => {
                let chunk = IbChunkV1 {
                    device: 0,
                    work_request,
                    opcode: RDMA_WRITE_WITH_IMMEDIATE,
                    queue_pair: queue_pair.cast_signed(),
                    length: bytes,
                };
                let mut described = IbEventV1 { kind: 1, chunk };
                let place = ptr::from_mut(&mut described).cast();
                call(&mut event, EVENT_START, message, (EVENT_OF_IB_V1, place))
            }
        };
        if started { event.expose_provenance() } else { 0 }
    }

    fn end(&self, event: usize) {
        let mut event = ptr::with_exposed_provenance_mut(event);
        call(&mut event, EVENT_STOP, ptr::null_mut(), (0, ptr::null_mut()));
    }
}
