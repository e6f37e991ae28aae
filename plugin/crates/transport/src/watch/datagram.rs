//! The datagrams between the processes of a job.

use std::time::Duration;

use evenkeel_diagnosis::election::{CANDIDATE_BYTES, Candidate};
use evenkeel_diagnosis::{MAX_JSON, MAX_VIEW_BYTES, View};
use evenkeel_protocol::{JobKey, TAG_BYTES};

const MAGIC: [u8; 7] = *b"EVKL-W1";
const KIND_CANDIDATE: u8 = 1;
const KIND_VIEW: u8 = 2;
const KIND_ANSWER: u8 = 3;
const HEADER: usize = 8;

/// Maximum length of a datagram, in bytes.
pub(super) const MAX_DATAGRAM: usize = HEADER + TAG_BYTES + {
    if MAX_VIEW_BYTES > MAX_JSON + 16 { MAX_VIEW_BYTES } else { MAX_JSON + 16 }
};

/// A message between two processes of a job.
#[derive(Debug, PartialEq)]
pub(super) enum Datagram {
    /// The best candidate for collector that the sender knows.
    Candidate(Candidate),
    /// The sender's view, for the collector.
    View(View),
    /// The collector's answer: the verdict as JSON, and how long to wait before the next view.
    Answer { collector: u64, interval: Duration, verdict: String },
}

impl Datagram {
    /// Encodes the datagram, and signs it if there is a key.
    pub(super) fn encode(&self, key: Option<&JobKey>) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        match self {
            Self::Candidate(candidate) => {
                out.push(KIND_CANDIDATE);
                out.extend(candidate.encode());
            }
            Self::View(view) => {
                out.push(KIND_VIEW);
                out.extend(view.encode());
            }
            Self::Answer { collector, interval, verdict } => {
                out.push(KIND_ANSWER);
                out.extend(collector.to_le_bytes());
                out.extend((interval.as_millis() as u64).to_le_bytes());
                out.extend(verdict.as_bytes());
            }
        }
        if let Some(key) = key {
            let tag = key.tag(&out);
            out.extend(tag);
        }
        out
    }

    /// Decodes a datagram; `None` if it is malformed or its signature does not match the key. The
    /// input is untrusted.
    pub(super) fn decode(bytes: &[u8], key: Option<&JobKey>) -> Option<Self> {
        let bytes = match key {
            None => bytes,
            Some(key) => {
                let (signed, tag) = bytes.split_last_chunk()?;
                key.has_tagged(signed, tag).then_some(signed)?
            }
        };
        let (kind, body) = bytes.strip_prefix(&MAGIC)?.split_first()?;
        match *kind {
            KIND_CANDIDATE => {
                let bytes: &[u8; CANDIDATE_BYTES] = body.try_into().ok()?;
                Some(Self::Candidate(Candidate::decode(bytes)))
            }
            KIND_VIEW => View::decode(body).ok().map(Self::View),
            KIND_ANSWER => {
                let (collector, body) = body.split_first_chunk()?;
                let (interval, body) = body.split_first_chunk()?;
                Some(Self::Answer {
                    collector: u64::from_le_bytes(*collector),
                    interval: Duration::from_millis(u64::from_le_bytes(*interval)),
                    verdict: str::from_utf8(body).ok()?.to_owned(),
                })
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails there")]

    use evenkeel_testkit::TestRng;

    use super::*;

    fn key(digit: &str) -> JobKey {
        JobKey::parse(&digit.repeat(64)).unwrap()
    }

    fn all() -> [Datagram; 3] {
        let address = "10.0.0.1:7".parse().unwrap();
        [
            Datagram::Candidate(Candidate { rank: 1, id: 2, address, beat: 3 }),
            Datagram::View(View { window: 1000, ..View::default() }),
            Datagram::Answer {
                collector: 5,
                interval: Duration::from_secs(2),
                verdict: "{}".into(),
            },
        ]
    }

    #[test]
    fn watch_datagram_is_read_by_those_with_the_same_key() {
        let (ours, theirs) = (key("a"), key("b"));
        for datagram in all() {
            for key in [None, Some(&ours)] {
                let bytes = datagram.encode(key);
                assert!(bytes.len() <= MAX_DATAGRAM);
                assert_eq!(Datagram::decode(&bytes, key).as_ref(), Some(&datagram));
                assert_eq!(Datagram::decode(&bytes, Some(&theirs)), None);
            }
            assert_eq!(Datagram::decode(&datagram.encode(None), Some(&ours)), None, "unsigned");
        }
    }

    #[test]
    fn watch_datagram_with_any_change_is_refused_under_a_key() {
        let (mut rng, key) = (TestRng::new(1), key("c"));
        for datagram in all() {
            let good = datagram.encode(Some(&key));
            for _ in 0..2000 {
                let mut bytes = good.clone();
                rng.mutate(&mut bytes);
                assert!(bytes == good || Datagram::decode(&bytes, Some(&key)).is_none());
                // Without a key anything may come: it must not panic.
                let _ = Datagram::decode(&bytes, None);
            }
        }
    }
}
