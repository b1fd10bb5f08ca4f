//! Which ranks talk to which: laws of the pairing.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::{BTreeMap, BTreeSet};

use kvx_core::layout::{
    Dtype, Grid, LayoutBuilder, ModelGeometry, NamedLayout, RankLayout, TensorKey,
};
use kvx_core::plan::{Pairing, PeerPlan};
use kvx_tests::strategy;
use proptest::prelude::*;

/// All ranks of both engines.
fn engines() -> impl Strategy<Value = [Vec<RankLayout>; 2]> {
    strategy::recipe(strategy::model(), strategy::named_engine(), strategy::named_engine())
        .prop_map(|recipe| {
            let scene = recipe.scene().unwrap();
            [scene.producer.ranks, scene.consumer.ranks]
        })
}

/// Global heads of every tensor that is not local-only, by rank.
fn holdings(ranks: &[RankLayout]) -> BTreeMap<(TensorKey, u32), BTreeSet<usize>> {
    let mut all: BTreeMap<(TensorKey, u32), BTreeSet<usize>> = BTreeMap::new();
    for (rank, layout) in ranks.iter().enumerate() {
        for tensor in layout.tensors().iter().filter(|tensor| !tensor.local_only) {
            for head in tensor.head_range() {
                all.entry((tensor.key(), head)).or_default().insert(rank);
            }
        }
    }
    all
}

/// Who reads which head of which tensor from whom.
fn reads(pairing: &Pairing) -> BTreeMap<(TensorKey, u32), Vec<(usize, usize)>> {
    let mut all: BTreeMap<(TensorKey, u32), Vec<(usize, usize)>> = BTreeMap::new();
    for pair in pairing.pairs() {
        for share in &pair.shares {
            for head in share.first_head..share.end_head {
                all.entry((share.key, head)).or_default().push((pair.producer, pair.consumer));
            }
        }
    }
    all
}

proptest! {
    #![proptest_config(strategy::config())]

    /// Every consumer rank gets every head that it holds from one producer rank, and that rank holds it.
    #[test]
    fn every_needed_head_comes_from_one_rank([from, to] in engines(), rotation in 0_u32..9) {
        let pairing = Pairing::new(&from, &to, rotation)?;
        let (held, needed) = (holdings(&from), holdings(&to));
        let reads = reads(&pairing);
        prop_assert_eq!(reads.keys().collect::<Vec<_>>(), needed.keys().collect::<Vec<_>>());
        for (head, pairs) in &reads {
            let readers: Vec<usize> = pairs.iter().map(|(_, consumer)| *consumer).collect();
            let once: BTreeSet<usize> = readers.iter().copied().collect();
            prop_assert_eq!(readers.len(), once.len());
            prop_assert_eq!(&once, &needed[head]);
            prop_assert!(pairs.iter().all(|(producer, _)| held[head].contains(producer)));
        }
    }

    /// Where several producer ranks hold the same head, no two of them serve numbers of consumer ranks that differ by more
    /// than one.
    #[test]
    fn replicas_are_shared_out_evenly([from, to] in engines(), rotation in 0_u32..9) {
        let pairing = Pairing::new(&from, &to, rotation)?;
        let held = holdings(&from);
        for (head, pairs) in reads(&pairing) {
            let loads = held[&head].iter().map(|rank| {
                pairs.iter().filter(|(producer, _)| producer == rank).count()
            });
            let (least, most) = (loads.clone().min().unwrap(), loads.max().unwrap());
            prop_assert!(most - least <= 1, "{:?}: {} to {}", head, least, most);
        }
    }

    /// Consumer replicas that rotate differently load different producers: over as many rotations as a head has holders,
    /// each of them serves each consumer once.
    #[test]
    fn rotations_go_round_the_replicas([from, to] in engines()) {
        let held = holdings(&from);
        let most = held.values().map(BTreeSet::len).max().unwrap_or(1);
        let turns: Vec<_> = (0..2 * most)
            .map(|turn| Pairing::new(&from, &to, turn.try_into().unwrap()).map(|p| reads(&p)))
            .collect::<Result<_, _>>()?;
        for (head, needed) in holdings(&to) {
            let holders = &held[&head];
            for consumer in needed {
                let sources: BTreeSet<usize> = turns[..holders.len()]
                    .iter()
                    .flat_map(|turn| &turn[&head])
                    .filter(|(_, reader)| *reader == consumer)
                    .map(|(producer, _)| *producer)
                    .collect();
                prop_assert_eq!(&sources, holders);
            }
        }
    }

    /// Every producer rank hears from somebody, and from whom it expects it; nobody else confirms to it.
    #[test]
    fn every_producer_hears_from_its_readers_or_from_one([from, to] in engines(), rotation in 0_u32..9) {
        let pairing = Pairing::new(&from, &to, rotation)?;
        let expected: Vec<BTreeSet<usize>> =
            (0..from.len()).map(|rank| pairing.roster_of(rank).missing().collect()).collect();
        for (producer, roster) in expected.iter().enumerate() {
            let readers: BTreeSet<usize> = pairing.readers_of(producer).collect();
            if readers.is_empty() {
                prop_assert_eq!(roster.len(), 1);
            } else {
                prop_assert_eq!(roster, &readers);
            }
            prop_assert!(roster.iter().all(|consumer| *consumer < to.len()));
        }
        for consumer in 0..to.len() {
            let tells: Vec<usize> = pairing.confirms_to(consumer).collect();
            let inverse: Vec<usize> =
                (0..from.len()).filter(|producer| expected[*producer].contains(&consumer)).collect();
            prop_assert_eq!(&tells, &inverse);
            let sources: Vec<usize> = pairing.sources_of(consumer).collect();
            prop_assert!(sources.iter().all(|producer| tells.contains(producer)));
            for producer in 0..from.len() {
                let pair = pairing.pair(producer, consumer);
                prop_assert_eq!(pair.is_some(), sources.contains(&producer));
                prop_assert!(pair.is_none_or(|pair| (pair.producer, pair.consumer) == (producer, consumer)));
            }
        }
    }

    /// Both engines come to the same result from the same layouts, and so does whoever compiles the same pair again.
    #[test]
    fn the_same_layouts_give_the_same_pairs([from, to] in engines(), rotation in 0_u32..9) {
        let pairing = Pairing::new(&from, &to, rotation)?;
        prop_assert_eq!(&pairing, &Pairing::new(&from.clone(), &to.clone(), rotation)?);
        let numbers: Vec<_> = pairing.pairs().iter().map(|p| (p.producer, p.consumer)).collect();
        prop_assert!(numbers.is_sorted_by(|a, b| a < b));
        for pair in pairing.pairs() {
            prop_assert!(pair.shares.is_sorted());
            let compile = || PeerPlan::compile(&from[pair.producer], &to[pair.consumer], pair);
            prop_assert_eq!(format!("{:?}", compile()?), format!("{:?}", compile()?));
        }
    }
}

/// Ranks that nobody reads are told by all consumer ranks in turn, not by the first alone.
#[test]
fn idle_replicas_are_told_by_all_consumers_alike() {
    let model = ModelGeometry::mla_like(1, 4, Dtype::Bf16).unwrap();
    let builder = LayoutBuilder::new(&model, NamedLayout::FlashAttentionNhd).blocks(2);
    let ranks = |tp| builder.build_replica(Grid::new(tp, 1, 1).unwrap(), 0).unwrap();
    for (from, to) in [(8, 2), (8, 4), (6, 3), (4, 1), (12, 4)] {
        let pairing = Pairing::new(&ranks(from), &ranks(to), 0).unwrap();
        let counts: Vec<usize> =
            (0..to as usize).map(|consumer| pairing.confirms_to(consumer).count()).collect();
        assert_eq!(counts, vec![(from / to) as usize; to as usize], "{from} to {to}");
    }
}

/// No producers, no consumers, or neither: no pairs, and no rank to hear from.
#[test]
fn engines_without_ranks_have_nothing_to_say() {
    let pairing = Pairing::new(&[], &[], 0).unwrap();
    assert!(pairing.pairs().is_empty());
    assert!(pairing.roster_of(0).is_complete());
    let builder = LayoutBuilder::new(
        &ModelGeometry::mla_like(1, 1, Dtype::U8).unwrap(),
        NamedLayout::FlashAttentionNhd,
    );
    let rank = builder.build_replica(Grid::new(1, 1, 1).unwrap(), 0).unwrap();
    assert!(Pairing::new(&rank, &[], 0).is_err());
    assert!(Pairing::new(&[], &rank, 0).is_err());
    let mut parts = rank[0].clone().into_parts();
    parts.tensors[0].local_only = true;
    let idle = [RankLayout::new(parts).unwrap()];
    for (from, to) in [(&idle[..], &[][..]), (&[], &idle), (&idle, &idle)] {
        let pairing = Pairing::new(from, to, 0).unwrap();
        assert!(pairing.pairs().is_empty());
        for producer in 0..from.len() {
            assert_eq!(pairing.roster_of(producer).is_complete(), to.is_empty());
        }
        if from.is_empty() {
            assert!(pairing.roster_of(0).is_complete());
        }
        for consumer in 0..to.len() {
            assert_eq!(pairing.confirms_to(consumer).count(), from.len());
        }
    }
}

/// A plan's size depends on the number of tensors, not on the number of blocks.
#[test]
fn a_plan_is_as_large_for_a_thousand_blocks_as_for_a_million() {
    let model = ModelGeometry::llama_like(32, 8, 128, Dtype::Bf16).unwrap();
    for from in NamedLayout::ALL {
        for to in NamedLayout::ALL {
            let size = |blocks: u32| {
                let rank = |layout, tp| {
                    let builder = LayoutBuilder::new(&model, layout).blocks(blocks);
                    builder.build_replica(Grid::new(tp, 1, 1).unwrap(), 0).unwrap()
                };
                let (from, to) = (rank(from, 2), rank(to, 1));
                let pairing = Pairing::new(&from, &to, 0).unwrap();
                let pair = &pairing.pairs()[0];
                PeerPlan::compile(&from[0], &to[0], pair).unwrap().memory_bytes()
            };
            let small = size(1_000);
            assert_eq!(small, size(1_000_000), "{from} to {to}");
            assert!(small < 32_768, "{from} to {to}: {small} bytes");
        }
    }
}
