//! The planner against the oracle, over random models, layouts, block tables and requests.
//!
//! `KVX_CASES` is the number of cases of each property, `KVX_SEED` replays a run.

use kvx_core::layout::{AttentionGeometry, Dtype, LayerKind, ModelGeometry, NamedLayout, Window};
use kvx_tests::planner::Trial;
use kvx_tests::strategy::{EngineRecipe, Recipe};
use kvx_tests::{planner, strategy};
use proptest::prelude::*;

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
