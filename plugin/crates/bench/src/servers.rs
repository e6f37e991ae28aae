//! Reduction servers on this machine, as processes of their own, and what they noted.

use std::io::{BufRead, BufReader};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;

use crate::host::Result;

/// The most servers of one machine.
const MOST: usize = 64;
/// How long a server may take to end.
const PATIENCE: Duration = Duration::from_secs(10);

/// Running servers. They end when this is dropped, and when this process does.
pub(crate) struct Servers {
    running: Vec<Running>,
    folder: PathBuf,
}

struct Running {
    child: Child,
    address: String,
    timeline: PathBuf,
}

/// A piece's way through a server: begin and end of each step, seconds since 1970.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Passage {
    /// From the first rank's part to the last one's end.
    pub(crate) recv: [f64; 2],
    /// The sum.
    pub(crate) reduce: [f64; 2],
    /// Until all ranks have it.
    pub(crate) send: [f64; 2],
}

impl Servers {
    /// Starts `count` servers on loopback; `program` where it is not beside this one.
    ///
    /// # Errors
    /// Says what could not be started, and what it said.
    pub(crate) fn start(
        count: usize,
        program: Option<&Path>,
        threads: Option<u16>,
    ) -> Result<Self> {
        if !(1..=MOST).contains(&count) {
            return Err(format!("--servers {count}: 1 to {MOST}"));
        }
        let program = match program {
            Some(program) => program.to_owned(),
            None => env::current_exe()
                .map_err(|error| format!("this program's path: {error}"))?
                .with_file_name("evenkeel-reduction-server"),
        };
        let folder = env::temp_dir().join(format!("evenkeel-bench-{}", std::process::id()));
        fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        let mut servers = Self { running: vec![], folder };
        for index in 0..count {
            let running = servers.launch(index, &program, threads)?;
            servers.running.push(running);
        }
        Ok(servers)
    }

    fn launch(&self, index: usize, program: &Path, threads: Option<u16>) -> Result<Running> {
        let timeline = self.folder.join(format!("server-{index}.jsonl"));
        let mut command = Command::new(program);
        command.args(["serve", "--until-stdin-closes", "--listen"]);
        command.arg(format!("{}:0", Ipv4Addr::LOCALHOST)).arg("--timeline").arg(&timeline);
        if let Some(threads) = threads {
            command.args(["--threads", &threads.to_string()]);
        }
        let fail = |error| format!("cannot start {}: {error}", program.display());
        let mut child = command
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| fail(error.to_string()))?;
        let Some(errors) = child.stderr.take() else { return Err(fail("no output".to_owned())) };
        let mut errors = BufReader::new(errors);
        // Killed and waited for if this fails.
        let mut running = Running { child, address: String::new(), timeline };
        let mut said = String::new();
        loop {
            let mut line = String::new();
            let read = errors.read_line(&mut line).map_err(|error| fail(error.to_string()))?;
            if read == 0 {
                return Err(fail(said));
            }
            if let Some(rest) = line.strip_prefix("listening at ") {
                rest.split(',').next().unwrap_or_default().clone_into(&mut running.address);
                break;
            }
            said.push_str(line.trim_end());
        }
        // What it says later is of interest only with its warnings.
        thread::spawn(move || {
            for line in errors.lines().map_while(std::result::Result::ok) {
                if line.starts_with("warning: ") {
                    eprintln!("server {index}: {line}");
                }
            }
        });
        Ok(running)
    }

    /// `host:port` of each.
    pub(crate) fn addresses(&self) -> Vec<String> {
        self.running.iter().map(|running| running.address.clone()).collect()
    }

    /// Ends them; gives what each noted.
    ///
    /// # Errors
    /// Says what could not be read.
    pub(crate) fn finish(mut self) -> Result<Vec<Vec<Passage>>> {
        let mut all = vec![];
        for running in &mut self.running {
            running.end()?;
            let file = &running.timeline;
            let wrong = |error: &dyn std::fmt::Display| format!("{}: {error}", file.display());
            let text = fs::read_to_string(file).map_err(|error| wrong(&error))?;
            let passages: std::result::Result<Vec<Passage>, _> =
                text.lines().map(serde_json::from_str).collect();
            all.push(passages.map_err(|error| wrong(&error))?);
        }
        Ok(all)
    }
}

impl Running {
    /// Has it end by itself.
    fn end(&mut self) -> Result<()> {
        let fail = |error: &dyn std::fmt::Display| format!("ending a server: {error}");
        let pid = Pid::from_raw(self.child.id().cast_signed());
        if let Some(pid) = pid {
            kill_process(pid, Signal::TERM).map_err(|error| fail(&error))?;
        }
        let deadline = Instant::now() + PATIENCE;
        while self.child.try_wait().map_err(|error| fail(&error))?.is_none() {
            if Instant::now() >= deadline {
                return Err(fail(&"it does not end"));
            }
            thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // One that has ended already is no error.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        self.running.clear();
        // What is left there is small.
        let _ = fs::remove_dir_all(&self.folder);
    }
}
