//! Everything that changes, under one lock. Memory is touched under the lock, too, a chunk at a time: so whatever ends
//! here (a transfer, a registration, a peer) has ended when the lock is let go.
//!
//! No call under the lock waits for anything.

use std::collections::{BTreeMap, VecDeque};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::task::{Context, Waker};

use kvx_core::backend::{Event, Outcome};
use kvx_core::id::{Incarnation, PeerId, RegionId, RemoteRegionId, TransferId};
use kvx_core::memory::Region;
use kvx_core::transfer::Mode;
use kvx_core::{Error, ErrorKind, Result};

use crate::cursor::Cursor;
use crate::error::{closed, gone, stale};
use crate::memory::Key;
use crate::message::Piece;

#[derive(Default)]
pub(crate) struct State {
    pub(crate) regions: BTreeMap<RegionId, Registered>,
    pub(crate) keys: BTreeMap<RemoteRegionId, Imported>,
    pub(crate) peers: BTreeMap<PeerId, Peer>,
    /// Transfers in flight, by ticket. What is settled is no longer here, and its memory is let go of.
    pub(crate) flights: BTreeMap<u64, Flight>,
    /// Transfers whose settled event was not polled yet: these still count, and their ids are taken.
    pub(crate) posted: BTreeMap<TransferId, Posted>,
    pub(crate) events: VecDeque<Event>,
    /// Connections that have not said yet whose they are.
    pub(crate) strangers: BTreeMap<u32, Arc<TcpStream>>,
    /// Slots and tickets are never used again, so a stale one is found nowhere.
    slots: u32,
    tickets: u64,
    pub(crate) offered: bool,
    pub(crate) closed: bool,
    /// Threads that run.
    pub(crate) threads: usize,
    /// Who waits until none does.
    pub(crate) closing: Vec<Waker>,
    /// To be woken once the lock is let go: tasks, and the threads that ask.
    pub(crate) wakers: Vec<Waker>,
    pub(crate) stirred: bool,
    /// Whether the descriptor is readable.
    pub(crate) signalled: bool,
}

/// A region of this side, and what a peer must know to reach it.
pub(crate) struct Registered {
    pub(crate) region: Region,
    pub(crate) secret: u64,
}

/// A key of a peer.
pub(crate) struct Imported {
    pub(crate) peer: PeerId,
    pub(crate) key: Key,
}

/// A peer.
pub(crate) struct Peer {
    pub(crate) incarnation: Incarnation,
    pub(crate) address: SocketAddr,
    /// What it must say when it dials this side.
    pub(crate) word: u64,
    pub(crate) stage: Stage,
    /// This side's requests, and the answers.
    pub(crate) outgoing: Option<Arc<TcpStream>>,
    /// The peer's requests, and the answers.
    pub(crate) incoming: Option<Arc<TcpStream>>,
    /// Tickets of what is posted, and not sent yet.
    pub(crate) outbox: VecDeque<u64>,
    /// Batches in flight, those included whose settled event was not polled yet.
    pub(crate) in_flight: u32,
    /// Its notifications that were not polled yet.
    pub(crate) untaken: usize,
    /// Who waits for the connection.
    waiting: Vec<Waker>,
}

/// How far a connection is. It only ever goes on, and `Over` is the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// It was offered, or its offer was accepted: nothing may be posted.
    Met,
    /// The handshake is done on this side, and a thread dials: batches may be posted, and wait.
    Dialling,
    /// There is a connection.
    Connected,
    /// It is over. Forgotten once *peer down* is polled.
    Over,
}

/// A transfer in flight.
pub(crate) struct Flight {
    pub(crate) id: TransferId,
    pub(crate) peer: PeerId,
    pub(crate) mode: Mode,
    /// This side's regions, in the order of the segments: held until it is settled.
    pub(crate) regions: Vec<Region>,
    pub(crate) cursor: Cursor,
    /// The other side's ranges.
    pub(crate) pieces: Vec<Piece>,
    /// Goes with a write, and after a read.
    pub(crate) note: Option<Vec<u8>>,
}

/// A transfer whose settled event was not polled yet.
pub(crate) struct Posted {
    pub(crate) peer: PeerId,
    pub(crate) ticket: u64,
}

impl State {
    /// Refuses to begin anything when it is closed.
    pub(crate) fn check_open(&self, operation: &'static str) -> Result<()> {
        if self.closed { Err(closed(operation)) } else { Ok(()) }
    }

    /// The slot of a new handle.
    pub(crate) fn slot(&mut self) -> Result<u32> {
        self.slots = self.slots.checked_add(1).ok_or_else(|| {
            Error::new(ErrorKind::Resources, "handle", "there are no more handles")
                .with_remedy("open the backend again")
        })?;
        Ok(self.slots)
    }

    pub(crate) fn ticket(&mut self) -> u64 {
        self.tickets += 1;
        self.tickets
    }

    /// The connection to an incarnation, if there is one.
    pub(crate) fn known(&self, incarnation: Incarnation) -> Option<PeerId> {
        let mut all = self.peers.iter();
        all.find(|(_, peer)| peer.incarnation == incarnation && peer.stage != Stage::Over)
            .map(|(handle, _)| *handle)
    }

    /// A peer that may be over, but was not forgotten.
    pub(crate) fn peer(&mut self, operation: &'static str, handle: PeerId) -> Result<&mut Peer> {
        self.peers.get_mut(&handle).ok_or_else(|| stale(operation, handle))
    }

    /// A peer that is not over.
    pub(crate) fn live(&mut self, operation: &'static str, handle: PeerId) -> Result<&mut Peer> {
        let peer = self.peer(operation, handle)?;
        if peer.stage == Stage::Over { Err(gone(operation, "the peer is down")) } else { Ok(peer) }
    }

    /// Takes the next step of a connection, and wakes who waits for it.
    pub(crate) fn advance(&mut self, handle: PeerId, stage: Stage) {
        if let Some(peer) = self.peers.get_mut(&handle) {
            peer.stage = stage;
            self.wakers.append(&mut peer.waiting);
            self.stirred = true;
        }
    }

    /// A transfer is over: from here on nothing of it touches this side's memory. Nothing happens where it is over already.
    pub(crate) fn settle(&mut self, ticket: u64, outcome: Outcome) {
        if let Some(flight) = self.flights.remove(&ticket) {
            self.events.push_back(Event::Settled { id: flight.id, outcome });
        }
    }

    /// A connection is over: everything in flight settles, then the peer is down. `why` is `None` where this side ended it.
    pub(crate) fn end(&mut self, handle: PeerId, why: Option<&'static str>) {
        let Some(peer) = self.peers.get_mut(&handle).filter(|peer| peer.stage != Stage::Over)
        else {
            return;
        };
        peer.outbox.clear();
        for stream in [peer.outgoing.take(), peer.incoming.take()].into_iter().flatten() {
            // Wakes its threads. An error says that the other side was faster.
            let _ = stream.shutdown(Shutdown::Both);
        }
        self.advance(handle, Stage::Over);
        let of_peer = self.flights.iter().filter(|(_, flight)| flight.peer == handle);
        for ticket in of_peer.map(|(ticket, _)| *ticket).collect::<Vec<_>>() {
            let outcome =
                why.map_or(Outcome::Cancelled, |why| Outcome::Failed(gone("transfer", why)));
            self.settle(ticket, outcome);
        }
        let error = why.map(|why| gone("connection", why));
        self.events.push_back(Event::PeerDown { peer: handle, error });
    }
}

impl Peer {
    pub(crate) const fn new(incarnation: Incarnation, address: SocketAddr, word: u64) -> Self {
        Self {
            incarnation,
            address,
            word,
            stage: Stage::Met,
            outgoing: None,
            incoming: None,
            outbox: VecDeque::new(),
            in_flight: 0,
            untaken: 0,
            waiting: Vec::new(),
        }
    }

    /// Has a task woken at the next step of the connection.
    pub(crate) fn wait(&mut self, task: &Context<'_>) {
        park(&mut self.waiting, task);
    }
}

/// Enters a task among those to be woken, once.
pub(crate) fn park(waiting: &mut Vec<Waker>, task: &Context<'_>) {
    if !waiting.iter().any(|waker| waker.will_wake(task.waker())) {
        waiting.push(task.waker().clone());
    }
}
