//! Tables of settings. A table reads the environment, and the documentation is written from it.

use std::time::Duration;

use evenkeel_protocol::JobKey;

/// One environment variable, which sets a value of `T`.
pub struct Setting<T> {
    /// The variable and its documentation.
    pub variable: Variable,
    /// Sets the value; `None` if it is not of the accepted form.
    pub apply: fn(&mut T, &str) -> Option<()>,
}

/// An environment variable and its documentation.
#[derive(Clone, Copy, Debug)]
pub struct Variable {
    /// Its name.
    pub name: &'static str,
    /// What it sets.
    pub meaning: &'static str,
    /// The accepted values.
    pub accepts: &'static str,
    /// Its value when unset or empty.
    pub default: &'static str,
    /// Who sets it.
    pub audience: Audience,
}

/// Who sets a variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Audience {
    /// Whoever runs the job.
    User,
    /// The operator or `evenkeel-run`.
    Internal,
    /// Whoever looks for a fault or compares transports: the default suits every job.
    Debug,
}

/// A variable has a value that is not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name}={value:?} is not valid: it takes {accepts} (default {default:?})")]
pub struct SettingsError {
    name: &'static str,
    value: String,
    accepts: &'static str,
    default: &'static str,
}

/// The variable that holds the job's secret.
pub(super) const JOB_KEY: &str = "EVENKEEL_JOB_KEY";

impl Variable {
    /// Whether its value must not be shown.
    pub fn is_secret(&self) -> bool {
        self.name == JOB_KEY
    }
}

/// The variable that requires encryption.
pub(super) const ENCRYPTION: &str = "EVENKEEL_ENCRYPTION";

impl SettingsError {
    /// A variable of a table has a value that its other variables do not allow.
    pub(super) fn of<T>(table: &[Setting<T>], name: &'static str, value: &str) -> Self {
        let variable = table.iter().map(|setting| setting.variable).find(|it| it.name == name);
        let (accepts, default) =
            variable.map_or(("", ""), |variable| (variable.accepts, variable.default));
        Self { name, value: value.to_owned(), accepts, default }
    }

    /// RDMA is required, and so is encryption, which it does not have.
    pub(super) fn rdma_in_clear() -> Self {
        Self {
            name: "EVENKEEL_TRANSPORT",
            value: "rdma".to_owned(),
            accepts: "auto or tcp with EVENKEEL_ENCRYPTION=required, unless EVENKEEL_RDMA_NETWORK=trusted",
            default: "auto",
        }
    }
}

/// Sets all values of a table, with a function that returns a variable's value if it has one.
///
/// # Errors
/// Names the first variable whose value is not of the accepted form.
pub fn read<T>(
    table: &[Setting<T>],
    settings: &mut T,
    lookup: impl Fn(&str) -> Option<String>,
) -> Result<(), SettingsError> {
    for Setting { variable, apply } in table {
        let Variable { name, accepts, default, .. } = *variable;
        let given = lookup(name).unwrap_or_default();
        let value = match given.trim() {
            "" => default,
            given => given,
        };
        // The secret may have been given to a variable that is to have the name of its file.
        let is_secret = variable.is_secret() || JobKey::parse(value).is_some();
        let shown = if is_secret { "(not shown)" } else { value };
        let error = || SettingsError { name, value: shown.to_owned(), accepts, default };
        apply(settings, value).ok_or_else(error)?;
    }
    Ok(())
}

/// A variable of the environment, for [`read`].
pub fn from_env(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// A whole number in a range.
pub fn ranged(value: &str, min: u64, max: u64) -> Option<u64> {
    value.parse().ok().filter(|number| (min..=max).contains(number))
}

/// Seconds, from 1 to 3600.
pub fn seconds(value: &str) -> Option<Duration> {
    ranged(value, 1, 3600).map(Duration::from_secs)
}
