//! Which layers share a block table.

use std::collections::BTreeMap;

use super::{CacheGroup, GroupKind, LayerKind, LayoutBuilder, Window};

/// One group and the layers of the whole model that are in it, in order.
#[derive(Debug)]
pub(super) struct GroupPlan {
    pub(super) group: CacheGroup,
    pub(super) layers: Vec<u32>,
}

/// What sets groups apart, in the order of the groups.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Sort {
    Attention(Window),
    State,
}

/// The groups of the whole engine: they depend on the model, never on the rank, so that all ranks number them alike. Nor
/// does a draft model change the numbers: its layers join groups that are there, or make new ones after them.
pub(super) fn groups(builder: &LayoutBuilder) -> Vec<GroupPlan> {
    let mut sorts: BTreeMap<Sort, Vec<u32>> = BTreeMap::new();
    let mut draft = sorts.clone();
    for (index, kind) in (0_u32..).zip(&builder.layers) {
        if let Some(sort) = sort(builder, kind) {
            let sorts = if index < builder.draft_from { &mut sorts } else { &mut draft };
            sorts.entry(sort).or_default().push(index);
        }
    }
    let mut plans = Vec::new();
    for (sort, layers) in sorts {
        let first = plans.len();
        plans.extend(split(builder, sort, &layers));
        plans[first].layers.extend(draft.remove(&sort).unwrap_or_default());
    }
    plans.extend(
        draft.into_iter().map(|(sort, layers)| GroupPlan { group: group(builder, sort), layers }),
    );
    plans
}

fn sort(builder: &LayoutBuilder, kind: &LayerKind) -> Option<Sort> {
    match kind {
        LayerKind::Empty => None,
        LayerKind::State(_) => Some(Sort::State),
        LayerKind::Attention(_) | LayerKind::Mla(_) if builder.group_by_window => {
            Some(Sort::Attention(kind.window().unwrap_or_default()))
        }
        LayerKind::Attention(_) | LayerKind::Mla(_) => Some(Sort::Attention(Window::Full)),
    }
}

/// Deals the layers of one sort out to as many groups as the limit of layers per group takes.
fn split(builder: &LayoutBuilder, sort: Sort, layers: &[u32]) -> Vec<GroupPlan> {
    let most = builder.group_layers.map_or(layers.len(), |most| most.max(1) as usize);
    let count = layers.len().div_ceil(most);
    let dealt = |first| layers.iter().skip(first).step_by(count).copied().collect();
    let group = group(builder, sort);
    (0..count).map(|first| GroupPlan { group, layers: dealt(first) }).collect()
}

fn group(builder: &LayoutBuilder, sort: Sort) -> CacheGroup {
    let set_apart = matches!(sort, Sort::Attention(window) if window != Window::Full);
    let block_tokens = match builder.window_block_tokens {
        Some(tokens) if set_apart => tokens,
        _ => builder.block_tokens,
    };
    let blocks = match sort {
        Sort::State => builder.state_blocks,
        Sort::Attention(_) if set_apart => builder.window_blocks,
        Sort::Attention(_) => None,
    };
    let (kind, kernel) = match sort {
        Sort::Attention(_) => (GroupKind::Attention, builder.kernel_block_tokens),
        Sort::State => (GroupKind::State, None),
    };
    CacheGroup {
        kind,
        block_tokens,
        kernel_block_tokens: kernel.unwrap_or(block_tokens),
        blocks: blocks.unwrap_or(builder.blocks),
        null_block: builder.null_block,
    }
}
