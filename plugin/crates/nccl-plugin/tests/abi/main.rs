//! The library through its C tables, in the order in which NCCL's proxy thread calls them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails there")]

mod attributes;
mod c_program;
mod checksum;
mod close;
mod collnet;
mod descriptors;
mod devices;
mod exports;
mod fairness;
mod flow_failures;
mod fork;
mod gpu_memory;
mod handshake;
mod harness;
mod hostile_peer;
mod lifecycle;
mod messages;
mod outage;
mod peer_death;
mod polled_lines;
mod profiler;
mod proxy;
mod raw_peer;
mod receive_polling;
mod registrations;
mod shared_comms;
mod tables;
mod traffic_class;
mod tuner;
