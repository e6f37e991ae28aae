//! Linker settings of the library.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // Not libmpi.so: a program must not find another MPI under that name when it starts. Their constants differ.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libevenkeel-mpi.so");
    // Threads of the transport may still be exiting when a program unloads the library.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // Undefined symbols must fail the build, not the program.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,defs");
}
