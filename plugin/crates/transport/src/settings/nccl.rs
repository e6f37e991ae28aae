//! Variables of NCCL's own networks that have no effect here.

use super::Settings;

/// Variables of NCCL's sockets (`net_socket.cc` of NCCL 2.30), and the setting that stands for
/// each. Those of the sockets of NCCL's bootstrap, such as `NCCL_SOCKET_RETRY_CNT`, are NCCL's own
/// whatever the network.
const OF_SOCKETS: [(&str, &str); 4] = [
    ("NCCL_SOCKET_NTHREADS", "EVENKEEL_WORKERS"),
    ("NCCL_NSOCKS_PERTHREAD", "EVENKEEL_FLOWS"),
    ("NCCL_SOCKET_INLINE", "EVENKEEL_INLINE_BYTES"),
    ("NCCL_SOCKET_MIN_TASKSIZE", "EVENKEEL_CHUNK_BYTES"),
];

/// Variables of NCCL's RDMA transport (`net_ib` of NCCL 2.30), and the setting that stands for
/// each, if there is one.
const OF_RDMA: [(&str, &str); 25] = [
    ("NCCL_IB_ADAPTIVE_ROUTING", ""),
    ("NCCL_IB_ADDR_FAMILY", "NCCL_SOCKET_FAMILY"),
    ("NCCL_IB_ADDR_RANGE", "NCCL_IB_GID_INDEX"),
    ("NCCL_IB_AR_THRESHOLD", ""),
    ("NCCL_IB_DATA_DIRECT", ""),
    ("NCCL_IB_DEVICE_PCI_ORDER", ""),
    ("NCCL_IB_ECE_ENABLE", ""),
    ("NCCL_IB_FIFO_TC", "NCCL_IB_TC"),
    ("NCCL_IB_MERGE_NICS", "EVENKEEL_DEVICES"),
    ("NCCL_IB_MERGE_VFS", "EVENKEEL_DEVICES"),
    ("NCCL_IB_MQP_RETRY_ALL", ""),
    ("NCCL_IB_MQP_RETRY_CNT", ""),
    ("NCCL_IB_MQP_RETRY_SLEEP_MSEC", ""),
    ("NCCL_IB_OOO_RQ", ""),
    ("NCCL_IB_PCI_RELAXED_ORDERING", ""),
    ("NCCL_IB_PREPOST_RECEIVE_WORK_REQUESTS", ""),
    ("NCCL_IB_QPS_PER_CONNECTION", "EVENKEEL_QUEUE_PAIRS"),
    ("NCCL_IB_RETRY_CNT", "EVENKEEL_PEER_TIMEOUT"),
    ("NCCL_IB_RETURN_ASYNC_EVENTS", ""),
    ("NCCL_IB_ROCE_VERSION_NUM", "NCCL_IB_GID_INDEX"),
    ("NCCL_IB_ROUTABLE_FLID_GID_INDEX", "NCCL_IB_GID_INDEX"),
    ("NCCL_IB_SPLIT_DATA_ON_QPS", ""),
    ("NCCL_IB_SUBNET_AWARE_ROUTING", "EVENKEEL_RAILS"),
    ("NCCL_IB_TIMEOUT", "EVENKEEL_PEER_TIMEOUT"),
    ("NCCL_IB_USE_INLINE", ""),
];

/// The variables of both tables that are set.
#[derive(Clone, Debug, Default)]
pub(super) struct Unused {
    of_sockets: Vec<(&'static str, &'static str)>,
    of_rdma: Vec<(&'static str, &'static str)>,
    /// RDMA is switched off as in NCCL, and required all the same.
    pub(super) is_rdma_required: bool,
}

impl Unused {
    /// Looks up all variables.
    pub(super) fn read(&mut self, lookup: impl Fn(&str) -> Option<String>) {
        let is_set =
            |(name, _): &(&str, &str)| lookup(name).is_some_and(|value| !value.trim().is_empty());
        self.of_sockets = OF_SOCKETS.into_iter().filter(is_set).collect();
        self.of_rdma = OF_RDMA.into_iter().filter(is_set).collect();
    }
}

impl Settings {
    /// One line of what NCCL's own network in place of this one would obey: RDMA or sockets.
    pub(crate) fn unused_line(&self, is_rdma: bool) -> Option<String> {
        let set = if is_rdma { &self.unused.of_rdma } else { &self.unused.of_sockets };
        let mut named: Vec<String> = set
            .iter()
            .map(|(name, instead)| match *instead {
                "" => (*name).to_owned(),
                instead => format!("{name} (here {instead})"),
            })
            .collect();
        if self.unused.is_rdma_required {
            named.push("NCCL_IB_DISABLE (EVENKEEL_TRANSPORT=rdma)".to_owned());
        }
        let names = named.join(", ");
        (!named.is_empty()).then(|| {
            format!("evenkeel: no effect here, since they are of NCCL's own networks: {names}")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(set: &[(&str, &str)], is_rdma: bool) -> Option<String> {
        let lookup = |name: &str| {
            let found = set.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        Settings::from_lookup(lookup).unwrap().unused_line(is_rdma)
    }

    #[test]
    fn variables_of_nccls_networks_without_effect_are_named() {
        let set = [
            ("NCCL_SOCKET_NTHREADS", "4"),
            ("NCCL_NSOCKS_PERTHREAD", ""),
            ("NCCL_IB_TIMEOUT", "22"),
            ("NCCL_IB_USE_INLINE", "1"),
            ("NCCL_IB_TC", "106"),
            ("NCCL_CROSS_NIC", "1"),
        ];
        let of = |is_rdma| {
            let line = line(&set, is_rdma).unwrap();
            line.split_once("networks: ").unwrap().1.to_owned()
        };
        assert_eq!(of(false), "NCCL_SOCKET_NTHREADS (here EVENKEEL_WORKERS)");
        assert_eq!(of(true), "NCCL_IB_TIMEOUT (here EVENKEEL_PEER_TIMEOUT), NCCL_IB_USE_INLINE");
        assert_eq!(line(&set[4..], true), None);
        let both = [("EVENKEEL_TRANSPORT", "rdma"), ("NCCL_IB_DISABLE", "1")];
        assert!(line(&both, true).unwrap().ends_with("NCCL_IB_DISABLE (EVENKEEL_TRANSPORT=rdma)"));
    }
}
