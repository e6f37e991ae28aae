//! What is found, in numbers and in words.

use serde::{Deserialize, Serialize};

use crate::view::clean_name;

/// Maximum length of a verdict as JSON, in bytes.
pub const MAX_JSON: usize = 900;
const MAX_TEXT: usize = 300;
const MAX_EVIDENCE: usize = 160;

/// What the waits of a job come from.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// The process that has judged, in hexadecimal digits.
    #[serde(default)]
    pub collector: String,
    /// Its host.
    #[serde(default)]
    pub collector_host: String,
    /// Grows with each verdict of a collector.
    #[serde(default)]
    pub seq: u64,
    /// Number of processes of which something is known.
    pub ranks: u32,
    /// The time judged, in seconds.
    pub window_s: f64,
    /// What kind of verdict it is.
    pub outcome: Outcome,
    /// In words.
    pub text: String,
    /// The guilty, the worst first; at most two.
    pub suspects: Vec<Suspect>,
}

/// What kind of verdict it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// Ranks wait for those named.
    Suspect,
    /// Ranks wait, all alike.
    Nobody,
    /// Ranks wait, and the views do not say for whom.
    Unknown,
    /// Nobody waits much.
    #[default]
    Quiet,
}

/// What is slow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// A process has not called: it computes, is stuck or stopped, or gets too little CPU.
    Late,
    /// A card of one host.
    Link,
    /// What is between two hosts, or one end of it that cannot be told from the other.
    Path,
}

impl Class {
    /// As in JSON and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Late => "late",
            Self::Link => "link",
            Self::Path => "path",
        }
    }
}

/// In which direction a card is slow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// What its host sends.
    Send,
    /// What its host receives.
    Receive,
    /// Both.
    Both,
}

/// A process, and perhaps its card.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Place {
    /// The rank; of several on the host, one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub rank: Option<u32>,
    /// The host.
    pub host: String,
    /// The pod's UID.
    #[serde(skip_serializing_if = "String::is_empty", default)]
    pub pod: String,
    /// The card.
    #[serde(skip_serializing_if = "String::is_empty", default)]
    pub device: String,
}

impl Place {
    /// As in `rank 5 on n3`.
    pub fn words(&self) -> String {
        match self.rank {
            Some(rank) => format!("rank {rank} on {}", self.host),
            None => format!("a process on {}", self.host),
        }
    }
}

/// Who or what is waited for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Suspect {
    /// What is slow.
    pub class: Class,
    /// Where.
    #[serde(flatten)]
    pub place: Place,
    /// In which direction, of a card.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub direction: Option<Direction>,
    /// The other end, of a path.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub peer: Option<Place>,
    /// Of a path: one of its ends' cards may be the slow one as well. No other connection of that card carries anything.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub or_card: bool,
    /// It may pass. A path's ends have other connections that are not slow, or a card or path only loses packets: traffic that
    /// collides or begins looks so for a while.
    #[serde(skip)]
    pub may_pass: bool,
    /// The share of its time that the job loses to it.
    pub share: f64,
    /// How long it has been so, in seconds.
    pub for_s: f64,
    /// Number of ranks that wait for it, directly or through others.
    pub waiting: u32,
    /// From 0 to 1.
    pub confidence: f64,
    /// The figures behind it.
    pub evidence: String,
}

impl Suspect {
    /// Whether both are about the same thing. How far it goes may change: one direction of a card becomes both. So may the rank
    /// that is named with a card that several use.
    pub fn is_same(&self, other: &Self) -> bool {
        let place = |suspect: &Self| {
            let end = |place: &Place| (place.host.clone(), place.device.clone());
            let rank = suspect.place.rank.filter(|_| suspect.class == Class::Late);
            (suspect.class, rank, end(&suspect.place), suspect.peer.as_ref().map(end))
        };
        place(self) == place(other)
    }

    /// What it is, without figures: a sentence's end.
    pub fn words(&self) -> String {
        let device = |place: &Place| match place.device.as_str() {
            "" => String::new(),
            device => format!(" ({device})"),
        };
        match (self.class, &self.peer) {
            (Class::Late, _) => self.place.words(),
            (Class::Link, _) => {
                let direction = match self.direction {
                    Some(Direction::Send) => ", sending",
                    Some(Direction::Receive) => ", receiving",
                    Some(Direction::Both) | None => ", both directions",
                };
                let card = match self.place.device.as_str() {
                    "" => "the card".to_owned(),
                    device => format!("card {device}"),
                };
                format!("{card} of {}{direction}", self.place.host)
            }
            (Class::Path, Some(peer)) => format!(
                "the path from {}{} to {}{}",
                self.place.host,
                device(&self.place),
                peer.host,
                device(peer)
            ),
            (Class::Path, None) => format!("a path of {}", self.place.host),
        }
    }
}

impl Verdict {
    /// As one line of JSON in printable ASCII characters, at most [`MAX_JSON`] bytes. What is too long is left out.
    pub fn to_json(&self) -> String {
        let mut short = self.clone();
        short.collector = clean_name(&short.collector);
        short.collector_host = clean_name(&short.collector_host);
        short.text = cut(&short.text, MAX_TEXT);
        for suspect in &mut short.suspects {
            suspect.evidence = cut(&suspect.evidence, MAX_EVIDENCE);
            for place in std::iter::once(&mut suspect.place).chain(&mut suspect.peer) {
                for name in [&mut place.host, &mut place.pod, &mut place.device] {
                    *name = clean_name(name);
                }
            }
            for number in [&mut suspect.share, &mut suspect.for_s, &mut suspect.confidence] {
                *number = rounded(*number);
            }
        }
        loop {
            // Numbers and strings: it cannot fail.
            let json = serde_json::to_string(&short).unwrap_or_default();
            if json.len() <= MAX_JSON {
                return json;
            }
            if let Some(long) = short.suspects.iter_mut().rev().find(|s| !s.evidence.is_empty()) {
                long.evidence.clear();
            } else if short.suspects.len() > 1 {
                short.suspects.pop();
            } else if !short.text.is_empty() {
                short.text = cut(&short.text, short.text.len() / 2);
            } else {
                // Not with names of this length. It must end in any case: another process may have sent it.
                short.suspects.clear();
            }
        }
    }

    /// Reads what [`Verdict::to_json`] wrote; `None` when it is nothing like it. Anybody may have sent it.
    pub fn from_json(json: &[u8]) -> Option<Self> {
        if json.trim_ascii_end().len() > MAX_JSON {
            return None;
        }
        let verdict: Self = serde_json::from_slice(json).ok()?;
        let is_clean = verdict.texts().all(|text| text.chars().all(is_printable));
        is_clean.then_some(verdict)
    }

    /// Everything in it that is not a number.
    fn texts(&self) -> impl Iterator<Item = &String> {
        let suspects = self.suspects.iter().flat_map(|suspect| {
            let places = std::iter::once(&suspect.place).chain(&suspect.peer);
            let names = places.flat_map(|place| [&place.host, &place.pod, &place.device]);
            names.chain([&suspect.evidence])
        });
        suspects.chain([&self.collector, &self.collector_host, &self.text])
    }
}

/// To three decimals. JSON has no infinite numbers.
fn rounded(number: f64) -> f64 {
    Some((number * 1000.0).round() / 1000.0).filter(|number| number.is_finite()).unwrap_or_default()
}

fn is_printable(c: char) -> bool {
    matches!(c, ' '..='~')
}

fn cut(text: &str, most: usize) -> String {
    text.chars().map(|c| if is_printable(c) { c } else { '?' }).take(most).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on fails there")]
mod tests {
    use super::*;

    fn suspect(class: Class) -> Suspect {
        let place =
            Place { rank: Some(5), host: "n3".into(), pod: "u".into(), device: "eth1".into() };
        Suspect {
            class,
            peer: (class == Class::Path).then(|| Place { host: "n4".into(), ..place.clone() }),
            or_card: false,
            may_pass: false,
            place,
            direction: (class == Class::Link).then_some(Direction::Send),
            share: 0.5,
            for_s: 41.0,
            waiting: 7,
            confidence: 0.9,
            evidence: "figures".into(),
        }
    }

    #[test]
    fn verdict_json_is_read_as_it_was_written() {
        let suspects = vec![suspect(Class::Path), suspect(Class::Link)];
        let verdict = Verdict { ranks: 8, text: "words".into(), suspects, ..Verdict::default() };
        assert_eq!(Verdict::from_json(verdict.to_json().as_bytes()), Some(verdict));
    }

    #[test]
    fn verdict_json_is_short_ascii_whatever_its_words() {
        let mut long = suspect(Class::Path);
        long.evidence = "\u{e9}\"".repeat(500);
        long.place.host = "h".repeat(63);
        let verdict = Verdict {
            text: "x\ny\u{e9}".repeat(300),
            suspects: vec![long.clone(), long],
            ..Verdict::default()
        };
        let json = verdict.to_json();
        assert!(json.len() <= MAX_JSON && json.bytes().all(|byte| (b' '..=b'~').contains(&byte)));
        assert!(!Verdict::from_json(json.as_bytes()).unwrap().suspects.is_empty());
    }

    /// A process encodes again what another one has told it.
    #[test]
    fn verdict_json_is_short_ascii_whatever_its_names_and_numbers() {
        let mut suspect = suspect(Class::Path);
        let long = "h\u{e9}\"\\<".repeat(500);
        let place = Place {
            rank: Some(u32::MAX),
            host: long.clone(),
            pod: long.clone(),
            device: long.clone(),
        };
        (suspect.place, suspect.peer) = (place.clone(), Some(place));
        (suspect.direction, suspect.waiting) = (Some(Direction::Receive), u32::MAX);
        for number in [1.234_567_890_123_456_7e-200, f64::MAX] {
            (suspect.share, suspect.for_s, suspect.confidence) = (number, -number, number);
            let verdict = Verdict {
                collector: long.clone(),
                collector_host: long.clone(),
                seq: u64::MAX,
                ranks: u32::MAX,
                window_s: -number,
                outcome: Outcome::Suspect,
                text: long.clone(),
                suspects: vec![suspect.clone()],
            };
            let json = verdict.to_json();
            assert!(json.len() <= MAX_JSON, "{}", json.len());
            assert!(json.bytes().all(|byte| (b' '..=b'~').contains(&byte)), "{json}");
            let read = Verdict::from_json(json.as_bytes()).unwrap();
            assert!(read.suspects[0].place.host.starts_with("h????h"), "{json}");
        }
    }

    /// Its texts become log lines, and must not begin others.
    #[test]
    fn verdict_json_that_is_long_or_has_other_characters_is_refused() {
        let json = |text: &str, host: &str| {
            let mut verdict = Verdict { text: text.into(), ..Verdict::default() };
            verdict.suspects.push(suspect(Class::Late));
            verdict.suspects[0].place.host = host.into();
            serde_json::to_vec(&verdict).unwrap()
        };
        assert!(Verdict::from_json(&json("words", "n3")).is_some());
        for (text, host) in
            [("a\nb", "n3"), ("a\u{1b}[31m", "n3"), ("a\u{e9}", "n3"), ("a", "n\n3")]
        {
            assert_eq!(Verdict::from_json(&json(text, host)), None, "{text:?} {host:?}");
        }
        assert_eq!(Verdict::from_json(&json(&"a".repeat(MAX_JSON), "n3")), None);
    }

    #[test]
    fn verdict_words_name_the_place() {
        assert_eq!(suspect(Class::Late).words(), "rank 5 on n3");
        assert_eq!(suspect(Class::Link).words(), "card eth1 of n3, sending");
        assert_eq!(suspect(Class::Path).words(), "the path from n3 (eth1) to n4 (eth1)");
    }
}
