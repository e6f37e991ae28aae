//! The options of a call.

use std::sync::Arc;
use std::time::Duration;

use crate::algorithms::algorithm::Algorithm;
use crate::error::{Error, Result};
use crate::recorder::Recorded;

/// The options of a call. All ranks must pass the same, except for the timeout and the note.
#[derive(Clone, Debug, Default)]
pub struct Call {
    pub(super) tag: u32,
    pub(crate) timeout: Option<Duration>,
    pub(super) algorithm: Option<Algorithm>,
    pub(crate) note: Option<Arc<str>>,
    /// Its place in the flight recorder, if it was scheduled.
    pub(crate) record: Option<Recorded>,
}

impl Call {
    /// Operations with different tags may be in progress at the same time. A group remembers every tag that was used, so reuse a few
    /// tags instead of a new one for each operation.
    pub fn tag(self, tag: u32) -> Self {
        Self { tag, ..self }
    }

    /// How long the operation may make no progress. Defaults to the group's timeout.
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { timeout: Some(timeout), ..self }
    }

    /// The algorithm of an all-reduce. By default the cost model selects it by the number of ranks and bytes.
    pub fn algorithm(self, algorithm: Algorithm) -> Self {
        Self { algorithm: Some(algorithm), ..self }
    }

    /// A text for the flight recorder: what the caller knows of the call and Evenkeel does not.
    pub fn note(self, note: impl Into<Arc<str>>) -> Self {
        Self { note: Some(note.into()), ..self }
    }

    /// The options from a tag, a timeout in seconds and an algorithm's name, as programs in other languages pass them.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::ErrorKind::Argument), which lists the valid values.
    pub fn from_parts(tag: u32, timeout: Option<f64>, algorithm: Option<&str>) -> Result<Self> {
        let mut call = Self::default().tag(tag);
        if let Some(timeout) = timeout {
            call = call.timeout(timeout_from_seconds(timeout)?);
        }
        if let Some(name) = algorithm {
            call = call.algorithm(Algorithm::from_name(name).ok_or_else(|| {
                let names = Algorithm::ALL.map(Algorithm::name).join(", ");
                Error::argument(format!("there is no algorithm {name:?}: {names}"))
            })?);
        }
        Ok(call)
    }
}

/// A timeout from a number of seconds.
///
/// # Errors
/// [`ErrorKind::Argument`](crate::ErrorKind::Argument) when it is not positive or too large.
pub fn timeout_from_seconds(seconds: f64) -> Result<Duration> {
    match Duration::try_from_secs_f64(seconds) {
        // About 30 years: a longer time overflows clocks.
        Ok(time) if !time.is_zero() && seconds <= 1e9 => Ok(time),
        _ => Err(Error::argument(format!(
            "a timeout of {seconds} seconds: more than 0, at most 1e9"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn call_from_parts_checks_timeout_and_algorithm() {
        assert!(
            Call::from_parts(7, Some(0.5), Some("ring")).is_ok()
                && Call::from_parts(0, None, None).is_ok()
        );
        let error = Call::from_parts(0, None, Some("guess")).unwrap_err().to_string();
        assert!(error.contains("guess") && error.contains("ring_chunked"), "{error}");
        assert_eq!(timeout_from_seconds(1.5).unwrap(), Duration::from_millis(1500));
        for wrong in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e10, 1e-12] {
            assert!(Call::from_parts(0, Some(wrong), None).is_err(), "{wrong}");
        }
    }
}
