//! All unsafe code of the crate: system calls that no safe crate offers, and the memory that
//! callers lend for messages.

use std::ffi::CStr;
use std::io;
use std::mem;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use evenkeel_verbs::{Access, Context, MemoryRegion};
use socket2::Socket;

use crate::rdma::{MrCache, Registration};

/// Memory that the caller lends for one message to send.
///
/// It is a pointer and a length, not a slice: the caller's GPU may touch the memory at any time, so
/// no Rust reference to it may exist. Only the kernel reads through it.
#[derive(Clone, Copy, Debug)]
pub struct SendBuffer {
    start: *const u8,
    length: usize,
}

/// Memory that the caller lends for one message to receive; see [`SendBuffer`].
#[derive(Clone, Copy, Debug)]
pub struct RecvBuffer {
    start: *mut u8,
    length: usize,
}

// SAFETY: the pointers are only handed to the kernel, which does not care which thread asks; the
// constructors' contract makes the memory valid on every thread.
unsafe impl Send for SendBuffer {}
// SAFETY: as above; the methods through a shared reference only copy the pointer.
unsafe impl Sync for SendBuffer {}
// SAFETY: as for `SendBuffer`.
unsafe impl Send for RecvBuffer {}
// SAFETY: as for `SendBuffer`.
unsafe impl Sync for RecvBuffer {}

impl SendBuffer {
    /// Lends `length` bytes from `start`.
    ///
    /// # Safety
    /// The memory must stay readable until the request made with it has been reported as done or
    /// failed by `Request::test`, or its connection has been closed, whichever is first. Who makes
    /// requests of its own with parts of the buffer reports to its caller in the same way.
    pub unsafe fn new(start: *const u8, length: usize) -> Self {
        Self { start, length }
    }

    /// Lends memory that lives for ever.
    pub fn from_static(bytes: &'static [u8]) -> Self {
        Self { start: bytes.as_ptr(), length: bytes.len() }
    }

    /// Number of bytes lent.
    pub fn length(&self) -> usize {
        self.length
    }

    /// The checksum of the bytes and of what came `before` them.
    pub(crate) fn checksum(&self, before: u32) -> u32 {
        checksum_of(self.start, self.length, before)
    }

    /// A part of it.
    ///
    /// # Panics
    /// When the part is not inside.
    pub fn part(&self, offset: usize, length: usize) -> Self {
        assert!(offset <= self.length && length <= self.length - offset);
        // SAFETY: `offset` is inside the lent memory, as asserted.
        Self { start: unsafe { self.start.add(offset) }, length }
    }
}

impl SendBuffer {
    /// Copies the bytes, for a message that is made of more than them.
    ///
    /// # Panics
    /// When `into` is not as long.
    pub fn copy_to(&self, into: &mut [u8]) {
        assert_eq!(into.len(), self.length);
        // SAFETY: the memory is readable for `length` bytes by the contract of the constructor, and
        // `into`, borrowed mutably and as long, is no part of it.
        unsafe { ptr::copy_nonoverlapping(self.start, into.as_mut_ptr(), self.length) };
    }
}

impl RecvBuffer {
    /// Copies bytes there that came as a part of another message.
    ///
    /// # Panics
    /// When `from` is not as long.
    pub fn copy_from(&self, from: &[u8]) {
        assert_eq!(from.len(), self.length);
        // SAFETY: the memory is this buffer's to write for `length` bytes by the contract of the
        // constructor, and `from`, which is as long, is no part of it.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), self.start, self.length) };
    }
}

impl SendBuffer {
    /// Where it is, for devices.
    pub(crate) fn address(&self) -> u64 {
        self.start.addr() as u64
    }

    /// Registers it with a device, which reads it. The registration is dropped before the request is reported.
    pub(crate) fn register(
        &self,
        context: &Arc<Context>,
    ) -> Result<MemoryRegion, evenkeel_verbs::Error> {
        // SAFETY: the memory stays as long as the request is not reported by the contract of the constructor, which is
        // longer than the registration; it is only read.
        unsafe { MemoryRegion::new(context, self.start.cast_mut(), self.length, Access::Send) }
    }
}

impl RecvBuffer {
    /// Where it is, for devices.
    pub(crate) fn address(&self) -> u64 {
        self.start.addr() as u64
    }

    /// Registers it with a device, which the peer writes through. The registration is dropped before the request is
    /// reported, or is the caller's.
    pub(crate) fn register(
        &self,
        context: &Arc<Context>,
    ) -> Result<MemoryRegion, evenkeel_verbs::Error> {
        // SAFETY: the memory is the request's alone until that is reported, and stays until a registration is dropped, by
        // the contract of the constructor.
        unsafe { MemoryRegion::new(context, self.start, self.length, Access::All) }
    }
}

/// The checksum of lent memory and what came `before` it.
fn checksum_of(start: *const u8, length: usize, mut before: u32) -> u32 {
    // By way of a copy: no reference to lent memory may exist.
    let mut block = [0; 4096];
    let mut done = 0;
    while done < length {
        let part = (length - done).min(block.len());
        // SAFETY: the callers' buffers are readable for `length` bytes by the contract of their constructors, as long as
        // their requests are not reported, which whoever asks for a checksum sees to; the block is on this stack and as
        // long as `part` at least.
        unsafe { ptr::copy_nonoverlapping(start.add(done), block.as_mut_ptr(), part) };
        before = evenkeel_protocol::checksum(before, &block[..part]);
        done += part;
    }
    before
}

impl RecvBuffer {
    /// Lends `length` bytes from `start`.
    ///
    /// # Safety
    /// The memory must stay writable, and nothing else may write to it, until the request made with
    /// it has been reported as done or failed by `Request::test`, or its connection has been
    /// closed, whichever is first. Who makes requests of its own with parts of the buffer reports
    /// to its caller in the same way. Memory of which a registration is made must stay mapped until
    /// that is dropped, and no reference to it may exist while messages are received there.
    pub unsafe fn new(start: *mut u8, length: usize) -> Self {
        Self { start, length }
    }

    /// Lends memory that lives for ever.
    pub fn from_static(bytes: &'static mut [u8]) -> Self {
        Self { start: bytes.as_mut_ptr(), length: bytes.len() }
    }

    /// Number of bytes lent.
    pub fn length(&self) -> usize {
        self.length
    }

    /// The checksum of the bytes and of what came `before` them.
    pub(crate) fn checksum(&self, before: u32) -> u32 {
        checksum_of(self.start, self.length, before)
    }

    /// A part of it.
    ///
    /// # Panics
    /// When the part is not inside.
    pub fn part(&self, offset: usize, length: usize) -> Self {
        assert!(offset <= self.length && length <= self.length - offset);
        // SAFETY: `offset` is inside the lent memory, as asserted.
        Self { start: unsafe { self.start.add(offset) }, length }
    }
}

/// Memory of this crate's own, to send from.
pub(crate) struct Memory {
    start: *mut u8,
    length: usize,
}

// SAFETY: the memory is owned, and written only through `&mut self`.
unsafe impl Send for Memory {}

impl Memory {
    pub(crate) fn new(length: usize) -> Self {
        let memory = Box::into_raw(vec![0; length].into_boxed_slice());
        Self { start: memory.cast(), length }
    }

    /// Copies a message to `at`. The copy is valid until this is dropped, and as long as nothing
    /// else is stored over it; both are up to the caller, as what it sends is.
    ///
    /// # Panics
    /// When it does not fit.
    pub(crate) fn store(&mut self, at: usize, message: SendBuffer) -> SendBuffer {
        assert!(at <= self.length && message.length <= self.length - at);
        // SAFETY: the place is inside this memory, as asserted; the message is readable by the
        // contract of `SendBuffer::new` and lies elsewhere, since nobody outside has this memory.
        unsafe {
            let start = self.start.add(at);
            ptr::copy_nonoverlapping(message.start, start, message.length);
            SendBuffer { start, length: message.length }
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let memory = ptr::slice_from_raw_parts_mut(self.start, self.length);
        // SAFETY: it came from a box of this length in `new` and is given back once.
        drop(unsafe { Box::from_raw(memory) });
    }
}

/// Memory that belongs to whoever has it: its maker, or a message until that is sent or received.
pub struct Block {
    start: *mut u8,
    length: usize,
    /// With the device of the first message that needs it.
    registration: OnceLock<Registration>,
}

// SAFETY: the memory is owned, and written only through `&mut self` or by the message it was lent to, which has it alone.
unsafe impl Send for Block {}
// SAFETY: a shared reference only reads.
unsafe impl Sync for Block {}

impl Block {
    /// So many bytes, all zero.
    pub fn new(length: usize) -> Self {
        let memory = Box::into_raw(vec![0; length].into_boxed_slice());
        Self { start: memory.cast(), length, registration: OnceLock::new() }
    }

    /// Registers it for as long as it lives, unless it is registered already: who uses a block for one message after the
    /// other is not to pay for each. Where that cannot be done, a message that needs it says so.
    pub(crate) fn register_with(&self, registrar: &MrCache) {
        // Of which the registration is dropped before the memory is given back; nobody is told to write there but for a
        // message that has it alone.
        let memory = RecvBuffer { start: self.start, length: self.length };
        if self.registration.get().is_none()
            && let Ok(Some(registration)) = registrar.register(memory)
        {
            // Somebody else may have been faster.
            let _ = self.registration.set(registration);
        }
    }

    /// What is in it.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the memory is owned, initialized and this long; nobody writes while a shared reference exists.
        unsafe { std::slice::from_raw_parts(self.start, self.length) }
    }

    /// What is in it, to be changed.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the reference is the only one.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.length) }
    }

    /// Its first bytes, for a message to send. Whoever asks keeps the block, unchanged, as long as
    /// the contract of [`SendBuffer::new`] wants.
    ///
    /// # Panics
    /// When it is not as long.
    pub(crate) fn lend(&self, length: usize) -> SendBuffer {
        assert!(length <= self.length);
        SendBuffer { start: self.start, length }
    }

    /// Its first bytes, for a message to receive. Whoever asks keeps the block away from everybody
    /// as long as the contract of [`RecvBuffer::new`] wants.
    ///
    /// # Panics
    /// When it is not as long.
    pub(crate) fn lend_mut(&mut self, length: usize) -> RecvBuffer {
        assert!(length <= self.length);
        RecvBuffer { start: self.start, length }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        drop(self.registration.take());
        let memory = ptr::slice_from_raw_parts_mut(self.start, self.length);
        // SAFETY: it came from a box of this length in `new` and is given back once.
        drop(unsafe { Box::from_raw(memory) });
    }
}

/// Memory from which the processor can be kept, as it is from a GPU's: devices get at it all the same, once it is registered.
#[cfg(test)]
pub(crate) struct Fenced {
    start: *mut u8,
    length: usize,
    /// Of the mapping.
    mapped: usize,
    is_open: bool,
    registration: OnceLock<Registration>,
}

// SAFETY: the memory is owned, and written only through `&mut self` or by the message it was lent to, which has it alone.
#[cfg(test)]
unsafe impl Send for Fenced {}

#[cfg(test)]
impl Fenced {
    /// So many bytes, all zero, which the processor reaches.
    pub(crate) fn new(length: usize) -> Self {
        let mapped = length.max(1).next_multiple_of(4096);
        let (access, kind) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping touches no other memory.
        let start = unsafe { libc::mmap(ptr::null_mut(), mapped, access, kind, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED, "{}", io::Error::last_os_error());
        let registration = OnceLock::new();
        Self { start: start.cast(), length, mapped, is_open: true, registration }
    }

    /// Registers it as a GPU's memory is, for as long as it lives.
    pub(crate) fn register_with(&self, registrar: &MrCache) {
        let memory = RecvBuffer { start: self.start, length: self.mapped };
        let registration = registrar.register_peer_memory(memory).unwrap();
        assert!(self.registration.set(registration).is_ok(), "registered twice");
    }

    /// Whether the processor reaches it from now on; if it does not, it is a fault (SIGSEGV) that it tries.
    pub(crate) fn open(&mut self, open: bool) {
        let access = if open { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_NONE };
        // SAFETY: the mapping is owned, and no reference to it exists while this is borrowed mutably.
        let result = unsafe { libc::mprotect(self.start.cast(), self.mapped, access) };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
        self.is_open = open;
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        assert!(self.is_open);
        // SAFETY: the memory is owned, initialized, this long, and can be read, as asserted; nobody writes while a shared
        // reference exists.
        unsafe { std::slice::from_raw_parts(self.start, self.length) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        assert!(self.is_open);
        // SAFETY: as above, and the reference is the only one.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.length) }
    }

    /// As [`Block::lend`].
    pub(crate) fn lend(&self, length: usize) -> SendBuffer {
        assert!(length <= self.length);
        SendBuffer { start: self.start, length }
    }

    /// As [`Block::lend_mut`].
    pub(crate) fn lend_mut(&mut self, length: usize) -> RecvBuffer {
        assert!(length <= self.length);
        RecvBuffer { start: self.start, length }
    }
}

#[cfg(test)]
impl Drop for Fenced {
    fn drop(&mut self) {
        drop(self.registration.take());
        // SAFETY: the mapping is owned and given back once.
        unsafe { libc::munmap(self.start.cast(), self.mapped) };
    }
}

/// Locks a mutex whose data stays consistent even if a holder panicked.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Repeats a call that a signal interrupted.
pub(crate) fn uninterrupted<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// Most frames that are sent at a time.
pub(crate) const MAX_FRAMES: usize = 16;

/// Sends `header`, then `payload`, as far as the socket takes them. Returns the number of bytes
/// taken of both together.
pub(crate) fn send_with_header(
    socket: &Socket,
    header: &[u8],
    payload: SendBuffer,
) -> io::Result<usize> {
    send_frames(socket, std::iter::once((header, payload)))
}

/// Sends frames, each of a header and a payload, one behind the other, as far as the socket takes
/// them. Returns the number of bytes taken of all together.
///
/// # Panics
/// When there are more than [`MAX_FRAMES`].
pub(crate) fn send_frames<'a>(
    socket: &Socket,
    frames: impl Iterator<Item = (&'a [u8], SendBuffer)>,
) -> io::Result<usize> {
    const NOTHING: libc::iovec = libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 };
    let mut parts = [NOTHING; 2 * MAX_FRAMES];
    let mut used = 0;
    for (header, payload) in frames {
        let header =
            libc::iovec { iov_base: header.as_ptr().cast_mut().cast(), iov_len: header.len() };
        let payload =
            libc::iovec { iov_base: payload.start.cast_mut().cast(), iov_len: payload.length };
        parts[used..used + 2].copy_from_slice(&[header, payload]);
        used += 2;
    }
    let message = message_of(&mut parts[..used]);
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    uninterrupted(|| {
        // SAFETY: `message` points to parts on this stack: headers, borrowed for the call, and lent
        // memory that is readable by the contract of `SendBuffer::new`, because a buffer is
        // forgotten before its request is reported and before its connection is closed. sendmsg
        // only reads them.
        let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &message, flags) };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    })
}

/// Receives into `payload`, then into `header`, as much as there is. Returns the number of bytes
/// received in both together; 0 at the end of the stream.
pub(crate) fn recv_with_header(
    socket: &Socket,
    payload: RecvBuffer,
    header: &mut [u8],
) -> io::Result<usize> {
    let mut parts = [
        libc::iovec { iov_base: payload.start.cast(), iov_len: payload.length },
        libc::iovec { iov_base: header.as_mut_ptr().cast(), iov_len: header.len() },
    ];
    let mut message = message_of(&mut parts);
    uninterrupted(|| {
        // SAFETY: `message` points to two parts on this stack: lent memory that is ours to write by
        // the contract of `RecvBuffer::new` (see `send_frames`), and `header`, borrowed
        // mutably for the call. recvmsg writes no further than their lengths.
        let received =
            unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, libc::MSG_DONTWAIT) };
        usize::try_from(received).map_err(|_| io::Error::last_os_error())
    })
}

fn message_of(parts: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: msghdr is plain C data for which all zeros (null pointers, no lengths) is valid.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_iov = parts.as_mut_ptr();
    message.msg_iovlen = parts.len();
    message
}

/// Takes up to `length` bytes off the socket without storing them anywhere; 0 at the end of the
/// stream.
pub(crate) fn discard(socket: &Socket, length: usize) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_TRUNC;
    uninterrupted(|| {
        // SAFETY: with MSG_TRUNC, TCP drops the bytes and does not write to the buffer, which may
        // therefore be null.
        let dropped = unsafe { libc::recv(socket.as_raw_fd(), ptr::null_mut(), length, flags) };
        usize::try_from(dropped).map_err(|_| io::Error::last_os_error())
    })
}

/// Bytes written to the socket that the peer's host has not acknowledged.
pub(crate) fn unacknowledged(socket: &Socket) -> u64 {
    let mut bytes: libc::c_int = 0;
    // SAFETY: TIOCOUTQ (SIOCOUTQ) stores a c_int where it is pointed to.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &mut bytes) };
    // It fails only on what is no TCP socket.
    if result == 0 { u64::try_from(bytes).unwrap_or(0) } else { 0 }
}

/// Makes a socket report "writable" only while fewer than `bytes` wait in it unsent, so that a
/// flow whose path does not drain takes no more chunks.
pub(crate) fn set_unsent_limit(socket: &Socket, bytes: u32) -> io::Result<()> {
    set_option(socket, libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, bytes as libc::c_int)
}

/// Lets the kernel send again, and acknowledge at the latest, after this time beyond the usual round trip. Its own is 0.2 s.
///
/// # Errors
/// Kernels before Linux 6.15 cannot be told.
pub(crate) fn set_least_resend_time(socket: &Socket, time: Duration) -> io::Result<()> {
    // linux/tcp.h; the libc crate does not have it.
    const TCP_RTO_MIN_US: libc::c_int = 45;
    set_option(socket, libc::IPPROTO_TCP, TCP_RTO_MIN_US, time.as_micros() as libc::c_int)
}

/// Lets `bind` to an address leave the choice of the port to `connect`, which can share ports
/// between destinations.
pub(crate) fn set_late_port(socket: &Socket) -> io::Result<()> {
    set_option(socket, libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, 1)
}

fn set_option(
    socket: &Socket,
    level: libc::c_int,
    option: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    // SAFETY: the pointer is to a c_int on this stack and the length is that of a c_int.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            ptr::from_ref(&value).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// What the kernel knows about a TCP connection and its path.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PathInfo {
    /// Times that the kernel has asked the peer in vain since it last answered. A peer that is
    /// alive but does not read answers window probes, so it never counts as silent.
    pub(crate) unanswered: u8,
    /// Time since it last asked, or sent anything else, as far as that is known; else none.
    pub(crate) asked: Duration,
    /// Time since the peer's host last acknowledged anything.
    pub(crate) silent: Duration,
    /// Bytes that the peer's host has acknowledged in all.
    pub(crate) acked: u64,
    /// Time in which there was something to acknowledge, and the peer's process let it come.
    pub(crate) busy: Duration,
    /// Shortest round trip seen.
    pub(crate) round_trip: Duration,
    /// Smoothed round trip.
    pub(crate) usual_round_trip: Duration,
}

/// Asks the kernel about a TCP connection.
pub(crate) fn path_info(socket: &Socket) -> io::Result<PathInfo> {
    Ok(tcp_info(socket)?.into())
}

impl From<libc::tcp_info> for PathInfo {
    fn from(info: libc::tcp_info) -> Self {
        let busy = info.tcpi_busy_time.saturating_sub(info.tcpi_rwnd_limited);
        // A probe carries no data, so that the kernel does not tell when it was sent: perhaps just now.
        let asked = if info.tcpi_probes == 0 { info.tcpi_last_data_sent } else { 0 };
        Self {
            unanswered: info.tcpi_retransmits.max(info.tcpi_probes),
            asked: Duration::from_millis(asked.into()),
            silent: Duration::from_millis(info.tcpi_last_ack_recv.into()),
            acked: info.tcpi_bytes_acked,
            busy: Duration::from_micros(busy),
            round_trip: Duration::from_micros(info.tcpi_min_rtt.into()),
            usual_round_trip: Duration::from_micros(info.tcpi_rtt.into()),
        }
    }
}

/// What people want to know of a socket's path.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PathFigures {
    /// Smoothed.
    pub(crate) round_trip: Duration,
    /// Segments sent again so far.
    pub(crate) retransmits: u64,
    /// Bytes per second.
    pub(crate) delivery_rate: u64,
    /// Bytes not sent yet.
    pub(crate) queued: u64,
}

/// Asks the kernel for a socket's [`PathFigures`].
pub(crate) fn path_figures(socket: &Socket) -> io::Result<PathFigures> {
    let info = tcp_info(socket)?;
    Ok(PathFigures {
        round_trip: Duration::from_micros(info.tcpi_rtt.into()),
        retransmits: info.tcpi_total_retrans.into(),
        delivery_rate: info.tcpi_delivery_rate,
        queued: info.tcpi_notsent_bytes.into(),
    })
}

fn tcp_info(socket: &Socket) -> io::Result<libc::tcp_info> {
    // SAFETY: tcp_info is plain integers, for which all zeros is valid.
    let mut info: libc::tcp_info = unsafe { mem::zeroed() };
    let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the pointer is to a tcp_info on this stack and `length` is its size; the kernel
    // writes no more than that.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            ptr::from_mut(&mut info).cast(),
            &mut length,
        )
    };
    if result == 0 { Ok(info) } else { Err(io::Error::last_os_error()) }
}

/// Fills an array with random bytes from the kernel.
pub(crate) fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        let rest = &mut bytes[filled..];
        filled += uninterrupted(|| {
            // SAFETY: pointer and length are those of `rest`.
            let got = unsafe { libc::getrandom(rest.as_mut_ptr().cast(), rest.len(), 0) };
            usize::try_from(got).map_err(|_| io::Error::last_os_error())
        })?;
    }
    Ok(bytes)
}

/// Keeps the process's signal handlers (Python's, say) off the calling thread.
pub(crate) fn block_signals() {
    // SAFETY: a zeroed sigset_t is valid memory for sigfillset to initialise; pthread_sigmask
    // reads it and changes the mask of this thread only.
    unsafe {
        let mut all: libc::sigset_t = mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, ptr::null_mut());
    }
}

/// An address of a network interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct InterfaceAddress {
    pub(crate) name: String,
    pub(crate) ip: IpAddr,
    /// Interface index, which scopes link-local addresses.
    pub(crate) index: u32,
    /// Whether the interface is up and has a carrier.
    pub(crate) running: bool,
    pub(crate) loopback: bool,
}

/// The IP addresses of all interfaces, in the kernel's order.
pub(crate) fn interface_addresses() -> io::Result<Vec<InterfaceAddress>> {
    let mut list: *mut libc::ifaddrs = ptr::null_mut();
    // SAFETY: getifaddrs stores the head of a list that freeifaddrs releases below.
    if unsafe { libc::getifaddrs(&mut list) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut addresses = Vec::new();
    let mut next = list;
    while !next.is_null() {
        // SAFETY: `next` is an element of the list, which is not released before the loop ends.
        let element = unsafe { &*next };
        // SAFETY: every element has a name that ends in a zero byte and lives as long as the list.
        let name = unsafe { CStr::from_ptr(element.ifa_name) };
        // SAFETY: the address of an element is null or a sockaddr as long as its family says.
        if let Some(ip) = unsafe { ip_of(element.ifa_addr) } {
            let flags = element.ifa_flags as libc::c_int;
            let running = libc::IFF_UP | libc::IFF_RUNNING;
            addresses.push(InterfaceAddress {
                name: name.to_string_lossy().into_owned(),
                ip,
                // SAFETY: `name` is a string that ends in a zero byte.
                index: unsafe { libc::if_nametoindex(element.ifa_name) },
                running: flags & running == running,
                loopback: flags & libc::IFF_LOOPBACK != 0,
            });
        }
        next = element.ifa_next;
    }
    // SAFETY: `list` came from getifaddrs, and nothing borrowed from it is left.
    unsafe { libc::freeifaddrs(list) };
    Ok(addresses)
}

/// # Safety
/// `address` must be null or point to a socket address as long as its family says.
unsafe fn ip_of(address: *const libc::sockaddr) -> Option<IpAddr> {
    if address.is_null() {
        return None;
    }
    // SAFETY: not null, and the family is the first field of every socket address.
    match libc::c_int::from(unsafe { (*address).sa_family }) {
        libc::AF_INET => {
            // SAFETY: an address of this family is a sockaddr_in.
            let v4 = unsafe { ptr::read_unaligned(address.cast::<libc::sockaddr_in>()) };
            Some(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: an address of this family is a sockaddr_in6.
            let v6 = unsafe { ptr::read_unaligned(address.cast::<libc::sockaddr_in6>()) };
            Some(Ipv6Addr::from(v6.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use socket2::{Domain, Type};

    use super::*;

    #[test]
    fn loopback_is_listed() {
        let addresses = interface_addresses().unwrap();
        let lo = addresses.iter().find(|address| address.loopback).unwrap();
        assert!(lo.ip.is_loopback() && lo.index > 0, "{lo:?}");
    }

    #[test]
    fn random_bytes_differ() {
        assert_ne!(random::<16>().unwrap(), random::<16>().unwrap());
    }

    /// The kernel asks a peer that takes nothing now and then whether it takes something again.
    #[test]
    fn a_peer_that_does_not_read_is_not_taken_for_silent_while_a_probe_is_on_its_way() {
        // SAFETY: as in `tcp_info`.
        let mut info: libc::tcp_info = unsafe { mem::zeroed() };
        (info.tcpi_probes, info.tcpi_last_data_sent) = (1, 60_000);
        assert_eq!(PathInfo::from(info).asked, Duration::ZERO);
        (info.tcpi_probes, info.tcpi_retransmits) = (0, 1);
        assert_eq!(PathInfo::from(info).asked, Duration::from_secs(60));
    }

    #[test]
    fn what_is_lost_is_sent_again_soon_where_the_kernel_can_be_told() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("listen");
        let address = listener.local_addr().expect("an address").into();
        let resend_time = |told: &mut dyn FnMut(&Socket)| {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
            told(&socket);
            socket.connect(&address).expect("connect");
            tcp_info(&socket).expect("a connection").tcpi_rto
        };
        let usual = resend_time(&mut |_| ());
        let mut answer = Ok(());
        let told = resend_time(&mut |socket| {
            answer = set_least_resend_time(socket, Duration::from_millis(20));
        });
        match answer {
            Ok(()) => assert!(told < usual / 2, "{told} us instead of {usual} us"),
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ENOPROTOOPT)),
        }
    }

    #[test]
    #[should_panic(expected = "offset <= self.length")]
    fn a_part_cannot_leave_its_buffer() {
        SendBuffer::from_static(b"abc").part(2, 2);
    }
}
