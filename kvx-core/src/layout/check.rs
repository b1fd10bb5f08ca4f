//! What makes a layout valid. A layout may come from a peer: every sum is checked, and the work is bounded.

use super::rank::{CacheGroup, GroupKind, RankLayout, RankLayoutParts};
use super::tensor::{Axis, Granularity, Tensor, TokenShard, Window};
use crate::{Error, Result};

/// Most rows of a pair of tensors that are compared one by one when their footprints interleave.
const MAX_ROWS: u64 = 1 << 20;

fn refuse(what: String) -> Error {
    Error::config("layout", what)
}

pub(super) fn check(parts: &RankLayoutParts) -> Result<()> {
    const MAX_ITEMS: usize = RankLayout::MAX_ITEMS;
    parts.coords.check()?;
    for (name, count) in [
        ("regions", parts.regions.len()),
        ("groups", parts.groups.len()),
        ("tensors", parts.tensors.len()),
    ] {
        if count > MAX_ITEMS {
            return Err(refuse(format!("{count} {name}; the limit is {MAX_ITEMS}")));
        }
    }
    for (index, region) in parts.regions.iter().enumerate() {
        if region.bytes == 0 {
            return Err(refuse(format!("region {index} is empty")));
        }
    }
    check_groups(&parts.groups)?;
    for tensor in &parts.tensors {
        check_tensor(tensor, parts).map_err(|error| error.with_context("tensor", tensor.key()))?;
    }
    for pair in parts.tensors.windows(2) {
        if pair[0].key() == pair[1].key() {
            return Err(refuse(format!("{} is there twice", pair[0].key())));
        }
    }
    check_disjoint(parts)
}

pub(super) fn check_groups(groups: &[CacheGroup]) -> Result<()> {
    for (index, group) in groups.iter().enumerate() {
        let name = |what: &str| format!("group {index}: {what}");
        if group.block_tokens == 0 || group.kernel_block_tokens == 0 || group.blocks == 0 {
            return Err(refuse(name(
                "block_tokens, kernel_block_tokens and blocks must be at least 1",
            )));
        }
        if group.block_tokens % group.kernel_block_tokens != 0 {
            return Err(refuse(name(&format!(
                "kernel_block_tokens {} does not divide block_tokens {}",
                group.kernel_block_tokens, group.block_tokens
            ))));
        }
        if group.kind == GroupKind::State && group.kernel_ratio() != 1 {
            return Err(refuse(name("a state group has no kernel blocks of its own")));
        }
        if group.blocks.checked_mul(group.kernel_ratio()).is_none() {
            return Err(refuse(name("more than 2^32 kernel blocks")));
        }
    }
    Ok(())
}

fn check_tensor(tensor: &Tensor, parts: &RankLayoutParts) -> Result<()> {
    let Some(group) = parts.groups.get(tensor.group as usize) else {
        return Err(refuse(format!(
            "group {} does not exist; there are {}",
            tensor.group,
            parts.groups.len()
        )));
    };
    let Some(region) = parts.regions.get(tensor.region as usize) else {
        return Err(refuse(format!(
            "region {} does not exist; there are {}",
            tensor.region,
            parts.regions.len()
        )));
    };
    let axes = [
        ("block", tensor.block),
        ("token", tensor.token),
        ("head", tensor.head),
        ("dim", tensor.dim),
    ];
    for (name, axis) in axes {
        if axis.extent == 0 {
            return Err(refuse(format!("the {name} axis is empty")));
        }
    }
    let kernel_blocks = group.blocks * group.kernel_ratio();
    if tensor.block.extent != kernel_blocks {
        return Err(refuse(format!(
            "the block axis has {} positions, its group has {kernel_blocks} kernel blocks",
            tensor.block.extent
        )));
    }
    let positions = match (group.kind, tensor.granularity) {
        (GroupKind::Attention, Granularity::Token) => group.kernel_block_tokens,
        (_, Granularity::Block) => 1,
        (GroupKind::State, Granularity::Token) => {
            return Err(refuse("a state group's tensors are kept per block".into()));
        }
    };
    if tensor.token.extent != positions {
        return Err(refuse(format!(
            "the token axis has {} positions, its group wants {positions}",
            tensor.token.extent
        )));
    }
    let head_end = tensor.heads.first.checked_add(tensor.head.extent);
    if head_end.is_none_or(|end| end > tensor.heads.total) {
        return Err(refuse(format!(
            "heads {} + {} are outside the layer's {}",
            tensor.heads.first, tensor.head.extent, tensor.heads.total
        )));
    }
    match tensor.window {
        Window::Sliding(0) | Window::Chunked(0) => {
            return Err(refuse("a window of no tokens".into()));
        }
        _ => {}
    }
    if let TokenShard::Interleaved { run, ranks, rank } = tensor.tokens
        && (run == 0 || ranks == 0 || rank >= ranks)
    {
        return Err(refuse(format!("context parallel rank {rank} of {ranks} in runs of {run}")));
    }
    let end = tensor.span().and_then(|span| tensor.base.checked_add(span));
    if end.is_none_or(|end| end > region.bytes) {
        return Err(refuse(format!(
            "bytes {} .. {} are outside region {} of {} bytes",
            tensor.base,
            end.map_or_else(|| "overflow".into(), |end| end.to_string()),
            tensor.region,
            region.bytes
        )));
    }
    check_nested(tensor)
}

/// Sorted by stride, each axis must step over everything that the shorter ones reach. Then no two elements of the tensor
/// share a byte, and addresses ascend when axes are walked from the longest stride to the shortest.
fn check_nested(tensor: &Tensor) -> Result<()> {
    let mut axes: Vec<Axis> = [tensor.block, tensor.token, tensor.head, tensor.dim]
        .into_iter()
        .filter(|axis| axis.extent > 1)
        .collect();
    axes.sort_by_key(|axis| axis.stride);
    let mut reach = tensor.dtype.bytes();
    for axis in axes {
        if axis.stride < reach {
            return Err(refuse(format!(
                "an axis of {} positions steps {} bytes, within the {reach} bytes that its inner axes take",
                axis.extent, axis.stride
            )));
        }
        // Cannot overflow: `span` of the whole tensor did not.
        reach += axis.stride * u64::from(axis.extent - 1);
    }
    Ok(())
}

/// No two tensors of one group may share a byte. (Tensors of different groups may: a block belongs to one group at a
/// time.)
fn check_disjoint(parts: &RankLayoutParts) -> Result<()> {
    let mut order: Vec<&Tensor> = parts.tensors.iter().collect();
    order.sort_by_key(|tensor| (tensor.group, tensor.region, tensor.base));
    let end = |tensor: &Tensor| tensor.base + tensor.span().unwrap_or(u64::MAX);
    let mut rows_left = MAX_ROWS;
    let mut open: Vec<&Tensor> = Vec::new();
    for tensor in order {
        open.retain(|other| {
            (other.group, other.region) == (tensor.group, tensor.region) && end(other) > tensor.base
        });
        for other in &open {
            if overlap(other, tensor, &mut rows_left)? {
                return Err(refuse(format!(
                    "{} and {} share bytes of region {}",
                    other.key(),
                    tensor.key(),
                    tensor.region
                )));
            }
        }
        open.push(tensor);
    }
    Ok(())
}

fn overlap(a: &Tensor, b: &Tensor, rows_left: &mut u64) -> Result<bool> {
    // Usual case: both step from block to block by the same stride, so it is enough to compare one block of each, modulo
    // that stride.
    let blocks = a.block.extent.max(b.block.extent);
    if blocks == 1 || a.block.stride == b.block.stride {
        let stride = if blocks == 1 { u64::MAX } else { a.block.stride };
        let inside =
            |t: &Tensor| t.block_span().is_some_and(|span| t.base % stride + span <= stride);
        if inside(a) && inside(b) {
            let (a_at, b_at) = (a.base % stride, b.base % stride);
            let (a_end, b_end) =
                (a_at + a.block_span().unwrap_or(0), b_at + b.block_span().unwrap_or(0));
            if a_end <= b_at || b_end <= a_at {
                return Ok(false);
            }
            if side_by_side(a, b) {
                return Ok(false);
            }
            return rows_meet(a, b, Some(stride), rows_left);
        }
    }
    rows_meet(a, b, None, rows_left)
}

/// Whether two tensors that step alike lie next to each other within their shortest step, as the halves of packed K|V
/// rows do. Then they cannot meet, however many rows there are.
fn side_by_side(a: &Tensor, b: &Tensor) -> bool {
    let steps = |t: &Tensor| [t.token, t.head].map(|axis| (axis.extent, axis.stride));
    let row = |t: &Tensor| t.dim.reach().map_or(u64::MAX, |reach| reach + t.dtype.bytes());
    let (low, high) = if a.base <= b.base { (a, b) } else { (b, a) };
    let shortest = [a.block, a.token, a.head]
        .into_iter()
        .filter(|axis| axis.extent > 1)
        .map(|axis| axis.stride)
        .min();
    let apart = high.base - low.base;
    steps(a) == steps(b)
        && row(low) <= apart
        && shortest.is_none_or(|step| apart.saturating_add(row(high)) <= step)
}

/// Compares the contiguous rows of two tensors, within one block modulo `stride`, or over all blocks.
fn rows_meet(a: &Tensor, b: &Tensor, stride: Option<u64>, rows_left: &mut u64) -> Result<bool> {
    let (a_rows, a_len) = rows(a, stride, rows_left)?;
    let (b_rows, b_len) = rows(b, stride, rows_left)?;
    let mut all: Vec<(u64, u64)> = a_rows
        .into_iter()
        .map(|at| (at, a_len))
        .chain(b_rows.into_iter().map(|at| (at, b_len)))
        .collect();
    all.sort_unstable();
    Ok(all.windows(2).any(|pair| pair[0].0 + pair[0].1 > pair[1].0))
}

fn rows(tensor: &Tensor, stride: Option<u64>, rows_left: &mut u64) -> Result<(Vec<u64>, u64)> {
    let element = tensor.dtype.bytes();
    let mut axes = vec![tensor.token, tensor.head, tensor.dim];
    if stride.is_none() {
        axes.push(tensor.block);
    }
    axes.retain(|axis| axis.extent > 1);
    axes.sort_by_key(|axis| axis.stride);
    let mut run = element;
    axes.retain(|axis| {
        let folds = axis.stride == run;
        if folds {
            run *= u64::from(axis.extent);
        }
        !folds
    });
    let count = axes.iter().try_fold(1_u64, |n, axis| n.checked_mul(axis.extent.into()));
    let count = count.filter(|count| count <= rows_left).ok_or_else(|| {
        refuse(format!(
            "{} interleaves with another tensor in too many rows to check (limit {MAX_ROWS})",
            tensor.key()
        ))
    })?;
    *rows_left -= count;
    let start = stride.map_or(tensor.base, |stride| tensor.base % stride);
    let mut starts = vec![start];
    for axis in axes {
        starts = (0..u64::from(axis.extent))
            .flat_map(|i| starts.iter().map(move |at| at + i * axis.stride))
            .collect();
    }
    Ok((starts, run))
}
