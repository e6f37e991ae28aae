//! What the kernel knows about a TCP connection and its path.

use std::io;
use std::mem;
use std::os::fd::AsRawFd;
use std::ptr;
use std::time::Duration;

use evenkeel_protocol::PathInfo;
use socket2::Socket;

/// Reads a socket's [`PathInfo`] from the kernel.
pub(crate) fn path_info(socket: &Socket) -> io::Result<PathInfo> {
    Ok(path_info_of(&tcp_info(socket)?))
}

fn path_info_of(info: &libc::tcp_info) -> PathInfo {
    let busy = info.tcpi_busy_time.saturating_sub(info.tcpi_rwnd_limited);
    // A probe carries no data, so the kernel does not report when it was sent: perhaps just now.
    let asked = if info.tcpi_probes == 0 { info.tcpi_last_data_sent } else { 0 };
    PathInfo {
        unanswered: info.tcpi_retransmits.max(info.tcpi_probes),
        asked: Duration::from_millis(asked.into()),
        silent: Duration::from_millis(info.tcpi_last_ack_recv.into()),
        acked: info.tcpi_bytes_acked,
        busy: Duration::from_micros(busy),
        round_trip: Duration::from_micros(info.tcpi_min_rtt.into()),
        usual_round_trip: Duration::from_micros(info.tcpi_rtt.into()),
        retransmitted: info.tcpi_total_retrans.into(),
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

#[cfg(test)]
mod tests {
    use socket2::{Domain, Type};

    use super::super::socket::set_min_retransmit_time;
    use super::*;

    /// The kernel probes a peer with a closed window from time to time.
    #[test]
    fn window_probes_do_not_count_as_silence() {
        // SAFETY: as in `tcp_info`.
        let mut info: libc::tcp_info = unsafe { mem::zeroed() };
        (info.tcpi_probes, info.tcpi_last_data_sent) = (1, 60_000);
        assert_eq!(path_info_of(&info).asked, Duration::ZERO);
        (info.tcpi_probes, info.tcpi_retransmits) = (0, 1);
        assert_eq!(path_info_of(&info).asked, Duration::from_secs(60));
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
