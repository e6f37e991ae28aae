//! The plugin's log: warnings always, the rest for those who ask with `NCCL_DEBUG`.

use std::sync::Mutex;

use evenkeel_nccl_abi::{LOG_INFO, LOG_TRACE, LOG_WARN};

static LAST_WARNING: Mutex<String> = Mutex::new(String::new());

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
    if level <= wanted {
        let name = match level {
            LOG_WARN => "WARN",
            LOG_INFO => "INFO",
            _ => "TRACE",
        };
        eprintln!("plugin {name}: {text}");
    }
}

/// What the plugin last warned of, once; empty if nothing.
pub(crate) fn take_warning() -> String {
    LAST_WARNING.lock().map(|mut last| std::mem::take(&mut *last)).unwrap_or_default()
}
