//! Figures of well-known cases. The laws are tested in `kvx-tests`, against an oracle.

use super::*;
use crate::capability::Limits;
use crate::layout::{Grid, LayoutBuilder, ModelGeometry, NamedLayout, RankLayout};
use crate::transfer::Mode;

const TOKENS: u64 = 512;

struct Engine {
    ranks: Vec<RankLayout>,
    table: Vec<u32>,
}

fn engine(
    model: &ModelGeometry,
    layout: NamedLayout,
    tp: u32,
    block: u32,
    reversed: bool,
) -> Engine {
    let blocks = u32::try_from(TOKENS).unwrap() / block;
    let builder = LayoutBuilder::new(model, layout).block_tokens(block).blocks(blocks + 8);
    let ranks = builder.build_replica(Grid::new(tp, 1, 1).unwrap(), 0).unwrap();
    let mut table: Vec<u32> = (4..4 + blocks).collect();
    if reversed {
        table.reverse();
    }
    Engine { ranks, table }
}

/// All segments between two engines, as (pairs, segments, shortest, longest).
fn figures(producer: &Engine, consumer: &Engine) -> (usize, u64, u64, u64) {
    let (figures, foretold) = figures_and_runs(producer, consumer);
    assert!(figures.1 <= foretold, "{figures:?}, {foretold}");
    figures
}

/// The same, and how many runs were foretold.
fn figures_and_runs(producer: &Engine, consumer: &Engine) -> ((usize, u64, u64, u64), u64) {
    let mut foretold = 0;
    let pairing = Pairing::new(&producer.ranks, &consumer.ranks, 0).unwrap();
    let (from, to) = ([BlockTable::new(&producer.table)], [BlockTable::new(&consumer.table)]);
    let mut list = SegmentList::new();
    let mut runs = Vec::new();
    for pair in pairing.pairs() {
        let plan =
            PeerPlan::compile(&producer.ranks[pair.producer], &consumer.ranks[pair.consumer], pair)
                .unwrap();
        let request = Request::whole(TOKENS, &from, &to);
        plan.segments(&request, Mode::Read, &Limits::unlimited(), &mut list).unwrap();
        runs.extend(list.as_slice().iter().map(|segment| segment.bytes));
        foretold += plan.runs(&request).unwrap();
    }
    let cost = Cost::of(runs);
    ((pairing.pairs().len(), cost.segments, cost.shortest_run, cost.longest_run), foretold)
}

use NamedLayout::{
    CrossLayerHnd, FlashAttentionHnd as Hnd, FlashAttentionNhd as Nhd, FlashInferHnd, PackedHnd,
};

fn llama(
    layouts: (NamedLayout, NamedLayout),
    tp: (u32, u32),
    block: (u32, u32),
) -> [(u64, u64, u64); 2] {
    let model = ModelGeometry::preset("llama-3.1-8b").unwrap();
    [false, true].map(|permuted| {
        let producer = engine(&model, layouts.0, tp.0, block.0, permuted);
        let consumer = engine(&model, layouts.1, tp.1, block.1, false);
        let (_, segments, shortest, longest) = figures(&producer, &consumer);
        (segments, shortest, longest)
    })
}

/// Where blocks do not continue each other, what is foretold is what is listed.
#[test]
fn the_length_of_a_list_is_foretold() {
    let model = ModelGeometry::preset("llama-3.1-8b").unwrap();
    for (layouts, tp, block) in [
        ((Hnd, Nhd), (1, 1), (16, 16)),
        ((Nhd, Nhd), (1, 2), (16, 16)),
        ((Hnd, Hnd), (2, 4), (16, 32)),
        ((Hnd, Nhd), (4, 2), (32, 16)),
    ] {
        let producer = engine(&model, layouts.0, tp.0, block.0, true);
        let consumer = engine(&model, layouts.1, tp.1, block.1, false);
        let ((_, segments, ..), foretold) = figures_and_runs(&producer, &consumer);
        assert_eq!(segments, foretold, "{layouts:?} {tp:?} {block:?}");
    }
}

#[test]
fn a_cost_is_that_of_its_lengths() {
    let naive = |mut lengths: Vec<u64>| {
        lengths.sort_unstable();
        let middle = lengths[(lengths.len() - 1) / 2];
        (lengths.len() as u64, lengths.iter().sum(), lengths[0], middle, lengths[lengths.len() - 1])
    };
    for lengths in [
        vec![7],
        vec![0],
        vec![0, 0, 3],
        vec![5, 5, 1],
        vec![1, 2, 3, 4],
        vec![4, 4, 4, 1, 1, 4, 9, 1],
        vec![2, 1, 2, 1, 2, 1],
    ] {
        let Cost { segments, bytes, shortest_run, median_run, longest_run } =
            Cost::of(lengths.clone());
        let cost: (u64, u64, u64, u64, u64) =
            (segments, bytes, shortest_run, median_run, longest_run);
        assert_eq!(cost, naive(lengths.clone()), "{lengths:?}");
        let mut counts = std::collections::BTreeMap::new();
        for part in lengths.chunks(3) {
            count_lengths(part.iter().copied(), &mut counts);
        }
        assert_eq!(Cost::of_counts(&counts), Cost::of(lengths));
    }
    assert_eq!(Cost::of([]), Cost::default());
}

#[test]
fn whole_blocks_of_like_layouts() {
    let [contiguous, permuted] = llama((Nhd, Nhd), (1, 1), (16, 16));
    assert_eq!(contiguous, (64, 1 << 20, 1 << 20));
    assert_eq!(permuted, (2048, 32 << 10, 32 << 10));
    assert_eq!(llama((FlashInferHnd, FlashInferHnd), (1, 1), (16, 16))[1].0, 1024);
    assert_eq!(llama((PackedHnd, PackedHnd), (1, 1), (16, 16))[1].0, 1024);
}

#[test]
fn heads_split_over_two_ranks() {
    assert_eq!(llama((Hnd, Hnd), (1, 2), (16, 16))[0], (4096, 16 << 10, 16 << 10));
    assert_eq!(llama((Nhd, Nhd), (1, 2), (16, 16))[0], (65_536, 1 << 10, 1 << 10));
}

#[test]
fn heads_and_tokens_swapped() {
    let [contiguous, permuted] = llama((Hnd, Nhd), (1, 1), (16, 16));
    assert_eq!(contiguous, (260_160, 256, 512));
    assert_eq!(permuted, (262_144, 256, 256));
}

#[test]
fn blocks_of_another_size() {
    let [contiguous, permuted] = llama((Nhd, Nhd), (1, 1), (16, 32));
    assert_eq!((contiguous.0, permuted.0), (64, 2048));
    let [contiguous, permuted] = llama((Hnd, Hnd), (1, 1), (16, 32));
    assert_eq!(contiguous.0, 15_424);
    assert_eq!(permuted, (16_384, 4 << 10, 4 << 10));
}

#[test]
fn all_layers_of_a_block_together() {
    let [contiguous, permuted] = llama((CrossLayerHnd, CrossLayerHnd), (1, 1), (16, 16));
    assert_eq!(contiguous.0, 1);
    assert_eq!(permuted.0, 32);
}

#[test]
fn a_latent_is_read_from_one_replica_each() {
    let model = ModelGeometry::preset("deepseek-v3").unwrap();
    let producer = engine(&model, Nhd, 8, 64, false);
    let consumer = engine(&model, Nhd, 8, 64, false);
    let (pairs, segments, ..) = figures(&producer, &consumer);
    assert_eq!((pairs, segments), (8, 8 * 61));
    let pairing = Pairing::new(&producer.ranks, &consumer.ranks, 0).unwrap();
    let matches: Vec<_> =
        pairing.pairs().iter().map(|pair| (pair.producer, pair.consumer)).collect();
    assert_eq!(matches, (0..8).map(|rank| (rank, rank)).collect::<Vec<_>>());
}

#[test]
fn grids_that_do_not_divide_each_other() {
    let model = ModelGeometry::llama_like(2, 12, 64, crate::layout::Dtype::Bf16).unwrap();
    let producer = engine(&model, Nhd, 3, 16, false);
    let consumer = engine(&model, Nhd, 2, 16, false);
    let pairing = Pairing::new(&producer.ranks, &consumer.ranks, 0).unwrap();
    let pairs: Vec<_> = pairing.pairs().iter().map(|pair| (pair.producer, pair.consumer)).collect();
    assert_eq!(pairs, [(0, 0), (1, 0), (1, 1), (2, 1)]);
}

#[test]
fn a_write_is_the_read_seen_from_the_other_side() {
    let model = ModelGeometry::llama_like(2, 4, 8, crate::layout::Dtype::Bf16).unwrap();
    let (producer, consumer) =
        (engine(&model, Hnd, 1, 16, true), engine(&model, Nhd, 1, 32, false));
    let pairing = Pairing::new(&producer.ranks, &consumer.ranks, 0).unwrap();
    let plan =
        PeerPlan::compile(&producer.ranks[0], &consumer.ranks[0], &pairing.pairs()[0]).unwrap();
    let (from, to) = ([BlockTable::new(&producer.table)], [BlockTable::new(&consumer.table)]);
    let request = Request::whole(TOKENS, &from, &to).with_range(5..300);
    let (mut read, mut write) = (SegmentList::new(), SegmentList::new());
    plan.segments(&request, Mode::Read, &Limits::unlimited(), &mut read).unwrap();
    plan.segments(&request, Mode::Write, &Limits::unlimited(), &mut write).unwrap();
    let swapped: Vec<_> = write
        .as_slice()
        .iter()
        .map(|segment| crate::transfer::Segment {
            local_region: segment.remote_region,
            remote_region: segment.local_region,
            local_offset: segment.remote_offset,
            remote_offset: segment.local_offset,
            bytes: segment.bytes,
        })
        .collect();
    assert_eq!(read.as_slice(), swapped);
}

#[test]
fn limits_cut_segments_and_batches() {
    let model = ModelGeometry::llama_like(1, 4, 8, crate::layout::Dtype::Bf16).unwrap();
    let (producer, consumer) =
        (engine(&model, Nhd, 1, 16, false), engine(&model, Nhd, 1, 16, false));
    let pairing = Pairing::new(&producer.ranks, &consumer.ranks, 0).unwrap();
    let plan =
        PeerPlan::compile(&producer.ranks[0], &consumer.ranks[0], &pairing.pairs()[0]).unwrap();
    let (from, to) = ([BlockTable::new(&producer.table)], [BlockTable::new(&consumer.table)]);
    let request = Request::whole(TOKENS, &from, &to);
    let mut limits = Limits::unlimited();
    limits.max_segment_bytes = 10_000;
    limits.max_batch_segments = 3;
    let mut list = SegmentList::new();
    plan.segments(&request, Mode::Read, &limits, &mut list).unwrap();
    // Two tensors of 32,768 contiguous bytes: three pieces of 10,000 bytes and one of 2,768 each.
    let bytes: Vec<_> = list.as_slice().iter().map(|segment| segment.bytes).collect();
    assert_eq!(bytes, [10_000, 10_000, 10_000, 2_768, 10_000, 10_000, 10_000, 2_768]);
    assert_eq!(list.batches().map(<[_]>::len).collect::<Vec<_>>(), [3, 3, 2]);
    assert_eq!(list.bytes(), 65_536);
    limits.max_segment_bytes = 0;
    assert!(plan.segments(&request, Mode::Read, &limits, &mut list).is_err());
    assert!(list.is_empty());
}

#[test]
fn bad_block_tables_are_refused_by_name() {
    let model = ModelGeometry::llama_like(1, 1, 8, crate::layout::Dtype::Bf16).unwrap();
    let builder = LayoutBuilder::new(&model, Nhd).block_tokens(16).blocks(10).null_block(Some(0));
    let ranks = builder.build_replica(Grid::new(1, 1, 1).unwrap(), 0).unwrap();
    let pairing = Pairing::new(&ranks, &ranks, 0).unwrap();
    let plan = PeerPlan::compile(&ranks[0], &ranks[0], &pairing.pairs()[0]).unwrap();
    let mut list = SegmentList::new();
    let mut refusal = |from: &[u32], to: &[u32]| {
        let (from, to) = ([BlockTable::new(from)], [BlockTable::new(to)]);
        let request = Request::whole(40, &from, &to);
        let done = plan.segments(&request, Mode::Read, &Limits::unlimited(), &mut list);
        done.err().map_or_else(String::new, |error| {
            assert!(error.remedy().is_some(), "{error}");
            error.to_string()
        })
    };
    assert_eq!(refusal(&[1, 2, 3], &[4, 5, 6]), "");
    assert!(refusal(&[1, 2], &[4, 5, 6]).contains("does not reach a needed block (side=producer"));
    assert!(refusal(&[1, 2, 3], &[4, 5, 10]).contains("out of range (side=consumer"));
    assert!(refusal(&[1, 2, 3], &[0, 5, 6]).contains("the null block (side=consumer"));
    assert!(refusal(&[1, 0, 3], &[4, 5, 6]).contains("the null block (side=producer"));
    assert!(refusal(&[1, 2, 3], &[4, 5, 4]).contains("in the table twice (side=consumer"));
    let request = Request::whole(40, &[], &[]);
    let done = plan.segments(&request, Mode::Read, &Limits::unlimited(), &mut list);
    assert!(done.unwrap_err().to_string().contains("no block table"));
}

#[test]
fn a_table_at_the_end_of_all_numbers_is_read_without_overflow() {
    use crate::layout::{CacheGroup, GroupKind};
    let group = CacheGroup {
        kind: GroupKind::State,
        block_tokens: 1,
        kernel_block_tokens: 1,
        blocks: 4,
        null_block: None,
    };
    let side = pieces::Side::new("consumer", 0, &group);
    let mut out = Vec::new();
    let table = BlockTable::starting_at(u64::MAX, &[1, 2]);
    pieces::state((&side, &table), (&side, &table), 5, &(0..5), &mut out).unwrap();
    assert_eq!((out[0].to_block, out[0].from_block), (2, 2));
    let bad = BlockTable::starting_at(u64::MAX, &[1, 9]);
    assert!(pieces::state((&side, &bad), (&side, &table), 5, &(0..5), &mut out).is_err());
}
