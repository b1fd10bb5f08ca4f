//! Models with multi-head latent attention.

use super::fields::{Fields, wrong};
use crate::Result;
use crate::layout::Dtype;
use crate::layout::geometry::{IndexGeometry, IndexScales, LayerKind, MlaGeometry};

/// Elements of an index key that share a scale.
const INDEX_SCALE_RUN: u32 = 128;

/// A latent and its rotary part in every layer.
pub(super) fn deepseek(fields: &Fields<'_>) -> Result<Vec<LayerKind>> {
    layers(fields, None)
}

/// The same with the keys of a sparse-attention index.
pub(super) fn deepseek_sparse(fields: &Fields<'_>) -> Result<Vec<LayerKind>> {
    let dim = fields.need("index_head_dim")?;
    let scales = IndexScales { dim: dim.div_ceil(INDEX_SCALE_RUN), dtype: Dtype::F32 };
    layers(fields, Some(IndexGeometry { dim, dtype: Dtype::Fp8E4m3, scales: Some(scales) }))
}

fn layers(fields: &Fields<'_>, index: Option<IndexGeometry>) -> Result<Vec<LayerKind>> {
    let (rank, rotary) = (fields.need("kv_lora_rank")?, fields.need("qk_rope_head_dim")?);
    let latent_dim = rank
        .checked_add(rotary)
        .ok_or_else(|| wrong("kv_lora_rank", format!("is {rank}, far too large")))?;
    let layer = LayerKind::Mla(MlaGeometry { latent_dim, dtype: fields.dtype()?, index });
    Ok(vec![layer; fields.layers(None)? as usize])
}
