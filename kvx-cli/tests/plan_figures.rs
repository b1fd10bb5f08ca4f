//! The figures of well-known pairs of layouts: Llama-3.1-8B, 512 tokens, blocks of 16 unless said, each tensor a region.

use std::path::PathBuf;

use serde_json::Value;

use crate::common::json;

/// Segments in all, and bytes of the shortest and the longest.
fn figures(arguments: &str) -> (u64, u64, u64) {
    let plan = json(&format!("plan {arguments}"), 0);
    assert_eq!(plan["tokens"], 512);
    let number = |value: &Value| value.as_u64().unwrap();
    let pairs = plan["pairs"].as_array().unwrap();
    for field in ["segments", "bytes"] {
        let sum: u64 = pairs.iter().map(|pair| number(&pair[field])).sum();
        assert_eq!(sum, number(&plan[field]), "{field}: {plan}");
    }
    (number(&plan["segments"]), number(&plan["shortest_run"]), number(&plan["longest_run"]))
}

fn shapes(from: &str, to: &str, blocks: &str) -> String {
    format!("--producer {from} --consumer {to} --blocks {blocks}")
}

const KIB: u64 = 1024;

#[test]
fn equal_layouts_move_whole_tensors_or_whole_blocks() {
    let same = |blocks| shapes("tp=1,layout=nhd,block=16", "tp=1,layout=nhd,block=16", blocks);
    assert_eq!(figures(&same("contiguous")), (64, 1024 * KIB, 1024 * KIB));
    assert_eq!(figures(&same("permuted")), (2_048, 32 * KIB, 32 * KIB));
}

#[test]
fn splitting_heads_costs_a_run_per_block_or_a_run_per_token() {
    let hnd = shapes("tp=1,layout=hnd,block=16", "tp=2,layout=hnd,block=16", "contiguous");
    assert_eq!(figures(&hnd), (4_096, 16 * KIB, 16 * KIB));
    let nhd = shapes("tp=1,layout=nhd,block=16", "tp=2,layout=nhd,block=16", "contiguous");
    assert_eq!(figures(&nhd), (65_536, KIB, KIB));
}

#[test]
fn turning_heads_and_tokens_costs_a_run_per_row() {
    let turn = |blocks| shapes("tp=1,layout=hnd,block=16", "tp=1,layout=nhd,block=16", blocks);
    // A block's last row goes on in the next block's first.
    assert_eq!(figures(&turn("contiguous")), (260_160, 256, 512));
    assert_eq!(figures(&turn("permuted")), (262_144, 256, 256));
}

#[test]
fn another_block_size_costs_nothing_where_tokens_are_outside() {
    let nhd = |blocks| shapes("tp=1,layout=nhd,block=16", "tp=1,layout=nhd,block=32", blocks);
    assert_eq!(figures(&nhd("contiguous")), (64, 1024 * KIB, 1024 * KIB));
    assert_eq!(figures(&nhd("permuted")), (2_048, 32 * KIB, 32 * KIB));
}

#[test]
fn another_block_size_costs_a_run_per_head_where_heads_are_outside() {
    let hnd = |blocks| shapes("tp=1,layout=hnd,block=16", "tp=1,layout=hnd,block=32", blocks);
    assert_eq!(figures(&hnd("contiguous")), (15_424, 4 * KIB, 8 * KIB));
    assert_eq!(figures(&hnd("permuted")), (16_384, 4 * KIB, 4 * KIB));
}

#[test]
fn cross_layer_blocks_move_as_one() {
    for layout in ["cross-layer-nhd", "cross-layer-hnd"] {
        let shape = format!("tp=1,layout={layout},block=16");
        let all = |blocks| shapes(&shape, &shape, blocks);
        assert_eq!(figures(&all("contiguous")), (1, 64 * KIB * KIB, 64 * KIB * KIB));
        assert_eq!(figures(&all("permuted")), (32, 2 * KIB * KIB, 2 * KIB * KIB));
    }
}

#[test]
fn a_latent_moves_whole_to_every_rank() {
    let shape = "tp=8,layout=nhd,block=64";
    let arguments = shapes(shape, shape, "contiguous");
    let plan = json(&format!("plan --model deepseek-v3 {arguments}"), 0);
    let pairs = plan["pairs"].as_array().unwrap();
    assert_eq!(pairs.len(), 8);
    for (rank, pair) in pairs.iter().enumerate() {
        assert_eq!(pair["consumer"], rank);
        assert_eq!(pair["segments"], 61);
        assert_eq!(pair["bytes"], 61 * 512 * 576 * 2);
    }
    // Each producer rank serves one consumer rank.
    let mut producers: Vec<u64> = pairs.iter().map(|p| p["producer"].as_u64().unwrap()).collect();
    producers.sort_unstable();
    assert_eq!(producers, [0, 1, 2, 3, 4, 5, 6, 7]);
}

/// Heads 0–3, 4–7, 8–11 on one side, 0–5 and 6–11 on the other.
#[test]
fn sizes_that_do_not_divide_each_other_meet_in_four_pairs() {
    let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("twelve-heads");
    std::fs::create_dir_all(&directory).unwrap();
    let config = directory.join("config.json");
    let text = r#"{"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 24,
        "num_key_value_heads": 12, "head_dim": 64, "hidden_size": 1536, "torch_dtype": "bfloat16"}"#;
    std::fs::write(&config, text).unwrap();
    let shape = "--producer tp=3,layout=nhd --consumer tp=2,layout=nhd,block=16";
    let plan = json(&format!("plan --model {} {shape}", config.display()), 0);
    assert_eq!(plan["model"], "twelve-heads");
    let pairs = plan["pairs"].as_array().unwrap();
    let ranks: Vec<_> = pairs
        .iter()
        .map(|pair| (pair["producer"].as_u64().unwrap(), pair["consumer"].as_u64().unwrap()))
        .collect();
    assert_eq!(ranks, [(0, 0), (1, 0), (1, 1), (2, 1)]);
    assert_eq!(plan["bytes"], 512 * 4 * 2 * 12 * 64 * 2);
}
