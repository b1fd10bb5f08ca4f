//! The fabric: the state of all engines, under one lock, moved only by calls.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use kvx_core::Result;
use kvx_core::backend::{Event, Outcome};
use kvx_core::capability::{Capabilities, Ordering, Revoke};
use kvx_core::id::{Incarnation, PeerId};
use kvx_core::memory::Region;
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::backend::MockBackend;
use crate::engine::{Closing, Engine, Peer, PeerState};
use crate::error::{closed, down};
use crate::preset::Preset;
use crate::slots::Slots;
use crate::trace::{Entry, Log, What};

/// A fabric in memory, to which any number of engines of one process belong. Clones are the same fabric.
///
/// Everything that it does is decided by its seed and by the calls made to it: there is no clock and no thread.
#[derive(Clone)]
pub struct Fabric {
    pub(crate) shared: Arc<Shared>,
}

/// What all clones of a [`Fabric`] share.
pub(crate) struct Shared {
    pub(crate) id: FabricId,
    net: Mutex<Net>,
}

/// What tells one fabric from another in the bytes that engines exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FabricId {
    pub(crate) seed: u64,
    /// Drawn at random for a fabric that backends opened by name share, so that two processes' fabrics differ. Otherwise
    /// zero, so that the bytes follow from the seed.
    pub(crate) process: [u8; 16],
}

impl fmt::Display for FabricId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {}", self.seed)?;
        if self.process != [0; 16] {
            write!(f, " of process {}", Incarnation::from_bytes(self.process))?;
        }
        Ok(())
    }
}

impl Fabric {
    /// A fabric whose every choice follows from `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self::with_process(seed, [0; 16])
    }

    pub(crate) fn with_process(seed: u64, process: [u8; 16]) -> Self {
        let id = FabricId { seed, process };
        Self { shared: Arc::new(Shared { id, net: Mutex::new(Net::new(id)) }) }
    }

    /// The seed.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.shared.id.seed
    }

    /// Opens an engine's backend. The name is for people: it appears in the log, and opening another backend with the same
    /// name gives another engine, with an incarnation of its own.
    #[must_use]
    pub fn backend(&self, preset: Preset, name: impl Into<Arc<str>>) -> Arc<MockBackend> {
        let (name, capabilities) = (name.into(), preset.capabilities().clone());
        let transport = preset.transport();
        let (engine, incarnation) = self.with(|net| net.open(preset, name));
        Arc::new(MockBackend::new(self.clone(), engine, incarnation, capabilities, transport))
    }

    /// Makes up to `steps` steps of virtual time, as a poll by any engine would, and returns how many there were to make.
    pub fn advance(&self, steps: u32) -> u32 {
        self.with(|net| {
            let mut made = 0;
            while made < steps && net.step() {
                made += 1;
            }
            made
        })
    }

    /// The event log, oldest entry first: the newest 65,536 entries.
    #[must_use]
    pub fn log(&self) -> Vec<Entry> {
        self.with(|net| net.log.entries())
    }

    /// A digest of the whole event log, including what [`log`](Self::log) no longer holds.
    #[must_use]
    pub fn digest(&self) -> u64 {
        self.with(|net| net.log.digest())
    }

    /// Runs `act` on the state. Regions that it gives up are dropped after the lock is, because what backs them is
    /// somebody else's code.
    pub(crate) fn with<R>(&self, act: impl FnOnce(&mut Net) -> R) -> R {
        let (result, _given_up) = {
            let mut net = self.shared.net.lock().unwrap_or_else(PoisonError::into_inner);
            let result = act(&mut net);
            (result, std::mem::take(&mut net.given_up))
        };
        result
    }
}

impl fmt::Debug for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fabric").field("seed", &self.seed()).finish_non_exhaustive()
    }
}

/// An engine's number in its fabric. Never used again.
pub(crate) type EngineId = u64;

/// A connection's number in its fabric. Never used again.
pub(crate) type ConnectionId = u64;

/// The state of a fabric.
pub(crate) struct Net {
    pub(crate) id: FabricId,
    pub(crate) rng: ChaCha8Rng,
    pub(crate) log: Log,
    pub(crate) engines: BTreeMap<EngineId, Engine>,
    pub(crate) incarnations: BTreeMap<Incarnation, EngineId>,
    pub(crate) connections: BTreeMap<ConnectionId, Connection>,
    /// The connection of a pair of engines, the smaller number first.
    pub(crate) pairs: BTreeMap<(EngineId, EngineId), ConnectionId>,
    /// Lanes that have something to do, in an order that follows from the calls.
    pub(crate) active: Vec<(EngineId, PeerId)>,
    pub(crate) step: u64,
    next_engine: EngineId,
    next_connection: ConnectionId,
    /// To be dropped once the lock is released.
    given_up: Vec<Region>,
}

/// A connection between two engines.
pub(crate) struct Connection {
    pub(crate) sides: [(EngineId, Option<PeerId>); 2],
}

impl Net {
    fn new(id: FabricId) -> Self {
        Self {
            id,
            rng: ChaCha8Rng::seed_from_u64(id.seed),
            log: Log::new(),
            engines: BTreeMap::new(),
            incarnations: BTreeMap::new(),
            connections: BTreeMap::new(),
            pairs: BTreeMap::new(),
            active: Vec::new(),
            step: 0,
            next_engine: 0,
            next_connection: 1,
            given_up: Vec::new(),
        }
    }

    fn open(&mut self, preset: Preset, name: Arc<str>) -> (EngineId, Incarnation) {
        let number = self.next_engine;
        self.next_engine += 1;
        let mut bytes = [0; 16];
        self.rng.fill_bytes(&mut bytes);
        for (byte, salt) in bytes.iter_mut().zip(self.id.process) {
            *byte ^= salt;
        }
        let incarnation = Incarnation::from_bytes(bytes);
        let engine = Engine {
            name,
            incarnation,
            preset,
            regions: Slots::default(),
            keys: Slots::default(),
            peers: Slots::default(),
            closing: BTreeSet::new(),
            in_flight: BTreeMap::new(),
            events: VecDeque::new(),
            offered: false,
            closed: false,
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

    pub(crate) fn peer_mut(&mut self, engine: EngineId, peer: PeerId) -> Option<&mut Peer> {
        self.engines.get_mut(&engine)?.peers.get_mut(peer)
    }

    pub(crate) fn record(&mut self, engine: EngineId, what: What) {
        if let Some(entry) = self.engines.get(&engine) {
            let engine = Arc::clone(&entry.name);
            self.log.push(Entry { step: self.step, engine, what });
        }
    }

    pub(crate) fn give_up(&mut self, regions: impl IntoIterator<Item = Region>) {
        self.given_up.extend(regions);
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

    /// Ends a connection: by `by`, for the reason that the other side is told.
    pub(crate) fn end(&mut self, connection: ConnectionId, by: EngineId, reason: &'static str) {
        let Some(Connection { sides }) = self.connections.remove(&connection) else { return };
        self.pairs.remove(&(sides[0].0, sides[1].0));
        for (engine, peer) in sides {
            let Some(peer) = peer else { continue };
            let mine = engine == by;
            let Some(entry) = self.engines.get_mut(&engine) else { continue };
            entry.closing.insert(peer);
            if let Some(side) = entry.peers.get_mut(peer) {
                let reason = (!mine).then_some(reason);
                side.state = PeerState::Closing(Closing { reason, revoked: false });
            }
            self.tidy(engine, peer);
        }
    }

    /// Ends the other side's access to the memory of one side of a connection that has ended.
    pub(crate) fn end_access(&mut self, engine: EngineId, peer: PeerId) {
        let Some(side) = self.peer_mut(engine, peer) else { return };
        let (other, reverse) = (side.engine, side.reverse);
        if let Some(side) = reverse.and_then(|reverse| self.peer_mut(other, reverse))
            && let PeerState::Closing(closing) = &mut side.state
        {
            closing.revoked = true;
        }
    }

    /// Ends everything of an engine. What it had in flight settles at once.
    pub(crate) fn close(&mut self, engine: EngineId, reason: &'static str) {
        let Some(entry) = self.engines.get_mut(&engine) else { return };
        if std::mem::replace(&mut entry.closed, true) {
            return;
        }
        let connections: Vec<_> = entry
            .peers
            .handles()
            .filter_map(|peer| entry.peers.get(peer))
            .map(|peer| peer.connection)
            .collect();
        let incarnation = entry.incarnation;
        let regions = entry.regions.drain();
        self.give_up(regions.into_iter().map(|registered| registered.region));
        self.incarnations.remove(&incarnation);
        for connection in connections {
            self.end(connection, engine, reason);
        }
        while self.engines.get(&engine).is_some_and(|entry| !entry.closing.is_empty()) {
            self.settle_closing(engine);
        }
        self.record(engine, What::Closed);
    }

    /// Forgets an engine whose backend is gone.
    pub(crate) fn forget(&mut self, engine: EngineId) {
        self.close(engine, "the peer is gone");
        self.engines.remove(&engine);
    }

    /// Brings a lane's bookkeeping up to date after something in it changed.
    pub(crate) fn tidy(&mut self, engine: EngineId, peer: PeerId) {
        let Some(side) = self.peer_mut(engine, peer) else { return };
        if let PeerState::Closing(closing) = side.state
            && side.transfers.is_empty()
        {
            side.state = PeerState::Down;
            if self.capabilities(engine).is_some_and(|c| c.revoke == Revoke::PerPeer) {
                self.end_access(engine, peer);
            }
            let notes = self.peer_mut(engine, peer).map_or(0, |side| side.notes.len());
            for _ in 0..notes {
                if self.rng.random_bool(0.5) {
                    self.deliver(engine, peer, 0);
                } else {
                    self.lose(engine, peer);
                }
            }
            let error = closing.reason.map(|reason| down("connection", reason));
            if let Some(entry) = self.engines.get_mut(&engine) {
                entry.closing.remove(&peer);
                entry.events.push_back(Event::PeerDown { peer, error });
            }
            self.record(engine, What::PeerDown(peer));
        }
        self.set_active(engine, peer);
    }

    fn lose(&mut self, engine: EngineId, peer: PeerId) {
        if let Some(note) = self.peer_mut(engine, peer).and_then(|side| side.notes.pop_front()) {
            self.record(engine, What::Lost { peer, bytes: note.len() });
        }
    }

    fn set_active(&mut self, engine: EngineId, peer: PeerId) {
        let at = self.active.len();
        let Some(side) = self.peer_mut(engine, peer) else { return };
        match (side.active_at, side.is_idle()) {
            (None, false) => {
                side.active_at = Some(at);
                self.active.push((engine, peer));
            }
            (Some(at), true) => {
                side.active_at = None;
                self.active.swap_remove(at);
                if let Some(&(engine, peer)) = self.active.get(at)
                    && let Some(side) = self.peer_mut(engine, peer)
                {
                    side.active_at = Some(at);
                }
            }
            _ => {}
        }
    }

    /// Whether batches to a peer become visible in the order in which they were posted.
    pub(crate) fn is_ordered(&self, engine: EngineId) -> bool {
        self.capabilities(engine).is_some_and(|c| c.ordering == Ordering::PerPeer)
    }

    fn capabilities(&self, engine: EngineId) -> Option<&Capabilities> {
        Some(self.engines.get(&engine)?.preset.capabilities())
    }

    /// Reports a transfer of a lane as settled.
    pub(crate) fn settle(
        &mut self,
        engine: EngineId,
        peer: PeerId,
        index: usize,
        outcome: Outcome,
    ) {
        let side = self.peer_mut(engine, peer);
        let Some(transfer) = side.and_then(|side| side.transfers.remove(index)) else { return };
        self.give_up(transfer.work.locals.into_iter().map(|(_, region)| region));
        self.record(engine, What::Settled { id: transfer.id, how: (&outcome).into() });
        if let Some(entry) = self.engines.get_mut(&engine) {
            entry.events.push_back(Event::Settled { id: transfer.id, outcome });
        }
    }
}
