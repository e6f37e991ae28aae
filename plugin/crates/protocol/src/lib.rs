//! The protocol between two Evenkeel peers, without sockets or clocks.
//!
//! `handshake`: a *listener* publishes a [`Handle`] with its addresses and a random nonce. A *connector* opens one TCP
//! connection per *flow* to it and sends a [`Hello`] on each. The listener answers with a [`Welcome`]. If the job has a
//! [`JobKey`], both prove before that they have it. Flows with the same [`ConnectionId`] form one *connection*, which
//! carries messages from the connector to the listener.
//!
//! `tcp`: the [`Scheduler`] cuts messages into chunks. Whichever flow can take bytes takes the next chunk. A
//! [`ChunkHeader`] precedes the chunk on the same flow, so the receiver's [`Reassembly`] can place the bytes whatever
//! flow carries them and in whatever order. The [`Receiver`] of a connection decides which message goes where, what is
//! written to the sender, and what ends the connection. Complete messages are acknowledged in the other direction. The sender keeps
//! a message until then: when a flow fails, what it may not have delivered is retransmitted on others. [`Repair`] decides which
//! flows the sender gives up, and which it dials in their places.
//!
//! `rdma`: messages are written by queue pairs. A single TCP connection, the control connection, carries
//! [`ControlMessage`]s; a [`ReplayBuffer`] keeps those that must survive its replacement. [`Arrivals`] tracks which parts
//! of messages have been received.
//!
//! `tags`: a message with a tag goes into a buffer with the same tag, over TCP and RDMA alike. A [`TagGate`] decides when
//! the sender may send it, a [`TagMatcher`] into which buffer the receiver puts it.
//!
//! Everything here is a pure function of its arguments: no sockets, no clocks, no randomness.
//! All integers on the wire are little-endian.

mod codec;
mod handshake;
mod limits;
mod ranges;
mod rdma;
mod tags;
mod tcp;

pub use handshake::auth::{CHALLENGE_BYTES, JobKey, PROOF_BYTES, TAG_BYTES, is_challenge};
pub use handshake::encrypted::{ENCRYPTED_BYTES, Encrypted};
pub use handshake::hello::{
    ConnectionId, HANDLE_BYTES, HELLO_BYTES, Handle, HandshakeError, Hello, Nonce,
    PROTOCOL_VERSION, Refusal, WELCOME_BYTES, Welcome,
};
pub use limits::{
    CHUNK_ALIGN, MAX_ADDRESSES, MAX_CHUNK_BYTES, MAX_FLOWS, MAX_MESSAGE_BYTES, MAX_QUEUE_PAIRS,
};
pub use rdma::arrivals::{ArrivalError, Arrivals, Immediate, MAX_PARTS, ReceivedMessage, WINDOW};
pub use rdma::control::{
    ControlMessage, ControlMessageError, MAX_PARTS_IN_FLIGHT, MAX_PORTS, MessagePart,
    PacketMarking, PortInfo, QueuePairInfo,
};
pub use rdma::replay::ReplayBuffer;
pub use tags::{
    AdvertisedTags, MAX_UNEXPECTED_BYTES, MatchStep, TagGate, TagMatcher, TooLong,
    UnexpectedDelivery,
};
pub use tcp::copies::{COPY_BLOCK_BYTES, CopyId, CopyReservation, CopyRings};
pub use tcp::flow_count::FlowCount;
pub use tcp::frame::{ChunkHeader, FRAME_BYTES, Frame, FrameError, checksum};
pub use tcp::pacing::{Pacer, Progress};
pub use tcp::path::PathInfo;
pub use tcp::reassembly::{ChunkAction, CompletedMessage, Reassembly, ReassemblyError};
pub use tcp::receiver::{
    AddedFlow, FlowEnd, FlowId, PostedBuffer, Received, Receiver, RecvEvent, RecvFailure,
    RecvTimeouts, RecvWaits, Reserve,
};
pub use tcp::recv_codec::{Abandoned, Part, RecvCodec, RecvError, RecvStep, Room};
pub use tcp::round_trips::RoundTrips;
pub use tcp::scheduler::{AckError, NextFrame, Schedule, Scheduler, SentMessage};
pub use tcp::send_codec::{FrameSlice, MAX_FRAMES, SendCodec, Written};
pub use tcp::sender::choice::FlowChoice;
pub use tcp::sender::deferral::Deferral;
pub use tcp::sender::repair::{
    AcceptedFlow, DialFailure, FlowDeath, FlowDial, FlowReport, Outage, Repair, RepairEvent,
    RepairFailure, RepairSettings, Situation,
};
pub use tcp::sender::writer::{WriteLimits, WriteMode, Writer, writer};
pub use tcp::sender::writing::{FlowWriter, KernelQuery, WriteSituation, WriteStep};
