//! libnccl-net-evenkeel.so: NCCL's tables over the transport.
