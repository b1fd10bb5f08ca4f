//! What two engines compare: facts about a geometry, one by one.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::{LayerKind, ModelGeometry, ScalePer};
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
    /// facts exactly where their layers are the same; the name is no part of it.
    ///
    /// A fact that differs from layer to layer is written as runs of layers: `5 x sliding 1024, 1 x full`. A layer to
    /// which a fact does not apply has `-`.
    #[must_use]
    pub fn facts(&self) -> BTreeMap<&'static str, String> {
        let mut facts = BTreeMap::from([("layers", self.layers.len().to_string())]);
        for &(field, of) in FACTS {
            let values: Vec<_> = self.layers.iter().map(of).collect();
            if values.iter().any(Option::is_some) {
                facts.insert(field, runs(&values));
            }
        }
        facts
    }
}

/// Reads one fact of one layer.
type Fact = fn(&LayerKind) -> Option<String>;

const FACTS: &[(&str, Fact)] = &[
    ("kind", |kind| Some(kind.name().into())),
    ("kv_heads", |kind| Some(kind.attention()?.kv_heads.to_string())),
    ("key_dim", |kind| Some(kind.attention()?.key_dim.to_string())),
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
    ("dtype", |kind| match kind {
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
