use super::*;
use crate::facts::Facts;

fn kinds(model: &ModelGeometry) -> String {
    let letter = |kind: &LayerKind| match (kind, kind.window()) {
        (LayerKind::State(_), _) => 'M',
        (LayerKind::Empty, _) => '-',
        (LayerKind::Mla(_), _) => 'L',
        (_, Some(Window::Full)) => '*',
        _ => 's',
    };
    model.layers().iter().map(letter).collect()
}

fn scaled(preset: &str, layers: u32) -> String {
    kinds(&ModelGeometry::preset(preset).unwrap().with_layers(layers).unwrap())
}

#[test]
fn fewer_layers_keep_every_kind_in_proportion() {
    assert_eq!(scaled("gemma-3-4b", 6), "sssss*");
    assert_eq!(scaled("gemma-3-4b", 4), "sss*");
    assert_eq!(scaled("gemma-3-4b", 2), "s*");
    assert_eq!(scaled("gemma-3-4b", 1), "s");
    assert_eq!(scaled("gpt-oss-20b", 5), "s*s*s");
    assert_eq!(scaled("nemotron-h-8b", 9), "M-M-M-M*-");
    assert_eq!(scaled("nemotron-h-8b", 3), "M-*");
    assert_eq!(scaled("qwen3-next-80b-a3b", 4), "MMM*");
    assert_eq!(scaled("deepseek-v3", 3), "LLL");
}

#[test]
fn more_layers_begin_the_pattern_again() {
    let model = ModelGeometry::preset("gpt-oss-20b").unwrap();
    let more = model.clone().with_layers(24 * 2 + 2).unwrap();
    assert_eq!(kinds(&more), "s*".repeat(25));
    assert_eq!(model.clone().with_layers(24).unwrap(), model);
    assert!(model.clone().with_layers(0).is_err());
    assert!(model.with_layers(u32::MAX).is_err());
}

#[test]
fn bytes_count_every_head_once() {
    let llama = ModelGeometry::preset("llama-3.1-8b").unwrap();
    // 32 layers of keys and values, 8 heads, 128 elements, 2 bytes.
    assert_eq!(llama.bytes_per_token(), 32 * 2 * 8 * 128 * 2);
    let fp8 = llama
        .clone()
        .with_dtype(Dtype::Fp8E4m3)
        .with_scales(Some(Scales { dtype: Dtype::F32, per: ScalePer::TokenHead }));
    assert_eq!(fp8.bytes_per_token(), 32 * 2 * 8 * (128 + 4));
    assert_eq!(llama.state_bytes(), 0);
    let deepseek = ModelGeometry::preset("deepseek-v3.2").unwrap();
    assert_eq!(deepseek.bytes_per_token(), 61 * (576 * 2 + 128 + 4));
    let nemotron = ModelGeometry::preset("nemotron-h-8b").unwrap();
    assert_eq!(nemotron.bytes_per_token(), 4 * 2 * 8 * 128 * 2);
    assert_eq!(nemotron.state_bytes(), 24 * ((8192 + 2 * 1024) * 3 * 2 + 128 * 64 * 128 * 4));
}

#[test]
fn facts_differ_exactly_where_the_models_do() {
    let one = ModelGeometry::llama_like(4, 8, 128, Dtype::Bf16).unwrap();
    let differing = |other: &ModelGeometry| match Facts::check(
        &one.facts().unwrap(),
        &other.facts().unwrap(),
    ) {
        Ok(()) => String::new(),
        Err(error) => error.to_string(),
    };
    assert_eq!(differing(&one.clone().with_name("another")), "");
    let dtype = differing(&one.clone().with_dtype(Dtype::F16));
    assert!(dtype.contains("kv_dtype: producer has bf16, consumer has f16"), "{dtype}");
    assert!(!dtype.contains("also"), "{dtype}");
    let layers = differing(&one.clone().with_layers(3).unwrap());
    assert!(layers.contains("layers: producer has 4, consumer has 3"), "{layers}");
    let dims = differing(&one.clone().with_head_dim(64).unwrap());
    assert!(dims.contains("head_dim: producer has 128") && dims.contains("value_dim: "), "{dims}");
    let heads = differing(&one.clone().with_kv_heads(4).unwrap());
    assert!(heads.contains("kv_heads: producer has 8, consumer has 4"), "{heads}");
    let scales = Scales { dtype: Dtype::F32, per: ScalePer::BlockHead };
    let scales = differing(&one.clone().with_scales(Some(scales)));
    assert!(scales.contains("consumer has f32 per block and head"), "{scales}");
}

#[test]
fn facts_that_differ_by_layer_are_runs() {
    let facts = |preset, layers| {
        ModelGeometry::preset(preset).unwrap().with_layers(layers).unwrap().facts().unwrap()
    };
    let gemma = facts("gemma-3-4b", 6);
    assert_eq!(gemma.get("window"), Some("5 x sliding 1024, 1 x full"));
    assert_eq!(gemma.get("scales"), None);
    let qwen = facts("qwen3-next-80b-a3b", 4);
    assert_eq!(qwen.get("kind"), Some("3 x state, 1 x attention"));
    assert_eq!(qwen.get("kv_heads"), Some("3 x -, 1 x 2"));
    let conv = "3 x 16x128+16x128+32x128 by 3 of bf16, 1 x -";
    assert_eq!(qwen.get("conv_state"), Some(conv));
    let deepseek = facts("deepseek-v3.2", 4);
    assert_eq!(deepseek.get("index"), Some("128 of fp8_e4m3 with 1 of f32"));
}

#[test]
fn long_facts_are_cut_and_still_differ() {
    let model = |last: u32| {
        let layer = |heads| LayerKind::Attention(AttentionGeometry::new(heads, 8, Dtype::Bf16));
        let layers = (0..1000).map(|i| layer(1 + i % 2)).chain([layer(last)]).collect();
        ModelGeometry::new("long", layers).unwrap().facts().unwrap()
    };
    let (one, other) = (model(3), model(4));
    let heads = one.get("kv_heads").unwrap();
    assert_eq!(heads.len(), Facts::MAX_VALUE_BYTES);
    assert!(heads.starts_with("1 x 1, 1 x 2, "));
    assert_ne!(Some(heads), other.get("kv_heads"));
    assert_eq!(one, model(3));
}

#[test]
fn common_facts_are_those_of_all_layers() {
    let llama = ModelGeometry::preset("llama-3.1-8b").unwrap();
    let facts = (llama.kv_heads(), llama.head_dim(), llama.dtype(), llama.num_layers());
    assert_eq!(facts, (Some(8), Some(128), Some(Dtype::Bf16), 32));
    let mixed =
        [8, 4].map(|heads| LayerKind::Attention(AttentionGeometry::new(heads, 128, Dtype::Bf16)));
    let mixed = ModelGeometry::new("mixed", mixed.into()).unwrap();
    assert_eq!((mixed.kv_heads(), mixed.head_dim()), (None, Some(128)));
    let deepseek = ModelGeometry::preset("deepseek-v3").unwrap();
    assert_eq!((deepseek.kv_heads(), deepseek.head_dim()), (None, Some(576)));
}

#[test]
fn nonsense_is_refused_by_name() {
    let refused = |result: Result<ModelGeometry>| result.unwrap_err().to_string();
    let llama = |layers, heads, dim| ModelGeometry::llama_like(layers, heads, dim, Dtype::Bf16);
    assert!(refused(llama(0, 8, 128)).contains("0 layers"));
    assert!(refused(llama(u32::MAX, 8, 128)).contains("1025 layers"));
    assert!(refused(llama(2, 0, 128)).contains("kv_heads is 0"));
    assert!(refused(llama(2, 8, 0)).contains("key_dim is 0"));
    assert!(refused(llama(2, u32::MAX, 128)).contains("kv_heads is 4294967295"));
    assert!(refused(ModelGeometry::mla_like(2, 0, Dtype::Bf16)).contains("latent_dim is 0"));
    let window = AttentionGeometry::new(8, 128, Dtype::Bf16).with_window(Window::Sliding(0));
    let window = ModelGeometry::new("window", vec![LayerKind::Attention(window)]);
    assert!(refused(window).contains("window is 0"));
    let state = StateGeometry { conv: vec![], taps: 3, conv_dtype: Dtype::Bf16, ssm: None };
    assert!(refused(ModelGeometry::new("s", vec![LayerKind::State(state)])).contains("nothing"));
    let part = ConvPart { heads: 2, channels: 0 };
    let state = StateGeometry { conv: vec![part], taps: 3, conv_dtype: Dtype::Bf16, ssm: None };
    assert!(
        refused(ModelGeometry::new("s", vec![LayerKind::State(state)])).contains("conv channels")
    );
}

#[test]
fn json_round_trips_and_is_checked() {
    for name in ModelGeometry::PRESETS {
        let model = ModelGeometry::preset(name).unwrap();
        let json = serde_json::to_string(&model).unwrap();
        assert_eq!(serde_json::from_str::<ModelGeometry>(&json).unwrap(), model);
        let bad = json.replace(":576,", ":0,").replace("\"kv_heads\":", "\"kv_heads\":0");
        assert!(serde_json::from_str::<ModelGeometry>(&bad).is_err(), "{name}");
    }
}
