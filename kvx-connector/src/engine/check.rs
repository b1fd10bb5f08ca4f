//! What is wrong with what an engine is given.

use kvx_core::layout::{CacheGroup, GroupKind, RankLayout};
use kvx_core::{Error, Result};

use crate::ticket::Table;

/// The part of a table that holds a request's tokens.
pub(super) fn held(group: &CacheGroup, table: &Table, tokens: u64) -> Result<Table> {
    if group.kind == GroupKind::State || tokens == 0 {
        return Ok(table.clone());
    }
    let wanted = tokens.div_ceil(group.block_tokens.into()).saturating_sub(table.first);
    let count = usize::try_from(wanted).unwrap_or(usize::MAX);
    match table.ids.get(..count) {
        Some(ids) => Ok(Table { first: table.first, ids: ids.to_vec() }),
        None => Err(Error::misuse("publish", "the block table ends before the tokens do")
            .with_context("blocks", table.ids.len())
            .with_context("first", table.first)
            .with_context("tokens", tokens)
            .with_context("block_tokens", group.block_tokens)),
    }
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
