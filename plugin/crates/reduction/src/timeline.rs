//! A log of when each piece was sent, received and reduced. `evenkeel-bench reduction` draws it.

use std::fs::OpenOptions;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::Mutex;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use evenkeel_transport::sync::lock;

use crate::protocol::Piece;

/// Lines of JSON, one for each piece. Times are seconds since 1970.
pub struct Timeline {
    out: Mutex<BufWriter<Box<dyn Write + Send>>>,
    /// The same moment on both clocks.
    start: (Instant, f64),
}

impl Timeline {
    /// Appends to a file; `-` is standard output.
    ///
    /// # Errors
    /// When the file cannot be opened.
    pub fn open(path: &Path) -> io::Result<Self> {
        let out: Box<dyn Write + Send> = if path.as_os_str() == "-" {
            Box::new(io::stdout())
        } else {
            Box::new(OpenOptions::new().append(true).create(true).open(path)?)
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let start = (Instant::now(), now.as_secs_f64());
        Ok(Self { out: Mutex::new(BufWriter::new(out)), start })
    }

    /// Records when each step of a piece began and ended.
    pub fn record(&self, piece: &Piece, steps: &[(&str, [Instant; 2])]) {
        let seconds = |time: Instant| {
            self.start.1 + time.saturating_duration_since(self.start.0).as_secs_f64()
        };
        let Piece { sequence, offset, length, .. } = piece;
        let mut line = format!("{{\"sequence\":{sequence},\"offset\":{offset},\"length\":{length}");
        for (step, [begin, end]) in steps {
            line += &format!(",\"{step}\":[{:.6},{:.6}]", seconds(*begin), seconds(*end));
        }
        line += "}\n";
        // A full disk must not stop a training job.
        let _ = lock(&self.out).write_all(line.as_bytes());
    }

    /// Writes buffered lines out.
    pub fn flush(&self) {
        // As in `record`.
        let _ = lock(&self.out).flush();
    }
}
