//! The planner against the oracle, over random models, layouts, block tables and requests.
//!
//! `KVX_CASES` is the number of cases of each property, `KVX_SEED` replays a run.

use kvx_core::capability::Limits;
use kvx_core::layout::{AttentionGeometry, Dtype, LayerKind, ModelGeometry, NamedLayout, Window};
use kvx_core::plan::{Pairing, PeerPlan, SegmentList, chunks};
use kvx_core::transfer::Mode;
use kvx_tests::oracle::{Fault, Oracle, Scene};
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
        kind in 0_u8..6,
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
            4 => table.first += 1,
            _ => scene.range.start = (scene.range.start + 1).min(scene.range.end),
        }
        match planner::check(&scene, &Trial::default()) {
            Ok(_) | Err(Fault::Scene(_)) => {}
            Err(fault) => return Err(fault.into()),
        }
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
