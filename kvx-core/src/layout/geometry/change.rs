//! The same model, made smaller, larger or of another dtype.

use super::{AttentionGeometry, LayerKind, MAX_LAYERS, ModelGeometry, Scales};
use crate::Result;
use crate::layout::Dtype;

impl ModelGeometry {
    /// The same model with keys, values and latents of `dtype`, as with an engine's option for the cache's dtype. States
    /// and indexes keep theirs.
    #[must_use]
    pub fn with_dtype(mut self, new: Dtype) -> Self {
        for kind in &mut self.layers {
            match kind {
                LayerKind::Attention(attention) => attention.dtype = new,
                LayerKind::Mla(mla) => mla.dtype = new,
                LayerKind::State(_) | LayerKind::Empty => {}
            }
        }
        self
    }

    /// The same model with scales beside the keys and values of every attention layer, or with none.
    #[must_use]
    pub fn with_scales(mut self, new: Option<Scales>) -> Self {
        for attention in self.attention_mut() {
            attention.scales = new;
        }
        self
    }

    /// A model of the same kind with `layers` layers. Each kind of layer keeps its share of them, and at least one where
    /// there are as many layers as kinds; their order stays that of the model.
    ///
    /// # Errors
    ///
    /// As for [`new`](Self::new).
    pub fn with_layers(self, layers: u32) -> Result<Self> {
        let (layers, all) = ((layers as usize).min(MAX_LAYERS + 1), self.layers.len());
        let whole = self.layers.iter().cycle().take(layers / all * all);
        let kept = whole.cloned().chain(self.share(layers % all)).collect();
        Self::new(self.name, kept)
    }

    /// The same model with keys, values and latents of `dim` elements.
    ///
    /// # Errors
    ///
    /// As for [`new`](Self::new).
    pub fn with_head_dim(mut self, dim: u32) -> Result<Self> {
        for kind in &mut self.layers {
            match kind {
                LayerKind::Attention(attention) => {
                    (attention.key_dim, attention.value_dim) = (dim, dim);
                }
                LayerKind::Mla(mla) => mla.latent_dim = dim,
                LayerKind::State(_) | LayerKind::Empty => {}
            }
        }
        Self::new(self.name, self.layers)
    }

    /// The same model with `heads` key and value heads in every attention layer.
    ///
    /// # Errors
    ///
    /// As for [`new`](Self::new).
    pub fn with_kv_heads(mut self, heads: u32) -> Result<Self> {
        for attention in self.attention_mut() {
            attention.kv_heads = heads;
        }
        Self::new(self.name, self.layers)
    }

    fn attention_mut(&mut self) -> impl Iterator<Item = &mut AttentionGeometry> {
        self.layers.iter_mut().filter_map(|kind| match kind {
            LayerKind::Attention(attention) => Some(attention),
            _ => None,
        })
    }

    /// Fewer layers, in order: the first ones of each kind, as many as its share.
    fn share(&self, layers: usize) -> Vec<LayerKind> {
        let mut kinds: Vec<(&LayerKind, usize)> = Vec::new();
        for kind in &self.layers {
            match kinds.iter_mut().find(|(known, _)| *known == kind) {
                Some((_, count)) => *count += 1,
                None => kinds.push((kind, 1)),
            }
        }
        let all = self.layers.len();
        let mut quota: Vec<usize> = kinds
            .iter()
            .enumerate()
            .map(|(index, (_, count))| (layers * count / all).max(usize::from(index < layers)))
            .collect();
        while quota.iter().sum::<usize>() < layers {
            // To the kind that is furthest below its share; the first of these.
            let lack = |index: usize| (layers * kinds[index].1).saturating_sub(quota[index] * all);
            let most = (0..kinds.len()).rev().max_by_key(|index| lack(*index)).unwrap_or(0);
            quota[most] += 1;
        }
        while quota.iter().sum::<usize>() > layers {
            // From the kind that is furthest above its share and has more than one.
            let excess = |index: usize| match quota[index] {
                0 | 1 => 0,
                some => (some * all).saturating_sub(layers * kinds[index].1) + 1,
            };
            let most = (0..kinds.len()).rev().max_by_key(|index| excess(*index)).unwrap_or(0);
            quota[most] -= 1;
        }
        let mut kept = Vec::with_capacity(layers);
        for kind in &self.layers {
            let index = kinds.iter().position(|(known, _)| *known == kind).unwrap_or(0);
            if quota[index] > 0 {
                quota[index] -= 1;
                kept.push(kind.clone());
            }
        }
        kept
    }
}
