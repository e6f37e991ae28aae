//! The result of a judgement, as data and as text.

use serde::{Deserialize, Serialize};

use crate::view::clean_name;

/// Maximum length of a verdict as JSON, in bytes.
pub const MAX_JSON: usize = 900;
const MAX_TEXT: usize = 300;
const MAX_EVIDENCE: usize = 160;

/// Why a job's ranks wait.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// Identifier of the process that judged, in hexadecimal.
    #[serde(default)]
    pub collector: String,
    /// That process's host.
    #[serde(default)]
    pub collector_host: String,
    /// Sequence number of the collector's verdicts.
    #[serde(default)]
    pub seq: u64,
    /// Number of ranks that the collector knows of.
    pub ranks: u32,
    /// Length of the window that was judged, in seconds.
    pub window_s: f64,
    /// The kind of verdict.
    pub outcome: Outcome,
    /// The verdict as a sentence.
    pub text: String,
    /// At most two suspects.
    pub suspects: Vec<Suspect>,
}

/// The kind of a verdict.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// Ranks wait for the suspects.
    Suspect,
    /// All ranks wait alike.
    Nobody,
    /// Ranks wait, and too few views came to tell for whom.
    Unknown,
    /// No rank waits much.
    #[default]
    Quiet,
}

/// The kind of a suspect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// A process that does not call: it computes, is stuck or stopped, or gets too little CPU.
    Late,
    /// A card of one host.
    Link,
    /// The path between two hosts, or a card at one of its ends that cannot be told from the other.
    Path,
}

impl Class {
    /// The name in JSON and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Late => "late",
            Self::Link => "link",
            Self::Path => "path",
        }
    }
}

/// The direction in which a card is slow.
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

/// A process, or one of its cards.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Place {
    /// The rank, or one of the ranks that use the card.
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
    /// A phrase such as `rank 5 on n3`.
    pub fn words(&self) -> String {
        match self.rank {
            Some(rank) => format!("rank {rank} on {}", self.host),
            None => format!("a process on {}", self.host),
        }
    }
}

/// The process, card or path that ranks wait for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Suspect {
    /// The kind of suspect.
    pub class: Class,
    /// Where it is.
    #[serde(flatten)]
    pub place: Place,
    /// The slow direction of a card.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub direction: Option<Direction>,
    /// The other end of a path.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub peer: Option<Place>,
    /// For a path: the slow part may be the card at either end, because no other connection of that
    /// card carries anything.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub or_card: bool,
    /// Whether it may pass by itself. The path's ends have other connections that are not slow, or
    /// only packets are lost: both happen for a while when traffic starts or collides.
    #[serde(skip)]
    pub may_pass: bool,
    /// The share of time that the job loses to it.
    pub share: f64,
    /// How long it has lasted, in seconds.
    pub for_s: f64,
    /// Number of ranks that wait for it, directly or through others.
    pub waiting: u32,
    /// Confidence from 0 to 1.
    pub confidence: f64,
    /// The figures behind it.
    pub evidence: String,
}

impl Suspect {
    /// Whether both name the same process, card or path. The direction may differ, and so may the
    /// rank of a card that several ranks use.
    pub fn is_same(&self, other: &Self) -> bool {
        let place = |suspect: &Self| {
            let end = |place: &Place| (place.host.clone(), place.device.clone());
            let rank = suspect.place.rank.filter(|_| suspect.class == Class::Late);
            (suspect.class, rank, end(&suspect.place), suspect.peer.as_ref().map(end))
        };
        place(self) == place(other)
    }

    /// A phrase that names it, without figures, to end a sentence with.
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
    /// Encodes it as one line of JSON in printable ASCII, at most [`MAX_JSON`] bytes. Parts that do
    /// not fit are left out.
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
            // Serializing numbers and strings cannot fail.
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
                // Clean names are too short for this. The loop must end even for a verdict that
                // another process sent.
                short.suspects.clear();
            }
        }
    }

    /// Decodes the output of [`Verdict::to_json`]; `None` for anything else. The input is
    /// untrusted.
    pub fn from_json(json: &[u8]) -> Option<Self> {
        if json.trim_ascii_end().len() > MAX_JSON {
            return None;
        }
        let verdict: Self = serde_json::from_slice(json).ok()?;
        let is_clean = verdict.texts().all(|text| text.chars().all(is_printable));
        is_clean.then_some(verdict)
    }

    /// All strings in it.
    fn texts(&self) -> impl Iterator<Item = &String> {
        let suspects = self.suspects.iter().flat_map(|suspect| {
            let places = std::iter::once(&suspect.place).chain(&suspect.peer);
            let names = places.flat_map(|place| [&place.host, &place.pod, &place.device]);
            names.chain([&suspect.evidence])
        });
        suspects.chain([&self.collector, &self.collector_host, &self.text])
    }
}

/// Rounds to three decimals. Infinite numbers, which JSON lacks, become 0.
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

    /// A process encodes again a verdict that another one sent.
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
