//! When each piece was where: for `evenkeel-bench reduction`, which draws it.

use std::fs::OpenOptions;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::Mutex;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::lock;
use crate::packet::Piece;

/// Lines of JSON, one for each piece. Times are seconds since 1970.
pub(crate) struct Timeline {
    out: Mutex<BufWriter<Box<dyn Write + Send>>>,
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
    /// It was back from the servers above, if it goes there.
    pub(crate) settled: Instant,
}

impl Timeline {
    /// Appends to a file; `-` is standard output.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let out: Box<dyn Write + Send> = if path.as_os_str() == "-" {
            Box::new(io::stdout())
        } else {
            Box::new(OpenOptions::new().append(true).create(true).open(path)?)
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let start = (Instant::now(), now.as_secs_f64());
        Ok(Self { out: Mutex::new(BufWriter::new(out)), start })
    }

    /// Notes a piece that a server has sent to all.
    pub(crate) fn passage(&self, piece: &Piece, moments: &Moments, sent: Instant) {
        let Moments { opened, complete, reducing, reduced, settled } = *moments;
        self.note(
            piece,
            &[
                ("recv", [opened, complete]),
                ("reduce", [reducing, reduced]),
                ("upstream", [reduced, settled]),
                ("send", [settled, sent]),
            ],
        );
    }

    /// Notes a piece that has come back to a client.
    pub(crate) fn journey(&self, piece: &Piece, begun: Instant, sent: Instant, back: Instant) {
        self.note(piece, &[("send", [begun, sent]), ("recv", [sent, back])]);
    }

    fn note(&self, piece: &Piece, steps: &[(&str, [Instant; 2])]) {
        let at = |moment: Instant| {
            self.start.1 + moment.saturating_duration_since(self.start.0).as_secs_f64()
        };
        let Piece { sequence, offset, length, .. } = piece;
        let mut line = format!("{{\"sequence\":{sequence},\"offset\":{offset},\"length\":{length}");
        for (step, [begin, end]) in steps {
            line += &format!(",\"{step}\":[{:.6},{:.6}]", at(*begin), at(*end));
        }
        line += "}\n";
        // A full disk must not stop a training job.
        let _ = lock(&self.out).write_all(line.as_bytes());
    }

    /// Writes out what has been noted.
    pub(crate) fn flush(&self) {
        // As in `note`.
        let _ = lock(&self.out).flush();
    }
}
