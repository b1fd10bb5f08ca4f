//! Geometries of well-known models.

use super::dtype::Dtype;
use super::geometry::{
    AttentionGeometry, ConvPart, IndexGeometry, IndexScales, LayerKind, MlaGeometry, ModelGeometry,
    SsmGeometry, StateGeometry,
};
use super::tensor::Window;
use crate::{Error, Result};

/// Makes a preset's layers.
type Make = fn() -> Vec<LayerKind>;

const TABLE: &[(&str, Make)] = &[
    ("deepseek-v3", || deepseek(None)),
    ("deepseek-v3.2", || deepseek(Some(INDEX))),
    ("gemma-3-27b", || attention(62, 16, 128, gemma_window)),
    ("gemma-3-4b", || attention(34, 4, 256, gemma_window)),
    ("gpt-oss-20b", || {
        attention(24, 8, 64, |layer| match layer % 2 {
            0 => Window::Sliding(128),
            _ => Window::Full,
        })
    }),
    ("llama-3.1-70b", || attention(80, 8, 128, |_| Window::Full)),
    ("llama-3.1-8b", || attention(32, 8, 128, |_| Window::Full)),
    ("llama-4-scout", || {
        attention(48, 8, 128, |layer| match (layer + 1) % 4 {
            0 => Window::Full,
            _ => Window::Chunked(8192),
        })
    }),
    ("mixtral-8x7b", || attention(32, 8, 128, |_| Window::Full)),
    ("nemotron-h-8b", nemotron),
    ("qwen3-30b-a3b", || attention(48, 4, 128, |_| Window::Full)),
    ("qwen3-8b", || attention(36, 8, 128, |_| Window::Full)),
    ("qwen3-next-80b-a3b", qwen3_next),
];

const NAMES: [&str; TABLE.len()] = {
    let mut names = [""; TABLE.len()];
    let mut at = 0;
    while at < names.len() {
        names[at] = TABLE[at].0;
        at += 1;
    }
    names
};

/// DeepSeek-V3.2's index.
const INDEX: IndexGeometry = IndexGeometry {
    dim: 128,
    dtype: Dtype::Fp8E4m3,
    scales: Some(IndexScales { dim: 1, dtype: Dtype::F32 }),
};

impl ModelGeometry {
    /// The names of all presets, in order.
    pub const PRESETS: &'static [&'static str] = &NAMES;

    /// The geometry of a well-known model, by its name: what its `config.json` says, in bf16.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`](crate::ErrorKind::Config), listing all names, when there is no preset of this one.
    pub fn preset(name: &str) -> Result<Self> {
        let Some((name, make)) = TABLE.iter().find(|(known, _)| *known == name) else {
            return Err(Error::config("preset", format!("no preset is called {name:?}"))
                .with_remedy(format!("use one of {}", Self::PRESETS.join(", "))));
        };
        Self::new(*name, make())
    }
}

fn attention(
    layers: u32,
    kv_heads: u32,
    head_dim: u32,
    window: impl Fn(u32) -> Window,
) -> Vec<LayerKind> {
    let shape = AttentionGeometry::new(kv_heads, head_dim, Dtype::Bf16);
    let layer = |layer| LayerKind::Attention(shape.clone().with_window(window(layer)));
    (0..layers).map(layer).collect()
}

const fn gemma_window(layer: u32) -> Window {
    match (layer + 1) % 6 {
        0 => Window::Full,
        _ => Window::Sliding(1024),
    }
}

fn deepseek(index: Option<IndexGeometry>) -> Vec<LayerKind> {
    let layer = MlaGeometry { latent_dim: 512 + 64, dtype: Dtype::Bf16, index };
    vec![LayerKind::Mla(layer); 61]
}

/// Letters as in a `config.json`: `M` keeps a state, `*` keys and values, `-` nothing.
const NEMOTRON: &str = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-";

/// States of 128 heads of 64 channels and 8 groups of 128.
fn nemotron() -> Vec<LayerKind> {
    let state = LayerKind::State(StateGeometry {
        conv: vec![
            ConvPart { heads: 128, channels: 64 },
            ConvPart { heads: 8, channels: 128 },
            ConvPart { heads: 8, channels: 128 },
        ],
        taps: 3,
        conv_dtype: Dtype::Bf16,
        ssm: Some(SsmGeometry { heads: 128, dim: 64 * 128, dtype: Dtype::F32 }),
    });
    let full = LayerKind::Attention(AttentionGeometry::new(8, 128, Dtype::Bf16));
    let kind = |letter| match letter {
        'M' => state.clone(),
        '*' => full.clone(),
        _ => LayerKind::Empty,
    };
    NEMOTRON.chars().map(kind).collect()
}

/// Gated delta nets of 16 key and 32 value heads of 128, and full attention in every fourth layer.
fn qwen3_next() -> Vec<LayerKind> {
    let state = LayerKind::State(StateGeometry {
        conv: vec![
            ConvPart { heads: 16, channels: 128 },
            ConvPart { heads: 16, channels: 128 },
            ConvPart { heads: 32, channels: 128 },
        ],
        taps: 3,
        conv_dtype: Dtype::Bf16,
        ssm: Some(SsmGeometry { heads: 32, dim: 128 * 128, dtype: Dtype::Bf16 }),
    });
    let full = LayerKind::Attention(AttentionGeometry::new(2, 256, Dtype::Bf16));
    let kind = |layer: u32| match (layer + 1) % 4 {
        0 => full.clone(),
        _ => state.clone(),
    };
    (0..48).map(kind).collect()
}
