//! The layouts that engines use, by name.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

pub(super) mod page;

/// How an engine lays the keys and values of a layer out in memory.
///
/// Shapes are written outermost axis first, as in memory: the last axis has the shortest stride. *Blocks* are the
/// kernel's, `tokens` is the tokens of one of them, `heads` those of the rank.
///
/// Layers without keys and values look the same under every name, but for the cross-layer ones, which put the pages of
/// all layers of a group side by side in each block:
///
/// - MLA: the latent is `[blocks, tokens, latent dims]`; a sparse index is a tensor of its own, in each block first all
///   keys `[tokens, index dims]` and then, where it has them, all scales.
/// - State: `[blocks, conv x | conv B | conv C | ssm]`; see [`ConvOrder`] for what is in a part of the convolution state.
///
/// Scales of quantized keys and values are tensors of their own, `[blocks, tokens, heads]` or, per block,
/// `[blocks, heads]`; in the cross-layer layouts they follow the values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum NamedLayout {
    /// `[2, blocks, tokens, heads, dims]`: keys and values apart. SGLang's `MHATokenToKVPool`, and vLLM with FlashAttention
    /// before it packed keys and values.
    FlashAttentionNhd,
    /// `[2, blocks, heads, tokens, dims]`: keys and values apart, heads outside. The same vLLM with
    /// `VLLM_KV_CACHE_LAYOUT=HND`, which its transfers between different tensor parallel sizes want.
    FlashAttentionHnd,
    /// `[blocks, 2, tokens, heads, dims]`: keys and values in one block. FlashInfer and vLLM's Triton attention.
    FlashInferNhd,
    /// `[blocks, 2, heads, tokens, dims]`: keys and values in one block, heads outside. FlashInfer, which wants it on
    /// Blackwell GPUs.
    FlashInferHnd,
    /// `[blocks, tokens, heads, key dims | value dims]`: a head's key and value side by side. vLLM with FlashAttention
    /// since it packs keys and values.
    PackedNhd,
    /// `[blocks, heads, tokens, key dims | value dims]`: the same with heads outside.
    PackedHnd,
    /// `[blocks, tokens, 2 * heads, dims]`: keys and values of a token take turns, head by head. vLLM on TPU
    /// (`tpu-inference`), where a row is padded to a multiple of 128 elements, and the rows of a token to as many as fill
    /// 4-byte lanes. Heads of 64 elements are `[blocks, tokens, heads, key dims | value dims]` instead. This is the order
    /// of the array's elements; how a TPU tiles an array in its own memory is its own business.
    Pallas,
    /// `[blocks, layers, 2, tokens, heads, dims]`: all layers of a block together. vLLM's uniform cross-layer cache.
    CrossLayerNhd,
    /// `[blocks, heads, layers, 2, tokens, dims]`: all layers of a block together, heads outside, so that a head of a
    /// block is one run over all layers. vLLM's uniform cross-layer cache under `VLLM_KV_CACHE_LAYOUT=HND`.
    CrossLayerHnd,
    /// `[blocks, layers, tokens, heads, key dims | value dims]`: vLLM's uniform cross-layer cache with packed rows.
    CrossLayerPackedNhd,
    /// `[blocks, heads, layers, tokens, key dims | value dims]`: the same with heads outside.
    CrossLayerPackedHnd,
    /// `[blocks, heads, keys [dims][tokens] | values [tokens][dims]]`: keys transposed. vLLM 0.32 on CPU.
    CpuTransposed,
}

impl NamedLayout {
    /// All of them.
    pub const ALL: [Self; 12] = [
        Self::FlashAttentionNhd,
        Self::FlashAttentionHnd,
        Self::FlashInferNhd,
        Self::FlashInferHnd,
        Self::PackedNhd,
        Self::PackedHnd,
        Self::Pallas,
        Self::CrossLayerNhd,
        Self::CrossLayerHnd,
        Self::CrossLayerPackedNhd,
        Self::CrossLayerPackedHnd,
        Self::CpuTransposed,
    ];

    /// Its name, as it is read and printed.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::FlashAttentionNhd => "flash-attention-nhd",
            Self::FlashAttentionHnd => "flash-attention-hnd",
            Self::FlashInferNhd => "flash-infer-nhd",
            Self::FlashInferHnd => "flash-infer-hnd",
            Self::PackedNhd => "packed-nhd",
            Self::PackedHnd => "packed-hnd",
            Self::Pallas => "pallas",
            Self::CrossLayerNhd => "cross-layer-nhd",
            Self::CrossLayerHnd => "cross-layer-hnd",
            Self::CrossLayerPackedNhd => "cross-layer-packed-nhd",
            Self::CrossLayerPackedHnd => "cross-layer-packed-hnd",
            Self::CpuTransposed => "cpu-transposed",
        }
    }

    /// Whether it puts all layers of a block together.
    #[must_use]
    pub const fn is_cross_layer(self) -> bool {
        matches!(self, Self::CrossLayerNhd | Self::CrossLayerPackedNhd)
            || self.is_cross_layer_with_heads_outside()
    }

    pub(super) const fn is_cross_layer_with_heads_outside(self) -> bool {
        matches!(self, Self::CrossLayerHnd | Self::CrossLayerPackedHnd)
    }
}

impl fmt::Display for NamedLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Reads the kebab-case names, and `nhd` and `hnd` for FlashAttention's.
impl FromStr for NamedLayout {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let name = match text.to_ascii_lowercase().as_str() {
            "nhd" => "flash-attention-nhd".into(),
            "hnd" => "flash-attention-hnd".into(),
            name => name.to_owned(),
        };
        Self::ALL.into_iter().find(|layout| layout.as_str() == name).ok_or_else(|| {
            let known: Vec<_> = Self::ALL.iter().map(|layout| layout.as_str()).collect();
            Error::config("layout", format!("no layout is called {text:?}"))
                .with_remedy(format!("use nhd, hnd or one of {}", known.join(", ")))
        })
    }
}

/// What is side by side in one part of a convolution state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum ConvOrder {
    /// `[channels, taps]`: the taps of a channel; each part is one run. vLLM's order for transfers (`DS`).
    #[default]
    ChannelsOutside,
    /// `[taps, channels of x | B | C]`: the channels of all parts at one tap. vLLM's order for its kernels (`SD`).
    TapsOutside,
}
