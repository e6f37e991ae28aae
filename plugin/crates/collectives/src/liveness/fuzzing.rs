//! Responses to probes, parsed without sockets.

use super::{GroupFailure, PeerStatus, frame, probe};
use crate::codec::put_list;
use crate::error::ErrorKind;

/// A failure in a complete response of a responder, as it is sent again; nothing for a response without one.
pub(crate) fn decode_response(bytes: &[u8]) -> Option<Vec<u8>> {
    if frame::is_complete(bytes) != Some(true) {
        return None;
    }
    Some(match probe::decode_response(bytes)? {
        PeerStatus::Failed(failure) => frame::frame(0, frame::FAILED, &failure.encode()),
        _ => vec![],
    })
}

/// Responses of all kinds.
pub(crate) fn responses() -> Vec<Vec<u8>> {
    let text = "rank 2 was lost".to_owned();
    let failure = GroupFailure { kind: ErrorKind::Lost, ranks: vec![2, 5], text };
    let mut alive = vec![1];
    put_list(&mut alive, [1, 70_000].iter());
    vec![
        frame::frame(7, frame::UNKNOWN, &[]),
        frame::frame(7, frame::ALIVE, &alive),
        frame::frame(7, frame::FAILED, &failure.encode()),
    ]
}
