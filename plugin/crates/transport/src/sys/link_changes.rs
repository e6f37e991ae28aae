//! Waiting for a change of an interface, such as a carrier that comes.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recv, socket_with};

/// The kernel's news of interfaces (rtnetlink(7), `RTMGRP_LINK`), from its making on.
pub(crate) struct LinkChanges(OwnedFd);

impl LinkChanges {
    /// Starts to listen.
    pub(crate) fn listen() -> io::Result<Self> {
        const LINKS: u32 = 1;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let kind = SocketType::RAW;
        // Without a protocol it is NETLINK_ROUTE.
        let socket = socket_with(AddressFamily::NETLINK, kind, flags, None)?;
        bind(&socket, &SocketAddrNetlink::new(0, LINKS))?;
        Ok(Self(socket))
    }

    /// Waits for a change. False if there is none by the deadline, or the kernel does not tell.
    pub(crate) fn wait(&self, deadline: Instant) -> bool {
        let mut news = [0_u8; 4096];
        let mut has_changed = false;
        loop {
            match recv(&self.0, &mut news, RecvFlags::DONTWAIT) {
                // More than the socket has room for: something has changed.
                Ok(_) | Err(Errno::NOBUFS) => has_changed = true,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if has_changed => return true,
                Err(Errno::AGAIN) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return false;
                    }
                    // An interrupted wait is a short one.
                    let time = Timespec::try_from(left.max(Duration::from_millis(1)));
                    let mut ready = [PollFd::new(&self.0, PollFlags::IN)];
                    let _ = poll(&mut ready, Some(&time.unwrap_or_default()));
                }
                Err(_) => return false,
            }
        }
    }
}
