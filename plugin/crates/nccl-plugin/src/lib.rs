//! `libnccl-net-evenkeel.so`: NCCL's network plugin tables, v6 to v12, over [`evenkeel_transport`].
//!
//! [`net`] has the tables of the network, [`collnet`] those of reduction servers, [`tuner`] those of the tuner; [`profiler`] tells NCCL's profiler of
//! chunks. Their C functions translate arguments and
//! nothing else, with the helpers of [`ffi`]; [`error`] turns errors and panics into NCCL's result codes. [`plugin`] is the
//! state of the process, [`request_pool`] the requests of a comm, and [`logger`] passes log lines on to NCCL.
//!
//! Nothing happens when the library is loaded: no thread, no file, no socket.

mod collnet;
mod error;
mod ffi;
mod logger;
mod net;
mod plugin;
mod profiler;
mod request_pool;
mod tuner;
