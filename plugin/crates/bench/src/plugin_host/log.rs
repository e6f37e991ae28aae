//! The plugin's log: warnings always, the rest for those who ask with `NCCL_DEBUG`; and what it
//! says of connections.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::sync::Mutex;

use evenkeel_nccl_abi::{LOG_INFO, LOG_TRACE, LOG_WARN};

static LAST_WARNING: Mutex<String> = Mutex::new(String::new());
/// What carries the connections that were opened so far.
static TRANSPORTS: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Takes one line from the plugin, on whichever thread it comes.
pub(crate) fn line(level: i32, text: &str) {
    let wanted = match std::env::var("NCCL_DEBUG").unwrap_or_default().to_ascii_uppercase().as_str()
    {
        "TRACE" => LOG_TRACE,
        "INFO" => LOG_INFO,
        _ => LOG_WARN,
    };
    if level == LOG_WARN
        && let Ok(mut last) = LAST_WARNING.lock()
    {
        text.clone_into(&mut last);
    }
    if let Some(transport) = transport_of(text)
        && let Ok(mut transports) = TRANSPORTS.lock()
    {
        transports.insert(transport.to_owned());
    }
    if level <= wanted {
        let name = match level {
            LOG_WARN => "WARN",
            LOG_INFO => "INFO",
            _ => "TRACE",
        };
        // One write: ranks share the terminal. Nobody may be listening.
        let _ = io::stderr().write_all(format!("plugin {name}: {text}\n").as_bytes());
    }
}

/// What the plugin last warned of, once; empty if nothing.
pub(crate) fn take_warning() -> String {
    LAST_WARNING.lock().map(|mut last| std::mem::take(&mut *last)).unwrap_or_default()
}

/// What carries the messages of the connections that the plugin has opened: its name, or `mixed`.
/// None where the plugin has opened none, or does not say.
pub(crate) fn transport() -> Option<String> {
    let transports = TRANSPORTS.lock().ok()?;
    match transports.len() {
        0 | 1 => transports.first().cloned(),
        _ => Some("mixed".to_owned()),
    }
}

/// What Evenkeel's line about a new connection says.
fn transport_of(line: &str) -> Option<&str> {
    let facts = line.strip_prefix("evenkeel: connection opened ")?;
    facts.split(' ').find_map(|fact| fact.strip_prefix("transport="))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_line_of_a_new_connection_gives_the_transport() {
        let line = "evenkeel: connection opened peer=10.0.0.1:7 direction=send transport=rdma device=mlx5_0:1 comm=0x1";
        assert_eq!(transport_of(line), Some("rdma"));
        for other in ["evenkeel: transport=rdma", "evenkeel: connection closed transport=rdma", ""]
        {
            assert_eq!(transport_of(other), None, "{other}");
        }
    }
}
