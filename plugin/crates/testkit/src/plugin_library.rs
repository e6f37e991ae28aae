//! Finds the plugin that Cargo built next to a test program.
//!
//! A test program loads the plugin and does not link it, so `cargo test --test NAME` does not build
//! it.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

const FILE: &str = "libnccl_net_evenkeel.so";
/// Cargo lists the sources of the library here, with those of the packages in its workspace.
const SOURCES: &str = "libnccl_net_evenkeel.d";

/// The plugin that Cargo built with the same profile as this program.
///
/// # Errors
/// One line, when there is none, or when it was built before one of its sources changed or from
/// another checkout.
pub fn plugin_library(program: &Path) -> Result<PathBuf, String> {
    let folder = program.parent().unwrap_or(program);
    // Test programs lie in a folder of their own.
    let profile = folder.parent().filter(|_| folder.ends_with("deps")).unwrap_or(folder);
    // This package is crates/testkit in a folder of the checkout.
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(3).unwrap_or(profile);
    find(profile, checkout)
        .map_err(|what| format!("{what}: run cargo build -p evenkeel-nccl-plugin"))
}

fn find(profile: &Path, checkout: &Path) -> Result<PathBuf, String> {
    let newest = [profile.join(FILE), profile.join("deps").join(FILE)]
        .into_iter()
        .filter_map(|path| Some((modified(&path)?, path)))
        .max();
    let (built, library) =
        newest.ok_or_else(|| format!("no {FILE} in {} nor in deps", profile.display()))?;
    let list = profile.join(SOURCES);
    let sources = fs::read_to_string(&list).map_err(|error| {
        format!("cannot read the sources of {FILE}, {}: {error}", list.display())
    })?;
    for source in sources.lines().flat_map(sources_of) {
        let what = if !source.starts_with(checkout) {
            format!("is built from another checkout, with {}", source.display())
        } else if modified(&source).is_none_or(|changed| changed > built) {
            format!("is older than {}", source.display())
        } else {
            continue;
        };
        return Err(format!("{} {what}", library.display()));
    }
    Ok(library)
}

fn modified(path: &Path) -> Option<SystemTime> {
    path.metadata().ok()?.modified().ok()
}

/// The sources of a line as `make` reads it. A space in a name is escaped.
fn sources_of(line: &str) -> Vec<PathBuf> {
    let sources = line.split_once(": ").map_or("", |(_, sources)| sources).replace("\\ ", "\0");
    sources.split_whitespace().map(|name| name.replace('\0', " ").into()).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails there")]

    use std::time::Duration;

    use super::*;

    /// A build whose files were changed at so many seconds: the library, and its only source.
    fn build(name: &str, library: u64, source: Option<u64>) -> (PathBuf, PathBuf) {
        let root = std::env::temp_dir().join(format!("evenkeel {name}-{}", std::process::id()));
        let (profile, checkout) = (root.join("target/debug"), root.join("checkout"));
        fs::create_dir_all(profile.join("deps")).unwrap();
        fs::create_dir_all(&checkout).unwrap();
        let write = |path: &Path, seconds| {
            fs::write(path, "").unwrap();
            let at = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
            fs::File::options().write(true).open(path).unwrap().set_modified(at).unwrap();
        };
        write(&profile.join("deps").join(FILE), library);
        if let Some(seconds) = source {
            write(&checkout.join("lib.rs"), seconds);
        }
        let escaped = |path: PathBuf| path.display().to_string().replace(' ', "\\ ");
        let line =
            format!("{}: {}\n", escaped(profile.join(FILE)), escaped(checkout.join("lib.rs")));
        fs::write(profile.join(SOURCES), line).unwrap();
        (profile, checkout)
    }

    #[test]
    fn plugin_library_is_refused_that_is_older_than_its_sources() {
        for (name, source, is_current) in
            [("equal", Some(100), true), ("newer", Some(101), false), ("removed", None, false)]
        {
            let (profile, checkout) = build(name, 100, source);
            let found = find(&profile, &checkout);
            let source = checkout.join("lib.rs");
            let library = profile.join("deps").join(FILE);
            let why = format!("{} is older than {}", library.display(), source.display());
            assert_eq!(found, if is_current { Ok(library) } else { Err(why) }, "{name}");
            fs::remove_dir_all(checkout.parent().unwrap()).unwrap();
        }
    }

    #[test]
    fn plugin_library_of_another_checkout_is_refused() {
        let (profile, checkout) = build("elsewhere", 100, Some(1));
        let why = find(&profile, &checkout.with_file_name("other")).unwrap_err();
        assert!(why.contains("another checkout") && why.lines().count() == 1, "{why}");
        fs::remove_file(profile.join("deps").join(FILE)).unwrap();
        let why = find(&profile, &checkout).unwrap_err();
        assert!(why.starts_with("no libnccl_net_evenkeel.so in "), "{why}");
        fs::remove_dir_all(checkout.parent().unwrap()).unwrap();
    }
}
