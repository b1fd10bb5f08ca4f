//! Block sizes, block tables and token ranges.

use kvx_core::layout::{
    AttentionGeometry, Dtype, LayerKind, LayoutBuilder, ModelGeometry, NamedLayout, Window,
};
use kvx_core::plan::{BlockTable, Pairing, PeerPlan, chunks, kernel_blocks};
use kvx_core::transfer::Mode;
use kvx_tests::oracle::{Run, Scene, Side, Table};

use crate::common::{HND, NHD, attention, check, model, ranks, runs, scene, segments, side};

/// Bytes of a token in a layer's keys: 2 heads of 4 elements of 2 bytes.
const TOKEN: u64 = 16;

fn builder(block: u32, kernel: u32) -> LayoutBuilder {
    LayoutBuilder::new(&model(1, 2), NHD).blocks(9).block_tokens(block).kernel_block_tokens(kernel)
}

/// Blocks of `size` tokens that runs of layer 0's keys read and write: `(from, to)`.
fn key_blocks(runs: &[Run], size: u64) -> Vec<(u64, u64)> {
    let size = size * TOKEN;
    let mut all = Vec::new();
    for run in runs.iter().filter(|run| run.to_region == 0) {
        assert!(
            [run.from_offset, run.to_offset, run.bytes]
                .iter()
                .all(|bytes| bytes.is_multiple_of(size))
        );
        for block in 0..run.bytes / size {
            all.push((run.from_offset / size + block, run.to_offset / size + block));
        }
    }
    all
}

#[test]
fn row_8_vllm_28677_logical_blocks_are_several_of_the_kernels() {
    assert_eq!(kernel_blocks(&[3, 7], 2).collect::<Vec<_>>(), [6, 7, 14, 15]);
    let scene =
        scene(side(&builder(128, 64), 1, &[3, 7]), side(&builder(64, 64), 1, &[0, 1, 2, 3]), 256);
    check(&scene);
    assert_eq!(key_blocks(&runs(&scene, 0, 0), 64), [(6, 0), (7, 1), (14, 2), (15, 3)]);
}

#[test]
fn row_9_vllm_28925_the_same_block_sizes_on_both_sides_are_a_ratio_of_one() {
    let scene =
        scene(side(&builder(128, 64), 1, &[3, 7]), side(&builder(128, 64), 1, &[1, 0]), 256);
    check(&scene);
    let runs = runs(&scene, 0, 0);
    assert_eq!(key_blocks(&runs, 64), [(14, 0), (15, 1), (6, 2), (7, 3)]);
    // Logical blocks stay whole: one run each, of keys and of values.
    assert_eq!(runs.iter().map(|run| run.bytes).collect::<Vec<_>>(), [128 * TOKEN; 4]);
}

#[test]
fn row_10_vllm_26744_blocks_of_other_sizes_are_exact_both_ways_and_in_both_orders() {
    for (from, to) in [(4, 16), (16, 4)] {
        for (from_layout, to_layout) in [(HND, HND), (NHD, NHD), (HND, NHD), (NHD, HND)] {
            for tokens in [64, 50, 3] {
                let engine = |layout, block: u32, ids: &[u32]| {
                    let builder = LayoutBuilder::new(&model(2, 2), layout);
                    let blocks = u32::try_from(tokens).unwrap().div_ceil(block) as usize;
                    side(&builder.blocks(32).block_tokens(block), 1, &ids[..blocks])
                };
                let ids: Vec<u32> = (0..32).map(|id| id * 7 % 32).collect();
                let scene =
                    scene(engine(from_layout, from, &ids), engine(to_layout, to, &ids), tokens);
                // Exactly the tokens: no block on one side is one on the other.
                assert_eq!(check(&scene).bytes, tokens * TOKEN * 4);
            }
        }
    }
}

/// Groups with blocks of 4 and of 256 tokens.
#[test]
fn row_12_vllm_50714_groups_keep_block_sizes_of_their_own() {
    let window = AttentionGeometry::new(2, 4, Dtype::Bf16).with_window(Window::Sliding(6));
    let layers = vec![attention(2), LayerKind::Attention(window)];
    let model = ModelGeometry::new("mixed", layers).unwrap();
    let builder = LayoutBuilder::new(&model, NHD)
        .blocks(80)
        .block_tokens(4)
        .window_blocks(3)
        .window_block_tokens(256)
        .group_by_window(true);
    let engine = |shift: u32| Side {
        ranks: ranks(&builder, 1, 1),
        tables: vec![
            Table::new((0..75).map(|id| (id + shift) % 75).collect::<Vec<_>>()),
            Table::new([shift % 3, (shift + 1) % 3]),
        ],
    };
    let scene = scene(engine(0), engine(31), 300);
    let sizes: Vec<_> = scene.producer.ranks[0]
        .groups()
        .iter()
        .map(|group| (group.block_tokens, group.blocks))
        .collect();
    assert_eq!(sizes, [(4, 80), (256, 3)]);
    check(&scene);
}

#[test]
fn row_14_vllm_29122_the_block_size_is_declared_and_not_taken_from_a_shape() {
    // [blocks, 2, 16, dims] and [blocks, 16, 2, dims].
    let layouts = [HND, NHD].map(|layout| {
        let builder = LayoutBuilder::new(&model(1, 2), layout).blocks(3).block_tokens(16);
        (ranks(&builder, 1, 1), builder)
    });
    for (ranks, _) in &layouts {
        assert_eq!(ranks[0].groups()[0].block_tokens, 16);
        assert!(
            ranks[0]
                .tensors()
                .iter()
                .all(|tensor| (tensor.token.extent, tensor.head.extent) == (16, 2))
        );
    }
    let scene = scene(side(&layouts[0].1, 1, &[2, 0]), side(&layouts[1].1, 1, &[1, 2]), 32);
    assert_eq!(check(&scene).bytes, 32 * TOKEN * 2);
}

#[test]
fn row_29_vllm_48758_a_held_prefix_is_trimmed_from_the_front_on_the_producer_too() {
    // The consumer holds five of eight blocks and has given blocks for the last three.
    let mut scene = scene(
        side(&builder(4, 4).blocks(50), 1, &[10, 11, 12, 13, 14, 15, 16, 17]),
        side(&builder(4, 4).blocks(50), 1, &[]),
        32,
    );
    let tail = BlockTable::tail(&[40, 41, 42], 32, 4).unwrap();
    scene.consumer.tables = vec![Table { first: tail.first(), ids: tail.ids().to_vec() }];
    scene.range = 20..32;
    check(&scene);
    assert_eq!(key_blocks(&runs(&scene, 0, 0), 4), [(15, 40), (16, 41), (17, 42)]);
    // The producer may give its tail only, too.
    scene.producer.tables = vec![Table { first: 5, ids: vec![15, 16, 17] }];
    check(&scene);
    assert_eq!(key_blocks(&runs(&scene, 0, 0), 4), [(15, 40), (16, 41), (17, 42)]);
}

#[test]
fn row_31_vllm_21074_a_partial_last_block_is_moved() {
    let engine = |ids: &[u32]| side(&builder(4, 4), 1, ids);
    let scene = scene(engine(&[2, 4, 6]), engine(&[1, 3, 5]), 10);
    check(&scene);
    assert_eq!(key_blocks(&runs(&scene, 0, 0), 4), [(2, 1), (4, 3), (6, 5)]);
    // With blocks of other sizes, the tokens and no more.
    let scene = Scene { consumer: side(&builder(8, 8), 1, &[1, 3]), ..scene };
    assert_eq!(check(&scene).bytes, 10 * TOKEN * 2);
}

#[test]
fn row_35_sglang_19746_a_chunk_that_is_held_already_is_empty_and_not_the_last() {
    // Pages of 4 tokens: 5 of 8 are held, chunks are 4 pages.
    let engine =
        |first: u32| side(&builder(4, 4).blocks(20), 1, &(first..first + 8).collect::<Vec<_>>());
    let whole = scene(engine(0), engine(10), 32);
    let steps: Vec<_> = chunks(32, 16, 20).unwrap().collect();
    let moved: Vec<_> = steps
        .iter()
        .map(|step| {
            let scene = Scene { range: step.range.clone(), ..whole.clone() };
            check(&scene);
            (key_blocks(&runs(&scene, 0, 0), 4), step.last)
        })
        .collect();
    assert_eq!(moved, [(vec![], false), (vec![(5, 15), (6, 16), (7, 17)], true)]);
}

#[test]
fn row_104_vllm_55434_contiguous_blocks_merge_to_one_segment_per_region() {
    let model = model(50, 2);
    let builder = LayoutBuilder::new(&model, NHD).blocks(64).block_tokens(4);
    let ids: Vec<u32> = (0..64).collect();
    // What is prepared for a peer grows with the tensors and not with the blocks.
    let prepared = |blocks| {
        let ranks = ranks(&LayoutBuilder::new(&model, NHD).blocks(blocks), 1, 1);
        let pairing = Pairing::new(&ranks, &ranks, 0).unwrap();
        PeerPlan::compile(&ranks[0], &ranks[0], &pairing.pairs()[0]).unwrap().memory_bytes()
    };
    assert_eq!(prepared(64), prepared(100_000));
    assert!(prepared(64) < 100 * 512, "{} bytes", prepared(64));
    let scene = scene(side(&builder, 1, &ids), side(&builder, 1, &ids), 256);
    assert_eq!(scene.producer.ranks[0].regions().len(), 100);
    let list = segments(&scene, 0, 0, Mode::Read);
    assert_eq!(list.len(), 100);
    assert!(list.iter().all(|segment| segment.bytes == 256 * TOKEN));
}

#[test]
fn row_105_dynamo_12750_a_contiguous_block_splits_into_one_run_per_tensor_of_the_other_side() {
    let (layers, block) = (48, 4);
    let model = model(layers, 2);
    let engine = |layout| {
        let builder = LayoutBuilder::new(&model, layout).blocks(3).block_tokens(block);
        side(&builder, 1, &[1])
    };
    for (from, to) in [(NamedLayout::CrossLayerNhd, NHD), (NHD, NamedLayout::CrossLayerNhd)] {
        let scene = scene(engine(from), engine(to), block.into());
        assert_eq!(check(&scene).segments, u64::from(layers * 2));
    }
}
