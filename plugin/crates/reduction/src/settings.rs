//! The settings of reduction servers' clients.

use std::net::IpAddr;
use std::time::Duration;

use evenkeel_transport::settings::table::{
    self, Audience, Setting, SettingsError, Variable, ranged, seconds,
};

/// The values of all settings.
#[derive(Clone, Debug)]
pub struct Settings {
    /// `host:port` of each server. Empty: servers are not used.
    pub servers: Vec<String>,
    /// Maximum number of servers that an operation is split over.
    pub split: usize,
    /// How long a server may not respond.
    pub timeout: Duration,
    /// File for the times of pieces, without the process id that is appended to its name.
    pub timeline: Option<String>,
    /// The job's name. May be empty.
    pub job: String,
}

/// All settings.
pub const SETTINGS: &[Setting<Settings>] = &[
    Setting {
        variable: Variable {
            name: "EVENKEEL_REDUCTION_SERVERS",
            meaning: "reduction servers that sum all-reduces, through NCCL's CollNet \
                (NCCL_COLLNET_ENABLE=1); the same on all ranks, or one list for the ranks of each \
                leaf of a tree",
            accepts: "host:port,host:port,... with names or addresses, at most 64",
            default: "",
            audience: Audience::User,
        },
        apply: |settings, value| {
            settings.servers = if value.is_empty() { Vec::new() } else { parse_servers(value)? };
            Some(())
        },
    },
    Setting {
        variable: Variable {
            name: "EVENKEEL_REDUCTION_SPLIT",
            meaning: "maximum number of reduction servers that an operation is split over, which \
                then take turns; the same on all ranks",
            accepts: "1 to 64",
            default: "64",
            audience: Audience::Debug,
        },
        apply: |settings, value| {
            settings.split = ranged(value, 1, 64)? as usize;
            Some(())
        },
    },
    Setting {
        variable: Variable {
            name: "EVENKEEL_REDUCTION_TIMEOUT",
            meaning: "how long a rank waits to join its reduction servers (3 s for one at whose \
                address nobody listens), and how long one may not respond later",
            accepts: "seconds from 1 to 3600",
            default: "30",
            audience: Audience::Debug,
        },
        apply: |settings, value| {
            settings.timeout = seconds(value)?;
            Some(())
        },
    },
    Setting {
        variable: Variable {
            name: "EVENKEEL_REDUCTION_TIMELINE",
            meaning: "file to which the times of each piece are appended, when it was sent to a \
                reduction server and when its result was received, one line each; the process id \
                is added to the file's name",
            accepts: "a path",
            default: "",
            audience: Audience::Debug,
        },
        apply: |settings, value| {
            settings.timeline = (!value.is_empty()).then(|| value.to_owned());
            Some(())
        },
    },
    Setting {
        variable: Variable {
            name: "EVENKEEL_JOB",
            meaning: "name of the job in the metrics and log lines of reduction servers",
            accepts: "up to 63 letters, digits, dashes, dots, underscores and slashes",
            default: "",
            audience: Audience::Internal,
        },
        apply: |settings, value| {
            let is_valid = |c: char| c.is_ascii_alphanumeric() || "-._/".contains(c);
            value.clone_into(&mut settings.job);
            (value.len() <= 63 && value.chars().all(is_valid)).then_some(())
        },
    },
];

impl Settings {
    /// Reads the environment.
    ///
    /// # Errors
    /// [`SettingsError`] names the first variable whose value is not of the accepted form.
    pub fn from_env() -> Result<Self, SettingsError> {
        Self::from_lookup(table::from_env)
    }

    /// Reads variables with a function that returns a variable's value if it has one.
    ///
    /// # Errors
    /// As [`Settings::from_env`].
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Self, SettingsError> {
        // The table sets every field.
        let mut settings = Self {
            servers: Vec::new(),
            split: 0,
            timeout: Duration::ZERO,
            timeline: None,
            job: String::new(),
        };
        table::read(SETTINGS, &mut settings, lookup)?;
        Ok(settings)
    }
}

/// Parses a list of reduction servers, `host:port,host:port,...`, at most 64.
pub fn parse_servers(text: &str) -> Option<Vec<String>> {
    let servers: Vec<String> = text.split(',').map(|server| server.trim().to_owned()).collect();
    (servers.len() <= 64 && servers.iter().all(|server| is_server(server))).then_some(servers)
}

fn is_server(server: &str) -> bool {
    let Some((host, port)) = server.rsplit_once(':') else { return false };
    // A host with a colon is an IPv6 address, which must be in brackets.
    let bracketed = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let is_host = match bracketed {
        Some(address) => address.parse::<IpAddr>().is_ok(),
        None => !host.is_empty() && !host.contains([':', '/', ' ', '[', ']']),
    };
    is_host && ranged(port, 1, u16::MAX.into()).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use evenkeel_testkit::TestRng;

    fn with(name: &str, value: &str) -> Result<Settings, SettingsError> {
        Settings::from_lookup(|asked| (asked == name).then(|| value.to_owned()))
    }

    #[test]
    fn settings_have_valid_defaults() {
        let settings = Settings::from_lookup(|_| None).unwrap();
        assert_eq!((settings.split, settings.timeout), (64, Duration::from_secs(30)));
        assert!(settings.servers.is_empty() && settings.timeline.is_none());
    }

    #[test]
    fn servers_setting_takes_names_and_addresses_with_ports() {
        let servers =
            |value| with("EVENKEEL_REDUCTION_SERVERS", value).map(|settings| settings.servers);
        assert_eq!(servers(""), Ok(vec![]));
        let given = "llama-rs-0.llama-rs:7470, 10.0.0.1:80,[::1]:7470";
        assert_eq!(
            servers(given).unwrap(),
            ["llama-rs-0.llama-rs:7470", "10.0.0.1:80", "[::1]:7470"]
        );
        for wrong in
            ["host", "host:", ":7470", "::1:7470", "a:1,,b:1", "a:0", "a b:1", "http://a:1"]
        {
            assert!(servers(wrong).is_err(), "{wrong}");
        }
    }

    /// Any value is accepted, or the error names the variable.
    #[test]
    fn settings_of_any_text_are_valid_or_rejected() {
        const SEEDS: [&str; 6] =
            ["4", "65", "10.0.0.1:80,[::1]:7470", "team-a/llama", "/no/such/file", "3601"];
        let mut rng = TestRng::new(5);
        let (mut accepted, mut rejected) = (0, 0);
        for round in 0..5_000 {
            let mut value = rng.choose(&SEEDS).as_bytes().to_vec();
            (0..rng.below(3)).for_each(|_| rng.mutate(&mut value));
            let value = String::from_utf8_lossy(&value).into_owned();
            let Variable { name, accepts, .. } = SETTINGS[round % SETTINGS.len()].variable;
            match with(name, &value) {
                Ok(settings) => {
                    accepted += 1;
                    assert!((1..=64).contains(&settings.split) && settings.servers.len() <= 64);
                    assert!((1..=3600).contains(&settings.timeout.as_secs()));
                    assert!(settings.job.len() <= 63);
                }
                Err(error) => {
                    rejected += 1;
                    let text = error.to_string();
                    assert!(text.contains(name) && text.contains(accepts), "{text}");
                }
            }
        }
        assert!(accepted > 500 && rejected > 500, "{accepted} and {rejected}");
    }
}
