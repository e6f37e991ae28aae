//! The flight recorder: the last calls of this process, to be read after a hang or a failure.
//!
//! It is always on. A call takes a slot of a preallocated ring when it is scheduled or begins, and only that slot is locked. All
//! groups share the ring, as PyTorch's reader lines the ranks up by one numbering a process: with a ring for each group, a busy
//! group would lose its first calls while a quiet one keeps them.

mod entry;
mod group;
mod rank_record;
mod report;
mod requests;
mod ring;

use std::sync::{Arc, Mutex};

use evenkeel_transport::sync::lock;

pub(crate) use entry::{Called, Recorded};
pub(crate) use group::GroupRecord;
pub use rank_record::RankRecord;
pub use report::{FlightRecord, RecordedCall, RecordedFailure, RecordedGroup};
pub use requests::on_request;

use crate::error::Error;

type FailureHook = Arc<dyn Fn(&Error) + Send + Sync>;

static FAILURE_HOOK: Mutex<Option<FailureHook>> = Mutex::new(None);

/// Sets what is called after an operation has failed, once it is recorded, on the thread that ran it. It replaces the one before. Of
/// the operations of a group that has ended only the first calls it.
pub fn on_failure(hook: impl Fn(&Error) + Send + Sync + 'static) {
    *lock(&FAILURE_HOOK) = Some(Arc::new(hook));
}

fn call_failure_hook(error: &Error) {
    let hook = lock(&FAILURE_HOOK).clone();
    if let Some(hook) = hook {
        hook(error);
    }
}
