//! The header matches the library.

use std::path::Path;

/// The order of the sources in the header.
const SOURCES: [&str; 11] = [
    "status",
    "version",
    "last_error",
    "store",
    "group",
    "request",
    "call",
    "reductions",
    "collectives",
    "point_to_point",
    "flight_recorder",
];

/// Writes the header if it differs, so that the next run passes and the change is visible.
#[test]
fn header_matches_the_sources() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(folder.join("cbindgen.toml")).unwrap();
    let mut builder = cbindgen::Builder::new().with_config(config);
    for source in SOURCES {
        builder = builder.with_src(folder.join("src").join(source).with_extension("rs"));
    }
    let mut generated = vec![];
    builder.generate().unwrap().write(&mut generated);
    let path = folder.join("include/evenkeel.h");
    let current = std::fs::read(&path).unwrap_or_default();
    if current != generated {
        std::fs::write(&path, &generated).unwrap();
        panic!(
            "{} did not match the sources. It has been regenerated: review the change",
            path.display()
        );
    }
}
