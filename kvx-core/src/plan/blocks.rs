//! Block tables: which blocks hold a request's tokens.

use crate::{Error, Result};

/// A request's block table for one cache group on one side: ids of logical blocks, in token order.
///
/// Entry `i` stands for logical block `first + i` of the request, that is, for tokens `(first + i) * block_tokens ..`. An
/// entry equal to the group's null block stands for no block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockTable<'a> {
    first: u64,
    ids: &'a [u32],
}

impl<'a> BlockTable<'a> {
    /// A table that begins with the request's first token.
    #[must_use]
    pub const fn new(ids: &'a [u32]) -> Self {
        Self { first: 0, ids }
    }

    /// A table whose first entry is the request's logical block number `first`.
    #[must_use]
    pub const fn starting_at(first: u64, ids: &'a [u32]) -> Self {
        Self { first, ids }
    }

    /// A table whose last entry holds the last of `tokens` tokens: what an engine gives for a request of which it already
    /// holds a prefix.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`](crate::ErrorKind::Misuse) when the table is longer than the request, or `block_tokens` is 0.
    pub fn tail(ids: &'a [u32], tokens: u64, block_tokens: u32) -> Result<Self> {
        if block_tokens == 0 {
            return Err(Error::misuse("block_table", "block_tokens is 0"));
        }
        let blocks = tokens.div_ceil(block_tokens.into());
        match blocks.checked_sub(ids.len() as u64) {
            Some(first) => Ok(Self { first, ids }),
            None => Err(Error::misuse("block_table", "the table is longer than the request")
                .with_context("entries", ids.len())
                .with_context("tokens", tokens)
                .with_context("block_tokens", block_tokens)),
        }
    }

    /// The request's logical block number that the first entry stands for.
    #[must_use]
    pub const fn first(&self) -> u64 {
        self.first
    }

    /// The ids.
    #[must_use]
    pub const fn ids(&self) -> &'a [u32] {
        self.ids
    }

    /// Id of the request's logical block number `block`, if the table has it.
    #[must_use]
    pub fn id(&self, block: u64) -> Option<u32> {
        let index = usize::try_from(block.checked_sub(self.first)?).ok()?;
        self.ids.get(index).copied()
    }
}

/// Ids of the attention kernel's blocks that logical blocks consist of, `ratio` each.
///
/// ```
/// use kvx_core::plan::kernel_blocks;
///
/// // Known failure 8 (vllm#28661): logical blocks of 128 tokens on a kernel of 64.
/// assert_eq!(kernel_blocks(&[3, 7], 2).collect::<Vec<_>>(), [6, 7, 14, 15]);
/// ```
pub fn kernel_blocks(logical: &[u32], ratio: u32) -> impl Iterator<Item = u64> + '_ {
    logical.iter().flat_map(move |id| {
        let first = u64::from(*id) * u64::from(ratio);
        first..first + u64::from(ratio)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tail_ends_with_the_request() {
        // 50 tokens in blocks of 16 are 4 blocks; the last two are given.
        let table = BlockTable::tail(&[40, 41], 50, 16).unwrap();
        assert_eq!(table.first(), 2);
        assert_eq!(
            (table.id(1), table.id(2), table.id(3), table.id(4)),
            (None, Some(40), Some(41), None)
        );
        assert!(BlockTable::tail(&[1, 2], 16, 16).is_err());
        assert!(BlockTable::tail(&[1], 16, 0).is_err());
        assert_eq!(BlockTable::tail(&[], 0, 16).unwrap(), BlockTable::new(&[]));
    }
}
