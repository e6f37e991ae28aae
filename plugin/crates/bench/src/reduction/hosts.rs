//! Where servers and ranks run: on this machine, or on the hosts of a file.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::process::Command;

use serde::Deserialize;

use crate::cli::options::local_listener;
use crate::error::Result;

/// Maximum number of servers of a run.
const MAX_SERVERS: usize = 64;
/// Maximum number of ranks of a run.
const MAX_RANKS: usize = 1024;
/// Default port of the servers.
const PORT: u16 = 7470;

/// All hosts of a run.
#[derive(Debug)]
pub(super) struct Hosts {
    /// In the order in which clients know them.
    pub(super) servers: Vec<Host>,
    /// By rank.
    pub(super) clients: Vec<Host>,
}

/// Where one server or rank runs.
#[derive(Clone, Debug)]
pub(super) struct Host {
    place: Place,
    /// The address at which others reach it.
    pub(super) address: String,
    /// Port of a server; 0: any free one.
    pub(super) port: u16,
    /// Additional environment variables.
    environment: Vec<(String, String)>,
}

#[derive(Clone, Debug)]
enum Place {
    Here,
    /// A program with arguments that takes a host's name, where one of them is or has `{}` or else
    /// after them, and a line of shell.
    There {
        rsh: Vec<String>,
        name: String,
    },
}

/// The file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    servers: Vec<Entry>,
    clients: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    address: Option<String>,
    port: Option<u16>,
    #[serde(default)]
    env: BTreeMap<String, Scalar>,
}

/// A variable's value, quoted or not.
#[derive(Deserialize)]
#[serde(untagged)]
enum Scalar {
    Number(i64),
    Switch(bool),
    Text(String),
}

impl fmt::Display for Scalar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => number.fmt(f),
            Self::Switch(switch) => switch.fmt(f),
            Self::Text(text) => text.fmt(f),
        }
    }
}

impl Hosts {
    /// This number of servers and ranks on this machine.
    pub(super) fn local(servers: usize, ranks: usize) -> Result<Self> {
        let (_, loopback) = local_listener()?;
        let here = Host {
            place: Place::Here,
            address: loopback.ip().to_string(),
            port: 0,
            environment: vec![],
        };
        Self { servers: vec![here.clone(); servers], clients: vec![here; ranks] }.checked()
    }

    /// Those of a file, reached by a command.
    pub(super) fn read(file: &Path, rsh: &str) -> Result<Self> {
        let wrong = |error: &dyn fmt::Display| format!("{}: {error}", file.display());
        let text = std::fs::read_to_string(file).map_err(|error| wrong(&error))?;
        Self::parse(&text, rsh).map_err(|error| wrong(&error))
    }

    fn parse(text: &str, rsh: &str) -> Result<Self> {
        let rsh: Vec<String> = rsh.split_whitespace().map(str::to_owned).collect();
        if rsh.is_empty() {
            return Err("--rsh is empty: a command such as ssh".to_owned());
        }
        let file: File = serde_norway::from_str(text).map_err(|error| {
            let text = error.to_string();
            text.lines().next().unwrap_or_default().to_owned()
        })?;
        let host = |entry: Entry| {
            if entry.name.is_empty() || entry.name.starts_with('-') {
                return Err(format!("{:?} is no host's name", entry.name));
            }
            let named = |name: &str| {
                let fine = |c: char| c.is_ascii_alphanumeric() || c == '_';
                !name.is_empty() && name.chars().all(fine)
            };
            if let Some(name) = entry.env.keys().find(|name| !named(name)) {
                return Err(format!("{name:?} is no variable's name"));
            }
            Ok(Host {
                address: entry.address.unwrap_or_else(|| entry.name.clone()),
                place: Place::There { rsh: rsh.clone(), name: entry.name },
                port: entry.port.unwrap_or(PORT),
                environment: entry
                    .env
                    .into_iter()
                    .map(|(name, value)| (name, value.to_string()))
                    .collect(),
            })
        };
        let servers = file.servers.into_iter().map(host).collect::<Result<_>>()?;
        let clients = file.clients.into_iter().map(host).collect::<Result<_>>()?;
        Self { servers, clients }.checked()
    }

    fn checked(self) -> Result<Self> {
        let (servers, clients) = (self.servers.len(), self.clients.len());
        if servers > MAX_SERVERS {
            return Err(format!("{servers} servers: at most {MAX_SERVERS}"));
        }
        if !(1..=MAX_RANKS).contains(&clients) {
            return Err(format!("{clients} ranks: 1 to {MAX_RANKS}"));
        }
        Ok(self)
    }

    /// Whether all are on this machine.
    pub(super) fn are_here(&self) -> bool {
        self.clients.iter().all(|host| matches!(host.place, Place::Here))
    }
}

impl Host {
    /// What runs a program there.
    pub(super) fn command(
        &self,
        program: &Path,
        arguments: &[String],
        more: &[(String, String)],
    ) -> Command {
        let environment = more.iter().chain(&self.environment);
        match &self.place {
            Place::Here => {
                let mut command = Command::new(program);
                command.args(arguments);
                command.envs(environment.map(|(name, value)| (name, value)));
                command
            }
            Place::There { rsh, name } => {
                let mut line = "exec env".to_owned();
                for (name, value) in environment {
                    line += &format!(" {name}={}", quoted(value));
                }
                line += &format!(" {}", quoted(&program.to_string_lossy()));
                for argument in arguments {
                    line += &format!(" {}", quoted(argument));
                }
                let mut words: Vec<String> =
                    rsh.iter().map(|word| word.replace("{}", name)).collect();
                if words == *rsh {
                    words.push(name.clone());
                }
                let mut command = Command::new(&words[0]);
                command.args(&words[1..]).arg(line);
                command
            }
        }
    }
}

/// As a shell reads it back.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "
servers:
  - {name: cpu-0, address: 10.0.0.8, port: 7471, env: {EVENKEEL_FLOWS: 2}}
  - name: cpu-1
clients:
  - name: gpu-0
    env:
      EVENKEEL_REPATH: off
      NCCL_SOCKET_IFNAME: \"it's eth0\"
";

    #[test]
    fn hosts_file_is_parsed() {
        let hosts = Hosts::parse(FILE, "ssh -p 22").unwrap();
        let at = |host: &Host| (host.address.clone(), host.port);
        let servers: Vec<_> = hosts.servers.iter().map(at).collect();
        assert_eq!(servers, [("10.0.0.8".to_owned(), 7471), ("cpu-1".to_owned(), 7470)]);
        assert!(!hosts.are_here());
        let more = [("RANK".to_owned(), "0".to_owned())];
        let command = hosts.clients[0].command(Path::new("/opt/x"), &["a b".to_owned()], &more);
        let arguments: Vec<_> = command.get_args().map(|part| part.to_string_lossy()).collect();
        assert_eq!(command.get_program(), "ssh");
        assert_eq!(arguments[..3], ["-p", "22", "gpu-0"]);
        let pods = Hosts::parse(FILE, "kubectl exec -i pod/{} -- sh -c").unwrap();
        let command = pods.clients[0].command(Path::new("/opt/x"), &[], &[]);
        let words: Vec<_> = command.get_args().map(|part| part.to_string_lossy()).collect();
        assert_eq!(words[..6], ["exec", "-i", "pod/gpu-0", "--", "sh", "-c"]);
        assert!(words.len() == 7 && words[6].ends_with(" '/opt/x'"), "{words:?}");
        let line = &arguments[3];
        assert!(line.starts_with("exec env RANK='0' "), "{line}");
        assert!(line.contains(r"NCCL_SOCKET_IFNAME='it'\''s eth0'"), "{line}");
        assert!(line.ends_with(" '/opt/x' 'a b'"), "{line}");
    }

    #[test]
    fn hosts_file_errors_name_the_reason() {
        for (text, reason) in [
            ("clients: []", "1 to 1024"),
            ("servers: [{name: a}]", "clients"),
            ("clients: [{name: a, prot: 1}]", "prot"),
            ("clients: [{name: a, port: 70000}]", "70000"),
            ("clients: [{name: -oProxyCommand=x}]", "no host's name"),
            ("clients: [{name: a, env: {A B: c}}]", "no variable's name"),
            ("clients: [", ""),
        ] {
            let error = Hosts::parse(text, "ssh").err().unwrap();
            assert!(error.contains(reason) && !error.contains('\n'), "{text}: {error}");
        }
    }
}
