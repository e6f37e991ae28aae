//! Compiles the logger: stable Rust cannot define a variadic function.
fn main() {
    println!("cargo::rerun-if-changed=src/logger.c");
    cc::Build::new().file("src/logger.c").warnings(true).compile("evenkeel_bench_logger");
}
