//! Models: tiny, so that many can be tried.

use kvx_core::layout::{
    AttentionGeometry, ConvPart, Dtype, IndexGeometry, IndexScales, LayerKind, MlaGeometry,
    ModelGeometry, ScalePer, Scales, SsmGeometry, StateGeometry, Window,
};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

fn dtype() -> impl Strategy<Value = Dtype> {
    prop_oneof![
        4 => Just(Dtype::Bf16),
        3 => Just(Dtype::Fp8E4m3),
        1 => Just(Dtype::F32),
        1 => Just(Dtype::F64),
    ]
}

fn window() -> impl Strategy<Value = Window> {
    prop_oneof![
        Just(Window::Full),
        (1_u32..14).prop_map(Window::Sliding),
        (1_u32..14).prop_map(Window::Chunked),
    ]
}

fn scales() -> impl Strategy<Value = Scales> {
    let per = prop_oneof![Just(ScalePer::TokenHead), Just(ScalePer::BlockHead)];
    (dtype(), per).prop_map(|(dtype, per)| Scales { dtype, per })
}

/// One layer: heads, widths of keys and values (equal more often than not), dtype.
fn attention_layer() -> impl Strategy<Value = AttentionGeometry> {
    let widths = prop_oneof![2 => (1_u32..5).prop_map(|dim| (dim, dim)), 1 => (1_u32..5, 1_u32..5)];
    (1_u32..7, widths, dtype()).prop_map(|(kv_heads, (key_dim, value_dim), dtype)| {
        AttentionGeometry { key_dim, value_dim, ..AttentionGeometry::new(kv_heads, key_dim, dtype) }
    })
}

fn latent_layer() -> impl Strategy<Value = MlaGeometry> {
    let scales =
        option::of((1_u32..3, dtype()).prop_map(|(dim, dtype)| IndexScales { dim, dtype }));
    let index =
        option::of((1_u32..5, dtype(), scales).prop_map(|(dim, dtype, scales)| IndexGeometry {
            dim,
            dtype,
            scales,
        }));
    (1_u32..8, dtype(), index).prop_map(|(latent_dim, dtype, index)| MlaGeometry {
        latent_dim,
        dtype,
        index,
    })
}

fn state_layer() -> impl Strategy<Value = StateGeometry> {
    let part = (1_u32..5, 1_u32..4).prop_map(|(heads, channels)| ConvPart { heads, channels });
    let ssm = (1_u32..5, 1_u32..6, dtype()).prop_map(|(heads, dim, dtype)| SsmGeometry {
        heads,
        dim,
        dtype,
    });
    (vec(part, 0..4), 1_u32..4, dtype(), option::weighted(0.8, ssm)).prop_map(
        |(conv, taps, conv_dtype, ssm)| {
            // A state of nothing is no state.
            let conv = if conv.is_empty() && ssm.is_none() {
                vec![ConvPart { heads: 1, channels: 1 }]
            } else {
                conv
            };
            StateGeometry { conv, taps, conv_dtype, ssm }
        },
    )
}

fn named(name: &'static str, layers: Vec<LayerKind>) -> ModelGeometry {
    ModelGeometry::new(name, layers).unwrap_or_else(|error| unreachable!("{error}"))
}

fn alike(layer: AttentionGeometry, layers: usize) -> Vec<LayerKind> {
    vec![LayerKind::Attention(layer); layers]
}

/// Keys and values with full attention, one to three layers alike.
pub fn attention() -> impl Strategy<Value = ModelGeometry> {
    (attention_layer(), 1_usize..4)
        .prop_map(|(layer, layers)| named("attention", alike(layer, layers)))
}

/// Keys and values, most layers with scales: per token and head, or per block and head.
pub fn quantized() -> impl Strategy<Value = ModelGeometry> {
    let scaled = vec(prop::bool::weighted(0.8), 1..4);
    (attention_layer(), scales(), scaled).prop_map(|(layer, scales, scaled)| {
        let layers = scaled.into_iter().map(|scaled| {
            let scales = scaled.then_some(scales);
            LayerKind::Attention(AttentionGeometry { scales, ..layer.clone() })
        });
        named("quantized", layers.collect())
    })
}

/// Keys and values, each layer with a window of its own: full, sliding or chunked.
pub fn windowed() -> impl Strategy<Value = ModelGeometry> {
    (attention_layer(), vec(window(), 1..5)).prop_map(|(layer, windows)| {
        let layers = windows
            .into_iter()
            .map(|window| LayerKind::Attention(AttentionGeometry { window, ..layer.clone() }));
        named("windowed", layers.collect())
    })
}

/// Latents (MLA), some with a sparse index.
pub fn latent() -> impl Strategy<Value = ModelGeometry> {
    vec(latent_layer().prop_map(LayerKind::Mla), 1..4).prop_map(|layers| named("latent", layers))
}

/// Layers of all kinds beside each other: attention with windows and scales, latents, states, and layers without a cache.
pub fn hybrid() -> impl Strategy<Value = ModelGeometry> {
    let attention = (attention_layer(), window(), option::weighted(0.2, scales())).prop_map(
        |(layer, window, scales)| {
            LayerKind::Attention(AttentionGeometry { window, scales, ..layer })
        },
    );
    let layer = prop_oneof![
        4 => attention,
        2 => latent_layer().prop_map(LayerKind::Mla),
        4 => state_layer().prop_map(LayerKind::State),
        1 => Just(LayerKind::Empty),
    ];
    vec(layer, 1..5).prop_map(|layers| named("hybrid", layers))
}

/// Any of these.
pub fn model() -> impl Strategy<Value = ModelGeometry> {
    prop_oneof![
        3 => attention(),
        2 => quantized(),
        3 => windowed(),
        2 => latent(),
        4 => hybrid(),
    ]
}
