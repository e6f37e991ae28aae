//! Filters of interface and RDMA port names, as NCCL writes them.

/// NCCL_SOCKET_IFNAME, and NCCL_IB_HCA, which has the same form but for ports.
pub(crate) struct NameFilter<'a> {
    pub(crate) exclude: bool,
    exact: bool,
    /// Names, and for RDMA devices the port.
    names: Vec<(&'a str, Option<u8>)>,
}

impl<'a> NameFilter<'a> {
    /// Whether the text is a filter: `^` and `=` stand before the first name, in this order, and
    /// nowhere else.
    pub(crate) fn is_valid(text: &str) -> bool {
        let names = text.strip_prefix('^').unwrap_or(text);
        !names.strip_prefix('=').unwrap_or(names).contains(['^', '='])
    }

    pub(crate) fn parse(text: &'a str) -> Self {
        let (exclude, text) = text.strip_prefix('^').map_or((false, text), |rest| (true, rest));
        let (exact, text) = text.strip_prefix('=').map_or((false, text), |rest| (true, rest));
        let names = text
            .split(',')
            .map(|name| {
                let (name, port) = name.split_once(':').unwrap_or((name, ""));
                (name.trim(), port.trim().parse().ok())
            })
            .filter(|(name, _)| !name.is_empty())
            .collect();
        Self { exclude, exact, names }
    }

    /// Whether an interface matches. NCCL allows ports after interface names and ignores them.
    pub(crate) fn matches(&self, name: &str) -> bool {
        self.names.iter().any(|(wanted, _)| self.is(name, wanted)) != self.exclude
    }

    /// Whether an interface is wanted by its whole name, with `=` or without.
    pub(crate) fn names_whole(&self, name: &str) -> bool {
        !self.exclude && self.names.iter().any(|(wanted, _)| *wanted == name)
    }

    /// Whether a port of an RDMA device matches.
    pub(crate) fn matches_port(&self, name: &str, port: u8) -> bool {
        let is = |wanted: &Option<u8>| wanted.is_none_or(|wanted| wanted == port);
        let named = self.names.iter().any(|(wanted, of)| self.is(name, wanted) && is(of));
        named != self.exclude
    }

    fn is(&self, name: &str, wanted: &str) -> bool {
        if self.exact { name == wanted } else { name.starts_with(wanted) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signs_stand_before_the_first_name_only() {
        for right in ["", "eth", "=eth0", "^lo", "^=eth0,eth1", "eth0, eth1", "mlx5_0:1,mlx5_1"] {
            assert!(NameFilter::is_valid(right), "{right}");
        }
        for wrong in ["eth0,^lo", "=^eth0", "^^lo", "==eth0", "^=eth0,=eth1"] {
            assert!(!NameFilter::is_valid(wrong), "{wrong}");
        }
    }

    #[test]
    fn rdma_port_filter_matches_device_and_port() {
        let meant = |text: &str, name: &str, port| NameFilter::parse(text).matches_port(name, port);
        assert!(meant("mlx5", "mlx5_1", 2));
        assert!(meant("=mlx5_0,mlx5_1:2", "mlx5_1", 2));
        assert!(!meant("=mlx5_0,mlx5_1:2", "mlx5_1", 1));
        assert!(!meant("=mlx5_1", "mlx5_10", 1));
        assert!(!meant("^mlx5_1:2", "mlx5_1", 2) && meant("^mlx5_1:2", "mlx5_1", 1));
    }
}
