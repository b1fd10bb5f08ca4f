//! Block tables of a request that nobody has allocated: for plans without engines.

use kvx_core::layout::{CacheGroup, GroupKind, RankLayout};
use kvx_core::plan::BlockTable;
use kvx_core::{Error, Result};

use crate::args::Order;
use crate::size;

/// Which side's blocks: the two are permuted differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Producer,
    Consumer,
}

/// One table per cache group. Block 0 is never used.
#[derive(Clone, Debug)]
pub(crate) struct Tables {
    ids: Vec<Vec<u32>>,
}

impl Tables {
    /// Tables for a request of `tokens` tokens in these groups.
    pub(crate) fn new(groups: &[CacheGroup], tokens: u64, order: Order, side: Side) -> Self {
        let ids = groups
            .iter()
            .map(|group| match group.kind {
                GroupKind::State => ids(1, order, side),
                _ => ids(tokens.div_ceil(group.block_tokens.into()), order, side),
            })
            .collect();
        Self { ids }
    }

    pub(crate) fn as_tables(&self) -> Vec<BlockTable<'_>> {
        borrowed(&self.ids)
    }

    /// The ids, by group.
    pub(crate) fn into_ids(self) -> Vec<Vec<u32>> {
        self.ids
    }
}

/// Ids by group, from a request's first block on, as tables.
pub(crate) fn borrowed(ids: &[Vec<u32>]) -> Vec<BlockTable<'_>> {
    ids.iter().map(|ids| BlockTable::new(ids)).collect()
}

/// Blocks that a pool needs for the tables of a request of `tokens` tokens.
pub(crate) fn pool_blocks(option: &'static str, tokens: u64, block_tokens: u32) -> Result<u32> {
    let blocks = tokens.div_ceil(block_tokens.into()).saturating_mul(2).saturating_add(2);
    u32::try_from(blocks).map_err(|_| {
        Error::config(
            option,
            format!("{tokens} tokens take more than 2^32 blocks of {block_tokens}"),
        )
        .with_remedy("ask for fewer tokens, or larger blocks")
    })
}

/// Refuses a request that does not fit into a pool of a given size.
pub(crate) fn check_pool(
    option: &'static str,
    layout: &RankLayout,
    tokens: u64,
    order: Order,
) -> Result<()> {
    for group in layout.groups() {
        let needed = match (group.kind, order) {
            (GroupKind::State, _) => 1,
            (_, Order::Contiguous) => tokens.div_ceil(group.block_tokens.into()),
            (_, Order::Permuted) => tokens.div_ceil(group.block_tokens.into()) * 2,
        } + 1;
        if needed > u64::from(group.blocks) {
            return Err(Error::config(
                option,
                format!(
                    "too few blocks: {} of {}",
                    size::count(group.blocks.into()),
                    size::of_many(group.block_tokens.into(), "token")
                ),
            )
            .with_context("tokens", tokens)
            .with_remedy(format!("give blocks={needed} or more, or leave it out")));
        }
    }
    Ok(())
}

/// Ids of `count` blocks. Permuted ones are every second block of the pool, in an order that looks random and is always
/// the same: no two of them are ever neighbours in memory.
fn ids(count: u64, order: Order, side: Side) -> Vec<u32> {
    let place = |index: u64| match order {
        Order::Contiguous => 1 + index,
        Order::Permuted => 1 + 2 * (index * step(count, side) % count),
    };
    (0..count).map(|index| u32::try_from(place(index)).unwrap_or(u32::MAX)).collect()
}

/// A step that visits every number below `count` once: near the golden section of it, another one for each side.
fn step(count: u64, side: Side) -> u64 {
    let share = match side {
        Side::Producer => 618,
        Side::Consumer => 382,
    };
    let coprime = |step: &u64| gcd(*step, count) == 1;
    (count * share / 1000 + 1..count).find(coprime).unwrap_or(1)
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn permuted_blocks_are_distinct_and_never_neighbours() {
        for count in 1..300 {
            for side in [Side::Producer, Side::Consumer] {
                let list = ids(count, Order::Permuted, side);
                let set: BTreeSet<u32> = list.iter().copied().collect();
                assert_eq!(set.len() as u64, count);
                assert!(list.iter().all(|id| *id > 0 && !set.contains(&(id + 1))));
                assert!(list.iter().all(|id| u64::from(*id) < 2 * count + 1));
            }
        }
        let list = ids(32, Order::Permuted, Side::Producer);
        assert!(list.windows(2).any(|pair| pair[0] > pair[1]), "{list:?}");
    }

    #[test]
    fn contiguous_blocks_leave_out_the_null_block() {
        assert_eq!(ids(4, Order::Contiguous, Side::Producer), [1, 2, 3, 4]);
        assert_eq!(ids(0, Order::Contiguous, Side::Producer), [0_u32; 0]);
    }
}
