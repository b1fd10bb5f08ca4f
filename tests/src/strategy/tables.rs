//! Block tables.

use std::collections::BTreeSet;

use kvx_core::layout::{CacheGroup, GroupKind, RankLayout};

use crate::oracle::Table;

/// In which order an engine hands out its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockOrder {
    /// One after the other.
    Contiguous,
    /// The last first.
    Reversed,
    /// Shuffled, by this seed.
    Permuted(u32),
}

/// What stands in the entries of a block table that a request's transfer does not touch: tokens before a window, tokens that
/// are held already, room for tokens to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spare {
    /// A block like any other.
    Block,
    /// The null block, where there is one.
    Null,
    /// An id that no block has.
    Nonsense,
    /// A block that holds something of the request elsewhere.
    Repeated,
    /// Nothing: the table begins and ends with what is touched.
    Absent,
}

/// All ids of a group's blocks but the null block, in the order in which they are handed out.
fn pool(group: &CacheGroup, order: BlockOrder) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..group.blocks).filter(|id| Some(*id) != group.null_block).collect();
    match order {
        BlockOrder::Contiguous => {}
        BlockOrder::Reversed => ids.reverse(),
        BlockOrder::Permuted(seed) => {
            // Sorting by a hash is a shuffle.
            ids.sort_by_key(|id| {
                let mixed =
                    (u64::from(*id) << 32 | u64::from(seed)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9)
            });
        }
    }
    ids
}

/// How one side's tables are made.
#[derive(Clone, Copy, Debug)]
pub(super) struct TableRecipe {
    pub(super) order: BlockOrder,
    pub(super) spare: Spare,
    /// Groups share memory, so no block may be in two tables.
    pub(super) shared: bool,
    /// Entries after those of the request.
    pub(super) room: u64,
    /// Entries of a state group's table before the last.
    pub(super) states: u32,
}

/// Entries of a table over the whole request.
pub(super) fn entries(tokens: u64, block_tokens: u32, room: u64) -> u64 {
    tokens.div_ceil(block_tokens.into()) + room
}

/// One table per group of `layout`. `touched` are the entries that must hold real blocks.
pub(super) fn tables(
    layout: &RankLayout,
    tokens: u64,
    touched: &[BTreeSet<u64>],
    recipe: TableRecipe,
) -> Vec<Table> {
    let mut taken = 0;
    let mut tables = Vec::new();
    for (group, touched) in layout.groups().iter().zip(touched) {
        let pool = pool(group, recipe.order);
        let mut fresh = pool.iter().copied().cycle().skip(if recipe.shared { taken } else { 0 });
        let count = match group.kind {
            GroupKind::State => u64::from(recipe.states) + 1,
            _ => entries(tokens, group.block_tokens, recipe.room),
        };
        let is_touched = |entry: u64| match group.kind {
            GroupKind::State => entry + 1 == count,
            _ => touched.contains(&entry),
        };
        let mut table = Table::default();
        let mut last = None;
        for entry in 0..count {
            let block = fresh.next().unwrap_or(0);
            taken += 1;
            if is_touched(entry) {
                last = Some(block);
            }
            table.ids.push(match (is_touched(entry), recipe.spare) {
                (true, _) | (false, Spare::Block) => block,
                (false, Spare::Null) => group.null_block.unwrap_or(block),
                (false, Spare::Repeated) => last.or_else(|| pool.first().copied()).unwrap_or(block),
                (false, Spare::Nonsense | Spare::Absent) => u32::MAX,
            });
        }
        if recipe.spare == Spare::Absent && group.kind != GroupKind::State {
            let first = (0..count).find(|entry| is_touched(*entry)).unwrap_or(count);
            let end =
                (0..count).rev().find(|entry| is_touched(*entry)).map_or(first, |entry| entry + 1);
            let cut = |entry: u64| usize::try_from(entry).unwrap_or(usize::MAX);
            table = Table { first, ids: table.ids[cut(first)..cut(end)].to_vec() };
        }
        tables.push(table);
    }
    tables
}
