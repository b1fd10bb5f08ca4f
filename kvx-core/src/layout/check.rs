//! What makes a layout valid. A layout may come from a peer: every sum is checked, and the work is bounded.

use super::rank::{CacheGroup, GroupKind, RankLayout, RankLayoutParts};
use super::tensor::{Axis, Granularity, Tensor, TokenShard, Window};
use crate::{Error, Result};

mod disjoint;

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
    disjoint::check_disjoint(&parts.tensors)
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

#[cfg(test)]
mod tests;
