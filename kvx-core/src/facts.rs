//! What must be equal on both sides: a model's facts, name by name.
//!
//! Two engines can only exchange a cache if it means the same to both. A layout says where elements lie; it does not say
//! that both sides loaded the same weights. [`Facts`] does, and where two sides differ, [`Facts::check`] names every fact
//! and both values, before a byte moves.
//!
//! A fact that both sides state must be equal. A fact that only one side states is refused where that side says that it is
//! *required*, and ignored where not. So a newer engine may state a fact that an older one has never heard of, and decides
//! itself whether an engine that cannot confirm it will do.
//!
//! [`ModelGeometry::facts`](crate::layout::ModelGeometry::facts) states what a geometry tells; add the
//! [model](Facts::MODEL) and, where it is known, its [revision](Facts::REVISION).

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::wire::{self, Text};
use crate::{Error, ErrorKind, Result};

#[cfg(test)]
mod tests;

/// The facts of one side. See the [module documentation](self).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    facts: BTreeMap<Name, Fact>,
}

type Name = Text<{ Facts::MAX_NAME_BYTES }>;
type Value = Text<{ Facts::MAX_VALUE_BYTES }>;

/// One fact's value, and what its absence on the other side means.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fact {
    value: Value,
    required: bool,
}

impl Fact {
    /// Its value.
    #[must_use]
    pub fn value(&self) -> &str {
        self.value.as_str()
    }

    /// Whether the other side must state it, too.
    #[must_use]
    pub const fn required(&self) -> bool {
        self.required
    }
}

impl Facts {
    /// Name of the model, as both engines call it.
    pub const MODEL: &'static str = "model";
    /// Revision or digest of the weights.
    pub const REVISION: &'static str = "revision";
    /// Element type of the cache: [`Dtype::as_str`](crate::layout::Dtype::as_str).
    pub const KV_DTYPE: &'static str = "kv_dtype";
    /// Layers of the whole model.
    pub const LAYERS: &'static str = "layers";
    /// KV heads of a layer, over all ranks.
    pub const KV_HEADS: &'static str = "kv_heads";
    /// Elements of one head at one token.
    pub const HEAD_DIM: &'static str = "head_dim";
    /// Quantization of the weights, which changes what is in the cache.
    pub const QUANTIZATION: &'static str = "quantization";
    /// Version of the engine's program, where an engine insists on the same.
    pub const ENGINE_VERSION: &'static str = "engine_version";
    /// Tokens per block, where an engine insists on the same. kvx itself does not.
    pub const BLOCK_TOKENS: &'static str = "block_tokens";
    /// Name of the layout, where an engine insists on the same. kvx itself does not.
    pub const LAYOUT: &'static str = "layout";

    /// Most facts that one side may state.
    pub const MAX_COUNT: usize = 64;
    /// Most bytes of a fact's name.
    pub const MAX_NAME_BYTES: usize = 64;
    /// Most bytes of a fact's value.
    pub const MAX_VALUE_BYTES: usize = 512;

    /// None.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// States a fact that the other side must state, too. A fact that was stated before is replaced.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`]: the name is empty, name or value is too long or has control characters, or there are
    /// [`MAX_COUNT`](Self::MAX_COUNT) facts already.
    pub fn with(self, name: &str, value: impl fmt::Display) -> Result<Self> {
        self.state(name, &value, true)
    }

    /// States a fact that the other side may leave out.
    ///
    /// # Errors
    ///
    /// As for [`with`](Self::with).
    pub fn with_optional(self, name: &str, value: impl fmt::Display) -> Result<Self> {
        self.state(name, &value, false)
    }

    fn state(mut self, name: &str, value: &dyn fmt::Display, required: bool) -> Result<Self> {
        let shown = wire::printable(name);
        let refuse = |error: Error| error.with_kind(ErrorKind::Config).with_context("fact", &shown);
        if name.is_empty() {
            return Err(Error::config("facts", "a fact without a name"));
        }
        let key = Name::new(name).map_err(refuse)?;
        let value = Value::new(value.to_string()).map_err(refuse)?;
        if self.facts.len() == Self::MAX_COUNT && !self.facts.contains_key(&key) {
            return Err(Error::config("facts", "too many facts")
                .with_context("limit", Self::MAX_COUNT)
                .with_context("fact", shown));
        }
        self.facts.insert(key, Fact { value, required });
        Ok(self)
    }

    /// The value of a fact, if it is stated.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        let key = Name::new(name).ok()?;
        self.facts.get(&key).map(Fact::value)
    }

    /// All facts, sorted by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Fact)> {
        self.facts.iter().map(|(name, fact)| (name.as_str(), fact))
    }

    /// Whether a cache means the same to both sides.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`], naming every fact that differs, with both values; the first by name is its
    /// [mismatch](Error::as_mismatch).
    pub fn check(producer: &Self, consumer: &Self) -> Result<()> {
        let mut names: Vec<&Name> = producer.facts.keys().chain(consumer.facts.keys()).collect();
        names.sort_unstable();
        names.dedup();
        let mut refusal: Option<Error> = None;
        for name in names {
            let (left, right) = (producer.facts.get(name), consumer.facts.get(name));
            let agree = match (left, right) {
                (Some(left), Some(right)) => left.value == right.value,
                (Some(only), None) | (None, Some(only)) => !only.required,
                (None, None) => true,
            };
            if agree {
                continue;
            }
            let text = |fact: Option<&Fact>| fact.map_or("nothing", Fact::value).to_owned();
            refusal = Some(match refusal {
                None => Error::mismatch("facts", name.to_string(), text(left), text(right))
                    .with_kind(ErrorKind::Config)
                    .with_remedy("both engines must serve the same model in the same format"),
                Some(first) => first.with_context(
                    "also",
                    format!("{name}: producer has {}, consumer has {}", text(left), text(right)),
                ),
            });
        }
        refusal.map_or(Ok(()), Err)
    }
}

impl Serialize for Facts {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.facts.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Facts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        use serde::de::Error as _;
        let facts = wire::map::<_, Name, Fact, { Self::MAX_COUNT }>(deserializer)?;
        if facts.keys().any(|name| name.as_str().is_empty()) {
            return Err(D::Error::custom("a fact without a name"));
        }
        Ok(Self { facts })
    }
}
