//! A rank's position in the aggregation tree.
//!
//! Ranks with the same list of servers form a *leaf*: its servers reduce the parts of these ranks,
//! and the upstream servers reduce the sums of all leaves. The size of a leaf is not configured.
//! Ranks exchange the digests of their lists and count.

use crate::error::ClientError;
use crate::server_list_digest::ServerListDigest;

/// A rank's place among the ranks with the same list of servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TreePosition {
    /// Number of ranks of the leaf before this one.
    pub index: u32,
    /// Number of ranks of the leaf, at least 1.
    pub count: u32,
    /// Index of the leaf, in the order of the leaves' first ranks.
    pub leaf: u32,
    /// Number of leaves: 1 without a tree.
    pub leaves: u32,
}

impl TreePosition {
    /// The position where all ranks have the same list of servers.
    pub fn without_tree(rank: u32, ranks: u32) -> Self {
        Self { index: rank, count: ranks, leaf: 0, leaves: 1 }
    }

    /// A rank's position, given the digests of all ranks.
    ///
    /// # Errors
    /// When lists differ in length, or operations are split differently: servers at the same place
    /// of all lists must reduce the same range.
    pub fn find(rank: usize, digests: &[ServerListDigest]) -> Result<Self, ClientError> {
        let own = digests[rank];
        let numbers = |digest: &ServerListDigest| (digest.servers(), digest.split());
        let differs = |other: &ServerListDigest| numbers(other) != numbers(&own);
        if let Some(other) = digests.iter().position(differs) {
            let text = |digest: ServerListDigest| {
                format!("{} of {} reduction servers", digest.split(), digest.servers())
            };
            return Err(ClientError::new(format!(
                "rank {rank} splits an operation over at most {}, rank {other} over {}: the numbers must be the same on all",
                text(own),
                text(digests[other])
            )));
        }
        let mut lists: Vec<&ServerListDigest> = vec![];
        for digest in digests {
            if !lists.contains(&digest) {
                lists.push(digest);
            }
        }
        let same =
            |digests: &[ServerListDigest]| digests.iter().filter(|digest| **digest == own).count();
        let leaf = lists.iter().position(|list| **list == own).unwrap_or(0);
        Ok(Self {
            index: same(&digests[..rank]) as u32,
            count: same(digests) as u32,
            leaf: leaf as u32,
            leaves: lists.len() as u32,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digests(lists: &[&[&str]]) -> Vec<ServerListDigest> {
        let owned = |list: &&[&str]| list.iter().map(|one| (*one).to_owned()).collect::<Vec<_>>();
        lists.iter().map(|list| ServerListDigest::new(&owned(list), 64)).collect()
    }

    #[test]
    fn ranks_with_the_same_list_form_a_leaf() {
        let digests = digests(&[
            &["a:1", "a:2"],
            &["b:1", "b:2"],
            &["a:1", "a:2"],
            &["b:1", "b:2"],
            &["a:2", "a:1"],
        ]);
        let positions: Vec<_> =
            (0..5).map(|rank| TreePosition::find(rank, &digests).unwrap()).collect();
        let position = |index, count, leaf| TreePosition { index, count, leaf, leaves: 3 };
        assert_eq!(
            positions,
            [
                position(0, 2, 0),
                position(0, 2, 1),
                position(1, 2, 0),
                position(1, 2, 1),
                position(0, 1, 2)
            ]
        );
    }

    #[test]
    fn one_list_is_no_tree() {
        let digests = digests(&[&["a:1"][..]; 4]);
        for rank in 0..4 {
            assert_eq!(
                TreePosition::find(rank, &digests).unwrap(),
                TreePosition::without_tree(rank as u32, 4)
            );
        }
    }

    #[test]
    fn lists_of_different_lengths_are_rejected() {
        let error =
            TreePosition::find(0, &digests(&[&["a:1"], &["b:1", "b:2"]])).unwrap_err().to_string();
        assert!(error.contains("64 of 1 ") && error.contains("rank 1 over 64 of 2 "), "{error}");
        let servers = ["a:1".to_owned(), "a:2".to_owned()];
        let digests = [ServerListDigest::new(&servers, 1), ServerListDigest::new(&servers, 2)];
        let error = TreePosition::find(1, &digests).unwrap_err().to_string();
        assert!(error.contains("2 of 2") && error.contains("rank 0 over 1 of 2"), "{error}");
    }
}
