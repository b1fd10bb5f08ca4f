//! Layers that keep a state.

use super::super::super::{ConvPart, SsmGeometry, StateGeometry};
use super::*;

/// x of 8 channels, B and C of 4 each, 3 taps; 4 heads of 6 elements.
fn state(groups: u32) -> LayerKind {
    LayerKind::State(StateGeometry {
        conv: vec![
            ConvPart { heads: 4, channels: 2 },
            ConvPart { heads: groups, channels: 4 / groups },
            ConvPart { heads: groups, channels: 4 / groups },
        ],
        taps: 3,
        conv_dtype: Dtype::Bf16,
        ssm: Some(SsmGeometry { heads: 4, dim: 6, dtype: Dtype::F32 }),
    })
}

fn model(groups: u32) -> ModelGeometry {
    let attention = LayerKind::Attention(AttentionGeometry::new(4, 8, Dtype::Bf16));
    let layers = vec![state(groups), LayerKind::Empty, attention, state(groups)];
    ModelGeometry::new("hybrid", layers).unwrap()
}

/// Global channels or heads, offset in a block, and strides of head and dim.
fn part(layout: &RankLayout, role: Role) -> (Range<u32>, u64, [u64; 2]) {
    let tensor = layout.tensor(key(0, role)).unwrap();
    assert_eq!(tensor.granularity, Granularity::Block);
    (tensor.head_range(), tensor.base, [tensor.head.stride, tensor.dim.stride])
}

#[test]
fn a_state_group_comes_last() {
    let layout = one(&LayoutBuilder::new(&model(2), NamedLayout::FlashInferNhd).state_blocks(7));
    let groups: Vec<_> = layout.groups().iter().map(|group| (group.kind, group.blocks)).collect();
    assert_eq!(groups, [(GroupKind::Attention, 1024), (GroupKind::State, 7)]);
    assert_eq!(layout.tensors().len(), 2 + 2 * 4);
    // 16 channels of 3 taps of 2 bytes, and 4 heads of 6 elements of 4 bytes.
    let bytes: Vec<u64> = layout.regions().iter().map(|region| region.bytes).collect();
    assert_eq!(bytes, [1024 * 2048, 7 * 192, 7 * 192]);
}

#[test]
fn parts_of_a_conv_state_lie_in_one_row() {
    let layout = one(&LayoutBuilder::new(&model(2), NamedLayout::FlashAttentionNhd));
    assert_eq!(part(&layout, Role::ConvState(0)), (0..8, 0, [6, 2]));
    assert_eq!(part(&layout, Role::ConvState(1)), (0..4, 48, [6, 2]));
    assert_eq!(part(&layout, Role::ConvState(2)), (0..4, 72, [6, 2]));
    assert_eq!(part(&layout, Role::SsmState), (0..4, 96, [24, 4]));
    let taps = LayoutBuilder::new(&model(2), NamedLayout::FlashAttentionNhd);
    let taps = one(&taps.conv_order(ConvOrder::TapsOutside));
    assert_eq!(part(&taps, Role::ConvState(0)), (0..8, 0, [2, 32]));
    assert_eq!(part(&taps, Role::ConvState(1)), (0..4, 16, [2, 32]));
    assert_eq!(part(&taps, Role::ConvState(2)), (0..4, 24, [2, 32]));
    assert_eq!(part(&taps, Role::SsmState), (0..4, 96, [24, 4]));
}

/// Known failure 19 (vllm#37638): x, B and C differ in size, and each splits by itself.
#[test]
fn parts_of_a_conv_state_split_separately() {
    let builder = LayoutBuilder::new(&model(2), NamedLayout::FlashInferNhd);
    let ranks = builder.build_replica(Grid::new(2, 1, 1).unwrap(), 0).unwrap();
    assert_eq!(part(&ranks[1], Role::ConvState(0)), (4..8, 0, [6, 2]));
    assert_eq!(part(&ranks[1], Role::ConvState(1)), (2..4, 24, [6, 2]));
    assert_eq!(part(&ranks[1], Role::ConvState(2)), (2..4, 36, [6, 2]));
    assert_eq!(part(&ranks[1], Role::SsmState), (2..4, 48, [24, 4]));
    let total = |role| ranks[1].tensor(key(0, role)).unwrap().heads.total;
    assert_eq!([0, 1, 2].map(|part| total(Role::ConvState(part))), [8, 4, 4]);
}

/// With more ranks than groups, whole groups are replicated, as heads are.
#[test]
fn groups_are_replicated() {
    let builder = LayoutBuilder::new(&model(2), NamedLayout::FlashInferNhd);
    let ranks = builder.build_replica(Grid::new(4, 1, 1).unwrap(), 0).unwrap();
    let held = |part_number| -> Vec<_> {
        ranks.iter().map(|rank| part(rank, Role::ConvState(part_number)).0).collect()
    };
    assert_eq!(held(0), [0..2, 2..4, 4..6, 6..8]);
    assert_eq!(held(1), [0..2, 0..2, 2..4, 2..4]);
    assert_eq!(held(2), held(1));
    let one_group = LayoutBuilder::new(&model(1), NamedLayout::FlashInferNhd);
    let ranks = one_group.build_replica(Grid::new(4, 1, 1).unwrap(), 0).unwrap();
    assert!(ranks.iter().all(|rank| part(rank, Role::ConvState(1)).0 == (0..4)));
}

#[test]
fn across_layers_states_have_blocks_of_their_own() {
    for named in [NamedLayout::CrossLayerNhd, NamedLayout::CrossLayerHnd] {
        let layout = one(&LayoutBuilder::new(&model(2), named).blocks(5).state_blocks(7));
        assert_eq!(strides(&layout, 2, Role::Key).0, 0);
        assert_eq!(part(&layout, Role::SsmState), (0..4, 96, [24, 4]));
        let second = layout.tensor(key(3, Role::ConvState(1))).unwrap();
        assert_eq!((second.region, second.base, second.block), (1, 192 + 48, Axis::new(7, 384)));
        assert_eq!(layout.regions()[1].bytes, 7 * 384);
    }
}

/// vLLM pads the blocks of a state to those of the attention layers whose memory they use.
#[test]
fn aliased_states_are_padded() {
    let builder = LayoutBuilder::new(&model(2), NamedLayout::FlashInferNhd)
        .blocks(10)
        .block_tokens(4)
        .kernel_block_tokens(2)
        .group_layers(1)
        .alias_groups(true);
    let layout = one(&builder);
    // One attention group of one layer, two state groups of one layer: all in the same memory.
    assert_eq!((layout.groups().len(), layout.regions().len()), (3, 1));
    assert_eq!(layout.tensor(key(2, Role::Key)).unwrap().block, Axis::new(20, 256));
    for layer in [0, 3] {
        let state = layout.tensor(key(layer, Role::SsmState)).unwrap();
        assert_eq!((state.region, state.base, state.block), (0, 96, Axis::new(10, 512)));
    }
    let coords = *layout.coords();
    let error = builder.block_tokens(1).kernel_block_tokens(1).build(coords).unwrap_err();
    assert!(error.to_string().contains("10 blocks of 128 bytes, and 10 of 192"), "{error}");
}

#[test]
fn parts_of_different_width_are_aligned() {
    let odd = StateGeometry {
        conv: vec![ConvPart { heads: 1, channels: 1 }],
        taps: 1,
        conv_dtype: Dtype::Bf16,
        ssm: Some(SsmGeometry { heads: 1, dim: 1, dtype: Dtype::F64 }),
    };
    let model = ModelGeometry::new("odd", vec![LayerKind::State(odd)]).unwrap();
    let layout = one(&LayoutBuilder::new(&model, NamedLayout::FlashInferNhd).blocks(3));
    let ssm = layout.tensor(key(0, Role::SsmState)).unwrap();
    assert_eq!((ssm.base, ssm.block.stride), (8, 16));
}
