//! The C structures of NCCL's net plugin interface, v6 to v12, for both sides of it.
