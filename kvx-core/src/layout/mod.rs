//! Where logical KV elements lie in a rank's memory.
//!
//! A rank's cache is a [`RankLayout`]: *regions* of memory, *groups* of layers that share a block table, and *tensors*,
//! each a strided view with four named axes (block, token, head, dim) plus the *shard* of the model that it holds.
//! Nothing is ever inferred from a tensor's shape: a block size or a head count is what the engine declared.
//!
//! - [`ModelGeometry`] says what a model's layers keep per token, from a Hugging Face `config.json`
//!   ([`ModelGeometry::from_hf_config`]) or a built-in preset ([`ModelGeometry::preset`]).
//! - [`Grid`] and [`RankCoords`] say which heads and layers a rank holds.
//! - [`NamedLayout`] lists the layouts that engines use, and [`LayoutBuilder`] makes the [`RankLayout`] of one rank.

mod builder;
mod check;
mod dtype;
mod geometry;
mod grid;
mod hf;
mod named;
mod presets;
mod rank;
mod tensor;

pub use builder::{LayoutBuilder, RegionPolicy};
pub use dtype::Dtype;
pub use geometry::{
    AttentionGeometry, ConvPart, IndexGeometry, IndexScales, LayerKind, MlaGeometry, ModelGeometry,
    ScalePer, Scales, SsmGeometry, StateGeometry,
};
pub use grid::{Grid, RankCoords};
pub use named::{ConvOrder, NamedLayout};
pub use rank::{CacheGroup, GroupKind, RankLayout, RankLayoutParts, RegionSpec};
pub use tensor::{Axis, Granularity, HeadShard, Role, Tensor, TensorKey, TokenShard, Window};
