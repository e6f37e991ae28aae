//! Calls on sockets that the standard library does not offer.

use std::io;
use std::mem;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, FromRawFd};
use std::ptr;
use std::time::Duration;

use evenkeel_protocol::MAX_FRAMES;
use socket2::{SockAddr, Socket};

use super::process::uninterrupted;
use crate::memory::buffers::{RecvBuffer, SendBuffer};

/// Sends frames, each with a header and a payload, in order and as far as the socket takes them.
/// Returns the number of bytes taken of all together.
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
            libc::iovec { iov_base: payload.start().cast_mut().cast(), iov_len: payload.length() };
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

/// Receives into `payload`, then into `header`, as much as is available. Returns the number of
/// bytes received in both together; 0 at the end of the stream.
pub(crate) fn recv_with_header(
    socket: &Socket,
    payload: RecvBuffer,
    header: &mut [u8],
) -> io::Result<usize> {
    let mut parts = [
        libc::iovec { iov_base: payload.start().cast(), iov_len: payload.length() },
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

/// Accepts a TCP connection, as a non-blocking socket.
pub(crate) fn accept(listening: &Socket) -> io::Result<(Socket, SocketAddr)> {
    let flags = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: the storage is large enough for every address, and accept4 writes the address and its
    // length. The result is a new descriptor that nobody else owns.
    let (socket, peer) = unsafe {
        SockAddr::try_init(|storage, length| {
            match libc::accept4(listening.as_raw_fd(), storage.cast(), length, flags) {
                -1 => Err(io::Error::last_os_error()),
                fd => Ok(Socket::from_raw_fd(fd)),
            }
        })?
    };
    let peer = peer.as_socket().ok_or_else(|| io::Error::other("not an IP address"))?;
    Ok((socket, peer))
}

/// Drops up to `length` bytes from the socket; 0 at the end of the stream.
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
    // It fails only on a socket that is not TCP.
    if result == 0 { u64::try_from(bytes).unwrap_or(0) } else { 0 }
}

/// Makes a socket writable only while fewer than `bytes` wait in it unsent. A flow whose path does
/// not drain takes no more chunks then.
pub(crate) fn set_unsent_limit(socket: &Socket, bytes: u32) -> io::Result<()> {
    set_option(socket, libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, bytes as libc::c_int)
}

/// Sets the minimum retransmission timeout, beyond the usual round trip, and the maximum delay of
/// acknowledgements. The kernel's default is 0.2 s.
///
/// # Errors
/// Kernels before Linux 6.15 do not have the option.
pub(crate) fn set_min_retransmit_time(socket: &Socket, time: Duration) -> io::Result<()> {
    // linux/tcp.h; the libc crate does not have it.
    const TCP_RTO_MIN_US: libc::c_int = 45;
    set_option(socket, libc::IPPROTO_TCP, TCP_RTO_MIN_US, time.as_micros() as libc::c_int)
}

/// Makes `bind` to an address leave the choice of the port to `connect`, which can share ports
/// between destinations.
pub(crate) fn set_port_at_connect(socket: &Socket) -> io::Result<()> {
    set_option(socket, libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, 1)
}

/// An option that is an integer.
#[cfg(test)]
pub(crate) fn option(socket: &Socket, level: libc::c_int, option: libc::c_int) -> libc::c_int {
    let (mut value, mut length): (libc::c_int, _) = (-1, size_of::<libc::c_int>() as _);
    // SAFETY: the pointers are to a c_int on this stack and to its length.
    let result = unsafe {
        let value = ptr::from_mut(&mut value).cast();
        libc::getsockopt(socket.as_raw_fd(), level, option, value, &mut length)
    };
    assert_eq!(result, 0, "option {option}: {}", io::Error::last_os_error());
    value
}

/// Test only: makes a TCP socket ignore packets of more than this many bytes, without their IP
/// header.
#[cfg(test)]
pub(crate) fn drop_longer_packets(socket: &Socket, bytes: u32) -> io::Result<()> {
    let step = |code, jf, k| libc::sock_filter { code, jt: 0, jf, k };
    // linux/bpf_common.h: load the length, skip one step unless it is greater, return none or all
    // of the packet.
    let mut steps = [step(0x80, 0, 0), step(0x25, 1, bytes), step(6, 0, 0), step(6, 0, u32::MAX)];
    let program = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
    // SAFETY: the program points to the steps on this stack, and setsockopt only reads both.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const program).cast(),
            size_of::<libc::sock_fprog>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn set_option(
    socket: &Socket,
    level: libc::c_int,
    option: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    set_option_bytes(socket, level, option, &value.to_ne_bytes())
}

/// Sets an option whose value is of the kernel's choosing.
pub(super) fn set_option_bytes(
    socket: &Socket,
    level: libc::c_int,
    option: libc::c_int,
    value: &[u8],
) -> io::Result<()> {
    // SAFETY: the pointer and the length are those of a slice, which setsockopt only reads.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            value.as_ptr().cast(),
            value.len() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
