//! Hybrid models: states beside attention and latents.

use kvx_core::layout::{
    ConvOrder, ConvPart, Dtype, GroupKind, LayerKind, LayoutBuilder, MlaGeometry, ModelGeometry,
    Role, SsmGeometry, StateGeometry,
};
use kvx_core::transfer::Mode;
use kvx_tests::oracle::{Scene, Side, Table};

use crate::common::{NHD, attention, carry_out, check, ranks, runs, scene};

/// A convolution state of x, B and C with so many channels, of `taps` taps of 4 bytes; and a recurrent state, or none.
fn state(channels: [u32; 3], taps: u32, ssm: Option<u32>) -> LayerKind {
    LayerKind::State(StateGeometry {
        conv: channels.map(|heads| ConvPart { heads, channels: 1 }).to_vec(),
        taps,
        conv_dtype: Dtype::F32,
        ssm: ssm.map(|heads| SsmGeometry { heads, dim: 6, dtype: Dtype::F32 }),
    })
}

fn engine(builder: &LayoutBuilder, tp: u32, tables: &[&[u32]]) -> Side {
    Side {
        ranks: ranks(builder, tp, 1),
        tables: tables.iter().map(|ids| Table::new(*ids)).collect(),
    }
}

#[test]
fn row_19_vllm_37638_the_parts_of_a_convolution_state_split_separately() {
    let model = ModelGeometry::new("mamba", vec![state([8, 4, 4], 1, None)]).unwrap();
    let builder = LayoutBuilder::new(&model, NHD).blocks(3).block_tokens(4);
    let scene = scene(engine(&builder, 1, &[&[1]]), engine(&builder, 2, &[&[2]]), 4);
    check(&scene);
    // Channels of 4 bytes; the producer's block 1 begins with x at 64, B follows at 96, C at 112.
    let reads = |consumer| {
        let runs = runs(&scene, 0, consumer);
        runs.iter().map(|run| ((run.from_offset - 64) / 4, run.bytes / 4)).collect::<Vec<_>>()
    };
    assert_eq!(reads(0), [(0, 4), (8, 2), (12, 2)]);
    assert_eq!(reads(1), [(4, 4), (10, 2), (14, 2)], "x[4:8], B[2:4], C[2:4]");
    // With several taps, in both orders of channels and taps, on either side.
    let model = ModelGeometry::new("mamba", vec![state([8, 4, 4], 3, Some(4))]).unwrap();
    for from in [ConvOrder::ChannelsOutside, ConvOrder::TapsOutside] {
        for to in [ConvOrder::ChannelsOutside, ConvOrder::TapsOutside] {
            for (from_tp, to_tp) in [(1, 2), (2, 1), (4, 2), (1, 4)] {
                let builder = |order| {
                    LayoutBuilder::new(&model, NHD).blocks(3).block_tokens(4).conv_order(order)
                };
                check(&Scene {
                    producer: engine(&builder(from), from_tp, &[&[1]]),
                    consumer: engine(&builder(to), to_tp, &[&[2]]),
                    ..scene.clone()
                });
            }
        }
    }
}

#[test]
fn row_20_vllm_49297_a_replicated_latent_beside_a_sharded_state() {
    let latent = LayerKind::Mla(MlaGeometry { latent_dim: 6, dtype: Dtype::Bf16, index: None });
    let model = ModelGeometry::new("hybrid", vec![latent, state([4, 2, 2], 3, Some(4))]).unwrap();
    let builder = LayoutBuilder::new(&model, NHD).blocks(5).block_tokens(4);
    let scene =
        scene(engine(&builder, 2, &[&[0, 3], &[4]]), engine(&builder, 1, &[&[2, 1], &[3]]), 7);
    check(&scene);
    carry_out(&scene, Mode::Read, b"done");
    // The state comes from both ranks, the latent from one.
    let region = |role: Role| {
        let layout = &scene.consumer.ranks[0];
        layout.tensors().iter().find(|tensor| tensor.role == role).unwrap().region
    };
    let sources = |role| {
        let region = region(role);
        (0..2)
            .filter(|producer| runs(&scene, *producer, 0).iter().any(|run| run.to_region == region))
            .count()
    };
    assert_eq!((sources(Role::Latent), sources(Role::SsmState)), (1, 2));
}

#[test]
fn row_23_vllm_42554_of_a_state_table_only_the_last_block_is_moved() {
    let model = ModelGeometry::new("mamba", vec![state([4, 2, 2], 3, Some(4))]).unwrap();
    let builder = LayoutBuilder::new(&model, NHD).blocks(15).block_tokens(4).null_block(Some(0));
    let ids: &[u32] = &[0, 0, 14];
    let scene = scene(engine(&builder, 1, &[ids]), engine(&builder, 1, &[&[0, 0, 7]]), 12);
    check(&scene);
    let runs = runs(&scene, 0, 0);
    let block = scene.producer.ranks[0].tensors()[0].block.stride;
    assert_eq!(runs.len(), 1);
    assert_eq!(
        (runs[0].from_offset, runs[0].to_offset, runs[0].bytes),
        (14 * block, 7 * block, block)
    );
    // The oracle has checked that nothing else changed, the null block included.
    carry_out(&scene, Mode::Read, b"done");
}

#[test]
fn row_11_vllm_42895_hybrid_engines_whose_attention_blocks_differ() {
    let model = ModelGeometry::new(
        "hybrid",
        vec![attention(4), state([4, 2, 2], 3, Some(4)), attention(4)],
    )
    .unwrap();
    let builder = |tokens| LayoutBuilder::new(&model, NHD).blocks(8).block_tokens(tokens);
    // 50 tokens are 5 blocks of 12 and 3 of 20.
    let scene = scene(
        engine(&builder(12), 4, &[&[5, 1, 4, 0, 2], &[6]]),
        engine(&builder(20), 1, &[&[7, 3, 1], &[2]]),
        50,
    );
    let kinds: Vec<GroupKind> =
        scene.producer.ranks[0].groups().iter().map(|group| group.kind).collect();
    assert_eq!(kinds, [GroupKind::Attention, GroupKind::State]);
    let moved = check(&scene);
    let attention = 50 * 2 * 2 * 4 * 4 * 2;
    let state = 8 * 3 * 4 + 4 * 6 * 4;
    assert_eq!(moved.bytes, attention + state);
    carry_out(&scene, Mode::Write, b"done");
}
