//! Hybrid models: some layers keep a state, others keys and values.

use super::attention::shape;
use super::fields::{Fields, quote, wrong};
use crate::layout::Dtype;
use crate::layout::geometry::{ConvPart, LayerKind, SsmGeometry, StateGeometry};
use crate::{Error, Result};

/// Mamba 2 layers, attention, and layers without a cache, as `hybrid_override_pattern` says letter by letter, or
/// `layers_block_type` name by name.
pub(super) fn nemotron_h(fields: &Fields<'_>) -> Result<Vec<LayerKind>> {
    let attention = shape(fields, None, None, fields.count("attention_head_dim")?)?;
    let heads = fields.need("mamba_num_heads")?;
    let head_dim = fields.need("mamba_head_dim")?;
    let (groups, size) = (fields.need("n_groups")?, fields.need("ssm_state_size")?);
    divides("n_groups", groups, "mamba_num_heads", heads)?;
    let state = LayerKind::State(StateGeometry {
        conv: vec![
            ConvPart { heads, channels: head_dim },
            ConvPart { heads: groups, channels: size },
            ConvPart { heads: groups, channels: size },
        ],
        taps: taps(fields, "conv_kernel")?,
        conv_dtype: fields.dtype()?,
        ssm: Some(SsmGeometry {
            heads,
            dim: product("mamba_head_dim", head_dim, size)?,
            dtype: ssm_dtype(fields)?.unwrap_or(Dtype::F32),
        }),
    });
    let attention = LayerKind::Attention(attention);
    if let Some(pattern) = fields.text("hybrid_override_pattern")? {
        return letters(fields, pattern, &state, &attention);
    }
    let field = "layers_block_type";
    let Some(names) = fields.names(field, fields.layers(fields.entries(field))?)? else {
        return Err(wrong("hybrid_override_pattern", "is missing, and so is layers_block_type"));
    };
    names
        .into_iter()
        .map(|name| match name {
            "mamba" => Ok(state.clone()),
            "attention" => Ok(attention.clone()),
            "mlp" | "moe" => Ok(LayerKind::Empty),
            _ => Err(wrong(field, format!("holds {}, an unknown kind of layer", quote(name)))),
        })
        .collect()
}

fn letters(
    fields: &Fields<'_>,
    pattern: &str,
    state: &LayerKind,
    attention: &LayerKind,
) -> Result<Vec<LayerKind>> {
    let field = "hybrid_override_pattern";
    let layers = fields.layers(u32::try_from(pattern.len()).ok())?;
    if pattern.chars().count() != layers as usize {
        return Err(wrong(
            field,
            format!("has {} letters for {layers} layers", pattern.chars().count()),
        ));
    }
    let kind = |letter| match letter {
        'M' => Ok(state.clone()),
        '*' => Ok(attention.clone()),
        '-' | 'E' => Ok(LayerKind::Empty),
        _ => Err(wrong(field, format!("holds {letter:?}, an unknown kind of layer"))),
    };
    pattern.chars().map(kind).collect()
}

/// Gated delta net layers, and full attention in every `full_attention_interval`th.
pub(super) fn qwen3_next(fields: &Fields<'_>) -> Result<Vec<LayerKind>> {
    let attention = LayerKind::Attention(shape(fields, None, None, None)?);
    let (keys, values) =
        (fields.need("linear_num_key_heads")?, fields.need("linear_num_value_heads")?);
    divides("linear_num_key_heads", keys, "linear_num_value_heads", values)?;
    let (key_dim, value_dim) =
        (fields.need("linear_key_head_dim")?, fields.need("linear_value_head_dim")?);
    let state = LayerKind::State(StateGeometry {
        conv: vec![
            ConvPart { heads: keys, channels: key_dim },
            ConvPart { heads: keys, channels: key_dim },
            ConvPart { heads: values, channels: value_dim },
        ],
        taps: taps(fields, "linear_conv_kernel_dim")?,
        conv_dtype: fields.dtype()?,
        ssm: Some(SsmGeometry {
            heads: values,
            dim: product("linear_key_head_dim", key_dim, value_dim)?,
            dtype: ssm_dtype(fields)?.map_or_else(|| fields.dtype(), Ok)?,
        }),
    });
    let layers = fields.layers(None)?;
    let Some(names) = fields.names("layer_types", layers)? else {
        let interval = fields.count_or("full_attention_interval", 4)?;
        let kind = |layer: u32| match (layer + 1) % interval {
            0 => attention.clone(),
            _ => state.clone(),
        };
        return Ok((0..layers).map(kind).collect());
    };
    let kind = |name| match name {
        "linear_attention" => Ok(state.clone()),
        "full_attention" => Ok(attention.clone()),
        _ => Err(wrong("layer_types", format!("holds {}, an unknown kind of layer", quote(name)))),
    };
    names.into_iter().map(kind).collect()
}

/// Past inputs that a convolution of this kernel width keeps.
fn taps(fields: &Fields<'_>, field: &str) -> Result<u32> {
    let width = fields.need(field)?;
    if width < 2 {
        return Err(wrong(field, "is 1: such a convolution keeps nothing"));
    }
    Ok(width - 1)
}

fn ssm_dtype(fields: &Fields<'_>) -> Result<Option<Dtype>> {
    let dtype = fields.dtype_of("mamba_ssm_cache_dtype")?;
    Ok(dtype.or(fields.dtype_of("mamba_ssm_dtype")?))
}

fn product(field: &str, a: u32, b: u32) -> Result<u32> {
    a.checked_mul(b).ok_or_else(|| wrong(field, format!("is {a}, far too large")))
}

fn divides(part: &str, parts: u32, whole: &str, count: u32) -> Result<(), Error> {
    if !count.is_multiple_of(parts) {
        return Err(wrong(part, format!("is {parts}, which does not divide {whole}, {count}")));
    }
    Ok(())
}
