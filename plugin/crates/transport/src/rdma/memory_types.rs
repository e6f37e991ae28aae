//! The types of memory in which messages may be: host memory, and GPU memory where a device
//! supports it.

use std::path::Path;
use std::sync::Arc;

use evenkeel_verbs::{Context, MemoryRegion};

use crate::settings::TransportMode;

/// Files under /sys that show a GPU driver's peer memory module: NVIDIA's, and its predecessors.
const PEER_MEMORY: [&str; 3] = [
    "module/nvidia_peermem/version",
    "kernel/mm/memory_peers/nv_mem/version",
    "kernel/mm/memory_peers/nv_mem_nc/version",
];

/// The memory in which messages may be, besides the host's: GPU memory that the network device
/// reads and writes itself.
///
/// The processor cannot access such memory, so a connection that may use it copies no message. Its
/// sender sends nothing before the receiver has posted a buffer, and each buffer's tag is
/// advertised, from the first on. This applies to both ends as soon as one of them asks for such
/// memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryTypes {
    /// GPU memory that is registered by its address (`NCCL_PTR_CUDA`).
    pub peer_memory: bool,
    /// Memory that is registered by a DMA-BUF descriptor (`NCCL_PTR_DMABUF`).
    pub dma_buffers: bool,
}

impl MemoryTypes {
    /// Host memory only.
    pub const HOST: Self = Self { peer_memory: false, dma_buffers: false };

    /// What a device supports.
    pub(super) fn supported_by(context: &Arc<Context>) -> Self {
        Self {
            peer_memory: has_peer_memory(Path::new("/sys")),
            dma_buffers: MemoryRegion::supports_dma_buffers(context),
        }
    }

    /// What of it is offered, or why only host memory is.
    ///
    /// The caller has to know a device's memory types before there are connections. If TCP may turn
    /// out to carry one of them, only host memory can be offered. `host_memory_only` is another
    /// reason of the transport's owner.
    pub(crate) fn offered(
        self,
        mode: TransportMode,
        host_memory_only: Option<&str>,
    ) -> Result<Self, &str> {
        match (host_memory_only, mode) {
            (Some(reason), _) => Err(reason),
            (None, TransportMode::Auto | TransportMode::Tcp) => {
                Err("TCP may carry messages, unless EVENKEEL_TRANSPORT=rdma")
            }
            (None, TransportMode::Rdma) => Ok(self),
        }
    }

    /// What both support.
    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            peer_memory: self.peer_memory && other.peer_memory,
            dma_buffers: self.dma_buffers && other.dma_buffers,
        }
    }

    /// Whether it is host memory only.
    pub fn is_host_only(self) -> bool {
        self == Self::HOST
    }

    /// The types besides host memory, for logs.
    pub(crate) fn names(self) -> String {
        let all = [(self.peer_memory, "peer memory"), (self.dma_buffers, "DMA-BUF")];
        let names: Vec<_> = all.iter().filter(|(is, _)| *is).map(|(_, name)| *name).collect();
        names.join(" and ")
    }
}

/// The warning that `auto` does without the GPU memory that these ports support; `None` if none
/// supports any.
pub(super) fn warn_of_auto<'a>(
    ports: impl Iterator<Item = (&'a str, MemoryTypes)>,
) -> Option<String> {
    let able: Vec<String> = ports
        .filter(|(_, supported)| !supported.is_host_only())
        .map(|(name, supported)| format!("{name} ({})", supported.names()))
        .collect();
    (!able.is_empty()).then(|| {
        format!(
            "evenkeel: EVENKEEL_TRANSPORT=auto does without GPUDirect RDMA, which {} could do: messages are copied through host memory, because TCP may carry some; if all ranks have RDMA, set EVENKEEL_TRANSPORT=rdma",
            able.join(", ")
        )
    })
}

fn has_peer_memory(sys: &Path) -> bool {
    PEER_MEMORY.iter().any(|file| sys.join(file).exists())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn peer_memory_module_is_found() {
        let folder = format!("evenkeel-memory-types-{}", std::process::id());
        let sys = std::env::temp_dir().join(folder);
        for file in PEER_MEMORY {
            let file = sys.join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            assert!(!has_peer_memory(&sys), "{}: a folder is no module", file.display());
            fs::write(&file, "1.0").unwrap();
            assert!(has_peer_memory(&sys), "{}", file.display());
            fs::remove_dir_all(&sys).unwrap();
        }
        assert!(!has_peer_memory(&sys));
    }

    #[test]
    fn warning_of_auto_names_the_ports_and_the_setting() {
        let dma_buffers = MemoryTypes { peer_memory: false, dma_buffers: true };
        let both = MemoryTypes { peer_memory: true, dma_buffers: true };
        let host = MemoryTypes::HOST;
        let warning = |ports: &[_]| warn_of_auto(ports.iter().copied());
        assert_eq!(warning(&[("rxe0:1", host)]), None);
        let line = warning(&[("mlx5_0:1", both), ("rxe0:1", host), ("mlx5_1:1", dma_buffers)]);
        let line = line.unwrap();
        assert!(line.contains("mlx5_0:1 (peer memory and DMA-BUF), mlx5_1:1 (DMA-BUF)"), "{line}");
        assert!(line.ends_with("set EVENKEEL_TRANSPORT=rdma") && !line.contains('\n'), "{line}");
        assert!(!line.contains("rxe0"), "{line}");
    }

    #[test]
    fn host_memory_only_with_tcp_or_a_reason() {
        for peer_memory in [false, true] {
            for dma_buffers in [false, true] {
                let types = MemoryTypes { peer_memory, dma_buffers };
                assert_eq!(types.offered(TransportMode::Rdma, None), Ok(types));
                assert_eq!(types.offered(TransportMode::Rdma, Some("a reason")), Err("a reason"));
                for mode in [TransportMode::Auto, TransportMode::Tcp] {
                    assert!(types.offered(mode, None).unwrap_err().contains("TCP"));
                    assert_eq!(types.offered(mode, Some("a reason")), Err("a reason"));
                }
                assert_eq!(types.is_host_only(), !peer_memory && !dma_buffers);
                assert_eq!(types.names().contains("peer memory"), peer_memory);
                assert_eq!(types.names().contains("DMA-BUF"), dma_buffers);
            }
        }
    }
}
