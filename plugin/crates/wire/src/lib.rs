//! The protocol between two Evenkeel peers, without sockets or clocks.
