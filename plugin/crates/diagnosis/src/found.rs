//! What the searches for late processes and for slow links share.

use crate::verdict::{Place, Suspect};
use crate::view::Process;

/// Minimum share of the time: shorter waits are normal and blame nobody.
pub(crate) const MIN_SHARE: f64 = 0.10;

/// A suspect, and the members that wait for it directly.
pub(crate) struct Found {
    pub(crate) suspect: Suspect,
    pub(crate) holds: Vec<usize>,
    /// Whether `holds` begins with the suspect's own member, which does not count as waiting for
    /// itself.
    pub(crate) is_member: bool,
}

/// The place of a process and one of its devices. An empty device stands for the whole process.
pub(crate) fn place(process: &Process, device: &str) -> Place {
    Place {
        rank: process.rank,
        host: process.host.clone(),
        pod: process.pod.clone(),
        device: device.to_owned(),
    }
}
