//! Ranks that are late: the others wait for them, and they wait for nobody.

use crate::found::{Found, MIN_SHARE, place};
use crate::job::{Job, Link, Member};
use crate::median::Sorted;
use crate::verdict::{Class, Suspect};
use crate::waits::Waits;

/// Minimum share of time without a call, above both the other ranks' and the process's own past, to
/// count as late.
const MIN_LATENESS: f64 = 0.08;
/// Seconds without a call after which a process counts as stuck, whatever it did in the past.
const STUCK: f64 = 5.0;
/// Minimum scheduling delay above the other ranks', as a share of the time, to count as starved of
/// CPU.
const MIN_STARVED: f64 = 0.20;

/// Finds processes that others wait for while they wait for nobody. Each is the first member that
/// it holds up.
pub(crate) fn late(job: &Job, waits: &Waits) -> Vec<Found> {
    let members = &job.members;
    let uncalled =
        |member: &Member| if member.silent_for.is_some() { 1.0 } else { member.uncalled };
    let ranks = || members.iter().zip(&waits.ranks).filter(|(_, is_rank)| **is_rank);
    let all_uncalled = Sorted::new(ranks().map(|(member, _)| member.uncalled));
    let all_starved = Sorted::new(ranks().map(|(member, _)| member.starved));
    let longest_wait = waits.longest_of_ranks();
    let mut links_of: Vec<Vec<&Link>> = vec![Vec::new(); members.len()];
    for link in &job.links {
        link.from.into_iter().chain(link.to).for_each(|at| links_of[at].push(link));
    }
    let mut found = Vec::new();
    for (at, member) in members.iter().enumerate().filter(|(at, _)| waits.ranks[*at]) {
        let usual = all_uncalled.median_without(member.uncalled);
        let starved = member.starved - all_starved.median_without(member.starved);
        // A pipeline stage may always compute longer than the others. Only a change, or being
        // stuck, counts.
        let excess = uncalled(member) - usual;
        let before = member.usual_excess.unwrap_or(excess).max(0.0);
        let mut lateness = excess - before;
        let is_stuck = member.uncalled_for >= STUCK && longest_wait > 0.5;
        if is_stuck {
            lateness = lateness.max(excess);
        }
        let links = || links_of[at].iter();
        let mut evidence = format!(
            "did not call for {:.0} % of the time, others for {:.0} %",
            100.0 * uncalled(member),
            100.0 * usual
        );
        if let Some(silent) = member.silent_for {
            if links().any(|link| link.is_unanswered) {
                continue; // its host does not answer either, so the network is at fault
            }
            if member.is_unheard || links().any(|link| link.moves) {
                continue;
            }
            let longest = links().map(|link| link.outstanding_for).fold(0.0, f64::max);
            if longest < 1.0 {
                continue; // nobody waits for it, so it may have ended
            }
            lateness = (longest / job.window).min(1.0);
            // TCP shows whether the host answers. RDMA does so only for a short time.
            let is_tcp = links().any(|link| link.round_trip > 0.0 || link.unacknowledged > 0.0);
            let why = match is_tcp {
                true => ", while its host does: stopped, or out of CPU",
                false => ": stopped, out of CPU, or its host is gone",
            };
            evidence = format!("does not answer for {silent:.0} s{why}");
        } else if starved >= MIN_STARVED {
            lateness = lateness.max(starved.min(longest_wait));
            evidence = format!(
                "gets the CPU late: its threads wait {:.0} % of the time, those of others {:.0} %",
                100.0 * member.starved,
                100.0 * (member.starved - starved)
            );
        } else if member.uncalled_for >= 1.0 {
            evidence = format!("has not called for {:.0} s", member.uncalled_for);
        }
        let share = if member.silent_for.is_some() || starved >= MIN_STARVED {
            lateness
        } else {
            lateness.min(waits.wait_for(at))
        };
        if share < MIN_LATENESS {
            continue;
        }
        let next = (all_uncalled.max_without(member.uncalled) - usual).max(0.0);
        let margin =
            ((share - next.min(share)) / share).max(if starved >= MIN_STARVED { 0.6 } else { 0.0 });
        let is_stopped = is_stuck || member.silent_for.is_some() || starved >= MIN_STARVED;
        let suspect = Suspect {
            class: Class::Late,
            place: place(&member.process, ""),
            direction: None,
            peer: None,
            or_card: false,
            may_pass: !is_stopped,
            share,
            for_s: member.uncalled_for.max(member.silent_for.unwrap_or(0.0)),
            waiting: 0,
            confidence: 0.5 + 0.5 * margin * (share / (share + 0.05)),
            evidence,
        };
        let is_used = |link: &&&Link| link.pending.max(link.wanted) >= MIN_SHARE / 2.0;
        let peers = links().filter(is_used).flat_map(|link| link.from.into_iter().chain(link.to));
        let mut holds = vec![at];
        holds.extend(peers.filter(|peer| *peer != at));
        found.push(Found { suspect, holds, is_member: true });
    }
    found
}
