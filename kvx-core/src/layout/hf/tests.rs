use super::super::{Dtype, MlaGeometry, Window};
use super::*;

const NEMOTRON_PATTERN: &str = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-";

/// The fields of each preset's `config.json` that matter, as the file has them.
fn configs() -> Vec<(&'static str, String)> {
    let attention = |model_type, layers, heads, kv_heads, more| {
        format!(
            r#"{{"model_type": "{model_type}", "num_hidden_layers": {layers}, "num_attention_heads": {heads},
                "num_key_value_heads": {kv_heads}, "torch_dtype": "bfloat16", {more}}}"#
        )
    };
    let types = |one: &str, other: &str, every: usize, layers: usize| {
        let list: Vec<_> = (1..=layers).map(|i| if i % every == 0 { other } else { one }).collect();
        serde_json::to_string(&list).unwrap()
    };
    let gpt_oss = format!(
        r#""head_dim": 64, "sliding_window": 128, "layer_types": {}"#,
        types("sliding_attention", "full_attention", 2, 24)
    );
    let qwen3_next = r#""head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4"#;
    let nemotron = format!(
        r#""attention_head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8,
        "ssm_state_size": 128, "conv_kernel": 4, "hybrid_override_pattern": "{NEMOTRON_PATTERN}""#
    );
    let qwen3 = r#""head_dim": 128, "sliding_window": null, "use_sliding_window": false, "max_window_layers": 36"#;
    vec![
        ("llama-3.1-8b", attention("llama", 32, 32, 8, r#""hidden_size": 4096"#)),
        ("llama-3.1-70b", attention("llama", 80, 64, 8, r#""hidden_size": 8192"#)),
        ("qwen3-8b", attention("qwen3", 36, 32, 8, qwen3)),
        // Its hidden size, 2,048, is not 32 heads of 128.
        (
            "qwen3-30b-a3b",
            attention("qwen3_moe", 48, 32, 4, r#""hidden_size": 2048, "head_dim": 128"#),
        ),
        (
            "mixtral-8x7b",
            attention("mixtral", 32, 32, 8, r#""hidden_size": 4096, "sliding_window": null"#),
        ),
        (
            "deepseek-v3",
            attention("deepseek_v3", 61, 128, 128, r#""kv_lora_rank": 512, "qk_rope_head_dim": 64"#),
        ),
        (
            "deepseek-v3.2",
            attention(
                "deepseek_v32",
                61,
                128,
                128,
                r#""kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128"#,
            ),
        ),
        // What is not here has its default: 8 heads, 4 of keys and values, 256 elements.
        (
            "gemma-3-4b",
            r#"{"model_type": "gemma3", "torch_dtype": "bfloat16", "vision_config": {"num_hidden_layers": 27},
                "text_config": {"num_hidden_layers": 34, "sliding_window": 1024}}"#
                .into(),
        ),
        (
            "gemma-3-27b",
            r#"{"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": {"num_hidden_layers": 62,
                "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024}}"#
                .into(),
        ),
        ("gpt-oss-20b", attention("gpt_oss", 24, 64, 8, &gpt_oss)),
        (
            "llama-4-scout",
            r#"{"model_type": "llama4", "text_config": {"num_hidden_layers": 48, "num_attention_heads": 40,
                "num_key_value_heads": 8, "head_dim": 128, "attention_chunk_size": 8192, "no_rope_layers": [],
                "torch_dtype": "bfloat16"}}"#
                .into(),
        ),
        ("nemotron-h-8b", attention("nemotron_h", 52, 32, 8, &nemotron)),
        ("qwen3-next-80b-a3b", attention("qwen3_next", 48, 16, 2, qwen3_next)),
    ]
}

fn read(json: &str) -> ModelGeometry {
    ModelGeometry::from_hf_config(json).unwrap()
}

fn refusal(json: &str) -> String {
    let error = ModelGeometry::from_hf_config(json).unwrap_err();
    assert_eq!(error.kind(), crate::ErrorKind::Config);
    error.to_string()
}

#[test]
fn every_preset_is_what_its_config_says() {
    let configs = configs();
    let mut named: Vec<_> = configs.iter().map(|(name, _)| *name).collect();
    named.sort_unstable();
    assert_eq!(named, ModelGeometry::PRESETS);
    for (name, config) in &configs {
        assert_eq!(read(config).with_name(*name), ModelGeometry::preset(name).unwrap(), "{name}");
    }
}

#[test]
fn an_unknown_preset_lists_all() {
    let error = ModelGeometry::preset("gpt-5").unwrap_err().to_string();
    assert!(ModelGeometry::PRESETS.iter().all(|name| error.contains(name)), "{error}");
}

#[test]
fn an_unknown_model_type_lists_the_known_ones() {
    let error = refusal(r#"{"model_type": "bert"}"#);
    assert!(error.contains("\"bert\"") && error.contains("qwen3_next"), "{error}");
    assert!(refusal(r#"{"hidden_size": 4096}"#).contains("model_type is missing"));
    assert!(refusal(r#"{"model_type": 3}"#).contains("model_type is 3"));
    assert!(refusal("[]").contains("not an object"));
    assert!(refusal("{").contains("not JSON"));
}

/// Takes a field out of every configuration that needs it.
#[test]
fn a_missing_field_is_named() {
    let needed = [
        ("llama-3.1-8b", "num_hidden_layers"),
        ("llama-3.1-8b", "num_attention_heads"),
        ("llama-3.1-8b", "hidden_size"),
        ("deepseek-v3", "kv_lora_rank"),
        ("deepseek-v3", "qk_rope_head_dim"),
        ("deepseek-v3.2", "index_head_dim"),
        ("gpt-oss-20b", "sliding_window"),
        ("nemotron-h-8b", "mamba_num_heads"),
        ("nemotron-h-8b", "mamba_head_dim"),
        ("nemotron-h-8b", "ssm_state_size"),
        ("nemotron-h-8b", "n_groups"),
        ("nemotron-h-8b", "conv_kernel"),
        ("nemotron-h-8b", "hybrid_override_pattern"),
        ("qwen3-next-80b-a3b", "linear_num_key_heads"),
        ("qwen3-next-80b-a3b", "linear_num_value_heads"),
        ("qwen3-next-80b-a3b", "linear_key_head_dim"),
        ("qwen3-next-80b-a3b", "linear_value_head_dim"),
        ("qwen3-next-80b-a3b", "linear_conv_kernel_dim"),
    ];
    let configs = configs();
    for (name, field) in needed {
        let (_, config) = configs.iter().find(|(known, _)| *known == name).unwrap();
        let mut config: Value = serde_json::from_str(config).unwrap();
        assert!(config.as_object_mut().unwrap().remove(field).is_some(), "{name} {field}");
        let error = refusal(&config.to_string());
        assert!(error.contains(&format!("{field} is missing")), "{name} {field}: {error}");
    }
}

fn llama(more: &str) -> String {
    format!(
        r#"{{"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 512{more}}}"#
    )
}

#[test]
fn nonsense_is_named_with_its_value() {
    let last = |more| refusal(&llama(more));
    assert!(last(r#", "num_key_value_heads": 0"#).contains("num_key_value_heads is 0"));
    assert!(last(r#", "num_key_value_heads": -1"#).contains("num_key_value_heads is -1"));
    assert!(last(r#", "num_key_value_heads": 1.5"#).contains("num_key_value_heads is 1.5"));
    assert!(last(r#", "num_key_value_heads": "8""#).contains("num_key_value_heads is \"8\""));
    assert!(last(r#", "num_key_value_heads": 3"#).contains("does not divide"));
    assert!(last(r#", "num_key_value_heads": 16"#).contains("does not divide"));
    assert!(last(r#", "head_dim": 5000000000"#).contains("head_dim is 5000000000"));
    assert!(last(r#", "head_dim": 4000000000"#).contains("key_dim is 4000000000"));
    assert!(
        last(r#", "num_hidden_layers": 4000000000"#).contains("num_hidden_layers is 4000000000")
    );
    assert!(last(r#", "hidden_size": 513"#).contains("hidden_size is 513"));
    assert!(last(r#", "dtype": "int3""#).contains("dtype is \"int3\""));
    assert!(last(r#", "text_config": 7"#).contains("text_config is 7"));
}

#[test]
fn all_heads_keep_keys_where_nothing_else_is_said() {
    assert_eq!(
        read(&llama("")),
        ModelGeometry::llama_like(2, 8, 64, Dtype::Bf16).unwrap().with_name("llama")
    );
}

#[test]
fn the_dtype_is_read_from_either_field_and_either_place() {
    let dtype = |more| read(&llama(more)).dtype();
    assert_eq!(dtype(""), Some(Dtype::Bf16));
    assert_eq!(dtype(r#", "torch_dtype": "float16""#), Some(Dtype::F16));
    assert_eq!(dtype(r#", "dtype": "float32", "torch_dtype": "float16""#), Some(Dtype::F32));
    let nested =
        r#"{"model_type": "gemma3_text", "dtype": "float16", "text_config": {"dtype": "float32"}}"#;
    assert_eq!(read(nested).dtype(), Some(Dtype::F32));
    assert_eq!(read(nested).with_dtype(Dtype::Fp8E4m3).dtype(), Some(Dtype::Fp8E4m3));
}

fn windows(json: &str) -> Vec<Window> {
    read(json).layers().iter().filter_map(LayerKind::window).collect()
}

#[test]
fn layer_types_come_before_any_pattern() {
    let gemma = r#"{"model_type": "gemma3_text", "num_hidden_layers": 3, "sliding_window": 64,
        "sliding_window_pattern": 2, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}"#;
    assert_eq!(windows(gemma), [Window::Full, Window::Sliding(64), Window::Full]);
    let pattern = gemma.replace("layer_types", "not_layer_types");
    assert_eq!(windows(&pattern), [Window::Sliding(64), Window::Full, Window::Sliding(64)]);
    let short = gemma.replace("\"num_hidden_layers\": 3", "\"num_hidden_layers\": 4");
    assert!(refusal(&short).contains("layer_types has 3 entries for 4 layers"));
    let odd = gemma.replace("sliding_attention", "cross_attention");
    assert!(refusal(&odd).contains("cross_attention"));
    let number = gemma.replace("\"sliding_attention\"", "1");
    assert!(refusal(&number).contains("layer_types holds 1"));
}

/// Families that do not need the list refuse one of another length, too, rather than pass over what it says.
#[test]
fn layer_types_of_another_length_are_refused_by_every_family() {
    for (name, config) in configs() {
        let mut config: Value = serde_json::from_str(&config).unwrap();
        let layers = ModelGeometry::preset(name).unwrap().num_layers();
        let inside = config.get("text_config").is_some();
        let text = if inside { &mut config["text_config"] } else { &mut config };
        text["layer_types"] = vec!["full_attention"; layers as usize - 1].into();
        let error = refusal(&config.to_string());
        let says = format!("layer_types has {} entries for {layers} layers", layers - 1);
        assert!(error.contains(&says) && error.contains("model_type="), "{name}: {error}");
    }
}

#[test]
fn llama_has_windows_where_layer_types_say_so() {
    let kinds = r#", "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]"#;
    assert_eq!(windows(&llama(kinds)), [Window::Sliding(64), Window::Full]);
    let no_window = kinds.replace("\"sliding_window\": 64, ", "");
    assert!(refusal(&llama(&no_window)).contains("sliding_window is missing"));
}

#[test]
fn gemma_has_its_default_pattern() {
    let gemma = r#"{"model_type": "gemma3_text", "num_hidden_layers": 7}"#;
    let mut expected = [Window::Sliding(4096); 7];
    expected[5] = Window::Full;
    assert_eq!(windows(gemma), expected);
}

#[test]
fn gpt_oss_begins_with_a_window() {
    let config = r#"{"model_type": "gpt_oss", "num_hidden_layers": 3, "num_attention_heads": 64,
        "num_key_value_heads": 8, "sliding_window": 128}"#;
    assert_eq!(windows(config), [Window::Sliding(128), Window::Full, Window::Sliding(128)]);
    assert_eq!(read(config).head_dim(), Some(64));
}

#[test]
fn mistral_has_one_window_for_all_or_none() {
    let mistral = llama(r#", "sliding_window": 4096"#).replace("llama", "mistral");
    assert_eq!(windows(&mistral), [Window::Sliding(4096); 2]);
    assert_eq!(windows(&mistral.replace("4096}", "null}")), [Window::Full; 2]);
    // Llama has no such field.
    assert_eq!(windows(&mistral.replace("mistral", "llama")), [Window::Full; 2]);
}

#[test]
fn qwen_has_windows_only_when_told_to() {
    let qwen = |flag: bool| {
        format!(
            r#"{{"model_type": "qwen2", "num_hidden_layers": 3, "num_attention_heads": 8, "hidden_size": 512,
                "use_sliding_window": {flag}, "sliding_window": 32, "max_window_layers": 1}}"#
        )
    };
    assert_eq!(windows(&qwen(false)), [Window::Full; 3]);
    let expected = [Window::Full, Window::Sliding(32), Window::Sliding(32)];
    assert_eq!(windows(&qwen(true)), expected);
    let moe = qwen(true).replace("\"qwen2\"", "\"qwen2_moe\"");
    assert!(refusal(&moe).contains("use_sliding_window is true, but no layer_types"));
    assert_eq!(windows(&qwen(false).replace("\"qwen2\"", "\"qwen2_moe\"")), [Window::Full; 3]);
    let flag = qwen(true).replace(": true", ": 1");
    assert!(refusal(&flag).contains("use_sliding_window is 1"));
    assert_eq!(read(&qwen(false).replace("qwen2", "qwen3")).head_dim(), Some(128));
}

#[test]
fn llama4_has_chunks_where_it_has_rotary_positions() {
    let llama4 = |more: &str| {
        format!(
            r#"{{"model_type": "llama4_text", "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 64{more}}}"#
        )
    };
    let (chunk, full) = (Window::Chunked(8192), Window::Full);
    assert_eq!(windows(&llama4("")), [chunk, chunk, chunk, full]);
    let interval = r#", "no_rope_layer_interval": 2"#;
    assert_eq!(windows(&llama4(interval)), [chunk, full, chunk, full]);
    let rotary = r#", "no_rope_layers": [0, 1, 1, 0], "attention_chunk_size": 100"#;
    let chunk = Window::Chunked(100);
    assert_eq!(windows(&llama4(rotary)), [full, chunk, chunk, full]);
    assert_eq!(windows(&llama4(r#", "attention_chunk_size": null"#)), [full; 4]);
    assert!(refusal(&llama4(r#", "no_rope_layers": [0, 1]"#)).contains("2 entries for 4 layers"));
    assert!(refusal(&llama4(r#", "no_rope_layers": [0, 1, 2, 0]"#)).contains("holds 2"));
}

#[test]
fn a_latent_has_its_rotary_part() {
    let config = r#"{"model_type": "deepseek_v2", "num_hidden_layers": 2, "kv_lora_rank": 100,
        "qk_rope_head_dim": 4, "dtype": "float16"}"#;
    let layer = LayerKind::Mla(MlaGeometry { latent_dim: 104, dtype: Dtype::F16, index: None });
    assert_eq!(read(config).layers(), [layer.clone(), layer]);
    assert!(refusal(&config.replace("100", "4294967295")).contains("kv_lora_rank"));
}

fn nemotron(pattern: &str, layers: u32) -> String {
    format!(
        r#"{{"model_type": "nemotron_h", "num_hidden_layers": {layers}, "num_attention_heads": 8,
        "hidden_size": 512, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 32,
        "conv_kernel": 4, "hybrid_override_pattern": "{pattern}"}}"#
    )
}

#[test]
fn a_hybrid_follows_its_pattern() {
    let names =
        |config: &str| -> Vec<_> { read(config).layers().iter().map(LayerKind::name).collect() };
    let expected = ["state", "empty", "attention", "empty"];
    assert_eq!(names(&nemotron("M-*E", 4)), expected);
    let by_name = nemotron("M-*E", 4).replace(
        r#""hybrid_override_pattern": "M-*E""#,
        r#""layers_block_type": ["mamba", "mlp", "attention", "moe"]"#,
    );
    assert_eq!(names(&by_name), expected);
    // The newer form leaves the number of layers to the list.
    assert_eq!(names(&by_name.replace("\"num_hidden_layers\": 4,", "")), expected);
    assert!(refusal(&by_name.replace("moe", "rwkv")).contains("rwkv"));
    assert!(refusal(&nemotron("M-*", 4)).contains("3 letters for 4 layers"));
    assert!(refusal(&nemotron("M-*?", 4)).contains("'?'"));
    assert!(refusal(&nemotron("", 4)).contains("0 letters"));
    assert!(
        refusal(&nemotron("MMM*", 4).replace("\"n_groups\": 2", "\"n_groups\": 3"))
            .contains("n_groups is 3")
    );
    assert!(
        refusal(&nemotron("MMM*", 4).replace("\"conv_kernel\": 4", "\"conv_kernel\": 1"))
            .contains("conv_kernel is 1")
    );
}

#[test]
fn the_recurrent_state_has_a_dtype_of_its_own() {
    let dtype = |config: &str| match &read(config).layers()[0] {
        LayerKind::State(state) => state.ssm.unwrap().dtype,
        other => panic!("{other:?}"),
    };
    assert_eq!(dtype(&nemotron("M", 1)), Dtype::F32);
    let said = nemotron("M", 1)
        .replace("\"conv_kernel\"", "\"mamba_ssm_cache_dtype\": \"float16\", \"conv_kernel\"");
    assert_eq!(dtype(&said), Dtype::F16);
    let (_, qwen) = configs().into_iter().find(|(name, _)| *name == "qwen3-next-80b-a3b").unwrap();
    assert_eq!(dtype(&qwen), Dtype::Bf16);
    let said =
        qwen.replace("\"head_dim\": 256", "\"head_dim\": 256, \"mamba_ssm_dtype\": \"float32\"");
    assert_eq!(dtype(&said), Dtype::F32);
}

#[test]
fn linear_layers_may_be_listed() {
    let (_, config) =
        configs().into_iter().find(|(name, _)| *name == "qwen3-next-80b-a3b").unwrap();
    let listed = config.replace("\"num_hidden_layers\": 48", "\"num_hidden_layers\": 2").replace(
        "\"full_attention_interval\": 4",
        "\"layer_types\": [\"full_attention\", \"linear_attention\"]",
    );
    let names: Vec<_> = read(&listed).layers().iter().map(LayerKind::name).collect();
    assert_eq!(names, ["attention", "state"]);
    assert!(
        refusal(&listed.replace("full_attention", "sliding_attention"))
            .contains("sliding_attention")
    );
    assert!(
        refusal(&config.replace("\"linear_num_key_heads\": 16", "\"linear_num_key_heads\": 12"))
            .contains("linear_num_key_heads is 12")
    );
}

/// A value from outside may be long; the message stays short.
#[test]
fn a_long_value_is_cut_short() {
    let error = refusal(&llama(&format!(r#", "head_dim": "{}""#, "é".repeat(10_000))));
    assert!(error.len() < 400 && error.contains("..."), "{error}");
    let error = refusal(&format!(r#"{{"model_type": "{}"}}"#, "x".repeat(10_000)));
    assert!(error.len() < 600, "{}", error.len());
}
