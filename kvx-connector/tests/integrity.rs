//! Digests agree across any two shapes, and only where the bytes do.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeMap;

use kvx_connector::integrity::{Answer, Digest, Extent, digest, rows};
use kvx_core::capability::Limits;
use kvx_core::layout::RankLayout;
use kvx_core::memory::Region;
use kvx_core::plan::{Pairing, PeerPlan, SegmentList};
use kvx_core::transfer::Mode;
use kvx_tests::oracle::{Oracle, Scene};
use kvx_tests::strategy;
use proptest::prelude::*;

type Buckets = BTreeMap<u64, Digest>;

/// Memory of one rank, copied into regions.
fn regions<'a>(layout: &RankLayout, bytes: impl Fn(usize) -> &'a [u8]) -> Vec<Region> {
    (0..layout.regions().len())
        .map(|index| {
            let bytes = bytes(index);
            let region = Region::host(bytes.len() as u64).unwrap();
            region.write_at(0, bytes).unwrap();
            region
        })
        .collect()
}

/// A scene that was carried out, seen from every pair of ranks: digests at the producer and at the consumer.
fn both_sides(scene: &Scene, grain: u64, spoil: Option<u64>) -> Option<Vec<(Buckets, Buckets)>> {
    let (producers, consumers) = (&scene.producer.ranks, &scene.consumer.ranks);
    let pairing = Pairing::new(producers, consumers, 0).ok()?;
    let oracle = Oracle::new(scene, pairing.pairs()).ok()?;
    let mut memory = oracle.memory().ok()?;
    let tables = (scene.producer.borrowed_tables(), scene.consumer.borrowed_tables());
    let request = scene.request(&tables.0, &tables.1);
    let mut list = SegmentList::new();
    let mut spoilt = None;
    for pair in pairing.pairs() {
        let plan = PeerPlan::compile(&producers[pair.producer], &consumers[pair.consumer], pair);
        let limits = Limits::unlimited();
        plan.ok()?.segments(&request, Mode::Read, &limits, &mut list).ok()?;
        memory.apply(pair.producer, pair.consumer, Mode::Read, list.as_slice()).unwrap();
        if let (Some(draw), None, false) = (spoil, spoilt, list.is_empty()) {
            let segment = list.as_slice()[usize::try_from(draw).unwrap() % list.len()];
            let at = segment.local_offset + draw % segment.bytes;
            spoilt = Some((pair.consumer, segment.local_region as usize, at));
        }
    }
    let pairs = pairing.pairs().iter();
    Some(
        pairs
            .map(|pair| {
                let (from, to) = (&producers[pair.producer], &consumers[pair.consumer]);
                let theirs = regions(from, |index| memory.producer(pair.producer, index).unwrap());
                let mine = regions(to, |index| memory.consumer(pair.consumer, index).unwrap());
                if let Some((_, region, at)) = spoilt.filter(|spoilt| spoilt.0 == pair.consumer) {
                    let mut byte = [0];
                    mine[region].read_at(at, &mut byte).unwrap();
                    mine[region].write_at(at, &[byte[0] ^ 0x10]).unwrap();
                }
                let rows = rows(
                    (from, to),
                    &PeerPlan::compile(from, to, pair).unwrap(),
                    scene.tokens,
                    &scene.range,
                    &scene.layers,
                );
                let extent = |layout, regions, tables| Extent { layout, regions, tables };
                let there = digest(extent(from, &theirs, &tables.0), &rows, grain).unwrap();
                let here = digest(extent(to, &mine, &tables.1), &rows, grain).unwrap();
                (there, here)
            })
            .collect(),
    )
}

proptest! {
    #![proptest_config(strategy::config())]

    #[test]
    fn what_was_moved_has_the_same_digests_on_both_sides(
        recipe in strategy::recipe(strategy::model(), strategy::engine(), strategy::engine()),
        grain in 1_u64..40,
    ) {
        let Ok(scene) = recipe.scene() else { return Ok(()) };
        for (there, here) in both_sides(&scene, grain, None).unwrap_or_default() {
            prop_assert_eq!(there, here);
        }
    }

    #[test]
    fn a_byte_that_changed_is_found_unless_nobody_needs_it(
        recipe in strategy::recipe(strategy::model(), strategy::engine(), strategy::engine()),
        grain in 1_u64..40,
        draw in any::<u64>(),
    ) {
        let Ok(scene) = recipe.scene() else { return Ok(()) };
        let Some(sound) = both_sides(&scene, grain, None) else { return Ok(()) };
        let Some(spoilt) = both_sides(&scene, grain, Some(draw)) else { return Ok(()) };
        // The rest of a last block is moved, and nobody's: it may differ. Otherwise exactly one bucket does, in every pair that has the row.
        for ((there, before), (_, here)) in sound.iter().zip(&spoilt) {
            prop_assert_eq!(there, before);
            let differing = Answer { buckets: there.clone() }.differing(here);
            prop_assert!(differing.len() <= 1, "{differing:?}");
        }
    }
}
