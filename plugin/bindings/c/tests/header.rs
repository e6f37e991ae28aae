//! The header says what the library has.

use std::path::Path;

/// In the order in which they are to be read.
const SOURCES: [&str; 8] = [
    "status",
    "version",
    "last_error",
    "store",
    "group",
    "reductions",
    "collectives",
    "point_to_point",
];

/// Writes it again where it is not, so that the next run passes and the change is seen.
#[test]
fn the_header_is_that_of_the_sources() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(folder.join("cbindgen.toml")).unwrap();
    let mut builder = cbindgen::Builder::new().with_config(config);
    for source in SOURCES {
        builder = builder.with_src(folder.join("src").join(source).with_extension("rs"));
    }
    let mut made = vec![];
    builder.generate().unwrap().write(&mut made);
    let path = folder.join("include/evenkeel.h");
    let there = std::fs::read(&path).unwrap_or_default();
    if there != made {
        std::fs::write(&path, &made).unwrap();
        panic!("{} was not that of the sources; now it is: see what has changed", path.display());
    }
}
