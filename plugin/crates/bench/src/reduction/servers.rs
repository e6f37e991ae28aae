//! Reduction servers as processes of their own, here or elsewhere, and what they note.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use super::Options;
use super::hosts::Host;
use crate::cli::options::host_and_port;
use crate::error::Result;
use crate::ranks::child::{Started, Text, this_program};

/// How long a server may take to start, or to end.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Running servers. They end when this is dropped, and when this process does.
pub(super) struct Servers(Vec<Running>);

struct Running {
    process: Started,
    address: String,
    timeline: Text,
}

impl Servers {
    /// Starts a server on each of the hosts.
    ///
    /// # Errors
    /// Names what could not be started, with its last line of output.
    pub(super) fn start(
        options: &Options,
        hosts: &[Host],
        environment: &[(String, String)],
    ) -> Result<Self> {
        let program = match &options.server_program {
            Some(program) => program.to_owned(),
            None => this_program()?.with_file_name("evenkeel-reduction-server"),
        };
        let mut servers = Self(vec![]);
        for (index, host) in hosts.iter().enumerate() {
            servers.0.push(launch(options, index, host, &program, environment)?);
        }
        Ok(servers)
    }

    /// `host:port` of each.
    pub(super) fn addresses(&self) -> Vec<String> {
        self.0.iter().map(|running| running.address.clone()).collect()
    }

    /// Ends them; gives the timeline of each.
    ///
    /// # Errors
    /// When one does not end.
    pub(super) fn finish(mut self) -> Result<Vec<String>> {
        self.0.iter_mut().map(Running::end).collect()
    }
}

fn launch(
    options: &Options,
    index: usize,
    host: &Host,
    program: &Path,
    environment: &[(String, String)],
) -> Result<Running> {
    let listen = match host.port {
        // Only this machine needs to reach it.
        0 => host_and_port(&host.address, 0),
        port => format!("[::]:{port}"),
    };
    let mut arguments: Vec<String> =
        ["serve", "--until-stdin-closes", "--timeline", "-", "--listen", &listen]
            .map(str::to_owned)
            .into();
    if let Some(threads) = options.server_threads {
        arguments.extend(["--threads".to_owned(), threads.to_string()]);
    }
    if let Some(piece) = options.piece {
        arguments.extend(["--piece".to_owned(), piece.0.to_string()]);
    }
    let mut command = host.command(program, &arguments, environment);
    let fail = |why: &str| format!("server {index}, {}: {why}", program.display());
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| fail(&error.to_string()))?;
    let (timeline, errors) = (Text::of(child.stdout.take()), child.stderr.take());
    let mut running = Running { process: Started(child), address: String::new(), timeline };
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let lines = errors.into_iter().flat_map(|errors| BufReader::new(errors).lines());
        for line in lines.map_while(std::result::Result::ok) {
            if line.starts_with("warning: ") {
                eprintln!("server {index}: {line}");
            }
            // The receiver is gone once the server listens.
            let _ = sender.send(line);
        }
    });
    let deadline = Instant::now() + TIMEOUT;
    let mut output = vec![];
    loop {
        match receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(line) => {
                if let Some(rest) = line.strip_prefix("listening at ") {
                    let at = rest.split(',').next().unwrap_or_default();
                    let port = at.rsplit(':').next().and_then(|port| port.parse().ok());
                    let port = port.ok_or_else(|| fail(&format!("{line:?} has no port")))?;
                    running.address = host_and_port(&host.address, port);
                    return Ok(running);
                }
                output.push(line);
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return Err(fail(
                    output.last().map_or("it ended and printed nothing", String::as_str),
                ));
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {
                return Err(fail(&format!("it does not listen after {TIMEOUT:?}")));
            }
        }
    }
}

impl Running {
    /// Has it end by itself; gives its timeline.
    fn end(&mut self) -> Result<String> {
        // It ends when its standard input does.
        drop(self.process.0.stdin.take());
        let ended = self.process.wait(TIMEOUT).and_then(|_| self.timeline.finish(TIMEOUT));
        ended.map_err(|error| format!("ending the server at {}: {error}", self.address))
    }
}
