//! What is wrong with what an engine is given.

use std::ops::Range;

use kvx_core::layout::{CacheGroup, GroupKind, RankLayout};
use kvx_core::{Error, Result};

use crate::ticket::Table;

/// The part of a table that holds a request's tokens.
pub(super) fn held(
    operation: &'static str,
    group: &CacheGroup,
    table: &Table,
    tokens: u64,
) -> Result<Table> {
    if group.kind == GroupKind::State || tokens == 0 {
        return Ok(table.clone());
    }
    let wanted = tokens.div_ceil(group.block_tokens.into()).saturating_sub(table.first);
    let count = usize::try_from(wanted).unwrap_or(usize::MAX);
    match table.ids.get(..count) {
        Some(ids) => Ok(Table { first: table.first, ids: ids.to_vec() }),
        None => Err(ends_before(operation, group, table, tokens)),
    }
}

/// Those blocks of a table that hold these of a request's tokens.
pub(super) fn moved<'a>(
    operation: &'static str,
    group: &CacheGroup,
    table: &'a Table,
    tokens: &Range<u64>,
) -> Result<&'a [u32]> {
    if tokens.is_empty() {
        return Ok(&[]);
    }
    let ids = table.ids.as_slice();
    if group.kind == GroupKind::State {
        // The last holds the state, the others are older or placeholders.
        return Ok(&ids[ids.len().saturating_sub(1)..]);
    }
    let block_tokens = u64::from(group.block_tokens);
    let entry = |block: u64| usize::try_from(block.saturating_sub(table.first));
    let (start, end) =
        (entry(tokens.start / block_tokens), entry(tokens.end.div_ceil(block_tokens)));
    match (start, end) {
        (Ok(start), Ok(end)) if end <= ids.len() => Ok(&ids[start.min(end)..end]),
        _ => Err(ends_before(operation, group, table, tokens.end)),
    }
}

fn ends_before(operation: &'static str, group: &CacheGroup, table: &Table, tokens: u64) -> Error {
    Error::misuse(operation, "the block table ends before the tokens do")
        .with_context("blocks", table.ids.len())
        .with_context("first", table.first)
        .with_context("tokens", tokens)
        .with_context("block_tokens", group.block_tokens)
}

/// Whether these are all ranks of one replica, in order: plans are made by a rank's place in the list.
pub(super) fn check_replica(layouts: &[RankLayout]) -> Result<()> {
    let Some(first) = layouts.first().map(RankLayout::coords) else { return Ok(()) };
    let grid = first.grid;
    let wanted = u64::from(grid.tp) * u64::from(grid.pp);
    let in_place = |(number, layout): (u32, &RankLayout)| {
        let coords = layout.coords();
        coords.grid == grid && coords.dp == first.dp && coords.replica_index() == number
    };
    let stray = (0..).zip(layouts).find(|one| !in_place(*one));
    if stray.is_none() && layouts.len() as u64 == wanted {
        return Ok(());
    }
    let error = Error::config("engine", "these are not all ranks of one replica, in order")
        .with_context("ranks", layouts.len())
        .with_context("of", wanted)
        .with_remedy(
            "give all ranks of a replica, by pipeline stage and then by tensor parallel rank",
        );
    Err(match stray {
        Some((number, layout)) => error
            .with_context("at", number)
            .with_context("found_tp", layout.coords().tp)
            .with_context("found_pp", layout.coords().pp)
            .with_context("found_dp", layout.coords().dp),
        None => error,
    })
}
