//! Which ranks read which heads from whom, and who is told.

use std::collections::BTreeSet;

use kvx_core::layout::{Grid, LayoutBuilder, ModelGeometry};
use kvx_core::memory::MemoryKind;
use kvx_core::plan::{Confirmed, Roster};
use kvx_core::transfer::Mode;
use kvx_tests::oracle::{Run, Scene, Side, Table};

use crate::common::{HND, NHD, carry_out, check, latent, model, pairing, ranks, runs, scene, side};

const NOTE: &[u8] = b"done";

/// Two blocks of 4 tokens.
fn heads(model: &ModelGeometry, [from, to]: [u32; 2]) -> Scene {
    let builder = LayoutBuilder::new(model, NHD).blocks(6).block_tokens(4);
    scene(side(&builder, from, &[1, 2]), side(&builder, to, &[5, 3]), 8)
}

/// Head of each share of layer 0's keys that a consumer rank gets, and from whom, in order.
fn sources(scene: &Scene, consumer: usize) -> Vec<(usize, u32, u32)> {
    let pairing = pairing(scene);
    let pairs = pairing.pairs().iter().filter(|pair| pair.consumer == consumer);
    pairs.map(|pair| (pair.producer, pair.shares[0].first_head, pair.shares[0].end_head)).collect()
}

#[test]
fn row_1_vllm_43523_a_consumer_with_fewer_ranks_reads_all_heads_and_tells_each_producer_once() {
    let scene = heads(&model(2, 8), [4, 1]);
    assert_eq!(sources(&scene, 0), [(0, 0, 2), (1, 2, 4), (2, 4, 6), (3, 6, 8)]);
    assert_eq!(check(&scene).pairs, 4);
    let notes = carry_out(&scene, Mode::Read, NOTE);
    assert_eq!(notes.len(), 4);
    for (producer, notes) in notes {
        assert_eq!(notes, [(0, NOTE.to_vec())]);
        let mut roster = pairing(&scene).roster_of(producer);
        assert_eq!(roster.confirm(notes[0].0).unwrap(), Confirmed::Complete);
    }
}

#[test]
fn row_2_vllm_19691_with_more_ranks_than_heads_each_producer_hears_from_both_its_readers() {
    let scene = heads(&model(1, 2), [2, 4]);
    let expected = [(0, 0, 1), (0, 0, 1), (1, 1, 2), (1, 1, 2)];
    for (consumer, source) in expected.into_iter().enumerate() {
        assert_eq!(sources(&scene, consumer), [source]);
    }
    check(&scene);
    let notes = carry_out(&scene, Mode::Read, NOTE);
    assert_eq!(notes.len(), 2);
    for (producer, notes) in notes {
        let mut roster = pairing(&scene).roster_of(producer);
        assert_eq!(notes.len(), 2);
        assert_eq!(roster.confirm(notes[0].0).unwrap(), Confirmed::Waiting);
        assert!(!roster.is_complete(), "freed after one of two");
        assert_eq!(roster.confirm(notes[1].0).unwrap(), Confirmed::Complete);
    }
}

#[test]
fn row_3_sglang_31295_replicated_heads_are_read_from_within_the_registered_regions() {
    let scene = heads(&model(1, 2), [1, 4]);
    check(&scene);
    let regions = scene.producer.ranks[0].regions();
    let mut slices = BTreeSet::new();
    for consumer in 0..4 {
        let runs = runs(&scene, 0, consumer);
        for run in &runs {
            let region = regions[run.from_region as usize];
            assert!(run.from_offset + run.bytes <= region.bytes, "{run:?} is outside {region:?}");
        }
        slices
            .insert(runs.iter().map(|run| (run.from_region, run.from_offset)).collect::<Vec<_>>());
    }
    assert_eq!(slices.len(), 2, "two heads, so two different slices for four ranks");
}

#[test]
fn row_4_sglang_23746_every_rank_gets_its_own_head_not_head_0() {
    let scene = heads(&model(1, 2), [1, 4]);
    let firsts: Vec<u32> = (0..4).map(|consumer| sources(&scene, consumer)[0].1).collect();
    assert_eq!(firsts, [0, 0, 1, 1]);
    check(&scene);
    carry_out(&scene, Mode::Read, NOTE);
    carry_out(&scene, Mode::Write, NOTE);

    let scene = heads(&model(1, 4), [8, 2]);
    for (consumer, first) in [(0, 0), (1, 2)] {
        let shares = sources(&scene, consumer);
        assert_eq!(shares.iter().map(|share| share.1).collect::<Vec<_>>(), [first, first + 1]);
        assert!(shares.iter().all(|(producer, head, _)| {
            [2 * head, 2 * head + 1].contains(&u32::try_from(*producer).unwrap())
        }));
    }
    check(&scene);
    carry_out(&scene, Mode::Read, NOTE);
}

#[test]
fn row_5_sglang_22145_four_senders_are_four_though_they_say_the_same() {
    let scene = heads(&model(1, 8), [4, 1]);
    let mut notes = carry_out(&scene, Mode::Write, NOTE);
    let notes = notes.remove(&0).unwrap();
    assert!(notes.iter().all(|(_, note)| note == NOTE));
    let mut roster = Roster::new(pairing(&scene).sources_of(0));
    let mut confirmed = Vec::new();
    for (sender, _) in &notes {
        assert!(!roster.is_complete(), "done before all four");
        confirmed.push(roster.confirm(*sender).unwrap());
        // One that comes twice is still one.
        assert_eq!(roster.confirm(*sender).unwrap(), Confirmed::Repeated);
    }
    assert_eq!(
        confirmed,
        [Confirmed::Waiting, Confirmed::Waiting, Confirmed::Waiting, Confirmed::Complete]
    );
}

#[test]
fn row_6_vllm_45880_every_replica_of_a_latent_is_written_and_every_idle_producer_is_told() {
    let scene = heads(&latent(2), [1, 4]);
    assert_eq!(check(&scene).pairs, 4);
    // The oracle finds the same latent on all four ranks.
    let notes = carry_out(&scene, Mode::Write, NOTE);
    assert_eq!(notes.keys().copied().collect::<Vec<_>>(), [0, 1, 2, 3]);

    let scene = heads(&latent(2), [4, 1]);
    assert_eq!(pairing(&scene).sources_of(0).count(), 1, "any one source is enough");
    let notes = carry_out(&scene, Mode::Read, NOTE);
    assert_eq!(notes.len(), 4, "but all four hold the request's blocks");
    for (producer, notes) in notes {
        let mut roster = pairing(&scene).roster_of(producer);
        assert_eq!(roster.confirm(notes[0].0).unwrap(), Confirmed::Complete);
    }
}

#[test]
fn row_13_trt_llm_6507_heads_outside_become_heads_inside_while_ranks_merge() {
    let builder = |layout| LayoutBuilder::new(&model(2, 4), layout).blocks(4).block_tokens(4);
    let scene = scene(side(&builder(HND), 2, &[0, 3]), side(&builder(NHD), 1, &[2, 1]), 8);
    check(&scene);
    carry_out(&scene, Mode::Read, NOTE);
}

#[test]
fn row_25_vllm_22976_a_pipeline_stage_writes_its_own_layers_only() {
    let grid = Grid::new(2, 2, 1).unwrap();
    // A device per rank, not per tensor parallel rank.
    let devices: BTreeSet<MemoryKind> = grid
        .ranks()
        .map(|coords| {
            let builder = LayoutBuilder::new(&model(4, 2), NHD).blocks(2);
            let layout = builder.memory(MemoryKind::Cuda(coords.index())).build(coords).unwrap();
            assert!(
                layout.regions().iter().all(|region| region.memory == layout.regions()[0].memory)
            );
            layout.regions()[0].memory
        })
        .collect();
    assert_eq!(devices.len(), 4);

    let builder = LayoutBuilder::new(&model(4, 2), NHD).blocks(2).block_tokens(4);
    let engine =
        |pp, ids: &[u32]| Side { ranks: ranks(&builder, 2, pp), tables: vec![Table::new(ids)] };
    let scene = scene(engine(2, &[0]), engine(1, &[1]), 4);
    check(&scene);
    carry_out(&scene, Mode::Write, NOTE);
    for (producer, coords) in grid.replica(0).enumerate() {
        let consumer = coords.tp as usize;
        // Regions of the consumer are K and V of layer 0, of layer 1, and so on.
        let first = 4 * coords.pp;
        let regions: Vec<u32> =
            runs(&scene, producer, consumer).iter().map(|run: &Run| run.to_region).collect();
        assert_eq!(regions, (first..first + 4).collect::<Vec<_>>());
        assert!(runs(&scene, producer, 1 - consumer).is_empty());
    }
}
