//! Requests for records: whoever asks makes or changes a file, and each process with a group writes
//! its record beside it.
//!
//! A thread looks for the file, since the threads that hang do not. `kubectl evenkeel why` asks in
//! this way.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, SystemTime};

use evenkeel_transport::sync::lock;

use super::group::GroupRecord;
use super::report::FlightRecord;

/// Environment variables with what the names of the recorder's files begin with. The first one that
/// is set counts. PyTorch's own recorder uses the others.
const VARIABLES: [&str; 3] =
    ["EVENKEEL_FLIGHT_RECORDER", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"];

/// Time between two looks at the file. `kubectl evenkeel why` waits a few times as long.
const INTERVAL: Duration = Duration::from_secs(1);

type RequestHook = Arc<dyn Fn(bool) + Send + Sync>;

static REQUEST_HOOK: Mutex<Option<RequestHook>> = Mutex::new(None);

/// The process whose thread looks for requests; 0 if there is none. A forked child has its parent's
/// number, and no thread.
static WATCHER: AtomicU32 = AtomicU32::new(0);

/// Sets what is called to write the record, in the place of [`FlightRecord::rank_record`] alone. It
/// replaces the one before. It gets whether somebody asks: once a process has a group, it writes a
/// record unasked, which shows that it is there.
pub fn on_request(hook: impl Fn(bool) + Send + Sync + 'static) {
    *lock(&REQUEST_HOOK) = Some(Arc::new(hook));
}

/// Answers requests from now on, as long as the process has a group. Does nothing without one of
/// the [`VARIABLES`].
pub(super) fn answer() {
    let Some(folder) = folder() else { return };
    let process = std::process::id();
    if WATCHER.swap(process, Ordering::AcqRel) == process {
        return;
    }
    let watch = move || Requests::new(&folder).watch(process);
    if thread::Builder::new().name("evenkeel-asked".to_owned()).spawn(watch).is_err() {
        // The next group tries again.
        WATCHER.store(0, Ordering::Release);
    }
}

/// The folder of the recorder's files, with the slash behind it; empty for the working directory.
fn folder() -> Option<String> {
    let set = |name: &&str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let prefix = VARIABLES.iter().find_map(set)?;
    let end = prefix.rfind('/').map_or(0, |slash| slash + 1);
    Some(prefix[..end].to_owned())
}

/// The file that asks the processes of a folder.
struct Requests {
    folder: String,
    seen: Option<SystemTime>,
}

impl Requests {
    fn new(folder: &str) -> Self {
        let mut requests = Self { folder: folder.to_owned(), seen: None };
        requests.seen = requests.changed();
        requests
    }

    fn changed(&self) -> Option<SystemTime> {
        std::fs::metadata(format!("{}.evenkeel-request", self.folder)).ok()?.modified().ok()
    }

    fn watch(mut self, process: u32) {
        let mut is_known = false;
        loop {
            thread::sleep(INTERVAL);
            if !has_group() {
                WATCHER.store(0, Ordering::Release);
                // A group that was made meanwhile may have found this thread.
                if !has_group() || WATCHER.swap(process, Ordering::AcqRel) == process {
                    return;
                }
            }
            let changed = self.changed();
            let is_asked = changed.is_some() && changed != self.seen;
            if is_asked || !is_known {
                // Before the answer: whoever asks again meanwhile gets another one.
                (self.seen, is_known) = (changed.or(self.seen), true);
                self.write(is_asked);
            }
        }
    }

    fn write(&self, is_asked: bool) {
        let hook = lock(&REQUEST_HOOK).clone();
        match hook {
            Some(hook) => hook(is_asked),
            None => {
                if let Err(error) = self.write_rank_record() {
                    eprintln!("evenkeel: cannot write the flight recorder: {error}");
                }
            }
        }
    }

    fn write_rank_record(&self) -> std::io::Result<()> {
        let record = FlightRecord::read();
        let Some(rank) = record.rank() else { return Ok(()) };
        let json = record.rank_record(rank, |_| None).to_json();
        // In one piece: a reader finds the old record or the new one.
        let partial = format!("{}.evenkeel-{}.partial", self.folder, std::process::id());
        std::fs::write(&partial, json)?;
        let whole = format!("{}.evenkeel-record-{rank}.json", self.folder);
        std::fs::rename(&partial, whole).inspect_err(|_| {
            let _ = std::fs::remove_file(&partial);
        })
    }
}

fn has_group() -> bool {
    GroupRecord::all().iter().any(|group| group.is_open())
}
