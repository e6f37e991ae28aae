//! What the collector tells all processes, as JSON. Without a job key, anybody may send one.
#![no_main]

use evenkeel_diagnosis::{Class, Direction, MAX_JSON, Outcome, Place, Suspect, Verdict};
use evenkeel_fuzz::{fuzz_target, within, write_seeds};

fn seeds() -> Vec<Vec<u8>> {
    let place = |host: &str| Place {
        rank: Some(5),
        host: host.into(),
        pod: "u".into(),
        device: "eth1".into(),
    };
    let suspect = |class| Suspect {
        class,
        place: place("n3"),
        direction: (class == Class::Link).then_some(Direction::Send),
        peer: (class == Class::Path).then(|| place("n4")),
        or_card: class == Class::Path,
        may_pass: false,
        share: 0.5,
        for_s: 41.0,
        waiting: 7,
        confidence: 0.9,
        evidence: "figures".into(),
    };
    let verdict = |outcome, suspects| Verdict {
        collector: "a5".into(),
        seq: 3,
        ranks: 8,
        window_s: 5.0,
        outcome,
        text: "words".into(),
        suspects,
        ..Verdict::default()
    };
    [
        Verdict::default(),
        verdict(Outcome::Nobody, vec![]),
        verdict(Outcome::Suspect, vec![suspect(Class::Late)]),
        verdict(Outcome::Suspect, vec![suspect(Class::Path), suspect(Class::Link)]),
    ]
    .iter()
    .map(|verdict| verdict.to_json().into_bytes())
    .collect()
}

fuzz_target!(init: write_seeds(seeds()), |input: &[u8]| {
    let Some(verdict) = within(64 << 10, || Verdict::from_json(input)) else { return };
    // It is logged, and written to the file that the controller's bridge reads: one line, and what
    // the next reader takes.
    let words = verdict.suspects.iter().map(Suspect::words);
    for text in words.chain([verdict.text.clone()]) {
        assert!(text.bytes().all(|byte| (b' '..=b'~').contains(&byte)), "{text:?}");
    }
    let json = verdict.to_json();
    assert!(json.len() <= MAX_JSON && json.bytes().all(|byte| (b' '..=b'~').contains(&byte)));
    let again = Verdict::from_json(json.as_bytes()).expect("a verdict that was encoded");
    // Texts are cut, and numbers rounded.
    assert_eq!((again.outcome, again.seq), (verdict.outcome, verdict.seq));
    assert!(verdict.text.starts_with(&again.text) && again.suspects.len() <= verdict.suspects.len());
});
