//! The tuner's settings.

use evenkeel_transport::settings::table::{
    self, Audience, Setting, SettingsError, Variable, ranged,
};

use crate::cost::{Network, Servers};

/// The values of all settings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Whether NCCL's choices may be replaced.
    on: bool,
    /// Mb/s of a node.
    bandwidth: Option<u64>,
    /// Microseconds.
    latency: Option<u64>,
    /// Mb/s of each reduction server.
    server_bandwidth: Option<u64>,
}

/// The value, or none if it is empty.
fn optional(value: &str, max: u64) -> Option<Option<u64>> {
    if value.is_empty() { Some(None) } else { ranged(value, 1, max).map(Some) }
}

/// All settings.
pub const SETTINGS: &[Setting<Settings>] = &[
    Setting {
        variable: Variable {
            name: "EVENKEEL_TUNER",
            meaning: "whether the plugin replaces NCCL's choice of algorithm and protocol where \
                measurements of the network say that another is faster (NCCL 2.21 and later); it \
                needs EVENKEEL_TUNER_BANDWIDTH and EVENKEEL_TUNER_LATENCY; the same on all ranks",
            accepts: "1 or on, 0 or off",
            default: "1",
            audience: Audience::Debug,
        },
        apply: |settings, value| {
            settings.on = match value {
                "1" | "on" => true,
                "0" | "off" => false,
                _ => return None,
            };
            Some(())
        },
    },
    Setting {
        variable: Variable {
            name: "EVENKEEL_TUNER_BANDWIDTH",
            meaning: "measured bandwidth of a node, all its devices together, in each direction; \
                without it NCCL chooses alone; the same on all ranks",
            accepts: "Mb/s, a whole number from 1 to 10000000, such as 9400",
            default: "",
            audience: Audience::User,
        },
        apply: |settings, value| {
            settings.bandwidth = optional(value, 10_000_000)?;
            Some(())
        },
    },
    Setting {
        variable: Variable {
            name: "EVENKEEL_TUNER_LATENCY",
            meaning: "measured time of a small message from one node to another, half a round \
                trip; without it NCCL chooses alone; the same on all ranks",
            accepts: "microseconds, a whole number from 1 to 1000000, such as 30",
            default: "",
            audience: Audience::User,
        },
        apply: |settings, value| {
            settings.latency = optional(value, 1_000_000)?;
            Some(())
        },
    },
    Setting {
        variable: Variable {
            name: "EVENKEEL_TUNER_SERVER_BANDWIDTH",
            meaning: "bandwidth at which each reduction server receives, sums and sends; by \
                default that of a node; the same on all ranks, as is the number of servers in \
                their lists",
            accepts: "Mb/s, a whole number from 1 to 10000000, such as 9400",
            default: "",
            audience: Audience::Debug,
        },
        apply: |settings, value| {
            settings.server_bandwidth = optional(value, 10_000_000)?;
            Some(())
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
        let mut settings = Self::default();
        table::read(SETTINGS, &mut settings, lookup)?;
        Ok(settings)
    }

    /// The network of a communicator whose jobs has this number of reduction servers, or why NCCL
    /// chooses alone.
    ///
    /// # Errors
    /// One line for the log.
    pub fn network(
        &self,
        nodes: usize,
        ranks: usize,
        servers: usize,
    ) -> Result<Network, &'static str> {
        const MEGABIT: f64 = 1e6 / 8.0;
        if !self.on {
            return Err("EVENKEEL_TUNER is off");
        }
        if nodes < 2 || ranks < nodes {
            return Err("all ranks are on one node");
        }
        let (Some(bandwidth), Some(latency)) = (self.bandwidth, self.latency) else {
            return Err("EVENKEEL_TUNER_BANDWIDTH and EVENKEEL_TUNER_LATENCY are not both set");
        };
        let of_server = self.server_bandwidth.unwrap_or(bandwidth) as f64 * MEGABIT;
        Ok(Network {
            nodes,
            ranks,
            bandwidth: bandwidth as f64 * MEGABIT,
            latency: latency as f64 * 1e-6,
            servers: (servers > 0).then_some(Servers { count: servers, bandwidth: of_server }),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(variables: &[(&str, &str)]) -> Result<Settings, SettingsError> {
        Settings::from_lookup(|asked| {
            let found = variables.iter().find(|(name, _)| *name == asked);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn tuner_settings_are_a_network_only_when_it_was_measured() {
        let reason = |variables: &[(&str, &str)], nodes| {
            with(variables).unwrap().network(nodes, 8, 0).unwrap_err()
        };
        assert!(reason(&[], 8).contains("not both set"));
        assert!(reason(&[("EVENKEEL_TUNER_LATENCY", "30")], 8).contains("not both set"));
        let both = [("EVENKEEL_TUNER_LATENCY", "30"), ("EVENKEEL_TUNER_BANDWIDTH", "10000")];
        assert!(reason(&both, 1).contains("one node"));
        let off = [both[0], both[1], ("EVENKEEL_TUNER", "off")];
        assert!(reason(&off, 8).contains("off"));
        let network = with(&both).unwrap().network(4, 8, 2).unwrap();
        assert_eq!((network.nodes, network.ranks, network.bandwidth), (4, 8, 1.25e9));
        assert!((network.latency - 30e-6).abs() < 1e-12);
        assert_eq!(network.servers, Some(Servers { count: 2, bandwidth: 1.25e9 }));
    }

    #[test]
    fn bad_tuner_setting_is_reported_with_accepted_values() {
        for (name, value) in [
            ("EVENKEEL_TUNER", "maybe"),
            ("EVENKEEL_TUNER_BANDWIDTH", "10G"),
            ("EVENKEEL_TUNER_LATENCY", "0"),
            ("EVENKEEL_TUNER_SERVER_BANDWIDTH", "-1"),
        ] {
            let text = with(&[(name, value)]).unwrap_err().to_string();
            assert!(text.contains(name) && text.contains("it takes"), "{text}");
        }
    }
}
