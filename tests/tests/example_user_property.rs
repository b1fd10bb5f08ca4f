//! How to property-test a layout of your own: see `docs/testing-layouts.md`.
//!
//! The layout here is made up: all layers of a block together, keys and values transposed (`[dims][tokens]`), blocks padded
//! to 64 bytes.

use kvx_core::layout::{Dtype, ModelGeometry, NamedLayout, RankLayout, RegionSpec};
use kvx_core::memory::MemoryKind;
use kvx_core::plan::Pairing;
use kvx_core::transfer::{Mode, Segment};
use kvx_tests::oracle::{Fault, Oracle, Run};
use kvx_tests::planner::{self, Trial};
use kvx_tests::strategy::{self, BlockOrder, EngineRecipe, Recipe};
use proptest::prelude::*;

/// Puts a rank's tensors where this engine puts them: `[blocks, tensors, heads, dims, tokens]`.
fn transposed(rank: RankLayout) -> kvx_core::Result<RankLayout> {
    let mut parts = rank.into_parts();
    let mut block = 0;
    let mut blocks = 1;
    for tensor in &mut parts.tensors {
        tensor.region = 0;
        tensor.base = block;
        tensor.token.stride = tensor.dtype.bytes();
        tensor.dim.stride = u64::from(tensor.token.extent) * tensor.token.stride;
        tensor.head.stride = u64::from(tensor.dim.extent) * tensor.dim.stride;
        block += u64::from(tensor.head.extent) * tensor.head.stride;
        blocks = blocks.max(u64::from(tensor.block.extent));
    }
    let block = block.next_multiple_of(64).max(64);
    for tensor in &mut parts.tensors {
        tensor.block.stride = block;
    }
    parts.regions = vec![RegionSpec { bytes: blocks * block, memory: MemoryKind::Host }];
    // Refused here if two elements shared a byte, or one lay outside.
    RankLayout::new(parts)
}

proptest! {
    #![proptest_config(strategy::config())]

    /// Whatever engine the cache comes from, every byte arrives, and nothing else changes.
    #[test]
    fn every_engine_can_fill_the_transposed_cache(
        recipe in strategy::recipe(
            strategy::attention(),
            strategy::engine(),
            strategy::named_engine(),
        ),
        trial in strategy::trial(),
    ) {
        let mut scene = recipe.scene()?;
        scene.consumer.ranks =
            scene.consumer.ranks.into_iter().map(transposed).collect::<Result<_, _>>()?;
        planner::check(&scene, &trial)?;
    }

    /// A planner of one's own is judged in the same way: this one copies single bytes.
    #[test]
    fn single_bytes_are_right_but_too_many(
        recipe in strategy::recipe(
            strategy::model(),
            strategy::engine(),
            strategy::engine(),
        ),
    ) {
        let scene = recipe.scene()?;
        let pairing = Pairing::new(&scene.producer.ranks, &scene.consumer.ranks, 0)?;
        let oracle = Oracle::new(&scene, pairing.pairs())?;
        let mut memory = oracle.memory()?;
        for pair in pairing.pairs() {
            let fewest = oracle.fewest(pair.producer, pair.consumer);
            let bytes: Vec<Segment> = fewest.iter().flat_map(single_bytes).collect();
            memory.apply(pair.producer, pair.consumer, Mode::Read, &bytes)?;
            let verdict = oracle.check_fewest(pair.producer, pair.consumer, Mode::Read, &bytes);
            let too_many = bytes.len() > fewest.len();
            prop_assert_eq!(matches!(verdict, Err(Fault::Segments(_))), too_many);
        }
        oracle.check(&memory)?;
    }
}

fn single_bytes(run: &Run) -> impl Iterator<Item = Segment> + use<> {
    let Run { to_region, to_offset, from_region, from_offset, bytes } = *run;
    (0..bytes).map(move |byte| Segment {
        local_region: to_region,
        remote_region: from_region,
        local_offset: to_offset + byte,
        remote_offset: from_offset + byte,
        bytes: 1,
    })
}

/// What it costs: between two such engines with contiguous blocks, one segment where padding allows.
#[test]
fn contiguous_blocks_of_64_bytes_are_one_segment() {
    // Per block of 4 tokens: 2 layers, keys and values, 2 heads of 2 elements of 1 byte: 64 bytes.
    let model = ModelGeometry::llama_like(2, 2, 2, Dtype::Fp8E4m3).unwrap();
    let engine = EngineRecipe {
        order: BlockOrder::Contiguous,
        ..EngineRecipe::plain(NamedLayout::FlashAttentionNhd, 4)
    };
    let mut scene = Recipe::whole(model, engine.clone(), engine, 16).scene().unwrap();
    for side in [&mut scene.producer, &mut scene.consumer] {
        side.ranks = vec![transposed(side.ranks.remove(0)).unwrap()];
    }
    let moved = planner::check(&scene, &Trial::default()).unwrap();
    assert_eq!((moved.pairs, moved.segments, moved.bytes), (1, 1, 4 * 64));
}
