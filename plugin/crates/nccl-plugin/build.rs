//! Linker settings of the plugin.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // NCCL unloads the library with its last communicator. Up to v10 there is no `finalize`, and a
    // thread that has not yet ended would run unmapped code.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libnccl-net-evenkeel.so");
    // Undefined symbols must fail the build, not the training job.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,defs");
}
