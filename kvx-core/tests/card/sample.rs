//! Cards to test with, and cards taken apart.

use kvx_core::card::{Address, Card, EngineName, Offer};
use kvx_core::config::BackendConfig;
use kvx_core::facts::Facts;
use kvx_core::handshake::HandshakeBytes;
use kvx_core::id::Incarnation;
use kvx_core::layout::{Grid, LayoutBuilder, ModelGeometry, NamedLayout, RankCoords, RankLayout};
use kvx_core::memory::KeyBlob;
use serde_json::{Value, json};

pub(crate) fn layout(model: &ModelGeometry) -> RankLayout {
    let coords = RankCoords { grid: Grid::new(2, 1, 1).unwrap(), tp: 1, pp: 0, dp: 0 };
    LayoutBuilder::new(model, NamedLayout::FlashAttentionHnd).blocks(8).build(coords).unwrap()
}

pub(crate) fn facts() -> Facts {
    Facts::new()
        .with(Facts::MODEL, "Llama-3.1-8B")
        .and_then(|facts| facts.with(Facts::KV_DTYPE, "bf16"))
        .and_then(|facts| facts.with(Facts::ENGINE_VERSION, "0.32.1"))
        .and_then(|facts| facts.with(Facts::BLOCK_TOKENS, 16))
        .and_then(|facts| facts.with(Facts::LAYOUT, "flash-attention-hnd"))
        .and_then(|facts| facts.with_optional(Facts::REVISION, "0e9e39f"))
        .unwrap()
}

pub(crate) fn offer(backend: &str, keys: usize) -> Offer {
    let handshake = HandshakeBytes::new(vec![0xab; 12]).unwrap();
    let keys =
        (0..keys).map(|key| KeyBlob::new(vec![u8::try_from(key % 251).unwrap(); 9]).unwrap());
    Offer::new(backend, handshake, keys.collect()).unwrap()
}

pub(crate) fn card_of(model: &ModelGeometry) -> Card {
    let layout = layout(model);
    let regions = layout.regions().len();
    let options = BackendConfig::new().with("device", "mlx5_0");
    Card::new(
        EngineName::new("prefill-7").unwrap(),
        Incarnation::from_bytes(*b"0123456789abcdef"),
        "[2001:db8::7]:5600".parse::<Address>().unwrap(),
        facts(),
        layout,
    )
    .and_then(|card| card.with_offer(offer("ucx", regions).with_options(options)?))
    .and_then(|card| card.with_offer(offer("shm", regions)))
    .unwrap()
}

/// The card of a rank of a real model.
pub(crate) fn llama() -> Card {
    card_of(&ModelGeometry::preset("llama-3.1-8b").unwrap())
}

/// A card of few bytes.
pub(crate) fn small() -> Card {
    card_of(&ModelGeometry::llama_like(1, 2, 4, kvx_core::layout::Dtype::Bf16).unwrap())
}

/// A card as its parts, each of which can be changed before it becomes bytes again.
#[derive(Clone, Debug)]
pub(crate) struct Parts {
    pub(crate) magic: [u8; 8],
    pub(crate) version: u16,
    pub(crate) schemas: (u16, u16),
    pub(crate) reserved: u16,
    pub(crate) features: (u64, u64),
    pub(crate) head: Value,
    pub(crate) body: Value,
}

impl Parts {
    /// Written from the documentation of `kvx_core::card`, not from its code.
    pub(crate) fn of(card: &Card) -> Self {
        let identity = card.identity();
        let facts = card.facts().iter().map(|(name, fact)| {
            (name.into(), json!({"value": fact.value(), "required": fact.required()}))
        });
        let offers = card.offers().iter().map(|offer| {
            let keys = offer.keys().iter().map(|key| json!(key.as_bytes()));
            json!({
                "backend": offer.backend(),
                "handshake": offer.handshake().as_bytes(),
                "keys": keys.collect::<Value>(),
                "options": offer.options(),
            })
        });
        Self {
            magic: *b"KVX card",
            version: 1,
            schemas: (1, 1),
            reserved: 0,
            features: (0, 0),
            head: json!({
                "engine": identity.engine.as_str(),
                "incarnation": identity.incarnation.as_bytes(),
                "coords": identity.coords,
                "control": card.control().to_string(),
                "facts": Value::Object(facts.collect()),
            }),
            body: json!({"layout": card.layout(), "offers": offers.collect::<Value>()}),
        }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.bytes_with(&packed(&self.head), &packed(&self.body))
    }

    pub(crate) fn bytes_with(&self, head: &[u8], body: &[u8]) -> Vec<u8> {
        let length = |section: &[u8]| u32::try_from(section.len()).unwrap().to_le_bytes();
        [
            &self.magic[..],
            &self.version.to_le_bytes(),
            &self.schemas.0.to_le_bytes(),
            &self.schemas.1.to_le_bytes(),
            &self.reserved.to_le_bytes(),
            &self.features.0.to_le_bytes(),
            &self.features.1.to_le_bytes(),
            &length(head),
            &length(body),
            head,
            body,
        ]
        .concat()
    }
}

pub(crate) fn packed(value: &Value) -> Vec<u8> {
    rmp_serde::to_vec_named(value).unwrap()
}
