//! The report to Evenkeel's controller whether NCCL uses the plugin in this process.
//!
//! It is a datagram from a thread of its own, so that nothing waits for it and nothing depends on
//! it. It is sent again until the controller answers, a few times.
//! `operator/internal/controller/pluginreports` receives it. The address is a number: a lookup of a
//! name could hold locks of the C library while the process forks.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use crate::settings::table::{self, Audience, Setting, Variable};
use crate::sync::lock;
use crate::sys;

/// How long each answer is awaited before the report is sent again: two minutes together.
const WAITS: [Duration; 7] = [
    Duration::from_secs(2),
    Duration::from_secs(4),
    Duration::from_secs(8),
    Duration::from_secs(15),
    Duration::from_secs(30),
    Duration::from_secs(30),
    Duration::from_secs(31),
];
/// Maximum length of the text.
const MAX_TEXT: usize = 400;

/// Maximum length of a pod's UID.
const MAX_UID: usize = 63;

/// Where to report to, and for which pod.
#[derive(Clone, Debug, Default)]
pub struct Target {
    address: Option<SocketAddr>,
    pod: String,
}

impl Target {
    /// What the environment says; nowhere, if that is invalid.
    pub(crate) fn from_env() -> Self {
        let mut target = Self::default();
        match table::read(SETTINGS, &mut target, table::from_env) {
            Ok(()) => target,
            Err(_) => Self::default(),
        }
    }
}

/// The settings. The operator sets both. The job does not depend on them, so invalid ones only mean
/// that nothing is reported.
pub const SETTINGS: &[Setting<Target>] = &[
    Setting {
        variable: Variable {
            name: "EVENKEEL_REPORT",
            meaning: "address of Evenkeel's controller, to which each process reports once, over \
                UDP, whether NCCL uses the plugin, and the one that collects whom the job waits \
                for; nothing depends on it, and an invalid value turns it off",
            accepts: "ADDRESS:PORT",
            default: "",
            audience: Audience::Internal,
        },
        apply: |target, value| {
            target.address = if value.is_empty() { None } else { Some(value.parse().ok()?) };
            Some(())
        },
    },
    Setting {
        variable: Variable {
            name: "EVENKEEL_POD_UID",
            meaning: "the pod that EVENKEEL_REPORT is about",
            accepts: "metadata.uid of the pod",
            default: "",
            audience: Audience::Internal,
        },
        apply: |target, value| {
            let valid = value.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
            (valid && value.len() <= MAX_UID).then(|| value.clone_into(&mut target.pod))
        },
    },
];

/// Whether NCCL uses the plugin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// It does.
    Loaded,
    /// NCCL loaded the library, which refused to start.
    Failed,
}

/// Reports what has changed since the last report. It returns at once, and failures are silent: the
/// job does not depend on it.
pub fn report(outcome: Outcome, text: &str) {
    static LAST: Mutex<Option<Outcome>> = Mutex::new(None);
    let mut target = Target::default();
    if table::read(SETTINGS, &mut target, table::from_env).is_err() || target.pod.is_empty() {
        return;
    }
    let Some(address) = target.address else { return };
    if lock(&LAST).replace(outcome) == Some(outcome) {
        return;
    }
    let message = message(&target.pod, outcome, text);
    // The first one at once: after a failure the process may end soon. The buffer of a new socket
    // has room, so nothing blocks.
    let Some(socket) = open(address) else { return };
    let _ = socket.send(&message);
    let named = thread::Builder::new().name("evenkeel-report".to_owned());
    let _ = named.spawn(move || {
        sys::block_signals();
        deliver(&socket, &message, target.pod.as_bytes(), &WAITS);
    });
}

/// Reports whom the job waits for, as JSON. It is sent once: another one follows while that stands.
/// Failures are silent.
pub(crate) fn verdict(target: &Target, json: &str) {
    if target.pod.is_empty() {
        return;
    }
    if let Some(socket) = target.address.and_then(open) {
        let _ = socket.send(format!("evenkeel-verdict 1\n{}\n{json}\n", target.pod).as_bytes());
    }
}

/// The datagram: a line each for the format, the pod, the outcome and the text.
fn message(pod: &str, outcome: Outcome, text: &str) -> Vec<u8> {
    let outcome = match outcome {
        Outcome::Loaded => "Loaded",
        Outcome::Failed => "Failed",
    };
    let text: String =
        text.chars().map(|c| if c.is_ascii_graphic() { c } else { ' ' }).take(MAX_TEXT).collect();
    format!("evenkeel-report 1\n{pod}\n{outcome}\n{text}\n").into_bytes()
}

fn open(to: SocketAddr) -> Option<UdpSocket> {
    let any: SocketAddr = match to {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect(to).ok()?;
    Some(socket)
}

/// Waits for the answer to a message that was sent, and sends it again after each wait. Whether the
/// answer came.
fn deliver(socket: &UdpSocket, message: &[u8], answer: &[u8], waits: &[Duration]) -> bool {
    waits.iter().any(|wait| {
        answered(socket, answer, Instant::now() + *wait) || {
            let _ = socket.send(message); // an error is as good as a datagram that is lost
            false
        }
    })
}

fn answered(socket: &UdpSocket, answer: &[u8], until: Instant) -> bool {
    let mut buffer = [0; 64];
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() || socket.set_read_timeout(Some(left)).is_err() {
            return false;
        }
        match socket.recv(&mut buffer) {
            Ok(length) if buffer.get(..length) == Some(answer) => return true,
            Ok(_) => {}
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            // Nobody listens there now: somebody may before the next attempt.
            Err(_) => {
                thread::sleep(left);
                return false;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails there")]

    use super::*;

    const SHORT: Duration = Duration::from_millis(20);
    const LONG: Duration = Duration::from_secs(30);

    #[test]
    fn report_is_sent_again_until_it_is_answered() {
        let controller = UdpSocket::bind("127.0.0.1:0").unwrap();
        let to = controller.local_addr().unwrap();
        let sender = thread::spawn(move || {
            let socket = open(to).unwrap();
            socket.send(b"message").unwrap();
            deliver(&socket, b"message", b"uid", &[SHORT, LONG])
        });
        let mut buffer = [0; 64];
        let (_, first) = controller.recv_from(&mut buffer).unwrap();
        let (length, second) = controller.recv_from(&mut buffer).unwrap();
        assert_eq!((&buffer[..length], first), (&b"message"[..], second));
        controller.send_to(b"another", second).unwrap(); // no answer to this one
        controller.send_to(b"uid", second).unwrap();
        assert!(sender.join().unwrap());
    }

    #[test]
    fn report_of_a_verdict_has_the_pod_and_the_json() {
        let controller = UdpSocket::bind("127.0.0.1:0").unwrap();
        controller.set_read_timeout(Some(LONG)).unwrap();
        let address = controller.local_addr().ok();
        verdict(&Target { address, pod: String::new() }, "unsent");
        verdict(&Target { address, pod: "uid".to_owned() }, "{}");
        let mut buffer = [0; 64];
        let length = controller.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..length], b"evenkeel-verdict 1\nuid\n{}\n");
    }

    #[test]
    fn report_to_nobody_ends() {
        let gone = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        assert!(!deliver(&open(gone).unwrap(), b"message", b"uid", &[SHORT, SHORT]));
    }

    #[test]
    fn report_message_has_four_lines_whatever_the_text() {
        let long = "a\nb\u{e9}".to_owned() + &"x".repeat(2000);
        let text = String::from_utf8(message("uid", Outcome::Failed, &long)).unwrap();
        assert!(text.starts_with("evenkeel-report 1\nuid\nFailed\na b x"), "{text}");
        assert!(text.lines().count() == 4 && text.len() < 512, "{text}");
    }
}
