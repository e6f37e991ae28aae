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
//! [`ControlMessage`]s, of which some outlive it ([`ReplayBuffer`]); [`Arrivals`] counts what has come.
//!
//! Everything here is a pure function of its arguments: no sockets, no clocks, no randomness.
//! All integers on the wire are little-endian.

mod codec;
mod handshake;
mod limits;
mod ranges;
mod rdma;
mod tcp;

pub use handshake::auth::{CHALLENGE_BYTES, JobKey, PROOF_BYTES, is_challenge};
pub use handshake::hello::{
    ConnectionId, HANDLE_BYTES, HELLO_BYTES, Handle, HandshakeError, Hello, Nonce,
    PROTOCOL_VERSION, Refusal, WELCOME_BYTES, Welcome,
};
pub use limits::{CHUNK_ALIGN, MAX_ADDRESSES, MAX_FLOWS, MAX_MESSAGE_BYTES, MAX_QUEUE_PAIRS};
pub use rdma::arrivals::{ArrivalError, Arrivals, Immediate, MAX_PARTS, ReceivedMessage, WINDOW};
pub use rdma::control::{
    ControlMessage, ControlMessageError, MAX_PARTS_IN_FLIGHT, MessagePart, PacketMarking, PortInfo,
    QueuePairInfo,
};
pub use rdma::replay::ReplayBuffer;
pub use tcp::flow_count::FlowCount;
pub use tcp::frame::{ChunkHeader, FRAME_BYTES, Frame, FrameError, checksum};
pub use tcp::pacing::{Pacer, Progress};
pub use tcp::reassembly::{ChunkAction, CompletedMessage, Reassembly, ReassemblyError};
pub use tcp::repath::{FlowStats, Repath, RepathAction};
pub use tcp::scheduler::{AckError, NextFrame, Schedule, Scheduler, SentMessage};
