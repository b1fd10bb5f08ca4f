//! Which blocks of a request hold which of its tokens.

use std::collections::BTreeSet;
use std::ops::Range;

use kvx_core::layout::{CacheGroup, GroupKind};
use kvx_core::plan::BlockTable;
use kvx_core::{Error, Result};

use super::config::SchedulerGroup;
use crate::ticket::{Table, TicketGroup};

/// The entries of `table` that hold `tokens`, a partial block at either end included. A table that begins later (what lies
/// before a window is gone) gives what it has.
///
/// `null` stands for no block: entries of it at the front are left out.
fn slice(
    table: BlockTable<'_>,
    kind: GroupKind,
    block_tokens: u32,
    null: Option<u32>,
    tokens: &Range<u64>,
) -> Result<Table> {
    if tokens.is_empty() || table.ids().is_empty() {
        return Ok(Table::default());
    }
    let first = table.first();
    let ids = table.ids();
    let range = if kind == GroupKind::State {
        // The last holds the state, the others are older or placeholders.
        ids.len() - 1..ids.len()
    } else {
        let block_tokens = u64::from(block_tokens);
        let end = tokens.end.div_ceil(block_tokens).saturating_sub(first);
        let start = (tokens.start / block_tokens).saturating_sub(first);
        let (start, end) = (usize::try_from(start), usize::try_from(end));
        match (start, end) {
            (Ok(start), Ok(end)) if end <= ids.len() => start.min(end)..end,
            _ => {
                return Err(Error::misuse(
                    "scheduler",
                    "the block table ends before the tokens do",
                )
                .with_context("first", first)
                .with_context("entries", ids.len())
                .with_context("block_tokens", block_tokens)
                .with_context("tokens", tokens.end));
            }
        }
    };
    let nulls = ids[range.clone()].iter().take_while(|id| Some(**id) == null).count();
    let range = range.start + nulls..range.end;
    if range.is_empty() {
        return Ok(Table::default());
    }
    Ok(Table { first: first + range.start as u64, ids: ids[range].to_vec() })
}

/// An engine's own tables, cut to `tokens`: one for each group, empty for a group that is not transferred.
pub(super) fn own(
    groups: &[SchedulerGroup],
    tables: &[BlockTable<'_>],
    tokens: &Range<u64>,
) -> Result<Vec<Table>> {
    if tables.len() != groups.len() {
        return Err(Error::misuse("scheduler", "there must be a block table for each cache group")
            .with_context("tables", tables.len())
            .with_context("groups", groups.len()));
    }
    let cut = |(index, (group, table)): (usize, (&SchedulerGroup, &BlockTable<'_>))| {
        if group.local_only {
            return Ok(Table::default());
        }
        let CacheGroup { kind, block_tokens, null_block, .. } = group.group;
        slice(*table, kind, block_tokens, null_block, tokens)
            .map_err(|error| error.with_context("group", index))
    };
    groups.iter().zip(tables).enumerate().map(cut).collect()
}

/// A ticket's tables, cut to `tokens`.
pub(super) fn remote(groups: &[TicketGroup], tokens: &Range<u64>) -> Result<Vec<TicketGroup>> {
    let cut = |group: &TicketGroup| {
        let table = slice(group.table.as_plan(), group.kind, group.block_tokens, None, tokens)?;
        Ok(TicketGroup { table, ..*group })
    };
    groups.iter().map(cut).collect()
}

/// How many tokens, from the first on, are good where `bad` blocks of a load of `tokens` into `tables` are not.
pub(super) fn good_tokens(
    groups: &[SchedulerGroup],
    tables: &[Table],
    tokens: &Range<u64>,
    bad: &BTreeSet<(u16, u32)>,
) -> u64 {
    let windowed = |(group, table): (&SchedulerGroup, &Table)| {
        let block_tokens = u64::from(group.group.block_tokens);
        !group.local_only
            && (group.group.kind != GroupKind::Attention
                || table.first > tokens.start / block_tokens
                || table.ids.is_empty()
                || table.ids.iter().any(|id| Some(*id) == group.group.null_block))
    };
    if groups.iter().zip(tables).any(windowed) {
        // What a state or a window needs of the tokens before was not loaded, so nothing in between can be gone on from.
        return tokens.start;
    }
    let first_token = |(number, (group, table)): (u16, (&SchedulerGroup, &Table))| {
        let at = table.ids.iter().position(|id| bad.contains(&(number, *id)))?;
        Some((table.first + at as u64) * u64::from(group.group.block_tokens))
    };
    let first = (0..).zip(groups.iter().zip(tables)).filter_map(first_token).min();
    let first = first.unwrap_or(tokens.start);
    first.clamp(tokens.start, tokens.end)
}
