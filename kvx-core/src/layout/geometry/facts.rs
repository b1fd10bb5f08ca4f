//! What two engines compare: facts about a geometry, one by one.

use std::fmt::Write as _;

use super::{LayerKind, ModelGeometry, ScalePer};
use crate::Result;
use crate::facts::Facts;
use crate::layout::Dtype;

impl ModelGeometry {
    /// Key and value heads, where all attention layers have as many.
    #[must_use]
    pub fn kv_heads(&self) -> Option<u32> {
        self.common(|kind| match kind {
            LayerKind::Attention(attention) => Some(attention.kv_heads),
            _ => None,
        })
    }

    /// Elements of a key per head, or of a latent, where all such layers have as many.
    #[must_use]
    pub fn head_dim(&self) -> Option<u32> {
        self.common(|kind| match kind {
            LayerKind::Attention(attention) => Some(attention.key_dim),
            LayerKind::Mla(mla) => Some(mla.latent_dim),
            _ => None,
        })
    }

    /// Element type of keys and values or latents, where it is the same in all layers.
    #[must_use]
    pub fn dtype(&self) -> Option<Dtype> {
        self.common(|kind| match kind {
            LayerKind::Attention(attention) => Some(attention.dtype),
            LayerKind::Mla(mla) => Some(mla.dtype),
            _ => None,
        })
    }

    fn common<T: PartialEq>(&self, fact: impl Fn(&LayerKind) -> Option<T>) -> Option<T> {
        let mut values = self.layers.iter().filter_map(fact);
        let first = values.next()?;
        values.all(|value| value == first).then_some(first)
    }

    /// All that two engines must agree on, field by field, so that a mismatch can be named. Two geometries have the same
    /// facts exactly where their layers are the same; the model's name is no part of it.
    ///
    /// A fact that differs from layer to layer is written as runs of layers: `5 x sliding 1024, 1 x full`. A layer to
    /// which a fact does not apply has `-`. A text that would be too long for a fact is cut, and ends with a digest of
    /// the whole.
    ///
    /// # Errors
    ///
    /// As for [`Facts::with`], but that does not happen: these facts are few and short.
    pub fn facts(&self) -> Result<Facts> {
        let facts = Facts::new().with(Facts::LAYERS, self.layers.len())?;
        FACTS.iter().try_fold(facts, |facts, (field, of)| {
            let values: Vec<_> = self.layers.iter().map(of).collect();
            match values.iter().any(Option::is_some) {
                true => facts.with(field, cut(runs(&values))),
                false => Ok(facts),
            }
        })
    }
}

/// A text that fits a fact. Different texts stay different, but for a chance of one in 2^64.
fn cut(text: String) -> String {
    /// Bytes of the digest and what stands before it.
    const DIGEST: usize = 20;
    if text.len() <= Facts::MAX_VALUE_BYTES {
        return text;
    }
    // FNV-1a.
    let digest = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |digest, byte| {
        (digest ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    // All of it is ASCII.
    let start: String = text.chars().take(Facts::MAX_VALUE_BYTES - DIGEST).collect();
    format!("{start}... {digest:016x}")
}

/// Reads one fact of one layer.
type Fact = fn(&LayerKind) -> Option<String>;

const FACTS: &[(&str, Fact)] = &[
    ("kind", |kind| Some(kind.name().into())),
    (Facts::KV_HEADS, |kind| Some(kind.attention()?.kv_heads.to_string())),
    (Facts::HEAD_DIM, |kind| Some(kind.attention()?.key_dim.to_string())),
    ("value_dim", |kind| Some(kind.attention()?.value_dim.to_string())),
    ("window", |kind| Some(kind.attention()?.window.to_string())),
    ("scales", |kind| {
        let scales = kind.attention()?.scales?;
        let per = match scales.per {
            ScalePer::TokenHead => "token and head",
            ScalePer::BlockHead => "block and head",
        };
        Some(format!("{} per {per}", scales.dtype))
    }),
    (Facts::KV_DTYPE, |kind| match kind {
        LayerKind::Attention(attention) => Some(attention.dtype.to_string()),
        LayerKind::Mla(mla) => Some(mla.dtype.to_string()),
        _ => None,
    }),
    ("latent_dim", |kind| match kind {
        LayerKind::Mla(mla) => Some(mla.latent_dim.to_string()),
        _ => None,
    }),
    ("index", |kind| match kind {
        LayerKind::Mla(mla) => {
            let index = mla.index?;
            let mut text = format!("{} of {}", index.dim, index.dtype);
            if let Some(scales) = index.scales {
                // Writing to a string cannot fail.
                let _ = write!(text, " with {} of {}", scales.dim, scales.dtype);
            }
            Some(text)
        }
        _ => None,
    }),
    ("conv_state", |kind| {
        let LayerKind::State(state) = kind else { return None };
        let parts: Vec<_> =
            state.conv.iter().map(|part| format!("{}x{}", part.heads, part.channels)).collect();
        Some(format!("{} by {} of {}", parts.join("+"), state.taps, state.conv_dtype))
    }),
    ("ssm_state", |kind| {
        let LayerKind::State(state) = kind else { return None };
        state.ssm.map(|ssm| format!("{}x{} of {}", ssm.heads, ssm.dim, ssm.dtype))
    }),
];

/// A value where all are the same, else runs of equal ones.
fn runs(values: &[Option<String>]) -> String {
    let text = |value: &Option<String>| value.clone().unwrap_or_else(|| "-".into());
    let mut all: Vec<(usize, String)> = Vec::new();
    for value in values.iter().map(text) {
        match all.last_mut() {
            Some((count, last)) if *last == value => *count += 1,
            _ => all.push((1, value)),
        }
    }
    match all.as_slice() {
        [(_, only)] => only.clone(),
        _ => {
            let all: Vec<_> =
                all.iter().map(|(count, value)| format!("{count} x {value}")).collect();
            all.join(", ")
        }
    }
}
