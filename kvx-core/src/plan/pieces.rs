//! Which tokens of which block go where: the part of a plan that depends on block tables.

use std::ops::Range;

use super::blocks::BlockTable;
use crate::layout::{CacheGroup, GroupKind, Window};
use crate::{Error, Result};

/// Neighbouring tokens of one kernel block on each side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) to_block: u32,
    pub(super) to_slot: u32,
    pub(super) from_block: u32,
    pub(super) from_slot: u32,
    pub(super) tokens: u32,
}

/// What the pieces need to know of one side's cache group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Side {
    name: &'static str,
    group: u32,
    /// Tokens per kernel block; 1 in a state group.
    pub(super) kernel_tokens: u32,
    ratio: u32,
    blocks: u32,
    null: Option<u32>,
}

impl Side {
    pub(super) fn new(name: &'static str, index: u32, group: &CacheGroup) -> Self {
        let kernel_tokens =
            if group.kind == GroupKind::State { 1 } else { group.kernel_block_tokens };
        Self {
            name,
            group: index,
            kernel_tokens,
            ratio: group.kernel_ratio(),
            blocks: group.blocks,
            null: group.null_block,
        }
    }

    pub(super) const fn group(&self) -> usize {
        self.group as usize
    }

    fn refuse(&self, what: &'static str, block: u64) -> Error {
        Error::misuse("plan.segments", what)
            .with_context("side", self.name)
            .with_context("group", self.group)
            .with_context("table_entry", block)
    }

    fn check_id(&self, id: u32, entry: u64) -> Result<u32> {
        if self.null == Some(id) {
            return Err(self.refuse("a needed block is the null block", entry).with_remedy(
                "name a block wherever a token is moved; the null block stands for none",
            ));
        }
        if id >= self.blocks {
            return Err(self
                .refuse("a block id is out of range", entry)
                .with_context("id", id)
                .with_context("blocks", self.blocks)
                .with_remedy(
                    "name blocks of that side's own pool: ids are below its number of blocks",
                ));
        }
        Ok(id)
    }

    /// Kernel block that holds the request's kernel block number `number`.
    fn kernel_block(&self, table: &BlockTable<'_>, number: u64) -> Result<u32> {
        let (entry, sub) = match self.ratio {
            1 => (number, 0),
            ratio => (number / u64::from(ratio), number % u64::from(ratio)),
        };
        let id = table
            .id(entry)
            .ok_or_else(|| {
                self.refuse("the block table does not reach a needed block", entry)
                    .with_context("first", table.first())
                    .with_context("entries", table.ids().len())
                    .with_remedy(
                        "give a table that reaches from the first token that is moved to the last",
                    )
            })
            .and_then(|id| self.check_id(id, entry))?;
        // Fits: a layout has fewer than 2^32 kernel blocks, and `sub` is below the ratio.
        #[expect(clippy::cast_possible_truncation, reason = "below the ratio, a u32")]
        Ok(id * self.ratio + sub as u32)
    }

    /// Last block of a state group's table.
    fn state_block(&self, table: &BlockTable<'_>) -> Result<u32> {
        let entry = (table.ids().len() as u64).saturating_sub(1);
        let id = table.ids().last().copied();
        id.ok_or_else(|| {
            self.refuse("the block table of a state group is empty", 0)
                .with_remedy("end the table with the block that holds the state")
        })
        .and_then(|id| self.check_id(id, table.first().saturating_add(entry)))
    }
}

/// The pieces of an attention group's layers that have this window, sorted by where they are written.
pub(super) fn attention(
    (to, to_table): (&Side, &BlockTable<'_>),
    (from, from_table): (&Side, &BlockTable<'_>),
    tokens: u64,
    range: &Range<u64>,
    window: Window,
    pieces: &mut Vec<Piece>,
) -> Result<()> {
    pieces.clear();
    let (start, end) = bounds(to, from, tokens, range, window);
    let (to_tokens, from_tokens) = (u64::from(to.kernel_tokens), u64::from(from.kernel_tokens));
    let (mut to_number, mut to_slot) = (start / to_tokens, start % to_tokens);
    let (mut from_number, mut from_slot) = (start / from_tokens, start % from_tokens);
    let mut left = end.saturating_sub(start);
    while left > 0 {
        let count = left.min(to_tokens - to_slot).min(from_tokens - from_slot);
        #[expect(clippy::cast_possible_truncation, reason = "all below a kernel block's tokens")]
        pieces.push(Piece {
            to_block: to.kernel_block(to_table, to_number)?,
            to_slot: to_slot as u32,
            from_block: from.kernel_block(from_table, from_number)?,
            from_slot: from_slot as u32,
            tokens: count as u32,
        });
        left -= count;
        to_slot += count;
        if to_slot == to_tokens {
            (to_number, to_slot) = (to_number + 1, 0);
        }
        from_slot += count;
        if from_slot == from_tokens {
            (from_number, from_slot) = (from_number + 1, 0);
        }
    }
    let place = |piece: &Piece| (u64::from(piece.to_block) << 32) | u64::from(piece.to_slot);
    if !pieces.is_sorted_by_key(place) {
        pieces.sort_unstable_by_key(place);
    }
    // Pieces ascend, so only neighbours can meet.
    let repeated = pieces
        .windows(2)
        .find(|pair| place(&pair[0]) + u64::from(pair[0].tokens) > place(&pair[1]));
    match repeated {
        None => Ok(()),
        Some(pair) => Err(Error::misuse("plan.segments", "a block is in the table twice")
            .with_context("side", to.name)
            .with_context("group", to.group)
            .with_context("id", pair[0].to_block / to.ratio)
            .with_remedy(
                "name each block once: what is written into it is of one place in the request",
            )),
    }
}

/// The tokens to move: see [the module documentation](super), *What is moved*.
fn bounds(to: &Side, from: &Side, tokens: u64, range: &Range<u64>, window: Window) -> (u64, u64) {
    let (mut start, mut end) = (window.first_needed(tokens), range.end);
    // Where the window needs no token, there is no block to move whole.
    if to.kernel_tokens == from.kernel_tokens && !range.is_empty() && start < tokens {
        let block = u64::from(to.kernel_tokens);
        start -= start % block;
        if end == tokens {
            end = end.checked_next_multiple_of(block).unwrap_or(end);
        }
    }
    (start.max(range.start), end)
}

/// The piece of a state group, if the range takes it.
pub(super) fn state(
    (to, to_table): (&Side, &BlockTable<'_>),
    (from, from_table): (&Side, &BlockTable<'_>),
    tokens: u64,
    range: &Range<u64>,
    pieces: &mut Vec<Piece>,
) -> Result<()> {
    pieces.clear();
    if !range.is_empty() && range.end == tokens {
        pieces.push(Piece {
            to_block: to.state_block(to_table)?,
            to_slot: 0,
            from_block: from.state_block(from_table)?,
            from_slot: 0,
            tokens: 1,
        });
    }
    Ok(())
}
