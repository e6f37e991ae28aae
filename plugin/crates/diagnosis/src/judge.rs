//! Finds what a job's waits come from: a pure function of what all processes saw in the same
//! window.

use crate::found::{Found, MIN_SHARE};
use crate::job::Job;
use crate::late::late;
use crate::slow::slow;
use crate::verdict::{Class, Outcome, Suspect, Verdict};
use crate::waits::Waits;

/// Maximum number of suspects in a verdict.
pub(crate) const MAX_SUSPECTS: usize = 2;
/// Minimum share of ranks that must have reported before anybody is named.
const MIN_KNOWN: f64 = 0.5;

/// Finds what the waits of a job come from. Takes time linear in the members and their connections.
pub fn judge(job: &Job) -> Verdict {
    let ranks = job.ranks();
    let count = ranks.iter().filter(|is_rank| **is_rank).count();
    let mut verdict = Verdict { ranks: count as u32, window_s: job.window, ..Verdict::default() };
    let waits = Waits::new(job, ranks);
    let lost = waits.lost();
    let late = late(job, &waits);
    let is_late = {
        let mut is_late = vec![false; job.members.len()];
        late.iter().for_each(|found| is_late[found.holds[0]] = true);
        is_late
    };
    let mut found = late;
    found.extend(slow(job, &is_late));
    found.sort_by(|a, b| b.suspect.share.total_cmp(&a.suspect.share));
    // The worst suspect makes others look slow too, so a second one must stand out as clearly.
    let worst = found.first().map_or(0.0, |found| found.suspect.share);
    found.retain(|Found { suspect, .. }| suspect.share >= worst / 3.0 && suspect.confidence >= 0.5);
    found.truncate(MAX_SUSPECTS);
    let suspects: Vec<Suspect> = found
        .into_iter()
        .map(|found| {
            let is_itself = found.is_member && waits.ranks[found.holds[0]];
            let waiting = waits.held_by(&found.holds) - u32::from(is_itself);
            Suspect { waiting, ..found.suspect }
        })
        .collect();
    let of_ranks = job.members.iter().zip(&waits.ranks).filter(|(_, is_rank)| **is_rank);
    let known = of_ranks.filter(|(member, _)| member.silent_for.is_none()).count();
    let is_known = known as f64 >= MIN_KNOWN * count as f64 && count >= 2;
    if lost < MIN_SHARE {
        verdict.text = format!("ranks wait for {:.0} % of the time", 100.0 * lost);
    } else if !is_known {
        verdict.outcome = Outcome::Unknown;
        verdict.text = format!(
            "ranks wait for {:.0} % of the time; {known} of {count} ranks say what for, which is too few to name anybody",
            100.0 * lost
        );
    } else if let Some(first) = suspects.first() {
        verdict.outcome = Outcome::Suspect;
        verdict.text = sentence(first, count);
        verdict.suspects = suspects;
    } else {
        verdict.outcome = Outcome::Nobody;
        verdict.text = format!(
            "ranks wait for {:.0} % of the time, and nobody more than the others: all are equally slow",
            100.0 * lost
        );
    }
    verdict
}

/// As in `7 of 8 ranks wait for rank 5 on n3, which has not called for 41 s`.
pub(crate) fn sentence(suspect: &Suspect, ranks: usize) -> String {
    let Suspect { class, waiting, evidence, share, .. } = suspect;
    let words = suspect.words();
    match class {
        Class::Late => format!("{waiting} of {ranks} ranks wait for {words}, which {evidence}"),
        Class::Link | Class::Path => {
            let card = if suspect.or_card { ", or one of these cards" } else { "" };
            let share = 100.0 * share;
            format!(
                "{waiting} of {ranks} ranks wait for {share:.0} % of the time for {words}{card}: {evidence}"
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{Link, Member};
    use crate::verdict::Direction;
    use crate::view::Process;

    /// An all-to-all of four hosts. `retransmits` gives each connection's retransmitted segments
    /// per second. Bytes take 1.1 times as long on connections that retransmit more than one.
    fn job(retransmits: impl Fn(usize, usize) -> f64) -> Job {
        let members = (0..4).map(|rank| Member {
            process: Process { rank: Some(rank), host: format!("n{rank}"), ..Process::default() },
            ..Member::default()
        });
        let pairs = (0..4_usize).flat_map(|from| (0..4).map(move |to| (from, to)));
        let links = pairs.filter(|(from, to)| from != to).map(|(from, to)| Link {
            from: Some(from),
            to: Some(to),
            from_device: "eth0".to_owned(),
            to_device: "eth0".to_owned(),
            pending: 0.6,
            wanted: 0.6,
            rate: if retransmits(from, to) > 1.0 { 1.8e6 } else { 2e6 },
            round_trip: 0.005,
            retransmits: retransmits(from, to),
            ..Link::default()
        });
        Job { window: 8.0, members: members.collect(), links: links.collect() }
    }

    #[test]
    fn card_that_loses_packets_is_named() {
        let sends = judge(&job(|from, _| if from == 2 { 12.6 } else { 0.1 }));
        assert_eq!(sends.suspects.len(), 1, "{}", sends.text);
        let suspect = &sends.suspects[0];
        assert_eq!((suspect.class, suspect.place.host.as_str()), (Class::Link, "n2"));
        assert_eq!(suspect.direction, Some(Direction::Send));
        assert!(sends.text.contains("1.0 % of the packets are lost"), "{}", sends.text);
        let receives = judge(&job(|_, to| if to == 1 { 12.6 } else { 0.1 }));
        let suspect = &receives.suspects[0];
        assert_eq!((suspect.class, suspect.place.host.as_str()), (Class::Link, "n1"));
        assert_eq!(suspect.direction, Some(Direction::Receive));
        assert!(suspect.may_pass, "losses alone may pass");
        assert!(receives.text.starts_with("3 of 4 ranks wait"), "{}", receives.text);
    }

    #[test]
    fn losses_everywhere_and_by_chance_name_nobody() {
        for retransmits in [14.0, 0.5] {
            let verdict =
                judge(&job(|from, _| if from == 2 { retransmits * 1.5 } else { retransmits }));
            assert!(verdict.suspects.is_empty(), "{}", verdict.text);
        }
        assert!(judge(&job(|from, _| if from == 2 { 0.9 } else { 0.0 })).suspects.is_empty());
    }

    /// As in a broadcast, where the first one fills its queue.
    #[test]
    fn losses_and_round_trips_that_cost_nothing_name_nobody() {
        let change = |change: &dyn Fn(&mut Link)| {
            let mut job = job(|_, _| 0.1);
            job.links.iter_mut().filter(|link| link.from == Some(2)).for_each(change);
            judge(&job)
        };
        for (slower, named) in [(1.0, false), (1.1, false), (1.3, true)] {
            let verdict = change(&|link: &mut Link| {
                link.round_trip = 0.050;
                link.rate /= slower;
            });
            assert_eq!(!verdict.suspects.is_empty(), named, "{slower}: {}", verdict.text);
        }
        for (slower, named) in [(1.0, false), (1.1, true)] {
            let verdict = change(&|link: &mut Link| {
                link.retransmits = 14.0;
                link.rate /= slower;
            });
            assert_eq!(!verdict.suspects.is_empty(), named, "{slower}: {}", verdict.text);
        }
    }

    /// A broadcast along a chain of eight hosts whose cards are equally fast: the first ones are
    /// ahead, and their bytes lie with receivers that have not asked for them yet. The shares are
    /// as measured in one, but for what each `change` of a link makes.
    fn chain(change: impl Fn(usize, &mut Link)) -> Job {
        let members = (0..8).map(|rank| Member {
            process: Process { rank: Some(rank), host: format!("n{rank}"), ..Process::default() },
            ..Member::default()
        });
        let links = [0.57, 0.37, 0.48, 0.58, 0.95, 0.22, 0.0].into_iter().enumerate();
        let links = links.map(|(from, unposted)| {
            let mut link = Link {
                from: Some(from),
                to: Some(from + 1),
                from_device: "eth0".to_owned(),
                to_device: "eth0".to_owned(),
                pending: if from == 6 { 0.88 } else { 0.95 },
                wanted: 1.0 - unposted,
                unposted,
                unacknowledged: 0.88,
                rate: 4.35e6,
                round_trip: 0.008,
                ..Link::default()
            };
            change(from, &mut link);
            link
        });
        // All are connected with all.
        let pairs = (0..8).flat_map(|from| (0..8).map(move |to| (from, to)));
        let idle = pairs.filter(|(from, to)| from != to && *to != from + 1).map(|(from, to)| {
            Link { from: Some(from), to: Some(to), wanted: 1.0, ..Link::default() }
        });
        Job { window: 8.0, members: members.collect(), links: links.chain(idle).collect() }
    }

    #[test]
    fn chain_whose_receivers_are_behind_names_nobody() {
        let verdict = judge(&chain(|_, _| ()));
        assert!(verdict.suspects.is_empty(), "{}", verdict.text);
        let losses = |from: usize, link: &mut Link| {
            link.retransmits = [17.9, 11.7, 18.1, 8.4, 15.3, 9.1, 0.0][from];
            link.unacknowledged *= if from % 2 == 1 { 1.1 } else { 1.0 };
        };
        let verdict = judge(&chain(losses));
        assert!(verdict.suspects.is_empty(), "{}", verdict.text);
    }

    #[test]
    fn slow_path_of_a_chain_is_named() {
        for slow in 0..7 {
            // All carry what the slow one does. Behind it nobody has anything to send; before it,
            // all bytes lie with receivers.
            let verdict = judge(&chain(|from, link| {
                (link.rate, link.unacknowledged) = (1.1e6, 0.22);
                (link.pending, link.wanted, link.unposted) = match from {
                    from if from < slow => (0.99, 0.05, 0.95),
                    from if from > slow => (0.22, 1.0, 0.0),
                    _ => (0.98, 1.0, 0.0),
                };
                if from == slow {
                    link.unacknowledged = 0.98;
                }
            }));
            let suspect = &verdict.suspects[0];
            assert_eq!(suspect.class, Class::Path, "{}", verdict.text);
            assert_eq!(suspect.place.host, format!("n{slow}"), "{}", verdict.text);
            // Those before it for their receivers, and those behind it for their senders.
            assert_eq!(suspect.waiting, 8, "{}", verdict.text);
        }
    }

    /// Two ranks, and reduction servers, which always have a buffer posted for whatever comes.
    #[test]
    fn servers_that_are_always_ready_wait_for_nobody_who_computes() {
        let job = |uncalled: [f64; 2], uncalled_for: [f64; 2], waits: [f64; 2]| {
            let process = |rank: Option<u32>, at: usize| Process {
                rank,
                host: format!("n{at}"),
                ..Process::default()
            };
            let ranks = (0..2).map(|at| Member {
                process: process(Some(at as u32), at),
                uncalled: uncalled[at],
                usual_excess: Some(0.0),
                uncalled_for: uncalled_for[at],
                ..Member::default()
            });
            let servers =
                (2..5).map(|at| Member { process: process(None, at), ..Member::default() });
            let pairs = (0..2_usize).flat_map(|rank| (2..5).map(move |server| (rank, server)));
            let links = pairs.flat_map(|(rank, server)| {
                let link = |from, to| Link {
                    from: Some(from),
                    to: Some(to),
                    rate: 1e6,
                    ..Link::default()
                };
                [
                    Link { wanted: 1.0, ..link(rank, server) },
                    Link { wanted: waits[rank], ..link(server, rank) },
                ]
            });
            judge(&Job {
                window: 8.0,
                members: ranks.chain(servers).collect(),
                links: links.collect(),
            })
        };
        let both_compute = job([1.0, 1.0], [6.0, 6.0], [0.0, 0.0]);
        assert!(both_compute.suspects.is_empty(), "{}", both_compute.text);
        let one_is_late = job([0.1, 0.6], [0.0, 1.0], [0.6, 0.1]);
        assert_eq!(one_is_late.suspects[0].place.rank, Some(1), "{}", one_is_late.text);
        assert!(
            one_is_late.text.starts_with("1 of 2 ranks wait for rank 1"),
            "{}",
            one_is_late.text
        );
    }

    /// A ring of many hosts with some neighbours more, of which each tenth path is slow and each
    /// tenth rank is late.
    fn large(ranks: usize) -> Job {
        let members = (0..ranks).map(|rank| Member {
            process: Process {
                rank: Some(rank as u32),
                host: format!("n{rank}"),
                ..Process::default()
            },
            uncalled: if rank % 10 == 5 { 0.5 } else { 0.1 },
            usual_excess: Some(0.0),
            ..Member::default()
        });
        let pairs =
            (0..ranks).flat_map(|from| (1..12).map(move |step| (from, (from + step) % ranks)));
        let links = pairs.map(|(from, to)| Link {
            from: Some(from),
            to: Some(to),
            from_device: "eth0".to_owned(),
            to_device: "eth0".to_owned(),
            pending: 0.6,
            wanted: 0.9,
            rate: if from % 10 == 1 && to == from + 1 { 1e6 } else { 4e6 },
            ..Link::default()
        });
        Job { window: 8.0, members: members.collect(), links: links.collect() }
    }

    #[test]
    fn time_of_a_judgement_grows_with_the_job_and_not_with_its_square() {
        let time = |ranks: usize| {
            let job = large(ranks);
            let once = || {
                let begin = std::time::Instant::now();
                assert_eq!(judge(&job).suspects.len(), MAX_SUSPECTS);
                begin.elapsed().as_secs_f64()
            };
            (0..3).map(|_| once()).fold(f64::INFINITY, f64::min)
        };
        let ratio = time(8000) / time(1000);
        println!("8 times the ranks take {ratio:.1} times as long");
        assert!(ratio < 24.0, "{ratio:.1}");
    }

    #[test]
    fn card_whose_connections_are_slow_to_different_degrees_is_named() {
        let slower = |times: [f64; 3]| {
            let mut job = job(|_, _| 0.1);
            let links = job.links.iter_mut().filter(|link| link.from == Some(2));
            links.zip(times).for_each(|(link, times)| link.rate /= times);
            judge(&job)
        };
        let card = slower([1.3, 2.1, 1.7]);
        assert_eq!(card.suspects[0].class, Class::Link, "{}", card.text);
        assert_eq!(card.suspects[0].place.host, "n2", "{}", card.text);
        let path = slower([1.0, 2.1, 1.0]);
        assert_eq!(path.suspects[0].class, Class::Path, "{}", path.text);
        // A path elsewhere is slow, and its ends hold this card's connections up.
        let mut elsewhere = job(|_, _| 0.1);
        for link in &mut elsewhere.links {
            match (link.from, link.to) {
                (Some(0), Some(3)) => link.rate /= 4.0,
                (Some(2), _) => link.rate /= 1.4,
                _ => {}
            }
        }
        let elsewhere = judge(&elsewhere);
        assert_eq!(elsewhere.suspects.len(), 1, "{}", elsewhere.text);
        assert_eq!(elsewhere.suspects[0].class, Class::Path, "{}", elsewhere.text);
        assert_eq!(elsewhere.suspects[0].place.host, "n0", "{}", elsewhere.text);
        let nobody = slower([1.2, 1.2, 1.2]);
        assert!(nobody.suspects.is_empty(), "{}", nobody.text);
    }

    /// A ring of eight, beside which seven send to one for a second, as for a checkpoint: they
    /// share its card.
    #[test]
    fn gather_beside_a_ring_names_nobody() {
        let mut job = chain(|_, link| {
            (link.pending, link.wanted, link.unposted, link.unacknowledged) = (0.6, 0.6, 0.0, 0.6);
            link.rate = 3e6;
        });
        job.links.retain(|link| link.rate > 0.0);
        let like = job.links[0].clone();
        job.links.push(Link { from: Some(7), to: Some(0), ..like.clone() });
        job.links.extend((1..8).map(|from| Link {
            from: Some(from),
            to: Some(0),
            pending: 0.125,
            wanted: 0.125,
            unacknowledged: 0.125,
            rate: 5e6 * 0.125 / 7.0,
            ..like.clone()
        }));
        let verdict = judge(&job);
        assert!(verdict.suspects.is_empty(), "{}", verdict.text);
        // If its card is slow, all that it receives takes four times as long.
        for link in job.links.iter_mut().filter(|link| link.to == Some(0)) {
            let longer = (4.0 * link.wanted).min(0.96);
            link.rate *= longer / (4.0 * link.wanted);
            (link.pending, link.wanted, link.unacknowledged) = (longer, longer, longer);
        }
        let verdict = judge(&job);
        assert_eq!(verdict.suspects[0].place.host, "n0", "{}", verdict.text);
    }

    /// Seven send to one, again and again, with the shares of the time in which bytes of each are
    /// under way, and the bytes of each a second.
    fn gather(connections: [(f64, f64); 7]) -> Job {
        let mut job = chain(|_, _| ());
        let links = connections.into_iter().enumerate().map(|(at, (under_way, rate))| Link {
            from: Some(at + 1),
            to: Some(0),
            from_device: "eth0".to_owned(),
            to_device: "eth0".to_owned(),
            pending: under_way,
            wanted: 0.98,
            unacknowledged: under_way,
            rate,
            round_trip: 0.04,
            ..Link::default()
        });
        job.links = links.collect();
        job
    }

    #[test]
    fn uneven_shares_of_the_card_that_all_send_to_are_no_paths_fault() {
        let card = 5e6;
        let equal = [(0.98, card / 7.0); 7];
        let one_after_the_other = std::array::from_fn(|at| ((at + 1) as f64 / 7.0, card / 7.0));
        // As TCP shared a card of 40 Mbit/s out to a gather of 2 MB from each.
        let shared_out = [
            (0.64, 721e3),
            (0.99, 737e3),
            (0.98, 886e3),
            (0.24, 615e3),
            (0.59, 564e3),
            (0.25, 616e3),
            (0.79, 800e3),
        ];
        // The last one has to find its rate again when the others have ended.
        let mut last_is_slow = [(0.3, card / 14.0); 7];
        last_is_slow[4] = (0.98, card / 14.0);
        for connections in [equal, one_after_the_other, shared_out, last_is_slow] {
            let verdict = judge(&gather(connections));
            assert!(verdict.suspects.is_empty(), "{}", verdict.text);
        }
        // A path of a fiftieth of the card's rate holds all others up.
        let rate = card / 50.0;
        let mut connections = [(6.0 / 50.0, rate); 7];
        connections[2] = (0.98, rate);
        let verdict = judge(&gather(connections));
        assert_eq!(verdict.suspects[0].class, Class::Path, "{}", verdict.text);
        assert_eq!(verdict.suspects[0].place.host, "n3", "{}", verdict.text);
    }

    /// Eight ranks, each of which sends as many bytes to two servers and gets as many back. A
    /// server's card carries four times as much as a rank's.
    fn with_servers(change: impl Fn(usize, &mut Link)) -> Job {
        let mut job = chain(|_, _| ());
        let server = |at: usize| Process { host: format!("s{at}"), ..Process::default() };
        job.members.extend((0..2).map(|at| Member { process: server(at), ..Member::default() }));
        let pairs = (0..8).flat_map(|rank| [(rank, 8), (rank, 9), (8, rank), (9, rank)]);
        let links = pairs.map(|(from, to)| {
            let mut link = Link {
                from: Some(from),
                to: Some(to),
                from_device: "eth0".to_owned(),
                to_device: "eth0".to_owned(),
                pending: 0.4,
                wanted: 1.0,
                unacknowledged: 0.4,
                rate: 1e6,
                round_trip: 0.001,
                ..Link::default()
            };
            change(from.min(to), &mut link);
            link
        });
        job.links = links.collect();
        job
    }

    #[test]
    fn slow_card_of_a_rank_with_reduction_servers_is_named() {
        let verdict = judge(&with_servers(|_, _| ()));
        assert!(verdict.suspects.is_empty(), "{}", verdict.text);
        // Bytes of all others are under way for the same time, but all wait for the slow one's.
        for times in [2.0, 4.0, 10.0] {
            let verdict = judge(&with_servers(|rank, link| {
                let share = if rank == 3 { 0.98 } else { 0.98 / times };
                (link.pending, link.unacknowledged) = (share, share);
            }));
            let suspect = verdict
                .suspects
                .first()
                .map(|suspect| (suspect.class, suspect.place.host.as_str()));
            assert_eq!(suspect, Some((Class::Link, "n3")), "{times}: {}", verdict.text);
        }
        // One path, to one of the servers, may be slow for the server's sake.
        let verdict = judge(&with_servers(|rank, link| {
            if rank == 3 && link.to == Some(8) {
                (link.pending, link.unacknowledged) = (0.98, 0.98);
            }
        }));
        assert!(verdict.suspects.is_empty(), "{}", verdict.text);
    }

    #[test]
    fn path_that_loses_packets_of_a_crowded_card_is_named() {
        let mut connections = [(0.3, 5e6 / 14.0); 7];
        connections[3].0 = 0.98;
        let mut job = gather(connections);
        job.links[3].retransmits = 0.05 * job.links[3].rate / 1448.0;
        let verdict = judge(&job);
        assert_eq!(verdict.suspects[0].place.host, "n4", "{}", verdict.text);
    }

    /// Cards that carry next to nothing do not make the others crowded.
    #[test]
    fn slow_path_beside_idle_cards_is_named() {
        let slow = |idle: usize| {
            let mut job = chain(|from, link| {
                (link.rate, link.unacknowledged) = (1.1e6, 0.3);
                (link.pending, link.wanted, link.unposted) = (0.3, 1.0, 0.0);
                if from == 2 {
                    (link.pending, link.unacknowledged) = (0.98, 0.98);
                }
            });
            let cards = (0..idle).flat_map(|card| (0..7).map(move |from| (card, from)));
            job.links.extend(cards.map(|(card, from)| Link {
                from: Some(from),
                to: Some(from + 1),
                from_device: format!("eth{}", card + 1),
                to_device: format!("eth{}", card + 1),
                rate: 1e3,
                unacknowledged: 0.000_3,
                ..Link::default()
            }));
            let verdict = judge(&job);
            verdict.suspects.first().map(|suspect| suspect.place.host.clone())
        };
        assert_eq!(slow(0).as_deref(), Some("n2"));
        assert_eq!(slow(3).as_deref(), Some("n2"));
    }

    /// As in an all-to-all whose messages take longer than the window: everybody else waits.
    #[test]
    fn path_says_that_it_may_be_a_card_where_the_card_has_no_other_that_carries() {
        let slow = |others_of_sender: f64, others_of_receiver: f64| {
            let mut job = job(|_, _| 0.1);
            for link in &mut job.links {
                match (link.from == Some(0), link.to == Some(3)) {
                    (true, true) => link.rate /= 4.0,
                    (true, false) => link.rate *= others_of_sender,
                    (false, true) => link.rate *= others_of_receiver,
                    (false, false) => (),
                }
                if link.rate <= 0.0 {
                    (link.pending, link.wanted) = (0.0, 0.9);
                }
            }
            judge(&job)
        };
        for (of_sender, of_receiver, or_card) in
            [(1.0, 1.0, false), (0.0, 1.0, true), (1.0, 0.0, true), (0.0, 0.0, true)]
        {
            let verdict = slow(of_sender, of_receiver);
            let suspect = &verdict.suspects[0];
            assert_eq!(
                (suspect.class, suspect.or_card),
                (Class::Path, or_card),
                "{}",
                verdict.text
            );
            let words = "the path from n0 (eth0) to n3 (eth0), or one of these cards: a byte takes";
            assert_eq!(verdict.text.contains(words), or_card, "{}", verdict.text);
        }
    }

    /// Congestion at a card that all send to can keep a flow from being answered for a while.
    #[test]
    fn unanswered_flow_to_a_crowded_card_is_named_only_if_it_carries_next_to_nothing() {
        for (rate, named) in [(5e6 / 14.0, false), (0.0, true)] {
            let mut connections = [(0.3, 5e6 / 14.0); 7];
            connections[3] = (0.6, rate);
            let mut job = gather(connections);
            job.links[3].is_unanswered = true;
            let verdict = judge(&job);
            assert_eq!(!verdict.suspects.is_empty(), named, "{rate}: {}", verdict.text);
        }
    }

    /// One flow of several may lie dead for a while, and the others carry all.
    #[test]
    fn unanswered_flow_of_a_connection_that_carries_as_much_as_others_is_nobodys_fault() {
        for (slower, named) in [(1.0, false), (1.1, false), (1.5, true), (f64::INFINITY, true)] {
            let mut job = job(|_, _| 0.1);
            let path = |link: &&mut Link| (link.from, link.to) == (Some(0), Some(3));
            let link = job.links.iter_mut().find(path).expect("a link");
            link.is_unanswered = true;
            link.rate /= slower;
            let verdict = judge(&job);
            assert_eq!(!verdict.suspects.is_empty(), named, "{slower}: {}", verdict.text);
        }
    }

    #[test]
    fn path_that_may_pass_is_told_from_one_that_does_not() {
        let one_loses = |from, to| if (from, to) == (0, 3) { 14.0 } else { 0.1 };
        let ring = |mut job: Job| {
            job.links.retain(|link| link.to == link.from.map(|from| (from + 3) % 4));
            job
        };
        let slow = |mut job: Job| {
            let path = |link: &&mut Link| (link.from, link.to) == (Some(0), Some(3));
            job.links.iter_mut().find(path).expect("a link").rate /= 4.0;
            job
        };
        for (job, may_pass) in [
            (job(one_loses), true),
            (slow(job(|_, _| 0.1)), true), // its ends have others
            (ring(job(one_loses)), true),  // it only loses packets
            (ring(slow(job(|_, _| 0.1))), false),
        ] {
            let verdict = judge(&job);
            assert_eq!(verdict.suspects[0].class, Class::Path, "{}", verdict.text);
            assert_eq!(verdict.suspects[0].may_pass, may_pass, "{}", verdict.text);
        }
    }
}
