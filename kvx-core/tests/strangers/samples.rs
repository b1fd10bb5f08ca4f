//! Cards, configurations and addresses as they should be: where mutation starts. They are also the seeds of the fuzz targets.

use kvx_core::card::{Address, Card, EngineName, FeatureSet, Features, Offer};
use kvx_core::config::BackendConfig;
use kvx_core::facts::Facts;
use kvx_core::handshake::HandshakeBytes;
use kvx_core::id::Incarnation;
use kvx_core::layout::{
    Dtype, Grid, LayoutBuilder, ModelGeometry, NamedLayout, RankLayout, RegionPolicy,
};
use kvx_core::memory::KeyBlob;

pub(crate) const HEAD_BYTES: usize = 32;
pub(crate) const BODY_BYTES: usize = 36;
pub(crate) const ENVELOPE: usize = 40;

pub(crate) fn length_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn card(layout: RankLayout, engine: &str, control: &str, backends: &[&str]) -> Card {
    let facts = Facts::new().with(Facts::MODEL, "a model").unwrap().with("b", 1).unwrap();
    let regions = layout.regions().len();
    let card = Card::new(
        EngineName::new(engine).unwrap(),
        Incarnation::from_bytes([7; 16]),
        control.parse::<Address>().unwrap(),
        facts.with_optional(Facts::REVISION, "0e9e39f").unwrap(),
        layout,
    );
    backends.iter().fold(card.unwrap(), |card, backend| {
        let keys = vec![KeyBlob::new(vec![1; 9]).unwrap(); regions];
        let offer = Offer::new(*backend, HandshakeBytes::new(vec![2; 12]).unwrap(), keys).unwrap();
        let options = BackendConfig::new().with("device", "mlx5_0");
        card.with_offer(offer.with_options(options).unwrap()).unwrap()
    })
}

/// The card of a rank of a small model with this layout.
pub(crate) fn small(named: NamedLayout) -> Vec<u8> {
    let model = ModelGeometry::llama_like(2, 2, 4, Dtype::Bf16).unwrap();
    let coords = Grid::new(1, 1, 1).unwrap().ranks().next().unwrap();
    let layout = LayoutBuilder::new(&model, named).blocks(8).build(coords).unwrap();
    card(layout, "prefill-7", "[::1]:5600", &["ucx"]).encode().unwrap()
}

/// A card of the last rank of so many, of the first layers of a preset.
fn preset(name: &str, layers: u32, (tp, pp): (u32, u32), regions: RegionPolicy) -> Card {
    let model = ModelGeometry::preset(name).unwrap().with_layers(layers).unwrap();
    let coords = Grid::new(tp, pp, 1).unwrap().ranks().last().unwrap();
    let layout = LayoutBuilder::new(&model, NamedLayout::FlashAttentionNhd)
        .blocks(8)
        .regions(regions)
        .group_by_window(true)
        .null_block(Some(0))
        .build(coords)
        .unwrap();
    card(layout, "decode-0", "decode-0.example:5600", &["shm", "ucx"])
}

/// Cards of every shape there is: layouts, models, ranks; without an offer and with several; with features, of a writer that
/// speaks later schemas, or only those.
pub(crate) fn cards() -> Vec<(String, Vec<u8>)> {
    let mut cards: Vec<(String, Vec<u8>)> =
        NamedLayout::ALL.into_iter().map(|named| (named.to_string(), small(named))).collect();
    let mut add = |name: &str, bytes: Vec<u8>| cards.push((name.to_owned(), bytes));
    for (name, layers, ranks, regions) in [
        ("deepseek-v3.2", 2, (2, 1), RegionPolicy::PerTensor),
        ("gpt-oss-20b", 2, (3, 1), RegionPolicy::PerLayer),
        ("llama-4-scout", 4, (1, 2), RegionPolicy::PerTensor),
        ("nemotron-h-8b", 8, (2, 1), RegionPolicy::PerLayer),
        ("qwen3-next-80b-a3b", 4, (1, 1), RegionPolicy::Single),
    ] {
        add(name, preset(name, layers, ranks, regions).encode().unwrap());
    }
    let features = Features {
        required: FeatureSet::from_bits(1 << 40),
        optional: FeatureSet::from_bits(1 << 63 | 1),
    };
    let plain = preset("llama-3.1-8b", 1, (8, 1), RegionPolicy::PerTensor);
    add("features", plain.clone().with_features(features).encode().unwrap());
    let plain = plain.encode().unwrap();
    let mut schemas = |name: &str, oldest: u16, newest: u16| {
        let mut bytes = plain.clone();
        bytes[10..12].copy_from_slice(&oldest.to_le_bytes());
        bytes[12..14].copy_from_slice(&newest.to_le_bytes());
        add(name, bytes);
    };
    schemas("schemas-1-to-9", 1, 9);
    schemas("schema-9", 9, 9);
    schemas("schema-0", 0, 1);
    for (name, length) in
        [("cut-in-magic", 5), ("cut-in-envelope", 33), ("cut-in-head", 90), ("cut-in-body", 400)]
    {
        add(name, plain[..length].to_vec());
    }
    cards
}

/// Those of [`cards`] that a reader of this version takes.
pub(crate) fn good_cards() -> Vec<Vec<u8>> {
    let bad = |name: &str| name.starts_with("cut-") || name == "schema-9" || name == "schema-0";
    cards().into_iter().filter(|(name, _)| !bad(name)).map(|(_, bytes)| bytes).collect()
}

/// Layouts as they stand in cards.
pub(crate) fn layouts() -> Vec<(String, Vec<u8>)> {
    let cards = cards().into_iter();
    cards
        .filter_map(|(name, bytes)| Some((name, Card::decode(&bytes).ok()?)))
        .map(|(name, card)| (name, kvx_core::wire::to_bytes("samples", card.layout()).unwrap()))
        .collect()
}

/// Configurations of several families.
pub(crate) fn configs() -> Vec<(String, Vec<u8>)> {
    let attention = r#""num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
        "hidden_size": 512, "torch_dtype": "bfloat16""#;
    [
        ("llama", format!(r#"{{"model_type": "llama", {attention}}}"#)),
        (
            "gemma3",
            format!(
                r#"{{"model_type": "gemma3", "text_config": {{{attention}, "sliding_window": 64,
                "layer_types": ["full_attention", "sliding_attention"]}}}}"#
            ),
        ),
        (
            "llama4",
            format!(
                r#"{{"model_type": "llama4_text", {attention}, "no_rope_layers": [0, 1], "attention_chunk_size": 64}}"#
            ),
        ),
        (
            "deepseek",
            r#"{"model_type": "deepseek_v32", "num_hidden_layers": 2, "kv_lora_rank": 100, "qk_rope_head_dim": 4,
                "index_head_dim": 128}"#
                .to_owned(),
        ),
        (
            "nemotron",
            format!(
                r#"{{"model_type": "nemotron_h", {attention}, "mamba_num_heads": 8, "mamba_head_dim": 16,
                "n_groups": 2, "ssm_state_size": 32, "conv_kernel": 4, "hybrid_override_pattern": "M*"}}"#
            ),
        ),
    ]
    .map(|(name, text)| (name.to_owned(), text.into_bytes()))
    .to_vec()
}

/// Addresses of every form.
pub(crate) fn addresses() -> Vec<(String, Vec<u8>)> {
    [
        ("v4", "10.0.0.1:5600"),
        ("v6", "[2001:db8::7]:5600"),
        ("mapped", "[::ffff:10.0.0.1]:5600"),
        ("name", "Decode-7.Example.:65535"),
    ]
    .map(|(name, text)| (name.to_owned(), text.as_bytes().to_vec()))
    .to_vec()
}
