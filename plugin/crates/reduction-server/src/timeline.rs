//! When each piece was received, reduced and sent: for `evenkeel-bench reduction`, which draws it.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::Mutex;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::lock;
use crate::packet::Piece;

/// A file with one JSON object per line and piece. Times are seconds since 1970.
pub(crate) struct Timeline {
    file: Mutex<BufWriter<File>>,
    /// The same moment on both clocks.
    start: (Instant, f64),
}

/// The moments of a piece on its way through the server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moments {
    /// The first rank's part began to come.
    pub(crate) opened: Instant,
    /// The last part was there.
    pub(crate) complete: Instant,
    /// A thread began to reduce it.
    pub(crate) reducing: Instant,
    /// It was reduced.
    pub(crate) reduced: Instant,
}

impl Timeline {
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let start = (Instant::now(), now.as_secs_f64());
        Ok(Self { file: Mutex::new(BufWriter::new(File::create(path)?)), start })
    }

    /// Notes a piece that has been sent to all.
    pub(crate) fn note(&self, piece: &Piece, moments: &Moments, sent: Instant) {
        let at = |moment: Instant| {
            self.start.1 + moment.saturating_duration_since(self.start.0).as_secs_f64()
        };
        let Piece { sequence, offset, length, .. } = piece;
        // A full disk must not stop a training job.
        let _ = writeln!(
            lock(&self.file),
            "{{\"sequence\":{sequence},\"offset\":{offset},\"length\":{length},\"recv\":[{:.6},{:.6}],\"reduce\":[{:.6},{:.6}],\"send\":[{:.6},{:.6}]}}",
            at(moments.opened),
            at(moments.complete),
            at(moments.reducing),
            at(moments.reduced),
            at(moments.reduced),
            at(sent),
        );
    }

    /// Writes out what has been noted.
    pub(crate) fn flush(&self) {
        // As in `note`.
        let _ = lock(&self.file).flush();
    }
}
