//! Which layers share a block table, and which groups the same memory.

use super::super::super::Window;
use super::*;

/// Layers with windows: `*` is full, `s` slides over 4 tokens, `c` has chunks of 8.
fn windowed(kinds: &str) -> ModelGeometry {
    let layer = |kind| {
        let window = match kind {
            's' => Window::Sliding(4),
            'c' => Window::Chunked(8),
            _ => Window::Full,
        };
        LayerKind::Attention(AttentionGeometry::new(4, 8, Dtype::Bf16).with_window(window))
    };
    ModelGeometry::new("windowed", kinds.chars().map(layer).collect()).unwrap()
}

/// The layers of each group.
fn members(layout: &RankLayout) -> Vec<Vec<u32>> {
    let mut all = vec![Vec::new(); layout.groups().len()];
    for tensor in layout.tensors().iter().filter(|t| t.role == Role::Key) {
        all[tensor.group as usize].push(tensor.layer);
    }
    all
}

fn windows(layout: &RankLayout) -> Vec<Window> {
    layout.tensors().iter().filter(|t| t.role == Role::Key).map(|t| t.window).collect()
}

#[test]
fn one_block_table_serves_all_windows() {
    let layout = one(&LayoutBuilder::new(&windowed("cc*"), NamedLayout::FlashInferNhd));
    assert_eq!(members(&layout), [[0, 1, 2]]);
    assert_eq!(windows(&layout), [Window::Chunked(8), Window::Chunked(8), Window::Full]);
}

/// Known failure 24 (vllm#42024): a configuration with two groups keeps two.
#[test]
fn windows_get_groups_of_their_own() {
    let builder = LayoutBuilder::new(&windowed("s*sc"), NamedLayout::FlashInferNhd)
        .block_tokens(256)
        .blocks(10)
        .group_by_window(true)
        .window_block_tokens(4)
        .window_blocks(70)
        .null_block(Some(0));
    let layout = one(&builder);
    assert_eq!(members(&layout), [vec![1], vec![0, 2], vec![3]]);
    assert_eq!(windows(&layout)[..2], [Window::Sliding(4), Window::Full]);
    // Known failure 12 (vllm#50714): groups of very different block sizes keep their own geometry.
    let sizes: Vec<_> =
        layout.groups().iter().map(|g| (g.block_tokens, g.kernel_block_tokens, g.blocks)).collect();
    assert_eq!(sizes, [(256, 256, 10), (4, 4, 70), (4, 4, 70)]);
    assert!(layout.groups().iter().all(|group| group.null_block == Some(0)));
    let full = layout.tensor(key(1, Role::Key)).unwrap();
    assert_eq!((full.block, full.token), (Axis::new(10, 32_768), Axis::new(256, 64)));
    let sliding = layout.tensor(key(0, Role::Key)).unwrap();
    assert_eq!((sliding.block, sliding.token), (Axis::new(70, 512), Axis::new(4, 64)));
}

#[test]
fn a_group_of_windows_only_comes_first() {
    let builder = LayoutBuilder::new(&windowed("ss"), NamedLayout::FlashInferNhd);
    let layout = one(&builder.group_by_window(true).window_block_tokens(2));
    assert_eq!(members(&layout), [[0, 1]]);
    assert_eq!(layout.groups()[0].block_tokens, 2);
}

#[test]
fn groups_have_the_same_number_on_every_stage() {
    let builder =
        LayoutBuilder::new(&windowed("**ss"), NamedLayout::CrossLayerNhd).group_by_window(true);
    let ranks = builder.build_replica(Grid::new(2, 2, 1).unwrap(), 0).unwrap();
    let all: Vec<_> = ranks.iter().map(members).collect();
    assert_eq!(all[0], [vec![0, 1], vec![]]);
    assert_eq!(all[3], [vec![], vec![2, 3]]);
    assert!(ranks.iter().all(|rank| rank.groups() == ranks[0].groups()));
}

/// vLLM's hybrid allocator: as many layers in every group, layer `i` of each in the same memory.
#[test]
fn aliased_groups_share_memory_layer_by_layer() {
    let builder = LayoutBuilder::new(&windowed("ssss**"), NamedLayout::FlashInferNhd)
        .blocks(10)
        .group_by_window(true)
        .group_layers(2)
        .alias_groups(true);
    let layout = one(&builder);
    assert_eq!(members(&layout), [vec![4, 5], vec![0, 2], vec![1, 3]]);
    let region = |layer| layout.tensor(key(layer, Role::Key)).unwrap().region;
    assert_eq!([4, 0, 1, 5, 2, 3].map(region), [0, 0, 0, 1, 1, 1]);
    assert_eq!(layout.regions().len(), 2);
    // On two stages each layer takes the place that it has among its group's on that stage.
    let ranks = builder.build_replica(Grid::new(1, 2, 1).unwrap(), 0).unwrap();
    assert_eq!(members(&ranks[0]), [vec![], vec![0, 2], vec![1]]);
    assert_eq!(members(&ranks[1]), [vec![4, 5], vec![], vec![3]]);
    let region = |layer| ranks[1].tensor(key(layer, Role::Value)).unwrap().region;
    assert_eq!([4, 5, 3].map(region), [0, 1, 0]);
}

#[test]
fn keys_and_values_apart_may_be_aliased_too() {
    let builder = LayoutBuilder::new(&windowed("s*"), NamedLayout::FlashAttentionHnd)
        .group_by_window(true)
        .alias_groups(true);
    let layout = one(&builder.clone().regions(RegionPolicy::PerLayer).blocks(10));
    assert_eq!(layout.regions().len(), 1);
    assert_eq!(strides(&layout, 0, Role::Value), (0, 10_240, [1024, 16, 256, 2]));
    assert_eq!(strides(&layout, 1, Role::Value), (0, 10_240, [1024, 16, 256, 2]));
    // Twice the tokens of half the heads are blocks of the same size, also where kernel blocks are not.
    let tokens = builder.block_tokens(32).kernel_block_tokens(8).blocks(10);
    assert_eq!(one(&tokens).regions().len(), 2);
}

#[test]
fn groups_that_do_not_fit_are_not_aliased() {
    let builder = LayoutBuilder::new(&windowed("s*"), NamedLayout::FlashInferNhd)
        .group_by_window(true)
        .alias_groups(true)
        .blocks(10);
    let coords = Grid::new(1, 1, 1).unwrap().ranks().next().unwrap();
    let refused = |builder: LayoutBuilder| builder.build(coords).unwrap_err().to_string();
    let error = refused(builder.clone().window_block_tokens(8));
    assert!(error.contains("groups 0 and 1 cannot share memory"), "{error}");
    assert!(error.contains("10 blocks of 2048 bytes, and 10 of 1024"), "{error}");
    assert!(refused(builder.clone().window_blocks(9)).contains("and 9 of 2048"));
    assert!(builder.alias_groups(false).window_block_tokens(8).build(coords).is_ok());
}

/// Known failures 18 and 119 (vllm PR#49230, vllm#54926): what only one side has is declared, and changes no number that
/// both sides use.
#[test]
fn a_draft_is_local_only() {
    let draft = windowed("*c");
    let plain = LayoutBuilder::new(&windowed("s*s*"), NamedLayout::FlashInferNhd)
        .group_by_window(true)
        .group_layers(1);
    let grid = Grid::new(1, 2, 1).unwrap();
    let with = plain.clone().draft(&draft).build_replica(grid, 0).unwrap();
    let without = plain.build_replica(grid, 0).unwrap();
    assert_eq!(with[0].tensors(), without[0].tensors());
    let names =
        |tensors: &[Tensor]| -> Vec<_> { tensors.iter().map(|t| (t.key(), t.group)).collect() };
    assert_eq!(names(&with[1].tensors()[..4]), names(without[1].tensors()));
    assert_eq!(with[1].groups()[..4], *without[1].groups());
    let draft: Vec<_> =
        with[1].tensors()[4..].iter().map(|t| (t.layer, t.group, t.local_only)).collect();
    assert_eq!(draft, [(4, 0, true), (4, 0, true), (5, 4, true), (5, 4, true)]);
    assert!(without.iter().flat_map(RankLayout::tensors).all(|tensor| !tensor.local_only));
}
