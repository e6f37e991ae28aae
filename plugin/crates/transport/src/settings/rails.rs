//! The rails of devices, from the settings.

/// Maximum number of a rail: NCCL counts them in signed 16-bit numbers.
const MAX_NUMBER: u16 = i16::MAX as u16;

/// Rail and plane of a device. NCCL joins devices of the same rail, and of those the ones of the
/// same plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rail {
    /// Number of the rail.
    pub number: u16,
    /// Number of the plane in it, if rails have several.
    pub plane: Option<u16>,
}

/// The rails of all devices that the settings name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Rails(Vec<(String, Rail)>);

impl Rails {
    /// Parses `NAME=RAIL` or `NAME=RAIL/PLANE`, separated by commas.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut rails: Vec<(String, Rail)> = Vec::new();
        for entry in text.split(',').filter(|_| !text.is_empty()) {
            let (name, place) = entry.trim().split_once('=')?;
            let (number, plane) = match place.split_once('/') {
                Some((number, plane)) => (number, Some(plane)),
                None => (place, None),
            };
            let parse = |text: &str| text.parse().ok().filter(|number| *number <= MAX_NUMBER);
            let plane = match plane {
                Some(plane) => Some(parse(plane)?),
                None => None,
            };
            if name.is_empty() || rails.iter().any(|(other, _)| other == name) {
                return None;
            }
            rails.push((name.to_owned(), Rail { number: parse(number)?, plane }));
        }
        Some(Self(rails))
    }

    /// The rail of a device. An RDMA port is found by its own name, then by that of its device.
    pub(crate) fn of(&self, name: &str) -> Option<Rail> {
        let named = |name: &str| self.0.iter().find(|(other, _)| other == name);
        let (_, rail) = named(name).or_else(|| named(device_of(name)))?;
        Some(*rail)
    }

    /// Names that match none of these devices.
    pub(crate) fn unmatched<'a>(
        &self,
        devices: impl Iterator<Item = &'a str> + Clone,
    ) -> Vec<&str> {
        let is =
            |name: &str| devices.clone().any(|device| device == name || device_of(device) == name);
        self.0.iter().map(|(name, _)| name.as_str()).filter(|name| !is(name)).collect()
    }
}

/// The device of an RDMA port's name.
fn device_of(name: &str) -> &str {
    name.split_once(':').map_or(name, |(card, _)| card)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rails_apply_to_named_devices() {
        let rails = Rails::parse("eth0=0, mlx5_0=1/2,mlx5_0:2=7").unwrap();
        let rail = |number, plane| Some(Rail { number, plane });
        assert_eq!(rails.of("eth0"), rail(0, None));
        assert_eq!(rails.of("mlx5_0:1"), rail(1, Some(2)));
        assert_eq!(rails.of("mlx5_0:2"), rail(7, None), "the port's own name goes first");
        assert_eq!(rails.of("eth01"), None);
        let devices = ["eth0", "mlx5_0:1"].into_iter();
        assert_eq!(rails.unmatched(devices), ["mlx5_0:2"]);
        assert_eq!(Rails::parse(""), Some(Rails::default()));
    }

    #[test]
    fn invalid_rails_are_refused() {
        for text in ["eth0", "eth0=", "=1", "eth0=-1", "eth0=32768", "eth0=1/", "a=1,a=2", "a=1,"] {
            assert_eq!(Rails::parse(text), None, "{text}");
        }
    }
}
