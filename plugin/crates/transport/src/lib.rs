//! Devices, the TCP engine and connections between peers.
