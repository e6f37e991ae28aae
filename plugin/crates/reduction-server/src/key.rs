//! What identifies a communicator at the server.

use evenkeel_reduction::Member;

/// The job and the unique id of a communicator.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CommunicatorKey {
    job: String,
    unique_id: [u8; 16],
}

impl CommunicatorKey {
    /// The key of a member's communicator.
    pub(crate) fn of(member: &Member) -> Self {
        Self { job: member.job.clone(), unique_id: member.unique_id }
    }
}
