//! The checker: holds what happens to what was promised.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kvx_core::backend::{Event, Outcome, SEVER_BOUND};
use kvx_core::capability::{Capabilities, Ordering, Revoke};
use kvx_core::id::{PeerId, RegionId, TransferId};
use kvx_core::memory::Region;
use kvx_core::transfer::Mode;

use super::flight::{Fate, Flight, Posted};
use super::memory::{Memory, Rest};
use super::violation::{Violation, ensure};

/// One life of an engine, as the checker numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LifeId(usize);

/// What an event told an engine, if it is of interest to a scenario.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Seen {
    /// A transfer of its own is over; whether it is done.
    Settled(TransferId, bool),
    /// A transfer of another engine's.
    Notified(TransferId),
    /// A peer is down: its handle is stale.
    PeerDown(PeerId),
    /// Something that this version does not know.
    Other,
}

/// Holds what engines are told, and every byte of their memory, to the contract.
///
/// A scenario tells it what engines do, when they have done it, and gives it every event. What it checks:
///
/// - *exact*: whoever is told *done*, or notified, has every byte; a byte is what it was or what is under way to it, and
///   nothing that is not under way changes: after *settled*, *revoked*, *notified* and, where access is revoked per peer,
///   *peer down*, nothing is under way; nor through a registration of one's own that was ended;
/// - *revoked*: the peer writes and reads nothing more: what it had under way is done only if all its data was there when
///   `revoke` returned, what it posts later never is, and not one byte of either arrives;
/// - *settled* once for each transfer that was posted, and for no other; as cancelled only where that was asked for;
/// - a notification after the data, at most once, with its own bytes, from the right peer; always, where the transfer is done
///   and the connection lives; never, where the data is not complete;
/// - *peer down* once, after the last *settled*, and nothing of the peer after it; without an error only where this side
///   ended the connection; within [`SEVER_BOUND`] of that;
/// - whatever fails for no reason that the scenario knows: its connection is over;
/// - where an order per peer is claimed: no write becomes visible after one that was posted later;
/// - handles that are never given out again;
/// - no more in flight than [`max_in_flight`](kvx_core::capability::Limits::max_in_flight).
///
/// It holds the fabric to a little more than the contract says in one point: a transfer that has settled is over at the
/// target, too, also when it failed.
pub struct Checker {
    capabilities: Capabilities,
    lives: Vec<Life>,
    flights: BTreeMap<u64, Flight>,
    /// Those that have not settled.
    open: BTreeSet<u64>,
    /// Connections that have ended for one side at least.
    ended: BTreeSet<u64>,
    /// Whose memory is reached no more through which connection.
    barred: BTreeSet<(LifeId, u64)>,
    /// What failed though nothing was known to be wrong: whose, to which peer. That peer must turn out to be gone.
    unexplained: Vec<(LifeId, PeerId, String)>,
    next_connection: u64,
    next_order: u64,
}

struct Life {
    name: String,
    /// None once it is dead.
    memory: Option<Memory>,
    handles: BTreeMap<PeerId, Handle>,
}

/// One engine's handle of another.
struct Handle {
    other: LifeId,
    connection: u64,
    /// Whether the other side's handle of the same connection is known.
    linked: bool,
    /// When this side ended it.
    severed: Option<Duration>,
    down: bool,
}

impl Checker {
    /// For a backend with these capabilities.
    #[must_use]
    pub const fn new(capabilities: Capabilities) -> Self {
        Self {
            capabilities,
            lives: Vec::new(),
            flights: BTreeMap::new(),
            open: BTreeSet::new(),
            ended: BTreeSet::new(),
            barred: BTreeSet::new(),
            unexplained: Vec::new(),
            next_connection: 0,
            next_order: 0,
        }
    }

    /// Holds the backend to these capabilities from now on.
    pub fn expect(&mut self, capabilities: Capabilities) {
        self.capabilities = capabilities;
    }

    /// An engine begins to live. Its region is filled with `contents`, which are as many bytes.
    ///
    /// # Errors
    ///
    /// The memory cannot be written.
    pub fn born(
        &mut self,
        name: impl Into<String>,
        region: &Region,
        contents: Vec<u8>,
    ) -> kvx_core::Result<LifeId> {
        let memory = Some(Memory::new(region, contents)?);
        self.lives.push(Life { name: name.into(), memory, handles: BTreeMap::new() });
        Ok(LifeId(self.lives.len() - 1))
    }

    pub(super) fn name(&self, life: LifeId) -> &str {
        self.lives.get(life.0).map_or("?", |life| &life.name)
    }

    fn memory(&mut self, life: LifeId) -> Option<&mut Memory> {
        self.lives.get_mut(life.0)?.memory.as_mut()
    }

    fn handle(&mut self, life: LifeId, peer: PeerId) -> Result<&mut Handle, Violation> {
        let Some(life) = self.lives.get_mut(life.0) else {
            return Err(Violation::new("no such engine"));
        };
        let name = &life.name;
        let handle = life.handles.get_mut(&peer);
        handle.ok_or_else(|| Violation::new(format!("{name} was never given the peer {peer}")))
    }

    /// A handshake gave an engine a handle of another. `theirs` is the other's handle, if it has one.
    ///
    /// # Errors
    ///
    /// The handle is of a peer that is down, or of another one.
    pub fn met(
        &mut self,
        me: LifeId,
        peer: PeerId,
        other: LifeId,
        theirs: Option<PeerId>,
    ) -> Result<(), Violation> {
        let name = self.name(me).to_owned();
        let known = match theirs {
            Some(theirs) => Some(self.handle(other, theirs)?.connection),
            None => None,
        };
        if let Ok(handle) = self.handle(me, peer) {
            ensure!(!handle.down, "{name} was given the handle {peer} of a dead peer again");
            ensure!(handle.other == other, "{name} has one handle {peer} of two peers");
        } else {
            let connection = known.unwrap_or(self.next_connection);
            self.next_connection = self.next_connection.max(connection + 1);
            let handle = Handle { other, connection, linked: false, severed: None, down: false };
            if let Some(life) = self.lives.get_mut(me.0) {
                life.handles.insert(peer, handle);
            }
        }
        if let (Some(theirs), Some(known)) = (theirs, known) {
            self.link((me, peer), (other, theirs), known)?;
        }
        Ok(())
    }

    /// Two handles turn out to be of one connection.
    fn link(
        &mut self,
        mine: (LifeId, PeerId),
        theirs: (LifeId, PeerId),
        known: u64,
    ) -> Result<(), Violation> {
        let name = self.name(mine.0).to_owned();
        let handle = self.handle(mine.0, mine.1)?;
        let before = std::mem::replace(&mut handle.connection, known);
        if before != known {
            ensure!(!handle.linked, "{name}: {} is of two connections", mine.1);
            if self.ended.contains(&before) {
                self.ended.insert(known);
            }
            let barred = self.barred.iter().filter(|(_, connection)| *connection == before);
            let barred: Vec<_> = barred.map(|(owner, _)| (*owner, known)).collect();
            self.barred.extend(barred);
        }
        self.handle(mine.0, mine.1)?.linked = true;
        self.handle(theirs.0, theirs.1)?.linked = true;
        Ok(())
    }

    /// Whether nothing is under way into a range of an engine's memory, or out of it.
    #[must_use]
    pub fn is_free(&self, life: LifeId, offset: u64, bytes: u64) -> bool {
        let memory = self.lives.get(life.0).and_then(|life| life.memory.as_ref());
        memory.is_some_and(|memory| memory.is_free(offset, bytes))
    }

    /// An engine writes its own memory, in a range that is [free](Self::is_free).
    ///
    /// # Errors
    ///
    /// It is outside the region.
    pub fn rewrite(&mut self, life: LifeId, offset: u64, bytes: &[u8]) -> Result<(), Violation> {
        self.memory(life).map_or(Ok(()), |memory| memory.rewrite(offset, bytes))
    }

    /// An engine is about to post a transfer. To be told before the call, since the transfer may settle within it.
    ///
    /// # Errors
    ///
    /// The scenario is wrong: a range is not free, or the peer unknown.
    pub fn posting(&mut self, posted: Posted) -> Result<(), Violation> {
        let Posted { id, from, peer, mode, segments, registrations, notify } = posted;
        let handle = self.handle(from, peer)?;
        let (to, connection) = (handle.other, handle.connection);
        let (source, target) = if mode == Mode::Read { (to, from) } else { (from, to) };
        let (mut targets, bare) = (Vec::new(), segments.is_empty());
        // The peer has ended this side's access: nothing may move.
        let barred = !bare && self.barred.contains(&(to, connection));
        let segments = if barred { Vec::new() } else { segments };
        for (mine, theirs, bytes) in segments {
            let (at, into) = if mode == Mode::Read { (theirs, mine) } else { (mine, theirs) };
            // The memory of a dead peer is nobody's business any more.
            let Some(new) = self.memory(source).and_then(|m| Some(m.expected(at, bytes)?.to_vec()))
            else {
                continue;
            };
            if let Some(memory) = self.memory(source) {
                memory.begin_reading(id.0, at, bytes);
            }
            if let Some(memory) = self.memory(target) {
                ensure!(memory.is_free(into, bytes), "the scenario uses a range twice");
                memory.expect(into, new);
                targets.push(into);
            }
        }
        let flight = Flight {
            from,
            to,
            peer,
            connection,
            mode,
            notify,
            notified: false,
            order: self.next_order,
            overtaken: false,
            cancelled: false,
            fate: Fate::Open,
            bare,
            registrations,
            targets,
            complete: barred.then_some(false),
        };
        self.next_order += 1;
        self.flights.insert(id.0, flight);
        self.open.insert(id.0);
        Ok(())
    }

    /// The call that posted it returned.
    ///
    /// # Errors
    ///
    /// More are in flight than may be.
    pub fn posted(&mut self, id: TransferId) -> Result<(), Violation> {
        let Some(flight) = self.flights.get(&id.0) else { return Ok(()) };
        let (from, peer) = (flight.from, flight.peer);
        let same = |id: &&u64| {
            self.flights.get(id).is_some_and(|other| other.from == from && other.peer == peer)
        };
        let count = self.open.iter().filter(same).count();
        let most = self.capabilities.limits.max_in_flight as usize;
        ensure!(count <= most, "{} has {count} in flight to one peer", self.name(from));
        Ok(())
    }

    /// The call was refused, or full: nothing was posted.
    ///
    /// # Errors
    ///
    /// Something was moved all the same, or it has settled.
    pub fn refused(&mut self, id: TransferId) -> Result<(), Violation> {
        let Some(flight) = self.flights.remove(&id.0) else { return Ok(()) };
        let was_open = self.open.remove(&id.0);
        ensure!(was_open && !flight.notified, "{id} was refused, and yet settled or notified");
        let (source, target) = (flight.source(), flight.target());
        if let Some(memory) = self.memory(source) {
            memory.end_reading(id.0);
        }
        for at in flight.targets {
            let rest = self.memory(target).map_or(Ok(Rest::UNSEEN), |memory| memory.freeze(at))?;
            ensure!(!rest.changed, "{id} was refused, and yet moved");
        }
        Ok(())
    }

    /// An engine asked that a transfer be given up.
    pub fn cancelled(&mut self, id: TransferId) {
        if let Some(flight) = self.flights.get_mut(&id.0) {
            flight.cancelled = true;
        }
    }

    /// An engine severed a peer.
    ///
    /// # Errors
    ///
    /// It never had that peer.
    pub fn severed(&mut self, me: LifeId, peer: PeerId, now: Duration) -> Result<(), Violation> {
        let handle = self.handle(me, peer)?;
        handle.severed.get_or_insert(now);
        let connection = handle.connection;
        self.ended.insert(connection);
        Ok(())
    }

    /// An engine ended a peer's access, and the call returned: from now on that peer moves nothing of its memory.
    ///
    /// # Errors
    ///
    /// As for [`severed`](Self::severed), and what [`Checker::check`] finds.
    pub fn revoked(&mut self, me: LifeId, peer: PeerId, now: Duration) -> Result<(), Violation> {
        self.severed(me, peer, now)?;
        self.access_ends(me, peer)
    }

    /// What a peer has under way in this engine's memory, or out of it, is at rest from now on, and it begins nothing more.
    fn access_ends(&mut self, me: LifeId, peer: PeerId) -> Result<(), Violation> {
        let connection = self.handle(me, peer)?.connection;
        self.barred.insert((me, connection));
        let theirs = |flight: &Flight| flight.to == me && flight.connection == connection;
        for id in self.open_ones(theirs) {
            self.rest(id, Mode::Write)?;
            self.rest(id, Mode::Read)?;
            if let Some(memory) = self.memory(me) {
                memory.end_reading(id);
            }
        }
        Ok(())
    }

    /// An engine ended a registration of its own, and the call returned: what it has under way through it moves no more.
    ///
    /// # Errors
    ///
    /// What [`Checker::check`] finds.
    pub fn deregistered(&mut self, me: LifeId, region: RegionId) -> Result<(), Violation> {
        let uses = |flight: &Flight| flight.from == me && flight.registrations.contains(&region);
        for id in self.open_ones(uses) {
            self.rest(id, Mode::Write)?;
            self.rest(id, Mode::Read)?;
        }
        Ok(())
    }

    /// Something of an engine's failed, or was refused, and the scenario knows of no fault that did it: then the connection must
    /// be over, as [`all_quiet`](Self::all_quiet) checks.
    pub fn unexplained(&mut self, me: LifeId, peer: PeerId, what: impl Into<String>) {
        self.unexplained.push((me, peer, what.into()));
    }

    /// To which peer a transfer was posted.
    pub(super) fn peer_of(&self, id: TransferId) -> Option<PeerId> {
        self.flights.get(&id.0).map(|flight| flight.peer)
    }

    /// How many transfers of an engine to one peer have not settled.
    #[must_use]
    pub fn in_flight_to(&self, me: LifeId, peer: PeerId) -> usize {
        self.open_ones(|flight| flight.from == me && flight.peer == peer).len()
    }

    fn open_ones(&self, which: impl Fn(&Flight) -> bool) -> Vec<u64> {
        let those = self.open.iter().filter(|id| self.flights.get(id).is_some_and(&which));
        those.copied().collect()
    }

    /// The target ranges of a transfer, if it is of this mode, change no more.
    fn rest(&mut self, id: u64, mode: Mode) -> Result<(), Violation> {
        let Some(flight) = self.flights.get_mut(&id).filter(|flight| flight.mode == mode) else {
            return Ok(());
        };
        if flight.complete.is_some() {
            return Ok(());
        }
        let (target, targets) = (flight.target(), std::mem::take(&mut flight.targets));
        let mut complete = true;
        for at in targets {
            let rest = self.memory(target).map_or(Ok(Rest::UNSEEN), |memory| memory.freeze(at))?;
            complete &= rest.landed;
        }
        if let Some(flight) = self.flights.get_mut(&id) {
            flight.complete = Some(complete);
        }
        Ok(())
    }

    /// An engine was killed: nothing that it posted moves any more, and its memory is gone.
    ///
    /// # Errors
    ///
    /// What [`Checker::check`] finds.
    pub fn killed(&mut self, me: LifeId) -> Result<(), Violation> {
        for id in self.open_ones(|flight| flight.from == me || flight.to == me) {
            let Some(flight) = self.flights.get_mut(&id) else { continue };
            let mine = flight.from == me;
            let (source, mode) = (flight.source(), flight.mode);
            if mine {
                flight.fate = Fate::Orphan;
                self.open.remove(&id);
            }
            if mine || mode == Mode::Write {
                self.rest(id, mode)?;
            }
            if let Some(memory) = self.memory(source) {
                memory.end_reading(id);
            }
        }
        let connections: Vec<u64> = match self.lives.get_mut(me.0) {
            Some(life) => {
                life.memory = None;
                let handles = std::mem::take(&mut life.handles);
                handles.into_values().map(|handle| handle.connection).collect()
            }
            None => Vec::new(),
        };
        self.ended.extend(connections);
        Ok(())
    }

    /// An engine was given an event.
    ///
    /// # Errors
    ///
    /// The event, or what it says of memory, breaks the contract.
    pub fn event(&mut self, me: LifeId, event: &Event) -> Result<Seen, Violation> {
        match event {
            Event::Settled { id, outcome } => {
                self.settled(me, *id, outcome)?;
                Ok(Seen::Settled(*id, outcome.is_done()))
            }
            Event::Notified { peer, payload } => self.notified(me, *peer, payload),
            Event::PeerDown { peer, error } => {
                self.down(me, *peer, error.is_none())?;
                Ok(Seen::PeerDown(*peer))
            }
            _ => Ok(Seen::Other),
        }
    }

    fn settled(&mut self, me: LifeId, id: TransferId, outcome: &Outcome) -> Result<(), Violation> {
        let name = self.name(me).to_owned();
        let Some(flight) = self.flights.get_mut(&id.0).filter(|flight| flight.from == me) else {
            return Err(Violation::new(format!("{name} was told of {id}, which it never posted")));
        };
        ensure!(flight.fate == Fate::Open, "{name} was told twice that {id} has settled");
        let (peer, cancelled, mode) = (flight.peer, flight.cancelled, flight.mode);
        let (source, done) = (flight.source(), outcome.is_done());
        flight.fate = if done { Fate::Done } else { Fate::NotDone };
        self.open.remove(&id.0);
        let handle = self.handle(me, peer)?;
        ensure!(!handle.down, "{name}: {id} settled after its peer was down");
        ensure!(
            !matches!(outcome, Outcome::Cancelled) || cancelled || handle.severed.is_some(),
            "{name}: {id} is cancelled, and nobody asked for it"
        );
        self.rest(id.0, mode)?;
        if let Some(memory) = self.memory(source) {
            memory.end_reading(id.0);
        }
        let complete = self.flights.get(&id.0).and_then(|flight| flight.complete);
        ensure!(!done || complete == Some(true), "{name}: {id} is done, and its data is not there");
        let overtaken = self.flights.get(&id.0).is_some_and(|flight| flight.overtaken);
        ensure!(!(done && overtaken), "{name}: {id} was visible only after one posted later");
        if done {
            self.is_visible(id.0)?;
        }
        Ok(())
    }

    /// Whether all that a transfer has under way is there.
    fn has_landed(&mut self, id: u64) -> Result<bool, Violation> {
        let Some(flight) = self.flights.get(&id) else { return Ok(true) };
        let (target, targets) = (flight.target(), flight.targets.clone());
        let mut there = true;
        for at in targets {
            there &= self.memory(target).map_or(Ok(true), |memory| memory.has_landed(at))?;
        }
        Ok(there)
    }

    /// All data of a write is there. Where an order is claimed, so must be that of those before it, unless they fail.
    fn is_visible(&mut self, id: u64) -> Result<(), Violation> {
        let Some(flight) = self.flights.get(&id) else { return Ok(()) };
        // A bare notification is ordered after nothing.
        let counts = flight.mode == Mode::Write && !flight.bare;
        if !counts || self.capabilities.ordering != Ordering::PerPeer {
            return Ok(());
        }
        let (from, peer, order) = (flight.from, flight.peer, flight.order);
        let before = self.open_ones(|other| {
            other.from == from
                && other.peer == peer
                && other.order < order
                && other.mode == Mode::Write
                && other.complete.is_none()
        });
        for id in before {
            let there = self.has_landed(id)?;
            if let Some(flight) = self.flights.get_mut(&id) {
                flight.overtaken |= !there;
            }
        }
        Ok(())
    }

    fn notified(&mut self, me: LifeId, peer: PeerId, payload: &[u8]) -> Result<Seen, Violation> {
        let name = self.name(me).to_owned();
        let handle = self.handle(me, peer)?;
        ensure!(!handle.down, "{name} was notified by {peer} after that was down");
        let connection = handle.connection;
        let mut bytes = [0; 8];
        for (byte, from) in bytes.iter_mut().zip(payload) {
            *byte = *from;
        }
        let id = u64::from_le_bytes(bytes);
        let Some(flight) = self.flights.get_mut(&id) else {
            return Err(Violation::new(format!("{name} was notified of {id}: never posted")));
        };
        ensure!(
            flight.to == me && flight.connection == connection,
            "{name} was notified of {id} by the wrong peer"
        );
        ensure!(flight.notify.as_deref() == Some(payload), "{name} was notified with other bytes");
        ensure!(!flight.notified, "{name} was notified twice of {id}");
        flight.notified = true;
        let (mode, source) = (flight.mode, flight.source());
        match mode {
            // What it was told of is its own from now on.
            Mode::Write => self.rest(id, Mode::Write)?,
            Mode::Read => {
                if let Some(memory) = self.memory(source) {
                    memory.end_reading(id);
                }
            }
        }
        let complete = self.flights.get(&id).and_then(|flight| flight.complete);
        let there = complete.unwrap_or(true) && self.has_landed(id)?;
        ensure!(there, "{name} was notified of {id}, and its data is not there");
        self.is_visible(id)?;
        Ok(Seen::Notified(TransferId(id)))
    }

    fn down(&mut self, me: LifeId, peer: PeerId, wanted: bool) -> Result<(), Violation> {
        let name = self.name(me).to_owned();
        let handle = self.handle(me, peer)?;
        ensure!(!handle.down, "{name} was told twice that {peer} is down");
        ensure!(
            !wanted || handle.severed.is_some(),
            "{name}: {peer} is down without an error, though this side did not end it"
        );
        handle.down = true;
        let connection = handle.connection;
        self.ended.insert(connection);
        let left = self.open_ones(|flight| flight.from == me && flight.peer == peer);
        ensure!(left.is_empty(), "{name}: {peer} is down before {left:?} have settled");
        if self.capabilities.revoke == Revoke::PerPeer {
            self.access_ends(me, peer)?;
        }
        Ok(())
    }

    /// An engine has polled until there was nothing more: what has had its time must have come.
    ///
    /// # Errors
    ///
    /// A severed peer is not down within the bound.
    pub fn drained(&mut self, me: LifeId, now: Duration) -> Result<(), Violation> {
        let Some(life) = self.lives.get(me.0) else { return Ok(()) };
        for (peer, handle) in life.handles.iter().filter(|(_, handle)| !handle.down) {
            let late = handle.severed.is_some_and(|at| now > at.saturating_add(SEVER_BOUND));
            ensure!(!late, "{}: {peer} is not down {SEVER_BOUND:?} after sever", life.name);
        }
        Ok(())
    }

    /// Compares every byte of every engine's memory; and, where an order per peer is claimed, what can be seen of it.
    ///
    /// # Errors
    ///
    /// The first that is wrong.
    pub fn check(&mut self) -> Result<(), Violation> {
        for life in &mut self.lives {
            if let Some(memory) = &mut life.memory {
                let checked = memory.check();
                checked.map_err(|wrong| Violation::new(format!("{}: {wrong}", life.name)))?;
            }
        }
        if self.capabilities.ordering == Ordering::PerPeer {
            let writes = |flight: &Flight| {
                flight.mode == Mode::Write && !flight.bare && flight.complete.is_none()
            };
            for id in self.open_ones(writes) {
                if self.has_landed(id)? {
                    self.is_visible(id)?;
                }
            }
        }
        Ok(())
    }

    /// Nothing is under way any more, no fault is left, and every engine that lives has polled everything: nothing may be
    /// missing.
    ///
    /// # Errors
    ///
    /// A transfer has not settled; a notification did not come, though its transfer is done and its connection lives.
    pub fn all_quiet(&mut self) -> Result<(), Violation> {
        if let Some(id) = self.open.first()
            && let Some(flight) = self.flights.get(id)
        {
            let name = self.name(flight.from);
            return Err(Violation::new(format!("{name}: {id} hangs: it never settled")));
        }
        for (id, flight) in &self.flights {
            let told = flight.notify.is_none() || flight.notified || flight.fate != Fate::Done;
            let lost = !told && !self.ended.contains(&flight.connection);
            ensure!(!lost, "{} was never notified of {id}", self.name(flight.to));
        }
        for (me, peer, what) in &self.unexplained {
            // The handles of a dead engine are gone.
            let handle = self.lives.get(me.0).and_then(|life| life.handles.get(peer));
            let over = handle.is_none_or(|handle| {
                handle.down || handle.severed.is_some() || self.ended.contains(&handle.connection)
            });
            ensure!(over, "{}: {what}, and nothing was wrong", self.name(*me));
        }
        self.check()
    }

    /// An engine is about to be closed: it ends every connection.
    pub fn closing(&mut self, me: LifeId, now: Duration) {
        let Some(life) = self.lives.get_mut(me.0) else { return };
        for handle in life.handles.values_mut() {
            handle.severed.get_or_insert(now);
            self.ended.insert(handle.connection);
        }
    }

    /// An engine was closed, and has polled everything.
    ///
    /// # Errors
    ///
    /// A transfer of it has not settled, or a peer is not down.
    pub fn closed(&mut self, me: LifeId) -> Result<(), Violation> {
        let left = self.open_ones(|flight| flight.from == me);
        let Some(life) = self.lives.get(me.0) else { return Ok(()) };
        ensure!(left.is_empty(), "{} is closed, and {left:?} have not settled", life.name);
        for (peer, handle) in &life.handles {
            ensure!(handle.down, "{} is closed, and {peer} is not down", life.name);
        }
        Ok(())
    }

    /// How many transfers of an engine have not settled.
    #[must_use]
    pub fn in_flight(&self, me: LifeId) -> Vec<TransferId> {
        self.open_ones(|flight| flight.from == me).into_iter().map(TransferId).collect()
    }
}

impl std::fmt::Debug for Checker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Checker")
            .field("engines", &self.lives.len())
            .field("transfers", &self.flights.len())
            .field("open", &self.open)
            .finish_non_exhaustive()
    }
}
