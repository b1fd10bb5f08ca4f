//! The strategies themselves.

use std::collections::BTreeMap;

use kvx_core::layout::{Granularity, GroupKind, RankLayout, Window};
use kvx_tests::oracle::Side;
use kvx_tests::planner::Trial;
use kvx_tests::{planner, strategy};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

/// The strategies reach what they are there for: of the scenes that they make, enough move something, from several ranks, in
/// several runs, with blocks that differ, with entries that are not touched, and so on.
#[test]
fn strategies_reach_what_they_are_for() {
    let mut runner =
        TestRunner::new(ProptestConfig { failure_persistence: None, ..strategy::config() });
    let strategy = strategy::recipe(strategy::model(), strategy::engine(), strategy::engine());
    let scenes = 400;
    let mut seen: BTreeMap<&str, u32> = BTreeMap::new();
    for _ in 0..scenes {
        let recipe = strategy.new_tree(&mut runner).unwrap().current();
        let scene = recipe.scene().unwrap();
        let moved = planner::check(&scene, &Trial::default()).unwrap();
        let groups = |side: &Side| side.ranks[0].groups().to_vec();
        let (from, to) = (groups(&scene.producer), groups(&scene.consumer));
        let tensors = || scene.consumer.ranks.iter().flat_map(RankLayout::tensors);
        for (name, is) in [
            ("moves something", moved.bytes > 0),
            ("several pairs", moved.pairs > 2),
            ("runs of several elements", moved.segments * 8 < moved.bytes),
            ("many runs", moved.segments > 20 * moved.pairs),
            ("several groups", to.len() > 1),
            ("other groups on the other side", from.len() != to.len()),
            (
                "other kernel blocks",
                from.iter().zip(&to).any(|(a, b)| a.kernel_block_tokens != b.kernel_block_tokens),
            ),
            ("kernel blocks within blocks", to.iter().any(|group| group.kernel_ratio() > 1)),
            ("states", to.iter().any(|group| group.kind == GroupKind::State)),
            ("windows", tensors().any(|tensor| tensor.window != Window::Full)),
            (
                "kept per block",
                tensors().any(|tensor| {
                    tensor.granularity == Granularity::Block
                        && to[tensor.group as usize].kind == GroupKind::Attention
                }),
            ),
            ("local only", tensors().any(|tensor| tensor.local_only)),
            ("replicas", recipe.producer.tp > 6 || recipe.consumer.tp > 6),
            ("a held prefix", scene.range.start > 0 && !scene.range.is_empty()),
            ("an empty range", scene.range.is_empty()),
            (
                "a partial last block",
                to.iter().any(|group| !scene.tokens.is_multiple_of(group.block_tokens.into())),
            ),
            (
                "null blocks in tables",
                to.iter()
                    .zip(&scene.consumer.tables)
                    .any(|(group, table)| table.ids.iter().any(|id| group.null_block == Some(*id))),
            ),
            ("tables that begin later", scene.consumer.tables.iter().any(|table| table.first > 0)),
            ("some layers only", scene.layers.end < u32::MAX),
        ] {
            *seen.entry(name).or_default() += u32::from(is);
        }
    }
    for (name, count) in &seen {
        println!("{name}: {count} of {scenes}");
    }
    for (name, count) in seen {
        assert!(count * 40 >= scenes, "{name}: only {count} of {scenes}");
    }
}
