//! The protocol between two Evenkeel peers, without sockets or clocks.
//!
//! A *listener* publishes a [`Handle`]: where it listens and a random nonce. A *connector* opens
//! one TCP connection per *flow* to that address and sends a [`Hello`] on each; the listener
//! answers with a [`Welcome`], after both have proved that they have the job's [`JobKey`], if there
//! is one. Flows with the same [`ConnectionId`] form one *connection*, which
//! carries messages from the connector to the listener.
//!
//! A message is cut into chunks by the [`Scheduler`]: whichever flow can take bytes takes the next
//! chunk. A [`ChunkHeader`] travels in front of the chunk on the same flow, so the receiver's
//! [`Reassembly`] knows where the bytes belong whatever flow brings them and in whatever order.
//! Complete messages are acknowledged in the other direction of the flows. Until then the sender
//! keeps them: when a flow dies, what it may not have delivered is sent again on others.
//!
//! Where messages are carried by RDMA, there is no flow but one TCP connection, the lifeline, on which the peers say
//! [`ControlMessage`]s, of which some outlive it ([`Lasting`]); [`Arrivals`] counts what has come.
//!
//! Everything here is a pure function of its arguments: no sockets, no clocks, no randomness.
//! All integers on the wire are little-endian.

mod arrivals;
mod auth;
mod frame;
mod handshake;
mod lasting;
mod lifeline;
mod pace;
mod ranges;
mod reassembly;
mod repath;
mod schedule;
mod width;

pub use arrivals::{ArrivalError, Arrivals, Arrived, Immediate, MAX_PARTS, WINDOW};
pub use auth::{CHALLENGE_BYTES, JobKey, PROOF_BYTES, is_challenge};
pub use frame::{ChunkHeader, FRAME_BYTES, Frame, FrameError, checksum};
pub use handshake::{
    ConnectionId, HANDLE_BYTES, HELLO_BYTES, Handle, HandshakeError, Hello, MAX_ADDRESSES,
    MAX_FLOWS, Nonce, PROTOCOL_VERSION, Refusal, WELCOME_BYTES, Welcome,
};
pub use lasting::Lasting;
pub use lifeline::{
    ControlMessage, ControlMessageError, LANE_PARTS, MAX_QUEUE_PAIRS, Part, PortInfo,
    QueuePairInfo, Traffic,
};
pub use pace::{Pace, Progress};
pub use reassembly::{Claim, Completed, Reassembly, ReassemblyError};
pub use repath::{Carried, Repath, Step};
pub use schedule::{AckError, Next, Schedule, Scheduler, Sent};
pub use width::Width;

/// Longest message, in bytes. NCCL never asks for more in one request.
pub const MAX_MESSAGE_BYTES: u64 = 1 << 30;

/// Messages are split only at multiples of this many bytes: NCCL's LL128 protocol relies on lines
/// of 128 bytes arriving whole.
pub const CHUNK_ALIGN: u64 = 128;
