//! System calls that no safe crate offers. All unsafe code of this crate is here and in [`crate::memory`].

use std::ffi::CStr;
use std::io;
use std::mem;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsRawFd;
use std::ptr;
use std::time::Duration;

use socket2::Socket;

use crate::memory::buffers::{RecvBuffer, SendBuffer};

/// Repeats a call that a signal interrupted.
pub(crate) fn uninterrupted<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// Maximum number of frames per system call.
pub(crate) const MAX_FRAMES: usize = 16;

/// Sends `header`, then `payload`, as far as the socket takes them. Returns the number of bytes taken of both together.
pub(crate) fn send_with_header(
    socket: &Socket,
    header: &[u8],
    payload: SendBuffer,
) -> io::Result<usize> {
    send_frames(socket, std::iter::once((header, payload)))
}

/// Sends frames, each with a header and a payload, in order and as far as the socket takes them. Returns the number of
/// bytes taken of all together.
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

/// Receives into `payload`, then into `header`, as much as is available. Returns the number of bytes received in both
/// together; 0 at the end of the stream.
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

/// Makes a socket writable only while fewer than `bytes` wait in it unsent. A flow whose path does not drain takes no more
/// chunks then.
pub(crate) fn set_unsent_limit(socket: &Socket, bytes: u32) -> io::Result<()> {
    set_option(socket, libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, bytes as libc::c_int)
}

/// Sets the minimum retransmission timeout, beyond the usual round trip, and the maximum delay of acknowledgements. The
/// kernel's default is 0.2 s.
///
/// # Errors
/// Kernels before Linux 6.15 do not have the option.
pub(crate) fn set_min_retransmit_time(socket: &Socket, time: Duration) -> io::Result<()> {
    // linux/tcp.h; the libc crate does not have it.
    const TCP_RTO_MIN_US: libc::c_int = 45;
    set_option(socket, libc::IPPROTO_TCP, TCP_RTO_MIN_US, time.as_micros() as libc::c_int)
}

/// Makes `bind` to an address leave the choice of the port to `connect`, which can share ports between destinations.
pub(crate) fn set_port_at_connect(socket: &Socket) -> io::Result<()> {
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

/// The kernel's information about a TCP connection and its path.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PathInfo {
    /// Number of unanswered retransmissions or probes since the peer last answered. A live peer that does not read answers
    /// window probes, so it never counts as silent.
    pub(crate) unanswered: u8,
    /// Time since the last of them, or since the last data; zero if that is not known.
    pub(crate) asked: Duration,
    /// Time since the peer's host last acknowledged anything.
    pub(crate) silent: Duration,
    /// Bytes that the peer's host has acknowledged so far.
    pub(crate) acked: u64,
    /// Time with unacknowledged data and an open receive window.
    pub(crate) busy: Duration,
    /// Minimum round trip.
    pub(crate) round_trip: Duration,
    /// Smoothed round trip.
    pub(crate) usual_round_trip: Duration,
}

/// Reads them from the kernel.
pub(crate) fn path_info(socket: &Socket) -> io::Result<PathInfo> {
    Ok(tcp_info(socket)?.into())
}

impl From<libc::tcp_info> for PathInfo {
    fn from(info: libc::tcp_info) -> Self {
        let busy = info.tcpi_busy_time.saturating_sub(info.tcpi_rwnd_limited);
        // A probe carries no data, so the kernel does not report when it was sent: perhaps just now.
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

/// Figures of a socket's path, for metrics.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PathFigures {
    /// Smoothed.
    pub(crate) round_trip: Duration,
    /// Segments retransmitted so far.
    pub(crate) retransmits: u64,
    /// Bytes per second.
    pub(crate) delivery_rate: u64,
    /// Bytes not sent yet.
    pub(crate) queued: u64,
}

/// Reads a socket's [`PathFigures`] from the kernel.
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
pub fn random<const N: usize>() -> io::Result<[u8; N]> {
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

/// Keeps the process's signal handlers, such as Python's, off the calling thread.
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
    fn interface_addresses_include_loopback() {
        let addresses = interface_addresses().unwrap();
        let lo = addresses.iter().find(|address| address.loopback).unwrap();
        assert!(lo.ip.is_loopback() && lo.index > 0, "{lo:?}");
    }

    #[test]
    fn random_bytes_differ() {
        assert_ne!(random::<16>().unwrap(), random::<16>().unwrap());
    }

    /// The kernel probes a peer with a closed window from time to time.
    #[test]
    fn window_probes_do_not_count_as_silence() {
        // SAFETY: as in `tcp_info`.
        let mut info: libc::tcp_info = unsafe { mem::zeroed() };
        (info.tcpi_probes, info.tcpi_last_data_sent) = (1, 60_000);
        assert_eq!(PathInfo::from(info).asked, Duration::ZERO);
        (info.tcpi_probes, info.tcpi_retransmits) = (0, 1);
        assert_eq!(PathInfo::from(info).asked, Duration::from_secs(60));
    }

    #[test]
    fn min_retransmit_time_is_set_where_supported() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("listen");
        let address = listener.local_addr().expect("an address").into();
        let retransmit_time = |configure: &mut dyn FnMut(&Socket)| {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
            configure(&socket);
            socket.connect(&address).expect("connect");
            tcp_info(&socket).expect("a connection").tcpi_rto
        };
        let usual = retransmit_time(&mut |_| ());
        let mut answer = Ok(());
        let configured = retransmit_time(&mut |socket| {
            answer = set_min_retransmit_time(socket, Duration::from_millis(20));
        });
        match answer {
            Ok(()) => assert!(configured < usual / 2, "{configured} us instead of {usual} us"),
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ENOPROTOOPT)),
        }
    }
}
