//! The planner against the oracle, over random models, layouts, block tables and requests.
//!
//! `KVX_CASES` is the number of cases of each property, `KVX_SEED` replays a run.

use kvx_core::capability::Limits;
use kvx_core::layout::{
    AttentionGeometry, Axis, CacheGroup, Dtype, Granularity, Grid, GroupKind, HeadShard, LayerKind,
    ModelGeometry, NamedLayout, RankCoords, RankLayout, RankLayoutParts, RegionSpec, Role, Tensor,
    TokenShard, Window,
};
use kvx_core::memory::MemoryKind;
use kvx_core::plan::{Pairing, PeerPlan, SegmentList, chunks};
use kvx_core::transfer::Mode;
use kvx_tests::oracle::{Fault, Oracle, Scene, Side, Table};
use kvx_tests::planner::Trial;
use kvx_tests::strategy::{EngineRecipe, Recipe};
use kvx_tests::{planner, strategy};
use proptest::prelude::*;
use proptest::sample::Index;

proptest! {
    #![proptest_config(strategy::config())]

    #[test]
    fn exact_between_named_layouts(
        recipe in strategy::recipe(strategy::attention(), strategy::named_engine(), strategy::named_engine()),
        trial in strategy::trial(),
    ) {
        planner::check(&recipe.scene()?, &trial)?;
    }

    #[test]
    fn exact_between_layouts_of_any_strides(
        recipe in strategy::recipe(strategy::model(), strategy::custom_engine(), strategy::custom_engine()),
        trial in strategy::trial(),
    ) {
        planner::check(&recipe.scene()?, &trial)?;
    }

    #[test]
    fn exact_with_windows(
        recipe in strategy::recipe(strategy::windowed(), strategy::engine(), strategy::engine()),
        trial in strategy::trial(),
    ) {
        planner::check(&recipe.scene()?, &trial)?;
    }

    #[test]
    fn exact_for_models_of_every_kind(
        recipe in strategy::recipe(strategy::model(), strategy::engine(), strategy::engine()),
        trial in strategy::trial(),
    ) {
        planner::check(&recipe.scene()?, &trial)?;
    }
}

/// Whatever is moved in chunks, or layer by layer, or both, is in the end what is moved at once: every byte once.
fn adds_up(whole: &Scene, parts: &[Scene]) -> Result<(), TestCaseError> {
    let (producers, consumers) = (&whole.producer.ranks, &whole.consumer.ranks);
    let pairing = Pairing::new(producers, consumers, 0)?;
    let oracle = Oracle::new(whole, pairing.pairs())?;
    let mut memory = oracle.memory()?;
    let mut list = SegmentList::new();
    for pair in pairing.pairs() {
        let (producer, consumer) = (&producers[pair.producer], &consumers[pair.consumer]);
        let plan = PeerPlan::compile(producer, consumer, pair)?;
        for part in parts {
            let (from, to) = (part.producer.borrowed_tables(), part.consumer.borrowed_tables());
            let request = part.request(&from, &to);
            plan.segments(&request, Mode::Write, &Limits::unlimited(), &mut list)?;
            memory.apply(pair.producer, pair.consumer, Mode::Write, list.as_slice())?;
        }
    }
    oracle.check(&memory)?;
    Ok(())
}

proptest! {
    #![proptest_config(strategy::config())]

    #[test]
    fn chunks_and_layers_add_up(
        recipe in strategy::recipe(strategy::model(), strategy::engine(), strategy::engine()),
        held in any::<u16>(),
        chunk in 1_u64..12,
        by_layer in any::<bool>(),
    ) {
        let mut recipe = recipe;
        let held = u64::from(held) % (recipe.tokens + 1);
        recipe.range = held..recipe.tokens;
        recipe.layers = 0..u32::MAX;
        let whole = recipe.scene()?;
        // Chunks of whole blocks, which suits also what is kept once per block.
        let chunk = chunk.next_multiple_of(recipe.producer.kernel_tokens.into());
        let layers = recipe.model.num_layers();
        let mut parts = Vec::new();
        for step in chunks(recipe.tokens, chunk, whole.range.start)? {
            let part = Scene { range: step.range, ..whole.clone() };
            if by_layer {
                parts.extend((0..layers).map(|at| Scene { layers: at..at + 1, ..part.clone() }));
            } else {
                parts.push(part);
            }
        }
        adds_up(&whole, &parts)?;
    }

    /// The planner refuses what cannot be served, and nothing else.
    #[test]
    fn a_broken_table_is_refused_where_it_is_needed(
        recipe in strategy::recipe(strategy::model(), strategy::engine(), strategy::engine()),
        break_producer in any::<bool>(),
        (group, entry, other) in any::<(Index, Index, Index)>(),
        kind in 0_u8..5,
    ) {
        let mut recipe = recipe;
        recipe.layers = 0..u32::MAX;
        // With shared memory, what two pairs of ranks write in the same place is not to be seen from either pair.
        recipe.consumer.alias_groups = false;
        let mut scene = recipe.scene()?;
        let side = if break_producer { &mut scene.producer } else { &mut scene.consumer };
        let groups = side.ranks[0].groups();
        if groups.is_empty() {
            return Ok(());
        }
        let group = group.index(groups.len());
        let (null, blocks) = (groups[group].null_block, groups[group].blocks);
        let table = &mut side.tables[group];
        if table.ids.is_empty() {
            return Ok(());
        }
        let (entry, other) = (entry.index(table.ids.len()), other.index(table.ids.len()));
        match kind {
            0 => table.ids[entry] = null.unwrap_or(blocks),
            1 => table.ids[entry] = blocks,
            2 => table.ids.truncate(entry),
            // A block that is read twice is the producer's affair.
            3 if !break_producer => table.ids[entry] = table.ids[other],
            3 => {}
            _ => table.first += 1,
        }
        served_or_refused(&scene)?;
    }

    /// The same for ranges that begin anywhere, where most tensors have scales and some have them once per block.
    #[test]
    fn a_range_within_a_block_is_refused_where_something_is_kept_per_block(
        recipe in strategy::recipe(strategy::quantized(), strategy::engine(), strategy::engine()),
        start in any::<Index>(),
    ) {
        let mut recipe = recipe;
        recipe.layers = 0..u32::MAX;
        recipe.range = 0..recipe.tokens;
        let mut scene = recipe.scene()?;
        scene.range.start = start.index(usize::try_from(recipe.tokens)? + 1).try_into()?;
        served_or_refused(&scene)?;
    }
}

fn served_or_refused(scene: &Scene) -> Result<(), Fault> {
    match planner::check(scene, &Trial::default()) {
        // A broken table of a producer whose groups share memory may name a block of another group's.
        Ok(_) | Err(Fault::Scene(_) | Fault::Contradiction(_)) => Ok(()),
        Err(fault) => Err(fault),
    }
}

/// A window of one token takes the next token alone, so the cache holds nothing that is needed: not even the rest of a block.
#[test]
fn nothing_is_moved_where_a_window_needs_nothing() {
    for (window, tokens) in
        [(Window::Sliding(1), 7), (Window::Chunked(5), 10), (Window::Chunked(1), 4)]
    {
        let layer = AttentionGeometry::new(1, 1, Dtype::Bf16).with_window(window);
        let model = ModelGeometry::new("tiny", vec![LayerKind::Attention(layer)]).unwrap();
        let engine = EngineRecipe::plain(NamedLayout::FlashAttentionNhd, 3);
        let recipe = Recipe::whole(model, engine.clone(), engine, tokens);
        let moved = planner::check(&recipe.scene().unwrap(), &Trial::default()).unwrap();
        assert_eq!((moved.segments, moved.bytes), (0, 0), "{window}, {tokens} tokens");
    }
}

/// Layer 0's keys lie around its values on the consumer, so the runs of a block do not come in order; and the first run of
/// layer 1, which has a window and so is listed by itself, continues a run from the middle of that block on both sides.
#[test]
fn a_run_may_continue_what_lies_before_the_last_run_of_a_block() {
    let tensor = |layer, role, [block, token]: [(u32, u64); 2], base, window| Tensor {
        layer,
        role,
        dtype: Dtype::U8,
        group: 0,
        region: 0,
        base,
        block: Axis::new(block.0, block.1),
        token: Axis::new(token.0, token.1),
        head: Axis::new(1, 1),
        dim: Axis::new(1, 1),
        heads: HeadShard { first: 0, total: 1 },
        granularity: Granularity::Token,
        window,
        tokens: TokenShard::All,
        local_only: false,
    };
    let side = |tokens, blocks, tensors: [Tensor; 3], ids: &[u32]| {
        let grid = Grid::new(1, 1, 1).unwrap();
        let parts = RankLayoutParts {
            coords: RankCoords { grid, tp: 0, pp: 0, dp: 0 },
            regions: vec![RegionSpec { bytes: 16, memory: MemoryKind::Host }],
            groups: vec![CacheGroup {
                kind: GroupKind::Attention,
                block_tokens: tokens,
                kernel_block_tokens: tokens,
                blocks,
                null_block: None,
            }],
            tensors: tensors.to_vec(),
        };
        Side { ranks: vec![RankLayout::new(parts).unwrap()], tables: vec![Table::new(ids)] }
    };
    let window = Window::Sliding(9);
    let single = |layer, role, base, window| tensor(layer, role, [(2, 2), (1, 0)], base, window);
    let producer = [
        single(0, Role::Key, 8, Window::Full),
        single(0, Role::Value, 0, Window::Full),
        single(1, Role::Key, 3, window),
    ];
    let double =
        |layer, role, token, base, window| tensor(layer, role, [(1, 0), (2, token)], base, window);
    let consumer = [
        double(0, Role::Key, 10, 0, Window::Full),
        double(0, Role::Value, 1, 2, Window::Full),
        double(1, Role::Key, 1, 4, window),
    ];
    let scene = Scene {
        producer: side(1, 2, producer, &[0, 1]),
        consumer: side(2, 1, consumer, &[0]),
        tokens: 2,
        range: 0..2,
        layers: 0..2,
    };
    let moved = planner::check(&scene, &Trial::default()).unwrap();
    assert_eq!((moved.segments, moved.bytes), (5, 6));
}
