//! All settings, in one table.

pub(crate) mod name_filter;
mod nccl;
mod parse;
pub(crate) mod rails;
pub mod table;

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use evenkeel_protocol::{
    CHUNK_ALIGN, JobKey, MAX_CHUNK_BYTES, MAX_FLOWS, MAX_QUEUE_PAIRS, PacketMarking, Schedule,
};

use evenkeel_tls::JobIdentity;
use rustix::fs::StatVfsMountFlags;

use crate::sys;
use name_filter::NameFilter;
use nccl::Unused;
use parse::{addresses, key_in, ports, ranged_or_none};
use rails::Rails;
use table::{Audience, ENCRYPTION, JOB_KEY, Setting, SettingsError, Variable, ranged, seconds};

/// Minimum bytes of a static share, as in NCCL's socket transport.
const MIN_SHARE: u64 = 64 << 10;

/// Address families a device may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    Any,
    V4,
    V6,
}

/// Which transports may carry messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TransportMode {
    /// RDMA between peers that both have it, else TCP.
    Auto,
    Tcp,
    Rdma,
}

/// The values of all settings.
#[derive(Clone, Debug)]
pub struct Settings {
    pub(crate) transport_mode: TransportMode,
    /// Queue pairs of a connection.
    pub(crate) queue_pairs: u16,
    /// What is set of NCCL's variables and has no effect.
    unused: Unused,
    /// NCCL_IB_HCA.
    rdma_ports: String,
    pub(crate) gid_index: Option<u8>,
    pub(crate) traffic_class: Option<u8>,
    pub(crate) service_level: Option<u8>,
    pub(crate) pkey_index: u16,
    pub(crate) flows: u16,
    pub(crate) chunk_bytes: u64,
    pub(crate) inline_bytes: u64,
    /// Callers write and read messages up to this length themselves.
    pub(crate) caller_bytes: u64,
    /// Maximum bytes of the retransmit buffer of a connection.
    pub(crate) retransmit_buffer_bytes: usize,
    pub(crate) workers: usize,
    pub(crate) connect_timeout: Duration,
    pub(crate) handshake_timeout: Duration,
    pub(crate) peer_timeout: Duration,
    pub(crate) recovery_timeout: Duration,
    /// `None`: on for connections that go at their own pace.
    pub(crate) repath: Option<bool>,
    pub(crate) schedule: Schedule,
    pub(crate) checksum: bool,
    /// Mb/s, for all devices.
    pub(crate) link_speed: Option<u32>,
    pub(crate) interfaces: String,
    pub(crate) family: Family,
    /// One device whose flows use all interfaces.
    pub(crate) joined: bool,
    /// Whether flows are bound to interfaces that share a subnet; `None`: where hosts let them.
    pub(crate) bind_to_device: Option<bool>,
    pub(crate) rails: Rails,
    /// Ports to listen on; `None`: any.
    pub(crate) ports: Option<RangeInclusive<u16>>,
    pub(crate) job_key: Option<JobKey>,
    /// Where the job key is from, if from a file.
    key_file: Option<PathBuf>,
    require_encryption: bool,
    /// With encryption, and then all TCP connections are encrypted.
    pub(crate) encryption: Option<JobIdentity>,
    trust_rdma: bool,
    /// With encryption: whether the kernel makes and opens records.
    pub(crate) kernel_tls: bool,
    /// Whether it was asked to, and has no TLS.
    pub(crate) kernel_tls_missing: bool,
    /// Whether it is only for encryption that RDMA is not used.
    pub(crate) rdma_left_out: bool,
    /// Addresses to serve metrics at: the first that is free.
    pub(crate) metrics: Vec<SocketAddr>,
    status_folder: Option<PathBuf>,
    /// Whether to find what the job waits for.
    pub(crate) watch: bool,
    pub(crate) wait_limit: Duration,
    /// The name of this host for people, if not the system's.
    pub(crate) node: Option<String>,
}

/// Minimum bytes of the retransmit buffer, unless it is limited otherwise. More than a receiver
/// leaves unacknowledged, so that room becomes free by itself.
const MIN_RETRANSMIT_BUFFER: usize = 1 << 20;

/// All settings.
pub const SETTINGS: &[Setting<Settings>] = &[
    Setting {
        variable: Variable {
            name: "EVENKEEL_TRANSPORT",
            meaning: "transport of messages; auto: RDMA between peers with RDMA ports that reach \
                each other, else TCP; tcp or rdma: only that transport, or an error",
            accepts: "auto, tcp or rdma",
            default: "auto",
            audience: Audience::User,
        },
        apply: |settings, value| {
            settings.transport_mode = match value {
                "auto" => TransportMode::Auto,
                "tcp" => TransportMode::Tcp,
                "rdma" => TransportMode::Rdma,
                _ => return None,
            };
            Some(())
        },
    },
    Setting {
        variable: Variable {
            name: "EVENKEEL_QUEUE_PAIRS",
            meaning: "maximum number of RDMA queue pairs of one connection for each pair of its \
                ports, and at most 8 in all, which share its messages and take over from each \
                other when one fails; others than the first are opened when those before are full; \
                set on the sending side",
            accepts: "a whole number from 1 to 8",
            default: "2",
            audience: Audience::Debug,
        },
        apply: |settings, value| {
            settings.queue_pairs = ranged(value, 1, MAX_QUEUE_PAIRS as u64)? as u16;
            Some(())
        },
    },
    Setting {
        variable: Variable {
            name: "NCCL_IB_DISABLE",
            meaning: "whether to do without RDMA, as NCCL then does, where EVENKEEL_TRANSPORT is \
                auto",
            accepts: "0, or another whole number to do without",
            default: "0",
            audience: Audience::User,
        },
        apply: |settings, value| {
            let is_disabled = value.parse::<i64>().ok()? != 0;
            match (is_disabled, settings.transport_mode) {
                (true, TransportMode::Auto) => settings.transport_mode = TransportMode::Tcp,
                (_, mode) => {
                    settings.unused.is_rdma_required = is_disabled && mode == TransportMode::Rdma;
                }
            }
            Some(())
        },
    },
    Setting {
        variable: Variable {
            name: "NCCL_IB_HCA",
            meaning: "RDMA ports to use, in the format of NCCL: prefixes of device names, each \
                with one port or with all; = matches whole names, ^ excludes",
            accepts: "[^][=]name[:port],name[:port],...",
            default: "",
            audience: Audience::User,
        },
        apply: |settings, value| {
            value.clone_into(&mut settings.rdma_ports);
            NameFilter::is_valid(value).then_some(())
        },
    },
    Setting {
        variable: Variable {
            name: "NCCL_IB_GID_INDEX",
            meaning: "index of the GID of an RDMA port; by default the RoCE v2 GID of an address \
                of this host; over InfiniBand the one with a FLID, if there is one",
            accepts: "a whole number from 0 to 255, or -1",
            default: "",
            audience: Audience::User,
        },
        apply: |settings, value| {
            settings.gid_index = ranged_or_none(value, 255)?;
            Some(())
        },
    },
    Setting {
        variable: Variable {
            name: "NCCL_IB_TC",
            meaning: "traffic class of RDMA packets over Ethernet; by default the communicator's \
                (trafficClass of ncclConfig_t), else 0; set on the sending side",
            accepts: "a whole number from 0 to 255, or -1",
            default: "",
            audience: Audience::User,
        },
        apply: |settings, value| {
            settings.traffic_class = ranged_or_none(value, 255)?;
            Some(())
        },
    },
    Setting {
        variable: Variable {
            name: "NCCL_IB_SL",
            meaning: "service level of RDMA packets; by default the communicator's traffic class \
                over InfiniBand, if it is a valid level, else 0; set on the sending side",
            accepts: "a whole number from 0 to 15, or -1",
            default: "",
            audience: Audience::User,
        },
        apply: |settings, value| {
            settings.service_level = ranged_or_none(value, PacketMarking::MAX_SERVICE_LEVEL)?;
            Some(())
        },
    },
    Setting {
        variable: Variable {
            name: "NCCL_IB_PKEY",
            meaning: "index of the partition key in the table of an RDMA port",
            accepts: "a whole number from 0 to 65535",
            default: "0",
            audience: Audience::User,
        },
        apply: |settings, value| {
            settings.pkey_index = ranged(value, 0, u16::MAX.into())? as u16;
            Some(())
        },
    },
    Setting {
        variable: Variable {
            name: "EVENKEEL_FLOWS",
            meaning: "TCP connections (flows) that a connection begins with; it adds more where \
                they help, up to four times as many and at most 16; set on the sending side",
            accepts: "a whole number from 1 to 64",
            default: "4",
            audience: Audience::User,
        },
        apply: |settings, value| {
            settings.flows = ranged(value, 1, MAX_FLOWS as u64)? as u16;
            Some(())
        },
    },
    Setting {
        variable: Variable {
            name: "EVENKEEL_CHUNK_BYTES",
            meaning: "maximum bytes of a chunk, which is what a flow takes at once; slow flows \
                take less",
            accepts: "a multiple of 128 from 4096 to 16777216",
            default: "524288",
            audience: Audience::Debug,
        },
        apply: |settings, value| {
            settings.chunk_bytes = ranged(value, 4096, MAX_CHUNK_BYTES)?;
            settings.chunk_bytes.is_multiple_of(CHUNK_ALIGN).then_some(())
        },
    },
    Setting {
        variable: Variable {
            name: "EVENKEEL_INLINE_BYTES",
            meaning: "maximum bytes of a message that the calling thread writes and reads itself \
                when a flow is free",
            accepts: "a whole number of bytes from 0 to 1048576",
            default: "16384",
            audience: Audience::Debug,
        },
        apply: |settings, value| {
            settings.inline_bytes = ranged(value, 0, 1 << 20)?;
            settings.caller_bytes = settings.inline_bytes;
            settings.retransmit_buffer_bytes =
                MIN_RETRANSMIT_BUFFER.max(4 * settings.inline_bytes as usize);
            Some(())
        },
    },
    Setting {
        variable: Variable {
            name: "EVENKEEL_WORKERS",
            meaning: "worker threads for all connections of the process; auto is one per 4 cores, \
                1 to 4",
            accepts: "auto or a whole number from 1 to 16",
            default: "auto",
            audience: Audience::Debug,
        },
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
        variable: Variable {
            name: "EVENKEEL_CONNECT_TIMEOUT",
            meaning: "timeout for connecting to a listener",
            accepts: "seconds from 1 to 3600",
            default: "30",
            audience: Audience::User,
        },
        apply: |settings, value| {
            settings.connect_timeout = seconds(value)?;
            Some(())
        },
    },
    Setting {
        variable: Variable {
            name: "EVENKEEL_HANDSHAKE_TIMEOUT",
            meaning: "timeout for the handshake of an incoming TCP connection",
            accepts: "seconds from 1 to 3600",
            default: "5",
            audience: Audience::Debug,
        },
        apply: |settings, value| {
            settings.handshake_timeout = seconds(value)?;
            Some(())
        },
    },
    Setting {
        variable: Variable {
            name: "EVENKEEL_PEER_TIMEOUT",
            meaning: "how long a peer's host may not answer before a flow counts as dead; a queue \
                pair fails after an eighth of it, and is replaced",
            accepts: "seconds from 1 to 3600",
            default: "15",
            audience: Audience::User,
        },
        apply: |settings, value| {
            settings.peer_timeout = seconds(value)?;
            Some(())
        },
    },
    Setting {
        variable: Variable {
            name: "EVENKEEL_RECOVERY_TIMEOUT",
            meaning: "how long a connection that has lost all its flows tries to open new ones",
            accepts: "seconds from 1 to 3600",
            default: "30",
            audience: Audience::User,
        },
        apply: |settings, value| {
            settings.recovery_timeout = seconds(value)?;
            Some(())
        },
    },
    Setting {
        variable: Variable {
            name: "EVENKEEL_REPATH",
            meaning: "whether a flow that stays slower than others is replaced by one on another \
                path; auto: except in connections to reduction servers and of the collectives, \
                which all go at the pace of the slowest rank",
            accepts: "auto, on or off",
            default: "auto",
            audience: Audience::Debug,
        },
        apply: |settings, value| {
            settings.repath = match value {
                "auto" => None,
                "on" => Some(true),
                "off" => Some(false),
                _ => return None,
            };
            Some(())
        },
    },
    Setting {
        variable: Variable {
            name: "EVENKEEL_SCHEDULE",
            meaning: "pull: the next flow that can take bytes takes the next chunk; static: each \
                message is split into equal shares for all flows, and paths stay as they are, for \
                comparison with other transports",
            accepts: "pull or static",
            default: "pull",
            audience: Audience::Debug,
        },
        apply: |settings, value| {
            settings.schedule = match value {
                "pull" => Schedule::Pull,
                "static" => Schedule::Static { min_share: MIN_SHARE },
                _ => return None,
            };
            Some(())
        },
    },
    Setting {
        variable: Variable {
            name: "EVENKEEL_CHECKSUM",
            meaning: "whether every chunk has a checksum (CRC-32C); a chunk that does not match is \
                not delivered, and is sent again on another flow; the same on all ranks",
            accepts: "1 or on, 0 or off",
            default: "0",
            audience: Audience::User,
        },
        apply: |settings, value| {
            settings.checksum = match value {
                "1" | "on" => true,
                "0" | "off" => false,
                _ => return None,
            };
            Some(())
        },
    },
    Setting {
        variable: Variable {
            name: "EVENKEEL_LINK_SPEED",
            meaning: "speed of every device, instead of what the system reports",
            accepts: "Mb/s, a whole number from 1 to 10000000, such as 25000",
            default: "",
            audience: Audience::User,
        },
        apply: |settings, value| {
            settings.link_speed =
                if value.is_empty() { None } else { Some(ranged(value, 1, 10_000_000)? as u32) };
            Some(())
        },
    },
    Setting {
        variable: Variable {
            name: "NCCL_SOCKET_IFNAME",
            meaning: "interfaces to use, in the format of NCCL: prefixes of names; = matches whole \
                names, ^ excludes",
            accepts: "[^][=]name,name,...",
            default: "",
            audience: Audience::User,
        },
        apply: |settings, value| {
            value.clone_into(&mut settings.interfaces);
            NameFilter::is_valid(value).then_some(())
        },
    },
    Setting {
        variable: Variable {
            name: "NCCL_SOCKET_FAMILY",
            meaning: "address family to use",
            accepts: "AF_INET or AF_INET6",
            default: "",
            audience: Audience::User,
        },
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
        variable: Variable {
            name: "EVENKEEL_DEVICES",
            meaning: "separate: each interface or RDMA port is a device for NCCL; joined: one \
                device whose flows or queue pairs use all of them (at most 4), and which continues \
                when one fails",
            accepts: "separate or joined",
            default: "separate",
            audience: Audience::User,
        },
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
        variable: Variable {
            name: "EVENKEEL_BIND_TO_DEVICE",
            meaning: "whether a flow, or the control connection of a device of several RDMA ports, \
                leaves by its own interface where several are in the peer's subnet \
                (SO_BINDTODEVICE, Linux 5.7 and later); without it, and for one that gets no \
                answer that way, the kernel's route chooses; auto: unless this host drops what \
                comes by another interface than its route (rp_filter=1)",
            accepts: "auto, on or off",
            default: "auto",
            audience: Audience::Debug,
        },
        apply: |settings, value| {
            settings.bind_to_device = match value {
                "auto" => None,
                "on" => Some(true),
                "off" => Some(false),
                _ => return None,
            };
            Some(())
        },
    },
    Setting {
        variable: Variable {
            name: "EVENKEEL_RAILS",
            meaning: "rail of each device, and plane if rails have several, for NCCL 2.30 and \
                later; NCCL joins devices of the same rail, and does not try those that cannot \
                reach each other",
            accepts: "NAME=RAIL or NAME=RAIL/PLANE, separated by commas, such as \
                mlx5_0=0,mlx5_1=1; numbers from 0 to 32767",
            default: "",
            audience: Audience::User,
        },
        apply: |settings, value| {
            settings.rails = Rails::parse(value)?;
            Some(())
        },
    },
    Setting {
        variable: Variable {
            name: "EVENKEEL_PORTS",
            meaning: "ports to listen on, for firewalls: a process of the plugin takes the first \
                free one, and one of the collectives two; by default any free port",
            accepts: "FIRST-LAST, such as 29600-29699, or one port",
            default: "",
            audience: Audience::User,
        },
        apply: |settings, value| {
            settings.ports = if value.is_empty() { None } else { Some(ports(value)?) };
            Some(())
        },
    },
    Setting {
        variable: Variable {
            name: JOB_KEY,
            meaning: "secret of the job; peers that do not have it are refused",
            accepts: "64 hexadecimal digits, the same on all ranks",
            default: "",
            audience: Audience::User,
        },
        apply: |settings, value| {
            if !value.is_empty() {
                settings.job_key = Some(JobKey::parse(value)?);
            }
            Some(())
        },
    },
    Setting {
        variable: Variable {
            name: "EVENKEEL_JOB_KEY_FILE",
            meaning: "file that holds the secret of the job, instead of EVENKEEL_JOB_KEY",
            accepts: "the path of a file with 64 hexadecimal digits",
            default: "",
            audience: Audience::User,
        },
        apply: |settings, value| {
            if !value.is_empty() {
                settings.job_key = Some(key_in(value)?);
                settings.key_file = Some(PathBuf::from(value));
            }
            Some(())
        },
    },
    Setting {
        variable: Variable {
            name: ENCRYPTION,
            meaning: "required: every TCP connection is encrypted and authenticated with TLS 1.3 \
                and the job key, and peers without it are refused; the same on all ranks \
                (docs/encryption.md)",
            accepts: "off, or required together with EVENKEEL_JOB_KEY_FILE or EVENKEEL_JOB_KEY",
            default: "off",
            audience: Audience::User,
        },
        apply: |settings, value| {
            settings.require_encryption = match value {
                "off" => false,
                "required" => true,
                _ => return None,
            };
            Some(())
        },
    },
    Setting {
        variable: Variable {
            name: "EVENKEEL_KTLS",
            meaning: "whether the kernel encrypts and decrypts where encryption is required, so \
                that a network card with TLS offload can do it; it needs the kernel's module tls \
                on the host (docs/encryption.md)",
            accepts: "on or off",
            default: "off",
            audience: Audience::User,
        },
        apply: |settings, value| {
            settings.kernel_tls = match value {
                "on" => true,
                "off" => false,
                _ => return None,
            };
            Some(())
        },
    },
    Setting {
        variable: Variable {
            name: "EVENKEEL_RDMA_NETWORK",
            meaning: "whether RDMA, which Evenkeel cannot encrypt, may carry messages where \
                encryption is required; trusted: the network protects them itself, as with IPsec \
                in the adapters",
            accepts: "untrusted or trusted",
            default: "untrusted",
            audience: Audience::User,
        },
        apply: |settings, value| {
            settings.trust_rdma = match value {
                "untrusted" => false,
                "trusted" => true,
                _ => return None,
            };
            Some(())
        },
    },
    Setting {
        variable: Variable {
            name: "EVENKEEL_METRICS",
            meaning: "address of the metrics for Prometheus, at /metrics; of a range of ports the \
                first free one, so that all ranks of a host can have the same value",
            accepts: "ADDRESS:PORT or ADDRESS:FIRST-LAST, such as 0.0.0.0:9600-9615",
            default: "",
            audience: Audience::User,
        },
        apply: |settings, value| {
            settings.metrics = if value.is_empty() { Vec::new() } else { addresses(value)? };
            Some(())
        },
    },
    Setting {
        variable: Variable {
            name: "EVENKEEL_STATUS_DIR",
            meaning: "folder for the files plugin.PROCESS, which each process writes when NCCL \
                starts the plugin, verdict.PROCESS.ID, with what the job waits for, and \
                timeline.ID.svg, its picture; evenkeel-run reads it",
            accepts: "the path of a folder",
            default: "",
            audience: Audience::Internal,
        },
        apply: |settings, value| {
            settings.status_folder = (!value.is_empty()).then(|| PathBuf::from(value));
            Some(())
        },
    },
    Setting {
        variable: Variable {
            name: "EVENKEEL_WATCH",
            meaning: "whether the ranks find out, from their own traffic, which rank, card or path \
                they wait for; it takes UDP at the ports that they listen at, and is off where \
                encryption is required",
            accepts: "on or off",
            default: "off",
            audience: Audience::User,
        },
        apply: |settings, value| {
            settings.watch = match value {
                "on" => true,
                "off" => false,
                _ => return None,
            };
            Some(())
        },
    },
    Setting {
        variable: Variable {
            name: "EVENKEEL_WAIT_LIMIT",
            meaning: "how long a rank waits before it logs for which peer, if nobody is named",
            accepts: "seconds from 1 to 3600",
            default: "30",
            audience: Audience::Debug,
        },
        apply: |settings, value| {
            settings.wait_limit = seconds(value)?;
            Some(())
        },
    },
    Setting {
        variable: Variable {
            name: "EVENKEEL_NODE",
            meaning: "name of this host in what is said about slow jobs; by default the system's, \
                which in a pod is the pod's name",
            accepts: "up to 253 letters, digits, dashes, dots and underscores, of which 63 are \
                shown",
            default: "",
            audience: Audience::Internal,
        },
        apply: |settings, value| {
            let valid = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
            settings.node = (!value.is_empty()).then(|| value.to_owned());
            // As long as a node's name may be: the operator sets it, and no job may fail because of
            // that.
            (value.len() <= 253 && value.bytes().all(valid)).then_some(())
        },
    },
];

impl Settings {
    /// Whether TCP may carry messages if RDMA cannot.
    pub(crate) fn may_use_tcp(&self) -> bool {
        self.transport_mode == TransportMode::Auto
    }

    /// Reads the environment.
    ///
    /// # Errors
    /// [`SettingsError`] naming the first variable whose value is not of the accepted form.
    pub fn from_env() -> Result<Self, SettingsError> {
        Self::from_lookup(table::from_env)
    }

    /// Reads variables through a function that gives a variable's value, if it has one.
    ///
    /// # Errors
    /// As [`Settings::from_env`].
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Self, SettingsError> {
        // Every field is set below by its row of the table.
        let mut settings = Self {
            transport_mode: TransportMode::Auto,
            queue_pairs: 0,
            unused: Unused::default(),
            rdma_ports: String::new(),
            gid_index: None,
            traffic_class: None,
            service_level: None,
            pkey_index: 0,
            flows: 0,
            chunk_bytes: 0,
            inline_bytes: 0,
            caller_bytes: 0,
            retransmit_buffer_bytes: 0,
            workers: 0,
            connect_timeout: Duration::ZERO,
            handshake_timeout: Duration::ZERO,
            peer_timeout: Duration::ZERO,
            recovery_timeout: Duration::ZERO,
            repath: None,
            schedule: Schedule::Pull,
            checksum: false,
            link_speed: None,
            interfaces: String::new(),
            family: Family::Any,
            joined: false,
            bind_to_device: None,
            rails: Rails::default(),
            ports: None,
            job_key: None,
            key_file: None,
            require_encryption: false,
            encryption: None,
            kernel_tls: false,
            kernel_tls_missing: false,
            trust_rdma: false,
            rdma_left_out: false,
            metrics: Vec::new(),
            status_folder: None,
            watch: false,
            wait_limit: Duration::ZERO,
            node: None,
        };
        table::read(SETTINGS, &mut settings, &lookup)?;
        settings.unused.read(lookup);
        if settings.require_encryption {
            settings.encrypt()?;
        }
        Ok(settings)
    }

    /// Prepares encryption, so that no message can go in clear.
    fn encrypt(&mut self) -> Result<(), SettingsError> {
        let refused = |name| SettingsError::of(SETTINGS, name, "required");
        let key = self.job_key.as_ref().ok_or_else(|| refused(ENCRYPTION))?;
        // Its datagrams go in clear.
        self.watch = false;
        self.encryption = Some(JobIdentity::of(key).map_err(|_| refused(ENCRYPTION))?);
        if self.kernel_tls {
            self.kernel_tls = sys::has_kernel_tls();
            self.kernel_tls_missing = !self.kernel_tls;
        }
        if self.trust_rdma {
            return Ok(());
        }
        if self.transport_mode == TransportMode::Rdma {
            return Err(SettingsError::rdma_in_clear());
        }
        self.rdma_left_out = self.transport_mode == TransportMode::Auto;
        self.transport_mode = TransportMode::Tcp;
        Ok(())
    }

    /// What encryption all connections of a process with these settings have, for its identity if
    /// they are encrypted.
    pub fn encryption(&self) -> Option<&JobIdentity> {
        self.encryption.as_ref()
    }

    /// What encryption is in force, in words: `encryption off`, or `encryption required` and more.
    pub fn encryption_status(&self) -> &'static str {
        match (&self.encryption, self.transport_mode) {
            (None, _) => "encryption off",
            (Some(_), TransportMode::Tcp) if self.kernel_tls => {
                "encryption required (TLS 1.3 by the kernel)"
            }
            (Some(_), TransportMode::Tcp) => "encryption required (TLS 1.3)",
            (Some(_), _) if self.kernel_tls => {
                "encryption required (TLS 1.3 by the kernel; RDMA in clear over a trusted network)"
            }
            (Some(_), _) => "encryption required (TLS 1.3; RDMA in clear over a trusted network)",
        }
    }

    /// The file that the job key is from, if others than the owner and the group may read it where
    /// it is. A mounted Secret may be readable by all, since its folder is read-only and only this
    /// container has it.
    pub(crate) fn exposed_key_file(&self) -> Option<&Path> {
        let file = self.key_file.as_deref()?;
        let mode = std::fs::metadata(file).ok()?.permissions().mode();
        let is_mounted_secret = || {
            rustix::fs::statvfs(file)
                .is_ok_and(|system| system.f_flag.contains(StatVfsMountFlags::RDONLY))
        };
        (mode & 0o004 != 0 && !is_mounted_secret()).then_some(file)
    }

    /// Whether peers must prove that they have the job's key.
    pub fn has_job_key(&self) -> bool {
        self.job_key.is_some()
    }

    /// The secret of the job, if it has one.
    pub(crate) fn job_key(&self) -> Option<&JobKey> {
        self.job_key.as_ref()
    }

    /// How long a wait may last before it is logged.
    pub(crate) fn wait_limit(&self) -> Duration {
        self.wait_limit
    }

    /// The ports to listen at; `None`: any.
    pub fn ports(&self) -> Option<&RangeInclusive<u16>> {
        self.ports.as_ref()
    }

    /// Folder for the file that reports the start of the plugin; `None`: no file.
    pub fn status_folder(&self) -> Option<&Path> {
        self.status_folder.as_deref()
    }

    /// Limits the retransmit buffer of each connection, for processes with many connections. A
    /// message that finds no room is done once the peer has it.
    pub fn limit_retransmit_buffer(&mut self, bytes: usize) {
        self.retransmit_buffer_bytes = bytes;
    }

    /// Makes callers write and read messages up to this length themselves, also those that are too
    /// long for a copy. For callers that test their requests until they are done, on hosts without
    /// a free processor for the workers.
    pub fn set_caller_bytes(&mut self, bytes: u64) {
        self.caller_bytes = self.inline_bytes.max(bytes);
    }

    /// Whether the ranks find out which of them they wait for.
    pub fn watches(&self) -> bool {
        self.watch
    }

    /// Number of flows of a connection.
    pub fn flows(&self) -> usize {
        self.flows.into()
    }

    /// Whether a port of an RDMA device may be used.
    pub(crate) fn wants_rdma(&self, device: &str, port: u8) -> bool {
        self.rdma_ports.is_empty() || NameFilter::parse(&self.rdma_ports).matches_port(device, port)
    }

    /// Whether all flows have equal shares, on paths that stay.
    pub(crate) fn is_static(&self) -> bool {
        self.schedule != Schedule::Pull
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use evenkeel_testkit::TestRng;

    fn with(name: &str, value: &str) -> Result<Settings, SettingsError> {
        Settings::from_lookup(|asked| (asked == name).then(|| value.to_owned()))
    }

    #[test]
    fn default_settings_are_valid_and_complete() {
        let settings = Settings::from_lookup(|_| None).unwrap();
        assert_eq!((settings.flows, settings.chunk_bytes), (4, 524_288));
        assert!((1..=4).contains(&settings.workers));
        assert_eq!(settings.peer_timeout, Duration::from_secs(15));
        assert_eq!(settings.link_speed, None);
    }

    #[test]
    fn empty_setting_means_default() {
        assert_eq!(with("EVENKEEL_FLOWS", " ").unwrap().flows, 4);
    }

    #[test]
    fn ports_setting_is_a_range_or_one_port() {
        assert_eq!(with("EVENKEEL_PORTS", "29600-29699").unwrap().ports, Some(29600..=29699));
        assert_eq!(with("EVENKEEL_PORTS", "29600").unwrap().ports, Some(29600..=29600));
        assert_eq!(with("EVENKEEL_PORTS", "").unwrap().ports, None);
    }

    #[test]
    fn job_key_stays_out_of_logs() {
        let error = with("EVENKEEL_JOB_KEY", "c0ffee").unwrap_err().to_string();
        assert!(error.contains("64 hexadecimal digits") && !error.contains("c0ffee"), "{error}");
        let settings = with("EVENKEEL_JOB_KEY", &"c0".repeat(32)).unwrap();
        assert!(settings.job_key.is_some() && !format!("{settings:?}").contains("192"));
    }

    /// Every value is accepted, or refused with the name of the variable.
    #[test]
    fn any_setting_value_is_accepted_or_refused() {
        const SEEDS: [&str; 14] = [
            "4",
            "524288",
            "auto",
            "on",
            "joined",
            "AF_INET6",
            "^=eth0,lo:1",
            "29600-29699",
            "65535",
            "0.0.0.0:9600-9615",
            "[::1]:9600",
            "00112233445566778899aAbBcCdDeEfF00112233445566778899aabbccddeeff",
            "18446744073709551616",
            "/no/such/file",
        ];
        let mut rng = TestRng::new(5);
        let (mut taken, mut refused) = (0, 0);
        for round in 0..20_000 {
            let mut value = rng.choose(&SEEDS).as_bytes().to_vec();
            (0..rng.below(3)).for_each(|_| rng.mutate(&mut value));
            let value = String::from_utf8_lossy(&value).into_owned();
            let Variable { name, accepts, .. } = SETTINGS[round % SETTINGS.len()].variable;
            match with(name, &value) {
                Ok(settings) => {
                    taken += 1;
                    assert!((1..=MAX_FLOWS as u16).contains(&settings.flows));
                    assert!(settings.chunk_bytes.is_multiple_of(CHUNK_ALIGN));
                    assert!((4096..=MAX_CHUNK_BYTES).contains(&settings.chunk_bytes));
                    assert!((1..=16).contains(&settings.workers));
                    assert!(settings.ports.is_none_or(|ports| *ports.start() > 0));
                    assert!(settings.metrics.len() <= u16::MAX.into());
                }
                Err(error) => {
                    refused += 1;
                    let text = error.to_string();
                    assert!(text.contains(name) && text.contains(accepts), "{text}");
                }
            }
        }
        assert!(taken > 1000 && refused > 1000, "{taken} and {refused}");
    }

    #[test]
    fn node_may_have_the_longest_name_that_kubernetes_allows() {
        assert!(with("EVENKEEL_NODE", &"n".repeat(253)).is_ok());
        assert!(with("EVENKEEL_NODE", &"n".repeat(254)).is_err());
    }

    #[test]
    fn rdma_is_switched_off_as_in_nccl() {
        let mode = |disable: &str, transport: &str| {
            let set = [("NCCL_IB_DISABLE", disable), ("EVENKEEL_TRANSPORT", transport)];
            let lookup = |name: &str| {
                let found = set.iter().find(|(known, _)| *known == name);
                found.map(|(_, value)| (*value).to_owned())
            };
            Settings::from_lookup(lookup).unwrap().transport_mode
        };
        assert_eq!(mode("1", ""), TransportMode::Tcp);
        assert_eq!(mode("1", "auto"), TransportMode::Tcp);
        assert_eq!(mode("0", "auto"), TransportMode::Auto);
        assert_eq!(mode("1", "rdma"), TransportMode::Rdma, "it is asked for");
    }

    #[test]
    fn endless_job_key_file_is_refused() {
        assert!(with("EVENKEEL_JOB_KEY_FILE", "/dev/zero").is_err());
    }

    #[test]
    fn job_key_that_is_given_as_its_file_is_not_shown() {
        let key = "5a".repeat(32);
        let error = with("EVENKEEL_JOB_KEY_FILE", &key).unwrap_err().to_string();
        assert!(error.contains("EVENKEEL_JOB_KEY_FILE") && !error.contains(&key), "{error}");
    }

    #[test]
    fn bad_setting_is_reported_with_accepted_values() {
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
            ("EVENKEEL_SCHEDULE", "dynamic"),
            ("EVENKEEL_CHECKSUM", "crc32"),
            ("EVENKEEL_TRANSPORT", "ib"),
            ("EVENKEEL_QUEUE_PAIRS", "9"),
            ("NCCL_IB_DISABLE", "yes"),
            ("NCCL_IB_GID_INDEX", "256"),
            ("NCCL_IB_SL", "16"),
            ("NCCL_IB_PKEY", "-1"),
            ("NCCL_IB_PKEY", "65536"),
            ("EVENKEEL_RAILS", "eth0"),
            ("EVENKEEL_BIND_TO_DEVICE", "eth0"),
            ("EVENKEEL_WATCH", "1"),
            ("EVENKEEL_WAIT_LIMIT", "0"),
            ("EVENKEEL_NODE", "a node"),
        ] {
            let text = with(name, value).unwrap_err().to_string();
            assert!(
                text.contains(name) && text.contains(value) && text.contains("it takes"),
                "{text}"
            );
        }
    }
}
