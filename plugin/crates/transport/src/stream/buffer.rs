//! Memory for the records that are being sent or received.

use std::sync::Mutex;

use evenkeel_tls::MAX_RECORD;

use crate::sync::lock;

/// Records of full length that a buffer holds. One system call moves as many.
const RECORDS: usize = 4;
/// Length of a buffer.
pub(super) const BUFFER_BYTES: usize = RECORDS * MAX_RECORD;
/// Maximum number of buffers that are kept for later use: 4 MiB.
const MAX_IDLE: usize = 64;

/// Buffers that are not in use. Shared by all connections of the process, so that idle ones hold
/// nothing.
static IDLE: Mutex<Vec<Box<[u8]>>> = Mutex::new(Vec::new());

/// Memory for records, which returns to the process's pool when it is dropped.
pub(super) struct RecordBuffer(Box<[u8]>);

impl RecordBuffer {
    pub(super) fn take() -> Self {
        let idle = lock(&IDLE).pop();
        Self(idle.unwrap_or_else(|| vec![0; BUFFER_BYTES].into_boxed_slice()))
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

impl Drop for RecordBuffer {
    fn drop(&mut self) {
        let buffer = std::mem::take(&mut self.0);
        let mut idle = lock(&IDLE);
        if idle.len() < MAX_IDLE {
            idle.push(buffer);
        }
    }
}
