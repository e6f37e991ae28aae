//! `libevenkeel-mpi`: the functions of MPI that nccl-tests use, over [`evenkeel_collectives`]. `include/mpi.h` is its manual.
//!
//! A program that is compiled with that header needs no mpirun: the environment of its processes says which ranks they are, as
//! that of an Indexed Job's pods does.

mod buffer;
mod error;
pub mod functions;
mod guard;
mod handles;
mod world;
