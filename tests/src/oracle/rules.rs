//! What is moved: see the [module documentation](super).

use std::collections::BTreeSet;
use std::ops::Range;

use kvx_core::layout::{CacheGroup, Granularity, GroupKind, RankLayout, Tensor, Window};

use super::address::{Spot, spot, state_spot};
use super::fault::Fault;
use super::scene::Scene;

/// One position of a tensor's token axis that is moved.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unit {
    /// Number of the slot; of the block where one is kept per block; 0 for a state.
    pub(super) number: u64,
    /// Holds no token: an unused slot of the last block.
    pub(super) unused: bool,
    pub(super) to: Spot,
    pub(super) from: Spot,
}

fn needed(window: Window, tokens: u64, token: u64) -> bool {
    token < tokens
        && match window {
            Window::Sliding(window) => token + u64::from(window) > tokens,
            Window::Chunked(chunk) => token / u64::from(chunk) == tokens / u64::from(chunk),
            _ => true,
        }
}

/// Slots that are moved of layers with these windows (one per side), whose groups have kernel blocks of these sizes.
pub(super) fn slots(
    tokens: u64,
    range: &Range<u64>,
    windows: [Window; 2],
    kernel_blocks: [u32; 2],
) -> Vec<u64> {
    if range.is_empty() {
        return Vec::new();
    }
    let needed = |token| windows.iter().all(|window| needed(*window, tokens, token));
    let Some(first_needed) = (0..tokens).find(|token| needed(*token)) else {
        return Vec::new();
    };
    let block = u64::from(kernel_blocks[0]);
    let mut all = Vec::new();
    for slot in range.start..tokens + block {
        let moved = if kernel_blocks[0] != kernel_blocks[1] {
            slot < range.end && needed(slot)
        } else if slot < range.end {
            slot / block >= first_needed / block
        } else {
            slot >= tokens && range.end == tokens && slot / block == (tokens - 1) / block
        };
        if moved {
            all.push(slot);
        }
    }
    all
}

fn group_of<'a>(layout: &'a RankLayout, tensor: &Tensor) -> &'a CacheGroup {
    &layout.groups()[tensor.group as usize]
}

/// What is moved of a tensor that lies at `from` on the producer and at `to` on the consumer.
pub(super) fn units(
    scene: &Scene,
    (from_layout, from): (&RankLayout, &Tensor),
    (to_layout, to): (&RankLayout, &Tensor),
) -> Result<Vec<Unit>, Fault> {
    let (from_group, to_group) = (group_of(from_layout, from), group_of(to_layout, to));
    let (from_table, to_table) =
        (&scene.producer.tables[from.group as usize], &scene.consumer.tables[to.group as usize]);
    if to_group.kind == GroupKind::State {
        if scene.range.is_empty() || scene.range.end != scene.tokens {
            return Ok(Vec::new());
        }
        let to = state_spot("consumer", to_group, to_table)?;
        let from = state_spot("producer", from_group, from_table)?;
        return Ok(vec![Unit { number: 0, unused: false, to, from }]);
    }
    let kernel_blocks = [from_group.kernel_block_tokens, to_group.kernel_block_tokens];
    let slots = slots(scene.tokens, &scene.range, [from.window, to.window], kernel_blocks);
    let per_block = to.granularity == Granularity::Block;
    let block = u64::from(to_group.kernel_block_tokens);
    if per_block && !scene.range.is_empty() && !scene.range.start.is_multiple_of(block) {
        return Err(Fault::Scene(format!("the range begins within a block of {}", to.key())));
    }
    let mut units = Vec::new();
    let mut blocks = BTreeSet::new();
    for slot in slots {
        if per_block && !blocks.insert(slot / block) {
            continue;
        }
        units.push(Unit {
            number: if per_block { slot / block } else { slot },
            unused: !per_block && slot >= scene.tokens,
            to: spot("consumer", to_group, to_table, slot)?,
            from: spot("producer", from_group, from_table, slot)?,
        });
    }
    Ok(units)
}

/// Entries of each cache group's block tables that any layer's transfer touches: of the producer's groups, then of the
/// consumer's. A state group's last entry is not told apart from the others: its set is empty.
pub(crate) fn touched_entries(scene: &Scene) -> [Vec<BTreeSet<u64>>; 2] {
    let groups = |ranks: &[RankLayout]| ranks.first().map_or(0, |rank| rank.groups().len());
    let mut producer = vec![BTreeSet::new(); groups(&scene.producer.ranks)];
    let mut consumer = vec![BTreeSet::new(); groups(&scene.consumer.ranks)];
    for layout in &scene.consumer.ranks {
        for to in layout.tensors() {
            let Some((from_layout, from)) = scene.producer.any_tensor(to.key()) else { continue };
            let (from_group, to_group) = (group_of(from_layout, from), group_of(layout, to));
            if to_group.kind == GroupKind::State || to.local_only {
                continue;
            }
            let kernel_blocks = [from_group.kernel_block_tokens, to_group.kernel_block_tokens];
            for slot in slots(scene.tokens, &scene.range, [from.window, to.window], kernel_blocks) {
                producer[from.group as usize].insert(slot / u64::from(from_group.block_tokens));
                consumer[to.group as usize].insert(slot / u64::from(to_group.block_tokens));
            }
        }
    }
    [producer, consumer]
}
