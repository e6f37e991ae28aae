//! Which memory messages may be in.

use std::path::Path;
use std::sync::Arc;

use evenkeel_verbs::{Context, MemoryRegion};

use crate::settings::Carrier;

/// What shows that a GPU's driver lends its memory to RDMA devices: NVIDIA's module, and those that came before it.
const PEER_MEMORY: [&str; 3] = [
    "module/nvidia_peermem/version",
    "kernel/mm/memory_peers/nv_mem/version",
    "kernel/mm/memory_peers/nv_mem_nc/version",
];

/// The memory beside the host's in which messages may be: a GPU's, where its device reads and writes it.
///
/// The processor cannot. So a connection that is opened for such memory copies nothing, whatever a message is: its sender
/// takes none before the receiver has posted a buffer, and tags are told with buffers from the first one on. For both sides
/// that is so as soon as one of them wants it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryTypes {
    /// Memory that is registered by its address, which the GPU's driver knows.
    pub peer_memory: bool,
    /// Memory that DMA buffers stand for.
    pub dma_buffers: bool,
}

impl MemoryTypes {
    /// The host's memory, and no other.
    pub const HOST: Self = Self { peer_memory: false, dma_buffers: false };

    /// What a device can reach.
    pub(super) fn of(context: &Arc<Context>) -> Self {
        Self {
            peer_memory: has_peer_memory(Path::new("/sys")),
            dma_buffers: MemoryRegion::can_be_of_dma_buffers(context),
        }
    }

    /// That of it which may be offered, or why none may. Who asks for memory is told before there are connections; where one
    /// of those may turn out to be carried by TCP, it has to be the host's. So it has to be with reduction servers, which use
    /// no other: NCCL takes what is said of a device for both of its uses.
    pub(crate) fn offered(self, carrier: Carrier, has_servers: bool) -> Result<Self, &'static str> {
        match carrier {
            Carrier::Auto | Carrier::Tcp => {
                Err("since TCP may carry them; EVENKEEL_TRANSPORT=rdma allows")
            }
            Carrier::Rdma if has_servers => Err(
                "where those of reduction servers have to be; a job without EVENKEEL_REDUCTION_SERVERS allows",
            ),
            Carrier::Rdma => Ok(self),
        }
    }

    /// Whether that is the host's memory only.
    pub fn is_host(self) -> bool {
        self == Self::HOST
    }

    /// What it is beside the host's, for people.
    pub(crate) fn names(self) -> String {
        let all = [(self.peer_memory, "peer memory"), (self.dma_buffers, "DMA-BUF")];
        let names: Vec<_> = all.iter().filter(|(is, _)| *is).map(|(_, name)| *name).collect();
        names.join(" and ")
    }
}

fn has_peer_memory(sys: &Path) -> bool {
    PEER_MEMORY.iter().any(|file| sys.join(file).exists())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_module_that_lends_memory_is_seen() {
        let sys = std::env::temp_dir().join(format!("evenkeel-reach-{}", std::process::id()));
        for file in PEER_MEMORY {
            let file = sys.join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            assert!(!has_peer_memory(&sys), "{}: a folder is none", file.display());
            fs::write(&file, "1.0").unwrap();
            assert!(has_peer_memory(&sys), "{}", file.display());
            fs::remove_dir_all(&sys).unwrap();
        }
        assert!(!has_peer_memory(&sys));
    }

    #[test]
    fn with_tcp_or_reduction_servers_messages_are_in_host_memory() {
        for peer_memory in [false, true] {
            for dma_buffers in [false, true] {
                let reach = MemoryTypes { peer_memory, dma_buffers };
                assert_eq!(reach.offered(Carrier::Rdma, false), Ok(reach));
                let with_servers = reach.offered(Carrier::Rdma, true).unwrap_err();
                assert!(with_servers.contains("reduction servers"), "{with_servers}");
                for carrier in [Carrier::Auto, Carrier::Tcp] {
                    assert!(reach.offered(carrier, false).unwrap_err().contains("TCP"));
                }
                assert_eq!(reach.is_host(), !peer_memory && !dma_buffers);
                assert_eq!(reach.names().contains("peer memory"), peer_memory);
                assert_eq!(reach.names().contains("DMA-BUF"), dma_buffers);
            }
        }
    }
}
