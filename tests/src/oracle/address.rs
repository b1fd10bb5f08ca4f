//! Where things are: the documented formula, one element at a time.

use kvx_core::layout::{CacheGroup, Granularity, RankLayout, Tensor};

use super::fault::Fault;
use super::scene::Table;

/// A place in a group's tensors: kernel block, and position in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Spot {
    pub(super) block: u64,
    pub(super) position: u64,
}

/// Where `slot` of the request lies. `side` names the engine in messages.
pub(super) fn spot(
    side: &str,
    group: &CacheGroup,
    table: &Table,
    slot: u64,
) -> Result<Spot, Fault> {
    let (logical, kernel) = (u64::from(group.block_tokens), u64::from(group.kernel_block_tokens));
    let entry = slot / logical;
    let id = entry_id(side, group, table, entry)?;
    let within = slot % logical;
    Ok(Spot { block: id * (logical / kernel) + within / kernel, position: within % kernel })
}

/// Where a request's state lies.
pub(super) fn state_spot(side: &str, group: &CacheGroup, table: &Table) -> Result<Spot, Fault> {
    let Some(last) = (table.ids.len() as u64).checked_sub(1) else {
        return Err(Fault::Scene(format!("{side}: the table of a state group is empty")));
    };
    let block = entry_id(side, group, table, table.first + last)?;
    Ok(Spot { block, position: 0 })
}

fn entry_id(side: &str, group: &CacheGroup, table: &Table, entry: u64) -> Result<u64, Fault> {
    for (number, &id) in (table.first..).zip(&table.ids) {
        if number == entry {
            if group.null_block == Some(id) {
                return Err(Fault::Scene(format!(
                    "{side}: needed entry {entry} is the null block"
                )));
            }
            if id >= group.blocks {
                return Err(Fault::Scene(format!(
                    "{side}: entry {entry} is block {id} of {}",
                    group.blocks
                )));
            }
            return Ok(u64::from(id));
        }
    }
    Err(Fault::Scene(format!("{side}: no entry {entry} in the block table")))
}

/// Offset in its region of the first byte of an element. `head` is a global head that the tensor holds.
pub(super) fn element(tensor: &Tensor, spot: Spot, head: u32, dim: u32) -> u64 {
    let mut offset = tensor.base;
    offset += spot.block * tensor.block.stride;
    // What is kept once per block has one position.
    if tensor.granularity == Granularity::Token {
        offset += spot.position * tensor.token.stride;
    }
    offset += u64::from(head - tensor.heads.first) * tensor.head.stride;
    offset += u64::from(dim) * tensor.dim.stride;
    offset
}

/// Which logical element a byte belongs to, in words, by trying all of them. For messages.
pub(super) fn describe(layout: &RankLayout, region: u32, offset: u64) -> String {
    let mut found = Vec::new();
    for tensor in layout.tensors().iter().filter(|tensor| tensor.region == region) {
        for block in 0..u64::from(tensor.block.extent) {
            for position in 0..u64::from(tensor.token.extent) {
                for head in tensor.head_range() {
                    for dim in 0..tensor.dim.extent {
                        let first = element(tensor, Spot { block, position }, head, dim);
                        if offset >= first && offset - first < tensor.dtype.bytes() {
                            found.push(format!(
                                "{}, kernel block {block}, position {position}, head {head}, dim {dim}, byte {}",
                                tensor.key(),
                                offset - first
                            ));
                        }
                    }
                }
            }
        }
    }
    if found.is_empty() { "no element".into() } else { found.join(" or ") }
}
