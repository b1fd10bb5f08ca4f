//! Random batches among four engines, checked byte by byte.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvx_core::backend::{Event, Submit, TransferBackend as _};
use kvx_core::id::{PeerId, RegionId, RemoteRegionId, TransferId};
use kvx_core::memory::Region;
use kvx_core::transfer::{Mode, PostedSegment};
use kvx_mock::{Entry, Fabric, MockBackend, Preset};
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::common::{bytes, import, meet, poll, presets, seeds};

const ENGINES: usize = 4;
const REGIONS: usize = 2;
const CELL: usize = 64;
const CELLS: usize = 12;
const GUARD: usize = 40;

/// A place of `CELL` bytes: engine, region, number.
type Cell = (usize, usize, usize);

/// Bytes of one region that a segment names.
#[derive(Clone, Copy)]
struct Span {
    engine: usize,
    region: usize,
    offset: usize,
    bytes: usize,
}

struct Posted {
    initiator: usize,
    target: usize,
    segments: Vec<(Span, Span)>,
    note: Option<Vec<u8>>,
    settled: u32,
    notified: u32,
}

/// Four engines, all of which know each other and each other's regions, and what their memory must hold.
struct World {
    rng: ChaCha8Rng,
    fabric: Fabric,
    engines: Vec<Arc<MockBackend>>,
    regions: Vec<Vec<(Region, RegionId)>>,
    model: Vec<Vec<Vec<u8>>>,
    /// By engine and peer.
    peers: BTreeMap<(usize, usize), PeerId>,
    /// By engine, peer and the peer's region.
    keys: BTreeMap<(usize, usize, usize), RemoteRegionId>,
    posted: BTreeMap<u64, Posted>,
    next: u64,
}

impl World {
    fn new(seed: u64, preset: &Preset) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let fabric = Fabric::new(seed);
        let engines: Vec<_> =
            (0..ENGINES).map(|e| fabric.backend(preset.clone(), format!("engine-{e}"))).collect();
        let mut peers = BTreeMap::new();
        for one in 0..ENGINES {
            for other in one + 1..ENGINES {
                let (at_one, at_other) = meet(&engines[one], &engines[other]);
                peers.insert((one, other), at_one);
                peers.insert((other, one), at_other);
            }
        }
        let (mut regions, mut model) = (Vec::new(), Vec::new());
        for engine in &engines {
            let contents: Vec<Vec<u8>> = (0..REGIONS)
                .map(|_| (0..2 * GUARD + CELLS * CELL).map(|_| rng.random()).collect())
                .collect();
            let made = contents.iter().map(|contents| {
                let region = Region::host(contents.len() as u64).unwrap();
                region.write_at(0, contents).unwrap();
                let handle = kvx_core::memory::MemoryRegistry::register(&**engine, &region);
                (region, handle.unwrap())
            });
            regions.push(made.collect::<Vec<_>>());
            model.push(contents);
        }
        let mut keys = BTreeMap::new();
        for (&(user, owner), &peer) in &peers {
            for (region, made) in regions[owner].iter().enumerate() {
                let key = import(&engines[owner], made.1, &engines[user], peer);
                keys.insert((user, owner, region), key);
            }
        }
        Self { rng, fabric, engines, regions, model, peers, keys, posted: BTreeMap::new(), next: 0 }
    }

    /// Batches of reads and writes such that no two of them touch the same cell.
    fn post(&mut self, limits: kvx_core::capability::Limits) {
        let mut free: BTreeMap<(usize, usize), Vec<Cell>> = BTreeMap::new();
        for (engine, region) in (0..ENGINES).flat_map(|e| (0..REGIONS).map(move |r| (e, r))) {
            let mut cells: Vec<Cell> = (0..CELLS).map(|cell| (engine, region, cell)).collect();
            cells.shuffle(&mut self.rng);
            free.insert((engine, region), cells);
        }
        for _ in 0..self.rng.random_range(1..=10) {
            let initiator = self.rng.random_range(0..ENGINES);
            let target = (initiator + self.rng.random_range(1..ENGINES)) % ENGINES;
            let mode = if self.rng.random() { Mode::Read } else { Mode::Write };
            let most = limits.max_batch_segments.min(6);
            let mut pairs = Vec::new();
            for _ in 0..self.rng.random_range(0..=most) {
                let mut take = |engine| {
                    let region = self.rng.random_range(0..REGIONS);
                    free.get_mut(&(engine, region))?.pop()
                };
                if let (Some(local), Some(remote)) = (take(initiator), take(target)) {
                    pairs.push((local, remote));
                }
            }
            let note = (pairs.is_empty() || self.rng.random())
                .then(|| self.next.to_le_bytes()[..self.rng.random_range(4..=8)].to_vec());
            self.submit(initiator, target, mode, &pairs, note, limits.max_segment_bytes);
        }
    }

    fn submit(
        &mut self,
        initiator: usize,
        target: usize,
        mode: Mode,
        pairs: &[(Cell, Cell)],
        note: Option<Vec<u8>>,
        max_segment_bytes: u64,
    ) {
        let most = CELL.min(usize::try_from(max_segment_bytes).unwrap_or(CELL));
        let (mut spans, mut segments) = (Vec::new(), Vec::new());
        for &(local, remote) in pairs {
            let bytes = self.rng.random_range(1..=most);
            let mut span = |(engine, region, cell): Cell| {
                let offset = GUARD + cell * CELL + self.rng.random_range(0..=CELL - bytes);
                Span { engine, region, offset, bytes }
            };
            let (local, remote) = (span(local), span(remote));
            segments.push(PostedSegment {
                local: self.regions[initiator][local.region].1,
                remote: self.keys[&(initiator, target, remote.region)],
                local_offset: local.offset as u64,
                remote_offset: remote.offset as u64,
                bytes: bytes as u64,
            });
            let (from, to) = if mode == Mode::Read { (remote, local) } else { (local, remote) };
            let moved = self.model[from.engine][from.region][from.offset..][..bytes].to_vec();
            self.model[to.engine][to.region][to.offset..][..bytes].copy_from_slice(&moved);
            spans.push((from, to));
        }
        let id = self.next;
        self.next += 1;
        let peer = self.peers[&(initiator, target)];
        loop {
            let submitted = self.engines[initiator]
                .submit(TransferId(id), peer, mode, &segments, note.as_deref())
                .unwrap();
            if submitted == Submit::Submitted {
                break;
            }
            self.poll();
        }
        let (settled, notified) = (0, 0);
        let posted = Posted { initiator, target, segments: spans, note, settled, notified };
        self.posted.insert(id, posted);
    }

    fn poll(&mut self) {
        let engine = self.rng.random_range(0..ENGINES);
        for event in poll(&self.engines[engine]) {
            match event {
                Event::Settled { id, outcome } => {
                    assert!(outcome.is_done(), "{id}: {outcome:?}");
                    let posted = self.posted.get_mut(&id.0).unwrap();
                    assert_eq!(posted.initiator, engine, "{id} settled elsewhere");
                    posted.settled += 1;
                    self.check_arrived(id.0);
                }
                Event::Notified { peer, payload } => {
                    let note = payload.as_slice();
                    let (&id, posted) = self
                        .posted
                        .iter_mut()
                        .find(|(_, p)| p.target == engine && p.note.as_deref() == Some(note))
                        .expect("nobody posted this notification to this engine");
                    assert_eq!(self.peers[&(engine, posted.initiator)], peer);
                    posted.notified += 1;
                    self.check_arrived(id);
                }
                other => panic!("unexpected: {other:?}"),
            }
        }
    }

    /// Settled and notified mean that all data is where it belongs.
    fn check_arrived(&self, id: u64) {
        for (_, to) in &self.posted[&id].segments {
            let expected = &self.model[to.engine][to.region][to.offset..][..to.bytes];
            let mut found = vec![0; to.bytes];
            self.regions[to.engine][to.region].0.read_at(to.offset as u64, &mut found).unwrap();
            assert_eq!(found, expected, "transfer {id} is said to be there, and is not");
        }
    }

    fn run_until_quiet(&mut self) {
        let told = |p: &Posted| p.settled > 0 && (p.note.is_none() || p.notified > 0);
        for _ in 0..10_000 {
            if self.posted.values().all(told) {
                break;
            }
            self.poll();
        }
        for (engine, backend) in self.engines.iter().enumerate() {
            assert!(poll(backend).is_empty(), "engine {engine} hears more than it should");
        }
        for (id, posted) in std::mem::take(&mut self.posted) {
            assert_eq!(posted.settled, 1, "transfer {id} settled");
            assert_eq!(posted.notified, u32::from(posted.note.is_some()), "transfer {id} notified");
        }
        for (engine, regions) in self.regions.iter().enumerate() {
            for (region, (memory, _)) in regions.iter().enumerate() {
                let found = bytes(memory);
                assert_eq!(found, self.model[engine][region], "engine {engine} region {region}");
            }
        }
    }
}

/// Runs rounds of traffic and returns the log.
fn run(seed: u64, preset: &Preset, rounds: usize) -> (Vec<Entry>, u64) {
    println!("seed {seed}, preset {}", preset.name());
    let mut world = World::new(seed, preset);
    for _ in 0..rounds {
        world.post(preset.capabilities().limits);
        world.run_until_quiet();
    }
    assert!(world.next > 0);
    (world.fabric.log(), world.fabric.digest())
}

#[test]
fn every_byte_arrives_once_settled_once_notified_once() {
    for preset in presets() {
        for seed in seeds(200) {
            run(seed, &preset, 4);
        }
    }
}

#[test]
fn the_same_seed_gives_the_same_log_and_another_seed_another() {
    for preset in presets() {
        let mut digests = std::collections::BTreeSet::new();
        for seed in 0..20 {
            let (first, second) = (run(seed, &preset, 2), run(seed, &preset, 2));
            assert_eq!(first, second);
            digests.insert(first.1);
        }
        assert_eq!(digests.len(), 20);
    }
}
