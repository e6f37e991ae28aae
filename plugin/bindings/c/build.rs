//! Linker settings of the library.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libevenkeel.so");
    // Threads of the transport may still be exiting when a program unloads the library.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // Undefined symbols must fail the build, not the program.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,defs");
}
