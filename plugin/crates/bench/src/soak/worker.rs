//! A process of a soak: it has ends of many connections, sends and receives on all of them, and
//! checks every byte. It is told what to do on standard input, a line each, and reports on standard
//! output.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::mpsc::TryRecvError;
use std::thread;
use std::time::{Duration, Instant};

use evenkeel_nccl_abi::HANDLE_SIZE;
use evenkeel_testkit::TestRng;
use rustix::process::{Pid, WaitOptions, waitpid};

use super::message::{MAX_BYTES, Messages};
use crate::counters::Counters;
use crate::error::Result;
use crate::output;
use crate::plugin_host::process::{fork_idle_child, give_back_free_memory};
use crate::plugin_host::{Connecting, Connection, Listener, Plugin, Region, Request};
use crate::ranks::child::lines;

/// Number of messages that an end has in flight.
const DEPTH: usize = 2;
/// A message that takes longer is stuck. No fault lasts nearly as long.
const MAX_MESSAGE_TIME: Duration = Duration::from_secs(90);
/// Maximum pause between messages of a sender.
const MAX_PAUSE_MS: u64 = 60;
/// Without anything to do, ends are polled this often.
const IDLE: Duration = Duration::from_millis(1);
const REPORT_INTERVAL: Duration = Duration::from_secs(1);
/// What a process holds counts once it has not changed this many times in a row, with a pause in
/// between.
const CALM: usize = 25;
const CALM_PAUSE: Duration = Duration::from_millis(20);
/// How long to wait for that, and for what it held the first time: closed connections deliver for a
/// while.
const MAX_CALM_TIME: Duration = Duration::from_secs(30);

/// One end of a connection.
enum End {
    Listening(Listener),
    Connecting(Connecting),
    Open(Box<Flowing>),
}

/// An end with messages.
struct Flowing {
    connection: Connection,
    messages: Messages,
    memory: Region,
    requests: VecDeque<Request>,
    /// Number of messages that are done.
    done: u64,
    /// When the last one was.
    moved: Instant,
    /// When the next one may begin.
    next: Instant,
    rng: TestRng,
    /// Whether no more messages begin.
    finishing: bool,
}

/// What became of an end.
enum Outcome {
    Goes(bool),
    Becomes(End),
    /// It is over, with these reports.
    Over(String),
}

impl Flowing {
    fn new(connection: Connection, memory: Region, seed: u64, number: u64) -> Self {
        Self {
            connection,
            messages: Messages::of(seed, number),
            memory,
            requests: VecDeque::new(),
            done: 0,
            moved: Instant::now(),
            next: Instant::now(),
            rng: TestRng::new(seed ^ number),
            finishing: false,
        }
    }

    /// Number of the next message, and its part of the memory.
    fn next_message(&self) -> (u64, std::ops::Range<usize>) {
        let number = self.done + self.requests.len() as u64;
        let at = number as usize % DEPTH * MAX_BYTES;
        (number, at..at + self.messages.length(number))
    }

    fn stuck(&self) -> bool {
        !self.requests.is_empty() && self.moved.elapsed() > MAX_MESSAGE_TIME
    }
}

/// A process of a soak.
pub(super) struct Worker {
    plugin: Plugin,
    device: usize,
    seed: u64,
    ends: BTreeMap<u64, End>,
    children: Vec<i32>,
    /// What it held when it was asked first.
    baseline: Option<Counters>,
    bytes: u64,
    messages: u64,
}

impl Worker {
    pub(super) fn new(plugin: Plugin, device: usize, seed: u64) -> Self {
        let (ends, children) = (BTreeMap::new(), Vec::new());
        Self { plugin, device, seed, ends, children, baseline: None, bytes: 0, messages: 0 }
    }

    /// Does what it is told until it is told to end.
    pub(super) fn run(&mut self) -> Result<()> {
        let commands = lines(Some(io::stdin()));
        let mut reported = Instant::now();
        loop {
            match commands.try_recv() {
                Ok(line) if line == "end" => return Ok(()),
                Ok(line) => {
                    self.obey(&line)?;
                    continue;
                }
                Err(TryRecvError::Empty) => {}
                Err(TryRecvError::Disconnected) => return Ok(()),
            }
            let moved = self.progress()?;
            if reported.elapsed() >= REPORT_INTERVAL {
                reported = Instant::now();
                self.reap();
                let (bytes, messages) = (self.bytes, self.messages);
                (self.bytes, self.messages) = (0, 0);
                say(&format!("moved {bytes} {messages}"))?;
            }
            if !moved {
                thread::sleep(IDLE);
            }
        }
    }

    fn obey(&mut self, line: &str) -> Result<()> {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| words.get(at).and_then(|word| word.parse::<u64>().ok());
        match (words[0], number(1)) {
            ("listen", Some(id)) => {
                let listener = self.plugin.listen(self.device)?;
                let handle: String =
                    listener.handle().iter().map(|byte| format!("{byte:02x}")).collect();
                self.ends.insert(id, End::Listening(listener));
                say(&format!("handle {id} {handle}"))
            }
            ("connect", Some(id)) => {
                let handle = words.get(2).and_then(|text| parse_handle(text));
                let handle = handle.ok_or_else(|| format!("no handle in {line:?}"))?;
                match self.plugin.connect(self.device, handle) {
                    Ok(connecting) => drop(self.ends.insert(id, End::Connecting(connecting))),
                    Err(why) => say(&format!("lost {id} 0 {why}"))?,
                }
                Ok(())
            }
            ("finish", Some(id)) => {
                if let Some(End::Open(end)) = self.ends.get_mut(&id) {
                    end.finishing = true;
                }
                Ok(())
            }
            ("forget", Some(id)) => {
                self.ends.remove(&id);
                Ok(())
            }
            ("fork", Some(milliseconds)) => {
                self.children.push(fork_idle_child(Duration::from_millis(milliseconds))?);
                Ok(())
            }
            ("usage", _) => self.report_usage(),
            _ => Err(format!("a soak's process knows no {line:?}")),
        }
    }

    /// Children that have ended.
    fn reap(&mut self) {
        let runs = |child: &i32| {
            let child = Pid::from_raw(*child);
            child.is_some_and(|child| matches!(waitpid(Some(child), WaitOptions::NOHANG), Ok(None)))
        };
        self.children.retain(runs);
    }

    /// Reports what the process holds once that does not change any more and is no more than the
    /// first time, or after a while.
    fn report_usage(&mut self) -> Result<()> {
        let since = Instant::now();
        let usage = || {
            give_back_free_memory();
            Counters::now()
        };
        let (mut last, mut calm) = (usage()?, 0);
        while calm < CALM && since.elapsed() < MAX_CALM_TIME {
            thread::sleep(CALM_PAUSE);
            self.reap();
            let now = usage()?;
            let same = (now.descriptors, now.threads) == (last.descriptors, last.threads);
            let is_more = self.baseline.is_some_and(|first| {
                now.descriptors > first.descriptors || now.threads > first.threads
            });
            calm = if same && !is_more && self.children.is_empty() { calm + 1 } else { 0 };
            last = now;
        }
        self.baseline.get_or_insert(last);
        let json = serde_json::to_string(&last).map_err(|error| error.to_string())?;
        say(&format!("usage {json}"))
    }

    /// Moves what can be moved on all ends. Returns whether anything was.
    fn progress(&mut self) -> Result<bool> {
        let mut any = false;
        let numbers: Vec<u64> = self.ends.keys().copied().collect();
        for id in numbers {
            let Some(end) = self.ends.remove(&id) else { continue };
            let (end, outcome) = self.step(id, end)?;
            match (end, outcome) {
                (Some(end), Outcome::Goes(moved)) => {
                    any |= moved;
                    self.ends.insert(id, end);
                }
                (_, Outcome::Becomes(end)) => {
                    any = true;
                    self.ends.insert(id, end);
                }
                (end, Outcome::Over(report)) => {
                    drop(end);
                    say(&report)?;
                }
                (None, Outcome::Goes(_)) => {}
            }
        }
        Ok(any)
    }

    fn step(&mut self, id: u64, end: End) -> Result<(Option<End>, Outcome)> {
        Ok(match end {
            End::Listening(mut listener) => match listener.accept() {
                Ok(None) => (Some(End::Listening(listener)), Outcome::Goes(false)),
                Ok(Some(connection)) => (None, self.opened(id, connection)?),
                Err(why) => (None, Outcome::Over(format!("received {id} 0 accept: {why}"))),
            },
            End::Connecting(mut connecting) => match connecting.poll() {
                Ok(None) => (Some(End::Connecting(connecting)), Outcome::Goes(false)),
                Ok(Some(connection)) => (None, self.opened(id, connection)?),
                Err(why) => (None, Outcome::Over(format!("lost {id} 0 {why}"))),
            },
            End::Open(mut end) => {
                let outcome = match end.connection.receives() {
                    true => self.receive(id, &mut end)?,
                    false => self.send(id, &mut end)?,
                };
                (Some(End::Open(end)), outcome)
            }
        })
    }

    /// Makes an end with messages of a connection that is complete.
    fn opened(&self, id: u64, connection: Connection) -> Result<Outcome> {
        let memory = Region::new(DEPTH * MAX_BYTES)?;
        connection.register(&memory)?;
        say(&format!("open {id}"))?;
        let end = Flowing::new(connection, memory, self.seed, id);
        Ok(Outcome::Becomes(End::Open(Box::new(end))))
    }

    fn send(&mut self, id: u64, end: &mut Flowing) -> Result<Outcome> {
        let mut moved = false;
        let now = Instant::now();
        while !end.finishing && end.requests.len() < DEPTH && now >= end.next {
            let (number, part) = end.next_message();
            let messages = end.messages;
            end.memory.write(part.clone(), |bytes| messages.fill(number, bytes))?;
            if end.requests.is_empty() {
                end.moved = now;
            }
            match end.connection.post(&end.memory, part) {
                Ok(None) => break,
                Ok(Some(request)) => end.requests.push_back(request),
                Err(why) => return Ok(Outcome::Over(format!("lost {id} {} {why}", end.done))),
            }
            // Some messages follow at once, others after a pause.
            if end.rng.one_in(3) {
                end.next = now + Duration::from_millis(end.rng.below(MAX_PAUSE_MS));
            }
            moved = true;
        }
        while let Some(request) = end.requests.front_mut() {
            match request.test() {
                Ok(None) if end.stuck() => {
                    return Ok(Outcome::Over(format!(
                        "stuck {id} {} a message that is sent for {MAX_MESSAGE_TIME:?}",
                        end.done
                    )));
                }
                Ok(None) => break,
                Ok(Some(size)) => self.count(end, size),
                Err(why) => return Ok(Outcome::Over(format!("lost {id} {} {why}", end.done))),
            }
            moved = true;
        }
        if end.finishing && end.requests.is_empty() {
            return Ok(Outcome::Over(format!("sent {id} {}", end.done)));
        }
        Ok(Outcome::Goes(moved))
    }

    fn receive(&mut self, id: u64, end: &mut Flowing) -> Result<Outcome> {
        let mut moved = false;
        while end.requests.len() < DEPTH {
            let (_, part) = end.next_message();
            if end.requests.is_empty() {
                end.moved = Instant::now();
            }
            match end.connection.post(&end.memory, part) {
                Ok(None) => break,
                Ok(Some(request)) => end.requests.push_back(request),
                Err(why) => return Ok(Outcome::Over(format!("received {id} {} {why}", end.done))),
            }
        }
        while let Some(request) = end.requests.front_mut() {
            let size = match request.test() {
                Ok(None) if end.stuck() => {
                    return Ok(Outcome::Over(format!(
                        "stuck {id} {} a message that is awaited for {MAX_MESSAGE_TIME:?}",
                        end.done
                    )));
                }
                Ok(None) => break,
                Ok(Some(size)) => size,
                Err(why) => return Ok(Outcome::Over(format!("received {id} {} {why}", end.done))),
            };
            let (number, wanted) = (end.done, end.messages.length(end.done));
            if size != wanted {
                return Ok(Outcome::Over(format!(
                    "wrong {id} {number} {size} bytes instead of {wanted}"
                )));
            }
            let at = number as usize % DEPTH * MAX_BYTES;
            let messages = end.messages;
            let wrong =
                end.memory.read(at..at + size, |bytes| messages.difference(number, bytes))?;
            if let Some(at) = wrong {
                return Ok(Outcome::Over(format!(
                    "wrong {id} {number} byte {at} of {size} differs"
                )));
            }
            self.count(end, size);
            moved = true;
        }
        Ok(Outcome::Goes(moved))
    }

    fn count(&mut self, end: &mut Flowing, size: usize) {
        end.requests.pop_front();
        end.done += 1;
        end.moved = Instant::now();
        self.messages += 1;
        self.bytes += size as u64;
    }
}

fn parse_handle(text: &str) -> Option<[u8; HANDLE_SIZE]> {
    let mut handle = [0; HANDLE_SIZE];
    for (at, byte) in handle.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    Some(handle)
}

fn say(line: &str) -> Result<()> {
    output::write(&format!("{line}\n"))
}
