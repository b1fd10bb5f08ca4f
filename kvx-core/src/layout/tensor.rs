//! One tensor of a rank's cache, as a named-axis strided view.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::dtype::Dtype;

/// What a tensor holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Role {
    /// Attention keys.
    Key,
    /// Attention values.
    Value,
    /// The compressed latent of multi-head latent attention (MLA), rotary part included.
    Latent,
    /// Keys of a sparse-attention index (DeepSeek-V3.2's indexer), of another width than the latent.
    IndexKey,
    /// Scales of a quantized sparse-attention index.
    IndexScale,
    /// Scales of quantized keys.
    KeyScale,
    /// Scales of quantized values.
    ValueScale,
    /// Scales of a quantized latent.
    LatentScale,
    /// One part of a convolution state. Mamba's is x, B, C in this order: parts 0, 1, 2, which split separately under
    /// tensor parallelism.
    ConvState(u8),
    /// The recurrent state of a state-space or linear-attention layer.
    SsmState,
    /// Anything else that a request carries once: first token, log-probabilities, hidden states.
    Aux(u16),
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Key => f.write_str("K"),
            Self::Value => f.write_str("V"),
            Self::Latent => f.write_str("latent"),
            Self::IndexKey => f.write_str("index_key"),
            Self::IndexScale => f.write_str("index_scale"),
            Self::KeyScale => f.write_str("K_scale"),
            Self::ValueScale => f.write_str("V_scale"),
            Self::LatentScale => f.write_str("latent_scale"),
            Self::ConvState(part) => write!(f, "conv_state.{part}"),
            Self::SsmState => f.write_str("ssm_state"),
            Self::Aux(item) => write!(f, "aux.{item}"),
        }
    }
}

/// Extent and byte stride of one axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Axis {
    /// How many positions the axis has. At least 1.
    pub extent: u32,
    /// Distance between two neighbouring positions, in bytes. Without meaning where the extent is 1.
    pub stride: u64,
}

impl Axis {
    /// An axis of `extent` positions, `stride` bytes apart.
    #[must_use]
    pub const fn new(extent: u32, stride: u64) -> Self {
        Self { extent, stride }
    }

    /// Bytes from the first position to the last.
    #[must_use]
    pub const fn reach(self) -> Option<u64> {
        self.stride.checked_mul((self.extent as u64).saturating_sub(1))
    }
}

/// What one position of a tensor's token axis is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Granularity {
    /// One token. The token axis is as long as the group's kernel block.
    Token,
    /// A whole block, or a whole state: the token axis has one position. Scales kept per block and all tensors of a
    /// state group are so.
    Block,
}

/// Which tokens a layer needs, once a request has `n` tokens in its cache.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Window {
    /// All of them.
    #[default]
    Full,
    /// Sliding window of this many tokens, the next one included: tokens `n + 1 - w ..`.
    Sliding(u32),
    /// Chunked local attention (Llama 4): the tokens since the last multiple of the chunk.
    Chunked(u32),
}

impl Window {
    /// The first token that the layer still needs when its cache holds `tokens` tokens.
    #[must_use]
    pub const fn first_needed(self, tokens: u64) -> u64 {
        match self {
            Self::Full => 0,
            Self::Sliding(window) => tokens.saturating_add(1).saturating_sub(window as u64),
            Self::Chunked(chunk) => tokens - tokens % chunk as u64,
        }
    }
}

impl fmt::Display for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str("full"),
            Self::Sliding(window) => write!(f, "sliding {window}"),
            Self::Chunked(chunk) => write!(f, "chunked {chunk}"),
        }
    }
}

/// Which of a layer's heads a tensor holds: `first .. first + head.extent` of `total`.
///
/// For a latent there is one head, held by every rank. For a state, heads are whatever tensor parallelism splits:
/// channels of a convolution state's part, heads of an SSM state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct HeadShard {
    /// First global head held.
    pub first: u32,
    /// Heads that the layer has over all ranks, each counted once.
    pub total: u32,
}

/// Which of a request's tokens a tensor holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum TokenShard {
    /// All of them.
    #[default]
    All,
    /// Context parallelism: runs of `run` tokens dealt out in turn to `ranks` ranks, this being number `rank`.
    Interleaved {
        /// Tokens per run.
        run: u32,
        /// Ranks that share the tokens.
        ranks: u32,
        /// Which of them this is.
        rank: u32,
    },
}

/// One tensor of a rank's cache: where each of its logical elements lies.
///
/// The element (block, token, head, dim) lies at `base + block * block.stride + token * token.stride + head *
/// head.stride + dim * dim.stride` of its region. Block is the kernel's block id, token the position in that block,
/// head counts from [`HeadShard::first`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tensor {
    /// Global layer, counted over the whole model (not over a pipeline stage).
    pub layer: u32,
    /// What it holds.
    pub role: Role,
    /// Element type.
    pub dtype: Dtype,
    /// Cache group it belongs to: index into [`RankLayout::groups`](super::RankLayout::groups).
    pub group: u32,
    /// Region it lies in: index into [`RankLayout::regions`](super::RankLayout::regions).
    pub region: u32,
    /// Offset of its first element in the region, in bytes.
    pub base: u64,
    /// Kernel blocks.
    pub block: Axis,
    /// Positions in a kernel block.
    pub token: Axis,
    /// Heads held by this rank.
    pub head: Axis,
    /// Elements of one head at one token.
    pub dim: Axis,
    /// Which heads those are.
    pub heads: HeadShard,
    /// What one position of the token axis is.
    pub granularity: Granularity,
    /// Which tokens its layer needs.
    pub window: Window,
    /// Which tokens it holds.
    pub tokens: TokenShard,
    /// It has no counterpart on the other side and is never transferred (a draft model's layer, for example). Any other
    /// tensor without a counterpart is refused.
    pub local_only: bool,
}

impl Tensor {
    /// Layer and role, which together name a tensor across ranks and engines.
    #[must_use]
    pub const fn key(&self) -> TensorKey {
        TensorKey { layer: self.layer, role: self.role }
    }

    /// Global heads that it holds.
    #[must_use]
    pub const fn head_range(&self) -> Range<u32> {
        self.heads.first..self.heads.first.saturating_add(self.head.extent)
    }

    /// Bytes from its first to one past its last element, over all blocks; `None` where that overflows.
    #[must_use]
    pub fn span(&self) -> Option<u64> {
        self.block_span()?.checked_add(self.block.reach()?)
    }

    /// Bytes from the first to one past the last element of one block; `None` where that overflows.
    #[must_use]
    pub fn block_span(&self) -> Option<u64> {
        self.token
            .reach()?
            .checked_add(self.head.reach()?)?
            .checked_add(self.dim.reach()?)?
            .checked_add(self.dtype.bytes())
    }

    /// Bytes of data in one kernel block, padding not counted.
    #[must_use]
    pub fn block_bytes(&self) -> u64 {
        u64::from(self.token.extent)
            * u64::from(self.head.extent)
            * u64::from(self.dim.extent)
            * self.dtype.bytes()
    }
}

/// Layer and role: what names a tensor across ranks and engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TensorKey {
    /// Global layer.
    pub layer: u32,
    /// What the tensor holds.
    pub role: Role,
}

impl fmt::Display for TensorKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "layer {} {}", self.layer, self.role)
    }
}
