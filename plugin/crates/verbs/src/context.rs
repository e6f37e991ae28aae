//! RDMA devices: the list of them, an open device, and its asynchronous events.

use std::ffi::{CStr, c_int, c_uint};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::Error;
use crate::ffi::{self, Functions, functions};
use crate::port::{self, Port};

/// An open device, with the protection domain of all its objects.
pub struct Context {
    pub(crate) functions: &'static Functions,
    pub(crate) raw: *mut ffi::Context,
    /// The protection domain.
    pub(crate) domain: *mut std::ffi::c_void,
    name: String,
    /// Number of completion queues so far.
    completion_queues: AtomicU32,
}

// SAFETY: the library may be called from any thread; the pointers are only handed to it.
unsafe impl Send for Context {}
// SAFETY: as above: its functions lock what they change.
unsafe impl Sync for Context {}

/// An asynchronous event of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsyncEvent {
    /// The queue pair of this number has failed.
    QueuePairFailed(u32),
    /// The completion queue of this [`crate::CompletionQueue::id`] has failed.
    CompletionQueueFailed(usize),
    /// A port is up.
    PortUp(u8),
    /// A port is down.
    PortDown(u8),
    /// The device has failed for good.
    DeviceLost,
}

/// The names of this host's devices. Empty without devices, or without RDMA in the kernel.
///
/// # Errors
/// When the library is missing.
pub fn devices() -> Result<Vec<String>, Error> {
    let functions = functions()?;
    let mut names = Vec::new();
    with_devices(functions, |name, _| {
        names.push(name.to_owned());
        None::<()>
    });
    Ok(names)
}

/// Calls `find` with each device until it returns something.
fn with_devices<T>(
    functions: &Functions,
    mut find: impl FnMut(&str, *mut std::ffi::c_void) -> Option<T>,
) -> Option<T> {
    let mut count: c_int = 0;
    // SAFETY: a place for the number is passed. The list is null or has that number of devices.
    // They are valid until the list is freed, once, below; a device that was opened meanwhile stays
    // valid.
    unsafe {
        let list = (functions.get_device_list)(&mut count);
        if list.is_null() {
            return None;
        }
        let found = (0..usize::try_from(count).unwrap_or(0)).find_map(|index| {
            let device = *list.add(index);
            let name = (functions.get_device_name)(device);
            if name.is_null() {
                None
            } else {
                find(&CStr::from_ptr(name).to_string_lossy(), device)
            }
        });
        (functions.free_device_list)(list);
        found
    }
}

impl Context {
    /// Opens a device.
    ///
    /// # Errors
    /// When the library or the device is missing, or the device cannot be opened.
    pub fn open(name: &str) -> Result<Arc<Self>, Error> {
        let functions = functions()?;
        let opened = with_devices(functions, |other, device| {
            // SAFETY: the device is one of the list.
            (other == name).then(|| unsafe { (functions.open_device)(device) })
        });
        let missing = || Error::code(format!("no RDMA device {name}"), libc::ENODEV);
        let raw = opened.ok_or_else(missing)?;
        if raw.is_null() {
            return Err(Error::last(format!("cannot open RDMA device {name}")));
        }
        // From here on, dropping the context closes the device.
        let mut context = Self {
            functions,
            raw,
            domain: ptr::null_mut(),
            name: name.to_owned(),
            completion_queues: AtomicU32::new(0),
        };
        // SAFETY: the context is open.
        set_nonblocking(unsafe { (*raw).async_fd })
            .map_err(|error| Error::Call { what: format!("RDMA device {name}"), error })?;
        // SAFETY: the context is open.
        context.domain = unsafe { (functions.alloc_pd)(raw) };
        if context.domain.is_null() {
            return Err(Error::last(format!("RDMA device {name}: no protection domain")));
        }
        Ok(Arc::new(context))
    }

    /// The completion vector for another completion queue. Queues take turns: all interrupts of one
    /// vector go to one processor.
    pub(crate) fn next_completion_vector(&self) -> c_int {
        let earlier = self.completion_queues.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the context is open.
        completion_vector(earlier, unsafe { (*self.raw).num_comp_vectors })
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A port, counted from 1.
    ///
    /// # Errors
    /// When there is no port of this number.
    pub fn port(&self, number: u8) -> Result<Port, Error> {
        let mut attributes = ffi::PortAttr::default();
        // SAFETY: the context is open and the place is a port's attributes; the library writes the
        // part of them that its first version had, or all.
        let code = unsafe { (self.functions.query_port)(self.raw, number, &mut attributes) };
        if code != 0 {
            return Err(Error::code(format!("port {number} of {}", self.name), code));
        }
        let speed = match port::speed(attributes.active_width, attributes.active_speed) {
            0 => port::listed_speed(&self.name, number),
            speed => speed,
        };
        Ok(Port {
            active: attributes.state == ffi::PORT_ACTIVE,
            ethernet: attributes.link_layer == ffi::LINK_ETHERNET,
            lid: attributes.lid,
            mtu: attributes.active_mtu as u8,
            speed,
            pkeys: attributes.pkey_tbl_len,
            grh_required: attributes.flags & ffi::PORT_GRH_REQUIRED != 0,
        })
    }

    /// The next asynchronous event of the device; `None` when there is none now. Never blocks.
    /// While there is one, the context's descriptor is readable.
    pub fn async_event(&self) -> Option<AsyncEvent> {
        loop {
            let mut event = ffi::AsyncEvent { element: ptr::null_mut(), event_type: 0 };
            // SAFETY: the context is open, its descriptor does not block, and the place is an
            // event's.
            if unsafe { (self.functions.get_async_event)(self.raw, &mut event) } != 0 {
                return None;
            }
            let kind: c_uint = event.event_type;
            // A port's number is stored as an int where other events have a pointer.
            let port = event.element.addr() as u32 as u8;
            let known = match kind {
                ffi::EVENT_QP_FATAL | ffi::EVENT_QP_REQ_ERR | ffi::EVENT_QP_ACCESS_ERR => {
                    // SAFETY: the element of these events is a queue pair, which stays until its
                    // events are acknowledged.
                    let number = unsafe { (*event.element.cast::<ffi::Qp>()).qp_num };
                    Some(AsyncEvent::QueuePairFailed(number))
                }
                ffi::EVENT_CQ_ERR => Some(AsyncEvent::CompletionQueueFailed(event.element.addr())),
                ffi::EVENT_PORT_ACTIVE => Some(AsyncEvent::PortUp(port)),
                ffi::EVENT_PORT_ERR => Some(AsyncEvent::PortDown(port)),
                ffi::EVENT_DEVICE_FATAL => Some(AsyncEvent::DeviceLost),
                _ => None,
            };
            // SAFETY: the event was received above and is acknowledged once.
            unsafe { (self.functions.ack_async_event)(&mut event) };
            if known.is_some() {
                return known;
            }
        }
    }
}

impl AsFd for Context {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor of the open device stays open as long as this lives.
        unsafe { BorrowedFd::borrow_raw((*self.raw).async_fd) }
    }
}

/// The vector of a completion queue, after this number of earlier ones, of so many that the device
/// has.
fn completion_vector(earlier: u32, vectors: c_int) -> c_int {
    let vectors = u32::try_from(vectors).unwrap_or(0).max(1);
    (earlier % vectors) as c_int
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: all objects of the domain and the device hold a reference to this, so they are
        // gone; each is closed once.
        unsafe {
            if !self.domain.is_null() {
                (self.functions.dealloc_pd)(self.domain);
            }
            (self.functions.close_device)(self.raw);
        }
    }
}

/// Makes a descriptor of the library non-blocking.
pub(crate) fn set_nonblocking(fd: c_int) -> io::Result<()> {
    // SAFETY: fcntl takes any descriptor; one that is not open is an error.
    let result = unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFL);
        libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completion_vectors_take_turns() {
        let of = |vectors| (0..6).map(move |earlier| completion_vector(earlier, vectors));
        assert_eq!(of(4).collect::<Vec<_>>(), [0, 1, 2, 3, 0, 1]);
        for unknown in [1, 0, -1] {
            assert!(of(unknown).all(|vector| vector == 0));
        }
        assert_eq!(completion_vector(u32::MAX, 2), 1);
    }

    /// Passes with RDMA and without, with the library and without.
    #[test]
    fn missing_device_is_named_in_the_error() {
        match devices() {
            Ok(names) => assert!(names.iter().all(|name| !name.is_empty())),
            Err(error) => assert!(error.to_string().contains("libibverbs.so.1"), "{error}"),
        }
        let error = Context::open("no-such-device").err().unwrap().to_string();
        assert!(error.contains("no-such-device") || error.contains("libibverbs"), "{error}");
    }
}
