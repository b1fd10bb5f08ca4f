//! What lies where in one rank's memory: the cells of a strip.

use kvx_core::layout::{CacheGroup, Granularity, GroupKind, RankLayout, Role, Tensor, TensorKey};
use kvx_core::plan::{BlockTable, Pair};

/// Bytes that belong together whatever the layout: one head of one token; or, where a layout turns these inside out, the
/// tokens of a block (or the heads of a token) in one dimension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Cell {
    pub(super) region: u32,
    pub(super) at: u64,
    pub(super) bytes: u64,
    pub(super) key: TensorKey,
    /// Entry of the engine's block table.
    pub(super) block: u32,
    /// Global heads, first and last.
    pub(super) heads: (u32, u32),
    /// Tokens of the request, first and last; `None` where it is a state's or a whole block's.
    pub(super) tokens: Option<(u64, u64)>,
    /// The only dimension in it, where it has not all of them.
    pub(super) dim: Option<u32>,
    /// The pair moves it.
    pub(super) moved: bool,
    /// The value of the same row follows at once, and is counted in (packed rows).
    pub(super) packed: bool,
}

/// The cells of the tensors `keys` in the first `tokens` tokens of a request, sorted by where they lie.
pub(super) fn cells(
    layout: &RankLayout,
    keys: &[TensorKey],
    pair: &Pair,
    tables: &[BlockTable<'_>],
    tokens: u64,
) -> Vec<Cell> {
    let mut cells = Vec::new();
    for key in keys {
        let Some(tensor) = layout.tensor(*key) else { continue };
        let group = &layout.groups()[tensor.group as usize];
        let Some(table) = tables.get(tensor.group as usize) else { continue };
        for (block, kernel, first) in blocks(group, table, tokens) {
            let count = match tensor.granularity {
                Granularity::Block => 1,
                _ => (tokens - first).min(group.kernel_block_tokens.into()),
            };
            add(tensor, block, kernel, first, count, pair, &mut cells);
        }
    }
    cells.sort_by_key(|cell| (cell.region, cell.at));
    cells
}

/// Logical id, kernel id and first token of each kernel block of the request.
fn blocks(group: &CacheGroup, table: &BlockTable<'_>, tokens: u64) -> Vec<(u32, u64, u64)> {
    if group.kind == GroupKind::State {
        return table.ids().last().map(|id| (*id, u64::from(*id), 0)).into_iter().collect();
    }
    let (ratio, size) = (u64::from(group.kernel_ratio()), u64::from(group.kernel_block_tokens));
    (0..tokens.div_ceil(size))
        .filter_map(|number| {
            let id = table.id(number / ratio)?;
            Some((id, u64::from(id) * ratio + number % ratio, number * size))
        })
        .collect()
}

fn add(
    tensor: &Tensor,
    block: u32,
    kernel: u64,
    first: u64,
    count: u64,
    pair: &Pair,
    cells: &mut Vec<Cell>,
) {
    let element = tensor.dtype.bytes();
    let per_token = tensor.granularity == Granularity::Token;
    let base = tensor.base + tensor.block.stride * kernel;
    let at = |token: u64, head: u32, dim: u32| {
        let stride = |axis: kvx_core::layout::Axis, index: u64| {
            if axis.extent == 1 { 0 } else { axis.stride * index }
        };
        base + stride(tensor.token, token)
            + stride(tensor.head, head.into())
            + stride(tensor.dim, dim.into())
    };
    let (held, dims) = (tensor.head.extent, tensor.dim.extent);
    let mut cell = |offset, length: u64, (low, high): (u32, u32), tokens, dim| {
        let (low, high) = (tensor.heads.first + low, tensor.heads.first + high);
        cells.push(Cell {
            region: tensor.region,
            at: offset,
            bytes: length * element,
            key: tensor.key(),
            block,
            heads: (low, high),
            tokens,
            dim,
            moved: pair.shares.iter().any(|share| {
                share.key == tensor.key() && share.first_head <= low && high < share.end_head
            }),
            packed: false,
        });
    };
    let token = |index: u64| per_token.then_some((first + index, first + index));
    if dims == 1 || tensor.dim.stride == element {
        for slot in 0..count {
            for head in 0..held {
                cell(at(slot, head, 0), dims.into(), (head, head), token(slot), None);
            }
        }
    } else if per_token && tensor.token.stride == element {
        for head in 0..held {
            for dim in 0..dims {
                let tokens = Some((first, first + count - 1));
                cell(at(0, head, dim), count, (head, head), tokens, Some(dim));
            }
        }
    } else {
        for slot in 0..count {
            for dim in 0..dims {
                for head in 0..held {
                    cell(at(slot, head, dim), 1, (head, head), token(slot), Some(dim));
                }
            }
        }
    }
}

/// The cells as they are labelled: packed rows of a key and its value as one.
pub(super) fn rows(cells: &[Cell]) -> Vec<Cell> {
    let mut rows: Vec<Cell> = Vec::with_capacity(cells.len());
    for cell in cells {
        if let Some(last) = rows.last_mut()
            && !last.packed
            && (last.key.layer, last.key.role, cell.key.role)
                == (cell.key.layer, Role::Key, Role::Value)
            && (last.heads, last.tokens, last.dim) == (cell.heads, cell.tokens, cell.dim)
            && (last.region, last.at + last.bytes) == (cell.region, cell.at)
        {
            last.bytes += cell.bytes;
            last.packed = true;
            continue;
        }
        rows.push(cell.clone());
    }
    rows
}

/// Neighbouring cells that one label is for, by index: the tokens of one head, or the heads of one token.
pub(super) fn stretches(cells: &[Cell]) -> Vec<(usize, usize)> {
    let mut all: Vec<(usize, usize)> = Vec::new();
    for (index, cell) in cells.iter().enumerate() {
        if let Some((start, end)) = all.last_mut()
            && joins(&cells[*start], &cells[*end], cell, *end - *start)
        {
            *end = index;
            continue;
        }
        all.push((index, index));
    }
    all
}

/// Whether `cell` goes on where `first ..= last` ends, in the direction that these have taken.
fn joins(first: &Cell, last: &Cell, cell: &Cell, taken: usize) -> bool {
    let same = |cell: &Cell| (cell.region, cell.key, cell.block, cell.moved, cell.dim, cell.packed);
    if same(first) != same(cell) || last.at + last.bytes != cell.at {
        return false;
    }
    let next_head =
        first.tokens == cell.tokens && last.heads.1.checked_add(1) == Some(cell.heads.0);
    let next_token = first.heads == cell.heads
        && matches!((last.tokens, cell.tokens), (Some(a), Some(b)) if a.1 + 1 == b.0);
    let by_head = first.tokens == last.tokens;
    let by_token = first.heads == last.heads;
    (next_head && (taken == 0 || by_head)) || (next_token && (taken == 0 || by_token))
}

/// Whether what a tensor holds belongs to heads: a latent and an index are for all heads alike.
pub(super) const fn has_heads(role: Role) -> bool {
    !matches!(role, Role::Latent | Role::LatentScale | Role::IndexKey | Role::IndexScale)
}

/// What a stretch of cells is, in words.
pub(super) fn label(first: &Cell, last: &Cell, layers: bool) -> String {
    let mut parts = Vec::new();
    let role = if first.packed { "K|V".to_owned() } else { first.key.role.to_string() };
    parts.push(if layers { format!("layer {} {role}", first.key.layer) } else { role });
    let heads = (first.heads.0, last.heads.1);
    let tokens = first.tokens.zip(last.tokens).map(|(first, last)| (first.0, last.1));
    let name = |one: &str, (low, high): (u64, u64)| {
        if low == high { format!("{one} {low}") } else { format!("{one}s {low}–{high}") }
    };
    let heads = has_heads(first.key.role).then(|| name("head", (heads.0.into(), heads.1.into())));
    let tokens = tokens.map(|tokens| name("token", tokens));
    // What stays the same comes first.
    if tokens.is_some() && first.heads != last.heads {
        parts.extend(tokens);
        parts.extend(heads);
    } else {
        parts.extend(heads);
        parts.extend(first.dim.map(|dim| format!("dim {dim}")));
        parts.extend(tokens);
    }
    parts.join(" · ")
}
