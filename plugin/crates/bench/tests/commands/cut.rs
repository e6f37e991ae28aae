//! A rank behind a cut link.

use crate::hosts::{Host, end_ranks, start_ranks};
use crate::process::{Running, bench, is_row};

fn two_hosts() -> (Host, Host) {
    let (near, far) = (Host::new(), Host::new());
    near.cable("near0", &far, "far0");
    near.run("ip addr add 10.9.0.1/24 dev near0");
    far.run("ip addr add 10.9.0.2/24 dev far0");
    (near, far)
}

#[test]
fn cut_link_rank_is_named_by_every_other() {
    let (near, far) = two_hosts();
    let folder = std::env::temp_dir().join(format!("evenkeel-cut-{}", std::process::id()));
    let mut ranks: Vec<Running> = (0..4)
        .map(|rank: usize| {
            let (host, device) = if rank == 2 { (&far, "far0") } else { (&near, "near0") };
            host.start(&bench(&format!(
                "collective --size 4 --rank {rank} --timeout 8 --tcp-device {device} \
                 --elements 1000,1000 --no-verify --iteration-time 60s --shared-path {} allreduce_ring",
                folder.display()
            )))
        })
        .collect();
    ranks[0].line(|line| line.starts_with('#'));
    far.run("ip link set far0 down");
    let behind = ranks.remove(2);
    for (rank, other) in ranks.into_iter().enumerate() {
        let ended = other.end();
        let named = ended.err.contains("rank 2 (") && ended.err.contains("cannot be reached");
        assert!(!ended.status.success() && named, "rank {rank} says {}", ended.err);
    }
    drop((behind, near, far));
    std::fs::remove_dir_all(folder).unwrap();
}

/// What a rank has sent is on its way, so that the kernel probes nothing, and nobody waits for the
/// network to be measured.
#[test]
fn ranks_cut_off_from_rank_0_end() {
    let (near, far) = two_hosts();
    let endless = "allreduce -b 8 -e 8 -n 1 -N 0 --timeout 3600";
    let mut ranks = start_ranks([&near, &far], "10.9.0.1", endless, &[]);
    ranks[0].line(is_row);
    for host in [&near, &far] {
        host.run(
            "nft add table ip cut
             nft add chain ip cut in '{ type filter hook input priority 0; }'
             nft add rule ip cut in tcp dport 29500 drop
             nft add rule ip cut in tcp sport 29500 drop",
        );
    }
    for (ended, other) in end_ranks(ranks).into_iter().zip(["rank 1 (", "rank 0 ("]) {
        ended.failed(other);
        ended.failed("cannot be reached");
    }
}
