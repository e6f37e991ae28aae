//! The requests that NCCL has in flight on one comm.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use evenkeel_nccl_abi::MAX_REQUESTS;
use evenkeel_transport::sync::lock;

use crate::error::PluginError;

/// A fixed number of requests, which stay where they are: NCCL's request pointers point to them.
pub(crate) struct RequestPool<T> {
    requests: [PooledRequest<T>; MAX_REQUESTS],
    /// Index at which the search for a free request begins.
    next: AtomicUsize,
}

/// One request of a pool; free while it is empty.
pub(crate) struct PooledRequest<T>(Mutex<Option<T>>);

impl<T> RequestPool<T> {
    pub(crate) fn new() -> Self {
        let free = |_| PooledRequest(Mutex::new(None));
        Self { requests: std::array::from_fn(free), next: AtomicUsize::new(0) }
    }

    /// Starts an operation in a free request, whose index `start` gets. `None` when no request is free, or when `start` returns
    /// none.
    pub(crate) fn start(
        &self,
        start: impl FnOnce(usize) -> Result<Option<T>, PluginError>,
    ) -> Result<Option<&PooledRequest<T>>, PluginError> {
        let first = self.next.load(Ordering::Relaxed);
        for index in (0..MAX_REQUESTS).map(|step| (first + step) % MAX_REQUESTS) {
            let request = &self.requests[index];
            let mut operation = lock(&request.0);
            if operation.is_none() {
                *operation = start(index)?;
                self.next.store(index + 1, Ordering::Relaxed);
                return Ok(operation.is_some().then_some(request));
            }
        }
        Ok(None)
    }
}

impl<T> PooledRequest<T> {
    /// Takes the operation out once it is done, which frees the request.
    pub(crate) fn take_if_done(
        &self,
        is_done: impl FnOnce(&mut T) -> Result<bool, PluginError>,
    ) -> Result<Option<T>, PluginError> {
        let mut operation = lock(&self.0);
        let pending = operation
            .as_mut()
            .ok_or_else(|| PluginError::internal("test of a finished request"))?;
        Ok(if is_done(pending)? { operation.take() } else { None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done(_: &mut usize) -> Result<bool, PluginError> {
        Ok(true)
    }

    #[test]
    fn request_pool_is_limited_and_reused() {
        let pool = RequestPool::new();
        let requests: Vec<_> =
            (0..MAX_REQUESTS).map(|n| pool.start(|_| Ok(Some(n))).unwrap().unwrap()).collect();
        assert!(pool.start(|_| panic!("no request is free")).unwrap().is_none());
        assert_eq!(requests[3].take_if_done(|_| Ok(false)).unwrap(), None);
        assert_eq!(requests[3].take_if_done(done).unwrap(), Some(3));
        assert!(requests[3].take_if_done(done).is_err(), "finished");
        let again = pool.start(|index| Ok(Some(96 + index))).unwrap().unwrap();
        assert!(std::ptr::eq(again, requests[3]));
    }
}
