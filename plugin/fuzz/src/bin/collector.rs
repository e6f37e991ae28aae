//! What the collector makes of views, which anybody may send where there is no job key: it judges
//! them, and tells and draws what it found.
#![no_main]

use std::time::Duration;

use evenkeel_diagnosis::{Collector, ConnectionView, MAX_JSON, Process, Verdict, View};
use evenkeel_fuzz::{Steps, fuzz_target, within, write_seeds};

/// A view, and the time since the one before in tenths of a second.
fn step(tenths: u8, view: &View) -> Vec<u8> {
    let view = view.encode();
    let length = (view.len() as u16).to_le_bytes();
    [&[tenths, length[0], length[1]], &view[..]].concat()
}

/// A ring of ranks. All wait for the one before, but one, which has not called, or whose bytes are
/// under way too long.
fn ring(ranks: u64, is_late: bool) -> Vec<u8> {
    let mut out = vec![];
    for sequence in 1..6 {
        for rank in 0..ranks {
            let slow = rank == 0;
            let connection = |id, is_sender| ConnectionView {
                id,
                is_sender,
                outstanding: if slow && is_late { 0 } else { 900 },
                peer: if slow { 0 } else { 850 },
                wire: if slow && !is_late { 900 } else { 10 },
                outstanding_for: 5000,
                kibibytes: 100,
                round_trip: 200,
                ..ConnectionView::default()
            };
            let view = View {
                process: Process {
                    id: rank + 1,
                    rank: Some(rank as u32),
                    host: format!("n{rank}"),
                    pod: "u".into(),
                },
                sequence,
                window: 1000,
                uncalled: if slow && is_late { 950 } else { 0 },
                uncalled_for: if slow && is_late { 5000 } else { 0 },
                connections_open: 2,
                devices: vec!["eth0".into()],
                connections: vec![
                    connection(rank, true),
                    connection((rank + ranks - 1) % ranks, false),
                ],
                ..View::default()
            };
            out.extend(step(if slow { 10 } else { 0 }, &view));
        }
    }
    out
}

fuzz_target!(init: write_seeds([ring(3, true), ring(3, false), ring(2, true)]), |input: &[u8]| {
    let mut steps = Steps::new(input);
    let mut collector = Collector::new(1);
    let mut now = Duration::from_secs(1);
    while let Some(tenths) = steps.next_byte() {
        now += Duration::from_millis(100) * u32::from(tenths);
        let length = steps.short() as usize;
        let Ok(view) = View::decode(steps.take(length)) else { continue };
        collector.add(view, now);
        if tenths == 0 {
            continue;
        }
        let verdict = within(1 << 20, || collector.judge(now)).clone();
        let json = verdict.to_json();
        assert!(json.len() <= MAX_JSON);
        let read = Verdict::from_json(json.as_bytes()).expect("a verdict of its own");
        assert_eq!((read.outcome, read.seq), (verdict.outcome, verdict.seq));
        for suspect in &verdict.suspects {
            assert!((0.0..=1.0).contains(&suspect.confidence), "{suspect:?}");
            assert!(suspect.share.is_finite() && suspect.for_s.is_finite(), "{suspect:?}");
        }
    }
    let picture = collector.timeline().svg();
    assert!(picture.is_empty() || picture.starts_with("<svg"));
});
