//! Which ranks of a communicator have the same servers. Where not all have, each list of servers is a *leaf* of a tree: it
//! serves its own ranks, and the servers above it bring the leaves together.
//!
//! Nobody is told how many ranks a leaf has: ranks see each other's marks, and count.

use crate::client::ClientError;

/// Bytes of a mark.
pub const SERVER_LIST_DIGEST_BYTES: usize = 12;

/// What a rank shows the others of its list of servers, so that they see who has the same: a digest, how many, and over how
/// many an operation is cut at most.
pub fn mark(servers: &[String], split: usize) -> [u8; SERVER_LIST_DIGEST_BYTES] {
    // FNV-1a, 64 bits: nobody gains by making two lists look alike.
    let digest = servers.join(",").bytes().fold(0xcbf2_9ce4_8422_2325u64, |digest, byte| {
        (digest ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let mut mark = [0; SERVER_LIST_DIGEST_BYTES];
    mark[..8].copy_from_slice(&digest.to_le_bytes());
    mark[8..10].copy_from_slice(&(servers.len() as u16).to_le_bytes());
    mark[10..].copy_from_slice(&(split as u16).to_le_bytes());
    mark
}

/// A rank's place among those that have the same servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TreePosition {
    /// Counts those before it.
    pub index: u32,
    /// How many there are, 1 at least.
    pub count: u32,
    /// Which of the lists they have, in the order of their first ranks.
    pub leaf: u32,
    /// How many lists there are: 1 where there is no tree.
    pub leaves: u32,
}

impl TreePosition {
    /// Where all ranks have the same servers.
    pub fn alone(rank: u32, ranks: u32) -> Self {
        Self { index: rank, count: ranks, leaf: 0, leaves: 1 }
    }

    /// A rank's seat, where these are all ranks' marks.
    ///
    /// # Errors
    /// When others have more or fewer servers, or cut otherwise: what one of them reduces must be what one of the others' does.
    pub fn find(
        rank: usize,
        marks: &[[u8; SERVER_LIST_DIGEST_BYTES]],
    ) -> Result<Self, ClientError> {
        let own = marks[rank];
        let servers =
            |mark: &[u8; SERVER_LIST_DIGEST_BYTES]| u16::from_le_bytes([mark[8], mark[9]]);
        let split =
            |mark: &[u8; SERVER_LIST_DIGEST_BYTES]| u16::from_le_bytes([mark[10], mark[11]]);
        if let Some(other) = marks.iter().position(|mark| mark[8..] != own[8..]) {
            let said = |mark| format!("{} of {} reduction servers", split(mark), servers(mark));
            return Err(ClientError::new(format!(
                "rank {rank} cuts an operation over at most {}, rank {other} over {}: the numbers must be the same on all",
                said(&own),
                said(&marks[other])
            )));
        }
        let mut lists: Vec<&[u8; SERVER_LIST_DIGEST_BYTES]> = vec![];
        for mark in marks {
            if !lists.contains(&mark) {
                lists.push(mark);
            }
        }
        let same = |marks: &[[u8; SERVER_LIST_DIGEST_BYTES]]| {
            marks.iter().filter(|mark| **mark == own).count()
        };
        let leaf = lists.iter().position(|list| **list == own).unwrap_or(0);
        Ok(Self {
            index: same(&marks[..rank]) as u32,
            count: same(marks) as u32,
            leaf: leaf as u32,
            leaves: lists.len() as u32,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marks(lists: &[&[&str]]) -> Vec<[u8; SERVER_LIST_DIGEST_BYTES]> {
        let owned = |list: &&[&str]| list.iter().map(|one| (*one).to_owned()).collect::<Vec<_>>();
        lists.iter().map(|list| mark(&owned(list), 64)).collect()
    }

    #[test]
    fn ranks_with_the_same_list_sit_together_in_their_order() {
        let marks = marks(&[
            &["a:1", "a:2"],
            &["b:1", "b:2"],
            &["a:1", "a:2"],
            &["b:1", "b:2"],
            &["a:2", "a:1"],
        ]);
        let seats: Vec<_> = (0..5).map(|rank| TreePosition::find(rank, &marks).unwrap()).collect();
        let seat = |index, count, leaf| TreePosition { index, count, leaf, leaves: 3 };
        assert_eq!(
            seats,
            [seat(0, 2, 0), seat(0, 2, 1), seat(1, 2, 0), seat(1, 2, 1), seat(0, 1, 2)]
        );
    }

    #[test]
    fn one_list_is_no_tree() {
        let marks = marks(&[&["a:1"][..]; 4]);
        for rank in 0..4 {
            assert_eq!(
                TreePosition::find(rank, &marks).unwrap(),
                TreePosition::alone(rank as u32, 4)
            );
        }
    }

    #[test]
    fn lists_of_different_lengths_are_refused_with_both() {
        let error =
            TreePosition::find(0, &marks(&[&["a:1"], &["b:1", "b:2"]])).unwrap_err().to_string();
        assert!(error.contains("64 of 1 ") && error.contains("rank 1 over 64 of 2 "), "{error}");
        let servers = ["a:1".to_owned(), "a:2".to_owned()];
        let error =
            TreePosition::find(1, &[mark(&servers, 1), mark(&servers, 2)]).unwrap_err().to_string();
        assert!(error.contains("2 of 2") && error.contains("rank 0 over 1 of 2"), "{error}");
    }
}
