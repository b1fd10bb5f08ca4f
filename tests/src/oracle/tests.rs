//! The oracle itself: what it says of a scene that can be worked out by hand, and that it finds every kind of fault.

use kvx_core::capability::Limits;
use kvx_core::layout::{
    AttentionGeometry, Dtype, LayerKind, ModelGeometry, NamedLayout, RankLayout, ScalePer, Scales,
    Window,
};
use kvx_core::plan::{Pair, Pairing};
use kvx_core::transfer::{Mode, Segment};

use super::rules::slots;
use super::*;
use crate::strategy::EngineRecipe;

fn ranks(model: &ModelGeometry, tp: u32) -> Vec<RankLayout> {
    let engine = EngineRecipe::plain(NamedLayout::FlashAttentionNhd, 2).with_grid(tp, 1);
    engine.ranks(model, 8).unwrap()
}

fn scene_of(model: &ModelGeometry, tp: [u32; 2]) -> Scene {
    Scene {
        producer: Side { ranks: ranks(model, tp[0]), tables: vec![Table::new([3, 1])] },
        consumer: Side { ranks: ranks(model, tp[1]), tables: vec![Table::new([0, 2])] },
        tokens: 3,
        range: 0..3,
        layers: 0..9,
    }
}

/// One layer, one head, keys of one byte, values of two: blocks of two and of four bytes.
fn tiny() -> ModelGeometry {
    let layer = AttentionGeometry { value_dim: 2, ..AttentionGeometry::new(1, 1, Dtype::Fp8E4m3) };
    ModelGeometry::new("tiny", vec![LayerKind::Attention(layer)]).unwrap()
}

fn two_heads() -> ModelGeometry {
    ModelGeometry::llama_like(1, 2, 1, Dtype::Fp8E4m3).unwrap()
}

fn pairs(scene: &Scene) -> Vec<Pair> {
    let pairing = Pairing::new(&scene.producer.ranks, &scene.consumer.ranks, 0).unwrap();
    pairing.pairs().to_vec()
}

fn segment(run: &Run) -> Segment {
    Segment {
        local_region: run.to_region,
        remote_region: run.from_region,
        local_offset: run.to_offset,
        remote_offset: run.from_offset,
        bytes: run.bytes,
    }
}

/// What `oracle` says of these segments, read by consumer 0 from producer 0.
fn judge(oracle: &Oracle<'_>, segments: &[Segment]) -> Result<(), Fault> {
    let mut memory = oracle.memory()?;
    memory.apply(0, 0, Mode::Read, segments)?;
    oracle.check(&memory)
}

#[test]
fn a_scene_worked_out_by_hand() {
    let scene = scene_of(&tiny(), [1, 1]);
    let oracle = Oracle::new(&scene, &pairs(&scene)).unwrap();
    // Blocks are equal and the request ends, so both blocks are moved whole: 3 to 0, 1 to 2.
    let run = |region, to_offset, from_offset, bytes| Run {
        to_region: region,
        to_offset,
        from_region: region,
        from_offset,
        bytes,
    };
    let expected = [run(0, 0, 6, 2), run(0, 4, 2, 2), run(1, 0, 12, 4), run(1, 8, 4, 4)];
    assert_eq!(oracle.fewest(0, 0), expected);
    assert_eq!(oracle.bytes(), 12);
    assert_eq!(oracle.origin(0, 1, 9), Some(Origin { rank: 0, region: 1, offset: 5 }));
    assert_eq!(oracle.origin(0, 1, 4), None);
    assert_eq!(oracle.origin(0, 7, 0), None);

    let segments: Vec<Segment> = expected.iter().map(segment).collect();
    judge(&oracle, &segments).unwrap();
    oracle.check_fewest(0, 0, Mode::Read, &segments).unwrap();

    let mut memory = oracle.memory().unwrap();
    memory.apply(0, 0, Mode::Read, &segments).unwrap();
    let mut bytes = memory.consumer(0, 1).unwrap().to_vec();
    oracle.check_values(0, 1, &bytes).unwrap();
    assert!(oracle.check_values(0, 0, &bytes).is_err());
    bytes[5] ^= 1;
    let fault = oracle.check_values(0, 1, &bytes).unwrap_err().to_string();
    assert!(fault.contains("offset 5 (layer 0 V, kernel block 1, position 0"), "{fault}");
}

#[test]
fn every_fault_in_a_list_is_found() {
    let scene = scene_of(&tiny(), [1, 1]);
    let oracle = Oracle::new(&scene, &pairs(&scene)).unwrap();
    let good: Vec<Segment> = oracle.fewest(0, 0).iter().map(segment).collect();
    type Break = fn(&mut Vec<Segment>);
    let breaks: [(&str, Break); 9] = [
        ("one is missing", |list| list.truncate(3)),
        ("one is there twice", |list| list.push(list[2])),
        ("read one byte too high", |list| list[1].remote_offset += 1),
        ("read one byte too low", |list| list[3].remote_offset -= 1),
        ("written one byte too high", |list| list[0].local_offset += 1),
        ("one byte too long", |list| list[0].bytes += 1),
        ("one byte too short", |list| list[2].bytes -= 1),
        ("another block as well", |list| list.push(Segment { local_offset: 6, ..list[0] })),
        ("sources changed over", |list| {
            (list[0].remote_offset, list[1].remote_offset) =
                (list[1].remote_offset, list[0].remote_offset);
        }),
    ];
    for (name, change) in breaks {
        let mut list = good.clone();
        change(&mut list);
        assert!(matches!(judge(&oracle, &list), Err(Fault::Bytes(_))), "{name}");
        assert!(oracle.check_fewest(0, 0, Mode::Read, &list).is_err(), "{name}");
    }
    let out_of_bounds: [(&str, Break); 3] = [
        ("read outside", |list| list[3].remote_offset = 1 << 40),
        ("written outside", |list| list[3].local_offset = u64::MAX - 2),
        ("no bytes", |list| list[3].bytes = 0),
    ];
    for (name, change) in out_of_bounds {
        let mut list = good.clone();
        change(&mut list);
        assert!(matches!(judge(&oracle, &list), Err(Fault::Segments(_))), "{name}");
    }
}

#[test]
fn a_list_that_does_the_work_in_too_many_segments_is_found() {
    let scene = scene_of(&tiny(), [1, 1]);
    let oracle = Oracle::new(&scene, &pairs(&scene)).unwrap();
    let mut list: Vec<Segment> = oracle.fewest(0, 0).iter().map(segment).collect();
    list.swap(0, 1);
    judge(&oracle, &list).unwrap();
    assert!(oracle.check_fewest(0, 0, Mode::Read, &list).is_err(), "not sorted");
    list.swap(0, 1);
    let half = Segment { bytes: 2, ..list[3] };
    list[3] = Segment {
        bytes: 2,
        local_offset: half.local_offset + 2,
        remote_offset: half.remote_offset + 2,
        ..half
    };
    list.insert(3, half);
    judge(&oracle, &list).unwrap();
    assert!(oracle.check_fewest(0, 0, Mode::Read, &list).is_err(), "one too many");
}

/// The same value from the wrong replica is no right byte.
#[test]
fn a_replica_that_was_not_chosen_is_found() {
    let scene = scene_of(&tiny(), [2, 1]);
    let pairs = pairs(&scene);
    assert_eq!((pairs.len(), pairs[0].producer), (1, 0));
    let oracle = Oracle::new(&scene, &pairs).unwrap();
    let list: Vec<Segment> = oracle.fewest(0, 0).iter().map(segment).collect();
    assert!(oracle.fewest(1, 0).is_empty());
    judge(&oracle, &list).unwrap();
    let mut memory = oracle.memory().unwrap();
    memory.apply(1, 0, Mode::Read, &list).unwrap();
    assert!(oracle.check(&memory).unwrap_err().to_string().contains("producer 0"));
}

#[test]
fn a_request_that_cannot_be_served_is_found() {
    let refuse = |what: &str, change: fn(&mut Scene)| {
        let mut scene = scene_of(&tiny(), [1, 1]);
        change(&mut scene);
        let pairs = pairs(&scene);
        match Oracle::new(&scene, &pairs) {
            Err(Fault::Scene(why)) => assert!(why.contains(what), "{why}"),
            other => panic!("{what}: {other:?}"),
        }
    };
    refuse("no entry 1", |scene| scene.consumer.tables[0].ids.truncate(1));
    refuse("no entry 0", |scene| scene.producer.tables[0].first = 1);
    refuse("entry 0 is block 77", |scene| scene.producer.tables[0].ids[0] = 77);
    refuse("written twice", |scene| scene.consumer.tables[0].ids[1] = 0);
    refuse("1..4 of 3", |scene| scene.range = 1..4);
    refuse("null block", |scene| {
        let engine = EngineRecipe {
            null_block: Some(true),
            ..EngineRecipe::plain(NamedLayout::FlashAttentionNhd, 2)
        };
        scene.consumer.ranks = engine.ranks(&tiny(), 8).unwrap();
    });
    refuse("begins within a block", |scene| {
        let per_block = Some(Scales { dtype: Dtype::F32, per: ScalePer::BlockHead });
        let model = tiny().with_scales(per_block);
        (scene.producer.ranks, scene.consumer.ranks) = (ranks(&model, 1), ranks(&model, 1));
        scene.range = 1..3;
    });
}

/// Two groups share memory and block 1 is in the tables of both, so it would hold layer 0 and layer 1 at once.
#[test]
fn a_producer_that_no_memory_could_be_is_found() {
    let model = ModelGeometry::llama_like(2, 1, 1, Dtype::Fp8E4m3).unwrap();
    let plain = EngineRecipe::plain(NamedLayout::FlashAttentionNhd, 2);
    let grouped = EngineRecipe { group_layers: Some(1), alias_groups: true, ..plain.clone() };
    let tables = |ids: [[u32; 2]; 2]| ids.map(Table::new).to_vec();
    let scene = |second| Scene {
        producer: Side {
            ranks: grouped.ranks(&model, 8).unwrap(),
            tables: tables([[3, 1], second]),
        },
        consumer: Side { ranks: plain.ranks(&model, 8).unwrap(), tables: tables([[0, 2]; 2]) },
        tokens: 3,
        range: 0..3,
        layers: 0..9,
    };
    let memory = |scene: &Scene| Oracle::new(scene, &pairs(scene)).unwrap().memory();
    memory(&scene([0, 2])).unwrap();
    let fault = memory(&scene([1, 2])).unwrap_err();
    assert!(matches!(fault, Fault::Contradiction(_)), "{fault}");
    assert!(fault.to_string().contains("layer 1 K"), "{fault}");
}

#[test]
fn a_wrong_pairing_is_found() {
    let scene = scene_of(&two_heads(), [2, 1]);
    let good = pairs(&scene);
    assert_eq!(good.len(), 2);
    Oracle::new(&scene, &good).unwrap();
    type Break = fn(&mut Vec<Pair>);
    let breaks: [(&str, Break); 6] = [
        ("a head is given by nobody", |pairs| pairs.truncate(1)),
        ("a tensor is given by nobody", |pairs| pairs[0].shares.truncate(1)),
        ("a head is given twice", |pairs| {
            let again = pairs[0].shares[0].clone();
            pairs[0].shares.push(again);
        }),
        ("a head that is not held", |pairs| {
            pairs[0].shares[0].first_head = 1;
            pairs[0].shares[0].end_head = 2;
        }),
        ("a pair is there twice", |pairs| pairs.push(pairs[1].clone())),
        ("an empty pair", |pairs| {
            pairs.push(Pair { producer: 1, consumer: 1, shares: Vec::new() });
        }),
    ];
    for (name, change) in breaks {
        let mut pairs = good.clone();
        change(&mut pairs);
        assert!(matches!(Oracle::new(&scene, &pairs), Err(Fault::Pairing(_))), "{name}");
    }
}

#[test]
fn cuts_are_checked() {
    let whole =
        Segment { local_region: 0, remote_region: 1, local_offset: 8, remote_offset: 2, bytes: 5 };
    let piece = |at, bytes| Segment {
        local_offset: whole.local_offset + at,
        remote_offset: whole.remote_offset + at,
        bytes,
        ..whole
    };
    let mut limits = Limits::unlimited();
    limits.max_segment_bytes = 3;
    let check = |cut: &[Segment]| check_cut(&[whole], cut, &limits);
    check(&[piece(0, 3), piece(3, 2)]).unwrap();
    check(&[piece(0, 2), piece(2, 3)]).unwrap();
    for wrong in [
        vec![whole],
        vec![piece(0, 3)],
        vec![piece(0, 2), piece(2, 2), piece(4, 1)],
        vec![piece(0, 3), piece(3, 2), piece(5, 1)],
        vec![piece(0, 3), piece(2, 3)],
        vec![piece(0, 3), Segment { local_region: 1, ..piece(3, 2) }],
    ] {
        assert!(check(&wrong).is_err(), "{wrong:?}");
    }
}

#[test]
fn slots_worked_out_by_hand() {
    use Window::{Chunked, Full, Sliding};
    let all = |range: std::ops::Range<u64>| range.collect::<Vec<_>>();
    let full = [Full, Full];
    // Equal blocks: whole ones, but never before the range.
    assert_eq!(slots(5, &(0..5), full, [4, 4]), all(0..8));
    assert_eq!(slots(5, &(2..5), full, [4, 4]), all(2..8));
    assert_eq!(slots(8, &(0..8), full, [4, 4]), all(0..8));
    // A range that ends before the request does, and an empty one.
    assert_eq!(slots(7, &(0..6), full, [4, 4]), all(0..6));
    assert_eq!(slots(7, &(7..7), full, [4, 4]), [0_u64; 0]);
    assert_eq!(slots(0, &(0..0), full, [4, 4]), [0_u64; 0]);
    // Other blocks: exactly the tokens.
    assert_eq!(slots(5, &(0..5), full, [4, 2]), all(0..5));
    // A window of 3 at token 10 takes tokens 8, 9, 10. A chunk of 4 takes 8, 9.
    for window in [Sliding(3), Chunked(4)] {
        assert_eq!(slots(10, &(0..10), [window, Full], [3, 5]), [8, 9]);
        assert_eq!(slots(10, &(0..10), [Full, window], [3, 3]), all(6..12));
        assert_eq!(slots(10, &(7..10), [window, window], [3, 3]), all(7..12));
    }
    // The window's block with the tokens before it, in the chunk that has them.
    assert_eq!(slots(10, &(0..8), [Sliding(3), Full], [3, 3]), [6, 7]);
    // Nothing is needed.
    assert_eq!(slots(10, &(0..10), [Sliding(1), Full], [3, 3]), [0_u64; 0]);
    assert_eq!(slots(12, &(0..12), [Chunked(6), Full], [5, 5]), [0_u64; 0]);
}
