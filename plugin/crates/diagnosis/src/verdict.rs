//! What is found, in numbers and in words.

use serde::{Deserialize, Serialize};

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
    /// Whether both are about the same thing. How far it goes may change: one direction of a card becomes both.
    pub fn is_same(&self, other: &Self) -> bool {
        let place = |suspect: &Self| {
            let peer = suspect.peer.as_ref().map(|peer| (peer.host.clone(), peer.rank));
            (suspect.class, suspect.place.host.clone(), suspect.place.rank, peer)
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
        short.text = cut(&short.text, MAX_TEXT);
        for suspect in &mut short.suspects {
            suspect.evidence = cut(&suspect.evidence, MAX_EVIDENCE);
            for number in [&mut suspect.share, &mut suspect.for_s, &mut suspect.confidence] {
                *number = (*number * 1000.0).round() / 1000.0;
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
            } else {
                short.text = cut(&short.text, short.text.len() / 2);
            }
        }
    }

    /// Reads what [`Verdict::to_json`] wrote; `None` when it is nothing like it.
    pub fn from_json(json: &[u8]) -> Option<Self> {
        serde_json::from_slice(json).ok()
    }
}

fn cut(text: &str, most: usize) -> String {
    text.chars().map(|c| if matches!(c, ' '..='~') { c } else { '?' }).take(most).collect()
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

    #[test]
    fn verdict_words_name_the_place() {
        assert_eq!(suspect(Class::Late).words(), "rank 5 on n3");
        assert_eq!(suspect(Class::Link).words(), "card eth1 of n3, sending");
        assert_eq!(suspect(Class::Path).words(), "the path from n3 (eth1) to n4 (eth1)");
    }
}
