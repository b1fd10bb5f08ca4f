//! What each layer of a model keeps in its cache, whatever engine runs it.

use serde::{Deserialize, Serialize};

use super::dtype::Dtype;
use super::tensor::Window;
use crate::{Error, Result};

mod change;
mod facts;
#[cfg(test)]
mod tests;

/// Most layers that a geometry may have.
pub(super) const MAX_LAYERS: usize = 1024;
/// Most heads of a layer.
const MAX_HEADS: u32 = 1 << 16;
/// Most elements of one head at one token, or of one head of a state.
const MAX_DIM: u32 = 1 << 20;
/// Most parts of a convolution state.
const MAX_CONV_PARTS: usize = 16;

/// A model's cache, layer by layer: heads, widths, element types and windows, before any engine has laid it out.
///
/// Checked when it is made: nothing is zero, nothing is larger than a cache can be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Unchecked", into = "Unchecked")]
pub struct ModelGeometry {
    name: String,
    layers: Vec<LayerKind>,
}

/// What one layer keeps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LayerKind {
    /// Keys and values.
    Attention(AttentionGeometry),
    /// The compressed latent of multi-head latent attention.
    Mla(MlaGeometry),
    /// The state of a state-space or linear-attention layer, one for a whole request.
    State(StateGeometry),
    /// Nothing: a layer without a cache, such as a feed-forward layer of a hybrid model.
    Empty,
}

/// Keys and values of one attention layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttentionGeometry {
    /// Key and value heads over all tensor parallel ranks.
    pub kv_heads: u32,
    /// Elements of a key of one head.
    pub key_dim: u32,
    /// Elements of a value of one head.
    pub value_dim: u32,
    /// Element type of keys and values.
    pub dtype: Dtype,
    /// Which tokens the layer needs.
    pub window: Window,
    /// Scales of quantized keys and values, where these are kept beside them.
    pub scales: Option<Scales>,
}

/// Scales of quantized keys and values: one for each key head and one for each value head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scales {
    /// Element type of a scale.
    pub dtype: Dtype,
    /// What one scale is for.
    pub per: ScalePer,
}

/// What one scale is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ScalePer {
    /// One head at one token.
    TokenHead,
    /// One head over all tokens of a kernel block.
    BlockHead,
}

/// The latent of one MLA layer. Every tensor parallel rank holds all of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MlaGeometry {
    /// Elements per token, rotary part included.
    pub latent_dim: u32,
    /// Element type. A packed format, whose bytes are moved as they are, is [`Dtype::U8`] with as many elements as it
    /// has bytes per token.
    pub dtype: Dtype,
    /// Keys of a sparse-attention index beside it.
    pub index: Option<IndexGeometry>,
}

/// Keys of a sparse-attention index (DeepSeek-V3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IndexGeometry {
    /// Elements per token.
    pub dim: u32,
    /// Element type.
    pub dtype: Dtype,
    /// Scales of quantized keys.
    pub scales: Option<IndexScales>,
}

/// Scales of the quantized keys of a sparse-attention index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IndexScales {
    /// Scales per token.
    pub dim: u32,
    /// Element type of a scale.
    pub dtype: Dtype,
}

/// The state of one state-space or linear-attention layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateGeometry {
    /// Parts of the convolution state, each of which tensor parallelism splits by itself. Mamba's are x, B and C, those
    /// of a gated delta net are query, key and value.
    pub conv: Vec<ConvPart>,
    /// Past inputs that the convolution keeps per channel: its kernel's width less one.
    pub taps: u32,
    /// Element type of the convolution state.
    pub conv_dtype: Dtype,
    /// The recurrent state.
    pub ssm: Option<SsmGeometry>,
}

/// One part of a convolution state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConvPart {
    /// What tensor parallelism deals out: heads of x, groups of B and C. Replicated where there are more ranks.
    pub heads: u32,
    /// Channels of each of them.
    pub channels: u32,
}

/// The recurrent state of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SsmGeometry {
    /// Heads over all tensor parallel ranks.
    pub heads: u32,
    /// Elements of one head.
    pub dim: u32,
    /// Element type.
    pub dtype: Dtype,
}

/// Form of a [`ModelGeometry`] before it is checked.
#[derive(Serialize, Deserialize)]
struct Unchecked {
    name: String,
    layers: Vec<LayerKind>,
}

impl TryFrom<Unchecked> for ModelGeometry {
    type Error = Error;

    fn try_from(unchecked: Unchecked) -> Result<Self> {
        Self::new(unchecked.name, unchecked.layers)
    }
}

impl From<ModelGeometry> for Unchecked {
    fn from(geometry: ModelGeometry) -> Self {
        Self { name: geometry.name, layers: geometry.layers }
    }
}

impl ModelGeometry {
    /// A model of these layers, in order.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`](crate::ErrorKind::Config), naming the layer and the field, when a count or width is zero or
    /// absurdly large, when there are no layers, or over 1,024.
    pub fn new(name: impl Into<String>, layers: Vec<LayerKind>) -> Result<Self> {
        if layers.is_empty() || layers.len() > MAX_LAYERS {
            return Err(Error::config(
                "geometry",
                format!("{} layers; there must be 1 to {MAX_LAYERS}", layers.len()),
            ));
        }
        for (index, kind) in layers.iter().enumerate() {
            kind.check().map_err(|error| error.with_context("layer", index))?;
        }
        Ok(Self { name: name.into(), layers })
    }

    /// A model whose `layers` layers all keep `kv_heads` heads of `head_dim` elements, with full attention.
    ///
    /// # Errors
    ///
    /// As for [`new`](Self::new).
    pub fn llama_like(layers: u32, kv_heads: u32, head_dim: u32, dtype: Dtype) -> Result<Self> {
        let layer = LayerKind::Attention(AttentionGeometry::new(kv_heads, head_dim, dtype));
        Self::new("llama-like", repeat(layer, layers))
    }

    /// A model whose `layers` layers all keep a latent of `latent_dim` elements per token.
    ///
    /// # Errors
    ///
    /// As for [`new`](Self::new).
    pub fn mla_like(layers: u32, latent_dim: u32, dtype: Dtype) -> Result<Self> {
        let layer = LayerKind::Mla(MlaGeometry { latent_dim, dtype, index: None });
        Self::new("mla-like", repeat(layer, layers))
    }

    /// The model's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Gives it another name.
    #[must_use]
    pub fn with_name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// What each layer keeps; a layer's number is its place here.
    #[must_use]
    pub fn layers(&self) -> &[LayerKind] {
        &self.layers
    }

    /// How many layers the model has, those without a cache included.
    #[must_use]
    pub fn num_layers(&self) -> u32 {
        // At most MAX_LAYERS.
        u32::try_from(self.layers.len()).unwrap_or(u32::MAX)
    }

    /// Bytes that one token takes in all layers that keep something per token, over all heads, each counted once. Scales
    /// per block and states are not counted.
    #[must_use]
    pub fn bytes_per_token(&self) -> u64 {
        self.layers.iter().map(LayerKind::bytes_per_token).sum()
    }

    /// Bytes of all layers' states, over all heads, each counted once.
    #[must_use]
    pub fn state_bytes(&self) -> u64 {
        self.layers.iter().map(LayerKind::state_bytes).sum()
    }
}

/// As many copies as asked for, but never far more than a geometry may have.
fn repeat(layer: LayerKind, count: u32) -> Vec<LayerKind> {
    vec![layer; (count as usize).min(MAX_LAYERS + 1)]
}

impl AttentionGeometry {
    /// Full attention with keys and values of `head_dim` elements and no scales.
    #[must_use]
    pub const fn new(kv_heads: u32, head_dim: u32, dtype: Dtype) -> Self {
        Self {
            kv_heads,
            key_dim: head_dim,
            value_dim: head_dim,
            dtype,
            window: Window::Full,
            scales: None,
        }
    }

    /// The same with another window.
    #[must_use]
    pub const fn with_window(mut self, window: Window) -> Self {
        self.window = window;
        self
    }
}

impl LayerKind {
    /// Its kind in one word.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Attention(_) => "attention",
            Self::Mla(_) => "mla",
            Self::State(_) => "state",
            Self::Empty => "empty",
        }
    }

    const fn attention(&self) -> Option<&AttentionGeometry> {
        match self {
            Self::Attention(attention) => Some(attention),
            _ => None,
        }
    }

    /// Which tokens the layer needs; `None` for layers that keep nothing per token.
    #[must_use]
    pub const fn window(&self) -> Option<Window> {
        match self {
            Self::Attention(attention) => Some(attention.window),
            Self::Mla(_) => Some(Window::Full),
            Self::State(_) | Self::Empty => None,
        }
    }

    fn bytes_per_token(&self) -> u64 {
        match self {
            Self::Attention(attention) => {
                let dims = u64::from(attention.key_dim) + u64::from(attention.value_dim);
                let scales = match attention.scales {
                    Some(Scales { dtype, per: ScalePer::TokenHead }) => 2 * dtype.bytes(),
                    _ => 0,
                };
                u64::from(attention.kv_heads) * (dims * attention.dtype.bytes() + scales)
            }
            Self::Mla(mla) => {
                let index = mla.index.map_or(0, |index| {
                    let scales = index
                        .scales
                        .map_or(0, |scales| u64::from(scales.dim) * scales.dtype.bytes());
                    u64::from(index.dim) * index.dtype.bytes() + scales
                });
                u64::from(mla.latent_dim) * mla.dtype.bytes() + index
            }
            Self::State(_) | Self::Empty => 0,
        }
    }

    fn state_bytes(&self) -> u64 {
        let Self::State(state) = self else { return 0 };
        let channels: u64 =
            state.conv.iter().map(|part| u64::from(part.heads) * u64::from(part.channels)).sum();
        let ssm = state
            .ssm
            .map_or(0, |ssm| u64::from(ssm.heads) * u64::from(ssm.dim) * ssm.dtype.bytes());
        channels * u64::from(state.taps) * state.conv_dtype.bytes() + ssm
    }

    fn check(&self) -> Result<()> {
        match self {
            Self::Attention(attention) => {
                bounded("kv_heads", attention.kv_heads, MAX_HEADS)?;
                bounded("key_dim", attention.key_dim, MAX_DIM)?;
                bounded("value_dim", attention.value_dim, MAX_DIM)?;
                match attention.window {
                    Window::Sliding(tokens) | Window::Chunked(tokens) => {
                        bounded("window", tokens, u32::MAX)
                    }
                    Window::Full => Ok(()),
                }
            }
            Self::Mla(mla) => {
                bounded("latent_dim", mla.latent_dim, MAX_DIM)?;
                if let Some(index) = mla.index {
                    bounded("index dim", index.dim, MAX_DIM)?;
                    if let Some(scales) = index.scales {
                        bounded("index scales", scales.dim, MAX_DIM)?;
                    }
                }
                Ok(())
            }
            Self::State(state) => state.check(),
            Self::Empty => Ok(()),
        }
    }
}

impl StateGeometry {
    fn check(&self) -> Result<()> {
        if self.conv.is_empty() && self.ssm.is_none() {
            return Err(Error::config("geometry", "a state of nothing"));
        }
        if self.conv.len() > MAX_CONV_PARTS {
            return Err(Error::config(
                "geometry",
                format!("{} parts of a conv state; the limit is {MAX_CONV_PARTS}", self.conv.len()),
            ));
        }
        for part in &self.conv {
            bounded("conv heads", part.heads, MAX_HEADS)?;
            bounded("conv channels", part.channels, u32::MAX / MAX_HEADS)?;
            bounded("conv taps", self.taps, MAX_DIM)?;
        }
        if let Some(ssm) = self.ssm {
            bounded("ssm heads", ssm.heads, MAX_HEADS)?;
            bounded("ssm dim", ssm.dim, MAX_DIM)?;
        }
        Ok(())
    }
}

fn bounded(field: &'static str, value: u32, most: u32) -> Result<()> {
    if value == 0 || value > most {
        return Err(Error::config(
            "geometry",
            format!("{field} is {value}; it must be 1 to {most}"),
        ));
    }
    Ok(())
}
