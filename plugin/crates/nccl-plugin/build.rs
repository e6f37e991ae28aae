//! Linker settings of the plugin.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // NCCL unloads the library with its last communicator. Up to v10 it does not say so before, and
    // a thread that is still on its way out would run unmapped code.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libnccl-net-evenkeel.so");
    // Undefined symbols shall fail the build, not the training job.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,defs");
}
