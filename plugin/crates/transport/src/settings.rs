//! Everything that can be set, in one table.

use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::time::Duration;

use evenkeel_wire::{CHUNK_ALIGN, JobKey, MAX_FLOWS};

/// One environment variable.
pub struct Setting {
    /// Its name.
    pub name: &'static str,
    /// What it does.
    pub meaning: &'static str,
    /// What values it takes.
    pub accepts: &'static str,
    /// Its value when unset or empty.
    pub default: &'static str,
    /// Takes a value over; `None` when it is not of the accepted form.
    apply: fn(&mut Settings, &str) -> Option<()>,
}

impl Setting {
    /// Whether its value must not be shown.
    pub fn is_secret(&self) -> bool {
        self.name == JOB_KEY
    }
}

const JOB_KEY: &str = "EVENKEEL_JOB_KEY";

/// A variable has a value that it does not take.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name}={value:?} is not valid: it takes {accepts} (default {default:?})")]
pub struct SettingsError {
    name: &'static str,
    value: String,
    accepts: &'static str,
    default: &'static str,
}

/// Address families a device may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    Any,
    V4,
    V6,
}

/// The values of all settings.
#[derive(Clone, Debug)]
pub struct Settings {
    pub(crate) flows: u16,
    pub(crate) chunk_bytes: u64,
    pub(crate) inline_bytes: u64,
    pub(crate) workers: usize,
    pub(crate) connect_timeout: Duration,
    pub(crate) accept_timeout: Duration,
    pub(crate) handshake_timeout: Duration,
    pub(crate) peer_timeout: Duration,
    pub(crate) recovery_timeout: Duration,
    pub(crate) repath: bool,
    /// Mb/s, for all devices.
    pub(crate) link_speed: Option<u32>,
    pub(crate) interfaces: String,
    pub(crate) family: Family,
    /// One device whose flows spread over all interfaces.
    pub(crate) joined: bool,
    /// Ports to listen on; none: any.
    pub(crate) ports: Option<RangeInclusive<u16>>,
    pub(crate) job_key: Option<JobKey>,
    /// Where to serve metrics: the first that is free.
    pub(crate) metrics: Vec<SocketAddr>,
}

/// All settings.
pub const SETTINGS: &[Setting] = &[
    Setting {
        name: "EVENKEEL_FLOWS",
        meaning: "TCP connections (flows) that share the messages of one connection; the sending side decides",
        accepts: "a whole number from 1 to 64",
        default: "4",
        apply: |settings, value| {
            settings.flows = ranged(value, 1, MAX_FLOWS as u64)? as u16;
            Some(())
        },
    },
    Setting {
        name: "EVENKEEL_CHUNK_BYTES",
        meaning: "most bytes that a flow takes at once; slow flows take less",
        accepts: "a multiple of 128 from 4096 to 16777216",
        default: "524288",
        apply: |settings, value| {
            settings.chunk_bytes = ranged(value, 4096, 16 << 20)?;
            settings.chunk_bytes.is_multiple_of(CHUNK_ALIGN).then_some(())
        },
    },
    Setting {
        name: "EVENKEEL_INLINE_BYTES",
        meaning: "messages up to this many bytes are written and read by the calling thread when a flow is free",
        accepts: "a whole number of bytes from 0 to 1048576",
        default: "16384",
        apply: |settings, value| {
            settings.inline_bytes = ranged(value, 0, 1 << 20)?;
            Some(())
        },
    },
    Setting {
        name: "EVENKEEL_WORKERS",
        meaning: "threads that move bytes for all connections of the process; auto is one per 4 cores, 1 to 4",
        accepts: "auto or a whole number from 1 to 16",
        default: "auto",
        apply: |settings, value| {
            settings.workers = if value == "auto" {
                std::thread::available_parallelism()
                    .map_or(1, |cores| (cores.get() / 4).clamp(1, 4))
            } else {
                ranged(value, 1, 16)? as usize
            };
            Some(())
        },
    },
    Setting {
        name: "EVENKEEL_CONNECT_TIMEOUT",
        meaning: "how long to try to reach a listener",
        accepts: "seconds from 1 to 3600",
        default: "30",
        apply: |settings, value| {
            settings.connect_timeout = seconds(value)?;
            Some(())
        },
    },
    Setting {
        name: "EVENKEEL_ACCEPT_TIMEOUT",
        meaning: "how long to wait for the peer that was given a listener's handle",
        accepts: "seconds from 1 to 3600",
        default: "600",
        apply: |settings, value| {
            settings.accept_timeout = seconds(value)?;
            Some(())
        },
    },
    Setting {
        name: "EVENKEEL_HANDSHAKE_TIMEOUT",
        meaning: "how long an incoming TCP connection may take to show that it is a peer",
        accepts: "seconds from 1 to 3600",
        default: "5",
        apply: |settings, value| {
            settings.handshake_timeout = seconds(value)?;
            Some(())
        },
    },
    Setting {
        name: "EVENKEEL_PEER_TIMEOUT",
        meaning: "how long a peer's host may leave packets unanswered before a flow counts as dead",
        accepts: "seconds from 1 to 3600",
        default: "15",
        apply: |settings, value| {
            settings.peer_timeout = seconds(value)?;
            Some(())
        },
    },
    Setting {
        name: "EVENKEEL_RECOVERY_TIMEOUT",
        meaning: "how long a connection that has lost all its flows tries to get new ones",
        accepts: "seconds from 1 to 3600",
        default: "30",
        apply: |settings, value| {
            settings.recovery_timeout = seconds(value)?;
            Some(())
        },
    },
    Setting {
        name: "EVENKEEL_REPATH",
        meaning: "whether a flow that stays slow beside others is replaced by one on another path",
        accepts: "on or off",
        default: "on",
        apply: |settings, value| {
            settings.repath = match value {
                "on" => true,
                "off" => false,
                _ => return None,
            };
            Some(())
        },
    },
    Setting {
        name: "EVENKEEL_LINK_SPEED",
        meaning: "speed of every device, instead of what the system says",
        accepts: "Mb/s, a whole number from 1 to 10000000, such as 25000",
        default: "",
        apply: |settings, value| {
            settings.link_speed =
                if value.is_empty() { None } else { Some(ranged(value, 1, 10_000_000)? as u32) };
            Some(())
        },
    },
    Setting {
        name: "NCCL_SOCKET_IFNAME",
        meaning: "interfaces to use, as NCCL reads it: prefixes, = for whole names, ^ for all others",
        accepts: "[^][=]name,name,...",
        default: "",
        apply: |settings, value| {
            value.clone_into(&mut settings.interfaces);
            Some(())
        },
    },
    Setting {
        name: "NCCL_SOCKET_FAMILY",
        meaning: "address family to use",
        accepts: "AF_INET or AF_INET6",
        default: "",
        apply: |settings, value| {
            settings.family = match value {
                "" => Family::Any,
                "AF_INET" => Family::V4,
                "AF_INET6" => Family::V6,
                _ => return None,
            };
            Some(())
        },
    },
    Setting {
        name: "EVENKEEL_DEVICES",
        meaning: "separate: each interface is a device of its own for NCCL; joined: one device, whose flows spread over all interfaces (4 at most) and which goes on when one fails",
        accepts: "separate or joined",
        default: "separate",
        apply: |settings, value| {
            settings.joined = match value {
                "separate" => false,
                "joined" => true,
                _ => return None,
            };
            Some(())
        },
    },
    Setting {
        name: "EVENKEEL_PORTS",
        meaning: "ports to listen on, for firewalls; without it any that is free",
        accepts: "first-last, such as 29600-29699, or one port",
        default: "",
        apply: |settings, value| {
            settings.ports = if value.is_empty() { None } else { Some(ports(value)?) };
            Some(())
        },
    },
    Setting {
        name: JOB_KEY,
        meaning: "secret of the job: peers that do not have it are refused",
        accepts: "64 hexadecimal digits, the same on all ranks",
        default: "",
        apply: |settings, value| {
            if !value.is_empty() {
                settings.job_key = Some(JobKey::parse(value)?);
            }
            Some(())
        },
    },
    Setting {
        name: "EVENKEEL_JOB_KEY_FILE",
        meaning: "file that holds the secret of the job, instead of EVENKEEL_JOB_KEY",
        accepts: "the path of a file with 64 hexadecimal digits",
        default: "",
        apply: |settings, value| {
            if !value.is_empty() {
                settings.job_key = Some(JobKey::parse(&std::fs::read_to_string(value).ok()?)?);
            }
            Some(())
        },
    },
    Setting {
        name: "EVENKEEL_METRICS",
        meaning: "where to serve metrics for Prometheus, at /metrics; of a range of ports the first that is free, so that all ranks of a host can have the same value",
        accepts: "address:port or address:first-last, such as 0.0.0.0:9600-9615",
        default: "",
        apply: |settings, value| {
            settings.metrics = if value.is_empty() { Vec::new() } else { addresses(value)? };
            Some(())
        },
    },
];

impl Settings {
    /// Reads the environment.
    ///
    /// # Errors
    /// [`SettingsError`] naming the first variable whose value is not of the accepted form.
    pub fn from_env() -> Result<Self, SettingsError> {
        Self::from_lookup(|name| {
            std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
        })
    }

    /// Reads variables through a function that gives a variable's value, if it has one.
    ///
    /// # Errors
    /// As [`Settings::from_env`].
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Self, SettingsError> {
        // Every field is overwritten below by its row of the table.
        let mut settings = Self {
            flows: 0,
            chunk_bytes: 0,
            inline_bytes: 0,
            workers: 0,
            connect_timeout: Duration::ZERO,
            accept_timeout: Duration::ZERO,
            handshake_timeout: Duration::ZERO,
            peer_timeout: Duration::ZERO,
            recovery_timeout: Duration::ZERO,
            repath: false,
            link_speed: None,
            interfaces: String::new(),
            family: Family::Any,
            joined: false,
            ports: None,
            job_key: None,
            metrics: Vec::new(),
        };
        for setting in SETTINGS {
            let given = lookup(setting.name).unwrap_or_default();
            let value = match given.trim() {
                "" => setting.default,
                given => given,
            };
            (setting.apply)(&mut settings, value).ok_or_else(|| SettingsError {
                name: setting.name,
                value: if setting.is_secret() {
                    "(not shown)".to_owned()
                } else {
                    value.to_owned()
                },
                accepts: setting.accepts,
                default: setting.default,
            })?;
        }
        Ok(settings)
    }
}

fn ranged(value: &str, min: u64, max: u64) -> Option<u64> {
    value.parse().ok().filter(|number| (min..=max).contains(number))
}

fn ports(value: &str) -> Option<RangeInclusive<u16>> {
    let (first, last) = value.split_once('-').unwrap_or((value, value));
    let port = |text: &str| Some(ranged(text.trim(), 1, u16::MAX.into())? as u16);
    let range = port(first)?..=port(last)?;
    (!range.is_empty()).then_some(range)
}

fn addresses(value: &str) -> Option<Vec<SocketAddr>> {
    let (address, range) = value.rsplit_once(':')?;
    let address: IpAddr = address.trim_start_matches('[').trim_end_matches(']').parse().ok()?;
    Some(ports(range)?.map(|port| SocketAddr::new(address, port)).collect())
}

fn seconds(value: &str) -> Option<Duration> {
    ranged(value, 1, 3600).map(Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(name: &str, value: &str) -> Result<Settings, SettingsError> {
        Settings::from_lookup(|asked| (asked == name).then(|| value.to_owned()))
    }

    #[test]
    fn defaults_are_valid_and_complete() {
        let settings = Settings::from_lookup(|_| None).unwrap();
        assert_eq!((settings.flows, settings.chunk_bytes), (4, 524_288));
        assert!((1..=4).contains(&settings.workers));
        assert_eq!(settings.peer_timeout, Duration::from_secs(15));
        assert_eq!(settings.link_speed, None);
    }

    #[test]
    fn empty_means_default() {
        assert_eq!(with("EVENKEEL_FLOWS", " ").unwrap().flows, 4);
    }

    #[test]
    fn ports_are_a_range_or_one() {
        assert_eq!(with("EVENKEEL_PORTS", "29600-29699").unwrap().ports, Some(29600..=29699));
        assert_eq!(with("EVENKEEL_PORTS", "29600").unwrap().ports, Some(29600..=29600));
        assert_eq!(with("EVENKEEL_PORTS", "").unwrap().ports, None);
    }

    #[test]
    fn the_job_key_stays_out_of_logs() {
        let error = with("EVENKEEL_JOB_KEY", "c0ffee").unwrap_err().to_string();
        assert!(error.contains("64 hexadecimal digits") && !error.contains("c0ffee"), "{error}");
        let settings = with("EVENKEEL_JOB_KEY", &"c0".repeat(32)).unwrap();
        assert!(settings.job_key.is_some() && !format!("{settings:?}").contains("192"));
    }

    #[test]
    fn bad_values_are_named_with_what_would_be_right() {
        for (name, value) in [
            ("EVENKEEL_FLOWS", "0"),
            ("EVENKEEL_FLOWS", "65"),
            ("EVENKEEL_FLOWS", "four"),
            ("EVENKEEL_CHUNK_BYTES", "100000"),
            ("EVENKEEL_WORKERS", "-1"),
            ("EVENKEEL_LINK_SPEED", "25G"),
            ("NCCL_SOCKET_FAMILY", "ipv4"),
            ("EVENKEEL_PORTS", "2000-1000"),
            ("EVENKEEL_PORTS", "0-10"),
            ("EVENKEEL_METRICS", "9600"),
            ("EVENKEEL_METRICS", "host:9600"),
            ("EVENKEEL_METRICS", "127.0.0.1:"),
            ("EVENKEEL_JOB_KEY_FILE", "/no/such/file"),
            ("EVENKEEL_PEER_TIMEOUT", "1.5"),
            ("EVENKEEL_RECOVERY_TIMEOUT", "0"),
            ("EVENKEEL_REPATH", "maybe"),
        ] {
            let text = with(name, value).unwrap_err().to_string();
            assert!(
                text.contains(name) && text.contains(value) && text.contains("it takes"),
                "{text}"
            );
        }
    }
}
