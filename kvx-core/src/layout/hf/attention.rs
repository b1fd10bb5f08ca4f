//! Models whose layers all keep keys and values.

use super::fields::{Fields, quote, wrong};
use crate::Result;
use crate::layout::Window;
use crate::layout::geometry::{AttentionGeometry, LayerKind};

/// Reads heads and widths. `heads`, `kv_heads` and `head_dim` are what the model's family takes where the file has
/// nothing; without a width of its own a head has its share of `hidden_size`.
pub(super) fn shape(
    fields: &Fields<'_>,
    heads: Option<u32>,
    kv_heads: Option<u32>,
    head_dim: Option<u32>,
) -> Result<AttentionGeometry> {
    let heads = match (fields.count("num_attention_heads")?, heads) {
        (Some(heads), _) | (None, Some(heads)) => heads,
        (None, None) => fields.need("num_attention_heads")?,
    };
    let kv_heads = fields.count_or("num_key_value_heads", kv_heads.unwrap_or(heads))?;
    if !heads.is_multiple_of(kv_heads) {
        return Err(wrong(
            "num_key_value_heads",
            format!("is {kv_heads}, which does not divide num_attention_heads, {heads}"),
        ));
    }
    let head_dim = match fields.count("head_dim")?.or(head_dim) {
        Some(dim) => dim,
        None => {
            let hidden = fields.need("hidden_size")?;
            if !hidden.is_multiple_of(heads) {
                return Err(wrong(
                    "hidden_size",
                    format!(
                        "is {hidden}, which num_attention_heads, {heads}, does not divide, and there is no head_dim"
                    ),
                ));
            }
            hidden / heads
        }
    };
    Ok(AttentionGeometry::new(kv_heads, head_dim, fields.dtype()?))
}

/// One layer of `shape` for each of `windows`.
fn layers(shape: &AttentionGeometry, windows: impl IntoIterator<Item = Window>) -> Vec<LayerKind> {
    let layer = |window| LayerKind::Attention(shape.clone().with_window(window));
    windows.into_iter().map(layer).collect()
}

/// Windows by `layer_types`, where the file has them; else by `default`, which says whether a layer has `window`.
fn windows(
    fields: &Fields<'_>,
    count: u32,
    window: impl Fn() -> Result<Window>,
    default: impl Fn(u32) -> bool,
) -> Result<Vec<Window>> {
    let Some(names) = fields.names("layer_types", count)? else {
        return (0..count)
            .map(|layer| if default(layer) { window() } else { Ok(Window::Full) })
            .collect();
    };
    names
        .into_iter()
        .map(|name| match name {
            "full_attention" => Ok(Window::Full),
            "sliding_attention" | "chunked_attention" => window(),
            _ => Err(wrong(
                "layer_types",
                format!("holds {}, an unknown kind of layer", quote(name)),
            )),
        })
        .collect()
}

/// Full attention, unless `layer_types` say otherwise: a `sliding_window` alone means nothing here.
pub(super) fn llama(fields: &Fields<'_>) -> Result<Vec<LayerKind>> {
    let shape = shape(fields, None, None, None)?;
    let sliding = || fields.need("sliding_window").map(Window::Sliding);
    Ok(layers(&shape, windows(fields, fields.layers(None)?, sliding, |_| false)?))
}

/// A sliding window in all layers, or in none.
pub(super) fn mistral(fields: &Fields<'_>) -> Result<Vec<LayerKind>> {
    let shape = shape(fields, None, None, None)?;
    let window = fields.count("sliding_window")?;
    let sliding = || fields.need("sliding_window").map(Window::Sliding);
    let windows = windows(fields, fields.layers(None)?, sliding, |_| window.is_some())?;
    Ok(layers(&shape, windows))
}

/// A sliding window from layer `max_window_layers` on, where `use_sliding_window` says so.
pub(super) fn qwen(fields: &Fields<'_>) -> Result<Vec<LayerKind>> {
    qwen_layers(fields, None)
}

/// As [`qwen`], with heads of 128 elements where nothing else is said.
pub(super) fn qwen3(fields: &Fields<'_>) -> Result<Vec<LayerKind>> {
    qwen_layers(fields, Some(128))
}

fn qwen_layers(fields: &Fields<'_>, head_dim: Option<u32>) -> Result<Vec<LayerKind>> {
    let shape = shape(fields, None, None, head_dim)?;
    let first = match fields.flag("use_sliding_window")? {
        true => fields.need("max_window_layers")?,
        false => u32::MAX,
    };
    let sliding = || fields.need("sliding_window").map(Window::Sliding);
    let windows = windows(fields, fields.layers(None)?, sliding, |layer| layer >= first)?;
    Ok(layers(&shape, windows))
}

/// Full attention, unless the file says layer by layer.
pub(super) fn qwen_moe(fields: &Fields<'_>) -> Result<Vec<LayerKind>> {
    let shape = shape(fields, None, None, None)?;
    let count = fields.layers(None)?;
    if fields.flag("use_sliding_window")? && fields.names("layer_types", count)?.is_none() {
        return Err(wrong("use_sliding_window", "is true, but no layer_types say in which layers"));
    }
    let sliding = || fields.need("sliding_window").map(Window::Sliding);
    Ok(layers(&shape, windows(fields, count, sliding, |_| false)?))
}

/// A sliding window in all layers but every sixth.
pub(super) fn gemma3(fields: &Fields<'_>) -> Result<Vec<LayerKind>> {
    let shape = shape(fields, Some(8), Some(4), Some(256))?;
    let pattern = match fields.count("sliding_window_pattern")? {
        Some(pattern) => pattern,
        None => fields.count_or("_sliding_window_pattern", 6)?,
    };
    let sliding = || fields.count_or("sliding_window", 4096).map(Window::Sliding);
    let windows = windows(fields, fields.layers(Some(26))?, sliding, |layer| {
        !(layer + 1).is_multiple_of(pattern)
    })?;
    Ok(layers(&shape, windows))
}

/// A sliding window in every second layer, beginning with the first.
pub(super) fn gpt_oss(fields: &Fields<'_>) -> Result<Vec<LayerKind>> {
    let shape = shape(fields, None, None, Some(64))?;
    let sliding = || fields.need("sliding_window").map(Window::Sliding);
    let windows = windows(fields, fields.layers(None)?, sliding, |layer| layer % 2 == 0)?;
    Ok(layers(&shape, windows))
}

/// Chunked attention in the layers with rotary positions, which are those whose entry of `no_rope_layers` is 1.
pub(super) fn llama4(fields: &Fields<'_>) -> Result<Vec<LayerKind>> {
    let shape = shape(fields, Some(40), Some(8), Some(128))?;
    let count = fields.layers(Some(48))?;
    let interval = fields.count_or("no_rope_layer_interval", 4)?;
    let rotary = fields.flags("no_rope_layers", count)?;
    let has_chunks = |layer: u32| match &rotary {
        Some(rotary) => rotary.get(layer as usize).copied().unwrap_or_default(),
        None => !(layer + 1).is_multiple_of(interval),
    };
    let chunk = || {
        if fields.is_null("attention_chunk_size") {
            return Ok(Window::Full);
        }
        fields.count_or("attention_chunk_size", 8192).map(Window::Chunked)
    };
    Ok(layers(&shape, windows(fields, count, chunk, has_chunks)?))
}
