//! Makes the layout of one rank from a model's geometry and a named layout.

use std::ops::Range;

use super::geometry::{LayerKind, ModelGeometry};
use super::grid::{Grid, RankCoords};
use super::named::page::{Page, Style, View, align, product, sum};
use super::named::{ConvOrder, NamedLayout};
use super::rank::{CacheGroup, GroupKind, RankLayout, RankLayoutParts, RegionSpec};
use super::tensor::{Axis, Tensor, TokenShard, Window};
use crate::memory::MemoryKind;
use crate::{Error, Result};

mod groups;
mod place;

/// Which tensors share a region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RegionPolicy {
    /// Each of the engine's tensors is a region of its own: a layer's keys and a layer's values where these are apart,
    /// both where they share a block. All layers of a group are one tensor in the cross-layer layouts.
    #[default]
    PerTensor,
    /// All of a layer is one region. Refused for the cross-layer layouts.
    PerLayer,
    /// Everything is one region.
    Single,
}

/// Makes [`RankLayout`]s: the model's geometry, a named layout, and what the engine has chosen besides.
///
/// ```
/// use kvx_core::layout::{Grid, LayoutBuilder, ModelGeometry, NamedLayout};
///
/// let model = ModelGeometry::preset("llama-3.1-8b")?;
/// let builder = LayoutBuilder::new(&model, NamedLayout::FlashAttentionHnd).block_tokens(16).blocks(100);
/// let ranks = builder.build_replica(Grid::new(2, 1, 1)?, 0)?;
/// assert_eq!(ranks.len(), 2);
/// assert_eq!(ranks[0].tensors().len(), 64); // keys and values of 32 layers
/// # Ok::<(), kvx_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct LayoutBuilder {
    layers: Vec<LayerKind>,
    /// Layers from this one on are a draft model's.
    draft_from: u32,
    named: NamedLayout,
    conv_order: ConvOrder,
    blocks: u32,
    block_tokens: u32,
    kernel_block_tokens: Option<u32>,
    window_blocks: Option<u32>,
    window_block_tokens: Option<u32>,
    state_blocks: Option<u32>,
    regions: RegionPolicy,
    group_by_window: bool,
    group_layers: Option<u32>,
    alias_groups: bool,
    null_block: Option<u32>,
    memory: MemoryKind,
}

impl LayoutBuilder {
    /// A builder for `model` in the layout `named`: 1,024 blocks of 16 tokens, each tensor a region of host memory, all
    /// attention layers on one block table, no null block.
    #[must_use]
    pub fn new(model: &ModelGeometry, named: NamedLayout) -> Self {
        Self {
            layers: model.layers().to_vec(),
            draft_from: model.num_layers(),
            named,
            conv_order: ConvOrder::default(),
            blocks: 1024,
            block_tokens: 16,
            kernel_block_tokens: None,
            window_blocks: None,
            window_block_tokens: None,
            state_blocks: None,
            regions: RegionPolicy::default(),
            group_by_window: false,
            group_layers: None,
            alias_groups: false,
            null_block: None,
            memory: MemoryKind::Host,
        }
    }

    /// Logical blocks of every group that has no number of its own.
    #[must_use]
    pub const fn blocks(mut self, blocks: u32) -> Self {
        self.blocks = blocks;
        self
    }

    /// Tokens per logical block: what one entry of a block table stands for.
    #[must_use]
    pub const fn block_tokens(mut self, tokens: u32) -> Self {
        self.block_tokens = tokens;
        self
    }

    /// Tokens per block of the attention kernel, where that is smaller than the logical block. Must divide it.
    #[must_use]
    pub const fn kernel_block_tokens(mut self, tokens: u32) -> Self {
        self.kernel_block_tokens = Some(tokens);
        self
    }

    /// Logical blocks of the groups that [`group_by_window`](Self::group_by_window) sets apart.
    #[must_use]
    pub const fn window_blocks(mut self, blocks: u32) -> Self {
        self.window_blocks = Some(blocks);
        self
    }

    /// Tokens per logical block of the groups that [`group_by_window`](Self::group_by_window) sets apart.
    #[must_use]
    pub const fn window_block_tokens(mut self, tokens: u32) -> Self {
        self.window_block_tokens = Some(tokens);
        self
    }

    /// Blocks of the state groups.
    #[must_use]
    pub const fn state_blocks(mut self, blocks: u32) -> Self {
        self.state_blocks = Some(blocks);
        self
    }

    /// Which tensors share a region.
    #[must_use]
    pub const fn regions(mut self, policy: RegionPolicy) -> Self {
        self.regions = policy;
        self
    }

    /// Layers with a window get a group, and so a block table, of their own, one for each kind of window. Without this all
    /// attention layers share one block table, each with its own window (Llama 4).
    #[must_use]
    pub const fn group_by_window(mut self, yes: bool) -> Self {
        self.group_by_window = yes;
        self
    }

    /// No group has more than this many layers: `n` layers of one kind are dealt out in turn to as many groups as that
    /// takes, as vLLM's hybrid allocator does in order to give all groups as many layers.
    #[must_use]
    pub const fn group_layers(mut self, layers: u32) -> Self {
        self.group_layers = Some(layers);
        self
    }

    /// The groups use the same memory: layer `i` of each group lies where layer `i` of the others does, and a block
    /// belongs to one group at a time (vLLM's hybrid allocator). Their blocks must have the same number and size, but for
    /// states, which are padded where they are smaller.
    #[must_use]
    pub const fn alias_groups(mut self, yes: bool) -> Self {
        self.alias_groups = yes;
        self
    }

    /// The id that stands for "no block" in every block table (vLLM: 0).
    #[must_use]
    pub const fn null_block(mut self, block: Option<u32>) -> Self {
        self.null_block = block;
        self
    }

    /// What memory the regions are.
    #[must_use]
    pub const fn memory(mut self, memory: MemoryKind) -> Self {
        self.memory = memory;
        self
    }

    /// What is side by side in a convolution state.
    #[must_use]
    pub const fn conv_order(mut self, order: ConvOrder) -> Self {
        self.conv_order = order;
        self
    }

    /// Appends the layers of a draft model, which the other side does not have. They are numbered after the model's own,
    /// lie on the last pipeline stage, and are local-only: never transferred. They join the groups of their kind.
    #[must_use]
    pub fn draft(mut self, model: &ModelGeometry) -> Self {
        self.layers.extend_from_slice(model.layers());
        self
    }

    /// The layout of the rank at `coords`: the layers of its pipeline stage, the heads of its tensor parallel rank. Groups
    /// have the same numbers on every rank, also on a stage that has no layer of one.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`](crate::ErrorKind::Config), naming what does not fit, for sizes of zero, for a kernel block
    /// that does not divide the logical one, for groups that cannot share memory, and for whatever else
    /// [`RankLayout::new`] refuses.
    pub fn build(&self, coords: RankCoords) -> Result<RankLayout> {
        coords.check()?;
        RankLayout::new(place::place(self, coords)?)
    }

    /// The layouts of all ranks of one data parallel replica, in the order of [`Grid::replica`].
    ///
    /// # Errors
    ///
    /// As for [`build`](Self::build).
    pub fn build_replica(&self, grid: Grid, dp: u32) -> Result<Vec<RankLayout>> {
        let grid = Grid::new(grid.tp, grid.pp, grid.dp)?;
        grid.replica(dp).map(|coords| self.build(coords)).collect()
    }

    /// Numbers of the layers that a pipeline stage holds: its share of the model's, and on the last stage the draft's.
    fn stage(&self, coords: RankCoords) -> impl Iterator<Item = u32> {
        let own: Range<u32> = coords.layers(self.draft_from);
        // Both are bounded by the geometry's limit of layers.
        let all = u32::try_from(self.layers.len()).unwrap_or(u32::MAX);
        let last = coords.pp + 1 == coords.grid.pp;
        own.chain(if last { self.draft_from..all } else { 0..0 })
    }
}

#[cfg(test)]
mod tests;
