//! Compiles the logger: stable Rust cannot define a variadic function.
fn main() {
    println!("cargo::rerun-if-changed=src/plugin_host/logger.c");
    cc::Build::new()
        .file("src/plugin_host/logger.c")
        .warnings(true)
        .compile("evenkeel_bench_logger");
}
