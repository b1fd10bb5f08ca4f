//! A whole rank's cache: regions, groups, tensors, and where the rank stands in its engine.

use serde::{Deserialize, Serialize};

use super::check;
use super::grid::RankCoords;
use super::tensor::{Tensor, TensorKey};
use crate::Result;
use crate::memory::MemoryKind;
use crate::wire;

/// Size and kind of one region of a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RegionSpec {
    /// Size in bytes.
    pub bytes: u64,
    /// What memory it is.
    pub memory: MemoryKind,
}

/// What the blocks of a cache group hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum GroupKind {
    /// Tokens: entry `i` of a block table holds tokens `i * block_tokens ..`.
    Attention,
    /// A state: the last entry of a request's block table holds it, the others are older or placeholders.
    State,
}

/// Layers that share a block table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CacheGroup {
    /// What its blocks hold.
    pub kind: GroupKind,
    /// Tokens per entry of a block table: the engine's *logical* block.
    pub block_tokens: u32,
    /// Tokens per block of the tensors: the attention *kernel's* block. Divides `block_tokens`; logical block `b` is
    /// kernel blocks `b * ratio ..` with `ratio = block_tokens / kernel_block_tokens`.
    pub kernel_block_tokens: u32,
    /// How many logical blocks there are: valid ids are below this.
    pub blocks: u32,
    /// Id that stands for "no block" in a table (vLLM: 0). Never read, never written.
    pub null_block: Option<u32>,
}

impl CacheGroup {
    /// Kernel blocks per logical block.
    #[must_use]
    pub const fn kernel_ratio(&self) -> u32 {
        self.block_tokens / self.kernel_block_tokens
    }
}

/// A rank's cache. Checked when it is made: every element of every tensor lies inside its region, no two elements of one
/// group share a byte, and no arithmetic on it can overflow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "RankLayoutParts", into = "RankLayoutParts")]
pub struct RankLayout {
    parts: RankLayoutParts,
}

/// The parts of a [`RankLayout`], not yet checked. This is also its form on the wire.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankLayoutParts {
    /// Where the rank stands in its engine.
    pub coords: RankCoords,
    /// Its regions.
    #[serde(deserialize_with = "wire::list::<_, _, { RankLayout::MAX_ITEMS }>")]
    pub regions: Vec<RegionSpec>,
    /// Its cache groups. Layers of different groups may lie in the same memory (each block is then used by one group at
    /// a time).
    #[serde(deserialize_with = "wire::list::<_, _, { RankLayout::MAX_ITEMS }>")]
    pub groups: Vec<CacheGroup>,
    /// Its tensors.
    #[serde(deserialize_with = "wire::list::<_, _, { RankLayout::MAX_ITEMS }>")]
    pub tensors: Vec<Tensor>,
}

impl RankLayout {
    /// Most regions, groups and tensors that a layout may have, each.
    pub const MAX_ITEMS: usize = 4096;

    /// Checks `parts` and makes a layout of them. Tensors are sorted by layer and role.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`](crate::ErrorKind::Config), naming the tensor and the field: an extent of zero, an element
    /// outside its region, two elements of a group at the same byte, axes that interleave, a token axis that is not as
    /// long as the group's kernel block, a tensor named twice, an index of a group or region that does not exist.
    pub fn new(mut parts: RankLayoutParts) -> Result<Self> {
        parts.tensors.sort_by_key(Tensor::key);
        check::check(&parts)?;
        Ok(Self { parts })
    }

    /// Where the rank stands in its engine.
    #[must_use]
    pub fn coords(&self) -> &RankCoords {
        &self.parts.coords
    }

    /// Its regions.
    #[must_use]
    pub fn regions(&self) -> &[RegionSpec] {
        &self.parts.regions
    }

    /// Its cache groups.
    #[must_use]
    pub fn groups(&self) -> &[CacheGroup] {
        &self.parts.groups
    }

    /// Its tensors, sorted by layer and role.
    #[must_use]
    pub fn tensors(&self) -> &[Tensor] {
        &self.parts.tensors
    }

    /// The tensor of this layer and role, if the rank holds one.
    #[must_use]
    pub fn tensor(&self, key: TensorKey) -> Option<&Tensor> {
        let tensors = self.tensors();
        tensors.binary_search_by_key(&key, Tensor::key).ok().map(|index| &tensors[index])
    }

    /// Takes it apart again, for example to change something and check it anew.
    #[must_use]
    pub fn into_parts(self) -> RankLayoutParts {
        self.parts
    }
}

impl TryFrom<RankLayoutParts> for RankLayout {
    type Error = crate::Error;

    fn try_from(parts: RankLayoutParts) -> Result<Self> {
        Self::new(parts)
    }
}

impl From<RankLayout> for RankLayoutParts {
    fn from(layout: RankLayout) -> Self {
        layout.parts
    }
}
