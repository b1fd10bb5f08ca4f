//! The state of a fabric, under one lock, moved only by calls.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use kvx_core::backend::{Event, Outcome};
use kvx_core::capability::{Capabilities, Ordering, Revoke};
use kvx_core::id::{Incarnation, PeerId};
use kvx_core::memory::Region;
use kvx_core::slots::Slots;
use kvx_core::{ErrorKind, Result};
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::engine::{Engine, Inbox, Life, Peer, Transfer};
use crate::error::closed;
use crate::fabric::FabricId;
use crate::fault::Flap;
use crate::preset::Preset;
use crate::rule::Rules;
use crate::schedule::{Lane, Schedule};
use crate::timing::{Nanos, Span, Timing, nanos};
use crate::trace::{Entry, Log, What};

/// An engine's number in its fabric. Never used again.
pub(crate) type EngineId = u64;

/// A connection's number in its fabric. Never used again.
pub(crate) type ConnectionId = u64;

/// What moves time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pace {
    /// Every poll.
    Polled,
    /// Only the fabric's own calls.
    Manual,
}

/// The state of a fabric.
pub(crate) struct Net {
    pub(crate) id: FabricId,
    pub(crate) pace: Pace,
    /// What happens is drawn from this stream.
    pub(crate) rng: ChaCha8Rng,
    /// Names of things, and secrets: a stream of their own, so that they do not depend on what has happened.
    names: ChaCha8Rng,
    pub(crate) log: Log,
    pub(crate) schedule: Schedule,
    pub(crate) rules: Rules,
    pub(crate) engines: BTreeMap<EngineId, Engine>,
    /// The newest engine of each name, and how it was opened.
    pub(crate) named: BTreeMap<Arc<str>, (EngineId, Preset)>,
    pub(crate) incarnations: BTreeMap<Incarnation, EngineId>,
    pub(crate) connections: BTreeMap<ConnectionId, Connection>,
    /// The connection of a pair of engines, the smaller number first.
    pub(crate) pairs: BTreeMap<(EngineId, EngineId), ConnectionId>,
    /// Pairs of names between which nothing passes, and how many partitions say so.
    pub(crate) cuts: BTreeMap<(Arc<str>, Arc<str>), u32>,
    pub(crate) flaps: BTreeMap<u64, Flap>,
    pub(crate) step: u64,
    next_engine: EngineId,
    next_connection: ConnectionId,
    next_number: u64,
    /// To be dropped once the lock is released.
    pub(crate) given_up: Vec<Region>,
}

/// A connection between two engines.
pub(crate) struct Connection {
    pub(crate) sides: [(EngineId, Option<PeerId>); 2],
}

impl Net {
    pub(crate) fn new(id: FabricId, pace: Pace) -> Self {
        let rng = ChaCha8Rng::seed_from_u64(id.seed);
        let mut names = rng.clone();
        names.set_stream(1);
        Self {
            id,
            pace,
            rng,
            names,
            log: Log::new(),
            schedule: Schedule::default(),
            rules: Rules::new(id.seed),
            engines: BTreeMap::new(),
            named: BTreeMap::new(),
            incarnations: BTreeMap::new(),
            connections: BTreeMap::new(),
            pairs: BTreeMap::new(),
            cuts: BTreeMap::new(),
            flaps: BTreeMap::new(),
            step: 0,
            next_engine: 0,
            next_connection: 1,
            next_number: 0,
            given_up: Vec::new(),
        }
    }

    pub(crate) fn open(&mut self, preset: Preset, name: Arc<str>) -> (EngineId, Incarnation) {
        let number = self.next_engine;
        self.next_engine += 1;
        let mut bytes = [0; 16];
        self.names.fill_bytes(&mut bytes);
        for (byte, salt) in bytes.iter_mut().zip(self.id.process) {
            *byte ^= salt;
        }
        let incarnation = Incarnation::from_bytes(bytes);
        self.named.insert(Arc::clone(&name), (number, preset.clone()));
        let engine = Engine {
            name,
            incarnation,
            preset,
            regions: Slots::default(),
            keys: Slots::default(),
            peers: Slots::default(),
            closing: BTreeSet::new(),
            in_flight: BTreeMap::new(),
            inbox: Inbox::default(),
            offered: false,
            life: Life::Up,
            stopped: false,
        };
        self.engines.insert(number, engine);
        self.incarnations.insert(incarnation, number);
        self.record(number, What::Opened);
        (number, incarnation)
    }

    /// The engine of a backend: there as long as the backend is.
    pub(crate) fn engine(&self, operation: &'static str, engine: EngineId) -> Result<&Engine> {
        self.engines.get(&engine).ok_or_else(|| closed(operation))
    }

    /// As [`engine`](Self::engine), to change it.
    pub(crate) fn engine_mut(
        &mut self,
        operation: &'static str,
        engine: EngineId,
    ) -> Result<&mut Engine> {
        self.engines.get_mut(&engine).ok_or_else(|| closed(operation))
    }

    pub(crate) fn side(&self, lane: Lane) -> Option<&Peer> {
        self.engines.get(&lane.engine)?.peers.get(lane.peer)
    }

    pub(crate) fn side_mut(&mut self, lane: Lane) -> Option<&mut Peer> {
        self.engines.get_mut(&lane.engine)?.peers.get_mut(lane.peer)
    }

    pub(crate) fn transfer_mut(&mut self, lane: Lane, number: u64) -> Option<&mut Transfer> {
        self.side_mut(lane)?.transfers.get_mut(&number)
    }

    /// What the other side of a connection posts to this one.
    pub(crate) fn reverse(&self, lane: Lane) -> Option<Lane> {
        let side = self.side(lane)?;
        Some(Lane { engine: side.engine, peer: side.reverse? })
    }

    /// Every lane of every engine.
    pub(crate) fn lanes(&self) -> Vec<Lane> {
        self.engines
            .iter()
            .flat_map(|(&engine, entry)| {
                entry.peers.handles().map(move |peer| Lane { engine, peer })
            })
            .collect()
    }

    /// The lanes of one engine.
    pub(crate) fn lanes_of(&self, engine: EngineId) -> Vec<Lane> {
        let peers = self.engines.get(&engine).into_iter().flat_map(|entry| entry.peers.handles());
        peers.map(|peer| Lane { engine, peer }).collect()
    }

    /// The lanes of other engines to this one.
    pub(crate) fn lanes_to(&self, engine: EngineId) -> Vec<Lane> {
        let mut lanes = self.lanes();
        lanes.retain(|lane| self.side(*lane).is_some_and(|side| side.engine == engine));
        lanes
    }

    pub(crate) fn record(&mut self, engine: EngineId, what: What) {
        if let Some(entry) = self.engines.get(&engine) {
            let engine = Arc::clone(&entry.name);
            self.record_by_name(engine, what);
        }
    }

    pub(crate) fn record_by_name(&mut self, engine: Arc<str>, what: What) {
        let at = Duration::from_nanos(self.schedule.now);
        self.log.push(Entry { step: self.step, at, engine, what });
    }

    pub(crate) fn give_up(&mut self, regions: impl IntoIterator<Item = Region>) {
        self.given_up.extend(regions);
    }

    /// A secret that a peer must know to reach a region.
    pub(crate) fn secret(&mut self) -> u64 {
        self.names.random()
    }

    /// A number that was never given out before, and larger than all that were.
    pub(crate) fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    /// `true` in one of two cases.
    pub(crate) fn coin(&mut self) -> bool {
        self.rng.random_ratio(1, 2)
    }

    /// Draws a duration.
    pub(crate) fn draw(&mut self, span: Span) -> Nanos {
        self.rng.random_range(nanos(span.shortest)..=nanos(span.longest))
    }

    /// How long things take for an engine.
    pub(crate) fn timing(&self, engine: EngineId) -> Timing {
        self.engines.get(&engine).map_or(Timing::ZERO, |entry| *entry.preset.timing())
    }

    /// The live connection of two engines, made if there is none.
    pub(crate) fn connection(&mut self, one: EngineId, other: EngineId) -> ConnectionId {
        let pair = (one.min(other), one.max(other));
        if let Some(connection) = self.pairs.get(&pair) {
            return *connection;
        }
        let number = self.next_connection;
        self.next_connection += 1;
        self.pairs.insert(pair, number);
        let sides = [(pair.0, None), (pair.1, None)];
        self.connections.insert(number, Connection { sides });
        number
    }

    /// Whether batches to a peer become visible in the order in which they were posted.
    pub(crate) fn is_ordered(&self, engine: EngineId) -> bool {
        self.capabilities(engine).is_some_and(|c| c.ordering == Ordering::PerPeer)
    }

    /// Whether a connection that is down gives no access.
    pub(crate) fn is_revoking(&self, engine: EngineId) -> bool {
        self.capabilities(engine).is_some_and(|c| c.revoke == Revoke::PerPeer)
    }

    fn capabilities(&self, engine: EngineId) -> Option<&Capabilities> {
        Some(self.engines.get(&engine)?.preset.capabilities())
    }

    /// Reports a transfer as settled.
    pub(crate) fn settle(&mut self, lane: Lane, number: u64, outcome: Outcome) {
        let side = self.side_mut(lane);
        let Some(transfer) = side.and_then(|side| side.transfers.remove(&number)) else { return };
        self.unschedule(transfer.wait);
        if transfer.notify.is_some()
            && let Some(target) = self.side(lane).map(|side| side.engine)
            && let Some(target) = self.engines.get_mut(&target)
        {
            // It may have waited for room there.
            target.inbox.waiting.retain(|waiting| *waiting != (lane, number));
        }
        self.give_up(transfer.work.locals.into_iter().map(|(_, region)| region));
        self.record(lane.engine, What::Settled { id: transfer.id, how: (&outcome).into() });
        if let Some(entry) = self.engines.get_mut(&lane.engine) {
            entry.inbox.events.push_back(Event::Settled { id: transfer.id, outcome });
        }
    }
}

/// The error of a transfer whose data was lost for good.
pub(crate) fn lost() -> kvx_core::Error {
    kvx_core::Error::new(ErrorKind::Fabric, "transfer", "the fabric gave up sending data again")
        .with_backend(crate::error::BACKEND)
}
