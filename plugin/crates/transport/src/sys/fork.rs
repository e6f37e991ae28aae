//! Keeps sockets from living on in forked children, and tells children what belongs to their parent.
//!
//! A peer learns that this process has died when the kernel closes its sockets. A child that was forked without `exec`, such
//! as a worker of PyTorch's `DataLoader`, has duplicates of them, and they stay open as long as the child lives. So a child
//! replaces them at once by a placeholder. The numbers stay in use there: a destructor that runs in the child closes the
//! placeholder, and neither shuts down the parent's connection nor closes a file that the child has opened since.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, IntoRawFd, RawFd};
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering};

use rustix::event::{EventfdFlags, eventfd};

/// Descriptors in a part of the table, and parts. Sockets with higher numbers are not replaced.
const PART: usize = 4096;
const PARTS: usize = 1024;

type Part = [AtomicU64; PART];

/// The inode of the socket that was registered last with each number; 0 for none. Entries are never removed: a number that
/// is closed, or in use for something else, has another inode or none, and is left alone.
static TABLE: [AtomicPtr<Part>; PARTS] = [const { AtomicPtr::new(ptr::null_mut()) }; PARTS];

/// What takes the place of sockets in children; negative before there is one.
static PLACEHOLDER: AtomicI32 = AtomicI32::new(-1);

/// How many forks lie between this process and the one that has loaded the library.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// The process that made something with threads, locks or connections. A forked child has none of its threads, shares its
/// connections, and may have its locks as another thread held them.
#[derive(Clone, Copy, Debug)]
pub struct Owner {
    forks: u32,
}

impl Owner {
    /// This process.
    pub fn current() -> Self {
        install_handler();
        Self { forks: FORKS.load(Ordering::Relaxed) }
    }

    /// Whether this process is a forked child of the owner. Makes no system call and takes no lock.
    pub fn is_parent(self) -> bool {
        self.forks != FORKS.load(Ordering::Relaxed)
    }
}

/// Lets every forked child begin with [`begin_child`].
fn install_handler() {
    static HANDLER: Once = Once::new();
    HANDLER.call_once(|| {
        if let Ok(placeholder) = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK) {
            PLACEHOLDER.store(placeholder.into_raw_fd(), Ordering::Release);
        }
        // SAFETY: the handler makes only async-signal-safe calls, and the library is never unloaded (-z nodelete), or is
        // part of the program. If memory is short there is no handler, and children keep the sockets.
        unsafe { libc::pthread_atfork(None, None, Some(begin_child)) };
    });
}

/// From now on, children that are forked without `exec` do not have this socket.
pub fn keep_from_children(socket: &impl AsFd) {
    install_handler();
    let fd = socket.as_fd().as_raw_fd();
    let number = fd as usize;
    let (Some(inode), Some(part)) = (socket_inode(fd), TABLE.get(number / PART)) else { return };
    let mut memory = part.load(Ordering::Acquire);
    if memory.is_null() {
        let fresh = Box::into_raw(Box::new([const { AtomicU64::new(0) }; PART]));
        memory = match part.compare_exchange(
            ptr::null_mut(),
            fresh,
            Ordering::AcqRel,
            Ordering::Acquire,
        ) {
            Ok(_) => fresh,
            Err(other) => {
                // SAFETY: it came from a box just now, and no other thread has seen it.
                drop(unsafe { Box::from_raw(fresh) });
                other
            }
        };
    }
    // SAFETY: a part of the table is never freed once it is there, and consists of atomics.
    let part = unsafe { &*memory };
    part[number % PART].store(inode, Ordering::Release);
}

/// The inode of a socket; `None` if the descriptor is none. Async-signal-safe.
fn socket_inode(fd: RawFd) -> Option<u64> {
    let mut stat = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: fstat writes a stat where it is pointed to, and any number may be passed.
    if unsafe { libc::fstat(fd, stat.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: fstat has succeeded and so has filled it.
    let stat = unsafe { stat.assume_init() };
    (stat.st_mode & libc::S_IFMT == libc::S_IFSOCK).then_some(stat.st_ino)
}

/// Called in a child between fork and the return from it. No other thread exists. Locks and memory are as another thread may
/// have left them, so it takes none and allocates nothing.
extern "C" fn begin_child() {
    FORKS.store(FORKS.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    let placeholder = PLACEHOLDER.load(Ordering::Acquire);
    for (index, part) in TABLE.iter().enumerate() {
        // SAFETY: as in `keep_from_children`.
        let Some(part) = (unsafe { part.load(Ordering::Acquire).as_ref() }) else { continue };
        for (rest, inode) in part.iter().enumerate() {
            let fd = (index * PART + rest) as RawFd;
            let inode = inode.load(Ordering::Relaxed);
            if inode == 0 || socket_inode(fd) != Some(inode) {
                continue;
            }
            // SAFETY: both take plain numbers. The descriptor is the socket that was registered, by its inode; it is this
            // child's duplicate, which nobody else uses yet.
            unsafe {
                if placeholder < 0 || libc::dup3(placeholder, fd, libc::O_CLOEXEC) < 0 {
                    libc::close(fd);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::FromRawFd;
    use std::os::unix::net::UnixStream;

    use socket2::Socket;

    use super::*;

    /// A duplicate of a socket, with a number that no other test uses.
    fn duplicate(socket: impl AsFd, number: RawFd) -> Socket {
        // SAFETY: fcntl takes plain numbers, and the result is a new descriptor that nobody else owns.
        unsafe {
            let fd = libc::fcntl(socket.as_fd().as_raw_fd(), libc::F_DUPFD_CLOEXEC, number);
            assert_eq!(fd, number);
            Socket::from_raw_fd(fd)
        }
    }

    #[test]
    fn forked_child_loses_sockets_but_no_reused_number() {
        let (first, second) = UnixStream::pair().unwrap();
        let ours = duplicate(&first, 900);
        let closed = duplicate(&first, 901);
        [&ours, &closed].into_iter().for_each(keep_from_children);
        drop(closed);
        let reused = duplicate(&second, 901);
        let expected = socket_inode(901);
        assert!(expected.is_some());
        let owner = Owner::current();
        assert!(!owner.is_parent());
        // SAFETY: the child only makes system calls that are async-signal-safe.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let is_replaced = socket_inode(900).is_none();
            let is_kept = socket_inode(901) == expected;
            // SAFETY: fcntl takes plain numbers.
            let is_open = unsafe { libc::fcntl(900, libc::F_GETFD) } >= 0;
            let is_told = owner.is_parent() && !Owner::current().is_parent();
            let failed = i32::from(!is_replaced)
                + 2 * i32::from(!is_kept)
                + 4 * i32::from(!is_open)
                + 8 * i32::from(!is_told);
            // SAFETY: it ends the process.
            unsafe { libc::_exit(failed) };
        }
        let mut status = -1;
        // SAFETY: the status is written to this stack.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0, "exit status and signal of the child");
        drop((ours, reused));
    }
}
