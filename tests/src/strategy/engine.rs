//! Engines: grid, layout, block sizes, groups.

use kvx_core::Result;
use kvx_core::layout::{
    AttentionGeometry, ConvOrder, Dtype, Grid, LayerKind, LayoutBuilder, ModelGeometry,
    NamedLayout, RankLayout, RegionPolicy, Window,
};
use proptest::option;
use proptest::prelude::*;

use super::strided::{Tape, restride, tape};
use super::tables::{BlockOrder, Spare, TableRecipe, entries};

/// What an engine has chosen.
#[derive(Clone, Debug)]
pub struct EngineRecipe {
    /// Tensor parallel ranks.
    pub tp: u32,
    /// Pipeline parallel ranks.
    pub pp: u32,
    /// Tensor parallel ranks of a second grid, which hold everything once more: no engine has that, but then the heads of
    /// ranks overlap in other ways than by being the same.
    pub beside: Option<u32>,
    /// Layout. Where it cannot hold the model's layers, the nearest one that can is used.
    pub layout: NamedLayout,
    /// Which tensors share a region.
    pub regions: RegionPolicy,
    /// Order within a convolution state.
    pub conv_order: ConvOrder,
    /// Choices with which everything is then put elsewhere: see [`restride`].
    pub strided: Option<Tape>,
    /// Tokens of a kernel block.
    pub kernel_tokens: u32,
    /// Kernel blocks per logical block.
    pub ratio: u32,
    /// Kernel blocks per logical block in groups that have a window.
    pub window_ratio: u32,
    /// Layers with a window have groups of their own.
    pub group_by_window: bool,
    /// Most layers of a group.
    pub group_layers: Option<u32>,
    /// Groups share memory, where they can.
    pub alias_groups: bool,
    /// The engine keeps all tokens, whatever windows the model's layers have.
    pub ignores_windows: bool,
    /// It has a draft model of one layer.
    pub draft: bool,
    /// Which block is the null block: none, the first, or the last.
    pub null_block: Option<bool>,
    /// In which order it hands out blocks.
    pub order: BlockOrder,
    /// What stands in entries of block tables that are not touched.
    pub spare: Spare,
    /// Entries of block tables after those of the request.
    pub room: u64,
    /// Entries of a state group's table before the last.
    pub states: u32,
}

impl EngineRecipe {
    /// A single rank with blocks of `tokens` tokens, handed out in order, and nothing out of the ordinary.
    #[must_use]
    pub fn plain(layout: NamedLayout, tokens: u32) -> Self {
        Self {
            tp: 1,
            pp: 1,
            beside: None,
            layout,
            regions: RegionPolicy::PerTensor,
            conv_order: ConvOrder::default(),
            strided: None,
            kernel_tokens: tokens,
            ratio: 1,
            window_ratio: 1,
            group_by_window: false,
            group_layers: None,
            alias_groups: false,
            ignores_windows: false,
            draft: false,
            null_block: None,
            order: BlockOrder::Contiguous,
            spare: Spare::Block,
            room: 0,
            states: 0,
        }
    }

    /// The same with another grid.
    #[must_use]
    pub const fn with_grid(mut self, tp: u32, pp: u32) -> Self {
        (self.tp, self.pp) = (tp, pp);
        self
    }

    /// Layouts of all ranks, with as many blocks as a request of `tokens` tokens takes, and a few more.
    ///
    /// # Errors
    ///
    /// Where the recipe is not one of a valid layout.
    pub fn ranks(&self, model: &ModelGeometry, tokens: u64) -> Result<Vec<RankLayout>> {
        let mut recipe = self.clone();
        let built = recipe.build(model, tokens).or_else(|_| {
            // Groups whose blocks differ cannot share memory.
            recipe.alias_groups = false;
            recipe.build(model, tokens)
        });
        let ranks = built.or_else(|_| {
            // Layers of different heads cannot have them outside.
            recipe.layout = NamedLayout::CrossLayerNhd;
            recipe.build(model, tokens)
        })?;
        let Some(tape) = &self.strided else { return Ok(ranks) };
        let numbered = ranks.into_iter().enumerate();
        numbered.map(|(number, rank)| restride(rank, tape, number * 7)).collect()
    }

    fn build(&self, model: &ModelGeometry, tokens: u64) -> Result<Vec<RankLayout>> {
        let model = if self.ignores_windows { without_windows(model)? } else { model.clone() };
        let regions = match self.regions {
            RegionPolicy::PerLayer if self.layout.is_cross_layer() => RegionPolicy::Single,
            policy => policy,
        };
        let mut builder = LayoutBuilder::new(&model, self.layout)
            .regions(regions)
            .conv_order(self.conv_order)
            .kernel_block_tokens(self.kernel_tokens)
            .block_tokens(self.kernel_tokens * self.ratio)
            .window_block_tokens(self.kernel_tokens * self.window_ratio)
            .group_by_window(self.group_by_window)
            .alias_groups(self.alias_groups);
        if let Some(layers) = self.group_layers {
            builder = builder.group_layers(layers);
        }
        if self.draft {
            let layer = LayerKind::Attention(AttentionGeometry::new(1, 2, Dtype::Bf16));
            builder = builder.draft(&ModelGeometry::new("draft", vec![layer])?);
        }
        let blocks = self.blocks(tokens, model.layers().len() + 1);
        let null = self.null_block.map(|first| if first { 0 } else { blocks - 1 });
        let builder = builder.blocks(blocks).null_block(null);
        let mut ranks = builder.build_replica(Grid::new(self.tp, self.pp, 1)?, 0)?;
        if let Some(tp) = self.beside {
            ranks.extend(builder.build_replica(Grid::new(tp, 1, 1)?, 0)?);
        }
        Ok(ranks)
    }

    /// Logical blocks per group.
    fn blocks(&self, tokens: u64, most_groups: usize) -> u32 {
        let smallest = self.kernel_tokens * self.ratio.min(self.window_ratio);
        let table = entries(tokens, smallest, self.room).max(u64::from(self.states) + 1);
        let tables = if self.alias_groups { most_groups as u64 } else { 1 };
        u32::try_from(table * tables + 2).unwrap_or(u32::MAX)
    }

    pub(super) fn tables(&self) -> TableRecipe {
        TableRecipe {
            order: self.order,
            spare: self.spare,
            shared: self.alias_groups,
            room: self.room,
            states: self.states,
        }
    }
}

fn without_windows(model: &ModelGeometry) -> Result<ModelGeometry> {
    let layers = model.layers().iter().map(|layer| match layer {
        LayerKind::Attention(layer) => {
            LayerKind::Attention(layer.clone().with_window(Window::Full))
        }
        other => other.clone(),
    });
    ModelGeometry::new(model.name(), layers.collect())
}

fn grid() -> impl Strategy<Value = (u32, u32)> {
    let tp = prop_oneof![3 => Just(1_u32), 6 => 1_u32..5, 1 => 5_u32..9];
    let pp = prop_oneof![4 => Just(1_u32), 2 => Just(2), 1 => Just(3)];
    (tp, pp)
}

fn layout() -> impl Strategy<Value = NamedLayout> {
    // The last few are rare, because they are large.
    let common = NamedLayout::ALL.into_iter().filter(|layout| *layout != NamedLayout::Pallas);
    prop_oneof![
        24 => prop::sample::select(common.collect::<Vec<_>>()),
        1 => Just(NamedLayout::Pallas),
    ]
}

fn regions() -> impl Strategy<Value = RegionPolicy> {
    prop_oneof![
        Just(RegionPolicy::PerTensor),
        Just(RegionPolicy::PerLayer),
        Just(RegionPolicy::Single),
    ]
}

fn kernel_tokens() -> impl Strategy<Value = u32> {
    prop_oneof![4 => 1_u32..7, 1 => prop::sample::select(vec![8_u32, 12, 16, 20])]
}

fn order() -> impl Strategy<Value = BlockOrder> {
    prop_oneof![
        2 => Just(BlockOrder::Contiguous),
        1 => Just(BlockOrder::Reversed),
        3 => any::<u32>().prop_map(BlockOrder::Permuted),
    ]
}

fn spare() -> impl Strategy<Value = Spare> {
    prop_oneof![
        Just(Spare::Block),
        Just(Spare::Null),
        Just(Spare::Nonsense),
        Just(Spare::Repeated),
        Just(Spare::Absent),
    ]
}

fn with_strides(
    strided: impl Strategy<Value = Option<Tape>>,
) -> impl Strategy<Value = EngineRecipe> {
    let conv = prop_oneof![Just(ConvOrder::ChannelsOutside), Just(ConvOrder::TapsOutside)];
    let beside = option::weighted(0.1, 1_u32..5);
    let places = (grid(), beside, layout(), regions(), conv, strided);
    let blocks = (kernel_tokens(), 1_u32..4, 1_u32..4);
    let groups = (
        any::<bool>(),
        option::weighted(0.3, 1_u32..3),
        prop::bool::weighted(0.3),
        prop::bool::weighted(0.15),
        prop::bool::weighted(0.1),
    );
    let tables = (option::of(any::<bool>()), order(), spare(), 0_u64..3, 0_u32..3);
    (places, blocks, groups, tables).prop_map(|(places, blocks, groups, tables)| {
        let ((tp, pp), beside, layout, regions, conv_order, strided) = places;
        let (kernel_tokens, ratio, window_ratio) = blocks;
        let (group_by_window, group_layers, alias_groups, ignores_windows, draft) = groups;
        let (null_block, order, spare, room, states) = tables;
        EngineRecipe {
            tp,
            pp,
            beside,
            layout,
            regions,
            conv_order,
            strided,
            kernel_tokens,
            ratio,
            window_ratio,
            group_by_window,
            group_layers,
            alias_groups,
            ignores_windows,
            draft,
            null_block,
            order,
            spare,
            room,
            states,
        }
    })
}

/// Engines with a named layout.
pub fn named_engine() -> impl Strategy<Value = EngineRecipe> {
    with_strides(Just(None))
}

/// Engines with a layout that no engine has: see [`restride`].
pub fn custom_engine() -> impl Strategy<Value = EngineRecipe> {
    with_strides(tape().prop_map(Some))
}

/// Any of these.
pub fn engine() -> impl Strategy<Value = EngineRecipe> {
    with_strides(option::of(tape()))
}
