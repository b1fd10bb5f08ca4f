//! Scenes, and a fabric to carry them out on.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvx_core::capability::Limits;
use kvx_core::id::PeerId;
use kvx_core::layout::{
    AttentionGeometry, Dtype, Grid, LayerKind, LayoutBuilder, ModelGeometry, NamedLayout,
    RankLayout, RankLayoutParts, RegionSpec,
};
use kvx_core::memory::Region;
use kvx_core::plan::{Pairing, PeerPlan, SegmentList};
use kvx_core::port::{Port, RegionSet, Transfer};
use kvx_core::transfer::{Mode, Segment};
use kvx_mock::{Fabric, Preset};
use kvx_tests::oracle::{Oracle, Run, Scene, Side, Table};
use kvx_tests::planner::{self, Moved, Trial};

pub(crate) const NHD: NamedLayout = NamedLayout::FlashAttentionNhd;
pub(crate) const HND: NamedLayout = NamedLayout::FlashAttentionHnd;

/// `layers` layers of `heads` heads of 4 elements of 2 bytes.
pub(crate) fn model(layers: u32, heads: u32) -> ModelGeometry {
    ModelGeometry::llama_like(layers, heads, 4, Dtype::Bf16).unwrap()
}

/// `layers` layers of a latent of 6 elements.
pub(crate) fn latent(layers: u32) -> ModelGeometry {
    ModelGeometry::mla_like(layers, 6, Dtype::Bf16).unwrap()
}

/// One attention layer with nothing out of the ordinary.
pub(crate) fn attention(heads: u32) -> LayerKind {
    LayerKind::Attention(AttentionGeometry::new(heads, 4, Dtype::Bf16))
}

/// All ranks of an engine.
pub(crate) fn ranks(builder: &LayoutBuilder, tp: u32, pp: u32) -> Vec<RankLayout> {
    builder.build_replica(Grid::new(tp, pp, 1).unwrap(), 0).unwrap()
}

/// A request of which everything is asked for.
pub(crate) fn scene(producer: Side, consumer: Side, tokens: u64) -> Scene {
    Scene { producer, consumer, tokens, range: 0..tokens, layers: 0..u32::MAX }
}

/// An engine with one block table.
pub(crate) fn side(builder: &LayoutBuilder, tp: u32, ids: &[u32]) -> Side {
    Side { ranks: ranks(builder, tp, 1), tables: vec![Table::new(ids)] }
}

/// Checks the plan of a scene against the oracle, for reads and for writes.
pub(crate) fn check(scene: &Scene) -> Moved {
    let write = Trial { mode: Mode::Write, ..Trial::default() };
    let moved = planner::check(scene, &Trial::default()).unwrap();
    assert_eq!(planner::check(scene, &write).unwrap(), moved);
    moved
}

/// The pairing of a scene's ranks.
pub(crate) fn pairing(scene: &Scene) -> Pairing {
    Pairing::new(&scene.producer.ranks, &scene.consumer.ranks, 0).unwrap()
}

/// Segments of one pair of ranks, none where they do not talk.
pub(crate) fn segments(
    scene: &Scene,
    producer: usize,
    consumer: usize,
    mode: Mode,
) -> Vec<Segment> {
    let pairing = pairing(scene);
    let Some(pair) = pairing.pair(producer, consumer) else { return Vec::new() };
    let (from, to) = (&scene.producer.ranks[producer], &scene.consumer.ranks[consumer]);
    let plan = PeerPlan::compile(from, to, pair).unwrap();
    let tables = (scene.producer.borrowed_tables(), scene.consumer.borrowed_tables());
    let request = scene.request(&tables.0, &tables.1);
    let mut list = SegmentList::new();
    plan.segments(&request, mode, &Limits::unlimited(), &mut list).unwrap();
    list.as_slice().to_vec()
}

/// The same as runs from producer to consumer.
pub(crate) fn runs(scene: &Scene, producer: usize, consumer: usize) -> Vec<Run> {
    let segments = segments(scene, producer, consumer, Mode::Read);
    segments.iter().map(|segment| Run::of(segment, Mode::Read)).collect()
}

/// The same layout with other regions, not checked.
pub(crate) fn parts_with_regions(layout: &RankLayout, regions: Vec<RegionSpec>) -> RankLayoutParts {
    RankLayoutParts { regions, ..layout.clone().into_parts() }
}

/// One rank on the fabric.
struct Member {
    port: Port,
    regions: Vec<Region>,
    set: RegionSet,
    /// Handles of the other engine's ranks.
    peers: Vec<PeerId>,
}

/// Notifications that each rank on the receiving side got: from which ranks of the other engine, in order.
pub(crate) type Notes = BTreeMap<usize, Vec<(usize, Vec<u8>)>>;

/// Carries a scene out on the mock fabric, byte by byte, checks every value, and says who was told.
///
/// When reading, each consumer rank notifies every producer rank that must hear from it, with its data where it has any. When
/// writing, each producer rank notifies every consumer rank to which it writes.
pub(crate) fn carry_out(scene: &Scene, mode: Mode, note: &[u8]) -> Notes {
    let pairing = pairing(scene);
    let oracle = Oracle::new(scene, pairing.pairs()).unwrap();
    let memory = oracle.memory().unwrap();
    let fabric = Fabric::new(7);
    let open = |name: &str, layouts: &[RankLayout], contents: &dyn Fn(usize, usize) -> Vec<u8>| {
        let ranks = layouts.iter().enumerate();
        ranks
            .map(|(rank, layout)| {
                member(&fabric, &format!("{name} {rank}"), layout, |region| contents(rank, region))
            })
            .collect::<Vec<_>>()
    };
    let mut producers = open("producer", &scene.producer.ranks, &|rank, region| {
        memory.producer(rank, region).unwrap().to_vec()
    });
    let mut consumers = open("consumer", &scene.consumer.ranks, &|rank, region| {
        memory.consumer(rank, region).unwrap().to_vec()
    });
    for producer in &mut producers {
        for consumer in &mut consumers {
            meet(producer, consumer);
        }
    }
    let (from, to) = match mode {
        Mode::Read => (&consumers, &producers),
        Mode::Write => (&producers, &consumers),
    };
    let mut transfers: Vec<Transfer> = Vec::new();
    for (number, initiator) in from.iter().enumerate() {
        let targets: Vec<usize> = match mode {
            Mode::Read => pairing.confirms_to(number).collect(),
            Mode::Write => pairing.readers_of(number).collect(),
        };
        for target in targets {
            let list = match mode {
                Mode::Read => segments(scene, target, number, mode),
                Mode::Write => segments(scene, number, target, mode),
            };
            let peer = initiator.peers[target];
            transfers.push(
                initiator.port.transfer(peer, mode, &initiator.set, &list, Some(note)).unwrap(),
            );
        }
    }
    let mut notes = Notes::new();
    let mut quiet = 0;
    while quiet < 50 {
        quiet += 1;
        transfers.retain_mut(|transfer| match transfer.try_result() {
            None => true,
            Some(result) => {
                result.unwrap();
                quiet = 0;
                false
            }
        });
        for (number, member) in to.iter().enumerate() {
            member.port.poll();
            while let Some((peer, note)) = member.port.next_notification() {
                let sender = member.peers.iter().position(|known| *known == peer).unwrap();
                notes.entry(number).or_default().push((sender, note));
                quiet = 0;
            }
        }
    }
    assert!(transfers.is_empty(), "{} transfers have not settled", transfers.len());
    for (rank, member) in consumers.iter().enumerate() {
        for (number, region) in (0_u32..).zip(&member.regions) {
            let mut bytes = vec![0; usize::try_from(region.bytes()).unwrap()];
            region.read_at(0, &mut bytes).unwrap();
            oracle.check_values(rank, number, &bytes).unwrap();
        }
    }
    notes
}

fn member(
    fabric: &Fabric,
    name: &str,
    layout: &RankLayout,
    contents: impl Fn(usize) -> Vec<u8>,
) -> Member {
    let port = Port::new(fabric.backend(Preset::efa(), Arc::from(name))).unwrap();
    let mut regions = Vec::new();
    for (number, spec) in layout.regions().iter().enumerate() {
        let region = Region::host(spec.bytes).unwrap();
        region.write_at(0, &contents(number)).unwrap();
        regions.push(region);
    }
    let ids: Vec<_> = regions.iter().map(|region| port.register(region).unwrap()).collect();
    let set = port.region_set(&ids).unwrap();
    Member { port, regions, set, peers: Vec::new() }
}

/// Introduces two ranks and their regions to each other.
fn meet(one: &mut Member, other: &mut Member) {
    let (at_other, reply) = other.port.accept(&one.port.offer().unwrap()).unwrap();
    let (at_one, completion) = one.port.complete(&reply).unwrap();
    other.port.finish(&completion).unwrap();
    for (mine, theirs, peer) in [(&*one, &*other, at_one), (other, one, at_other)] {
        let ids = theirs.set.ids().zip(&theirs.regions);
        let keys: Vec<_> =
            ids.map(|(id, region)| (theirs.port.key_blob(id).unwrap(), region.bytes())).collect();
        mine.port.add_regions(peer, &keys).unwrap();
    }
    one.peers.push(at_one);
    other.peers.push(at_other);
}
