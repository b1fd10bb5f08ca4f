//! What is in an engine's blocks: bytes that depend on the request and on the whole name of an element.

use std::ops::Range;

use kvx_connector::ticket::Table;
use kvx_core::layout::{GroupKind, RankLayout, Role, Tensor};
use kvx_core::memory::Region;

/// Calls `each` with every row (one head at one position) of a request that a rank has: region, offset, and what its bytes are.
/// Of layers with a window, those that are needed after `total` tokens.
fn rows(
    layout: &RankLayout,
    tables: &[Table],
    tokens: &Range<u64>,
    total: u64,
    seed: u64,
    mut each: impl FnMut(usize, u64, &[u8]),
) {
    let mut bytes = Vec::new();
    for tensor in layout.tensors().iter().filter(|tensor| !tensor.local_only) {
        let group = &layout.groups()[tensor.group as usize];
        let table = &tables[tensor.group as usize];
        let Some(last) = table.ids.last().copied() else { continue };
        assert_eq!(tensor.dim.stride, tensor.dtype.bytes(), "a row is contiguous");
        let mut row = |token: u64, block: u64, position: u64| {
            for head in 0..tensor.head.extent {
                let at = tensor.base
                    + block * tensor.block.stride
                    + position * tensor.token.stride
                    + u64::from(head) * tensor.head.stride;
                let length = u64::from(tensor.dim.extent) * tensor.dtype.bytes();
                fill(&mut bytes, seed, tensor, token, tensor.heads.first + head, length);
                each(tensor.region as usize, at, &bytes);
            }
        };
        if group.kind == GroupKind::State {
            for position in 0..tensor.token.extent {
                row(total + u64::from(position), last.into(), position.into());
            }
            continue;
        }
        for token in tokens.start.max(tensor.window.first_needed(total))..tokens.end {
            let entry = (token / u64::from(group.block_tokens)).checked_sub(table.first);
            let id = entry.and_then(|at| table.ids.get(usize::try_from(at).unwrap()).copied());
            let id = id.filter(|id| Some(*id) != group.null_block).unwrap();
            let within = token % u64::from(group.block_tokens);
            let kernel = u64::from(group.kernel_block_tokens);
            let block = u64::from(id) * u64::from(group.kernel_ratio()) + within / kernel;
            row(token, block, within % kernel);
        }
    }
}

fn fill(bytes: &mut Vec<u8>, seed: u64, tensor: &Tensor, token: u64, head: u32, length: u64) {
    let role = match tensor.role {
        Role::Key => 1,
        Role::Value => 2,
        _ => 3,
    };
    let name = (u64::from(tensor.layer) << 48) ^ (role << 44) ^ (token << 16) ^ u64::from(head);
    let mut state = (name ^ seed.wrapping_mul(0xff51_afd7_ed55_8ccd)) | 1;
    bytes.clear();
    for _ in 0..length {
        state = (state ^ (state >> 29)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        bytes.push((state >> 56) as u8);
    }
}

/// Writes what a request's cache is.
pub(crate) fn write(
    layout: &RankLayout,
    regions: &[Region],
    tables: &[Table],
    (tokens, total): (&Range<u64>, u64),
    seed: u64,
) {
    rows(layout, tables, tokens, total, seed, |region, at, bytes| {
        regions[region].write_at(at, bytes).unwrap();
    });
}

/// How many rows there are, and how many of them are not what the request's cache is.
pub(crate) fn wrong(
    layout: &RankLayout,
    regions: &[Region],
    tables: &[Table],
    (tokens, total): (&Range<u64>, u64),
    seed: u64,
) -> (u64, u64) {
    let (mut all, mut wrong, mut found) = (0, 0, Vec::new());
    rows(layout, tables, tokens, total, seed, |region, at, bytes| {
        found.resize(bytes.len(), 0);
        regions[region].read_at(at, &mut found).unwrap();
        all += 1;
        wrong += u64::from(found != bytes);
    });
    (all, wrong)
}

/// Copies whole blocks from one rank's memory to another of the same layout.
pub(crate) fn copy_blocks(layout: &RankLayout, tables: &[Table], from: &[Region], to: &[Region]) {
    let mut bytes = Vec::new();
    for tensor in layout.tensors() {
        let group = &layout.groups()[tensor.group as usize];
        let ratio = u64::from(group.kernel_ratio());
        for id in &tables[tensor.group as usize].ids {
            for block in u64::from(*id) * ratio..(u64::from(*id) + 1) * ratio {
                for token in 0..u64::from(tensor.token.extent) {
                    for head in 0..u64::from(tensor.head.extent) {
                        let at = tensor.base
                            + block * tensor.block.stride
                            + token * tensor.token.stride
                            + head * tensor.head.stride;
                        let length = u64::from(tensor.dim.extent) * tensor.dtype.bytes();
                        bytes.resize(usize::try_from(length).unwrap(), 0);
                        from[tensor.region as usize].read_at(at, &mut bytes).unwrap();
                        to[tensor.region as usize].write_at(at, &bytes).unwrap();
                    }
                }
            }
        }
    }
}
