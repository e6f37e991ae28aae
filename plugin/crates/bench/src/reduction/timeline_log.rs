//! What ranks and servers noted of a run, and what it says.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::output::record::{OutputOptions, Process};
use crate::output::statistics::Statistics;
use crate::ranks::wait::Driver;

/// Begin and end, in seconds since 1970.
pub(super) type Span = [f64; 2];

/// A line of a rank's log.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Line {
    /// All that was measured of it; the last line.
    Run(Run),
    /// One of the timed operations.
    Operation(Operation),
    /// A piece of one of those.
    Piece(Journey),
}

/// What is reduced, by what.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Task {
    /// The plugin's name, or that of what reduces in its place.
    pub(super) network: String,
    /// Of each job.
    pub(super) ranks: usize,
    /// Bytes of the vector.
    pub(super) size: u64,
    /// Bytes of an operation.
    pub(super) chunksize: u64,
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) redop: String,
    /// None where something else drives the network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) driver: Option<Driver>,
}

/// What a rank did.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Run {
    #[serde(flatten)]
    pub(super) task: Task,
    pub(super) rank: usize,
    /// Of one reduction of the vector, the mean.
    pub(super) seconds: f64,
    /// Processor time of the timed reductions, all threads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) cpu: Option<f64>,
    /// The process of the rank. None where it is something else's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) process: Option<Process>,
    /// Elements that were wrong here.
    pub(super) wrong: u64,
}

/// The moments of an operation at a rank.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Operation {
    /// The operation.
    pub(super) e2e: Span,
    /// The call that began it.
    pub(super) req: Span,
}

/// A piece's way from a rank to a server and back.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Journey {
    /// Until it has been sent.
    pub(super) send: Span,
    /// Until the sum is there.
    pub(super) recv: Span,
}

/// A piece's way through a server.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct Passage {
    /// From the first rank's part to the last one's end.
    pub(super) recv: Span,
    /// The sum.
    pub(super) reduce: Span,
    /// Until all ranks have it.
    pub(super) send: Span,
}

/// What one rank noted.
#[derive(Debug, Default)]
pub(super) struct Client {
    pub(super) run: Option<Run>,
    pub(super) operations: Vec<Operation>,
    pub(super) pieces: Vec<Journey>,
}

/// What all noted.
#[derive(Debug)]
pub(super) struct Logs {
    /// By rank.
    pub(super) clients: Vec<Client>,
    pub(super) servers: Vec<Vec<Passage>>,
    /// The same as it was written: a file's name and its lines.
    files: Vec<(String, String)>,
}

/// What the ranks say, together.
#[derive(Clone, Debug, Serialize)]
pub(super) struct OfClients {
    #[serde(flatten)]
    pub(super) task: Task,
    pub(super) jobs: usize,
    /// Microseconds of one reduction: mean over reductions and ranks.
    pub(super) time_us: f64,
    /// Bytes of the vectors of all jobs per time, GB/s (10^9).
    pub(super) algbw: f64,
    /// Processor seconds of all ranks of all jobs for each reduction.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) cpu: Option<f64>,
    pub(super) wrong: u64,
    /// None where only the mean is known, as of nccl-tests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) e2e: Option<Statistics>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) req: Option<Statistics>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) send: Option<Statistics>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) recv: Option<Statistics>,
}

/// What is in the record of a run.
#[derive(Serialize)]
pub(super) struct Measured {
    clients: OfClients,
    #[serde(skip_serializing_if = "Option::is_none")]
    servers: Option<OfServers>,
    wrong: u64,
    /// Times of operations.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    samples_us: Vec<f64>,
}

/// What the servers say, together.
#[derive(Clone, Debug, Serialize)]
struct OfServers {
    servers: usize,
    recv: Statistics,
    reduce: Statistics,
    send: Statistics,
}

impl Logs {
    /// What ranks and servers wrote, each in order.
    ///
    /// # Errors
    /// Quotes the first line that is none of theirs.
    pub(super) fn new(clients: Vec<String>, servers: Vec<String>) -> Result<Self> {
        let named = |kind: &str, texts: Vec<String>| -> Vec<(String, String)> {
            let name = |(index, text)| (format!("{kind}-{index}.jsonl"), text);
            texts.into_iter().enumerate().map(name).collect()
        };
        let (clients, servers) = (named("client", clients), named("server", servers));
        let mut logs = Self { clients: vec![], servers: vec![], files: vec![] };
        for (name, text) in &clients {
            let mut client = Client::default();
            for line in lines(name, text)? {
                match line {
                    Line::Run(run) => client.run = Some(run),
                    Line::Operation(operation) => client.operations.push(operation),
                    Line::Piece(piece) => client.pieces.push(piece),
                }
            }
            logs.clients.push(client);
        }
        let timed = logs.timed();
        for (name, text) in &servers {
            let passages: Vec<Passage> = lines(name, text)?;
            let inside = |passage: &Passage| {
                timed.is_some_and(|[begin, end]| passage.recv[0] >= begin && passage.send[0] <= end)
            };
            logs.servers.push(passages.into_iter().filter(inside).collect());
        }
        logs.files = clients.into_iter().chain(servers).collect();
        Ok(logs)
    }

    /// Those that [`Logs::write`] left in a folder.
    ///
    /// # Errors
    /// Says what cannot be read, or that there are none.
    pub(super) fn read(folder: &Path) -> Result<Self> {
        let all = |kind: &str| -> Result<Vec<String>> {
            let mut texts = vec![];
            loop {
                let file = folder.join(format!("{kind}-{}.jsonl", texts.len()));
                if !file.exists() {
                    return Ok(texts);
                }
                let text = fs::read_to_string(&file);
                texts.push(text.map_err(|error| format!("{}: {error}", file.display()))?);
            }
        };
        let clients = all("client")?;
        if clients.is_empty() {
            let folder = folder.display();
            return Err(format!(
                "no client-0.jsonl in {folder}: give a folder that --log-dir left"
            ));
        }
        Self::new(clients, all("server")?)
    }

    /// Keeps them in a folder.
    ///
    /// # Errors
    /// Says what cannot be written.
    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        let wrong = |error| format!("{}: {error}", folder.display());
        fs::create_dir_all(folder).map_err(wrong)?;
        for (name, text) in &self.files {
            fs::write(folder.join(name), text).map_err(wrong)?;
        }
        Ok(())
    }

    /// Whether some rank got to the end.
    pub(super) fn has_run(&self) -> bool {
        self.clients.iter().any(|client| client.run.is_some())
    }

    /// How many jobs there were at a time.
    pub(super) fn jobs(&self) -> usize {
        let ranks =
            self.clients.iter().find_map(|client| client.run.as_ref()).map(|run| run.task.ranks);
        self.clients.len().div_ceil(ranks.unwrap_or(1).max(1))
    }

    /// From the first timed operation's begin to the last one's end.
    fn timed(&self) -> Option<Span> {
        let all = || self.clients.iter().flat_map(|client| &client.operations);
        let begin = all().map(|operation| operation.e2e[0]).reduce(f64::min)?;
        let end = all().map(|operation| operation.e2e[1]).reduce(f64::max)?;
        Some([begin, end])
    }

    /// What the ranks say.
    ///
    /// # Errors
    /// When nothing was measured.
    pub(super) fn of_clients(&self) -> Result<OfClients> {
        let runs: Vec<&Run> =
            self.clients.iter().filter_map(|client| client.run.as_ref()).collect();
        let first = runs.first().ok_or("no rank got to its end")?;
        let seconds = runs.iter().map(|run| run.seconds).sum::<f64>() / runs.len() as f64;
        let jobs = self.jobs();
        let operations = |span: fn(&Operation) -> Span| {
            statistics(self.clients.iter().flat_map(|client| &client.operations).map(span))
        };
        let pieces = |span: fn(&Journey) -> Span| {
            statistics(self.clients.iter().flat_map(|client| &client.pieces).map(span))
        };
        Ok(OfClients {
            task: first.task.clone(),
            jobs,
            time_us: seconds * 1e6,
            algbw: jobs as f64 * first.task.size as f64 / seconds / 1e9,
            cpu: runs.iter().map(|run| run.cpu).sum(),
            wrong: runs.iter().map(|run| run.wrong).sum(),
            e2e: operations(|operation| operation.e2e),
            req: operations(|operation| operation.req),
            send: pieces(|piece| piece.send),
            recv: pieces(|piece| piece.recv),
        })
    }

    fn of_servers(&self) -> Option<OfServers> {
        let of = |span: fn(&Passage) -> Span| statistics(self.servers.iter().flatten().map(span));
        Some(OfServers {
            servers: self.servers.len(),
            recv: of(|passage| passage.recv)?,
            reduce: of(|passage| passage.reduce)?,
            send: of(|passage| passage.send)?,
        })
    }

    /// All statistics for people.
    ///
    /// # Errors
    /// When nothing was measured.
    pub(super) fn text(&self) -> Result<String> {
        let clients = self.of_clients()?;
        let OfClients { task, jobs, time_us, algbw, wrong, e2e, req, send, recv, .. } = clients;
        let Task { network, ranks, size, chunksize, kind, .. } = task;
        let jobs = if jobs > 1 { format!("{jobs} jobs of ") } else { String::new() };
        let mut text = format!(
            "# {network}: {jobs}{ranks} ranks reduce {size} bytes of {kind} in operations of {chunksize}: \
             {time_us:.1} us, {algbw:.3} GB/s, {wrong} wrong\n"
        );
        let mut table = |title: &str, lines: &[(&str, Option<Statistics>)]| {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "# {title}\n{}", Statistics::heading());
            for (name, line) in lines {
                let _ = line.map(|line| writeln!(text, "{}", line.line(name)));
            }
        };
        if e2e.is_some() {
            table(
                "Clients, each operation, and each piece of it",
                &[("e2e", e2e), ("req", req), ("send", send), ("recv", recv)],
            );
        }
        if let Some(OfServers { servers, recv, reduce, send }) = self.of_servers() {
            let steps = [("recv", Some(recv)), ("reduce", Some(reduce)), ("send", Some(send))];
            table(&format!("{servers} servers, each piece"), &steps);
        }
        Ok(text)
    }

    /// What is in the record of the run: all statistics, and at most this many times of operations
    /// in it.
    ///
    /// # Errors
    /// When nothing was measured.
    pub(super) fn measured(&self, output: &OutputOptions) -> Result<Measured> {
        let clients = self.of_clients()?;
        let spans = self.clients.iter().flat_map(|client| &client.operations);
        let times: Vec<f64> = spans.map(|operation| operation.e2e[1] - operation.e2e[0]).collect();
        let (wrong, samples_us) = (clients.wrong, output.samples_us(&times));
        Ok(Measured { clients, servers: self.of_servers(), wrong, samples_us })
    }

    /// The processes of the ranks.
    pub(super) fn processes(&self) -> Vec<Process> {
        let runs = self.clients.iter().filter_map(|client| client.run.as_ref());
        runs.filter_map(|run| run.process.clone()).collect()
    }
}

fn lines<'a, T: Deserialize<'a>>(name: &str, text: &'a str) -> Result<Vec<T>> {
    let read = |(index, line)| {
        serde_json::from_str(line).map_err(|error| format!("{name}, line {}: {error}", index + 1))
    };
    text.lines().enumerate().map(read).collect()
}

fn statistics(spans: impl Iterator<Item = Span>) -> Option<Statistics> {
    Statistics::of(spans.map(|[begin, end]| end - begin).collect())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Two ranks and a server, one timed operation of two pieces after one that was not timed.
    pub(in super::super) fn two_ranks() -> Logs {
        let client = |rank: usize| {
            format!(
                r#"{{"operation":{{"e2e":[10.0,10.004],"req":[10.0,10.001]}}}}
{{"piece":{{"sequence":1,"offset":0,"length":8,"send":[10.0,10.001],"recv":[10.001,10.003]}}}}
{{"piece":{{"sequence":1,"offset":8,"length":8,"send":[10.001,10.002],"recv":[10.002,10.004]}}}}
{{"run":{{"network":"Evenkeel","rank":{rank},"ranks":2,"size":4000,"chunksize":4000,"type":"float","redop":"sum","seconds":0.004,"cpu":0.002,"wrong":{rank}}}}}
"#
            )
        };
        let server = r#"{"sequence":0,"offset":0,"length":8,"recv":[9.0,9.1],"reduce":[9.1,9.2],"send":[9.2,9.3]}
{"sequence":1,"offset":0,"length":8,"recv":[10.0005,10.001],"reduce":[10.001,10.0015],"send":[10.0015,10.003]}
{"sequence":1,"offset":8,"length":8,"recv":[10.001,10.002],"reduce":[10.002,10.0025],"send":[10.0025,10.004]}
"#;
        Logs::new(vec![client(0), client(1)], vec![server.to_owned()]).unwrap()
    }

    #[test]
    fn statistics_leave_out_warmup_operations() {
        let logs = two_ranks();
        let clients = logs.of_clients().unwrap();
        assert!((clients.algbw - 1e-3).abs() < 1e-9 && clients.wrong == 1, "{clients:?}");
        assert_eq!((clients.e2e.unwrap().len, clients.send.unwrap().len), (2, 4));
        assert!((clients.e2e.unwrap().median - 4000.0).abs() < 1.0, "{clients:?}");
        let servers = logs.of_servers().unwrap();
        assert_eq!(servers.recv.len, 2, "what comes before the timed operations does not count");
        assert!((servers.reduce.avg - 500.0).abs() < 1.0, "{servers:?}");
        let text = logs.text().unwrap();
        for part in ["e2e", "req", "send", "recv", "reduce", "1 servers", " 1 wrong"] {
            assert!(text.contains(part), "no {part} in\n{text}");
        }
    }

    #[test]
    fn timeline_log_round_trip_through_a_folder() {
        let folder = std::env::temp_dir().join(format!("evenkeel-logs-{}", std::process::id()));
        let logs = two_ranks();
        logs.write(&folder).unwrap();
        let again = Logs::read(&folder);
        fs::write(folder.join("client-1.jsonl"), "{\"run\":1}\n").unwrap();
        let broken = Logs::read(&folder);
        fs::remove_dir_all(&folder).unwrap();
        let json = |logs: &Logs| {
            serde_json::to_string(&logs.measured(&OutputOptions::default()).unwrap()).unwrap()
        };
        assert_eq!(json(&again.unwrap()), json(&logs));
        assert!(broken.err().unwrap().contains("client-1.jsonl, line 1"));
        assert!(Logs::read(&folder).err().unwrap().contains("no client-0.jsonl"));
    }
}
